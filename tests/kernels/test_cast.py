"""Casts of whole matrices: what they are, and the Triton kernels against the reference, bit for bit.

In Triton's interpreter on a CPU, compiled on a GPU. Delayed scaling is in `test_cast_delayed.py`.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers import INF, INPUTS, NAN, OCP, assert_same_bits, every_two, nearest, quantize_tensor

from fp8stack.capability import native_recipe
from fp8stack.formats import E4M3, E5M2, LEAST_SCALE
from fp8stack.kernels import cast as triton_cast
from fp8stack.kernels import cast_blocks as triton_blocks
from fp8stack.kernels import cast_rows as triton_rows
from fp8stack.kernels import ops
from fp8stack.kernels.reference import cast as reference_cast
from fp8stack.kernels.reference import cast_blocks as reference_blocks
from fp8stack.kernels.reference import cast_rows as reference_rows
from fp8stack.kernels.reference.cast import TOKENS, aligned
from fp8stack.kernels.reference.cast_rows import parts_of
from fp8stack.kernels.reference.quantize import quantize_blocks

SHAPES = [
    (1, 1), (1, 130), (130, 1), (16, 16), (3, 5), (17, 33), (64, 128), (128, 128), (65, 130), (2, 3, 40), (70,)
]  # fmt: skip
LARGE = [(4096, 4100), (4096, 4096), (70001, 129), (3, 2**17), (2**17, 3), (8192, 8320)]


def by_rows(kernels):
    """Return a cast by rows, and the scale that its parts give the transpose."""

    def run(x, fmt):
        *results, parts = kernels.cast_rows(x, fmt)
        return *results, ops.cast(x, fmt, False, False, parts)[2]

    return run


def recasting(recast, factor):
    """Return a cast of a matrix whose last scale was `factor` times its own."""

    def run(x, fmt, *options):
        own = ops.cast(x, fmt, False, False)[2].nan_to_num(1.0)
        return recast(x, fmt, own * factor, *options)

    return run


RECASTS = {  # the scale of before is kept, or is not
    f"recast, {what}": tuple(recasting(k.recast, factor) for k in (triton_cast, reference_cast))
    for what, factor in {"kept": 0.98, "grown": 0.5, "shrunk": 3.0}.items()
}
KERNELS = RECASTS | {
    "cast": (triton_cast.cast, reference_cast.cast),
    "cast_rows": (by_rows(triton_rows), by_rows(reference_rows)),
    "cast_1x128": (triton_blocks.cast_1x128, reference_blocks.cast_1x128),
    "cast_1x128, squares": tuple(
        partial(k.cast_1x128, squares_t=True) for k in (triton_blocks, reference_blocks)
    ),
    "cast_128x128": (triton_blocks.cast_128x128, reference_blocks.cast_128x128),
}
ALL = pytest.mark.parametrize("kernel", KERNELS)


def assert_casts_as_reference(kernel, x, fmt, device, *options):
    """Compare all results: codes, their transpose, scales. `x` may be a view, which is rebuilt on the device."""
    triton, reference = KERNELS[kernel]
    base = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    view = base.as_strided(x.shape, x.stride(), x.storage_offset())
    results, expected = triton(view, fmt, *options), reference(x, fmt, *options)
    for i, (result, same) in enumerate(zip(results, expected, strict=True)):
        assert_same_bits(result, same, f"{kernel}, result {i}")
        if result.dtype is torch.float32 and result.numel():  # as cuBLAS reads scales
            assert result.ndim == 0 or result.stride(0) == same.stride(0) == 1
    return expected


def fitting(kernel, shape):
    """Return the shape, as a matrix for the kernel that takes no other."""
    return (math.prod(shape[:-1]), shape[-1]) if kernel == "cast_128x128" else shape


# --- what a cast is


@OCP
@INPUTS
@pytest.mark.parametrize("shape", [*SHAPES, (0, 4), (2, 0, 40)], ids=str)
def test_a_cast_is_the_quantized_tensor_padded_with_zeros_in_both_layouts(
    fmt, dtype, shape, device
):
    x = torch.randn(shape).to(dtype)
    codes, codes_t, scale = (t.cpu() for t in ops.cast(x.to(device), fmt))
    expected, expected_scale = quantize_tensor(x, fmt)
    rows, cols = math.prod(shape[:-1]), shape[-1]
    whole = torch.zeros(aligned(rows), aligned(cols), dtype=torch.uint8)
    whole[:rows, :cols] = expected.view(torch.uint8).reshape(rows, cols)
    assert_same_bits(codes.view(torch.uint8), whole)
    assert_same_bits(codes_t.view(torch.uint8), whole.t().contiguous())
    assert_same_bits(scale, expected_scale)
    if x.numel():  # by numpy's float32, and a search for the nearest value
        by_hand = np.abs(x.float().numpy()).max() / np.float32(fmt.max)
        assert_same_bits(scale, torch.tensor(by_hand))
        scaled = torch.from_numpy(np.asarray(x.float().numpy() * (np.float32(1) / by_hand)))
        assert_same_bits(expected.float(), nearest(scaled, fmt).float())


@OCP
@INPUTS
@pytest.mark.parametrize("shape", [*SHAPES, (5, 8200), (0, 4), (2, 0, 40)], ids=str)
def test_a_cast_by_rows_is_that_of_each_row(fmt, dtype, shape, device):
    x = torch.randn(shape).to(dtype)
    codes, scale, parts = ops.cast_rows(x.to(device), fmt)
    matrix = x.reshape(-1, shape[-1])
    assert codes.shape == (aligned(len(matrix), TOKENS), aligned(shape[-1]))
    assert parts.shape == (parts_of(len(codes)),)
    assert codes[len(matrix) :].float().eq(0).all()
    assert scale[len(matrix) :].eq(0).all()
    for row, its_codes, its_scale in zip(matrix, codes.cpu(), scale.cpu(), strict=False):
        expected, expected_scale = quantize_tensor(row, fmt)
        assert_same_bits(its_codes[: len(row)], expected)
        assert its_codes[len(row) :].float().eq(0).all()
        assert_same_bits(its_scale, expected_scale)
    if x.numel():  # what makes the transpose
        given = ops.cast(x.to(device), fmt, False, True, parts, TOKENS)
        assert_same_bits(given, ops.cast(x.to(device), fmt, False, True, None, TOKENS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_of_rows_are_those_of_their_values(dtype, device):
    if device == "cuda" and not native_recipe("tokenwise", "cuda"):
        pytest.skip("no products by rows")
    x = torch.randn(100, 200) * torch.logspace(-4, 2, 100).unsqueeze(1)
    w = torch.randn(48, 200)
    codes, scale, _ = ops.cast_rows(x.to(device), E4M3)
    w_codes, _, w_scale = ops.cast(w.to(device), E4M3)
    y = ops.matmul_rows(codes, scale, w_codes, w_scale, dtype, False)
    values = codes.cpu().double() * scale.cpu().double().unsqueeze(1)
    exact = values @ (w_codes.cpu().double() * w_scale.cpu().double()).t()
    error = (y.cpu().double() - exact).abs()
    # The rounding of y; and Hopper adds 32 products to a sum at a time, of each of which it keeps 2^-13 of the largest.
    largest = (
        values.abs().amax(1, keepdim=True)
        * w_codes.cpu().double().abs().amax()
        * w_scale.cpu().double()
    )
    added = -(-codes.shape[1] // 32) * 33 * 2.0**-13 * largest
    assert y.dtype is dtype
    assert (error <= torch.finfo(dtype).eps / 2 * exact.abs() + added).all()


@OCP
@pytest.mark.parametrize("kernel", ["cast", *RECASTS])
def test_a_layout_that_was_not_asked_for_is_empty(kernel, fmt, kernel_device):
    for cast, device in zip(KERNELS[kernel], (kernel_device, "cpu"), strict=True):
        x = torch.randn(20, 140, device=device)
        codes, codes_t, scale = cast(x, fmt)
        for wanted in ((True, False), (False, True), (False, False)):
            results = (
                codes if wanted[0] else codes[:0, :0],
                codes_t if wanted[1] else codes_t[:0, :0],
                scale,
            )
            assert_same_bits(cast(x, fmt, *wanted), results)


@pytest.mark.parametrize("kernel", ["cast_1x128", "cast_1x128, squares", "cast_128x128"])
@pytest.mark.parametrize("shape", [(20, 140), (128, 512)], ids=str)
def test_a_layout_of_blocks_that_was_not_asked_for_is_empty(kernel, shape, kernel_device):
    for cast, device in zip(KERNELS[kernel], (kernel_device, "cpu"), strict=True):
        x = torch.randn(shape, device=device)
        both = cast(x, E4M3)
        for wanted in ((True, False), (False, True), (False, False)):
            kept = [each if wanted[i // 2] else each[:0, :0] for i, each in enumerate(both)]
            assert_same_bits(cast(x, E4M3, *wanted), tuple(kept))


@OCP
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_amax_that_is_given_is_taken_as_it_is(fmt, dtype, kernel_device):
    x = torch.randn(20, 130)
    assert_same_bits(reference_cast.cast(x, fmt, amax=x.abs().amax()), reference_cast.cast(x, fmt))
    for amax in (0.0, 1e-38, 0.5, 8.0, NAN, INF):
        given = torch.tensor(amax, dtype=dtype)
        expected = reference_cast.cast(x, fmt, amax=given)
        here = x.to(kernel_device), fmt, True, True, given.to(kernel_device)
        assert_same_bits(triton_cast.cast(*here), expected)
        if amax == 0.5:
            assert float(expected[2]) == pytest.approx(0.5 / fmt.max)
            assert expected[0].float()[:20, :130][x.abs() >= 0.5].abs().eq(fmt.max).all()


@OCP
@INPUTS
@pytest.mark.parametrize("shape", [(1, 1), (130, 260), (128, 128), (2, 3, 40)], ids=str)
def test_a_cast_by_rows_of_128_is_that_of_the_blocks_of_the_matrix_and_of_its_transpose(
    fmt, dtype, shape, device
):
    x = torch.randn(shape).to(dtype)
    codes, scale, codes_t, scale_t = (t.cpu() for t in ops.cast_1x128(x.to(device), fmt))
    x = x.reshape(-1, shape[-1])
    rows, cols = x.shape
    whole = torch.zeros(aligned(rows, 128), aligned(cols, 128), dtype=dtype)
    whole[:rows, :cols] = x
    for matrix, given, its_scale in ((whole, codes, scale), (whole.t(), codes_t, scale_t)):
        expected, expected_scale = quantize_blocks(matrix.contiguous(), fmt)
        assert_same_bits(given, expected)
        assert_same_bits(its_scale, expected_scale)
        assert its_scale.stride(0) == 1 or not len(its_scale)  # as cuBLAS reads it


@OCP
@pytest.mark.parametrize("shape", [(1, 1), (130, 260), (128, 128), (600, 40), (0, 4)], ids=str)
def test_a_cast_by_squares_is_that_of_each_square(fmt, shape, device):
    x = torch.randn(shape)
    codes, scale, codes_t, scale_t = (t.cpu() for t in ops.cast_128x128(x.to(device), fmt))
    down, across = (aligned(size, 128) // 128 for size in shape)
    assert codes.shape == (128 * down, 128 * across)
    assert_same_bits(codes_t, codes.t().contiguous())
    assert scale.shape == (aligned(across, 4), down)
    assert scale_t.shape == (aligned(down, 4), across)
    assert scale[across:].eq(0).all()
    assert_same_bits(scale_t[:down], scale[:across].t())
    assert scale.stride(0) == scale_t.stride(0) == 1 or not scale.numel()
    for r in range(down):
        for c in range(across):
            part = torch.zeros(128, 128)
            square = x[128 * r : 128 * (r + 1), 128 * c : 128 * (c + 1)]
            part[: square.shape[0], : square.shape[1]] = square
            expected, expected_scale = quantize_tensor(part, fmt)
            assert_same_bits(
                codes[128 * r : 128 * (r + 1), 128 * c : 128 * (c + 1)].contiguous(), expected
            )
            assert_same_bits(scale[c, r], expected_scale)


@OCP
@pytest.mark.parametrize("shape", [(1, 1), (130, 260), (2, 3, 40), (600, 40), (0, 4)], ids=str)
def test_a_cast_with_a_transpose_in_squares_is_one_layout_of_each_other_cast(fmt, shape, device):
    x = torch.randn(shape, device=device)
    found = ops.cast_1x128(x, fmt, squares_t=True)
    by_row, squares = ops.cast_1x128(x, fmt), ops.cast_128x128(x.reshape(-1, shape[-1]), fmt)
    assert_same_bits(found, (*by_row[:2], *squares[2:]))
    assert found[3].stride() == squares[3].stride()


def test_the_error_of_squares_is_a_little_above_that_of_rows():
    """Of a weight's gradient, with columns and rows of outliers, and gradients of tokens of all sizes."""
    x = torch.randn(2048, 512)
    x[:, ::200] *= 50
    x[::400] *= 50
    g = torch.randn(2048, 256) * torch.exp(2 * torch.randn(2048, 1))
    a, found = reference_blocks.cast_1x128(g, E4M3, False)[2:], []
    for squares in (False, True):
        b = reference_blocks.cast_1x128(x, E4M3, False, True, squares)[2:]
        dw = reference_blocks.matmul_blocks(*a, *b, torch.float32)
        exact = g.double().t() @ x.double()
        found.append(float((dw - exact).norm() / exact.norm()))
    assert 0.02 < found[0] < found[1] * 1.02
    assert found[1] < found[0] * 1.15


def test_shapes_tell_scales_of_rows_from_those_of_squares():
    """Also where both have as many rows: 128 × 128 blocks, of one square each."""
    sizes = [128, 256, 384, 512, 640, 2**14, 2**15, 2**16]
    for rows in sizes:
        for cols in sizes:
            x = torch.empty(rows, cols, device="meta")
            for squares in (False, True):
                codes, scale, codes_t, scale_t = reference_blocks.results(
                    x, E4M3, (squares, squares)
                )
                assert reference_blocks.in_squares(codes, scale) is squares
                assert reference_blocks.in_squares(codes_t, scale_t) is squares


@pytest.mark.parametrize("squares", ["b", "a", "neither"], ids=["weight", "input", "neither"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_product_of_blocks_is_that_of_their_values(squares, dtype, device):
    if device == "cuda" and not native_recipe("blockwise", "cuda"):
        pytest.skip("cuBLAS has no block scales on this GPU")
    x = torch.randn(130, 300) * torch.logspace(-3, 3, 300)
    w = torch.randn(520, 300) * torch.logspace(2, -2, 520)[:, None]
    a, b = (
        (ops.cast_128x128 if squares == name else ops.cast_1x128)(t.to(device), E4M3)[:2]
        for name, t in (("a", x), ("b", w))
    )
    y = ops.matmul_blocks(*a, *b, dtype)
    assert y.shape == (256, 640)
    assert y.dtype is dtype
    y = y[:130, :520].cpu().double()
    exact = x.double() @ w.double().t()
    size = x.double().abs() @ w.double().t().abs()
    # both operands round by 2^-4 of a normal value at most, or 2^-10 of the block's scale, which is amax / 448
    assert ((y - exact).abs() <= 0.13 * size + 1e-3 * size.amax()).all()
    assert (y - exact).norm() < 0.04 * exact.norm()


# --- Triton against the reference


OF_VALUES = {
    "e4m3-fp32-large": (E4M3, torch.float32, 1e30), "e5m2-fp32-small": (E5M2, torch.float32, 1e-30),
    "e5m2-bf16": (E5M2, torch.bfloat16, 1), "e4m3-fp16": (E4M3, torch.float16, 6e4),
}  # fmt: skip


@every_two(4, kernel=KERNELS, values=OF_VALUES, shape=SHAPES)
def test_matrices_cast_as_in_the_reference(
    kernel, values, shape, kernel_device, rough, small_tiles
):
    """Ordinary values; values of all exponents up to a limit; and those with NaN and infinity among them."""
    fmt, dtype, limit = OF_VALUES[values]
    x = rough(fitting(kernel, shape), dtype, limit)
    assert_casts_as_reference(kernel, x, fmt, kernel_device)
    x = x.nan_to_num(limit, -limit / 3, limit / 7)
    scales = assert_casts_as_reference(kernel, x, fmt, kernel_device)
    assert all(s.isfinite().all() for s in scales if s.dtype is torch.float32)
    assert_casts_as_reference(kernel, torch.randn(x.shape).to(dtype), fmt, kernel_device)


@pytest.mark.parametrize("kernel", [k for k in KERNELS if "1x128" not in k])
def test_no_rows(kernel, kernel_device):
    for fmt in (E4M3, E5M2):
        assert_casts_as_reference(kernel, torch.empty(0, 40), fmt, kernel_device)


@ALL
@OCP
def test_special_values_cast_as_in_the_reference(kernel, fmt, kernel_device, special_values):
    """Every code, midpoint and neighbour of one; a first column of the format's maximum makes each scale 1."""
    special = special_values(fmt)
    special = special[special.abs() <= fmt.max]
    x = torch.full((len(special) // 255 + 1, 256), fmt.max)
    x[:, 1:] = special.repeat(2)[: x[:, 1:].numel()].reshape(-1, 255)
    x[0] = fmt.max  # so that columns have it, too
    assert_casts_as_reference(kernel, x, fmt, kernel_device)


@ALL
def test_zeros_become_zeros_and_what_is_too_small_has_the_smallest_scale(
    kernel, kernel_device, small_tiles
):
    for size, code in ((0.0, 0), (-0.0, 0), (2.0**-149, 0), (2.0**-136, 1), (2.0**-121, 0x68)):
        x = torch.full((20, 140), size)
        results = assert_casts_as_reference(kernel, x, E4M3, kernel_device)
        scales = [t for t in results if t.dtype is torch.float32]
        codes = [t.contiguous().view(torch.uint8) for t in results if t.dtype is E4M3.dtype]
        for scale in scales:  # a recast may keep one that is up to twice as large
            assert 0.9 < scale.amax() / LEAST_SCALE < 2 if size > 0 else scale.eq(0).all()
        assert all(t.amax() == code for t in codes)


@every_two(3, kernel=KERNELS, bad=[NAN, INF, -INF], position=[(0, 0), (69, 129), (128, 256)])
def test_one_value_that_is_not_finite_makes_its_scale_nan(
    kernel, bad, position, kernel_device, small_tiles
):
    x = torch.randn(129, 257)
    x[position] = bad
    results = assert_casts_as_reference(kernel, x, E4M3, kernel_device)
    if "x128" not in kernel:
        assert results[2].isnan()
        bad_rows = slice(position[0], position[0] + 1) if kernel == "cast_rows" else slice(None)
        assert results[0][bad_rows].view(torch.uint8).eq(0).all()
    else:
        r, c = position
        first, second = (c // 128, r // 128) if kernel == "cast_128x128" else (r, c // 128)
        assert results[1].isnan().nonzero().tolist() == [[first, second]]
        first, second = (r // 128, c // 128) if kernel != "cast_1x128" else (c, r // 128)
        assert results[3].isnan().nonzero().tolist() == [[first, second]]


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(k, torch.bfloat16 if i % 2 else torch.float32) for i, k in enumerate(KERNELS)],
)
def test_views_cast_as_in_the_reference(kernel, dtype, kernel_device, small_tiles):
    """Transposed, strided, and contiguous ones that begin at any byte, which the next call may not have."""
    base = torch.randn(40 * 130 + 8).to(dtype)
    for offset in (0, 1, 4, 0):
        x = base[offset : offset + 40 * 130].view(40, 130)
        assert_casts_as_reference(kernel, x, E4M3, kernel_device)
    x = base[: 40 * 130].view(40, 130)
    for view in (x.t(), x[::2], x[:, 1:], x[:, ::3], x[5:6].expand(20, 130)):
        assert_casts_as_reference(kernel, view, E5M2, kernel_device)


def test_casts_do_not_share_their_results(kernel_device):
    """Scales come from pieces of one allocation, 64 in each; a matrix of many parts or tiles may be followed by one of
    a single one, and recasts by casts."""
    shapes = [(70, 240), *[(1, 1), (16, 128), (20, 20)] * 3]
    inputs = [torch.randn(shapes[i % 10]) * 2.0 ** (i % 7) for i in range(66)]
    kernels = [KERNELS["recast, kept"], KERNELS["recast, shrunk"]] * 33
    results = []
    for x, kernel in zip(inputs, kernels, strict=True):
        here = x.to(kernel_device)
        results.append((triton_cast.cast(here, E4M3), kernel[0](here, E4M3)))
    for x, kernel, (cast, recast) in zip(inputs, kernels, results, strict=True):
        assert_same_bits(cast, reference_cast.cast(x, E4M3))
        assert_same_bits(recast, kernel[1](x, E4M3))


# --- sizes for a GPU only


@pytest.mark.gpu
@ALL
@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(E4M3, torch.bfloat16), (E5M2, torch.float32)],
    ids=["e4m3-bf16", "e5m2-fp32"],
)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_matrices_cast_as_in_the_reference(kernel, fmt, dtype, shape):
    x = torch.randn(shape).to(dtype)
    x[-1, -1] = 300  # what makes the scale lies in the last tile
    assert_casts_as_reference(kernel, x, fmt, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["cast", *RECASTS])
def test_casts_on_two_streams_keep_apart(kernel):
    inputs = [torch.randn(2048, 2048, device="cuda") * 2.0**i for i in range(8)]
    cast, reference = KERNELS[kernel]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for i, x in enumerate(inputs):
            with torch.cuda.stream(streams[i % 2]):
                results.append(cast(x, E4M3))
    torch.cuda.synchronize()
    assert_same_bits(results, 5 * [reference(x.cpu(), E4M3) for x in inputs])
