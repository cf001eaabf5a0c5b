"""O0: Linear layers in FP8, and layers whose weights are stored in bfloat16."""

from .bf16_storage import StoredEmbedding, StoredLinear
from .block_graphs import graph
from .convert import GEMM_LAYERS
from .delayed_histories import load_scaling_state, reset_scaling, restore_scaling, scaling_state
from .grouped import grouped_matmul
from .linear import Bf16Linear, Fp8Linear
from .mlp import fuse
from .te import TeLinear

__all__ = [
    "GEMM_LAYERS", "Bf16Linear", "Fp8Linear", "StoredEmbedding", "StoredLinear", "TeLinear", "fuse", "graph",
    "grouped_matmul", "load_scaling_state", "reset_scaling", "restore_scaling", "scaling_state",
]  # fmt: skip
