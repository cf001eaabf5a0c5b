"""How much memory training will take, on paper: `fp8stack estimate` and what it is made of.

    shape = LLAMA.resized(7e9)                                  # or HuggingFaceModel("config.json")
    precision = at_level(fp8stack.levels.recipe_for("O2"))      # or BASELINES["bf16"]
    print(estimate(shape, precision, Setup(batch=1, seq=4096)).total / 2**30)

`resident_memory.py` counts what stays from step to step by running the library on the meta device, and `peak_memory.py`
adds what a pass holds, for a GPU among several. A model that there is runs a pass on tensors without data
(`fake_step.py`); `hugging_face.py` makes one from a configuration. A model of which only sizes are known
(`decoder_shape.py`) has a formula (`activation_memory.py`).
"""

from .activation_memory import activations
from .decoder_shape import LLAMA, Shape
from .fake_step import Held, measure_step
from .hugging_face import HuggingFaceModel
from .peak_memory import Estimate, Setup, estimate, largest_batch
from .resident_memory import BASELINES, Precision, at_level, at_the_level, resident, use_after_step

__all__ = [
    "BASELINES", "LLAMA", "Estimate", "Held", "HuggingFaceModel", "Precision", "Setup", "Shape", "activations",
    "at_level", "at_the_level", "estimate", "largest_batch", "measure_step", "resident", "use_after_step",
]  # fmt: skip
