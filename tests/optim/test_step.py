"""Steps through a table of pointers, one launch for many tensors, against the plain reference step on the same tensors.

Without a GPU the kernels run in Triton's interpreter on CPU tensors. On a GPU they run without the fast arithmetic
here, whose rounding `tests/kernels` compares; the scalars of a step may still differ in the last bit of a float64.
"""

import math

import pytest
import torch
from helpers import assert_same_bits, every_two, random_parameters, set_gradients, snapshot
from layers import captured
from torch import nn

import fp8stack
from fp8stack import BlockScaledTensor
from fp8stack.errors import ConfigError
from fp8stack.optim import SGD, Adam, AdamW, Lion, Muon, triton_step
from fp8stack.tensor import plain

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from the interpreter

SHAPES = [(4, 128), (5, 208), (3, 50), (130,), (3, 200), (4, 18, 3, 3), (), (0,)]
SMALL = {"min_numel": 256}  # so that small matrices are quantized, and the interpreter is quick


@pytest.fixture
def through_kernels(monkeypatch):
    """Let optimizers use the kernels on a CPU too, where Triton's interpreter runs them."""
    monkeypatch.setattr(triton_step, "FAST", False)

    def choose(on):
        monkeypatch.setattr("fp8stack.optim.optimizer.triton_runs_on", lambda device: on)

    return choose


def assert_alike(ours, theirs):
    """Compare parameters and every tensor of state of two optimizers."""
    found, expected = snapshot(*ours), snapshot(*theirs)
    if not torch.cuda.is_available():
        assert_same_bits(found, expected)
        return
    assert found.keys() == expected.keys()
    for name, y in expected.items():
        x = found[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        x, y = x.float(), y.float()  # codes too
        differ = ((x - y).abs() > 1e-6 * y.abs() + 1e-7).float().sum()
        assert differ <= 1e-3 * x.numel(), (name, float(differ))


def run_both(make, device, through_kernels, steps=3, dtype=torch.float32, change=None, **options):
    """Take the same steps with the kernels and with the reference; return both (parameters, optimizer)."""
    results = []
    for on in (True, False):
        through_kernels(on)
        parameters = random_parameters(SHAPES, device, dtype)
        optimizer = make(parameters, **SMALL, **options)
        for step in range(steps):
            set_gradients(parameters, step, fp8=True)
            if change is not None:
                change(step, parameters, optimizer)
            optimizer.step()
        assert bool(optimizer._tables) == on
        results.append((parameters, optimizer))
    assert_alike(*results)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (AdamW, {"weight_decay": 0.1}),
        (AdamW, {"states": "4bit", "master": "none"}),
        (AdamW, {"states": "fp8-lm", "master": "fp16"}),
        (AdamW, {"states": "fp8", "master": "split32", "max_grad_norm": 0.5}),
        (AdamW, {"states": "bf16", "maximize": True}),
        (AdamW, {"states": "keep", "master": "keep"}),
        (SGD, {"momentum": 0.9, "nesterov": True}),
        (SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
        (SGD, {}),
        (Lion, {"weight_decay": 0.1}),
    ],
    ids=lambda x: getattr(x, "__name__", "-".join(f"{v}" for v in x.values()) if isinstance(x, dict) else x),
)  # fmt: skip
def test_kernels_step_as_the_reference(kind, options, dtype, kernel_device, through_kernels):
    cut = dtype is torch.bfloat16 and options.get("master") == "keep"
    if cut and not torch.cuda.is_available():
        pytest.skip("Triton's interpreter cuts to bfloat16 where this format rounds")
    run_both(kind, kernel_device, through_kernels, lr=0.01, dtype=dtype, **options)


def test_groups_with_their_own_numbers_and_formats_share_launches(kernel_device, through_kernels):
    def make(parameters, **options):
        groups = [
            {"params": parameters[:2], "weight_decay": 0.5},
            {"params": parameters[2:5], "lr": 0.1, "betas": (0.5, 0.9)},
            {"params": parameters[5:], "states": "fp32"},
        ]
        return AdamW(groups, **options)

    def change(step, parameters, optimizer):
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)

    (_, ours), _ = run_both(make, kernel_device, through_kernels, lr=0.02, change=change)
    (tables,) = ours._tables[None]
    assert len(tables.batches) < len(SHAPES)
    assert "exp_avg" in ours.state[ours.param_groups[2]["params"][0]]
    assert "exp_avg_code" in ours.state[ours.param_groups[0]["params"][0]]


@every_two(2, states=["8bit", "4bit", "fp8-lm"], kernels=[True, False], clip=[None, 1.0])
def test_the_default_dtype_changes_no_bit(states, kernels, clip, kernel_device, through_kernels):
    """Kernels take scales and scalars for float32, whatever torch.set_default_dtype says."""
    through_kernels(kernels)
    results = []
    for default in (torch.float32, torch.bfloat16, torch.float64):
        parameters = random_parameters([(4, 128), (130,)], kernel_device, torch.bfloat16)
        optimizer = AdamW(parameters, states=states, max_grad_norm=clip, **SMALL)
        for step in range(2):
            set_gradients(parameters, step, fp8=True)
            torch.set_default_dtype(default)
            try:
                nn.utils.clip_grad_norm_(parameters, 2.0)
                optimizer.step()
            finally:
                torch.set_default_dtype(torch.float32)
        results.append(snapshot(parameters, optimizer))
    assert_same_bits(results[1:], [results[0]] * 2)


def come_and_go(step, parameters, optimizer, device):
    """Gradients of two in turns; one becomes another kind: new tables."""
    parameters[step % 2].grad = None
    if step == 3:
        parameters[4].grad = torch.ones_like(parameters[4])


def stay_away(step, parameters, optimizer, device):
    """The address of such a gradient is 0 in the table: no kernel may follow it."""
    if step:
        parameters[0].grad = parameters[3].grad = None


def move_states(step, parameters, optimizer, device):
    """What trainers do that keep optimizer state on the host between steps."""
    for entry in optimizer.state.values() if step in (1, 2) else ():
        for key, value in entry.items():
            entry[key] = value.cpu().clone() if step == 1 else value.cpu().clone().to(device)


def replace_weights(step, parameters, optimizer, device):
    for p in parameters:
        p.data = p.data.clone()


@pytest.mark.parametrize(
    ("happens", "steps", "options"),
    [
        (come_and_go, [2, 2, *[4] * 6], {}),
        (stay_away, [1, 4, 4, 1, *[4] * 4], {}),
        (stay_away, [1, 4, 4, 1, *[4] * 4], {"max_grad_norm": 1.0}),
        (move_states, [4] * 8, {}),
        (replace_weights, [4] * 8, {}),
    ],
)
def test_what_happens_between_steps(happens, steps, options, kernel_device, through_kernels):
    def change(step, parameters, optimizer):
        happens(step, parameters, optimizer, kernel_device)

    options = {"lr": 0.01, "change": change, **options}
    for parameters, optimizer in run_both(AdamW, kernel_device, through_kernels, 4, **options):
        assert [float(optimizer.state[p]["step"]) for p in parameters] == steps


def test_tables_are_kept_while_only_addresses_change(kernel_device, through_kernels):
    through_kernels(True)
    parameters = random_parameters(SHAPES, kernel_device)
    optimizer = AdamW(parameters, lr=0.01, **SMALL)
    set_gradients(parameters, 0, fp8=True)
    optimizer.step()
    (tables,) = optimizer._tables[None]
    for step in (1, 2):
        old = [p.grad for p in parameters]
        set_gradients(parameters, step, fp8=True)
        optimizer.step()
        assert optimizer._tables[None] == [tables]
        del old


ORDERS = (lambda x: x.to(memory_format=torch.channels_last), lambda x: x.t().contiguous().t())


@every_two(2, kernels=[0, 1], kind=[AdamW, SGD], dtype=[torch.float32, torch.bfloat16], fp8=[0, 1])
def test_weights_in_another_memory_order_take_the_same_steps(
    kernels, kind, dtype, fp8, kernel_device, through_kernels
):
    """channels_last convolutions and transposed weights: blocks are row-major, storage is what it is."""
    through_kernels(kernels)
    options, results = {"momentum": 0.9} if kind is SGD else {}, []
    for turned in (False, True):
        parameters = random_parameters([(8, 4, 3, 3), (5, 208)], kernel_device, dtype)
        pairs = list(zip(parameters, ORDERS, strict=True)) if turned else []
        for p, order in pairs:
            p.data = order(p.data)
        optimizer = kind(parameters, lr=0.01, **SMALL, **options)
        for step in range(3):
            set_gradients(parameters, step)
            for p, order in pairs:
                p.grad = order(p.grad)
            for p in parameters if fp8 else ():
                p.grad = BlockScaledTensor.quantize(p.grad)
            optimizer.step()
        assert all(p.is_contiguous() is not turned for p in parameters)
        results.append(snapshot(parameters, optimizer))
    assert_same_bits(results[1], results[0])


BAD = (math.nan, math.inf, -math.inf, 2.0**63)
STEPPED = ((AdamW, None), (AdamW, 1.0), (SGD, None))


@every_two(2, bad=BAD, place=(0, 3), stepped=STEPPED)
def test_a_bad_gradient_skips_the_whole_step_and_is_counted(
    bad, place, stepped, kernel_device, through_kernels
):
    (kind, max_grad_norm), before = stepped, []

    def change(step, parameters, optimizer):
        if step == 1:
            gradient = plain(parameters[place].grad).clone()
            gradient.view(-1)[5] = bad
            quantized = BlockScaledTensor.quantize(gradient)
            parameters[place].grad = gradient if place else quantized
            before.append(snapshot(parameters, optimizer))
        elif step == 2:
            assert_same_bits(snapshot(parameters, optimizer), before.pop())

    options = {"lr": 0.01, "max_grad_norm": max_grad_norm}
    options |= {"momentum": 0.9} if kind is SGD else {}
    for _, optimizer in run_both(kind, kernel_device, through_kernels, change=change, **options):
        assert float(optimizer.skipped_steps) == 1
        assert {float(entry["step"]) for entry in optimizer.state.values()} == {2.0}


def test_a_scaler_and_a_clip_are_applied_in_the_step(kernel_device, through_kernels):
    def change(step, parameters, optimizer):
        optimizer.grad_scale = torch.tensor(8.0, device=kernel_device)
        optimizer.found_inf = torch.tensor(float(step == 2), device=kernel_device)

    options = {"lr": 0.01, "max_grad_norm": 1.0}
    results = run_both(AdamW, kernel_device, through_kernels, 4, change=change, **options)
    for parameters, optimizer in results:
        assert float(optimizer.skipped_steps) == 1
        norm = sum(float(p.grad.double().norm()) ** 2 for p in parameters) ** 0.5
        assert float(optimizer.grad_norm) == pytest.approx(norm / 8, rel=1e-5)


def test_a_bad_number_is_named_and_nothing_is_changed(kernel_device, through_kernels):
    through_kernels(True)
    parameters = random_parameters(SHAPES, kernel_device)
    optimizer = AdamW(parameters, lr=0.1, **SMALL)
    set_gradients(parameters, 0, fp8=True)
    optimizer.step()
    before = [p.detach().clone() for p in parameters]
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ConfigError, match="lr=nan must be a finite number >= 0"):
        optimizer.step()
    assert_same_bits(parameters, before)
    assert float(optimizer.state[parameters[0]]["step"]) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [AdamW, Muon])
@pytest.mark.parametrize("level", ["as it is", "O0", "O1", "O2"])
def test_a_whole_step_is_captured_in_a_cuda_graph_with_a_tensor_learning_rate(kind, level):
    losses = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).cuda().bfloat16()
        rate = torch.tensor(0.01, device="cuda")
        optimizer = kind(model.parameters(), lr=rate, max_grad_norm=1.0)
        if level != "as it is":
            model, optimizer = fp8stack.initialize(model, optimizer, opt_level=level)
        data = torch.randn(18, 32, 128, device="cuda", dtype=torch.bfloat16)
        x = data[0].clone()

        def train_step(model=model, optimizer=optimizer, x=x):
            optimizer.zero_grad(set_to_none=True)
            loss = (model(x) - x).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss

        graph, loss = captured(train_step) if graphed else (None, [train_step() for _ in range(3)])
        values = []
        for i in range(1, 18):
            x.copy_(data[i])
            rate.fill_(0.01 / i)
            if graphed:
                graph.replay()
            else:
                loss = train_step()
            values.append(float(loss))
        losses.append(values)
        steps = {float(entry["step"]) for entry in optimizer.state.values()}
        assert steps == {20.0}
    assert losses[0] == losses[1]


def _codes(optimizer, p):
    """Return the codes of m and of v as integers in the order of what they stand for."""
    result = []
    for key in ("exp_avg_code", "exp_avg_sq_code"):
        byte = optimizer.state[p][key].clone().view(torch.uint8).int()
        if byte.shape[1] < p.shape[1]:
            byte = torch.stack([byte & 15, byte >> 4])
        sign = 128 if key == "exp_avg_code" else 256
        result.append(torch.where(byte >= sign, sign - byte, byte))
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("states", ["8bit", "fp8", "4bit"])
def test_fast_arithmetic_changes_one_code_in_a_thousand(states, monkeypatch):
    """Every step from the same state, on FP8 gradients, whose m and v lie on the formats' ties more often than not."""
    weight = (torch.randn(1024, 4096, device="cuda") * 0.02).bfloat16()
    pair = []
    for _ in range(2):
        p = nn.Parameter(weight.clone())
        pair.append((p, AdamW([p], lr=1e-3, betas=(0.9, 0.95), states=states)))
    (p, fast), (q, exact) = pair
    for _ in range(4):
        p.grad = q.grad = BlockScaledTensor.quantize((torch.randn_like(p) * 1e-3).bfloat16())
        for arithmetic, optimizer in ((True, fast), (False, exact)):
            monkeypatch.setattr(triton_step, "FAST", arithmetic)
            optimizer.step()
        for one, other in zip(_codes(fast, p), _codes(exact, q), strict=True):
            difference = (one - other).abs()
            assert difference.max() <= 1
            assert (difference > 0).float().mean() <= 1e-3
        with torch.no_grad():
            p.copy_(q)
            for key, value in exact.state[q].items():
                fast.state[p][key].copy_(value)


def test_a_gradient_that_loses_its_alignment_gets_other_kernels(kernel_device, through_kernels):
    """DDP's buckets move gradients after the first step, anywhere."""
    through_kernels(True)
    p, twin = (random_parameters([(16, 256)], kernel_device)[0] for _ in range(2))
    optimizer, other = (AdamW([q], lr=0.1, min_numel=256) for q in (p, twin))
    for first in (0, 1, 3):
        flat = torch.randn(4 + p.numel(), device=kernel_device)
        p.grad = flat[first : first + p.numel()].view(16, 256)
        twin.grad = p.grad.clone()
        optimizer.step()
        other.step()
        assert torch.equal(p, twin)
    ((tables,),) = optimizer._tables.values()
    assert tables.batches[0].launch.rows == "any"


@pytest.mark.parametrize("make", [lambda g: g[::2], lambda g: g[:1].expand(128)])
def test_a_vector_s_gradient_may_have_any_strides(make, kernel_device, through_kernels):
    through_kernels(True)
    p = nn.Parameter(torch.zeros(128, device=kernel_device))
    p.grad = make(torch.arange(1.0, 257, device=kernel_device))
    SGD([p], lr=1.0).step()
    assert torch.equal(p, -p.grad)


@pytest.mark.parametrize(
    ("kind", "options", "switched"),
    [
        (Adam, {"weight_decay": 0.0}, {"weight_decay": 0.5}),
        (SGD, {}, {"momentum": 0.9}),
        (SGD, {"momentum": 0.9}, {"nesterov": True}),
    ],
)
def test_an_option_that_is_switched_on_takes_effect(
    kind, options, switched, kernel_device, through_kernels
):
    def change(step, parameters, optimizer):
        optimizer.param_groups[0].update(switched if step else {})

    run_both(kind, kernel_device, through_kernels, 4, change=change, lr=0.1, **options)


@pytest.mark.parametrize("kernels", [True, False])
def test_only_parameters_with_a_gradient_are_marked_as_changed(
    kernels, kernel_device, through_kernels
):
    through_kernels(kernels)
    parameters = random_parameters([(4, 128)] * 3, kernel_device)
    optimizer = AdamW(parameters)
    set_gradients(parameters, 0, fp8=True)
    optimizer.step()
    parameters[1].grad, versions = None, [p._version for p in parameters]
    optimizer.step()
    changed = [p._version > old for p, old in zip(parameters, versions, strict=True)]
    assert changed == [True, False, True]


@pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flat_partitions_are_stepped_as_matrices_of_one_row(
    dtype, kernels, kernel_device, through_kernels
):
    """As ZeRO does it: a group at a time, in a list of its own, with the others out of sight.

    So each has the noise of the only parameter of an optimizer.
    """
    through_kernels(kernels)
    sizes = (1000, 128 * 9, 300, 200)
    flat = random_parameters([(n,) for n in sizes], kernel_device, dtype)
    rows = random_parameters([(1, n) for n in sizes], kernel_device, dtype)
    ours = AdamW([{"params": [p], "flat": True} for p in flat], lr=1e-2, **SMALL)
    theirs = [AdamW([row], lr=1e-2, **SMALL) for row in rows]
    groups = ours.param_groups
    for step in range(4):
        set_gradients(rows, step)
        for group, p, row, own in zip(groups, flat, rows, theirs, strict=True):
            p.grad = row.grad[0].clone()
            ours.param_groups = [group]
            ours.step()
            own.step()
        ours.param_groups = groups
    for p, row, own in zip(flat, rows, theirs, strict=True):
        a, b = ours.state[p], own.state[row]
        assert a.keys() == b.keys()
        assert ("exp_avg_code" in a) == (p.numel() >= 256)
        assert torch.equal(p.detach(), row.detach()[0])
        for key in a:
            assert torch.equal(a[key].flatten(), b[key].flatten()), key
