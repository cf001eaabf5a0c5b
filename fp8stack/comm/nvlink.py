"""Sums over the GPUs of one host: one kernel that writes over NVLink into the other ranks' memory.

`kernels/two_shot.py` is the kernel. It works in torch's symmetric memory: each rank maps a workspace of every other.
torch keeps its symmetric memory private, so all code that depends on it is in this file. Multicast is not used.

A group uses the kernel if every rank can: 2 to 8 ranks on one host, each with a GPU that can reach the memory of the
others, where the mapping succeeds on all. The ranks agree on that at the group's first sum. If one of them cannot, all
use the process group's own collectives, and that rank warns with the reason, once. `set_transport` decides otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack.errors import CommError, first_line, warn
from fp8stack.kernels import ops
from fp8stack.kernels.reference.wire import Layout
from fp8stack.levels import check_choice
from fp8stack.tensor import BlockScaledTensor

from .transport import Transport, gather_objects, group_of

BACKGROUND = 96  # programs of a launch in the background, which leaves room for other kernels
_REMEMBERED = 1024  # the last calls, whose names an error can give
_GROUPS: weakref.WeakKeyDictionary[Any, _Choice] = weakref.WeakKeyDictionary()


@dataclass
class _Choice:
    """How the sums of a group move bytes."""

    transport: str = "auto"  # see set_transport
    link: Link | str | None = None  # or the reason why there is none; None before the first sum


def set_transport(transport: str, group: Any = None) -> None:
    """Choose how sums over a group move bytes between GPUs; all of its ranks must make the same choice.

    Args:
        transport: "auto", "nvlink" (one kernel that writes into the other GPUs' memory; the group's next all_reduce or
            reduce_scatter raises if NVLink cannot be used), or "collective" (the process group's own collectives).
        group: a process group; by default torch's own.

    Raises:
        ConfigError: if there is no such transport.
    """
    check_choice("transport", transport, ("auto", "nvlink", "collective"))
    group = group_of(group)
    if group is not None:
        choice_of(group).transport = transport


def link_of(group: Any, device: torch.device) -> Link | None:
    """Return the workspaces that the ranks of `group` share, or None if they use the group's own collectives.

    Raises:
        CommError: if NVLink was asked for and cannot be used, or the group uses it on another device.
    """
    choice, obstacle = choice_of(group), ""
    if choice.transport == "collective":
        return None
    if device.type != "cuda":
        obstacle = f"the tensors are on {device.type}"
    elif choice.link is None and torch.cuda.is_current_stream_capturing():
        obstacle = "the ranks have to agree on it first, and cannot while a CUDA graph is captured"
    elif choice.link is None:
        choice.link, mine = _connect(group, device)
        if mine:
            warn(f"fp8stack.comm uses the process group's own collectives, not NVLink: {mine}.")
    link = obstacle or choice.link
    if not isinstance(link, Link):
        if choice.transport == "nvlink":
            raise CommError(
                f'set_transport("nvlink") cannot be followed: {link}. Use "auto" or "collective".'
            )
        return None
    if link.device != device:
        raise CommError(
            f"a tensor is on {device}, and the workspace of its group on {link.device}. Use one device a rank, or "
            'set_transport("collective", group) on all ranks.'
        )
    return link


def choice_of(group: Any) -> _Choice:
    """Return what `set_transport` chose for a group, and what its ranks have agreed on."""
    return _GROUPS.get(group) or _GROUPS.setdefault(group, _Choice())


class Link:
    """Workspaces of all ranks of a group, as this rank sees them.

    Args:
        group: the process group.
        memory: this rank's workspace.
        addresses: of the workspaces of all ranks.
        keep: an object that keeps them mapped.
    """

    def __init__(self, group: Any, memory: Tensor, addresses: list[int], keep: Any) -> None:
        self._kernels, workspace = ops.triton_module("two_shot"), ops.triton_module("workspace")
        self._keep = memory, keep
        self.ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        self.world, self.device = len(self.ranks), memory.device
        self._timeout = group._get_backend(memory.device).options._timeout.total_seconds()
        peers = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        steps = torch.zeros((2, workspace.PROGRAMS), dtype=torch.int32, device=memory.device)
        missing = torch.zeros(self.world, dtype=torch.int32, pin_memory=True)
        self._space = workspace.Workspace(peers, steps, missing, rank)
        self._background = self._space._replace(programs=BACKGROUND)
        # Each call looks at these numbers first; reading the tensor itself would take longer.
        self._missing = (ctypes.c_int32 * self.world).from_address(missing.data_ptr())
        self._names: deque[Any] = deque(maxlen=_REMEMBERED)  # of the last calls
        self._call = 0

    def add_up(
        self,
        x: Tensor,
        out: Tensor,
        layout: Layout,
        way: Transport,
        divisor: int,
        scatter: bool = False,
    ) -> None:
        """Add up a tensor, or FP8 blocks, over all ranks, and divide; with `scatter`, this rank's row of `x`.

        Both are contiguous; `out` may be `x`, without `scatter`.

        Raises:
            CommError: if an earlier call failed.
        """
        if any(self._missing):
            raise CommError(self._explain())
        tensors = [part for tensor in (x, out) for part in values_and_scales(tensor)]
        _follow(self.device)
        self._call += 1
        self._names.append(way.what)
        space = self._background if way.background else self._space
        self._kernels.add_up(*tensors, layout, space, self._call, self._timeout, divisor, scatter)

    def _explain(self) -> str:
        # Who was missing from the first failed call: then its other ranks gave up, and are missing from later ones.
        first = min(filter(None, self._missing))
        late = [self.ranks[i] for i, call in enumerate(self._missing) if call == first]
        ago = self._call - first
        what = self._names[-1 - ago] if ago < len(self._names) else "a collective"
        over, names = (", ".join(map(str, ranks)) for ranks in (self.ranks, late))
        return (
            f"{what} over ranks {over} failed on rank {dist.get_rank()}: it saw nothing of rank{'s' * (len(late) > 1)} "
            f"{names} within {self._timeout:g} s. Its results are NaN. A rank that is not seen has ended, is late, or "
            "has given up waiting for another: its own log says which. All have to be started again."
        )


def values_and_scales(x: Tensor) -> tuple[Tensor, Tensor | None]:
    if isinstance(x, BlockScaledTensor):
        return x.codes.view(torch.uint8), x.scale
    return x, None


# The stream of the last call on each GPU, behind its handle.
_last: dict[torch.device, tuple[int, torch.cuda.Stream]] = {}


def _follow(device: torch.device) -> None:
    """Make the current stream wait for the last launch on this GPU if that was on another stream.

    Launches share the workspace, and each fills the GPU, so two at once would wait for each other's ranks for ever.
    """
    handle = torch._C._cuda_getCurrentRawStream(device.index)
    known = _last.get(device)
    if known is not None and known[0] == handle:
        return
    stream = torch.cuda.current_stream(device)
    _last[device] = handle, stream
    if known is None:
        return
    captured = []
    for each in (known[1], stream):
        with torch.cuda.stream(each):
            captured.append(torch.cuda.is_current_stream_capturing())
    # A stream outside a capture cannot be waited for inside it, nor the other way round.
    if captured[0] == captured[1]:
        stream.wait_stream(known[1])


def _connect(group: Any, device: torch.device) -> tuple[Link | str, str]:
    """Return a link or the reason why there is none, and this rank's own obstacle or "". All ranks call it together.

    It takes three steps. After each, the ranks tell each other whether it went well, so that none goes on alone.
    """
    made: Any = None
    mine, ranks, host = "", dist.get_process_group_ranks(group), _host()
    for step in (_look, _allocate, _map):
        try:
            made = step(group, device, made)
        except Exception as error:  # of any kind: the other ranks wait to hear of it
            mine = first_line(error) or type(error).__name__
        with torch.cuda.device(-1 if device.index is None else device):  # NCCL sends from it
            said = gather_objects("agreement on a transport", (host, _mapped, mine), group)
        hosts, mapped, obstacles = (set(each) for each in zip(*said, strict=True))
        if len(hosts) > 1:
            return "its ranks are on several hosts", ""
        if obstacles != {""}:
            rank, (_, _, told) = next(each for each in zip(ranks, said, strict=True) if each[1][2])
            return f"rank {rank} says: {told}", mine
        if len(mapped) > 1:
            reason = "its ranks have each mapped the memory of a different number of groups before"
            return reason, reason
    return made, ""


_mapped = 0  # groups whose memory this process mapped; torch's rendezvous hangs unless all ranks have the same count


def _look(group: Any, device: torch.device, _: Any) -> None:
    """Raise CommError if this rank can tell by itself that it cannot take part."""
    most = ops.triton_module("workspace").MOST_RANKS
    world, devices = dist.get_world_size(group), torch.cuda.device_count()
    if world > most:
        raise CommError(f"{world} ranks are more than {most}")
    others = [i for i in range(devices) if i != device.index]
    reached = [torch.cuda.can_device_access_peer(device, i) for i in others]
    if devices >= world and sum(reached) < world - 1:
        raise CommError(f"{device} reaches the memory of {sum(reached)} of the other GPUs")


def _allocate(group: Any, device: torch.device, _: Any) -> Tensor:
    """Return a workspace."""
    import torch.distributed._symmetric_memory as symmetric

    with warnings.catch_warnings(), contextlib.suppress(AttributeError):
        warnings.simplefilter("ignore")
        # older torch needs this call, newer torch deprecates it
        symmetric.enable_symm_mem_for_group(group.group_name)
    nbytes = ops.triton_module("workspace").bytes_of(dist.get_world_size(group))
    return symmetric.empty(nbytes, dtype=torch.uint8, device=device).zero_()


def _map(group: Any, device: torch.device, memory: Tensor) -> Link:
    """Return a link, given this rank's workspace of zeros."""
    global _mapped
    import torch.distributed._symmetric_memory as symmetric

    _mapped += 1
    handle = symmetric.rendezvous(memory, group.group_name)
    addresses = list(handle.buffer_ptrs)
    if addresses[dist.get_rank(group)] != memory.data_ptr():
        raise CommError("symmetric memory is not where torch says it is")
    return Link(group, memory, addresses, handle)


def _host() -> str:
    """Return a name that differs between hosts."""
    try:  # the same in all containers of a host
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
