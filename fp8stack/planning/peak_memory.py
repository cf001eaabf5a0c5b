"""The memory of training on each GPU: what stays, what comes and goes, and when most is held at once.

`resident_memory.py` counts what stays from step to step, and `activation_memory.py` has the formula for activations.
This module divides the bytes by ranks, adds the buffers of communication, and looks at four moments of a step:

    loss       all activations, and the gradients of log-probabilities and logits
    backward   the first block to go back: all other activations (under checkpointing, one block's again), the buffers
               that gradients are reduced in
    last       the last block to go back: its activations, and all gradients but its own and the embedding's
               (at its scores, where those are kept, its own are there as well)
    end        all gradients, and the largest one in its own dtype; the optimizer's step holds no more (fused AdamW)

The peak is the largest of them: gradients grow while activations go. With `accumulate` gradients are there throughout.

Native layers keep a weight's codes from forward to backward, in one layout, if the model is compiled, or in one process
if the micro-batch has few tokens (`FEW_ROWS`); TransformerEngine's keep both layouts. Backward frees them; under
checkpointing a block's are made again. The backward of a compiled model (`compile`) is one function, which
returns all gradients together, in the weights' dtypes: FP8 ones are made only then, while sums of earlier micro-batches
lie beside them. TransformerEngine's layers are as in eager mode.

How ranks share (from the libraries' defaults):

| sharding | each rank holds                                       | communication                              |
|----------|-------------------------------------------------------|--------------------------------------------|
| none     | everything; FP8 gradients in `comm.DataParallel`      | torch's DDP's buckets for other gradients  |
| ddp      | everything                                            | torch's DDP's buckets at all levels        |
| zero1    | bf16 weights and gradients; 1/n of masters and states | two buckets of 5e8 elements in backward    |
| zero2    | bf16 weights; 1/n of gradients, masters and states    | the same                                   |
| zero3    | 1/n of all                                            | the same and 1.05e9 gathered weights, always |
| fsdp     | 1/n of all; gradients in the weights' dtype           | two blocks, and what is in none, gathered  |

Under ZeRO a model is in bfloat16 and masters are float32 partitions, or bfloat16 and 8 bits at O2. FP8 copies of
gathered weights are not kept, but for TransformerEngine's under ZeRO-3. Gradients are FP8 on the wire only under ZeRO
and FSDP2.

Limits: `CONTEXT` and `SLACK` are allowances, not measurements. Compiled models that ranks share are counted as each
rank's part of one that is not shared; whole gradients and copies of gathered weights may come on top.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from fp8stack.errors import ConfigError
from fp8stack.nn.casts import FEW_ROWS

from .activation_memory import Activations, activations
from .decoder_shape import Shape, check_sizes
from .resident_memory import Precision, Resident, resident

SHARDINGS = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp")
CONTEXT = 600 * 2**20  # bytes: CUDA context and cuBLAS' workspaces
SLACK = 0.03  # of the peak: what the caching allocator cannot use
MOST_SEQUENCES = 2**20  # of a micro-batch that is searched for
_BUCKET, _LIVE = 5 * 10**8, 105 * 10**7  # elements: DeepSpeed's defaults

Make = Callable[[torch.dtype], nn.Module]
"""Makes a fresh model on the meta device, in a dtype."""


@dataclass(frozen=True)
class Setup:
    """How a model trains: sequences of a micro-batch and tokens of one, ranks, and what they share."""

    batch: int = 1
    seq: int = 2048
    ranks: int = 1
    sharding: str = "none"
    checkpointing: bool = False
    accumulate: bool = False  # several micro-batches a step
    fuse: bool = False  # `fp8stack.nn.fuse` has fused SwiGLU blocks
    compile: bool = False  # torch.compile has the whole model

    def __post_init__(self) -> None:
        check_sizes(self, "batch", "seq", "ranks")
        if self.sharding not in SHARDINGS:
            raise ConfigError(f"sharding={self.sharding!r} must be one of {', '.join(SHARDINGS)}.")


@dataclass(frozen=True)
class Estimate:
    """Bytes on one GPU. `parts` are each at its largest, `moments` what is held at once."""

    precision: Precision
    parts: dict[str, int]
    moments: dict[str, int]
    parameters: int

    @property
    def moment(self) -> str:
        """When most is held."""
        return max(self.moments, key=lambda name: self.moments[name])

    @property
    def peak(self) -> int:
        """The most that is held at once: `torch.cuda.max_memory_allocated` without cuBLAS' workspaces."""
        return self.moments[self.moment]

    @property
    def overhead(self) -> int:
        """An allowance for the CUDA context and for what the allocator cannot use."""
        return CONTEXT + round(SLACK * self.peak)

    @property
    def total(self) -> int:
        return self.peak + self.overhead


def estimate(
    model: Shape | Make, precision: Precision, setup: Setup, shape: Shape | None = None
) -> Estimate:
    """Estimate the memory of training.

    Args:
        model: a shape, or what makes a model; then `shape` is what activations are computed from, none without.

    Raises:
        ConfigError, ModelError, UnsupportedDeviceError: what `initialize` would raise at this precision.
    """
    zero = setup.sharding.startswith("zero")
    if zero:  # the optimizer has float32 partitions, whatever the model was in
        mixed = precision.autocast or precision.weights is not torch.float32
        precision = replace(precision, weights=torch.float32, autocast=mixed)
    shape = model if isinstance(model, Shape) else shape
    compiled = setup.compile and (precision.recipe is None or precision.recipe.compute != "te")
    stays = _resident_of(model, precision, setup.accumulate)
    parts = _share(stays, precision, setup)
    parts["weight copies"] += _kept_codes(stays, precision, setup)
    if compiled and setup.checkpointing:
        parts["weight copies"] = _of_a_block(parts["weight copies"], stays)
    always, gathered, reducing = _communication(stays, precision, setup)
    tokens = setup.batch * setup.seq
    each, layers = Activations(), 0
    absent = 0  # elements whose gradients come after the last block's activations
    if shape is not None:
        sharded = not _whole(setup) and precision.autocast
        fp8 = stays.fp8 if isinstance(model, Shape) else _as_in_skeleton(stays.fp8)
        each = activations(shape, precision, fp8, setup.seq, sharded, setup.fuse, compiled)
        layers = shape.layers
        absent = stays.block * (not each.at_scores) + shape.vocab * shape.hidden * (not shape.tied)
    of_block = each.inputs if setup.checkpointing else each.block
    kept = tokens * (layers * of_block + each.end + each.loss)
    block = tokens * each.block * setup.checkpointing
    alone = tokens * each.inputs * setup.checkpointing + tokens * each.block
    loss, at_loss = tokens * each.loss, tokens * each.at_loss
    in_block = tokens * max(each.at_scores, each.at_block)
    copies = parts["weight copies"]  # backward frees them
    held = sum(parts[k] for k in ("weights", "weight copies", "masters", "m", "v")) + always
    fp8_gradients = _fp8_gradients(precision, setup)
    in_buckets = fp8_gradients and setup.ranks > 1 and setup.sharding == "none"
    early = parts["gradients"] if setup.accumulate or in_buckets else 0
    largest, passing = stays.gradient, gathered + reducing
    grown, beside = parts["gradients"], early * compiled
    if compiled and _whole(setup):
        grown = stays.gradients
    there = round(grown * (1 - absent / stays.elements)) + beside
    moments = {
        "loss": held + early + kept + at_loss + gathered // 2,
        "backward": held + early + kept - loss + block + in_block + largest + passing,
        "last": held - copies + max(early, there) + alone + in_block + passing,
        "end": held - copies + grown + beside + largest * fp8_gradients + passing,
    }
    parts["activations"] = kept + block
    parts["temporary"] = max(at_loss, in_block, largest)
    parts["communication"] = always + passing
    return Estimate(precision, parts, moments, stays.elements)


def largest_batch(
    model: Shape | Make, precision: Precision, setup: Setup, memory: int, shape: Shape | None = None
) -> int:
    """Return the largest micro-batch whose total fits in `memory` bytes, 0 if none does."""

    def is_too_large(batch: int) -> bool:
        return estimate(model, precision, replace(setup, batch=batch), shape).total > memory

    # Batches of few tokens keep codes of the weights and may take more than larger ones, so they are searched last.
    few = FEW_ROWS // setup.seq
    batches = range(few + 1, MOST_SEQUENCES)
    if is_too_large(batches[0]):
        batches = range(1, few + 1)
    return batches.start - 1 + bisect(batches, False, key=is_too_large)


def largest_model(shape: Shape, precision: Precision, setup: Setup, memory: int) -> Shape | None:
    """Return the largest shape of a family (`Shape.resized`) that fits in `memory` bytes, to 1 %; None if none does."""
    best, low, high = None, 1e6, memory * float(setup.ranks)  # a byte a parameter never is enough
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        try:
            candidate = shape.resized(middle)
        except ConfigError:
            low = middle
            continue
        if estimate(candidate, precision, setup).total <= memory:
            best = candidate if best is None or candidate.parameters > best.parameters else best
            low = middle
        else:
            high = middle
    return best


@lru_cache(maxsize=256)
def _resident_of(model: Shape | Make, precision: Precision, accumulate: bool) -> Resident:
    """Count a model, or a shape by its first block and what the second one adds."""
    if not isinstance(model, Shape):
        return resident(model(precision.weights), precision, accumulate)
    one, two = (
        resident(replace(model, layers=n).skeleton(precision.weights), precision, accumulate)
        for n in (1, 2)
    )
    return one.grown(two, model.layers - 1)


def _as_in_skeleton(names: frozenset[str]) -> frozenset[str]:
    """Return what `Shape.skeleton` calls the FP8 layers of a model with other names: all of a block, or none."""
    heads = {name for name in names if name.endswith("head")}
    inside = ("q", "k", "v", "o", "gate", "up", "down") if names - heads else ()
    return frozenset([*(f"blocks.0.{name}_proj" for name in inside), *(["head"] if heads else [])])


def _fp8_gradients(precision: Precision, setup: Setup) -> bool:
    """Return whether gradients are kept in FP8."""
    recipe = precision.recipe
    return recipe is not None and recipe.gradients == "fp8" and _whole(setup)


def _whole(setup: Setup) -> bool:
    """Return whether each rank holds everything."""
    return setup.sharding in ("none", "ddp")


def _share(stays: Resident, precision: Precision, setup: Setup) -> dict[str, int]:
    """Return what stays on each rank."""
    parts, ranks = dict(stays.bytes), setup.ranks
    if _whole(setup):
        return parts
    if setup.sharding == "fsdp":
        parts["gradients"] = parts["weights"]
        shared: tuple[str, ...] = ("weights", "gradients")
    else:
        stage, whole = int(setup.sharding[-1]), stays.elements * (2 if precision.autocast else 4)
        parts["masters"] += parts["weights"]
        parts["weights"] = parts["gradients"] = whole
        shared = ("weights", "gradients")[3 - stage :]
    for kind in (*shared, "masters", "m", "v", "host"):
        parts[kind] = -(-parts[kind] // ranks)
    if setup.sharding in ("fsdp", "zero3") or not stays.fp8:
        parts["weight copies"] = 0
    return parts


def _kept_codes(stays: Resident, precision: Precision, setup: Setup) -> int:
    """Return the bytes of weights' FP8 codes that each rank keeps from forward to backward."""
    if precision.recipe is None or setup.sharding == "fsdp":
        return 0
    if precision.recipe.compute == "te":
        codes = 2 * stays.codes
    elif setup.compile and setup.sharding != "zero3":
        return stays.codes
    else:
        codes = stays.codes * (setup.ranks == 1 and setup.batch * setup.seq <= FEW_ROWS)
    return _of_a_block(codes, stays) if setup.checkpointing else codes


def _of_a_block(nbytes: int, stays: Resident) -> int:
    """Return the share of `nbytes` that is there at once under checkpointing, which makes a block's again."""
    return nbytes * (stays.outside + stays.block) // stays.elements


def _communication(stays: Resident, precision: Precision, setup: Setup) -> tuple[int, int, int]:
    """Return bytes of buffers that are there always, of gathered weights, and of gradients being reduced."""
    if setup.ranks == 1:
        return 0, 0, 0
    item = 2 if precision.autocast or precision.weights is torch.bfloat16 else 4
    if _whole(setup):
        ours = setup.sharding == "none" and _fp8_gradients(precision, setup)
        return (0 if ours else stays.bytes["weights"]), 0, 0  # buckets of the weights' dtypes
    if setup.sharding == "fsdp":
        return stays.outside * item, 2 * stays.block * item, stays.block * item
    buckets = 2 * _BUCKET * item
    if setup.sharding == "zero3":
        return min(stays.elements, _LIVE) * item + buckets, 0, 0
    return 0, 0, buckets
