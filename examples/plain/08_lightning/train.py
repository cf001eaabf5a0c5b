"""Train a small GPT with Lightning's Trainer; resume from a checkpoint.

    PYTHONPATH=examples python examples/plain/08_lightning/train.py --checkpoint runs/gpt.ckpt

It takes all GPUs that there are, or as many processes on the CPU as `--devices` says.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import corpus
import torch
from gpt import GPT, ModelConfig
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, IterableDataset


class Windows(IterableDataset):
    """Batches of random windows into a text, other ones on each rank."""

    def __init__(self, text: torch.Tensor, batch: int, length: int, rank: int) -> None:
        self.arguments = text, batch, length, torch.Generator().manual_seed(rank)

    def __iter__(self) -> Iterator[corpus.Batch]:
        return corpus.batches(*self.arguments)


class LightningGPT(LightningModule):
    def __init__(self, data: str | None, batch: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(ModelConfig())

    def train_dataloader(self) -> DataLoader:
        length = self.model.config.seq_len
        text = corpus.load(self.hparams.data, length).train
        windows = Windows(text, self.hparams.batch, length, self.global_rank)
        return DataLoader(windows, batch_size=None)

    def training_step(self, batch: corpus.Batch, index: int) -> torch.Tensor:
        loss = self.model(*batch)
        if (index + 1) % 10 == 0:
            self.print(f"step {index + 1}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="those before a checkpoint count")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a process")
    parser.add_argument("--devices", default="auto", help="GPUs, or processes on the CPU")
    parser.add_argument("--data", help="a text file or folder; Python's own library without it")
    parser.add_argument("--checkpoint", type=Path, help="a file to resume from and save to")
    args = parser.parse_args()
    seed_everything(0)
    trainer = Trainer(
        devices=args.devices,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        precision="bf16-mixed",
        enable_checkpointing=False,
        logger=False,
    )
    resume = args.checkpoint if args.checkpoint and args.checkpoint.exists() else None
    trainer.fit(LightningGPT(args.data, args.batch), ckpt_path=resume)
    if args.checkpoint:
        trainer.save_checkpoint(args.checkpoint)


if __name__ == "__main__":
    main()
