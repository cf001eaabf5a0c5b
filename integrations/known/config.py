"""Known incompatibilities that show in DeepSpeed's configuration alone: keys, dtypes, engines that replace parts."""

from __future__ import annotations

from collections.abc import Iterator

from .situation import Found, Row, Situation, flag

REMOVED = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
    "zero_optimization.mics_hierarchical_params_gather",
    "zero_optimization.mics_shard_size",
    "zero_optimization.zeropp_loco_param",
)
"""Keys that DeepSpeed 0.19.8 refuses."""

_DTYPES = (
    "communication_data_type",
    "data_types.grad_accum_dtype",
    "seq_parallel_communication_data_type",
    "torch_autocast.dtype",
)
_FP8_NAMES = ("fp8", "float8", "e4m3", "e5m2")
_FLOAT32 = ("fp32", "float32", "float", "torch.float32")
_OWN_OPTIMIZERS = ("muon", "onebitadam", "onebitlamb", "zerooneadam")


def _msamp(s: Situation) -> bool:
    return s.at("msamp") is not None and s.at("msamp.enabled") is not False


def _msamp_at_stage_3(s: Situation) -> Iterator[Found]:
    if _msamp(s) and s.stage == 3:
        yield s.found("msamp")


def _msamp_section(s: Situation) -> Iterator[Found]:
    if _msamp(s) and s.stage != 3:
        yield s.found("msamp")


def _bf16_optimizer(s: Situation) -> Iterator[Found]:
    key = "data_types.grad_accum_dtype"
    bf16 = s.half.startswith("bf")
    if s.at(key) in _FLOAT32 and s.stage == 1 and bf16 and s.offload == "none":
        yield s.found(key)


def _fp8_names(s: Situation) -> Iterator[Found]:
    for key in _DTYPES:
        if any(name in str(s.at(key)).lower() for name in _FP8_NAMES):
            yield s.found(key)


def _float32_reduction(s: Situation) -> Iterator[Found]:
    if s.fp8_gradients and s.at("communication_data_type") in _FLOAT32:
        yield s.found("communication_data_type")


def _multiplies(s: Situation) -> bool:
    return s.recipe is not None and s.recipe.compute != "bf16"


def _own_optimizers(s: Situation) -> Iterator[Found]:
    if s.recipe is None or not (s.fp8_gradients or s.quantized_states):
        return
    if s.at("zero_optimization.zenflow") is not None:
        yield s.found("zero_optimization.zenflow")
    if s.at("zero_optimization.offload_optimizer.super_offload") is True:
        yield s.found("zero_optimization.offload_optimizer.super_offload")
    if str(s.at("optimizer.type")).lower() in _OWN_OPTIMIZERS:
        yield s.found("optimizer.type")


def _parallel(s: Situation) -> Iterator[Found]:
    if s.recipe is None:
        return
    if s.at("expert_parallel.enabled") is True:
        yield s.found("expert_parallel.enabled")
    for key in ("tensor_parallel.autotp_size", "sequence_parallel_size"):
        size = s.at(key)
        if isinstance(size, int) and size > 1:
            yield s.found(key)


def _removed(s: Situation) -> Iterator[Found]:
    if not s.older("deepspeed", (0, 19, 8)):
        yield from (s.found(key) for key in REMOVED if s.at(key) is not None)


def _clipping(s: Situation) -> Iterator[Found]:
    if s.fp8_gradients and s.at("gradient_clipping"):
        yield s.found("gradient_clipping")


ROWS = (
    Row(1, "msamp-zero3", "DeepSpeed", "error",
        'MS-AMP ("msamp" section) and ZeRO-3',
        "MS-AMP's scaling tensors have no place in ZeRO-3, where its O1 and O2 crash and its O3 is refused.",
        'Replace the section by "fp8stack": {"opt_level": "O2"}, whose states are plain tensors.',
        "Azure/MS-AMP#182, #130; accelerate DeepSpeedPlugin", _msamp_at_stage_3),
    Row(2, "msamp-section", "DeepSpeed", "warning",
        '"msamp" section without MS-AMP\'s own DeepSpeed',
        "DeepSpeed does not read unknown sections, so training runs without FP8 and says nothing.",
        'Write "fp8stack": {"opt_level": ...} instead: O1 stays O1, O2 and O3 become O2.',
        "deepspeed/runtime/config.py: unknown top-level keys are kept, not checked", _msamp_section),
    Row(26, "float32-accumulation", "DeepSpeed", "warning",
        "float32 gradient accumulation, bf16, ZeRO-1",
        "DeepSpeed takes its BF16_Optimizer then, which keeps another float32 copy of the gradients: 4 bytes a "
        "parameter, more than FP8 gradients save.",
        "Leave data_types.grad_accum_dtype out, or use ZeRO-2.",
        "DeepSpeedEngine._do_optimizer_sanity_check", _bf16_optimizer),
    Row(27, "fp8-dtype-names", "DeepSpeed", "error",
        "FP8 as the name of a DeepSpeed dtype",
        "DeepSpeed knows fp16, bf16 and fp32 there and raises ValueError.",
        'Leave the key out; FP8 gradients are "fp8stack": {"opt_level": "O1"}.',
        "deepspeed/runtime/config.py: get_communication_data_type, DtypeEnum", _fp8_names),
    Row(28, "float32-reduction", "DeepSpeed", "info",
        "communication_data_type fp32 and FP8 gradients",
        "Gradients reach the FP8 reduction as float32 buckets: twice the memory of bf16 ones, as few bytes sent.",
        "It works; leave the key out to save the memory. Accelerate sets it on ROCm.",
        "accelerate DeepSpeedPlugin", _float32_reduction),
    Row(29, "zeropp-gradients", "DeepSpeed", "error",
        "ZeRO++ quantized gradients and FP8 gradients",
        "Two quantizers want the same gradients, and which of them gets them depends on the number of hosts.",
        'Drop zero_quantized_gradients, or use opt_level="O0".',
        "deepspeed/runtime/zero/stage3.py",
        flag("zero_optimization.zero_quantized_gradients", lambda s: s.fp8_gradients)),
    Row(30, "zeropp-weights", "DeepSpeed", "warning",
        "ZeRO++ quantized weights and FP8 layers",
        "Weights are rounded to int8 on their way and to FP8 in the layer: two errors instead of one.",
        'Drop zero_quantized_weights, or multiply in bfloat16: compute="bf16".',
        "deepspeed/runtime/torch_autocast.py; DeepSpeed#4852, #4885",
        flag("zero_optimization.zero_quantized_weights", _multiplies)),
    Row(31, "zeropp-one-host", "DeepSpeed", "warning",
        "ZeRO++ quantized gradients on one host",
        "DeepSpeed quantizes gradients between hosts only; on one it sends them as they are and does not say so.",
        'Drop the key; opt_level="O1" reduces gradients in FP8 on one host too.',
        "deepspeed/runtime/zero/stage3.py",
        flag("zero_optimization.zero_quantized_gradients", lambda s: s.hosts == 1)),
    Row(32, "fp16-loss-scaling", "DeepSpeed", "warning",
        "fp16 and FP8",
        "The loss scale moves the gradients that FP8 scales anyway, float16 ends at 65504, and steps are skipped "
        "while the loss scale is searched.",
        'Use "bf16": {"enabled": true}.',
        "run with fp16: no step is called on overflow",
        flag("fp16.enabled", lambda s: s.recipe is not None)),
    Row(34, "hybrid-engine", "DeepSpeed", "error",
        "hybrid engine (RLHF) and FP8 layers",
        "Its inference containers take layers of exactly the class nn.Linear; FP8 layers are not among them.",
        "Disable hybrid_engine, or train without fp8stack.",
        "deepspeed/runtime/hybrid_engine.py",
        flag("hybrid_engine.enabled", lambda s: s.recipe is not None)),
    Row(35, "deepcompile", "DeepSpeed", "error",
        "DeepCompile and FP8 gradients",
        "DeepCompile reduces gradients inside the compiled graph, where no FP8 reduction is called.",
        'Disable compile.deepcompile (torch.compile of the model is fine), or use opt_level="O0".',
        "DeepSpeedEngine.allreduce_gradients",
        flag("compile.deepcompile", lambda s: s.fp8_gradients)),
    Row(36, "own-optimizer-paths", "DeepSpeed", "error",
        "ZenFlow, SuperOffload, DeepSpeed's Muon or 1-bit optimizers, and O1 or O2",
        "These step with optimizers of their own, or reduce in them, and fp8stack's are not asked. (DeepSpeed has "
        "dropped the 1-bit ones.)",
        'Remove the key and give the optimizer to initialize, or use opt_level="O0".',
        "DeepSpeedEngine._configure_zenflow, super_offload, _configure_basic_optimizer", _own_optimizers),
    Row(50, "model-parallelism", "DeepSpeed", "error",
        "AutoTP, AutoEP or Ulysses sequence parallelism, and fp8stack",
        "DeepSpeed replaces or splits layers after they have become FP8 layers, which loses them or their scales.",
        "Use data parallelism (ZeRO) alone.",
        "DeepSpeedEngine.__init__", _parallel),
    Row(51, "removed-sections", "DeepSpeed", "error",
        "sections that DeepSpeed has removed",
        "DeepSpeed 0.19.8 raises DeepSpeedConfigError at this key.",
        "Delete the key. For amp, use bf16; for compression and quantization of training, the fp8stack section.",
        "deepspeed/runtime/config.py: _reject_removed_config_keys; DeepSpeed#8489", _removed),
    Row(52, "gradient-clipping", "DeepSpeed", "info",
        "gradient_clipping and FP8 gradients",
        "Clipping comes after the reduction, on decoded gradients, and does what it always does.",
        "Nothing to do.",
        "run with gradient_clipping 1.0", _clipping),
)  # fmt: skip
