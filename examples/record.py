"""What one training run leaves behind, as JSON: the curves and numbers that reports compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BASELINE = "baseline"  # plain PyTorch; other runs are compared with it where it is among them
TOLERANCE = 0.01  # of the baseline's validation loss, by which a level may end above it


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
    return next((record for record in records if record.level == BASELINE), None)


def compare_loss(record: Record, baseline: Record) -> float:
    """How far the run's last validation loss is above the baseline's, as a fraction of it."""
    return record.final_loss / baseline.final_loss - 1


def find_deviations(records: Sequence[Record]) -> list[str]:
    """One line for each run that ends more than TOLERANCE above the baseline, or not finite."""
    baseline = find_baseline(records)
    if baseline is None:
        return []
    return [
        f"{record.level} ends at a validation loss of {record.final_loss:.4f}, "
        f"{compare_loss(record, baseline):+.2%} from the baseline's {baseline.final_loss:.4f}; "
        f"at most {TOLERANCE:+.0%} is allowed"
        for record in records
        if not compare_loss(record, baseline) <= TOLERANCE  # written so that a NaN is caught too
    ]
