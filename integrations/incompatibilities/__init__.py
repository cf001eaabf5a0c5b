"""What is known not to work between fp8stack and other libraries, looked for before training starts.

`rows.py` is a table: what happens, what to do, and a detector that reads a `TrainingRun`. `check` returns what was
found, and `raise_or_warn` acts on it. `fp8stack doctor --deepspeed` prints the findings for a DeepSpeed configuration.

    run = TrainingRun(config=ds_config, model=model, optimizer=optimizer, recipe=recipe_for("O2"))
    raise_or_warn(check(run, allow=["elastic-checkpoint"]))

Limits: what concerns the FP8 layers of other libraries, or Accelerate's own FP8, is not looked for.
docs/incompatibilities.md, which is written by hand, also lists faults between other libraries, and what works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fp8stack.errors import ConfigError, warn
from fp8stack.levels import check_choice

from .rows import ROWS, Row, TrainingRun, zero_of

__all__ = ["ROWS", "Finding", "TrainingRun", "check", "raise_or_warn", "zero_of"]


class Finding(NamedTuple):
    """A row that applies to a run: where, with what value, and how bad it is ("error" or "warning")."""

    row: Row
    where: str
    value: str
    severity: str

    @property
    def message(self) -> str:
        """The key or name, its value, what happens, and what to do."""
        row = self.row
        return f"{self.where}: {self.value} ({row.name}). {row.symptom} {row.remedy}"


def check(run: TrainingRun, allow: Sequence[str] = ()) -> list[Finding]:
    """Return what is known not to work, or to work otherwise than it looks; errors first, else as in the table.

    allow: names of rows whose errors are warnings.

    Raises:
        ConfigError: for a name in `allow` that no row has.
    """
    for name in allow:
        check_choice("allow", name, tuple(row.name for row in ROWS))
    found = [
        Finding(row, where, value, "warning" if row.name in allow else row.severity)
        for row in ROWS
        for detect in row.detectors
        for where, value in detect(run)
    ]
    return sorted(found, key=lambda f: f.severity != "error")


def raise_or_warn(findings: Sequence[Finding]) -> None:
    """Warn of every warning, and raise one error for all errors.

    Raises:
        ConfigError: one for all errors.
    """
    for finding in findings:
        if finding.severity == "warning":
            warn(finding.message)
    errors = [f for f in findings if f.severity == "error"]
    if errors:
        names = list(dict.fromkeys(f.row.name for f in errors))
        raise ConfigError(
            f"{len(errors)} known to fail (docs/incompatibilities.md):\n"
            + "\n".join(f"- {f.message}" for f in errors)
            + f"\nallow={names} turns what was found into warnings."
        )
