"""`fp8stack doctor --deepspeed`: findings as a table, and what is wrong with arguments and files."""

import json
import sys
from pathlib import Path

import pytest
from helpers import refused_in_a_line, run_python

from fp8stack.__main__ import main
from fp8stack.cli.deepspeed_config import read_config

MODELS = """
import torch

from sizes import WIDTH

def build():
    from sizes import WIDTH  # while it runs, too

    model = torch.nn.Linear(WIDTH, 16)
    return model, torch.optim.AdamW(model.parameters())
"""
CLEAN = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder to be in, with functions that make models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "sizes.py").write_text("WIDTH = 32\n")
    return tmp_path


def diagnose(capsys, config, *options):
    """Return (exit status, what was printed) for a configuration, a dict or the text of a file."""
    text = config if isinstance(config, str) else json.dumps(config)
    Path("ds_config.json").write_text(text)
    status = main(["doctor", "--deepspeed", "ds_config.json", *options])
    return status, capsys.readouterr().out


def test_a_clean_configuration(files, capsys):
    status, text = diagnose(capsys, CLEAN, "--model", "models.py:build")
    assert status == 0
    assert "ds_config.json · O2" in text
    assert "torch " in text
    assert "Nothing known stands against it." in text
    assert str(files) not in sys.path


def test_findings_are_lines_with_remedies(files, capsys):
    fp16 = {"hybrid_engine": {"enabled": True}, "fp16": {"enabled": True}}
    status, text = diagnose(capsys, CLEAN | fp16)
    assert status == 1
    text = " ".join(text.split())
    for line in (
        "error: hybrid-engine (hybrid_engine.enabled: true). Its inference containers",
        "warning: fp16-loss-scaling (fp16.enabled: true).",
    ):
        assert line in text
    assert 'Use "bf16": {"enabled": true}.' in text
    status, text = diagnose(capsys, CLEAN | fp16, "--json")
    data = json.loads(text)
    assert (status, data["level"], data["config"]) == (1, "O2", "ds_config.json")
    assert [f["severity"] for f in data["findings"]] == ["error", "warning"]
    assert data["versions"]["torch"]


def test_the_optimizer_of_the_json_is_one_that_can_be_made(files, capsys):
    """As at initialize: where fp8stack makes it, which it does not of one that comes with the model."""
    lamb = CLEAN | {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}
    refused(capsys, json.dumps(lamb), [], "{\"type\": 'Lamb'} in the DeepSpeed config has no low")
    assert diagnose(capsys, lamb, "--model", "models.py:build")[0] == 0
    assert diagnose(capsys, {"fp8stack": {"opt_level": "O1"}, **lamb})[0] == 0


def test_the_section_decides(files, capsys):
    elastic = {"zero_optimization": {"stage": 2, "elastic_checkpoint": True}}
    allowed = {"fp8stack": {"opt_level": "O1", "allow": ["elastic-checkpoint"]}}
    status, text = diagnose(capsys, elastic | allowed)
    assert (status, "· O1" in text, "warning" in text) == (0, True, True)
    status, text = diagnose(capsys, CLEAN | allowed, "--opt-level", "O1")
    assert (status, "· O1" in text) == (0, True)
    off = CLEAN | {"fp8stack": {"enabled": False}, "fp16": {"enabled": True}}
    status, text = diagnose(capsys, off)
    assert (status, "fp8stack not enabled" in text, "Nothing" in text) == (0, True, True)
    assert "· O0" in diagnose(capsys, CLEAN, "--opt-level", "O0")[1]


def test_files_are_read_as_deepspeed_reads_them(files, capsys):
    """With comments, and a bool for a stage of ZeRO."""
    pytest.importorskip("hjson")
    for zero, stage in (("true", 1), ("false", 0), ("null", None)):
        text = f'{{\n  # ZeRO\n  "zero_optimization": {zero}, "optimizer": {{"type": "AdamW", "params": null}}}}'
        assert diagnose(capsys, text)[0] == 0
        found = read_config(files / "ds_config.json")["zero_optimization"]
        assert found == (None if stage is None else {"stage": stage})


def refused(capsys, text, options, message):
    if text is not None:
        Path("ds_config.json").write_text(text)
    options = ("--deepspeed", "ds_config.json", *options)
    assert message in refused_in_a_line(capsys, "doctor", *options)


BF16 = '{"bf16": {"enabled": true}}'


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ('{"bf16": {"enabled": true},\n "zero": }', [], "line 2 column 10"),
        ("", [], "ds_config.json "),  # hjson reads it as an empty object
        ("[1]", [], "is [1]: no DeepSpeed configuration"),
        ('{"model_type": "llama"}', [], "has the keys ['model_type']: no DeepSpeed configuration"),
        ('{"optimizer": "adamw"}', [], '"optimizer": "adamw" in ds_config.json must be an object'),
        ('{"optimizer": {"type": "AdamW", "params": 3}}', [], '"params": 3 in ds_config.json must be'),
        ('{"zero_optimization": 2}', [], '"zero_optimization": 2 in ds_config.json must be an object'),
        ('{"fp8stack": {"opt_level": "O1"}}', ["--opt-level", "O2"], "opt_level='O2' was passed"),
        (BF16, ["--opt-level", "02"], "opt_level must be one of"),
        ('{"fp8stack": {"step_in_backward": true}}', [], "does not go with DeepSpeed"),
        ('{"train_batch_size": ' + "[" * 100_000, [], "cannot be read as JSON: maximum recursion depth"),
        ('{"train_batch_size": ' + "9" * 5000 + "}", [], "cannot be read as JSON: Exceeds the limit"),
        ('{"optimizer": {"type": "AdamW", "params": {"lr": -1}}}', [], "Invalid learning rate: -1."),
        ('{"optimizer": {"type": "AdamW", "params": {"betas": [2, 0.9]}}}', [], "AdamW at O2: Invalid beta"),
        ('{"optimizer": {"type": "AdamW", "params": {"weight_decay": -1}}}', [], "Invalid weight_decay value: -1."),
        ('{"optimizer": {"type": "AdamW", "params": {"lr": ' + "9" * 400 + "}}}", [], "int too large to convert"),
        ('{"train_batch_size": 1, "fp8stack": {"states_for": ["a", "b"]}}', [], "must be a dict of patterns"),
        (None, [], "ds_config.json cannot be read as JSON: No such file or directory."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_status_2(files, config, options, message, capsys):
    refused(capsys, config, options, message)


def test_no_other_library_is_imported(files):
    (files / "clean.json").write_text(json.dumps(CLEAN))
    code = "import sys; from fp8stack.__main__ import main; main(['doctor', '--deepspeed', 'clean.json'])"
    code += "; print({'deepspeed', 'accelerate', 'transformers', 'triton'} & set(sys.modules))"
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "set()"
