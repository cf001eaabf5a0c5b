"""How long do forward and backward take, and what do they hold? bf16, TransformerEngine, torchao, fp8stack in one run.

    python benchmarks/train_step.py --model llama --only 'bf16*' 'native*' 'te *'    # by default, everything
    python benchmarks/train_step.py --model gpt2 --vocab 50257 --only 'bf16*' 'native auto*'
    python benchmarks/train_step.py --plot docs/assets/train_step.svg                # draws the latest run only

Two models: `llama`, four blocks of Llama-3-8B's size over 8192 tokens, and `gpt2`, GPT-2 124M over 32,768. Weights are
bfloat16; embedding and head stay so in every configuration; the loss is cross entropy in float32. Only the Linear
layers of the blocks differ, and in "fused" ones the norms and activations before them.

`ms` is the median of device events around steps queued one behind the other, so a step that the host is too slow to
feed costs what the host costs. `CPU ms` is the host's time in a step with nothing queued before it (one of over a
thousand kernels waits for the queue too). `GiB` is the peak within a step, weights and gradients included. `× eager`
and `× compiled` are bf16's time over this one's; bf16 is measured again at the end, to show how far the GPU drifted.
`loss` and `grad`, the norm of the embedding's gradient, are off from bf16's by as much: a check, not an accuracy.
Models are compiled after an eager step, in which layers learn what they share.

Limits: no optimizer runs. Peers run with their defaults; TransformerEngine keeps no codes of weights then.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import models
import torch
from common import (
    ROOT,
    add_choices,
    append_records,
    draw_bars,
    import_peer,
    latest_run,
    read_choices,
)
from rich import box
from rich.console import Console
from rich.table import Table
from timing import Numbers, attempt, measure_copy, stopping_in_order, time_steps
from torch import Tensor, nn

import fp8stack
import fp8stack.nn
from fp8stack.errors import ConfigError
from fp8stack.kernels.reference.delayed_state import SEEDED

RESULTS = ROOT / "benchmarks" / "results" / "train_step.jsonl"
MODELS = models.MODELS
EAGER, COMPILED = "bf16 eager", "bf16 compile"  # what all others are compared with
WARM_UP = SEEDED + 4  # steps: the first compile, choose GEMMs and fill histories
GEMM = (8192, 14_336, 4096)  # m, n, k of the product that stands for what the GPU can do
COLUMNS = {"ms": "step_ms", "× eager": "of_eager", "× compiled": "of_compiled", "CPU ms": "cpu_ms"}
COLUMNS |= {"GiB": "peak_gib", "/ eager": "peak_ratio", "loss": "loss", "off": "loss_off"}
COLUMNS |= {"grad off": "grad_off"}
COLORS = {"torch": "0.7", "transformer_engine": "tab:green", "torchao": "tab:blue"}
Scope = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Variant:
    """One configuration; its library is named, not imported, so that a peer may be missing."""

    name: str
    library: str = "torch"
    recipe: str = ""  # in the library's words
    compiled: bool = False
    fused: bool = False  # norms and activations in one kernel with the casts behind them
    level: str = "O0"
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # more of initialize


def list_variants() -> list[Variant]:
    te, ao, ours = "transformer_engine", "torchao", "fp8stack"
    baselines = [Variant(EAGER), Variant(COMPILED, compiled=True)]
    compute = {"compute": "native", "select": "all"}
    fast = {**compute, "fp8_fast_accum": True}
    native = [Variant(f"native {r}", ours, r, options=compute) for r in ("tokenwise", *RECIPES)]
    native += [
        Variant("native fused", ours, "current", fused=True, options=compute),
        Variant("native fused, tokenwise", ours, "tokenwise", fused=True, options=compute),
        Variant("native fused, delayed", ours, "delayed", fused=True, options=compute),
        Variant("native current, fast sums", ours, "current", options=fast),
        Variant("native fused, delayed, fast sums", ours, "delayed", fused=True, options=fast),
        Variant("native auto", ours, "current", options={**compute, "select": "auto"}),
    ]
    rest = [Variant("native O1", ours, "current", level="O1", options=compute)]
    on_te = [Variant(f"fp8stack te {r}", ours, r, options={"compute": "te"}) for r in RECIPES]
    rest += [*on_te, replace(on_te[0], name=f"{on_te[0].name} compile", compiled=True)]
    rest += [Variant(f"te {r}", te, r) for r in RECIPES]
    rest += [Variant(f"te {r}, fused LN", te, r, fused=True) for r in RECIPES]
    torchao = [Variant(f"torchao {r}", ao, r) for r in ("tensorwise", "rowwise")]
    native, torchao = (
        [*eager, *(replace(v, name=f"{v.name} compile", compiled=True) for v in eager)]
        for eager in (native, torchao)
    )
    # torchao last: it changes the code that Inductor makes for everybody
    return [*baselines, *native, *rest, *torchao]


RECIPES = {
    "current": "Float8CurrentScaling",
    "delayed": "DelayedScaling",
    "blockwise": "Float8BlockScaling",
}  # ours, and what TransformerEngine calls them
VARIANTS = list_variants()

# --- configurations


def convert(model: nn.Module, variant: Variant, device: str) -> tuple[nn.Module, Scope]:
    """Bring `model` into a configuration; return it, and the context that its forward pass needs."""
    if variant.library == "fp8stack":
        use_fp8stack(model, variant)
    elif variant.library == "torchao":
        use_torchao(model, variant, device)
    elif variant.library == "transformer_engine":
        return model, use_te(model, variant)
    return model, contextlib.nullcontext


def use_fp8stack(model: nn.Module, variant: Variant) -> None:
    # O1 wants an optimizer to hand its gradients to; this one never steps.
    optimizer = torch.optim.SGD(model.parameters()) if variant.level != "O0" else None
    names = [name for name, _ in model.named_children()]
    options = {"fp8_recipe": variant.recipe, "fuse": variant.fused, **variant.options}
    skip = [name for name in models.PLAIN if name in names]
    fp8stack.initialize(model, optimizer, variant.level, skip=skip, **options)
    if options["compute"] == "te" and "transformer_engine.pytorch" not in sys.modules:
        raise ConfigError('compute="te" was not followed: TransformerEngine is not even loaded')


def use_torchao(model: nn.Module, variant: Variant, device: str) -> None:
    float8 = import_peer("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(variant.recipe)
    config = replace(config, emulate=device == "cpu")
    float8.convert_to_float8_training(
        model, module_filter_fn=lambda _, name: name not in models.PLAIN, config=config
    )


def use_te(model: nn.Module, variant: Variant) -> Scope:
    te = import_peer("transformer_engine.pytorch")
    recipes = import_peer("transformer_engine.common.recipe")
    quantization = import_peer("transformer_engine.pytorch.quantization")
    # Delayed scaling's update goes over the histories of all models there ever were.
    quantization.FP8GlobalStateManager.reset()
    (models.fuse_te if variant.fused else models.swap_te)(model, te)
    recipe = getattr(recipes, RECIPES[variant.recipe])()
    return lambda: te.autocast(enabled=True, recipe=recipe)


# --- measuring


def measure(variant: Variant, config: models.Config, options: argparse.Namespace) -> Numbers:
    """Measure one configuration; return step_ms and what a record's `extra` holds."""
    cuda, last = options.device == "cuda", []
    before, peak = torch.cuda.memory_allocated() if cuda else 0, None
    model, batch = models.make_model(config, options.device)
    model, scope = convert(model, variant, options.device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with scope():
            loss = model(*batch)
        loss.backward()
        last[:] = [loss.detach()]

    start = time.perf_counter()
    if variant.compiled:
        step()
        model.compile(backend="inductor" if cuda else "eager")  # needs no C++ compiler on a CPU
    for _ in range(WARM_UP):
        step()
    numbers: Numbers = {"loss": last[0].item(), "warm_up_s": time.perf_counter() - start}
    numbers["grad_norm"] = model.embed.weight.grad.float().norm().item()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    step_ms, cpu_ms, count = undisturbed(partial(time_steps, step, options.steps, cuda))
    numbers |= {"step_ms": step_ms, "cpu_ms": cpu_ms, "peak_gib": peak, "steps": count}
    if variant.library == "fp8stack":  # what ran in FP8, in its own words
        numbers["card"] = str(fp8stack.get_report(model))
    return numbers


def undisturbed(work: Callable[[], Any]) -> Any:
    """Return what `work` returns, without a garbage collection in the middle of it."""
    gc.collect()
    gc.disable()
    try:
        return work()
    finally:
        gc.enable()


def make_gemm(
    m: int,
    n: int,
    k: int,
    device: str,
    formats: tuple[torch.dtype, torch.dtype] | None = None,  # FP8; bfloat16 without
    fast: bool = True,  # fewer accumulator bits on Hopper
) -> Callable[[], Tensor]:
    """Return what multiplies a [m, k] and a [n, k] matrix, both laid out along k, to a bfloat16 [m, n]."""
    a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    if formats is None:
        return partial(torch.mm, a, b.t())
    a8, b8 = a.to(formats[0]), b.to(formats[1])
    one = torch.ones((), device=device)
    scales = {"scale_a": one, "scale_b": one}
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
    return partial(torch._scaled_mm, a8, b8.t(), **scales, **options)


def measure_device(device: str) -> Numbers:
    """Return the TB/s of a copy and the TFLOP/s of a large product in bf16 and FP8, in this run."""
    cuda = device == "cuda"
    m, n, k = GEMM if cuda else (64, 96, 64)
    rates: Numbers = {"copy_tb_s": measure_copy(device)}
    e4m3 = torch.float8_e4m3fn
    for name, formats in {"bf16": None, "fp8": (e4m3, e4m3)}.items():
        work = make_gemm(m, n, k, device, formats)
        time_steps(work, 5, cuda)
        rates[f"{name}_tflop_s"] = 2e-9 * m * n * k / time_steps(work, 50, cuda)[0]
    torch.cuda.empty_cache()  # does nothing without CUDA
    print("copy {:.3f} TB/s, {} GEMM: bf16 {:.0f}, FP8 {:.0f} TFLOP/s".format(
        rates["copy_tb_s"], "×".join(map(str, (m, k, n))), *list(rates.values())[1:]
    ))  # fmt: skip
    return rates


# --- output


def compare(results: dict[Variant, Numbers]) -> None:
    """Add to each measured configuration what it is of bf16, where that was measured."""
    done = {v.name: n for v, n in results.items() if "step_ms" in n}
    eager, compiled = done.get(EAGER), done.get(COMPILED)
    for numbers in done.values():
        if eager:
            numbers["of_eager"] = eager["step_ms"] / numbers["step_ms"]
            numbers["peak_ratio"] = numbers["peak_gib"] and numbers["peak_gib"] / eager["peak_gib"]
            numbers["loss_off"] = numbers["loss"] / eager["loss"] - 1
            numbers["grad_off"] = numbers["grad_norm"] / eager["grad_norm"] - 1
        if compiled:
            numbers["of_compiled"] = compiled["step_ms"] / numbers["step_ms"]


def show(results: dict[Variant, Numbers], model: str, config: models.Config) -> None:
    """Print a table of what was measured and a line for everything that was not."""
    tokens = config.batch * config.sequence
    title = f"{model}: forward and backward, {tokens:,} tokens, vocabulary {config.vocab:,}"
    table = Table("configuration", title=title, box=box.SIMPLE, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for variant, numbers in results.items():
        if "step_ms" in numbers:
            values = {key: numbers.get(key) for key in COLUMNS.values()}
            form = {"loss": "{:.4f}", "loss_off": "{:+.2%}", "grad_off": "{:+.2%}"}
            cells = (
                "-" if v is None else form.get(k, "{:.2f}").format(v) for k, v in values.items()
            )
            table.add_row(variant.name, *cells)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for variant, numbers in results.items():
        if "note" in numbers:
            console.print(f"  {variant.name}: {numbers['note']}", highlight=False, markup=False)
        if "again_ms" in numbers:
            drift = numbers["again_ms"] / numbers["step_ms"] - 1
            print(f"  {variant.name} at the end: {numbers['again_ms']:.2f} ms ({drift:+.1%})")
    by_time = sorted((n["step_ms"], v.name, v) for v, n in results.items() if "step_ms" in n)
    for compiled in (False, True):
        fastest: dict[str, str] = {}  # of each library
        for ms, name, variant in by_time:
            if variant.compiled == compiled:
                fastest.setdefault(variant.library, f"{name} {ms:.2f} ms")
        print(f"  fastest {'compiled' if compiled else 'eager'}: {', '.join(fastest.values())}")


def to_record(
    variant: Variant, model: str, config: models.Config, numbers: Numbers
) -> dict[str, Any]:
    library = f"{variant.library} {sys.modules[variant.library].__version__}"
    params = {"model": model, "vocab": config.vocab, "batch": config.batch}
    params |= {"sequence": config.sequence, "library": library, "level": variant.level}
    params |= {key: getattr(variant, key) for key in ("recipe", "compiled", "fused")}
    record = {"name": "train_step", "variant": variant.name, "metric": "step_ms", "unit": "ms"}
    record |= {"params": {**params, **variant.options}, "value": numbers["step_ms"]}
    return {**record, "extra": {k: value for k, value in numbers.items() if k != "step_ms"}}


def draw(records: Path, model: str, picture: Path) -> None:
    """Draw the times of the latest run over `model` in `records`, the fastest on top."""
    rows = latest_run(records, model)
    colors = [COLORS.get(r["params"]["library"].split()[0], "tab:orange") for r in rows]
    peaks = [r["extra"]["peak_gib"] for r in rows]
    memory = ["" if peak is None else f", {peak:.1f} GiB" for peak in peaks]
    labels = [f"{r['value']:.3g} ms{m}" for r, m in zip(rows, memory, strict=True)]
    draw_bars(
        rows, colors, labels, picture,
        title=f"{model}: forward and backward", xlim=(0, 1.4 * rows[0]["value"]), xlabel="ms; and the peak of memory",
    )  # fmt: skip


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    add = parser.add_argument
    add("--vocab", type=int, help="of the models, instead of their own")
    add("--steps", type=int, default=20, help="timed steps; fewer if they are very slow")
    add("--limit", type=float, default=float("inf"), help="seconds to begin configurations in")
    add("--plot", type=Path, metavar="PATH", help="only draw the latest run in --output")
    default = ["llama", "gpt2"]
    return read_choices(
        parser, arguments, MODELS, VARIANTS, lambda given: default[:1] if given.plot else default
    )


@stopping_in_order()
def main(arguments: list[str] | None = None) -> int:
    options, started = parse(arguments), time.monotonic()
    if options.plot:
        draw(options.output, options.model[0], options.plot)
        return 0
    rates, summary = measure_device(options.device), {}
    for model in options.model:
        config = models.resize(MODELS[model], options.vocab)
        results: dict[Variant, Numbers] = {}
        again = [v for v in options.variants if v.name in (EAGER, COMPILED)]
        for variant in [*options.variants, *again]:
            work = partial(measure, variant, config, options)
            if time.monotonic() - started > options.limit:
                numbers = {"note": f"not begun: --limit {options.limit:g} seconds were over"}
            else:
                numbers = attempt(work)
            known = results.setdefault(variant, numbers)
            if known is not numbers and "step_ms" in numbers:
                known["again_ms"] = numbers["step_ms"]
            print(model, variant.name, numbers.get("step_ms") or numbers["note"], file=sys.stderr)
        compare(results)
        done = {v: {**n, **rates} for v, n in results.items() if "step_ms" in n}
        records = [to_record(v, model, config, n) for v, n in done.items()]
        append_records(options.output, records)
        show(results, model, config)
        keys = ("step_ms", "of_eager", "of_compiled", "peak_gib")
        summary[model] = {v.name: {key: n.get(key) for key in keys} for v, n in done.items()}
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
