"""bitsandbytes' 8-bit optimizers, with fp8stack's masters, FP8 gradients, skipped steps and checkpoints around them.

For GPUs without FP8 (O2 chooses it there, if it is installed) and for its paged variants, whose states the driver moves
between GPU and host as memory allows. Each parameter that has a gradient goes through `bitsandbytes.optim` like this:

    float32 gradient: FP8 decoded, unscaled, clipped
    update_step of bitsandbytes' own optimizer on zeros, without weight decay, which updates its 8-bit states and
        turns the zeros into the update
    weight and master × (1 - lr × decay) + update: one pass of fp8stack's own step

A float32 weight, which has no master, is updated in place and by bitsandbytes alone. On a GPU with Triton a plan
examines all gradients at once, and large tensors are stepped in parts of 2^24 elements, so that what is float32 stays
below 128 MiB (a master="fp16", whose scale is the whole tensor's, is one part). Which tensors are kept in 8 bits is
fp8stack's rule, not the element count of bitsandbytes; its `GlobalOptimManager` is not asked (name formats with
`states_for` or `override`).

Limits: three launches or more for each part, after the host has waited for the GPU once, so a step cannot be captured
in a CUDA graph. SGD needs momentum, and has neither Nesterov's nor dampening. L2 regularization, which needs the weight
beside the gradient, takes a slower way (but for SGD with float32 weights). A step emits no FP8 weights: `emitted` casts
them when asked. States are neither sharded nor in other formats than "8bit" and "fp32"; what `paged` allocates is never
freed by bitsandbytes, so one optimizer keeps its pages for good.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8stack import capability
from fp8stack.errors import ConfigError, ModelError, UnsupportedDeviceError
from fp8stack.formats import E4M3, rows_cols, scale_shape
from fp8stack.kernels import ops
from fp8stack.kernels.reference import dynamic
from fp8stack.kernels.reference.step import StepKind, StepTensors, load_master
from fp8stack.kernels.reference.step import step as reference_kernel
from fp8stack.kernels.table import COLUMN

from . import adam, lion, sgd
from .base import BlockwiseOptimizer, ParamsT
from .gradients import gradient_parts
from .muon import apply_tensors, split_kind
from .reference import reference_step
from .sharded import is_sharded
from .state import BITSANDBYTES, State, step_tensors

if TYPE_CHECKING:
    from .plan import Plan, Segment

PART = 2**24
PAGED_FROM = 100_000  # elements; bitsandbytes pages no smaller states
Settings = tuple[dict[str, Any], float]  # hyper-parameters of bitsandbytes', and L2 decay


class BitsandbytesOptimizer(BlockwiseOptimizer):
    """Base of `AdamW`, `Adam`, `Lion` and `SGD` below: the step of an fp8stack optimizer, taken by bitsandbytes.

    Args:
        params, hyper-parameters, master, min_numel, max_grad_norm: as the optimizer of the same name in fp8stack.optim.
        states: "8bit" or "fp32".
        paged: keep states of 100,000 elements or more in managed memory (PagedAdamW8bit and so on; CUDA only).

    Raises:
        UnsupportedDeviceError: if bitsandbytes is not installed, or does not work on the device of a parameter.
        ConfigError: for an option that bitsandbytes' optimizer does not have.
    """

    counterpart: str
    paged = False
    _inner: Any = None

    def __init__(self, params: ParamsT, *args: Any, paged: bool = False, **options: Any) -> None:
        if options.get("offload", "none") != "none":
            raise ConfigError(
                "bitsandbytes' optimizers cannot be offloaded by fp8stack. Use paged=True."
            )
        self.paged, self._pages = paged, dict[tuple[Tensor, str], Tensor]()
        super().__init__(params, *args, **options)
        for device in {p.device for group in self.param_groups for p in group["params"]}:
            check_bitsandbytes(device, paged)

    @property
    def backend(self) -> str:
        """The `optimizer_backend` that this is."""
        return "bitsandbytes-paged" if self.paged else "bitsandbytes"

    @property
    def inner(self) -> Any:
        """bitsandbytes' optimizer. It owns no parameter; each is lent to it for the time of its update."""
        if self._inner is None:
            from bitsandbytes import optim

            momentum = {"momentum": 0.9} if self.algorithm == "sgd" else {}
            kind = getattr(optim, "Paged" * self.paged + self.counterpart)
            self._inner = kind([nn.Parameter(torch.empty(0))], lr=1.0, **momentum)
        return self._inner

    def numbers_of(self, group: dict[str, Any]) -> tuple[float, ...]:
        missing = missing_option(self.counterpart, [group], self.paged)
        if missing:
            raise ConfigError(f"{missing}. Use fp8stack.optim.{type(self).__name__} for it.")
        return super().numbers_of(group)

    # --- state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check_states(param_group.get("states", self.states))
        super().add_param_group(param_group)

    def check_formats_of(self, parameter: Tensor) -> None:
        check_states(self.formats_of(parameter)[0])
        if is_sharded(parameter):
            raise ModelError(
                f"a parameter of shape {tuple(parameter.shape)} is sharded (DTensor), which bitsandbytes does not "
                'support. Use optimizer_backend="fp8stack".'
            )

    def moment_format(self, parameter: Tensor) -> str:
        states = super().moment_format(parameter)
        return BITSANDBYTES if states == "8bit" else states

    def ensure_state(self, group: dict[str, Any], parameter: nn.Parameter) -> State:
        state = super().ensure_state(group, parameter)
        for key in self._paged_keys(state, parameter):
            if (parameter, key) not in self._pages:
                page = self.inner.get_state_buffer(parameter, state[key].dtype)
                # An alias that does not say it is managed memory: a copy of it would say so too, and not be.
                self._pages[parameter, key] = page.detach()
            if state[key] is not self._pages[parameter, key]:  # new or loaded
                state[key] = self._pages[parameter, key].copy_(state[key])
        return state

    def house(self, state: State, parameter: Tensor) -> State:
        """Return `state` with the parameter; what is paged, or will be at the next step, on the host."""
        host = {key: state[key].cpu() for key in self._paged_keys(state, parameter)}
        rest = {key: value for key, value in state.items() if key not in host}
        return {**super().house(rest, parameter), **host}

    def _paged_keys(self, state: State, parameter: Tensor) -> list[str]:
        if not (self.paged and parameter.is_cuda and parameter.numel() >= PAGED_FROM):
            return []
        return [key for key in state if key.endswith("_code") or key in self.moments]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "paged": self.paged, "_pages": {}}

    # --- stepping

    def _step(self, chosen: Sequence[Tensor], only: Tensor | None = None) -> None:
        devices = {p.device for p in chosen if p.grad is not None}
        gpus = {device for device in devices if device.type == "cuda"}
        with _default_streams(gpus):
            if all(map(ops.triton_runs_on, devices)):
                super()._step(chosen, only)
            else:
                numbers = [self.numbers_of(group) for group in self.param_groups]
                reference_step(self, numbers, only, type(self)._update)
        if self.paged:  # the host may read the states from here on
            for device in gpus:
                torch.cuda.synchronize(device)

    def make_plan(
        self, entries: Sequence[tuple[int, int, nn.Parameter]], device: torch.device, family: str
    ) -> Plan:
        return _plan_class()(self, entries, device, family)

    def note_emitted(self) -> None:
        """Nothing was emitted: `emitted` casts a weight that a step has changed."""

    def _update(
        self,
        group: dict[str, Any],
        parameter: nn.Parameter,
        state: State,
        gradient: tuple[Tensor, Tensor | None],
        row: Tensor,  # its scalars, see `kernels/reference/scalars.py`
    ) -> None:
        """Update one parameter and its state, as `update_parameter` of `reference.py`."""
        grad_mul, apply, count = torch.stack([row[0], row[4], state["step"]]).tolist()
        if not apply:
            return
        weight = parameter.detach()
        rows = weight.contiguous()
        tensors = step_tensors(rows, *gradient, self.moments_of(group), state)
        in_place = rows.dtype is torch.float32
        u = rows if in_place else torch.zeros_like(rows, dtype=torch.float32)
        self.update(self.settings_of(group, in_place), tensors, u, grad_mul, int(count))
        if not in_place:
            kind = split_kind(self.step_kind(group, parameter))[1]
            reference_kernel(kind, apply_tensors(u, tensors), _apply_hyper(row))
        if rows.data_ptr() != weight.data_ptr():  # channels_last, or a transposed view
            weight.copy_(rows)

    def settings_of(self, group: dict[str, Any], in_place: bool) -> Settings:
        """Return the settings for weights that bitsandbytes updates in place, or for zeros in their stead."""
        _, beta1, beta2, eps, decay, coupled, *_ = self.numbers_of(group)
        if not in_place:
            decay = 0.0
        elif self.algorithm == "sgd":  # bitsandbytes' own is coupled
            decay, coupled = coupled, 0.0
        lr, betas = float(group["lr"]), (beta1, beta2)
        return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}, coupled

    def update(
        self, settings: Settings, t: StepTensors, u: Tensor, grad_mul: float, count: int
    ) -> None:
        """Let bitsandbytes take step `count` on the states of `t` and on `u`: its float32 weight, or zeros."""
        g = _gradient(t, grad_mul)
        if settings[1]:
            g = g.add(load_master(t.weight, t.master, t.master_scale), alpha=settings[1])
        entry: dict[str, Any] = {"step": count - 1}  # update_step counts
        for i, codes, scale in ((1, t.m, t.m_scale), (2, t.v, t.v_scale)):
            if codes is None:
                continue
            entry[f"state{i}"] = codes
            if codes.device != u.device:  # how bitsandbytes marks managed memory
                codes.is_paged, codes.page_deviceid = True, u.device.index  # type: ignore[attr-defined]
            if scale is not None:
                entry[f"absmax{i}"] = scale
                entry[f"qmap{i}"] = dynamic.table(i == 1, scale.device)
        u.grad, self.inner.state = g, {u: entry}
        try:
            self.inner.prefetch_state(u)
            # An index that its global manager of overrides does not hold.
            self.inner.update_step(settings[0], u, -1, -1)
        finally:
            u.grad, self.inner.state = None, {}


class AdamW(BitsandbytesOptimizer, adam.AdamW):
    """`fp8stack.optim.AdamW` on bitsandbytes' AdamW8bit, or PagedAdamW8bit."""

    counterpart = "AdamW8bit"


class Adam(BitsandbytesOptimizer, adam.Adam):
    """`fp8stack.optim.Adam` on bitsandbytes' Adam8bit, or PagedAdam8bit; its weight decay is torch's, L2."""

    counterpart = "Adam8bit"


class Lion(BitsandbytesOptimizer, lion.Lion):
    """`fp8stack.optim.Lion` on bitsandbytes' Lion8bit, or PagedLion8bit."""

    counterpart = "Lion8bit"


class SGD(BitsandbytesOptimizer, sgd.SGD):
    """`fp8stack.optim.SGD` with momentum on bitsandbytes' SGD8bit."""

    counterpart = "SGD8bit"


COUNTERPARTS: dict[type[BlockwiseOptimizer], type[BitsandbytesOptimizer]] = {
    adam.AdamW: AdamW,
    adam.Adam: Adam,
    lion.Lion: Lion,
    sgd.SGD: SGD,
}


def check_bitsandbytes(device: torch.device, paged: bool) -> None:
    """Raise UnsupportedDeviceError unless bitsandbytes' optimizers work on `device`."""
    answer = capability.bitsandbytes_optimizer(device)
    if not answer:
        raise UnsupportedDeviceError(f"{answer.reason}.")
    if paged and device.type != "cuda":
        raise UnsupportedDeviceError(
            f"paged optimizers keep states in managed memory of CUDA; the parameters are on {device}. "
            'Move the model to a GPU first, or use optimizer_backend="bitsandbytes".'
        )


def missing_option(counterpart: str, groups: Sequence[dict[str, Any]], paged: bool) -> str:
    """Return what bitsandbytes' optimizer does not have and a group asks for, or an empty string."""
    if counterpart == "SGD8bit":
        if paged:
            return "bitsandbytes has no paged SGD"
        for group in groups:
            if not group["momentum"]:
                return "bitsandbytes' SGD8bit needs momentum > 0"
            for option in ("nesterov", "dampening"):
                if group[option]:
                    return f"bitsandbytes' SGD8bit has no {option}={group[option]}"
    return ""


def check_states(states: str) -> None:
    """Raise ConfigError unless bitsandbytes' optimizers keep `states`."""
    if states not in ("8bit", "fp32"):
        raise ConfigError(
            f'bitsandbytes\' optimizers keep states as "8bit" or "fp32", not as {states!r}. '
            'Use optimizer_backend="fp8stack" for other formats.'
        )


def _apply_hyper(hyper: Tensor) -> Tensor:  # float32 [..., 16]
    """Return the scalars of a step that applies an update: w = w × decay + update."""
    hyper = hyper.clone()
    hyper[..., 0], hyper[..., 2] = 1.0, -1.0
    return hyper


def _gradient(t: StepTensors, grad_mul: float) -> Tensor:
    """Return the gradient in float32, multiplied; itself where it is that already."""
    if t.grad_scale is not None:
        scale = t.grad_scale if grad_mul == 1 else t.grad_scale * grad_mul
        return ops.dequantize_blocks(t.grad, scale, E4M3)
    g = t.grad.float()
    return g if grad_mul == 1 else g * grad_mul


def _parts(shape: torch.Size, whole: bool) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Yield (its rows, their number and length) of each part of about `PART` elements, or the `whole`.

    A number of rows is a multiple of 256, so that parts start with a block of bitsandbytes' and a program of the step.
    """
    rows, cols = rows_cols(shape)
    length = max(PART // max(cols, 1) // dynamic.BLOCK, 1) * dynamic.BLOCK
    if whole:
        length = max(rows, 1)
    for start in range(0, rows, length):
        stop = min(start + length, rows)
        yield slice(start, stop), (stop - start, cols)


def _rows_of(t: StepTensors, here: slice) -> StepTensors:
    """Return the tensors of some rows."""
    rows, cols = rows_cols(t.weight.shape)
    if here == slice(0, rows):
        return t
    blocks = slice(*(-(-row * cols // dynamic.BLOCK) for row in (here.start, here.stop)))
    pieces = [x if x is None or x.ndim == 0 else x[blocks if x.ndim == 1 else here] for x in t]
    return StepTensors(*pieces)  # type: ignore[arg-type]


@cache
def _plan_class() -> type[Plan]:
    """Return the class of plans for this module; not at its level, since Triton is imported when a GPU is used."""
    from .plan import Plan

    class BitsandbytesPlan(Plan):
        """A plan that examines all gradients at once, as any does, and then steps part after part."""

        def __init__(self, optimizer: BitsandbytesOptimizer, *args: Any) -> None:
            self.optimizer = optimizer
            super().__init__(optimizer, *args)

        def launches_of(self, kind: StepKind, t: StepTensors, group: int, emit: bool) -> Any:
            return super().launches_of(kind, t, group, False)[0], group

        def _row_major(self) -> list[tuple[Tensor, Tensor]]:
            held = super()._row_major()
            self.copies = {parameter.data_ptr(): weight for parameter, weight in held}
            return held

        def step_segment(self, s: Segment) -> None:
            if s is self.segments[0]:  # all of them, so that the host waits for the GPU once
                _step_parts(self.optimizer, self, self.copies)

    return BitsandbytesPlan


def _step_parts(optimizer: BitsandbytesOptimizer, plan: Plan, copies: dict[int, Tensor]) -> None:
    """Step the parameters of a plan. `copies`: row-major ones of weights that are not, by address."""
    from fp8stack.kernels import step

    device, groups = plan.device, optimizer.param_groups
    settings = [[optimizer.settings_of(g, in_place) for in_place in (False, True)] for g in groups]
    scalars = torch.stack((plan.hyper[:, 0], plan.hyper[:, 4], plan.steps), 1).tolist()
    parts = [
        (i, *part)
        for i, p in enumerate(plan.parameters)
        if scalars[i][1]
        for part in _parts(p.shape, "master_scale" in optimizer.state[p])
    ]
    if not parts:
        return
    programs = [step.programs({"blocks": prod(scale_shape(size))}) for *_, size in parts]
    owner = torch.zeros(max(programs), dtype=torch.int32, device=device)
    buffer = torch.empty(max(prod(size) for *_, size in parts), device=device)
    # A row is that of the whole tensor, and so is noise; a part's programs are counted from its first.
    number, start = torch.tensor([(i, here.start) for i, here, _ in parts], device=device).unbind(1)
    rows, hyper = plan.rows[number], _apply_hyper(plan.hyper[number])
    rows[:, COLUMN["grad"]] = buffer.data_ptr() - 4 * start * rows[:, COLUMN["cols"]]
    rows[:, COLUMN["first"]] = start * rows[:, COLUMN["blocks_per_row"]] // -step.BLOCKS
    segments = [s for s in plan.segments for _ in s.parameters]
    each = zip(parts, programs, rows.split(1), hyper.split(1), strict=True)
    for (i, here, _), count, row, numbers in each:
        p, s, (grad_mul, _, n) = plan.parameters[i], segments[i], scalars[i]
        weight = copies.get(p.data_ptr(), p.detach())
        gradient = gradient_parts(p.grad.contiguous())  # type: ignore[union-attr]
        moments = optimizer.moments_of(groups[s.batch])
        t = _rows_of(step_tensors(weight, *gradient, moments, optimizer.state[p]), here)
        in_place = weight.dtype is torch.float32
        u = t.weight if in_place else buffer[: t.weight.numel()].view_as(t.weight).zero_()
        optimizer.update(settings[s.batch][in_place], t, u, grad_mul, int(n))
        if not in_place:
            dtypes = (*s.launch.dtypes[:2], u.dtype, None, None)
            launch = s.launch._replace(kind=split_kind(s.launch.kind)[1], dtypes=dtypes)
            step.step_table(launch, row, owner[:count], numbers, s.amax[:1])


@contextmanager
def _default_streams(devices: set[torch.device]) -> Iterator[None]:
    """Work on the default streams, where bitsandbytes launches its kernels whatever the current stream is."""
    with ExitStack() as stack:
        for device in devices:
            current, default = (
                torch.cuda.current_stream(device),
                torch.cuda.default_stream(device),
            )
            if current != default:
                default.wait_stream(current)
                stack.enter_context(torch.cuda.stream(default))
                stack.callback(current.wait_stream, default)
        yield
