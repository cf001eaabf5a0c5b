"""How much memory training will take, on paper: `fp8stack estimate` and what it is made of.

    shape = LLAMA.resized(7e9)                                  # or read_config("config.json")
    precision = at_level(fp8stack.levels.recipe_for("O2"))      # or BASELINES["bf16"]
    print(estimate(shape, precision, Setup(batch=1, seq=4096)).total / 2**30)

`counted.py` counts what stays by running the library on the meta device, `saved.py` has the formula for what
a forward pass keeps, `budget.py` puts both together for a GPU among several.
"""

from .budget import SHARDINGS, Estimate, Make, Setup, estimate, largest_batch, largest_model
from .counted import BASELINES, KINDS, Precision, Resident, at_level, resident, use_after_step
from .saved import Activations, activations
from .shapes import FAMILIES, LLAMA, Shape, read_config, shape_of_config

__all__ = [
    "BASELINES",
    "FAMILIES",
    "KINDS",
    "LLAMA",
    "SHARDINGS",
    "Activations",
    "Estimate",
    "Make",
    "Precision",
    "Resident",
    "Setup",
    "Shape",
    "activations",
    "at_level",
    "estimate",
    "largest_batch",
    "largest_model",
    "read_config",
    "resident",
    "shape_of_config",
    "use_after_step",
]
