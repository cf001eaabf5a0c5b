"""How ranks add up and gather tensors in FP8: pack, move the bytes, add up, unpack.

A sum takes one of three ways, which give every rank the same bits:

    over NVLink    one kernel does everything (`nvlink.py`)
    by hosts       within each host, then across hosts, if the group was given a hierarchy (`set_hierarchy`)
    otherwise      all-to-all of stripes; each rank adds up its own in float32, in the order of ranks, and quantizes the
                   sum; all-gather of the sums. Kernels run before, between and after.

By hosts, a rank sends 2 (M - 1) / M of its n / L elements over the network (M hosts of L GPUs each), instead of nearly
2 n; a value is quantized three times instead of twice.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack.errors import ConfigError
from fp8stack.formats import BLOCK, rows_cols
from fp8stack.kernels import ops
from fp8stack.kernels.reference.wire import Layout
from fp8stack.tensor import BlockScaledTensor

from .nvlink import link_of, values_and_scales
from .transport import Transport

# For each group with a hierarchy: the group within this rank's host, and the one across hosts.
_HIERARCHIES: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()


def set_hierarchy(gpus_per_host: int, group: Any = None) -> None:
    """Say how many consecutive ranks of a group are on one host; all ranks must call it.

    The group's all_reduce, the DDP hook and DataParallel's buckets then add up within each host first.

    Args:
        gpus_per_host: a divisor of the group's size; that size itself, or 1, ends the hierarchy.
        group: a process group of all ranks; by default torch's own.

    Raises:
        ConfigError: if the group does not have all ranks, or their number is no multiple of `gpus_per_host`.
    """
    group = dist.group.WORLD if group is None else group
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) != dist.get_world_size():  # all ranks have to make new groups together
        raise ConfigError(
            f"a hierarchy is of all {dist.get_world_size()} ranks; this group has {len(ranks)}."
        )
    if gpus_per_host < 1 or len(ranks) % gpus_per_host:
        raise ConfigError(
            f"gpus_per_host must divide the group's {len(ranks)} ranks, got {gpus_per_host}."
        )
    _HIERARCHIES.pop(group, None)
    if gpus_per_host in (1, len(ranks)):
        return
    backend, size = dist.get_backend(group), gpus_per_host
    hosts = [ranks[i : i + size] for i in range(0, len(ranks), size)]
    places = [ranks[place::size] for place in range(size)]
    inside, _ = dist.new_subgroups_by_enumeration(hosts, backend=backend)
    across, _ = dist.new_subgroups_by_enumeration(places, backend=backend)
    _HIERARCHIES[group] = inside, across


# --- sums


def all_reduce(
    output: Tensor,
    input: Tensor,  # may be `output`
    divisor: int,
    way: Transport,
) -> int:
    """Add up `input` over all ranks, and divide; return the bytes that this rank sends, as do the functions below."""
    layout, hosts = flat(input, way.world), _HIERARCHIES.get(way.group, ())
    if not hosts and (link := link_of(way.group, input.device)):
        link.add_up(input, output, layout, way, divisor)
        nbytes = 2 * (way.world - 1) * layout.per * (BLOCK + 4)
    else:
        chunks = pack(input, layout)
        ways = [Transport(group, way.what, way.background) for group in hosts] or [way]
        nbytes = _add_up(chunks, layout, ways, divisor)
        unpack(chunks, output, layout)
    if isinstance(output, BlockScaledTensor):
        output.residual = None
    return nbytes


def _add_up(chunks: Tensor, layout: Layout, ways: list[Transport], divisor: float) -> int:
    """Replace chunks by their sums over one group, or over the hosts' groups in turn; return the bytes sent.

    Each rank of the first group adds up an equal part of the chunks. With hosts, that part is a chunk for each host,
    and the rank adds it up with the ranks of the same place on the other hosts in the same way. On the way back, all
    ranks get the bytes that the last owner of each chunk quantized.
    """
    way, *others = ways
    received = torch.empty_like(chunks)
    way.all_to_all(received, chunks)
    received = received.view(way.world, -1, layout.pitch)
    nbytes = 2 * (way.world - 1) * chunks.nbytes // way.world
    # Within hosts a mean is divided by a power of two, exactly, since the sum may be beyond float32.
    here = 2.0 ** (way.world - 1).bit_length() if others and divisor != 1 else divisor
    part = ops.wire_kernels(chunks.is_cuda).reduce_pack(received, layout, here)
    if others:
        nbytes += _add_up(part, layout, others, divisor / here)
    way.all_gather(chunks, part)
    return nbytes


def reduce_scatter(output: Tensor, input: Tensor, divisor: int, way: Transport) -> int:
    """Add up this rank's part of `input` over all ranks, and divide; the sum is not quantized again."""
    layout = Layout(way.world, input.numel() // way.world, way.world)
    if link := link_of(way.group, input.device):
        link.add_up(input, output, layout, way, divisor, scatter=True)
        return (way.world - 1) * layout.per * (BLOCK + 4)
    sent = pack(input, layout)
    received = torch.empty_like(sent)
    way.all_to_all(received, sent)
    ops.wire_kernels(sent.is_cuda).reduce_unpack(received, output, divisor)
    return (way.world - 1) * layout.pitch


def gather(output: Tensor, input: Tensor, _: int, way: Transport) -> int:
    """Join the tensors of all ranks."""
    chunk = pack(input, Layout(1, input.numel(), 1))
    chunks = chunk.new_empty((way.world, chunk.shape[1]))
    way.all_gather(chunks, chunk)
    layout = Layout(way.world, input.numel(), way.world)
    unpack(chunks, output, layout)
    return (way.world - 1) * layout.pitch


# --- chunks of bytes


def flat(x: Tensor, world: int) -> Layout:
    """Return the layout of a tensor: in the rows of its blocks if it is FP8, else in one row."""
    rows, cols = rows_cols(x.shape) if isinstance(x, BlockScaledTensor) else (1, x.numel())
    return Layout(rows, cols, world)


def pack(x: Tensor, layout: Layout, out: Tensor | None = None) -> Tensor:
    """Return the chunks of a tensor. An FP8 tensor is sent as it is, neither decoded nor rounded."""
    values, scale = (t if t is None else t.contiguous() for t in values_and_scales(x))
    return ops.wire_kernels(x.is_cuda).pack(values, layout, out, scale)  # type: ignore[no-any-return]


def unpack(chunks: Tensor, out: Tensor, layout: Layout) -> None:
    """Write the tensor in the chunks to `out`."""
    values, scale = values_and_scales(out)
    ops.wire_kernels(out.is_cuda).unpack(chunks, values, layout, scale)
