"""O1: gradients in FP8, collectives whose bytes are FP8, and data parallelism with both.

What needs torch.distributed is imported when it is first asked for: some builds of torch are without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.distributed import is_available

from fp8stack.errors import CommError

from .gradients import GradientHandle

if TYPE_CHECKING:
    from .collectives import (
        all_gather_into_tensor,
        all_gather_single,
        all_reduce,
        broadcast,
        error_like,
        reduce_scatter_single,
        reduce_scatter_tensor,
    )
    from .crossover import set_crossover
    from .ddp import Fp8CommState, fp8_compress_hook, register_fp8_hook
    from .fsdp import Fp8ReduceScatter, register_fp8_all_gather, register_fp8_reduce_scatter
    from .hosts import set_hierarchy
    from .nvlink import set_transport
    from .parallel import DataParallel
    from .statistics import Statistics
    from .weights import Fp8AllGather

_PLACES = {
    "DataParallel": "parallel",
    "Fp8AllGather": "weights",
    "Fp8CommState": "ddp",
    "Fp8ReduceScatter": "fsdp",
    "Statistics": "statistics",
    "all_gather_into_tensor": "collectives",
    "all_gather_single": "collectives",
    "all_reduce": "collectives",
    "broadcast": "collectives",
    "error_like": "collectives",
    "fp8_compress_hook": "ddp",
    "reduce_scatter_single": "collectives",
    "reduce_scatter_tensor": "collectives",
    "register_fp8_all_gather": "fsdp",
    "register_fp8_hook": "ddp",
    "register_fp8_reduce_scatter": "fsdp",
    "set_crossover": "crossover",
    "set_hierarchy": "hosts",
    "set_transport": "nvlink",
}

__all__ = [
    "DataParallel",
    "Fp8AllGather",
    "Fp8CommState",
    "Fp8ReduceScatter",
    "GradientHandle",
    "Statistics",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "broadcast",
    "error_like",
    "fp8_compress_hook",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register_fp8_all_gather",
    "register_fp8_hook",
    "register_fp8_reduce_scatter",
    "set_crossover",
    "set_hierarchy",
    "set_transport",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not is_available():
        raise CommError(f"this torch is built without torch.distributed, which {name} needs.")
    found = globals()[name] = getattr(import_module(f".{_PLACES[name]}", __name__), name)
    return found
