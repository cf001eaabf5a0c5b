"""The Slurm scripts: valid shell, sane directives, and commands that train_gpt.py understands."""

import os
import re
import shutil
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest
from gpt import config
from gpt.checkpoints import inspect
from workers_gpt import write_text

FOLDER = Path(config.__file__).parents[1] / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
JOBS = [path for path in SCRIPTS if path.stem not in ("node", "requeue")]
NODES = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "node[7-8]"}
RECORDER = '#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$RECORD"\nexit "${STATUS:-0}"\n'
CONTROL = """#!/usr/bin/env bash
case $1$2 in
  requeue*) echo "$@" ;;
  showjob) echo "JobId=${TASK_ID:-123456} PreemptTime=${PREEMPTED:-None}" ;;
  showhostnames) printf 'node7\\nnode8\\n' ;;
esac
"""
DIRECTIVES = {
    "job-name": r"[\w-]+", "nodes": r"\d+", "ntasks-per-node": "1", "gpus-per-node": r"\d+", "array": r"0-\d+",
    "cpus-per-task": r"\d+", "time": r"\d\d:\d\d:\d\d", "requeue": "", "output": r"%x-(%j|%A-%a)\.log",
    "signal": r"USR1@\d+", "open-mode": "append",
}  # fmt: skip


@pytest.fixture
def submit(tmp_path):
    """Run a script as a job would, on a cluster of two programs that say what they were given."""
    for name, text in (("srun", RECORDER), ("scontrol", CONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def submit(script, *arguments, **variables):
        record = tmp_path / "record"
        path = f"{tmp_path}:{os.environ['PATH']}"
        outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        environment = {**outside, "RECORD": str(record), "PATH": path, "SLURM_JOB_ID": "123456"}
        environment |= {"SLURM_SUBMIT_DIR": str(FOLDER.parents[1]), **variables}
        job = ["bash", FOLDER / script, *arguments]
        result = subprocess.run(job, env=environment, capture_output=True, text=True)
        assert result.returncode == int(variables.get("STATUS", 0)), result.stderr
        return result.stdout.split() if "STATUS" in variables else record.read_text().splitlines()

    return submit


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_shellcheck_and_bash_find_nothing(path):
    subprocess.run(["bash", "-n", path], check=True)
    tool = shutil.which("shellcheck", path=f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run([tool, path], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
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
    assert given[:at] == ["examples/slurm/node.sh", "--standalone", "--nproc-per-node", "4"]
    options = config.parse(given[at + 1 :])
    assert (options.resume, options.model) == ("auto", "tiny")


def test_many_nodes_meet_at_the_first(submit):
    given = submit("many_nodes.sh", "--steps", "7", **NODES)
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


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_is_requeued_when_its_time_is_up_and_after_a_preemption(submit, path):
    array = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "123456"}
    more, job = (array, "123456_3") if path.stem == "sweep" else (NODES, "123456")
    again, ended = (str(128 + number) for number in (signal.SIGUSR1, signal.SIGTERM))
    assert submit(path.name, STATUS=again, **more) == ["requeue", job]
    preempted = {**more, "PREEMPTED": "2026-11-23T11:07:32"}
    assert submit(path.name, STATUS=ended, **preempted) == ["requeue", job]
    for status in ("1", "2", ended):  # the last of scancel
        assert submit(path.name, STATUS=status, **more) == []


def test_a_job_that_a_task_has_submitted_is_not_that_task(submit):
    array = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "777", "TASK_ID": "779"}
    again = str(128 + signal.SIGUSR1)
    assert submit("one_node.sh", STATUS=again, **array) == ["requeue", "123456"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_node_hands_signals_to_its_ranks_and_has_their_status(tmp_path, number):
    write_text(tmp_path)
    run = ["--standalone", "--nproc-per-node", "2", "examples/train_gpt.py", "--model", "tiny"]
    flags = ["--seq-len", "16", "--steps", "200", "--eval-freq", "0", "--log-freq", "1"]
    where = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path), "--device", "cpu"]
    path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    process = subprocess.Popen(
        [str(FOLDER / "node.sh"), *run, *flags, *where, "--no-fp8"],
        cwd=FOLDER.parents[1], env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("step 1 |"):
            process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    (path,) = tmp_path.glob("tiny-bf16/checkpoints/step_*")
    assert inspect(path).step < 200


def test_a_node_has_the_status_of_torchrun(tmp_path):
    (tmp_path / "torchrun").write_text('#!/usr/bin/env bash\nexit "$1"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for status in (0, 1, 2):
        command = [str(FOLDER / "node.sh"), str(status)]
        assert subprocess.run(command, env=environment).returncode == status


def test_a_sweep_covers_every_level_at_every_rate(submit):
    text = (FOLDER / "sweep.sh").read_text()
    tasks = int(re.search(r"--array=0-(\d+)", text)[1]) + 1
    runs = set()
    for task in range(tasks):
        array = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_JOB_ID": "123456"}
        given = submit("sweep.sh", "--model", "tiny", **array)
        assert given[:2] == ["python", "examples/train_gpt.py"]
        found = config.parse(given[2:])
        assert found.run_name.startswith(f"sweep-{found.opt_level}-")
        assert found.resume == "auto"  # not what a level beside it has trained
        runs.add((found.opt_level, found.max_lr))
    assert len(runs) == tasks
    assert {level for level, _ in runs} == {"off", "O0", "O1", "O2"}
