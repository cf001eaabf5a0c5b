"""What the tests of fp8stack.integrations.deepspeed run in processes of their own: groups of parameters, of ranks."""

import pytest
import torch
from torch import nn
from workers_deepspeed import enter, inner_of, leave
from workers_deepspeed_levels import (
    VOCABULARY,
    Bigrams,
    batches,
    build,
    check_states,
    configure,
    make_adamw,
    start,
    train,
)

import fp8stack
from fp8stack import optim
from fp8stack.errors import ConfigError, ModelError, UnsupportedDeviceError
from fp8stack.integrations import deepspeed as fp8_deepspeed


class Experts(nn.Module):
    """A mixture of two experts between an embedding and a head."""

    def __init__(self, ranks):
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 64)
        expert = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        room = {"capacity_factor": 4.0, "use_rts": False}
        self.mixture = MoE(64, expert, num_experts=2, ep_size=ranks, k=1, **room)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.mixture(x)[0]).float()


def check_reductions(rank, world, store):
    """FP8 reduces to what DeepSpeed does: also where ranks share a sequence, and for experts."""
    deepspeed = enter(rank, world, store)
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
    from deepspeed.utils import safe_get_full_grad

    def gradients(level, stage, dtype, scatter=True, shared=1, experts=False):
        torch.manual_seed(0)
        model = Experts(world) if experts else Bigrams()
        groups = list(model.parameters())
        if experts and stage:
            groups = split({"params": groups, "name": "all"})
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        # products like DeepSpeed's: what differs is the wire
        config = configure(stage, dtype, level, {"reduce_scatter": scatter}, {"compute": "bf16"})
        initialize = deepspeed.initialize if level is None else fp8_deepspeed.initialize
        engine = initialize(model=model, optimizer=optimizer, config=config)[0]
        engine.sequence_parallel_size = engine.optimizer.sequence_parallel_size = shared
        tokens, following = next(batches(rank, 1))
        engine.backward(nn.functional.cross_entropy(engine(tokens), following))
        if experts and stage:  # those of this rank
            parts = engine.optimizer.averaged_gradients.values()
            return [torch.cat([g.flatten() for g in part]).float() for part in parts]
        read = safe_get_full_grad if stage else lambda p: p.grad
        return [read(p).clone() for p in model.parameters()]

    stages = (0, True), (2, True), (2, False), (3, True), (3, False)
    cases = [(stage, "fp32", scatter, shared) for stage, scatter in stages for shared in (1, 2)]
    for case in (*cases, (0, "fp32", True, 1, True), (2, "bf16", True, 1, True)):
        expected, found = gradients(None, *case), gradients("O1", *case)
        assert expected
        for one, other in zip(expected, found, strict=True):
            assert (other - one).norm() < 0.06 * one.norm(), case
    leave()


def check_groups(rank, world, store):
    """Groups of parameters: frozen ones, those left out, those that somebody holds, and states that a group has."""
    deepspeed = enter(rank, world, store)
    for stage in (0, 1, 2, 3):
        model = build()
        model.embed.weight.requires_grad_(False)
        before = model.embed.weight.clone()
        engine = start(configure(stage, "fp32", "O2"), model)
        train(engine, 3, rank)
        fp8_deepspeed.verify(engine)
        if stage < 3:
            assert torch.equal(model.embed.weight, before)

    model = build()
    kept = torch.optim.SGD(
        [p for p in model.parameters() if p.ndim > 1], lr=0.1
    )  # without momentum
    with pytest.warns(fp8stack.errors.Fp8StackWarning, match="4 trainable parameters are not in"):
        engine = start(configure(2, "bf16", "O2"), model, optimizer=kept)
    train(engine, 3, rank)
    fp8_deepspeed.verify(engine)
    engine.destroy()
    assert fp8stack.restore(model) == (model, None)
    assert type(model.up) is nn.Linear
    engine = start(configure(2, "bf16", "O2"), model)  # as Trainer does at its second train()
    train(engine, 3, rank)
    fp8_deepspeed.verify(engine)

    model = build()
    optimizer = make_adamw(model)
    held = optimizer.param_groups[0]
    with pytest.raises(AssertionError, match="accumulation steps"):
        start(configure(2, "bf16", "O2", train_batch_size=7), model, optimizer=optimizer)
    assert optimizer.param_groups[0] is held
    held["initial_lr"] = 3e-3  # as schedulers leave it, torch's and others
    engine = start(configure(2, "bf16", "O2"), model, optimizer=optimizer)
    assert inner_of(engine).param_groups[0] is held

    offload = configure(2, "bf16", zero={"offload_optimizer": {"device": "cpu"}})
    described = {"optimizer": {"type": "FP8AdamW", "params": {"lr": 3e-3}}}
    with fp8_deepspeed.install():
        engine = deepspeed.initialize(model=build(), config=offload | described)[0]
    assert type(inner_of(engine)) is optim.AdamW
    model = build()
    given = optim.AdamW(model.parameters(), lr=3e-3)
    engine = start(offload | {"fp8stack": {"opt_level": "O1"}}, model, optimizer=given)
    train(engine, 2, rank)
    check_refused_optimizers()
    check_float32_masters(rank)
    leave()


def check_float32_masters(rank):
    """Where DeepSpeed has no bfloat16 partitions, as before 0.18.3: float32 masters and one warning."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config

    lacking = r"masters stay float32.*0\.18\.3"
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(DeepSpeedBF16Config.model_fields, "bf16_optimizer_states")
        with pytest.raises(UnsupportedDeviceError, match=lacking):
            start(configure(2, "bf16", "O2", section={"strict": True}))
        with pytest.raises(ConfigError, match=r"needs bfloat16 partitions.*0\.18\.3"):
            start(configure(2, "bf16", "O2", section={"master": "split24"}))
        with pytest.warns(fp8stack.errors.Fp8StackWarning, match=lacking) as warned:
            engine = start(configure(2, "bf16", "O2"))
    assert sum("masters" in str(warning.message) for warning in warned) == 1
    train(engine, 3, rank)
    assert {p.dtype for p in inner_of(engine).state} == {torch.float32}
    check_states(inner_of(engine), low_master=False)
    assert engine.fp8stack.report.master == "DeepSpeed's"


def check_refused_optimizers():
    """What flat partitions cannot have is refused before anything is changed."""

    def refused(error, match, make, level="O2", stage=2, **section):
        model = build()
        optimizer = make(model)
        groups = [dict(group) for group in optimizer.param_groups]
        with pytest.raises(error, match=match):
            start(configure(stage, "bf16", level, section=section), model, optimizer=optimizer)
        assert type(model.up) is nn.Linear
        assert optimizer.param_groups == groups

    def stepped(model):
        optimizer = make_adamw(model)
        model(torch.zeros(4, dtype=torch.long)).sum().backward()
        optimizer.step()
        return optimizer

    for stage in (0, 2):
        refused(ModelError, "states of 8 parameters.*would be lost", stepped, stage=stage)
    matrices = optim.Muon
    refused(
        ModelError,
        "Muon does not go with ZeRO.*all of a matrix",
        lambda m: matrices([p for p in m.parameters() if p.ndim > 1], lr=1e-3),
    )
    one_scale = "states='fp8-lm' does not go with ZeRO.*one scale for a whole tensor"
    for level in ("O1", "O2"):
        refused(
            ConfigError,
            one_scale,
            lambda m: optim.AdamW([{"params": list(m.parameters()), "states": "fp8-lm"}], lr=1e-3),
            level,
        )
    refused(ConfigError, one_scale, make_adamw, states_for={"up": "fp8-lm"})
