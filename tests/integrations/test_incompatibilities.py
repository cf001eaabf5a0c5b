"""Known incompatibilities: every row is provoked, and true of what is installed; clean runs stay silent."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from engines import import_deepspeed
from ranks import run_ranks
from torch import nn

from fp8stack import optim
from fp8stack.errors import ConfigError, Fp8StackWarning
from fp8stack.integrations.incompatibilities import ROWS, TrainingRun, check, raise_or_warn
from fp8stack.levels import recipe_for

ROOT = Path(__file__).resolve().parents[2]
LEVELS = O0, O1, O2 = [recipe_for(level) for level in ("O0", "O1", "O2")]
ADAM = optim.AdamW(nn.Linear(64, 64).parameters())


def config_of(stage=2, **more):
    """A configuration with nothing against it, and what is added to it; a key may be dotted."""
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True},
    }  # fmt: skip
    for key, value in more.items():
        *sections, name = key.split(".")
        section = config
        for outer in sections:
            section = section.setdefault(outer, {})
        section[name] = value
    return config


def of_config(key, value, recipe=None, stage=2):
    return TrainingRun(config_of(stage, **{key: value}), recipe=recipe)


def offloaded(recipe=None, force=None, device="cpu", optimizer=ADAM):
    """A run whose states are offloaded, with zero_force_ds_cpu_optimizer at a value, or unset."""
    config = config_of(**{"zero_optimization.offload_optimizer": {"device": device}})
    config[FORCE] = force
    return TrainingRun(config, optimizer=optimizer, recipe=recipe)


ZERO = "zero_optimization."
FORCE = "zero_force_ds_cpu_optimizer"
KEYS = [  # name, severity, key, value, recipe, stage
    ("msamp-section", "warning", "msamp", {"opt_level": "O1"}, None, 2),
    ("universal-checkpoint", "warning", "checkpoint.load_universal", True, O2, 2),
    ("elastic-checkpoint", "error", f"{ZERO}elastic_checkpoint", True, None, 2),
    ("float32-accumulation", "warning", "data_types.grad_accum_dtype", "fp32", None, 1),
    ("zeropp-gradients", "error", f"{ZERO}zero_quantized_gradients", True, O1, 3),
    ("zeropp-weights", "warning", f"{ZERO}zero_quantized_weights", True, O0, 3),
    ("fp16-loss-scaling", "warning", "fp16.enabled", True, O0, 2),
    ("hybrid-engine", "error", "hybrid_engine.enabled", True, O0, 2),
    ("deepcompile", "error", "compile.deepcompile", True, O1, 2),
    ("own-optimizer-paths", "error", f"{ZERO}zenflow", {"topk_ratio": 0.1}, O1, 2),
    ("own-optimizer-paths", "error", f"{ZERO}offload_optimizer.super_offload", True, O2, 3),
    ("own-optimizer-paths", "error", "optimizer.type", "OneBitAdam", O2, 2),
    ("model-parallelism", "error", "tensor_parallel.autotp_size", 2, O0, 2),
    ("model-parallelism", "error", "expert_parallel.enabled", True, O0, 2),
]
OTHERS = {
    "offload-replaces-optimizer", "nvme-states", "torchao-partition", "torchao-stage0-checkpoint", "pipeline",
    "pipeline-products", "bitsandbytes-override",
}  # fmt: skip


def expect(name, severity, where, value, run):
    """Fail unless the row is found, once for one cause, with what provoked it and the remedy."""
    (finding,) = [f for f in check(run) if f.row.name == name and f.where == where]
    assert finding.severity == severity, finding
    for part in (where, value, finding.row.symptom, finding.row.remedy, name):
        assert part in finding.message, finding.message


def expect_clean(run):
    assert not check(run)


@pytest.mark.parametrize("case", KEYS, ids=lambda case: case[0])
def test_rows_about_keys_are_found(case):
    name, severity, key, value, recipe, stage = case
    expect(name, severity, key, json.dumps(value), of_config(key, value, recipe, stage))


def test_rows_about_optimizers_are_found():
    old = TrainingRun(config_of(**{f"{ZERO}cpu_offload": True, FORCE: True}), optimizer=ADAM)
    for value, run in (("true", offloaded(force=True)), ("true by default", offloaded()), ("true", old)):  # fmt: skip
        expect("offload-replaces-optimizer", "error", FORCE, value, run)
    for recipe in (O0, O2):  # the adapters see to it
        expect_clean(offloaded(recipe))
    run = offloaded(force=False, device="nvme")
    expect("nvme-states", "error", f"{ZERO}offload_optimizer.device", '"nvme"', run)
    adam = pytest.importorskip("torchao.optim").AdamW8bit(nn.Linear(16, 16).parameters())
    for name, severity, stage in (
        ("torchao-partition", "warning", 1),
        ("torchao-stage0-checkpoint", "error", 0),
    ):
        run = TrainingRun(config_of(stage), optimizer=adam)
        expect(name, severity, "optimizer", "AdamW8bit", run)


def test_every_row_is_provoked_and_documented():
    assert {case[0] for case in KEYS} | OTHERS == {row.name for row in ROWS}
    documented = (ROOT / "docs/incompatibilities.md").read_text()
    for row in ROWS:
        assert f" (`{row.name}`, {row.severity})\n" in documented
        assert row.symptom.endswith(".")
        assert row.remedy.endswith(".")


# --- rows of the real libraries


def test_with_the_real_libraries(tmp_path):
    for library in ("deepspeed", "bitsandbytes", "torchao"):
        pytest.importorskip(library)
    run_ranks(use_libraries, 1, str(tmp_path))


def use_libraries(rank, folder):
    """Provoke the rows that need a process group, and run into the faults of other libraries that a CPU can show."""
    deepspeed = import_deepspeed()
    import bitsandbytes
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime import config as theirs

    deepspeed.init_distributed("gloo")
    stages = PipelineModule([nn.Linear(4, 4)], num_stages=1)
    for recipe, name, severity in ((O0, "pipeline-products", "warning"), (O1, "pipeline", "error")):
        run = TrainingRun(config_of(1), stages, recipe=recipe)
        expect(name, severity, "model", "PipelineModule", run)
    embedding = nn.Embedding(64, 64)
    overrides = bitsandbytes.optim.GlobalOptimManager.get_instance()
    overrides.register_module_override(embedding, "weight", {"optim_bits": 32})
    optimizer = bitsandbytes.optim.AdamW8bit(embedding.parameters())
    run = TrainingRun(config_of(), embedding, optimizer)
    expect("bitsandbytes-override", "warning", "optimizer", "Embedding.weight", run)

    def start(config):
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    with pytest.raises(theirs.DeepSpeedConfigError):
        start(config_of(amp={}))
    for key in (
        "communication_data_type",
        "data_types.grad_accum_dtype",
        "seq_parallel_communication_data_type",
        "torch_autocast.dtype",
    ):
        enabled = {"torch_autocast.enabled": True} if key.startswith("torch_autocast") else {}
        with pytest.raises(ValueError, match="fp8"):
            start(config_of(**{key: "fp8"}, **enabled))
    engine = start(config_of(1, **{"data_types.grad_accum_dtype": "fp32"}))
    assert type(engine.optimizer).__name__ == "BF16_Optimizer"
    elastic = config_of(**{"zero_optimization.elastic_checkpoint": True})
    engine = start(elastic)
    engine.backward(engine(torch.randn(2, 64).bfloat16()).sum())
    engine.step()
    engine.save_checkpoint(folder, tag="elastic")
    with pytest.raises(AssertionError):
        start(elastic).load_checkpoint(folder, tag="elastic")
    os._exit(0)


# --- silence


@pytest.mark.parametrize(
    ("zero", "stage"),
    [
        (True, 1), (False, 0), (None, 0), ({}, 0), ({"stage": 2}, 2), ({"stage": "auto"}, None), ({"x": 1}, None),
    ],
)  # fmt: skip
def test_the_stage_is_read_in_both_of_deepspeed_s_forms(zero, stage):
    assert TrainingRun({"zero_optimization": zero, "a": 1}).stage == stage
    assert TrainingRun({}).stage is None


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("recipe", LEVELS, ids=lambda recipe: recipe.level)
def test_a_clean_run_stays_silent(stage, recipe):
    model = nn.Sequential(nn.Linear(64, 50), nn.Linear(50, 64))
    for optimizer in (None, torch.optim.AdamW(model.parameters()), ADAM):
        config = config_of(stage, fp8stack={"opt_level": recipe.level})
        expect_clean(TrainingRun(config, model, optimizer, recipe))
    expect_clean(offloaded(recipe, force=False))


def test_a_fault_whose_remedy_is_in_force_is_silent():
    portable = {"checkpoint.load_universal": True, "fp8stack.checkpoint_format": "portable"}
    expect_clean(TrainingRun(config_of(**portable), optimizer=ADAM, recipe=O2))
    full = optim.AdamW(nn.Linear(64, 64).parameters(), states="fp32")
    for optimizer in (full, torch.optim.AdamW([torch.zeros(2)])):
        expect_clean(offloaded(force=False, device="nvme", optimizer=optimizer))
    expect_clean(of_config("msamp", {"enabled": False}))
    unknown = {"zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}}
    for run in (TrainingRun(), TrainingRun(unknown)):
        expect_clean(run)


# --- what is done about findings


def test_errors_raise_once_warnings_warn_each_and_allowed_errors_warn():
    more = {"msamp": {"enabled": True}, "fp16": {"enabled": True}}
    more["hybrid_engine"] = {"enabled": True}
    config = config_of(**{f"{ZERO}elastic_checkpoint": True}, **more)
    findings = check(TrainingRun(config, recipe=O1))
    assert [f.severity for f in findings] == ["error", "error", "warning", "warning"]
    with pytest.warns(Fp8StackWarning) as warned, pytest.raises(ConfigError) as raised:
        raise_or_warn(findings)
    words = r"2 known to fail.*\n- zero_opt.*: true \(elastic-checkpoint\).*Remove the key.*\n- hybrid_engine.*"
    assert re.search(
        words + r"allow=\['elastic-checkpoint', 'hybrid-engine'\]", str(raised.value), re.DOTALL
    )
    assert [str(w.message) for w in warned] == [f.message for f in findings[2:]]
    assert warned[0].filename == __file__
    run = of_config(f"{ZERO}elastic_checkpoint", True)
    with pytest.warns(Fp8StackWarning, match="elastic_checkpoint: true"):
        raise_or_warn(check(run, allow=["elastic-checkpoint"]))
    with pytest.raises(ConfigError, match=r"'elastic-chekpoint'.*\"elastic-checkpoint\""):
        check(run, allow=["elastic-chekpoint"])
