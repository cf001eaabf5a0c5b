"""O0: Linear layers in FP8, and layers whose weights are stored in bfloat16."""

from .convert import GEMM_LAYERS, forget_weights
from .fused import fuse
from .linear import Bf16Linear, Fp8Linear
from .scaling import load_scaling_state, reset_scaling, restore_scaling, scaling_state
from .storage import StoredEmbedding, StoredLinear
from .te import TeLinear

__all__ = [
    "GEMM_LAYERS",
    "Bf16Linear",
    "Fp8Linear",
    "StoredEmbedding",
    "StoredLinear",
    "TeLinear",
    "forget_weights",
    "fuse",
    "load_scaling_state",
    "reset_scaling",
    "restore_scaling",
    "scaling_state",
]
