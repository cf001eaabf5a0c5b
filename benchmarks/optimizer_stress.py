"""Does an update ever explode? The real optimizers of fp8stack and of every installed peer on hard gradients.

    python benchmarks/optimizer_stress.py                              # everything, on the GPU if there is one
    python benchmarks/optimizer_stress.py --only 'fp8stack*' --cases 'wide*' --size 256 --steps 120

Adam divides m by sqrt(v), element by element. A format that rounds a small v to zero, or keeps m where it has lost v,
turns an element among larger neighbours into a step of any size. Benign gradients do not show that; these do: element
scales spread over decades, rows that are mostly absent, gradients of 1e-12, gradients that vanish.

One float32 matrix a case, with lr 1 and no weight decay, set to zero before every step: what it holds afterwards is
the update with its sign turned, to float32's full precision. torch's AdamW in float64 takes the same gradients.

| measured      | over      | of the update u and the float64 update r, both over lr                   |
|---------------|-----------|--------------------------------------------------------------------------|
| update_error  | last half | the relative L2 distance of u from r                                     |
| share_doubled | last half | the share of elements with |u| > 2 max(|r|, 0.1)                         |
| max_ratio     | all steps | the largest |u| / max(|r|, 0.1), as an r of under 0.1 lr is next to none |
| max_update    | all steps | the largest |u|                                                          |
| explodes      | all steps | u is not finite, or max_update is over ten times the largest |r|         |

Why ten: rounding to 4 bits at worst doubles m and halves sqrt(v), a factor of four. Beyond ten, v was lost or m stuck.

Limits: independent elements, and no weight answers, so an exploding update costs nothing here. float32 weights: no
master is measured. eps is 1e-8 of the case's gradient scale, as if torch's default met gradients of 1: with a larger
one a lost v explodes less far (`--eps`). Peers run with their defaults, but for the hyper-parameters. bitsandbytes
quantizes with other code on a CPU, which never rounds a v to zero: only its rows from a GPU speak for it.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ROOT, append_records, import_peer
from optimizer_step import count_bytes
from rich import box
from rich.console import Console
from rich.table import Table
from timing import Numbers, attempt
from torch import Tensor, nn

RESULTS = ROOT / "benchmarks" / "results" / "optimizer_stress.jsonl"
OURS = "fp8stack"
SMALL, EXPLOSION = 0.1, 10.0  # an update, over lr; a factor over the largest of the reference
SPREADS = {"narrow": (0.3, 0.3, 0.3), "mid": (0.6, 0.6, 0.6), "wide": (1.0, 1.0, 0.5)}


@dataclass(frozen=True)
class Case:
    """One stream of gradients and the beta2 that it meets."""

    name: str
    spread: str = "narrow"  # of the gradients' scale over rows, columns and elements
    beta2: float = 0.999
    kind: str = "stationary"  # or another that `gradients` tells apart
    scale: float = 1.0  # of all gradients


CASES = [
    Case("narrow", kind="decay"),
    Case("mid", "mid", kind="decay"),
    Case("wide", "wide", kind="decay"),
    Case("sparse", "wide", kind="sparse"),
    Case("narrow .95", beta2=0.95),
    Case("wide .95", "wide", beta2=0.95),
    Case("sparse .95", "wide", beta2=0.95, kind="sparse"),
    Case("1e-6", scale=1e-6),
    Case("1e-7", scale=1e-7),
    Case("1e-12", scale=1e-12),
    Case("zero first", kind="zero first"),
    Case("zero", kind="zero"),
    Case("silent", kind="silent"),
]


@dataclass(frozen=True)
class Variant:
    """One configuration; the optimizer's class is named, not imported, so that a peer may be missing."""

    name: str
    module: str = "fp8stack.optim"
    kind: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict, hash=False)


FP8_LM = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16}  # uint8 is FP8
VARIANTS = [
    *(
        Variant(f"{OURS} {states}", options={"states": states})
        for states in ("8bit", "fp8", "4bit", "bf16", "fp8-lm", "fp32")
    ),
    Variant("torch fp32", "torch.optim"),
    Variant("bitsandbytes 8bit", "bitsandbytes.optim", "AdamW8bit"),
    *(
        Variant(f"torchao {b.lower()}", "torchao.optim", f"AdamW{b}")
        for b in ("8bit", "4bit", "Fp8")
    ),
    # It refuses the default 24-bit master beside float32 weights.
    Variant("flashoptim 8bit", "flashoptim", "FlashAdamW", {"master_weight_bits": None}),
    Variant("te fp8-lm", "transformer_engine.pytorch.optimizers", "FusedAdam", FP8_LM),
]


def gradients(case: Case, options: argparse.Namespace, seed: int) -> Iterator[Tensor]:
    """Yield the gradient of each step, float32 [size, size], the same whenever called with the same arguments.

    Element scales are lognormal; around a mean that drifts over about 100 steps lies noise that is twice to three
    times as large, of Student's t with 4 degrees of freedom.
    """
    size, steps, device = options.size, options.steps, options.device
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=device)
    rows, cols, elements = SPREADS[case.spread]
    scale = rows * normal(size, 1) + cols * normal(1, size) + elements * normal(size, size)
    scale = case.scale * scale.exp()
    frequency = torch.rand(size, 1, generator=generator, device=device) ** 3  # half under 1/8
    mean = 0.5 * normal(size, size)
    for step in range(steps):
        mean = 0.99 * mean + 0.07 * normal(size, size)  # a standard deviation of 0.5
        squares = torch.empty(2, size, size, device=device).exponential_(generator=generator)
        gradient = scale * (mean + normal(size, size) / squares.mean(0).sqrt())
        done = step / steps
        if case.kind == "decay":
            gradient *= 33**-done
        elif case.kind == "sparse":  # rows of an embedding: frequent and rare tokens
            present = torch.rand(size, 1, generator=generator, device=device) < frequency
            gradient *= present
        elif case.kind == "zero first":  # LoRA's A, whose B starts at zero
            gradient *= step > 0
        elif case.kind == "zero":
            gradient *= not 0.5 <= done < 0.75
        elif case.kind == "silent" and done >= 0.5:  # a third of each block's elements, then back
            gradient[:, ::3] *= 0.0 if done < 0.75 else 1e-6
        yield gradient


def measure(variant: Variant, case: Case, options: argparse.Namespace, seed: int) -> Numbers:
    """Return the numbers of one configuration on one case, None for those that are not finite."""
    hyper = {"lr": 1.0, "betas": (0.9, case.beta2), "eps": options.eps * case.scale}
    shape, device = (options.size, options.size), options.device
    weight = nn.Parameter(torch.zeros(shape, device=device))
    exact = nn.Parameter(torch.zeros(shape, device=device, dtype=torch.float64))
    kind = getattr(import_peer(variant.module), variant.kind)
    optimizer = kind([weight], **hyper, weight_decay=0.0, **variant.options)
    reference = torch.optim.AdamW([exact], **hyper, weight_decay=0.0)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    largest = torch.zeros(3, dtype=torch.float64, device=device)
    for step, gradient in enumerate(gradients(case, options, seed)):
        weight.data.zero_()
        exact.data.zero_()
        weight.grad, exact.grad = gradient, gradient.double()
        reference.step()
        optimizer.step()
        u, r = weight.detach().double(), exact.detach()
        ratio = u.abs() / r.abs().clamp(min=SMALL)
        largest = largest.maximum(torch.stack([u.abs().max(), ratio.max(), r.abs().max()]))
        if step >= options.steps // 2:
            shares = (ratio > 2).double().mean() / (options.steps - options.steps // 2)
            sums += torch.stack([(u - r).square().sum(), r.square().sum(), shares])
    error, norm, doubled = sums.tolist()
    max_update, max_ratio, max_reference = largest.tolist()
    numbers = {"update_error": math.sqrt(error / norm), "max_ratio": max_ratio}
    numbers |= {"max_update": max_update, "max_reference": max_reference, "share_doubled": doubled}
    numbers = {key: value if math.isfinite(value) else None for key, value in numbers.items()}
    numbers["finite"] = math.isfinite(max_update)
    numbers["explodes"] = not max_update <= EXPLOSION * max_reference  # so NaN does
    return {**numbers, "state_bytes": count_bytes([weight], optimizer)["state"]}


def to_record(
    variant: Variant, case: Case, options: argparse.Namespace, seed: int, numbers: Numbers
) -> dict[str, Any]:
    library = variant.module.split(".")[0]
    params = asdict(case)
    params |= {"case": params.pop("name"), "eps": options.eps * case.scale, "seed": seed}
    params |= {"size": options.size, "steps": options.steps}
    params |= {"library": f"{library} {sys.modules[library].__version__}"}
    record = {"name": "optimizer_stress", "variant": variant.name, "params": params}
    record |= {"metric": "update_error", "value": numbers["update_error"]}
    extra = {key: value for key, value in numbers.items() if key != "update_error"}
    return {**record, "unit": "relative L2", "extra": extra}


def show(results: dict[tuple[Variant, Case], list[Numbers]], options: argparse.Namespace) -> None:
    """Print the errors of all seeds' worst in percent, and a line for everything that was not measured."""
    table = Table(box=box.SIMPLE)
    table.add_column("configuration", no_wrap=True)
    for case in options.cases:
        table.add_column(case.name, justify="right", no_wrap=True)
    notes: dict[str, list[str]] = {}
    for variant in options.variants:
        cells = []
        for case in options.cases:
            done = [n for n in results[variant, case] if "explodes" in n]
            errors = [math.inf if (e := n["update_error"]) is None else 100 * e for n in done]
            worst, mark = max(errors, default=0), "!" * any(n["explodes"] for n in done)
            number = f"{worst:.1f}" if worst < 1000 else f"{worst:.0e}".replace("e+0", "e")
            cells.append(number + mark if done else "-")
            for note in {n["note"] for n in results[variant, case] if "note" in n}:
                notes.setdefault(f"{variant.name}: {note}", []).append(case.name)
        table.add_row(variant.name, *cells)
    console = Console(width=None if sys.stdout.isatty() else 170)
    seeds = ", ".join(map(str, options.seeds))
    print(f"{options.size} x {options.size}, {options.steps} steps, worst of seeds {seeds}")
    print("relative L2 error of the update in percent; ! explodes")
    console.print(table)
    for note, cases in notes.items():
        of = "" if len(cases) == len(options.cases) else f" ({', '.join(cases)})"
        console.print(f"  {note}{of}", highlight=False, markup=False)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", default=["*"], metavar="NAME", help="globs of configurations")
    add("--cases", nargs="+", default=["*"], metavar="NAME", help="globs of cases")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--size", type=int, default=1024, help="rows and columns; 64 at least, or nobody quantizes")
    add("--steps", type=int, default=300)
    add("--seeds", type=int, nargs="+", default=[0])
    add("--eps", type=float, default=1e-8, help="over the scale of the case's gradients")
    add("--out", type=Path, default=RESULTS, help="JSON lines that records are added to")
    options = parser.parse_args(arguments)
    for name, known, globs in (
        ("variants", VARIANTS, options.only),
        ("cases", CASES, options.cases),
    ):
        setattr(options, name, [k for k in known if any(fnmatch(k.name, g) for g in globs)])
        if not getattr(options, name):
            parser.error(f"{globs} matches none of: {', '.join(k.name for k in known)}")
    if options.size < 64:
        parser.error(f"--size {options.size}: must be at least 64, or nobody quantizes")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    results: dict[tuple[Variant, Case], list[Numbers]] = {}
    for variant in options.variants:
        records = []
        for case in options.cases:
            runs = results[variant, case] = []
            for seed in options.seeds:
                numbers = attempt(partial(measure, variant, case, options, seed))
                runs.append(numbers)
                if "explodes" in numbers:
                    records.append(to_record(variant, case, options, seed, numbers))
                said = numbers.get("note", numbers.get("update_error"))
                print(variant.name, case.name, said, sep=" | ", file=sys.stderr)
        append_records(options.out, records)
    show(results, options)
    explode: dict[str, list[str]] = {}
    missing: dict[str, list[str]] = {}
    for (variant, case), runs in results.items():
        if any(n.get("explodes") for n in runs):
            explode.setdefault(variant.name, []).append(case.name)
        if any("note" in n for n in runs):
            missing.setdefault(variant.name, []).append(case.name)
    failed = [name for name in {**explode, **missing} if name.startswith(OURS)]
    print(json.dumps({"ok": not failed, "explode": explode, "not_measured": missing}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
