"""How long do transformers' experts take in FP8 and in bfloat16? The GPU's time of forward and backward.

    python benchmarks/experts.py                    # all shapes and numbers of tokens: two minutes
    python benchmarks/experts.py --tokens 8192

The experts are Qwen3-MoE's class with bfloat16 weights, as at O2, under bf16's autocast. "bf16" is transformers' own
`grouped_mm`. Both ways are captured in a CUDA graph, so the host's time does not count. Tokens choose experts at
random, all with equal weights.

`products` is what the six grouped products take alone, on codes that lie ready, and `casts` what the bytes of the
casts, permutations and sums take at the speed of a copy: FP8's time is to be near the sum of both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from common import ROOT, append_records
from layer_shapes import time_graph
from timing import measure_copy
from torch import Tensor, nn

import fp8stack
from fp8stack.kernels.reference.rows import rows_needed

RESULTS = ROOT / "benchmarks" / "results" / "experts.jsonl"
SHAPES = {  # features, hidden, experts, experts of a token
    "Qwen3-MoE of 32 experts": (1024, 768, 32, 4),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Mixtral-8x7B": (4096, 14_336, 8, 2),
}
TOKENS = (64, 256, 1024, 4096, 8192, 16_384)


def build(features: int, hidden: int, experts: int, count: int) -> nn.Module:
    """Return a layer of experts with random bfloat16 weights, on the GPU."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=features, moe_intermediate_size=hidden, num_experts=experts, num_experts_per_tok=count
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        made: nn.Module = Qwen3MoeExperts(config).bfloat16()
    for p in made.parameters():
        nn.init.normal_(p, std=0.02)
    return nn.Sequential(made)


def time_layer(layer: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> float:
    """Return the µs of forward and backward."""
    gradient = torch.randn_like(x)
    leaves = [x, weights, *layer.parameters()]

    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            y = layer[0](x, index, weights)  # type: ignore[index]
        return torch.autograd.grad(y, leaves, gradient)

    return time_graph(step)


def time_products(rows: int, features: int, hidden: int, experts: int) -> float:
    """Return the µs of the six products alone, of groups of equal size."""
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (
        rows // experts // 16 * 16
    )
    ends[-1] = rows

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)

    def of_rows(k: int, n: int) -> Any:
        a, b = draw(rows, k), draw(experts, n, k).mT
        scales = torch.ones(rows, device="cuda"), torch.ones(experts, n, device="cuda")
        return lambda: multiply(a, b, *scales)

    def of_weights(m: int, n: int) -> Any:
        a, b = draw(m, rows), draw(n, rows).t()
        scales = torch.ones(experts * m, device="cuda"), torch.ones(experts * n, device="cuda")
        return lambda: multiply(a, b, *scales)

    def multiply(a: Tensor, b: Tensor, *scales: Tensor) -> Tensor:
        how: Any = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return torch._scaled_grouped_mm(a, b, *scales, **how)

    both = features, 2 * hidden
    made = [
        of_rows(*both),
        of_rows(hidden, features),
        of_rows(*both[::-1]),
        of_rows(features, hidden),
    ]
    made += [of_weights(2 * hidden, features), of_weights(features, hidden)]
    return time_graph(lambda: [run() for run in made])


def error_of_sums(fast: bool) -> float:
    """Return the relative error of a grouped product of E4M3 codes of normal numbers, against float64, in the sum's
    own order of magnitude: 4,096 summands, of which a result in bfloat16 loses 2^-9."""
    a, b = (torch.randn(size, 4096, device="cuda").to(torch.float8_e4m3fn) for size in (256, 128))
    scales = torch.ones(256, device="cuda"), torch.ones(1, 128, device="cuda")
    ends = torch.tensor([256], device="cuda", dtype=torch.int32)
    how: Any = {"offs": ends, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
    found = torch._scaled_grouped_mm(a, b[None].mT, *scales, **how).double()
    exact = a.double() @ b.double().T
    return float((found - exact).norm() / exact.norm())


def bytes_of_casts(tokens: int, rows: int, features: int, hidden: int, experts: int) -> int:
    """Return what is read and written besides by the products, each tensor once for each kernel that takes it."""
    weights = 3 * experts * features * hidden
    forward = (2 + 2 + 1) * tokens * features + 3 * rows * features + (2 + 1) * weights
    forward += (4 + 4 + 1) * rows * hidden + 2 * (rows + tokens) * features
    backward = (2 + 2 + 1) * tokens * features + 3 * rows * features + (2 + 1) * weights
    backward += (6 + 6 + 5) * rows * hidden + 2 * (rows + tokens) * features
    return forward + backward


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    speed, records = measure_copy("cuda"), []
    for name, (features, hidden, experts, count) in SHAPES.items():
        torch.manual_seed(0)
        plain = build(features, hidden, experts, count)
        layer = build(features, hidden, experts, count)
        fp8stack.initialize(layer, None, "O0", select="all")
        for tokens in options.tokens:
            x = torch.randn(
                tokens, features, device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            index = torch.rand(tokens, experts, device="cuda").topk(count)[1]
            weights = torch.full(index.shape, 1 / count, device="cuda", requires_grad=True)
            rows = rows_needed(tokens * count, experts)
            found = {
                "bf16": time_layer(plain, x, index, weights), "fp8": time_layer(layer, x, index, weights),
                "products": time_products(rows, features, hidden, experts),
                "casts": bytes_of_casts(tokens, rows, features, hidden, experts) / speed / 1e6,
            }  # fmt: skip
            told = " ".join(f"{key} {us:9.1f}" for key, us in found.items())
            ratio = found["fp8"] / (found["products"] + found["casts"])
            print(
                f"{name:20} {tokens:6} tokens: {told}  x bf16 {found['bf16'] / found['fp8']:.2f}, x floor {ratio:.2f}"
            )
            params = {"model": name, "tokens": tokens}
            records.append({
                "name": "experts", "variant": "fp8", "params": params, "metric": "forward and backward",
                "value": found["fp8"], "unit": "us", **found,
            })  # fmt: skip
    for fast in (False, True):
        error = error_of_sums(fast)
        print(f"sums {'fast' if fast else 'precise'}: relative error {error:.2e}")
        records.append({
            "name": "sums_of_groups", "variant": "fast" if fast else "precise", "params": {"summands": 4096},
            "metric": "relative error", "value": error, "unit": "",
        })  # fmt: skip
    append_records(options.output, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
