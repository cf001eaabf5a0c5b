"""select="auto": every GEMM shape is timed in FP8 and as the layer would run unconverted, and the faster one stays.

The first time that a model multiplies a shape, both are timed on this GPU, forward and backward, on random data:
`nn.functional.linear` in the dtype the layer would use, and `fp8_matmul` with all its casts (that of the weight too, as
with one micro-batch a step; that of the input, even if other layers would share it). FP8 stays where it is 3 % faster.
In eager mode the clock on the wall counts, host included, since that is what limits small models; under torch.compile
the GPU's alone, whose answer becomes a constant of the graph (of a dynamic shape, the size that was traced). Answers
are kept for the process, by shape; numbers of tokens less than a quarter apart share one, so that batches of any length
cause few timings. Evaluation takes what training would.

Timing happens in a thread of its own: grad mode, autocast, hooks of activation checkpointing, dispatch and function
modes, the casts remembered for this step, the current stream and device all belong to the caller's thread. No random
numbers are drawn from torch's generators, and memory is given back.

Where nothing can be timed (CPU, fake tensors, capture of a CUDA graph, recomputation in backward), layers multiply in
FP8. Ranks time for themselves, since a collective in forward could deadlock: near a tie they may choose differently,
which changes roundings, not shapes. `Chooser.selected` says what was chosen; to fix it, name layers in `skip`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.hooks import RemovableHandle

from fp8stack.levels import Recipe

from .linear import fp8_matmul, output_dtype
from .operands import Products, WeightCache, in_backward

MARGIN = 0.97  # FP8 stays if it takes at most this share of the other's time
_ROUNDS, _ROUND_TIME, _MOST_CALLS = (
    5,
    4e-3,
    30,
)  # of a timing: seconds, and calls that a stream can queue
_WARM_UP = 20  # calls; delayed scaling reads its operands twice in the first 16


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


class Answer(NamedTuple):
    """What was chosen for a shape, and why."""

    fp8: bool
    why: str


_ANSWERS: dict[tuple[Any, ...], Answer] = {}  # by shape, its rows rounded up, and recipe
_ONE_AT_A_TIME = threading.Lock()
_traced: list[int | None] = [None, None, None]  # rows, n and k of the product that is being traced


class Chooser:
    """Chooses how the Linear layers of one model multiply."""

    def __init__(
        self,
        recipe: Recipe,
        layers: Iterable[tuple[str, nn.Linear]],
        tell: Callable[[str], None] = logging.getLogger("fp8stack").info,
    ) -> None:
        self.selected: dict[str, str] = {}  # by layer: what was chosen, and the times
        self._recipe, self._tell, self._told = recipe, tell, False
        self._layers = {
            name: (layer.in_features, layer.out_features, layer.bias is not None)
            for name, layer in layers
        }
        self._known: dict[tuple[Any, ...], bool] = {}
        self._answers: dict[Shape, Answer] = {}
        self._handle: RemovableHandle | None = None
        torch.compiler.assume_constant_result(Chooser._at_trace_time)
        torch.compiler.assume_constant_result(Chooser._tell_once)

    def __deepcopy__(self, memo: dict[int, Any]) -> Chooser:
        return self  # layers of a copied model choose as those they were copied from

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Return whether to multiply x [..., in] by weight [out, in] in FP8."""
        if torch.compiler.is_dynamo_compiling():
            from torch._dynamo.comptime import comptime

            comptime(_note_sizes)  # may be symbols, which are no constants
            return self._at_trace_time(
                bias is not None, weight.requires_grad, x.dtype, weight.dtype, output_dtype(x), x.device
            )  # fmt: skip
        key = (
            x.numel(), weight.shape, x.dtype, weight.dtype, output_dtype(x), weight.requires_grad,
            bias is None,
        )  # fmt: skip
        known = self._known.get(key)
        if known is not None:
            return known
        n, k = weight.shape
        obstacle = _obstacle(x)
        shape = Shape(
            x.numel() // k, k, n, bias is not None, not weight.requires_grad, x.dtype, weight.dtype,
            output_dtype(x), x.device, False,
        )  # fmt: skip
        fp8 = self._choose(shape, obstacle)
        if not obstacle or x.device.type == "cpu":  # the others pass
            self._known[key] = fp8
        return fp8

    def _at_trace_time(
        self, bias: bool, trains: bool, x: torch.dtype, weight: torch.dtype, output: torch.dtype, device: torch.device
    ) -> bool:  # fmt: skip
        """Choose while Dynamo traces, outside of the graph; the result is a constant there."""
        rows, n, k = _traced
        if device.type != "cuda":
            obstacle = f"on the {device.type.upper()}"
        elif rows is None or n is None or k is None:
            obstacle = "of a size unknown when traced"
        else:
            obstacle = "in a CUDA graph" if torch.cuda.is_current_stream_capturing() else ""
        shape = Shape(rows or 0, k or 0, n or 0, bias, not trains, x, weight, output, device, True)
        return self._choose(shape, obstacle)

    def _choose(self, shape: Shape, obstacle: str) -> bool:
        recipe = self._recipe
        how = recipe.fp8_recipe, recipe.fp8_format, recipe.weight_cache
        if obstacle:
            answer = Answer(True, f"not timed {obstacle}")
        elif shape.rows == 0:
            return True
        else:
            key = (shape._replace(rows=_round_up(shape.rows)), *how)
            with _ONE_AT_A_TIME:
                if key not in _ANSWERS:
                    _ANSWERS[key] = _measure(shape, recipe)
                answer = _ANSWERS[key]
        if self._answers.get(shape) != answer:
            self._answers[shape] = answer
            self._list()
        return answer.fp8

    def _list(self) -> None:
        """Bring `selected` up to date. By size, since layers that share a compiled graph are not asked one by one."""
        for name, layer in self._layers.items():
            found = [
                f"{'fp8' if answer.fp8 else _name(shape.output)} ({shape.rows} tokens: {answer.why})"
                for shape, answer in self._answers.items()
                if (shape.k, shape.n, shape.bias) == layer
            ]
            if found:
                self.selected[name] = "; ".join(found[:4] + ["..."] * (len(found) > 4))

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Tell what was chosen once, after the first forward of `model`."""
        self._handle = model.register_forward_hook(self._after_forward)
        return self._handle

    def _after_forward(self, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self._tell_once()
        elif self._tell_once() and self._handle is not None:
            self._handle.remove()

    def _tell_once(self) -> bool:
        if self._answers and not self._told:
            self._told = True
            self._tell(str(self))
        return self._told

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
    _traced[:] = [
        size if isinstance(size, int) else size.node.hint for size in (x.numel() // k, n, k)
    ]


def _obstacle(x: Tensor) -> str:
    """Return why nothing can be timed here, or an empty string."""
    if isinstance(x, FakeTensor) or x.device.type != "cuda":
        return f"on the {x.device.type.upper()}" if type(x) is Tensor else "without data"
    if torch.cuda.is_current_stream_capturing():
        return "in a CUDA graph"
    return "in backward" if in_backward() else ""  # autograd's thread would wait for itself


def _round_up(rows: int) -> int:
    """Keep three bits of a number: four steps for each doubling."""
    shift = max(rows.bit_length() - 3, 0)
    return -(-rows >> shift) << shift


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype).split(".")[1])


# --- timing


def _measure(shape: Shape, recipe: Recipe) -> Answer:
    """Time a shape in a thread of its own."""
    times: list[tuple[float, float]] = []
    errors: list[BaseException] = []
    on_gpu = shape.device.type == "cuda"
    stream = torch.cuda.current_stream(shape.device) if on_gpu else None

    def run() -> None:
        try:
            with torch.cuda.stream(stream) if on_gpu else nullcontext(), _eagerly():
                times.append(time_both(shape, recipe))
        except BaseException as error:
            errors.append(error.with_traceback(None))  # whose frames hold tensors

    thread = threading.Thread(target=run, name="fp8stack select")
    thread.start()
    thread.join()
    if on_gpu:
        torch.cuda.empty_cache()  # leaves no holes of odd sizes
    if errors and isinstance(errors[0], torch.OutOfMemoryError):
        return Answer(False, "out of memory when timed")
    if errors:
        raise errors[0]
    plain, fp8 = times[0]
    wins = fp8 <= MARGIN * plain
    other, name = (plain, _name(shape.output)) if wins else (fp8, "fp8")
    first = fp8 if wins else plain
    return Answer(wins, f"{1e3 * first:.3g} ms, {name} {1e3 * other:.3g} ms")


@contextmanager
def _eagerly() -> Iterator[None]:
    """While it traces, torch takes all threads for compiling, and casts would be those of a graph."""
    compiling = torch.compiler.is_compiling()
    if compiling:
        torch.compiler._is_compiling_flag = False
    try:
        yield
    finally:
        if compiling:
            torch.compiler._is_compiling_flag = True


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
    cache = WeightCache(weight, recipe.weight_cache, squares=recipe.fp8_recipe == "blockwise")
    products = Products(cache, recipe)
    autocast = torch.autocast(device.type, output, output is not shape.x)

    def plain() -> None:
        leaf = x.detach().requires_grad_()
        y = nn.functional.linear(leaf.to(output), weight.to(output), bias)
        torch.autograd.grad(y, [leaf, *trained], grad)

    def fp8() -> None:
        leaf = x.detach().requires_grad_()  # another tensor: the last one's codes are known
        cache.forget()
        with autocast:
            y = fp8_matmul(leaf, weight, bias, products, True)
        torch.autograd.grad(y, [leaf, *trained], grad)

    clock = _time_device if shape.compiled else _time_wall
    calls, counts = (plain, fp8), []
    for call in calls:
        _time_wall(call, _WARM_UP if call is fp8 and recipe.fp8_recipe == "delayed" else 3)
        once = _time_wall(call, 2)
        counts.append(max(2, min(int(_ROUND_TIME / once), _MOST_CALLS)))
    rounds = [  # one after the other, so that a change of clocks hits both
        [clock(call, count) for call, count in zip(calls, counts, strict=True)]
        for _ in range(_ROUNDS)
    ]
    return median(r[0] for r in rounds), median(r[1] for r in rounds)


def _time_wall(call: Callable[[], None], count: int) -> float:
    torch.cuda.current_stream().synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.current_stream().synchronize()
    return (time.perf_counter() - start) / count


def _time_device(call: Callable[[], None], count: int) -> float:
    """Time calls on the GPU alone: they wait in its queue until the host has put in the last of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for wait in (1e7, 4e7, 1.6e8):  # cycles, about half a nanosecond each
        torch.cuda._sleep(int(wait))
        start.record()
        for _ in range(count):
            call()
        in_time = not start.query()
        end.record()
        end.synchronize()
        if in_time:
            break
    return start.elapsed_time(end) / count / 1e3
