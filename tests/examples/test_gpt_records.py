"""What a run's folder had before is not lost, mixed in or taken for something else: records, curves, other files."""

import subprocess
import sys
from pathlib import Path

import pytest
import train_gpt
from gpt.lock import lock
from gpt.trainer import Trainer
from workers_gpt import configure, read, train, write_text

from fp8stack.errors import CheckpointError, ConfigError, Fp8StackWarning


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt")
    write_text(folder)
    return folder


def test_an_older_run_s_record_is_there_still_where_its_checkpoints_cannot_be_removed(
    folder, monkeypatch
):
    options = {"run_name": "stuck"}
    train(folder, **options)
    run = folder / "runs" / "stuck-fp8-o2"
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "run.json")}

    def refuse(path):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr("gpt.runs.clear", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be emptied \(Permission denied\)"):
        Trainer(configure(folder, **options, seed=5, overwrite=True))
    assert {name: (run / name).read_bytes() for name in before} == before


def test_a_record_is_cut_at_once_or_not_at_all(folder, monkeypatch):
    options = {"run_name": "cut"}
    train(folder, **options)
    run = folder / "runs" / "cut-fp8-o2"
    whole, path = (run / "metrics.jsonl").read_bytes(), run / "checkpoints_fp8" / "step_00000002"

    def refuse(*paths):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("fp8stack.checkpoint.os.replace", refuse)
        with pytest.raises(ConfigError, match=r"cannot be written \(Input/output error\)"):
            Trainer(configure(folder, **options, resume=str(path)))
    assert (run / "metrics.jsonl").read_bytes() == whole
    trainer = Trainer(configure(folder, **options, resume=str(path)))
    kept = (run / "metrics.jsonl").read_bytes()  # now, where a kill would leave it so
    assert kept == b"".join(whole.splitlines(keepends=True)[:2])
    trainer.run()
    assert [line["step"] for line in read(run / "metrics.jsonl")] == [1, 2, 3, 4]
    with open(run / "metrics.jsonl", "a") as file:
        file.write('5\n{"loss": 3}\n{"step": 4, "lo')  # no steps, and half a line
    train(folder, **options, resume=str(path))
    assert [line["step"] for line in read(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert not [
        path for path in run.iterdir() if path.name.startswith(".") and path.name != ".lock"
    ]


def test_tokens_are_counted_over_a_resume_with_another_batch(folder):
    options = {"run_name": "tokens", "eval_freq": 2, "steps": 4}
    train(folder, **options)
    run = folder / "runs" / "tokens-fp8-o2"

    def tokens():
        return [(line["step"], line["tokens"]) for line in read(run / "metrics.jsonl")]

    assert tokens() == [(1, 64), (2, 128), (2, 128), (3, 192), (4, 256), (4, 256)]
    path = run / "checkpoints_fp8" / "step_00000002"
    with pytest.warns(Fp8StackWarning, match="--target-effective-batch-size was 4, is now 8"):
        train(folder, **options, resume=str(path), target_effective_batch_size=8)
    assert tokens() == [(1, 64), (2, 128), (2, 128), (3, 256), (4, 384), (4, 384)]
    old = "".join(f'{{"step": {step}, "loss": 3.0}}\n' for step in (1, 2))
    (run / "metrics.jsonl").write_text(
        old
    )  # of before there was "tokens"; run.json says 128 a step
    with pytest.warns(Fp8StackWarning, match="was 8, is now 4"):
        trainer = Trainer(configure(folder, **options, resume="latest"))
    assert trainer.log.counted == (4, 4 * 128, 64)
    trainer.log.close()


HOLD = """
import sys
from pathlib import Path
from gpt.lock import lock
file = lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_is_one_run_s_at_a_time_and_free_when_that_is_killed(folder):
    options = {"run_name": "two", "opt_level": "off"}
    losses = train(folder, **options)
    run = folder / "runs" / "two-bf16"
    before = (run / "metrics.jsonl").read_bytes()
    examples = str(Path(train_gpt.__file__).parent)
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {examples!r})\n{HOLD}",
        str(run),
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        for how in ({"overwrite": True}, {"resume": "auto"}):
            with pytest.raises(
                ConfigError, match=rf"in use by another run \(.*, process {other.pid}\)"
            ):
                train(folder, **options, **how)
        assert (run / "metrics.jsonl").read_bytes() == before
        assert len(list(run.glob("checkpoints/step_*"))) == 2
        (run / ".lock").write_text("elsewhere, process 1\n")  # of a host that may have crashed
        with pytest.raises(ConfigError, match=r"in use by another run \(elsewhere, process 1\)"):
            lock(run, patience=0.1)
        other.kill()
    assert train(folder, **options, resume="auto") == losses


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_overwrite_deletes_nothing_where_the_new_run_cannot_begin(name, folder):
    options = {"run_name": f"whole-{name[0]}", "tensorboard": True, "opt_level": "off"}
    pytest.importorskip("tensorboard")
    train(folder, **options)
    run = folder / "runs" / f"whole-{name[0]}-bf16"
    (run / name).rename(run / "moved")
    (run / name).mkdir() if name == "metrics.jsonl" else (run / name).touch()
    with pytest.raises(ConfigError, match=f"{name} cannot be written"):
        train(folder, **options, overwrite=True)
    assert len(list(run.glob("checkpoints/step_*"))) == 2
