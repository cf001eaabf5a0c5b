"""Check on the live objects that a level that was asked for is what runs.

FP8 that is silently off looks like FP8 that does not help. Frameworks replace layers, optimizers, parameters and the
methods that reduce gradients, so each of them is looked up where it acts, after everybody has had a hand in it.

`compare` walks over the model, the optimizer and what reduces gradients, and raises one error with all differences.
DeepSpeed, FSDP2, Lightning and Accelerate call it, and add what only they know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8stack.api import session_of
from fp8stack.errors import ModelError
from fp8stack.nn import GEMM_LAYERS
from fp8stack.nn.layer_kinds import kind_of
from fp8stack.optim import BlockwiseOptimizer
from fp8stack.report import Report, note_selected
from fp8stack.tensor_kinds import is_sharded

MOST = 8
"""So many differences are listed: a model may have thousands of layers."""


@dataclass(frozen=True)
class Verification:
    """What runs; `str()` says it in one line."""

    level: str
    wrapper: str  # "no wrapper", "DistributedDataParallel", "FSDP2" or "DeepSpeed ZeRO-2"
    layers: int  # Linear layers that multiply in FP8 (in bf16 where FP8 is missing)
    few_rows: int = 0  # of those: in bf16 in the last eager forward, for too few rows of input
    # what reduces gradients in FP8: modules, or methods of DeepSpeed; empty where they are not sent in FP8
    reduction: tuple[str, ...] = ()
    optimizer: str = ""
    state_bytes: int = 0  # of optimizer states on this rank; 0 before the first step
    parameters: int = 0  # elements that this rank steps, ZeRO's padding included
    stage: int = 0  # of ZeRO
    reduced: int = 0  # how often DeepSpeed has reduced gradients in FP8, on this rank

    def __str__(self) -> str:
        few = f" ({self.few_rows} of them in bf16, for few rows of input)" * bool(self.few_rows)
        states = f"{self.state_bytes / self.parameters:.2f} B" if self.state_bytes else "no"
        wire = "in FP8" if self.reduction else "in full precision, if at all"
        times = f" ({self.reduced} times)" if self.reduced else ""
        return (
            f"fp8stack {self.level}: {self.wrapper}, {self.layers} converted layers{few}, "
            f"optimizer {self.optimizer}, {states} states a parameter, gradients sent {wire}{times}"
        )


def compare(
    model: nn.Module,
    report: Report,
    optimizer: Any,
    wrapper: str = "no wrapper",
    reducers: Mapping[str, bool] | None = None,
    differences: Iterable[str] = (),
    **found: Any,
) -> Verification:
    """Return what runs.

    Args:
        report: the level that was asked for, and what was done.
        model, optimizer: bare. The optimizer's parameters may be partitions that ZeRO made.
        reducers: what has to reduce gradients in FP8, by name, and whether it does.
        differences: what the caller found to be otherwise.
        found: further fields of `Verification`.

    Raises:
        ModelError: with all differences between what was asked for and what runs.
    """
    modules, reducers = dict(model.named_modules()), reducers or {}
    layers = sum(isinstance(module, GEMM_LAYERS) for module in modules.values())
    # A wrapper that came since (of checkpointing, or torch.compile) gives a layer another name, and its own to itself.
    all_there = layers == len(report.converted)
    wrong = [
        f"{name} was converted and is an ordinary layer again"
        for name in report.converted
        if not isinstance(modules.get(name), GEMM_LAYERS)
        and (kind_of(modules.get(name)) or not all_there)
    ]
    if report.device.startswith("CPU") and any(p.is_cuda for p in model.parameters()):
        wrong.append(
            "the model was initialized on the CPU, for which its layers were chosen, and is on a GPU now. Move it "
            "first: model.to(device)"
        )
    wrong += [f"{n} does not reduce its gradients in FP8" for n, fp8 in reducers.items() if not fp8]
    wrong += differences
    if isinstance(optimizer, BlockwiseOptimizer):
        wrong += _wrong_states(optimizer, model)
    if wrong:
        if len(wrong) > MOST:
            wrong[MOST:] = [f"and {len(wrong) - MOST} more differences"]
        raise ModelError(
            f"fp8stack {report.level} was asked for, and what runs is otherwise: {'; '.join(wrong)}."
        )
    states = getattr(optimizer, "state", {})
    tensors = [t for entry in states.values() for t in entry.values() if torch.is_tensor(t)]
    return Verification(
        report.level,
        wrapper,
        layers=layers,
        few_rows=len(note_selected(report, model).few_rows),
        reduction=tuple(reducers),
        optimizer=type(optimizer).__name__,
        state_bytes=sum(t.nbytes for t in tensors),
        parameters=sum(p.numel() for p in states),
        **found,
    )


def verify_initialized(
    model: nn.Module,
    stepped: Iterable[Any] | None = None,
    wrapper: str = "no wrapper",
    reducers: Mapping[str, bool] | None = None,
) -> Verification:
    """Compare a bare model with the record of the call that initialized it.

    Args:
        stepped: the optimizers that the caller steps, if it knows: the one that was returned has to be among them.

    Raises:
        ModelError: as `compare`, or if the model was not initialized.
    """
    session, differences = session_of(model), []
    optimizers = None if stepped is None else list(stepped)
    if optimizers is not None and session.returned not in (None, *optimizers):
        differences.append(
            f"{', '.join(type(o).__name__ for o in optimizers) or 'nothing'} is stepped, and not the "
            f"{type(session.returned).__name__} that fp8stack returned"
        )
    return compare(model, session.report, session.returned, wrapper, reducers, differences)


def _wrong_states(optimizer: BlockwiseOptimizer, model: nn.Module) -> Iterator[str]:
    """Yield what is wrong with states: their format, their sharding, or that a sharded parameter has none."""
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    states = optimizer.state.items()
    coded = {p for p, entry in states if any(k.endswith("_code") for k in entry)}
    dense = {p for p, entry in states if not entry.keys().isdisjoint(optimizer.moments)}

    def needs_codes(p: Any) -> bool:
        return optimizer.quantizes(p) and optimizer.formats_of(p)[0] != "bf16"

    # states of sharded parameters are made with the level, not in the first step
    for group in optimizer.param_groups if any(map(is_sharded, names)) else ():
        has_moments = bool(optimizer.moments_of(group))  # SGD may have none
        for p in group["params"]:
            if p not in names:
                yield f"a parameter of shape {tuple(p.shape)} in the optimizer is not the model's"
            elif p.requires_grad and has_moments and needs_codes(p) and p not in coded | dense:
                yield f"{names[p]} has no {optimizer.formats_of(p)[0]} states"
    for p, entry in states:
        name = names.get(p, f"a partition of {p.numel()} elements")
        if p in (dense if needs_codes(p) else coded):
            yield f"states of {name} are not in {optimizer.formats_of(p)[0]}"
        for key, value in entry.items():
            plain = isinstance(value, torch.Tensor) and value.ndim and not is_sharded(value)
            if is_sharded(p) and plain:
                yield f"{key} of {name} is a plain tensor"
