"""Peaks of memory that were measured, beside what `fp8stack estimate` says of them.

`measured()` reads the records of `benchmarks/results/` that the estimate covers, a row's last one. Shapes of the models
of `models.py` and of the application are made here. tests/test_planning.py compares both, and docs/cli.md with them.

Native layers kept FP8 codes of their weights from forward to the optimizer's step once, unless told not to ("cache
off"); records of that time are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import end_to_end
import memory
import torch
from models import MODELS, PLAIN, Config
from record_tables import RESULTS, read
from training_tables import ALL_IN_FP8, named

from fp8stack.levels import recipe_for
from fp8stack.planning import BASELINES, Precision, Setup, Shape, at_level, estimate

sys.path.insert(0, str(RESULTS.parents[1] / "examples"))

from gpt.config import Config as Options
from gpt.model import SIZES

VOCAB = 50_304  # of training.py's shards, padded by the application
NOT_KEPT = (
    "2026-11-25T15:00"  # records from then on are of layers that keep no codes until the step
)
SELECTED = "2026-11-26T10:14"  # before, layers of all sizes were in FP8
FUSED = "2026-11-26T16:04"  # before, MLPs were in single layers
NARROW = "2026-11-28T22:30"  # before, a compiled GPT-2 had these layers alone in bfloat16
LEFT = (("*.o_proj", "bf16"), ("*.down_proj", "bf16"))
SHARDINGS = {"zero2": "zero2", "zero3": "zero3", "fsdp2": "fsdp", "accelerate ddp": "ddp"}


class Peak(NamedTuple):
    """A peak of allocated memory that a record holds, and what is needed to estimate it."""

    name: str
    shape: Shape
    precision: Precision
    setup: Setup
    gib: float
    optimizer: bool = True  # False: forward and backward alone

    @property
    def estimate(self) -> float:
        """GiB that the estimate says."""
        e = estimate(self.shape, self.precision, self.setup)
        without = e.peak - sum(e.parts[kind] for kind in ("masters", "m", "v"))
        return (e.peak if self.optimizer else without) / 2**30


def shape_of(config: Config) -> Shape:
    """Return the shape of a model of models.py."""
    sizes = (config.layers, config.dim, config.heads, config.kv_heads, config.ffn, config.vocab)
    if config.kind == "llama":
        return Shape(*sizes)
    own = {"gated": False, "rms": False, "bias": True, "tied": True, "joint_qkv": True}
    return Shape(*sizes, **own, positions=config.sequence)


def shape_of_gpt(model: dict[str, Any], seq: int) -> Shape:
    """Return the shape of a model of the application; `model` are the fields of a ModelConfig."""
    return Shape(
        *(model[name] for name in ("layers", "dim", "heads", "kv_heads", "ffn", "vocab")),
        gated=model["activation"] == "swiglu",
        rms=model["norm"] == "rmsnorm",
        positions=seq if model["positions"] == "learned" else 0,
        **{name: model[name] for name in ("bias", "qk_norm", "tied")},
    )


def measured() -> list[Peak]:
    """Return the peaks of all records that the estimate covers; training.jsonl need not be there."""
    sources = [_steps, _whole_steps, _fitting, _frameworks, _data_parallel]
    sources += [_training] if (RESULTS / "training.jsonl").exists() else []
    return [peak for source in sources for peak in {p.name: p for p in source()}.values()]


def _kept_codes(record: dict[str, Any], precision: Precision) -> bool:
    """Was the record made when such layers kept the codes of weights until the step?"""
    recipe = precision.recipe
    native = recipe is not None and recipe.compute in ("auto", "native")
    return native and record.get("time", NOT_KEPT) < NOT_KEPT


def _as_then(precision: Precision, record: dict[str, Any]) -> Precision:
    """Return the precision with what was its default when the record was made."""
    if precision.recipe is None:
        return precision
    time, select, fuse = record.get("time", FUSED), precision.recipe.select, precision.recipe.fuse
    select, fuse = "all" if time < SELECTED else select, fuse and time >= FUSED
    return replace(precision, recipe=replace(precision.recipe, select=select, fuse=fuse))


def _steps() -> Iterator[Peak]:
    """Forward and backward of train_step.py, from bfloat16 weights."""

    def level(**given: Any) -> Precision:
        recipe = recipe_for("O0", **{"skip": ["head"], "select": "all", "fuse": False} | given)
        return at_level(recipe, torch.bfloat16)

    precisions = {"bf16": Precision("bf16", torch.bfloat16, False)}
    for recipe in ("current", "blockwise"):
        precisions[f"native {recipe}"] = level(fp8_recipe=recipe)
        precisions[f"fp8stack te {recipe}"] = level(fp8_recipe=recipe, compute="te")
    for variant in ("current", "tokenwise", "delayed"):
        name = f"native fused, {variant}".removesuffix(", current")
        precisions[name] = level(fp8_recipe=variant, fuse=True)
    for record in read("train_step"):
        p, variant, peak = record["params"], record["variant"], record["extra"].get("peak_gib")
        off = variant.removesuffix(" compile").removesuffix(", cache off")
        precision = precisions.get(off.removesuffix(" eager"))
        alike = off != variant and (p["model"] != "llama" or not p["compiled"])
        if precision and peak and (alike or not _kept_codes(record, precision)):
            config = replace(MODELS[p["model"]], vocab=p["vocab"], sequence=p["sequence"])
            setup = Setup(p["batch"], p["sequence"], compile=p["compiled"])
            name = f"{p['model']} {variant}"
            yield Peak(name, shape_of(config), precision, setup, peak, optimizer=False)


def _whole_steps() -> Iterator[Peak]:
    """Steps of end_to_end.py, once each: what is measured again begins with memory of variants before it."""
    variants = {v.name: v for v in end_to_end.VARIANTS if not (v.te or v.fused)}
    for record in read("end_to_end", model="llama-1b"):
        p, v = record["params"], variants.get(record["variant"].replace(", cache off", ""))
        level = v and v.level and at_level(recipe_for(v.level, **v.options))
        precision = level or BASELINES["bf16"]
        alike = v and (v.compiled or v.name != record["variant"])
        if v and (alike or not _kept_codes(record, precision)):
            setup = Setup(p["batch"], p["seq"], compile=v.compiled)
            shape = shape_of(memory.MODELS["1b"])
            name = f"{p['model']} step {record['variant']}"
            yield Peak(name, shape, _as_then(precision, record), setup, record["peak_gib"])


def _fitting() -> Iterator[Peak]:
    """The largest of what memory.py found to fit: sequences of a model, or blocks that are recomputed."""
    names = {"fp32 AdamW": "fp32", "bf16 AdamW": "bf16", "bf16, bitsandbytes 8bit": "8bit"}
    precisions = {name: BASELINES[base] for name, base in names.items()}
    for method in (m for m in memory.METHODS if m.level):
        weights = torch.float32 if method.autocast else torch.bfloat16
        recipe = recipe_for(method.level, skip=list(PLAIN), **method.options)
        precisions[method.name] = at_level(recipe, weights)
    for record in read("memory"):
        p, variant, count = record["params"], record["variant"], record["count"]
        precision = precisions.get(variant.removesuffix(", cache off"))
        alike = variant.endswith(("cache off", "4bit", "step in backward"))
        if variant.endswith("te") and p["model"] == memory.LARGEST:
            continue  # kept the codes of all blocks then
        if precision and record.get("peak_gib") and (alike or not _kept_codes(record, precision)):
            config, whole = memory.MODELS[p["model"]], p["model"] == memory.LARGEST
            config = replace(config, **{"layers" if whole else "batch": count})
            setup = Setup(config.batch, p["seq"], checkpointing=whole)
            size, n = f"{record['parameters'] / 1e9:.1f}B", f"{config.batch} × {p['seq']}"
            name = f"{size} {variant}, {'recomputed' if whole else n}"
            then = _as_then(precision, record)
            yield Peak(name, shape_of(config), then, setup, record["peak_gib"])


def _frameworks() -> Iterator[Peak]:
    precisions = {f"O2 {c}": at_level(recipe_for("O2", compute=c)) for c in ("native", "te")}
    precisions["bf16"] = BASELINES["bf16"]
    for record in read("frameworks"):
        p = record["params"]
        for name, sharding in SHARDINGS.items():
            precision = precisions.get(record["variant"].removeprefix(f"{name} "))
            whole = sharding in ("fsdp", "zero3")  # of which no codes were kept
            if precision and (whole or not _kept_codes(record, precision)):
                setup = Setup(p["batch"], p["seq"], p["ranks"], sharding)
                shape = shape_of(replace(MODELS[p["model"]], sequence=p["seq"]))
                then = _as_then(precision, record)
                yield Peak(record["variant"], shape, then, setup, record["peak_gib"])


def _data_parallel() -> Iterator[Peak]:
    precision = at_level(recipe_for("O2", compute="bf16"), torch.bfloat16)
    for record in read("ddp_step"):
        p = record["params"]
        if record["variant"] == "DataParallel":
            shape = shape_of(replace(MODELS[p["model"]], sequence=p["seq"]))
            setup = Setup(p["batch"], p["seq"], p["ranks"])
            then = _as_then(precision, record)
            yield Peak(f"DataParallel {p['model']}", shape, then, setup, record["peak_gib"])


def _training() -> Iterator[Peak]:
    """Long runs of the application.

    Raises:
        ValueError: for a record whose model has not the parameters of the one of that name.
    """
    for record in read("training"):
        p, variant, compute = record["params"], record["variant"], record.get("compute")
        flags = p.get("flags", {})
        # of a CPU; of options that are not read here
        if not record["cc"] or flags not in ({}, ALL_IN_FP8):
            continue
        shape = shape_of_gpt(asdict(replace(SIZES[p["model"]], vocab=VOCAB)), p["seq"])
        if shape.parameters != p["parameters"]:
            raise ValueError(
                f"training.jsonl: {p['model']} has {p['parameters']:,} parameters there, {shape.parameters:,} here."
            )
        precision = BASELINES.get(variant.removesuffix(" again")) or at_level(
            Options(p["model"], opt_level=variant, compute=compute or "native", **flags).recipe()
        )
        if _kept_codes(record, precision):
            continue
        compiled = p.get("compile", False)
        if compiled and precision.recipe and p["model"] == "gpt2" and record["time"] < NARROW:
            then = replace(precision.recipe, select="all", precision_for=LEFT)
            precision = replace(precision, recipe=then)
        micro = p.get("micro_batch", p["batch"])
        setup = Setup(micro, p["seq"], accumulate=micro < p["batch"], compile=compiled)
        name = f"training {p['model']} {named(record)}" + ", compiled" * compiled
        yield Peak(name, shape, _as_then(precision, record), setup, record["peak_gib"])
