"""Train a small GPT the way torchtitan trains large ones, at O2 of fp8stack; resume from a checkpoint.

    PYTHONPATH=examples torchrun --nproc-per-node 2 examples/04_gpt_titan.py --compile

Meta device, activation checkpointing, torch.compile, FSDP2, micro-batches, clipping, sharded checkpoints.
"""

import argparse
from pathlib import Path

import corpus
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, ModelConfig
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8stack.integrations.fsdp import attach


def build(device: str, compiles: bool):
    with torch.device("meta"):
        model = GPT(ModelConfig())
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = block = checkpoint_wrapper(block)
        block.compile(disable=not compiles)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy).to_empty(device=device)
    torch.manual_seed(0)
    model.initialize_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return attach(model, optimizer, opt_level="O2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--data", help="a text file or folder; Python's own library without it")
    parser.add_argument("--checkpoint", type=Path, help="to resume from and save to")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model, optimizer = build(device, args.compile)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20))
    if args.checkpoint and args.checkpoint.exists():
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=args.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

    text = corpus.load(args.data, model.config.seq_len)
    windows = torch.Generator().manual_seed(dist.get_rank())
    stream = corpus.batches(text.train, 1, model.config.seq_len, windows)
    for step in range(1, args.steps + 1):
        for last in (False, True):  # two micro-batches
            model.set_requires_gradient_sync(last)
            loss = model(*(half.to(device) for half in next(stream)))
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if args.checkpoint:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=args.checkpoint)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
