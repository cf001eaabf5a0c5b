"""A table of pointers on the device, so that one launch works on any number of tensors.

Why: launches cost 10 µs each on the host, and a model has hundreds of tensors.

How: one row of 64-bit integers a tensor: addresses and sizes. A launch works on a run of rows: `owner[i]` names the row
of program i, counted from the launch's first, and the row's column "first" (or "first_span", where programs read whole
spans) says which of its programs that is. A row whose column "blocks" is 0 is neither read nor written: that is how a
tensor without a gradient is left out.

Limits: the caller keeps the tensors alive.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

COLUMNS = (
    "weight", "master", "master_scale", "m", "m_scale", "v", "v_scale", "grad", "grad_block_scale", "blocks",
    "blocks_per_row", "cols", "first", "first_span", "codes",
)  # fmt: skip
WIDTH = 16
COLUMN = {name: index for index, name in enumerate(COLUMNS)}


def upload_rows(rows: Sequence[Mapping[str, int]], device: torch.device) -> Tensor:
    """Return the table [len(rows), 16], int64; a column that a row does not name is 0."""
    return upload_columns({name: [row.get(name, 0) for row in rows] for name in COLUMNS}, device)


def upload_columns(columns: Mapping[str, Sequence[int]], device: torch.device) -> Tensor:
    """Return the same table from its columns, which takes less time; it has "blocks", and others are 0 if not named."""
    count = len(columns["blocks"])
    flat = array("q", bytes(8 * WIDTH * count))
    for name, values in columns.items():
        flat[COLUMN[name] :: WIDTH] = array("q", values)
    return upload(flat, device).view(count, WIDTH)


def deal(
    rows: Sequence[dict[str, int]],
    blocks: int,  # of a row that a program works on
    column: str,  # "first" or "first_span"
    device: torch.device,
) -> Tensor:
    """Give each row of a launch its programs: note its first one in `column`, return the row of each (int32)."""
    firsts, owner = programs_of([row["blocks"] for row in rows], blocks, device)
    for row, first in zip(rows, firsts, strict=True):
        row[column] = first
    return owner


def programs_of(blocks: Sequence[int], each: int, device: torch.device) -> tuple[list[int], Tensor]:
    """Return the first program of each row of a launch, and the row of each program (int32).

    `blocks` are those of each row, of which a program works on `each`.
    """
    counts = [-(-count // each) for count in blocks]
    *firsts, total = accumulate(counts, initial=0)
    numbers = torch.arange(len(counts), dtype=torch.int32, device=device)
    repeats = upload(array("q", counts), device)
    return firsts, torch.repeat_interleave(numbers, repeats, output_size=total)


def upload(values: array[int] | array[float], device: torch.device) -> Tensor:
    """Return `values` as a tensor on `device`; the host does not wait for the transfer."""
    dtype = torch.int64 if values.typecode == "q" else torch.float64
    host = torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
    if device.type != "cuda":
        return host.clone()
    # CUDA copies up to 64 KiB out of any memory before it returns. Pinned memory takes longer to get: until transfers
    # are over, each needs more of it, and that stops the host for as long as a hundred launches. In a captured graph
    # each replay would read memory that is gone; there pinning raises.
    now = host.nbytes <= 64 * 2**10 and not torch.cuda.is_current_stream_capturing()
    return (host if now else host.pin_memory()).to(device, non_blocking=True)
