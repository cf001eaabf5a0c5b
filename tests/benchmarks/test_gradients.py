"""benchmarks/gradients.py on a CPU: what is measured, what is recorded, and what is named where it cannot run."""

import json

import gradients
import pytest
import record_tables
import report
import torch
import training_tables
from gpt.model import GPT

from fp8stack.levels import recipe_for

TINY = ["--device", "cpu", "--model", "tiny"]


def test_bf16_is_nearer_than_fp8_before_and_in_training(tmp_path):
    output = tmp_path / "gradients.jsonl"
    chosen = ["bf16", "native current", "native delayed", "native blockwise"]
    assert gradients.main([*TINY, "--steps", "5", "--output", str(output), "--only", *chosen]) == 0
    moments = {}
    for r in map(json.loads, output.read_text().splitlines()):
        moments.setdefault(r["params"]["after"], {})[r["variant"]] = r
        assert (r["name"], r["metric"], r["params"]["vocab"]) == ("gradients", "off", 320)
        assert r["value"] == r["off"]
        assert r["least_cosine"] <= r["cosine"] < 1
        assert r["least_in"].endswith("weight")
        assert r["along"] == pytest.approx(1, abs=0.1)
        assert r["norm"] == pytest.approx(1, abs=0.1)
        assert abs(r["loss_gap"]) < 0.01
    losses = []
    for found in moments.values():
        assert list(found) == chosen
        bf16 = found.pop("bf16")
        assert 0 < bf16["off"] < 0.01
        for r in found.values():
            assert 4 * bf16["off"] < r["off"] < 0.15
            assert r["least_cosine"] < bf16["least_cosine"]
            assert r["float32_loss"] == bf16["float32_loss"]
        losses.append(bf16["float32_loss"])
    assert list(moments) == [0, 5]
    assert losses[1] < losses[0]


def test_numbers_of_known_gradients():
    exact = 2.0, {"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([[1.0, 0.0]])}
    same = gradients.compare(exact, exact)
    assert (same["off"], same["cosine"], same["along"], same["norm"]) == (0, 1, 1, 1)
    assert same["loss_gap"] == 0
    found = 2.1, {"a": 1.5 * exact[1]["a"], "b": torch.tensor([[1.0, 1.0]])}
    n = gradients.compare(found, exact)
    assert n["off"] == pytest.approx((0.5 + 1) / 2)
    assert n["least_cosine"] == pytest.approx(0.5**0.5)
    assert n["least_in"] == "b"
    assert n["cosine"] == pytest.approx((1 + 0.5**0.5) / 2)
    assert n["along"] == pytest.approx((1.5 + 1) / 2)
    assert n["norm"] == pytest.approx(((7.5**2 + 2) / (5**2 + 1)) ** 0.5)
    assert n["loss_gap"] == pytest.approx(0.05)


def test_sequences_one_at_a_time_have_the_gradient_of_the_batch():
    config = gradients.MODELS["tiny"].config
    model = GPT(config)
    tokens = torch.randint(config.vocab, (3, 17))
    batch = tokens[:, :-1], tokens[:, 1:]
    exact = gradients.differentiate(model, batch, exact=True)
    assert all(p.grad is None for p in model.parameters())
    loss = model(*batch)
    loss.backward()
    whole = {name: p.grad for name, p in model.named_parameters() if p.ndim > 1}
    n = gradients.compare((loss.item(), whole), exact)
    assert n["off"] < 1e-5
    assert abs(n["loss_gap"]) < 1e-6


def test_what_is_missing_is_named_and_others_go_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformer_engine", None)
    arguments = [*TINY, "--steps", "0", "--output", str(tmp_path / "records.jsonl"), "--only"]
    assert gradients.main([*arguments, "bf16", "te current"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1]) == {"failed": ["tiny after 0, te current"]}
    assert "tiny after 0, te current: UnsupportedDeviceError" in told.err
    (line,) = (tmp_path / "records.jsonl").read_text().splitlines()
    assert json.loads(line)["variant"] == "bf16"
    assert gradients.main([*arguments, "te current"]) == 1


def test_negative_steps_are_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        gradients.main([*TINY, "--steps", "-1"])
    assert stop.value.code == 2
    assert "--steps -1: must be at least 0" in capsys.readouterr().err


def test_variants_are_recipes_of_their_own():
    recipes = [recipe_for("O0", **(v.options or {})) for v in gradients.VARIANTS]
    assert len(set(recipes)) == len(recipes)
    assert [v.name for v in gradients.VARIANTS] == list(training_tables.GRADIENTS.values())


def test_the_table_and_the_picture_show_the_records(tmp_path, monkeypatch):
    made = {"along": 0.9876, "time": "now", "gpu": "", "torch": "", "git": "", "command": "python"}
    records = [
        {"variant": v.name, "value": i / 100, "params": {"model": model, "after": after}, **made}
        for model in ("gpt2", "llama-1b")
        for after in (0, training_tables.TRAINED)
        for i, v in enumerate(gradients.VARIANTS)
    ]
    (tmp_path / "gradients.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    page = report.make_page(tmp_path)
    assert [s.key for s in report.SECTIONS if f'alt="{s.title}"' in page] == ["gradients"]
    monkeypatch.setattr(record_tables, "RESULTS", tmp_path)
    rows = training_tables.gradients()[2:]
    assert len(rows) == len(gradients.VARIANTS)
    assert rows[0].startswith("| bf16 autocast | 0.0 % (0.988) |")
    assert rows[-1].count(f"{len(rows) - 1}.0 % (0.988)") == 4
