"""FP8 on the wire of FSDP2: its reduce-scatter of gradients.

Gradients are quantized once, added up in float32, and each rank's part of the sum is rounded to the reduce dtype of the
mixed-precision policy, not to FP8: the best ratio of bytes to error that there is (1.03 bytes an element where float32
takes 4). Weights are gathered as FSDP2 does it; a hybrid mesh's all-reduce over replicas is FSDP2's own too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import ConfigError

from .collectives import reduce_scatter_tensor


class Fp8ReduceScatter:
    """FSDP2's interface of a reduce-scatter (`torch.distributed.fsdp`'s ReduceScatter)."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for an input or an output."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce and scatter; see `fp8stack.comm.reduce_scatter_tensor`."""
        return reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def register_fp8_reduce_scatter(model: nn.Module) -> list[str]:
    """Make the FSDP2 modules of a model reduce their gradients with E4M3 blocks on the wire; return their names.

    Args:
        model: after `fully_shard`, before its first backward.

    Raises:
        ConfigError: if nothing in it is sharded by FSDP2, or this torch's FSDP2 has no such hook.
    """
    from torch.distributed.fsdp import FSDPModule

    names = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        if not hasattr(module, "set_custom_reduce_scatter"):
            raise ConfigError(
                f"FSDP2 of torch {torch.__version__} takes no reduce-scatter of others; update torch."
            )
        module.set_custom_reduce_scatter(Fp8ReduceScatter())  # type: ignore[arg-type]
        # A factor of its own would come as a reduction that multiplies first, which only NCCL has.
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
        names.append(name)
    if not names:
        raise ConfigError(
            f"register_fp8_reduce_scatter found no module sharded by fully_shard in {type(model).__name__}; "
            "shard it first. For DistributedDataParallel there is register_fp8_hook."
        )
    return names
