"""Steps whose loss or gradients are not finite: skipped, and after some in a row the run ends with advice."""

from __future__ import annotations

import math

from fp8stack.errors import Fp8StackError


class DivergedError(Fp8StackError, RuntimeError):
    """A run whose gradients stay NaN or infinite."""


class Guard:
    """Counts bad steps in a row.

    Args:
        level: "off", "O0", "O1" or "O2".
        fp8_format: "hybrid", "e4m3" or "e5m2".
        lr: the highest learning rate.
        patience: bad steps in a row that end the run.
    """

    def __init__(self, level: str, fp8_format: str, lr: float, patience: int) -> None:
        self.advice = advise(level, fp8_format, lr)
        self.patience = patience
        self.in_a_row = 0

    def accepts(self, step: int, loss: float, norm: float) -> bool:
        """Return whether a step may be taken.

        Raises:
            DivergedError: at the last of `patience` bad steps in a row.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        if self.in_a_row == self.patience:
            raise DivergedError(
                f"step {step}: loss {loss:.4g} and gradient norm {norm:.4g}; {self.patience} steps in a row were "
                f"not finite, and not taken. Continue from the last checkpoint with one of these, in this "
                f"order: {'; '.join(f'{n}. {text}' for n, text in enumerate(self.advice, 1))}."
            )
        return False


def advise(level: str, fp8_format: str, lr: float) -> list[str]:
    """Return what to try, the mildest first."""
    lower = f"--max-lr {lr / 2:g} (half of it)"
    if level == "off":
        return [lower]
    wider = "hybrid" if fp8_format == "e4m3" else "e5m2" if fp8_format == "hybrid" else "hybrid"
    return [
        "--fp8-recipe delayed --fp8-margin 1 (twice the room above the largest value)",
        f"--fp8-format {wider} (another range for activations or their gradients)",
        lower,
        "--opt-level off (bf16)",
    ]
