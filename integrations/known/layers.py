"""Known incompatibilities of models: layers and parameters of other FP8 libraries, and how a model is wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8stack.tensor import is_sharded

from .situation import Found, Row, Situation, class_of, comes_from, first

_TE = "transformer_engine"


def _te_modules(s: Situation) -> Iterator[tuple[str, str]]:
    """Yield (name, class) of modules of TransformerEngine's own, not of fp8stack's layers."""
    yield from ((name, class_of(m)) for name, m in s.modules() if comes_from(m, _TE))


def _all_gather(s: Situation) -> Iterator[Found]:
    if not s.config:
        return
    cast = ((n, type(p).__name__) for n, p in s.parameters() if hasattr(p, "fsdp_pre_all_gather"))
    yield from first(cast)
    backend, handler = s.accelerate_fp8
    if backend == "AO" and getattr(handler.config, "enable_fsdp_float8_all_gather", False):
        yield Found("AORecipeKwargs.config.enable_fsdp_float8_all_gather", "True")


def _primary_weights(s: Situation) -> Iterator[Found]:
    if s.config:
        yield from first(
            (name, class_of(p))
            for name, p in s.parameters()
            if comes_from(p, _TE) or hasattr(p, "_quantizer")
        )


def _float8(s: Situation) -> Iterator[Found]:
    if s.stage != 3:
        return
    dtypes = [(name, str(p.dtype)) for name, p in s.parameters()]
    for found in first(pair for pair in dtypes if pair[1].startswith("torch.float8")):
        yield found._replace(severity=None if found.where == dtypes[0][0] else "warning")


def _partitioned(s: Situation) -> Iterator[Found]:
    if s.recipe is not None:
        yield from first(
            (name, f"shape {tuple(p.ds_shape)}, here {tuple(p.shape)}")
            for name, p in s.parameters()
            if hasattr(p, "ds_id")
        )


def _pipeline(s: Situation) -> Iterator[Found]:
    if s.recipe is not None and comes_from(s.model, "deepspeed.runtime.pipe"):
        yield Found("model", class_of(s.model), None if s.fp8_gradients else "warning")


def _recomputed(s: Situation) -> Iterator[Found]:
    modules = list(_te_modules(s))
    section = s.at("activation_checkpointing") or {}  # Lightning writes one with nothing on
    if modules and (any(section.values()) or getattr(s.model, "is_gradient_checkpointing", False)):
        yield from first(iter(modules))


def _te_resume(s: Situation) -> Iterator[Found]:
    if not s.older(_TE, (2, 18)):
        yield from first(_te_modules(s))


def _te_sharded(s: Situation) -> Iterator[Found]:
    if any(is_sharded(p.data) for _, p in s.parameters()):
        yield from first(_te_modules(s))


def _te_saved(s: Situation) -> Iterator[Found]:
    keys = ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save")
    if s.stage == 3 and any(s.at(f"zero_optimization.{key}") is True for key in keys):
        yield from first(_te_modules(s))


def _fused_gradient(s: Situation) -> Iterator[Found]:
    if s.config:
        yield from first(
            (name, "fuse_wgrad_accumulation=True")
            for name, m in s.modules()
            if getattr(m, "fuse_wgrad_accumulation", False)
        )


def _cached_weights(s: Situation) -> Iterator[Found]:
    if s.stage == 3 and s.at("fp8stack.weight_cache") not in (None, "off"):
        yield s.found("fp8stack.weight_cache")


def _sizes(s: Situation) -> Iterator[Found]:
    yield from first(
        (name, f"{class_of(m)} {m.in_features}→{m.out_features}")
        for name, m in s.modules()
        if _needs_16(m) and (m.in_features % 16 or m.out_features % 16)
    )


def _needs_16(module: Any) -> bool:
    """Whether a layer of another library multiplies in FP8 without padding."""
    if comes_from(module, "torchao.float8") and hasattr(module, "config"):
        return not (module.config.pad_inner_dim or module.config.emulate)
    return comes_from(module, _TE) and hasattr(module, "in_features")


def _wrapped(s: Situation) -> Iterator[Found]:
    if s.config and comes_from(s.model, "torch.nn.parallel.distributed"):
        yield Found("model", class_of(s.model))


def _experts(s: Situation) -> Iterator[Found]:
    if s.fp8_gradients and s.config:
        yield from first((n, class_of(m)) for n, m in s.modules() if comes_from(m, "deepspeed.moe"))


ROWS = (
    Row(3, "torchao-float8-all-gather", "DeepSpeed", "error",
        "torchao's enable_fsdp_float8_all_gather, and DeepSpeed",
        "DeepSpeed moves the model to its device and fails: \"Couldn't swap Float8Linear.weight\". Accelerate's "
        "AORecipeKwargs sets the option by default.",
        "Use Float8LinearConfig(enable_fsdp_float8_all_gather=False), or fp8stack's layers.",
        "run with torchao 0.18; accelerate#3831", _all_gather),
    Row(4, "te-primary-weights", "DeepSpeed", "error",
        "TransformerEngine's quantized_model_init (weights that are FP8), and DeepSpeed",
        "DeepSpeed looks at weights as bytes and points them into its flat buffers; a quantized weight takes a copy "
        "instead, and the master is never seen again.",
        "Build the modules without quantized_model_init; with fp8stack, from plain nn.Linear.",
        "TransformerEngine float8_tensor.py; TransformerEngine#1135, #1188", _primary_weights),
    Row(5, "float8-parameters-zero3", "DeepSpeed", "error",
        "parameters of a float8 dtype, and ZeRO-3",
        'Partitioning fails: on GPUs with "Invalid data type" where the model\'s first parameter is one, in gloo with '
        '"Invalid scalar type". (A warning where the first is not.)',
        "Make them buffers, or use ZeRO-2.",
        "deepspeed/runtime/zero/partition_parameters.py; run on two ranks", _float8),
    Row(6, "zero-init", "DeepSpeed", "info",
        "a model built under deepspeed.zero.Init, and FP8 layers",
        "Its parameters are empty here, so layers that are made anew copy nothing, and some new among old ones fail "
        "in deepspeed.initialize.",
        "Nothing to do: fp8stack changes the class of a layer and keeps its parameters. Make layers of other libraries "
        "inside deepspeed.zero.GatheredParameters, all of them.",
        "DeepSpeed#4095; accelerate/utils/transformer_engine.py", _partitioned),
    Row(33, "pipeline", "DeepSpeed", "error",
        "DeepSpeed's pipeline engine",
        "It reduces gradients itself and forbids ZeRO 2 and 3; hangs with FP8 layers have been reported. (A warning at "
        "O0.)",
        'Use ZeRO without pipeline stages, or opt_level="O0".',
        "deepspeed/runtime/pipe/engine.py; TransformerEngine#1006", _pipeline),
    Row(37, "te-recomputation", "TransformerEngine", "warning",
        "activation checkpointing around TransformerEngine's modules",
        "Recomputation runs outside of its autocast, so in bfloat16, and delayed scaling counts values twice.",
        "Use te.checkpoint, or fp8stack's layers, which enter the autocast themselves.",
        "TransformerEngine#415, #1190", _recomputed),
    Row(38, "te-resume", "TransformerEngine", "warning",
        "checkpoints of TransformerEngine's modules with delayed scaling, 2.18 and later",
        'Loading raises "Refusing to load pickled extra state".',
        "Use a recipe without history (current or block scaling), or fp8stack's layers, which save no extra state.",
        "transformer_engine/pytorch/_extra_state.py", _te_resume),
    Row(39, "te-extra-state-dcp", "FSDP2", "warning",
        "torch.distributed.checkpoint of TransformerEngine's modules",
        "Loading fails over the size of _extra_state, which depends on the recipe and the step.",
        "Leave _extra_state out of what is saved, or use fp8stack's layers, which have none.",
        "TransformerEngine#1860", _te_sharded),
    Row(40, "te-save-16bit", "DeepSpeed", "warning",
        "save_16bit_model of TransformerEngine's modules at ZeRO-3",
        "It writes parameters and buffers only: histories of delayed scaling are lost, and a strict load misses keys.",
        "Use a recipe without history, or fp8stack's layers.",
        "DeepSpeedEngine._zero3_consolidated_16bit_state_dict", _te_saved),
    Row(41, "te-fused-gradient", "DeepSpeed", "error",
        "TransformerEngine's fuse_wgrad_accumulation, and DeepSpeed",
        "The gradient goes to main_grad and none to autograd: ZeRO's hooks never run, or reduce zeros.",
        "Build the modules with fuse_wgrad_accumulation=False.",
        "transformer_engine/pytorch/module/linear.py", _fused_gradient),
    Row(42, "cached-weights-zero3", "DeepSpeed", "warning",
        "FP8 weights that are kept until the step, and ZeRO-3",
        "Every rank keeps the codes of whole weights, up to 2 bytes a parameter, which undoes the partitioning.",
        'Leave "weight_cache" out: the DeepSpeed adapter turns it off at stage 3. Leave is_first_microbatch of '
        "TransformerEngine's modules at None.",
        "run with ZeRO-3; transformer_engine/pytorch/module/linear.py", _cached_weights),
    Row(43, "autocast-disabled", "DeepSpeed", "warning",
        "torch.autocast around an engine without a torch_autocast section",
        "DeepSpeed disables it inside the forward, with one warning.",
        'Use "torch_autocast": {"enabled": true} in the config, or bf16.',
        "deepspeed/runtime/torch_autocast.py", undetected="seen during training only"),
    Row(44, "sizes-of-16", "torchao", "warning",
        "FP8 layers of torchao or TransformerEngine with sizes that are no multiple of 16",
        "The product raises an error at the first step, or the layer stays in bfloat16.",
        "Use fp8stack's layers, which pad (pad=\"auto\"), or torchao's pad_inner_dim=True, or leave the layer out.",
        "accelerate/utils/ao.py; lightning/fabric/plugins/precision/transformer_engine.py", _sizes),
    Row(45, "ddp-in-engine", "DeepSpeed", "error",
        "a model in DistributedDataParallel given to DeepSpeed",
        "DeepSpeed reduces gradients itself; communication hooks of DDP have no effect on its engine.",
        'Give it the bare model; "fp8stack": {"opt_level": "O1"} reduces in FP8 there.',
        "DeepSpeedEngine.allreduce_bucket", _wrapped),
    Row(53, "expert-groups", "DeepSpeed", "info",
        "DeepSpeed's mixture of experts, and FP8 gradients",
        "Gradients of experts are reduced in FP8 over process groups of their own, and divided as DeepSpeed does.",
        "Nothing to do: compared with DeepSpeed's own on two ranks.",
        "deepspeed/runtime/zero/stage_1_and_2.py; run on two ranks", _experts),
)  # fmt: skip
