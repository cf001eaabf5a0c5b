"""`fp8stack doctor`: what this machine can run in FP8, whether it does, and what is known to be wrong with it.

It lists versions and GPUs, asks every capability of every GPU with its reason, looks for known problems, and tests an
FP8 GEMM, an optimizer step and an all-reduce for real (`selftest.py`). Exit status 1: an error was found or a test
failed. With --deepspeed a configuration of DeepSpeed is looked at instead of the machine (`deepspeed_config.py`).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from fp8stack import capability
from fp8stack.errors import ConfigError
from fp8stack.kernels.ops import kernel_backend

from . import deepspeed_config, machine, selftest
from .output import Lines, show, size, table


def run(options: argparse.Namespace) -> int:
    if options.deepspeed is not None:
        found = deepspeed_config.diagnose(options.deepspeed, options.model, options.opt_level)
        show(options, found, deepspeed_config.draw)
        return int(any(f["severity"] == "error" for f in found["findings"]))
    if options.model is not None or options.opt_level is not None:
        raise ConfigError("--model and --opt-level go with --deepspeed ds_config.json.")
    device, environment = machine.device(), machine.environment()
    places = {f"cuda:{i} ({gpu['name']})": f"cuda:{i}" for i, gpu in enumerate(environment["gpus"])}
    data: dict[str, Any] = {
        "environment": environment,
        "capabilities": {
            name: capabilities(torch.device(place))
            for name, place in (places or {"cpu": "cpu"}).items()
        },
        "self_test": {} if options.no_self_test else selftest.run_all(device),
    }
    # last: now libraries are loaded
    data["trouble"] = [problem._asdict() for problem in machine.find_problems()]
    failed = any(t["status"] == "failed" for t in data["self_test"].values())
    data["ok"] = not failed and all(t["severity"] != "error" for t in data["trouble"])
    show(options, data, draw)
    return int(not data["ok"])


def capabilities(device: torch.device) -> dict[str, dict[str, Any]]:
    """Return every answer about `device` with its reason, by question."""
    answers = capability.report(device)
    if answers["fp8_gemm"]:
        answers["fp8_gemm_blockwise"] = capability.native_recipe("blockwise", device)
    backend, reason = kernel_backend()
    if device.type == "cuda":
        answers["triton_kernels"] = capability.Answer(backend == "triton", reason)
    return {name: answer._asdict() for name, answer in answers.items()}


def draw(data: dict[str, Any]) -> Lines:
    """Show versions, capabilities, tests and problems."""
    environment = dict(data["environment"])
    libraries, gpus = environment.pop("libraries"), environment.pop("gpus")
    rows = [(name, value or "none") for name, value in environment.items()]
    for i, g in enumerate(gpus):
        memory = size(g["memory_bytes"])
        rows.append((f"GPU {i}", f"{g['name']}, compute capability {g['capability']}, {memory}"))
    rows.append(("libraries", ", ".join(f"{n} {v}" for n, v in libraries.items()) or "none"))
    yield table(("environment", ""), rows)
    for device, answers in data["capabilities"].items():
        able = ((name, "yes" if a["ok"] else "no", a["reason"]) for name, a in answers.items())
        yield table((device, "", "reason"), able)
    tests = (
        (name, t["status"], f"{t['seconds']:.1f}", t["reason"])
        for name, t in data["self_test"].items()
    )
    if data["self_test"]:
        yield table(("self-test", "", "s", "found"), tests, right="s")
    for found in data["trouble"]:
        yield f"{found['severity']}: {found['what']}. {found['remedy']}"
    if not gpus:
        yield (
            "There is no GPU that torch can use: everything runs on the CPU, where FP8 is\n"
            "emulated. It will not be faster here, only be shown to work."
        )
    yield "All is well." if data["ok"] else "Something is wrong: see above."
