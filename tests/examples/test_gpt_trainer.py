"""One run from the command line: what it says, writes, refuses, and does about steps that are not finite."""

import json
import math
import re
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import train_gpt
from gpt import GPT, ModelConfig
from gpt.config import Config
from gpt.guard import DivergedError, Guard
from gpt.trainer import Trainer
from workers_gpt import configure, losses_of, read, train

from fp8stack.monitor import Finding

LINE = re.compile(
    r"step \d+ \| epoch \d+ \| loss \d+\.\d{4} \| lr \d\.\d\de-\d\d \| norm \d+\.\d{3} \| dt \d+\.\d ms \| "
    r"tok/s \d+ \| mem \d+\.\d GiB \| FP8 O2"
)


def test_a_run_leaves_its_record(flags, tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    questions = tmp_path / "hellaswag.jsonl"
    questions.write_text(json.dumps({"ctx": "a", "endings": ["b", "c"], "label": 1}) + "\n")
    assert train_gpt.main([*flags, "--run-name", "mine", "--hellaswag", str(questions)]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = [line.split(" |")[0] for line in lines if LINE.fullmatch(line)]
    assert steps == [f"step {n}" for n in range(1, 5)]
    evaluated = r"step 4 \| val_loss \d\.\d{4} \| hellaswag [01]\.0000 \| FP8 O2"
    assert any(re.fullmatch(evaluated, line) for line in lines)
    assert any(line.startswith("The ") for line in lines)  # a sample
    run = tmp_path / "runs" / "mine-fp8-o2"
    facts = json.loads((run / "run.json").read_text())
    assert (facts["name"], facts["level"], facts["precision"]) == ("mine-fp8-o2", "O2", "FP8 O2")
    assert (facts["tokens_per_step"], facts["config"]["steps"]) == (4 * 16, 4)
    model = GPT(ModelConfig(**facts["architecture"]))
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    records = read(run / "metrics.jsonl")
    steps, evaluations = ([r for r in records if key in r] for key in ("loss", "val_loss"))
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    expected = "step loss lr norm dt_ms tokens_per_second memory_gib epoch time"
    assert all(set(expected.split()) <= r.keys() for r in steps)
    monitored = {"fp8/fwd_scale", "fp8/bwd_scale", "fp8/amax", "fp8/underflow", "fp8/overflow"}
    assert monitored <= steps[0].keys()  # a sample is logged once
    assert not monitored & steps[1].keys()
    names = {"step", "val_loss", "hellaswag", "tokens", "time"}
    assert [set(r) for r in evaluations] == [names] * 2
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/lr", "train/memory_gib", "eval/val_loss", "fp8/amax"} <= tags
    drawn = [event.value for event in events.Scalars("train/loss")]
    assert drawn == pytest.approx(losses_of(run), rel=1e-6)
    assert train_gpt.main([*flags, "--run-name", "mine", "--list-checkpoints"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"4 +\d\.\d{4} +\d\.\d{4}  FP8 O2 +0\.\d{3}  .*step_00000004 \(latest", table)


def test_steps_that_are_not_finite_are_skipped_and_end_the_run(flags, folder, capsys):
    flags += ["--no-tensorboard", "--max-lr", "1e36"]
    more = "--max-nan-steps 2 --steps 9 --fp8-format e4m3 --fp8-recipe delayed"
    assert train_gpt.main([*flags, *more.split()]) == 1
    captured = capsys.readouterr()
    assert "not finite, and so not taken" in captured.out
    advised = ("--fp8-margin 1", "--fp8-format hybrid", "--max-lr", "--compute bf16")
    order = [captured.err.index(text) for text in advised]
    assert order == sorted(order)
    assert captured.err.count("\n") == 1
    with pytest.raises(DivergedError, match="2 steps in a row"):
        train(folder, opt_level="off", max_lr=1e36, max_nan_steps=2, steps=9)
    assert train_gpt.main([*flags, "--opt-level", "off", "--eval-freq", "0"]) == 0
    said = "3 of 4 steps were not finite, and so not taken"
    assert capsys.readouterr().out.splitlines()[-1] == said
    guard = Guard(Config(opt_level="off", max_nan_steps=1), "bf16")
    assert guard.sum_up() == ""  # no step was asked for
    assert guard.accepts(1, math.inf, math.inf, searching=True)  # GradScaler leaves it out
    with pytest.raises(DivergedError, match="none of 1 steps was taken"):
        guard.sum_up()
    guard = Guard(Config(opt_level="off", max_nan_steps=2), "bf16")
    losses = math.inf, 1.0, math.inf  # which are not two in a row
    assert [guard.accepts(n, x, 1.0) for n, x in enumerate(losses)] == [False, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", __file__), "cannot be written (Not a directory). Give another folder as --out"),
        (("--resume", "nowhere"), "--resume nowhere: there is no such folder"),
        (("--parallel", "fsdp2"), "--parallel fsdp2 is for ranks that torchrun starts"),
        (("--hellaswag", "nowhere"), "--hellaswag nowhere: cannot be read"),
        (("--deterministic",), "CUBLAS_WORKSPACE_CONFIG=:0:0: "),
        (("--stepz", "3"), 'Did you mean "--steps"'),
        (("--data", "nowhere.txt"), "there is no such file or folder"),
        pytest.param(
            ("--attention", "flash"),
            '--attention flash: attention="flash" needs the package flash-attn',
            marks=pytest.mark.skipif(bool(find_spec("flash_attn")), reason="flash-attn is there"),
        ),
    ],
)
def test_what_cannot_be_done_is_one_line(flags, arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert train_gpt.main([*flags, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("train_gpt: ")
    assert error.count("\n") == 1


# --- advice of the monitor


def test_an_advice_is_given_once_in_flags_and_again_where_layers_join(folder):
    trainer = Trainer(configure(folder, run_name="advice"))
    watch, found = trainer.monitor, []
    watch.monitor = SimpleNamespace(findings=lambda: found, step=0)

    def told(*layers, field="overflow", operand="x", remedy='use fp8_recipe="current"'):
        found[:] = [Finding(field, operand, True, layers, "it is clipped", remedy)]
        return watch.advice()

    first = "a (and 1 more layers): it is clipped. Remedy: use --fp8-recipe current."
    assert told("a", "b") == [first]
    assert told("a", "b") == told("b") == told("b", "a") == []
    assert told("c", "a") == ["c (and 1 more layers)" + first.partition("layers)")[2]]
    assert len(told("a", operand="g")) == len(told("a", field="dead_blocks")) == 1
    trainer.log.close()
