"""The end of a run in bfloat16: what multiplies in FP8 does so in bfloat16 from now on.

Why: the last steps set the last digits of a loss, and the learning rate is small there. They can be had without the
noise of FP8 while weights, masters and optimizer states, which a checkpoint has, stay as they are.

How: classes stay, and with them FSDP2's over them, hooks, compiled modules and `restore`. What says how a product is
made, a layer's `Products` or `Engine`, gets a mark, which forward reads; under torch.compile that is a guard, so graphs
are made anew. The products are those of compute="bf16", bit for bit. The mark is in no checkpoint: like the learning
rate, it is a function of the step, so who resumes a run calls `finish` by the step again.

Limits: grouped products, which compute="bf16" leaves to transformers and torch, are theirs again: those of float32
weights under autocast are in float32. Products that a module of another library makes in FP8 go on.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from fp8stack.levels import PRECISIONS

from .casts import Products
from .matmuls import BareMatmuls
from .te import Engine


def products_in(model: nn.Module) -> list[Any]:
    """Return what says how the products of a model's layers, and by its bare parameters, are made."""
    names = ("products", "in_products", "te", "_bare_matmuls")
    held = tree_leaves([[vars(m).get(name) for name in names] for m in model.modules()])
    bare = [p for x in held if isinstance(x, BareMatmuls) for p in x.all_products]
    return [*dict.fromkeys(x for x in (*held, *bare) if isinstance(x, (Products, Engine)))]


def finish_products(model: nn.Module) -> bool:
    """Make the FP8 products of `model` in bfloat16 from now on; return whether there were any left."""
    left = [x for x in products_in(model) if not x.finished]
    for x in left:
        if isinstance(x, Products):
            x.in_bf16 = PRECISIONS["bf16"]
        else:
            x.finished = True
    graphs: set[Any] = {vars(m).get("block_graphs") for m in model.modules()} - {None}
    for each in graphs if left else ():
        each.forget()
    return bool(left)
