"""At which shapes is an FP8 layer faster than a bf16 one? The GPU's time of forward and backward, shape by shape.

    python benchmarks/layer_shapes.py                      # all shapes, two minutes
    python benchmarks/layer_shapes.py --rows 8192 12608

A layer has bfloat16 weights, as at O2, and runs under bf16's autocast. Both ways are captured in a CUDA graph, so the
host's time does not count. `share` layers read one input, as the projections of attention do; FP8 casts it once.

`gain` is how many µs FP8 saves a layer; `nn/select.py` has a formula for it. Limits: random numbers, and an L2 cache
that nothing else uses, which holds small operands from one replay to the next.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import ROOT, append_records
from torch import Tensor, nn

from fp8stack.levels import Recipe
from fp8stack.nn.casts import InputCodes, Products
from fp8stack.nn.linear import fp8_matmul

RESULTS = ROOT / "benchmarks" / "results" / "layer_shapes.jsonl"
ROWS = (256, 1024, 2048, 4096, 8192, 12_608, 16_384, 32_768)
SIZES = (  # in_features, out_features, layers that share an input
    (512, 512, 1), (512, 512, 3), (768, 768, 1), (768, 768, 3), (768, 3072, 1), (3072, 768, 1),
    (1024, 1024, 1), (1024, 1024, 3), (1024, 4096, 1), (4096, 1024, 1), (1280, 1280, 3), (1280, 5120, 1),
    (1536, 1536, 1), (1536, 6144, 1), (2048, 512, 1), (2048, 2048, 1), (2048, 2048, 3), (2048, 8192, 1),
    (8192, 2048, 1), (4096, 1024, 3), (4096, 4096, 1), (4096, 14_336, 1), (14_336, 4096, 1), (768, 50_257, 1),
    (2048, 128_256, 1),
)  # fmt: skip
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


def measure(
    rows: int, k: int, n: int, share: int, x_dtype: torch.dtype, bias: bool
) -> dict[str, Any]:
    """Return µs a layer of both ways."""
    leaf = torch.randn(rows, k, device="cuda", dtype=x_dtype, requires_grad=True)
    weights = [
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(share)
    ]
    biases = [
        torch.randn(n, device="cuda", requires_grad=True) if bias else None for _ in range(share)
    ]
    grad = torch.randn(rows, n, device="cuda", dtype=torch.bfloat16)
    inputs = InputCodes()
    products = [
        Products(Recipe(level="O2"), device=leaf.device, inputs=inputs) for _ in range(share)
    ]
    trained = [leaf, *weights, *(b for b in biases if b is not None)]

    def step(multiply: Callable[..., Tensor]) -> None:
        x = leaf.view_as(leaf)  # leaves are cast by each layer
        with torch.autocast("cuda", torch.bfloat16):
            outputs = [
                multiply(x, w, b, p) for w, b, p in zip(weights, biases, products, strict=True)
            ]
        torch.autograd.grad(outputs, trained, [grad] * share)

    def bf16(x: Tensor, w: Tensor, b: Tensor | None, _: Products) -> Tensor:
        return nn.functional.linear(x, w, b)

    times = {
        "bf16_us": time_graph(lambda: step(bf16)) / share,
        "fp8_us": time_graph(lambda: step(lambda *a: fp8_matmul(*a, True))) / share,
    }
    return {**times, "gain_us": times["bf16_us"] - times["fp8_us"]}


def list_cells(rows: list[int]) -> list[tuple[int, int, int, int, torch.dtype, bool]]:
    bf16, fp32 = torch.bfloat16, torch.float32
    cells = [
        (m, *size, bf16, False) for m, size in product(rows, SIZES) if m * size[1] < 2**31 + 2**29
    ]
    if rows == list(ROWS):
        cells += [
            (m, *s, d, b)
            for m in (2048, 12_608)
            for s in SIZES[6:10]
            for d, b in ((fp32, False), (fp32, True), (bf16, True))
        ]
        cells += [(m, *s, bf16, False) for m in ODD for s in (SIZES[6], SIZES[8], SIZES[15])]
    return cells


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    records = []
    for rows, k, n, share, x_dtype, bias in list_cells(options.rows):
        try:
            found = measure(rows, k, n, share, x_dtype, bias)
        except torch.OutOfMemoryError:
            continue
        finally:
            torch.cuda.empty_cache()
        params = {"rows": rows, "k": k, "n": n, "share": share, "x": str(x_dtype)[6:], "bias": bias}
        print(*params.values(), *(f"{v:.1f}" for v in found.values()), flush=True)
        records.append({
            "name": "layer_shapes", "variant": "current", "params": params, "metric": "forward and backward",
            "value": found["bf16_us"] / found["fp8_us"], "unit": "× bf16", **found,
        })  # fmt: skip
    append_records(options.output, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
