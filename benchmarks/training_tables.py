"""The tables of whole training steps: how long they take, what they hold, what fits a GPU; see `tables.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from record_tables import Record, by_variant, lines, read

STEPS = {
    "bf16 autocast, torch's fused AdamW": "bf16",
    "O0": "O0",
    "O1": "O1",
    "O2": "O2",
    "O2, fused": "O2 fused",
    "O2, fused, delayed": "O2 fused, delayed",
    'O2, fused, `weight_cache="off"`': "O2 fused, cache off",
    "TransformerEngine's Linear, torch's fused AdamW": "te AdamW",
    "bf16, compiled": "bf16 compiled",
    "O2, fused, delayed, compiled": "O2 fused, delayed compiled",
}
STEPS_IN_SHORT = (
    "bf16 autocast, torch's fused AdamW", "O0", "O2", "O2, fused, delayed",
    "TransformerEngine's Linear, torch's fused AdamW", "bf16, compiled", "O2, fused, delayed, compiled",
)  # fmt: skip


def steps() -> dict[str, Record]:
    """Return the records of a whole step of the 1.1 B Llama, by variant."""
    return by_variant(read("end_to_end", model="llama-1b"))


def end_to_end(names: Iterable[str] = STEPS) -> list[str]:
    found, rows = steps(), []
    for name in names:
        r = found[STEPS[name]]
        base = found["bf16 compiled" if "compiled" in name else "bf16"]
        rows.append((
            name, f"{r['value']:.1f}", f"{base['value'] / r['value']:.2f}", f"{r['tokens_per_second']:,.0f}",
            f"{r['resident']['total']:.2f}", f"{r['peak_gib']:.1f}", f"{r['cpu_ms']:.0f}",
        ))  # fmt: skip
    heads = ("ms", "× bf16", "tokens/s", "bytes/parameter", "peak GiB", "CPU ms")
    return lines(("Llama 1.1 B, 16,384 tokens", *heads), rows)


FITS = {
    "bf16 autocast, torch's fused AdamW": "bf16 AdamW",
    "bfloat16 weights, bitsandbytes AdamW8bit": "bf16, bitsandbytes 8bit",
    "bfloat16 weights, flashoptim, 24 bits": "bf16, flashoptim 24bit",
    "fp8stack O2": "fp8stack O2",
    'fp8stack O2, `weight_cache="off"`': "fp8stack O2, cache off",
}


def memory() -> list[str]:
    small = by_variant(read("memory", model="7b", gib=80.0))
    large = by_variant(read("memory", model="largest"))
    rows = [(name, seven(small.get(v)), largest(large.get(v))) for name, v in FITS.items()]
    heads = ("Llama 6.7 B in 80 GiB, 4,096 tokens a sequence", "largest model on an H200")
    return lines(("", *heads), rows)


def seven(r: Record | None) -> str:
    if r is None:
        return "not measured"
    if not r["count"]:
        return "out of memory"
    plural = "s" * (r["count"] > 1)
    return f"{r['count']} sequence{plural}, {r['tokens_per_second']:,.0f} tokens/s"


def largest(r: Record | None) -> str:
    if r is None:
        return "not measured"
    return f"{r['parameters'] / 1e9:.2f} B, {r['tokens_per_second']:,.0f} tokens/s"


TABLES: dict[str, Callable[[], list[str]]] = {
    "end-to-end": end_to_end,
    "end-to-end-short": lambda: end_to_end(STEPS_IN_SHORT),
    "memory": memory,
}
