"""What the fp8stack optimizers share: formats per parameter, the step on one device or several, the skip of bad steps.

A matrix of at least `min_numel` elements (and rows of 8 or more) keeps its moments in the optimizer's format; vectors
and small matrices keep float32, decided on the whole tensor's shape, so that it is the same on every rank. Formats
can be set for a parameter group (keys "states" and "master") or a single parameter (`override`). A bfloat16 or
float16 parameter gets a master: by default the 24-bit split for a bfloat16 matrix, a float32 copy for the few others.

A step whose gradients hold a NaN, an infinity or a magnitude of 2^64 changes nothing: not the weights, not the state,
not the step count. The decision is a device scalar that every kernel reads, so the host never waits for it. Under
`torch.amp.GradScaler` the same scalar carries the scaler's verdict, and its scale is divided out in the same pass; so
is the clip coefficient of `max_grad_norm`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from fp8stack.errors import ConfigError, ModelError, did_you_mean
from fp8stack.kernels.ops import triton_runs_on
from fp8stack.kernels.reference.step import StepKind

from . import state_dict as checkpoint_format
from .checks import rates_on_gpu
from .reference import reference_step
from .release import GradientRelease
from .state import (
    MASTER_KEYS,
    MASTERS,
    STATES,
    State,
    decode_master,
    encode_master,
    step_kind,
    zero_moment,
)
from .tracked import TrackedStates

if TYPE_CHECKING:
    from .plan import Plan

ParamsT = Iterable[Any]


class BlockwiseOptimizer(torch.optim.Optimizer):
    """Base of `AdamW`, `Adam`, `SGD` and `Lion`. Subclasses name their moments and hyper-parameters."""

    # GradScaler hands over its scale and verdict instead of syncing
    _step_supports_amp_scaling = True
    moments: tuple[str, ...]
    algorithm: str
    torch_class: type[torch.optim.Optimizer] | None = None

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        states: str,
        master: str,
        min_numel: int,
        max_grad_norm: float | None = None,
    ) -> None:
        check_formats(states, master)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be > 0 (or None), got {max_grad_norm}.")
        self.states, self.master, self.min_numel = states, master, min_numel
        self.max_grad_norm = max_grad_norm
        # Norm of the last step's gradients, unscaled and before clipping, where max_grad_norm is set; on the device.
        self.grad_norm: Tensor | None = None
        # Steps not taken for a bad gradient; a tensor on the device, so reading it waits for the GPU.
        self.skipped_steps: Tensor | float = 0.0
        self.overrides: dict[Tensor, tuple[str, str]] = {}
        self.on_new_parameters: Callable[[list[nn.Parameter]], None] | None = None
        self._plans: dict[Tensor | None, dict[torch.device, Plan]] = {}
        self.release: GradientRelease | None = None
        self._group_formats: dict[Tensor, tuple[str, str]] | None = None
        super().__init__(params, defaults)
        self.state = TrackedStates(self._forget_plans)  # type: ignore[assignment]

    def _forget_plans(self) -> None:
        self._plans = {}

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
        if self._group_formats is None:
            self._group_formats = {}
            for group in self.param_groups:
                formats = group.get("states", self.states), group.get("master", self.master)
                check_formats(*formats)
                if formats != (self.states, self.master):
                    self._group_formats.update(dict.fromkeys(group["params"], formats))
        return self._group_formats.get(parameter, (self.states, self.master))

    def quantizes(self, parameter: Tensor) -> bool:
        """Return whether this parameter's moments are kept in a low-precision format."""
        low = self.formats_of(parameter)[0] not in ("keep", "fp32")
        return low and is_large_matrix(parameter, self.min_numel)

    def moment_format(self, parameter: Tensor) -> str:
        """Return how the moments of `parameter` are kept."""
        states = self.formats_of(parameter)[0]
        return states if states == "keep" or self.quantizes(parameter) else "fp32"

    def master_format(self, parameter: Tensor) -> str | None:
        """Return how the master of `parameter` is kept; None if the parameter is its own master."""
        master = self.formats_of(parameter)[1]
        if master == "keep" or parameter.dtype is torch.float32:
            return None
        if parameter.dtype is torch.bfloat16 and is_large_matrix(parameter, self.min_numel):
            return master
        return "fp32"

    def set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Make float32 `value` the weight: its master in the state, its rounded part in the parameter.

        The parameter's dtype must be the final one already.
        """
        weight, entries = encode_master(value, self.master_format(parameter))
        parameter.data.copy_(weight)
        self.state[parameter].update(entries)

    def master_weight(self, parameter: nn.Parameter) -> Tensor:
        """Return a float32 copy of the weight that the optimizer accumulates in."""
        return decode_master(parameter, self.state.get(parameter, {}))

    def ensure_state(self, group: dict[str, Any], parameter: nn.Parameter) -> State:
        """Return the state of `parameter`, created or moved to its device if need be.

        Raises:
            ModelError: for a dtype that is not supported, or that changed since the master weight was made.
        """
        state: State = self.state[parameter]
        if "step" not in state:
            if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ModelError(
                    f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; "
                    f"{type(self).__name__} takes float32, bfloat16 and float16 parameters."
                )
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in self.moments_of(group):
            if name not in state and f"{name}_code" not in state:
                state.update(zero_moment(name, parameter, self.moment_format(parameter)))
        if not state.keys() & set(MASTER_KEYS):
            value = parameter.detach().float()
            state.update(encode_master(value, self.master_format(parameter))[1])
        elif parameter.dtype is torch.float32 or (
            "remainder" in state and parameter.dtype is not torch.bfloat16
        ):
            raise ModelError(
                f"a parameter of shape {tuple(parameter.shape)} became {parameter.dtype} after its master was made; "
                "change the dtype of a model before fp8stack.initialize, or fp8stack.restore it first."
            )
        device = parameter.device
        moved = {
            k: v.to(device)
            for k, v in state.items()
            if isinstance(v, Tensor) and v.device != device
        }
        if moved:  # model.to(device) after the optimizer was made, or state that was offloaded
            state.update(moved)
        return state

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments that parameters of `group` have."""
        return self.moments

    def step_kind(self, group: dict[str, Any], parameter: nn.Parameter) -> StepKind:
        """Return the kernel that steps `parameter`, whose state exists."""
        algorithm, coupled = self.algorithm_of(group)
        moments = self.moments_of(group)
        return step_kind(
            algorithm,
            coupled,
            moments,
            self.moment_format(parameter),
            self.master_format(parameter),
        )

    if TYPE_CHECKING:  # what a subclass adds

        def algorithm_of(self, group: dict[str, Any]) -> tuple[str, bool]:
            """Return (the kernel's algorithm, whether weight decay is added to the gradient) for a group."""

        def numbers_of(self, group: dict[str, Any]) -> tuple[float, ...]:
            """Return the hyper-parameters of a group in the order of `kernels/reference/scalars.py`.

            Raises:
                ConfigError: for a value out of range.
            """

    # --- stepping

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; nothing at all if any gradient is not finite.

        Raises:
            GradientError: for a gradient that is sparse, complex, or not of its parameter's shape or device.
            ConfigError: for a hyper-parameter that has become invalid. Nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not isinstance(self.state, TrackedStates):  # somebody replaced it
            self.state = TrackedStates(self._forget_plans, self.state)  # type: ignore[assignment]
            self._forget_plans()
        if self.release is not None:
            self.release.finish()
        flat = [p for group in self.param_groups for p in group["params"]]
        if any(p.grad is not None for p in flat):
            self._step(flat)
        return loss

    def step_in_backward(self) -> GradientRelease:
        """Step each parameter when its gradient arrives in backward, and free the gradient; see `release.py`.

        `step()` goes on being called after each backward. Returns a handle whose `remove()` ends it.

        Raises:
            ConfigError: where a step needs all gradients at once: `max_grad_norm`, or several ranks.
        """
        if self.release is None:
            self.release = GradientRelease(self)
        return self.release

    @torch.no_grad()
    def step_parameter(self, parameter: Tensor) -> None:
        """Step one parameter that has a gradient."""
        self._step([parameter], parameter)

    def _step(self, chosen: Sequence[Tensor], only: Tensor | None = None) -> None:
        numbers = [self.numbers_of(group) for group in self.param_groups]
        first = next(p for p in chosen if p.grad is not None)
        if triton_runs_on(first.device):
            self._step_with_plans(chosen, numbers, only)
        else:
            reference_step(self, numbers, only)

    def _step_with_plans(
        self, chosen: Sequence[Tensor], numbers: list[tuple[float, ...]], only: Tensor | None
    ) -> None:
        from .plan import Plan  # Triton is imported when a GPU is used

        plans = self._plans.get(only, {})
        if not plans or not all(plan.current(chosen) for plan in plans.values()):
            pairs = ((g, p) for g, group in enumerate(self.param_groups) for p in group["params"])
            entries = [(i, g, p) for i, (g, p) in enumerate(pairs) if only is None or p is only]
            devices = dict.fromkeys(p.device for p in chosen if p.grad is not None)
            plans = {d: Plan(self, entries, d) for d in devices}
            if not all(plan.current(chosen) for plan in plans.values()):
                raise RuntimeError("a new plan does not fit its own gradients")
            if only is None:  # a parameter's step count is a view of one plan's vector
                self._plans = {}
            else:
                self._plans.pop(None, None)
            self._plans[only] = plans
        rates = rates_on_gpu(self.param_groups)
        for plan in plans.values():
            plan.set_groups(numbers, rates)
            self._examine(plan)
        first = next(iter(plans.values()))
        if len(plans) > 1:
            _share_verdict(list(plans.values()))
        skipped = torch.as_tensor(self.skipped_steps, dtype=torch.float32, device=first.device)
        self.skipped_steps = skipped
        for plan in plans.values():
            plan.run(skipped if plan is first else torch.zeros((), device=plan.device))
            torch.autograd.graph.increment_version(plan.parameters)
        if self.max_grad_norm is not None:
            self.grad_norm = first.verdict[2] * first.verdict[0]

    def _examine(self, plan: Plan) -> None:
        """Fill the verdict on one device's gradients."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        clip = math.inf if self.max_grad_norm is None else self.max_grad_norm
        plan.set_verdict(scale, found_inf, clip)
        plan.examine(want_norm=self.max_grad_norm is not None)

    # --- state_dict and parameter groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its parameters join whatever the optimizer was initialized for."""
        check_formats(
            param_group.get("states", self.states), param_group.get("master", self.master)
        )
        super().add_param_group(param_group)
        self._group_formats = None
        if self.release is not None:
            self.release.attach(self.param_groups[-1]["params"])
        if self.on_new_parameters is not None:
            self.on_new_parameters(self.param_groups[-1]["params"])

    def state_dict(self) -> dict[str, Any]:
        """Return state and hyper-parameters as plain tensors and numbers, loadable with `weights_only=True`.

        Everything is stored as it is in memory (codes, scales, masters): loading it continues bit for bit.
        """
        return checkpoint_format.tag(self, super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state made by `state_dict`, or by torch's optimizer of the same kind, whose moments are quantized.

        Raises:
            CheckpointError: if it is of another format version, optimizer or model, or incomplete. Nothing is changed.
        """
        checkpoint_format.load(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """As torch: state and groups, but no hooks or listeners, which belong to a model in this process."""
        own = ("states", "master", "min_numel", "overrides", "max_grad_norm")
        mine = {name: getattr(self, name) for name in own}
        return {
            **super().__getstate__(),
            **mine,
            "state": {p: dict(entry) for p, entry in self.state.items()},
            "on_new_parameters": None,
            "release": None,
            "grad_norm": None,
            "skipped_steps": float(self.skipped_steps),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans, self._group_formats = {}, None
        self.state = TrackedStates(self._forget_plans)  # type: ignore[assignment]
        self.state.update(state["state"])


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
    if parameter.ndim < 2 or parameter.numel() < min_numel:
        return False
    return parameter.numel() >= 8 * parameter.shape[0]


def _share_verdict(plans: list[Plan]) -> None:
    """Let every device know the gradients of all: a step is taken by all or by none."""
    device = plans[0].device
    verdicts = torch.stack([plan.verdict.to(device) for plan in plans])
    norm, largest = verdicts[:, 2].double().square().sum().sqrt().float(), verdicts[:, 3].amax()
    for plan in plans:
        plan.verdict[2].copy_(norm)
        plan.verdict[3].copy_(largest)
