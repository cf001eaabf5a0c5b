"""Train a classifier with FP8 GEMMs, FP8 gradients and low-bit optimizer states, on one device.

python train_msamp.py      a script for MS-AMP, which the first two lines of code let run on today's torch
python train_fp8stack.py   the same script moved to fp8stack's own names
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR

import fp8stack


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(256, 512)
        self.fc2 = nn.Linear(512, 512)
        self.head = nn.Linear(512, 16)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return F.log_softmax(self.head(x), dim=1)


def batch(generator, centers, size=64):
    """Return points around 16 centers, and which center each belongs to."""
    target = torch.randint(16, (size,), generator=generator)
    return centers[target] + torch.randn(size, 256, generator=generator), target


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--opt-level", default="O2")
    args = parser.parse_args()

    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(2)
    centers = torch.randn(16, 256, generator=generator) * 0.5

    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fp8stack.initialize(model, optimizer, opt_level=args.opt_level)
    scheduler = StepLR(optimizer, step_size=max(args.steps // 2, 1), gamma=0.3)
    scaler = torch.amp.GradScaler(device.type)

    for step in range(args.steps):
        data, target = (t.to(device) for t in batch(generator, centers))
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            output = model(data)
        loss = F.nll_loss(output.float(), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step}  loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
