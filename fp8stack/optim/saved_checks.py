"""Checks of an optimizer's saved state: all of them before anything is loaded, and metadata before data.

A file may be damaged, or of another optimizer. Its tensors are first looked at from outside (dtype, shape, layout, size
of the storage), because one of stride 0 claims gigabytes in a file of a few bytes. Their values are looked at last.

For torch's own optimizers, which O0 leaves as they are, the rules are torch's: one of the same class takes a step with
the saved group on a parameter of a few elements, and shows what its states hold.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.conflicts import UNCONVERTED
from fp8stack.errors import CheckpointError, ModelError, first_line
from fp8stack.formats import E4M3
from fp8stack.tensor_kinds import fault_of

from . import state_formats as formats
from .parameter_state import StatefulOptimizer
from .sharded import local
from .state_formats import MASTER_KEYS, State

FORMAT = 1
"""Version of the state's layout and codecs. A change of either raises it."""

LARGEST, LARGEST_SQUARE = 2.0**96, 2.0**127
"""Moments and scales from here on come from no gradient: a step takes none of 2^63."""

_NUMBERS = {"lr", "weight_decay", "eps", "ns_steps", "ns_coefficients"}
_AVERAGES = {"betas", "momentum", "dampening"}
_SQUARES = {
    "exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "variance", "row_var", "col_var", "acc_delta",
}  # fmt: skip


@contextmanager
def damaged(place: str) -> Iterator[None]:
    """Make whatever is raised in checking or converting a part of a state_dict a CheckpointError that names it."""
    try:
        yield
    except (CheckpointError, ModelError):
        raise
    except Exception as error:  # torch's and a user's classes may raise anything at such values
        problem = first_line(error).removesuffix(".")
        problem = problem if isinstance(error, ValueError) else f"it is malformed ({problem})"
        raise CheckpointError(
            f"{place}: {problem}. The checkpoint is damaged, or of another model; use an earlier one."
        ) from error


def place_of(key: Any, parameter: Tensor) -> str:
    """Return how messages call the state of a parameter."""
    return f"state of parameter {key} (shape {tuple(parameter.shape)})"


# --- the whole


def check_packed(optimizer: torch.optim.Optimizer, packed: Any) -> None:
    """Raise unless `packed` is a state_dict of this kind of optimizer, with as many parameters in as many groups."""
    try:
        groups, states = packed["param_groups"], packed["state"]
        # not through a tensor, which makes one of each of its elements
        lists = isinstance(groups, list | tuple)
        if not lists or not all(isinstance(g["params"], list | tuple) for g in groups):
            raise TypeError
        keys = [key for group in groups for key in group["params"]]
        theirs = [len(group["params"]) for group in groups]
        dicts = all(isinstance(x, dict) for x in (packed, states, *groups, *states.values()))
        sound = dicts and all(isinstance(key, int | str) for key in keys)
        mine = [len(group["params"]) for group in optimizer.param_groups]
        if sound and mine != theirs:
            raise CheckpointError(
                f"the checkpoint has parameter groups of {theirs} parameters, the optimizer of {mine}: "
                "it is of another model or of other groups. Build both as they were when it was saved."
            )
        sound = sound and len({*keys}) == len(keys) and states.keys() <= {*keys}
    except (AttributeError, LookupError, RuntimeError, TypeError):
        sound = False
    if not sound:
        found = list(packed) if isinstance(packed, dict) else type(packed).__name__
        raise CheckpointError(
            'an optimizer state_dict has the keys "state" and "param_groups", whose groups list "params", each once; '
            f"this has {found!r:.100}. Pass what optimizer.state_dict() returned, or use an earlier checkpoint."
        )
    # Without it: torch's optimizer, or a caller that keeps only torch's two keys (DCP); entries tell their format.
    if packed.get("fp8stack") is not None:
        _check_header(optimizer, packed["fp8stack"], states)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of fp8stack.optim or torch.optim that an optimizer's state belongs to: its own or its base."""
    ours = ("fp8stack.optim.", "torch.optim.")
    return next(c.__name__ for c in type(optimizer).__mro__ if c.__module__.startswith(ours))


def _check_header(optimizer: torch.optim.Optimizer, header: Any, states: dict[Any, State]) -> None:
    """Raise unless the entry that `tag` wrote fits this optimizer, and the numbers of states and masters."""
    held = header if isinstance(header, dict) else {"format": header, "optimizer": None}
    found, kind, count = held.get("format"), held.get("optimizer"), held.get("entries")
    if type(found) is not int or found != FORMAT:
        raise CheckpointError(
            f"this optimizer state has format {found!r:.60}; this version of fp8stack reads {FORMAT}. "
            "Load it with the version that wrote it and export it with fp8stack.checkpoint.torch_state_dict."
        )
    if not isinstance(kind, str) or kind != kind_of(optimizer):
        raise CheckpointError(
            f"this state is of {kind!s:.60}, the optimizer is {kind_of(optimizer)}. "
            "Make the optimizer that the checkpoint was saved from."
        )
    masters = sum(bool(formats.masters(entry)) for entry in states.values())
    said = count, held.get("masters", masters)  # older files count entries alone
    counted = [type(n) for n in said] == [int, int] and said == (len(states), masters)
    if not counted or not are_names(held.get("names", [])):
        raise CheckpointError(
            f"the state says it has {said[0]!s:.60} entries and {said[1]!s:.60} masters, and has {len(states)} and "
            f"{masters}; its names are {held.get('names')!r:.60}: it is damaged. Use an earlier checkpoint."
        )


def are_names(names: Any) -> bool:
    """Return whether this is a list of strings."""
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


# --- groups


def check_group(
    optimizer: torch.optim.Optimizer, number: int, saved: dict[str, Any], kept: Collection[str] = ()
) -> dict[str, Any]:
    """Return a copy of the options that a saved group has, without those in `kept`.

    Raises:
        CheckpointError: if a number that a step needs is missing, or an option is of another type or out of range.
    """
    own = optimizer.param_groups[number]
    with damaged(f"parameter group {number} of the checkpoint"):
        options = {k: deepcopy(v) for k, v in saved.items() if k not in ("params", *kept)}
        # bitsandbytes' SGD has betas for momentum, torch's Muon only momentum
        needed = _NUMBERS if options.keys() & {"betas", "momentum"} else _NUMBERS | _AVERAGES
        if missing := sorted((needed & own.keys()) - options.keys()):
            raise ValueError(f"it has no {missing}: it is of another optimizer, or damaged")
        # torch replaces its groups, and fills in what older versions did not have
        kept_too = own if isinstance(optimizer, StatefulOptimizer) else {}
        _check_options(optimizer, own, {**kept_too, **options})
    return options


def _check_options(optimizer: Any, own: dict[str, Any], group: dict[str, Any]) -> None:
    """Raise unless `group` has options that the optimizer, whose group is `own`, can step with."""
    for name, value in group.items():
        mine = own.get(name)
        if isinstance(value, Tensor) and (fault := _fault_of(value)):
            raise ValueError(f"{name} {fault}")
        if name in own and isinstance(value, dict) and not isinstance(mine, dict):
            raise ValueError(f"{name} is {value!r:.60}")
        if None not in (mine, value) and isinstance(mine, bool) != isinstance(value, bool):
            raise ValueError(f"{name} is {value!r:.60}, and {mine!r:.60} in the optimizer")
        if name in _NUMBERS | _AVERAGES:
            values = value if isinstance(value, list | tuple) else [value]
            if not all(math.isfinite(x) for x in values if x is not None):
                raise ValueError(f"{name} must be finite, got {value!r:.60}")
    if not isinstance(optimizer, StatefulOptimizer):
        return  # `check_for_torch` takes a step with it
    unlike = [name for name in UNCONVERTED if group.get(name)]
    if unlike or optimizer.family_of(group) != optimizer.family_of(own):
        raise ValueError(f"{unlike or 'algorithm'} says that it is of another optimizer")
    optimizer.numbers_of(group), optimizer.algorithm_of(group)  # type: ignore[attr-defined]


def _trial(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> State:
    """Return the state that torch's optimizer with the options of `group` makes, of a parameter with few elements.

    It is of as many dimensions as `parameter`. The result is empty for classes that are not torch's.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind is torch.optim.SparseAdam:
        return {}
    small = nn.Parameter(parameter.new_zeros([2 + d for d in range(parameter.ndim)]))
    trial = kind([small], lr=1e-3)  # type: ignore[call-arg]
    # with the states that Adagrad makes when it is built: before torch 2.13 its step makes none
    trial.load_state_dict({**trial.state_dict(), "param_groups": [{**group, "params": [0]}]})
    small.grad = torch.zeros_like(small)
    trial.step(lambda: 0.0)
    return dict(trial.state[small])


# --- states


def check_tensors(entry: State, parameter: Tensor) -> None:
    """Raise unless the tensors of a saved state are dense, and none is larger than the parameter or a table of 256."""
    most = max(parameter.numel(), 256)
    for name, value in entry.items() if not parameter.is_meta else ():
        if isinstance(value, Tensor) and ((fault := _fault_of(value)) or value.numel() > most):
            raise ValueError(f"{name} {fault or seen(value)}")


def _fault_of(value: Tensor) -> str:
    """Return what keeps a tensor from being part of a saved state; "" if nothing does. Its data is not looked at."""
    return "requires a gradient" if value.requires_grad else fault_of(value)


def check_layout(entry: State, moments: Collection[str], parameter: Tensor) -> None:
    """Raise unless moments and master are laid out as one of the formats says. Their data is not looked at."""
    shape, saved = parameter.shape, formats.masters(entry)
    for name in moments:
        if not formats.is_laid_out(name, entry, shape):
            there, scale = formats.has_moment(name, entry), entry.get(f"{name}_scale")
            held = f"{seen(entry.get(name, entry.get(f'{name}_code')))}, its scale {seen(scale)}"
            raise ValueError(f"{name} {held if there else 'is missing'}")
    if saved and not formats.is_master(saved, shape):
        raise ValueError(", ".join(f"{name} {seen(value)}" for name, value in saved.items()))


def check_values(entry: State) -> None:
    """Raise unless a step can have left the values of a state's tensors: finite, and roots and scales not negative."""
    for name, value in entry.items():
        held = isinstance(value, Tensor) and not value.is_meta and value.numel()
        if not held or name in MASTER_KEYS:
            continue  # a master is a weight, whose values are the model's
        second = name.removesuffix("_code") in _SQUARES
        most = LARGEST_SQUARE if second else LARGEST
        least = 0.0 if second or name.endswith("_scale") else -most
        sound = True
        if value.dtype is E4M3.dtype:
            sound = int((value.view(torch.uint8) & 127).max()) < 127
        elif value.is_floating_point():
            low, high = torch.stack(value.aminmax()).tolist()  # one wait for the device
            sound = least <= low and high < most
        if not sound:
            raise ValueError(f"{name} holds NaN, infinities, or values that no step leaves")


def count_of(value: Any, parameter: Tensor) -> float:
    """Return the steps that a state says it has taken, a number or a tensor of one."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.element_size() > 2:
        value = 0.0 if parameter.is_meta else local(value).item()
    fits = isinstance(value, Real) and not isinstance(value, bool)
    if not fits or not 0 <= value < 2**53 or value % 1:
        raise ValueError(f"step must be a whole number from 0 on, and is {value!r:.60}")
    return float(value)


def check_for_torch(optimizer: torch.optim.Optimizer, packed: Any) -> None:
    """Raise unless torch's optimizer can load `packed`, and step with it."""
    check_packed(optimizer, packed)
    names = {str(name) for entry in packed["state"].values() for name in entry}
    if any(name.endswith("_code") or name in MASTER_KEYS for name in names):
        told = f"holds low-precision states or masters, which {type(optimizer).__name__} of torch cannot read"
        raise CheckpointError(f"the file {told}. Load it at its level, then fp8stack.restore.")
    made_anew = ("momentum_buffer",) if isinstance(optimizer, torch.optim.SGD) else ()
    for number, saved in enumerate(packed["param_groups"]):
        parameters = optimizer.param_groups[number]["params"]
        group = check_group(optimizer, number, saved)
        with damaged(f"parameter group {number} of the checkpoint"):
            first_of = {p.ndim: p for p in reversed(parameters)}
            trials = {ndim: _trial(optimizer, group, p) for ndim, p in first_of.items()}
        for parameter, key in zip(parameters, saved["params"], strict=True):
            entry = packed["state"].get(key) or {}
            if entry or isinstance(optimizer, torch.optim.Adagrad):  # which always has states
                with damaged(place_of(key, parameter)):
                    check_tensors(entry, parameter)
                    _check_like(trials[parameter.ndim], entry, parameter, made_anew)
                    check_values(entry)


def _check_like(trial: State, entry: State, parameter: Tensor, made_anew: Collection[str]) -> None:
    """Raise unless `entry` has what is in `trial`, the state of a small parameter of as many dimensions."""
    for name, value in trial.items():
        given = entry.get(name)
        if name == "step":
            count_of(given, parameter)
        elif isinstance(value, Tensor) and (given is not None or name not in made_anew):
            shape = [n if n == 1 else parameter.shape[d] for d, n in enumerate(value.shape)]
            if not formats.is_dense(given, torch.Size(shape)):
                raise ValueError(f"{name} {seen(given)}")


def seen(value: Any) -> str:
    """Return what a message says of a value: of a tensor, what describes it."""
    if not isinstance(value, Tensor):
        return f"is {value!r:.60}"
    return f"is of shape {tuple(value.shape)}, {value.dtype}"
