"""Steps whose loss or gradients are not finite: skipped, counted, and after some in a row the run ends with advice."""

from __future__ import annotations

import math

from fp8stack.errors import Fp8StackError

from .config import DEFAULTS, OF_FP8, PRECISIONS, Config
from .options import as_flag


class DivergedError(Fp8StackError, RuntimeError):
    """A run whose gradients stay NaN or infinite."""


class Guard:
    """Counts the steps of a process, taken and left out, and bad ones in a row.

    Args:
        config: of the run; `max_nan_steps` bad steps in a row end it.
        precision: what products are in on this device, as `runs.choose_precision` says: "FP8 O2", "bf16 O2", "bf16".
    """

    def __init__(self, config: Config, precision: str) -> None:
        self.advice = advise(config, precision)
        self.patience = config.max_nan_steps
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
                f"step {step}: loss {loss:.4g} and gradient norm {norm:.4g}; {what}. Continue from the last "
                "checkpoint, if --list-checkpoints shows one, or begin again,"
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


def advise(config: Config, precision: str) -> list[str]:
    """Return what to try, the mildest first: flags that the application takes beside the run's own."""
    lower = f"--max-lr {config.max_lr / 2:g} (half of it)"
    if not precision.startswith("FP8"):
        return [lower]
    advice = []
    # the other recipes take scales from the values themselves, and clip nothing
    if config.fp8_recipe == "delayed" and config.fp8_margin < 16:
        margin = config.fp8_margin + 1
        advice.append(f"--fp8-margin {margin} (room of {2**margin} times the largest value)")
    native = config.compute != "te" and config.blocks != "te"  # TransformerEngine has no e5m2
    wider = {"e4m3": "hybrid", "hybrid": "e5m2" if native else "", "e5m2": "hybrid"}
    if (
        config.fp8_recipe in ("auto", "current", "tokenwise", "delayed")
        and wider[config.fp8_format]
    ):
        form = wider[config.fp8_format]
        advice.append(f"--fp8-format {form} (another range for activations or their gradients)")
    return [*advice, lower, _without_fp8(config)]


def _without_fp8(config: Config) -> str:
    """Return how to multiply without FP8: `--opt-level off` contradicts other flags on FP8."""
    plain = PRECISIONS[config.compute_dtype]
    given = [name for name in OF_FP8 if getattr(config, name) != DEFAULTS[name]]
    given += ["use_fp8"] * (config.use_fp8 is True)
    if not given:
        return f"--opt-level off ({plain})"
    if not config.fuse:
        return f"--compute bf16 (products in {plain})"
    flags = ", ".join(map(as_flag, given))
    return f"--opt-level off ({plain}), without {flags}"
