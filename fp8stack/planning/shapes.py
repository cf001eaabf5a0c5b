"""Transformers as a few numbers: from a count of parameters, or from a Hugging Face configuration.

A `Shape` is a decoder of equal blocks: attention with q, k, v and o projections, then an MLP, each behind a norm. Its
`skeleton` has the modules of such a model and no forward pass, on the meta device: what `fp8stack.initialize` decides
about it, and what optimizers keep for it, is then found out by running them.

`resized(n)` keeps the proportions: with hidden, feed-forward and heads growing together, and hidden in proportion to
layers, parameters of the blocks grow with the cube of the width. A count alone is `LLAMA.resized(n)`: 7e9 is close to
Mistral-7B, a Llama whose queries share keys and values.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8stack.errors import ConfigError, did_you_mean, reason_of

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
    fusible: bool = True  # a gated feed-forward has SiLU and no biases: see nn/swiglu.py
    qk_norm: bool = False  # of each head's queries and keys
    joint_qkv: bool = False  # one layer makes queries, keys and values
    tied: bool = False  # the head is the embedding
    positions: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "head_dim"):
            value = getattr(self, name)
            if name == "head_dim" and value == 0:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
                raise ConfigError(f"{name}={value!r} must be a whole number from 1 to {MOST:,}.")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}, whose keys and values they share."
            )
        if not self.head_dim:
            if self.hidden % self.heads:
                raise ConfigError(
                    f"hidden={self.hidden} must be a multiple of heads={self.heads}, or head_dim be given."
                )
            object.__setattr__(self, "head_dim", self.hidden // self.heads)

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

    @property
    def counts(self) -> tuple[int, int]:
        """Parameters outside blocks, and of a block."""
        return _counts(replace(self, layers=1))

    def skeleton(self, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
        """Return the modules of the model, on the meta device."""
        norm = nn.RMSNorm if self.rms else nn.LayerNorm
        with torch.device("meta"):
            model = nn.ModuleDict({"embed": nn.Embedding(self.vocab, self.hidden)})
            if self.positions:
                model["position"] = nn.Embedding(self.positions, self.hidden)
            model["blocks"] = nn.ModuleList(self._block() for _ in range(self.layers))
            model["norm"] = norm(self.hidden)
            model["head"] = nn.Linear(self.hidden, self.vocab, bias=False)
        if self.tied:
            model["head"].weight = model["embed"].weight
        return model.to(dtype)

    def _block(self) -> nn.ModuleDict:
        qkv, norm = self.bias or self.qkv_bias, nn.RMSNorm if self.rms else nn.LayerNorm
        block: dict[str, nn.Module] = {
            "attention_norm": norm(self.hidden),
            "q_proj": nn.Linear(self.hidden, self.q_dim, bias=qkv),
            "k_proj": nn.Linear(self.hidden, self.kv_dim, bias=qkv),
            "v_proj": nn.Linear(self.hidden, self.kv_dim, bias=qkv),
            "o_proj": nn.Linear(self.q_dim, self.hidden, bias=self.bias),
            "mlp_norm": norm(self.hidden),
            "up_proj": nn.Linear(self.hidden, self.ffn, bias=self.bias),
            "down_proj": nn.Linear(self.ffn, self.hidden, bias=self.bias),
        }
        if self.qk_norm:
            block["q_norm"], block["k_norm"] = norm(self.head_dim), norm(self.head_dim)
        if self.gated:
            block["gate_proj"] = nn.Linear(self.hidden, self.ffn, bias=self.bias)
        return nn.ModuleDict(block)

    def resized(self, parameters: float) -> Shape:
        """Return the shape of this family with about that many parameters; heads keep their size.

        Of all widths, that one whose number of layers is nearest to this shape's proportion.

        Raises:
            ConfigError: where embeddings and one block are more than that.
        """
        best, off = None, math.inf
        for kv_heads in itertools.count(1):
            wider = kv_heads / self.kv_heads
            shape = replace(
                self,
                kv_heads=kv_heads,
                heads=kv_heads * (self.heads // self.kv_heads),
                hidden=round(self.hidden * wider),
                ffn=round(self.ffn * wider),
            )
            edge, block = shape.counts
            layers = round((parameters - edge) / block)
            if layers < 1:
                break
            if layers > MOST:
                continue
            proportion = layers / self.layers / wider
            if abs(math.log(proportion)) < off:
                best, off = replace(shape, layers=layers), abs(math.log(proportion))
            elif proportion < 1:
                break
        if best is None:
            raise ConfigError(
                f"{parameters:g} parameters are fewer than the embeddings ({self.vocab:,} words) and one block of such "
                "a model have. Give a smaller vocab, or layers and hidden."
            )
        return best


@lru_cache(maxsize=1024)
def _counts(shape: Shape) -> tuple[int, int]:
    model = shape.skeleton()
    block = sum(p.numel() for p in model["blocks"].parameters())
    return sum(p.numel() for p in model.parameters()) - block, block


LLAMA = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocab=32_000)
"""The family of a model of which only the number of parameters is known."""

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
_GPT2_LIKE = ("gpt2",)
FAMILIES = (*_LLAMA_LIKE, *_GPT2_LIKE)
"""The `model_type` of configurations that a shape can be made of."""


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
        raise ConfigError(
            f"{path} cannot be read as JSON: {reason_of(error)} Give a model's config.json, or its folder."
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}; a configuration is an object.")
    return shape_of_config(config, str(path))


def shape_of_config(config: Mapping[str, Any], where: str = "the configuration") -> Shape:
    """Return the shape of a Hugging Face configuration, given as a dict."""
    kind = config.get("model_type")
    if kind in _GPT2_LIKE:
        if config.get("add_cross_attention"):
            raise ConfigError(
                f"{where}: add_cross_attention=True is not counted. Give the model as --model FILE:function."
            )
        hidden = _size(config, "n_embd", where)
        return Shape(
            _size(config, "n_layer", where),
            hidden,
            _size(config, "n_head", where),
            _size(config, "n_head", where),
            config.get("n_inner") or 4 * hidden,
            _size(config, "vocab_size", where),
            gated=False,
            rms=False,
            bias=True,
            tied=bool(config.get("tie_word_embeddings", True)),
            joint_qkv=True,
            positions=_size(config, "n_positions", where),
        )
    if kind not in _LLAMA_LIKE:
        experts = any("expert" in key for key in config)  # near by name, and another model
        meant = "" if experts else did_you_mean(str(kind), FAMILIES)
        raise ConfigError(
            f"{where}: model_type={kind!r} is not known here; known: {', '.join(FAMILIES)}.{meant} Give --sizes with "
            "--layers, --hidden, --heads and so on, or the model as --model FILE:function."
        )
    heads = _size(config, "num_attention_heads", where)
    return Shape(
        _size(config, "num_hidden_layers", where),
        _size(config, "hidden_size", where),
        heads,
        config.get("num_key_value_heads") or heads,
        _size(config, "intermediate_size", where),
        _size(config, "vocab_size", where),
        head_dim=config.get("head_dim") or (128 if kind == "qwen3" else 0),
        bias=bool(config.get("attention_bias", False) and config.get("mlp_bias", False)),
        qkv_bias=bool(config.get("attention_bias", kind == "qwen2")),
        fusible=not config.get("mlp_bias", False)
        and config.get("hidden_act", "silu") in ("silu", "swish"),
        qk_norm=kind == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _size(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {key}={value!r} must be a whole number above 0.")
    return value
