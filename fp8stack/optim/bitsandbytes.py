"""Steps taken by bitsandbytes' 8-bit optimizers, with fp8stack's masters, FP8 gradients, skipped steps and checkpoints.

O2 chooses them on GPUs without FP8 where bitsandbytes is installed. The paged variants let the driver move states
between GPU and host as memory allows. For each parameter that has a gradient

    1. the gradient becomes float32: decoded from FP8, unscaled, clipped;
    2. bitsandbytes' own update_step runs on it and on zeros, without weight decay. It updates the 8-bit states, and
       the zeros become the update;
    3. one launch of fp8stack's own step sets weight and master to weight × (1 - lr × decay) + update.

A float32 weight is updated in place, by bitsandbytes alone. On a GPU with Triton all gradients are examined at once and
the host waits once for each format of states. Tensors are stepped in pieces of 2^24 elements, so that the float32
buffers take 128 MiB (more for rows longer than 2^16, and for master="fp16", which has one scale for the whole tensor).
fp8stack decides which tensors have 8-bit states. bitsandbytes' element count and `GlobalOptimManager` are not asked:
name formats with `states_for` or `override`.

Limits: a step waits for the GPU, so it cannot be captured in a CUDA graph, and takes up to four launches for each
piece. SGD needs momentum, and has neither Nesterov's nor dampening. L2 regularization needs the weight in float32
beside the gradient, which costs memory and launches (except for SGD with float32 weights). States are not sharded and
are "8bit" or "fp32". bitsandbytes never frees what `paged` allocates, so one optimizer keeps its pages for good.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack import capability, conflicts
from fp8stack.conflicts import EIGHT_BITS, IS_SGD, ON_BITSANDBYTES, ON_CPU, check_option
from fp8stack.errors import ModelError, UnsupportedDeviceError
from fp8stack.formats import E4M3, rows_cols
from fp8stack.kernels import ops
from fp8stack.kernels.reference import bitsandbytes_format
from fp8stack.kernels.reference.bitsandbytes_format import BLOCK
from fp8stack.kernels.reference.step import StepTensors, load_master
from fp8stack.tensor_kinds import is_sharded

from . import adam, lion, sgd
from .optimizer import Batch, BlockwiseOptimizer, ParamsT
from .saved_checks import kind_of
from .state_formats import BITSANDBYTES, State
from .step import Entry, Piece

LEAST_EPS = 1e-30  # makes 0 / 0 in bitsandbytes' update 0
PAGED_FROM = 100_000  # elements; bitsandbytes pages no smaller states
PART = 2**24  # elements that are updated at once


class BitsandbytesOptimizer(BlockwiseOptimizer):
    """Base of `AdamW`, `Adam`, `Lion` and `SGD` below: the step of an fp8stack optimizer, taken by bitsandbytes.

    Args:
        params, hyper-parameters, master, min_numel, max_grad_norm: as the optimizer of the same name in fp8stack.optim.
        states: "8bit" or "fp32".
        paged: keep states of 100,000 elements or more in managed memory (PagedAdamW8bit and so on; CUDA only).

    Raises:
        UnsupportedDeviceError: if bitsandbytes is not installed, or does not work on the device of a parameter (it is
            not tried on meta, where nothing steps).
        ConfigError: for an option that bitsandbytes' optimizer does not have.
    """

    paged = False

    def __init__(self, params: ParamsT, *args: Any, paged: bool = False, **options: Any) -> None:
        check_option("offload", options.get("offload", "none"), *ON_BITSANDBYTES)
        if paged and isinstance(self, SGD):
            check_option("optimizer_backend", "bitsandbytes-paged", IS_SGD)
        self.paged, self._pages = paged, dict[tuple[Tensor, str], Tensor]()
        super().__init__(params, *args, **options)
        for device in {p.device for group in self.param_groups for p in group["params"]}:
            if device.type != "meta":  # no step is taken there; who plans asks about the target
                check_bitsandbytes(device, paged)

    @property
    def backend(self) -> str:
        """The `optimizer_backend` that this is."""
        return "bitsandbytes-paged" if self.paged else "bitsandbytes"

    @cached_property
    def inner(self) -> Any:
        """bitsandbytes' optimizer. It owns no parameters: each is handed to it for its update only."""
        from bitsandbytes import optim

        momentum = {"momentum": 0.9} if self.algorithm == "sgd" else {}
        kind = getattr(optim, f"{'Paged' * self.paged}{kind_of(self)}8bit")
        return kind([nn.Parameter(torch.empty(0))], lr=1.0, **momentum)

    def numbers_of(self, group: dict[str, Any]) -> tuple[float, ...]:
        if isinstance(self, SGD):
            options = conflicts.settings_of_group(group)
            conflicts.refuse(conflicts.broken_rules(options, (*ON_BITSANDBYTES, IS_SGD)))
        return super().numbers_of(group)

    # --- state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        states = param_group.get("states", self.states)
        check_option("states", states, *ON_BITSANDBYTES, *EIGHT_BITS)
        super().add_param_group(param_group)

    def check_formats_of(self, parameter: Tensor) -> None:
        check_option("states", self.formats_of(parameter)[0], *ON_BITSANDBYTES, *EIGHT_BITS)
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
                # An alias without bitsandbytes' mark of managed memory, which copies would carry too.
                self._pages[parameter, key] = page.detach()
            if state[key] is not self._pages[parameter, key]:  # new or loaded
                state[key] = self._pages[parameter, key].copy_(state[key])
        return state

    def place(self, state: State, parameter: Tensor) -> State:
        """Place `state` with the parameter; what is paged, or will be at the next step, on the host."""
        host = {key: state[key].cpu() for key in self._paged_keys(state, parameter)}
        rest = {key: value for key, value in state.items() if key not in host}
        return {**super().place(rest, parameter), **host}

    def _paged_keys(self, state: State, parameter: Tensor) -> list[str]:
        if not (self.paged and parameter.is_cuda and parameter.numel() >= PAGED_FROM):
            return []
        return [key for key in state if key.endswith("_code") or key in self.moments]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "paged": self.paged, "_pages": {}}

    # --- stepping

    def step_parameters(self, chosen: Sequence[Tensor], only: Tensor | None = None) -> None:
        gpus = {p.device for p in chosen if p.grad is not None and p.is_cuda}
        with _default_streams(gpus):
            super().step_parameters(chosen, only)
        if self.paged:  # the host may read the states from here on
            for device in gpus:
                torch.cuda.synchronize(device)

    def step_batch(self, batch: Batch) -> None:
        scalars = torch.stack((batch.hyper[:, 0], batch.hyper[:, 4], batch.counts), 1).tolist()
        pieces = [
            piece
            for i, entry in enumerate(batch.entries)
            if scalars[i][1]  # the step is taken
            for piece in _pieces(i, entry, batch.divisible)
        ]
        if not pieces:
            return
        in_place = batch.entries[0].parameter.dtype is torch.float32
        size = 0 if in_place else max(prod(piece.shape) for piece in pieces)
        buffer = torch.empty(size, dtype=torch.float32, device=batch.hyper.device)
        settings = [(float(g["lr"]), *self.numbers_of(g)[1:]) for g in self.param_groups]
        for piece, apply in zip(pieces, batch.appliers(pieces, buffer), strict=True):
            numbers = settings[batch.entries[piece.number].group]
            tensors = _rows_of(batch.tensors(piece.number), piece)
            if self._update(numbers, tensors, buffer, scalars[piece.number]):
                apply()

    def _update(
        self, numbers: tuple[float, ...], t: StepTensors, buffer: Tensor, scalars: list[float]
    ) -> bool:
        """Let bitsandbytes take a step. Return whether `buffer` holds an update that is still to be applied.

        A float32 weight is updated in place instead.
        """
        lr, beta1, beta2, eps, decay, coupled, *_ = numbers
        grad_mul, _, count = scalars
        in_place = t.weight.dtype is torch.float32
        u = t.weight if in_place else buffer[: t.weight.numel()].view_as(t.weight).zero_()
        own_decay = 0.0
        if in_place:  # SGD's is coupled in bitsandbytes too
            own_decay, coupled = (coupled, 0.0) if self.algorithm == "sgd" else (decay, coupled)
        options = {"lr": lr, "betas": (beta1, beta2), "eps": max(eps, LEAST_EPS)}
        g = _gradient(t, grad_mul)
        if coupled:
            g = g.add(load_master(t.weight, t.master, t.master_scale), alpha=coupled)
        state: dict[str, Any] = {"step": int(count) - 1}  # update_step counts
        for i, codes, scale in ((1, t.m, t.m_scale), (2, t.v, t.v_scale)):
            if codes is None:
                continue
            if codes.device != u.device:
                codes = codes.detach()  # an alias, marked as bitsandbytes marks managed memory
                codes.is_paged, codes.page_deviceid = True, u.device.index  # type: ignore[attr-defined]
            state[f"state{i}"] = codes
            if scale is not None:
                state[f"absmax{i}"] = scale
                state[f"qmap{i}"] = bitsandbytes_format.table(i == 1, scale.device)
        u.grad, self.inner.state = g, {u: state}
        try:
            self.inner.prefetch_state(u)
            # Indices that its global manager of overrides does not have.
            self.inner.update_step({**options, "weight_decay": own_decay}, u, -1, -1)
        finally:
            u.grad, self.inner.state = None, {}
        return not in_place


class AdamW(BitsandbytesOptimizer, adam.AdamW):
    """`fp8stack.optim.AdamW` on bitsandbytes' AdamW8bit, or PagedAdamW8bit."""


class Adam(BitsandbytesOptimizer, adam.Adam):
    """`fp8stack.optim.Adam` on bitsandbytes' Adam8bit, or PagedAdam8bit; its weight decay is torch's, L2."""


class Lion(BitsandbytesOptimizer, lion.Lion):
    """`fp8stack.optim.Lion` on bitsandbytes' Lion8bit, or PagedLion8bit."""


class SGD(BitsandbytesOptimizer, sgd.SGD):
    """`fp8stack.optim.SGD` with momentum on bitsandbytes' SGD8bit."""


COUNTERPARTS: dict[type[BlockwiseOptimizer], type[BitsandbytesOptimizer]] = {
    kind.__bases__[1]: kind for kind in (AdamW, Adam, Lion, SGD)
}


def check_bitsandbytes(device: torch.device, paged: bool) -> None:
    """Raise UnsupportedDeviceError unless bitsandbytes' optimizers work on `device`."""
    answer = capability.bitsandbytes_optimizer(device)
    if not answer:
        raise UnsupportedDeviceError(f"{answer.reason}.")
    if paged and device.type == "cpu":
        check_option("optimizer_backend", "bitsandbytes-paged", ON_CPU)


def _pieces(number: int, entry: Entry, divisible: bool) -> Iterator[Piece]:
    """Yield the rows of a parameter in pieces of about `PART` elements, or all of them.

    Pieces are multiples of 256 rows, and so start with a block of bitsandbytes' and a program of the step.
    """
    rows, cols = rows_cols(entry.parameter.shape)
    length = max(PART // max(cols, 1) // BLOCK, 1) * BLOCK
    if not divisible or "master_scale" in entry.state:  # of the whole tensor
        length = max(rows, 1)
    for start in range(0, rows, length):
        yield Piece(number, start, (min(length, rows - start), cols))


def _rows_of(t: StepTensors, piece: Piece) -> StepTensors:
    """Return the tensors of some rows."""
    (rows, cols), stop = piece.shape, piece.start + piece.shape[0]
    if rows == rows_cols(t.weight.shape)[0]:
        return t
    here = slice(piece.start, stop)
    blocks = slice(piece.start * cols // BLOCK, -(-stop * cols // BLOCK))
    pieces = [x if x is None or x.ndim == 0 else x[blocks if x.ndim == 1 else here] for x in t]
    return StepTensors(*pieces)  # type: ignore[arg-type]


def _gradient(t: StepTensors, grad_mul: float) -> Tensor:
    """Return the gradient in float32, multiplied; itself where it is that already."""
    if t.grad_block_scale is not None:
        return ops.dequantize_blocks(t.grad, t.grad_block_scale * grad_mul, E4M3)
    g = t.grad.float()
    return g if grad_mul == 1 else g * grad_mul


@contextmanager
def _default_streams(devices: set[torch.device]) -> Iterator[None]:
    """Work on the default streams: bitsandbytes launches its kernels there, whatever the current stream is."""
    with ExitStack() as stack:
        for device in devices:
            current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
            if current != default:
                default.wait_stream(current)
                stack.enter_context(torch.cuda.stream(default))
                stack.callback(current.wait_stream, default)
        yield
