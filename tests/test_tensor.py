"""BlockScaledTensor behaves like the tensor it stands for, and every torch function a training script uses on
gradients works on it."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from helpers import assert_same_bits, through_file
from torch import nn
from torch._subclasses import FakeTensorMode

from fp8stack import BlockScaledTensor
from fp8stack.errors import ConfigError, GradientError
from fp8stack.formats import E4M3
from fp8stack.kernels.reference.quantize import dequantize_blocks, quantize_blocks
from fp8stack.tensor import _scales_of, plain


@pytest.fixture
def pair(device):
    """A block-scaled tensor and its value."""
    x = BlockScaledTensor.quantize(torch.randn(6, 200, device=device))
    return x, x.dequantize()


def test_reports_the_face_of_an_ordinary_tensor(device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = BlockScaledTensor.quantize(torch.randn(4, 256, device=device, dtype=dtype))
        assert (x.dtype, x.shape, x.device.type) == (dtype, (4, 256), device)
        assert not x.requires_grad
        assert x.numel() == 1024
        assert x.nbytes == 1024 + 4 * 8
        assert x.dequantize().dtype is dtype


def test_prints_its_values(pair):
    x, value = pair
    assert f"{value[0, 0].item():.4f}"[:5] in repr(x)
    assert "float8_e4m3fn" in repr(x)


def test_reads_like_its_value(pair):
    x, value = pair
    assert torch.equal(x, value)
    assert torch.allclose(x + 1, value + 1)
    assert torch.equal(2.0 * x, 2.0 * value)
    assert torch.equal(x[2, 3:9], value[2, 3:9])
    assert torch.equal(x.view(-1), value.view(-1))
    assert torch.equal(x.t() @ value, value.t() @ value)
    assert torch.equal((x > 0), (value > 0))
    assert torch.isfinite(x).all()
    assert x.sum().item() == value.sum().item()
    assert type(x.float() + 0) is torch.Tensor
    assert type(x.double()) is torch.Tensor


def test_detach_shares_values_and_residual_and_clone_does_not(pair):
    x, value = pair
    clone, alias = x.clone(), x.detach()
    x.mul_(2.0)
    assert torch.equal(alias, 2 * value)
    assert torch.equal(clone, value)
    assert torch.equal(copy.deepcopy(x), 2 * value)
    x.add_(torch.randn_like(value))
    x.detach().zero_()
    x.add_(torch.zeros_like(value))
    assert (x.dequantize() == 0).all()
    x.data.add_(value)
    assert x.residual is not None


def test_multiplying_by_a_scalar_touches_the_scales_only(pair):
    x, value = pair
    codes = x.codes.clone()
    x.mul_(0.5)
    x.div_(torch.tensor(4.0, device=x.device))
    assert_same_bits(x.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(x, value / 8)


def test_other_in_place_operations_are_computed_on_values_and_quantized_again(pair):
    x, value = pair
    x.clamp_(-0.5, 0.5)
    expected = dequantize_blocks(*quantize_blocks(value.clamp(-0.5, 0.5), E4M3), E4M3)
    assert torch.equal(x, expected)
    x[0] = 0.0
    expected[0] = 0.0
    assert torch.equal(x.dequantize()[0], expected[0])
    assert isinstance(x.neg_(), BlockScaledTensor)


WRITES = {  # through views and by functions, to shape [6, 200]
    "[...] =": lambda g: g.__setitem__((slice(None), 3), 0.0), "mask": lambda g: g.__setitem__(g > 0, 0.0),
    "row": lambda g: g[0].mul_(2), "element": lambda g: g.view(-1)[3].zero_(), "flat": lambda g: g.flatten().mul_(2),
    "t": lambda g: g.t()[5].zero_(), "permute": lambda g: g.permute(1, 0).unsqueeze(0).select(2, 1).neg_(),
    "iteration": lambda g: [row.mul_(2) for row in g], "split": lambda g: g.split(4)[1].zero_(),
    "chunk": lambda g: torch._foreach_mul_(g.chunk(3), 4.0),
    "unflatten": lambda g: g.unflatten(0, (2, 3))[1, 2].copy_(torch.ones(200)),
    "as_strided": lambda g: g.as_strided((6,), (201,)).fill_(0.5), "diagonal": lambda g: g.fill_diagonal_(0.25),
    "detach": lambda g: g.detach()[1:].zero_(), ".data": lambda g: g.data.view(-1).mul_(2),
    "out=": lambda g: torch.mul(torch.ones(200, device=g.device), 2, out=g[2]),
    "foreach": lambda g: torch._foreach_copy_([g], [torch.ones(6, 200, device=g.device)]),
    "own row": lambda g: g[0].copy_(g[1]), ".data =": lambda g: setattr(g, "data", g.data * 2),
    "augmented": lambda g: g.__setitem__(0, g[0].__imul__(2)),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_is_written_to_a_gradient_is_what_it_holds(write, pair):
    x, value = pair
    view, twin, before = x.view(-1), value.view(-1), value.clone()
    p = nn.Parameter(torch.zeros_like(value))
    p.grad = x
    write(p.grad)
    write(value)
    assert not torch.equal(value, before)
    expected = BlockScaledTensor.quantize(value).dequantize()
    torch.testing.assert_close(x.dequantize(), expected, rtol=1e-6, atol=0)
    assert torch.equal(p.grad, x.dequantize())
    for seen in (view, copy.deepcopy(view)):  # of what it was a view of, also after `.data =`
        assert torch.allclose(seen, twin, rtol=2**-4)


def test_data_takes_shape_dtype_and_residual_too(pair):
    x, value = pair
    x.addresses  # noqa: B018  # kept until the codes are others
    old = x.detach()
    for new in (value[:2, :9].bfloat16(), BlockScaledTensor.quantize(value).add_(value), x.t()):
        expected = new.float()
        x.data = new
        assert (x.dtype, x.shape, x.device) == (new.dtype, new.shape, new.device)
        assert torch.allclose(x.float(), expected, rtol=2**-3)
        assert x.addresses == (x.codes.data_ptr(), x.scale.data_ptr())
        assert x.residual is getattr(new, "residual", None)
    assert torch.equal(old, value)
    p = nn.Parameter(torch.zeros_like(value))
    p.grad = old.view_as(old)
    p.grad.data = p.grad.data * 2
    assert isinstance(p.grad, BlockScaledTensor)
    assert torch.equal(p.grad, 2 * value)


@pytest.mark.parametrize(
    "write",
    [
        lambda g: g.t_(), lambda g: g.resize_(3, 2), lambda g: g.unsqueeze_(0), lambda g: g.share_memory_(),
        lambda g: g[0].share_memory_(), lambda g: setattr(g, "data", torch.zeros(6, 200).to_sparse()),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(write, pair):
    x, value = pair
    with pytest.raises((GradientError, ConfigError)):
        write(x)
    assert torch.equal(x, value)
    assert x.shape == value.shape
    with pytest.raises(ValueError, match="read-only"):
        x.cpu().numpy()[0] = 0


def test_copies_both_ways_and_zeroes(pair):
    x, value = pair
    plain = torch.empty_like(value)
    plain.copy_(x)
    assert torch.equal(plain, value)
    x.zero_()
    assert (x.dequantize() == 0).all()
    x.copy_(value)
    assert torch.equal(x, value)
    x.add_(value)
    torch._foreach_zero_([x, plain])
    assert (x.dequantize() == 0).all()
    assert x.residual is None
    assert (plain == 0).all()


def test_addition_keeps_what_rounding_cuts_off(device):
    """Sixty-four equal addends: without the residual E4M3 stops growing at sixteen."""
    addend = torch.rand(8, 128, device=device) + 0.5
    x = BlockScaledTensor.quantize(addend)
    for _ in range(63):
        x.add_(addend)
    assert ((x.dequantize() / (64 * addend)) - 1).abs().max() < 2**-4 * 1.05
    assert (x.dequantize() / (64 * addend)).mean().sub(1).abs() < 0.005


def test_moves_between_devices_and_dtypes(pair):
    x, value = pair
    moved = x.to("cpu", copy=True)
    assert isinstance(moved, BlockScaledTensor)
    assert torch.equal(moved, value.cpu())
    assert type(x.to(torch.bfloat16)) is torch.Tensor


def test_norms(pair):
    x, value = pair
    torch.testing.assert_close(torch.linalg.vector_norm(x), value.norm(), rtol=1e-6, atol=0)
    for order in (1, torch.inf):
        assert (
            torch.linalg.vector_norm(x, order).item()
            == torch.linalg.vector_norm(value, order).item()
        )


def test_lists_of_gradients_are_multiplied_and_measured_together(device):
    """FP8 ones of two dtypes, one with a residual, and ordinary ones: what torch's clipping and GradScaler call."""
    dtypes = torch.float32, torch.bfloat16
    values = [torch.randn(n, 200, device=device).to(d) for n in (1, 6) for d in dtypes]
    values[2] = values[2] * 1e25  # its squares are not in float32

    def make():
        made = BlockScaledTensor.quantize_list(values) + [v.clone() for v in values[:2]]
        return [made[0], made[1].add_(values[1]), *made[2:]]

    for order in (2.0, 1.0, torch.inf):
        for norm, x in zip(torch._foreach_norm(make(), order), make(), strict=True):
            value = x.dequantize(norm.dtype) if isinstance(x, BlockScaledTensor) else x
            exact = torch.linalg.vector_norm(value.double(), order)
            few_bits = norm.dtype is torch.bfloat16
            torch.testing.assert_close(
                norm.double(), exact, rtol=5e-3 if few_bits else 1e-6, atol=0
            )
    for factor in (0.25, torch.tensor(0.25, device=device), [0.25] * 6):
        ours = make()
        torch._foreach_mul_(ours, factor)
        for x, old in zip(ours, make(), strict=True):
            assert torch.equal(plain(x), plain(old) * 0.25)
        assert torch.equal(ours[1].residual[1], make()[1].residual[1] * 0.25)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch._foreach_mul_(ours, torch.tensor(0.5, device=device))
    names = [event.name for event in profiler.events()]
    # Of all; then of scales, and of the ordinary ones.
    assert names.count("aten::_foreach_mul_") == 3


@pytest.mark.parametrize("kinds", ["fp8", "plain", "both"])
def test_lists_of_one_kind_and_of_both(kinds, device):
    """What zero_grad(set_to_none=False), GradScaler and clipping pass on."""
    value = torch.randn(6, 200, device=device)
    made = {"fp8": [BlockScaledTensor.quantize(value)], "plain": [value.clone()]}
    xs = made.get(kinds) or [*made["fp8"], *made["plain"]]
    old = [plain(x).clone() for x in xs]
    assert len(torch._foreach_norm(xs)) == len(xs)
    torch._foreach_mul_(xs, 0.5)
    for x, value in zip(xs, old, strict=True):
        assert torch.equal(plain(x), value / 2)
    found, scale = torch.zeros(1, device=device), torch.full((1,), 0.5, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(xs, found, scale)
    for x, value in zip(xs, old, strict=True):
        assert torch.equal(plain(x), value / 4)
    assert found == 0
    torch._foreach_clamp_max_(xs, 0.1)
    torch._foreach_clamp_min_(xs, -0.1)
    # While values on the other side are still large, an FP8 bound is rounded by their scale: by a sixteenth at most.
    assert all(0.1 <= plain(x).abs().max() <= 0.1 * (1 + 2**-4) for x in xs)
    torch._foreach_zero_(xs)
    assert all((plain(x) == 0).all() for x in xs)


@pytest.mark.parametrize("of", [[0], [2, 0], [0, 0, 1], [1, 0, 2]], ids=str)
def test_tensors_that_share_memory_are_as_others(of, device):
    values = [torch.randn(shape, device=device) for shape in ((3, 200), (7,), (2, 5, 64))]
    ours = BlockScaledTensor.quantize_list(values)
    theirs = list(map(BlockScaledTensor.quantize, values))
    for xs in (ours, theirs):
        assert_same_bits(torch._foreach_norm(xs), [torch.linalg.vector_norm(x) for x in theirs])
        torch._foreach_mul_([xs[i] for i in of], 0.3)
    for x, other in zip(ours, theirs, strict=True):
        assert x.addresses == (x.codes.data_ptr(), x.scale.data_ptr())
        assert_same_bits(x.parts(), other.parts())
        # without the others' memory; torch writes addresses as text, of a digit more or less
        assert len(pickle.dumps(x)) <= len(pickle.dumps(other)) + 8
    assert len(_scales_of(ours)) == 1
    copy.copy(ours[2]).zero_()
    assert not ours[2].any()
    ours[0].data = ours[1]  # which shares its memory, as in torch, and is in the list twice then
    assert len(_scales_of(ours)) == 3
    (fresh,) = BlockScaledTensor.quantize_list(values[:1])
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(fresh.codes) is type(fresh.scale) is torch.Tensor


@pytest.mark.gpu  # where a fake would be read at an address it does not have
def test_norms_of_fake_gradients_are_fake():
    with FakeTensorMode() as fake:
        codes = torch.empty(128, device="cuda", dtype=E4M3.dtype)
        x = BlockScaledTensor(codes, codes.new_empty((1, 1), dtype=torch.float32))
        for norm in (*torch._foreach_norm([x]), torch._foreach_norm([x, x])[1], x.norm()):
            assert (norm.fake_mode, norm.shape, norm.dtype) == (fake, (), torch.float32)


def test_a_gradient_that_is_twice_in_a_list_is_limited_once(device):
    value = torch.randn(6, 200, device=device)
    one, two = (BlockScaledTensor.quantize(value) for _ in range(2))
    torch._foreach_clamp_max_([one], 0.1)
    torch._foreach_clamp_max_([two, two, two.detach()], 0.1)
    assert_same_bits(plain(two), plain(one))
    torch._foreach_clamp_min_([two], math.nan)
    assert plain(two).isnan().all()


def test_clip_grad_norm_clips_as_for_ordinary_gradients(device):
    ours, theirs = (nn.Linear(128, 64, device=device) for _ in range(2))
    for layer in (ours, theirs):
        layer.weight.grad = torch.ones_like(layer.weight) * 3
        layer.bias.grad = torch.ones_like(layer.bias)
    ours.weight.grad = BlockScaledTensor.quantize(ours.weight.grad)
    for max_norm in (1.0, 1e9):
        exact = sum(p.grad.double().square().sum() for p in ours.parameters()).sqrt().float()
        norm = nn.utils.clip_grad_norm_(ours.parameters(), max_norm)
        nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        torch.testing.assert_close(norm, exact, rtol=1e-6, atol=0)
    # torch's own float32 norm on a CPU is off by 5e-6 here
    torch.testing.assert_close(ours.weight.grad.dequantize(), theirs.weight.grad, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad, rtol=1e-5, atol=0)
    nn.utils.clip_grad_value_(ours.parameters(), 1e-3)
    assert ours.weight.grad.dequantize().max() <= 1e-3


def test_grad_scaler_unscales_and_finds_infinities(device):
    layer = nn.Linear(128, 64, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    scaler.scale(torch.zeros((), device=device))  # creates its state
    value = torch.randn(64, 128, device=device)
    layer.weight.grad = BlockScaledTensor.quantize(value * 1024)
    expected = layer.weight.grad.dequantize() / 1024
    scaler.unscale_(optimizer)
    assert torch.equal(layer.weight.grad, expected)
    assert scaler._found_inf_per_device(optimizer)[layer.weight.device].item() == 0

    scaler.update()
    value[0, 0] = torch.inf
    layer.weight.grad = BlockScaledTensor.quantize(value)
    scaler.unscale_(optimizer)
    assert scaler._found_inf_per_device(optimizer)[layer.weight.device].item() == 1


def test_saves_and_loads(pair):
    x, value = pair
    x.add_(value)
    with torch.serialization.safe_globals([BlockScaledTensor]):
        loaded = through_file(x)
    for copied in (loaded, pickle.loads(pickle.dumps(x)), pickle.loads(pickle.dumps(loaded))):
        assert copied.dtype is x.dtype
        assert_same_bits(copied.parts(), x.parts())
    without = pickle.loads(pickle.dumps(x.clone().zero_()))
    assert without.residual is None
    assert not without.any()


def test_what_reads_memory_gets_the_values(pair):
    x, value = pair
    assert x.tolist() == value.tolist()
    assert torch.equal(torch.from_dlpack(x), value)
    assert np.array_equal(x.numpy(force=True), value.cpu().numpy())
    if not x.is_cuda:
        assert np.array_equal(np.asarray(x), value.numpy())
        assert np.array_equal(np.from_dlpack(x), value.numpy())
        assert np.array_equal(x.numpy(), value.numpy())


def test_refuses_parts_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"scales of shape \(4, 2\)"):
        BlockScaledTensor(torch.zeros(4, 200).to(torch.float8_e4m3fn), torch.zeros(4, 1))
    with pytest.raises(ConfigError, match="float8_e4m3fn codes"):
        BlockScaledTensor(torch.zeros(4, 200), torch.zeros(4, 2))
    codes = torch.zeros(200, 4).to(torch.float8_e4m3fn)
    for parts in ((codes.t(), torch.zeros(4, 2)), (codes.view(4, 200), torch.zeros(2, 4).t())):
        with pytest.raises(ConfigError, match="not contiguous"):
            BlockScaledTensor(*parts)
