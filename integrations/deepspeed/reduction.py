"""O1 under DeepSpeed: gradients are reduced by `fp8stack.comm`, in FP8 with float32 sums, in every stage of ZeRO.

DeepSpeed reduces in one or two methods of each stage. We replace them on the engine that asked for it; the library
itself is not patched. The methods by stage, and what they return:

    0, and ZeRO-1 with float32 accumulation   engine.allreduce_bucket: the average of a list of gradients, flat
    1, 2                                      optimizer.allreduce_bucket: likewise, divided or not; with
                                              reduce_scatter=false optimizer.gradient_reduction_w_predivide
    3                                         optimizer.__avg_scatter_grads: this rank's part of each gradient's
                                              average; with reduce_scatter=false __avg_scatter_contiguous_grads

Sums are float32 inside the collectives, so DeepSpeed's predivision and communication_data_type have no say here. In
stage 3 parts are padded to whole blocks, so no two parameters share a scale. Limits: gradients lie in DeepSpeed's own
buffers, in its dtype; only the wire is FP8. ZeRO-1 and 2 average whole buckets, as DeepSpeed does by default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fp8stack import comm
from fp8stack.errors import ConfigError
from fp8stack.formats import BLOCK

_STAGE3 = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter"


class Fp8Reduction:
    """Replaces the methods of one engine that reduce, and counts the reductions."""

    def __init__(self, engine: Any) -> None:
        self.calls = 0
        self._owners: dict[str, Any] = {}  # the owner of each replaced method, by its name
        self._engine = engine
        zero = engine.optimizer
        stage = engine.zero_optimization_stage()
        if stage == 3:
            self._replace(zero, f"{_STAGE3}_grads", 2, self._scatter_average)
            self._replace(zero, f"{_STAGE3}_contiguous_grads", 2, self._scatter_bucket)
        elif stage and hasattr(zero, "gradient_reduction_w_predivide"):
            self._replace(zero, "allreduce_bucket", 6, self._average_partitioned)
            self._replace(zero, "gradient_reduction_w_predivide", 2, self._average_flat)
        else:
            self._replace(engine, "allreduce_bucket", 3, self._average_bucket)

    def _replace(self, owner: Any, name: str, count: int, method: Callable[..., Any]) -> None:
        """Replace a method of `count` parameters."""
        import deepspeed

        there = getattr(owner, name, None)
        if there is None or len(inspect.signature(there).parameters) != count:
            raise ConfigError(
                f"DeepSpeed {deepspeed.__version__} reduces gradients otherwise than the versions that fp8stack knows "
                f"(0.18 and 0.19): {type(owner).__name__}.{name} is {'missing' if there is None else 'another'}. Use "
                '"fp8stack": {"gradients": "keep"} for its own reduction, or one of these versions.'
            )
        setattr(owner, name, method)
        self._owners[name] = owner

    def attached(self) -> dict[str, bool]:
        """Return the names of the methods that were replaced, and whether they still are."""
        return {
            name: getattr(vars(owner).get(name), "__self__", None) is self
            for name, owner in self._owners.items()
        }

    def _reduce(self, tensor: Tensor, mean: bool, group: Any, ranks: float | None = None) -> Tensor:
        """Add up over a group, in place; for a mean divide by `ranks`.

        Its default is the group's size, where ranks that share a sequence count as one. Experts are divided by the size
        of data parallelism, which may be larger than their group.
        """
        self.calls += 1
        comm.all_reduce(tensor, dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM, group)
        size = dist.get_world_size(group)
        ranks = ranks or size / self._engine.sequence_parallel_size
        if mean and ranks != size:
            tensor.mul_(size / ranks)
        return tensor

    # --- stage 0

    def _average_bucket(
        self, bucket: list[Tensor], dp_group: Any, dp_world_size: float | None = None
    ) -> Tensor:
        engine, ranks = self._engine, dp_world_size or dist.get_world_size(dp_group)
        return self._reduce(engine.flatten(bucket), engine.gradient_average, dp_group, ranks)

    # --- stages 1 and 2

    def _average_partitioned(
        self,
        bucket: list[Tensor],
        communication_data_type: torch.dtype,
        rank: int | None = None,
        log: Any = None,
        divide: bool = True,
        process_group: Any = None,
    ) -> Tensor:
        zero = self._engine.optimizer
        group = zero.dp_process_group if process_group is None else process_group
        return self._reduce(zero.flatten(bucket), divide and self._engine.gradient_average, group)

    def _average_flat(self, tensor: Tensor, communication_data_type: torch.dtype) -> Tensor:
        engine = self._engine
        return self._reduce(tensor, engine.gradient_average, engine.optimizer.dp_process_group)

    # --- stage 3

    def _scatter_average(self, parameters: list[Any], dtype: torch.dtype) -> list[Tensor]:
        """Return this rank's part of the average of each gradient, in order."""
        self.calls += 1
        zero = self._engine.optimizer
        group = getattr(parameters[0], "ds_process_group", zero.dp_process_group)
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        flat = [p.grad.reshape(-1) for p in parameters]
        parts = [-(-each.numel() // world) for each in flat]  # as DeepSpeed partitions
        padded = [-(-part // BLOCK) * BLOCK for part in parts]
        own = flat[0].new_empty(sum(padded), dtype=zero.gradient_accumulation_dtype)
        if len(flat) == 1 and flat[0].numel() == world * padded[0]:
            table = flat[0]
        else:
            table = _by_rank(flat, parts, padded, world)
        beside = bool(self._engine.zero_overlap_comm())
        comm.reduce_scatter_tensor(own, table, dist.ReduceOp.AVG, group, background=beside)
        if hasattr(zero, "_gradient_averaging_world_size"):
            # experts have a smaller group, and are divided by all of data parallelism
            ranks = zero._gradient_averaging_world_size(parameters, world)
            if ranks != world:
                own.mul_(world / ranks)
        found = zip(own.split(padded), flat, parts, strict=True)
        return [mine[: max(0, min(n, each.numel() - rank * n))] for mine, each, n in found]

    def _scatter_bucket(self, buffer: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Do the same for gradients in one buffer; in stage 3, ranks that share a sequence count as one only here."""
        parts = self._scatter_average(self._engine.optimizer.ipg_buckets[dtype].params, dtype)
        shared = self._engine.sequence_parallel_size
        return [part.mul_(shared) for part in parts] if shared > 1 else parts


def _by_rank(flat: list[Tensor], parts: list[int], padded: list[int], world: int) -> Tensor:
    """Join tensors so that each rank's parts of all of them lie together, each filled up with zeros to whole blocks."""

    def filled(x: Tensor, missing: int) -> Tensor:
        return pad(x, (0, missing)) if missing else x

    rows = [
        filled(filled(x, world * part - x.numel()).view(world, part), size - part)
        for x, part, size in zip(flat, parts, padded, strict=True)
    ]
    return torch.cat(rows, 1).view(-1)
