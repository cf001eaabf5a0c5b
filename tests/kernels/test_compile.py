"""Every Triton kernel compiles for sm_80 and sm_90, without a GPU, and stays within its instruction budget.

Budgets are a tenth above what triton 3.9 gives. Below about 75 instructions and 9 special ones an element an optimizer
kernel is bound by memory on an H100; the default optimizer's has to stay well below, so its budget is tighter.
"""

import json
import os
from pathlib import Path

import pytest
from helpers import made_once, run_python

import fp8stack

SCRIPT = Path(__file__).with_name("compile_kernels.py")
BUDGETS = {  # (kernel, case): instructions an element; for sm_80 and sm_90 where the hardware casts on one of them
    ("_step_kernel", "adam 8bit split24, fp8 gradient"): 73,
    ("_step_kernel", "adam 8bit split24, fp8 gradient, rows of 16"): 80,
    ("_step_kernel", "adam 8bit split24, fp8 gradient, any rows"): 180,
    ("_step_kernel", "adam 8bit split24, fp8 gradient, exact"): 106,
    ("_step_kernel", "adam fp8 split24, fp8 gradient"): 95,
    ("_step_kernel", "adam 4bit split24, fp8 gradient"): 88,
    ("_step_kernel", "adam fp32 keep, fp32 gradient"): 31.5,
    ("_step_kernel", "lion 8bit split24, fp8 gradient"): 51.5,
    ("_step_kernel", "muon 8bit direction, fp8 gradient"): 34,
    ("_squares_kernel", "fp8"): 13,
    ("_quantize_blocks_kernel", "e4m3, bf16"): (23, 14),
    ("_quantize_blocks_kernel", "e4m3, fp16, odd rows"): 131,
    ("_quantize_blocks_kernel", "ue3m5, fp32"): 39,
    ("_dequantize_blocks_kernel", "e4m3, bf16"): 13.5,
    ("_parts_kernel", "bf16"): 8.1,
    ("_cast_tiles_kernel", "e4m3, bf16"): (21.5, 11.7),
    ("_cast_tiles_kernel", "e5m2, fp32, any size"): (23.5, 13.3),
    ("_recast_tiles_kernel", "e4m3, bf16"): (23.5, 12.8),
    ("_recast_tiles_kernel", "e5m2, fp32, any size"): (25.5, 14.5),
    ("_refit_kernel", "e4m3, bf16"): (28.5, 17),
    ("_refit_kernel", "e5m2, fp32, any size"): (30.5, 19),
    ("_cast_blocks_kernel", "e4m3, bf16"): (55.5, 26),
    ("_cast_blocks_kernel", "e4m3, bf16, squares transposed"): (39.2, 18.5),
    ("_cast_blocks_kernel", "e4m3, bf16, squares"): (23.5, 11),
    ("_cast_delayed_kernel", "e4m3, bf16"): (30, 12.9),
    ("_cast_rows_kernel", "bf16"): (30, 13),
    ("_cast_rows_kernel", "bf16, silu"): (45, 22),
    ("_activation_cast_kernel", "forward, bf16"): (44.5, 21.5),
    ("_activation_cast_kernel", "backward, bf16"): (107, 49.7),
    ("_activation_cast_kernel", "forward, delayed, bf16"): (44.5, 22.5),
    ("_activation_cast_kernel", "backward, delayed, bf16"): (107, 51),
    ("_activation_cast_kernel", "gelu, sums, e4m3, bf16"): (87, 57),
    ("_activation_cast_kernel", "gelu_tanh, sums, e4m3, bf16"): (84, 50),
    ("_expert_cast_kernel", "forward, bf16"): (60, 35),
    ("_expert_cast_kernel", "backward, bf16"): (150, 90),
    ("_accumulate_blocks_kernel", "bf16"): (80, 62),
    ("_rmsnorm_kernel", "bf16"): 19.8,
    ("_rmsnorm_backward_kernel", "bf16"): 25,
    ("_rmsnorm_kernel", "bf16, longest rows"): 20.4,
    ("_rmsnorm_kernel", "fp32, longest rows"): 18.4,
    ("_rmsnorm_backward_kernel", "bf16, longest rows"): 25,
    ("_rmsnorm_backward_kernel", "fp32, longest rows"): 21.3,
}
CASTS = {  # kernels that use the hardware's casts where there are any
    "_cast_tiles_kernel", "_recast_tiles_kernel", "_refit_kernel", "_cast_blocks_kernel",
    "_cast_delayed_kernel", "_cast_rows_kernel", "_activation_cast_kernel",
    "_expert_cast_kernel",
    "_pack_kernel", "_reduce_kernel", "_unpack_kernel",
    "_two_shot_kernel", "_quantize_blocks_kernel", "_quantize_list_kernel", "_accumulate_blocks_kernel",
}  # fmt: skip
INEXACT = (
    "_activation_", "_expert_", "_rmsnorm_", "_cross_entropy_",
)  # the GPU's exponential and root  # fmt: skip
CAST_NOTHING = {
    ("_pack_kernel", "codes"), ("_unpack_kernel", "codes"), ("_quantize_blocks_kernel", "e4m3_root, fp32"),
    ("_quantize_blocks_kernel", "ue3m5, fp32"), ("_quantize_blocks_kernel", "s1e3m4, fp32, odd rows"),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Run the script outside the interpreter, once for all workers; return its JSON."""
    folder = made_once(tmp_path_factory, "compiled", compile_all)
    return json.loads((folder / "found.json").read_text())


def compile_all(folder):
    root = str(Path(fp8stack.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    run = run_python(SCRIPT, json.dumps([*BUDGETS]), PYTHONPATH=path, TRITON_INTERPRET="0")
    assert run.returncode == 0, run.stderr
    (folder / "found.json").write_text(run.stdout)


def test_every_kernel_compiles_for_both_architectures(compiled):
    assert compiled["errors"] == []
    done = {(r["kernel"], r["sm"]) for r in compiled["results"]}
    assert done == {(kernel, sm) for kernel in compiled["kernels"] for sm in (80, 90)}, (
        "a kernel has no case in compile_kernels.py"
    )
    assert "_step_kernel" in compiled["kernels"]


def test_a_launch_key_shows_all_that_triton_specializes_on(compiled):
    """For every Launcher: dtypes, alignment, 1, multiples of 16, widths, types and constants, one at a time."""
    assert {key.split(",")[0] for key in compiled["keys"]} == set(compiled["kernels"])
    assert [what for blind, _ in compiled["keys"].values() for what in blind] == []
    assert all(seen >= 2 for _, seen in compiled["keys"].values())


def is_exact(result):
    """Return whether a kernel is to round as the reference does, operation by operation."""
    if result["kernel"] == "_step_kernel":
        return "exact" in result["case"]
    if result["kernel"].startswith(INEXACT):
        return False
    # powers, in float64; the GPU's exponential
    return (result["kernel"], result["case"].split(", ")[-1]) not in (
        ("_scalars_kernel", "adam"), ("_cast_rows_kernel", "silu"),
    )  # fmt: skip


@pytest.mark.parametrize("forbidden", ["fused", "flushing", "approximate", "fp8"])
def test_no_exact_kernel_rounds_otherwise_than_the_reference(compiled, forbidden):
    """No multiply-add, flush of subnormals, approximate division or root, or FP8 cast of the hardware but in casts."""
    exact = [r for r in compiled["results"] if is_exact(r)]
    inexact = {k for k in compiled["kernels"] if k.startswith(INEXACT)}
    assert {r["kernel"] for r in exact} == set(compiled["kernels"]) - inexact
    if forbidden == "fp8":
        exact = [r for r in exact if r["kernel"] not in CASTS]
    assert [r for r in exact if r[forbidden]] == []


def test_infinities_become_nan_where_the_hardware_would_saturate_them(compiled):
    """In casts whose scale is another matrix's: delayed ones, and those of SwiGLU."""
    spoiling = {r["kernel"] for r in compiled["results"] if r["spoiling"] and r["sm"] == 90}
    assert spoiling == {"_cast_delayed_kernel", "_activation_cast_kernel", "_expert_cast_kernel"}
    assert not any(r["spoiling"] for r in compiled["results"] if r["sm"] != 90)


def test_casts_use_the_hardware_where_it_rounds_as_we_do(compiled):
    casts = [r for r in compiled["results"] if r["kernel"] in CASTS]
    casts = [r for r in casts if (r["kernel"], r["case"]) not in CAST_NOTHING]
    assert {r["kernel"] for r in casts} == CASTS
    assert all((r["fp8"] > 0) == (r["sm"] == 90) for r in casts)


def test_fast_steps_approximate_but_use_no_fp8_hardware(compiled):
    """An approximate root and reciprocal per element are all that they flush or approximate."""
    fast = [r for r in compiled["results"] if r["kernel"] == "_step_kernel" and not is_exact(r)]
    assert fast
    hardware = [r for r in compiled["results"] if r["fp8"] and r["kernel"] not in CASTS]
    assert hardware == []
    for r in fast:
        assert r["fused"] > 0, r
        assert r["approximate"] > 0, r
        assert r["flushing"] <= r["approximate"], r


def test_kernels_stay_within_their_instruction_budgets(compiled):
    pytest.importorskip("triton", "3.9", reason="the budgets are of triton 3.9")
    measured = {
        (r["kernel"], r["case"], r["sm"]): r for r in compiled["results"] if "instructions" in r
    }
    assert {key[:2] for key in measured} == set(BUDGETS)
    assert len(measured) == 2 * len(BUDGETS)
    over = {}
    for (kernel, case, sm), r in measured.items():
        budget = BUDGETS[kernel, case]
        budget = budget[sm == 90] if isinstance(budget, tuple) else budget
        print(f"{kernel:26} {case:44} sm_{sm} {r['instructions']:6.1f} of {budget}, "
              f"{r['special']:.2f} special")  # fmt: skip
        if r["instructions"] > budget:
            over[kernel, case, sm] = r["instructions"]
    assert over == {}
    spilled = {key for key, r in measured.items() if r["spills"]}
    hoppers = (
        ("_cast_blocks_kernel", "e4m3, bf16"),
        ("_cast_blocks_kernel", "e4m3, bf16, squares transposed"),
    )
    assert spilled <= {(*case, 80) for case in hoppers}  # for products that run nowhere else
