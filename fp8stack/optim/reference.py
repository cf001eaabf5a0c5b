"""A step in plain torch, one parameter at a time: on a CPU, and on GPUs without Triton."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fp8stack.kernels.reference import norm
from fp8stack.kernels.reference.scalars import scalars
from fp8stack.kernels.reference.step import step

from .checks import rates_on_gpu
from .gradients import check_gradient, gradient_parts
from .state import State, step_tensors

if TYPE_CHECKING:
    from .base import BlockwiseOptimizer


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
                work.append((g, index, p, state, gradient_parts(p.grad.contiguous())))
            index += 1
    devices = list(dict.fromkeys(p.device for _, _, p, _, _ in work))
    verdict = _verdict(optimizer, [parts for *_, parts in work], devices[0])
    skipped = torch.as_tensor(optimizer.skipped_steps, dtype=torch.float32, device=devices[0])
    for device in devices:
        here = [entry for entry in work if entry[2].device == device]
        steps = torch.stack([state["step"] for _, _, _, state, _ in here])
        hyper = scalars(
            optimizer.algorithm,
            _group_table(optimizer, numbers, device)[[g for g, *_ in here]],
            torch.ones(len(here), dtype=torch.bool, device=device),
            steps,
            verdict.to(device),
            skipped if device == devices[0] else skipped.to(device, copy=True),
            torch.tensor([i for _, i, *_ in here], dtype=torch.int32, device=device),
        )
        for (g, _, p, state, parts), count, row in zip(here, steps, hyper, strict=True):
            group = optimizer.param_groups[g]
            state["step"].copy_(count)
            weight = p.detach().contiguous()
            tensors = step_tensors(weight, *parts, optimizer.moments_of(group), state)
            step(optimizer.step_kind(group, p), tensors, row)
            # channels_last, or a transposed view: blocks are row-major
            if weight.data_ptr() != p.data_ptr():
                p.copy_(weight)
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
    gradients: list[tuple[Tensor, Tensor | None]],
    device: torch.device,
) -> Tensor:
    """Return what the gradients are found to be; see `kernels/reference/scalars.py`."""
    scale = getattr(optimizer, "grad_scale", None)  # set by GradScaler around the call
    found_inf = getattr(optimizer, "found_inf", None)
    clip = optimizer.max_grad_norm
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)
    total, largest = zero, zero
    if clip is not None:
        squares = [norm.sum_of_squares(*parts).to(device) for parts in gradients]
        total = largest = torch.stack(squares).sum().sqrt().float()
    elif gradients:
        largest = torch.stack([norm.largest(*parts).to(device) for parts in gradients]).amax()
    return torch.stack(
        [
            one if scale is None else 1 / scale.to(device, torch.float32).reshape(()),
            one * (math.inf if clip is None else clip),
            total,
            largest,
            zero if found_inf is None else found_inf.to(device, torch.float32).reshape(()),
        ]
    )
