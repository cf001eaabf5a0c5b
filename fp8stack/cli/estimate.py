"""`fp8stack estimate`: how much memory training takes on each GPU, and what fits.

    fp8stack estimate --parameters 7e9 --seq 4096 --gpu H100
    fp8stack estimate --hf-config config.json --opt-level O2 --states 4bit --ranks 8 --zero 2 --batch 4 --memory 80

The model is a number of parameters (of which a Llama-style shape is made, and a note says so), sizes, or a Hugging Face
configuration, of which transformers makes the model. Levels stand beside AdamW in float32, AdamW on float32 weights
under bf16 autocast, and bitsandbytes' 8-bit AdamW on bfloat16 weights. `fp8stack.planning` says how the bytes are
estimated; nothing is allocated.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import Any

import torch

from fp8stack import conflicts, planning
from fp8stack.capability import FP8_CAPABILITY
from fp8stack.errors import ConfigError
from fp8stack.levels import LEVELS, OPTIONS
from fp8stack.planning import BASELINES, LLAMA, HuggingFaceModel, Precision, Setup, Shape
from fp8stack.planning.peak_memory import Model

from .output import Lines, show, size, table
from .parsers import GPUS, SIZES, SWITCHES
from .recipe import recipe_of


def run(options: argparse.Namespace) -> int:
    if options.zero:
        options.sharding = f"zero{options.zero}"
    notes: list[str] = []
    model = _model(options, notes)
    gib = GPUS[options.gpu][0] if options.gpu else options.memory
    memory = None if gib is None else round(gib * 2**30)
    precisions = [*BASELINES.values(), *_levels(options, notes)]
    switches = {name: getattr(options, name) for name in SWITCHES}
    seq = min(model.positions or 2048, 2048) if options.seq is None else options.seq
    setup = Setup(options.batch, seq, options.ranks, options.sharding, **switches)
    if setup.ranks == 1 and setup.sharding != "none":
        raise ConfigError("--zero, --fsdp and --ddp are for several GPUs; give --ranks above 1.")
    columns = [_column(model, precision, setup, memory) for precision in precisions]
    if setup.compile and setup.ranks > 1:
        notes.append("--compile was measured on one GPU; with more, gradients and codes may add")
    if isinstance(model, Shape):
        if model.kv_heads != model.heads:
            notes.append("fp32 stores scores: SDPA has no float32 kernel for heads that share keys")
        told: dict[str, Any] = {"shape": asdict(model)}
    else:
        if model.attention == "eager":
            notes.append("its attention is written out in torch, which stores scores")
        told = {"active": model.active, "model": model.name}
    data = {"parameters": model.parameters, **told, "setup": asdict(setup), "memory": memory}
    show(options, data | {"precisions": columns, "notes": notes}, draw)
    return 0


def _column(model: Model, precision: Precision, setup: Setup, memory: int | None) -> dict[str, Any]:
    """Return the estimate at one precision, and what fits."""
    e = planning.estimate(model, precision, setup)
    column = {
        "name": precision.name, "brief": precision.brief, "parameters": e.parameters, "bytes": e.parts,
        "moments": e.moments, "moment": e.moment, "peak": e.peak, "overhead": e.overhead, "total": e.total,
    }  # fmt: skip
    if memory:
        column["fits"] = e.total <= memory
        column["largest_batch"] = planning.largest_batch(model, precision, setup, memory)
    return column


def draw(data: dict[str, Any]) -> Lines:
    """Show a line for each kind of bytes and a column for each precision."""
    setup, columns = data["setup"], data["precisions"]
    sizes = (
        "{layers} layers of {hidden:,}, {heads} heads ({kv_heads} of keys and values), "
        "feed-forward {ffn:,}, vocabulary {vocab:,}"
    )
    if "shape" in data:
        yield f"{data['parameters']:,} parameters: {sizes.format(**data['shape'])}"
    else:
        active = f"{data['active']:,} of them active for a token"
        yield f"{data['parameters']:,} parameters, {active}: {data['model']}"
    sharding = "" if setup["sharding"] == "none" else f" ({setup['sharding']})"
    more = [f"{setup['ranks']} GPUs{sharding}"] if setup["ranks"] > 1 else []
    more += [name for name in SWITCHES if setup[name]]
    given = ", ".join([f"{setup['batch']} × {setup['seq']} tokens", *more])
    yield f"Each GPU: {given}."
    unit, power = ("GiB", 30) if max(c["peak"] for c in columns) >= 2**30 else ("MiB", 20)

    def amounts(values: list[int]) -> list[str]:
        return [f"{nbytes / 2**power:,.2f}" if nbytes else "-" for nbytes in values]

    rows = {kind: amounts([c["bytes"][kind] for c in columns]) for kind in columns[0]["bytes"]}
    rows = {kind: cells for kind, cells in rows.items() if set(cells) != {"-"}}
    rows["peak at once"] = amounts([c["peak"] for c in columns])
    rows["at"] = [c["moment"] for c in columns]
    rows["context and slack"] = amounts([c["overhead"] for c in columns])
    rows["total"] = amounts([c["total"] for c in columns])
    if data["memory"]:
        rows["fits"] = ["yes" if c["fits"] else "no" for c in columns]
        rows["largest micro-batch"] = [str(c["largest_batch"]) for c in columns]
    names = [c["name"] for c in columns]
    lines = [(label, *cells) for label, cells in rows.items()]
    yield table((unit, *names), lines, right=" ".join(names))
    for column in columns:
        yield f"{column['name']}: {column['brief']}"
    yield "Kinds are each at their largest; the peak is what is held at once."
    if data["memory"]:
        yield f'"fits" is for a GPU with {size(data["memory"])}.'
    for note in data["notes"]:
        yield f"note: {note}"


# --- levels and GPUs


def _levels(options: argparse.Namespace, notes: list[str]) -> list[Precision]:
    """Return the levels to show: the one asked for, else all, or O2 where fields of a recipe are given."""
    given = any(getattr(options, name) is not None for name in (*OPTIONS, "preset"))
    names = [options.opt_level] if options.opt_level else ["O2"] if given else list(LEVELS)
    recipes = [recipe_of(options, name) for name in names]
    places = [conflicts.FSDP2] if options.sharding == "fsdp" else []
    places += [conflicts.DEEPSPEED, conflicts.ZERO] if options.zero else []
    places += [conflicts.SEVERAL_PROCESSES] if options.ranks > 1 else []
    places += [conflicts.ACCUMULATION] if options.accumulate else []
    for recipe in recipes:
        conflicts.refuse_conflicts(recipe, *places)
    if recipes[0].frozen == "fp8":
        raise ConfigError("--frozen fp8: an estimate trains all of a model. Use fp8stack plan.")
    if options.gpu and divmod(GPUS[options.gpu][1], 10) < FP8_CAPABILITY:
        lacking = f"{options.gpu} has no FP8 products (compute capability 8.9 and up has)"
        if recipes[0].compute in ("native", "te"):
            raise ConfigError(f"--compute {recipes[0].compute}: {lacking}. Leave it out.")
        notes.append(f"{lacking}: levels multiply in bf16 there")
        recipes = [replace(recipe, compute="bf16") for recipe in recipes]
    return [planning.at_level(recipe, getattr(torch, options.weights)) for recipe in recipes]


# --- the model


def _model(options: argparse.Namespace, notes: list[str]) -> Model:
    """Return the model that the options describe; note what was made up."""
    sizes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    if options.hf_config is not None:
        if sizes:
            raise ConfigError(f"--hf-config has the sizes; change {sorted(sizes)} in the file.")
        return HuggingFaceModel(options.hf_config)
    if options.parameters:
        if own := sizes.keys() - {"vocab"}:
            raise ConfigError(f"--parameters makes the sizes; give --sizes with {sorted(own)}.")
        notes.append("the shape is a Llama's of about that size; give --sizes for another")
        return replace(LLAMA, **sizes).resized(options.parameters)
    if missing := [f"--{name}" for name in ("layers", "hidden") if name not in sizes]:
        raise ConfigError(f"sizes need --layers and --hidden; missing: {', '.join(missing)}.")
    heads = sizes.get("heads") or max(1, sizes["hidden"] // LLAMA.head_dim)
    ffn = sizes["hidden"] * LLAMA.ffn // LLAMA.hidden
    made_up = {"heads": heads, "kv_heads": heads, "ffn": ffn, "vocab": LLAMA.vocab}
    return Shape(**{**made_up, **sizes})
