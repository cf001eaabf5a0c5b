"""Which formats the state of each parameter has, and where it is kept.

A matrix of at least `min_numel` elements (and rows of 8 or more) keeps its moments in the optimizer's format; vectors
and small matrices keep float32, decided on the whole tensor's shape, so that it is the same on every rank. Formats
can be set for a parameter group (keys "states" and "master") or a single parameter (`override`). Vectors of a group
with "flat" set are many parameters end to end, as DeepSpeed's ZeRO hands them to an optimizer, and count as matrices.
A bfloat16 or float16 parameter gets a master: by default the 24-bit split for a bfloat16 matrix, a float32 copy for
the few others.

State lies with its parameter, sharded like it, or in pinned host memory (`offload="cpu"`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import ConfigError, ModelError, did_you_mean
from fp8stack.formats import FLOATS
from fp8stack.tensor import is_sharded, whole_shape

from .sharded import assign, check_placements, collect, distribute, local, local_state
from .state import (
    MASTER_KEYS,
    MASTERS,
    STATES,
    State,
    decode_master,
    encode_master,
    encode_moment,
    is_dense,
    zero_moment,
)


class StateKeeper(torch.optim.Optimizer):
    """The part of `BlockwiseOptimizer` that makes and places state."""

    moments: tuple[str, ...]
    states: str
    master: str
    min_numel: int
    offload: str
    overrides: dict[Tensor, tuple[str, str]]
    _group_formats: dict[Tensor, tuple[str, str, bool]]

    # --- formats

    def override(
        self, parameter: Tensor, states: str | None = None, master: str | None = None
    ) -> None:
        """Keep the state of one parameter in other formats than the optimizer's, from its first step on.

        Raises:
            ConfigError: for an unknown format, or a parameter that has state already.
        """
        old = self.overrides.get(parameter, (self.states, self.master))
        new = (states or old[0], master or old[1])
        check_formats(*new)
        if any(name in self.state.get(parameter, {}) for name in ("step", *MASTER_KEYS)):
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} has state already; set its formats before the first "
                "step, or save the optimizer, make another with the formats wanted, and load it."
            )
        self.overrides[parameter] = new

    def formats_of(self, parameter: Tensor) -> tuple[str, str]:
        """Return (states, master) as asked for this parameter: its own, its group's or the optimizer's."""
        if parameter in self.overrides:
            return self.overrides[parameter]
        return self._of_group(parameter)[:2]

    def note_formats(self, group: dict[str, Any], parameters: Iterable[Tensor]) -> None:
        """Keep these parameters in the formats of `group`, whatever becomes of it: ZeRO empties and rewrites groups."""
        formats = group.get("states", self.states), group.get("master", self.master)
        check_formats(*formats)
        all_of_it = (*formats, bool(group.get("flat", False)))
        self._group_formats.update(dict.fromkeys(parameters, all_of_it))

    def _of_group(self, parameter: Tensor) -> tuple[str, str, bool]:
        """Return states and master as the parameter's group has them, and whether it is flat."""
        if parameter not in self._group_formats:  # ZeRO puts parameters into groups when it likes
            for group in self.param_groups:
                self.note_formats(group, group["params"])
        return self._group_formats.get(parameter, (self.states, self.master, False))

    def _is_large(self, parameter: Tensor) -> bool:
        """Is this a matrix worth quantizing, or several of them end to end?"""
        if parameter.ndim == 1 and self._of_group(parameter)[2]:
            return parameter.numel() >= self.min_numel
        return is_large_matrix(parameter, self.min_numel)

    def quantizes(self, parameter: Tensor) -> bool:
        """Return whether this parameter's moments are kept in a low-precision format."""
        low = self.formats_of(parameter)[0] not in ("keep", "fp32")
        return low and self._is_large(parameter)

    def moment_format(self, parameter: Tensor) -> str:
        """Return how the moments of `parameter` are kept."""
        states = self.formats_of(parameter)[0]
        return states if states == "keep" or self.quantizes(parameter) else "fp32"

    def master_format(self, parameter: Tensor) -> str | None:
        """Return how the master of `parameter` is kept; None if the parameter is its own master."""
        master = self.formats_of(parameter)[1]
        if master == "keep" or parameter.dtype is torch.float32:
            return None
        if parameter.dtype is torch.bfloat16 and self._is_large(parameter):
            return master
        return "fp32"

    def check_formats_of(self, parameter: Tensor) -> None:
        """Raise ModelError where a sharded parameter cannot have the formats asked for."""
        formats = self.moment_format(parameter), self.master_format(parameter)
        check_placements(parameter, *formats, self.quantizes(parameter))

    def set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Make float32 `value` the weight: its master in the state, its rounded part in the parameter.

        The parameter's dtype must be the final one already.
        """
        value = collect({"value": value}, parameter, "given")["value"]
        weight, entries = encode_master(value, self.master_format(parameter))
        assign(parameter, weight)
        self.state[parameter].update(self.house(entries, parameter))

    def master_weight(self, parameter: nn.Parameter) -> Tensor:
        """Return a float32 copy of the weight that the optimizer accumulates in; sharded if the parameter is."""
        value = decode_master(local(parameter), local_state(self.state.get(parameter, {})))
        weight: Tensor = distribute({"value": value}, parameter)["value"]
        return weight

    def ensure_states(self) -> None:
        """Create the states of all trainable parameters, as their first step would."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self.ensure_state(group, p)

    def ensure_state(self, group: dict[str, Any], parameter: nn.Parameter) -> State:
        """Return the state of `parameter`, created or moved to its device if need be.

        Raises:
            ModelError: for a dtype that is not supported, or that changed since the master weight was made.
        """
        state: State = self.state[parameter]
        weight, states, master = (
            local(parameter), self.moment_format(parameter), self.master_format(parameter)
        )  # fmt: skip
        if "step" not in state:
            self.check_formats_of(parameter)
            if parameter.dtype not in FLOATS:
                raise ModelError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; "
                    f"{type(self).__name__} takes float32, bfloat16 and float16 parameters."
                )
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in self.moments_of(group):
            if name in state and not is_dense(state[name], weight, states):
                # put there by somebody else: DeepSpeed's universal checkpoints
                given = local_state({name: state.pop(name)})[name]
                state.update(self.house(encode_moment(name, given, weight, states), parameter))
            elif name not in state and f"{name}_code" not in state:
                home = torch.device("cpu") if self.offloads(parameter) else weight.device
                state.update(self.house(zero_moment(name, weight, states, home), parameter))
        if not state.keys() & set(MASTER_KEYS):
            entries = encode_master(weight.detach().float(), master)[1]
            state.update(self.house(entries, parameter))
        elif parameter.dtype is torch.float32 or (
            "remainder" in state and parameter.dtype is not torch.bfloat16
        ):
            raise ModelError(
                f"a parameter of shape {tuple(parameter.shape)} became {parameter.dtype} after its master was made; "
                "change the dtype of a model before fp8stack.initialize, or fp8stack.restore it first."
            )
        housed = self.house(state, parameter)
        moved = {k: v for k, v in housed.items() if v is not state[k]}
        if moved:  # model.to(device) after the optimizer was made, or state that a user moved
            state.update(moved)
        return state

    def offloads(self, parameter: Tensor) -> bool:
        """Return whether the state of `parameter` is kept in pinned host memory.

        Raises:
            ModelError: for a sharded parameter.
        """
        if self.offload == "none" or parameter.device.type != "cuda":
            return False
        if is_sharded(parameter):
            raise ModelError(
                f"a parameter of shape {tuple(parameter.shape)} is sharded (DTensor), whose state cannot be offloaded "
                "on its own. Leave offload out; FSDP2's CPUOffloadPolicy moves parameters and states "
                '(with a process group of backend "cpu:gloo,cuda:nccl").'
            )
        return True

    def wait_for_offloaded(self) -> None:
        """Wait for the GPU where it may still be writing states that the host is about to read."""
        if self.offload != "none":
            devices = {p.device for group in self.param_groups for p in group["params"]}
            for device in devices:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)

    def house(self, state: State, parameter: Tensor) -> State:
        """Return `state` where it is kept: with the parameter, sharded like it, or in pinned host memory.

        The step's kernel reads and writes pinned memory itself, across the bus, so an offloaded state needs no copies
        and no buffers; numbers (0-d) stay on the device. (torch rounds pinned allocations up to a power of two.)
        """
        device, offloads = parameter.device, self.offloads(parameter)
        placed = dict(state)
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if not (offloads and value.ndim):
                placed[key] = value if value.device == device else value.to(device)
            elif not value.is_pinned():
                pinned = torch.empty_like(value, device="cpu", pin_memory=True)
                placed[key] = pinned.copy_(value)
                # A copy tells the allocator of the stream that uses it: freed, it is not reused before that is done.
                pinned.view(-1)[:1].view(torch.uint8).to(device, non_blocking=True)
        return distribute(placed, parameter)

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments that parameters of `group` have."""
        return self.moments


def check_formats(states: str, master: str) -> None:
    """Raise ConfigError unless both are known."""
    for name, value, known in (("states", states, STATES), ("master", master, MASTERS)):
        if value not in known:
            raise ConfigError(
                f"{name} must be one of {known}, got {value!r}.{did_you_mean(str(value), known)}"
            )


def is_large_matrix(parameter: Tensor, min_numel: int) -> bool:
    """Return whether a parameter is quantized: a matrix or more, on the whole tensor's shape, and worth it.

    Rows shorter than 8 would spend more on scales than they save.
    """
    shape = whole_shape(parameter)
    numel = shape.numel()
    return len(shape) > 1 and numel >= max(min_numel, 8 * shape[0])
