"""A small GPT in plain PyTorch: the model that the demo and the convergence benchmark train.

It is today's usual decoder: RMSNorm before each block, rotary positions (RoPE), normalised queries
and keys (QK-norm), grouped key/value heads (GQA), a SwiGLU feed-forward, PyTorch's
`scaled_dot_product_attention`, and an output head that is not tied to the embedding.

fp8stack has to find nothing here but ordinary modules, so there are only three kinds of parameters:
`nn.Linear` without bias, `nn.Embedding`, and the one-dimensional weights of `nn.RMSNorm`. No line
looks at a weight's dtype or multiplies by `.weight`: a library may store weights in fewer bits than
the activations have, and only the module itself knows how to apply them.

Limits: no dropout, no key/value cache (generation recomputes the window for every token), and
`seq_len` is the longest window the model can see.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. FP8 GEMMs like multiples of 16, blocks of 128 like multiples of 128."""

    vocab: int = 320  # 256 byte values, padded so that the head divides by 64
    dim: int = 256
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 768
    seq_len: int = 256
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim={self.dim} does not divide into heads={self.heads} heads of even size, "
                f"which rotary positions need. Choose dim as a multiple of {2 * self.heads}."
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} query heads cannot share kv_heads={self.kv_heads} key/value "
                "heads evenly. Choose kv_heads as a divisor of heads."
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class GPT(nn.Module):
    """Byte-level language model: tokens in, logits or the mean cross-entropy out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(
                name, torch.empty(config.seq_len, config.head_dim // 2), persistent=False
            )
        self.initialize_weights()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Normal weights of variance 1/fan_in, so that each layer keeps the size of its input.

        The two that write to the residual stream share one unit of variance among all blocks.
        (Starting them at zero, or all of them as GPT-2 does, learned slower at the demo's size.)
        A model made on the meta device gets everything here that it has no values for.
        """
        config = self.config
        table = rotary_table(config.seq_len, config.head_dim, config.rope_base)
        for buffer, values in zip((self.cos, self.sin), table, strict=True):
            buffer.copy_(values)
        writers = 2 * self.config.layers
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
            elif isinstance(module, nn.Linear):
                shared_by = writers if name.endswith((".output", ".down")) else 1
                nn.init.normal_(module.weight, std=(module.in_features * shared_by) ** -0.5)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()

    def forward(
        self,
        tokens: Tensor,  # [B, T], int64, T <= seq_len
        targets: Tensor | None = None,  # [B, T], int64: the token that follows each one
    ) -> Tensor:  # logits [B, T, vocab], or the mean loss [] when targets are given
        length = tokens.shape[1]
        if length > self.config.seq_len:
            raise ValueError(
                f"got {length} tokens, the model sees at most seq_len={self.config.seq_len}. "
                "Shorten the window or build the model with a larger seq_len."
            )
        rotation = self.cos[:length], self.sin[:length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.feed_forward = SwiGLU(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:  # [B, T, dim]
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Attention(nn.Module):
    """Causal attention in which `heads / kv_heads` query heads share one key/value head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_dim, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)
        self.query_norm = nn.RMSNorm(config.head_dim, eps=1e-6)
        self.key_norm = nn.RMSNorm(config.head_dim, eps=1e-6)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:  # [B, T, dim]
        # type_as: under autocast a Linear returns bf16, and the norms work in the type of x.
        query = rotate(self.query_norm(self._split_heads(self.query(x)).type_as(x)), rotation)
        key = rotate(self.key_norm(self._split_heads(self.key(x)).type_as(x)), rotation)
        value = self._split_heads(self.value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:  # [B, T, n * head_dim] -> [B, n, T, head_dim]
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): a feed-forward whose gate decides what passes."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn, bias=False)
        self.up = nn.Linear(config.dim, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, dim]
        return self.down(F.silu(self.gate(x)) * self.up(x))


def rotary_table(
    length: int, head_dim: int, base: float
) -> tuple[Tensor, Tensor]:  # cos and sin, each [length, head_dim / 2], float32
    """Angles of RoPE (arXiv:2104.09864): position t turns pair i by t * base^(-2i / head_dim)."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(
    x: Tensor,  # [B, n, T, head_dim]
    rotation: tuple[Tensor, Tensor],  # cos and sin, each [T, head_dim / 2]
) -> Tensor:  # [B, n, T, head_dim]
    """Turn each pair (x[i], x[i + head_dim / 2]) by its angle; scores then see distances only."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Tensor,  # [T], int64, on the model's device
    count: int,
    generator: torch.Generator,  # on the CPU, so that a seed means the same on every device
    temperature: float = 0.8,
    top_k: int = 40,
) -> Tensor:  # [T + count], int64: the prompt and its continuation
    """Draw `count` tokens one by one from the `top_k` most likely ones."""
    model.eval()
    tokens = prompt
    for _ in range(count):
        window = tokens[-model.config.seq_len :]
        logits = model(window.unsqueeze(0))[0, -1].float().cpu() / temperature
        likely, index = logits.topk(min(top_k, logits.numel()))
        drawn = index[torch.multinomial(likely.softmax(-1), 1, generator=generator)]
        tokens = torch.cat((tokens, drawn.to(tokens.device)))
    return tokens
