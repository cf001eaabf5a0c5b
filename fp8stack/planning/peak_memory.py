"""The memory of training on each GPU: what stays, what comes and goes, and when most is held at once.

`resident_memory.py` counts what stays from step to step. This module divides the bytes by ranks, and adds the buffers
of communication and what a pass holds. Of a model of transformers that was measured (`fake_step.py`): the most before
the loss, and the most of backward, at each moment with the gradients that are there by then. Of a shape a formula says
it (`activation_memory.py`), and four moments are looked at:

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

With `select="auto"` layers of a shape are in FP8 where a GPU would have them there, by the rules of `nn/select.py` and
the tokens of a micro-batch; feed-forwards are fused where `initialize` fuses them.

Limits: `CONTEXT` and `SLACK` are allowances, not measurements. Where layers go over to FP8 at more tokens, and so take
fewer bytes, a micro-batch somewhat larger than `largest_batch` says may fit. Compiled models that ranks share are
counted as each rank's part of one that is not shared; whole gradients and copies of gathered weights may come on top.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import torch

from fp8stack.errors import ConfigError
from fp8stack.levels import check_choice
from fp8stack.nn.casts import FEW_ROWS
from fp8stack.nn.select import least_rows, least_rows_of_mlp

from .activation_memory import activations, fuses
from .decoder_shape import Shape, check_sizes
from .hugging_face import HuggingFaceModel
from .resident_memory import Precision, Resident, resident

Model: TypeAlias = Shape | HuggingFaceModel
_WHOLE = ("none", "ddp")  # each rank holds everything
SHARDINGS = (*_WHOLE, "zero1", "zero2", "zero3", "fsdp")
CONTEXT = 600 * 2**20  # bytes: CUDA context and cuBLAS' workspaces
SLACK = 0.03  # of the peak: what the caching allocator cannot use
_MOST_SEQUENCES = 2**20
_BUCKET, _LIVE = 5 * 10**8, 105 * 10**7  # elements: DeepSpeed's defaults


@dataclass(frozen=True)
class Setup:
    """How a model trains: sequences of a micro-batch and tokens of one, ranks, and what they share."""

    batch: int = 1
    seq: int = 2048
    ranks: int = 1
    sharding: str = "none"
    checkpointing: bool = False
    accumulate: bool = False  # several micro-batches a step
    compile: bool = False  # torch.compile has the whole model

    def __post_init__(self) -> None:
        check_sizes(vars(self), "batch", "seq", "ranks")
        check_choice("sharding", self.sharding, SHARDINGS)


@dataclass(frozen=True)
class Estimate:
    """Bytes on one GPU. `parts` are each at its largest, `moments` what is held at once."""

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


def estimate(model: Model, precision: Precision, setup: Setup) -> Estimate:
    """Estimate the memory of training.

    Raises:
        ConfigError, ModelError, UnsupportedDeviceError: what `initialize` would raise at this precision, and of a
            HuggingFaceModel what cannot be measured.
    """
    if setup.sharding.startswith("zero"):  # float32 partitions, whatever the model was in
        mixed = precision.autocast or precision.weights is not torch.float32
        precision = replace(precision, weights=torch.float32, autocast=mixed)
    if isinstance(model, Shape):
        precision = _selected(model, precision, setup)
    whole, recipe = setup.sharding in _WHOLE, precision.recipe
    fp8_gradients = recipe is not None and recipe.gradients == "fp8" and whole
    in_buckets = fp8_gradients and setup.ranks > 1 and setup.sharding == "none"
    stays = _resident_of(model, precision, setup.accumulate)
    parts = _share(stays, model, precision, setup)
    always, gathered, reducing = _communication(stays, model, precision, setup)
    always *= not in_buckets  # gradients lie in the buckets of comm.DataParallel
    early = parts["gradients"] if setup.accumulate or in_buckets else 0
    parts["communication"] = always + gathered + reducing
    if isinstance(model, Shape):
        moments = _by_formula(model, precision, setup, stays, parts, early, gathered, reducing)
    else:
        moments = _by_a_pass(model, precision, setup, parts, early)
        moments = {name: nbytes + gathered + reducing for name, nbytes in moments.items()}
    states = sum(parts[kind] for kind in ("weights", "masters", "m", "v"))
    moments = {name: states + always + nbytes for name, nbytes in moments.items()}
    return Estimate(parts, moments, model.parameters)


def _selected(shape: Shape, precision: Precision, setup: Setup) -> Precision:
    """Return the precision with the layers in bfloat16 that select="auto" leaves there on a GPU, at so many tokens."""
    recipe, tokens = precision.recipe, setup.batch * setup.seq
    wide = precision.weights is torch.float32
    always = wide and not precision.autocast  # in FP8
    if recipe is None or recipe.select != "auto" or recipe.compute == "te" or always:
        return precision
    h, q, kv, f = shape.hidden, shape.q_dim, shape.kv_dim, shape.ffn
    # layers of attention, or of a feed-forward, with as many inputs are taken to share them
    own, up = (1 if shape.joint_qkv else 3) + (q == h), 1 + shape.gated + (f == h)
    qs, kvs = (q + 2 * kv,) * 2 if shape.joint_qkv else (q, kv)
    sizes = {"q_proj": (h, qs, own), "k_proj": (h, kvs, own), "v_proj": (h, kvs, own)}
    sizes |= dict.fromkeys(("gate_proj", "up_proj"), (h, f, up)) | {"head": (h, shape.vocab, 1)}
    sizes |= {"o_proj": (q, h, own if q == h else 1), "down_proj": (f, h, up if f == h else 1)}
    rules = {name: least_rows(*size) for name, size in sizes.items()}
    if fused := fuses(shape, precision, setup.sharding not in _WHOLE):
        least = least_rows_of_mlp([(f, h)] * (1 + shape.gated) + [(h, f)])
        rules |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), least)
    # norms give float32 where the weights that compute are, attention and activations what products give
    wide &= setup.sharding in _WHOLE and not setup.compile
    left = {}
    for name, least in rules.items():
        narrow = name == "o_proj" or (name == "down_proj" and not fused)
        if tokens < least[2 * setup.compile + (wide and not narrow)]:
            left["head" if name == "head" else f"*.{name}"] = "bf16"
    chosen = replace(recipe, precision_for=(*recipe.precision_for, *left.items()))
    return replace(precision, recipe=chosen)


def _by_formula(
    shape: Shape,
    precision: Precision,
    setup: Setup,
    stays: Resident,
    parts: dict[str, int],
    early: int,  # gradients that are there before backward
    gathered: int,
    reducing: int,
) -> dict[str, int]:
    """Return what the moments hold beside weights and states, and add activations to `parts`."""
    whole, recipe = setup.sharding in _WHOLE, precision.recipe
    if recipe is not None and recipe.fuse_loss:
        told = "fuse_loss=True: it is counted for a configuration of transformers, not for sizes of a decoder"
        raise ConfigError(f"{told}. Give a config.json, or leave it out.")
    compiled = setup.compile and (recipe is None or recipe.compute != "te")
    fp8_gradients = recipe is not None and recipe.gradients == "fp8" and whole
    copies = parts["weight copies"] = _weight_copies(stays, shape, precision, setup, compiled)
    tokens, again = setup.batch * setup.seq, setup.checkpointing
    each = activations(shape, precision, stays.fp8, setup.seq, not whole, compiled)
    kept = tokens * (shape.layers * (each.inputs if again else each.block) + each.end + each.loss)
    block = tokens * each.block * again
    alone = tokens * (each.inputs * again + each.block)
    loss, at_loss = tokens * each.loss, tokens * each.at_loss
    in_block = tokens * max(each.at_scores, each.at_block)
    grown, beside = parts["gradients"], early * compiled
    if compiled and whole:  # all of them at once, in the weights' dtypes
        grown = stays.bytes["weights"]
    # The last block's own gradients and those of the embedding come after its activations.
    absent = shape.counts[1] * (not each.at_scores) + shape.vocab * shape.hidden * (not shape.tied)
    there = round(grown * (1 - absent / shape.parameters)) + beside
    largest, passing = stays.largest, gathered + reducing
    parts["activations"] = kept + block
    parts["temporary"] = max(at_loss, in_block, largest)
    return {
        "loss": copies + early + kept + at_loss + gathered // 2,
        "backward": copies + early + kept - loss + block + in_block + largest + passing,
        "last": max(early, there) + alone + in_block + passing,
        "end": grown + beside + largest * fp8_gradients + passing,
    }


def _by_a_pass(
    model: HuggingFaceModel, precision: Precision, setup: Setup, parts: dict[str, int], early: int
) -> dict[str, int]:
    """Return what the moments hold beside weights and states, and add activations to `parts`."""
    compute = precision.recipe.compute if precision.recipe else "auto"
    if setup.compile or compute == "te":
        told = "compute='te'" if compute == "te" else "compile=True"
        remedy = "Leave it out, or give --sizes of a decoder that is as large"
        raise ConfigError(f"{told} is counted by a formula. {model.name} has none. {remedy}.")
    if setup.sharding not in _WHOLE:  # where nothing is fused
        recipe = precision.recipe and replace(precision.recipe, fuse=False)
        kind = torch.bfloat16 if precision.autocast else precision.weights  # throughout
        precision = replace(precision, recipe=recipe, weights=kind, autocast=False)
    held = model.held(precision, setup.batch, setup.seq, setup.checkpointing)
    parts["weight copies"], parts["activations"] = 0, held.kept  # which has them
    parts["temporary"] = max(held.forward, *(most for most, _ in held.backward)) - held.kept
    return held.moments(parts["gradients"], early)


def largest_batch(model: Model, precision: Precision, setup: Setup, memory: int) -> int:
    """Return the largest micro-batch whose total fits in `memory` bytes, 0 if none does."""

    def left(batch: int) -> int:
        return memory - estimate(model, precision, replace(setup, batch=batch)).total

    # Batches of few tokens keep codes of the weights and may take more than larger ones, so they are searched last.
    few = FEW_ROWS // setup.seq
    if left(few + 1) < 0:
        return bisect(range(1, few + 1), False, key=lambda batch: left(batch) < 0)
    # From there on bytes grow in proportion, or faster: few estimates are needed.
    fits, more = few + 1, few + 2
    while left(more) >= 0 and more < _MOST_SEQUENCES:
        slope = (left(fits) - left(more)) / (more - fits)
        steps = left(more) // slope + 1 if slope > 0 else _MOST_SEQUENCES
        fits, more = more, min(more + int(steps), _MOST_SEQUENCES)
    while more - fits > 1:
        between = left(fits) * (more - fits) // (left(fits) - left(more))
        middle = min(max(fits + between, fits + 1), more - 1)
        fits, more = (middle, more) if left(middle) >= 0 else (fits, middle)
    return fits


@lru_cache(maxsize=256)
def _resident_of(shape: Model, precision: Precision, accumulate: bool) -> Resident:
    """Count a model; of a shape the first block, and what the second one adds for each that follows."""
    if not isinstance(shape, Shape):
        return resident(shape.skeleton(precision.weights), precision, accumulate)
    one, two = (
        resident(replace(shape, layers=n).skeleton(precision.weights), precision, accumulate)
        for n in (1, 2)
    )
    more = shape.layers - 1
    counted = {kind: own + more * (two.bytes[kind] - own) for kind, own in one.bytes.items()}
    return replace(one, bytes=counted, codes=one.codes + more * (two.codes - one.codes))


def _share(stays: Resident, shape: Model, precision: Precision, setup: Setup) -> dict[str, int]:
    """Return what stays on each rank."""
    parts = dict(stays.bytes)
    if setup.sharding in _WHOLE:
        return parts
    shared: tuple[str, ...] = ("weights", "gradients")
    if setup.sharding == "fsdp":
        parts["gradients"] = parts["weights"]
    else:
        parts["masters"] += parts["weights"]
        parts["weights"] = parts["gradients"] = shape.parameters * (2 if precision.autocast else 4)
        shared = shared[3 - int(setup.sharding[-1]) :]
    for kind in (*shared, "masters", "m", "v", "host"):
        parts[kind] = -(-parts[kind] // setup.ranks)
    return parts


def _weight_copies(
    stays: Resident, shape: Shape, precision: Precision, setup: Setup, compiled: bool
) -> int:
    """Return the bytes of weights' bfloat16 copies and FP8 codes that each rank keeps from forward to backward."""
    casts = stays.bytes["weight copies"] if setup.sharding in _WHOLE else 0
    if precision.recipe is None or setup.sharding == "fsdp":
        codes = 0
    elif precision.recipe.compute == "te":
        codes = 2 * stays.codes
    else:
        few = setup.ranks == 1 and setup.batch * setup.seq <= FEW_ROWS
        codes = stays.codes if few or (compiled and setup.sharding != "zero3") else 0
    # Under checkpointing those of one block, which are made again, and of what is in no block.
    once = sum(shape.counts) if setup.checkpointing else shape.parameters
    return (casts * (once if compiled else shape.parameters) + codes * once) // shape.parameters


def _communication(
    stays: Resident, shape: Model, precision: Precision, setup: Setup
) -> tuple[int, int, int]:
    """Return bytes of buffers that are there always, of gathered weights, and of gradients being reduced."""
    if setup.ranks == 1:
        return 0, 0, 0
    item = 2 if precision.autocast or precision.weights is torch.bfloat16 else 4
    outside, block = shape.counts
    if setup.sharding in _WHOLE:
        return stays.bytes["weights"], 0, 0  # buckets of the weights' dtypes
    if setup.sharding == "fsdp":
        return outside * item, 2 * block * item, block * item
    buckets = 2 * _BUCKET * item
    if setup.sharding == "zero3":
        return min(shape.parameters, _LIVE) * item + buckets, 0, 0
    return 0, 0, buckets
