"""Head and loss in one: the numbers of an unfused model within derived bounds, without its logits."""

import copy
import gc

import pytest
import torch
from helpers import assert_same_bits, every_two
from layers import conv1d
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fp8stack
from fp8stack import linear_cross_entropy
from fp8stack.errors import ConfigError, ModelError
from fp8stack.kernels import ops
from fp8stack.levels import PRECISIONS
from fp8stack.nn.fused_loss import _Head
from fp8stack.nn.mixin import mix
from fp8stack.nn.te import Engine, TeLayer

WIDTH, WORDS, ROWS = 96, 700, 300
U = 2.0**-8  # the largest relative error of a rounding to bfloat16


def head_of(how, dtype=torch.float32, turned=False, bias=True, device="cpu"):
    """Return a head whose logits are whole numbers up to 96, exact in bfloat16 whatever the order of sums."""
    torch.manual_seed(0)
    layer = conv1d(WIDTH, WORDS) if turned else nn.Linear(WIDTH, WORDS, bias)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randint(-1, 2, p.shape))
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), layer).to(device, dtype)
    if how != "plain":
        fp8stack.initialize(model, None, "O0", head=how, select="all")
    return model[1]


def draw(dtype=torch.float32, device="cpu"):
    x = torch.randint(-1, 2, (2, ROWS // 2, WIDTH)).to(device, dtype).requires_grad_()
    labels = torch.randint(WORDS, x.shape[:-1], device=device)
    labels[0, :20] = -100
    return x, labels


def exact(x, head, labels, reduction, factor):
    """Return loss and gradients in float64, and the sums of magnitudes that their errors are relative to."""
    w = head.weight.detach().double()
    w = w.t() if type(head).__name__.endswith("Conv1D") else w
    rows, labels = x.detach().double().flatten(0, 1), labels.flatten()
    counts = labels != -100
    z = rows @ w.t() + (0 if head.bias is None else head.bias.detach().double())
    scale = counts.double() * factor / (counts.sum() if reduction == "mean" else 1)
    losses = F.cross_entropy(z, labels, reduction="none", ignore_index=-100)
    g = (z.softmax(-1) - F.one_hot(labels.clamp(min=0), WORDS)) * scale[:, None]
    loss = losses.sum() / (counts.sum() if reduction == "mean" else 1)
    parts = (g, w), (g.t(), rows), (g.t(), torch.ones(len(g), 1, dtype=g.dtype, device=g.device))
    return loss, [a @ b for a, b in parts], [a.abs() @ b.abs() for a, b in parts], z


def gradients_of(loss, x, head):
    x.grad = None
    head.zero_grad()
    loss.backward()
    weight = head.weight.grad.t() if type(head).__name__.endswith("Conv1D") else head.weight.grad
    bias = [] if head.bias is None else [head.bias.grad[:, None]]
    return [x.grad.flatten(0, 1), weight, *bias]


HEADS = (  # how, dtype, autocast
    ("plain", torch.float32, False), ("plain", torch.float32, True), ("plain", torch.bfloat16, False),
    ("plain", torch.float16, False), ("bf16", torch.float32, False), ("bf16", torch.bfloat16, False),
    ("bf16", torch.float32, True),
)  # fmt: skip


@every_two(2, head=HEADS, chunk=[None, 64, 1], reduction=["mean", "sum"], turned=[False, True])
def test_gradients_are_rounded_as_often_as_said(head, chunk, reduction, turned, device):
    """Once as dlogits, once as a part of dx, and once as the result: of the sum of magnitudes, 3 × 2^-8 at most.

    dw is not rounded between; float32 has 2^-24 for each of the 700 and fewer summands. torch's own is within it too.
    """
    how, dtype, autocast = head
    head, (x, labels) = head_of(how, dtype, turned, device=device), draw(dtype, device)
    wide = how == "plain" and dtype is torch.float32 and not autocast
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = linear_cross_entropy(x, head, labels, chunk=chunk, reduction=reduction)
        logits = head(x).float().flatten(0, 1)
    plain = F.cross_entropy(logits, labels.flatten(), reduction=reduction)
    wanted, grads, sizes, z = exact(x, head, labels, reduction, 3.0)
    assert loss.dtype is torch.float32
    assert torch.equal(logits.double(), z)  # of whole numbers
    assert loss.item() == pytest.approx(wanted.item(), rel=WORDS * 2.0**-24)
    for of, result in ((linear_cross_entropy, loss), (F.cross_entropy, plain)):
        if of is F.cross_entropy and dtype is torch.float16:
            continue  # whose dlogits are not of bfloat16
        for i, found in enumerate(gradients_of(3 * result, x, head)):
            u = 0.0 if wide else U * (3 if i == 0 else 2)
            bound = (u + 2.0**-12) * sizes[i] * (1 + WORDS * 2.0**-24) + 1e-7
            assert ((found.double() - grads[i]).abs() <= bound).all(), (of, i)


@pytest.mark.parametrize("recipe", ["current", "tokenwise", "delayed", "blockwise"])
@pytest.mark.parametrize("how", [p for p in PRECISIONS if p != "bf16"])
@pytest.mark.parametrize("turned", [False, True])
def test_in_fp8_a_chunk_is_what_the_layer_makes_of_it(how, recipe, turned, device):
    """Bit for bit; gradients of the weight are added up in float32."""
    if recipe == "delayed":
        recipe, other = "current", {"fp8_recipe": "delayed"}  # whose scales are current ones here
    else:
        other = {"fp8_recipe": recipe}
    plain = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), conv1d(WIDTH, WORDS) if turned else nn.Linear(WIDTH, WORDS)
    )
    plain = plain.to(device, torch.bfloat16)
    layer, fused = (copy.deepcopy(plain) for _ in range(2))
    options = {"precision_for": {"1": how}, "select": "all"}
    fp8stack.initialize(layer, None, "O0", **options, fp8_recipe=recipe)
    fp8stack.initialize(fused, None, "O0", **options, **other)
    x, labels = draw(torch.bfloat16, device)
    total, expected = torch.zeros_like(layer[1].weight, dtype=torch.float32), []
    losses = torch.zeros((), device=device)
    for rows, own in zip(
        x.detach().flatten(0, 1).split(128), labels.flatten().split(128), strict=True
    ):
        rows = rows.clone().requires_grad_()
        y = layer[1](rows)
        g, counts = y.detach().clone(), own != -100
        found = ops.cross_entropy(g, own.clamp(min=0), counts.float(), True)
        losses += torch.where(counts, found, 0).sum()
        layer.zero_grad()
        y.backward(g)
        if "wgrad" in layer[1].products.in_bf16:  # whose sum is not rounded by chunk
            pair = (rows.detach(), g) if turned else (g, rows.detach())
            total += pair[0].float().t() @ pair[1].float()
        else:
            total += layer[1].weight.grad
        expected.append(rows.grad)
    loss = linear_cross_entropy(x, fused[1], labels, chunk=128, reduction="sum")
    loss.backward()
    assert_same_bits(loss, losses)
    assert_same_bits(x.grad.flatten(0, 1), torch.cat(expected))
    if "wgrad" in how and device == "cuda":  # cuBLAS adds up in another order
        assert (fused[1].weight.grad - total).abs().max() <= 2.0**-8 * total.abs().max()
    else:
        assert_same_bits(fused[1].weight.grad, total.bfloat16())


def test_after_finish_a_head_multiplies_in_bfloat16(device):
    heads = [head_of(how, device=device) for how in ("bf16", "fp8", "forward-bf16")]
    x, labels = draw(device=device)
    expected = gradients_of(linear_cross_entropy(x, heads[0], labels), x, heads[0])
    for head in heads[1:]:
        before = gradients_of(linear_cross_entropy(x, head, labels), x, head)
        assert not torch.equal(before[1], expected[1])
        assert fp8stack.finish(head)
        for a, b in zip(
            gradients_of(linear_cross_entropy(x, head, labels), x, head), expected, strict=True
        ):
            assert_same_bits(a, b)


def test_labels_are_shifted_as_in_transformers(device):
    head, (x, labels) = head_of("plain", device=device), draw(device=device)
    moved = F.pad(labels, (0, 1), value=-100)[..., 1:]
    expected = linear_cross_entropy(x, head, moved)
    assert_same_bits(linear_cross_entropy(x, head, labels, shift=True), expected)
    ignored = labels.where(labels != -100, 5)
    assert_same_bits(
        linear_cross_entropy(x, head, ignored, ignore_index=5, shift=True),
        linear_cross_entropy(x, head, F.pad(ignored, (0, 1), value=5)[..., 1:], ignore_index=5),
    )


def test_a_weight_a_tied_embedding_and_frozen_parts(device):
    """Gradients of a tied weight add up; what is frozen gets none, and nothing is made for it."""
    embed, head = (
        nn.Embedding(WORDS, WIDTH, device=device),
        nn.Linear(WIDTH, WORDS, False, device=device),
    )
    head.weight = embed.weight
    tokens, labels = (torch.randint(WORDS, (40,), device=device) for _ in range(2))
    found = []
    for loss in (
        lambda: linear_cross_entropy(embed(tokens), embed.weight, labels),
        lambda: linear_cross_entropy(embed(tokens), head, labels),
        lambda: F.cross_entropy(head(embed(tokens)), labels),
    ):
        embed.weight.grad = None
        loss().backward()
        found.append(embed.weight.grad)
    assert_same_bits(found[0], found[1])
    torch.testing.assert_close(found[1], found[2], rtol=1e-5, atol=1e-6)
    head.weight.requires_grad_(False).grad = None
    bias = torch.zeros(WORDS, device=device, requires_grad=True)
    x = torch.randn(40, WIDTH, device=device)
    linear_cross_entropy(x, head.weight, labels, bias).backward()
    assert bias.grad is not None
    assert head.weight.grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(x, embed.weight, labels).requires_grad


def test_nothing_counts(device):
    """The loss is NaN, as torch's, and gradients are zero; without rows, too."""
    head, (x, labels) = head_of("plain", device=device), draw(device=device)
    loss = linear_cross_entropy(x, head, torch.full_like(labels, -100))
    loss.backward()
    assert loss.isnan()
    assert x.grad.eq(0).all()
    assert head.weight.grad.eq(0).all()
    assert linear_cross_entropy(x[:, :0], head, labels[:, :0], reduction="sum") == 0


def test_what_does_not_fit_is_refused():
    head, (x, labels) = head_of("plain"), draw()
    for error, match, given, how in (
        (ConfigError, "reduction='none' must be", (x, head, labels), {"reduction": "none"}),
        (ModelError, r"labels \(2, 149\).*takes an int64 for each", (x, head, labels[:, 1:]), {}),
        (ModelError, "takes an int64 for each", (x, head, labels.float()), {}),
        (ModelError, "takes an int64 for each", (x, head, labels > 3), {}),
        (ModelError, "a bias beside a layer", (x, head, labels, head.bias), {}),
        (ConfigError, "chunk=-5 must be", (x, head, labels), {"chunk": -5}),
        (ConfigError, "chunk=2.5 must be", (x, head, labels), {"chunk": 2.5}),
        (ModelError, "last dimension must be 96", (x[..., 1:], head, labels), {}),
        (ModelError, "got a Sequential as head", (x, nn.Sequential(head), labels), {}),
        (ModelError, "takes float32", (x.long(), head, labels), {}),
    ):
        with pytest.raises(error, match=match):
            linear_cross_entropy(*given, **how)
    mix(head, TeLayer, te=Engine(fp8stack.levels.recipe_for("O0")))
    with pytest.raises(ModelError, match='in bfloat16 with head="bf16"'):
        linear_cross_entropy(x, head, labels)
    freed = nn.Parameter(torch.empty(WORDS, WIDTH))
    freed.untyped_storage().resize_(0)
    with pytest.raises(ModelError, match="was freed after its layer's forward"):
        linear_cross_entropy(x, freed, labels)
    loss = linear_cross_entropy(x, head_of("plain"), labels)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        first.sum().backward()


class Largest(TorchDispatchMode):
    """Notes the most elements of a result."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and not (func.is_view or x.stride()[:1] == (0,)):
                self.most = max(self.most, x.numel())
        return result


@pytest.mark.parametrize("how", ["plain", "bf16", "forward-bf16", "fp8"])
def test_no_tensor_has_a_logit_for_each_row_and_word(how):
    head, x = head_of(how), torch.randn(4096, WIDTH, requires_grad=True)
    labels = torch.randint(WORDS, (4096,))
    with Largest() as seen:
        linear_cross_entropy(x, head, labels).backward()
    assert seen.most <= 1024 * 768  # words in multiples of 128
    with Largest() as seen:
        F.cross_entropy(head(x), labels).backward()
    assert seen.most >= 4096 * WORDS


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["plain", "bf16", "forward-bf16", "fp8"])
def test_memory_on_a_gpu_is_that_of_a_chunk(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32_000, 1024), nn.Linear(1024, 32_000, False))
    model = model.cuda().bfloat16()
    fp8stack.initialize(
        model,
        None,
        "O0",
        head="fp8" if how == "plain" else how,
        skip=["1"] if how == "plain" else [],
    )
    x = torch.randn(16_384, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(32_000, (16_384,), device="cuda")
    for _ in range(2):  # the first loads kernels
        model.zero_grad()
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        linear_cross_entropy(x, model[1], labels).backward()
        peak = torch.cuda.max_memory_allocated() - before
    weight = 32_000 * 1024  # elements; a chunk's logits have as many
    # dw in float32 and in the weight's dtype, two casts of the weight, logits twice, dx, and room for cuBLAS
    assert peak < (4 + 2 + 2 * 2 + 2 * 2 + 2) * weight + 2 * x.nbytes + 2**28
    assert peak < 16_384 * 32_000 * 2


def test_sums_of_the_weights_gradient_lose_no_bits():
    """16 chunks in bfloat16 would: the error of float32's is that of one rounding."""
    head = _Head.__new__(_Head)
    head.options, head.need = (
        fp8stack.nn.casts.DEFAULT.options(True, torch.bfloat16),
        [False, True, False],
    )
    torch.manual_seed(0)
    x, g = torch.randn(16, 256, 64).bfloat16(), torch.randn(16, 256, 96).bfloat16()
    exact = torch.einsum("krv,krh->vh", g.double(), x.double())
    head.dx = head.db = None
    head.dw, low = torch.zeros(96, 64), torch.zeros(96, 64, dtype=torch.bfloat16)
    for rows, grads in zip(x, g, strict=True):
        head.x = rows
        head.add_gradients(grads, slice(None))
        low += grads.t() @ rows
    errors = [
        ((a.bfloat16().double() - exact).norm() / exact.norm()).item() for a in (head.dw, low)
    ]
    assert errors[0] < U / 3**0.5  # uniform within half a step
    assert errors[1] > 2 * errors[0]


@pytest.mark.parametrize("how", ["plain", "bf16", "forward-bf16", "fp8"])
def test_it_compiles(how):
    torch._dynamo.reset()
    head, (x, labels) = head_of(how), draw()

    def loss_of(x):
        return 3 * linear_cross_entropy(x * 1, head, labels, chunk=128)

    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    found, expected = (gradients_of(of(x), x, head) for of in (compiled, loss_of))
    assert_same_bits(compiled(x), loss_of(x))
    assert_same_bits(found[0], expected[0])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2 * U * b.abs().max().item())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_computes_it_again(reentrant):
    head, (x, labels) = head_of("forward-bf16"), draw()
    expected = gradients_of(linear_cross_entropy(x, head, labels), x, head)
    loss = checkpoint(linear_cross_entropy, x, head, labels, use_reentrant=reentrant)
    for a, b in zip(gradients_of(loss, x, head), expected, strict=True):
        assert_same_bits(a, b)


class Own(nn.Module):
    """A model that calls the function in its forward."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, False)

    def forward(self, tokens, labels):
        return linear_cross_entropy(self.embed(tokens), self.head, labels)


def test_a_model_that_calls_it_is_not_looked_through_for_products():
    """What the function does with a weight is not the model's own code: the head is stored in bfloat16 at O2."""
    model = Own()
    optimizer = torch.optim.AdamW(model.parameters())
    model, _ = fp8stack.initialize(model, optimizer, "O2", fp8_recipe="delayed", amax_history_len=2)
    report = fp8stack.get_report(model)
    assert report.bare == []
    assert report.stored == ["embed.weight", "head.weight"]
    tokens = torch.randint(WORDS, (64,))
    model(tokens, tokens).backward()
