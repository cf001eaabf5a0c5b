"""Checkpoints on disk: folders that are complete or not there at all, through torch.distributed.checkpoint.

    checkpoints_fp8/            checkpoints/ in bf16
      step_00000250/            one checkpoint
        .metadata, __0_0.distcp what DCP writes: model and optimizer, resharded when another number of ranks reads them
        progress.pt             what is the same on all ranks: step, position in the data, losses so far
        rank_0.pt               what is a rank's own: random number generators, histories of delayed scaling
        manifest.json           step, losses, precision, and the size and CRC-32 of every other file
      best -> step_00000200     the lowest validation loss
      latest -> step_00000250   the one written last

How: all ranks write into a hidden folder, every file is fsynced and summed, the manifest comes last, and only then is
the folder renamed to its name. So a name is a promise: a process killed at any moment, or a full disk, leaves a hidden
folder, which the next save removes. Reading checks sizes and sums first. The newest checkpoint is the one whose
manifest says so, not the link, which a kill may leave one behind.

Limits: all ranks have to see one file system, with links. A CRC finds damage, not malice; nothing is unpickled but
tensors and plain types, except by DCP itself, whose metadata is a pickle: load only checkpoints that you trust.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from fp8stack.errors import CheckpointError, Fp8StackWarning, first_line

from .ranks import gather, on_first_rank, rank_and_world

FORMAT = 1
MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
WRITING, DELETING = ".writing-", ".deleting-"
CHUNK = 2**24  # bytes summed at a time
OTHERS = " Use another one; --list-checkpoints shows them."


class UnusableError(CheckpointError):
    """A folder that is no whole checkpoint."""

    reason = ""  # in short


def unusable(path: Path, what: str, reason: str, remedy: str = OTHERS) -> UnusableError:
    error = UnusableError(f"{path} {what}.{remedy}")
    error.reason = reason  # no argument of the class: ranks pickle errors for each other
    return error


T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose manifest is there and whose files have the sizes that it says."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def val_loss(self) -> float:
        """The validation loss; infinite where there was no evaluation, or it was not finite."""
        loss = self.manifest.get("val_loss")
        return loss if loss is not None and math.isfinite(loss) else math.inf

    @property
    def nbytes(self) -> int:
        return sum(size for size, _ in self.manifest["files"].values())

    @property
    def age(self) -> tuple[float, int]:
        """What checkpoints are ordered by: when they were written, since a run may be taken back to an older step."""
        return self.manifest["saved_at"], self.step


# --- writing


def save(
    folder: Path,
    step: int,
    states: dict[str, Any],
    progress: dict[str, Any],
    local: dict[str, Any],
    facts: dict[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint, called by all ranks; return its folder. Of those there, the last `keep` and the best stay.

    Args:
        states: for DCP: state dicts of model and optimizer.
        progress: tensors and plain types, the same on all ranks; read by `load`.
        local: the same of this rank.
        facts: of the manifest, JSON: "val_loss", "train_loss", "precision", "level" and the like.

    Raises:
        CheckpointError: on all ranks, if one of them cannot write. All checkpoints there are as they were.
    """
    rank, world = rank_and_world()
    final = folder / f"step_{step:08d}"
    temporary = folder / (WRITING + final.name)

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        temporary.mkdir()

    def write() -> None:
        if rank == 0:
            torch.save(progress, temporary / "progress.pt")
        torch.save(local, temporary / f"rank_{rank}.pt")

    def write_states() -> None:
        with warnings.catch_warnings():  # of one process without a group, which is meant
            warnings.filterwarnings("ignore", message=".*in a single process")
            dcp.save(states, checkpoint_id=temporary)

    def seal() -> dict[str, tuple[int, int]]:
        own = sorted(path.name for path in temporary.iterdir())[rank::world]
        return {name: _sum_up(temporary / name, sync=True) for name in own}

    def commit() -> None:
        files = {name: entry for part in parts for name, entry in part.items()}
        about = {"format": FORMAT, "step": step, "world": world, "saved_at": time.time(), **facts}
        _commit(temporary, final, {**about, "files": files})
        _point(folder, keep)

    try:
        _together(folder, prepare if rank == 0 else None)
        _together(folder, write)
        _together(folder, write_states)  # by itself: here ranks wait for each other
        parts = _together(folder, seal)
        _together(folder, commit if rank == 0 else None)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _commit(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, and give a folder that is complete its name."""
    with open(temporary / MANIFEST, "w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(temporary)
    replaced = _hide(final) if final.exists() else None  # of a run that was taken back
    temporary.rename(final)
    _sync_folder(final.parent)
    if replaced:
        _delete(replaced)


def _together(folder: Path, action: Callable[[], T] | None) -> list[T]:
    """Do something on every rank that has something to do; raise on all of them where one could not."""
    result, reason = None, ""
    try:
        result = action() if action else None
    except (OSError, RuntimeError) as error:
        reason = _cause(error)
    except CheckpointException as error:
        reason = _cause(next(iter(error.failures.values()))[0])
    outcomes = gather((result, reason))
    failed = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(outcomes) if reason]
    if failed:
        above = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        free = shutil.disk_usage(above).free / 2**30
        raise CheckpointError(
            f"no checkpoint could be written to {folder} ({failed[0]}; {free:.1f} GiB are free there). Those that are "
            "there are as they were. Make room and continue with --resume latest, or another --out and the path of one."
        )
    return [value for value, _ in outcomes]


def _cause(error: BaseException) -> str:
    """Return what the system said, where torch's file format made something else of it."""
    deeper: BaseException | None = error
    while deeper is not None:
        if isinstance(deeper, OSError):
            return first_line(deeper)
        deeper = deeper.__cause__ or deeper.__context__
    return first_line(error)


def _sum_up(path: Path, sync: bool = False) -> tuple[int, int]:
    """Return (bytes, CRC-32) of a file; with `sync`, wait until the disk has it."""
    total, crc = 0, 0
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        while chunk := file.read(CHUNK):
            total, crc = total + len(chunk), zlib.crc32(chunk, crc)
    return total, crc


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _point(folder: Path, keep: int) -> None:
    """Set the links, and remove what is neither among the last `keep` nor the best."""
    there = list_checkpoints([folder])
    best = min(there, key=lambda c: (c.val_loss, -c.step))
    for name, target in ((LATEST, there[-1]), (BEST, best)):
        if target.val_loss < math.inf or name == LATEST:
            link = folder / f".{name}"
            link.unlink(missing_ok=True)
            link.symlink_to(target.path.name)
            link.replace(folder / name)
        else:  # what it pointed to may have been written again, and not evaluated
            (folder / BEST).unlink(missing_ok=True)
    for old in there[: -max(keep, 1)]:
        if old is not best or best.val_loss == math.inf:
            _delete(_hide(old.path))


def clear(folder: Path) -> None:
    """Remove all checkpoints in a folder; called by one rank."""
    _tidy(folder)
    for name in (LATEST, BEST):
        (folder / name).unlink(missing_ok=True)
    for path in filter(is_named, [*folder.glob("step_*")]):
        _delete(_hide(path))


def _tidy(folder: Path) -> None:
    """Remove what killed processes have left."""
    for left in [*folder.glob(WRITING + "*"), *folder.glob(DELETING + "*")]:
        _delete(left)


def _delete(path: Path) -> None:
    """Remove a hidden folder, or a file or link that was hidden as if it were one."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _hide(path: Path) -> Path:
    """Give a checkpoint that is to be deleted another name: half a one never bears the name of one."""
    return path.rename(path.with_name(DELETING + path.name))


# --- reading


def is_named(path: Path) -> bool:
    """Return whether it has a checkpoint's name and is no file: `fp8stack convert` puts its files beside them."""
    return bool(re.fullmatch(r"step_\d{8,}", path.name)) and not os.path.isfile(path)


def inspect(path: Path, sums: bool = True) -> Checkpoint:
    """Return the checkpoint at `path`, checked; `sums` reads all of it.

    Raises:
        CheckpointError: if there is none, or it is incomplete or damaged; says which file.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, known = dict(manifest["files"]), manifest["format"] == FORMAT
        checkpoint = Checkpoint(path, manifest)
        _ = checkpoint.age, checkpoint.nbytes
    except (FileNotFoundError, NotADirectoryError):
        none = f"it has no {MANIFEST}", "which is written last"
        what, more = ("it is a file", "no folder") if path.is_file() else none
        raise unusable(path, f"is no checkpoint: {what}, {more}", what) from None
    except OSError as error:
        what = f"cannot be read: {MANIFEST} ({error.strerror})"
        raise unusable(path, what, "cannot be read") from None
    except (ValueError, KeyError, TypeError) as error:
        what = f"{MANIFEST} is damaged"
        raise unusable(path, f"is no checkpoint: {what} ({first_line(error)})", what) from None
    if not known:
        other = f"is of format {manifest['format']!r}"
        remedy = f"this program reads {FORMAT}. Use the version that wrote it"
        raise unusable(path, f"{other}, {remedy}", other, "")
    for name, (size, crc) in files.items():
        try:
            found = (path / name).stat().st_size
            what = "cut short" if found != size else ""
            if not what and sums and _sum_up(path / name)[1] != crc:
                what = "altered"
        except FileNotFoundError:
            what = "missing"
        except OSError as error:
            what = f"cannot be read: {name} ({error.strerror})"
            raise unusable(path, what, "cannot be read") from None
        if what:
            reason, written = f"{name} is {what}", f"written: {size} bytes, CRC-32 {crc:08x}"
            raise unusable(path, f"is damaged: {reason} ({written})", reason)
    return checkpoint


def survey(folders: Iterable[Path]) -> tuple[list[Checkpoint], dict[Path, UnusableError]]:
    """Return what `list_checkpoints` does, and what is wrong with the others, and with folders that are not read."""
    found, damaged = [], {}
    for folder in folders:
        try:  # not glob, to which a folder that cannot be read is an empty one
            paths = sorted(filter(is_named, folder.iterdir()))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            what = f"cannot be read ({error.strerror})"
            paths, damaged[folder] = [], unusable(folder, what, "cannot be read", "")
        for path in paths:
            try:
                found.append(inspect(path, sums=False))
            except UnusableError as error:
                damaged[path] = error
    return sorted(found, key=lambda checkpoint: checkpoint.age), damaged


def list_checkpoints(folders: Iterable[Path]) -> list[Checkpoint]:
    """Return what is complete by its sizes, in the order of writing. Links and hidden folders are no checkpoints."""
    return survey(folders)[0]


def find_latest(folders: Iterable[Path], advice: str = "Give another folder.") -> Checkpoint | None:
    """Return the newest checkpoint that is whole, None if there is none at all; one warning names those passed over.

    Called by all ranks; the first one looks.

    Raises:
        CheckpointError: on all ranks, if none of those there is whole; it ends with `advice`.
    """

    def look() -> Checkpoint | None:
        found, damaged = survey(folders)
        latest = None
        for checkpoint in reversed(found):
            try:
                latest = inspect(checkpoint.path)
                break
            except UnusableError as error:
                damaged[checkpoint.path] = error
        reasons = " ".join(str(why).removesuffix(OTHERS) for why in damaged.values())
        if damaged and latest is None:
            raise CheckpointError(f"no checkpoint is whole: {reasons} {advice}")
        if damaged and latest:
            number = f"{len(damaged)} checkpoint{'s' * (len(damaged) > 1)}"
            text = f"{number} cannot be used; using {latest.path.name}. {reasons} --list-checkpoints shows them."
            warnings.warn(text, Fp8StackWarning, stacklevel=3)
        return latest

    return on_first_rank(look)


def find(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest one in it if it is the folder of some, or of a run.

    Raises:
        CheckpointError: on all ranks, if there is none, or the one that is named is damaged.
    """
    folders = [path, path / "checkpoints", path / "checkpoints_fp8"]
    latest = None if (path / MANIFEST).exists() else find_latest(folders)
    return latest or on_first_rank(lambda: inspect(path))


def load(path: Path, states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Read a checkpoint into the tensors of `states`; return (progress, this rank's own, None for a new rank).

    Raises:
        CheckpointError: if it does not fit: another model, or state that is not there.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*in a single process")
            dcp.load(states, checkpoint_id=path)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(
            f"{path} does not fit this run ({first_line(cause)}). It is of another model or optimizer: give the "
            "options that it was written with; its manifest.json lists them."
        ) from error
    progress = torch.load(path / "progress.pt", map_location="cpu", weights_only=True)
    own = path / f"rank_{rank_and_world()[0]}.pt"
    local = torch.load(own, map_location="cpu", weights_only=True) if own.exists() else None
    return progress, local
