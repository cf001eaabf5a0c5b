"""Optimizers in every format of states and masters, and what those of commit dbf10cc wrote of them.

Each file of `data/` holds the state_dict of one optimizer after three steps, with a parameter group for each pair of
formats, its weights, and what became of weights and states after two more steps: the weights themselves and, to save
space, a hash of each state. `tests/optim/test_files_of_dbf10cc.py` loads them, takes the same steps and compares.
"""

import hashlib
import io
import lzma
from pathlib import Path

import torch
from torch import nn

from fp8stack import optim

STATES = ("8bit", "fp8", "4bit", "fp8-lm", "bf16", "fp32", "keep")
MASTERS = ("split24", "split32", "fp16", "fp32", "none", "keep")
KINDS = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1}, "Adam": {"lr": 0.01, "weight_decay": 0.1},
    "SGD": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}, "Lion": {"lr": 0.01, "weight_decay": 0.1},
    "Muon": {"lr": 0.01},
}  # fmt: skip


def values(shape, seed):
    """Return numbers between -0.5 and 0.5, the same in every version of torch."""
    n = torch.Size(shape).numel()
    return ((torch.arange(n) * 7919 + seed * 104729) % 1009 / 1009 - 0.5).reshape(shape)


def make(kind):
    """Return (parameters, optimizer): small matrices in every pair of formats, then a few that are otherwise."""
    groups = [
        {"params": [nn.Parameter(values((2, 9), 1).bfloat16())], "states": states, "master": master}
        for states in STATES
        for master in MASTERS
    ]
    others = [values((3, 200), 2).bfloat16(), values((4, 10), 3), values((5,), 4).half()]
    groups.append({"params": [nn.Parameter(x) for x in others]})
    parameters = [p for group in groups for p in group["params"]]
    return parameters, getattr(optim, kind)(groups, min_numel=16, **KINDS[kind])


def step(parameters, optimizer, number):
    for i, p in enumerate(parameters):
        p.grad = values(p.shape, 10 + 100 * number + i).to(p.dtype)
    optimizer.step()


def digest(entry):
    """Return a hash of each tensor of a parameter's state; of the step count as that commit kept it, in float32."""
    entry = {key: x.float() if key == "step" else x for key, x in entry.items()}
    return {
        key: hashlib.sha256(
            x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()[:16]
        for key, x in entry.items()
    }


def read(kind):
    contents = lzma.decompress((Path(__file__).with_name("data") / f"{kind}.pt.xz").read_bytes())
    return torch.load(io.BytesIO(contents), weights_only=True)
