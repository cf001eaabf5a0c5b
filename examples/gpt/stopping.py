"""Signals that end a run: it goes on to the end of the step in hand, writes a checkpoint, and says how to go on.

    with Signals(saves=config.checkpoint_freq > 0) as signals:
        trainer.run(signals)
    status = 128 + trainer.stopped if trainer.stopped else 0

SIGTERM is what a preemption sends, SIGUSR1 what `sbatch --signal` is given for some minutes before the time is up,
SIGINT is Ctrl-C. A handler only notes the number, so it may come at any moment: in a kernel, or while a checkpoint is
written. What each rank has noted goes with the loss through the one all_reduce that every step has and waits for anyway
(`trainer.py`): all ranks stop at the same step, also where a signal reached one of them alone, and no step costs more.

Limits: a step has to end for that. A second Ctrl-C ends the process at once, as SIGKILL does, which leaves the
checkpoints as they were. Where Ctrl-C is ignored, as a shell has it for jobs in the background, it still is.
"""

from __future__ import annotations

import os
import signal
from typing import Any

NAMES = ("SIGTERM", "SIGUSR1", "SIGINT")
NOTE = "\ntrain_gpt: stopping at the end of this step{}; Ctrl-C again ends at once\n"


class Signals:
    """Catches the signals in its context; `received` is the number of the first that came, 0 before.

    saves: does the run write checkpoints? One that does not uses what SIGUSR1 says is left of its time.
    """

    def __init__(self, saves: bool = True) -> None:
        self.saves, self.received = saves, 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for name in NAMES:
            number = getattr(signal, name, None)  # Windows has no SIGUSR1
            if number and (name != "SIGINT" or signal.getsignal(number) != signal.SIG_IGN):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _note(self, number: int, _: Any) -> None:
        if not self.saves and number not in (signal.SIGTERM, signal.SIGINT):
            return
        self.received = self.received or number
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the next one
            if os.environ.get("RANK", "0") == "0":
                note = NOTE.format(", with a checkpoint" if self.saves else "")
                os.write(2, note.encode())  # print may be what it came into
