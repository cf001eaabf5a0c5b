"""The head of a language model: the layer, or the embedding's own weight, that makes a logit for each word.

On a trained model this one product moves the distribution of the next token as far as all others together
(docs/numerics.md): logits are large numbers next to each other, and E4M3 has three bits of mantissa for what goes into
them. So `head=` says how it multiplies:

    "bf16"           all three products in bfloat16
    "forward-bf16"   logits in bfloat16; the gradients of input and weight in FP8, which is most of the time saved
    "fp8"            as any other layer

A layer is a head if its weight is an embedding's; or if it lies outside lists of blocks, and has a usual name and as
many outputs as an embedding has rows, or is the only one with as many as the largest has. A product by the whole weight
of an embedding is one too (`matmuls.py`).

Limits: heads in a list (of codebooks, of further tokens) with weights of their own, and classifiers, are layers as
others.
"""

from __future__ import annotations

from torch import nn

from fp8stack.tensor_kinds import whole_shape

from .layer_kinds import kind_of, sizes_of

HEAD = 'it makes the logits, which head="bf16" leaves in bfloat16'
"""Why a product is in bfloat16 that could be in FP8."""
USUAL_NAMES = (
    "lm_head",
    "head",
    "output",
    "decoder",
    "embed_out",
    "proj_out",
    "unembed",
    "to_logits",
)


def find_heads(model: nn.Module) -> set[nn.Module]:
    """Return the layers of `model` that make logits, and the embeddings whose weights may."""
    words = {m.weight: whole_shape(m.weight)[0] for m in model.modules() if isinstance(m, nn.Embedding)}  # fmt: skip
    if not words:
        return set()
    most, lists = max(words.values()), (nn.ModuleList, nn.ModuleDict)
    repeated = {inner for m in model.modules() if isinstance(m, lists) for inner in m.modules()}
    heads, alone = set[nn.Module](), list[nn.Module]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and words[module.weight] == most:
            heads.add(module)
        if not kind_of(module) or (weight := module._parameters.get("weight")) is None:
            continue
        outputs, named = sizes_of(module)[0], name.rpartition(".")[2] in USUAL_NAMES
        fits = outputs in words.values() or outputs >= most  # vocabularies are padded
        if weight in words or (named and fits and module not in repeated):
            heads.add(module)
        elif outputs == most and module not in repeated:
            alone.append(module)
    return heads | set(alone) if len(alone) == 1 else heads
