"""What the optimizers of commit dbf10cc wrote loads bit for bit and goes on; see `tests/optimizer_files.py`.

Since then m, v and masters of few bits are dithered, and the noise of those that were goes around evenly. Steps in such
formats are compared within their errors, all others bit for bit.
"""

import pytest
import torch
from helpers import assert_same_bits
from optimizer_files import KINDS, digest, make, read, step

SAME = (
    {"fp32", "keep"},
    {"split32", "fp32", "keep"},
)  # states and masters whose steps have the bits they had
ERRORS = {"8bit": 0.15, "fp8": 0.3, "4bit": 1.0, "fp8-lm": 0.3}  # of two updates, in learning rates


def load(kind):
    """Return (parameters, optimizer, the file that both were loaded from)."""
    saved = read(kind)
    parameters, optimizer = make(kind)
    with torch.no_grad():
        for p, value in zip(parameters, saved["weights"], strict=True):
            p.copy_(value)
    optimizer.load_state_dict(saved["optimizer"])
    return parameters, optimizer, saved


def formats_of(optimizer):
    """Return (states, master, dithered) of each parameter, in order; small ones have float32 states."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            states, master = group.get("states", "8bit"), group.get("master", "split24")
            moments = [x for x in optimizer.state[p].values() if x.ndim]
            plain = all(x.dtype is torch.float32 for x in moments if x.dtype is not torch.int16)
            kept = states in SAME[0] and (master in SAME[1] or p.dtype is torch.float32)
            found.append((states, master, not (kept or (plain and master != "none"))))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_loads_bit_for_bit(kind):
    parameters, optimizer, saved = load(kind)
    for number, p in enumerate(parameters):
        entry = saved["optimizer"]["state"][number]
        assert optimizer.state[p].keys() == entry.keys()
        for key, value in entry.items():
            value = value.double() if key == "step" else value  # float32 in that commit
            assert_same_bits(optimizer.state[p][key], value, key)


@pytest.mark.parametrize("kind", KINDS)
def test_states_in_every_format_go_on_as_they_would_have(kind):
    parameters, optimizer, saved = load(kind)
    formats = formats_of(optimizer)
    for number in (3, 4):
        step(parameters, optimizer, number)
    rows = zip(parameters, saved["later"], saved["digests"], formats, strict=True)
    for p, expected, digests, (states, master, dithered) in rows:
        found = digest(optimizer.state[p])
        if dithered:
            rtol = 2.0**-6 if master == "none" else 2.0**-7
            # Lion's update has the sign of a sum that rounding may turn.
            atol = 0.01 * (2.0 if kind == "Lion" else ERRORS.get(states, 0.02))
            torch.testing.assert_close(p.detach(), expected, rtol=rtol, atol=atol)
            assert found["step"] == digests["step"]
            continue
        if kind == "Muon" and p.ndim == 2:  # products of matrices may be summed in another order
            torch.testing.assert_close(p.detach(), expected, rtol=0.02, atol=0.002)
            found, digests = (
                {k: v for k, v in d.items() if k.startswith("momentum")} for d in (found, digests)
            )
        else:
            assert_same_bits(p.detach(), expected)
        assert found == digests


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_resumes_bit_for_bit(kind):
    """Noise is of a place and a step, so a run has the same bits if it is saved and loaded between two steps."""
    parameters, optimizer, _ = load(kind)
    others, resumed = make(kind)
    step(parameters, optimizer, 3)
    with torch.no_grad():
        for p, other in zip(parameters, others, strict=True):
            other.copy_(p)
    resumed.load_state_dict(optimizer.state_dict())
    for each in ((parameters, optimizer), (others, resumed)):
        step(*each, 4)
    for p, other in zip(parameters, others, strict=True):
        assert_same_bits(other.detach(), p.detach())
        assert digest(resumed.state[other]) == digest(optimizer.state[p])
