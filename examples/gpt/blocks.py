"""The parts of a model: blocks, attention, feed-forwards, norms, rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from .model import ModelConfig

EPS = {"rmsnorm": 1e-6, "layernorm": 1e-5}
Rotation = tuple[Tensor, Tensor] | None  # cos and sin, each [T, head_dim / 2]; None: no RoPE


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.dim, eps=EPS["rmsnorm"])
    return nn.LayerNorm(config.dim, eps=EPS["layernorm"], bias=config.bias)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = {"swiglu": SwiGLU, "gelu": Gelu}[config.activation](config)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:  # [B, T, dim]
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Attention(nn.Module):
    """Causal attention in which `heads / kv_heads` query heads share one key/value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.key = nn.Linear(config.dim, config.kv_dim, bias=config.bias)
        self.value = nn.Linear(config.dim, config.kv_dim, bias=config.bias)
        self.output = nn.Linear(config.dim, config.dim, bias=config.bias)
        if config.qk_norm:
            self.query_norm = nn.RMSNorm(config.head_dim, eps=EPS["rmsnorm"])
            self.key_norm = nn.RMSNorm(config.head_dim, eps=EPS["rmsnorm"])
        self.qk_norm = config.qk_norm
        self.attend = attention_function(config.attention)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:  # [B, T, dim]
        query, key, value = (
            split_heads(layer(x), self.head_dim) for layer in (self.query, self.key, self.value)
        )
        if self.qk_norm:
            # type_as: under autocast a Linear returns bf16, and the norms work in the type of x.
            query, key = self.query_norm(query.type_as(x)), self.key_norm(key.type_as(x))
        mixed = self.attend(rotate(query, rotation), rotate(key, rotation), value)
        return self.output(mixed.flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): a feed-forward whose gate decides what passes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn, bias=config.bias)
        self.up_proj = nn.Linear(config.dim, config.ffn, bias=config.bias)
        self.down_proj = nn.Linear(config.ffn, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, dim]
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gelu(nn.Module):
    """down(gelu(up(x))), with GPT-2's approximation of the function by a hyperbolic tangent."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.dim, config.ffn, bias=config.bias)
        self.down_proj = nn.Linear(config.ffn, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, dim]
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


# --- attention: functions of query [B, T, heads, head_dim], key and value [B, T, kv_heads, head_dim]. That is how the
# layers before and after have them in memory: PyTorch's fused kernels follow their inputs, so nothing is copied.


def attention_function(kind: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return causal attention by "sdpa", "math" or "flash"; its result is [B, T, heads, head_dim]."""
    if kind != "flash":
        return {"sdpa": attend, "math": attend_math}[kind]
    try:
        from flash_attn import flash_attn_func
    except ImportError as error:
        raise ModuleNotFoundError(
            'attention="flash" needs the package flash-attn, which cannot be imported '
            f'({error}). Install it with: pip install flash-attn --no-build-isolation, or use "sdpa".',
            name="flash_attn",
        ) from error

    def attend_flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if value.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(
                f'attention="flash" takes bfloat16 or float16, got {value.dtype}. Train under autocast '
                '(--compute-dtype bfloat16), or use attention="sdpa".'
            )
        # of the sums in backward; versions before 2.4.1 do not know it
        one_order = {"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}
        query, key = query.to(value.dtype), key.to(value.dtype)
        return flash_attn_func(query, key, value, causal=True, **one_order)

    return attend_flash


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    parts = (part.transpose(1, 2) for part in (query, key, value))
    mixed = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2)


def attend_math(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return attend(query, key, value)


def split_heads(x: Tensor, head_dim: int) -> Tensor:  # [B, T, n * head_dim] -> [B, T, n, head_dim]
    return x.unflatten(-1, (-1, head_dim))


# --- rotary positions


def rotary_table(
    length: int, head_dim: int, base: float
) -> tuple[Tensor, Tensor]:  # cos and sin, each [length, head_dim / 2], float32
    """Angles of RoPE (arXiv:2104.09864): position t turns pair i by t * base^(-2i / head_dim)."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(
    x: Tensor,  # [B, T, n, head_dim]
    rotation: Rotation,
) -> Tensor:  # [B, T, n, head_dim]
    """Turn each pair (x[i], x[i + head_dim / 2]) by its angle; scores then see distances only."""
    if rotation is None:
        return x
    cos, sin = (part.unsqueeze(1) for part in rotation)  # the same for all heads
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
