"""Which numbers are out of bounds, and what to do about them.

`RULES` is the table of thresholds: each row says which number of a layer is too large or too small, in words, and the
remedy. `find` returns the rules that layers break, and `Finding.text` makes a sentence of one.

The thresholds of overflow and of a gradient under its noise come from papers, that of the update/weight ratio from a
course's rule of thumb. The others are fp8stack's own: they lie far from the numbers of healthy tensors
(`tests/test_monitor.py`), and nothing more is claimed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

SHORT_HISTORY = 16
"""Length of an amax history that the advice recommends where a longer one remembers values of the distant past."""

OPERANDS = {"x": "input", "w": "weight", "g": "gradient"}
Numbers = dict[str, dict[str, dict[str, float]]]


class Rule(NamedTuple):
    """A number that is out of bounds above (or below) a limit, the sentence that says so, and the remedy.

    name: of what is found, where two rules are about one number; the stricter comes first, and tells of a layer alone.
    """

    field: str
    limit: float
    above: bool
    says: str  # with {value}, {limit} and {operand}
    remedy: str = ""  # "" stands for a format or recipe of wider range
    operands: str = "xwg"
    name: str = ""  # the field


RULES = (
    Rule(
        "nonfinite", 0.0, True, "{value:.0f} elements of the {operand} are NaN or infinite",
        "look at what comes before the layer, and lower the learning rate",
    ),
    # fraction of elements; FP8-LM (Peng et al., 2023, section 2.1) lowers its scale above 0.001 %
    Rule(
        "overflow", 1e-5, True, "{value:.3%} of the {operand} is clipped, more than {limit:.3%}",
        'raise fp8_margin by one, or use fp8_recipe="current"',
    ),
    # ours: one element in twenty; Gaussian numbers in E4M3 lose one in 100,000
    Rule("underflow", 0.05, True, "{value:.1%} of the {operand} underflows, more than {limit:.0%}"),
    # ours: each dead block of 128 is a token, or a group of channels, that contributes nothing
    Rule(
        "dead_blocks", 0.01, True,
        "{value:.1%} of the blocks of the {operand} are flushed to zero, more than {limit:.0%}",
    ),
    # Chmiel et al., "FP4 All the Way" (2025): training gains little where a gradient's norm is below about sqrt(3)
    # times that of its quantization noise
    Rule(
        "snr_db", 10 * math.log10(3), False,
        "the {operand} is under its quantization noise: its norm is less than √3 times that of the error of its codes "
        "(an SNR of {value:.1f} dB, less than {limit:.1f})",
        operands="g", name="under_noise",
    ),
    # ours: 20 dB is an error of a tenth of the signal. Whatever the numbers are, E5M2 has 25.6 dB and E4M3 31.6 within
    # its range, so that less means that the range is too short
    Rule("snr_db", 20.0, False, "the {operand} has an SNR of {value:.1f} dB, less than {limit:.0f}"),
    # a decade to either side of the 1e-3 of Stanford's CS231n, "Ratio of weights:updates"
    Rule(
        "update_ratio", 1e-4, False, "a step moves the {operand} by {value:.1e} of its norm, less than {limit:.0e}",
        "raise the learning rate, unless it is warming up or at its end (0 is a step that was skipped)",
    ),
    Rule(
        "update_ratio", 1e-2, True, "a step moves the {operand} by {value:.1e} of its norm, more than {limit:.0e}",
        "lower the learning rate, or warm up longer, unless the loss falls as it should",
    ),
)  # fmt: skip


class Finding(NamedTuple):
    """A rule that some layers break.

    field, operand, above: the rule's: "overflow" and the like (or its name), of "x", "w" or "g", above its limit or
        below.
    layers: those that break it, the worst first; for "nonfinite" in the model's order, as the first may be the cause.
    says: what is wrong with the first, in words.
    remedy: with options as `fp8stack.initialize` takes them: fp8_recipe="current", skip=["lm_head"].
    """

    field: str
    operand: str
    above: bool
    layers: tuple[str, ...]
    says: str
    remedy: str

    @property
    def text(self) -> str:
        """The finding as a sentence."""
        layer, *others = self.layers
        more = f" (and {len(others)} more layers)" if others else ""
        return f"{layer}{more}: {self.says}. Remedy: {self.remedy}."


def find(numbers: Numbers, recipes: Mapping[str, Any]) -> list[Finding]:
    """Return the rules that layers break, in the order of RULES, and for each operand.

    recipes: what each layer's `products` attribute is: its fp8_recipe, its format's name, the state of g's scale, the
        name of its module, and its products in bfloat16.
    """
    found: list[Finding] = []
    # layers by number and operand: of each the first rule that it breaks
    told: dict[tuple[str, str], set[str]] = {}
    for rule, kind in itertools.product(RULES, OPERANDS):
        field, sign = rule.field, 1 if rule.above else -1
        if kind not in rule.operands:
            continue
        values = {n: k[kind][field] for n, k in numbers.items() if field in k.get(kind, {})}
        if field == "update_ratio" and any(values.values()):
            # Where other layers move, one without inputs and gradients was not used, and rightly stands still.
            used = {n for n in values if n not in recipes or len(numbers[n]) > 1}
            values = {n: v for n, v in values.items() if v or n in used}
        known = told.setdefault((field, kind), set())
        broken = [n for n, v in values.items() if sign * v > sign * rule.limit and n not in known]
        if not broken:
            continue
        if field != "nonfinite":
            broken.sort(key=lambda layer: -sign * values[layer])
        known.update(broken)
        worst = broken[0]
        says = rule.says.format(value=values[worst], limit=rule.limit, operand=OPERANDS[kind])
        remedy = rule.remedy or _wider(worst, kind, recipes[worst], numbers[worst][kind])
        found.append(Finding(rule.name or field, kind, rule.above, tuple(broken), says, remedy))
    return found


def _wider(layer: str, kind: str, recipe: Any, found: dict[str, float]) -> str:
    """Return the remedy for numbers that are too small for their scale."""
    g = recipe.g_state
    remembers = g is not None and not g.most_recent and g.history > SHORT_HISTORY
    # An amax below the scale has a code below 1: the scale is still that of far larger values in the history.
    if remembers and found.get("amax", 1.0) < found.get("scale", 0.0):
        return f"use amax_history_len={SHORT_HISTORY}: the scale is that of far larger ones, of steps long past"
    out = f'skip=["{layer}"]'
    if kind == "g":  # products that read it
        rest = "bf16" if "forward" in recipe.in_bf16 else "backward-bf16"
        out = f'precision_for={{"{recipe.layer or layer}": "{rest}"}}'
    if recipe.fp8_recipe == "blockwise":
        return f"leave the layer out with {out}"
    if kind == "g" and recipe.name == "e4m3":
        return 'use fp8_format="hybrid", whose gradients are E5M2'
    return f'use fp8_recipe="blockwise", a scale for each 128 elements, or {out}'
