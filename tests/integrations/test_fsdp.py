"""fp8stack.integrations.fsdp: levels on models that FSDP2 shards, between real processes."""

import warnings
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import TinyLM, assert_same_bits, batch, need_gpus
from helpers import train as train_alone
from layers import conv1d
from ranks import assert_equal_everywhere, gather, load_states, run_ranks, states_of, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack.conflicts import FSDP2, RULES
from fp8stack.errors import ConfigError, Fp8StackWarning, ModelError, UnsupportedDeviceError
from fp8stack.integrations.fsdp import attach, verify
from fp8stack.levels import OPTIONS
from fp8stack.monitor import Monitor

LR = 1.5e-3
HERE = SimpleNamespace()  # this process's rank, world, device, and the mesh of all ranks
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def block():
    return nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 192), nn.GELU(), conv1d(192, 128))


def encoder():
    return nn.TransformerEncoderLayer(128, 4, 192, 0.0, "gelu", batch_first=True, norm_first=True)


class Blocks(nn.Module):
    """Two blocks whose parts ranks share unevenly, with a head that is sharded on its own, or the embedding's."""

    def __init__(self, tied=False, recomputes=False, block=block):
        super().__init__()
        self.embed = nn.Embedding(321, 128)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(128, 321, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.recomputes = recomputes

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        for part in self.blocks:
            x = x + (checkpoint(part, x, use_reentrant=False) if self.recomputes else part(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def enter(rank, device):
    HERE.rank, HERE.world = rank, dist.get_world_size()
    HERE.device = torch.device(device, rank if device == "cuda" else None)
    HERE.mesh = init_device_mesh(device, (HERE.world,))


def make(**options):
    torch.manual_seed(0)
    return Blocks(**options).to(HERE.device)


def shard(model, policy=POLICY, **options):
    for module in [*model.blocks, model.head, model]:
        fully_shard(module, **{"mesh": HERE.mesh, "mp_policy": policy, **options})
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LR)


def attached(level="O2", policy=POLICY, options=None, **overrides):
    model = shard(make(), policy, **(options or {}))
    return attach(model, adamw(model), level, compute="native", **overrides)


def inputs(step):
    """Return this rank's part of a step's data."""
    return [t.to(HERE.device) for t in batch(HERE.world * step + HERE.rank)]


def train(model, optimizer, steps=range(10)):
    """Return this rank's losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(*inputs(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


# --- training


def train_at_every_level(rank, device):
    """Every level trains like FSDP2 alone, and does what it says."""
    enter(rank, device)
    model = shard(make())
    losses = {"plain": train(model, adamw(model))}
    for name in ("O0", "O1", "O1 gathered", "O2"):
        level, gathered = name[:2], name.endswith("gathered")
        model, optimizer = attached(level)
        if gathered:
            fp8stack.comm.register_fp8_all_gather(model)
        assert type(optimizer) is (fp8stack.optim.AdamW if level == "O2" else torch.optim.AdamW)
        with fp8stack.comm.Statistics() as statistics:
            losses[name] = train(model, optimizer)
        found, sent = verify(model, optimizer), statistics.collect()
        assert (found.level, found.layers, found.wrapper) == (level, 5, "FSDP2")
        assert ("reduce_scatter_tensor" in sent) == (level != "O0" and HERE.world > 1)
        assert ("all_gather_weights" in sent) == (gathered and HERE.world > 1)
    keep_the_contract(model, optimizer)
    model = shard(make(recomputes=True))
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.999)
    model, optimizer = attach(model, optimizer, "O2", compute="native")
    losses["recomputed"] = train(model, optimizer)
    verify(model, optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LR * 0.999)
    for each in losses.values():
        dist.all_reduce(each)
    for name, each in losses.items():
        assert each[-1] < 0.8 * each[0], name
        rounded = name == "O1 gathered"  # weights to E4M3
        assert torch.allclose(each, losses["plain"], rtol=0.06 if rounded else 0.02), name
    train_torchs_encoder()
    accumulate_micro_batches()
    hand_states_over()
    freeze_parameters()
    warn_and_report()
    monitor_this_rank()
    see_differences()
    refuse()
    if HERE.world == 2:
        train_replicas()
        offload()


def keep_the_contract(model, optimizer):
    """bfloat16 shards and gradients, 8 more bits, 8-bit states: 7.06 bytes a parameter over all ranks."""
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        assert p.dtype is p.grad.dtype is torch.bfloat16, name
        assert all(v.placements == p.placements for v in state.values() if v.ndim), name
        assert ("remainder" in state) == (p.ndim > 1)
        assert p.ndim > 1 or state["master"].dtype is torch.float32
    report = fp8stack.get_report(model)
    assert len(report.stored) == 6
    assert report.bytes_per_parameter == pytest.approx(7.06, abs=0.02)
    p = model.blocks[0][1].weight
    local = [v.to_local() for v in (p, p.grad, *optimizer.state[p].values()) if v.ndim]
    share = -(-p.shape[0] // HERE.world) / p.shape[0]
    assert sum(v.nbytes for v in local) <= p.numel() * share * 7.1
    assert isinstance(model.head, FSDPModule)
    assert isinstance(model.head, fp8stack.nn.Fp8Linear)
    with pytest.raises(ModelError, match=r"sharded by FSDP2 before.*master_state_dict"):
        fp8stack.restore(model, optimizer)


def train_torchs_encoder():
    """Its attention, a module without a Linear for its three inputs, trains as under FSDP2 alone."""
    plain, sharded = (shard(make(block=encoder)) for _ in range(2))
    expected = train(plain, adamw(plain))
    model, optimizer = attach(sharded, adamw(sharded), "O2", compute="native")
    assert fp8stack.get_report(model).share == 1
    losses = train(model, optimizer)
    verify(model, optimizer)
    for each in (losses, expected):
        dist.all_reduce(each)
    assert losses[-1] < 0.8 * losses[0]
    assert torch.allclose(losses, expected, rtol=0.02)


def accumulate_micro_batches():
    """Gradients accumulate before they are reduced as afterwards, are clipped by torch, and survive recomputation."""
    norms, gradients = [], []
    for synced, recomputes in ((True, False), (False, False), (False, True)):
        model = shard(make(recomputes=recomputes))
        model, optimizer = attach(model, adamw(model), "O2", compute="native")
        for step in range(3):
            model.set_requires_gradient_sync(synced or step == 2)
            model(*inputs(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01).full_tensor())
        gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]))
        assert gradients[-1].float().norm().item() == pytest.approx(0.01, rel=1e-2)
        optimizer.step()
        assert optimizer.skipped_steps == 0
    assert torch.allclose(norms[0], norms[1], rtol=1e-2)
    assert nn.functional.cosine_similarity(gradients[0].float(), gradients[1].float(), 0) > 0.998
    if HERE.device.type == "cpu":  # on a GPU, embeddings add up their gradients in any order
        assert_same_bits(gradients[1], gradients[2])


def hand_states_over():
    """An optimizer that has stepped the whole model goes on from its moments, and float32 weights keep 24 bits."""
    model = make(tied=True)
    optimizer = adamw(model)
    model(*[t.to(HERE.device) for t in batch(0)]).backward()
    optimizer.step()
    weight, moment = model.embed.weight.detach().clone(), optimizer.state[model.embed.weight]
    moment, held = moment["exp_avg"].clone(), get_optimizer_state_dict(model, optimizer)
    for module in (model.blocks[1], model):
        fully_shard(module, mesh=HERE.mesh, mp_policy=POLICY)
    optimizer = adamw(model)
    whole_states = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, held, options=whole_states)
    group = optimizer.param_groups[0]
    model, new = attach(model, optimizer, compute="native")
    assert new.param_groups[0] is group
    assert model.head.weight is model.embed.weight
    p = model.embed.weight
    assert float(new.state[p]["step"]) == 1
    master = fp8stack.checkpoint.master_state_dict(model, new)["embed.weight"].full_tensor()
    assert ((master - weight).abs() <= weight.abs() * 2**-16).all()
    exported = fp8stack.checkpoint.torch_state_dict(new)["state"]
    found = exported[group["params"].index(p)]["exp_avg"].full_tensor()
    assert torch.allclose(found, moment, rtol=0.04, atol=float(moment.abs().max()) / 500)
    model = shard(make())
    own = fp8stack.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    own.override(model.head.weight, states="fp32")
    assert attach(model, own, compute="bf16")[1] is own
    assert "exp_avg" in own.state[model.head.weight]
    verify(model, own)


def freeze_parameters():
    """What is frozen keeps its dtype, beside bfloat16 parameters of the same module."""
    model = make()
    model.embed.weight.requires_grad_(False)
    shard(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = attach(model, torch.optim.AdamW(trainable, lr=LR), compute="native")
    train(model, optimizer, range(3))
    dtypes = {p.requires_grad: p.dtype for p in model.parameters()}
    assert dtypes == {False: torch.float32, True: torch.bfloat16}
    verify(model, optimizer)


def warn_and_report():
    """What falls back says so once; `strict` refuses before anything is changed."""

    def told(match, model, optimizer=None, level="O2"):
        """Expect one warning, and weights that stay as they are."""
        given = adamw(model) if optimizer is None else optimizer
        with pytest.warns(Fp8StackWarning, match=match) as told:
            model, given = attach(model, given, level)
        assert {w.filename for w in told} == {__file__}
        assert model.head.weight.dtype is torch.float32
        return model, given

    plain = shard(make(), MixedPrecisionPolicy())
    model, optimizer = told("own masters: the root has no compute dtype", plain)
    verify(model, optimizer)
    assert len(fp8stack.get_report(model).kept) == 6
    train(model, optimizer, range(1))
    model = shard(make())
    optimizer = adamw(model)
    with torch.no_grad():
        model(*inputs(0))
    model.reshard()
    with refused(UnsupportedDeviceError, r"has run, when FSDP2 takes note.*strict=True", model):
        attach(model, optimizer, "O2", strict=True)
    told("has run", model, optimizer)
    model = shard(make())
    reference = weakref.ref(model.head.weight)
    told(r"own masters: head\.weight has weak references", model)
    assert reference().dtype is torch.float32
    model = shard(make())
    told(
        r"parameters are not in the optimizer", model, torch.optim.AdamW(model.blocks.parameters())
    )


def monitor_this_rank():
    """A monitor's numbers are this rank's: of its batch, and of its part of the weights."""
    model, optimizer = attached()
    tokens = (torch.arange(66).view(2, 33) * (HERE.rank + 2) % 321).to(HERE.device)
    seen = []
    model.head.register_forward_pre_hook(lambda _, given: seen.append(given[0].abs().max().item()))

    weight = model.head.weight
    with Monitor(model, optimizer) as monitor:
        before = optimizer.master_weight(weight).to_local()
        model(tokens, tokens).backward()
        optimizer.step()
        numbers, after = monitor.read(wait=True), optimizer.master_weight(weight).to_local()
    assert len(numbers) == 5
    assert numbers["head"]["x"]["amax"] == seen[0]
    everywhere = [None] * HERE.world
    dist.all_gather_object(everywhere, seen[0])
    assert len(set(everywhere)) == HERE.world
    ratio = ((after - before).norm() / before.norm()).item()
    assert ratio > 0
    assert numbers["head"]["w"]["update_ratio"] == pytest.approx(ratio, rel=0.03)


def see_differences():
    model = shard(make())
    verify(*attach(model, torch.optim.SGD(model.parameters(), lr=0.1)))  # without momentum
    verify(*attached(states="bf16"))
    model, optimizer = attached()
    verify(model)
    state = optimizer.state[model.embed.weight]
    state["exp_avg_scale"] = state["exp_avg_scale"].to_local()
    optimizer.state[model.head.weight].clear()
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    model.blocks[0].set_custom_reduce_scatter(DefaultReduceScatter())
    model.blocks[1][1] = nn.Linear(128, 192).to(HERE.device)
    with pytest.raises(ModelError) as error:
        verify(model, optimizer)
    for part in (
        "blocks.1.1 was converted and is an ordinary layer again",
        "blocks.0 does not reduce its gradients in FP8",
        "exp_avg_scale of embed.weight is a plain tensor",
        "head.weight has no 8bit states",
        "(192, 128) in the optimizer is not the model's",
    ):
        assert part in str(error.value)
    with pytest.raises(ModelError, match="AdamW is stepped, and not the AdamW that fp8stack"):
        verify(model, adamw(model))
    with pytest.raises(ModelError, match="nothing is stepped, and not the AdamW that fp8stack"):
        verify(model, [])
    with pytest.raises(ModelError, match="not initialized"):
        verify(shard(make()))


def replicated(*shape):
    mesh = init_device_mesh(HERE.device.type, shape, mesh_dim_names=("replicate", "shard"))
    model, replicas = shard(make(), mesh=mesh["shard"]), mesh.get_group("replicate")
    return attach(model, adamw(model), compute="native", replicate_group=replicas)


def train_replicas():
    """HSDP as two replicas of one shard, and one replica of two: trains, and replicas keep the same bits."""
    losses = []
    for shape in ((2, 1), (1, 2)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", Fp8StackWarning)
            model, optimizer = replicated(*shape)
        losses.append(train(model, optimizer))
        verify(model, optimizer)
        for p in model.parameters():
            for each in (p.full_tensor(), gather(optimizer.master_weight(p))):
                assert_equal_everywhere(each)
    assert all(each[-1] < 0.8 * each[0] for each in losses)
    assert torch.allclose(*losses, rtol=0.02)
    mesh = init_device_mesh(HERE.device.type, (2, 1), mesh_dim_names=("replicate", "shard"))
    hybrid = shard(make(), mesh=mesh)
    with refused(UnsupportedDeviceError, "over the replicas of a 2-D mesh", hybrid):
        attach(hybrid, adamw(hybrid), strict=True)
    replicas = mesh.get_group("replicate")
    with refused(ConfigError, "share the model's mesh", hybrid):
        attach(hybrid, adamw(hybrid), replicate_group=replicas)
    with refused(ConfigError, "which O0 .* Shard over the 2-D mesh instead", hybrid):
        attach(hybrid, adamw(hybrid), "O0", replicate_group=replicas)
    with pytest.warns(Fp8StackWarning, match="over replicas in full precision"):
        attach(hybrid, adamw(hybrid))


def offload():
    """FSDP2's own offload: parameters, gradients and states in host memory."""
    policy = {
        "offload_policy": torch.distributed.fsdp.CPUOffloadPolicy(
            pin_memory=HERE.device.type == "cuda"
        )
    }
    model, optimizer = attached(options=policy)
    losses = train(model, optimizer)
    assert losses[-1] < 0.8 * losses[0]
    assert optimizer.state[model.head.weight]["exp_avg_code"].device.type == "cpu"
    assert fp8stack.get_report(model).compute == "native"


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_levels_over_gloo(world):
    run_ranks(train_at_every_level, world, "cpu")


@pytest.mark.gpu
@pytest.mark.gpus
def test_levels_over_nccl():
    need_gpus(2)
    run_ranks(train_at_every_level, 2, "cuda", device="cuda")


# --- refusals


@contextmanager
def refused(kind, match, model):
    """Expect an error, and the model as it was."""
    before = [(type(m), [p.dtype for p in m.parameters()]) for m in model.modules()]
    with pytest.raises(kind, match=match):
        yield
    assert [(type(m), [p.dtype for p in m.parameters()]) for m in model.modules()] == before


RULES_OF_FSDP2 = [
    (rule, value) for rule in RULES for value in rule.values
    if FSDP2 in rule.contexts and rule.option in OPTIONS
]  # fmt: skip


def refuse():
    whole_model, model, late = make(), shard(make()), make()
    optimizer, early = adamw(model), adamw(late)
    assert len(RULES_OF_FSDP2) == 8
    for rule, value in RULES_OF_FSDP2:
        with refused(rule.error, f"{rule.option}={value!r} does not go with FSDP2", model):
            attach(model, adamw(model), **{rule.option: value})
    shard(late)
    with torch.device("meta"):
        meta = shard(Blocks())
    rms = torch.optim.RMSprop(model.parameters())
    muon = fp8stack.optim.Muon(model.parameters())
    one = torch.distributed.fsdp.FullyShardedDataParallel(make(), device_id=HERE.device)
    wrapped = DistributedDataParallel(make())
    for given, makes, words, options in (
        (model, adamw, r"Did you mean \"skip\"", {"skipp": ["head"]}),
        (model, adamw, "states_for.*master='fp16' does not go with FSDP2.*one scale",
         {"states_for": {"head": {"master": "fp16"}}}),
        (model, lambda _: None, "O2 converts gradients for an optimizer", {}),
        (late, lambda _: early, "owns none of the model's 14 trainable.*after anything that replaces", {}),
        (model, lambda _: rms, "RMSprop does not go with states='8bit'.*torch.optim.Adam", {}),
        (model, lambda _: muon, "Muon does not go with FSDP2.*all of a matrix", {}),
        (meta, adamw, "on the meta device; materialize", {}),
        (whole_model, adamw, "attach found no module sharded.*fp8stack.initialize", {}),
        (wrapped, adamw, "DistributedDataParallel.* FSDP2: it keeps the parameters", {}),
        (one, adamw, r"FullyShardedDataParallel, does.*fully_shard \(FSDP2\)", {}),
        (torch.compile(model), adamw, r"OptimizedModule.*model.compile\(\)", {}),
    ):  # fmt: skip
        with refused((ConfigError, ModelError), words, given):
            attach(given, makes(given), **options)
    with pytest.raises(ModelError, match="got int"):
        attach(3, optimizer)
    model, optimizer = attach(model, optimizer)
    with refused(ModelError, "already converted by fp8stack", model):
        attach(model, optimizer)


# --- checkpoints


def load(path, made=None):
    """Return a model and an optimizer made anew, from other weights, filled from a checkpoint."""
    model, optimizer = made or attached()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load_states(path, model, optimizer)
    return model, optimizer


def save_and_resume(rank, folder, theirs):
    """Load what `theirs` ranks saved, if any, bit for bit; save, and resume on this mesh bit for bit."""
    enter(rank, "cpu")
    if theirs:
        model, optimizer = load(f"{folder}/{theirs}")
        saved = torch.load(f"{folder}/{theirs}.pt", weights_only=True)
        assert_same_bits(whole(model, optimizer), saved, f"{theirs} ranks to {HERE.world}")
        verify(model, optimizer)
    else:
        model, optimizer = attached()
        for shape in ((1, 2), (2, 1)):  # replicas of shards, loaded by shards of replicas
            saved, place = replicated(*shape), f"{folder}/replicas{shape[0]}"
            train(*saved, range(3))
            dcp.save(states_of(*saved), checkpoint_id=place)
            assert_same_bits(
                whole(*load(place, replicated(*reversed(shape)))), whole(*saved), shape
            )
    train(model, optimizer, range(3, 6))
    dcp.save(states_of(model, optimizer), checkpoint_id=f"{folder}/{HERE.world}")
    expected = whole(model, optimizer)
    if rank == 0:
        torch.save(expected, f"{folder}/{HERE.world}.pt")
    train(model, optimizer, range(6, 9))
    resumed = load(f"{folder}/{HERE.world}")
    assert_same_bits(whole(*resumed), expected, "loaded")
    train(*resumed, range(6, 9))
    assert_same_bits(whole(*resumed), whole(model, optimizer), "resumed")


@pytest.mark.slow
def test_checkpoints_resume_bit_for_bit_and_change_ranks(tmp_path):
    for world, theirs in ((2, 0), (1, 2), (2, 1)):
        run_ranks(save_and_resume, world, str(tmp_path), theirs)


# --- in a process group of one rank


def test_an_fsdp2_without_hooks_of_its_collectives_reduces_as_it_can(mesh, monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    model = fully_shard(TinyLM(), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(UnsupportedDeviceError, match=r"no set_custom_reduce_scatter.*strict=True"):
        attach(model, optimizer, "O1", strict=True)
    with pytest.warns(Fp8StackWarning, match="gradients are reduced without FP8"):
        model, optimizer = attach(model, optimizer, "O1")
    assert not verify(model, optimizer).reduction
    assert fp8stack.get_report(model).gradients == "as given"
    losses = train_alone(model, optimizer, 10)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_model_that_was_moved_trains_on(level, mesh):
    """Moving swaps what is in the parameters, whatever torch.__future__ says."""
    results = []
    for moves in (False, True):
        torch.manual_seed(0)
        model = fully_shard(TinyLM(), mesh=mesh, mp_policy=POLICY)
        model, optimizer = attach(
            model, torch.optim.AdamW(model.parameters(), lr=LR), level, compute="native"
        )
        train_alone(model, optimizer, 2)
        if moves:
            model.cpu()
            model.to(dtype=model.head.weight.dtype)
            optimizer.zero_grad()
        train_alone(model, optimizer, 2, start=2)
        results.append([p.to_local() for p in model.parameters()])
    assert_same_bits(*results)


def test_a_model_without_sharded_parameters_is_refused(mesh):
    model = nn.Sequential(nn.GELU(), nn.Linear(8, 8))
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(ModelError, match="fully_shard was called on have no parameters"):
        attach(model, None, "O0")
