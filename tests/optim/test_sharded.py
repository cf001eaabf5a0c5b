"""Sharded parameters (FSDP2, DTensor): ranks in processes of their own step like one, and checkpoints change ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import assert_same_bits, need_gpus
from ranks import gather, load_states, own_device, run_ranks, states_of, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fp8stack
from fp8stack.errors import CheckpointError, GradientError, ModelError
from fp8stack.optim.step import check_gradient


class Odd(nn.Module):
    """Matrices that two or three ranks share unevenly, one with rows for two ranks only, and vectors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(200, 99)
        self.b = nn.Linear(99, 256)
        self.few = nn.Parameter(torch.randn(2, 4096) * 0.02)

    def forward(self, x):
        return self.b(self.a(x).relu()) + self.few[:, :256].sum(0)


def make_odd(device, mesh=None, **options):
    """Return (model, optimizer): bfloat16, sharded over `mesh` by FSDP2 if there is one."""
    model = Odd().bfloat16().to(device)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, fp8stack.optim.AdamW(model.parameters(), lr=1e-2, **options)


def take_step(model, optimizer, step, scale=1.0, spoil=None):
    """Step on the gradients of a number: the same whole tensors however the model is sharded."""
    generator = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        gradient = (torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype)
        if name == spoil:
            gradient[-1] = torch.nan
        if hasattr(p, "device_mesh"):
            p.grad = distribute_tensor(gradient, p.device_mesh, p.placements)
        else:
            p.grad = gradient
    optimizer.step()


def shard_and_save(rank, folder, states):
    """Step sharded and whole models alike, then save the sharded one by DCP."""
    device = own_device()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, optimizer = make_odd(device, mesh, states=states)
    plain_model, plain = make_odd(device, states=states)
    for step in range(3):
        take_step(model, optimizer, step)
        take_step(plain_model, plain, step)
    assert_same_bits(whole(model, optimizer), whole(plain_model, plain), "after three steps")
    state = optimizer.state[model.a.weight]
    assert all(hasattr(v, "device_mesh") for v in state.values() if v.ndim), state.keys()

    before = whole(model, optimizer)
    take_step(model, optimizer, 3, spoil="b.weight")  # NaN in the last row: one rank's
    assert_same_bits(whole(model, optimizer), before, "a step that one rank must not take")
    assert float(optimizer.skipped_steps) == 1

    optimizer.max_grad_norm = plain.max_grad_norm = 1.0
    take_step(model, optimizer, 4, scale=3.0)
    take_step(plain_model, plain, 4, scale=3.0)
    assert torch.allclose(optimizer.grad_norm, plain.grad_norm, rtol=1e-6)
    optimizer.max_grad_norm = None

    dcp.save(states_of(model, optimizer), checkpoint_id=f"{folder}/dcp")
    expected = whole(model, optimizer)
    take_step(model, optimizer, 5)
    expected_next = whole(model, optimizer)
    if rank == 0:
        torch.save((expected, expected_next), f"{folder}/expected.pt")


def load_resharded(rank, folder, states):
    """Load what another number of ranks saved: the same bits, which go on alike."""
    device = own_device()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, optimizer = make_odd(device, mesh, states=states)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load_states(f"{folder}/dcp", model, optimizer)
    expected, expected_next = torch.load(f"{folder}/expected.pt", weights_only=True)
    assert_same_bits(whole(model, optimizer), expected)
    take_step(model, optimizer, 5)
    if states != "4bit":  # whose noise depends on the place in the rank's part
        assert_same_bits(whole(model, optimizer), expected_next, "a step on other ranks")


@pytest.mark.gpus
@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "before", "after"),
    [("8bit", 2, 3), ("fp8", 2, 1), ("4bit", 1, 2)],  # 4bit: noise depends on the place in the part
)
def test_shards_step_as_the_whole_and_reshard_bit_for_bit(states, before, after, device, tmp_path):
    if device == "cuda":
        need_gpus(2)
    after = min(after, 2) if device == "cuda" else after
    run_ranks(shard_and_save, before, str(tmp_path), states, device=device)
    run_ranks(load_resharded, after, str(tmp_path), states, device=device)


# --- in a process group of one rank


def shard(mesh, shape, dim=0, dtype=torch.bfloat16):
    p = nn.Parameter(distribute_tensor(torch.randn(shape).to(dtype), mesh, [Shard(dim)]))
    p.grad = torch.randn_like(p)
    return p


@pytest.fixture(params=[True, False], ids=["kernels", "reference"])
def backend(request, monkeypatch):
    """Step the CPU's parameters through the kernels in Triton's interpreter, and in plain torch."""
    if request.param and torch.cuda.is_available():
        pytest.skip("the mesh is of CPUs, where Triton's interpreter is not running now")
    monkeypatch.setattr("fp8stack.optim.optimizer.triton_runs_on", lambda device: request.param)
    monkeypatch.setattr("fp8stack.optim.triton_step.FAST", False)


def test_formats_with_one_scale_a_tensor_are_refused_before_anything_changes(mesh):
    for formats in ({"states": "fp8-lm"}, {"master": "fp16"}):
        p = shard(mesh, (64, 128))
        before = p.full_tensor().clone()
        with pytest.raises(ModelError, match=r"sharded, and states=.*one scale.*Use states="):
            fp8stack.optim.AdamW([p], **formats).step()
        assert torch.equal(p.full_tensor(), before)


def test_sums_that_are_still_to_be_made_are_refused(mesh):
    p = nn.Parameter(DTensor.from_local(torch.randn(64, 128), mesh, [Partial()], run_check=False))
    p.grad = torch.zeros_like(p)
    with pytest.raises(ModelError, match=r"shape \(64, 128\) is P.*reduce it first"):
        fp8stack.optim.AdamW([p]).step()


def test_blocks_that_parts_would_cut_are_refused_with_the_remedy(mesh):
    for dim in (1, 2):
        p = shard(mesh, (4, 64, 128), dim=dim)
        optimizer = fp8stack.optim.AdamW([p])
        with pytest.raises(ModelError, match=rf"dim {dim} over 1 ranks.*override\(parameter, st"):
            optimizer.step()
        optimizer.state.clear()
        optimizer.override(p, states="fp32")
        optimizer.step()
        for key, value in optimizer.state[p].items():
            assert value.ndim == 0 or value.shape == p.shape, key
        assert optimizer.state[p]["exp_avg"].placements == p.placements


def test_matrices_may_be_sharded_along_columns(mesh):
    p, plain = shard(mesh, (64, 256), dim=1), nn.Parameter(torch.empty(64, 256).bfloat16())
    plain.data.copy_(p.full_tensor())
    plain.grad = p.grad.full_tensor()
    optimizers = [fp8stack.optim.AdamW([x]) for x in (p, plain)]
    for optimizer in optimizers:
        optimizer.step()
    scale = optimizers[0].state[p]["exp_avg_scale"]
    assert scale.shape == (64, 2)
    assert torch.equal(scale.full_tensor(), optimizers[1].state[plain]["exp_avg_scale"])
    assert torch.equal(p.full_tensor(), plain)


def test_a_gradient_placed_otherwise_is_stepped_as_the_parameter_is_placed(mesh):
    """As tensor parallelism leaves them; one that is no DTensor is refused."""
    p = shard(mesh, (64, 128))
    q = nn.Parameter(p.detach().clone())
    p.grad, q.grad = p.grad.redistribute(mesh, [Replicate()]), p.grad
    for one in (p, q):
        fp8stack.optim.AdamW([one]).step()
    assert p.grad.placements == p.placements
    assert torch.equal(p.full_tensor(), q.full_tensor())
    with pytest.raises(
        GradientError, match=r"placed .*Shard.*its gradient None.*DTensor.from_local"
    ):
        check_gradient(q, torch.ones(64, 128))


@pytest.mark.parametrize("library", ["fp8stack", "bitsandbytes"])
def test_whole_tensors_load_into_a_sharded_optimizer_and_back(library, mesh):
    p = shard(mesh, (64, 128), dtype=torch.bfloat16 if library == "fp8stack" else torch.float32)
    plain = nn.Parameter(p.full_tensor().detach().clone())
    plain.grad = p.grad.full_tensor()
    sharded, whole = fp8stack.optim.AdamW([p]), fp8stack.optim.AdamW([plain])
    saved = whole
    if library == "bitsandbytes":
        saved = pytest.importorskip(library).optim.AdamW8bit([plain])
    saved.step()
    for optimizer in (sharded, whole):
        optimizer.load_state_dict(saved.state_dict())
    for key, value in whole.state[plain].items():
        found = sharded.state[p][key]
        assert value.ndim == 0 or found.placements == p.placements
        assert torch.equal(found.full_tensor() if value.ndim else found, value), key
    again = fp8stack.optim.AdamW([nn.Parameter(plain.detach().clone())])
    again.load_state_dict(sharded.state_dict())
    (state,) = again.state.values()
    assert torch.equal(state["exp_avg_code"], whole.state[plain]["exp_avg_code"])


def test_a_part_saved_as_a_plain_tensor_is_refused(mesh):
    p, plain = shard(mesh, (64, 128)), nn.Parameter(torch.randn(32, 128).bfloat16())
    plain.grad = torch.randn_like(plain)
    half = fp8stack.optim.AdamW([plain])
    half.step()
    with pytest.raises(CheckpointError, match=r"exp_avg is of shape \(32, 128\)"):
        fp8stack.optim.AdamW([p]).load_state_dict(half.state_dict())


def test_master_weights_of_a_sharded_parameter(mesh):
    p = shard(mesh, (64, 128))
    optimizer = fp8stack.optim.AdamW([p], lr=1e-4)
    value = torch.randn(64, 128)
    optimizer.set_master(p, value)
    master = optimizer.master_weight(p)
    assert master.placements == p.placements
    assert ((master.full_tensor() - value).abs() <= value.abs() * 2**-16).all()


def test_torchao_s_sharded_states_are_taken_over(mesh):
    states = pytest.importorskip("torchao.optim.subclass_8bit")
    p = shard(mesh, (64, 128), dtype=torch.float32)
    entry, expected = {"step": torch.tensor(3.0)}, {}
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        quantized = states.OptimState8bit.zeros((64, 128), signed)
        quantized.copy_(torch.rand(64, 128))
        entry[name] = DTensor.from_local(quantized, mesh, p.placements, run_check=False)
        expected[name] = quantized.dequantize()
    optimizer = fp8stack.optim.AdamW([p], states="fp32")
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: entry}, "param_groups": groups})
    for name, value in expected.items():
        assert torch.equal(optimizer.state[p][name].full_tensor(), value)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from the interpreter
def test_parts_are_stepped_as_whole_tensors(mesh, backend):
    """Clipping included; with a local parameter, and others that get their first gradients later."""
    local = nn.Parameter(torch.randn(8, 200).bfloat16())
    sharded = [shard(mesh, (16, 256)), shard(mesh, (130,)), local]
    plain = [nn.Parameter(gather(p).detach().clone()) for p in sharded]
    options = {"min_numel": 256, "max_grad_norm": 1.0}
    optimizers = [fp8stack.optim.AdamW(ps, **options) for ps in (sharded, plain)]
    for step in range(3):
        for i, (p, q) in enumerate(zip(sharded, plain, strict=True)):
            q.grad = torch.randn_like(q) if step or i == 0 else None
            p.grad = q.grad
            if q.grad is not None and hasattr(p, "device_mesh"):
                p.grad = distribute_tensor(q.grad, mesh, p.placements)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(optimizers[0].grad_norm, optimizers[1].grad_norm)
    for p, q in zip(sharded, plain, strict=True):
        assert optimizers[0].state[p]["step"] == optimizers[1].state[q]["step"]
        assert torch.allclose(gather(p).float(), q.float(), rtol=1e-2, atol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from the interpreter
def test_parts_that_do_not_lie_in_rows_are_stepped(mesh, backend):
    part = torch.randn(256, 16).bfloat16().t()
    turned = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
    p, plain = nn.Parameter(turned), nn.Parameter(part.contiguous())
    plain.grad = torch.randn_like(plain)
    p.grad = distribute_tensor(plain.grad, mesh, p.placements)
    for parameter in (p, plain):
        fp8stack.optim.AdamW([parameter], lr=0.1, min_numel=256).step()
    assert not p.to_local().is_contiguous()
    assert torch.equal(p.to_local(), plain)


@pytest.mark.parametrize("norm", [None, 1.0])
def test_every_rank_takes_part_in_one_reduction_whatever_its_gradients(
    norm, mesh, backend, monkeypatch
):
    """Ranks whose experts got no tokens must not leave the others waiting."""
    calls, reduce = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda *a, **k: calls.append(reduce(*a, **k)))
    p, local = shard(mesh, (16, 256)), nn.Parameter(torch.randn(16, 256).bfloat16())
    groups = [{"params": [p], "algorithm": "adamw"}, {"params": [local]}]
    optimizer = fp8stack.optim.Muon(groups, min_numel=256, max_grad_norm=norm)
    for with_p, with_local in ((True, True), (True, False), (False, True), (False, False)):
        p.grad = torch.ones_like(p) if with_p else None
        local.grad = torch.ones_like(local) if with_local else None
        calls.clear()
        optimizer.step()
        assert len(calls) == 1, (with_p, with_local)
