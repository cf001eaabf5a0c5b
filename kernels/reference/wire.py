"""E4M3 blocks as ranks send them to each other, and their sums.

A tensor is read as rows of blocks of 128 (`quantize.py`; a short block ends a row). Its blocks are divided, in order,
into one stripe for each rank, of `per` blocks each. A stripe is sent as one chunk of bytes:

    codes    128 bytes a block         value = code × scale
    scales   float32, one a block      NaN: a value of the block is not finite; 0: all are zero
    zeros    up to a multiple of 16

That is 1.03125 bytes an element. Short blocks and stripes beyond the tensor's end are filled up with zeros. Rank i owns
stripe i, and all ranks send it their chunk i. The owner decodes these chunks, adds them in float32 in the order of
ranks, and quantizes the sum into a chunk again. In the end every rank decodes the same chunks, its own too, so all
have the same bits. For a mean it scales the chunks down by a power of two first: the sum may be beyond float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8stack.formats import BLOCK, E4M3

from .quantize import as_blocks, quantize_blocks


class Layout(NamedTuple):
    """How a tensor of rows × cols lies in the chunks of `world` ranks."""

    rows: int
    cols: int
    world: int

    @property
    def blocks_per_row(self) -> int:
        return -(-self.cols // BLOCK)

    @property
    def blocks(self) -> int:
        return self.rows * self.blocks_per_row

    @property
    def per(self) -> int:
        """Blocks of a stripe."""
        return -(-self.blocks // self.world)

    @property
    def pitch(self) -> int:
        """Bytes of a chunk."""
        return -(-self.per * (BLOCK + 4) // 16) * 16


def pack(
    x: Tensor,  # float32, bfloat16 or float16, or uint8 codes of E4M3; contiguous, of rows × cols elements
    layout: Layout,
    out: Tensor | None = None,  # if given, written and returned
    scale: Tensor | None = None,  # of codes: float32 [rows, blocks of a row]
) -> Tensor:  # uint8 [world, pitch]
    """Quantize a tensor into chunks, one scale a block, or lay out one that is in FP8 already."""
    x = x.reshape(layout.rows, layout.cols)
    if scale is None:
        x, scale = quantize_blocks(x, E4M3)
    missing = layout.world * layout.per - layout.blocks
    codes = as_blocks(x.view(torch.uint8)).view(-1, BLOCK)
    codes = pad(codes, (0, 0, 0, missing)).view(layout.world, -1)
    scales = pad(scale.reshape(-1), (0, missing)).view(layout.world, -1).contiguous()
    both = torch.cat([codes, scales.view(torch.uint8)], 1)
    chunks = pad(both, (0, layout.pitch - both.shape[1]))
    return chunks if out is None else out.copy_(chunks)


def reduce_pack(
    chunks: Tensor,  # uint8 [ranks, pitch]: one stripe, from every rank; or [ranks, stripes, pitch]
    layout: Layout,
    divisor: float = 1.0,
) -> Tensor:  # uint8 [pitch], or [stripes, pitch]
    """Add up stripes in float32, in the order of ranks, divide by `divisor`, and quantize the result."""
    ranks, stripes = len(chunks), chunks[0].numel() // max(layout.pitch, 1)
    codes, scale = _parts(chunks.view(ranks * stripes, layout.pitch), layout.per)
    total = _sum(codes.view(ranks, -1, BLOCK), scale.reshape(ranks, -1), divisor)
    return pack(total, Layout(1, total.numel(), stripes)).view_as(chunks[0])


def reduce_unpack(
    chunks: Tensor,  # uint8 [ranks, pitch]: one stripe, from every rank
    out: Tensor,  # float32, bfloat16 or float16, contiguous, written
    divisor: float = 1.0,
) -> None:
    """Add up a stripe in float32, in the order of ranks, divide by `divisor`, and round to the dtype of `out`."""
    layout = Layout(1, out.numel(), 1)
    total = _sum(*_parts(chunks, layout.per), divisor)
    out.view(-1).copy_(total.view(-1)[: out.numel()])


def unpack(
    chunks: Tensor,  # uint8 [world, pitch]
    out: Tensor,  # as `x` of `pack`, written
    layout: Layout,
    scale: Tensor | None = None,  # of codes, written
) -> None:
    """Decode a tensor from chunks, or copy its codes and scales out of them."""
    codes, scales = _parts(chunks, layout.per)
    values = codes.float() * scales.unsqueeze(-1) if scale is None else codes.view(torch.uint8)
    whole = values.view(-1, BLOCK)[: layout.blocks]
    rows = whole.reshape(layout.rows, layout.blocks_per_row * BLOCK)
    out.view(layout.rows, layout.cols).copy_(rows[:, : layout.cols])
    if scale is not None:
        scale.view(-1).copy_(scales.reshape(-1)[: layout.blocks])


def scales_of(
    chunks: Tensor,  # uint8 [..., pitch], contiguous
    per: int,
) -> Tensor:  # float32 [..., per], a view
    """Return the scales in chunks of `per` blocks."""
    floats = chunks.view(-1).view(torch.float32).view(*chunks.shape[:-1], chunks.shape[-1] // 4)
    return floats[..., per * BLOCK // 4 :][..., :per]


def _parts(chunks: Tensor, per: int) -> tuple[Tensor, Tensor]:
    """Return codes (float8_e4m3fn [chunks, per, 128]) and scales (float32 [chunks, per])."""
    codes = chunks[:, : per * BLOCK].contiguous().view(E4M3.dtype)
    return codes.view(len(chunks), per, BLOCK), scales_of(chunks, per)


def share_and_rest(ranks: int, divisor: float) -> tuple[float, float]:
    """Return the power of two that scales are multiplied by before they are added up, and the rest of the divisor.

    A sum of means is no larger than the largest of `ranks` values then. The bits are those of dividing at the end.
    """
    share = 1.0 if divisor == 1 else 0.5 ** (ranks - 1).bit_length()
    return share, divisor * share


def _sum(
    codes: Tensor,  # float8_e4m3fn [ranks, blocks, 128]
    scale: Tensor,  # float32 [ranks, blocks]
    divisor: float,
) -> Tensor:  # float32 [blocks, 128]
    total = torch.zeros(codes.shape[1:], dtype=torch.float32, device=codes.device)
    share, rest = share_and_rest(len(codes), divisor)
    for sent, scales in zip(codes, scale * share, strict=True):
        total += sent.float() * scales.unsqueeze(-1)
    # by a tensor: on CUDA, torch multiplies by the reciprocal of a Python number, which rounds differently
    return total if rest == 1 else total / torch.full_like(total, rest)
