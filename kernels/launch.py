"""Launches of Triton kernels that skip Triton's argument binding.

Why: Triton looks at every argument of every launch to choose a compiled variant. That takes 10 µs of CPU and more,
which is as long as many a kernel runs.

How: a `Launcher` derives a key from the arguments of a launch. The first launch of a key goes through Triton. Later
ones run the variant that Triton chose then, by Triton's own function in C, and hand pointers over as numbers. A key
holds all that the choice can depend on:

    the device                       a compiled kernel is loaded on one
    a tensor's dtype and address     modulo 16: Triton assumes aligned pointers where it finds them
    another argument's type, value   1, multiples of 16, widths of integers, compile-time constants
    one that is not specialized on   only its type, and value // 2^31, which tells int32 from int64

None of it is written by hand: which arguments are tensors, and which are not specialized on, is read from the kernel's
own parameters. `tests/kernels/test_compile.py` compares keys with Triton's own specialization.

Limits: tensors come first in a kernel's parameters, with names that end in `_ptr`. Hooks of profilers are left out.
Triton before 3.3 takes other arguments, and on AMD's GPUs Triton looks at the size of a tensor's memory too. There, and
in the interpreter, every launch goes through Triton.
"""

from __future__ import annotations

import copy
import inspect
from functools import lru_cache
from typing import Any

import torch
import triton

_MOST = 4096  # keys that a Launcher remembers: batches of ever new lengths must not fill the memory

_INT32 = 2**31

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
_SKIPS_BINDING = TRITON >= (3, 3) and torch.version.hip is None


def next_power_of_2(n: int) -> int:
    """Return the next power of two from 1 on; Triton's own function takes as long as a launch should."""
    return 1 << (n - 1).bit_length()


UNFUSED = {"enable_fp_fusion": False}
"""Options of kernels with the reference's bits: each multiplication and addition rounds on its own, none contracted."""


class Launcher:
    """A Triton kernel with its launch options.

    Args:
        kernel: the function under `triton.jit`.
        options: num_warps, enable_fp_fusion and the like.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        names = list(inspect.signature(kernel.fn).parameters)
        self._tensors = sum(name.endswith("_ptr") for name in names)
        if not all(name.endswith("_ptr") for name in names[: self._tensors]):
            raise TypeError(f"{kernel.fn.__name__}: parameters named ..._ptr have to come first")
        values, loose = names[self._tensors :], getattr(kernel, "do_not_specialize", None) or ()
        self._loose = [i for i, name in enumerate(values) if name in loose]
        # The key's arguments, by type too: to Python alone, 1, 1.0 and True are equal. A list holds the variant.
        self._known = lru_cache(_MOST, typed=True)(lambda *key: [])

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        """Launch on the device and the current stream of the first argument, a tensor.

        `args` are all parameters of the kernel in their order, constants included.
        """
        device = args[0].get_device()
        if device < 0:  # the interpreter, on the CPU
            self.kernel[grid](*args, **self.options)
            return
        if device != torch._C._cuda_getDevice():  # Triton launches on the current one
            with torch.cuda.device(device):
                self(grid, *args)
            return
        values = args[self._tensors :]
        addresses = [x.data_ptr() for x in args[: self._tensors]]
        known = self.variant(device, args, addresses, values)
        if known:
            launch, fixed, _ = known
            stream = torch._C._cuda_getCurrentRawStream(device)
            launch(*grid, stream, *fixed, *addresses, *values)
            return
        compiled = self.kernel[grid](*args, **self.options)
        if _SKIPS_BINDING and hasattr(compiled, "packed_metadata"):  # not the interpreter
            # In one piece, since two threads may come here at once. The last is held only: without it, Triton unloads
            # the function.
            known[:] = *_without_wrapper(compiled), compiled

    def variant(
        self, device: int, args: tuple[Any, ...], addresses: list[int], values: tuple[Any, ...]
    ) -> list[Any]:
        """Return what is remembered for the key of a launch: an empty list before its first one."""
        dtypes = [x.dtype for x in args[: self._tensors]]
        if self._loose:
            wide = [*values]
            for i in self._loose:
                wide[i] = wide[i] // _INT32 if type(wide[i]) is int else type(wide[i])
            values = (*wide,)
        return self._known(device, *dtypes, *[a % 16 for a in addresses], *values)


def launched(loose: Any = None, **options: Any) -> Any:
    """Return a decorator in the place of `triton.jit`, which makes a kernel its Launcher with these options.

    loose: names of arguments whose values make no variants (`do_not_specialize`).
    """
    return lambda function: Launcher(triton.jit(function, do_not_specialize=loose), **options)


def _without_wrapper(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what launches a variant, and its arguments between the stream and those of the kernel.

    Triton's own way is an object in Python around a function in C. It is called once, with a function in the place of
    that one which notes what it is given, whatever that is in this version of Triton. A kernel that needs scratch
    memory, which the object allocates at each launch, keeps it.
    """
    run, own = compiled.run, (compiled.function, compiled.packed_metadata, None, None, None)
    given: list[Any] = []
    scratch = [getattr(run, f"{kind}_scratch_size", 0) for kind in ("global", "profile")]
    if hasattr(run, "launch") and not any(scratch):
        noted = copy.copy(run)
        noted.launch = lambda *args: given.extend(args)
        noted(1, 1, 1, 0, *own)
    if given[:5] != [1, 1, 1, 0, own[0]]:
        return run, own
    return run.launch, tuple(given[4:])
