"""The loss check of FP8 on the wire on two gloo ranks: its records, its table, and runs that fail."""

import json

import pytest
import torch
import wire_parity
from convergence import MODELS
from ddp_step import BASE
from torch.nn.parallel import DistributedDataParallel
from wire_parity import VARIANTS, main

from fp8stack import comm

NAMES = [variant.name for variant in VARIANTS]
TEXT = "for x in range(10):\n    print(x)\n"
CPU = torch.device("cpu")


@pytest.fixture
def arguments(tmp_path):
    """Those of a few steps on little text."""
    (tmp_path / "loop.py").write_text(TEXT * 200)
    out = ("--data", str(tmp_path / "loop.py"), "--out", str(tmp_path / "runs.jsonl"))
    return ["--device", "cpu", "--model", "tiny", "--batch", "4", "--seeds", "0", *out]


@pytest.fixture
def records(tmp_path):
    """Read what was recorded."""
    path = tmp_path / "runs.jsonl"
    return lambda: [json.loads(line) for line in path.read_text().splitlines()]


def ranks_that(losses):
    """Return what stands for torch's spawn: ranks that end with these losses, or fail where there is none."""

    def spawn(work, given, nprocs):
        variant, seed, _, _, folder = given
        if (variant.name, seed) not in losses:
            raise torch.multiprocessing.ProcessRaisedException("Traceback\nOops: no", 1, 1)
        numbers = {"value": losses[variant.name, seed], "unit": "nats/byte"}
        wire_parity.numbers_in(folder).write_text(json.dumps(numbers))

    return spawn


@pytest.mark.slow
def test_two_ranks_train_alike_whatever_is_on_the_wire(arguments, records, capsys):
    only = (BASE, "DataParallel, error feedback")
    assert main([*arguments, "--steps", "12", "--jobs", "2", "--only", *only]) == 0
    runs = {r["variant"]: r for r in records()}
    assert set(runs) == set(only)
    base, ours = (runs[name] for name in only)
    shared = {"ranks": 2, "device": "cpu", "steps": 12, "batch": 4, "seed": 0}
    for row in (base, ours):
        assert (row["name"], row["metric"]) == ("wire_parity", "validation_loss")
        assert shared.items() <= row["params"].items()
        assert [step for step, _ in row["validation"]] == [2, 4, 6, 8, 10, 12]
        assert row["value"] == row["validation"][-1][1] < row["validation"][0][1]
        assert len(row["train_loss"]) == 12
        assert row["seconds"] > 0
    assert ours["train_loss"][0] == base["train_loss"][0]  # the same weights and windows
    assert ours["value"] == pytest.approx(base["value"], rel=0.005)
    assert ours["value"] != base["value"]
    printed = capsys.readouterr().out
    summary = json.loads(printed.splitlines()[-1])
    assert summary["ok"]
    difference = ours["value"] / base["value"] - 1
    assert summary["variants"][only[1]]["difference"] == pytest.approx(difference)
    assert f"{difference:+.3%}" in printed


def test_runs_that_fail_do_not_cost_the_others(arguments, records, capsys, monkeypatch):
    losses = {(BASE, 0): 1.0, ("hook", 0): 1.002, (BASE, 1): 2.0, ("DataParallel", 1): 2.002}
    monkeypatch.setattr(torch.multiprocessing, "spawn", ranks_that(losses))
    only = (BASE, "hook", "DataParallel")
    assert main([*arguments, "--seeds", "0", "1", "--only", *only]) == 1
    assert {(r["variant"], r["params"]["seed"]): r["value"] for r in records()} == losses
    said = capsys.readouterr()
    *_, last = said.out.splitlines()
    assert json.loads(last)["failed"] == {
        "hook, seed 1": "Oops: no",
        "DataParallel, seed 0": "Oops: no",
    }
    assert "Traceback" in said.err

    losses = {("hook", 1): 2.004}
    monkeypatch.setattr(torch.multiprocessing, "spawn", ranks_that(losses))
    assert main([*arguments, "--seeds", "1", "--only", "hook"]) == 0  # with what was recorded
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["variants"]["hook"]
    assert row["differences"] == pytest.approx({"0": 0.002, "1": 0.002})
    assert main([*arguments, "--seeds", "--steps", "7"]) == 0  # of which there are none
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["variants"] == {}


def test_what_cannot_be_paired_is_left_out_and_what_is_far_fails(arguments, capsys, monkeypatch):
    losses = {(BASE, 0): 1.0, ("hook", 0): 1.006, ("hook", 1): 9.0}
    monkeypatch.setattr(torch.multiprocessing, "spawn", ranks_that(losses))
    main([*arguments, "--seeds", "1", "--only", "hook"])
    assert main([*arguments, "--only", BASE, "hook"]) == 1
    printed = capsys.readouterr().out
    assert f"hook: seeds [1] are left out, which {BASE} has no record of" in printed
    summary = json.loads(printed.splitlines()[-1])
    assert (summary["ok"], summary["failed"]) == (False, {})
    assert summary["variants"]["hook"]["mean"] == 1.006


def test_jobs_have_gpus_of_their_own(arguments, monkeypatch):
    options = wire_parity.parse([*arguments, "--jobs", "2", "--seeds", "0", "1", "2"])
    busy, seen = set(), []

    def spawn(work, given, nprocs):
        first = given[3]
        assert first not in busy
        busy.add(first)
        seen.append(first)
        busy.remove(first)
        ranks_that({(given[0].name, given[1]): 1.0})(work, given, nprocs)

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    assert wire_parity.run_all(options, {}) == {}
    assert len(seen) == 15
    assert set(seen) == {0, 2}


def test_parts_of_a_batch_are_the_batch(monkeypatch):
    batch = torch.randn(12, 5), torch.randn(12, 5)
    for world in (2, 3, 4):
        monkeypatch.setattr(wire_parity.dist, "get_world_size", lambda world=world: world)
        parts = []
        for rank in range(world):
            monkeypatch.setattr(wire_parity.dist, "get_rank", lambda rank=rank: rank)
            parts.append(wire_parity.own_part(batch))
        for half, given in zip(zip(*parts, strict=True), batch, strict=True):
            assert torch.equal(torch.cat(half), given)


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_every_variant_trains_bfloat16_weights(variant, arguments):
    model = wire_parity.make_model(MODELS["tiny"], 0, CPU)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    kind = comm.DataParallel if variant.kind == "parallel" else DistributedDataParallel
    assert isinstance(wire_parity.wrap(variant, model), kind)
    options = wire_parity.parse([*arguments, "--batch", "2", "--steps", "60", "--lr", "3e-3"])
    numbers = wire_parity.train(variant, 0, options, CPU)
    assert len(numbers["train_loss"]) == 30
    assert numbers["steps_per_train_loss"] == 2
    assert numbers["value"] < 0.7 * numbers["validation"][0][1]


@pytest.mark.usefixtures("mesh")
def test_runs_that_diverge_say_so(arguments, monkeypatch):
    options = wire_parity.parse([*arguments, "--steps", "6", "--lr", "1e30"])
    with pytest.raises(RuntimeError, match="1 of 2 steps were skipped"):
        wire_parity.train(VARIANTS[0], 0, options, CPU)
    monkeypatch.setattr(wire_parity, "evaluate", lambda *_: float("nan"))
    with pytest.raises(RuntimeError, match="the validation loss is nan after 1 steps"):
        wire_parity.train(VARIANTS[0], 0, options, CPU)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--only", "fsdp*"), "--only matches none of: ddp bf16; hook"),
        (("--ranks", "1"), "--ranks 1: must be at least 2"),
        (("--batch", "5"), "--batch 5: must be a multiple of the 2 ranks"),
        (("--device", "cuda", "--ranks", "64"), "--device cpu|need 64 GPUs"),
    ],
)
def test_bad_options_are_refused(given, message, arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*arguments, *given, *(("--batch", "64") if "64" in given else ())])
    assert stop.value.code == 2
    assert any(part in capsys.readouterr().err for part in message.split("|"))


def test_names_are_unique_and_stock_ddp_comes_first():
    assert len(set(NAMES)) == len(NAMES)
    assert NAMES[0] == BASE
