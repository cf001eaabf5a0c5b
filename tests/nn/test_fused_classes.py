"""What `fuse` finds in transformers' own classes, in their own sizes of tests."""

import pytest
from layers import native
from torch import nn

from fp8stack.nn.mixin import TESTED
from fp8stack.nn.mlp import FusedMLP, fuse
from fp8stack.nn.rmsnorm import FusedRMSNorm

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
TEXT = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96}
IMAGES = SIZES | {"image_size": 32, "patch_size": 16}
T5 = {
    "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 96, "dropout_rate": 0,
}  # fmt: skip
CLASSES = {  # model, config, its arguments, activations and numbers of fused MLPs, share of norms
    "Llama": ("LlamaModel", "LlamaConfig", TEXT, ["silu"] * 2, 1),
    "Qwen": ("Qwen3Model", "Qwen3Config", TEXT, ["silu"] * 2, 1),
    "Mistral": ("MistralModel", "MistralConfig", TEXT, ["silu"] * 2, 1),
    "Gemma": ("GemmaModel", "GemmaConfig", TEXT, ["gelu_tanh"] * 2, 1),
    "ViT": ("ViTModel", "ViTConfig", IMAGES, ["gelu"] * 2, 0),
    "SigLIP": ("SiglipVisionModel", "SiglipVisionConfig", IMAGES, ["gelu_tanh"] * 3, 0),
    "GPT-NeoX": ("GPTNeoXModel", "GPTNeoXConfig", SIZES | {"vocab_size": 96}, ["gelu"] * 2, 0),
    "T5": ("T5Model", "T5Config", T5, ["relu"] * 4, 1),
    "T5 v1.1": ("T5Model", "T5Config", T5 | {"feed_forward_proj": "gated-gelu"}, ["gelu_tanh"] * 4, 1),
    "GPT-2": (  # its layers are Conv1D
        "GPT2Model", "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "resid_pdrop": 0.0}, ["gelu_tanh"] * 2, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CLASSES)
def test_mlps_and_rmsnorms_of_transformers_classes_are_found(case):
    model_class, config_class, sizes, activations, share = CLASSES[case]
    config = getattr(transformers, config_class)(**sizes)
    model = native(nn.Sequential(getattr(transformers, model_class)(config)))
    fuse(model)
    modules = [*model.modules()]
    found = [vars(m)[TESTED].activation for m in modules if isinstance(m, FusedMLP)]
    assert found == activations
    norms = [m for m in modules if "Norm" in type(m).__name__]
    assert sum(isinstance(m, FusedRMSNorm) for m in norms) == share * len(norms)
