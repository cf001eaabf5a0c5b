"""Train a model whose weights are bare parameters, multiplied by `@`: the Dragon Hatchling (BDH) of small size.

    PYTHONPATH=examples python examples/10_bdh.py --opt-level O2

There is no `nn.Linear` in it. `initialize` finds that its forward multiplies by parameters of its own, and these
products run in FP8: three for each of the levels, and the head. The model follows "The Dragon Hatchling" (Kosowski and
others, arXiv 2509.26507): one set of weights for all levels, sparse activations after ReLU, linear attention.
"""

import argparse

import corpus
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8stack

SEQ_LEN = 128


class BDH(nn.Module):
    """Byte logits [B, T, 256] of byte tokens [B, T]."""

    def __init__(self, dim: int = 128, heads: int = 4, neurons: int = 256, levels: int = 3) -> None:
        super().__init__()
        self.levels = levels
        self.embed = nn.Embedding(256, dim)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.encoder, self.encoder_v = (
            nn.Parameter(torch.randn(heads, dim, neurons) * 0.02) for _ in range(2)
        )
        self.decoder = nn.Parameter(torch.randn(heads * neurons, dim) * 0.02)
        self.head = nn.Parameter(torch.randn(dim, 256) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embed(tokens)).unsqueeze(1)  # [B, 1, T, dim]
        for _ in range(self.levels):
            sparse = F.relu(x @ self.encoder)  # [B, heads, T, neurons]
            before = (rotate(sparse) @ rotate(sparse).mT).tril(-1) @ x  # attention without softmax
            gated = sparse * F.relu(self.norm(before) @ self.encoder_v)
            y = gated.transpose(1, 2).flatten(2).unsqueeze(1) @ self.decoder
            x = self.norm(x + self.norm(y))
        return x.squeeze(1) @ self.head


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of neurons of [..., T, neurons] by angles that grow with the position."""
    size = x.shape[-1] // 2
    rates = 10_000 ** (-torch.arange(size, device=x.device) / size)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def train(
    level: str | None, steps: int, data: str | None = None, device: str = "cpu", **sizes: int
) -> list[float]:
    """Train a model of these sizes at a level, or without fp8stack, and return the losses."""
    torch.manual_seed(0)
    model = BDH(**sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if level:
        model, optimizer = fp8stack.initialize(model, optimizer, opt_level=level)
    text = corpus.load(data, SEQ_LEN)
    stream = corpus.batches(text.train, 8, SEQ_LEN, torch.Generator().manual_seed(0))
    losses = []
    for _ in range(steps):
        tokens, targets = (half.to(device) for half in next(stream))
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if level:
        report = fp8stack.get_report(model)
        print(f"multiplied in FP8: {', '.join(sorted(report.multiplied))}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--opt-level", default="O2", choices=["off", "O0", "O1", "O2"])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--data", help="a text file or folder; Python's own library without it")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    level = None if args.opt_level == "off" else args.opt_level
    for step, loss in enumerate(train(level, args.steps, args.data, device), 1):
        if step % 10 == 0 or step == args.steps:
            print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
