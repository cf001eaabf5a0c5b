"""What several test files need: bitwise comparison, exact oracles, and small models with data."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8stack.formats import Float8


def bits(x: Tensor) -> Tensor:
    """Return the bytes of `x` on the CPU, as a flat uint8 tensor. NaNs are made one: their payload is the device's."""
    x = x.detach().cpu().contiguous().reshape(-1)
    if x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.where(x.isnan(), torch.nan, x)
    return x.view(torch.uint8)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Fail unless both have the same dtype, shape and bytes; say where they first differ."""
    assert actual.dtype is expected.dtype, f"{what}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    a, e = bits(actual), bits(expected)
    if not torch.equal(a, e):
        first = int((a != e).nonzero()[0]) // actual.element_size()
        index = [int(i) for i in torch.unravel_index(torch.tensor(first), actual.shape)]
        values = (
            actual.detach().flatten()[first].float(),
            expected.detach().flatten()[first].float(),
        )
        share = (a != e).float().mean()
        raise AssertionError(
            f"{what}: first difference at {index}: {values}; {share:.2%} of bytes differ"
        )


def grid(fmt: Float8) -> Tensor:
    """Return every finite non-negative value of `fmt`, ascending, float64, from the definition of the format."""
    mantissas = torch.arange(2**fmt.mantissa_bits, dtype=torch.float64)
    step = fmt.min_positive
    rows, exponent = [mantissas * step], 0
    while rows[-1][-1] < fmt.max:
        rows.append((2**fmt.mantissa_bits + mantissas) * step * 2**exponent)
        exponent += 1
    values = torch.cat(rows)
    return values[values <= fmt.max]


def nearest(x: Tensor, fmt: Float8) -> Tensor:
    """Round |x| to `grid(fmt)` by search, ties to the even index, saturating; float64. The oracle for `encode`."""
    values = grid(fmt)
    magnitude = x.double().abs().clamp(max=fmt.max)
    upper = torch.searchsorted(values, magnitude).clamp(max=len(values) - 1)
    lower = (upper - 1).clamp(min=0)
    below, above = magnitude - values[lower], values[upper] - magnitude
    take_lower = (below < above) | ((below == above) & (lower % 2 == 0))
    chosen = torch.where(magnitude == values[upper], upper, torch.where(take_lower, lower, upper))
    return values[chosen] * torch.where(torch.signbit(x), -1.0, 1.0)


class TinyLM(nn.Module):
    """Embedding, MLP block with norm and biases, head: every kind of parameter that a level treats differently."""

    def __init__(self, vocab: int = 320, dim: int = 128, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


def batch(step: int, device: str = "cpu", size: int = 4, length: int = 33) -> tuple[Tensor, Tensor]:
    """Return a learnable next-token task: targets are an affine map of the tokens."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 64, (size, length), generator=generator)
    return tokens.to(device), ((tokens * 7 + 3) % 64).to(device)


def train(
    model: nn.Module, optimizer, steps: int, start: int = 0, device: str = "cpu"
) -> list[float]:
    """Take `steps` optimizer steps on `batch(start)`, `batch(start + 1)`, ...; return the losses."""
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = model(*batch(step, device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
