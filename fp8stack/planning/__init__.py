"""How much memory training will take, on paper: `fp8stack estimate` and what it is made of.

    shape = LLAMA.resized(7e9)                                  # or read_config("config.json")
    precision = at_level(fp8stack.levels.recipe_for("O2"))      # or BASELINES["bf16"]
    print(estimate(shape, precision, Setup(batch=1, seq=4096)).total / 2**30)

`resident_memory.py` counts what stays from step to step by running the library on the meta device,
`activation_memory.py` has the formula for what a forward pass keeps, and `peak_memory.py` puts both together for a GPU
among several. `decoder_shape.py` describes models by their sizes.
"""

from .activation_memory import activations
from .decoder_shape import FAMILIES, LLAMA, Shape, read_config, shape_of_config
from .peak_memory import Estimate, Setup, estimate, largest_batch
from .resident_memory import BASELINES, Precision, at_level, at_the_level, resident, use_after_step

__all__ = [
    "BASELINES", "FAMILIES", "LLAMA", "Estimate", "Precision", "Setup", "Shape", "activations", "at_level",
    "at_the_level", "estimate", "largest_batch", "read_config", "resident", "shape_of_config", "use_after_step",
]  # fmt: skip
