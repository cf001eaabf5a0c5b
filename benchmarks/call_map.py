"""Which tests call which functions of the library: a pytest plugin that writes a map for `mutations.py`.

    FP8STACK_CALL_MAP=calls pytest -p call_map ...     # with this folder on PYTHONPATH

Every process appends lines "file <tab> function <tab> first line <tab> test" to a file of its own in the folder that
the variable names, and whoever runs a test adds "outcome <tab> seconds <tab> test" for each of its phases. Processes
that a test starts inherit the variable, and pytest's PYTEST_CURRENT_TEST names the test: they join in if their
`sitecustomize` calls `start()`. A line is written at once, since workers may end by os._exit.

It uses `sys.monitoring`, which costs one event for each function and test; before Python 3.12 `sys.setprofile`, which
costs one for each call. Code that torch.compile has translated makes no events, and a fixture of wider scope counts for
the first test that needs it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

FOLDERS = ("/kernels/reference/", "/fp8stack/optim/", "/fp8stack/comm/", "/fp8stack/nn/")
MONITORING: Any = getattr(sys, "monitoring", None)
TOOL = 4  # a free number of sys.monitoring's six
_noted: set[tuple[CodeType, str]] = set()


def start() -> None:
    """Begin to note calls, if the variable is set and this process does not yet."""
    folder = os.environ.get("FP8STACK_CALL_MAP")
    if not folder or _started():
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    lines = open(Path(folder) / f"{os.getpid()}.calls", "a", buffering=1)  # noqa: SIM115

    def note(code: CodeType) -> Any:
        test = os.environ.get("PYTEST_CURRENT_TEST")
        if not test:
            return None  # a server that forks ranks for tests to come
        inside = any(part in code.co_filename for part in FOLDERS)
        if inside and (code, test) not in _noted:
            _noted.add((code, test))
            name = test.rpartition(" (")[0]
            qualname = getattr(code, "co_qualname", code.co_name)  # Python 3.11
            lines.write(f"{code.co_filename}\t{qualname}\t{code.co_firstlineno}\t{name}\n")
        return MONITORING and MONITORING.DISABLE  # until the next test begins

    def on_start(code: CodeType, offset: int) -> Any:
        return note(code)

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            note(frame.f_code)

    if MONITORING is None:
        threading.setprofile(on_event)  # threads that are to come
        sys.setprofile(on_event)
        return
    MONITORING.use_tool_id(TOOL, "fp8stack calls")
    MONITORING.register_callback(TOOL, MONITORING.events.PY_START, on_start)
    MONITORING.set_events(TOOL, MONITORING.events.PY_START)


def _started() -> bool:
    return sys.getprofile() is not None if MONITORING is None else bool(MONITORING.get_tool(TOOL))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    """Let each test note again what it calls."""
    start()
    if MONITORING is not None:
        MONITORING.restart_events()
    yield


def pytest_runtest_logreport(report: Any) -> None:
    """Note how a phase of a test ended, and how long it took."""
    if hasattr(report, "node"):  # pytest-xdist's controller hears of it too
        return
    with (Path(os.environ["FP8STACK_CALL_MAP"]) / f"{os.getpid()}.phases").open("a") as file:
        file.write(f"{report.outcome}\t{report.duration}\t{report.nodeid}\n")
