"""Which of a layer's three products are made in bfloat16.

    y  = x @ w.T     forward
    dx = dy @ w      dgrad
    dw = dy.T @ x    wgrad

The forward makes most of FP8's error in a gradient, and a few layers make most of the forward's (docs/numerics.md). So
the options are

    wgrad          the weight's gradient of all layers
    head           the layer that makes logits (`heads.py`)
    first_last     the first and last blocks: the elements of the model's outermost ModuleLists
    precision_for  layers by their names

Of the last three, the later one decides about a layer. What `wgrad` says is added, but where "fp8" is asked for by
name.

A layer whose forward is in bfloat16, and gradients are in FP8 ("forward-bf16", heads above all), has block scales in
the products of its gradients, whatever the recipe. One scale a tensor costs a head nearly all that FP8 costs a
fine-tuning: its gradient, softmax less one-hot, has one large entry a row, and what rounding does to it is the same in
every batch. In a block of 128 the largest entry is a code, and small ones beside it are not lost (docs/numerics.md).
Where the GPU or torch has no products with block scales, such a layer is in bfloat16 as a whole (`api.with_scales`).

TransformerEngine makes all products of a layer alike: a layer that would be only partly in bfloat16 is wholly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from fp8stack.errors import did_you_mean
from fp8stack.levels import PRECISIONS, Recipe

from .heads import HEAD, find_heads

_ALL = PRECISIONS["bf16"]


class Precision:
    """The products in bfloat16 of each layer of a model, as the recipe says, before anything is known of the layers."""

    def __init__(self, model: nn.Module, recipe: Recipe, compute: str) -> None:
        self.idle: list[str] = []  # options without an effect
        self.heads = set[nn.Module]() if recipe.head == "fp8" else find_heads(model)
        self._default = PRECISIONS["wgrad-bf16" if recipe.wgrad == "bf16" else "fp8"]
        # what is asked of each module: products, and the reason; the last counts
        self._asked: dict[nn.Module, list[tuple[str, str]]] = {}
        self._whole = compute == "te"
        if self._whole and self._default:
            self._default = ""
            self.idle.append(
                'wgrad="bf16" has no effect: TransformerEngine makes all products of a layer alike'
            )
        head = PRECISIONS["forward-bf16" if recipe.head == "auto" else recipe.head]
        for module in self.heads:
            self._set(module, head, HEAD)
        if recipe.first_last:
            blocks = [[*each] for _, each in outermost_lists(model)]
            n, told = recipe.first_last, f"first_last={recipe.first_last}"
            for block in (block for each in blocks for block in (*each[:n], *each[-n:])):
                self._set(block, _ALL, f"{told} leaves its block in bfloat16")
            if not blocks:
                self.idle.append(f"{told} has no effect: the model has no nn.ModuleList of blocks")
        names = dict(model.named_modules(remove_duplicate=False))
        for pattern, how in recipe.precision_for:
            found = [m for name, m in names.items() if name and fnmatchcase(name, pattern)]
            for module in found:
                reason = f"precision_for[{pattern!r}] is {how!r}"
                self._set(module, PRECISIONS[how], reason, alone=how == "fp8")
            if not found:
                meant = did_you_mean(pattern, names)
                self.idle.append(f"precision_for[{pattern!r}] matches no module.{meant}")

    def of(self, module: nn.Module) -> tuple[str, str]:
        """Return the products of a layer that are in bfloat16, with spaces between them, and why."""
        products, reason = self._asked.get(module, [(self._default, "")])[-1]
        return (_ALL if self._whole and products else products), reason

    def unmet(self, layers: Iterable[nn.Module]) -> list[str]:
        """Return the reasons, `head=` apart, that ask for what none of these layers has."""
        asked = [self._asked[layer] for layer in layers if layer in self._asked]
        met = {why for each in asked for products, why in each if products == each[-1][0]}
        return sorted({why for each in self._asked.values() for _, why in each} - met - {HEAD})

    def _set(self, module: nn.Module, products: str, reason: str, alone: bool = False) -> None:
        if not alone:
            products = with_products(products, self._default)
        for each in module.modules():
            self._asked.setdefault(each, []).append((products, reason))


def with_products(products: str, more: str) -> str:
    """Return the products of both, as `levels.PRECISIONS` names them; `more` are none, or one."""
    return products if more in products else f"{products} {more}".strip()


def outermost_lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the ModuleLists of a model that are in no other, with their names."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield prefix + name, child
        else:
            yield from outermost_lists(child, f"{prefix}{name}.")
