"""What a run says and leaves behind: a line a step, a progress bar, run.json and metrics.jsonl, TensorBoard, W&B.

    step 250 | epoch 0 | loss 3.4568 | lr 6.00e-04 | norm 0.823 | dt 156.8 ms | tok/s 3345 | mem 16.1 GiB | FP8 O2

`metrics.jsonl` has one JSON object a line: those of training with "step", "loss", "lr", "norm", "dt_ms",
"tokens_per_second", "memory_gib", "epoch" and "time", those of evaluation with "step", "val_loss" and "time". The same
numbers go to TensorBoard and W&B, and with them what FP8 does to tensors ("fp8/fwd_scale", "fp8/bwd_scale", "fp8/amax",
"fp8/underflow", "fp8/overflow") and to the wire ("comm/bytes").

The first rank logs, the others have a `RunLog` that does nothing. A run that is resumed goes on in the same files; what
they say of later steps is cut off first. Numbers that are not finite are null in JSON.

Limits: memory is PyTorch's peak on a GPU, the resident memory of this process on a CPU. W&B goes on in the same run,
but takes nothing back: of steps that are done again it keeps what it got first.
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
from typing import Any

import torch
from tqdm import tqdm

from fp8stack.errors import ConfigError, Fp8StackWarning, first_line

METRICS, RUN, BOARD = "metrics.jsonl", "run.json", "tensorboard"
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
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return math.nan
    return pages * os.sysconf("SC_PAGE_SIZE") / GIB


class RunLog:
    """Writes the records of one run.

    Args:
        folder: of the run.
        facts: of run.json: "name", "level", "precision" and the like; a resumed run replaces them.
        first_step: steps that were done already; what metrics.jsonl says of later ones is cut off.
        last_step: of the bar.
        tensorboard, use_wandb: log there as well.
        active: False makes an object that does nothing, for all ranks but the first.

    Raises:
        ConfigError: if the folder cannot be written, or W&B is asked for and not installed, or does not let us in. A
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
        active: bool = True,
    ) -> None:
        self.active, self.precision = active, facts["precision"]
        self.file = self.board = self.wandb = self.bar = None
        if not active:
            return
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            known = _wandb_id(folder) if first_step else None
            if use_wandb:
                self.wandb = _open_wandb(folder, facts, known)
                known = self.wandb.id
            facts = {**facts, "wandb": known}
            self.board = _open_board(folder, first_step) if tensorboard else None
            (folder / RUN).write_text(json.dumps(_finite(facts), indent=1) + "\n")
            self.file = open(folder / METRICS, "a+" if first_step else "w")  # noqa: SIM115
            if first_step:
                _cut(self.file, first_step)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be written ({error.strerror}). Give another folder as --out."
            ) from None
        self.bar = tqdm(
            total=last_step,
            initial=first_step,
            unit="step",
            desc=facts["name"],
            disable=not sys.stderr.isatty(),
        )

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
        self._write({**numbers, "time": time.time(), **of_model})
        scalars = {f"train/{k}": v for k, v in numbers.items() if k != "step"}
        self._publish({**scalars, **more}, numbers["step"])

    def evaluation(self, step: int, numbers: dict[str, float], sample: str = "") -> None:
        """Log what was found at a step: "val_loss" at least; and a text that the model wrote."""
        if not self.active:
            return
        parts = [f"{name} {value:.4f}" for name, value in numbers.items()]
        self.say(" | ".join([f"step {step}", *parts, self.precision]))
        if sample:
            self.say(f"--- a sample\n{sample}\n---")
        self._write({"step": step, **numbers, "time": time.time()})
        self._publish({f"eval/{k}": v for k, v in numbers.items()}, step)
        if self.board and sample:
            with naming(self.folder / BOARD):
                self.board.add_text("sample", sample, step)

    def say(self, text: str) -> None:
        """Print a line, above the bar."""
        if self.active:
            tqdm.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        """Close all files, also those behind one that cannot be written."""
        with ExitStack() as stack:
            if self.wandb:
                stack.callback(self.wandb.finish)
            for part, name in ((self.bar, ""), (self.board, BOARD), (self.file, METRICS)):
                if part is not None:
                    stack.enter_context(naming(self.folder / name))
                    stack.callback(part.close)

    def _write(self, entry: dict[str, Any]) -> None:
        with naming(self.folder / METRICS):
            self.file.write(json.dumps(_finite(entry)) + "\n")
            self.file.flush()

    def _publish(self, scalars: dict[str, float], step: int) -> None:
        if self.board:
            with naming(self.folder / BOARD):
                for name, value in scalars.items():
                    self.board.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log(scalars, step=step)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise ConfigError, with the path and a remedy, for what the system says of a full disk and the like."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or first_line(error)}). Make room, and continue with --resume "
            "latest; with another --out, give the checkpoint's path."
        ) from None


def forgive_thread(args: threading.ExceptHookArgs) -> None:
    """As `threading.excepthook`: leave out what TensorBoard's thread cannot write, which its next call raises."""
    if not (isinstance(args.exc_value, OSError) and "tensorboard" in type(args.thread).__module__):
        threading.__excepthook__(args)


def _finite(entry: dict[str, Any]) -> dict[str, Any]:
    """Return `entry` with None for numbers that JSON has no name for."""
    bad = {k: None for k, v in entry.items() if isinstance(v, float) and not math.isfinite(v)}
    return {**entry, **bad}


def _cut(file: Any, last: int) -> None:
    """Remove the lines of steps after `last`, and one that was cut short when the run was killed."""
    file.seek(0)
    kept = []
    for line in file:
        try:
            if json.loads(line)["step"] <= last and line.endswith("\n"):
                kept.append(line)
        except ValueError:
            continue
    file.seek(0)
    file.truncate()
    file.writelines(kept)


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
    cut = first_step + 1 if first_step else None
    return SummaryWriter(str(folder / BOARD), purge_step=cut)


def _wandb_id(folder: Path) -> str | None:
    """Return the name that W&B has given to the run in a folder, if it was logged there."""
    try:
        name: str | None = json.loads((folder / RUN).read_text()).get("wandb")
    except (OSError, ValueError):
        return None
    return name


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
