"""The hooks that make gradients FP8: attaching, existing gradients, removal, and stock DDP around them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_same_bits
from torch import nn

from fp8stack import BlockScaledTensor
from fp8stack.comm import GradientHandle
from fp8stack.formats import E4M3
from fp8stack.kernels.reference.quantize import quantize_blocks

TESTS = Path(__file__).resolve().parents[1]


def test_a_fresh_gradient_becomes_its_blocks_at_once():
    layer = nn.Linear(256, 64, bias=False)
    x = torch.randn(8, 256)
    layer(x).sum().backward()
    expected = quantize_blocks(layer.weight.grad, E4M3)
    layer.zero_grad()
    handle = GradientHandle()
    handle.attach([layer.weight], {layer.weight: "weight"})
    layer(x).sum().backward()
    assert isinstance(layer.weight.grad, BlockScaledTensor)
    for part, value in zip(layer.weight.grad.parts(), expected, strict=True):
        assert_same_bits(part.view(torch.uint8), value.view(torch.uint8))
    handle.remove()
    assert type(layer.weight.grad) is torch.Tensor
    layer.zero_grad()
    layer(x).sum().backward()
    assert type(layer.weight.grad) is torch.Tensor


def test_gradients_that_exist_are_taken_along_and_frozen_parameters_left():
    layer = nn.Linear(256, 64)
    layer.weight.grad = torch.randn(64, 256)
    layer.bias.requires_grad_(False)
    handle = GradientHandle()
    handle.attach(layer.parameters(), {})
    handle.attach(layer.parameters(), {})  # twice is once
    assert isinstance(layer.weight.grad, BlockScaledTensor)
    assert len(layer.weight._post_accumulate_grad_hooks) == 1
    assert not layer.bias._post_accumulate_grad_hooks


WORKER = """
import json, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, sys.argv[1])
from helpers import TinyLM, batch
import fp8stack

rank, folder, level = int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
torch.manual_seed(0)
model = TinyLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
if level != "baseline":
    model, optimizer = fp8stack.initialize(model, optimizer, level)
parallel = DistributedDataParallel(model)
losses = []
for step in range(20):
    optimizer.zero_grad()
    if step % 5 == 3:
        with parallel.no_sync():
            parallel(*batch(1000 + 2 * step + rank)).backward()
    loss = parallel(*batch(2 * step + rank))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
weights = torch.cat([p.detach().float().flatten() for p in model.parameters()])
both = [torch.empty_like(weights) for _ in range(2)]
dist.all_gather(both, weights)
result = {"losses": losses, "same": torch.equal(*both)}
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(result, file)
dist.barrier()
os._exit(0)  # torch's threads sometimes abort a process that ends in order
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_stock_ddp_trains_and_ranks_stay_identical(level, tmp_path):
    """Stock DDP reduces in full precision what the hook has rounded; its ranks must not drift apart."""
    results = {}
    for name in ("baseline", level):
        folder = tmp_path / name
        folder.mkdir()
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(TESTS), str(rank), str(folder), name],
                env={**os.environ, "FP8STACK_QUIET": "1"},
            )
            for rank in range(2)
        ]
        assert [p.wait(timeout=120) for p in processes] == [0, 0]
        results[name] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert all(r["same"] for r in results[level])
    baseline, ours = (results[name][0]["losses"] for name in ("baseline", level))
    assert ours[-1] < 0.2 * ours[0]
    assert abs(ours[-1] - baseline[-1]) < 0.01 * baseline[0]
