"""FP8 Linear layers: numbers against float64, what they save, padding, dtypes, and the layers around them."""

import copy

import pytest
import torch
from helpers import DTYPES, assert_same_bits, every_two
from layers import RECIPE, SwiGLU, linear, make, native, record_sums, results, rounded
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn import functional as F

import fp8stack
from fp8stack.errors import ModelError
from fp8stack.formats import E4M3, E5M2
from fp8stack.levels import recipe_for
from fp8stack.nn import Bf16Linear, Fp8Linear, StoredEmbedding, StoredLinear
from fp8stack.nn.casts import Products
from fp8stack.nn.mlp import fuse


@pytest.mark.parametrize("fast", [None, False, True])
@pytest.mark.parametrize(
    ("kind", "recipe", "products"), [("layer", "current", 1), ("layer", "delayed", 1), ("fused", "current", 3)]
)  # fmt: skip
def test_forward_products_alone_may_be_summed_fast(kind, recipe, products, fast, monkeypatch):
    model = make(kind, recipe=recipe, fp8_fast_accum=fast)
    told = record_sums(monkeypatch)
    results(model, torch.randn(16, 32))
    assert told == products * [bool(fast)] + 2 * products * [False]


@pytest.mark.gpu
def test_fast_sums_are_coarser_and_precise_ones_are_the_default():
    """Many terms of one sign: a sum of 14 bits loses the small ones."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper's tensor cores keep fewer bits")
    x = torch.rand(256, 16_384, device="cuda")
    errors = {}
    for fast in (None, False, True):
        layer = linear(16_384, 256, False, "cuda", fp8_fast_accum=fast)
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0, 1, layer.weight.numel()).view_as(layer.weight))
            exact = rounded(x, E4M3) @ rounded(layer.weight, E4M3).T
            errors[fast] = ((layer(x).double().cpu() - exact).norm() / exact.norm()).item()
    assert errors[None] == errors[False] < errors[True] / 2, errors


PRODUCTS = [  # dtype, sizes
    *((dtype, (80, 96, 48)) for dtype in DTYPES.values()),
    *((torch.float32, (13, *size)) for size in ((32, 257), (33, 64), (50, 257), (7, 5))),
    *((torch.float32, (tokens, 32, 64)) for tokens in (1, 15, 16, 17)),
]


@every_two(
    2, fmt=["hybrid", "e4m3"], recipe=["current", "delayed"], of=PRODUCTS, bias=[True, False]
)
def test_products_are_those_of_the_rounded_operands(fmt, recipe, of, bias, device):
    """FP8 rounding is the only error: everything after it agrees with float64 to the rounding of the output."""
    dtype, (tokens, k, n) = of
    layer = linear(k, n, bias, device, fp8_format=fmt, fp8_recipe=recipe).to(dtype)
    x, gradient = (torch.randn(tokens, size, device=device).to(dtype) for size in (k, n))
    x8, w8 = rounded(x, E4M3), rounded(layer.weight, E4M3)
    g8 = rounded(gradient, E5M2 if fmt == "hybrid" else E4M3)
    exact = [x8 @ w8.T, g8 @ w8, g8.T @ x8]
    if bias:
        exact[0] += layer.bias.detach().double().cpu()
        exact.append(gradient.double().cpu().sum(0))
    # a product keeps the output dtype's rounding; within 128 terms Hopper's sums keep 2^-13 of the largest
    step = max(torch.finfo(dtype).eps, 2**-12 if device == "cuda" else 0)
    for value, expected in zip(results(layer, x, gradient), exact, strict=True):
        assert value.dtype is dtype
        assert value.shape == expected.shape
        assert (value.double().cpu() - expected).abs().max() <= 8 * step * expected.abs().max()


@RECIPE
def test_one_dimensional_and_non_contiguous_inputs(recipe, device):
    layer = linear(32, 64, device=device, fp8_recipe=recipe).eval()
    x = torch.randn(32, 20, device=device)
    assert_same_bits(layer(x.t()), layer(x.t().contiguous()))
    assert layer(x[:, 0]).shape == (64,)


def test_zeros_and_tiny_values():
    layer = linear(bias=False)
    assert (layer(torch.zeros(16, 32)) == 0).all()
    x = torch.randn(16, 32)
    assert_same_bits(
        layer(x * 2.0**-100) * 2.0**100, layer(x)
    )  # a scale per tensor: no range to fall out of


@pytest.mark.parametrize(
    ("kind", "limit"), [(Fp8Linear, 0.06), (Bf16Linear, 0.01), (StoredLinear, 1e-6)]
)
def test_the_output_has_the_dtype_of_the_input_or_of_autocast(kind, limit, device):
    layer = nn.Linear(32, 32, device=device)
    layer.weight.data = layer.weight.data.bfloat16()
    layer.__class__ = kind
    layer.products = Products(recipe_for("O0"))
    x = torch.randn(16, 32, device=device)
    assert layer(x).dtype is torch.float32
    with torch.autocast(device, torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
    y = layer(x)
    y.sum().backward()
    assert layer.weight.grad.dtype is torch.bfloat16
    expected = F.linear(x, layer.weight.float(), layer.bias)
    assert (y - expected).norm() < limit * expected.norm()


def test_a_stored_embedding_looks_up_and_sums_gradients_in_float32(device):
    embedding = nn.Embedding(8, 16, padding_idx=0, device=device)
    embedding.weight.data = embedding.weight.data.bfloat16()
    embedding.__class__, embedding.output_dtype = StoredEmbedding, torch.float32
    index = torch.tensor([[1, 2, 0] + [3] * 1000], device=device)
    out = embedding(index)
    assert out.dtype is torch.float32
    assert_same_bits(out[0, 1], embedding.weight[2].float())
    out.sum().backward()
    gradient = embedding.weight.grad
    assert gradient.dtype is torch.bfloat16
    assert (gradient[0] == 0).all()
    assert (gradient[3] == 1000).all()  # in bfloat16, a sum of ones stops at 256
    embedding.scale_grad_by_freq, embedding.weight.grad = True, None
    embedding(index).sum().backward()
    assert embedding.weight.grad[:4, 0].tolist() == [0, 1, 1, 1]


@RECIPE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_sets_the_dtype_of_outputs_and_gradients_keep_theirs(recipe, dtype, device):
    layer, x = linear(fp8_recipe=recipe, device=device), torch.randn(2, 16, 32, device=device)
    with torch.autocast(device, dtype):
        y, *gradients = results(layer, x)
    assert y.dtype is dtype
    assert {g.dtype for g in gradients} == {torch.float32}


@RECIPE
def test_a_gradient_that_is_expanded_or_transposed_is_read_in_its_own_order(recipe, device):
    layer = linear(32, 48, False, device, fp8_recipe=recipe)
    x = torch.randn(48, 32, device=device)
    one, turned = torch.ones((), device=device), torch.randn(48, 48, device=device).t()
    for gradient in (one.expand(48, 48), turned):
        given = []
        for same in (gradient, gradient.contiguous()):
            if recipe == "delayed":  # else the second pass has the scale of the first
                layer.products.g_state.tensor = layer.products.x_state.tensor = None
            given.append(results(layer, x, same))
        assert_same_bits(*given)


def test_prints_its_format_and_recipe():
    assert "fp8=hybrid, delayed" in repr(linear(fp8_recipe="delayed"))
    assert "fp8=e4m3" in repr(linear(fp8_format="e4m3"))


# --- inputs that are refused


@pytest.mark.parametrize("compute", ["native", "bf16"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool, torch.float64])
def test_an_input_of_another_dtype_is_an_error_that_names_the_layer(dtype, compute):
    model = nn.ModuleDict({"up": nn.Linear(32, 32)})
    fp8stack.initialize(model, None, "O0", compute=compute)
    said = rf"Linear layer up of 32 features got {dtype} input; .*float16.*skip=\[.up.\]"
    for layer in (model["up"], copy.deepcopy(model)["up"]):
        with pytest.raises(ModelError, match=said):
            layer(torch.ones(16, 32).to(dtype))
        with pytest.raises(ModelError, match=r"layer up got .* shape \(4, 31\); .* must be 32"):
            layer(torch.ones(4, 31))


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(2, 32)], layout=layout)


REFUSED = {
    "jagged": (lambda: nested(torch.jagged), r"layer 0 got nested input; .*dense.*skip=\[.0.\]"),
    "nested": (lambda: nested(torch.strided), "got nested input"),
    "sparse": (lambda: torch.randn(4, 32).to_sparse(), "got sparse input"),
    "csr": (lambda: torch.randn(4, 32).to_sparse_csr(), "got sparse input"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(("make", "said"), REFUSED.values(), ids=REFUSED)
def test_an_input_that_is_no_plain_tensor_is_an_error_that_names_the_layer(make, said):
    with pytest.raises(ModelError, match=said):
        native(nn.Sequential(nn.Linear(32, 32)))(make())


def test_tensor_parallelism_is_refused_with_what_helps(mesh):
    x = distribute_tensor(torch.randn(16, 32), mesh, [Replicate()])
    with pytest.raises(ModelError, match=r"layer 0 got sharded \(DTensor\).*skip=\[.0.\]"):
        native(nn.Sequential(nn.Linear(32, 32)))(x)
    model = native(SwiGLU())
    assert fuse(model) == [""]
    with pytest.raises(ModelError, match="layer w1 got sharded"):
        model(x)


@pytest.mark.parametrize("shape", [(64, 32), (4, 32), (2, 3, 32)], ids=str)
def test_what_follows_may_change_the_result_in_place(shape, device):
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(inplace=True), nn.Linear(48, 32)).to(device)
    x = torch.randn(shape, device=device)
    expected = native(
        nn.Sequential(copy.deepcopy(model[0]), nn.ReLU(), copy.deepcopy(model[2])), device
    )(x)
    assert_same_bits(native(model, device)(x), expected)
    torch._dynamo.reset()
    assert_same_bits(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
