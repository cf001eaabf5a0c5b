"""Lightning: a level of fp8stack as a precision plugin of the Trainer, and one call for Fabric.

    trainer = Trainer(plugins=[Fp8Precision("O2", precision="bf16-mixed")], callbacks=[Fp8Callback()])
    model, optimizer = setup(fabric, model, optimizer, "O2")         # instead of fabric.setup(model, optimizer)

`Fp8Precision` converts the module and the optimizers that `configure_optimizers` returned, once the strategy has made
both; `Fp8Callback` raises where FP8 is silently off, and logs the monitor's numbers. Fabric shows no plugin the
optimizers, hence the function. Lightning is neither patched nor imported before one of the classes is asked for;
`lightning` and `pytorch_lightning` will both do.

Limits: one device, DDP and ModelParallelStrategy (FSDP2). Lightning lets no plugin into DeepSpeedStrategy: use
`fp8stack.integrations.deepspeed.install()` there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .fabric import setup

if TYPE_CHECKING:
    from .callback import Fp8Callback
    from .precision import Fp8Precision

_PLACES = {"Fp8Callback": "callback", "Fp8Precision": "precision"}

__all__ = ["Fp8Callback", "Fp8Precision", "setup"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f".{_PLACES[name]}", __name__), name)
    return found
