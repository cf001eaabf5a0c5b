"""The call of a block as two CUDA graphs: how it is told from other calls, captured, and replayed.

Why: `block_graphs.py` says, which decides when a call is captured and when it may be replayed.

How: a `Call` notes the arguments of a block, what it returned, and its state. Its forward is captured on memory that
holds the arguments from then on; an argument that an earlier call returned is where that call's graph writes it. Its
backward is captured on memory for the gradients of those outputs for which the noted backward had one. A replay copies
what comes from elsewhere there first, and gradients out at the end.

Limits: memory is that of the captures; only the order of captures makes it right to replay them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

from fp8stack.errors import ModelError, first_line
from fp8stack.kernels.ops import raw_stream
from fp8stack.tensor_kinds import inner_tensors

from .mixin import has_hooks

DEVICE = "cuda"  # tests of the rules run on a CPU
Replays = list[Callable[[], Any]]
"""The last replay of each call, which is its node in autograd's graph, or None once that is gone."""


class Recorder:
    """Captures on one stream and in one pool of memory."""

    def __init__(self, device: torch.device | None) -> None:
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(self, name: str, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return what replays `function`, and the result, whose memory a replay writes."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as a DataLoader's, may allocate memory meanwhile.
        capture = torch.cuda.graph(graph, self._pool, self._stream, "thread_local")
        try:
            with capture:
                result = function()
        except Exception as error:
            raise ModelError(
                f"no CUDA graph can be captured of {name}: {first_line(error).removesuffix('.')}. torch may be unable "
                f'to go on in this process. In another, leave the block out: graph(model, skip=["{name}"]).'
            ) from error
        return graph.replay, result

    @staticmethod
    def release(x: Tensor) -> Tensor:
        """Return a tensor over the memory of `x` that leaves it to later captures: read it before their replays."""
        memory = x.untyped_storage()
        data, shape = (memory.data_ptr(), False), (memory.nbytes(),)
        interface = {"data": data, "shape": shape, "typestr": "|u1", "version": 3}
        raw: Any = SimpleNamespace(__cuda_array_interface__=interface)  # for torch.as_tensor
        flat = torch.as_tensor(raw, device=x.device).view(x.dtype)
        return flat.as_strided(x.shape, x.stride(), x.storage_offset())


class Call:
    """The call of a block in a forward: what was seen of it, then its graphs and their memory."""

    def __init__(
        self, block: Any, leaves: list[Any], spec: Any, output: Any, earlier: list[Call]
    ) -> None:
        self.name, self.block, self.index = block.graph_name, block, len(earlier)
        self._modules = [*block.modules()]
        # Held, so that no other tensor gets their ids and memory.
        self._held = [x for module in self._modules for x in tensors_of(vars(module).values())]
        self._parameters = [p for p in block.parameters() if p.requires_grad]
        self._spec, self._signature = spec, [*map(_signature, leaves)]
        self._state = _state(block, self._modules)
        # Of each tensor: the earlier call that returned it, and as which of its outputs.
        self._sources = [
            next((found for call in reversed(earlier) if (found := call._find(x))), None)
            for x in tensors_of(leaves)
        ]
        self._read: set[int] = set()  # outputs that later calls read where they are
        self.used: set[int] = set()  # outputs for which the noted backward had a gradient
        for source in self._sources:
            if source is not None:
                source[0]._read.add(source[1])
        outputs, self._output_spec = tree_flatten(output)
        self._output_signature = [*map(_signature, outputs)]
        self._seen = [*map(ref, tensors_of(outputs))]

    def _find(self, x: Tensor) -> tuple[Call, int] | None:
        return next(((self, i) for i, seen in enumerate(self._seen) if seen() is x), None)

    def is_as_noted(self) -> bool:
        """Return whether the block is as it was, but for its arguments."""
        return _state(self.block, self._modules) == self._state

    def misfit(self, leaves: list[Any], spec: Any) -> str:
        """Return how a call of the block differs from the one that was noted, if it does."""
        if spec != self._spec or [*map(_signature, leaves)] != self._signature:
            return "its arguments have other shapes, dtypes or values than those captured"
        if not self.is_as_noted():
            return "its modules, hooks, training flags, autocast, stream or addresses of parameters changed"
        return RECOMPUTED if saved_tensors_have_hooks() else ""

    def is_fed(self, leaves: list[Any]) -> bool:
        """Return whether arguments that were outputs of other graphs are so now."""
        fed = zip(tensors_of(leaves), self._inputs, self._sources, strict=True)
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
        own = (named for named in self.block.named_parameters() if named[1].requires_grad)
        self._leaves: dict[str, Tensor] = {n: nn.Parameter(p.detach()) for n, p in own}
        # A module under two names is exchanged twice; `stack_weights` undoes the last exchange first.
        exchanged = _reparametrize_module(
            self.block, self._leaves, tie_weights=True, stack_weights=True
        )
        with exchanged, _autocast_as(self._state[0]):
            return tensors_of(tree_flatten(self.block.block_forward(*args, **kwargs))[0])

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
        self.backward_autocast = autocast
        # A gradient for which the noted backward had none stays None: zeros would make gradients where there are none.
        self.output_grads = [
            torch.empty_like(x) if x.requires_grad and i in self.used else None
            for i, x in enumerate(self._outputs)
        ]
        self.fixed = [not x.requires_grad for x in self._outputs]
        if any(g is not None for g in self.output_grads):
            self._backward, grads = recorder.record(self.name, self.differentiate)
            found = iter(grads)
            # They are copied before the next replay, so all calls may use the same memory for them.
            self._grads = [
                recorder.release(g) if x.requires_grad and (g := next(found)) is not None else None
                for x in (*self._inputs, *self._parameters)
            ]
        else:  # without a backward, nothing tells when an output is needed no more
            self._read.clear()
        self._outputs, self._leaves = [x.detach() for x in self._outputs], {}

    def differentiate(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of the arguments and parameters that need one, on the captured memory."""
        pairs = zip(self._outputs, self.output_grads, strict=True)
        outputs = [x for x, g in pairs if g is not None]
        wanted = [x for x in (*self._inputs, *self._leaves.values()) if x.requires_grad]
        given = [g for g in self.output_grads if g is not None]
        with _autocast_as(self.backward_autocast):
            return torch.autograd.grad(outputs, wanted, given, allow_unused=True)

    # --- replays

    def replay(self, leaves: list[Any], replays: Replays) -> Any:
        """Return what the block returns for these arguments."""
        outputs = _Graph.apply(self, replays, *tensors_of(leaves), *self._parameters)
        return tree_unflatten(_filled(self._output_signature, outputs), self._output_spec)

    def replay_forward(self, given: tuple[Tensor, ...]) -> list[Tensor]:
        """Return the outputs for the arguments that `given` begins with."""
        for memory, x in zip(self._inputs, given, strict=False):
            _copy(memory, x)
        for x in self._outputs:  # what was saved of the last ones is no longer what it was
            torch.autograd.graph.increment_version(x)
        self._forward()
        # Only graphs read outputs where they are, since the next forward overwrites them.
        outputs = enumerate(self._outputs)
        return [x.detach() if i in self._read else x.clone() for i, x in outputs]

    def replay_backward(self, given: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Return the gradients of the arguments and parameters for those of the outputs."""
        pairs = [*zip(self.output_grads, given, strict=True)]
        unknown = any(memory is None and grad is not None for memory, grad in pairs)
        if unknown or self.backward_autocast != autocast_state():
            raise ModelError(
                f"the backward of {self.name} comes from an output that had no gradient before, or under another "
                f'autocast. Leave the block out: graph(model, skip=["{self.name}"]).'
            )
        for memory, grad in pairs:
            if memory is not None:
                memory.zero_() if grad is None else _copy(memory, grad)
        self._backward()
        found = [g for g in self._grads if g is not None]
        copies = [*map(torch.empty_like, found)]
        torch._foreach_copy_(copies, found)
        left = iter(copies)
        return [g if g is None else next(left) for g in self._grads]


class _Graph(torch.autograd.Function):
    """A block as one node of autograd. It saves nothing: what backward reads is in the graphs' memory."""

    @staticmethod
    def forward(ctx: Any, call: Call, replays: Replays, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.replays, replays[call.index] = call, replays, ref(ctx)
        ctx.needed = True  # backward may still come, and reads what this has kept
        ctx.set_materialize_grads(False)
        outputs = call.replay_forward(given)
        ctx.mark_non_differentiable(
            *(x for x, fixed in zip(outputs, call.fixed, strict=True) if fixed)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        name = ctx.call.name
        if torch.is_grad_enabled():
            raise ModelError(
                f"{name} runs as a CUDA graph, which has no second derivatives (create_graph=True). Leave it out: "
                f'graph(model, skip=["{name}"]).'
            )
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


RECOMPUTED = "its activations are recomputed or moved (saved_tensors_hooks)"


def tensors_of(leaves: Iterable[Any]) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor)]


def _signature(x: Any) -> tuple[Any, ...]:
    if isinstance(x, Tensor):
        return Tensor, x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    return type(x), x


def _filled(signature: list[tuple[Any, ...]], tensors: Iterable[Tensor]) -> list[Any]:
    """Return leaves as they were, with these tensors in the place of those that were among them."""
    left = iter(tensors)
    return [next(left) if kind is Tensor else rest[0] for kind, *rest in signature]


def autocast_state() -> tuple[bool, torch.dtype | None]:
    enabled = torch.is_autocast_enabled(DEVICE)
    return enabled, torch.get_autocast_dtype(DEVICE) if enabled else None


def _autocast_as(state: tuple[bool, torch.dtype | None]) -> torch.autocast:
    """Return the context in which autocast is as it was, without a cache: another graph would not fill it."""
    return torch.autocast(DEVICE, state[1], state[0], cache_enabled=False)


def _state(block: nn.Module, modules: list[nn.Module]) -> list[Any]:
    """Return what decides, besides the arguments, which kernels a block launches and on which memory."""
    stream = next(map(raw_stream, block.parameters()), 0)
    state: list[Any] = [autocast_state(), stream]
    for module in modules:
        kept = tensors_of(vars(module).values())
        own = (*module._parameters.values(), *module._buffers.values(), *kept)
        state.append((
            type(module), module.training, [*map(id, module._modules.values())],
            [(id(x), part.data_ptr(), x.requires_grad) for x in own if x is not None for part in inner_tensors(x)],
            module is not block and has_hooks(module),
            getattr(vars(module).get("products"), "probe", None),
        ))  # fmt: skip
    return state


def saved_tensors_have_hooks() -> bool:
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(""):
            return False
    except RuntimeError:  # they cannot be disabled while some are in force
        return True


def _copy(memory: Tensor, x: Tensor) -> None:
    """Copy `x` to `memory`, of the same shape, unless it is there already."""
    if memory.data_ptr() != x.data_ptr():
        # What an expanded tensor has once is written once.
        once = tuple(slice(1) if step == 0 else slice(None) for step in memory.stride())
        memory[once].copy_(x[once])
