"""Known incompatibilities of FP8 training with DeepSpeed, Accelerate, Transformers, Lightning, FSDP2 and others.

One table, `ROWS`: what meets what, what happens then, what to do, and, where it can be known before training starts, a
detector over a `Situation`. `check` returns what was found, `raise_or_warn` acts on it, `markdown` is
docs/incompatibilities.md, and `fp8stack doctor --deepspeed` prints the findings for a DeepSpeed configuration. None of
the libraries is imported.

    findings = check(Situation(config=ds_config, model=model, optimizer=optimizer, recipe=recipe_for("O2")))
    raise_or_warn(findings, allow=["elastic-checkpoint"])
"""

from .situation import Finding, Row, Situation
from .table import ROWS, check, markdown, raise_or_warn, with_allowed

__all__ = [
    "ROWS",
    "Finding",
    "Row",
    "Situation",
    "check",
    "markdown",
    "raise_or_warn",
    "with_allowed",
]
