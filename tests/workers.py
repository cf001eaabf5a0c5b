"""What tests run in processes of their own: importable by name there, as test modules are not."""

import torch
from helpers import TinyLM, bits

import fp8stack
from fp8stack.errors import ConfigError


def try_to_release(rank, store, messages):
    """Ask for gradient release in a process group of two; note the message of the refusal."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        fp8stack.initialize(model, optimizer, "O2", step_in_backward=True)
    except ConfigError as error:
        messages[rank] = str(error)
    torch.distributed.destroy_process_group()


# --- sharded parameters


def join_ranks(rank, world, store, device):
    """Join a process group of `world` ranks on CPUs or GPUs, which meet at a file that is theirs; return its mesh."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
    )
    return torch.distributed.device_mesh.init_device_mesh(device, (world,))


def leave_ranks():
    """Leave the group when all are done: a rank that is gone before may take the connections of another with it."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class Odd(torch.nn.Module):
    """Matrices that two or three ranks share unevenly, one with rows for two ranks only, and vectors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(200, 99)
        self.b = torch.nn.Linear(99, 256)
        self.few = torch.nn.Parameter(torch.randn(2, 4096) * 0.02)

    def forward(self, x):
        return self.b(self.a(x).relu()) + self.few[:, :256].sum(0)


def make_odd(device, mesh=None, **options):
    """Return (model, optimizer): bfloat16, sharded over `mesh` by FSDP2 if there is one."""
    model = Odd().bfloat16().to(device)
    if mesh is not None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh)
    return model, fp8stack.optim.AdamW(model.parameters(), lr=1e-2, **options)


def take_step(model, optimizer, step, scale=1.0, spoil=None):
    """Step on the gradients of a number: the same whole tensors however the model is sharded."""
    from torch.distributed.tensor import distribute_tensor

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


def gather(x):
    """Return all of a tensor that may be sharded, as bytes where it is float8: gloo moves no others."""
    if not hasattr(x, "device_mesh"):
        return x
    if x.dtype is not torch.float8_e4m3fn:
        return x.full_tensor()
    part, size = x.to_local().view(torch.uint8), {"shape": x.shape, "stride": x.stride()}
    whole = torch.distributed.tensor.DTensor.from_local(part, x.device_mesh, x.placements, **size)
    return whole.full_tensor().view(x.dtype)


def whole(model, optimizer):
    """Return every weight and state as whole tensors on the CPU, by name."""
    found = {}
    for name, p in model.named_parameters():
        for key, value in {"weight": p.data, **optimizer.state[p]}.items():
            found[f"{name}.{key}"] = gather(value).cpu().clone()
    return found


def expect_same(sharded, plain, what):
    """Fail unless both hold the same bits."""
    assert sharded.keys() == plain.keys(), what
    for key, value in plain.items():
        assert torch.equal(bits(sharded[key]), bits(value)), (what, key)


def shard_and_save(rank, world, folder, states, device):
    """Step sharded and whole models alike, then save the sharded one by DCP."""
    mesh = join_ranks(rank, world, f"{folder}/save", device)
    model, optimizer = make_odd(device, mesh, states=states)
    plain_model, plain = make_odd(device, states=states)
    for step in range(3):
        take_step(model, optimizer, step)
        take_step(plain_model, plain, step)
    expect_same(whole(model, optimizer), whole(plain_model, plain), "after three steps")
    state = optimizer.state[model.a.weight]
    assert all(hasattr(v, "device_mesh") for v in state.values() if v.ndim), state.keys()

    before = whole(model, optimizer)
    take_step(model, optimizer, 3, spoil="b.weight")  # NaN in the last row: one rank's
    expect_same(whole(model, optimizer), before, "a step that one rank must not take")
    assert float(optimizer.skipped_steps) == 1

    optimizer.max_grad_norm = plain.max_grad_norm = 1.0
    take_step(model, optimizer, 4, scale=3.0)
    take_step(plain_model, plain, 4, scale=3.0)
    assert torch.allclose(optimizer.grad_norm, plain.grad_norm, rtol=1e-6)
    optimizer.max_grad_norm = None

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/dcp")
    expected = whole(model, optimizer)
    take_step(model, optimizer, 5)
    expected_next = whole(model, optimizer)
    if rank == 0:
        torch.save((expected, expected_next), f"{folder}/expected.pt")
    leave_ranks()


def load_resharded(rank, world, folder, states, device):
    """Load what another number of ranks saved: the same bits, which go on alike."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    mesh = join_ranks(rank, world, f"{folder}/load", device)
    model, optimizer = make_odd(device, mesh, states=states)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=f"{folder}/dcp")
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    expected, expected_next = torch.load(f"{folder}/expected.pt", weights_only=True)
    found = whole(model, optimizer)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(bits(found[key]), bits(value)), key
    take_step(model, optimizer, 5)
    if states != "4bit":  # whose noise depends on the place in the rank's part
        expect_same(whole(model, optimizer), expected_next, f"a step on {world} ranks")
    leave_ranks()
