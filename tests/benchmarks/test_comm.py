"""The benchmark of collectives on two gloo ranks: its records, its tables, its picture and what it refuses."""

import contextlib
import io
import json

import comm
import pytest
from comm import list_variants, main, size_of
from comm_tables import name_size

CPU = ("--device", "cpu", "--gpus", "2")
ONLY = ("gloo*", "collective *", "nvlink fp8", "torch *")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The path of the records, and what was printed."""
    path, printed = tmp_path_factory.mktemp("benchmark") / "comm.jsonl", io.StringIO()
    sizes = ("--sizes", "1000", "64K", "--seconds", "0.01")
    with contextlib.redirect_stdout(printed):
        assert main([*CPU, *sizes, "--output", str(path), "--only", *ONLY]) == 0
    return path, printed.getvalue()


@pytest.fixture(scope="module")
def records(run):
    rows = map(json.loads, run[0].read_text().splitlines())
    return {(r["variant"], r["params"]["size"]): r for r in rows}


def test_records_follow_the_schema(records):
    row = records["collective fp32", 2**16]
    assert (row["name"], row["metric"], row["unit"]) == ("comm", "milliseconds", "ms")
    params = {
        "size": 2**16,
        "ranks": 2,
        "elements": 2**15,
        "collective": "all_reduce",
        "graphs": False,
    }
    assert row["params"] == params
    assert 5 <= row["iterations"] <= 100
    assert row["backend"] == "gloo"
    for dtype, key in (("bf16", "speedup"), ("fp32", "speedup_fp32")):
        base = records[f"gloo {dtype}", 2**16]["value"]
        assert row[key] == pytest.approx(base / row["value"])
    assert "speedup_fp32" not in records["collective bf16", 2**16]
    assert records["device copy", 2**24]["metric"] == "device_copy_gb_s"
    assert len({r["time"] for r in records.values()}) == 1


def test_bandwidths_are_of_bfloat16_bytes(records):
    for name, factor in (("all_reduce", 1.0), ("reduce_scatter", 0.5), ("all_gather", 0.5)):
        row = records[f"collective {name} bf16".replace("all_reduce ", ""), 2**16]
        assert row["algbw_gb_s"] == pytest.approx(2**16 / row["value"] / 1e6)
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * factor)


def test_sizes_are_filled_up_to_whole_blocks_of_every_rank(records):
    row = records["collective bf16", 1000]
    assert row["params"]["elements"] == 512
    assert row["algbw_gb_s"] == pytest.approx(1024 / row["value"] / 1e6)


def test_sums_of_ours_are_near_and_the_same_everywhere(records):
    for dtype in ("bf16", "fp32", "fp8"):
        row = records[f"collective {dtype}", 2**16]
        assert 26 < row["snr_db"] < 35
        assert row["differing_bytes"] == 0
    row = records["collective reduce_scatter fp32", 2**16]
    assert row["snr_db"] > 30
    assert "differing_bytes" not in row  # ranks have other parts
    assert "snr_db" not in records["collective all_gather bf16", 2**16]


def test_tables_have_a_row_a_variant_and_reasons_for_the_others(run):
    tables, (*_, last) = run[1], run[1].splitlines()
    for name in ("all_reduce", "reduce_scatter", "all_gather", "gloo fp32", "1000 B", "64 KiB"):
        assert name in tables
    assert tables.count("nvlink fp8: CommError: ") == 1  # once, not for each size
    assert "torch two-shot bf16: RuntimeError: " in tables
    assert "gloo e4m3: RuntimeError: " in tables
    summary = json.loads(last)
    assert summary.pop("ok")
    assert "nvlink fp8" not in summary
    assert set(summary["collective fp8"]) == {"1000 B", "64 KiB"}


def test_picture_shows_the_latest_run_only(run, tmp_path):
    picture, history = tmp_path / "comm.svg", tmp_path / "history.jsonl"
    text = run[0].read_text()
    old = json.loads(text.splitlines()[-1]) | {"variant": "old", "time": "1999"}
    history.write_text(json.dumps(old) + "\n" + text)
    assert main(["--plot", str(picture), "--output", str(history)]) == 0
    assert "collective fp8" in picture.read_text()
    assert ">old<" not in picture.read_text()
    history.write_text(text.splitlines()[0] + "\n")  # a copy
    with pytest.raises(SystemExit, match="holds no run with stock bf16"):
        main(["--plot", str(picture), "--output", str(history)])


@pytest.mark.parametrize("fault", ["bytes", "death"])
def test_ranks_that_differ_or_die_fail_the_run_and_keep_its_records(
    fault, records, tmp_path, capsys, monkeypatch
):
    cell = {**records["collective fp8", 2**16], "differing_bytes": 3 if fault == "bytes" else 0}

    def spawn(work, arguments, nprocs):
        with open(f"{arguments[1]}/cells", "w") as file:
            file.write(json.dumps(cell) + "\n")
        if fault == "death":
            raise comm.torch.multiprocessing.ProcessExitedException("rank 1 is gone", 1, 1, 9)

    monkeypatch.setattr(comm.torch.multiprocessing, "spawn", spawn)
    path = tmp_path / "x.jsonl"
    assert main([*CPU, "--output", str(path)]) == 1
    printed = capsys.readouterr().out
    said = {
        "bytes": "collective fp8, 65536 B: 3 bytes differ between ranks",
        "death": "rank 1 is gone",
    }
    assert said[fault] in printed
    assert json.loads(printed.splitlines()[-1])["ok"] is False
    assert len(path.read_text().splitlines()) == 1


def test_stock_variants_come_before_what_is_compared_with_them():
    known = list(list_variants("nccl"))
    assert len({v.name for v in known}) == len(known) == 18
    assert {"nccl e4m3", "nvlink fp8", "nvlink reduce_scatter fp32"} <= {v.name for v in known}
    for place, variant in enumerate(known):
        assert variant._replace(way="nccl", dtype="bf16") in known[: place + 1]


@pytest.mark.parametrize(
    ("text", "size", "name"),
    [("65536", 2**16, "64 KiB"), ("64KiB", 2**16, "64 KiB"), ("1g", 2**30, "1 GiB"), ("9B", 9, "9 B")],
)  # fmt: skip
def test_sizes_are_read_and_written(text, size, name):
    assert size_of(text) == size
    assert name_size(size) == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "huge"), "invalid size_of value: 'huge'"),
        (("--only", "apex*"), "--only matches none of: gloo bf16"),
        (("--gpus", "1"), "--gpus 1: must be 2 to 64 here"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--device", "cpu", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
