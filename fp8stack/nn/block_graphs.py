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
raises. Gradients are copied out of the pool at once.

A block runs as it is, too, without gradients, inside other captures and under torch.compile, with other arguments than
the captured ones (shapes, dtypes, numbers), where activations are recomputed or moved (`torch.utils.checkpoint`), while
a monitor samples, and after a change of its modules, hooks, training flags, autocast, stream, or its parameters'
addresses. A block that waits for the GPU in forward, takes a cache, sets attributes, writes to its arguments, scales
with histories, or is sharded is never captured. A warning names the reason.

Limits: one set of shapes. An output that another block reads is overwritten by the next forward: clone what you keep of
`output_hidden_states`. What Python decides in a block at random, lists that it appends to, and torch's global flags are
as they were in the capture. The graphs are freed by the garbage collector, as the blocks refer to them and back.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from fp8stack.errors import ModelError, warn
from fp8stack.tensor_kinds import is_sharded

from . import block_call
from .attention import fp8_products
from .casts import in_backward
from .mixin import Fused, has_hooks, mix
from .precision import outermost_lists

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


def graph(model: nn.Module, skip: Iterable[str] = ()) -> BlockGraphs:
    """Let the blocks of `model`, the elements of its outermost ModuleLists, run as CUDA graphs from the third step on.

    Call it after `initialize`. Results are those of the same layers in eager mode, to the last bit, but where gradients
    of one tensor are added up in another order. Layers in blocks multiply in FP8 from as few rows on as under
    torch.compile, since launches cost the host no time.

    Args:
        skip: patterns of names of blocks that are left out.

    Returns:
        The graphs: `reasons` holds why a block runs as it is, by its name. `fp8stack.restore(model)` undoes the call.

    Raises:
        ModelError: if the model has no such blocks, they are not on one GPU, or are graphed already.
    """
    patterns, lists = list(skip), outermost_lists(model)
    blocks = {f"{name}.{i}": block for name, each in lists for i, block in enumerate(each)}
    devices = {str(p.device) for block in blocks.values() for p in block.parameters()}
    if len(devices) != 1 or not next(iter(devices)).startswith(block_call.DEVICE):
        found = ", ".join(sorted(devices)) or "no blocks with parameters"
        raise ModelError(f"graph captures elements of nn.ModuleLists on one GPU, not {found}.")
    if any(isinstance(block, Graphed) for block in blocks.values()):
        raise ModelError("the blocks of this model are graphed already.")
    unknown = [p for p in patterns if not any(fnmatchcase(name, p) for name in blocks)]
    if unknown:
        raise ModelError(f"skip={unknown} matches none of the blocks {[*blocks][:3]}, ...")
    graphs = BlockGraphs()
    for name, block in blocks.items():
        if "forward" in vars(block):
            graphs.reasons[name] = "something has put a forward of its own on it"
        elif not isinstance(block, Graphed) and not any(fnmatchcase(name, p) for p in patterns):
            mix(block, Graphed, block_graphs=graphs, graph_name=name)
            _launch_together(block, True)
    return graphs


class Graphed(Fused):
    """Mixed into the class of a block, whose `forward` it replaces."""

    mixin_prefix = "Graphed"
    block_graphs: BlockGraphs
    graph_name: str
    block_forward: Any

    @staticmethod
    def mixin_methods(cls: type[nn.Module]) -> dict[str, Any]:
        """Return the forward of `cls` by a name of our own: a fused block below has its `plain_forward`."""
        return {"block_forward": cls.forward}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block's own forward returns."""
        own = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not in_backward()
        if own and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return self.block_graphs.run(self, args, kwargs)
        return self.block_forward(*args, **kwargs)


class BlockGraphs:
    """The graphs of a model's blocks. A copy of the model begins without any."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._first: nn.Module | None = None  # the block that begins a forward
        self._forwards = 0
        # Autocast in the backward of the forward that was noted, once that has come to a block.
        self._backward_autocast: tuple[bool, torch.dtype | None] | None = None
        self._calls: dict[nn.Module, block_call.Call] = {}  # in the order of a forward
        self._replays: block_call.Replays = []  # from the capture on
        self._told: set[str] = set()

    def __reduce__(self) -> Any:
        return BlockGraphs, ()

    def forget(self) -> None:
        """Begin anew, as blocks launch other kernels from now on; what is never captured stays so."""
        self.__dict__.update(vars(BlockGraphs()) | {"reasons": self.reasons})

    def run(self, block: Graphed, args: Any, kwargs: Any) -> Any:
        """Return what the block's own forward returns; replay it if that is right."""
        # plain collections alone are taken apart: a cache of keys and values is one to torch, and blocks change it
        leaves, spec = tree_flatten((args, kwargs), lambda x: type(x) not in (tuple, list, dict))
        if not self._replays and self._first in (None, block):
            self._begin_forward(block, leaves, spec)
        call = self._calls.get(block)
        if self._replays:
            if call is not None and self._may_replay(call, leaves, spec):
                return call.replay(leaves, self._replays)
        elif self._forwards > 1 and call is None and block.graph_name not in self.reasons:
            return self._note(block, args, kwargs, leaves, spec)
        return block.block_forward(*args, **kwargs)

    def _may_replay(self, call: block_call.Call, leaves: list[Any], spec: Any) -> bool:
        """Return whether memory may be overwritten, and all is as it was captured."""
        for last in self._replays[call.index :]:
            if (replay := last()) is not None and replay.needed:
                return False
        misfit = call.misfit(leaves, spec)
        if misfit and misfit not in self._told:
            self._told.add(misfit)
            warn(f"{call.name} runs without its CUDA graph: {misfit}", stacklevel=4)
        return not misfit and call.is_fed(leaves)

    # --- until the capture

    def _begin_forward(self, block: nn.Module, leaves: list[Any], spec: Any) -> None:
        first = next(iter(self._calls.values()), None)
        # The first launch of a kernel loads it, which no capture allows: so backward must have run as well.
        autocast = self._backward_autocast
        as_noted = all(call.is_as_noted() for call in self._calls.values())
        if first and autocast and as_noted and not first.misfit(leaves, spec):
            self._capture(autocast)
            return
        self._first, self._backward_autocast = block, None
        self._forwards += 1
        self._calls.clear()

    def _note(self, block: Graphed, args: Any, kwargs: Any, leaves: list[Any], spec: Any) -> Any:
        """Run the block as it is, and note what there is to capture."""
        why, before = _never(block, leaves), _changeable(block, leaves)
        with _noting_waits() as waits:
            output = block.block_forward(*args, **kwargs)
        found = tree_flatten(output)[0]
        if before != _changeable(block, leaves):
            why = why or "it sets attributes or writes to an argument, which a graph would not do"
        why = why or (f"it waits for the GPU ({waits[0]})" if waits else _unknown(found, "output"))
        if why:
            self.reasons[block.graph_name] = why
            _launch_together(block, False)
            warn(f"{block.graph_name} gets no CUDA graph: {why}", stacklevel=4)
            return output
        call = block_call.Call(block, leaves, spec, output, [*self._calls.values()])
        self._calls[block] = call
        for i, x in enumerate(block_call.tensors_of(found)):
            if x.requires_grad:
                x.register_hook(partial(self._note_backward, call, i))
        return output

    def _note_backward(self, call: block_call.Call, i: int, _: Tensor) -> None:
        call.used.add(i)
        self._backward_autocast = block_call.autocast_state()

    def _capture(self, backward_autocast: tuple[bool, torch.dtype | None]) -> None:
        calls = [*self._calls.values()]
        devices = (p.device for call in calls for p in call.block.parameters())
        recorder = block_call.Recorder(next(devices, None))
        gc.collect()  # graphs of before: CUDA ends a capture in which another graph is freed
        for call in calls:
            call.capture_forward(recorder)
        for call in reversed(calls):
            call.capture_backward(recorder, backward_autocast)
        self._replays = [lambda: None] * len(calls)


def _launch_together(block: nn.Module, graphed: bool) -> None:
    """Tell FP8 layers whether their launches cost the host time, by which they choose FP8 or bfloat16."""
    for _, products, _ in fp8_products(block).values():
        products.graphed = graphed


def _changeable(block: nn.Module, leaves: list[Any]) -> list[Any]:
    """Return what a block may have changed beside its buffers: attributes, and versions of its arguments."""
    attributes = [id(value) for module in block.modules() for value in vars(module).values()]
    return [attributes, [x._version for x in block_call.tensors_of(leaves)]]


def _unknown(leaves: list[Any], what: str) -> str:
    """Return why these arguments or outputs are not those of a graph; an empty string if they may be."""
    for x in leaves:
        if type(x) in (Tensor, nn.Parameter):
            if x.device.type != block_call.DEVICE:
                return f"an {what} is on {x.device}"
        elif type(x) not in _CONSTANTS:
            remedy = "; pass use_cache=False" if "Cache" in type(x).__name__ else ""
            return f"an {what} is a {type(x).__name__}, which may change{remedy}"
    return ""


def _never(block: nn.Module, leaves: list[Any]) -> str:
    """Return why no call like this one can be captured; an empty string if it can."""
    if why := _unknown(leaves, "argument"):
        return why
    if any(map(is_sharded, block.parameters())):
        return "its parameters are sharded, and gathered at other addresses each time"
    hooked = [name for name, module in block.named_modules() if name and has_hooks(module)]
    if hooked:
        return f"{hooked[0]} has a hook, or a forward of its own, which a graph would not call"
    for name, (_, products, _) in fp8_products(block).items():
        if products.fp8_recipe == "delayed":
            return f"delayed scaling of {name} keeps other scales and counts in a graph"
    return block_call.RECOMPUTED if block_call.saved_tensors_have_hooks() else ""


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
