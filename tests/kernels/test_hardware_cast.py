"""The GPU's own casts to E4M3 and E5M2 against ours, on every float32 there is."""

import pytest
import torch
import triton
import triton.language as tl
from helpers import OCP

from fp8stack.kernels.fp8 import casts_in_hardware, decode_e4m3, encode_ocp

SIZE = 4096


@triton.jit
def _differences_kernel(first, count_ptr, MANTISSA: tl.constexpr, SIZE: tl.constexpr):
    bits = first + tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = bits.to(tl.int32).to(tl.float32, bitcast=True)
    same = encode_ocp(x, MANTISSA, True) == encode_ocp(x, MANTISSA, False)
    differ = tl.where((x == x) & (same == 0), 1, 0)
    tl.atomic_add(count_ptr, tl.sum(differ, 0))


@pytest.mark.gpu
@OCP
def test_the_hardware_rounds_every_float32_as_we_do(fmt):
    device = torch.device("cuda")
    if not casts_in_hardware(device):
        pytest.skip("no kernel uses the cast of this GPU")
    count, span = torch.zeros(1, dtype=torch.int32, device=device), 2**28
    for first in range(0, 2**32, span):
        _differences_kernel[(span // SIZE,)](first, count, fmt.mantissa_bits, SIZE)
    assert int(count) == 0


@triton.jit
def _decode_kernel(codes_ptr, out_ptr, HARDWARE: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, decode_e4m3(tl.load(codes_ptr + at), HARDWARE))


@pytest.mark.gpu
@pytest.mark.parametrize("hardware", [False, True])
def test_every_code_is_decoded_exactly(hardware):
    device = torch.device("cuda")
    if hardware and not casts_in_hardware(device):
        pytest.skip("no kernel uses the cast of this GPU")
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    found = torch.empty(256, device=device)
    _decode_kernel[(1,)](codes, found, hardware)
    expected = codes.view(torch.float8_e4m3fn).float()
    values = codes % 128 != 127  # the others are NaN, and never made
    assert torch.equal(found[values], expected[values])
    assert torch.equal(found[values].signbit(), expected[values].signbit())
