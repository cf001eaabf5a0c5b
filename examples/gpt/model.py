"""Decoder-only language models in plain PyTorch: GPT-2 124M to 1.5B, Llama-style 1B and 8B, and the demo's small one.

`SIZES` names them. A `ModelConfig` says which parts a model is made of (`blocks.py` has the parts); its defaults are
the demo's model: RMSNorm before each block, rotary positions (RoPE), normalised queries and keys (QK-norm), grouped
key/value heads (GQA), a SwiGLU feed-forward, and an output head that is not tied to the embedding.

fp8stack has to find nothing here but ordinary modules: `nn.Linear`, `nn.Embedding` and norms. No line looks at a
weight's dtype or multiplies by `.weight`: a library may store weights in fewer bits than the activations have, and only
the module itself knows how to apply them. `blocks="te"` is the exception: TransformerEngine's fused modules.

Limits: no dropout, no key/value cache (generation recomputes the window for every token), and `seq_len` is the longest
window the model can see. A model on the meta device gets its memory by `materialize`, which ties the head again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8stack import Recipe, linear_cross_entropy

from .blocks import Block, make_norm, rotary_table

CHOICES = {
    "norm": ("rmsnorm", "layernorm"),
    "positions": ("rope", "learned"),
    "activation": ("swiglu", "gelu"),
    "attention": ("sdpa", "flash", "math"),
    "blocks": ("plain", "te"),
    "init": ("fan_in", "gpt2"),
}
RESIDUAL_WRITERS = ("output.weight", "down_proj.weight", "fc2_weight")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and parts of a model. FP8 GEMMs like multiples of 16, blocks of 128 like multiples of 128.

    attention: "sdpa" lets PyTorch choose, "math" is its plain formula, "flash" the package flash-attn.
    checkpointing: keep only the input of each block for the backward pass, which computes the block again.
    fuse_loss: compute head and loss in chunks of tokens, so that the logits of all are never in memory.
    blocks: "plain" modules, or "te": TransformerEngine's LayerNormLinear and LayerNormMLP.
    fp8: the recipe that "te" blocks multiply in; None: in the dtype of their input. fp8stack converts plain ones.
    init: "fan_in" (variance 1/fan_in) or "gpt2" (deviation 0.02); both write less to the residual stream.
    """

    vocab: int = 320  # 256 byte values, padded so that the head divides by 64
    dim: int = 256
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 768
    seq_len: int = 256
    rope_base: float = 10_000.0
    norm: str = "rmsnorm"
    positions: str = "rope"
    activation: str = "swiglu"
    qk_norm: bool = True
    tied: bool = False
    bias: bool = False
    attention: str = "sdpa"
    checkpointing: bool = False
    fuse_loss: bool = False
    blocks: str = "plain"
    fp8: Recipe | None = None
    init: str = "fan_in"

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not a choice; use one of {', '.join(allowed)}."
                )
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
        if self.blocks == "te" and self.qk_norm:
            raise ValueError(
                'blocks="te" has queries, keys and values in one fused module, without room for qk_norm=True. '
                'Use qk_norm=False, or blocks="plain".'
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim


def gpt2(dim: int, layers: int, heads: int) -> ModelConfig:
    """GPT-2's parts at one of its widths, with its vocabulary of 50257 padded to a multiple of 64."""
    return ModelConfig(
        vocab=50_304, dim=dim, layers=layers, heads=heads, kv_heads=heads, ffn=4 * dim, seq_len=1024,
        norm="layernorm", positions="learned", activation="gelu", qk_norm=False, tied=True, bias=True, init="gpt2",
    )  # fmt: skip


def llama(dim: int, layers: int, ffn: int, tied: bool, seq_len: int) -> ModelConfig:
    """Llama 3's parts at one of its widths, with its vocabulary."""
    return ModelConfig(
        vocab=128_256, dim=dim, layers=layers, heads=32, kv_heads=8, ffn=ffn, seq_len=seq_len,
        rope_base=500_000.0, qk_norm=False, tied=tied, init="gpt2",
    )  # fmt: skip


SIZES = {
    "tiny": ModelConfig(dim=64, layers=2, heads=4, kv_heads=2, ffn=192, seq_len=64),
    "demo": ModelConfig(),
    "gpt2": gpt2(768, 12, 12),
    "gpt2-medium": gpt2(1024, 24, 16),
    "gpt2-large": gpt2(1280, 36, 20),
    "gpt2-xl": gpt2(1600, 48, 25),
    "llama-1b": llama(2048, 16, 8192, tied=True, seq_len=2048),
    "llama-8b": llama(4096, 32, 14_336, tied=False, seq_len=4096),
}


class GPT(nn.Module):
    """Language model: tokens in, logits or the mean cross-entropy out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        if config.positions == "learned":
            self.position = nn.Embedding(config.seq_len, config.dim)
        kind = Block
        if config.blocks == "te":
            from .te_blocks import TeBlock as kind
        self.blocks = nn.ModuleList(kind(config) for _ in range(config.layers))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self._tie()
        rows = config.seq_len if config.positions == "rope" else 0
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(rows, config.head_dim // 2), persistent=False)
        self.initialize_weights()

    def materialize(self, device: torch.device) -> None:
        """Give a model on the meta device memory on another one, and first values; what is sharded stays so."""
        self.to_empty(device=device)
        self._tie()
        self.initialize_weights()

    def _tie(self) -> None:
        if self.config.tied:
            self.head.weight = self.embedding.weight

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Give every parameter and buffer its first value, of torch's generator of the CPU.

        So a seed means the same weights on any device and any number of ranks, each of which draws one parameter after
        the other as a whole and keeps its part.

        "fan_in": normal weights of variance 1/fan_in, so that each layer keeps the size of its input; the two that
        write to the residual stream share one unit of variance among all blocks. (Starting them at zero, or all of
        them as GPT-2 does, learned slower at the demo's size.)
        "gpt2": deviation 0.02, and 0.02 / sqrt(2 × layers) where a block writes to the residual stream.
        """
        config = self.config
        table = rotary_table(len(self.cos), config.head_dim, config.rope_base)
        for buffer, values in zip((self.cos, self.sin), table, strict=True):
            buffer.copy_(values)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:  # of norms, and biases
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            elif not parameter.is_meta:
                whole = torch.empty(parameter.shape, device="cpu")
                whole.normal_(std=self._deviation(name, parameter.shape[1]))
                parameter.copy_(_part(whole.to(parameter.device), parameter))

    def _deviation(self, name: str, fan_in: int) -> float:
        """Standard deviation of the first values of a matrix."""
        shared_by = 2 * self.config.layers if name.endswith(RESIDUAL_WRITERS) else 1
        if self.config.init == "gpt2":
            return 0.02 * shared_by**-0.5
        if name.startswith(("embedding", "position")) and not self.config.tied:
            return 1.0
        return (fan_in * shared_by) ** -0.5

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
        rotation = (self.cos[:length], self.sin[:length]) if len(self.cos) else None
        x = self.embedding(tokens)
        if rotation is None:
            x = x + self.position(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            if self.config.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, rotation, use_reentrant=False)
            else:
                x = block(x, rotation)
        x = self.norm(x)
        if targets is not None and self.config.fuse_loss:
            return linear_cross_entropy(x, self.head, targets)
        logits = self.head(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,  # [T], int64, on the model's device
        count: int,
        generator: torch.Generator,  # on the CPU, so that a seed means the same on every device
        temperature: float = 0.8,
        top_k: int = 40,
    ) -> Tensor:  # [T + count], int64: the prompt and its continuation
        """Draw `count` tokens one by one from the `top_k` most likely ones."""
        training = self.training
        self.eval()
        tokens = prompt
        for _ in range(count):
            window = tokens[-self.config.seq_len :]
            logits = self(window.unsqueeze(0))[0, -1].float().cpu() / temperature
            likely, index = logits.topk(min(top_k, logits.numel()))
            drawn = index[torch.multinomial(likely.softmax(-1), 1, generator=generator)]
            tokens = torch.cat((tokens, drawn.to(tokens.device)))
        self.train(training)
        return tokens


def _part(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return `whole` as FSDP2 has sharded `parameter`, if it has; without a word to other ranks."""
    if not hasattr(parameter, "placements"):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(mesh, parameter.placements)
