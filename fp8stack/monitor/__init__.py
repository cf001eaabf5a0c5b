"""What FP8 does to the tensors of a model, layer by layer, and what to do about it; formulas are in docs/monitoring.md.

    from fp8stack.monitor import Monitor

    with Monitor(model, optimizer, every=100, to=[SummaryWriter(), "run/fp8.jsonl"]) as monitor:
        for batch in loader:
            ...                                             # forward, backward, optimizer step
    print(*monitor.advice(), sep="\n")

`sampler.py` samples the operands of FP8 layers, `updates.py` how far a step moves their weights, `outputs.py` writes
the numbers to TensorBoard, W&B or JSONL, and `advice.py` holds them against thresholds.
"""

from .advice import DEAD_BLOCKS, LEAST_SNR_DB, OVERFLOW, UNDERFLOW, UPDATE_RATIO, Finding
from .sampler import Monitor

__all__ = [
    "DEAD_BLOCKS",
    "LEAST_SNR_DB",
    "OVERFLOW",
    "UNDERFLOW",
    "UPDATE_RATIO",
    "Finding",
    "Monitor",
]
