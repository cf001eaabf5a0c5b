"""Checkpoints in one file, and weights in ordinary formats.

`save` writes the model, the optimizer and anything else of plain types to a temporary file and renames that, so an
interrupted save leaves the old file. `load` reads with `weights_only=True` and checks everything before it changes
anything. `torch.save(optimizer.state_dict())` works as well, because the state is made of plain tensors.

The optimizer may be None. At O2 it holds bits of the weights, so pass it there.

`master_state_dict` gives float32 weights (the 24-bit masters), `load_master_state_dict` takes them back, and
`torch_state_dict` gives the optimizer state as torch's own optimizer would hold it.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from .errors import CheckpointError, ModelError, first_line, reason_of
from .nn.delayed_histories import check_scaling, restore_scaling, scaling_state
from .optim import BlockwiseOptimizer
from .optim.parameter_names import check_order, names_of, names_of_owned, parameters_of
from .optim.saved_checks import are_names, check_for_torch
from .optim.state_dict import install, plain_numbers, prepare, to_torch
from .optim.state_formats import masters
from .tensor_kinds import fault_of, not_plain


def master_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Tensor]:
    """Return `model.state_dict()` with a float32 master weight for every parameter of 32 or 16 bits.

    Keys and shapes are the model's; all tensors are copies. Buffers and quantized parameters stay as they are.
    """
    own = model.state_dict()  # first: FSDP2 then puts back the shards that a forward has replaced
    parameters, result = parameters_of(model), {}
    masters: dict[Tensor, Tensor] = {}  # tied weights share theirs
    for key, value in own.items():
        parameter = parameters.get(key)
        if parameter is None or not_plain(parameter):
            # a buffer is copied; a module's extra state may be anything
            result[key] = value.detach().clone() if isinstance(value, Tensor) else value
            continue
        if parameter not in masters:
            if isinstance(optimizer, BlockwiseOptimizer):
                masters[parameter] = optimizer.master_weight(parameter)
            else:
                masters[parameter] = parameter.detach().float().clone()
        result[key] = masters[parameter]
    return result


@torch.no_grad()
def load_master_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, state_dict: dict[str, Tensor]
) -> None:
    """Load float32 weights with all their bits: `model.load_state_dict`, and the masters that the optimizer holds.

    Raises:
        CheckpointError: if keys or shapes are not the model's. Nothing is changed.
    """
    _check_keys(model.state_dict(), state_dict)
    if not isinstance(optimizer, BlockwiseOptimizer):
        model.load_state_dict(state_dict)
        return
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    masters = _masters_in(state_dict, model, optimizer, owned)
    model.load_state_dict(state_dict)
    _set_masters(optimizer, masters)


def torch_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer state as torch's optimizer of the same kind holds it: float32 moments and steps.

    For torch's own optimizer, which O0 leaves as it is, that is its `state_dict()`.

    Raises:
        ModelError: if there is no optimizer.
    """
    if isinstance(optimizer, BlockwiseOptimizer):
        return to_torch(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer.state_dict()
    got = f"got {type(optimizer).__name__}. Without one there is no state to return"
    raise ModelError(f"torch_state_dict takes the optimizer that initialize returned, {got}.")


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    **extra: Any,
) -> None:
    """Write model, optimizer and `extra` (numbers, strings, tensors, and lists and dicts of them) to `path`.

    NumPy scalars, which schedules may hold, are written as Python numbers.

    Raises:
        CheckpointError: if something is of a type that `load` would not read; it is named.
        OSError: if the file cannot be written, as on a full disk. In both cases `path` is as it was.
    """
    contents = {
        "model": model.state_dict(),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "names": [] if optimizer is None else names_of_owned(model, optimizer),
        "scaling": scaling_state(model),  # of fp8_recipe="delayed"; this rank's
        "extra": extra,
    }
    remedy = "Save numbers, strings, tensors, and lists and dicts of them (str(path), vars(arguments), list(...))"
    with replacing(path) as temporary:
        try:
            with open(temporary, "wb") as file:
                torch.save(plain_numbers(contents), file)
            unread = get_unsafe_globals_in_checkpoint(temporary)
        except (PickleError, AttributeError, TypeError, RecursionError) as error:
            told = f"what is to be saved cannot be pickled ({first_line(error)})"
            raise CheckpointError(f"{told}. {remedy}.") from error
        if unread:
            told = "checkpoints, which are read with weights_only=True, hold no"
            raise CheckpointError(f"{told} {', '.join(sorted(unread))}. {remedy}.")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a file to write, which becomes `path` at the end; after an exception `path` is as it was.

    A link stays one: what it leads to is replaced.
    """
    path, outer = Path(os.path.realpath(path)), sys.exc_info()[1]  # that a caller is handling
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        cause = error.__context__
        if isinstance(error, RuntimeError) and isinstance(cause, OSError) and cause is not outer:
            raise cause from None  # torch.save hides a full disk behind its own error
        raise


def read_file(path: str | os.PathLike[str]) -> Any:
    """Return what torch.save wrote, on the CPU; plain types and tensors only.

    Raises:
        CheckpointError: if the file is missing, truncated, no checkpoint, or holds other types.
    """
    try:
        with zipfile.ZipFile(path) as parts:
            size = sum(part.file_size for part in parts.infolist())
        if size > os.path.getsize(path):
            raise ValueError(f"its parts say that they are {size} bytes in all")
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from None
    except MemoryError:
        raise
    except Exception as error:  # the unpickler may raise anything on bytes that are no checkpoint
        other = re.search(r"GLOBAL (\S+) was not an allowed", str(error))
        what = f"it holds a {other[1]}" if other else "it is truncated, or not a checkpoint"
        remedy = "an earlier one, or one of state_dicts (tensors and plain types), not of models"
        raise CheckpointError(f"{path} cannot be read: {what}. Use {remedy}.") from error


def is_saved(contents: Any) -> bool:
    """Is this what `save` wrote: "model", "optimizer", "extra", and "names" of the optimizer's parameters?"""
    return isinstance(contents, dict) and {"model", "optimizer", "extra"} <= contents.keys()


@torch.no_grad()
def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Load what `save` wrote into `model` and `optimizer` and return its `extra`.

    Without an optimizer, only the weights are loaded, as the model had them: at O2 in bfloat16.

    Raises:
        CheckpointError: if the file is missing, truncated, not from `save`, or of another model, optimizer or format
            version. Neither model nor optimizer is changed then.
    """
    contents = read_file(path)
    if not is_saved(contents):
        remedy = "Load its parts with torch.load(weights_only=True) and load_state_dict"
        raise CheckpointError(f"{path} was not written by fp8stack.checkpoint.save. {remedy}.")
    names, scaling = contents.get("names", []), contents.get("scaling", {})
    if not are_names(names) or not isinstance(contents["extra"], dict):
        told = f'"names" is {names!r:.60} and "extra" is {contents["extra"]!r:.60}'
        raise CheckpointError(f"{path} is damaged: {told}. Use an earlier one.")
    check_scaling(scaling)
    _check_keys(model.state_dict(), contents["model"])
    packed, prepared = contents["optimizer"], None
    masters: dict[nn.Parameter, Tensor] = {}
    if optimizer is not None:
        if packed is None:
            told = f"there is no state for {type(optimizer).__name__}. Load it with None for that"
            raise CheckpointError(f"{path} was saved without an optimizer: {told}.")
        if isinstance(optimizer, BlockwiseOptimizer):
            prepared = prepare(optimizer, packed)
            bare = _saved_without_master(optimizer, packed)
            masters = _masters_in(contents["model"], model, optimizer, bare)
        else:
            check_for_torch(optimizer, packed)
        check_order(optimizer, model, names)
    # The model first: a master that is converted starts from the weight.
    model.load_state_dict(contents["model"])
    if isinstance(optimizer, BlockwiseOptimizer) and prepared is not None:
        install(optimizer, prepared)
        _set_masters(optimizer, masters)
    elif optimizer is not None:
        optimizer.load_state_dict(packed)
    restore_scaling(model, scaling)
    return contents["extra"]


def _masters_in(
    weights: dict[str, Tensor], model: nn.Module, optimizer: BlockwiseOptimizer, among: set[Any]
) -> dict[nn.Parameter, Tensor]:
    """Return those of `weights` that are to be the masters of the parameters `among`."""
    names = {p: n for p, n in names_of(model).items() if p in among and optimizer.master_format(p)}
    if hidden := sorted(names.values() - weights.keys()):
        raise CheckpointError(
            f"the model's state_dict does not have {hidden[:3]}, the weights of its optimizer's masters. Load without "
            "the hook that renames them or leaves them out."
        )
    return {p: weights[name] for p, name in names.items()}


def _set_masters(optimizer: BlockwiseOptimizer, masters: dict[nn.Parameter, Tensor]) -> None:
    for parameter, value in masters.items():
        optimizer.set_master(parameter, value.to(parameter.device, torch.float32))


def _saved_without_master(optimizer: BlockwiseOptimizer, packed: dict[str, Any]) -> set[Any]:
    """Return the parameters that were saved without a master (at O0 or O1): the weights have all their bits."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in packed["param_groups"] for key in group["params"]]
    return {p for p, k in zip(own, keys, strict=True) if not masters(packed["state"].get(k, {}))}


def _check_keys(own: dict[str, Tensor], given: Any) -> None:
    """Raise unless `given` has exactly the keys and shapes of `own`, and numbers of its kind. No data is looked at."""
    if not isinstance(given, dict):
        raise CheckpointError(f"the weights are {given!r:.60}, and no state_dict of a model.")
    missing = sorted(own.keys() - given.keys())
    unknown = sorted(given.keys() - own.keys(), key=repr)
    if missing or unknown:
        raise CheckpointError(
            f"the weights are of another model: {len(missing)} keys are missing {missing[:3]}, "
            f"{len(unknown)} are unknown {unknown[:3]}. Build the model that was saved."
        )
    for key, value in own.items():
        if not isinstance(value, Tensor):  # a module's extra state, which may be anything
            continue
        other = given[key]
        problem = "" if isinstance(other, Tensor) else f"is {other!r:.60}"
        if not problem and not fault_of(value):  # a buffer may be an expanded one
            problem = fault_of(other)
        if not problem and _kind(other) != _kind(value):
            problem = f"has dtype {other.dtype}, and {value.dtype} in the model"
        if not problem and other.shape != value.shape:
            problem = f"has shape {tuple(other.shape)} in the checkpoint and {tuple(value.shape)} in the model"
        if problem:
            raise CheckpointError(f"{key} {problem}. Build the model that was saved.")


def _kind(value: Tensor) -> tuple[bool, bool, bool]:
    """Return which of bool, real, complex and integer numbers a tensor holds."""
    return value.dtype is torch.bool, value.is_floating_point(), value.is_complex()
