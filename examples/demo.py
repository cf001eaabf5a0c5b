"""Train one small GPT at several levels of fp8stack and compare them: the demo of the library.

    python examples/demo.py                          # a few minutes on a laptop's CPU
    python examples/demo.py --size gpu               # a larger model, for one GPU
    python examples/demo.py --data my_texts/ --levels baseline O2

Each level (`baseline` is plain PyTorch, O0 to O2 are fp8stack's) trains from the same seed, hence
from the same weights and on the same batches, in a process of its own, so that the peak memory is
that level's and nothing else's. A table, a sample of generated text and `report.html` compare them.

`train()` is the training loop, and all that is FP8 about it is one call of `fp8stack.initialize`:
AdamW, the learning-rate schedule and gradient clipping are plain PyTorch. Bytes per parameter are
counted on its live tensors.

The exit status is 1 if a level fails or ends more than 1 % above the baseline's validation loss,
and 2 if nothing could start. On the CPU of one machine a seed gives the same numbers bit for bit.

Limits: one device. A CPU emulates the FP8 arithmetic, so there the levels show FP8's numerics and
the memory of weights, gradients and optimizer, not its speed.
"""

from __future__ import annotations

import argparse
import logging
import math
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

try:
    import demo_report
    from tqdm import tqdm

    import fp8stack
    from fp8stack import memory
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the demo needs the module {error.name}, which is not installed. In the root of the "
        'repository, install the library with all its demo needs: pip install -e ".[demo]"',
        name=error.name,
    ) from error

import corpus
from gpt import GPT, ModelConfig
from meters import PeakMemory, Stopwatch
from record import Record, find_deviations

LEVELS = ("baseline", "O0", "O1", "O2")
FP8_FORMATS = ("hybrid", "e4m3")
VALIDATIONS = 6  # times in a run that the validation loss is taken
VALIDATION_BATCHES = 16
LOG_EVERY = 10  # steps between readings of the loss and the clock; a GPU is waited for at each
COUNTED_STEP = 2  # bytes are counted in this step: the optimizer has states, gradients are alive
PROMPT = "\nclass "
SAMPLE_BYTES = 400


@dataclass(frozen=True)
class Settings:
    """One run. The defaults are the demo's: on two cores the loss clearly falls in a minute."""

    level: str = "baseline"
    model: ModelConfig = field(default_factory=ModelConfig)
    steps: int = 300
    batch: int = 4
    lr: float = 3e-3
    seed: int = 0
    device: str = "cpu"
    fp8_format: str = "hybrid"
    skip: tuple[str, ...] = ()
    # Further ones of fp8stack.initialize. The layers are so small that a GPU is faster in bfloat16, but what is
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
            model,
            optimizer,
            opt_level=settings.level,
            fp8_format=settings.fp8_format,
            skip=settings.skip,
            **settings.options,
        )

    # One tensor, since a list of small ones that live on keeps a CPU's heap from being reused.
    losses = torch.zeros(settings.steps, device=device)
    validation: list[tuple[int, float]] = []
    watch = Stopwatch(device, tokens_per_step=settings.batch * seq_len)
    steps = range(1, settings.steps + 1)
    progress = tqdm(steps, f"{settings.level:>8}", unit="step", disable=not show_progress)
    for step in progress:
        loss = compute_loss(model, next(stream), device)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step == COUNTED_STEP:
            bytes_per_parameter = memory.measure(model, optimizer).per_parameter()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses[step - 1] = loss.detach()

        if step % LOG_EVERY == 0 or step == settings.steps:
            watch.lap(step)
            pace = f"{watch.tokens_per_second:,.0f} tokens/s"
            progress.set_postfix_str(f"loss {loss.item():.3f}, {pace}")
        if step in validation_steps:
            validation.append((step, evaluate(model, held_out, device)))
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
    logging.disable(logging.INFO)  # fp8stack's card would describe the wrong model
    try:
        train(replace(settings, model=tiny, steps=2), text, show_progress=False)
    finally:
        logging.disable(logging.NOTSET)


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


# --- the command line -----------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        settings = choose_settings(options)
        text = corpus.load(options.data, settings.model.seq_len)
    except (OSError, ValueError) as error:
        parser.error(str(error))

    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker:
        run_worker(replace(settings, level=options.worker), text, options)
        return 0

    records = []
    for level in options.levels:
        Record.path(options.out, level).unlink(missing_ok=True)
        command = [sys.executable, __file__, *arguments, "--worker", level]
        if subprocess.run(command, check=False).returncode == 0:
            records.append(Record.load(options.out, level))
    return conclude(records, options)


def run_worker(settings: Settings, text: corpus.Corpus, options: argparse.Namespace) -> None:
    """Train one level in this process and leave its record for the parent; the last level writes."""
    rehearse(settings, text)
    model, record = train(settings, text)
    if settings.level == options.levels[-1]:
        record.sample = write_sample(model, settings)
    record.save(options.out)


def conclude(records: list[Record], options: argparse.Namespace) -> int:
    """Show what was trained and say in one line each what went wrong; the exit status."""
    if records:
        demo_report.print_table(records)
        demo_report.print_sample(records)
        print(f"report: {demo_report.write_html(records, options.out)}")
    failed = [level for level in options.levels if level not in {r.level for r in records}]
    problems = [f"{level} failed; its error is above" for level in failed]
    problems += find_deviations(records)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train one small GPT at several levels of fp8stack and compare them."
    )
    add = parser.add_argument
    add("--levels", nargs="+", choices=LEVELS, default=list(LEVELS), help="default: all of them")
    add("--size", choices=SIZES, default="demo", help="of model and run: %(default)s, or gpu")
    add("--steps", type=int, help="at least 2")
    add("--batch", type=int, help="windows per step")
    add("--seq-len", type=int, help="bytes per window")
    add("--lr", type=float, help="highest learning rate")
    add("--seed", type=int, default=0, help="of the weights, batches and sample (%(default)s)")
    add("--data", type=Path, help="text file or folder (Python's standard library)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if any")
    add("--fp8-format", choices=FP8_FORMATS, default="hybrid", help="of the GEMMs (%(default)s)")
    add("--skip", nargs="+", metavar="PATTERN", help="layers to leave as they are, such as head")
    add("--out", type=Path, default=Path("runs/demo"), help="folder for results (%(default)s)")
    add("--worker", choices=LEVELS, help=argparse.SUPPRESS)  # the child process of one level
    return parser


def choose_settings(options: argparse.Namespace) -> Settings:
    """The preset of `--size` with everything that was given on the command line."""
    preset = SIZES[options.size]
    given = {
        name: getattr(options, name)
        for name in ("steps", "batch", "lr", "seed", "fp8_format", "skip")
        if getattr(options, name) is not None
    }
    model = preset.model
    if options.seq_len is not None:
        model = replace(model, seq_len=options.seq_len)
    settings = replace(preset, **given, model=model, device=choose_device(options.device))
    rules = (
        ("--steps", settings.steps, 2),
        ("--batch", settings.batch, 1),
        ("--seq-len", model.seq_len, 1),
    )
    for option, value, least in rules:
        if value < least:
            raise ValueError(f"{option} {value}: must be {least} or more.")
    return settings


def choose_device(wish: str) -> str:
    present = torch.cuda.is_available()
    if wish == "cuda" and not present:
        raise ValueError(
            "--device cuda: PyTorch sees no CUDA device here. Check nvidia-smi and that PyTorch is "
            "a CUDA build, or use --device cpu."
        )
    return "cuda" if present and wish != "cpu" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
