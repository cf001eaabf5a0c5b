"""`fp8stack.tune`: which layers of this model are worth FP8 on this GPU, within a budget of accuracy.

    found = fp8stack.tune(model, batch, budget=0.015)
    model, optimizer = fp8stack.initialize(model, optimizer, "O2", **found.options)

Why: a few layers make most of what FP8 changes (docs/numerics.md), and what a layer saves depends on its shape and on
the GPU. Both can be measured in a minute; neither can be known beforehand.

How:

1. The model goes to O0 where it is, with every layer in FP8 that can be. No second copy of its weights is made. Which
   products are in bfloat16 is an attribute that forward reads (`casts.Products.in_bf16`), so layers are switched
   between forwards. All in bfloat16 they give the reference.
2. What a layer saves: the time of its forward and backward in bfloat16 less that in FP8, at the shape of its input in
   the batch. Layers of one shape are timed once.
3. What a layer costs: the mean KL(reference || this layer's forward in FP8) of the logits, in nats a token, or the
   absolute change of the loss where a model returns no logits. Forwards only: a layer whose output is in bfloat16 and
   whose gradients are in FP8 ("forward-bf16") costs nothing here, and saves less.
4. Layers are taken for FP8 by cost for each ms saved, the cheapest first, while the sum of the costs fits.
5. Costs add up roughly only. So the mix itself is run, and the sum that is allowed is moved: down if the mix is over
   the budget, up if there is room, a bounded number of times. What is reported is the measured cost of a mix.
6. The model is restored, also after an error: classes, modes, weights, gradients and random numbers are as before.

The options name layers in `precision_for` only where they differ from the default, in patterns where these match no
others. Layers that given options speak of (`head`, `first_last`, `precision_for`, `skip`) are not chosen, and those
that the batch does not call keep the level's precision; what both cost counts, as do products by bare parameters. If
these alone are over the budget, `matmuls=False` leaves the latter in bfloat16.

Limits: the error that FP8 makes in gradients is not measured; the monitor watches that (docs/monitoring.md). Times are
those of layers alone, in eager mode: casts that layers share and fused MLPs save more, and compiled layers too. Rows of
padding count as tokens. TransformerEngine's layers are not tuned. Ranks time for themselves: call it on one, and hand
the options to all.
"""

from __future__ import annotations

import copy
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .api import Decisions, carry_out, decide, restore
from .errors import ConfigError, ModelError, UnsupportedDeviceError, warn
from .levels import PRECISIONS, check_number, recipe_for
from .nn.attention import Attention
from .nn.casts import Products
from .nn.coverage import listed
from .nn.experts import Fp8Experts
from .nn.heads import HEAD, find_heads
from .report import say

BF16 = PRECISIONS["bf16"]
_BARE = "products by bare parameters"
MEASURED = (
    "compute", "fp8_format", "fp8_recipe", "fp8_margin", "amax_history_len", "amax_compute_algo", "fp8_fast_accum",
    "select", "fuse", "matmuls", "head", "first_last", "wgrad", "precision_for", "skip",
)  # fmt: skip
"""Options that say how products are made; the others are handed on."""
ROUNDS = 12  # mixes that are run at most
REPEATS = 20  # of a layer that is timed, of which the median counts
ROWS = 1024  # of logits that are compared at a time, in float32


@dataclass
class TunedLayer:
    """What was measured of a layer, and what it gets.

    cost: of its forward in FP8 alone. ms: its time by precision, of all its calls in one forward and backward.
    precision: "fp8", "forward-bf16", "bf16", or "as given" where it was not to be chosen.
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
    cost: measured of the mix, in `unit`; of no more than the budget where `met`.
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
            kinds.setdefault((_kind(x.name), x.precision), []).append(x)
        wide = max(6, *(len(kind) for kind, _ in kinds))
        lines = [f"{'layers':{wide}}     n    FP8 costs   saves, ms    kept, ms   precision"]
        for (kind, how), same in kinds.items():
            ms = (f"{self._saves(same, x):11.3f}" for x in ("fp8", how))
            cost = sum(x.cost for x in same)
            lines.append(f"{kind:{wide}} {len(same):5} {cost:12.5f} {' '.join(ms)}   {how}")
        kept, possible = self._saves(self.layers), self._saves(self.layers, "fp8")
        within = "within the budget" if self.met else "OVER the budget"
        return "\n".join([
            f"fp8stack tune · {self.device} · cost: {self.unit}", *lines,
            f"measured of the mix: {self.cost:.5f}, {within} of {self.budget:g}",
            f"forward and backward of layers alone take {kept:.3f} ms less; with FP8 throughout, {possible:.3f}",
            f"options: {self.options}",
        ])  # fmt: skip

    @staticmethod
    def _saves(layers: list[TunedLayer], how: str = "") -> float:
        return sum(x.ms["bf16"] - x.ms[how or x.precision] for x in layers if x.ms)


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
    """Return the options for `initialize` that keep most of FP8's speed within a budget of accuracy.

    It runs the model about as often as it has layers, forward only and in evaluation mode, and times layers.

    Args:
        model: as for `initialize`, before it; best with trained weights, as random ones say little. float32 models run
            under bfloat16 autocast on a GPU, unless the call is under an autocast of its own.
        batch: what the model is called with, on its device, as in training: a tensor, a tuple of arguments or a dict
            of them by name. A few thousand tokens tell enough.
        budget: the most that FP8 may change, in nats a token of KL, or in units of the loss; > 0.
        loss: takes what the model returns, and returns a loss, whose change counts in the place of KL. Needed where
            the output is neither logits [..., classes], nor has `logits` or a `loss`.
        strict: raise where `initialize` would fall back.
        quiet: do not print the table, which goes where the card of `initialize` does. `print(result)` shows it, too.
        options: for `initialize`, such as fp8_recipe="blockwise", skip=["head"]. They are in the result, too.

    Raises:
        ConfigError: a budget that is no number > 0, an option that is not one, or frozen="fp8".
        ModelError: a model at a level, without layers for FP8, or without logits or loss, or with ones that are not
            finite.
        UnsupportedDeviceError: a device without native FP8 products, or where times mean nothing (a CPU).
    """
    budget = check_number("budget", budget, sys.float_info.min, rule="> 0")
    if recipe_for("O2", **options).frozen == "fp8":
        told = "it would round the weights that are compared with. Leave it out here, and give it to initialize"
        raise ConfigError(f'frozen="fp8": {told}.')
    own = {name: value for name, value in options.items() if name in MEASURED}
    recipe = recipe_for("O0", **({"select": "all"} | own))
    decisions = decide(model, None, recipe, strict)
    report = decisions.report
    if report.compute != "native":
        told = f"tune compares native FP8 layers with bfloat16; compute would be {report.compute}"
        raise UnsupportedDeviceError(f"{told}: {report.compute_reason}.")
    if not decisions.layers.gemm:
        left = f" Left out: {listed(report.skipped)}." if report.skipped else ""
        raise ModelError(f"the model has no layers for FP8: there is nothing to tune.{left}")
    modes = {module: module.training for module in model.modules()}
    carry_out(model, None, decisions)
    try:
        for module in modes:
            module.training = False
        mixes = _Mixes(model, batch, loss, decisions, options)
        mixes.measure()
        result = mixes.choose(budget)
    finally:
        restore(model)
        for module, mode in modes.items():
            module.training = mode
    if not result.met:
        told = f"what is not to be chosen costs {result.cost:.3g}, more than budget={budget:g}"
        warn(f"fp8stack: {told}. Give fewer options that ask for FP8, or a larger budget.")
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
        self.modules: dict[str, nn.Module] = {}
        for name, module, _ in decisions.layers.gemm:
            # the out-projection of an attention goes with it
            if not isinstance(self.modules.get(name.rpartition(".")[0]), Attention):
                self.modules[name] = module
        self.layers = {name: TunedLayer(name) for name in self.modules}
        self.products = {name: _products_of(module) for name, module in self.modules.items()}
        self.bare = {b for m in model.modules() if (b := vars(m).get("_bare_matmuls"))}
        self.products[_BARE] = [p for b in self.bare for p in (*b._products, b._head_products)]
        self.given = {p: p.in_bf16 for own in self.products.values() for p in own}
        self.calls: dict[str, Any] = {}
        self.free: dict[str, TunedLayer] = {}  # those that are to be chosen
        hooks = [
            module.register_forward_pre_hook(partial(self._record, name), with_kwargs=True)
            for name, module in self.modules.items()
        ]
        try:
            self._set({}, rest=False)
            self.reference = self._run()
        finally:
            for hook in hooks:
                hook.remove()
        self.of_loss = loss is not None or self.reference.ndim == 0
        if not bool(self.reference.isfinite().all()):
            told = f"the {'loss' if self.of_loss else 'logits'} of this batch in bfloat16 must be finite"
            raise ModelError(f"{told}, and some are NaN or infinite. Look at weights and batch.")
        self.precision = decisions.layers.precision
        unnamed = ("", "" if "head" in options else HEAD)
        for name, layer in self.layers.items():
            if name and layer.calls and self.precision.of(self.modules[name])[1] in unnamed:
                self.free[name] = layer
        if not self.free:
            told = "options decide about all layers that the batch calls"
            raise ModelError(f"{told}: there is nothing to tune. Give fewer of them: {options}.")

    def measure(self) -> None:
        """Fill in the times of layers, once for each shape, and what each costs alone."""
        times: dict[str, dict[str, float]] = {}
        for name, layer in self.free.items():
            module, call = self.modules[name], self.calls[name]
            held: list[Any] = [*module.parameters(), *tree_leaves(call)]
            held = [(*x.shape, x.dtype) if isinstance(x, Tensor) else x for x in held]
            trained = [p.requires_grad for p in module.parameters()]
            key = str((type(module), held, trained, self.products[name][0].least_rows))
            if key not in times:
                partly = [] if isinstance(module, Fp8Experts) else ["forward-bf16"]
                ways = {how: self._in_bf16(name, how) for how in ("fp8", *partly, "bf16")}
                with self._surroundings(grad=True):
                    times[key] = {how: layer_ms(module, call, own) for how, own in ways.items()}
            layer.ms = {how: ms * layer.calls for how, ms in times[key].items()}
        for name, layer in self.free.items():
            layer.cost = self._cost({name: "fp8"}, rest=False)

    def choose(self, budget: float) -> Tuned:
        """Find the mix, and put it into options."""
        options, off = dict(self.options), dict[str, str]()
        if self.bare and "matmuls" not in options and self._cost({}) > budget:
            options["matmuls"], off = False, {_BARE: "bf16"}
        layers = [*self.free.values()]
        chosen, cost = search(layers, budget, lambda mix: self._cost(mix | off))
        for layer in layers:
            layer.precision = chosen[layer.name]
        on_gpu = self.device.type == "cuda"
        device = torch.cuda.get_device_name(self.device) if on_gpu else str(self.device)
        unit = "absolute change of the loss" if self.of_loss else "KL, nats a token"
        met, every = cost <= budget, [*self.layers.values()]
        return Tuned(self._options(options), cost, budget, met, unit, device, every)

    # --- a forward

    def _run(self) -> Tensor:
        """Return the logits or the loss of the batch."""
        batch: Any = self.batch
        by_name = batch if isinstance(batch, Mapping) else {}
        args = batch if isinstance(batch, (tuple, list)) else () if by_name else (batch,)
        attends = any(isinstance(m, nn.MultiheadAttention) for m in self.model.modules())
        with self._surroundings(grad=attends):  # without gradients torch's own attention runs
            output = self.model(*args, **by_name)
            value: Any = output if self.loss is None else self.loss(output)
        if self.loss is None and not isinstance(output, Tensor):
            named = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
            tensors = [v for n in ("logits", "loss") if isinstance(v := named.get(n), Tensor)]
            value = tensors[0] if tensors else None
        fits = isinstance(value, Tensor) and value.is_floating_point()
        if not fits or (self.loss is not None and value.numel() != 1):
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
        for name, products in self.products.items():
            for each in products:
                given = self.given[each] if rest and name not in self.free else BF16
                each.in_bf16 = self._in_bf16(name, mix[name]) if name in mix else given
        for bare in self.bare:
            bare.finished = bare._products[0].finished

    def _in_bf16(self, name: str, how: str) -> str:
        """Return the products in bfloat16 of a layer of that precision, with what the recipe says of all layers."""
        own, given = PRECISIONS[how], self.given[self.products[name][0]]
        return own if "wgrad" in own or "wgrad" not in given else f"{own} wgrad".strip()

    def _record(self, name: str, _: nn.Module, *given: Any) -> None:
        self.layers[name].calls += 1
        known: dict[int, Any] = {}  # one tensor may be several arguments
        if name not in self.calls:
            self.calls[name] = tree_map(lambda x: known.setdefault(id(x), _shape_of(x)), given)

    # --- options

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options that give free layers their precisions."""
        options.setdefault("select", "all")  # what was measured decides
        found = set() if "head" in options else find_heads(self.model)
        default = {n: "forward-bf16" if self.modules[n] in found else "fp8" for n in self.free}
        if any(x.precision == "fp8" != default[n] for n, x in self.free.items()):
            options["head"], default = "fp8", dict.fromkeys(default, "fp8")
        wanted = {n: x.precision for n, x in self.free.items() if x.precision != default[n]}
        if wanted:
            options["precision_for"] = dict(self.recipe.precision_for) | self._patterns(wanted)
        return options

    def _patterns(self, wanted: dict[str, str]) -> dict[str, str]:
        """Return `wanted` with patterns in the place of names where these match no layer of another precision."""
        names = dict(self.model.named_modules(remove_duplicate=False))
        units = ((self.layers[name].precision, m) for name, m in self.modules.items())
        choices = {m: "as given" for m in names.values() if self.precision.of(m)[1]}
        choices |= {inner: how for how, outer in units for inner in outer.modules()}
        found: dict[str, str] = {}
        for name, how in wanted.items():
            if any(fnmatchcase(name, pattern) for pattern in found):
                continue
            for pattern in ("*", f"*.{name.rpartition('.')[2]}", _kind(escape(name)), escape(name)):
                hit = (m for n, m in names.items() if n and fnmatchcase(n, pattern))
                inner = {choices.get(m, how) for outer in hit for m in outer.modules()}
                if fnmatchcase(name, pattern) and inner == {how}:
                    break
            found[pattern] = how
        return found


def search(
    layers: Iterable[TunedLayer], budget: float, measure: Callable[[dict[str, str]], float]
) -> tuple[dict[str, str], float]:
    """Return the precisions by name that save the most time found, and what they cost as `measure` says.

    It is that of no layer's forward in FP8 where nothing is within the budget.
    """
    layers = sorted(layers, key=lambda x: x.cost / x.gain if x.gain > 0 else math.inf)
    low, high, limit = 0.0, math.inf, budget
    none = {x.name: x.cheapest for x in layers}
    most = frozenset(x.name for x in layers if x.gain > 0)
    best, known = (none, math.nan, -1.0), dict[frozenset[str], float]()
    for _ in range(ROUNDS):
        total, gain, taken = 0.0, 0.0, set[str]()
        for x in layers:
            if x.name in most and total + x.cost <= limit:
                total, gain = total + x.cost, gain + x.gain
                taken.add(x.name)
        key, mix = frozenset(taken), none | dict.fromkeys(taken, "fp8")
        cost = known[key] = known[key] if key in known else measure(mix)
        if cost <= budget:
            low, done = limit, key == most
            best = (mix, cost, gain) if gain > best[2] else best
        else:
            high, done = min(limit, total), not key
        if done:
            break
        limit = total * budget / max(cost, 1e-12)
        if not low < limit < high:
            limit = (low + high) / 2 if high < math.inf else 2 * low
    return best[:2] if best[2] >= 0 else (none, measure(none))


def layer_ms(layer: nn.Module, call: Any, in_bf16: str) -> float:
    """Return the ms of forward and backward of a copy of a layer, with these products in bfloat16: a median.

    call: positional arguments and those by name, as shapes (meta tensors) where they are floating point.

    The copy's matrices are stored in bfloat16, as at O2.

    Raises:
        UnsupportedDeviceError: on a CPU, where FP8 is emulated and its times mean nothing.
    """
    device = next(layer.parameters()).device
    if device.type != "cuda":
        raise UnsupportedDeviceError(
            f"tune times layers on the GPU that trains them, and this model is on {device}, where FP8 products are "
            "emulated and take longer than others. Move model and batch to a GPU with FP8."
        )
    twin, made = copy.deepcopy(layer).train(), dict[int, Tensor]()
    for parameter in [] if isinstance(layer, Attention) else twin.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.bfloat16()
    for each in _products_of(twin):
        each.in_bf16 = in_bf16

    def fill(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.device.type != "meta":
            return x
        if id(x) not in made:
            made[id(x)] = torch.randn(x.shape, dtype=x.dtype, device=device, requires_grad=True)
        return made[id(x)]

    args, named = tree_map(fill, call)
    wanted = [*made.values(), *(p for p in twin.parameters() if p.requires_grad)]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS + 5)]
    with torch.cuda.device(device):
        for start, end in events:
            for each in _products_of(twin):
                each.last_weight = None  # in training a step has changed it
            start.record()
            y = [x for x in tree_leaves(twin(*args, **named)) if getattr(x, "requires_grad", False)]
            torch.autograd.grad(y, wanted, [*map(torch.ones_like, y)], allow_unused=True)
            end.record()
        torch.cuda.synchronize()
    times: list[float] = [start.elapsed_time(end) for start, end in events[5:]]  # warm by then
    return statistics.median(times)


def _products_of(module: nn.Module) -> list[Products]:
    held = (vars(m).get(n) for m in module.modules() for n in ("products", "in_products"))
    return [x for x in tree_leaves([*held]) if isinstance(x, Products)]


def _shape_of(x: Any) -> Any:
    """Return a tensor of a floating-point tensor's shape without data; anything else as it is."""
    floats = isinstance(x, Tensor) and x.is_floating_point()
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if floats else x


def _kind(name: str) -> str:
    """Return a name with * in the place of numbers between its dots."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
