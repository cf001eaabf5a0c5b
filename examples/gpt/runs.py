"""Where the files of a run are: OUT/NAME-PRECISION, so that one name can be trained in several precisions."""

from __future__ import annotations

import os
import platform
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fp8stack
from fp8stack.api import choose_compute
from fp8stack.errors import CheckpointError, ConfigError, did_you_mean, first_line
from fp8stack.levels import LEVELS

from .checkpoints import (
    Checkpoint,
    clear,
    find,
    find_latest,
    is_named,
    list_checkpoints,
    survey,
)
from .config import PRECISIONS, STATES, Config
from .logs import RUN, say
from .options import warn
from .ranks import gather, on_first_rank, rank_and_world


def choose_precision(config: Config, device: torch.device) -> str:
    """Return what a run computes in, and its level: "FP8 O2", "bf16 O2" where a GPU has no FP8, "bf16".

    fp8stack's own choice, asked for before there is a model: runs of that precision may be there already.

    Raises:
        ConfigError, UnsupportedDeviceError: where `fp8stack.initialize` would.
        ConfigError: where ranks do not choose alike, whose checkpoints would be in different folders.
    """
    own = config.precision
    if config.opt_level != "off":
        compute, *_ = choose_compute(config.recipe(), device)
        own = f"{PRECISIONS[config.compute_dtype]} {config.opt_level}" if compute == "bf16" else own
    found = sorted(set(gather(own)))
    if len(found) > 1:
        raise ConfigError(
            f"ranks would compute in {' and '.join(found)}: some of their devices have FP8, and some have not. Use "
            "devices of one kind, or --compute bf16."
        )
    return own


def run_folder(config: Config, precision: str) -> Path:
    """Return the folder of a run: its name, tagged with a precision."""
    return config.out / f"{config.run_name or config.model}-{precision.lower().replace(' ', '-')}"


def folders_of(run: Path) -> list[Path]:
    """Return where the checkpoints of a run are: those of plain PyTorch, and those of fp8stack's levels."""
    return [run / "checkpoints", run / "checkpoints_fp8"]


def all_folders(config: Config) -> list[Path]:
    """Return where the checkpoints of runs of this name are, in all precisions."""
    kinds = PRECISIONS.values()
    few = [f"{kind} {states}" for kind in kinds for states in STATES.values() if states != "fp32"]
    tags = [*kinds, *few, *(f"{kind} {level}" for kind in ("FP8", *kinds) for level in LEVELS)]
    return [folder for tag in tags for folder in folders_of(run_folder(config, tag))]


def check_fresh(config: Config, precision: str) -> None:
    """Raise ConfigError if a run would begin among checkpoints of an older one, which could be taken for its own."""
    run = run_folder(config, precision)
    found = [p for folder in folders_of(run) for p in folder.glob("step_*") if is_named(p)]
    if found and not (config.resume or config.overwrite):
        raise ConfigError(
            f"{run} has {len(found)} checkpoints of an older run. Go on from them with --resume latest, begin in "
            "another folder with another --run-name, or delete them with --overwrite."
        )


def remove_older(config: Config, precision: str) -> None:
    """Remove the checkpoints of an older run, if `--overwrite` says so.

    Raises:
        CheckpointError: on all ranks, if they cannot be removed.
    """

    def remove() -> None:
        for folder in folders_of(run_folder(config, precision)):
            try:
                clear(folder)
            except OSError as error:
                raise CheckpointError(
                    f"--overwrite: {folder} cannot be emptied ({error.strerror or first_line(error)}). Make it "
                    "writable, or begin in another folder with another --run-name or --out."
                ) from None

    if config.overwrite:
        on_first_rank(remove)


def describe_host(device: torch.device) -> dict[str, Any]:
    """Return what run.json says of the machine, and what runs on it."""
    cuda = device.type == "cuda"
    threads = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else threads,
        "versions": {
            "fp8stack": fp8stack.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "command": sys.argv,
    }


def find_checkpoint(config: Config, precision: str) -> Checkpoint | None:
    """Return what `--resume` names; None: the run begins.

    "auto" is the run's own newest in its precision, so that what is compared shares no weights. "latest" is that too,
    or else the newest of its name in another precision; a warning says where such a one is further on.

    Raises:
        CheckpointError: if a path is given and there is none, or it is damaged; if there are checkpoints, and none is
            whole: the run would begin again over what is left of it, in a requeued job without anyone seeing it.
    """
    if not config.resume:
        return None
    if config.resume not in ("auto", "latest"):
        return find(_existing(Path(config.resume)))
    own = run_folder(config, precision)
    again = (
        f"--resume {config.resume} does not begin over them: try again where they could not be read, begin in another "
        "folder with another --run-name, or"
    )
    delete = "delete them with --overwrite in place of --resume."
    found = find_latest(folders_of(own), f"{again} {delete}")
    if config.resume == "latest" and found is None:
        found = find_latest(all_folders(config), f"{again} begin in {own} with --resume auto.")
    elif config.resume == "latest":
        _tell_of_later(config, found, folders_of(own))
    if found is None and rank_and_world()[0] == 0:
        say(f"--resume {config.resume}: there is no checkpoint in {own}; starting at step 0")
    return found


def _existing(path: Path) -> Path:
    """Return a path that is there; raise CheckpointError on all ranks for one that is not."""
    if not on_first_rank(partial(os.path.exists, path)):  # which raises nothing
        close = did_you_mean(str(path), ["auto", "latest", *map(str, path.parent.glob("*"))])
        raise CheckpointError(
            f"--resume {path}: there is no such folder.{close} Give auto, latest, or the path of a checkpoint, as "
            "--list-checkpoints shows them."
        )
    return path


def _tell_of_later(config: Config, taken: Checkpoint, own: list[Path]) -> None:
    """Warn where the run has got further in another precision than the checkpoint of its own that is taken."""

    def look() -> Checkpoint:
        others = list_checkpoints(folder for folder in all_folders(config) if folder not in own)
        return max([taken, *others], key=lambda checkpoint: checkpoint.step)

    later = on_first_rank(look)
    if later.step > taken.step:
        warn(
            f"--resume latest: going on from step {taken.step} ({taken.manifest['precision']}), this run's own; in "
            f"{later.manifest['precision']} it has got to step {later.step}. To go on from there: --resume "
            f"{later.path}",
            config.strict,
        )


def list_runs(config: Config) -> str:
    """Return a table of the checkpoints of a run, in all of its precisions; then those that are damaged, and why."""
    found, damaged = survey(all_folders(config))
    if not found and not damaged:
        others = sorted(p.parent.name for p in config.out.glob(f"*/{RUN}"))
        there = f"; runs in {config.out}: {', '.join(others)}" if others else ""
        return f"there are no checkpoints in {run_folder(config, '*')}{there}"
    lines = [f"{'step':>8}  {'loss':>8}  {'val loss':>8}  {'precision':<9}  {'GiB':>8}  folder"]
    for checkpoint in found:
        facts, folder = checkpoint.manifest, checkpoint.path.parent
        losses = (facts["train_loss"], facts["val_loss"])
        shown = "  ".join(f"{'-':>8}" if loss is None else f"{loss:8.4f}" for loss in losses)
        links = [
            name
            for name in ("latest", "best")
            if (folder / name).resolve() == checkpoint.path.resolve()
        ]
        size = f"{checkpoint.nbytes / 2**30:8.3f}"
        note = f" ({', '.join(links)})" if links else ""
        lines.append(
            f"{checkpoint.step:>8}  {shown}  {facts['precision']:<9}  {size}  {checkpoint.path}{note}"
        )
    lines += [f"{'damaged':>8}  {path}: {why.reason}" for path, why in damaged.items()]
    return "\n".join(lines)
