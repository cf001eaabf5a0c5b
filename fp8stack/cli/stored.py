"""Checkpoints as they lie on a disk, without the model that they are of: one file, a sharded folder, or safetensors.

`read` tells them apart by what is there, and returns names and tensors in one shape. Where data is not asked for,
the tensors of folders and safetensors are on the meta device: only headers are read. A file is what
`fp8stack.checkpoint` saved, a state_dict, or a dict of two by their usual names ("model" and "optimizer", or
"model_state_dict" and "optimizer_state_dict"); it is read with `weights_only=True`. A folder of
torch.distributed.checkpoint has a pickled header (`.metadata`), as torch writes it: open those that you trust.
"""

from __future__ import annotations

import json
import struct
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8stack import checkpoint
from fp8stack.errors import CheckpointError, first_line
from fp8stack.optim.state import MASTER_KEYS, decode_master

from .output import MissingLibraryError

SAFE_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_MODEL = ("model", "model_state_dict", "state_dict")
_OPTIMIZER = ("optimizer", "optimizer_state_dict")
_DAMAGED = "Use an earlier one, or copy it again."


@dataclass
class Stored:
    """A checkpoint's contents by name.

    model: tensors by name. states: an optimizer's entries by the name of their parameter.
    header: what fp8stack's optimizer wrote of itself, if one did. extra: whatever else was saved.
    manifest: what examples/train_gpt.py says of its checkpoint: "step", "level", "precision" and more.
    """

    kind: str
    model: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)

    def masters(self) -> dict[str, Tensor]:
        """Return float32 masters by the name of their parameter, where the optimizer kept some."""
        found = {}
        for name, entry in self.states.items():
            if not entry.keys() & set(MASTER_KEYS):
                continue
            if name not in self.model:
                if name.isdigit():
                    raise CheckpointError(
                        "the optimizer's states have the numbers of parameters and not their names, as "
                        "optimizer.state_dict() has them. Save what get_state_dict of torch.distributed.checkpoint."
                        "state_dict returns."
                    )
                raise CheckpointError(
                    f"the optimizer holds bits of the weight {name!r}, and the model has no such tensor: the "
                    "checkpoint is damaged, of a wrapped model, or of an older fp8stack, which wrote no names. Load it "
                    "into its model, and save fp8stack.checkpoint.master_state_dict(model, optimizer)."
                )
            weight, kept = self.model[name], [entry[key] for key in MASTER_KEYS if key in entry]
            rest = "remainder" in entry  # what bfloat16 leaves of 24 or 32 bits
            if (rest and weight.dtype is not torch.bfloat16) or any(
                t.ndim and t.shape != weight.shape for t in kept
            ):
                raise CheckpointError(
                    f"the optimizer holds bits of the weight {name!r} that do not go with it: it is {weight.dtype}, of "
                    f"shape {tuple(weight.shape)}. Save model.state_dict() as it is while training, at the same step."
                )
            found[name] = decode_master(weight, entry)
        return found


def read(path: Path, data: bool = False) -> Stored:
    """Read a checkpoint; without `data` tensors may be on the meta device.

    Raises:
        CheckpointError: for what is missing, damaged, or no checkpoint.
    """
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint at {path}. Check the path.")
    if path.is_dir():
        return _read_folder(path, data)
    if not path.is_file():  # opening a pipe would wait for ever
        raise CheckpointError(f"{path} is neither a file nor a folder. Check the path.")
    return _read_safetensors(path, data) if path.suffix == ".safetensors" else _read_file(path)


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what is the same for tied tensors and for no others; those on the meta device are told apart."""
    if tensor.layout is not torch.strided:
        return id(tensor), tensor.shape, tensor.dtype
    where = id(tensor) if tensor.is_meta else tensor.untyped_storage().data_ptr()
    return where, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _read_file(path: Path) -> Stored:
    contents = checkpoint.read_file(path)
    if _is_state_dict(contents):
        return Stored("state_dict", contents)
    held = [*contents] if isinstance(contents, dict) else []
    keys = [[key for key in known if key in held] for known in (_MODEL, _OPTIMIZER)]
    if [len(found) for found in keys] != [1, 1]:
        what = f"{type(contents).__name__}{f' with {held}' * isinstance(contents, dict):.100}"
        raise CheckpointError(
            f"{path} was not written by fp8stack.checkpoint.save, and is no state_dict of a model but a {what}. Save "
            'with the former, or as {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, which holds '
            "all the bits of the weights at O2; without an optimizer model.state_dict() alone."
        )
    ((of_model,), (of_optimizer,)) = keys
    saved = checkpoint.is_saved(contents)
    try:
        packed = contents[of_optimizer] or {"state": {}}
        header = packed.get("fp8stack", {})
        names = dict(enumerate(contents.get("names", ()) if saved else header.get("names", ())))
        states = {
            names.get(k) or (k if isinstance(k, str) else f"parameter {k}"): dict(entry)
            for k, entry in packed["state"].items()
        }
        model = {str(k): t for k, t in contents[of_model].items() if isinstance(t, Tensor)}
        rest = {str(k): v for k, v in contents.items() if k not in (of_model, of_optimizer)}
        extra = dict(contents["extra"]) if saved else rest
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: {of_model!r} and {of_optimizer!r} are no state_dicts of a model and an optimizer "
            f"({first_line(error)}). {_DAMAGED}"
        ) from error
    return Stored("fp8stack.checkpoint" if saved else "torch.save", model, states, header, extra)


def _is_state_dict(contents: Any) -> bool:
    return (
        isinstance(contents, dict)
        and bool(contents)
        and all(isinstance(k, str) and isinstance(t, Tensor) for k, t in contents.items())
    )


def _read_folder(path: Path, data: bool) -> Stored:
    """Read a folder of torch.distributed.checkpoint, in one process, its tensors only."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    if not (path / ".metadata").is_file():
        # of a folder of checkpoints or of a run; hidden are those whose writing was interrupted
        if found := sorted((*path.glob("[!.]*/.metadata"), *path.glob("[!.]*/[!.]*/.metadata"))):
            one = next((p.parent for p in found if p.parent.name == "latest"), found[-1].parent)
            raise CheckpointError(f"{path} is a folder of checkpoints; name one, such as {one}.")
        if found := sorted(path.glob("model*.safetensors")):
            raise CheckpointError(
                f"{path} is a folder of weights; name a file, such as {found[0]}."
            )
        raise CheckpointError(
            f"{path} is a folder without .metadata: no checkpoint of torch.distributed.checkpoint, or one whose "
            f"writing was interrupted. {_DAMAGED}"
        )
    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:  # a pickle: whatever is in it
        raise _damaged(path / ".metadata", error) from error
    for info in (metadata.storage_data or {}).values():
        file = path / info.relative_path
        if not file.is_file() or file.stat().st_size < info.offset + info.length:
            raise CheckpointError(f"{file} is missing or truncated. {_DAMAGED}")
    held = {
        key: m
        for key, m in metadata.state_dict_metadata.items()
        if isinstance(m, TensorStorageMetadata)
    }
    steps = [key for key in held if key.endswith(".step")]
    wanted = set(held) if data else set(steps[:1])
    tensors = {
        key: torch.empty(
            m.size, dtype=m.properties.dtype, device="cpu" if key in wanted else "meta"
        )
        for key, m in held.items()
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is one process
            load(
                {key: tensors[key] for key in wanted},
                storage_reader=FileSystemReader(path),
                no_dist=True,
            )
    except Exception as error:  # of several threads
        raise _damaged(path, error) from error
    paths = metadata.planner_data or {}
    stored = Stored("torch.distributed.checkpoint")
    for key, value in tensors.items():
        _file_away(stored, tuple(map(str, paths.get(key, key.split(".")))), value)
    if not stored.model:  # a bare state_dict
        stored.model, stored.extra = stored.extra, {}
    if data:
        _tie(stored)
    with suppress(OSError, ValueError, TypeError, KeyError):  # none, or another program's
        told = json.loads((path / "manifest.json").read_bytes())
        stored.manifest = {"level": told["level"], "precision": told["precision"], **told}
    return stored


def _tie(stored: Stored) -> None:
    """Join what such a folder holds twice: matrices of the same bits, of which one at most has a state of its own.

    Vectors and constants may be alike by chance: norms of ones and biases of zeros are.
    """
    found: dict[Any, list[Tensor]] = {}
    for name in sorted(stored.model, key=lambda name: name not in stored.states):
        value = stored.model[name]
        if value.ndim < 2:
            continue
        start = value.flatten()[:64].tolist()
        alike = found.setdefault((value.dtype, value.shape, *start), [])
        twin = next((t for t in alike if torch.equal(t, value)), None)
        if twin is None or name in stored.states:
            alike.append(value)
        elif bool((value != value.flatten()[0]).any()):
            stored.model[name] = twin


def _file_away(stored: Stored, path: tuple[str, ...], value: Tensor) -> None:
    """Put a tensor where it belongs by its path: (..., "model", name), (..., "state", parameter, entry)."""
    if "state" in path[:-2]:
        parameter, entry = path[-2:]
        stored.states.setdefault(parameter, {})[entry] = value
    elif "model" in path[:-1]:
        stored.model[".".join(path[path.index("model") + 1 :])] = value
    else:
        stored.extra[".".join(path)] = value


def _read_safetensors(path: Path, data: bool) -> Stored:
    try:
        header, length = _safetensors_header(path)
        told = dict(header.pop("__metadata__", {}))
        if strange := {entry["dtype"] for entry in header.values()} - SAFE_DTYPES.keys():
            raise ValueError(f"torch has no {', '.join(sorted(strange))}")
        model = {
            name: torch.empty(entry["shape"], dtype=SAFE_DTYPES[entry["dtype"]], device="meta")
            for name, entry in header.items()
        }
        ends = {name: entry["data_offsets"] for name, entry in header.items()}
        for name, (first, last) in ends.items():
            if last - first != model[name].nbytes:
                raise ValueError(f"{name} has {last - first} bytes for {model[name].nbytes}")
        end = max((last for _, last in ends.values()), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, struct.error) as error:
        raise _damaged(path, error) from error
    if path.stat().st_size != length + end:
        raise CheckpointError(
            f"{path} has {path.stat().st_size} bytes, and its header says {length + end}. {_DAMAGED}"
        )
    if data:
        load_file = safetensors().load_file
        from safetensors import SafetensorError

        try:
            model = load_file(path)
        except SafetensorError as error:
            raise _damaged(path, error) from error
    for name in [n for n, other in told.items() if other in model and n not in model]:  # tied
        model[name] = model[told.pop(name)]
    return Stored("safetensors", model, extra=told)


def _safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and how many bytes precede the data."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError(f"its header would be {length} bytes long")
        return json.loads(file.read(length)), 8 + length


def safetensors() -> Any:
    """Return the module safetensors.torch.

    Raises:
        MissingLibraryError: where it is not installed.
    """
    try:
        import safetensors.torch as module
    except ImportError:
        raise MissingLibraryError(
            "reading and writing weights as safetensors", "safetensors", "safetensors"
        ) from None
    return module


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: it is truncated, or not a checkpoint ({first_line(error)}). {_DAMAGED}"
    )
