"""`fp8stack comm-model`, and the program around its commands."""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fp8stack
from fp8stack import cli
from fp8stack.__main__ import COMMANDS, main
from fp8stack.cli.output import show
from fp8stack.comm.model import Cluster, estimate


def test_it_prints_the_cost_model_for_every_number_of_hosts(capsys):
    options = ["--hosts", "1", "32", "--gpus", "4", "--parameters", "1.5e9", "--network", "22"]
    assert main(["comm-model", *options]) == 0
    text = capsys.readouterr().out
    assert "1,500,000,000 parameters" in text
    assert "not a measurement" in text
    header, _, one, many = [line for line in text.splitlines() if line.strip()][2:]
    assert header.split()[:2] == ["hosts", "GPUs"]
    for line, hosts in ((one, 1), (many, 32)):
        cluster = Cluster(hosts, 4, network=22)
        plain, ours = (estimate(1_500_000_000, cluster, kind, kind) for kind in ("bf16", "fp8"))
        cells = line.split()
        assert cells[:2] == [str(hosts), str(4 * hosts)]
        assert cells[2:4] == [f"{1e3 * e.seconds:.2f}" for e in (plain, ours)]
        assert cells[4] == f"{plain.seconds / ours.seconds:.2f}×"
        assert cells[5] == ("NVLink" if hosts == 1 else "network")
        assert cells[6:] == [f"{e.network_bytes / 1e6:.1f}" for e in (plain, ours)]
    assert main(["comm-model", *options, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["parameters"], data["gpus"], data["network"]) == (1_500_000_000, 4, 22)
    assert [c["hosts"] for c in data["clusters"]] == [1, 32]
    assert data["clusters"][1]["fp8"]["ms"] == 1e3 * ours.seconds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts", "0"], "'0' is not a whole number above 0"),
        (["--hosts", "8", "two"], "'two' is not a whole number above 0"),
        (["--gpus", "1.5"], "'1.5' is not a whole number above 0"),
        (["--parameters", "inf"], "'inf' is not a whole number above 0"),
        (["--parameters", "B"], "'B' is not a whole number above 0"),
        (["--parameters", "7T"], "'7T' is not a whole number above 0"),
        (["--gpus", "8K"], "'8K' is not a whole number above 0"),
        (["--hosts", "1e7"], "'1e7' is not a whole number above 0 and up to 1e+06"),
        (["--parameters", "1e40"], "'1e40' is not a whole number above 0 and up to 1e+15"),
        (["--network", "nan"], "'nan' is not a number above 0"),
        (["--nvlink=-1"], "'-1' is not a number above 0"),
        (["--hosts", "1", "--gpus", "1"], "one GPU has nothing to reduce"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_numbers_are_refused(options, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["comm-model", *options])
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("fp8stack comm-model: error: ")
    assert error.count("\n") == 1


def test_it_is_a_program_and_a_module_to_run():
    program = str(Path(sys.executable).with_name("fp8stack"))
    for command in ([sys.executable, "-m", "fp8stack"], [program]):
        nothing = subprocess.run(command, capture_output=True, text=True)
        assert nothing.returncode == 2
        assert nothing.stdout == ""
        assert nothing.stderr.startswith("usage: fp8stack ")
        assert "    doctor " in nothing.stderr


def test_stdout_is_the_results_alone(tmp_path):
    """Whatever a user's code prints, in processes of its own and as Python ends, too."""
    code = "import atexit, os, torch\ndef make():\n    os.system('echo noise'); print('noise')\n"
    code += "    atexit.register(print, 'noise')\n    return torch.nn.Linear(8, 8)\n"
    (tmp_path / "noisy.py").write_text(code)
    command = [sys.executable, "-m", "fp8stack", "plan", f"{tmp_path}/noisy.py:make", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert json.loads(done.stdout)["parameters"] == 72
    assert done.stderr.count("noise") == 3


def test_options_before_the_command_are_explained(capsys):
    with pytest.raises(SystemExit):
        main(["--json", "levels"])
    assert "--json goes behind the command, levels." in capsys.readouterr().err


def test_it_says_its_version(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"fp8stack {fp8stack.__version__}\n"


@pytest.mark.parametrize(
    ("given", "meant"), [("docter", "doctor"), ("comm_model", "comm-model"), ("zzz", None)]
)
def test_an_unknown_command_is_one_line_with_the_nearest(given, meant, capsys):
    with pytest.raises(SystemExit) as raised:
        main([given, "--json"])
    assert raised.value.code == 2
    error = capsys.readouterr().err
    start = f"fp8stack: error: there is no command {given!r}."
    assert error.startswith(
        start + f' Did you mean "{meant}"?' * bool(meant) + " Commands: doctor,"
    )
    assert error.count("\n") == 1


@pytest.mark.parametrize("given", [["inspect"], ["doctor", "--json", "--deepspeed"]])
def test_an_empty_argument_is_not_the_current_folder(given, capsys):
    with pytest.raises(SystemExit) as raised:
        main([*given, ""])
    assert raised.value.code == 2
    assert f"the argument after {' '.join(given)!r} is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "count"),
    [("7B", 7 * 10**9), ("1.1b", 1_100_000_000), ("350M", 350 * 10**6), ("2k", 2000)],
)
def test_parameters_may_be_in_billions(text, count, capsys):
    assert main(["comm-model", "--hosts", "2", "--parameters", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == count


def test_a_reader_that_leaves_is_no_error_and_a_full_disk_is_a_line():
    command = [sys.executable, "-m", "fp8stack", "comm-model", "--json"]
    command += ["--hosts", *map(str, range(2, 1002))]  # more than a pipe holds
    reading, writing = os.pipe()
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, text=True) as left:
        os.close(writing)
        assert os.read(reading, 1) == b"{"
        os.close(reading)
        assert (left.communicate()[1], left.returncode) == ("", 0)
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert result.stderr == "fp8stack comm-model: error: No space left on device.\n"


def test_json_has_null_for_what_is_not_finite(capsys):
    show(argparse.Namespace(json=True), {"a": [math.nan, {"b": math.inf}, 0.5, "×"]}, print)
    text = capsys.readouterr().out
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [None, {"b": None}, 0.5, "×"]}
    assert text.isascii()


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    names = {path.stem.replace("_", "-") for path in Path(cli.__file__).parent.glob("*.py")}
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        assert name in names
        assert f"    {name} " in text or f"    {name}\n" in text


def test_without_rich_the_remedy_is_named_and_json_works(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)  # as if it were not installed
    with pytest.raises(SystemExit) as raised:
        main(["comm-model"])
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert 'pip install "fp8stack[cli]", or use --json' in error
    assert main(["comm-model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["clusters"]
