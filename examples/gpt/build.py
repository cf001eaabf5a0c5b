"""Model and optimizer of a run: built, brought to a level of fp8stack, loaded, taken to another one, wrapped for ranks.

A checkpoint holds weights and states in the formats of the level that wrote it. So a run that is resumed at another
level, or where another library steps (a GPU without FP8), is built as it was, loaded bit for bit, and then taken over:
by `fp8stack.restore` and `initialize` where parameters are whole, and through float32 weights and moments where FSDP2
shards them, which nothing can undo in place.
Step counts, moments and all bits of the masters carry over.

What resumes bit for bit: "off", O0, O1 and O2, with the same ranks, micro-batch and --fuse; on a GPU where kernels add
up in one order (`randomness.make_deterministic`).

Limits: at O2 a run cannot go from sharded parameters to whole ones or back.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fp8stack
from fp8stack import comm
from fp8stack.api import session_of
from fp8stack.errors import CheckpointError, ConfigError
from fp8stack.integrations.fsdp import attach
from fp8stack.report import say

from .checkpoints import Checkpoint, load
from .config import PARTS, SCALING
from .model import GPT, ModelConfig
from .options import in_flags, warn
from .ranks import rank_and_world

ACTIVATIONS = "attention", "checkpointing", "seq_len"  # of a ModelConfig: what memory depends on
OWN = (*ACTIVATIONS, "fp8", "fuse_loss")  # what a checkpoint does not depend on


@dataclass(frozen=True)
class Level:
    """What `fp8stack.initialize` is asked for; "off" leaves it out."""

    name: str  # "off", "O0", "O1" or "O2"
    options: dict[str, Any]
    strict: bool = False
    fuse: bool = False

    @property
    def has_fp8_gradients(self) -> bool:
        return self.name in ("O1", "O2") and self.options.get("gradients", "fp8") == "fp8"

    def apply(self, model: GPT, optimizer: torch.optim.Optimizer, sharded: bool) -> tuple[GPT, Any]:
        if self.name == "off":
            return model, optimizer
        if sharded:
            return attach(model, optimizer, self.name, strict=self.strict, **self.options)
        options = {"strict": self.strict, "fuse": False, **self.options}
        made = fp8stack.initialize(model, optimizer, self.name, **options)
        if self.fuse and not fp8stack.nn.fuse(model):
            made_by = fp8stack.get_report(model).compute
            warn(
                "--fuse has nothing to fuse, and changes nothing: it takes MLPs and RMSNorms of models with native FP8 "
                f"layers; those of this one are {made_by}. Leave it out.",
                self.strict,
            )
        return made


@dataclass
class Setup:
    """Everything that a model and optimizer are built from."""

    model: ModelConfig
    level: Level
    parallel: str  # "none", "ddp", "dataparallel" or "fsdp2"
    device: torch.device
    dtype: torch.dtype  # of activations
    seed: int
    lr: float
    weight_decay: float

    @property
    def sharded(self) -> bool:
        return self.parallel == "fsdp2"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Compute in the activations' dtype; FSDP2 does that by itself."""
        used = self.dtype is not torch.float32 and not self.sharded
        return torch.autocast(self.device.type, self.dtype, enabled=used)

    def build(self, level: Level | None = None) -> tuple[GPT, Any]:
        """Return a new model and its optimizer at a level, the setup's own by default."""
        model, optimizer = self._plain()
        return (level or self.level).apply(model, optimizer, self.sharded)

    def _plain(self) -> tuple[GPT, torch.optim.Optimizer]:
        in_te = self.model.blocks == "te"  # whose modules begin where they stay
        torch.manual_seed(self.seed)
        try:
            with torch.device(self.device if in_te else "meta"):
                model = GPT(self.model)
        except ModuleNotFoundError as error:  # flash-attn
            raise ConfigError(f"--attention {self.model.attention}: {error}") from error
        if self.sharded:
            _shard(model, self.device.type, self.dtype)
        if self.device.type == "cpu":
            _check_memory(model, self.level)
        if not in_te:  # not before it is sharded: a model may be too large for one rank
            model.materialize(self.device)
        return model, make_optimizer(model, self.lr, self.weight_decay)

    def resume(
        self, checkpoint: Checkpoint
    ) -> tuple[GPT, Any, dict[str, Any], dict[str, Any] | None]:
        """Return model and optimizer as they were saved, at this setup's level; progress; and this rank's own.

        Raises:
            CheckpointError: if the checkpoint is of another model, or of parameters that lie otherwise.
        """
        facts = checkpoint.manifest
        check_same_model(checkpoint, self.model)
        saved = level_of(facts)
        if facts["sharded"] != self.sharded and "O2" in (saved.name, self.level.name):
            alone = facts["sharded"] and not dist.is_initialized()
            torchrun = " under torchrun, which --nproc-per-node 1 is enough for" if alone else ""
            raise CheckpointError(
                f"{checkpoint.path} was written at {saved.name} with --parallel {facts['parallel']}, and this run is "
                f"{self.level.name} with {self.parallel}: at O2 whole and sharded parameters have other states. "
                f"Resume with --parallel {facts['parallel']}{torchrun}."
            )
        same = (facts["level"], facts["options"]) == (self.level.name, self.level.options)
        with _withheld_cards():
            model, optimizer = self.build(self.level if same else saved)
            if same and facts.get("stepper", stepper(model, saved)) != stepper(model, saved):
                # a device with FP8 wrote it, and this has none, or the other way round
                same = False
                del model, optimizer
                model, optimizer = self.build(saved)
        states = contents(model, optimizer)
        progress, local = load(checkpoint.path, states)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )
        if same and self.level.name != "off":
            say(fp8stack.get_report(model))
        elif not same:
            model, optimizer = self._change_level(model, optimizer, saved)
        return model, optimizer, progress, local

    def _change_level(self, model: GPT, optimizer: Any, saved: Level) -> tuple[GPT, Any]:
        if not self.sharded:
            if saved.name != "off":
                model, optimizer = fp8stack.restore(model, optimizer)
            return self.level.apply(model, optimizer, sharded=False)
        weights = fp8stack.checkpoint.master_state_dict(model, optimizer)
        moments = fp8stack.checkpoint.torch_state_dict(optimizer)
        model, optimizer = self._plain()
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        return self.level.apply(model, optimizer, sharded=True)

    def wrap(self, model: GPT) -> nn.Module:
        """Return what is called in training: the model, or what averages its gradients over ranks."""
        if self.parallel == "dataparallel":
            return comm.DataParallel(model, broadcast_buffers=False)
        if self.parallel != "ddp":
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        ddp = nn.parallel.DistributedDataParallel
        # all ranks have the same angles of positions, the only buffers; torch 2.13 has another name for it
        names = "forward_sync_buffers", "broadcast_buffers"
        sync = next(name for name in names if name in inspect.signature(ddp).parameters)
        wrapped = ddp(model, device_ids=ids, **{sync: False})
        if self.level.has_fp8_gradients:
            comm.register_fp8_hook(wrapped)
        with self.autocast():
            _settle(wrapped, self.device)
        return wrapped


@contextlib.contextmanager
def _withheld_cards() -> Iterator[None]:
    """Keep fp8stack's cards out of the log, of a level that a run may leave before its first step; warnings stay."""
    before = os.environ.get("FP8STACK_QUIET", "")
    os.environ["FP8STACK_QUIET"] = "1"
    try:
        yield
    finally:
        os.environ["FP8STACK_QUIET"] = before


def _check_memory(model: nn.Module, level: Level) -> None:
    """Warn of a model that a CPU's memory does not hold: the system would kill the process without a word."""
    # bytes of a weight, its gradient and states; activations come on top
    each = 6 if level.name == "O2" else 16
    numel = sum(p.numel() for p in model.parameters())
    known = hasattr(os, "sysconf")  # not on Windows
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 if known else math.inf
    needed = each * numel / 2**30
    if needed > there:
        lower = ", or --opt-level O2" if level.name != "O2" and 6 * numel / 2**30 < there else ""
        warn(
            f"weights, gradients and states take {needed:.1f} GiB, and this machine has {there:.1f} GiB of memory: the "
            f"system may kill the run. Choose a smaller --model{lower}.",
            level.strict,
        )


def stepper(model: GPT, level: Level) -> dict[str, str]:
    """Return the option that gives states the formats that they have here on other devices too, for a manifest."""
    chosen = "auto" if level.name == "off" else session_of(model).recipe.optimizer_backend
    return {} if chosen == "auto" else {"optimizer_backend": chosen}


def level_of(facts: dict[str, Any]) -> Level:
    """Return a level whose weights and states have the formats of a checkpoint, from its manifest; on any device.

    What multiplies does not decide on formats, and this device may lack it: products are in bf16.
    """
    kept = {name: value for name, value in facts["options"].items() if name not in SCALING}
    products = {} if facts["level"] == "off" else {"compute": "bf16"}
    return Level(facts["level"], {**kept, **facts.get("stepper", {}), **products})


def choose_parallel(wish: str, world: int, level: Level) -> str:
    """Return what `--parallel` means here: "auto" keeps gradients in FP8 from O1 on, and takes DDP below.

    Raises:
        ConfigError: for one rank that is to be several, or several that are to be one.
    """
    if wish == "auto":
        return "none" if world == 1 else "dataparallel" if level.has_fp8_gradients else "ddp"
    if wish == "none" and world > 1:
        raise ConfigError(
            f"--parallel none is for one process, and there are {world}. Leave it out."
        )
    if wish != "none" and not dist.is_initialized():
        raise ConfigError(
            f"--parallel {wish} is for ranks that torchrun starts: torchrun --nproc-per-node N "
            "examples/train_gpt.py ... Leave it out for one process."
        )
    return wish


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices, the first group, and none on vectors."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=on_gpu or None)


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what torch.distributed.checkpoint saves, and loads into: state by parameter names."""
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


def architecture(config: ModelConfig) -> dict[str, Any]:
    """Return what a checkpoint depends on, for its manifest."""
    return {name: value for name, value in asdict(config).items() if name not in OWN}


def describe_activations(setup: Setup) -> dict[str, Any]:
    """Return what the memory of a sequence depends on beside the architecture and the level."""
    chosen = {name: value for name, value in asdict(setup.model).items() if name in ACTIVATIONS}
    one_order = torch.are_deterministic_algorithms_enabled()  # flash keeps sums apart for it
    if setup.model.fuse_loss:
        chosen["fuse_loss"] = True
    return {**chosen, "fuse": setup.level.fuse, **({"deterministic": True} if one_order else {})}


def check_same_model(checkpoint: Checkpoint, config: ModelConfig) -> None:
    own, saved = architecture(config), checkpoint.manifest["architecture"]
    for name in sorted(own.keys() | saved.keys()):
        if own.get(name) != saved.get(name):
            same = f"--model {checkpoint.manifest['model']}"
            if name in PARTS:  # the model's own where no flag gives another
                same += f" {in_flags(f'{name}={saved.get(name)!r}', PARTS)}"
            raise CheckpointError(
                f"{checkpoint.path} is of a model with {name}={saved.get(name)!r}, this run's has {own.get(name)!r}. "
                f"Resume with {same} and the same encoding of text."
            )


# --- several ranks


def join_ranks(wish: str) -> torch.device:
    """Join the ranks that torchrun has started, if it has; return this process's device."""
    if wish == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: PyTorch sees no CUDA device here. Check nvidia-smi and that PyTorch is a CUDA build, or "
            "use --device cpu."
        )
    cuda = wish != "cpu" and torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        if local >= (there := torch.cuda.device_count()):
            raise ConfigError(
                f"local rank {local} has no GPU: PyTorch sees {there} here. Start at most {there} processes on a "
                "machine (torchrun --nproc-per-node), or use --device cpu."
            )
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return device


def _shard(model: GPT, kind: str, dtype: torch.dtype) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(kind, (rank_and_world()[1],))
    # Inputs stay as they are: x is of the dtype already, and rotary positions need more than bfloat16 has.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _settle(ddp: nn.parallel.DistributedDataParallel, device: torch.device) -> None:
    """Let DDP see one backward: it makes its buckets anew after the first, and bits depend on buckets.

    A run that is resumed then has those of the run that went on.
    """
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
    ddp(tokens, tokens).backward()
    ddp.zero_grad(set_to_none=True)


@contextlib.contextmanager
def synchronized(forward: nn.Module, sync: bool) -> Iterator[None]:
    """Average the gradients of backwards in this context over ranks, or leave that to a later one.

    Under FSDP2 they are averaged in any case: to wait, each rank would have to hold those of the whole model.
    """
    wait = hasattr(forward, "no_sync") and not sync
    with forward.no_sync() if wait else contextlib.nullcontext():
        yield
