import pytest

from fp8stack.nn import casts


@pytest.fixture(params=[0, casts.FEW_ROWS], ids=["many rows", "few rows"])
def rows(request, monkeypatch):
    """Backward's codes of a weight are made in backward, or in forward and kept."""
    monkeypatch.setattr(casts, "FEW_ROWS", request.param)
    return request.param
