"""The Triton kernels that cast and quantize against the reference, bit for bit: in Triton's interpreter on a CPU,
compiled on a GPU. The kernels of a step are in `test_triton_step.py`, their codecs in `test_codecs.py`.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from helpers import DTYPES, NAN, OCP, assert_same_bits, every_two

from fp8stack.formats import E4M3, FORMATS
from fp8stack.kernels import ops
from fp8stack.kernels import quantize as triton_quantize
from fp8stack.kernels.fp8 import decode as triton_decode
from fp8stack.kernels.fp8 import encode as triton_encode
from fp8stack.kernels.reference import fp8 as reference_fp8
from fp8stack.kernels.reference import quantize as reference_quantize

# codes of 4 bits are quantized by the reference alone
EIGHT_BITS = [f for f in FORMATS.values() if f.bits == 8]
ALL = pytest.mark.parametrize("fmt", EIGHT_BITS, ids=[f.name for f in EIGHT_BITS])
SHAPES = [
    (), (1,), (7,), (128,), (129,), (0,), (0, 4), (4, 0), (3, 5), (4, 128), (5, 200), (2, 3, 64), (17, 256), (9, 130)
]  # fmt: skip
LARGE = pytest.mark.parametrize("shape", [(4096, 4100), (4096, 4096), (70001, 129)], ids=str)
HOW = triton_quantize._quantize_blocks_kernel.options


@triton.jit
def _encode_kernel(x_ptr, codes_ptr, numel, M: tl.constexpr, E: tl.constexpr, MAX: tl.constexpr):
    offset = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x = tl.load(x_ptr + offset, mask=offset < numel, other=0.0)
    tl.store(codes_ptr + offset, triton_encode(x, M, E, MAX), mask=offset < numel)


@triton.jit
def _decode_kernel(codes_ptr, out_ptr, M: tl.constexpr, E: tl.constexpr, SIGNED: tl.constexpr):
    offset = tl.arange(0, 256)
    tl.store(out_ptr + offset, triton_decode(tl.load(codes_ptr + offset), M, E, SIGNED))


# --- single casts


@OCP
def test_every_cast_is_the_references(fmt, kernel_device, special_values, random_bits):
    x = torch.cat([special_values(fmt), random_bits(20_000), torch.randn(5_000)])
    codes = torch.empty(len(x), dtype=torch.int32, device=kernel_device)
    _encode_kernel[(triton.cdiv(len(x), 1024),)](
        x.to(kernel_device), codes, len(x), fmt.mantissa_bits, fmt.min_exponent, fmt.max,
        **HOW,
    )  # fmt: skip
    assert_same_bits(codes, reference_fp8.encode(x, fmt).int())


@ALL
def test_every_finite_code_decodes_as_in_the_reference(fmt, kernel_device):
    codes = torch.arange(256).to(torch.uint8)
    values = torch.empty(256, device=kernel_device)
    _decode_kernel[(1,)](
        codes.to(kernel_device), values, fmt.mantissa_bits, fmt.min_exponent, fmt.signed,
        **HOW,
    )  # fmt: skip
    expected = reference_fp8.decode(codes, fmt)
    finite = expected.isfinite()
    if fmt.squared and fmt.dtype is not torch.uint8:
        finite[128:] = False  # the codes of a root have no sign
    assert_same_bits(values.cpu()[finite], expected[finite])


# --- quantize and dequantize


def assert_quantizes_as_reference(x, fmt, device):
    x = x.abs() if fmt.squared else x
    codes, scale = triton_quantize.quantize_blocks(x.to(device), fmt)
    expected_codes, expected_scale = reference_quantize.quantize_blocks(x, fmt)
    assert_same_bits(codes, expected_codes, "codes")
    assert_same_bits(scale, expected_scale, "scale")
    return expected_codes, expected_scale


@every_two(3, fmt=EIGHT_BITS, dtype=DTYPES.values(), shape=SHAPES)
def test_blocks_quantize_as_in_the_reference(fmt, dtype, shape, kernel_device, rough):
    assert_quantizes_as_reference(torch.randn(shape).to(dtype), fmt, kernel_device)
    assert_quantizes_as_reference(rough(shape, dtype), fmt, kernel_device)


@ALL
@pytest.mark.parametrize("count", [30_000, pytest.param(2**24, marks=pytest.mark.gpu)])
def test_special_values_and_all_exponents_quantize_as_in_the_reference(
    fmt, count, kernel_device, special_values, random_bits
):
    """Random bits give blocks of one large value and many zeros; sorted, blocks of neighbours in size.

    Codecs of optimizer states divide by float16's unit first, which costs bits above 2^114. No moment comes near: a
    gradient of 2^63 counts as infinite.
    """
    x = random_bits(count)
    if fmt.dtype is torch.uint8:
        x = x.clamp(-(2.0**100), 2.0**100)
    assert_quantizes_as_reference(x, fmt, kernel_device)
    assert_quantizes_as_reference(x.sort().values, fmt, kernel_device)
    special = special_values(fmt)
    special = special[special.abs() <= fmt.max]
    rows = torch.full((len(special) // 127 + 1, 128), fmt.max)
    rows[:, 1:] = torch.cat([special, special])[: len(rows) * 127].reshape(-1, 127)
    assert_quantizes_as_reference(rows.square() if fmt.squared else rows, fmt, kernel_device)


@ALL
def test_views_quantize_as_in_the_reference(fmt, kernel_device):
    x = torch.randn(6, 300, 4)
    for view in (x.transpose(0, 2), x[::2], x[:, 5:150], x[1, :, 2]):
        on_device = x.abs() if fmt.squared else x
        codes, scale = triton_quantize.quantize_blocks(
            on_device.to(kernel_device).as_strided(view.shape, view.stride(), view.storage_offset()), fmt
        )  # fmt: skip
        expected = reference_quantize.quantize_blocks(view.abs() if fmt.squared else view, fmt)
        assert_same_bits(codes, expected[0])
        assert_same_bits(scale, expected[1])


@OCP
def test_many_tensors_quantize_at_once_as_one_by_one(fmt, kernel_device, rough, monkeypatch):
    """Of all dtypes and layouts, some a view, one with more blocks than its programs take in one go."""
    if kernel_device == "cpu":
        monkeypatch.setattr(triton_quantize, "PROGRAMS", 2)
    large = (70_000, 200) if kernel_device == "cuda" else (60, 200)
    shapes = [large, *SHAPES]
    tensors = [rough(s, d) for s in shapes for d in (torch.float32, torch.bfloat16, torch.float16)]
    flat = torch.randn(1001)
    tensors += [torch.randn(128, 40).t(), flat[1:].view(100, 10), flat[1:513].view(4, 128)]
    here = [t.to(kernel_device) for t in tensors]
    here[-2:] = [
        flat.to(kernel_device)[1:].view(100, 10),
        flat.to(kernel_device)[1:513].view(4, 128),
    ]
    places, sizes = reference_quantize.places_in_list(tuple(x.shape for x in tensors))
    codes = torch.zeros(sizes[0], dtype=fmt.dtype, device=kernel_device)
    scales = torch.full(sizes[1:], NAN, device=kernel_device)
    at = codes.data_ptr(), scales.data_ptr()
    results = [(at[0] + place, at[1] + 4 * scale_place) for place, scale_place in places]
    triton_quantize.quantize_list(here, fmt, results)
    for x, place in zip(tensors, places, strict=True):
        for made, i, expected in zip(
            (codes, scales), place, reference_quantize.quantize_blocks(x, fmt), strict=True
        ):
            assert_same_bits(reference_quantize.part_of(made, i, expected.shape), expected)


def test_many_tensors_are_limited_at_once_as_one_by_one(kernel_device, rough):
    there = [reference_quantize.quantize_blocks(rough(s), E4M3) for s in SHAPES]
    here = [tuple(t.clone().to(kernel_device) for t in parts) for parts in there]
    for low, high in ((-math.inf, 0.5), (-0.25, math.inf)):
        triton_quantize.clamp_list(here, low, high)
        ops.clamp_list(there, low, high)  # the reference
        for ours, theirs in zip(here, there, strict=True):
            assert_same_bits([t.cpu() for t in ours], list(theirs))


@every_two(3, fmt=EIGHT_BITS, dtype=DTYPES.values(), shape=SHAPES)
def test_blocks_dequantize_as_in_the_reference(fmt, dtype, shape, kernel_device, rough):
    x = rough(shape)
    codes, scale = reference_quantize.quantize_blocks(x.abs() if fmt.squared else x, fmt)
    values = triton_quantize.dequantize_blocks(
        codes.to(kernel_device), scale.to(kernel_device), fmt, dtype
    )
    expected = reference_quantize.dequantize_blocks(codes, scale, fmt, dtype)
    assert values.dtype is dtype
    assert_same_bits(values, expected, "values")


@ALL
def test_blocks_of_huge_values_quantize_as_in_the_reference(fmt, kernel_device):
    assert_quantizes_as_reference(torch.randn(64, 512) * 2.0**125, fmt, kernel_device)


# --- sizes for a GPU only


@pytest.mark.gpu
@ALL
@LARGE
def test_large_blocks_quantize_and_dequantize_as_in_the_reference(fmt, shape, random_bits):
    rare = random_bits(math.prod(shape)).reshape(shape)
    x = torch.where(torch.rand(shape) < 0.01, rare, torch.randn(shape))
    codes, scale = assert_quantizes_as_reference(x, fmt, "cuda")
    values = triton_quantize.dequantize_blocks(codes.cuda(), scale.cuda(), fmt, torch.bfloat16)
    expected = reference_quantize.dequantize_blocks(codes, scale, fmt, torch.bfloat16)
    assert_same_bits(values, expected, "values")
