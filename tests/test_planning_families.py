"""Families of models by their configurations: parameters, what stays and what a pass holds, against the real model."""

import json
import weakref
from contextlib import nullcontext

import pytest
import real_models
import torch
import transformers
from torch import nn
from transformers import AutoConfig

import fp8stack
from fp8stack.errors import ConfigError, ModelError
from fp8stack.levels import recipe_for
from fp8stack.memory import measure
from fp8stack.nn.casts import FEW_ROWS
from fp8stack.planning import (
    BASELINES,
    HuggingFaceModel,
    Precision,
    Setup,
    at_level,
    estimate,
    largest_batch,
    measure_step,
    resident,
)
from fp8stack.planning.fake_step import CudaAutocast

TEXT = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
SHARED = {**TEXT, "num_key_value_heads": 2, "head_dim": 16}
ONE = {**SHARED, "num_hidden_layers": 1}  # what layers share is seen in others
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MLA = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
FAMILIES = {
    "llama": SHARED, "mistral": ONE, "qwen2": ONE, "qwen3": ONE, "gemma": ONE, "gemma2": SHARED, "gemma3_text": SHARED,
    "phi": {**TEXT, "num_hidden_layers": 1}, "phi3": {**TEXT, "num_key_value_heads": 2, "num_hidden_layers": 1},
    "qwen3_moe": {**ONE, **EXPERTS, "num_experts": 8},
    "mixtral": {**ONE, "num_local_experts": 4, "num_experts_per_tok": 2},
    # a first dense layer, shared experts, and a width of values that is not that of keys
    "deepseek_v3": {**TEXT, **EXPERTS, **MLA, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
                    "num_key_value_heads": 4, "n_group": 2, "topk_group": 1,
                    "auto_map": {"AutoModelForCausalLM": "none.Here"}, "quantization_config": {"quant_method": "fp8"}},
    "gpt_oss": {**SHARED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"vocab_size": 512, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "t5": {"vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
           "dropout_rate": 0.0},
    "bert": {**TEXT, **NO_DROPOUT, "num_hidden_layers": 1},
    "vit": {**TEXT, **NO_DROPOUT, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8},
}  # fmt: skip
BF16 = Precision("bfloat16", torch.bfloat16, False)
O0, O2 = (at_level(recipe_for(level, select="all")) for level in ("O0", "O2"))


@pytest.fixture
def described(tmp_path):
    """Return a function that returns the model of a family, of a written configuration."""

    def describe(kind, **more):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": kind, **FAMILIES[kind], **more}))
        return HuggingFaceModel(path)

    return describe


def real(model, dtype=torch.float32):
    """Return the model with data."""
    torch.manual_seed(0)
    return model._auto.from_config(model.config, dtype=dtype).train()


def batch_of(model, dtype, tokens=32):
    if model.images:
        return {"pixel_values": torch.randn(2, 3, 32, 32, dtype=dtype), "labels": torch.zeros(2).long()}  # fmt: skip
    ids = torch.randint(1, 512, (2, tokens))
    both = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return {"input_ids": ids, "labels": ids, **both}


def train(model, precision, device="cpu"):
    """Take two steps of the real model; return bytes that autograd saved in the second, and what stays."""
    trained = real(model, precision.weights).to(device)
    optimizer = torch.optim.AdamW(trained.parameters())
    if precision.recipe is not None:
        level = precision.recipe.level
        trained, optimizer = fp8stack.initialize(trained, optimizer, level, select="all")
        fp8stack.nn.fuse(trained)  # as `initialize` does on a GPU
    own = {t.untyped_storage() for t in (*trained.parameters(), *trained.buffers())}
    saved = (
        weakref.WeakSet()
    )  # a branch of the graph may be freed before the loss, as a router's choice is

    def pack(tensor):
        saved.add(tensor.untyped_storage())
        return tensor

    for _ in range(2):
        optimizer.zero_grad()
        saved.clear()
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            CudaAutocast() if device == "cpu" else nullcontext(),
            torch.autocast(device, torch.bfloat16, enabled=precision.autocast),
        ):
            batch = batch_of(model, precision.weights)
            loss = trained(**{name: value.to(device) for name, value in batch.items()}).loss
        kept = sum(storage.nbytes() for storage in saved if storage not in own)
        loss.backward()
        optimizer.step()
    return kept, measure(trained, optimizer).bytes


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_gpu_saves_as_many_bytes_under_autocast(kind, described):
    model = described(kind)
    seq = model.positions if model.images else 32
    held = model.held(BASELINES["bf16"], 2, seq, False)
    kept, _ = train(model, BASELINES["bf16"], "cuda")
    padded = 0.02 if kind == "deepseek_v3" else 0.001  # keys of 24 numbers, to 32
    assert held.kept == pytest.approx(kept, rel=padded)


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_are_those_of_the_model_and_of_a_token(kind, described):
    """Those that a token uses: experts that one token leads to get a gradient."""
    model = described(kind)
    whole = real(model)
    assert model.parameters == sum(p.numel() for p in whole.parameters())
    batch = batch_of(model, torch.float32, tokens=1)
    del batch["labels"]
    whole(**{name: value[:1] for name, value in batch.items()}).logits.sum().backward()
    stacks = [p for name, p in whole.named_parameters() if ".experts." in name]
    idle = sum(e.numel() for p in stacks for e, g in zip(p, p.grad, strict=True) if not g.any())
    assert model.active == model.parameters - idle
    assert bool(idle) == (kind in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"))


@pytest.mark.filterwarnings("ignore:.*of the matrix parameters multiply in FP8")
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_pass_and_what_stays_are_those_of_a_real_step(kind, described):
    """On a CPU SDPA writes attention out for values of another width, and for biases with a gradient; a GPU does not.

    So DeepSeek and T5 are compared with attention that is written out in both places.
    """
    own = {"attn_implementation": "eager"} if kind in ("deepseek_v3", "t5") else {}
    model = described(kind, **own)
    same = {"weights": "weight", "masters": "master", "gradients": "grad", "v": "v"}
    wide = [BASELINES["fp32"]] * (kind in ("gpt2", "bert", "gpt_oss"))
    for precision in (BASELINES["bf16"], BF16, O0, O2, *wide):
        kept, use = train(model, precision)
        stays = resident(model.skeleton(precision.weights), precision).bytes
        assert {k: stays[k] for k in same} == {k: use[part] for k, part in same.items()}
        assert stays["m"] == use["m"] + use["other"]
        seq = model.positions if model.images else 32
        held = model.held(precision, 2, seq, False)
        assert held.kept == pytest.approx(kept, rel=0.001, abs=512), precision.brief
        assert held.forward >= held.kept
        assert held.backward[-1][1] == 1


def test_attention_is_what_a_gpu_calls(described):
    """Scores are kept for float32 with heads that share keys, and by attention that is written out; not otherwise."""

    seq, long = 2048, {"max_position_embeddings": 2048, "hidden_size": 16, "vocab_size": 32}
    long["num_hidden_layers"] = 1

    def scores(kind, precision, **more):
        held = described(kind, **long, **more).held(precision, 1, seq, False)
        item = 4 if precision is BASELINES["fp32"] else 2
        return held.kept > 4 * seq**2 * item  # of 4 heads

    assert scores("llama", BASELINES["fp32"])
    assert not scores("phi", BASELINES["fp32"])
    for kind in ("llama", "deepseek_v3", "mixtral"):
        assert not scores(kind, BASELINES["bf16"]), kind
        assert not scores(kind, O2), kind
    assert scores("gpt_oss", BF16)
    assert scores("llama", BF16, attn_implementation="eager")
    assert described("gpt_oss").attention == "eager"


@pytest.mark.parametrize("name", ["llama-1b", "gpt2", "t5-base", "vit-l"])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_real_model_takes_what_was_measured(name, level, tmp_path, by_size):
    """The default, of which a GPU leaves some layers in bfloat16 and fuses others."""
    made = real_models.MODELS[name]
    config = getattr(transformers, made.config)(**made.sizes)
    config.save_pretrained(tmp_path)
    model = HuggingFaceModel(tmp_path)
    setup = Setup(made.batch, made.length or model.positions)
    found = estimate(model, at_level(recipe_for(level)), setup)
    records = map(json.loads, real_models.RESULTS.read_text().splitlines())
    same = {"model": name, "batch": made.batch, "tokens": made.tokens}
    of = [r for r in records if r["variant"] == level and r["params"] == same and r["peak_gib"]]
    assert found.peak / 2**30 == pytest.approx(of[-1]["peak_gib"], rel=0.02)


IN_FP8 = {
    "llama-1b": 0.897, "llama-8b-4": 1, "gpt2": 0.333, "vit-l": 0, "qwen3-moe": 0.968, "t5-base": 0, "whisper-small": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", IN_FP8)
def test_how_much_of_a_real_model_is_in_fp8(name, by_size):
    """In eager mode, as README says of them."""
    made = real_models.MODELS[name]
    with torch.device("meta"):
        model = made.build()
    o2 = at_level(recipe_for("O2", compute="native"))
    measure_step(model, o2, lambda model: model(**made.draw(model, "cpu")), name, gpu=True)
    assert real_models.share_in_fp8(model, "O2") == pytest.approx(IN_FP8[name], abs=0.0005)
    assert fp8stack.get_report(model).share > 0.99


def test_storages_are_counted_while_they_live():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU())
    held = measure_step(
        model, BASELINES["fp32"], lambda model: model(torch.zeros(4, 8)).sum(), "it", gpu=True
    )
    one = 4 * 8 * 4  # input, product and what ReLU puts out
    assert (held.kept, held.forward) == (2 * one + 4, 3 * one)
    assert [share for _, share in held.backward] == [0.0, 1.0]  # of one gradient
    assert (
        held.backward[0][0] >= 2 * one + 4 + one
    )  # what was kept, and a gradient of ReLU's output
    assert held.moments(256)["loss"] == 3 * one
    assert held.moments(256, 64)["loss"] == 3 * one + 64
    assert held.moments(256)["backward"] >= 256


def test_checkpointing_sharing_and_sums_of_gradients(described, by_size):
    model = described("llama", num_hidden_layers=3, vocab_size=64)
    apart = at_level(recipe_for("O2", select="all", fuse=False))
    setup = Setup(seq=64, ranks=4, sharding="fsdp")  # where nothing is fused
    assert estimate(model, O2, setup).parts == estimate(model, apart, setup).parts
    assert estimate(model, O2, Setup(seq=64)).peak < estimate(model, apart, Setup(seq=64)).peak
    # layers of this size are in bfloat16 on a GPU, unless select="all" is given
    auto, bf16 = (at_level(recipe_for("O2", fuse=False, compute=c)) for c in ("auto", "bf16"))
    parts = [estimate(model, p, Setup(seq=64)).parts["activations"] for p in (auto, bf16, apart)]
    assert parts[1] > parts[0] != parts[2]  # which share bfloat16 copies of an input
    for precision in (BASELINES["bf16"], apart):
        of = {name: estimate(model, precision, Setup(seq=64, **given)) for name, given in {
            "plain": {}, "again": {"checkpointing": True}, "sum": {"accumulate": True},
            "fsdp": {"ranks": 4, "sharding": "fsdp"}, "zero2": {"ranks": 4, "sharding": "zero2"},
        }.items()}  # fmt: skip
        kept = {name: e.parts["activations"] for name, e in of.items()}
        assert kept["again"] < 0.5 * kept["plain"] == 0.5 * kept["sum"]
        assert kept["fsdp"] < kept["plain"]  # bfloat16 throughout
        early = of["sum"].parts["gradients"]
        assert of["sum"].moments["loss"] == of["plain"].moments["loss"] + early
        assert of["fsdp"].parts["m"] == -(-of["plain"].parts["m"] // 4)
        assert of["zero2"].parts["gradients"] < of["plain"].parameters
        assert of["plain"].peak >= sum(of["plain"].parts[k] for k in ("weights", "masters", "m", "v"))  # fmt: skip


def test_a_fused_loss_is_counted_without_logits(described):
    model, setup = described("llama", vocab_size=8192, max_position_embeddings=2048), Setup(4, 2048)
    plain, fused = (
        estimate(model, at_level(recipe_for("O2", fuse_loss=fuse)), setup).moments["loss"]
        for fuse in (False, True)
    )
    logits = 8192 * 8192 * 4
    assert plain > logits
    assert fused < plain - logits


def test_what_fits_is_the_largest_that_does(described):
    model = described("qwen3_moe", max_position_embeddings=1024)
    setup, memory = Setup(seq=1024), 680 * 2**20
    batch = largest_batch(model, O2, setup, memory)
    less, more = (estimate(model, O2, Setup(batch=n, seq=1024)).total for n in (batch, batch + 1))
    assert less <= memory < more
    assert largest_batch(model, O2, setup, 2**20) == 0
    few = estimate(model, O2, Setup(batch=3, seq=1024)).total
    assert batch > FEW_ROWS // 1024 > 3  # which are searched in another way
    assert largest_batch(model, O2, setup, few) == 3


@pytest.mark.parametrize(
    ("kind", "more", "given", "error", "said"),
    [
        ("llama", {"model_type": "lama"}, {}, ConfigError, "makes no model of it .*--sizes"),
        ("llama", {"num_hidden_layers": "two"}, {}, ConfigError, "makes no model of it"),
        ("llama", {"model_type": "clip"}, {}, ConfigError, "makes no model of it"),
        ("llama", {}, {"seq": 65}, ConfigError, "seq=65, and LlamaForCausalLM has 64 positions"),
        ("vit", {}, {"seq": 12}, ConfigError, "seq=12, and ViTForImageClassification has 16"),
        ("llama", {"model_type": "encodec"}, {}, ConfigError, r"EncodecConfig has none ForSeq2SeqLM or"),
        ("llama", {}, {"compile": True}, ConfigError, "compile=True is counted by a formula"),
        ("mixtral", {"experts_implementation": "eager"}, {}, ModelError, "MixtralForCausalLM does not run on"),
        ("mixtral", {"num_experts_per_tok": None}, {}, ConfigError, "num_experts_per_tok"),
    ],
)  # fmt: skip
def test_what_cannot_be_counted_is_refused(kind, more, given, error, said, described):
    with pytest.raises(error, match=said):
        estimate(described(kind, **more), BASELINES["bf16"], Setup(**{"seq": 16, **given}))


def test_half_a_model_is_no_model(described, tmp_path):
    """Of a model for images and text, text alone leaves the images' activations out."""
    vision = {k: v for k, v in FAMILIES["vit"].items() if "vocab" not in k and "pad" not in k}
    config = {"text_config": {**SHARED, "model_type": "gemma3_text"}, "vision_config": vision}
    AutoConfig.for_model("gemma3", **config).save_pretrained(tmp_path)
    model = HuggingFaceModel(tmp_path)
    with pytest.raises(ConfigError, match=r"parameters of Gemma3.* get no gradient"):
        estimate(model, BASELINES["bf16"], Setup(seq=16))


def test_without_transformers_a_configuration_is_refused(described, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r'pip install "fp8stack\[transformers\]"'):
        described("llama")
