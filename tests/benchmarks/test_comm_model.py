"""The cost model of an all-reduce: known cases, limits, and what the script prints."""

import math

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


def test_bytes_and_parts():
    plain, ours = (estimate(N, Cluster(32), kind, kind) for kind in ("bf16", "fp8"))
    assert ours.network_bytes / plain.network_bytes == pytest.approx(1.03125 / 2)
    assert plain.network_bytes == pytest.approx(2 * 31 / 32 * N / 8 * 2)
    local = estimate(N, Cluster(1), "bf16", "fp8")
    assert (local.network, local.network_bytes) == (0, 0)
    assert local.nvlink == pytest.approx(7 / 8 * N * 4 / 370e9)  # gathered as it was scattered
    assert estimate(N, Cluster(1, gpus=1), "bf16", "bf16").seconds == 0
    for chunks in (1, 4, 10**9):  # from no overlap to all
        e = estimate(N, Cluster(4, chunks=chunks), "fp8", "fp8")
        parts = (e.nvlink, e.network, e.memory)
        expected = e.latency + max(parts) + (sum(parts) - max(parts)) / chunks
        assert math.isclose(e.seconds, expected)
    with pytest.raises(ValueError, match=r"Cluster\.hosts must be above 0, got 0"):
        Cluster(hosts=0)


def test_the_script_prints_a_line_for_each_number_of_hosts(capsys):
    main(["--hosts", "1", "32", "--gpus", "4", "--parameters", "1.5e9", "--network", "22"])
    text = capsys.readouterr().out
    assert "1,500,000,000 parameters" in text
    assert "not a measurement" in text
    cells = text.splitlines()[-1].split()
    cluster = Cluster(32, 4, network=22)
    plain, ours = (estimate(1.5e9, cluster, kind, kind) for kind in ("bf16", "fp8"))
    assert cells[:4] == ["32", "128", f"{1e3 * plain.seconds:.2f}", f"{1e3 * ours.seconds:.2f}"]
    assert cells[4:6] == [f"{plain.seconds / ours.seconds:.2f}×", "network"]
    assert cells[6:] == [f"{e.network_bytes / 1e6:.1f}" for e in (plain, ours)]
