"""Errors and the one warning class of fp8stack.

Every message says what was given, the rule it breaks and what to do, and names the layer or parameter concerned.
Each class also derives from the builtin that a caller would expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable


class Fp8StackError(Exception):
    """Base class of every error that fp8stack raises on purpose."""


class ConfigError(Fp8StackError, ValueError):
    """An option, level, recipe field or checkpoint content that is not valid."""


class ModelError(Fp8StackError, ValueError):
    """A model or optimizer that a level cannot be applied to as it is."""


class GradientError(Fp8StackError, RuntimeError):
    """A gradient that cannot be quantized (sparse, complex)."""


class CommError(Fp8StackError, RuntimeError):
    """A collective that failed, or that ranks do not agree on."""


class CheckpointError(Fp8StackError, ValueError):
    """A checkpoint that is truncated, of another format version, or of another model."""


class UnsupportedDeviceError(Fp8StackError, RuntimeError):
    """A device that cannot run a level, or anything that would fall back while `strict=True`."""


class Fp8StackWarning(UserWarning):
    """Something fell back; the message holds the reason. `strict=True` turns it into an error."""


def warn(message: str, stacklevel: int = 2) -> None:
    """Warn with an `Fp8StackWarning`; `stacklevel` is that of `warnings.warn`, as if called in the place of this."""
    warnings.warn(message, Fp8StackWarning, stacklevel=stacklevel + 1)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ` Did you mean "x"?` for the nearest known name, or an empty string."""
    close = difflib.get_close_matches(str(given), list(known), n=1, cutoff=0.5)
    return _ELSEWHERE.get(given) or (f' Did you mean "{close[0]}"?' if close else "")


_ELSEWHERE = {"O3": ' MS-AMP has an O3; what it does is "O2" here.'}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its class if there is none, and before the key of a KeyError."""
    name, lines = type(error).__name__, str(error).strip().splitlines()
    return f"{name}: {lines[0]}" if lines and isinstance(error, KeyError) else (lines or [name])[0]


def reason_of(error: BaseException) -> str:
    """Return why a file cannot be read or written and what to do, without the number and path of an OSError."""
    if not isinstance(error, OSError) or not error.strerror:
        return f"{first_line(error).removesuffix('.')}."
    forbidden = isinstance(error, PermissionError)
    return f"{error.strerror}.{' Change who may use it or its folder, or use another.' * forbidden}"
