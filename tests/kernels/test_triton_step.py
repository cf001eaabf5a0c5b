"""The Triton kernel of a step against the reference step: on a CPU in Triton's interpreter, on a GPU compiled.

In the interpreter, and without fast arithmetic on a GPU, every bit agrees. With it at most one code in a thousand
differs, by one, and float32 values by a few units in the last place.
"""

import pytest
import torch
from helpers import (
    BF16,
    FP16,
    NAN,
    STEP_CASES,
    Step,
    StepCase,
    assert_same_bits,
    bits,
    launch_steps,
    make_hyper,
)  # fmt: skip

from fp8stack.formats import E4M3, FORMATS
from fp8stack.kernels import step as triton_step
from fp8stack.kernels.pointer_table import COLUMN, WIDTH, deal, upload_rows
from fp8stack.kernels.reference.quantize import unpack
from fp8stack.kernels.reference.step_scalars import seed_of


def gpu(*values):
    """Mark a parameter as one for a GPU only: too large for the interpreter, or without meaning there."""
    return pytest.param(*values, marks=pytest.mark.gpu)


ALL = pytest.mark.parametrize("case", STEP_CASES, ids=str)
FAST = pytest.mark.parametrize("fast", [False, gpu(True)], ids=["exact", "fast"])
SHAPES = [(), (7,), (128,), (3, 200), (5, 130), (0, 4), (2, 3, 64), (3, 144), (4, 256), (17, 256)]
LARGE = [(4096, 4096), (4096, 4100), (4096, 4112), (70001, 129)]
DEFAULT = STEP_CASES[0]


# --- comparison


def numbered(codes, fmt):
    """Return integers that number the values of codes in ascending order."""
    raw = codes.view(torch.uint8).int()
    sign = 0x80 if fmt is E4M3 else (1 << (fmt.bits - 1)) * fmt.signed
    return torch.where((raw & sign) > 0, -(raw & (sign - 1)), raw) if sign else raw


def assert_rare(different, name):
    """Fail if more than one in a thousand (or one) is true."""
    count = int(different.sum())
    assert count <= max(1, different.numel() / 1000), f"{name}: {count} of {different.numel()}"


def assert_close(actual, expected, name, floor, step=0.0):
    """Compare to a few units in the last place of a float32, and of `floor`, where terms may have cancelled.

    What is kept in fewer bits, with steps of `step` relative to it, may rarely be a step away.
    """
    assert torch.equal(actual.isnan(), expected.isnan()), name
    error, size = (
        x.nan_to_num(0).abs() for x in (actual.float() - expected.float(), expected.float())
    )
    assert (error <= max(step, 2.0**-20) * size + floor).all(), f"{name}: {float(error.max())}"
    assert_rare(error > 2.0**-20 * size + floor, name)


STEPS = {torch.float32: 0.0, BF16: 2.0**-7, FP16: 2.0**-10}


def assert_almost_same(actual, expected):
    """Compare two `Step`s on the CPU as fast arithmetic allows."""
    if expected.weight.numel() == 0:
        return
    master = {
        "split24": 2.0**-15, "none": 2.0**-7, "keep": STEPS[expected.case.dtype], "fp16": 2.0**-10,
    }  # fmt: skip
    assert_close(actual.value, expected.value, "value", 1e-6, master.get(expected.case.master, 0.0))
    assert_close(actual.weight, expected.weight, "weight", 1e-6, STEPS[expected.case.dtype])
    for name in ("m", "m_scale", "v", "v_scale", "master_scale"):
        x, y = getattr(expected, name), getattr(actual, name)
        if x is None:
            continue
        kind = {"m": expected.kind.m, "v": expected.kind.v}.get(name, "")
        if x.dtype in STEPS:
            assert_close(y, x, name, float(x.float().nan_to_num(0).abs().max()) * 2.0**-22, STEPS[x.dtype])  # fmt: skip
            continue
        fmt = FORMATS.get(kind, E4M3)
        if fmt.bits == 4:
            x, y = (unpack(t, expected.weight.shape) for t in (x, y))
        difference = (numbered(y, fmt) - numbered(x, fmt)).abs()
        assert difference.max() <= 1, f"{name}: off by {int(difference.max())}"
        assert_rare(difference > 0, name)


def assert_steps_as_reference(x, hypers, device, fast=False):
    """Take the same steps with both; compare every tensor after each."""
    ours = x.copy(device)
    for number, hyper in enumerate(hypers, 1):
        launch_steps([ours], [hyper], fast)
        x.step(hyper)
        if fast:  # differences would add up
            assert_almost_same(ours.copy("cpu"), x)
            ours = x.copy(device)
        else:
            ours.assert_same(x.written(), f"after step {number}")
    return ours


def hypers_of(case, steps=2, **options):
    # A round number for the gradient would put many averages on the ties of bfloat16.
    options = {"lr": 0.01, "decay": 0.1, "coupled": 0.1, "grad_mul": 0.7310586} | options
    return [make_hyper(case.algorithm, step, **options) for step in range(3, 3 + steps)]


# --- formats and shapes


@ALL
@FAST
@pytest.mark.parametrize("shape", [(3, 200), (4, 256), gpu((64, 2048)), gpu((33, 1600))], ids=str)
def test_every_kind_steps_as_in_the_reference(case, shape, fast, kernel_device):
    assert_steps_as_reference(Step(case, shape), hypers_of(case), kernel_device, fast)


@FAST
@pytest.mark.parametrize("shape", [*SHAPES, gpu((50, 130)), gpu((513, 1040))], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        DEFAULT, StepCase("adam", "4bit", "none", BF16), StepCase("adam", "fp8-lm", "fp16", "blocks"),
        StepCase("adam", "fp8", "split32", FP16), StepCase("lion", "fp32", "keep"),
    ],
    ids=str,
)  # fmt: skip
def test_any_shape_steps_as_in_the_reference(shape, case, fast, kernel_device):
    assert_steps_as_reference(Step(case, shape), hypers_of(case, 1), kernel_device, fast)


@FAST
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.5)], ids=str)
@pytest.mark.parametrize("algorithm", ["adam", "sgd", "nesterov", "lion", "muon"])
def test_any_scalars_step_as_in_the_reference(betas, algorithm, fast, kernel_device):
    case = StepCase(algorithm, "8bit", "split24", "blocks", coupled=True)
    for options in ({"decay": 0.0, "coupled": 0.0}, {"grad_mul": -1.0}, {"lr": 0.0}, {"gain": 0.5}):
        hypers = hypers_of(case, 1, betas=betas, **options)
        assert_steps_as_reference(Step(case, (3, 200)), hypers, kernel_device, fast)


def middles(x, device, around):
    """Move the tensors of a `Step` into the middle of larger ones of ones, which are returned."""
    moved, larger = [], {}
    for name, t in x.tensors._asdict().items():
        if t is not None:
            raw = torch.uint8 if t.element_size() == 1 else t.dtype
            larger[name] = torch.ones(t.numel() + 2 * around, dtype=raw, device=device)
            t = larger[name][around : around + t.numel()].view(t.dtype).view(t.shape).copy_(t)
        moved.append(t)
    x.tensors = type(x.tensors)(*moved)
    return larger


@pytest.mark.parametrize("around", [1, 4, 256])
@pytest.mark.parametrize("cols", [130, 144, 256, 131])
@pytest.mark.parametrize("case", [DEFAULT, STEP_CASES[8], STEP_CASES[16]], ids=str)
def test_a_step_inside_larger_tensors_is_the_references_and_stays_there(
    case, cols, around, kernel_device
):
    """A row of a larger tensor need not begin at a multiple of 16 bytes; rows of 130 leave a tail of 2."""
    x = Step(case, (3, cols))
    ours = x.copy(kernel_device)
    larger = middles(ours, kernel_device, around)
    assert around == 256 or triton_step.launch_of(ours.kind, ours.tensors).rows == "any"
    (hyper,) = hypers_of(case, 1)
    launch_steps([ours], [hyper], False)
    ours.assert_same(x.step(hyper).written() | {"grad": x.grad})
    assert x.grad_block_scale is None or torch.equal(
        ours.grad_block_scale.cpu(), x.grad_block_scale
    )
    for name, t in larger.items():
        assert t[:around].eq(1).all(), name
        assert t[-around:].eq(1).all(), name


def test_rows_are_told_apart_by_what_a_kernel_may_assume():
    for shape, rows in {
        (4, 256): "flat",
        (128,): "flat",
        (3, 144): "sixteen",
        (3, 200): "any",
    }.items():
        t = Step(DEFAULT, shape)
        assert triton_step.launch_of(t.kind, t.tensors).rows == rows


# --- values


@pytest.mark.parametrize("coupled", [False, True], ids=["adamw", "adam"])
@pytest.mark.parametrize(
    "states", ["8bit", "fp8", "4bit", "fp32", gpu("bf16")]
)  # the interpreter loads subnormal bfloat16 as other numbers
@pytest.mark.parametrize("master", ["keep", "split24"])
@pytest.mark.parametrize("shape", [(8, 300), gpu((2048, 2052))], ids=str)
def test_values_of_every_exponent_step_as_in_the_reference(
    master, states, coupled, shape, kernel_device, rough
):
    """NaN from infinity, subnormal products and roots: every special case of the arithmetic at once.

    Gradients and moments up to 2^60, since a step with a gradient of 2^63 is skipped; weights of any size.
    """
    case = StepCase("adam", states, master, coupled=coupled)
    x = Step(case, shape, draw=lambda s: rough(s, limit=2.0**60))
    x.set(weight=rough(shape))
    assert_steps_as_reference(x, hypers_of(case, grad_mul=1.0), kernel_device)


@FAST
@pytest.mark.parametrize("states", ["8bit", "fp8", "4bit", "fp32", "fp8-lm"])
@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e-6, 1e15])
def test_tiny_and_huge_gradients_step_as_in_the_reference(states, size, fast, kernel_device):
    case = StepCase("adam", states, "split24")
    x = Step(case, (8, 256)).zero_states().set(grad=torch.randn(8, 256) * size)
    hypers = [make_hyper("adam", step) for step in range(1, 4)]
    assert_steps_as_reference(x, hypers, kernel_device, fast)


@FAST
@pytest.mark.parametrize("states", ["8bit", "fp8", "4bit", "fp8-lm", "bf16"])
def test_zero_gradient_and_zero_epsilon_step_as_in_the_reference(states, fast, kernel_device):
    """0 / 0 in the update, and nothing but zeros in the states."""
    x = Step(StepCase("adam", states), (3, 200)).zero_states()
    x.grad.zero_()
    for eps in (1e-8, 0.0):
        assert_steps_as_reference(x, [make_hyper(eps=eps)], kernel_device, fast)
    assert x.weight.isfinite().all()


@FAST
@pytest.mark.parametrize("shape", [(5, 300), (4, 256)], ids=str)
@pytest.mark.parametrize("decades", [4, 12])
def test_second_moments_of_four_bits_are_the_references(decades, shape, fast, kernel_device):
    """Down to far below the least code of their blocks, with other noise in every step; without gradients at first."""
    case = StepCase("adam", "4bit", "split24")
    v = 10 ** (torch.rand(shape) * -decades)
    v[:, 1::5] = 0
    grad = torch.zeros(shape)
    x = Step(case, shape).set(v=v, grad=grad)
    assert_steps_as_reference(x, hypers_of(case, 4, coupled=0.0), kernel_device, fast)
    assert torch.equal(x.moments[1] > 0, v > 0)
    grad[:, 2::5] = torch.randn(grad[:, 2::5].shape) * 1e-4
    x.set(grad=grad)
    assert_steps_as_reference(x, hypers_of(case, 4, coupled=0.0), kernel_device, fast)
    codes = unpack(x.v, x.weight.shape)
    positive = (v > 0) | (grad != 0)
    assert codes[positive].min() >= 1
    assert decades == 4 or codes[positive].min() == 1  # four decades need not reach the least code
    assert codes[~positive].eq(0).all()


@FAST
@pytest.mark.parametrize("shape", [(5, 300), (4, 256)], ids=str)
@pytest.mark.parametrize("power", [0, -40, -80, -112, -140, 50])
def test_second_moments_with_one_scale_never_become_zero_as_in_the_reference(
    power, shape, fast, kernel_device
):
    """v spans 2^60, of which float16 holds 2^40, or what float32 has below 2^power. One element keeps the scale up, the
    others have no gradient and halve: the smallest would round to zero in every step."""
    v = torch.exp2(power - 60 * torch.rand(shape))
    v[0, 0] = 2.0**power
    v[:, 1::5] = 0
    grad = torch.zeros(shape)
    grad[0, 0] = 2.0 ** (power / 2)
    x = Step(StepCase("adam", "fp8-lm", "fp16"), shape).set(v=v, grad=grad)
    hyper = make_hyper(step=100, lr=0.01, betas=(0.9, 0.5), eps=1.0)
    assert torch.equal(x.v > 0, v > 0)
    for _ in range(3):
        expected = 0.5 * x.moments[1] + 0.5 * grad.square()
        assert_steps_as_reference(x, [hyper], kernel_device, fast)
        assert torch.equal(x.v > 0, expected > 0)
        lifted = (expected > 0) & (expected <= 2.0**-25 * x.v_scale)
        assert lifted.sum() > 100 or power < -100
        assert x.v[lifted].eq(2.0**-24).all()
    x.grad[2, 1] = NAN
    assert_steps_as_reference(x, [hyper], kernel_device, fast)
    assert x.v_scale.isnan()
    assert x.moments[1].isnan().all()


@FAST
@pytest.mark.parametrize("master", ["split24", "split32", "none", "fp32"])
@pytest.mark.parametrize("states", ["8bit", "4bit", "fp32"])
def test_nan_of_any_payload_stays_in_the_weight(states, master, fast, kernel_device):
    """The upper half of some is infinity, others would round up to zero; a GPU makes only 0x7FFFFFFF of its own."""
    case = StepCase("adam", states, master)
    x = Step(case, (3, 200))
    payloads = [0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1, -0x7FFFFF, 0x7FFF8000, 0x7F80FFFF]
    nans = torch.tensor(payloads, dtype=torch.int32).view(torch.float32)
    x.grad[1, : len(nans)] = nans
    ours = assert_steps_as_reference(x, [make_hyper()], kernel_device, fast)
    assert ours.weight.isnan().nonzero().tolist() == [[1, i] for i in range(len(nans))]


# --- what is written


@pytest.mark.parametrize("apply", [0.0, -0.0, -1.0, NAN])
@pytest.mark.parametrize("case", [DEFAULT, StepCase("adam", "fp8-lm", "fp16", "blocks")], ids=str)
def test_nothing_is_written_unless_apply_is_positive(case, apply, kernel_device):
    x = Step(case, (3, 200))
    ours = x.copy(kernel_device)
    launch_steps([ours], [make_hyper(apply=apply)])
    ours.assert_same(x.written())


# --- a table of several tensors


def test_table_says_which_programs_work_on_which_row():
    device, rows = torch.device("cpu"), [{"blocks": n} for n in (9, 0, 8)]
    assert deal(rows, 4, "first", device).tolist() == [0, 0, 0, 2, 2]
    assert [row["first"] for row in rows] == [0, 3, 3]
    table = upload_rows([{"weight": 2**40, "cols": 7}, {"first": 3}], device)
    assert (table.dtype, table.shape) == (torch.int64, (2, WIDTH))
    assert table[0, COLUMN["weight"]] == 2**40
    assert table.ne(0).sum() == 3
    assert upload_rows([], device).shape == (0, WIDTH)
    assert len(deal([], 4, "first", device)) == 0


@FAST
@pytest.mark.parametrize(
    "shapes",
    [
        [(4, 256), (9, 384), (128,), (0, 256), (9, 128), (2, 2, 64)],
        [(3, 200), (7,), (), (12, 130), (5, 130)],
        [(3, 144), (12, 16), (16,), (9, 3, 16)],
    ],
    ids=["flat", "any", "sixteen"],
)
@pytest.mark.parametrize(
    "case",
    [
        DEFAULT, STEP_CASES[8], STEP_CASES[16], StepCase("lion", "8bit", "split24", BF16),
        StepCase("muon", "8bit", "keep", "blocks", weight=BF16),
    ],
    ids=str,
)  # fmt: skip
def test_tensors_of_a_table_step_as_each_alone(shapes, case, fast, kernel_device):
    """Each with its own scalars; the second is skipped."""
    alone = [Step(case, shape) for shape in shapes]
    hypers = [
        make_hyper(case.algorithm, 3 + i, lr=0.01 * (i + 1), apply=float(i != 1), seed=77 * i)
        for i in range(len(shapes))
    ]
    together = [x.copy(kernel_device) for x in alone]
    launch_steps(together, hypers, fast)
    for x, own, ours in zip(alone, hypers, together, strict=True):
        x.step(own)
        if fast:
            assert_almost_same(ours.copy("cpu"), x)
        else:
            ours.assert_same(x.written(), f"of {tuple(x.weight.shape)}")


def test_row_without_blocks_is_neither_read_nor_written(kernel_device):
    """A parameter whose gradient is gone has no address for it."""
    alone = [Step(DEFAULT, (9, 256)) for _ in range(3)]
    together = [x.copy(kernel_device) for x in alone]
    hypers = [make_hyper(apply=float(i != 1)) for i in range(3)]
    launch_steps(together, hypers, False, without=1)
    for i, (x, ours) in enumerate(zip(alone, together, strict=True)):
        before = x.written()
        ours.assert_same(x.step(hypers[i]).written())
        assert all(
            torch.equal(bits(getattr(x, n)), bits(old)) == (i == 1) for n, old in before.items()
        )


# --- sizes for a GPU only


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize(
    "case",
    [DEFAULT, StepCase("adam", "4bit", "none", "blocks", coupled=True), STEP_CASES[4]],
    ids=str,
)
def test_large_tensors_step_as_in_the_reference(case, shape, fast):
    assert_steps_as_reference(Step(case, shape), hypers_of(case), "cuda", fast)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [2**14, 2**14 + 1], ids=["even", "odd"])
def test_elements_beyond_two_to_the_31_step_like_the_first_ones(cols, rows_beyond_int32):
    """With the noise of their places, which a small tensor has through its seed."""
    small = Step(DEFAULT, (64, cols))
    repeats = rows_beyond_int32 // 64 + 1

    def repeat(x):
        raw = x.cuda().view(torch.uint8) if x.element_size() == 1 else x.cuda()
        return raw.repeat(repeats, 1)[:rows_beyond_int32].contiguous().view(x.dtype)

    step = small.copy("cuda")
    large = type(small.tensors)(*(None if t is None else repeat(t) for t in small.tensors))
    step.tensors = large
    launch_steps([step], [make_hyper(seed=0)])
    for first in (0, rows_beyond_int32 // 64 * 64):
        count = min(64, rows_beyond_int32 - first)
        expected = small.copy("cuda")
        launch_steps([expected], [make_hyper(seed=seed_of(0, first * cols))])
        for name, tensor in large._asdict().items():
            if tensor is None:
                continue
            new, old = getattr(expected, name)[:count], getattr(small, name)[:count]
            assert_same_bits(tensor[first : first + count], new, f"{name} from row {first} on")
            assert torch.equal(bits(new), bits(old)) == name.startswith("grad"), name
