"""One run at a time in a folder: a lock that the system lets go of when its process ends, however it does.

It is a record lock of POSIX (fcntl), which file systems of clusters have between hosts. A server of files may hold that
of a host which has crashed for a while, so the lock of another host is waited for.

Limits: no lock on Windows, nor where a file system has none; a process does not keep itself out.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from fp8stack.errors import ConfigError

try:
    import fcntl
except ImportError:
    fcntl = None

NAME = ".lock"
PATIENCE = 120.0  # seconds


def lock(folder: Path, patience: float = PATIENCE) -> IO[str]:
    """Return the open file that keeps other processes out of a run's folder until it is closed.

    Raises:
        ConfigError: where another run is in it: at once if that is on this host, else after `patience` seconds.
        OSError: where the file cannot be written.
    """
    file = open(folder / NAME, "a+")  # noqa: SIM115
    ends = time.monotonic() + patience
    while not _take(file):
        file.seek(0)
        holder = file.read().strip() or "unknown"
        if holder.startswith(f"{socket.gethostname()}, ") or time.monotonic() > ends:
            file.close()
            raise ConfigError(
                f"{folder} is in use by another run ({holder}). Wait for its end, or give another --run-name."
            )
        time.sleep(min(1.0, patience / 10))
    with suppress(OSError):  # a full disk has no room for who it is
        file.truncate(0)
        file.write(f"{socket.gethostname()}, process {os.getpid()}\n")
        file.flush()
    return file


def _take(file: IO[str]) -> bool:
    """Take the lock, or find that there are none; return False where another process has it."""
    with suppress(OSError):  # a file system without
        try:
            if fcntl:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
    return True
