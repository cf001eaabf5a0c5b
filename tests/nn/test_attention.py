"""nn.MultiheadAttention, and torch's encoder and decoder layers: FP8 in training, torch's own fast path in evaluation.

The oracle is torch's function itself, in which `F.linear` is the FP8 product of its operands.
"""

import copy
import functools
import itertools

import pytest
import torch
from helpers import NAN, assert_same_bits, train_clipped
from layers import RECIPE, SelfAttention, count_casts, native, results, rounded
from torch import nn
from torch.nn import functional as F

import fp8stack
from fp8stack.comm.fsdp import _weights
from fp8stack.errors import ModelError
from fp8stack.formats import E4M3
from fp8stack.levels import recipe_for
from fp8stack.monitor import Monitor
from fp8stack.nn import convert, load_scaling_state, scaling_state, select
from fp8stack.nn.attention import Bf16Attention, Fp8Attention
from fp8stack.nn.bf16_storage import StoredLayer
from fp8stack.nn.casts import Products
from fp8stack.nn.linear import Fp8Layer, fp8_matmul
from fp8stack.nn.select import LeastRows
from fp8stack.planning.resident_memory import Precision, resident

WIDTH, HEADS, LENGTH, SOURCE = 32, 4, 10, 7


def fp8_linear(recipe, x, weight, bias=None):
    """Return F.linear in FP8, with histories that begin here."""
    products = Products(recipe_for("O0", None, fp8_recipe=recipe))
    return fp8_matmul(x.contiguous(), weight, bias, products, True)


def attentions(device="cpu", bias=True, **options):
    """Return torch's attention, and one like it in FP8."""
    plain = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, **options).to(device)
    if bias:
        nn.init.normal_(plain.in_proj_bias)
        nn.init.normal_(plain.out_proj.bias)
    return plain, native(nn.Sequential(copy.deepcopy(plain)), device)[0]


def passed(module, inputs, **named):
    """Return output, attention weights and all gradients of a pass in training, and forget these."""
    tensors = [*{id(x): x for x in inputs}.values(), *module.parameters()]
    torch.manual_seed(1)
    y, weights = module(*inputs, **named)
    slope = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
    gradients = torch.autograd.grad((y * slope).sum(), tensors)
    return [y.detach(), *([] if weights is None else [weights.detach()])], list(gradients)


def with_batch_of_one(plain, inputs, key_padding_mask=None, **named):
    """Call torch's attention, which unbatched input makes forget that two inputs are one tensor."""
    one = {id(x): x.unsqueeze(1) for x in inputs}
    padding = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    y, weights = plain(*(one[id(x)] for x in inputs), key_padding_mask=padding, **named)
    return y.squeeze(1), None if weights is None else weights.squeeze(0)


class WithBatchOfOne(nn.Module):
    def __init__(self, plain):
        super().__init__()
        self.plain = plain

    def forward(self, *inputs, **named):
        return with_batch_of_one(self.plain, inputs, **named)


def draw(inputs, layout, widths=(WIDTH, WIDTH), device="cpu"):
    """Return query, key and value, of which some are one tensor."""

    def one(length, width):
        shape = {"seq": (length, 3), "batch": (3, length), "unbatched": (length,)}[layout]
        return torch.randn(*shape, width, device=device, requires_grad=True)

    q = one(LENGTH, WIDTH)
    if inputs == "self":
        return q, q, q
    if inputs == "query is value":
        return q, one(LENGTH, WIDTH), q
    k = one(SOURCE, widths[0])
    return q, k, k if inputs == "key is value" else one(SOURCE, widths[1])


def masks(name, shape, device="cpu"):
    """Return a mask that leaves something of each row, or None."""
    if name == "bool":
        mask = torch.rand(shape, device=device) > 0.7
        mask[..., 0] = False
        return mask
    return torch.randn(shape, device=device) if name == "float" else None


INPUTS = ("self", "key is value", "query is value", "three")
LAYOUTS = ("seq", "batch", "unbatched")


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_form_of_arguments_has_the_bits_of_torchs_function(
    layout, inputs, device, monkeypatch
):
    """Half of all forms, in which every combination of all arguments but one is there."""
    forms = itertools.product(
        *map(enumerate, (("", "bool", "float"), (2, 3), ("", "bool", "float"), (False, True), (False, True)))
    )  # fmt: skip
    own = INPUTS.index(inputs) + LAYOUTS.index(layout)
    for number, form in enumerate(forms):
        if (sum(i for i, _ in form) + own) % 2:
            continue
        kind, dims, padding, needed, average = (value for _, value in form)
        source = LENGTH if inputs in ("self", "query is value") else SOURCE
        n = 1 if layout == "unbatched" else 3
        apart = number % 3 == 1 and inputs in ("key is value", "three")
        widths = (48, 48 if inputs == "key is value" else 40) if apart else (WIDTH, WIDTH)
        sizes = dict(zip(("kdim", "vdim"), widths, strict=True)) if apart else {}
        dropout = 0.3 * (number % 2)
        plain, ours = attentions(
            device, number % 5 > 0, dropout=dropout, batch_first=layout == "batch", **sizes
        )
        given = draw(inputs, layout, widths, device)
        padded = (source,) if layout == "unbatched" else (n, source)
        masked = (LENGTH, source) if dims == 2 else (n * HEADS, LENGTH, source)
        named = {
            "attn_mask": masks(kind, masked, device), "key_padding_mask": masks(padding, padded, device),
            "need_weights": needed, "average_attn_weights": average, "is_causal": kind != "" and number % 7 == 0,
        }  # fmt: skip
        found, gradients = passed(ours, given, **named)
        with monkeypatch.context() as patch:
            patch.setattr(F, "linear", functools.partial(fp8_linear, "current"))
            theirs = WithBatchOfOne(plain) if layout == "unbatched" else plain
            expected, wanted = passed(theirs, given, **named)
        what = f"{number}: {kind} {dims} {padding} {needed} {average} {sizes} {dropout}"
        if layout == "seq":
            assert_same_bits(found + gradients, expected + wanted, what)
            continue
        # Tensors are laid out otherwise than in torch: sums have other last bits, and a code of FP8 may be the next.
        for a, b in zip(found + gradients, expected + wanted, strict=True):
            assert (a - b).norm() <= 1e-2 * b.norm(), what
        if layout == "unbatched" or dropout == 0 or needed:
            assert_same_bits(found, expected, what)


def test_values_are_those_of_float64_on_operands_that_are_rounded(device):
    plain, ours = attentions(device)
    x = torch.randn(LENGTH, 3, WIDTH, device=device)
    mask = masks("bool", (LENGTH, LENGTH))
    y, weights = ours(x, x, x, attn_mask=mask.to(device))
    exact = copy.deepcopy(plain).cpu().double()
    with torch.no_grad():
        exact.in_proj_weight.copy_(rounded(plain.in_proj_weight, E4M3))
        exact.out_proj.weight.copy_(torch.eye(WIDTH))
        exact.out_proj.bias.zero_()
        z, expected = exact(*[rounded(x, E4M3)] * 3, attn_mask=mask)
        product = rounded(z, E4M3) @ rounded(plain.out_proj.weight, E4M3).T
        product += plain.out_proj.bias.double().cpu()
    # Hopper's tensor cores keep about 14 bits of a partial sum.
    bounds = {"rtol": 2**-10, "atol": 2**-14} if y.is_cuda else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(weights.cpu().double(), expected, **bounds)
    assert (y.cpu() - product).norm() < 1e-3 * product.norm()  # a code may be the next


@RECIPE
@pytest.mark.parametrize("inputs", INPUTS)
def test_all_recipes_have_the_bits_of_torchs_function(inputs, recipe, device, monkeypatch):
    plain = nn.MultiheadAttention(WIDTH, HEADS).to(device)
    ours = native(nn.Sequential(copy.deepcopy(plain)), device, fp8_recipe=recipe)[0]
    given = draw(inputs, "seq", device=device)
    found = passed(ours, given, need_weights=False)
    monkeypatch.setattr(F, "linear", functools.partial(fp8_linear, recipe))
    assert_same_bits(found, passed(plain, given, need_weights=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("needed", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_autocast_has_the_bits_and_dtypes_of_torchs_function(
    kind, needed, dtype, device, monkeypatch
):
    plain, ours = attentions(device)
    given = draw("self", "seq", device=device)
    named = {"need_weights": needed, "attn_mask": masks(kind, (LENGTH, LENGTH), device)}
    with torch.autocast(device, dtype):
        found = passed(ours, given, **named)
        monkeypatch.setattr(F, "linear", functools.partial(fp8_linear, "current"))
        expected = passed(plain, given, **named)
    assert found[0][0].dtype is dtype
    assert_same_bits(found, expected)


@pytest.mark.parametrize("needed", [False, True])
def test_what_is_not_finite_is_so_where_torch_has_it(needed, device, monkeypatch):
    """A query without a key, a mask of -inf alone, an infinite and a NaN input."""
    plain, ours = attentions(device)
    x = torch.randn(LENGTH, 3, WIDTH, device=device)
    masked = torch.zeros(LENGTH, LENGTH, dtype=torch.bool, device=device)
    masked[2] = True
    infinite = torch.zeros(LENGTH, LENGTH, device=device).masked_fill(masked, -torch.inf)
    inputs = [(x, masked), (x, infinite)]
    for value in (torch.inf, NAN):
        bad = x.clone()
        bad[0, 0, 0] = value
        inputs.append((bad, None))
    found = [ours(x, x, x, attn_mask=m, need_weights=needed) for x, m in inputs]
    assert not found[-1][0].isfinite().any()
    monkeypatch.setattr(F, "linear", functools.partial(fp8_linear, "current"))
    expected = [plain(x, x, x, attn_mask=m, need_weights=needed) for x, m in inputs]
    for (y, w), (z, v) in zip(found, expected, strict=True):
        assert_same_bits([y, *[w] * needed], [z, *[v] * needed])


def test_products_in_bfloat16_have_the_bits_of_torchs_function(device, monkeypatch):
    plain = nn.MultiheadAttention(WIDTH, HEADS).to(device)
    model, _ = fp8stack.initialize(nn.Sequential(copy.deepcopy(plain)), None, "O0", compute="bf16")
    assert isinstance(model[0], Bf16Attention)
    assert fp8stack.get_report(model).converted == ["0", "0.out_proj"]
    given = draw("key is value", "seq", device=device)
    found = passed(model[0], given)
    multiply = F.linear
    product = lambda x, w, b: multiply(x.bfloat16(), w.bfloat16()).float() + b  # noqa: E731
    monkeypatch.setattr(F, "linear", product)
    assert_same_bits(found, passed(plain, given))


def test_an_input_is_cast_once_for_all_that_read_it(monkeypatch, device):
    plain = nn.MultiheadAttention(WIDTH, HEADS, kdim=48, vdim=48)
    packed, apart = (
        native(nn.Sequential(m), device)[0] for m in (SelfAttention().attention, plain)
    )
    x = torch.randn(5, 16, WIDTH, device=device, requires_grad=True) * 1  # no leaf
    y = torch.randn(16, 5, 48, device=device, requires_grad=True) * 1
    seen = count_casts(monkeypatch)
    packed(x, x, x)
    assert sorted(seen) == sorted([x.shape, (3 * WIDTH, WIDTH), x.shape, (WIDTH, WIDTH)])
    assert packed.in_products[0].last_weight  # the next cast of the parameter knows its scale
    seen.clear()
    apart(x.transpose(0, 1).contiguous(), y, y)
    assert seen.count(tuple(y.shape)) == 1


@pytest.mark.parametrize("options", [{"need_weights": True}, {"need_weights": False}], ids=str)
def test_compiled_with_masks_it_has_the_eager_bits(options, device):
    _, ours = attentions(device, batch_first=True)
    given = draw("key is value", "batch", device=device)
    named = {"attn_mask": masks("bool", (LENGTH, SOURCE), device), **options}
    expected = passed(ours, given, **named)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_same_bits(passed(compiled, given, **named), expected)


WRONG = {
    "batches": (lambda x: (x, x[:, :1], x[:, :1]), {}, r"attention 0 got inputs of .*share N"),
    "sources": (lambda x: (x, x, x[:5]), {}, "key and value share S"),
    "no mask": (lambda x: (x, x, x), {"is_causal": True}, "tells of a mask: pass that as attn_mask"),
    "mask": (lambda x: (x, x, x), {"attn_mask": torch.zeros(1, LENGTH)}, r"mask of \(1, 10\); it is \(10, 10\) or"),
    "padding": (lambda x: (x, x, x), {"key_padding_mask": torch.zeros(3, 1)}, r"mask of \(3, 1\); it is \(3, 10\) or"),
    "features": (lambda x: [x[..., :8]] * 3, {}, r"layer 0 got .*last dimension must be 32"),
}  # fmt: skip


@pytest.mark.parametrize(("inputs", "named", "said"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_errors_that_name_the_module(inputs, named, said):
    _, ours = attentions()
    with pytest.raises(ModelError, match="(?i)" + said):
        ours(*inputs(torch.randn(LENGTH, 3, WIDTH)), **named)


# --- evaluation


def encoder(layers=2, norm_first=False, **options):
    """Return torch's encoder, of sizes that O2 converts."""
    layer = nn.TransformerEncoderLayer(
        64, 4, 256, dropout=0.0, batch_first=True, norm_first=norm_first, **options
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=not norm_first)


def count(monkeypatch, name):
    """Return a list that grows with each call of a function of torch."""
    calls, own = [], getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda *args: calls.append(name) or own(*args))
    return calls


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("hooked", [False, True], ids=["encoder", "attention"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"compute": "bf16"}, {"matmuls": True}], ids=str)
def test_the_fast_paths_of_evaluation_give_torchs_bits(
    options, padded, hooked, device, monkeypatch
):
    """A hook on a layer keeps torch from the one of its encoder layer; nested input still comes to the layers."""
    plain = encoder(norm_first=False).to(device)
    model = copy.deepcopy(plain)
    _, optimizer = fp8stack.initialize(
        model, torch.optim.AdamW(model.parameters()), "O2", **options
    )
    x = torch.randn(3, 12, 64, device=device)
    model(x).square().sum().backward()
    optimizer.step()
    plain.load_state_dict(model.state_dict())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    padding = torch.arange(12, device=device) >= torch.tensor([[12], [7], [4]], device=device)
    padding = padding if padded else None
    attends = count(monkeypatch, "_native_multi_head_attention")
    encodes = count(monkeypatch, "_transformer_encoder_layer_fwd")
    for each in (plain, model):
        each.eval()
        if hooked:
            each.layers[0].linear1.register_forward_hook(lambda *_: None)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            expected = plain(x, src_key_padding_mask=padding)
            calls = len(attends), len(encodes)
            assert calls == ((1, 1) if hooked else (0, 2))
            given = model(x, src_key_padding_mask=padding)
            assert (len(attends), len(encodes)) == (2 * calls[0], 2 * calls[1])
            attends.clear()
            encodes.clear()
        if hooked and not padded:  # the hooked layer's Linears are FP8, as all are in evaluation
            assert (given - expected).norm() < 0.1 * expected.norm()
        else:
            assert_same_bits(given, expected)
    model.requires_grad_(False)  # for which torch's fast path needs no no_grad
    if not hooked:
        assert_same_bits(model(x, src_key_padding_mask=padding), expected)


def test_evaluation_runs_torchs_forward_unless_a_gradient_is_wanted(device):
    plain, ours = attentions(device, dropout=0.5)
    x = torch.randn(LENGTH, 3, WIDTH, device=device)
    plain.eval()
    ours.eval()
    with torch.no_grad():
        expected = plain(x, x, x)
        assert_same_bits(ours(x, x, x), expected)
    y, weights = ours(x, x, x)
    assert y.requires_grad
    assert not torch.equal(y, expected[0])
    assert_same_bits(weights, ours(x, x, x)[1])  # nothing is dropped
    ours.requires_grad_(False)
    assert_same_bits(ours(x, x, x), expected)
    assert ours(x, x.requires_grad_(), x)[0].requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_input_is_refused_in_training(device):
    _, ours = attentions(device, batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(4, WIDTH), torch.randn(3, WIDTH)], device=device)
    with pytest.raises(ModelError, match="layer 0 got nested input"):
        ours(x, x, x)


# --- models


class Tagger(nn.Module):
    """Predicts the tokens that follow, by torch's encoder or by its decoder layers."""

    def __init__(self, decoder=False, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.encoder = encoder()
        layer = nn.TransformerDecoderLayer(64, 4, 256, dropout=dropout, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 1) if decoder else None
        self.head = nn.Linear(64, 96)

    def forward(self, tokens):
        h = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(h.shape[1], device=h.device)
        y = self.encoder(h, mask, is_causal=True)
        if self.decoder is not None:
            y = self.decoder(h, y, mask, mask, tgt_is_causal=True)
        return self.head(y)


def steps(model, optimizer, first, count):
    """Train on `count` batches, and return the losses."""
    device = next(model.parameters()).device

    def loss_of(step):
        generator = torch.Generator().manual_seed(step % 4)
        tokens = torch.randint(0, 96, (4, 33), generator=generator).to(device)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return train_clipped(model, optimizer, loss_of, range(first, first + count))


def start(model, level, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return fp8stack.initialize(model, optimizer, level, strict=True, compute="native", **options)


@pytest.mark.parametrize(
    ("level", "recipe"),
    [("O0", "delayed"), ("O1", "blockwise"), ("O2", "current"), ("O2", "delayed")],
)
def test_encoders_and_decoders_train_at_every_level_resume_and_are_restored(
    level, recipe, device, tmp_path
):
    torch.manual_seed(0)
    model = Tagger(decoder=True).to(device)
    keys, plain = list(model.state_dict()), copy.deepcopy(model)
    expected = steps(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), 0, 24)
    model, optimizer = start(model, level, fp8_recipe=recipe)
    losses = steps(model, optimizer, 0, 24)
    assert expected[-4:].mean() < 0.7 * expected[0]
    assert abs(losses[-4:].mean() / expected[-4:].mean() - 1) < 0.02
    assert list(model.state_dict()) == keys
    report = fp8stack.get_report(model)
    # 2 encoder layers of attention, out_proj and two Linears, a decoder layer with two attentions, the head
    assert len(report.converted) == 2 * 4 + 6 + 1
    assert report.share == 1
    assert report.skipped == {}
    fp8stack.checkpoint.save(tmp_path / "c", model, optimizer)
    after = steps(model, optimizer, 24, 3)
    torch.manual_seed(1)
    again, other = start(Tagger(decoder=True).to(device), level, fp8_recipe=recipe)
    fp8stack.checkpoint.load(tmp_path / "c", again, other)
    assert_same_bits(steps(again, other, 24, 3), after)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    model, optimizer = fp8stack.restore(model, optimizer)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in plain.modules()]
    for name, p in model.named_parameters():
        assert p.dtype is torch.float32
        if weights[name].dtype is torch.float32:
            assert_same_bits(p, weights[name], name)
        else:  # and the remainder's bits
            torch.testing.assert_close(p, weights[name].float(), rtol=2**-8, atol=0)
    steps(model, optimizer, 27, 1)


def test_only_weights_that_a_fast_path_reads_keep_their_dtype():
    model, optimizer = start(Tagger(decoder=True), "O2")
    report = fp8stack.get_report(model)
    layer = "decoder.layers.0"
    linears = [f"{layer}.linear1.weight", f"{layer}.linear2.weight"]
    assert report.stored == ["embed.weight", *linears, "head.weight"]
    assert all(model.get_parameter(name).dtype is torch.bfloat16 for name in report.stored)
    names = [n for n, p in model.named_parameters() if p.ndim > 1 and n not in report.stored]
    assert list(report.kept) == names
    told = "MultiheadAttention reads it itself in its fast path"
    assert report.kept[f"{layer}.self_attn.in_proj_weight"] == told
    assert "reads it itself" in report.kept["encoder.layers.0.linear1.weight"]
    steps(model, optimizer, 0, 1)
    for name in names:
        state = optimizer.state[model.get_parameter(name)]
        assert state["exp_avg_code"].dtype is torch.uint8
    model(torch.zeros(4, 32, dtype=torch.long)).sum().backward()
    for name in names:
        assert isinstance(model.get_parameter(name).grad, fp8stack.BlockScaledTensor)


def test_dropout_and_recomputation_of_an_encoder_layer_have_the_bits_of_one_pass(device):
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.2).to(device)
    native(nn.Sequential(layer), device, fp8_recipe="delayed")
    x = torch.randn(12, 3, 64, device=device, requires_grad=True)
    given = []
    for again in (False, True):
        model = copy.deepcopy(layer)
        torch.manual_seed(4)
        found = []
        for _ in range(2):
            run = torch.utils.checkpoint.checkpoint
            y = run(model, x, use_reentrant=False) if again else model(x)
            found += [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]
        given.append([*found, *scaling_state(model).values()])
    assert_same_bits(*given)


def test_histories_of_all_three_projections_are_saved_and_loaded(device):
    def make():
        torch.manual_seed(0)
        return native(
            nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS)), device, fp8_recipe="delayed"
        )

    model, given = make(), [draw("three", "seq", device=device) for _ in range(3)]
    for each in given[:2]:
        passed(model[0], each)
    state = scaling_state(model)
    assert {name.rpartition(".")[0] for name in state} == {"0", "0.key", "0.value", "0.out_proj"}
    for name in ("0", "0.key", "0.value"):
        assert_same_bits(state[f"{name}.casts"], state["0.out_proj.casts"])
        assert len({float(state[f"{name}.{kind}"][0]) for kind in "xg"}) == 2
    expected = passed(model[0], given[2])
    other = make()
    load_scaling_state(other, state)
    assert_same_bits(passed(other[0], given[2]), expected)


def test_the_monitor_sees_the_projections():
    model, optimizer = start(Tagger(decoder=True), "O2")
    with Monitor(model, optimizer, every=1) as monitor:
        steps(model, optimizer, 0, 2)
        found = monitor.read(wait=True)
    attention = found["encoder.layers.0.self_attn"]
    assert {"x", "w", "g"} == set(attention)
    assert attention["w"]["update_ratio"] > 0
    assert "encoder.layers.0.self_attn.key" not in found  # one product makes all three
    assert {"x", "w", "g"} == set(found["decoder.layers.0.multihead_attn.key"])
    assert set(found["encoder.layers.0.self_attn.out_proj"]) == {"x", "w", "g"}
    fp8stack.restore(model, optimizer)
    with pytest.warns(fp8stack.errors.Fp8StackWarning, match="nothing to monitor"):
        Monitor(model).remove()


# --- choices


def test_what_is_left_out_is_told_with_the_reason():
    class Own(nn.MultiheadAttention):
        pass

    def wrapped(module):
        module.forward = functools.partial(type(module).forward, module)
        return module

    def of_weight_norm():
        module = nn.MultiheadAttention(WIDTH, HEADS)
        nn.utils.parametrizations.weight_norm(module.out_proj)
        return module

    expected = {
        "own": (Own(WIDTH, HEADS), "is a Own, a subclass of nn.MultiheadAttention"),
        "bias": (nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True), "add_bias_kv or add_zero_attn"),
        "zero": (nn.MultiheadAttention(WIDTH, HEADS, add_zero_attn=True), "add_bias_kv or add_zero_attn"),
        "wrapped": (wrapped(nn.MultiheadAttention(WIDTH, HEADS)), "its forward was set on the instance"),
        "norm": (of_weight_norm(), "its out_proj: its weight is computed"),
        "wide": (nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64), "its weight is torch.float64"),
        "skip": (nn.MultiheadAttention(WIDTH, HEADS), 'matches skip="skip"'),
        "lstm": (nn.LSTM(WIDTH, WIDTH), "takes no FP8"), "gru": (nn.GRU(WIDTH, WIDTH), "takes no FP8"),
        "rnn": (nn.RNN(WIDTH, WIDTH), "takes no FP8"), "cell": (nn.LSTMCell(WIDTH, WIDTH), "takes no FP8"),
    }  # fmt: skip
    model = nn.ModuleDict({name: module for name, (module, _) in expected.items()})
    model["fine"] = nn.Linear(256, 256)
    before = copy.deepcopy(model)
    native(model, skip=["skip"])
    report = fp8stack.get_report(model)
    assert report.converted == ["fine"]
    for name, (module, told) in expected.items():
        assert told in report.skipped[name], name
        assert type(module) is type(before[name])
        if isinstance(module, nn.MultiheadAttention):
            assert name == "norm" or f"{name}.out_proj" in report.skipped
            x = torch.randn(LENGTH, WIDTH, dtype=module.in_proj_weight.dtype)
            y = before[name].train()(x, x, x) if name != "wrapped" else module(x, x, x)
            assert_same_bits(module(x, x, x), y)


def test_transformer_engine_leaves_it_to_torch():
    layers = convert.choose_layers(encoder(1), recipe_for("O0", None), {}, set(), compute="te")
    assert [name for name, _, _ in layers.gemm] == ["layers.0.linear1", "layers.0.linear2"]
    told = dict(layers.skipped)
    assert set(told) == {"layers.0.self_attn", "layers.0.self_attn.out_proj"}
    assert 'compute="native" takes it' in told["layers.0.self_attn"]


def test_an_out_projection_alone_can_be_left_out():
    model = nn.Sequential(nn.MultiheadAttention(64, 4))
    _, optimizer = start(model, "O2", skip=["*.out_proj"])
    assert fp8stack.get_report(model).converted == ["0"]
    assert isinstance(model[0], Fp8Attention)
    assert not isinstance(model[0].out_proj, Fp8Layer | StoredLayer)
    x = torch.randn(LENGTH, 3, 64)
    model[0](x, x, x)[0].sum().backward()
    optimizer.step()


def test_sizes_decide_about_in_and_out_projection(by_size, monkeypatch):
    """That in-projection is a layer of in -> 3 × in whose input no other layer reads."""
    asked = []

    def rule(inner, outer, sharing):
        asked.append((inner, outer, sharing))
        least = {192: 8, 64: 100, 256: 4}[outer]
        return LeastRows(least, least, least, least)

    chosen = convert.choose_layers
    monkeypatch.setattr("fp8stack.api.choose_layers", lambda *args: chosen(*args[:4], True))
    monkeypatch.setattr(select, "least_rows", rule)
    model = native(encoder(1))
    assert asked == [(64, 192, 1), (64, 64, 1), (64, 256, 1), (256, 64, 1)]
    attention = model.layers[0].self_attn
    assert [p.least_rows.narrow for p in attention.in_products] == [8, 8, 8]
    assert "fp8 from 8 rows" in fp8stack.get_report(model).selected["layers.0.self_attn"]
    plain = nn.Sequential(nn.MultiheadAttention(64, 4)).bfloat16()
    plain[0].load_state_dict(attention.state_dict())
    attention.bfloat16()
    for rows, alike in ((7, True), (8, False)):
        x = torch.randn(rows, 64, dtype=torch.bfloat16)
        assert torch.equal(attention(x, x, x)[0], plain[0](x, x, x)[0]) == alike
        assert ("layers.0.self_attn" in fp8stack.get_report(model).few_rows) == alike
    attention(x, x[:7], x[:7])  # its query is in FP8
    assert "layers.0.self_attn" not in fp8stack.get_report(model).few_rows
    monkeypatch.setattr(select, "least_rows", lambda *_: select.NEVER)
    assert not fp8stack.get_report(native(encoder(1))).converted


def test_ranks_gather_no_weight_in_fp8_that_a_fast_path_reads():
    model, _ = start(Tagger(decoder=True), "O0", head="fp8")
    layer = model.decoder.layers[0]
    assert _weights(model) == {layer.linear1.weight, layer.linear2.weight, model.head.weight}


def test_the_mode_of_bare_parameters_does_not_look_into_it(device):
    x, given = torch.randn(3, LENGTH, WIDTH, device=device), []
    for matmuls in (False, True):
        torch.manual_seed(0)
        model = native(SelfAttention(), device, matmuls=matmuls)
        given.append(results(model, x))
        assert not fp8stack.get_report(model).left_alone
    assert_same_bits(*given)


def test_plans_count_the_codes_of_its_weights():
    sizes = {}
    for kind in ("attention", "linear"):
        with torch.device("meta"):
            model = nn.Sequential(
                nn.MultiheadAttention(64, 4) if kind == "attention" else nn.Linear(64, 256)
            )
        found = resident(model, Precision("O0", torch.float32, True, recipe_for("O0", None)))
        sizes[kind] = found.codes
        assert len(found.fp8) == {"attention": 2, "linear": 1}[kind]
    assert sizes["attention"] == sizes["linear"] + 4  # a scale more
