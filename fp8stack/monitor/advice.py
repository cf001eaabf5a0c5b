"""What is out of bounds, and what to do about it. Each threshold says where it comes from.

`find` says which layers break which rule, and `Finding.text` makes a sentence of it, in whose remedy options are
spelled as Python has them, or as an application's users write them.

The overflow threshold is a paper's, that of the update/weight ratio a course's rule of thumb, and the others are
fp8stack's own: they lie far from what healthy tensors show (`tests/test_monitor.py`), and have no deeper reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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

SHORT_HISTORY = 16
"""Steps after which a delayed scale forgets an amax. Ours: the remedy where a longer one keeps amaxes long past."""

OPERANDS = {"x": "input", "w": "weight", "g": "gradient"}
Numbers = dict[str, dict[str, dict[str, float]]]


class Layer(NamedTuple):
    """What of a layer's recipe decides the remedy."""

    fp8_recipe: str
    fp8_format: str
    history: int = 0  # steps that an amax lasts, of delayed scaling

    @classmethod
    def of(cls, products: Any) -> Layer:
        g = products.g_state
        lasts = 0 if g is None else 1 if g.most_recent else g.history
        return cls(products.fp8_recipe, products.name, lasts)


Spell = Callable[[str, str | None], str]  # an option, and the value that it is to have


def in_python(name: str, value: str | None) -> str:
    """Return an option as `fp8stack.initialize` takes it."""
    if value is None:
        return {"lr": "the learning rate", "warm_up": "warm up longer"}.get(name, name)
    text = f'["{value}"]' if name == "skip" else value if value.isdigit() else f'"{value}"'
    return f"{name}={text}"


class Finding(NamedTuple):
    """A rule that some layers break.

    field, operand, above: of the rule: "overflow" and the like, of "x", "w" or "g", above its limit or below.
    layers: those that break it, the worst first; of numbers that are not finite, the first, where they may have begun.
    says: what is wrong with the first, in words.
    remedy: with options in braces, as {fp8_margin} and {fp8_recipe=current}.
    """

    field: str
    operand: str
    above: bool
    layers: tuple[str, ...]
    says: str
    remedy: str

    def text(self, spell: Spell = in_python) -> str:
        """Return the finding as a sentence, in which options are as `spell` has them."""
        layer, *others = self.layers
        more = f" (and {len(others)} more layers)" if others else ""
        remedy = re.sub(r"{(\w+)(?:=([^}]*))?}", lambda m: spell(m[1], m[2]), self.remedy)
        return f"{layer}{more}: {self.says}. Remedy: {remedy}."


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
        "look at what comes before the layer, and lower {lr}",
    ),
    Rule(
        "overflow", OVERFLOW, True, "{value:.3%} of the {operand} is clipped, more than {limit:.3%}",
        "raise {fp8_margin} by one, or use {fp8_recipe=current}",
    ),
    Rule("underflow", UNDERFLOW, True, "{value:.1%} of the {operand} underflows, more than {limit:.0%}"),
    Rule(
        "dead_blocks", DEAD_BLOCKS, True,
        "{value:.1%} of the blocks of the {operand} are flushed to zero, more than {limit:.0%}",
    ),
    Rule("snr_db", LEAST_SNR_DB, False, "the {operand} has an SNR of {value:.1f} dB, less than {limit:.0f}"),
    Rule(
        "update_ratio", LOW, False, "a step moves the {operand} by {value:.1e} of its norm, less than {limit:.0e}",
        "raise {lr}, unless it is warming up or at its end (0 is a step that was skipped)",
    ),
    Rule(
        "update_ratio", HIGH, True, "a step moves the {operand} by {value:.1e} of its norm, more than {limit:.0e}",
        "lower {lr}, or {warm_up}, unless the loss falls as it should",
    ),
)  # fmt: skip


def find(numbers: Numbers, layers: dict[str, Layer]) -> list[Finding]:
    """Return what rules and operands are broken by layers, in the order of RULES."""
    return [f for rule in RULES for kind in OPERANDS for f in _broken(rule, kind, numbers, layers)]


def _broken(rule: Rule, kind: str, numbers: Numbers, layers: dict[str, Layer]) -> Iterator[Finding]:
    sign = 1 if rule.above else -1
    values = {n: k[kind][rule.field] for n, k in numbers.items() if rule.field in k.get(kind, {})}
    if rule.field == "update_ratio" and any(values.values()):
        # a step that moves others leaves alone what was not used: layers of ours without inputs and gradients
        values = {n: v for n, v in values.items() if v or n not in layers or len(numbers[n]) > 1}
    broken = {layer: v for layer, v in values.items() if sign * v > sign * rule.limit}
    if not broken:
        return
    order = list(broken)
    if rule.field != "nonfinite":
        order.sort(key=lambda layer: -sign * broken[layer])
    worst = order[0]
    says = rule.says.format(value=broken[worst], limit=rule.limit, operand=OPERANDS[kind])
    remedy = rule.remedy or _wider(worst, kind, layers[worst], numbers[worst][kind])
    yield Finding(rule.field, kind, rule.above, tuple(order), says, remedy)


def _wider(layer: str, kind: str, how: Layer, found: dict[str, float]) -> str:
    skip = f"{{skip={layer}}}"
    # even the largest element has a code below 1: its history remembers far larger ones
    if how.history > SHORT_HISTORY and found.get("amax", 1.0) < found.get("scale", 0.0):
        return f"use {{amax_history_len={SHORT_HISTORY}}}: the scale is that of far larger ones, of steps long past"
    if how.fp8_recipe == "blockwise":
        return f"leave the layer out with {skip}"
    if kind == "g" and how.fp8_format == "e4m3":
        return "use {fp8_format=hybrid}, whose gradients are E5M2"
    return f"use {{fp8_recipe=blockwise}}, a scale for each 128 elements, or {skip}"
