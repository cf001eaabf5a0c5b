"""Data parallelism whose gradients live in FP8: they are sent in the format that they are stored in.

torch's DistributedDataParallel keeps gradients in buckets of the parameters' dtype. Here a post-accumulate hook
quantizes each gradient as soon as autograd has it, straight into its region of an FP8 bucket (`buckets.py`), and frees
it. When all gradients of a bucket are there, it is averaged on a stream of its own while backward goes on. `p.grad` is
a `BlockScaledTensor`, as at O1, ready for O2's step. Only its 1.03 bytes an element stay.

Buckets are averaged in the same order on all ranks: from the last parameters to the first. A bucket that is ready early
waits for its turn. The end of backward waits for all of them. A hook on the outputs of forward has autograd call us at
the end of the whole backward, so backwards inside it (reentrant activation checkpointing) do not count.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import _find_tensors

from fp8stack.errors import CommError, ConfigError, GradientError, warn
from fp8stack.levels import check_number
from fp8stack.tensor_kinds import check_dense, is_sharded, not_plain, renew_hooks

from .buckets import Region, make_buckets
from .transport import Transport, broadcast, failures_named, gather_objects, group_of, verify


class DataParallel(nn.Module):
    """Wraps a model as DistributedDataParallel does; arguments of the same name mean the same.

    Args:
        module: on one device, with dense parameters in float32, bfloat16 or float16; call `fp8stack.initialize` before.
        process_group: the replicas; by default all ranks.
        bucket_cap_mb: the most MiB of FP8 that are averaged together.
        broadcast_buffers: before each forward that is synchronized, give all ranks the buffers of the first rank.
        init_sync: compare names, shapes and dtypes of parameters over all ranks now, and give all of them the
            parameters and buffers of the first one.
        find_unused_parameters: allow parameters that take no part in a backward. One that no rank used keeps the
            gradient that it had. Costs a small all-reduce and a wait for it.

    Raises:
        ConfigError: if the model is not as described.
        CommError: if the model differs between ranks.
        GradientError: at the end of a backward that some parameter took no part in, without find_unused_parameters; and
            if a parameter gets a gradient after its bucket was sent.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        *,
        bucket_cap_mb: float = 32,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.bucket_cap_mb, self.broadcast_buffers = bucket_cap_mb, broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.process_group = group_of(process_group)
        if self.process_group is None:
            raise ConfigError(f"rank {dist.get_rank()} does not belong to the given process group.")
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.device = _check_model(module, trained, bucket_cap_mb)
        self.require_backward_grad_sync = True
        self.world = dist.get_world_size(self.process_group)
        if init_sync:
            _compare_models(trained, self.process_group)
        if init_sync and self._takes_the_first_ranks(module):
            warn(
                "the weights of this rank were not those of the first rank, which it has now. If the model was "
                "initialized at O2, its optimizer still holds the lower bits of the old ones, and ranks will drift "
                "apart: build the model from one seed, or give all ranks one rank's weights, before initialize."
            )
        self.buckets = make_buckets(trained, self.world, bucket_cap_mb * 2**20)
        self._regions = [region for bucket in self.buckets for region in bucket.regions]
        cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device, priority=-1) if cuda else None
        self._fired: set[Region] = set()
        self._sent = 0  # buckets sent in this backward
        self._forwards = 0  # forwards whose backward has not come yet
        # whether a backward that other ranks take part in has begun, and not ended
        self._unfinished = False
        # whether this backward is synchronized, and whether the last forward's will be
        self._sync = self._next_sync = True
        # a weak reference to an object that lives as long as a backward
        self._backward: Any = lambda: None
        handles = []
        for index, bucket in enumerate(self.buckets):
            for region in bucket.regions:
                take = partial(_call_weakly, weakref.WeakMethod(self._take), index, region)
                handles.append(region.parameter.register_post_accumulate_grad_hook(take))
        weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        grad = torch.is_grad_enabled()
        sync = grad and self.require_backward_grad_sync
        if grad:
            self._finish_failed()
            renew_hooks(region.parameter for region in self._regions)
        if sync and self.broadcast_buffers:
            broadcast(self.module.buffers(), self.process_group)
        output = self.module(*args, **kwargs)
        if grad:
            self._next_sync = sync
            self._forwards += 1
            for tensor in _find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: self._begin(sync))
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not average the gradients of forwards in this context; they are added to those of later forwards."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def __reduce__(self) -> Any:
        """Copy and pickle as a new wrapper over all ranks; nothing is exchanged for it."""
        names = ("bucket_cap_mb", "broadcast_buffers", "find_unused_parameters")
        options = {name: getattr(self, name) for name in names}
        return partial(DataParallel, init_sync=False, **options), (self.module,)

    # --- backward

    def _begin(self, sync: bool) -> None:
        """Prepare for a backward, once, and have autograd call `_end` when it is over."""
        if self._backward() is not None:
            return
        self._finish_failed()
        self._sync, self._unfinished, self._sent = sync, sync, 0
        self._fired.clear()
        for bucket in self.buckets:
            bucket.pending = len(bucket.regions)
        # Autograd drops the callback when the backward is over or has failed.
        callback = partial(_call_weakly, weakref.WeakMethod(self._end))
        self._backward = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _finish_failed(self) -> None:
        """If the last backward failed, send NaN for the buckets that it did not send.

        Other ranks wait for those; the NaN makes them skip their step.
        """
        if self._unfinished and self._backward() is None:
            self._unfinished = False
            for bucket in self.buckets[self._sent :]:
                self._fired.update(bucket.regions)
                for region in bucket.regions:
                    region.gradient.scale.fill_(torch.nan)
            self._finish(set())

    def _take(self, index: int, region: Region, p: Tensor) -> None:
        """Move a fresh gradient into its bucket, and send the buckets whose turn it is."""
        # If forward returned its outputs inside an unknown object, no hook has called `_begin`. If a backward did not
        # come through this wrapper's forward, other ranks take no part in it.
        self._begin(self._next_sync and self._forwards > 0)
        if self._sync and index < self._sent:
            raise GradientError(
                f"{region.name} got a gradient after its bucket was sent: it is used in more than one part of the "
                "backward, as by reentrant checkpointing. Use checkpoint(..., use_reentrant=False)."
            )
        if not region.holds(p.grad):
            assert p.grad is not None
            check_dense(p.grad, region.name)
            region.write(p.grad)
            p.grad = region.gradient
        if region not in self._fired:
            self._fired.add(region)
            self.buckets[index].pending -= 1
        if self._sync:
            while self._sent < len(self.buckets) and not self.buckets[self._sent].pending:
                self._send()

    def _send(self) -> None:
        """Average the next bucket, on a stream of its own."""
        bucket = self.buckets[self._sent]
        what = f"averaging of bucket {self._sent} of {bucket.codes.numel()} gradients"
        self._sent += 1
        verify(lambda: what, self.process_group)
        for region in bucket.regions:
            if region not in self._fired and not region.holds(region.parameter.grad):
                region.gradient.zero_()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):  # None changes nothing
            bucket.average(Transport(self.process_group, what, background=True))

    def _finish(self, kept: set[Region]) -> set[Region]:
        """Send the remaining buckets, and wait for all; return the parameters that no rank used."""
        while self._sent < len(self.buckets):
            self._send()
        unused: set[Region] = set()
        if self.find_unused_parameters:
            used = torch.tensor([r not in kept for r in self._regions], dtype=torch.uint8)
            used = used.to(self.device)
            with failures_named("finding out which parameters are unused", self.process_group):
                dist.all_reduce(used, dist.ReduceOp.MAX, self.process_group)
            unused = {r for r, u in zip(self._regions, used.tolist(), strict=True) if not u}
        self._unfinished = False
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return unused

    def _end(self) -> None:
        """Send the remaining buckets, wait for all, and set the gradients."""
        # an error that is kept may keep the callback alive, in its frames
        self._backward = lambda: None
        if not self._fired:
            self._unfinished = False
            return  # torch.autograd.grad with respect to inputs
        self._forwards = max(self._forwards - 1, 0)
        if not self._sync:
            return
        missing = [r for r in self._regions if r not in self._fired]
        kept = {r for r in missing if not r.holds(r.parameter.grad)}
        unused = self._finish(kept)
        for region in self._regions:
            if region not in unused:
                region.parameter.grad = region.gradient
        if missing and not self.find_unused_parameters:
            names = ", ".join(r.name for r in missing[:5])
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise GradientError(
                f"no gradient reached {names}{more} in this backward. If that is meant, set "
                "find_unused_parameters=True."
            )

    def _takes_the_first_ranks(self, module: nn.Module) -> bool:
        """Give all ranks the model of the first one; return whether a bfloat16 weight of this rank was different."""
        weights = [p for p in module.parameters() if p.dtype is torch.bfloat16 and not not_plain(p)]
        before = [p.detach().clone() for p in weights] if self.world > 1 else weights
        broadcast([*module.parameters(), *module.buffers()], self.process_group)
        return any(not torch.equal(b, p) for b, p in zip(before, weights, strict=True))


def _check_model(
    module: nn.Module, trained: list[tuple[str, nn.Parameter]], bucket_cap_mb: float
) -> torch.device:
    """Return the device of the model, or raise ConfigError."""
    if not trained:
        raise ConfigError(f"DataParallel got {type(module).__name__}, of which nothing is trained.")
    check_number("bucket_cap_mb", bucket_cap_mb, math.ulp(0.0), rule="above 0")
    devices = {str(p.device) for p in module.parameters()}
    if len(devices) > 1:
        raise ConfigError(
            f"DataParallel takes a model on one device; this one is on {', '.join(sorted(devices))}."
        )
    for name, p in trained:
        if kind := not_plain(p):
            raise ConfigError(
                f"{name} is {kind}; FP8 gradients are of float32, bfloat16 and float16 parameters."
            )
        if is_sharded(p):
            raise ConfigError(f"{name} is sharded already; DataParallel is for whole replicas.")
    return trained[0][1].device


def _compare_models(trained: list[tuple[str, nn.Parameter]], group: Any) -> None:
    """Raise CommError on every rank if names, shapes or dtypes of parameters differ over the ranks of `group`."""
    mine = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in trained]
    said = gather_objects("comparison of models", mine, group)
    for rank, theirs in zip(dist.get_process_group_ranks(group), said, strict=True):
        if theirs == said[0]:
            continue
        pairs = zip_longest(theirs, said[0], fillvalue="nothing")
        one, other = next((a, b) for a, b in pairs if a != b)
        raise CommError(
            f"rank {rank} trains {len(theirs)} parameters, the first rank {len(said[0])}; they differ at: {one} "
            f"instead of {other}. All ranks must build the same model."
        )


# Hooks hold the wrapper weakly: otherwise a parameter that outlives it would keep it alive.


@torch._disable_dynamo  # type: ignore[attr-defined]
def _call_weakly(method: weakref.WeakMethod[Callable[..., None]], *arguments: Any) -> None:
    if (bound := method()) is not None:
        bound(*arguments)
