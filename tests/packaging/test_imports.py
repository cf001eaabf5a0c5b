"""Modules of fp8stack import each other at the top of the file, and never in a circle."""

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest
from code_size import ROOT, library_files

LATE = {  # modules with such imports in functions or under TYPE_CHECKING, and how many; it only ever shrinks
    "fp8stack/capability.py": 1,
    "fp8stack/cli/comm_model.py": 1,
    "fp8stack/cli/convert.py": 1,
    "fp8stack/cli/doctor.py": 1,
    "fp8stack/cli/estimate.py": 1,
    "fp8stack/cli/inspect.py": 1,
    "fp8stack/cli/levels.py": 1,
    "fp8stack/cli/plan.py": 1,
    "fp8stack/comm/__init__.py": 9,
    "fp8stack/comm/nvlink.py": 3,
    "fp8stack/comm/uneven.py": 1,
    "integrations/msamp/finder.py": 1,
}


def name_of(path):
    """Return the module's name: kernels/ops.py is fp8stack.kernels.ops."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "fp8stack" else ("fp8stack", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in library_files()}


def imported_by(module, node):
    """Return the modules of fp8stack that an import statement in `module` names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in FILES]
    base = node.module or ""
    if node.level:
        package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
        base = ".".join([*package.split(".")[: 1 - node.level or None], *base.split(".")]).strip(
            "."
        )
    whole = [f"{base}.{alias.name}" for alias in node.names]
    found = [name if name in FILES else base for name in whole]
    return [name for name in dict.fromkeys(found) if name in FILES]


def imports(module):
    """Yield the imports of a module and whether each stands at the top of the file."""
    tree = ast.parse(FILES[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, node in tree.body


def test_imports_of_own_modules_stand_at_the_top():
    late = Counter()
    for module, path in FILES.items():
        for node, at_top in imports(module):
            if imported_by(module, node) and not at_top:
                late[path.relative_to(ROOT).as_posix()] += 1
    assert late == LATE


def test_no_module_is_imported_in_a_circle():
    graph = {
        module: {
            name for node, at_top in imports(module) if at_top for name in imported_by(module, node)
        }
        for module in FILES
    }
    assert len(graph) > 100
    assert sum(map(len, graph.values())) > 500
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
