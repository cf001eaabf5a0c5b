"""At which shapes is an FP8 layer faster than a bf16 one? The GPU's time of forward and backward, shape by shape.

    python benchmarks/layer_shapes.py                      # all shapes in all ways, some twelve minutes
    python benchmarks/layer_shapes.py --rows 8192 12608 --ways alone

A layer has bfloat16 weights, as at O2, and runs under bf16's autocast. It is captured in a CUDA graph, so the host's
time does not count. `share` layers read one input, as the projections of attention do; FP8 casts it once. Ways:

- alone.
- after-a-norm, of FEW_ROWS: torch.compile sees the layer and an RMSNorm of float32 in front of it, whose output in
  bfloat16 costs it nothing where the layer wants that.
- forward-bf16, of FEW_ROWS too: a head, whose output is in bfloat16 and whose gradient has block scales.
- mlp, and compiled-mlp, of FEW_ROWS: a feed-forward that is fused, with an RMSNorm in front of it; GELU where one layer
  reads the norm's output, SwiGLU where two do. Its µs are those of all its layers.

`gain` is how many µs FP8 saves a layer; `nn/select.py` has a formula for it. Limits: random numbers, and an L2 cache
that nothing else uses, which holds small operands from one replay to the next.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from common import ROOT, append_records
from torch import Tensor, nn

import fp8stack
from fp8stack.levels import PRECISIONS, Recipe
from fp8stack.nn.casts import InputCodes, Products
from fp8stack.nn.linear import fp8_matmul
from fp8stack.nn.mlp import FusedMLP

RESULTS = ROOT / "benchmarks" / "results" / "layer_shapes.jsonl"
ROWS = (256, 1024, 2048, 4096, 8192, 12_608, 16_384, 32_768)
FEW_ROWS = 4096, 8192, 16_384, 32_768  # of the other ways
WAYS = "alone", "after-a-norm", "forward-bf16", "mlp", "compiled-mlp"
ALONE, AFTER_A_NORM, HEAD, MLP, COMPILED_MLP = WAYS
SIZES = (  # in_features, out_features, layers that share an input
    (512, 512, 1), (512, 512, 3), (768, 768, 1), (768, 768, 3), (768, 3072, 1), (3072, 768, 1),
    (1024, 1024, 1), (1024, 1024, 3), (1024, 4096, 1), (4096, 1024, 1), (1280, 1280, 3), (1280, 5120, 1),
    (1536, 1536, 1), (1536, 6144, 1), (2048, 512, 1), (2048, 2048, 1), (2048, 2048, 3), (2048, 8192, 1),
    (8192, 2048, 1), (4096, 1024, 3), (4096, 4096, 1), (4096, 14_336, 1), (14_336, 4096, 1), (768, 50_257, 1),
    (2048, 128_256, 1),
)  # fmt: skip
NORMED = (
    (768, 768, 3), (768, 3072, 1), (1024, 1024, 3), (1024, 4096, 1), (2048, 512, 1), (2048, 2048, 3),
    (2048, 8192, 2), (4096, 4096, 3), (4096, 14_336, 2),
)  # fmt: skip
MLPS = (768, 3072, 1), (1024, 4096, 1), (2048, 8192, 1), (2048, 8192, 2), (4096, 14_336, 2)
HEADS = (768, 50_304), (2048, 32_000), (2048, 128_256), (4096, 32_000), (4096, 128_256)
# Tokens of a text, patches of an image, frames of audio; and batches of such.
ODD = 77, 197, 1500, 1501, 4728, 8200, 8201, 12_609


def time_graph(step: Callable[[], Any], replays: int = 15) -> float:
    """Return the median µs of a replay of what `step` does on the GPU."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)


def time_step(
    run: Callable[..., Any],
    leaf: Tensor,
    trained: list[Tensor],
    grads: list[Tensor],
    compiled: bool,
) -> float:
    """Return the µs of `run`, compiled or not, of a leaf, and of its backward to what is trained."""
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, dynamic=False)
    # a view, since leaves are cast by each layer
    return time_graph(lambda: torch.autograd.grad(run(leaf.view_as(leaf)), trained, grads))


class Cell(NamedTuple):
    """A layer, or a feed-forward, in one of the ways."""

    rows: int
    k: int  # in_features
    n: int
    share: int = 1
    x: torch.dtype = torch.bfloat16
    bias: bool = False
    how: str = ALONE


def measure(cell: Cell, device: str = "cuda") -> dict[str, Any]:
    """Return µs a layer in bfloat16 and in FP8."""
    rows, k, n, share = cell[:4]
    leaf = torch.randn(rows, k, device=device, dtype=cell.x, requires_grad=True)
    weights = [
        torch.randn(n, k, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(share)
    ]
    biases = [
        torch.randn(n, device=device, requires_grad=True) if cell.bias else None
        for _ in range(share)
    ]
    grad = torch.randn(rows, n, device=device, dtype=torch.bfloat16)
    inputs, in_bf16 = InputCodes(), PRECISIONS.get(cell.how, "")
    products = [
        Products(Recipe(level="O2"), device=leaf.device, inputs=inputs, in_bf16=in_bf16)
        for _ in range(share)
    ]
    trained = [leaf, *weights, *(b for b in biases if b is not None)]

    def forward(multiply: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
        with torch.autocast(device, torch.bfloat16):
            if cell.how == AFTER_A_NORM:
                x = nn.functional.rms_norm(x, (k,))
            return [multiply(x, w, b, p) for w, b, p in zip(weights, biases, products, strict=True)]

    def bf16(x: Tensor, w: Tensor, b: Tensor | None, _: Products) -> Tensor:
        return nn.functional.linear(x, w, b)

    def fp8(x: Tensor, w: Tensor, b: Tensor | None, own: Products) -> Tensor:
        return fp8_matmul(x, w, b, own, True)

    times = {}
    for name, multiply in {"bf16_us": bf16, "fp8_us": fp8}.items():
        run, compiled = partial(forward, multiply), cell.how == AFTER_A_NORM
        times[name] = time_step(run, leaf, trained, [grad] * share, compiled) / share
    return {**times, "gain_us": times["bf16_us"] - times["fp8_us"]}


class FeedForward(nn.Module):
    """down(GELU(up(x))), or with a gate down(SiLU(gate(x)) × up(x))."""

    def __init__(self, features: int, hidden: int, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(features, hidden, bias=False) if gated else None
        self.up = nn.Linear(features, hidden, bias=False)
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up(x)
        if self.gate is None:
            return cast(Tensor, self.down(nn.functional.gelu(up)))
        return cast(Tensor, self.down(nn.functional.silu(self.gate(x)) * up))


def measure_mlp(cell: Cell, device: str = "cuda") -> dict[str, Any]:
    """Return µs of a feed-forward in bfloat16 and in FP8."""
    leaf = torch.randn(cell.rows, cell.k, device=device, requires_grad=True)
    grad = torch.randn(cell.rows, cell.k, device=device, dtype=torch.bfloat16)
    times = {}
    for name in ("bf16_us", "fp8_us"):
        mlp = FeedForward(cell.k, cell.n, cell.share > 1).to(device, torch.bfloat16)
        if name == "fp8_us":
            fp8stack.initialize(mlp, None, "O0", select="all", compute="native")
            fp8stack.nn.fuse(mlp)  # on a CPU; a GPU has done it
            if not isinstance(mlp, FusedMLP):
                raise RuntimeError("the feed-forward was not fused")
        run, compiled = partial(_after_a_norm, mlp, device), cell.how == COMPILED_MLP
        times[name] = time_step(run, leaf, [leaf, *mlp.parameters()], [grad], compiled)
    return {**times, "gain_us": times["bf16_us"] - times["fp8_us"]}


def _after_a_norm(mlp: FeedForward, device: str, x: Tensor) -> Tensor:
    with torch.autocast(device, torch.bfloat16):
        return cast(Tensor, mlp(nn.functional.rms_norm(x, (x.shape[-1],))))


def list_cells(rows: list[int], ways: list[str]) -> list[Cell]:
    fp32, few = torch.float32, [m for m in rows if m in FEW_ROWS]
    alone = [Cell(m, *size) for m, size in product(rows, SIZES) if m * size[1] < 2**31 + 2**29]
    if rows == list(ROWS):
        alone += [
            Cell(m, *s, d, b)
            for m in (2048, 12_608)
            for s in SIZES[6:10]
            for d, b in ((fp32, False), (fp32, True), (torch.bfloat16, True))
        ]
        alone += [Cell(m, *s) for m in ODD for s in (SIZES[6], SIZES[8], SIZES[15])]
    normed = [Cell(m, *s, fp32, how=AFTER_A_NORM) for m, s in product(few, NORMED)]
    heads = [
        Cell(m, *s, x=d, how=HEAD)
        for m, s, d in product(few, HEADS, (torch.bfloat16, fp32))
        if m * s[1] < 2**31 + 2**29
    ]
    mlps = [Cell(m, *s, fp32, how=how) for how, m, s in product((MLP, COMPILED_MLP), few, MLPS)]
    return [cell for cell in (*alone, *normed, *heads, *mlps) if cell.how in ways]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    for cell in list_cells(options.rows, options.ways):
        try:
            found = (measure_mlp if cell.how in (MLP, COMPILED_MLP) else measure)(cell)
        except torch.OutOfMemoryError:
            continue
        finally:
            torch.cuda.empty_cache()
        params = {**cell._asdict(), "x": str(cell.x)[6:]}
        way = params.pop("how")
        print(way, *params.values(), *(f"{v:.1f}" for v in found.values()), flush=True)
        record = {
            "name": "layer_shapes", "variant": way, "params": params, "metric": "forward and backward",
            "value": found["bf16_us"] / found["fp8_us"], "unit": "× bf16", **found,
        }  # fmt: skip
        append_records(options.output, [record])
    return 0


if __name__ == "__main__":
    sys.exit(main())
