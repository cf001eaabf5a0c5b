"""Train a small GPT under DeepSpeed's ZeRO; resume from a checkpoint.

    PYTHONPATH=examples deepspeed examples/plain/05_deepspeed/train.py --deepspeed_config zero2.json

zero1.json, zero2.json and zero3.json lie beside this file. torchrun starts it as well, and it runs on CPUs.
"""

import argparse
from pathlib import Path

import corpus
import torch
import torch.distributed as dist
from deepspeed import initialize
from gpt import GPT, ModelConfig

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deepspeed_config", default="zero2.json", help="a file beside this one")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--data", help="a text file or folder; Python's own library without it")
    parser.add_argument("--checkpoint", help="a folder to resume from and save to")
    parser.add_argument("--local_rank", type=int, help="given by DeepSpeed's launcher")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = GPT(ModelConfig())
    engine, *_ = initialize(model=model, config=str(HERE / args.deepspeed_config))
    if args.checkpoint and Path(args.checkpoint).exists():
        engine.load_checkpoint(args.checkpoint)

    length, batch = model.config.seq_len, engine.train_micro_batch_size_per_gpu()
    windows = torch.Generator().manual_seed(dist.get_rank())
    text = corpus.load(args.data, length)
    stream = corpus.batches(text.train, batch, length, windows)
    for step in range(1, args.steps + 1):
        tokens, targets = (half.to(engine.device) for half in next(stream))
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 or step == args.steps:
            dist.all_reduce(mean := loss.detach().float() / dist.get_world_size())
            if dist.get_rank() == 0:
                print(f"step {step}: loss {mean.item():.4f}", flush=True)
    if args.checkpoint:
        engine.save_checkpoint(args.checkpoint)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
