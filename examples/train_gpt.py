"""Train a GPT-2- or Llama-class model with fp8stack: one run, on one device or on all ranks of torchrun.

    python examples/train_gpt.py                                            # the demo's model at O2, on a CPU too
    python examples/train_gpt.py --config examples/configs/fineweb_edu_fp8.yaml --max-lr 3e-4
    torchrun --nproc-per-node 8 examples/train_gpt.py --model llama-1b --data fineweb-edu
    python examples/train_gpt.py --resume latest --opt-level off            # the same run, from now on in bf16
    python examples/train_gpt.py --list-checkpoints

`--help` lists all options; `gpt/trainer.py` is the run. The exit status is 1 if the run does not stay finite, 2, after
one line on stderr, for what was asked for and cannot be done, and 128 and the number of the signal that has stopped the
run, if one has. fp8stack's warnings are one line each, of the first rank.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # before imports that take seconds
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C without a traceback
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # which slurm/node.sh has torchrun ignore
    for name in ("stdout", "stderr"):  # closed (>&-): its number would go to the next file opened
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    at_once = {"--help", "-h", "--list-checkpoints"} & {*sys.argv}
    if not at_once and os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):  # which `say` will tell
            print("train_gpt: loading PyTorch and fp8stack", flush=True)

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from fp8stack.errors import Fp8StackError, Fp8StackWarning, first_line

try:
    from gpt import batching
    from gpt.config import Config, parse
    from gpt.guard import DivergedError
    from gpt.logs import forgive_thread, say
    from gpt.runs import list_runs
    from gpt.stopping import Signals
    from gpt.trainer import Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"training needs the module {error.name}, which is not installed. In the root of the repository, install the "
        'library with all that training needs: pip install -e ".[train]"',
        name=error.name,
    ) from error


PYTHONS_FORMAT = warnings.formatwarning
FIRST = os.environ.get("RANK", "0") == "0"  # of the ranks


def main(argv: Sequence[str] | None = None) -> int:
    stopped = 0
    if isinstance(sys.stdout, io.TextIOWrapper):  # a sample may have what a job's locale lacks
        sys.stdout.reconfigure(errors="replace")
    try:
        config = parse(None if argv is None else list(argv))
        if config.list_checkpoints:
            return 0 if say(list_runs(config)) else 2
        stopped = train(config)
    except DivergedError as error:
        return fail(error, 1)
    except Fp8StackError as error:
        return fail(error, 2)
    except OSError as error:
        if error.filename is None:  # of a network, say: the traceback tells whose
            raise
        return fail(error, 2)
    except RuntimeError as error:
        if not batching.is_out_of_memory(error):
            raise
        text = f"{first_line(error)} Out of memory: use a smaller --micro-batch or --max-batch-size. {batching.REMEDY}"
        return fail(text, 2)
    # Not after an error of one rank: that would wait for the others. And not while there is a Trainer: DDP, freed after
    # the group, waits for gloo's threads and has the lock that these wait for.
    if dist.is_initialized():
        dist.destroy_process_group()
    return 128 + stopped if stopped else 0


def train(config: Config) -> int:
    """Run what the options ask for; return the number of the signal that has stopped it, 0 if none has."""
    announce(config)
    trainer = Trainer(config)
    with Signals(saves=config.checkpoint_freq > 0) as signals:
        trainer.run(signals)
    if trainer.stopped:
        name = signal.Signals(trainer.stopped).name
        tell_torchrun(f"train_gpt: stopped by {name}, not failed")
    return trainer.stopped


def announce(config: Config) -> None:
    """Say what takes its time before the first step."""
    parts = [f"reading {config.data}", f"building {config.model}"]
    if config.micro_batch == "auto" and config.device != "cpu" and torch.cuda.is_available():
        parts.append("trying how many sequences fit (--micro-batch auto)")
    if FIRST:
        say(f"train_gpt: {', '.join(parts)}")


def fail(error: object, status: int) -> int:
    text = f"train_gpt: {error}"
    if not tell_torchrun(text) or FIRST:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr)
    return status


def tell_torchrun(text: str) -> bool:
    """Let torchrun quote a text in its report, which comes last; return whether it will: if it started this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        if path:
            content = {"message": text, "timestamp": int(time.time())}
            Path(path).write_text(json.dumps(content))
    except OSError:
        return False
    return bool(path)


def format_warning(
    text: Warning | str, kind: type[Warning], file: str, number: int, line: str | None = None
) -> str:
    """Return a warning of fp8stack's as a line for who runs this, not for who wrote it; others as Python has them."""
    if not issubclass(kind, Fp8StackWarning):
        return PYTHONS_FORMAT(text, kind, file, number, line)
    return f"train_gpt: warning: {text}\n" if FIRST else ""


if __name__ == "__main__":
    warnings.formatwarning = format_warning
    threading.excepthook = forgive_thread
    torch.set_float32_matmul_precision("high")
    status = record(main)()
    # threads of pyarrow's readers abort a process that ends so early
    if status and "pyarrow" in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)
    sys.exit(status)
