"""What the tests of the training application run: small configurations, on one rank and on several."""

import contextlib
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import train_gpt
from gpt import GPT, ModelConfig, evaluation
from gpt.build import Level, Setup
from gpt.checkpoints import find, save
from gpt.config import Config
from gpt.trainer import Trainer

from fp8stack import capability
from fp8stack.errors import CheckpointError, ConfigError
from fp8stack.nn import scaling_state

# A sample of 64 tokens takes longer than the steps of a small run. This is still more than its windows hold.
evaluation.SAMPLE_TOKENS = 16

BASE = {
    "model": "tiny", "seq_len": 16, "steps": 4, "warmup_steps": 2, "checkpoint_freq": 2, "eval_freq": 0,
    "eval_batches": 3, "eval_batch_size": 1, "target_effective_batch_size": 4, "micro_batch": 2, "device": "cpu",
    "tensorboard": False,
}  # fmt: skip


def write_text(folder: Path) -> Path:
    """Return a text that a tiny model can learn something of."""
    path = folder / "text.txt"
    path.write_text("".join(f"for x in range({n}):\n    print(x + {n % 7})\n" for n in range(300)))
    return path


def write_parquet(path: Path, **columns) -> None:
    """Write a file of documents, or skip the test."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)


def configure(folder: Path, **options) -> Config:
    return Config(**{**BASE, "data": str(folder / "text.txt"), "out": folder / "runs", **options})


def train(folder: Path, **options) -> list[float]:
    """Train a run; return all its losses."""
    return Trainer(configure(folder, **options)).run()


def resume(folder: Path, path: Path, **options) -> list[float]:
    """Return the losses of a run that goes on from a checkpoint, in a folder of its own."""
    return train(folder, **options, resume=str(path), out=folder / "again")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses_of(run: Path) -> list[float]:
    """Return the losses of the steps in a run's record."""
    return [line["loss"] for line in read(run / "metrics.jsonl") if "loss" in line]


def step_of(folder: Path, name: str, step: int = 2) -> Path:
    """Return the checkpoint of a run in any precision."""
    return next((folder / "runs").glob(f"{name}-[bf]*/checkpoints*/step_{step:08d}"))


def without_fp8(patch: pytest.MonkeyPatch) -> None:
    """Let capability say what it does of a GPU without FP8. Layers and libraries are as they are."""
    answer = capability.Answer(False, "cuda:0 is NVIDIA A100 (8.0)")
    patch.setattr(capability, "fp8_hardware", lambda device: answer)


def run_here(command, stdout=None, **_):
    """Run the application in this process, as `subprocess` does in another, which takes longer than the work."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = train_gpt.main(command[2:])
    torch.use_deterministic_algorithms(False)
    if hasattr(stdout, "write"):
        stdout.write(printed.getvalue().encode())
    return SimpleNamespace(returncode=code, stdout=printed.getvalue(), poll=lambda: code)


# --- two ranks

RANKS = {  # run: options
    "ddp-off": {"parallel": "ddp", "opt_level": "off"},
    "ddp-O2": {"parallel": "ddp", "opt_level": "O2"},
    "dp-O1": {"parallel": "dataparallel", "opt_level": "O1"},
    "dp-O2": {"opt_level": "O2"},  # auto
    "fsdp2-off": {"parallel": "fsdp2", "opt_level": "off"},
    "fsdp2-O2": {"parallel": "fsdp2", "opt_level": "O2", "fuse_loss": True},
}
LEVELS = (  # from, to
    ("fsdp2-off", "fsdp2-O2"), ("fsdp2-O2", "fsdp2-off"), ("ddp-off", "dp-O2"), ("dp-O2", "ddp-off"),
)  # fmt: skip


def check_ranks(rank, folder, single):
    """Two ranks: every way to share a run resumes bit for bit, and goes on at other levels; return all losses."""
    torch.set_num_threads(1)
    folder, losses = Path(folder), {}
    for name, options in RANKS.items():
        losses[name] = train(folder, **options, run_name=name)
        again = resume(folder, step_of(folder, name), **options, run_name=name)
        assert again == losses[name], (name, again, losses[name])
    for source, to in LEVELS:
        changed = resume(folder, step_of(folder, source), **RANKS[to], run_name=f"{source}-to-{to}")
        assert changed[:2] == losses[source][:2]
        assert_near(changed, losses[source], (source, to))
    check_precision(folder, rank)
    check_shared(folder, rank)
    check_first_weights()
    grown = resume(folder, step_of(folder, "single"), **RANKS["dp-O2"], run_name="grown")
    assert_near(grown, single, "grown")
    with pytest.raises(CheckpointError, match=r"no checkpoint could be written.*rank 0"):  # on both
        save(folder / "text.txt" / "checkpoints", 1, {}, {}, {}, {}, 1)
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        find(folder / "nowhere")
    return losses


def check_one_rank(rank, folder, two):
    """Shards of two ranks at O2 are one rank's again: its next step has the same weights, states and samples."""
    name = "fsdp2-O2"
    one = resume(Path(folder), step_of(Path(folder), name), **RANKS[name], run_name="one-rank")
    assert one[:2] == two[:2]
    assert abs(one[2] - two[2]) < 1e-6 * two[2], (one, two)
    assert_near(one, two, "fewer")


def check_precision(folder, rank):
    """Ranks of which one has no FP8 do not begin: their folders would be different ones."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            without_fp8(patch)
        with pytest.raises(ConfigError, match="ranks would compute in FP8 O2 and bf16 O2"):
            Trainer(configure(folder, run_name="mixed"))


def check_shared(folder, rank):
    """DDP's first pass fills no histories; samples need every rank's tokenizer; rotary tables stay float32."""
    delayed = {"parallel": "ddp", "opt_level": "O0", "fp8_recipe": "delayed"}
    assert_empty(Trainer(configure(folder, **delayed, run_name="begins")).model)
    # no rank writes a sample, for which all gather weights, where one lacks the tokenizer
    trainer = Trainer(configure(folder, **RANKS["fsdp2-off"], run_name="samples"))
    trainer.data.__dict__["readable"] = rank == 0
    assert math.isfinite(trainer.evaluate())
    found = []  # of blocks, which compute in bfloat16 under FSDP2

    def look(module, given):
        found.append([given[0].dtype, *(part.dtype for part in given[1])])

    trainer = Trainer(configure(folder, **RANKS["fsdp2-O2"], run_name="rotation", steps=1))
    for block in trainer.model.blocks:
        block.attention.register_forward_pre_hook(look)
    trainer.run()
    assert len(found) >= 2
    assert all(dtypes == [torch.bfloat16, torch.float32, torch.float32] for dtypes in found), found


def assert_empty(model):
    state = scaling_state(model)
    assert state
    assert not any(history.any() for history in state.values())


def check_first_weights():
    """FSDP2's shards begin as parts of the model that one process has, and a tied head stays tied."""
    where = torch.device("cpu"), torch.float32, 3, 1e-3, 0.1
    tokens = torch.arange(16)[None]
    for tied in (False, True):
        config = ModelConfig(dim=32, layers=1, heads=2, kv_heads=1, ffn=48, seq_len=16, tied=tied)
        after = []
        for parallel in ("none", "fsdp2"):
            model, optimizer = Setup(config, Level("off", {}), parallel, *where).build()
            assert (model.head.weight is model.embedding.weight) == tied
            assert torch.equal(model.cos, GPT(config).cos)
            after.append([{n: full(p) for n, p in model.state_dict().items()}])
            model(tokens, tokens).backward()
            optimizer.step()
            after[-1].append({n: full(p) for n, p in model.state_dict().items()})
        for name, weight in after[0][0].items():
            assert torch.equal(weight, after[1][0][name]), name
            torch.testing.assert_close(after[0][1][name], after[1][1][name])
        assert torch.equal(after[1][1]["head.weight"], after[1][1]["embedding.weight"]) == tied


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def assert_near(losses, expected, what):
    """The step after a change has the same weights and samples; those that follow, nearly the same."""
    assert len(losses) == len(expected)
    for a, b in zip(losses, expected, strict=True):
        assert abs(a - b) < 0.01 * b, (what, losses, expected)
