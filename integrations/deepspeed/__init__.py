"""DeepSpeed: one line, or one section of the JSON, brings a level to a model under ZeRO 0, 1, 2 or 3.

    {"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "fp8stack": {"opt_level": "O2"}}

    from fp8stack.integrations import deepspeed as fp8_deepspeed
    engine, optimizer, loader, scheduler = fp8_deepspeed.initialize(model=model, optimizer=optimizer, config=config)

`install()` lets `deepspeed.initialize` itself do so where the config has the section, for code that one does not own:
Accelerate, the Trainer of Transformers, Lightning. `verify(engine)` says whether what was asked for is what runs.

O0: layers change class before the engine is made, also under `zero.Init`. O1: this engine's reduction of gradients is
replaced (`reduction.py`). O2: the optimizer is replaced by fp8stack's, which keeps 8-bit states in ZeRO's flat
partitions, and where those are bfloat16 8 more bits of the weights. DeepSpeed is neither patched nor subclassed.
"""

from fp8stack.integrations.verification import Verification

from .engine import Handle, initialize, install, verify

__all__ = ["Handle", "Verification", "initialize", "install", "verify"]
