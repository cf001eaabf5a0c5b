"""`fuse_loss=True`: transformers' causal language models take head and loss in one (`fused_loss.py`), as they are.

Their forwards all say `logits = self.lm_head(hidden)`, then `loss = self.loss_function(logits=logits, labels=labels,
...)`, and return both. So the head and the model get a subclass of their classes each:

1. The model's forward tells the head if it was given labels, in training.
2. The head then returns `DeferredLogits`: a tensor that knows hidden states and head, of the shape, dtype and device of
   logits. Casts to another dtype (`logits.float()`) are deferred, too.
3. `loss_function` is transformers' own with one more case: of deferred logits it is `linear_cross_entropy`.
4. Whatever else asks for values gets the head's own output, which is made then, and once.

Why so: a forward of ours would be one for each family and version. Here the model's own code runs, and where it changes
logits between head and loss (Gemma's soft caps, Granite's and Cohere's factors), or has another loss, nothing is fused
and everything is right; a warning says so once. Neither classes nor transformers are patched, so `restore`, copies and
pickles are those of other mix-ins (`mixin.py`), and names of classes stay, by which transformers saves models.

Not deferred are evaluation, generation, forwards without labels or gradients, graphs of torch.compile, heads with
hooks, and heads that FSDP2 or DeepSpeed gather by themselves, whose weights are gone when the loss is taken. Logits
that are asked for after the head's weight has changed raise.

Limits: logits that go into an `autograd.Function` past torch's functions give it no gradients; backward says so. Logits
whose loss is taken without them have no gradient, so a hook on them, or `retain_grad`, is refused.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fp8stack.errors import ModelError, warn
from fp8stack.formats import FLOATS

from .bf16_storage import output_dtype
from .fused_loss import linear_cross_entropy
from .layer_kinds import kind_of, sizes_of
from .mixin import Fused, has_hooks, mix
from .te import TeLayer

_OF_SHAPE = (
    "shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "is_leaf", "is_sparse", "is_nested", "is_meta",
    "is_quantized", "requires_grad", "grad_fn",
)  # fmt: skip
_QUESTIONS = {
    *(getattr(Tensor, name).__get__ for name in _OF_SHAPE),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.is_complex,
    Tensor.element_size, Tensor.__len__, Tensor.__hash__, Tensor.register_hook,
}  # fmt: skip
"""What torch may ask of a tensor that needs no values."""


class _Pending:
    """A product that was not made yet."""

    def __init__(self, hidden: Tensor, head: DefersLogits) -> None:
        self.hidden, self.head, self.dtype = hidden, head, output_dtype(hidden)
        self.fused = False  # into a loss
        self.versions = [p._version for p in head.parameters(recurse=False)]
        self.made: Tensor | None = None
        self.version = 0  # of that: who reads logits may write to them
        kind = hidden.device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self.autocast: dict[str, Any] = {"device_type": kind, "dtype": dtype, "enabled": enabled}

    def values(self, anew: bool = False) -> Tensor:
        """Return what the head makes; `anew`: not what was made before, if somebody has written to it."""
        if self.made is None or (anew and self.made._version != self.version):
            if self.versions != [p._version for p in self.head.parameters(recurse=False)]:
                raise ModelError(
                    "logits that fuse_loss=True has not made were asked for after a step changed the head's weight. "
                    "Read output.logits before optimizer.step(), or initialize with fuse_loss=False."
                )
            with torch.enable_grad(), torch.autocast(**self.autocast):
                made: Tensor = self.head.plain_forward(self.hidden)
            if self.made is not None:
                return made
            self.made, self.version = made, made._version
        return self.made


class DeferredLogits(Tensor):
    """Logits [..., words] that are computed when something asks for their values."""

    pending: _Pending
    cast: Tensor | None  # the values, once they were asked for in another dtype than the head's

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads_gradient = func is Tensor.retain_grad or (
            func is Tensor.register_hook
            # FSDP2's, on whatever a module returns: the loss has it too
            and not str(getattr(args[1], "__module__", "")).startswith("torch.distributed.")
        )
        if reads_gradient and args[0].pending.fused:
            raise ModelError(
                f"{func.__name__} was called on logits whose loss fuse_loss=True has taken without them: they have no "
                "gradient. Initialize with fuse_loss=False."
            )
        if func in _QUESTIONS and not reads_gradient:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        dtype = _only_a_cast(func, args, kwargs)
        if dtype is not None:
            return args[0] if dtype is args[0].dtype else _deferred(args[0].pending, dtype)
        return func(*tree_map(_values, args), **tree_map(_values, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map(_values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return _values(self).detach().clone()  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _values(self).__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(_values(self))


def _only_a_cast(func: Any, args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype to which a call casts its tensor, if it does nothing else."""
    if func is Tensor.float and len(args) == 1 and not kwargs:
        return torch.float32
    if func is not Tensor.to or any(isinstance(x, Tensor) for x in (*args[1:], *kwargs.values())):
        return None
    own = {name: value for name, value in kwargs.items() if name != "copy"}
    device, dtype, _, layout = torch._C._nn._parse_to(*args[1:], **own)
    stays = device in (None, args[0].device) and layout is None and not kwargs.get("copy")
    dtype = dtype or args[0].dtype
    return dtype if stays and dtype in FLOATS else None


def _values(x: Any) -> Any:
    if type(x) is not DeferredLogits:
        return x
    if x.dtype is x.pending.dtype:
        return x.pending.values()
    if x.cast is None:
        x.cast = x.pending.values(anew=True).to(x.dtype)
    return x.cast


def _deferred(pending: _Pending, dtype: torch.dtype) -> DeferredLogits:
    inputs = pending.hidden, *pending.head.parameters(recurse=False)
    result: DeferredLogits = _Defer.apply(pending, dtype, *inputs)
    result.pending, result.cast = pending, None
    return result


class _Defer(torch.autograd.Function):
    """Gives deferred logits a place in autograd's graph, which FSDP2 and DDP look at."""

    @staticmethod
    def forward(ctx: Any, pending: _Pending, dtype: torch.dtype, *inputs: Tensor) -> Tensor:
        shape = *pending.hidden.shape[:-1], sizes_of(pending.head)[0]
        how: Any = {"dtype": dtype, "device": pending.hidden.device}
        return Tensor._make_wrapper_subclass(DeferredLogits, shape, **how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise ModelError(
            "gradients came to logits that fuse_loss=True has not made, from an autograd.Function that was given them. "
            "Give it logits.clone(), or initialize with fuse_loss=False."
        )


class DefersLogits(Fused):
    """Mixed into the class of a head."""

    mixin_prefix = ""
    waiting: list[_Pending] | None  # set while a forward runs that was given labels

    def forward(self, input: Tensor) -> Tensor:
        """Return logits: [..., in] -> [..., words]."""
        waiting = vars(self).get("waiting")
        if waiting is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.plain_forward(input)  # type: ignore[no-any-return]
        waiting.append(pending := _Pending(input, self))
        return _deferred(pending, pending.dtype)


class FusesLoss(Fused):
    """Mixed into the class of a causal language model of transformers."""

    mixin_prefix = ""

    @staticmethod
    def mixin_methods(cls: Any) -> dict[str, Any]:
        """Return the forward and the loss function of `cls`."""
        place = [*inspect.signature(cls.forward).parameters].index("labels") - 1

        @functools.wraps(cls.forward, updated=())
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            labels = args[place] if len(args) > place else kwargs.get("labels")
            head = self.get_output_embeddings()
            waits = labels is not None and self.training and isinstance(head, DefersLogits)
            # A hook is to see logits.
            read = waits and (_comes_and_goes(head) or has_hooks(head))
            if not waits or torch.compiler.is_compiling() or read:
                return cls.forward(self, *args, **kwargs)
            waiting: list[_Pending] = []
            head.waiting = waiting
            try:
                result = cls.forward(self, *args, **kwargs)
            finally:
                head.waiting = None
            if torch.is_grad_enabled() and not any(pending.fused for pending in waiting):
                _tell(self)
            return result

        def loss_function(self: Any) -> Any:
            own = cls.loss_function.fget(self)
            return functools.partial(_loss, own) if _is_causal(own) else own

        setter = cls.loss_function.fset
        return {"forward": forward, "loss_function": property(loss_function, setter)}


def _is_causal(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return name == "ForCausalLMLoss" and function.__module__ == "transformers.loss.loss_utils"


def _comes_and_goes(head: nn.Module) -> bool:
    """Is its weight gathered for its own forward only (FSDP2 around it alone, DeepSpeed's ZeRO-3)?"""
    return hasattr(head, "_get_fsdp_state") or hasattr(head.weight, "ds_id")


def _loss(
    own: Any,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return transformers' `ForCausalLMLoss`, of deferred logits without making them."""
    fits = logits.shape[-1] == vocab_size
    # made: somebody has read them, and may have written to them
    if not (isinstance(logits, DeferredLogits) and fits) or logits.pending.made is not None:
        given = num_items_in_batch, ignore_index, shift_labels
        return own(logits, labels, vocab_size, *given, **kwargs)  # type: ignore[no-any-return]
    pending, shift = logits.pending, shift_labels is None
    pending.fused = True
    labels = (labels if shift_labels is None else shift_labels).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    rows: Any = {"ignore_index": ignore_index, "reduction": reduction, "shift": shift}
    labels = labels.view(logits.shape[:-1])
    with torch.autocast(**pending.autocast):
        loss = linear_cross_entropy(pending.hidden, pending.head, labels, **rows)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    mean: Tensor = loss / num_items_in_batch
    return mean


def _tell(model: nn.Module) -> None:
    if not vars(model).get("_fp8stack_told"):
        vars(model)["_fp8stack_told"] = True
        warn(
            f"fuse_loss: {type(model).__name__} changes logits between head and loss (soft caps, factors), or takes a "
            "loss of its own: head and loss are not fused.",
            stacklevel=4,
        )


# --- models


def models_to_fuse(model: nn.Module) -> dict[str, nn.Module]:
    """Return the causal language models of transformers in `model`, or that it is, by name, whose head can be fused."""
    return {
        name: m for name, m in model.named_modules()
        if isinstance(getattr(type(m), "loss_function", None), property) and _head_of(m) is not None
        and "labels" in inspect.signature(type(m).forward).parameters and _is_causal(m.loss_function)
    }  # fmt: skip


def _head_of(model: Any) -> nn.Module | None:
    head = model.get_output_embeddings()
    fits = isinstance(head, nn.Module) and kind_of(head) and not isinstance(head, TeLayer)
    return head if fits and "forward" not in vars(head) else None


def fuse_loss(model: nn.Module) -> list[str]:
    """Let the models that `models_to_fuse` finds fuse head and loss; return their names."""
    found = models_to_fuse(model)
    for module in found.values():
        head: Any = _head_of(module)
        if not isinstance(head, DefersLogits):
            mix(head, DefersLogits, waiting=None)
        mix(module, FusesLoss, _fp8stack_told=False)
    return [name or "the model" for name in found]
