"""`fp8stack doctor --deepspeed`: findings as a table, and what is wrong with arguments and files."""

import json
import re
import subprocess
import sys

import pytest
from workers_known import deepspeed_config

from fp8stack.__main__ import main
from fp8stack.cli.deepspeed_config import read_config

MODELS = """
from dataclasses import dataclass

import torch
from torch import nn

from sizes import WIDTH


@dataclass
class Options:
    width: int = WIDTH


def build():
    model = nn.Linear(Options().width, 16)
    return model, torch.optim.AdamW(model.parameters())


def build_float8():
    from sizes import WIDTH  # while it runs, too

    model = nn.Linear(WIDTH, 16)
    model.code = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    return model


def need(width):
    return nn.Linear(width, 16)


def list_models():
    return [build()]


def broken():
    raise KeyError("width")


def leaves():
    raise SystemExit(0)
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder to be in, with a clean configuration and functions that make models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clean.json").write_text(json.dumps(deepspeed_config()))
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "sizes.py").write_text("WIDTH = 32\n")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    return tmp_path


def diagnose(capsys, config, *options):
    """Return (exit status, what was printed) for a configuration, a dict or the text of a file."""
    text = config if isinstance(config, str) else json.dumps(config)
    with open("ds_config.json", "w") as file:
        file.write(text)
    status = main(["doctor", "--deepspeed", "ds_config.json", *options])
    return status, capsys.readouterr().out


def test_a_clean_configuration(files, capsys):
    status, text = diagnose(capsys, deepspeed_config(), "--model", "models.py:build")
    assert status == 0
    assert "ds_config.json · O2" in text
    assert "torch " in text
    assert "Nothing known stands against it." in text
    assert str(files) not in sys.path


def test_findings_are_a_table_with_remedies(files, capsys):
    config = deepspeed_config(
        3, amp={"enabled": True}, gradient_clipping=1.0, fp16={"enabled": True}
    )
    status, text = diagnose(capsys, config, "--model", "models.py:build_float8")
    assert status == 1
    lines = [tuple(line.strip().split(maxsplit=3)) for line in text.splitlines()]
    start = lines.index(("severity", "#", "name", "found")) + 2
    assert lines[start : start + 4] == [
        ("error", "51", "removed-sections", 'amp: {"enabled": true}'),
        ("warning", "5", "float8-parameters-zero3", "code: torch.float8_e4m3fn"),
        ("warning", "32", "fp16-loss-scaling", "fp16.enabled: true"),
        ("info", "52", "gradient-clipping", "gradient_clipping: 1.0"),
    ]
    assert "5. Partitioning fails" in text
    assert 'Use "bf16": {"enabled": true}.' in text
    assert text.endswith("1 error, 2 warnings, 1 note\n")


def test_json_has_the_same_findings(files, capsys):
    status, text = diagnose(capsys, deepspeed_config(amp={"enabled": True}), "--json")
    data = json.loads(text)
    assert (status, data["level"], data["config"]) == (1, "O2", "ds_config.json")
    found = data["findings"][0]
    assert (found["severity"], found["name"]) == ("error", "removed-sections")
    assert found["remedy"]
    assert data["versions"]["torch"]


def test_the_optimizer_of_the_json_is_one_that_can_be_made(files, capsys):
    """As at initialize: where fp8stack makes it, which it does not of one that comes with the model."""
    lamb = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}
    (files / "ds_config.json").write_text(json.dumps(deepspeed_config(**lamb)))
    with pytest.raises(SystemExit) as raised:
        main(["doctor", "--deepspeed", "ds_config.json"])
    assert raised.value.code == 2
    assert (
        "{\"type\": 'Lamb'} in the DeepSpeed config has no low-precision" in capsys.readouterr().err
    )
    status, _ = diagnose(capsys, deepspeed_config(**lamb), "--model", "models.py:build")
    assert status == 0
    status, _ = diagnose(capsys, deepspeed_config(fp8stack={"opt_level": "O1"}, **lamb))
    assert status == 0


def test_the_section_decides(files, capsys):
    elastic = {"zero_optimization": {"elastic_checkpoint": True}}
    allowed = {"opt_level": "O1", "allow": ["elastic-checkpoint"]}
    status, text = diagnose(capsys, deepspeed_config(fp8stack=allowed, **elastic))
    assert (status, "· O1" in text, "1 warning" in text) == (0, True, True)
    status, text = diagnose(capsys, deepspeed_config(fp8stack=allowed), "--opt-level", "O1")
    assert (status, "· O1" in text) == (0, True)
    off = deepspeed_config(fp8stack={"enabled": False}, fp16={"enabled": True})
    status, text = diagnose(capsys, off)
    assert (status, "fp8stack not enabled" in text, "Nothing" in text) == (0, True, True)
    status, text = diagnose(capsys, deepspeed_config(), "--opt-level", "O0")
    assert "· O0" in text


def test_an_empty_file_is_refused(files, capsys):
    """Which hjson reads as an empty object."""
    with pytest.raises(SystemExit) as raised:
        diagnose(capsys, "")
    assert raised.value.code == 2
    assert re.search("is empty|is not JSON", capsys.readouterr().err)


def test_comments_are_read_as_deepspeed_reads_them(files, capsys):
    pytest.importorskip("hjson")
    commented = '{\n  # stage 2\n  "zero_optimization": {"stage": 2, "elastic_checkpoint": true}\n}'
    status, text = diagnose(capsys, commented)
    assert (status, "elastic-checkpoint" in text) == (1, True)


@pytest.mark.parametrize(("given", "stage"), [("true", 1), ("false", 0), ("null", None)])
def test_a_bool_is_a_stage_of_zero(files, capsys, given, stage):
    text = f'{{"zero_optimization": {given}, "optimizer": {{"type": "AdamW", "params": null}}}}'
    assert diagnose(capsys, text)[0] == 0
    zero = read_config(files / "ds_config.json")["zero_optimization"]
    assert zero == (None if stage is None else {"stage": stage})


BF16 = '{"bf16": {"enabled": true}}'
CLASH = json.dumps({"fp8stack": {"opt_level": "O1"}})


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ('{"bf16": {"enabled": true},\n "zero": }', [], "is not JSON: line 2, column 10"),
        ("[1]", [], "holds a list; a DeepSpeed configuration is a JSON object"),
        ("{}", [], "has no key of a DeepSpeed configuration (it is empty)"),
        (
            '{"model_type": "llama", "hidden_size": 64}',
            [],
            "has no key of a DeepSpeed configuration (keys are model_type, hidden_size)",
        ),
        ('{"optimizer": "adamw"}', [], '"optimizer": "adamw" in ds_config.json must be an object'),
        (
            '{"optimizer": {"type": "AdamW", "params": 3}}',
            [],
            '"params": 3 in "optimizer" of ds_config.json must be an object',
        ),
        ('{"zero_optimization": ""}', [], '"zero_optimization": "" in ds_config.json must be'),
        ('{"bf16": 0}', [], '"bf16": 0 in ds_config.json must be an object'),
        (
            '{"zero_optimization": 2}',
            [],
            '"zero_optimization": 2 in ds_config.json must be an object',
        ),
        (CLASH, ["--opt-level", "O2"], "opt_level='O2' was passed"),
        (BF16, ["--opt-level", "02"], "opt_level must be one of"),
        ('{"fp8stack": {"step_in_backward": true}}', [], "has no place in DeepSpeed"),
        (BF16, ["--model", "models.py"], "must be a file and a function"),
        (BF16, ["--model", "model.py:build"], "there is no Python file 'model.py'"),
        (BF16, ["--model", "models.py:biuld"], "no function 'biuld'. Did you mean \"build\"?"),
        (BF16, ["--model", "models.py:need"], "raised TypeError: need() missing 1 required"),
        (BF16, ["--model", "models.py:broken"], "raised KeyError: 'width'"),
        (BF16, ["--model", "models.py:leaves"], "raised SystemExit: 0"),
        (BF16, ["--model", "models.py:list_models"], "returned list; it must return"),
        (BF16, ["--model", "broken.py:build"], "No module named 'nothing_of_that_name'"),
        (None, [], "none.json cannot be read: No such file or directory."),
        (None, ["--deepspeed", "."], "Is a directory"),
    ],
)
def test_what_is_wrong_is_said_with_status_2(files, config, options, message, capsys):
    path = "none.json" if config is None else "ds_config.json"
    if config is not None:
        (files / path).write_text(config)
    with pytest.raises(SystemExit) as raised:
        main(["doctor", "--deepspeed", path, *options])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_options_of_a_configuration_need_one(files, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["doctor", "--model", "models.py:build"])
    assert raised.value.code == 2
    assert "--model goes with --deepspeed" in capsys.readouterr().err


def test_no_other_library_is_imported(files):
    code = "import sys; from fp8stack.__main__ import main; main(['doctor', '--deepspeed', 'clean.json'])"
    code += "; print({'deepspeed', 'accelerate', 'transformers', 'triton'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "set()"
