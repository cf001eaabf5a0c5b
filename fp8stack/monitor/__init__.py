"""What FP8 does to the tensors of a model, layer by layer, and what to do about it (docs/troubleshooting.md).

    from fp8stack.monitor import Monitor

    with Monitor(model, optimizer, every=100) as monitor:
        for step, batch in enumerate(loader):
            ...                                             # forward, backward, optimizer step
            if step % 100 == 0:
                run.log(monitor.metrics(wait=True))         # a W&B run; any logger takes the dict
    print(*monitor.advice(), sep="\n")

`sampler.py` samples the operands of FP8 layers and how far a step moves their weights, and `advice.py` compares the
numbers with thresholds.
"""

from .advice import RULES, Finding
from .sampler import Monitor

__all__ = ["RULES", "Finding", "Monitor"]
