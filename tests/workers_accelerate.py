"""What the tests of fp8stack.integrations.accelerate run in processes of their own: the real Accelerator, on CPUs."""

import os

import pytest
import torch
import workers_deepspeed
from helpers import TinyLM, assert_same_bits, batch
from torch.nn.parallel import DistributedDataParallel
from workers_comm import assert_equal_everywhere

import fp8stack
from fp8stack import comm, optim
from fp8stack.errors import ConfigError, Fp8StackWarning, ModelError
from fp8stack.integrations.accelerate import attach, prepare

PRECISIONS = ("no", "bf16")
STEPS = 20


def enter(rank, world, store):
    """Join a group of `world` ranks as launchers set it up."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    workers_deepspeed.enter(rank, world, store)


def driver(precision="no", **options):
    """Return a new Accelerator, which shares nothing with those before."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    os.environ["ACCELERATE_USE_CPU"] = str("deepspeed_plugin" not in options)
    return Accelerator(mixed_precision=precision, **options)


def sharded(accelerator, plugin):
    """Let an Accelerator shard, which it does on GPUs only, and return it: it then takes the same way on CPUs."""
    from accelerate.state import DistributedType, PartialState

    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def build(**options):
    torch.manual_seed(0)
    model = TinyLM(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)


def started(accelerator, level, **overrides):
    """Return model, optimizer and scheduler as prepared, at a level or, for None, without fp8stack."""
    if level is None:
        return accelerator.prepare(*build())
    return prepare(accelerator, *build(), opt_level=level, **overrides)


def train(accelerator, model, optimizer, scheduler, steps=STEPS, start=0):
    """Take steps of this process's batches, clipped; return the losses, on one process as on each of several."""
    losses = []
    for step in range(start, start + steps):
        with accelerator.accumulate(model):
            loss = model(*batch(step * accelerator.num_processes + accelerator.process_index))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach().float())
    return torch.stack(losses)


def assert_as_good(losses, plain):
    assert losses[-5:].mean() < 0.5 * losses[0]
    assert losses[-10:].mean() == pytest.approx(plain[-10:].mean().item(), rel=0.05)


def check_resume(folder, make):
    """What is saved in the middle goes on bit for bit where it is loaded, random numbers included."""
    accelerator, *own = make()
    train(accelerator, *own, steps=6)
    accelerator.save_state(folder)
    drawn, after = torch.rand(3), train(accelerator, *own, steps=6, start=6)
    accelerator, *again = make()
    train(accelerator, *again, steps=2)  # which loading undoes
    accelerator.load_state(folder)
    assert_same_bits(torch.rand(3), drawn)
    assert_same_bits(train(accelerator, *again, steps=6, start=6), after)
    assert again[2].get_last_lr() == own[2].get_last_lr() != [3e-3]
    for p, q in zip(own[0].parameters(), again[0].parameters(), strict=True):
        assert_same_bits(p.detach(), q.detach())
    return accelerator, again[0]


def check_one_process(rank, folder):
    """On one process: every level trains, clips, accumulates, saves, resumes; by hand it is the same."""
    for precision in PRECISIONS:
        accelerator = driver(precision, gradient_accumulation_steps=2)
        plain = train(accelerator, *started(accelerator, None))
        for level in ("O0", "O1", "O2"):

            def make(precision=precision, level=level):
                accelerator = driver(precision, gradient_accumulation_steps=2)
                return accelerator, *started(accelerator, level)

            accelerator, model, optimizer, scheduler = make()
            found = attach(accelerator, model)
            assert (found.level, found.wrapper, found.layers) == (level, "no wrapper", 3)
            assert type(optimizer.optimizer) is (torch if level == "O0" else fp8stack).optim.AdamW
            losses = train(accelerator, model, optimizer, scheduler)
            assert_as_good(losses, plain)
            accelerator, model = check_resume(f"{folder}/{precision}{level}", make)
    accelerator.save_model(model, f"{folder}/model")
    assert accelerator.unwrap_model(model) is model
    from safetensors.torch import load_file

    saved = load_file(f"{folder}/model/model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert_same_bits(saved[name], tensor)
    check_by_hand(losses)
    check_scaler(plain)
    check_big_models()
    check_refusals()
    os._exit(0)


def check_by_hand(expected):
    """`initialize`, `accelerator.prepare` and `attach` give what `prepare` gives (the last of the levels above)."""
    accelerator = driver("bf16", gradient_accumulation_steps=2)
    model, optimizer, scheduler = build()
    model, optimizer = fp8stack.initialize(model, optimizer, "O2")
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert attach(accelerator, model).level == "O2"
    assert_same_bits(train(accelerator, model, optimizer, scheduler), expected)


def check_scaler(plain):
    """float16's GradScaler: gradients are unscaled before they are clipped, and a bad step is skipped."""
    for level in ("O1", "O2"):
        accelerator = driver()
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        model, optimizer, scheduler = started(accelerator, level)
        losses = train(accelerator, model, optimizer, scheduler, steps=15)
        assert losses[-1] < 0.5 * losses[0]
        before = [p.detach().clone() for p in model.parameters()]
        accelerator.backward(model(*batch(0)) * torch.inf)
        optimizer.step()
        assert (
            not optimizer.step_was_skipped
        )  # it was decided on the device, as by torch's fused ones
        for p, old in zip(model.parameters(), before, strict=True):
            assert_same_bits(p.detach(), old)
        assert accelerator.scaler.get_scale() == 128.0


def check_big_models():
    """Layers whose forward is accelerate's, as those of dispatched models, are left alone."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    accelerator = driver()
    model, optimizer, scheduler = build()
    add_hook_to_module(model.head, ModelHook())
    own = prepare(accelerator, model, optimizer, scheduler, opt_level="O2")
    assert "forward" in fp8stack.get_report(model).skipped["head"]
    losses = train(accelerator, *own)
    assert losses[-1] < 0.5 * losses[0]


def check_refusals():
    """An error that says what to do, before the model is touched."""
    from accelerate.utils import AORecipeKwargs, FullyShardedDataParallelPlugin, MSAMPRecipeKwargs

    def refused(match, error=ConfigError, accelerator=None, **options):
        model, optimizer, scheduler = build()
        before = [type(m) for m in model.modules()]
        with pytest.raises(error, match=match):
            prepare(accelerator or driver(), model, optimizer, scheduler, **options)
        assert [type(m) for m in model.modules()] == before
        assert all(p.dtype is torch.float32 for p in model.parameters())

    refused("opt_level must be one of .*'02'", opt_level="02")
    refused("master_dtype", master_dtype="fp16")
    refused("must be an accelerate.Accelerator, got Linear", accelerator=torch.nn.Linear(2, 2))
    fp8 = driver("fp8", kwargs_handlers=[AORecipeKwargs()])
    refused("has AO convert the same layers.*bf16", accelerator=fp8)
    fp8 = driver("fp8", kwargs_handlers=[MSAMPRecipeKwargs()])
    refused("has MSAMP convert the same layers", accelerator=fp8)
    fsdp1 = sharded(driver(), FullyShardedDataParallelPlugin(fsdp_version=1))
    refused("runs FSDP: FSDP1 joins.*fsdp_version=2", accelerator=fsdp1)

    # accelerator.prepare itself fails: the model is given back as it was
    accelerator, (model, optimizer, _) = driver(), build()
    unreadable = torch.utils.data.DataLoader.__new__(torch.utils.data.DataLoader)
    with pytest.raises(AttributeError):
        prepare(accelerator, model, optimizer, unreadable)
    assert type(model.up) is torch.nn.Linear

    accelerator = driver()
    with pytest.raises(ModelError, match="TinyLM was not prepared"):
        attach(accelerator, build()[0])
    model, optimizer, _ = started(accelerator, None)
    with pytest.raises(ModelError, match="was not initialized"):
        attach(accelerator, model)
    with pytest.raises(ModelError, match=r"prepared already.*bare model"):
        prepare(accelerator, model, optimizer)
    model, _, _ = started(accelerator, "O2")
    model.up = torch.nn.Linear(128, 256)
    with pytest.raises(ModelError, match="up was converted and is an ordinary layer again"):
        attach(accelerator, model)


# --- two processes


def check_two_processes(rank, world, store, folder):
    """DDP, FSDP2 and DeepSpeed: trained on two processes, reduced in FP8, saved and resumed."""
    enter(rank, world, store)
    check_ddp(folder)
    check_fsdp2(folder)
    check_deepspeed(folder)
    workers_deepspeed.leave()


def check_ddp(folder):
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    for precision in PRECISIONS:
        accelerator = driver(precision, gradient_accumulation_steps=2)
        plain = train(accelerator, *started(accelerator, None))
        for level in ("O0", "O1", "O2"):

            def make(precision=precision, level=level):
                accelerator = driver(precision, gradient_accumulation_steps=2)
                return accelerator, *started(accelerator, level)

            accelerator, model, optimizer, scheduler = make()
            assert type(model) is DistributedDataParallel
            with comm.Statistics() as statistics:
                assert_as_good(train(accelerator, model, optimizer, scheduler), plain)
            assert bool(statistics.collect()) == (level != "O0")
            for p in model.parameters():
                assert_equal_everywhere(p.detach())
            if precision == "bf16":
                check_resume(f"{folder}/ddp{level}", make)
    with pytest.raises(ModelError, match=r"one communication hook.*call attach once"):
        attach(accelerator, model)
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator = driver(kwargs_handlers=[handler])
    with pytest.raises(ModelError, match="leave comm_hook out"):
        started(accelerator, "O1")


def check_fsdp2(folder):
    from accelerate.utils import FullyShardedDataParallelPlugin

    def make(level, precision="bf16"):
        accelerator = driver(precision)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="size_based_wrap",
            min_num_params=1,
            state_dict_type="SHARDED_STATE_DICT",
        )
        if precision != "no":
            plugin.set_mixed_precision(precision)
        sharded(accelerator, plugin)
        return accelerator, *started(accelerator, level)

    accelerator, *own = make(None)
    plain = train(accelerator, *own)
    for level in ("O0", "O1", "O2"):
        accelerator, *own = make(level)
        found = attach(accelerator, own[0])
        assert (found.wrapper, found.fp8_reduction) == ("FSDP2", level != "O0")
        assert isinstance(own[1].optimizer, optim.AdamW) == (level == "O2")
        assert_as_good(train(accelerator, *own), plain)
    check_resume(f"{folder}/fsdp", lambda: make("O2"))
    with pytest.warns(Fp8StackWarning, match="no compute dtype"):
        make("O2", "no")


def check_deepspeed(folder):
    import deepspeed
    from accelerate.utils import DeepSpeedPlugin

    def make(stage, level=None, section=None, offload=False, **overrides):
        zero = {"stage": stage}
        if offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 4}
        config |= {} if section is None else {"fp8stack": section}
        plugin = DeepSpeedPlugin(hf_ds_config={**config, "bf16": {"enabled": True}})
        accelerator = driver("bf16", deepspeed_plugin=plugin)
        if level is None and section is None:
            return accelerator, *accelerator.prepare(*build())
        return accelerator, *prepare(accelerator, *build(), opt_level=level, **overrides)

    original = deepspeed.initialize
    for stage in (2, 3):
        accelerator, *own = make(stage)
        plain = train(accelerator, *own)
        accelerator, *own = make(stage, "O2")
        found = attach(accelerator, own[0])
        assert (found.level, found.wrapper) == ("O2", f"DeepSpeed ZeRO-{stage}")
        assert found.fp8_reduction
        losses = train(accelerator, *own)
        assert_as_good(losses, plain)
        assert "fp8stack" not in accelerator.state.deepspeed_plugin.deepspeed_config
        accelerator, *own = make(stage, section={"opt_level": "O2"})
        assert_same_bits(train(accelerator, *own), losses)
    accelerator, *own = make(2, "O2", offload=True)
    assert type(own[1].optimizer.optimizer) is optim.AdamW, "not DeepSpeedCPUAdam"
    check_resume(f"{folder}/zero", lambda: make(2, "O2"))
    with pytest.raises(ConfigError, match=r"O1.*was passed.*one place"):
        make(2, "O1", section={"opt_level": "O2"})
    with pytest.raises(ConfigError, match=r"\['skip'\] were passed.*one place"):
        make(2, section={"opt_level": "O2"}, skip=["*head"])
    with pytest.raises(ConfigError, match=r"no key 'stats'.*states"):
        make(2, "O2", stats="8bit")
    assert deepspeed.initialize is original
    accelerator, model, *_ = make(2)
    with pytest.raises(ModelError, match="was not made by fp8stack"):
        attach(accelerator, model)


def check_gpu(rank):
    """On a GPU: `prepare` moves the model before it chooses layers; by hand that is said where it was forgotten."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    own = prepare(accelerator, *build(), opt_level="O2")
    assert not fp8stack.get_report(own[0]).device.startswith("CPU")
    assert all(p.is_cuda for p in own[0].parameters())
    losses = []
    for step in range(STEPS):
        loss = own[0](*(t.cuda() for t in batch(step)))
        accelerator.backward(loss)
        own[1].step()
        own[1].zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    model, optimizer, _ = build()
    model, optimizer = fp8stack.initialize(model, optimizer, "O0")
    model, optimizer = accelerator.prepare(model, optimizer)
    with pytest.raises(ModelError, match=r"initialized on the CPU.*model.to\(device\)"):
        attach(accelerator, model)
    os._exit(0)


def check_launchers(rank):
    """What notebooks call, cell after cell: each launch trains at its level, in this process or in two."""
    from accelerate import debug_launcher, notebook_launcher

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for level in ("O1", "O2", None):
        notebook_launcher(train_in_a_cell, (level,), num_processes=1)
    debug_launcher(train_in_a_cell, ("O2",), num_processes=2)


def train_in_a_cell(level):
    accelerator = driver()
    model, optimizer, scheduler = started(accelerator, level)
    losses = train(accelerator, model, optimizer, scheduler)
    assert losses[-5:].mean() < 0.8 * losses[:5].mean()
    held = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
    assert any(x.element_size() == 1 for x in held) == (level == "O2")
    if accelerator.num_processes > 1:
        assert_equal_everywhere(next(model.parameters()))
