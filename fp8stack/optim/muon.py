"""Muon for matrices with 8-bit momentum, AdamW for the rest, with 24-bit masters and FP8 gradients.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; learning rates as in Liu et al., "Muon
is Scalable for LLM Training", 2025, equation 4. A step on a matrix is three:

    momentum   m = μ m + (1 - μ) g;  u = μ m + (1 - μ) g (Nesterov) or m       one pass over all matrices of a shape
    direction  o = u orthogonalized: five Newton-Schulz iterations in bf16     batched matrix products
    apply      w = w (1 - lr × decay) - lr × ratio(shape) × o                  one pass, into the 24-bit master

Only the direction of u counts, so 8 bits of momentum are ample ("Effective Quantization of Muon Optimizer States",
2025). Bytes per parameter of a matrix: 2 weight, 1 master, 1.03 gradient, 1.03 momentum; and, while a shape is being
stepped, about 8 for each element of a batch of at most 2^26 elements (or of one matrix, if that is larger).

Embeddings and output heads are matrices too, but want AdamW: put them in a group with algorithm="adamw". Vectors and
tensors of other dimensions move to such a group by themselves. Sharded matrices are refused: their direction depends
on all ranks' parts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from fp8stack.errors import ConfigError, ModelError
from fp8stack.levels import FINITE, check_choice, check_number
from fp8stack.tensor_kinds import is_sharded

from .optimizer import BELOW_1, Batch, BlockwiseOptimizer, Options, ParamsT, check_range

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(BlockwiseOptimizer):
    """Muon, as `torch.optim.Muon`, for matrices, and AdamW for all else.

    Args:
        params: parameters or groups of them. A group may say algorithm="muon" (default) or "adamw". A 3-d parameter in
            a group that says "muon" is a stack of matrices, one for each expert; otherwise it goes to AdamW.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as in torch; `lr` may be a tensor.
        adjust_lr_fn: what lr is multiplied by for a matrix of A rows and B columns: "original" (or None)
            sqrt(max(1, A / B)); "match_rms_adamw" 0.2 sqrt(max(A, B)), which lets both algorithms share one.
        betas, adamw_eps: of AdamW. Schedulers that cycle momentum (OneCycleLR) cycle `momentum`, as torch's Muon's.
        states, master, min_numel, max_grad_norm, offload: as in `fp8stack.optim.Adam`.

    Raises:
        ConfigError: for a hyper-parameter out of range, an unknown format, algorithm or adjustment.
    """

    moments = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    algorithm = "muon"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        **options: Unpack[Options],
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "adamw_eps": adamw_eps,
        }  # fmt: skip
        # Of groups that are added without their own.
        # Not among the defaults: by these schedulers decide whether they cycle beta1, or `momentum` as of torch's Muon.
        self.betas = betas
        super().__init__(params, defaults, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch. Parameters in it that Muon does not step become a group of their own, for AdamW."""
        given: Any = param_group.get("params") if isinstance(param_group, dict) else None
        if given is None or isinstance(given, set):
            super().add_param_group(param_group)  # for torch to refuse
        algorithm, before = param_group.get("algorithm"), len(self.param_groups)
        if algorithm is not None:
            check_choice("algorithm", algorithm, ("muon", "adamw"))
        named = [given] if isinstance(given, Tensor) else list(given)
        dims = {"adamw": (), "muon": (2, 3)}.get(str(algorithm), (2,))
        parts: dict[str, list[Any]] = {"muon": [], "adamw": []}
        for x in named:  # (name, parameter), where parameters are named
            parameter = x[1] if isinstance(x, tuple) else x
            parts["muon" if getattr(parameter, "ndim", 0) in dims else "adamw"].append(x)
        try:
            for name, part in parts.items():
                if part or not named:  # an empty group is torch's to refuse
                    group = {"betas": self.betas, **param_group, "params": part, "algorithm": name}
                    super().add_param_group(group)
        except ConfigError:
            del self.param_groups[before:]
            raise

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"betas": self.betas}

    def family_of(self, group: dict[str, Any]) -> str:
        # A group of torch's Muon, which `initialize` shares, does not say.
        return "adam" if group.get("algorithm") == "adamw" else "muon"

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self.moments[:1] if self.family_of(group) == "muon" else self.moments[1:]

    def numbers_of(self, group: dict[str, Any]) -> tuple[float, ...]:
        lr, betas, _, decay = check_range(group)
        eps = check_number("adamw_eps", group.get("adamw_eps", 0.0))  # torch's Muon has none
        momentum = check_number("momentum", group["momentum"], 0, BELOW_1, "in [0, 1)")
        check_choice("adjust_lr_fn", group["adjust_lr_fn"], (None, "original", "match_rms_adamw"))
        check_number("ns_steps", group["ns_steps"], 1, 99, whole=True)
        numbers = group["ns_coefficients"]
        if not isinstance(numbers, (tuple, list)) or len(numbers) != 3:
            raise ConfigError(f"ns_coefficients={numbers!r} must be three finite numbers.")
        for number in numbers:
            check_number("ns_coefficients", number, -FINITE)
        nesterov = check_choice("nesterov", group["nesterov"], (False, True, None))
        if self.family_of(group) == "adam":
            return (lr, *betas, eps, decay, 0.0, 1.0, 0.0)
        weight = momentum if nesterov else 1.0  # of the momentum in the direction
        return lr, momentum, weight, 0.0, decay, 0.0, 1.0, 0.0

    def ensure_state(self, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        if self.family_of(group) == "muon" and is_sharded(parameter):
            raise ModelError(
                f"a matrix of shape {tuple(parameter.shape)} is sharded (DTensor), and Muon's direction depends on all "
                'of it. Step it with AdamW: put it in a group with algorithm="adamw", or use fp8stack.optim.AdamW.'
            )
        return super().ensure_state(group, parameter)

    def step_batch(self, batch: Batch) -> None:
        if batch.kind.algorithm != "muon":
            super().step_batch(batch)
            return
        group = self.param_groups[batch.entries[0].group]
        u = batch.directions()
        shape = u.shape
        if not shape.numel():
            return
        o = orthogonalize(u.flatten(0, -3), group)
        del u
        batch.apply(o.view(shape), batch.hyper[:, 2] * learning_rate_ratio(shape, group))


def learning_rate_ratio(shape: torch.Size, group: dict[str, Any]) -> float:
    """Return what lr is multiplied by for matrices of `shape`."""
    rows, cols = shape[-2:]
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols))


def orthogonalize(u: Tensor, group: dict[str, Any]) -> Tensor:
    """Return, for each matrix U S V' of `u`, about U V': Newton-Schulz iterations of degree five (Jordan et al.).

    `u` and the result are bfloat16 [matrices, rows, cols]; the result is contiguous.

    The singular values end between about 0.7 and 1.2, and not at 1, which does not matter.
    """
    a, b, c = map(float, group["ns_coefficients"])
    tall = u.shape[-2] > u.shape[-1]
    x = u.mT if tall else u
    with torch.autocast(u.device.type, enabled=False):
        norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        x = x / norms.clamp(min=float(group["eps"]))
        for _ in range(group["ns_steps"]):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).contiguous()
