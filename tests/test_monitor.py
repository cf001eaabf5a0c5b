"""Statistics of casts: counted right, the same by the kernel and its reference; and sampled without anyone waiting."""

import copy
import math
import pickle
import warnings

import pytest
import torch
import torch._dynamo.testing
from helpers import OCP, quantize_tensor
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack.errors import Fp8StackWarning, ModelError
from fp8stack.formats import E4M3, E5M2, FORMATS
from fp8stack.kernels import monitor as triton_monitor
from fp8stack.kernels.reference import monitor as reference
from fp8stack.kernels.reference.cast_blocks import cast_1x128, cast_128x128
from fp8stack.monitor import Monitor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from the interpreter

NAN, INF = math.nan, math.inf


def counted(x, scale, fmt, squares=False, count=reference.count):
    out = torch.zeros(len(reference.FIELDS), dtype=torch.int64, device=x.device)
    count(x, scale, fmt, out, squares)
    out = out.cpu()
    sums = out[reference.SUMS].view(torch.float64).tolist()
    floats = out[:2].int().view(torch.float32).tolist()
    values = floats + out[2:7].tolist() + sums + out[9:].tolist()
    return dict(zip(reference.FIELDS, values, strict=True))


def decibels(x, codes, scale):
    """The ratio of signal to error, from the codes."""
    value = codes.double() * scale.double()
    return 10 * (x.double().square().sum() / (x.double() - value).square().sum()).log10().item()


def make(device="cpu", **options):
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))
    options = {"compute": "native", "fp8_recipe": "current", **options}
    return fp8stack.initialize(model.to(device), None, "O0", **options)[0]


def step(model, x):
    model(x).square().mean().backward()


# --- what is counted


def test_counts_of_a_tensor_with_known_ones():
    x = torch.tensor(
        [[0.0, -0.0, 2.0**-10, -(2.0**-10) * 1.001, 1.0, 448.0, 463.9, -464.0, 1e4, NAN, -INF]]
    )
    assert counted(x, torch.tensor(1.0), E4M3) == {
        "amax": 1e4, "scale": 1.0, "underflow": 1, "overflow": 2, "nonfinite": 2, "dead": 0, "blocks": 1,
        "signal": pytest.approx(2.0**-20 * 2.002001 + 1 + 448**2 + 463.9**2 + 464**2 + 1e8, rel=1e-6),
        "noise": pytest.approx(15.9**2 + 16**2 + (1e4 - 448) ** 2, rel=1e-6), "elements": 11,
    }  # fmt: skip
    assert counted(2 * x, torch.tensor(2.0), E4M3)["underflow"] == 1
    assert counted(x, torch.tensor(0.0), E4M3)["underflow"] == 7  # all that are finite and not zero
    of_nan = counted(x, torch.tensor(NAN), E4M3)
    assert (of_nan["underflow"], of_nan["overflow"], of_nan["nonfinite"]) == (0, 0, 2)
    assert of_nan["dead"] == of_nan["signal"] == of_nan["noise"] == 0
    assert math.isnan(of_nan["scale"])


@OCP
@pytest.mark.parametrize("blocks", ["tensor", "1x128", "128x128"])
def test_underflow_is_what_the_cast_loses_and_overflow_what_it_clips(fmt, blocks):
    x = torch.randn(130, 300) * 2.0 ** torch.randint(-30, 1, (130, 300))
    cast = {"tensor": quantize_tensor, "1x128": cast_1x128, "128x128": cast_128x128}[blocks]
    codes, scale, *_ = cast(x, fmt)
    numbers = counted(x, scale, fmt, squares=blocks == "128x128")
    assert numbers["underflow"] == ((codes[:130, :300].float() == 0) & (x != 0)).sum() > 0
    assert numbers["overflow"] == 0  # current scaling clips nothing
    assert (numbers["amax"], numbers["scale"]) == (x.abs().max(), scale.max())
    if blocks == "tensor":
        snr = 10 * math.log10(numbers["signal"] / numbers["noise"])
        assert snr == pytest.approx(decibels(x, codes, scale), rel=1e-6)
        small, half_step = scale / 16, {E4M3: 16, E5M2: 4096}[fmt]  # of the largest values
        clipped = (x * (1 / small)).abs() >= fmt.max + half_step
        assert counted(x, small, fmt)["overflow"] == clipped.sum() > 0


@OCP
def test_dead_blocks_have_no_code_left_of_something(fmt):
    x = torch.randn(7, 300)
    x.view(-1)[128:256] *= 1e-12  # dies
    x.view(-1)[384:512] = 0  # was nothing
    x.view(-1)[640:768] *= 1e-12
    x.view(-1)[700] = NAN  # is not silent
    x.view(-1)[15 * 128 :] *= 1e-12  # the last two, one of them short
    scale = torch.tensor(0.01)
    numbers = counted(x, scale, fmt)
    assert (numbers["dead"], numbers["blocks"]) == (3, 17)
    assert counted(x, torch.tensor(0.0), fmt)["dead"] == 15
    assert counted(torch.zeros(0, 4), scale, fmt)["blocks"] == 0


def test_calls_of_a_step_add_up():
    out = torch.zeros(len(reference.FIELDS), dtype=torch.int64)
    for factor in (1.0, 3.0, 2.0):
        reference.count(torch.full((2, 5), factor), torch.tensor(factor / 448), E4M3, out)
    assert out[:2].int().view(torch.float32)[0] == 3
    assert out[-1] == 30
    assert out[reference.SUMS].view(torch.float64)[0] == 10 * (1 + 9 + 4)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 200), (2, 70, 129), (0, 4), (17,)], ids=str)
@pytest.mark.parametrize("blocks", ["tensor", "1x128", "128x128"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_counts_as_its_reference(kernel_device, shape, blocks, dtype):
    x = torch.randn(shape) * 2.0 ** torch.randint(-20, 1, shape)
    for i, value in enumerate((0.0, NAN, INF, -INF)):
        x.view(-1)[20 * i + 5 :: 97] = value
    x.view(-1)[256:640] = 1e-8  # of which blocks die
    x, fmt = x.to(dtype), FORMATS["e4m3"]
    if blocks == "tensor" or not x.numel():
        scale = torch.tensor(0.001)
    else:
        finite = x.float().nan_to_num(0, 0, 0).reshape(-1, shape[-1])
        scale = (cast_1x128 if blocks == "1x128" else cast_128x128)(finite, fmt)[1]
    args = fmt, blocks == "128x128"
    expected = counted(x, scale, *args)
    for name in ("signal", "noise"):  # whose terms are the same, and their order is not
        expected[name] = pytest.approx(expected[name], rel=1e-12)
    there = x.to(kernel_device), scale.to(kernel_device)
    assert counted(*there, *args, triton_monitor.count) == expected


@pytest.mark.gpu
def test_the_kernel_counts_large_tensors():
    x = torch.randn(8192, 14336, device="cuda", dtype=torch.bfloat16)
    x[5, 7], x[-1, -1] = NAN, INF
    for scale in (torch.tensor(0.003, device="cuda"), torch.tensor(0.1, device="cuda")):
        expected = counted(x, scale, E4M3)
        for name in ("signal", "noise"):
            expected[name] = pytest.approx(expected[name], rel=1e-12)
        assert counted(x, scale, E4M3, count=triton_monitor.count) == expected


# --- in a model


def test_reads_each_operand_of_each_layer(device):
    model = make(device)
    x = torch.randn(4, 16, 64, device=device, requires_grad=True)
    gradients = []
    model[0].register_full_backward_hook(lambda m, _, g: gradients.append(g[0]))
    with Monitor(model) as monitor:
        step(model, x)
        numbers = monitor.read(wait=True)
    assert list(numbers) == ["0", "2"]
    assert [list(kinds) for kinds in numbers.values()] == [["x", "w", "g"]] * 2
    first = numbers["0"]
    operands = ("x", x, E4M3), ("w", model[0].weight, E4M3), ("g", gradients[0], E5M2)
    for kind, tensor, fmt in operands:
        tensor = tensor.detach().cpu()
        codes, scale = quantize_tensor(tensor, fmt)
        lost = ((codes.float() == 0) & (tensor != 0)).float().mean()
        assert first[kind] == {
            "amax": tensor.abs().max().item(), "scale": scale.item(), "underflow": pytest.approx(lost.item()),
            "overflow": 0.0, "nonfinite": 0.0, "dead_blocks": 0.0,
            "snr_db": pytest.approx(decibels(tensor, codes, scale), rel=1e-6),
        }  # fmt: skip


@pytest.mark.parametrize("recipe", ["current", "tokenwise", "rowwise", "delayed", "blockwise"])
def test_every_recipe_is_watched(recipe):
    model = make(fp8_recipe=recipe)
    with Monitor(model, every=1) as monitor:
        for size in (1.0, 1.0, 100.0):
            step(model, size * torch.randn(32, 64))
        numbers = monitor.read()
    assert monitor.step == 2
    clipped = numbers["0"]["x"]["overflow"] > 0.3
    assert clipped == (recipe == "delayed")  # its scale is the last step's
    assert all(kinds[k]["scale"] > 0 for kinds in numbers.values() for k in "xwg")


def test_where_the_forward_is_in_bfloat16_what_the_weights_gradient_reads_is_sampled():
    model, x = make(precision_for={"*": "forward-bf16"}), torch.full((256, 64), 1e-5)
    x[::128] = 1e4  # beyond E4M3's range beside it, in each square of 128
    with Monitor(model, every=1) as monitor:
        step(model, x)
        assert monitor.read()["0"]["x"]["underflow"] > 0.9


@pytest.mark.parametrize("bad", [NAN, INF])
def test_activations_that_are_not_finite_propagate_and_are_counted(bad):
    model = make()
    x = torch.randn(16, 64)
    x[3, 5] = x[4, 6] = bad
    with Monitor(model) as monitor:
        assert not model(x).isfinite().any()
        numbers = monitor.read()
    assert numbers["0"]["x"]["nonfinite"] == 2
    assert math.isnan(numbers["0"]["x"]["scale"])
    assert numbers["0"]["x"]["amax"] == x[x.isfinite()].abs().max()
    assert numbers["2"]["x"]["nonfinite"] == 16 * 32
    assert monitor.metrics()["fp8/nonfinite"] == 2 + 16 * 32
    assert math.isnan(monitor.metrics()["fp8/fwd_scale"])


def test_metrics_are_flat_and_those_of_the_model():
    model = make()
    with Monitor(model) as monitor:
        assert monitor.metrics() == {}
        step(model, torch.randn(16, 64))
        metrics, numbers = monitor.metrics(), monitor.read()
    assert metrics["fp8/0/x_amax"] == numbers["0"]["x"]["amax"]
    assert metrics["fp8/amax"] == max(numbers[n]["x"]["amax"] for n in "02")
    assert metrics["fp8/fwd_scale"] == max(numbers[n]["x"]["scale"] for n in "02")
    assert metrics["fp8/bwd_scale"] == max(numbers[n]["g"]["scale"] for n in "02")
    sizes = {"x": (16 * 64, 16 * 32), "w": (2048, 2048), "g": (16 * 32, 16 * 64)}
    lost = sum(numbers[n][k]["underflow"] * sizes[k][i] for i, n in enumerate("02") for k in "xwg")
    assert metrics["fp8/underflow"] == pytest.approx(lost / sum(map(sum, sizes.values())))
    assert metrics["fp8/overflow"] == metrics["fp8/nonfinite"] == 0
    assert metrics["fp8/dead_blocks"] == 0
    assert metrics["fp8/grad_snr_db"] == min(numbers[n]["g"]["snr_db"] for n in "02")
    assert len(metrics) == 8 + 2 * 3 * 7
    assert all(isinstance(value, float) for value in metrics.values())


# --- when


def test_samples_every_so_many_steps_of_training():
    model = make()
    with Monitor(model, every=3) as monitor:
        assert (monitor.read(), monitor.step) == ({}, None)
        for now in range(8):
            step(model, torch.randn(16, 64))
            assert (model[0].products.probe is None) == (now % 3 > 0)
            model.eval()
            model(torch.randn(16 + now, 64)).sum().backward()
            model.train()
            assert monitor.read()
            assert monitor.step == now // 3 * 3
        fp8stack.restore(model)  # whose layers are left alone, and no fault of torch.compile's
        with warnings.catch_warnings():
            warnings.simplefilter("error", Fp8StackWarning)
            for _ in range(5):
                step(model, torch.randn(16, 64))
        assert (bool(monitor.read()), monitor.step) == (True, 6)
        fp8stack.initialize(model, None, "O0", compute="native")
        for _ in range(3):
            step(model, torch.randn(16, 64))
        assert (list(monitor.read()), monitor.step) == (["0", "2"], 15)


def test_micro_batches_and_recomputation_leave_fractions_alone():
    model, x = make(), torch.randn(16, 64)
    with Monitor(model, every=1) as monitor:
        loss = model(x).square().mean()
        assert list(monitor.read()["0"]) == ["x", "w"]  # gradients come later
        loss.backward()
        once = monitor.read()
        assert list(once["0"]) == ["x", "w", "g"]
        outer = nn.Sequential(model)
        checkpoint(outer, x, use_reentrant=False).square().mean().backward()
        again = monitor.read()
    assert once == again


def test_remove_ends_it_and_keeps_what_was_read():
    model = make()
    monitor = Monitor(model)
    with pytest.raises(ModelError, match="has a Monitor"):
        Monitor(model)
    step(model, torch.randn(16, 64))
    monitor.remove()
    assert model[0].products.probe is None
    assert not model._forward_pre_hooks
    numbers = monitor.read()
    step(model, torch.randn(16, 64))
    assert monitor.read() == numbers != {}
    Monitor(model).remove()


def test_copies_are_not_watched():
    model = make()
    with Monitor(model, every=1) as monitor:
        step(model, torch.randn(16, 64))
        twin = copy.deepcopy(model)
        assert twin[0].products.probe is None
        numbers = monitor.read()
        step(twin, torch.randn(16, 64))
        assert monitor.read() == numbers
        assert pickle.loads(pickle.dumps(model[0].products)).probe is None


def test_under_compile_it_says_that_it_samples_nothing():
    torch._dynamo.reset()
    model = make()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with Monitor(model, every=1) as monitor:
        with pytest.warns(Fp8StackWarning, match=r"nothing under torch\.compile"):
            step(compiled, torch.randn(16, 64))
        with warnings.catch_warnings():
            warnings.simplefilter("error", Fp8StackWarning)
            step(compiled, torch.randn(16, 64))
        assert monitor.read() == {}


def test_layers_compiled_inside_an_eager_model_neither_report_nor_recompile():
    torch._dynamo.reset()
    model = make()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model[0].compile(backend=counter, fullgraph=True)
    x = torch.randn(16, 64)
    with Monitor(model, every=2) as monitor:
        for _ in range(4):
            step(model, x)
        assert list(monitor.read()) == ["2"]
    assert counter.frame_count == 1


def test_a_model_without_fp8_layers():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.warns(Fp8StackWarning, match="no FP8 layers"):
        monitor = Monitor(model)
    step(model, torch.randn(2, 4))
    assert monitor.metrics() == {}
