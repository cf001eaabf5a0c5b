"""`fuse_loss=True`: transformers' causal language models take head and loss in one, and nobody notices but memory."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from layers import COPIES
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fp8stack
from fp8stack.errors import Fp8StackWarning, ModelError, UnsupportedDeviceError
from fp8stack.integrations.fsdp import attach
from fp8stack.nn import deferred_logits, fused_loss
from fp8stack.nn.deferred_logits import DeferredLogits

transformers = pytest.importorskip("transformers")

WORDS = 320
SMALL = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {
    "vocab_size": WORDS, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FUSED = {
    "Llama": SMALL,
    "Llama, tied": SMALL | {"tie_word_embeddings": True},
    "GPT2": GPT2,
    "Phi": SMALL,  # its head has a bias
    "Qwen3Moe": SMALL
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "output_router_logits": True,
    },
    "Gemma2, no cap": SMALL | {"final_logit_softcapping": None},
}
UNFUSED = {
    "Gemma2": SMALL,
    "Cohere": SMALL | {"logit_scale": 0.5},
    "Granite": SMALL | {"logits_scaling": 4.0},
}


def build(family, fuse=True, level="O0", **options):
    """Return a model and its optimizer, by default in float32 throughout, so that what differs are sums alone."""
    name = family.split(",")[0]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(FUSED | UNFUSED)[family])
    model = getattr(transformers, name + ("LMHeadModel" if name == "GPT2" else "ForCausalLM"))(
        config
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    options = options or {"compute": "bf16", "skip": ["*"]}
    return fp8stack.initialize(model, optimizer, level, fuse_loss=fuse, **options)


def draw(seed=0, rows=2):
    torch.manual_seed(seed)
    tokens = torch.randint(3, WORDS, (rows, 24))
    labels = tokens.clone()
    labels[0, :7] = -100
    return {"input_ids": tokens, "labels": labels}


def results(model, **given):
    """Return the loss, all gradients, and the output."""
    model.zero_grad()
    output = model(**(draw() | given))
    output.loss.backward()
    return output.loss.detach(), [p.grad for p in model.parameters()], output


def assert_close(found, expected):
    """Of sums of a few hundred float32 numbers in another order."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.fixture
def calls(monkeypatch):
    """How many losses were fused."""
    seen, own = [], fused_loss.linear_cross_entropy
    counting = lambda *args, **kwargs: (seen.append(1), own(*args, **kwargs))[1]  # noqa: E731
    monkeypatch.setattr(deferred_logits, "linear_cross_entropy", counting)
    return seen


@pytest.mark.parametrize("family", [*FUSED, *UNFUSED])
def test_losses_and_gradients_are_those_of_the_unfused_model(family, calls):
    """With ignored labels; with the Trainer's number of items, a tensor or not; with labels that are shifted already.

    Logits are there for who asks, with their gradients, and nothing is fused where they were changed before the loss.
    """
    fused, _ = build(family)
    plain, _ = build(family, False)
    shifted = F.pad(draw()["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", Fp8StackWarning)
        for given in (
            {},
            {"num_items_in_batch": torch.tensor(31)},
            {"num_items_in_batch": 31},
            {"shift_labels": shifted},
        ):
            found, expected = (results(model, **given) for model in (fused, plain))
            assert_close(found, expected)
        outputs = []
        for model in (fused, plain):
            model.zero_grad()
            outputs.append(output := model(**draw()))
            (output.loss + (output.logits * 2).square().mean()).backward()
    assert len(calls) == 5 * (family in FUSED)
    said = [str(w.message) for w in told if "fuse_loss" in str(w.message)]
    assert len(said) == (family in UNFUSED)
    assert all("changes logits between head and loss" in text for text in said)
    logits, wanted = (output.logits for output in outputs)
    assert (type(logits) is DeferredLogits) == (family in FUSED)
    assert (logits.shape, logits.dtype) == (wanted.shape, wanted.dtype)
    assert_same_bits(logits + 0, wanted)
    both = [
        [output.loss, [p.grad for p in m.parameters()]]
        for m, output in zip((fused, plain), outputs, strict=True)
    ]
    assert_close(*both)


def test_deferred_logits_are_tensors():
    """Their shape, dtype and device cost nothing, casts are put off, all else is done with the head's own output."""
    model, _ = build("Llama")
    logits = results(model)[2].logits
    assert logits.requires_grad
    assert (logits.ndim, logits.numel(), len(logits)) == (3, 2 * 24 * WORDS, 2)
    assert logits.device.type == "cpu"
    low = logits.to(torch.bfloat16)
    assert type(low) is DeferredLogits
    assert type(low.float()) is DeferredLogits
    assert logits.float() is logits
    assert logits.to("cpu") is logits
    assert logits.pending.made is None
    values = model.lm_head.plain_forward(logits.pending.hidden)
    for read in (
        lambda x: x[:, -1], torch.softmax, lambda x: x.argmax(-1), lambda x: x.detach().numpy(), copy.deepcopy,
        lambda x: x.to(torch.float64), lambda x: torch.cat([x, x]), lambda x: x.tolist(), lambda x: x.clone(),
    ):  # fmt: skip
        args = (-1,) if read is torch.softmax else ()
        if read is copy.deepcopy:
            found, expected = read(logits), values.detach()
        else:
            found, expected = read(logits, *args), read(values, *args)
        assert type(found) is type(expected)
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
    assert_same_bits(low + 0, values.bfloat16())
    assert repr(logits).startswith("tensor(")

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.like = x.shape
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(ctx.like)

    logits = model(**draw()).logits
    assert Loss.apply(logits.clone()) == Loss.apply(logits)
    Loss.apply(logits.clone()).backward()
    with pytest.raises(ModelError, match=r"Give it logits.clone\(\)"):
        Loss.apply(logits).backward()


def mask(module, args, logits):
    logits[..., :3] = -1e9


@pytest.mark.parametrize("hook", ["forward", "full_backward"])
def test_a_head_with_hooks_makes_logits_for_them(hook, calls, recwarn):
    seen = []
    fused, plain = (build("Llama", fuse)[0] for fuse in (True, False))
    for model in (fused, plain):
        if hook == "forward":
            model.lm_head.register_forward_hook(mask)
        else:
            model.lm_head.register_full_backward_hook(lambda *given: seen.append(given[2][0].shape))
    assert_close(results(fused), results(plain))
    assert not calls
    assert len(seen) == 2 * (hook == "full_backward")
    assert not [w for w in recwarn if "changes logits" in str(w.message)]


def test_logits_are_not_made_of_weights_that_were_stepped_since():
    model, _ = build("Llama")
    logits = model(**draw()).logits
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(ModelError, match="after a step changed the head's weight"):
        logits.argmax(-1)


def test_what_would_see_no_gradient_of_logits_is_refused(calls):
    model, _ = build("Llama")
    output = model(**draw())
    for ask in (lambda x: x.register_hook(print), lambda x: x.float().retain_grad()):
        with pytest.raises(ModelError, match="fuse_loss=False"):
            ask(output.logits)
    seen, own = [], transformers.loss.loss_utils.ForCausalLMLoss

    def hooked(logits, *args, **kwargs):
        logits.register_hook(seen.append)
        return own(logits, *args, **kwargs)

    model.loss_function = hooked
    model(**draw()).loss.backward()
    (grad,) = seen
    assert len(calls) == 1  # before there was a hook
    assert grad.shape == (2, 24, WORDS)
    assert grad.any()


def test_what_is_written_to_logits_stays():
    """To those, and to copies in another dtype."""
    logits = results(build("Llama")[0])[2].logits
    low, again = logits.to(torch.bfloat16), logits.to(torch.bfloat16)
    with torch.no_grad():
        low[..., 0] = 7
        logits[..., 1] = 9
    assert low[..., 0].eq(7).all()
    assert logits[..., 1].eq(9).all()
    for other, word in ((logits, 0), (again, 0), (again, 1), (low, 1)):
        assert other[..., word].abs().max() < 5


def test_what_has_no_loss_is_not_deferred(calls):
    model, _ = build("Llama")
    tokens = draw()["input_ids"]
    assert type(model(tokens).logits) is torch.Tensor
    with torch.no_grad():
        assert type(model(**draw()).logits) is torch.Tensor
    model.eval()
    assert type(model(**draw()).logits) is torch.Tensor
    assert model.generate(tokens, max_new_tokens=2, do_sample=False).shape == (2, 26)
    assert not calls
    model.train()
    given = draw()
    assert (
        type(model(given["input_ids"], None, None, None, None, given["labels"]).logits)
        is DeferredLogits
    )
    model.loss_function = lambda logits, labels, vocab_size: logits.float().mean()  # the user's
    with pytest.warns(Fp8StackWarning, match="a loss of its own"):
        model(**draw()).loss.backward()
    assert len(calls) == 1


def test_copies_fuse_and_restore_undoes_it(tmp_path, calls):
    model, optimizer = build("Llama, tied", level="O2", head="bf16")
    kind, (loss, _, _) = type(model), results(model)
    assert (kind.__name__, kind.__module__) == (
        "LlamaForCausalLM",
        transformers.LlamaForCausalLM.__module__,
    )
    for copied in (COPIES["deepcopy"](model), COPIES["pickle"](model)):
        calls.clear()
        torch.testing.assert_close(results(copied)[0], loss, rtol=1e-4, atol=0)
        assert len(calls) == 1
    model.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).architectures == ["LlamaForCausalLM"]
    assert (
        "head and loss in one, without logits (not in graphs of torch.compile): the model"
        in str(fp8stack.get_report(model))
    )
    model, _ = fp8stack.restore(model, optimizer)
    assert type(model) is transformers.LlamaForCausalLM
    assert type(model.lm_head) is nn.Linear
    assert not {"waiting", "_fp8stack_told"} & {*vars(model), *vars(model.lm_head)}
    calls.clear()
    results(model)
    assert not calls


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("head", ["fp8", "forward-bf16", "bf16"])
def test_levels_train_alike(level, head, calls):
    """Gradients of the tied weight, of head and embedding, become FP8 blocks as they do without."""
    losses = []
    for fuse in (False, True):
        model, optimizer = build("Llama, tied", fuse, level, head=head)
        own = []
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**draw()).loss
            loss.backward()
            assert isinstance(model.lm_head.weight.grad, fp8stack.BlockScaledTensor)
            optimizer.step()
            optimizer.zero_grad()
            own.append(loss.item())
        losses.append(own)
    assert len(calls) == 4
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[1][-1] < losses[1][0]


def test_accelerate_and_checkpoints_of_blocks_leave_it_fused(calls):
    """What casts all outputs to float32 asks for no values."""
    operations = pytest.importorskip("accelerate.utils.operations")
    fused, plain = (build("Llama", fuse)[0] for fuse in (True, False))
    for model in (fused, plain):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.forward = operations.convert_outputs_to_fp32(
            torch.autocast("cpu", torch.bfloat16)(model.forward)
        )
    found, expected = results(fused), results(plain)
    assert found[2].logits.dtype is torch.float32
    assert found[2].logits.pending.made is None
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-4)
    assert len(calls) == 1


@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_accumulates_and_evaluates_alike(bf16, tmp_path, calls):
    """Losses over two micro-batches are means over the tokens of both, of which they have different numbers."""
    pytest.importorskip("accelerate")
    rows = [{name: x[i] for name, x in draw(rows=8).items()} for i in range(8)]
    for row, count in zip(rows, range(8), strict=True):
        row["labels"] = row["labels"].clone()
        row["labels"][: 2 * count] = -100
    found = []
    for fuse in (True, False):
        model, optimizer = build("Llama, tied", fuse)
        options = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, logging_steps=1,
            report_to=[], use_cpu=True, bf16=bf16, save_strategy="no", disable_tqdm=True, max_grad_norm=1.0,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer = transformers.Trainer(
            model, options, train_dataset=rows, eval_dataset=rows, optimizers=(optimizer, schedule)
        )
        trainer.train()
        logs = trainer.state.log_history
        losses = [row["loss"] for row in logs if "loss" in row]
        norms = [row["grad_norm"] for row in logs if "grad_norm" in row]
        found.append([*losses, *norms, trainer.evaluate()["eval_loss"]])
    assert len(calls) == 4
    assert found[0] == pytest.approx(found[1], rel=2.0**-8 if bf16 else 1e-4)


def test_adapters_around_the_head_are_not_fused(calls):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"])
    torch.manual_seed(0)
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)), config
    )
    with pytest.warns(Fp8StackWarning, match="fuse_loss=True has no effect: no causal"):
        fp8stack.initialize(model, None, "O0", fuse_loss=True)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)), config
    )
    fp8stack.initialize(model, None, "O0", fuse_loss=True)
    model(**draw()).loss.backward()
    assert len(calls) == 1
    assert model.get_base_model().lm_head.weight.grad is None  # frozen


def test_a_model_of_ones_own_has_no_such_loss():
    model = nn.Sequential(nn.Embedding(WORDS, 64), nn.Linear(64, WORDS))
    with pytest.raises(UnsupportedDeviceError, match=r"Call fp8stack\.linear_cross_entropy"):
        fp8stack.initialize(model, None, "O0", fuse_loss=True, strict=True)


def test_a_graph_takes_head_and_loss_apart(calls):
    torch._dynamo.reset()
    fused, plain = (build("Llama", fuse)[0] for fuse in (True, False))
    fused.compile(backend="aot_eager")
    assert_close(results(fused), results(plain))
    assert not calls


# --- ranks


def check_ranks(rank):
    """DDP, and FSDP2 around the model or around its head, too, have the gradients of one process."""
    alone, _ = build("Llama", False)
    whole = results(alone, **draw(rows=4))
    own = {name: x[2 * rank : 2 * rank + 2] for name, x in draw(rows=4).items()}
    count = draw(rows=4)["labels"][:, 1:].ne(-100).sum()
    own["num_items_in_batch"] = count / 2  # means over two ranks
    model, _ = build("Llama")
    wrapped = DistributedDataParallel(model)
    loss, grads, output = results(wrapped, **own)
    assert output.logits.pending.made is None
    dist.all_reduce(loss)
    assert_close((loss / 2, grads), whole)
    for head_too in (False, True):
        config = transformers.LlamaConfig(**SMALL)
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        mesh, policy = init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(torch.float32)
        parts = [*model.model.layers, *([model.lm_head] if head_too else []), model]
        for module in parts:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        attach(model, None, "O0", fuse_loss=True, compute="bf16", skip=["*"])
        with warnings.catch_warnings():
            warnings.simplefilter("error", Fp8StackWarning)
            loss, grads, output = results(model, **own)
        assert isinstance(output.logits, DeferredLogits) != head_too
        dist.all_reduce(loss)
        assert_close((loss / 2, [g.full_tensor() for g in grads]), whole)


def test_ranks():
    run_ranks(check_ranks, 2, timeout=120)
