"""Buckets of gradients that live in FP8: the memory of a bucket is what optimizers read and what ranks send.

A bucket is two arrays, E4M3 codes and a float32 scale for each 128 of them. Each parameter has a region of whole blocks
in them; the end of the bucket is padded so that ranks get equal stripes. `p.grad` is a `BlockScaledTensor` whose codes
and scales are views of the bucket. A bucket is averaged like any FP8 tensor (`exchange.py`), in place.

A gradient keeps 1.03 bytes an element. While a bucket is averaged, what is sent and received takes as much twice over,
for that bucket alone; over NVLink nothing. A matrix whose columns are no multiple of 128 has its rows padded in the
bucket, and its gradient has memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fp8stack.formats import BLOCK, E4M3, rows_cols, scale_shape
from fp8stack.kernels import ops
from fp8stack.tensor import BlockScaledTensor

from . import exchange
from .transport import Transport, observe


class Region:
    """The part of a bucket that holds one parameter's gradient."""

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        self.parameter, self.name = parameter, name
        self.rows, self.cols = rows_cols(parameter.shape)
        self.blocks = math.prod(scale_shape(parameter.shape))
        self.padded = self.rows > 1 and self.cols % BLOCK != 0
        self.gradient: BlockScaledTensor  # p.grad after a backward

    def place(self, codes: Tensor, scale: Tensor) -> None:
        """Take codes [blocks × 128] and scales [blocks] of a bucket."""
        self._codes = codes.view(self.rows, -1)[:, : self.cols] if self.padded else codes
        self._scale = scale.view(scale_shape(self.parameter.shape))
        shape, p = self.parameter.shape, self.parameter
        if self.padded:
            own = torch.zeros(shape, dtype=E4M3.dtype, device=p.device)
            self._parts = own, torch.zeros_like(self._scale)
        else:
            self._parts = codes[: p.numel()].view(shape).view(E4M3.dtype), self._scale
        self.gradient = BlockScaledTensor(*self._parts, p.dtype)

    def holds(self, gradient: Tensor | None) -> bool:
        """Return whether `gradient` is the one of this region, and its codes are still here."""
        if self.gradient.codes is not self._parts[0]:  # the user assigned to its `.data`
            self.gradient = BlockScaledTensor(*self._parts, self.parameter.dtype)
        return gradient is self.gradient

    def write(self, gradient: Tensor) -> None:
        """Quantize a gradient into the bucket."""
        own = self.gradient
        if isinstance(gradient, BlockScaledTensor):
            own.assign_(gradient)
        else:  # like assign_, but without an FP8 copy in between
            ops.quantize_blocks_into(gradient.detach(), E4M3, own.codes, own.scale)
            own.residual = None

    def before_exchange(self) -> None:
        """Copy the gradient into the bucket if it has memory of its own.

        The residual of accumulated micro-batches is dropped: it is smaller than the rounding error of the average.
        """
        self.gradient.residual = None
        if self.padded:
            self._codes.copy_(self.gradient.codes.view(torch.uint8).view(self.rows, self.cols))
            self._scale.copy_(self.gradient.scale)

    def after_exchange(self) -> None:
        """Copy the average out of the bucket if the gradient has memory of its own."""
        if self.padded:
            self.gradient.codes.view(torch.uint8).view(self.rows, self.cols).copy_(self._codes)
            self.gradient.scale.copy_(self._scale)


class Bucket:
    """Gradients that are averaged together."""

    def __init__(self, regions: Sequence[Region], world: int) -> None:
        self.regions = list(regions)
        blocks = sum(region.blocks for region in regions)
        blocks = -(-blocks // world) * world
        device = regions[0].parameter.device
        self.codes = torch.zeros(blocks * BLOCK, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(blocks, dtype=torch.float32, device=device)
        self._whole = BlockScaledTensor(self.codes.view(E4M3.dtype), self.scales[None])
        self.pending = 0  # parameters whose gradient of this backward is not there yet
        start = 0
        for region in regions:
            end = start + region.blocks
            region.place(self.codes[start * BLOCK : end * BLOCK], self.scales[start:end])
            start = end

    def average(self, way: Transport) -> None:
        """Replace the bucket by its mean over all ranks, in stream order."""
        for region in self.regions:
            region.before_exchange()
        if way.world > 1:
            body = partial(exchange.all_reduce, self._whole, self._whole, way.world, way)
            observe("bucket", self.codes.device, body)
        for region in self.regions:
            region.after_exchange()


def make_buckets(
    parameters: Iterable[tuple[str, nn.Parameter]], world: int, most_bytes: float
) -> list[Bucket]:
    """Put parameters into buckets of at most `most_bytes`, last first, which is about the order of backward."""
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
    return [Bucket(regions, world) for regions in buckets]
