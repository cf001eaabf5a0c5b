"""The table of known incompatibilities: every row that can be detected is provoked, and clean runs stay silent."""

import logging
from pathlib import Path

import pytest
import torch
from ranks import start_ranks
from torch import nn
from workers_known import (
    IDS,
    confirm,
    deepspeed_config,
    expect,
    expect_clean,
    look_at_te,
    provoke,
)

from fp8stack import capability_te, optim
from fp8stack.errors import ConfigError, Fp8StackWarning
from fp8stack.integrations.known import ROWS, Situation, check, markdown, raise_or_warn
from fp8stack.levels import recipe_for

ROOT = Path(__file__).resolve().parents[2]
O0, O1, O2 = (recipe_for(level) for level in ("O0", "O1", "O2"))


def te_module(name="linear", **attributes):
    """A stand-in for a module of TransformerEngine, which a CPU cannot make; a GPU's test takes the real ones."""
    module = f"transformer_engine.pytorch.module.{name}"
    layer = type("Linear", (nn.Linear,), {"__module__": module})(32, 24)
    for key, value in attributes.items():
        setattr(layer, key, value)
    return nn.Sequential(layer)


def torchao_layer(**options):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = nn.Sequential(nn.Linear(32, 24))
    return convert_to_float8_training(model, config=Float8LinearConfig(**options))


def torchao_optimizer():
    from torchao.optim import AdamW8bit

    return AdamW8bit(nn.Linear(16, 16).parameters())


def float8(first):
    code = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    layers = nn.ParameterList([code, nn.Parameter(torch.zeros(2))])
    return layers if first else nn.ParameterList([layers[1], code])


def primary_weight():
    model = te_module()
    model[0].weight._quantizer = object()
    return model


def zero(stage=2, **section):
    return deepspeed_config(stage, zero_optimization=section)


def offloaded(device, **more):
    return {**zero(offload_optimizer={"device": device}), **more}


def stage_0(**more):
    return Situation(deepspeed_config(0), **more)


def of_config(key, value, recipe=None, stage=2, **more):
    """A configuration with one dotted key."""
    *sections, name = key.split(".")
    section = {name: value}
    for outer in reversed(sections):
        section = {outer: section}
    return Situation(deepspeed_config(stage, **section), recipe=recipe, **more)


ADAM = optim.AdamW(nn.Linear(64, 64).parameters())
UNSET = deepspeed_config(zero_optimization={"offload_optimizer": {"device": "cpu"}})
del UNSET["zero_force_ds_cpu_optimizer"]
QUANTIZED = "zero_optimization.zero_quantized_gradients"
SHARDED = "te-extra-state-dcp"

CASES = [  # id, severity, where, value, how to make the situation
    ("msamp-zero3", "error", "msamp", '"O2"', lambda: of_config("msamp.opt_level", "O2", stage=3)),
    ("msamp-section", "warning", "msamp", '"O1"', lambda: of_config("msamp.opt_level", "O1")),
    ("torchao-float8-all-gather", "error", "0.weight", "WeightWithDynamicFloat8Cast",
     lambda: Situation(zero(), torchao_layer(enable_fsdp_float8_all_gather=True, emulate=True))),
    ("te-primary-weights", "error", "0.weight", "Parameter", lambda: Situation(zero(), primary_weight())),
    ("float8-parameters-zero3", "error", "0", "torch.float8_e4m3fn", lambda: Situation(zero(3), float8(True))),
    ("float8-parameters-zero3", "warning", "1", "torch.float8_e4m3fn", lambda: Situation(zero(3), float8(False))),
    ("offload-replaces-optimizer", "error", "zero_force_ds_cpu_optimizer", "true",
     lambda: Situation(offloaded("cpu", zero_force_ds_cpu_optimizer=True), optimizer=ADAM)),
    ("offload-replaces-optimizer", "error", "zero_force_ds_cpu_optimizer", "true by default",
     lambda: Situation(UNSET, optimizer=ADAM)),
    ("offload-replaces-optimizer", "info", "zero_force_ds_cpu_optimizer", "true by default",
     lambda: Situation(UNSET, optimizer=ADAM, recipe=O0)),
    ("offload-replaces-optimizer", "error", "zero_force_ds_cpu_optimizer", "true",
     lambda: Situation({**zero(cpu_offload=True), "zero_force_ds_cpu_optimizer": True}, optimizer=ADAM)),
    ("offload-replaces-optimizer", "info", "zero_force_ds_cpu_optimizer", "true by default",
     lambda: Situation(UNSET, optimizer=ADAM, recipe=O2)),
    ("torchao-partition", "warning", "optimizer", "AdamW8bit",
     lambda: Situation(zero(1), optimizer=torchao_optimizer())),
    ("torchao-stage0-checkpoint", "error", "optimizer", "AdamW8bit", lambda: stage_0(optimizer=torchao_optimizer())),
    ("stage0-first-step", "warning", "bf16.enabled", "true", stage_0),
    ("stage0-first-step", "info", "bf16.enabled", "true", lambda: stage_0(recipe=O2)),
    ("universal-checkpoint", "warning", "checkpoint.load_universal", "true",
     lambda: of_config("checkpoint.load_universal", True, O2)),
    ("elastic-checkpoint", "error", "zero_optimization.elastic_checkpoint", "true",
     lambda: of_config("zero_optimization.elastic_checkpoint", True)),
    ("nvme-states", "error", "zero_optimization.offload_optimizer.device", '"nvme"',
     lambda: Situation(offloaded("nvme"), optimizer=ADAM)),
    ("float32-accumulation", "warning", "data_types.grad_accum_dtype", '"fp32"',
     lambda: of_config("data_types.grad_accum_dtype", "fp32", stage=1)),
    ("fp8-dtype-names", "error", "communication_data_type", '"fp8"',
     lambda: of_config("communication_data_type", "fp8")),
    ("fp8-dtype-names", "error", "torch_autocast.dtype", '"float8_e4m3fn"',
     lambda: of_config("torch_autocast.dtype", "float8_e4m3fn")),
    ("float32-reduction", "info", "communication_data_type", '"fp32"',
     lambda: of_config("communication_data_type", "fp32", O1)),
    ("zeropp-gradients", "error", QUANTIZED, "true", lambda: of_config(QUANTIZED, True, O1, 3)),
    ("zeropp-weights", "warning", "zero_optimization.zero_quantized_weights", "true",
     lambda: of_config("zero_optimization.zero_quantized_weights", True, O0, 3)),
    ("zeropp-one-host", "warning", QUANTIZED, "true", lambda: of_config(QUANTIZED, True, stage=3, hosts=1)),
    ("fp16-loss-scaling", "warning", "fp16.enabled", "true", lambda: of_config("fp16.enabled", True, O0)),
    ("hybrid-engine", "error", "hybrid_engine.enabled", "true", lambda: of_config("hybrid_engine.enabled", True, O0)),
    ("deepcompile", "error", "compile.deepcompile", "true", lambda: of_config("compile.deepcompile", True, O1)),
    ("own-optimizer-paths", "error", "zero_optimization.zenflow", "topk_ratio",
     lambda: of_config("zero_optimization.zenflow", {"topk_ratio": 0.1}, O1)),
    ("own-optimizer-paths", "error", "zero_optimization.offload_optimizer.super_offload", "true",
     lambda: Situation(zero(3, offload_optimizer={"device": "cpu", "super_offload": True}), recipe=O2)),
    ("own-optimizer-paths", "error", "optimizer.type", '"OneBitAdam"',
     lambda: of_config("optimizer.type", "OneBitAdam", O2)),
    ("te-recomputation", "warning", "0", "transformer_engine",
     lambda: of_config("activation_checkpointing.partition_activations", True, model=te_module())),
    ("te-resume", "warning", "0", "transformer_engine", lambda: Situation(model=te_module(), versions={})),
    ("te-save-16bit", "warning", "0", "transformer_engine",
     lambda: Situation(zero(3, stage3_gather_16bit_weights_on_model_save=True), te_module())),
    ("te-fused-gradient", "error", "0", "fuse_wgrad_accumulation=True",
     lambda: Situation(zero(), te_module(fuse_wgrad_accumulation=True))),
    ("cached-weights-zero3", "warning", "fp8stack.weight_cache", '"fp8"',
     lambda: of_config("fp8stack.weight_cache", "fp8", O0, 3)),
    ("sizes-of-16", "warning", "0", "32→24", lambda: Situation(model=torchao_layer())),
    ("sizes-of-16", "warning", "0", "32→24", lambda: Situation(model=te_module())),
    ("model-parallelism", "error", "tensor_parallel.autotp_size", "2",
     lambda: of_config("tensor_parallel.autotp_size", 2, O0)),
    ("model-parallelism", "error", "expert_parallel.enabled", "true",
     lambda: of_config("expert_parallel.enabled", True, O0)),
    ("removed-sections", "error", "amp", "{}", lambda: of_config("amp", {})),
    ("removed-sections", "error", "zero_optimization.mics_shard_size", "8",
     lambda: of_config("zero_optimization.mics_shard_size", 8)),
    ("gradient-clipping", "info", "gradient_clipping", "1.0", lambda: of_config("gradient_clipping", 1.0, O1)),
]  # fmt: skip


def identify(case):
    return case[0] if isinstance(case, tuple) else None


@pytest.mark.parametrize("case", CASES, ids=identify)
def test_rows_are_found(case):
    *expected, make = case
    expect(*expected, make())


def test_states_of_transformer_engine_under_dtensors(mesh):
    model = te_module()
    weight = torch.distributed.tensor.distribute_tensor(torch.zeros(24, 32), mesh)
    model[0].weight = nn.Parameter(weight)
    expect(SHARDED, "warning", "0", "transformer_engine", Situation(model=model))


def test_rows_of_the_real_libraries_are_found(tmp_path):
    run(provoke, tmp_path)


def test_rows_are_true_of_what_is_installed(tmp_path):
    run(confirm, tmp_path)


def run(work, folder):
    for library in ("deepspeed", "accelerate", "transformers", "lightning", "bitsandbytes"):
        pytest.importorskip(library)
    start_ranks(work, (1, str(folder / "store"), str(folder)), nprocs=1)


@pytest.mark.gpu
@pytest.mark.skipif(not capability_te.installation(), reason="needs TransformerEngine")
def test_rows_of_transformer_engine_itself_are_found(tmp_path):
    # in a process of its own: others' tests may have loaded it with another cuDNN than torch's
    run(look_at_te, tmp_path)


def test_every_row_that_can_be_detected_is_provoked():
    detected = {row.id for row in ROWS if row.detect is not None}
    assert {case[0] for case in CASES} | IDS | {SHARDED} == detected


def test_the_table_is_whole():
    assert [row.number for row in ROWS] == list(range(1, 54))
    assert len({row.id for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert (row.detect is None) == bool(row.undetected), row.id
        for text in (row.combination, row.symptom, row.remedy, row.evidence):
            assert text, row.id
            assert "|" not in text, row.id
        assert row.symptom.endswith((".", ".)")), row.id
        assert row.remedy.endswith("."), row.id


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("recipe", [O0, O1, O2], ids=lambda recipe: recipe.level)
def test_a_clean_configuration_stays_silent(stage, recipe):
    model = nn.Sequential(nn.Linear(64, 50), nn.Linear(50, 64))
    for optimizer in (None, torch.optim.AdamW(model.parameters()), ADAM):
        config = deepspeed_config(stage, fp8stack={"opt_level": recipe.level})
        expect_clean("deepspeed", Situation(config, model, optimizer, recipe, hosts=1))
    config = deepspeed_config(stage, zero_optimization={"offload_optimizer": {"device": "cpu"}})
    expect_clean("offload", Situation(config, model, ADAM, recipe))


def test_clean_layers_of_torchao_stay_silent():
    model = torchao_layer(pad_inner_dim=True)
    expect_clean("torchao", Situation(zero(), model, torch.optim.AdamW(model.parameters())))


def test_nothing_is_known_of_nothing():
    assert check(Situation()) == []
    assert (
        check(Situation({"zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}}))
        == []
    )


def test_keys_that_older_versions_still_have_are_no_errors():
    config = deepspeed_config(elasticity={"enabled": True})
    for version, count in (("0.19.8", 1), ("0.16.4", 0), (None, 1)):
        versions = {} if version is None else {"deepspeed": version}
        assert len(check(Situation(config, versions=versions))) == count


def test_a_fault_behind_us_is_silent():
    """Where the remedy is in force already."""
    portable = deepspeed_config(
        checkpoint={"load_universal": True}, fp8stack={"checkpoint_format": "portable"}
    )
    expect_clean("portable", Situation(portable, optimizer=ADAM, recipe=O2))
    full = optim.AdamW(nn.Linear(64, 64).parameters(), states="fp32")
    expect_clean("float32 states", Situation(offloaded("nvme"), optimizer=full))
    nvme = Situation(offloaded("nvme"), optimizer=torch.optim.AdamW([torch.zeros(2)]))
    expect_clean("torch's states", nvme)
    expect_clean("MS-AMP off", of_config("msamp", {"enabled": False}))


def test_errors_raise_once_warnings_warn_each_and_notes_are_logged(caplog):
    config = deepspeed_config(
        zero_optimization={"elastic_checkpoint": True},
        amp={"enabled": True},
        msamp={"enabled": True},
        fp16={"enabled": True},
        gradient_clipping=1.0,
    )
    findings = check(Situation(config, recipe=O1))
    assert [f.severity for f in findings] == ["error", "error", "warning", "warning", "info"]
    with (
        caplog.at_level(logging.INFO, "fp8stack"),
        pytest.warns(Fp8StackWarning) as warned,
        pytest.raises(ConfigError) as raised,
    ):
        raise_or_warn(findings)
    text = str(raised.value)
    assert "2 known to fail" in text
    assert "21. zero_optimization.elastic_checkpoint: true" in text
    assert '51. amp: {"enabled": true}' in text
    assert "Remove the key" in text
    assert "allow=['elastic-checkpoint', 'removed-sections']" in text
    assert [str(w.message) for w in warned] == [f.message for f in findings[2:4]]
    assert warned[0].filename == __file__
    assert [record.getMessage() for record in caplog.records] == [findings[4].message]


def test_allowed_errors_warn():
    findings = check(of_config("zero_optimization.elastic_checkpoint", True))
    with pytest.warns(Fp8StackWarning, match="elastic_checkpoint: true"):
        raise_or_warn(findings, allow=["elastic-checkpoint"])
    with pytest.raises(ConfigError, match=r"'elastic-chekpoint'.*\"elastic-checkpoint\""):
        raise_or_warn(findings, allow=["elastic-chekpoint"])


def test_the_document_is_the_table():
    assert (ROOT / "docs/incompatibilities.md").read_text() == markdown()
