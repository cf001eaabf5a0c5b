"""CUDA graphs of blocks: the host launches the kernels of a transformer block all at once.

Why: in eager mode the forward of a block keeps the host busy for a millisecond, and its backward for two. The GPU is
often done sooner, then waits, and FP8 saves nothing.

How: `graph(model)` changes the classes of the blocks, which are the elements of the model's outermost ModuleLists. Two
forwards run as they are; the second is noted. When the third begins, the forward of each block is captured, in the
order in which they ran, and then the backward of each, from the last to the first. From then on a block is one node of
autograd: it copies its arguments into the memory that was captured and replays. An argument that is the output of an
earlier block is in that memory already.

All captures share one pool of memory, in which each uses what those before it have freed. So a replay of a forward may
overwrite what the backward of the same block, or of a later one, has yet to read. While such a backward is still to
come, the block runs as it is. A backward overwrites what later blocks have kept, so theirs may not come after it; that
raises. Gradients of parameters are copied out of the pool at once.

A block runs as it is, too, without gradients, inside other captures and under torch.compile, with other arguments than
the captured ones (shapes, dtypes, numbers), where activations are recomputed or moved (`torch.utils.checkpoint`), while
a monitor samples, and after a change of its modules, hooks, training flags, autocast, or its parameters' addresses. A
block that waits for the GPU, takes a cache, or is sharded is never captured. A warning names the reason.

Limits: one set of shapes. An output that another block reads is overwritten by the next forward: clone what you keep of
`output_hidden_states`. Attributes that are neither tensors nor modules stay as they were when captured.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from fp8stack.errors import Fp8StackWarning, ModelError, first_line
from fp8stack.tensor import is_sharded

from .casts import Products, in_backward
from .mixin import Fused, fuse_modules, has_hooks

DEVICE = "cuda"  # tests of the rules run on a CPU
Replays = list[Callable[[], Any]]
"""The last replay of each call, which is its node in autograd's graph, or None once that is gone."""
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


def graph(model: nn.Module, skip: Iterable[str] = ()) -> BlockGraphs:
    """Let the blocks of `model`, the elements of its outermost ModuleLists, run as CUDA graphs from the third step on.

    Call it after `initialize`. Results are those of eager mode, to the last bit. Layers in blocks multiply in FP8 from
    as few rows on as under torch.compile, since launches cost the host no time.

    Args:
        skip: patterns of names of blocks that are left out.

    Returns:
        The graphs: `reasons` holds why a block runs as it is, by its name. `fp8stack.restore(model)` undoes the call.

    Raises:
        ModelError: if the model has no such blocks, they are not on one GPU, or are graphed already.
    """
    blocks, patterns = dict(_blocks(model)), list(skip)
    devices = {str(p.device) for block in blocks.values() for p in block.parameters()}
    if len(devices) != 1 or not next(iter(devices)).startswith(DEVICE):
        found = ", ".join(sorted(devices)) or "no blocks with parameters"
        raise ModelError(
            f"graph captures elements of nn.ModuleLists on one GPU, and found {found}."
        )
    if any(isinstance(block, Graphed) for block in blocks.values()):
        raise ModelError("the blocks of this model are graphed already.")
    skipped = {b for name, b in blocks.items() if any(fnmatchcase(name, p) for p in patterns)}
    fuse_modules(model, Graphed, set(blocks.values()).__contains__, skipped)
    graphs = BlockGraphs()
    for name, block in blocks.items():
        if isinstance(block, Graphed):
            block.block_graphs, block.graph_name = graphs, name
            _launch_together(block, True)
    return graphs


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield names and elements of the outermost ModuleLists."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{prefix}{name}.{i}", block) for i, block in enumerate(child))
        else:
            yield from _blocks(child, f"{prefix}{name}.")


class Graphed(Fused):
    """Mixed into the class of a block, whose `forward` it replaces."""

    mixin_prefix = "Graphed"
    block_graphs: BlockGraphs
    graph_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block's own forward returns."""
        own = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not in_backward()
        if own and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return self.block_graphs.run(self, args, kwargs)
        return self.plain_forward(*args, **kwargs)


class BlockGraphs:
    """The graphs of a model's blocks. A copy of the model begins without any."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._first: nn.Module | None = None  # the block that begins a forward
        self._forwards = 0
        # Autocast in the backward of the forward that was noted, once that has come to a block.
        self._backward_autocast: tuple[bool, torch.dtype | None] | None = None
        self._calls: dict[nn.Module, _Call] = {}  # in the order of a forward
        self._replays: Replays = []  # from the capture on
        self._told: set[str] = set()

    def __reduce__(self) -> Any:
        return BlockGraphs, ()

    def run(self, block: Graphed, args: Any, kwargs: Any) -> Any:
        """Return what the block's own forward returns; replay it if that is right."""
        leaves, spec = tree_flatten((args, kwargs), is_leaf=_is_leaf)
        if not self._replays and self._first in (None, block):
            self._begin_forward(block, leaves, spec)
        call = self._calls.get(block)
        if self._replays:
            if call is not None and self._may_replay(call, leaves, spec):
                return call.replay(leaves, self._replays)
        elif self._forwards > 1 and call is None and block.graph_name not in self.reasons:
            return self._note(block, args, kwargs, leaves, spec)
        return block.plain_forward(*args, **kwargs)

    def _may_replay(self, call: _Call, leaves: list[Any], spec: Any) -> bool:
        """Return whether memory may be overwritten, and all is as it was captured."""
        for last in self._replays[call.index :]:
            if (replay := last()) is not None and replay.needed:
                return False
        misfit = call.misfit(leaves, spec)
        if misfit and misfit not in self._told:
            self._told.add(misfit)
            told = f"{call.name} runs without its CUDA graph: {misfit}"
            warnings.warn(told, Fp8StackWarning, stacklevel=4)
        return not misfit and call.is_fed(leaves)

    # --- until the capture

    def _begin_forward(self, block: nn.Module, leaves: list[Any], spec: Any) -> None:
        first = next(iter(self._calls.values()), None)
        # The first launch of a kernel loads it, which no capture allows: so backward must have run as well.
        autocast = self._backward_autocast
        if first is not None and autocast is not None and not first.misfit(leaves, spec):
            self._capture(autocast)
            return
        self._first, self._backward_autocast = block, None
        self._forwards += 1
        self._calls.clear()

    def _note(self, block: Graphed, args: Any, kwargs: Any, leaves: list[Any], spec: Any) -> Any:
        """Run the block as it is, and note what there is to capture."""
        why = _never(block, leaves)
        with _noting_waits() as waits:
            output = block.plain_forward(*args, **kwargs)
        if why := why or (f"it waits for the GPU ({waits[0]})" if waits else ""):
            self.reasons[block.graph_name] = why
            _launch_together(block, False)
            told = f"{block.graph_name} gets no CUDA graph: {why}"
            warnings.warn(told, Fp8StackWarning, stacklevel=4)
            return output
        self._calls[block] = _Call(block, leaves, spec, output, [*self._calls.values()])
        for x in _tensors(tree_flatten(output)[0]):
            if x.requires_grad:
                x.register_hook(self._note_backward)
        return output

    def _note_backward(self, _: Tensor) -> None:
        self._backward_autocast = _autocast()

    def _capture(self, backward_autocast: tuple[bool, torch.dtype | None]) -> None:
        calls = [*self._calls.values()]
        recorder = Recorder()
        for call in calls:
            call.capture_forward(recorder)
        for call in reversed(calls):
            call.capture_backward(recorder, backward_autocast)
        self._replays = [lambda: None] * len(calls)


class Recorder:
    """Captures on one stream and in one pool of memory."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def record(self, name: str, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return what replays `function`, and the result, whose memory a replay writes."""
        cuda_graph = torch.cuda.CUDAGraph()
        mode = (
            "thread_local"  # other threads, such as a DataLoader's, may allocate memory meanwhile
        )
        capture = torch.cuda.graph(cuda_graph, self._pool, self._stream, capture_error_mode=mode)
        try:
            with capture:
                result = function()
        except Exception as error:
            raise ModelError(
                f"no CUDA graph can be captured of {name}: {first_line(error).removesuffix('.')}. torch may be unable "
                f'to go on in this process. In another, leave the block out: graph(model, skip=["{name}"]).'
            ) from error
        return cuda_graph.replay, result

    @staticmethod
    def release(x: Tensor) -> Tensor:
        """Return a tensor over the memory of `x` that leaves it to later captures: read it before their replays."""
        memory = x.untyped_storage()
        data, shape = (memory.data_ptr(), False), (memory.nbytes(),)
        interface = {"data": data, "shape": shape, "typestr": "|u1", "version": 3}
        raw: Any = SimpleNamespace(__cuda_array_interface__=interface)  # for torch.as_tensor
        flat = torch.as_tensor(raw, device=x.device).view(x.dtype)
        return flat.as_strided(x.shape, x.stride(), x.storage_offset())


class _Call:
    """The call of a block in a forward: what was seen of it, then its graphs and their memory."""

    def __init__(
        self, block: Graphed, leaves: list[Any], spec: Any, output: Any, earlier: list[_Call]
    ) -> None:
        self.name, self.block, self.index = block.graph_name, block, len(earlier)
        self._modules = [*block.modules()]
        self._parameters = [p for p in block.parameters() if p.requires_grad]
        self._spec, self._signature = spec, [*map(_signature, leaves)]
        self._state = _state(block, self._modules)
        # Of each tensor: the earlier call that returned it, and as which of its outputs.
        self._sources = [
            next((found for call in reversed(earlier) if (found := call._find(x))), None)
            for x in _tensors(leaves)
        ]
        self._readers: dict[int, list[tuple[_Call, int]]] = {}  # of an output: call, which tensor
        for i, source in enumerate(self._sources):
            if source is not None:
                source[0]._readers.setdefault(source[1], []).append((self, i))
        outputs, self._output_spec = tree_flatten(output)
        self._output_signature = [*map(_signature, outputs)]
        self._seen = [*map(ref, _tensors(outputs))]

    def _find(self, x: Tensor) -> tuple[_Call, int] | None:
        return next(((self, i) for i, seen in enumerate(self._seen) if seen() is x), None)

    def misfit(self, leaves: list[Any], spec: Any) -> str:
        """Return how a call of the block differs from the one that was noted, if it does."""
        if spec != self._spec or [*map(_signature, leaves)] != self._signature:
            return "its arguments have other shapes, dtypes or values than those captured"
        if _state(self.block, self._modules) != self._state:
            return "its modules, hooks, training flags, autocast or addresses of parameters changed"
        return _RECOMPUTED if _saved_tensors_have_hooks() else ""

    def is_fed(self, leaves: list[Any]) -> bool:
        """Return whether arguments that were outputs of other graphs are so now."""
        fed = zip(_tensors(leaves), self._inputs, self._sources, strict=True)
        return all(s is None or x.data_ptr() == memory.data_ptr() for x, memory, s in fed)

    # --- captures

    def capture_forward(self, recorder: Recorder) -> None:
        """Capture the forward, on new memory for the arguments, or on what an earlier call writes."""
        self._inputs: list[Tensor] = []
        tensors = (signature[1:] for signature in self._signature if signature[0] is Tensor)
        for source, (shape, stride, *kind, needs) in zip(self._sources, tensors, strict=True):
            if source is None:
                x = torch.empty_strided(shape, stride, dtype=kind[0], device=kind[1])
            else:
                x = source[0]._outputs[source[1]].detach()
            self._inputs.append(x.requires_grad_(needs))
        self._forward, outputs = recorder.record(self.name, self.run)
        self._outputs: list[Tensor] = outputs
        self._check_leaves()

    def run(self) -> list[Tensor]:
        """Run the block on the captured memory; return the tensors among its outputs."""
        args, kwargs = tree_unflatten(_filled(self._signature, self._inputs), self._spec)
        # Autograd would wait for the stream that a parameter was first used on, which a capture must not.
        self._leaves = {id(p): nn.Parameter(p.detach()) for p in self._parameters}
        with _exchanged(self._modules, self._leaves), _autocast_as(self._state[0]):
            return _tensors(tree_flatten(self.block.plain_forward(*args, **kwargs))[0])

    def _check_leaves(self) -> None:
        """Raise if a gradient would flow to what is neither an argument nor a parameter of the block."""
        known = {id(x) for x in (*self._inputs, *self._leaves.values())}
        nodes: list[Any] = [x.grad_fn for x in self._outputs]
        seen = {None}
        while nodes:
            if (node := nodes.pop()) not in seen:
                seen.add(node)
                nodes += [following for following, _ in node.next_functions]
                if hasattr(node, "variable") and id(node.variable) not in known:
                    raise ModelError(
                        f"no CUDA graph of {self.name} can be right: it reads a parameter of another module, which "
                        f'would get no gradient. Leave it out: graph(model, skip=["{self.name}"]).'
                    )

    def capture_backward(
        self, recorder: Recorder, autocast: tuple[bool, torch.dtype | None]
    ) -> None:
        """Capture the backward; forwards of all calls and backwards of later ones are captured before."""
        self._backward_autocast = autocast
        self.output_grads = [self._grad_memory(i, x) for i, x in enumerate(self._outputs)]
        self._input_grads: list[Tensor | None] = [None] * len(self._inputs)
        if any(g is not None for g in self.output_grads):
            self._backward, grads = recorder.record(self.name, self.differentiate)
            found = iter(grads)
            self._input_grads = [next(found) if x.requires_grad else None for x in self._inputs]
            # They are copied before the next replay, so all blocks may use the same memory for them.
            self._parameter_grads = [g if g is None else recorder.release(g) for g in found]
        self._outputs, self._leaves = [x.detach() for x in self._outputs], {}

    def _grad_memory(self, i: int, x: Tensor) -> Tensor | None:
        """Return memory for the gradient of an output: where the one call that reads the output writes it."""
        if not x.requires_grad:
            return None
        readers = self._readers.get(i, ())
        grad = readers[0][0]._input_grads[readers[0][1]] if len(readers) == 1 else None
        return torch.empty_like(x) if grad is None or grad.stride() != x.stride() else grad

    def differentiate(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments and parameters that need one, on the captured memory."""
        outputs = [x for x in self._outputs if x.requires_grad]
        wanted = [x for x in (*self._inputs, *self._leaves.values()) if x.requires_grad]
        given = [g for g in self.output_grads if g is not None]
        with _autocast_as(self._backward_autocast):
            return torch.autograd.grad(outputs, wanted, given, allow_unused=True)

    # --- replays

    def replay(self, leaves: list[Any], replays: Replays) -> Any:
        """Return what the block returns for these arguments."""
        outputs = _Graph.apply(self, replays, *_tensors(leaves), *self._parameters)
        return tree_unflatten(_filled(self._output_signature, outputs), self._output_spec)

    def replay_forward(self, given: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the outputs for the arguments that `given` begins with."""
        for memory, x in zip(self._inputs, given, strict=False):
            _copy(memory, x)
        self._forward()
        # Only graphs read outputs where they are, since the next forward overwrites them.
        outputs = enumerate(self._outputs)
        return [x.detach() if i in self._readers else x.clone() for i, x in outputs]

    def replay_backward(self, given: tuple[Tensor, ...]) -> list[Tensor | None]:
        """Return the gradients of the arguments and parameters for those of the outputs."""
        for memory, grad in zip(self.output_grads, given, strict=True):
            if memory is not None:
                _copy(memory, grad)
        self._backward()
        grads = [*self._input_grads, *self._parameter_grads]
        # The graph that reads a gradient of an argument reads it where it is.
        stay = {i for i, source in enumerate(self._sources) if source is not None}
        moved = {i: g for i, g in enumerate(grads) if g is not None and i not in stay}
        copies = {i: torch.empty_like(g) for i, g in moved.items()}
        if moved:
            torch._foreach_copy_([*copies.values()], [*moved.values()])
        return [copies.get(i, g if g is None else g.detach()) for i, g in enumerate(grads)]


class _Graph(torch.autograd.Function):
    """A block as one node of autograd. It saves nothing: what backward reads is in the graphs' memory."""

    @staticmethod
    def forward(ctx: Any, call: _Call, replays: Replays, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.replays, replays[call.index] = call, replays, ref(ctx)
        ctx.needed = True  # backward may still come, and reads what this has kept
        outputs = call.replay_forward(given)
        fixed = [x for x, g in zip(outputs, call.output_grads, strict=True) if g is None]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        name = ctx.call.name
        if not ctx.needed:
            raise ModelError(
                f"the backward of {name} comes a second time, or after that of an earlier block, which has overwritten "
                f'what it reads. Leave such blocks out: graph(model, skip=["{name}", ...]).'
            )
        ctx.needed = False
        for last in ctx.replays[ctx.call.index :]:
            if (later := last()) is not None:  # what it has kept is overwritten now
                later.needed = False
        return None, None, *ctx.call.replay_backward(grads)


# --- what a call is


_RECOMPUTED = "its activations are recomputed or moved (saved_tensors_hooks)"


def _is_leaf(value: Any) -> bool:
    """Is `value` no plain collection? A cache of keys and values is one to torch, and blocks change it."""
    return type(value) not in (tuple, list, dict)


def _tensors(leaves: Iterable[Any]) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor)]


def _signature(x: Any) -> tuple[Any, ...]:
    if isinstance(x, Tensor):
        return Tensor, x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    return type(x), x


def _filled(signature: list[tuple[Any, ...]], tensors: Iterable[Tensor]) -> list[Any]:
    """Return leaves as they were, with these tensors in the place of those that were among them."""
    left = iter(tensors)
    return [next(left) if kind is Tensor else rest[0] for kind, *rest in signature]


def _autocast() -> tuple[bool, torch.dtype | None]:
    enabled = torch.is_autocast_enabled(DEVICE)
    return enabled, torch.get_autocast_dtype(DEVICE) if enabled else None


def _autocast_as(state: tuple[bool, torch.dtype | None]) -> torch.autocast:
    """Return the context in which autocast is as it was, without a cache: another graph would not fill it."""
    return torch.autocast(DEVICE, state[1], state[0], cache_enabled=False)


def _state(block: nn.Module, modules: list[nn.Module]) -> list[Any]:
    """Return what decides, besides the arguments, which kernels a block launches and on which memory."""
    state: list[Any] = [_autocast()]
    for module in modules:
        own = (*module._parameters.values(), *module._buffers.values())
        state.append((
            type(module), module.training, [*map(id, module._modules.values())],
            [(id(x), x.data_ptr(), x.requires_grad) for x in own if x is not None],
            module is not block and has_hooks(module),
            getattr(vars(module).get("products"), "probe", None),
        ))  # fmt: skip
    return state


def _launch_together(block: nn.Module, graphed: bool) -> None:
    """Tell FP8 layers whether their launches cost the host time, by which they choose FP8 or bfloat16."""
    for module in block.modules():
        products = vars(module).get("products")
        if isinstance(products, Products):
            products.graphed = graphed


def _never(block: nn.Module, leaves: list[Any]) -> str:
    """Return why no call like this one can be captured; an empty string if it can."""
    for x in leaves:
        if type(x) in (Tensor, nn.Parameter):
            if x.device.type != DEVICE:
                return f"an argument is on {x.device}"
        elif type(x) not in _CONSTANTS:
            remedy = "; pass use_cache=False" if "Cache" in type(x).__name__ else ""
            return f"an argument is a {type(x).__name__}, which may change{remedy}"
    if any(map(is_sharded, block.parameters())):
        return "its parameters are sharded, and gathered at other addresses each time"
    hooked = [name for name, module in block.named_modules() if name and has_hooks(module)]
    if hooked:
        return f"{hooked[0]} has a hook, or a forward of its own, which a graph would not call"
    return _RECOMPUTED if _saved_tensors_have_hooks() else ""


@contextlib.contextmanager
def _exchanged(modules: list[nn.Module], by: dict[int, nn.Parameter]) -> Iterator[None]:
    """Let modules have other parameters for a while: `by` the ids of theirs."""
    own = [(module._parameters, dict(module._parameters)) for module in modules]
    try:
        for parameters, before in own:
            parameters.update((name, by.get(id(p), p)) for name, p in before.items())
        yield
    finally:
        for parameters, before in own:
            parameters.update(before)


def _saved_tensors_have_hooks() -> bool:
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(""):
            return False
    except RuntimeError:  # they cannot be disabled while some are in force
        return True


@contextlib.contextmanager
def _noting_waits() -> Iterator[list[str]]:
    """Note where the host waits for the GPU, by torch's own warnings."""
    waits: list[str] = []
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in told:
        if "synchronizing CUDA operation" in str(one.message):
            waits.append(f"{Path(one.filename).name}, line {one.lineno}")
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def _copy(memory: Tensor, x: Tensor) -> None:
    """Copy `x` to `memory`, of the same shape, unless it is there already."""
    if memory.data_ptr() != x.data_ptr():
        # What an expanded tensor has once is written once.
        once = tuple(slice(1) if step == 0 else slice(None) for step in memory.stride())
        memory[once].copy_(x[once])
