"""What is known not to work between fp8stack and other libraries, looked for before training starts.

`rows.py` is a table: what happens, what to do, and a detector that reads a `TrainingRun`. `check` returns what was
found, and `raise_or_warn` acts on it. `fp8stack doctor --deepspeed` prints the findings for a DeepSpeed configuration.

    findings = check(TrainingRun(config=ds_config, model=model, optimizer=optimizer, recipe=recipe_for("O2")))
    raise_or_warn(findings, allow=["elastic-checkpoint"])

Limits: what concerns the FP8 layers of other libraries, or Accelerate's own FP8, is not looked for.
docs/incompatibilities.md, which is written by hand, also lists faults between other libraries, and what works.
"""

from .check import Finding, check, raise_or_warn, with_allowed
from .rows import ROWS
from .training_run import TrainingRun, zero_of

__all__ = ["ROWS", "Finding", "TrainingRun", "check", "raise_or_warn", "with_allowed", "zero_of"]
