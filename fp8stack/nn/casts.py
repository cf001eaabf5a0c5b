"""Casts of the operands of FP8 products: a layer's input, its weight, and the gradient of its output.

    operand    cast                                                       kept
    input      once for all layers of a model that read it                transposed codes, until backward
    weight     in every forward; in backward again, in the other layout   its scale, until backward
    gradient   once, both layouts                                         nothing

No codes outlive a forward and its backward, so codes of an earlier weight are never used. Between the two, autograd
keeps the weight itself, as torch does, and the scale that forward found; with that, backward reads the weight only
once. For inputs of few rows (`FEW_ROWS`) reading the weight again would take a larger share of the time. Then one
kernel writes both layouts in forward, and autograd keeps the second: one byte an element until backward. The same
happens under torch.compile, where casts are part of the graph and Inductor fuses the search for the largest magnitude
with the operation that made the tensor.

Forward, too, reads a weight only once if it can guess the scale from the last cast. With delayed scaling it keeps the
last scale while that fits (`ops.recast`). With current scaling it tries the last scale if the parameter's version did
not change, as in a further micro-batch; the kernel checks whether that is the weight's own, and casts again if it is
not. So a wrong guess costs time and changes no bit.

The layers of a model share an `InputCodes`. It holds the codes of the activation that was cast last, until the next
one is cast, backward begins, or the activation is freed. A mark on the activation says that the codes belong to it;
contents, stream, formats and recipe must be the same as at the cast. Leaves of autograd are cast by each layer: users
write to them without a trace (through `.data`, NumPy, collectives), and static inputs of CUDA graphs are leaves.

A fused RMSNorm (`rmsnorm.py`) stores the magnitudes of its output in another attribute of the output. That saves the
cast behind it a pass over the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8stack.formats import E4M3, E5M2, MiniFloat
from fp8stack.kernels import ops
from fp8stack.kernels.ops import raw_stream
from fp8stack.kernels.reference.cast import ALIGNMENT, TOKENS
from fp8stack.kernels.reference.delayed_state import STATES, DelayedState
from fp8stack.levels import PRECISIONS, Recipe, recipe_for
from fp8stack.version import __version__

from .frozen import FrozenWeight
from .notes import capturing, moment, note, noted
from .select import LeastRows, pays


class Formats(NamedTuple):
    """The formats of a layer's products. Weights are E4M3 always; no GPU multiplies E5M2 by E5M2."""

    x: MiniFloat  # input, forward
    x_t: MiniFloat  # input, in the product that gives the weight's gradient
    g: MiniFloat  # gradient of the output


FORMATS = {
    "hybrid": Formats(E4M3, E4M3, E5M2),
    "e4m3": Formats(E4M3, E4M3, E4M3),
    "e5m2": Formats(E5M2, E4M3, E5M2),
}


def _digest() -> str:
    """Return a digest of the sources that are traced into graphs.

    torch keeps compiled graphs on disk by what Dynamo saw, which of a layer is one call: so the call names its source.
    """
    parts = "nn/*.py", "kernels/reference/*.py", "kernels/ops.py", "formats.py"
    files = [f for part in parts for f in Path(__file__).parents[1].glob(part)]
    read = sha256(b"".join(f.read_bytes() for f in sorted(files)))
    return f"{__version__} {read.hexdigest()[:16]}"


# Read here, since Dynamo cannot, and not kept with layers, which may be saved and loaded by another version.
DIGEST = _digest()

FEW_ROWS = 4096
"""Up to this many rows of input, forward makes and keeps the weight's codes for backward."""


class Options(NamedTuple):
    """How one product and its backward are made."""

    digest: str  # of the sources, for graphs
    turned: bool  # the weight is [in, out]
    formats: str  # a key of FORMATS
    fp8_recipe: str
    fast: bool  # sum the forward product with fewer bits
    in_bf16: str  # products that are made in bfloat16, as `levels.PRECISIONS` names them
    train: bool
    dtype: torch.dtype  # of the output
    x_state: int = -1  # handles of a DelayedState, -1 if the recipe has none
    w_state: int = -1
    g_state: int = -1
    products: Products | None = None  # whose histories live as long as this; None in a graph
    probe: Any = None  # a monitor's, while it samples; None in a graph

    def traced(self, x: Tensor) -> bool:
        """Return whether `x` stands for a tensor of a graph that is being made."""
        return torch.compiler.is_compiling() if self.products else ops.is_traced(x)

    def recomputes(self, x: Tensor) -> bool:
        """Return whether a backward runs the forward of `x` again. What a graph is made in says nothing of its runs."""
        return self.train and not self.traced(x) and in_backward()


_SETTINGS = (
    "str digest, bool turned, str formats, str fp8_recipe, bool fast, str in_bf16, bool train, "
    "ScalarType dtype"
)
_COUNT = Options._fields.index("x_state")  # of Options are these settings


def operator(schema: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Make a function of products one operator in graphs of torch.compile, so that Dynamo does not trace what it does.

    schema: name and arguments of the function but for the last one. That is a list of the Options of its products,
    which differ in their states only.
    """

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(*given: Any) -> Tensor:
            *own, states = given
            first = Options(*own[-_COUNT:])
            triples = zip(states[::3], states[1::3], states[2::3], strict=True)
            options = [first._replace(x_state=x, w_state=w, g_state=g) for x, w, g in triples]
            return function(*own[:-_COUNT], options)

        in_graph = ops.define_composite(f"{schema}, {_SETTINGS}, int[] states) -> Tensor", compute)

        def run(*given: Any) -> Tensor:
            if not torch.compiler.is_compiling():
                return function(*given)
            *own, options = given
            # one by one: in torch 2.8, torch.compile cannot slice a NamedTuple
            states = [each[i] for each in options for i in range(_COUNT, _COUNT + 3)]
            return in_graph(*own, *[options[0][i] for i in range(_COUNT)], states)

        return run

    return decorate


class Products:
    """How the products of a layer are made: formats, the recipe of their scales, and its histories."""

    graphed = False  # launched in a CUDA graph of its block: block_graphs.py
    graph_state: Any = None  # x_state of the layer that cast this layer's last input in eager mode
    probe: Any = None  # a monitor's, while it samples: monitor.py
    last_weight: tuple[Any, Tensor] | None = None  # the weight's last cast: a key, and the scale
    # whether the last call with gradients took FP8; None: none yet, or under torch.compile
    paid: bool | None = None
    # Layers that read this one's input in bfloat16, if it is the first: those that there are copies for, those that
    # were counted since, and how many steps in a row it was alone: narrow.py
    readers, counted, alone = 1, 1, -1

    def __init__(
        self,
        recipe: Recipe,
        layer: str = "",  # its name in the model
        device: torch.device | None = None,  # make histories there now, not at the first cast
        turned: bool = False,  # the weight is [in, out]
        inputs: InputCodes | None = None,  # shared by the layers of a model
        w_state: WeightScale | None = None,  # shared by the layers of one weight
        least_rows: LeastRows | None = None,  # of select="auto"; None: always FP8
        in_bf16: str = "",  # as in Options
    ) -> None:
        self.layer, self.turned = layer, turned
        self.inputs, self.least_rows = inputs or InputCodes(), least_rows
        self.in_bf16 = in_bf16
        self._asked = "tokenwise" if recipe.fp8_recipe == "auto" else recipe.fp8_recipe
        self._format = recipe.fp8_format
        self.fast = bool(recipe.fp8_fast_accum)
        self.fast_groups = recipe.fp8_fast_accum is not False  # of products grouped over experts
        self.x_state: DelayedState | None = None
        self.g_state: DelayedState | None = None
        self.w_state: WeightScale | None = None
        if self._asked == "delayed":
            history = recipe.amax_history_len, recipe.fp8_margin
            latest = recipe.amax_compute_algo == "most_recent"
            self.g_state = DelayedState(*history, latest)
            learns = "wgrad" not in in_bf16  # or gradients may never be cast
            self.x_state = DelayedState(*history, latest, self.g_state if learns else None)
            self.w_state = w_state or WeightScale()
            if device is not None:  # a CUDA graph that is captured later holds their addresses
                for state in (self.x_state, self.g_state, self.w_state):
                    state.on(device)

    @property
    def finished(self) -> bool:
        """Whether all products are in bfloat16 by now: finishing.py."""
        return self.in_bf16 == PRECISIONS["bf16"]

    @property
    def reads_codes_only(self) -> bool:
        """Whether no product reads the weight itself."""
        return not {"forward", "dgrad"}.intersection(self.in_bf16.split())

    @property
    def fp8_recipe(self) -> str:
        """The recipe of scales; where the forward is in bfloat16, of blocks (`precision.py`)."""
        return "blockwise" if "forward" in self.in_bf16 else self._asked

    @property
    def name(self) -> str:
        """The key of FORMATS. Blocks of 128 have no use for the range of E5M2."""
        return "e4m3" if self.fp8_recipe == "blockwise" else self._format

    def options(self, train: bool, dtype: torch.dtype, backward: bool = False) -> Options:
        """Return the settings that forward and backward need; `backward`: there will be one, to x or a weight."""
        # With one state for one input its casts are equal calls, which a graph with a backward merges.
        merged = backward and torch.compiler.is_compiling() and torch.is_grad_enabled()
        x_state = (merged and self.graph_state) or self.x_state
        x, w, g = (-1 if s is None else s.handle for s in (x_state, self.w_state, self.g_state))
        return Options(
            DIGEST, self.turned, self.name, self.fp8_recipe, self.fast, self.in_bf16, train, dtype, x, w, g,
            self, self.probe if train else None,
        )  # fmt: skip

    def pays(self, x: Tensor, rows: int | None = None) -> bool:
        """Return whether `x` [..., in] is multiplied in FP8; `rows`: if those of x are not what counts."""
        paid = pays(x, self.least_rows, self.graphed, rows)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.paid = paid
        return paid

    def __str__(self) -> str:
        return f"{self.name}, {self.fp8_recipe}{f', in bf16: {self.in_bf16}' * bool(self.in_bf16)}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out a monitor's probe, and the last scale: a copy's weight may move to another device."""
        left_out = ("last_weight", "probe")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}


class Operand(NamedTuple):
    """A matrix in FP8, in the layouts that were asked for (the others are empty), padded."""

    codes: Tensor  # [rows, cols]
    scale: Tensor  # float32, 0-d, or one for each block
    codes_t: Tensor  # [cols, rows]
    scale_t: Tensor


def cast_matrix(
    x: Tensor,  # [..., cols], read as [rows, cols]
    fmt: MiniFloat,
    codes: bool = True,
    transposed: bool = True,
    amax: Tensor | None = None,  # as `ops.cast` takes it
    rows_to: int = TOKENS,  # ALIGNMENT for a weight
) -> Operand:
    """Quantize a matrix with a scale from its own amax."""
    if amax is None and ops.is_traced(x) and x.numel():
        amax = x.detach().abs().amax().float()  # here, where Inductor can fuse it
    plain, turned, scale = ops.cast(x, fmt, codes, transposed, amax, rows_to)
    return Operand(plain, scale, turned, scale)


# --- inputs


class InputCodes:
    """The codes of the activation that the layers of one model cast last; copies of a model begin with none."""

    # The mark's id, the key they are valid for, the operand and its history: one tuple, read and written at once.
    last: tuple[int, Any, Operand, DelayedState | None] | None = None

    def __reduce__(self) -> Any:
        return InputCodes, ()


DEFAULT = Products(recipe_for("O0"))
"""Of products that no layer's settings are for; made here, as Dynamo makes no recipe."""


class _Mark:
    """A note of the activation that was cast: when the activation is freed, so are its codes."""

    def __init__(self, inputs: InputCodes) -> None:
        self.inputs = inputs

    def __del__(self) -> None:
        last = self.inputs.last
        if last is not None and last[0] == id(self):
            self.inputs.last = None


def cast_input(x: Tensor, options: Options, transposed: bool) -> Operand:
    """Return the operand of `x` [..., cols]; the last call's if that was for the same tensor."""
    products = options.products
    if products is None or x.is_leaf or not torch.is_grad_enabled():
        # a graph's tensors have no notes, which detached ones lack
        return _cast_x(x if products else x.detach(), options, transposed)
    inputs, key = products.inputs, (options.formats, options.fp8_recipe, options.train)
    mark, last = noted(x, "mark"), inputs.last
    if last is not None and last[0] == id(mark) and last[1] == key:
        operand, products.graph_state = last[2:]
        if operand.codes_t.numel() or not transposed:
            return operand
    inputs.last = last = None  # frees the codes before the next are allocated
    operand = _cast_x(x, options, transposed)
    products.graph_state = products.x_state
    note(x, "mark", mark := _Mark(inputs))
    inputs.last = id(mark), key, operand, products.x_state
    return operand


def _cast_x(x: Tensor, options: Options, transposed: bool) -> Operand:
    fmt, fmt_t, _ = FORMATS[options.formats]
    amax, another = None, transposed and fmt_t is not fmt
    if options.fp8_recipe == "blockwise":
        return Operand(*ops.cast_1x128(x, fmt, True, transposed, squares_t=True))
    if options.fp8_recipe == "rowwise":
        by_row = _by_rows(x, fmt)
        by_column = _by_rows(x, fmt_t, transposed=True) if transposed else by_row
        return _without_t(Operand(*by_row, *by_column), transposed)
    if options.fp8_recipe == "tokenwise":
        codes, scale, parts = ops.cast_rows(x, fmt)
        if not transposed:
            return _without_t(Operand(codes, scale, codes, scale), False)
        return Operand(codes, scale, *cast_matrix(x, fmt_t, False, True, parts)[2:])
    if options.fp8_recipe == "current":
        amax = noted(x, "parts")
        operand = cast_matrix(x, fmt, True, transposed and not another, amax)
    else:
        # Evaluation takes the next cast's scale, and so does its recomputation.
        again = options.recomputes(x)
        learn = options.train and not again
        codes, turned, scale = ops.cast_delayed(x, fmt, options.x_state, learn, again)
        operand = _without_t(Operand(codes, scale, turned, scale), transposed)
    if another:
        return Operand(*operand[:2], *cast_matrix(x, fmt_t, False, True, amax)[2:])
    return operand


def _by_rows(x: Tensor, fmt: MiniFloat, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Return codes and scales of the rows of a matrix [..., cols], or of its transpose."""
    x = x.detach().reshape(-1, x.shape[-1])
    return ops.cast_rows(x.t().contiguous() if transposed else x, fmt)[:2]


def _without_t(operand: Operand, transposed: bool) -> Operand:
    """Leave out the transpose if it is not needed, so that it is not saved for backward."""
    return operand if transposed else operand._replace(codes_t=operand.codes_t.new_empty((0, 0)))


# --- weights


class WeightScale(DelayedState):
    """The scale of a weight's last cast under delayed scaling, which the next cast takes while it fits."""

    def __init__(self) -> None:
        super().__init__(0)
        self.stream: int | None = None  # of the last cast

    def __reduce__(self) -> Any:
        return WeightScale, ()

    def serves(self, weight: Tensor, options: Options) -> bool:
        """Return whether the cast of `weight` that comes now may take the last scale and store a new one."""
        if options.traced(weight) or not options.train:
            return options.train  # in evaluation a weight gets its own scale
        before, self.stream = self.stream, raw_stream(weight)
        # Another stream has not waited for the scale, and a CUDA graph must not start from one that was made before it.
        known = before is None or before == self.stream
        return known and not capturing(weight) and not torch.is_inference_mode_enabled()


def cast_weight(weight: Tensor, options: Options, backward: bool, rows: int) -> Operand:
    """Cast `weight` as it is now, and return the operand [out, in].

    `backward` says that there will be a product for the gradient of the input, which has `rows` rows. The transpose is
    made only if autograd is to keep it for that product (see above); otherwise it is empty.
    """
    if isinstance(weight, FrozenWeight):
        codes, scale = weight.operand(options.turned, options.fp8_recipe == "blockwise")
        return _without_t(Operand(codes, scale, codes, scale), False)
    if backward and not options.traced(weight):
        # In any process group this may be a whole weight that FSDP gathered, of which a rank must keep nothing.
        ranks = torch.distributed
        backward = rows <= FEW_ROWS and not (ranks.is_available() and ranks.is_initialized())
    w, turned, products = weight.detach(), options.turned, options.products
    layouts = not turned or backward, turned or backward
    if options.fp8_recipe == "blockwise":
        blocks = ops.cast_128x128(w, E4M3, *layouts)
        return Operand(*blocks[2:], *blocks[:2]) if turned else Operand(*blocks)
    if options.fp8_recipe == "rowwise":
        by_row = _by_rows(w, E4M3, turned)
        by_column = _by_rows(w, E4M3, not turned) if backward else by_row
        return _without_t(Operand(*by_row, *by_column), backward)
    state: Any = STATES[options.w_state] if options.w_state >= 0 else None  # a WeightScale
    own = isinstance(weight, nn.Parameter) and not weight.is_inference()
    if state is not None and state.serves(weight, options):
        plain, plain_t, scale = ops.recast(w, E4M3, state.handle, *layouts)
    elif products is None or not options.train or not own:
        plain, scale, plain_t, _ = cast_matrix(w, E4M3, *layouts, rows_to=ALIGNMENT)
    else:
        # Versions miss writes through `.data`, so this is a guess: the kernel checks whether the scale is right.
        key, last = (weight.get_device(), *moment(weight)), products.last_weight
        if last is not None and last[0] == key and type(last[1]) is Tensor:
            plain, plain_t, scale = ops.recast_with(w, E4M3, last[1], *layouts, exact=True)
        else:
            plain, plain_t, scale = ops.cast(w, E4M3, *layouts)
        # No scale of a captured cast: it is in the graph's memory, which may be freed before the next capture.
        products.last_weight = None if key[-1] else (key, scale)
    if turned:
        plain, plain_t = plain_t, plain
    return Operand(plain, scale, plain_t, scale)


def weight_for_backward(
    weight: Tensor, codes: Tensor | None, scale: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """Return codes [in, out] and scale of a weight: those that forward saved, or of a new cast if it saved no codes.

    scale: of the cast in forward, None if there was none.
    """
    if codes is not None and scale is not None and codes.numel():
        return codes, scale
    if isinstance(weight, FrozenWeight):
        return weight.operand(not options.turned, options.fp8_recipe == "blockwise")
    w, turned = weight.detach(), options.turned
    if options.fp8_recipe == "blockwise":
        plain, plain_scale, plain_t, scale_t = ops.cast_128x128(w, E4M3, turned, not turned)
        return (plain, plain_scale) if turned else (plain_t, scale_t)
    if options.fp8_recipe == "rowwise":
        return _by_rows(w, E4M3, not turned)
    if scale is None:
        plain, scale, plain_t, _ = cast_matrix(w, E4M3, turned, not turned, rows_to=ALIGNMENT)
    else:
        plain, plain_t, scale = ops.recast_with(w, E4M3, scale, turned, not turned)
    return (plain if turned else plain_t), scale


# --- gradients


def cast_gradient(grad: Tensor, options: Options, x: bool, w: bool, learn: bool) -> Operand:
    """Cast the gradient of a layer's output, [..., cols], for the products of x and w.

    `learn` says whether its history may take the amax. Under "tokenwise" it has one scale, too: E5M2 has range enough,
    and with a scale for each token a trained model's gradients were as far from float32's.
    """
    if options.products is not None:
        options.products.inputs.last = None
    fmt = FORMATS[options.formats].g
    if options.fp8_recipe in ("current", "tokenwise"):
        return cast_matrix(grad, fmt, x, w)
    if options.fp8_recipe == "blockwise":
        return Operand(*ops.cast_1x128(grad, fmt, x or options.probe is not None, w))
    if options.fp8_recipe == "rowwise":
        none = grad.new_empty((0, 0), dtype=fmt.dtype), grad.new_empty(0)
        plain = _by_rows(grad, fmt) if x or options.probe is not None else none
        return Operand(*plain, *(_by_rows(grad, fmt, transposed=True) if w else none))
    learn = learn and options.train
    codes, turned, scale = ops.cast_delayed(grad, fmt, options.g_state, learn, False)
    return Operand(codes, scale, turned, scale)


def runs(ctx: Any, inputs: int, traced: bool) -> tuple[Sequence[bool], bool]:
    """Return for each of a node's first inputs, x and then weights, whether this backward is to make its gradient.

    Others than `ctx.needs_input_grad` says where only a part of the graph runs: `autograd.grad`, and the two halves of
    a zero-bubble schedule's backward. The second result says whether histories may learn from this pass: if it makes
    a weight's gradient, as no pass does that is not training, or if all weights are frozen.
    """
    needs = ctx.needs_input_grad[:inputs]
    if not needs[0] or True not in needs[1:] or traced:
        return needs, True
    edges = ctx.next_functions  # read once: torch makes the tuple anew
    now = [need and _will_run(edges[i][0]) for i, need in enumerate(needs)]
    return now, True in now[1:]


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient `autograd.grad` returns
        return True


def in_backward() -> bool:
    """Is a backward running? Then a forward is a recomputation."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
