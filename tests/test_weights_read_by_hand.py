"""Weights that the code around their layers reads itself: they keep their dtype at O2, so that code goes on working."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack.nn import Fp8Linear


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict(
            {"wte": nn.Embedding(128, 64), "l": nn.Linear(64, 64), "up": nn.Linear(64, 64)}
        )
        self.pos = nn.Parameter(
            torch.randn(32, 64) / 8
        )  # its owner reads it, so it keeps its dtype
        self.gain = nn.Parameter(torch.eye(64))

    def forward(self, x):
        h = self.body.l(self.body.wte(x) + self.pos) + self.body.wte(x)
        return self.logits(self.body.up(h) @ self.gain)

    def count(self):  # which no forward calls
        return self.body.up.weight.numel() + self.body.l.weight.numel()


class Transposed(Base):
    def logits(self, h):
        return h @ self.body.wte.weight.t()


class Linear(Base):
    def logits(self, h):
        return F.linear(h, self.body.wte.weight)


class Einsum(Base):
    def logits(self, h):
        return torch.einsum("ld,vd->lv", h, self.body.wte.weight)


class Addmm(Base):
    def logits(self, h):
        return torch.addmm(h.new_zeros(128), h, self.body.wte.weight.mT)


class Convolved(Base):
    def logits(self, h):
        return F.conv1d(h.t()[None], self.body.wte.weight[:, :, None])[0].t()


class Nicknamed(Base):
    def logits(self, h):
        wte = self.body["wte"]
        return torch.bmm(h[None], wte.weight.T[None])[0]


class Property(Base):
    @property
    def shared(self):
        return self.body.wte.weight

    def logits(self, h):
        return h @ self.shared.t()


class Closure(Base):
    def logits(self, h):
        def product(h):
            return h @ self.body.wte.weight.t()

        return checkpoint(product, h, use_reentrant=False)


class Asked(Base):
    """As transformers' T5 does, which then computes in that dtype."""

    def logits(self, h):
        h = h.to(self.body.wte.weight.dtype)
        return F.linear(h, self.body.wte.weight)


class Around(nn.Module):
    """The reader is a module outside, and under a decorator."""

    def __init__(self):
        super().__init__()
        self.inner = Base()
        self.inner.logits = nn.Identity()

    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return self.inner(x) @ self.inner.body.wte.weight.t()


READERS = [*Base.__subclasses__(), Around]


def train(model, optimizer, steps=6):
    x, losses = torch.arange(32) * 4, []
    for _ in range(steps):
        y = model(x)
        loss = F.cross_entropy(y.float(), (x + 1) % 128)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert y.dtype is torch.float32
    return losses


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
def test_a_head_that_is_tied_by_hand_works(kind, level):
    def start():
        torch.manual_seed(0)
        model = kind()
        return model, torch.optim.AdamW(model.parameters(), lr=3e-3)

    baseline = train(*start())
    model, optimizer = fp8stack.initialize(*start(), level, strict=kind is not Closure)
    losses = train(model, optimizer)
    assert baseline[-1] < 0.9 * baseline[0]
    assert abs(losses[-1] - baseline[-1]) < 0.03 * baseline[0]
    if level == "O2":
        report, outer = fp8stack.get_report(model), "inner." if kind is Around else ""
        assert report.kept[f"{outer}body.wte.weight"] == f"{kind.__name__} reads it itself"
        assert report.stored == [f"{outer}body.l.weight", f"{outer}body.up.weight"]
        assert optimizer.state[model.get_parameter(f"{outer}body.wte.weight")][
            "exp_avg_code"
        ].numel()
        assert isinstance(model.get_submodule(f"{outer}body.up"), Fp8Linear)


def test_matmuls_and_autocast_take_two_dtypes():
    torch.manual_seed(0)
    model = Transposed()
    model, optimizer = fp8stack.initialize(
        model, torch.optim.AdamW(model.parameters()), "O2", matmuls=True
    )
    train(model, optimizer)
    assert "body.wte.weight" in fp8stack.get_report(model).stored
    assert fp8stack.get_report(model).multiplied >= {"body.wte.weight"}


def test_what_is_not_found_can_be_named():
    """A layer that is found by its name is beyond what code tells."""

    class Hidden(Base):
        def logits(self, h):
            return h @ getattr(self.body, "wte").weight.t()  # noqa: B009

    model = Hidden()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fp8stack.initialize(model, optimizer, "O2", skip=["body.wte"])
    train(model, optimizer)
    assert model.body.wte.weight.dtype is torch.float32
