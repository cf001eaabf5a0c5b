"""The monitor: samples what casts to FP8 do to each layer's operands, and what a step does to its weight.

    monitor = Monitor(model, optimizer, every=100)
    ...
    log(monitor.metrics(), monitor.step)        # {"fp8/underflow": 0.0003, "fp8/amax": 11.4, ...}

A step begins with a forward of the model in training mode. In every `every`-th step each FP8 layer counts over its
input x, its weight w and its incoming gradient g (`kernels/reference/monitor.py`): one kernel for each operand, which
adds to a tensor on the device. The host never waits: the counts are copied to pinned memory when the next step begins
or when they are asked for, and `read` returns the last copy that has arrived, usually that of the sample before.
Between samples a layer checks one attribute, and nothing else happens.

Limits: activation checkpointing recomputes x and w and counts them twice, which does not change fractions. The numbers
are this rank's: of its batch, and under FSDP2 of its part of the weights' updates. TransformerEngine's layers keep
their casts to themselves and have update ratios only. torch.compile leaves the hooks out of the graph, so compiled
layers have no numbers, nor have layers that too few rows of input leave in bfloat16. One warning says so.

How far an optimizer step moves the weights of layers, ‖Δw‖ / ‖w‖, is measured on a sample of their elements: a copy of
all weights would cost as much memory as the weights. So up to 2^14 elements of each weight are kept from before the
step to after it, 64 KiB a layer. They are taken at equal distances through the matrix; the distance has no factor in
common with the number of columns, so that all columns are met. Both norms are of the same elements. If the
squares of n elements come from a distribution of kurtosis k, the norm of the sample is off by sqrt((k - 1) / n) / 2 of
itself (one standard deviation): 0.6 % for Gaussian numbers, 4 % where k is 100. A weight of up to 2^14 elements is read
as a whole.

The ratio is that of the values in which the optimizer accumulates: with fp8stack's own optimizers the bfloat16 weight
and its remainder, or another master. The weight alone would show little but its rounding. With `master="none"` the
weight itself moves, in random steps of 2^-8, and the ratio is larger than that of the update that was added.

The hooks on the optimizer do nothing but in a sampled step, and the results are copied to the host without waiting. A
step that is skipped because of its gradients moves nothing: its ratio is 0. Left out are
weights that the optimizer does not own (DeepSpeed's ZeRO steps copies) and states in host memory (`offload="cpu"`).
"""

from __future__ import annotations

import math
import statistics
import weakref
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.errors import ConfigError, ModelError, warn
from fp8stack.formats import BLOCK, MiniFloat
from fp8stack.kernels import ops
from fp8stack.kernels.reference.monitor import FIELDS, SUMS
from fp8stack.levels import check_number
from fp8stack.nn.attention import fp8_products
from fp8stack.nn.experts import Fp8Experts
from fp8stack.nn.te import TeLayer
from fp8stack.optim import BlockwiseOptimizer
from fp8stack.optim.sharded import local, local_state
from fp8stack.optim.state_formats import decode_master, masters

from .advice import OPERANDS, Finding, Numbers, find

KINDS = tuple(OPERANDS)
SAMPLE = 2**14
"""Elements of a weight that are compared, at most."""

_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Monitor:
    """Samples the FP8 layers of a model (a bare one, as given to `initialize`) every `every` steps, from the first.

    A step begins with a forward of the model. Where the model itself is not called (Lightning calls `training_step`),
    pass `by_hand=True` and call `begin_step` at each step. Remove the monitor before the whole model is pickled; copies
    of the model are not watched.

    Args:
        model: as given to `initialize`.
        optimizer: as returned by it; with it, update/weight ratios are measured.
        every: steps from sample to sample. With gradient accumulation a micro-batch is a step.
        by_hand: `begin_step` is called by hand.

    Raises:
        ConfigError: if `model` is no module, `every` not a positive integer, or `optimizer` no optimizer of torch's.
        ModelError: if the model is watched already.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = 100,
        by_hand: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model={type(model).__name__} is not a torch.nn.Module.")
        every = check_number("every", every, 1, whole=True)
        if model in _watched:
            raise ModelError("this model has a Monitor; remove() that first.")
        own = fp8_products(model)
        layers = {n: (p.module, p.weight) for n, p in own.items() if p.weight}
        others = {n: (m, "weight") for n, m in model.named_modules() if isinstance(m, TeLayer)}
        if any(isinstance(m, Fp8Experts) for m in model.modules()):
            _warn("the casts of experts are not sampled")
        if others:
            _warn(f"{len(others)} layers are TransformerEngine's, whose casts a Monitor cannot see")
        elif not own:
            _warn("the model has no FP8 layers of fp8stack's own: there is nothing to monitor")
        self.every, self.layers = every, list(own)
        self.step: int | None = None  # the step of the numbers that `read` returned last
        self._model = model
        # of each layer as it was sampled last; `restore` and `initialize` make others
        self._products: dict[str, Any] = {}
        self._updates = Updates(layers | others, optimizer)
        self._steps, self._open = 0, -1  # steps begun; the step being sampled, or -1
        # of a sample: int64 [layers, kinds, fields], on the device
        self._counts: Tensor | None = None
        self._arrivals = Arrivals()  # the same as nested lists, labelled with their step
        _watched.add(model)
        self._handle = None if by_hand else model.register_forward_pre_hook(self._before_forward)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Monitor:
        return self  # the copied model's hook refers to this monitor, which ignores other models

    def remove(self) -> None:
        """Stop sampling. Numbers that were sampled can still be read."""
        self._end_sample()
        self._updates.remove()
        if self._handle is not None:
            self._handle.remove()
        _watched.discard(self._model)

    def read(self, wait: bool = False) -> Numbers:
        """Return the last sample that has arrived: {layer: {"x" | "w" | "g": {"amax": ..., ...}}}.

        With `wait`, wait for the one under way. Call it between steps: before backward there are no gradients. Operands
        that were not cast are left out. "underflow", "overflow": fractions of all elements; "dead_blocks": of blocks;
        "nonfinite": how many elements; "snr_db": left out where signal or error is zero; "update_ratio": of w, in the
        step after the sample.
        """
        self._send_counts()
        self._arrivals.take(wait)
        numbers = {
            layer: {k: _numbers(r) for k, r in zip(KINDS, rows, strict=True) if r[-1]}
            for layer, rows in zip(self.layers, self._arrivals.values, strict=False)
        }
        measured, ratios = self._updates.read(wait)
        self.step = self._arrivals.label if self.layers else measured
        if self.step == measured:
            for layer, ratio in ratios.items():
                numbers.setdefault(layer, {}).setdefault("w", {})["update_ratio"] = ratio
        return {layer: kinds for layer, kinds in numbers.items() if kinds}

    def metrics(self, wait: bool = False) -> dict[str, float]:
        """Return the numbers of `read` under flat names, for a logger: the model's, then each layer's.

        fp8/fwd_scale and fp8/bwd_scale are the largest scales of inputs and gradients, fp8/amax is the largest input;
        fp8/underflow, fp8/overflow and fp8/dead_blocks are fractions of the elements (blocks) of all operands,
        fp8/nonfinite is their number; fp8/grad_snr_db is the lowest of all gradients, fp8/update_ratio the median of
        all layers. The last two are left out where there are none.
        """
        flat: dict[str, float] = {}
        found = defaultdict[str, list[float]](list)  # "x_amax" and the like, of all layers
        for layer, kinds in self.read(wait).items():
            for kind, numbers in kinds.items():
                for field, value in numbers.items():
                    flat[f"fp8/{layer}/{kind}_{field}"] = value
                    found[f"{kind}_{field}"].append(value)
        model: dict[str, float] = {}
        if rows := [row for layer_rows in self._arrivals.values for row in layer_rows if row[-1]]:
            total = dict(zip(FIELDS, map(sum, zip(*rows, strict=True)), strict=True))
            model = {
                "fp8/fwd_scale": _largest(found["x_scale"]),
                "fp8/bwd_scale": _largest(found["g_scale"]),
                "fp8/amax": _largest(found["x_amax"]),
                **{f"fp8/{name}": value for name, value in _shares(total).items()},
            }
        if found["g_snr_db"]:
            model["fp8/grad_snr_db"] = min(found["g_snr_db"])
        if found["w_update_ratio"]:
            model["fp8/update_ratio"] = statistics.median(found["w_update_ratio"])
        return model | flat

    def advice(self, wait: bool = False) -> list[str]:
        """Return a sentence for each rule that the numbers of `read` break, with layer, number, limit and remedy."""
        return [finding.text for finding in self.findings(wait)]

    def findings(self, wait: bool = False) -> list[Finding]:
        """Return the same as records, for an application that filters them or writes them in its own words."""
        return find(self.read(wait), self._products)

    # --- sampling

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            from torch._dynamo.comptime import comptime

            comptime(_warn_unseen)  # runs while the model is traced, and is not in the graph
            return
        if module is self._model and module.training:
            self.begin_step()

    def begin_step(self, number: int | None = None) -> None:
        """End the step before, and sample the one that begins if it is its turn.

        `number` is the step's, from 0; give it where it is not the count of calls, as in a run that was resumed.
        """
        self._end_sample()
        self._steps = self._steps if number is None else number
        if self._steps % self.every == 0:
            self._updates.arm(self._steps)
            self._open, self._counts = self._steps, None
            own = fp8_products(self._model)
            for index, name in enumerate(self.layers):
                if name in own and not own[name].products.finished:  # nor restored since
                    self._products[name] = own[name].products
                    own[name].products.probe = partial(self._count, index)
        self._steps += 1

    def _end_sample(self) -> None:
        if self._open < 0:
            return
        own = fp8_products(self._model).values()
        if self._counts is None and any(p.products.probe is not None for p in own):
            _warn_unseen()
        for products in self._products.values():
            products.probe = None
        self._send_counts()
        self._open = -1

    def _send_counts(self) -> None:
        """Send the counts of the open sample to the host, if there are any."""
        if self._open >= 0 and self._counts is not None:
            self._arrivals.send(self._open, self._counts)

    def _count(
        self, index: int, kind: str, x: Tensor, scale: Tensor, fmt: MiniFloat, squares: bool
    ) -> None:
        """Add an operand of layer `index` to the counts of the sample; `squares`: its scales are of 128 × 128."""
        if in_a_graph():  # every replay would add to the counts
            return
        if self._counts is None:
            shape = len(self.layers), len(KINDS), len(FIELDS)
            self._counts = torch.zeros(shape, dtype=torch.int64, device=x.device)
        if x.device == self._counts.device:
            if scale.ndim == 1:  # one for each row
                scale = scale.unsqueeze(1).expand(-1, -(-x.shape[-1] // BLOCK))
            ops.count(x, scale, fmt, self._counts[index, KINDS.index(kind)], squares)


def _numbers(row: list[int]) -> dict[str, float]:
    """Return the numbers of an operand from its counts; amax, scale and sums are bits of floats in integers."""
    amax, scale = torch.tensor(row[:2], dtype=torch.int32).view(torch.float32).tolist()
    signal, noise = torch.tensor(row[SUMS]).view(torch.float64).tolist()
    numbers = {"amax": amax, "scale": scale, **_shares(dict(zip(FIELDS, row, strict=True)))}
    if signal and noise:
        numbers["snr_db"] = 10 * math.log10(signal / noise)
    return numbers


def _shares(counts: dict[str, int]) -> dict[str, float]:
    """Return fractions of the elements (blocks) that were counted."""
    return {
        "underflow": counts["underflow"] / counts["elements"],
        "overflow": counts["overflow"] / counts["elements"],
        "nonfinite": float(counts["nonfinite"]),
        "dead_blocks": counts["dead"] / counts["blocks"],
    }


def _largest(values: list[float]) -> float:
    """Return the largest value, NaN if one of them is; 0 without any."""
    return float(torch.tensor([0.0, *values], dtype=torch.float64).max())


def _warn_unseen(_: Any = None) -> None:
    _warn("Monitor samples nothing under torch.compile, in CUDA graphs and of products in bfloat16")


def _warn(message: str) -> None:
    warn(f"fp8stack: {message}", stacklevel=3)


# --- updates of weights


class Arrivals:
    """Numbers of the device that the host reads without waiting: the last that arrived, and a copy on its way.

    `values` are nested lists, and `label` is what they were sent with; None and [] before the first have arrived.
    """

    def __init__(self) -> None:
        self.label: Any = None
        self.values: list[Any] = []
        self._pending: tuple[Any, Tensor, torch.cuda.Event | None] | None = None

    def send(self, label: Any, values: Tensor) -> None:
        """Copy `values` to the host behind the work that is queued now; an earlier copy still on its way is dropped."""
        self.take()
        host, event = values.to("cpu", non_blocking=True, copy=True), None  # pinned, from a GPU
        if values.is_cuda:
            event = torch.cuda.current_stream(values.device).record_event()
        self._pending = label, host, event

    def take(self, wait: bool = False) -> None:
        """Take the copy if it has arrived; with `wait`, wait for it."""
        if self._pending is None:
            return
        label, host, event = self._pending
        if event is not None and wait:
            event.synchronize()
        if event is None or event.query():
            self.label, self.values, self._pending = label, host.tolist(), None


class Updates:
    """Measures the steps of an optimizer that `arm` asks for, on the weights of layers, by name; none without one.

    Raises:
        ConfigError: for what is no optimizer of torch's, or only wraps one.
    """

    def __init__(self, layers: Mapping[str, tuple[nn.Module, str]], optimizer: Any) -> None:
        self._layers, self._optimizer, self._handles = dict(layers), optimizer, list[Any]()
        self._before: dict[str, tuple[Tensor, Tensor]] = {}  # weights, and their samples
        self._armed = -1  # the sampled step whose optimizer step is yet to come, or -1
        self._arrivals = Arrivals()  # the two norms, labelled with the sampled step and the layers
        if optimizer is None:
            return
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            wraps = " but wraps one: pass its .optimizer" if hasattr(optimizer, "optimizer") else ""
            raise ConfigError(
                f"optimizer={type(optimizer).__name__} is not a torch.optim.Optimizer{wraps}. Pass the one that "
                "fp8stack.initialize returned; a number of steps goes into every=..."
            )
        self._handles = [
            optimizer.register_step_pre_hook(self._take),
            optimizer.register_step_post_hook(self._compare),
        ]

    def arm(self, step: int) -> None:
        """Measure the next step of the optimizer, for the sample `step`."""
        self._armed, self._before = step, {}
        if getattr(self._optimizer, "release", None) is not None:  # steps in backward
            self._take()

    def remove(self) -> None:
        """Take the hooks off."""
        self._before = {}
        for handle in self._handles:
            handle.remove()

    def read(self, wait: bool = False) -> tuple[int | None, dict[str, float]]:
        """Return the last sample whose step was measured and has arrived, and the ratio of each layer."""
        self._arrivals.take(wait)
        step, names = self._arrivals.label or (None, [])
        norms = zip(names, *self._arrivals.values, strict=True) if names else ()
        return step, {name: moved / norm if norm else 0.0 for name, moved, norm in norms}

    @torch.no_grad()
    def _take(self, *_: Any) -> None:
        if self._armed < 0 or self._before or in_a_graph():
            return
        owned = {p for group in self._optimizer.param_groups for p in group["params"]}
        weights = {n: w for n, of in self._layers.items() if (w := getattr(*of)) in owned}
        if not weights:
            _warn("the optimizer owns no weight of the FP8 layers: there is no update/weight ratio")
        ours = isinstance(self._optimizer, BlockwiseOptimizer)
        for name, weight in weights.items():
            if local(weight).numel() and not (ours and self._optimizer.offloads(weight)):
                self._before[name] = weight, self._sample(weight)

    @torch.no_grad()
    def _compare(self, *_: Any) -> None:
        step, before = self._armed, self._before
        self._armed, self._before = -1, {}
        if len({sample.device for _, sample in before.values()}) != 1 or in_a_graph():
            return
        old = [sample for _, sample in before.values()]
        new = [self._sample(weight) for weight, _ in before.values()]
        norms = torch._foreach_norm(torch._foreach_sub(new, old)), torch._foreach_norm(old)
        values = torch.stack([torch.stack(list(n)) for n in norms])
        self._arrivals.send((step, list(before)), values)

    def _sample(self, weight: Tensor) -> Tensor:
        """Return elements of a weight, float32 [SAMPLE or fewer], in a tensor of their own."""
        part = local(weight).detach()
        stride = -(-part.numel() // SAMPLE)
        while math.gcd(stride, part.shape[-1]) > 1:
            stride += 1
        master = masters(local_state(self._optimizer.state.get(weight, {})))
        some = {k: v.reshape(-1)[::stride] if v.ndim else v for k, v in master.items()}
        return decode_master(part.reshape(-1)[::stride], some)


def in_a_graph() -> bool:
    """Return whether what runs now is compiled, or captured in a CUDA graph: nothing can be read there."""
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return capturing or torch.compiler.is_compiling()
