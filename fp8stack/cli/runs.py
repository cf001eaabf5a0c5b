"""Records of training runs: a folder with `run.json` and `metrics.jsonl`, or a metrics file alone.

`run.json` has the run's name, precision, parameters and tokens_per_step. A line of `metrics.jsonl` is a JSON object:
of training, with "step" and "loss", or of evaluation, with "step" and "val_loss"; more keys may be there, such as
"tokens", those of all steps so far, which tokens_per_step does not say of a run that was resumed with another batch. A
run that was resumed may have a step twice: the later line counts. The last line may be cut off, as when a run is
killed. A loss of null is that of a step which was not taken, its gradients not being finite: left out, and told.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fp8stack.errors import ConfigError, reason_of

Curve = list[tuple[float, float]]
"""Points (x, y), x growing."""
_MOST = 1e100  # of a loss or a count: sums and products are finite


@dataclass
class Run:
    """What was recorded of a run: `training` and `evaluation` are lines by step, in order."""

    name: str
    info: dict[str, Any]
    path: Path = Path()
    training: dict[int, dict[str, Any]] = field(default_factory=dict)
    evaluation: dict[int, dict[str, Any]] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)  # steps without a loss
    notes: list[str] = field(default_factory=list)

    def tokens(self) -> dict[int, float]:
        """Return tokens by step: as lines say where all do and they grow, else steps × tokens_per_step; {}: unknown."""
        lines = sorted((self.evaluation | self.training).items())
        told: dict[int, Any] = {step: line.get("tokens") for step, line in lines}
        if all(map(_is_number, told.values())) and [*told.values()] == sorted({*told.values()}):
            return told
        return {step: step * each for step in told if (each := self.info.get("tokens_per_step"))}

    def curve(self, key: str, xs: dict[int, float]) -> Curve:
        """Return "loss" or "val_loss" over `xs` of steps, or over steps where it is empty."""
        lines = self.training if key == "loss" else self.evaluation
        return [(xs.get(step, step), line[key]) for step, line in lines.items()]

    def numbers(self, key: str) -> list[float]:
        """Return the values of a key of the training lines that have it."""
        return [line[key] for line in self.training.values() if _is_number(line.get(key))]


def read_run(path: str | Path) -> Run:
    """Read a run.

    Raises:
        ConfigError: for a file that is not there or not as described; the message names file and line.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    metrics = path / "metrics.jsonl" if path.is_dir() else path
    if not metrics.is_file():
        raise ConfigError(f"{metrics} is no file. Give a run's folder, or its metrics.jsonl.")
    info = _read_info(folder / "run.json")
    run = Run(str(info.get("name") or (path if path.is_dir() else path.stem)), info, path.resolve())
    lines = _read_text(metrics).rstrip("\n").split("\n")
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where = f"{metrics}, line {number}"
        try:
            line = json.loads(text)
        # ValueErrors are JSON's, or of whole numbers of thousands of digits
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                run.notes.append(f"{where} is cut off and left out")
                continue
            raise ConfigError(f"{where} is not JSON: {error}.") from error
        _add(run, line, where)
    if not run.training:
        raise ConfigError(f'{metrics} has no training lines, which have "step" and "loss".')
    if run.skipped and max(run.skipped) > max(run.training):
        raise ConfigError(_diverged(str(metrics), "loss", None, max(run.skipped), run))
    run.training = dict(sorted(run.training.items()))
    run.evaluation = dict(sorted(run.evaluation.items()))
    return run


def tell_apart(a: Run, b: Run) -> None:
    """Name two runs of one name by the last folder that differs in their paths, too."""
    if a.name != b.name:
        return
    for parts in zip_longest(reversed(a.path.parts), reversed(b.path.parts), fillvalue="/"):
        if parts[0] != parts[1]:
            break
    else:
        parts = ("A", "B")  # one run twice
    a.name, b.name = (f"{a.name} ({part})" for part in parts)


def _add(run: Run, line: Any, where: str) -> None:
    if not isinstance(line, dict):
        raise ConfigError(f"{where} holds a {type(line).__name__}; a line is a JSON object.")
    step = line.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= _MOST:
        raise ConfigError(f'{where}: "step" must be a whole number, got {step!r}.')
    if "loss" not in line and "val_loss" not in line:
        raise ConfigError(
            f'{where} has neither "loss" (of a training line) nor "val_loss"; its keys are {", ".join(line)}.'
        )
    for key, lines in (("loss", run.training), ("val_loss", run.evaluation)):
        if key not in line:
            continue
        value = line[key]
        if key == "loss":
            run.skipped.discard(step)
            lines.pop(step, None)
            if value is None:
                run.skipped.add(step)
                continue
        if not _is_number(value) or value <= 0:
            raise ConfigError(_diverged(where, key, value, step, run))
        lines[step] = line


def _diverged(where: str, key: str, value: Any, step: int, run: Run) -> str:
    diverged = value is None or (isinstance(value, (int, float)) and not _is_number(value))
    what = "the run diverged" if diverged else "it must be a number above 0"
    return (
        f"{where}: {key} is {value!r} at step {step} of {run.name}: {what}. Compare runs with finite losses, above 0; "
        "cut the lines from there on to compare what came before."
    )


def _read_info(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        info = json.loads(_read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    if not isinstance(info, dict):
        raise ConfigError(f"{path} holds a {type(info).__name__}; it must be a JSON object.")
    tokens = info.get("tokens_per_step")
    if tokens is not None and not (_is_number(tokens) and tokens > 0):
        raise ConfigError(f"{path}: tokens_per_step={tokens!r} must be a number above 0.")
    return info


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}") from error


def _is_number(value: Any) -> bool:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return plain and abs(value) <= _MOST  # False for NaN
