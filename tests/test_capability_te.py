"""TransformerEngine's probe: every way an installation is broken has its own answer, with the remedy."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from workers_scripts import run_script

from fp8stack import capability
from fp8stack.errors import UnsupportedDeviceError

ROOT = Path(__file__).resolve().parents[1]
LOOK = "print(capability.te_installation().reason)"
LOAD = """
try:
    capability.load_te()
except capability.UnsupportedDeviceError as error:
    print(error)
"""


def package(site, init="", torch_init="", common=False):
    """Write the code and the metadata of a package that has TransformerEngine's names."""
    folder, info = site / "transformer_engine", site / "transformer_engine-2.20.2.dist-info"
    parts = {"": init, "pytorch": torch_init}
    if common:
        parts |= {"common": "", "common/recipe": ""}
    for part, code in parts.items():
        (folder / part).mkdir(parents=True)
        (folder / part / "__init__.py").write_text(code)
    info.mkdir()
    metadata = "Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.20.2\n"
    (info / "METADATA").write_text(metadata)


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
    assert "not on cpu" in capability.transformer_engine("cpu").reason  # which no package mends
    assert not (answer := capability.te_installation())
    assert "is not installed: pip install -U --no-build-isolation" in answer.reason
    with pytest.raises(UnsupportedDeviceError, match="not installed"):
        capability.load_te()


BROKEN_IMPORT = "raise OSError('libcudnn_cnn.so.9: undefined symbol: x\\nmore')"
INSTALLATIONS = {  # code, what is asked, what the answer says, what it does not say
    "an import that fails": (
        {"torch_init": BROKEN_IMPORT}, LOAD,
        r"cannot be used \(libcudnn_cnn.so.9: undefined symbol: x\).*pip install", "more",
    ),
    "too old": ({"torch_init": "class Linear: pass", "common": True}, LOAD, "2.20.2 .*cannot be used.*-U", "=="),
    "no CUDA": ({}, "print(capability.transformer_engine('cpu'))", "on cuda devices, not on cpu", "pip"),
    "nothing is imported to look": ({"init": "raise SystemExit('imported')"}, LOOK, "2.20.2 is installed", "imported"),
}  # fmt: skip


@pytest.mark.parametrize("case", INSTALLATIONS)
def test_every_installation_has_its_own_answer(case, site):
    code, question, said, unsaid = INSTALLATIONS[case]
    package(site, **code)
    answer = ask(site, question)
    assert re.search(said, answer, re.DOTALL), answer
    assert unsaid not in answer


def test_a_folder_of_its_name_is_not_it(site):
    (site / "transformer_engine").mkdir()
    assert "is not installed" in ask(site, LOOK)


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
