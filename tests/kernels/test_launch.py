"""Launches that skip Triton's binding, with a kernel and a device that only count; `test_compile.py` has their keys."""

import gc
import weakref

import pytest
import torch

from fp8stack.kernels.launch import _SKIPS_BINDING, Launcher, _without_wrapper

GRID = 4, 1, 1


class Pointer:
    """A tensor on a GPU, as far as a Launcher asks."""

    dtype = torch.bfloat16

    def get_device(self):
        return 0

    def data_ptr(self):
        return 4096


class Compiled:
    """A variant, which Triton unloads from the GPU when it is collected."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, runs):
        self.run = lambda *args: runs.append(args)


class Kernel:
    """A jitted function that remembers no variant. `meanwhile` is what another thread does while it compiles."""

    do_not_specialize = ()

    def __init__(self):
        self.bound, self.runs, self.meanwhile = [], [], lambda: None

    @staticmethod
    def fn(x_ptr, size):
        """Return nothing: its parameters are those of the kernel."""

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.bound.append((grid, args, options))
            meanwhile, self.meanwhile = self.meanwhile, lambda: None
            meanwhile()
            self.last = Compiled(self.runs)
            return self.last

        return launch


@pytest.fixture
def kernel(monkeypatch):
    if not _SKIPS_BINDING:
        pytest.skip("every launch goes through this Triton")
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return Kernel()


def test_a_known_launch_hands_over_numbers_on_the_current_stream(kernel):
    launch = Launcher(kernel, num_warps=4)
    x = Pointer()
    launch(GRID, x, 12)
    launch(GRID, x, 12)
    assert kernel.bound == [(GRID, (x, 12), {"num_warps": 4})]
    assert kernel.runs == [(*GRID, 7, "function", "metadata", None, None, None, 4096, 12)]


class Wrapper:
    """Triton's object around its function in C."""

    profile_scratch_size, cooperative = 0, False

    def __init__(self, launch, global_scratch_size=0):
        self.launch, self.global_scratch_size = launch, global_scratch_size

    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, stream, function, self.cooperative, *rest)


@pytest.mark.parametrize("scratch", [0, 128])
def test_triton_s_function_in_c_is_called_without_the_object_around_it(
    kernel, scratch, monkeypatch
):
    launcher, calls = Launcher(kernel), []
    launcher(GRID, Pointer(), 12)
    kernel.last.run = Wrapper(lambda *args: calls.append(args), scratch)
    launch, fixed = _without_wrapper(kernel.last)
    launch(*GRID, 7, *fixed, 4096, 12)
    assert calls == [(*GRID, 7, "function", False, "metadata", None, None, None, 4096, 12)]
    assert (launch is kernel.last.run) is bool(scratch)


def test_a_variant_stays_loaded_as_long_as_it_is_known(kernel):
    launch = Launcher(kernel)
    launch(GRID, Pointer(), 12)
    variant = weakref.ref(kernel.last)
    del kernel.last
    gc.collect()
    assert variant() is not None
    del launch
    gc.collect()
    assert variant() is None


def test_two_threads_may_launch_the_same_for_the_first_time(kernel):
    launch = Launcher(kernel)
    kernel.meanwhile = lambda: launch(GRID, Pointer(), 12)
    launch(GRID, Pointer(), 12)
    assert (len(kernel.bound), len(kernel.runs)) == (2, 0)
    launch(GRID, Pointer(), 12)
    assert (len(kernel.bound), len(kernel.runs)) == (2, 1)


def test_a_launch_that_failed_is_tried_again(kernel):
    launch = Launcher(kernel)

    def fail():
        raise RuntimeError("out of memory")

    kernel.meanwhile = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        launch(GRID, Pointer(), 12)
    launch(GRID, Pointer(), 12)
    launch(GRID, Pointer(), 12)
    assert (len(kernel.bound), len(kernel.runs)) == (2, 1)
