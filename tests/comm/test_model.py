"""The cost model: known cases, limits, and errors."""

import math

import pytest

from fp8stack.comm.model import Cluster, estimate
from fp8stack.errors import ConfigError

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


def test_fp8_halves_the_network_s_bytes():
    plain, ours = (estimate(N, Cluster(32), kind, kind) for kind in ("bf16", "fp8"))
    assert ours.network_bytes / plain.network_bytes == pytest.approx(1.03125 / 2)
    assert plain.network_bytes == pytest.approx(2 * 31 / 32 * N / 8 * 2)


def test_one_host_sends_nothing_out_and_one_gpu_nothing_at_all():
    local = estimate(N, Cluster(1), "bf16", "fp8")
    assert (local.network, local.network_bytes) == (0, 0)
    assert local.nvlink == pytest.approx(7 / 8 * N * 4 / 370e9)  # gathered as it was scattered
    alone = estimate(N, Cluster(1, gpus=1), "bf16", "bf16")
    assert alone.seconds == 0


def test_parts_add_up_between_no_overlap_and_all():
    for chunks in (1, 4, 10**9):
        e = estimate(N, Cluster(4, chunks=chunks))
        parts = (e.nvlink, e.network, e.memory)
        expected = e.latency + max(parts) + (sum(parts) - max(parts)) / chunks
        assert math.isclose(e.seconds, expected)
    assert estimate(2 * N, Cluster(4)).seconds > estimate(N, Cluster(4)).seconds


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match=r'got "fp9"\. Did you mean "fp8"'):
        estimate(N, Cluster(), "fp9")
    with pytest.raises(ConfigError, match=r"Cluster\.hosts must be above 0, got 0"):
        Cluster(hosts=0)
