"""Transformers as a few numbers: from a count of parameters, or from a Hugging Face configuration.

A `Shape` is a decoder of equal blocks: attention with q, k, v and o projections, then an MLP, each behind a norm. Its
`skeleton` has the modules of such a model on the meta device, without a forward pass. `fp8stack.initialize` and the
optimizers then run on the skeleton, so that their decisions and their states are counted and not guessed.

`resized(n)` keeps the proportions of the shape: hidden, feed-forward and heads grow together, and layers in proportion
to hidden. `LLAMA.resized(n)` stands for a model of which only the number of parameters is known: 7e9 is close to
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
        check_sizes(self, "layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
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
        check_sizes(self, "head_dim")

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

        Of all widths, the one whose number of layers is nearest to this shape's proportion.

        Raises:
            ConfigError: where embeddings and one block are more than that.
        """
        found = []
        for kv_heads in itertools.count(1):
            wider = kv_heads / self.kv_heads
            heads = kv_heads * (self.heads // self.kv_heads)
            hidden, ffn = round(self.hidden * wider), round(self.ffn * wider)
            shape = replace(self, kv_heads=kv_heads, heads=heads, hidden=hidden, ffn=ffn)
            outside, block = shape.counts
            layers = round((parameters - outside) / block)
            if layers < 1:
                break
            proportion = layers / self.layers / wider  # falls as width grows
            if layers <= MOST:
                found.append((abs(math.log(proportion)), kv_heads, replace(shape, layers=layers)))
            if proportion < 1:
                break
        if not found:
            raise ConfigError(
                f"{parameters:g} parameters are fewer than the embeddings ({self.vocab:,} words) and one block of such "
                "a model have. Give a smaller vocab, or layers and hidden."
            )
        return min(found)[-1]


def check_sizes(sizes: object, *names: str) -> None:
    """Raise ConfigError unless these attributes are whole numbers of a possible size."""
    for name in names:
        value = getattr(sizes, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            raise ConfigError(f"{name}={value!r} must be a whole number from 1 to {MOST:,}.")


@lru_cache(maxsize=1024)
def _counts(shape: Shape) -> tuple[int, int]:
    model = shape.skeleton()
    block = sum(p.numel() for p in model["blocks"].parameters())
    return sum(p.numel() for p in model.parameters()) - block, block


LLAMA = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14_336, vocab=32_000)
"""The family of a model of which only the number of parameters is known."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
"""The `model_type` of configurations that a shape can be made of."""

_KEYS = {  # of sizes in configurations: of Llama-like models, and of GPT-2
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size", "vocab_size"),
}


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
    if kind not in FAMILIES:
        experts = any("expert" in key for key in config)  # near by name, and another model
        meant = "" if experts else did_you_mean(str(kind), FAMILIES)
        raise ConfigError(
            f"{where}: model_type={kind!r} is not known here; known: {', '.join(FAMILIES)}.{meant} Give --sizes with "
            "--layers, --hidden, --heads and so on."
        )
    if config.get("add_cross_attention"):
        raise ConfigError(
            f"{where}: add_cross_attention=True is not counted. Give --sizes of a decoder that is as large."
        )
    gpt2 = kind == "gpt2"
    sizes: dict[str, Any] = {n: _size(config, keys[gpt2], where) for n, keys in _KEYS.items()}
    tied = bool(config.get("tie_word_embeddings", gpt2))
    if gpt2:
        sizes |= {"kv_heads": sizes["heads"], "ffn": config.get("n_inner") or 4 * sizes["hidden"]}
        positions = _size(config, "n_positions", where)
        kinds = {"gated": False, "rms": False, "bias": True, "joint_qkv": True}
        return Shape(**sizes, **kinds, tied=tied, positions=positions)
    return Shape(
        **sizes,
        kv_heads=config.get("num_key_value_heads") or sizes["heads"],
        ffn=_size(config, "intermediate_size", where),
        head_dim=config.get("head_dim") or (128 if kind == "qwen3" else 0),
        bias=bool(config.get("attention_bias", False) and config.get("mlp_bias", False)),
        qkv_bias=bool(config.get("attention_bias", kind == "qwen2")),
        fusible=not config.get("mlp_bias", False)
        and config.get("hidden_act", "silu") in ("silu", "swish"),
        qk_norm=kind == "qwen3",
        tied=tied,
    )


def _size(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {key}={value!r} must be a whole number above 0.")
    return value
