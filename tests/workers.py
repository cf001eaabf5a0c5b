"""What tests run in processes of their own: importable by name there, as test modules are not."""

import torch
from helpers import TinyLM

import fp8stack
from fp8stack.errors import ConfigError


def try_to_release(rank, store, messages):
    """Ask for gradient release in a process group of two; note the message of the refusal."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        fp8stack.initialize(model, optimizer, "O2", step_in_backward=True)
    except ConfigError as error:
        messages[rank] = str(error)
    torch.distributed.destroy_process_group()
