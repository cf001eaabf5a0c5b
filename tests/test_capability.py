"""Capabilities: every answer has a reason, by capability and by probe, never by name."""

import re

import pytest
import torch

from fp8stack import capability


def test_answers_have_reasons(device):
    for question, answer in capability.report(device).items():
        assert isinstance(answer.ok, bool), question
        assert len(answer.reason) > 10, question
        assert bool(answer) is answer.ok


def fail(*args, **kwargs):
    raise RuntimeError("not on this machine\nlong trace")


def multiply_wrongly(*args, **kwargs):
    return torch.zeros(16, 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("multiply", "said"), [(multiply_wrongly, "wrong numbers"), (fail, "not on this machine$")]
)
def test_the_probe_notices_a_product_that_is_wrong_or_fails(monkeypatch, multiply, said):
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    uncached = capability.probe.__wrapped__
    answer = uncached(capability._multiplies, "torch._scaled_mm", torch.device("cpu"))
    assert not answer
    assert re.search(said, answer.reason)


@pytest.mark.parametrize("found", [(8, 0), (8, 8)])
def test_older_gpus_are_told_by_capability(monkeypatch, found):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 (so it says)")
    answer = capability.fp8_gemm("cuda:0")
    assert not answer
    assert f"({found[0]}.{found[1]})" in answer.reason


def test_other_devices_are_named():
    assert "not on mps" in capability.fp8_gemm("mps").reason
    assert "not on mps" in capability.fp8_optimizer("mps").reason


def test_a_cpu_is_for_numerics_and_block_scales_for_cuda_12_9(monkeypatch):
    assert "numerics only, no speed-up" in capability.fp8_gemm("cpu").reason
    assert "plain torch reference" in capability.fp8_optimizer("cpu").reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", fail, raising=False)
    monkeypatch.setattr(capability, "_multiplies_blocks", fail)
    answer = capability.native_recipe("blockwise", "cuda:0")
    assert not answer
    assert re.search(r"not on this machine.*need CUDA 12\.9 or newer; this is ", answer.reason)


@pytest.mark.gpu
def test_this_gpu_runs_fp8():
    if torch.cuda.get_device_capability() >= (8, 9):
        assert capability.fp8_gemm("cuda")
