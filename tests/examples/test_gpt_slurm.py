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
from workers_gpt import read

FOLDER = Path(config.__file__).parents[1] / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
JOBS = [path for path in SCRIPTS if path.stem not in ("node", "requeue", "wandb_agent")]
NODES = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "node[7-8]"}
ARRAY = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "123456"}
PATH = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
PROGRAMS = {
    "srun": 'printf "%s\\n" "$@" > "$RECORD"\nexit "${STATUS:-0}"\n',
    "scontrol": """case $1$2 in
  requeue*) echo "$@" ;;
  showjob) echo "JobId=${TASK_ID:-123456} PreemptTime=${PREEMPTED:-None}" ;;
  showhostnames) printf 'node7\\nnode8\\n' ;;
esac
""",
}
DIRECTIVES = {
    "job-name": r"[\w-]+", "nodes": r"\d+", "ntasks-per-node": "1", "gpus-per-node": r"\d+", "array": r"0-\d+",
    "cpus-per-task": r"\d+", "time": r"\d\d:\d\d:\d\d", "requeue": "", "output": r"%x-(%j|%A-%a)\.log",
    "signal": r"USR1@\d+", "open-mode": "append",
}  # fmt: skip


@pytest.fixture
def submit(tmp_path):
    """Run a script as a job would, on a cluster of programs that say what they were given."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)

    def submit(script, *arguments, status=0, **variables):
        record = tmp_path / "record"
        outside = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        given = {"RECORD": str(record), "PATH": f"{tmp_path}:{PATH}", "SLURM_JOB_ID": "123456"}
        given |= {"SLURM_SUBMIT_DIR": str(FOLDER.parents[1]), "STATUS": str(status), **variables}
        job = ["bash", FOLDER / script, *arguments]
        result = subprocess.run(job, env={**outside, **given}, capture_output=True, text=True)
        assert result.returncode == status, result.stderr
        return result.stdout.split() if status else record.read_text().splitlines()

    return submit


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_valid_and_directives_come_before_the_first_command(path):
    subprocess.run(["bash", "-n", path], check=True)
    if tool := shutil.which("shellcheck", path=PATH):
        result = subprocess.run([tool, path], capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (0, "")
    assert os.access(path, os.X_OK)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(directives) >= 8 * (path in JOBS)
    assert max(directives, default=0) < first, "sbatch stops reading at the first command"
    for line in (lines[i] for i in directives):
        name, _, value = line.removeprefix("#SBATCH --").partition("=")
        assert re.fullmatch(DIRECTIVES[name], value), line


def test_jobs_start_a_process_for_each_gpu_and_nodes_meet_at_the_first(submit):
    tiny = ("--config", f"{FOLDER}/../configs/tiny.yaml", "--steps", "7")
    one = submit("one_node.sh", *tiny, SLURM_GPUS_ON_NODE="4")
    many = submit("many_nodes.sh", *tiny, **NODES)
    for given, launch in (
        (one, ["--standalone", "--nproc-per-node", "4"]),
        (many, ["--nnodes", "2", "--nproc-per-node", "8", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node7:23456",
                "--rdzv-id", "123456"]),
    ):  # fmt: skip
        at = given.index("examples/train_gpt.py")
        assert given[at - len(launch) : at] == launch
        assert "examples/slurm/node.sh" in given[: at - len(launch)]
        options = config.parse(given[at + 1 :])
        assert (options.resume, options.model, options.steps) == ("auto", "tiny", 7)


def test_agents_take_runs_of_the_sweep(submit):
    assert submit("wandb_agent.sh", SWEEP_ID="u/p/1") == ["wandb", "agent", "u/p/1"]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_job_is_requeued_when_its_time_is_up_and_after_a_preemption(submit, path):
    more, job = (ARRAY, "123456_3") if path.stem == "sweep" else (NODES, "123456")
    again, ended = (128 + number for number in (signal.SIGUSR1, signal.SIGTERM))
    assert submit(path.name, status=again, **more) == ["requeue", job]
    preempted = {**more, "PREEMPTED": "2026-11-23T11:07:32"}
    assert submit(path.name, status=ended, **preempted) == ["requeue", job]
    for status in (1, ended):  # the last of scancel
        assert submit(path.name, status=status, **more) == []
    # a job that a task has submitted is not that task
    other = {**more, **ARRAY, "SLURM_ARRAY_JOB_ID": "777", "TASK_ID": "779"}
    assert submit(path.name, status=again, **other) == ["requeue", "123456"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_node_hands_signals_to_its_ranks_and_has_their_status(tmp_path, flags, number):
    run = ["--standalone", "--nproc-per-node", "2", "examples/train_gpt.py", *flags]
    run += ["--steps", "200", "--eval-freq", "0", "--checkpoint-freq", "500"]
    node, root = str(FOLDER / "node.sh"), FOLDER.parents[1]
    environment, pipe = {**os.environ, "PATH": PATH}, subprocess.PIPE
    process = subprocess.Popen([node, *run], cwd=root, env=environment, stdout=pipe, text=True)
    for line in process.stdout:
        if line.startswith("step 1 |"):
            process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    (path,) = tmp_path.glob("runs/tiny-fp8-o2/checkpoints_fp8/step_*")
    steps = [line for line in read(path.parents[1] / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, inspect(path).step + 1))  # once
    assert len(steps) < 200
    assert all(line["comm/bytes"] > 0 for line in steps)


def test_a_sweep_covers_every_level_at_every_rate(submit):
    text = (FOLDER / "sweep.sh").read_text()
    tasks, runs = int(re.search(r"--array=0-(\d+)", text)[1]) + 1, set()
    for task in range(tasks):
        array = {**ARRAY, "SLURM_ARRAY_TASK_ID": str(task)}
        given = submit("sweep.sh", "--model", "tiny", **array)
        assert given[:2] == ["python", "examples/train_gpt.py"]
        found = config.parse(given[2:])
        assert found.run_name.startswith(f"sweep-{found.opt_level}-")
        assert found.resume == "auto"  # not what a level beside it has trained
        runs.add((found.opt_level, found.max_lr))
    assert len(runs) == tasks
    assert {level for level, _ in runs} == {"off", "O0", "O1", "O2"}
