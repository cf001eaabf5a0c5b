"""The Slurm scripts: valid shell, sane directives, and commands that train_gpt.py understands."""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from gpt import config

FOLDER = Path(config.__file__).parents[1] / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
RECORDER = '#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$RECORD"\n'
HOSTS = "#!/usr/bin/env bash\nprintf 'node7\\nnode8\\n'\n"
DIRECTIVES = {
    "job-name": r"[\w-]+", "nodes": r"\d+", "ntasks-per-node": "1", "gpus-per-node": r"\d+", "array": r"0-\d+",
    "cpus-per-task": r"\d+", "time": r"\d\d:\d\d:\d\d", "requeue": "", "output": r"%x-(%j|%A-%a)\.log",
}  # fmt: skip


@pytest.fixture
def submit(tmp_path):
    """Run a script as a job would, on a cluster of two programs that say what they were given."""
    for name, text in (("srun", RECORDER), ("scontrol", HOSTS)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def submit(script, *arguments, **variables):
        record = tmp_path / "record"
        path = f"{tmp_path}:{os.environ['PATH']}"
        environment = {**os.environ, "RECORD": str(record), "PATH": path, "SLURM_JOB_ID": "123456"}
        environment |= {"SLURM_SUBMIT_DIR": str(FOLDER.parents[1]), **variables}
        subprocess.run(["bash", FOLDER / script, *arguments], env=environment, check=True)
        return record.read_text().splitlines()

    return submit


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_shellcheck_and_bash_find_nothing(path):
    subprocess.run(["bash", "-n", path], check=True)
    tool = shutil.which("shellcheck", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run([tool, path], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_directives_are_known_and_come_before_the_first_command(path):
    assert os.access(path, os.X_OK)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(directives) >= 8
    assert max(directives) < first, "sbatch stops reading at the first command"
    for line in (lines[i] for i in directives):
        name, _, value = line.removeprefix("#SBATCH --").partition("=")
        assert re.fullmatch(DIRECTIVES[name], value), line


def test_one_node_starts_a_process_for_each_gpu(submit):
    given = submit(
        "one_node.sh", "--config", f"{FOLDER}/../configs/tiny.yaml", SLURM_GPUS_ON_NODE="4"
    )
    at = given.index("examples/train_gpt.py")
    assert given[:at] == ["torchrun", "--standalone", "--nproc-per-node", "4"]
    options = config.parse(given[at + 1 :])
    assert (options.resume, options.model) == ("auto", "tiny")


def test_many_nodes_meet_at_the_first(submit):
    nodes = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "node[7-8]"}
    given = submit("many_nodes.sh", "--steps", "7", **nodes)
    at = given.index("examples/train_gpt.py")
    pairs = dict(zip(given[1:at:2], given[2:at:2], strict=True))
    assert pairs == {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "node7:23456",
        "--rdzv-id": "123456",
    }
    options = config.parse(given[at + 1 :])
    assert (options.resume, options.steps) == ("auto", 7)


def test_a_sweep_covers_every_level_at_every_rate(submit):
    text = (FOLDER / "sweep.sh").read_text()
    tasks = int(re.search(r"--array=0-(\d+)", text)[1]) + 1
    runs = set()
    for task in range(tasks):
        given = submit("sweep.sh", "--model", "tiny", SLURM_ARRAY_TASK_ID=str(task))
        assert given[:2] == ["python", "examples/train_gpt.py"]
        found = config.parse(given[2:])
        assert found.run_name.startswith(f"sweep-{found.opt_level}-")
        assert found.resume == "auto"  # not what a level beside it has trained
        runs.add((found.opt_level, found.max_lr))
    assert len(runs) == tasks
    assert {level for level, _ in runs} == {"off", "O0", "O1", "O2"}
