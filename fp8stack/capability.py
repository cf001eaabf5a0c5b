"""What a device can run, each answer with its reason.

FP8 GEMMs are decided by compute capability (8.9 and up) *and* by a live probe: a 16×32×16 product of known numbers
through `torch._scaled_mm`, in both format combinations that training needs. A device name decides nothing, so a GPU
that did not exist when this was written gets the right answer. On a CPU plain torch multiplies, for numerics and tests,
not for speed. Nothing here runs at import, and answers are remembered per device.

TransformerEngine is looked for without importing anything; then it is imported on the cuDNN that torch uses, where it
checks itself that its packages have one version; then it multiplies known numbers, forward and backward.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .errors import UnsupportedDeviceError, first_line
from .formats import E4M3, E5M2

FP8_CAPABILITY = (8, 9)
BITSANDBYTES_VERSION = (0, 50)


class Answer(NamedTuple):
    """Whether something can be used, and why or why not. True in a condition if it can."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def fp8_gemm(device: torch.device | str) -> Answer:
    """Can FP8 matrices be multiplied on this device, forward (E4M3×E4M3) and backward (E5M2×E4M3)?"""
    device = indexed(torch.device(device))
    if device.type not in ("cuda", "cpu"):
        return Answer(False, f"FP8 GEMMs run on cuda and cpu devices, not on {device.type}")
    if not (hardware := fp8_hardware(device)):
        return Answer(False, f"FP8 GEMMs need compute capability >= 8.9; {hardware.reason}")
    if device.type == "cpu":
        return Answer(True, "plain torch on a CPU: numerics only, no speed-up")
    return probe(_multiplies, "torch._scaled_mm", device)


def native_recipe(fp8_recipe: str, device: torch.device | str) -> Answer:
    """Do native FP8 layers have this recipe on `device`, which must have FP8 GEMMs?"""
    device = indexed(torch.device(device))
    if fp8_recipe in ("mxfp8", "nvfp4"):
        why = "native layers have no MXFP8 and NVFP4; TransformerEngine has, on Blackwell"
        return Answer(False, why)
    if fp8_recipe not in ("tokenwise", "rowwise", "blockwise") or device.type != "cuda":
        return Answer(True, "any device with FP8 GEMMs")
    if fp8_recipe != "blockwise":
        return probe(_multiplies_rows, "torch._scaled_mm with a scale for each row", device)
    if torch.cuda.get_device_capability(device) != (9, 0):
        found = fp8_hardware(device).reason
        return Answer(False, f"cuBLAS multiplies with block scales on Hopper (9.0); {found}")
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return Answer(False, f"block scales need torch 2.10; this is {torch.__version__}")
    if answer := probe(_multiplies_blocks, "cuBLAS with block scales", device):
        return answer
    needed = f"block scales need CUDA 12.9 or newer; this is {torch.version.cuda}"
    return Answer(False, f"{answer.reason} ({needed})")


def fp8_hardware(device: torch.device | str) -> Answer:
    """Is this a GPU with FP8 arithmetic? (Or a CPU, which does the same in software.)"""
    device = indexed(torch.device(device))
    if device.type != "cuda":
        return Answer(True, f"{device} computes what a GPU with FP8 would")
    capability = torch.cuda.get_device_capability(device)
    what = f"{device} is {torch.cuda.get_device_name(device)} ({capability[0]}.{capability[1]})"
    return Answer(capability >= FP8_CAPABILITY, what)


def fp8_optimizer(device: torch.device | str) -> Answer:
    """Does the optimizer step run on this device?

    Its kernels' codecs are integer arithmetic and need no FP8 hardware. A CPU runs their plain torch reference.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return Answer(True, "plain torch reference: no FP8 hardware needed")
    if kind == "cuda":
        return Answer(True, "integer codecs: no FP8 hardware needed")
    return Answer(False, f"the optimizer kernels run on cuda and cpu devices, not on {kind}")


def bitsandbytes_optimizer(device: torch.device | str) -> Answer:
    """Is bitsandbytes installed, and does its 8-bit AdamW take a step on this device?"""
    remedy = f'pip install "bitsandbytes>={BITSANDBYTES_VERSION[0]}.{BITSANDBYTES_VERSION[1]}"'
    try:
        import bitsandbytes
    except Exception as error:  # whatever its native library makes of this machine
        if isinstance(error, ModuleNotFoundError) and error.name == "bitsandbytes":
            return Answer(False, f"bitsandbytes is not installed: {remedy}")
        return Answer(False, f"bitsandbytes cannot be imported ({first_line(error)}): {remedy}")
    version = str(getattr(bitsandbytes, "__version__", "of no version"))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < BITSANDBYTES_VERSION:
        return Answer(False, f"bitsandbytes {version} is too old: {remedy}")
    return probe(_steps, "bitsandbytes' AdamW8bit", indexed(torch.device(device)))


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
def probe(right: Callable[[torch.device], bool], what: str, device: torch.device) -> Answer:
    """Run a function that does something with known numbers and says whether what came out is right."""
    try:
        if right(device):
            return Answer(True, f"the probe of {what} passed on {device}")
        return Answer(False, f"{what} gave wrong numbers on {device}")
    except Exception as error:  # an extension or a native library may raise any
        # torch says in one sentence which operator is missing, and guesses why in many
        told = first_line(error).partition(" This could be because")[0]
        return Answer(False, f"{what} failed on {device}: {told}")


def _multiplies(device: torch.device) -> bool:
    """Multiply small integers, which FP8 holds exactly, and compare with the float32 product."""
    a = torch.arange(16 * 32, device=device).reshape(16, 32).remainder(5).float() - 2
    b = torch.arange(16 * 32, device=device).reshape(16, 32).remainder(3).float() - 1
    two = torch.full((), 2.0, dtype=torch.float32, device=device)
    products = (
        torch._scaled_mm(a.to(left), b.to(E4M3.dtype).t(), two, two, out_dtype=torch.bfloat16)
        for left in (E4M3.dtype, E5M2.dtype)
    )
    return all(torch.equal(product.float(), 4 * (a @ b.t())) for product in products)


def _multiplies_rows(device: torch.device) -> bool:
    """Multiply ones of 64×64 with a scale of 2 or 3 for each row."""
    ones = torch.ones(64, 64, device=device).to(E4M3.dtype)
    rows = torch.arange(64, device=device).remainder(2).add(2.0).unsqueeze(1)
    product = torch._scaled_mm(ones, ones.t(), rows, rows.t(), out_dtype=torch.bfloat16)
    return torch.equal(product.float(), 64 * rows @ rows.t())


def _multiplies_blocks(device: torch.device) -> bool:
    """Multiply ones of 128×128 with block scales of 2."""
    kinds = torch.nn.functional.ScalingType
    ones = torch.ones(128, 128, device=device).to(E4M3.dtype)
    rows = torch.full((1, 128), 2.0, device=device).t(), kinds.BlockWise1x128
    square = torch.full((1, 4), 2.0, device=device).t(), kinds.BlockWise128x128
    products = (
        torch.nn.functional.scaled_mm(ones, ones.t(), *a, *b)
        for a, b in ((rows, square), (square, rows))
    )
    return all(bool((product == 512).all()) for product in products)


def _steps(device: torch.device) -> bool:
    """Take one step of a known length with bitsandbytes' 8-bit states."""
    from bitsandbytes.optim import AdamW8bit

    p = torch.nn.Parameter(torch.ones(4096, dtype=torch.float32, device=device))
    p.grad = torch.ones_like(p)
    AdamW8bit([p], lr=0.5, weight_decay=0.0).step()
    return bool((p - 0.5).abs().max() < 1e-4)


# --- TransformerEngine

_CUDNN_PARTS = (
    "", "_graph", "_ops", "_engines_runtime_compiled", "_engines_precompiled", "_heuristic", "_adv", "_cnn",
)  # fmt: skip
# What TransformerEngine calls its recipes.
_TE_RECIPES = {"auto": "fp8", "current": "fp8", "delayed": "fp8", "blockwise": "fp8_block_scaling"}


class TransformerEngine(NamedTuple):
    """The parts of it that fp8stack uses."""

    te: Any  # transformer_engine.pytorch
    recipe: Any  # transformer_engine.common.recipe
    state: Any  # FP8GlobalStateManager
    tex: Any  # the torch extension


def transformer_engine(device: torch.device | str) -> Answer:
    """Is TransformerEngine installed as a whole, and does its FP8 Linear run forward and backward on this device?"""
    if (kind := torch.device(device).type) != "cuda":
        return Answer(False, f"TransformerEngine runs on cuda devices, not on {kind}")
    if not (installed := te_installation()):
        return installed
    device = indexed(torch.device(device))
    if not (hardware := fp8_hardware(device)):
        return Answer(False, f"FP8 GEMMs need compute capability >= 8.9; {hardware.reason}")
    named = f"TransformerEngine {metadata.version('transformer_engine')}"
    return probe(_multiplies_in_te, named, device)


def transformer_engine_recipe(fp8_recipe: str, device: torch.device | str) -> Answer:
    """Does TransformerEngine, which must pass its probe first, have this recipe on this device?"""
    device = indexed(torch.device(device))
    name = f"is_{_TE_RECIPES.get(fp8_recipe, fp8_recipe)}_available"
    supports = getattr(load_te().te, name, None)
    if supports is None:
        return Answer(False, f"this TransformerEngine has no {fp8_recipe!r}: {_install_te()}")
    with torch.cuda.device(device):
        ok, why = supports(return_reason=True)
    return Answer(bool(ok), f"{why or 'TransformerEngine has it;'} {fp8_hardware(device).reason}")


def te_installation() -> Answer:
    """Is TransformerEngine installed? Imports nothing."""
    found = next(iter(metadata.distributions(name="transformer_engine")), None)
    if find_spec("transformer_engine") is None or found is None:  # or a folder of its name
        return Answer(False, f"TransformerEngine is not installed: {_install_te()}")
    return Answer(True, f"TransformerEngine {found.version} is installed")


@cache
def load_te() -> TransformerEngine:
    """Import TransformerEngine on the cuDNN that torch uses.

    Raises:
        UnsupportedDeviceError: with the reason and the remedy, if it is missing or broken.
    """
    if not (answer := te_installation()):
        raise UnsupportedDeviceError(answer.reason)
    try:
        te = _import_te()
        recipe = import_module("transformer_engine.common.recipe")
        state = import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
        tex = import_module("transformer_engine_torch")
        _ = te.autocast, te.quantized_model_init, recipe.Float8CurrentScaling
        _ = state.is_first_fp8_module, tex.fused_amax_and_scale_update_after_reduction
    except Exception as error:  # AssertionError, OSError, AttributeError: broken, or too old
        why = f"{answer.reason} and cannot be used ({first_line(error)})"
        raise UnsupportedDeviceError(f"{why}: {cudnn_remedy() or _install_te()}") from error
    if remedy := cudnn_remedy():
        raise UnsupportedDeviceError(f"TransformerEngine was loaded, but {remedy}")
    return TransformerEngine(te, recipe, state, tex)


def _import_te() -> Any:
    """Import TransformerEngine with every part of cuDNN taken from where torch has its own.

    It asks the system for cuDNN first, and its core library then takes the parts that torch has not loaded yet from
    there as well: two versions in one process, with undefined symbols at import or errors much later. What is loaded
    already satisfies it, so the parts are loaded here.
    """
    pip = Path(torch.__file__).parent.parent / "nvidia" / "cudnn" / "lib"
    folder = Path((cudnn_folders() or [str(pip)])[0])
    present = [folder / f"libcudnn{part}.so.9" for part in _CUDNN_PARTS]
    for library in filter(Path.exists, present):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    ours = present[0].exists() and "CUDNN_HOME" not in os.environ
    if ours:
        os.environ["CUDNN_HOME"] = str(folder)  # where it looks first
    try:
        return import_module("transformer_engine.pytorch")
    finally:
        if ours:
            del os.environ["CUDNN_HOME"]


def cudnn_folders() -> list[str]:
    """Return the folders of the cuDNN libraries in this process."""
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    paths = re.findall(r"(/\S*/libcudnn[^/\s]*\.so\S*)", loaded)
    return sorted({os.path.dirname(os.path.realpath(path)) for path in paths})


def cudnn_remedy() -> str:
    """Return what to do about two cuDNNs in this process, or an empty string."""
    folders = cudnn_folders()
    if len(folders) < 2:
        return ""
    pip = next((f for f in folders if f.endswith("nvidia/cudnn/lib")), folders[0])
    return (
        f"two cuDNNs are in this process ({', '.join(folders)}): before Python starts, export "
        f"CUDNN_HOME={pip} LD_LIBRARY_PATH={pip}:$LD_LIBRARY_PATH"
    )


def _install_te() -> str:
    """Return the command that installs all its parts, in one version."""
    cuda = (torch.version.cuda or "").partition(".")[0]
    extras = "pytorch" + (f",core_cu{cuda}" if cuda in ("12", "13") else "")
    return f'pip install -U --no-build-isolation "transformer_engine[{extras}]"'


def _multiplies_in_te(device: torch.device) -> bool:
    """Are output and gradients right for a layer of ones, whose sums FP8 makes exactly?"""
    te, recipes = load_te().te, load_te().recipe
    if not (supported := transformer_engine_recipe("current", device)):
        raise UnsupportedDeviceError(supported.reason)
    recipe = recipes.Float8CurrentScaling(fp8_format=recipes.Format.HYBRID)
    with torch.inference_mode(False), torch.enable_grad(), torch.cuda.device(device):
        x = torch.ones(32, 32, dtype=torch.bfloat16, device=device, requires_grad=True)
        with torch.autocast("cuda", enabled=False), te.quantized_model_init(enabled=False):
            layer = te.Linear(
                32, 32, bias=False, params_dtype=torch.bfloat16, device=device,
                init_method=torch.nn.init.ones_,  # draws no random numbers
            )  # fmt: skip
            with te.autocast(enabled=True, recipe=recipe):
                y = layer(x)
            y.sum().backward()
    found: list[Any] = [y, x.grad, layer.weight.grad]
    return all(bool((t == 32).all()) for t in found)
