"""Which options do not go together: one table for `initialize`, every integration and the command line.

A `Rule` says that an option must not have certain values in certain contexts, with the reason and the remedy. An option
is a field of a recipe, a setting of an optimizer, or a model's wrapper. A context is a place where a recipe is used
(FSDP2, DeepSpeed, a device), a setting of the recipe itself, written as "fp8_recipe='blockwise'", or a property of the
optimizer. To add a conflict, add a row to `RULES`; callers need no change.

    refuse_conflicts(recipe, FSDP2, optimizer=optimizer)    # raises for the first rule that is broken
    check_option("step_in_backward", True, SEVERAL_PROCESSES)

Every message is made in one place and says what was given, where, why not, and what to do. A rule with
`error=Fp8StackWarning` describes an option that is ignored: `idle_options` returns its message as a fallback, which
`initialize` warns of, and refuses under `strict=True`.

Limits: recipes check themselves with this module, so it imports nothing of fp8stack but the errors. It recognizes
optimizers and wrappers by the names of their classes, and recipes by the names of their fields.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from .errors import ConfigError, Fp8StackError, Fp8StackWarning, ModelError, UnsupportedDeviceError

# Places: the caller says which of them hold.
INITIALIZE = "fp8stack.initialize"
FSDP2 = "FSDP2"
DEEPSPEED = "DeepSpeed"
ZERO = "ZeRO, stage 1 or more"
ZERO_FLOAT32 = "the float32 masters of DeepSpeed"
LIGHTNING = "Lightning"
FABRIC = "Lightning's Fabric"
ACCELERATE = "Accelerate"
SEVERAL_PROCESSES = "several processes"
ACCUMULATION = "gradient accumulation"
ON_CPU = "a model on the CPU"
FP8_PRODUCTS = "FP8 products"  # as `choose_compute` decided
BF16_PRODUCTS = "bf16 products"
BARE_PARAMETERS = "products by bare parameters (matmuls=True)"  # follows from the recipe

# Properties of an optimizer.
FOREIGN = "an optimizer of another library"
NO_COUNTERPART = "an optimizer without a counterpart"
IS_SGD = "SGD"
NOT_ON_BITSANDBYTES = "bitsandbytes, which has no counterpart"

TORCH_OPTIMIZERS: tuple[type[torch.optim.Optimizer], ...] = tuple(
    getattr(torch.optim, name)
    for name in ("Adam", "AdamW", "SGD", "Muon")
    if hasattr(torch.optim, name)  # torch has Muon from 2.9 on
)
"""The exact types that O2 converts. A subclass may do anything in its step, so it is not taken for its base."""

WRAPPERS = (
    "DistributedDataParallel",
    "DataParallel",  # torch's and fp8stack's
    "FullyShardedDataParallel",
    "DeepSpeedEngine",
    "OptimizedModule",  # what torch.compile(model) returns
)
"""Names of the classes of modules that wrap a whole model."""


class Rule(NamedTuple):
    """`option` must not have one of `values` while one of `contexts` holds.

    If `beside` is not empty, one of its contexts must hold too. Without `values` any value but the default is meant.
    """

    option: str
    values: tuple[Any, ...]
    contexts: tuple[str, ...]
    reason: str
    remedy: str
    error: type[Exception] = ConfigError
    beside: tuple[str, ...] = ()


class Setting(NamedTuple):
    """An option and its value, as somebody set it; `text` is what a message calls it."""

    option: str
    value: Any
    text: str


def setting(field: str, *values: Any) -> tuple[str, ...]:
    """Return the contexts of a recipe whose `field` has one of `values`."""
    return tuple(f"{field}={value!r}" for value in values)


_BNB = ("bitsandbytes", "bitsandbytes-paged")
ON_BITSANDBYTES = setting("optimizer_backend", *_BNB)
RELEASE = setting("step_in_backward", True)
BF16_ASKED = setting("compute", "bf16")
FOUR_BITS = setting("states", "4bit")
EIGHT_BITS = setting("states", "8bit")
_KEPT = setting("states", "keep")
_CONVERTED = setting("states", "8bit", "fp8", "4bit", "fp8-lm", "bf16", "fp32")
_TE = setting("compute", "te")
_BLOCK_SCALES = setting("fp8_recipe", "blockwise", "mxfp8", "nvfp4")
_NOT_DELAYED = (*setting("fp8_recipe", "current"), *_BLOCK_SCALES)

_ONE_SCALE = "it keeps one scale for a whole tensor"
_FLAT = "it joins parameters to flat vectors, which have no rows to make blocks of"
_TORCH_NAMES = ", ".join(f"torch.optim.{kind.__name__}" for kind in TORCH_OPTIMIZERS)
_USE_O2 = 'Use opt_level="O2", or give states="fp32" as well'
_USE_CURRENT = 'Leave it out, or use fp8_recipe="current"'
_USE_DELAYED = 'Leave it out, or use fp8_recipe="delayed"'
_USE_OURS = 'Use optimizer_backend="fp8stack", or an optimizer of fp8stack.optim itself'
_LEAVE = "Leave it out"

# fmt: off
_NO_HISTORY = "it belongs to delayed scaling, and other scales keep no history"
RULES = (
    # --- one option of a recipe and another
    Rule("states_for", (), _KEPT, "the optimizer's states are left alone", _USE_O2),
    Rule("offload", ("cpu",), _KEPT, "it moves the states that O2 makes", _USE_O2),
    Rule("master", (), _KEPT, "the optimizer is left as it is, so a master has no place to be kept",
         'Use master="keep", or states="fp32" for float32 states beside it'),
    Rule("optimizer_backend", (), _KEPT, "the optimizer's states are left alone", 'Use opt_level="O2"'),
    *(Rule(option, (), _NOT_DELAYED, _NO_HISTORY, _USE_DELAYED)
      for option in ("fp8_margin", "amax_history_len", "amax_compute_algo")),
    Rule("fp8_format", ("e5m2",), _BLOCK_SCALES, "that is E4M3 throughout: block scales replace the range of E5M2",
         _USE_CURRENT),
    Rule("fp8_fast_accum", (True,), _BLOCK_SCALES, "fast sums need one scale a tensor, not one a block", _USE_CURRENT),
    Rule("fp8_recipe", ("delayed", "mxfp8", "nvfp4"), (BARE_PARAMETERS,),
         'these use "current" scaling, and only Linear layers use yours', "", Fp8StackWarning, (FP8_PRODUCTS,)),

    # --- what multiplies
    Rule("fp8_format", ("e5m2",), _TE, 'TransformerEngine has "hybrid" and "e4m3" only', 'Use compute="native"'),
    Rule("select", ("auto",), _TE, "it times native layers", 'Use compute="native"'),
    Rule("fp8_fast_accum", (False,), _TE, 'TransformerEngine always sums forward products of "delayed" fast',
         'Use compute="native" or fp8_recipe="current" for precise sums', beside=setting("fp8_recipe", "delayed")),
    *(Rule(option, (), BF16_ASKED, "it is an option of FP8 products", "", Fp8StackWarning)
      for option in ("fp8_format", "fp8_recipe", "fp8_fast_accum", "select")),
    Rule("matmuls", (True,), (*BF16_ASKED, BF16_PRODUCTS), "bare parameters are multiplied as they were", "",
         Fp8StackWarning),
    Rule("offload", ("cpu",), (ON_CPU,), "the states are in host memory already", "", Fp8StackWarning),

    # --- the optimizer
    Rule("optimizer", (), (*_CONVERTED, *RELEASE), "fp8stack has no counterpart of this class",
         f'Use one of {_TORCH_NAMES}, an optimizer of fp8stack.optim, or opt_level="O1"', ModelError,
         (NO_COUNTERPART,)),
    *(Rule(option, (True,), (*_CONVERTED, *RELEASE), f"it needs {why}, which fp8stack's optimizers do not have",
           'Switch it off, or use opt_level="O1"', ModelError)
      for option, why in (("amsgrad", "a third state"), ("differentiable", "a step recorded by autograd"))),
    Rule("step_in_backward", (True,), ("gradients='keep', states='keep'",),
         "only fp8stack's optimizers can step in backward, and yours is left as it is",
         'Use opt_level="O1" or "O2"', beside=(FOREIGN,)),
    Rule("max_grad_norm", (), RELEASE,
         "each gradient is freed before the last one is known, so there is no norm to clip by",
         "Leave one of them out"),
    Rule("step_in_backward", (True,), (SEVERAL_PROCESSES,),
         "each gradient is used before it could be reduced over the processes",
         "Leave it out when training on several GPUs"),
    Rule("step_in_backward", (True,), (ACCUMULATION,), "each gradient is used and freed as it arrives",
         "Leave one of them out"),

    # --- bitsandbytes' optimizers
    Rule("offload", ("cpu",), ON_BITSANDBYTES, "it moves the states of fp8stack's own optimizers",
         'Use optimizer_backend="bitsandbytes-paged" (an optimizer with paged=True), or "fp8stack"'),
    Rule("optimizer_backend", _BNB, setting("states", "fp8", "fp8-lm", "bf16", "fp32"),
         'bitsandbytes keeps states as "8bit"', _USE_OURS),
    Rule("states", ("keep", "fp8", "4bit", "fp8-lm", "bf16"), ON_BITSANDBYTES,
         'bitsandbytes keeps states as "8bit", those of single parameters also as "fp32"', _USE_OURS,
         beside=EIGHT_BITS),
    Rule("optimizer_backend", _BNB, FOUR_BITS,
         "bitsandbytes has no 4-bit optimizer; fp8stack's kernels are used instead", "", Fp8StackWarning),
    Rule("optimizer_backend", ("bitsandbytes-paged",), (ON_CPU,), "paged states lie in managed memory of CUDA",
         'Move the model to a GPU first, or use optimizer_backend="bitsandbytes"', UnsupportedDeviceError),
    Rule("optimizer_backend", ("bitsandbytes-paged",), (IS_SGD,), "bitsandbytes has no paged SGD", _USE_OURS),
    Rule("optimizer", (), (NOT_ON_BITSANDBYTES,), "bitsandbytes has Adam, AdamW, SGD and Lion", _USE_OURS, ModelError),
    Rule("release", (), ON_BITSANDBYTES, "it steps in backward on its own",
         f"Leave that to initialize (step_in_backward=True). {_USE_OURS}", ModelError),
    Rule("momentum", (0,), ON_BITSANDBYTES, "bitsandbytes' SGD8bit needs momentum > 0", _USE_OURS, beside=(IS_SGD,)),
    *(Rule(option, (), ON_BITSANDBYTES, "bitsandbytes' SGD8bit does not have it", _USE_OURS, beside=(IS_SGD,))
      for option in ("nesterov", "dampening")),

    # --- FSDP2
    Rule("step_in_backward", (True,), (FSDP2,),
         "it steps each gradient as it arrives, and FSDP2's arrive before they are reduced", _LEAVE),
    Rule("offload", ("cpu",), (FSDP2,), "it moves whole states",
         f"{_LEAVE}: FSDP2's CPUOffloadPolicy moves parameters and states"),
    Rule("matmuls", (True,), (FSDP2,), "it finds products by their parameters, which FSDP2 replaces in each forward",
         _LEAVE),
    Rule("states", ("fp8-lm",), (FSDP2,), f"{_ONE_SCALE}, which its shards cannot share", _LEAVE),
    Rule("master", ("fp16",), (FSDP2,), f"{_ONE_SCALE}, which its shards cannot share", _LEAVE),
    Rule("optimizer_backend", _BNB, (FSDP2,), "it has no sharded states; fp8stack's own kernels have", _LEAVE),
    Rule("algorithm", ("muon",), (FSDP2,),
         "its direction depends on all of a matrix, which no rank has", "Use AdamW, or O1", ModelError, _CONVERTED),

    # --- DeepSpeed, whose ZeRO makes one flat tensor of the parameters of a group
    Rule("step_in_backward", (True,), (DEEPSPEED,), "DeepSpeed's engine steps", _LEAVE),
    Rule("model", ("DeepSpeedEngine",), (DEEPSPEED,), "it is an engine already, and an engine is made of a bare model",
         "Pass the module that it was made from, before any engine is made", ModelError),
    Rule("optimizer_backend", _BNB, (DEEPSPEED,),
         "fp8stack's own optimizers step there, whose states its checkpoints can hold", _LEAVE),
    *(Rule(option, (value,), (ZERO,),
           f"{_ONE_SCALE}, and ZeRO makes one tensor of all parameters of a group: those of small gradients would "
           "become zero", 'Use block scales: states="8bit", master="split24"')
      for option, value in (("states", "fp8-lm"), ("master", "fp16"))),
    Rule("master", ("split24", "split32", "fp16", "none"), (ZERO_FLOAT32,), "it needs bfloat16 partitions",
         'Set "bf16": {"enabled": true}, ZeRO stage 1 or more and no offload_optimizer, with DeepSpeed 0.18.3 or '
         "later (bf16_master_weights_and_grads), or leave it out for DeepSpeed's float32 masters"),
    Rule("algorithm", ("muon",), (ZERO,),
         "its direction depends on all of a matrix, and ZeRO makes one flat tensor of many",
         "Use AdamW, or ZeRO stage 0", ModelError),

    # --- Lightning and Accelerate
    Rule("offload", ("cpu",), (LIGHTNING,),
         "the Trainer moves the states of optimizers to the device of the module", _LEAVE),
    Rule("step_in_backward", (True,), (LIGHTNING,),
         "the Trainer clips and accumulates gradients between backward and step", _LEAVE),
    Rule("strategy", ("DeepSpeedStrategy",), (LIGHTNING,), "DeepSpeed converts dtypes and steps itself",
         'Leave Fp8Precision or setup() out, put a section "fp8stack" into the config and call '
         "fp8stack.integrations.deepspeed.install()"),
    Rule("strategy", ("FSDPStrategy",), (LIGHTNING,), f"FSDP1: {_FLAT}", "Use ModelParallelStrategy (FSDP2)"),
    Rule("strategy", ("ModelParallelStrategy",), (FABRIC,), "it shards in fabric.setup_module",
         "Call that, build the optimizer, call fp8stack.integrations.fsdp.attach(model.module, optimizer, opt_level), "
         "then fabric.setup_optimizers"),
    Rule("distributed_type", ("FSDP",), (ACCELERATE,), f"FSDP1: {_FLAT}",
         "Use FullyShardedDataParallelPlugin(fsdp_version=2)"),
    Rule("distributed_type", ("MEGATRON_LM",), (ACCELERATE,), "Megatron-LM has layers and an optimizer of its own",
         "Use DDP, FSDP2 or DeepSpeed"),
    Rule("distributed_type", ("XLA",), (ACCELERATE,), "fp8stack has no kernels for XLA devices", "Use CUDA GPUs"),

    # --- wrappers of models ("model": around all of it, "module": around a part)
    Rule("model", WRAPPERS[:4], (INITIALIZE,), "it works with the parameters as they were when it was made",
         "Initialize the bare model, then wrap it", ModelError),
    *(Rule(where, (wrapper,), (FSDP2,), reason, remedy, ModelError)
      for where in ("model", "module")
      for wrapper, reason, remedy in (
          ("FullyShardedDataParallel", f"FSDP1: {_FLAT}", "Shard with fully_shard (FSDP2)"),
          ("DistributedDataParallel", "it keeps whole parameters on every rank",
           "Call fp8stack.initialize on the bare model, wrap it, and fp8stack.comm.register_fp8_hook"),
          ("DeepSpeedEngine", "ZeRO shards parameters in its own way", "Use fp8stack.integrations.deepspeed"))),
    Rule("model", ("OptimizedModule",), (FSDP2,), "its layers are those of the module that was compiled",
         "Pass that one, and compile it in place afterwards: model.compile()", ModelError),
)
# fmt: on


def find_conflicts(
    recipe: Any,
    *places: str,
    optimizer: torch.optim.Optimizer | None = None,
    model: nn.Module | None = None,
) -> Iterator[tuple[Rule, str]]:
    """Yield the rules that a recipe, an optimizer and a model break in `places`, with messages."""
    contexts = {f"{field.name}={getattr(recipe, field.name)!r}" for field in fields(recipe)}
    contexts |= {f"gradients={recipe.gradients!r}, states={recipe.states!r}", *places}
    contexts |= {BARE_PARAMETERS} if recipe.matmuls else set()
    settings = settings_of(recipe)
    if optimizer is not None:
        contexts |= contexts_of_optimizer(optimizer)
    if model is not None:
        settings += wrappers_in(model)
    yield from broken_rules(settings, contexts)
    if optimizer is not None:
        # A recipe that leaves states alone also leaves an optimizer of fp8stack's its own states and masters.
        yield from broken_rules(settings_of_optimizer(optimizer), contexts - {*_KEPT})


def refuse_conflicts(recipe: Any, *places: str, **given: Any) -> None:
    """Raise the error of the first rule that is broken; arguments as of `find_conflicts`."""
    refuse(find_conflicts(recipe, *places, **given))


def idle_options(recipe: Any, *places: str) -> list[str]:
    """Return messages about the options of a recipe that have no effect in `places`."""
    found = find_conflicts(recipe, *places)
    return [message for rule, message in found if rule.error is Fp8StackWarning]


def check_option(option: str, value: Any, *contexts: str) -> None:
    """Raise if `option` cannot have `value` where all of `contexts` hold."""
    refuse(broken_rules([Setting(option, value, f"{option}={value!r}")], contexts))


def refuse(conflicts: Iterable[tuple[Rule, str]]) -> None:
    """Raise the error of the first of `conflicts` that is one."""
    for rule, message in conflicts:
        if issubclass(rule.error, Fp8StackError):
            raise rule.error(message)


def broken_rules(
    settings: Iterable[Setting], contexts: Collection[str]
) -> Iterator[tuple[Rule, str]]:
    """Yield the rules that settings break where all of `contexts` hold, with messages."""
    for (option, value, text), rule in product(settings, RULES):
        if rule.option != option or (rule.values and value not in rule.values):
            continue
        where = next((context for context in rule.contexts if context in contexts), None)
        beside = not rule.beside or any(context in contexts for context in rule.beside)
        if where is not None and beside:
            if rule.error is Fp8StackWarning:
                yield rule, f"{text} has no effect with {where}: {rule.reason}"
            else:
                yield rule, f"{text} does not go with {where}: {rule.reason}. {rule.remedy}."


# --- what recipes, optimizers and models set


def settings_of(recipe: Any) -> list[Setting]:
    """Return the fields of a recipe that differ from their defaults, and the formats of single parameters."""
    result = []
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if field.name not in ("level", "brief", "states_for") and value != field.default:
            result.append(Setting(field.name, value, f"{field.name}={value!r}"))
    for pattern, states, master in recipe.states_for:
        named = f"states_for[{pattern!r}]"
        result.append(Setting("states_for", pattern, named))
        result += settings_of_formats((states, master), where=f"{named}: ")
    return result


def settings_of_formats(*formats: tuple[str, str], where: str = "") -> list[Setting]:
    """Return pairs of states and master as settings, each once; `where` says who set them."""
    each_once = dict.fromkeys(formats)
    pairs = (pair for both in each_once for pair in zip(("states", "master"), both, strict=True))
    return [Setting(name, value, f"{where}{name}={value!r}") for name, value in pairs if value]


def settings_of_optimizer(optimizer: torch.optim.Optimizer) -> list[Setting]:
    """Return the settings of an optimizer that rules look at: class, formats, options of groups, norm to clip by."""
    kind: Any = type(optimizer)
    result = [Setting("optimizer", kind, f"{kind.__module__}.{kind.__qualname__}")]
    if is_fp8stack_optimizer(optimizer):
        ours: Any = optimizer
        result += settings_of_formats((ours.states, ours.master), *ours.overrides.values())
        if ours.release is not None:
            result.append(Setting("release", ours.release, kind.__qualname__))
    for group in optimizer.param_groups:
        result += settings_of_group(group)
        if _is(optimizer, "Muon") and group.get("algorithm", "muon") == "muon":
            result.append(Setting("algorithm", "muon", "Muon"))
    clip = getattr(optimizer, "max_grad_norm", None)
    if clip is not None:
        result.append(Setting("max_grad_norm", clip, f"max_grad_norm={clip!r}"))
    return result


def settings_of_group(group: Mapping[str, Any]) -> list[Setting]:
    """Return the settings of a parameter group that rules look at."""
    given = {"momentum": group["momentum"]} if "momentum" in group else {}
    options = ("amsgrad", "differentiable", "nesterov", "dampening", "states", "master")
    given |= {option: group[option] for option in options if group.get(option)}
    return [Setting(option, value, f"{option}={value!r}") for option, value in given.items()]


def contexts_of_optimizer(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return which of the properties above an optimizer has."""
    foreign = not is_fp8stack_optimizer(optimizer)
    holds = {
        FOREIGN: foreign,
        NO_COUNTERPART: foreign and type(optimizer) not in TORCH_OPTIMIZERS,
        IS_SGD: _is(optimizer, "SGD"),
    }
    return {context for context, true in holds.items() if true}


def is_fp8stack_optimizer(optimizer: object) -> bool:
    """Return whether this is one of fp8stack's optimizers, or of a class derived from one."""
    return any(kind.__module__.startswith("fp8stack.optim") for kind in type(optimizer).__mro__)


def has_counterpart(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer of fp8stack steps as this one does, with all its options."""
    if is_fp8stack_optimizer(optimizer):
        return True
    options = ("amsgrad", "differentiable")
    lacking = any(group.get(option) for group in optimizer.param_groups for option in options)
    return type(optimizer) in TORCH_OPTIMIZERS and not lacking


def _is(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Return whether this is torch's or fp8stack's optimizer of this name."""
    if not is_fp8stack_optimizer(optimizer):
        return type(optimizer) is getattr(torch.optim, name, None)
    return any(kind.__name__ == name for kind in type(optimizer).__mro__)


def wrappers_in(model: nn.Module) -> list[Setting]:
    """Return the wrappers around a model and around parts of it."""
    found = ((name, wrapper_of(module)) for name, module in model.named_modules())
    return [
        Setting("module" if name else "model", kind, f"{name or 'the model'}, wrapped in {kind},")
        for name, kind in found
        if kind
    ]


def wrapper_of(module: nn.Module) -> str:
    """Return which of WRAPPERS a module is, or an empty string."""
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in WRAPPERS), "")
