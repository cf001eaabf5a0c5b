"""The operators as torch sees them: schemas, fake tensors, torch.compile; which backend runs; the import guards."""

import inspect
import os
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import assert_same_bits, bits, run_python

import fp8stack
from fp8stack.errors import ConfigError
from fp8stack.formats import E4M3, FORMATS, UE3M1, UE3M5
from fp8stack.kernels import ops
from fp8stack.kernels.reference.delayed_state import DelayedState

ROOT = Path(fp8stack.__file__).parents[1]
ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def sample_arguments(name, shape, device):
    """Yield argument lists that cover the optional tensors and formats of operator `name`."""
    x = torch.randn(shape, device=device)
    grad = ops.quantize_blocks(x, E4M3)
    match name:
        case "quantize_blocks":
            yield from ((x.abs(), fmt) for fmt in FORMATS)
            yield x.bfloat16(), "e4m3"
        case "dequantize_blocks":
            yield *grad, "e4m3"
            yield *ops.quantize_blocks(x.square(), UE3M5), "ue3m5", torch.bfloat16, x.shape
            yield *ops.quantize_blocks(x.square(), UE3M1), "ue3m1", torch.float32, x.shape
        case "accumulate_blocks":
            yield *grad, *ops.quantize_blocks(x / 16, E4M3), x
        case "cast":
            yield x, "e4m3", True, True, None
            yield x.bfloat16(), "e5m2", True, False, x.abs().amax()
            yield x, "e4m3", False, True, None
        case "cast_rows":
            yield x, "e4m3"
        case "cast_1x128":
            yield x, "e4m3"
            yield x, "e4m3", True, False
            yield x, "e4m3", True, True, True
        case "cast_128x128":
            yield x.reshape(-1, x.shape[-1]), "e4m3"
            yield x.reshape(-1, x.shape[-1]), "e4m3", False, True
        case "cast_delayed":
            of = delayed_state(device)
            yield x, "e4m3", of, False, False
            yield x.bfloat16(), "e5m2", of, False, True
        case "recast":
            KEPT.append(DelayedState(0))
            yield x, "e4m3", KEPT[-1].handle, True, True
            yield x.bfloat16(), "e4m3", KEPT[-1].handle, False, True
        case "matmul_blocks":
            casts = ops.cast_1x128, ops.cast_128x128
            for of_a, of_b in (casts, casts[::-1]):
                a = of_a(x.reshape(-1, x.shape[-1]), E4M3)[:2]
                b = of_b(torch.randn(40, x.shape[-1], device=device), E4M3)[:2]
                yield *a, *b, torch.float32
        case "matmul_rows":
            a, a_scale, _ = ops.cast_rows(x, E4M3)
            b, _, b_scale = ops.cast(torch.randn(40, x.shape[-1], device=device), E4M3)
            yield a, a_scale, b, b_scale, torch.bfloat16, False
        case "activation_cast_rows":
            x = x.reshape(-1, x.shape[-1])
            yield x, x + 1, "silu", "e4m3"
            yield x, None, "gelu", "e4m3"
        case "activation_cast":
            x = x.reshape(-1, x.shape[-1])
            yield x, x + 1, "silu", "e4m3", [], False, False
            yield x, None, "gelu", "e4m3", [delayed_state(device)], False, True
        case "activation_backward_cast":
            x = x.reshape(-1, x.shape[-1])
            scale = torch.tensor(0.1, device=device)
            yield x / 9, x, x + 1, scale, "silu", "e5m2", 2 * [delayed_state(device)], False, False
            yield x / 9, x, None, scale, "gelu_tanh", "e5m2", [], False, True
        case "expert_activation" | "expert_activation_backward":
            gate_up, weights = torch.randn(64, 96, device=device), torch.rand(50, device=device)
            pairs = torch.randint(-1, 50, (64,), dtype=torch.int32, device=device)
            if name == "expert_activation":
                yield gate_up, weights, pairs, "gelu"
            else:
                scale, dh = torch.tensor(0.1, device=device), torch.randn(64, 48, device=device)
                yield dh, gate_up.bfloat16(), weights.bfloat16(), pairs, scale, "silu"
        case "route":
            yield torch.randint(6, (40, 2), device=device), 5
        case "take_rows":
            codes = ops.cast(torch.randn(20, 32, device=device), E4M3)[0]
            index = torch.randint(-1, 40, (48,), dtype=torch.int32, device=device)
            yield from ((codes, index, 2, *layouts) for layouts in ((True, True), (False, True)))
        case "cross_entropy":
            logits = x.reshape(-1, x.shape[-1])
            labels = torch.arange(len(logits), device=device) % logits.shape[1]
            for gradient in (False, True):
                yield logits.clone(), labels, logits[:, 0].abs(), gradient
        case "sum_rows":
            places = torch.randint(-1, 20, (5, 3), dtype=torch.int32, device=device)
            yield torch.randn(20, 32, device=device).bfloat16(), places


@cache
def delayed_state(device):
    """Return the handle of a state that has seen a tensor, and that lives on."""
    state = DelayedState(4)
    ops.cast_delayed(torch.full((4, 4), 3.0, device=device), E4M3, state.handle, True, False)
    KEPT.append(state)
    return state.handle


KEPT = []
INEXACT = (  # sums have an order, exponentials are the device's, and a state lies on one device
    "matmul_blocks", "matmul_rows", "activation_cast", "activation_cast_rows", "activation_backward_cast",
    "cast_delayed", "expert_activation", "expert_activation_backward", "cross_entropy",
)  # fmt: skip
MATRICES = (
    "cast", "recast", "cast_1x128", "cast_128x128", "cast_delayed", "matmul_blocks", "activation_cast",
    "cast_rows", "matmul_rows", "activation_cast_rows",
    "activation_backward_cast", "expert_activation", "expert_activation_backward", "route", "take_rows", "sum_rows",
    "cross_entropy",
)  # fmt: skip


# consist of operators: tests/nn/test_compiled.py, test_fused_loss.py
LAYERS = ("linear", "mlp", "grouped", "experts", "linear_cross_entropy")
OPERATORS = sorted(
    name.split("::")[1]
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("fp8stack::") and not name.endswith(LAYERS)
)


def test_all_operators_are_sampled_here():
    assert OPERATORS == [
        "accumulate_blocks", "activation_backward_cast", "activation_cast", "activation_cast_rows",
        "cast", "cast_128x128", "cast_1x128", "cast_delayed", "cast_rows", "cross_entropy",
        "dequantize_blocks",
        "expert_activation", "expert_activation_backward", "matmul_blocks", "matmul_rows", "quantize_blocks",
        "recast", "route", "sum_rows", "take_rows",
    ]  # fmt: skip
    for name in OPERATORS:
        assert list(sample_arguments(name, (5, 200), "cpu")), name


def shapes_of(names, *shapes):
    """Return the mark of a test of these operators at these shapes; those that take more than matrices, at () too."""
    pairs = [(n, s) for n in names for s in ((), *shapes) if s or n not in MATRICES]
    return pytest.mark.parametrize(("name", "shape"), pairs, ids=str)


@pytest.fixture
def compare_float8(monkeypatch):
    """Let opcheck see whether an argument changed: it asks `torch.allclose`, which does not know float8."""
    allclose = torch.allclose

    def compare(a, b, **options):
        if a.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            return torch.equal(bits(a), bits(b))
        return allclose(a, b, **options)

    monkeypatch.setattr(torch, "allclose", compare)


# opcheck cannot clone empty bytes, so no shape is empty
@shapes_of([name for name in OPERATORS if name != "cast_1x128"], (5, 200), (2, 3, 64))
@pytest.mark.usefixtures("compare_float8")
def test_operator_keeps_torchs_rules(name, shape, device):
    """Schema (aliases and mutations as declared), fake tensors of the right shapes, and AOT autograd."""
    operator = getattr(torch.ops.fp8stack, name).default
    for arguments in sample_arguments(name, shape, device):
        results = torch.library.opcheck(
            operator, arguments,
            test_utils=["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"],
        )  # fmt: skip
        assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@ALL
def test_compiled_function_gives_the_eager_bits(fmt, dynamic, device):
    def function(x):
        codes, scale = ops.quantize_blocks(x * 2, fmt)
        return codes, scale, ops.dequantize_blocks(codes, scale, fmt, x.dtype, x.shape) + x

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((5, 200), (9, 131)):
        x = torch.rand(shape, device=device)
        assert_same_bits(compiled(x), function(x))


# --- which implementation runs


@pytest.mark.parametrize("value", ["", "cuda", "Triton", "1"])
def test_unknown_backend_is_an_error_that_names_the_choices(value, choose_kernels):
    choose_kernels(value)
    with pytest.raises(
        ConfigError, match=f'FP8STACK_KERNELS must be "triton" or "reference", got "{value}"'
    ):
        ops.kernel_backend()


def test_the_environment_is_asked_once(choose_kernels, monkeypatch):
    for value, other, reason in (
        ("reference", "triton", "FP8STACK_KERNELS=reference"),
        ("triton", "reference", "Triton is installed"),
    ):
        choose_kernels(value)
        for _ in range(2):
            assert ops.kernel_backend() == (value, reason)
            monkeypatch.setenv("FP8STACK_KERNELS", other)


def test_every_operator_has_a_triton_twin_with_the_parameters_of_its_reference():
    functions = filter(inspect.isfunction, vars(ops).values())
    twins = [f.__wrapped__ for f in functions if hasattr(f, "__wrapped__")]
    assert len(twins) == len(OPERATORS) + 5
    for function in twins:
        file = function.__module__.rpartition(".")[2]
        twin = getattr(ops.triton_module(file), function.__name__)
        assert twin.__module__.replace("kernels.", "kernels.reference.") == function.__module__
        theirs, ours = (list(inspect.signature(f).parameters) for f in (function, twin))
        assert ours == theirs[: len(ours)], function.__name__


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "reference"])
@shapes_of([name for name in OPERATORS if name not in INEXACT], (7,), (5, 200), (64, 256))
def test_operator_gives_the_same_bits_on_a_gpu_and_on_a_cpu(name, shape, backend, choose_kernels):
    choose_kernels(backend)
    operator = getattr(torch.ops.fp8stack, name)
    for arguments in sample_arguments(name, shape, "cpu"):
        on_gpu = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
        actual, expected = operator(*on_gpu), operator(*arguments)
        if name == "cast_rows":  # which part has which rows is each implementation's own
            actual, expected = ([*out[:2], out[2].amax()] for out in (actual, expected))
        assert_same_bits(flatten([on_gpu, actual]), flatten([list(arguments), expected]))


def flatten(tree):
    """Return the tensors in nested lists and tuples."""
    return [
        leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)
    ]


# --- imports


ON_PATH = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def test_operators_run_where_triton_cannot_be_imported():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, warnings\n"
        "from fp8stack.kernels import ops\n"
        "from fp8stack.formats import E4M3\n"
        "print(ops.quantize_blocks(torch.ones(3, 200), E4M3)[1].shape)\n"
        "import fp8stack\n"
        "warnings.simplefilter('error')\n"  # a model on a CPU needs no Triton, and hears nothing of it
        "fp8stack.initialize(torch.nn.Linear(256, 256), None, 'O0')\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    print(ops.kernel_backend()[0], ops.kernel_backend()[0], len(caught), caught[0].message)\n"
    )
    run = run_python("-c", code, **ON_PATH)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(
        "torch.Size([3, 2])\nreference reference 1 Triton cannot be imported"
    )
    assert "pip install triton" in run.stdout
