"""Native layers under torch.compile and in CUDA graphs: the bits of eager mode."""

import copy

import pytest
import torch
import torch._dynamo.testing
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from helpers import assert_same_bits
from layers import (
    QKV,
    RECIPE,
    RECIPES,
    SelfAttention,
    SwiGLU,
    fused,
    linear,
    native,
    results,
    scale_parameters,
)
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import fp8stack
from fp8stack.nn import fuse, load_scaling_state, scaling_state


class Behind(QKV):
    """Whose layers read no leaf, which eager layers cast one by one."""

    def forward(self, x):
        return super().forward(x * 1)


class Mixed(QKV):
    """Queries of one tensor, keys and values of another, as in cross-attention."""

    def forward(self, x, other):
        return self.q(x) + self.k(other) * self.v(other)


def both(make, shape, device, backend="aot_eager", rounds=2, dtype=None):
    """Return what a model and a compiled one like it give: outputs and all gradients of two passes."""
    given = []
    # of another model, since a forward changes delayed scales
    like = make()(torch.randn(shape, device=device, dtype=dtype)).detach()
    for compiled in (False, True):
        torch.manual_seed(2)
        model = make()
        function = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        found = []
        for i in range(rounds):
            x = torch.randn(shape, device=device, dtype=dtype) * 3.0**i
            found += results(function, x, torch.randn_like(like))
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        given.append(found)
    return given


COMPILED = {
    "bias": lambda device, **options: linear(48, 32, True, device, **options),
    "padded": lambda device, **options: linear(48, 257, False, device, **options),
    "shared input": lambda device, **options: native(QKV(48), device, **options),
    "attention": lambda device, **options: native(SelfAttention(48), device, **options),
    "fused": lambda device, **options: fused(SwiGLU(48, 80), device, **options),
    "fused, biases": lambda device, **options: fused(
        nn.Sequential(nn.Linear(48, 80), nn.GELU(), nn.Linear(80, 48)), device, **options
    ),
}


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [(k, r) for k in COMPILED for r in RECIPES if "fused" not in k or r != "blockwise"],
)
def test_compiled_layers_give_the_bits_of_eager_ones(kind, recipe, device):
    assert_same_bits(*both(lambda: COMPILED[kind](device, fp8_recipe=recipe), (3, 7, 48), device))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_other_formats_and_dtypes(fmt, dtype, device):
    def make():
        return linear(32, 48, device=device, fp8_format=fmt).to(dtype)

    assert_same_bits(*both(make, (20, 32), device, dtype=dtype))


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()


@RECIPE
def test_autocast_changes_no_bit_but_the_dtype(recipe, device):
    """On a CPU, too, whose products are made of others."""
    layer = linear(64, 48, False, device, fp8_recipe=recipe).eval()
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(40, 64, device=device)
    exact = layer(x)
    with torch.autocast(device, torch.bfloat16):
        y, z = layer(x), compiled(x)
    assert y.dtype == torch.bfloat16
    assert_same_bits(z, y)
    if device == "cpu":  # cuBLAS may add up in another order
        assert_same_bits(y, exact.bfloat16())


def merging(compiler=lambda graph, _: make_boxed_func(graph)):
    """Return a backend that removes what is computed twice, as Inductor does."""
    partition = min_cut_rematerialization_partition
    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)


def casts_in_graphs(model, *given, backward=True):
    """Return how many casts the graphs of a model have."""
    torch._dynamo.reset()
    casts = []

    def count(graph, _):
        names = "fp8stack.cast", "fp8stack.recast"
        casts.extend(n for n in graph.graph.nodes if str(n.target).startswith(names))
        return make_boxed_func(graph)

    y = torch.compile(model, fullgraph=True, backend=merging(count))(*given)
    if backward:
        y.sum().backward()
    return len(casts)


def rows(grad=True):
    return torch.randn(20, 32, requires_grad=grad)


@pytest.mark.parametrize(("recipe", "warm"), [("current", 0), ("delayed", 0), ("delayed", 1)])
def test_an_input_that_layers_share_is_cast_once_in_a_graph(recipe, warm):
    """With histories of their own, delayed scales are each layer's; after an eager pass they share one."""
    model = native(QKV(), fp8_recipe=recipe)
    for _ in range(warm):
        model(rows() * 1)  # a leaf would be cast by each
        model = copy.deepcopy(model)  # which shares a history of its own
    inputs = 3 if recipe == "delayed" and not warm else 1
    assert casts_in_graphs(model, rows()) == inputs + 3 + 3  # and weights, gradients


def test_a_history_is_shared_as_long_as_the_input_is():
    model = native(Mixed(), fp8_recipe="delayed")
    model(rows() * 1, rows() * 1)
    assert casts_in_graphs(model, rows(), rows()) == 2 + 3 + 3, "keys and values"
    model(x := rows() * 1, x)
    x = rows()
    assert casts_in_graphs(model, x, x) == 1 + 3 + 3
    model(rows() * 1, rows() * 1)
    assert casts_in_graphs(model, rows(), rows()) == 2 + 3 + 3


@pytest.mark.parametrize("frozen", [False, True])
def test_graphs_without_a_backward_take_each_layer_s_own_history(frozen):
    """Nothing removes equal calls there: a shared history would take each amax three times."""
    model = native(QKV(), fp8_recipe="delayed")
    model(rows() * 1).sum().backward()  # histories begin here
    model(rows() * 1)
    model.requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen):
        assert casts_in_graphs(model, rows(grad=False), backward=False) == 3 + 3
    assert [layer.products.x_state.casts for layer in (model.q, model.k, model.v)] == [2, 1, 1]


@pytest.mark.parametrize("size", [1, 30])
def test_layers_that_share_a_history_give_the_bits_of_eager_ones(size, device):
    def make():
        model = native(Behind(), device, fp8_recipe="delayed")
        torch.manual_seed(4)
        model(torch.randn(20, 32, device=device, requires_grad=True) * size)
        return model

    assert_same_bits(*both(make, (20, 32), device, merging(), rounds=3))


def test_a_fused_norm_is_compiled_as_its_own_class_s_forward(device):
    model = native(nn.Sequential(nn.RMSNorm(32, 1e-5), nn.Linear(32, 48)), device)
    plain, x = copy.deepcopy(model), torch.randn(3, 16, 32, device=device)
    assert fuse(model) == ["0"]
    compiled = (torch.compile(m, fullgraph=True, backend="aot_eager") for m in (model, plain))
    assert_same_bits(*(results(m, x) for m in compiled))


def test_a_fused_block_whose_input_has_its_name(device):
    model = fused(SwiGLU(48, 80), device)[0]
    x = torch.randn(20, 48, device=device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x=x), model(x=x.clone()))


def test_compiled_weights_keep_their_scales_as_those_of_eager_mode_do(device):
    """And with them: what the one learned, the other takes over."""
    ours = linear(32, 48, device=device, fp8_recipe="delayed")
    theirs = copy.deepcopy(ours)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    scales = []
    for factor, run in (
        (1.0, ours), (0.8, compiled), (0.8, compiled), (1.1, ours), (0.6, compiled), (0.9, ours), (1.3, compiled),
    ):  # fmt: skip
        scale_parameters(factor, ours, theirs)
        x = torch.randn(20, 32, device=device)
        assert_same_bits(results(run, x), results(theirs, x))
        state, expected = (layer.products.w_state.tensor for layer in (ours, theirs))
        assert_same_bits(state[0], expected[0])
        scales.append(float(state[0]))
    # to 0.8, 0.64, 0.7, then 0.42, less than half; to 0.38, then 0.49, which outgrew that scale
    assert scales == [scales[0]] * 4 + [scales[4]] * 2 + [scales[6]]
    assert scales[4] < scales[6] < 0.5 * scales[0]


@pytest.mark.gpu
def test_graphs_of_inductor_keep_scales_in_memory_of_their_own():
    """With CUDA graphs, whose replays know addresses only; and scales that are loaded reach them."""
    layers = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    ours = native(layers, "cuda", fp8_recipe="delayed")
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):  # copies have made no histories yet
        torch.manual_seed(1)
        results(model, torch.randn(32, 64, device="cuda"))
    run = torch.compile(ours, mode="reduce-overhead", fullgraph=True)
    held = []
    for step in range(8):
        x = torch.randn(32, 64, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        one = [t.clone() for t in results(run, x)]
        for given, same in zip(one, results(theirs, x), strict=True):
            error = (given - same).norm()
            assert error <= 0.01 * same.norm(), f"step {step}"  # cuBLAS may add up in another order
        assert scaling_state(ours).keys() == scaling_state(theirs).keys()
        for key, value in scaling_state(theirs).items():
            if not key.endswith(".casts"):  # replays are not counted
                torch.testing.assert_close(scaling_state(ours)[key], value, rtol=1e-2, atol=0)
        held += [torch.full((64,), 7.0, device="cuda") for _ in range(200)]  # what is free is taken
        scale_parameters(0.9, ours, theirs)
        if step == 4:
            for model in (ours, theirs):
                load_scaling_state(model, {k: v.clone() for k, v in scaling_state(theirs).items()})
    assert all(bool((h == 7).all()) for h in held)


def test_compiled_weights_have_their_own_scales_in_evaluation(device):
    layer = linear(32, 48, device=device, fp8_recipe="delayed")
    x = torch.randn(20, 32, device=device)
    results(layer, x)
    before = layer.products.w_state.tensor.clone()
    scale_parameters(0.9, layer.eval())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = copy.deepcopy(layer)
    load_scaling_state(expected, {**scaling_state(layer), ".w": torch.zeros(())})
    assert_same_bits(compiled(x), expected(x))
    assert_same_bits(layer.products.w_state.tensor, before)


def test_dynamic_shapes_do_not_compile_for_each(device):
    model = linear(32, 48, device=device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (16, 17, 33, 64, 40):
        x = torch.randn(tokens, 32, device=device)
        assert_same_bits(compiled(x), model(x.clone()))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_micro_batches_and_evaluation_compile_once_each(recipe, device):
    """A graph for training and one for evaluation; not one for each step, or for a gradient that is there already."""
    torch.manual_seed(0)
    model = nn.Sequential(SwiGLU(48, 80), nn.LayerNorm(48), nn.Linear(48, 16)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"fp8_recipe": recipe, "min_numel": 1, "select": "all"}
    model, optimizer = fp8stack.initialize(model, optimizer, "O2", **options)
    fuse(model)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    x = torch.randn(20, 48, device=device)
    model(x).sum().backward()
    optimizer.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(3):
        for _ in range(2):
            compiled.train()(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            compiled.eval()(x)
        optimizer.zero_grad()
    assert counter.frame_count == 2


def test_all_codes_of_a_graph_are_written_by_our_operators(device):
    """Triton 3.8 writes FP8 values wrongly where Inductor makes a kernel of a search for the largest and a transposed
    store (triton-lang/triton#11111), so none may be left to Inductor."""
    made = []

    def note(graph, _):
        for node in graph.graph.nodes:
            values = node.meta.get("val")
            values = values if isinstance(values, (list, tuple)) else [values]
            fp8 = any("float8" in str(getattr(v, "dtype", "")) for v in values)
            if fp8 and node.op == "call_function":
                made.append(str(node.target))
        return make_boxed_func(graph.forward)

    model = fused(SwiGLU(48, 80), device)[0]
    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    results(compiled, torch.randn(20, 48, device=device, dtype=torch.bfloat16))
    moved = {
        "<built-in function getitem>", "aten.t.default", "aten.view.default", "aten.permute.default",
    }  # fmt: skip
    assert {name for name in made if name not in moved} == {
        "fp8stack.cast.default", "fp8stack.activation_cast.default", "fp8stack.activation_backward_cast.default"
    }  # fmt: skip


@pytest.mark.parametrize("compute", ["native", "bf16"])
def test_blocks_compiled_one_by_one_share_a_graph(compute, device):
    """Whatever their names are."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(6)))
    model = native(layers, device, compute=compute)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(fullgraph=True, backend=counter)
    model(torch.randn(16, 32, device=device, requires_grad=True)).sum().backward()
    assert counter.frame_count == 1


def test_evaluation_and_no_grad_compile(device):
    model = linear(32, 48, device=device).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(20, 32, device=device)
    with torch.no_grad():
        assert_same_bits(compiled(x), model(x.clone()))
        model.weight.data.copy_(torch.randn_like(model.weight))  # as a moving average is
        assert_same_bits(compiled(x), model(x.clone()))


@pytest.mark.gpu
@RECIPE
def test_inductor_gives_results_within_its_own_rounding(recipe):
    """It joins casts to what makes a tensor, in float32 where eager mode rounds: codes next to a tie may differ."""

    def make():
        parts = (linear(256, 512, device="cuda", fp8_recipe=recipe), nn.GELU())
        return nn.Sequential(*parts, linear(512, 256, device="cuda", fp8_recipe=recipe))

    for one, other in zip(*both(make, (300, 256), "cuda", "inductor"), strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


@pytest.mark.gpu
def test_graphed_callables():
    model = native(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), "cuda")
    other = copy.deepcopy(model)
    sample = torch.randn(32, 64, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    for factor in (1.0, 4.0):
        x = torch.randn(32, 64, device="cuda") * factor
        assert_same_bits([t.clone() for t in results(graphed, x)], results(other, x))
        scale_parameters(0.5, model, other)


def test_a_model_is_compiled_again_while_it_has_fp8_gradients():
    """Micro-batches of other sizes."""
    model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fp8stack.initialize(model, optimizer, "O2")
    compiled = torch.compile(model, backend="aot_eager")
    for rows in (32, 48):
        compiled(torch.randn(rows, 128)).square().mean().backward()
    assert isinstance(model[0].weight.grad, fp8stack.BlockScaledTensor)
    optimizer.step()
