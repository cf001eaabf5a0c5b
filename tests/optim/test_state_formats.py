"""A state says its own format, whatever groups, recipes and checkpoints say of others."""

import copy

import pytest
import torch
from helpers import assert_same_bits
from torch import nn

from fp8stack.optim import AdamW

SAVED_AND_OWN = [
    ({"states": "fp32"}, {"states": "8bit"}),
    ({"states": "8bit"}, {"states": "fp32"}),
    ({"states": "8bit"}, {"states": "4bit"}),
    ({"states": "8bit"}, {"states": "fp8"}),
    ({"states": "fp8"}, {"states": "8bit"}),
    ({"states": "fp8-lm"}, {"states": "8bit"}),
    ({"states": "8bit"}, {"states": "fp8-lm"}),
    ({"states": "bf16"}, {"states": "8bit"}),
    ({"states": "8bit"}, {"states": "bf16"}),
    ({"master": "fp32"}, {"master": "split24"}),
    ({"master": "split24"}, {"master": "fp32"}),
    ({"master": "split32"}, {"master": "split24"}),
    ({"master": "none"}, {"master": "split24"}),
    ({"master": "keep"}, {"master": "split24"}),
    ({"master": "split24"}, {"master": "fp16"}),
    ({"master": "split24"}, {"master": "none"}),
]
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
