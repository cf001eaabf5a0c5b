"""How near are the gradients of FP8 products to float32's? One step of one model, every recipe, before and in training.

    python benchmarks/gradients.py                                 # GPT-2 124M and a Llama of 1 B parameters
    python benchmarks/gradients.py --model gpt2 --only bf16 'native*'
    python benchmarks/gradients.py --device cpu --model tiny --steps 20

A model trains in bf16 (float32 weights, autocast, AdamW) on bytes of Python's standard library, with the vocabulary of
its tokenizer all the same, so that the head is of its usual size. At its first values and after --steps steps, loss and
gradients of one batch that is held out are computed in float32, without TF32, and by each variant on a copy of the
model; FP8 is level O0, all Linear layers and the head. "delayed" takes the batch until its history leads the scales.

Of all matrices: `off` is the mean of |g - exact| / |exact|; `cosine` and `least` are the mean and the least cosine;
`along` is the mean size along the exact gradient, <g, exact> / <exact, exact>, which is 1 where an error has no
preferred direction; `norm` is that of all together over float32's. `loss` is off by so much of float32's.

Limits: one batch, so `loss` is one sample. What cannot run here, or would fall back to bf16 in part, is named at the
end and has no record. On a CPU sums are float32's whatever a variant says.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from common import ROOT, add_choices, append_records, read_choices
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fp8stack
from fp8stack.kernels.reference.delayed_state import SEEDED

sys.path.insert(0, str(ROOT / "examples"))
import corpus
from gpt.model import GPT, SIZES, ModelConfig

RESULTS = ROOT / "benchmarks" / "results" / "gradients.jsonl"
WARM_UP = 100  # steps of the learning rate's
Numbers = dict[str, Any]
Result = tuple[float, dict[str, Tensor]]  # a loss, and the gradient of each matrix in float32


@dataclass(frozen=True)
class Size:
    config: ModelConfig
    batch: int
    lr: float


MODELS = {
    "gpt2": Size(SIZES["gpt2"], 8, 6e-4),
    "llama-1b": Size(replace(SIZES["llama-1b"], vocab=50_304), 4, 3e-4),
    "tiny": Size(SIZES["tiny"], 4, 3e-3),  # for tests on a CPU
}


@dataclass(frozen=True)
class Variant:
    """Options of fp8stack.initialize at O0; none for bf16."""

    name: str
    options: dict[str, Any] | None = field(default=None, hash=False)


NATIVE, TE = {"compute": "native"}, {"compute": "te"}
VARIANTS = [
    Variant("bf16"),
    Variant("native current", NATIVE),
    Variant("native current, fast sums", {**NATIVE, "fp8_fast_accum": True}),
    Variant("native delayed", {**NATIVE, "fp8_recipe": "delayed"}),
    Variant("native blockwise", {**NATIVE, "fp8_recipe": "blockwise"}),
    Variant("te current", TE),
    Variant("te current, fast sums", {**TE, "fp8_fast_accum": True}),
    Variant("te delayed", {**TE, "fp8_recipe": "delayed"}),
    Variant("te blockwise", {**TE, "fp8_recipe": "blockwise"}),
]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stream: Iterator[corpus.Batch],
    lrs: list[float],
) -> None:
    """Take a step in bf16 with each of these learning rates."""
    device = next(model.parameters()).device
    for lr in lrs:
        tokens, targets = (half.to(device) for half in next(stream))
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()


def differentiate(model: nn.Module, batch: corpus.Batch, exact: bool = False) -> Result:
    """Return loss and gradients under bf16 autocast; or in float32, a sequence at a time, which needs less memory."""
    device, parts = batch[0].device.type, len(batch[0]) if exact else 1
    total = 0.0
    for tokens, targets in zip(*(half.chunk(parts) for half in batch), strict=True):
        with torch.autocast(device, torch.bfloat16, enabled=not exact):
            loss = model(tokens, targets) / parts
        loss.backward()
        total += loss.item()
    found = {name: p.grad.float() for name, p in model.named_parameters() if p.ndim > 1}
    model.zero_grad()
    return total, found


def measure(variant: Variant, model: nn.Module, batch: corpus.Batch, exact: Result) -> Numbers:
    model = copy.deepcopy(model)
    options = variant.options
    if options is not None:
        # strict: what falls back to bf16 must not be recorded as FP8
        model, _ = fp8stack.initialize(model, None, "O0", strict=True, select="all", **options)
        if options.get("fp8_recipe") == "delayed":
            for _ in range(SEEDED + 1):
                differentiate(model, batch)
    return compare(differentiate(model, batch), exact)


def compare(found: Result, exact: Result) -> Numbers:
    (loss, grads), (exact_loss, exact_grads) = found, exact
    off, cosine, along = {}, {}, {}
    for name, g in exact_grads.items():
        square, inner = g.square().sum(), (g * grads[name]).sum()
        off[name] = ((grads[name] - g).norm() / square.sqrt()).item()
        cosine[name] = (inner / square.sqrt() / grads[name].norm()).item()
        along[name] = (inner / square).item()
    least = min(cosine, key=cosine.__getitem__)
    return {
        "off": fmean(off.values()),
        "cosine": fmean(cosine.values()),
        "least_cosine": cosine[least],
        "least_in": least,
        "along": fmean(along.values()),
        "norm": total_norm(grads) / total_norm(exact_grads),
        "loss_gap": loss / exact_loss - 1,
        "float32_loss": exact_loss,
    }


def total_norm(grads: dict[str, Tensor]) -> float:
    return torch.stack([g.norm() for g in grads.values()]).norm().item()


def report(results: dict[str, Numbers], name: str, step: int, options: argparse.Namespace) -> None:
    size = MODELS[name]
    title = f"{name} after {step} steps: gradients by float32's"
    table = Table("products", title=title, box=box.SIMPLE)
    for column in ("off", "cosine", "least", "along", "norm", "loss"):
        table.add_column(column, justify="right", no_wrap=True)
    params = {"model": name, "after": step, "batch": size.batch, "sequence": size.config.seq_len}
    params |= {"layers": size.config.layers, "vocab": size.config.vocab, "lr": size.lr}
    records = []
    for variant, n in results.items():
        cells = [f"{n[k]:.4f}" for k in ("cosine", "least_cosine", "along", "norm")]
        table.add_row(variant, f"{n['off']:.2%}", *cells, f"{n['loss_gap']:+.3%}")
        record = {"name": "gradients", "variant": variant, "params": params, "metric": "off"}
        records.append({**record, "value": n["off"], "unit": "of float32's gradient", **n})
    append_records(options.output, records)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def compare_all(name: str, options: argparse.Namespace) -> list[str]:
    """Measure and report all variants before and after training; return what failed."""
    size, failed = MODELS[name], []
    torch.manual_seed(0)
    length = size.config.seq_len
    model = GPT(size.config).to(options.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    text = corpus.load(None, length)
    windows = torch.Generator().manual_seed(0)
    stream = corpus.batches(text.train, size.batch, length, windows)
    lrs = [size.lr * min(1, (step + 1) / WARM_UP) for step in range(options.steps)]
    held_out = corpus.spaced_batches(text.validation, size.batch, length, 1)[0]
    batch = (held_out[0].to(options.device), held_out[1].to(options.device))
    for step in dict.fromkeys((0, options.steps)):
        train(model, optimizer, stream, lrs[:step])
        exact = differentiate(model, batch, exact=True)
        results: dict[str, Numbers] = {}
        for variant in options.variants:
            try:
                results[variant.name] = measure(variant, model, batch, exact)
            except Exception as error:  # missing, refused, or too large
                why = (str(error).splitlines() or [""])[0][:200]
                failed.append(f"{name} after {step}, {variant.name}")
                print(f"{failed[-1]}: {type(error).__name__}: {why}", file=sys.stderr)
            gc.collect()  # layers and hooks refer to each other, and hold memory that the next needs
        report(results, name, step, options)
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    parser.add_argument("--steps", type=int, default=200, help="between the two comparisons")
    usual = [name for name in MODELS if name != "tiny"]
    options = read_choices(parser, arguments, MODELS, VARIANTS, lambda _: usual)
    if options.steps < 0:
        parser.error(f"--steps {options.steps}: must be at least 0")
    torch.set_float32_matmul_precision("highest")  # no TF32
    failed = [each for name in options.model for each in compare_all(name, options)]
    print(json.dumps({"failed": failed}))
    moments = len({0, options.steps})
    return 0 if len(failed) < len(options.model) * moments * len(options.variants) else 1


if __name__ == "__main__":
    sys.exit(main())
