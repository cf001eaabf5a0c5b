"""bitsandbytes behind fp8stack's optimizers: its own numbers, with our masters, gradients, skips and checkpoints."""

import copy
import math
import pickle
import re
import sys

import pytest
import torch
from helpers import (
    TinyLM,
    assert_same_bits,
    random_parameters,
    set_gradients,
    snapshot,
    through_file,
    train,
)  # fmt: skip
from optimizer_files import MASTERS
from torch import nn

import fp8stack
from fp8stack import BlockScaledTensor, capability, checkpoint
from fp8stack.errors import ConfigError, Fp8StackWarning, ModelError, UnsupportedDeviceError
from fp8stack.kernels.reference import bitsandbytes_format
from fp8stack.memory import measure
from fp8stack.optim import bitsandbytes as ours
from fp8stack.optim.state_formats import decode_moment

bnb = pytest.importorskip("bitsandbytes")
TRITON = "fp8stack.optim.optimizer.triton_runs_on"

KINDS = [
    pytest.param("AdamW", {"lr": 1e-3, "weight_decay": 0.1}, id="adamw"),
    pytest.param("Adam", {"lr": 1e-3}, id="adam"),
    pytest.param("Lion", {"lr": 1e-4, "weight_decay": 0.1}, id="lion"),
    pytest.param("SGD", {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}, id="sgd"),
]


def parameters(device="cpu", dtype=torch.float32):
    """A matrix with a last block that is not full, one of more than two dimensions, a small one and a vector."""
    return random_parameters([(70, 130), (16, 8, 40), (8, 8), (12,)], device, dtype)


def feed(params, step, scale=1.0):
    set_gradients(params, step, scale=scale)


def run(optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        feed(params, step)
        optimizer.step()


# --- numbers


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("part", [2**24, 1])
def test_float32_parameters_take_bitsandbytes_own_steps(kind, options, part, device, monkeypatch):
    """Bit for bit, whole or in parts of 256 rows."""
    monkeypatch.setattr(ours, "PART", part)
    mine, theirs = parameters(device), parameters(device)
    rows = torch.randn(600, 24).to(device)
    mine.append(nn.Parameter(rows.clone()))
    theirs.append(nn.Parameter(rows.clone()))
    optimizer = getattr(ours, kind)(mine, **options)
    reference = getattr(bnb.optim, f"{kind}8bit")(theirs, **options)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, reference)]
    for step in range(6):
        feed(mine, step)
        feed(theirs, step)
        for stepped in (optimizer, reference, *schedulers):
            stepped.step()
    for p, q in zip(mine, theirs, strict=True):
        assert_same_bits(p, q)
        for i, name in enumerate(optimizer.moments, 1):
            found, expected = optimizer.state[p], reference.state[q]
            code = found.get(f"{name}_code", found.get(name))
            assert_same_bits(code, expected[f"state{i}"])
            if f"absmax{i}" in expected:
                assert_same_bits(found[f"{name}_scale"], expected[f"absmax{i}"])


def masters_of(module, kind, device, dtype=torch.bfloat16, **options):
    """Return master weights after ten steps with float32 states."""
    params = parameters(device, dtype)
    optimizer = getattr(module, kind)(params, lr=0.01, states="fp32", **options)
    run(optimizer, params, 10)
    assert set(optimizer.state[params[0]]) >= {"step", *optimizer.moments}
    return [optimizer.master_weight(p) for p in params]


def assert_close_masters(mine, theirs):
    """Compare; on a GPU every move of bitsandbytes' Adam is 2.7e-5 of itself shorter (seen on an H200).

    One factor for all elements, so a scalar: probably its bias corrections, in fast float32.
    """
    for x, y in zip(mine, theirs, strict=True):
        close = (x - y).abs() <= 2**-15 * y.abs() + 1e-5
        assert close.float().mean() > 0.99
        torch.testing.assert_close(x, y, rtol=2**-6, atol=1e-3)  # where bfloat16 rounds otherwise


@pytest.mark.parametrize("master", MASTERS)
def test_every_master_is_kept_as_fp8stack_keeps_it(master, device):
    """Also the noise of stochastic rounding is the same; bitsandbytes rounds the arithmetic otherwise."""
    options = {"master": master, "weight_decay": 0.0}
    mine, theirs = (masters_of(m, "AdamW", device, **options) for m in (ours, fp8stack.optim))
    assert_close_masters(mine, theirs)


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("AdamW", torch.bfloat16, {"maximize": True}),
        ("AdamW", torch.bfloat16, {}),  # float32 weights take bitsandbytes' own steps, which on CUDA decay at the end
        *((kind, dtype, {} if kind == "Adam" else {"momentum": 0.9})
          for kind in ("Adam", "SGD") for dtype in (torch.bfloat16, torch.float32)),
    ],
)  # fmt: skip
def test_weights_decay_as_fp8stack_s(kind, dtype, options, device):
    """Decoupled, and L2, of which bitsandbytes is told nothing: its Adam would decouple it."""
    options = {"weight_decay": 0.5, **options}
    mine, theirs = (masters_of(m, kind, device, dtype, **options) for m in (ours, fp8stack.optim))
    assert_close_masters(mine, theirs)
    undecayed = masters_of(ours, kind, device, dtype, **{**options, "weight_decay": 0.0})
    assert (undecayed[0] - mine[0]).abs().max() > 0.01


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from Triton's interpreter
@pytest.mark.parametrize(
    ("kind", "master"),
    [*(("AdamW", master) for master in MASTERS), ("Adam", "split32"), ("Adam", "keep"),
     ("Lion", "none"), ("Lion", "keep"), ("SGD", "fp16"), ("SGD", "keep")],
)  # fmt: skip
def test_parts_are_the_whole(kind, master, kernel_device, monkeypatch):
    """Parts of 256 rows through the kernels, against whole tensors through plain torch.

    Kernels know masters, bitsandbytes the kinds: of both each, and each kind with a master and without.
    """
    options = next(case.values[1] for case in KINDS if case.values[0] == kind)
    pytest.importorskip("triton")
    results = []
    for kernels in (False, True):
        monkeypatch.setattr(TRITON, lambda _, on=kernels: on)
        monkeypatch.setattr(ours, "PART", 1 if kernels else 2**24)
        shapes = [(260, 24), (3, 5), (130,), ()]  # more rows than a part, blocks that end early
        params = [torch.linspace(-1, 1, math.prod(x)).view(x).bfloat16() for x in shapes]
        if master != "fp16":
            params.append(torch.linspace(-1, 1, 4160).view(32, 130).bfloat16().t())
        params = [nn.Parameter(p.to(kernel_device)) for p in params]
        optimizer = getattr(ours, kind)(params, master=master, **options)
        for step in range(2):
            feed(params, step)
            for p in params[: -1 if step else None]:
                p.grad = BlockScaledTensor.quantize(p.grad) if p.ndim == 2 else p.grad
            params[1].grad = None if step else params[1].grad
            optimizer.step()
        results.append(snapshot(params, optimizer))
    assert_same_bits(*results)


# --- gradients


def test_fp8_gradients_are_their_values(device):
    results = []
    for fp8 in (True, False):
        params = parameters(device)
        optimizer = ours.AdamW(params)
        for step in range(3):
            feed(params, step)
            for p in params[:2]:
                gradient = BlockScaledTensor.quantize(p.grad)
                p.grad = gradient if fp8 else gradient.dequantize()
            optimizer.step()
        results.append(snapshot(params, optimizer))
    assert_same_bits(*results)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**63])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_bad_gradient_skips_the_whole_step(bad, fp8, device):
    params = parameters(device, torch.bfloat16)
    optimizer = ours.AdamW(params)
    run(optimizer, params, 2)
    before = snapshot(params, optimizer)
    feed(params, 2)
    params[0].grad[3, 7] = bad
    if fp8:
        params[0].grad = BlockScaledTensor.quantize(params[0].grad)
    optimizer.step()
    assert_same_bits(snapshot(params, optimizer), before)
    assert float(optimizer.skipped_steps) == 1
    run(optimizer, params, 1, start=3)
    assert float(optimizer.state[params[0]]["step"]) == 3


@pytest.mark.parametrize("module", [ours, fp8stack.optim])
def test_a_scaler_and_a_clip_are_applied_in_the_step(module, device):
    plain, scaled = parameters(device), parameters(device)
    a = module.AdamW(plain, lr=0.01, states="fp32")
    b = module.AdamW(scaled, lr=0.01, states="fp32", max_grad_norm=0.5)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for step in range(4):
        feed(plain, step)
        norm = torch.nn.utils.clip_grad_norm_(plain, 0.5)
        a.step()
        feed(scaled, step, 1024.0)
        scaler.scale(torch.zeros((), device=device))  # makes its scale
        scaler.step(b)
        scaler.update()
        torch.testing.assert_close(b.grad_norm, norm)
    before = snapshot(scaled, b)
    for p, q in zip(plain, scaled, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    feed(scaled, 4)
    scaled[0].grad[0] = torch.inf
    scaler.step(b)
    scaler.update()
    assert_same_bits(snapshot(scaled, b), before)
    assert float(b.skipped_steps) == 1
    assert scaler.get_scale() == 512


# --- state


def test_small_tensors_and_those_named_keep_float32():
    params = parameters()
    extra = nn.Parameter(torch.randn(64, 128))
    optimizer = ours.AdamW([*params, extra])
    optimizer.override(extra, states="fp32")
    run(optimizer, [*params, extra], 1)
    for p in params[:2]:
        assert optimizer.state[p]["exp_avg_code"].dtype is torch.uint8
        assert optimizer.state[p]["exp_avg_scale"].shape == (-(-p.numel() // 256),)
    for p in (*params[2:], extra):
        assert optimizer.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}
    group = {"params": [nn.Parameter(torch.randn(64, 128))], "states": "fp32", "lr": 0.0}
    optimizer.add_param_group(group)
    before = group["params"][0].detach().clone()
    run(optimizer, group["params"], 1)
    assert_same_bits(group["params"][0].detach(), before)
    assert "exp_avg" in optimizer.state[group["params"][0]]


def test_the_format_is_bitsandbytes():
    for signed in (True, False):
        values = bnb.functional.create_dynamic_map(signed=signed)
        assert torch.equal(values, bitsandbytes_format.table(signed, torch.device("cpu")))
        x = torch.randn(100, 77) if signed else torch.randn(100, 77).square()
        codes, scale = bitsandbytes_format.encode(x, signed)
        theirs, state = bnb.functional.quantize_blockwise(x, code=values, blocksize=256)
        assert torch.equal(scale, state.absmax)
        decoded = bitsandbytes_format.decode(theirs, state.absmax, values)
        assert torch.equal(decoded, bnb.functional.dequantize_blockwise(theirs, state))
        error = (bitsandbytes_format.decode(codes, scale, values) - x).abs()
        smallest = values.abs()[values != 0].min() * scale.max()
        assert (error <= (decoded - x).abs() * (1 + 1e-5) + smallest).all()
    zero_and_tiny = torch.zeros(256).index_fill(0, torch.tensor([0]), 1e-12)
    zero_and_tiny[1] = 1.0
    codes, scale = bitsandbytes_format.encode(zero_and_tiny, signed=False)
    decoded = bitsandbytes_format.decode(codes, scale, values)  # those without a sign
    assert decoded[0] > 0  # a v that became zero would explode the update
    assert (decoded[2:] == 0).all()


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_loading_continues_bit_for_bit(kind, options):
    results = []
    for reload in (False, True):
        params = parameters(dtype=torch.bfloat16)
        optimizer = getattr(ours, kind)(params, **options)
        run(optimizer, params, 3)
        if reload:
            packed = through_file(optimizer.state_dict())
            optimizer = getattr(ours, kind)(params, **{**options, "lr": 1.0})
            optimizer.load_state_dict(packed)
        run(optimizer, params, 3, start=3)
        results.append(snapshot(params, optimizer))
    assert_same_bits(*results)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_checkpoints_go_to_fp8stack_s_own_optimizer_and_back(kind, options):
    params = parameters(dtype=torch.bfloat16)
    there, here = getattr(ours, kind), getattr(fp8stack.optim, kind)
    for source, target in ((there, here), (here, there)):
        a = source(params, **options)
        run(a, params, 4)
        b = target(params, **options)
        b.load_state_dict(through_file(a.state_dict()))
        for p in params:
            assert torch.equal(b.master_weight(p), a.master_weight(p))
            assert b.state[p]["step"] == 4
            for name in a.moments:
                x, y = (decode_moment(name, o.state[p], p.shape) for o in (a, b))
                assert (x - y).norm() <= 2**-5 * x.norm()
        run(b, params, 1)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_step_their_own_parameters(duplicate):
    params = parameters(dtype=torch.bfloat16)
    optimizer = ours.AdamW(params, max_grad_norm=1.0)
    run(optimizer, params, 2)
    their_params, theirs = duplicate((params, optimizer))
    run(optimizer, params, 2, start=2)
    run(theirs, their_params, 2, start=2)
    assert_same_bits(snapshot(their_params, theirs), snapshot(params, optimizer))


# --- initialize and restore


def build(optimizer=torch.optim.AdamW, device="cpu", lr=3e-3, warm=0, **overrides):
    torch.manual_seed(0)
    model = TinyLM().to(device)
    optimizer = optimizer(model.parameters(), lr=lr)
    if warm:
        train(model, optimizer, warm, device=device)
        optimizer.zero_grad()
    return *fp8stack.initialize(model, optimizer, "O2", **overrides), optimizer


def test_it_trains_as_our_own_does(device):
    losses = {}
    for backend in ("fp8stack", "bitsandbytes"):
        model, optimizer, _ = build(device=device, optimizer_backend=backend)
        losses[backend] = train(model, optimizer, 30, device=device)
        report = fp8stack.get_report(model)
        used = measure(model, optimizer).per_parameter()["total"]
        assert abs(used - report.bytes_per_parameter) < 0.01
    assert type(optimizer) is ours.AdamW
    assert report.states == "bitsandbytes 8-bit block 256"
    assert report.bytes_per_parameter == pytest.approx(6.0625, abs=1e-3)
    assert report.fallbacks == []
    assert losses["bitsandbytes"][-1] < 0.01
    a, b = (torch.tensor(x) for x in losses.values())
    assert (a - b).abs().max() < 0.1


def test_state_carries_over_and_comes_back():
    model, optimizer, source = build(warm=5, optimizer_backend="bitsandbytes")
    torch.manual_seed(0)
    twin = TinyLM()
    plain = torch.optim.AdamW(twin.parameters(), lr=3e-3)
    train(twin, plain, 5)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            found = decode_moment(name, optimizer.state[p], p.shape)
            expected = plain.state[q][name]
            assert (found - expected).norm() <= 2**-5 * expected.norm()
        assert optimizer.state[p]["step"] == 5
    with pytest.raises(ModelError, match="use the optimizer that it returned"):
        source.step()
    train(model, optimizer, 3, start=5)
    masters = checkpoint.master_state_dict(model, optimizer)
    moments = checkpoint.torch_state_dict(optimizer)["state"]
    model, back = fp8stack.restore(model, optimizer)
    assert back is source
    for i, (name, p) in enumerate(model.named_parameters()):
        assert_same_bits(p.detach(), masters[name], name)
        assert back.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert_same_bits(back.state[p]["exp_avg"], moments[i]["exp_avg"])
        assert back.state[p]["step"] == 8
    train(model, back, 2, start=8)


def test_fp8stack_s_lion_becomes_lion8bit_and_comes_back():
    options = {"lr": 1e-3, "warm": 3, "optimizer_backend": "bitsandbytes"}
    model, optimizer, source = build(fp8stack.optim.Lion, **options)
    assert type(source) is fp8stack.optim.Lion
    assert optimizer.inner.optimizer_name == "lion"
    losses = train(model, optimizer, 20, start=3)
    assert losses[-1] < 0.2 * losses[0]
    masters = checkpoint.master_state_dict(model, optimizer)
    model, back = fp8stack.restore(model, optimizer)
    assert back is source
    for name, p in model.named_parameters():
        assert_same_bits(p.detach(), masters[name], name)
    assert back.state[model.up.weight]["exp_avg_scale"].shape == (256, 1)
    train(model, back, 2, start=23)


def test_an_optimizer_made_for_bitsandbytes_is_taken_as_it_is():
    model, optimizer, source = build(ours.AdamW)
    assert optimizer is source
    assert fp8stack.get_report(model).states == "bitsandbytes 8-bit block 256"
    assert train(model, optimizer, 20)[-1] < 0.1
    match = r"made with optimizer_backend='bitsandbytes'.*'fp8stack'\. Pass initialize"
    with pytest.raises(ModelError, match=match):
        build(ours.AdamW, optimizer_backend="fp8stack")


# --- which backend


@pytest.fixture
def ampere(monkeypatch):
    """What capability says of a GPU without FP8. The libraries themselves are as they are."""
    answer = capability.Answer(False, "cuda:0 is NVIDIA A100 (8.0)")
    monkeypatch.setattr(capability, "fp8_hardware", lambda device: answer)
    gemm = capability.Answer(True, "not what this is about")
    monkeypatch.setattr(capability, "fp8_gemm", lambda device: gemm)


def test_auto_is_bitsandbytes_on_a_gpu_without_fp8(ampere):
    match = r"A100 \(8\.0\), without FP8; using bitsandbytes' optimizer instead"
    with pytest.warns(Fp8StackWarning, match=match) as caught:
        model, optimizer, _ = build()
    assert len(caught) == 1
    assert type(optimizer) is ours.AdamW
    assert len(fp8stack.get_report(model).fallbacks) == 1
    assert train(model, optimizer, 20)[-1] < 0.1
    with pytest.raises(UnsupportedDeviceError, match=match):
        build(strict=True)


def test_auto_leaves_what_bitsandbytes_cannot_do_to_fp8stack(ampere):
    def nesterov(params, lr):
        return torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True)

    with pytest.warns(Fp8StackWarning, match=r"A100.*using fp8stack's.*nesterov=True does not go"):
        _, optimizer, _ = build(nesterov)
    assert type(optimizer) is fp8stack.optim.SGD
    with pytest.warns(Fp8StackWarning, match=r"A100.*using fp8stack's.*embed.*states='4bit'"):
        _, optimizer, _ = build(states_for={"embed": "4bit"})
    for options in ({"states": "4bit"}, {"optimizer_backend": "fp8stack"}):  # asked for
        model, optimizer, _ = build(**options)
        assert type(optimizer) is fp8stack.optim.AdamW
        assert fp8stack.get_report(model).fallbacks == []
    _, optimizer, _ = build(fp8stack.optim.AdamW)
    assert type(optimizer) is fp8stack.optim.AdamW


def test_without_bitsandbytes(ampere, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    match = r'bitsandbytes is not installed: pip install "bitsandbytes>=0.50"'
    with pytest.warns(Fp8StackWarning, match=rf"A100.*using fp8stack's optimizer.*{match}"):
        _, optimizer, _ = build()
    assert type(optimizer) is fp8stack.optim.AdamW
    with pytest.raises(UnsupportedDeviceError, match=match):
        build(optimizer_backend="bitsandbytes")
    with pytest.raises(UnsupportedDeviceError, match=match):
        ours.AdamW(parameters())


def test_a_library_that_does_not_load_says_why(tmp_path, monkeypatch):
    """A package in its place that fails as a damaged one would; the one installed is not touched."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folder = tmp_path / "bitsandbytes"
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    cases = (
        ("raise ImportError('libfoo.so: no such file')", r"cannot be imported \(libfoo.*pip inst"),
        ("import scipy_that_it_needs", r"cannot be imported \(No module named 'scipy_that"),
        ("raise RuntimeError('no driver\\nlong')", r"cannot be imported \(no driver\): pip"),
        ("__version__ = '0.43.1'", r"bitsandbytes 0.43.1 is too old: pip install"),
    )
    for code, match in cases:
        (folder / "__init__.py").write_text(code)
        answer = capability.bitsandbytes_optimizer("cpu")
        sys.modules.pop("bitsandbytes", None)
        assert not answer
        assert re.search(match, answer.reason), answer.reason


def test_four_bits_are_our_own(device):
    match = "bitsandbytes has no 4-bit optimizer; fp8stack's kernels are used instead"
    with pytest.warns(Fp8StackWarning, match=match):
        _, optimizer, _ = build(device=device, optimizer_backend="bitsandbytes", states="4bit")
    assert type(optimizer) is fp8stack.optim.AdamW
    assert optimizer.states == "4bit"
    with pytest.raises(UnsupportedDeviceError, match=match):
        build(optimizer_backend="bitsandbytes", states="4bit", strict=True)


def sgd(**options):
    return lambda params, lr: torch.optim.SGD(params, lr=lr, **options)


class Mine(fp8stack.optim.AdamW):
    pass


def stepping(params, lr):
    optimizer = fp8stack.optim.AdamW(params, lr=lr)
    optimizer.step_in_backward()
    return optimizer


PAGED = {"optimizer_backend": "bitsandbytes-paged"}
REFUSED = [
    (None, {"optimizer_backend": "bnb"}, ConfigError, "optimizer_backend='bnb' is not a choi"),
    (None, {"states": "fp8"}, ConfigError, "states='fp8'.*bitsandbytes keeps"),
    (None, {"preset": "fp8-lm"}, ConfigError, "states='fp8-lm'.*bitsandbytes keeps"),
    (None, {"states_for": {"up": "bf16"}}, ConfigError, "'up'.: states='bf16' .*bitsandbytes keeps"),
    (None, {"offload": "cpu"}, ConfigError, "bitsandbytes-paged"),
    (None, PAGED, UnsupportedDeviceError, r"on the CPU.*managed memory of CUDA"),
    (sgd(), {}, ConfigError, "SGD8bit needs momentum > 0.*fp8stack"),
    (sgd(momentum=0.9, nesterov=True), {}, ConfigError, "nesterov=True.*SGD8bit.*fp8stack"),
    (sgd(momentum=0.9, dampening=0.5), {}, ConfigError, r"dampening=0\.5.*SGD8bit.*fp8stack"),
    (Mine, {}, ModelError, "Mine does not go with bitsandbytes, which has no counterpart"),
    (stepping, {}, ModelError, r"AdamW does not go with .*steps in backward on its own"),
]  # fmt: skip


@pytest.mark.parametrize(("optimizer", "options", "error", "match"), REFUSED)
def test_what_bitsandbytes_cannot_do_is_refused_at_the_call(optimizer, options, error, match):
    torch.manual_seed(0)
    model = TinyLM()
    before = model.up.weight.detach().clone()
    source = (optimizer or torch.optim.AdamW)(model.parameters(), lr=0.1)
    with pytest.raises(error, match=match):
        fp8stack.initialize(model, source, "O2", **{"optimizer_backend": "bitsandbytes", **options})
    assert type(model.up) is nn.Linear
    assert_same_bits(model.up.weight.detach(), before)


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        ("AdamW", {"states": "4bit"}, r"states='4bit' does not go with .*bitsandbytes"),
        ("AdamW", {"offload": "cpu"}, "bitsandbytes-paged"),
        ("AdamW", {"betas": (1.0, 0.9)}, "betas=1.0 must be"),
        ("SGD", {}, r"needs momentum > 0.*fp8stack\.optim"),
        ("SGD", {"momentum": 0.9, "paged": True}, "no paged SGD"),
        ("AdamW", {"paged": True}, "managed memory of CUDA"),
    ],
)
def test_bad_options_of_the_optimizers_themselves(kind, options, match):
    with pytest.raises((ConfigError, UnsupportedDeviceError), match=match):
        getattr(ours, kind)(parameters(), **options)


def test_a_group_of_other_states_is_refused():
    group = {"params": [nn.Parameter(torch.ones(64, 64))], "states": "bf16"}
    with pytest.raises(ConfigError, match=r"states='bf16' does not go with .*bitsandbytes"):
        ours.AdamW(parameters()).add_param_group(group)


# --- paged


def pages():
    """Where bitsandbytes has managed memory."""
    manager = bnb.functional.GlobalPageManager.get_instance()
    return {x.data_ptr() for x in manager.paged_tensors}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Lion"])
def test_paged_steps_are_bitsandbytes_own(kind, monkeypatch):
    start = torch.randn(700, 512)
    results = []
    for part in (2**24, 1):
        monkeypatch.setattr(ours, "PART", part)
        p, q = (nn.Parameter(start.clone().cuda()) for _ in range(2))
        small, other = (nn.Parameter(torch.ones(64, 128, device="cuda")) for _ in range(2))
        optimizer = getattr(ours, kind)([p, small], lr=1e-3, paged=True)
        reference = getattr(bnb.optim, f"Paged{kind}8bit")([q, other], lr=1e-3)
        for step in range(4):
            feed([p, small], step)
            feed([q, other], step)
            optimizer.step()
            reference.step()
        assert type(optimizer.inner).__name__ == f"Paged{kind}8bit"
        page = optimizer.state[p]["exp_avg_code"]
        assert page.device.type == "cpu"
        assert page.data_ptr() in pages()
        assert optimizer.state[small]["exp_avg_code"].is_cuda
        assert_same_bits(p, q)
        assert_same_bits(page, reference.state[q]["state1"])
        results.append(snapshot([p, small], optimizer))
    assert_same_bits(*results)


@pytest.mark.gpu
def test_paged_state_is_saved_loaded_and_copied():
    p = nn.Parameter(torch.randn(700, 512).cuda().bfloat16())
    optimizer = ours.AdamW([p], paged=True)
    run(optimizer, [p], 2)
    page = optimizer.state[p]["exp_avg_code"]
    packed = through_file(optimizer.state_dict())
    (q,), copied = copy.deepcopy(([p], optimizer))
    weight = p.detach().clone()
    run(optimizer, [p], 2, start=2)
    expected = snapshot([p], optimizer)
    run(copied, [q], 2, start=2)
    assert_same_bits(snapshot([q], copied), expected)
    p.data.copy_(weight)
    optimizer.load_state_dict(packed)
    run(optimizer, [p], 2, start=2)
    assert_same_bits(snapshot([p], optimizer), expected)
    assert optimizer.state[p]["exp_avg_code"] is page  # bitsandbytes never frees one
    assert copied.state[q]["exp_avg_code"].data_ptr() in pages() - {page.data_ptr()}


@pytest.mark.gpu
def test_a_paged_run_through_initialize():
    model, optimizer, _ = build(device="cuda", optimizer_backend="bitsandbytes-paged")
    assert optimizer.paged
    assert fp8stack.get_report(model).states == "bitsandbytes 8-bit block 256 paged"
    assert train(model, optimizer, 20, device="cuda")[-1] < 0.1
    fp8stack.restore(model, optimizer)
    model = TinyLM().cuda()
    source = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match="no paged SGD"):
        fp8stack.initialize(model, source, "O2", optimizer_backend="bitsandbytes-paged")


@pytest.mark.gpu
def test_a_step_on_another_stream_is_the_same():
    results = []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        p = nn.Parameter(torch.ones(2048, 2048, device="cuda").bfloat16())
        optimizer = ours.AdamW([p])
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(5):
                p.grad = torch.full_like(p, 0.5)
                optimizer.step()
        torch.cuda.synchronize()
        results.append(snapshot([p], optimizer))
    assert_same_bits(*results)


def test_epsilon_of_zero_leaves_what_has_no_gradient(device):
    p = nn.Parameter(torch.ones(64, 128, device=device).bfloat16())
    p.grad = torch.zeros_like(p)
    optimizer = ours.AdamW([p], eps=0.0, weight_decay=0.0)
    optimizer.step()
    assert (p == 1).all()
    assert optimizer.inner.state == {}  # a step leaves nothing behind


def test_momentum_of_single_groups_is_enough():
    torch.manual_seed(0)
    model = TinyLM()
    groups = [{"params": list(model.parameters()), "momentum": 0.9}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    model, optimizer = fp8stack.initialize(model, optimizer, optimizer_backend="bitsandbytes")
    assert type(optimizer) is ours.SGD
    assert optimizer.defaults["momentum"] == 0  # as the user's
    losses = train(model, optimizer, 5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("version", ["0.51rc1", "main", None])
def test_any_version_has_an_answer(version, monkeypatch):
    monkeypatch.setattr(bnb, "__version__", version)
    answer = capability.bitsandbytes_optimizer("cpu")
    assert bool(answer) is (version == "0.51rc1")
    assert answer or "too old" in answer.reason
