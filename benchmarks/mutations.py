"""How many small faults do the tests find? Plants faults at random and counts those that make a test fail.

    python benchmarks/mutations.py --tree . --faults 100 --seed 0 --jobs 16 --output benchmarks/results/mutations.jsonl

A fault changes one place in `kernels/reference`, `fp8stack/optim`, `fp8stack/comm` or `fp8stack/nn`: a comparison or an
arithmetic operator becomes its neighbour, a number grows by one, a truth value turns, a condition is negated, an
assignment through a subscript or an augmented one disappears. The same number is drawn in each of the four folders.

First the tests run once (as many as end within `--map-seconds`), and `call_map.py` notes which tests call which
functions. Then each fault is planted in a copy of the tree, and the tests that call its function run, the quickest
first, until one fails (the fault is found; "unclear" if that test fails without it) or `--seconds` are used up (it
survives). So the share that is found is a lower bound, by the same rule for every tree.

Limits: faults that change nothing (a tolerance of a check, a faster path) survive by nature; two trees with different
code get different faults, so compare shares, whose standard error is some 4 % for 100 faults.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from common import ROOT, append_records

FOLDERS = ("kernels/reference", "fp8stack/optim", "fp8stack/comm", "fp8stack/nn")
RESULTS = ROOT / "benchmarks" / "results" / "mutations.jsonl"
NEIGHBOURS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One changed place: `text` stands where lines and columns from `start` to `end` of `file` were."""

    file: str  # from the root of the tree
    function: tuple[str, int]  # its qualified name and first line, as code objects have them
    start: tuple[int, int]  # line from 1, column in bytes
    end: tuple[int, int]
    text: str


def faults_of(tree: Path, file: Path) -> list[Fault]:
    """Return every fault that can be planted in the functions of a file."""
    found: list[Fault] = []
    name = file.relative_to(tree).as_posix()

    def add(node: ast.AST, text: str, where: tuple[str, int]) -> None:
        start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        found.append(Fault(name, where, start, end, text))

    def visit(node: ast.AST, scope: tuple[str, ...], where: tuple[str, int] | None) -> None:
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments)):
            return  # words of messages, and annotations
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            line = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            inner = (*scope, node.name)
            if isinstance(node, ast.FunctionDef):
                where, inner = (".".join(inner), line), (*inner, "<locals>")
            for child in node.body:
                visit(child, inner, where)
            return
        if where is not None:
            for text in changes_of(node):
                add(node, text, where)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, scope, where)

    visit(ast.parse(file.read_text()), (), None)
    return found


def changes_of(node: ast.AST) -> list[str]:
    """Return what can stand in place of one node."""
    copy: ast.AST
    if isinstance(node, ast.Compare) and type(node.ops[0]) in NEIGHBOURS:
        copy = ast.Compare(
            node.left, [NEIGHBOURS[type(node.ops[0])](), *node.ops[1:]], node.comparators
        )
        return [f"({ast.unparse(copy)})"]
    if isinstance(node, ast.BinOp) and type(node.op) in NEIGHBOURS:
        if isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            return []
        return [f"({ast.unparse(ast.BinOp(node.left, NEIGHBOURS[type(node.op)](), node.right))})"]
    if isinstance(node, ast.BoolOp):
        return [f"({ast.unparse(ast.BoolOp(NEIGHBOURS[type(node.op)](), node.values))})"]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        return [f"({ast.unparse(node.operand)})"]
    if isinstance(node, ast.IfExp):
        return [f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"]
    if isinstance(node, ast.Constant) and not isinstance(
        node.value, (str, bytes, type(None), type(...))
    ):
        return [str(not node.value) if isinstance(node.value, bool) else f"({node.value!r} + 1)"]
    if isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
    ):
        return ["pass"]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ["pass"]
    return []


def draw(tree: Path, count: int, seed: int, folders: Sequence[str]) -> list[Fault]:
    """Draw faults, the same number in each folder."""
    drawn: list[Fault] = []
    for folder in folders:
        dice = random.Random(f"{seed} {folder}")
        files = sorted((tree / folder).rglob("*.py"))
        possible = [fault for file in files for fault in faults_of(tree, file)]
        drawn += dice.sample(possible, min(count // len(folders), len(possible)))
    return drawn


def plant(tree: Path, fault: Fault) -> str:
    """Write the fault into its file; return the file's text before."""
    path = tree / fault.file
    before = path.read_text()
    lines = before.encode().splitlines(keepends=True)
    (first, left), (last, right) = fault.start, fault.end
    head, tail = lines[first - 1][:left], lines[last - 1][right:]
    lines[first - 1 : last] = [head + fault.text.encode() + tail]
    changed = b"".join(lines).decode()
    ast.parse(changed)
    path.write_text(changed)
    return before


def copy_tree(tree: Path, folder: Path) -> dict[str, str]:
    """Copy a tree; return the environment in which tests import the library from there."""
    ignore = shutil.ignore_patterns(
        ".git", ".venv", "results", "runs", "*cache*", ".base", ".*-site"
    )
    shutil.copytree(tree, folder / "tree", symlinks=True, ignore=ignore)
    site = folder / "site"  # the root itself on sys.path would make `kernels` importable
    site.mkdir()
    (site / "fp8stack").symlink_to(folder / "tree" / "fp8stack")
    (site / "call_map.py").write_text((ROOT / "benchmarks" / "call_map.py").read_text())
    (site / "sitecustomize.py").write_text(
        "import os\nif 'FP8STACK_CALL_MAP' in os.environ:\n    import call_map\n    call_map.start()\n"
    )
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    keep = {k: v for k, v in os.environ.items() if k != "FP8STACK_CALL_MAP"}
    threads = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**keep, **threads, "PYTHONPATH": path, "TMPDIR": str(folder)}


def pytest(
    tree: Path, env: dict[str, str], *arguments: str, seconds: float, log: Any = subprocess.DEVNULL
) -> int:
    """Run pytest in a tree; return its exit code, 1 where it ran out of time (a hang is found too)."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    with subprocess.Popen(
        command, cwd=tree, env=env, stdout=log, stderr=log, start_new_session=True
    ) as process:  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return 1


def map_tests(
    tree: Path, folder: Path, jobs: int, tests: list[str], limit: float
) -> tuple[dict[tuple[str, str, int], set[str]], dict[str, float]]:
    """Run the suite once; return the tests that call each function, and the seconds of those that pass."""
    env = copy_tree(tree, folder)
    calls = folder / "calls"
    calls.mkdir()
    env["FP8STACK_CALL_MAP"] = str(calls)
    parallel = ["-n", str(jobs), "--dist", "worksteal"] if jobs > 1 else []
    pytest(folder / "tree", env, "-p", "call_map", *parallel, *tests, seconds=limit)
    phases = defaultdict(list)
    for file in calls.glob("*.phases"):
        for line in file.read_text().splitlines():
            outcome, took, test = line.split("\t", 2)
            phases[test].append((outcome, float(took)))
    seconds = {
        test: sum(took for _, took in found)
        for test, found in phases.items()
        if len(found) >= 3 and {outcome for outcome, _ in found} == {"passed"}
    }
    callers = defaultdict(set)
    root = (folder / "tree").resolve().as_posix() + "/"
    for lines in calls.glob("*.calls"):
        for line in lines.read_text().splitlines():
            fields = line.split("\t")
            if len(fields) == 4 and fields[3] in seconds:
                file = Path(fields[0]).resolve().as_posix().removeprefix(root)
                callers[file, fields[1], int(fields[2])].add(fields[3])
    return callers, seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tree", type=Path, default=ROOT, help="the checkout to plant faults in copies of"
    )
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folders", nargs="+", default=FOLDERS, choices=FOLDERS)
    parser.add_argument("--tests", nargs="+", default=["tests"], help="what the tree's tests are")
    parser.add_argument(
        "--map-seconds", type=float, default=3600, help="for the run that maps them"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=120, help="of tests for each fault")
    parser.add_argument(
        "--name", default="", help="the record's variant, such as the tree's commit"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.faults < len(options.folders):
        parser.error("--faults: at least one for each folder")
    tree = options.tree.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder, began = Path(temporary), time.time()
        (folder / "map").mkdir()
        callers, seconds = map_tests(
            tree, folder / "map", options.jobs, options.tests, options.map_seconds
        )
        print(
            f"{len(seconds)} tests pass, {len(callers)} functions are called, {time.time() - began:.0f} s"
        )
        free: SimpleQueue[tuple[Path, dict[str, str]]] = SimpleQueue()
        for job in range(options.jobs):
            (folder / str(job)).mkdir()
            free.put((folder / str(job) / "tree", copy_tree(tree, folder / str(job))))

        def run(fault: Fault | None, chosen: list[str]) -> tuple[bool, list[str]]:
            """Return whether the tests pass, and the names of those that fail."""
            copy, env = free.get()
            before = plant(copy, fault) if fault else ""
            listed, log = copy.parent / "chosen.txt", copy.parent / "log"
            listed.write_text("\n".join(chosen))
            try:
                with log.open("w") as file:
                    limit = 2 * options.seconds + 60
                    code = pytest(copy, env, "-x", "-rf", f"@{listed}", seconds=limit, log=file)
            finally:
                if fault:
                    (copy / fault.file).write_text(before)
                free.put((copy, env))
            return code == 0, [name for name in chosen if f"FAILED {name}" in log.read_text()]

        def test(fault: Fault) -> str:
            tests = sorted(callers.get((fault.file, *fault.function), ()), key=lambda t: seconds[t])
            chosen, left = [], options.seconds
            for name in tests:
                left -= seconds[name]
                if left < 0 and chosen:
                    break
                chosen.append(name)
            if not chosen:
                return "never called"
            passed, failed = run(fault, chosen)
            if passed:
                return "survived"
            # Where no single test failed, the fault broke an import or hung.
            return "unclear" if failed and not run(None, failed)[0] else "found"

        drawn = draw(tree, options.faults, options.seed, options.folders)
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(test, drawn))
    records = []
    for folder in options.folders:
        mine = [(f, o) for f, o in zip(drawn, outcomes, strict=True) if f.file.startswith(folder)]
        missed = [f"{f.file}:{f.start[0]} {f.text[:60]} ({o})" for f, o in mine if o != "found"]
        print(f"{folder:20} found {len(mine) - len(missed)} of {len(mine)}", *missed, sep="\n    ")
        params = {"faults": len(mine), "seed": options.seed, "seconds": options.seconds}
        params |= {"folders": [folder], "tests": len(seconds)}
        record = {"name": "mutations", "variant": options.name or tree.name, "params": params}
        record |= {"metric": "found", "unit": "share", "value": 1 - len(missed) / len(mine)}
        records.append(record | {"missed": missed})
    append_records(options.output, records)


if __name__ == "__main__":
    main()
