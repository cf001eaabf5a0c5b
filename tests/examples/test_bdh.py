"""examples/10_bdh.py: a model of bare parameters trains at every level as it does without fp8stack."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIZES = {"dim": 64, "heads": 2, "neurons": 64, "levels": 2}


@pytest.fixture(scope="module")
def bdh():
    spec = importlib.util.spec_from_file_location("bdh", ROOT / "examples/10_bdh.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.fixture(scope="module")
def expected(bdh):
    return bdh.train(None, 20, str(ROOT / "fp8stack"), **SIZES)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_bdh_trains_at_every_level(level, bdh, expected, capsys):
    losses = bdh.train(level, 20, str(ROOT / "fp8stack"), **SIZES)
    assert "multiplied in FP8: decoder, encoder, encoder_v, head\n" in capsys.readouterr().out
    assert losses[-1] < 0.9 * losses[0]
    assert abs(sum(losses[-5:]) / sum(expected[-5:]) - 1) < 0.01
