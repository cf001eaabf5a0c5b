"""What the tests of fp8stack.integrations.deepspeed run in processes of their own: the real engine on CPUs."""

import copy
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from torch import nn
from workers_deepspeed import enter, inner_of, leave

from fp8stack import optim
from fp8stack.errors import ConfigError, ModelError
from fp8stack.integrations import deepspeed as fp8_deepspeed
from fp8stack.nn import Fp8Linear

VOCABULARY = 64
STEPS = 40


class Bigrams(nn.Module):
    """Predicts the next of 64 tokens: an embedding, a norm, an MLP and a head, which may be the embedding's weight."""

    def __init__(self, width=64, tied=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return self.head(self.norm(x)).float()


def build(**options):
    torch.manual_seed(0)
    return Bigrams(**options)


def configure(stage=0, dtype="fp32", level=None, zero=None, section=None, **more):
    config = {"train_micro_batch_size_per_gpu": 8, **more}
    if stage:
        config["zero_optimization"] = {"stage": stage, **(zero or {})}
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {})}
    if level is not None:
        config["fp8stack"] = {"opt_level": level, **(section or {})}
    return config


def make_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def start(config, model=None, **more):
    """Return an engine of the config's level."""
    model = build() if model is None else model
    if "optimizer" not in config and "optimizer" not in more:
        more["optimizer"] = make_adamw(model)
    return fp8_deepspeed.initialize(model=model, config=config, **more)[0]


def start_plain(deepspeed, config):
    model = build()
    config = {**config, "zero_allow_untested_optimizer": True}
    return deepspeed.initialize(model=model, optimizer=make_adamw(model), config=config)[0]


def batches(rank, seed):
    """Yield (tokens, next tokens) of a Markov chain, other ones on each rank."""
    likely = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    table = likely.softmax(-1)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    while True:
        tokens = torch.randint(VOCABULARY, (8 * 16,), generator=generator)
        yield tokens, torch.multinomial(table[tokens], 1, generator=generator).view(-1)


def train(engine, steps, rank, seed=1, accumulation=1):
    """Return the losses of some steps, the mean over ranks."""
    losses = []
    for batch in itertools.islice(batches(rank, seed), steps * accumulation):
        tokens, following = (t.to(engine.device) for t in batch)
        loss = nn.functional.cross_entropy(engine(tokens), following)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def learns(losses):
    return losses[-5:].mean() < losses[:5].mean() - 0.3


def same_on_all_ranks(engine):
    """Assert that the weights have the same bits on all ranks (of ZeRO-3: that nobody can tell)."""
    for p in engine.module.parameters():
        mine = p.detach().float()
        other = mine.clone()
        dist.broadcast(other, 0)
        assert_same_bits(mine, other)


def check_matrix(rank, world, store, stage, folder):
    """Every level trains as the engine does without it, is what it says, and resumes bit for bit."""
    deepspeed = enter(rank, world, store)
    for dtype in ("fp32", "bf16"):
        expected = train(start_plain(deepspeed, configure(stage, dtype)), STEPS, rank)
        for level in ("O0", "O1", "O2"):
            engine = start(configure(stage, dtype, level))
            losses = train(engine, STEPS, rank)
            assert losses[-10:].mean() < 0.8 * losses[0]
            assert abs(losses[-10:].mean() / expected[-10:].mean() - 1) < 0.02
            found = fp8_deepspeed.verify(engine)
            assert (found.level, found.stage, found.layers) == (level, stage, 3)
            assert bool(found.reduction) == (level != "O0")
            assert found.reduced >= STEPS * (level != "O0")
            inner = inner_of(engine)
            assert isinstance(inner, optim.AdamW) == (level == "O2")
            if level == "O2":
                check_states(inner, low_master=bool(stage) and dtype == "bf16")
            if stage < 3:
                same_on_all_ranks(engine)
            place = f"{folder}/{level}{dtype}"
            engine.save_checkpoint(place, tag="here")
            after = train(engine, 3, rank, seed=2)
            again = start(configure(stage, dtype, level))
            again.load_checkpoint(place, tag="here")
            assert_same_bits(train(again, 3, rank, seed=2), after)
    leave()


def check_states(inner, low_master):
    """8-bit moments of matrices, and 8 bits beside bfloat16 partitions; vectors keep float32."""
    large = [e for p, e in inner.state.items() if inner.quantizes(p)]
    assert large
    for entry in large:
        assert entry["exp_avg_code"].dtype is entry["exp_avg_sq_code"].dtype is torch.uint8
        assert ("remainder" in entry) == low_master
    numel = sum(e["exp_avg_code"].numel() for e in large)
    nbytes = sum(t.nbytes for e in large for t in e.values())
    # a row's last block may be short
    assert nbytes <= (3.1 if low_master else 2.1) * numel + 100 * len(large)
    small = [e for p, e in inner.state.items() if not inner.quantizes(p)]
    assert all(e["exp_avg"].dtype is torch.float32 for e in small)


def check_ways_in(rank, world, store):
    """Arguments of deepspeed.initialize, files, the JSON's optimizer, install(), schedulers."""
    deepspeed = enter(rank, world, store)
    config = configure(2, "bf16", "O2")
    expected = train(start(config), 5, rank)
    untouched = copy.deepcopy(config)

    path = f"{store}.{rank}.json"
    with open(path, "w") as file:
        json.dump(config, file)
    model = build()
    arguments = SimpleNamespace(deepspeed_config=path, local_rank=0)
    engine = fp8_deepspeed.initialize(arguments, model, make_adamw(model))[0]
    assert_same_bits(train(engine, 5, rank), expected)
    assert arguments.deepspeed_config == path

    def build_one(parameters):
        return torch.optim.AdamW(parameters, lr=3e-3)

    assert_same_bits(train(start(config, optimizer=build_one), 5, rank), expected)
    for described in (
        {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.999], "weight_decay": 0.01}},
        {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True, "weight_decay": 0.01}},
        {"type": "FP8AdamW", "params": {"lr": 3e-3}},
    ):
        engine = start({**config, "optimizer": described})
        assert type(inner_of(engine)) is optim.AdamW
        assert_same_bits(train(engine, 5, rank), expected)
    model = build()
    given = optim.AdamW(model.parameters(), lr=3e-3)
    assert_same_bits(train(start(config, model, optimizer=given), 5, rank), expected)
    for described in ({"type": "FP8AdamW", "params": {"lr": 3e-3}}, None):
        model = build()  # float32 partitions: the optimizer needs no masters
        mine = None if described else optim.AdamW(model.parameters(), lr=3e-3, states="4bit")
        wide = configure(2, "fp32", "O2") | ({"optimizer": described} if described else {})
        engine = start(wide, model, optimizer=mine)
        train(engine, 2, rank)
        assert inner_of(engine).states == ("8bit" if described else "4bit")
        fp8_deepspeed.verify(engine)
    assert config == untouched

    plain = deepspeed.initialize
    with fp8_deepspeed.install():
        fp8_deepspeed.install()
        model = build()
        engine = deepspeed.initialize(
            model=model, optimizer=make_adamw(model), config_params=config
        )[0]
        assert_same_bits(train(engine, 5, rank), expected)
        # without the section, and with one that is not enabled, all is DeepSpeed's
        for section in (None, {"enabled": False}):
            other = configure(1, "bf16", zero_allow_untested_optimizer=True)
            other |= {} if section is None else {"fp8stack": section}
            model = build()
            engine = deepspeed.initialize(model=model, optimizer=make_adamw(model), config=other)[0]
            assert type(inner_of(engine)) is torch.optim.AdamW
            assert not any(isinstance(m, Fp8Linear) for m in model.modules())
        # 8-bit states alone
        described = {"type": "FP8AdamW", "params": {"lr": 3e-3}}
        model = build()
        engine = deepspeed.initialize(model=model, config=configure(2, optimizer=described))[0]
        train(engine, 5, rank)
        check_states(inner_of(engine), low_master=False)
        assert not any(isinstance(m, Fp8Linear) for m in model.modules())
    assert deepspeed.initialize is plain
    check_schedulers(config, rank)
    leave()


def check_schedulers(config, rank):
    """Schedulers drive every group: those made before, those that a function makes, and the JSON's."""

    def halve(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    model = build()
    optimizer = make_adamw(model)
    before = halve(optimizer)
    for scheduler in (before, halve):
        if scheduler is not before:
            model, optimizer = build(), None
        given = make_adamw(model) if optimizer is None else optimizer
        engine = start(config, model, optimizer=given, lr_scheduler=scheduler)
        train(engine, 2, rank)
        rates = {group["lr"] for group in inner_of(engine).param_groups}
        assert rates == {3e-3 / 4}
        assert len(inner_of(engine).param_groups) == (1 if scheduler is before else 3)
    described = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 2}}
    engine = start({**config, "scheduler": described})
    train(engine, 4, rank)
    assert {group["lr"] for group in inner_of(engine).param_groups} == {1e-2}


def check_zero_variants(rank, world, store):
    """zero.Init, ties, offload, accumulation, clipping, skipped steps of fp16, sums in float32, sub-groups."""
    deepspeed = enter(rank, world, store)
    config = configure(3, "bf16", "O2", zero={"stage3_param_persistence_threshold": 0})
    expected = train(start(config), 20, rank)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Bigrams()
    assert model.up.weight.shape == (0,)
    engine = start(config, model)
    assert engine.module.up.products.weights.keep == "off"
    losses = train(engine, 20, rank)
    assert fp8_deepspeed.verify(engine).layers == 3
    # initialized under zero.Init: other random numbers on other shapes, the same task
    assert abs(losses[-5:].mean() / expected[-5:].mean() - 1) < 0.05

    for stage in (1, 2, 3):
        model = build(tied=True)
        engine = start(configure(stage, "bf16", "O2"), model)
        assert learns(train(engine, 20, rank))
        assert engine.module.head.weight is engine.module.embed.weight
        fp8_deepspeed.verify(engine)

        offload = {"offload_optimizer": {"device": "cpu"}}
        engine = start(configure(stage, "bf16", "O2", zero=offload))
        assert learns(train(engine, 20, rank))
        check_states(inner_of(engine), low_master=False)

        for more in (
            {"reduce_scatter": False},
            {"sub_group_size": 9000, "reduce_bucket_size": 5000},
        ):
            several = {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
            engine = start(configure(stage, "bf16", "O2", zero=more, **several))
            assert learns(train(engine, 20, rank, accumulation=2))
            assert fp8_deepspeed.verify(engine).reduced
            assert all(entry["step"] == 20 for entry in inner_of(engine).state.values())

    wide = {"data_types": {"grad_accum_dtype": "fp32"}}  # BF16_Optimizer
    engine = start(configure(1, "bf16", "O2", **wide))
    assert type(engine.optimizer).__name__ == "BF16_Optimizer"
    assert learns(train(engine, 20, rank))
    assert fp8_deepspeed.verify(engine).reduced
    check_states(inner_of(engine), low_master=False)

    from deepspeed.accelerator import get_accelerator

    if get_accelerator().is_fp16_supported():  # not by every CPU
        check_overflow(rank)
    leave()


def check_overflow(rank):
    """A loss too large for float16 skips the step, on all ranks."""
    for stage in (0, 2, 3):
        engine = start(configure(stage, "fp16", "O2"))
        train(engine, 3, rank)
        steps = [float(entry["step"]) for entry in inner_of(engine).state.values()]
        assert steps == [3.0] * len(steps)
        tokens, following = (t.to(engine.device) for t in next(batches(rank, 1)))
        loss = nn.functional.cross_entropy(engine(tokens), following)
        engine.backward(loss * (torch.inf if rank == 0 else 1.0))
        engine.step()
        assert [float(e["step"]) for e in inner_of(engine).state.values()] == steps
        train(engine, 2, rank)
        assert [float(e["step"]) for e in inner_of(engine).state.values()] == [5.0] * len(steps)


def check_gpus(rank, world, store, compute):
    """On GPUs: every stage and dtype trains at O2, states are what they should be, and FP8 alone is the same in all."""
    deepspeed = enter(rank, world, store, "cuda")
    for dtype in ("fp32", "bf16", "fp16"):
        alone = []
        for stage in (0, 1, 2, 3):
            engine = start(configure(stage, dtype, "O0", section={"compute": compute}))
            alone.append(train(engine, 10, rank))
            assert fp8_deepspeed.verify(engine).layers == 3
            expected = train(start_plain(deepspeed, configure(stage, dtype)), 60, rank)
            engine = start(configure(stage, dtype, "O2", section={"compute": compute}))
            losses = train(engine, 60, rank)
            assert abs(losses[-10:].mean() / expected[-10:].mean() - 1) < 0.02
            assert fp8_deepspeed.verify(engine).reduced
            assert engine.fp8stack.report.compute == compute
            check_states(inner_of(engine), low_master=bool(stage) and dtype == "bf16")
            if stage < 3:
                same_on_all_ranks(engine)
        # stage 0 adds up in another order and rounds to 16 bits at other places, which flips codes of FP8
        for other in alone[1:]:
            torch.testing.assert_close(other, alone[1], rtol=1e-3, atol=0)
        torch.testing.assert_close(alone[0], alone[1], rtol=2e-2, atol=0)
    if compute == "native":
        check_overflow(rank)
    leave()


def check_portable_checkpoints(rank, world, store, folder, save):
    """A universal checkpoint of another number of ranks goes on where it stopped; portable states resume, too."""
    enter(rank, world, store)
    for stage, dtype in ((1, "fp32"), (2, "bf16"), (3, "bf16")):
        place = f"{folder}/{stage}"
        section = {"checkpoint_format": "portable"}
        if save:
            engine = start(configure(stage, dtype, "O2", section=section))
            train(engine, 20, rank)
            engine.save_checkpoint(place, tag="here")
            resumed = start(configure(stage, dtype, "O2", section=section))
            resumed.load_checkpoint(place, tag="here")
            after, again = train(engine, 3, rank, seed=2), train(resumed, 3, rank, seed=2)
            torch.testing.assert_close(again, after, rtol=1e-4, atol=0)
            engine.load_checkpoint(place, tag="here")
            loss = evaluate(engine)
            if rank == 0:
                torch.save(loss, f"{place}.loss")
            continue
        config = configure(stage, dtype, "O2", section=section, checkpoint={"load_universal": True})
        engine = start(config)
        engine.load_checkpoint(place, tag="universal")
        expected = torch.load(f"{place}.loss")
        torch.testing.assert_close(evaluate(engine), expected, rtol=2e-3, atol=0)
        inner = inner_of(engine)
        given = [e["exp_avg"].clone() for p, e in inner.state.items() if inner.quantizes(p)]
        assert given
        assert all(m.abs().max() > 0 for m in given)
        assert train(engine, 5, rank, seed=2)[-1] < expected + 0.1
        check_states(inner, low_master=dtype == "bf16")
        assert all(entry["step"] == 25 for entry in inner.state.values())
        fp8_deepspeed.verify(engine)
    leave()


def evaluate(engine):
    """Return the loss on data that is the same on all ranks."""
    tokens, following = (t.to(engine.device) for t in next(batches(0, 9)))
    with torch.no_grad():
        return nn.functional.cross_entropy(engine(tokens), following)


def check_refusals(rank, world, store):
    """What cannot be: an error that names key, value and remedy, before the model is touched."""
    deepspeed = enter(rank, world, store)
    from deepspeed.pipe import PipelineModule

    def refused(match, config, error=ConfigError, model=None, optimizer=make_adamw, **more):
        model = build() if model is None else model
        given = optimizer(model) if optimizer is make_adamw else optimizer
        config = {"train_micro_batch_size_per_gpu": 8, "fp8stack": {"opt_level": "O2"}, **config}
        before, classes = copy.deepcopy(config), [type(m) for m in model.modules()]
        groups = None if given is None else len(given.param_groups)
        with pytest.raises(error, match=match):
            fp8_deepspeed.initialize(model=model, optimizer=given, config=config, **more)
        assert config == before
        assert [type(m) for m in model.modules()] == classes
        assert given is None or len(given.param_groups) == groups

    def section(**keys):
        return {"fp8stack": keys}

    refused("no key 'opt_levle'. Did you mean \"opt_level\"", section(opt_levle="O2"))
    refused("no key 'gradient'. Did you mean \"gradients\"", section(gradient="fp8"))
    refused("opt_level must be one of .*'O7'", section(opt_level="O7"))
    refused('"compute": "auto".*nobody fills in', section(compute="auto"))
    refused("must be an object", {"fp8stack": "O2"})
    refused("must be an object", {"fp8stack": None})
    refused("must be true or false", section(enabled="yes"))
    refused("allow.*must be a list", section(allow="all"))
    refused("no known incompatibility is called", section(allow=["everything"]))
    refused("checkpoint_format.*universal", section(checkpoint_format="universal"))
    refused("O1.* was passed.*O2.*in one place", section(opt_level="O2"), opt_level="O1")
    zero = {"zero_optimization": {"stage": 2}}
    refused("one scale for a whole tensor", {**section(preset="fp8-lm"), **zero})
    refused("engine steps", section(step_in_backward=True))
    refused("needs bfloat16 partitions", {**section(master="split24"), **zero})
    refused("own optimizers", section(optimizer_backend="bitsandbytes"))
    lamb = {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}
    refused("Lamb.*no low-precision counterpart", lamb, optimizer=None)
    odd = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "momentum": 0.9}}}
    refused("momentum.*does not fit AdamW", odd, optimizer=None)
    one_bit = {"optimizer": {"type": "OneBitAdam", "params": {}}, **section(opt_level="O1")}
    refused("OneBitAdam.*own-optimizer-paths", one_bit, optimizer=None)
    refused(
        "zero_quantized_gradients",
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
    )
    refused("amp", {"amp": {"enabled": True}})

    version, deepspeed.__version__ = deepspeed.__version__, "0.17.6"
    refused("0.17.6 is older than 0.18", {})
    deepspeed.__version__ = version

    class Other(torch.optim.AdamW):
        pass

    model = build()
    refused("Other", {}, error=ModelError, model=model, optimizer=Other(model.parameters()))
    # what only DeepSpeed finds leaves a model as it was
    refused("accumulation steps", {"train_batch_size": 7}, error=AssertionError)

    twice = f"{store}.json"
    with open(twice, "w") as file:
        file.write('{"fp8stack": {"opt_level": "O1"}, "fp8stack": {"opt_level": "O2"}}')
    with pytest.raises(ConfigError, match=r"Duplicate keys.*fp8stack"):
        fp8_deepspeed.initialize(model=build(), config=twice)
    with pytest.raises(ConfigError, match="is neither a file nor JSON"):
        fp8_deepspeed.initialize(model=build(), config="nowhere.json")
    engine = start(configure(1, "bf16", "O2"))
    stages = PipelineModule([nn.Linear(64, 64)], num_stages=1)
    refused("PipelineModule.*pipeline", section(opt_level="O1"), model=stages)
    with pytest.raises(ModelError, match="is a DeepSpeedEngine already"):
        fp8_deepspeed.initialize(model=engine, config=configure(1, "bf16", "O2"))
    with pytest.raises(ModelError, match="already converted by fp8stack"):
        start(configure(1, "bf16", "O2"), engine.module)
    check_verification(deepspeed, engine)
    leave()


def check_verification(deepspeed, engine):
    """`verify` tells what is otherwise than asked for."""
    fp8_deepspeed.verify(engine)
    up = engine.module.up
    engine.module.up = nn.Linear(up.in_features, up.out_features)
    with pytest.raises(ModelError, match="up was converted and is an ordinary layer again"):
        fp8_deepspeed.verify(engine)
    engine.module.up = up
    engine.micro_steps = 1
    with pytest.raises(ModelError, match="1 batches have passed, and no gradient was reduced"):
        fp8_deepspeed.verify(engine)
    engine.micro_steps = 0
    del engine.optimizer.allreduce_bucket
    with pytest.raises(ModelError, match="allreduce_bucket does not reduce its gradients in FP8"):
        fp8_deepspeed.verify(engine)
    engine.optimizer.optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(ModelError, match="the optimizer is AdamW, not fp8stack's"):
        fp8_deepspeed.verify(engine)
    unread = start_plain(deepspeed, configure(1, "bf16", "O2"))
    with pytest.raises(ModelError, match=r"nobody has read it.*install"):
        fp8_deepspeed.verify(unread)
    with pytest.raises(ModelError, match="was not made by fp8stack"):
        fp8_deepspeed.verify(start_plain(deepspeed, configure(1, "bf16")))
