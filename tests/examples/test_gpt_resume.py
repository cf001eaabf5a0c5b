"""A run that is stopped goes on with the same bits: at every level, on other ranks, and when it is killed."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import workers_gpt
from gpt import checkpoints
from gpt.runs import list_runs
from gpt.trainer import Trainer
from ranks import start_ranks
from workers_gpt import (
    RANKS,
    assert_near,
    check_one_rank,
    check_ranks,
    configure,
    resume,
    step_of,
    train,
    write_text,
)

from fp8stack import capability
from fp8stack.errors import CheckpointError, ConfigError, Fp8StackWarning

OPTIONS = [
    {"opt_level": "off"},
    {"opt_level": "O0"},
    {"opt_level": "O1"},
    {"opt_level": "O2"},
    {"opt_level": "O2", "optimizer_bits": 4},
    {"opt_level": "O2", "fp8_recipe": "delayed", "amax_history_len": 2},
    {"opt_level": "O2", "fuse": True},
    {"opt_level": "O1", "fuse": True, "fp8_recipe": "delayed", "amax_history_len": 2},
    {"opt_level": "off", "optimizer_bits": 8},
    {"opt_level": "off", "compute_dtype": "float16"},
    {"opt_level": "O2", "compute_dtype": "float32", "micro_batch": "auto", "max_batch_size": 3},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt")
    write_text(folder)
    return folder


@pytest.fixture
def order_restored(monkeypatch):
    """PyTorch's algorithms and the environment are those of before once a test is done."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # to be noted as changed
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def checkpoint(folder, options, step=2):
    run = next((folder / "runs").glob(f"{options['run_name']}-*"))
    return next(run.glob(f"checkpoints*/step_{step:08d}"))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_a_resumed_run_has_the_losses_of_one_that_went_on(folder, options):
    options = {**options, "run_name": "-".join(map(str, options.values()))}
    losses = train(folder, **options)
    assert len(losses) == 4
    path = checkpoint(folder, options)
    expected = "checkpoints" if options["opt_level"] == "off" else "checkpoints_fp8"
    assert path.parent.name == expected
    torch.manual_seed(99)
    assert resume(folder, path, **options) == losses


@pytest.mark.usefixtures("order_restored")
def test_a_run_that_goes_on_as_it_was_keeps_its_micro_batch(folder):
    options = {"opt_level": "O2", "micro_batch": "auto", "run_name": "auto"}
    losses = train(folder, **options, max_batch_size=3)
    path = checkpoint(folder, options)
    cases = [{"opt_level": "O1"}, {"seq_len": 8}]
    for changes, micro in (({}, 2), *((changes, 4) for changes in cases)):
        again = resume(folder, path, **{**options, **changes}, max_batch_size=8)
        level = changes.get("opt_level", "O2").lower()
        facts = json.loads((folder / "again" / f"auto-fp8-{level}" / "run.json").read_text())
        assert facts["micro_batch"] == micro
        assert changes or again == losses


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["off", "O0", "O1", "O2"])
def test_a_resumed_run_has_the_losses_of_one_that_went_on_a_gpu(folder, level):
    options = {
        "opt_level": level,
        "device": "cuda",
        "micro_batch": "auto",
        "run_name": f"gpu-{level}",
    }
    losses = train(folder, **options)
    assert resume(folder, checkpoint(folder, options), **options) == losses
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("order_restored")
def test_a_deterministic_run_adds_up_in_one_order(folder, monkeypatch):
    options = {"opt_level": "O2", "run_name": "ordered", "deterministic": True}
    with monkeypatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        with pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0: .* :4096:8 or :16:8"):
            train(folder, **options)
    assert not torch.are_deterministic_algorithms_enabled()
    losses = train(folder, **options)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert resume(folder, checkpoint(folder, options), **options) == losses


@pytest.mark.gpu
@pytest.mark.usefixtures("order_restored")
@pytest.mark.parametrize(
    "precision",
    [
        {"opt_level": "off"},
        {"opt_level": "off", "compute_dtype": "float32"},  # which flash attention does not take
        {"opt_level": "O2"},
        {"opt_level": "O2", "compile": True},
        {"opt_level": "O2", "fp8_recipe": "delayed", "fuse": True, "model": "demo"},
        {"opt_level": "O2", "compute": "te"},
        {"opt_level": "off", "blocks": "te"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_long_windows_resume_with_the_same_bits_on_a_gpu_in_one_order(tmp_path, precision):
    """Where attention's backward adds up several blocks of keys; with samples of text between the steps."""
    if "te" in precision.values() and not capability.transformer_engine("cuda"):
        pytest.skip("needs TransformerEngine")
    text = write_text(tmp_path)
    text.write_text(40 * text.read_text())
    options = {
        "model": "gpt2", "seq_len": 1024, "device": "cuda", "deterministic": True, "run_name": "ordered",
        "target_effective_batch_size": 8, "micro_batch": 8, "steps": 24, "checkpoint_freq": 12, "eval_freq": 12,
        **precision,
    }  # fmt: skip
    losses = train(tmp_path, **options)
    (path,) = (tmp_path / "runs").glob("ordered-*/checkpoints*/step_00000012")
    assert resume(tmp_path, path, **options) == losses
    assert losses[-1] < losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["off", "O2"])
def test_a_compiled_run_has_nearly_the_losses_of_an_eager_one(folder, level):
    options = {"opt_level": level, "device": "cuda", "micro_batch": "auto", "eval_freq": 2}
    eager, compiled = (
        train(folder, **options, compile=on, run_name=f"compile-{on}-{level}")
        for on in (False, True)
    )
    assert_near(compiled, eager, level)


def test_levels_change_within_a_run(folder):
    runs = {
        level: train(folder, opt_level=level, run_name=f"from-{level}")
        for level in ("off", "O0", "O1", "O2")
    }
    for old, new in (("off", "O2"), ("O2", "off"), ("O0", "O1"), ("O1", "O2"), ("O2", "O0")):
        path = checkpoint(folder, {"run_name": f"from-{old}"})
        changed = resume(folder, path, opt_level=new, run_name=f"{old}-to-{new}")
        assert changed[:2] == runs[old][:2]
        assert_near(changed, runs[old], (old, new))


def test_fused_layers_come_and_go_within_a_run(folder):
    runs = {
        on: train(folder, opt_level="O2", fuse=on, run_name=f"fused-{on}") for on in (True, False)
    }
    assert_near(runs[True], runs[False], "fused")
    for on in runs:
        path = checkpoint(folder, {"run_name": f"fused-{on}"})
        for changes in ({"fuse": not on}, {"opt_level": "O1", "fuse": not on}):
            changed = resume(folder, path, **{"opt_level": "O2", **changes}, run_name=f"was-{on}")
            assert_near(changed, runs[on], (on, changes))
    trainer = Trainer(configure(folder, fuse=True, run_name="fused"))
    assert type(trainer.model.blocks[0].feed_forward).__name__ == "FusedSwiGLU"
    assert trainer.monitor is not None
    with pytest.warns(Fp8StackWarning, match="nothing to fuse.*native, gelu, layernorm"):
        Trainer(configure(folder, fuse=True, norm="layernorm", activation="gelu", qk_norm=False))


def test_a_resumed_run_says_what_is_asked_for_otherwise(folder):
    losses = train(folder, run_name="changes")
    path = checkpoint(folder, {"run_name": "changes"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of the same text, which lies elsewhere
        moved = folder / "elsewhere" / "text.txt"
        moved.parent.mkdir()
        moved.write_bytes((folder / "text.txt").read_bytes())
        options = {"run_name": "changes", "resume": str(path), "out": folder / "again"}
        assert train(folder, **options, data=str(moved), strict=True) == losses
    for changes, expected in (
        ({"seq_len": 8}, "--seq-len was 16, is now 8: windows are cut otherwise"),
        ({"target_effective_batch_size": 8}, "batch-size was 4, is now 8: steps take another"),
        ({"steps": 5}, "--steps was 4, is now 5: from here on the learning rate is"),
        ({"weight_decay": 0.5}, "--weight-decay was 0.1, is now 0.5: matrices decay by it"),
    ):
        with pytest.warns(Fp8StackWarning, match=expected) as told:
            trainer = Trainer(configure(folder, **options, **changes))
        trainer.log.close()
        assert len(told) == 1
        decays = [group["weight_decay"] for group in trainer.optimizer.param_groups]
        assert decays == [changes.get("weight_decay", 0.1), 0.0]
        with pytest.raises(ConfigError, match=expected):
            Trainer(configure(folder, **options, **changes, strict=True))


def test_other_data_is_read_from_its_beginning(folder):
    train(folder, run_name="data")
    (folder / "other.txt").write_text("".join(f"y = {n}\n" for n in range(999)))
    options = {"run_name": "data", "resume": "latest", "data": str(folder / "other.txt")}
    expected = r"--data was text.txt \(\d+ tokens\), is now other.txt .*read from its beginning"
    with pytest.warns(Fp8StackWarning, match=expected) as told:
        trainer = Trainer(configure(folder, **options, steps=4, seed=3))
    assert len(told) == 1
    assert (trainer.step, trainer.data.train.position) == (4, 0)
    trainer.log.close()


def test_a_run_does_not_begin_among_the_checkpoints_of_another(folder):
    options = {"run_name": "fresh", "eval_freq": 2}
    train(folder, **options)
    run = folder / "runs" / "fresh-fp8-o2"
    with pytest.raises(
        ConfigError,
        match=r"fresh-fp8-o2 has 2 checkpoints .*--resume latest.*--run-name.*--overwrite",
    ):
        train(folder, **options)
    with pytest.raises(ConfigError, match="--overwrite deletes what --resume goes on from"):
        configure(folder, **options, resume="latest", overwrite=True)
    (run / "checkpoints_fp8" / "notes.txt").write_text("kept")
    with pytest.raises(ConfigError, match="there is no such file"):  # and so nothing is deleted
        train(folder, **{**options, "data": "nowhere"}, overwrite=True)
    assert len(list(run.glob("checkpoints_fp8/step_*"))) == 2
    train(folder, **options, overwrite=True, checkpoint_freq=3, steps=3)
    left = sorted(path.name for path in (run / "checkpoints_fp8").iterdir())
    assert left == ["best", "latest", "notes.txt", "step_00000003"]
    train(folder, **options, opt_level="O1")  # another precision, another folder


def test_latest_is_the_run_s_own_or_that_of_its_other_precision(folder, capsys):
    options = {"run_name": "latest", "resume": "latest", "out": folder / "latest"}
    losses = train(folder, opt_level="O2", **options)
    assert "starting at step 0" in capsys.readouterr().out
    longer = train(folder, opt_level="off", **options, steps=6)
    assert longer[:4] == losses
    assert "resumed from" in capsys.readouterr().out
    assert len(longer) == 6
    path = folder / "latest" / "latest-bf16" / "checkpoints" / "step_00000006"
    expected = rf"from step 4 \(FP8 O2\), .* in bf16 it has got to step 6.*--resume {path}$"
    with pytest.warns(Fp8StackWarning, match=expected):  # its own; there is nothing left to do
        assert train(folder, opt_level="O2", **options) == losses
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the furthest itself, and what compares
        assert train(folder, opt_level="off", **options, steps=6) == longer
        assert train(folder, opt_level="O2", **{**options, "resume": "auto"}) == losses
    for manifest in (folder / "latest").glob("*/*/step_*/manifest.json"):
        manifest.write_text("{")
    with pytest.raises(CheckpointError, match=r"is whole: .*latest-bf16.*--run-name"):
        train(folder, opt_level="O1", **options)
    assert len(train(folder, opt_level="O1", **{**options, "resume": "auto"})) == 4  # of its own


def test_a_checkpoint_that_was_not_evaluated_has_no_validation_loss(folder):
    options = {"run_name": "unknown", "out": folder / "unknown", "keep_checkpoints": 1}
    saved = folder / "unknown" / "unknown-fp8-o2" / "checkpoints_fp8"

    def losses(folder):
        found = [json.loads(path.read_text()) for path in folder.glob("step_*/manifest.json")]
        return {facts["step"]: facts["val_loss"] for facts in found}

    train(folder, **options, eval_freq=2, steps=2)
    with pytest.warns(Fp8StackWarning, match="--steps was 2"):
        train(folder, **options, resume="latest", steps=6)  # without evaluations
    known = losses(saved)
    assert known.pop(2) > 0  # the best one is kept, though one was to stay
    assert known == {6: None}
    best, latest = list_runs(configure(folder, **options)).splitlines()[1:]
    assert best.endswith("step_00000002 (best)")
    assert latest.split()[:3:2] == ["6", "-"]
    assert latest.endswith("step_00000006 (latest)")
    again = {"opt_level": "off", "resume": str(saved / "step_00000002"), "steps": 4}
    with pytest.warns(Fp8StackWarning, match="--steps was 2"):
        train(folder, **options, **again)
    saved = folder / "unknown" / "unknown-bf16" / "checkpoints"
    assert losses(saved) == {4: None}
    assert not (saved / "best").exists()


def test_auto_is_the_run_s_own_in_its_precision_or_a_fresh_start(folder, capsys):
    options = {"run_name": "auto-own", "resume": "auto", "out": folder / "auto-own"}
    train(folder, opt_level="O2", **options)
    begun = train(folder, opt_level="off", **options, steps=2)
    out = capsys.readouterr().out
    assert "resumed from" not in out
    assert out.count("--resume auto: there is no checkpoint in") == 2
    alone = train(folder, opt_level="off", run_name="auto-alone")
    assert begun == train(folder, opt_level="off", run_name="auto-alone-2", steps=2)
    with pytest.warns(Fp8StackWarning, match="--steps was 2, is now 4"):
        longer = train(folder, opt_level="off", **options)
    assert re.search(
        r"resumed from .*/auto-own-bf16/checkpoints/step_0+2 ", capsys.readouterr().out
    )
    assert (longer[:2], len(longer), len(alone)) == (begun, 4, 4)


@pytest.mark.parametrize("resume", ["auto", "latest"])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(folder, resume, capsys):
    options = {"run_name": f"damaged-{resume}", "out": folder / "damaged"}
    train(folder, opt_level="O2", **options)
    train(folder, opt_level="off", **options, steps=2)  # which "latest" could fall to
    run = folder / "damaged" / f"damaged-{resume}-fp8-o2"
    steps = sorted(run.glob("checkpoints_fp8/step_*"))
    (steps[0] / "manifest.json").unlink()
    with open(steps[1] / "__0_0.distcp", "r+b") as file:
        file.truncate(9)
    before = (run / "metrics.jsonl").read_text()
    capsys.readouterr()
    with pytest.raises(CheckpointError, match="is whole") as raised:
        train(folder, opt_level="O2", **options, resume=resume)
    told = str(raised.value)
    parts = (f"--resume {resume}", *map(str, steps), "cut short", "--overwrite", "--run-name")
    assert [part for part in parts if part not in told] == []
    assert "starting at step 0" not in capsys.readouterr().out
    assert (run / "metrics.jsonl").read_text() == before
    begun = train(folder, opt_level="O2", **options, overwrite=True, steps=2)  # as it says
    assert len(begun) == 2


def test_two_ranks_resume_and_change_their_number(folder):
    single = train(folder, opt_level="O2", run_name="single")
    (folder / "single.json").write_text(json.dumps(single))
    store = str(folder / "store")
    start_ranks(check_ranks, (2, store, str(folder)), nprocs=2)
    two = json.loads((folder / "ranks.json").read_text())
    start_ranks(check_one_rank, (1, store + "-one", str(folder)))
    for name, options in RANKS.items():
        alone = {**options, "parallel": "auto", "run_name": f"{name}-alone"}
        if name in ("ddp-O2", "dp-O1", "dp-fused"):
            continue  # as dp-O2
        if name == "fsdp2-O2":
            with pytest.raises(CheckpointError, match="Resume with --parallel fsdp2"):
                resume(folder, step_of(folder, name, 2), **alone)
            continue
        losses = resume(folder, step_of(folder, name, 2), **alone)
        assert losses[:2] == two[name][:2]
        assert_near(losses, two[name], name)


def test_a_checkpoint_of_another_model_is_refused(folder):
    train(folder, run_name="small", steps=2)
    path = checkpoint(folder, {"run_name": "small"})
    for name, own, given, flag in (
        ("norm", "rmsnorm", "layernorm", "--norm rmsnorm"),
        ("qk_norm", True, False, "--qk-norm"),
        ("positions", "rope", "learned", "--positions rope"),
    ):
        said = f"is of a model with {name}={own!r}, this run's has {given!r}. Resume with --model tiny {flag} and"
        with pytest.raises(CheckpointError, match=re.escape(said)):
            resume(folder, path, **{name: given})
    with pytest.raises(CheckpointError, match="Resume with --model tiny"):
        resume(folder, path, model="demo")
    assert configure(folder).model == "tiny"


@pytest.mark.slow
def test_a_run_that_is_killed_twenty_times_ends_as_one_that_was_not(tmp_path):
    paths = [str(Path(workers_gpt.__file__).parent), str(Path(checkpoints.__file__).parents[1])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, str(Path(paths[0]).parent)]),
    }
    command = [sys.executable, str(Path(paths[0]) / "kill_gpt.py"), str(tmp_path), "20"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["same"]
    assert found["kills"] == 20
    assert found["unfinished"] >= 5  # or the kills have missed what they were for
    assert found["steps"] > 20
