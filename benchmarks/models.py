"""The models that benchmarks train, written as a user would: Llama blocks and GPT-2, plain torch modules.

`MODELS["llama"]` is four blocks of Llama-3-8B's size under a vocabulary of 32,000, so that the blocks and not the head
take the time; `MODELS["gpt2"]` is GPT-2 124M. Both return their loss, so that torch.compile sees all of a step. The
modules `embed` and `head` are in bfloat16 whatever the rest is in (`PLAIN`).

`fuse_te` swaps norms and Linear layers for TransformerEngine's fused modules, with the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

PLAIN = ("embed", "head")  # the modules that no configuration puts into FP8
EPS = 1e-5  # of all norms
Rope = tuple[Tensor, Tensor] | None  # cosines and sines, [tokens, head_dim]


@dataclass(frozen=True)
class Config:
    """A model's sizes, and those of its batch."""

    kind: str  # "llama" or "gpt2"
    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    batch: int
    sequence: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


MODELS = {
    "llama": Config("llama", 32_000, 4096, 4, 32, 8, 14_336, batch=2, sequence=4096),
    "gpt2": Config("gpt2", 50_304, 768, 12, 12, 12, 3072, batch=32, sequence=1024),
    "tiny": Config("llama", 96, 64, 2, 4, 2, 128, batch=2, sequence=16),  # both for tests on a CPU
    "tiny-gpt2": Config("gpt2", 97, 64, 2, 4, 4, 128, batch=2, sequence=16),
}


class Llama(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=EPS)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        frequencies = 500_000 ** -(torch.arange(0, 1, 2 / config.head_dim))
        angles = torch.outer(torch.arange(config.sequence), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LlamaBlock(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=EPS)
        self.attention = LlamaAttention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=EPS)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.mlp(self.mlp_norm(x))


class LlamaAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        kv_dim, self.head_dim = config.kv_heads * config.head_dim, config.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(attend(q, k, v, self.head_dim, rope))


class LlamaMLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class GPT2(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.dim)
        self.position = nn.Embedding(config.sequence, config.dim)
        self.blocks = nn.ModuleList(GPT2Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, eps=EPS)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPT2Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, eps=EPS)
        qkv, output = nn.Linear(config.dim, 3 * config.dim), nn.Linear(config.dim, config.dim)
        self.attention = JointAttention(qkv, output, 3 * [config.dim], config.head_dim)
        self.mlp_norm = nn.LayerNorm(config.dim, eps=EPS)
        self.mlp = GPT2MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class JointAttention(nn.Module):
    """Attention whose queries, keys and values come from one layer."""

    def __init__(self, qkv: nn.Module, o_proj: nn.Module, sizes: list[int], head_dim: int) -> None:
        super().__init__()
        self.qkv, self.o_proj = qkv, o_proj
        self.sizes, self.head_dim = sizes, head_dim

    def forward(self, x: Tensor, rope: Rope = None) -> Tensor:
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        return self.o_proj(attend(q, k, v, self.head_dim, rope))


class GPT2MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.dim, config.ffn)
        self.down_proj = nn.Linear(config.ffn, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.gelu(self.up_proj(x), approximate="tanh"))


def attend(
    q: Tensor,  # [batch, tokens, heads * head_dim]
    k: Tensor,  # [batch, tokens, kv_heads * head_dim], as v
    v: Tensor,
    head_dim: int,
    rope: Rope,
) -> Tensor:  # as q
    """Return causal attention; fewer heads of keys and values serve several of queries."""
    q, k, v = (t.unflatten(-1, (-1, head_dim)).transpose(1, 2) for t in (q, k, v))
    if rope is not None:
        q, k = rotate(q, *rope), rotate(k, *rope)
    shared = q.shape[1] != k.shape[1]
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
    return y.transpose(1, 2).flatten(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` [batch, heads, tokens, head_dim] with rotary positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def make_model(config: Config, device: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a bfloat16 model and the arguments of its forward pass, the same ones at every call."""
    torch.manual_seed(0)
    with torch.device(device):
        model = {"llama": Llama, "gpt2": GPT2}[config.kind](config).bfloat16()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        ids = torch.randint(config.vocab, (config.batch, config.sequence + 1))
    return model, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def resize(config: Config, vocab: int | None) -> Config:
    return replace(config, vocab=vocab) if vocab else config


# --- TransformerEngine's modules; `te` is transformer_engine.pytorch


def swap_te(model: nn.Module, te: Any, plain: tuple[str, ...] = PLAIN) -> None:
    """Turn every Linear but those named `plain` into a te.Linear with the same parameters."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and name not in plain:
                setattr(parent, name, _te_linear(child, te))


def fuse_te(model: nn.Module, te: Any) -> None:
    """Turn every norm and the layers behind it into te.LayerNormLinear and te.LayerNormMLP, the rest as `swap_te`."""
    for block in model.blocks:
        block.attention = _te_attention(block.attention, block.attention_norm, te)
        block.mlp = _te_mlp(block.mlp, block.mlp_norm, te)
        block.attention_norm = block.mlp_norm = nn.Identity()


def _te_linear(linear: nn.Linear, te: Any) -> nn.Module:
    sizes, bias = (linear.in_features, linear.out_features), linear.bias is not None
    swapped = te.Linear(*sizes, bias=bias, params_dtype=linear.weight.dtype)
    swapped.weight = linear.weight
    if bias:
        swapped.bias = linear.bias
    return swapped


def _te_attention(attention: nn.Module, norm: nn.Module, te: Any) -> JointAttention:
    joint = isinstance(attention, JointAttention)
    layers = [attention.qkv] if joint else [attention.q_proj, attention.k_proj, attention.v_proj]
    sizes = attention.sizes if joint else [layer.out_features for layer in layers]
    weight = torch.cat([layer.weight for layer in layers]).detach()
    qkv = te.LayerNormLinear(weight.shape[1], weight.shape[0], **_te_options(norm, layers[0]))
    values = {"weight": weight, "layer_norm_weight": norm.weight}
    if layers[0].bias is not None:
        values |= {"bias": layers[0].bias, "layer_norm_bias": norm.bias}
    _fill(qkv, values)
    return JointAttention(qkv, _te_linear(attention.o_proj, te), sizes, attention.head_dim)


def _te_mlp(mlp: nn.Module, norm: nn.Module, te: Any) -> nn.Module:
    gated = hasattr(mlp, "gate_proj")
    first = [mlp.gate_proj, mlp.up_proj] if gated else [mlp.up_proj]
    fused = te.LayerNormMLP(
        mlp.up_proj.in_features,
        mlp.up_proj.out_features,
        activation="swiglu" if gated else "gelu",  # te's gelu is the tanh one
        **_te_options(norm, mlp.up_proj),
    )
    values = {"layer_norm_weight": norm.weight, "fc2_weight": mlp.down_proj.weight}
    values["fc1_weight"] = torch.cat([layer.weight for layer in first]).detach()
    if mlp.up_proj.bias is not None:
        values |= {"fc1_bias": mlp.up_proj.bias, "fc2_bias": mlp.down_proj.bias}
        values |= {"layer_norm_bias": norm.bias}
    _fill(fused, values)
    return fused


def _te_options(norm: nn.Module, linear: nn.Linear) -> dict[str, Any]:
    """Return what te.LayerNormLinear and te.LayerNormMLP take to be `norm` and layers like `linear`."""
    bias, dtype = linear.bias is not None, linear.weight.dtype
    return {"eps": EPS, "bias": bias, "params_dtype": dtype, "normalization": type(norm).__name__}


@torch.no_grad()
def _fill(module: nn.Module, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        getattr(module, name).copy_(value)
