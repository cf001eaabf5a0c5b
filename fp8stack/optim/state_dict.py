"""Optimizer checkpoints: what is written, what is accepted, and conversion to and from torch's optimizers.

`state_dict()` is torch's layout plus one entry, `fp8stack`: the format version, how much state there should be, and the
names of the parameters, for readers without the model (`fp8stack convert`) and to tell another order.
Loading checks everything before it changes anything. A moment found in another format (float32 from torch, "fp8-lm"
into "8bit") is decoded and encoded; one in the same format is copied bit for bit. Parameter groups are updated in
place, so a scheduler that holds the list keeps driving it.

torch's own `Optimizer.load_state_dict` cannot be used: it casts every state tensor to the dtype of its parameter.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8stack.errors import CheckpointError, ModelError
from fp8stack.formats import UE3M1
from fp8stack.tensor import is_sharded

from .foreign import translate
from .names import check_order, names_of_owned
from .sharded import assign, collect, distribute, local, local_state
from .state import (
    MASTER_KEYS,
    State,
    decode_master,
    decode_moment,
    encode_master,
    encode_moment,
    is_second,
    zero_master,
    zero_moment,
)

if TYPE_CHECKING:
    from .optimizer import BlockwiseOptimizer

FORMAT = 1
"""Version of the state's layout and codecs. A change of either raises it."""

MALFORMED = (AttributeError, KeyError, RuntimeError, TypeError)
"""What a state raises that is not laid out as it should be."""


def tag(optimizer: BlockwiseOptimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Return `packed` (torch's state_dict) as plain dictionaries, with the entry that says what it is."""
    packed["state"] = {key: dict(entry) for key, entry in packed["state"].items()}
    packed["param_groups"] = plain_numbers(packed["param_groups"])
    packed["fp8stack"] = {
        "format": FORMAT,
        "optimizer": _kind(optimizer),
        "states": optimizer.states,
        "master": optimizer.master,
        "entries": len(packed["state"]),
    }
    model = None if optimizer.named_by is None else optimizer.named_by()
    if model is not None:
        packed["fp8stack"]["names"] = names_of_owned(model, optimizer)
    return packed


def load(optimizer: BlockwiseOptimizer, packed: dict[str, Any]) -> None:
    """Check `packed` against `optimizer`, then load it; see `BlockwiseOptimizer.load_state_dict`."""
    packed = dict(packed)
    for hook in list(optimizer._optimizer_load_state_dict_pre_hooks.values()):
        packed = hook(optimizer, packed) or packed
    new_state, new_weights = prepare(optimizer, packed)
    for group, saved_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        group.update({k: deepcopy(v) for k, v in saved_group.items() if k != "params"})
    optimizer.state.clear()
    optimizer.state.update(new_state)
    for parameter, weight in new_weights.items():
        assign(parameter, weight)
    for post_hook in list(optimizer._optimizer_load_state_dict_post_hooks.values()):
        post_hook(optimizer)


def prepare(
    optimizer: BlockwiseOptimizer, packed: dict[str, Any]
) -> tuple[dict[Tensor, State], dict[nn.Parameter, Tensor]]:
    """Return the state that `packed` holds in the optimizer's formats, and the weights it changes; change nothing.

    Weights change only where their master is converted to another format, since they are its rounding.
    """
    check_layout(packed)
    check_header(optimizer, packed)
    check_groups(optimizer, packed)
    model = None if optimizer.named_by is None else optimizer.named_by()
    if model is not None and packed.get("fp8stack"):
        check_order(optimizer, model, packed["fp8stack"].get("names", ()))
    new_state: dict[Tensor, State] = {}
    new_weights: dict[nn.Parameter, Tensor] = {}
    for group, saved_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved_group["params"], strict=True):
            if key in packed["state"]:
                entry = packed["state"][key]
                try:
                    state = _convert(optimizer, group, parameter, entry, key, new_weights)
                except MALFORMED as error:
                    raise CheckpointError(
                        f"state of parameter {key} (shape {tuple(parameter.shape)}) is malformed ({error}). "
                        "The checkpoint is damaged, or of another model; use an earlier one."
                    ) from error
                new_state[parameter] = state
            elif (
                parameter in optimizer.state
            ):  # keep the master: it belongs to the weight, not to a step taken
                kept = {k: v for k, v in optimizer.state[parameter].items() if k in MASTER_KEYS}
                if kept:
                    new_state[parameter] = kept
    return new_state, new_weights


def adopt(optimizer: BlockwiseOptimizer, source: torch.optim.Optimizer) -> None:
    """Take over the state of an optimizer of the same kind, encoded; groups are shared already.

    Raises:
        ModelError: if a state is not what an optimizer of this kind has. Nothing is changed.
    """
    new_state = {}
    for group in source.param_groups:
        for parameter in group["params"]:
            if parameter in source.state:
                entry = source.state[parameter]
                new_state[parameter] = _taken_over(optimizer, group, parameter, entry, {})
    optimizer.state.update(new_state)


def reformat(optimizer: BlockwiseOptimizer, formats: dict[Tensor, tuple[str, str]]) -> None:
    """Keep the states of these parameters in other (states, master) from now on; those there are are encoded anew."""
    old, new_weights = dict(optimizer.overrides), dict[nn.Parameter, Tensor]()
    new_state: dict[Tensor, State] = {}
    optimizer.overrides.update(formats)
    try:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p in formats and optimizer.state.get(p):
                    entry = optimizer.state[p]
                    new_state[p] = _taken_over(optimizer, group, p, entry, new_weights)
    except BaseException:
        optimizer.overrides = old
        raise
    optimizer.state.update(new_state)
    for parameter, weight in new_weights.items():
        assign(parameter, weight)


def _taken_over(
    optimizer: BlockwiseOptimizer,
    group: dict[str, Any],
    parameter: nn.Parameter,
    entry: State,
    new_weights: dict[nn.Parameter, Tensor],
) -> State:
    try:
        return _convert(optimizer, group, parameter, entry, "?", new_weights)
    except (CheckpointError, *MALFORMED) as error:
        raise ModelError(
            f"the optimizer's state of a parameter of shape {tuple(parameter.shape)} cannot be taken over ({error}). "
            "Was it changed by hand, or the parameter resized? Drop it: optimizer.state.pop(parameter)."
        ) from error


def to_torch(
    optimizer: BlockwiseOptimizer, device: str | None = None, masters: bool = False
) -> dict[str, Any]:
    """Return the state as torch's optimizer of the same kind would hold it: float32 moments, on `device` or in place.

    The weights' masters are not part of it unless asked for, as they are kept: export them with
    `fp8stack.checkpoint.master_state_dict`.
    """
    optimizer.wait_for_offloaded()
    packed = torch.optim.Optimizer.state_dict(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    families = [optimizer.family_of(g) for g in optimizer.param_groups for _ in g["params"]]
    state = {}
    for key, entry in packed["state"].items():
        if "step" in entry:
            p = parameters[key]
            mine, shape = local_state(entry), local(p).shape
            moments = {name: decode_moment(name, mine, shape) for name in optimizer.moments}
            given = {
                name: m.to(device or p.device, copy=True)
                for name, m in moments.items()
                if m is not None
            }
            state[key] = distribute(given, p)
            if families[key] not in ("sgd", "muon"):  # torch's do not count steps
                state[key]["step"] = entry["step"].clone()
        if masters:
            kept = {name: value for name, value in entry.items() if name in MASTER_KEYS}
            state.setdefault(key, {}).update(kept)
    return {"state": state, "param_groups": plain_numbers(packed["param_groups"])}


def plain_numbers(value: Any) -> Any:
    """Return `value` with numpy's scalars, which schedules make and `weights_only=True` refuses, as Python's."""
    if type(value) is dict:
        return {plain_numbers(key): plain_numbers(part) for key, part in value.items()}
    if type(value) is OrderedDict:
        result = copy(value)  # with its _metadata, if it is a model's
        result.update((key, plain_numbers(part)) for key, part in value.items())
        return result
    if type(value) in (list, tuple):
        return type(value)(plain_numbers(part) for part in value)
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar else value


def check_layout(packed: Any) -> None:
    """Raise unless `packed` is laid out as a state_dict of an optimizer."""
    if not isinstance(packed, dict) or not {"state", "param_groups"} <= packed.keys():
        found = sorted(map(str, packed)) if isinstance(packed, dict) else type(packed).__name__
        raise CheckpointError(
            f'an optimizer state_dict has the keys "state" and "param_groups", this has {found}. '
            "Pass what optimizer.state_dict() returned."
        )
    if not all(isinstance(g, dict) and "params" in g for g in packed["param_groups"]):
        raise CheckpointError(
            "a parameter group of the checkpoint lists no params: it is damaged. Use an earlier one."
        )


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the class of fp8stack.optim, or torch's, that an optimizer is of; a subclass has its state."""
    ours = ("fp8stack.optim.", "torch.optim.")
    return next(c.__name__ for c in type(optimizer).__mro__ if c.__module__.startswith(ours))


def check_header(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
    """Raise unless what fp8stack's optimizer wrote of its state, if one did, is whole and of this kind."""
    header = packed.get("fp8stack")
    if header is None:
        return  # torch's optimizer, or a caller that keeps only torch's two keys (DCP); entries tell their format
    found = header.get("format") if isinstance(header, dict) else header
    if found != FORMAT:
        raise CheckpointError(
            f"this optimizer state has format {found!r}; this version of fp8stack reads {FORMAT}. "
            "Load it with the version that wrote it and export it with fp8stack.checkpoint.torch_state_dict."
        )
    if header.get("optimizer") != _kind(optimizer):
        raise CheckpointError(
            f"this state is of {header.get('optimizer')}, the optimizer is {_kind(optimizer)}. "
            "Make the optimizer that the checkpoint was saved from."
        )
    names = header.get("names", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"the state's names are {names!r:.60}: it is damaged. Use an earlier checkpoint."
        )
    if header.get("entries") != len(packed["state"]):
        raise CheckpointError(
            f"the state says it has {header.get('entries')} entries and has {len(packed['state'])}: it is truncated. "
            "Use an earlier checkpoint."
        )


def check_groups(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> None:
    """Raise unless the saved groups have as many parameters as the optimizer's."""
    mine = [len(g["params"]) for g in optimizer.param_groups]
    theirs = [len(g["params"]) for g in packed["param_groups"]]
    if mine != theirs:
        raise CheckpointError(
            f"the checkpoint has parameter groups of {theirs} parameters, the optimizer of {mine}: "
            "it is of another model or of other groups. Build both as they were when it was saved."
        )


def _convert(
    optimizer: BlockwiseOptimizer,
    group: dict[str, Any],
    parameter: nn.Parameter,
    entry: State,
    key: Any,
    new_weights: dict[nn.Parameter, Tensor],
) -> State:
    """Return one parameter's saved state in the optimizer's own format, on the parameter's device."""
    optimizer.check_formats_of(parameter)
    entry = translate(entry, optimizer.moments_of(group), key, is_sharded(parameter))
    weight = local(parameter.detach())  # all that follows is about this rank's part
    entry = {
        k: v.to(weight.device, copy=True).contiguous() if isinstance(v, Tensor) else deepcopy(v)
        for k, v in collect(entry, parameter, key).items()
    }
    new: State = {}
    moments = optimizer.moments_of(group)
    _check_names(optimizer, entry, parameter, key)
    has_moments = "step" in entry or any(decodable(name, entry) for name in moments)
    if has_moments:
        step = entry.get("step", 1.0)
        count = torch.as_tensor(step, dtype=torch.float32, device=weight.device)
        new["step"] = count.reshape(())
    for name in moments if has_moments else ():
        _check_shape(name, entry, weight, key)
        kind = optimizer.moment_format(parameter)
        wanted = zero_moment(name, _shadow(weight), kind)
        if all(_alike(entry.get(k), v) for k, v in wanted.items()):
            new.update({k: entry[k] for k in wanted})
            continue
        value = decode_moment(name, entry, weight.shape) if decodable(name, entry) else None
        if value is None or value.shape != weight.shape:
            found = "missing" if value is None else f"of shape {tuple(value.shape)}"
            raise CheckpointError(
                f"state of parameter {key} (shape {tuple(weight.shape)}): {name} is {found}. "
                "The checkpoint is of another model, or truncated; use the one saved with this model."
            )
        new.update(encode_moment(name, value, weight, kind))
    new.update(_convert_master(optimizer, parameter, entry, key, new_weights))
    return optimizer.house(new, parameter)


def _convert_master(
    optimizer: BlockwiseOptimizer,
    parameter: nn.Parameter,
    entry: State,
    key: Any,
    new_weights: dict[nn.Parameter, Tensor],
) -> State:
    """Return the master's part of a saved state; the present one where the checkpoint has none."""
    saved = {k: v for k, v in entry.items() if k in MASTER_KEYS}
    present = {k: v for k, v in optimizer.state.get(parameter, {}).items() if k in MASTER_KEYS}
    kind = optimizer.master_format(parameter)
    if not saved:
        return present
    weight = local(parameter.detach())
    if any(v.ndim and v.shape != weight.shape for v in saved.values()):
        shapes = {k: tuple(v.shape) for k, v in saved.items()}
        raise CheckpointError(
            f"state of parameter {key} (shape {tuple(weight.shape)}) has a master of shape {shapes}. "
            "The checkpoint is of another model; use the one saved with this model."
        )
    if kind is None or ("remainder" in saved and parameter.dtype is not torch.bfloat16):
        raise CheckpointError(
            f"state of parameter {key}: the checkpoint holds a master weight for a 16-bit parameter, this one is "
            f"{parameter.dtype}. Initialize at the level it was saved from, or export the weights with "
            "fp8stack.checkpoint.master_state_dict."
        )
    wanted = zero_master(_shadow(weight), kind)
    if all(_alike(saved.get(k), v) for k, v in wanted.items()):
        return saved
    new_weights[parameter], converted = encode_master(decode_master(weight, saved), kind)
    return converted


def _check_names(optimizer: BlockwiseOptimizer, entry: State, parameter: Tensor, key: Any) -> None:
    """Raise if a state holds tensors that this kind of optimizer has no use for: it is of another."""
    known = {f"{name}{part}" for name in optimizer.moments for part in ("", "_code", "_scale")}
    unknown = (
        {k for k, v in entry.items() if isinstance(v, Tensor)} - known - {"step", *MASTER_KEYS}
    )
    if unknown:
        raise CheckpointError(
            f"state of parameter {key} (shape {tuple(parameter.shape)}) holds {sorted(unknown)}, which "
            f"{type(optimizer).__name__} does not have: it is of another optimizer. Make the one it was saved from."
        )


def _check_shape(name: str, entry: State, parameter: Tensor, key: Any) -> None:
    """Raise unless codes are as many as the parameter's elements, one or two in a byte."""
    codes, scale = entry.get(f"{name}_code"), entry.get(f"{name}_scale")
    if codes is None or scale is None or codes.shape == parameter.shape:
        return
    packed = tuple(codes.shape) == UE3M1.codes_shape(parameter.shape)
    if packed and not is_second(name):
        raise CheckpointError(
            f'state of parameter {key} (shape {tuple(parameter.shape)}): {name} is kept as "4bit-experimental", which '
            "this version of fp8stack does not have. Load it with the version that wrote it and export it with "
            "fp8stack.checkpoint.torch_state_dict."
        )
    if not packed:
        raise CheckpointError(
            f"state of parameter {key} (shape {tuple(parameter.shape)}): {name} is of shape {tuple(codes.shape)}. "
            "The checkpoint is of another model, or truncated; use the one saved with this model."
        )


def decodable(name: str, entry: State) -> bool:
    """Return whether `entry` holds the moment `name` in any format."""
    return entry.get(name) is not None or {f"{name}_code", f"{name}_scale"} <= entry.keys()


def _shadow(parameter: Tensor) -> Tensor:
    """Return the parameter without its data: what shapes and dtypes are worked out with."""
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


def _alike(saved: Any, wanted: Tensor) -> bool:
    return isinstance(saved, Tensor) and saved.dtype is wanted.dtype and saved.shape == wanted.shape
