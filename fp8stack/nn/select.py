"""select="auto": every GEMM shape is timed in FP8 and as the layer would run unconverted, and the faster one stays.

The first time that a model multiplies a shape, both are timed on this GPU, forward and backward, on random data:
`nn.functional.linear` in the dtype the layer would use, and `fp8_matmul` with all its casts (that of the input too,
even if other layers would share it). FP8 stays where it is 3 % faster.
In eager mode the clock on the wall counts, host included, since that is what limits small models; under torch.compile
the GPU's alone, whose answer becomes a constant of the graph (for a dynamic shape, of the size that was traced).
Answers are kept for the process, by shape; numbers of tokens less than a quarter apart share one, so that batches of
any length cause few timings. Evaluation takes what training would.

Timing happens in a thread of its own: grad mode, autocast, hooks of activation checkpointing, dispatch and function
modes all belong to the caller's thread. No random numbers are drawn from
torch's generators, and memory is given back, but for the workspace of that thread's cuBLAS (32 MiB on Hopper).

Where nothing can be timed (CPU, tensors without data, capture of a CUDA graph, recomputation in backward), an unknown
shape is multiplied in FP8. Ranks time for themselves, since a collective in forward could deadlock: near a tie they may
choose differently, which changes roundings, not shapes. `Chooser.selected` says what was chosen; `skip` fixes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fp8stack.levels import Recipe

from .casts import Products
from .linear import check_input, fp8_matmul, output_dtype

MARGIN = 0.97  # FP8 stays if it takes at most this share of the other's time
_ROUNDS, _ROUND_TIME = 5, 4e-3  # of a timing: seconds
_MOST_CALLS = 30  # in a round: what the GPU's queue takes
# Shapes whose answers are kept: batches of ever new lengths must not fill the memory.
_MOST_SHAPES = 4096
_WARM_UP, _SEEDING = 3, 20  # calls; delayed scaling reads its operands twice in the first 16


class Shape(NamedTuple):
    """What a timing depends on, beside the recipe."""

    rows: int  # tokens
    k: int  # in_features
    n: int  # out_features
    bias: bool
    frozen: bool  # the weight needs no gradient
    x: torch.dtype
    weight: torch.dtype
    output: torch.dtype
    device: torch.device
    compiled: bool


# By shape, its rows rounded up, and recipe: "fp8 (8192 tokens: 0.82 ms, bf16 1.31 ms)".
_ANSWERS: dict[tuple[Any, ...], str] = {}
_ONE_AT_A_TIME = threading.Lock()
_traced: list[int | None] = [None, None, None]  # rows, n and k of the product that is being traced


class Chooser:
    """Chooses how the Linear layers of one model multiply."""

    _handle: RemovableHandle

    def __init__(
        self, recipe: Recipe, layers: list[tuple[str, nn.Linear]], tell: Callable[[str], None]
    ) -> None:
        self.selected: dict[str, str] = {}  # by layer: what was chosen, and the times
        self._recipe, self._tell = recipe, tell
        self._told: set[str] = set()
        self._layers = {n: (m.in_features, m.out_features, m.bias is not None) for n, m in layers}
        self._known: dict[tuple[Any, ...], bool] = {}
        self._answers: dict[Shape, str] = {}
        torch.compiler.assume_constant_result(Chooser._at_trace_time)
        torch.compiler.assume_constant_result(Chooser._tell_all)

    def __deepcopy__(self, memo: dict[int, Any]) -> Chooser:
        return self  # layers of a copied model choose as those they were copied from

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, layer: str = "") -> bool:
        """Return whether to multiply x [..., in] by weight [out, in] in FP8. Raises ModelError as layers do."""
        about = bias is not None, not weight.requires_grad, x.dtype, weight.dtype, output_dtype(x)
        if torch.compiler.is_dynamo_compiling():
            from torch._dynamo.comptime import comptime

            check_input(x, weight.shape[1], layer)
            comptime(_note_sizes)  # they may be symbols, which are no constants
            return self._at_trace_time(*about, x.device)
        if x.is_nested:  # which may have no shape
            check_input(x, weight.shape[1], layer)
        # A key that is known has passed the check, which would add a tenth to a small layer's time.
        key = type(x), x.shape, x.layout, x.device, weight.shape, about
        if (known := self._known.get(key)) is not None:
            return known
        check_input(x, weight.shape[1], layer)
        n, k = weight.shape
        shape = Shape(x.numel() // k, k, n, *about, x.device, False)
        obstacle = _obstacle(x.device, type(x) in (Tensor, nn.Parameter))
        fp8 = self._choose(shape, obstacle)
        if not obstacle or x.device.type == "cpu":  # the others pass
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            self._known[key] = fp8
        return fp8

    def _at_trace_time(self, *about: Any) -> bool:
        """Choose while Dynamo traces, outside of the graph; the result is a constant there."""
        rows, n, k = (size or 0 for size in _traced)
        shape = Shape._make((rows, k, n, *about, True))
        return self._choose(shape, _obstacle(shape.device, None not in _traced))

    def _choose(self, shape: Shape, obstacle: str) -> bool:
        if shape.rows == 0 and not obstacle:
            return True
        recipe, near = self._recipe, shape._replace(rows=_round_up(shape.rows))
        fast = bool(recipe.fp8_fast_accum)
        key = near, recipe.fp8_recipe, recipe.fp8_format, fast
        with _ONE_AT_A_TIME:
            if key not in _ANSWERS and not obstacle:
                _ANSWERS[key] = _measure(shape, recipe)
        answer = _ANSWERS.get(key, f"fp8 (not timed {obstacle})")
        if key not in _ANSWERS and shape.device.type == "cuda" and obstacle not in self._told:
            self._told.add(obstacle)
            self._tell(f'fp8stack select="auto": FP8 for a GEMM that cannot be timed {obstacle}')
        if self._answers.get(near) != answer:
            self._answers[near] = answer
            # By size, since layers that share a compiled graph are not asked one by one.
            found = [a for other, a in self._answers.items() if other[1:4] == near[1:4]]
            told = "; ".join(found[:4] + ["..."] * (len(found) > 4))
            alike = [name for name, size in self._layers.items() if size == near[1:4]]
            self.selected.update(dict.fromkeys(alike, told))
        return answer.startswith("fp8")

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Tell what was chosen once, after the first forward of `model`."""
        self._handle = model.register_forward_hook(self._after_forward)
        return self._handle

    def _after_forward(self, *_: Any) -> None:
        if self._tell_all() and not torch.compiler.is_dynamo_compiling():
            self._handle.remove()

    def _tell_all(self) -> bool:
        if self._answers and "all" not in self._told:
            self._told.add("all")
            self._tell(str(self))
        return "all" in self._told

    def __str__(self) -> str:
        by_choice: dict[str, list[str]] = {}
        for name, choice in self.selected.items():
            by_choice.setdefault(choice, []).append(name)
        kept = sum(choice.startswith("fp8") for choice in self.selected.values())
        lines = [f'fp8stack select="auto": {kept} of {len(self._layers)} Linear layers in FP8']
        for choice, names in by_choice.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"  {names[0]}{more}: {choice}")
        return "\n".join(lines)


def _note_sizes(context: Any) -> None:
    """Write down the sizes that Dynamo traces a product with; None for what depends on data."""
    x, weight = (context.get_local(name).as_fake() for name in ("x", "weight"))
    n, k = weight.shape
    sizes = x.numel() // k, n, k
    _traced[:] = [size if isinstance(size, int) else size.node.hint for size in sizes]


def _obstacle(device: torch.device, data: bool) -> str:
    """Return why nothing can be timed here, or an empty string."""
    if device.type != "cuda" or not data:
        return "without data" if device.type == "cuda" else f"on {device.type}"
    if torch.cuda.is_current_stream_capturing():
        return "in a CUDA graph"
    # autograd's thread would wait for itself
    return "in backward" if torch._C._current_graph_task_id() != -1 else ""


def _round_up(rows: int) -> int:
    """Keep three bits of a number: four steps for each doubling."""
    shift = max(rows.bit_length() - 3, 0)
    return -(-rows >> shift) << shift


# --- timing


def _measure(shape: Shape, recipe: Recipe) -> str:
    """Time a shape in a thread of its own."""
    stream = torch.cuda.current_stream(shape.device) if shape.device.type == "cuda" else None

    def run() -> tuple[float, float]:
        # While torch traces, it takes all threads for compiling: casts would be those of a graph.
        compiling, torch.compiler._is_compiling_flag = torch.compiler.is_compiling(), False
        try:
            with torch.cuda.stream(stream):  # None: stay on the current stream
                return time_both(shape, recipe)
        finally:
            torch.compiler._is_compiling_flag = compiling

    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(shape.output, "fp32")
    try:
        with ThreadPoolExecutor(1) as pool:
            times = pool.submit(run).result()
    except torch.OutOfMemoryError:
        return f"{name} ({shape.rows} tokens: out of memory when timed)"
    finally:
        torch.cuda.empty_cache()  # what is left of odd sizes would be in the way
    plain, fp8 = (f"{1e3 * seconds:.3g} ms" for seconds in times)
    if times[1] <= MARGIN * times[0]:
        return f"fp8 ({shape.rows} tokens: {fp8}, {name} {plain})"
    return f"{name} ({shape.rows} tokens: {plain}, fp8 {fp8})"


def time_both(shape: Shape, recipe: Recipe) -> tuple[float, float]:  # seconds
    """Time forward and backward of a layer as it would run unconverted, and in FP8."""
    device, output = shape.device, shape.output
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    x, grad = draw(shape.rows, shape.k, dtype=shape.x), draw(shape.rows, shape.n, dtype=output)
    weight = draw(shape.n, shape.k, dtype=shape.weight).requires_grad_(not shape.frozen)
    bias = draw(shape.n, dtype=output).requires_grad_(not shape.frozen) if shape.bias else None
    trained = [p for p in (weight, bias) if p is not None and p.requires_grad]
    products = Products(recipe, device=device)

    def plain() -> None:
        leaf = x.detach().requires_grad_()
        y = nn.functional.linear(leaf.to(output), weight.to(output), bias)
        torch.autograd.grad(y, [leaf, *trained], grad)

    def fp8() -> None:
        leaf = x.detach().requires_grad_()  # a new tensor, whose codes are not known
        with torch.autocast(device.type, output, output is not shape.x):
            y = fp8_matmul(leaf, weight, bias, products, True)
        torch.autograd.grad(y, [leaf, *trained], grad)

    _time_wall(fp8, _SEEDING if recipe.fp8_recipe == "delayed" else _WARM_UP)
    _time_wall(plain, _WARM_UP)
    clock = _time_device if shape.compiled else _time_wall
    most = [int(_ROUND_TIME / _time_wall(call, 2)) for call in (plain, fp8)]
    counts = [max(2, min(count, _MOST_CALLS)) for count in most]
    # One after the other, so that a change of clock rates hits both; the fastest, as whoever shares the GPU adds time.
    rounds = [(clock(plain, counts[0]), clock(fp8, counts[1])) for _ in range(_ROUNDS)]
    return min(r[0] for r in rounds), min(r[1] for r in rounds)


def _time_wall(call: Callable[[], None], count: int) -> float:
    _wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    _wait()
    return (time.perf_counter() - start) / count


def _wait() -> None:
    """Wait for the stream, by an event: a user may have made errors of other ways to wait."""
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def _time_device(call: Callable[[], None], count: int) -> float:
    """Time calls on the GPU alone: they wait in its queue until the host has put in the last of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for wait in (10**7, 4 * 10**7, 16 * 10**7):  # cycles, of half a nanosecond or so
        torch.cuda._sleep(wait)
        start.record()
        for _ in range(count):
            call()
        in_time = not start.query()
        end.record()
        end.synchronize()
        if in_time:
            break
    return float(start.elapsed_time(end)) / count / 1e3
