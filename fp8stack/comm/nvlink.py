"""How bytes get from GPU to GPU of one host: one kernel that writes into the other ranks' memory.

`kernels/two_shot.py` does the work, over torch's symmetric memory: each rank maps a workspace of every other. All that
knows of symmetric memory is here, since torch keeps it private. Multicast is not used.

A group uses it if every rank can: 2 to 8 of them on one host, each with a GPU whose memory the others can reach, and
the mapping succeeds on all. They agree on that at the group's first collective, and if one cannot, all use the process
group's own collectives; whoever could not says why in a warning, once. `set_transport` decides otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import warnings
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack.errors import CommError, ConfigError, Fp8StackWarning, did_you_mean, first_line
from fp8stack.kernels.reference.wire import Layout

if TYPE_CHECKING:
    from .transport import Transport

_TRANSPORTS = ("auto", "nvlink", "collective")
BACKGROUND = (
    96  # programs beside other kernels: four to a multiprocessor where there is little room
)
_LINE = 512  # bytes that ranks exchange to agree
_REMEMBERED = 1024  # calls whose names an error can give
_GROUPS: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


@dataclass
class _Known:
    """What is known of a group."""

    transport: str = "auto"
    link: Link | str | None = None  # a reason why there is none; None if nobody asked yet


def set_transport(transport: str, group: Any = None) -> None:
    """Choose how the collectives of a group move bytes between GPUs; all of its ranks must choose alike.

    Args:
        transport: "auto", "nvlink" (one kernel that writes into the other GPUs' memory; the group's next collective
            raises if that cannot be), or "collective" (the process group's all-to-all and all-gather).
        group: a process group; by default torch's own.

    Raises:
        ConfigError: if there is no such transport.
    """
    if transport not in _TRANSPORTS:
        raise ConfigError(
            f"transport must be one of {', '.join(_TRANSPORTS)}; got {transport!r}."
            f"{did_you_mean(transport, _TRANSPORTS)}"
        )
    group = dist.group.WORLD if group is None else group
    _GROUPS.setdefault(group, _Known()).transport = transport


def link_of(group: Any, device: torch.device) -> Link | None:
    """Return the workspaces that the ranks of `group` share; None where its own collectives are to be used.

    Raises:
        CommError: if NVLink was asked for and cannot be used.
    """
    known = _GROUPS.get(group) or _GROUPS.setdefault(group, _Known())
    if known.transport == "collective" or (device.type != "cuda" and known.transport == "auto"):
        return None
    if known.link is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None  # the ranks cannot talk now
        known.link = _connect(group, device)
    if isinstance(known.link, Link) and known.link.device == device:
        return known.link
    if known.transport == "nvlink":
        reason = (
            known.link
            if isinstance(known.link, str)
            else f"its memory is on {known.link.device}, not {device}"
        )
        raise CommError(f'set_transport("nvlink") cannot be followed: {reason}.')
    return None


class Link:
    """Workspaces of all ranks of a group, as this rank sees them.

    Args:
        group: the process group.
        memory: this rank's workspace.
        addresses: of every rank's.
    """

    def __init__(self, group: Any, memory: Tensor, addresses: list[int], keep: Any) -> None:
        from fp8stack.kernels import two_shot, workspace

        self._kernels, self._keep = two_shot, (memory, keep)
        self.ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
        self.world, self.device = len(self.ranks), memory.device
        self._timeout = group._get_backend(memory.device).options._timeout.total_seconds()
        peers = torch.tensor(addresses, dtype=torch.int64, device=memory.device)
        steps = torch.zeros(workspace.PROGRAMS, dtype=torch.int32, device=memory.device)
        missing = torch.zeros(self.world, dtype=torch.int32, pin_memory=True)
        self._space = workspace.Workspace(peers, steps, missing, rank)
        self._background = self._space._replace(programs=BACKGROUND)
        # looked at before each call, without what indexing a tensor takes
        self._missing = (ctypes.c_int32 * self.world).from_address(missing.data_ptr())
        self._calls: OrderedDict[int, Any] = OrderedDict()
        self._stream: torch.cuda.Stream | None = None  # of the last call
        self._handle = -1  # of that
        self._call = 0

    def all_reduce(
        self,
        x: Tensor,  # values, or uint8 codes of E4M3; contiguous, layout.rows × layout.cols elements
        x_scales: Tensor | None,  # float32 [blocks], of codes
        out: Tensor,  # as `x`, which it may be
        out_scales: Tensor | None,
        layout: Layout,
        way: Transport,
        divisor: int,
        error: Tensor | None,  # see kernels/reference/wire.py
    ) -> None:
        """Add up `x` over all ranks, and divide by `divisor`; raise CommError if an earlier call failed."""
        call, space = self._begin(way)
        self._kernels.all_reduce(
            x, x_scales, out, out_scales, layout, space, call, self._timeout, divisor, error
        )

    def reduce_scatter(
        self, x: Tensor, out: Tensor, layout: Layout, way: Transport, divisor: int
    ) -> None:
        """Add up the own row of `x` over all ranks, and divide; raise CommError if an earlier call failed."""
        call, space = self._begin(way)
        self._kernels.reduce_scatter(x, out, layout, space, call, self._timeout, divisor)

    def _begin(self, way: Transport) -> tuple[int, Any]:
        """Number a call, unless an earlier one failed; return the workspace for it too."""
        if any(self._missing):
            raise CommError(self._explain())
        if (handle := torch._C._cuda_getCurrentRawStream(self.device.index)) != self._handle:
            self._change_stream(handle)
        self._call += 1
        self._calls[self._call] = way.what
        if len(self._calls) > _REMEMBERED:
            self._calls.popitem(last=False)
        return self._call, self._background if way.background else self._space

    def _change_stream(self, handle: int) -> None:
        """Run behind the last launch, which was on another stream: all of them share memory."""
        before, self._stream = self._stream, torch.cuda.current_stream(self.device)
        self._handle = handle
        if before is None:
            return
        with torch.cuda.stream(before):
            captured = torch.cuda.is_current_stream_capturing()
        # A stream outside a capture cannot be waited for inside it, nor the other way round.
        if captured == torch.cuda.is_current_stream_capturing():
            self._stream.wait_stream(before)

    def _explain(self) -> str:
        late = [self.ranks[i] for i, call in enumerate(self._missing) if call]
        what = self._calls.get(max(self._missing), "a collective")
        over, names = (", ".join(map(str, ranks)) for ranks in (self.ranks, late))
        return (
            f"{what} over ranks {over} failed on rank {dist.get_rank()}: rank{'s' * (len(late) > 1)} {names} did not "
            f"take part within {self._timeout:g} s. Its results are NaN. See what ended or delayed the missing ranks; "
            "all have to be started again."
        )


def _connect(group: Any, device: torch.device) -> Link | str:
    """Make a link, or return why there is none; all ranks of `group` together."""
    mine = _obstacle(group, device)
    said = _exchange(f"{_host()}|{mine}", group, device)
    hosts, obstacles = zip(*(line.split("|", 1) for line in said), strict=True)
    if len(set(hosts)) > 1:
        return "its ranks are on several hosts"
    made: Any = None
    if not any(obstacles):
        try:
            made = _map(group, device)
        except (RuntimeError, ImportError, AttributeError, ValueError) as error:
            mine = f"symmetric memory failed: {first_line(error)}"
        obstacles = tuple(_exchange(mine, group, device))  # and all have zeroed their memory
    if not any(obstacles):
        memory, handle = made
        return Link(group, memory, list(handle.buffer_ptrs), handle)
    if mine and device.type == "cuda":
        warnings.warn(
            f"fp8stack.comm uses the process group's own collectives, not NVLink: {mine}.",
            Fp8StackWarning,
            stacklevel=2,
        )
    who = next(i for i, obstacle in enumerate(obstacles) if obstacle)
    return f"rank {dist.get_process_group_ranks(group)[who]} says: {obstacles[who]}"


def _obstacle(group: Any, device: torch.device) -> str:
    """Return why this rank cannot, as far as it can tell alone; an empty string if it can."""
    from fp8stack.kernels.workspace import MOST_RANKS

    world = dist.get_world_size(group)
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if world > MOST_RANKS:
        return f"{world} ranks are more than {MOST_RANKS}"
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    if torch.cuda.device_count() >= world and not all(
        torch.cuda.can_device_access_peer(device, i) for i in others
    ):
        return f"{device} cannot reach the memory of other GPUs"
    return ""


def _map(group: Any, device: torch.device) -> tuple[Tensor, Any]:
    """Return a workspace of zeros, and torch's handle of all ranks'."""
    import torch.distributed._symmetric_memory as symmetric

    from fp8stack.kernels import workspace

    with warnings.catch_warnings(), contextlib.suppress(AttributeError):
        warnings.simplefilter("ignore")
        symmetric.enable_symm_mem_for_group(group.group_name)  # needed before torch 2.11
    nbytes = workspace.bytes_of(dist.get_world_size(group))
    memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, group.group_name)
    memory.zero_()
    return memory, handle


def _exchange(line: str, group: Any, device: torch.device) -> list[str]:
    """Return what every rank says; all must say something."""
    gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # see transport
    mine = torch.tensor(list(line.encode()[:_LINE].ljust(_LINE)), dtype=torch.uint8, device=device)
    whole = mine.new_empty((dist.get_world_size(group), _LINE))
    gather(whole.view(-1), mine, group=group)
    return [bytes(row).decode(errors="replace").rstrip() for row in whole.tolist()]


def _host() -> str:
    """Return what tells hosts apart."""
    try:  # the same in all containers of a host
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
