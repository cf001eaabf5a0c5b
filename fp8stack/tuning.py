"""`fp8stack.tune`: which layers of this model are worth FP8 on this GPU, within a budget of accuracy.

    found = fp8stack.tune(model, batch, budget=0.015)
    model, optimizer = fp8stack.initialize(model, optimizer, "O2", **found.options)

Why: a few layers make most of what FP8 changes (docs/numerics.md), and what a layer saves depends on its shape and on
the GPU. Both can be measured; neither can be known beforehand.

How:

1. The model goes to O0 where it is, with every layer in FP8 that can be. No second copy of its weights is made. Which
   products are in bfloat16 is an attribute that forward reads (`casts.Products.in_bf16`), so layers are switched
   between forwards. All in bfloat16 they give the reference.
2. What a layer saves: the time of its forward and backward in bfloat16 less that in FP8, on the input that it gets in
   the reference. Layers of one shape are timed once.
3. What a layer costs: the mean KL(reference || this layer's forward in FP8) of the logits, in nats a token, or the
   absolute change of the loss where a model returns no logits. Forwards only: a layer whose output is in bfloat16 and
   whose gradients are in FP8 ("forward-bf16") costs nothing here, and saves less.
4. Layers are taken for FP8 by cost for each ms saved, the cheapest first, while the sum of the costs fits.
5. Costs add up roughly only. So the mix itself is run, and the sum that is allowed is moved: down if the mix is over
   the budget, up if there is room, a bounded number of times. What is reported is the measured cost of a mix.
6. The model is restored, also after an error: classes, modes, weights, buffers, gradients and random numbers are as
   before. Its hooks run in each forward.

`precision_for` names the layers that differ from the default. Layers that given options speak of (`head`, `first_last`,
`precision_for`, `skip`) are not chosen, and those that the batch does not call keep the level's precision. What both
cost counts, as do products by bare parameters, which `matmuls=False` leaves in bfloat16.

Limits: the error that FP8 makes in gradients is not measured; the monitor watches that. Times are those of layers
alone, in eager mode, the host's where it is slower, each with a gradient for its input: casts that layers share and
fused MLPs save more, compiled layers too, and a first layer less. Products by bare parameters are not timed: with
`select="all"`, which the options have, they are in FP8 at any size. Rows of padding count as tokens.
TransformerEngine's layers are not tuned. Ranks time for themselves: call it on one, and hand the options to all.
"""

from __future__ import annotations

import copy
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from glob import escape
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from . import capability
from .api import Decisions, carry_out, decide, restore
from .errors import ConfigError, ModelError, UnsupportedDeviceError, warn
from .levels import LEVELS, PRECISIONS, check_number, recipe_for
from .nn.attention import Attention
from .nn.coverage import listed
from .nn.experts import Fp8Experts
from .nn.finishing import products_in
from .nn.heads import HEAD, find_heads
from .nn.precision import with_products
from .report import say

BF16 = PRECISIONS["bf16"]
OF_STATES = (  # options that O0 has none of
    "gradients", "states", "master", "states_for", "step_in_backward", "offload", "optimizer_backend",
)  # fmt: skip
ROUNDS = 12  # mixes that are run at most
REPEATS = 20  # of a layer that is timed, of which the median counts
ROWS = 1024  # of logits that are compared at a time, in float32


@dataclass
class TunedLayer:
    """What was measured of a layer, and the precision that it gets.

    cost: what its forward in FP8 costs by itself. ms: its time by precision, of all calls in one forward and backward.
    precision: "fp8", "forward-bf16", "bf16", or "as given" where `tune` had no choice.
    """

    name: str
    cost: float = 0.0
    calls: int = 0
    ms: dict[str, float] = field(default_factory=dict)
    precision: str = "as given"

    @property
    def cheapest(self) -> str:
        """The fastest precision that costs nothing; bfloat16 where it is as fast."""
        free = [how for how in ("bf16", "forward-bf16") if how in self.ms]
        return min(free, key=self.ms.__getitem__)

    @property
    def gain(self) -> float:
        """The ms that FP8 saves beside that."""
        return self.ms[self.cheapest] - self.ms["fp8"]


@dataclass
class Tuned:
    """The result of `tune`; printed, it is a table.

    options: for `fp8stack.initialize(model, optimizer, "O2", **options)`, plain data.
    cost: what all chosen precisions together cost, measured, in `unit`; at most the budget if `met`.
    """

    options: dict[str, Any]
    cost: float
    budget: float
    met: bool
    unit: str
    device: str
    layers: list[TunedLayer]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        kinds: dict[tuple[str, str], list[TunedLayer]] = {}
        for x in self.layers:
            kinds.setdefault((re.sub(r"\d+", "*", x.name), x.precision), []).append(x)
        lines = [
            f"fp8stack tune, {self.device}; cost: {self.unit}",
            "  n   FP8 costs   saves, ms  layers, precision",
        ]
        for (kind, how), same in [*kinds.items(), (("all", "the mix"), self.layers)]:
            saves = sum(x.ms["bf16"] - x.ms["fp8"] for x in same if x.ms)
            lines.append(
                f"{len(same):3} {sum(x.cost for x in same):11.5f} {saves:11.3f}  {kind}, {how}"
            )
        kept = sum(x.ms["bf16"] - x.ms[x.precision] for x in self.layers if x.ms)
        within = "within the budget" if self.met else "OVER the budget"
        told = f"the mix costs {self.cost:.5f}, {within} of {self.budget:g}, saves {kept:.3f} ms"
        slower = all(x.gain <= 0 and x.cheapest == "bf16" for x in self.layers if x.ms)
        told += ": no layer is faster in FP8" * slower
        return "\n".join([*lines, told, f"options: {self.options}"])


def tune(
    model: nn.Module,
    batch: Any,
    *,
    budget: float = 0.015,
    loss: Callable[[Any], Tensor] | None = None,
    strict: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Tuned:
    """Return the options for `initialize` that keep the most of FP8's speed within a budget for what FP8 changes.

    It runs the model about as often as it has layers, forward only and in evaluation mode, and times layers.

    Args:
        model: as for `initialize`, which comes afterwards; with trained weights, since random ones say little. float32
            models run under bfloat16 autocast on a GPU, unless the call is under an autocast of its own.
        batch: what the model is called with, on its device, as in training, such as tokens [B, T] int64: a tensor, a
            tuple of arguments or a dict of them by name.
        budget: the most that FP8 may change, in nats a token of KL, or in units of the loss; > 0.
        loss: a function of what the model returns. The change of this loss then counts instead of KL. Needed where
            the output is not logits [..., classes], and has neither `logits` nor a `loss`.
        strict: raise where `initialize` would fall back.
        quiet: do not print the table, which goes where the card of `initialize` does. `print(result)` shows it, too.
        options: for `initialize`, such as fp8_recipe="blockwise", skip=["head"]. They are in the result, too.

    Raises:
        ConfigError: a budget that is not a number > 0, an unknown option, or frozen="fp8".
        ModelError: a model that is initialized already, that has no layers for FP8, or whose logits or loss are missing
            or not finite.
        UnsupportedDeviceError: a device without native FP8 products, or where times mean nothing (a CPU).
    """
    budget = check_number("budget", budget, sys.float_info.min, rule="> 0")
    recipe = recipe_for("O2", **({"select": "all"} | options))
    if recipe.frozen == "fp8":
        told = "it would round the weights that are compared with. Leave it out here, and give it to initialize"
        raise ConfigError(f'frozen="fp8": {told}.')
    model = getattr(model, "_orig_mod", model)  # whose names have no prefix of torch.compile's
    of_o0 = {name: getattr(LEVELS["O0"], name) for name in ("level", *OF_STATES)}
    decisions = decide(model, None, replace(recipe, **of_o0), strict)
    report = decisions.report
    if report.compute != "native":
        told = f"tune compares native FP8 layers with bfloat16; compute would be {report.compute}"
        raise UnsupportedDeviceError(f"{told} ({report.compute_reason}). Leave compute out.")
    if not decisions.layers.gemm:
        left = f" Left out: {listed(report.skipped)}." if report.skipped else ""
        raise ModelError(f"the model has no layers for FP8: there is nothing to tune.{left}")
    modes = {module: module.training for module in model.modules()}
    carry_out(model, None, decisions)
    try:
        for module in modes:
            module.training = False
        with torch.compiler.set_stance("force_eager"):
            result = _Mixes(model, batch, loss, decisions, options).choose(budget)
    finally:
        restore(model)
        for module, mode in modes.items():
            module.training = mode
    if not result.met:
        told = f"what is not to be chosen costs {result.cost:.3g}, more than budget={budget:g}"
        names = [x.name for x in result.layers if x.precision == "as given"]
        warn(
            f"fp8stack tune: {told}: {', '.join(names) or 'bare parameters'}. Give matmuls=False, fewer options that "
            "ask for FP8, or a larger budget."
        )
    if not quiet:
        say(result)
    return result


class _Mixes:
    """A model at O0 whose layers are switched between FP8 and bfloat16."""

    def __init__(
        self, model: nn.Module, batch: Any, loss: Any, decisions: Decisions, options: dict[str, Any]
    ) -> None:
        self.model, self.batch, self.loss, self.options = model, batch, loss, options
        self.recipe, self.device = decisions.recipe, next(model.parameters()).device
        named = {name: module for name, module, _ in decisions.layers.gemm}
        # the out-projection of an attention goes with it
        inner = {
            m for outer in named.values() if isinstance(outer, Attention) for m in outer.children()
        }
        self.modules = {name: module for name, module in named.items() if module not in inner}
        self.layers = {name: TunedLayer(name) for name in self.modules}
        self.given = {p: p.in_bf16 for p in products_in(model)}
        self.times: dict[str, dict[str, float]] = {}
        precision, given_head = decisions.layers.precision, "head" in options
        reasons = {""} if given_head else {"", HEAD}
        heads = find_heads(model) if given_head else set()
        self.default = {}  # of layers that are to be chosen
        for name, module in self.modules.items():
            whys = {precision.of(m)[1] for m in (module, *module.children())}
            if name and whys <= reasons and module not in heads:
                self.default[name] = "forward-bf16" if HEAD in whys else "fp8"
        hooks = []
        for name in self.default:
            timer = partial(self._time, name)
            hooks.append(self.modules[name].register_forward_pre_hook(timer, with_kwargs=True))
        try:
            self._set({}, rest=False)
            self.reference = self._run()
        finally:
            for hook in hooks:
                hook.remove()
        self.of_loss = loss is not None or self.reference.ndim == 0
        if bad := int((~self.reference.isfinite()).sum()):
            told = f"the {'loss' if self.of_loss else 'logits'} of this batch in bfloat16 must be finite"
            raise ModelError(
                f"{told}, and {bad} are NaN or infinite. Look at weights and batch, or give loss=...."
            )
        self.free = {name: x for name, x in self.layers.items() if x.calls}
        if not self.free:
            told = "the batch calls no layer with a name of its own that options leave to be chosen"
            raise ModelError(f"{told}: there is nothing to tune. Give fewer of them: {options}.")

    def choose(self, budget: float) -> Tuned:
        """Measure, find the mix, and put it into options."""
        for name, layer in self.free.items():
            layer.cost = self._cost({name: "fp8"}, rest=False)
            layer.ms = {how: ms * layer.calls for how, ms in layer.ms.items()}
        chosen, cost = search(self.free.values(), budget, self._cost)
        fp8 = "wgrad-bf16" if self.recipe.wgrad == "bf16" else "fp8"
        options, given = {"select": "all"} | self.options, [*self.recipe.precision_for]
        # of a pattern that is given twice the last counts, and where it stands
        wanted = {p: how for i, (p, how) in enumerate(given) if p not in dict(given[i + 1 :])}
        for name, layer in self.free.items():
            layer.precision = how = chosen[name]
            if how != self.default[name]:
                wanted[escape(name)] = fp8 if how == "fp8" else how
        if wanted:
            options["precision_for"] = wanted
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        unit = "absolute change of the loss" if self.of_loss else "KL, nats a token"
        return Tuned(options, cost, budget, cost <= budget, unit, device, [*self.layers.values()])

    def _run(self) -> Tensor:
        """Return the logits or the loss of the batch."""
        batch: Any = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.batch)
        args = batch if isinstance(batch, (tuple, list)) else (batch,)
        attends = [m for m in self.model.modules() if isinstance(m, nn.MultiheadAttention)]
        frozen = [p for m in attends for p in m.parameters() if not p.requires_grad]
        buffers = [(b, b.clone()) for b in self.model.buffers()]  # some are counters
        try:
            for p in frozen:  # without gradients torch's own attention runs
                p.requires_grad = True
            with self._surroundings(grad=bool(attends)):
                output = self.model(**batch) if isinstance(batch, Mapping) else self.model(*args)
                value: Any = output if self.loss is None else self.loss(output)
        finally:
            for p in frozen:
                p.requires_grad = False
            for buffer, before in buffers:
                buffer.copy_(before)
        if self.loss is None and not isinstance(output, Tensor):
            get = output.get if isinstance(output, Mapping) else partial(getattr, output)
            value = next((v for n in ("logits", "loss") if (v := get(n, None)) is not None), None)
        fits = isinstance(value, Tensor) and value.is_floating_point()
        of_one = self.loss is not None or (fits and value.ndim == 0)
        if not fits or (value.numel() != 1 if of_one else value.shape[-1] < 2):
            what, of = ("the model", output) if self.loss is None else ("loss=...", value)
            raise ModelError(
                f"{what} returned {type(of).__name__}, which has no logits and is no loss. Pass loss=..., a function "
                "from the model's output to a tensor of one element."
            )
        result: Tensor = value.detach()
        return result

    @contextmanager
    def _surroundings(self, grad: bool) -> Iterator[None]:
        """Run a forward with the same random numbers each time, autocast, with gradients or without."""
        kind, autocast = self.device.type, cast(Any, nullcontext())
        wide = {p.dtype for p in self.model.parameters()} == {torch.float32}
        if wide and kind == "cuda" and not torch.is_autocast_enabled(kind):
            autocast = torch.autocast(kind, torch.bfloat16)
        rng = torch.random.fork_rng([self.device] if kind == "cuda" else [])
        with rng, torch.inference_mode(False), torch.set_grad_enabled(grad), autocast:
            yield

    def _cost(self, mix: dict[str, str], rest: bool = True) -> float:
        """Return what a mix changes, with what is not to be chosen if `rest`; infinity if it is not finite."""
        self._set(mix, rest)
        value, total, rows = self._run(), 0.0, 1
        if self.of_loss:
            total = float((value.double() - self.reference.double()).abs())
        else:
            rows = value.numel() // value.shape[-1]
            both = (x.reshape(rows, -1).split(ROWS) for x in (self.reference, value))
            for parts in zip(*both, strict=True):
                p, q = (x.float().log_softmax(-1) for x in parts)
                total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        return max(total / rows, 0.0) if math.isfinite(total) else math.inf

    def _set(self, mix: dict[str, str], rest: bool) -> None:
        """Switch layers to the precisions of `mix`, others to bfloat16, or if `rest` to what they were given."""
        for each, given in self.given.items():
            each.in_bf16 = given if rest else BF16
        for name in [*mix, *(self.free if rest else ())]:
            for each in products_in(self.modules[name]):
                each.in_bf16 = self._in_bf16(mix.get(name, "bf16"))

    def _in_bf16(self, how: str) -> str:
        """Return the products in bfloat16 of a layer of that precision, with what the recipe says of all layers."""
        return with_products(PRECISIONS[how], "wgrad" if self.recipe.wgrad == "bf16" else "")

    def _time(self, name: str, module: nn.Module, *call: Any) -> None:
        """Note a call of a layer, and time the layer, once for each shape."""
        self.layers[name].calls += 1
        held = [
            (*x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else x
            for x in (*module.parameters(), *tree_leaves(call))
        ]
        key = str((type(module), held, products_in(module)[0].least_rows))
        if key not in self.times:
            blocks = capability.native_recipe("blockwise", self.device)  # of "forward-bf16"
            partly = ["forward-bf16"] if blocks and not isinstance(module, Fp8Experts) else []
            ways = {how: self._in_bf16(how) for how in ("fp8", *partly, "bf16")}
            with self._surroundings(grad=True):
                self.times[key] = {how: layer_ms(module, call, own) for how, own in ways.items()}
        self.layers[name].ms = self.times[key]


def search(
    layers: Iterable[TunedLayer], budget: float, measure: Callable[[dict[str, str]], float]
) -> tuple[dict[str, str], float]:
    """Return the precisions by name that save the most time found, and what they cost as `measure` says.

    It is that of no layer's forward in FP8 where nothing is within the budget.
    """
    none = {x.name: x.cheapest for x in layers}
    worth = (x for x in layers if x.gain > 0 and x.cost <= budget)
    order = sorted(worth, key=lambda x: x.cost / x.gain)
    low, high, limit, best = 0.0, math.inf, budget, (none, math.inf)
    for _ in range(ROUNDS):
        total, mix = 0.0, dict(none)
        for x in order:
            if total + x.cost <= limit:
                total, mix[x.name] = total + x.cost, "fp8"
        if mix == best[0] and best[1] <= budget:  # no more than what is known to fit
            low = limit
        elif (cost := measure(mix)) <= budget:
            low, best = limit, (mix, cost)
        else:
            high = total
        if len(order) == sum(how == "fp8" for how in best[0].values()) or not high:
            break
        limit = (low + high) / 2 if high < math.inf else 4 * limit
    return best if best[1] <= budget else (none, measure(none))


def layer_ms(layer: nn.Module, call: Any, in_bf16: str) -> float:
    """Return the ms of forward and backward of a copy of a layer, with these products in bfloat16: a median.

    call: positional arguments and those by name. The copy's matrices are stored in bfloat16, as at O2.

    Raises:
        UnsupportedDeviceError: on a CPU, where FP8 is emulated and its times mean nothing.
    """
    device = next(layer.parameters()).device
    if device.type != "cuda":
        raise UnsupportedDeviceError(
            f"tune times layers on the GPU that trains them, and this model is on {device}, where FP8 products are "
            "emulated and take longer than others. Move model and batch to a GPU with FP8."
        )
    hooks = (x for m in layer.modules() for name, x in vars(m).items() if "_hooks" in name)
    twin = copy.deepcopy(layer, {id(x): type(x)() for x in hooks}).train()
    for parameter in [] if isinstance(layer, Attention) else twin.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16()
    products, known = products_in(twin), dict[int, Tensor]()  # one tensor may be several arguments
    for each in products:
        each.in_bf16 = in_bf16

    def leaf(x: Any) -> Any:
        floats = isinstance(x, Tensor) and x.is_floating_point()
        return known.setdefault(id(x), x.detach().requires_grad_()) if floats else x

    args, named = tree_map(leaf, call)
    wanted = [*known.values(), *(p for p in twin.parameters() if p.requires_grad)]
    gradients: list[Tensor] = []
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS + 5)]
    with torch.cuda.device(device):
        for start, end in events:
            for each in products:
                each.last_weight = None  # in training a step has changed it
            start.record()
            y = [x for x in tree_leaves(twin(*args, **named)) if getattr(x, "requires_grad", False)]
            gradients = gradients or [*map(torch.randn_like, y)]
            torch.autograd.grad(y, wanted, gradients, allow_unused=True)
            end.record()
        torch.cuda.synchronize()
    times: list[float] = [start.elapsed_time(end) for start, end in events[5:]]  # warm by then
    return statistics.median(times)
