"""Corners of the contract that a script can reach: writes to weights, skipped layers, hand-overs, shared storage."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from helpers import TinyLM, assert_same_bits, batch, build, through_file, train
from layers import COPIES
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fp8stack
from fp8stack import checkpoint
from fp8stack.errors import Fp8StackWarning, ModelError, UnsupportedDeviceError
from fp8stack.optim import AdamW


@pytest.mark.parametrize("value", [0.0, 3.0, -0.0, 1e-30])
@pytest.mark.parametrize("preset", [None, "fp8-lm"])
def test_a_weight_that_is_written_is_the_weight_that_is_stepped(value, preset):
    model, optimizer = build("O2", preset=preset)
    train(model, optimizer, 3)
    with torch.no_grad():
        model.up.weight[:, :64] = value
    optimizer.param_groups[0]["lr"] = 1e-4
    train(model, optimizer, 1)
    written = checkpoint.master_state_dict(model, optimizer)["up.weight"][:, :64]
    assert ((written - value).abs() <= 2e-3 + 2**-8 * abs(value)).all()
    assert model(*batch(0)).isfinite()


RELEASED = {"step_in_backward": True, "gradients": "keep"}


@pytest.mark.parametrize(
    ("level", "options"),
    [("O0", {}), ("O1", {}), ("O2", {}), ("O2", {"matmuls": True}), ("O2", RELEASED)],
    ids=["O0", "O1", "O2", "matmuls", "released"],
)
def test_a_model_is_converted_and_loaded_by_swapping_its_parameters(level, options, monkeypatch):
    """torch's announced default. A forward of leaves may be alive; hooks of the parameters stay behind."""
    runs = []
    for swaps in (False, True):
        model, optimizer = build(level, **options)
        train(model, optimizer, 1)
        if swaps:
            monkeypatch.setattr(
                torch.__future__, "get_swap_module_params_on_conversion", lambda: True
            )
            output = model.up(torch.ones(4, 128))  # which keeps its graph
            model.to("cpu").load_state_dict(copy.deepcopy(model.state_dict()))
            assert output.requires_grad
            monkeypatch.undo()
        gradients = []
        for step in range(1, 4):
            optimizer.zero_grad()
            model(*batch(step)).backward()
            gradients.append(type(model.up.weight.grad))
            if swaps and step == 1 and level != "O0" and not options.get("step_in_backward"):
                for p in model.parameters():  # hooks are made anew in the step
                    if p.ndim > 1:
                        p.grad = fp8stack.BlockScaledTensor.quantize(p.grad)
            optimizer.step()
        runs.append([*checkpoint.master_state_dict(model, optimizer).values()])
        kind = {"O0": torch.Tensor}.get(level, fp8stack.BlockScaledTensor)
        assert gradients[1:] == [type(None) if "step_in_backward" in options else kind] * 2
    assert_same_bits(*runs)


def test_a_weight_that_was_resized_or_cast_is_refused_by_name_of_what_to_do():
    model, optimizer = build("O2")
    weight, optimizer.param_groups[0]["lr"] = model.embed.weight, 0.1
    kept = weight.data
    for other, told in (
        (torch.cat([kept, kept[:12]]), r"float.*of shape \(332, 128\) after its state.*restore"),
        (kept[:300], r"became torch.bfloat16 of shape \(300, 128\)"),
        (kept.float(), "became torch.float32 of .*Change it back"),
        (kept.half(), r"became torch.float16"),
        (kept.double(), r"is torch.float64; AdamW takes"),
    ):
        optimizer.zero_grad()
        weight.data = other
        weight.grad = torch.ones_like(other)
        before = model.norm.weight.detach().clone()
        model.norm.weight.grad = torch.ones_like(before)
        for use in (optimizer.step, lambda: fp8stack.restore(model, optimizer)):
            with pytest.raises(ModelError, match=told):
                use()
        if other.dtype is not torch.float64:  # which is exported as it is
            with pytest.raises(ModelError, match=told):
                checkpoint.master_state_dict(model, optimizer)
        assert_same_bits(model.norm.weight, before)
    optimizer.zero_grad()
    weight.data = kept
    train(model, optimizer, 1)
    weight.data = torch.cat([weight.data, weight.data[:12]])
    optimizer.state.pop(weight)
    train(model, optimizer, 1)
    fp8stack.restore(model, optimizer)
    assert model.embed.weight.shape == (332, 128)
    assert model.embed.weight.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loading_a_16_bit_model_replaces_what_its_masters_held(dtype):
    """Vectors and small matrices have float32 masters; one that is not the weight's any more must not win."""
    model, optimizer = build("O2", dtype=dtype)
    model(*batch(0)).backward()
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    optimizer.param_groups[0]["lr"] = 1e-6
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in model.parameters():
        assert (p - 0.5).abs().max() <= 2**-8
        assert (optimizer.master_weight(p) - 0.5).abs().max() <= 2**-8


@pytest.mark.parametrize("preset", [None, "fp8-lm"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_checkpoint_of_another_level_sets_weights_and_masters(level, preset, tmp_path):
    original = build(level)
    train(*original, 5)
    weights = checkpoint.master_state_dict(*original)
    checkpoint.save(tmp_path / "run.pt", *original)
    model, optimizer = build("O2", preset=preset)
    checkpoint.load(tmp_path / "run.pt", model, optimizer)
    for name, value in checkpoint.master_state_dict(model, optimizer).items():
        bound = 2**-16 if preset is None else 2**-10
        assert (value - weights[name]).abs().max() <= bound * weights[name].abs().max(), name


def test_an_fp8stack_optimizer_is_taken_as_it_is_or_not_at_all():
    model, optimizer = build(dtype=torch.bfloat16, optimizer=AdamW)
    train(model, optimizer, 3)
    masters = checkpoint.master_state_dict(model, optimizer)
    model, returned = fp8stack.initialize(model, optimizer, "O2")
    assert returned is optimizer
    assert_same_bits(checkpoint.master_state_dict(model, optimizer).values(), masters.values())
    train(model, optimizer, 3, start=3)
    other = TinyLM()
    for option in ({"master": "keep"}, {"master": "fp32"}, {"min_numel": 1}, {"states": "fp32"}):
        with pytest.raises(ModelError, match=f"made with {next(iter(option))}="):
            fp8stack.initialize(other, AdamW(other.parameters(), **option), "O2")
    own = AdamW(other.parameters(), lr=1e-6, master="split24")
    fp8stack.initialize(other, own, "O2")  # whose default would be 32 bits
    assert own.state[other.up.weight]["remainder"].dtype is torch.int8
    assert fp8stack.get_report(other).master == "split24"


def test_skipped_layers_are_left_entirely_alone():
    model, optimizer = build("O2", skip=["he*"])
    train(model, optimizer, 2)
    assert type(model.head) is nn.Linear
    assert model.head.weight.dtype is torch.float32
    assert type(model.head.weight.grad) is torch.Tensor
    assert optimizer.state[model.head.weight]["exp_avg"].dtype is torch.float32
    assert "exp_avg_code" in optimizer.state[model.up.weight]
    again = pickle.loads(pickle.dumps(optimizer))
    assert list(again.overrides.values()) == [("fp32", "fp32")]
    shared = nn.Linear(128, 128)
    both = nn.ModuleDict({"a": shared, "b": shared})  # skipped by either name
    fp8stack.initialize(both, torch.optim.AdamW(both.parameters()), "O2", skip=["b"])
    assert type(shared) is nn.Linear


def test_a_pattern_that_matches_nothing_says_so():
    model, optimizer = build()
    said = r"skip='haed' matches no module.*Did you mean \"head\""
    with pytest.raises(UnsupportedDeviceError, match=said):
        fp8stack.initialize(model, optimizer, "O2", skip=["haed"], strict=True)
    assert type(model.up) is nn.Linear
    with pytest.warns(Fp8StackWarning, match=said):
        fp8stack.initialize(model, optimizer, "O2", skip=["haed"])


def test_parameters_that_share_storage_stay_shared():
    model = TinyLM()
    model.head.weight.data = model.embed.weight.data
    model, _ = fp8stack.initialize(model, torch.optim.AdamW(model.parameters()), "O2")
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert "shares its storage" in fp8stack.get_report(model).kept["head.weight"]


def test_an_optimizer_serves_one_model():
    a, b = TinyLM(), TinyLM()
    optimizer = torch.optim.AdamW([*a.parameters(), *b.parameters()])
    _, returned = fp8stack.initialize(a, optimizer, "O2")
    for used in (optimizer, returned):
        with pytest.raises(ModelError, match=r"an initialized model.*or fp8stack\.restore"):
            fp8stack.initialize(b, used, "O2")
    assert type(b.up) is nn.Linear


def test_a_copied_optimizer_steps_its_own_model():
    model, optimizer = build(optimizer=AdamW)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # patches step on the instance
    memo = {}
    other, copied = copy.deepcopy(model, memo), copy.deepcopy(optimizer, memo)
    before = model.up.weight.detach().clone()
    train(other, copied, 1)
    assert_same_bits(model.up.weight, before)
    assert not torch.equal(other.up.weight, before)


def test_the_old_optimizer_says_so_when_it_is_used_and_its_hooks_move_on():
    model, optimizer = build()
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("stepped"))
    _, returned = fp8stack.initialize(model, optimizer, "O2")
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(ModelError, match="use the optimizer that it returned"):
            use()
    train(model, returned, 2)
    assert calls == ["stepped"] * 2


def test_the_default_dtype_does_not_matter():
    fp8stack.capability.probe.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model, optimizer = build("O2")
        train(model, optimizer, 2)
    finally:
        torch.set_default_dtype(torch.float32)


class OwnSGD(torch.optim.Optimizer):
    """As a user writes one."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-5})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


OTHERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-5),
    "own": OwnSGD,
    "no master": lambda p: AdamW(p, lr=1e-5, master="keep"),
    "bitsandbytes": lambda p: pytest.importorskip("bitsandbytes").optim.AdamW8bit(p, lr=1e-5),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_optimizer_over_weights_that_have_masters(make, dtype):
    """It would step the upper bits alone, and most of the update be rounded away."""
    model, optimizer = build("O2", dtype=dtype)
    train(model, optimizer, 1)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    other = make(model.parameters())
    with pytest.raises(
        ModelError, match=rf"{type(other).__name__} would step \w+\.weight in bfl.*restore"
    ):
        train(model, other, 1)
    with pytest.raises(ModelError, match=r"would step \w+\.weight"):  # as Lightning steps
        other.step(lambda: model(*batch(0)).backward())
    assert_same_bits([p for _, p in model.named_parameters()], list(weights.values()))
    train(model, AdamW(model.parameters(), lr=1e-5), 1)  # which makes masters of its own
    train(model, optimizer, 1)
    elsewhere = TinyLM()
    train(elsewhere, make(elsewhere.parameters()), 1)
    model, _ = fp8stack.restore(model, optimizer)
    train(model, make(model.parameters()), 1)


def test_a_model_that_is_freed_while_another_steps_changes_no_hooks():
    """torch goes through the hooks of all optimizers before a step, and the garbage collector runs when it likes."""
    model, optimizer = build("O2")
    gc.disable()
    handle = register_optimizer_step_pre_hook(lambda *_: gc.collect() and None)
    try:
        freed = build("O2")[0]
        freed.itself, freed = freed, weakref.ref(freed)
        train(model, optimizer, 1)
    finally:
        handle.remove()
        gc.enable()
    assert freed() is None
    with pytest.raises(ModelError, match="would step"):
        train(model, torch.optim.AdamW(model.parameters()), 1)


def test_nothing_is_refused_for_a_model_that_is_gone():
    model, optimizer = build("O2")
    weights = [p for p in model.parameters() if p.dtype is torch.bfloat16]
    del model, optimizer
    gc.collect()
    for p in weights:
        p.grad = torch.ones_like(p)
    torch.optim.SGD(weights, lr=0.1).step()


def test_another_optimizer_moves_a_model_without_masters_as_it_would():
    moved = []
    for level in (None, "O0", "O1"):
        model, _ = build(level)
        before = model.up.weight.detach().clone()
        train(model, torch.optim.AdamW(model.parameters(), lr=1e-5), 20)
        moved.append(float((model.up.weight - before).norm().detach()))
    assert max(moved) < 1.1 * min(moved)


def test_a_copy_has_all_the_bits_of_the_masters():
    model, optimizer = build("O2")
    train(model, optimizer, 3)
    copied = copy.deepcopy(model)
    masters = checkpoint.master_state_dict(model, optimizer)
    assert model.up.weight.dtype is torch.bfloat16
    for form in ("copy", "copy of it", "file", "pickle"):
        other = copied if form == "copy" else copy.deepcopy(copied)
        if form == "pickle":
            other = pickle.loads(pickle.dumps(copied))
        state = other.state_dict()
        if form == "file":
            state = through_file(state)
        assert_same_bits([state[key] for key in masters], list(masters.values()))
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in other.parameters())
    part, whole = copy.deepcopy(model.up), copy.deepcopy(nn.ModuleDict({"part": model}))
    assert_same_bits(
        [part.weight.detach(), whole["part"].up.weight.detach()], [masters["up.weight"]] * 2
    )
    before = copied.up.weight.detach().clone()
    x = batch(0)
    assert abs(copied.eval()(*x) - model(*x)) < 0.01 * model(*x)
    train(copied, torch.optim.AdamW(copied.parameters(), lr=1e-5), 20)  # in float32
    assert 1e-5 < (copied.up.weight - before).abs().mean() < 2e-4
    torch.compile(copied, backend="aot_eager")(*x)


@pytest.mark.parametrize("again", [COPIES["pickle"], COPIES["save"]], ids=["pickle", "save"])
def test_a_new_optimizer_over_a_pickled_model_says_what_it_loses(again):
    """Its weights are bfloat16, and small updates of them are lost: it moved 0.035 of the way, without a word."""
    model, optimizer = build("O2")
    train(model, optimizer, 1)
    pickled = again(model)
    assert pickled.up.weight.dtype is torch.bfloat16
    adamw = torch.optim.AdamW(pickled.parameters(), lr=1e-5)
    with pytest.warns(
        Fp8StackWarning, match=r"AdamW steps 4 weights in bfloat16 alone.*model\.float\(\)"
    ):
        train(pickled, adamw, 1)
    train(pickled, adamw, 1)  # told once
    for made in (
        lambda m: AdamW(m.parameters(), lr=1e-5),
        lambda m: torch.optim.AdamW(m.float().parameters()),
    ):
        pickled = again(model)
        train(pickled, made(pickled), 1)
    both = again((model, optimizer))
    train(*both, 1)


@pytest.mark.parametrize("order", ["together", "model first", "optimizer first"])
def test_an_optimizer_that_is_copied_too_goes_on_with_the_copy(order):
    model, optimizer = build("O2")
    train(model, optimizer, 5)
    memo = {}
    if order == "optimizer first":
        stepped = copy.deepcopy(optimizer, memo)
        other = copy.deepcopy(model, memo)
    elif order == "model first":
        other = copy.deepcopy(model, memo)
        stepped = copy.deepcopy(optimizer, memo)
    else:
        other, stepped = copy.deepcopy((model, optimizer))
    start = checkpoint.master_state_dict(model, optimizer)
    found = checkpoint.master_state_dict(other, stepped)
    assert_same_bits([found[key] for key in start], list(start.values()))
    for each, its in ((model, optimizer), (other, stepped)):
        train(each, its, 10, start=5)
    expected, found = (
        checkpoint.master_state_dict(*pair) for pair in ((model, optimizer), (other, stepped))
    )
    for key in ("up.weight", "embed.weight"):  # whose gradients are ordinary ones in the copy
        moved = (expected[key] - start[key]).norm()
        assert (found[key] - expected[key]).norm() < 0.1 * moved


@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_averages_of_torch_move_as_far_as_they_should(level):
    """Made after `initialize` they do so by themselves; one made before wants copies, which hold the masters."""
    model, optimizer = build(level)
    made = {
        "ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)),
        "buffers": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True),
        "swa": AveragedModel(model),
        "own": AveragedModel(model, avg_fn=lambda a, p, n: 0.999 * a + 0.001 * p),
        "of masters": AveragedModel(build()[0], multi_avg_fn=get_ema_multi_avg_fn(0.999)),
    }
    if level == "O2" and torch.__version__ < (2, 12):  # which has averages of one dtype alone
        made = {kind: made[kind] for kind in ("own", "of masters")}
    exact, first, swa = None, None, []
    for step in range(30):
        train(model, optimizer, 1, start=step)
        for kind, average in made.items():
            average.update_parameters(copy.deepcopy(model) if kind == "of masters" else model)
        weight = checkpoint.master_state_dict(model, optimizer)["up.weight"].double()
        first = weight if exact is None else first
        exact = weight if exact is None else 0.999 * exact + 0.001 * weight
        swa.append(weight)
    for kind, average in made.items():
        expected = torch.stack(swa).mean(0) if kind == "swa" else exact
        moved = (expected - first).norm()
        found = average.module.up.weight
        assert found.dtype is torch.float32
        bound = {"of masters": 1e-3, "swa": 0.03}.get(kind, 0.15) if level == "O2" else 1e-3
        # the first update copies the weights as they are: rounded to bfloat16 at O2
        start = first if kind == "of masters" or level != "O2" else first.bfloat16().double()
        assert ((found - start) - (expected - first)).norm() < bound * moved, kind
