"""`fp8stack doctor`: what it reports of this machine, its self-tests, and the trouble it finds."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import workers_cli
from helpers import run_python

from fp8stack.__main__ import main
from fp8stack.cli import machine, selftest


@pytest.mark.slow
def test_it_tests_this_machine_for_real(capfd):
    """A GEMM, a step and an all-reduce between two processes, and JSON alone on stdout."""
    status = main(["doctor", "--json"])
    data = json.loads(capfd.readouterr().out)
    assert status == 0, data
    assert data["ok"]
    tests = data["self_test"]
    assert tests.keys() == {"gemm", "step", "all_reduce"}
    for name in ("step", "all_reduce"):
        assert tests[name]["status"] == "passed", tests[name]
    (first, *_) = data["capabilities"].values()
    assert tests["gemm"]["status"] == ("passed" if first["fp8_gemm"]["ok"] else "skipped")
    assert "(bound " in tests["step"]["reason"]


def test_it_prints_versions_capabilities_and_reasons(capsys):
    main(["doctor", "--no-self-test", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["environment"]["torch"] == torch.__version__
    assert data["environment"]["libraries"]["deepspeed"]
    assert data["self_test"] == {}
    for answers in data["capabilities"].values():
        asked = {"fp8_gemm", "fp8_optimizer", "transformer_engine", "bitsandbytes_optimizer"}
        assert asked <= answers.keys()
        assert all(answer["reason"] for answer in answers.values())
    main(["doctor", "--no-self-test"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"torch {torch.__version__}" in text
    assert "no FP8 hardware needed" in text or torch.cuda.is_available()


def test_bitsandbytes_asks_for_no_kernels_of_the_cpu():
    """In a process of its own: it asks once, when it is imported."""
    pytest.importorskip("bitsandbytes")
    result = run_python("-m", "fp8stack", "doctor", "--no-self-test", "--json")
    assert json.loads(result.stdout)["environment"]["libraries"]["bitsandbytes"]
    assert "gemm_4bit_forward" not in result.stderr


def test_without_a_gpu_it_says_at_the_end_that_nothing_is_faster(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "find_problems", list)
    assert main(["doctor", "--no-self-test"]) == 0
    *_, told, more, verdict = capsys.readouterr().out.splitlines()
    assert told.startswith("There is no GPU that torch can use")
    assert "It will not be faster here" in more
    assert verdict == "All is well."


def test_a_self_test_that_hangs_or_dies_is_an_answer(capfd):
    with ThreadPoolExecutor(3) as pool:
        hung = pool.submit(selftest.run, workers_cli.hang, "cpu", limit=3.0)
        died = pool.submit(selftest.run, workers_cli.crash, "cpu")
        failed = pool.submit(selftest.run, workers_cli.fail, "cpu")
        denied = pool.submit(selftest.run, workers_cli.deny_on_second, "cpu", ranks=2)
    assert (hung.result().ok, hung.result().reason) == (
        False, "hang did not end within 3 s, and was killed",
    )  # fmt: skip
    assert not died.result()
    assert "terminated with signal SIGSEGV" in died.result().reason
    assert not failed.result()
    assert failed.result().reason == "fail: RuntimeError: no kernel image"
    assert (denied.result().ok, denied.result().reason) == (False, "rank 1")
    assert "to be seen nowhere" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("factor", "passes"), [(1.05, True), (1.2, False), (0.5, False), (math.nan, False)]
)
def test_wrong_numbers_fail_a_self_test(factor, passes):
    right = torch.linspace(0.5, 1.5, 100)
    parts = {"y": (right, right, 0.1), "z": (right * factor, right, 0.1)}
    assert bool(selftest.compare("x", parts, "float64")) == passes


def test_trouble_is_an_error_with_a_remedy(tmp_path, monkeypatch, capsys):
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    told = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    (tmp_path / "version").write_text(told)
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "version")
    assert main(["doctor", "--no-self-test"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "built without CUDA, and there is an NVIDIA driver (570.86.15)" in text
    assert "Something is wrong" in text
    told = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n"
    (tmp_path / "version").write_text(told)
    assert machine.driver() == "535.183.01"


def test_old_versions_are_compared_with_the_package_s_own_metadata():
    old = {"fp8stack": "0", "torch": "2.5.1", "deepspeed": "0.15.4", "transformers": "5.0.0"}
    problems = [*machine._of_versions({**old, "accelerate": "1.0"})]
    found = {t.what.split()[0]: t for t in problems}
    assert len(found) == len(problems)
    assert found.keys() == {"torch", "deepspeed", "accelerate"}
    assert found["torch"].severity == "error"
    assert found["deepspeed"].remedy.startswith('pip install "deepspeed>=0.')
    # the strictest of two extras
    assert found["accelerate"].remedy == 'pip install "accelerate>=1.1"'
    assert not list(machine._of_versions(machine.installed_versions()))
    assert not list(machine._of_versions({"fp8stack": "0", "torch": "2.6.0a0+nv"}))
