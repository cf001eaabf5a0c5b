"""Check a run against the table of incompatibilities, and act on what was found."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fp8stack.errors import ConfigError, Fp8StackWarning, did_you_mean

from .rows import ROWS, Row, Severity
from .training_run import TrainingRun


@dataclass(frozen=True)
class Finding:
    """A row that applies to a run: where, with what value, and how bad it is."""

    row: Row
    where: str
    value: str
    severity: Severity

    @property
    def message(self) -> str:
        """The key or name, its value, what happens, and what to do."""
        row = self.row
        return f"{self.where}: {self.value} ({row.name}). {row.symptom} {row.remedy}"


def check(run: TrainingRun) -> list[Finding]:
    """Return what is known not to work, or to work otherwise than it looks; errors first, else as in the table."""
    found = [
        Finding(row, f.where, f.value, f.severity or row.severity)
        for row in ROWS
        for detect in row.detectors
        for f in detect(run)
    ]
    return sorted(found, key=lambda f: ("error", "warning", "info").index(f.severity))


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
    """Log every note, warn of every warning, and raise one error for all errors.

    allow: names of rows whose errors become warnings.

    Raises:
        ConfigError: one for all errors, or for an unknown name in `allow`.
    """
    errors = []
    for finding in with_allowed(findings, allow):
        if finding.severity == "error":
            errors.append(finding)
        elif finding.severity == "warning":
            warnings.warn(finding.message, Fp8StackWarning, stacklevel=2)
        else:
            logging.getLogger("fp8stack").info("%s", finding.message)
    if errors:
        names = list(dict.fromkeys(f.row.name for f in errors))
        raise ConfigError(
            f"{len(errors)} known to fail (docs/incompatibilities.md):\n"
            + "\n".join(f"- {f.message}" for f in errors)
            + f"\nallow={names} turns what was found into warnings."
        )
