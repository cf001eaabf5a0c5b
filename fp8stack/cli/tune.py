"""`fp8stack tune FILE:function --batch FILE:function`: which layers are worth FP8 here, and the options that say so.

    fp8stack tune train.py:build_model --batch train.py:example_batch --budget 0.015 --json

The model is built for real, with the weights that the function gives it, and moved to the current GPU with the batch.
What is measured, and how, is in `fp8stack/tuning.py`. Options of a recipe are given to `initialize`, and are in the
result.
"""

from __future__ import annotations

import argparse

from torch import Tensor
from torch.utils._pytree import tree_map

from fp8stack.tuning import tune

from . import machine
from .load_function import build, call
from .output import show
from .recipe import options_of


def run(options: argparse.Namespace) -> int:
    device = machine.device()
    model = build(options.target)[0].to(device)
    batch = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, call(options.batch))
    found = tune(model, batch, budget=options.budget, quiet=True, **options_of(options))
    show(options, found.to_dict(), lambda _: [str(found)])
    return 0 if found.met else 1
