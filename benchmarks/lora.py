"""LoRA on a Llama of 8 B: what does a frozen base in FP8 hold, how fast is it, and does the loss fall as in bf16?

    python benchmarks/lora.py                                   # all variants of Llama-3-8B: about ten minutes
    python benchmarks/lora.py --only bf16 "O2*" --steps 10
    python benchmarks/lora.py --device cpu --model tiny --steps 2

The model is transformers' own class, made in bfloat16 on the GPU with random weights, the same in every variant. Each
Linear layer but the head gets an adapter of rank 16 in bfloat16, written out here, so that peft need not be installed.
A step is forward, backward and AdamW over the adapters, for one batch, over and over.

"bf16" has torch's layers and fused AdamW. Levels are `initialize`; "frozen fp8" is its option frozen="fp8", and "bf16
products" compute="bf16". "bitsandbytes 8bit" has Linear8bitLt for the base, "bitsandbytes 4bit" Linear4bit (NF4).

Each variant has a process of its own. `base GiB` is what model and optimizer hold before the first step, `peak GiB` the
most that a step takes, `tokens/s` is of the median step, and `loss` that of the last of `--steps` steps. Compare it
with that of bf16: the base of all is random, so adapters learn the batch by heart.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import ROOT, add_choices, append_records, import_peer, read_choices
from real_models import LLAMA, SMALL
from rich import box
from rich.console import Console
from rich.table import Table
from timing import Numbers, attempt, stopping_in_order, time_steps
from torch import Tensor, nn

import fp8stack

RESULTS = ROOT / "benchmarks" / "results" / "lora.jsonl"
RANK, ALPHA = 16, 32
SIZES = {
    "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256,
}  # fmt: skip
MODELS = {  # sizes, sequences of a batch, tokens of each
    "llama-8b": (SIZES, 2, 2048),
    "tiny": (SIZES | SMALL, 2, 32),
}


@dataclass(frozen=True)
class Variant:
    """One configuration."""

    name: str
    level: str = ""  # of fp8stack
    base: str = ""  # a class of bitsandbytes
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # of initialize


FROZEN = {"frozen": "fp8"}
VARIANTS = [
    Variant("bf16"),
    *(Variant(level, level) for level in ("O0", "O2")),
    *(Variant(f"{level}, frozen fp8", level, options=FROZEN) for level in ("O0", "O2")),
    Variant("O2, frozen fp8, bf16 products", "O2", options=FROZEN | {"compute": "bf16"}),
    Variant("bitsandbytes 8bit", base="Linear8bitLt"),
    Variant("bitsandbytes 4bit", base="Linear4bit"),
]


class Adapted(nn.Module):
    """LoRA (Hu et al., 2021): a frozen layer, and a trained product of low rank beside it."""

    def __init__(self, base: nn.Module, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(sizes[1], RANK, bias=False)
        self.b = nn.Linear(RANK, sizes[0], bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x)) * (ALPHA / RANK)
        return y


def quantized(layer: nn.Linear, kind: str, device: str) -> nn.Module:
    """Return a layer of bitsandbytes with the weight of `layer`."""
    layers = import_peer("bitsandbytes.nn")
    options: dict[str, Any] = {"has_fp16_weights": False}
    if kind == "Linear4bit":
        options = {"compute_dtype": torch.bfloat16, "quant_type": "nf4"}
    made = getattr(layers, kind)(*layer.weight.shape[::-1], bias=False, device="meta", **options)
    options.pop("compute_dtype", None)
    # from a weight on a CPU, as one that is on a GPU would not be quantized by a move there
    made.weight = type(made.weight)(layer.weight.cpu(), requires_grad=False, **options)
    moved: nn.Module = made.to(device)  # which quantizes it
    return moved


def build(variant: Variant, name: str, device: str) -> tuple[Any, Any]:
    """Return model and optimizer of a variant."""
    transformers = import_peer("transformers")
    config = getattr(transformers, LLAMA[1])(**MODELS[name][0], attn_implementation="sdpa")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = getattr(transformers, LLAMA[0])(config).requires_grad_(False)
        for block in model.model.layers:
            for part in (block.self_attn, block.mlp):
                for inner, layer in [*part.named_children()]:
                    if type(layer) is nn.Linear:
                        sizes = layer.out_features, layer.in_features
                        base = quantized(layer, variant.base, device) if variant.base else layer
                        setattr(part, inner, Adapted(base, sizes))
    torch.set_default_dtype(torch.float32)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=1e-3, fused=device == "cuda" or None)
    if variant.level:
        return fp8stack.initialize(model, optimizer, variant.level, **variant.options)
    return model, optimizer


def measure(variant: Variant, name: str, options: argparse.Namespace) -> Numbers:
    """Return what a variant holds and takes."""
    cuda, (_, batch, length) = options.device == "cuda", MODELS[name]
    model, optimizer = build(variant, name, options.device)
    ids = torch.randint(model.config.vocab_size, (batch, length), device=options.device)

    def step() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    held = peak = None
    if cuda:
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
    losses = [step().item() for _ in range(options.steps)]
    if cuda:
        peak = torch.cuda.max_memory_allocated() / 2**30
    step_ms, host_ms, _ = time_steps(step, options.steps, cuda)
    report = fp8stack.get_report(model) if variant.level else None
    return {
        "step_ms": step_ms, "host_ms": host_ms, "tokens_per_s": 1e3 * batch * length / step_ms, "base_gib": held,
        "peak_gib": peak, "first_loss": losses[0], "loss": losses[-1], "losses": losses,
        "frozen_gib": report.frozen_gib if report else None,
        "parameters": sum(p.numel() for p in model.parameters() if not variant.base or p.requires_grad),
    }  # fmt: skip


def _write(variant: Variant, name: str, options: argparse.Namespace, path: str) -> None:
    Path(path).write_text(json.dumps(attempt(lambda: measure(variant, name, options))))


def apart(variant: Variant, name: str, options: argparse.Namespace) -> Numbers:
    """Return what `measure` does in a process of its own, or a note."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "numbers.json")
        process = get_context("spawn").Process(
            target=_write, args=(variant, name, options, str(path))
        )
        process.start()
        try:
            process.join(options.limit)
        finally:
            process.kill()
            process.join()
        if not path.exists():
            return {"note": f"no numbers after {options.limit:g} s, or status {process.exitcode}"}
        numbers: Numbers = json.loads(path.read_text())
        return numbers


def report(results: dict[str, Numbers], name: str, output: Path) -> None:
    _, batch, length = MODELS[name]
    table = Table("variant", title=f"{name}: LoRA of rank {RANK}", box=box.SIMPLE)
    columns = {
        "base GiB": "base_gib", "peak GiB": "peak_gib", "ms": "step_ms", "tokens/s": "tokens_per_s", "loss": "loss",
    }  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    records = []
    for variant, n in results.items():
        if "note" in n:
            continue
        cells = (n[key] for key in columns.values())
        table.add_row(variant, *("-" if c is None else f"{c:,.2f}" for c in cells))
        params = {"model": name, "batch": batch, "tokens": batch * length, "rank": RANK}
        rest = {key: value for key, value in n.items() if key != "step_ms"}
        records.append({
            "name": "lora", "variant": variant, "params": params, "metric": "step", "value": n["step_ms"],
            "unit": "ms", **rest,
        })  # fmt: skip
    if records:
        append_records(output, records)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    parser.add_argument("--steps", type=int, default=20, help="steps before the loss is read")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a variant")
    options = read_choices(parser, arguments, MODELS, VARIANTS, lambda _: ["llama-8b"])
    notes: dict[str, str] = {}
    with stopping_in_order():
        for name in options.model:
            results: dict[str, Numbers] = {}
            for variant in options.variants:
                found = results[variant.name] = attempt(partial(apart, variant, name, options))
                if "note" in found:
                    notes[f"{name}, {variant.name}"] = found["note"]
                told = found.get("note") or f"{found['step_ms']:.1f} ms"
                print(f"{name}, {variant.name}: {told}", file=sys.stderr, flush=True)
            report(results, name, options.output)
    print(json.dumps({"notes": notes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
