"""The program `fp8stack` around its commands."""

import argparse
import fcntl
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import refused_in_a_line, run_python

import fp8stack
from fp8stack.__main__ import COMMANDS, main
from fp8stack.cli.output import show


def test_it_is_a_program():
    """And a module to run, as the tests that follow do."""
    program = str(Path(sys.executable).with_name("fp8stack"))
    nothing = subprocess.run([program], capture_output=True, text=True)
    assert nothing.returncode == 2
    assert nothing.stdout == ""
    assert nothing.stderr.startswith("usage: fp8stack ")
    assert "    doctor " in nothing.stderr


@pytest.mark.parametrize(
    "given",
    ["--version", "--help", "plan --help", "demo --help", "docter", "estimate --parameters x"],
)
def test_it_answers_without_torch(given, tmp_path):
    """In a tenth of a second, where torch takes two."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = run_python("-m", "fp8stack", *given.split(), PYTHONPATH=str(tmp_path))
    assert "torch was imported" not in done.stderr
    assert "fp8stack" in done.stdout + done.stderr
    assert done.returncode == (0 if "--" in given.split()[-1] else 2)


def test_a_shell_completes_commands_and_options(tmp_path):
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found"),
        "_ARGCOMPLETE_IFS": " ",
    }
    for line, found in (("fp8stack est", "estimate"), ("fp8stack plan --fp8-rec", "--fp8-recipe")):
        told = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
        run_python("-m", "fp8stack", **asked, **told)
        assert (tmp_path / "found").read_text().split() == [found]


def test_a_user_s_code_finds_the_whole_package_and_stdout_is_the_results_alone(tmp_path):
    """Whatever that code prints, in processes of its own and as Python ends, too."""
    code = "import atexit, fp8stack, os, torch\ndef make():\n    os.system('echo noise'); print('noise')\n"
    code += "    names = [getattr(fp8stack, name) for name in fp8stack.__all__]\n"
    code += "    atexit.register(print, 'noise')\n    return torch.nn.Linear(8, len(names))\n"
    (tmp_path / "noisy.py").write_text(code)
    done = run_python("-m", "fp8stack", "plan", f"{tmp_path}/noisy.py:make", "--json")
    assert json.loads(done.stdout)["parameters"] == 9 * len(fp8stack.__all__)
    assert done.stderr.count("noise") == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--json doctor", "unrecognized arguments: --json. Did you mean \"--json\"? Options go behind doctor."),
        ("doctor --model models.py:build", "--model and --opt-level go with --deepspeed"),
        ("plan models.py:build --opt-levle O2", 'Did you mean "--opt-level"?'),
        ("docter", "invalid choice: 'docter' (choose from"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_one_line(given, message, capsys):
    assert message in refused_in_a_line(capsys, *given.split())


def test_a_reader_that_leaves_is_no_error_and_a_full_disk_is_a_line(tmp_path):
    code = "import torch\ndef make():\n"
    code += "    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(40)))\n"
    (tmp_path / "many.py").write_text(code)  # of which the command says more than the pipe holds
    command = [sys.executable, "-m", "fp8stack", "plan", f"{tmp_path}/many.py:make", "--json"]
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, text=True) as left:
        os.close(writing)
        assert os.read(reading, 1) == b"{"
        os.close(reading)
        assert (left.communicate()[1], left.returncode) == ("", 0)
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert result.stderr == "fp8stack plan: error: No space left on device.\n"


def test_json_has_null_for_what_is_not_finite(capsys):
    show(argparse.Namespace(json=True), {"a": [math.nan, {"b": math.inf}, 0.5, "×"]}, print)
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [None, {"b": None}, 0.5, "×"]}
    assert text.isascii()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_help_names_every_command_and_the_version(capsys):
    for option, names in (
        ("--help", [f"    {name} " for name in COMMANDS]),
        ("--version", [f"fp8stack {fp8stack.__version__}\n"]),
    ):
        with pytest.raises(SystemExit) as raised:
            main([option])
        assert raised.value.code == 0
        text = capsys.readouterr().out
        assert all(name in text for name in names)
