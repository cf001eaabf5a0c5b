"""`nn.MultiheadAttention` whose projections multiply in FP8, as its in- and out-projection are most of its weights.

Why: torch multiplies by `in_proj_weight` and by the weight of `out_proj` inside of one function, so there is no layer
whose class could be changed.

How: in training, and in evaluation where a gradient is wanted, this forward takes the place of torch's:

1. The in-projection is made in the layout in which query, key and value come. It is one product by the whole
   `in_proj_weight` if the three are one tensor, two if key is value, else three. Each has its own scales.
2. Attention is computed by the operations of `F.multi_head_attention_forward`, with the same masks and dropout: where
   the projections have the same bits, so has the result.
3. `out_proj` is a layer of its own, which is called here.

In evaluation without gradients torch's own forward runs, fast path included, and its products are not FP8. That path
hands the weights to C++ as they are, so at O2 they keep their dtype.

Limits: with `bias_k`, `bias_v` or `add_zero_attn`, and in a subclass, all is left to torch. A query whose keys are all
masked has NaN as its result with `need_weights=True`, as in torch; a product with one scale makes all results NaN of
that. `select="auto"` has one rule for the in-projection, that of one product from embed_dim to 3 × embed_dim.
Reentrant checkpointing of a model in evaluation runs torch's forward first and recomputes in FP8. Hooks of
`out_proj`, which torch never calls, run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8stack.errors import ModelError

from .casts import Products
from .linear import Fp8Layer, bf16_matmul, fp8_matmul
from .mixin import Mixin


class Attention(Mixin):
    """The forward in training; `convert.py` mixes one of the two classes below into nn.MultiheadAttention."""

    project: Callable[[int, Tensor, Tensor, Tensor | None], Tensor]  # the product of that index
    layer_name: str  # in the model
    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    in_proj_bias: nn.Parameter | None  # [3 · embed_dim]
    out_proj: nn.Module

    def forward(
        self,
        query: Tensor,  # [L, N, embed_dim], or [N, L, embed_dim] if batch_first, or without N
        key: Tensor,  # [S, N, kdim]
        value: Tensor,  # [S, N, vdim]
        key_padding_mask: Tensor | None = None,  # [N, S]
        need_weights: bool = True,
        attn_mask: Tensor | None = None,  # [L, S] or [N · heads, L, S]
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, laid out as the query, and the weights [N, L, S] or [N, heads, L, S] if needed."""
        given = (query, key, value, *self.parameters()) if torch.is_grad_enabled() else ()
        if not self.training and not any(x.requires_grad for x in given):
            return nn.MultiheadAttention.forward(
                self, query, key, value, key_padding_mask, need_weights, attn_mask,  # type: ignore[arg-type]
                average_attn_weights, is_causal,
            )  # fmt: skip
        with torch._C.DisableTorchFunction():  # see Fp8Layer
            check: Any = F._mha_shape_check  # type: ignore[attr-defined]
            batched = check(query, key, value, key_padding_mask, attn_mask, self.num_heads)
            made = self._in_projection(query, key, value)
            if not batched:
                made = [x.unsqueeze(1) for x in made]
            order = back = (0, 2, 1, 3)  # to [N, heads, L, head_dim] and back
            if not (batched and self.batch_first):
                order, back = (1, 2, 0, 3), (2, 0, 1, 3)
            heads = self.num_heads, self.head_dim
            q, k, v = (x.unflatten(-1, heads).permute(order) for x in made)
            if q.shape[:2] != k.shape[:2] or k.shape != v.shape:
                shapes = [tuple(x.shape) for x in (query, key, value)]
                raise self._error(f"inputs of {shapes}; all share N, and key and value share S")
            if is_causal and attn_mask is None:
                raise self._error("is_causal=True, which tells of a mask: pass that as attn_mask")
            mask = None
            if not is_causal or need_weights or key_padding_mask is not None:
                sizes, is_causal = (*q.shape[:3], k.shape[2]), False
                mask = self._mask(sizes, query.dtype, key_padding_mask, attn_mask)
            y, weights = self._attend(q, k, v, mask, need_weights, is_causal)
            y = self.out_proj(y.permute(back).flatten(2))
            if weights is not None and average_attn_weights:
                weights = weights.mean(1)
            if batched:
                return y, weights
            return y.squeeze(1), None if weights is None else weights.squeeze(0)

    def _in_projection(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return q, k and v [..., embed_dim], laid out as their inputs."""
        inputs, size = [query, key, value], self.embed_dim
        weights: Sequence[Tensor] = [getattr(self, name) for name in in_weights(self)]
        sizes = [size] * 3
        if len(weights) == 1 and key is value:
            alike = query is key
            inputs, sizes = ([query], [3 * size]) if alike else ([query, key], [size, 2 * size])
        # Only parts: casts know the last scale of a parameter, and not of a view.
        if len(sizes) > len(weights):
            weights = weights[0].split(sizes)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        made = [self.project(i, x, weights[i], biases[i]) for i, x in enumerate(inputs)]
        return [part for y in made for part in y.split(size, -1)]

    def _mask(
        self, sizes: Sequence[int], dtype: torch.dtype, padding: Tensor | None, mask: Tensor | None
    ) -> Tensor | None:
        """Return what is to be added to the scores: [1 or N · heads, 1 or L, S]; -inf where a mask is True.

        `sizes` are N, heads, L and S, `dtype` is the query's.
        """
        (n, heads, length, source), other = sizes, (F._none_or_dtype(mask), "attn_mask")
        fits = {"attn_mask": [(length, source), (n * heads, length, source)]}
        fits["key_padding_mask"] = [(n, source), (source,)]
        for (name, shapes), given in zip(fits.items(), (mask, padding), strict=True):
            if given is not None and given.shape not in shapes:
                told = " or ".join(map(str, shapes))
                raise self._error(f"{name} of {tuple(given.shape)}; it is {told}")
        padding = F._canonical_mask(padding, "key_padding_mask", *other, dtype)
        mask = F._canonical_mask(mask, "attn_mask", None, "", dtype, False)
        if mask is not None and mask.dim() == 2:
            mask = mask.unsqueeze(0)
        if padding is not None:
            padding = padding.view(n, 1, 1, source).expand(-1, heads, -1, -1)
            padding = padding.reshape(n * heads, 1, source)
            mask = padding if mask is None else mask + padding
        return mask

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return softmax(q @ k.T / √head_dim + mask) @ v, and the first factor [N, heads, L, S] if needed.

        q, k and v are [N, heads, L or S, head_dim], `mask` is as `_mask` returns it.
        """
        both, dropout = q.shape[:2], self.dropout if self.training else 0.0
        if not need_weights:
            if mask is not None:
                mask = mask[None] if len(mask) == 1 else mask.unflatten(0, both)
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal), None
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        q, k = q * math.sqrt(1.0 / self.head_dim), k.transpose(-2, -1)
        scores = torch.bmm(q, k) if mask is None else torch.baddbmm(mask, q, k)
        weights = F.softmax(scores, dim=-1)
        if dropout > 0.0:
            weights = F.dropout(weights, dropout)
        return torch.bmm(weights, v).unflatten(0, both), weights.unflatten(0, both)

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"MultiheadAttention {self.layer_name} got {problem}.")


def in_weights(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the in-projection's weights: of one for all three, or of one each."""
    if getattr(module, "_qkv_same_embed_dim", True):  # a subclass may not have it
        return ("in_proj_weight",)  # [3 · embed_dim, embed_dim]
    return ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class Fp8Attention(Attention):
    """Its projections multiply in FP8."""

    mixin_prefix = "Fp8"
    in_products: tuple[Products, Products, Products]  # of query, key and value

    def project(self, index: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        products = self.in_products[index]
        if products.pays(x):
            return fp8_matmul(x, weight, bias, products, self.training)
        return F.linear(x, weight, bias)

    def extra_repr(self) -> str:
        first = self.in_products[0]
        return "bf16" if first.finished else f"fp8={first}"


class Bf16Attention(Attention):
    """Its projections multiply in bfloat16."""

    mixin_prefix = "Bf16"

    def project(self, index: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return bf16_matmul(x, weight, bias, self.layer_name)


class Fp8Product(NamedTuple):
    """A product that a module makes in FP8."""

    module: nn.Module
    products: Products
    weight: str  # the module's attribute; "" if it is a part of another's


def fp8_products(model: nn.Module) -> dict[str, Fp8Product]:
    """Return what multiplies in FP8 by name: that of a layer, and for an attention NAME, NAME.key and NAME.value."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Fp8Layer):
            found[name] = Fp8Product(module, module.products, "weight")
        elif isinstance(module, Fp8Attention):
            weights = *in_weights(module), "", ""
            for part, products, weight in zip(("", ".key", ".value"), module.in_products, weights):  # noqa: B905
                found[f"{name}{part}".lstrip(".")] = Fp8Product(module, products, weight)
    return found
