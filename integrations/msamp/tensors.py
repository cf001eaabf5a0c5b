"""MS-AMP's scaled tensors: codes and one power-of-two scale for the whole tensor.

    value = code × scale_inv,    scale = 1 / scale_inv = 2^floor(log2(max / amax))

They are for scripts that handle such tensors themselves. Nothing that `msamp.initialize` makes is one: its gradients
are fp8stack's `BlockScaledTensor`, its states plain tensors. A `ScalingTensor` is no torch.Tensor, in MS-AMP neither;
`float()` gives one. FP8 codes are uint8, rounded as fp8stack rounds everywhere (`kernels/reference/fp8.py`). Scales are
those of the tensor itself: delayed ones (window_size > 1) are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
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
        kbyte: torch.uint8,
        kint32: torch.int32,
        kfloat32: torch.float32,
        kfloat16: torch.float16,
        kbfloat16: torch.bfloat16,
        kfloat8_e4m3: torch.uint8,
        kfloat8_e5m2: torch.uint8,
    }
    dtype_to_qtype: ClassVar[dict[torch.dtype, QType]] = {
        torch.uint8: kfloat8_e4m3,
        torch.int8: kfloat8_e5m2,
        torch.int32: kint32,
        torch.float32: kfloat32,
        torch.float16: kfloat16,
        torch.bfloat16: kbfloat16,
    }
    dtype_to_size: ClassVar[dict[torch.dtype, int]] = {
        d: d.itemsize for d in (*dtype_to_qtype, torch.int64)
    }

    @staticmethod
    def is_fp8_qtype(qtype: QType) -> bool:
        """Return whether `qtype` is E4M3 or E5M2."""
        return qtype in FP8_FORMATS

    @staticmethod
    def get_dtype_from_qtype(qtype: QType) -> torch.dtype:
        """Return what codes of `qtype` are stored as."""
        return Dtypes.qtype_to_dtype[qtype]


FP8_FORMATS: dict[QType, MiniFloat] = {Dtypes.kfloat8_e4m3: E4M3, Dtypes.kfloat8_e5m2: E5M2}


_LARGEST: dict[QType, float] = {
    **{qtype: fmt.max for qtype, fmt in FP8_FORMATS.items()},
    Dtypes.kfloat16: torch.finfo(torch.float16).max,
    Dtypes.kbfloat16: torch.finfo(torch.bfloat16).max,
    Dtypes.kfloat32: torch.finfo(torch.float32).max,
}


class Floating:
    """Largest finite values, by MS-AMP's format and by dtype (where uint8 is E4M3 and int8 E5M2)."""

    qfp_max = _LARGEST
    fp_maxs: ClassVar[dict[torch.dtype, float]] = {
        dtype: _LARGEST[qtype]
        for dtype, qtype in Dtypes.dtype_to_qtype.items()
        if qtype in _LARGEST
    }


class ScalingMeta:
    """The scale of a tensor: `scale`, `scale_inv` (float32, 0-d) and `amax` (float32 [1]), on any device.

    Raises:
        ConfigError: for a format without a scale, or a window of more than one step.
    """

    def __init__(
        self,
        qtype: QType,
        scale: Tensor | None = None,
        scale_inv: Tensor | None = None,
        amax: Tensor | None = None,
        window_size: int = 1,
        group: Any = None,
    ) -> None:
        if qtype not in _LARGEST:
            known = ", ".join(q.name for q in _LARGEST)
            raise ConfigError(f"qtype={qtype!r} has no scale; use one of msamp's Dtypes: {known}.")
        if window_size != 1:
            raise ConfigError(
                f"window_size={window_size}: a ScalingTensor is scaled by its own amax, and keeps no history. Leave it "
                'out; for layers, fp8stack.initialize(..., fp8_recipe="delayed") does.'
            )
        self.qtype, self.window_size, self.group = qtype, window_size, group
        self.scale = torch.ones(()) if scale is None else scale
        self.scale_inv = 1 / self.scale if scale_inv is None else scale_inv
        self.amax = torch.zeros(1) if amax is None else amax

    def reset_scaling_factor(self) -> None:
        """Set the scale from amax; one that is zero or not finite leaves it as it is."""
        amax = self.amax[0]
        inverse = power_of_two_scale(amax, _LARGEST[self.qtype])
        self.scale_inv = torch.where((amax > 0) & amax.isfinite(), inverse, self.scale_inv)
        self.scale = 1 / self.scale_inv

    def multiply(self, factor: Number) -> None:
        """Multiply what the codes stand for."""
        if isinstance(factor, Tensor) and factor.numel() != 1:
            raise ConfigError(
                f"a ScalingTensor is multiplied by one number, got a tensor of shape {tuple(factor.shape)}. "
                "Use its float()."
            )
        number = torch.as_tensor(factor, dtype=torch.float32, device=self.scale.device).reshape(())
        self.scale_inv, self.amax = self.scale_inv * number, self.amax * number.abs()
        self.scale = 1 / self.scale_inv

    def to(self, device: torch.device | str | None) -> ScalingMeta:
        """Return a copy on `device`."""
        scale, inverse, amax = (
            t.to(device, copy=True) for t in (self.scale, self.scale_inv, self.amax)
        )
        return ScalingMeta(self.qtype, scale, inverse, amax, group=self.group)

    def clone(self) -> ScalingMeta:
        """Return a copy."""
        return self.to(None)

    @property
    def is_cuda(self) -> bool:
        return self.scale.is_cuda

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "group": None}  # a process group is this process's

    def __repr__(self) -> str:
        return f"ScalingMeta({self.qtype.name}, scale={float(self.scale):g}, amax={float(self.amax[0]):g})"


_OF_VALUE = (
    "data_ptr", "device", "dim", "dtype", "is_contiguous", "is_cuda", "ndim", "nelement", "numel", "shape", "size",
    "stride",
)  # fmt: skip


class ScalingTensor:
    """Codes `value` of any shape and a `meta`.

    It has what MS-AMP's has to read, copy and scale it; shapes, device and dtype are those of the codes. For arithmetic
    take `float()`.
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
        if name in _OF_VALUE:
            return getattr(self.value, name)
        raise AttributeError(
            f"ScalingTensor has no {name!r}; float() returns an ordinary tensor.{did_you_mean(name, _OF_VALUE)}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ScalingTensor:
        return self.clone()

    @property
    def qtype(self) -> QType:
        return self.meta.qtype

    # --- values

    def float(self) -> Tensor:
        """Return the values, float32."""
        return decode(self.value, self.meta)

    def half(self) -> Tensor:
        return self.float().half()

    def bfloat16(self) -> Tensor:
        return self.float().bfloat16()

    def min(self) -> Tensor:
        return self.float().min()

    def max(self) -> Tensor:
        return self.float().max()

    def isnan(self) -> Tensor:
        return self.float().isnan()

    def has_inf_or_nan(self) -> bool:
        """Return whether a value is not finite, by the values themselves."""
        return not bool(self.float().isfinite().all())

    def __len__(self) -> int:
        return len(self.value)

    def __repr__(self) -> str:
        return f"ScalingTensor({self.float()!r}, {self.meta!r})"

    # --- other scaled tensors

    def cast(self, qtype: QType) -> ScalingTensor:
        """Return it in another format, scaled anew."""
        return self if qtype == self.qtype else cast(self.float(), qtype)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return values of another dtype, or the scaled tensor on another device; arguments are torch's."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None:
            return self.float().to(device=device, dtype=dtype)
        return ScalingTensor(self.value.to(device), self.meta.to(device))

    def cpu(self) -> ScalingTensor:
        return self.to("cpu")  # type: ignore[no-any-return]

    def cuda(self) -> ScalingTensor:
        return self.to("cuda")  # type: ignore[no-any-return]

    def detach(self) -> ScalingTensor:
        return ScalingTensor(self.value, self.meta)

    def t(self) -> ScalingTensor:
        return ScalingTensor(self.value.t(), self.meta)

    def flatten(self) -> ScalingTensor:
        return ScalingTensor(self.value.flatten(), self.meta)

    def contiguous(self) -> ScalingTensor:
        return ScalingTensor(self.value.contiguous(), self.meta)

    def clone(self) -> ScalingTensor:
        return ScalingTensor(self.value.clone(), self.meta.clone())

    def abs(self) -> ScalingTensor:
        fp8_codes = Dtypes.is_fp8_qtype(self.qtype)
        return ScalingTensor(
            self.value & 0x7F if fp8_codes else self.value.abs(), self.meta.clone()
        )

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

    def assign_(self, values: Tensor) -> ScalingTensor:
        """Replace the contents by `values`, an ordinary tensor of the same shape, scaled anew."""
        return self.copy_(cast(values.reshape(self.value.shape), self.qtype))

    def mul_(self, factor: Number) -> ScalingTensor:
        self.meta.multiply(factor)
        return self

    def div_(self, divisor: Number) -> ScalingTensor:
        self.meta.multiply(1 / divisor)
        return self

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
    return ScalingTensor(encode(x, meta, sync), meta)


@torch.no_grad()
def encode(input: Tensor, meta: ScalingMeta, sync: bool = False) -> Tensor:
    """Return the codes of `input` in `meta.qtype`, having set the scale in `meta`; arguments are those of `cast`."""
    x = input.detach().float()
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    if sync and dist.is_available() and dist.is_initialized():
        amax = amax.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum may drop a NaN
        dist.all_reduce(amax, dist.ReduceOp.MAX, meta.group)
    meta.scale, meta.scale_inv = meta.scale.to(x.device), meta.scale_inv.to(x.device)
    meta.amax = amax.reshape(1)
    meta.reset_scaling_factor()
    scaled = x * meta.scale
    if Dtypes.is_fp8_qtype(meta.qtype):
        return fp8.cast(scaled, FP8_FORMATS[meta.qtype]).view(torch.uint8)
    return scaled.to(Dtypes.get_dtype_from_qtype(meta.qtype))


def decode(input: Tensor, meta: ScalingMeta, otype: QType = Dtypes.kfloat32) -> Tensor:
    """Return the values of codes `input` in the dtype of `otype`."""
    fmt = FP8_FORMATS.get(meta.qtype)
    values = input.float() if fmt is None else fp8.decode(input, fmt)
    return (values * meta.scale_inv).to(Dtypes.get_dtype_from_qtype(otype))


class TypeCast:
    """Between ordinary tensors and codes: `cast_to_*(input, meta, sync)` and `cast_from_*(input, meta, otype)`."""

    cast_to_fp8 = cast_to_fp16 = staticmethod(encode)
    cast_from_fp8 = cast_from_fp16 = cast_from_fp32 = staticmethod(decode)


def qtype_of(x: Tensor) -> QType:
    """Return MS-AMP's name of the dtype of `x`; None where it has none is a KeyError."""
    return Dtypes.dtype_to_qtype[x.dtype]
