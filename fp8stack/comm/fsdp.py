"""FP8 on the wire of FSDP2: its reduce-scatter of gradients, its all-gather of weights, and HSDP's mean over replicas.

Gradients are quantized once and added up in float32. Each rank's part of the sum is rounded to the reduce dtype of the
mixed-precision policy, not to FP8: 1.03 bytes an element where float32 takes 4, for one rounding. Weights are gathered
by FSDP2's own all-gather, or those of FP8 layers as E4M3 blocks (`fp8_all_gather.py`).

HSDP: on a 2-D mesh, FSDP2 averages over replicas by a plain all-reduce that cannot be replaced; it calls the hook that
it has for this only afterwards. So the model is sharded over the 1-D mesh of its shards instead. FSDP2 then has no
all-reduce of its own, and the hook averages over the replicas in FP8, which quantizes twice more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8stack.errors import ConfigError, warn
from fp8stack.tensor_kinds import is_sharded

from .collectives import all_reduce, reduce_scatter_tensor
from .fp8_all_gather import Allocates, Fp8AllGather

_FP8_LAYERS = {"Fp8Layer", "TeLayer"}  # by name: `nn` and `comm` do not import each other


class Fp8ReduceScatter(Allocates):
    """FSDP2's interface of a reduce-scatter (`torch.distributed.fsdp`'s ReduceScatter)."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce and scatter; see `fp8stack.comm.reduce_scatter_tensor`."""
        return reduce_scatter_tensor(
            output_tensor, input_tensor, op, group, async_op, background=True
        )


# --- registration


def register_fp8_reduce_scatter(model: nn.Module, replicate_group: Any = None) -> list[str]:
    """Make the FSDP2 modules of a model reduce their gradients with E4M3 blocks on the wire; return their names.

    Args:
        model: after `fully_shard`, before its first backward. If it is on a 2-D mesh (HSDP), the all-reduce over
            replicas stays FSDP2's own, in full precision, and a warning says so.
        replicate_group: for FP8 over replicas too, shard the model with `fully_shard(..., mesh=mesh["shard"])` and pass
            `mesh.get_group("replicate")`, the ranks that hold the same shard as this one. Gradients are then averaged
            over it at each backward that reduces them, whatever `set_requires_all_reduce` says. Replicas have to begin
            with the same weights; `set_gradient_divide_factor` is for the shards alone.

    Raises:
        ConfigError: if nothing in the model is sharded by FSDP2, this torch's FSDP2 has no such hook, or
            `replicate_group` does not have this rank, or has another that the model is sharded over.
    """
    needs = ["set_custom_reduce_scatter"] + ["set_all_reduce_hook"] * (replicate_group is not None)
    other = " For DistributedDataParallel there is register_fp8_hook."
    units = units_of(model, "register_fp8_reduce_scatter", needs, other)
    if replicate_group is not None:
        check_replicas(model, replicate_group)
    elif is_hybrid(model):
        warn(
            f"{type(model).__name__} is sharded over a 2-D mesh: its gradients are reduced over shards in FP8, and "
            "over replicas in full precision, by an all-reduce of FSDP2's that cannot be replaced. For FP8 there too, "
            'shard it over mesh["shard"] and pass replicate_group=mesh.get_group("replicate").'
        )
    for module in units.values():
        module.set_custom_reduce_scatter(Fp8ReduceScatter())
        # Otherwise FSDP2 asks for a reduction that multiplies first, which only NCCL has.
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
        if replicate_group is not None:
            module.set_all_reduce_hook(partial(_average, group=replicate_group))
    return list(units)


def register_fp8_all_gather(model: nn.Module) -> list[str]:
    """Make the FSDP2 modules of a model gather the weights of FP8 layers as E4M3 blocks; return their names.

    All other parameters are sent as they are, and so are weights that an FP8 layer shares with another layer (tied
    embeddings).

    Args:
        model: after `fully_shard`.

    Raises:
        ConfigError: if nothing in the model is sharded by FSDP2, this torch's FSDP2 has no such hook, or no weight is
            left to send in FP8.
    """
    units = units_of(model, "register_fp8_all_gather", ["set_custom_all_gather"])
    weights = _weights(model)
    names = []
    for name, module in units.items():
        parameters = [(size, p in weights) for p, size in _parameters_of(module)]
        if any(in_fp8 for _, in_fp8 in parameters):
            module.set_custom_all_gather(Fp8AllGather(parameters))
            names.append(name)
    if not names:
        raise ConfigError(
            f"register_fp8_all_gather found no weight of an FP8 layer in {type(model).__name__} to send in FP8; "
            "convert it by fp8stack.initialize before fully_shard."
        )
    return names


def stop_fp8_all_gather(model: nn.Module) -> None:
    """Let FSDP2 gather all weights as they are from now on; all ranks call it between two steps."""
    for module in model.modules():
        for group in _groups_of(module) if hasattr(module, "_get_fsdp_state") else ():
            if isinstance(gather := getattr(group, "_all_gather_comm", None), Fp8AllGather):
                module.reshard()  # type: ignore[operator]
                gather.stop()


def units_of(
    model: nn.Module, caller: str, needs: Sequence[str] = (), other: str = ""
) -> dict[str, Any]:
    """Return the FSDP2 modules of a model by name, each of which has the methods `needs`.

    They are resharded, so that the model's parameters are the sharded ones.
    """
    from torch.distributed.fsdp import FSDPModule

    units = {name: m for name, m in model.named_modules() if isinstance(m, FSDPModule)}
    if not units:
        raise ConfigError(
            f"{caller} found no module sharded by fully_shard in {type(model).__name__}; shard it first.{other}"
        )
    for method in needs:
        if not hasattr(FSDPModule, method):
            raise ConfigError(
                f"FSDP2 of torch {torch.__version__} has no {method}, which {caller} needs; update torch."
            )
    for module in units.values():
        module.reshard()
    return units


def _parameters_of(module: Any) -> list[tuple[nn.Parameter, int]]:
    """Return the parameters that a module gathers, in its order, with the elements of a rank's padded shard."""
    with _inside("its parameters"):
        groups = _groups_of(module)
        parameters = [p for group in groups for p in group.fsdp_params]
        known = [(p.sharded_param, p.padded_sharded_param_size.numel()) for p in parameters]
    if len(groups) > 1:
        raise ConfigError(
            f"a {type(module).__name__} shards its parameters over several meshes, where FSDP2 takes no all-gather of "
            "others. Shard its parts on their own."
        )
    return known


def compute_dtype_of(module: Any) -> tuple[torch.dtype | None, bool]:
    """Return the param_dtype of a module's policy, and whether its parameters' dtypes can still change.

    FSDP2 notes the dtypes of its parameters in the first forward.
    """
    with _inside("its policy"):
        state = module._get_fsdp_state()
        return state._mp_policy.param_dtype, state._is_root is None


def reduces_in_fp8(module: Any) -> bool:
    """Return whether a module reduces its gradients as `register_fp8_reduce_scatter` has it."""
    with _inside("its reduce-scatter"):
        return all(isinstance(g._reduce_scatter_comm, Fp8ReduceScatter) for g in _groups_of(module))


def _groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # older torch
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


@contextmanager
def _inside(what: str) -> Iterator[None]:
    """Raise ConfigError if private parts of FSDP2 are not where this file reads them."""
    try:
        yield
    except AttributeError as error:
        raise ConfigError(
            f"fp8stack does not know where FSDP2 of torch {torch.__version__} keeps {what} ({error}); use "
            "another version of torch."
        ) from error


def _weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters to send in FP8: the weights of FP8 layers that no other layer shares or reads."""
    weights, others = set[nn.Parameter](), set[nn.Parameter]()
    for module in model.modules():
        # FSDP2 gives a module a subclass of its class
        in_fp8 = any(c.__name__ in _FP8_LAYERS for c in type(module).__mro__)
        in_fp8 = in_fp8 and getattr(vars(module).get("products"), "reads_codes_only", True)
        for name, p in module.named_parameters(recurse=False):
            (weights if in_fp8 and name == "weight" else others).add(p)
        if isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention)):
            others.update(module.parameters())  # in evaluation their fast paths do
    return weights - others


# --- replicas


def _average(shard: Tensor, group: Any) -> None:
    """Average the result of a reduce-scatter over replicas; FSDP2 calls it on its stream for all-reduces."""
    all_reduce(shard, dist.ReduceOp.AVG, group)
    if shard.is_cuda:
        # Its memory belongs to the stream of reduce-scatters, and must not be reused there before this is done.
        shard.record_stream(torch.cuda.current_stream(shard.device))


def is_hybrid(model: nn.Module) -> bool:
    """Return whether shards have replicas. Of a mesh, FSDP2's dimensions come first, then tensor parallelism's."""
    sharded: Iterator[Any] = filter(is_sharded, model.parameters())
    kinds = ([each.is_replicate() for each in p.placements] for p in sharded)
    return any(first and not all(others) for first, *others in kinds)


def check_replicas(model: nn.Module, group: Any) -> None:
    """Raise ConfigError unless gradients of the sharded model can be averaged over `group`."""
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"replicate_group must be a process group that rank {dist.get_rank()} is in, got {type(group).__name__}. "
            'Of a DeviceMesh it is mesh.get_group("replicate").'
        )
    replicas = set(dist.get_process_group_ranks(group))
    for p in filter(is_sharded, model.parameters()):
        shards = p.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
        if len(both := sorted(replicas.intersection(shards))) > 1:
            raise ConfigError(
                f"replicate_group has the ranks {sorted(replicas)}, and {both} of them share the model's mesh of "
                f'{shards}. Shard the model over one row of shards (mesh["shard"] of a 2-D mesh) and pass the ranks '
                'that hold the same shard as this one: mesh.get_group("replicate").'
            )
