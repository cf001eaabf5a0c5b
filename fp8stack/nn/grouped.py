"""Products grouped over experts in FP8: the rows of each group are multiplied by the group's own matrix.

    forward    y[g]  = x[g]  @ w[g]         E4M3 × E4M3
    backward   dx[g] = dy[g] @ w[g].T       E4M3 × E4M3
               dw[g] = x[g].T @ dy[g]       E4M3 × E4M3

A mixture of experts has its tokens in the order of their experts, and `offs` says where each group ends, as for
`torch.nn.functional.grouped_mm`. One launch makes the products of all groups, whatever their sizes.

How. x, dy and the stack of matrices have one scale each, from their own amax. Hopper's grouped kernel is torch's
(`torch._scaled_grouped_mm`). It takes a scale for each row and column, so it gets the same one for all, and E4M3 only.
For the weight's gradient it wants groups of a multiple of 16 rows: `take_rows` writes the transposed codes with rows of
zeros between the groups. x is kept for backward in FP8 as it lies. The weight's codes for backward are made in forward
and kept for few rows, else made in backward, as those of layers (`casts.py`).

Sums are the fast ones, with fewer bits, in all three products: with the precise ones this kernel takes twice as long as
one in bfloat16 (32 groups of 1,024 rows, 1,024 × 1,536, on an H100: 384 µs; fast 134; bfloat16 190). Of 4,096 summands
the relative error is 0.21 %, precise 0.17, which is the result's rounding to bfloat16; rounding operands to E4M3 makes
3.7. `fp8_fast_accum=False` asks for precise sums. On a CPU each group is a product of `linear.py`.

Limits: sizes in multiples of 16; on a GPU, compute capability 9.0 and results rounded to bfloat16. `grouped_matmul`
reads and writes x, y and their gradients once more each, for the rows from offs[-1] on.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import ModelError
from fp8stack.formats import E4M3, FLOATS
from fp8stack.kernels import ops
from fp8stack.kernels.reference.cast import ALIGNMENT
from fp8stack.kernels.reference.rows import rows_needed

from . import casts, linear
from .bf16_storage import output_dtype

_kernel: Any = getattr(torch, "_scaled_grouped_mm", None)


def grouped_matmul(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """Multiply groups of rows by a matrix each, in FP8, as `torch.nn.functional.grouped_mm` does in bfloat16.

    Args:
        x: float32, bfloat16 or float16 [rows, in], the rows of a group next to each other.
        weight: the matrices [groups, in, out]; a stack [groups, out, in] goes as its `transpose(1, 2)`.
        offs: int32 [groups], the row behind the last one of each group. Groups may be empty.

    Returns:
        [rows, out] in the dtype of x, or autocast's. Rows from offs[-1] on are zero.

    Raises:
        ModelError: if the shapes do not fit, a size is no multiple of 16, or the GPU has no such product.
    """
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, offs {tuple(offs.shape)}"
    fits = (x.dim(), weight.dim(), offs.dim()) == (2, 3, 1)
    if not fits or x.shape[1] != weight.shape[1] or len(offs) != len(weight):
        raise ModelError(
            f"grouped_matmul got {shapes}; it takes x [rows, in], weight [groups, in, out] and offs [groups]."
        )
    if x.dtype not in FLOATS or weight.dtype not in FLOATS or offs.is_floating_point():
        told = f"{x.dtype}, {weight.dtype} and {offs.dtype}"
        raise ModelError(
            f"grouped_matmul got {told}; it takes float32, bfloat16 or float16, and int32 offs."
        )
    if not x.is_cuda and not torch.compiler.is_compiling():
        ends = [0, *offs.tolist()]
        if ends != sorted(ends) or ends[-1] > len(x):
            raise ModelError(
                f"grouped_matmul got offs {ends[1:]}, which do not rise to {len(x)} rows at most."
            )
    if reason := obstacle(weight):
        raise ModelError(f"grouped_matmul got {shapes}: {reason}.")
    return multiply_some(x, weight, offs, casts.DEFAULT, True)


def multiply_some(
    x: Tensor, weight: Tensor, offs: Tensor, products: casts.Products, train: bool
) -> Tensor:
    """Return the grouped product, with zeros from offs[-1] on, whatever x has there, and so have gradients."""
    if not len(x):
        return x @ weight.sum(0).to(x.dtype)
    inside = torch.arange(len(x), device=x.device)[:, None] < offs[-1]
    turned = weight.is_contiguous()  # [groups, in, out] as it lies, not [groups, out, in]
    stack = weight if turned else weight.mT
    y = multiply(torch.where(inside, x, 0), stack, turned, offs, products, train)
    return torch.where(inside, y, 0)


def obstacle(weight: Tensor) -> str:
    """Return why products by a stack of matrices [groups, in, out] are not made in FP8, or an empty string."""
    if any(size % ALIGNMENT for size in weight.shape[1:]):
        return f"grouped products in FP8 take sizes in multiples of {ALIGNMENT}"
    if not weight.is_contiguous() and not weight.mT.is_contiguous():
        return "its stack of matrices is neither contiguous nor a transpose of what is"
    if not weight.is_cuda:
        return ""
    if _kernel is None:
        return f"torch {torch.__version__} has no grouped products in FP8; newer ones do"
    major, minor = torch.cuda.get_device_capability(weight.device)
    told = f"grouped products in FP8 need compute capability 9.0, this is {major}.{minor}"
    return told if major != 9 else ""


def multiply(
    x: Tensor,  # [rows, in]
    stack: Tensor,  # contiguous, [groups, out, in], or [groups, in, out] if it is turned
    turned: bool,
    offs: Tensor,  # [groups]
    products: casts.Products,
    train: bool,
) -> Tensor:  # [rows, out]
    """Return the grouped product in FP8, in the dtype of x or autocast's. There is no obstacle.

    On a GPU, rows from offs[-1] on are not defined, and those of x count for its scale.
    """
    return _multiply(x, stack, offs, [grouped_options(products, train, output_dtype(x), turned)])


@casts.operator("grouped(Tensor x, Tensor stack, Tensor offs")
def _multiply(x: Tensor, stack: Tensor, offs: Tensor, options: list[casts.Options]) -> Tensor:
    result: Tensor = _GroupedMatmul.apply(x, stack, offs.int(), *options)
    return result


def grouped_options(
    products: casts.Products, train: bool, dtype: torch.dtype, turned: bool
) -> casts.Options:
    """Return the settings of a grouped product: scales are current ones, where the recipe's may be of blocks."""
    fast = products.fast_groups
    return products.options(train, dtype)._replace(turned=turned, fp8_recipe="current", fast=fast)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [rows, in]
        stack: Tensor,  # contiguous, [groups, out, in], or [groups, in, out] if options.turned
        offs: Tensor,  # int32 [groups]
        options: casts.Options,
    ) -> Tensor:  # [rows, out]
        x8 = casts.cast_matrix(x, E4M3, transposed=False)
        operand, w_scale, w_codes = cast_stack(stack, options, x.requires_grad, len(x8.codes))
        y = product(x8.codes, x8.scale, operand, w_scale, offs, options.dtype, options.fast)
        ctx.settings = options, x.shape, x.dtype
        ctx.save_for_backward(x8.codes, x8.scale, stack, w_codes, w_scale, offs)
        return linear.crop(y, (len(x), operand.shape[2]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return linear.backward_once(_backward, ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x_codes, x_scale, stack, w_codes, w_scale, offs = ctx.saved_tensors
    (options, x_shape, x_dtype), dx, dw = ctx.settings, None, None
    (need_x, need_w), _ = casts.runs(ctx, 2, options.traced(grad))
    g = casts.cast_matrix(grad, E4M3, transposed=False)
    if need_x:
        operand = stack_for_backward(stack, w_codes, w_scale, options)
        dx = product(g.codes, g.scale, *operand, offs, x_dtype, options.fast)
        dx = linear.crop(dx, x_shape)
    if need_w:
        index, ends = padded_rows(offs, len(grad))
        of_g, of_x = (ops.take_rows(codes, index, 1, False)[1] for codes in (g.codes, x_codes))
        dw = weight_gradient((of_g, g.scale), (of_x, x_scale), ends, stack.dtype, options)
    return dx, dw, None, None


def cast_stack(
    stack: Tensor, options: casts.Options, backward: bool, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a stack as the second operand of forward, [groups, in, out], its scale, and backward's codes or none."""
    codes, scale, codes_t, _ = casts.cast_weight(stack, options, backward, rows)
    return _operand(codes, len(stack), not options.turned), scale, codes_t


def stack_for_backward(
    stack: Tensor, codes: Tensor, scale: Tensor, options: casts.Options
) -> tuple[Tensor, Tensor]:
    """Return a stack as the second operand for the gradient of x, [groups, out, in], and its scale."""
    codes, scale = casts.weight_for_backward(stack, codes, scale, options)
    return _operand(codes, len(stack), options.turned), scale


def _operand(codes: Tensor, groups: int, in_rows: bool) -> Tensor:
    """Return codes [groups · n, k], or [n, groups · k] if not `in_rows`, as [groups, k, n] of which k is contiguous."""
    if in_rows:
        return codes.view(groups, -1, codes.shape[1]).mT
    return codes.view(len(codes), groups, -1).permute(1, 2, 0)


def padded_rows(offs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return which row to take for each of those of groups padded to multiples of 16, -1 for none, and their ends.

    Both are int32, as those of `ops.route`.
    """
    n = rows_needed(rows, len(offs))
    starts = nn.functional.pad(offs[:-1], (1, 0))
    sizes = (offs - starts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = sizes.cumsum(0, dtype=torch.int32)
    place = torch.arange(n, device=offs.device, dtype=torch.int32)
    group = torch.searchsorted(ends, place, right=True).clamp(max=len(offs) - 1)
    row = place + (starts - ends + sizes)[group]
    index = torch.where(row < offs[group], row, -1)
    return index.int(), nn.functional.pad(ends[:-1], (0, 1), value=n)


def product(
    a: Tensor,  # FP8 codes [rows, k], contiguous
    a_scale: Tensor,  # float32, 0-d
    b: Tensor,  # FP8 codes [groups, k, n], or [k, n], of which k is in groups; k is contiguous
    b_scale: Tensor,
    offs: Tensor,  # int32 [groups]; of k they are multiples of 16
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:  # [rows, n] in dtype; with k in groups [groups, rows, n]
    """Return (a × a_scale) @ (b × b_scale), each group of rows by its own matrix, or each group of k by itself."""
    if not a.is_cuda:
        made: Tensor = _product_on_cpu(a, b, a_scale, b_scale, offs, dtype)
        return made
    rows, cols = len(a), b.shape[-1]
    of_k = len(offs) * rows, len(offs) * cols
    sizes: Any = of_k if b.dim() == 2 else (rows, (len(offs), cols))
    scales = (s.expand(n).contiguous() for s, n in zip((a_scale, b_scale), sizes, strict=True))
    y: Tensor = _kernel(a, b, *scales, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return y.to(dtype)


def weight_gradient(
    g: tuple[Tensor, Tensor],  # codes [out, rows] of the output's gradient, in padded groups; scale
    x: tuple[Tensor, Tensor],  # codes [in, rows] of the input, and scale
    ends: Tensor,  # int32 [groups], multiples of 16
    dtype: torch.dtype,
    options: casts.Options,
) -> Tensor:
    """Return the gradient of a stack [groups, out, in], or [groups, in, out] if it is turned."""
    a, (b, b_scale) = (x, g) if options.turned else (g, x)
    return product(*a, b.t(), b_scale, ends, dtype, options.fast)


@torch.library.custom_op("fp8stack_cpu::scaled_grouped_mm", mutates_args=())
def _product_on_cpu(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, dtype: torch.dtype
) -> Tensor:
    """Do what torch's kernel does on a GPU: of a [rows, k] and b [groups, k, n], or of a [m, k] and b [k, n] in groups
    of k."""
    y: Tensor = _shape_of_product(a, b, a_scale, b_scale, offs, dtype).zero_()
    ends = [0, *offs.tolist()]
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        if start < end:
            of_k = b.dim() == 2
            left, right = (a[:, start:end], b[start:end]) if of_k else (a[start:end], b[i])
            left, right = left.contiguous(), right.t().contiguous()
            made = linear.product(left, a_scale, right, b_scale, dtype)
            (y[i] if of_k else y[start:end]).copy_(made)
    return y


@_product_on_cpu.register_fake
def _shape_of_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, offs: Tensor, dtype: torch.dtype
) -> Tensor:
    shape = (*offs.shape, len(a), b.shape[-1])  # of groups each
    return a.new_empty(shape if b.dim() == 2 else shape[1:], dtype=dtype)
