"""`fp8stack plan`: it says what `initialize` then does, counts the same bytes, and allocates nothing."""

import json
import sys
import weakref

import pytest
import torch
from helpers import refused_in_a_line

import fp8stack
from fp8stack import capability
from fp8stack.__main__ import main
from fp8stack.cli import machine
from fp8stack.cli import plan as cli_plan
from fp8stack.memory import measure

MODELS = """
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

@dataclass
class Sizes:
    layers: int = 2

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

class Model(nn.Module):
    def __init__(self, width=64, words=96, layers=Sizes().layers):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.zeros(128, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.odd = nn.Linear(width, 3)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean() + self.odd(x).square().mean()

def build():
    return Model()

def with_sgd():
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def without_moments():
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def with_lbfgs():
    model = Model()
    return model, torch.optim.LBFGS(model.parameters())

def of_a_terabyte():
    return Model(width=65536, words=131072, layers=8)

def normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)))

def moved():
    return Model().to("cpu")

def lazy():
    return nn.LazyLinear(3)

class Looks(nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.sum().item()

def looks():
    return Looks(16, 16)

def batch():
    return torch.zeros(2, 16, dtype=torch.long)

def wide():
    return Model(2048, layers=1)

def large_batch():
    return torch.zeros(64, 128, dtype=torch.long)

def named():
    return {"tokens": batch()}

def listed_batch():
    return (batch(),)

def floats():
    return torch.zeros(2, 16)

def half():
    model = Model()
    model.odd.extra = nn.Linear(8, 8)
    return model

def need(width):
    return nn.Linear(width, 16)

def listed():
    return [build()]

def broken():
    raise KeyError("width")

def leaves():
    raise SystemExit(0)
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder to be in, with models.py, planned for the CPU; return the module."""
    monkeypatch.setattr(machine, "device", lambda: torch.device("cpu"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "models", raising=False)  # that of the benchmarks
    yield __import__("models")
    del sys.modules["models"]


def planned(capsys, *options):
    assert main(["plan", *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def trained(model, optimizer, level, **options):
    """Return the report of `initialize`, and the bytes by part of a model that is then trained for a step."""
    model, optimizer = fp8stack.initialize(model, optimizer, opt_level=level, **options)
    for last in (False, True):
        model(torch.arange(32).reshape(2, 16)).backward()
        optimizer.step()
        if not last:
            optimizer.zero_grad()
    return fp8stack.get_report(model), measure(model, optimizer).bytes


@pytest.mark.parametrize(
    ("function", "options", "level", "overrides"),
    [
        ("build", [], "O2", {}),
        ("build", ["--opt-level", "O0"], "O0", {}),
        ("build", ["--opt-level", "O1"], "O1", {}),
        ("build", ["--skip", "odd", "*.down"], "O2", {"skip": ["odd", "*.down"]}),
        ("build", ["--preset", "fp8-lm"], "O2", {"preset": "fp8-lm"}),
        ("build", ["--step-in-backward"], "O2", {"step_in_backward": True}),
        ("build", ["--states-for", "*up*=4bit,none"], "O2",
         {"states_for": {"*up*": {"states": "4bit", "master": "none"}}}),
        ("with_sgd", ["--min-numel", "20000"], "O2", {"min_numel": 20000}),
        ("without_moments", [], "O2", {}),
        ("build", ["--optimizer-backend", "bitsandbytes"], "O2", {"optimizer_backend": "bitsandbytes"}),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)  # fmt: skip
def test_the_plan_is_what_initialize_does(function, options, level, overrides, models, capsys):
    data = planned(capsys, f"models.py:{function}", *options)
    built = getattr(models, function)()
    if not isinstance(built, tuple):
        built = built, torch.optim.AdamW(built.parameters())
    report, use = trained(*built, level, **overrides)
    names = ("level", "gemm", "compute", "converted", "skipped", "stored", "kept")
    for name in (*names, "bytes_per_parameter"):
        assert data["report"][name] == json.loads(json.dumps(report.to_dict()[name])), name
    assert data["bytes"]["after"] == use
    numel = sum(p.numel() for p in built[0].parameters())
    assert data["parameters"] == numel
    moments = {"with_sgd": [1, 0], "without_moments": [0, 0]}.get(function, [1, 1])
    before = [data["bytes"]["before"][k] for k in ("weight", "grad", "m", "v")]
    assert before == [4 * numel * n for n in (1, 1, *moments)]
    if function == "without_moments":
        assert {matrix["states"] for matrix in data["matrices"]} == {"none"}


def test_the_table_has_matrices_reasons_and_bytes(models, capsys):
    assert main(["plan", "models.py:build", "--skip", "*.down"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    words = [" ".join(row) for row in rows]
    assert "blocks.*.up.weight 2 Linear 256×64 fp8 bfloat16 + split24 fp8 8bit" in words
    assert "blocks.*.down.weight 2 Linear 64×256 float32 float32 fp32" in words
    text = " ".join(words)
    assert 'blocks.0.down.weight and 1 more (matches skip="*.down")' in text
    assert "position (Model uses it directly" in text
    total = next(row for row in rows if row[:1] == ["bytes/parameter"])
    assert float(total[1]) == 16
    assert 6 < float(total[2]) < 12


def test_on_a_gpu_without_fp8_bitsandbytes_is_asked_about_that_gpu(models, capsys, monkeypatch):
    """The model is on the meta device, where bitsandbytes takes no step."""
    answer = capability.Answer(False, "cuda:0 is NVIDIA A100 (8.0)")
    monkeypatch.setattr(capability, "fp8_hardware", lambda device: answer)
    data = planned(capsys, "models.py:build")
    assert data["report"]["states"] == "bitsandbytes 8-bit block 256"
    assert "using bitsandbytes' optimizer instead" in " ".join(data["report"]["fallbacks"])


def test_layers_without_a_weight_of_their_own_have_their_reason_too(models, capsys):
    assert main(["plan", "models.py:normed"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ".original1 (its weight is computed (weight_norm, ...)" in text
    assert "parametrizations.weight.original" in text


def test_a_model_larger_than_any_machine_is_planned(models, capsys):
    data = planned(capsys, "models.py:of_a_terabyte")
    assert data["bytes"]["before"]["weight"] > 2**40
    assert len(data["report"]["converted"]) == 18
    assert data["bytes"]["after"]["weight"] < 0.51 * data["bytes"]["before"]["weight"]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_batch_measures_activations(level, models, capsys):
    """What is kept when forward is over is what autograd saves of a real model on a CPU."""
    before = planned(capsys, "models.py:build", "--opt-level", level)
    assert "passes" not in before
    data = planned(capsys, "models.py:build", "--opt-level", level, "--batch", "models.py:batch")
    passes = data.pop("passes")
    assert data == before
    for when in ("before", "after"):
        model, saved = models.build(), weakref.WeakSet()
        if when == "after":
            model, _ = fp8stack.initialize(model, torch.optim.AdamW(model.parameters()), level)
        own = {t.untyped_storage() for t in model.parameters()}

        def keep(tensor, saved=saved):
            saved.add(tensor.untyped_storage())
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16),
        ):
            loss = model(models.batch())
        kept = sum(storage.nbytes() for storage in saved if storage not in own) + loss.nbytes
        assert passes[when]["kept"] == pytest.approx(kept, rel=0.001)
        use = data["bytes"][when]
        assert passes[when]["peak"] >= sum(use.values()) - use["grad"] + passes[when]["kept"]
        assert passes[when]["unreached"] == []


def test_a_batch_shows_which_layers_have_too_few_rows(models, capsys, monkeypatch, by_size):
    """On a GPU, as which the measurement is asked here."""
    real = cli_plan.measure_step
    monkeypatch.setattr(cli_plan, "measure_step", lambda *given: real(*given[:4], gpu=True))
    shown = planned(capsys, "models.py:wide")["report"]
    assert shown["few_rows"] == []
    for batch, few in (("batch", ["blocks.0.up", "blocks.0.down"]), ("large_batch", [])):
        shown = planned(capsys, "models.py:wide", "--batch", f"models.py:{batch}")["report"]
        assert [name for name in shown["few_rows"] if "blocks" in name] == few


def test_the_table_says_what_was_measured(models, capsys):
    assert main(["plan", "models.py:build"]) == 0
    text = capsys.readouterr().out
    assert "Activations come on top: --batch FILE:function measures them. Nothing was" in text
    assert "peak" not in text
    same = [planned(capsys, "models.py:build", "--batch", f"models.py:{name}")["passes"]
            for name in ("batch", "named", "listed_batch")]  # fmt: skip
    assert same[0] == same[1] == same[2]
    assert main(["plan", "models.py:half", "--batch", "models.py:named"]) == 0
    text = capsys.readouterr().out
    assert "Activations come on top" not in text
    assert "note: 2 parameters got no gradient from the batch (odd.extra.weight)" in text
    assert "peak of a step" in text


@pytest.mark.parametrize("outer", ["planned_outer", "05_planned-outer"])  # as python -m takes it
def test_a_file_of_a_package_is_imported_as_its_module(
    outer, models, tmp_path, capsys, monkeypatch
):
    """Relatively too; a module beside it has its plain name only where nothing of Python's has that."""
    expected = planned(capsys, "models.py:build")
    inner = tmp_path / outer / "inner"
    inner.mkdir(parents=True)
    (tmp_path / outer / "__init__.py").write_text("WIDTH = 64\n")
    (inner / "__init__.py").write_text("")
    (inner / "layers.py").write_text(MODELS)
    (inner / "wave.py").write_text("raise RuntimeError('the one beside')\n")
    (inner / "train.py").write_text(
        "import sys, wave\nimport layers as beside\nfrom .. import WIDTH\nfrom .layers import Model\n"
        "assert wave.open\nsys.path.insert(0, 'lib')\n\n\ndef build():\n    return Model(WIDTH)\n"
    )
    for name in ("wave", "layers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = list(sys.path)
    assert planned(capsys, f"{outer}/inner/train.py:build") == expected
    monkeypatch.chdir(inner)
    assert planned(capsys, "train.py:build") == expected
    assert sys.path == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("models.py:build --opt-level 02", "opt_level must be one of"),
        ("models.py:build --fp8-format e4m4", "fp8_format='e4m4' is not a choice"),
        ("models.py:build --min-numel many", "argument --min-numel: invalid int value"),
        ("models.py:build --states-for head", "must be PATTERN=STATES"),
        ("models.py:build --precision-for bf16", "give a dict of patterns"),
        ("models.py:build --precision-for head=bf15", "precision must be one of"),
        ("models.py:build --states-for haed=fp32", "matches no parameter"),
        ("models.py:build --optimizer x", "unrecognized arguments"),
        ("models.py:moved", "leave moving the model to a GPU"),
        ("models.py:lazy", "weight is a lazy parameter without a shape"),
        ("models.py:with_lbfgs --opt-level O1", "does not step on the meta device"),
        ("models.py", "must be a file and a function"),
        ("mod\0els.py:build", "must be a file and a function"),
        ("none.py:build", "there is no Python file 'none.py'"),
        ("models.py:biuld", "no function 'biuld'. Did you mean \"build\"?"),
        ("models.py:need", "raised TypeError: need() missing 1 required"),
        ("models.py:broken", "raised KeyError: 'width'"),
        ("models.py:leaves", "raised SystemExit: 0"),
        ("models.py:listed", "returned list; it must return"),
        (
            "models.py:looks --batch models.py:floats",
            "models.py:looks does not run on tensors without data",
        ),
        ("models.py:build --batch models.py:floats", "does not run on tensors without data"),
        ("models.py:build --batch models.py:broken", "models.py:broken raised KeyError"),
        ("models.py:build --batch models.py:none", "no function 'none'"),
        ("broken.py:build", "No module named 'nothing_of_that_name'"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, message, models, capsys):
    assert message in refused_in_a_line(capsys, "plan", *arguments.split())
