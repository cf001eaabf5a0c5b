"""TransformerEngine's probe: every way an installation is broken has its own answer, with the remedy."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from workers_scripts import run_script

from fp8stack import capability
from fp8stack.errors import UnsupportedDeviceError

ROOT = Path(__file__).resolve().parents[1]
META, CORE, TORCH = "transformer_engine", "transformer_engine_cu13", "transformer_engine_torch"
WHOLE = {META: "2.20.2", CORE: "2.20.2", TORCH: "2.20.2"}
LOOK = "print(capability.te_installation().reason)"
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def install(site, name, version):
    """Write what pip leaves of a package besides its code."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA.format(name=name, version=version))
    purelib = str(name == META).lower()
    (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nRoot-Is-Purelib: {purelib}\n")


def package(site, init="", torch_init="", extension=False, common=False):
    """Write the code of a package that has the names of TransformerEngine's."""
    folder = site / "transformer_engine"
    parts = {"": init, "pytorch": torch_init}
    if common:
        parts |= {"common": "", "common/recipe": ""}
    for part, code in parts.items():
        (folder / part).mkdir(parents=True)
        (folder / part / "__init__.py").write_text(code)
    if extension:
        (folder / "wheel_lib").mkdir()
        (folder / "wheel_lib" / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so").touch()


def ask(site, code):
    """Return what `code` prints in a process whose packages include those of `site`."""
    script = site / "ask.py"
    script.write_text("from fp8stack import capability\n" + code)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(site), str(ROOT), *sys.path])
        return run_script([str(script)], site / "answer.txt", count=1).strip()


@pytest.fixture
def site(tmp_path):
    if capability.te_installation():
        pytest.skip("TransformerEngine is installed here, so none of its parts can be missing")
    return tmp_path


def test_nothing_is_installed(site):
    answer = capability.transformer_engine("cpu")
    assert not answer
    assert "is not installed: pip install --no-build-isolation" in answer.reason
    with pytest.raises(UnsupportedDeviceError, match="not installed"):
        capability.load_te()


def test_a_folder_of_its_name_is_not_it(site):
    (site / "transformer_engine").mkdir()
    assert "no package metadata" in ask(site, LOOK)
    package(site := site / "second")
    assert str(site / "transformer_engine") in ask(site, LOOK)


LOAD = """
try:
    capability.load_te()
except capability.UnsupportedDeviceError as error:
    print(error)
"""
BROKEN_IMPORT = "raise OSError('libcudnn_cnn.so.9: undefined symbol: x\\nmore')"
INSTALLATIONS = {  # packages, code, what is asked, what the answer says in this order, what it does not say
    "the package alone": (
        {META: "2.20.2"}, {}, LOOK,
        "needs its core library.*here are transformer_engine 2.20.2:.*pip install.*pytorch.*==2.20.2", None,
    ),
    "no torch extension": (
        {META: "2.20.2", CORE: "2.20.2"}, {}, LOOK,
        "its torch extension.* transformer_engine 2.20.2, transformer_engine_cu13 2.20.2:.*--no-build-isolation", None,
    ),
    "versions that differ": (
        {**WHOLE, TORCH: "2.19.0"}, {"extension": True}, LOOK,
        'transformer_engine 2.20.2.*transformer_engine_torch 2.19.0.*==2.20.2"', None,
    ),
    "local parts of versions": (
        {**WHOLE, TORCH: "2.20.2+cu13torch2.11"}, {"extension": True}, LOOK, "2.20.2 is installed", None
    ),
    "a core for another CUDA": (
        {META: "2.20.2", "transformer_engine_cu12": "2.20.2", TORCH: "2.20.2"}, {"extension": True},
        f"import torch; torch.version.cuda = '13.0'; {LOOK}",
        "its core library for CUDA 13.0.*transformer_engine_cu12 2.20.2.*core_cu13", None,
    ),
    "an import that fails": (
        WHOLE, {"extension": True, "torch_init": BROKEN_IMPORT}, LOAD,
        r"cannot be imported \(libcudnn_cnn.so.9: undefined symbol: x\).*pip install", "more",
    ),
    "too old": (  # the remedy is the newest, not the same again
        WHOLE, {"extension": True, "torch_init": "class Linear: pass", "common": True}, LOAD, "2.20.2 is too old", "==",
    ),
    "no CUDA": (
        WHOLE, {"extension": True}, "print(capability.transformer_engine('cpu'))", "on cuda devices, not on cpu", None
    ),
    "nothing is imported to look": (
        WHOLE, {"extension": True, "init": "raise SystemExit('imported')"},
        "print(bool(capability.te_installation()))", "True", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INSTALLATIONS)
def test_every_installation_has_its_own_answer(case, site):
    packages, code, question, said, unsaid = INSTALLATIONS[case]
    package(site, **code)
    for name, version in packages.items():
        install(site, name, version)
    answer = ask(site, question)
    assert re.search(said, answer, re.DOTALL), answer
    assert unsaid is None or unsaid not in answer


def test_two_cudnns_are_found_in_the_memory_map(tmp_path):
    """Two real libraries under cuDNN's names, loaded from two folders."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs Linux")
    sample = torch._C.__file__  # a small library that loads anywhere torch does
    code = "import ctypes\n"
    for folder, name in (("a", "libcudnn.so.9"), ("b", "libcudnn_cnn.so.9")):
        (tmp_path / folder).mkdir()
        shutil.copy(sample, tmp_path / folder / name)
        code += f"ctypes.CDLL({str(tmp_path / folder / name)!r})\n"
    before = ask(tmp_path, "print(capability.cudnn_remedy() or 'one')")
    after = ask(tmp_path, code + "print(capability.cudnn_remedy())")
    assert before == "one"
    assert "two cuDNNs are in this process" in after
    assert str(tmp_path / "a") in after
    assert "LD_LIBRARY_PATH" in after


def test_cudnn_folders_are_read_from_maps():
    line = "7f00-7f01 r-xp 00000000 08:01 42    {}\n"
    paths = ("/x/nvidia/cudnn/lib/libcudnn.so.9", "/lib/x86_64-linux-gnu/libcudnn_cnn.so.9.10.2")
    maps = "".join(line.format(path) for path in (*paths, "/usr/lib/libcublas.so.13"))
    assert len(capability.cudnn_folders(maps)) == 2
    assert capability.cudnn_folders(line.format(paths[0])) == ["/x/nvidia/cudnn/lib"]


def test_fp8stack_does_not_import_it():
    code = """import sys; from fp8stack import capability
print([m for m in sys.modules if m.startswith(('transformer_engine', 'torch._dynamo.'))])"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
@pytest.mark.skipif(not capability.te_installation(), reason=capability.te_installation().reason)
def test_it_passes_here():
    if torch.cuda.get_device_capability() < capability.FP8_CAPABILITY:
        pytest.skip("this GPU has no FP8")
    state = torch.cuda.get_rng_state()
    answer = capability.transformer_engine("cuda")
    assert answer, answer.reason
    assert "passed on cuda" in answer.reason
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert len(capability.cudnn_folders()) == 1
    assert capability.transformer_engine_recipe("delayed", "cuda")
