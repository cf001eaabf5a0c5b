"""Capabilities: every answer has a reason, by capability and by probe, never by name."""

import pytest
import torch

from fp8stack import capability


def test_answers_have_reasons(device):
    for question, answer in capability.report(device).items():
        assert isinstance(answer.ok, bool), question
        assert len(answer.reason) > 10, question
        assert bool(answer) is answer.ok


def test_the_probe_notices_a_product_that_is_wrong(monkeypatch):
    capability._probe_fp8_gemm.cache_clear()
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *a, **k: torch.zeros(16, 16, dtype=torch.bfloat16)
    )
    answer = capability.fp8_gemm("cpu")
    assert not answer
    assert "wrong numbers" in answer.reason
    capability._probe_fp8_gemm.cache_clear()


def test_the_probe_notices_a_product_that_fails(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("not on this machine\nlong trace")

    capability._probe_fp8_gemm.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", fail)
    answer = capability.fp8_gemm("cpu")
    assert not answer
    assert answer.reason.endswith("not on this machine")
    capability._probe_fp8_gemm.cache_clear()


@pytest.mark.parametrize(("found", "expected"), [((8, 0), False), ((8, 6), False), ((8, 8), False)])
def test_older_gpus_are_told_by_capability(monkeypatch, found, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 (so it says)")
    answer = capability.fp8_gemm("cuda:0")
    assert answer.ok is expected
    assert f"({found[0]}.{found[1]})" in answer.reason


def test_other_devices_are_named():
    assert "not on mps" in capability.fp8_gemm("mps").reason
    assert "not on mps" in capability.fp8_optimizer("mps").reason


@pytest.mark.gpu
def test_this_gpu_runs_fp8():
    if torch.cuda.get_device_capability() >= (8, 9):
        assert capability.fp8_gemm("cuda")
