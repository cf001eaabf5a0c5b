"""The memory of this machine's CPUs: how much there is, how much is free, and what this process takes.

A control group may hold less than the machine has, as in a container or a job of Slurm; then that counts. The system
kills what takes more, without a word, so whoever tries has to ask first.

Limits: Linux; elsewhere nothing is known (None).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def memory_in_all() -> int | None:
    """Return the bytes that programs may have here."""
    return min(
        (n for n in (_number("meminfo", "MemTotal"), *(most for most, _ in _limits())) if n),
        default=None,
    )


def memory_free() -> int | None:
    """Return the bytes that this process can still take, beside what others have."""
    free = (_number("meminfo", "MemAvailable"), *(most - used for most, used in _limits()))
    return min((n for n in free if n is not None), default=None)


def memory_now() -> int | None:
    """Return the bytes that this process has in memory."""
    return _number("self/status", "VmRSS")


def memory_peak(forget: bool = False) -> int | None:
    """Return the most bytes that this process had in memory, since it was told to forget what was before."""
    try:
        if forget:
            (PROC / "self/clear_refs").write_text("5")
    except OSError:
        return None
    return _number("self/status", "VmHWM")


def _number(file: str, name: str) -> int | None:
    """Return the bytes that a line of a file of /proc names in kB, None where there is none."""
    try:
        lines = (PROC / file).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _limits() -> list[tuple[int, int]]:
    """Return the limit of each control group that this process is in, and what is used of it, its cache left out."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for _, kinds, path in (line.split(":", 2) for line in lines):
        # of version 2, which has all kinds in one, and of version 1
        if kinds not in ("", "memory"):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if not kinds:
            names = ("memory.max", "memory.current", "inactive_file")
        own = Path(path.lstrip("/"))
        for folder in (own, *own.parents):  # in a container the root may be the group that it is in
            with suppress(OSError, ValueError, KeyError):  # the root of version 2; no limit ("max")
                found.append(_limit(CGROUPS / kinds / folder, *names))
    return found


def _limit(folder: Path, most: str, used: str, cache: str) -> tuple[int, int]:
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    now = int((folder / used).read_text()) - int(stat[cache])
    return int((folder / most).read_text()), now
