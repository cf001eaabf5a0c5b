"""The block on TransformerEngine's fused modules: LayerNormLinear, LayerNormMLP, and PyTorch's attention between them.

They cast, normalise and multiply in one module, so fp8stack leaves their GEMMs to TransformerEngine; gradients and
optimizer states are converted as for any matrix. Needs a CUDA device; in float32 and bfloat16 too, not only in FP8.

Tokens are padded to what FP8 GEMMs can have, behind those that count: attention is causal.

Histories of delayed scaling move on once per block and forward pass, since autocast is entered in each block: that is
inside of what activation checkpointing computes again, which must see the same recipe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8stack import capability
from fp8stack.errors import UnsupportedDeviceError
from fp8stack.nn.te import te_recipe

from .blocks import EPS, Rotation, attention_function, rotate, split_heads

if TYPE_CHECKING:
    from .model import ModelConfig

STEP = 32  # tokens in a window are a multiple of: enough for each recipe


class TeBlock(nn.Module):
    """A `Block` of the same arithmetic: x + attention(norm(x)), then x + feed_forward(norm(x)).

    Raises:
        UnsupportedDeviceError: where TransformerEngine is missing or broken, or has no such recipe; with the remedy.
        ConfigError: for a format that it has not.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        te = capability.load_te().te
        self.autocast = te.autocast
        if config.fp8:
            replace(config.fp8, compute="te")  # which finds options that do not go with it
            answer = capability.transformer_engine_recipe(config.fp8.fp8_recipe, "cuda")
            if not answer:
                raise UnsupportedDeviceError(
                    f"fp8_recipe={config.fp8.fp8_recipe!r}: {answer.reason}."
                )
        self.recipe = config.fp8 and te_recipe(config.fp8)
        self.head_dim, self.sizes = config.head_dim, [config.dim, config.kv_dim, config.kv_dim]
        on_meta = torch.get_default_device().type == "meta"
        options = {"bias": config.bias, "device": "meta" if on_meta else "cuda"}
        fused = {
            "eps": EPS[config.norm],
            "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[config.norm],
        }
        self.attention_in = te.LayerNormLinear(config.dim, sum(self.sizes), **fused, **options)
        self.output = te.Linear(config.dim, config.dim, **options)
        self.feed_forward = te.LayerNormMLP(
            config.dim, config.ffn, activation=config.activation, **fused, **options
        )
        self.attend = attention_function(config.attention)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:  # [B, T, dim]
        length = x.shape[1]
        if self.recipe is not None and length % STEP:
            more = (0, 0, 0, -length % STEP)
            x = F.pad(x, more)
            rotation = rotation and (F.pad(rotation[0], more), F.pad(rotation[1], more))
        with self.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            parts = self.attention_in(x).split(self.sizes, dim=-1)
            query, key, value = (split_heads(part, self.head_dim) for part in parts)
            mixed = self.attend(rotate(query, rotation), rotate(key, rotation), value)
            x = x + self.output(mixed.flatten(2))
            return (x + self.feed_forward(x))[:, :length]
