"""What the tables of README.md and docs/ show of `benchmarks/results/`: `TABLES`, for `tables.py` to write.

A function returns the lines of a table. Rows name the variant of the record that they show, so a record that is missing
is a KeyError and not an empty cell. A variant that was measured again counts with its last record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from accuracy import VARIANTS

RESULTS = Path(__file__).resolve().parent / "results"

Record = dict[str, Any]
TABLES: dict[str, Callable[[], list[str]]] = {}


def read(name: str, **params: Any) -> list[Record]:
    """Return the records of benchmarks/results/NAME.jsonl whose parameters have these values."""
    records = map(json.loads, (RESULTS / f"{name}.jsonl").read_text().splitlines())
    return [r for r in records if params.items() <= r["params"].items()]


def by_variant(records: Iterable[Record]) -> dict[str, Record]:
    return {r["variant"]: r for r in records}


def by_seed(name: str, **params: Any) -> dict[str, dict[int, float]]:
    """Return the values of each variant by seed, of the records whose parameters have these values."""
    found: dict[str, dict[int, float]] = {}
    for r in read(name, **params):
        found.setdefault(r["variant"], {})[r["params"]["seed"]] = r["value"]
    return found


def runs_by_seed(records: Iterable[Record]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = {}
    for r in records:
        found.setdefault(r["params"]["seed"], []).append(r)
    return found


def paired(values: dict[int, float], base: dict[int, float]) -> list[float]:
    """Return by how much values exceed those of the same seed, as fractions, in the order of seeds."""
    return [values[seed] / base[seed] - 1 for seed in sorted(values)]


def percent(fraction: float) -> str:
    """Return a difference in percent, signed, without the unit."""
    return f"{round(100 * fraction, 2) + 0.0:+.2f}".replace("-", "−")  # and not −0.00


def row(*cells: str) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def lines(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    return [row(*heads), "|---" * len(heads) + "|", *(row(*cells) for cells in rows)]


def table(name: str) -> Callable[[Callable[[], list[str]]], Callable[[], list[str]]]:
    """Register a function as that of a table."""

    def register(function: Callable[[], list[str]]) -> Callable[[], list[str]]:
        TABLES[name] = function
        return function

    return register


# --- optimizers

STEPS = {
    "fp8stack, default": "fp8stack",
    'fp8stack, `states="4bit"`': "fp8stack 4bit/split24/fp8",
    'fp8stack, `offload="cpu"`': "fp8stack offload",
    "torch fused, float32": "torch fused fp32",
    "torch fused, pure bfloat16": "torch fused bf16",
    "flashoptim, 24 bits": "flashoptim 24bit",
    "bitsandbytes AdamW8bit": "bitsandbytes 8bit",
    "torchao AdamW8bit": "torchao 8bit",
}


def steps() -> dict[str, Record]:
    """Return the records of the AdamW step on a 1.24 B model, by variant."""
    return by_variant(r for r in read("optimizer_step", model="llama-3.2-1b") if r["value"])


def optimizer_step() -> list[str]:
    found, rows = steps(), []
    for name, variant in STEPS.items():
        r = found[variant]
        rows.append((name, f"{r['value']:.2f}", f"{r['extra']['bytes']['total']:.2f}"))
    return lines(("AdamW step, Llama-3.2-1B", "ms", "bytes/parameter"), rows)


TABLES["optimizer-step"] = optimizer_step


STRESS = {
    "fp8stack, default": "fp8stack 8bit",
    'fp8stack, `states="4bit"`': "fp8stack 4bit",
    "bitsandbytes AdamW8bit": "bitsandbytes 8bit",
    "torchao AdamW8bit": "torchao 8bit",
    "flashoptim": "flashoptim 8bit",
    "TransformerEngine, FP8-LM formats": "te fp8-lm",
}
CASES = ("mid", "wide", "sparse", "1e-7", "zero first")


@table("optimizer-stress")
def optimizer_stress() -> list[str]:
    cells = {}
    for r in read("optimizer_stress"):
        if not r["extra"]["finite"]:
            cell = "not finite"
        elif r["extra"]["explodes"]:
            cell = f"**{r['extra']['max_update']:,.0f}**"
        else:
            cell = f"{100 * r['value']:.0f}"
        cells[r["variant"], r["params"]["case"]] = cell
    rows = [(name, *(cells[variant, c] for c in CASES)) for name, variant in STRESS.items()]
    return lines(("", *CASES[:-1], "first zero"), rows)


def accuracy(variant: str, part: str) -> list[Record]:
    """Return the last records of a part of optimizer_accuracy.py over one variant."""
    found = [r for r in read("optimizer_accuracy", part=part) if r["variant"] == variant]
    return [r for r in found if r["time"] == found[-1]["time"]]  # none of a part without it


# --- products

LAYERS = {
    "bf16": "bf16 eager",
    "fp8stack native": "native tokenwise",
    "fp8stack native, current": "native current",
    "fp8stack native, delayed": "native delayed",
    "fp8stack native, blockwise": "native blockwise",
    "fp8stack native, current, fast sums": "native current, fast sums",
    "fp8stack native, fused": "native fused, tokenwise",
    "fp8stack native, fused, current": "native fused",
    "fp8stack native, fused, delayed": "native fused, delayed",
    "fp8stack native, fused, delayed, fast sums": "native fused, delayed, fast sums",
    "TransformerEngine, current": "te current",
    "TransformerEngine, delayed": "te delayed",
    "TransformerEngine, blockwise": "te blockwise",
    "TransformerEngine, fused modules, current": "te current, fused LN",
    "TransformerEngine, fused modules, delayed": "te delayed, fused LN",
    "TransformerEngine, fused modules, blockwise": "te blockwise, fused LN",
    "torchao, tensorwise": "torchao tensorwise",
    "torchao, rowwise": "torchao rowwise",
    "bf16, compiled": "bf16 compile",
    "fp8stack native, compiled": "native tokenwise compile",
    "fp8stack native, current, compiled": "native current compile",
    "fp8stack native, delayed, compiled": "native delayed compile",
    "fp8stack native, blockwise, compiled": "native blockwise compile",
    "fp8stack native, fused, compiled": "native fused, tokenwise compile",
    "fp8stack native, fused, delayed, compiled": "native fused, delayed compile",
    "fp8stack native, fused, delayed, fast sums, compiled": "native fused, delayed, fast sums compile",
    "torchao, tensorwise, compiled": "torchao tensorwise compile",
}
SHOWN = {
    "bf16": "bf16",
    "fp8stack native, fused": "default",
    "fp8stack native, fused, delayed": '`"delayed"`',
    "fp8stack native, blockwise": '`"blockwise"`',
    "TransformerEngine, fused modules, current": "TransformerEngine, current",
    "torchao, rowwise": "torchao, rowwise",
    "bf16, compiled": "bf16, compiled",
    "fp8stack native, fused, compiled": "default, compiled",
    "fp8stack native, blockwise, compiled": '`"blockwise"`, compiled',
    "torchao, tensorwise, compiled": "torchao, tensorwise, compiled",
}


def layers(records: Iterable[Record] | None = None) -> dict[str, Record]:
    """Return the records of forward and backward of four Llama blocks, by variant: of the last run that has all."""
    runs: dict[str, list[Record]] = {}
    for r in records or read("train_step"):
        if r["params"]["model"] == "llama":
            runs.setdefault(r["time"], []).append(r)
    whole = [
        found for found in map(by_variant, runs.values()) if found.keys() >= {*LAYERS.values()}
    ]
    return whole[-1] if whole else {}


def train_step() -> list[str]:
    found, rows = layers(), []
    for name, words in SHOWN.items():
        r = found[LAYERS[name]]
        extra = r["extra"]
        numbers = (f"{extra['of_eager']:.2f}", f"{extra['peak_gib']:.1f}")
        rows.append((words, f"{r['value']:.1f}", *numbers))
    heads = ("ms", "× bf16", "GiB")
    return lines(("four blocks of Llama-3-8B's size, 8192 tokens", *heads), rows)


TABLES["train-step"] = train_step


# --- several GPUs

COLLECTIVES = {
    "all-reduce, bfloat16": "nvlink bf16",
    "all-reduce, float32": "nvlink fp32",
    "reduce-scatter, bfloat16": "nvlink reduce_scatter bf16",
    "all-reduce, bfloat16, without the kernel": "collective bf16",
}


@table("collectives")
def collectives() -> list[str]:
    """Tabulate how many times as fast as NCCL's collectives ours are, by bytes."""
    found = {(r["variant"], r["params"]["size"]): r for r in read("comm", ranks=4)}
    rows = []
    for name, variant in COLLECTIVES.items():
        faster = "speedup_fp32" if variant == "nvlink fp32" else "speedup"
        rows.append((name, *(f"{found[variant, 2**p][faster]:.2f}" for p in (24, 26, 30))))
    return lines(("× NCCL, four H200s", "16 MiB", "64 MiB", "1 GiB"), rows)


@table("ddp-step")
def ddp_step() -> list[str]:
    found, rows = by_variant(read("ddp_step", model="llama")), []
    names = {
        "ddp bf16": "DDP, bfloat16",
        "hook": "DDP with the hook",
        "DataParallel": "`DataParallel`",
    }
    for variant, name in names.items():
        r = found[variant]
        sent = (f"{r['gradient_bytes_per_parameter']:.2f}", f"{r['wire_mib']:,.0f}")
        rows.append((name, f"{r['value']:.1f}", *sent))
    heads = ("step, ms", "gradients, bytes a parameter", "sent, MiB a step")
    return lines(("Llama of 1.1 B, four H200s", *heads), rows)


FRAMEWORKS = {
    "DeepSpeed, ZeRO-2": "zero2",
    "DeepSpeed, ZeRO-3": "zero3",
    "FSDP2": "fsdp2",
    "Accelerate, DDP": "accelerate ddp",
}


@table("frameworks")
def frameworks() -> list[str]:
    found, rows = by_variant(read("frameworks")), []
    for name, variant in FRAMEWORKS.items():
        base, o2 = found[f"{variant} bf16"], found[f"{variant} O2 native"]
        times = [f"{r['value']:.1f}" for r in (base, o2)]
        peaks = [f"{r['peak_gib']:.1f}" for r in (base, o2)]
        rows.append((name, *times, f"{base['value'] / o2['value']:.2f}", *peaks))
    return lines(("", "bf16, ms", "O2, ms", "×", "bf16, GiB", "O2, GiB"), rows)


SHAPES = (768, 3072), (1024, 4096), (2048, 8192), (4096, 14_336), (768, 50_257)


@table("layer-shapes")
def layer_shapes() -> list[str]:
    """Tabulate × bf16 of layers with bfloat16 inputs, by rows."""
    heads = 1024, 4096, 16_384
    rows = []
    for k, n in SHAPES:
        found = read("layer_shapes", k=k, n=n, share=1, x="bfloat16", bias=False)
        alone = (r for r in found if r["variant"] in ("current", "alone"))
        values = {r["params"]["rows"]: r["value"] for r in alone}
        rows.append((f"{k} → {n}", *(f"{values[m]:.2f}" for m in heads)))
    return lines(("× bf16, by rows of input", *(f"{m:,}" for m in heads)), rows)


@table("experts")
def experts() -> list[str]:
    """Tabulate how much faster a layer of experts is in FP8 than in bfloat16."""
    heads = 1024, 4096, 16_384
    faster: dict[str, dict[int, float]] = {}
    for r in (r for r in read("experts") if r["name"] == "experts"):
        faster.setdefault(r["params"]["model"], {})[r["params"]["tokens"]] = r["bf16"] / r["fp8"]
    rows = [
        (model, *(f"{found[tokens]:.2f}" for tokens in heads)) for model, found in faster.items()
    ]
    return lines(("× bf16, by tokens", *(f"{tokens:,}" for tokens in heads)), rows)


BASES = ("bf16", "O2", "O2, frozen fp8", "bitsandbytes 8bit", "bitsandbytes 4bit")


@table("lora")
def lora() -> list[str]:
    """Tabulate LoRA over a base of 8 B by how the base is held."""
    rows, found = [], by_variant(read("lora", model="llama-8b"))
    for variant in BASES:
        sizes = (f"{found[variant][key]:.1f}" for key in ("base_gib", "peak_gib", "value"))
        rows.append((variant, *sizes))
    return lines(("", "at rest, GiB", "peak, GiB", "step, ms"), rows)


NOT_SHOWN = {  # as good as another row, or between two others
    "float32", "current, head bf16", "default, first_last=1", "blockwise, head fp8", "blockwise, first_last=2",
    "current, only v", "current, only o", "TransformerEngine, blockwise, head left out",
    "torchao, tensorwise, head fp8", "torchao, tensorwise, head left out", "TransformerEngine, current, head fp8",
}  # fmt: skip


def signed(gap: float) -> str:
    return f"{gap:+.4f}".replace("-", "−")


@table("accuracy")
def trained_model() -> list[str]:
    """Tabulate how far FP8 products move a trained model from bf16; variants of earlier defaults are left out."""
    found = by_variant(read("accuracy", model="smollm2-135m"))
    shown = {v.name: found[v.name] for v in VARIANTS if v.name in found.keys() - NOT_SHOWN}
    rows = [(name, f"{r['kl']:.4f}", signed(r["loss_gap"])) for name, r in shown.items()]
    kl, loss = (max(r[f"{key}_error"] for r in shown.values()) for key in ("kl", "loss_gap"))
    return lines(("options", f"KL(bf16 ‖ FP8), ± {kl:.4f}", f"loss, ± {loss:.4f}"), rows)


RECIPES = {  # how accuracy.py, real_models.py, train_step.py and fine_tuning.py call it
    "bf16": ("", "bf16", "bf16 eager", ""),
    '`"current"`, `head="fp8"`': ("current, head fp8", "", "", "O0, current, head fp8"),
    '`"current"`': ("current", "O2, current", "native current", ""),
    "default": ("default", "O2", "native tokenwise", "O0"),
    '`"rowwise"`': ("rowwise", "O2, rowwise", "", ""),
    '`"blockwise"`': ("blockwise", "O2, blockwise", "native blockwise", "O0, blockwise"),
    "default, attention in bf16, `first_last=2`": (
        "default, attention in bf16, first_last=2", "O2, accurate", "", "O0, attention in bf16, first_last=2",
    ),
}  # fmt: skip


@table("recipes")
def recipes() -> list[str]:
    """Tabulate what the default was chosen by: KL, time and memory of each recipe, and what fine-tuning loses."""
    kl = by_variant(read("accuracy", model="smollm2-135m"))
    tuned: dict[str, dict[int, float]] = {}  # of each variant and seed, by its last run
    for r in read("fine_tuning", model="smollm2-135m", steps=200, train=["*"]):
        tuned.setdefault(r["variant"], {})[r["params"]["seed"]] = r["value"]
    whole = by_variant(read("real_models", model="llama-1b"))  # each beside bf16 of its own run
    blocks, rows = layers(), []
    for words, (accuracy, model, part, training) in RECIPES.items():
        step, block = whole.get(model), blocks.get(part)
        damage = tuned.get(training, {}).values()
        said = kl.get(accuracy, {})
        cells = [f"{said['kl']:.4f}", signed(said["loss_gap"])] if said else ["", ""]
        cells += [f"{fmean(damage):.4f} ({len(damage)})" if damage else ""]
        cells += [f"{step['speedup']:.2f}" if step else ""]
        cells += [f"{step['peak_gib']:.1f}" if step else ""]
        compiled = blocks.get(f"{part.removesuffix(' eager')} compile")
        cells += [f"{b['value']:.1f}" if b else "" for b in (block, compiled)]
        rows.append((words, *cells))
    heads = (
        "KL",
        "loss",
        "fine-tuning (seeds)",
        "Llama-3.2-1B at O2, × bf16",
        "GiB",
        "four blocks of Llama-3-8B, ms",
        "compiled",
    )
    return lines(("", *heads), rows)


MODELS = {
    "llama-1b": "Llama-3.2-1B", "llama-8b-4": "4 layers of Llama-3-8B", "gpt2": "GPT-2 124M", "vit-l": "ViT-L/16",
    "qwen3-moe": "Qwen3-MoE, 8 layers", "t5-base": "T5-base", "whisper-small": "Whisper-small",
    "dit-xl": "DiT-XL/2", "unet-sd15": "the UNet of SD 1.5",
}  # fmt: skip


def measured(model: str) -> tuple[str, dict[str, Record], str]:
    """Return the GPU of a model's last record, its records there by variant, and bf16's GiB.

    bf16 holds as much on every GPU.
    """
    every = read("real_models", model=model)
    gpu = [r["gpu"] for r in every if r["variant"] == "O2"][-1]
    found = by_variant(r for r in every if r["gpu"] == gpu)
    held = [f"{r['peak_gib']:.1f}" for r in every if r["variant"] == "bf16"]
    return gpu.split()[1], found, (held or [""])[-1]


def compiled(found: dict[str, Record]) -> str:
    """Return how much faster than bf16 O2 is where both are compiled, each by its turns with bf16 in eager mode."""
    ours, theirs = (found.get(f"{name} compiled") for name in ("O2", "bf16"))
    return f"{ours['speedup'] / theirs['speedup']:.2f}" if ours and theirs else ""


@table("real-models-short")
def real_models_in_short() -> list[str]:
    """Tabulate a whole step of transformers' models in bf16 and at O2 by today's default, which H200s have measured."""
    rows = []
    for model, words in MODELS.items():
        gpu, found, held = measured(model)
        if gpu == "H200":
            o2 = found["O2"]
            cells = [f"{o2['base_ms']:.0f} → {o2['value']:.0f}", f"{o2['speedup']:.2f} ×"]
            cells += [compiled(found), f"{held} → {o2['peak_gib']:.1f}"]
            rows.append((words, *cells))
    return lines(("bf16 → O2", "ms a step", "faster", "both compiled", "peak GiB"), rows)


@table("real-models")
def real_models() -> list[str]:
    """Tabulate whole steps of transformers' models; what was not run is empty."""
    rows = []
    for model, words in MODELS.items():
        gpu, found, held = measured(model)
        o2 = found["O2"]
        cells = [gpu, f"{o2['base_ms']:.1f} ({o2['base_host_ms']:.0f})"]  # in turns with O2
        cells.append(f"{found['O0']['speedup']:.2f}" if "O0" in found else "")
        cells += [f"{o2['value']:.1f} ({o2['host_ms']:.0f})", f"**{o2['speedup']:.2f}**"]
        multiplied = o2.get("in_fp8")
        cells.append("" if multiplied is None else f"{100 * multiplied:.0f}")
        graphed = found.get("O2 graphed")
        cells += [f"{graphed['speedup']:.2f}" if graphed else "", compiled(found)]
        cells += [held, f"{o2['peak_gib']:.1f}"]
        rows.append((f"{words}, {o2['params']['tokens']:,} tokens", *cells))
    heads = (
        "GPU",
        "bf16, ms (host)",
        "O0, ×",
        "O2, ms (host)",
        "O2, ×",
        "in FP8, %",
        "O2 graphed, ×",
        "both compiled, ×",
    )
    return lines(("", *heads, "bf16, GiB", "O2, GiB"), rows)
