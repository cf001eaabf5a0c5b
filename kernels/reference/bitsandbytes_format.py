"""The 8-bit format of bitsandbytes' optimizer states, which torchao uses too: a table of 256 values.

value = table[code] × scale. Each 256 elements of the flattened tensor share a float32 scale, their largest magnitude.
The table spans seven decades, each finer than the one below it. Decade 10^(i - 6) is cut into equal steps from 0.1 to
1, and their midpoints are values: 2^i of either sign, or 2^(i + 1) without a sign. 0 and 1 are values too (Dettmers,
"8-Bit Approximations for Parallelism in Deep Learning", 2016, section 2; block-wise: Dettmers et al., "8-bit Optimizers
via Block-wise Quantization", 2022, section 2.1).

Blocks cross rows, so a shard is no slice of the codes and scales: sharded states are kept in fp8stack's own formats.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256  # elements that share a scale


@cache
def table(signed: bool, device: torch.device) -> Tensor:  # float32 [256], ascending
    """Return the values of the codes, on `device`."""
    values = [torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")]
    for i in range(7):
        count = 2**i if signed else 2 ** (i + 1)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float32, device="cpu")
        decade = 10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2.0)
        values += [decade, -decade] if signed else [decade]
    return torch.cat(values).sort().values.to(device)


def encode(
    value: Tensor,  # floating point, any shape; not negative unless signed
    signed: bool,
) -> tuple[Tensor, Tensor]:  # codes uint8, the same shape; scale float32 [ceil(numel / 256)]
    """Round to the nearest value of the table; a positive second moment never becomes zero."""
    count = value.numel()
    blocks = pad(value.float().flatten(), (0, -count % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(-1)
    values = table(signed, value.device)
    nonzero = torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
    codes = torch.bucketize(blocks / nonzero, (values[1:] + values[:-1]) / 2, out_int32=True)
    if not signed:
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
    return codes.to(torch.uint8).flatten()[:count].view(value.shape), scale


def decode(
    codes: Tensor,  # uint8, any shape
    scale: Tensor,  # float32 [ceil(numel / block)]
    values: Tensor,  # float32 [256]
    block: int = BLOCK,
) -> Tensor:  # float32, the shape of the codes
    """Return the values of codes. A wrong number of scales is a RuntimeError."""
    count = codes.numel()
    blocks = pad(values[codes.flatten().int()], (0, -count % block)).view(scale.numel(), block)
    return (blocks * scale.unsqueeze(-1)).flatten()[:count].view(codes.shape)
