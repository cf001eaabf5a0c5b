"""A step in plain torch, one parameter at a time: on a CPU, and on GPUs without Triton."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8stack.kernels.reference import norm
from fp8stack.kernels.reference.step import HYPER
from fp8stack.kernels.reference.step_scalars import scalars

from .checks import rates_on_gpu
from .gradients import check_gradient, gradient_parts
from .sharded import local, local_state, reduce_largest, reduce_squares, share_of, shares_of
from .state import State, step_tensors

if TYPE_CHECKING:
    from .base import BlockwiseOptimizer

STEP_COUNT = len(HYPER)
"""A column of padding in the scalars, where optimizers that are not ours (`bitsandbytes.py`) find the step."""


def update_parameter(
    optimizer: BlockwiseOptimizer,
    group: dict[str, Any],
    parameter: nn.Parameter,
    state: State,
    gradient: tuple[Tensor, Tensor | None],  # as `gradient_parts`
    row: Tensor,  # its scalars, see `kernels/reference/step_scalars.py`
) -> None:
    """Update one parameter and its state with the reference kernel."""
    held, weight = local_state(state), local(parameter).detach()
    here = {k: v.to(weight.device) for k, v in held.items()}  # it may be offloaded
    rows = weight.contiguous()
    tensors = step_tensors(rows, *gradient, optimizer.moments_of(group), here)
    optimizer.step_tensors(group, optimizer.step_kind(group, parameter), tensors, row)
    for key, value in here.items():
        if value is not held[key]:
            held[key].copy_(value)
    # channels_last, or a transposed view: blocks are row-major
    if rows.data_ptr() != weight.data_ptr():
        weight.copy_(rows)


def reference_step(
    optimizer: BlockwiseOptimizer, numbers: list[tuple[float, ...]], only: Tensor | None = None
) -> None:
    """Step every parameter that has a gradient (or the one given), on whatever devices they are."""
    work: list[tuple[int, int, nn.Parameter, State, tuple[Tensor, Tensor | None]]] = []
    index = 0
    for g, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.grad is not None and (only is None or p is only):
                state = optimizer.ensure_state(group, p)
                check_gradient(p, p.grad)
                work.append((g, index, p, state, gradient_parts(local(p.grad).contiguous())))
            index += 1
    families = [optimizer.family_of(group) for group in optimizer.param_groups]
    first = work[0][2].device
    verdict = _verdict(optimizer, [(p, parts) for _, _, p, _, parts in work], first)
    skipped = torch.as_tensor(optimizer.skipped_steps, dtype=torch.float32, device=first)
    counted = skipped
    for device, family in dict.fromkeys((p.device, families[g]) for g, _, p, _, _ in work):
        here = [x for x in work if x[2].device == device and families[x[0]] == family]
        steps = torch.stack([state["step"] for _, _, _, state, _ in here])
        hyper = scalars(
            family,
            _group_table(optimizer, numbers, device)[[g for g, *_ in here]],
            torch.ones(len(here), dtype=torch.bool, device=device),
            steps,
            verdict.to(device),
            counted,
            torch.tensor([i for _, i, *_ in here], dtype=torch.int32, device=device),
        )
        hyper[:, STEP_COUNT] = steps
        for (g, _, p, state, parts), count, row in zip(here, steps, hyper, strict=True):
            group = optimizer.param_groups[g]
            # in a tensor of its own (DeepSpeed loads one for several), past the dict that would forget all plans
            dict.__setitem__(state, "step", count.clone())
            if parts[0].numel():
                update_parameter(optimizer, group, p, state, parts, row)
        counted = torch.zeros((), device=device)  # a skip counts once
    torch.autograd.graph.increment_version([p for _, _, p, _, _ in work])
    optimizer.skipped_steps = skipped
    if optimizer.max_grad_norm is not None:
        optimizer.grad_norm = verdict[2] * verdict[0]


def _group_table(
    optimizer: BlockwiseOptimizer, numbers: list[tuple[float, ...]], device: torch.device
) -> Tensor:
    """Return the hyper-parameters of every group, float64; a learning rate on a GPU stays there."""
    table = torch.tensor(numbers, dtype=torch.float64).to(device)
    for g, rate in rates_on_gpu(optimizer.param_groups):
        table[g, 0].copy_(rate)
    return table


def _verdict(
    optimizer: BlockwiseOptimizer,
    gradients: list[tuple[Tensor, tuple[Tensor, Tensor | None]]],  # (parameter, gradient_parts)
    device: torch.device,
) -> Tensor:
    """Return what the gradients are found to be; see `kernels/reference/step_scalars.py`."""
    scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler around the call
    found_inf = getattr(optimizer, "found_inf", None)
    clip = optimizer.max_grad_norm
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)
    total, largest = zero, zero
    shares = shares_of(optimizer.param_groups)
    gradients = [(p, parts) for p, parts in gradients if parts[0].numel()]
    if clip is not None:
        squares = dict.fromkeys(shares, zero.double())
        for p, parts in gradients:
            squares[share_of(p)] = squares[share_of(p)] + norm.sum_of_squares(*parts).to(device)
        total = largest = reduce_squares(squares).sqrt().float()
    else:
        if gradients:
            largest = torch.stack([norm.largest(*x).to(device) for _, x in gradients]).amax()
        largest = largest.abs()  # a copy, and NaN without its sign
        reduce_largest(largest, shares)
    return torch.stack(
        [
            one if scale is None else 1 / scale.to(device, torch.float32).reshape(()),
            one * (math.inf if clip is None else clip),
            total,
            largest,
            zero if found_inf is None else found_inf.to(device, torch.float32).reshape(()),
        ]
    )
