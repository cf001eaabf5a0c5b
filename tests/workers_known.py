"""Situations of the table of known incompatibilities that need the real libraries, in a process of their own, on CPUs.

Also what of the table can be seen there: that a row is true of the versions that are installed.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
import workers_deepspeed
from torch import nn

from fp8stack import capability_te
from fp8stack.integrations.known import Situation, check
from fp8stack.integrations.known.config import _DTYPES, REMOVED
from fp8stack.levels import recipe_for
from fp8stack.optim import AdamW


def deepspeed_config(stage=2, **more):
    """A configuration with nothing against it."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    zero = more.pop("zero_optimization", {})
    return {**config, **more, "zero_optimization": {**config["zero_optimization"], **zero}}


class Tied(nn.Module):
    """A head that shares its weight with the first layer, and a layer of an odd size."""

    def __init__(self):
        super().__init__()
        self.first, self.odd, self.head = nn.Linear(32, 32), nn.Linear(32, 20), nn.Linear(32, 32)
        self.head.weight = self.first.weight


def te_handler(interval=1):
    """accelerate's own class, which refuses to be made where TransformerEngine is not installed."""
    from accelerate.utils import TERecipeKwargs

    handler = TERecipeKwargs.__new__(TERecipeKwargs)
    handler.interval, handler.override_linear_precision = interval, (False, False, True)
    return handler


def accelerator(handler, config=None):
    """Return a new Accelerator for FP8 with or without DeepSpeed."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin

    AcceleratorState._reset_state(True)
    options = {"mixed_precision": "fp8", "kwargs_handlers": [handler]}
    if config is None:
        return Accelerator(cpu=True, **options)
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), **options)


def trainer(folder, config=None, **options):
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainingArguments

    AcceleratorState._reset_state(True)
    where = {"use_cpu": True} if config is None else {"deepspeed": config}
    model = nn.Linear(16, 16)
    if options.pop("own", False):
        options["optimizers"] = AdamW(model.parameters()), None
    return Trainer(model, TrainingArguments(output_dir=folder, report_to=[], **where), **options)


def without_deepspeed(folder):
    """Yield (id, severity, where, value, situation); first those that accelerate has without DeepSpeed."""
    from accelerate.utils import FullyShardedDataParallelPlugin, MSAMPRecipeKwargs

    driver, model = accelerator(te_handler(2)), Tied()
    situation = Situation(model=model, driver=driver, versions={})
    yield "accelerate-te-tied", "error", "head.weight", "first.weight", situation
    yield "accelerate-te-sizes", "warning", "odd", "32→20", situation
    yield "accelerate-te-options", "warning", "TERecipeKwargs.interval", "2", situation
    driver = accelerator(MSAMPRecipeKwargs())
    situation = Situation(driver=driver)
    yield "accelerate-msamp-scaler", "error", "accelerator.scaler", "GradScaler", situation
    run = trainer(
        folder
    )  # accelerate shards on GPUs only: what it would have there is put in its place
    run.accelerator.te_recipe_handler = te_handler()
    run.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    situation = Situation(driver=run)
    yield "trainer-fsdp1-te", "error", "Trainer.args.fsdp", "FSDP1", situation


def with_deepspeed(folder):
    from accelerate.utils import AORecipeKwargs, MSAMPRecipeKwargs

    config = deepspeed_config()
    situation = Situation(driver=accelerator(te_handler(), config), versions={})
    yield "accelerate-te-recipe", "warning", "kwargs_handlers", "TERecipeKwargs", situation
    driver = accelerator(MSAMPRecipeKwargs(), config)
    situation = Situation(driver=driver)
    yield "accelerate-msamp-section", "warning", "kwargs_handlers", "MSAMPRecipeKwargs", situation
    situation = Situation(driver=driver, versions={"accelerate": "1.10.1"})
    yield "accelerate-fp8-off", "error", "accelerate", "1.10.1", situation
    situation = Situation(driver=accelerator(AORecipeKwargs(), config))
    key = "AORecipeKwargs.config.enable_fsdp_float8_all_gather"
    yield "torchao-float8-all-gather", "error", key, "True", situation
    auto = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    situation = Situation(driver=trainer(folder, auto, own=True))
    yield "trainer-optimizers", "error", "Trainer.optimizers", "fp8stack.optim", situation


def of_models(deepspeed):
    """Those of models and optimizers that a process group is needed to make."""
    import bitsandbytes
    from deepspeed.moe.layer import MoE
    from deepspeed.pipe import PipelineModule
    from torch.distributed.fsdp import fully_shard

    levels = {level: recipe_for(level) for level in ("O0", "O1", "O2")}
    config = deepspeed_config(3)
    with deepspeed.zero.Init(config_dict_or_path=config):
        empty = nn.Linear(32, 32)
    assert empty.weight.shape == (0,)
    situation = Situation(config, empty, recipe=levels["O0"])
    yield "zero-init", "info", "weight", "shape (32, 32), here (0,), and 1 more", situation
    stages = PipelineModule([nn.Linear(4, 4)], num_stages=1)
    for level, severity in (("O0", "warning"), ("O1", "error")):
        situation = Situation(deepspeed_config(1), stages, recipe=levels[level])
        yield "pipeline", severity, "model", "PipelineModule", situation
    experts = nn.Sequential(MoE(16, nn.Linear(16, 16), num_experts=2))
    situation = Situation(deepspeed_config(), experts, recipe=levels["O1"])
    yield "expert-groups", "info", "0", "MoE", situation
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    situation = Situation(deepspeed_config(), wrapped)
    yield "ddp-in-engine", "error", "model", "DistributedDataParallel", situation
    sharded = nn.Linear(64, 64)
    fully_shard(sharded)
    optimizer = bitsandbytes.optim.AdamW8bit(sharded.parameters())
    situation = Situation(model=sharded, optimizer=optimizer)
    yield "bitsandbytes-fsdp2", "error", "optimizer", "AdamW8bit over DTensors", situation
    embedding = nn.Embedding(64, 64)
    overrides = bitsandbytes.optim.GlobalOptimManager.get_instance()
    overrides.register_module_override(embedding, "weight", {"optim_bits": 32})
    optimizer = bitsandbytes.optim.AdamW8bit(embedding.parameters())
    situation = Situation(deepspeed_config(), embedding, optimizer)
    yield "bitsandbytes-override", "warning", "optimizer", "Embedding.weight", situation


IDS = {
    "accelerate-te-tied", "accelerate-te-sizes", "accelerate-te-options", "accelerate-msamp-scaler",
    "trainer-fsdp1-te", "accelerate-te-recipe", "accelerate-msamp-section", "accelerate-fp8-off",
    "torchao-float8-all-gather", "trainer-optimizers", "zero-init", "pipeline", "expert-groups", "ddp-in-engine",
    "bitsandbytes-fsdp2", "bitsandbytes-override",
}  # fmt: skip
"""Rows that are provoked here."""


def expect(id_, severity, where, value, situation):
    """Fail unless the row is found, once for one cause, with what provoked it and the remedy."""
    findings = [f for f in check(situation) if f.row.id == id_ and f.where == where]
    assert len(findings) == 1, (id_, check(situation))
    (finding,) = findings
    assert finding.severity == severity, finding
    for part in (where, value, finding.row.symptom, finding.row.remedy, id_):
        assert part in finding.message, finding.message


def expect_clean(name, situation):
    found = [f for f in check(situation) if f.severity != "info"]
    assert not found, (name, found)


def enter(rank, world, store):
    """Join a group of one rank as launchers set it up; return DeepSpeed."""
    root = (
        Path(__file__).resolve().parents[1]
    )  # whose folder `kernels` transformers takes for its own
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != root]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torchao's steps are compiled otherwise
    return workers_deepspeed.enter(rank, world, store)


def provoke(rank, world, store, folder):
    """Provoke the rows of the real libraries, and show that a clean run of each stays silent."""
    deepspeed = enter(rank, world, store)
    provoked = set()
    for cases in (without_deepspeed(folder), with_deepspeed(folder), of_models(deepspeed)):
        for case in cases:
            expect(*case)
            provoked.add(case[0])
    assert provoked == IDS
    stay_silent(folder)
    workers_deepspeed.leave()


def look_at_te(rank, world, store, folder):
    """Provoke the rows of TransformerEngine's own modules, on a GPU."""
    te = capability_te.load().te
    model = nn.Sequential(te.Linear(32, 24, fuse_wgrad_accumulation=True))
    config = deepspeed_config(3, zero_optimization={"gather_16bit_weights_on_model_save": True})
    found = {f.row.id for f in check(Situation(config, model, versions={}))}
    assert {"te-resume", "te-save-16bit", "te-fused-gradient", "sizes-of-16"} <= found
    with te.fp8_model_init():
        primary = nn.Sequential(te.Linear(32, 32))
    found = {f.row.id for f in check(Situation(deepspeed_config(), primary))}
    assert "te-primary-weights" in found
    plain, versions = nn.Sequential(te.Linear(32, 32)), {"transformer_engine": "2.10"}
    expect_clean("plain weights", Situation(deepspeed_config(), plain, versions=versions))


def stay_silent(folder):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin
    from lightning.pytorch import LightningModule
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from torch.distributed.fsdp import fully_shard

    recipe = recipe_for("O2")
    AcceleratorState._reset_state(True)
    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config())
    driver, model = Accelerator(deepspeed_plugin=plugin), Tied()
    optimizer = AdamW(model.parameters())
    situation = Situation(model=model, optimizer=optimizer, recipe=recipe, driver=driver)
    assert situation.stage == 2, "the config is the Accelerator's"
    expect_clean("accelerate", situation)
    auto = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    run = trainer(folder, auto, optimizer_cls_and_kwargs=(AdamW, {"lr": 1e-3}))
    expect_clean("transformers", Situation(model=run.model, recipe=recipe, driver=run))
    config = DeepSpeedStrategy(stage=2).config
    expect_clean("lightning", Situation(config, LightningModule(), recipe=recipe))
    sharded = nn.Linear(64, 64)
    fully_shard(sharded)
    optimizer = AdamW(sharded.parameters())
    expect_clean("fsdp", Situation(model=sharded, optimizer=optimizer, recipe=recipe))


# --- rows that are true of what is installed


def confirm(rank, world, store, folder):
    """Run into the faults of other libraries that a CPU can show."""
    deepspeed = enter(rank, world, store)
    from deepspeed.runtime import config as theirs

    def start(config, model=None, make=torch.optim.AdamW):
        model = nn.Linear(64, 64) if model is None else model
        return deepspeed.initialize(model=model, optimizer=make(model.parameters()), config=config)[
            0
        ]

    zero = [f"zero_optimization.{key}" for key in theirs._REMOVED_ZERO_CONFIG_KEYS]
    assert sorted([*theirs._REMOVED_TOP_LEVEL_CONFIG_KEYS, *zero]) == sorted(REMOVED)
    with pytest.raises(theirs.DeepSpeedConfigError):
        start(deepspeed_config(amp={}))
    for key in _DTYPES:
        section, _, name = key.rpartition(".")
        value = {section: {name: "fp8", "enabled": True}} if section else {name: "fp8"}
        if section == "data_types":
            del value[section]["enabled"]
        with pytest.raises(ValueError, match="fp8"):
            start(deepspeed_config(**value))
    confirm_torchao(start, folder)
    engine = start(deepspeed_config(0))
    assert {float(entry["step"]) for entry in engine.optimizer.optimizer.state.values()} == {1.0}
    config = deepspeed_config(1, data_types={"grad_accum_dtype": "fp32"})
    assert type(start(config).optimizer).__name__ == "BF16_Optimizer"
    config = deepspeed_config(2, zero_optimization={"elastic_checkpoint": True})
    engine = start(config)
    step(engine, 64)
    engine.save_checkpoint(folder, tag="elastic")
    with pytest.raises(AssertionError):
        start(config).load_checkpoint(folder, tag="elastic")
    confirm_trainer(folder)
    workers_deepspeed.leave()


def step(engine, width):
    engine.backward(engine(torch.randn(2, width).bfloat16()).sum())
    engine.step()


def confirm_torchao(start, folder):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.optim import AdamW8bit

    model = nn.Sequential(nn.Linear(64, 64))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    with pytest.raises(RuntimeError, match=r"Couldn't swap Float8Linear\.weight"):
        start(deepspeed_config(), model)
    for width, quantized in ((256, True), (250, False)):
        engine = start(deepspeed_config(), nn.Linear(width, width), AdamW8bit)
        step(engine, width)
        (state,) = engine.optimizer.optimizer.state.values()
        assert (type(state["exp_avg"]) is not torch.Tensor) == quantized
    engine = start(deepspeed_config(0), make=AdamW8bit)
    step(engine, 64)
    engine.save_checkpoint(folder, tag="torchao")
    with pytest.raises(RuntimeError, match="map_location"):
        start(deepspeed_config(0), make=AdamW8bit).load_checkpoint(folder, tag="torchao")


def confirm_trainer(folder):
    from lightning.pytorch.plugins import DeepSpeedPrecision
    from transformers.integrations.deepspeed import deepspeed_init

    auto = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    run = trainer(folder, auto, own=True)
    assert type(run.optimizer) is AdamW
    assert type(deepspeed_init(run, 1)[0]) is torch.optim.AdamW, "the given one is gone"
    with pytest.raises(ValueError, match="transformer-engine"):
        DeepSpeedPrecision("transformer-engine")
