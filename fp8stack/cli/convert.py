"""`fp8stack convert CKPT --to fp32|bf16|safetensors`: the weights of a checkpoint as one ordinary file.

Masters are put together first, so a weight that training kept in bfloat16 and 8 bits more has all of them. The file is
a state_dict for torch.load(weights_only=True), all its floating-point tensors in float32 or bfloat16; or safetensors,
in float32. A name that ends in .safetensors (--out) makes it safetensors too, so `--to bf16 --out model.safetensors`
is bfloat16 there. It is written beside its place and renamed: an interruption leaves what was there before.

Tied weights stay tied in a state_dict. safetensors holds one of them, and the other's name in its metadata, as
`safetensors.torch.load_model` and transformers expect.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8stack.checkpoint import replacing
from fp8stack.errors import CheckpointError, ConfigError, reason_of

from .output import add_command, counted, show, size
from .stored import place_of, read, safetensors

if TYPE_CHECKING:
    from rich.console import Console

    from .output import Commands


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands, "convert", "the weights of a checkpoint, with all their bits, as one file"
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a .pt, DCP folder or .safetensors")
    parser.add_argument("--to", required=True, choices=("fp32", "bf16", "safetensors"))
    parser.add_argument(
        "--out",
        metavar="PATH",
        help="by default beside CKPT, with --to in its name; .safetensors makes it that in the dtype of --to",
    )


def run(options: argparse.Namespace) -> int:
    source = Path(options.checkpoint)
    out = Path(options.out) if options.out else _beside(source, options.to)
    if out.exists() and (not out.is_file() or out.samefile(source)):
        what = "a folder or a device" if not out.is_file() else "the checkpoint itself"
        raise ConfigError(f"--out {out} is {what}. Name another file.")
    if not out.parent.is_dir():
        raise ConfigError(
            f"--out {out}: there is no folder {out.parent}. Make it, or name another."
        )
    safe = out.suffix == ".safetensors"  # by which it is told when it is read, too
    if options.to == "safetensors" and not safe:
        raise ConfigError(
            f"--to safetensors --out {out}: such a file's name ends in .safetensors. Name it "
            f"{out.with_suffix('.safetensors')}, or use --to fp32 or bf16 for a state_dict of torch.save."
        )
    if safe:
        safetensors()  # raises now, not after minutes of reading
    stored = read(source, data=True)
    masters = stored.masters()
    dtype = torch.bfloat16 if options.to == "bf16" else torch.float32
    weights = consolidate(stored.model, masters, dtype)
    try:
        nbytes = _write(out, weights, safe)
    except Exception as error:  # on a full disk safetensors raises one of its own
        raise CheckpointError(
            f"{out} cannot be written: {reason_of(error)} Nothing is left of it."
        ) from error
    data = {
        "source": str(source),
        "out": str(out),
        "format": "safetensors" if safe else "state_dict",
        "dtype": str(dtype).removeprefix("torch."),
        "tensors": len(weights),
        "masters": len(masters),
        "bytes": nbytes,
    }
    show(options, data, draw)
    return 0


def draw(console: Console, data: dict[str, Any]) -> None:
    """Say what was written."""
    console.print(
        f"{data['out']}: {counted(data['tensors'], 'tensor')} in {data['dtype']}, {size(data['bytes'])}; "
        f"{data['masters']} of them from masters",
        soft_wrap=True,
    )


def consolidate(
    model: dict[str, Tensor], masters: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return weights in `dtype`, from their masters where there are some; tied ones are one tensor."""
    whole = {place_of(model[name]): master for name, master in masters.items()}
    made: dict[Any, Tensor] = {}
    result = {}
    for name, value in model.items():
        place = place_of(value)
        if place not in made:
            best = whole.get(place, value)
            made[place] = best.to(dtype) if best.is_floating_point() else best
        result[name] = made[place]
    return result


def _write(out: Path, weights: dict[str, Tensor], safe: bool) -> int:
    with replacing(out) as temporary:
        if safe:
            first: dict[int, str] = {}
            ties = {name: first.setdefault(id(value), name) for name, value in weights.items()}
            kept = _apart({name: weights[name] for name in first.values()})
            told = {name: other for name, other in ties.items() if name != other}
            safetensors().save_file(kept, temporary, metadata={"format": "pt", **told})
        else:
            with open(temporary, "wb") as file:
                torch.save(weights, file)
    return out.stat().st_size


def _apart(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as safetensors take them: dense, contiguous, and no two in one storage."""
    made, storages = {}, set()
    for name, value in weights.items():
        if value.layout is not torch.strided:
            raise ValueError(f"{name!r} is sparse, and safetensors are dense; use --out with .pt")
        value = value.contiguous()
        storage = value.untyped_storage().data_ptr()
        made[name] = value.clone() if storage in storages else value
        storages.add(storage)
    return made


def _beside(source: Path, to: str) -> Path:
    if source.is_dir():
        source = source.resolve()  # "latest" will be another
    stem = source.name if source.is_dir() else source.stem
    suffix = ".safetensors" if to == "safetensors" else f"_{to}.pt"
    return source.absolute().parent / f"{stem}{suffix}"
