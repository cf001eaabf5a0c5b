"""Modules of fp8stack import each other at the top of the file, and never in a circle."""

import ast
from graphlib import CycleError, TopologicalSorter

import pytest
from code_size import ROOT, library_files


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
    """Yield the imports of a module, and whether each is carried out when the module is imported."""
    todo = [(ast.parse(FILES[module].read_text()), True)]
    while todo:
        parent, early = todo.pop()
        for node in ast.iter_child_nodes(parent):
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            inside = early and not isinstance(node, ast.FunctionDef) and not typing_only
            todo.append((node, inside))
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield node, early


def test_imports_of_own_modules_stand_at_the_top():
    """Not in functions, nor under TYPE_CHECKING; lazy imports are for other packages."""
    late = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for module, path in FILES.items()
        for node, early in imports(module)
        if not early and imported_by(module, node)
    ]
    assert not late


def test_no_module_is_imported_in_a_circle():
    graph = {
        module: {
            name for node, early in imports(module) if early for name in imported_by(module, node)
        }
        for module in FILES
    }
    assert len(graph) > 100
    assert sum(map(len, graph.values())) > 500
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
