"""The documentation is true: its Python runs, its numbers are those of the records, its links lead somewhere."""

import json
import re
import statistics
from pathlib import Path

import pytest
from bounds import BOUNDS, KINDS, bounds

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/optimizers.md",
        "docs/compute.md",
        "docs/comm.md",
        "docs/integrations.md",
    ],
)
def test_python_blocks_run(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.S):
        exec(compile(code, document, "exec"), names)
    assert names


def test_the_convergence_table_is_the_record_s():
    losses = {}
    for line in (ROOT / "benchmarks/results/convergence.jsonl").read_text().splitlines():
        record = json.loads(line)
        losses.setdefault(record["variant"], {})[record["params"]["seed"]] = record["value"]
    for level, runs in losses.items():
        mean = statistics.mean(runs.values())
        paired = [runs[seed] / losses["baseline"][seed] - 1 for seed in sorted(runs)]
        if level == "baseline":
            assert f"| baseline | {mean:.4f} |" in README
            continue
        each = ", ".join(f"{100 * d:+.2f}".replace("-", "−") for d in paired)
        row = f"| {level} | {mean:.4f} | {100 * statistics.mean(paired):+.2f} % | {each} % |"
        assert row in README
        assert abs(statistics.mean(paired)) < 0.005, (
            "the levels train as the baseline does, to half a percent"
        )


def test_the_table_of_optimizer_formats_is_the_record_s():
    losses = {}
    for line in (ROOT / "benchmarks/results/optimizer_parity.jsonl").read_text().splitlines():
        record = json.loads(line)
        losses.setdefault(record["variant"], {})[record["params"]["seed"]] = record["value"]
    assert {len(runs) for runs in losses.values()} == {3}
    for formats, runs in losses.items():
        if formats == "baseline":
            continue
        paired = [runs[seed] / losses["baseline"][seed] - 1 for seed in sorted(runs)]
        mean = statistics.mean(paired)
        each = ", ".join(f"{100 * d:+.2f}".replace("-", "−") for d in paired)
        states, master = formats.split("/")
        signed = f"{100 * mean:+.2f}".replace("-", "−")
        loss = f"{statistics.mean(runs.values()):.4f}"
        assert f'| `"{states}"`, `"{master}"` | {loss} | {signed} % | {each} % |' in README
        assert abs(mean) < (0.01 if states == "4bit" else 0.003)


PRODUCTS = {
    '`"current"`': "native/current",
    '`"delayed"`': "native/delayed",
    '`"blockwise"`': "native/blockwise",
    '`"current"`, `fp8_format="e5m2"`': "native/current/e5m2",
    'TransformerEngine, `"current"`': "te/current",
    'TransformerEngine, `"delayed"`': "te/delayed",
    'TransformerEngine, `"blockwise"`': "te/blockwise",
}


def test_the_table_of_products_is_the_record_s():
    document = (ROOT / "docs/compute.md").read_text()
    losses = {}
    for line in (ROOT / "benchmarks/results/product_parity.jsonl").read_text().splitlines():
        record = json.loads(line)
        losses.setdefault(record["variant"], {})[record["params"]["seed"]] = record["value"]
    plain = losses.pop("baseline")
    assert f"| bfloat16 | {plain[0]:.4f} | |" in document
    assert set(losses) == set(PRODUCTS.values())
    for name, variant in PRODUCTS.items():
        assert list(losses[variant]) == [0], "one seed"
        difference = losses[variant][0] / plain[0] - 1
        signed = f"{100 * difference:+.2f}".replace("-", "−")
        assert f"| {name} | {losses[variant][0]:.4f} | {signed} % |" in document
        assert abs(difference) < 0.005


def percents(values):
    return ", ".join(f"{100 * value:.1f}" for value in values)


def test_the_table_of_errors_is_what_is_tested():
    document = (ROOT / "docs/compute.md").read_text()
    for recipe, fmt in BOUNDS:
        plain, heavy, outliers = (percents(bounds(recipe, fmt, kind)) for kind in KINDS)
        assert heavy == outliers
        name = f'`"{recipe}"`' + (f', `"{fmt}"`' if recipe != "blockwise" else "")
        assert f"| {name} | {plain} % | {heavy} % |" in document


def test_the_host_times_of_layers_are_the_records():
    times, launches = {}, {}
    for line in (ROOT / "benchmarks/results/linear.jsonl").read_text().splitlines():
        record = json.loads(line)
        extra = record["extra"]
        if [record["params"][size] for size in ("tokens", "in", "out")] == [512, 1024, 1024]:
            times[record["variant"]] = f"{extra['cpu_us']:,.0f}"
            launches[record["variant"]] = extra["launches"], extra["cast_launches"]
    variants = ("native current", "bf16", "te current", "torchao tensorwise")
    said = "{} µs against {} for forward and backward in a chain of layers (TransformerEngine's {}, torchao's {};"
    document = " ".join((ROOT / "docs/limitations.md").read_text().split())
    assert said.format(*(times[variant] for variant in variants)) in document
    # "seven launches", "two more"; "five launches, or eight"
    assert [launches[f"native {r}"] for r in ("current", "blockwise")] == [(7, 9), (5, 8)]


_BF16 = {"NCCL all-reduce, bfloat16": "nccl bf16", "`all_reduce`, bfloat16": "nvlink bf16"}
_SCATTER = {
    "NCCL reduce-scatter, bfloat16": "nccl reduce_scatter bf16",
    "`reduce_scatter_tensor`, bfloat16": "nvlink reduce_scatter bf16",
}
_FP8 = {"`all_reduce`, FP8 gradients": "nvlink fp8"}
_OTHERS = {
    "NCCL all-reduce, float32": "nccl fp32",
    "`all_reduce`, float32": "nvlink fp32",
    "over NCCL's collectives: bfloat16": "collective bf16",
    "over NCCL's collectives: FP8 gradients": "collective fp8",
    "over NCCL's collectives: reduce-scatter": "collective reduce_scatter bf16",
}
SUMS = (  # GPUs, whether in CUDA graphs, powers of two of bytes, rows
    (4, False, (24, 26, 28, 30), {**_BF16, **_FP8, **_SCATTER, **_OTHERS}),
    (2, False, (24, 26, 28, 30), {**_BF16, **_FP8, **_SCATTER}),
    (4, True, (14, 18, 20, 22, 24), {**_BF16, **_FP8}),
)
DATA_PARALLEL = {
    "1.1 B Llama, DistributedDataParallel, bfloat16": ("llama", "ddp bf16"),
    "GPT-2 124M, DistributedDataParallel, bfloat16": ("gpt2", "ddp bf16"),
}


def test_the_tables_of_collectives_are_the_records():
    document, found = (ROOT / "docs/comm.md").read_text(), {}
    for line in (ROOT / "benchmarks/results/comm.jsonl").read_text().splitlines():
        record = json.loads(line)
        params = record["params"]
        key = record["variant"], params["size"], params.get("ranks"), params.get("graphs")
        found[key] = record
        assert not record.get("differing_bytes"), "ranks end with the same bits"
    for ranks, graphs, powers, names in SUMS:
        for name, variant in names.items():
            faster = None if variant.startswith("nccl") else "speedup"
            faster = "speedup_fp32" if variant == "nvlink fp32" else faster
            cells = []
            for power in powers:
                record = found[variant, 2**power, ranks, graphs]
                times = f" ({record[faster]:.2f} ×)" if faster else ""
                cells.append(f"{record['value']:.3f}{times}")
            assert f"| {name} | {' | '.join(cells)} |" in document


def test_the_table_of_data_parallel_steps_is_the_record_s():
    document, found = (ROOT / "docs/comm.md").read_text(), {}
    for line in (ROOT / "benchmarks/results/ddp_step.jsonl").read_text().splitlines():
        r = json.loads(line)
        bytes_each = r["gradient_bytes_per_parameter"]
        row = (
            f"| {r['value']:.1f} | {r['exposed_ms']:.2f} | {bytes_each:.2f} | {r['wire_mib']:.0f} |"
        )
        found[r["params"]["model"], r["variant"]] = row
    for first, (model, variant) in DATA_PARALLEL.items():
        rows = [f"| {first} {found[model, variant]}", f"| with the hook {found[model, 'hook']}"]
        rows.append(f"| `DataParallel` {found[model, 'DataParallel']}")
        assert "\n".join(rows) in document


FRAMEWORKS = {
    "DeepSpeed, ZeRO-2": "zero2",
    "DeepSpeed, ZeRO-3": "zero3",
    "FSDP2": "fsdp2",
    "Accelerate, DDP": "accelerate ddp",
}


def test_the_table_of_frameworks_is_the_record_s():
    document, found = (ROOT / "docs/integrations.md").read_text(), {}
    for line in (ROOT / "benchmarks/results/frameworks.jsonl").read_text().splitlines():
        record = json.loads(line)
        found[record["variant"]] = record
    for name, variant in FRAMEWORKS.items():
        base = found[f"{variant} bf16"]
        row = f"| {name} | {base['value']:.1f} ms, {base['peak_gib']:.1f} GiB |"
        for compute in ("te", "native"):
            r = found[f"{variant} O2 {compute}"]
            times, part = base["value"] / r["value"], r["peak_gib"] / base["peak_gib"]
            row += f" {r['value']:.1f} ms ({times:.2f} ×), {r['peak_gib']:.1f} GiB ({part:.2f} ×) |"
            # the bound is a rank's share of a remainder and two moments, times the ranks
            ranks = r["params"]["ranks"] if variant.startswith("accelerate") else 1
            assert r["state_bytes_per_parameter"] / ranks <= 3.1
        assert row in document


WIRE = {
    "the hook": "hook",
    "the hook, error feedback": "hook, error feedback",
    "`DataParallel`": "DataParallel",
    "`DataParallel`, error feedback": "DataParallel, error feedback",
}


def test_the_table_of_losses_over_ranks_is_the_record_s():
    document, losses = (ROOT / "docs/comm.md").read_text(), {}
    for line in (ROOT / "benchmarks/results/wire_parity.jsonl").read_text().splitlines():
        record = json.loads(line)
        losses.setdefault(record["variant"], {})[record["params"]["seed"]] = record["value"]
    plain = losses.pop("ddp bf16")
    assert set(losses) == set(WIRE.values())
    assert sorted(plain) == [0, 1, 2]
    assert (
        f"| DistributedDataParallel, bfloat16 | {statistics.mean(plain.values()):.4f} |" in document
    )
    for name, variant in WIRE.items():
        runs = losses[variant]
        paired = [runs[seed] / plain[seed] - 1 for seed in sorted(plain)]
        mean, *each = (
            f"{100 * d:+.2f}".replace("-", "−") for d in [statistics.mean(paired), *paired]
        )
        row = f"| {name} | {statistics.mean(runs.values()):.4f} | {mean} % | {', '.join(each)} % |"
        assert row in document
        assert abs(statistics.mean(paired)) < 0.003, "of three seeds, to 0.3 %"


STRESS = {
    "fp8stack, default": "fp8stack 8bit",
    'fp8stack, `states="4bit"`': "fp8stack 4bit",
    "bitsandbytes AdamW8bit": "bitsandbytes 8bit",
    "torchao AdamW8bit": "torchao 8bit",
    "torchao AdamW4bit": "torchao 4bit",
    "torchao AdamWFp8": "torchao fp8",
    "flashoptim": "flashoptim 8bit",
    "TransformerEngine, FP8-LM formats": "te fp8-lm",
}
CASES = ("narrow", "mid", "wide", "sparse", "1e-7", "zero first")


def test_the_stress_table_is_the_record_s():
    cells = {}
    for line in (ROOT / "benchmarks/results/optimizer_stress.jsonl").read_text().splitlines():
        record = json.loads(line)
        extra = record["extra"]
        if not extra["finite"]:
            cell = "not finite"
        elif extra["explodes"]:
            cell = f"**{extra['max_update']:,.0f} ×**"
        else:
            cell = f"{100 * record['value']:.0f} %"
        cells[record["variant"], record["params"]["case"]] = cell
        assert not (record["variant"].startswith("fp8stack") and extra["explodes"])
    for name, variant in STRESS.items():
        assert f"| {name} | {' | '.join(cells[variant, case] for case in CASES)} |" in README


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/limitations.md",
        "docs/optimizers.md",
        "docs/compute.md",
        "docs/comm.md",
        "docs/integrations.md",
        "CHANGELOG.md",
    ],
)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_the_demo_s_table_is_the_record_s():
    lines = (ROOT / "benchmarks/results/demo.jsonl").read_text().splitlines()
    records = {record["variant"]: record for record in map(json.loads, lines)}
    assert list(records) == ["baseline", "O0", "O1", "O2"]
    for level, record in records.items():
        change = 100 * (record["value"] / records["baseline"]["value"] - 1)
        difference = f" {change:+.2f} % " if level != "baseline" else " "
        size = record["bytes_per_parameter"]
        parts = ("weight", "master", "grad", "m", "v")
        cells = [f"{size[part]:.2f}" if size[part] else "0" for part in parts]
        row = f"| {level} | {record['value']:.4f} |{difference}| {' | '.join(cells)} | {size['total']:.2f} |"
        assert row in README
        assert abs(change) < 1, "in the demo every level ends within 1 % of the baseline"
        assert record["make_demo_seconds"] < 360


STEPS = {
    "fp8stack, default": "fp8stack",
    "fp8stack, norm and clipping included": "fp8stack max_grad_norm",
    "fp8stack, FP8 weights for the next forward included": "fp8stack emit",
    "fp8stack, states and masters in host memory": "fp8stack offload",
    'fp8stack, `states="4bit"`': "fp8stack 4bit/split24/fp8",
    "torch fused, float32": "torch fused fp32",
    "torch fused, pure bfloat16": "torch fused bf16",
    "flashoptim, 24 bits": "flashoptim 24bit",
    "TransformerEngine, float32 master": "te fp32 master",
    "TransformerEngine, FP8-LM formats": "te fp8-lm",
    "bitsandbytes AdamW8bit": "bitsandbytes 8bit",
    "torchao AdamW8bit": "torchao 8bit",
    "torchao AdamW4bit": "torchao 4bit",
}


def test_the_table_of_steps_is_the_record_s():
    records = {}
    for line in (ROOT / "benchmarks/results/optimizer_step.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["params"]["model"] == "llama-3.2-1b" and record["value"]:
            records[record["variant"]] = record
    assert len({records[variant]["time"][:10] for variant in STEPS.values()}) == 1, "one run"
    for name, variant in STEPS.items():
        extra = records[variant]["extra"]
        size = extra["bytes"]
        resident = f"{size['total'] - size['grad']:.2f} | {size['total']:.2f}"
        row = (
            f"| {name} | {records[variant]['value']:.2f} | {100 * extra['of_copy']:.0f} % | "
            f"{extra['cpu_ms']:.2f} | {resident} | {extra['peak_extra_mib']:,.0f} |"
        )
        assert row in README
        if variant.startswith("fp8stack"):
            assert extra["peak_extra_mib"] <= 16
            assert extra["cpu_ms"] <= 1
    assert records["fp8stack"]["extra"]["of_copy"] >= 0.9


LAYERS = {
    "bf16": "bf16 eager",
    "fp8stack native": "native current",
    'fp8stack native, `weight_cache="off"`': "native current, cache off",
    "fp8stack native, delayed": "native delayed",
    "fp8stack native, blockwise": "native blockwise",
    "fp8stack native, fused": "native fused",
    "fp8stack native, fused, delayed": "native fused, delayed",
    'fp8stack native, fused, `weight_cache="off"`': "native fused, cache off",
    "TransformerEngine, current": "te current",
    "TransformerEngine, delayed": "te delayed",
    "TransformerEngine, blockwise": "te blockwise",
    "TransformerEngine, fused modules, current": "te current, fused LN",
    "TransformerEngine, fused modules, delayed": "te delayed, fused LN",
    "torchao, tensorwise": "torchao tensorwise",
    "torchao, rowwise": "torchao rowwise",
    "bf16, compiled": "bf16 compile",
    "fp8stack native, compiled": "native current compile",
    "fp8stack native, delayed, compiled": "native delayed compile",
    "fp8stack native, fused, delayed, compiled": "native fused, delayed compile",
    "torchao, tensorwise, compiled": "torchao tensorwise compile",
    "torchao, rowwise, compiled": "torchao rowwise compile",
}


def test_the_table_of_layers_is_the_record_s():
    records = {}
    for line in (ROOT / "benchmarks/results/train_step.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["params"]["model"] == "llama":
            records[record["variant"]] = record
    assert len({records[variant]["time"] for variant in LAYERS.values()}) == 1, "one run"
    for name, variant in LAYERS.items():
        extra = records[variant]["extra"]
        numbers = (records[variant]["value"], extra["of_eager"], extra["cpu_ms"], extra["peak_gib"])
        assert "| {} | {:.1f} | {:.2f} | {:.1f} | {:.1f} |".format(name, *numbers) in README
