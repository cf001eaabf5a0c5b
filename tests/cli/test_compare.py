"""`fp8stack compare`: gaps, speed and memory of recorded runs, and records that are wrong."""

import json
import math

import pytest

from fp8stack.__main__ import main
from fp8stack.cli.compare import align, smooth


def record(folder, losses, evaluations=None, **info):
    """Write a run: losses and evaluations by step."""
    folder.mkdir(exist_ok=True)
    info = {"name": folder.name, "precision": "bf16", **info}
    speed, memory = info.pop("speed", 1000.0), info.pop("memory", 16.0)
    tokens = info.pop("tokens", {})  # by step, of the lines that say so
    (folder / "run.json").write_text(json.dumps(info))
    lines = [
        {
            "step": step,
            "loss": loss,
            "dt_ms": 10.0,
            "tokens_per_second": speed,
            "memory_gib": memory,
            **({"tokens": tokens[step]} if step in tokens else {}),
        }
        for step, loss in losses.items()
    ]
    lines += [{"step": step, "val_loss": loss} for step, loss in (evaluations or {}).items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def falling(n=100, factor=1.0, every=1, stretch=1.0):
    return {s: factor * (2 + 3 / (1 + s * stretch / 10)) for s in range(every, n + 1, every)}


@pytest.fixture
def compared(capsys):
    def run(*options):
        status = main(["compare", *options, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(
    ("factor", "status", "verdict"),
    [(0.8, 0, "ok"), (1.04, 0, "ok"), (1.07, 0, "warn"), (1.12, 1, "fail")],
)
def test_a_gap_warns_and_fails(factor, status, verdict, tmp_path, compared):
    a = record(tmp_path / "a", falling(), {50: 3.0, 100: 2.0})
    b = record(
        tmp_path / "b", falling(factor=factor), {50: 3.0, 100: 2.0}, speed=1500.0, memory=8.0
    )
    given, data = compared(a, b)
    assert (given, data["verdict"]) == (status, verdict)
    gaps = data["losses"]["loss"]
    assert gaps["final"]["gap"] == pytest.approx(100 * (factor - 1))
    assert gaps["mean"]["gap"] == pytest.approx(100 * (factor - 1))
    assert data["losses"]["val_loss"]["final"]["gap"] == 0
    assert data["gap"]["percent"] == pytest.approx(max(0, 100 * (factor - 1)))
    assert data["tokens_per_second"] == {"a": 1000.0, "b": 1500.0, "ratio": 1.5}
    assert data["memory_gib"]["ratio"] == 0.5
    assert compared(a, b, "--warn", "0.5", "--fail", "1")[0] == int(factor > 1.01)


def test_curves_meet_at_tokens_where_batches_differ(tmp_path, compared):
    a = record(tmp_path / "a", falling(100), tokens_per_step=1000)
    b = record(tmp_path / "b", falling(30, stretch=2.0), tokens_per_step=2000)  # of the same tokens
    _, data = compared(a, b, "--window", "1")
    assert data["axis"] == "tokens"
    assert data["points"] == 59  # 2 to 60 thousand tokens
    for of in data["losses"]["loss"].values():
        assert abs(of["gap"]) < 0.3  # what is lost between points of a line through b's
    c = record(tmp_path / "c", falling(100, every=10))  # without tokens_per_step
    _, data = compared(a, c)
    assert data["axis"] == "step"
    assert "does not say its tokens_per_step" in data["notes"][0]


def test_a_run_that_was_resumed_with_another_batch_lies_at_its_own_tokens(tmp_path, compared):
    def of(count):
        return 2 + 3 / (1 + count / 10_000)

    even = {step: 2000 * step for step in range(1, 51)}
    odd = {step: 1000 * step if step <= 50 else 2000 * step - 50_000 for step in range(1, 76)}
    a = record(tmp_path / "a", {s: of(n) for s, n in even.items()}, tokens_per_step=2000)
    options = {"tokens_per_step": 2000, "tokens": odd}  # in the end as large as a's
    b = record(tmp_path / "b", {s: of(n) for s, n in odd.items()}, **options)
    for pair in ((a, b), (b, a), (b, b)):
        _, data = compared(*pair, "--window", "1")
        assert data["axis"] == "tokens"
        for found in data["losses"]["loss"].values():
            assert abs(found["gap"]) < 0.3
    for wrong in ({s: n for s, n in odd.items() if s > 50}, dict.fromkeys(odd, 2000)):
        options["tokens"] = wrong  # of an older record in part; those of a step
        b = record(tmp_path / "b", {s: of(n) for s, n in odd.items()}, **options)
        assert compared(a, b)[1]["axis"] == "step"


def test_align_interpolates_and_smooth_averages():
    a, b = [(x, 1.0) for x in range(5)], [(1, 10.0), (3, 30.0)]
    assert align(a, b) == ([(1, 1.0), (2, 1.0), (3, 1.0)], [(1, 10.0), (2, 20.0), (3, 30.0)])
    assert align(a, []) == ([], [])
    curve = [(x, float(x)) for x in range(6)]
    assert smooth(curve, 1) == curve
    assert smooth(curve, 3) == [(0, 0.5), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 4.5)]


def test_a_resumed_run_counts_once_and_a_cut_line_is_told(tmp_path, compared):
    a = record(tmp_path / "a", falling())
    b = tmp_path / "b"
    record(b, falling(factor=2.0))
    again = [json.dumps({"step": s, "loss": v}) for s, v in falling().items()]
    with (b / "metrics.jsonl").open("a") as file:
        file.write("\n".join(again) + '\n{"step": 101, "lo')
    status, data = compared(a, str(b / "metrics.jsonl"))  # the file alone will do
    assert status == 0
    assert data["gap"]["percent"] == 0
    assert "line 201 is cut off" in data["notes"][0]
    assert data["memory_gib"] is None  # the later lines have none


def test_steps_that_were_not_taken_are_left_out(tmp_path, compared):
    a = record(tmp_path / "a", falling())
    b = record(tmp_path / "b", {**falling(), 7: None, 8: None})
    status, data = compared(a, b, "--window", "1")
    assert status == 0
    assert data["points"] == 100  # between its neighbours there is a line
    assert data["gap"]["percent"] < 0.5
    assert data["notes"] == ["b: 2 steps without a loss left out"]


def test_a_run_that_ended_early_is_told(tmp_path, compared):
    a = record(tmp_path / "a", falling())
    b = tmp_path / "b"
    record(b, falling(40), name=["no", "text"])
    with (b / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(
            '{"step": 40, "val_loss": 2.0, "text": "a\u2028b"}\n'
        )  # a line of text, not of the file
    status, data = compared(a, str(b))
    assert (status, data["points"]) == (0, 40)
    assert data["notes"] == [
        "60 points of a left out: it is from step 1 to 100, ['no', 'text'] from 1 to 40"
    ]
    assert main(["compare", a, str(b)]) == 0


def test_fewer_points_than_the_window_are_told(tmp_path, compared, capsys):
    a, b = (record(tmp_path / name, falling(19)) for name in "ab")
    status, data = compared(a, b)
    assert (status, data["points"]) == (0, 19)
    (note,) = data["notes"]
    assert note.startswith("the runs share 19 points, fewer than --window 20: each average")
    assert compared(a, b, "--window", "19")[1]["notes"] == []
    assert main(["compare", a, record(tmp_path / "c", falling(1))]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1 point by step, " in text
    assert "the runs share 1 point, fewer than --window 20" in text
    _, data = compared(a, record(tmp_path / "d", {**falling(), 7: None}))
    assert data["notes"][0] == "d: 1 step without a loss left out"


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path, compared, capsys):
    old, new = tmp_path / "old" / "gpt", tmp_path / "new" / "gpt"
    for folder in (old, new):
        folder.parent.mkdir()
        record(folder, falling())
    _, data = compared(str(old), str(new))
    assert [data[run]["name"] for run in "ab"] == ["gpt (old)", "gpt (new)"]
    _, data = compared(*(str(folder / "metrics.jsonl") for folder in (old, new)))
    assert [data[run]["name"] for run in "ab"] == ["gpt (old)", "gpt (new)"]
    assert main(["compare", str(old), str(new)]) == 0
    assert capsys.readouterr().out.split()[:4] == ["gpt", "(old)", "gpt", "(new)"]
    other = record(tmp_path / "fp8", falling(), name="gpt")  # the folder itself differs
    _, data = compared(str(old), other)
    assert [data[run]["name"] for run in "ab"] == ["gpt (gpt)", "gpt (fp8)"]
    _, data = compared(str(old), str(old))
    assert [data[run]["name"] for run in "ab"] == ["gpt (A)", "gpt (B)"]


def test_it_shows_a_table_and_draws_a_picture(tmp_path, capsys):
    from matplotlib.image import imread

    a = record(tmp_path / "a", falling(), {50: 3.0, 100: 2.0})
    b = record(tmp_path / "b", falling(factor=1.07), {50: 3.1, 100: 2.1})
    png = tmp_path / "out.png"
    assert main(["compare", a, b, "--png", str(png)]) == 0
    text = capsys.readouterr().out
    assert "final validation loss" in text
    assert "+7.00 %" in text
    assert "a warning" in text
    picture = imread(png)
    assert min(picture.shape[:2]) > 500
    assert picture.std() > 0.05  # not empty


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{}"], '"step" must be a whole number, got None'),
        (['{"step": 1}'], 'neither "loss"'),
        (['{"step": 1, "loss": NaN}'], "the run diverged"),
        (['{"step": 1, "loss": 1.0}', '{"step": 2, "loss": null}'], "the run diverged"),
        (['{"step": 1, "val_loss": null}'], "the run diverged"),
        ([f'{{"step": {i}, "loss": 1.5e308}}' for i in (1, 2)], "the run diverged"),
        ([f'{{"step": 1, "loss": {10**400}}}'], "the run diverged"),
        ([f'{{"step": {10**400}, "loss": 1.0}}'], '"step" must be a whole number'),
        (
            [f'{{"step": 1, "loss": {"1" * 5000}}}', '{"step": 2, "loss": 1.0}'],
            "line 1 is not JSON",
        ),
        (['{"step": 1, "loss": "low"}'], "it must be a number above 0"),
        (['{"step": 1, "loss": 0}'], "it must be a number above 0"),
        (["[1]"], "a line is a JSON object"),
        (["no", '{"step": 1, "loss": 1.0}'], "line 1 is not JSON"),
        (['{"step": 1, "val_loss": 1.0}'], "has no training lines"),
        (['{"step": 200, "loss": 1.0}'], "have no step in common: 1 to 100 and 200 to 200"),
    ],
)
def test_bad_records_are_one_line_and_status_2(lines, message, tmp_path, capsys):
    a = record(tmp_path / "a", falling())
    b = tmp_path / "b.jsonl"
    b.write_text("\n".join(lines) + "\n")
    fails([a, str(b)], message, capsys)


def fails(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["compare", *options])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_bad_options_are_one_line_and_status_2(tmp_path, capsys):
    a = record(tmp_path / "a", falling())
    fails([a, str(tmp_path / "none")], "is no file", capsys)
    fails([a, a, "--window", "0"], "--window 0 must be at least 1", capsys)
    fails([a, a, "--warn", "20"], "--warn 20 must be from 0 to --fail 10", capsys)
    fails([a, a, "--png", str(tmp_path / "no" / "x.png")], "cannot be written", capsys)
    fails([a, a, "--png", "x.txt"], "--png x.txt: a picture is a PNG. Name it x.txt.png", capsys)
    bad = record(tmp_path / "bad", falling(), tokens_per_step=-1)
    fails([a, bad], "tokens_per_step=-1 must be a number above 0", capsys)
    fails([a, record(tmp_path / "nan", {1: 1.0, 2: math.inf})], "loss is inf at step 2", capsys)
