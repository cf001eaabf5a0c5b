"""docs/cli.md: its commands run, and print what it shows."""

import re
import shlex
from pathlib import Path

import pytest
import torch

import fp8stack
from fp8stack.__main__ import COMMANDS, main
from fp8stack.cli import machine

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
SHOWN = dict(re.findall(r"```console\n\$ fp8stack (.*?)\n(.*?)```", DOCUMENT, re.S))


@pytest.fixture
def there(tmp_path, monkeypatch):
    """Be in a folder with the files that the document names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "device", lambda: torch.device("cpu"))
    (source,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "ds_config.json").write_text('{"train_batch_size": 8}')
    sizes = '"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 4096'
    (tmp_path / "config.json").write_text(f'{{"model_type": "gpt2", {sizes}}}')
    names = {}
    exec(compile(source, "train.py", "exec"), names)
    model = names["build_model"]()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fp8stack.initialize(model, optimizer, opt_level="O2")
    for _ in range(2):
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
    fp8stack.checkpoint.save("run.pt", model, optimizer, step=250)


def lines(text):
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_commands_print_what_is_shown(there, capsys):
    assert {command.split()[0] for command in SHOWN} == {"plan", "inspect"}
    for command, shown in SHOWN.items():
        assert main(shlex.split(command)) == 0
        printed = lines(capsys.readouterr().out)
        if command.startswith("inspect"):  # the size of the file is that of torch's version
            assert printed[0].startswith("run.pt: fp8stack.checkpoint, ")
            printed, shown = printed[1:], shown.partition("\n")[2]
        left = iter(printed)  # some lines are left out
        assert [line for line in lines(shown) if line not in left] == []


def test_the_other_commands_run(there, capsys):
    commands = [
        c for block in re.findall(r"```sh\n(.*?)```", DOCUMENT, re.S) for c in block.splitlines()
    ]
    assert len(commands) == 6
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "fp8stack"
        if arguments == ["doctor"]:  # which test_doctor runs in full
            arguments.append("--no-self-test")
        assert main(arguments) == 0
        assert capsys.readouterr().out


def test_every_command_has_its_section():
    assert re.findall(r"^## (\w+)$", DOCUMENT, re.M) == [*COMMANDS]
