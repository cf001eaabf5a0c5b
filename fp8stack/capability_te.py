"""Whether TransformerEngine can be used here; if not, which part of it is broken and how to mend that.

It is installed as three packages that must have one version (`transformer_engine`, its core library
`transformer_engine_cu12` or `_cu13`, its torch extension `transformer_engine_torch`), it loads cuDNN by itself, and its
own errors come from whatever broke last. So the packages are looked at first, without importing anything; then it is
imported on the cuDNN that torch uses; then it multiplies known numbers, forward and backward.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .capability import Answer, fp8_hardware, indexed
from .errors import UnsupportedDeviceError, first_line

_INSTALL = 'pip install --no-build-isolation "transformer_engine[{extras}]{version}"'
_CUDNN_PARTS = (
    "", "_graph", "_ops", "_engines_runtime_compiled", "_engines_precompiled", "_heuristic", "_adv", "_cnn",
)  # fmt: skip
_SUPPORT = {
    "current": "is_fp8_available",
    "delayed": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}
_LEFTOVERS = (
    "NVTE_DEBUG", "NVTE_PLUGIN", "NVTE_BACKWARD_OVERRIDE", "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
)  # fmt: skip
"""Variables that change the numbers or the path of TransformerEngine and that are easily left in a shell."""


@dataclass(frozen=True)
class Library:
    """The parts of TransformerEngine that fp8stack uses."""

    te: Any  # transformer_engine.pytorch
    recipe: Any  # transformer_engine.common.recipe
    state: Any  # FP8GlobalStateManager
    tex: Any  # the torch extension


def transformer_engine(device: torch.device | str) -> Answer:
    """Is TransformerEngine installed as a whole, and does its FP8 Linear run forward and backward on this device?"""
    device = torch.device(device)
    return _probe(indexed(device) if installation() else device)


def transformer_engine_recipe(fp8_recipe: str, device: torch.device | str) -> Answer:
    """Does TransformerEngine, which must pass its probe first, have this recipe on this device?"""
    device = indexed(torch.device(device))
    library = load()
    supports = getattr(library.te, _SUPPORT[fp8_recipe], None)
    if supports is None:
        return Answer(False, f"this TransformerEngine has no recipe {fp8_recipe!r}: {_install()}")
    with torch.cuda.device(device):
        ok, why = supports(return_reason=True)
    what = fp8_hardware(device).reason
    return Answer(bool(ok), f"{why} {what}" if not ok else f"TransformerEngine has it; {what}")


@cache
def load() -> Library:
    """Import TransformerEngine on the cuDNN that torch uses.

    Raises:
        UnsupportedDeviceError: with the reason and the remedy, if it is missing or broken.
    """
    answer = installation()
    if not answer:
        raise UnsupportedDeviceError(answer.reason)
    try:
        _import()
    except (
        Exception
    ) as error:  # AssertionError, OSError, RuntimeError, FileNotFoundError: whatever broke last
        why = f"TransformerEngine cannot be imported ({first_line(error)})"
        raise UnsupportedDeviceError(f"{why}: {cudnn_remedy() or _install()}") from error
    remedy = cudnn_remedy()
    if remedy:
        raise UnsupportedDeviceError(f"TransformerEngine was loaded, but {remedy}")
    try:
        te = import_module("transformer_engine.pytorch")
        recipe = import_module("transformer_engine.common.recipe")
        quantization = import_module("transformer_engine.pytorch.quantization")
        state, tex = quantization.FP8GlobalStateManager, import_module("transformer_engine_torch")
        for owner, name in (
            (te, "autocast"),
            (te, "quantized_model_init"),
            (recipe, "Float8CurrentScaling"),
            (state, "is_first_fp8_module"),
            (tex, "fused_amax_and_scale_update_after_reduction"),
        ):
            getattr(owner, name)
    except (ImportError, AttributeError) as error:
        version = _version("transformer_engine")
        raise UnsupportedDeviceError(
            f"TransformerEngine {version} is too old ({first_line(error)}): {_install(latest=True)}"
        ) from error
    return Library(te, recipe, state, tex)


def installation() -> Answer:
    """Are the packages that TransformerEngine consists of all here, in one version? Imports nothing."""
    spec = find_spec("transformer_engine")
    if spec is None:
        return Answer(False, f"TransformerEngine is not installed: {_install()}")
    found = _distribution("transformer_engine")
    if spec.origin is None or found is None:
        where = spec.origin or ", ".join(spec.submodule_search_locations or [])
        return Answer(
            False,
            f"{where} is not an installation of TransformerEngine (it has no package metadata) and hides one if there "
            f"is any: start Python from another folder, or {_install()}",
        )
    cores = [c for c in ("transformer_engine_cu12", "transformer_engine_cu13") if _distribution(c)]
    extension = _distribution("transformer_engine_torch")
    built = "Root-Is-Purelib: true" not in (found.read_text("WHEEL") or "")  # from source, as one
    if not built and not cores:
        return Answer(
            False,
            f"TransformerEngine {found.version} has no core library (the package is empty): {_install()}",
        )
    package = Path(spec.origin).parent
    folders = (package.parent, package, package / "wheel_lib")
    if extension is None and not any(
        library for folder in folders for library in folder.glob("transformer_engine_torch*.so")
    ):
        return Answer(
            False, f"TransformerEngine {found.version} has no torch extension: {_install()}"
        )
    versions = {n: _version(n) for n in ("transformer_engine", *cores, "transformer_engine_torch")}
    if len({v.partition("+")[0] for v in versions.values() if v}) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        return Answer(
            False, f"the packages of TransformerEngine differ in version ({listed}): {_install()}"
        )
    cuda = (torch.version.cuda or "").partition(".")[0]
    if cores and cuda and f"transformer_engine_cu{cuda}" not in cores:
        why = f"TransformerEngine's core library is {cores[0]}, and torch was built with CUDA {torch.version.cuda}"
        return Answer(False, f"{why}: {_install()}")
    return Answer(True, f"TransformerEngine {found.version} is installed")


def cudnn_folders(maps: str | None = None) -> list[str]:
    """Return the folders of the cuDNN libraries in this process, from the text of /proc/self/maps."""
    if maps is None:
        source = Path("/proc/self/maps")
        maps = source.read_text() if source.exists() else ""
    paths = re.findall(r"(/\S*/libcudnn[^/\s]*\.so\S*)", maps)
    return sorted({os.path.dirname(os.path.realpath(path)) for path in paths})


def _import() -> None:
    """Import TransformerEngine with every part of cuDNN taken from where torch has its own.

    It asks the system for cuDNN first, and its core library then takes the parts that torch has not loaded yet from
    there as well: two versions in one process, with undefined symbols at import or errors much later. What is loaded
    already satisfies it, so the parts are loaded here.
    """
    pip = Path(torch.__file__).parent.parent / "nvidia" / "cudnn" / "lib"
    folder = Path((cudnn_folders() or [str(pip)])[0])
    present = [folder / f"libcudnn{part}.so.9" for part in _CUDNN_PARTS]
    for library in present:
        if library.exists():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    ours = present[0].exists() and "CUDNN_HOME" not in os.environ
    if ours:
        os.environ["CUDNN_HOME"] = str(folder)  # where it looks first
    try:
        import_module("transformer_engine.pytorch")
    finally:
        if ours:
            del os.environ["CUDNN_HOME"]


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


def _install(latest: bool = False) -> str:
    """Return the command that installs all parts: in the version found if there is one."""
    cuda = (torch.version.cuda or "").partition(".")[0]
    version = "" if latest else _version("transformer_engine")
    extras = "pytorch" + (f",core_cu{cuda}" if cuda in ("12", "13") else "")
    return _INSTALL.format(extras=extras, version=f"=={version}" if version else "")


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _version(name: str) -> str:
    found = _distribution(name)
    return found.version if found else ""


@cache
def _probe(device: torch.device) -> Answer:
    installed = installation()
    if not installed:
        return installed
    if device.type != "cuda":
        return Answer(False, f"TransformerEngine runs on cuda devices, not on {device.type}")
    hardware = fp8_hardware(device)
    if not hardware:
        return Answer(False, f"FP8 GEMMs need compute capability >= 8.9; {hardware.reason}")
    try:
        library = load()
    except UnsupportedDeviceError as error:
        return Answer(False, str(error))
    recipe = transformer_engine_recipe("current", device)
    if not recipe:
        return Answer(False, f"TransformerEngine: {recipe.reason}")
    version = _version("transformer_engine")
    try:
        wrong = _multiply(library, device)
    except Exception as error:  # its extension raises any
        return Answer(False, f"TransformerEngine {version} failed on {device}: {first_line(error)}")
    if wrong:
        return Answer(
            False, f"TransformerEngine {version} gave wrong numbers on {device} for {wrong}"
        )
    told = [name for name in _LEFTOVERS if os.environ.get(name, "0") != "0"]
    found = f"; found in the environment: {', '.join(told)}" if told else ""
    return Answer(True, f"the probe of TransformerEngine {version} passed on {device}{found}")


def _multiply(library: Library, device: torch.device) -> str:
    """Take small integers, which FP8 holds exactly, through a layer and back; return what came out wrong."""
    te, recipes = library.te, library.recipe

    def integers(of: int) -> torch.Tensor:
        grid = torch.arange(32 * 32, device=device).reshape(32, 32)
        return (grid.remainder(of) - of // 2).to(torch.bfloat16)

    x, w, g = integers(5).requires_grad_(), integers(3), integers(5).flip(0)
    recipe = recipes.Float8CurrentScaling(fp8_format=recipes.Format.HYBRID)
    with (
        torch.cuda.device(device),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
        te.quantized_model_init(enabled=False),
    ):
        layer = te.Linear(
            32, 32, bias=False, params_dtype=torch.bfloat16, device=device,
            init_method=torch.nn.init.zeros_,  # draws no random numbers
        )  # fmt: skip
        with torch.no_grad():
            layer.weight.copy_(w)
        with te.autocast(enabled=True, recipe=recipe):
            y = layer(x)
        y.backward(g)
    a, b, c = x.detach().float(), w.float(), g.float()
    results = {
        "the output": (y, a @ b.T),
        "the input's gradient": (x.grad, c @ b),
        "the weight's gradient": (layer.weight.grad, c.T @ a),
    }
    for name, (found, expected) in results.items():
        near = (found.float() - expected).abs().max() <= 0.02 * expected.abs().max()
        if not bool(near):  # NaN is not near
            return name
    return ""
