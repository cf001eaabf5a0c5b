"""What a forward pass saves for backward: bytes a token, from what autograd saves for each operation.

Each entry below is a tensor that an operation keeps (derivatives.yaml of torch, and `nn/linear.py` for FP8 layers).
With h = hidden, q and kv = a token's queries and keys, f = feed-forward, V = vocabulary, r = bytes of the residual
stream and c = bytes of what products put out (2 under autocast or in bfloat16, r otherwise):

| operation                  | keeps                                            | bytes a token             |
|----------------------------|--------------------------------------------------|---------------------------|
| norm                       | its input, and 1 (RMSNorm) or 2 statistics       | r h + 4 or 8              |
| norms of queries and keys  | the same, of each head                           | c (q + kv) + 4 or 8 each  |
| Linear                     | its input, once for layers that share it         | c × inputs                |
| the same under autocast    | its own bfloat16 copy of a float32 input         | 2 × inputs × layers       |
| the same in FP8            | the codes of it, once for layers that share it   | 1 × inputs (1 + 4 / 128²) |
| TransformerEngine's        | its own codes                                    | 1 × inputs × layers (1 + 4 / 128) |
| attention (flash, memory-efficient SDPA) | q, k, v, output; log-sum-exp a head | c (2 q + 2 kv) + 4 heads |
| float32, `enable_gqa=True`  | q, k and v for each head, scores                | 4 (4 q + heads × sequence) |
| GELU                       | its input                                        | c f                       |
| SwiGLU                     | gate (of SiLU), up and SiLU(gate) (of their product) | 3 c f                 |
| fused feed-forward         | gate and up, or up; no codes for down            | 2 c f, or c f             |
| cross entropy              | log-probabilities in float32                     | 4 V                       |

Scales of blocks, the second terms, are native layers' of squares, TransformerEngine's of rows; others keep none.

The output of attention is also the input of o_proj: a layer in bfloat16 keeps it at no cost, one in FP8 adds its codes.
(Where it has another layout, as cuDNN's has after rotary positions that change that of queries, o_proj keeps a copy.)
Sums and rotary positions keep nothing. SDPA has no kernel for float32 with heads that share keys and values (flash and
cuDNN's take no float32, the memory-efficient one no shared heads), and writes attention out there, scores and all;
backward of one block's, whose feed-forward is free by then, holds three tensors more of their size (measured on one
GPU without checkpointing). Models are taken to leave the sharing to SDPA; one that repeats keys itself keeps less.
Elsewhere scores are never kept: that is so for SDPA's kernels (heads of 256 at most), not for attention written out by
hand. At the loss, gradients of log-probabilities and of logits come on top, 8 V a token in float32.

torch.compile of the whole model makes again what is cheap to make (`min_cut_rematerialization_partition`): SiLU(gate),
copies of one input for several layers, and log-probabilities, of which it keeps the logits as the head put them out,
c V, and two statistics. The logits' gradient is written over them; an FP8 head adds its codes in both layouts, 2 V,
or 2.06 V with scales of blocks. The loss then no longer hides what a feed-forward block's backward holds beside all
blocks: gradients of its inside and of the residual stream.

Limits: no dropout; norms as one kernel each (RMSNorm keeps more where torch has none, as on CPUs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fp8stack.formats import BLOCK, E4M3
from fp8stack.kernels.reference.cast import ALIGNMENT
from fp8stack.nn.casts import FORMATS
from fp8stack.nn.mlp import RECIPES

from .decoder_shape import Shape
from .resident_memory import Precision


class Activations(NamedTuple):
    """Bytes a token; see the table of this module."""

    block: int  # that one block keeps
    inputs: int  # of one block: all that is kept of it under activation checkpointing
    end: int  # final norm and head
    loss: int  # log-probabilities; compiled: logits and two statistics
    at_loss: int  # gradients at the loss, beside all that was kept
    # at the gradients of one block's scores, where scores are kept, beside all that was kept
    at_scores: int
    # at the gradients of a compiled feed-forward block, beside all but the loss (eager: 0)
    at_block: int


def fuses(shape: Shape, precision: Precision, sharded: bool) -> bool:
    """Return whether `initialize` joins the layers of a feed-forward, where it puts all of them into FP8 (`nn/mlp.py`).

    sharded: ranks share the weights.
    """
    recipe, odd = precision.recipe, shape.bias and (shape.hidden | shape.ffn) % ALIGNMENT
    if recipe is None or not recipe.fuse or recipe.compute == "te" or sharded or odd:
        return False
    return FORMATS[recipe.fp8_format].x is E4M3 and recipe.fp8_recipe in ("auto", *RECIPES)


def activations(
    shape: Shape,
    precision: Precision,
    fp8: Mapping[str, str],
    seq: int,
    sharded: bool = False,
    compile: bool = False,
) -> Activations:
    """Return what a token keeps, of a sequence of `seq`.

    fp8: the Linear layers in FP8, by name as in `shape.skeleton()`, with what products of theirs are in bfloat16.
    sharded: ranks share the weights: autocast stands for FSDP2's or DeepSpeed's mixed precision, bfloat16 throughout.
    compile: torch.compile has the whole model.
    """
    r = 2 if sharded and precision.autocast else precision.weights.itemsize
    c, recipe = 2 if precision.autocast else r, precision.recipe
    blockwise = recipe is not None and recipe.fp8_recipe == "blockwise"
    te = recipe is not None and recipe.compute == "te"
    code = 1 + 4 / (BLOCK if te else BLOCK * BLOCK) * blockwise

    def inputs(width: int, *layers: str, kept: bool = False) -> float:
        """Return bytes of an input of `layers`, which another operation has kept already or not."""
        coded = sum(name in fp8 for name in layers)
        plain = 0 if kept else len(layers) - coded
        codes = coded if te else min(coded, 1)
        copies = plain if r > c and not compile else min(plain, 1)
        return width * (code * codes + c * copies)

    h, q, f, first = shape.hidden, shape.q_dim, shape.ffn, "blocks.0."
    qkv = "q" if shape.joint_qkv else "qkv"  # a joint one takes its input once
    statistics = 4 if shape.rms else 8
    norm = r * h + statistics
    written_out = c == 4 and shape.kv_heads != shape.heads
    scores = 4 * shape.heads * seq * written_out
    qkv_o = 4 * c * q if written_out else c * 2 * (q + shape.kv_dim) + 4 * shape.heads
    attention = qkv_o + scores + inputs(q, f"{first}o_proj", kept=True)
    attention += inputs(h, *(f"{first}{name}_proj" for name in qkv))
    each = c * shape.head_dim + statistics
    attention += shape.qk_norm * (shape.heads + shape.kv_heads) * each
    up = ("gate_proj", "up_proj") if shape.gated else ("up_proj",)
    mlp = inputs(h, *(first + name for name in up)) + c * f * (1 + shape.gated)
    joined = all(fp8.get(f"{first}{name}") == "" for name in (*up, "down_proj"))
    if not (joined and fuses(shape, precision, sharded)):
        mlp += c * f * (shape.gated and not compile) + inputs(f, f"{first}down_proj")
    v, head = shape.vocab, "head" in fp8
    in_blocks = blockwise or (recipe is not None and recipe.head != "fp8")
    return Activations(
        block=round(2 * norm + attention + mlp),
        inputs=r * h,
        end=round(norm + inputs(h, "head")) + 2 * 8,  # and two tokens' numbers, int64
        loss=c * v + 8 if compile else 4 * v,
        at_loss=round(2 * v * head * (1 + 4 / BLOCK * in_blocks)) if compile else 8 * v,
        at_scores=round(max(0, 3 * scores - norm - mlp)),
        at_block=compile * ((1 + shape.gated) * c * f + r * h),
    )
