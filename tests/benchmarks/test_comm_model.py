"""The cost model of an all-reduce: known cases, and what the script prints."""

import pytest
from comm_model import Cluster, estimate, main

N = 2**27  # 256 MiB in bfloat16


@pytest.mark.parametrize(
    ("hosts", "within", "between", "ms"),
    [
        (8, "bf16", "bf16", 1.46), (8, "bf16", "fp8", 1.14), (8, "fp8", "fp8", 0.81),
        (128, "bf16", "bf16", 1.73), (128, "bf16", "fp8", 1.27), (128, "fp8", "fp8", 1.01),
    ],
)  # fmt: skip
def test_a_simulation_of_three_pipelined_stages_is_near(hosts, within, between, ms):
    """Of 256 MB over 8 and 128 hosts of 8 GPUs, stage by stage (research notes of this project)."""
    assert 1e3 * estimate(N, Cluster(hosts), within, between).seconds == pytest.approx(ms, rel=0.08)
    local = estimate(N, Cluster(1), "bf16", "fp8")
    assert (local.network, local.network_bytes) == (0, 0)
    assert local.nvlink == pytest.approx(7 / 8 * N * 4 / 370e9)  # gathered as it was scattered


def test_the_script_prints_a_line_for_each_number_of_hosts(capsys):
    main(["--hosts", "1", "32", "--gpus", "4", "--parameters", "1.5e9", "--network", "22"])
    text = capsys.readouterr().out
    assert "not a measurement" in text
    cells = text.splitlines()[-1].split()
    plain, ours = (estimate(1.5e9, Cluster(32, 4, network=22), k, k) for k in ("bf16", "fp8"))
    assert cells[2:4] == [f"{1e3 * e.seconds:.2f}" for e in (plain, ours)]
