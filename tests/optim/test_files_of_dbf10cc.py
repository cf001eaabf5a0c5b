"""What the optimizers of commit dbf10cc wrote loads and goes on bit for bit; see `tests/optimizer_files.py`."""

import pytest
import torch
from helpers import assert_same_bits
from optimizer_files import KINDS, digest, make, read, step


@pytest.mark.parametrize("kind", KINDS)
def test_states_in_every_format_go_on_as_they_would_have(kind):
    saved = read(kind)
    parameters, optimizer = make(kind)
    with torch.no_grad():
        for p, value in zip(parameters, saved["weights"], strict=True):
            p.copy_(value)
    optimizer.load_state_dict(saved["optimizer"])
    for number in (3, 4):
        step(parameters, optimizer, number)
    for p, expected, digests in zip(parameters, saved["later"], saved["digests"], strict=True):
        found = digest(optimizer.state[p])
        if kind == "Muon" and p.ndim == 2:  # products of matrices may be summed in another order
            torch.testing.assert_close(p.detach(), expected, rtol=0.02, atol=0.002)
            found, digests = (
                {k: v for k, v in d.items() if k.startswith("momentum")} for d in (found, digests)
            )
        else:
            assert_same_bits(p.detach(), expected)
        assert found == digests
