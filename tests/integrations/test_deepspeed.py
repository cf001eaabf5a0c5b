"""fp8stack.integrations.deepspeed: levels in the real engine, on CPUs, as real processes."""

import copy
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import engines
import pytest
import torch
import torch.distributed as dist
from engines import batches, build, configure, inner_of, loss_of, make_adamw, start, train
from helpers import assert_same_bits, need_gpus
from ranks import assert_same_on_all_ranks, run_ranks
from torch import nn

import fp8stack
from fp8stack import capability, conflicts, optim
from fp8stack.errors import ConfigError, Fp8StackWarning, ModelError
from fp8stack.integrations import deepspeed as fp8_deepspeed
from fp8stack.levels import OPTIONS
from fp8stack.nn import Fp8Linear

pytest.importorskip("deepspeed")

STEPS, FAST = 12, {"lr": 1e-2}  # a rate at which these steps are enough
MATRICES = sum(p.numel() for p in build().parameters() if p.ndim > 1)


def check_states(inner, low_master, least=1):
    """8-bit moments of `least` elements, and 8 bits beside bfloat16 partitions; what is small keeps float32."""
    large = [e for p, e in inner.state.items() if inner.quantizes(p)]
    for entry in large:
        assert entry["exp_avg_code"].dtype is entry["exp_avg_sq_code"].dtype is torch.uint8
        assert ("remainder" in entry) == low_master
    numel = sum(e["exp_avg_code"].numel() for e in large)
    assert numel * dist.get_world_size() >= least
    nbytes = sum(t.nbytes for e in large for t in e.values())
    # a row's last block may be short
    assert nbytes <= (3.1 if low_master else 2.1) * numel + 100 * len(large)
    small = [e for p, e in inner.state.items() if not inner.quantizes(p)]
    assert all(e["exp_avg"].dtype is torch.float32 for e in small)


# --- every level in every stage

LEVELS = {  # dtype, and whether the stage is odd: every two of level, dtype and stage come together, and O2 with both
    ("fp32", 0): ("O0", "O2"), ("fp32", 1): ("O1", "O2"), ("bf16", 0): ("O1", "O2"), ("bf16", 1): ("O0", "O2"),
}  # fmt: skip


def train_at_every_level(rank, stage, folder):
    """Every level trains as the engine does without it, is what it says, and resumes bit for bit."""
    deepspeed = engines.import_deepspeed()
    for dtype in ("fp32", "bf16"):
        plain = engines.start_plain(deepspeed, configure(stage, dtype), **FAST)
        plain = train(plain, STEPS, rank)
        for level in LEVELS[dtype, stage % 2]:
            config = configure(stage, dtype, level)
            engine = start(config, **FAST)
            losses = train(engine, STEPS, rank)
            assert losses[-4:].mean() < 0.8 * losses[0]
            assert abs(losses[-4:].mean() / plain[-4:].mean() - 1) < 0.02
            found = fp8_deepspeed.verify(engine)
            assert (found.level, found.stage, found.layers) == (level, stage, 3)
            assert bool(found.reduction) == (level != "O0")
            assert found.reduced >= STEPS * (level != "O0")
            assert isinstance(inner_of(engine), optim.AdamW) == (level == "O2")
            if level == "O2":
                check_states(inner_of(engine), bool(stage) and dtype == "bf16")
            if stage < 3:
                assert_same_on_all_ranks(engine.module)
            place = f"{folder}/{level}{dtype}"
            engine.save_checkpoint(place, tag="here")
            after = train(engine, 3, rank, seed=2)
            again = start(config, **FAST)
            again.load_checkpoint(place, tag="here")
            assert_same_bits(train(again, 3, rank, seed=2), after)
            assert_same_bits(engine.module.parameters(), again.module.parameters())


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (1, 3), *((2, stage) for stage in range(4))])
def test_levels_train_verify_and_resume(stage, world, tmp_path):
    run_ranks(train_at_every_level, world, stage, str(tmp_path))


def train_on_gpus(rank, compute):
    """On GPUs: every stage and dtype trains at O2, states are what they should be, and FP8 alone is the same in all."""
    deepspeed = engines.import_deepspeed("cuda")
    for dtype in ("fp32", "bf16", "fp16"):
        alone = []
        for stage in (0, 1, 2, 3):
            engine = start(configure(stage, dtype, "O0", section={"compute": compute}))
            alone.append(train(engine, 10, rank))
            assert fp8_deepspeed.verify(engine).layers == 3
            expected = train(engines.start_plain(deepspeed, configure(stage, dtype)), 60, rank)
            engine = start(configure(stage, dtype, "O2", section={"compute": compute}))
            losses = train(engine, 60, rank)
            assert abs(losses[-10:].mean() / expected[-10:].mean() - 1) < 0.02
            assert fp8_deepspeed.verify(engine).reduced
            assert engine.fp8stack.report.compute == compute
            check_states(inner_of(engine), low_master=bool(stage) and dtype == "bf16")
            if stage < 3:
                assert_same_on_all_ranks(engine.module)
        # stage 0 adds up in another order and rounds to 16 bits at other places, which flips codes of FP8
        for other in alone[1:]:
            torch.testing.assert_close(other, alone[1], rtol=1e-3, atol=0)
        torch.testing.assert_close(alone[0], alone[1], rtol=2e-2, atol=0)
    if compute == "native":
        skip_bad_gradients(rank, FP16)


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("compute", ["native", "te"])
def test_levels_on_gpus(compute, world):
    need_gpus(world)
    if compute == "te" and not (installed := capability.te_installation()):
        pytest.skip(installed.reason)
    run_ranks(train_on_gpus, world, compute, device="cuda")


# --- what else ZeRO does


def vary_zero(rank):
    """zero.Init, ties, offload, accumulation, clipping, sums in float32, sub-groups, groups that ZeRO empties."""
    deepspeed = engines.import_deepspeed()
    config = configure(3, "bf16", "O2", zero={"stage3_param_persistence_threshold": 0})
    expected = train(start(config, **FAST), STEPS, rank)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = engines.Bigrams()
    assert model.up.weight.shape == (0,)
    engine = start(config, model, **FAST)
    losses = train(engine, STEPS, rank)
    assert fp8_deepspeed.verify(engine).layers == 3
    # initialized under zero.Init: other random numbers on other shapes, the same task
    assert abs(losses[-5:].mean() / expected[-5:].mean() - 1) < 0.05

    def learn(stage, model=None, accumulation=1, **options):
        """Return an engine that has learned for 8 steps, and the optimizer that it was given."""
        engine = start(configure(stage, "bf16", "O2", **options), model, **FAST)
        losses = train(engine, 8, rank, accumulation=accumulation)
        assert losses[-3:].mean() < losses[:3].mean() - 0.3
        assert fp8_deepspeed.verify(engine).reduced
        return engine, inner_of(engine)

    for stage in (1, 2, 3):
        engine, _ = learn(stage, build(tied=True))
        assert engine.module.head.weight is engine.module.embed.weight
        _, inner = learn(stage, zero={"offload_optimizer": {"device": "cpu"}})
        check_states(inner, low_master=False)
        several = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
        small = {"sub_group_size": 9000, "reduce_bucket_size": 5000}
        for zero in ({"reduce_scatter": False}, small):
            _, inner = learn(stage, accumulation=2, zero=zero, **several)
            assert all(entry["step"] == 8 for entry in inner.state.values())
    engine, inner = learn(1, data_types={"grad_accum_dtype": "fp32"})
    assert type(engine.optimizer).__name__ == "BF16_Optimizer"
    check_states(inner, low_master=False)
    from deepspeed.accelerator import get_accelerator

    fp16 = FP16 if get_accelerator().is_fp16_supported() else ()  # not by every CPU
    skip_bad_gradients(rank, BAD + fp16)
    reduce_as_deepspeed(rank)


BAD = ((1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "bf16"))
FP16 = ((0, "fp16"), (2, "fp16"), (3, "fp16"))  # where the loss scale is lowered, too


def skip_bad_gradients(rank, cases):
    """A NaN on one rank: no rank steps, and the next step is as good as ever."""
    for stage, dtype in cases:
        engine = start(configure(stage, dtype, "O2"))
        train(engine, 3, rank)
        inner = inner_of(engine)
        before = [p.detach().clone() for p in inner.state]
        loss = loss_of(engine, *next(batches(rank, 1)))
        engine.backward(loss * (torch.nan if rank == 0 else 1.0))
        engine.step()
        assert_same_bits(inner.state, before)
        assert train(engine, 3, rank).isfinite().all()
        assert not any(torch.equal(p, old) for p, old in zip(inner.state, before, strict=True))
        assert dtype != "fp16" or all(float(e["step"]) == 6 for e in inner.state.values())


# --- reduction


class Experts(nn.Module):
    """A mixture of two experts between an embedding and a head."""

    def __init__(self, ranks):
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.embed = nn.Embedding(engines.VOCABULARY, 64)
        expert = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        room = {"capacity_factor": 4.0, "use_rts": False}
        self.mixture = MoE(64, expert, num_experts=2, ep_size=ranks, k=1, **room)
        self.head = nn.Linear(64, engines.VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.mixture(x)[0]).float()


def reduce_as_deepspeed(rank):
    """FP8 reduces to what DeepSpeed does: also where ranks share a sequence, and for experts."""
    deepspeed = engines.import_deepspeed()
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
    from deepspeed.utils import safe_get_full_grad

    def gradients(level, stage, dtype, scatter=True, shared=1, experts=False, op="mean"):
        torch.manual_seed(0)
        model = Experts(dist.get_world_size()) if experts else engines.Bigrams()
        groups = list(model.parameters())
        if experts and stage:
            groups = split({"params": groups, "name": "all"})
        optimizer = torch.optim.AdamW(groups, lr=3e-3)
        # products like DeepSpeed's: what differs is the wire
        config = configure(stage, dtype, level, {"reduce_scatter": scatter}, {"compute": "bf16"})
        config["gradient_allreduce_op"] = op
        initialize = deepspeed.initialize if level is None else fp8_deepspeed.initialize
        engine = initialize(model=model, optimizer=optimizer, config=config)[0]
        engine.sequence_parallel_size = engine.optimizer.sequence_parallel_size = shared
        engine.backward(loss_of(engine, *next(batches(rank, 1))))
        if experts and stage:  # those of this rank
            parts = engine.optimizer.averaged_gradients.values()
            return [torch.cat([g.flatten() for g in part]).float() for part in parts]
        read = safe_get_full_grad if stage else lambda p: p.grad
        return [read(p).clone() for p in model.parameters()]

    stages = (0, True), (2, True), (2, False), (3, True), (3, False)
    cases = [(stage, "fp32", scatter, shared) for stage, scatter in stages for shared in (1, 2)]
    cases += [(stage, "fp32", scatter, 1, False, "sum") for stage, scatter in stages[:3]]
    for case in (*cases, (0, "fp32", True, 1, True), (2, "bf16", True, 1, True)):
        expected, found = gradients(None, *case), gradients("O1", *case)
        assert expected
        for one, other in zip(expected, found, strict=True):
            assert (other - one).norm() < 0.06 * one.norm(), case


def test_what_else_zero_does_and_what_is_reduced():
    run_ranks(vary_zero, 2)


@pytest.mark.parametrize("world", [1, 2, 3, 40])
def test_parts_of_a_rank_lie_together_in_whole_blocks(world):
    from fp8stack.integrations.deepspeed.reduction import BLOCK, _by_rank

    lengths = [0, 1, 127, 128, 129, 1000, 128 * world, world * (world - 1) + 1, 39 * 39]
    tensors = [torch.randn(length) for length in lengths]
    parts = [-(-length // world) for length in lengths]
    sizes = [-(-part // BLOCK) * BLOCK for part in parts]
    together = _by_rank(tensors, parts, sizes, world).view(world, -1)
    for tensor, part, got in zip(tensors, parts, together.split(sizes, dim=1), strict=True):
        padded = torch.zeros(world, part)
        padded.view(-1)[: tensor.numel()] = tensor
        torch.testing.assert_close(got[:, :part], padded, rtol=0, atol=0)
        assert not got[:, part:].any()


# --- on one rank: ways in, groups of parameters, schedulers, refusals


def use_one_rank(rank, folder):
    deepspeed = engines.import_deepspeed()
    start_in_every_way(deepspeed, folder)
    install_and_remove(deepspeed)
    drive_schedulers()
    group_parameters(deepspeed)
    refuse(deepspeed, folder)
    see_differences(deepspeed)


def test_one_rank(tmp_path):
    run_ranks(use_one_rank, 1, str(tmp_path))


def start_in_every_way(deepspeed, folder):
    """Arguments of deepspeed.initialize, files, and the JSON's optimizer give the same bits."""
    config = configure(2, "bf16", "O2")
    expected, untouched = train(start(config), 5, 0), copy.deepcopy(config)
    path = f"{folder}/config.json"
    Path(path).write_text(json.dumps(config))
    model = build()
    arguments = SimpleNamespace(deepspeed_config=path, local_rank=0)
    by_file = fp8_deepspeed.initialize(arguments, model, make_adamw(model))[0]
    assert arguments.deepspeed_config == path
    model = build()
    adam = {"lr": 3e-3, "weight_decay": 0.01}
    for engine in (
        by_file,
        start(config, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)),
        start(config, model, optimizer=optim.AdamW(model.parameters(), lr=3e-3)),
        *(start({**config, "optimizer": {"type": kind, "params": options}})
          for kind, options in (("AdamW", {**adam, "betas": [0.9, 0.999]}),
                                ("Adam", {**adam, "torch_adam": True}),
                                ("FP8AdamW", {"lr": 3e-3}))),
    ):  # fmt: skip
        assert type(inner_of(engine)) is optim.AdamW
        assert_same_bits(train(engine, 5, 0), expected)
    for described in ({"optimizer": {"type": "FP8AdamW", "params": {"lr": 3e-3}}}, {}):
        model = build()  # float32 partitions: the optimizer needs no masters
        mine = None if described else optim.AdamW(model.parameters(), lr=3e-3, states="4bit")
        engine = start(configure(2, "fp32", "O2") | described, model, optimizer=mine)
        train(engine, 2, 0)
        assert inner_of(engine).states == ("8bit" if described else "4bit")
        fp8_deepspeed.verify(engine)
    assert config == untouched


def install_and_remove(deepspeed):
    config, plain = configure(2, "bf16", "O2"), deepspeed.initialize
    with fp8_deepspeed.install():
        fp8_deepspeed.install()
        model = build()
        given = {"model": model, "optimizer": make_adamw(model), "config_params": config}
        engine = deepspeed.initialize(**given)[0]
        assert_same_bits(train(engine, 5, 0), train(start(config), 5, 0))
        # without the section, and with one that is not enabled, all is DeepSpeed's
        for section in ({}, {"fp8stack": {"enabled": False}}):
            other = configure(1, "bf16", zero_allow_untested_optimizer=True) | section
            model = build()
            engine = deepspeed.initialize(model=model, optimizer=make_adamw(model), config=other)[0]
            assert type(inner_of(engine)) is torch.optim.AdamW
            assert not any(isinstance(m, Fp8Linear) for m in model.modules())
        # 8-bit states alone, also under offload
        described = {"optimizer": {"type": "FP8AdamW", "params": {"lr": 3e-3}}}
        model = build()
        engine = deepspeed.initialize(model=model, config=configure(2, **described))[0]
        train(engine, 5, 0)
        check_states(inner_of(engine), low_master=False, least=MATRICES)
        assert not any(isinstance(m, Fp8Linear) for m in model.modules())
        offload = configure(2, "bf16", zero={"offload_optimizer": {"device": "cpu"}}, **described)
        engine = deepspeed.initialize(model=build(), config=offload)[0]
        assert type(inner_of(engine)) is optim.AdamW
    assert deepspeed.initialize is plain


def drive_schedulers():
    """Schedulers drive every group: those made before, those that a function makes, and the JSON's."""

    def halve(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    config, model = configure(2, "bf16", "O2"), build()
    optimizer = make_adamw(model)
    before = start(config, model, optimizer=optimizer, lr_scheduler=halve(optimizer))
    for engine, groups in ((before, 1), (start(config, lr_scheduler=halve), 3)):
        train(engine, 2, 0)
        assert {group["lr"] for group in inner_of(engine).param_groups} == {3e-3 / 4}
        assert len(inner_of(engine).param_groups) == groups
    described = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 2}}
    engine = start({**config, "scheduler": described})
    train(engine, 4, 0)
    assert {group["lr"] for group in inner_of(engine).param_groups} == {1e-2}


def group_parameters(deepspeed):
    """Groups of parameters: frozen ones, those left out, those that somebody holds, and states that a group has."""
    for stage in (0, 1, 2, 3):
        model = build()
        model.embed.weight.requires_grad_(False)
        before = model.embed.weight.clone()
        engine = start(configure(stage, "fp32", "O2"), model)
        train(engine, 3, 0)
        fp8_deepspeed.verify(engine)
        if stage < 3:
            assert torch.equal(model.embed.weight, before)

    wrapper = start(configure(0, "bf16", "O2")).optimizer
    for weights, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):  # no step was taken that decays
            assert_same_bits(master.detach(), weight.detach().float())

    model, config = build(), configure(2, "bf16", "O2")
    matrices = [p for p in model.parameters() if p.ndim > 1]
    with pytest.warns(Fp8StackWarning, match="4 trainable parameters are not in"):
        engine = start(config, model, optimizer=torch.optim.SGD(matrices, lr=0.1))  # no momentum
    train(engine, 3, 0)
    fp8_deepspeed.verify(engine)
    engine.destroy()
    assert fp8stack.restore(model) == (model, None)
    assert type(model.down) is nn.Linear
    train(start(config, model), 3, 0)  # as Trainer does at its second train()

    model = build()
    optimizer = make_adamw(model)
    held = optimizer.param_groups[0]
    with pytest.raises(AssertionError, match="accumulation steps"):
        start({**config, "train_batch_size": 7}, model, optimizer=optimizer)
    assert optimizer.param_groups[0] is held
    held["initial_lr"] = 3e-3  # as schedulers leave it, torch's and others
    assert inner_of(start(config, model, optimizer=optimizer)).param_groups[0] is held

    model = build()
    given = optim.AdamW(model.parameters(), lr=3e-3)
    offload = configure(2, "bf16", "O1", zero={"offload_optimizer": {"device": "cpu"}})
    train(start(offload, model, optimizer=given), 2, 0)


def refused(match, error=ConfigError, model=None, make=make_adamw, config=None, **more):
    """Expect an error; configuration, model and optimizer are as they were."""
    model = build() if model is None else model
    given = None if make is None else make(model)
    config = configure(level="O2") | (config or {})
    before, classes = copy.deepcopy(config), [type(m) for m in model.modules()]
    groups = None if given is None else [dict(group) for group in given.param_groups]
    with pytest.raises(error, match=match):
        fp8_deepspeed.initialize(model=model, optimizer=given, config=config, **more)
    assert config == before
    assert [type(m) for m in model.modules()] == classes
    assert given is None or given.param_groups == groups


def with_json(kind, level="O2", **options):
    described = {"optimizer": {"type": kind, "params": options}}
    return {"make": None, "config": {"fp8stack": {"opt_level": level}, **described}}


def stepped(model):
    optimizer = make_adamw(model)
    model(torch.zeros(4, dtype=torch.long)).sum().backward()
    optimizer.step()
    return optimizer


def with_one_scale(model):
    return optim.AdamW([{"params": list(model.parameters()), "states": "fp8-lm"}], lr=1e-3)


def muon(model):
    return optim.Muon([p for p in model.parameters() if p.ndim > 1], lr=1e-3)


def rms(model):
    return torch.optim.RMSprop(model.parameters())


ZERO = {"zero_optimization": {"stage": 2}}
SECTIONS = (  # a section, words of the error, and what else the configuration has
    ({"opt_levle": "O2"}, "key='opt_levle' is not a choice. Did you mean \"opt_level\"", {}),
    ({"opt_level": "O7"}, "opt_level must be one of .*'O7'", {}),
    ({"fp8_format": "auto"}, "fp8_format must be one of .*'auto'", {}),
    ("O2", "must be an object", {}),
    ({"enabled": "yes"}, "enabled must be one of True, False", {}),
    ({"allow": "all"}, "allow.*must be a list", {}),
    ({"allow": ["everything"]}, "allow='everything' is not a choice", {}),
    ({"checkpoint_format": "universal"}, "checkpoint_format.*universal", {}),
    *(({rule.option: value}, f"{rule.option}={value!r} does not go with.*{re.escape(rule.reason)}", ZERO)
      for rule in conflicts.RULES if rule.option in OPTIONS
      for value in rule.values
      if {*rule.contexts} & {conflicts.DEEPSPEED, conflicts.ZERO, conflicts.ZERO_FLOAT32}
      and (rule.contexts, value) != ((conflicts.ZERO_FLOAT32,), "fp16")),  # which ZeRO itself refuses
    ({"opt_level": "O2"}, "zero_quantized_gradients",
     {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}),
)  # fmt: skip
ONE_SCALE = "states='fp8-lm' does not go with ZeRO.*one scale for a whole tensor"
BF16 = {"bf16": {"enabled": True}}
STEPPED = "states of 8 parameters.*would be lost"
GIVEN = (  # words of the error, its class, and what `refused` is told
    ("Lamb.*no low-precision counterpart", ConfigError, with_json("Lamb", lr=1e-3)),
    ("momentum.*does not fit AdamW", ConfigError, with_json("AdamW", momentum=0.9)),
    ("bias_correction.*corrects its bias", ConfigError, with_json("Adam", bias_correction=False)),
    ("OneBitAdam.*own-optimizer-paths", ConfigError, with_json("OneBitAdam", "O1")),
    ("O1.* was passed.*O2.*in one place", ConfigError, {"opt_level": "O1"}),
    ("RMSprop", ModelError, {"make": rms}),
    (STEPPED, ModelError, {"make": stepped, "config": BF16}),
    (STEPPED, ModelError, {"make": stepped, "config": ZERO}),
    ("Muon does not go with ZeRO.*all of a matrix", ModelError, {"make": muon, "config": ZERO}),
    (ONE_SCALE, ConfigError, {"make": with_one_scale, "config": ZERO}),
    (ONE_SCALE, ConfigError, {"make": with_one_scale, "config": configure(2, level="O1")}),
    (ONE_SCALE, ConfigError,
     {"config": configure(2, level="O2", section={"states_for": {"up": "fp8-lm"}})}),
)  # fmt: skip


def refuse(deepspeed, folder):
    """What cannot be: an error that names key, value and remedy, before anything is changed."""
    from deepspeed.pipe import PipelineModule

    for section, words, more in SECTIONS:
        refused(words, config={"fp8stack": section, **more})
    for words, error, options in GIVEN:
        refused(words, error, **options)
    version, deepspeed.__version__ = deepspeed.__version__, "0.18.2"
    refused(r"0\.18\.2 is older than 0\.18\.3")
    deepspeed.__version__ = version
    twice = Path(folder, "twice.json")
    twice.write_text('{"fp8stack": {"opt_level": "O1"}, "fp8stack": {"opt_level": "O2"}}')
    for config, words in ((twice, "Duplicate keys.*fp8stack"), ("nowhere.json", "neither a file")):
        with pytest.raises(ConfigError, match=words):
            fp8_deepspeed.initialize(model=build(), config=str(config))
    engine = start(configure(1, "bf16", "O2"))
    stages = PipelineModule([nn.Linear(64, 64)], num_stages=1)
    refused("PipelineModule.*pipeline", model=stages, config={"fp8stack": {"opt_level": "O1"}})
    refused("DeepSpeedEngine.* DeepSpeed: .*the bare model", ModelError, model=engine, make=None)
    refused("already converted by fp8stack", ModelError, model=engine.module)


def see_differences(deepspeed):
    """`verify` tells what is otherwise than asked for."""

    def differs(match, engine):
        with pytest.raises(ModelError, match=match):
            fp8_deepspeed.verify(engine)

    engine = start(configure(1, "bf16", "O2"))
    fp8_deepspeed.verify(engine)
    up = engine.module.up
    engine.module.up = nn.Linear(up.nx, up.nf)
    differs("up was converted and is an ordinary layer again", engine)
    engine.module.up = up
    engine.micro_steps = 1
    differs("1 batches have passed, and no gradient was reduced", engine)
    engine.micro_steps = 0
    engine.module.extra = nn.Parameter(torch.ones(2))
    differs("extra is trainable, and not stepped", engine)
    del engine.module.extra
    train(engine, 1, 0)
    next(iter(inner_of(engine).state.values()))["exp_avg"] = torch.zeros(2)
    differs("states of a partition of .* are not in 8bit", engine)
    del engine.optimizer.allreduce_bucket
    differs("allreduce_bucket does not reduce its gradients in FP8", engine)
    engine.optimizer.optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    differs("the optimizer is AdamW, not fp8stack's", engine)
    unread = engines.start_plain(deepspeed, configure(1, "bf16", "O2"))
    differs(r"nobody has read it.*install", unread)
    differs("was not made by fp8stack", engines.start_plain(deepspeed, configure(1, "bf16")))


# --- universal checkpoints

PORTABLE = ((1, "fp32"), (2, "bf16"), (3, "bf16"))


def evaluate(engine):
    """Return the loss on data that is the same on all ranks."""
    with torch.no_grad():
        return loss_of(engine, *next(batches(0, 9)))


def save_portable(rank, folder):
    """Train, save, and resume from portable states; return the losses to go on from."""
    engines.import_deepspeed()
    losses = []
    for stage, dtype in PORTABLE:
        config = configure(stage, dtype, "O2", section={"checkpoint_format": "portable"})
        engine, resumed = start(config), None
        train(engine, 8, rank)
        engine.save_checkpoint(f"{folder}/{stage}", tag="here")
        resumed = start(config)
        resumed.load_checkpoint(f"{folder}/{stage}", tag="here")
        after, again = train(engine, 3, rank, seed=2), train(resumed, 3, rank, seed=2)
        torch.testing.assert_close(again, after, rtol=1e-4, atol=0)
        engine.load_checkpoint(f"{folder}/{stage}", tag="here")
        losses.append(evaluate(engine).item())
    return losses


def load_universal(rank, folder, losses):
    """A universal checkpoint of another number of ranks goes on where it stopped."""
    engines.import_deepspeed()
    for (stage, dtype), expected in zip(PORTABLE, losses, strict=True):
        section = {"checkpoint_format": "portable"}
        universal = {"checkpoint": {"load_universal": True}}
        engine = start(configure(stage, dtype, "O2", section=section, **universal))
        engine.load_checkpoint(f"{folder}/{stage}", tag="universal")
        assert evaluate(engine).item() == pytest.approx(expected, rel=2e-3)
        inner = inner_of(engine)
        given = [e["exp_avg"].clone() for p, e in inner.state.items() if inner.quantizes(p)]
        assert given
        assert all(m.abs().max() > 0 for m in given)
        assert train(engine, 5, rank, seed=2)[-1] < expected + 0.1
        check_states(inner, low_master=dtype == "bf16")
        assert all(entry["step"] == 13 for entry in inner.state.values())
        fp8_deepspeed.verify(engine)


def convert_to_universal(rank, folder):
    """Run DeepSpeed's script for that."""
    from deepspeed.checkpoint.ds_to_universal import main, parse_arguments

    for stage, _ in PORTABLE:
        folders = ["--input_folder", f"{folder}/{stage}/here"]
        folders += ["--output_folder", f"{folder}/{stage}/universal", "--inject_missing_state"]
        sys.argv[1:] = [*folders, "--num_extract_workers=1", "--num_merge_workers=1"]
        main(parse_arguments())


def test_universal_checkpoints_change_the_number_of_ranks(tmp_path):
    losses = run_ranks(save_portable, 2, str(tmp_path))[0]
    run_ranks(convert_to_universal, 1, str(tmp_path), device=None)
    run_ranks(load_universal, 1, str(tmp_path), losses)
