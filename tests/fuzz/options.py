"""Options of all kinds, right and wrong: taken and it works, or refused by an error of our own and nothing changed.

A case draws what to call (`initialize`, an optimizer, a section of a DeepSpeed config, a command, the
training application's flags and YAML), and values from right ones, near misses and anything else. What was taken takes
two training steps, after which all weights are finite. Limits: extreme but legal numbers (a learning rate of 1e30) may
overflow, as they do in torch, so only moderate ones must leave weights finite.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import math
import os
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzzing import Broken, main, refused
from gpt.config import parse
from torch import nn

import fp8stack
from fp8stack import __main__ as program
from fp8stack import optim
from fp8stack.integrations.deepspeed.section import find_section
from fp8stack.levels import CHOICES, OPTIONS

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e-3, 1e300, math.nan, math.inf, -math.inf, 10**400, -(10**400), 1j,
    "", "1", "0.1", "O2", "no", "é\u0000😀", "*", "[", "x" * 5000, b"8bit", (), [], {}, {1}, [None], (1, 2), [[[[[]]]]],
    {"states": "fp32"}, {"a": {"b": {}}}, object(), object, len, np.float32(0.5), np.int64(3), np.bool_(True),
    np.zeros(2), np.array(0.5), np.str_("8bit"), torch.tensor(0.5), torch.zeros(2), torch.float32, range(3),
)  # fmt: skip
GOOD: dict[str, tuple[Any, ...]] = {
    **CHOICES,
    "opt_level": ("O0", "O1", "O2"),
    "preset": (None, "fp8-lm"),
    "enabled": (True, False),
    "strict": (True, False),
    "skip": ((), ["0"], ["*"], ("nowhere",)),
    "states_for": ((), {"0": "fp32"}, {"0": {"states": "4bit"}}, (("0", "fp32", ""),)),
    "min_numel": (0, 64, 4096, np.int64(64)),
    "fp8_margin": (0, 1), "amax_history_len": (1, 16, 1024),
    "lr": (1e-3, np.float32(1e-3), torch.tensor(1e-3)), "betas": ((0.9, 0.99), [0.5, 0.5]),
    "eps": (1e-8, 0.0), "weight_decay": (0, 0.1), "momentum": (0.9, 0.0), "dampening": (0, 0.5),
    "nesterov": (True, False), "maximize": (True, False), "max_grad_norm": (None, 1.0, math.inf),
    "ns_steps": (1, 5), "ns_coefficients": ((3.4, -4.7, 2.0),), "adjust_lr_fn": (None, "original"),
    "adamw_eps": (1e-8,), "max_norm": (1.0, 0, math.inf, torch.tensor(2.0)), "norm_type": (2.0, 1, math.inf),
    "algorithm": ("muon", "adamw"), "checkpoint_format": ("native", "portable"), "allow": ([], ["x"]),
}  # fmt: skip
FLAGS = {
    "estimate": (
        "--parameters 1e6", "--hf-config /nowhere", "--sizes", "--layers 2", "--hidden 64", "--heads 4", "--batch 2",
        "--seq 128", "--ranks 2", "--zero 1", "--fsdp", "--gpu H100", "--memory 80", "--compile", "--vocab 96",
    ),
    "plan": (f"{__file__}:tiny", "nowhere.py:f", ":", "--opt-level O1", "--skip 0", "--states-for 0=fp32"),
    "inspect": ("/nowhere", "."),
    "doctor": ("--model x.py:f", "--opt-level O1", "--deepspeed ."),
    "convert": ("/nowhere", "--out /nowhere/x", "--to bf16"),
}  # fmt: skip
OPTIMIZERS = (optim.AdamW, optim.Adam, optim.SGD, optim.Lion, optim.Muon)
TORCHS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop)


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16, bias=False))


MODEL, X = tiny(), torch.linspace(-1, 1, 128).view(8, 16)


def odd(rng: random.Random, name: str, wrong: float = 0.4) -> Any:
    """Return a right value of an option, one of another's, or anything."""
    if rng.random() > wrong and name in GOOD:
        return rng.choice(GOOD[name])
    value = rng.choice([*ODD, *rng.choice(list(GOOD.values()))])
    nested = rng.random()
    return [value] if nested < 0.05 else {name: value} if nested < 0.1 else value


def some(rng: random.Random, names: Any, most: int = 3) -> dict[str, Any]:
    chosen = rng.sample(sorted(names), min(len(names), rng.randint(0, most)))
    given = {name: odd(rng, name) for name in chosen}
    if rng.random() < 0.05:
        given[rng.choice(("", "lrr", "statess", "é", "self.x"))] = rng.choice(ODD)
    return given


def looks(model: nn.Module, optimizer: Any) -> Any:
    groups = [] if optimizer is None else optimizer.param_groups
    return (
        [type(m) for m in model.modules()],
        [(p.dtype, p._version, id(p.grad)) for p in model.parameters()],
        [{k: v for k, v in vars(p).items() if v} for p in model.parameters()],
        [{k: id(v) for k, v in g.items() if k != "params"} for g in groups],
    )


def moderate(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(moderate, value.values()))
    return not isinstance(value, (int, float)) or abs(value) < 1e3


def train(model: nn.Module, optimizer: Any, *given: dict[str, Any]) -> None:
    for _ in range(2):
        model(X).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    if all(map(moderate, given)) and not all(p.isfinite().all() for p in model.parameters()):
        raise Broken(f"weights are not finite after {given}")


def initialize(rng: random.Random) -> str:
    model = copy.deepcopy(MODEL)
    optimizer = rng.choice([*OPTIMIZERS, *TORCHS])(model.parameters(), lr=1e-3)
    given = some(rng, {*OPTIONS, "opt_level", "preset", "enabled", "strict"})
    before = looks(model, optimizer)
    told = refused(lambda: fp8stack.initialize(model, optimizer, **given))
    if told == "refused":
        if looks(model, optimizer) != before:
            raise Broken(f"changed, though refused: {given}")
        train(model, optimizer, {})
        return told
    kept = model.__dict__.get("_fp8stack_session")
    train(model, kept.returned if kept else optimizer, given)
    return told


def make_optimizer(rng: random.Random) -> str:
    model, kind = copy.deepcopy(MODEL), rng.choice(OPTIMIZERS)
    hyper = {*inspect.signature(kind.__init__).parameters} - {"self", "params", "options"}
    given = some(rng, hyper | {"states", "master", "min_numel", "max_grad_norm", "offload"})
    group = some(
        rng, {"lr", "weight_decay", "states", "master", "algorithm", "betas", "momentum"}, 1
    )
    first, *rest = model.parameters()
    made: list[Any] = []
    if refused(lambda: made.append(kind([first], **given))) == "refused":
        return "refused"
    (optimizer,) = made
    before = looks(model, optimizer)
    if refused(lambda: optimizer.add_param_group({"params": rest, **group})) == "refused":
        if looks(model, optimizer) != before:
            raise Broken(f"changed, though refused: {group}")
        train(model, optimizer, given)
        return "refused"
    written: dict[str, Any] = {}
    if rng.random() < 0.5:  # as schedulers write to groups
        name = rng.choice(("lr", "weight_decay", "betas"))
        if name in optimizer.param_groups[0]:
            written[name] = optimizer.param_groups[0][name] = odd(rng, name)
    return refused(lambda: train(model, optimizer, given, group, written))


def section(rng: random.Random) -> str:
    given: Any = some(
        rng, {*OPTIONS, "opt_level", "enabled", "strict", "allow", "checkpoint_format"}
    )
    config = {"fp8stack": given if rng.random() < 0.9 else rng.choice(ODD)}
    return refused(lambda: find_section(config))


def command(rng: random.Random) -> str:
    name = rng.choice(sorted(FLAGS))
    words = [
        name,
        *(["--deepspeed", str(rng.choice(ODD))[:200]] if name == "doctor" else []),
    ]  # else it tests itself
    for flag in rng.sample(FLAGS[name], rng.randint(0, min(5, len(FLAGS[name])))):
        words += flag.split()
        if rng.random() < 0.3:
            words[-1] = str(rng.choice(ODD))[:200]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = program.main(words)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except Exception as error:
            raise Broken(f"{words}: {type(error).__name__}: {error}") from error
    if status not in (0, 2) or "Traceback" in out.getvalue():
        raise Broken(f"{words} ended with {status}: {out.getvalue()[-500:]}")
    return "taken" if status == 0 else "refused"


APPLICATION = (
    "steps", "max_lr", "opt_level", "skip", "use_fp8", "micro_batch", "optimizer_bits", "seed", "out",
)  # fmt: skip


def application(rng: random.Random) -> str:
    given = some(rng, APPLICATION)
    if rng.random() < 0.5:
        flags = [w for k, v in given.items() for w in (f"--{k.replace('_', '-')}", str(v)[:200])]
        return refused(lambda: parse(flags))
    lines = [
        f"{k}: {json.dumps(v, default=str) if rng.random() < 0.8 else v}" for k, v in given.items()
    ]
    depth = rng.choice((0, 0, 0, 3, 2000))
    text = "\n".join(lines) + ("\nsteps: " + "[" * depth if depth else "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.yaml")
        path.write_text(text[: rng.choice((10, 10**6))], errors="replace")
        return refused(lambda: parse(["--config", str(path)]))


def one(rng: random.Random) -> str:
    os.environ["FP8STACK_QUIET"] = "1"
    torch.manual_seed(rng.randrange(2**31))
    kinds = (initialize, make_optimizer, section, command, application)
    kind = rng.choices(kinds, (4, 4, 2, 1, 2))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return kind(rng)
        except Broken as error:
            raise Broken(f"{kind.__name__}: {error}") from error


if __name__ == "__main__":
    main(one)
