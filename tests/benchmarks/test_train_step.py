"""The benchmark of forward and backward on a CPU: its models, its configurations, its records and what it refuses."""

import json
import sys
from types import ModuleType

import models
import pytest
import torch
import train_step
from models import MODELS, make_model
from torch import nn
from train_step import VARIANTS, main

NAMES = [variant.name for variant in VARIANTS]
SIZES = ("--device", "cpu", "--model", "tiny", "--steps", "2")


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmark") / "steps.jsonl"
    only = ("--only", "bf16*", "native current", "native O1")
    assert main([*SIZES, "--output", str(path), *only]) == 0
    return path


def load(path):
    return {r["variant"]: r for r in map(json.loads, path.read_text().splitlines())}


@pytest.mark.parametrize(("name", "elements"), [("llama", 1_134_596_096), ("gpt2", 124_475_904)])
def test_models_have_the_size_of_the_real_ones(name, elements):
    config = MODELS[name]
    with torch.device("meta"):
        model = {"llama": models.Llama, "gpt2": models.GPT2}[config.kind](config)
    assert sum(p.numel() for p in model.parameters()) == elements


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2"])
def test_models_are_causal_and_the_same_at_every_call(name):
    (model, (tokens, targets)), (twin, batch) = (make_model(MODELS[name], "cpu") for _ in range(2))
    assert torch.equal(model(tokens, targets), twin(*batch))
    changed = tokens.clone()
    changed[:, -1] = (tokens[:, -1] + 1) % MODELS[name].vocab
    x, y = (embed_and_run(model, t) for t in (tokens, changed))
    assert torch.equal(x[:, :-1], y[:, :-1])
    assert not torch.equal(x[:, -1], y[:, -1])


def embed_and_run(model, tokens):
    """Return what the head of `model` gets."""
    seen = []
    handle = model.norm.register_forward_hook(lambda *call: seen.append(call[2]))
    model(tokens, tokens)
    handle.remove()
    return seen[0]


def test_records_follow_the_schema(records):
    rows = load(records)
    assert list(rows) == ["bf16 eager", "bf16 compile", "native current", "native O1"]
    row = rows["native current"]
    assert (row["name"], row["metric"], row["unit"]) == ("train_step", "step_ms", "ms")
    assert row["value"] > 0
    assert row["params"]["model"] == "tiny"
    assert row["params"]["compute"] == "native"
    assert row["params"]["library"].startswith("fp8stack ")
    assert rows["native O1"]["params"]["level"] == "O1"
    extra, eager = row["extra"], rows["bf16 eager"]
    assert extra["of_eager"] == pytest.approx(eager["value"] / row["value"])
    assert (extra["peak_gib"], extra["steps"]) == (None, 2)
    assert 0 < abs(extra["loss_off"]) < 0.01
    assert abs(extra["grad_off"]) < 0.05
    assert extra["copy_tb_s"] > 0
    assert extra["fp8_tflop_s"] > 0
    assert "fp8" in extra["card"]
    assert eager["extra"]["again_ms"] > 0  # bf16 is measured twice
    assert "again_ms" not in extra


def test_picture_shows_the_latest_run_only(records, tmp_path):
    picture, history = tmp_path / "steps.svg", tmp_path / "history.jsonl"
    old = json.loads(records.read_text().splitlines()[0]) | {"variant": "old", "time": "1999"}
    history.write_text(json.dumps(old) + "\n" + records.read_text())
    assert main(["--plot", str(picture), "--model", "tiny", "--output", str(history)]) == 0
    assert "native current" in picture.read_text()
    assert ">old<" not in picture.read_text()
    with pytest.raises(SystemExit, match="holds no run over gpt2"):
        main(["--plot", str(picture), "--model", "gpt2", "--output", str(history)])


def test_what_cannot_be_measured_has_its_reason_in_the_output(tmp_path, capsys, monkeypatch):
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(train_step.fp8stack.nn, "fuse", raising=False)
    only = ("--only", "te current*", "native fused")
    main([*SIZES, "--output", str(tmp_path / "x.jsonl"), *only])
    printed = capsys.readouterr().out
    assert "te current: not installed (transformer_engine" in printed
    assert "native fused: not available: fp8stack.nn has no fuse" in printed
    assert json.loads(printed.splitlines()[-1]) == {"tiny": {}}


def test_nothing_begins_after_the_limit(tmp_path, capsys):
    only = ("--only", "bf16 eager", "--limit", "0")
    main([*SIZES, "--output", str(tmp_path / "x.jsonl"), *only])
    assert "bf16 eager: not begun: --limit 0 seconds were over" in capsys.readouterr().out


def test_torchao_leaves_embedding_and_head_alone():
    pytest.importorskip("torchao")
    model, batch = make_model(MODELS["tiny"], "cpu")
    variant = VARIANTS[NAMES.index("torchao rowwise")]
    train_step.convert(model, variant, "cpu")
    assert type(model.head) is nn.Linear
    kinds = {type(m).__name__ for m in model.blocks.modules() if isinstance(m, nn.Linear)}
    assert kinds == {"Float8Linear"}
    assert model(*batch).isfinite()


class Normed(nn.Module):
    """te.LayerNormLinear and te.LayerNormMLP as TransformerEngine documents them, in plain torch."""

    def __init__(self, inner, outer, *, eps, bias, params_dtype, normalization, activation=None):
        super().__init__()
        self.eps, self.normalization, self.activation = eps, normalization, activation
        rows = outer * (2 if activation == "swiglu" else 1)
        shapes = {"layer_norm_weight": [inner]}
        if activation:
            shapes |= {"fc1_weight": [rows, inner], "fc2_weight": [inner, outer]}
            shapes |= {"fc1_bias": [rows], "fc2_bias": [inner]} if bias else {}
        else:
            shapes |= {"weight": [outer, inner], **({"bias": [outer]} if bias else {})}
        if normalization == "LayerNorm":
            shapes["layer_norm_bias"] = [inner]
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=params_dtype)))

    def forward(self, x):
        functional, of = nn.functional, dict(self.named_parameters())
        shift = [of["layer_norm_bias"]] if self.normalization == "LayerNorm" else []
        norm = functional.layer_norm if shift else functional.rms_norm
        x = norm(x, x.shape[-1:], self.layer_norm_weight, *shift, eps=self.eps)
        if self.activation is None:
            return functional.linear(x, self.weight, of.get("bias"))
        x = functional.linear(x, self.fc1_weight, of.get("fc1_bias"))
        if self.activation == "swiglu":
            first, second = x.chunk(2, dim=-1)
            x = functional.silu(first) * second
        else:
            x = functional.gelu(x, approximate="tanh")
        return functional.linear(x, self.fc2_weight, of.get("fc2_bias"))


class TELinear(nn.Linear):
    def __init__(self, inner, outer, *, bias, params_dtype):
        super().__init__(inner, outer, bias=bias, dtype=params_dtype)


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2"])
@pytest.mark.parametrize("swap", [models.swap_te, models.fuse_te])
def test_transformer_engine_gets_the_same_weights(name, swap):
    te = ModuleType("te")
    te.Linear, te.LayerNormLinear, te.LayerNormMLP = TELinear, Normed, Normed
    model, batch = make_model(MODELS[name], "cpu")
    for block in model.blocks:  # ones and zeros would not tell one from another
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.1)
    expected = model(*batch)
    swap(model, te)
    assert type(model.head) is nn.Linear
    assert all(type(m) is not nn.Linear for m in model.blocks.modules())
    assert torch.equal(model(*batch), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt5"), "--model gpt5: must be of llama"),
        (("--only", "apex*", "--device", "cpu"), "--only matches none of: bf16 eager"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_names_are_unique_and_bf16_comes_first():
    assert len(set(NAMES)) == len(NAMES)
    assert NAMES[:2] == [train_step.EAGER, train_step.COMPILED]
