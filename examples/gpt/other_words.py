"""Words of public FP8 guides and other training scripts: what they are called here, or what to use instead.

A flag or key that means the same takes effect under its own name (`NAMES`), and so does a value (`VALUES`); names may
be in capitals, and flags have underscores. What has no counterpart is answered in one line (`ANSWERS`), or is left out
with a warning where leaving it out changes nothing (`IDLE`).
"""

from __future__ import annotations

NAMES = {
    "auto_batch_size": "micro_batch",  # of which true is "auto"
    "checkpoint_dir": "out",
    "dataset": "data",
    "fp8_amax_compute_algo": "amax_compute_algo",
    "fp8_amax_history_len": "amax_history_len",
    "learning_rate": "max_lr",
    "total_steps": "steps",
    "use_tensorboard": "tensorboard",
    "use_wandb": "wandb",
}
"""The option here that another word means."""
VALUES = {"fp8_recipe": {"tensorwise": "current"}}
"""What a value of an option is called here."""
ANSWERS = {
    "mixed_precision": "that is the level's: opt_level: O2, O1 or O0 for FP8, off for bfloat16",
    "num_epochs": "the length of a run is steps: N. A pass over T tokens is T / (target_effective_batch_size × "
    "seq_len) of them",
    "penalty_weight": "it belongs to the loss of a model that is not known here. Leave it out",
    "use_4bit_optimizer": "what that stands for is an 8-bit AdamW: optimizer_bits: 8 (or 4)",
}
"""Why there is no such option, and what to use instead."""
IDLE = {
    "num_workers": "windows are read from mapped files by the training process itself, which never waits for them"
}
"""Why an option has no effect here."""
FILES = {
    "fineweb_edu_bf16.yaml": "--config examples/configs/fineweb_edu_fp8.yaml --no-fp8",
    "openwebtext_adaptive_batch.yaml": "--config examples/configs/auto_batch.yaml --data openwebtext",
    "test_auto_batch.yaml": "--config examples/configs/auto_batch.yaml",
    "test_fp8.yaml": "--config examples/configs/tiny.yaml",
}
"""What to give here instead of a guide's configuration."""
