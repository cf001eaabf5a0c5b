"""MS-AMP's FSDP over FSDP2: `FsdpReplacer` makes FP8 layers, `FP8FullyShardedDataParallel` shards them.

Weights of FP8 layers are gathered and gradients reduced in FP8 (`fp8stack.comm`). The model is sharded in place and
returned as it is, without a wrapper, its parameters DTensors: make the optimizer (`FSDPAdam`) from them afterwards.
Gradients can be accumulated, which MS-AMP's could not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import fp8stack
from fp8stack import comm
from fp8stack.errors import ConfigError

from .api import fp32_linears, to_gpu
from .collectives import share_weights


class FsdpReplacer:
    """FP8 layers for a model that is sharded afterwards."""

    @staticmethod
    def replace(model: nn.Module, src_rank: int = 0, group: Any = None) -> nn.Module:
        """Let Linear layers multiply in FP8; return the same model.

        Args:
            src_rank, group: the global rank whose parameters all ranks of `group` begin with.
        """
        to_gpu(model)
        share_weights(model, src_rank, group)
        return fp8stack.initialize(model, None, "O0", skip=fp32_linears(model))[0]


def FP8FullyShardedDataParallel(
    module: nn.Module,
    *,
    use_orig_params: bool = True,
    auto_wrap_policy: Callable[..., bool] | None = None,
    mesh: Any = None,
) -> nn.Module:
    """Shard a model with torch's `fully_shard` and FP8 on the wire; return the same model.

    Args:
        module: what `FsdpReplacer.replace` returned.
        use_orig_params: True, as in MS-AMP.
        auto_wrap_policy: which modules are gathered on their own: a callable of FSDP1's kind, such as
            functools.partial(size_based_auto_wrap_policy, min_num_params=20000).
        mesh: FSDP2's; by default all ranks.

    Raises:
        ConfigError: for use_orig_params=False, or a policy that cannot be called.
    """
    from torch.distributed.fsdp import fully_shard

    if not use_orig_params:
        raise ConfigError(
            "use_orig_params=False: FP8 weights keep their own parameters. Use use_orig_params=True."
        )
    if auto_wrap_policy is not None and not callable(auto_wrap_policy):
        raise ConfigError(
            f"auto_wrap_policy={auto_wrap_policy!r} cannot be called. Use size_based_auto_wrap_policy or a "
            "ModuleWrapPolicy of torch.distributed.fsdp.wrap."
        )

    def shard(part: nn.Module) -> int:
        """Shard the parts of `part` that the policy names, inner ones first; return how many elements they hold."""
        size = sum(p.numel() for p in part.parameters())
        if not policy(module=part, recurse=True, nonwrapped_numel=size):
            return 0
        inner = sum(shard(child) for child in part.children())
        if part is module or not policy(module=part, recurse=False, nonwrapped_numel=size - inner):
            return inner
        fully_shard(part, mesh=mesh)
        return size

    if auto_wrap_policy is not None:
        policy = auto_wrap_policy
        shard(module)
    fully_shard(module, mesh=mesh)
    comm.register_fp8_all_gather(module)
    comm.register_fp8_reduce_scatter(module)
    return module
