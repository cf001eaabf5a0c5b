"""What is looked at, what a row of the table is, and what a check returns.

A `Situation` holds what is known before training starts: DeepSpeed's configuration, model, optimizer, the fp8stack
recipe, the Accelerator or Trainer, and versions. A row's detector reads it and yields what it found. Detectors know
other libraries by the modules that classes come from, so none of them is imported.

Limits: a value "auto" in the configuration is unknown, and no detector takes an unknown value for a fault. Options
that are given in the middle of training (arguments of a forward, `torch.autocast`) are not seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal, NamedTuple

from fp8stack.levels import Recipe
from fp8stack.optim import BlockwiseOptimizer

Severity = Literal["error", "warning", "info"]

LIBRARIES = (
    "torch",
    "deepspeed",
    "accelerate",
    "transformers",
    "lightning",
    "torchao",
    "bitsandbytes",
    "transformer_engine",
)
_FULL_STATES = ("keep", "fp32", "bf16")


def installed_versions() -> dict[str, str]:
    """Return the versions of the libraries of this table that are installed, by name."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


class Found(NamedTuple):
    """What a detector found: a configuration key, parameter, module or object, and its value."""

    where: str
    value: str
    severity: Severity | None = None  # where it is another than the row's


@dataclass(frozen=True)
class Situation:
    """What is known of a run before it starts. All fields may be left out.

    config: DeepSpeed's configuration; empty without DeepSpeed. That of an Accelerator or Trainer is taken from it.
    model, optimizer: as they will be given to the library.
    recipe: what fp8stack will do (`fp8stack.levels.recipe_for("O2")`); None where it does nothing.
    driver: the `accelerate.Accelerator` or `transformers.Trainer` in charge.
    hosts: how many machines.
    versions: those of installed packages, by name.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    model: Any = None
    optimizer: Any = None
    recipe: Recipe | None = None
    driver: Any = None
    hosts: int | None = None
    versions: Mapping[str, str] = field(default_factory=installed_versions)

    def __post_init__(self) -> None:
        plugin = getattr(getattr(self.accelerator, "state", None), "deepspeed_plugin", None)
        if not self.config and plugin is not None:
            object.__setattr__(self, "config", plugin.deepspeed_config)

    # --- the configuration

    def at(self, key: str) -> Any:
        """Return the value of a dotted key such as "zero_optimization.stage", None where there is none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def found(self, key: str) -> Found:
        """Return a finding about a dotted key and its value."""
        return Found(key, json.dumps(self.at(key), default=str))

    @property
    def stage(self) -> int | None:
        """ZeRO's stage; None without DeepSpeed, or where it is not known yet."""
        stage = self.at("zero_optimization.stage") if self.at("zero_optimization") else 0
        return stage if self.config and isinstance(stage, int) else None

    @property
    def offload(self) -> str:
        """Where ZeRO keeps optimizer states: "cpu", "nvme", or "none"."""
        device = self.at("zero_optimization.offload_optimizer.device")
        old = "cpu" if self.at("zero_optimization.cpu_offload") is True else "none"
        return device if isinstance(device, str) else old

    @property
    def half(self) -> str:
        """The key that switches DeepSpeed to 16 bits, or an empty string."""
        keys = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
        return next((key for key in keys if self.at(key) is True), "")

    def older(self, library: str, version: tuple[int, ...]) -> bool:
        """Return whether a library is installed in an older version."""
        given = self.versions.get(library)
        return given is not None and tuple(map(int, re.findall(r"\d+", given)[:3])) < version

    # --- what fp8stack does

    @property
    def fp8_gradients(self) -> bool:
        """Whether gradients will be reduced in FP8 (O1)."""
        return self.recipe is not None and self.recipe.gradients == "fp8"

    @property
    def quantized_states(self) -> bool:
        """Whether states are kept in fewer than 16 bits, by fp8stack (O2) or by the optimizer that was given."""
        if self.recipe is not None and self.recipe.states not in _FULL_STATES:
            return True
        if isinstance(self.optimizer, BlockwiseOptimizer):
            return self.optimizer.states not in _FULL_STATES
        return comes_from(self.optimizer, "torchao.optim", "bitsandbytes")

    # --- model and driver

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, parameter) of the model, tied ones under each name."""
        if hasattr(self.model, "named_parameters"):
            yield from self.model.named_parameters(remove_duplicate=False)

    def modules(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, module) of the model; the name of the model itself is "model"."""
        if hasattr(self.model, "named_modules"):
            yield from ((name or "model", module) for name, module in self.model.named_modules())

    @property
    def accelerator(self) -> Any:
        """The Accelerator in charge, a Trainer's too; None without one."""
        driver = self.driver
        if comes_from(driver, "transformers"):
            driver = getattr(driver, "accelerator", None)
        return driver if comes_from(driver, "accelerate") else None

    @property
    def accelerate_fp8(self) -> tuple[str, Any]:
        """What accelerate itself was asked to do in FP8: "TE", "AO", "MSAMP" or "", and the handler of options."""
        for backend in ("TE", "AO", "MSAMP"):
            handler = getattr(self.accelerator, f"{backend.lower()}_recipe_handler", None)
            if handler is not None:
                return backend, handler
        handler = getattr(self.accelerator, "fp8_recipe_handler", None)
        return ("", None) if handler is None else (handler.backend, handler)


Detector = Callable[[Situation], Iterator[Found]]


@dataclass(frozen=True)
class Row:
    """One known incompatibility.

    number, id: its place in the table and its short name, by which `raise_or_warn(allow=...)` knows it.
    where: the library that it is met in.
    combination, symptom, remedy, evidence: what meets what, what happens then, what to do, and who says so.
    detect: what finds it beforehand; None where `undetected` says why nothing can.
    """

    number: int
    id: str
    where: str
    severity: Severity
    combination: str
    symptom: str
    remedy: str
    evidence: str
    detect: Detector | None = None
    undetected: str = ""


@dataclass(frozen=True)
class Finding:
    """A row that applies to a situation: where, with what value, and how bad it is."""

    row: Row
    where: str
    value: str
    severity: Severity

    @property
    def message(self) -> str:
        """The key or name, its value, what happens, and what to do."""
        row = self.row
        return f"{self.where}: {self.value} ({row.id}). {row.symptom} {row.remedy}"


def flag(key: str, concerns: Callable[[Situation], bool] = lambda s: True) -> Detector:
    """Return a detector of a configuration key that is true, in situations that the row concerns."""

    def detect(s: Situation) -> Iterator[Found]:
        if s.at(key) is True and concerns(s):
            yield s.found(key)

    return detect


def comes_from(thing: Any, *packages: str) -> bool:
    """Return whether the class of `thing`, or one that it derives from, is of one of the packages."""
    modules = [base.__module__ + "." for base in type(thing).__mro__]
    return any(module.startswith(package + ".") for module in modules for package in packages)


def class_of(thing: Any) -> str:
    """Return the full name of a thing's class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def first(found: Iterator[tuple[str, str]]) -> Iterator[Found]:
    """Yield one finding for many of a kind: the first name and value, and how many more there are."""
    names = list(found)
    if names:
        name, value = names[0]
        yield Found(name, value + (f", and {len(names) - 1} more" if len(names) > 1 else ""))
