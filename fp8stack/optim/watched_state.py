"""An optimizer's `state` that notices when somebody replaces a tensor in it.

Tables on the GPU hold the addresses of state tensors, so they must be made anew when a user moves these (offloading
state to the host between steps is common), loads others or deletes them. Comparing thousands of tensors at every step
would cost more than the step; instead these dictionaries call back when they are written to. Otherwise they are plain
dictionaries.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor


class WatchedDict(dict[Any, Any]):
    """A dict that calls `changed()` after every change of its keys or values."""

    def __init__(self, changed: Callable[[], None], *args: Any) -> None:
        super().__init__(*args)
        self._changed = changed

    def __reduce__(self) -> Any:  # copies and pickles are plain
        return dict, (dict(self),)


def _watched(change: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: WatchedDict, *args: Any, **kwargs: Any) -> Any:
        result = change(self, *args, **kwargs)
        self._changed()
        return result

    return method


_REMOVING = ("__delitem__", "clear", "pop", "popitem")
for _name in (*_REMOVING, "__setitem__", "__ior__", "setdefault", "update"):
    setattr(WatchedDict, _name, _watched(getattr(dict, _name)))


class WatchedStates(WatchedDict):
    """`optimizer.state`: a watched dict of a watched dict for each parameter, made when first asked for."""

    def __missing__(self, parameter: Tensor) -> WatchedDict:
        entry = WatchedDict(self._changed)
        dict.__setitem__(self, parameter, entry)
        return entry

    def __setitem__(self, parameter: Tensor, entry: Any) -> None:
        dict.__setitem__(self, parameter, WatchedDict(self._changed, entry))
        self._changed()

    def setdefault(self, parameter: Tensor, default: Any = None) -> Any:
        if parameter not in self:
            self[parameter] = default or {}
        return self[parameter]

    update = MutableMapping.update  # which goes through __setitem__
