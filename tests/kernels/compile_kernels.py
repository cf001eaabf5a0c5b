"""Compile every Triton kernel for GPUs that need not be there, disassemble some, count; prints one line of JSON.

Run by test_compile.py in a process of its own, since Triton's interpreter, once chosen, compiles nothing:

    python tests/kernels/compile_kernels.py

Each case is one specialization of a kernel; pointers are taken as 16-byte aligned, as torch's are. Instructions are
counted in the straight path of the kernel, which every thread walks through once: the out-of-line routines for square
roots and quotients of subnormal numbers are left out.
"""

import json
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import fp8stack.kernels
from fp8stack.formats import E4M3, E5M2, FORMATS
from fp8stack.kernels.quantize import LAUNCH

ARCHITECTURES = (80, 90)
MEASURED = {  # a disassembly takes longer than a compilation
    ("_adam_kernel", "split master, blocks gradient, 8bit states"),
    ("_adam_kernel", "split master, blocks gradient, 8bit states, odd rows"),
    ("_adam_kernel", "none master, fp32 gradient, fp32 states"),
    ("_quantize_blocks_kernel", "e4m3, bf16"),
    ("_quantize_blocks_kernel", "e4m3, fp16, odd rows"),
    ("_quantize_blocks_kernel", "ue3m5, fp32"),
    ("_dequantize_blocks_kernel", "e4m3, bf16"),
    ("_amax_kernel", "bf16"),
    ("_cast_kernel", "e4m3, bf16"),
}
INTEGERS = dict.fromkeys(("n_blocks", "blocks_per_row", "cols", "numel"), "i32")
FLOATS = dict.fromkeys(
    ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "weight_decay"), "fp32"
)
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


def find_kernels():
    """Return the Triton kernels of the library by name, with their modules."""
    found = {}
    for path in sorted(Path(fp8stack.kernels.__file__).parent.glob("*.py")):
        if path.stem in ("__init__", "ops"):
            continue
        module = import_module(f"fp8stack.kernels.{path.stem}")
        names = [n for n, value in vars(module).items() if isinstance(value, triton.JITFunction)]
        found |= {
            n: module
            for n in names
            if n.endswith("_kernel") and vars(module)[n].__module__ == module.__name__
        }
    return found


def adam_cases():
    """Yield (label, pointer types, constants) of the Adam kernel: masters, gradients, states, odd rows, Adam."""
    weights = {
        "none": (0, "fp32", "fp32"),
        "split": (1, "i16", "i8"),
        "float32": (2, "bf16", "fp32"),
    }
    for master, gradient, states, even, decoupled in (
        ("split", "blocks", "8bit", True, True),
        ("split", "blocks", "8bit", False, True),
        ("split", "blocks", "8bit", True, False),
        ("split", "bf16", "8bit", True, True),
        ("none", "fp32", "fp32", True, True),
        ("none", "fp16", "8bit", False, False),
        ("float32", "bf16", "bf16", False, False),
    ):
        kind, weight, remainder = weights[master]
        state = "u8" if states == "8bit" else states
        pointers = {
            "weight_ptr": weight, "master_ptr": remainder, "grad_ptr": "u8" if gradient == "blocks" else gradient,
            "grad_scale_ptr": "fp32", "m_ptr": state, "m_scale_ptr": "fp32", "v_ptr": state, "v_scale_ptr": "fp32",
            "hyper_ptr": "fp32",
        }  # fmt: skip
        constants = {
            "DECOUPLED": decoupled, "MASTER": kind, "GRAD_BLOCKS": gradient == "blocks",
            "STATE_BLOCKS": states == "8bit", "EVEN": even,
        }  # fmt: skip
        label = f"{master} master, {gradient} gradient, {states} states"
        label += ("" if even else ", odd rows") + ("" if decoupled else ", coupled")
        yield label, pointers, constants


def format_constants(fmt, names):
    values = {
        "MANTISSA": fmt.mantissa_bits, "MIN_EXPONENT": fmt.min_exponent, "MAX": fmt.max,
        "SIGNED": fmt.signed, "SQUARED": fmt.squared,
    }  # fmt: skip
    return {name: value for name, value in values.items() if name in names}


def quantize_cases(names):
    for name, dtype, even in (
        ("e4m3", "bf16", True),
        ("e4m3", "fp16", False),
        ("e5m2", "bf16", True),
        ("s1e3m4", "fp32", False),
        ("ue3m5", "fp32", True),
    ):
        pointers = {"x_ptr": dtype, "codes_ptr": "u8", "scale_ptr": "fp32", "out_ptr": dtype}
        label = f"{name}, {dtype}" + ("" if even else ", odd rows")
        yield label, pointers, {**format_constants(FORMATS[name], names), "EVEN": even}


def tensor_cases(names):
    for fmt, dtype in ((E4M3, "bf16"), (E5M2, "fp32")):
        pointers = {"x_ptr": dtype, "codes_ptr": "u8", "scale_ptr": "fp32", "amax_ptr": "i32"}
        label = f"{fmt.name}, {dtype}" if "MANTISSA" in names else dtype
        yield label, pointers, format_constants(fmt, names)


CASES = {
    "_adam_kernel": lambda names: adam_cases(),
    "_quantize_blocks_kernel": quantize_cases,
    "_dequantize_blocks_kernel": quantize_cases,
    "_amax_kernel": tensor_cases,
    "_cast_kernel": tensor_cases,
}


def compile_case(kernel, pointers, constants, architecture, options):
    """Return the compiled kernel."""
    names = kernel.arg_names
    types = INTEGERS | FLOATS | {name: f"*{dtype}" for name, dtype in pointers.items()}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    odd = not constants.get("EVEN", True)
    aligned = [
        n for n in names if n in pointers or (n in INTEGERS and n != "blocks_per_row" and not odd)
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def disassemble(cubin):
    """Return the machine code of a cubin as text, by the disassembler that Triton brings along."""
    nvdisasm = next(Path(triton.__file__).parent.rglob("nvdisasm"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run(
            [nvdisasm, "-c", file.name], capture_output=True, text=True, check=True
        )
    return run.stdout


def straight_path(sass):
    """Return the opcodes of the kernel itself, without padding and without the routines it calls."""
    opcodes, inside = [], False
    for line in sass.splitlines():
        if line.startswith(".text."):
            inside = True
        elif line.startswith("$") or (opcodes and line.lstrip().startswith(".section")):
            inside = False
        match = INSTRUCTION.match(line)
        if inside and match and match[1] != "NOP":
            opcodes.append(match[1])
    return opcodes


def inspect(ptx):
    """Return how often PTX contracts, flushes, approximates or casts to FP8 in hardware: what would change bits."""
    patterns = {
        "fused": r"\bfma\.",
        "flushing": r"\.ftz\b",
        "approximate": r"\.(approx|full)\b",
        "fp8": r"\.e[45]m[23]x2",
    }
    return {name: len(re.findall(pattern, ptx)) for name, pattern in patterns.items()}


def measure(cubin, threads_per_element):
    """Return machine instructions per element, those of the special function unit among them, and register spills."""
    opcodes = straight_path(disassemble(cubin))
    special = sum(opcode.startswith("MUFU") for opcode in opcodes)
    return {
        "instructions": len(opcodes) * threads_per_element,
        "special": special * threads_per_element,
        "spills": sum(opcode.startswith(("STL", "LDL")) for opcode in opcodes),
    }


def specializations():
    """Yield (kernel name, label, function, pointer types, all constants) of every case."""
    for name, module in find_kernels().items():
        kernel = getattr(module, name)
        sizes = {n: getattr(module, n) for n in ("BLOCKS", "FLAT") if n in kernel.arg_names}
        for label, pointers, constants in CASES.get(name, lambda names: [])(kernel.arg_names):
            pointers = {n: dtype for n, dtype in pointers.items() if n in kernel.arg_names}
            yield name, label, kernel, pointers, constants | sizes


def main():
    results, measurements = [], []
    with ThreadPoolExecutor(2) as pool:  # the disassembler is a process of its own
        for name, label, kernel, pointers, constants in specializations():
            elements = constants.get("FLAT") or 128 * constants["BLOCKS"]
            for architecture in ARCHITECTURES:
                compiled = compile_case(kernel, pointers, constants, architecture, LAUNCH)
                result = {"kernel": name, "case": label, "sm": architecture}
                results.append(result | inspect(compiled.asm["ptx"]))
                if (name, label) in MEASURED:
                    threads_per_element = 32 * compiled.metadata.num_warps / elements
                    future = pool.submit(measure, compiled.asm["cubin"], threads_per_element)
                    measurements.append((results[-1], future))
    for result, future in measurements:
        result |= future.result()
    print(json.dumps({"kernels": sorted(find_kernels()), "results": results}))


if __name__ == "__main__":
    main()
