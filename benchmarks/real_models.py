"""How long is a step of the models that people have, and what does it hold? transformers' own classes, as they are.

Two are diffusers': a UNet and a DiT, with the squared error of the noise that they predict as their loss.

    python benchmarks/real_models.py                                          # all models, all variants: an hour
    python benchmarks/real_models.py --model llama-1b,vit-l --only bf16 O2
    python benchmarks/real_models.py --device cpu --model tiny --steps 2

Models have random weights, float32, and sdpa attention. A step is forward, backward, `torch.nn.utils.clip_grad_norm_`
and the optimizer. "bf16" is autocast over float32 weights with torch's fused AdamW, "pure bf16" bfloat16 weights with
the same. Levels are `initialize(model, optimizer, level)` and nothing else; "all in FP8" is select="all", "not fused"
fuse=False, "fused loss" fuse_loss=True, with head="forward-bf16" where no other is said; "graphed" adds
`fp8stack.nn.graph(model)`. "torchao" and "te" are the Linear layers of torchao (tensorwise scales) and
TransformerEngine (current scaling), under bf16's autocast and optimizer. "compiled" is `model.compile()`, "by block"
`compile()` of each element of the outermost ModuleLists.

Each variant has a process of its own, which is stopped after `--limit` seconds. In it bf16 takes turns with the
variant, since the speed of a host changes from process to process and with time by more than variants differ: `× bf16`
is the median of the ratios of neighbouring turns.

With `--micro-batches` a step adds up the gradients of the batch several times; all but the last backward count as
forward in the host's parts.

`ms` is the median of device events around steps queued one behind the other, so a step that the host is too slow to
feed costs what the host costs. `host` is the host's time in a step that begins with an idle device, and in its parts;
`bf16 host` is bf16's in the same process. `GiB` is the peak of a step, which torch does not count for graphs. `FP8` is
the share of the elements of matrices, embeddings apart, that multiplied in FP8, which is not known of what is compiled.
`compile s` is how much longer than a step the first two compiled ones took, `graphs` how many graphs Dynamo made: one,
unless the model breaks.

Limits: one batch, over and over, and random weights, so mixtures of experts are as balanced as chance makes them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import ROOT, add_choices, append_records, import_peer, read_choices
from memory import HYPER
from models import swap_te
from rich import box
from rich.console import Console
from rich.table import Table
from timing import Numbers, attempt, stopping_in_order, time_steps
from torch import Tensor, nn
from torch._dynamo.utils import counters

import fp8stack
from fp8stack import capability
from fp8stack.levels import LEVELS

RESULTS = ROOT / "benchmarks" / "results" / "real_models.jsonl"
BASE = "bf16"
WARM_UP = (
    5  # steps: kernels are compiled, states made, graphs captured, the allocator finds its blocks
)
TURNS = 10
PARTS = ("forward", "backward", "clip", "step")


@dataclass(frozen=True)
class Real:
    """A model of transformers' or diffusers', by the names of its class and its config's, and a batch of it."""

    model: str
    config: str  # "": the class takes the sizes itself, as diffusers' do
    sizes: dict[str, Any] = field(hash=False)
    small: dict[str, Any] = field(hash=False)  # sizes for tests on a CPU
    batch: int
    length: int = 0  # tokens of a sequence
    kind: str = "text"  # "text", "images", "pairs" of texts, "audio", or "noise"

    @property
    def tokens(self) -> int:
        """How many tokens, patches or frames a step has: the rows of most products."""
        if self.kind == "images":
            side = self.sizes["image_size"] // self.sizes["patch_size"]
            return self.batch * (side**2 + 1)
        if self.kind == "noise":
            return self.batch * (self.sizes["sample_size"] // self.sizes.get("patch_size", 1)) ** 2
        return self.batch * self.length

    @property
    def library(self) -> str:
        return "transformers" if self.config else "diffusers"

    def shrunk(self) -> Real:
        """Return the same model with few and small layers."""
        return replace(self, sizes=self.sizes | self.small, batch=2, length=16 * bool(self.length))

    def build(self) -> nn.Module:
        """Return the model, with random weights."""
        library = importlib.import_module(self.library)
        if not self.config:
            return Denoiser(getattr(library, self.model)(**self.sizes))
        config = getattr(library, self.config)(**self.sizes, attn_implementation="sdpa")
        built: nn.Module = getattr(library, self.model)(config)
        return built

    def draw(self, model: Any, device: str) -> dict[str, Tensor]:
        """Return a batch, by the names of the arguments of the model's forward."""
        config, n = model.config, self.batch
        if self.kind == "images":
            shape = (n, 3, config.image_size, config.image_size)
            labels = torch.randint(config.num_labels, (n,), device=device)
            return {"pixel_values": torch.randn(shape, device=device), "labels": labels}
        if self.kind == "noise":
            shape = (n, config.in_channels, config.sample_size, config.sample_size)
            steps = torch.randint(1000, (n,), device=device)
            sample = torch.randn(shape, device=device)
            noise = torch.randn((n, config.out_channels, *shape[2:]), device=device)
            given = {"noise": noise, "timestep": steps}
            if not self.length:
                return given | {"hidden_states": sample, "class_labels": steps}
            text = torch.randn((n, self.length, config.cross_attention_dim), device=device)
            return given | {"sample": sample, "encoder_hidden_states": text}
        ids = torch.randint(config.vocab_size, (n, self.length), device=device)
        if self.kind == "audio":
            frames = 2 * config.max_source_positions
            sound = torch.randn((n, config.num_mel_bins, frames), device=device)
            return {"input_features": sound, "labels": ids}
        labels = ids[:, : self.length // 4].contiguous() if self.kind == "pairs" else ids
        return {"input_ids": ids, "labels": labels}


class Loss(NamedTuple):
    loss: Tensor


class Denoiser(nn.Module):
    """A model of diffusers' that returns its loss, as transformers' do: the squared error of the noise it predicts."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, noise: Tensor, **given: Tensor) -> Loss:
        return Loss((self.model(**given).sample - noise).square().mean())


LLAMA = ("LlamaForCausalLM", "LlamaConfig")
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "head_dim": 16,
}  # fmt: skip
NO_TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
MODELS = {
    "llama-1b": Real(  # Llama-3.2-1B, whose head is the embedding
        *LLAMA, {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256, "tie_word_embeddings": True,
        }, SMALL, batch=4, length=2048,
    ),
    "llama-8b-4": Real(  # four layers of Llama-3-8B's width
        *LLAMA, {
            "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 4, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32_000,
        }, SMALL, batch=4, length=2048,
    ),
    "gpt2": Real(
        "GPT2LMHeadModel", "GPT2Config", {}, {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, **NO_TOKENS},
        batch=16, length=1024,
    ),
    "vit-l": Real(
        "ViTForImageClassification", "ViTConfig", {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
            "image_size": 224, "patch_size": 16, "num_labels": 1000,
        }, {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
            "image_size": 32, "num_labels": 16},
        batch=64, kind="images",
    ),
    "qwen3-moe": Real(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {
            "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 768, "num_hidden_layers": 8,
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32,
            "num_experts_per_tok": 4, "vocab_size": 32_000,
        }, SMALL | {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2},
        batch=8, length=1024,
    ),
    "t5-base": Real(
        "T5ForConditionalGeneration", "T5Config",
        {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0},
        {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 96},
        batch=16, length=512, kind="pairs",
    ),
    "whisper-small": Real(
        "WhisperForConditionalGeneration", "WhisperConfig", {
            "d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 12,
            "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
        }, {
            "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 96,
            "max_source_positions": 32, "decoder_start_token_id": 1, **NO_TOKENS,
        },
        batch=16, length=128, kind="audio",
    ),
    "unet-sd15": Real(  # Stable Diffusion 1.5's
        "UNet2DConditionModel", "",
        {"block_out_channels": (320, 640, 1280, 1280), "cross_attention_dim": 768, "sample_size": 64},
        {"block_out_channels": (32, 32, 32, 32), "cross_attention_dim": 48, "sample_size": 8, "layers_per_block": 1},
        batch=8, length=77, kind="noise",
    ),
    "dit-xl": Real(  # DiT-XL/2 for images of 256 × 256
        "DiTTransformer2DModel", "",
        {"num_attention_heads": 16, "attention_head_dim": 72, "num_layers": 28, "out_channels": 8, "sample_size": 32,
         "patch_size": 2},
        {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8},
        batch=64, kind="noise",
    ),
}  # fmt: skip
MODELS["tiny"] = MODELS["llama-1b"].shrunk()


@dataclass(frozen=True)
class Variant:
    """One configuration; its library is named, not imported, so that a peer may be missing."""

    name: str
    level: str = ""  # of fp8stack
    library: str = ""  # "torchao" or "te"
    pure: bool = False  # bfloat16 weights
    compiled: str = ""  # "whole" or "blocks"
    graphed: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)  # of initialize


def list_variants() -> list[Variant]:
    eager = [
        Variant(BASE),
        Variant("pure bf16", pure=True),
        *(Variant(level, level) for level in LEVELS),
    ]
    eager += [
        Variant("O2, all in FP8", "O2", options={"select": "all"}),
        Variant("O2, not fused", "O2", options={"fuse": False}),
        Variant("O2, head fp8", "O2", options={"head": "fp8"}),
        Variant("O2, head bf16", "O2", options={"head": "bf16"}),
        Variant("O2, current", "O2", options={"fp8_recipe": "current"}),
        Variant("O2, current, head fp8", "O2", options={"fp8_recipe": "current", "head": "fp8"}),
        Variant("O2, fast sums", "O2", options={"fp8_fast_accum": True}),
        Variant(
            "O2, accurate",
            "O2",
            options={"first_last": 2, "precision_for": {"*.self_attn.*": "bf16"}},
        ),
        Variant("O2, rowwise", "O2", options={"fp8_recipe": "rowwise"}),
        Variant("O2, blockwise", "O2", options={"fp8_recipe": "blockwise"}),
        Variant("O2, wgrad bf16", "O2", options={"wgrad": "bf16"}),
        Variant("O2, fused loss", "O2", options={"fuse_loss": True}),
        Variant("O2, fused loss, head bf16", "O2", options={"fuse_loss": True, "head": "bf16"}),
        Variant("O2, fused loss, head fp8", "O2", options={"fuse_loss": True, "head": "fp8"}),
        Variant("bf16 graphed", graphed=True),
        Variant("O2 graphed", "O2", graphed=True),
    ]
    eager += [Variant(library, library=library) for library in ("torchao", "te")]
    one_by_one = [v for v in eager if not v.graphed and "head" not in v.options]
    whole = [replace(v, name=f"{v.name} compiled", compiled="whole") for v in one_by_one]
    blocks = [replace(v, name=f"{v.name} by block", compiled="blocks") for v in one_by_one]
    return [*eager, *whole, *blocks]


VARIANTS = list_variants()


# --- what is measured


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost ModuleLists."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else blocks_of(child)


def convert(model: nn.Module, variant: Variant, device: str) -> tuple[Any, Any, Callable[[], Any]]:
    """Return model and optimizer as a variant has them, and the context of a forward."""
    scope: Any = contextlib.nullcontext
    if variant.pure:
        model = model.bfloat16()
    else:
        scope = partial(torch.autocast, device, torch.bfloat16)
    if variant.library == "torchao":
        float8 = import_peer("torchao.float8")
        config = replace(
            float8.Float8LinearConfig.from_recipe_name("tensorwise"), emulate=device == "cpu"
        )
        float8.convert_to_float8_training(model, config=config)
    elif variant.library == "te":
        library = capability.load_te()
        swap_te(model, library.te, ())
        outer, recipe = scope, library.recipe.Float8CurrentScaling()
        scope = partial(both, outer, partial(library.te.autocast, enabled=True, recipe=recipe))
    optimizer: Any = torch.optim.AdamW(model.parameters(), fused=device == "cuda" or None, **HYPER)
    if variant.level:
        model, optimizer = fp8stack.initialize(model, optimizer, variant.level, **variant.options)
    return model, optimizer, scope


@contextlib.contextmanager
def both(outer: Callable[[], Any], inner: Callable[[], Any]) -> Iterator[None]:
    with outer(), inner():
        yield


def share_in_fp8(model: nn.Module, level: str) -> float:
    """Return which share of the elements of matrices, embeddings apart, multiplied in FP8 in the last forward.

    level: "" for layers of a peer, all of which do. Products by bare parameters count as if they did.
    """
    tables = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}

    def elements(modules: Iterable[nn.Module]) -> int:
        found = {p for m in modules for p in m.parameters(recurse=False) if p.ndim > 1}
        return sum(p.numel() for p in found - tables)

    if not level:
        peers = ("torchao.", "transformer_engine.")
        inside = (m for m in model.modules() if type(m).__module__.startswith(peers))
        return elements(inside) / max(elements(model.modules()), 1)
    report = fp8stack.get_report(model)
    few, taken = (map(model.get_submodule, names) for names in (report.few_rows, report.converted))
    return report.share * (1 - elements(few) / max(elements(taken), 1))


class Contender:
    """A variant of a model, which takes steps, and what they took."""

    def __init__(self, variant: Variant, name: str, options: argparse.Namespace) -> None:
        self.cuda, real = options.device == "cuda", MODELS[name]
        self.micro_batches = options.micro_batches
        others = torch.cuda.memory_allocated() if self.cuda else 0
        torch.manual_seed(0)
        with torch.device(options.device):
            built = real.build()
        self.batch = real.draw(built, options.device)
        if variant.pure:
            self.batch = {
                k: v.bfloat16() if v.is_floating_point() else v for k, v in self.batch.items()
            }
        self.model, self.optimizer, self.scope = convert(built, variant, options.device)
        self.marks: list[list[float]] = []  # of a step: the host's clock before and after each part
        self.turns: list[float] = []  # ms of a step in each
        self.alone: list[list[float]] = []  # the marks of steps that began with an idle device
        if variant.graphed and self.cuda:
            if hasattr(self.model.config, "use_cache"):
                self.model.config.use_cache = False  # blocks that fill a cache are not captured
            fp8stack.nn.graph(self.model)
        self._run(2)  # layers learn in eager mode what they share
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        first = 0.0
        if variant.compiled:
            backend = "inductor" if self.cuda else "eager"  # needs no C++ compiler on a CPU
            blocks = blocks_of(self.model) if variant.compiled == "blocks" else (self.model,)
            for module in blocks:
                module.compile(backend=backend)
            first = self._run(2)
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()  # of steps, not of the compiler's trials
        self._run(WARM_UP)
        # A graph's memory counts as allocated while it is captured only.
        counted = self.cuda and not variant.graphed
        self.peak = (torch.cuda.max_memory_allocated() - others) / 2**30 if counted else None
        self.share = None if variant.compiled else share_in_fp8(self.model, variant.level)
        self.compile_s = max(first - self._run(2), 0.0) if variant.compiled else None

    def step(self) -> Tensor:
        """Take a step; note the host's clock, and return the loss."""
        mark = [time.perf_counter()]
        for _ in range(self.micro_batches - 1):
            with self.scope():
                earlier = self.model(**self.batch).loss
            earlier.backward()
        with self.scope():
            loss: Tensor = self.model(**self.batch).loss
        mark.append(time.perf_counter())
        loss.backward()
        mark.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        mark.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark.append(time.perf_counter())
        self.marks.append(mark)
        return loss.detach()

    def _run(self, count: int) -> float:
        """Return the seconds of some steps, the first of which may wait for nothing."""
        start = time.perf_counter()
        for _ in range(count):
            loss = self.step()
        loss.item()  # waits for the device
        return time.perf_counter() - start

    def take_turn(self, count: int) -> None:
        """Time steps: so many that wait for the device, and as many that do not."""
        self._run(2)
        self.marks.clear()
        step_ms, _, count = time_steps(self.step, count, self.cuda)
        self.turns.append(step_ms)
        self.alone += self.marks[:count]

    def host(self) -> tuple[float, dict[str, float]]:
        """Return the median ms of a step on the host, and of its parts."""
        parts = {
            part: statistics.median(1e3 * (m[i + 1] - m[i]) for m in self.alone)
            for i, part in enumerate(PARTS)
        }
        return statistics.median(1e3 * (m[-1] - m[0]) for m in self.alone), parts


def measure(variant: Variant, name: str, options: argparse.Namespace) -> Numbers:
    """Return what a variant takes, and bf16 in turns with it."""
    base = Contender(Variant(BASE), name, options)
    own = base if variant.name == BASE else Contender(variant, name, options)
    for turn in range(TURNS):
        for contender in dict.fromkeys((own, base) if turn % 2 else (base, own)):
            contender.take_turn(-(-options.steps // TURNS))
    host_ms, parts = own.host()
    ratios = [a / b for a, b in zip(base.turns, own.turns, strict=True)]
    return {
        "step_ms": statistics.median(own.turns),
        "speedup": statistics.median(ratios),
        "speedups": [min(ratios), max(ratios)],
        "base_ms": statistics.median(base.turns),
        "base_host_ms": base.host()[0],
        "host_ms": host_ms,
        "host_parts": parts,
        "steps": len(own.alone),
        "peak_gib": own.peak,
        "in_fp8": own.share,
        "compile_s": own.compile_s,
        "graphs": counters["stats"]["unique_graphs"] if variant.compiled else None,
        "loss": own.step().item(),
        "parameters": sum(p.numel() for p in own.model.parameters()),
    }


# --- one process each


def _write(variant: Variant, name: str, options: argparse.Namespace, path: str) -> None:
    """Run in a process of its own: write the numbers, or a note on why there are none."""
    Path(path).write_text(json.dumps(attempt(lambda: measure(variant, name, options))))


def apart(variant: Variant, name: str, options: argparse.Namespace) -> Numbers:
    """Return what `measure` does in a process of its own, or a note; it has `options.limit` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "numbers.json")
        # The server has imported transformers, which takes longer than to measure. It must not import diffusers:
        # that counts the GPUs, after which a fork of the process can use none.
        context = get_context("forkserver")
        context.set_forkserver_preload(["__main__", "transformers"])
        process = context.Process(target=_write, args=(variant, name, options, str(path)))
        process.start()
        try:
            process.join(options.limit)
        finally:
            late = process.is_alive()
            process.kill()
            process.join()
        if late:
            return {"note": f"not ready after {options.limit:g} s"}
        if not path.exists():
            return {"note": f"the process ended with status {process.exitcode}"}
        numbers: Numbers = json.loads(path.read_text())
        return numbers


def to_record(variant: str, n: Numbers, name: str, options: argparse.Namespace) -> dict[str, Any]:
    real = MODELS[name]
    params = {"model": name, "batch": real.batch, "tokens": real.tokens * options.micro_batches}
    if options.micro_batches > 1:
        params["model"] += f", {options.micro_batches} micro-batches"
    record = {"name": "real_models", "variant": variant, "params": params, "metric": "step"}
    rest = {k: v for k, v in n.items() if k != "step_ms"}
    return {**record, "value": n["step_ms"], "unit": "ms", **rest}


def report(results: dict[str, Numbers], name: str) -> None:
    compiled = results.get(f"{BASE} compiled", {}).get("speedup")
    table = Table("variant", title=f"{name}: a whole step", box=box.SIMPLE)
    heads = (
        "ms",
        "× bf16",
        "× compiled",
        "bf16 host",
        "host",
        *PARTS,
        "GiB",
        "FP8 %",
        "compile s",
        "graphs",
        "loss",
    )
    for column in heads:
        table.add_column(column, justify="right", no_wrap=True)
    for variant, n in results.items():
        cells = [
            n["step_ms"],
            n["speedup"],
            compiled and n["speedup"] / compiled,
            n["base_host_ms"],
            n["host_ms"],
            *n["host_parts"].values(),
        ]
        share = None if n["in_fp8"] is None else 100 * n["in_fp8"]
        cells += [n["peak_gib"], share, n["compile_s"], n["graphs"], n["loss"]]
        table.add_row(variant, *("-" if c is None else f"{c:,.2f}" for c in cells))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds that a variant may take"
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=1,
        help="batches whose gradients are added up in a step",
    )
    every = [name for name in MODELS if name != "tiny"]
    return read_choices(parser, arguments, MODELS, VARIANTS, lambda _: every)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    notes: dict[str, str] = {}
    with stopping_in_order():
        for name in options.model:
            results: dict[str, Numbers] = {}
            for variant in options.variants:
                found = attempt(partial(apart, variant, name, options))
                if "note" in found:
                    notes[f"{name}, {variant.name}"] = found["note"]
                else:  # recorded at once: the next may be stopped
                    results[variant.name] = found
                    append_records(options.output, [to_record(variant.name, found, name, options)])
                told = found.get("note") or f"{found['step_ms']:.1f} ms"
                print(f"{name}, {variant.name}: {told}", file=sys.stderr, flush=True)
            report(results, name)
    print(json.dumps({"notes": notes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
