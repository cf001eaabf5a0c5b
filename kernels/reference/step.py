"""One optimizer step on one tensor, whatever the formats of its state: decode, update in float32, encode.

Each operation below rounds once, in this order, and the Triton kernel does the same. With g = gradient × grad_mul (for
FP8 blocks code × (scale × grad_mul)), plus weight_decay × w where decay is coupled (for Adam 2^63 at most):

    adam      m = beta1 × m + gain × g;  v = beta2 × v + (1 - beta2) × (g × g);  u = m / (sqrt(v) × inv_sqrt_bc2 + eps)
    sgd       m = beta1 × m + gain × g;  u = m             (u = g without momentum)
    nesterov  m = beta1 × m + gain × g;  u = g + beta1 × m
    lion      u = sign(beta1 × m + gain × g);  m = beta2 × m + (1 - beta2) × g
    muon      m = beta1 × m + gain × g;  u = beta2 × m + (1 - beta2) × g
    all       w = w × decay - step_size × u;  muon: w = u, which is orthogonalized before another step applies it

Sources: Kingma and Ba, "Adam", 2015, algorithm 1; Loshchilov and Hutter, "Decoupled Weight Decay Regularization",
2019, algorithm 2 (with step_size = lr / (1 - beta1^t) and inv_sqrt_bc2 = 1 / sqrt(1 - beta2^t)); torch.optim.SGD; Chen
et al., "Symbolic Discovery of Optimization Algorithms" (Lion), 2023, program 1.

All scalars arrive in `hyper`, a tensor on the device of the weights, so that neither a learning rate nor the decision
to skip needs the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8stack.formats import E4M3, FORMATS, GRAD_LIMIT

from .fp8 import noise, noise_of_v, sqrt_rn
from .master import dither, join, split
from .power_of_two import decode_tensor, encode_tensor
from .quantize import dequantize_blocks, quantize_blocks

# Columns of `hyper`, float32, padded to 16. `apply` is 1, or 0 to leave weight and state as they are; `seed` and
# `phase`, of the noise, hold the bits of int32.
HYPER = (
    "grad_mul", "decay", "step_size", "inv_sqrt_bc2", "apply", "beta1", "gain", "beta2", "one_minus_beta2", "eps",
    "weight_decay", "seed", "phase",
)  # fmt: skip


class StepKind(NamedTuple):
    """What a step computes and how it keeps its state; one Triton kernel is compiled for each."""

    algorithm: str  # "adam", "sgd", "nesterov", "lion" or "muon"
    coupled: bool  # weight decay is added to the gradient
    m: str  # "" (none), "dense", the name of a block format, or "tensor": one power-of-two scale for all
    v: str  # the same, or "dithered": dense, dithered; codes are dithered always
    master: str  # "" (the weight itself), "dithered" (likewise, dithered), "split", "dense", or "tensor"


class StepTensors(NamedTuple):
    """The tensors of one parameter. All but the gradient and its scale are updated."""

    weight: Tensor  # float32, bfloat16 or float16, any shape
    # int8 or int16 remainder of a bfloat16 weight, float32, or float16 with master_scale
    master: Tensor | None
    master_scale: Tensor | None  # float32, 0-d
    grad: Tensor  # float32, bfloat16, float16, or e4m3 codes with grad_block_scale
    grad_block_scale: Tensor | None  # float32 [rows, ceil(cols / 128)]
    m: Tensor | None  # codes with m_scale, or floating point
    m_scale: Tensor | None  # float32 [rows, ceil(cols / 128)], or 0-d for "tensor"
    v: Tensor | None
    v_scale: Tensor | None


def step(kind: StepKind, t: StepTensors, hyper: Tensor) -> None:
    """Update one tensor in place; nothing is written where `apply` is 0. `hyper`: float32 [16], see HYPER."""
    apply, random = hyper[4], torch.zeros((), dtype=torch.int64)
    if {kind.m, kind.v, kind.master} - {"", "dense"}:
        random = noise(t.weight.shape, *hyper[11:13].view(torch.int32))
    grad_mul, weight_decay = hyper[0], hyper[10]
    w = load_master(t.weight, t.master, t.master_scale)
    if t.grad_block_scale is None:
        g = t.grad.float() * grad_mul
    else:
        g = dequantize_blocks(t.grad, t.grad_block_scale * grad_mul, E4M3)
    if kind.coupled:
        g = g + weight_decay * w
        if kind.algorithm == "adam":  # a decayed weight may be of any size
            g = g.clamp(-GRAD_LIMIT, GRAD_LIMIT)
    m = _load_moment(kind.m, t.m, t.m_scale, w.shape)
    v = _load_moment(kind.v, t.v, t.v_scale, w.shape)
    u, m, v = update(kind.algorithm, g, m, v, hyper)
    w = u if kind.algorithm == "muon" else w * hyper[1] - hyper[2] * u
    store_master(kind.master, t, w, apply, random)
    _store_moment(kind.m, t.m, t.m_scale, m, apply, random)
    _store_moment(kind.v, t.v, t.v_scale, v, apply, random)


def update(
    algorithm: str,
    g: Tensor,  # float32, as are m and v, all of one shape
    m: Tensor | None,
    v: Tensor | None,
    hyper: Tensor,  # float32 [16], see HYPER
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # the direction, the new m and v
    """Compute the step in float32; formats play no part here."""
    inv_sqrt_bc2, _, beta1, gain, beta2, one_minus_beta2, eps = hyper[3:10].unbind()
    if m is None:
        return g, None, None
    if algorithm == "lion":
        return (beta1 * m + gain * g).sign(), beta2 * m + one_minus_beta2 * g, None
    m = beta1 * m + gain * g
    if algorithm == "sgd":
        return m, m, None
    if algorithm == "nesterov":
        return g + beta1 * m, m, None
    if algorithm == "muon":
        return beta2 * m + one_minus_beta2 * g, m, None
    assert v is not None
    v = beta2 * v + one_minus_beta2 * (g * g)
    return m / (sqrt_rn(v) * inv_sqrt_bc2 + eps), m, v


def load_master(
    weight: Tensor, master: Tensor | None, master_scale: Tensor | None = None
) -> Tensor:  # float32
    """Return the value that the optimizer accumulates in.

    If the weight is not its master rounded, other code has written it, and the weight counts.
    """
    if master is None:
        return weight.float()
    if master.dtype in (torch.int8, torch.int16):
        return join(weight, master)
    value = master if master_scale is None else decode_tensor(master, master_scale)
    return torch.where(value.to(weight.dtype) == weight, value, weight.float())


def _load_moment(
    kind: str, codes: Tensor | None, scale: Tensor | None, shape: torch.Size
) -> Tensor | None:
    if codes is None or kind == "":
        return None
    if scale is None:
        return codes.float()
    if kind == "tensor":
        return decode_tensor(codes, scale)
    return dequantize_blocks(codes, scale, FORMATS[kind], shape=shape)


def _store_moment(
    kind: str,
    codes: Tensor | None,
    scale: Tensor | None,
    value: Tensor | None,
    apply: Tensor,
    random: Tensor,
) -> None:
    if codes is None or value is None:
        return
    new_scale = None
    if kind == "dithered":
        value = dither(value, noise_of_v(random, 16))
    elif kind == "tensor":
        value, new_scale = encode_tensor(value, codes.dtype, codes.dtype is torch.float16, random)
    elif kind != "dense":
        value, new_scale = quantize_blocks(value, FORMATS[kind], random)
    write(codes, value, apply)
    write(scale, new_scale, apply)


def store_master(kind: str, t: StepTensors, w: Tensor, apply: Tensor, random: Tensor) -> None:
    """Write the float32 weight `w` to the weight and its master."""
    master, new_scale = w, None
    if kind == "split":
        assert t.master is not None
        w, master = split(w, t.master.dtype, random)
    elif kind == "tensor":
        assert t.master is not None
        master, new_scale = encode_tensor(w, t.master.dtype, random=random)
        w = decode_tensor(master, new_scale)  # the weight is rounded from the stored master
    elif kind == "dithered":
        w = dither(w, random >> 16)
    write(t.weight, w, apply)
    write(t.master, master, apply)
    write(t.master_scale, new_scale, apply)


def write(old: Tensor | None, new: Tensor | None, apply: Tensor) -> None:
    """Store `new` (cast to the dtype of `old`) where the device scalar `apply` is 1, without asking the host."""
    if old is not None and new is not None:
        # as bytes, where they are: torch 2.6 cannot choose among FP8 numbers
        kind = torch.uint8 if old.itemsize == 1 else old.dtype
        old, new = old.view(kind), new.to(old.dtype).view(kind)
        old.copy_(torch.where(apply > 0, new, old))
