"""How long is one optimizer step, and what does it hold? fp8stack and every installed peer, in one run.

    python benchmarks/optimizer_step.py --model llama-3.2-1b --only 'fp8stack*' 'te *'   # by default, everything
    python benchmarks/optimizer_step.py --plot docs/assets/optimizer_step.svg            # draws the latest run only

The parameters are the real tensor lists of models with random weights and gradients; no forward or backward runs.
`step ms` is the median of device events around steps queued one behind the other, so a step that the host is too slow
to feed costs what the host costs. `CPU ms` is the host's time in a step with nothing queued before it; `peak MiB` what
a step allocates beyond what is resident. Bytes, per parameter, are those of live tensors; `alloc` is what the
allocator handed out, with hidden buffers and rounding. State in host memory is not among them; a record has it as
`host`, with the GB/s over the bus and those of copies both ways at once. TB/s is the least that the format must move
(weight, master and state read and written once, gradient read once) over the step; `of copy` its ratio to a
device-to-device copy in the same run. Kernels are counted later, in another process: a profiler slows all launches
that follow it.

Limits: gradients stay the same from step to step, so nothing here speaks of accuracy. A list of a few ten megabytes
fits partly into the L2 cache and can beat the copy. Peers run with their defaults, but for the hyper-parameters.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

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
from timing import Numbers, Step, attempt, measure_bus, measure_copy, stopping_in_order, time_steps
from torch import Tensor, nn
from torch.optim import Optimizer

import fp8stack
from fp8stack.errors import ConfigError

RESULTS = ROOT / "benchmarks" / "results" / "optimizer_step.jsonl"
DEFAULT, TARGET = "fp8stack", "llama-3.2-1b"  # what is compared; the list that targets are for
QUICK = [DEFAULT, "fp8stack clipped", "fp8stack max_grad_norm", "fp8stack graph", "torch fused *"]
HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
OURS = fp8stack.optim.AdamW
MASTER_KEYS = ("remainder", "master", "error_bits")  # of fp8stack, TransformerEngine, flashoptim
PARTS = ("weight", "master", "grad", "state")
COLUMNS = {"step ms": "step_ms", f"/ {DEFAULT}": "ratio", "CPU ms": "cpu_ms", "kernels": "launches"}
COLUMNS |= {part: part for part in (*PARTS, "total")} | {"alloc": "allocated"}
COLUMNS |= {"peak MiB": "peak_extra_mib", "TB/s": "tb_s", "of copy": "of_copy"}
Shapes = list[tuple[int, ...]]
Parameters = list[nn.Parameter]


def llama(vocab: int, dim: int, layers: int, kv: int, ffn: int, tied: bool) -> Shapes:
    attention: Shapes = [(dim, dim), (kv, dim), (kv, dim), (dim, dim)]
    block: Shapes = [*attention, (ffn, dim), (ffn, dim), (dim, ffn), (dim,), (dim,)]
    return [(vocab, dim), *block * layers, (dim,), *([] if tied else [(vocab, dim)])]


def gpt2(vocab: int, dim: int, layers: int, context: int) -> Shapes:
    linears = [(3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim)]
    block: Shapes = [(dim,)] * 4 + [shape for s in linears for shape in (s, s[:1])]
    return [(vocab, dim), (context, dim), *block * layers, (dim,), (dim,)]


MODELS: dict[str, Shapes] = {
    "gpt2-124m": gpt2(50304, 768, 12, 1024),
    "llama-3.2-1b": llama(128256, 2048, 16, 512, 8192, tied=True),
    "llama-3-8b": llama(128256, 4096, 32, 1024, 14336, tied=False),
    "small-4000": [(256,), (64, 128)] * 2000,
    "tiny": [(64, 128), (128,), (96, 64), (16, 16)],  # for tests on a CPU
}

# --- configurations


@dataclass(frozen=True)
class Variant:
    """One configuration; the optimizer's class is named, not imported, so that a peer may be missing."""

    name: str
    states: str
    master: str
    grad: str
    weight: str = "bf16"
    module: str = "fp8stack.optim"
    kind: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    mode: str = "step"  # "clip", after clip_grad_norm_; "graph", replayed from a CUDA graph


def list_variants() -> Iterator[Variant]:
    default = ("8bit", "split24", "fp8")
    yield Variant(DEFAULT, *default)
    yield Variant("fp8stack clipped", *default, mode="clip")
    yield Variant("fp8stack max_grad_norm", *default, options={"max_grad_norm": 1.0})
    yield Variant("fp8stack graph", *default, mode="graph")
    yield Variant("fp8stack offload", *default, options={"offload": "cpu"})
    yield Variant("fp8stack Muon", *default, kind="Muon")
    yield Variant("fp8stack bitsandbytes", *default, module="fp8stack.optim.bitsandbytes")
    ours = "8bit/split24/bf16 fp8/split24/fp8 4bit/split24/fp8"
    for formats in f"{ours} fp8-lm/fp16/fp8 bf16/split32/fp8 fp32/fp32/fp8 8bit/none/fp8".split():
        weight = "fp32" if formats.startswith("fp32") else "bf16"
        yield Variant(f"fp8stack {formats}", *formats.split("/"), weight)
    for dtype in ("fp32", "bf16"):
        for how in ("fused", "foreach"):
            formats = (dtype, "none", dtype, dtype)
            yield Variant(f"torch {how} {dtype}", *formats, "torch.optim", "AdamW", {how: True})
    half = ("bf16", "bf16")  # gradient and weight
    yield Variant("torch Muon bf16", "bf16", "none", *half, "torch.optim", "Muon")
    yield Variant("bitsandbytes 8bit", "8bit", "none", *half, "bitsandbytes.optim", "AdamW8bit")
    for name in ("8bit", "4bit", "Fp8"):
        ao = ("torchao.optim", f"AdamW{name}", {"bf16_stochastic_round": True})
        yield Variant(f"torchao {name.lower()}", name.lower(), "none", *half, *ao)
    flash = ("flashoptim", "FlashAdamW", {"master_weight_bits": 24})
    yield Variant("flashoptim 24bit", "8bit", "24bit", *half, *flash)
    te = ("transformer_engine.pytorch.optimizers", "FusedAdam")
    master, f16 = {"master_weights": True}, torch.float16
    remainders = {**master, "store_param_remainders": True}
    fp8_lm = {"master_weight_dtype": f16, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": f16}
    yield Variant("te fp32", "fp32", "none", "fp32", "fp32", *te)
    yield Variant("te fp32 master", "fp32", "fp32", *half, *te, master)
    yield Variant("te remainders", "fp32", "remainder16", *half, *te, remainders)
    yield Variant("te fp8-lm", "fp8-lm", "fp16", *half, *te, {**master, **fp8_lm})  # uint8 is FP8


VARIANTS = list(list_variants())


def make_parameters(shapes: Shapes, variant: Variant, device: str) -> Parameters:
    """Return random parameters with gradients, drawn in their own dtype: no float32 copy of a list ever exists."""
    torch.manual_seed(0)
    dtype = torch.float32 if variant.weight == "fp32" else torch.bfloat16
    parameters = []
    for shape in shapes:
        p = nn.Parameter(torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02))
        p.grad = torch.empty_like(p.data).normal_(0, 1e-3)
        if variant.grad == "fp8" and p.ndim >= 2 and p.numel() >= 4096:  # as fp8stack does
            p.grad = fp8stack.BlockScaledTensor.quantize(p.grad)
        parameters.append(p)
    return parameters


def make_step(variant: Variant, parameters: Parameters) -> tuple[Optimizer, Step]:
    """Return the optimizer and what to call for one step; raise ConfigError if this mode cannot run here."""
    if variant.mode == "graph" and not parameters[0].is_cuda:
        raise ConfigError("a CUDA graph needs a GPU")
    kind = getattr(import_peer(variant.module), variant.kind)
    mine = issubclass(kind, fp8stack.optim.BlockwiseOptimizer)
    own = {"states": variant.states, "master": variant.master} if mine else {}
    if variant.kind == "Muon":
        return make_muon(kind, own, parameters)
    optimizer = kind(parameters, **HYPER, **own, **variant.options)
    if variant.mode == "clip":
        return optimizer, lambda: (nn.utils.clip_grad_norm_(parameters, 1.0), optimizer.step())
    if variant.mode == "step":
        return optimizer, optimizer.step
    optimizer.step()  # state is made and kernels are compiled outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return optimizer, graph.replay


def make_muon(kind: Any, own: Numbers, parameters: Parameters) -> tuple[Optimizer, Step]:
    """Return Muon for the hidden matrices, AdamW for embeddings, heads and vectors; torch's takes two optimizers."""
    hidden = [p for p in parameters if p.ndim == 2 and max(p.shape) < 32_000]
    rest = [p for p in parameters if not any(p is h for h in hidden)]
    options = {"lr": HYPER["lr"], "weight_decay": HYPER["weight_decay"]}
    if own:
        groups = [{"params": hidden}, {"params": rest, "algorithm": "adamw"}]
        optimizer = kind(groups, **options, **own)
        return optimizer, optimizer.step
    muon, adamw = kind(hidden, **options), torch.optim.AdamW(rest, **HYPER, fused=True)
    for p in rest:
        muon.state[p] = adamw.state[p]  # for its bytes to be counted
    return muon, lambda: (muon.step(), adamw.step())


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield `value`, or the tensors that a tensor subclass or an object of the optimizer's own consists of."""
    inner: Any = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, fp8stack.BlockScaledTensor):
        inner = value.parts()
    elif hasattr(value, "__tensor_flatten__"):
        inner = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    elif isinstance(value, Tensor):
        yield value
    elif hasattr(value, "__dict__"):  # flashoptim wraps codes and scales in a plain class
        inner = vars(value).values()
    for item in inner:
        yield from plain_tensors(item)


def count_bytes(parameters: Parameters, optimizer: Optimizer) -> Numbers:
    """Return bytes a parameter by PARTS and in total; a tensor that several parameters share counts once."""
    held: dict[tuple[int, int], str] = {}
    host = 0
    for p in parameters:
        parts = [("weight", p.data), ("grad", p.grad)]
        for key, value in optimizer.state.get(p, {}).items():
            parts.append(("master" if key.startswith(MASTER_KEYS) else "state", value))
        for part, value in parts:
            for tensor in plain_tensors(value):
                if tensor.device == p.device:
                    held.setdefault((tensor.data_ptr(), tensor.nbytes), part)
                elif tensor.ndim:  # not a step count
                    host += tensor.nbytes
    elements = sum(p.numel() for p in parameters)
    sizes = {part: sum(n for (_, n), of in held.items() if of == part) / elements for part in PARTS}
    return {**sizes, "total": sum(sizes.values()), "host": host / elements}


def measure(variant: Variant, model: str, options: argparse.Namespace) -> Numbers:
    """Measure one configuration; return step_ms and what a record's `extra` holds."""
    cuda, timed_only = options.device == "cuda", variant.mode == "graph"
    before, peak = torch.cuda.memory_allocated() if cuda else 0, None
    parameters = make_parameters(MODELS[model], variant, options.device)
    optimizer, step = make_step(variant, parameters)
    for _ in range(3):  # the first makes the state and compiles
        step()
    elements = sum(p.numel() for p in parameters)
    sizes = count_bytes(parameters, optimizer)
    sizes["allocated"] = (torch.cuda.memory_allocated() - before) / elements if cuda else None
    if cuda and not timed_only:
        torch.cuda.reset_peak_memory_stats()
        resident = torch.cuda.memory_allocated()
        step()
        peak = (torch.cuda.max_memory_allocated() - resident) / 2**20
    step_ms, cpu_ms, count = time_steps(step, options.steps, cuda)
    rate = (2 * sizes["total"] - sizes["grad"]) * elements / step_ms / 1e9
    numbers: Numbers = {
        "step_ms": step_ms,
        "cpu_ms": None if timed_only else cpu_ms,
        "launches": None,
    }
    if (
        cuda and sizes["host"]
    ):  # offloaded: what goes there and back, and what a copy of as much would take
        numbers["host_gb_s"] = 2 * sizes["host"] * elements / step_ms / 1e6
        numbers["bus_gb_s"] = measure_bus()
    return {**numbers, "bytes": sizes, "peak_extra_mib": peak, "tb_s": rate, "steps": count}


def count_kernels(variant: Variant, model: str) -> Numbers:
    """Return how many kernels, memcpy and memset aside, a step launches; for a process that measures no time."""
    _, step = make_step(variant, make_parameters(MODELS[model], variant, "cuda"))
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return {"launches": sum(event.get("cat") == "kernel" for event in events)}


def add_launches(results: dict[Variant, Numbers], model: str) -> None:
    """Count the kernels of all measured configurations, in one other process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        for variant, numbers in results.items():
            if "step_ms" in numbers and variant.mode != "graph":
                work = partial(attempt, partial(count_kernels, variant, model))
                numbers.update(attempt(lambda w=work: pool.submit(w).result()))


def show(results: dict[Variant, Numbers], ratios: dict[str, float], model: str) -> None:
    """Print a table of what was measured and a line for everything that was not."""
    title = f"{model}: {len(MODELS[model]):,} tensors, {sum(map(prod, MODELS[model])):,} parameters"
    table = Table("configuration", title=title, box=box.SIMPLE, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for variant, numbers in results.items():
        if "step_ms" in numbers:
            flat = {**numbers, **numbers["bytes"], "ratio": ratios.get(variant.name)}
            values = [flat[key] for key in COLUMNS.values()]
            cells = (f"{v:,.2f}" if isinstance(v, float) else f"{v or '-'}" for v in values)
            table.add_row(variant.name, *cells)
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table)
    for variant, numbers in results.items():
        if "note" in numbers:
            console.print(f"  {variant.name}: {numbers['note']}", highlight=False, markup=False)


def to_record(variant: Variant, model: str, numbers: Numbers) -> dict[str, Any]:
    library = variant.module.split(".")[0]
    params = {k: getattr(variant, k) for k in ("states", "master", "grad", "weight", "mode")}
    params |= {"n_tensors": len(MODELS[model]), "n_params": sum(map(prod, MODELS[model]))}
    params |= {"library": f"{library} {sys.modules[library].__version__}"}
    record = {"name": "optimizer_step", "variant": variant.name, "metric": "step_ms", "unit": "ms"}
    record |= {"params": {"model": model, **params}, "value": numbers["step_ms"]}
    return {**record, "extra": {k: value for k, value in numbers.items() if k != "step_ms"}}


def draw(records: Path, model: str, picture: Path) -> None:
    """Draw the step times of the latest run over `model` in `records`, the fastest on top."""
    rows = latest_run(records, model, lambda record: record["params"]["mode"] == "step")
    colors = ["tab:orange" if r["variant"].startswith(DEFAULT) else "0.7" for r in rows]
    labels = [f"{r['value']:.3g} ms, {r['extra']['bytes']['total']:.2f} B" for r in rows]
    draw_bars(
        rows, colors, labels, picture,
        title=f"{model}: one optimizer step", xscale="log", xlim=(1, 6 * rows[0]["value"]),
        xlabel="ms; and bytes per parameter on the GPU, gradient included",
    )  # fmt: skip


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    add = parser.add_argument
    add("--quick", dest="only", action="store_const", const=QUICK, help=f"only {QUICK}")
    add("--steps", type=int, default=20, help="timed steps; fewer if they are very slow")
    add("--plot", type=Path, metavar="PATH", help="only draw the latest run in --output")
    default = list(MODELS)[:4]
    return read_choices(
        parser, arguments, MODELS, VARIANTS, lambda given: [TARGET] if given.plot else default
    )


@stopping_in_order()
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.plot:
        draw(options.output, options.model[0], options.plot)
        return 0
    copy, summary = measure_copy(options.device), {}
    print(f"copy within the device, read plus written: {copy:.3f} TB/s")
    for model in options.model:
        results: dict[Variant, Numbers] = {}
        for variant in options.variants:
            numbers = attempt(partial(measure, variant, model, options))
            if "tb_s" in numbers:
                numbers |= {"copy_tb_s": copy, "of_copy": numbers["tb_s"] / copy}
            results[variant] = numbers
            print(model, variant.name, numbers.get("step_ms") or numbers["note"], file=sys.stderr)
        if options.device == "cuda":
            add_launches(results, model)
        done = {v: n for v, n in results.items() if "step_ms" in n}
        append_records(options.output, [to_record(v, model, n) for v, n in done.items()])
        base = [n["step_ms"] for v, n in done.items() if v.name == DEFAULT]
        summary[model] = {v.name: n["step_ms"] / ms for v, n in done.items() for ms in base}
        show(results, summary[model], model)
    for name, ratio in summary.get(TARGET, {}).items():
        if not name.startswith(DEFAULT):
            print(f"{TARGET}: {name} takes {ratio:.2f} times as long as {DEFAULT}")
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
