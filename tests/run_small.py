"""Run a script as a process of its own does, with a small model, and compiling nothing that DeepSpeed needs not."""

import functools
import os
import runpy
import sys

import gpt

gpt.ModelConfig = functools.partial(gpt.ModelConfig, seq_len=64, dim=128, heads=4, kv_heads=2)
sys.argv = sys.argv[1:]
if "05_deepspeed" in sys.argv[0]:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # or its Muon, which no script takes, is compiled
    if "torch._dynamo" in sys.modules:  # has read that, in a fork
        sys.modules["torch._dynamo"].config.disable = True
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
if "07_hf_trainer" in sys.argv[0]:
    import transformers

    small = {"hidden_size": 128, "intermediate_size": 384}
    full = transformers.LlamaConfig
    transformers.LlamaConfig = lambda **sizes: full(**sizes | small)
runpy.run_path(sys.argv[0], run_name="__main__")
