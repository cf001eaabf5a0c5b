"""A level of fp8stack on a model that torch's `fully_shard` (FSDP2) has sharded, or is to shard.

    model, optimizer = fp8stack.integrations.fsdp.attach(model, optimizer, "O2")           # after fully_shard
    model, optimizer = fp8stack.integrations.fsdp.fully_shard_fp8(model, optimizer, "O2")  # instead of it

O0 changes the classes of Linear layers, as on one device; FSDP2's own classes stay over them. O1 reduces gradients with
E4M3 blocks on the wire; what a rank keeps, its part of the sum, is in the parameter's dtype. O2 makes states DTensors
with the parameter's mesh and placements, all of them at once: torch.distributed.checkpoint loads into what is there.

FSDP2 wants one dtype for all trainable parameters of a module. So at O2 every one of them becomes bfloat16, vectors
too, and the bits below stay in the optimizer: 8 of a matrix, a float32 copy of a vector. They are gathered in the
param_dtype of the mixed-precision policy, so that activations keep their dtype; without one the parameters stay as
they are, since bfloat16 weights would change what the model computes in.

Limits: `restore` cannot undo it. FSDP2 only: the flat vectors of FSDP1 have no rows to make blocks of.
"""

from .shard import fully_shard_fp8
from .sharded import attach, verify, verify_sharded

__all__ = ["attach", "fully_shard_fp8", "verify", "verify_sharded"]
