"""Block-scaled gradients: adding micro-batches with a residual."""

import pytest
import torch
from helpers import DTYPES, INF, INPUTS, NAN, assert_same_bits, every_two

from fp8stack import BlockScaledTensor
from fp8stack.formats import BLOCK, E4M3
from fp8stack.kernels import gradient as triton
from fp8stack.kernels import ops
from fp8stack.kernels.reference import gradient as reference


class Sum:
    """A gradient with a residual, as `BlockScaledTensor` keeps it."""

    def __init__(self, x):
        self.codes, self.scale = ops.quantize_blocks(x, E4M3)
        self.residual = torch.zeros_like(self.codes), torch.zeros_like(self.scale)

    def add(self, x):
        ops.accumulate_blocks(self.codes, self.scale, *self.residual, x)
        return self

    def drop_residual(self):
        for part in self.residual:
            part.view(torch.uint8).zero_()

    @property
    def rounded(self):
        return ops.dequantize_blocks(self.codes, self.scale, E4M3).double()

    @property
    def total(self):
        return self.rounded + ops.dequantize_blocks(*self.residual, E4M3).double()


def outlier_and_micro_batch(device):
    """A first gradient with one large element a block, and a micro-batch of 1/8 to 1 that has none."""
    first = torch.zeros(3, 300)
    first[:, ::BLOCK] = 300.0
    micro_batch = torch.rand(3, 300) * 0.875 + 0.125
    micro_batch[:, ::BLOCK] = 0
    return first.to(device), (micro_batch * torch.randn(3, 300).sign()).to(device)


def test_sum_of_many_micro_batches_grows_linearly_thanks_to_the_residual(device):
    first, micro_batch = outlier_and_micro_batch(device)
    kept, dropped = Sum(first), Sum(first)
    for count in range(1, 257):
        kept.add(micro_batch)
        dropped.add(micro_batch).drop_residual()
        if count in (16, 64, 256):
            exact = (first.double() + count * micro_batch.double())[micro_batch != 0]
            error, rounded_error, dropped_error = (
                float(((sum_ - exact).norm() / exact.norm()).cpu())
                for sum_ in (
                    x[micro_batch != 0] for x in (kept.total, kept.rounded, dropped.rounded)
                )
            )
            assert error < 2.0**-6, f"after {count} additions"
            assert rounded_error < 2.0**-4, f"after {count} additions"
    assert dropped_error > 0.75
    stagnant = dropped.rounded.clone()
    assert torch.equal(dropped.add(micro_batch).rounded, stagnant)


@INPUTS
@pytest.mark.parametrize("shape", [(), (7,), (0,), (0, 4), (4, 0), (2, 3, 64), (5, 200)], ids=str)
def test_codes_are_the_rounded_total_and_the_residual_the_rounded_rest(shape, dtype, device):
    """Of a first and a second micro-batch, after which the residual counts too."""
    gradient = Sum(torch.randn(shape, device=device))
    for _ in range(2):
        y, total = torch.randn(shape, device=device).to(dtype), gradient.total.float()
        gradient.add(y)
        codes, scale = ops.quantize_blocks(total + y.float(), E4M3)
        rest = total + y.float() - ops.dequantize_blocks(codes, scale, E4M3)
        assert_same_bits(
            (gradient.codes, gradient.scale, *gradient.residual),
            (codes, scale, *ops.quantize_blocks(rest, E4M3)),
        )


@every_two(3, shape=[(), (7,), (0, 4), (2, 3, 64), (17, 256), (33, 200)], dtype=DTYPES.values())
def test_the_kernel_and_the_reference_write_the_same_bits(shape, dtype, kernel_device):
    """Five micro-batches of sizes that differ by powers of ten, the third with infinities and NaN, then a view."""
    here = [t.to(kernel_device) for t in (*ops.quantize_blocks(torch.randn(shape), E4M3),) * 2]
    here[3] = 2.0**-5 * here[3]
    there = [t.cpu().clone() for t in here]
    here = [t.clone() for t in here]
    for i in range(5):
        x = (torch.randn(shape) * 10.0 ** (-i)).to(dtype)
        if i == 2 and x.numel() > 2:
            x.view(-1)[:3] = torch.tensor([INF, NAN, -INF])
        triton.accumulate_blocks(*here, x.to(kernel_device))
        reference.accumulate_blocks(*there, x)
        assert_same_bits([t.cpu() for t in here], there)
    if shape == (17, 256):
        wide = x.repeat(1, 2)
        triton.accumulate_blocks(*here, wide.to(kernel_device)[:, ::2])
        reference.accumulate_blocks(*there, wide[:, ::2])
        assert_same_bits([t.cpu() for t in here], there)


def test_sums_that_code_and_residual_can_hold_are_exact(device):
    """Scale 1, steps of 16 and rests of -7 to 7, whose own scale is 1/64: every number on the way is a code."""
    x = torch.zeros(1, 128, device=device)
    x[0, 0] = 448.0
    y = torch.zeros(1, 128, device=device)
    y[0, 1:106] = (torch.arange(144, 256, 16)[:, None] + torch.arange(-7, 8)).flatten()
    gradient = Sum(x).add(y)
    assert torch.equal(gradient.total.float(), x + y)
    assert not torch.equal(gradient.rounded.float(), x + y)
    gradient.add(-y)
    assert torch.equal(gradient.rounded.float(), x)
    assert gradient.residual[1].eq(0).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("where", ["first", "added"])
def test_non_finite_gradient_stays_in_its_block_and_is_never_lost(bad, where, device):
    x, y = torch.randn(2, 2, 256, device=device)
    (x if where == "first" else y)[1, 200] = bad
    gradient = Sum(x).add(y).add(torch.ones(2, 256, device=device))
    assert gradient.scale.isnan().tolist() == [[False, False], [False, True]]
    assert gradient.total.isnan().any(0).nonzero().flatten().tolist() == list(range(128, 256))
    assert ops.norms([BlockScaledTensor(gradient.codes, gradient.scale)])[0].isnan()
