"""A matrix in FP8 with a scale known before it is read: "delayed scaling", from the amax of the last casts.

The state of one operand is float32 [3 + history]:

    state[0]   scale of the next cast           value = code × scale
    state[1]   scale of the last cast           recomputation under activation checkpointing repeats it
    state[2]   where the next amax goes; the bits of an integer
    state[3:]  amax of the last casts, 0 where there was none

That of a weight, which is read before it is scaled (`recast`), has no history, and of the rest only state[0].

A cast that updates it writes its amax to the history, then scale = 2^margin × amax / max, of the history's largest or
latest amax (Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 4; margin: TransformerEngine's). An
amax that is zero or not finite leaves scale and history as they are. Values beyond the scale saturate; those that are
not finite become NaN.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8stack.formats import MiniFloat

from .cast import ALIGNMENT, transpose
from .fp8 import cast_finite
from .quantize import scale_and_inverse

HEADER = 3


SEEDED = 16
"""Updates after which a state is taken to have a scale. An operand that is zero until then loses its next cast."""

STATES: WeakValueDictionary[int, DelayedState] = WeakValueDictionary()
"""By handle: an operator under torch.compile takes no objects."""


class DelayedState:
    """The history of one operand, on the device of its first cast."""

    def __init__(self, history: int, margin: int = 0, most_recent: bool = False) -> None:
        self.history, self.margin, self.most_recent = history, margin, most_recent
        self.tensor: Tensor | None = None
        self._parts: Tensor | None = None
        self.casts = 0
        self.handle = next(_HANDLES)
        STATES[self.handle] = self

    @property
    def size(self) -> int:
        """Elements of the tensor described above."""
        return HEADER + self.history

    def on(self, device: torch.device, update: bool = False) -> Tensor:
        """Return the tensor described above, empty at first; `update` says that a cast is about to update it."""
        if self.tensor is None or self.tensor.device != device:
            with torch.inference_mode(False):
                self.tensor = torch.zeros(self.size, dtype=torch.float32, device=device)
                if self.history:
                    self._parts = torch.zeros(512, dtype=torch.int32, device=device)
            self.casts = 0
        self.casts += update
        return self.tensor

    def parts_on(self, device: torch.device) -> Tensor:
        """Return where kernels gather a cast's amax: int32 [512], zero between casts."""
        self.on(device)
        assert self._parts is not None
        return self._parts

    def __deepcopy__(self, memo: dict[int, Any]) -> DelayedState:
        return DelayedState(self.history, self.margin, self.most_recent)

    def __reduce__(self) -> Any:  # a copy learns its scales anew
        return DelayedState, (self.history, self.margin, self.most_recent)


_HANDLES = count()


def cast_delayed(
    x: Tensor,  # float32, bfloat16 or float16 [..., cols], read as [rows, cols]
    fmt: MiniFloat,  # e4m3 or e5m2
    of: DelayedState,
    update: bool,  # take this amax into the history
    again: bool,  # with the last cast's scale
) -> tuple[
    Tensor, Tensor, Tensor
]:  # codes [rows16, cols16], codes_t [cols16, rows16], scale float32 0-d
    """Quantize a matrix with the scale in `of`."""
    x = x.detach().reshape(-1, x.shape[-1]).float()
    state = of.on(x.device, update and x.numel() > 0)
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    own, _ = scale_and_inverse(amax * 2.0**of.margin, fmt)
    scale = torch.where(state[0] > 0, state[1 if again else 0], own)
    codes = encode_saturating(
        pad(x, (0, -x.shape[1] % ALIGNMENT, 0, -x.shape[0] % ALIGNMENT)), scale, fmt
    )
    if update and x.numel():
        _update(state, amax, scale, fmt, of)
    return codes, transpose(codes), scale


def encode_saturating(
    x: Tensor,  # float32
    scale: Tensor,  # float32, 0-d
    fmt: MiniFloat,
) -> Tensor:  # fmt.dtype
    """Return the codes of x / scale: the largest where that is beyond it, NaN where x is not finite."""
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    scaled = (x * inverse).clamp(-fmt.max, fmt.max)
    codes = cast_finite(torch.where(x.isfinite(), scaled, 0.0), fmt)
    return torch.where(x.isfinite(), codes.view(torch.uint8), 0x7F).view(fmt.dtype)


def _update(state: Tensor, amax: Tensor, scale: Tensor, fmt: MiniFloat, of: DelayedState) -> None:
    history, at = state[HEADER:], state.view(torch.int32)[2:3]
    others = history.scatter(0, at.long(), 0.0)
    largest = amax if of.most_recent else torch.maximum(others.amax(), amax)
    new, _ = scale_and_inverse(largest * 2.0**of.margin, fmt)
    live = (amax > 0) & amax.isfinite() & (new > 0)  # too small for a scale counts as zero
    history.scatter_(0, at.long(), torch.where(live, amax, history[at.long()]).reshape(1))
    state[1].copy_(scale)
    state[0].copy_(torch.where(live, new, state[0]))
    at.copy_(torch.where(live, (at + 1) % len(history), at))
