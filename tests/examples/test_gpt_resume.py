"""A run that is stopped goes on with the same bits: at every level, on other ranks, and when it is killed."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import workers_gpt
from gpt.trainer import Trainer
from ranks import run_ranks
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
from workers_scripts import run_script

import fp8stack
from fp8stack import capability
from fp8stack.errors import CheckpointError, ConfigError, Fp8StackWarning

OPTIONS = [
    {"opt_level": "off"}, {"opt_level": "O0"}, {"opt_level": "O1"}, {"opt_level": "O2"},
    {"opt_level": "O2", "optimizer_bits": 4}, {"opt_level": "O2", "fp8_recipe": "delayed", "amax_history_len": 2},
    {"opt_level": "O2", "fuse": True, "deterministic": True, "fuse_loss": True},
    {"opt_level": "O2", "skip": ("head", "blocks.0.*")},
    {"opt_level": "O1", "fuse": True, "fp8_recipe": "delayed", "amax_history_len": 2},
    {"opt_level": "off", "optimizer_bits": 8}, {"opt_level": "off", "compute_dtype": "float16"},
    {"opt_level": "O2", "compute_dtype": "float32", "micro_batch": "auto", "max_batch_size": 3},
]  # fmt: skip


@pytest.fixture
def order_restored(monkeypatch):
    """PyTorch's algorithms and the environment are those of before once a test is done."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # to be noted as changed
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.usefixtures("order_restored")
@pytest.mark.parametrize("options", OPTIONS)
def test_a_resumed_run_has_the_losses_of_one_that_went_on(folder, options):
    options = {**options, "run_name": f"same-{OPTIONS.index(options)}"}
    losses = train(folder, **options)
    assert len(losses) == 4
    path = step_of(folder, options["run_name"])
    expected = "checkpoints" if options["opt_level"] == "off" else "checkpoints_fp8"
    assert path.parent.name == expected
    torch.manual_seed(99)
    assert resume(folder, path, **options) == losses


def test_a_run_that_goes_on_as_it_was_keeps_its_micro_batch(folder):
    options = {"opt_level": "O2", "micro_batch": "auto", "run_name": "auto"}
    losses = train(folder, **options, max_batch_size=3)
    path = step_of(folder, "auto")
    for changes, micro in (({}, 2), ({"opt_level": "O1"}, 4), ({"seq_len": 8}, 4)):
        again = resume(folder, path, **{**options, **changes}, max_batch_size=8)
        level = changes.get("opt_level", "O2").lower()
        facts = json.loads((folder / "again" / f"auto-fp8-{level}" / "run.json").read_text())
        assert facts["micro_batch"] == micro
        assert changes or again == losses


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["off", "O0", "O1", "O2"])
def test_a_resumed_run_has_the_losses_of_one_that_went_on_a_gpu(folder, level):
    """Also where the sizes that were tried would have left traces: in the histories of delayed scaling."""
    recipe = {} if level == "off" else {"fp8_recipe": "delayed"}
    options = {"opt_level": level, "device": "cuda", "micro_batch": "auto", **recipe}
    options["run_name"] = f"gpu-{level}"
    losses = train(folder, **options)
    assert resume(folder, step_of(folder, options["run_name"]), **options) == losses
    assert losses[-1] < losses[0]
    trainer = Trainer(configure(folder, **{**options, "run_name": f"new-{level}"}))
    if level != "off":
        workers_gpt.assert_empty(trainer.model)


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
    assert resume(tmp_path, step_of(tmp_path, "ordered", 12), **options) == losses
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("order_restored")
@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("cpu", {"opt_level": "off"}),
        ("cpu", {"opt_level": "O2"}),
        *(
            pytest.param("cuda", {"opt_level": level, **more}, marks=pytest.mark.gpu)
            for level in ("off", "O0", "O2")
            for more in ({}, {"compile": True}, {"fp8_recipe": "blockwise"})
            if level != "off" or "fp8_recipe" not in more
        ),
    ],
)
def test_a_repeated_run_has_the_same_losses_and_weights(tmp_path, device, options):
    """In one order, and from the first step: nothing is resumed."""
    text = write_text(tmp_path)
    if device == "cuda":
        text.write_text(40 * text.read_text())
        options = {
            "model": "gpt2", "seq_len": 1024, "target_effective_batch_size": 8, "micro_batch": 8,
            "steps": 12, **options,
        }  # fmt: skip
    options = {"device": device, "deterministic": True, "checkpoint_freq": 0, **options}
    ends = []
    for name in ("first", "second"):
        torch.manual_seed(len(name))  # what a run does not depend on
        trainer = Trainer(configure(tmp_path, run_name=name, **options))
        losses = trainer.run()
        ends.append((losses, [p.detach().clone() for p in trainer.model.parameters()]))
        torch.compiler.reset()  # as in another process
    (losses, weights), (again, others) = ends
    assert losses == again
    assert losses[-1] < losses[0]
    assert all(map(torch.equal, weights, others))


def test_levels_and_fused_layers_change_within_a_run(folder, monkeypatch):
    was = {
        "off": {"opt_level": "off"}, "O0": {"opt_level": "O0"}, "O1": {"opt_level": "O1"}, "O2": {"opt_level": "O2"},
        "fused": {"opt_level": "O2", "fuse": True},
    }  # fmt: skip
    runs = {n: train(folder, **options, run_name=f"from-{n}") for n, options in was.items()}
    assert_near(runs["fused"], runs["O2"], "fused")
    for old, new in (("off", "O2"), ("O2", "off"), ("O0", "O1"), ("O1", "fused"), ("fused", "O0")):
        path = step_of(folder, f"from-{old}")
        changed = resume(folder, path, **was[new], run_name=f"{old}-to-{new}")
        assert changed[:2] == runs[old][:2]
        assert_near(changed, runs[old], (old, new))
    trainer = Trainer(configure(folder, fuse=True, run_name="is-fused"))
    assert type(trainer.model.blocks[0].feed_forward).__name__ == "FusedSwiGLU"
    monkeypatch.setattr(fp8stack.nn, "fuse", lambda _: [])  # as of TransformerEngine's layers
    with pytest.warns(Fp8StackWarning, match="nothing to fuse.*those of this one are native"):
        Trainer(configure(folder, fuse=True))


def test_two_ranks_resume_and_change_their_number(folder):
    single = train(folder, opt_level="O2", run_name="single")
    two, other = run_ranks(check_ranks, 2, str(folder), single)
    assert two == other
    run_ranks(check_one_rank, 1, str(folder), two["fsdp2-O2"])
    for name in ("ddp-off", "dp-O2", "fsdp2-off", "fsdp2-O2"):
        alone = {**RANKS[name], "parallel": "auto", "run_name": f"{name}-alone"}
        if name == "fsdp2-O2":
            with pytest.raises(CheckpointError, match="Resume with --parallel fsdp2"):
                resume(folder, step_of(folder, name), **alone)
            continue
        losses = resume(folder, step_of(folder, name), **alone)
        assert losses[:2] == two[name][:2]
        assert_near(losses, two[name], name)


# --- which checkpoint a run goes on from


def test_a_run_does_not_begin_among_the_checkpoints_of_another(folder):
    options = {"run_name": "fresh", "eval_freq": 2}
    train(folder, **options)
    run = folder / "runs" / "fresh-fp8-o2"
    expected = r"fresh-fp8-o2 has 2 checkpoints .*--resume latest.*--run-name.*--overwrite"
    with pytest.raises(ConfigError, match=expected):
        train(folder, **options)
    (run / "checkpoints_fp8" / "notes.txt").write_text("kept")
    with pytest.raises(ConfigError, match="there is no such file"):  # and so nothing is deleted
        train(folder, **{**options, "data": "nowhere"}, overwrite=True)
    assert len(list(run.glob("checkpoints_fp8/step_*"))) == 2
    train(folder, **options, overwrite=True, checkpoint_freq=3, steps=3)
    left = sorted(path.name for path in (run / "checkpoints_fp8").iterdir())
    assert left == ["best", "latest", "notes.txt", "step_00000003"]


def test_auto_is_of_the_run_s_own_precision_and_latest_of_another_too(folder, capsys):
    options = {"run_name": "latest", "resume": "latest", "out": folder / "latest"}
    auto = {**options, "resume": "auto"}
    losses = train(folder, opt_level="O2", **options)
    begun = train(folder, opt_level="off", **{**auto, "run_name": "own"}, steps=2)
    out = capsys.readouterr().out
    assert "resumed from" not in out
    assert "--resume auto: there is no checkpoint in" in out
    assert begun == train(folder, opt_level="off", run_name="alone", steps=2)
    longer = train(folder, opt_level="off", **options, steps=6)
    assert (longer[:4], len(longer)) == (losses, 6)
    assert "/latest-fp8-o2/checkpoints_fp8/step_00000004 " in capsys.readouterr().out
    path = folder / "latest" / "latest-bf16" / "checkpoints" / "step_00000006"
    expected = rf"from step 4 \(FP8 O2\), .* in bf16 it has got to step 6.*--resume {path}$"
    with pytest.warns(Fp8StackWarning, match=expected):  # its own; there is nothing left to do
        assert train(folder, opt_level="O2", **options) == losses
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the furthest itself, and what compares
        assert train(folder, opt_level="off", **options, steps=6) == longer
        assert train(folder, opt_level="O2", **auto) == losses
    for manifest in (folder / "latest").glob("latest-*/*/step_*/manifest.json"):
        manifest.write_text("{")
    before = (folder / "latest" / "latest-fp8-o2" / "metrics.jsonl").read_text()
    capsys.readouterr()
    for resumed in ("auto", "latest"):  # no run begins again over what is damaged
        with pytest.raises(CheckpointError, match=r"is whole: .*latest-fp8-o2") as raised:
            train(folder, opt_level="O2", **{**options, "resume": resumed})
        told = (f"--resume {resumed}", "step_00000002", "step_00000004", "--overwrite")
        assert all(part in str(raised.value) for part in (*told, "--run-name"))
    with pytest.raises(CheckpointError, match=r"is whole: .*latest-bf16.*--run-name"):
        train(folder, opt_level="O1", **options)
    assert "starting at step 0" not in capsys.readouterr().out
    assert (folder / "latest" / "latest-fp8-o2" / "metrics.jsonl").read_text() == before
    assert len(train(folder, opt_level="O1", **auto)) == 4  # of its own


def test_a_checkpoint_of_another_model_is_refused(folder):
    train(folder, run_name="small", steps=2)
    path = step_of(folder, "small")
    said = "model with qk_norm=True, this run's has False. Resume with --model tiny --qk-norm and"
    with pytest.raises(CheckpointError, match=said):
        resume(folder, path, qk_norm=False)
    with pytest.raises(CheckpointError, match="Resume with --model tiny"):
        resume(folder, path, model="demo")


@pytest.mark.slow
def test_a_run_that_is_killed_eight_times_ends_as_one_that_was_not(tmp_path):
    command = [str(Path(workers_gpt.__file__).with_name("kill_gpt.py")), str(tmp_path), "8"]
    found = json.loads(run_script(command, tmp_path / "said", 0))
    assert found["same"]
    assert found["kills"] == 8
    assert found["unfinished"] >= 3  # or the kills have missed what they were for
    assert found["steps"] > 8


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_the_last_steps_are_in_bf16_of_a_resumed_run_too(folder, level, capsys):
    """It says so once, with the right step; bits are those of FP8 before it, and of `--compute bf16` from it on."""
    name, said = f"last-{level}", "step {}: products are in bf16 from here on (--bf16-last)"
    options = {"opt_level": level, "run_name": name, "steps": 6, "bf16_last": 0.4}
    plain = train(folder, **options | {"run_name": f"whole-{level}", "bf16_last": 0.0})
    assert "from here on" not in capsys.readouterr().out
    losses = train(folder, **options)
    out = capsys.readouterr().out
    assert out.count("from here on") == out.count(said.format(5)) == 1
    assert f"FP8 {level}, products in bf16\n" in out
    assert losses[:4] == plain[:4]
    assert all(a != b for a, b in zip(losses[4:], plain[4:], strict=True))
    for step, first in ((2, 5), (4, 5)):
        assert resume(folder, step_of(folder, name, step), **options, overwrite=False) == losses
        assert capsys.readouterr().out.count(said.format(first)) == 1
        shutil.rmtree(folder / "again")
    if level == "O0":  # whose states are torch's own
        saved = step_of(folder, name, 4)
        assert resume(folder, saved, **options | {"bf16_last": 0.0}, compute="bf16") == losses
    expected = "--bf16-last was 0.4, is now 0.0: products are in bf16 from another step on"
    with pytest.warns(Fp8StackWarning, match=expected):
        resume(folder, step_of(folder, name), **options | {"bf16_last": 0.0, "run_name": "warns"})
