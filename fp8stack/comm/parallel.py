"""Data parallelism whose gradients live in FP8: the wire format is the storage.

torch's DistributedDataParallel keeps gradients in buckets of the parameters' dtype. Here each gradient is quantized as
soon as autograd has it (a post-accumulate hook), straight into its place in an FP8 bucket (`buckets.py`), and freed;
when all of a bucket are there it is averaged on a stream of its own while backward goes on. `p.grad` is what O1 makes
of gradients, a `BlockScaledTensor`, ready for O2's step: 1.03 bytes an element are all that stays.

Buckets are averaged in one order on all ranks, that of the parameters, last first; one that is ready early waits. The
end of backward waits for all of them. What autograd calls the end is found by a hook on the outputs of forward, so that
backwards inside backward (reentrant activation checkpointing) do not count.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.utils._pytree import tree_leaves

from fp8stack.errors import Fp8StackWarning, GradientError

from .buckets import Region, make_buckets
from .checks import check_model, feeds_back, member_group, verify, verify_models
from .gradients import refuse_sparse
from .transport import Transport, blamed
from .uneven import Shadow


class DataParallel(nn.Module, Joinable):
    """Wraps a model as DistributedDataParallel does; arguments of the same name mean the same.

    Args:
        module: on one device, dense parameters in float32, bfloat16 or float16; `fp8stack.initialize` it before.
        process_group: the replicas; by default all ranks.
        bucket_cap_mb: the most MiB of FP8 that are averaged together.
        broadcast_buffers: before each forward that is to be synchronized, give all ranks the buffers of the first.
        init_sync: give all ranks the parameters and buffers of the first now.
        find_unused_parameters: parameters may take no part in a backward. One that no rank used keeps the gradient that
            it had. Costs a small all-reduce and a wait for it.
        static_graph: the same parameters are unused in every backward, found out in the first.
        error_feedback: "shard" adds to each mean what quantizing the last one cut off, for 4 bytes a parameter divided
            by the number of ranks. With a loss scale, let it be a constant one.
        check: compare names, shapes and dtypes of parameters over all ranks.

    Raises:
        ConfigError: if the model is not as described, or differs between ranks.
        GradientError: at the end of a backward that some parameter took no part in, without find_unused_parameters; and
            where a parameter gets a gradient after its bucket was sent.
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
        static_graph: bool = False,
        error_feedback: str = "none",
        check: bool = True,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        self.module = module
        self._options = {
            "bucket_cap_mb": bucket_cap_mb, "broadcast_buffers": broadcast_buffers, "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters, "error_feedback": error_feedback,
        }  # fmt: skip
        self.process_group = member_group(process_group)
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.device = check_model(module, trained, bucket_cap_mb)
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.require_backward_grad_sync = True
        self.world = dist.get_world_size(self.process_group)
        if check:
            verify_models(trained, self.process_group)
        if init_sync and self._broadcast([*module.parameters(), *module.buffers()], 0, True):
            warnings.warn(
                "the weights of this rank were not those of the first rank, which it has now. If the model was "
                "initialized at O2, its optimizer still holds the lower bits of the old ones, and ranks will drift "
                "apart: build the model from one seed, or give all ranks one rank's weights, before initialize.",
                Fp8StackWarning,
                stacklevel=2,
            )
        feedback = feeds_back(error_feedback)
        self.buckets = make_buckets(trained, self.world, bucket_cap_mb * 2**20, feedback)
        self._regions = [region for bucket in self.buckets for region in bucket.regions]
        cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device, priority=-1) if cuda else None
        self._fired: set[Region] = set()
        self._sent = 0  # buckets
        self._forwards = 0  # that no backward was seen of
        # whether a backward that other ranks take part in has begun, and not ended
        self._unfinished = False
        # whether this backward is synchronized, and that of the last forward
        self._sync = self._next_sync = True
        self._backward: Any = lambda: None  # a weak reference to what lives as long as a backward
        self._unused: set[Region] | None = None  # of a static graph, once known
        self._divide_by_initial = True  # of join()
        self._active: Tensor | None = None  # how many ranks have inputs, where join() divides by it
        handles = []
        own = weakref.ref(self)
        for index, bucket in enumerate(self.buckets):
            for region in bucket.regions:
                p = region.parameter
                take = partial(_take_weakly, own, index, region)
                handles.append(p.register_post_accumulate_grad_hook(take))
        weakref.finalize(self, _remove, handles)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        grad = torch.is_grad_enabled()
        sync = grad and self.require_backward_grad_sync
        if grad:
            self._finish_failed()
        source = self._enter_joined(sync) if self._join_config.enable else 0
        if sync and self.broadcast_buffers:
            self._broadcast(list(self.module.buffers()), source)
        output = self.module(*args, **kwargs)
        if grad:
            self._next_sync = sync
            self._forwards += 1
            for tensor in _tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: self._begin(sync))
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not average gradients of forwards in this context; they are added to those that come later."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def __reduce__(self) -> Any:
        """Copies and pickles are wrappers anew, over all ranks; nothing is exchanged for them."""
        return _rebuilt, (self.module, self._options)

    @property
    def gradient_bytes(self) -> int:
        """Bytes that gradients take up, whether there are any or not; residuals of micro-batches too."""
        own = [part for r in self._regions for part in r.gradient.parts()[0 if r.padded else 2 :]]
        return sum(t.nbytes for t in own) + sum(bucket.nbytes for bucket in self.buckets)

    # --- backward

    def _begin(self, sync: bool) -> None:
        """Prepare for a backward, once, and ask to be told of its end."""
        if self._backward() is not None:
            return
        self._finish_failed()
        self._sync, self._unfinished, self._sent = sync, sync, 0
        self._fired.clear()
        unused = self._unused or ()
        for bucket in self.buckets:
            bucket.pending = sum(region not in unused for region in bucket.regions)
        # autograd forgets the callback, and with it the mark, when the backward is over, or has failed
        mark = _Mark()
        self._backward = weakref.ref(mark)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(partial(_end_weakly, weakref.ref(self), mark))

    def _finish_failed(self) -> None:
        """Where a backward failed, send NaN for what it did not: other ranks wait for that, and skip their step."""
        if self._unfinished and self._backward() is None:
            self._unfinished = False
            while self._sent < len(self.buckets):
                regions = self.buckets[self._sent].regions
                self._fired.update(regions)
                for region in regions:
                    region.gradient.scale.fill_(torch.nan)
                self._send()
            self._find_unused(set())
            self._wait()

    def _take(self, index: int, region: Region, p: Tensor) -> None:
        """Move a fresh gradient into its bucket, and send the buckets whose turn it is."""
        # where forward's outputs were not found; a backward without a forward of this wrapper is no affair of others
        self._begin(self._next_sync and self._forwards > 0)
        if self._sync and region in (self._unused or ()):
            raise GradientError(
                f"{region.name} got a gradient, and was unused when static_graph=True found out what is. Leave that "
                "out, or set find_unused_parameters=True instead."
            )
        if self._sync and index < self._sent:
            raise GradientError(
                f"{region.name} got a gradient after its bucket was sent: it is used in more than one part of the "
                "backward, as by reentrant checkpointing. Use checkpoint(..., use_reentrant=False)."
            )
        if p.grad is not region.gradient:
            assert p.grad is not None
            refuse_sparse(p.grad, region.name)
            region.write(p.grad)
            p.grad = region.gradient
        if region not in self._fired:
            self._fired.add(region)
            self.buckets[index].pending -= 1
        if self._sync:
            while self._sent < len(self.buckets) and not self.buckets[self._sent].pending:
                self._send()

    def _send(self) -> None:
        """Average the next bucket, on the stream for it."""
        bucket = self.buckets[self._sent]
        what = f"averaging of bucket {self._sent} of {bucket.codes.numel()} gradients"
        self._sent += 1
        verify(lambda: what, self.process_group)
        way = Transport(self.process_group, what, background=True)
        for region in bucket.regions:
            if region not in self._fired and region.parameter.grad is not region.gradient:
                region.gradient.zero_()
        if self._stream is None:
            bucket.average(way)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            bucket.average(way)

    def _wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _end(self) -> None:
        """Send what is left, wait for all, and hand the gradients out."""
        if not self._fired:
            self._unfinished = False
            return  # torch.autograd.grad, of other things than parameters
        self._forwards = max(self._forwards - 1, 0)
        if not self._sync:
            return
        missing = [r for r in self._regions if r not in self._fired]
        kept = {r for r in missing if r.parameter.grad is not r.gradient}
        while self._sent < len(self.buckets):
            self._send()
        unused = self._find_unused(kept)
        self._unfinished = False
        self._wait()
        if self._active is not None:
            factor = self.world / self._active
            for scales in self._scales():
                scales.mul_(factor)
            self._active = None
        for region in self._regions:
            if region not in unused:
                region.parameter.grad = region.gradient
        if missing and not (self.find_unused_parameters or self.static_graph):
            names = ", ".join(r.name for r in missing[:5])
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise GradientError(
                f"no gradient reached {names}{more} in this backward. If that is meant, set "
                "find_unused_parameters=True (or static_graph=True if they are always the same)."
            )

    def _scales(self) -> Iterator[Tensor]:
        yield from (bucket.scales for bucket in self.buckets)
        yield from (region.gradient.scale for region in self._regions if region.padded)

    def _find_unused(self, kept: set[Region]) -> set[Region]:
        """Return the parameters that no rank used."""
        if self.static_graph and self._unused is not None:
            return self._unused
        if not (self.find_unused_parameters or self.static_graph):
            return set()
        used = torch.tensor([r not in kept for r in self._regions], dtype=torch.uint8)
        used = used.to(self.device)
        with blamed("finding out which parameters are unused", self.process_group):
            dist.all_reduce(used, dist.ReduceOp.MAX, self.process_group)
        unused = {r for r, u in zip(self._regions, used.tolist(), strict=True) if not u}
        if self.static_graph:
            self._unused = unused
        return unused

    # --- ranks that are alike

    def _broadcast(self, tensors: list[Tensor], source: int, compare: bool = False) -> bool:
        """Give all ranks the tensors of one, `source` in the group; one transfer a dtype.

        Returns whether bfloat16 ones were others on this rank, if `compare`.
        """
        changed = False
        if self.world == 1:
            return changed
        ranks = dist.get_process_group_ranks(self.process_group)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for dtype, same in by_dtype.items():
            flat = torch.cat([t.detach().reshape(-1) for t in same])
            before = flat.clone() if compare and dtype is torch.bfloat16 else None
            with blamed(f"broadcast of {len(same)} parameters or buffers", self.process_group):
                dist.broadcast(flat, ranks[source], self.process_group)
            for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                # as DDP does: autograd may need what it saved, which has not changed in value
                tensor.data.copy_(part.view(tensor.shape))
            if before is not None:
                changed = not torch.equal(before, flat)
        return changed

    # --- join(): ranks that run out of inputs

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Let ranks have different numbers of inputs: who has no more takes part with gradients of zero.

        Args:
            divide_by_initial_world_size: divide gradients by all ranks, not by those that still have inputs.
            enable: False: nothing is done, and nothing exchanged for it.
            throw_on_early_termination: raise RuntimeError on all ranks as soon as one has no more inputs.
        """
        with Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        ):
            yield

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return Shadow(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    def _enter_joined(self, sync: bool) -> int:
        """Tell the ranks without inputs of a forward; return the rank in the group whose buffers are good."""
        work = Join.notify_join_context(self)
        _, source = self._agree(sync, dist.get_rank(self.process_group))
        if work is not None and not self._divide_by_initial:
            work.wait()
            self._active = work.get_future().value()[0].float()
        return source

    def _agree(self, sync: bool, rank: int) -> tuple[bool, int]:
        """Return whether any rank is about to synchronize, and the last rank that has inputs; -1 is given by others."""
        both = torch.tensor([sync, rank], dtype=torch.int32, device=self.device)
        dist.all_reduce(both, dist.ReduceOp.MAX, self.process_group)
        any_sync, last = both.tolist()
        return bool(any_sync), last


class _Mark:
    """Lives as long as a backward."""


@torch._disable_dynamo  # type: ignore[attr-defined]
def _take_weakly(own: Any, index: int, region: Region, p: Tensor) -> None:
    if (parallel := own()) is not None:
        parallel._take(index, region, p)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _end_weakly(own: Any, mark: _Mark) -> None:
    if (parallel := own()) is not None:
        parallel._backward = lambda: None  # whoever keeps an error keeps the mark
        parallel._end()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _rebuilt(module: nn.Module, options: dict[str, Any]) -> DataParallel:
    return DataParallel(module, init_sync=False, check=False, **options)


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output, of dataclasses too."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, f.name) for f in fields(leaf)])
