"""A frozen base whose weights are quantized by another library is left alone, at every level; adapters train."""

import copy
from functools import cache

import pytest
import torch
from helpers import assert_same_bits, every_two
from ranks import assert_equal_everywhere, run_ranks
from torch import nn

import fp8stack
from fp8stack import memory, monitor
from fp8stack.comm import DataParallel
from fp8stack.errors import ModelError
from fp8stack.nn import Fp8Linear

LEVELS = ["O0", "O1", "O2"]


def torchao_layer(config, size=256):
    from torchao import quantization

    layer = nn.Sequential(nn.Linear(size, size, dtype=torch.bfloat16))
    quantization.quantize_(layer, getattr(quantization, config)())
    return layer[0]


def bitsandbytes_layer(kind, size=256, **options):
    from bitsandbytes import nn as layers

    return getattr(layers, kind)(size, size, bias=False, **options).to("cpu")  # which quantizes it


class Packed(nn.Module):
    """An own layer that keeps two 4-bit numbers a byte in a frozen parameter, as GPTQ's and AWQ's layers do."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randint(0, 256, (256, 128), dtype=torch.uint8), False)

    def forward(self, x):
        pairs = torch.stack((self.codes % 16, self.codes // 16), -1).flatten(1)
        return nn.functional.linear(x, (pairs.to(x.dtype) - 7.5) / 100)


BASES = {
    "Int8Tensor": lambda: torchao_layer("Int8WeightOnlyConfig"),
    "Float8Tensor": lambda: torchao_layer("Float8WeightOnlyConfig"),
    "Linear4bit": lambda: bitsandbytes_layer("Linear4bit", compute_dtype=torch.bfloat16),
    "Linear8bitLt": lambda: bitsandbytes_layer("Linear8bitLt", has_fp16_weights=False),
    "Packed": Packed,
}


class Adapted(nn.Module):
    """LoRA: a frozen layer and a trained product of low rank beside it."""

    def __init__(self, base, size=256, rank=32):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(size, rank, bias=False, dtype=torch.bfloat16)
        self.b = nn.Linear(rank, size, bias=False, dtype=torch.bfloat16)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def build(kind, all_parameters=False):
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(BASES[kind]()), nn.Linear(256, 64, dtype=torch.bfloat16))
    trained = [p for p in model.parameters() if p.requires_grad or all_parameters]
    return model, torch.optim.AdamW(trained, lr=3e-3)


@cache
def baseline_losses(kind):
    """Return the losses of torch's AdamW."""
    return train(*build(kind))


def train(model, optimizer, steps=12):
    """Return the losses of learning a map from two batches."""
    target, losses = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)) / 16, []
    for step in range(steps):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step % 2))
        y = model(x.bfloat16()).float()
        loss = (y - x @ target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def numbers(base):
    """Return all the numbers that a frozen layer holds."""
    weights = [*base.parameters(), *base.buffers()]
    inner = [t.__tensor_flatten__()[0] if hasattr(t, "__tensor_flatten__") else [] for t in weights]
    parts = [getattr(t, name) for t, names in zip(weights, inner, strict=True) for name in names]
    return [
        t.detach().clone()
        for t in [*parts, *(t for t, n in zip(weights, inner, strict=True) if not n)]
    ]


OPTIONS = [{}, {"skip": ["0.base"]}, {"compute": "bf16"}, {"matmuls": True}]


@every_two(2, kind=BASES, level=LEVELS, options=OPTIONS)
def test_lora_over_a_quantized_base(kind, level, options):
    baseline = baseline_losses(kind)
    model, optimizer = build(kind)
    base, before = model[0].base, numbers(model[0].base)
    kept_class = type(base)
    model, optimizer = fp8stack.initialize(model, optimizer, level, **options)
    losses = train(model, optimizer)
    assert baseline[-1] < 0.6 * baseline[0]
    assert abs(losses[-1] - baseline[-1]) < 0.03 * baseline[0]
    assert options.get("compute") or isinstance(model[0].a, Fp8Linear)
    assert_same_bits(numbers(base), before)
    report = fp8stack.get_report(model)
    if kind != "Packed":
        reason = 'skip="0.base"' if "skip" in options else kind
        assert reason in report.skipped["0.base"]
    weights = fp8stack.checkpoint.master_state_dict(model, optimizer)
    assert weights["0.a.weight"].dtype is torch.float32
    name = next(n for n, _ in model.named_parameters() if n.startswith("0.base."))
    kept, own = weights[name], model.state_dict()[name]
    assert (type(kept), kept.dtype) == (type(own), own.dtype)
    model, optimizer = fp8stack.restore(model, optimizer)
    assert type(base) is kept_class or options.get("matmuls")
    assert_same_bits(numbers(base), before)
    train(model, optimizer, 1)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("weight", [torch.complex64, torch.float8_e4m3fn, "Int8Tensor"], ids=str)
def test_a_trained_parameter_of_another_kind_is_refused(weight, level):
    """At O1 and O2 an optimizer of ours would step it. O0 leaves it to the user's."""
    model = nn.Sequential(nn.Linear(256, 64, dtype=torch.bfloat16))
    if isinstance(weight, str):
        model.append(BASES[weight]())
        model[1].weight.requires_grad_()
    else:
        model[0].register_parameter("own", nn.Parameter(torch.zeros(4, dtype=weight)))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ModelError, match=f"is {weight}; {level} trains float32.*freeze it"):
        fp8stack.initialize(model, optimizer, level)
    assert type(model[0]) is nn.Linear
    fp8stack.initialize(model, optimizer, "O0")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", BASES)
def test_an_optimizer_may_own_the_base_too(kind, level):
    """As scripts that pass model.parameters() have it; and a monitor may look on."""
    model, optimizer = build(kind, all_parameters=True)
    before = numbers(model[0].base)
    model, optimizer = fp8stack.initialize(model, optimizer, level)
    watching = monitor.Monitor(model, optimizer)
    train(model, optimizer, 2)
    watching.advice()
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 1)
    train(copy.deepcopy(model), optimizer, 1)
    model, optimizer = fp8stack.restore(model, optimizer)
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]
    assert_same_bits(numbers(model[0].base), before)


def test_memory_counts_the_bytes_that_are_there():
    """And not those of the dtype that the outer tensor shows."""
    base = BASES["Int8Tensor"]()
    held = memory.measure(base).bytes["weight"]
    assert held == sum(t.nbytes for t in numbers(base))
    assert 256 * 256 < held < 1.1 * 256 * 256


def share_a_base(rank, kind):
    torch.manual_seed(rank)
    base = BASES[kind]()
    own = numbers(base)
    torch.manual_seed(0)
    model = Adapted(base)
    model, optimizer = fp8stack.initialize(
        model, torch.optim.AdamW([model.a.weight, model.b.weight]), "O2"
    )
    parallel = DataParallel(model)
    parallel(torch.randn(16, 256, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    for tensor in (*numbers(base), model.a.weight, model.b.weight):
        assert_equal_everywhere(tensor)
    return own[0].float().sum().item()


@pytest.mark.parametrize("kind", ["Int8Tensor", "Packed"])
def test_ranks_begin_with_the_base_of_the_first(kind):
    first, second = run_ranks(share_a_base, 2, kind)
    assert first != second
