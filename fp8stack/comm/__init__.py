"""O1: gradients in FP8, collectives whose bytes are FP8, and data parallelism with both.

Some builds of torch have no torch.distributed. There only `GradientHandle` exists, and every other name raises.
"""

from torch.distributed import is_available

from fp8stack.errors import CommError

from .gradients import GradientHandle

if is_available():
    from .collectives import all_gather_into_tensor, all_reduce, reduce_scatter_tensor
    from .data_parallel import DataParallel
    from .ddp import fp8_compress_hook, register_fp8_hook
    from .exchange import set_hierarchy
    from .fp8_all_gather import Fp8AllGather
    from .fsdp import Fp8ReduceScatter, register_fp8_all_gather, register_fp8_reduce_scatter
    from .nvlink import set_transport
    from .transport import Statistics

__all__ = [
    "DataParallel", "Fp8AllGather", "Fp8ReduceScatter", "GradientHandle", "Statistics",
    "all_gather_into_tensor", "all_reduce", "fp8_compress_hook", "reduce_scatter_tensor",
    "register_fp8_all_gather", "register_fp8_hook", "register_fp8_reduce_scatter", "set_hierarchy",
    "set_transport",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in __all__:
        raise CommError(f"this torch is built without torch.distributed, which {name} needs.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
