"""Is what was asked for what runs? FP8 that is silently off looks like any other training."""

from __future__ import annotations

import torch
from torch import nn

from fp8stack.api import session_of
from fp8stack.comm.fsdp import reduces_in_fp8, units_of
from fp8stack.errors import ModelError
from fp8stack.nn import GEMM_LAYERS
from fp8stack.optim import BlockwiseOptimizer
from fp8stack.report import Report
from fp8stack.tensor import is_sharded

from .sharded import on_wire


def verify(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Report:
    """Check on the live objects that what was asked for is what runs; return the report of the call.

    Raises:
        ModelError: with all that is wrong: layers that are FP8 no more, gradients that are not reduced in FP8, states
            that are not quantized or not sharded like their parameters, an optimizer of other parameters.
    """
    session, units = session_of(model), units_of(model, "verify")
    for unit in units.values():
        unit.reshard()
    recipe, report, modules = session.recipe, session.report, dict(model.named_modules())
    wrong = [f"{n} is no {report.gemm.split()[0]} layer any more" for n in report.converted
             if not isinstance(modules.get(n), GEMM_LAYERS)]  # fmt: skip
    if on_wire(recipe):
        wrong += [f"{name or 'the root'} does not reduce its gradients in FP8"
                  for name, unit in units.items() if not reduces_in_fp8(unit)]  # fmt: skip
    if optimizer is not None and optimizer is not session.returned:
        wrong.append(f"the {type(optimizer).__name__} given is not the optimizer that was returned")
    elif isinstance(session.returned, BlockwiseOptimizer):
        names = {p: name for name, p in model.named_parameters()}
        for group in session.returned.param_groups:
            for p in group["params"]:
                moments = session.returned.moments_of(group)  # SGD may have none
                wrong += _wrong_states(session.returned, p, names.get(p, ""), bool(moments))
    if wrong:
        raise ModelError(f"not as {recipe.level} says: {'; '.join(wrong)}.")
    return report


def _wrong_states(
    optimizer: BlockwiseOptimizer, parameter: nn.Parameter, name: str, has_moments: bool
) -> list[str]:
    if not name:
        return [
            f"a parameter of shape {tuple(parameter.shape)} in the optimizer is not the model's"
        ]
    state = optimizer.state.get(parameter, {})
    if not parameter.requires_grad:
        return []
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim}
    wrong = [f"{k} of {name} is a plain tensor" for k, v in tensors.items()
             if is_sharded(parameter) and not is_sharded(v)]  # fmt: skip
    coded = any(k.endswith("_code") for k in tensors)
    if has_moments and optimizer.quantizes(parameter) and not coded:
        wrong.append(f"{name} has no {optimizer.formats_of(parameter)[0]} states")
    return wrong
