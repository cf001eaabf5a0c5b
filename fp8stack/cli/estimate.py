"""`fp8stack estimate`: how much memory training takes on each GPU, and what fits.

    fp8stack estimate --parameters 7e9 --seq 4096 --gpu H100
    fp8stack estimate --hf-config config.json --opt-level O2 --states 4bit --ranks 8 --zero 2 --batch 4 --memory 80

The model (`estimated_model.py`) is a number of parameters (a Llama-style shape is made of it, and said), a Hugging Face
configuration, weights that lie beside one, or a function of a Python file, which is called on the meta device. Levels
stand beside AdamW in float32, AdamW on float32 weights under bf16 autocast, and bitsandbytes' 8-bit AdamW on bfloat16
weights. `fp8stack.planning` says how it is estimated; nothing is allocated.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fp8stack.capability import FP8_CAPABILITY
from fp8stack.conflicts import (
    ACCUMULATION,
    DEEPSPEED,
    FSDP2,
    SEVERAL_PROCESSES,
    ZERO,
    refuse_conflicts,
)
from fp8stack.errors import ConfigError, did_you_mean
from fp8stack.levels import LEVELS, Recipe
from fp8stack.planning import (
    BASELINES,
    Make,
    Precision,
    Setup,
    Shape,
    at_level,
    estimate,
    largest_batch,
    largest_model,
)

from .estimated_model import SIZES, model_of
from .output import add_command, number_of, show, size, table
from .recipe import FIELDS, add_recipe, recipe_of

if TYPE_CHECKING:
    from rich.console import Console

    from .output import Commands

GPUS = {
    "T4": (14, 75), "V100-16GB": (15, 70), "V100": (31, 70), "RTX 3090": (23, 86), "RTX 4090": (23, 89),
    "RTX 5090": (31, 120), "A10": (21, 86), "L4": (22, 89), "A40": (44, 86), "L40": (44, 89), "L40S": (44, 89),
    "RTX A6000": (47, 86), "RTX 6000 Ada": (47, 89), "A100-40GB": (39, 80), "A100": (79, 80), "H100": (79, 90),
    "H100-NVL": (93, 90), "GH200": (94, 90), "GH200-144GB": (142, 90), "H200": (139, 90), "B200": (178, 100),
    "B300": (267, 103),
}  # fmt: skip
"""GiB that a program can have, rounded down, and the compute capability, times ten."""
_LEFT_OUT = r"nvidia|geforce|tesla|rtx|generation|pcie|sxm\d?|hbm\de?|(?<=\d)gb?\b"
_MOST = 1e15  # parameters, far above all that are trained
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_parser(commands: Commands) -> None:
    brief = "the memory that training takes on each GPU, by kind, and what fits"
    parser = add_command(commands, "estimate", brief)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--parameters", type=partial(_number, suffixes=True), metavar="N", help="such as 7e9 or 7B"
    )
    source.add_argument("--hf-config", metavar="config.json", help="of Hugging Face, or its folder")
    source.add_argument("--model", metavar="FILE:function", help="returns a model; or its weights")
    source.add_argument("--sizes", action="store_true", help="all of it in the options below")
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N")
    add = parser.add_argument
    add("--batch", type=int, default=1, metavar="N", help="sequences of a micro-batch")
    add("--seq", type=int, metavar="N", help="tokens of a sequence; 2048, or learned positions")
    add("--ranks", type=int, default=1, metavar="N", help="GPUs that share a model's training")
    sharing = parser.add_mutually_exclusive_group()
    sharing.add_argument("--zero", type=int, choices=(1, 2, 3), help="DeepSpeed's stage")
    sharing.add_argument("--fsdp", action="store_true", help="FSDP2")
    sharing.add_argument("--ddp", action="store_true", help="torch's DDP at all levels")
    add("--checkpointing", action="store_true", help="keep only the inputs of blocks")
    add("--accumulate", action="store_true", help="several micro-batches a step")
    add("--fuse", action="store_true", help="SwiGLU blocks are fused (fp8stack.nn.fuse)")
    add("--compile", action="store_true", help="torch.compile has the whole model")
    add("--weights", choices=_DTYPES, help="what a level starts from; float32, or the model's")
    add("--gpu", metavar="NAME", help=", ".join(GPUS))
    add("--memory", type=_number, metavar="GiB", help="of one GPU, instead of its name")
    add_recipe(parser)
    parser.set_defaults(opt_level=None)


def run(options: argparse.Namespace) -> int:
    notes: list[str] = []
    model, shape, weights = model_of(options, notes)
    memory = _memory(options)
    precisions = [
        *BASELINES.values(),
        *_levels(options, _DTYPES.get(options.weights, weights), notes),
    ]
    setup = Setup(
        options.batch,
        options.seq if options.seq is not None else (shape.positions if shape else 0) or 2048,
        options.ranks,
        _sharding(options),
        options.checkpointing,
        options.accumulate,
        options.fuse,
        options.compile,
    )
    if setup.fuse and not isinstance(model, Shape):
        raise ConfigError(
            "--fuse is for --parameters, --sizes and --hf-config, not for --model FILE:function."
        )
    if shape and 0 < shape.positions < setup.seq:
        raise ConfigError(
            f"--seq {setup.seq} is more than the {shape.positions} positions of the model."
        )
    columns = [_column(model, shape, p, setup, memory) for p in precisions]
    if setup.fuse:
        plain = [estimate(model, p, replace(setup, fuse=False), shape).parts for p in precisions]
        if plain == [column["bytes"] for column in columns]:
            notes.append("--fuse changes nothing: nn.fuse takes other blocks, or other FP8")
    if setup.compile and setup.ranks > 1:
        notes.append(
            "--compile was measured on one GPU; with more, gradients and FP8 codes of whole weights may add"
        )
    if shape and shape.kv_heads != shape.heads:
        notes.append("fp32 keeps scores: SDPA has no float32 kernel for heads that share keys")
    data = {
        "parameters": columns[0]["parameters"],
        "shape": shape and asdict(shape),
        "setup": asdict(setup),
        "memory": memory,
        "precisions": columns,
        "notes": notes,
    }
    show(options, data, draw)
    return 0


def draw(console: Console, data: dict[str, Any]) -> None:
    """Show a line for each kind of bytes and a column for each precision."""
    setup, shape, columns = data["setup"], data["shape"], data["precisions"]
    console.print(f"{data['parameters']:,} parameters" + (f": {_describe(shape)}" if shape else ""))
    sharding = "" if setup["sharding"] == "none" else f" ({setup['sharding']})"
    more = [f"{setup['ranks']} GPUs{sharding}"] if setup["ranks"] > 1 else []
    more += [name for name in ("checkpointing", "accumulate", "fuse", "compile") if setup[name]]
    console.print(
        f"Each GPU: {setup['batch']} × {setup['seq']} tokens{''.join(f', {m}' for m in more)}."
    )
    rows: list[tuple[str, ...]] = []
    unit, power = ("GiB", 30) if max(c["peak"] for c in columns) >= 2**30 else ("MiB", 20)

    def amount(nbytes: int) -> str:
        return f"{nbytes / 2**power:,.2f}" if nbytes else "-"

    def line(label: str, cell: Callable[[dict[str, Any]], str]) -> None:
        rows.append((label, *(cell(column) for column in columns)))

    for kind in columns[0]["bytes"]:
        if any(c["bytes"][kind] for c in columns):
            line(kind, lambda c, kind=kind: amount(c["bytes"][kind]))  # type: ignore[misc]
    line("peak at once", lambda c: amount(c["peak"]))
    line("at", lambda c: c["moment"])
    line("context and slack", lambda c: amount(c["overhead"]))
    line("total", lambda c: amount(c["total"]))
    if data["memory"]:
        line("fits", lambda c: "yes" if c["fits"] else "no")
        if shape:
            line("largest micro-batch", lambda c: str(c["largest_batch"]))
        if "largest_model" in columns[0]:
            line("largest model", lambda c: _billions(c["largest_model"]))
    names = [c["name"] for c in columns]
    console.print(table((unit, *names), rows, right=" ".join(names)))
    for column in columns:
        console.print(f"{column['name']}: {column['brief']}")
    console.print("Kinds are each at their largest; the peak is what is held at once.")
    if data["memory"]:
        console.print(f"What fits is for {size(data['memory'])}; models keep their proportions.")
    for note in data["notes"]:
        console.print(f"note: {note}")


def _column(
    model: Shape | Make, shape: Shape | None, precision: Precision, setup: Setup, memory: int | None
) -> dict[str, Any]:
    """Return the estimate at one precision, and what fits."""
    e = estimate(model, precision, setup, shape)
    column: dict[str, Any] = {
        "name": precision.name,
        "brief": precision.brief,
        "parameters": e.parameters,
        "bytes": e.parts,
        "moments": e.moments,
        "moment": e.moment,
        "peak": e.peak,
        "overhead": e.overhead,
        "total": e.total,
    }
    if memory:
        column["fits"] = e.total <= memory
        if shape:
            column["largest_batch"] = largest_batch(model, precision, setup, memory, shape)
        if isinstance(model, Shape):
            best = largest_model(model, precision, setup, memory)
            column["largest_model"] = best and {"parameters": best.parameters, **asdict(best)}
    return column


# --- options


def _levels(options: argparse.Namespace, weights: torch.dtype, notes: list[str]) -> list[Precision]:
    """Return the levels to show: the one asked for, else all, or O2 where fields of a recipe are given."""
    given = [name for name in (*FIELDS, "preset") if getattr(options, name) is not None]
    if options.opt_level in BASELINES:
        if given:
            raise ConfigError(
                f"--{given[0].replace('_', '-')} is of levels, and --opt-level {options.opt_level} is none. "
                f"Use one of {', '.join(LEVELS)}."
            )
        return []
    names = [options.opt_level] if options.opt_level else ["O2"] if given else list(LEVELS)
    recipes = [recipe_of(argparse.Namespace(**{**vars(options), "opt_level": n})) for n in names]
    for recipe in recipes:
        _check_shared(recipe, options)
    name = _gpu(options.gpu) if options.gpu else None
    if name and divmod(GPUS[name][1], 10) < FP8_CAPABILITY:
        lacking = f"{name} has no FP8 products (compute capability 8.9 and up has)"
        if recipes[0].compute in ("native", "te"):
            raise ConfigError(
                f"--compute {recipes[0].compute}: {lacking}. Leave it out for bf16 ones."
            )
        notes.append(f"{lacking}: levels multiply in bf16 there")
        recipes = [replace(recipe, compute="bf16") for recipe in recipes]
    return [at_level(recipe, weights) for recipe in recipes]


def _check_shared(recipe: Recipe, options: argparse.Namespace) -> None:
    """Raise ConfigError for what a level cannot do on several ranks."""
    places = {
        FSDP2: options.fsdp,
        DEEPSPEED: options.zero,
        ZERO: options.zero,
        SEVERAL_PROCESSES: options.ranks > 1,
        ACCUMULATION: options.accumulate,
    }
    refuse_conflicts(recipe, *(place for place, given in places.items() if given))


def _sharding(options: argparse.Namespace) -> str:
    if options.ranks == 1 and (options.zero or options.fsdp or options.ddp):
        raise ConfigError("--zero, --fsdp and --ddp are for several GPUs; give --ranks above 1.")
    if options.zero:
        return f"zero{options.zero}"
    return "fsdp" if options.fsdp else "ddp" if options.ddp else "none"


def _memory(options: argparse.Namespace) -> int | None:
    """Return the bytes of a GPU, if they were given."""
    if options.memory and options.gpu:
        raise ConfigError("--gpu and --memory say the same; give one of them.")
    if options.gpu:
        return GPUS[_gpu(options.gpu)][0] * 2**30
    return round(options.memory * 2**30) if options.memory else None


def _gpu(given: str) -> str:
    """Return the known name with the letters and digits of the one given, which may say the gigabytes too.

    Raises:
        ConfigError: where there is none, with the nearest.
    """
    asked, within = _letters_and_digits(given), []
    for name, (gib, _) in GPUS.items():
        own = _letters_and_digits(name)
        size = int(asked[-1]) if own == asked[:-1] and asked[-1].isdigit() else 0  # "H100 80GB"
        if own == asked or 0 <= size - gib <= gib / 6:
            return name
        if set(own) <= set(asked):
            within.append(name)
    nearest = max(within, key=len, default=given)
    raise ConfigError(
        f"--gpu {given!r} is not known.{did_you_mean(nearest, GPUS)} Known: {', '.join(GPUS)}; or give --memory in GiB."
    )


def _letters_and_digits(name: str) -> list[str]:
    """Return a name's parts, without the words that people leave out."""
    return re.findall(r"[a-z]+|[0-9]+", re.sub(_LEFT_OUT, " ", name.lower()))


def _number(text: str, suffixes: bool = False) -> float:
    value = number_of(text, suffixes)
    if not 0 < value <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to {_MOST:g}")
    return value


# --- texts


def _describe(shape: dict[str, Any]) -> str:
    heads = f"{shape['heads']} heads ({shape['kv_heads']} of keys and values)"
    return (
        f"{shape['layers']} layers of {shape['hidden']:,}, {heads}, feed-forward {shape['ffn']:,}, "
        f"vocabulary {shape['vocab']:,}"
    )


def _billions(model: dict[str, Any] | None) -> str:
    return f"{model['parameters'] / 1e9:.2f}e9" if model else "none"
