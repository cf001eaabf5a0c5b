"""Optimizer checkpoints: what is written, what is accepted, and conversion to and from torch's optimizers.

`state_dict()` is torch's layout plus one entry, `fp8stack`: the format version, how much state there should be, and the
names of the parameters, for readers without the model (`fp8stack convert`) and to tell another order.
`prepare` checks everything and changes nothing; `install` loads what it returned. A moment found in another format
(float32 from torch, "fp8-lm" into "8bit") is decoded and encoded; one in the same format is copied bit for bit.
Parameter groups are updated in place, so a scheduler that holds the list keeps driving it; what they say of formats
stays the optimizer's own.

torch's own `Optimizer.load_state_dict` cannot be used: it casts every state tensor to the dtype of its parameter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import CheckpointError, ModelError
from fp8stack.formats import UE3M1
from fp8stack.tensor import is_sharded

from . import state_formats as formats
from .imported_states import translate
from .parameter_names import check_order, names_of_owned
from .parameter_state import StatefulOptimizer
from .sharded import assign, collect, distribute, local, local_state
from .state_formats import MASTER_KEYS, State, is_second

FORMAT = 1
"""Version of the state's layout and codecs. A change of either raises it."""

MALFORMED = (AttributeError, KeyError, RuntimeError, TypeError)
"""What a state raises that is not laid out as it should be."""


# --- writing


def tag(optimizer: StatefulOptimizer, packed: dict[str, Any]) -> dict[str, Any]:
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


def to_torch(
    optimizer: StatefulOptimizer, device: str | None = None, masters: bool = False
) -> dict[str, Any]:
    """Return the state as torch's optimizer of the same kind would hold it: float32 moments.

    Args:
        device: where the moments go; by default they stay with their parameters.
        masters: include the masters of the weights, in the format they are kept in. `fp8stack.checkpoint` exports them
            as float32 (`master_state_dict`).
    """
    optimizer.wait_for_offloaded()
    packed = torch.optim.Optimizer.state_dict(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for key, entry in packed["state"].items():
        if "step" in entry:
            p = parameters[key]
            mine, moments = local_state(entry), {}
            for name in optimizer.moments:
                value = formats.decode_moment(name, mine, local(p).shape)
                if value is not None:
                    moments[name] = value.to(device or p.device, copy=True)
            state[key] = distribute(moments, p)
            if "exp_avg" in moments:  # torch's SGD and Muon do not count steps
                state[key]["step"] = entry["step"].float()  # as torch keeps it
        if masters:
            state.setdefault(key, {}).update(_masters(entry))
    return {"state": state, "param_groups": plain_numbers(packed["param_groups"])}


def plain_numbers(value: Any) -> Any:
    """Return `value` with Python numbers for numpy's, which schedules make and `weights_only=True` refuses."""
    if type(value) in (dict, OrderedDict):
        result = copy(value)  # with its _metadata, if it is a model's
        result.clear()
        result.update((plain_numbers(key), plain_numbers(part)) for key, part in value.items())
        return result
    if type(value) in (list, tuple):
        return type(value)(plain_numbers(part) for part in value)
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar else value


# --- loading


Prepared = tuple[list[dict[str, Any]], dict[Tensor, State]]
"""A state_dict that fits an optimizer: options of the groups, and states in the optimizer's formats, except for masters
that are in another one."""


def prepare(optimizer: StatefulOptimizer, packed: dict[str, Any]) -> Prepared:
    """Return what `packed` holds, checked and in the optimizer's formats; change nothing.

    Raises:
        CheckpointError: if it is of another format version, optimizer or model, or incomplete.
    """
    packed = dict(packed)
    for hook in list(optimizer._optimizer_load_state_dict_pre_hooks.values()):
        packed = hook(optimizer, packed) or packed
    check_packed(optimizer, packed)
    model = None if optimizer.named_by is None else optimizer.named_by()
    if model is not None and packed.get("fp8stack"):
        check_order(optimizer, model, packed["fp8stack"].get("names", ()))
    states: dict[Tensor, State] = {}
    options: list[dict[str, Any]] = []
    for group, saved_group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        own = ("params", "states", "master", "flat")
        options.append({k: deepcopy(v) for k, v in saved_group.items() if k not in own})
        group = group | options[-1]  # what it will be: a saved momentum says that there are buffers
        for parameter, key in zip(group["params"], saved_group["params"], strict=True):
            if key not in packed["state"]:
                # keep the master: it belongs to the weight, not to a step taken
                if present := _masters(optimizer.state.get(parameter, {})):
                    states[parameter] = present
                continue
            try:
                states[parameter] = _convert(optimizer, group, parameter, packed["state"][key], key)
            except MALFORMED as error:
                raise CheckpointError(
                    f"state of parameter {key} (shape {tuple(parameter.shape)}) is malformed ({error}). "
                    "The checkpoint is damaged, or of another model; use an earlier one."
                ) from error
    return options, states


def install(optimizer: StatefulOptimizer, prepared: Prepared) -> None:
    """Load what `prepare` returned. A master in another format starts from the weight as it is now."""
    options, states = prepared
    _encode_masters(optimizer, states)
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        group.update(saved)
    optimizer.state.clear()
    optimizer.state.update(states)
    for hook in list(optimizer._optimizer_load_state_dict_post_hooks.values()):
        hook(optimizer)


def adopt(
    optimizer: StatefulOptimizer,
    source: torch.optim.Optimizer,
    only: Collection[Tensor] | None = None,
) -> None:
    """Take over the states of `source`, of the same kind, in this one's formats. The groups are shared already.

    Args:
        only: the states of these parameters; by default all.

    Raises:
        ModelError: if a state is not what an optimizer of this kind has. Nothing is changed.
    """
    states = {}
    pairs = ((group, p) for group in source.param_groups for p in group["params"])
    for group, p in pairs:
        if not source.state.get(p) or (only is not None and p not in only):
            continue
        try:
            states[p] = _convert(optimizer, group, p, source.state[p], "?")
        except (CheckpointError, *MALFORMED) as error:
            raise ModelError(
                f"the optimizer's state of a parameter of shape {tuple(p.shape)} cannot be taken over ({error}). "
                "Was it changed by hand, or the parameter resized? Drop it: optimizer.state.pop(parameter)."
            ) from error
    _encode_masters(optimizer, states)
    optimizer.state.update(states)


def reformat(optimizer: StatefulOptimizer, formats: dict[Tensor, tuple[str, str]]) -> None:
    """Keep the states of these parameters in other (states, master) from now on, and convert existing states."""
    old = dict(optimizer.overrides)
    optimizer.overrides.update(formats)
    try:
        adopt(optimizer, optimizer, formats)
    except BaseException:
        optimizer.overrides = old
        raise


# --- checks


def check_packed(optimizer: torch.optim.Optimizer, packed: Any) -> None:
    """Raise unless `packed` is a state_dict of this kind of optimizer, with as many parameters in as many groups."""
    try:
        theirs = [len(group["params"]) for group in packed["param_groups"]]
        entries = len(packed["state"])
    except (IndexError, KeyError, TypeError) as error:
        found = list(packed) if isinstance(packed, dict) else type(packed).__name__
        raise CheckpointError(
            'an optimizer state_dict has the keys "state" and "param_groups", whose groups list "params"; this has '
            f"{found!r:.100}. Pass what optimizer.state_dict() returned, or use an earlier checkpoint."
        ) from error
    # Without it: torch's optimizer, or a caller that keeps only torch's two keys (DCP); entries tell their format.
    if packed.get("fp8stack") is not None:
        _check_header(optimizer, packed["fp8stack"], entries)
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if mine != theirs:
        raise CheckpointError(
            f"the checkpoint has parameter groups of {theirs} parameters, the optimizer of {mine}: "
            "it is of another model or of other groups. Build both as they were when it was saved."
        )


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of fp8stack.optim or torch.optim that an optimizer's state belongs to: its own or its base."""
    ours = ("fp8stack.optim.", "torch.optim.")
    return next(c.__name__ for c in type(optimizer).__mro__ if c.__module__.startswith(ours))


def _check_header(optimizer: torch.optim.Optimizer, header: Any, entries: int) -> None:
    """Raise unless the entry that `tag` wrote fits this optimizer and the number of states."""
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
    named = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if header.get("entries") != entries or not named:
        raise CheckpointError(
            f"the state says it has {header.get('entries')} entries and has {entries}, and its names are "
            f"{names!r:.60}: it is damaged. Use an earlier checkpoint."
        )


# --- conversion


def _convert(
    optimizer: StatefulOptimizer,
    group: dict[str, Any],
    parameter: nn.Parameter,
    entry: State,
    key: Any,
) -> State:
    """Return one parameter's saved state with moments in the optimizer's own format, on the parameter's device."""
    optimizer.check_formats_of(parameter)
    moments = optimizer.moments_of(group)
    entry = translate(entry, moments, key, is_sharded(parameter))
    weight = local(parameter.detach())  # all that follows is about this rank's part
    entry = {
        k: v.to(weight.device, copy=True).contiguous() if isinstance(v, Tensor) else deepcopy(v)
        for k, v in collect(entry, parameter, key).items()
    }
    known = {f"{name}{part}" for name in optimizer.moments for part in ("", "_code", "_scale")}
    found = {k for k, v in entry.items() if isinstance(v, Tensor)}
    if unknown := found - known - {"step", *MASTER_KEYS}:
        raise CheckpointError(
            f"state of parameter {key} (shape {tuple(parameter.shape)}) holds {sorted(unknown)}, which "
            f"{type(optimizer).__name__} does not have: it is of another optimizer. Make the one it was saved from."
        )
    new: State = {}
    if "step" in entry or any(formats.has_moment(name, entry) for name in moments):
        count = torch.as_tensor(entry.get("step", 1.0), dtype=torch.float64, device=weight.device)
        new["step"] = count.reshape(())
        states = optimizer.moment_format(parameter)
        for name in moments:
            new |= _convert_moment(name, entry, weight, states, key)
    saved = _masters(entry)
    if any(v.ndim and v.shape != weight.shape for v in saved.values()):
        shapes = {k: tuple(v.shape) for k, v in saved.items()}
        raise _of_another_model(key, weight, f"has a master of shape {shapes}")
    keeps_none = optimizer.master_format(parameter) is None
    if saved and (keeps_none or ("remainder" in saved and weight.dtype is not torch.bfloat16)):
        raise CheckpointError(
            f"state of parameter {key}: the checkpoint holds a master weight for a 16-bit parameter, this one is "
            f"{parameter.dtype}. Initialize at the level it was saved from, or export the weights with "
            "fp8stack.checkpoint.master_state_dict."
        )
    new.update(saved or _masters(optimizer.state.get(parameter, {})))
    return optimizer.place(new, parameter)


def _convert_moment(name: str, entry: State, weight: Tensor, states: str, key: Any) -> State:
    """Return one moment of a saved state in the format `states`; unchanged if it is in that format already."""
    codes = entry.get(f"{name}_code", weight)
    four_bits = tuple(codes.shape) == UE3M1.codes_shape(weight.shape)
    if codes.shape != weight.shape and not (four_bits and is_second(name)):
        if four_bits:
            raise CheckpointError(
                f'state of parameter {key} (shape {tuple(weight.shape)}): {name} is kept as "4bit-experimental", '
                "which this version of fp8stack does not have. Load it with the version that wrote it and export it "
                "with fp8stack.checkpoint.torch_state_dict."
            )
        raise _of_another_model(key, weight, f"{name} is of shape {tuple(codes.shape)}")
    wanted = formats.zero_moment(name, weight.to("meta"), states)
    if _alike(entry, wanted):
        return {k: entry[k] for k in wanted}
    value = formats.decode_moment(name, entry, weight.shape)
    if value is None or value.shape != weight.shape:
        found = "missing" if value is None else f"of shape {tuple(value.shape)}"
        raise _of_another_model(key, weight, f"{name} is {found}")
    return formats.encode_moment(name, value, weight, states)


def _encode_masters(optimizer: StatefulOptimizer, states: dict[Tensor, State]) -> None:
    """Convert the masters in `states` to the optimizer's format, and set the weights that this changes."""
    weights = {}
    for p, state in states.items():
        saved, kind = local_state(_masters(state)), optimizer.master_format(p)
        old = local(p).detach()
        wanted = formats.zero_master(old.to("meta"), kind)
        if not saved or (saved.keys() == wanted.keys() and _alike(saved, wanted)):
            continue
        weights[p], entries = formats.encode_master(formats.decode_master(old, saved), kind)
        for name in saved:
            del state[name]
        state.update(optimizer.place(entries, p))
    for parameter, weight in weights.items():
        assign(parameter, weight)


def _of_another_model(key: Any, weight: Tensor, problem: str) -> CheckpointError:
    return CheckpointError(
        f"state of parameter {key} (shape {tuple(weight.shape)}): {problem}. The checkpoint is of another model, or "
        "truncated; use the one saved with this model."
    )


def _masters(state: State) -> State:
    return {name: value for name, value in state.items() if name in MASTER_KEYS}


def _alike(saved: State, wanted: State) -> bool:
    """Return whether `saved` has the tensors of `wanted`, of the same shapes and dtypes."""
    return all(
        isinstance(x := saved.get(name), Tensor) and x.dtype is y.dtype and x.shape == y.shape
        for name, y in wanted.items()
    )
