"""transformers' experts between real processes: sharded by FSDP2 and by DeepSpeed, and resumed on one rank."""

import engines
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import assert_same_bits, need_gpus
from layers import experts_of
from ranks import load_states, run_ranks, states_of, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8stack
from fp8stack.integrations import deepspeed as fp8_deepspeed
from fp8stack.integrations.fsdp import attach, verify
from fp8stack.nn.experts import Fp8Experts

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = 64


class Mixture(nn.Module):
    """Predicts the next of 64 tokens: an embedding, a router, experts and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.router = nn.Embedding(engines.VOCABULARY, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = experts_of("Qwen3Moe", WIDTH, 128, number=4)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, engines.VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        weights, index = self.router(x).softmax(-1).topk(2)
        return self.head(self.norm(x + self.experts(x, index, weights))).float()


def make():
    torch.manual_seed(0)
    return Mixture()


def train(model, optimizer, steps, rank, device, seed=1):
    """Return the losses of some steps, the mean over ranks."""
    losses, source = [], engines.batches(rank, seed)
    for _ in range(steps):
        tokens, following = (t.to(device) for t in next(source))
        loss = nn.functional.cross_entropy(model(tokens), following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def shard(device):
    model = make().to(device)
    for module in (model.experts, model):
        mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
        fully_shard(module, mesh=mesh, mp_policy=POLICY)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_in_fsdp(rank, device, folder):
    """Every level trains as FSDP2 alone; O2 stores stacks in bfloat16, and is saved."""
    device = f"{device}:{rank}" if device == "cuda" else device
    plain = train(*shard(device), 12, rank, device)
    for level in ("O0", "O1", "O2"):
        model, optimizer = attach(*shard(device), level, compute="native", select="all")
        assert isinstance(model.experts, Fp8Experts)
        losses = train(model, optimizer, 12, rank, device)
        assert losses[-4:].mean() < 0.9 * losses[0]
        assert abs(losses[-4:].mean() / plain[-4:].mean() - 1) < 0.02, (level, losses, plain)
        verify(model, optimizer)
    assert model.experts.gate_up_proj.dtype is torch.bfloat16
    assert "experts.gate_up_proj" in fp8stack.get_report(model).stored
    dcp.save(states_of(model, optimizer), checkpoint_id=f"{folder}/fsdp")
    expected = whole(model, optimizer)
    if rank == 0:
        torch.save(expected, f"{folder}/whole.pt")


def resume_on_one(rank, device, folder):
    model, optimizer = attach(*shard(device), "O2", compute="native", select="all")
    load_states(f"{folder}/fsdp", model, optimizer)
    saved = torch.load(f"{folder}/whole.pt", weights_only=True, map_location=device)
    assert_same_bits(whole(model, optimizer), saved)
    losses = train(model, optimizer, 4, rank, device, seed=2)
    assert losses.isfinite().all()
    verify(model, optimizer)


def train_in_deepspeed(rank, device, stages):
    """Every stage trains as DeepSpeed alone at O2."""
    deepspeed = engines.import_deepspeed(device)
    for stage in stages:
        config = engines.configure(stage, "bf16")
        model = make()  # a GPU's grouped products do not take weights as ZeRO aligns them
        model.experts.config._experts_implementation = "eager"
        plain = deepspeed.initialize(
            model=model, optimizer=engines.make_adamw(model, 1e-2),
            config={**config, "zero_allow_untested_optimizer": True},
        )[0]  # fmt: skip
        expected = engines.train(plain, 12, rank)
        section = {"select": "all", "compute": "native"}
        engine = engines.start(
            engines.configure(stage, "bf16", "O2", section=section), make(), lr=1e-2
        )
        losses = engines.train(engine, 12, rank)
        assert abs(losses[-4:].mean() / expected[-4:].mean() - 1) < 0.02, (stage, losses, expected)
        assert isinstance(engine.module.experts, Fp8Experts)
        fp8_deepspeed.verify(engine)


def train_everywhere(rank, device, folder, stages):
    train_in_fsdp(rank, device, folder)
    train_in_deepspeed(rank, device, stages)


def test_experts_over_gloo(tmp_path):
    pytest.importorskip("transformers")
    run_ranks(train_everywhere, 2, "cpu", str(tmp_path), (2, 3))
    run_ranks(resume_on_one, 1, "cpu", str(tmp_path))


@pytest.mark.gpu
@pytest.mark.gpus
def test_experts_over_nccl(tmp_path):
    need_gpus(2)
    run_ranks(train_everywhere, 2, "cuda", str(tmp_path), (0, 2, 3), device="cuda")
    run_ranks(resume_on_one, 1, "cuda", str(tmp_path), device="cuda")
