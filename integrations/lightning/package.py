"""Which Lightning, and which of its strategies.

`lightning.pytorch` and `pytorch_lightning` are two copies, which know no classes of each other's.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from fp8stack.errors import ConfigError

_OTHERS = {
    "DeepSpeedStrategy": "DeepSpeed converts dtypes and steps itself. Leave it out, put a section "
    '"fp8stack" into the config and call fp8stack.integrations.deepspeed.install()',
    "FSDPStrategy": "FSDP1 joins parameters to flat vectors, which have no rows to make blocks of. Use "
    "ModelParallelStrategy (FSDP2)",
}
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


def check_strategy(strategy: Any, caller: str, **more: str) -> None:
    """Raise ConfigError for strategies that have a way of their own to fp8stack; `more` are further ones."""
    others = _OTHERS | more
    for kind in type(strategy).__mro__:
        if kind.__name__ in others:
            raise ConfigError(f"{caller} has no part in {kind.__name__}: {others[kind.__name__]}.")
