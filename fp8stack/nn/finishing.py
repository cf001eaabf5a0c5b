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

from torch import nn
from torch.utils._pytree import tree_leaves

from fp8stack.levels import PRECISIONS

from .block_graphs import BlockGraphs
from .casts import Products
from .matmuls import BareMatmuls
from .te import Engine


def finish_products(model: nn.Module) -> bool:
    """Make the FP8 products of `model` in bfloat16 from now on; return whether there were any left."""
    names = ("products", "in_products", "te", "_bare_matmuls", "block_graphs")
    held = {id(x): x for m in model.modules() for x in tree_leaves([*map(vars(m).get, names)])}
    found = [x for x in held.values() if isinstance(x, (Products, Engine, BareMatmuls))]
    left = [x for x in found if not x.finished]
    for x in left:
        if isinstance(x, Products):
            x.in_bf16 = PRECISIONS["bf16"]
        elif isinstance(x, BareMatmuls):
            x.finish()
        else:
            x.finished = True
    for x in held.values() if left else ():
        if isinstance(x, BlockGraphs):
            x.forget()
    return bool(left)
