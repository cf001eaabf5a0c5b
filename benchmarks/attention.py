"""How long does causal attention take, and what does it hold? Plain, SDPA's backends, TransformerEngine, flash-attn.

    python benchmarks/attention.py                                 # GPT-2's and Llama-3-8B's heads, 1k to 16k tokens
    python benchmarks/attention.py --model llama-4k --only 'sdpa*'
    python benchmarks/attention.py --device cpu --model tiny

fp8stack leaves attention in bfloat16, so a step in FP8 spends a larger part of its time here: this says which
implementation to choose. `forward` and `both` (with backward) are medians of device events, in ms; `GiB` is what a call
adds to the peak of allocated memory, its inputs and their gradients not counted; `TFLOP/s` are those of `both`, of the
causal half alone (2 products forward and 5 backward, of 2 * tokens^2 / 2 * dim each). `off` is the output's distance
from float32's on the first of the tokens, over its norm. What is not installed, or does not take a shape, is named at
the end and has no record.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import ROOT, add_choices, append_records, read_choices
from rich import box
from rich.console import Console
from rich.table import Table
from timing import time_steps
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8stack import capability

RESULTS = ROOT / "benchmarks" / "results" / "attention.jsonl"
CHECKED = 256  # tokens that are compared with float32
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of [batch, heads, tokens, dim] each
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    dim: int


MODELS = {
    "gpt2-1k": Shape(32, 12, 12, 1024, 64),
    "llama-2k": Shape(4, 32, 8, 2048, 128),
    "llama-4k": Shape(2, 32, 8, 4096, 128),
    "llama-16k": Shape(1, 32, 8, 16_384, 128),
    "tiny": Shape(2, 4, 2, 64, 16),
}


@dataclass(frozen=True)
class Variant:
    name: str
    make: Callable[[Shape], Attention]


def plain(shape: Shape) -> Attention:
    """Return attention as it is written in papers, which keeps [tokens, tokens] a head."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(shape.heads // shape.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) * shape.dim**-0.5
        tokens = q.shape[2]
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(later, -torch.inf).float().softmax(-1).to(v.dtype) @ v

    return attend


def sdpa(shape: Shape, backend: SDPBackend | None) -> Attention:
    shared = shape.heads != shape.kv_heads
    call = partial(functional.scaled_dot_product_attention, is_causal=True, enable_gqa=shared)
    if backend is None:
        return call

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return call(q, k, v)

    return attend


def flash_attn(shape: Shape) -> Attention:
    function = importlib.import_module("flash_attn").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y: Tensor = function(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)
        return y.transpose(1, 2)

    return attend


def transformer_engine(shape: Shape) -> Attention:
    module = capability.load_te().te.DotProductAttention(
        shape.heads, shape.dim, num_gqa_groups=shape.kv_heads, attn_mask_type="causal", qkv_format="bshd"
    )  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # as TransformerEngine's projections give them; it is not to pay for another layout
        y: Tensor = module(*(t.transpose(1, 2).contiguous() for t in (q, k, v)))
        return y.unflatten(-1, (shape.heads, shape.dim)).transpose(1, 2)

    return attend


VARIANTS = [
    Variant("plain", plain),
    Variant("sdpa, its choice", partial(sdpa, backend=None)),
    Variant("sdpa flash", partial(sdpa, backend=SDPBackend.FLASH_ATTENTION)),
    Variant("sdpa cudnn", partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION)),
    Variant("sdpa efficient", partial(sdpa, backend=SDPBackend.EFFICIENT_ATTENTION)),
    Variant("sdpa math", partial(sdpa, backend=SDPBackend.MATH)),
    Variant("flash-attn", flash_attn),
    Variant("TransformerEngine", transformer_engine),
]


def measure(variant: Variant, shape: Shape, options: argparse.Namespace) -> Numbers:
    cuda = options.device == "cuda"
    attend = variant.make(shape)
    q, k, v = make_inputs(shape, options.device)
    upstream = torch.randn_like(q)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    def both() -> None:
        for t in (q, k, v):
            t.grad = None
        attend(q, k, v).backward(upstream)

    both()  # compiles, chooses, allocates what is kept; gradients are there
    peak = None
    if cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        both()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    forward_ms = time_steps(forward, options.steps, cuda)[0]
    both_ms = time_steps(both, options.steps, cuda)[0]
    product = shape.batch * shape.heads * shape.tokens**2 * shape.dim  # 2 operations, half of them
    return {
        "forward_ms": forward_ms,
        "both_ms": both_ms,
        "peak_gib": peak,
        "tflops": 7 * product / both_ms / 1e9,
        "off": distance(attend, q, k, v),
    }


def make_inputs(shape: Shape, device: str) -> tuple[Tensor, ...]:
    """Return q, k, v as projections leave them: heads beside each other in each token's row."""
    torch.manual_seed(0)
    made = []
    for heads in (shape.heads, shape.kv_heads, shape.kv_heads):
        size = (shape.batch, shape.tokens, heads, shape.dim)
        t = torch.randn(size, device=device, dtype=torch.bfloat16).transpose(1, 2)
        made.append(t.detach().requires_grad_())
    return tuple(made)


@torch.no_grad()
def distance(attend: Attention, q: Tensor, k: Tensor, v: Tensor) -> float:
    first = slice(None), slice(None), slice(0, CHECKED)
    shared = q.shape[1] != k.shape[1]
    exact = functional.scaled_dot_product_attention(
        q[first].float(), k[first].float(), v[first].float(), is_causal=True, enable_gqa=shared
    )
    return ((attend(q, k, v)[first].float() - exact).norm() / exact.norm()).item()


def report(results: dict[str, Numbers], name: str, options: argparse.Namespace) -> None:
    shape = MODELS[name]
    table = Table("attention", title=f"{name}: {shape}", box=box.SIMPLE)
    for column in ("forward", "both", "TFLOP/s", "GiB", "off"):
        table.add_column(column, justify="right", no_wrap=True)
    records = []
    for variant, n in results.items():
        peak = "-" if n["peak_gib"] is None else f"{n['peak_gib']:.2f}"
        cells = (f"{n['forward_ms']:.3f}", f"{n['both_ms']:.3f}", f"{n['tflops']:,.0f}", peak)
        table.add_row(variant, *cells, f"{n['off']:.1e}")
        record = {"name": "attention", "variant": variant, "params": {"model": name, **vars(shape)}}
        records.append({**record, "metric": "both", "value": n["both_ms"], "unit": "ms", **n})
    append_records(options.output, records)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    parser.add_argument("--steps", type=int, default=20, help="timed calls of each")
    usual = [name for name in MODELS if name != "tiny"]
    options = read_choices(parser, arguments, MODELS, VARIANTS, lambda _: usual)
    failed = []
    for name in options.model:
        results: dict[str, Numbers] = {}
        for variant in options.variants:
            try:
                results[variant.name] = measure(variant, MODELS[name], options)
            except Exception as error:  # missing, refused, or too large
                why = (str(error).splitlines() or [""])[0][:100]
                print(f"{name}, {variant.name}: {type(error).__name__}: {why}", file=sys.stderr)
                failed.append(f"{name}, {variant.name}")
        report(results, name, options)
    print(json.dumps({"failed": failed}))
    return 0 if len(failed) < len(options.model) * len(options.variants) else 1


if __name__ == "__main__":
    sys.exit(main())
