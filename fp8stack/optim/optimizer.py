"""The base class of the fp8stack optimizers: options, the step, parameter groups, state_dict.

A step whose gradients hold a NaN, an infinity or a magnitude of 2^63 changes nothing: not the weights, not the state,
not the step count. The decision is a number on the device that every kernel reads, so the host never waits for it.
Under `torch.amp.GradScaler` that number also carries the scaler's verdict. The same pass over memory divides by the
loss scale and multiplies by the clip coefficient of `max_grad_norm`.

`step_parameters` is the whole orchestration. The work is done by `triton_step.py` on GPUs and by `reference_step.py`
elsewhere. What states are made in, and where they lie, is in `parameter_state.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypedDict, overload

import torch
from torch import Tensor, nn

from fp8stack.conflicts import RELEASE, check_option
from fp8stack.errors import ConfigError
from fp8stack.kernels.ops import triton_runs_on
from fp8stack.kernels.reference.step import StepKind
from fp8stack.levels import check_choice, check_number

from .parameter_state import StatefulOptimizer
from .reference_step import ReferenceBatch, ReferenceStep
from .sharded import place_gradients, reduce_largest, reduce_squares, shares_of
from .state_dict import install, prepare, tag, to_torch
from .state_formats import MASTER_KEYS
from .step import Entry, check_gradient
from .step_in_backward import GradientRelease
from .triton_step import TritonBatch, TritonStep
from .watched_state import WatchedStates

Batch = ReferenceBatch | TritonBatch
DeviceStep = ReferenceStep | TritonStep
ParamsT = Iterable[Any]


class Options(TypedDict, total=False):
    """What every optimizer takes beside its hyper-parameters, by keyword; see `fp8stack.optim.Adam`."""

    states: str
    master: str
    min_numel: int
    max_grad_norm: float | None
    offload: str


class BlockwiseOptimizer(StatefulOptimizer):
    """Base of `AdamW`, `Adam`, `SGD`, `Lion` and `Muon`. Subclasses name their moments and hyper-parameters."""

    # GradScaler hands over its scale and verdict instead of syncing
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        max_grad_norm: float | None = None,
        **options: Any,  # those of `StatefulOptimizer`
    ) -> None:
        self.numbers_of(defaults)  # which checks them
        where = f"{type(self).__name__}, whose step is fused and capturable as it is: "
        for name in options:
            check_choice("option", name, (*defaults, *sorted(Options.__optional_keys__)), where)
        if max_grad_norm is not None:
            max_grad_norm = check_number("max_grad_norm", max_grad_norm, LEAST, math.inf, ABOVE_0)
        self.max_grad_norm = max_grad_norm
        # Norm of the last step's gradients, unscaled and before clipping, where max_grad_norm is set; on the device.
        self.grad_norm: Tensor | None = None
        # Steps not taken for a bad gradient; a tensor on the device, so reading it waits for the GPU.
        self.skipped_steps: Tensor | float = 0.0
        self.on_new_parameters: Callable[[list[nn.Parameter]], None] | None = None
        self._kernels: list[Any] = []  # what the tables were made for, by group
        self._captured: list[DeviceStep] = []
        # Of the last step of all parameters (None), or of single ones.
        self._tables: dict[Tensor | None, list[TritonStep]] = {}
        self.release: GradientRelease | None = None
        super().__init__(params, defaults, **options)

    @property  # type: ignore[override]
    def state(self) -> WatchedStates:
        """The states, by parameter. If you replace one, or a tensor in one, the next step makes new tables."""
        return self._state

    @state.setter
    def state(self, states: dict[Tensor, Any]) -> None:
        self._state = WatchedStates(self._forget_tables)
        self._state.update(states)
        self._forget_tables()

    def _forget_tables(self) -> None:
        self._tables = {}

    # --- what a subclass says

    def algorithm_of(self, group: dict[str, Any]) -> tuple[str, bool]:
        """Return (the kernel's algorithm, whether weight decay is added to the gradient) for a group."""
        return self.family_of(group), False

    def numbers_of(self, group: dict[str, Any]) -> tuple[float, ...]:
        """Return the hyper-parameters of a group in the order of `kernels/reference/step_scalars.py`.

        Raises:
            ConfigError: for a value out of range.
        """
        raise NotImplementedError

    def step_batch(self, batch: Batch) -> None:
        """Step the parameters of a batch. An algorithm whose step has two passes overrides this."""
        batch.step()

    # --- stepping

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    @torch._disable_dynamo  # type: ignore[attr-defined]  # it launches kernels of its own: nothing to compile
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; nothing at all if any gradient is not finite.

        Raises:
            GradientError: for a gradient that is sparse, complex, or not of its parameter's shape or device.
            ModelError: for a parameter whose state cannot be kept in the requested format.
            ConfigError: for a hyper-parameter that has become invalid. Nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.release is not None:
            if getattr(self, "grad_scale", None) is not None:
                raise ConfigError(
                    "the loss was scaled by a GradScaler, but step_in_backward has used the gradients as they were. "
                    "Train in bfloat16 without a scaler, or without step_in_backward."
                )
            self.release.finish()
        # joined, not listed one by one: there may be thousands
        flat = list(chain.from_iterable(group["params"] for group in self.param_groups))
        if any(p.grad is not None for p in flat):
            # ZeRO steps its partitions one by one: each keeps its tables
            self.step_parameters(flat, flat[0] if len(flat) == 1 else None)
        else:
            self._take_part()
        return loss

    def _take_part(self) -> None:
        """Take part in the reductions of a step for which this rank has no gradients: other ranks wait for them."""
        shares = shares_of(self.param_groups)
        mesh = next((share.mesh for share in shares if share is not None), None)
        if mesh is not None:
            part = ReferenceStep([], torch.device(mesh.device_type), self.algorithm, shares)
            part.examine(None, None, self.max_grad_norm)
            share_verdict([part], self.max_grad_norm is not None)

    def step_in_backward(self) -> GradientRelease:
        """Step each parameter when its gradient arrives in backward, and free the gradient; see `step_in_backward.py`.

        Still call `step()` after each backward. Returns a handle whose `remove()` ends it.

        Raises:
            ConfigError: where a step needs all gradients at once: `max_grad_norm`, or several ranks.
        """
        if self.max_grad_norm is not None:
            check_option("max_grad_norm", self.max_grad_norm, *RELEASE)
        if self.release is None:
            self.release = GradientRelease(self)
            for group in self.param_groups:
                self.release.attach(group["params"])
        return self.release

    @torch.no_grad()
    def step_parameters(self, chosen: Sequence[Tensor], only: Tensor | None = None) -> None:
        """Step those of `chosen` that have a gradient. `only`: the parameter, if there is just one."""
        numbers = [self.numbers_of(group) for group in self.param_groups]
        parts = self._parts_of(chosen, only)
        rates = [(g, group["lr"]) for g, group in enumerate(self.param_groups)]
        rates = [(g, lr) for g, lr in rates if isinstance(lr, Tensor) and lr.is_cuda]
        clip = self.max_grad_norm
        # set by GradScaler around the call
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for part in parts:
            part.set_groups(numbers, rates)
            part.examine(scale, found_inf, clip)
        first = parts[0]
        if len(parts) > 1 or first.shares != [None]:
            share_verdict(parts, clip is not None)
        skipped = torch.as_tensor(self.skipped_steps, dtype=torch.float64, device=first.device)
        self.skipped_steps = skipped
        for part in parts:  # only the first one counts a skipped step
            counted = skipped if part is first else torch.zeros_like(skipped, device=part.device)
            part.run(counted, self.step_batch)
            torch.autograd.graph.increment_version(part.stepped)
        if first.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.extend(parts)  # replays read their tables
        if clip is not None:
            self.grad_norm = first.verdict[2] * first.verdict[0]

    def _parts_of(self, chosen: Sequence[Tensor], only: Tensor | None) -> Sequence[DeviceStep]:
        """Return the parts of the step, one for each device and family of algorithms; on a GPU they are kept."""
        groups = self.param_groups
        kernels = [(self.family_of(g), *self.algorithm_of(g), self.moments_of(g)) for g in groups]
        if kernels != self._kernels:  # weight decay or momentum was switched on, say
            self._kernels = kernels
            self._forget_tables()
        on_triton = triton_runs_on(next(p for p in chosen if p.grad is not None).device)
        tables = self._tables.get(only, [])
        if not tables or tables[0].shares != [None]:
            place_gradients(chosen)
        if on_triton and tables and all(table.current(chosen) for table in tables):
            return tables
        entries = dict[tuple[torch.device, str], list[Entry]]()
        pairs = ((g, p) for g, group in enumerate(groups) for p in group["params"])
        for index, (g, p) in enumerate(pairs):
            if p.grad is not None and (only is None or p is only):
                family, algorithm, coupled, moments = kernels[g]
                state = self.ensure_state(groups[g], p)
                check_gradient(p, p.grad)
                kind = StepKind(algorithm, coupled, *self.stored_kinds(p, state, moments))
                entry = Entry(index, g, p, state, moments, kind)
                entries.setdefault((p.device, family), []).append(entry)
        shares = shares_of(groups)
        if not on_triton:
            return [ReferenceStep(part, *kind, shares) for kind, part in entries.items()]
        tables = [TritonStep(part, *kind, shares, chosen) for kind, part in entries.items()]
        if not all(table.current(chosen) for table in tables):
            raise RuntimeError("new tables do not fit their own gradients")
        if only is None:  # a parameter's step count is a view of one table's vector
            self._forget_tables()
        else:
            self._tables.pop(None, None)
        self._tables[only] = tables
        return tables

    # --- state_dict and parameter groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its parameters join whatever the optimizer was initialized for."""
        if isinstance(param_group, dict):  # else torch says what is wrong
            self.note_formats(param_group, ())  # which checks them
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.numbers_of(group)
            if len(set(group["params"])) < len(group["params"]):
                raise ConfigError(
                    "a parameter is in its group twice, and would be stepped once or twice: pass each once, "
                    "list(dict.fromkeys(parameters))."
                )
        except ConfigError:
            self.param_groups.pop()
            raise
        if self.release is not None:
            self.release.attach(self.param_groups[-1]["params"])
        if self.on_new_parameters is not None:
            self.on_new_parameters(self.param_groups[-1]["params"])

    def state_dict(self) -> dict[str, Any]:
        """Return state and hyper-parameters as plain tensors and numbers, loadable with `weights_only=True`.

        Everything is stored as it is in memory (codes, scales, masters): loading it continues bit for bit. Where
        `portable` is set, moments are float32 and on the CPU, for tools that cut and join them by element, such as
        DeepSpeed's universal checkpoints: 8 bytes a parameter. Called before the first step, this also creates zero
        moments, because torch.distributed.checkpoint loads only entries that already exist.
        """
        self.wait_for_offloaded()
        if self.state and not any("step" in entry for entry in self.state.values()):
            self.ensure_states()
        if self.portable:
            return tag(self, to_torch(self, "cpu", masters=True))
        return tag(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state made by `state_dict`, or by torch's optimizer of the same kind, whose moments are quantized.

        Raises:
            CheckpointError: if it is of another format version, optimizer or model, or incomplete. Nothing is changed.
        """
        install(self, prepare(self, state_dict))

    def __getstate__(self) -> dict[str, Any]:
        """Return state and groups as torch does, without hooks and listeners, which belong to this process."""
        self.wait_for_offloaded()
        own = (*Options.__optional_keys__, "overrides", "portable", "_group_formats")
        mine = {name: getattr(self, name) for name in own}
        # pickle itself, without torch.save, writes float8 tensors that it cannot read (torch 2.13)
        eight = torch.float8_e4m3fn
        mine["state"] = {
            p: {k: (v.view(torch.uint8), eight) if getattr(v, "dtype", 0) is eight else v for k, v in entry.items()}
            for p, entry in self.state.items()
        }  # fmt: skip
        mine["skipped_steps"] = float(self.skipped_steps)
        return super().__getstate__() | mine

    def __setstate__(self, state: dict[str, Any]) -> None:
        gone = dict.fromkeys(("on_new_parameters", "release", "grad_norm", "named_by"))
        super().__setstate__({"portable": False, "_group_formats": {}, **state, **gone})
        self._kernels, self._captured = [], []
        self.state = {
            p: {k: v[0].view(v[1]) if isinstance(v, tuple) else v for k, v in entry.items()}
            for p, entry in self.__dict__.pop("state").items()
        }
        for p, entry in self.state.items():  # the copy of a model may have its weights in float32
            for key in MASTER_KEYS if p.dtype is torch.float32 else ():
                entry.pop(key, None)


# --- hyper-parameters, which schedulers change: they are checked when an optimizer is made and at every step


LEAST, ABOVE_0 = math.ulp(0.0), "above 0"
BELOW_1 = math.nextafter(1.0, 0.0)


def check_range(group: dict[str, Any]) -> tuple[float, tuple[float, float], float, float]:
    """Return (lr, betas, eps, weight_decay) of a group.

    A learning rate on a GPU counts as 0 here, as does what the group does not have.

    Raises:
        ConfigError: naming the hyper-parameter, its value and its range.
    """
    betas, lr = group.get("betas", (0.0, 0.0)), group["lr"]
    if isinstance(betas, (dict, set)) or not hasattr(betas, "__len__") or len(betas) != 2:
        raise ConfigError(f"betas={betas!r} must be two numbers in [0, 1).")
    first, second = (check_number("betas", b, 0, BELOW_1, "in [0, 1)") for b in betas)
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or lr.is_complex():
            raise ConfigError(f"lr={lr!r} must be one number.")
        lr = float(lr) if lr.device.type == "cpu" else 0.0  # reading it would wait for the GPU
    rest = [check_number(name, group.get(name, 0.0)) for name in ("eps", "weight_decay")]
    return check_number("lr", lr), (first, second), rest[0], rest[1]


def sign_of(group: dict[str, Any]) -> float:
    """Return -1 where a group ascends, else 1."""
    return -1.0 if check_choice("maximize", group.get("maximize"), (False, True, None)) else 1.0


def share_verdict(parts: Sequence[DeviceStep], want_norm: bool) -> None:
    """Let every device and every rank know the gradients of all: a step is taken by all or by none."""
    device, shares = parts[0].device, parts[0].shares
    if want_norm:
        squares = torch.stack([part.squares.to(device) for part in parts]).sum(0)
        shared = reduce_squares(dict(zip(shares, squares, strict=True))).sqrt().float()
    else:
        shared = torch.stack([part.verdict[3].to(device) for part in parts]).amax()
        reduce_largest(shared, shares)
    for part in parts:  # a norm also takes the place of the largest
        part.verdict[2 if want_norm else 3 : 4].copy_(shared)
