"""Checkpoints in one file, and weights in ordinary formats.

`save` writes the model, the optimizer and anything else of plain types to a temporary file and renames that, so an
interrupted save leaves the old file. `load` reads with `weights_only=True` and checks everything before it changes
anything. `torch.save(optimizer.state_dict())` works as well, because the state is made of plain tensors.

The optimizer may be None. At O2 it holds bits of the weights, so pass it there.

`master_state_dict` gives float32 weights (the 24-bit masters), `load_master_state_dict` takes them back, and
`torch_state_dict` gives the optimizer state as torch's own optimizer would hold it.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CheckpointError, ModelError, first_line, reason_of
from .nn.delayed_histories import restore_scaling, scaling_state
from .optim import BlockwiseOptimizer
from .optim.parameter_names import check_order, names_of, names_of_owned
from .optim.state_dict import check_packed, install, plain_numbers, prepare, to_torch
from .optim.state_formats import MASTER_KEYS
from .tensor import is_sharded

_PLAIN = {type(None), bool, int, float, complex, str, bytes, dict, list, tuple, OrderedDict}
_PLAIN |= {Tensor, nn.Parameter}


def master_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Tensor]:
    """Return `model.state_dict()` with every floating-point parameter as float32 master weight (copies).

    Keys and shapes are the model's. Buffers and integer tensors are copied as they are.
    """
    own = model.state_dict()  # first: FSDP2 then puts back the shards that a forward has replaced
    parameters, result = dict(model.named_parameters(remove_duplicate=False)), {}
    masters: dict[Tensor, Tensor] = {}  # tied weights share theirs
    for key, value in own.items():
        parameter = parameters.get(key)
        if parameter is None or not parameter.is_floating_point():
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
    own = model.state_dict()
    _check_keys(own, state_dict)
    model.load_state_dict(state_dict)
    if isinstance(optimizer, BlockwiseOptimizer):
        owned = {p for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in model.named_parameters():
            if parameter in owned and optimizer.master_format(parameter) is not None:
                value = state_dict[name].to(parameter.device, torch.float32)
                optimizer.set_master(parameter, value)


def torch_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer state as torch's optimizer of the same kind holds it: float32 moments and steps.

    That of torch's own, which O0 leaves as it is, is its `state_dict()`.

    Raises:
        ModelError: if there is no optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(
            f"torch_state_dict takes the optimizer that initialize returned, got {type(optimizer).__name__}. "
            "Without one there is no state to return."
        )
    return (
        to_torch(optimizer) if isinstance(optimizer, BlockwiseOptimizer) else optimizer.state_dict()
    )


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    **extra: Any,
) -> None:
    """Write model, optimizer and `extra` (numbers, strings, tensors, and lists and dicts of them) to `path`.

    Scalars of numpy, as schedules make them, are written as Python's.

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
    try:
        contents = {kind: plain_numbers(value) for kind, value in contents.items()}
        places = ((kind, _find_unloadable(value)) for kind, value in contents.items())
        found = next(((kind, *one) for kind, one in places if one), None)
    except RecursionError:
        raise CheckpointError(
            "what is to be saved holds itself, or lists and dicts in each other, hundreds deep. Save it flat."
        ) from None
    if found:
        kind, place, part, error = found
        raise CheckpointError(
            f"{kind}{place} is {type(part).__module__}.{type(part).__qualname__}, which checkpoints do not "
            "hold: they are read with weights_only=True. Save numbers, strings, tensors, and lists and dicts of them "
            "(str(path), vars(arguments), torch.from_numpy(array), dict(...), list(...))."
        ) from error
    with replacing(path) as temporary, open(temporary, "wb") as file:
        torch.save(contents, file)


def _find_unloadable(value: Any) -> tuple[str, Any, Exception] | None:
    """Find a part of `value` that `weights_only=True` would not read; return its place, the part and the error."""
    if isinstance(value, dict):
        for key, part in value.items():
            if found := _find_unloadable(key):
                return f": the key {key!r}", *found[1:]
            if found := _find_unloadable(part):
                return f"[{key!r}]{found[0]}", *found[1:]
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            if found := _find_unloadable(part):
                return f"[{index}]{found[0]}", *found[1:]
    has_more = isinstance(value, Tensor) and value.__dict__  # attributes, which are written too
    is_plain = type(value) in _PLAIN and not has_more
    if is_plain or (isinstance(value, Tensor) and is_sharded(value)):
        return None
    try:
        torch.save(value, copy := io.BytesIO())
        copy.seek(0)
        torch.load(copy, weights_only=True)
    except Exception as error:
        return "", value, error
    return None


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a file to write, which becomes `path` at the end; after an exception `path` is as it was.

    A link stays one: what it leads to is replaced.
    """
    path, outer = Path(os.path.realpath(path)), sys.exc_info()[1]  # of a caller who handles one
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        os.close(descriptor)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # as any new file; mkstemp's is private
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        cause = error.__context__
        if isinstance(error, RuntimeError) and isinstance(cause, OSError) and cause is not outer:
            raise cause from None  # torch.save hides a full disk behind an error of its own
        raise


def read_file(path: str | os.PathLike[str]) -> Any:
    """Return what torch.save wrote, on the CPU; plain types and tensors only.

    Raises:
        CheckpointError: if the file is missing, truncated, no checkpoint, or holds other types.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {path}. Check the path.") from None
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error)}") from None
    except pickle.UnpicklingError as error:  # which advises weights_only=False
        other = re.search(r"GLOBAL (\S+) was not an allowed", str(error))
        held = f"it holds a {other[1]}" if other else "it is no checkpoint, or holds other types"
        raise CheckpointError(
            f"{path} cannot be read: {held}, where tensors and plain types are read. Save state_dicts, not models."
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # the unpickler may raise anything on bytes that are no checkpoint
        raise CheckpointError(
            f"{path} cannot be read: it is truncated, or not a checkpoint ({first_line(error)}). Use an earlier one."
        ) from error


def is_saved(contents: Any) -> bool:
    """Is this what `save` wrote: "model", "optimizer", "extra", and "names" of the optimizer's parameters?"""
    return isinstance(contents, dict) and {"model", "optimizer", "extra"} <= contents.keys()


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Load what `save` wrote into `model` and `optimizer` and return its `extra`.

    Without an optimizer the weights alone are loaded, as the model had them: at O2 in bfloat16.

    Raises:
        CheckpointError: if the file is missing, truncated, not from `save`, or of another model, optimizer or format
            version. Neither model nor optimizer is changed then.
    """
    contents = read_file(path)
    if not is_saved(contents):
        raise CheckpointError(
            f"{path} was not written by fp8stack.checkpoint.save. Load its parts with torch.load(weights_only=True) "
            "and the load_state_dict of model and optimizer."
        )
    _check_keys(model.state_dict(), contents["model"])
    packed = contents["optimizer"]
    if optimizer is not None and packed is None:
        raise CheckpointError(
            f"{path} was saved without an optimizer, so there is no state for {type(optimizer).__name__}. "
            "Load it with None for the optimizer."
        )
    prepared = None
    if isinstance(optimizer, BlockwiseOptimizer):
        prepared = prepare(optimizer, packed)
    elif optimizer is not None:
        _check_for_torch(optimizer, packed)
    if optimizer is not None:
        check_order(optimizer, model, contents.get("names", ()))
    # The model first: a master that is converted starts from the weight.
    model.load_state_dict(contents["model"])
    if isinstance(optimizer, BlockwiseOptimizer) and prepared is not None:
        install(optimizer, prepared)
        _set_missing_masters(model, optimizer, contents)
    elif optimizer is not None:
        optimizer.load_state_dict(packed)
    restore_scaling(model, contents.get("scaling", {}))
    extra: dict[str, Any] = contents["extra"]
    return extra


def _check_for_torch(optimizer: torch.optim.Optimizer, packed: Any) -> None:
    """Raise unless torch's own optimizer can make sense of `packed`."""
    check_packed(optimizer, packed)
    names = {str(name) for entry in packed["state"].values() for name in entry}
    if any(name.endswith("_code") or name in MASTER_KEYS for name in names):
        raise CheckpointError(
            f"the checkpoint holds low-precision states or masters, which {type(optimizer).__name__} of torch cannot "
            "read. Initialize at the level it was saved from, then fp8stack.restore(model, optimizer)."
        )


def _set_missing_masters(
    model: nn.Module, optimizer: BlockwiseOptimizer, contents: dict[str, Any]
) -> None:
    """Give weights that were saved without a master (at O0 or O1) all the bits that were saved of them."""
    names = names_of(model)
    packed = contents["optimizer"]
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            has_master = packed["state"].get(key, {}).keys() & set(MASTER_KEYS)
            if parameter in names and not has_master and optimizer.master_format(parameter):
                value = contents["model"][names[parameter]].to(parameter.device, torch.float32)
                optimizer.set_master(parameter, value)


def _check_keys(own: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """Raise unless `given` has exactly the keys and shapes of `own`."""
    missing, unknown = own.keys() - given.keys(), given.keys() - own.keys()
    if missing or unknown:
        raise CheckpointError(
            f"the weights are of another model: {len(missing)} keys missing {sorted(missing)[:3]}, "
            f"{len(unknown)} unknown {sorted(unknown)[:3]}. Build the model that was saved."
        )
    for key, value in own.items():
        if isinstance(value, Tensor) and value.shape != given[key].shape:
            raise CheckpointError(
                f"{key} has shape {tuple(given[key].shape)} in the checkpoint and {tuple(value.shape)} in the model. "
                "Build the model that was saved."
            )
