"""Train a small GPT with Accelerate; resume from a checkpoint.

    PYTHONPATH=examples accelerate launch examples/plain/06_accelerate/train.py --checkpoint runs/accelerate

`accelerate config`, or options of `accelerate launch`, say on what: one GPU, several (DDP, FSDP2, DeepSpeed), or CPUs.
"""

import argparse
from pathlib import Path

import corpus
import torch
from accelerate import Accelerator
from gpt import GPT, ModelConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a process")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--data", help="a text file or folder; Python's own library without it")
    parser.add_argument("--checkpoint", type=Path, help="a folder to resume from and save to")
    args = parser.parse_args()
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(0)
    model = GPT(ModelConfig())
    seq_len = model.config.seq_len
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if args.checkpoint and args.checkpoint.exists():
        accelerator.load_state(str(args.checkpoint))

    text = corpus.load(args.data, seq_len)
    windows = torch.Generator().manual_seed(accelerator.process_index)
    stream = corpus.batches(text.train, args.batch, seq_len, windows)
    for step in range(1, args.steps + 1):
        for _ in range(args.accumulate):
            tokens, targets = (half.to(accelerator.device) for half in next(stream))
            with accelerator.accumulate(model):
                loss = model(tokens, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps:
            mean = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"step {step}: loss {mean.item():.4f}", flush=True)
    if args.checkpoint:
        accelerator.save_state(str(args.checkpoint))
    accelerator.end_training()


if __name__ == "__main__":
    main()
