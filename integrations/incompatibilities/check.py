"""Check a run against the table of incompatibilities, and act on what was found."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fp8stack.errors import ConfigError, Fp8StackWarning, did_you_mean

from .rows import ROWS, Row
from .training_run import TrainingRun


@dataclass(frozen=True)
class Finding:
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


def check(run: TrainingRun) -> list[Finding]:
    """Return what is known not to work, or to work otherwise than it looks; errors first, else as in the table."""
    found = [
        Finding(row, where, value, row.severity)
        for row in ROWS
        for detect in row.detectors
        for where, value in detect(run)
    ]
    return sorted(found, key=lambda f: f.severity != "error")


def with_allowed(findings: Iterable[Finding], allow: Sequence[str] = ()) -> list[Finding]:
    """Return the findings; errors of the rows named in `allow` become warnings.

    Raises:
        ConfigError: for a name that no row has.
    """
    known = [row.name for row in ROWS]
    for name in allow:
        if name not in known:
            raise ConfigError(
                f"allow={list(allow)}: no known incompatibility is called {name!r}.{did_you_mean(name, known)} "
                "docs/incompatibilities.md lists them."
            )
    return [
        replace(f, severity="warning") if f.severity == "error" and f.row.name in allow else f
        for f in findings
    ]


def raise_or_warn(findings: Iterable[Finding], allow: Sequence[str] = ()) -> None:
    """Warn of every warning, and raise one error for all errors.

    allow: names of rows whose errors become warnings.

    Raises:
        ConfigError: one for all errors, or for an unknown name in `allow`.
    """
    found = with_allowed(findings, allow)
    for finding in found:
        if finding.severity == "warning":
            warnings.warn(finding.message, Fp8StackWarning, stacklevel=2)
    errors = [f for f in found if f.severity == "error"]
    if errors:
        names = list(dict.fromkeys(f.row.name for f in errors))
        raise ConfigError(
            f"{len(errors)} known to fail (docs/incompatibilities.md):\n"
            + "\n".join(f"- {f.message}" for f in errors)
            + f"\nallow={names} turns what was found into warnings."
        )
