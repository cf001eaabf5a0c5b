"""Every Triton kernel compiles for sm_80 and sm_90, without a GPU, and stays within its instruction budget.

Budgets are a tenth above what triton 3.9 gives. An optimizer kernel is bound by memory below about 75 instructions and
9 special ones an element on an H100; the Adam kernel is not there yet.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fp8stack

SCRIPT = Path(__file__).with_name("compile_kernels.py")
BUDGETS = {  # (kernel, case): instructions an element
    ("_adam_kernel", "split master, blocks gradient, 8bit states"): 150,
    ("_adam_kernel", "split master, blocks gradient, 8bit states, odd rows"): 330,
    ("_adam_kernel", "none master, fp32 gradient, fp32 states"): 59,
    ("_quantize_blocks_kernel", "e4m3, bf16"): 23,
    ("_quantize_blocks_kernel", "e4m3, fp16, odd rows"): 131,
    ("_quantize_blocks_kernel", "ue3m5, fp32"): 41,
    ("_dequantize_blocks_kernel", "e4m3, bf16"): 13.5,
    ("_amax_kernel", "bf16"): 5.6,
    ("_cast_kernel", "e4m3, bf16"): 17.5,
}


@pytest.fixture(scope="module")
def compiled():
    """Run the script outside the interpreter; return its JSON."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(fp8stack.__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, env=env, timeout=300
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_kernel_compiles_for_both_architectures(compiled):
    done = {(r["kernel"], r["sm"]) for r in compiled["results"]}
    assert done == {(kernel, sm) for kernel in compiled["kernels"] for sm in (80, 90)}, (
        "a kernel has no case in compile_kernels.py"
    )
    assert "_adam_kernel" in compiled["kernels"]


@pytest.mark.parametrize("forbidden", ["fused", "flushing", "approximate", "fp8"])
def test_no_kernel_rounds_otherwise_than_the_reference(compiled, forbidden):
    """No multiply-add, flush of subnormals, approximate division or root, or FP8 cast of the hardware."""
    assert [r for r in compiled["results"] if r[forbidden]] == []


def test_kernels_stay_within_their_instruction_budgets(compiled):
    measured = {
        (r["kernel"], r["case"], r["sm"]): r for r in compiled["results"] if "instructions" in r
    }
    assert {key[:2] for key in measured} == set(BUDGETS)
    assert len(measured) == 2 * len(BUDGETS)
    for (kernel, case, sm), r in measured.items():
        print(f"{kernel:26} {case:54} sm_{sm} {r['instructions']:6.1f} of {BUDGETS[kernel, case]}, "
              f"{r['special']:.2f} special")  # fmt: skip
    over = {
        key: r["instructions"]
        for key, r in measured.items()
        if r["instructions"] > BUDGETS[key[:2]]
    }
    assert over == {}
    assert [key for key, r in measured.items() if r["spills"]] == []
