"""Frameworks on CPUs, for tests: DeepSpeed's real engine with a small model and data, and Accelerate that shards."""

import itertools
import logging
import os

import torch
import torch.distributed as dist
from layers import conv1d
from torch import nn

from fp8stack.integrations import deepspeed as fp8_deepspeed

VOCABULARY = 64


def import_deepspeed(device="cpu"):
    """Return DeepSpeed, in a process that has joined a group; it then compiles nothing."""
    os.environ.update(DS_ACCELERATOR=device, OMP_NUM_THREADS="1")
    logging.disable(logging.WARNING)
    import deepspeed
    import deepspeed.ops

    # built with a compiler at the first call otherwise, and not used in training
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def let_shard(accelerator, version=2, **options):
    """Let an Accelerator shard by FSDP2, which it does on GPUs only, and return it: it takes the same way on CPUs."""
    from accelerate.state import DistributedType, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **options)
    plugin.set_mixed_precision(accelerator.mixed_precision)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def forget_launch():
    """Take back what `run_ranks` says of a launch: this process is one that nobody launched."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)


def forget_accelerators():
    """Let the next Accelerator share nothing with those before."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


# --- DeepSpeed


class Bigrams(nn.Module):
    """Predicts the next of 64 tokens: an embedding, a norm, an MLP and a head, which may be the embedding's weight."""

    def __init__(self, width=64, tied=False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.up = conv1d(width, 4 * width)
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


def make_adamw(model, lr=3e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def configure(stage=0, dtype="fp32", level=None, zero=None, section=None, **more):
    """Return a configuration; without a level, one that takes optimizers of other projects."""
    config = {"train_micro_batch_size_per_gpu": 8, **more}
    if stage:
        config["zero_optimization"] = {"stage": stage, **(zero or {})}
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"initial_scale_power": 8} if dtype == "fp16" else {})}
    if level is not None:
        config["fp8stack"] = {"opt_level": level, **(section or {})}
    return config


def start(config, model=None, lr=3e-3, **more):
    """Return an engine of the config's level."""
    model = build() if model is None else model
    if "optimizer" not in config and "optimizer" not in more:
        more["optimizer"] = make_adamw(model, lr)
    return fp8_deepspeed.initialize(model=model, config=config, **more)[0]


def start_plain(deepspeed, config, lr=3e-3):
    """Return an engine that DeepSpeed makes as it always does."""
    model = build()
    config = {**config, "zero_allow_untested_optimizer": True}
    return deepspeed.initialize(model=model, optimizer=make_adamw(model, lr), config=config)[0]


def inner_of(engine):
    """Return the optimizer that the engine was given."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def batches(rank, seed):
    """Yield (tokens, next tokens) of a Markov chain, other ones on each rank."""
    likely = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    table = likely.softmax(-1)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    while True:
        tokens = torch.randint(VOCABULARY, (8 * 16,), generator=generator)
        yield tokens, torch.multinomial(table[tokens], 1, generator=generator).view(-1)


def loss_of(engine, tokens, following):
    return nn.functional.cross_entropy(
        engine(tokens.to(engine.device)), following.to(engine.device)
    )


def train(engine, steps, rank, seed=1, accumulation=1):
    """Return the losses of some steps, the mean over ranks."""
    losses = []
    for batch in itertools.islice(batches(rank, seed), steps * accumulation):
        loss = loss_of(engine, *batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()
