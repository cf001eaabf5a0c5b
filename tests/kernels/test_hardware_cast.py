"""The GPU's own cast to E4M3 against ours, on every float32 there is."""

import pytest
import torch
import triton
import triton.language as tl

from fp8stack.kernels.fp8 import casts_in_hardware, encode_e4m3

SIZE = 4096


@triton.jit
def _differences_kernel(first, count_ptr, SIZE: tl.constexpr):
    bits = first + tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = bits.to(tl.int32).to(tl.float32, bitcast=True)
    same = encode_e4m3(x, True) == encode_e4m3(x, False)
    differ = tl.where((x == x) & (same == 0), 1, 0)
    tl.atomic_add(count_ptr, tl.sum(differ, 0))


@pytest.mark.gpu
def test_the_hardware_rounds_every_float32_as_we_do():
    device = torch.device("cuda")
    if not casts_in_hardware(device):
        pytest.skip("no kernel uses the cast of this GPU")
    count, span = torch.zeros(1, dtype=torch.int32, device=device), 2**28
    for first in range(0, 2**32, span):
        _differences_kernel[(span // SIZE,)](first, count, SIZE)
    assert int(count) == 0
