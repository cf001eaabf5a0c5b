"""The Triton kernels against the reference, bit for bit: in Triton's interpreter on a CPU, compiled on a GPU.

The interpreter cuts float32 to bfloat16 instead of rounding; results that the kernels *store* in bfloat16 are compared
on a GPU only. `test_interpreter_rounds_to_bfloat16` says when that is over.
"""

import math

import pytest
import torch
import triton
import triton.language as tl
from helpers import assert_same_bits

from fp8stack.formats import E4M3, E5M2, FORMATS, S1E3M4, UE3M5
from fp8stack.kernels import adam as triton_adam
from fp8stack.kernels import quantize as triton_quantize
from fp8stack.kernels.fp8 import decode as triton_decode
from fp8stack.kernels.fp8 import encode as triton_encode
from fp8stack.kernels.reference import adam as reference_adam
from fp8stack.kernels.reference import fp8 as reference_fp8
from fp8stack.kernels.reference import quantize as reference_quantize
from fp8stack.kernels.reference.master import split

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from the interpreter

NAN, INF = math.nan, math.inf
ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
OCP = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = [
    (), (1,), (7,), (128,), (129,), (0,), (0, 4), (4, 0), (3, 5), (4, 128), (5, 200), (2, 3, 64), (17, 256), (40, 130)
]  # fmt: skip
LARGE = pytest.mark.parametrize("shape", [(4096, 4100), (4096, 4096), (70001, 129)], ids=str)
INPUTS = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
STORED_BFLOAT16 = pytest.mark.gpu  # see above


def gpu(*values):
    """Mark a parameter as one that only a real GPU computes, or that is too large for the interpreter."""
    return pytest.param(*values, marks=pytest.mark.gpu)


def rough(shape, random_bits, dtype=torch.float32):
    """Return values of every exponent in one third, of two sizes in the rest, with zeros, NaN and infinity."""
    x = torch.randn(shape)
    flat = x.view(-1)
    if len(flat) > 100:
        flat[: len(flat) // 3] = random_bits(len(flat) // 3)
        flat[len(flat) // 3 : len(flat) // 2] *= 1e-30
        flat[::7] = 0
        flat[5:95:30] = torch.tensor([NAN, INF, -0.0])
    return x.to(dtype)


@triton.jit
def _encode_kernel(
    x_ptr, codes_ptr, numel, M: tl.constexpr, E: tl.constexpr, MAX: tl.constexpr, SIGNED: tl.constexpr
):  # fmt: skip
    offset = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x = tl.load(x_ptr + offset, mask=offset < numel, other=0.0)
    tl.store(codes_ptr + offset, triton_encode(x, M, E, MAX, SIGNED), mask=offset < numel)


@triton.jit
def _decode_kernel(codes_ptr, out_ptr, M: tl.constexpr, E: tl.constexpr, SIGNED: tl.constexpr):
    offset = tl.arange(0, 256)
    tl.store(out_ptr + offset, triton_decode(tl.load(codes_ptr + offset), M, E, SIGNED))


@triton.jit
def _narrow_kernel(x_ptr, out_ptr):
    offset = tl.arange(0, 128)
    tl.store(out_ptr + offset, tl.load(x_ptr + offset).to(tl.bfloat16))


# --- single casts


@ALL
def test_every_cast_is_the_references(fmt, kernel_device, special_values, random_bits):
    x = torch.cat([special_values(fmt), random_bits(20_000), torch.randn(5_000)])
    x = x if fmt.signed else x.abs()
    codes = torch.empty(len(x), dtype=torch.int32, device=kernel_device)
    _encode_kernel[(triton.cdiv(len(x), 1024),)](
        x.to(kernel_device), codes, len(x), fmt.mantissa_bits, fmt.min_exponent, fmt.max, fmt.signed,
        **triton_quantize.LAUNCH,
    )  # fmt: skip
    assert_same_bits(codes, reference_fp8.encode(x, fmt).int())


@ALL
def test_every_finite_code_decodes_as_in_the_reference(fmt, kernel_device):
    codes = torch.arange(256).to(torch.uint8)
    values = torch.empty(256, device=kernel_device)
    _decode_kernel[(1,)](
        codes.to(kernel_device), values, fmt.mantissa_bits, fmt.min_exponent, fmt.signed,
        **triton_quantize.LAUNCH,
    )  # fmt: skip
    expected = reference_fp8.decode(codes, fmt)
    finite = expected.isfinite()
    assert_same_bits(values.cpu()[finite], expected[finite])


@pytest.mark.xfail(
    not torch.cuda.is_available(),
    strict=True,
    reason="Triton's interpreter cuts float32 to bfloat16",
)
def test_interpreter_rounds_to_bfloat16(kernel_device):
    x = torch.linspace(1, 2, 128)
    out = torch.empty(128, dtype=torch.bfloat16, device=kernel_device)
    _narrow_kernel[(1,)](x.to(kernel_device), out)
    assert_same_bits(out, x.bfloat16())


# --- quantize and dequantize


def assert_quantizes_as_reference(x, fmt, device):
    x = x.abs() if fmt.squared else x
    codes, scale = triton_quantize.quantize_blocks(x.to(device), fmt)
    expected_codes, expected_scale = reference_quantize.quantize_blocks(x, fmt)
    assert_same_bits(codes, expected_codes, "codes")
    assert_same_bits(scale, expected_scale, "scale")
    return expected_codes, expected_scale


@ALL
@INPUTS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_quantize_as_in_the_reference(fmt, dtype, shape, kernel_device, random_bits):
    assert_quantizes_as_reference(torch.randn(shape).to(dtype), fmt, kernel_device)
    assert_quantizes_as_reference(rough(shape, random_bits, dtype), fmt, kernel_device)


@ALL
@pytest.mark.parametrize("count", [30_000, gpu(2**24)])
def test_special_values_and_all_exponents_quantize_as_in_the_reference(
    fmt, count, kernel_device, special_values, random_bits
):
    """Random bits give blocks of one large value and many zeros; sorted, blocks of neighbours in size."""
    x = random_bits(count)
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


@ALL
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=STORED_BFLOAT16)],
    ids=["fp32", "fp16", "bf16"],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_dequantize_as_in_the_reference(fmt, dtype, shape, kernel_device, random_bits):
    x = rough(shape, random_bits)
    codes, scale = reference_quantize.quantize_blocks(x.abs() if fmt.squared else x, fmt)
    values = triton_quantize.dequantize_blocks(
        codes.to(kernel_device), scale.to(kernel_device), fmt, dtype
    )
    expected = reference_quantize.dequantize_blocks(codes, scale, fmt, dtype)
    assert values.dtype is dtype
    assert_same_bits(values, expected, "values")


@OCP
@INPUTS
@pytest.mark.parametrize("shape", [*SHAPES, (32, 128), (70, 130)], ids=str)
def test_tensors_quantize_as_in_the_reference(fmt, dtype, shape, kernel_device):
    x = torch.randn(shape).to(dtype)
    for factor in (1.0, 0.0, 1e-3):
        codes, scale = triton_quantize.quantize_tensor((x * factor).to(kernel_device), fmt)
        expected_codes, expected_scale = reference_quantize.quantize_tensor(x * factor, fmt)
        assert_same_bits(codes, expected_codes, "codes")
        assert_same_bits(scale, expected_scale, "scale")


@OCP
@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("position", [0, 4095, 9099])
def test_tensor_that_is_not_finite_has_scale_nan_wherever_the_value_lies(
    fmt, bad, position, kernel_device
):
    x = torch.randn(70, 130)
    x.view(-1)[position] = bad
    codes, scale = triton_quantize.quantize_tensor(x.to(kernel_device), fmt)
    assert scale.isnan()
    assert codes.view(torch.uint8).eq(0).all()


@OCP
def test_tensor_of_all_exponents_quantizes_as_in_the_reference(fmt, kernel_device, random_bits):
    for top in (1e30, 1.0, 1e-30, 1e-37):
        x = random_bits(20_000)
        x = x[x.abs() <= top]
        codes, scale = triton_quantize.quantize_tensor(x.to(kernel_device), fmt)
        expected_codes, expected_scale = reference_quantize.quantize_tensor(x, fmt)
        assert_same_bits(codes, expected_codes, f"codes below {top}")
        assert_same_bits(scale, expected_scale, f"scale below {top}")


# --- Adam


def adam_tensors(shape, weight, master, gradient, states, draw=torch.randn):
    """Return the eight tensor arguments of `adam_step` on the CPU, in the formats asked for."""
    w, g, m, v = (draw(shape) for _ in range(4))
    g, m, v = g * 0.1, m * 0.1, (v * 0.1).square()
    remainder = m_scale = v_scale = grad_scale = None
    if master == "split":
        weight_tensor, remainder = split(w)
    else:
        weight_tensor = w.to(weight)
        remainder = w if master == "float32" else None
    if gradient == "blocks":
        g, grad_scale = reference_quantize.quantize_blocks(g, E4M3)
    else:
        g = g.to(gradient)
    if states == "8bit":
        m, m_scale = reference_quantize.quantize_blocks(m, S1E3M4)
        v, v_scale = reference_quantize.quantize_blocks(v, UE3M5)
    else:
        m, v = m.to(states), v.to(states)
    return [weight_tensor, remainder, g, grad_scale, m, m_scale, v, v_scale]


NAMES = ("weight", "master", "grad", "grad_scale", "m", "m_scale", "v", "v_scale")


def assert_steps_as_reference(tensors, hypers, options, device):
    """Take the same steps with both; compare every tensor after each."""
    ours = [None if t is None else t.clone().to(device) for t in tensors]
    reference = [None if t is None else t.clone() for t in tensors]
    for step, hyper in enumerate(hypers, 1):
        triton_adam.adam_step(*ours, hyper.to(device), *options)
        reference_adam.adam_step(*reference, hyper, *options)
        for name, actual, expected in zip(NAMES, ours, reference, strict=True):
            if expected is not None:
                assert_same_bits(actual, expected, f"{name} after step {step}")


WEIGHTS = [
    ("fp32", torch.float32, None),
    ("fp16", torch.float16, None),
    ("fp16-master", torch.float16, "float32"),
    ("split", torch.bfloat16, "split"),
    ("bf16", torch.bfloat16, None),
    ("bf16-master", torch.bfloat16, "float32"),
]
MASTERS = pytest.mark.parametrize(
    ("weight", "master"),
    [
        pytest.param(w, m, id=name, marks=STORED_BFLOAT16 if name.startswith("bf16") else ())
        for name, w, m in WEIGHTS
    ],
)
GRADIENTS = pytest.mark.parametrize(
    "gradient",
    [torch.float32, torch.bfloat16, torch.float16, "blocks"],
    ids=["g-fp32", "g-bf16", "g-fp16", "g-blocks"],
)
STATES = pytest.mark.parametrize(
    "states",
    ["8bit", torch.float32, pytest.param(torch.bfloat16, marks=STORED_BFLOAT16)],
    ids=["s-8bit", "s-fp32", "s-bf16"],
)
DECOUPLED = pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])


@MASTERS
@GRADIENTS
@STATES
@DECOUPLED
def test_adam_steps_as_in_the_reference(
    weight, master, gradient, states, decoupled, kernel_device, adam_hyper
):
    tensors = adam_tensors((3, 200), weight, master, gradient, states)
    hypers = [adam_hyper(1, 0.1, (0.9, 0.95), 0.1, apply=apply) for apply in (0.0, 1.0)]
    assert_steps_as_reference(tensors, hypers, (0.9, 0.95, 1e-8, 0.1, decoupled), kernel_device)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@STATES
def test_adam_steps_on_any_shape_as_in_the_reference(shape, states, kernel_device, adam_hyper):
    tensors = adam_tensors(shape, torch.bfloat16, "split", "blocks", states)
    hypers = [adam_hyper(step, 0.01, weight_decay=0.1, grad_mul=0.7) for step in (1, 2)]
    assert_steps_as_reference(tensors, hypers, (0.9, 0.999, 1e-8, 0.1, True), kernel_device)


@pytest.mark.parametrize(
    ("weight", "master"), [(torch.float32, None), (torch.bfloat16, "split")], ids=["fp32", "split"]
)
@pytest.mark.parametrize("states", ["8bit", torch.float32], ids=["8bit", "fp32"])
@DECOUPLED
@pytest.mark.parametrize("shape", [(24, 300), gpu((2048, 2052))], ids=str)
def test_adam_on_values_of_every_exponent_steps_as_in_the_reference(
    weight, master, states, decoupled, shape, kernel_device, adam_hyper, random_bits
):
    """Overflow to infinity, NaN from infinity, subnormal products: every special case of the arithmetic at once."""

    def draw(shape):
        return rough(shape, random_bits)

    tensors = adam_tensors(shape, weight, master, torch.float32, states, draw)
    hypers = [adam_hyper(step, 0.01, weight_decay=0.1) for step in (1, 2)]
    assert_steps_as_reference(tensors, hypers, (0.9, 0.999, 1e-8, 0.1, decoupled), kernel_device)


@pytest.mark.parametrize("states", ["8bit", torch.float32], ids=["8bit", "fp32"])
@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e-6, 1e15])
def test_adam_on_tiny_and_huge_gradients_steps_as_in_the_reference(
    states, size, kernel_device, adam_hyper
):
    tensors = adam_tensors((8, 256), torch.bfloat16, "split", torch.float32, states)
    tensors[2] *= size
    for index in (4, 5, 6, 7):
        if tensors[index] is not None:
            tensors[index].zero_()
    hypers = [adam_hyper(step) for step in range(1, 6)]
    assert_steps_as_reference(tensors, hypers, (0.9, 0.999, 1e-8, 0.0, True), kernel_device)


def test_adam_with_zero_gradient_and_zero_epsilon_steps_as_in_the_reference(
    kernel_device, adam_hyper
):
    """0 / 0 in the update, and nothing but zeros in the states."""
    tensors = adam_tensors((3, 200), torch.float32, None, torch.float32, "8bit")
    for index in (2, 4, 5, 6, 7):
        tensors[index].zero_()
    for eps in (1e-8, 0.0):
        assert_steps_as_reference(
            tensors, [adam_hyper()], (0.9, 0.999, eps, 0.0, True), kernel_device
        )


@pytest.mark.parametrize("states", ["8bit", torch.float32], ids=["8bit", "fp32"])
def test_adam_keeps_nan_of_any_payload_in_a_split_weight(states, kernel_device, adam_hyper):
    """The upper half of some is infinity, others would round up to zero; a GPU makes only 0x7FFFFFFF of its own."""
    tensors = adam_tensors((3, 200), torch.bfloat16, "split", torch.float32, states)
    payloads = [0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -0x7FFFFF, 0x7FFF8000, 0x7F80FFFF]
    nans = torch.tensor(payloads, dtype=torch.int32).view(torch.float32)
    tensors[2][1, : len(nans)] = nans
    options = (0.9, 0.999, 1e-8, 0.1, True)
    assert_steps_as_reference(tensors, [adam_hyper()], options, kernel_device)
    ours = [t if t is None else t.to(kernel_device) for t in tensors]
    triton_adam.adam_step(*ours, adam_hyper().to(kernel_device), *options)
    assert ours[0].isnan().nonzero().tolist() == [[1, i] for i in range(len(nans))]


@pytest.mark.parametrize("apply", [0.0, -0.0, -1.0, NAN])
def test_adam_writes_nothing_unless_apply_is_positive(apply, kernel_device, adam_hyper):
    tensors = adam_tensors((3, 200), torch.bfloat16, "split", "blocks", "8bit")
    ours = [t.clone().to(kernel_device) for t in tensors]
    hyper = adam_hyper(apply=apply).to(kernel_device)
    triton_adam.adam_step(*ours, hyper, 0.9, 0.999, 1e-8, 0.1, True)
    for name, actual, expected in zip(NAMES, ours, tensors, strict=True):
        assert_same_bits(actual, expected, name)


def test_adam_writes_nothing_beyond_its_tensors(kernel_device, adam_hyper):
    """Each tensor is the middle of a larger one, whose ends must stay zero; rows of 130 leave a tail of 2."""
    tensors = adam_tensors((3, 130), torch.bfloat16, "split", "blocks", "8bit")
    padded = [
        torch.zeros(t.numel() + 512, dtype=torch.uint8 if t.element_size() == 1 else t.dtype)
        for t in tensors
    ]
    padded = [p.to(kernel_device) for p in padded]
    middles = [
        p[256 : 256 + t.numel()].view(t.dtype).view(t.shape)
        for p, t in zip(padded, tensors, strict=True)
    ]
    for middle, t in zip(middles, tensors, strict=True):
        middle.copy_(t)
    hyper = adam_hyper().to(kernel_device)
    triton_adam.adam_step(*middles, hyper, 0.9, 0.999, 1e-8, 0.1, True)
    for name, p in zip(NAMES, padded, strict=True):
        assert not p[:256].any(), name
        assert not p[-256:].any(), name
    assert not torch.equal(middles[0].cpu(), tensors[0])


# --- sizes for a GPU only


@pytest.mark.gpu
@ALL
@LARGE
def test_large_blocks_quantize_and_dequantize_as_in_the_reference(fmt, shape, random_bits):
    x = torch.where(
        torch.rand(shape) < 0.01, random_bits(math.prod(shape)).reshape(shape), torch.randn(shape)
    )
    codes, scale = assert_quantizes_as_reference(x, fmt, "cuda")
    values = triton_quantize.dequantize_blocks(codes.cuda(), scale.cuda(), fmt, torch.bfloat16)
    expected = reference_quantize.dequantize_blocks(codes, scale, fmt, torch.bfloat16)
    assert_same_bits(values, expected, "values")


@pytest.mark.gpu
@OCP
@LARGE
def test_large_tensors_quantize_as_in_the_reference(fmt, shape):
    x = torch.randn(shape).bfloat16()
    codes, scale = triton_quantize.quantize_tensor(x.cuda(), fmt)
    expected_codes, expected_scale = reference_quantize.quantize_tensor(x, fmt)
    assert_same_bits(codes, expected_codes, "codes")
    assert_same_bits(scale, expected_scale, "scale")


@pytest.mark.gpu
@DECOUPLED
@LARGE
def test_adam_on_large_tensors_steps_as_in_the_reference(shape, decoupled, adam_hyper):
    tensors = adam_tensors(shape, torch.bfloat16, "split", "blocks", "8bit")
    hypers = [adam_hyper(step, 0.01, weight_decay=0.1) for step in (1, 2)]
    assert_steps_as_reference(tensors, hypers, (0.9, 0.999, 1e-8, 0.1, decoupled), "cuda")


BEYOND_INT32 = pytest.mark.parametrize("cols", [2**14, 2**14 + 1], ids=["even", "odd"])


@pytest.fixture
def rows_beyond_int32():
    """Return the number of rows of 2^14 elements whose last ones lie beyond element 2^31, if they fit in memory."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    yield 2**17 + 3
    torch.cuda.empty_cache()


@pytest.mark.gpu
@BEYOND_INT32
def test_elements_beyond_two_to_the_31_quantize_like_the_first_ones(cols, rows_beyond_int32):
    x = torch.randn(64, cols, device="cuda").bfloat16()
    full = x.repeat(rows_beyond_int32 // 64 + 1, 1)[:rows_beyond_int32]
    codes, scale = triton_quantize.quantize_blocks(full, E4M3)
    values = triton_quantize.dequantize_blocks(codes, scale, E4M3, torch.bfloat16)
    first = rows_beyond_int32 // 64 * 64
    for part in (codes, scale, values):
        assert_same_bits(part[first:], part[: rows_beyond_int32 - first])
    tensor_codes, tensor_scale = triton_quantize.quantize_tensor(full, E4M3)
    assert tensor_scale.cpu() == x.abs().max().float().cpu() / 448
    assert_same_bits(tensor_codes[first:], tensor_codes[: rows_beyond_int32 - first])


@pytest.mark.gpu
@BEYOND_INT32
def test_adam_steps_elements_beyond_two_to_the_31_like_the_first_ones(
    cols, rows_beyond_int32, adam_hyper
):
    small = adam_tensors((64, cols), torch.bfloat16, "split", "blocks", "8bit")
    repeats = rows_beyond_int32 // 64 + 1

    def repeat(x):
        raw = x.cuda().view(torch.uint8) if x.element_size() == 1 else x.cuda()
        return raw.repeat(repeats, 1)[:rows_beyond_int32].contiguous().view(x.dtype)

    tensors, before = [repeat(x) for x in small], [x.clone() for x in small]
    triton_adam.adam_step(*tensors, adam_hyper().cuda(), 0.9, 0.999, 1e-8, 0.1, True)
    first = rows_beyond_int32 // 64 * 64
    for name, tensor, old in zip(NAMES, tensors, before, strict=True):
        assert_same_bits(tensor[first:], tensor[: rows_beyond_int32 - first], name)
        updated = not torch.equal(tensor[:64].cpu().view(torch.uint8), old.view(torch.uint8))
        assert updated == (not name.startswith("grad")), name
