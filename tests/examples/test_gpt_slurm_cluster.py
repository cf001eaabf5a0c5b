"""The Slurm scripts on Slurm: a cluster of two nodes that pretend to have GPUs, on this machine, as this user.

Skipped where Slurm is not installed (Debian's packages slurmctld, slurmd and slurm-client).
"""

import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpt import config
from gpt.checkpoints import list_checkpoints
from helpers import free_port
from workers_gpt import write_text

FOLDER = Path(config.__file__).parents[1] / "slurm"
HOST = socket.gethostname().partition(".")[0]  # the first node's name, by which its ranks meet
USER = pwd.getpwuid(os.getuid()).pw_name
JOBS = ("one_node", "many_nodes", "sweep")
PATH = f"{os.environ['PATH']}:/usr/sbin"
pytestmark = pytest.mark.skipif(
    any(shutil.which(name, path=PATH) is None for name in ("slurmctld", "slurmd", "sbatch")),
    reason="Slurm is not installed",
)
# requeued jobs begin when the credentials of their last start have expired, by default after two minutes
CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
FirstJobId={first}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}
SlurmctldPidFile={folder}/controller.pid
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
MpiDefault=none
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 Gres=gpu:8
NodeName={host}-b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 Gres=gpu:8
PartitionName=low Nodes={host},{host}-b Default=YES PriorityTier=1 GraceTime=120
PartitionName=high Nodes={host},{host}-b PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """Slurm's daemons, and its commands for them."""

    def __init__(self, folder: Path):
        self.log = folder / "log"
        ports = [free_port() for _ in range(3)]
        text = CONF.format(
            host=HOST, ports=ports, user=USER, folder=folder, first=random.randrange(1, 10**6)
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-7]\n")
        (folder / "cgroup.conf").touch()
        for i in range(8):
            (folder / f"gpu{i}").touch()
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        inside = {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf"), "VENV": sys.prefix}
        self.environment = {**outside, **inside, "OMP_NUM_THREADS": "1"}
        nodes = [["slurmd", "-D", "-N", name] for name in (HOST, f"{HOST}-b")]
        self.daemons = [self._start(command) for command in (["slurmctld", "-D"], *nodes)]

    def _start(self, command):
        with self.log.open("a") as log:
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def run(self, *command):
        return subprocess.run(
            list(map(str, command)), cwd=FOLDER.parents[1], env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def call(self, *command):
        """Return what a command of Slurm's prints on both streams."""
        done = self.run(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    def is_up(self):
        return self.run("sinfo", "-h", "-o", "%T %D").stdout.split() == ["idle", "2"]

    def submit(self, *command):
        return self.call("sbatch", "--parsable", *command).strip()

    def state(self, job):
        """Return a job's state, how often it was requeued, and its exit status."""
        text = self.call("scontrol", "show", "job", job)
        found = re.search(r"JobState=(\w+).* Restarts=(\d+) .*ExitCode=(\d+):", text, re.DOTALL)
        return found[1], int(found[2]), int(found[3])

    def jobs(self):
        """Return how many jobs are there, those that end too; 0 of a controller that does not answer."""
        asked = self.run("squeue", "--noheader")
        return len(asked.stdout.splitlines()) if asked.returncode == 0 else 0

    def stop(self):
        self.run("scancel", "--user", USER)
        try:
            wait_for(lambda: not self.jobs(), 60)  # slurmd waits for them
        finally:
            for daemon in reversed(self.daemons):
                daemon.terminate()
            for daemon in self.daemons:
                try:
                    daemon.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    daemon.kill()


def wait_for(condition, seconds=120, log=None):
    """Return once a condition is true; show the end of a log if it does not become so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, log.read_text()[-2000:] if log else "it has not come"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        wait_for(made.is_up, 30, made.log)
        yield made
    finally:
        made.stop()


@pytest.mark.parametrize("name", JOBS)
def test_slurm_takes_the_script(cluster, name):
    nodes = {"many_nodes": f"{HOST},{HOST}-b"}.get(name, HOST)
    answer = cluster.call("sbatch", "--test-only", FOLDER / f"{name}.sh", "--model", "tiny")
    assert f"on nodes {nodes} in partition low" in answer


def requeue_a_task(cluster, tmp_path):
    """Of an array only the task is requeued; return when it has begun again."""
    script = tmp_path / "job.sh"
    script.write_text(f"""#!/usr/bin/env bash
#SBATCH --array=0-2
#SBATCH --requeue
#SBATCH --output={tmp_path}/%a.log
#SBATCH --open-mode=append
echo "$SLURM_JOB_ID $SLURM_ARRAY_JOB_ID"
sleep 2  # until all of them run
[[ $SLURM_ARRAY_TASK_ID != 2 || -n ${{SLURM_RESTART_COUNT:-}} ]] || {FOLDER}/requeue.sh 138
sleep 1000
""")
    array = cluster.submit(script)
    log = tmp_path / "2.log"

    def starts():
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.split() for line in lines if line[:1].isdigit()]

    wait_for(lambda: len(starts()) == 2)
    assert starts() == [[array, array]] * 2, "a job with the number of the whole array"
    states = [cluster.state(f"{array}_{task}") for task in range(3)]
    assert states == [("RUNNING", restarts, 0) for restarts in (0, 0, 1)]
    cluster.call("scancel", array)


@pytest.mark.slow
def test_jobs_go_on_after_a_preemption_and_when_their_time_is_up(cluster, tmp_path):
    """One on two nodes, and a task of an array."""
    write_text(tmp_path)
    log = tmp_path / "job.log"
    where = ["--output", log, "--gpus-per-node=1", "--cpus-per-task=1", "--signal=USR1@1"]
    run = ["--model", "tiny", "--seq-len", "16", "--steps", "100000", "--no-fp8", "--device", "cpu"]
    run += ["--eval-freq", "0", "--log-freq", "1", "--checkpoint-freq", "100000"]
    data = ["--data", tmp_path / "text.txt", "--out", tmp_path]
    job = cluster.submit(*where, FOLDER / "many_nodes.sh", *run, *data)

    def stepping(stops):
        starts = log.read_text().split("--resume auto goes on\n") if log.exists() else []
        return len(starts) == stops + 1 and "| loss " in starts[-1]

    def newest():
        return list_checkpoints([tmp_path / "tiny-bf16" / "checkpoints"])[-1].step

    wait_for(lambda: stepping(0), log=log)
    # by a job that needs all GPUs; the run ends within the time of grace, and Slurm calls that failed
    whole = ["--partition=high", "--nodes=2", "--gpus-per-node=8", "--output=/dev/null"]
    cluster.submit(*whole, "--wrap=true")
    wait_for(lambda: stepping(1), log=log)
    assert cluster.state(job) == ("RUNNING", 1, 0)
    assert f"step_{newest():08d} (bf16), step {newest()}\n" in log.read_text()
    before = newest()
    cluster.call("scancel", "--signal=USR1", job)  # what --signal=USR1@300 sends
    wait_for(lambda: stepping(2), log=log)
    assert cluster.state(job) == ("RUNNING", 2, 0)
    assert f"step_{newest():08d} (bf16), step {newest()}\n" in log.read_text()
    assert newest() > before
    cluster.call("scancel", "--signal=TERM", job)
    wait_for(lambda: cluster.state(job) == ("FAILED", 2, 128 + signal.SIGTERM))
    requeue_a_task(cluster, tmp_path)  # until a requeued job would have begun
    assert cluster.state(job) == ("FAILED", 2, 128 + signal.SIGTERM)
