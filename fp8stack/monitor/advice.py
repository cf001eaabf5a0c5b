"""What is out of bounds, and what to do about it. Each threshold says where it comes from.

The overflow threshold is a paper's, that of the update/weight ratio a course's rule of thumb, and the others are
fp8stack's own: they lie far from what healthy tensors show (`tests/test_monitor.py`), and have no deeper reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

OVERFLOW = 1e-5
"""Fraction of elements clipped. FP8-LM (Peng et al., 2023, section 2.1) lowers its scale above 0.001 %."""

UNDERFLOW = 0.05
"""Fraction of elements flushed to zero. Ours: one in twenty; Gaussian numbers in E4M3 lose one in 100,000."""

DEAD_BLOCKS = 0.01
"""Fraction of blocks of 128 flushed to zero as a whole. Ours: each is a token or a group of channels without a say."""

LEAST_SNR_DB = 20.0
"""Signal over error of a cast, in dB. Ours: an error of a tenth of the signal, where E5M2 has 25.6 dB within its range
and E4M3 31.6, whatever the numbers are; less means that the range is too short for them."""

UPDATE_RATIO = (1e-4, 1e-2)
"""‖Δw‖ / ‖w‖ of a step. A decade to either side of the 1e-3 of Stanford's CS231n, "Ratio of weights:updates"."""

OPERANDS = {"x": "input", "w": "weight", "g": "gradient"}
Numbers = dict[str, dict[str, dict[str, float]]]


class Layer(NamedTuple):
    """What of a layer's recipe decides the remedy."""

    fp8_recipe: str
    fp8_format: str


class Rule(NamedTuple):
    """A field that is out of bounds above (or below) a limit, in words, and what helps; "" is a wider range."""

    field: str
    limit: float
    above: bool
    says: str  # of {value}, {limit} and {operand}
    remedy: str = ""


LOW, HIGH = UPDATE_RATIO
RULES = (
    Rule(
        "nonfinite", 0.0, True, "{value:.0f} elements of the {operand} are NaN or infinite",
        "look at what comes before the layer, and lower the learning rate",
    ),
    Rule(
        "overflow", OVERFLOW, True, "{value:.3%} of the {operand} is clipped, more than {limit:.3%}",
        'raise fp8_margin by one, or use fp8_recipe="current"',
    ),
    Rule("underflow", UNDERFLOW, True, "{value:.1%} of the {operand} underflows, more than {limit:.0%}"),
    Rule(
        "dead_blocks", DEAD_BLOCKS, True,
        "{value:.1%} of the blocks of the {operand} are flushed to zero, more than {limit:.0%}",
    ),
    Rule("snr_db", LEAST_SNR_DB, False, "the {operand} has an SNR of {value:.1f} dB, less than {limit:.0f}"),
    Rule(
        "update_ratio", LOW, False, "a step moves the {operand} by {value:.1e} of its norm, less than {limit:.0e}",
        "raise the learning rate, unless it is warming up or at its end (0 is a step that was skipped)",
    ),
    Rule(
        "update_ratio", HIGH, True, "a step moves the {operand} by {value:.1e} of its norm, more than {limit:.0e}",
        "lower the learning rate, or warm up longer",
    ),
)  # fmt: skip


def advise(numbers: Numbers, layers: dict[str, Layer]) -> list[str]:
    """Return a sentence for each rule and operand that some layer breaks: the worst layer, its number, the remedy.

    Of numbers that are not finite the first layer is named, where they may have begun.
    """
    return [
        line for rule in RULES for kind in OPERANDS for line in _lines(rule, kind, numbers, layers)
    ]


def _lines(rule: Rule, kind: str, numbers: Numbers, layers: dict[str, Layer]) -> Iterable[str]:
    sign = 1 if rule.above else -1
    values = {n: k[kind][rule.field] for n, k in numbers.items() if rule.field in k.get(kind, {})}
    broken = {layer: v for layer, v in values.items() if sign * v > sign * rule.limit}
    if not broken:
        return
    worst = max(broken, key=lambda layer: sign * broken[layer])
    if rule.field == "nonfinite":
        worst = next(iter(broken))
    more = f" (and {len(broken) - 1} more layers)" if len(broken) > 1 else ""
    says = rule.says.format(value=broken[worst], limit=rule.limit, operand=OPERANDS[kind])
    yield f"{worst}{more}: {says}. Remedy: {rule.remedy or _wider(worst, kind, layers[worst])}."


def _wider(layer: str, kind: str, how: Layer) -> str:
    if how.fp8_recipe == "blockwise":
        return f'leave the layer out with skip=["{layer}"]'
    if kind == "g" and how.fp8_format == "e4m3":
        return 'use fp8_format="hybrid", whose gradients are E5M2'
    return f'use fp8_recipe="blockwise", a scale for each 128 elements, or skip=["{layer}"]'
