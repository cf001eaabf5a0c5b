"""What one training run leaves behind, as JSON: the curves and numbers that reports compare."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BASELINE = "baseline"  # plain PyTorch; other runs are compared with it where it is among them
TOLERANCE = 0.01  # of the baseline's validation loss, by which a level may end above it
# Before that losses are not compared. After 50 steps O2 was 0.06 % below the baseline, and three seeds of the baseline
# were up to 2.2 % apart: such a difference says nothing.
LEAST_STEPS = 100


@dataclass
class Record:
    level: str
    train_loss: list[float]  # one per step
    validation: list[tuple[int, float]]  # (step, loss), the last one at the end of the run
    tokens_per_second: float
    bytes_per_parameter: dict[str, float]  # weight, master, grad, m, v and their total
    peak_bytes: int | None  # None where it cannot be measured
    conditions: dict[str, str]  # model, training, text, device, versions
    sample: str = ""
    skipped_steps: int = 0  # whose gradients were not finite

    @property
    def final_loss(self) -> float:
        return self.validation[-1][1]

    @staticmethod
    def path(folder: Path, level: str) -> Path:
        return folder / f"{level}.json"

    def save(self, folder: Path) -> None:
        self.path(folder, self.level).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, folder: Path, level: str) -> Record:
        return cls(**json.loads(cls.path(folder, level).read_text()))


def find_baseline(records: Sequence[Record]) -> Record | None:
    """The baseline, where it is among the records and has taken enough steps to compare losses with."""
    for record in records:
        if record.level == BASELINE and len(record.train_loss) >= LEAST_STEPS:
            return record
    return None


def compare_loss(record: Record, baseline: Record) -> float:
    """How far the run's last validation loss is above the baseline's, as a fraction of it."""
    return record.final_loss / baseline.final_loss - 1


def find_problems(records: Sequence[Record]) -> list[str]:
    """One line for each run that ends not finite, or more than TOLERANCE above the baseline."""
    baseline = find_baseline(records)
    problems = []
    for record in records:
        if not math.isfinite(record.final_loss):
            problems.append(f"{record.level} ends at a validation loss of {record.final_loss}")
        elif baseline and compare_loss(record, baseline) > TOLERANCE:
            problems.append(
                f"{record.level} ends at a validation loss of {record.final_loss:.4f}, "
                f"{compare_loss(record, baseline):+.2%} from the baseline's "
                f"{baseline.final_loss:.4f}; at most {TOLERANCE:+.0%} is allowed"
            )
    return problems


def judge(records: Sequence[Record]) -> str:
    """What can be said of the losses where there are no problems."""
    if not any(record.level == BASELINE for record in records):
        return "Trained without a baseline to compare with."
    if len(records) == 1:
        return "Trained the baseline alone."
    if find_baseline(records) is None:
        steps = len(records[0].train_loss)
        return f"Too few steps to compare losses: {steps}, and it takes {LEAST_STEPS} (--steps)."
    return f"Every level ends within {TOLERANCE:.0%} of the baseline's validation loss or below it."
