"""Which Lightning: `lightning.pytorch` and `pytorch_lightning` are two copies, and know no classes of each other's."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def find_lightning() -> Any:
    """Return the package that the program has imported, or else the first that can be.

    Raises:
        ImportError: if there is none.
    """
    reasons = []
    for name in sorted(_NAMES, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise ImportError(
        f"fp8stack.integrations.lightning needs Lightning, which cannot be imported ({'; '.join(reasons)}). "
        "Install it: pip install 'fp8stack[lightning]'."
    )
