"""The options of a run: three places that overrule each other, checked alike, and what fp8stack is asked for."""

import warnings
from dataclasses import fields, replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from gpt import config
from gpt.config import Config, parse
from gpt.model import SIZES
from gpt.other_words import ANSWERS, FILES

from fp8stack.errors import ConfigError, Fp8StackWarning

CONFIGS = Path(config.__file__).parents[1] / "configs"


@pytest.fixture
def write(tmp_path):
    def write(text):
        (tmp_path / "x.yaml").write_text(text)
        return ["--config", str(tmp_path / "x.yaml")]

    return write


def test_flags_outweigh_the_file_and_the_file_the_defaults(write):
    file = write("steps: 70\nmax-lr: 6e-4\nout: results\nmicro_batch: 8\ncompile: true\n")
    found = parse([*file, "--steps", "80", "--no-compile"])
    assert (found.steps, found.max_lr, found.out) == (80, 6e-4, Path("results"))
    assert (found.micro_batch, found.compile) == (8, False)
    assert (found.warmup_steps, found.seed, found.resume) == (8, 0, None)
    assert parse([]).opt_level == "O2"
    assert parse(write("opt_level: off\nwarmup_steps: 3")).opt_level == "off"  # false, to YAML
    assert parse(write("")) == parse([])


def test_words_of_public_guides_take_effect(write):
    flags = "--use_fp8 --fp8_format hybrid --fp8_recipe delayed --fp8_margin 1 --fp8_interval 1 --use_tensorboard "
    flags += "--run_name x_y --checkpoint_freq 5 --eval_freq=5 --checkpoint_dir d --max_lr 1e-3 --no_wandb "
    found = parse([*flags.split(), "--auto_batch_size", "--resume", "latest", "--list_checkpoints"])
    assert (found.run_name, found.out, found.max_lr) == ("x_y", Path("d"), 1e-3)
    assert (found.tensorboard, found.wandb, found.micro_batch) == (True, False, "auto")
    text = (
        "dataset: tinyshakespeare\nlearning_rate: 1e-3\nuse_wandb: false\nauto_batch_size: true\n"
    )
    text += "fp8_format: hybrid\nmax_batch_size: 8\nmin_lr_ratio: 0.1\nwarmup_steps: 3\nnum_workers: 4\n"
    with pytest.warns(Fp8StackWarning, match="num_workers has no effect: windows are read"):
        found = parse(write(text))
    assert (found.data, found.max_lr, found.micro_batch) == ("tinyshakespeare", 1e-3, "auto")
    assert parse(write("micro_batch: 1")).micro_batch == 1  # which is not true


def test_words_without_a_counterpart_are_answered_all_at_once(write):
    for name, told in ANSWERS.items():
        with pytest.raises(ConfigError, match=f"there is no option '--.*: {told[:20]}"):
            parse([f"--{name}", "3"])
    text = "".join(f"{name}: 3\n" for name in (*ANSWERS, "stepz"))
    with pytest.raises(ConfigError) as error:
        parse(write(text))
    assert all(
        f"there is no option {name!r}: {told}" in str(error.value) for name, told in ANSWERS.items()
    )
    assert "there is no option 'stepz'. Did you mean \"steps\"?" in str(error.value)
    for name, here in FILES.items():
        with pytest.raises(ConfigError, match=f"cannot be read .* is here {here}"):
            parse(["--config", f"configs/{name}"])
        parse([str(CONFIGS.parents[1] / part) if "/" in part else part for part in here.split()])


def test_every_run_of_the_sweep_has_options_that_there_are():
    yaml = pytest.importorskip("yaml")
    sweep = yaml.safe_load((CONFIGS.parent / "wandb_sweep.yaml").read_text())
    assert (CONFIGS.parents[1] / sweep["program"]).exists()
    fixed = [part for part in sweep["command"] if part.startswith("--")]
    names, values = zip(*((n, v["values"]) for n, v in sweep["parameters"].items()), strict=True)
    for chosen in product(*values):  # as an agent gives them
        parse([*fixed, *(f"--{name}={value}" for name, value in zip(names, chosen, strict=True))])


REFUSED = {  # flags: what is said
    "--opt-level o2": r'--opt-level: got .o2., must be one of O0, O1, O2, off. Did you mean "O2"',
    "--opt-level O3": 'MS-AMP has an O3; what it does is "O2" here',
    "--optimizer-bits 16": "--optimizer-bits: got 16, must be one of 32, 8, 4",
    "--steps 0": "--steps: got 0, must be a whole number of 1 or more",
    "--micro-batch 0": 'of 1 or more, or "auto"',
    "--max-lr nan": "--max-lr: got 'nan', must be a number above 0",
    "--run-name ../../x": "--run-name ../../x must be the name of a folder in --out",
    "--no-fp8 --opt-level O2": "--no-fp8 contradicts --opt-level O2",
    "--use-fp8 --no-fp8": "--use-fp8 and --no-fp8 contradict each other",
    "--no-fp8 --fp8-format e4m3": "^--fp8-format e4m3 is of FP8",
    "--blocks te": "--blocks te has .* room for --qk-norm. Use --no-qk-norm, or --blocks plain",
    "--model gpt2 --blocks te --skip blocks.0.*": r"^--skip blocks.0.\* names layers of Tr",
    "--no-fp8 --bf16-last 0.1": "^--bf16-last 0.1 is of FP8",
    "--bf16-last 1.1": "--bf16-last: got 1.1, must be",
    "--model gpt2 --blocks te --bf16-last 0.1": "--bf16-last is for layers of fp8stack's",
    "--fuse --compute te": "not with --compute te: .* Leave out one",
    "--overwrite --resume latest": "--overwrite deletes what --resume goes on from",
    "--kv-heads 3": "heads=8 query heads cannot share --kv-heads 3 .*divisor of heads",
    "--stepz 3": 'no option .--stepz.. Did you mean "--steps"',
    "--step 3": "no option '--step'",  # flags cannot be shortened
    "--fp8-interval 4 --strict": "no effect",
    "--steps": "expected one argument",
    "--config /nowhere.yaml": "/nowhere.yaml: cannot be read",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_bad_flag_is_named_with_what_is_allowed(flags):
    with pytest.raises(ConfigError, match=REFUSED[flags]) as error:
        parse(flags.split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step: 3", 'no option .step.. Did you mean "steps"'),
        ("max-lr: 1.0e-3\nmax_lr: 1.0e-4", "x.yaml: gives max_lr twice"),
        ("steps: many", "x.yaml: steps: got 'many', must be a whole number"),
        ("steps: true", "steps: got True"),
        ("out:", "x.yaml: out: got None: the value is missing, which must be a path. Give one, or leave"),
        ("- a\n- b", "must be lines of"),
        ("a: [", "is not valid YAML"),
        ("steps: 3\n\tseed: 4", "is not valid YAML: .*line 2"),
        ("steps: 3\n---\nsteps: 4", "is not valid YAML: expected a single document"),
        ("steps: !!python/object:os.system x", "is not valid YAML: could not determine a constructor"),
        ("steps: 2026-99-99", "is not valid YAML: month must be in 1..12"),
        (f"steps: {'9' * 400}", r"steps: got 9{20}\.\.\., must be a whole number of 1 or more and below 2\^63"),
        (f"steps: {'9' * 5000}", "is not valid YAML: Exceeds the limit"),
        (f"max_lr: {'9' * 400}", r"max_lr: got 9{20}\.\.\., must be a number above 0"),
        ("max_lr: .nan", "max_lr: got nan, must be a number above 0"),
        ("steps: " + "[" * 5000, "x.yaml: is nested too deeply"),
        ("steps: {a: 3}", "x.yaml: steps: must be a value or a list of them, got a mapping"),
        ("skip: [[head]]", "skip: must be a value or a list of them, got a sequence of more"),
        ("steps: [3, 4]", r"steps: got \[3, 4\], must be a whole number"),
        ("<<: {steps: 3}", "there is no option '<<'"),
        ("[steps]: 3", "there is no option 'a sequence'"),
        ("run_name: !!binary aGk=", "run_name: got b'hi', must be a text"),
        ("steps", "must be lines of .* got a scalar"),
        (
            "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwxyz")),
            "there is no option 'a'",
        ),
        (
            "skip: [" + "[" * 40 + "x" + "]" * 40 + "]",
            "skip: must be a value or a list",
        ),
        ("opt_level: O1\nuse_fp8: false", "--no-fp8 contradicts"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named_with_the_key(write, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        parse(write(text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["010", "1_000", "12:30", "1e3", "2026-11-25", ".5"])
def test_a_name_is_what_is_written_also_where_yaml_reads_a_number(write, name):
    assert parse(write(f"run_name: {name}")).run_name == name
    assert parse(write(f"run_name: &name {name}\nskip: *name")).skip == (name,)


def test_the_head_is_the_level_s_own_unless_a_flag_says_otherwise(write):
    assert parse(write("opt_level: O0")).fp8_options() == ("O0", {})
    assert parse([*write("opt_level: O0"), "--head", "fp8"]).fp8_options() == (
        "O0",
        {"head": "fp8"},
    )
    with pytest.raises(ConfigError, match="--head bf16 is of FP8"):
        parse([*write("opt_level: off"), "--head", "bf16"])


def test_a_flag_that_turns_fp8_off_leaves_out_what_the_file_says_of_it(write):
    file = write("opt_level: O1\nfp8_recipe: delayed\nfp8_margin: 2\nsteps: 9\nskip: [head]")
    given = {"fp8_recipe": "delayed", "fp8_margin": 2, "skip": ["head"]}
    assert parse(file).fp8_options() == ("O1", given)
    for flags in (["--no-fp8"], ["--opt-level", "off"]):
        found = parse([*file, *flags])
        assert (found.fp8_options(), found.steps, found.skip) == ((None, {}), 9, ())
    assert parse([*file, "--opt-level", "O0"]).fp8_options()[0] == "O0"
    assert parse([*write("use_fp8: false"), "--use-fp8"]).opt_level == "O2"
    with pytest.raises(ConfigError, match="contradicts"):  # the file is wrong by itself
        parse([*write("opt_level: O1\nuse_fp8: false"), "--no-fp8"])


@pytest.mark.parametrize(
    ("level", "bits", "expected"),
    [
        ("O1", None, ("O1", {})), ("O1", 8, ("O1", {"states": "8bit"})), ("O2", 8, ("O2", {})),
        ("O2", 32, ("O2", {"states": "fp32"})), ("off", 32, (None, {})),
        ("off", 4, ("O2", {"compute": "bf16", "gradients": "keep", "states": "4bit"})),
    ],
)  # fmt: skip
def test_levels_and_bits_are_what_fp8stack_is_asked_for(level, bits, expected):
    assert Config(model="tiny", opt_level=level, optimizer_bits=bits).fp8_options() == expected


def test_parts_of_the_model_can_be_exchanged():
    parts = "--norm rmsnorm --positions rope --activation swiglu --qk-norm --kv-heads 4"
    made = parse(["--model", "gpt2", *parts.split(), "--seq-len", "32"]).model_config(vocab=320)
    kinds = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu"}
    expected = replace(SIZES["gpt2"], vocab=320, seq_len=32, qk_norm=True, kv_heads=4, **kinds)
    assert made == expected


def test_every_option_has_a_flag_and_survives_yaml(write, capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    helped = capsys.readouterr().out
    options = {rule.name.replace("_", "-") for rule in fields(Config)}
    assert all(f"--{name}" in helped for name in options)
    yaml = pytest.importorskip("yaml")
    flags = "--model gpt2 --hellaswag a.jsonl --opt-level O1 --skip head blocks.0.* --skip *.down"
    found = parse(flags.split())
    assert found.skip == ("head", "blocks.0.*", "*.down")
    assert parse(write(yaml.safe_dump(found.to_dict()))) == found


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configurations_that_are_shipped_are_valid(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = parse(["--config", str(path)])
    found.model_config(SIZES[found.model].vocab)
    assert found.precision == ("bf16" if "bf16" in path.stem else "FP8 O2")
    assert found.target_effective_batch_size % 8 == 0
