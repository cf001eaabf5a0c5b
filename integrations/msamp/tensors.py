"""MS-AMP's scaled tensors: codes and one power-of-two scale for the whole tensor.

    value = code × scale_inv,    scale = 1 / scale_inv = 2^floor(log2(max / amax))

They are for scripts that handle such tensors themselves. Nothing that `msamp.initialize` makes is one: its gradients
are fp8stack's `BlockScaledTensor`, its states plain tensors. A `ScalingTensor` is no torch.Tensor, in MS-AMP neither;
`float()` gives one. FP8 codes are uint8, rounded as fp8stack rounds everywhere (`kernels/reference/fp8.py`). Scales are
those of the tensor itself: delayed ones (window_size > 1) are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from fp8stack.errors import ConfigError, did_you_mean
from fp8stack.formats import E4M3, E5M2, MiniFloat
from fp8stack.kernels.reference import fp8
from fp8stack.kernels.reference.power_of_two import power_of_two_scale

Number: TypeAlias = Tensor | float


@dataclass(frozen=True)
class QType:
    """The name of a format."""

    name: str
    value: int


class Dtypes:
    """MS-AMP's names of formats. FP8 codes are uint8, whichever the format."""

    kbyte = QType("kByte", 0)
    kint32 = QType("kInt32", 1)
    kfloat32 = QType("kFloat32", 2)
    kfloat16 = QType("kFloat16", 3)
    kbfloat16 = QType("kBFloat16", 4)
    kfloat8_e4m3 = QType("kFloat8E4M3", 5)
    kfloat8_e5m2 = QType("kFloat8E5M2", 6)

    qtype_to_dtype: ClassVar[dict[QType, torch.dtype]] = {
        kbyte: torch.uint8, kint32: torch.int32, kfloat32: torch.float32, kfloat16: torch.float16,
        kbfloat16: torch.bfloat16, kfloat8_e4m3: torch.uint8, kfloat8_e5m2: torch.uint8,
    }  # fmt: skip
    dtype_to_qtype: ClassVar[dict[torch.dtype, QType]] = {
        torch.uint8: kfloat8_e4m3, torch.int8: kfloat8_e5m2, torch.int32: kint32, torch.float32: kfloat32,
        torch.float16: kfloat16, torch.bfloat16: kbfloat16,
    }  # fmt: skip

    @staticmethod
    def is_fp8_qtype(qtype: QType) -> bool:
        """Return whether `qtype` is E4M3 or E5M2."""
        return qtype in FP8_FORMATS

    @staticmethod
    def get_dtype_from_qtype(qtype: QType) -> torch.dtype:
        """Return what codes of `qtype` are stored as."""
        return Dtypes.qtype_to_dtype[qtype]


FP8_FORMATS: dict[QType, MiniFloat] = {Dtypes.kfloat8_e4m3: E4M3, Dtypes.kfloat8_e5m2: E5M2}
_LARGEST: dict[QType, float] = {qtype: fmt.max for qtype, fmt in FP8_FORMATS.items()} | {
    Dtypes.dtype_to_qtype[dtype]: torch.finfo(dtype).max
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
}


@dataclass(eq=False)
class ScalingMeta:
    """The scale of a tensor: `scale`, `scale_inv` (float32, 0-d) and `amax` (float32 [1]), on any device.

    Raises:
        ConfigError: for a format without a scale, or a window of more than one step.
    """

    qtype: QType
    scale: Any = None
    scale_inv: Any = None
    amax: Any = None
    window_size: int = 1
    group: Any = None

    def __post_init__(self) -> None:
        if self.qtype not in _LARGEST:
            known = ", ".join(q.name for q in _LARGEST)
            raise ConfigError(f"{self.qtype!r} has no scale; use one of msamp's Dtypes: {known}.")
        if self.window_size != 1:
            raise ConfigError(
                f"window_size={self.window_size}: a ScalingTensor is scaled by its own amax, and keeps no history. "
                'Leave it out; for layers, fp8stack.initialize(..., fp8_recipe="delayed") does.'
            )
        self.scale = torch.ones(()) if self.scale is None else self.scale
        self.scale_inv = 1 / self.scale if self.scale_inv is None else self.scale_inv
        self.amax = torch.zeros(1) if self.amax is None else self.amax

    def to(self, device: torch.device | str | None) -> ScalingMeta:
        """Return a copy on `device`."""
        parts = {n: getattr(self, n).to(device, copy=True) for n in ("scale", "scale_inv", "amax")}
        return replace(self, **parts)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "group": None}  # a process group is this process's


_OF_CODES = (
    "data_ptr", "device", "dim", "dtype", "is_contiguous", "is_cuda", "ndim", "nelement", "numel", "shape", "size",
    "stride",
)  # fmt: skip
_OF_VALUES = ("bfloat16", "half", "isnan", "max", "min")
_KEPT_SCALED = ("clone", "contiguous", "cpu", "cuda", "detach", "flatten", "t")


class ScalingTensor:
    """Codes `value` of any shape and a `meta`.

    It has what MS-AMP's has to read, copy and scale it; shapes, device and dtype are those of the codes. What moves or
    reshapes the codes returns a ScalingTensor: a view of them shares the scale, a copy has its own. For arithmetic take
    `float()`.
    """

    grad: Any = None
    requires_grad = False

    def __init__(self, value: Tensor, meta: ScalingMeta) -> None:
        stored = Dtypes.get_dtype_from_qtype(meta.qtype)
        if value.dtype is not stored:
            raise ConfigError(
                f"codes of {meta.qtype.name} are {stored}, got {value.dtype}. cast(x, qtype) makes them."
            )
        self.value, self.meta = value, meta

    def __getattr__(self, name: str) -> Any:
        if name in _OF_CODES:
            return getattr(self.value, name)
        if name in _OF_VALUES:
            return getattr(self.float(), name)
        if name in _KEPT_SCALED:
            return partial(self._rescaled, getattr(self.value, name))
        raise AttributeError(
            f"ScalingTensor has no {name!r}; float() returns an ordinary tensor.{did_you_mean(name, _OF_CODES)}"
        )

    def _rescaled(self, change: Callable[..., Tensor], *args: Any, **kwargs: Any) -> ScalingTensor:
        value = change(*args, **kwargs)
        shared = value.untyped_storage().data_ptr() == self.value.untyped_storage().data_ptr()
        return ScalingTensor(value, self.meta if shared else self.meta.to(value.device))

    @property
    def qtype(self) -> QType:
        return self.meta.qtype

    def float(self) -> Tensor:
        """Return the values, float32."""
        return decode(self.value, self.meta)

    def has_inf_or_nan(self) -> bool:
        """Return whether a value is not finite, by the values themselves."""
        return not bool(self.float().isfinite().all())

    def cast(self, qtype: QType) -> ScalingTensor:
        """Return it in another format, scaled anew."""
        return self if qtype == self.qtype else cast(self.float(), qtype)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return values of another dtype, or the scaled tensor on another device; arguments are torch's."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None:
            return self.float().to(device=device, dtype=dtype)
        return ScalingTensor(self.value.to(device), self.meta.to(device))

    # --- in place

    def copy_(self, source: ScalingTensor) -> ScalingTensor:
        """Take over codes and scale of a tensor of the same shape and format."""
        if source.qtype != self.qtype:
            raise ConfigError(
                f"a {self.qtype.name} tensor takes no {source.qtype.name} codes. Use source.cast(self.qtype)."
            )
        self.value.copy_(source.value)
        self.meta = source.meta.to(self.value.device)
        return self

    def mul_(self, factor: Number) -> ScalingTensor:
        """Multiply what the codes stand for, by one number."""
        meta, number = self.meta, torch.as_tensor(factor, dtype=torch.float32, device=self.device)
        if number.numel() != 1:
            what = f"by one number, got a tensor of shape {tuple(number.shape)}"
            raise ConfigError(f"a ScalingTensor is multiplied {what}. Use its float().")
        number = number.reshape(())
        meta.scale_inv, meta.amax = meta.scale_inv * number, meta.amax * number.abs()
        meta.scale = 1 / meta.scale_inv
        return self

    def div_(self, divisor: Number) -> ScalingTensor:
        return self.mul_(1 / divisor)

    def zero_(self) -> ScalingTensor:
        self.value.zero_()
        return self


@torch.no_grad()
def cast(
    x: Tensor, qtype: QType, meta: ScalingMeta | None = None, sync: bool = False
) -> ScalingTensor:
    """Return `x` (floating point, any shape) in the format `qtype`, scaled by its largest magnitude.

    Args:
        meta: the object that gets the scale; by default a new one.
        sync: take the largest magnitude of all ranks (of `meta.group`), so that all have the same scale.

    Raises:
        ConfigError: for a format that has no scale, or a `meta` of another.
    """
    meta = ScalingMeta(qtype) if meta is None else meta
    if meta.qtype != qtype:
        raise ConfigError(f"meta is of {meta.qtype.name}, qtype={qtype.name}. Give one of them.")
    x = x.detach().float()
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    if sync and dist.is_available() and dist.is_initialized():
        amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum may drop a NaN
        dist.all_reduce(amax, dist.ReduceOp.MAX, meta.group)
    inverse = power_of_two_scale(amax, _LARGEST[qtype])
    usable = (amax > 0) & amax.isfinite()  # else the scale stays what it was
    meta.scale_inv = torch.where(usable, inverse, meta.scale_inv.to(x.device))
    meta.scale, meta.amax = 1 / meta.scale_inv, amax.reshape(1)
    scaled = x * meta.scale
    if qtype in FP8_FORMATS:
        return ScalingTensor(fp8.cast(scaled, FP8_FORMATS[qtype]).view(torch.uint8), meta)
    return ScalingTensor(scaled.to(Dtypes.get_dtype_from_qtype(qtype)), meta)


def decode(codes: Tensor, meta: ScalingMeta) -> Tensor:
    """Return the values of codes, float32."""
    fmt = FP8_FORMATS.get(meta.qtype)
    values = codes.float() if fmt is None else fp8.decode(codes, fmt)
    return values.mul(meta.scale_inv)


def qtype_of(x: Tensor) -> QType:
    """Return MS-AMP's name of the dtype of `x`; None where it has none is a KeyError."""
    return Dtypes.dtype_to_qtype[x.dtype]
