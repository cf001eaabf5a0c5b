"""Buckets of gradients that live in FP8: what is stored is what is sent.

A bucket is two arrays, E4M3 codes and a float32 scale for each 128 of them, in which each parameter has a region of
whole blocks, padded at the end of the bucket so that ranks get equal stripes. `p.grad` is a `BlockScaledTensor` that
looks into it. Averaging a bucket moves nothing else:

    all-to-all     of codes, and of scales: each rank gets its stripe from all
    reduce         my stripe, in float32 in the order of ranks, quantized again, in its place
    all-gather     of codes, and of scales, into the bucket itself

Between the GPUs of one host all of that is one kernel (`nvlink.py`); a group with a hierarchy packs the bucket and adds
up by way of hosts (`exchange.py`).

1.03 bytes an element stay, and while a bucket is on its way the stripes that were received, as much again of it alone.
A matrix whose columns are no multiple of 128 has its rows padded in the bucket, and its gradient a memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fp8stack.formats import BLOCK, E4M3, rows_cols
from fp8stack.kernels import ops
from fp8stack.kernels.reference.wire import Layout
from fp8stack.tensor import BlockScaledTensor

from .exchange import reduce_hosts
from .hosts import hierarchy_of
from .nvlink import link_of
from .statistics import Sent, observe
from .transport import Transport


class Region:
    """The place of one parameter's gradient in a bucket."""

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        self.parameter, self.name = parameter, name
        self.rows, self.cols = rows_cols(parameter.shape)
        self.per_row = -(-self.cols // BLOCK)
        self.blocks = self.rows * self.per_row
        self.padded = self.rows > 1 and self.cols % BLOCK != 0
        self.gradient: BlockScaledTensor  # what p.grad is

    def place(self, codes: Tensor, scale: Tensor) -> None:
        """Take codes [blocks × 128] and scales [blocks] of a bucket."""
        self._codes = codes.view(self.rows, -1)[:, : self.cols] if self.padded else codes
        self._scale = scale.view(self.rows, self.per_row)
        shape, p = self.parameter.shape, self.parameter
        if self.padded:
            own = torch.zeros(shape, dtype=E4M3.dtype, device=p.device)
            self.gradient = BlockScaledTensor(own, torch.zeros_like(self._scale), p.dtype)
        else:
            seen = codes[: p.numel()].view(shape).view(E4M3.dtype)
            self.gradient = BlockScaledTensor(seen, self._scale, p.dtype)

    def write(self, gradient: Tensor) -> None:
        """Quantize a gradient to its place."""
        own = self.gradient
        if isinstance(gradient, BlockScaledTensor):
            own.assign_(gradient)
        else:  # as assign_ does, without a second pass
            ops.quantize_blocks_into(gradient.detach(), E4M3, own.codes, own.scale)
            own.residual = None

    def before_exchange(self) -> None:
        """Put into the bucket what is not in it. A residual of micro-batches is less than rounding leaves, and goes."""
        self.gradient.residual = None
        if self.padded:
            self._codes.copy_(self.gradient.codes.view(torch.uint8).view(self.rows, self.cols))
            self._scale.copy_(self.gradient.scale)

    def after_exchange(self) -> None:
        """Take out of the bucket what is not looked at there."""
        if self.padded:
            self.gradient.codes.view(torch.uint8).view(self.rows, self.cols).copy_(self._codes)
            self.gradient.scale.copy_(self._scale)


class Bucket:
    """Gradients that are averaged together."""

    def __init__(self, regions: Sequence[Region], world: int, feedback: bool) -> None:
        self.regions = list(regions)
        blocks = sum(region.blocks for region in regions)
        blocks = -(-blocks // world) * world
        device = regions[0].parameter.device
        self.codes = torch.zeros(blocks * BLOCK, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(blocks, dtype=torch.float32, device=device)
        self.error: Tensor | None = None  # of quantizing this rank's stripe of the last mean
        if feedback:
            self.error = torch.zeros(blocks // world * BLOCK, dtype=torch.float32, device=device)
        self.pending = 0  # parameters whose gradient of this backward is not there yet
        start = 0
        for region in regions:
            end = start + region.blocks
            region.place(self.codes[start * BLOCK : end * BLOCK], self.scales[start:end])
            start = end

    @property
    def nbytes(self) -> int:
        error = 0 if self.error is None else self.error.nbytes
        return self.codes.nbytes + self.scales.nbytes + error

    def average(self, way: Transport) -> None:
        """Replace the bucket by its mean over all ranks, in stream order."""
        observe("bucket", self.codes.device, lambda: self._average(way))

    def _average(self, way: Transport) -> Sent:
        for region in self.regions:
            region.before_exchange()
        if way.world > 1:
            self._exchange(way)
        for region in self.regions:
            region.after_exchange()
        stripe = (self.codes.nbytes + self.scales.nbytes) // way.world
        return Sent(2 * (way.world - 1) * stripe, self.scales.numel(), lambda: self.scales)

    def _exchange(self, way: Transport) -> None:
        if hosts := hierarchy_of(way.group):
            codes, scale = self.codes.view(E4M3.dtype), self.scales[None]
            whole = BlockScaledTensor(codes, scale)
            ways = [Transport(group, way.what, background=True) for group in hosts]
            reduce_hosts(whole, whole, True, way, *ways, error=self.error)
            return
        if link := link_of(way.group, self.codes.device):
            layout, parts = Layout(1, self.codes.numel(), way.world), (self.codes, self.scales)
            link.all_reduce(*parts, *parts, layout, way, way.world, self.error)
            return
        codes, scales = torch.empty_like(self.codes), torch.empty_like(self.scales)
        way.all_to_all(codes, self.codes)
        way.all_to_all(scales, self.scales)
        mine = [t.view(way.world, -1)[way.rank] for t in (self.codes, self.scales)]
        parts = codes.view(way.world, -1), scales.view(way.world, -1)
        ops.wire_kernels(codes.is_cuda).reduce_blocks(*parts, *mine, way.world, self.error)
        way.all_gather(self.codes, mine[0])
        way.all_gather(self.scales, mine[1])


def make_buckets(
    parameters: Iterable[tuple[str, nn.Parameter]],
    world: int,
    most_bytes: float,
    feedback: bool,  # of errors
) -> list[Bucket]:
    """Put parameters into buckets of at most `most_bytes`, the last first: the order in which backward reaches them."""
    buckets: list[list[Region]] = []
    size = 0.0
    for name, parameter in reversed(list(parameters)):
        region = Region(parameter, name)
        nbytes = region.blocks * (BLOCK + 4)
        if not buckets or size + nbytes > most_bytes:
            buckets.append([])
            size = 0.0
        buckets[-1].append(region)
        size += nbytes
    return [Bucket(regions, world, feedback) for regions in buckets]
