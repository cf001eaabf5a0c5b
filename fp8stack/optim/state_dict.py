"""Optimizer checkpoints: what is written, what is accepted, and conversion to and from torch's optimizers.

`state_dict()` is torch's layout plus one entry, `fp8stack`: the format version, how much state there should be, and the
names of the parameters, for readers without the model (`fp8stack convert`) and to tell another order.
`prepare` checks everything and changes nothing; `install` loads what it returned. A moment found in another format
(float32 from torch, "fp8-lm" into "8bit") is decoded and encoded; one in the same format is copied bit for bit.
Parameter groups are updated in place, so a scheduler that holds the list keeps driving it; what they say of formats
stays the optimizer's own.

torch's own `Optimizer.load_state_dict` cannot be used: it casts every state tensor to the dtype of its parameter.

States of bitsandbytes and torchao are read too. bitsandbytes keeps `state1` and `state2`, in float32 or as codes with
`absmax1` and `qmap1` (the table of their values). They lie in a dictionary of their own or beside the other entries;
blocks have 256 elements, in old versions 2048. torchao uses torch's names, and tensor subclasses as values. Reading
checkpoints of bitsandbytes does not need the library; those of torchao need it, because torch.load makes its classes.
Only states are translated. Parameter groups load as they are. SGD keeps the momentum it was made with, because
bitsandbytes saves it among `betas`. bitsandbytes' Adam decays weights as AdamW does: load its states into AdamW.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import CheckpointError, ModelError
from fp8stack.kernels.reference import bitsandbytes_format
from fp8stack.levels import plain_number
from fp8stack.tensor_kinds import is_sharded

from . import saved_checks as checks
from . import state_formats as formats
from .parameter_names import check_order, names_of_owned
from .parameter_state import StatefulOptimizer
from .saved_checks import FORMAT, check_group, check_packed, damaged, kind_of, place_of
from .sharded import assign, collect, distribute, local, local_state
from .state_formats import MASTER_KEYS, State

_WRAPPED = "__bnb_optimizer_quant_state__"
_BLOCKS = (bitsandbytes_format.BLOCK, 2048)

# --- writing


def tag(optimizer: StatefulOptimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Return `packed` (torch's state_dict) as plain dictionaries, with the entry that says what it is."""
    packed["state"] = {key: dict(entry) for key, entry in packed["state"].items()}
    packed["param_groups"] = plain_numbers(packed["param_groups"])
    packed["fp8stack"] = {
        "format": FORMAT, "optimizer": kind_of(optimizer), "states": optimizer.states, "master": optimizer.master,
        "entries": len(packed["state"]),
        "masters": sum(bool(formats.masters(entry)) for entry in packed["state"].values()),
    }  # fmt: skip
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
    state: dict[Any, State] = {}
    for key, entry in packed["state"].items():
        if "step" in entry:
            p = parameters[key]
            mine, moments = local_state(entry), state.setdefault(key, {})
            for name in optimizer.moments:
                value = formats.decode_moment(name, mine, local(p).shape)
                if value is not None:
                    moments[name] = distribute(value.to(device or p.device, copy=True), p)
            if "exp_avg" in moments:  # torch's SGD and Muon do not count steps
                moments["step"] = entry["step"].float()  # as torch keeps it
        if masters:
            state.setdefault(key, {}).update(formats.masters(entry))
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
    return plain_number(value)


# --- loading


Prepared = tuple[list[dict[str, Any]], dict[Tensor, State]]
"""A state_dict that fits an optimizer: options of the groups, and states in the optimizer's formats, except for masters
that are in another one."""


@torch.no_grad()
def prepare(optimizer: StatefulOptimizer, packed: dict[str, Any]) -> Prepared:
    """Return what `packed` holds, checked and in the optimizer's formats; change nothing.

    Raises:
        CheckpointError: if it is of another format version, optimizer or model, or incomplete.
    """
    packed = dict(packed) if isinstance(packed, dict) else packed
    for hook in list(optimizer._optimizer_load_state_dict_pre_hooks.values()):
        packed = hook(optimizer, packed) or packed
    check_packed(optimizer, packed)
    model = None if optimizer.named_by is None else optimizer.named_by()
    if model is not None and packed.get("fp8stack"):
        check_order(optimizer, model, packed["fp8stack"].get("names", ()))
    states: dict[Tensor, State] = {}
    options: list[dict[str, Any]] = []
    for number, saved in enumerate(packed["param_groups"]):
        own = optimizer.param_groups[number]
        options.append(check_group(optimizer, number, saved, ("states", "master", "flat")))
        group = own | options[-1]  # what it will be: a saved momentum says that there are buffers
        for parameter, key in zip(own["params"], saved["params"], strict=True):
            if key not in packed["state"]:
                # keep the master: it belongs to the weight, not to a step taken
                if present := formats.masters(optimizer.state.get(parameter, {})):
                    states[parameter] = present
                continue
            with damaged(place_of(key, parameter)):
                entry = packed["state"][key]
                states[parameter] = _convert(optimizer, group, parameter, entry, key)
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
            with damaged(place_of("?", p)):
                states[p] = _convert(optimizer, group, p, source.state[p], "?")
        except CheckpointError as error:
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
    weight = local(parameter.detach())  # the conversion is about this rank's part
    entry = _translate(entry, moments, parameter, key)
    known = {f"{name}{part}" for name in optimizer.moments for part in ("", "_code", "_scale")}
    found = {k for k, v in entry.items() if isinstance(v, Tensor)} - {"step"}
    if unknown := found - known - {*MASTER_KEYS}:
        raise CheckpointError(
            f"state of parameter {key} (shape {tuple(parameter.shape)}) holds {sorted(unknown)}, which "
            f"{type(optimizer).__name__} does not have: it is of another optimizer. Make the one it was saved from."
        )
    stepped = "step" in entry or any(formats.has_moment(name, entry) for name in moments)
    # torch's SGD and Muon, and Lions of others, do not count
    if stepped and "step" not in entry and any(map(formats.is_second, moments)):
        raise ValueError("step is missing")
    checks.check_layout(entry, moments if stepped else (), parameter)
    saved = formats.masters(entry)
    keeps_none = optimizer.master_format(parameter) is None
    if saved and (keeps_none or ("remainder" in saved and weight.dtype is not torch.bfloat16)):
        raise CheckpointError(
            f"state of parameter {key}: the checkpoint holds a master weight for a 16-bit parameter, this one is "
            f"{parameter.dtype}. Initialize at the level it was saved from, or export the weights with "
            "fp8stack.checkpoint.master_state_dict."
        )
    count = checks.count_of(entry.get("step", 1), parameter) if stepped else 0.0
    held = {k: collect(entry[k], parameter, f"{k} of parameter {key}") for k in entry if k in found}
    held = {k: v.detach().to(weight.device, copy=True).contiguous() for k, v in held.items()}
    checks.check_values(held)
    new: State = {}
    if stepped:
        new["step"] = torch.tensor(count, dtype=torch.float64, device=weight.device)
        for name in moments:
            new |= _convert_moment(name, held, weight, optimizer.moment_format(parameter))
    new.update(formats.masters(held) or formats.masters(optimizer.state.get(parameter, {})))
    return optimizer.place(new, parameter)


def _convert_moment(name: str, entry: State, weight: Tensor, states: str) -> State:
    """Return one moment of a saved state in the format `states`; unchanged if it is in that format already."""
    wanted = formats.zero_moment(name, weight.to("meta"), states)
    if formats.alike(entry, wanted):
        return {k: entry[k] for k in wanted}
    value = formats.decode_moment(name, entry, weight.shape)
    assert value is not None
    return formats.encode_moment(name, value, weight, states)


def _encode_masters(optimizer: StatefulOptimizer, states: dict[Tensor, State]) -> None:
    """Convert the masters in `states` to the optimizer's format, and set the weights that this changes."""
    weights = {}
    for p, state in states.items():
        saved, kind = local_state(formats.masters(state)), optimizer.master_format(p)
        old = local(p).detach()
        wanted = formats.zero_master(old.to("meta"), kind)
        if not saved or (saved.keys() == wanted.keys() and formats.alike(saved, wanted)):
            continue
        weights[p], entries = formats.encode_master(formats.decode_master(old, saved), kind)
        for name in saved:
            del state[name]
        state.update(optimizer.place(entries, p))
    for parameter, weight in weights.items():
        assign(parameter, weight)


# --- states of bitsandbytes and torchao


def _translate(entry: State, moments: tuple[str, ...], parameter: Tensor, key: Any) -> State:
    """Return one parameter's saved state with torch's names; a state of neither library is returned as it is.

    Args:
        moments: the names of the optimizer's moments, in the order of bitsandbytes' `state1` and `state2`.
        parameter: whose state it is. Of a sharded one, codes with flat blocks are decoded, because no slice of rows
            can be cut from them.

    Raises:
        CheckpointError: for a state whose tensors are not all there or larger than the parameter, an incomplete one of
            bitsandbytes, or one of an optimizer with other moments.
    """
    entry = {**entry, **entry.get(_WRAPPED, {})}
    entry.pop(_WRAPPED, None)
    checks.check_tensors(entry, parameter)
    if "state1" in entry:
        entry = _from_bitsandbytes(entry, moments, key)
    for name in moments if is_sharded(parameter) else ():
        codes, scale = entry.get(f"{name}_code"), entry.get(f"{name}_scale")
        if codes is not None and scale is not None and scale.ndim == 1:
            entry[name] = formats.decode_moment(name, entry, codes.shape)
            del entry[f"{name}_code"], entry[f"{name}_scale"]
    return {name: _plain(value) for name, value in entry.items()}


def _from_bitsandbytes(entry: State, moments: tuple[str, ...], key: Any) -> State:
    found = sum(name in entry for name in ("state1", "state2"))
    if found != len(moments):
        raise CheckpointError(
            f"state of parameter {key}: bitsandbytes saved {found} moments, this optimizer has {len(moments)}. "
            "Make the optimizer that the checkpoint was saved from."
        )
    result = {"step": entry["step"]}
    for i, name in enumerate(moments, 1):
        codes = entry[f"state{i}"]
        if codes.dtype is not torch.uint8:
            result[name] = codes
            continue
        scale, values = entry.get(f"absmax{i}"), entry.get(f"qmap{i}")
        blocks = 0 if scale is None else scale.numel()
        block = next((b for b in _BLOCKS if -(-codes.numel() // b) == blocks), None)
        if scale is None or block is None or values is None or values.shape != (256,):
            raise CheckpointError(
                f"state of parameter {key}: bitsandbytes' state{i} has {codes.numel()} codes, which need a qmap{i} of "
                f"256 values and an absmax{i} for each 256 (or 2048) of them; there are {blocks}. The checkpoint is "
                "damaged; use an earlier one."
            )
        own = bitsandbytes_format.table(not formats.is_second(name), torch.device("cpu"))
        if block == bitsandbytes_format.BLOCK and torch.equal(values.cpu(), own):
            result |= {f"{name}_code": codes, f"{name}_scale": scale}  # the same format
        else:
            result[name] = bitsandbytes_format.decode(codes, scale, values, block)
    return result


def _plain(value: Any) -> Any:
    """Return the value of torchao's OptimState8bit, OptimState4bit or OptimStateFp8; others as they are."""
    if isinstance(value, Tensor) and {"codes", "scale"} <= vars(local(value)).keys():
        return distribute(local(value).dequantize(), value)
    return value
