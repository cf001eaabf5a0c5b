"""The head of a language model: the layer, or the embedding's own weight, that makes a logit for each word.

On a trained model this one product moves the distribution of the next token as far as all others together
(docs/numerics.md): logits are large numbers next to each other, and E4M3 has three bits of mantissa for what goes into
them. So `head=` says how it multiplies:

    "bf16"           all three products in bfloat16
    "forward-bf16"   logits in bfloat16; the gradients of input and weight in FP8, which is most of the time saved,
                     with block scales (`precision.py` says why)
    "fp8"            as any other layer
    "auto"           "forward-bf16" where such a layer is found; "bf16" with TransformerEngine, and where there are no
                     products with block scales

A layer is a head if its weight is an embedding's. So is one outside lists of blocks with a usual name, if it has as
many outputs as the largest embedding has rows, or somewhat more (vocabularies are padded). Where there is none of
these, the only layer there with just as many outputs is the head. A product by the whole weight of an embedding is one
too (`matmuls.py`).

Limits: not found are heads in a list (of codebooks, of further tokens) with weights of their own, adapters over a head,
and a head by another name with fewer outputs than there are places.
"""

from __future__ import annotations

from torch import nn

from .layer_kinds import kind_of, sizes_of

HEAD = "it makes the logits, which are left in bfloat16"
"""Why a product is in bfloat16 that could be in FP8."""
USUAL_NAMES = (
    "lm_head", "head", "output", "decoder", "embed_out", "proj_out", "ff_out", "unembed", "to_logits",
)  # fmt: skip
# what peft puts behind a name
_WRAPPED = ("original_module", "modules_to_save", "default", "base_layer")
_FEW = 32  # rows of embeddings that hold types of tokens, or classes


def find_heads(model: nn.Module) -> set[nn.Module]:
    """Return the layers of `model` that make logits."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    sizes = {m.num_embeddings for m in embeddings if m.num_embeddings > _FEW}
    if not sizes:
        return set()
    words = {weight for m in embeddings if (weight := m._parameters.get("weight")) is not None}
    most, heads, alone = max(sizes), set[nn.Module](), set[nn.Module]()
    repeated = {inner for m in model.modules() if _repeats(m) for inner in m.modules()}
    for name, module in model.named_modules():
        if not kind_of(module):
            continue
        outputs = sizes_of(module)[0]
        own = next((part for part in reversed(name.split(".")) if part not in _WRAPPED), "")
        fits = outputs in sizes or most <= outputs <= most + max(most // 10, 128)
        if module._parameters.get("weight") in words or (
            own in USUAL_NAMES and fits and module not in repeated
        ):
            heads.add(module)
        elif outputs == most and module not in repeated:
            alone.add(module)
    return heads or (alone if len(alone) == 1 else set())


def _repeats(module: nn.Module) -> bool:
    """Return whether a module is a list of modules alike; a dict may hold all of a model."""
    kinds = {type(m) for m in module.children()}
    alike = len(kinds) == 1 and len(module._modules) > 1
    return isinstance(module, nn.ModuleList) or (isinstance(module, nn.ModuleDict) and alike)
