"""Known incompatibilities of optimizers and of the states that they keep and save."""

from __future__ import annotations

from collections.abc import Iterator

from fp8stack.optim import BlockwiseOptimizer
from fp8stack.tensor import is_sharded

from .situation import Found, Row, Situation, class_of, comes_from, flag


def _replaced(s: Situation) -> Iterator[Found]:
    key = "zero_force_ds_cpu_optimizer"
    if s.offload == "none" or s.at(key) is False or not s.quantized_states:
        return
    if comes_from(s.optimizer, "deepspeed") or (s.optimizer is None and s.at("optimizer")):
        return  # what DeepSpeed makes it does not replace
    if s.at(key) is not None:
        yield s.found(key)
    else:  # fp8stack.integrations.deepspeed sets it, but Accelerate replaces the optimizer before
        given = isinstance(s.optimizer, BlockwiseOptimizer)
        ours = s.driver is None and s.recipe is not None and (given or s.recipe.states != "keep")
        yield Found(key, "true by default", "info" if ours else None)


def _torchao_partition(s: Situation) -> Iterator[Found]:
    if comes_from(s.optimizer, "torchao.optim") and (s.stage or 0) > 0:
        yield Found("optimizer", class_of(s.optimizer))


def _torchao_stage_0(s: Situation) -> Iterator[Found]:
    if comes_from(s.optimizer, "torchao.optim") and s.stage == 0 and s.half:
        yield Found("optimizer", class_of(s.optimizer))


def _first_step(s: Situation) -> Iterator[Found]:
    if s.stage == 0 and s.half:
        yield s.found(s.half)._replace(severity=None if s.recipe is None else "info")


def _universal(s: Situation) -> Iterator[Found]:
    portable = s.at("fp8stack.checkpoint_format") == "portable"
    if s.at("checkpoint.load_universal") is True and s.quantized_states and not portable:
        yield s.found("checkpoint.load_universal")


def _nvme(s: Situation) -> Iterator[Found]:
    if s.offload == "nvme" and s.quantized_states:
        yield s.found("zero_optimization.offload_optimizer.device")


def _bitsandbytes_sharded(s: Situation) -> Iterator[Found]:
    if comes_from(s.optimizer, "bitsandbytes"):
        owned = (p for group in s.optimizer.param_groups for p in group["params"])
        if any(is_sharded(p.data) for p in owned):
            yield Found("optimizer", f"{class_of(s.optimizer)} over DTensors")


def _bitsandbytes_override(s: Situation) -> Iterator[Found]:
    if comes_from(s.optimizer, "bitsandbytes") and (s.stage or 0) > 0:
        overrides = s.optimizer.mng.module_weight_config_triple
        if overrides:
            module, parameter, options = overrides[0]
            yield Found("optimizer", f"{type(module).__name__}.{parameter} overridden: {options}")


ROWS = (
    Row(7, "offload-replaces-optimizer", "DeepSpeed", "error",
        "8-bit optimizer and offload_optimizer, with zero_force_ds_cpu_optimizer on",
        "DeepSpeed refuses the optimizer; under Accelerate and Trainer it is silently replaced by DeepSpeedCPUAdam "
        "with float32 states (and L2 for decoupled weight decay, unless it is an AdamW).",
        'Set "zero_force_ds_cpu_optimizer": false, as fp8stack\'s DeepSpeed adapter does: its optimizers step on CPUs.',
        "accelerate Accelerator._prepare_deepspeed, map_pytorch_optim_to_deepspeed", _replaced),
    Row(17, "torchao-partition", "DeepSpeed", "warning",
        "torchao's low-bit optimizers and ZeRO 1 to 3",
        "A rank's partition whose size is no multiple of 256 gets full-precision states, silently.",
        "Use an optimizer of fp8stack.optim, whose blocks may end anywhere.",
        "torchao/optim/adam.py: _new_buffer", _torchao_partition),
    Row(18, "torchao-stage0-checkpoint", "DeepSpeed", "error",
        "torchao's low-bit optimizers, stage 0, bf16 or fp16",
        "Checkpoints are written but not read: load_checkpoint raises over map_location and tensor subclasses.",
        "Use an optimizer of fp8stack.optim, whose states are plain tensors, or ZeRO 1 to 3.",
        "deepspeed/runtime/state_dict_factory.py", _torchao_stage_0),
    Row(19, "stage0-first-step", "DeepSpeed", "warning",
        "stage 0 with bf16 or fp16",
        "DeepSpeed makes states by a real step on zero gradients: the count of steps starts at 1, and weight decay "
        "is applied once too often.",
        "Use ZeRO-1, which is as good on one GPU; fp8stack's DeepSpeed adapter takes the step back.",
        "FP16_UnfusedOptimizer.initialize_optimizer_states", _first_step),
    Row(20, "universal-checkpoint", "DeepSpeed", "warning",
        "universal checkpoints and quantized states",
        "The converter looks for exp_avg and exp_avg_sq, does not find them, and raises KeyError.",
        'Save with "fp8stack": {"checkpoint_format": "portable"}, which writes float32 moments, and convert that.',
        "deepspeed/checkpoint/ds_to_universal.py; DeepSpeed#8608, #5430, #6470", _universal),
    Row(21, "elastic-checkpoint", "DeepSpeed", "error",
        "elastic_checkpoint, ZeRO 1 and 2",
        "load_checkpoint fails with a bare AssertionError for optimizers that keep no step in their groups, "
        "torch's AdamW too.",
        "Remove the key; to change the number of ranks, use a universal checkpoint.",
        "DeepSpeedZeroOptimizer._restore_step_from_elastic_checkpoint",
        flag("zero_optimization.elastic_checkpoint", lambda s: s.stage in (1, 2))),
    Row(22, "other-world-size", "DeepSpeed", "error",
        "a checkpoint of another number of ranks",
        "Partitions do not match, and DeepSpeed refuses them.",
        "Resume on the same number of ranks, or convert to a universal checkpoint.",
        "Megatron-DeepSpeed#439", undetected="seen when the checkpoint is loaded"),
    Row(23, "nvme-states", "DeepSpeed", "error",
        "states on NVMe and quantized states",
        "The swapper takes every state tensor for one of the partition's size and dtype: codes and scales are "
        "corrupted.",
        'Use "device": "cpu", or leave offload_optimizer out: 8-bit states are a quarter of the size.',
        "deepspeed/runtime/swap_tensor/optimizer_utils.py", _nvme),
    Row(24, "offload-states-call", "DeepSpeed", "info",
        "engine.offload_states() at ZeRO-3",
        "DeepSpeed moves the states of its own FusedAdam only, and raises AssertionError for any other optimizer.",
        "Do not call it at stage 3; ZeRO 1 and 2 take any optimizer.",
        "DeepSpeedZeroOptimizer_Stage3.offload_states", undetected="a call during training"),
    Row(25, "full-optimizer-state", "DeepSpeed", "info",
        "safe_get_full_optimizer_state and quantized states",
        "exp_avg is not found (ValueError, at ZeRO-3 KeyError), and the codes come back as numbers from 0 to 255.",
        "Set portable = True on fp8stack's optimizer: its state_dict() then holds float32 moments.",
        "deepspeed/utils/tensor_fragment.py", undetected="a call during training"),
    Row(47, "bitsandbytes-fsdp2", "FSDP2", "error",
        "bitsandbytes' 8-bit optimizers and FSDP2",
        "The first step raises RuntimeError over mixed torch.Tensor and DTensor.",
        "Use an optimizer of fp8stack.optim, whose states are sharded like their parameters.",
        "bitsandbytes#89", _bitsandbytes_sharded),
    Row(48, "plain-states-dcp", "FSDP2", "error",
        "states as plain local tensors and torch.distributed.checkpoint",
        "It takes plain tensors for replicated ones and gives rank 0's to everybody, without a word.",
        "fp8stack.optim keeps states of sharded parameters as DTensors; do the same in an optimizer of your own.",
        "resumed on two ranks: weights off by 1.65e-2",
        undetected="a design rule of fp8stack's own optimizers, held by its tests"),
    Row(49, "bitsandbytes-override", "DeepSpeed", "warning",
        "bitsandbytes' overrides of single parameters and ZeRO 1 to 3",
        "ZeRO steps a flat partition in the place of the parameters, and the override (Trainer's 32 bits for "
        "embeddings) is lost.",
        'Use fp8stack\'s O2 with "states_for": {"*embed*": "fp32"}: its adapter makes groups of them before ZeRO does.',
        "bitsandbytes GlobalOptimManager; transformers Trainer.create_optimizer", _bitsandbytes_override),
)  # fmt: skip
