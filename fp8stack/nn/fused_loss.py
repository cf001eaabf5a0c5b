"""The head of a language model and its cross entropy in one, without the logits in memory.

Logits, their softmax and its gradient are the largest tensors of a step: 8,192 tokens × 128,256 words are 2 GiB in
bfloat16, and transformers makes four of them in float32. Here the rows of hidden states go through head and loss in
chunks, and each chunk's gradients are made at once, in forward: of the loss its logits have

    dlogits = (softmax(logits) - onehot(label)) / count

so `dx` and the sum of `dw` are all that is kept for backward, which multiplies them by the gradient of the loss. That
is one product less than computing logits again in backward, and the way of Liger Kernel and of torchtune's losses.

Products are those of the head: in the dtype of the input, bfloat16 (`head="bf16"`), or FP8, all of them or those of
gradients (`head="forward-bf16"`). A scale of a tensor is that of a chunk. Softmax and loss are float32, as transformers
has them; `dlogits` is written over the logits in their dtype (`kernels/cross_entropy.py`). `dw` is summed over chunks
in float32: in bfloat16 each chunk would round the sum anew.

A chunk has as many rows as a hidden state has elements, 1,024 at least. Its logits then have as many elements as the
weight, so that neither they nor the sum of `dw`, which each chunk reads and writes, outgrow the other.

Limits: no second derivatives. The gradient of the input is rounded twice in 16 bits, as it is made and as it is
multiplied. A float32 model without autocast has logits in bfloat16 where its head is in FP8 or bfloat16. float16
multiplies in bfloat16, whose range needs no scale. Delayed scaling and a monitor's samples leave this layer out: its
scales are made anew. Under torch.compile `dw` of a chunk is rounded to bfloat16 before it is added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import ConfigError, ModelError
from fp8stack.kernels import ops
from fp8stack.kernels.reference.cast import TOKENS
from fp8stack.tensor_kinds import is_sharded

from . import casts, linear
from .bf16_storage import output_dtype
from .frozen import values_of
from .layer_kinds import is_turned, kind_of
from .te import TeLayer

LEAST_ROWS = 1024  # of a chunk
_ADDS_IN_FLOAT32 = hasattr(torch.ops.aten.addmm, "dtype_out")  # a product of bfloat16, on a GPU


def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Module | Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    shift: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """Return the cross entropy of `head(hidden)` with `labels`, in chunks of rows: float32, 0-d.

    Args:
        hidden: float32, bfloat16 or float16 [..., in].
        head: the layer that makes logits, whose products are made as it makes them (its hooks are not called); or its
            weight [words, in], a tied embedding's perhaps, multiplied in autocast's dtype or that of `hidden`.
        labels: int64 [...], one for each hidden state.
        bias: [words], beside a weight.
        ignore_index: the label of what does not count.
        reduction: "mean" over the labels that count, or "sum".
        shift: a label is that of the position before it, as in transformers.
        chunk: rows at a time; by default as many as `in`, and 1,024 at least.

    Raises:
        ConfigError: for another reduction, or a chunk that is no number of rows.
        ModelError: for a head that is no such layer, a bias beside a layer, or labels that do not fit.
    """
    if reduction not in ("mean", "sum"):
        raise ConfigError(f'reduction={reduction!r} must be "mean" or "sum".')
    if chunk is not None and not (isinstance(chunk, int) and chunk > 0):
        raise ConfigError(f"chunk={chunk!r} must be a number of rows, 1 or more.")
    weight, bias, how, options = _resolve(head, hidden, bias)
    features = weight.shape[0 if options.turned else 1]
    linear.check_input(hidden, features, fp8=False)
    if labels.shape != hidden.shape[:-1] or labels.dtype is not torch.int64:
        raise ModelError(
            f"linear_cross_entropy got labels {tuple(labels.shape)}, {labels.dtype}, for hidden states "
            f"{tuple(hidden.shape)}; it takes an int64 for each."
        )
    if shift:
        labels = nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    rows = chunk or max(features, LEAST_ROWS)
    rows = -(-rows // TOKENS) * TOKENS
    given = hidden, weight, bias, labels, ignore_index, reduction == "mean", rows, how
    with torch._C.DisableTorchFunction():  # see Fp8Layer
        return _compute(*given, [options])


def _resolve(
    head: nn.Module | Tensor, hidden: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, str, casts.Options]:
    """Return weight and bias of a head, and how it multiplies `hidden`: "plain", "bf16" or "fp8", with Options."""
    dtype, how = output_dtype(hidden), "plain"
    options = casts.DEFAULT.options(True, dtype)._replace(products=None)
    if not isinstance(head, nn.Module):
        weight = head
    elif kind_of(head) is None or isinstance(head, TeLayer):
        raise ModelError(
            f"linear_cross_entropy got a {type(head).__name__} as head; it takes an nn.Linear, transformers' Conv1D, "
            'or a weight. A layer of TransformerEngine\'s is left in bfloat16 with head="bf16".'
        )
    elif bias is not None:
        raise ModelError("linear_cross_entropy got a bias beside a layer, which has its own.")
    else:
        weight, bias = head.weight, head.bias  # type: ignore[assignment]
        options = options._replace(turned=is_turned(head))
        if isinstance(head, linear.Bf16Layer):
            how = "bf16"
        elif isinstance(head, linear.Fp8Layer):
            if head.products.finished:
                how = "bf16"
            elif head.products.pays(hidden):
                own, how = head.products.options(head.training, dtype), "fp8"
                scaling = "current" if own.fp8_recipe == "delayed" else own.fp8_recipe
                options = own._replace(
                    fp8_recipe=scaling, x_state=-1, w_state=-1, g_state=-1, probe=None
                )
    compiled = torch.compiler.is_compiling()
    if is_sharded(weight) or not (compiled or weight.untyped_storage().nbytes()):
        raise ModelError(
            "linear_cross_entropy got a weight that is sharded, or was freed after its layer's forward. Shard the head "
            "with the module in whose forward the loss is taken, not by itself."
        )
    return weight, bias, how, options


@casts.operator(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor labels, int ignore_index, bool mean, "
    "int chunk, str how"
)
def _compute(*given: Any) -> Tensor:
    *own, (options,) = given
    result: Tensor = _LinearCrossEntropy.apply(*own, torch.is_grad_enabled(), options)
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward makes the gradients, too, if there will be a backward; saves those."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [..., in]
        weight: Tensor,  # [words, in], or [in, words] if options.turned
        bias: Tensor | None,  # [words]
        labels: Tensor,  # [...]
        ignore_index: int,
        mean: bool,
        chunk: int,
        how: str,
        grad: bool,
        options: casts.Options,
    ) -> Tensor:  # float32, 0-d
        need = [grad and needed for needed in ctx.needs_input_grad[:3]]
        rows, labels = x.reshape(-1, x.shape[-1]), labels.flatten()
        counts = labels != ignore_index
        # of gradients, before they are rounded; nothing counts: 0, though the loss is NaN
        scale = counts.float() / counts.sum().clamp(min=1) if mean else counts.float()
        labels, total = torch.where(counts, labels, 0), scale.new_zeros(())
        with torch.autocast(x.device.type, enabled=False):
            head = (_Fp8Head if how == "fp8" else _Head)(rows, weight, bias, how, options, need)
            for start in range(0, len(rows), chunk):
                part = slice(start, start + chunk)
                logits = head.logits(rows[part])
                losses = ops.cross_entropy(logits, labels[part], scale[part], any(need))
                total += torch.where(counts[part], losses, 0).sum()
                if any(need):
                    head.add_gradients(logits, part)
        ctx.like = [None if t is None else (t.shape, t.dtype) for t in (x, weight, bias)]
        ctx.save_for_backward(head.dx, head.dw, head.db)
        return total / counts.sum() if mean else total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return linear.backward_once(_backward, ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    made = zip(ctx.saved_tensors, ctx.like, strict=True)
    return *(t if t is None else _scaled(t, grad, *like) for t, like in made), *(None,) * 7


def _scaled(x: Tensor, factor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return x × factor, rounded once."""
    # A tensor of 16 bits would round a factor that is a tensor on a GPU to its own dtype.
    if ops.is_traced(x) or x.dtype is not torch.float32:
        return (x.float() * factor).to(dtype).view(shape)
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype)).view(shape)


class _Head:
    """Logits of chunks of rows, and the sums of their gradients, with products in one dtype."""

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        how: str,
        options: casts.Options,
        need: list[bool],
    ) -> None:
        self.rows, self.weight, self.bias, self.options = rows, weight, bias, options
        wide = options.dtype is torch.float32 and how == "plain"
        self.dtype = torch.float32 if wide else torch.bfloat16  # of products
        self.need, size = need, {"dtype": torch.float32, "device": rows.device}
        kept = torch.bfloat16 if rows.dtype is torch.bfloat16 else torch.float32
        self.dx = torch.empty_like(rows, dtype=kept) if need[0] else None
        self.dw = torch.zeros(weight.shape, **size) if need[1] else None  # type: ignore[call-overload]
        words = weight.shape[int(options.turned)]
        self.db = torch.zeros(words, **size) if need[2] else None  # type: ignore[call-overload]
        self.prepare()

    def prepare(self) -> None:
        """Cast the weight."""
        self.values = values_of(self.weight).detach().to(self.dtype)
        if self.options.turned:
            self.values = self.values.t()  # [words, in]

    def logits(self, x: Tensor) -> Tensor:
        """Return those of x [n, in]: [n, words], which nobody else reads."""
        self.x = x.to(self.dtype)
        y: Tensor = self.x @ self.values.t()
        return y if self.bias is None else y.add_(self.bias.to(y.dtype))

    def add_gradients(self, g: Tensor, part: slice) -> None:
        """Take over the gradient of the last logits [n, words]."""
        if self.dx is not None:
            self.dx[part] = self.gradient_of_x(g)
        if self.dw is not None:
            self.add_gradient_of_weight(g)
        if self.db is not None:
            self.db += g.sum(0, dtype=torch.float32)

    def gradient_of_x(self, g: Tensor) -> Tensor:
        made: Tensor = g @ self.values
        return made

    def add_gradient_of_weight(self, g: Tensor) -> None:
        pair = (self.x.t(), g) if self.options.turned else (g.t(), self.x)
        assert self.dw is not None
        _add_product(self.dw, *pair)


class _Fp8Head(_Head):
    """The same with products in FP8, but for those that the options leave in bfloat16."""

    def prepare(self) -> None:
        options, codes, scale = self.options, None, None
        if {"forward", "dgrad"}.intersection(options.in_bf16.split()):
            super().prepare()
        if "forward" not in options.in_bf16:
            kept = self.need[0] and "dgrad" not in options.in_bf16
            self.w8 = casts.cast_weight(self.weight, options, kept, len(self.rows))
            codes, scale = self.w8.codes_t, self.w8.scale_t
        if self.need[0] and "dgrad" not in options.in_bf16:
            self.back = casts.weight_for_backward(self.weight, codes, scale, options)

    def logits(self, x: Tensor) -> Tensor:
        in_bf16, kept = self.options.in_bf16, self.need[1] and "wgrad" not in self.options.in_bf16
        if kept or "forward" not in in_bf16:
            self.x8 = casts.cast_input(x, self.options, kept)
        if "forward" in in_bf16:
            return super().logits(x)
        self.x = x.to(self.dtype) if "wgrad" in in_bf16 else x
        pair = self.x8.codes, self.x8.scale, self.w8.codes, self.w8.scale
        y = linear.product(*pair, self.dtype, self.options.fast)
        y = linear.crop(y, (len(x), self.weight.shape[int(self.options.turned)]))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def add_gradients(self, g: Tensor, part: slice) -> None:
        x, w = (name not in self.options.in_bf16 for name in ("dgrad", "wgrad"))
        x, w = x and self.need[0], w and self.need[1]
        if x or w:
            self.g8 = casts.cast_gradient(g, self.options, x, w, learn=False)
        super().add_gradients(g, part)

    def gradient_of_x(self, g: Tensor) -> Tensor:
        if "dgrad" in self.options.in_bf16:
            return super().gradient_of_x(g)
        assert self.dx is not None
        pair = self.g8.codes, self.g8.scale, *self.back
        dx = linear.product(*pair, self.dx.dtype)
        return linear.crop(dx, (len(g), self.dx.shape[1]))

    def add_gradient_of_weight(self, g: Tensor) -> None:
        if "wgrad" in self.options.in_bf16:
            return super().add_gradient_of_weight(g)
        assert self.dw is not None
        pair = (self.g8.codes_t, self.g8.scale_t), (self.x8.codes_t, self.x8.scale_t)
        self.dw += linear.weight_gradient(*pair, self.dtype, self.dw.shape, self.options)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total` [m, n], float32."""
    in_place = _ADDS_IN_FLOAT32 and a.dtype is not torch.float32 and not ops.is_traced(a)
    if a.is_cuda and in_place:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    elif a.is_cuda or ops.is_traced(a):
        total += a @ b
    else:
        total.addmm_(a.float(), b.float())
