"""Bad input: each kind has a specific error that names the culprit and the remedy, and leaves everything untouched."""

import copy
import pickle

import pytest
import torch
from helpers import TinyLM, batch, train
from torch import nn

import fp8stack
from fp8stack.errors import (
    ConfigError,
    Fp8StackWarning,
    GradientError,
    ModelError,
    UnsupportedDeviceError,
)
from fp8stack.levels import recipe_for


def snapshot(model, optimizer):
    """What must not change when a call is refused."""
    return (
        [type(m) for m in model.modules()],
        [(id(p), p.dtype, p.device, p._version) for p in model.parameters()],
        [dict(g, params=[id(p) for p in g["params"]]) for g in optimizer.param_groups],
        {id(p): sorted(s) for p, s in optimizer.state.items()},
        [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    )


def refused(model, optimizer, error, match, *args, **kwargs):
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=match):
        fp8stack.initialize(model, optimizer, *args, **kwargs)
    assert snapshot(model, optimizer) == before


@pytest.fixture
def model():
    return TinyLM()


@pytest.fixture
def optimizer(model):
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("level", ["02", "o2", 2, "O3", "", None, "O2 ", ["O2"]])
def test_wrong_level(model, optimizer, level):
    refused(
        model,
        optimizer,
        ConfigError,
        r'opt_level must be one of "O0", "O1", "O2" \(a capital',
        level,
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fp8_fromat": "e4m3"}, 'no option .fp8_fromat.*Did you mean "fp8_format"'),
        ({"fp8_format": "e5m3"}, "fp8_format='e5m3' is not a choice"),
        ({"preset": "fp8lm"}, 'preset must be one of "fp8-lm".*Did you mean "fp8-lm"'),
        ({"skip": "head"}, r"skip='head' must be a list"),
        ({"skip": None}, r"skip=None must be a list"),
        ({"skip": [1]}, r"skip=\[1\] must be a list"),
        ({"preset": ["fp8-lm"]}, "preset must be one of"),
        ({"min_numel": -1}, "min_numel=-1 must be an integer"),
        ({"states": "keep"}, "master='split24' has no place to be kept"),
    ],
)
def test_wrong_option(model, optimizer, options, match):
    refused(model, optimizer, ConfigError, match, "O2", **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"fp8_recipe": "delyed"},
            r"fp8_recipe='delyed' is not a choice.*Did you mean \"delayed\"",
        ),
        ({"fp8_recipe": "block"}, r'is not a choice; use one of "current", "delayed", "blockwise"'),
        ({"fp8_recipe": ["current"]}, "is not a choice"),
        ({"fp8_margin": 1}, "fp8_margin=1 is of delayed scaling.*fp8_recipe='current' keeps no"),
        ({"fp8_margin": 1, "fp8_recipe": "blockwise"}, "fp8_margin=1 is of delayed scaling"),
        ({"amax_history_len": 16}, "amax_history_len=16 is of delayed scaling"),
        ({"amax_compute_algo": "most_recent"}, "amax_compute_algo='most_recent' is of delayed"),
        (
            {"fp8_recipe": "delayed", "fp8_margin": -1},
            "fp8_margin=-1 must be an integer from 0 to 16",
        ),
        ({"fp8_recipe": "delayed", "fp8_margin": 0.5}, "fp8_margin=0.5 must be an integer"),
        ({"fp8_recipe": "delayed", "fp8_margin": True}, "fp8_margin=True must be an integer"),
        ({"fp8_recipe": "delayed", "amax_history_len": 0}, "amax_history_len=0 must be an integer"),
        (
            {"fp8_recipe": "delayed", "amax_compute_algo": "latest"},
            'amax_compute_algo=.latest. is not a choice; use one of "max", "most_recent"',
        ),
        (
            {"fp8_recipe": "blockwise", "fp8_format": "e5m2"},
            "fp8_recipe='blockwise' is E4M3 throughout.*fp8_format='e5m2'",
        ),
        ({"fp8_fast_accum": "yes"}, "fp8_fast_accum='yes' must be True, False or None"),
        ({"fp8_fast_accum": 1}, "fp8_fast_accum=1 must be True, False or None"),
        (
            {"fp8_fast_accum": True, "fp8_recipe": "blockwise"},
            "fp8_fast_accum=True is of scales for whole tensors, and fp8_recipe='blockwise' has one for each block",
        ),
        ({"pad": "never"}, "pad='never' is not a choice"),
        ({"weight_cache": "fp8t"}, r"weight_cache='fp8t' is not a choice.*Did you mean .fp8\+t"),
        ({"select": "best"}, "select='best' is not a choice"),
        ({"compute": "triton"}, "compute='triton' is not a choice"),
        ({"matmuls": 1}, "matmuls=1 must be True or False"),
    ],
    ids=lambda v: "-".join(f"{k}={x}" for k, x in v.items()) if isinstance(v, dict) else "",
)
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_wrong_option_of_fp8_products(model, optimizer, options, match, level):
    refused(model, optimizer, ConfigError, match, level, **options)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_recipe_that_native_layers_do_not_have(model, optimizer, recipe):
    match = rf"fp8_recipe='{recipe}': native layers have no MXFP8.*Use fp8_recipe=.current"
    for compute in ("native", "auto"):
        if compute == "auto" and torch.cuda.is_available():
            continue  # TransformerEngine may be there
        options = {"fp8_recipe": recipe, "compute": compute}
        refused(model, optimizer, UnsupportedDeviceError, match, "O0", **options)


def test_preset_at_another_level():
    with pytest.raises(ConfigError, match=r"only opt_level=.O2. converts"):
        recipe_for("O1", preset="fp8-lm")


def test_what_is_not_a_model_or_an_optimizer(model, optimizer):
    with pytest.raises(ModelError, match=r"model must be a torch.nn.Module, got list"):
        fp8stack.initialize([model], optimizer)
    with pytest.raises(ModelError, match=r"optimizer must be a torch.optim.Optimizer, got TinyLM"):
        fp8stack.initialize(model, model)
    with pytest.raises(
        ModelError, match="O2 converts gradients for an optimizer; pass it, or use O0"
    ):
        fp8stack.initialize(model)
    assert fp8stack.initialize(model, opt_level="O0") == (model, None)


def test_an_optimizer_of_another_model(model):
    other = torch.optim.AdamW(TinyLM().parameters())
    match = r"owns none of the model's 7 trainable parameters \(7 parameters of something else\)"
    refused(model, other, ModelError, match, "O2")


def test_an_optimizer_of_a_part_of_the_model_warns_or_raises_when_strict(model):
    optimizer = torch.optim.AdamW(model.head.parameters())
    refused(
        model,
        optimizer,
        UnsupportedDeviceError,
        "6 trainable parameters",
        strict=True,
    )
    with pytest.warns(
        Fp8StackWarning, match=r"6 trainable parameters are not in the optimizer.*embed.weight"
    ):
        fp8stack.initialize(model, optimizer, "O2")
    assert model.embed.weight.dtype is torch.float32


@pytest.mark.parametrize(
    "kind", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.RMSprop]
)
def test_an_optimizer_that_o2_does_not_convert(model, kind):
    match = (
        rf"O2 converts torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD.*not .*{kind.__name__}"
    )
    refused(model, kind(model.parameters()), ModelError, match, "O2")


def test_a_subclass_is_not_taken_for_its_base(model):
    class Mine(torch.optim.AdamW):
        pass

    refused(model, Mine(model.parameters()), ModelError, "not .*Mine", "O2")


@pytest.mark.parametrize("option", ["amsgrad", "differentiable"])
def test_options_that_o2_does_not_have(model, option):
    optimizer = torch.optim.AdamW(model.parameters(), **{option: True})
    refused(model, optimizer, ModelError, f"{option}=True.*opt_level=.O1.", "O2")


def test_an_initialized_model(model, optimizer):
    _, returned = fp8stack.initialize(model, optimizer, "O1")
    refused(
        model, returned, ModelError, r"embed|up is already converted by fp8stack.*restore", "O2"
    )


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_of_an_initialized_model(model, optimizer, level, how):
    """Which restore does not know: the message says what does help."""
    fp8stack.initialize(model, optimizer, level)
    other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    remedy = r"copy of an initialized model .* cannot be restored: load its .*master_state_dict"
    said = rf"already converted by fp8stack\. Restore the model .* in, if .*{remedy}"
    refused(other, torch.optim.AdamW(other.parameters()), ModelError, said, level)
    with pytest.raises(ModelError, match=f"nothing to undo.*{remedy}"):
        fp8stack.restore(other)
    fresh = TinyLM()
    fresh.load_state_dict(fp8stack.checkpoint.master_state_dict(other))
    fp8stack.initialize(fresh, torch.optim.AdamW(fresh.parameters()), level)


def test_stepping_the_optimizer_that_was_handed_over(model, optimizer):
    fp8stack.initialize(model, optimizer, "O2")
    model(*batch(0)).backward()
    with pytest.raises(ModelError, match="use the optimizer that it returned"):
        optimizer.step()


def test_meta_tensors():
    model = TinyLM().to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    refused(model, optimizer, ModelError, "embed.weight is on the meta device; materialize", "O2")


def test_lazy_parameters():
    model = nn.Sequential(nn.LazyLinear(16))
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    with pytest.raises(ModelError, match=r"0\.\w+ is a lazy parameter.*run one batch"):
        fp8stack.initialize(model, optimizer, "O2")


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
def test_parameters_that_are_not_real_floats(model, optimizer, dtype):
    model.register_parameter(
        "codes", nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
    )
    refused(model, optimizer, ModelError, f"codes is {dtype}.*buffer", "O0")


def test_double_precision(model):
    model.double()
    optimizer = torch.optim.AdamW(model.parameters())
    refused(
        model,
        optimizer,
        ModelError,
        r"embed.weight is torch.float64; O1 takes.*model.float\(\)",
        "O1",
    )


@pytest.mark.gpu
def test_mixed_devices(model):
    model.head.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    match = r"several devices \(embed.weight on cpu, head.weight on cuda:0\)"
    refused(model, optimizer, ModelError, match, "O2")


def test_mixed_devices_are_found_without_a_gpu(monkeypatch):
    """A meta parameter is refused before; so a second device is imitated by what the check reads."""
    model = TinyLM()
    devices = {id(model.head.weight): torch.device("cuda", 1)}
    monkeypatch.setattr(
        torch.nn.Parameter,
        "device",
        property(lambda p: devices.get(id(p), torch.device("cpu"))),
        raising=False,
    )
    with pytest.raises(ModelError, match=r"embed.weight on cpu, head.weight on cuda:1"):
        fp8stack.conversion.check_model(model, recipe_for("O2"))


def test_empty_parameter_groups(model):
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": []}])
    refused(model, optimizer, ModelError, "parameter group 1 of the optimizer is empty", "O1")


def test_a_model_without_parameters(optimizer):
    with pytest.raises(ModelError, match="no parameters"):
        fp8stack.initialize(nn.ReLU(), optimizer)


def test_sparse_embeddings(model):
    model.embed.sparse = True
    refused(
        model,
        torch.optim.AdamW(model.parameters()),
        ModelError,
        "embed is Embedding.sparse=True.",
        "O1",
    )


def test_sparse_and_complex_gradients_that_exist_already(model, optimizer):
    model.embed.weight.grad = torch.zeros_like(model.embed.weight).to_sparse()
    refused(model, optimizer, ModelError, r"embed.weight has a sparse gradient.*zero_grad", "O1")


def test_a_sparse_gradient_that_arrives_later_names_its_parameter(model, optimizer):
    fp8stack.initialize(model, optimizer, "O1")
    model.embed.sparse = True
    model.embed.__class__ = nn.Embedding
    with pytest.raises(GradientError, match=r"gradient of embed.weight is sparse"):
        model(*batch(0)).backward()


def test_a_model_wrapped_already(model, optimizer):
    wrapped = nn.DataParallel(model)
    refused(
        wrapped, optimizer, ModelError, "wrapped in DataParallel; initialize the bare model", "O2"
    )


def test_restore_with_the_wrong_arguments(model, optimizer):
    with pytest.raises(ModelError, match="nothing to undo"):
        fp8stack.restore(model, optimizer)
    with pytest.raises(ModelError, match="not initialized"):
        fp8stack.get_report(model)
    _, returned = fp8stack.initialize(model, optimizer, "O2")
    with pytest.raises(ModelError, match="not the one that initialize returned"):
        fp8stack.restore(model, torch.optim.AdamW(model.parameters()))
    train(model, returned, 1)


def test_a_second_derivative_says_no(model, optimizer):
    fp8stack.initialize(model, optimizer, "O0")
    x = torch.randn(16, 128, requires_grad=True)
    for loss in (model.up(x).square().sum(), model.up(x).sum()):
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"second derivatives through an FP8 layer.*skip="):
            first.sum().backward()


def spoil_betas(model):
    return torch.optim.AdamW(
        model.parameters(),
        lr=torch.tensor(1e-3),
        betas=(torch.tensor(0.9), torch.tensor(0.99)),
        foreach=False,
        capturable=True,
    )


def spoil_rate(model):
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["lr"] = -1.0
    return optimizer


def spoil_format(model):
    return torch.optim.AdamW([{"params": list(model.parameters()), "states": "9bit"}])


def spoil_state(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(*batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state[model.down.weight]["exp_avg"] = torch.zeros(3)
    return optimizer


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (spoil_betas, ConfigError, "betas must be numbers"),
        (spoil_rate, ConfigError, "lr must be a finite number"),
        (spoil_format, ConfigError, "states must be one of"),
        (
            spoil_state,
            ModelError,
            r"state of a parameter of shape .* cannot be taken over .*optimizer.state.pop",
        ),
    ],
)
def test_what_only_the_conversion_finds_leaves_everything_as_it_was(model, make, error, message):
    optimizer = make(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = {p: dict(entry) for p, entry in optimizer.state.items()}
    for _ in range(2):  # the second time is no other
        with pytest.raises(error, match=message):
            fp8stack.initialize(model, optimizer, "O2")
    assert type(model.up) is torch.nn.Linear
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert {p: dict(entry) for p, entry in optimizer.state.items()}.keys() == state.keys()
