"""The release workflow's commands, as it has them, in a copy of the repository, without downloads."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import code_size
import pytest
import yaml
from helpers import made_once

import fp8stack

ROOT = code_size.ROOT
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "runs", "build", "dist", "site", "__pycache__", ".*_cache", "*.egg-info"
)


def run_job(name, folder, path=(), **environment):
    """Run a job's commands in a folder, but those that install from an index; return what they print.

    path: folders before this environment's programs.
    """
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"][name]["steps"] if "run" in step]
    commands = [c for c in commands if not c.startswith("pip install") or "dist/" in c]
    places = [*map(str, path), sysconfig.get_path("scripts"), os.environ["PATH"]]
    told = {"PATH": os.pathsep.join(places), "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(commands)],
        cwd=folder,
        env={**os.environ, **told},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def release(tmp_path_factory):
    """Return the folder in which the release was built: dist/ and notes.md."""

    def build(folder):
        shutil.copytree(ROOT, folder, symlinks=True, ignore=LEFT_OUT, dirs_exist_ok=True)
        printed = run_job("build", folder, GITHUB_REF_NAME=f"v{fp8stack.__version__}")
        assert printed.count("PASSED") == 2  # of twine: the wheel and the source

    return made_once(tmp_path_factory, "release", build)


@pytest.fixture(scope="session")
def installed(release, tmp_path_factory):
    """Return the programs' folder of an environment into which the job `wheel` installed the wheel."""

    def install(folder):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (packages,) = folder.glob("lib/*/site-packages")
        # torch and all else is this environment's; fp8stack is not
        Path(packages, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        told = dict.fromkeys(("PIP_FORCE_REINSTALL", "PIP_NO_DEPS"), "1")
        told["PIP_PYTHON"] = str(folder / "bin" / "python")  # for this environment's pip
        printed = run_job("wheel", release, [folder / "bin"], **told)
        assert f"\nfp8stack {fp8stack.__version__}\n" in printed  # its own --version
        assert (packages / "fp8stack" / "kernels" / "ops.py").exists()

    return made_once(tmp_path_factory, "installed", install) / "bin"
