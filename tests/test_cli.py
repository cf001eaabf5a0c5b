"""The command line."""

import subprocess
import sys

import pytest

from fp8stack.__main__ import main
from fp8stack.comm.model import Cluster, estimate


def test_it_prints_the_cost_model_for_every_number_of_hosts(capsys):
    options = ["--hosts", "1", "32", "--gpus", "4", "--parameters", "1.5e9", "--network", "22"]
    assert main(["all-reduce", *options]) == 0
    text = capsys.readouterr().out
    assert "1,500,000,000 parameters" in text
    assert "not a measurement" in text
    *_, header, one, many = text.splitlines()
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts", "0"], "'0' is not a whole number above 0"),
        (["--hosts", "8", "two"], "'two' is not a whole number above 0"),
        (["--gpus", "1.5"], "'1.5' is not a whole number above 0"),
        (["--parameters", "inf"], "'inf' is not a whole number above 0"),
        (["--network", "nan"], "'nan' is not a number above 0"),
        (["--nvlink=-1"], "'-1' is not a number above 0"),
        (["--hosts", "1", "--gpus", "1"], "one GPU has nothing to reduce"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_numbers_are_refused(options, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["all-reduce", *options])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_it_is_a_module_to_run():
    command = [sys.executable, "-m", "fp8stack"]
    help_ = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "all-reduce" in help_.stdout
    nothing = subprocess.run(command, capture_output=True, text=True)
    assert nothing.returncode == 2
    assert "required: command" in nothing.stderr
