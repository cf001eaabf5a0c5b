"""Train a GPT-2- or Llama-class model with fp8stack: one run, on one device or on all ranks of torchrun.

    python examples/train_gpt.py                                            # the demo's model at O2, on a CPU too
    python examples/train_gpt.py --config examples/configs/fineweb_edu_fp8.yaml --max-lr 3e-4
    torchrun --nproc-per-node 8 examples/train_gpt.py --model llama-1b --data fineweb-edu
    python examples/train_gpt.py --resume latest --opt-level off            # the same run, from now on in bf16
    python examples/train_gpt.py --list-checkpoints

`--help` lists all options; `gpt/trainer.py` is the run. The exit status is 1 if the run does not stay finite, and 2,
after one line on stderr, for what was asked for and cannot be done. fp8stack's warnings are one line each, of the
first rank.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fp8stack.errors import Fp8StackError, Fp8StackWarning, first_line

try:
    from gpt import batching
    from gpt.config import parse
    from gpt.guard import DivergedError
    from gpt.logs import forgive_thread
    from gpt.runs import list_runs
    from gpt.trainer import Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"training needs the module {error.name}, which is not installed. In the root of the repository, install the "
        'library with all that training needs: pip install -e ".[train]"',
        name=error.name,
    ) from error


PYTHONS_FORMAT = warnings.formatwarning


def main(argv: Sequence[str] | None = None) -> int:
    try:
        config = parse(None if argv is None else list(argv))
        if config.list_checkpoints:
            print(list_runs(config))
        else:
            Trainer(config).run()
    except DivergedError as error:
        return fail(error, 1)
    except Fp8StackError as error:
        return fail(error, 2)
    except RuntimeError as error:
        if not batching.is_out_of_memory(error):
            raise
        text = f"{first_line(error)} Out of memory: use a smaller --micro-batch or --max-batch-size. {batching.REMEDY}"
        return fail(text, 2)
    if dist.is_initialized():  # not after an error of one rank: that would wait for the others
        dist.destroy_process_group()
    return 0


def fail(error: object, status: int) -> int:
    print(f"train_gpt: {error}", file=sys.stderr)
    return status


def format_warning(
    text: Warning | str, kind: type[Warning], file: str, number: int, line: str | None = None
) -> str:
    """Return a warning of fp8stack's as a line for who runs this, not for who wrote it; others as Python has them."""
    if not issubclass(kind, Fp8StackWarning):
        return PYTHONS_FORMAT(text, kind, file, number, line)
    return f"train_gpt: warning: {text}\n" if os.environ.get("RANK", "0") == "0" else ""


if __name__ == "__main__":
    warnings.formatwarning = format_warning
    threading.excepthook = forgive_thread
    torch.set_float32_matmul_precision("high")
    sys.exit(main())
