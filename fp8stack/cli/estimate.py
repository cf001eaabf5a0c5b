"""`fp8stack estimate`: how much memory training takes on each GPU, and what fits.

    fp8stack estimate --parameters 7e9 --seq 4096 --gpu H100
    fp8stack estimate --hf-config config.json --opt-level O2 --states 4bit --ranks 8 --zero 2 --batch 4 --memory 80

The model is a number of parameters (of which a Llama-style shape is made, and a note says so), sizes, a Hugging Face
configuration, or a function of a Python file, which is called on the meta device. Levels stand beside AdamW in float32,
AdamW on float32 weights under bf16 autocast, and bitsandbytes' 8-bit AdamW on bfloat16 weights. `fp8stack.planning`
says how the bytes are estimated; nothing is allocated.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fp8stack import conflicts, planning
from fp8stack.capability import FP8_CAPABILITY
from fp8stack.conversion import check_model
from fp8stack.errors import ConfigError, did_you_mean
from fp8stack.levels import LEVELS, recipe_for
from fp8stack.planning import BASELINES, FAMILIES, LLAMA, Make, Precision, Setup, Shape

from .load_function import build
from .output import Commands, Console, add_command, number_of, show, size, table
from .recipe import FIELDS, add_recipe, recipe_of

GPUS = {
    "T4": (14, 75), "V100-16GB": (15, 70), "V100": (31, 70), "RTX 3090": (23, 86), "RTX 4090": (23, 89),
    "RTX 5090": (31, 120), "A10": (21, 86), "L4": (22, 89), "A40": (44, 86), "L40": (44, 89), "L40S": (44, 89),
    "RTX A6000": (47, 86), "RTX 6000 Ada": (47, 89), "A100-40GB": (39, 80), "A100": (79, 80), "H100": (79, 90),
    "H100-NVL": (93, 90), "GH200": (94, 90), "GH200-144GB": (142, 90), "H200": (139, 90), "B200": (178, 100),
    "B300": (267, 103),
}  # fmt: skip
"""GiB that a program can have, rounded down, and the compute capability, times ten."""
_LEFT_OUT = r"nvidia|geforce|tesla|rtx|generation|pcie|sxm\d?|hbm\de?|(?<=\d)gb?\b"  # of names
_MOST = 1e15  # parameters, far above all that are trained
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SWITCHES = {
    "checkpointing": "keep only the inputs of blocks",
    "accumulate": "several micro-batches a step",
    "fuse": "SwiGLU blocks are fused (fp8stack.nn.fuse)",
    "compile": "torch.compile has the whole model",
}
_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")


def add_parser(commands: Commands) -> None:
    brief = "the memory that training takes on each GPU, by kind, and what fits"
    parser = add_command(commands, "estimate", brief)
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    parameters = partial(_number, suffixes=True)
    add("--parameters", type=parameters, metavar="N", help="such as 7e9 or 7B")
    add("--hf-config", metavar="config.json", help="of Hugging Face, or its folder")
    add("--model", metavar="FILE:function", help="returns a model")
    add("--sizes", action="store_true", help="all of it in the options below")
    add = parser.add_argument
    for name in _SIZES:
        add(f"--{name.replace('_', '-')}", type=int, metavar="N")
    add("--batch", type=int, default=1, metavar="N", help="sequences of a micro-batch")
    add("--seq", type=int, metavar="N", help="tokens of a sequence; 2048, or learned positions")
    add("--ranks", type=int, default=1, metavar="N", help="GPUs that share a model's training")
    sharing = parser.add_mutually_exclusive_group()
    sharing.add_argument("--zero", type=int, choices=(1, 2, 3), help="DeepSpeed's stage")
    sharing.add_argument("--fsdp", action="store_true", help="FSDP2")
    sharing.add_argument("--ddp", action="store_true", help="torch's DDP at all levels")
    for name, brief in _SWITCHES.items():
        add(f"--{name}", action="store_true", help=brief)
    add("--weights", choices=_DTYPES, help="what a level starts from; float32, or the model's")
    add("--gpu", metavar="NAME", help=", ".join(GPUS))
    add("--memory", type=_number, metavar="GiB", help="of one GPU, instead of its name")
    add_recipe(parser)
    parser.set_defaults(opt_level=None)


def run(options: argparse.Namespace) -> int:
    notes: list[str] = []
    model, shape, weights = _model(options, notes)
    if options.memory and options.gpu:
        raise ConfigError("--gpu and --memory say the same; give one of them.")
    gpu = _gpu(options.gpu) if options.gpu else None
    memory = GPUS[gpu][0] * 2**30 if gpu else round((options.memory or 0) * 2**30) or None
    weights = _DTYPES.get(options.weights, weights)
    precisions = [*BASELINES.values(), *_levels(options, gpu, weights, notes)]
    seq = options.seq if options.seq is not None else (shape.positions if shape else 0) or 2048
    sharding = f"zero{options.zero}" if options.zero else "fsdp" if options.fsdp else "none"
    sharding = "ddp" if options.ddp else sharding
    switches = {name: getattr(options, name) for name in _SWITCHES}
    setup = Setup(options.batch, seq, options.ranks, sharding, **switches)
    if setup.ranks == 1 and sharding != "none":
        raise ConfigError("--zero, --fsdp and --ddp are for several GPUs; give --ranks above 1.")
    if setup.fuse and not isinstance(model, Shape):
        raise ConfigError(
            "--fuse is for --parameters, --sizes and --hf-config, not for --model FILE:function."
        )
    if shape and 0 < shape.positions < seq:
        raise ConfigError(f"--seq {seq} is more than the {shape.positions} positions of the model.")
    columns = [_column(model, shape, p, setup, memory) for p in precisions]
    if setup.fuse:
        plain = [
            planning.estimate(model, p, replace(setup, fuse=False), shape).parts for p in precisions
        ]
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


def _column(
    model: Shape | Make, shape: Shape | None, precision: Precision, setup: Setup, memory: int | None
) -> dict[str, Any]:
    """Return the estimate at one precision, and what fits."""
    e = planning.estimate(model, precision, setup, shape)
    column = {"name": precision.name, "brief": precision.brief, "parameters": e.parameters}
    column |= {"bytes": e.parts, "moments": e.moments, "moment": e.moment}
    column |= {"peak": e.peak, "overhead": e.overhead, "total": e.total}
    if memory:
        column["fits"] = e.total <= memory
        if shape:
            column["largest_batch"] = planning.largest_batch(model, precision, setup, memory, shape)
        if isinstance(model, Shape):
            best = planning.largest_model(model, precision, setup, memory)
            column["largest_model"] = best and {"parameters": best.parameters, **asdict(best)}
    return column


def draw(console: Console, data: dict[str, Any]) -> None:
    """Show a line for each kind of bytes and a column for each precision."""
    setup, shape, columns = data["setup"], data["shape"], data["precisions"]
    text = (
        ": {layers} layers of {hidden:,}, {heads} heads ({kv_heads} of keys and values), feed-forward {ffn:,}, "
        "vocabulary {vocab:,}"
    )
    console.print(f"{data['parameters']:,} parameters" + (text.format(**shape) if shape else ""))
    sharding = "" if setup["sharding"] == "none" else f" ({setup['sharding']})"
    more = [f"{setup['ranks']} GPUs{sharding}"] if setup["ranks"] > 1 else []
    more += [name for name in _SWITCHES if setup[name]]
    given = ", ".join([f"{setup['batch']} × {setup['seq']} tokens", *more])
    console.print(f"Each GPU: {given}.")
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
        if shape:
            rows["largest micro-batch"] = [str(c["largest_batch"]) for c in columns]
        if "largest_model" in columns[0]:
            models = [c["largest_model"] for c in columns]
            rows["largest model"] = [
                (m and f"{m['parameters'] / 1e9:.2f}e9") or "none" for m in models
            ]
    names = [c["name"] for c in columns]
    lines = [(label, *cells) for label, cells in rows.items()]
    console.print(table((unit, *names), lines, right=" ".join(names)))
    for column in columns:
        console.print(f"{column['name']}: {column['brief']}")
    console.print("Kinds are each at their largest; the peak is what is held at once.")
    if data["memory"]:
        console.print(f"What fits is for {size(data['memory'])}; models keep their proportions.")
    for note in data["notes"]:
        console.print(f"note: {note}")


# --- levels and GPUs


def _levels(
    options: argparse.Namespace, gpu: str | None, weights: torch.dtype, notes: list[str]
) -> list[Precision]:
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
    places = {
        conflicts.FSDP2: options.fsdp,
        conflicts.DEEPSPEED: options.zero,
        conflicts.ZERO: options.zero,
        conflicts.SEVERAL_PROCESSES: options.ranks > 1,
        conflicts.ACCUMULATION: options.accumulate,
    }
    for recipe in recipes:
        conflicts.refuse_conflicts(recipe, *(place for place, holds in places.items() if holds))
    if gpu and divmod(GPUS[gpu][1], 10) < FP8_CAPABILITY:
        lacking = f"{gpu} has no FP8 products (compute capability 8.9 and up has)"
        if recipes[0].compute in ("native", "te"):
            raise ConfigError(
                f"--compute {recipes[0].compute}: {lacking}. Leave it out for bf16 ones."
            )
        notes.append(f"{lacking}: levels multiply in bf16 there")
        recipes = [replace(recipe, compute="bf16") for recipe in recipes]
    return [planning.at_level(recipe, weights) for recipe in recipes]


def _gpu(given: str) -> str:
    """Return the known name with the letters and digits of the one given, which may say the gigabytes too.

    Raises:
        ConfigError: where there is none, with the nearest.
    """

    def parts(name: str) -> list[str]:
        return re.findall(r"[a-z]+|[0-9]+", re.sub(_LEFT_OUT, " ", name.lower()))

    asked = parts(given)
    for name, (gib, _) in GPUS.items():
        same = parts(name) == asked[:-1] and asked[-1].isdigit()
        gb = int(asked[-1]) if same else 0  # as in "H100 80GB"
        if parts(name) == asked or 0 <= gb - gib <= gib / 6:
            return name
    within = [name for name in GPUS if set(parts(name)) <= set(asked)]
    nearest = max(within, key=lambda name: len(parts(name)), default=given)
    raise ConfigError(
        f"--gpu {given!r} is not known.{did_you_mean(nearest, GPUS)} Known: {', '.join(GPUS)}; or give --memory in GiB."
    )


def _number(text: str, suffixes: bool = False) -> float:
    value = number_of(text, suffixes)
    if not 0 < value <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to {_MOST:g}")
    return value


# --- the model


def _model(
    options: argparse.Namespace, notes: list[str]
) -> tuple[Shape | Make, Shape | None, torch.dtype]:
    """Return what to count, the shape that activations are computed from, and the dtype of the weights."""
    sizes = {name: getattr(options, name) for name in _SIZES if getattr(options, name) is not None}
    if options.model is not None:
        return _users_model(options.model, sizes, notes)
    if options.hf_config is not None:
        anew: dict[str, Any] = {"head_dim": 0} if sizes.keys() & {"hidden", "heads"} else {}
        shape = replace(planning.read_config(options.hf_config), **{**sizes, **anew})
        if shape.positions:
            notes.append(
                "layers are nn.Linear here; transformers' GPT-2 has Conv1D, which no level converts: see --model"
            )
    elif options.sizes or set(sizes) - {"vocab"}:
        shape = _shape_of(sizes)
    else:
        shape = replace(LLAMA, **sizes).resized(options.parameters)
        notes.append(
            "the shape is a Llama's of about that many parameters; give --layers, ... for another"
        )
    if options.parameters:
        _compare_counts(shape, options.parameters, notes)
    return shape, shape, torch.float32


def _shape_of(sizes: dict[str, int]) -> Shape:
    """Return a Llama of the sizes given, the others in a Llama's proportions."""
    missing = [f"--{name}" for name in ("layers", "hidden") if name not in sizes]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"sizes need --layers and --hidden at least; {' and '.join(missing)} {verb} missing."
        )
    hidden = sizes["hidden"]
    if "heads" not in sizes and hidden > LLAMA.head_dim and hidden % LLAMA.head_dim:
        raise ConfigError(
            f"--hidden {hidden} is no multiple of {LLAMA.head_dim}, the size of a Llama's heads. Give --heads."
        )
    heads = sizes.get("heads") or max(1, hidden // LLAMA.head_dim)
    rest = {"kv_heads": heads, "vocab": LLAMA.vocab, "ffn": hidden * LLAMA.ffn // LLAMA.hidden}
    given: dict[str, Any] = {"heads": heads, **rest, **sizes}
    return Shape(**given)


def _compare_counts(shape: Shape, wanted: float, notes: list[str]) -> None:
    if abs(shape.parameters / wanted - 1) > 0.05:
        notes.append(f"the sizes make {shape.parameters:,} parameters, not {wanted:,.0f}")


def _users_model(
    target: str, sizes: dict[str, int], notes: list[str]
) -> tuple[Make, Shape | None, torch.dtype]:
    """Return what copies the model of FILE:function in a dtype, a shape if one is known, and the dtype of weights."""
    model, optimizer = build(target, meta=True)
    if optimizer is not None:
        notes.append("the function's optimizer is not looked at; all columns are AdamW's")
    check_model(model, recipe_for("O0"), planned=True)
    elements: Counter[torch.dtype] = Counter()
    for p in model.parameters():
        elements[p.dtype] += p.numel()
    (weights, most), *_ = elements.most_common()
    if 100 * (elements.total() - most) > most:
        kinds = " and ".join(str(dtype).removeprefix("torch.") for dtype in elements)
        notes.append(
            f"weights are {kinds}; all are counted as most of them are, or as --weights says"
        )

    def make(dtype: torch.dtype) -> nn.Module:
        return copy.deepcopy(model).to(dtype)

    config: Any = getattr(model, "config", None)
    told = config.to_dict() if hasattr(config, "to_dict") else {}
    shape = _shape_of(sizes) if sizes else None
    if not sizes and told.get("model_type") in FAMILIES:
        shape = planning.shape_of_config(told, f"the model of {target}")
    if shape is None:
        notes.append(
            "activations are not estimated: the model has no Hugging Face config that is known here "
            f"({', '.join(FAMILIES)}); give --layers, --hidden, --heads, --kv-heads, --ffn and --vocab"
        )
        return make, None, weights
    head = getattr(model, "get_output_embeddings", None)  # of transformers
    if callable(head) and head() is None:
        notes.append("the model has no language-model head; activations are counted as with one")
    _compare_counts(shape, elements.total(), notes)
    return make, shape, weights
