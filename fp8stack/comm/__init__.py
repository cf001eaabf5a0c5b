"""O1: gradients in FP8, and collectives whose bytes are FP8."""

from .collectives import (
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    broadcast,
    reduce_scatter_single,
    reduce_scatter_tensor,
)
from .gradients import GradientHandle

__all__ = [
    "GradientHandle",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "broadcast",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
]
