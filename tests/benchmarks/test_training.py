"""benchmarks/training.py on a CPU: shards, what it writes down, runs that fail, and one that is interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import record_tables
import report_pictures
import training
import training_tables
from gpt.build import architecture
from gpt.model import GPT, SIZES
from matplotlib.figure import Figure


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Shards of a small text; in a folder, with its text."""
    pytest.importorskip("tokenizers")
    root = tmp_path_factory.mktemp("shards")
    (root / "text").mkdir()
    text = "".join(f"def f_{i}(x):\n    return x * {i} + {i * 7 % 13}\n" for i in range(400))
    (root / "text" / "book.txt").write_text(text)
    given = ["--text", str(root / "text"), "--shards", str(root / "shards")]
    assert training.main([*given, "--max-tokens", "5000"]) == 0
    return root / "shards"


def arguments(shards, folder):
    common = ["--device", "cpu", "--shards", str(shards), "--runs", str(folder / "runs")]
    return [*common, "--output", str(folder / "records.jsonl"), "--eval-batches", "2"]


def test_shards_have_a_tokenizer_that_ends_like_gpt_2_s(shards):
    tokens = json.loads((shards / "tokenizer.json").read_text())
    ids = tokens["model"]["vocab"]
    last = tokens["added_tokens"][-1]
    assert (last["content"], last["id"]) == ("<|endoftext|>", len(ids))
    assert 256 < len(ids) < training.TOKENS
    assert (shards / "train_000000.bin").stat().st_size == 2 * 5000


@pytest.mark.slow
def test_records_are_of_runs_that_ended_well(shards, tmp_path, capsys):
    chosen = ["--model", "tiny", "gpt2", "--levels", "off", "--gpus", "0", "1"]
    given = [*arguments(shards, tmp_path), "--steps", "6", "--eval-freq", "3"]
    assert training.main([*given, *chosen]) == 1  # for GPT-2 the text is too short
    assert training.main([*given, "--model", "tiny", "--levels", "O2", "--seeds", "0"]) == 0
    base, ours = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    assert (base["variant"], ours["variant"]) == ("bf16", "O2")
    assert (base["precision"], ours["precision"]) == ("bf16", "FP8 O2")
    assert base["params"] == ours["params"]
    assert base["params"] | {"model": "tiny", "batch": 4, "seq": 64, "steps": 6} == base["params"]
    for record in (base, ours):
        assert [step for step, _ in record["validation"]] == [3, 6]
        assert record["value"] == record["validation"][-1][1]
        assert len(record["train_loss_per_25_steps"]) == 1
        assert record["skipped_steps"] == 0
        assert record["tokens_per_second"] == pytest.approx(256e3 / record["step_ms"], rel=1e-6)
        assert record["seconds"] > 6e-3 * record["step_ms"] / 2
    assert ours["value"] == pytest.approx(base["value"], rel=0.02)
    said = capsys.readouterr()
    assert '{"failed": ["gpt2, bf16, seed 0"]}' in said.out
    assert "no window of 1024" in said.err


@pytest.mark.slow
def test_again_is_the_same_run_with_sums_in_another_order(shards, tmp_path):
    given = [*arguments(shards, tmp_path), "--model", "tiny", "--levels", "off", "again", "O2"]
    given += ["--steps", "4", "--lr", "1e-3", "--warmup", "2", "--gpus", "0", "1"]
    assert training.main([*given, "--flag", "fp8-recipe=delayed", "--flag", "fuse=true"]) == 0
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    found = {r["variant"]: r for r in map(json.loads, lines)}
    params = {name: r["params"] for name, r in found.items()}
    assert (
        params["bf16"] | {"lr": 1e-3, "warmup": 2, "batch": 4, "micro_batch": 4} == params["bf16"]
    )
    assert params["bf16 again"] == {**params["bf16"], "micro_batch": 2}
    flags = {"fp8-recipe": "delayed", "fuse": True}
    assert params["O2"] == {**params["bf16"], "flags": flags}
    assert [r["compute"] for r in map(found.get, params)].count("native") == 1
    assert found["bf16 again"]["precision"] == "bf16"
    steps = [
        read_steps(tmp_path, f"tiny-seed0-lr0.001-warmup2{tag}-bf16") for tag in ("", "-again")
    ]
    assert [s["lr"] for s in steps[0]] == [s["lr"] for s in steps[1]]
    for base, again in zip(*steps, strict=True):
        assert again["loss"] == pytest.approx(base["loss"], rel=1e-3)
    assert steps[0][-1]["norm"] != steps[1][-1]["norm"]
    name = "tiny-seed0-lr0.001-warmup2-fp8-recipe-delayed-fuse-true-fp8-o2"
    told = json.loads((tmp_path / "runs" / name / "run.json").read_text())["config"]
    assert (told["fp8_recipe"], told["fuse"], told["max_lr"]) == ("delayed", True, 1e-3)


def read_steps(folder, name):
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [found for line in lines if "loss" in (found := json.loads(line))]


@pytest.mark.slow
def test_what_is_interrupted_leaves_records_and_no_processes(shards, tmp_path, ctrl_c):
    script = Path(training.__file__)
    given = [*arguments(shards, tmp_path), "--model", "tiny", "--levels", "off", "O2"]
    command = [sys.executable, str(script), *given, "--steps", "20"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
    for line in process.stderr:
        if "O2, seed 0: starts" in line:
            break
    time.sleep(1)
    assert len(find_processes(tmp_path)) == 2
    process.send_signal(signal.SIGINT)
    process.stderr.read()
    assert process.wait(30) == 130
    assert find_processes(tmp_path) == []
    records = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["variant"] for line in records] == ["bf16"]


def find_processes(folder):
    """Return the numbers of those that were told of a folder, but not this one's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            told = str(folder).encode() in path.read_bytes()
        except OSError:  # it ended
            continue
        if told and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def ask(*given):
    return training.parse(["--shards", "none", *given])


@pytest.mark.parametrize("name", ["gpt2", "llama-1b", "tiny"])
def test_what_is_estimated_is_the_model_that_trains(name):
    sizes = replace(SIZES[name], vocab=512, layers=2, seq_len=training.MODELS[name].seq)

    def estimate(level, *given):
        config = training.Run(name, 0, level).config(ask(*given))
        return training.estimate(config, architecture(sizes))

    off, again, o2 = map(estimate, ("off", "again", "O2"))
    assert off.parameters == sum(p.numel() for p in GPT(sizes).parameters())
    assert o2.peak < off.peak
    assert off.parts["weights"] == 4 * off.parameters
    assert again.parts["activations"] == pytest.approx(off.parts["activations"] / 2, rel=0.01)
    assert estimate("O2", "--flag", "checkpointing=true").peak < o2.peak
    assert estimate("off", "--flag", "fuse=true").peak == off.peak, "flags are of levels"
    assert estimate("O2", "--flag", "fuse=true").peak == o2.peak, "sampled steps fuse nothing"
    assert estimate("O2", "--flag", "attention=math") is None


def test_runs_of_other_settings_have_other_folders():
    settings = ([], ["--lr", "1e-4"], ["--warmup", "5"], ["--flag", "fuse=true"])
    settings += (
        ["--flag", "fuse=false"],
        ["--flag", "fp8-recipe=delayed", "--flag", "fp8_margin=1"],
        ["--compute", "te"],
    )
    plain, ours = set(), []
    for given in settings:
        options = ask(*given)
        for run in training.all_runs(options):
            (ours.append if run.level == "O2" else plain.add)(run.folder(options).name)
    assert len(set(ours)) == len(settings)
    assert "gpt2-seed0-fp8-recipe-delayed-fp8-margin-1-fp8-o2" in ours
    bases = [
        f"gpt2-seed0{s}{tag}-bf16" for s in ("", "-lr0.0001", "-warmup5") for tag in ("", "-again")
    ]
    assert {name for name in plain if name.endswith("-bf16")} == set(bases)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--flag", "fuse"], "'fuse' must be fuse=true or fuse=false"),
        (["--flag", "fuse=1"], "'fuse=1' must be fuse=true or fuse=false"),
        (["--flag", "fp8-recipe"], "'fp8-recipe' must be NAME=VALUE"),
        (["--flag", "fp8-recipe=delay"], "--fp8-recipe: got 'delay', must be one of"),
        (["--flag", "fp8-margins=1"], "there is no option '--fp8-margins'"),
        (["--flag", "max_lr=1"], "--flag max-lr: this is the same in all runs, or has an option here"),
        (["--flag", "config=a.yaml"], "--flag config: "),
        (["--flag", "fuse=true", "--compute", "te"], "--fuse joins casts to native FP8 layers"),
        (["--lr", "0"], "--max-lr: got 0.0, must be a number above 0"),
        (["--warmup", "-1"], "--warmup-steps: got -1, must be a whole number of 0 or more"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_said_before_any_run_starts(given, said, capsys):
    with pytest.raises(SystemExit) as ended:
        ask(*given)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_gpus_are_those_that_are_visible(tmp_path, monkeypatch, capsys):
    def ask_for(*gpus, device="cuda"):
        return ask("--runs", str(tmp_path), "--device", device, "--compute", "te", "--gpus", *gpus)

    for visible, expected in ((None, "1"), ("4, GPU-7", "GPU-7")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert training.environment(*ask_for("1").gpus, "cuda")["CUDA_VISIBLE_DEVICES"] == expected
    assert ask_for("0", "2", device="cpu").gpus == [0, 2]
    with pytest.raises(SystemExit):
        ask_for("0", "2")
    assert (
        "--gpus 0 2: numbers count from 0, and CUDA_VISIBLE_DEVICES has 2"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        ask_for("-1")
    folders = [training.Run("tiny", 0, level).folder(ask_for("0")).name for level in ("off", "O2")]
    assert folders == ["tiny-seed0-bf16", "tiny-seed0-te-fp8-o2"]


def record(variant, seed, value, peak, model="gpt2", **params):
    numbers = {"tokens_per_second": 10.0 * peak, "peak_gib": peak, "estimate_gib": 1.1 * peak}
    params = {"model": model, "seed": seed, "steps": 5, **params}
    compute = None if variant.startswith("bf16") else "native"
    return {"variant": variant, "params": params, "value": value, "compute": compute, **numbers}


def show(records, capsys):
    """Return the rows of what is printed, by level, as words."""
    training.report(records, training.Console(width=120))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


def test_gaps_are_paired_by_seed(capsys):
    base = [record("bf16", 0, 2.0, 4), record("bf16", 1, 4.0, 4)]
    ours = [record("O2", 0, 2.2, 2), record("O2", 1, 4.0, 2)]
    rest = ["20", "0.50", "2.00", "0.50", "2.20", "+10.0%"]
    both = show([*base, *ours], capsys)
    assert both["O2"] == ["3.1000", "+5.00%", "±", "5.00%", *rest]
    assert both["bf16"] == ["3.0000", "-", "40", "1.00", "4.00", "1.00", "4.40", "+10.0%"]
    assert show([*base, *ours[:1]], capsys)["O2"] == ["2.2000", "+10.00%", *rest], "one seed"
    without = ["3.1000", "-", "20", "-", "2.00", "-", "2.20", "+10.0%"]
    assert show(ours, capsys)["O2"] == without


def test_speed_and_memory_of_again_are_not_compared(capsys):
    records = [record("bf16", 0, 2.0, 4), record("bf16 again", 0, 2.01, 2)]
    again = show(records, capsys)["bf16"]  # the later of two lines that begin with it
    assert again == ["again", "2.0100", "+0.50%", "20", "-", "2.00", "-", "2.20", "+10.0%"]


# --- tables


def runs_of(model, seeds, **params):
    """Return records of all levels: O0 2 % off, O1 and O2 further with each seed."""
    values = {"bf16": 2.0, "O0": 2.04, "O1": 2.06, "O2": 1.98}
    return [
        record(v, s, x + 0.02 * s * (v in ("O1", "O2")), 4 if v == "bf16" else 3, model, **params)
        for v, x in values.items()
        for s in seeds
    ]


def test_the_table_of_long_runs():
    gpt2 = runs_of("gpt2", (0, 1, 2), lr=1e-3)
    again = [record("bf16 again", s, 2.0 + 0.02 * s, 2, lr=1e-3) for s in (0, 1)]
    harder = [
        r
        for data in ("python-tts", "python-17m")
        for r in runs_of("gpt2", (0,), lr=6e-4, data=data)
        if r["variant"] in ("bf16", "O2")
    ]
    llama = runs_of("llama-1b", (0,))
    text = [r for r in runs_of("llama-1b", (0,), data="python-16m") if r["variant"] != "O0"]
    table = training_tables.training([*harder, *again, *gpt2, *llama, *text])
    rows = {row[0]: row[1:] for row in ([c.strip() for c in r.split("|")[1:-1]] for r in table[2:])}
    names = [f"GPT-2 124M, {v}" for v in ("bf16", "bf16 again", "O0", "O1", "O2")]
    harder = "GPT-2 124M at 6e-4", "GPT-2 124M at 6e-4 on another text"
    names += [f"{title}, {v}" for title in harder for v in ("bf16", "O2")]
    names += [f"Llama 1B, {v}" for v in ("bf16", "O0", "O1", "O2")]
    names += [f"Llama 1B on another text, {v}" for v in ("bf16", "O1", "O2")]
    assert list(rows) == names
    rest = ["30", "0.75", "3.00", "0.75", "+10.0 %"]
    assert rows["GPT-2 124M at 6e-4, O2"] == ["1.9800", "−1.00 %", "1", *rest]
    assert rows["GPT-2 124M, bf16"] == ["2.0000", "", "3", "40", "1.00", "4.00", "1.00", "+10.0 %"]
    noise = ["2.0100", "+0.50 ± 0.50 %", "2", "20", "", "2.00", "", "+10.0 %"]
    assert rows["GPT-2 124M, bf16 again"] == noise
    assert rows["GPT-2 124M, O0"] == ["2.0400", "+2.00 ± 0.00 %", "3", *rest]
    assert rows["GPT-2 124M, O1"] == ["2.0800", "+4.00 ± 0.58 %", "3", *rest]
    assert rows["Llama 1B, O2"] == ["1.9800", "−1.00 %", "1", *rest]


def test_runs_with_flags_or_another_library_have_rows_of_their_own():
    flags = {"fp8-recipe": "delayed", "fuse": True}
    others = [
        record("O2", 0, 2.02, 3, flags=flags),
        record("O2", 0, 9.0, 3, flags={"fuse": True}),  # of no row
        {**record("O0", 0, 2.1, 3), "compute": "te"},
    ]
    table = training_tables.training([*runs_of("gpt2", (0,)), *others])
    rows = {row[0]: row[1:] for row in ([c.strip() for c in r.split("|")[1:-1]] for r in table[2:])}
    plain = [f"GPT-2 124M, {v}" for v in ("bf16", "O0", "O1", "O2")]
    names = [*plain, "GPT-2 124M, O2, fused, delayed", "GPT-2 124M, O0, TransformerEngine"]
    assert list(rows) == names
    assert [rows[n][:2] for n in names[-2:]] == [["2.0200", "+1.00 %"], ["2.1000", "+5.00 %"]]


def test_long_runs_are_compared_where_settings_are_those_of_the_last_bf16_run():
    old, new = runs_of("gpt2", (0, 1), lr=1e-3), runs_of("gpt2", (0,), lr=1e-4, warmup=500)
    flagged = record("O2", 0, 9.0, 3, lr=1e-4, warmup=500, flags={"fuse": True})
    repeated = record("O2", 0, 1.9, 3, lr=1e-4, warmup=500)
    others = [{**repeated, "compute": "te", "value": 9.0}, record("O2", 0, 9.0, 3, "tiny"), flagged]
    found = training_tables.comparable_runs([*new[:-1], *old, *new, repeated, *others], "gpt2")
    assert sorted((r["variant"], r["value"]) for r in found) == [
        ("O0", 2.04), ("O0", 2.04), ("O1", 2.06), ("O1", 2.06), ("O2", 1.9), ("O2", 1.98), ("bf16", 2.0), ("bf16", 2.0),
    ]  # fmt: skip
    assert training_tables.comparable_runs([*new[1:], flagged], "gpt2") == []


def test_runs_that_are_the_same_are_shown_as_repeats():
    same = {"compute": None, "git": "a", "gpu": "x"}
    params = {"model": "gpt2", "lr": 1e-3, "data": "d", "seed": 1}
    runs = [{"variant": "bf16", "value": v, "params": params, **same} for v in (1.0, 1.02, 1.04)]
    others = [
        {**runs[0], "git": "b"},
        {**runs[0], "variant": "O2", "compute": "native"},
        {**runs[0], "params": {**params, "seed": 2}},
    ]
    *_, row = found = training_tables.repeats([*others, *runs])
    assert len(found) == 3  # heads, rule, and one row
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["GPT-2 124M, bf16, seed 1", "1.0000, 1.0200, 1.0400", "3.92 %", "1.96 %"]


def test_bf16_is_shown_with_the_seeds_that_levels_have():
    runs = [record("bf16", 0, 2.0, 4), record("bf16", 1, 9.0, 4), record("O2", 0, 2.02, 2)]
    found = [line.split("|")[1:5] for line in training_tables.training(runs)[2:]]
    found = [[cell.strip() for cell in row] for row in found]
    assert found == [
        ["GPT-2 124M, bf16", "2.0000", "", "1"],
        ["GPT-2 124M, O2", "2.0200", "+1.00 %", "1"],
    ]


def test_a_seed_that_ran_more_than_once_counts_with_its_mean():
    base = [record("bf16", 0, x, 4) for x in (1.9, 2.1)] + [record("bf16", 1, 4.0, 4)]
    ours = [record("O2", 0, x, 2) for x in (2.0, 2.1, 2.2)] + [record("O2", 1, 4.4, 2)]
    other = {**record("O2", 1, 4.4, 1), "git": "b"}  # no run of bf16 to compare its speed with
    bf16, o2 = training_tables.summarize([*base, *ours, other])
    assert (bf16.seeds, bf16.runs, o2.seeds, o2.runs) == (2, 3, 2, 5)
    assert (bf16.loss, o2.loss) == pytest.approx((3.0, 3.25))
    assert (o2.gap, o2.error) == pytest.approx((0.075, 0.025))
    assert o2.faster == pytest.approx(0.5)
    assert o2.estimate == 1.1, "the last run's"
    assert training_tables.training_cells(o2)[:3] == ("3.2500", "+7.50 ± 2.50 %", "2 (5 runs)")


def test_losses_are_drawn_at_the_steps_that_runs_share():
    rows = [record(v, s, 1.0, 1) for v in ("bf16", "bf16 again", "O2") for s in (0, 1)]
    for r in rows:
        often = r["variant"] == "bf16"
        worse = {"bf16": 1.0, "bf16 again": 1.01, "O2": 1.05}[r["variant"]]
        r |= {"unit": "nats/token"}
        r["validation"] = [
            [step, worse * 100 / step]
            for step in range(50 if often else 100, 301, 50 if often else 100)
        ]
    figure = Figure()
    report_pictures.draw_losses(figure, rows[:-1])
    above, below = figure.axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in above.lines}
    assert list(drawn) == ["bf16", "bf16 again", "O2"]
    assert drawn["O2"] == [[step, pytest.approx(105 / step)] for step in (100, 200, 300)]
    off = [line.get_xydata().tolist() for line in below.lines]
    assert off[-1] == [[step, pytest.approx(5)] for step in (100, 200, 300)]
    assert below.get_ylim()[1] > 5, "it is to be seen"


def test_a_seed_that_ran_more_than_once_is_drawn_as_its_mean():
    rows = [record("bf16", 0, 2.0, 1), *(record("O2", 0, x, 1) for x in (2.1, 2.3))]
    for r in rows:
        r |= {"unit": "nats/token", "validation": [[100, 2 * r["value"]], [200, r["value"]]]}
    figure = Figure()
    report_pictures.draw_losses(figure, rows)
    above, below = figure.axes
    assert above.lines[-1].get_xydata().tolist() == [
        [100, pytest.approx(4.4)],
        [200, pytest.approx(2.2)],
    ]
    *_, off = [line.get_xydata().tolist() for line in below.lines]
    assert off == [[100, pytest.approx(10)], [200, pytest.approx(10)]]


def test_what_is_said_of_attention_is_in_its_records():
    found = {(r["variant"], r["params"]["model"]): r for r in record_tables.read("attention")}
    assert len({(r["git"], r["command"], r["gpu"]) for r in found.values()}) == 1, "one run"

    def times(variant, over="sdpa, its choice"):
        pairs = [(found.get((variant, m)), found[over, m]) for m in training_tables.HEADS]
        return [r["value"] / base["value"] for r, base in pairs if r]

    said = " ".join((training.ROOT / "docs" / "training.md").read_text().split())
    fastest = [
        min(r["value"] for (_, m), r in found.items() if m == model)
        for model in training_tables.HEADS
    ]
    chosen = [found["sdpa, its choice", model]["value"] for model in training_tables.HEADS]
    worst = max(ours / best for ours, best in zip(chosen, fastest, strict=True)) - 1
    assert f"within {100 * worst:.1f} % of the fastest" in said
    for model in training_tables.HEADS:  # it is cuDNN's kernel: the same bits and bytes
        ours, theirs = found["sdpa, its choice", model], found["sdpa cudnn", model]
        assert (ours["off"], ours["peak_gib"]) == (theirs["off"], theirs["peak_gib"])
    flash, plain, te = times("sdpa flash"), times("plain"), times("TransformerEngine")
    assert f"FlashAttention takes {min(flash):.1f} to {max(flash):.1f} times as long" in said
    assert f"{min(plain):.0f} to {max(plain):.0f} times as long" in said
    assert f"{max(r['peak_gib'] for r in found.values()):.0f} GiB" in said
    math = times("sdpa math")
    assert f"`--attention math`, {min(math):.0f} to {max(math):.0f} times" in said
    assert (
        f"TransformerEngine's is level with it on Llama's heads and takes {te[0]:.1f} times as long"
        in said
    )
    assert max(abs(x - 1) for x in te[1:]) < 0.01


def test_a_table_of_attention_needs_its_records(monkeypatch):
    rows = [r for r in record_tables.read("attention") if r["variant"] != "sdpa cudnn"]
    monkeypatch.setattr(training_tables, "read", lambda name: rows)
    with pytest.raises(KeyError, match="sdpa cudnn"):
        training_tables.attention()


def test_what_is_said_of_a_monitor_s_cost_is_in_its_record():
    page = (training.ROOT / "docs" / "monitoring.md").read_text()
    records = record_tables.read("monitor_cost")
    assert {r["params"]["model"] for r in records} == {"gpt2", "llama-1b"}
    for r in records:
        times = f"a step that is sampled {r['sampled_ms']:.0f} ms instead of {r['plain_ms']:.0f}"
        said = f"`every=100` takes {100 * r['value']:.2f} % of the time of steps, and {times}"
        assert said in " ".join(page.split())
