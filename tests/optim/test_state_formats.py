"""A state says its own format, whatever groups, recipes and checkpoints say of others."""

import copy

import pytest
import torch
from helpers import assert_same_bits
from torch import nn

import fp8stack
from fp8stack.optim import AdamW

SAVED_AND_OWN = [
    ({"states": "fp32"}, {"states": "8bit"}), ({"states": "8bit"}, {"states": "fp32"}),
    ({"states": "8bit"}, {"states": "4bit"}), ({"states": "8bit"}, {"states": "fp8"}),
    ({"states": "fp8"}, {"states": "8bit"}), ({"states": "fp8-lm"}, {"states": "8bit"}),
    ({"states": "8bit"}, {"states": "fp8-lm"}), ({"states": "bf16"}, {"states": "8bit"}),
    ({"states": "8bit"}, {"states": "bf16"}), ({"master": "fp32"}, {"master": "split24"}),
    ({"master": "split24"}, {"master": "fp32"}), ({"master": "split32"}, {"master": "split24"}),
    ({"master": "none"}, {"master": "split24"}), ({"master": "keep"}, {"master": "split24"}),
    ({"master": "split24"}, {"master": "fp16"}), ({"master": "split24"}, {"master": "none"}),
]  # fmt: skip
LIMITS = {"4bit": 0.25, "fp8": 0.07, "fp8-lm": 0.06, "fp16": 0.5}  # of the format or, most, 0.04


def add_a_group(p, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))]})
    return p, optimizer


EVENTS = {
    "nothing": lambda p, optimizer: (p, optimizer),
    "add_param_group": add_a_group,
    "deepcopy": lambda p, optimizer: copy.deepcopy((p, optimizer)),
}


@pytest.mark.parametrize(("saved", "own"), SAVED_AND_OWN, ids=lambda x: next(iter(x.values())))
def test_a_state_loaded_into_other_formats_is_stepped_in_them_whatever_happens_next(saved, own):
    """The checkpoint's group names formats, the optimizer has others: those its state is made in."""
    gradients = [torch.randn(64, 128).bfloat16() for _ in range(14)]
    first = nn.Parameter(torch.randn(64, 128).bfloat16())
    source = AdamW([{"params": [first], **saved}], lr=1e-3, weight_decay=0)
    for g in gradients[:4]:
        first.grad = g
        source.step()
    packed, weight, start = source.state_dict(), first.detach().clone(), source.master_weight(first)
    packed = copy.deepcopy(packed)
    for g in gradients[4:]:
        first.grad = g
        source.step()
    results = []
    for event in EVENTS.values():
        p = nn.Parameter(weight.clone())
        optimizer = AdamW([p], lr=1e-3, weight_decay=0, **own)
        optimizer.load_state_dict(packed)
        p, optimizer = event(p, optimizer)
        assert not optimizer.param_groups[0].keys() & {"states", "master"}
        for g in gradients[4:]:
            p.grad = g
            optimizer.step()
        results.append((optimizer.master_weight(p), optimizer.state[p]))
    for value, state in results[1:]:
        assert_same_bits(value, results[0][0])
        for key in results[0][1]:
            assert_same_bits(state[key], results[0][1][key], key)
    if {saved.get("master"), own.get("master")} & {"none", "keep"}:
        return  # they lose most of such small updates
    moved, exact = results[0][0] - start, source.master_weight(first) - start
    limit = max(LIMITS.get(x, 0.04) for x in (*saved.values(), *own.values()))
    assert (moved - exact).norm() < limit * exact.norm()


def initialized(groups, schedule=None, **options):
    """Return what O2 makes of a layer each for these parameter groups: optimizer, remainders' dtypes, card."""
    layers = nn.Sequential(*(nn.Linear(128, 64, bias=False) for _ in groups))
    pairs = zip(layers, groups, strict=True)
    optimizer = torch.optim.AdamW([{"params": [m.weight], **g} for m, g in pairs])
    if schedule is not None:
        torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    _, optimizer = fp8stack.initialize(layers, optimizer, "O2", **options)
    kinds = [optimizer.state[m.weight]["remainder"].dtype for m in layers]
    return layers, optimizer, kinds, fp8stack.get_report(layers).master


@pytest.mark.parametrize(
    ("groups", "options", "kinds", "told"),
    [
        ([{"lr": 1e-5}], {}, [torch.int8], "split24"),
        ([{"lr": 0.99e-5}], {}, [torch.int16], "split32"),
        ([{"lr": torch.tensor(1e-6)}], {}, [torch.int16], "split32"),
        ([{"lr": 0.0}], {}, [torch.int8], "split24"),  # set later, to nobody knows what
        ([{"lr": 1e-6}, {"lr": 1e-3}], {}, [torch.int16, torch.int8], "split24 or split32"),
        ([{"lr": 1e-6}], {"master": "split24"}, [torch.int8], "split24"),
        ([{"lr": 1e-3}], {"master": "split32"}, [torch.int16], "split32"),
        ([{"lr": 1e-6}], {"states_for": {"0": {"states": "fp8"}}}, [torch.int16], "split32"),
        ([{"lr": 1e-3}], {"schedule": lambda step: step / 500}, [torch.int8], "split24"),
        ([{"lr": 1e-6}], {"schedule": lambda step: 1.0}, [torch.int16], "split32"),
    ],
)
def test_weights_have_32_bits_where_the_rate_is_too_small_for_24(groups, options, kinds, told):
    layers, _, found, card = initialized(groups, **options)
    assert (found, card) == (kinds, told)
    assert told.split(" or ")[-1] != "split32" or "16-bit remainder" in str(
        fp8stack.get_report(layers)
    )


def test_the_rate_that_an_optimizer_is_made_with_decides_for_all_its_life():
    """A rate that decays, also in a checkpoint, changes no format; a group that is added has its own."""
    layers, optimizer, _, _ = initialized([{"lr": 1e-4}])
    for group in optimizer.param_groups:
        group["lr"] = 1e-7
    layers(torch.randn(4, 128)).sum().backward()
    optimizer.step()
    assert optimizer.state[layers[0].weight]["remainder"].dtype is torch.int8
    again, resumed, _, _ = initialized([{"lr": 1e-4}])
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["lr"] == 1e-7
    kept, found = optimizer.state[layers[0].weight], resumed.state[again[0].weight]
    assert_same_bits(kept["remainder"], found["remainder"])
    added = nn.Parameter(torch.randn(64, 128).bfloat16())
    resumed.add_param_group({"params": [added], "lr": 1e-6})
    assert resumed.master_format(added) == "split32"


def test_real_updates_at_a_small_rate_are_those_of_float32():
    """200 steps of 1e-6 over weights of .02 end where float32's do."""
    torch.manual_seed(0)
    start, gradients = 0.02 * torch.randn(64, 128), torch.randn(20, 64, 128)
    ends = []
    for made in (torch.optim.AdamW, AdamW):
        p = nn.Parameter(start.clone() if made is torch.optim.AdamW else start.bfloat16())
        begin = p.detach().float().clone()
        optimizer = made([p], lr=1e-6, weight_decay=0)
        for step in range(200):
            p.grad = gradients[step % 20].to(p.dtype)
            optimizer.step()
        ours = isinstance(optimizer, AdamW)
        ends.append((optimizer.master_weight(p) if ours else p.detach()) - begin)
    assert (ends[1] - ends[0]).norm() < 0.05 * ends[0].norm()
