"""FSDP2's weights and replicas in FP8, between real processes."""

import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import TinyLM, assert_same_bits, batch, need_gpus
from ranks import assert_equal_everywhere, own_device, run_ranks, train_part
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fp8stack
from fp8stack import comm
from fp8stack.comm import fsdp
from fp8stack.errors import ConfigError, Fp8StackWarning
from fp8stack.kernels.reference.wire import Layout, pack, unpack

MATRICES = ["up.weight", "down.weight", "head.weight"]


class Shared(TinyLM):
    """Its head is its embedding's, and a layer has rows for one rank only."""

    def __init__(self):
        super().__init__(tied=True)
        self.one = nn.Linear(200, 1)


def shard(model, mesh, dtype=None, reshard=True):
    """Shard a layer that is nothing but a matrix, one with a bias, and the rest together."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (model.up, model.head) if "head.weight" in dict(model.named_parameters()) else ():
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model


def make(device, mesh, dtype=None, kind=TinyLM, reshard=True, skip=()):
    """Return a sharded model whose Linear layers are FP8 layers."""
    torch.manual_seed(0)
    options = {"compute": "native", "select": "all", "head": "fp8", "skip": list(skip)}
    model, _ = fp8stack.initialize(kind().to(device), None, "O0", **options)
    return shard(model, mesh, dtype, reshard)


def shards_of(p, world, dtype):
    """Return the padded shards of all ranks: flat, in their order."""
    parts = torch.chunk(p.full_tensor().to(dtype), world)
    rows = parts[0].shape[0]
    padded = [torch.zeros(rows, *p.shape[1:], dtype=dtype, device=p.device) for _ in range(world)]
    for part, place in zip(parts, padded, strict=False):
        place[: len(part)] = part
    return [each.reshape(-1) for each in padded]


def as_sent(p, world, dtype):
    """Return a weight as every rank decodes it."""
    result = []
    for part in shards_of(p, world, dtype):
        layout, out = Layout(1, part.numel(), 1), torch.empty_like(part)
        unpack(pack(part, layout), out, layout)
        result.append(out.view(-1, *p.shape[1:]))
    return torch.cat(result)[: p.shape[0]]


def check_weights(rank):
    """Every rank computes with matrices rounded to E4M3 blocks and with everything else as it is, and so it trains."""
    world, device = dist.get_world_size(), own_device()
    mesh = init_device_mesh(device.type, (world,))
    for dtype in (None, torch.bfloat16, torch.float16):
        for async_op in (False, True):
            model = make(device, mesh, dtype)
            assert comm.register_fp8_all_gather(model) == ["", "up", "head"]
            check_gathered(model, world, dtype or torch.float32, MATRICES, async_op)
    model = make(device, mesh, kind=Shared)
    assert comm.register_fp8_all_gather(model) == [""]
    check_gathered(model, world, torch.float32, ["up.weight", "down.weight", "one.weight"], True)
    check_other_layers(device, mesh, world)
    check_finished(device, mesh, world)
    check_bytes(device, mesh, world)
    check_bad_input(device, mesh)
    if world == 2:
        check_training(rank, device, mesh)


def check_gathered(model, world, dtype, in_fp8, async_op):
    own = dict(model.named_parameters())
    expected = {
        name: as_sent(p, world, dtype) if name in in_fp8 else p.full_tensor().to(dtype)
        for name, p in own.items()
    }
    before = {name: p.to_local().clone() for name, p in own.items()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            handle = module.unshard(async_op=async_op)
            if async_op:
                handle.wait()
                handle.wait()
    given = dict(model.named_parameters())
    for name, weight in expected.items():
        assert_same_bits(given[name].detach(), weight, name)
        assert_equal_everywhere(given[name].detach())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, p in model.named_parameters():
        assert_same_bits(p.to_local(), before[name], name)


def check_other_layers(device, mesh, world):
    """The weights of layers that `initialize` did not convert go as they are."""
    model = make(device, mesh, skip=["head"])
    model(*batch(0, device)).backward()  # its root has whole weights now
    assert comm.register_fp8_all_gather(model) == ["", "up"]
    check_gathered(model, world, torch.float32, ["up.weight", "down.weight"], False)


def check_finished(device, mesh, world):
    """After `finish` all weights go as they are, in a model that has run, too."""
    model = make(device, mesh)
    assert comm.register_fp8_all_gather(model) == ["", "up", "head"]
    model(*batch(0, device)).backward()
    assert fp8stack.finish(model)
    check_gathered(model, world, torch.float32, [], False)


def check_bytes(device, mesh, world):
    model = make(device, mesh, torch.bfloat16)
    comm.register_fp8_all_gather(model)
    for async_op in (False, True):
        with comm.Statistics() as statistics:
            handle = model.head.unshard(async_op=async_op)
            if async_op:
                handle.wait()
        model.head.reshard()
        row = statistics.collect()["all_gather_weights"]
        rows = -(-model.head.weight.shape[0] // world)
        assert row["bytes"] == (world - 1) * -(-rows * 132 // 16) * 16


def check_bad_input(device, mesh):
    with pytest.raises(ConfigError, match=r"no weight of an FP8 layer in FSDPTinyLM.*initialize"):
        comm.register_fp8_all_gather(shard(TinyLM().to(device), mesh))
    with pytest.raises(ConfigError, match="no module sharded by fully_shard in TinyLM"):
        comm.register_fp8_all_gather(TinyLM())


def check_training(rank, device, mesh):
    """FP8 layers cast what they are given once more; it is gathered in the background, too."""
    for in_background in (False, True):
        losses = {}
        for gathers in (False, True):
            model = make(device, mesh, skip=["head"])
            if gathers:
                comm.register_fp8_all_gather(model)
                comm.register_fp8_reduce_scatter(model)
            model._set_unshard_async_op(in_background)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            losses[gathers] = train_part(model, optimizer, rank, 2, device) / 2
        for sums in losses.values():
            dist.all_reduce(sums)
        assert losses[True][-1] < 0.5 * losses[True][0]
        assert torch.allclose(losses[True], losses[False], rtol=0.06, atol=0.01)


# --- replicas


def check_replicas(rank):
    """Two replicas of two shards: FP8 everywhere keeps replicas the same, and trains like FSDP2's own HSDP."""
    world, device = 4, own_device()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    check_replicated_gradients(rank, device, mesh)
    losses = {}
    for fp8 in (False, True):
        model = make(device, mesh["shard"] if fp8 else mesh, skip=["head"])
        comm.register_fp8_all_gather(model)
        if fp8:
            comm.register_fp8_reduce_scatter(model, mesh.get_group("replicate"))
        optimizer = fp8stack.optim.AdamW(model.parameters(), lr=3e-3)
        losses[fp8] = train_part(model, optimizer, rank, world, device)
        dist.all_reduce(losses[fp8])
        for p in model.parameters():
            assert_equal_everywhere(p.to_local(), mesh.get_group("replicate"))
    assert losses[True][-1] < 0.5 * losses[True][0]
    assert torch.allclose(losses[True], losses[False], rtol=0.06)
    check_hybrid_mesh(device, mesh)
    check_smaller_group(rank, device)


def check_replicated_gradients(rank, device, mesh):
    gradients = {}
    for fp8 in (False, True):
        model = make(device, mesh["shard"] if fp8 else mesh)
        if fp8:
            comm.register_fp8_reduce_scatter(model, mesh.get_group("replicate"))
        for step in range(2):  # accumulates
            model(*batch(10 * step + rank, device)).backward()
        gradients[fp8] = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
        assert_equal_everywhere(gradients[fp8])
    noise = (gradients[True] - gradients[False]).double().square().sum()
    assert 0 < noise <= gradients[False].double().square().sum() * 10**-2.7


def check_hybrid_mesh(device, mesh):
    """A 2-D mesh is warned about; a group that holds other shards of the model is refused."""
    model = make(device, mesh)
    with pytest.warns(Fp8StackWarning, match="over replicas in full precision"):
        comm.register_fp8_reduce_scatter(model)
    model(*batch(0, device)).backward()  # it works all the same
    group = mesh.get_group("replicate")
    with pytest.raises(ConfigError, match=r"share the model's mesh of \[0, 1, 2, 3\]"):
        comm.register_fp8_reduce_scatter(model, group)
    model = make(device, mesh["shard"])
    with pytest.raises(ConfigError, match=r"process group that rank \d is in, got DeviceMesh"):
        comm.register_fp8_reduce_scatter(model, mesh["replicate"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fp8StackWarning)
        comm.register_fp8_reduce_scatter(model)


def check_smaller_group(rank, device):
    """What FSDP2 reshards to two of four ranks was decoded before: backward sees the weights of forward."""
    mesh = init_device_mesh(device.type, (4,))
    gradients = {}
    for reshard in (True, 2):
        model = make(device, mesh, reshard=reshard)
        comm.register_fp8_all_gather(model)
        model(*batch(rank, device)).backward()
        gradients[reshard] = [p.grad.to_local() for p in model.parameters()]
    assert_same_bits(gradients[2], gradients[True])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_weights_over_gloo(world):
    run_ranks(check_weights, world)


@pytest.mark.slow
def test_replicas_over_gloo():
    run_ranks(check_replicas, 4)


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize(("check", "world"), [(check_weights, 2), (check_replicas, 4)])
def test_weights_and_replicas_over_nccl(check, world):
    need_gpus(world)
    run_ranks(check, world, device="cuda")


# --- what is read of FSDP2's insides


def unit(**state):
    return SimpleNamespace(_get_fsdp_state=lambda: SimpleNamespace(**state))


def test_parameters_are_found_in_the_fsdp2_of_older_torch_too():
    size = torch.Size((3, 5))
    group = SimpleNamespace(
        fsdp_params=[SimpleNamespace(sharded_param="p", padded_sharded_param_size=size)]
    )
    for state in ({"_fsdp_param_groups": [group]}, {"_fsdp_param_group": group}):
        assert fsdp._parameters_of(unit(**state)) == [("p", 15)]
    for state in ({"_fsdp_param_groups": []}, {"_fsdp_param_group": None}):
        assert fsdp._parameters_of(unit(**state)) == []
    with pytest.raises(ConfigError, match=r"does not know where FSDP2 .* '_fsdp_param_group'"):
        fsdp._parameters_of(unit())
    with pytest.raises(ConfigError, match="over several meshes"):
        fsdp._parameters_of(unit(_fsdp_param_groups=[group, group]))


def test_an_fsdp2_without_the_hooks_is_refused(monkeypatch):
    from torch.distributed.fsdp import FSDPModule

    model = torch.nn.Linear(2, 2)
    model.__class__ = type("Sharded", (FSDPModule, torch.nn.Linear), {"__new__": object.__new__})
    monkeypatch.delattr(FSDPModule, "set_custom_all_gather")
    with pytest.raises(ConfigError, match=r"has no set_custom_all_gather.*update torch"):
        fsdp.register_fp8_all_gather(model)
    monkeypatch.delattr(FSDPModule, "set_all_reduce_hook")
    with pytest.raises(ConfigError, match=r"has no set_all_reduce_hook.*update torch"):
        fsdp.register_fp8_reduce_scatter(model, object())
