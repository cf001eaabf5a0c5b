"""What the fp8stack optimizers share: formats per parameter, the skip of bad steps, checkpoints.

A matrix of at least `min_numel` elements keeps its moments in the optimizer's format; vectors and small matrices keep
float32, decided on the whole tensor's shape, so that it is the same on every rank. A bfloat16 or float16 parameter gets
a master: the 24-bit split for a bfloat16 matrix, a float32 copy for the few others.

A step whose gradients hold a NaN, an infinity or a magnitude of 2^64 changes nothing: not the weights, not the state,
not the step count. The decision is a device scalar that every kernel reads, so the host never waits for it. Under
`torch.amp.GradScaler` the same scalar carries the scaler's verdict, and its scale is divided out in the same pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from fp8stack.errors import ConfigError, GradientError, ModelError
from fp8stack.formats import E4M3, GRAD_LIMIT
from fp8stack.tensor import BlockScaledTensor

from . import state_dict as checkpoint_format
from .state import State, decode_master, encode_master, zero_moment

MASTERS = ("split24", "fp16", "keep")
STATES = ("8bit", "fp8-lm", "keep", "float32")
ParamsT = Iterable[Any]


class BlockwiseOptimizer(torch.optim.Optimizer):
    """Base of `AdamW`, `Adam` and `SGD`. Subclasses name their moments and update one parameter at a time."""

    _step_supports_amp_scaling = (
        True  # GradScaler hands over its scale and verdict instead of syncing
    )
    moments: tuple[str, ...]
    torch_class: type[torch.optim.Optimizer]

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], states: str, master: str, min_numel: int
    ) -> None:
        if states not in STATES:
            raise ConfigError(f"states must be one of {STATES}, got {states!r}.")
        if master not in MASTERS:
            raise ConfigError(f"master must be one of {MASTERS}, got {master!r}.")
        self.states, self.master, self.min_numel = states, master, min_numel
        # Steps not taken for a bad gradient; a tensor on the device, so reading it waits for the GPU.
        self.skipped_steps: Tensor | float = 0.0
        self.full_precision: set[Tensor] = set()  # matrices that keep float32 states nevertheless
        self.on_new_parameters: Callable[[list[nn.Parameter]], None] | None = None
        super().__init__(params, defaults)

    # --- formats

    def quantizes(self, parameter: Tensor) -> bool:
        """Return whether this parameter's moments are kept in the low-precision format."""
        low = self.states in ("8bit", "fp8-lm") and is_large_matrix(parameter, self.min_numel)
        return low and parameter not in self.full_precision

    def moment_format(self, parameter: Tensor) -> str:
        """Return how the moments of `parameter` are kept."""
        if self.states == "keep" or self.quantizes(parameter):
            return self.states
        return "float32"

    def master_format(self, parameter: Tensor) -> str | None:
        """Return how the master of `parameter` is kept; None if the parameter is its own master."""
        if self.master == "keep" or parameter.dtype is torch.float32:
            return None
        if parameter.dtype is torch.bfloat16 and self.quantizes(parameter):
            return self.master
        return "float32"

    def set_master(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Make float32 `value` the weight: its master in the state, its rounded part in the parameter.

        The parameter's dtype must be the final one already.
        """
        kind = self.master_format(parameter)
        weight, entries = (value, {}) if kind is None else encode_master(value, kind)
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
        if not state.keys() & {"remainder", "master"}:
            kind = self.master_format(parameter)
            if kind is not None:
                state.update(encode_master(parameter.detach().float(), kind)[1])
        elif parameter.dtype is torch.float32 or (
            "remainder" in state and parameter.dtype is not torch.bfloat16
        ):
            raise ModelError(
                f"a parameter of shape {tuple(parameter.shape)} became {parameter.dtype} after its master was made; "
                "change the dtype of a model before fp8stack.initialize, or fp8stack.restore it first."
            )
        if (
            state["step"].device != parameter.device
        ):  # model.to(device) after the optimizer was made
            state.update(
                {k: v.to(parameter.device) for k, v in state.items() if isinstance(v, Tensor)}
            )
        return state

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments that parameters of `group` have."""
        return self.moments

    # --- stepping

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; nothing at all if any gradient is not finite.

        Raises:
            GradientError: for a sparse or complex gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(g, [p for p in g["params"] if p.grad is not None]) for g in self.param_groups]
        work = [(group, parameters) for group, parameters in work if parameters]
        if not work:
            return loss
        device = work[0][1][0].device
        grad_mul, apply = self._verdict([p for _, parameters in work for p in parameters], device)
        self.skipped_steps = (1 - apply) + self.skipped_steps
        for group, parameters in work:
            states = [self.ensure_state(group, p) for p in parameters]
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, [apply] * len(steps))  # a list: a single tensor would sync
            sign = -1.0 if group.get("maximize") else 1.0
            hyper = self._hyper(group, torch.stack(steps).double(), grad_mul * sign, apply)
            for i, (p, state) in enumerate(zip(parameters, states, strict=True)):
                self._update(group, p, state, hyper[i])
            torch.autograd.graph.increment_version(parameters)
        return loss

    if TYPE_CHECKING:  # what a subclass adds

        def _hyper(
            self, group: dict[str, Any], steps: Tensor, grad_mul: Tensor, apply: Tensor
        ) -> Tensor:
            """Return a float32 table [parameters, 8] of the scalars that the kernel reads."""

        def _update(
            self, group: dict[str, Any], p: nn.Parameter, state: State, hyper: Tensor
        ) -> None:
            """Update one parameter in place."""

    def _verdict(
        self, parameters: list[nn.Parameter], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return (what to multiply gradients by, 1.0 or 0.0 whether to apply the step), 0-d float32 on `device`."""
        scale = getattr(self, "grad_scale", None)  # set by GradScaler around the call
        found_inf = getattr(self, "found_inf", None)
        ones = torch.ones((), dtype=torch.float32, device=device)
        grad_mul = ones if scale is None else 1.0 / scale.to(device, torch.float32)
        largest = torch.stack([_largest(p.grad).to(device) for p in parameters]).amax()
        fine = largest * grad_mul < GRAD_LIMIT  # false for NaN
        if found_inf is not None:
            fine = fine & (found_inf.to(device) == 0)
        return grad_mul, fine.float()

    # --- state_dict and parameter groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; its parameters join whatever the optimizer was initialized for."""
        super().add_param_group(param_group)
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
        own = ("states", "master", "min_numel", "full_precision")
        mine = {name: getattr(self, name) for name in own}
        return {
            **super().__getstate__(),
            **mine,
            "on_new_parameters": None,
            "skipped_steps": float(self.skipped_steps),
        }


def is_large_matrix(parameter: Tensor, min_numel: int) -> bool:
    """Return whether a parameter is quantized: two dimensions or more, on the whole tensor's shape, and not small."""
    return parameter.ndim >= 2 and parameter.numel() >= min_numel


def gradient_parts(p: nn.Parameter) -> tuple[Tensor | None, Tensor | None]:
    """Return (codes, scale) of an FP8 gradient, or (gradient, None)."""
    if isinstance(p.grad, BlockScaledTensor):
        return p.grad.codes, p.grad.scale
    return None if p.grad is None else p.grad.contiguous(), None


def _largest(gradient: Tensor | None) -> Tensor:
    """Return the largest magnitude in a gradient (for FP8, what its scales allow), NaN if there is one."""
    if isinstance(gradient, BlockScaledTensor) and gradient.numel():
        return gradient.scale.abs().amax() * E4M3.max
    if gradient is None or not gradient.numel():
        return torch.zeros((), dtype=torch.float32)
    if gradient.is_sparse or gradient.is_complex():
        kind = "sparse" if gradient.is_sparse else "complex"
        raise GradientError(
            f"a gradient of shape {tuple(gradient.shape)} is {kind}; fp8stack's optimizers take dense real gradients. "
            "Use a dense layer (nn.Embedding(sparse=False)), or torch's own optimizer for this parameter."
        )
    largest: Tensor = torch.linalg.vector_norm(gradient, torch.inf)
    return largest.float()
