"""What a run says of its monitor: in flags, once, and of learning rates where they are near their highest."""

import json
from types import SimpleNamespace

import pytest
from gpt.trainer import Trainer
from workers_gpt import configure, resume, train, write_text

import fp8stack
from fp8stack.monitor import Finding


@pytest.fixture
def folder(tmp_path):
    write_text(tmp_path)
    return tmp_path


def said(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("advice: ")]


def test_an_advice_is_given_once_and_again_where_layers_join(folder):
    trainer = Trainer(configure(folder))
    watch, found = trainer.monitor, []
    watch.monitor = SimpleNamespace(findings=lambda: found, step=0)

    def told(*layers, field="overflow", operand="x", remedy='use fp8_recipe="current"'):
        found[:] = [Finding(field, operand, True, layers, "it is clipped", remedy)]
        return watch.advice()

    first = "a (and 1 more layers): it is clipped. Remedy: use --fp8-recipe current."
    assert told("a", "b") == [first]
    assert told("a", "b") == told("b") == told("b", "a") == []
    assert told("c", "a") == ["c (and 1 more layers)" + first.partition("layers)")[2]]
    assert told("c", "b") == []
    assert len(told("a", operand="g")) == len(told("a", field="dead_blocks")) == 1
    for layer, remedy, flags in (
        ("d", 'or skip=["blocks.0.attention.query"]', "or --skip blocks.0.attention.query."),
        ("e", "raise fp8_margin by one", "raise --fp8-margin by one."),
        ("f", "use amax_history_len=16: the scale", "use --amax-history-len 16: the scale."),
    ):
        assert told(layer, remedy=remedy)[0].endswith(f"Remedy: {flags}")
    trainer.log.close()


def test_how_far_steps_move_weights_counts_near_the_highest_learning_rate(folder):
    trainer = Trainer(configure(folder, steps=100, warmup_steps=10))
    watch = trainer.monitor
    found = Finding(
        "update_ratio", "w", True, ("a",), "it moves", "lower the learning rate, or warm up longer"
    )
    given = []
    for step in (None, 0, 9, 10, 50, 90, 99):
        watch._told.clear()
        watch.monitor = SimpleNamespace(findings=lambda: [found], step=step)
        given += [(step, line) for line in watch.advice()]
    line = "a: it moves. Remedy: lower --max-lr, or raise --warmup-steps."
    assert given == [(10, line), (50, line)]
    trainer.log.close()


def test_a_run_with_several_evaluations_says_a_thing_once(folder, capsys):
    options = {"max_lr": 0.5, "min_lr_ratio": 1.0, "eval_freq": 1, "max_grad_norm": 1.0}
    train(folder, run_name="a", warmup_steps=0, **options)
    lines = said(capsys)
    (moves,) = (line for line in lines if "moves the weight" in line)
    assert "lower --max-lr, or raise --warmup-steps" in moves
    assert len(lines) == len(set(lines))
    assert not any("fp8_" in line or "skip=" in line for line in lines)
    train(folder, run_name="b", warmup_steps=2, **options)  # the sample is of the first step
    assert not any("moves the weight" in line for line in said(capsys))


def test_layers_are_skipped_also_in_a_run_that_is_resumed(folder):
    options = {"run_name": "skip", "skip": ("head", "blocks.0.*")}
    losses = train(folder, **options)
    (path,) = folder.glob("runs/skip-fp8-o2/checkpoints_fp8/step_00000002")
    assert json.loads((path / "manifest.json").read_text())["options"] == {
        "skip": ["head", "blocks.0.*"]
    }
    assert resume(folder, path, **options) == losses
    trainer = Trainer(configure(folder, **options, resume=str(path), out=folder / "again"))
    skipped = fp8stack.get_report(trainer.model).skipped
    assert {name.split(".")[0] for name in skipped} >= {"head", "blocks"}
    trainer.log.close()
    changed = resume(folder, path, run_name="none")  # with all layers in FP8 from there on
    assert changed[:2] == losses[:2]
    assert changed[2:] != losses[2:]
    assert all(abs(a - b) < 0.01 * b for a, b in zip(changed, losses, strict=True))
