"""The table itself: check a situation against it, act on what was found, and write it down."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fp8stack.errors import ConfigError, Fp8StackWarning, did_you_mean

from . import config, layers, peers, states
from .situation import Finding, Row, Situation

ROWS: tuple[Row, ...] = tuple(
    sorted((*config.ROWS, *states.ROWS, *layers.ROWS, *peers.ROWS), key=lambda row: row.number)
)
"""All rows, by number."""


def check(situation: Situation) -> list[Finding]:
    """Return what is known not to work, or to work otherwise than it looks, errors first, else by number."""
    found = [
        Finding(row, f.where, f.value, f.severity or row.severity)
        for row in ROWS
        if row.detect is not None
        for f in row.detect(situation)
    ]
    return sorted(found, key=lambda f: ("error", "warning", "info").index(f.severity))


def with_allowed(findings: Iterable[Finding], allow: Sequence[str] = ()) -> list[Finding]:
    """Return the findings, errors of the rows named in `allow` as warnings.

    Raises:
        ConfigError: for a name that no row has.
    """
    known = [row.id for row in ROWS]
    for name in allow:
        if name not in known:
            raise ConfigError(
                f"allow={list(allow)}: no known incompatibility is called {name!r}.{did_you_mean(name, known)} "
                "docs/incompatibilities.md lists them."
            )
    return [
        replace(f, severity="warning") if f.severity == "error" and f.row.id in allow else f
        for f in findings
    ]


def raise_or_warn(findings: Iterable[Finding], allow: Sequence[str] = ()) -> None:
    """Log what is worth knowing, warn of what may go wrong, raise for what will.

    allow: ids of rows whose errors are to be warnings.

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
        lines = [f"{f.row.number}. {f.message}" for f in errors]
        ids = list(dict.fromkeys(f.row.id for f in errors))
        raise ConfigError(
            f"{len(errors)} known to fail (docs/incompatibilities.md):\n"
            + "\n".join(lines)
            + f"\nallow={ids} turns what was found into warnings."
        )


def markdown() -> str:
    """Return docs/incompatibilities.md."""
    lines = [_INTRODUCTION]
    for library in dict.fromkeys(row.where for row in ROWS):
        lines += [f"## {library}", "", *_HEADER]
        for row in ROWS:
            if row.where == library:
                cells = (
                    str(row.number),
                    f"`{row.id}`",
                    row.combination,
                    row.symptom,
                    row.remedy,
                    row.severity + (f"; not found beforehand: {row.undetected}" * (not row.detect)),
                    row.evidence,
                )
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


_HEADER = (
    "| # | name | combination | what happens | what to do | severity | evidence |",
    "|---|---|---|---|---|---|---|",
)
_INTRODUCTION = """\
# Known incompatibilities

Combinations of FP8 with other libraries that fail, or do something else than they seem to. fp8stack's DeepSpeed adapter
looks for them before it changes anything: an error raises, a warning warns, what is merely worth knowing is logged.
`"fp8stack": {"allow": ["name"]}` in the DeepSpeed config turns an error into a warning. The same is printed by

    fp8stack doctor --deepspeed ds_config.json --model train.py:build_model

Of other projects' faults, the versions are DeepSpeed 0.19.8, Accelerate 1.15, Transformers 5.23, Lightning 2.6, torchao
0.18 and bitsandbytes 0.50. This file is generated from `integrations/known/`.
"""
