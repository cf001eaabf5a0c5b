"""peft's adapters over a frozen base: as it is, kept in FP8, or quantized by bitsandbytes (QLoRA)."""

import copy
from functools import cache

import pytest
import torch
from helpers import assert_same_bits
from torch import nn

import fp8stack
from fp8stack import checkpoint
from fp8stack.errors import ModelError
from fp8stack.nn import Fp8Linear
from fp8stack.nn.frozen import FrozenWeight

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LEVELS = pytest.mark.parametrize("level", ["O0", "O1", "O2"])
BASES = pytest.mark.parametrize("base", ["as given", "fp8", "bitsandbytes"])
IDS = torch.randint(96, (4, 24), generator=torch.Generator().manual_seed(0))
BATCH = {"input_ids": IDS, "labels": IDS}
GATE = "base_model.model.model.layers.0.mlp.gate_proj"


@cache
def pretrained():
    """Return the weights of a small Llama that has learned something else."""
    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(10):
        ids = (
            torch.randint(96, (8, 24), generator=torch.Generator().manual_seed(step)).sort().values
        )
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, vocab_size=96,
        )
    )  # fmt: skip


def build(base="as given", **lora):
    """Return a Llama with adapters and their optimizer."""
    model = llama()
    model.load_state_dict(pretrained())
    if base == "bitsandbytes":
        from bitsandbytes.nn import Linear4bit

        for layer in model.model.layers:
            for inner in (layer.self_attn, layer.mlp):
                for name, old in [*inner.named_children()]:
                    if type(old) is nn.Linear:
                        new = Linear4bit(*old.weight.shape[::-1], bias=False)
                        new.load_state_dict(old.state_dict())
                        setattr(inner, name, new.to("cpu"))  # which quantizes it
        model.is_loaded_in_4bit = True
    torch.manual_seed(1)
    targets = [f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")]
    config = peft.LoraConfig(**{"r": 16, "lora_alpha": 16, "target_modules": targets, **lora})
    model = peft.get_peft_model(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=5e-3)


def learn(model, optimizer, steps=10):
    losses = []
    for _ in range(steps):
        loss = model(**BATCH).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def loss_of(model):
    with torch.no_grad():
        return model(**BATCH).loss.item()


@cache
def float32_losses(base):
    return learn(*build("as given" if base == "fp8" else base))


def numbers(model):
    """Return all the numbers that the frozen part of a model holds."""
    return [
        p.dequantize() if isinstance(p, FrozenWeight) else p.detach().clone()
        for p in model.parameters()
        if not p.requires_grad
    ]


@LEVELS
@BASES
def test_adapters_train_save_resume_and_are_restored(base, level, tmp_path):
    frozen = "fp8" if base == "fp8" else "keep"

    def start():
        return fp8stack.initialize(*build(base), level, frozen=frozen)

    expected = float32_losses(base)
    given, _ = build(base)
    keys = [*given.state_dict()]
    model, optimizer = start()
    assert [*model.state_dict()] == keys
    before = numbers(model)
    losses = learn(model, optimizer)
    assert losses[-1] < 0.9 * losses[0]
    assert abs(losses[-1] - expected[-1]) < 0.01 * expected[-1], (losses, expected)
    assert_same_bits(numbers(model), before)
    report = fp8stack.get_report(model)
    kinds = {type(p).__name__ for p in model.parameters() if not p.requires_grad}
    if base == "fp8":
        assert len(report.frozen) == 15
        assert "frozen weights in FP8" in str(report)
    elif base == "bitsandbytes":
        assert "Params4bit" in kinds
        assert report.skipped[f"{GATE}.base_layer"].startswith("is a Linear4bit")
        assert "left alone: base_model" in str(report)
    other, other_optimizer = start()
    if base == "bitsandbytes":  # whose layers do not load what their state_dict holds
        peft.set_peft_model_state_dict(other, peft.get_peft_model_state_dict(model))
        other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        checkpoint.save(tmp_path / "all.pt", model, optimizer)
        checkpoint.load(tmp_path / "all.pt", other, other_optimizer)
    assert learn(other, other_optimizer, 2) == learn(model, optimizer, 2)
    kept = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    model, optimizer = fp8stack.restore(model, optimizer)
    assert [*model.state_dict()] == keys
    assert not any(isinstance(p, FrozenWeight) for p in model.parameters())
    assert_same_bits(numbers(model), before)
    if level != "O2":  # whose masters have more bits
        assert_same_bits([p.detach() for p in model.parameters() if p.requires_grad], kept)
    learn(model, optimizer, 1)


@pytest.mark.parametrize("rank", [8, 64])
def test_layers_and_adapters_multiply_in_fp8_whatever_their_rank(rank):
    model, optimizer = fp8stack.initialize(*build(r=rank), "O2", frozen="fp8")
    gate = model.get_submodule(GATE)
    layers = gate.base_layer, gate.lora_A["default"], gate.lora_B["default"]
    assert {type(layer) for layer in layers} == {Fp8Linear}
    assert isinstance(gate.base_layer.weight, FrozenWeight)
    losses = learn(model, optimizer, 5)
    assert losses[-1] < losses[0]


MERGES = {
    "merge_adapter": lambda model: model.merge_adapter(),
    "merge_adapter, safe": lambda model: model.merge_adapter(safe_merge=True),
    "merge_and_unload": lambda model: model.merge_and_unload(),
}


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_merging_into_fp8_names_the_remedy_and_works_after_it(merge):
    model, optimizer = fp8stack.initialize(*build(), "O2", frozen="fp8")
    learn(model, optimizer, 3)
    before, held = loss_of(model), numbers(model)
    with pytest.raises(ModelError, match=r"lose most of what is added.*fp8stack\.restore"):
        merge(model)
    assert_same_bits(numbers(model), held)
    assert loss_of(model) == before
    model, _ = fp8stack.restore(model, optimizer)
    apart = loss_of(model)
    assert abs(apart - before) < 0.01 * before
    merged = merge(model) or model
    assert abs(loss_of(merged) - apart) < 1e-5 * apart
    if merged is model:
        model.unmerge_adapter()
        assert abs(loss_of(model) - apart) < 1e-5 * apart


def test_adapters_are_saved_loaded_and_switched_off_over_fp8(tmp_path):
    model, optimizer = build(modules_to_save=["lm_head"])
    model, optimizer = fp8stack.initialize(model, optimizer, "O2", frozen="fp8")
    head = model.base_model.model.lm_head
    assert isinstance(head.original_module.weight, FrozenWeight)
    assert type(head.modules_to_save["default"].weight) is nn.Parameter
    untrained = loss_of(model)
    learn(model, optimizer, 3)
    trained = loss_of(model)
    with model.disable_adapter():
        assert abs(loss_of(model) - untrained) < 1e-3 * untrained
    model.save_pretrained(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert "adapter_model.safetensors" in files
    model.load_adapter(tmp_path, "second")
    with pytest.raises(ModelError, match=r"cannot be trained.*restore"):  # a copy of the head
        model.set_adapter("second")
    model.set_adapter("second", inference_mode=True)
    assert abs(loss_of(model) - trained) < 0.01 * trained
    plain = llama()
    plain.load_state_dict(pretrained())
    again = peft.PeftModel.from_pretrained(plain, tmp_path)
    assert abs(loss_of(again) - trained) < 0.02 * trained
    assert loss_of(copy.deepcopy(model)) == loss_of(model)
