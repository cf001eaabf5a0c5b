"""Rows of tokens on their way to experts and back.

    route        a row for each pair of token and expert, those of an expert next to each other
    take_rows    codes of the rows that an index names, as they lie and transposed; zeros where it names none
    sum_rows     for each token the sum of the rows that its experts made

Products grouped over experts want the tokens of an expert next to each other. Where they are summed over tokens, as for
the gradient of a weight, they also want each group in a multiple of 16 rows: `take_rows` puts rows of zeros between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cast import ALIGNMENT, TOKENS, aligned, transpose


def rows_needed(pairs: int, experts: int) -> int:
    """Return how many rows suffice for so many pairs, however they fall on experts: a multiple of 64."""
    return aligned(pairs + (ALIGNMENT - 1) * experts, TOKENS)


def route(top_k_index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give each pair of token and expert a row; the pairs of an expert stay in their order.

    Args:
        top_k_index: the experts of each token, integers [tokens, count]. Those from `experts` on, and negative ones,
            are elsewhere: such a pair gets no row.

    Returns:
        The row behind the last one of each expert, int32 [experts], multiples of 16; the pair in each row, int32
        [rows], -1 for none; and the row of each pair, int32 [tokens, count], -1 for none. Rows that are left over are
        the last expert's.
    """
    ids, rows = top_k_index.reshape(-1), rows_needed(top_k_index.numel(), experts)
    ids = torch.where(ids < 0, experts, ids)
    counts = torch.bincount(ids.clamp(max=experts), minlength=experts + 1)[:experts]
    sizes = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = sizes.cumsum(0).int()
    order = ids.argsort(stable=True)[: int(counts.sum())]
    first = counts.cumsum(0) - counts  # among those of all experts, without padding
    own = ids[order]
    place = (torch.arange(len(order), device=ids.device) - first[own] + (ends - sizes)[own]).int()
    ends[-1] = rows
    index = ends.new_full((rows,), -1)
    index[place.long()] = order.int()
    places = ends.new_full((ids.numel(),), -1)
    places[order] = place
    return ends, index, places.view_as(top_k_index)


def take_rows(
    codes: Tensor,  # one byte an element, [rows, cols], cols a multiple of 16
    index: Tensor,  # int32 [n], n a multiple of 16, in count × rows; -1 names no row
    count: int,  # that many numbers in a row name the same row
    plain: bool = True,
    transposed: bool = True,
) -> tuple[Tensor, Tensor]:  # codes [n, cols] and [cols, n]; empty if not asked for
    """Return the rows of `codes` that `index` names."""
    taken = codes.view(torch.uint8)[index.clamp(min=0).long() // count]
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
