"""Facts about an activation that are kept with it, as an attribute, until it changes or is freed.

A layer that reads an activation finds there what was known of it already: the largest magnitudes of its parts, which
the norm that made it has seen, or its values in 16 bits, which another layer has cast. Leaves of autograd should get no
notes: users write to them without a trace (through `.data`, NumPy, collectives).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from fp8stack.kernels.ops import raw_stream


class _Note:
    def __init__(self, key: Any, fact: Any) -> None:
        self.key, self.fact = key, fact

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # which weights_only allows, should the activation be saved


def note(x: Tensor, name: str, fact: Any) -> None:
    """Keep `fact` with `x`; not under torch.compile."""
    if not x.is_inference():  # inference tensors have no version
        x.__dict__[f"_fp8stack_{name}"] = _Note(moment(x), fact)


def noted(x: Tensor, name: str) -> Any:
    """Return what `note` stored for this very tensor; None if it has changed since."""
    found = x.__dict__.get(f"_fp8stack_{name}")
    return found.fact if type(found) is _Note and found.key == moment(x) else None


def moment(x: Tensor) -> tuple[int, int, int, bool]:
    """Return a key for facts about `x`: once it changes, they must not be used any more."""
    # The id, since a copy has the tensor's attributes, and the products of `matmuls.py` serve many weights. Another
    # stream has not waited for the facts. A CUDA graph is replayed with other contents, for which they do not hold.
    return id(x), x._version, raw_stream(x), capturing(x)


def capturing(x: Tensor) -> bool:
    """Is `x` on a GPU whose current stream is being captured?"""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
