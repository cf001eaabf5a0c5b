"""A model of transformers from its config.json: its parameters, those a token uses, and what training it holds.

    model = HuggingFaceModel("config.json")
    print(model.parameters, model.active)
    print(estimate(model, at_level(recipe_for("O2")), Setup(batch=1, seq=4096)).peak / 2**30)

transformers itself makes the model, on the meta device: so every family that it knows is known here, with experts,
shared experts, dense first layers, encoders and all. Nothing is downloaded, and no code but that of the installed
transformers runs. `fake_step.py` measures a forward and backward pass with labels.

A token uses `num_experts_per_tok` of the experts, which lie along the first dimension of the parameters of a module
named `experts`, and all other parameters.

Limits: the model is made in the dtype that is asked for, whatever dtype or quantization the configuration names. Inputs
are tokens or images. What such a batch does not reach (the images' half of a model for both) is refused, since its
activations would not be counted.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from fp8stack.errors import ConfigError, first_line, reason_of

from .fake_step import Held, measure_step
from .resident_memory import Precision

_AUTOS = ("ForSeq2SeqLM", "ForMaskedLM", "ForCausalLM", "ForImageClassification")
"""What is trained of a configuration: the first of these that transformers has for it."""


class HuggingFaceModel:
    """A model of transformers that a configuration describes.

    Attributes:
        name: its class. attention: what computes its attention; "eager" keeps scores.
        parameters, active: how many it has, and how many a token uses.
        counts: parameters outside blocks, and of the largest block. A block is an entry of an `nn.ModuleList`.
        images: whether it reads images, not tokens.
        positions: the longest sequence that the configuration allows, 0 if it names none; of an image, its patches.

    Raises:
        ConfigError: without transformers, or for a file that is no configuration of a model that it can train.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path, "config.json") if Path(path).is_dir() else Path(path)
        given = _read(self.path)
        # Weights are new, and code is transformers' own.
        for name in ("quantization_config", "auto_map"):
            given.pop(name, None)
        try:
            import transformers
        except ImportError as error:
            told = f"a configuration needs transformers ({first_line(error)})"
            raise ConfigError(f'{told}: pip install "fp8stack[transformers]".') from error
        try:
            self.config = transformers.AutoConfig.for_model(given.pop("model_type", None), **given)
            autos = [getattr(transformers, f"AutoModel{name}") for name in _AUTOS]
            known = [auto for auto in autos if type(self.config) in auto._model_mapping]
            if not known:
                raise ValueError(f"{type(self.config).__name__} has none {' or '.join(_AUTOS)}")
            self._auto = known[0]
            model: Any = self.skeleton()
            self.images = model.main_input_name == "pixel_values"
            if self.images:
                self.image_size = _pair(self.config.image_size)
                patch_size = _pair(getattr(self.config, "patch_size", 1))
        except Exception as error:  # whatever transformers raises about a configuration
            told = f"{self.path}: transformers {transformers.__version__} makes no model of it"
            remedy = "Give another, or --sizes of a decoder that is as large"
            raise ConfigError(f"{told} ({first_line(error)}). {remedy}.") from error
        self.name = type(model).__name__
        if not self.images and model.main_input_name != "input_ids":
            told = f"{self.name} reads {model.main_input_name}; tokens and images are counted"
            raise ConfigError(f"{self.path}: {told}. Plan it with `fp8stack plan --batch`.")
        text = self.config.get_text_config()
        self.attention = model.config._attn_implementation
        self.positions = getattr(text, "max_position_embeddings", None) or 0
        if self.images:
            down, across = (a // b for a, b in zip(self.image_size, patch_size, strict=True))
            self.positions = max(1, down * across)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.active = self.parameters - _idle(model, getattr(text, "num_experts_per_tok", None))
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        blocks = [sum(p.numel() for p in block.parameters()) for m in lists for block in m]
        inside = {p for m in lists for p in m.parameters()}
        self.counts = self.parameters - sum(p.numel() for p in inside), max(blocks, default=0)

    def skeleton(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """Return the model, on the meta device."""
        with torch.device("meta"):
            model: nn.Module = self._auto.from_config(self.config, dtype=dtype)
        return model

    @lru_cache(maxsize=64)  # noqa: B019
    def held(self, precision: Precision, batch: int, seq: int, checkpointing: bool) -> Held:
        """Return what a pass of `batch` sequences of `seq` tokens, or of `batch` images, holds.

        Raises:
            ConfigError: where the batch does not reach all parameters, or `seq` is too long.
            ModelError: where the model does not run on tensors without data.
        """
        if (self.images and seq != self.positions) or 0 < self.positions < seq:
            told = f"seq={seq}, and {self.name} has {self.positions} positions"
            raise ConfigError(f"{told}. Give no more (of images all), or another configuration.")
        model: Any = self.skeleton(precision.weights).train()
        if checkpointing:
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # new, old
            next(getattr(model, name) for name in names if hasattr(model, name))()

        def run(model: Any) -> Any:
            labels = torch.zeros(batch, dtype=torch.long)
            if self.images:
                size = batch, self.config.num_channels, *self.image_size
                pixels = torch.zeros(size, dtype=precision.weights)
                return model(pixel_values=pixels, labels=labels)
            ids = torch.zeros(batch, seq, dtype=torch.long)
            both = {"decoder_input_ids": ids} if self.config.is_encoder_decoder else {}
            return model(input_ids=ids, labels=ids, **both)

        # Packed sequences are looked for in the values of positions, which fakes have not, and taken to be there.
        packed = "transformers.masking_utils.find_packed_sequence_indices"
        with patch(packed, return_value=None):
            held = measure_step(model, precision, run, self.name, gpu=True)
        if held.unreached:
            told = (
                f"{len(held.unreached)} parameters of {self.name} get no gradient from such a batch"
            )
            remedy = "Plan it with `fp8stack plan --batch`, and a batch that reaches them"
            raise ConfigError(f"{told} ({held.unreached[0]}). {remedy}.")
        return held


def _pair(size: Any) -> tuple[int, int]:
    """Return the height and width that a configuration gives as one number or as two."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    # ValueErrors are JSON's, or of whole numbers of thousands of digits
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {reason_of(error)}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}; a configuration is an object.")
    return config


def _idle(model: nn.Module, used: int | None) -> int:
    """Return how many parameters a token does not use: those of all experts but `used`."""
    stacks = [m for name, m in model.named_modules() if name.split(".")[-1] == "experts"]
    if stacks and used is None:
        told = "the configuration does not say how many experts a token uses"
        raise ConfigError(f"{told}: it has no num_experts_per_tok. Give it in the file.")
    experts = [p for m in stacks for p in m.parameters()]
    return sum(p.numel() - p.numel() * used // len(p) for p in experts) if used else 0
