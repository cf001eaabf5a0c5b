"""fp8stack.integrations.transformers: the real Trainer on CPUs, as real processes."""

import gc
import os
import sys
from importlib import import_module
from pathlib import Path

import engines
import pytest
import torch
from helpers import assert_same_bits
from ranks import assert_same_on_all_ranks, run_ranks
from torch.utils.data import Dataset

import fp8stack
from fp8stack import optim
from fp8stack.errors import ConfigError, ModelError
from fp8stack.integrations import deepspeed, fsdp
from fp8stack.integrations.transformers import fp8_trainer

pytest.importorskip("accelerate")

ROOT = Path(__file__).resolve().parents[2]  # its folder `kernels` is what transformers looks for
STEPS = 8
NAMES = "amax bwd_scale dead_blocks fwd_scale grad_snr_db nonfinite overflow underflow update_ratio"
FP8 = {f"fp8/{name}" for name in NAMES.split()}


class Sequences(Dataset):
    """Sequences in which each token says what the next one is."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        start = torch.randint(64, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (start + 7 * torch.arange(32)) % 64
        return {"input_ids": tokens, "labels": tokens}


def llama(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, tie_word_embeddings=tied, **sizes, **heads))


def make(
    folder, level, model=None, options=None, optimizers=(None, None), shards=False, **arguments
):
    """Return a Trainer at a level or, for None, without fp8stack."""
    from transformers import Trainer, TrainingArguments

    engines.forget_accelerators()
    os.environ["ACCELERATE_MIXED_PRECISION"] = arguments.pop("mixed", "no")
    arguments = {
        "max_steps": STEPS, "learning_rate": 5e-3, "per_device_train_batch_size": 4, "logging_steps": 2,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": "deepspeed" not in arguments,
        "weight_decay": 0.1, **arguments,
    }  # fmt: skip
    own = TrainingArguments(output_dir=str(folder), **arguments)
    base = sharding(Trainer) if shards else Trainer
    kind = fp8_trainer(base, level, **(options or {})) if level else base
    model = llama() if model is None else model
    return kind(model=model, args=own, train_dataset=Sequences(), optimizers=optimizers)


def sharding(base):
    """Return a Trainer that shards by FSDP2, which accelerate does on GPUs only: it then takes the same way on CPUs."""
    how = {"auto_wrap_policy": "transformer_based_wrap", "state_dict_type": "SHARDED_STATE_DICT"}

    class Sharding(base):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            kinds = {"transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
            engines.let_shard(self.accelerator, **how, **kinds)
            self.is_fsdp_enabled = True

    return Sharding


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained(*arguments, **options):
    """Return the Trainer after training, and its losses."""
    trainer = make(*arguments, **options)
    trainer.train()
    return trainer, losses_of(trainer)


def assert_as_good(losses, plain):
    assert losses[-1] < 0.9 * losses[0]
    assert losses[-1] == pytest.approx(plain[-1], rel=0.05)


def inner_of(trainer):
    return trainer.optimizer.optimizer


def load():
    """Load transformers, which must not find this project's kernels, and have its many collections skip itself."""
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != ROOT]
    import_module("transformers.trainer")
    gc.freeze()


def at_every_level(folder, **arguments):
    """Train at every level as without fp8stack; matrices decay, norms do not, and both are scheduled to nothing."""
    _, plain = trained(folder, None, **arguments)
    for level in ("O0", "O1", "O2"):
        trainer, losses = trained(folder, level, **arguments)
        assert_as_good(losses, plain)
        assert type(inner_of(trainer)) is (torch if level == "O0" else fp8stack).optim.AdamW
        assert fp8stack.get_report(trainer.model).level == level
        decayed, others = trainer.optimizer.param_groups
        assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
        assert {p.ndim for p in others["params"]} == {1}
        assert decayed["lr"] == others["lr"] == 0.0
        for entry in trainer.state.log_history[:-1]:
            assert entry.keys() >= FP8, entry
            assert entry["fp8/amax"] > 0
        assert "fp8/amax" not in trainer.state.log_history[-1]  # the summary of the run
    return trainer


def resume(folder, level, **arguments):
    """A run that is resumed in the middle has the losses of one that was not interrupted."""
    save = {"save_strategy": "steps", "save_steps": STEPS // 2, **arguments}
    whole, losses = trained(folder, level, **save)
    resumed = make(folder, level, **save)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    assert losses_of(resumed) == losses
    assert_same_bits(whole.model.parameters(), resumed.model.parameters())
    return resumed, losses


# --- one process


def use_one_process(rank, folder):
    """Every level, under bf16 and resumed in float32: trains, logs, decays what the Trainer decays, and resumes."""
    engines.forget_launch()
    load()
    at_every_level(folder, bf16=True)
    for level in ("O1", "O2"):
        resume(f"{folder}/resumed", level)
    vary(folder)
    refuse(folder)


def vary(folder):
    """Tied weights, recomputation, accumulation, other optimizers, an optimizer that was given, and training on."""
    _, plain = trained(folder, None, llama(tied=True))
    trainer, losses = trained(folder, "O2", llama(tied=True))
    assert_as_good(losses, plain)
    assert trainer.model.lm_head.weight is trainer.model.get_input_embeddings().weight
    options = {"gradient_accumulation_steps": 2, "max_steps": 6, "logging_steps": 1}
    _, losses = trained(folder, "O2", **options)
    _, again = trained(folder, "O2", gradient_checkpointing=True, **options)
    assert again == losses
    trainer, _ = trained(folder, "O2", optim="sgd", optim_args="momentum=0.9")
    assert type(inner_of(trainer)) is optim.SGD
    _, losses = trained(folder, "O1", optim="adafactor")
    assert losses[-1] < losses[0]
    trainer, losses = train_given(folder)
    assert type(inner_of(trainer)) is optim.Adam
    trainer.train()  # a second time
    assert losses_of(trainer)[-1] < losses[-1]
    trainer, _ = trained(folder, "O2", options={"skip": ["*.mlp.*"]})
    assert any(".mlp." in name for name in fp8stack.get_report(trainer.model).skipped)


def train_given(folder, **arguments):
    """Train with an optimizer and a scheduler that were given."""
    model = llama()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    given = optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    trainer, losses = trained(folder, "O2", model, optimizers=given, **arguments)
    assert inner_of(trainer).param_groups[0]["lr"] == 5e-3 / 4
    assert losses[-1] < losses[0]
    return trainer, losses


def refuse(folder):
    """An error that says what to do, before anything is trained."""
    trainer, _ = trained(folder, "O2", max_steps=1)
    for error, words, call in (
        (ConfigError, "opt_level must be one of", lambda: make(folder, "02")),
        (ConfigError, r"'stats'.*states", lambda: make(folder, "O2", options={"stats": "8bit"})),
        (ConfigError, r"takes transformers\.Trainer.*Linear", lambda: fp8_trainer(torch.nn.Linear)),
        (ConfigError, "has AO convert the same layers", lambda: make(folder, "O2", mixed="fp8")),
        (ModelError, "Adafactor", lambda: trained(folder, "O2", optim="adafactor")),
        (ModelError, "already converted by fp8stack", lambda: trained(folder, "O2", trainer.model)),
    ):
        with pytest.raises(error, match=words):
            call()
    fp8stack.restore(trainer.model)
    trained(folder, "O1", trainer.model, max_steps=1)


@pytest.mark.slow
def test_one_process(tmp_path):
    run_ranks(use_one_process, 1, str(tmp_path), device=None)


# --- two processes


def use_two_processes(rank, folder):
    """DDP, FSDP2, and DeepSpeed's ZeRO."""
    load()
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    engines.import_deepspeed()
    ddp = {"ddp_backend": "gloo", "bf16": True}
    _, plain = trained(folder, None, **ddp)
    with fp8stack.comm.Statistics() as statistics:
        _, losses = trained(folder, "O1", **ddp)
    assert_as_good(losses, plain)
    assert statistics.collect()
    trainer, losses = resume(f"{folder}/ddp", "O2", **ddp)
    assert_as_good(losses, plain)
    assert_same_on_all_ranks(trainer.model)
    trainer, losses = resume(f"{folder}/fsdp", "O2", shards=True, **ddp)
    assert_as_good(losses, plain)
    fsdp.verify(trainer.model, inner_of(trainer))
    use_deepspeed(folder)


def use_deepspeed(folder):
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    config = {**dict.fromkeys(auto, "auto"), "zero_optimization": {"stage": 3}}
    _, plain = trained(
        folder, None, deepspeed=config
    )  # in float32: the Trainer wants a GPU for DeepSpeed's bf16
    trainer, losses = resume(f"{folder}/zero", "O2", deepspeed=config)
    assert_as_good(losses, plain)
    found = deepspeed.verify(trainer.model_wrapped)
    assert (found.level, found.stage, found.optimizer) == ("O2", 3, "AdamW")
    assert found.reduced
    rates = {group["weight_decay"] for group in inner_of(trainer).optimizer.param_groups}
    assert rates == {0.1, 0.0}
    trainer, _ = train_given(folder, deepspeed=config)
    assert type(inner_of(trainer).optimizer) is optim.Adam, "DeepSpeed's set-up drops it"
    config["optimizer"] = {"type": "FP8AdamW", "params": {"lr": 5e-3}}
    trainer, losses = trained(folder, "O2", deepspeed=config)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_two_processes(tmp_path):
    run_ranks(use_two_processes, 2, str(tmp_path))


def use_gpu(rank, folder):
    """On a GPU: FP8 products, and fp16 with its GradScaler."""
    engines.forget_launch()
    load()
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    for mode in ({}, {"bf16": True}, {"fp16": True}):
        trainer = at_every_level(folder, use_cpu=False, **mode)
        assert not fp8stack.get_report(trainer.model).device.startswith("CPU")
    resume(f"{folder}/resumed", "O2", use_cpu=False, fp16=True)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    run_ranks(use_gpu, 1, str(tmp_path), device=None)
