"""Inputs that several kernel tests need: float32 values where a cast can go wrong, random ones of every exponent."""

import pytest
import torch
from helpers import grid

from fp8stack.kernels import cast_rows
from fp8stack.kernels.reference import cast_rows as reference_rows


def neighbours(x):
    """Return `x` with the float32 just below and just above each element."""
    x = x.float()
    down, up = (torch.nextafter(x, torch.full_like(x, end)) for end in (-torch.inf, torch.inf))
    return torch.cat([x, down, up])


def make_special_values(fmt):
    """Return the grid of `fmt`, its midpoints, its ends and overflow, each ± 1 ulp, of both signs if it is signed."""
    values = grid(fmt)
    top_step = values[-1] - values[-2]
    edges = [0, 2.0**-149, 2.0**-127, 2.0**-126, 1e30, 3.4e38, fmt.min_positive / 2]
    edges = torch.tensor([*edges, fmt.max + top_step / 2, fmt.max + top_step], dtype=torch.float64)
    x = neighbours(torch.cat([values, (values[1:] + values[:-1]) / 2, edges]))
    x = x.abs()
    return torch.cat([x, -x]) if fmt.signed else x


@pytest.fixture
def special_values():
    return make_special_values


@pytest.fixture
def random_bits():
    """Return a function that draws finite float32 values uniformly over bit patterns: every exponent, both signs."""

    def draw(count):
        bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32)
        x = bits.view(torch.float32)
        return torch.where(x.isfinite(), x, 1.0)

    return draw


@pytest.fixture
def rough(random_bits):
    """Return a function that draws values of every exponent in one third, of two sizes in the rest, with zeros, NaN
    and infinity. With a `limit` nothing finite lies above it."""

    def draw(shape, dtype=torch.float32, limit=None):
        x = torch.randn(shape)
        flat = x.view(-1)
        if len(flat) > 100:
            flat[: len(flat) // 3] = random_bits(len(flat) // 3)
            flat[len(flat) // 3 : len(flat) // 2] *= 1e-30
            flat[::7] = 0
            if limit is not None:
                flat.clamp_(-limit, limit)
            flat[5:95:30] = torch.tensor([torch.nan, torch.inf, -0.0])
        if dtype is torch.bfloat16 and not torch.cuda.is_available():
            x[x.abs() < 2.0**-126] = 0  # the interpreter loads subnormal bfloat16 as other numbers
        return x.to(dtype)

    return draw


@pytest.fixture
def small_tiles(monkeypatch):
    """Cut casts by rows into tiles of 4,096 elements and 1,024 columns for two programs where kernels are interpreted:
    what a GPU has for small matrices lies beyond them mostly, and is never gone through in several rounds."""
    if torch.cuda.is_available():
        yield
        return
    cast_rows.tiling.cache_clear()
    monkeypatch.setattr(cast_rows, "TILE", 4096)
    monkeypatch.setattr(cast_rows, "LONGEST", 1024)
    monkeypatch.setattr(reference_rows, "PARTS", 2)
    yield
    cast_rows.tiling.cache_clear()


@pytest.fixture
def rows_beyond_int32():
    """Return the number of rows of 2^14 elements whose last ones lie beyond element 2^31, if they fit in memory."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    yield 2**17 + 3
    torch.cuda.empty_cache()
