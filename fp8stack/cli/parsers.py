"""The options of the program's commands, by which it answers --help and what is wrong before torch is imported.

A command `plan` is `add_plan` here, and `run` of `cli/plan.py`. This module and what it imports load no torch.
"""

from __future__ import annotations

import argparse

from fp8stack.levels import LEVELS

from .output import Commands, Parser, add_command
from .recipe import add_recipe

GPUS = {
    "T4": (14, 75), "V100-16GB": (15, 70), "V100": (31, 70), "RTX 3090": (23, 86), "RTX 4090": (23, 89),
    "RTX 5090": (31, 120), "A10": (21, 86), "L4": (22, 89), "A40": (44, 86), "L40": (44, 89), "L40S": (44, 89),
    "RTX A6000": (47, 86), "RTX 6000 ADA": (47, 89), "A100-40GB": (39, 80), "A100": (79, 80), "H100": (79, 90),
    "H100-NVL": (93, 90), "GH200": (94, 90), "GH200-144GB": (142, 90), "H200": (139, 90), "B200": (178, 100),
    "B300": (267, 103),
}  # fmt: skip
"""GiB that a program can have, rounded down, and the compute capability, times ten."""
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
SWITCHES = {
    "checkpointing": "keep only the inputs of blocks",
    "accumulate": "several micro-batches a step",
    "compile": "torch.compile has the whole model",
}
_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9}


def add_doctor(commands: Commands) -> None:
    brief = "what this machine can run, a self-test, and known trouble; or that of a DeepSpeed configuration"
    add = add_command(commands, "doctor", brief).add_argument
    add("--no-self-test", action="store_true", help="run nothing on the device but probes")
    add("--deepspeed", metavar="ds_config.json", help="check this configuration, not the machine")
    add("--model", metavar="FILE:function", help="with it: returns a model, or (model, optimizer)")
    add("--opt-level", metavar="O2", help="with it, where it names none; O2 by default")


def add_demo(commands: Commands) -> None:
    brief = "train a small GPT on Python's own source, in float32 and at O2, and write a report"
    add = (parser := add_command(commands, "demo", brief)).add_argument
    add("--open", action="store_true", help="show the report in a browser")
    add("--levels", nargs="+", choices=("baseline", *LEVELS), default=["baseline", "O2"])
    add("--size", choices=("demo", "gpu"), default="demo", help="of model and run")
    add("--steps", type=int, metavar="N", help="at least 2; losses are compared from 100 on")
    add("--batch", type=int, metavar="N", help="windows of a step")
    add("--seq-len", type=int, metavar="N", help="bytes of a window")
    add("--lr", type=float, metavar="RATE", help="highest learning rate")
    add("--seed", type=int, metavar="N", help="of weights, batches and the sample")
    add("--data", metavar="PATH", help="a text file or folder to train on instead")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if any")
    add("--out", default="runs/demo", metavar="FOLDER", help="for the report: %(default)s")
    add_recipe(parser, levels=False)


def add_plan(commands: Commands) -> None:
    brief = "which layers of a model convert, which do not and why, and the bytes before and after"
    batch = "a tensor, tuple or dict: activations are measured"
    add_recipe(_add_for_model(commands, "plan", brief, batch, False))


def add_tune(commands: Commands) -> None:
    brief = "what FP8 costs and saves layer by layer on this GPU, and the options for a budget"
    parser = _add_for_model(commands, "tune", brief, "a tensor, tuple or dict", True)
    brief = "the most that FP8 may change: nats a token of KL, or units of the loss (0.015)"
    parser.add_argument("--budget", type=float, default=0.015, metavar="NATS", help=brief)
    add_recipe(parser, levels=False)


def _add_for_model(commands: Commands, name: str, brief: str, batch: str, needed: bool) -> Parser:
    """Return the parser of a command that takes a model, and a batch that it is called with."""
    add, form = (parser := add_command(commands, name, brief)).add_argument, "FILE:function"
    add("target", metavar=form, help="returns a model, or (model, optimizer)")
    add(
        "--batch",
        metavar=form,
        required=needed,
        help=f"returns what the model is called with, {batch}",
    )
    return parser


def add_estimate(commands: Commands) -> None:
    brief = "the memory that training takes on each GPU, by kind, and what fits"
    parser = add_command(commands, "estimate", brief)
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--parameters", type=_number, metavar="N", help="such as 7e9 or 7B")
    add(
        "--hf-config",
        metavar="config.json",
        help="of Hugging Face, or its folder; needs transformers",
    )
    add("--sizes", action="store_true", help="all of it in the options below")
    add = parser.add_argument
    for name in SIZES:
        add(f"--{name.replace('_', '-')}", type=int, metavar="N")
    add("--batch", type=int, default=1, metavar="N", help="sequences or images of a micro-batch")
    add("--seq", type=int, metavar="N", help="tokens of a sequence; 2048, or all positions")
    add("--ranks", type=int, default=1, metavar="N", help="GPUs that share a model's training")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--zero", type=int, choices=(1, 2, 3), help="DeepSpeed's stage")
    for name, brief in {"fsdp": "FSDP2", "ddp": "torch's DDP at all levels"}.items():
        add(f"--{name}", dest="sharding", action="store_const", const=name, help=brief)
    add = parser.add_argument
    for name, brief in SWITCHES.items():
        add(f"--{name}", action="store_true", help=brief)
    add(
        "--weights",
        choices=("float32", "bfloat16"),
        default="float32",
        help="what a level starts from",
    )
    add = parser.add_mutually_exclusive_group().add_argument
    add("--gpu", type=str.upper, choices=GPUS, metavar="NAME", help=", ".join(GPUS))
    add("--memory", type=_number, metavar="GiB", help="of one GPU, instead of its name")
    add_recipe(parser)
    parser.set_defaults(opt_level=None, sharding="none")


def add_inspect(commands: Commands) -> None:
    parser = add_command(commands, "inspect", "what is in a checkpoint")
    parser.add_argument("checkpoint", metavar="CKPT", help="a .pt, or a folder of DCP")


def add_convert(commands: Commands) -> None:
    brief = "the weights of a checkpoint, with all their bits, as one file"
    parser = add_command(commands, "convert", brief)
    parser.add_argument("checkpoint", metavar="CKPT", help="a .pt, or a folder of DCP")
    parser.add_argument("--to", required=True, choices=("fp32", "bf16", "safetensors"))
    ends = "by default beside CKPT; .safetensors makes it that in the dtype of --to"
    parser.add_argument("--out", metavar="PATH", help=ends)


def _number(text: str) -> float:
    """Return a number above 0, which may end in K, M or B: "1.5B" is 1.5e9."""
    factor = _SUFFIXES.get(text[-1:].upper())
    try:
        value = factor * float(text[:-1]) if factor else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e15:  # far above all that is trained
        told = "is not a number above 0 and up to 1e+15, such as 7e9, 7B or 350M"
        raise argparse.ArgumentTypeError(f"{text!r} {told}")
    return value


_ADD = (add_doctor, add_demo, add_plan, add_tune, add_estimate, add_inspect, add_convert)
COMMANDS = {add.__name__.removeprefix("add_"): add for add in _ADD}
