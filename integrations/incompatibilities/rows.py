"""The table of known incompatibilities: a row has a name, a severity, what happens, what to do, and detectors.

Rows about keys of DeepSpeed's configuration are made by `key`. The others have a function that looks at the model or
the optimizer. A new row also goes into docs/incompatibilities.md, with what the evidence for it is.

Detectors look at a `TrainingRun`: DeepSpeed's configuration, model, optimizer and recipe, as known before it starts.
Classes of other libraries are recognized by the modules that they come from, so no library is imported here.

Limits: the value "auto" in a configuration is unknown, and no detector takes an unknown value for a fault. Options that
are given during training (arguments of a forward, `torch.autocast`) are not seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from fp8stack.levels import Recipe
from fp8stack.optim import BlockwiseOptimizer

# --- what is known of a run

_FULL_STATES = {"keep", "fp32", "bf16"}


def zero_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section of ZeRO; in DeepSpeed's older form it is True for stage 1, and False for none."""
    zero: Any = config.get("zero_optimization")
    return {"stage": int(zero)} if isinstance(zero, bool) else zero or {}


@dataclass(frozen=True)
class TrainingRun:
    """What is known of a run before it starts. All fields may be left out.

    config: DeepSpeed's configuration; empty without DeepSpeed.
    model, optimizer: as they will be given to the library.
    recipe: what fp8stack will do (`fp8stack.levels.recipe_for("O2")`); None where it does nothing.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    model: Any = None
    optimizer: Any = None
    recipe: Recipe | None = None

    # --- the configuration

    def at(self, key: str) -> Any:
        """Return the value of a dotted key such as "zero_optimization.stage", None where there is none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def stage(self) -> int | None:
        """ZeRO's stage; None without DeepSpeed, or where it is not known yet."""
        zero = zero_of(self.config)
        stage = zero.get("stage") if zero else 0
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

    # --- what fp8stack does

    @property
    def fp8_gradients(self) -> bool:
        """Whether gradients will be reduced in FP8 (O1)."""
        return self.recipe is not None and self.recipe.gradients == "fp8"

    @property
    def quantized_states(self) -> bool:
        """Whether fp8stack (O2) or the given optimizer keeps states in fewer than 16 bits."""
        asked = "keep" if self.recipe is None else self.recipe.states
        given = self.optimizer.states if isinstance(self.optimizer, BlockwiseOptimizer) else "keep"
        low = not {asked, given} <= _FULL_STATES
        return low or comes_from(self.optimizer, "torchao.optim", "bitsandbytes")


def comes_from(thing: Any, *packages: str) -> bool:
    """Return whether the class of `thing`, or one that it derives from, is of one of the packages."""
    modules = [base.__module__ + "." for base in type(thing).__mro__]
    return any(module.startswith(package + ".") for module in modules for package in packages)


# --- rows

Detector = Callable[[TrainingRun], Iterator[tuple[str, str]]]
"""It yields what it found: a configuration key, or "model" or "optimizer", and its value."""


class Row(NamedTuple):
    """One known incompatibility.

    name: what `"allow"` in the section and docs/incompatibilities.md call it.
    symptom, remedy: what happens then, and what to do.
    """

    name: str
    severity: Literal["error", "warning"]
    symptom: str
    remedy: str
    detectors: tuple[Detector, ...]


# --- detectors of DeepSpeed's configuration

_FLOAT32 = ("fp32", "float32", "float", "torch.float32")
_OWN_OPTIMIZERS = ("muon", "onebitadam", "onebitlamb", "zerooneadam")


def key(
    name: str,
    holds: Callable[[Any], bool] = lambda value: value is True,
    when: Callable[[TrainingRun], Any] = lambda run: True,
) -> Detector:
    """Return a detector of a dotted key whose value `holds`, in runs that the row concerns."""

    def detect(run: TrainingRun) -> Iterator[tuple[str, str]]:
        if holds(run.at(name)) and when(run):
            yield name, json.dumps(run.at(name), default=str)

    return detect


def _is_set(value: Any) -> bool:
    return value is not None


def _above_1(value: Any) -> bool:
    return isinstance(value, int) and value > 1


_AT_A_LEVEL = attrgetter("recipe")
_FP8_GRADIENTS = attrgetter("fp8_gradients")
_QUANTIZED = attrgetter("quantized_states")


def _steps_itself(run: TrainingRun) -> bool:
    """Whether fp8stack has gradients or states of its own, which another optimizer would not know."""
    return run.recipe is not None and (run.fp8_gradients or run.quantized_states)


def _replaced(run: TrainingRun) -> Iterator[tuple[str, str]]:
    name = "zero_force_ds_cpu_optimizer"
    value = run.at(name)
    if run.offload == "none" or value is False or not run.quantized_states:
        return
    if comes_from(run.optimizer, "deepspeed") or (run.optimizer is None and run.at("optimizer")):
        return  # DeepSpeed does not replace what it made itself
    ours = isinstance(run.optimizer, BlockwiseOptimizer)
    if value is None and run.recipe is not None and (ours or run.recipe.states != "keep"):
        return  # the adapters set the key
    yield name, "true by default" if value is None else json.dumps(value)


# --- detectors of models and optimizers


def made_by(package: str, which: str, when: Callable[[TrainingRun], Any]) -> Detector:
    """Return a detector of a "model" or "optimizer" of a package, in runs that the row concerns."""

    def detect(run: TrainingRun) -> Iterator[tuple[str, str]]:
        thing = getattr(run, which)
        if comes_from(thing, package) and when(run):
            yield which, f"{type(thing).__module__}.{type(thing).__qualname__}"

    return detect


def _bitsandbytes_override(run: TrainingRun) -> Iterator[tuple[str, str]]:
    if comes_from(run.optimizer, "bitsandbytes") and (run.stage or 0) > 0:
        for module, parameter, options in run.optimizer.mng.module_weight_config_triple[:1]:
            yield "optimizer", f"{type(module).__name__}.{parameter} overridden: {options}"


ROWS = (
    Row("msamp-section", "warning",
        "DeepSpeed does not read unknown sections, so training runs without MS-AMP's FP8 and says nothing.",
        'Write "fp8stack": {"opt_level": ...} instead: O1 stays O1, O2 and O3 become O2.',
        (key("msamp", _is_set, lambda run: run.at("msamp.enabled") is not False),)),
    Row("offload-replaces-optimizer", "error",
        "DeepSpeed refuses the optimizer; under Accelerate and Trainer it is silently replaced by DeepSpeedCPUAdam "
        "with float32 states (and L2 for decoupled weight decay, unless it is an AdamW).",
        'Set "zero_force_ds_cpu_optimizer": false, as fp8stack\'s DeepSpeed adapter does: its optimizers step on CPUs.',
        (_replaced,)),
    Row("universal-checkpoint", "warning",
        "The converter looks for exp_avg and exp_avg_sq, does not find them, and raises KeyError.",
        'Save with "fp8stack": {"checkpoint_format": "portable"}, which writes float32 moments, and convert that.',
        (key("checkpoint.load_universal",
             when=lambda run: run.quantized_states and run.at("fp8stack.checkpoint_format") != "portable"),)),
    Row("elastic-checkpoint", "error",
        "load_checkpoint fails with a bare AssertionError for optimizers that keep no step in their groups, "
        "torch's AdamW too.",
        "Remove the key; to change the number of ranks, use a universal checkpoint.",
        (key("zero_optimization.elastic_checkpoint", when=lambda run: run.stage in (1, 2)),)),
    Row("nvme-states", "error",
        "The swapper takes every state tensor for one of the partition's size and dtype: codes and scales are "
        "corrupted.",
        'Use "device": "cpu", or leave offload_optimizer out: 8-bit states are a quarter of the size.',
        (key("zero_optimization.offload_optimizer.device", lambda value: value == "nvme", _QUANTIZED),)),
    Row("float32-accumulation", "warning",
        "DeepSpeed takes its BF16_Optimizer then, which keeps another float32 copy of the gradients: 4 bytes a "
        "parameter, more than FP8 gradients save.",
        "Leave data_types.grad_accum_dtype out, or use ZeRO-2.",
        (key("data_types.grad_accum_dtype", _FLOAT32.__contains__,
             lambda run: run.stage == 1 and run.half.startswith("bf") and run.offload == "none"),)),
    Row("zeropp-gradients", "error",
        "Two quantizers want the same gradients, and which of them gets them depends on the number of hosts.",
        'Drop zero_quantized_gradients, or use opt_level="O0".',
        (key("zero_optimization.zero_quantized_gradients", when=_FP8_GRADIENTS),)),
    Row("zeropp-weights", "warning",
        "Weights are rounded to int8 on their way and to FP8 in the layer: two errors instead of one.",
        'Drop zero_quantized_weights, or multiply in bfloat16: compute="bf16".',
        (key("zero_optimization.zero_quantized_weights",
             when=lambda run: run.recipe and run.recipe.compute != "bf16"),)),
    Row("fp16-loss-scaling", "warning",
        "The loss scale moves the gradients that FP8 scales anyway, float16 ends at 65504, and steps are skipped "
        "while the loss scale is searched.",
        'Use "bf16": {"enabled": true}.',
        (key("fp16.enabled", when=_AT_A_LEVEL),)),
    Row("pipeline", "error",
        "DeepSpeed's pipeline engine reduces gradients itself.",
        'Use ZeRO without pipeline stages, or opt_level="O0".',
        (made_by("deepspeed.runtime.pipe", "model", _FP8_GRADIENTS),)),
    Row("pipeline-products", "warning",
        "Hangs of DeepSpeed's pipeline engine with FP8 layers have been reported.",
        "Use ZeRO without pipeline stages.",
        (made_by("deepspeed.runtime.pipe", "model", lambda run: run.recipe and not run.fp8_gradients),)),
    Row("hybrid-engine", "error",
        "Its inference containers take layers of exactly the class nn.Linear; FP8 layers are not among them.",
        "Disable hybrid_engine, or train without fp8stack.",
        (key("hybrid_engine.enabled", when=_AT_A_LEVEL),)),
    Row("deepcompile", "error",
        "DeepCompile reduces gradients inside the compiled graph, where no FP8 reduction is called.",
        'Disable compile.deepcompile (torch.compile of the model is fine), or use opt_level="O0".',
        (key("compile.deepcompile", when=_FP8_GRADIENTS),)),
    Row("own-optimizer-paths", "error",
        "ZenFlow, SuperOffload, DeepSpeed's Muon and its 1-bit optimizers step themselves, or reduce in the step, and "
        "fp8stack's optimizer is not asked.",
        'Remove the key and give the optimizer to initialize, or use opt_level="O0".',
        (key("zero_optimization.zenflow", _is_set, _steps_itself),
         key("zero_optimization.offload_optimizer.super_offload", when=_steps_itself),
         key("optimizer.type", lambda value: str(value).lower() in _OWN_OPTIMIZERS, _steps_itself))),
    Row("model-parallelism", "error",
        "DeepSpeed replaces or splits layers after they have become FP8 layers, which loses them or their scales.",
        "Use data parallelism (ZeRO) alone.",
        (key("expert_parallel.enabled", when=_AT_A_LEVEL),
         key("tensor_parallel.autotp_size", _above_1, _AT_A_LEVEL),
         key("sequence_parallel_size", _above_1, _AT_A_LEVEL))),
    Row("torchao-partition", "warning",
        "A rank's partition whose size is no multiple of 256 gets full-precision states, silently.",
        "Use an optimizer of fp8stack.optim, whose blocks may end anywhere.",
        (made_by("torchao.optim", "optimizer", lambda run: (run.stage or 0) > 0),)),
    Row("torchao-stage0-checkpoint", "error",
        "Checkpoints are written but not read: load_checkpoint raises over map_location and tensor subclasses.",
        "Use an optimizer of fp8stack.optim, whose states are plain tensors, or ZeRO 1 to 3.",
        (made_by("torchao.optim", "optimizer", lambda run: run.stage == 0 and run.half),)),
    Row("bitsandbytes-override", "warning",
        "ZeRO steps a flat partition in the place of the parameters, and the override (Trainer's 32 bits for "
        "embeddings) is lost.",
        'Use fp8stack\'s O2 with "states_for": {"*embed*": "fp32"}: its adapter makes groups of them before ZeRO does.',
        (_bitsandbytes_override,)),
)  # fmt: skip
