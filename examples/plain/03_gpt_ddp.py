"""Train a small GPT on several ranks with torch's DistributedDataParallel; resume from a checkpoint.

    PYTHONPATH=examples torchrun --nproc-per-node 2 examples/plain/03_gpt_ddp.py --checkpoint runs/ddp.pt

It runs over NCCL on GPUs, and over gloo on CPUs.
"""

import argparse
from pathlib import Path

import corpus
import torch
import torch.distributed as dist
from gpt import GPT, ModelConfig
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--data", help="a text file or folder; Python's own library without it")
    parser.add_argument("--checkpoint", type=Path, help="a file to resume from and save to")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    model = GPT(ModelConfig()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    parallel = DistributedDataParallel(model)

    text = corpus.load(args.data, model.config.seq_len)
    windows = torch.Generator().manual_seed(dist.get_rank())
    stream = corpus.batches(text.train, args.batch, model.config.seq_len, windows)
    for step in range(1, args.steps + 1):
        tokens, targets = (half.to(device) for half in next(stream))
        with torch.autocast(device, torch.bfloat16):
            loss = parallel(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps:
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean.item():.4f}", flush=True)
    if args.checkpoint and dist.get_rank() == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
