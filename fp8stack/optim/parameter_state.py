"""The states of parameters: what each is made in, how it is made, and where it is kept.

A matrix of at least `min_numel` elements (and rows of 8 or more) keeps its moments in the optimizer's format; vectors
and small matrices keep float32, decided on the whole tensor's shape, so that it is the same on every rank. Formats
can be set for a parameter group (keys "states" and "master") or a single parameter (`override`). Vectors of a group
with "flat" set are many parameters end to end, as DeepSpeed's ZeRO hands them to an optimizer, and count as matrices.
A bfloat16 or float16 parameter gets a master: by default the 24-bit split for a bfloat16 matrix, a float32 copy for
the few others. All this says what a state is made in; a state that exists says its own format (`state_formats.py`).

State lies with its parameter, sharded like it, or in pinned host memory (`offload="cpu"`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import ConfigError, ModelError
from fp8stack.formats import FLOATS, UE3M1
from fp8stack.levels import check_choice, check_number
from fp8stack.tensor_kinds import is_sharded

from . import state_formats as formats
from .sharded import assign, check_placements, collect, distribute, local, local_state
from .state_formats import MASTER_KEYS, State, is_large_matrix


class StatefulOptimizer(torch.optim.Optimizer):
    """The part of `BlockwiseOptimizer` that makes and places states."""

    moments: tuple[str, ...]
    algorithm: str

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        states: str = "8bit",
        master: str = "auto",
        min_numel: int = 4096,
        offload: str = "none",
    ) -> None:
        formats.check_formats(states, master)
        check_choice("offload", offload)
        min_numel = check_number("min_numel", min_numel, whole=True)
        self.states, self.master, self.min_numel, self.offload = states, master, min_numel, offload
        self.overrides: dict[Tensor, tuple[str, str]] = {}
        self._group_formats: dict[Tensor, tuple[str, str, bool]] = {}
        self.portable = False  # see `state_dict`
        self.named_by: weakref.ref[nn.Module] | None = None  # the model, for readers of files
        super().__init__(params, defaults)

    # --- what an algorithm says

    def family_of(self, group: dict[str, Any]) -> str:
        """Return the algorithm whose scalars `group` takes; see `kernels/reference/step_scalars.py`."""
        return self.algorithm

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments that parameters of `group` have."""
        return self.moments

    # --- what states are made in

    def override(
        self, parameter: Tensor, states: str | None = None, master: str | None = None
    ) -> None:
        """Keep the state of one parameter in other formats than the optimizer's, from its first step on.

        Raises:
            ConfigError: for an unknown format, or a parameter that has state already.
        """
        old = self.overrides.get(parameter, (self.states, self.master))
        new = (states or old[0], master or old[1])
        formats.check_formats(*new)
        if any(name in self.state.get(parameter, {}) for name in ("step", *MASTER_KEYS)):
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} has state already; set its formats before the first "
                "step, or save the optimizer, make another with the formats wanted, and load it."
            )
        self.overrides[parameter] = new

    def note_formats(self, group: dict[str, Any], parameters: Iterable[Tensor]) -> None:
        """Remember what `group` says of formats for these parameters: ZeRO empties and rewrites groups later."""
        states, master = group.get("states", self.states), group.get("master", self.master)
        formats.check_formats(states, master)
        for parameter in parameters:  # edits of the group come too late for those that are known
            own = states, formats.master_for(master, group), bool(group.get("flat", False))
            self._group_formats.setdefault(parameter, own)

    def _of_group(self, parameter: Tensor) -> tuple[str, str, bool]:
        """Return states and master as the parameter's group has them, and whether it is flat."""
        if parameter not in self._group_formats:  # ZeRO puts parameters into groups when it likes
            for group in self.param_groups:
                self.note_formats(group, group["params"])
        of_none = self.states, formats.master_for(self.master, {}), False
        return self._group_formats.get(parameter, of_none)

    def formats_of(self, parameter: Tensor) -> tuple[str, str]:
        """Return (states, master) as asked for this parameter: its own, its group's or the optimizer's."""
        of_group = self._of_group(parameter)[:2]
        states, master = self.overrides.get(parameter, of_group)
        return states, of_group[1] if master == "auto" else master

    def _is_large(self, parameter: Tensor) -> bool:
        """Return whether this is a matrix worth quantizing, or several of them end to end."""
        if parameter.ndim == 1 and self._of_group(parameter)[2]:
            return parameter.numel() >= self.min_numel
        return is_large_matrix(parameter, self.min_numel)

    def quantizes(self, parameter: Tensor) -> bool:
        """Return whether this parameter's moments are made in a low-precision format."""
        return self.moment_format(parameter) not in ("keep", "fp32")

    def moment_format(self, parameter: Tensor) -> str:
        """Return what the moments of `parameter` are made in."""
        states = self.formats_of(parameter)[0]
        return states if states == "keep" or self._is_large(parameter) else "fp32"

    def master_format(self, parameter: Tensor) -> str | None:
        """Return what the master of `parameter` is made in; None if the parameter is its own master."""
        master = self.formats_of(parameter)[1]
        if master == "keep" or parameter.dtype is torch.float32:
            return None
        if parameter.dtype is torch.bfloat16 and self._is_large(parameter):
            return master
        return "fp32"

    def check_formats_of(self, parameter: Tensor) -> None:
        """Raise ModelError where a sharded parameter cannot have the formats asked for."""
        check_placements(parameter, self.moment_format(parameter), self.master_format(parameter))

    # --- making states

    def set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a weight to float32 `value`: the parameter holds its rounded part, the state its master.

        The parameter's dtype must be the final one already.
        """
        value = collect(value, parameter, "value of parameter given")
        weight, entries = formats.encode_master(value, self.master_format(parameter))
        assign(parameter, weight)
        self.state[parameter].update(self.place(entries, parameter))

    def master_weight(self, parameter: nn.Parameter) -> Tensor:
        """Return a float32 copy of the weight that the optimizer accumulates in; sharded if the parameter is."""
        self.check_unchanged(parameter)
        value = formats.decode_master(local(parameter), local_state(self.state.get(parameter, {})))
        return distribute(value, parameter)  # type: ignore[no-any-return]

    def ensure_states(self) -> None:
        """Create the states of all trainable parameters, as their first step would."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    self.ensure_state(group, p)

    def ensure_state(self, group: dict[str, Any], parameter: nn.Parameter) -> State:
        """Return the state of `parameter`, created or moved to its device if need be.

        Raises:
            ModelError: for a dtype that is not supported, or a dtype or shape that changed since the state was made.
        """
        state: State = self.state[parameter]
        self.check_unchanged(parameter)
        weight, states = local(parameter), self.moment_format(parameter)
        if "step" not in state:
            self.check_formats_of(parameter)
            state["step"] = torch.zeros((), dtype=torch.float64, device=parameter.device)
        for name in self.moments_of(group):
            if name in state and state[name].dtype is not formats.dense_dtype(weight, states):
                # somebody else put it there, such as DeepSpeed's universal checkpoints
                state.update(formats.encode_moment(name, local(state.pop(name)), weight, states))
            elif not formats.has_moment(name, state):
                home = torch.device("cpu") if self.offloads(parameter) else weight.device
                state.update(formats.zero_moment(name, weight, states, home))
        if not state.keys() & set(MASTER_KEYS):
            value = weight.detach().float()
            state.update(formats.encode_master(value, self.master_format(parameter))[1])
        moved = {k: v for k, v in self.place(state, parameter).items() if v is not state[k]}
        if moved:  # new, or of before model.to(device), or what a user moved
            state.update(moved)
        return state

    def stored_kinds(
        self, parameter: Tensor, state: State, moments: tuple[str, ...]
    ) -> tuple[str, str, str]:
        """Return how a step calls the formats of m, v and master. What was asked for says how it rounds."""
        held, shape = local_state(state), local(parameter).shape
        stored = {formats.is_second(n): formats.stored_kind(n, held, shape) for n in moments}
        m, v = stored.get(False, ""), stored.get(True, "")
        if v == "dense" and self.moment_format(parameter) == "bf16":
            # to nearest, it would not move by less than 1/256
            v = "dithered"
        kinds = {"remainder": "split", "master_scale": "tensor", "master": "dense"}
        rounded = "dithered" if self.master_format(parameter) == "none" else ""
        return m, v, next((kind for key, kind in kinds.items() if key in held), rounded)

    def check_unchanged(self, parameter: Tensor) -> None:
        """Raise ModelError unless `parameter` has a dtype that is stepped, and dtype and shape that fit its state."""
        state, shape = local_state(self.state.get(parameter, {})), local(parameter).shape
        dtype = parameter.dtype
        if dtype not in FLOATS:
            raise ModelError(
                f"a parameter of shape {tuple(shape)} is {dtype}; {type(self).__name__} takes float32, "
                "bfloat16 and float16 parameters."
            )
        shaped = {"master", "remainder", *self.moments, *(f"{m}_code" for m in self.moments)}
        shapes = tuple(shape), UE3M1.codes_shape(shape)
        dtypes = {"remainder": (torch.bfloat16,), "master": (torch.bfloat16, torch.float16)}
        for name in state.keys() & shaped:
            if tuple(state[name].shape) not in shapes or dtype not in dtypes.get(name, FLOATS):
                raise ModelError(
                    f"a parameter became {dtype} of shape {tuple(shape)} after its state was made ({name} is "
                    f"{state[name].dtype} of {tuple(state[name].shape)}). Change it back; or cast and resize before "
                    "fp8stack.initialize or after fp8stack.restore; or drop its state: optimizer.state.pop(parameter)."
                )

    # --- where states are

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
            for device in {p.device for group in self.param_groups for p in group["params"]}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)

    def place(self, state: State, parameter: Tensor) -> State:
        """Return `state` moved to where it is kept: with the parameter, sharded like it, or in pinned host memory.

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
        return {key: distribute(value, parameter) for key, value in placed.items()}
