"""The model of `fp8stack estimate`: a number of parameters, sizes, a configuration, or a user's own function."""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8stack.conversion import check_model
from fp8stack.errors import ConfigError
from fp8stack.levels import recipe_for
from fp8stack.planning import FAMILIES, LLAMA, Make, Shape, read_config, shape_of_config

from .load_function import build

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")


def model_of(
    options: argparse.Namespace, notes: list[str]
) -> tuple[Shape | Make, Shape | None, torch.dtype]:
    """Return what to count, the shape that activations are computed from, and the dtype of the weights."""
    sizes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    config = _config_of_weights(options.model) if options.model else options.hf_config
    if options.model is not None and config is None:
        return _users_model(options.model, sizes, notes)
    if config is not None:
        anew: dict[str, Any] = {"head_dim": 0} if sizes.keys() & {"hidden", "heads"} else {}
        shape = replace(read_config(config), **{**sizes, **anew})
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


def _config_of_weights(model: str) -> Path | None:
    """Return the config.json in a folder of weights, or beside a file of them; None if `model` is neither."""
    path = Path(model)
    if not path.exists() or path.suffix == ".py":
        return None
    config = (path if path.is_dir() else path.parent) / "config.json"
    if not config.is_file():
        raise ConfigError(
            f"--model {model}: weights do not tell how many heads share them, and there is no {config} that would. "
            "Give that, --sizes, or a function of a Python file that returns the model."
        )
    return config


def _compare_counts(shape: Shape, wanted: float, notes: list[str]) -> None:
    if abs(shape.parameters / wanted - 1) > 0.05:
        notes.append(f"the sizes make {shape.parameters:,} parameters, not {wanted:,.0f}")


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
    rest = {"heads": heads, "kv_heads": heads, "vocab": LLAMA.vocab}
    rest["ffn"] = hidden * LLAMA.ffn // LLAMA.hidden
    given: dict[str, Any] = {**rest, **sizes}
    return Shape(**given)


def _users_model(
    target: str, sizes: dict[str, int], notes: list[str]
) -> tuple[Make, Shape | None, torch.dtype]:
    model, optimizer = build(target, meta=True)
    if optimizer is not None:
        notes.append("the function's optimizer is not looked at; all columns are AdamW's")
    check_model(model, recipe_for("O0"), planned=True)
    parameters = list(model.parameters())
    elements: Counter[torch.dtype] = Counter()
    for p in parameters:
        elements[p.dtype] += p.numel()
    (weights, most), *others = elements.most_common()
    if 100 * sum(n for _, n in others) > most:
        kinds = " and ".join(str(dtype).removeprefix("torch.") for dtype in elements)
        notes.append(
            f"weights are {kinds}; all are counted as most of them are, or as --weights says"
        )

    def make(dtype: torch.dtype) -> nn.Module:
        return copy.deepcopy(model).to(dtype)

    config: Any = getattr(model, "config", None)
    told = config.to_dict() if hasattr(config, "to_dict") else {}
    shape = None
    if sizes:
        shape = _shape_of(sizes)
    elif told.get("model_type") in FAMILIES:
        shape = shape_of_config(told, f"the model of {target}")
    else:
        notes.append(
            "activations are not estimated: the model has no Hugging Face config that is known here "
            f"({', '.join(FAMILIES)}); give --layers, --hidden, --heads, --kv-heads, --ffn and --vocab"
        )
    head = getattr(model, "get_output_embeddings", None)  # of transformers
    if shape and callable(head) and head() is None:
        notes.append("the model has no language-model head; activations are counted as with one")
    if shape:
        _compare_counts(shape, sum(p.numel() for p in parameters), notes)
    return make, shape, weights
