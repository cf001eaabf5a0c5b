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

Limits: recipes check themselves with this module, so it imports nothing of fp8stack but the errors, and no torch. It
recognizes optimizers and wrappers by the names of their classes, and recipes by the names of their fields.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import ConfigError, Fp8StackError, Fp8StackWarning, ModelError, UnsupportedDeviceError

if TYPE_CHECKING:
    import torch
    from torch import nn

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

TORCH_OPTIMIZERS = ("Adam", "AdamW", "SGD", "Muon")  # torch has Muon from 2.9 on
"""The exact types that O2 converts. A subclass may do anything in its step, so it is not taken for its base."""

UNCONVERTED = ("amsgrad", "differentiable")
"""Options of torch's optimizers that fp8stack's do not have: a third state, and steps recorded by autograd."""

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
_TE = setting("compute", "te")
ON_BITSANDBYTES = setting("optimizer_backend", *_BNB)
RELEASE = setting("step_in_backward", True)
EIGHT_BITS = setting("states", "8bit")
_BF16_ASKED = setting("compute", "bf16")
_KEPT = setting("states", "keep")
_CONVERTED = setting("states", "8bit", "fp8", "4bit", "fp8-lm", "bf16", "fp32")
_BLOCK_SCALES = setting("fp8_recipe", "blockwise", "mxfp8", "nvfp4")

_FLAT = "FSDP1: it joins parameters to flat vectors, which have no rows to make blocks of"
_TORCH_NAMES = ", ".join(f"torch.optim.{name}" for name in TORCH_OPTIMIZERS)
_USE_CURRENT = 'Leave it out, or use fp8_recipe="current"'
_USE_NATIVE = 'Use compute="native"'
_USE_OURS = 'Use optimizer_backend="fp8stack", or an optimizer of fp8stack.optim itself'
_LEAVE = "Leave it out"

# fmt: off
RULES = (
    # --- one option of a recipe and another
    *(Rule(option, (), _KEPT, "the optimizer's states are left alone", 'Use opt_level="O2"')
      for option in ("states_for", "offload", "optimizer_backend")),
    Rule("master", (), _KEPT, "the optimizer is left as it is, so a master has no place to be kept",
         'Use master="keep", or states="fp32" for float32 states beside it'),
    *(Rule(option, (), (*setting("fp8_recipe", "auto", "current", "tokenwise", "rowwise"), *_BLOCK_SCALES),
           "it belongs to delayed scaling, and other scales keep no history", f'{_LEAVE}, or use fp8_recipe="delayed"')
      for option in ("fp8_margin", "amax_history_len", "amax_compute_algo")),
    Rule("fp8_format", ("e5m2",), _BLOCK_SCALES, "that is E4M3 throughout: block scales replace the range of E5M2",
         _USE_CURRENT),
    Rule("fp8_fast_accum", (True,), _BLOCK_SCALES, "fast sums need one scale a tensor, not one a block", _USE_CURRENT),
    Rule("fp8_recipe", ("delayed", "mxfp8", "nvfp4"), (BARE_PARAMETERS,),
         'these use "current" scaling, and only Linear layers use yours', "", Fp8StackWarning, (FP8_PRODUCTS,)),

    # --- what multiplies
    Rule("fp8_format", ("e5m2",), _TE, 'TransformerEngine has "hybrid" and "e4m3" only', _USE_NATIVE),
    Rule("fp8_fast_accum", (False,), _TE, 'TransformerEngine always sums forward products of "delayed" fast',
         f'{_USE_NATIVE} or fp8_recipe="current" for precise sums', beside=setting("fp8_recipe", "delayed")),
    Rule("wgrad", ("bf16",), _TE, "TransformerEngine makes all products of a layer alike", _USE_NATIVE),
    *(Rule(option, (), _BF16_ASKED, "it is an option of FP8 products", "", Fp8StackWarning)
      for option in ("fp8_format", "fp8_recipe", "fp8_fast_accum", "select", "head", "first_last", "wgrad",
                     "precision_for")),
    Rule("matmuls", (True,), (*_BF16_ASKED, BF16_PRODUCTS), "bare parameters are multiplied as they were", "",
         Fp8StackWarning),
    Rule("offload", ("cpu",), (ON_CPU,), "the states are in host memory already", "", Fp8StackWarning),

    # --- the optimizer
    Rule("optimizer", (), (*_CONVERTED, *RELEASE), "fp8stack has no counterpart of this class",
         f'Use one of {_TORCH_NAMES}, an optimizer of fp8stack.optim, or opt_level="O1"', ModelError,
         (NO_COUNTERPART,)),
    *(Rule(option, (True,), (*_CONVERTED, *RELEASE), "fp8stack's optimizers do not have it",
           'Switch it off, or use opt_level="O1"', ModelError) for option in UNCONVERTED),
    Rule("step_in_backward", (True,), ("gradients='keep', states='keep'",),
         "only fp8stack's optimizers can step in backward, and yours is left as it is",
         'Use opt_level="O1" or "O2"', beside=(FOREIGN,)),
    Rule("max_grad_norm", (), RELEASE, "gradients are freed before the last is known, so there is no norm to clip by",
         "Leave one of them out"),
    Rule("step_in_backward", (True,), (SEVERAL_PROCESSES, ACCUMULATION, FSDP2, DEEPSPEED, LIGHTNING),
         "each gradient is used and freed as it arrives, before it is reduced, summed or clipped", _LEAVE),

    # --- bitsandbytes' optimizers
    Rule("offload", ("cpu",), ON_BITSANDBYTES, "it moves the states of fp8stack's own optimizers",
         'Use optimizer_backend="bitsandbytes-paged" (an optimizer with paged=True), or "fp8stack"'),
    Rule("optimizer_backend", _BNB, setting("states", "fp8", "fp8-lm", "bf16", "fp32"),
         'bitsandbytes keeps states as "8bit"', _USE_OURS),
    Rule("states", ("keep", "fp8", "4bit", "fp8-lm", "bf16"), ON_BITSANDBYTES,
         'bitsandbytes keeps states as "8bit", those of single parameters also as "fp32"', _USE_OURS,
         beside=EIGHT_BITS),
    Rule("optimizer_backend", _BNB, setting("states", "4bit"),
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

    # --- FSDP2, and DeepSpeed, whose ZeRO makes one flat tensor of the parameters of a group
    Rule("offload", ("cpu",), (FSDP2, LIGHTNING), "FSDP2 and Lightning's Trainer move an optimizer's states themselves",
         f"{_LEAVE}: FSDP2's CPUOffloadPolicy moves parameters and states"),
    Rule("frozen", ("fp8",), (FSDP2, DEEPSPEED), "it shards or copies parameters as plain numbers",
         f"{_LEAVE}: under DDP a base in FP8 is whole on every rank"),
    Rule("matmuls", (True,), (FSDP2,), "it finds products by their parameters, which FSDP2 replaces in each forward",
         _LEAVE),
    *(Rule(option, (value,), (FSDP2, ZERO),
           "it keeps one scale for a whole tensor: shards cannot share it, and in ZeRO's tensor of many parameters "
           "small gradients become zero", 'Use block scales: states="8bit", master="split24"')
      for option, value in (("states", "fp8-lm"), ("master", "fp16"))),
    Rule("optimizer_backend", _BNB, (FSDP2, DEEPSPEED), "only fp8stack's own states can be sharded and saved there",
         _LEAVE),
    *(Rule("algorithm", ("muon",), (place,), "its direction depends on all of a matrix, which no rank has",
           f"Use AdamW, or {other}", ModelError, beside)
      for place, other, beside in ((FSDP2, "O1", _CONVERTED), (ZERO, "ZeRO stage 0", ()))),
    Rule("master", ("split24", "split32", "fp16", "none"), (ZERO_FLOAT32,), "it needs bfloat16 partitions",
         'Set "bf16": {"enabled": true}, ZeRO stage 1 or more and no offload_optimizer, with DeepSpeed 0.18.3 or '
         "later (bf16_master_weights_and_grads), or leave it out for DeepSpeed's float32 masters"),

    # --- Lightning and Accelerate
    Rule("strategy", ("DeepSpeedStrategy",), (LIGHTNING,), "DeepSpeed converts dtypes and steps itself",
         'Leave Fp8Precision or setup() out, put a section "fp8stack" into the config and call '
         "fp8stack.integrations.deepspeed.install()"),
    Rule("strategy", ("FSDPStrategy",), (LIGHTNING,), _FLAT, "Use ModelParallelStrategy (FSDP2)"),
    Rule("strategy", ("ModelParallelStrategy",), (FABRIC,), "it shards in fabric.setup_module",
         "Call that, build the optimizer, call fp8stack.integrations.fsdp.attach(model.module, optimizer, opt_level), "
         "then fabric.setup_optimizers"),
    Rule("distributed_type", ("FSDP",), (ACCELERATE,), _FLAT, "Use FullyShardedDataParallelPlugin(fsdp_version=2)"),
    Rule("distributed_type", ("MEGATRON_LM", "XLA"), (ACCELERATE,), "it has layers or devices of its own",
         "Use DDP, FSDP2 or DeepSpeed on CUDA GPUs"),

    # --- wrappers of models ("model": around all of it, "module": around a part)
    Rule("model", WRAPPERS[:4], (INITIALIZE, DEEPSPEED),
         "it works with the parameters as they were when it was made", "Pass the bare model, then wrap it", ModelError),
    *(Rule(where, WRAPPERS[:4], (FSDP2,), "it keeps the parameters in its own way", "Shard with fully_shard (FSDP2)",
           ModelError) for where in ("model", "module")),
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
    contexts |= {BARE_PARAMETERS} if recipe.matmuls is True else set()
    settings = settings_of(recipe)
    if optimizer is not None:
        contexts |= {IS_SGD} if _is(optimizer, "SGD") else set()
        if not _is_ours(optimizer):
            known = any(_is(optimizer, name) for name in TORCH_OPTIMIZERS)
            contexts |= {FOREIGN} if known else {FOREIGN, NO_COUNTERPART}
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
    refuse(broken_rules([_set(option, value)], contexts))


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


def _set(option: str, value: Any, where: str = "") -> Setting:
    return Setting(option, value, f"{where}{option}={value!r}")


def settings_of(recipe: Any) -> list[Setting]:
    """Return the fields of a recipe that differ from their defaults, and the formats of single parameters."""
    defaults = {field.name: field.default for field in fields(recipe)}
    own = {n: v for n, v in vars(recipe).items() if n not in ("level", "states_for")}
    result = [_set(name, value) for name, value in own.items() if value != defaults[name]]
    for pattern, states, master in recipe.states_for:
        named = f"states_for[{pattern!r}]"
        result.append(Setting("states_for", pattern, named))
        result += _formats(states, master, f"{named}: ")
    return result


def _formats(states: str, master: str, where: str = "") -> list[Setting]:
    both = {"states": states, "master": master}
    return [_set(name, value, where) for name, value in both.items() if value]


def settings_of_optimizer(optimizer: torch.optim.Optimizer) -> list[Setting]:
    """Return the settings of an optimizer that rules look at: class, formats, options of groups, norm to clip by."""
    kind: Any = type(optimizer)
    result = [Setting("optimizer", kind, f"{kind.__module__}.{kind.__qualname__}")]
    if _is_ours(optimizer):
        ours: Any = optimizer
        formats = [(ours.states, ours.master), *ours.overrides.values()]
        for states, master in dict.fromkeys(formats):  # each once, in this order
            result += _formats(states, master)
        if ours.release is not None:
            result.append(Setting("release", ours.release, kind.__qualname__))
    for group in optimizer.param_groups:
        result += settings_of_group(group)
        if _is(optimizer, "Muon") and group.get("algorithm", "muon") == "muon":
            result.append(Setting("algorithm", "muon", "Muon"))
    clip = getattr(optimizer, "max_grad_norm", None)
    return result if clip is None else [*result, _set("max_grad_norm", clip)]


def settings_of_group(group: Mapping[str, Any]) -> list[Setting]:
    """Return the settings of a parameter group that rules look at."""
    options = (*UNCONVERTED, "nesterov", "dampening", "states", "master")
    given = [_set(option, group[option]) for option in options if group.get(option)]
    return [_set("momentum", group["momentum"]), *given] if "momentum" in group else given


def _is_ours(optimizer: object) -> bool:
    """Return whether this is one of fp8stack's optimizers, or of a class derived from one."""
    return any(kind.__module__.startswith("fp8stack.optim") for kind in type(optimizer).__mro__)


def _is(optimizer: torch.optim.Optimizer, name: str) -> bool:
    """Return whether this is torch's or fp8stack's optimizer of this name."""
    own = type(optimizer)
    if not _is_ours(optimizer):
        return own.__name__ == name and f"{own.__module__}.".startswith("torch.optim.")
    return any(kind.__name__ == name for kind in own.__mro__)


def wrappers_in(model: nn.Module) -> list[Setting]:
    """Return the wrappers around a model and around parts of it; raise ModelError for what is no module."""
    from torch import nn  # here, as the program answers --help before torch is imported

    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    result = []
    for name, module in model.named_modules():
        found = next((k.__name__ for k in type(module).__mro__ if k.__name__ in WRAPPERS), None)
        if found:
            text = f"{name or 'the model'}, wrapped in {found},"
            result.append(Setting("module" if name else "model", found, text))
    return result
