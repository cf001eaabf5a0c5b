"""Train a small GPT on several ranks whose parameters FSDP2 shards, at O2 of fp8stack; resume from a checkpoint.

    PYTHONPATH=examples torchrun --nproc-per-node 2 examples/04_gpt_fsdp2.py --checkpoint runs/fsdp2

It runs over NCCL on GPUs, and over gloo on CPUs. A checkpoint may be loaded by another number of ranks.
"""

import argparse
from pathlib import Path

import corpus
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, ModelConfig
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8stack.integrations.fsdp import attach


def build(device: str):
    """Return a sharded model and its optimizer."""
    torch.manual_seed(0)
    model, mesh = GPT(ModelConfig()), init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = attach(model, optimizer, opt_level="O2")
    return model, optimizer


def contents(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--data", help="a text file or folder; Python's own library without it")
    parser.add_argument("--checkpoint", type=Path, help="a folder to resume from and save to")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model, optimizer = build(device)
    if args.checkpoint and args.checkpoint.exists():
        saved = contents(model, optimizer)
        dcp.load(saved, checkpoint_id=args.checkpoint)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )

    text = corpus.load(args.data, model.config.seq_len)
    windows = torch.Generator().manual_seed(dist.get_rank())
    stream = corpus.batches(text.train, args.batch, model.config.seq_len, windows)
    for step in range(1, args.steps + 1):
        tokens, targets = (half.to(device) for half in next(stream))
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps:
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean.item():.4f}", flush=True)
    if args.checkpoint:
        dcp.save(contents(model, optimizer), checkpoint_id=args.checkpoint)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
