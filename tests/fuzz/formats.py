"""Load, copy, pickle, save and regroup optimizers between steps, in all formats: the run must be as without that.

Bit for bit where no format changes; after a conversion, bit for bit as the converted run, and as far from the run in
the first formats as the coarser of the two explains.
"""

import copy
import pickle
import random

import torch
from fuzzing import Broken, main
from helpers import assert_same_bits, snapshot, through_file
from optimizer_files import MASTERS, STATES
from torch import nn

from fp8stack.errors import CheckpointError
from fp8stack.optim import AdamW

LIMITS = {
    "4bit": 0.3, "fp8": 0.1, "fp8-lm": 0.1, "keep": 0.1, "bf16": 0.1, "8bit": 0.1, "fp32": 0.01,
}  # fmt: skip
LOSSY = {"none", "keep", "fp16"}  # masters that lose or gain a part of such small steps at random
SHAPES = ((24, 130), (40,))


def optimizer_for(values, states, master, group=None):
    parameters = [nn.Parameter(v.clone()) for v in values]
    formats = {"states": states, "master": master}
    own, groups = ({}, formats) if group else (formats, {})
    return AdamW([{"params": parameters, **groups}], lr=1e-3, weight_decay=0, min_numel=256, **own)


def parameters_of(optimizer):
    return optimizer.param_groups[0]["params"]


def reload(optimizer, states, master, group=False):
    """Return another optimizer, with formats of its own, that took over weights and states through a file."""
    saved = through_file([optimizer.state_dict(), [p.detach() for p in parameters_of(optimizer)]])
    new = optimizer_for(saved[1], states, master, group)
    for extra in optimizer.param_groups[1:]:
        new.add_param_group({"params": [nn.Parameter(p.detach().clone()) for p in extra["params"]]})
    new.load_state_dict(saved[0])
    return new


def add_group(optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))]})
    return optimizer


def edit(optimizer, rng, states, master):
    """Groups say what is made from now on. What leaves no other trace than how a step rounds stays as it is."""
    alike = {"bf16", "keep"}
    wanted = [s for s in STATES if not (states in alike and s in alike)]
    optimizer.param_groups[0]["states"] = rng.choice(wanted)
    bare = {"none", "keep"}
    optimizer.param_groups[0]["master"] = master if master in bare else rng.choice(MASTERS)
    return optimizer


def step(optimizer, gradients):
    for p, g in zip(parameters_of(optimizer), gradients, strict=True):
        p.grad = g.clone()
    optimizer.step()


def one(rng: random.Random) -> str:
    torch.manual_seed(rng.randrange(2**31))
    states, master = rng.choice(STATES), rng.choice(MASTERS)
    now, told = (states, master), [states, master]
    values = [torch.randn(shape).bfloat16() for shape in SHAPES]
    plain, eventful = (optimizer_for(values, states, master) for _ in range(2))
    exact = optimizer_for(values, "fp32", "fp32")
    start = [p.detach().float() for p in parameters_of(exact)]
    converted = rng.random() < 0.5
    when = rng.randint(2, 5)
    coarse = {states}
    for k in range(9):
        if converted and k == when:
            now = rng.choice(STATES), rng.choice(MASTERS)
            told += ["converted to", *now]
            coarse.add(now[0])
            try:
                plain, eventful = [reload(o, *now, rng.random() < 0.5) for o in (plain, eventful)]
            except CheckpointError:  # masters of weights that are to be their own
                if now[1] != "keep" or master == "keep":
                    raise
                return "refused"
        for _ in range(rng.randint(0, 2)):
            event = rng.choice(["deepcopy", "pickle", "file", "add", "edit", "zero", "clip", "lr"])
            told.append(event)
            if event == "deepcopy":
                eventful = copy.deepcopy(eventful)
            elif event == "pickle":
                eventful = pickle.loads(pickle.dumps(eventful))
            elif event == "file" and k:
                eventful = reload(eventful, *now, group=rng.random() < 0.5)
            elif event == "add":
                eventful = add_group(eventful)
            elif event == "edit" and k:
                eventful = edit(eventful, rng, *now)
            elif event == "zero":
                eventful.zero_grad(set_to_none=rng.random() < 0.5)
            elif event == "clip":
                nn.utils.clip_grad_norm_(parameters_of(eventful), 1e9)
            elif event == "lr":
                for optimizer in (plain, eventful, exact):
                    optimizer.param_groups[0]["lr"] *= 0.9
        gradients = [(torch.randn(shape) + 1).bfloat16() for shape in SHAPES]
        for optimizer in (plain, eventful, exact):
            step(optimizer, gradients)
        both = (snapshot(parameters_of(o), o) for o in (eventful, plain))
        assert_same_bits(*both, f"after {told}")
    masters = [master, now[1]]
    if not LOSSY & set(masters):
        for p, q, begin in zip(parameters_of(plain), parameters_of(exact), start, strict=True):
            moved = exact.master_weight(q) - begin
            error = (plain.master_weight(p) - begin - moved).norm() / moved.norm()
            limit = max(LIMITS[name] for name in coarse) + 0.03 * ("split24" in masters)
            if not error < limit:
                raise Broken(f"the steps are {float(error):.3f} off after {told}")
    return "converted" if converted else "kept"


if __name__ == "__main__":
    main(one)
