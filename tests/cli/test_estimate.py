"""`fp8stack estimate`: what it reads, what it shows, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
from helpers import refused_in_a_line

from fp8stack.__main__ import main
from fp8stack.planning import BASELINES, Setup, Shape, estimate

SMALL = ["--sizes", "--layers", "2", "--hidden", "256", "--vocab", "512"]


@pytest.fixture
def estimated(capsys):
    """Return a function that runs the command with --json and returns its object."""

    def run(*options):
        assert main(["estimate", *options, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        return data, {column["name"]: column for column in data["precisions"]}

    return run


def test_all_levels_stand_beside_what_they_are_compared_with(estimated, capsys):
    options = ["--parameters", "7e9", "--seq", "4096", "--gpu", "h100"]
    data, columns = estimated(*options)
    assert list(columns) == ["fp32", "bf16", "8bit", "O0", "O1", "O2"]
    assert data["parameters"] == pytest.approx(7e9, rel=0.02)
    assert not columns["bf16"]["fits"]
    assert columns["O2"]["fits"]
    assert columns["O2"]["largest_batch"] >= 1
    assert estimated("--parameters", "7B", *options[2:]) == (data, columns)
    shape = Shape(**data["shape"])
    expected = estimate(shape, BASELINES["bf16"], Setup(seq=4096))
    assert columns["bf16"]["bytes"] == expected.parts
    assert columns["bf16"]["total"] == expected.total
    assert main(["estimate", *options]) == 0
    text = capsys.readouterr().out
    assert "31 layers of 4,096" in text
    assert "give --sizes" in text  # the shape was made up, which is said
    document = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    (shown,) = re.findall(r"The first prints, shortened:\n\n```text\n(.*?)```", document, re.S)
    assert [line for line in shown.splitlines() if line not in text.splitlines()] == []
    lines = [line for line in text.splitlines() if line.strip()]
    lines = {line.split("  ")[0].strip(): line.split()[-1] for line in lines}
    assert lines["total"] == f"{columns['O2']['total'] / 2**30:,.2f}"
    assert lines["largest micro-batch"] == str(columns["O2"]["largest_batch"])


def test_fields_of_a_recipe_and_sharing_change_the_bytes(estimated):
    _, whole = estimated(*SMALL)
    data, columns = estimated(*SMALL, "--states", "4bit")
    assert list(columns) == ["fp32", "bf16", "8bit", "O2"]
    assert data["memory"] is None
    assert "fits" not in columns["O2"]
    assert columns["O2"]["bytes"]["v"] < 0.6 * whole["O2"]["bytes"]["v"]
    for tokens, kept in ((2048, True), (16_384, False)):  # few tokens: codes stay until backward
        _, other = estimated(*SMALL, "--opt-level", "O2", "--select", "all", "--seq", str(tokens))
        assert bool(other["O2"]["bytes"]["weight copies"]) == kept
    _, shared = estimated(*SMALL, "--opt-level", "O2", "--ranks", "4", "--zero", "2")
    assert shared["O2"]["bytes"]["v"] == -(-whole["O2"]["bytes"]["v"] // 4)
    _, half = estimated(*SMALL, "--weights", "bfloat16", "--opt-level", "O0")
    assert half["O0"]["bytes"]["weights"] == whole["O0"]["bytes"]["weights"] // 2
    for backend in ("bitsandbytes", "bitsandbytes-paged"):  # the latter at its most
        _, theirs = estimated(*SMALL, "--optimizer-backend", backend)
        assert 0.97 < theirs["O2"]["bytes"]["v"] / whole["O2"]["bytes"]["v"] < 1  # larger blocks


def test_compiled_models_keep_less(estimated, capsys):
    options = ["--parameters", "1e9", "--seq", "4096", "--batch", "4"]
    for level in ("O0", "O1", "O2"):
        single = [*options, "--no-fuse", "--opt-level", level]
        _, plain = estimated(*single)
        data, compiled = estimated(*single, "--compile")
        assert data["setup"]["compile"]
        for name in ("bf16", "8bit", level):
            kept = [column[name]["bytes"]["activations"] for column in (compiled, plain)]
            assert kept[0] <= kept[1]
            assert compiled[name]["peak"] < 0.9 * plain[name]["peak"]
    assert main(["estimate", *options, "--compile"]) == 0
    assert "4 × 4096 tokens, compile." in capsys.readouterr().out
    assert not any("measured on one GPU" in note for note in data["notes"])
    data, _ = estimated(*options, "--compile", "--ranks", "2", "--fsdp")
    assert any("measured on one GPU" in note for note in data["notes"])


@pytest.mark.parametrize("gpu", ["A100", "RTX A6000", "RTX 4090", "B300"])
def test_levels_multiply_in_bf16_on_gpus_without_fp8(gpu, estimated):
    found, there = estimated(*SMALL, "--gpu", gpu)
    lacking = [text for text in found["notes"] if text.startswith(f"{gpu} has no FP8 products")]
    assert len(lacking) == (gpu in ("A100", "RTX A6000"))
    _, asked = estimated(*SMALL, "--gpu", gpu, "--compute", "bf16")
    assert (there["O2"] == asked["O2"]) == bool(lacking)


def test_it_reads_a_config(estimated, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 1024, "vocab_size": 192,
    }))  # fmt: skip
    options = ["--hf-config", str(config)]
    data, columns = estimated(*options)
    assert data["setup"]["seq"] == 1024  # all of its positions
    assert (data["model"], data["parameters"]) == ("GPT2LMHeadModel", data["active"])
    for name, column in columns.items():  # no verdict without them
        assert column["bytes"]["activations"] > 0, name
    _, nine = estimated(*options, "--opt-level", "O2", "--batch", "9", "--memory", "0.65")
    assert nine["O2"]["bytes"]["activations"] > 6 * columns["O2"]["bytes"]["activations"]
    fits = {name: column["total"] <= 0.65 * 2**30 for name, column in columns.items()}
    for name, column in nine.items():
        assert fits[name] == (column["largest_batch"] >= 1), name
        assert column["fits"] == (column["largest_batch"] >= 9), name
    assert main(["estimate", *options, "--opt-level", "O2"]) == 0
    text = capsys.readouterr().out
    assert (
        f"{data['parameters']:,} parameters, {data['active']:,} of them active for a token" in text
    )
    assert "stores scores" not in text
    refused = {
        ("--hidden", "256"): "--hf-config has the sizes; change ['hidden'] in the file",
        ("--seq", "1025"): "seq=1025, and GPT2LMHeadModel has 1024 positions",
        ("--compile",): "compile=True is counted by a formula. GPT2LMHeadModel has none",
        ("--opt-level", "O2", "--compute", "te"): "compute='te' is counted by a formula",
        ("--frozen", "fp8"): "an estimate trains all of a model. Use fp8stack plan",
    }
    for more, message in refused.items():
        assert message in refused_in_a_line(capsys, "estimate", *options, *more)
    written = {**json.loads(config.read_text()), "attn_implementation": "eager"}
    config.write_text(json.dumps(written))
    assert any(
        "stores scores" in note for note in estimated(*options, "--opt-level", "O0")[0]["notes"]
    )


def test_a_mixture_of_experts_has_these_numbers(tmp_path, capsys, by_size):
    """Its columns but for what fits, of which a minute's search is left out."""
    config = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 32,
        "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--hf-config", str(tmp_path), "--seq", "4096", "--opt-level", "O2"]
    assert main(["estimate", *options]) == 0
    head, *rows = capsys.readouterr().out.partition("\n\nfp32:")[0].splitlines()
    made = "2,661,602,304 parameters, 1,302,647,808 of them active for a token"
    assert head == f"{made}: Qwen3MoeForCausalLM"
    printed = {row[:20].strip(): row[20:].split() for row in rows}
    expected = {
        "GiB": "fp32 bf16 8bit O2",
        "weights": "9.92 9.92 4.96 4.96",
        "masters": "- - - 2.48",
        "gradients": "9.92 9.92 4.96 2.56",
        "m": "9.92 9.92 2.52 2.56",
        "v": "9.92 9.92 2.52 2.56",
        "activations": "43.88 18.29 11.27 7.53",
        "temporary": "4.64 4.64 4.64 4.64",
        "peak at once": "78.26 52.68 25.90 24.71",
        "at": "backward backward backward backward",
        "context and slack": "2.93 2.17 1.36 1.33",
        "total": "81.20 54.84 27.27 26.04",
    }
    assert {name: printed[name] for name in expected} == {n: v.split() for n, v in expected.items()}


def test_a_model_that_cannot_run_gets_no_verdict(tmp_path, capsys):
    """Loops over the experts that were hit look at values; a file of Python is a matter for `plan`."""
    config = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 64}
    config.write_text(json.dumps({"model_type": "mixtral", **sizes, "experts_implementation": "eager"}))  # fmt: skip
    said = refused_in_a_line(capsys, "estimate", "--hf-config", str(config), "--gpu", "H100")
    assert "does not run on tensors without data" in said
    assert "required" in refused_in_a_line(capsys, "estimate", "--model", "mm.py:build", "--gpu", "H100")  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parameters", "many"], "'many' is not a number above 0 and up to 1e+15, such as 7e9, 7B or 350M"),
        (["--parameters", "0"], "'0' is not a number above 0"),
        ([*SMALL, "--memory", "B"], "'B' is not a number above 0"),
        ([*SMALL, "--ranks", "2", "--zero", "5"], "invalid choice: 5 (choose from 1, 2, 3)"),
        (["--parameters", "1e9", "--layers", "2"], "--parameters makes the sizes; give --sizes with ['layers']"),
        (["--parameters", "1e5"], "fewer than the embeddings"),
        ([*SMALL, "--seq", "0"], "seq=0 must be an integer from 1 to 16,777,216"),
        (["--sizes", "--hidden", "64"], "missing: --layers"),
        ([*SMALL, "--heads", "3"], "hidden=256 must be a multiple of heads=3"),
        ([*SMALL, "--batch", "0"], "batch=0 must be an integer from 1 to"),
        ([*SMALL, "--gpu", "A100", "--compute", "native"], "A100 has no FP8 products"),
        ([*SMALL, "--gpu", "H1000"], "invalid choice: 'H1000' (choose from"),
        ([*SMALL, "--gpu", "H100", "--memory", "80"], "not allowed with argument --gpu"),
        ([*SMALL, "--zero", "2"], "give --ranks above 1"),
        ([*SMALL, "--skip", "lm_head"], "matches no module"),
        ([*SMALL, "--ranks", "2", "--fsdp", "--offload", "cpu"], "CPUOffloadPolicy"),
        ([*SMALL, "--ranks", "2", "--zero", "1", "--preset", "fp8-lm"], "one scale for a whole tensor"),
        ([*SMALL, "--ranks", "2", "--step-in-backward"], "does not go with several processes"),
        (["--hf-config", "nowhere.json"], "cannot be read as JSON"),
        ([*SMALL, "--accumulate", "--step-in-backward"], "does not go with gradient accumulation"),
        (["--sizes", "--layers", "2", "--hidden", "1000"], "hidden=1000 must be a multiple of heads=7"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_status_2(options, message, capsys):
    assert message in refused_in_a_line(capsys, "estimate", *options)
