"""Steps whose loss or gradients are not finite: skipped, counted, and after some in a row the run ends with advice."""

from __future__ import annotations

import math

from fp8stack.errors import Fp8StackError


class DivergedError(Fp8StackError, RuntimeError):
    """A run whose gradients stay NaN or infinite."""


class Guard:
    """Counts the steps of a process, taken and left out, and bad ones in a row.

    Args:
        level: "off", "O0", "O1" or "O2".
        fp8_format: "hybrid", "e4m3" or "e5m2".
        lr: the highest learning rate.
        patience: bad steps in a row that end the run.
    """

    def __init__(self, level: str, fp8_format: str, lr: float, patience: int) -> None:
        self.advice = advise(level, fp8_format, lr)
        self.patience = patience
        self.in_a_row = self.taken = self.left_out = 0

    def accepts(self, step: int, loss: float, norm: float, searching: bool = False) -> bool:
        """Return whether a step may be taken, or is GradScaler's to leave out.

        searching: GradScaler looks for its scale by losing steps, which say nothing of the run.

        Raises:
            DivergedError: at the last of `patience` bad steps in a row.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            self.taken += 1
            return True
        self.left_out += 1
        if searching:
            return True
        self.in_a_row += 1
        if self.in_a_row == self.patience:
            what = f"{self.patience} steps in a row were not finite, and not taken"
            raise self._diverged(
                f"step {step}: loss {loss:.4g} and gradient norm {norm:.4g}; {what}. Continue from the last checkpoint"
            )
        return False

    def sum_up(self) -> str:
        """Return what is to be said at the end of the run, if anything.

        Raises:
            DivergedError: if there were steps, and none was taken.
        """
        if not self.left_out:
            return ""
        if not self.taken:
            raise self._diverged(
                f"none of {self.left_out} steps was taken, since none was finite: the weights are as they were. "
                "Try again"
            )
        return f"{self.left_out} of {self.left_out + self.taken} steps were not finite, and so not taken"

    def _diverged(self, what: str) -> DivergedError:
        order = "; ".join(f"{n}. {text}" for n, text in enumerate(self.advice, 1))
        return DivergedError(f"{what} with one of these, in this order: {order}.")


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
