"""examples/compare.py: gaps, speed and memory of recorded runs, and records that are wrong."""

import json

import pytest
from compare import main


def record(folder, losses, evaluations=None, speed=1000.0, memory=16.0, **info):
    """Write a run: losses and evaluations by step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"name": folder.name, **info}))
    lines = [
        {"step": step, "loss": loss, "tokens_per_second": speed, "memory_gib": memory}
        for step, loss in losses.items()
    ]
    lines += [{"step": step, "val_loss": loss} for step, loss in (evaluations or {}).items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def falling(n=100, factor=1.0, stretch=1.0):
    return {s: factor * (2 + 3 / (1 + s * stretch / 10)) for s in range(1, n + 1)}


@pytest.fixture
def compared(capsys):
    def run(*options):
        status = main([*options, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    ("factor", "status", "verdict"),
    [(0.8, 0, "ok"), (1.04, 0, "ok"), (1.07, 0, "warn"), (1.12, 1, "fail")],
)
def test_a_gap_warns_and_fails(factor, status, verdict, tmp_path, compared):
    evaluations = {50: 3.0, 100: 2.0}
    a = record(tmp_path / "a", falling(), evaluations)
    b = record(tmp_path / "b", falling(factor=factor), evaluations, speed=1500.0, memory=8.0)
    given, data = compared(a, b)
    assert (given, data["verdict"]) == (status, verdict)
    gaps = {name: of["gap"] for name, of in data["losses"].items()}
    assert gaps["final training loss"] == pytest.approx(100 * (factor - 1))
    assert gaps["final validation loss"] == 0
    assert data["gap"]["percent"] == pytest.approx(max(0, 100 * (factor - 1)))
    assert data["tokens_per_second"] == {"a": 1000.0, "b": 1500.0, "ratio": 1.5}
    assert data["memory_gib"]["ratio"] == 0.5
    assert compared(a, b, "--warn", "0.5", "--fail", "1")[0] == int(factor > 1.01)


def test_curves_meet_at_tokens_where_batches_differ(tmp_path, compared):
    a = record(tmp_path / "a", falling(100), tokens_per_step=1000)
    b = record(tmp_path / "b", falling(30, stretch=2.0), tokens_per_step=2000)  # of the same tokens
    _, data = compared(a, b, "--window", "1")
    assert (data["axis"], data["points"]) == ("tokens", 59)  # 2 to 60 thousand tokens
    for of in data["losses"].values():
        assert abs(of["gap"]) < 0.3  # what is lost between points of a line through b's


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"step": 1}', '{"step": 300}'], "line 1 is no line of a log"),
        (['{"step": 1, "loss": NaN}'], "the run diverged"),
        (['{"step": 1, "val_loss": 1.0}'], "has no training lines"),
        (['{"step": 200, "loss": 1.0}'], "have no step in common"),
    ],
)
def test_bad_records_are_one_line_and_status_2(lines, message, tmp_path, capsys):
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(SystemExit) as caught:
        main([record(tmp_path / "a", falling()), str(tmp_path / "b.jsonl")])
    error = capsys.readouterr().err
    assert (caught.value.code, len(error.splitlines())) == (2, 1)
    assert message in error
