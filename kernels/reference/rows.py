"""Rows of tokens on their way to experts and back.

    take_rows    codes of the rows that an index names, as they lie and transposed; zeros where it names none
    sum_rows     for each token the sum of the rows that its experts made

Products grouped over experts want the tokens of an expert next to each other. Where they are summed over tokens, as for
the gradient of a weight, they also want each group in a multiple of 16 rows: `take_rows` puts rows of zeros between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cast import transpose


def take_rows(
    codes: Tensor,  # one byte an element, [rows, cols], cols a multiple of 16
    index: Tensor,  # int32 [n], n a multiple of 16; -1 names no row
    plain: bool = True,
    transposed: bool = True,
) -> tuple[Tensor, Tensor]:  # codes [n, cols] and [cols, n]; empty if not asked for
    """Return the rows of `codes` that `index` names."""
    taken = codes.view(torch.uint8)[index.clamp(min=0).long()]
    taken = torch.where(index[:, None] < 0, 0, taken).view(codes.dtype)
    nothing = codes.new_empty((0, 0))
    return taken if plain else nothing, transpose(taken) if transposed else nothing.clone()


def sum_rows(
    x: Tensor,  # bfloat16, float16 or float32 [rows, cols]
    places: Tensor,  # int32 [tokens, count] in rows; -1 stands for a row of zeros
) -> Tensor:  # [tokens, cols] in the dtype of x
    """Return for each token the sum of its rows, added in float32 one after the other."""
    found = torch.where(places[..., None] < 0, 0, x[places.clamp(min=0).long()].float())
    first, *others = found.unbind(1)
    for row in others:
        first = first + row
    return first.to(x.dtype)
