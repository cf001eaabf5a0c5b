"""`import msamp` and a distribution "ms-amp", found in this process while somebody asks for them.

`enable` puts a module into `sys.modules` for each row of `NAMES`, and a finder at the end of `sys.meta_path`. The
finder tells `importlib.metadata` of a distribution, which is what accelerate's `is_msamp_available` asks for, and says
which modules there are where a script imports another one. Nothing is written to disk, and processes that are spawned
have to enable it themselves.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8stack.errors import ConfigError
from fp8stack.integrations.deepspeed import Handle

from . import deepspeed
from .api import LinearReplacer, initialize, opt_levels
from .optimizers import DSAdam, LBAdam, LBAdamW, clip_grad_norm_

VERSION = "0.4.0"
"""The version of MS-AMP whose names these are."""

_OPTIMIZERS = (DSAdam, LBAdam, LBAdamW)
NAMES: dict[str, tuple[Any, ...]] = {
    "msamp": (initialize, LinearReplacer, clip_grad_norm_, *_OPTIMIZERS),
    "msamp.nn": (LinearReplacer, clip_grad_norm_),
    "msamp.optim": _OPTIMIZERS,
    "msamp.te": (),  # imported for its effects, which were patches of TransformerEngine
}
"""MS-AMP's modules, packages first, and what is in them; `msamp.deepspeed` is the file beside this one."""


def enable() -> Handle:
    """Let `import msamp`, its submodules and the distribution "ms-amp" be found in this process.

    Returns a handle whose `remove()` takes this back; it is also a context manager. Objects made before stay usable.
    Enabling twice is enabling once, and the first handle removes it.

    Raises:
        ConfigError: where another package msamp can be imported.
    """
    handle = Handle()
    if _FINDER in sys.meta_path:
        return handle
    other = sys.modules.get("msamp") or find_spec("msamp")
    if other is not None:
        place = getattr(other, "origin", None) or getattr(other, "__file__", None) or other
        raise ConfigError(
            f"a package msamp is here already ({place}), and fp8stack's would hide it. Uninstall it "
            "(pip uninstall ms-amp), or start from another folder if it is one beside the script."
        )
    sys.meta_path.append(_FINDER)
    handle.callback(sys.meta_path.remove, _FINDER)
    modules = {"msamp.deepspeed": deepspeed}
    for name, things in NAMES.items():
        modules[name] = module_from_spec(ModuleSpec(name, None, origin="fp8stack", is_package=True))
        vars(modules[name]).update({thing.__name__: thing for thing in things})
    root = modules["msamp"]
    vars(root).update(__version__=VERSION, opt_levels=opt_levels)
    for name, module in modules.items():
        sys.modules[name] = module
        handle.callback(sys.modules.pop, name, None)
        if module is not root:
            setattr(root, name.removeprefix("msamp."), module)
    return handle


class _Finder(DistributionFinder):
    """Finds the distribution, and no module: those that there are have been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname.startswith("msamp."):
            raise ModuleNotFoundError(
                f"fp8stack's msamp has no module {fullname!r}; it has {', '.join(NAMES)} and msamp.deepspeed. "
                "docs/migrating.md says what to use instead.",
                name=fullname,
            )

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        name = None if context is None else context.name
        if name is None or re.sub(r"[-_.]+", "-", name).lower() == "ms-amp":
            yield _Distribution()


class _Distribution(Distribution):
    """Name and version, and no files."""

    def read_text(self, filename: str) -> str | None:
        about = f"Metadata-Version: 2.1\nName: ms-amp\nVersion: {VERSION}\n"
        return about if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).with_name(str(path))


_FINDER = _Finder()
