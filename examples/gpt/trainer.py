"""One training run: data, model and ranks put together, the loop, and what it leaves behind.

    trainer = Trainer(parse(["--model", "tiny", "--steps", "100", "--opt-level", "O2"]))
    trainer.run()

A step is `accumulation` micro-batches on every rank; gradients are averaged over ranks with the last one, clipped by
their norm, and AdamW steps. A step whose loss or norm is not finite is left out (`guard.py`). Everything that a step
depends on is in a checkpoint (weights, states, position in the data, random numbers, GradScaler) or a function of its
number (the learning rate), so a run that is resumed goes on with the same bits (on a GPU with `--deterministic`): also
one that a signal has stopped (`stopping.py`).

It runs as one process, or as the ranks of torchrun. A run has a folder, OUT/NAME-PRECISION, with run.json,
metrics.jsonl, tensorboard/ and its checkpoints.

Limits: the host waits for the device once a step, to log loss and norm, before the optimizer's own work, whose time on
a GPU is part of the next step's. With another number of ranks or another micro-batch a run goes on with the same
samples, but sums are rounded otherwise.
"""

from __future__ import annotations

import math
import signal
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8stack import comm, finish
from fp8stack.errors import ConfigError
from fp8stack.nn import reset_scaling, restore_scaling, scaling_state

from . import batching, build, changes, checkpoints, evaluation, fitting, randomness, ranks, runs
from .build import Level, Setup, synchronized
from .config import Config
from .data import open_data
from .guard import Guard
from .hub import UnreadableError
from .logs import RunLog, hold, read_memory
from .schedule import learning_rate
from .stopping import Signals
from .watch import watch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
START = {"step": 0, "losses": (), "val_losses": (), "data": None, "scaler": None}


class Trainer:
    """A run that is ready to go on from where its checkpoint, if any, left it.

    Args:
        config: all options.

    Raises:
        ConfigError: options that do not go together, or that this machine cannot have.
        CheckpointError: a checkpoint to resume from that is missing, damaged or of another model.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = build.join_ranks(config.device)
        if config.deterministic:
            randomness.make_deterministic(self.device)
        self.rank, self.world = ranks.rank_and_world()
        self.precision = runs.choose_precision(config, self.device)
        self.folder = runs.run_folder(config, self.precision)
        # before anything in the folder is read, which another run may be writing
        self.held = hold(self.folder) if self.rank == 0 else None
        runs.check_fresh(config, self.precision)
        self.data = open_data(config, self.rank, self.world)
        name, options = config.fp8_options()
        level = Level(name or "off", options, config.strict, config.fuse)
        self.setup = Setup(
            model=config.model_config(self.data.vocab_size, fp8=self.precision.startswith("FP8")),
            level=level,
            parallel=build.choose_parallel(config.parallel, self.world, level),
            device=self.device,
            dtype=DTYPES[config.compute_dtype],
            seed=config.seed,
            lr=config.max_lr,
            weight_decay=config.weight_decay,
        )
        self.questions = evaluation.read_questions(config.hellaswag) if config.hellaswag else []
        if self.questions:
            self.data.encode("a")  # raises, where shards come without their vocabulary
        self.course = changes.describe(config, self.data)
        resumed = runs.find_checkpoint(config, self.precision)
        if resumed is None:
            (self.model, self.optimizer), progress, local = self.setup.build(), START, None
        else:
            first = self.rank == 0
            changed = changes.report(resumed.manifest, self.course, config.strict, first)
            self.model, self.optimizer, progress, local = self.setup.resume(resumed)
            if changed & {"data", "encoding"}:
                progress["data"] = None
        self.forward = self.setup.wrap(self.model)
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.setup.dtype is torch.float16
        )
        self.split = fitting.choose_split(self, resumed)
        if config.compile:  # not before: the sizes that were tried would make shapes dynamic
            for module in self.model.blocks if self.setup.sharded else [self.model]:
                module.compile()
        self._restore(progress, local)
        self.guard = Guard(config, self.precision)
        self.monitor = watch(config, self.model, self.optimizer)
        self.signals, self.stopped = Signals(), 0
        self.log = self._open_log()
        self.log.open()
        runs.remove_older(config, self.precision)  # not before all else is in order
        self.log.begin()
        if resumed is not None:
            precision = resumed.manifest["precision"]
            self.log.say(f"resumed from {resumed.path} ({precision}), step {self.step}")

    # --- the loop

    def run(self, signals: Signals | None = None) -> list[float]:
        """Train up to the last step; return the loss of every step of the run, those before a resume too.

        signals: where they ask for it the run ends before, and `stopped` is the number of one.

        Raises:
            DivergedError: where steps do not stay finite, or none was.
            CheckpointError, ConfigError: where a checkpoint, or the record of a step, cannot be written.
        """
        config, self.signals = self.config, signals or self.signals
        if self.step >= config.steps:
            done = f"the checkpoint is at step {self.step}, --steps is {config.steps}"
            self.log.say(f"nothing left to do: {done}")
        saves_alone = self.world == 1 and config.checkpoint_freq > 0
        try:
            with comm.Statistics() as self.wire:
                while self.step < config.steps:
                    position = self.data.train.state_dict() if saves_alone else None
                    try:
                        asked = self.take_step()
                    except UnreadableError as error:
                        raise self._kept(error, position) from error
                    last = self.step == config.steps
                    if asked and not last:
                        self.stop()
                        break
                    saves = last or is_due(self.step, config.checkpoint_freq)
                    if config.eval_freq and (last or is_due(self.step, config.eval_freq)):
                        self.evaluate()
                    if saves and config.checkpoint_freq:
                        self.save()
            if not self.stopped and (told := self.guard.sum_up()):
                self.log.say(told)
        except BaseException:
            with suppress(ConfigError):  # what is told is the first error
                self.log.close()
            raise
        self.log.close()
        if self.stopped:
            ranks.gather(self.step)  # torchrun ends the others when the first is gone
        return self.losses

    def _kept(self, error: UnreadableError, position: dict[str, Any] | None) -> UnreadableError:
        """Write a checkpoint of the last whole step, if its position was kept; return what to say.

        It is with one rank alone: others may not have met this error.
        """
        if position is None or self.step == self.first:
            return error
        self.data.train.load_state_dict(position)
        path = self.save(evaluate=False)
        return UnreadableError(f"{error} The steps so far are in {path}.")

    def stop(self) -> None:
        """Write a checkpoint, if there are to be any, and say how to go on; all ranks do, after the same step.

        Without an evaluation: the time that is left may be short.
        """
        self.stopped = max(ranks.gather(self.signals.received))
        if self.config.checkpoint_freq:
            self.save(evaluate=False)
            how = "--resume auto goes on"
        else:
            how = "--checkpoint-freq 0 leaves no checkpoint to go on from"
        self.log.say(f"stopped by {signal.Signals(self.stopped).name} at step {self.step}: {how}")

    def take_step(self) -> bool:
        """Train on one batch, and log it; return whether signals have asked any rank to stop."""
        began = time.perf_counter()
        # A function of the step, as the learning rate is: a run that is resumed does the same.
        if self.step >= self.config.first_bf16_step and finish(self.model):
            self.log.say(f"step {self.step + 1}: products are in bf16 from here on (--bf16-last)")
            self.log.precision += ", products in bf16"
        if self.monitor:
            self.monitor.begin_step(self.step)
        lr = learning_rate(self.config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        total = self._accumulate()
        self.scaler.unscale_(self.optimizer)
        limit = self.config.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        if isinstance(norm, DTensor):  # of FSDP2
            norm = norm.full_tensor()
        told = torch.stack((total, torch.full_like(total, self.signals.received)))
        if self.world > 1:
            dist.all_reduce(told)
        # waits for the device
        loss, norm, asked = torch.stack((told[0] / self.world, norm.to(total), told[1])).tolist()
        sent = self.wire.collect()  # now, when it has nothing to wait for
        self.step += 1
        # GradScaler looks for its scale by losing steps
        searching = self.scaler.is_enabled() and self.scaler.get_scale() > 1
        accepted = self.guard.accepts(self.step, loss, norm, searching)
        if accepted:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss)
        self._log_step(loss, lr, norm, time.perf_counter() - began, sent)
        if not accepted:
            self.log.say(f"step {self.step}: not finite, and so not taken")
        return asked > 0

    def _accumulate(self) -> Tensor:
        """Run forward and backward of a step; return this rank's mean loss, float32, 0-d."""
        total = torch.zeros((), device=self.device)
        for index in range(self.split.accumulation):
            batch = self.data.train.next_batch(self.split.micro)
            tokens, targets = (batching.send(part, self.device) for part in batch)
            with synchronized(self.forward, index + 1 == self.split.accumulation):
                with self.setup.autocast():
                    loss = self.forward(tokens, targets) / self.split.accumulation
                self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def _log_step(
        self, loss: float, lr: float, norm: float, seconds: float, sent: dict[str, dict[str, float]]
    ) -> None:
        tokens = self.split.effective * self.setup.model.seq_len
        numbers = {
            "step": self.step,
            "epoch": self.data.train.epoch,
            "loss": loss,
            "lr": lr,
            "norm": norm,
            "dt_ms": 1e3 * seconds,
            "tokens_per_second": tokens / seconds,
            "memory_gib": read_memory(self.device),
        }
        more = self.monitor.metrics(self.step) if self.monitor else {}
        if sent:
            more["comm/bytes"] = sum(row["bytes"] for row in sent.values())
            more["comm/seconds"] = sum(row["seconds"] for row in sent.values())
        begins_or_ends = self.step in (self.first + 1, self.config.steps)
        shown = begins_or_ends or is_due(self.step, self.config.log_freq)
        self.log.train(numbers, more, show=shown)

    # --- evaluation and checkpoints

    def evaluate(self) -> float:
        """Take the validation loss, log it with a text that the model writes; return it."""
        where = self.device, self.setup.autocast
        loss = evaluation.validation_loss(self.model, self.data.validation, *where)
        numbers = {"val_loss": loss}
        if self.questions:
            length = self.setup.model.seq_len
            numbers["hellaswag"] = evaluation.hellaswag_accuracy(
                self.model, self.questions, self.data.encode, length, *where
            )
        self.val_losses.append((self.step, loss))
        sample = ""
        if self._readable and math.isfinite(loss):
            sample = evaluation.write_sample(self.model, self.data, self.config.seed, *where)
        self.log.evaluation(self.step, numbers, sample)
        for line in self.monitor.advice() if self.monitor else ():
            self.log.say(f"advice: {line}")
        return loss

    @cached_property
    def _readable(self) -> bool:
        """Can all ranks turn tokens to text? Of shards, a node may lack the tokenizer; a sample takes all ranks."""
        everywhere = bool(ranks.least(self.data.readable))
        if self.data.readable and not everywhere:
            self.log.say("there will be no samples of text: another rank lacks the tokenizer")
        return everywhere

    def save(self, evaluate: bool = True) -> Path:
        """Write a checkpoint of this step, with its validation loss where one may be taken; return its folder."""
        evaluated, val_loss = self.val_losses[-1] if self.val_losses else (0, math.nan)
        if evaluated != self.step:  # that was of other weights, and the best ones are to be known
            val_loss = self.evaluate() if evaluate and self.config.eval_freq else math.nan
        loss = self.losses[-1] if self.losses else math.nan
        scaler = self.scaler.state_dict() if self.scaler.is_enabled() else None
        progress = {
            "step": self.step,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "val_losses": self.val_losses,
            "data": self.data.train.state_dict(),
            "scaler": scaler,
        }
        own = {**randomness.get_state(self.device), "scaling": scaling_state(self.model)}
        return checkpoints.save(
            runs.folders_of(self.folder)[self.config.opt_level != "off"],
            self.step,
            build.contents(self.model, self.optimizer),
            progress,
            own,
            {
                **self.facts(),
                **self.course,
                "micro_batch": self.split.micro,
                "train_loss": _finite(loss),
                "val_loss": _finite(val_loss),
            },
            self.config.keep_checkpoints,
        )

    # --- what __init__ is made of

    def _restore(self, progress: dict[str, Any], local: dict[str, Any] | None) -> None:
        """Put back what a checkpoint holds beside weights and states."""
        self.step = self.first = progress["step"]
        self.losses: list[float] = list(map(float, progress["losses"]))
        self.val_losses: list[tuple[int, float]] = list(progress["val_losses"])
        if progress["data"] is not None:
            self.data.train.load_state_dict(progress["data"])
        if progress["scaler"] is not None and self.scaler.is_enabled():
            self.scaler.load_state_dict(progress["scaler"])
        self.optimizer.param_groups[0]["weight_decay"] = self.config.weight_decay  # of matrices
        if self.step:
            restore_scaling(self.model, (local or {}).get("scaling", {}))
        else:  # DDP's and the search's own passes have larger gradients than training's
            reset_scaling(self.model)
        if local is None:  # a run that begins, or a rank that was not there
            randomness.seed(self.config.seed + self.rank)
        else:
            randomness.set_state(local, self.device)

    def _open_log(self) -> RunLog:
        facts = {
            "name": self.folder.name,
            **self.facts(),
            "ranks": self.world,
            "tokens_per_step": self.split.effective * self.setup.model.seq_len,
            "micro_batch": self.split.micro,
            "accumulation": self.split.accumulation,
            "data": self.data.name,
            "seed": self.config.seed,
            **runs.describe_host(self.device),
            "config": self.config.to_dict(),
        }
        config = self.config
        places = config.tensorboard, config.wandb
        log = RunLog(self.folder, facts, self.step, config.steps, *places, self.held)
        target, own = config.target_effective_batch_size, facts["tokens_per_step"]
        nearest = f", the nearest above the {target} asked for" * (self.split.effective != target)
        if self.step < config.steps:
            log.say(
                f"a step has {own:,} tokens: {self.split.effective} sequences ({self.split.micro} × "
                f"{self.world} rank{'s' * (self.world > 1)} × {self.split.accumulation}){nearest}"
            )
        if self.monitor is None and self.precision.startswith("FP8"):
            log.say(
                "there will be no fp8/ numbers: they are of native layers that are not compiled"
            )
        return log

    def facts(self) -> dict[str, Any]:
        """Return what run.json and the manifests of checkpoints both say of the run."""
        return {
            "level": self.setup.level.name,
            "options": self.setup.level.options,
            "stepper": build.stepper(self.model, self.setup.level),
            "precision": self.precision,
            "compute_dtype": self.config.compute_dtype,
            "model": self.config.model,
            "architecture": build.architecture(self.setup.model),
            "activations": build.describe_activations(self.setup),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "parallel": self.setup.parallel,
            "sharded": self.setup.sharded,
            "target_effective_batch_size": self.config.target_effective_batch_size,
        }


def _finite(loss: float) -> float | None:
    """Return a loss as JSON has it."""
    return loss if math.isfinite(loss) else None


def is_due(step: int, every: int) -> bool:
    """Return whether something is done at a step; `every` 0 means never."""
    return bool(every) and step % every == 0
