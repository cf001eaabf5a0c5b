"""Layers of transformers' Conv1D, whose weight is [in, out], are those of nn.Linear at every level."""

import copy

import pytest
import torch
from helpers import assert_same_bits, train_clipped
from layers import RECIPE, conv1d, native, results
from torch import nn

import fp8stack
from fp8stack.capability import transformer_engine
from fp8stack.errors import UnsupportedDeviceError
from fp8stack.monitor import Monitor
from fp8stack.nn.layer_kinds import kind_of, weight_of

SIZES = [(32, 48), (64, 16), (30, 50), (128, 384)]


def pair(in_features, out_features, device="cpu", dtype=torch.float32):
    """Return a Conv1D and the Linear that computes the same."""
    ours, theirs = conv1d(in_features, out_features), nn.Linear(in_features, out_features)
    with torch.no_grad():
        ours.bias.normal_()
        theirs.weight.copy_(ours.weight.t())
        theirs.bias.copy_(ours.bias)
    return [nn.Sequential(layer).to(device, dtype) for layer in (ours, theirs)]


def assert_alike(ours, theirs, x, added_otherwise=False, **bounds):
    """Compare output and gradients; those of a weight are [in, out] and [out, in].

    `added_otherwise`: a GPU multiplies blocks of a weight's gradient by their two scales in another order.
    """
    y, dx, dw, db = results(ours, x)
    expected = results(theirs, x)
    for i, (a, b) in enumerate(zip((y, dx, dw.t(), db), expected, strict=True)):
        if i == 2 and added_otherwise:
            assert (a - b).norm() <= (2**-8 if b.dtype is torch.bfloat16 else 2**-16) * b.norm()
        elif bounds:
            torch.testing.assert_close(a, b, **bounds)
        else:
            assert_same_bits(a.contiguous(), b)


@RECIPE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [48, 5000])  # many: backward casts the weight again
def test_fp8_products_have_the_bits_of_linear(rows, sizes, dtype, recipe, device):
    ours, theirs = (native(m, device, fp8_recipe=recipe) for m in pair(*sizes, device, dtype))
    for _ in range(2):
        x = torch.randn(rows, sizes[0], device=device, dtype=dtype)
        assert_alike(ours, theirs, x, recipe == "blockwise" and device == "cuda")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    "options", [{"compute": "bf16"}, {"skip": ["0"], "min_numel": 0}], ids=["bf16", "stored"]
)
def test_products_that_are_not_fp8_are_those_of_linear(options, sizes, device):
    models = pair(*sizes, device)
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters())
        fp8stack.initialize(model, optimizer, "O2", **options)
    found = fp8stack.get_report(models[0])
    assert found.gemm == fp8stack.get_report(models[1]).gemm
    x = torch.randn(4, 6, sizes[0], device=device)
    with torch.autocast(device, torch.bfloat16):
        y, expected = (model(x) for model in models)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    assert y.dtype is expected.dtype
    y, expected = (model(x) for model in models)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5 if "skip" in options else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_transformer_engine_computes_it(sizes):
    if not (answer := transformer_engine("cuda")):
        pytest.skip(answer.reason)
    ours, theirs = (
        fp8stack.initialize(m, None, "O0", compute="te")[0]
        for m in pair(*sizes, "cuda", torch.bfloat16)
    )
    assert_alike(
        ours,
        theirs,
        torch.randn(64, sizes[0], device="cuda", dtype=torch.bfloat16),
        rtol=2e-2,
        atol=2e-2,
    )


def test_compiled_it_has_the_eager_bits(device):
    model, x = native(pair(32, 48, device)[0], device), torch.randn(64, 32, device=device)
    expected = results(model, x)
    torch._dynamo.reset()
    assert_same_bits(
        results(torch.compile(model, fullgraph=True, backend="aot_eager"), x), expected
    )


def gpt2(seed=0, **sizes):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=32, **none, **sizes
    )
    return GPT2LMHeadModel(config)


def steps(model, optimizer, first, count):
    """Train on `count` batches, and return the losses."""

    def loss_of(step):
        tokens = torch.randint(0, 96, (4, 32), generator=torch.Generator().manual_seed(step % 4))
        return model(input_ids=tokens.to(model.device), labels=tokens.to(model.device)).loss

    return train_clipped(model, optimizer, loss_of, range(first, first + count))


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_gpt2_trains_at_every_level_resumes_and_is_restored(level, device, tmp_path):
    model = gpt2().to(device)
    keys, plain = list(model.state_dict()), copy.deepcopy(model)
    expected = steps(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), 0, 24)

    def start(model):
        return fp8stack.initialize(
            model, torch.optim.AdamW(model.parameters(), lr=3e-3), level, strict=True
        )

    model, optimizer = start(model)
    losses = steps(model, optimizer, 0, 24)
    assert abs(losses[-4:].mean() / expected[-4:].mean() - 1) < 0.02
    assert list(model.state_dict()) == keys
    report = fp8stack.get_report(model)
    assert len(report.converted) == 9  # eight of Conv1D, and the head
    assert report.share == 1
    assert report.kept == {}
    fp8stack.checkpoint.save(tmp_path / "c", model, optimizer)
    after = steps(model, optimizer, 24, 3)
    again, other = start(gpt2(seed=1).to(device))
    fp8stack.checkpoint.load(tmp_path / "c", again, other)
    assert_same_bits(steps(again, other, 24, 3), after)
    weights = {name: p.detach().float() for name, p in model.named_parameters()}
    model, optimizer = fp8stack.restore(model, optimizer)
    assert not any("Fp8" in type(m).__name__ for m in model.modules())
    for name, p in model.named_parameters():
        assert p.dtype is torch.float32
        torch.testing.assert_close(p, weights[name], rtol=2**-8, atol=0)  # and the remainder's bits
    steps(model, optimizer, 27, 1)


def test_the_monitor_sees_it():
    model = gpt2()
    model, optimizer = fp8stack.initialize(model, torch.optim.AdamW(model.parameters()), "O2")
    with Monitor(model, optimizer, every=1) as monitor:
        steps(model, optimizer, 0, 2)
        found = monitor.read()
    assert "transformer.h.0.mlp.c_fc" in monitor.layers
    assert len(monitor.layers) == 9
    assert any("transformer.h.0.mlp.c_fc" in name for name in found)


def test_what_is_made_from_it_is_left_alone_with_the_reason():
    class Scaled(type(conv1d(1, 1))):
        def forward(self, x):
            return super().forward(x) * 2

    model = nn.Sequential(Scaled(64, 64), conv1d(64, 64))
    assert kind_of(model[0])
    assert weight_of(model[1]).shape == (64, 64)
    fp8stack.initialize(model, None, "O0")
    (told,) = fp8stack.get_report(model).skipped.values()
    assert (
        told == "is a Scaled, a subclass of transformers' Conv1D that may use its weight otherwise"
    )
    with pytest.raises(UnsupportedDeviceError, match="Scaled"):
        fp8stack.initialize(nn.Sequential(Scaled(64, 64)), None, "O0", strict=True)
