"""The application on a GPU without FP8: bf16 products, bitsandbytes' optimizer, said once, and tagged as what it is."""

import json
import re
import warnings

import pytest
import torch
import train_gpt
from gpt import runs
from workers_gpt import assert_near, configure, losses_of, resume, step_of, train, without_fp8

from fp8stack.errors import Fp8StackWarning, UnsupportedDeviceError


def run(*flags):
    """Run the application; return what it warned of. As in a process of its own, a text comes once from a place."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default", Fp8StackWarning)
        assert train_gpt.main([*flags, "--no-tensorboard", "--run-name", "run"]) == 0
    return [str(w.message) for w in told if issubclass(w.category, Fp8StackWarning)]


def test_a_run_falls_back_once_and_is_tagged_and_resumed_as_what_it_is(
    monkeypatch, flags, tmp_path, capsys
):
    pytest.importorskip("bitsandbytes")
    without_fp8(monkeypatch)
    told = run(*flags)
    assert len(told) == 2
    assert re.search(r"8\.9.*A100 \(8\.0\); using bf16 GEMMs instead", told[0])
    assert re.search(r"without FP8; using bitsandbytes' optimizer instead", told[1])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("| bf16 O2") for line in lines) == 6  # four steps, two evaluations
    assert not any("FP8 O2" in line for line in lines)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "run-bf16-o2"
    checkpoints = folder / "checkpoints_fp8"
    manifest = json.loads((checkpoints / "latest" / "manifest.json").read_text())
    assert (manifest["level"], manifest["precision"]) == ("O2", "bf16 O2")
    losses = losses_of(folder)
    assert len(run(*flags, "--resume", "latest", "--steps", "6")) == 3  # steps
    said = f"resumed from {checkpoints / 'step_00000004'} (bf16 O2), step 4"
    assert said in capsys.readouterr().out
    assert losses_of(folder)[:4] == losses
    run(*flags, "--resume", str(checkpoints / "step_00000002"))  # bit for bit
    assert losses_of(folder) == losses
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_run_goes_on_where_there_is_fp8_and_back(flags, tmp_path, capsys):
    """Checkpoints of its other precision are found, and taken over, whichever library stepped."""
    pytest.importorskip("bitsandbytes")
    tags, losses = ("bf16", "fp8"), []
    for first, second in (tags, tags[::-1]):
        out = tmp_path / f"{first}-first"
        for tag in (first, second):
            resumed = ("--steps", "6", "--resume", "latest") if tag == second else ()
            with pytest.MonkeyPatch.context() as patch:
                if tag == "bf16":
                    without_fp8(patch)
                run(*flags, "--out", str(out), *resumed)
        expected = rf"resumed from .*run-{first}-o2/checkpoints_fp8/step_0+4 "
        assert re.search(expected, capsys.readouterr().out)
        folders = [out / f"run-{tag}-o2" for tag in (first, second)]
        assert {*out.iterdir()} == {*folders}
        losses.append([loss for folder in folders for loss in losses_of(folder)])
        assert len(losses[-1]) == 6
    assert_near(*losses, "either way")


def test_what_multiplied_is_not_needed_to_resume(folder):
    """Weights and states have the same formats without it, so a machine that lacks it can go on."""
    asked = {"compute": "native", "fp8_recipe": "delayed", "fp8_margin": 1}
    losses = train(folder, run_name="asked", **asked)
    with pytest.MonkeyPatch.context() as patch:
        without_fp8(patch)
        changed = resume(folder, step_of(folder, "asked"), run_name="asked")
    assert changed[:2] == losses[:2]
    assert_near(changed, losses, "without FP8")


def test_the_tag_is_what_fp8stack_chooses(monkeypatch, folder):
    without_fp8(monkeypatch)
    for options, tag in (
        ({}, "bf16 O2"),
        ({"compute_dtype": "float16", "opt_level": "O0"}, "fp16 O0"),
        ({"opt_level": "off", "optimizer_bits": 32}, "bf16"),
        ({"opt_level": "off", "optimizer_bits": 8}, "bf16 8bit"),
    ):
        assert runs.choose_precision(configure(folder, **options), torch.device("cpu")) == tag
    with pytest.raises(UnsupportedDeviceError, match="A100"):
        train(folder, strict=True, run_name="strict")
    with pytest.raises(UnsupportedDeviceError, match='compute="native"'):
        train(folder, compute="native", run_name="native")
