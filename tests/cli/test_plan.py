"""`fp8stack plan`: it says what `initialize` then does, counts the same bytes, and allocates nothing."""

import json
import re
import sys

import pytest
import torch

import fp8stack
from fp8stack import capability
from fp8stack.__main__ import main
from fp8stack.cli import load_function, machine
from fp8stack.memory import measure

MODELS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, width=64, words=96, layers=2):
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
    print("for stderr, since stdout is the command's")
    return Model(width=65536, words=131072, layers=8)


def normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)))


def moved():
    return Model().to("cpu")


def empty():
    return nn.Identity()


def lazy():
    return nn.LazyLinear(3)


def scripted():
    return torch.jit.script(nn.Linear(64, 64))
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A folder to be in, with models.py, planned for the CPU; return the module."""
    monkeypatch.setattr(machine, "device", lambda: torch.device("cpu"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
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
    return fp8stack.get_report(model), {
        k: v for k, v in measure(model, optimizer).bytes.items() if v
    }


@pytest.mark.parametrize(
    ("function", "options", "level", "overrides"),
    [
        ("build", [], "O2", {}),
        ("build", ["--opt-level", "O0"], "O0", {}),
        ("build", ["--opt-level", "O1"], "O1", {}),
        ("build", ["--skip", "odd", "*.down", "--pad", "skip"], "O2", {"skip": ["odd", "*.down"], "pad": "skip"}),
        ("build", ["--preset", "fp8-lm"], "O2", {"preset": "fp8-lm"}),
        ("build", ["--step-in-backward"], "O2", {"step_in_backward": True}),
        ("build", ["--states-for", "*up*=4bit,none"], "O2",
         {"states_for": {"*up*": {"states": "4bit", "master": "none"}}}),
        ("with_sgd", ["--min-numel", "20000"], "O2", {"min_numel": 20000}),
        ("build", ["--optimizer-backend", "bitsandbytes"], "O2", {"optimizer_backend": "bitsandbytes"}),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)  # fmt: skip
def test_the_plan_is_what_initialize_does(function, options, level, overrides, models, capsys):
    data = planned(capsys, f"models.py:{function}", *options)
    built = getattr(models, function)()
    model, optimizer = (
        built if isinstance(built, tuple) else (built, torch.optim.AdamW(built.parameters()))
    )
    report, use = trained(model, optimizer, level, **overrides)
    told = data["report"]
    for name in (
        "level",
        "gemm",
        "compute",
        "converted",
        "skipped",
        "stored",
        "kept",
        "bytes_per_parameter",
    ):
        assert told[name] == json.loads(json.dumps(report.to_dict()[name])), name
    assert data["bytes"]["after"] == use
    numel = sum(p.numel() for p in model.parameters())
    assert data["parameters"] == numel
    moments = 1 if function == "with_sgd" else 2
    before = data["bytes"]["before"]
    assert [before.get(k, 0) for k in ("weight", "grad", "m", "v")] == [
        4 * numel, 4 * numel, 4 * numel, 4 * numel * (moments - 1),
    ]  # fmt: skip


def test_the_table_has_matrices_reasons_and_bytes(models, capsys):
    assert main(["plan", "models.py:build", "--skip", "*.down", "--pad", "skip"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines()]
    assert [
        "blocks.*.up.weight",
        "2",
        "Linear",
        "256×64",
        "fp8",
        "bfloat16",
        "+",
        "split24",
        "fp8",
        "8bit",
    ] in rows
    assert ["blocks.*.down.weight", "2", "Linear", "64×256", "float32", "float32", "fp32"] in rows
    assert 'blocks.0.down and 1 more: matches skip="*.down"' in text
    assert "position: Model uses it directly" in text
    assert "odd: out_features 3 is not a multiple of 16" in text
    small = "odd.weight: fewer elements than min_numel, so gradients and states stay as they are"
    assert small in text
    assert main(["plan", "models.py:build", "--opt-level", "O0"]) == 0
    assert "min_numel" not in capsys.readouterr().out
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


def test_an_optimizer_without_moments_has_no_states(models, capsys):
    data = planned(capsys, "models.py:without_moments")
    assert not data["bytes"]["after"].keys() & {"m", "v"}
    assert {matrix["states"] for matrix in data["matrices"]} == {"none"}


def test_layers_without_a_weight_of_their_own_have_their_reason_too(models, capsys):
    assert main(["plan", "models.py:normed"]) == 0
    text = capsys.readouterr().out
    assert "\n0: is a ParametrizedLinear, a subclass of nn.Linear" in text
    assert "parametrizations.weight.original" in text


def test_a_model_larger_than_any_machine_is_planned(models, capsys):
    data = planned(capsys, "models.py:of_a_terabyte")
    assert data["bytes"]["before"]["weight"] > 2**40
    assert len(data["report"]["converted"]) == 18
    assert data["bytes"]["after"]["weight"] < 0.51 * data["bytes"]["before"]["weight"]


@pytest.fixture
def package(models, tmp_path):
    """models.py as two files of a package within a package, the one importing the other relatively."""
    inner = tmp_path / "planned_outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "planned_outer" / "__init__.py").write_text("WIDTH = 64\n")
    (inner / "__init__.py").write_text("")
    (inner / "layers.py").write_text(MODELS)
    (inner / "train.py").write_text(
        "import layers as beside\n"  # as a script beside it would
        "from .. import WIDTH\nfrom .layers import Model\n\n\ndef build():\n    return Model(WIDTH)\n"
    )
    yield inner
    for name in [
        n
        for n in sys.modules
        if n.partition(".")[0] in ("planned_outer", "05_planned-outer", "layers")
    ]:
        del sys.modules[name]


def test_a_file_of_a_package_imports_relatively(package, models, capsys, monkeypatch):
    expected = planned(capsys, "models.py:build")
    assert planned(capsys, "planned_outer/inner/train.py:build") == expected
    monkeypatch.chdir(package)
    before = list(sys.path)
    assert planned(capsys, "train.py:build") == expected
    assert sys.path == before


def test_a_module_beside_a_file_of_a_package_hides_none_of_python(package, models, capsys):
    """As with `python -m`; it is found by its plain name where nothing else has that name."""
    expected = planned(capsys, "models.py:build")
    (package / "wave.py").write_text("raise RuntimeError('the one beside')\n")
    text = (package / "train.py").read_text()
    (package / "train.py").write_text(f"import wave\n{text}\nassert wave.open\n")
    sys.modules.pop("wave", None)
    sys.path.append(str(package))  # of the user's own, which stays where it was
    before = list(sys.path)
    try:
        assert planned(capsys, "planned_outer/inner/train.py:build") == expected
        assert sys.path == before
    finally:
        sys.path.remove(str(package))


def test_the_path_is_afterwards_what_it_was(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", before := list(sys.path))
    (tmp_path / "added.py").write_text(f"import sys\nsys.path.insert(0, 'lib')\n{MODELS}")
    planned(capsys, "added.py:build")
    assert sys.path == before
    assert "lib" not in sys.path


@pytest.mark.parametrize("file", ["planned_outer/inner/train.py", "plain.py"])
def test_a_file_that_has_changed_is_read_again(file, package, tmp_path):
    (tmp_path / "plain.py").write_text(
        "from models import Model\n\n\ndef build():\n    return Model(64)\n"
    )
    assert load_function.build(f"{file}:build")[0].head.in_features == 64
    path = tmp_path / file
    path.write_text(re.sub(r"Model\(\w+\)", "Model(width=128)", path.read_text()))
    assert load_function.build(f"{file}:build")[0].head.in_features == 128


def test_a_folder_that_is_no_identifier_is_a_package(models, package, tmp_path, capsys):
    expected = planned(capsys, "models.py:build")
    package.parent.rename(tmp_path / "05_planned-outer")  # as python -m takes it
    assert planned(capsys, "05_planned-outer/inner/train.py:build") == expected


def test_what_a_relative_import_lacks_is_said(package, capsys):
    (package / "__init__.py").unlink()
    with pytest.raises(SystemExit):
        main(["plan", "planned_outer/inner/train.py:build"])
    error = capsys.readouterr().err
    assert "put an empty __init__.py beside the file" in error
    guarded = (
        "try:\n    from .layers import build\nexcept ImportError:\n    from layers import build\n"
    )
    (package / "guarded.py").write_text(guarded)
    assert main(["plan", "planned_outer/inner/guarded.py:build"]) == 0


def test_a_package_of_a_name_that_is_taken_is_named(package, tmp_path, capsys):
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text("")
    (tmp_path / "json" / "tool.py").write_text("from . import nothing\n")
    with pytest.raises(SystemExit):
        main(["plan", "json/tool.py:build"])
    assert "another package json is there. Rename" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models.py:build", "--opt-level", "02"], "opt_level must be one of"),
        (["models.py:build", "--fp8-format", "e4m4"], "fp8_format='e4m4' is not a choice"),
        (["models.py:build", "--min-numel", "many"], "argument --min-numel: invalid int value"),
        (["models.py:build", "--states-for", "head"], "must be PATTERN=STATES"),
        (["models.py:build", "--states-for", "haed=fp32"], "matches no parameter"),
        (["models.py:build", "--optimizer", "x"], "unrecognized arguments"),
        (
            ["models.py:build", "--fp8-margin", "99"],
            "fp8_margin=99 must be an integer from 0 to 16",
        ),
        (["models.py:moved"], "leave moving the model to a GPU"),
        (["models.py:empty"], "no parameters"),
        (["models.py:lazy"], "weight is a lazy parameter without a shape"),
        (["models.py:scripted"], "is one of torch.jit"),
        (["models.py:with_lbfgs", "--opt-level", "O1"], "does not step on the meta device"),
        (["models.py"], "must be a file and a function"),
        (["none.py:build"], "there is no Python file 'none.py'"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_is_wrong_is_said_in_a_line(arguments, message, models, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["plan", *arguments])
    assert raised.value.code == 2
    out, error = capsys.readouterr()
    assert message in error
    assert (out, error.count("\n")) == ("", 1)
