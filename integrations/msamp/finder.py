"""`import msamp` and a distribution "ms-amp", found in this process while somebody asks for them.

A finder at the end of `sys.meta_path` answers for the modules in `LAYOUT`, and tells `importlib.metadata` of a
distribution, which is what accelerate's `is_msamp_available` asks for. Each module is empty: its names are fetched from
the files beside this one when they are used, so that torch.distributed or DeepSpeed are imported for nobody else.
Nothing is written to disk, and processes that are spawned have to enable it themselves.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module, invalidate_caches
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fp8stack.errors import ConfigError, did_you_mean

from .tensors import cast, qtype_of

VERSION = "0.4.0"
"""The version of MS-AMP whose names these are."""

_API = dict.fromkeys(("LinearReplacer", "clip_grad_norm_"), "api")
_OPTIMIZERS = dict.fromkeys(("DSAdam", "LBAdam", "LBAdamW"), "optimizers")
_TENSORS = dict.fromkeys(("ScalingMeta", "ScalingTensor", "cast"), "tensors")
_TENSORS["TensorDist"] = "collectives"

LAYOUT: dict[str, dict[str, str]] = {
    "msamp": {"initialize": "api", "opt_levels": "api", **_API, **_OPTIMIZERS},
    "msamp.common": {},
    "msamp.common.dtype": {"Dtypes": "tensors", "QType": "tensors"},
    "msamp.common.tensor": _TENSORS,
    "msamp.deepspeed": {"*": "deepspeed"},
    "msamp.fsdp": {"FP8FullyShardedDataParallel": "collectives", "FsdpReplacer": "api"},
    "msamp.nn": _API,
    "msamp.nn.clip_grad": {"clip_grad_norm_": "api"},
    "msamp.nn.distributed": {"FP8DistributedDataParallel": "collectives"},
    "msamp.nn.linear": {"LinearReplacer": "api"},
    "msamp.optim": {"FSDPAdam": "optimizers", **_OPTIMIZERS},
    "msamp.te": {},  # imported for its effects, which were patches of TransformerEngine
}
"""MS-AMP's modules: the file that has each name, "*" for all others."""


class Handle(AbstractContextManager["Handle"]):
    """What `enable` returns. As a context manager it removes itself at the end."""

    def __init__(self, added: dict[str, Any]) -> None:
        self._added = added

    def remove(self) -> None:
        """Let `import msamp` find nothing again. Modules and objects made before stay usable. Twice is harmless."""
        if self not in _HANDLES:
            return
        _HANDLES.remove(self)
        for name in self._added:
            delattr(torch.Tensor, name)
        if not _HANDLES:
            sys.meta_path.remove(_FINDER)
            for name in LAYOUT:
                sys.modules.pop(name, None)
            invalidate_caches()

    def __exit__(self, *error: object) -> None:
        self.remove()


def enable(tensor_methods: bool = False) -> Handle:
    """Let `import msamp`, its submodules and the distribution "ms-amp" be found in this process.

    Args:
        tensor_methods: also give torch.Tensor the method `cast` and the property `qtype`, as `import msamp` did. It is
            the one thing of torch that is changed, and only if asked for.

    Returns:
        A handle whose `remove()` undoes it; also a context manager. It may be enabled several times, and ends with
        the last handle.

    Raises:
        ConfigError: where another package msamp can be imported, or torch.Tensor has such attributes.
    """
    other = None if _HANDLES else sys.modules.get("msamp") or find_spec("msamp")
    if other is not None:
        place = getattr(other, "origin", None) or getattr(other, "__file__", None) or other
        raise ConfigError(
            f"a package msamp is here already ({place}), and fp8stack's would hide it. Uninstall it "
            "(pip uninstall ms-amp), or start from another folder if it is one beside the script."
        )
    added = {"cast": cast, "qtype": property(qtype_of)} if tensor_methods else {}
    for name in added:
        if hasattr(torch.Tensor, name):
            raise ConfigError(
                f"tensor_methods=True adds torch.Tensor.{name}, and there is one already. Call enable() without, "
                "or remove the handle that added it."
            )
    if not _HANDLES:
        sys.meta_path.append(_FINDER)
        invalidate_caches()
    for name, value in added.items():
        setattr(torch.Tensor, name, value)
    _HANDLES.append(handle := Handle(added))
    return handle


class _Finder(importlib.metadata.DistributionFinder, Loader):
    """Finds and makes the modules, and finds the distribution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in LAYOUT:
            return ModuleSpec(fullname, self, origin="fp8stack", is_package=True)
        if fullname.startswith("msamp."):
            raise ModuleNotFoundError(
                f"fp8stack's msamp has no module {fullname!r}; it has {', '.join(LAYOUT)}. "
                "docs/migrating.md says what to use instead.",
                name=fullname,
            )
        return None

    def exec_module(self, module: ModuleType) -> None:
        package, places = module.__name__, LAYOUT[module.__name__]

        def look_up(name: str) -> Any:
            if f"{package}.{name}" in LAYOUT:
                return import_module(f"{package}.{name}")
            file = places.get(name) or places.get("*")
            if file is None or name.startswith("__"):
                meant = did_you_mean(name, places)
                raise AttributeError(f"fp8stack's {package} has no {name!r}.{meant}")
            return getattr(import_module(f".{file}", __package__), name)

        own = {"__getattr__": look_up, "__version__": VERSION}
        vars(module).update(own, __all__=sorted(places.keys() - {"*"}))

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        name = None if context is None else context.name
        if name is None or re.sub(r"[-_.]+", "-", name).lower() == "ms-amp":
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    """Name and version, and no files."""

    def read_text(self, filename: str) -> str | None:
        about = f"Metadata-Version: 2.1\nName: ms-amp\nVersion: {VERSION}\n"
        return {"METADATA": about, "top_level.txt": "msamp\n"}.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).with_name(str(path))


_FINDER = _Finder()
_HANDLES: list[Handle] = []
