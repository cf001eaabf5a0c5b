"""What a device can run, each answer with its reason.

FP8 GEMMs are decided by compute capability (8.9 and up) *and* by a live probe: a 16×32×16 product of known numbers
through `torch._scaled_mm`, in both format combinations that training needs. A device name decides nothing, so a GPU
that did not exist when this was written gets the right answer. On a CPU the probe alone decides: FP8 GEMMs run there
for numerics and tests, not for speed. Nothing here runs at import, and answers are remembered per device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch

from .errors import first_line
from .formats import E4M3, E5M2

FP8_CAPABILITY = (8, 9)
BITSANDBYTES_VERSION = (0, 50)


@dataclass(frozen=True)
class Answer:
    """Whether something can be used, and why or why not. True in a condition if it can."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def fp8_gemm(device: torch.device | str) -> Answer:
    """Can `torch._scaled_mm` multiply FP8 matrices on this device, forward (E4M3×E4M3) and backward (E5M2×E4M3)?"""
    device = indexed(torch.device(device))
    if device.type not in ("cuda", "cpu"):
        return Answer(
            False, f"fp8stack runs FP8 GEMMs on cuda and cpu devices, not on {device.type}"
        )
    hardware = fp8_hardware(device)
    if not hardware:
        return Answer(False, f"FP8 GEMMs need compute capability >= 8.9; {hardware.reason}")
    return _probe_fp8_gemm(device)


def native_recipe(fp8_recipe: str, device: torch.device | str) -> Answer:
    """Do native FP8 layers have this recipe on `device`, which must have FP8 GEMMs?"""
    device = indexed(torch.device(device))
    if fp8_recipe in ("mxfp8", "nvfp4"):
        return Answer(
            False, "native layers have no MXFP8 and NVFP4; TransformerEngine has, on Blackwell"
        )
    if fp8_recipe != "blockwise" or device.type != "cuda":
        return Answer(True, "any device with FP8 GEMMs")
    if torch.cuda.get_device_capability(device) != (9, 0):
        return Answer(
            False,
            f"cuBLAS multiplies with block scales on Hopper (9.0); {fp8_hardware(device).reason}",
        )
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return Answer(
            False,
            f"block scales need torch.nn.functional.scaled_mm (torch 2.10); this is {torch.__version__}",
        )
    return _probe_blocks(device)


def fp8_hardware(device: torch.device | str) -> Answer:
    """Is this a GPU with FP8 arithmetic? (Or a CPU, which does the same in software.)"""
    device = indexed(torch.device(device))
    if device.type != "cuda":
        return Answer(True, f"{device} computes what a GPU with FP8 would")
    capability = torch.cuda.get_device_capability(device)
    what = f"{device} is {torch.cuda.get_device_name(device)} ({capability[0]}.{capability[1]})"
    return Answer(capability >= FP8_CAPABILITY, what)


def fp8_optimizer(device: torch.device | str) -> Answer:
    """Do the optimizer kernels run on this device? Their codecs are integer arithmetic and need no FP8 hardware."""
    device = torch.device(device)
    if device.type == "cpu":
        return Answer(True, "pure-torch reference kernels")
    if device.type == "cuda":
        return Answer(True, "integer codecs: no FP8 hardware needed")
    return Answer(False, f"the optimizer kernels run on cuda and cpu devices, not on {device.type}")


def bitsandbytes_optimizer(device: torch.device | str) -> Answer:
    """Is bitsandbytes installed, and does its 8-bit AdamW take a step on this device?"""
    remedy = f'pip install "bitsandbytes>={BITSANDBYTES_VERSION[0]}.{BITSANDBYTES_VERSION[1]}"'
    try:
        import bitsandbytes
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "bitsandbytes"
        why = "is not installed" if missing else f"cannot be imported ({first_line(error)})"
        return Answer(False, f"bitsandbytes {why}: {remedy}")
    except Exception as error:  # whatever its native library makes of this machine
        return Answer(False, f"bitsandbytes cannot be imported ({first_line(error)})")
    version = str(getattr(bitsandbytes, "__version__", "of no version"))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < BITSANDBYTES_VERSION:
        return Answer(False, f"bitsandbytes {version} is too old: {remedy}")
    return _probe_bitsandbytes(indexed(torch.device(device)))


def transformer_engine(device: torch.device | str) -> Answer:
    """Is TransformerEngine installed as a whole, and does its FP8 Linear run forward and backward on this device?"""
    from . import capability_te

    return capability_te.transformer_engine(device)


def report(device: torch.device | str) -> dict[str, Answer]:
    """Return every answer for `device`, by question."""
    questions = (fp8_gemm, fp8_optimizer, transformer_engine, bitsandbytes_optimizer)
    return {question.__name__: question(device) for question in questions}


def indexed(device: torch.device) -> torch.device:
    """Return `device` with its index, so that "cuda" and "cuda:0" share an answer."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@cache
def _probe_fp8_gemm(device: torch.device) -> Answer:
    """Multiply small integers, which FP8 holds exactly, and compare with the float32 product."""
    a = torch.arange(16 * 32, device=device).reshape(16, 32).remainder(5).float() - 2
    b = torch.arange(16 * 32, device=device).reshape(16, 32).remainder(3).float() - 1
    two = torch.full((), 2.0, dtype=torch.float32, device=device)
    for left in (E4M3, E5M2):
        try:
            product = torch._scaled_mm(
                a.to(left.dtype),
                b.to(E4M3.dtype).t(),
                scale_a=two,
                scale_b=two,
                out_dtype=torch.bfloat16,
            )
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:
            what = f"torch._scaled_mm ({left.name} × e4m3) failed on {device}"
            return Answer(False, f"{what}: {first_line(error)}")
        if not torch.equal(product.float(), 4 * (a @ b.t())):
            return Answer(
                False, f"torch._scaled_mm ({left.name} × e4m3) gave wrong numbers on {device}"
            )
    where = (
        "compute capability and probe"
        if device.type == "cuda"
        else "probe (numerics only, no speed-up)"
    )
    return Answer(True, f"{where} passed on {device}")


@cache
def _probe_blocks(device: torch.device) -> Answer:
    """Multiply ones of 128×128 with block scales of 2."""
    kinds = torch.nn.functional.ScalingType
    ones = torch.ones(128, 128, device=device).to(E4M3.dtype)
    rows, square = torch.full((1, 128), 2.0, device=device), torch.full((1, 4), 2.0, device=device)
    try:
        for scale, kind in ((rows, kinds.BlockWise1x128), (square, kinds.BlockWise128x128)):
            product = torch.nn.functional.scaled_mm(
                ones, ones.t(), rows.t(), kinds.BlockWise1x128, scale.t(), kind
            )
            if not bool((product == 512).all()):
                return Answer(False, f"cuBLAS gave wrong numbers with block scales on {device}")
    except (RuntimeError, ValueError) as error:
        return Answer(
            False,
            f"block scales need CUDA 12.9 (this is {torch.version.cuda}): {first_line(error)}",
        )
    return Answer(True, f"probe of block scales passed on {device}")


@cache
def _probe_bitsandbytes(device: torch.device) -> Answer:
    """Take one step of a known length with 8-bit states."""
    p = torch.nn.Parameter(torch.ones(4096, dtype=torch.float32, device=device))
    p.grad = torch.ones_like(p)
    try:
        from bitsandbytes.optim import AdamW8bit

        AdamW8bit([p], lr=0.5, weight_decay=0.0).step()
        right = bool((p - 0.5).abs().max() < 1e-4)
    except Exception as error:  # a missing native library raises any
        return Answer(False, f"bitsandbytes failed on {device}: {first_line(error)}")
    if not right:
        return Answer(False, f"bitsandbytes took a wrong step on {device}")
    return Answer(True, f"a step of bitsandbytes' AdamW8bit was right on {device}")
