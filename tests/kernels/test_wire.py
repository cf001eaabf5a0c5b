"""Chunks of E4M3 blocks: the reference against quantize_blocks and float64, Triton kernels against the reference."""

import pytest
import torch
from helpers import DTYPES, INPUTS, assert_same_bits

from fp8stack.formats import BLOCK, E4M3
from fp8stack.kernels import wire as triton
from fp8stack.kernels.reference import wire as reference
from fp8stack.kernels.reference.quantize import dequantize_blocks, quantize_blocks
from fp8stack.kernels.reference.wire import Layout

LAYOUTS = [
    Layout(rows, cols, world)
    for rows, cols in ((1, 1), (1, 127), (1, 129), (1, 5000), (3, 130), (17, 256))
    for world in (1, 2, 3, 4)
]
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda lay: "×".join(map(str, lay)))


def draw(layout, dtype=torch.float32, spoiled=False):
    """Return a matrix whose blocks differ by powers of two, and hold NaN and infinity if `spoiled`."""
    x = torch.randn(layout.rows, layout.cols) * 2.0 ** torch.randint(-8, 8, (layout.rows, 1))
    if spoiled:
        x.view(-1)[layout.cols // 2] = torch.nan
        x.view(-1)[-1] = -torch.inf
    return x.to(dtype)


def quantized(x, layout):
    codes, scale = quantize_blocks(x.view(layout.rows, layout.cols), E4M3)
    return codes, scale


# --- what they are


@INPUTS
@EVERY_LAYOUT
def test_a_tensor_arrives_as_its_own_blocks(layout, dtype):
    """Packing then unpacking is quantizing then dequantizing, and codes travel as they are."""
    x = draw(layout, dtype, spoiled=layout.rows > 1)
    codes, scale = quantized(x, layout)
    chunks = reference.pack(x, layout)
    assert (chunks.dtype, chunks.shape) == (torch.uint8, (layout.world, layout.pitch))
    assert layout.pitch % 16 == 0
    assert layout.world * layout.per * BLOCK >= x.numel()
    assert_same_bits(chunks, reference.pack(codes.view(torch.uint8), layout, scale=scale))
    for out_dtype in DTYPES.values():
        out = torch.empty_like(x, dtype=out_dtype)
        reference.unpack(chunks, out, layout)
        assert_same_bits(out, dequantize_blocks(codes, scale, E4M3, out_dtype))
    same_codes, same_scale = torch.empty_like(codes), torch.empty_like(scale)
    reference.unpack(chunks, same_codes.view(torch.uint8), layout, same_scale)
    assert_same_bits(same_codes.view(torch.uint8), codes.view(torch.uint8))
    assert_same_bits(same_scale, scale)


@pytest.mark.parametrize("size", [2**20, 2**20 + 77])
def test_a_large_chunk_takes_1_03125_bytes_an_element(size):
    layout = Layout(1, size, 4)
    assert layout.pitch * 4 <= 1.03125 * size + 4 * (132 + 16)


def exchange(tensors, layout, average):
    """Return what every rank ends with, as all_reduce does it, and the chunks it is made of."""
    sent = [reference.pack(x, layout) for x in tensors]
    stripes = [torch.stack([s[i] for s in sent]) for i in range(layout.world)]
    chunks = torch.stack(
        [reference.reduce_pack(s, layout, layout.world if average else 1) for s in stripes]
    )
    out = torch.empty_like(tensors[0])
    reference.unpack(chunks, out, layout)
    return out, stripes


@pytest.mark.parametrize("alike", [False, True], ids=["independent", "the same on all ranks"])
def test_sums_keep_28_db_and_stripes_31_for_every_number_of_ranks(alike):
    """The limits of docs/comm.md. Equal gradients grow with the number of ranks: without scales of their own, sums
    would be cut off at once. The last block is short, and stripes of many ranks reach beyond the end."""
    size = 2**14 + 77
    for world in (*range(2, 10), 15, 16, 17, 31, 33, 48, 63, 64):
        tensors = [torch.randn(size)] * world if alike else list(torch.randn(world, size))
        exact, layout = torch.stack(tensors).double().sum(0), Layout(1, size, world)
        result, stripes = exchange(tensors, layout, False)
        sums = torch.empty(world, layout.per * BLOCK)
        for stripe, out in zip(stripes, sums, strict=True):
            reference.reduce_unpack(stripe, out)
        for value, least in ((result, 28), (sums.view(-1)[:size], 31)):
            noise = (value.double() - exact).square().sum()
            assert 10 * torch.log10(exact.square().sum() / noise) >= least, f"{world} ranks"


@pytest.mark.parametrize("world", [2, 3, 64])
def test_equal_tensors_neither_saturate_nor_lose_a_bit(world):
    """Blocks of one value are exact; a sum in FP8 would stop at 448 times the scale."""
    x = torch.full((1000,), 3.0)
    result, _ = exchange([x] * world, Layout(1, 1000, world), False)
    assert_same_bits(result, x * world)
    mean, _ = exchange([x] * world, Layout(1, 1000, world), True)
    assert_same_bits(mean, x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_on_one_rank_spoils_its_block_alone(bad):
    tensors = [torch.ones(1000) for _ in range(3)]
    tensors[1][300] = bad
    result, _ = exchange(tensors, Layout(1, 1000, 3), False)
    assert result[256:384].isnan().all()
    assert result.isnan().sum() == 128
    assert result[:256].eq(3).all()


@pytest.mark.parametrize("world", [2, 3, 5, 8, 64])
def test_means_of_the_largest_numbers_are_finite_and_their_sums_are_not(world):
    largest = torch.finfo(torch.float32).max
    x = torch.cat([torch.full((128,), 0.9 * largest), torch.full((128,), -largest / 2)])
    tensors = [x * (1 - rank / (2 * world)) for rank in range(world)]
    layout, exact = Layout(1, 256, world), torch.stack(tensors).double().mean(0)
    mean, stripes = exchange(tensors, layout, True)
    assert ((mean.double() - exact).abs() <= exact.abs() / 8).all()
    parts = torch.empty(world, layout.per * BLOCK)
    for stripe, out in zip(stripes, parts, strict=True):
        reference.reduce_unpack(stripe, out, world)
    assert ((parts.view(-1)[:256].double() - exact).abs() <= exact.abs() / 16).all()
    assert exchange(tensors, layout, False)[0][:128].isnan().all()


@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("size", [1e-36, 1e-38, 1e-41, 1e-44])
def test_the_smallest_numbers_are_within_the_limit_of_the_documentation(size, world, average):
    """docs/comm.md: each is sent with 2^-137 or 2^-4 of itself, and so is the sum of that."""
    tensors = [size * torch.randn(300) for _ in range(world)]
    total = torch.stack(tensors).double()
    exact = total.sum(0) / (world if average else 1)
    result, _ = exchange(tensors, Layout(1, 300, world), average)
    sent = (total.abs() / 16).clamp(min=2.0**-137).sum(0) / (world if average else 1)
    bound = sent + ((exact.abs() + sent) / 16).clamp(min=2.0**-137)
    assert ((result.double() - exact).abs() <= bound).all()
    assert result.any() == (size > 1e-43)


def test_means_have_the_bits_of_sums_that_are_divided():
    """For every number of ranks, and within hosts and across them."""
    for ranks in (2, 3, 4, 6, 7, 16):
        layout = Layout(1, 1000, 1)
        chunks = torch.cat([reference.pack(draw(layout), layout) for _ in range(ranks)])
        total, mean = torch.empty(2, 1000)
        reference.reduce_unpack(chunks, total)
        reference.reduce_unpack(chunks, mean, ranks)
        assert_same_bits(mean, total / torch.tensor(float(ranks)))


# --- Triton against the reference


@INPUTS
@EVERY_LAYOUT
def test_kernels_give_the_references_bits(layout, dtype, kernel_device):
    x = draw(layout, dtype, spoiled=layout.world == 3)
    codes, scale = quantized(x, layout)
    here = [t.to(kernel_device) for t in (x, codes, scale)]
    chunks = triton.pack(here[0], layout)
    assert_same_chunks(chunks, reference.pack(x, layout), layout)
    own, expected = here[1].view(torch.uint8), codes.view(torch.uint8)
    sent = triton.pack(own, layout, scale=here[2])
    assert_same_chunks(sent, reference.pack(expected, layout, scale=scale), layout)
    triton.unpack(chunks, here[0], layout)
    reference.unpack(chunks.cpu(), x, layout)
    assert_same_bits(here[0], x)
    for tensor in (*here[1:], codes, scale):
        tensor.zero_()
    triton.unpack(chunks, own, layout, here[2])
    reference.unpack(chunks.cpu(), expected, layout, scale)
    assert_same_bits(own, expected)
    assert_same_bits(here[2], scale)


def assert_same_chunks(given, expected, layout):
    """Compare all bytes but those that fill up a chunk."""
    used = layout.per * (BLOCK + 4)
    assert given.shape == expected.shape
    assert_same_bits(given[..., :used].contiguous(), expected[..., :used].contiguous())


@INPUTS
@pytest.mark.parametrize("average", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize(("size", "ranks"), [(1, 1), (129, 2), (2500, 3), (4096, 5)])
def test_reductions_give_the_references_bits(size, ranks, average, dtype, kernel_device):
    layout, divisor = Layout(1, size, 1), ranks if average else 1
    chunks = torch.cat([reference.pack(draw(layout, spoiled=i == 4), layout) for i in range(ranks)])
    if size == 2500:  # blocks near both ends of float32
        scales = reference.scales_of(chunks, layout.per)
        scales[:, 5:7], least = 7e35, 2.0**-127
        if (
            dtype is not torch.bfloat16
        ):  # of which the interpreter stores subnormal numbers as others
            scales[:, 7:9], scales[:, 9] = least, 2 * least
    here = chunks.to(kernel_device)
    packed = triton.reduce_pack(here, layout, divisor)
    assert_same_chunks(packed, reference.reduce_pack(chunks, layout, divisor), layout)
    ours = torch.empty(size, dtype=dtype, device=kernel_device)
    theirs = torch.empty(size, dtype=dtype)
    triton.reduce_unpack(here, ours, divisor)
    reference.reduce_unpack(chunks, theirs, divisor)
    assert_same_bits(ours, theirs)


def test_several_stripes_are_reduced_as_each_by_itself(kernel_device):
    """As between hosts, where a rank of each host owns a stripe of every other's."""
    layout, ranks, stripes = Layout(1, 4000, 6), 2, 3
    chunks = torch.stack(
        [reference.pack(torch.randn(4000), layout)[:stripes] for _ in range(ranks)]
    )
    each = [reference.reduce_pack(chunks[:, i].contiguous(), layout, 2.0) for i in range(stripes)]
    for kernels, device in ((reference, "cpu"), (triton, kernel_device)):
        together = kernels.reduce_pack(chunks.to(device), layout, 2.0)
        assert_same_chunks(together, torch.stack(each), layout)


def test_empty_tensors(kernel_device):
    layout = Layout(1, 0, 3)
    assert layout.pitch == 0
    x = torch.empty(0, device=kernel_device)
    chunks = triton.pack(x, layout)
    assert chunks.shape == reference.pack(x.cpu(), layout).shape == (3, 0)
    triton.unpack(chunks, x, layout)
    reference.unpack(chunks.cpu(), x.cpu(), layout)
    assert triton.reduce_pack(chunks, layout).shape == (0,)


@pytest.mark.gpu
@INPUTS
@pytest.mark.parametrize("size", [2**24, 2**24 + 77])
def test_large_tensors_give_the_references_bits(size, dtype):
    layout = Layout(1, size, 4)
    x = draw(layout, dtype)
    chunks = triton.pack(x.cuda(), layout)
    expected = reference.pack(x, layout)
    assert_same_chunks(chunks, expected, layout)
    assert_same_chunks(
        triton.reduce_pack(chunks, layout, 4.0),
        reference.reduce_pack(expected, layout, 4.0),
        layout,
    )


@pytest.mark.gpu
def test_elements_beyond_two_to_the_31_are_as_the_first_ones():
    size = 2**31 + 2**20
    layout = Layout(1, size, 2)
    x = torch.randn(2**20, device="cuda").bfloat16().repeat(2**11 + 1)
    chunks = triton.pack(x, layout)
    out = torch.zeros_like(x)
    triton.unpack(chunks, out, layout)
    assert_same_bits(out[-(2**20) :], out[: 2**20])
    assert out[: 2**20].ne(0).any()
