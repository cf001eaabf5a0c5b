"""An optimizer's `state` that notices when somebody replaces a tensor in it.

A plan hands addresses of state tensors to the GPU, so it must be made anew when a user moves them (offloading state
to the host between steps is common), loads others or deletes them. Comparing thousands of tensors at every step would
cost more than the step; instead these dictionaries call back when they are written to. Otherwise they are plain
dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class TrackedDict(dict[Any, Any]):
    """A dict that calls `changed()` after every change of its keys or values."""

    def __init__(self, changed: Callable[[], None], *args: Any) -> None:
        super().__init__(*args)
        self._changed = changed

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        from copy import deepcopy

        return deepcopy(dict(self), memo)


def _tracked(name: str) -> Callable[..., Any]:
    def method(self: TrackedDict, *args: Any, **kwargs: Any) -> Any:
        result = getattr(dict, name)(self, *args, **kwargs)
        self._changed()
        return result

    method.__name__ = name
    return method


_CHANGES = (
    "__setitem__",
    "__delitem__",
    "update",
    "pop",
    "popitem",
    "clear",
    "setdefault",
    "__ior__",
)
for _name in _CHANGES:
    setattr(TrackedDict, _name, _tracked(_name))


class TrackedStates(TrackedDict):
    """`optimizer.state`: a tracked dict of a tracked dict for each parameter, made when first asked for."""

    def __missing__(self, parameter: Tensor) -> TrackedDict:
        entry = TrackedDict(self._changed)
        dict.__setitem__(self, parameter, entry)
        return entry

    def __setitem__(self, parameter: Tensor, entry: Any) -> None:
        dict.__setitem__(self, parameter, TrackedDict(self._changed, entry))
        self._changed()

    def setdefault(self, parameter: Tensor, default: Any = None) -> Any:
        if parameter not in self:
            self[parameter] = default or {}
        return self[parameter]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for parameter, entry in dict(*args, **kwargs).items():
            self[parameter] = entry
