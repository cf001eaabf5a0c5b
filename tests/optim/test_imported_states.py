"""Checkpoints of bitsandbytes and torchao load into fp8stack's optimizers, as the libraries really write them."""

import copy
import sys

import pytest
import torch
from helpers import assert_same_bits, random_parameters, set_gradients, through_file
from torch import nn

import fp8stack
from fp8stack.errors import CheckpointError
from fp8stack.optim import bitsandbytes as through_bitsandbytes
from fp8stack.optim.state_formats import decode_moment

WRAPPED = "__bnb_optimizer_quant_state__"
OPTIONS = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "Adam": {"lr": 1e-3},
    "Lion": {"lr": 1e-4},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}


def parameters():
    return random_parameters([(64, 256), (70, 130), (8, 8), (12,)])


def run(optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        set_gradients(params, step, scale=1.0)
        optimizer.step()


def moments(optimizer, p):
    return {name: decode_moment(name, optimizer.state[p], p.shape) for name in optimizer.moments}


def saved_by_bitsandbytes(kind="AdamW", bits=8, steps=4):
    """Return parameters, the state_dict of bitsandbytes' own optimizer, and its moments as it decodes them."""
    bnb = pytest.importorskip("bitsandbytes")
    params = parameters()
    optimizer = getattr(bnb.optim, f"{kind}{bits}bit")(params, **OPTIONS[kind])
    run(optimizer, params, steps)

    def decode(state, i):
        codes, scale, table = (state.get(f"{name}{i}") for name in ("state", "absmax", "qmap"))
        if scale is None:
            return codes.clone()
        return bnb.functional.dequantize_blockwise(codes, absmax=scale, code=table, blocksize=256)

    states = [optimizer.state[p] for p in params]
    values = [[decode(s, i) for i in (1, 2) if f"state{i}" in s] for s in states]
    return params, through_file(optimizer.state_dict()), values


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("kind", OPTIONS)
def test_bitsandbytes_moments_are_read(kind, bits, monkeypatch):
    """Exactly, into float32 states; to the error of our own format into 8 bits. The library is not needed."""
    params, packed, values = saved_by_bitsandbytes(kind, bits)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    ours, options = getattr(fp8stack.optim, kind), {**OPTIONS[kind], "lr": 1.0}
    assert_reads(ours, params, packed, values, OPTIONS[kind]["lr"], options)


def assert_reads(kind, params, packed, values, lr, options):
    """Fail unless our optimizer has the moments of four steps, each parameter's in a list, and goes on from them."""
    for states, bound in (("fp32", 0), ("8bit", 2**-5)):
        optimizer = kind(params, states=states, **options)
        optimizer.load_state_dict(packed)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(lr)
        for p, expected in zip(params, values, strict=True):
            assert optimizer.state[p]["step"] == 4
            for x, value in zip(moments(optimizer, p).values(), expected, strict=True):
                assert (x - value).norm() <= bound * value.norm()
    run(optimizer, params, 2, start=4)


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_run_of_bitsandbytes_goes_on_bit_for_bit_behind_our_optimizer(kind):
    bnb = pytest.importorskip("bitsandbytes")
    params, packed, _ = saved_by_bitsandbytes(kind)
    twins = copy.deepcopy(params)
    reference = getattr(bnb.optim, f"{kind}8bit")(twins, **OPTIONS[kind])
    reference.load_state_dict(packed)
    optimizer = getattr(through_bitsandbytes, kind)(params, **OPTIONS[kind])
    optimizer.load_state_dict(packed)
    run(reference, twins, 3, start=4)
    run(optimizer, params, 3, start=4)
    assert_same_bits(params, twins)


def test_states_without_the_wrapping_blocks_of_2048_and_another_table_are_read():
    params, packed, values = saved_by_bitsandbytes()
    packed["state"] = {k: e | e.pop(WRAPPED) for k, e in packed["state"].items()}
    optimizer, entry, p = fp8stack.optim.AdamW(params, states="fp32"), packed["state"][0], params[0]
    optimizer.load_state_dict(packed)
    assert torch.equal(optimizer.state[p]["exp_avg"], values[0][0])
    entry["qmap1"] = entry["qmap1"] * 0.5
    for make in (fp8stack.optim.AdamW, through_bitsandbytes.AdamW):
        other = make(params)
        other.load_state_dict(packed)
        found = moments(other, p)["exp_avg"]
        assert (found - values[0][0] / 2).norm() <= 2**-5 * values[0][0].norm()
    for i in (1, 2):
        entry[f"absmax{i}"] = torch.arange(1.0, p.numel() // 2048 + 1)
    optimizer.load_state_dict(packed)
    table = entry["qmap1"][entry["state1"].int()].flatten()
    expected = table * entry["absmax1"].repeat_interleave(2048)
    assert torch.equal(optimizer.state[p]["exp_avg"].flatten(), expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s[WRAPPED].pop("state2"), "saved 1 moments, this optimizer has 2"),
        (lambda s: s[WRAPPED].pop("absmax1"), "state1 has 16384 codes.*there are 0"),
        (lambda s: s[WRAPPED].update(absmax2=torch.ones(63)), "state2 has .*there are 63"),
        (lambda s: s[WRAPPED].pop("qmap2"), "need a qmap2 of 256 values"),
        (lambda s: s[WRAPPED].update(qmap1=torch.zeros(16)), "need a qmap1 of 256 values"),
        (lambda s: s[WRAPPED].update(state1="codes"), "is malformed"),
        (lambda s: s[WRAPPED].update(state1=torch.zeros(3, 4)), r"exp_avg is of shape \(3, 4\)"),
        (lambda s: s.pop("step"), "is malformed"),
        (lambda s: s.update({WRAPPED: 3}), "is malformed"),
    ],
)
def test_a_damaged_state_of_bitsandbytes_is_named_and_changes_nothing(change, match):
    params, packed, _ = saved_by_bitsandbytes()
    optimizer = fp8stack.optim.AdamW(params)
    run(optimizer, params, 1)
    before = {k: v.clone() for k, v in optimizer.state[params[0]].items()}
    change(packed["state"][0])
    with pytest.raises(CheckpointError, match=f"state of parameter 0.*{match}"):
        optimizer.load_state_dict(packed)
    assert_same_bits(optimizer.state[params[0]].values(), before.values())


# --- torchao


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"])
def test_torchao_s_moments_are_read(kind):
    ao = pytest.importorskip("torchao.optim")
    params = parameters()
    theirs = getattr(ao, kind)(params, lr=1e-3)
    with torch.compiler.set_stance("force_eager"):  # it compiles its step
        run(theirs, params, 4)
    packed = through_file(theirs.state_dict())
    quantized = type(packed["state"][0]["exp_avg"])
    assert quantized.__module__.startswith("torchao.optim")
    ours = fp8stack.optim.AdamW if kind.startswith("AdamW") else fp8stack.optim.Adam
    entries = [[theirs.state[p][name] for name in ("exp_avg", "exp_avg_sq")] for p in params]
    values = [
        [x.dequantize() if isinstance(x, quantized) else x.clone() for x in e] for e in entries
    ]
    assert_reads(ours, params, packed, values, 1e-3, {})
    assert type(theirs.state[params[0]]["exp_avg"]) is quantized  # theirs is as it was


def test_torchao_s_state_of_another_shape_is_refused():
    ao = pytest.importorskip("torchao.optim")
    p, q = nn.Parameter(torch.randn(64, 128)), nn.Parameter(torch.randn(128, 64))
    theirs = ao.AdamW8bit([p])
    with torch.compiler.set_stance("force_eager"):
        run(theirs, [p], 1)
    with pytest.raises(CheckpointError, match=r"exp_avg is of shape \(64, 128\)"):
        fp8stack.optim.AdamW([q]).load_state_dict(theirs.state_dict())
