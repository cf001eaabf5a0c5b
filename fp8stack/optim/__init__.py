"""O2: optimizers whose states are 8-bit blocks and whose weights have 24-bit masters; usable on their own."""

from .adam import Adam, AdamW
from .lion import Lion
from .muon import Muon
from .optimizer import BlockwiseOptimizer
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "BlockwiseOptimizer", "Lion", "Muon"]
