"""The state that casts of one operand keep on the device: the scale of the next cast, and the amax of the last ones.

The state of an operand is float32 [3 + history]:

    state[0]   scale of the next cast           value = code × scale
    state[1]   scale of the last cast           recomputation under activation checkpointing repeats it
    state[2]   the place in the history that the next amax is written to; the bits of an integer
    state[3:]  amax of the last casts, 0 where there was none

A weight's state has no history and uses only state[0], as `recast` finds the weight's own amax.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

HEADER = 3
NOTES = 512  # places where the programs of one cast note magnitudes

# After this many updates a state is assumed to have a scale. If its operand was zero until then, the next cast is lost.
SEEDED = 16

# By handle: an operator under torch.compile takes no objects.
STATES: WeakValueDictionary[int, DelayedState] = WeakValueDictionary()
_HANDLES = count()


class DelayedState:
    """The history of one operand, on the device of its first cast."""

    # `after`, of an input: the state of the gradient of the layer's output
    def __init__(self, history: int, margin: int = 0, latest: bool = False, after: Any = None):
        self.history, self.margin, self.most_recent, self.after = history, margin, latest, after
        self.tensor: Tensor | None = None
        self._parts: Tensor | None = None
        self.casts = 0
        self.handle = next(_HANDLES)
        STATES[self.handle] = self

    @property
    def size(self) -> int:
        """Elements of the tensor described above."""
        return HEADER + self.history

    def learns(self, update: bool) -> bool:
        """Return whether a cast is to update this state, if `update` says that it would.

        An input's history begins after the first gradient's: the values of a forward before may mean nothing.
        """
        return update and (self.after is None or self.after.casts > 0)

    def on(self, device: torch.device, update: bool = False) -> Tensor:
        """Return the tensor described above, zero at first; `update` says that a cast is about to update it."""
        if self.tensor is None or self.tensor.device != device:
            with torch.inference_mode(False):
                self.tensor = torch.zeros(self.size, dtype=torch.float32, device=device)
                if self.history:
                    self._parts = torch.zeros(NOTES, dtype=torch.int32, device=device)
            self.casts = 0
        self.casts += update
        return self.tensor

    def parts_on(self, device: torch.device) -> Tensor:
        """Return where kernels gather a cast's amax: int32 [NOTES], zero between casts."""
        self.on(device)
        assert self._parts is not None
        return self._parts

    def __reduce__(self) -> Any:  # a copy learns its scales anew
        return DelayedState, (self.history, self.margin, self.most_recent, self.after)
