"""What `examples/train_gpt.py` is made of: model, data, configuration, and the run itself, a small file for each."""

from .model import GPT, SIZES, ModelConfig

__all__ = ["GPT", "SIZES", "ModelConfig"]
