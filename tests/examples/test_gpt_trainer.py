"""One run from the command line: what it says, writes, refuses, and does about steps that are not finite."""

import json
import math
import re
from importlib.util import find_spec

import pytest
import torch
import train_gpt
from gpt import GPT, ModelConfig, evaluation, logs
from gpt.config import Config
from gpt.evaluation import Question
from gpt.guard import DivergedError, Guard
from workers_gpt import read, train, write_text

SMALL = """--model tiny --seq-len 16 --steps 4 --warmup-steps 1 --target-effective-batch-size 4 --checkpoint-freq 2
    --eval-freq 2 --eval-batches 2 --eval-batch-size 1 --log-freq 1 --device cpu"""
LINE = re.compile(
    r"step \d+ \| epoch \d+ \| loss \d+\.\d{4} \| lr \d\.\d\de-\d\d \| norm \d+\.\d{3} \| dt \d+\.\d ms \| "
    r"tok/s \d+ \| mem \d+\.\d GiB \| FP8 O2"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt")
    write_text(folder)
    return folder


def run(folder, *arguments):
    return train_gpt.main(
        [*SMALL.split(), "--data", str(folder / "text.txt"), "--out", str(folder), *arguments]
    )


def test_a_run_leaves_its_record(folder, capsys):
    assert run(folder, "--run-name", "mine", "--opt-level", "O2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" |")[0] for line in lines if LINE.fullmatch(line)] == [
        f"step {n}" for n in range(1, 5)
    ]
    assert any(re.fullmatch(r"step 4 \| val_loss \d\.\d{4} \| FP8 O2", line) for line in lines)
    assert any(line.startswith("The ") for line in lines)  # a sample
    facts = json.loads((folder / "mine-fp8-o2" / "run.json").read_text())
    assert (facts["name"], facts["level"], facts["precision"]) == ("mine-fp8-o2", "O2", "FP8 O2")
    assert facts["tokens_per_step"] == 4 * 16
    assert facts["parameters"] == sum(
        p.numel() for p in GPT(ModelConfig(**facts["architecture"])).parameters()
    )
    assert facts["config"]["steps"] == 4
    records = read(folder / "mine-fp8-o2" / "metrics.jsonl")
    steps, evaluations = ([r for r in records if key in r] for key in ("loss", "val_loss"))
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    expected = "step loss lr norm dt_ms tokens_per_second memory_gib epoch time"
    assert all(set(expected.split()) <= r.keys() for r in steps)
    monitored = {"fp8/fwd_scale", "fp8/bwd_scale", "fp8/amax", "fp8/underflow", "fp8/overflow"}
    assert monitored <= steps[0].keys()  # a sample is logged once
    assert not monitored & steps[1].keys()
    assert [set(r) for r in evaluations] == [{"step", "val_loss", "tokens", "time"}] * 2
    assert run(folder, "--run-name", "mine", "--list-checkpoints") == 0
    table = capsys.readouterr().out
    assert re.search(r"4 +\d\.\d{4} +\d\.\d{4}  FP8 O2 +0\.\d{3}  .*step_00000004 \(latest", table)


def test_a_sample_cannot_speak_to_the_terminal(folder, capsys):
    log = logs.RunLog(
        folder / "sampled", {"precision": "bf16", "name": "x", "tokens_per_step": 1}, 0, 1, False
    )
    log.begin()
    log.evaluation(1, {"val_loss": 1.0}, "a\x1b[2J\x0e\tb\nc\r")
    log.close()
    assert "--- a sample\na\ufffd[2J\ufffd\tb\nc\ufffd\n---" in capsys.readouterr().out


def test_tensorboard_has_the_same_numbers(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(folder, "--run-name", "board") == 0
    events = EventAccumulator(str(folder / "board-fp8-o2" / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/lr", "train/memory_gib", "eval/val_loss", "fp8/amax"} <= tags
    losses = [r["loss"] for r in read(folder / "board-fp8-o2" / "metrics.jsonl") if "loss" in r]
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(losses, rel=1e-6)


def test_wandb_logs_offline(folder, monkeypatch):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # which keeps what the environment said at its first run
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = ("--run-name", "wandb", "--no-tensorboard", "--opt-level", "off", "--wandb")
    record, names = folder / "wandb-bf16", []
    for more in ((), ("--resume", str(record / "checkpoints" / "step_00000002"))):
        assert run(folder, *options, *more) == 0
        names.append(json.loads((record / "run.json").read_text())["wandb"])
    assert names[0] == names[1]  # one run of W&B's
    files = list((record / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{names[0]}.wandb"}


def test_steps_that_are_not_finite_are_skipped_and_end_the_run(folder, capsys):
    flags = "--run-name diverged --max-lr 1e36 --max-nan-steps 2 --steps 9 --fp8-format e4m3"
    assert run(folder, *flags.split(), "--fp8-recipe", "delayed") == 1
    captured = capsys.readouterr()
    assert "not finite, and so not taken" in captured.out
    advised = ("--fp8-margin 1", "--fp8-format hybrid", "--max-lr", "--compute bf16")
    order = [captured.err.index(text) for text in advised]
    assert order == sorted(order)
    assert captured.err.count("\n") == 1
    with pytest.raises(DivergedError, match="2 steps in a row"):
        train(folder, opt_level="off", max_lr=1e36, max_nan_steps=2, steps=9)


def test_a_run_says_at_its_end_how_many_steps_it_left_out(folder, capsys):
    options = ("--opt-level", "off", "--max-nan-steps", "9", "--eval-freq", "0", "--max-lr", "1e36")
    assert run(folder, *options, "--run-name", "some") == 0
    said = "3 of 4 steps were not finite, and so not taken"
    assert capsys.readouterr().out.splitlines()[-1] == said
    guard = Guard(Config(opt_level="off", max_nan_steps=1), "bf16")
    assert guard.sum_up() == ""  # no step was asked for
    assert guard.accepts(1, math.inf, math.inf, searching=True)  # GradScaler leaves it out
    with pytest.raises(DivergedError, match="none of 1 steps was taken"):
        guard.sum_up()
    assert guard.accepts(2, 1.0, 1.0)
    assert guard.sum_up() == "1 of 2 steps were not finite, and so not taken"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", __file__), "cannot be written (Not a directory). Give another folder as --out"),
        (("--resume", "nowhere"), "--resume nowhere: there is no such folder"),
        (("--parallel", "fsdp2"), "--parallel fsdp2 is for ranks that torchrun starts"),
        (("--hellaswag", "nowhere"), "--hellaswag nowhere: cannot be read"),
        (("--stepz", "3"), 'Did you mean "--steps"'),
        (("--data", "nowhere.txt"), "there is no such file or folder"),
        (("--data", "hf:"), "--data hf:: names no dataset"),
        (("--run-name", "../outside"), "--run-name ../outside must be the name of a folder"),
        pytest.param(
            ("--attention", "flash"),
            '--attention flash: attention="flash" needs the package flash-attn',
            marks=pytest.mark.skipif(bool(find_spec("flash_attn")), reason="flash-attn is there"),
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(folder, arguments, message, capsys):
    assert run(folder, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("train_gpt: ")
    assert error.count("\n") == 1


# --- HellaSwag


class Repeats(torch.nn.Module):
    """Expects every byte to come again, and every other one alike."""

    def forward(self, tokens):
        return 3.0 * torch.nn.functional.one_hot(tokens, 256).float()


def encode(text):
    return torch.tensor(list(text.encode()))


def test_hellaswag_picks_the_likeliest_ending_for_its_length(folder, tmp_path):
    question = Question("aaaa", ("bcbcbcbc", "aaaa", "xyz", "aab"), 1)
    model, autocast = Repeats(), torch.no_grad
    where = torch.device("cpu"), autocast
    (scores,) = evaluation.score_endings(model, [question], encode, 64, *where)
    again, other = 3 - math.log(math.e**3 + 255), -math.log(math.e**3 + 255)
    expected = [9 * other / 8, (3 * again + 2 * other) / 4, 4 * other / 3, (again + 3 * other) / 3]
    assert scores.tolist() == pytest.approx(expected, rel=1e-5)
    (cut,) = evaluation.score_endings(model, [question], encode, 4, *where)
    expected = [
        other * 9 / 8,
        (again + 2 * other) * 5 / 3 / 4,
        other * 4 / 3,
        (again + 2 * other) * 4 / 3 / 3,
    ]
    assert cut.tolist() == pytest.approx(expected, rel=1e-5)  # of their first three tokens
    path = tmp_path / "hellaswag.jsonl"
    lines = [
        {"ctx": "aaaa", "endings": list(question.endings), "label": label}
        for label in (1, 1, "1", 3)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    questions = evaluation.read_questions(path)
    accuracy = evaluation.hellaswag_accuracy(
        model, questions, encode, 64, torch.device("cpu"), autocast
    )
    assert accuracy == 0.75
    assert run(folder, "--run-name", "swag", "--hellaswag", str(path), "--opt-level", "O0") == 0
    evaluations = [r for r in read(folder / "swag-fp8-o0" / "metrics.jsonl") if "val_loss" in r]
    assert all(0 <= r["hellaswag"] <= 1 for r in evaluations)


def test_questions_of_hellaswag_are_scored_together_as_alone():
    """Of other lengths, and with other numbers of endings; five of them, so that the last part has one."""
    questions = [
        Question("a" * n, tuple("ab" * (n + k) + "c" * k for k in range(1 + n % 4)), n % 2)
        for n in (3, 1, 30, 7, 9)
    ]
    model, where = Repeats(), (torch.device("cpu"), torch.no_grad)
    alone = [evaluation.score_endings(model, [q], encode, 32, *where)[0] for q in questions]
    together = evaluation.score_endings(model, questions, encode, 32, *where)
    assert [len(scores) for scores in together] == [len(q.endings) for q in questions]
    for one, scores in zip(alone, together, strict=True):
        torch.testing.assert_close(scores, one)
    right = [int(s.argmax()) == q.label for s, q in zip(alone, questions, strict=True)]
    assert 0 < sum(right) < 5
    accuracy = evaluation.hellaswag_accuracy(model, questions, encode, 32, *where)
    assert accuracy == pytest.approx(sum(right) / 5)
