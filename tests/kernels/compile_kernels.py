"""Compile every Triton kernel for GPUs that need not be there, disassemble some, count; prints one line of JSON.

Run by test_compile.py in a process of its own, since Triton's interpreter, once chosen, compiles nothing:

    python tests/kernels/compile_kernels.py '[["_step_kernel", "adam fp32 keep, fp32 gradient"]]'

The argument names the kernels and cases that are disassembled too, which takes longer than a compilation.

Each case is one specialization of a kernel; pointers are taken as 16-byte aligned, as torch's are. Instructions are
counted in the straight path of the kernel, which every thread walks through once (a loop's body counts once): the
out-of-line routines for square roots and quotients of subnormal numbers are left out.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

try:
    from triton.backends.compiler import AttrsDescriptor  # of Triton 3.2
except ImportError:
    AttrsDescriptor = None

import fp8stack.kernels
from fp8stack.formats import E4M3, E5M2, FORMATS
from fp8stack.kernels import cast, norm, rmsnorm, step, step_scalars
from fp8stack.kernels.launch import Launcher
from fp8stack.kernels.reference.rmsnorm import MOST_COLS
from fp8stack.kernels.rows import BLOCK, WIDTH

ARCHITECTURES = (80, 90)
ALWAYS = ("rows16", "cols16", "rows64", "rows_padded", "cols_padded")  # multiples of 16
ANY = (  # which may be no multiple of 16
    "blocks_per_row", "count", "rounds", "history", "block_rows", "stride_c", "programs", "all_blocks", "per", "ranks",
    "scale_pitch", "scale_step", "blocks", "rank", "call", "timeout",
    "tiles", "across", "pairs", "experts",
)  # fmt: skip
NUMBERS = {
    "growth": "fp32", "eps": "fp32", "share": "fp32", "rest": "fp32", "low": "fp32", "high": "fp32", "timeout": "i64",
}  # and i32  # fmt: skip
POINTERS = {  # where a case says nothing else; and fp32
    "table_ptr": "i64", "owner_ptr": "i32", "amax_ptr": "i32", "partial_ptr": "fp64", "group_ptr": "fp64",
    "group_of_ptr": "i32", "index_ptr": "i32", "parts_ptr": "i32", "seed_ptr": "i32", "slots_ptr": "i32",
    "a_notes_ptr": "i32", "b_notes_ptr": "i32", "peers_ptr": "i64", "missing_ptr": "i32", "wire_ptr": "u8",
    "codes_ptr": "u8",
}  # fmt: skip
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


@cache
def find_kernels():
    """Return the Triton kernels of the library by name, with their modules."""
    found = {}
    for path in sorted(Path(fp8stack.kernels.__file__).parent.glob("*.py")):
        if path.stem not in ("__init__", "ops"):
            module = import_module(f"fp8stack.kernels.{path.stem}")
            kernels = [n for n in vars(module) if n.endswith("_kernel")]
            found |= {n: module for n in kernels if jitted(module, n).__module__ == module.__name__}
    return found


def jitted(module, name):
    """Return a kernel as `triton.jit` made it."""
    kernel = vars(module)[name]
    return kernel.kernel if isinstance(kernel, Launcher) else kernel


@cache
def find_launchers():
    """Return a Launcher for each kernel; `rmsnorm.py` has several of one kernel, which differ in their options."""
    modules = set(find_kernels().values())
    values = [value for module in modules for value in vars(module).values()]
    values += [one for value in values if isinstance(value, dict) for one in value.values()]
    return {one.kernel.__name__: one for one in values if isinstance(one, Launcher)}


MOMENTS = {
    "8bit": ("s1e3m4", "ue3m5", tl.uint8, tl.uint8), "fp8": ("e4m3", "e4m3_root", tl.uint8, tl.uint8),
    "4bit": ("s1e3m4", "ue3m1", tl.uint8, tl.uint8), "fp8-lm": ("tensor", "tensor", tl.uint8, tl.float16),
    "bf16": ("dense", "dithered", tl.bfloat16, tl.int16), "fp32": ("dense", "dense", tl.float32, tl.float32),
    "none": ("", "", tl.float32, tl.float32),
}  # fmt: skip
MASTERS = {  # kind, dtypes of the weight and of the master
    "split24": ("split", tl.int16, tl.int8),
    "split32": ("split", tl.int16, tl.int16),
    "none": ("dithered", tl.int16, tl.float32),
    "fp32": ("dense", tl.bfloat16, tl.float32),
    "fp16": ("tensor", tl.bfloat16, tl.float16),
    "keep": ("", tl.float32, tl.float32),
    "direction": ("", tl.bfloat16, tl.float32),  # what Muon orthogonalizes
}
GRADIENTS = {"fp8": tl.uint8, "fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}


def step_cases():
    """Yield (label, pointer types, constants): every algorithm, state and master; exact ones, to look for fusion."""
    for algorithm, states, master, gradient, *options in (
        ("adam", "8bit", "split24", "fp8"),
        ("adam", "8bit", "split24", "fp8", "rows of 16"),
        ("adam", "8bit", "split24", "fp8", "any rows"),
        ("adam", "8bit", "split24", "fp8", "exact"),
        ("adam", "8bit", "split32", "bf16", "coupled", "exact"),
        ("adam", "fp8", "split24", "fp8"),
        ("adam", "fp8", "fp32", "fp32", "exact", "any rows"),
        ("adam", "4bit", "split24", "fp8"),
        ("adam", "4bit", "none", "fp8", "exact", "any rows"),
        ("adam", "fp8-lm", "fp16", "fp8", "first pass"),
        ("adam", "fp8-lm", "fp16", "fp8", "second pass", "exact"),
        ("adam", "bf16", "none", "bf16", "coupled"),
        ("adam", "fp32", "keep", "fp32"),
        ("adam", "fp32", "keep", "fp32", "exact"),
        ("sgd", "none", "split24", "fp16", "coupled", "exact"),
        ("nesterov", "8bit", "split24", "fp8", "coupled", "exact"),
        ("lion", "8bit", "split24", "fp8"),
        ("lion", "fp32", "keep", "fp32", "exact"),
        ("muon", "8bit", "direction", "fp8"),
        ("muon", "8bit", "direction", "fp8", "exact"),
    ):
        m, v, m_type, v_type = MOMENTS[states]
        kind, weight_type, master_type = MASTERS[master]
        rows = "any" if "any rows" in options else "sixteen" if "rows of 16" in options else "flat"
        constants = {
            "ALGORITHM": algorithm, "COUPLED": "coupled" in options, "MASTER": kind,
            "M": m, "V": v if algorithm == "adam" else "", "WEIGHT_TYPE": weight_type,
            "MASTER_TYPE": master_type, "GRAD_TYPE": GRADIENTS[gradient], "M_TYPE": m_type,
            "V_TYPE": v_type, "ROWS": rows,
            "PASS": 1 if "first pass" in options else 2 if "second pass" in options else 0,
            "FAST": "exact" not in options,
        }  # fmt: skip
        label = ", ".join([f"{algorithm} {states} {master}", f"{gradient} gradient", *options])
        yield label, {}, constants


def gradient_cases():
    """Yield the cases of a kernel that reads gradients of one dtype."""
    for gradient, rows in (("fp8", "flat"), ("fp8", "any"), ("bf16", "flat"), ("fp32", "any")):
        label = gradient + ("" if rows == "flat" else ", any rows")
        yield label, {"out_ptr": "i32"}, {"TYPE": GRADIENTS[gradient], "ROWS": rows}


def list_cases():
    for label, pointers, constants in gradient_cases():  # fp8 is what clamp_list limits
        yield label, pointers, constants | {"MANTISSA": 3}


def quantize_cases():
    for name, dtype, even in (
        ("e4m3", "bf16", True), ("e4m3", "fp16", False), ("e5m2", "bf16", True), ("s1e3m4", "fp32", False),
        ("ue3m5", "fp32", True), ("e4m3_root", "fp32", True),
    ):  # fmt: skip
        fmt = FORMATS[name]
        yield f"{name}, {dtype}" + ("" if even else ", odd rows"), dict.fromkeys(INPUTS, dtype), {
            "MANTISSA": fmt.mantissa_bits, "MIN_EXPONENT": fmt.min_exponent, "SIGNED": fmt.signed,
            "SQUARED": fmt.squared, "EVEN": even, "STATE": "" if fmt in (E4M3, E5M2) else name,
        }  # fmt: skip


SWIGLU = {"ACTIVATION": "silu", "GATED": True, "SUMS": False}
INPUTS = ("x_ptr", "d_ptr", "g_ptr", "u_ptr", "y_ptr", "dy_ptr", "dx_ptr", "weight_ptr", "out_ptr")
CODES = ("codes_ptr", "codes_t_ptr", "a_ptr", "a_t_ptr", "b_ptr", "b_t_ptr")


def matrix_cases():
    """Yield the cases of a kernel that casts tiles of a matrix: operands of FP8 GEMMs."""
    for fmt, dtype, even in ((E4M3, "bf16", True), (E5M2, "fp32", False), (E4M3, "fp16", False)):
        codes = dict.fromkeys(CODES, "fp8e4nv" if fmt is E4M3 else "fp8e5")
        young = {
            "SEED": not even, "AGAIN": dtype == "fp16", "UPDATE": dtype != "fp16", "EXACT": not even,
        }  # fmt: skip
        label = f"{fmt.name}, {dtype}" + ("" if even else ", any size")
        yield label, dict.fromkeys(INPUTS, dtype) | codes | {"h_t_ptr": "fp8e4nv"}, young | {
            "MANTISSA": fmt.mantissa_bits, "EVEN": even, "CODES": True, "TRANSPOSED": True,
        }  # fmt: skip


def blocks_cases():
    for name, squares in {
        "": (False, False),
        ", squares": (True, True),
        ", squares transposed": (False, True),
    }.items():
        for label, pointers, constants in matrix_cases():
            own = dict(zip(("SQUARES", "SQUARES_T"), squares, strict=True))
            yield label + name, pointers, constants | own


def activation_cases():
    for label, pointers, constants in matrix_cases():
        for activation in ("gelu", "gelu_tanh", "relu"):
            how = {
                "ACTIVATION": activation, "GATED": False, "SUMS": True, "BACKWARD": True, "DELAYED": False,
            }  # fmt: skip
            yield f"{activation}, sums, {label}", pointers, constants | how
        for delayed in (False, True):
            states = dict.fromkeys(("a_state_ptr", "b_state_ptr"), "fp32" if delayed else "i32")
            for name in ("forward", "backward"):
                how = SWIGLU | {"BACKWARD": name == "backward", "DELAYED": delayed}
                parts = {"PARTS": 1} if delayed else {}
                name += ", delayed" * delayed + "," + label.split(",", 1)[1]
                yield name, pointers | states, constants | how | parts


def parts_cases():
    for dtype in ("bf16", "fp32"):
        yield dtype, dict.fromkeys(INPUTS, dtype), SWIGLU | {"BACKWARD": dtype == "bf16"}


def expert_cases():
    for dtype, even in (("bf16", True), ("fp32", False)):
        pointers = (
            dict.fromkeys(INPUTS, dtype)
            | dict.fromkeys((*CODES, "h_t_ptr"), "fp8e4nv")
            | {"w_ptr": "fp32"}
        )
        for backward in (False, True):
            label = f"{'backward' if backward else 'forward'}, {dtype}" + ", any size" * (not even)
            yield label, pointers, {"ACTIVATION": "silu", "BACKWARD": backward, "EVEN": even}


ROUTED = {"ids_ptr": "i64"} | dict.fromkeys(("counts_ptr", "ends_ptr", "places_ptr"), "i32")


def rows_cases():
    for layouts in ((True, True), (False, True)):
        codes = dict.fromkeys(("codes_ptr", "plain_ptr", "turned_ptr"), "fp8e4nv")
        yield str(layouts), codes, dict(zip(("PLAIN", "TURNED"), layouts, strict=True))


def rmsnorm_cases():
    longest = 1, MOST_COLS
    for dtype, size in (
        ("bf16", (1, 4096)),
        ("fp32", (4, 1024)),
        ("bf16", longest),
        ("fp32", longest),
    ):
        label = dtype + (", longest rows" if size == longest else "")
        tile = {"ROWS": size[0], "COLS": size[1], "WEIGHT": True}
        yield label, dict.fromkeys(INPUTS, dtype), tile


def by_row_cases():
    """Yield the cases of a kernel that casts with a scale for each row: rows in registers, and longer ones."""
    for dtype, whole, size in (
        ("bf16", True, (2, 4096)),
        ("bf16", False, (1, 8192)),
        ("fp32", True, (1, 8192)),
    ):
        label = dtype + ("" if whole else ", long rows") + ", 8192" * (dtype == "fp32")
        pointers = dict.fromkeys(INPUTS, dtype) | {"codes_ptr": "fp8e4nv"}
        for activation in (None, "silu"):
            yield label + ", silu" * bool(activation), pointers, {
                "MANTISSA": 3, "WHOLE": whole, "ROWS": size[0], "COLS": size[1], "ACTIVATION": activation,
                "GATED": bool(activation),
            }  # fmt: skip


def wire_cases():
    for kind, dtype in (("values", "bf16"), ("codes", "u8")):
        codes = {"CODES": kind == "codes", "PACK": kind == "codes", "DIVIDE": True}
        yield kind, dict.fromkeys(INPUTS, dtype), codes | {"EVEN": True, "BLOCKS": 16}


def two_shot_cases():
    for kind, dtype, other in (
        ("bf16", "bf16", {}),
        ("codes", "u8", {"CODES_IN": True, "CODES_OUT": True}),
        ("scatter", "fp32", {"SCATTER": True, "EVEN": False}),
    ):
        constants = {
            "SCATTER": False, "CODES_IN": False, "CODES_OUT": False, "WORLD": 4, "EVEN": True, "BLOCKS": 32,
        }  # fmt: skip
        yield kind, dict.fromkeys(INPUTS, dtype) | {"steps_ptr": "i32"}, constants | {
            "DIVIDE": True, "FLAT": True,
        } | other  # fmt: skip


def accumulate_cases():
    codes = dict.fromkeys(("codes_ptr", "residual_codes_ptr"), "u8")
    for dtype, even in (("bf16", True), ("fp32", False)):
        yield dtype + ", odd rows" * (not even), codes | {"x_ptr": dtype}, {"EVEN": even}


def count_cases():
    for dtype, blocks in (("bf16", False), ("fp32", True)):
        yield f"{dtype}, blocks" if blocks else dtype, {"x_ptr": dtype, "out_ptr": "i64", "sums_ptr": "fp64"}, {
            "ZERO": 2.0**-10, "CLIPPED": 464.0, "BLOCKS": blocks, "MANTISSA": 3, "MIN_EXPONENT": -6,
        }  # fmt: skip


WIDENED = ("a_ptr", "b_ptr", "c_ptr", "d_ptr")
CASES = {  # label, types of pointers, constants (and others, for other kernels of the same kind)
    "_step_kernel": step_cases(),
    "_scales_kernel": [("", {}, dict.fromkeys(("M", "V", "MASTER"), True))],
    "_scalars_kernel": [(name, {}, {"ALGORITHM": name}) for name in ("adam", "sgd", "lion", "muon")],
    "_root_kernel": [("", {}, {"SIZE": 1024})],
    "_roots_kernel": [("", {}, {"SIZE": 64})],
    "_count_kernel": count_cases(),
    "_quantize_list_kernel": list_cases(),
    "_cross_entropy_kernel": [
        (f"{dtype}", {"logits_ptr": dtype, "labels_ptr": "i64"}, {"GRADIENT": True, "WORDS": 4096})
        for dtype in ("bf16", "fp32")
    ],
    "_widened_sum_kernel": [("", dict.fromkeys(WIDENED, "bf16"), {"COUNT": 4, "ELEMENTS": 4096})],
    "_update_kernel": [
        ("most_recent" if latest else "max", {}, {"MOST_RECENT": latest, "MANTISSA": 3, "HISTORY": 1024})
        for latest in (False, True)
    ],
    "_activation_cast_kernel": activation_cases(),
    "_take_rows_kernel": rows_cases(),
    "_count_pairs_kernel": [("", ROUTED, {"BLOCK": BLOCK})],
    "_route_kernel": [("", ROUTED, {"BLOCK": BLOCK, "ALIGNMENT": 16, "EXPERTS": 128})],
    "_sum_rows_kernel": [
        (f"{n} rows", {"x_ptr": "bf16", "places_ptr": "i32", "total_ptr": "bf16"}, {"COUNT": n}) for n in (1, 8)
    ],
    "_accumulate_blocks_kernel": accumulate_cases(),
    "_two_shot_kernel": two_shot_cases(),
    "_rmsnorm_sums_kernel": [
        ("bf16", {"out_ptr": "bf16"}, {"PROGRAMS": rmsnorm.PROGRAMS, "COLS": rmsnorm.SUMMED})
    ],
}  # fmt: skip
for cases, kernels in {
    gradient_cases: "largest squares", quantize_cases: "quantize_blocks dequantize_blocks",
    matrix_cases: "cast_tiles recast_tiles refit cast_delayed",
    blocks_cases: "cast_blocks",
    parts_cases: "parts seed activation_parts",
    expert_cases: "expert_parts expert_cast", wire_cases: "pack reduce unpack",
    rmsnorm_cases: "rmsnorm rmsnorm_backward", by_row_cases: "cast_rows",
}.items():  # fmt: skip
    CASES |= {f"_{name}_kernel": [*cases()] for name in kernels.split()}
SIZES = {  # where its module says nothing else
    "BLOCKS": step.BLOCKS, "TILE": norm.TILE, "FLAT": cast.FLAT, "SIZE": step_scalars.SIZE, "PARTS": cast.PARTS,
    "SLOTS": cast.SLOTS, "ROWS": cast.ROWS, "COLS": cast.COLS, "HARDWARE": None,
    "WIDTH": WIDTH,
}  # fmt: skip


def elements_of(name, constants):
    """Return how many elements a program works on at a time."""
    if name == "_cast_blocks_kernel":
        return 128 * 128
    if isinstance(constants.get("ROWS"), int):
        return constants["ROWS"] * constants["COLS"]
    return constants.get("FLAT") or 128 * (constants.get("BLOCKS") or constants.get("TILE", 1))


def launch_options(name, constants):
    """Return what the library launches a specialization with."""
    if name in ("_rmsnorm_kernel", "_rmsnorm_backward_kernel"):
        return {"num_warps": rmsnorm._tiling(1, constants["COLS"])[3]}
    return find_launchers()[name].options


def type_of(name, pointers):
    return pointers.get(name) or POINTERS.get(name, "fp32")


def compile_case(kernel, pointers, constants, architecture, options):
    """Return the compiled kernel."""
    names = kernel.arg_names
    if "HARDWARE" in constants:  # as `fp8.casts_in_hardware` decides
        constants = constants | {"HARDWARE": architecture >= 90}
    types = {
        n: f"*{type_of(n, pointers)}" if n.endswith("_ptr") else NUMBERS.get(n, "i32")
        for n in names
    }
    if architecture < 89:  # which has no such type; casts to it never run there
        types = {name: dtype.replace("fp8e4nv", "u8") for name, dtype in types.items()}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    even = constants.get("EVEN", True)
    aligned = [
        n for n in names
        if n.endswith("_ptr") or n in ALWAYS or (even and n not in constants and n not in ANY and n not in NUMBERS)
    ]  # fmt: skip
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    if AttrsDescriptor:
        attributes = AttrsDescriptor.from_hints({names.index(name): 16 for name in aligned})
        signature = {name: kind for name, kind in signature.items() if kind != "constexpr"}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def disassemble(cubin):
    """Return the machine code of a cubin as text, by the disassembler that Triton brings along."""
    nvdisasm = next(Path(triton.__file__).parent.rglob("nvdisasm"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run(
            [nvdisasm, "-c", "-ndf", file.name], capture_output=True, text=True, check=True
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
    """Return how often PTX contracts, flushes, approximates or casts to FP8 in hardware: what would change bits.

    A product with zero that is added, which makes infinities NaN, changes no others: it is counted as itself.
    """
    patterns = {
        "fused": r"\bfma\.(?!rz|rn\.f32 [^,]+, [^,]+, 0f00000000,)",  # rz: of a power of two, in `pack_unsigned`
        "spoiling": r"\bfma\.rn\.f32 [^,]+, [^,]+, 0f00000000,",
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
        kernel = jitted(module, name)
        sizes = {n: getattr(module, n, size) for n, size in SIZES.items()}
        for label, pointers, constants in CASES.get(name, ()):
            constants = sizes | constants
            yield (
                name,
                label,
                kernel,
                pointers,
                {n: constants[n] for n in kernel.arg_names if n in constants},
            )


def targets_of(cases, measured):
    """Return the architectures of each case: both where it is measured or its kernel has no other such case to show the
    casts of the hardware, in which alone their code differs. The others take turns."""
    targets, counts, turns = {}, Counter(name for name, *_ in cases), Counter()
    shown = {name for name, _ in measured}
    for name, label, *_, constants in cases:
        alone = counts[name] == 1 or ("HARDWARE" in constants and name not in shown)
        both = (name, label) in measured or alone
        targets[name, label] = ARCHITECTURES if both else ARCHITECTURES[1 - turns[name] % 2 :][:1]
        turns[name] += not both
    return targets


DTYPES = {
    "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp32": torch.float32, "fp64": torch.float64, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2,
}  # fmt: skip
OTHERS = {  # what an argument of a type is changed to, one at a time
    bool: (None, 1), int: (1, 17, 64, 2**33, 2**63, True, 48.0), float: (0.5, 1.0, 2), str: ("other",),
    tl.dtype: (tl.float64,), type(None): (False,),
}  # fmt: skip


def changed(value):
    """Yield other arguments in the place of `value`: tensors elsewhere and of other dtypes, numbers of other kinds."""
    if isinstance(value, torch.Tensor):
        room = torch.empty(64, dtype=torch.uint8)
        room = room[-room.data_ptr() % 16 :]
        size = value.element_size()
        yield room[size : 2 * size].view(value.dtype)  # not aligned, as no element has 16 bytes
        yield value.new_empty(1, dtype=torch.int16)
    else:
        yield from (not value,) if isinstance(value, bool) else ()
        yield from OTHERS[type(value)]


def unseen(launcher, pointers, constants):
    """Return arguments whose change makes Triton choose another variant, where the Launcher would not, or the other way
    round where a kernel does not specialize on them; and how many changes make Triton do so."""
    kernel = launcher.kernel
    bind = create_function_from_signature(
        kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    given = {}
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            given[name] = torch.empty(16, dtype=DTYPES[type_of(name, pointers)])
        else:
            given[name] = constants.get(name, 1.5 if NUMBERS.get(name) == "fp32" else 48)

    def choices(arguments):
        tensors, values = arguments[: launcher._tensors], arguments[launcher._tensors :]
        ours = launcher.variant(0, arguments, [t.data_ptr() for t in tensors], values)
        return str(bind(*arguments)[1]), id(ours)

    theirs, ours = choices((*given.values(),))
    blind, seen = [], 0
    for name, value in given.items():
        for other in changed(value):
            new_theirs, new_ours = choices((*(given | {name: other}).values(),))
            seen += new_theirs != theirs
            needless = name in (kernel.do_not_specialize or ()) and new_theirs == theirs
            if (new_ours == ours) == (new_theirs != theirs) and (needless or new_ours == ours):
                blind.append(f"{kernel.__name__}: {name}, {value!r} to {other!r}")
    return blind, seen


def main():
    results, measurements, errors, keys = [], [], [], {}
    measured = {tuple(case) for case in json.loads(sys.argv[1])}
    cases = list(specializations())
    targets = targets_of(cases, measured)
    with ThreadPoolExecutor(2) as pool:  # the disassembler is a process of its own
        for name, label, kernel, pointers, constants in cases:
            keys[f"{name}, {label}"] = unseen(find_launchers()[name], pointers, constants)
            for architecture in targets[name, label]:
                options = launch_options(name, constants)
                try:
                    compiled = compile_case(kernel, pointers, constants, architecture, options)
                except Exception as error:  # Triton's own and ptxas's: look at the others still
                    errors.append(f"{name}, {label}, sm_{architecture}: {error}")
                    continue
                result = {"kernel": name, "case": label, "sm": architecture}
                results.append(result | inspect(compiled.asm["ptx"]))
                if (name, label) in measured:
                    threads = 32 * compiled.metadata.num_warps / elements_of(name, constants)
                    future = pool.submit(measure, compiled.asm["cubin"], threads)
                    measurements.append((results[-1], future))
    for result, future in measurements:
        result |= future.result()
    report = {"kernels": sorted(find_kernels()), "results": results, "errors": errors, "keys": keys}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
