"""MS-AMP's names over fp8stack: how they are found, what scripts do with them, and what MS-AMP got wrong."""

import functools
import importlib.metadata
import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import engines
import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits, run_python, through_file
from ranks import assert_same_on_all_ranks, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8stack
from fp8stack import BlockScaledTensor
from fp8stack.errors import ConfigError, Fp8StackWarning, ModelError
from fp8stack.integrations.msamp import enable
from fp8stack.nn import Fp8Linear

U8, F16, F32 = torch.uint8, torch.float16, torch.float32


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))


def inputs(number):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(number))


def train(model, optimizer, steps, backward=torch.Tensor.backward, rank=0, after=lambda: None):
    """Return the losses of learning the identity."""
    losses = []
    for step in range(steps):
        x = inputs(1000 * rank + step)
        loss = (model(x) - x).square().mean()
        backward(loss)
        after()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def falls(losses, to=0.5):
    return losses[-5:].mean() < to * losses[:5].mean()


@pytest.fixture
def msamp():
    with enable():
        import msamp

        yield msamp


def is_found():
    try:
        importlib.metadata.version("ms-amp")
    except importlib.metadata.PackageNotFoundError:
        return importlib.util.find_spec("msamp") is not None
    return True


# --- how it is found


def test_nothing_is_found_unless_asked_for():
    assert not is_found()
    first, second = enable(), enable()
    import msamp.optim
    from msamp import LBAdamW, clip_grad_norm_, deepspeed, nn
    from msamp.nn import LinearReplacer

    assert is_found()
    assert msamp.nn is nn
    assert msamp.LinearReplacer is LinearReplacer
    assert msamp.deepspeed is deepspeed
    assert msamp.optim.LBAdamW is LBAdamW
    assert clip_grad_norm_ is msamp.nn.clip_grad_norm_
    assert importlib.metadata.metadata("MS_AMP")["Name"] == "ms-amp"
    assert msamp.__version__ == importlib.metadata.version("ms-amp") == "0.4.0"
    assert any(d.name == "ms-amp" for d in importlib.metadata.distributions())
    with pytest.raises(ModuleNotFoundError, match=r"no module 'msamp.megatron'; it has msamp, "):
        importlib.import_module("msamp.megatron")
    with pytest.raises(ImportError, match="model_state"):
        from msamp.nn import model_state  # noqa: F401
    second.remove()
    assert is_found()
    first.remove()
    first.remove()
    assert not is_found()
    assert not any(name.split(".")[0] == "msamp" for name in sys.modules)
    with pytest.raises(ModuleNotFoundError, match="No module named 'msamp'"):
        importlib.import_module("msamp")


def test_importing_it_enables_nothing_and_loads_no_framework():
    code = (
        "import sys, fp8stack.integrations.msamp as m; assert m.finder._FINDER not in sys.meta_path\n"
        "m.enable(); import msamp.te; from msamp import deepspeed; print(*sys.modules)"
    )
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert not loaded & {"deepspeed", "accelerate", "transformers", "triton"}


def test_another_msamp_is_refused(tmp_path, monkeypatch):
    (tmp_path / "msamp").mkdir()
    (tmp_path / "msamp" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"is here already \({tmp_path}.*pip uninstall ms-amp"):
        enable()
    assert not any("msamp" in type(f).__module__ for f in sys.meta_path)


# --- initialize


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_training_loop_of_ms_amp_s_examples(msamp, level):
    """As in its patch of DeiT: two groups, a layer left out, scaler, reduction, unscaling, clipping, a scheduler."""
    model = build()
    model[3].use_fp32_linear = True
    before = list(model.parameters())
    vectors = [p for p in before if p.ndim < 2]
    matrices = [p for p in before if p.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, gamma=0.5)
    optimizer.param_groups[1]["lr"] = 3e-3
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", Fp8StackWarning)
        model, optimizer = msamp.initialize(model, optimizer, level)
    assert ["O3 is O2 here" in str(w.message) for w in told] == [True] * (level == "O3")
    assert isinstance(optimizer, msamp.LBAdamW)
    assert (type(model[0]), type(model[3])) == (Fp8Linear, nn.Linear)
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
    scaler = torch.amp.GradScaler("cpu")

    def backward(loss):
        scaler.scale(loss).backward()

    def step():
        optimizer.all_reduce_grads(model)
        scaler.unscale_(optimizer)
        assert msamp.clip_grad_norm_(model.parameters(), 1.0).isfinite()
        assert isinstance(model[0].weight.grad, BlockScaledTensor)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()

    stepped = SimpleNamespace(step=step, zero_grad=optimizer.zero_grad)
    with torch.autocast("cpu", torch.bfloat16):
        assert falls(train(model, stepped, 40, backward))
    assert optimizer.param_groups[1]["lr"] == 1.5e-3
    quantized = ["exp_avg_code" in optimizer.state[model[i].weight] for i in (0, 3)]
    assert quantized == [level != "O1", False]


def test_its_checkpoints_go_on_under_fp8stack_s_own_names(msamp):
    """The optimizer of `fp8stack.initialize` loads its states, and goes on with the same bits."""
    made = []
    for initialize in (msamp.initialize, fp8stack.initialize):
        model = build()
        made.append(initialize(model, torch.optim.AdamW(model.parameters()), "O2"))
    (model, optimizer), (other, successor) = made
    train(model, optimizer, 5)
    weights, state = through_file([model.state_dict(), optimizer.state_dict()])
    other.load_state_dict(weights)
    successor.load_state_dict(state)
    assert_same_bits(train(other, successor, 3), train(model, optimizer, 3))
    assert type(fp8stack.restore(model, optimizer)[1]) is torch.optim.AdamW


def test_what_initialize_refuses_and_what_has_no_effect(msamp):
    model = build()
    for error, match, given, kind, level in (
        (ConfigError, "O1, O2, O3, got opt_level='O0'", model, torch.optim.Adam, "O0"),
        (ModelError, "got list", [], torch.optim.Adam, "O1"),
        (ModelError, "takes torch.optim.Adam and AdamW, got SGD", model, torch.optim.SGD, "O1"),
    ):
        with pytest.raises(error, match=match) as caught:
            msamp.initialize(given, kind(model.parameters()), level)
        assert isinstance(caught.value, ValueError)  # as MS-AMP's
    assert type(model[0]) is nn.Linear
    assert isinstance(msamp.initialize(build())[1], msamp.LBAdamW)
    adam = torch.optim.Adam(model.parameters(), amsgrad=True)
    with pytest.warns(Fp8StackWarning, match="amsgrad=True has no effect"):
        _, optimizer = msamp.initialize(model, adam, "O2", use_te=True)
    assert isinstance(optimizer, msamp.LBAdam)


@pytest.mark.gpu
def test_a_model_is_moved_to_the_gpu_and_states_follow(msamp):
    model = build()
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), "O2")
    x = inputs(0).cuda()
    (model(x) - x).square().mean().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["exp_avg_code"].is_cuda


# --- optimizers and layers on their own


def test_arguments_of_optimizers(msamp):
    p = nn.Parameter(torch.randn(8, 8))
    for first, second, states in ((U8, F16, "fp8-lm"), (U8, U8, "fp8"), (F32, F32, "fp32")):
        assert msamp.LBAdamW([p], exp_avg_dtype=first, exp_avg_sq_dtype=second).states == states
    with pytest.raises(ConfigError, match=r"=torch\.float16: .* Use torch.uint8 and"):
        msamp.LBAdam([p], exp_avg_dtype=F32)
    with pytest.warns(Fp8StackWarning, match="bias_correction=False .*; amsgrad=True .*; tens"):
        msamp.LBAdamW([p], 1e-3, False, amsgrad=True, tensor_scale=False)
    optimizer = msamp.LBAdamW([p], 2e-3, True, (0.8, 0.95), 1e-6, 0.3, False, maximize=True)
    group = optimizer.param_groups[0]
    assert [group[k] for k in ("lr", "betas", "eps", "weight_decay", "maximize")] == [
        2e-3, (0.8, 0.95), 1e-6, 0.3, True
    ]  # fmt: skip
    assert msamp.LBAdam([p], 2e-3, (0.8, 0.95), 1e-6, 0.3).param_groups[0]["weight_decay"] == 0.3
    assert msamp.LBAdam([p]).param_groups[0]["weight_decay"] == 0
    for made, coupled in (  # L2 decay is in the moments, where MS-AMP kept them without it
        (msamp.LBAdam([p], weight_decay=0.1), True),
        (msamp.DSAdam([p], weight_decay=0.1, adam_w_mode=False), True),
        (msamp.DSAdam([p], weight_decay=0.1, set_grad_none=True), False),
        (msamp.LBAdamW([p], weight_decay=0.1), False),
    ):
        assert made.algorithm_of(made.param_groups[0]) == ("adam", coupled)

    class LBAdamW(msamp.LBAdamW):  # as in its patch of fairseq
        supports_flat_params = True

    assert LBAdamW([p]).state_dict()["fp8stack"]["optimizer"] == "AdamW"


def test_layers_without_initialize(msamp):
    """As in its patch of fairseq: the replacer, then the optimizer."""
    model = build()
    model[3].use_fp32_linear = True
    model = msamp.nn.LinearReplacer.replace(model)
    assert isinstance(model[0], Fp8Linear)
    assert type(model[3]) is nn.Linear
    optimizer = msamp.LBAdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    kinds = []

    def look():
        kinds.append([type(model[i].weight.grad) for i in (0, 3)])

    assert falls(train(model, optimizer, 40, after=look))
    assert kinds[-1] == [BlockScaledTensor, torch.Tensor]
    with pytest.raises(ModelError, match="already converted"):
        msamp.nn.LinearReplacer.replace(model)


def test_deepspeed_s_section(msamp):
    pytest.importorskip("deepspeed")
    from msamp import deepspeed

    from fp8stack.integrations.msamp.deepspeed import translate

    for section, level in (
        ({"enabled": True}, "O1"),
        ({"enabled": True, "opt_level": "O2", "use_te": False}, "O2"),
        ({"enabled": False, "opt_level": "O2"}, None),
    ):
        config = {"msamp": section, "bf16": {}}
        assert translate(config) == level
        assert config == {"bf16": {}}
    with pytest.warns(Fp8StackWarning, match="O3 is O2"):
        assert translate({"msamp": {"enabled": True, "opt_level": "O3"}}) == "O3"
    for section, match in (
        ({"enable": True}, "key='enable' is not a choice"),
        ({"enabled": "yes"}, "enabled must be one of False, True"),
        ({"enabled": True, "opt_level": "O0"}, 'opt_level must be one of "O1", "O2", "O3"'),
    ):
        with pytest.raises(ConfigError, match=match):
            translate({"msamp": section})
    config = {"msamp": {"enabled": True, "opt_level": "O1"}, "fp8stack": {"opt_level": "O2"}}
    with pytest.raises(ConfigError, match=r'by "msamp", O1\. Leave "msamp" out'):
        deepspeed.initialize(model=build(), config=config)


# --- between processes


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_and_frameworks(world, tmp_path):
    for framework in ("accelerate", "deepspeed"):
        pytest.importorskip(framework)
    run_ranks(use_ranks, world, str(tmp_path))


def use_ranks(rank, folder):
    """All that exchanges something between ranks, beginning from other weights on each, and what frameworks do."""
    real = engines.import_deepspeed()
    enable()
    prepare_with_accelerate(rank)
    engines.forget_accelerators()
    if dist.get_world_size() == 1:  # on CPUs, accelerate has no DeepSpeed of several ranks
        run_deepspeed(folder, real)
        return
    for check in (check_gradients, check_replacer):
        check(rank)


def check_gradients(rank):
    """The mean of equal gradients is that gradient, where MS-AMP's sums of codes saturated; ranks stay together."""
    import msamp

    model = build(seed=rank)
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "O2")
    assert_same_on_all_ranks(model)
    weight = model[0].weight
    model(inputs(5)).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.all_reduce_grads(model)
    assert torch.equal(weight.grad.codes.float(), before[0].codes.float())  # a sum of -0 is 0
    for parameter, expected in zip(model.parameters(), before, strict=True):
        assert torch.allclose(parameter.grad + 0, expected + 0, rtol=1e-6)

    optimizer.zero_grad()
    reduce = functools.partial(optimizer.all_reduce_grads, model)
    assert falls(train(model, optimizer, 40, rank=rank, after=reduce))
    assert_same_on_all_ranks(model)
    # DistributedDataParallel averages them itself: they are left alone
    wrapped = DistributedDataParallel(model)
    train(wrapped, optimizer, 3, rank=rank)
    wrapped(inputs(rank)).square().mean().backward()
    codes = weight.grad.codes.clone()
    optimizer.all_reduce_grads(wrapped)
    assert_same_bits(weight.grad.codes, codes)
    assert_same_on_all_ranks(model)


def check_replacer(rank):
    """The weights of the rank that is named are everybody's, and the group is that of all_reduce_grads."""
    import msamp

    group = dist.new_group([0, 1])
    model = msamp.nn.LinearReplacer.replace(build(seed=rank), src_rank=1, group=group)
    assert_same_bits(model.parameters(), build(seed=1).parameters())
    optimizer = msamp.LBAdamW(model.parameters(), lr=3e-3)
    model(inputs(rank)).square().mean().backward()
    optimizer.all_reduce_grads(model)
    optimizer.step()
    assert_same_on_all_ranks(model)


# --- accelerate


def prepare_with_accelerate(rank):
    """Stock accelerate's MS-AMP backend gives the bits of msamp.initialize, and unscaled gradients."""
    # accelerate asks for an address; the group exists, so nobody connects to it
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    import msamp
    from accelerate import Accelerator
    from accelerate.utils import MSAMPRecipeKwargs

    model = build(seed=rank)
    model, optimizer = msamp.initialize(model, torch.optim.AdamW(model.parameters()), "O2")
    forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    model.forward = lambda x: forward(x).float()  # as accelerate does
    wrapped = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    expected = train(wrapped, optimizer, 10, rank=rank)

    handler = MSAMPRecipeKwargs(opt_level="O2")
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[handler])
    assert accelerator.fp8_backend.value == "MSAMP"
    accelerator.scaler = torch.amp.GradScaler("cpu")  # as on a GPU: here it is disabled
    model = build(seed=rank)
    optimizer = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with pytest.warns(Fp8StackWarning, match="accelerate's GradScaler is taken away"):
            wrapped, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(optimizer.optimizer, msamp.LBAdamW)
    assert isinstance(accelerator.unwrap_model(wrapped)[0], Fp8Linear)
    norms = []

    def clip():
        norms.append(accelerator.clip_grad_norm_(wrapped.parameters(), 1e9))

    assert_same_bits(train(wrapped, optimizer, 10, accelerator.backward, rank, clip), expected)
    assert max(norms) < 10  # 65536 times more with accelerate's scale


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_norm_of_0_does_not_clip(msamp, limit):
    model = msamp.nn.LinearReplacer.replace(build())
    model(inputs(0)).square().sum().backward()
    before = [p.grad.clone() for p in model.parameters()]
    norm = msamp.clip_grad_norm_(model.parameters(), limit)
    assert norm > 1
    for p, own in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad + 0, own + 0)
    msamp.nn.clip_grad_norm_(model.parameters(), 1.0)
    assert msamp.clip_grad_norm_(model.parameters(), 1.0) < 1.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_o1_of_a_model_in_16_bits_keeps_float32_states_and_masters(msamp, dtype):
    losses = {}
    for kind in (torch.float32, dtype):
        model = build().to(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optimizer = msamp.initialize(model, optimizer, "O1")
        losses[kind] = []
        for step in range(60):
            x = inputs(step).to(kind)
            loss = (model(x) - x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[kind].append(loss.detach())
    state = optimizer.state[model[0].weight]
    assert state["exp_avg_sq"].dtype is F32
    assert "remainder" in state
    start, end = losses[torch.float32][0], losses[torch.float32][-1]
    assert losses[dtype][-1] - end < 0.05 * (start - end)


# --- DeepSpeed


def run_deepspeed(folder, real):
    """`from msamp import deepspeed`: the section gives the level, and accelerate's handler does."""
    import msamp
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, MSAMPRecipeKwargs
    from msamp import deepspeed

    def check(engine, level):
        """The level is that of the section, and the engine learns."""
        assert isinstance(engine.module.down, Fp8Linear) is (level is not None)
        assert falls(engines.train(engine, 30, 0), to=0.9)
        keys = {key for state in engines.inner_of(engine).state.values() for key in state}
        return "exp_avg_code" in keys

    assert deepspeed.init_distributed is real.init_distributed
    described = {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}}
    config = engines.configure(3, "bf16", optimizer=described)  # MS-AMP had stages 1 and 2
    args = SimpleNamespace(deepspeed_config=f"{folder}/config.json")
    for level in (None, "O1", "O2"):
        section = {"enabled": level is not None, "opt_level": level or "O2"}
        Path(args.deepspeed_config).write_text(json.dumps({**config, "msamp": section}))
        model = engines.build()
        given = {"model": model, "model_parameters": model.parameters(), "args": args}
        assert check(deepspeed.initialize(**given)[0], level) is (level == "O2")
    for stage, level in ((2, "O2"), (2, "O1"), (0, "O2")):
        model = engines.build()
        optimizer = msamp.LBAdamW(model.parameters(), lr=3e-3)  # one scale a tensor
        on = {**engines.configure(stage, "bf16"), "msamp": {"enabled": True, "opt_level": level}}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", Fp8StackWarning)
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=on)[0]
        assert any("a scale for each 128" in str(w.message) for w in told) is (level == "O1")
        assert check(engine, level)
        inner = engines.inner_of(engine)
        assert (inner.states, inner.param_groups[0]["lr"]) == ("8bit", 3e-3)
    # the level of accelerate's handler, which reaches no config, and that of its plugin, which does
    by_plugin = {"enable_msamp": True, "msamp_opt_level": "O2"}
    for more, handlers in (({}, [MSAMPRecipeKwargs(opt_level="O2")]), (by_plugin, [])):
        engines.forget_accelerators()
        plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1, **more)
        accelerator = Accelerator(
            mixed_precision="fp8", deepspeed_plugin=plugin, kwargs_handlers=handlers
        )
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 8
        model = engines.build()
        engine = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3))[0]
        assert engine.zero_optimization_stage() == 2
        assert check(engine, "O2")


def test_without_deepspeed_its_module_says_how_to_install_it(monkeypatch):
    from fp8stack.integrations.msamp import deepspeed

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    for use in (lambda: deepspeed.zero, deepspeed.initialize):
        with pytest.raises(ConfigError, match=r"pip install 'fp8stack\[deepspeed\]'"):
            use()
