"""TransformerEngine's probe: every way an installation is broken has its own answer, with the remedy."""

import os
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
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def install(site, name, version="2.20.2", purelib="true"):
    """Write what pip leaves of a package besides its code."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(METADATA.format(name=name, version=version))
    (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nRoot-Is-Purelib: {purelib}\n")


def package(site, init="", torch_init="", extension=False):
    """Write the code of a package that has the names of TransformerEngine's."""
    folder = site / "transformer_engine"
    (folder / "pytorch").mkdir(parents=True)
    (folder / "__init__.py").write_text(init)
    (folder / "pytorch" / "__init__.py").write_text(torch_init)
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


def installed(site):
    return ask(site, "print(capability.te_installation().reason)")


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
    assert "no package metadata" in installed(site)
    package(site := site / "second")
    assert str(site / "transformer_engine") in installed(site)


def test_the_package_alone_is_empty(site):
    package(site)
    install(site, "transformer_engine")
    answer = installed(site)
    assert "needs its core library" in answer
    assert "here are transformer_engine 2.20.2:" in answer
    assert "pytorch" in answer.partition("pip install")[2]
    assert "==2.20.2" in answer


def test_the_torch_extension_is_missing(site):
    package(site)
    install(site, "transformer_engine")
    install(site, "transformer_engine_cu13", purelib="false")
    answer = installed(site)
    assert "its torch extension" in answer
    assert "here are transformer_engine 2.20.2, transformer_engine_cu13 2.20.2:" in answer
    assert "--no-build-isolation" in answer


def test_versions_that_differ_are_listed(site):
    package(site, extension=True)
    install(site, "transformer_engine")
    install(site, "transformer_engine_cu13", purelib="false")
    install(site, "transformer_engine_torch", "2.19.0", purelib="false")
    answer = installed(site)
    assert "transformer_engine 2.20.2" in answer
    assert "transformer_engine_torch 2.19.0" in answer
    assert '==2.20.2"' in answer


def test_local_parts_of_versions_are_no_difference(site):
    package(site, extension=True)
    install(site, "transformer_engine")
    install(site, "transformer_engine_cu13", purelib="false")
    install(site, "transformer_engine_torch", "2.20.2+cu13torch2.11", purelib="false")
    assert "2.20.2 is installed" in installed(site)


def test_a_core_library_for_another_cuda(site):
    package(site, extension=True)
    for name in ("transformer_engine", "transformer_engine_cu12", "transformer_engine_torch"):
        install(site, name)
    code = "import torch; torch.version.cuda = '13.0'; print(capability.te_installation().reason)"
    answer = ask(site, code)
    assert "its core library for CUDA 13.0" in answer
    assert "transformer_engine_cu12 2.20.2" in answer
    assert "core_cu13" in answer


LOAD = """
try:
    capability.load_te()
except capability.UnsupportedDeviceError as error:
    print(error)
"""


def whole(site, **code):
    package(site, extension=True, **code)
    for name in ("transformer_engine", "transformer_engine_cu13", "transformer_engine_torch"):
        install(site, name)


def test_an_import_that_fails_says_why(site):
    whole(site, torch_init="raise OSError('libcudnn_cnn.so.9: undefined symbol: x\\nmore')")
    answer = ask(site, LOAD)
    assert "cannot be imported (libcudnn_cnn.so.9: undefined symbol: x)" in answer
    assert "more" not in answer
    assert "pip install" in answer


def test_too_old_names_what_is_missing(site):
    whole(site, torch_init="class Linear: pass")
    for folder in ("common", "common/recipe"):
        (site / "transformer_engine" / folder).mkdir()
        (site / "transformer_engine" / folder / "__init__.py").touch()
    answer = ask(site, LOAD)
    assert "2.20.2 is too old" in answer
    assert "==" not in answer  # the remedy is the newest, not the same again


def test_a_device_without_cuda_is_named(site):
    whole(site)
    assert "on cuda devices, not on cpu" in ask(site, "print(capability.transformer_engine('cpu'))")


def test_nothing_of_it_is_imported_to_look(site):
    whole(site, init="raise SystemExit('imported')")
    assert "True" in ask(site, "print(bool(capability.te_installation()))")


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
    code = "import sys; from fp8stack import capability; "
    code += (
        "print([m for m in sys.modules if m.startswith(('transformer_engine', 'torch._dynamo.'))])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
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
