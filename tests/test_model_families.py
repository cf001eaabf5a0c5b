"""Models as transformers, timm and diffusers have them, made small by hand: each trains, resumes, and is restored.

"As in float32" is within 1 % of the loss after the same steps, or within twice the noise: what it does to the float32
run that its weights begin off by a 64th, which is less than what E4M3 rounds off.
"""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_same_bits, train_clipped
from torch import nn
from torch.nn import functional as F

import fp8stack

transformers = pytest.importorskip("transformers")

TEXT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 160,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GQA = TEXT | {"num_key_value_heads": 2}
SIZED = GQA | {"head_dim": 16}
EXPERTS = SIZED | {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
IMAGE = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
T5 = {
    "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 160,
    "decoder_start_token_id": 0, "dropout_rate": 0.0,
}  # fmt: skip
WHISPER = {
    "d_model": 128, "vocab_size": 160, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None, "pad_token_id": 0,
    **{f"{side}_{part}": n for side in ("encoder", "decoder")
       for part, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 256))},
}  # fmt: skip
PICTURES = {"img_size": 32, "num_heads": 4}
UNET = {
    "sample_size": 8, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 64,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 8, "norm_num_groups": 16,
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "in_channels": 4, "out_channels": 4,
}  # fmt: skip
CLIP = {
    "text_config": TEXT | {"max_position_embeddings": 32},
    "vision_config": IMAGE,
    "projection_dim": 64,
}
GPT2 = {
    "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 160, "n_positions": 64, "bos_token_id": 1,
}  # fmt: skip
GPT2 |= {"eos_token_id": 2} | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
DEEPSEEK = EXPERTS | {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip

FAMILIES = {  # name: model, config, its arguments, and why more than a tenth of the matrices is outside
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", GPT2, ""),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GQA, ""),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", SIZED, ""),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", SIZED, ""),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", SIZED, ""),
    "Phi": ("PhiForCausalLM", "PhiConfig", TEXT, ""),
    "T5": ("T5ForConditionalGeneration", "T5Config", T5, ""),
    "BERT": ("BertForMaskedLM", "BertConfig", TEXT | {"hidden_dropout_prob": 0.0}, ""),
    "ViT": ("ViTForImageClassification", "ViTConfig", IMAGE | {"num_labels": 64}, ""),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER, ""),
    "Mamba": ("MambaForCausalLM", "MambaConfig", {**TEXT, "state_size": 8}, ""),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", GQA | {"num_local_experts": 4}, ""),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS | {"num_experts": 4}, ""),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK, ""),
    "GPT-OSS": ("GptOssForCausalLM", "GptOssConfig", EXPERTS | {"num_local_experts": 4}, ""),
    "CLIP": ("CLIPModel", "CLIPConfig", CLIP, ""),
    "timm ViT": ("timm", "vit_tiny_patch16_224", {**PICTURES, "patch_size": 8, "embed_dim": 96, "depth": 2}, ""),
    "timm ConvNeXt": ("timm", "convnext_tiny", {"depths": (1, 1, 3, 6), "dims": (32, 64, 96, 192)}, ""),
    "UNet": ("diffusers", "UNet2DConditionModel", UNET, "convolutions"),
}  # fmt: skip


class Scored(nn.Module):
    """A model of another library that gives its loss, as transformers' do."""

    def __init__(self, inner, main_input_name):
        super().__init__()
        self.inner, self.main_input_name = inner, main_input_name

    def forward(self, labels, **given):
        if "pixel_values" in given:
            return SimpleNamespace(loss=F.cross_entropy(self.inner(given["pixel_values"]), labels))
        return SimpleNamespace(loss=F.mse_loss(self.inner(**given).sample, labels))


@functools.cache
def made(name):
    """Return a model of a family, the same each time; it is copied before it trains."""
    kind, config, sizes, _ = FAMILIES[name]
    torch.manual_seed(0)
    if kind == "timm":
        timm = pytest.importorskip("timm", exc_type=ImportError)
        return Scored(timm.create_model(config, num_classes=64, **sizes), "pixel_values").train()
    if kind == "diffusers":
        return Scored(getattr(pytest.importorskip(kind), config)(**sizes), "sample").train()
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes)).train()


def batch(model, step):
    """Return the arguments of a call that gives a loss: four sequences, images or spectrograms."""
    draw = torch.Generator().manual_seed(step % 3)
    if hasattr(
        model, "logit_scale"
    ):  # CLIP's loss is of pairs, of which few are learnt by heart in few steps
        images = torch.randn(16, 3, 32, 32, generator=draw)
        tokens = torch.randint(3, 160, (16, 16), generator=draw)
        tokens[:, -1] = 2  # where a text ends
        return {"input_ids": tokens, "pixel_values": images, "return_loss": True}
    if model.main_input_name == "sample":
        images, noise = torch.randn(2, 4, 4, 16, 16, generator=draw)
        text, at = torch.randn(4, 8, 64, generator=draw), torch.arange(4)
        return {"sample": images, "timestep": at, "encoder_hidden_states": text, "labels": noise}
    if model.main_input_name == "pixel_values":
        images, labels = (
            torch.randn(4, 3, 32, 32, generator=draw),
            torch.randint(0, 64, (4,), generator=draw),
        )
        return {"pixel_values": images, "labels": labels}
    tokens = torch.randint(3, 160, (4, 32), generator=draw)
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(4, 16, 64, generator=draw), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}


def rate_of(name):
    return 1e-4 if name == "CLIP" else 3e-4


def train(model, optimizer, steps):
    """Return the losses of these steps."""

    def loss_of(step):
        torch.manual_seed(step)
        return model(**batch(model, step)).loss

    return train_clipped(model, optimizer, loss_of, steps)


@functools.cache
def in_float32(name, nudge=0.0):
    """Return the mean of the last losses of a float32 run whose weights begin off by about `nudge` of themselves."""
    model = copy.deepcopy(made(name))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + nudge * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate_of(name))
    return float(train(model, optimizer, range(12))[-3:].mean())


def assert_as_in_float32(name, loss):
    """Fail where the loss is off by more than a hundredth, and by more than twice the noise."""
    expected = in_float32(name)
    off = abs(loss - expected)
    if off > 0.01 * abs(expected):  # the noise takes two runs more, which most families need not
        nudged = [in_float32(name, nudge) for nudge in (2**-6, -(2**-6))]
        assert off <= 2 * max(abs(end - expected) for end in nudged)


# O0 and O1 do parts of what O2 does, and take minutes over all families.
FEW = ("GPT-2", "T5", "ViT", "Mixtral")
CASES = [
    (name, level)
    for name in FAMILIES
    for level in ("O0", "O1", "O2")
    if level == "O2" or name in FEW
]


@pytest.mark.parametrize(("name", "level"), CASES)
@pytest.mark.filterwarnings(
    "ignore:fp8stack O. only|fp8stack O. 6", "ignore::fp8stack.errors.Fp8StackWarning"
)
def test_a_family_trains_resumes_and_is_restored(name, level, tmp_path):
    def start():
        model = copy.deepcopy(made(name))
        return fp8stack.initialize(
            model, torch.optim.AdamW(model.parameters(), lr=rate_of(name)), level
        )

    model, optimizer = start()
    report, reason = fp8stack.get_report(model), FAMILIES[name][-1]
    assert list(model.state_dict()) == list(made(name).state_dict())
    assert (report.share >= 0.9) == (reason == "") == (report.fallbacks == [])
    assert reason == "" or any(told.startswith(reason) for told in report.outside.values())
    losses = train(model, optimizer, range(8))
    fp8stack.checkpoint.save(tmp_path / "run", model, optimizer)
    losses = torch.cat([losses, train(model, optimizer, range(8, 12))])
    assert_as_in_float32(name, float(losses[-3:].mean()))
    other = start()
    fp8stack.checkpoint.load(tmp_path / "run", *other)
    assert_same_bits(train(*other, range(8, 12)), losses[8:])
    masters = fp8stack.checkpoint.master_state_dict(model, optimizer)
    fp8stack.restore(model, optimizer)
    assert_same_bits(model.state_dict(), masters)
    assert all(
        type(m) is type(n) for m, n in zip(model.modules(), made(name).modules(), strict=True)
    )
