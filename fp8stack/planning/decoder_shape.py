"""Transformers as a few numbers: sizes, or a count of parameters.

A `Shape` is a decoder of equal blocks: attention with q, k, v and o projections, then an MLP, each behind a norm. Its
`skeleton` has the modules of such a model on the meta device, without a forward pass. `fp8stack.initialize` and the
optimizers then run on the skeleton, so that their decisions and their states are counted and not guessed.

`resized(n)` keeps the proportions of the shape: hidden, feed-forward and heads grow together, and layers in proportion
to hidden. `LLAMA.resized(n)` stands for a model of which only the number of parameters is known: 7e9 is close to
Mistral-7B, a Llama whose queries share keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fp8stack.errors import ConfigError
from fp8stack.levels import check_number

MOST = 2**24
"""The largest size of a shape: products of two of them are counted in 64 bits."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, in elements; `positions` is the length of learned positions, 0 for rotary ones."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int = 0  # 0: hidden / heads
    gated: bool = True  # SwiGLU; False: one matrix up, an activation, one down
    rms: bool = True  # RMSNorm; False: LayerNorm
    bias: bool = False  # of all Linear layers but the head
    qkv_bias: bool = False  # of these alone
    qk_norm: bool = False  # of each head's queries and keys
    joint_qkv: bool = False  # one layer makes queries, keys and values
    tied: bool = False  # the head is the embedding
    positions: int = 0

    def __post_init__(self) -> None:
        check_sizes(vars(self), "layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}.")
        if not self.head_dim:
            if self.hidden % self.heads:
                raise ConfigError(f"hidden={self.hidden} must be a multiple of heads={self.heads}.")
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        check_sizes(vars(self), "head_dim")

    @property
    def q_dim(self) -> int:
        """Elements of a token's queries."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Elements of a token's keys, and as many of its values."""
        return self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """How many parameters the model has, a tied head counted once."""
        outside, block = self.counts
        return outside + self.layers * block

    @cached_property
    def counts(self) -> tuple[int, int]:
        """Parameters outside blocks, and of a block."""
        model = replace(self, layers=1).skeleton()
        block = sum(p.numel() for p in model["blocks"].parameters())
        return sum(p.numel() for p in model.parameters()) - block, block

    def skeleton(self, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
        """Return the modules of the model, on the meta device."""
        norm = nn.RMSNorm if self.rms else nn.LayerNorm
        h, q, kv, f = self.hidden, self.q_dim, self.kv_dim, self.ffn
        norms = {"attention_norm": h, "mlp_norm": h}
        sizes = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
        sizes |= {"up_proj": (h, f), "down_proj": (f, h)}
        if self.qk_norm:
            norms |= {"q_norm": self.head_dim, "k_norm": self.head_dim}
        if self.gated:
            sizes["gate_proj"] = (h, f)
        biased = sizes.keys() if self.bias else ("q_proj", "k_proj", "v_proj")[: 3 * self.qkv_bias]

        def block() -> nn.ModuleDict:
            linear = {n: nn.Linear(*size, bias=n in biased) for n, size in sizes.items()}
            return nn.ModuleDict({**{n: norm(width) for n, width in norms.items()}, **linear})

        with torch.device("meta"):
            model = nn.ModuleDict({"embed": nn.Embedding(self.vocab, h)})
            if self.positions:
                model["position"] = nn.Embedding(self.positions, h)
            model["blocks"] = nn.ModuleList(block() for _ in range(self.layers))
            model["norm"] = norm(h)
            model["head"] = nn.Linear(h, self.vocab, bias=False)
        if self.tied:
            model["head"].weight = model["embed"].weight
        return model.to(dtype)

    def resized(self, parameters: float) -> Shape:
        """Return the shape of this family with about that many parameters; heads keep their size.

        Widths grow with the cube root of the number, and layers make up the rest. Where the embeddings alone are too
        many, the model is narrower.

        Raises:
            ConfigError: where embeddings and one block are more than that at any width.
        """
        wider = (parameters / self.parameters) ** (1 / 3)
        for kv_heads in range(max(1, round(self.kv_heads * wider)), 0, -1):
            wider = kv_heads / self.kv_heads
            heads = kv_heads * (self.heads // self.kv_heads)
            hidden, ffn = round(self.hidden * wider), round(self.ffn * wider)
            shape = replace(self, kv_heads=kv_heads, heads=heads, hidden=hidden, ffn=ffn)
            outside, block = shape.counts
            if (layers := round((parameters - outside) / block)) >= 1:
                return replace(shape, layers=layers)
        told = f"{parameters:g} parameters are fewer than the embeddings and one block have"
        raise ConfigError(f"{told}. Give a smaller vocab, or layers and hidden.")


def check_sizes(sizes: Mapping[str, Any], *names: str) -> None:
    """Raise ConfigError unless these entries are whole numbers of a possible size."""
    for name in names:
        check_number(name, sizes[name], 1, MOST, whole=True)


LLAMA = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocab=32_000)
"""The family of a model of which only the number of parameters is known."""
