"""Damage checkpoints and state_dicts at random, load them, and see that each is refused whole or taken whole.

A case takes a model and optimizer of a few kilobytes at some level, in some format, and damages what was saved of
another run of it: one to three changes in its tree of dicts, lists and tensors, or in the bytes of the file.
Then it loads that. What must hold:

- No error but fp8stack's own. What is loaded is compared bit for bit: after a refusal weights, states, groups and
  histories are what they were.
- After a load that is taken, saving and loading give the same bits, and a step raises nothing and leaves finite
  weights, if those that were loaded are finite and the hyper-parameters ordinary.
- No operator allocates more than 4 MiB meanwhile, and the process takes no more than 64 MiB: files have 200 kB.

`model.load_state_dict` is torch's own and not tried: a RuntimeError of torch, after it has copied what does fit, is
its contract.
"""

from __future__ import annotations

import copy
import io
import math
import os
import random
import resource
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fuzzing import Broken, main, refused
from optimizer_files import MASTERS, STATES
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8stack
from fp8stack import checkpoint, optim
from fp8stack.cli.convert import consolidate, find_masters
from fp8stack.cli.inspect import describe, read
from fp8stack.nn import load_scaling_state, scaling_state

os.environ["FP8STACK_QUIET"] = "1"
MOST_BYTES, MOST_GROWTH = 4 * 2**20, 64 * 2**10  # of an operator's result; of the process, in KiB
FILE = Path(tempfile.mkdtemp()) / "damaged.pt"


class Subject(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    saved: dict[str, Any]  # what `checkpoint.save` wrote after three steps of another run
    start: bytes  # what it wrote of this run


class Allocations(TorchDispatchMode):
    """Raise where an operator returns more memory than any tensor here has, and keep that, should it be caught."""

    broken: Broken | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            plain = type(x) is Tensor and x.layout is torch.strided and not x.is_meta
            if plain and x.untyped_storage().nbytes() > MOST_BYTES:
                self.broken = Broken(f"{func} allocated {x.untyped_storage().nbytes()} bytes")
                raise self.broken
        return result


# --- what is loaded


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64))


def by_level(make: Callable[..., torch.optim.Optimizer], level: str, **options: Any):
    model = linears()
    matrices = [model[0].weight, model[1].weight]
    rest = [model[0].bias, *model[2].parameters()]
    groups = [{"params": matrices, "lr": 0.01}, {"params": rest, "lr": 0.02}]
    return fp8stack.initialize(
        model, make(groups if "Muon" not in str(make) else matrices), level, **options
    )


def by_hand(kind: str, states: str, master: str, dtype: torch.dtype):
    model = linears().to(dtype)
    options = {"lr": 0.01} | ({"momentum": 0.9} if kind == "SGD" else {})
    kind_of = getattr(optim, kind)
    return model, kind_of(model.parameters(), states=states, master=master, min_numel=64, **options)


def makers() -> list[Callable[[], Any]]:
    torch_s = torch.optim
    sgd = partial(torch_s.SGD, momentum=0.9, nesterov=True)
    found = [
        partial(by_level, make, level)
        for make in (torch_s.AdamW, sgd)
        for level in ("O0", "O1", "O2")
    ]
    o0 = [
        torch_s.Adam, partial(torch_s.AdamW, amsgrad=True), torch_s.Adagrad, torch_s.NAdam, torch_s.RMSprop,
    ]  # fmt: skip
    o0 += [torch_s.Adafactor, *([torch_s.Muon] if hasattr(torch_s, "Muon") else [])]
    found += [partial(by_level, make, "O0") for make in o0]
    delayed = {"fp8_recipe": "delayed", "amax_history_len": 8}
    found += [partial(by_level, torch_s.AdamW, level, **delayed) for level in ("O1", "O2")]
    kinds = ("AdamW", "SGD", "Lion", "Muon", "Adam")
    pairs = [(s, m) for s in STATES for m in MASTERS]
    for i, (states, master) in enumerate(pairs):
        dtype = torch.float32 if i % 5 == 4 else torch.bfloat16
        found.append(partial(by_hand, kinds[i % 5 if i % 2 else 0], states, master, dtype))
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(8, 64, dtype=model[0].bias.dtype, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@cache
def subject(number: int) -> Subject:
    """Return two runs of a maker: one that was saved, and one that loads."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    contents = []
    for seed, steps in ((1, 3), (2, 2)):
        torch.manual_seed(seed)
        model, optimizer = makers()[number]()
        for _ in range(steps):
            step(model, optimizer)
        checkpoint.save(FILE, model, optimizer, step=steps)
        contents.append(FILE.read_bytes())
    saved = torch.load(io.BytesIO(contents[0]), weights_only=True)
    return Subject(model, optimizer, saved, contents[1])


def look(of: Subject) -> dict[str, Any]:
    """Return copies of all that a load may change."""
    state = [
        {k: copied(v) for k, v in of.optimizer.state[p].items()}
        for p in parameters(of)
        if p in of.optimizer.state
    ]
    groups = [
        {k: copied(v) for k, v in g.items() if k != "params"} for g in of.optimizer.param_groups
    ]
    weights = {k: v.clone() for k, v in of.model.state_dict().items()}
    return {
        "weights": weights,
        "state": state,
        "groups": groups,
        "scaling": scaling_state(of.model),
    }


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):  # an expanded one stays small
        return value.clone() if is_plain(value) else value
    try:
        return copy.deepcopy(value)
    except (RuntimeError, NotImplementedError):  # nested and quantized tensors
        return value


def is_plain(x: Tensor) -> bool:
    return (
        not x.is_nested and x.layout is torch.strided and not x.is_quantized and x.numel() < 10**6
    )


def parameters(of: Subject) -> list[Tensor]:
    return [p for group in of.optimizer.param_groups for p in group["params"]]


def same(a: Any, b: Any) -> bool:
    """Return whether both are equal in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor):
        if a is b:
            return True
        alike = a.dtype is b.dtype and a.shape == b.shape and is_plain(a) and is_plain(b)
        return alike and torch.equal(
            *(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
        )
    return a == b or a != a


# --- damage


def damage(tree: Any, rng: random.Random) -> None:
    """Change something in a tree of dicts and lists."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        inner = (
            value
            if isinstance(value, dict)
            else range(len(value))
            if isinstance(value, list)
            else ()
        )
        for key in inner:
            places.append((value, key))
            walk(value[key])

    walk(tree)
    holder, key = rng.choice(places)
    value, (other_holder, other_key) = holder[key], rng.choice(places)
    other = other_holder[other_key]
    what = rng.randrange(10)
    if what == 0:
        del holder[key]
    elif what == 1 and isinstance(holder, dict):
        del holder[key]
        holder[rng.choice(["exp_avg", "step", "x", 7, (1,), f"{key}x", other_key])] = value
    elif what == 2:
        holder[key] = copied(other)
    elif what == 3:
        holder[key], other_holder[other_key] = copied(other), copied(value)
    elif what == 4 and isinstance(holder, list):
        holder.append(copied(value))
    elif what == 5:
        holder[key] = rng.choice(ODD)()
    elif isinstance(value, Tensor) and is_plain(value):
        holder[key] = changed(value, rng)
    elif isinstance(value, int | float):
        holder[key] = rng.choice(NUMBERS)
    elif isinstance(value, tuple):
        holder[key] = rng.choice(
            [value[:-1], (*value, 1), [*value], *((x, *value[1:]) for x in NUMBERS)]
        )
    else:
        holder[key] = rng.choice([*NUMBERS, "x", "muon", None, [], {}])


NUMBERS = [
    math.nan, math.inf, -math.inf, -5, -0.0, 0, 0.5, 1, 1.0, 2.5, 1e30, 2**24, 2**25 + 1, 2**63, 10**400, True, 1j,
]  # fmt: skip
ODD: list[Callable[[], Any]] = [
    lambda: None, lambda: "x", lambda: b"x", lambda: [], lambda: {}, lambda: (), lambda: [[]], lambda: {"x": 1},
    lambda: {(): ()}, lambda: [1, [2, [3]]], lambda: torch.Size([3]), lambda: torch.float32,
    lambda: torch.zeros(1).expand(2**31), lambda: torch.zeros(1, dtype=torch.uint8).expand(2**16, 2**16),
    lambda: torch.zeros(0), lambda: torch.zeros(64, 64), lambda: torch.tensor(1.0), lambda: torch.tensor([True]),
    lambda: {"a": torch.zeros(1).expand(2**31)}, lambda: [torch.zeros(1).expand(2**31)] * 3,
    lambda: nn.Parameter(torch.ones(64)), lambda: torch.empty(64, device="meta"), lambda: torch.ones(64).to_sparse(),
]  # fmt: skip
DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8,
    torch.int8, torch.int16, torch.int64, torch.bool, torch.complex64,
)  # fmt: skip


def changed(x: Tensor, rng: random.Random) -> Tensor:
    """Return a tensor like `x`, damaged."""
    n, some = (
        max(x.numel(), 1),
        rng.choice([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-45, 1e30, 3e38, 2.0**24]),
    )
    flat = x.reshape(-1)
    as_float = x.float() if x.is_complex() or x.dtype.itemsize < 2 else x.clone()
    spoiled = x.clone(memory_format=torch.contiguous_format)
    if x.is_floating_point() and x.numel():
        spoiled.view(-1)[rng.randrange(n)] = torch.tensor(some).to(x.dtype)
    raw = torch.frombuffer(bytearray(rng.randbytes(n * x.element_size())), dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: list[Callable[[], Tensor]] = [
            lambda: x.to(rng.choice(DTYPES)),
            lambda: x.to(rng.choice(DTYPES)),
            lambda: torch.full_like(as_float, some if as_float.is_floating_point() else 1).to(x.dtype),
            lambda: spoiled,
            lambda: raw.view(x.dtype)[: x.numel()].reshape(x.shape) if x.dtype is not torch.bool else x,
            lambda: flat,
            lambda: flat[: n // 2],
            lambda: x.unsqueeze(0),
            lambda: x.mT if x.ndim > 1 else x.unsqueeze(-1),
            lambda: x.mT.contiguous().mT if x.ndim > 1 else x,  # the same values in another order
            lambda: torch.cat([flat, flat]),
            lambda: flat[:1].expand(x.shape),
            lambda: flat[:1].expand(2 ** rng.randrange(20, 40)),
            lambda: flat[:1].reshape(()) if x.numel() else x,
            lambda: flat.as_strided((2**12, 2**12), (0, 0)),
            lambda: x.new_zeros(0),
            lambda: x.to_sparse(),
            lambda: x.to("meta"),
            lambda: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
            lambda: torch.nested.nested_tensor([flat.float(), flat.float()]),
            lambda: nn.Parameter(x.float()),
            lambda: torch.complex(x.float(), x.float()),
        ]  # fmt: skip
        try:
            return rng.choice(made)()
        except (RuntimeError, NotImplementedError):
            return x.float().unsqueeze(0)


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes of a file, damaged: anywhere, or in the parts of its zip."""
    if rng.random() < 0.5:
        at, size = rng.randrange(len(data)), rng.choice([1, 4, 64, 4096])
        end = [
            data[:at],
            data[:at] + data[at + size :],
            data[:at] + data[at : at + size] + data[at:],
        ]
        return rng.choice([*end, data[:at] + rng.randbytes(size) + data[at + size :]])
    with zipfile.ZipFile(io.BytesIO(data)) as source:
        parts = [[name, source.read(name)] for name in source.namelist()]
    part, other = rng.choice(parts), rng.choice(parts)
    at, what = rng.randrange(max(len(part[1]), 1)), rng.randrange(6)
    if what == 0:
        parts.remove(part)
    elif what == 1:
        part[1], other[1] = other[1], part[1]
    elif what == 2:
        part[0] = rng.choice([other[0], "x", part[0] + "0"])
    elif what == 3:
        part[1] = part[1][:at] + rng.randbytes(1) + part[1][at + 1 :]
    elif what == 4:
        parts[0][1] = (
            parts[0][1][: (at := rng.randrange(len(parts[0][1])))]
            + rng.randbytes(1)
            + parts[0][1][at + 1 :]
        )
    else:
        part[1] = bytes(2**28 if rng.random() < 0.1 else 2**20)
    target, kind = io.BytesIO(), rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    kind = zipfile.ZIP_DEFLATED if what == 5 else kind
    with zipfile.ZipFile(target, "w", kind) as zipped:
        for name, content in parts:
            zipped.writestr(name, content)
    return target.getvalue()


# --- a case


def one(rng: random.Random) -> str:
    of = subject(rng.randrange(len(makers())))
    way = rng.choice(["file", "file", "bytes", "state", "state", "masters", "scaling", "cli"])
    contents = copy.deepcopy(of.saved)
    part = {"state": "optimizer", "masters": "model", "scaling": "scaling"}.get(way)
    tree = contents[part] if part else contents
    if not tree or (way == "state" and not isinstance(of.optimizer, optim.BlockwiseOptimizer)):
        return "nothing of ours"
    if way != "bytes":
        for _ in range(rng.choice([1, 1, 2, 3])):
            if tree:
                damage(tree, rng)
    if way in ("file", "bytes", "cli"):
        torch.save(contents, FILE)
        if way == "bytes" or (way == "cli" and rng.random() < 0.3):
            FILE.write_bytes(damage_bytes(FILE.read_bytes(), rng))
    load = {
        "state": lambda: of.optimizer.load_state_dict(tree),
        "masters": lambda: checkpoint.load_master_state_dict(of.model, of.optimizer, tree),
        "scaling": lambda: load_scaling_state(of.model, tree),
        "cli": convert,
    }.get(way, lambda: checkpoint.load(FILE, of.model, of.optimizer))
    before, peak = look(of), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Allocations() as allocations:
        outcome = refused(load)
    if allocations.broken:
        raise allocations.broken
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    if grown > MOST_GROWTH:
        raise Broken(f"the process grew by {grown} KiB")
    after = look(of)
    if outcome == "refused" or way == "cli":
        if not same(before, after):
            raise Broken(
                f"{way}: refused, and changed {[k for k in before if not same(before[k], after[k])]}"
            )
        return f"{way} {outcome}"
    try:
        check_taken(of, after)
    finally:
        FILE.write_bytes(of.start)
        checkpoint.load(FILE, of.model, of.optimizer)
    return f"{way} taken"


def convert() -> None:
    contents = read(FILE)
    describe(contents)
    consolidate(contents.model, find_masters(contents), torch.float32)


def check_taken(of: Subject, after: dict[str, Any]) -> None:
    """Raise unless the run goes on from what was loaded."""
    checkpoint.save(FILE, of.model, of.optimizer)
    checkpoint.load(FILE, of.model, of.optimizer)
    again = look(of)
    if not same(after, again):
        raise Broken(
            f"saved and loaded again, other are {[k for k in after if not same(after[k], again[k])]}"
        )
    numbers = [
        x for g in of.optimizer.param_groups for x in g.values() if isinstance(x, int | float)
    ]
    masters = checkpoint.master_state_dict(of.model, of.optimizer)
    ordinary = all(x < 1000 for x in numbers) and is_small(masters)
    own = (3.4445, -4.775, 2.0315)  # of Muon: others need not converge
    ordinary &= all(g.get("ns_coefficients", own) == own for g in of.optimizer.param_groups)
    try:
        step(of.model, of.optimizer)
    except Exception as error:
        if not ordinary and not isinstance(of.optimizer, optim.BlockwiseOptimizer):
            return  # torch's own, with numbers that are in range but far out
        raise Broken(f"the step after it: {type(error).__name__}: {error}") from error
    if ordinary and not is_small(of.model.state_dict(), math.inf):
        raise Broken("the step after it left weights that are not finite")


def is_small(weights: dict[str, Tensor], most: float = 1e6) -> bool:
    return all(bool((t.abs() < most).all()) for t in weights.values())


if __name__ == "__main__":
    # what goes through a tensor of 2^31 elements one by one ends in a MemoryError, and not the machine
    resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))
    main(one)
