"""What a resumed run is asked for otherwise than the run that wrote its checkpoint: a warning each, or an error.

Another model is refused (`build.py`). What is here lets a run go on, but with other samples, learning rates or states
than it would have had: `describe` puts it into the manifests of checkpoints, and `report` compares. A checkpoint
without an entry is not compared by it. Another level is what a run is asked for, and its states come with it.
"""

from __future__ import annotations

from typing import Any

from .config import Config
from .data import Data
from .options import as_flag, warn
from .schedule import default_warm_up

AGAIN = "of text and shards, some of this epoch's come twice and others not at all"
OTHER_SET = "validation losses are of another set of windows, and do not compare with those before"
SCHEDULE = "from here on the learning rate is that of the new schedule"
MEANING = {
    "data": "a position is one in its own data, so the new data is read from its beginning",
    "data_bytes": "a position is a number of documents, so the run goes on after as many as before",
    "encoding": "tokens mean other text than the weights know, and data is read from its beginning",
    "seq_len": f"windows are cut otherwise: {AGAIN}",
    "seed": f"windows come in another order: {AGAIN}",
    "target_effective_batch_size": "steps take another number of samples from here on; learning rates go by steps",
    "eval_batches": OTHER_SET,
    "eval_batch_size": OTHER_SET,
    "steps": SCHEDULE,
    "max_lr": SCHEDULE,
    "min_lr_ratio": SCHEDULE,
    "warmup_steps": SCHEDULE,
    "weight_decay": "matrices decay by it from here on",
    "bf16_last": "products are in bf16 from another step on",
    "optimizer_bits": "AdamW's states go over into the new format, and steps are rounded by it from here on",
}


def describe(config: Config, data: Data) -> dict[str, Any]:
    """Return what decides on a run's samples, learning rates and states, as JSON has it."""
    level = config.bits_of_level
    found = {
        "data": data.identity,
        "data_bytes": f"{data.nbytes} bytes",
        "encoding": data.encoding.identity,
        "seq_len": data.seq_len,
        "windows": sum(len(tokens) for tokens, _ in data.validation),
        "optimizer_bits": config.optimizer_bits or level,
        "bits_of_level": level,
    }
    return {**{name: getattr(config, name) for name in MEANING if name not in found}, **found}


def report(was: dict[str, Any], now: dict[str, Any], strict: bool, first: bool = True) -> set[str]:
    """Say what has changed since a checkpoint was written, a line for each; return the names.

    Args:
        was: the checkpoint's manifest.
        now: of `describe`. Where its steps are done already, nothing is said of a schedule that no step follows.
        first: is this the rank that speaks?

    Raises:
        ConfigError: under `strict`, on all ranks.
    """
    changed = {name for name in MEANING if was.get(name, now[name]) != now[name]}
    said = set(changed)
    if "data" in changed:  # nothing of it was read, and its validation is another anyway
        said -= {"data_bytes", "seq_len", "seed", "eval_batches", "eval_batch_size"}
    if was.get("windows", 0) == now.get("windows"):  # the same ones, in batches of another size
        said -= {"eval_batches", "eval_batch_size"}
    if all(x.get("warmup_steps") == default_warm_up(x.get("steps", 0)) for x in (was, now)):
        said = said - {"warmup_steps"}  # --steps says it
    if all(x.get("optimizer_bits") == x.get("bits_of_level") for x in (was, now)):
        said = said - {"optimizer_bits"}  # those of a level, and then of another
    if was.get("step", 0) >= now["steps"]:
        said = {name for name in said if MEANING[name] is not SCHEDULE}
    for name in MEANING:
        if name in said and (first or strict):
            flag = as_flag("data" if name == "data_bytes" else name)
            warn(f"{flag} was {was[name]}, is now {now[name]}: {MEANING[name]}.", strict)
    return changed
