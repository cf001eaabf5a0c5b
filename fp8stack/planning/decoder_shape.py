"""Transformers as a few numbers: from a count of parameters, or from a Hugging Face configuration.

A `Shape` is a decoder of equal blocks: attention with q, k, v and o projections, then an MLP, each behind a norm. Its
`skeleton` has the modules of such a model on the meta device, without a forward pass. `fp8stack.initialize` and the
optimizers then run on the skeleton, so that their decisions and their states are counted and not guessed.

`resized(n)` keeps the proportions of the shape: hidden, feed-forward and heads grow together, and layers in proportion
to hidden. `LLAMA.resized(n)` stands for a model of which only the number of parameters is known: 7e9 is close to
Mistral-7B, a Llama whose queries share keys and values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8stack.errors import ConfigError, reason_of
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


def check_sizes(sizes: Mapping[str, Any], *names: str, where: str = "") -> None:
    """Raise ConfigError unless these entries are whole numbers of a possible size; `where` names what has them."""
    for name in names:
        check_number(where + name, sizes.get(name), 1, MOST, whole=True)


LLAMA = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocab=32_000)
"""The family of a model of which only the number of parameters is known."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
"""The `model_type` of configurations that a shape can be made of."""

_SIZES = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size",
    "ffn": "intermediate_size",
}  # fmt: skip
_SIZES_OF_GPT2 = {
    "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "vocab": "vocab_size", "positions": "n_positions",
}  # fmt: skip


def read_config(path: str | Path) -> Shape:
    """Return the shape that a Hugging Face `config.json` describes, or the one in a folder.

    Raises:
        ConfigError: for a file that cannot be read, or that is no configuration of a decoder known here.
    """
    path = Path(path, "config.json") if Path(path).is_dir() else path
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    # ValueErrors are JSON's, or of whole numbers of thousands of digits
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {reason_of(error)}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}; a configuration is an object.")
    return shape_of_config(config, str(path))


def shape_of_config(config: Mapping[str, Any], where: str = "the configuration") -> Shape:
    """Return the shape of a Hugging Face configuration, given as a dict."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type={kind!r} is not known here; known: {', '.join(FAMILIES)}. Give --sizes with "
            "--layers, --hidden, --heads and so on."
        )
    if config.get("add_cross_attention"):
        told = "add_cross_attention=True is not counted. Give --sizes of a decoder that is as large"
        raise ConfigError(f"{where}: {told}.")
    gpt2 = kind == "gpt2"
    keys = _SIZES_OF_GPT2 if gpt2 else _SIZES
    check_sizes(config, *keys.values(), where=f"{where}: ")
    sizes: dict[str, Any] = {name: config[key] for name, key in keys.items()}
    sizes["tied"] = bool(config.get("tie_word_embeddings", gpt2))
    if gpt2:
        sizes |= {"kv_heads": sizes["heads"], "ffn": config.get("n_inner") or 4 * sizes["hidden"]}
        return Shape(**sizes, gated=False, rms=False, bias=True, joint_qkv=True)
    return Shape(
        **sizes,
        kv_heads=config.get("num_key_value_heads") or sizes["heads"],
        head_dim=config.get("head_dim") or (128 if kind == "qwen3" else 0),
        bias=bool(config.get("attention_bias", False) and config.get("mlp_bias", False)),
        qkv_bias=bool(config.get("attention_bias", kind == "qwen2")),
        qk_norm=kind == "qwen3",
    )
