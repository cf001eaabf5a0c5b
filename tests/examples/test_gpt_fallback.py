"""The application on a GPU without FP8: bf16 products, bitsandbytes' optimizer, said once, and tagged as what it is."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
import train_gpt
from gpt import build, runs
from gpt.trainer import Trainer
from torch.utils._pytree import keystr, tree_flatten_with_path
from workers_gpt import assert_near, configure, read, resume, train, write_text

import fp8stack
from fp8stack import capability
from fp8stack.errors import Fp8StackWarning, UnsupportedDeviceError

FLAGS = """--model tiny --seq-len 16 --steps 4 --warmup-steps 1 --target-effective-batch-size 4 --checkpoint-freq 2
    --eval-freq 4 --eval-batches 2 --eval-batch-size 1 --log-freq 1 --device cpu --no-tensorboard --run-name run"""


def without_fp8(patch):
    """Let capability say what it does of a GPU without FP8. Layers and libraries are as they are."""
    answer = capability.Answer(False, "cuda:0 is NVIDIA A100 (8.0)")
    patch.setattr(capability, "fp8_hardware", lambda device: answer)


@pytest.fixture
def ampere(monkeypatch):
    without_fp8(monkeypatch)


@pytest.fixture
def flags(tmp_path):
    return [*FLAGS.split(), "--data", str(write_text(tmp_path)), "--out", str(tmp_path / "runs")]


def run(*flags):
    """Run the application; return what it warned of. As in a process of its own, a text comes once from a place."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default", Fp8StackWarning)
        assert train_gpt.main([*flags]) == 0
    return [str(w.message) for w in told if issubclass(w.category, Fp8StackWarning)]


def test_a_run_falls_back_once_and_is_tagged_and_resumed_as_what_it_is(ampere, flags, capsys):
    pytest.importorskip("bitsandbytes")
    told = run(*flags)
    assert len(told) == 2
    assert re.search(r"8\.9.*A100 \(8\.0\); using bf16 GEMMs instead", told[0])
    assert re.search(r"without FP8; using bitsandbytes' optimizer instead", told[1])
    out = flags[-1]
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("| bf16 O2") for line in lines) == 6  # four steps, two evaluations
    assert not any("FP8 O2" in line for line in lines)
    (folder,) = Path(out).iterdir()
    assert folder.name == "run-bf16-o2"
    facts = json.loads((folder / "run.json").read_text())
    assert (facts["name"], facts["precision"]) == ("run-bf16-o2", "bf16 O2")
    checkpoints = folder / "checkpoints_fp8"
    assert sorted(p.name for p in checkpoints.iterdir()) == [
        "best", "latest", "step_00000002", "step_00000004",
    ]  # fmt: skip
    manifest = json.loads((checkpoints / "latest" / "manifest.json").read_text())
    assert (manifest["level"], manifest["precision"]) == ("O2", "bf16 O2")
    losses = [r["loss"] for r in read(folder / "metrics.jsonl") if "loss" in r]
    assert train_gpt.main(flags) == 2
    assert "run-bf16-o2 has 2 checkpoints of an older run" in capsys.readouterr().err
    assert len(run(*flags, "--resume", "latest", "--steps", "6")) == 3  # steps
    assert (
        f"resumed from {checkpoints / 'step_00000004'} (bf16 O2), step 4" in capsys.readouterr().out
    )
    longer = [r["loss"] for r in read(folder / "metrics.jsonl") if "loss" in r]
    assert longer[:4] == losses
    run(*flags, "--resume", str(checkpoints / "step_00000002"))  # bit for bit
    assert [r["loss"] for r in read(folder / "metrics.jsonl") if "loss" in r] == losses
    assert len(longer) == 6
    assert len(list(Path(out).iterdir())) == 1
    run(*flags, "--overwrite")
    assert not (checkpoints / "step_00000006").exists()
    assert train_gpt.main([*flags, "--list-checkpoints"]) == 0
    assert re.search(r"4 .*bf16 O2 .*run-bf16-o2/checkpoints_fp8/step_0+4", capsys.readouterr().out)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_run_goes_on_where_there_is_fp8_and_back(level, flags, capsys):
    """Checkpoints of its other precision are found, and taken over, whichever library stepped."""
    pytest.importorskip("bitsandbytes")
    flags, losses = (*flags, "--opt-level", level), {}
    tags, level = ("bf16", "fp8"), level.lower()
    for first, second in (tags, tags[::-1]):
        options = (*flags, "--out", f"{flags[flags.index('--out') + 1]}-{first}-first")
        for tag in (first, second):
            resumed = ("--steps", "6", "--resume", "latest") if tag == second else ()
            with pytest.MonkeyPatch.context() as patch:
                if tag == "bf16":
                    without_fp8(patch)
                run(*options, *resumed)
        assert re.search(
            rf"resumed from .*run-{first}-{level}/checkpoints_fp8/step_0+4 ",
            capsys.readouterr().out,
        )
        folders = {p.name: p for p in Path(options[-1]).iterdir()}
        assert folders.keys() == {f"run-{first}-{level}", f"run-{second}-{level}"}
        losses[first] = [
            r["loss"]
            for p in (first, second)
            for r in read(folders[f"run-{p}-{level}"] / "metrics.jsonl")
            if "loss" in r
        ]
        assert len(losses[first]) == 6
    assert_near(losses["bf16"], losses["fp8"], level)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_what_multiplied_is_not_needed_to_resume(level, tmp_path):
    """Weights and states have the same formats without it, so a machine that lacks it can go on."""
    write_text(tmp_path)
    options = {"opt_level": level, "run_name": "asked"}
    asked = {"compute": "native", "fp8_recipe": "delayed", "fp8_margin": 1}
    trainer = Trainer(configure(tmp_path, **options, **asked))
    saved = build.level_of({"level": level, "options": trainer.setup.level.options})
    assert saved.options == {"compute": "bf16"}
    assert formats(*trainer.setup.build(saved)) == formats(trainer.model, trainer.optimizer)
    losses = trainer.run()
    with pytest.MonkeyPatch.context() as patch:
        without_fp8(patch)
        folder = tmp_path / "runs" / f"asked-fp8-{level.lower()}" / "checkpoints_fp8"
        changed = resume(tmp_path, folder / "step_00000002", **options)
    assert changed[:2] == losses[:2]
    assert_near(changed, losses, level)


def formats(model, optimizer):
    """Return shape and dtype of all tensors that a checkpoint holds."""
    flat = tree_flatten_with_path(build.contents(model, optimizer))[0]
    return {keystr(p): (t.shape, t.dtype) for p, t in flat if isinstance(t, torch.Tensor)}


def test_the_tag_is_what_fp8stack_chooses(ampere, tmp_path):
    write_text(tmp_path)
    cpu = torch.device("cpu")
    for options, tag in (
        ({}, "bf16 O2"),
        ({"compute_dtype": "float16", "opt_level": "O0"}, "fp16 O0"),
        ({"opt_level": "off"}, "bf16"),
        ({"opt_level": "off", "optimizer_bits": 32}, "bf16"),
        ({"opt_level": "off", "optimizer_bits": 8}, "bf16 8bit"),
    ):
        assert runs.choose_precision(configure(tmp_path, **options), cpu) == tag
    with pytest.warns(Fp8StackWarning, match="A100"):
        trainer = Trainer(configure(tmp_path, opt_level="O1"))
    assert fp8stack.get_report(trainer.model).compute == "bf16"
    trainer.log.close()
    with pytest.raises(UnsupportedDeviceError, match="A100"):
        train(tmp_path, strict=True, run_name="strict")
    with pytest.raises(UnsupportedDeviceError, match='compute="native"'):
        train(tmp_path, compute="native", run_name="native")
