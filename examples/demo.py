"""Train one small GPT with and without FP8 and compare them: what `fp8stack demo` runs.

    fp8stack demo --open                             # a minute on a laptop's CPU
    fp8stack demo --levels baseline O0 O1 O2         # all levels
    fp8stack demo --size gpu                         # a larger model, for one GPU
    fp8stack demo --data my_texts/ --head bf16       # another text; all fields of a recipe are options

Each level (`baseline` is plain PyTorch, O0 to O2 are fp8stack's) trains from the same seed, hence
from the same weights and on the same batches, in a process of its own, so that the peak memory is
that level's and nothing else's. A table, a sample of generated text and `report.html` compare them.

`train()` is the training loop, and all that is FP8 about it is one call of `fp8stack.initialize`:
AdamW, the learning-rate schedule and gradient clipping are plain PyTorch. Bytes per parameter are
counted on its live tensors.

The exit status is 1 if a level fails, or ends more than 1 % above the baseline's validation loss
after enough steps to tell, and 2 if nothing could start. On the CPU of one machine a seed gives the
same numbers bit for bit. The options are in `fp8stack/cli/parsers.py`.

Limits: one device. A CPU emulates the FP8 arithmetic, so there the levels show FP8's numerics and
the memory of weights, gradients and optimizer, not its speed. It needs torch and fp8stack alone:
the wheel has this file and what it imports.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import platform
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import corpus
import demo_report
import torch
from gpt import GPT, ModelConfig
from meters import PeakMemory, Stopwatch
from record import Record, find_problems
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import fp8stack
from fp8stack import memory
from fp8stack.cli.recipe import options_of
from fp8stack.errors import ConfigError
from fp8stack.levels import recipe_for

LEVELS = ("baseline", *fp8stack.levels.LEVELS)
VALIDATIONS = 6  # times in a run that the validation loss is taken
VALIDATION_BATCHES = 16
LAP = 10  # steps between readings of the clock; a GPU is waited for at each
COUNTED_STEP = 2  # bytes are counted in this step: the optimizer has states, gradients are alive
PROMPT = "\nclass "
SAMPLE_BYTES = 250


@dataclass(frozen=True)
class Settings:
    """One run. The defaults are the demo's: two cores take a minute for the baseline and O2."""

    level: str = "baseline"
    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 200
    batch: int = 4
    lr: float = 3e-3
    seed: int = 0
    device: str = "cpu"
    # Of fp8stack.initialize. The layers are so small that a GPU is faster in bfloat16, but what is
    # compared here is how FP8 trains.
    options: dict[str, Any] = field(default_factory=lambda: {"select": "all"})


SIZES = {
    "demo": Settings(),
    "gpu": Settings(
        model=ModelConfig(dim=1024, layers=12, heads=16, kv_heads=8, ffn=2816, seq_len=1024),
        steps=1500,
        batch=16,
        lr=1e-3,
    ),
}


def train(
    settings: Settings, text: corpus.Corpus, show_progress: bool = True
) -> tuple[GPT, Record]:
    """Train one model at one level; return it with the numbers the report compares."""
    device, seq_len = torch.device(settings.device), settings.model.seq_len
    windows = torch.Generator().manual_seed(settings.seed)
    stream = corpus.batches(text.train, settings.batch, seq_len, windows)
    held_out = corpus.spaced_batches(text.validation, settings.batch, seq_len, VALIDATION_BATCHES)
    validation_steps = {settings.steps * (i + 1) // VALIDATIONS for i in range(VALIDATIONS)}

    peak = PeakMemory(device)
    torch.manual_seed(settings.seed)
    model = GPT(settings.model).to(device)
    optimizer = build_optimizer(model, settings.lr)
    scheduler = LambdaLR(optimizer, lambda step: scale_lr(step, settings.steps))
    if settings.level != "baseline":
        model, optimizer = fp8stack.initialize(
            model, optimizer, opt_level=settings.level, **settings.options
        )

    # One tensor, since a list of small ones that live on keeps a CPU's heap from being reused.
    losses = torch.zeros(settings.steps, device=device)
    validation: list[tuple[int, float]] = []
    watch = Stopwatch(device, tokens_per_step=settings.batch * seq_len)
    for step in range(1, settings.steps + 1):
        loss = compute_loss(model, next(stream), device)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step == COUNTED_STEP:
            bytes_per_parameter = memory.measure(model, optimizer).per_parameter()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses[step - 1] = loss.detach()

        if step % LAP == 0 or step in validation_steps:
            watch.lap(step)
        if step in validation_steps:
            validation.append((step, evaluate(model, held_out, device)))
            if show_progress:
                print(
                    f"{settings.level:>8}  step {step:,} of {settings.steps:,}  "
                    f"validation loss {validation[-1][1]:.3f}  {watch.tokens_per_second:,.0f} tokens/s",
                    file=sys.stderr,
                )
            watch.restart(step)

    return model, Record(
        level=settings.level,
        train_loss=losses.tolist(),
        validation=validation,
        tokens_per_second=watch.tokens_per_second,
        bytes_per_parameter=bytes_per_parameter,
        peak_bytes=peak.read(),
        conditions=describe(settings, text, model),
        skipped_steps=int(getattr(optimizer, "skipped_steps", 0)),
    )


def rehearse(settings: Settings, text: corpus.Corpus) -> None:
    """Train a tiny model for two steps, so that the real run does not pay for first uses.

    They import modules (150 MiB of memory on the CPU) and compile kernels (seconds on a GPU).
    """
    tiny = replace(settings.model, dim=64, layers=1, heads=2, kv_heads=1, ffn=64)
    with patch.dict(os.environ, FP8STACK_QUIET="1"):  # the card would describe the wrong model
        train(replace(settings, model=tiny, steps=2), text, show_progress=False)


def build_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices and none on the weights of the norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def scale_lr(step: int, steps: int) -> float:
    """Factor on the learning rate: up over the first tenth of the run, down a cosine to zero."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.5 + 0.5 * math.cos(math.pi * done)


def compute_loss(model: nn.Module, batch: corpus.Batch, device: torch.device) -> Tensor:  # []
    """Mean cross-entropy; bf16 activations on a GPU as is usual there, fp32 on a CPU."""
    tokens, targets = (half.to(device, non_blocking=True) for half in batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return model(tokens, targets)


@torch.no_grad()
def evaluate(model: nn.Module, held_out: list[corpus.Batch], device: torch.device) -> float:
    model.eval()
    losses = [compute_loss(model, batch, device) for batch in held_out]
    model.train()
    return torch.stack(losses).mean().item()


def write_sample(model: GPT, settings: Settings) -> str:
    """What the model makes of PROMPT: the same text for the same seed."""
    prompt = corpus.encode(PROMPT).to(settings.device)
    generator = torch.Generator().manual_seed(settings.seed)
    return corpus.decode(model.generate(prompt, SAMPLE_BYTES, generator)).strip()


def describe(settings: Settings, text: corpus.Corpus, model: GPT) -> dict[str, str]:
    """The conditions under which the numbers hold."""
    size, window = settings.model, settings.batch * settings.model.seq_len
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if settings.device == "cpu":
        device = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads, FP8 emulated"
    else:
        device = torch.cuda.get_device_name(settings.device)
    return {
        "model": f"GPT, {parameters / 1e6:.1f} M parameters: {size.layers} layers of {size.dim}, "
        f"{size.heads} query and {size.kv_heads} key/value heads, feed-forward {size.ffn}",
        "training": f"{settings.steps} steps of {settings.batch} windows of {size.seq_len} bytes "
        f"({settings.steps * window / 1e6:.2f} M in all), AdamW, learning rate {settings.lr:g}, "
        f"seed {settings.seed}",
        "text": f"{text.name}: {len(text.train) / 1e6:.1f} MB for training, "
        f"{len(text.validation) / 1e6:.1f} MB held out",
        "device": device,
        "versions": f"fp8stack {fp8stack.__version__}, PyTorch {torch.__version__}, "
        f"Python {platform.python_version()}",
    }


# --- the command `fp8stack demo`


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train the levels that were asked for and write the report; return what came of it, as plain data.

    Raises ConfigError for options that nothing could be trained with, before anything is trained.
    """
    try:
        settings, out = choose_settings(options), Path(options.out)
        text = corpus.load(options.data, settings.model.seq_len)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    out.mkdir(parents=True, exist_ok=True)
    print(f"training {', '.join(options.levels)} on {text.name}", file=sys.stderr)
    context = multiprocessing.get_context("spawn")
    records: list[Record] = []
    failed: list[str] = []
    for level in options.levels:
        Record.path(out, level).unlink(missing_ok=True)
        writes = level == options.levels[-1]
        arguments = (replace(settings, level=level), options.data, out, writes)
        process = context.Process(target=run_level, args=arguments)
        process.start()
        process.join()
        if process.exitcode == 0:
            records.append(Record.load(out, level))
        else:
            failed.append(f"{level} failed: its process ended with status {process.exitcode}")
    problems = failed + find_problems(records)
    data = demo_report.summarize(records) | {"problems": problems, "report": None}
    if records:
        data["report"] = str(demo_report.write_html(records, problems, out))
    return data


def run_level(settings: Settings, data: str | None, out: Path, writes: bool) -> None:
    """Train one level in this process and leave its record for the parent; the last level writes."""
    # Ctrl-C ends this process without a word; the parent answers it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    text = corpus.load(data, settings.model.seq_len)
    rehearse(settings, text)
    model, record = train(settings, text)
    if writes:
        record.sample = write_sample(model, settings)
    record.save(out)


def draw(data: dict[str, Any]) -> Iterator[str]:
    """Show what `run` returned: a table, what is to be said of the losses, the report's path, and the sample."""
    yield from demo_report.draw(data)
    yield from (f"FAILED: {problem}" for problem in data["problems"])
    if data["report"]:
        yield f"report: {data['report']}"
        yield f"written by the {data['sample']['level']} model:"
        yield "".join(f"    {line}\n" for line in data["sample"]["text"].splitlines())


def choose_settings(options: argparse.Namespace) -> Settings:
    """The preset of `--size` with everything that was given on the command line."""
    preset = SIZES[options.size]
    given = {
        name: getattr(options, name)
        for name in ("steps", "batch", "lr", "seed")
        if getattr(options, name) is not None
    }
    model = preset.model
    if options.seq_len is not None:
        model = replace(model, seq_len=options.seq_len)
    recipe = preset.options | options_of(options)
    device = choose_device(options.device)
    settings = replace(preset, **given, model=model, device=device, options=recipe)
    rules = (
        ("--steps", settings.steps, 2),
        ("--batch", settings.batch, 1),
        ("--seq-len", model.seq_len, 1),
    )
    for option, value, least in rules:
        if value < least:
            raise ValueError(f"{option} {value}: must be {least} or more.")
    for level in options.levels:
        if level != "baseline":
            recipe_for(level, **recipe)  # raises for what is no recipe
    return settings


def choose_device(wish: str) -> str:
    present = torch.cuda.is_available()
    if wish == "cuda" and not present:
        raise ValueError(
            "--device cuda: PyTorch sees no CUDA device here. Check nvidia-smi and that PyTorch is "
            "a CUDA build, or use --device cpu."
        )
    return "cuda" if present and wish != "cpu" else "cpu"
