"""Resume equals continue, bit for bit; states convert to and from torch; bad checkpoints change nothing."""

import copy
import math
import pickle
import tempfile
import zipfile
from argparse import Namespace
from collections import OrderedDict
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TinyLM, assert_same_bits, snapshot, through_file, train
from ranks import load_states, states_of
from torch import nn
from torch.distributed import checkpoint as dcp

import fp8stack
from fp8stack import checkpoint
from fp8stack.errors import CheckpointError, Fp8StackWarning, ModelError
from fp8stack.nn import load_scaling_state, reset_scaling, scaling_state
from fp8stack.optim import SGD, Adam, AdamW

MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=3e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=3e-3),
}


def build(level, make="adamw", **overrides):
    torch.manual_seed(0)
    model = TinyLM()
    return fp8stack.initialize(model, MAKERS[make](model.parameters()), level, **overrides)


def assert_same_training(a, b):
    (model_a, optimizer_a), (model_b, optimizer_b) = a, b
    assert train(*a, 5, start=5) == train(*b, 5, start=5)
    for (name, p), q in zip(model_a.named_parameters(), model_b.parameters(), strict=True):
        assert_same_bits(p, q, name)
        for key, value in optimizer_a.state[p].items():
            other = optimizer_b.state[q][key]
            if isinstance(value, torch.Tensor):
                assert_same_bits(value, other, f"{name}.{key}")
            else:
                assert value == other


CASES = [
    ("O0", "adamw", {}), ("O1", "adamw", {}), ("O1", "nadam", {}), ("O2", "adamw", {}), ("O2", "adam", {}),
    ("O2", "sgd", {}), ("O2", "adamw", {"preset": "fp8-lm"}), ("O2", "adamw", {"gradients": "keep"}),
]  # fmt: skip


@pytest.mark.parametrize(("level", "make", "options"), CASES)
@pytest.mark.parametrize("order", [1, -1], ids=["model first", "optimizer first"])
def test_resume_equals_continue(order, level, make, options):
    original = build(level, make, **options)
    train(*original, 5)
    saved = through_file([part.state_dict() for part in original])
    resumed = build(level, make, **options)
    train(*resumed, 2)  # it has a life of its own that loading must replace
    for part, state in list(zip(resumed, saved, strict=True))[::order]:
        part.load_state_dict(state)
    assert_same_training(original, resumed)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("level", "make", "options"), [case for case in CASES if "nadam" not in case]
)
def test_torch_s_dcp_loads_into_a_run_that_has_not_stepped(level, make, options, tmp_path):
    original = build(level, make, **options)
    train(*original, 5)
    dcp.save(states_of(*original), checkpoint_id=tmp_path)
    resumed = build(level, make, **options)
    load_states(tmp_path, *resumed)
    assert_same_training(original, resumed)


def delayed(**options):
    return build("O2", fp8_recipe="delayed", amax_history_len=8, **options)


@pytest.mark.parametrize("options", [{}, {"fp8_margin": 1}])
def test_delayed_scaling_goes_on_with_its_histories(options, tmp_path):
    original = delayed(**options)
    train(*original, 5)
    checkpoint.save(tmp_path / "run.pt", *original)
    resumed = delayed(**options)
    train(*resumed, 2)
    checkpoint.load(tmp_path / "run.pt", *resumed)
    assert_same_training(original, resumed)
    anew = delayed(**options)
    states = through_file({"m": original[0].state_dict(), "o": original[1].state_dict()})
    anew[0].load_state_dict(states["m"])
    anew[1].load_state_dict(states["o"])
    assert train(*anew, 5, start=10) != train(*original, 5, start=10), "they matter"


def test_histories_that_do_not_fit_are_named(tmp_path):
    original, other = delayed(head="fp8"), delayed(skip=["head"])[0]
    train(*original, 2)
    state = through_file(scaling_state(original[0]))
    with pytest.raises(CheckpointError, match="only the state has 'head'"):
        load_scaling_state(other, state)
    longer = build("O0", fp8_recipe="delayed", amax_history_len=16, head="fp8")[0]
    before = scaling_state(longer)
    with pytest.raises(CheckpointError, match=r"up\.x has 11 elements.*19.*amax_history_len"):
        load_scaling_state(longer, state)
    assert_same_bits(scaling_state(longer).values(), before.values())
    assert scaling_state(build("O2")[0]) == {}
    checkpoint.save(tmp_path / "run.pt", *original)
    other.up(torch.randn(4, other.up.in_features)).sum().backward()
    with pytest.warns(Fp8StackWarning, match="begins with empty histories.*'head'"):
        checkpoint.load(tmp_path / "run.pt", other, None)
    assert not any(history.any() for history in scaling_state(other).values())


@pytest.mark.parametrize(
    "empty", [reset_scaling, lambda m: load_scaling_state(m, scaling_state(delayed()[0]))]
)
def test_histories_that_are_emptied_leave_nothing_of_what_was_cast_before(empty):
    model = delayed()[0]
    x = torch.randn(4, model.up.in_features)

    def amaxes():
        model.up(x).sum().backward()
        return scaling_state(model)

    expected = amaxes()
    (1000 * model.up(1000 * x)).sum().backward()
    empty(model)
    found = amaxes()
    assert_same_bits({key: found[key] for key in expected}, expected)
    assert not any(value.any() for key, value in found.items() if key not in expected)


# the file of SGD says that there is momentum
@pytest.mark.parametrize(("ours", "make"), [(AdamW, "adamw"), (Adam, "adam"), (SGD, "sgd")])
def test_torch_state_goes_in_and_comes_out(ours, make):
    """float32 moments from torch are encoded; what comes out again is what went in, to the step of the codes."""
    torch.manual_seed(0)
    model = TinyLM()
    plain, again = (MAKERS[make](model.parameters()) for _ in range(2))
    train(model, plain, 5)
    optimizer = ours(model.parameters(), lr=1.0)
    optimizer.load_state_dict(through_file(plain.state_dict()))
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    again.load_state_dict(through_file(checkpoint.torch_state_dict(optimizer)))
    for p in model.parameters():
        for name, before in plain.state[p].items():
            assert (again.state[p][name] - before).norm() <= 2**-5 * before.norm()
            assert name != "step" or again.state[p][name] == 5
    train(model, optimizer, 3, start=5)
    train(model, again, 3, start=8)


def test_master_state_dict_is_float32_and_goes_back_with_all_its_bits():
    model, optimizer = build("O2")
    train(model, optimizer, 5)
    masters = checkpoint.master_state_dict(model, optimizer)
    assert list(masters) == list(model.state_dict())
    assert all(v.dtype is torch.float32 for v in masters.values())
    weight, master = model.up.weight.float(), masters["up.weight"]
    assert ((master - weight).abs() <= 2**-8 * master.abs()).all()
    assert not torch.equal(master, weight)  # more than the bfloat16 weight
    fresh, fresh_optimizer = build("O2")
    checkpoint.load_master_state_dict(fresh, fresh_optimizer, through_file(masters))
    assert_same_bits(checkpoint.master_state_dict(fresh, fresh_optimizer), masters)
    plain = TinyLM()
    plain.load_state_dict(masters)
    assert_same_bits(plain.up.weight, masters["up.weight"])
    tied = TinyLM(tied=True)
    assert "embed.weight" in checkpoint.master_state_dict(tied)
    assert "head.weight" in checkpoint.master_state_dict(tied)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_save_and_load_a_file(level, tmp_path):
    original = build(level)
    train(*original, 5)
    path = tmp_path / "deep" / "run.pt"
    checkpoint.save(path, *original, step=5, note="five", losses=[1.0, 2.0])
    assert [p.name for p in path.parent.iterdir()] == ["run.pt"]
    resumed = build(level)
    extra = checkpoint.load(path, *resumed)
    assert extra == {"step": 5, "note": "five", "losses": [1.0, 2.0]}
    assert_same_training(original, resumed)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_save_that_fails_says_why_and_leaves_the_old_file(tmp_path, monkeypatch):
    model, optimizer = build("O2")
    path = tmp_path / "run.pt"
    checkpoint.save(path, model, optimizer, step=1)

    def fail(*args, **kwargs):
        raise OSError("interrupted")

    full = open("/dev/full", "wb")  # noqa: SIM115
    for place, instead, said in (
        ("os.replace", fail, "interrupted"),
        ("fp8stack.checkpoint.open", lambda *_: full, "No space left on device"),
    ):
        monkeypatch.setattr(place, instead, raising=False)
        with pytest.raises(OSError, match=said):
            checkpoint.save(path, model, optimizer, step=2)
        monkeypatch.undo()
        assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
        assert checkpoint.load(path, model, optimizer) == {"step": 1}
    try:
        raise OSError("of another file")
    except OSError:  # which a caller is handling, and says so: what fails then is another error
        with pytest.raises(RuntimeError, match="of the body"), checkpoint.replacing(path):
            raise RuntimeError("of the body")  # noqa: B904


@cache
def contents_of_a_good_file():
    with tempfile.TemporaryDirectory() as folder:
        run = build("O2")
        train(*run, 3)
        checkpoint.save(Path(folder, "good.pt"), *run)
        return Path(folder, "good.pt").read_bytes()


@pytest.fixture
def saved(tmp_path):
    (tmp_path / "good.pt").write_bytes(contents_of_a_good_file())
    return tmp_path / "good.pt"


def refused(path, into, match):
    """Expect an error that leaves model and optimizer as they were."""

    def state():
        return [into[0].state_dict(), *(into[1].state.get(p, {}) for p in into[0].parameters())]

    before = copy.deepcopy(state())
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(path, *into)
    assert_same_bits(state(), before)


def rewrite(path, change):
    """Change what a file holds."""
    contents = torch.load(path, weights_only=True)
    change(contents)
    torch.save(contents, path)


def shrink_codes(contents):
    state = contents["optimizer"]["state"][0]
    state["exp_avg_code"] = state["exp_avg_code"][:7]
    state["exp_avg_scale"] = state["exp_avg_scale"][:7]


def pack_codes(contents):
    state = contents["optimizer"]["state"][0]
    state["exp_avg_code"] = state["exp_avg_code"][:, ::2]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_the_states_of_other_parameters_are_refused_and_a_wrapper_s_names_are_not(level, tmp_path):
    def build(trained):
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
        optimizer = torch.optim.AdamW([p for i in trained for p in model[i].parameters()])
        model, optimizer = fp8stack.initialize(model, optimizer, level)
        model(torch.randn(16, 128)).square().mean().backward()
        optimizer.step()
        return model, optimizer

    first, saved = build([0, 1])
    checkpoint.save(tmp_path / "run.pt", first, saved)
    refused(tmp_path / "run.pt", build([0, 2]), "number 2 was '1.weight' and is '2.weight'")
    contents = torch.load(tmp_path / "run.pt", weights_only=True)
    contents["names"] = [f"module.{name}" for name in contents["names"]]
    torch.save(contents, tmp_path / "wrapped.pt")
    checkpoint.load(tmp_path / "wrapped.pt", *build([0, 1]))
    refused(tmp_path / "wrapped.pt", build([1, 0]), "another order, or others: number 0")
    model, optimizer = build([1, 0])
    checkpoint.load(tmp_path / "run.pt", model, None)
    if level == "O2":  # whose state_dict has names too
        with pytest.raises(CheckpointError, match=r"number 0 was '0\.weight' and is"):
            optimizer.load_state_dict(saved.state_dict())

    def rearrange(_, packed):
        packed["state"] = {new: packed["state"][old] for new, old in enumerate([2, 3, 0, 1])}
        return packed

    optimizer.register_load_state_dict_pre_hook(rearrange)
    checkpoint.load(tmp_path / "run.pt", model, optimizer)


def set_weight(change):
    return lambda c: c["model"].update({"up.weight": change(c["model"]["up.weight"])})


def set_state(**values):
    return lambda c: c["optimizer"]["state"][0].update(values)


def set_group(**values):
    return lambda c: c["optimizer"]["param_groups"][0].update(values)


def drop_option(name):
    return lambda c: c["optimizer"]["param_groups"][0].pop(name)


BAD = [  # what is wrong with a file, and what the message says
    (lambda c: c["optimizer"]["fp8stack"].update(format=99), "has format 99; this version of fp8stack reads 1"),
    (lambda c: c["optimizer"]["fp8stack"].update(names=[None, "a"]), r"names are \[None, 'a'\]: it is damaged"),
    (lambda c: c["optimizer"]["fp8stack"].update(optimizer="SGD"), "this state is of SGD, the optimizer is AdamW"),
    (lambda c: c["optimizer"]["state"].pop(3), "says it has 7 entries and . masters, and has 6.*it is damaged"),
    (lambda c: c["optimizer"]["state"][0].pop("remainder"), "7 entries and 4 masters, and has 7 and 3;.*damaged"),
    (lambda c: c["optimizer"]["fp8stack"].update(masters=torch.zeros(2)), "it is damaged"),
    (lambda c: c["optimizer"]["state"][0].pop("step"), "step is missing"),
    (lambda c: c["optimizer"]["param_groups"][0]["params"].pop(), "groups of .6. parameters, the optimizer of .7."),
    (lambda c: c["optimizer"].pop("state"), 'keys "state" and "param_groups"'),
    (lambda c: c["optimizer"].update(param_groups=torch.zeros(1, 2)), 'groups list "params"'),
    (lambda c: c["optimizer"]["state"][0].pop("exp_avg_code"), "exp_avg is missing"),
    (pack_codes, r"exp_avg is of shape \(\d+, \d+\).*, its scale is of shape"),
    (shrink_codes, r"exp_avg is of shape \(7, 128\)"),
    (lambda c: c["model"].pop("up.weight"), "1 keys are missing .*up.weight"),
    (lambda c: c["model"].update({"up.weight": torch.zeros(3, 3)}), r"shape \(3, 3\) in .* \(\d+, \d+\) in the model"),
    (lambda c: c.pop("model"), "was not written by fp8stack.checkpoint.save"),
    (lambda c: c.update(model=[1]), r"the weights are \[1\]"),
    (set_weight(lambda x: x.to_sparse()), "up.weight is no dense tensor"),
    (set_weight(lambda x: x.to("meta")), "up.weight has no data"),
    (set_weight(lambda x: x.bool()), "up.weight has dtype torch.bool, and torch.bfloat16 in the model"),
    (set_weight(lambda x: x[:1, :1].expand(x.shape)), "up.weight has elements in the same place"),
    (set_weight(lambda _: 3), "up.weight is 3"),
    (set_state(exp_avg_code=torch.zeros(1, dtype=torch.uint8).expand(2**31)), "exp_avg_code has elements in the same"),
    (set_state(exp_avg_scale=torch.ones(1, 1)), r"its scale is of shape \(1, 1\)"),
    (set_state(exp_avg_scale=torch.full((320, 1), math.nan)), "exp_avg_scale holds NaN"),
    (set_state(exp_avg_sq_scale=torch.full((320, 1), -1.0)), "exp_avg_sq_scale holds NaN"),
    *((set_state(step=torch.tensor(x)), "step must be a whole number") for x in (math.nan, math.inf, -5.0, 2.5, True)),
    (lambda c: c["optimizer"]["state"].update({0: 7}), 'keys "state" and "param_groups"'),
    (lambda c: c["optimizer"]["state"].update({77: {}}), 'keys "state" and "param_groups"'),
    (lambda c: c["optimizer"]["param_groups"][0]["params"].__setitem__(0, [1]), 'groups list "params", each once'),
    (lambda c: c["optimizer"]["param_groups"][0]["params"].__setitem__(0, 1), 'groups list "params", each once'),
    (lambda c: c["optimizer"].update(fp8stack=torch.zeros(3)), "has format tensor"),
    (lambda c: c["optimizer"]["fp8stack"].update(entries=torch.zeros(1).expand(2**31)), "it is damaged"),
    (lambda c: c.update(names=5), '"names" is 5'),
    (lambda c: c.update(extra=None), '"extra" is None'),
    (lambda c: c.update(scaling=torch.tensor(1.0)), "the state of delayed scaling is damaged"),
    *((set_group(betas=x), "group 0 of the checkpoint.*(betas|number)") for x in (3, ("a", "b"), (0.9, math.nan))),
    *((set_group(lr=x), "group 0 of the checkpoint") for x in ("x", math.nan, -1.0, True, torch.ones(2), None)),
    *((drop_option(name), f"has no .'{name}'") for name in ("lr", "betas", "eps")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "match"), BAD)
def test_bad_checkpoints_are_named_and_change_nothing(saved, change, match):
    rewrite(saved, change)
    trained = build("O2")
    train(*trained, 1)
    refused(saved, trained, match)


DELAYED = [
    ("up.x", lambda x: 3), ("up.x", lambda x: -x - 5), ("up.x", lambda x: x.double()),
    ("up.x", lambda x: x[:1].expand(2**31)), ("up.x", lambda x: x / 0), ("up.casts", lambda x: 3),
    ("up.casts", lambda x: x[:1]), ("up.casts", lambda x: -x), ("up.casts", lambda x: x.float()),
]  # fmt: skip


@pytest.mark.parametrize(("key", "change"), DELAYED)
def test_histories_that_are_damaged_are_named_and_change_nothing(key, change, tmp_path):
    run = delayed()
    train(*run, 1)
    checkpoint.save(tmp_path / "run.pt", *run)
    rewrite(tmp_path / "run.pt", lambda c: c["scaling"].update({key: change(c["scaling"][key])}))
    refused(tmp_path / "run.pt", run, "the state of delayed scaling is damaged")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (set_group(betas=3), "group 0 of the checkpoint"),
        (set_group(lr=math.nan), "lr must be finite"),
        (drop_option("betas"), "has no .'betas'"),
        (drop_option("lr"), "has no .'lr'"),
        (lambda c: c["optimizer"]["state"][0].pop("exp_avg"), "exp_avg is None"),
        (set_state(step=-5), "step must be a whole number"),
        (set_state(exp_avg=torch.zeros(1).expand(2**31)), "exp_avg has elements in the same place"),
        (set_state(exp_avg_sq=torch.tensor(1.0)), r"exp_avg_sq is of shape \(\)"),
    ],
)
def test_bad_checkpoints_of_torch_s_optimizer_change_nothing(change, match, tmp_path):
    runs = [build("O0") for _ in range(2)]
    for model, optimizer in runs:
        train(model, optimizer, 2)
    checkpoint.save(tmp_path / "run.pt", *runs[0])
    rewrite(tmp_path / "run.pt", change)
    refused(tmp_path / "run.pt", runs[1], match)


@pytest.mark.parametrize("change", [lambda states: states.pop(0), lambda states: states[0].clear()])
def test_adagrad_s_states_are_all_there(change, tmp_path):
    """It makes them when it is made, and does not load without one."""
    model = nn.Linear(8, 4)
    model, optimizer = fp8stack.initialize(model, torch.optim.Adagrad(model.parameters()), "O0")
    checkpoint.save(tmp_path / "run.pt", model, optimizer)
    checkpoint.load(tmp_path / "run.pt", model, optimizer)
    rewrite(tmp_path / "run.pt", lambda c: change(c["optimizer"]["state"]))
    refused(
        tmp_path / "run.pt",
        (model, optimizer),
        "step must be a whole number from 0 on, and is None",
    )


def test_a_file_that_unpacks_to_more_than_its_size_is_refused(tmp_path):
    torch.save({"a": torch.zeros(2**24)}, tmp_path / "plain.pt")
    small = zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "plain.pt") as source, small as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        checkpoint.read_file(tmp_path / "small.pt")
    assert "bytes in all" in str(caught.value.__cause__)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_steps_beyond_2_24_count(level):
    """float32 would stay at 2^24."""
    model, optimizer = build(level)
    train(model, optimizer, 1)
    packed = optimizer.state_dict()
    for entry in packed["state"].values():
        entry["step"] = 2**24 + 1
    optimizer.load_state_dict(packed)
    train(model, optimizer, 2)
    steps = {float(entry["step"]) for entry in optimizer.state_dict()["state"].values()}
    assert steps == {2**24 + 3}


def test_files_that_are_truncated_missing_or_hold_code(saved):
    data, into = saved.read_bytes(), build("O2")
    for keep in (0, 10, len(data) // 2, int(len(data) * 0.99)):
        saved.write_bytes(data[:keep])
        refused(saved, into, "good.pt cannot be read: it is truncated, or not a checkpoint")
    torch.save({"model": print}, saved)  # would run code on loading
    refused(saved, into, "cannot be read: it holds a .*print")
    saved.unlink()
    refused(saved, into, "cannot be read: No such file")


def test_o2_state_goes_into_no_optimizer_that_would_misread_it():
    original = build("O2")
    train(*original, 2)
    model = TinyLM()
    with pytest.raises(CheckpointError, match=r"a master weight for a 16-bit.*master_state_dict"):
        AdamW(model.parameters()).load_state_dict(original[1].state_dict())
    plain = torch.optim.AdamW(model.parameters())
    plain.load_state_dict(original[1].state_dict())
    model.up.weight.grad = torch.ones_like(model.up.weight)
    with pytest.raises(KeyError, match="exp_avg"):
        plain.step()


def test_a_file_of_o1_goes_into_torch_s_optimizer_whose_states_it_holds(tmp_path):
    saved, loaded = build("O1"), build("O0")
    train(*saved, 2)
    checkpoint.save(tmp_path / "run.pt", *saved, step=2)
    assert checkpoint.load(tmp_path / "run.pt", *loaded) == {"step": 2}
    assert type(loaded[1]) is torch.optim.AdamW
    assert_same_bits(*(snapshot(list(m.parameters()), o) for m, o in (loaded, saved)))
    given = checkpoint.torch_state_dict(loaded[1])["state"][0]["exp_avg"]  # as torch's own says
    assert_same_bits(given, loaded[1].state[loaded[0].embed.weight]["exp_avg"])
    train(*loaded, 1)


LOW = r"low-precision states or masters.*AdamW of torch cannot read.*restore"


@pytest.mark.parametrize(
    ("level", "make", "options", "wrong"),
    [
        ("O1", "sgd", {}, "this state is of SGD, the optimizer is AdamW"),
        ("O2", "adamw", {}, LOW),
        ("O2", "adamw", {"states": "fp32"}, LOW),
        ("O2", "adamw", {"states": "4bit", "master": "none"}, LOW),
    ],
)
def test_what_does_not_go_into_torch_s_optimizer(level, make, options, wrong, tmp_path):
    saved, other = build(level, make, **options), build("O0")
    train(*saved, 2)
    checkpoint.save(tmp_path / "run.pt", *saved)
    refused(tmp_path / "run.pt", other, wrong)
    train(*other, 1)  # whose groups are whole


def test_a_state_dict_calls_torch_s_hooks_and_is_loaded_in_place():
    p = nn.Parameter(torch.zeros(64, 128))
    optimizer = AdamW([p])
    groups, group, calls = optimizer.param_groups, optimizer.param_groups[0], []
    optimizer.register_load_state_dict_pre_hook(lambda o, s: calls.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda o, s: calls.append("saved"))
    saved = through_file(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.125  # as a scheduler set it
    optimizer.load_state_dict(saved)
    assert calls == ["saved", "pre", "post"]
    assert optimizer.param_groups is groups
    assert (groups[0] is group, group["lr"]) == (True, 0.125)
    optimizer.load_state_dict({**saved, "state": {}})  # of a run that had not stepped
    assert not optimizer.state.get(p)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *((lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), kind) for kind in (AdamW, fp8stack.optim.Lion)),
        *((torch.optim.AdamW, kind) for kind in (fp8stack.optim.Lion, SGD)),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), AdamW),
    ],
)  # fmt: skip
def test_states_of_another_kind_of_optimizer_are_refused(source, target):
    p = torch.nn.Parameter(torch.randn(64, 128))
    p.grad = torch.randn_like(p)
    theirs = source([p])
    theirs.step()
    optimizer = target([p])
    optimizer.step()
    before, rate = snapshot([p], optimizer), optimizer.param_groups[0]["lr"]
    with pytest.raises(CheckpointError, match="it is of another optimizer"):
        optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["lr"] == rate
    assert_same_bits(snapshot([p], optimizer), before)


def test_a_model_without_an_optimizer_is_saved_and_loaded(tmp_path):
    model, none = fp8stack.initialize(TinyLM(), None, "O0", compute="native")
    checkpoint.save(tmp_path / "run.pt", model, none, step=3)
    other, fresh = TinyLM(), TinyLM()
    assert checkpoint.load(tmp_path / "run.pt", other, None) == {"step": 3}
    checkpoint.load_master_state_dict(fresh, None, checkpoint.master_state_dict(model, None))
    for loaded in (other, fresh):
        assert_same_bits(loaded.parameters(), model.parameters())
    with pytest.raises(ModelError, match=r"got NoneType\. Without one there is no state"):
        checkpoint.torch_state_dict(None)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_checkpoint_without_an_optimizer_is_none_of_one(level, tmp_path):
    (model, optimizer), other = build(level), build(level)
    checkpoint.save(tmp_path / "run.pt", model, None)
    with torch.no_grad():
        other[0].up.weight.zero_()
    refused(tmp_path / "run.pt", other, "saved without an optimizer.*AdamW.*Load it with")
    checkpoint.save(tmp_path / "both.pt", model, optimizer)
    checkpoint.load(tmp_path / "both.pt", other[0], None)  # the weights alone
    assert_same_bits(other[0].up.weight, model.up.weight)


def test_an_optimizer_s_file_names_what_it_owns_as_state_dicts_do():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    layers = checkpoint_wrapper(nn.Linear(128, 128)), nn.Linear(128, 128), nn.Linear(512, 512)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(layers[0].parameters())
    model, optimizer = fp8stack.initialize(model, optimizer, "O2", compute="native")
    optimizer.add_param_group({"params": list(layers[1].parameters())})
    names = optimizer.state_dict()["fp8stack"]["names"]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert set(names) <= model.state_dict().keys()
    masters = {key: torch.randn(value.shape) for key, value in model.state_dict().items()}
    checkpoint.load_master_state_dict(model, optimizer, masters)
    found = checkpoint.master_state_dict(model, optimizer)["0.weight"]
    assert layers[0].weight.dtype is torch.bfloat16
    assert (found - masters["0.weight"]).abs().max() < 2**-14  # more bits than the weight has
    assert len(pickle.dumps(optimizer)) < 4 * 512 * 512, "the third layer is not its own"


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_weights_saved_without_masters_become_o2_s_masters_or_change_nothing(level, tmp_path):
    """In models with checkpointed blocks too, whose parameters state_dict calls otherwise."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def build(level):
        model = nn.Sequential(checkpoint_wrapper(nn.Linear(128, 128)), nn.Linear(128, 128))
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = fp8stack.initialize(model, optimizer, level, compute="native")
        model(torch.randn(16, 128)).square().mean().backward()
        optimizer.step()
        return model, optimizer

    (first, adam), (model, optimizer), path = build(level), build("O2"), tmp_path / "run.pt"
    checkpoint.save(path, first, adam, step=1)
    hook = model.register_state_dict_post_hook(lambda m, state, *_: state.__delitem__("0.weight"))
    contents = torch.load(path, weights_only=True)
    del contents["model"]["0.weight"]
    torch.save(contents, tmp_path / "part.pt")
    refused(
        tmp_path / "part.pt", (model, optimizer), r"does not have \['0.weight'\].*without the hook"
    )
    hook.remove()
    assert checkpoint.load(path, model, optimizer) == {"step": 1}
    for key, master in checkpoint.master_state_dict(model, optimizer).items():
        assert (master - first.state_dict()[key]).abs().max() < 2**-14, key
    contents["optimizer"]["state"][0].pop("exp_avg")
    contents["model"] = build(level)[0].state_dict()
    torch.save(contents, path)
    refused(path, (model, optimizer), "exp_avg is missing")


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_rate_of_numpy_is_saved_as_a_number(level, tmp_path):
    model, optimizer = build(level)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 10))
    train(model, optimizer, 2)
    schedule.step()
    assert isinstance(optimizer.param_groups[0]["lr"], np.float64)
    if level == "O2":  # as torch's own, O0's has what the schedule put there
        packed = through_file(optimizer.state_dict())
        assert type(packed["param_groups"][0]["lr"]) is float
    extra = {"loss": np.float32(0.5), "seen": {np.int64(3): [True]}}
    checkpoint.save(tmp_path / "run.pt", model, optimizer, schedule=schedule.state_dict(), **extra)
    other = build(level)
    found = checkpoint.load(tmp_path / "run.pt", *other)
    assert found.pop("schedule")["last_epoch"] == 1
    assert found == {"loss": 0.5, "seen": {3: [True]}}
    assert other[1].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert_same_training((model, optimizer), other)


def marked(note):
    tensor = torch.ones(1)
    tensor.note = note
    return tensor


HOLDS_ITSELF: list = []
HOLDS_ITSELF.append(HOLDS_ITSELF)
UNREADABLE = [  # what is saved beside the model, and what the error says of it
    ({"out": Path("a")}, r"hold no pathlib\..*PosixPath\. Save numbers"),
    ({"run": {"a": [1, Namespace(a=1)]}}, r"hold no argparse\.Namespace\."),
    ({"seen": {Path("a"): 1}}, r"hold no pathlib\."),
    ({"marked": marked(Path("a"))}, r"hold no pathlib\."),
    ({"seen": {(Path("a"), 1): 2}}, r"hold no pathlib\."),
    ({"itself": HOLDS_ITSELF}, r"cannot be pickled \(.*recursion"),
    ({"rates": np.ones(3)}, r"hold no numpy.*, numpy\.dtype, numpy\.ndarray\."),
    ({"function": lambda: None}, r"cannot be pickled \(.*lambda.*\)\. Save numbers"),
    ({"run": {Namespace: 1}}, r"hold no argparse\.Namespace\."),
    ({"number": 2**2100}, "cannot be pickled"),
]


def test_what_could_not_be_read_again_is_named_and_the_old_file_stays(tmp_path):
    model, optimizer = build("O2")
    checkpoint.save(tmp_path / "run.pt", model, optimizer, step=1)
    for extra, named in UNREADABLE:
        with pytest.raises(CheckpointError, match=named):
            checkpoint.save(tmp_path / "run.pt", model, optimizer, step=2, **extra)
    optimizer.param_groups[0]["of"] = Path("a")
    with pytest.raises(CheckpointError, match=r"hold no pathlib\."):
        checkpoint.save(tmp_path / "run.pt", model, optimizer)
    assert checkpoint.load(tmp_path / "run.pt", model, optimizer) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_plain_types_of_torch_and_python_are_saved(tmp_path):
    model, optimizer = build("O1")
    nested = OrderedDict(e=(1j, b"f", np.int64(2)))
    extra = {"a": {1, 2}, "b": torch.bfloat16, "c": torch.Size([1]), "d": nested}
    checkpoint.save(tmp_path / "run.pt", model, optimizer, **extra)
    assert checkpoint.load(tmp_path / "run.pt", model, optimizer) == extra


def test_torch_s_optimizer_loads_what_it_saved_with_a_group_without_parameters(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.add_param_group({"params": []})
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    path, saved = tmp_path / "checkpoint.pt", optimizer.state_dict()["state"][0]["exp_avg"].clone()
    fp8stack.checkpoint.save(path, model, optimizer)
    optimizer.step()
    fp8stack.checkpoint.load(path, model, optimizer)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], saved)
