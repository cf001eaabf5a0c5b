"""The contract of `initialize` and `restore`: what a training script built before the call goes on working after it."""

import copy
import json
import re
import warnings
from functools import partial
from inspect import signature

import pytest
import torch
from helpers import TinyLM, assert_same_bits, batch, build, train
from layers import COPIES, Bare
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack import BlockScaledTensor, memory
from fp8stack.comm import gradients
from fp8stack.errors import Fp8StackWarning, ModelError, UnsupportedDeviceError
from fp8stack.nn import Bf16Linear, Fp8Linear, StoredEmbedding

LEVELS = ["O0", "O1", "O2"]


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    "NAdam": lambda p, lr: torch.optim.NAdam(p, lr=2e-3),
    "amsgrad": lambda p, lr: torch.optim.AdamW(p, lr=lr, amsgrad=True),
}


def note(optimizer, given):
    given.append(optimizer)
    return optimizer


@pytest.mark.parametrize(
    ("level", "kind"),
    [*((x, "AdamW") for x in LEVELS), ("O1", "NAdam"), ("O1", "amsgrad"), ("O2", "Adam"), ("O2", "SGD")],
)  # fmt: skip
def test_trains_as_the_baseline_does(level, kind, device):
    """O1 takes any optimizer, and keeps the states of one that it has no counterpart of."""
    given, make = [], OPTIMIZERS[kind]
    baseline = train(*build(device=device, optimizer=make), 25, device=device)
    model, optimizer = build(level, device, optimizer=lambda p, lr: note(make(p, lr), given))
    losses = train(model, optimizer, 25, device=device)
    assert baseline[-1] < 0.2 * baseline[0]
    assert abs(losses[-1] - baseline[-1]) < (0.01 if kind == "AdamW" else 0.02) * baseline[0]
    assert (optimizer is given[0]) == (level == "O0" or kind in ("NAdam", "amsgrad"))
    if level == "O1" and kind != "AdamW":
        assert optimizer.state[model.up.weight]["exp_avg"].dtype is torch.float32


def test_parameters_keep_their_identity_and_state_dict_its_keys_and_shapes():
    model, optimizer = build()
    before = dict(model.named_parameters())
    shapes = {k: v.shape for k, v in model.state_dict().items()}
    assert fp8stack.initialize(model, optimizer, "O2", enabled=False) == (model, optimizer)
    assert type(model.up) is nn.Linear
    returned, _ = fp8stack.initialize(model, optimizer, "O2")
    assert returned is model
    assert all(p is before[name] for name, p in model.named_parameters())
    assert {k: v.shape for k, v in model.state_dict().items()} == shapes
    assert isinstance(model.up, nn.Linear)
    assert model.up.weight.dtype is torch.bfloat16
    assert model.norm.weight.dtype is torch.float32


@pytest.mark.parametrize("level", LEVELS)
def test_a_scheduler_built_before_drives_the_rate_after(level):
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, returned = fp8stack.initialize(model, optimizer, level)
    assert returned.param_groups is optimizer.param_groups
    before = returned.param_groups[0]["lr"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when it thinks that no step was taken
        train(model, returned, 1)
        scheduler.step()
    assert (before, returned.param_groups[0]["lr"]) == (3e-3, 1.5e-3)
    weight = fp8stack.checkpoint.master_state_dict(model, returned)["norm.weight"].clone()
    returned.param_groups[0]["lr"] = 0.0
    train(model, returned, 1)
    assert_same_bits(fp8stack.checkpoint.master_state_dict(model, returned)["norm.weight"], weight)


@pytest.mark.parametrize("level", LEVELS)
def test_tied_embeddings_stay_tied_and_are_stepped_once(level):
    model, optimizer = build(level, tied=True)
    assert model.head.weight is model.embed.weight
    losses = train(model, optimizer, 30)
    assert model.head.weight is model.embed.weight
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.state[model.embed.weight]["step"].item() == 30
    baseline = train(*build(tied=True), 30)
    assert abs(losses[-1] - baseline[-1]) < 0.01 * baseline[0]


@pytest.mark.parametrize("level", LEVELS)
def test_a_frozen_layer_stays_frozen(level):
    model, optimizer = build()  # which owns it, as scripts often do
    model.up.weight.requires_grad_(False)
    before = model.up.weight.detach().clone()
    model, optimizer = fp8stack.initialize(model, optimizer, level)
    train(model, optimizer, 3)
    assert not model.up.weight.requires_grad
    assert model.up.weight.grad is None
    assert_same_bits(model.up.weight, before)


@pytest.mark.parametrize("level", LEVELS)
def test_ema_copies_and_hooks_go_on_working(level):
    model, optimizer = build()
    early = copy.deepcopy(model)  # a float32 copy made before, updated by hand
    calls = []
    model.up.register_forward_hook(lambda *_: calls.append("forward"))
    model.up.weight.register_hook(lambda gradient: calls.append(type(gradient)))
    model, optimizer = fp8stack.initialize(model, optimizer, level)
    late = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # torch's own, made after
    for step in range(4):
        train(model, optimizer, 1, start=step)
        # a float32 copy, since torch before 2.12 cannot average bfloat16 weights in float32
        late.update_parameters(copy.deepcopy(model))
        for average, current in zip(early.parameters(), model.parameters(), strict=True):
            average.data.mul_(0.5).add_(current.data, alpha=0.5)
    assert calls == ["forward", torch.Tensor] * 4
    assert early(*batch(0)).isfinite()
    assert late(*batch(0)).isfinite()
    difference = (late.module.up.weight.float() - early.up.weight).norm()
    assert difference < 0.02 * early.up.weight.norm()


def test_state_carries_over_in_the_middle_of_a_run():
    """Switching at step 20 continues like never switching; starting the moments anew would not."""
    baseline = train(*build(), 40)
    model, optimizer = build()
    train(model, optimizer, 20)
    moments = optimizer.state[model.up.weight]["exp_avg"].clone()
    model, optimizer = fp8stack.initialize(model, optimizer, "O2")
    state = optimizer.state[model.up.weight]
    assert state["step"].item() == 20
    decoded = fp8stack.checkpoint.torch_state_dict(optimizer)["state"]
    index = next(i for i, p in enumerate(model.parameters()) if p is model.up.weight)
    assert (decoded[index]["exp_avg"] - moments).norm() < 0.03 * moments.norm()
    losses = train(model, optimizer, 20, start=20)
    for ours, theirs in zip(losses, baseline[20:], strict=True):
        assert abs(ours - theirs) < 0.02 * baseline[0]


@pytest.mark.parametrize("level", LEVELS)
def test_restore_undoes_it(level):
    model, optimizer = build()
    classes = [type(m) for m in model.modules()]
    model, converted = fp8stack.initialize(model, optimizer, level)
    train(model, converted, 20)
    masters = fp8stack.checkpoint.master_state_dict(model, converted)
    model(*batch(0)).backward()
    again, original = fp8stack.restore(model, converted)
    assert again is model
    assert original is optimizer
    assert [type(m) for m in model.modules()] == classes
    for name, p in model.named_parameters():
        assert p.dtype is torch.float32
        assert_same_bits(p, masters[name], name)
        assert type(p.grad) is torch.Tensor
    losses = train(model, original, 20, start=20)
    assert optimizer.state[model.up.weight]["step"].item() == 40
    baseline = train(*build(), 40)
    assert abs(losses[-1] - baseline[-1]) < 0.02 * baseline[0]
    with pytest.raises(ModelError, match="nothing to undo"):
        fp8stack.restore(model)
    fp8stack.initialize(model, optimizer, level)  # and again


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("waiting", [0, 150_000])
def test_few_gradients_wait_to_become_fp8(level, waiting, monkeypatch):
    """Besides the gradient that arrives, no more bytes than may wait are in full precision; in the end none are."""
    monkeypatch.setattr(gradients, "WAITING", waiting)
    model, _ = build(level)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    most = []

    def record(p):
        plain = [q.grad.nbytes for q in matrices if type(q.grad) is torch.Tensor and q is not p]
        most.append(sum(plain))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(record)
    model(*batch(0)).backward()
    assert len(most) == 7
    assert max(most) <= waiting
    assert max(most) > 0 or not waiting
    assert {type(p.grad) for p in matrices} == {BlockScaledTensor}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_clipping_and_zero_grad(level, set_to_none):
    """Four micro-batches of one batch are the batch, to the rounding of FP8."""
    model, optimizer = build(level)
    tokens, targets = batch(0)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=set_to_none)
        for i in range(4):
            (model(tokens[i : i + 1], targets[i : i + 1]) / 4).backward()
    # the same weights and GEMMs, gradients summed as torch does
    reference, _ = build(level, gradients="keep")
    for i in range(4):
        (reference(tokens[i : i + 1], targets[i : i + 1]) / 4).backward()
    exact = reference.up.weight.grad.float()
    gradient = model.up.weight.grad.dequantize().float()
    assert (gradient - exact).norm() < 0.03 * exact.norm()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    clipped = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.testing.assert_close(clipped, torch.tensor(0.01), rtol=1e-4, atol=0)
    assert norm > 0.01
    optimizer.zero_grad(set_to_none=set_to_none)
    gradient = model.up.weight.grad
    assert gradient is None if set_to_none else not gradient.any()


@pytest.mark.skipif(
    "decoupled_weight_decay" not in signature(torch.optim.Adam).parameters, reason="older torch"
)
def test_adam_with_decoupled_decay_is_adamw():
    makes = partial(torch.optim.Adam, decoupled_weight_decay=True), torch.optim.AdamW
    first, second = (build("O2", optimizer=partial(make, weight_decay=0.5)) for make in makes)
    assert train(*first, 5) == train(*second, 5)


@pytest.mark.parametrize("level", LEVELS)
def test_activation_checkpointing_compile_and_autocast(level):
    model, _ = build(level)
    tokens, targets = batch(0)

    def run(forward):
        model.zero_grad()
        loss = forward(tokens, targets)
        loss.backward()
        return loss, model.up.weight.grad.clone() + 0

    plain, expected = run(model)
    again = run(lambda *given: checkpoint(model, *given, use_reentrant=False))
    assert_same_bits(again[1], expected)
    loss, gradient = run(torch.compile(model, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0)
    assert (gradient - expected).norm() < 0.02 * expected.norm()
    assert model.embed(torch.tensor([1])).dtype is torch.float32
    assert model.up(torch.zeros(3, 128)).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert model.up(torch.zeros(3, 128)).dtype is torch.bfloat16
        assert model(tokens, targets).isfinite()


def test_gradients_of_new_parameter_groups_join_and_survive_restore():
    model, optimizer = build("O2")
    extra = nn.Linear(128, 128)
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 1e-4})
    extra(torch.randn(4, 128)).sum().backward()
    assert isinstance(extra.weight.grad, BlockScaledTensor)
    optimizer.step()
    assert "exp_avg_code" in optimizer.state[extra.weight]
    _, original = fp8stack.restore(model, optimizer)
    extra.zero_grad()
    extra(torch.randn(4, 128)).sum().backward()
    original.step()


def test_bytes_per_parameter_are_what_the_levels_promise():
    """Measured from live tensors, on parameters of matrices."""
    limits = {None: 16.0, "O0": 16.0, "O1": 13.2, "O2": 6.2}
    for level, limit in limits.items():
        torch.manual_seed(0)
        model = TinyLM(dim=256)
        optimizer = torch.optim.AdamW(model.parameters())
        if level:
            model, optimizer = fp8stack.initialize(model, optimizer, level)
        train(model, optimizer, 2)  # the gradients of the last step are still alive
        used = memory.measure(model, optimizer).per_parameter()
        assert round(used["total"], 3) <= limit, (level, used)  # a step count is 4 bytes a tensor
        if level:
            planned = fp8stack.get_report(model).bytes_per_parameter
            assert abs(planned - used["total"]) < 0.01, (level, planned, used)


def test_the_fp8_lm_preset_keeps_the_paper_s_formats():
    model, optimizer = build("O2", preset="fp8-lm")
    losses = train(model, optimizer, 30)
    state = optimizer.state[model.up.weight]
    assert state["exp_avg_code"].dtype is torch.float8_e4m3fn
    assert state["exp_avg_sq_code"].dtype is torch.float16
    assert state["master"].dtype is torch.float16
    assert all(state[f"{n}_scale"].ndim == 0 for n in ("exp_avg", "exp_avg_sq", "master"))
    assert losses[-1] < 0.5 * losses[0]


def test_layers_are_chosen_with_reasons():
    layers = {
        "embed": nn.Embedding(64, 128), "fits": nn.Linear(128, 128), "narrow": nn.Linear(128, 130),
        "conv": nn.Conv2d(16, 64, 3), "block": nn.TransformerEncoderLayer(128, 4, 256), "head": nn.Linear(128, 64),
        "weird": nn.utils.parametrizations.weight_norm(nn.Linear(128, 128)),
    }  # fmt: skip
    model = nn.ModuleDict(layers)
    model.bare = nn.Parameter(torch.zeros(128, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    model, _ = fp8stack.initialize(model, optimizer, "O2", skip=["head"])
    report = fp8stack.get_report(model)
    attention = ["block.self_attn", "block.self_attn.out_proj"]
    linears = ["block.linear1", "block.linear2"]
    assert report.converted == ["fits", "narrow", *attention, *linears]
    for name, reason in {
        "head": 'matches skip="head"', "weird": "its weight is computed",
    }.items():  # fmt: skip
        assert reason in report.skipped[name]
    assert report.stored == ["embed.weight", "fits.weight", "narrow.weight"]
    assert report.kept["conv.weight"] == "Conv2d uses it directly"
    assert report.kept["bare"] == "ModuleDict uses it directly"
    assert "reads it itself" in report.kept["block.linear1.weight"]
    kinds = [type(model[name]) for name in ("fits", "narrow", "embed", "head")]
    assert kinds == [Fp8Linear, Fp8Linear, StoredEmbedding, nn.Linear]
    assert model.head.weight.dtype is torch.float32
    json.dumps(report.to_dict())
    told = "fp8 multiplies 77 % of the matrix parameters (embeddings apart): 6 layers; outside: "
    assert told in " ".join(str(report).split())
    weird = report.outside["weird.parametrizations.weight.original1"]
    assert weird.startswith("its weight is computed")
    assert weird in report.fallbacks[0]
    assert report.outside["conv.weight"] == "convolutions stay as they are"
    with torch.no_grad():
        model.eval()
        assert model.block(torch.randn(5, 2, 128)).isfinite().all()


def test_a_bfloat16_model_gets_masters_for_every_matrix():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(16, 64, 5), nn.Flatten(), nn.Linear(256, 64)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fp8stack.initialize(model, optimizer, "O2")
    model(torch.randn(4, 16, 8).bfloat16()).square().sum().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["remainder"].dtype is torch.int8
    assert optimizer.state[model[0].bias]["master"].dtype is torch.float32
    _, plain = fp8stack.restore(model, optimizer)
    assert plain.state[model[0].weight]["exp_avg"].dtype is torch.bfloat16


def test_the_card_is_logged_once_and_can_be_silenced(monkeypatch, caplog, capsys):
    for quiet in (False, True):
        monkeypatch.setenv("FP8STACK_QUIET", str(int(quiet)))
        caplog.clear()
        with caplog.at_level("INFO", logger="fp8stack"):
            build("O2")
        assert len(caplog.records) == (not quiet)
        assert quiet or "6.09 bytes per parameter" in caplog.text or "6.10 bytes" in caplog.text
    monkeypatch.setenv("FP8STACK_QUIET", "")
    for rank, logged in (("1", 0), ("10", 0), ("0", 1), ("none", 1)):
        monkeypatch.setenv("RANK", rank)
        caplog.clear()
        with caplog.at_level("INFO", logger="fp8stack"):
            fp8stack.report.say("card")
        assert len(caplog.records) == logged, rank
    monkeypatch.setattr(
        fp8stack.report.logger, "propagate", False
    )  # as where logging is not set up
    build("O2")
    out, error = capsys.readouterr()
    assert (out, error.startswith("fp8stack")) == ("", True)


def test_a_fallback_warns_once_or_raises_when_strict(monkeypatch):
    answer = fp8stack.capability.Answer(False, "no FP8 here")
    monkeypatch.setattr(fp8stack.capability, "fp8_gemm", lambda device: answer)
    said = "no FP8 here; using bf16 GEMMs instead"
    with pytest.warns(Fp8StackWarning, match=said) as caught:
        model, optimizer = build("O2")
    assert len(caught) == 1
    assert type(model.up) is Bf16Linear
    assert fp8stack.get_report(model).fallbacks == [said]
    losses = train(model, optimizer, 20)
    assert losses[-1] < 0.5 * losses[0]
    model, optimizer = build()
    with pytest.raises(UnsupportedDeviceError, match="no FP8 here"):
        fp8stack.initialize(model, optimizer, "O2", strict=True)
    with pytest.raises(UnsupportedDeviceError, match='compute="native"'):
        fp8stack.initialize(model, optimizer, "O2", compute="native")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Fp8StackWarning):
            fp8stack.initialize(model, optimizer, "O2")
    assert type(model.up) is nn.Linear
    assert model.up.weight.dtype is torch.float32
    monkeypatch.undo()
    fp8stack.initialize(model, optimizer, "O2")


def test_a_model_moved_after_the_call_keeps_training(device):
    model, optimizer = build("O2")
    train(model, optimizer, 3)
    optimizer.zero_grad()
    model.to(device)
    losses = train(model, optimizer, 20, start=3, device=device)
    assert losses[-1] < 0.7 * losses[0]
    assert optimizer.state[model.up.weight]["remainder"].device.type == device


@pytest.mark.parametrize("level", LEVELS)
def test_grad_scaler_and_autocast_loop(level, device):
    model, optimizer = build(level, device)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**12)
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = model(*batch(step, device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_loss_scale_leaves_the_o2_trajectory_as_it_is():
    """Scaling the loss by 1e-6 scales every gradient; Adam divides it out, so the weights take the same path."""
    weights = []
    for factor in (1.0, 1e-6):
        make = partial(torch.optim.AdamW, eps=1e-8 * factor)
        model, optimizer = build("O2", optimizer=lambda p, lr, make=make: make(p, lr=1e-3))
        start = fp8stack.checkpoint.master_state_dict(model, optimizer)
        for step in range(30):
            optimizer.zero_grad()
            (model(*batch(step)) * factor).backward()
            optimizer.step()
        weights.append(fp8stack.checkpoint.master_state_dict(model, optimizer))
    for name in ("up.weight", "down.weight", "head.weight", "embed.weight"):
        moved = (weights[0][name] - start[name]).norm()
        assert (weights[1][name] - weights[0][name]).norm() < 0.03 * moved, name


@pytest.mark.parametrize("level", LEVELS)
def test_models_and_optimizers_can_be_copied_and_pickled(level):
    model, optimizer = build(level)
    train(model, optimizer, 3)
    others = [copied((model, optimizer)) for copied in COPIES.values()]
    expected = train(model, optimizer, 3, start=3)
    for other_model, other_optimizer in others:
        assert type(other_model.up) is type(model.up)
        losses = train(other_model, other_optimizer, 3, start=3)
        # a copy has no hooks on its parameters, so its gradients are ordinary: close, not the same
        assert abs(losses[-1] - expected[-1]) < 0.02 * expected[0]


def test_single_parameters_have_formats_of_their_own():
    states_for = {"embed": "fp32", "up.weight": {"states": "4bit", "master": "split32"}}
    model, optimizer = build("O2", states_for=states_for)
    losses = train(model, optimizer, 8)
    assert losses[-1] < losses[0]
    embed, up, down = (optimizer.state[m.weight] for m in (model.embed, model.up, model.down))
    assert embed["exp_avg"].dtype is torch.float32
    shapes = [state["exp_avg_sq_code"].shape for state in (up, down)]
    assert shapes == [(256, 64), (128, 256)]
    assert [s["remainder"].dtype for s in (up, down)] == [torch.int16, torch.int8]


@pytest.mark.parametrize(
    ("recipe", "kept", "dtype"),
    [
        ({"skip": ["head"]}, "exp_avg", torch.float32),
        ({"states_for": {"head": "fp8"}}, "exp_avg_code", torch.float8_e4m3fn),
        ({"states_for": {"head": {"states": "4bit", "master": "split32"}}}, "remainder", torch.int16),
    ],
)  # fmt: skip
def test_formats_of_an_optimizer_that_has_state_are_encoded_anew(recipe, kept, dtype):
    model, optimizer = build(optimizer=fp8stack.optim.AdamW)
    first = train(model, optimizer, 5)
    weight = model.head.weight
    before = fp8stack.checkpoint.torch_state_dict(optimizer)["state"]
    index = [p is weight for p in model.parameters()].index(True)
    model, same = fp8stack.initialize(model, optimizer, "O2", **recipe)
    assert same is optimizer
    assert optimizer.state[weight][kept].dtype is dtype
    after = fp8stack.checkpoint.torch_state_dict(optimizer)["state"]
    assert after[index]["step"] == 5
    old, new = (states[index]["exp_avg"] for states in (before, after))
    assert (new - old).norm() < 0.05 * old.norm()
    losses = train(model, optimizer, 5, start=5)
    assert losses[-1] < first[0]


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 64, 64))

    def forward(self, x):
        return torch.linalg.multi_dot([x + self.positions, x])


class MoeRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 64))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


LINEAR = lambda: nn.Linear(64, 64)  # noqa: E731
SHARES = {  # what a model is made of, the share that multiplies in FP8, options; and what is warned of, if anything
    "bare": ([Bare], 1.0, {}, ""),
    "bare, everywhere": ([Bare], 1.0, {"matmuls": True}, ""),
    "bare, off": ([Bare], 0.0, {"matmuls": False}, ""),
    "half": ([Bare, lambda: nn.Linear(256, 64)], 0.5, {"matmuls": False}, ""),
    "router": ([MoeRouter, LINEAR], 0.5, {}, ""),
    "convolutions": (
        [lambda: nn.Conv1d(64, 64, 3), LINEAR],
        0.25,
        {},
        "only 25 %.*not 0.weight .*convolutions stay",
    ),
    "recurrent": (
        [lambda: nn.LSTM(64, 64), *[LINEAR] * 24],
        0.75,
        {},
        "75 %.*weight_ih_l0 and 1 .*one kernel",
    ),
    "positions": ([Positions, LINEAR], 1.0, {}, ""),
    "embeddings": ([lambda: nn.Embedding(1000, 64), LINEAR], 1.0, {}, ""),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", SHARES)
def test_the_card_counts_the_matrices_that_multiply_in_fp8(kind, level):
    makers, share, options, told = SHARES[kind]

    def start(**more):
        model = nn.Sequential(*(make() for make in makers))
        optimizer = torch.optim.AdamW(model.parameters())
        return fp8stack.initialize(model, optimizer, level, **options, **more)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = fp8stack.get_report(start()[0])
    assert abs(report.share - share) < 1e-12
    most = "up to " * bool(report.bare)  # whether those are multiplied shows in a forward
    shown = f"fp8 multiplies {most}{100 * share:.0f} % of the matrix parameters (embeddings apart)"
    assert shown in str(report)
    assert (report.outside == {}) == (share == 1)
    if not told:
        assert not caught
        assert report.fallbacks == []
        start(strict=True)
        return
    assert len(caught) == 1
    assert re.search(told, str(caught[0].message))
    with pytest.raises(UnsupportedDeviceError, match=told):
        start(strict=True)
    assert fp8stack.get_report(start(strict=True, compute="bf16")[0]).fallbacks == []
    alone = fp8stack.get_report(start(strict=True, skip=["0"])[0])  # as somebody who knows
    assert abs(alone.share - share) < 1e-12
    with pytest.raises(UnsupportedDeviceError, match=told):  # no option takes them
        start(strict=True, matmuls=True)


# --- parameters that came after initialize


def twice(model):
    """Parametrize a layer by two parameters of its own."""
    nn.utils.parametrizations.weight_norm(model.up)


def another_head(model):
    model.head = nn.Linear(128, 320, bias=False)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("replace", [twice, another_head])
def test_parameters_that_were_replaced_are_found_at_the_first_step(replace, level):
    model, optimizer = build(level, skip=["up", "head"])
    replace(model)
    model(*batch(0)).backward()
    for _ in range(2):
        with pytest.raises(ModelError, match=r"came since .*after what replaces parameters"):
            optimizer.step()
    # the remedy
    model, _ = build()
    replace(model)
    train(*fp8stack.initialize(model, torch.optim.AdamW(model.parameters()), level), 2)


def test_parameters_that_were_added_are_warned_of_once_and_removed_ones_are_not():
    model, optimizer = build("O1")
    model.adapter = nn.Linear(8, 8)  # as of LoRA
    with pytest.warns(
        Fp8StackWarning, match=r"2 trainable parameters came since .*'adapter.weight'"
    ):
        train(model, optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 1)
        model, optimizer = build("O1")
        model.spare, model.norm = model.norm, nn.Identity()
        del model.spare
        train(model, optimizer, 1)
