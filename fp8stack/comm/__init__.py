"""O1: gradients in FP8, and collectives whose bytes are FP8."""

from .collectives import (
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    broadcast,
    reduce_scatter_single,
    reduce_scatter_tensor,
)
from .ddp import Fp8CommState, fp8_compress_hook, register_fp8_hook
from .fsdp import Fp8ReduceScatter, register_fp8_reduce_scatter
from .gradients import GradientHandle

__all__ = [
    "Fp8CommState",
    "Fp8ReduceScatter",
    "GradientHandle",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "broadcast",
    "fp8_compress_hook",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register_fp8_hook",
    "register_fp8_reduce_scatter",
]
