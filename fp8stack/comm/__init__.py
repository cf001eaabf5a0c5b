"""O1: gradients in FP8."""

from .gradients import GradientHandle

__all__ = ["GradientHandle"]
