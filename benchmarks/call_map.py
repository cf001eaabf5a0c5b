"""Which tests call which functions of the library: a pytest plugin that writes a map for `mutations.py`.

    FP8STACK_CALL_MAP=calls pytest -p call_map ...     # with this folder on PYTHONPATH

Every process appends lines "file <tab> function <tab> first line <tab> test" to a file of its own in the folder that
the variable names, and whoever runs a test adds "outcome <tab> seconds <tab> test" for each of its phases. Processes
that a test starts inherit the variable, and pytest's PYTEST_CURRENT_TEST names the test: they join in if their
`sitecustomize` calls `start()`. A line is written at once, since workers may end by os._exit.

It uses `sys.monitoring` (Python 3.12), which costs one event for each function and test. Code that torch.compile has
translated makes no events, and a fixture of wider scope counts for the first test that needs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

FOLDERS = ("/kernels/reference/", "/fp8stack/optim/", "/fp8stack/comm/", "/fp8stack/nn/")
TOOL = 4  # a free number of sys.monitoring's six


def start() -> None:
    """Begin to note calls, if the variable is set and this process does not yet."""
    folder = os.environ.get("FP8STACK_CALL_MAP")
    monitoring: Any = getattr(sys, "monitoring", None)
    if not folder or monitoring is None or monitoring.get_tool(TOOL):
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    lines = open(Path(folder) / f"{os.getpid()}.calls", "a", buffering=1)  # noqa: SIM115

    def note(code: CodeType, offset: int) -> Any:
        test = os.environ.get("PYTEST_CURRENT_TEST")
        if test and any(part in code.co_filename for part in FOLDERS):
            name = test.rpartition(" (")[0]
            lines.write(f"{code.co_filename}\t{code.co_qualname}\t{code.co_firstlineno}\t{name}\n")  # type: ignore[attr-defined]
        return monitoring.DISABLE  # until the next test begins

    monitoring.use_tool_id(TOOL, "fp8stack calls")
    monitoring.register_callback(TOOL, monitoring.events.PY_START, note)
    monitoring.set_events(TOOL, monitoring.events.PY_START)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Let each test note again what it calls."""
    start()
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is not None and monitoring.get_tool(TOOL):
        monitoring.restart_events()
    yield


def pytest_runtest_logreport(report: Any) -> None:
    """Note how a phase of a test ended, and how long it took."""
    if hasattr(report, "node"):  # pytest-xdist's controller hears of it too
        return
    with (Path(os.environ["FP8STACK_CALL_MAP"]) / f"{os.getpid()}.phases").open("a") as file:
        file.write(f"{report.outcome}\t{report.duration}\t{report.nodeid}\n")
