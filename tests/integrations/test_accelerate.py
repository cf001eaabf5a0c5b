"""fp8stack.integrations.accelerate: the real Accelerator on CPUs, as real processes."""

import os

import engines
import helpers
import pytest
import torch
from helpers import assert_same_bits, batch, run_python
from ranks import assert_same_on_all_ranks, run_ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import fp8stack
from fp8stack import comm, optim
from fp8stack.errors import ConfigError, ModelError
from fp8stack.integrations.accelerate import attach, prepare

pytest.importorskip("accelerate")

STEPS = 20


def driver(precision="no", **options):
    """Return a new Accelerator, which shares nothing with those before."""
    from accelerate import Accelerator

    engines.forget_accelerators()
    os.environ["ACCELERATE_USE_CPU"] = str("deepspeed_plugin" not in options)
    return Accelerator(mixed_precision=precision, **options)


def build(kind=torch.optim.AdamW):
    model, optimizer = helpers.build(optimizer=kind)
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


def learns(losses):
    return losses[-5:].mean() < 0.5 * losses[0]


def resume(folder, make):
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
    assert_same_bits(own[0].parameters(), again[0].parameters())
    return accelerator, again[0]


def at_every_level(wrapper, folder):
    """Train at every level, as `initialize`, `accelerator.prepare` and `attach` do by hand, and resume."""
    for level, precision in (("O0", "bf16"), ("O1", "no"), ("O2", "bf16")):

        def make(by_hand=False, level=level, precision=precision):
            accelerator = driver(precision, gradient_accumulation_steps=2)
            if not by_hand:
                return accelerator, *started(accelerator, level)
            model, optimizer, scheduler = build()
            model, optimizer = fp8stack.initialize(model, optimizer, level)
            own = accelerator.prepare(model, optimizer, scheduler)
            assert attach(accelerator, own[0]).level == level
            return accelerator, *own

        accelerator, model, optimizer, scheduler = make()
        assert (type(model) is DistributedDataParallel) == (wrapper == "DistributedDataParallel")
        if wrapper == "no wrapper":
            found = attach(accelerator, model)
            assert (found.level, found.wrapper, found.layers) == (level, wrapper, 3)
        assert type(optimizer.optimizer) is (torch if level == "O0" else fp8stack).optim.AdamW
        with comm.Statistics() as statistics:
            losses = train(accelerator, model, optimizer, scheduler)
        assert learns(losses)
        assert bool(statistics.collect()) == (level != "O0" and accelerator.num_processes > 1)
        if accelerator.num_processes > 1:
            assert_same_on_all_ranks(model)
        assert_same_bits(train(*make(by_hand=True)), losses)
        accelerator, model = resume(f"{folder}/{wrapper}{level}", make)
    return accelerator, model


# --- one process


def use_one_process(rank, folder):
    """On one process: every level trains, clips, accumulates, saves and resumes."""
    engines.forget_launch()
    accelerator, model = at_every_level("no wrapper", folder)
    accelerator.save_model(model, f"{folder}/model")
    assert accelerator.unwrap_model(model) is model
    from safetensors.torch import load_file

    saved = load_file(f"{folder}/model/model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert_same_bits(saved[name], tensor)
    scale_losses()
    refuse()


def scale_losses():
    """float16's GradScaler: gradients are unscaled before they are clipped, and a bad step is skipped."""
    accelerator = driver()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    model, optimizer, scheduler = started(accelerator, "O2")
    assert learns(train(accelerator, model, optimizer, scheduler))
    before = [p.detach().clone() for p in model.parameters()]
    accelerator.backward(model(*batch(0)) * torch.inf)
    optimizer.step()
    assert not optimizer.step_was_skipped  # it was decided on the device, as by torch's fused ones
    assert_same_bits(model.parameters(), before)
    assert accelerator.scaler.get_scale() == 128.0


def refuse():
    """An error that says what to do, before the model is touched."""
    from accelerate.utils import AORecipeKwargs

    for words, make, options in (
        ("opt_level must be one of .*'02'", driver, {"opt_level": "02"}),
        ("master_dtype", driver, {"master_dtype": "fp16"}),
        ("must be an accelerate.Accelerator, got Linear", lambda: torch.nn.Linear(2, 2), {}),
        ("has AO convert the same layers.*bf16",
         lambda: driver("fp8", kwargs_handlers=[AORecipeKwargs()]), {}),
        ("FSDP.* does not go with Accelerate: FSDP1.*fsdp_version=2", lambda: engines.let_shard(driver("bf16"), 1), {}),
    ):  # fmt: skip
        model, optimizer, scheduler = build()
        before = [type(m) for m in model.modules()]
        with pytest.raises(ConfigError, match=words):
            prepare(make(), model, optimizer, scheduler, **options)
        assert [type(m) for m in model.modules()] == before
        assert all(p.dtype is torch.float32 for p in model.parameters())

    # accelerator.prepare itself fails: the model is given back as it was
    accelerator, (model, optimizer, _) = driver(), build()
    unreadable = torch.utils.data.DataLoader.__new__(torch.utils.data.DataLoader)
    with pytest.raises(AttributeError):
        prepare(accelerator, model, optimizer, unreadable)
    assert type(model.up) is torch.nn.Linear

    accelerator = driver()
    bare, optimizer, _ = started(accelerator, None)
    changed = started(accelerator, "O2")[0]
    changed.up = checkpoint_wrapper(changed.up)
    assert attach(accelerator, changed).layers == 3  # a layer that was wrapped since is still there
    changed.down = torch.nn.Linear(256, 128)
    for words, model in (
        ("TinyLM was not prepared", build()[0]),
        ("was not initialized", bare),
        ("down was converted and is an ordinary layer again", changed),
    ):
        with pytest.raises(ModelError, match=words):
            attach(accelerator, model)
    with pytest.raises(ModelError, match=r"prepared already.*bare model"):
        prepare(accelerator, bare, optimizer)


@pytest.mark.slow
def test_one_process(tmp_path):
    run_ranks(use_one_process, 1, str(tmp_path), device=None)


ALONE = """
import sys
sys.modules |= dict.fromkeys(("accelerate", "transformers", "deepspeed", "lightning", "pytorch_lightning"))
from fp8stack.integrations.accelerate import attach
from fp8stack.integrations.transformers import fp8_trainer
def lightning():
    import fp8stack.integrations.lightning
for call in (lambda: attach(None, None), lambda: fp8_trainer(None, "O2"), lightning):
    try:
        call()
    except (ValueError, ImportError) as error:
        print(error)
"""


def test_errors_say_how_to_install_a_library():
    result = run_python("-c", ALONE)
    assert result.returncode == 0, result.stderr
    for name in ("accelerate", "transformers", "lightning"):
        assert f"'fp8stack[{name}]'" in result.stdout


# --- two processes


def use_two_processes(rank, folder):
    """DDP, FSDP2 and DeepSpeed: trained on two processes, reduced in FP8; the Trainer's tests resume the last two."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    deepspeed = engines.import_deepspeed()
    use_ddp(folder)
    use_fsdp2()
    use_deepspeed(deepspeed)


def use_ddp(folder):
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    accelerator, model = at_every_level("DistributedDataParallel", folder)
    with pytest.raises(ModelError, match=r"one communication hook.*call attach once"):
        attach(accelerator, model)
    handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    accelerator = driver(kwargs_handlers=[handler])
    with pytest.raises(ModelError, match="leave comm_hook out"):
        started(accelerator, "O1")


def use_fsdp2():
    accelerator = driver("bf16")
    sizes = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1}
    own = started(engines.let_shard(accelerator, **sizes), "O2")
    found = attach(accelerator, own[0])
    assert (found.level, found.wrapper, bool(found.reduction)) == ("O2", "FSDP2", True)
    assert isinstance(own[1].optimizer, optim.AdamW)
    assert learns(train(accelerator, *own))


def use_deepspeed(deepspeed):
    from accelerate.utils import DeepSpeedPlugin

    def make(level=None, config=None, kind=torch.optim.AdamW, **overrides):
        config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}} | (config or {})
        plugin = DeepSpeedPlugin(hf_ds_config={"train_micro_batch_size_per_gpu": 4, **config})
        accelerator = driver("bf16", deepspeed_plugin=plugin)
        if level is None and "fp8stack" not in config:
            return accelerator, *accelerator.prepare(*build())
        return accelerator, *prepare(accelerator, *build(kind), opt_level=level, **overrides)

    original = deepspeed.initialize
    accelerator, *own = make("O2")
    found = attach(accelerator, own[0])
    assert (found.level, found.wrapper) == ("O2", "DeepSpeed ZeRO-3")
    losses = train(accelerator, *own)
    assert learns(losses)
    assert not {"fp8stack", "zero_force_ds_cpu_optimizer"} & {
        *accelerator.state.deepspeed_plugin.deepspeed_config
    }
    section = {"fp8stack": {"opt_level": "O2"}}
    assert_same_bits(train(*make(config=section, strict=False, preset=None)), losses)
    accelerator, model, *_ = make("O1", {"fp8stack": {"skip": ["*head"]}})
    assert attach(accelerator, model).level == "O1", "the argument's, as the section names none"
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    for level, kind in (("O2", torch.optim.AdamW), ("O1", optim.AdamW)):
        optimizer = make(level, offload, kind)[2]
        assert type(optimizer.optimizer.optimizer) is optim.AdamW, "not DeepSpeedCPUAdam"
    for words, level, config, options in (
        (r"O1.*was passed.*one place", "O1", section, {}),
        (r"\['skip'\] were passed.*one place", None, section, {"skip": ["*head"]}),
        (r"key='stats' is not a choice.*states", "O2", {}, {"stats": "8bit"}),
        ("offload-replaces", "O2", offload | {"zero_force_ds_cpu_optimizer": True}, {}),
    ):
        with pytest.raises(ConfigError, match=words):
            make(level, config, **options)
    assert deepspeed.initialize is original
    accelerator, model, *_ = make()
    with pytest.raises(ModelError, match="was not made by fp8stack"):
        attach(accelerator, model)


@pytest.mark.slow
def test_two_processes(tmp_path):
    run_ranks(use_two_processes, 2, str(tmp_path))


# --- GPUs


def move_to_gpu(rank):
    """On a GPU: `prepare` moves the model before it chooses layers; by hand that is said where it was forgotten."""
    from accelerate import Accelerator

    engines.forget_launch()
    accelerator = Accelerator(mixed_precision="bf16")
    own = prepare(accelerator, *build(), opt_level="O2")
    assert not fp8stack.get_report(own[0]).device.startswith("CPU")
    assert all(p.is_cuda for p in own[0].parameters())
    accelerator.backward(own[0](*(t.cuda() for t in batch(0))))
    own[1].step()
    model, optimizer, _ = build()
    model, optimizer = fp8stack.initialize(model, optimizer, "O0")
    model, optimizer = accelerator.prepare(model, optimizer)
    with pytest.raises(ModelError, match=r"initialized on the CPU.*model.to\(device\)"):
        attach(accelerator, model)


@pytest.mark.gpu
def test_models_are_moved_first():
    run_ranks(move_to_gpu, 1, device=None)
