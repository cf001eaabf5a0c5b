"""Count the lines of code of the library and of its tests, and fail above the caps.

Docstrings, comments and blank lines do not count, because explaining more must not cost features. Prints one line for
each folder. `make lint` runs it: python tests/packaging/code_size.py
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARY_CAP = 18_233
TESTS_CAP = 30_223
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def library_files() -> list[Path]:
    """Return the modules of the library, each once: fp8stack/ has links to the two other folders."""
    files = []
    for folder in ("fp8stack", "kernels", "integrations"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            linked = folder == "fp8stack" and path.relative_to(ROOT).parts[1] in (
                "kernels",
                "integrations",
            )
            if not linked:
                files.append(path)
    return files


def lines_of_code(text: str) -> int:
    """Return how many lines of a module are neither blank nor only a comment or docstring."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node):
            prose.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def count(files: list[Path]) -> Counter[str]:
    """Return the lines of code by folder."""
    sizes: Counter[str] = Counter()
    for path in files:
        sizes[str(path.parent.relative_to(ROOT))] += lines_of_code(path.read_text())
    return sizes


def main() -> int:
    status = 0
    tests = sorted((ROOT / "tests").rglob("*.py"))
    for what, files, cap in (
        ("library", library_files(), LIBRARY_CAP),
        ("tests", tests, TESTS_CAP),
    ):
        sizes = count(files)
        for folder, size in sizes.items():
            print(f"{size:7,} {folder}")
        total = sum(sizes.values())
        print(f"{total:7,} lines of code in the {what}, of at most {cap:,}")
        if total > cap:
            print(f"The {what} has grown above its cap. Simplify, or raise the cap in {__file__}.")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
