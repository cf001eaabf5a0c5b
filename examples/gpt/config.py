"""Everything that a run can be told: defaults, then `--config file.yaml`, then flags.

    python examples/train_gpt.py --config examples/configs/fineweb_edu_fp8.yaml --opt-level O1 --max-lr 3e-4

A flag that says whether or at which level FP8 is used outweighs what the file says about it: with `--no-fp8`, the
file's FP8 options are left out. Within one of the two, contradictions are errors.

`Config.fp8_options()` translates to `fp8stack.initialize`. The defaults train the demo's model, on a CPU too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fp8stack.errors import ConfigError
from fp8stack.levels import CHOICES, LEVELS, Recipe, recipe_for

from . import model as models
from .model import SIZES, ModelConfig
from .options import Parser, add_flags, convert, in_flags, option, read_yaml, warn
from .schedule import RATES, check_warm_up, default_warm_up
from .tokens import ENCODINGS

SCALING = (
    "compute",
    "fp8_format",
    "fp8_recipe",
    "fp8_margin",
    "amax_history_len",
    "amax_compute_algo",
    "fp8_fast_accum",
    "select",
    "head",
    "first_last",
    "wgrad",
)
OF_FP8 = (*SCALING, "fp8_interval", "fuse", "skip", "bf16_last")
LEVEL = ("opt_level", "use_fp8")
STATES = {32: "fp32", 8: "8bit", 4: "4bit"}
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
PARTS = ("norm", "positions", "activation", "qk_norm", "kv_heads")


@dataclass(frozen=True)
class Config:
    """The options of a run, checked.

    Raises:
        ConfigError: for a value that is not allowed, and for two options that contradict each other.
    """

    # --- what is trained
    model: str = option("demo", "size of the model", choices=SIZES)
    data: str = option(
        "stdlib",
        "what to read: stdlib (Python's own library), a text file or folder, a folder of .bin or .parquet files, "
        "fineweb-edu, openwebtext, tinyshakespeare, or hf:NAME of a dataset; hf:NAME:CONFIG of one that has several "
        "configurations",
        path=True,
    )
    text_column: str | None = option(
        None, 'of a dataset: its documents; by default "text", or the only one with text'
    )
    encoding: str = option(
        "auto",
        "of text, or the path of a tokenizer.json; auto: bytes for local text, the shards' own, gpt2 for datasets and "
        ".parquet files",
        choices=("auto", *ENCODINGS),
        suffix=".json",
    )
    seq_len: int | None = option(None, "tokens in a window; by default the model's", least=1)
    norm: str | None = option(None, "instead of the model's", choices=models.CHOICES["norm"])
    positions: str | None = option(
        None, "instead of the model's", choices=models.CHOICES["positions"]
    )
    activation: str | None = option(
        None, "instead of the model's", choices=models.CHOICES["activation"]
    )
    qk_norm: bool | None = option(None, "normalise queries and keys, whatever the model does")
    kv_heads: int | None = option(None, "key/value heads, instead of the model's", least=1)
    attention: str = option("sdpa", "flash needs flash-attn", choices=models.CHOICES["attention"])
    blocks: str = option("plain", "te: TransformerEngine's", choices=models.CHOICES["blocks"])
    checkpointing: bool = option(False, "compute each block again in backward, to save memory")
    compile: bool = option(False, "torch.compile the model")
    fuse_loss: bool = option(
        False, "head and loss in one, in chunks of rows, without the logits in memory"
    )
    hellaswag: Path | None = option(None, "JSONL file of HellaSwag")  # noqa: RUF009

    # --- precision
    opt_level: str | None = option(
        None, "of fp8stack, O2 if nothing is said; off: plain PyTorch", choices=(*LEVELS, "off")
    )
    use_fp8: bool | None = option(None, "--no-fp8 is --opt-level off")
    compute: str = option(
        "auto",
        "what multiplies; auto: native layers, TransformerEngine for recipes that they lack, bf16 without FP8",
        choices=CHOICES["compute"],
    )
    fp8_format: str = option("hybrid", "of the GEMMs", choices=CHOICES["fp8_format"])
    fp8_recipe: str = option("auto", "where scales come from", choices=CHOICES["fp8_recipe"])
    fp8_margin: int = option(
        0, "of delayed: room of 2^margin above the largest value", least=0, most=16
    )
    fp8_interval: int = option(1, "steps between scales: fp8stack has new ones at each", least=1)
    amax_history_len: int = option(
        1024, "of delayed: casts that count, one a micro-batch", least=1, most=2**16
    )
    amax_compute_algo: str = option(
        "max", "of delayed: how they count", choices=CHOICES["amax_compute_algo"]
    )
    skip: tuple[str, ...] = option(
        (), "layers to leave as they are, by name or pattern, as head or 'blocks.0.*'"
    )
    fp8_fast_accum: bool = option(False, "sum forward products with fewer bits, which is faster")
    head: str | None = option(
        None, "how what makes logits multiplies; by default the level's", choices=CHOICES["head"]
    )
    select: str = option(
        "auto",
        "which layers multiply in FP8; auto: those that it makes faster, on a GPU",
        choices=CHOICES["select"],
    )
    first_last: int = option(0, "so many first and last blocks multiply in bf16", least=0)
    wgrad: str = option("fp8", "what makes gradients of weights", choices=CHOICES["wgrad"])
    bf16_last: float = option(
        0.0, "share of --steps, the last ones, whose products are in bf16", least=0, most=1
    )
    optimizer_bits: int | None = option(
        None, "of AdamW's states; by default the level's", choices=STATES
    )
    fuse: bool = option(False, "fp8stack.nn.fuse: casts as part of MLPs and RMSNorms")
    compute_dtype: str = option("bfloat16", "of autocast", choices=PRECISIONS)
    strict: bool = option(False, "raise where a fallback or a change would be a warning")

    # --- training
    steps: int = option(300, "of the optimizer, in all", least=1)
    max_lr: float | None = option(
        None, "highest learning rate; by default what is usual for the model", above=0
    )
    min_lr_ratio: float = option(0.1, "the last learning rate, over the highest", least=0, most=1)
    warmup_steps: int | None = option(
        None, "in which the learning rate rises; by default a tenth of all", least=0
    )
    weight_decay: float = option(0.1, "of matrices", least=0)
    max_grad_norm: float = option(1.0, "gradients are clipped to; 0: not at all", least=0)
    target_effective_batch_size: int = option(4, "sequences in a step of all ranks", least=1)
    max_batch_size: int = option(64, "the most that --micro-batch auto tries", least=1)
    micro_batch: int | str = option(
        "auto", "sequences that a rank computes at once; auto: what fits", least=1, word="auto"
    )
    parallel: str = option(
        "auto", "over ranks", choices=("auto", "none", "ddp", "fsdp2", "dataparallel")
    )
    seed: int = option(0, "of weights, data order and samples", least=0, most=2**63 - 1)
    deterministic: bool = option(False, "the same bits in every run on a GPU too, which is slower")
    device: str = option("auto", "a GPU if there is any", choices=("auto", "cpu", "cuda"))

    # --- what is kept and told
    run_name: str | None = option(None, "of the folder in --out; by default model and precision")
    out: Path = option(Path("runs"), "folder for the folders of runs")  # noqa: RUF009
    checkpoint_freq: int = option(250, "steps between checkpoints; 0: none", least=0)
    keep_checkpoints: int = option(3, "checkpoints to keep, apart from the best", least=1)
    resume: str | None = option(
        None,
        "auto: the newest checkpoint of this run in this precision, or a fresh start; latest: or one of its name in "
        "another precision; or the path of a checkpoint",
        path=True,
    )
    overwrite: bool = option(False, "delete the checkpoints of an older run in the same folder")
    list_checkpoints: bool = option(False, "show the run's checkpoints and stop")
    eval_freq: int = option(
        100, "steps between evaluations, which checkpoints have too; 0: none", least=0
    )
    eval_batches: int = option(16, "batches of an evaluation", least=1)
    eval_batch_size: int = option(4, "sequences in each", least=1)
    log_freq: int = option(10, "steps between log lines", least=1)
    max_nan_steps: int = option(5, "skipped steps in a row that end a run", least=1)
    tensorboard: bool = option(True, "write TensorBoard's files")
    wandb: bool = option(False, "log to Weights & Biases")

    def __post_init__(self) -> None:
        for rule in fields(self):
            name, value = rule.name, getattr(self, rule.name)
            object.__setattr__(self, name, convert(rule, value, name))
        level = self.opt_level or ("off" if self.use_fp8 is False else "O2")
        if self.use_fp8 == (level == "off"):
            flag = "--use-fp8" if self.use_fp8 else "--no-fp8"
            raise ConfigError(f"{flag} contradicts --opt-level {level}. Leave one of them out.")
        object.__setattr__(self, "opt_level", level)
        if self.warmup_steps is None:
            object.__setattr__(self, "warmup_steps", default_warm_up(self.steps))
        if self.max_lr is None:
            object.__setattr__(self, "max_lr", RATES[self.model])
        if level == "off":
            for name in OF_FP8:
                if getattr(self, name) != DEFAULTS[name]:
                    raise ConfigError(
                        f"{name}={getattr(self, name)!r} is of FP8, which --opt-level off (--no-fp8) leaves out. "
                        "Leave it out too, or use --opt-level O0, O1 or O2."
                    )
        self._check_run_name()
        self._check_fuse()
        self._check_te_blocks()
        if self.overwrite and self.resume:
            raise ConfigError(
                "--overwrite deletes what --resume goes on from. Leave one of them out."
            )
        self.model_config(vocab=SIZES[self.model].vocab)
        self.recipe()

    def fp8_options(self) -> tuple[str | None, dict[str, Any]]:
        """Return the level and the options for `fp8stack.initialize`; a level of None: do not call it.

        "off" with `optimizer_bits` 8 or 4 is O2 without FP8 in GEMMs and gradients.
        """
        bits, scaling = self.optimizer_bits, {name: getattr(self, name) for name in SCALING}
        scaling = {name: value for name, value in scaling.items() if value != DEFAULTS[name]}
        states = {"states": STATES[bits]} if bits not in (None, self.bits_of_level) else {}
        if self.opt_level != "off":
            skip = {"skip": list(self.skip)} if self.skip else {}  # as a manifest has it
            return self.opt_level, {**scaling, **skip, **states}
        if not states:
            return None, {}
        return "O2", {"compute": "bf16", "gradients": "keep", "states": STATES[bits]}

    @property
    def bits_of_level(self) -> int:
        """Return the bits of AdamW's states where no others are asked for."""
        return 8 if self.opt_level == "O2" else 32

    def _check_run_name(self) -> None:
        """Raise ConfigError for a name that leads out of the folder of runs, or that no folder can have."""
        name = self.run_name or ""
        for text in (name, str(self.out)):
            if any("\ud800" <= c <= "\udfff" for c in text):  # TensorBoard could not write there
                raise ConfigError(f"{text!r} is not UTF-8. Give another --run-name or --out.")
        if len(name.encode()) > 200:  # file systems take 255 bytes, with the precision
            raise ConfigError(
                f"run_name={name[:20]!r}... has more than 200 bytes. Give a shorter one."
            )
        if name in (".", "..") or set(name) & set("/\\\0"):
            raise ConfigError(
                f"run_name={name!r} must be the name of a folder in --out: without / and \\, and neither . nor .. . "
                "Give another folder as --out."
            )

    def _check_fuse(self) -> None:
        """Raise ConfigError for what has no native layers that casts could be joined to."""
        reasons = {
            ("compute", "te"): "TransformerEngine's layers cast by themselves",
            ("compute", "bf16"): "without FP8 there are no casts",
            ("blocks", "te"): "those are fused by TransformerEngine",
            ("parallel", "fsdp2"): "it shards norms before they can be fused",
        }
        for (name, value), reason in reasons.items():
            if self.fuse and getattr(self, name) == value:
                raise ConfigError(
                    f"--fuse joins casts to native FP8 layers, and not with --{name} {value}: {reason}. Leave out one "
                    "of the two."
                )

    @property
    def first_bf16_step(self) -> int:
        """Return from which step on, counted from 0, --bf16-last has products in bfloat16."""
        return self.steps - round(self.bf16_last * self.steps)

    def _check_te_blocks(self) -> None:
        """Raise ConfigError for what would change TransformerEngine's blocks or parts: those multiply as a whole."""
        parts = "", ".attention_in", ".output", ".feed_forward"
        names = [f"blocks.{i}{part}" for i in range(SIZES[self.model].layers) for part in parts]
        found = [p for p in self.skip if any(fnmatchcase(name, p) for name in names)]
        if self.blocks == "te" and self.bf16_last:
            raise ConfigError(
                "--bf16-last is for layers of fp8stack's; TransformerEngine's blocks (--blocks te) multiply by "
                "themselves. Leave one of the two out."
            )
        if self.blocks == "te" and found:
            raise ConfigError(
                f"--skip {found[0]} names layers of TransformerEngine's blocks (--blocks te), which are taken as "
                "a whole. Leave one of the two out."
            )

    def recipe(self) -> Recipe | None:
        """Return what `fp8stack.initialize` is asked for; None: it is not called."""
        level, options = self.fp8_options()
        return level and recipe_for(level, **{"fuse": self.fuse} | options)

    def model_config(self, vocab: int, fp8: bool = True) -> ModelConfig:
        """Return the model to build for data of `vocab` tokens; `fp8`: products are, where the options say so.

        Raises:
            ConfigError: for parts that do not fit together.
        """
        given = {name: getattr(self, name) for name in ("seq_len", *PARTS)}
        given = {name: value for name, value in given.items() if value is not None}
        in_te = fp8 and self.blocks == "te" and self.opt_level != "off"
        try:
            return replace(
                SIZES[self.model],
                vocab=vocab,
                attention=self.attention,
                blocks=self.blocks,
                checkpointing=self.checkpointing,
                fuse_loss=self.fuse_loss,
                fp8=self.recipe() if in_te else None,
                **given,
            )
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"--model {self.model}: {error}") from error

    @property
    def precision(self) -> str:
        """What is asked for: "FP8 O2", "bf16", or "bf16 8bit"; `runs.choose_precision` says what a device has."""
        if self.opt_level != "off":
            return f"FP8 {self.opt_level}"
        bits = self.optimizer_bits or 32
        return " ".join([PRECISIONS[self.compute_dtype], *[STATES[bits]] * (bits != 32)])

    def to_dict(self) -> dict[str, Any]:
        """Return all options as what JSON and YAML have."""

        def plain(value: Any) -> Any:
            return list(value) if isinstance(value, tuple) else value

        return {k: str(v) if isinstance(v, Path) else plain(v) for k, v in asdict(self).items()}


DEFAULTS = {rule.name: rule.default for rule in fields(Config)}


def parse(argv: list[str] | None = None) -> Config:
    """Return the configuration of a command line (by default this process's).

    Raises:
        ConfigError: with one line that names the option, what was given and what is allowed.
    """
    parser = Parser(
        description="Train a GPT-2- or Llama-class model with fp8stack.", allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options, named as flags are")
    add_flags(parser, Config)
    flags = parser.read(argv)
    file = flags.pop("config")
    given = {} if file is None else _checked(read_yaml(file, Config), f"{file}: ")
    flags = _checked(flags, "--")
    try:
        config = Config(**{**_without_overruled(given, flags), **flags})
    except ConfigError as error:
        # options of the file keep the names that they have there
        ours = DEFAULTS.keys() - (given.keys() - flags.keys())
        raise ConfigError(in_flags(str(error), ours)) from error
    if config.fp8_interval != 1:
        warn(
            f"--fp8-interval {config.fp8_interval} has no effect: --fp8-recipe {config.fp8_recipe}, as every recipe "
            "here, has new scales at each step; there is no interval to save work in. Leave it out.",
            config.strict,
        )
    check_warm_up(config)
    return config


def _checked(given: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return values of the right types; errors name an option as it is written there."""
    rules = {rule.name: rule for rule in fields(Config)}
    dashes = prefix == "--"
    return {
        name: convert(rules[name], value, prefix + (name.replace("_", "-") if dashes else name))
        for name, value in given.items()
    }


def _without_overruled(given: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Return the file's options without those on FP8 that flags decide otherwise."""
    overruled: set[str] = set()
    if flags.keys() & set(LEVEL):
        overruled.update(LEVEL)
    if flags.get("use_fp8") is False or flags.get("opt_level") == "off":
        overruled.update(OF_FP8)
    kept = {name: value for name, value in given.items() if name not in overruled}
    if overruled:
        Config(**given)  # the file has to be right by itself
    return kept
