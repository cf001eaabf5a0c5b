"""`fp8stack convert CKPT --to fp32|bf16|safetensors`: the weights of a checkpoint as one ordinary file.

It takes what `fp8stack inspect` takes. A weight that training keeps in bfloat16 and 8 bits more is put together first,
so the file has all its bits. All floating-point tensors are in float32 or bfloat16. The file is a state_dict for
torch.load(weights_only=True), or safetensors: by `--to safetensors` in float32, or by an --out that ends in
.safetensors in the dtype of --to. It is written beside its place and renamed: an interruption leaves what was there.

Tied weights stay tied in a state_dict. safetensors holds one of them, and the other's name in its metadata, as
`safetensors.torch.load_model` and transformers expect.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8stack.checkpoint import replacing
from fp8stack.errors import CheckpointError, ConfigError, reason_of
from fp8stack.optim.state_formats import decode_master, is_master, masters
from fp8stack.tensor_kinds import fault_of

from .inspect import Contents, place_of, read
from .output import Lines, show, size


def run(options: argparse.Namespace) -> int:
    source = Path(options.checkpoint)
    out = Path(options.out) if options.out else _beside(source, options.to)
    safe = out.suffix == ".safetensors"  # readers go by the name, too
    if not out.parent.is_dir() or (out.exists() and (not out.is_file() or out.samefile(source))):
        raise ConfigError(
            f"--out {out} must be a file in a folder that is there, and not the checkpoint itself."
        )
    if options.to == "safetensors" and not safe:
        raise ConfigError(f"--to safetensors --out {out}: its name must end in .safetensors.")
    if safe and find_spec("safetensors") is None:  # now, before minutes of reading
        raise ConfigError(
            "writing weights as safetensors needs safetensors, which is not installed. "
            'Install it with: pip install "fp8stack[safetensors]".'
        )
    contents = read(source)
    masters = find_masters(contents)
    dtype = torch.bfloat16 if options.to == "bf16" else torch.float32
    weights = consolidate(contents.model, masters, dtype)
    try:
        with replacing(out) as temporary:
            _write(temporary, weights, safe)
    except Exception as error:  # on a full disk safetensors raises one of its own
        raise CheckpointError(
            f"{out} cannot be written: {reason_of(error)} Nothing is left of it."
        ) from error
    data = {
        "out": str(out), "dtype": str(dtype).removeprefix("torch."), "bytes": out.stat().st_size,
        "tensors": len(weights), "masters": len(masters),
    }  # fmt: skip
    show(options, data, draw)
    return 0


def draw(data: dict[str, Any]) -> Lines:
    """Say what was written."""
    yield (
        f"{data['out']}: {data['tensors']} tensors in {data['dtype']}, {size(data['bytes'])}; "
        f"{data['masters']} of them from masters"
    )


def find_masters(contents: Contents) -> dict[str, Tensor]:
    """Return float32 weights with all their bits, by name, where the optimizer keeps some of the bits.

    Raises:
        CheckpointError: where the optimizer's bits do not go with a weight of the model.
    """
    found = {}
    for name, entry in contents.states.items():
        weight, kept = contents.model.get(name), masters(entry)
        if not kept:
            continue
        # A remainder is what bfloat16 leaves of 24 or 32 bits.
        if (
            weight is None
            or ("remainder" in entry and weight.dtype is not torch.bfloat16)
            or fault_of(weight)
            or not is_master(kept, weight.shape)
        ):
            raise CheckpointError(
                f"the optimizer holds bits of a weight {name!r}, and the model has none that they go with: it is of "
                "another step or wrapped, or the optimizer's state has no names. Load it into its model, and save "
                "fp8stack.checkpoint.master_state_dict(model, optimizer)."
            )
        found[name] = decode_master(weight, entry)
    return found


def consolidate(
    model: dict[str, Tensor], masters: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return copies of all weights in `dtype`, from their masters where there are some; tied ones are one tensor."""
    made = {place_of(model[name]): master.to(dtype) for name, master in masters.items()}
    for value in model.values():
        if (place := place_of(value)) not in made:
            made[place] = value.to(dtype if value.is_floating_point() else value.dtype, copy=True)
    return {name: made[place_of(value)] for name, value in model.items()}


def _write(path: Path, weights: dict[str, Tensor], safe: bool) -> None:
    """Write a state_dict, or safetensors: of tied weights the first, and the names of the others."""
    if not safe:
        with open(path, "wb") as file:  # a full disk is an OSError then
            torch.save(weights, file)
        return
    from safetensors.torch import save_file

    first: dict[int, str] = {}
    names = {name: first.setdefault(id(value), name) for name, value in weights.items()}
    ties = {name: other for name, other in names.items() if name != other}
    kept = {name: weights[name].contiguous() for name in first.values()}
    save_file(kept, path, metadata={"format": "pt", **ties})


def _beside(source: Path, to: str) -> Path:
    source = source.resolve() if source.is_dir() else source  # "latest" will be another
    stem = source.name if source.is_dir() else source.stem
    ending = ".safetensors" if to == "safetensors" else f"_{to}.pt"
    return source.absolute().parent / (stem + ending)
