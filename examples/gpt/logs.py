"""What a run says and leaves behind: a line a step, a progress bar, run.json and metrics.jsonl, TensorBoard, W&B.

    step 250 | epoch 0 | loss 3.4568 | lr 6.00e-04 | norm 0.823 | dt 156.8 ms | tok/s 3345 | mem 16.1 GiB | FP8 O2

`metrics.jsonl` has one JSON object a line: those of training with "step", "loss", "lr", "norm", "dt_ms",
"tokens_per_second", "memory_gib", "epoch", "tokens" and "time", those of evaluation with "step", "val_loss", "tokens"
and "time". "tokens" are those of all steps so far, of which some may have had another batch before a resume. All
but the last two go to TensorBoard and W&B, and with them what FP8 does to tensors ("fp8/fwd_scale", "fp8/bwd_scale",
"fp8/amax", "fp8/underflow", "fp8/overflow") and to the wire ("comm/bytes").

The first rank logs, the others have a `RunLog` that does nothing. A run that is resumed goes on in the same files; what
they say of later steps is cut off first. Numbers that are not finite are null in JSON.

Limits: memory is PyTorch's peak on a GPU, the resident memory of this process on a CPU. W&B goes on in the same run,
but takes nothing back: of steps that are done again it keeps what it got first. A run that goes on in another folder
counts its earlier tokens as if those steps had been as large as the later ones.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from tqdm import tqdm

from fp8stack.checkpoint import replacing
from fp8stack.errors import ConfigError, Fp8StackWarning, first_line

from .lock import lock

METRICS, RUN, BOARD = "metrics.jsonl", "run.json", "tensorboard"
# what to do where a run's files cannot be written: when it begins, and later
ELSEWHERE = "Give another folder as --out."
CONTINUE = (
    "Make room, and continue with --resume latest; with another --out, give the checkpoint's path."
)
GIB = 2**30


def format_line(numbers: Mapping[str, Any], precision: str) -> str:
    """Return the line of a step; `numbers` has the keys of a training line of metrics.jsonl."""
    return (
        "step {step} | epoch {epoch} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.3f} | dt {dt_ms:.1f} ms | "
        "tok/s {tokens_per_second:.0f} | mem {memory_gib:.1f} GiB | "
    ).format(**numbers) + precision


def read_memory(device: torch.device) -> float:
    """Return GiB: PyTorch's peak on a GPU; on a CPU this process's resident memory, NaN where there is no /proc."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return math.nan
    return int(status.partition("VmRSS:")[2].split()[0]) / 2**20


def say(text: str) -> bool:
    """Print lines, above a bar; return whether stdout has taken them. One that takes no more is said, and left alone.

    It is a pipe whose reader is gone, or a file on a full disk: no reason to end a run of days.
    """
    try:
        tqdm.write(text)
        sys.stdout.flush()
    except OSError as error:
        # what waits in its buffer goes there too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        warnings.warn(
            f"stdout cannot be written ({error.strerror}): nothing more is printed there. A run goes on, and its "
            f"numbers are in its {METRICS}.",
            Fp8StackWarning,
            stacklevel=2,
        )
        return False
    return True


def hold(folder: Path) -> IO[str]:
    """Make the folder of a run, and return the lock on it, which `RunLog.close` gives back.

    Raises:
        ConfigError: if the folder cannot be written, or another run is in it.
    """
    with naming(folder, ELSEWHERE):
        folder.mkdir(parents=True, exist_ok=True)
        return lock(folder)


class RunLog:
    """Writes the records of one run.

    Args:
        folder: of the run.
        facts: of run.json: "name", "precision", "tokens_per_step" and the like; a resumed run replaces them.
        first_step: steps that were done already; what metrics.jsonl says of later ones is cut off.
        last_step: of the bar.
        tensorboard, use_wandb: log there as well.
        held: the lock on the folder. Without it the object does nothing, as on all ranks but the first.

    Raises:
        ConfigError: if the folder cannot be read, or W&B is asked for and not installed, or does not let us in. A
            missing TensorBoard is one warning: it is the default.
    """

    def __init__(
        self,
        folder: Path,
        facts: dict[str, Any],
        first_step: int,
        last_step: int,
        tensorboard: bool = True,
        use_wandb: bool = False,
        held: IO[str] | None = None,
    ) -> None:
        self.active, self.precision = held is not None, facts["precision"]
        self.folder, self.facts = folder, facts
        self.steps, self.tensorboard = (first_step, last_step), tensorboard
        self.file = self.board = self.wandb = self.bar = None
        self.lock = held
        if self.active:
            with naming(folder, ELSEWHERE):
                self.before = _read_facts(folder) if first_step else {}
                known = self.before.get("wandb")
                if use_wandb:
                    self.wandb = _open_wandb(folder, facts, known)
                    known = self.wandb.id
                self.facts = {**facts, "wandb": known}

    def open(self) -> None:
        """Open what can refuse, before `begin` or anybody takes something away."""
        if not self.active:
            return
        with naming(self.folder / METRICS, ELSEWHERE):
            open(self.folder / METRICS, "a").close()
        with naming(self.folder / BOARD, ELSEWHERE):
            self.board = _open_board(self.folder, self.steps[0]) if self.tensorboard else None

    def begin(self) -> None:
        """Take from the files what is not before this run's first step."""
        first, last = self.steps
        if not self.active:
            return
        with naming(self.folder, ELSEWHERE):
            kept = _cut(self.folder / METRICS, first) if first else {}
            self.counted = _count(kept, self.before, self.facts, first)
            (self.folder / RUN).write_text(json.dumps(_finite(self.facts), indent=1) + "\n")
            self.file = open(self.folder / METRICS, "a" if first else "w")  # noqa: SIM115
        hidden, name = not sys.stderr.isatty(), self.facts["name"]
        self.bar = tqdm(total=last, initial=first, unit="step", desc=name, disable=hidden)

    def train(self, numbers: dict[str, Any], more: Mapping[str, float], show: bool = True) -> None:
        """Log a step; `more` has other numbers of it: "fp8/amax" of the model, "fp8/LAYER/x_amax" of a layer.

        `show` prints its line.
        """
        if not self.active:
            return
        if show:
            self.say(format_line(numbers, self.precision))
        self.bar.update(numbers["step"] - self.bar.n)
        of_model = {name: value for name, value in more.items() if name.count("/") == 1}
        self._write({**numbers, **of_model})
        scalars = {f"train/{k}": v for k, v in numbers.items() if k != "step"}
        self._publish({**scalars, **more}, numbers["step"])

    def evaluation(self, step: int, numbers: dict[str, float], sample: str = "") -> None:
        """Log what was found at a step: "val_loss" at least; and a text that the model wrote."""
        if not self.active:
            return
        parts = [f"{name} {value:.4f}" for name, value in numbers.items()]
        self.say(" | ".join([f"step {step}", *parts, self.precision]))
        if sample:
            sample = "".join(
                c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in sample
            )
            self.say(f"--- a sample\n{sample}\n---")
        self._write({"step": step, **numbers})
        self._publish({f"eval/{k}": v for k, v in numbers.items()}, step)
        if self.board and sample:
            with naming(self.folder / BOARD):
                self.board.add_text("sample", sample, step)

    def say(self, text: str) -> None:
        if self.active:
            say(text)

    def close(self) -> None:
        """Close all files, also those behind one that cannot be written."""
        with ExitStack() as stack:
            if self.lock:
                stack.callback(self.lock.close)
            if self.wandb:
                stack.callback(self.wandb.finish)
            for part, name in ((self.bar, ""), (self.board, BOARD), (self.file, METRICS)):
                if part is not None:
                    stack.enter_context(naming(self.folder / name))
                    stack.callback(part.close)

    def _write(self, entry: dict[str, Any]) -> None:
        step, tokens, each = self.counted
        tokens += (entry["step"] - step) * each
        with naming(self.folder / METRICS):
            line = {**entry, "tokens": tokens, "time": time.time()}
            self.file.write(json.dumps(_finite(line)) + "\n")
            self.file.flush()

    def _publish(self, scalars: dict[str, float], step: int) -> None:
        if self.board:
            with naming(self.folder / BOARD):
                for name, value in scalars.items():
                    self.board.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(scalars, step=step)


@contextmanager
def naming(path: Path, remedy: str = CONTINUE) -> Iterator[None]:
    """Raise ConfigError, with the path and a remedy, for what the system says of a full disk and the like."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or first_line(error)}). {remedy}"
        ) from None


def forgive_thread(args: threading.ExceptHookArgs) -> None:
    """As `threading.excepthook`: leave out what TensorBoard's thread cannot write, which its next call raises."""
    if not (isinstance(args.exc_value, OSError) and "tensorboard" in type(args.thread).__module__):
        threading.__excepthook__(args)


def _finite(entry: dict[str, Any]) -> dict[str, Any]:
    """Return `entry` with None for numbers that JSON has no name for."""
    bad = {k: None for k, v in entry.items() if isinstance(v, float) and not math.isfinite(v)}
    return {**entry, **bad}


def _cut(path: Path, last: int) -> dict[str, Any]:
    """Remove the lines of steps after `last`, and one that was cut short when the run was killed.

    Return the last that stays, {} if there is none. The file is replaced: a kill meanwhile leaves all of it.
    """
    kept, final = [], {}
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            entry = json.loads(line)
            if entry["step"] <= last and line.endswith(b"\n"):
                kept.append(line)
                final = entry
        except (ValueError, KeyError, TypeError):
            continue
    with replacing(path) as temporary:
        temporary.write_bytes(b"".join(kept))
    return final


def _count(
    last: dict[str, Any], before: dict[str, Any], facts: dict[str, Any], first_step: int
) -> tuple[int, int, int]:
    """Return what tokens are counted from: a step, the tokens up to it, and those of a step from there on.

    Args:
        last: line of metrics.jsonl that stays; one of an older record has no "tokens".
        before: facts of the run up to now, whose steps may have been of another size.
    """
    each = facts["tokens_per_step"]
    was = before.get("tokens_per_step", each)
    step, tokens = (last["step"], last["tokens"]) if "tokens" in last else (0, 0)
    return first_step, tokens + (first_step - step) * was, each


def _open_board(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warnings.warn(
            'TensorBoard is not installed, so nothing is logged there. Install it with pip install "fp8stack[train]", '
            "or say --no-tensorboard.",
            Fp8StackWarning,
            stacklevel=3,
        )
        return None
    # also of a run that begins: its folder may have curves of one before
    return SummaryWriter(str(folder / BOARD), purge_step=first_step + 1)


def _read_facts(folder: Path) -> dict[str, Any]:
    """Return what run.json said of a run up to now: how W&B calls it, and how large its steps were."""
    try:
        facts: dict[str, Any] = json.loads((folder / RUN).read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _open_wandb(folder: Path, facts: dict[str, Any], known: str | None) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f'--wandb: the module {error.name} is not installed. Install it with pip install "fp8stack[wandb]".'
        ) from None
    own = {"id": known, "name": facts["name"], "dir": str(folder)}
    try:
        return wandb.init(project="fp8stack", config=facts, resume="allow", **own)
    except wandb.errors.Error as error:
        raise ConfigError(
            f"--wandb: W&B cannot begin a run ({first_line(error)}). Log in with: wandb login, or set "
            "WANDB_MODE=offline to keep its files here and send them later."
        ) from error
