"""Which layers share the history of an input in graphs: those that a dry run sees getting one tensor."""

import copy
import pickle

import pytest
import torch
from layers import QKV, native
from torch import nn

from fp8stack.nn import fuse


class Cross(QKV):
    """Keys and values are of another tensor, if there is one."""

    def forward(self, x, other=None):
        other = x if other is None else other
        return self.q_proj(x) + self.k_proj(other) * self.v_proj(other)


class Normed(QKV):
    """Queries are normalized before keys are computed, and other arguments come after."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, hidden, rope, mask=None, flag=False, **more):
        x = hidden.reshape(-1, 2, 32)
        q = self.norm(self.q_proj(x))
        k, v = self.k_proj(x), self.v_proj(x)
        cosine, sine = rope
        return q * cosine + k * v * sine if mask is None else mask * v


class Copied(QKV):
    def forward(self, x):
        return self.q_proj(x) + self.k_proj(x.clone()) * self.v_proj(x)


class Checking(QKV):
    def forward(self, x):
        if x.shape[0] != 20:
            raise ValueError("20 rows, please")
        return super().forward(x)


class OneLeftOut(QKV):
    def forward(self, x):
        return self.q_proj(x) + self.k_proj(x)


class Pair(nn.Module):
    """Not the SwiGLU that is fused."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return self.w2(self.w1(x).relu() * self.w3(x))


def shared(model):
    """Return how many layers take another one's history."""
    layers = [m.products for m in model.modules() if hasattr(m, "products")]
    return sum(p.graph_state is not p.x_state for p in layers)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(QKV, 2), (Normed, 2), (Pair, 1), (Cross, 0), (Copied, 0), (Checking, 0), (OneLeftOut, 0)],
)
def test_histories_are_shared_where_a_dry_run_sees_one_input(make, expected):
    model = native(nn.Sequential(make()), fp8_recipe="delayed")
    assert shared(model) == 0
    before = torch.random.get_rng_state()
    fuse(model)
    assert shared(model) == expected
    assert shared(copy.deepcopy(model)) == shared(pickle.loads(pickle.dumps(model))) == expected
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(m.products.x_state.casts == 0 for m in model.modules() if hasattr(m, "products"))


def test_eager_mode_and_a_wrapper_s_forward_are_left_as_they_are():
    model = native(QKV(), fp8_recipe="delayed")
    model.forward = lambda x: QKV.forward(model, x)
    fuse(model)
    assert shared(model) == 0
    del model.forward
    fuse(model)
    model(torch.randn(20, 32, requires_grad=True)).sum().backward()
    casts = [layer.products.x_state.casts for layer in model.children()]
    assert casts == [1, 0, 0]  # which found the codes of the first


@pytest.mark.parametrize(
    "options", [{"fp8_recipe": "current"}, {"amax_compute_algo": "most_recent"}]
)
def test_other_scaling_shares_nothing(options):
    model = native(QKV(), **{"fp8_recipe": "delayed", **options})
    fuse(model)
    assert shared(model) == 0


def test_a_layer_that_is_not_converted_leaves_the_others_alone():
    model = native(QKV(), fp8_recipe="delayed", skip=["k_proj"])
    fuse(model)
    assert shared(model) == 0
