"""The stress benchmark on a CPU: our formats stay within bounds, and an optimizer that does not is found out."""

import gc
import json
import sys
from types import SimpleNamespace

import optimizer_stress
import pytest
import torch
from optimizer_stress import CASES, VARIANTS, Variant, gradients, main, measure, parse

SMALL = ("--device", "cpu", "--size", "64", "--steps", "40")
# bytes of state
BOUNDED = {"8bit": 2.125, "fp8": 2.125, "4bit": 1.625, "fp8-lm": 3, "bf16": 4, "fp32": 8}
CASE = {case.name: case for case in CASES}
VARIANT = {variant.name: variant for variant in VARIANTS}


class Flushing(torch.optim.AdamW):
    """v below 2^-16 of its row's largest is lost, as in 8 bits of sqrt(v) with a zero."""

    @torch.no_grad()
    def step(self):
        super().step()
        for state in self.state.values():
            v = state["exp_avg_sq"]
            v[v < v.amax(-1, keepdim=True) * 2**-16] = 0


class Dividing(torch.optim.AdamW):
    """The scale of m is its largest magnitude, by which it divides even where that is zero."""

    @torch.no_grad()
    def step(self):
        super().step()
        for state in self.state.values():
            scale = state["exp_avg"].abs().max()
            state["exp_avg"].div_(scale).mul_(scale)


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """Spare the collection after every run the objects that exist already: torch's alone take 0.2 s."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def broken(monkeypatch):
    """A library of optimizers that fail, listed as if they were ours."""
    library = SimpleNamespace(Flushing=Flushing, Dividing=Dividing, __version__="1")
    monkeypatch.setitem(sys.modules, "broken", library)
    variants = [Variant(f"fp8stack {k}", "broken", k) for k in ("Flushing", "Dividing")]
    monkeypatch.setattr(optimizer_stress, "VARIANTS", variants)
    return dict(zip(("Flushing", "Dividing"), variants, strict=True))


def run(tmp_path, *arguments):
    path = tmp_path / "stress.jsonl"
    code = main([*SMALL, "--out", str(path), *arguments])
    lines = path.read_text().splitlines() if path.exists() else []

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return code, [json.loads(line, parse_constant=refuse) for line in lines]


def test_our_formats_explode_on_no_case(tmp_path, capsys):
    code, records = run(tmp_path, "--only", *(f"fp8stack {states}" for states in BOUNDED))
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, verdict) == (0, {"ok": True, "explode": {}, "not_measured": {}})
    found = {(r["variant"], r["params"]["case"]): r for r in records}
    assert len(found) == len(records) == len(BOUNDED) * len(CASES)
    for (variant, case), record in found.items():
        extra = record["extra"]
        assert extra["finite"], (variant, case)
        assert not extra["explodes"], (variant, case)
        assert extra["max_update"] < 4 * extra["max_reference"], (variant, case)
        # low-precision states are what was measured, with one scale for the 64 elements of a row
        assert extra["state_bytes"] == pytest.approx(BOUNDED[variant.split()[1]], abs=0.01)


def test_our_formats_do_not_see_the_scale_of_gradients():
    options, names = parse(SMALL), ("1e-6", "1e-7", "1e-12")
    errors = [measure(VARIANT["fp8stack 8bit"], CASE[n], options, 0)["update_error"] for n in names]
    assert max(errors) < 0.06
    assert max(errors) == pytest.approx(min(errors), rel=0.01)


def test_reference_against_itself_has_no_error():
    numbers = measure(VARIANT["torch fp32"], CASE["sparse"], parse(SMALL), 0)
    assert numbers["update_error"] < 1e-5
    assert numbers["share_doubled"] == 0
    assert numbers["max_ratio"] == pytest.approx(1, abs=1e-4)
    assert numbers["max_update"] == pytest.approx(numbers["max_reference"])


def test_a_v_that_flushes_to_zero_is_found(broken):
    options = parse(SMALL)
    narrow, wide = (measure(broken["Flushing"], CASE[n], options, 0) for n in ("narrow", "wide"))
    assert wide["explodes"]
    assert wide["finite"]
    assert wide["max_ratio"] > 100
    assert wide["share_doubled"] > 0
    assert not narrow["explodes"]


def test_a_weight_that_is_not_finite_is_found(broken, tmp_path):
    options = parse(SMALL)
    assert not measure(broken["Dividing"], CASE["zero"], options, 0)["explodes"]
    code, (record,) = run(tmp_path, "--only", "*Dividing", "--cases", "zero first")
    assert code == 1
    assert (record["value"], record["extra"]["max_update"]) == (None, None)
    assert (record["extra"]["finite"], record["extra"]["explodes"]) == (False, True)


def test_status_and_last_line_tell_of_ours_that_explode(broken, tmp_path, capsys):
    code, records = run(tmp_path, "--cases", "wide", "narrow", "--only", "*Flushing")
    assert code == 1
    assert [r["params"]["case"] for r in records] == ["narrow", "wide"]
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert verdict == {"ok": False, "explode": {"fp8stack Flushing": ["wide"]}, "not_measured": {}}


def test_bitsandbytes_is_measured_with_its_8_bit_states():
    pytest.importorskip("bitsandbytes")
    numbers = measure(VARIANT["bitsandbytes 8bit"], CASE["wide"], parse(SMALL), 0)
    assert 2 < numbers["state_bytes"] < 3  # its tables count, 2 KiB beside 4096 elements
    assert numbers["update_error"] > 0.01


def test_a_peer_that_is_missing_is_a_note(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashoptim", None)
    code, records = run(tmp_path, "--only", "flashoptim*", "--cases", "wide", "silent")
    printed = capsys.readouterr().out
    assert (code, records) == (0, [])
    assert "flashoptim 8bit: not installed (flashoptim" in printed
    assert json.loads(printed.splitlines()[-1])["not_measured"] == {
        "flashoptim 8bit": ["wide", "silent"]
    }


def test_gradients_repeat_and_are_what_their_case_says():
    options = parse(SMALL)
    first, second = (list(gradients(CASE["sparse"], options, 3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    absent = torch.stack(first).abs().amax(-1) == 0  # [steps, rows]
    assert 0.5 < absent.float().mean() < 0.9
    zero = [not g.any() for g in gradients(CASE["zero"], options, 0)]
    assert zero == [20 <= step < 30 for step in range(40)]
    assert [not g.any() for g in gradients(CASE["zero first"], options, 0)] == [True] + [False] * 39
    silent = list(gradients(CASE["silent"], options, 0))
    assert silent[19][:, ::3].all()
    assert not silent[25][:, ::3].any()
    assert 0 < silent[35][:, ::3].abs().mean() < 1e-5 * silent[35][:, 1::3].abs().mean()
    tiny = next(gradients(CASE["1e-12"], options, 0))
    torch.testing.assert_close(tiny * 1e12, next(gradients(CASE["zero"], options, 0)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cases", "mild"), "['mild'] matches none of: narrow, mid, wide"),
        (("--only", "apex*"), "['apex*'] matches none of: fp8stack 8bit"),
        (("--size", "32"), "--size 32: must be at least 64"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
