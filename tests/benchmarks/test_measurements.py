"""How benchmarks come to their numbers: what is counted, compared and searched for, on cases with known answers."""

import contextlib
import json
import os
import signal
import sys
import time
from math import prod
from types import SimpleNamespace

import attention
import convergence
import ddp_step
import demo
import gradients
import linear
import memory
import models
import optimizer_step
import optimizer_stress
import pytest
import resume
import stability
import torch
import wire_parity
from convergence import PEERS, build_peer
from gpt.model import GPT
from layers import count_casts
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import fp8stack

# --- models and shapes


@pytest.mark.parametrize(
    ("model", "tensors", "elements"),
    [
        ("gpt2-124m", 148, 124_475_904),
        ("llama-3.2-1b", 146, 1_235_814_400),
        ("llama-3-8b", 291, 8_030_261_248),
        ("small-4000", 4000, 16_896_000),
    ],
)
def test_lists_have_the_size_of_the_real_models(model, tensors, elements):
    assert len(optimizer_step.MODELS[model]) == tensors
    assert sum(map(prod, optimizer_step.MODELS[model])) == elements


@pytest.mark.parametrize(("name", "elements"), [("llama", 1_134_596_096), ("gpt2", 124_475_904)])
def test_models_have_the_size_of_the_real_ones(name, elements):
    config = models.MODELS[name]
    with torch.device("meta"):
        model = {"llama": models.Llama, "gpt2": models.GPT2}[config.kind](config)
    assert sum(p.numel() for p in model.parameters()) == elements


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2"])
def test_models_are_causal_and_the_same_at_every_call(name):
    config = models.MODELS[name]
    (model, (tokens, targets)), (twin, batch) = (models.make_model(config, "cpu") for _ in "ab")
    assert torch.equal(model(tokens, targets), twin(*batch))
    seen = []
    model.norm.register_forward_hook(lambda *call: seen.append(call[2]))
    changed = tokens.clone()
    changed[:, -1] = (tokens[:, -1] + 1) % config.vocab
    for t in (tokens, changed):
        model(t, t)
    assert torch.equal(seen[0][:, :-1], seen[1][:, :-1])
    assert not torch.equal(seen[0][:, -1], seen[1][:, -1])


@pytest.mark.parametrize("name", ["plain", "sdpa, its choice"])
def test_no_token_sees_a_later_one(name):
    (variant,) = (v for v in attention.VARIANTS if v.name == name)
    shape = attention.MODELS["tiny"]
    q, k, v = attention.make_inputs(shape, "cpu")
    before = variant.make(shape)(q, k, v).detach()
    k.data[:, :, 40:], v.data[:, :, 40:] = 9, -9
    after = variant.make(shape)(q, k, v)
    assert (before[:, :, :40] == after[:, :, :40]).all()
    assert not (before[:, :, 40:] == after[:, :, 40:]).all()


# --- notes and times


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (torch.cuda.OutOfMemoryError("2 GiB"), "skipped: does not fit"),
        (RuntimeError("no such kernel\nand a long dump"), "RuntimeError: no such kernel"),
        (ValueError(), "ValueError: "),
    ],
)
def test_failure_of_one_configuration_is_a_note(error, note):
    def fail():
        raise error

    assert optimizer_step.attempt(fail)["note"].startswith(note)
    assert "dump" not in optimizer_step.attempt(fail)["note"]


def test_a_run_that_is_stopped_keeps_what_it_has_measured():
    def be_stopped():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    attempt, handler = optimizer_step.attempt, signal.getsignal(signal.SIGTERM)
    with optimizer_step.stopping_in_order():
        assert attempt(lambda: {"step_ms": 1.0}) == {"step_ms": 1.0}
        assert attempt(be_stopped) == {"note": "the run was stopped"}
        assert attempt(lambda: {"step_ms": 1.0}) == {"note": "not begun: the run was stopped"}
    assert attempt(lambda: {"step_ms": 1.0}) == {"step_ms": 1.0}
    assert signal.getsignal(signal.SIGTERM) is handler


def test_floor_is_of_flops_and_of_the_bytes_that_casts_move():
    rates = {"copy_tb_s": 4.0, "fp8_tflop_s": 1000.0, "bf16_tflop_s": 500.0}
    by_name = {variant.name: variant for variant in linear.VARIANTS}
    flops, elements = 6 * 8192 * 4096 * 4096, 2 * 8192 * 4096 + 4096 * 4096
    expected = {"bf16": flops / 500, linear.NATIVE: flops / 1000 + 6 * elements / 4}
    expected["native delayed"] = flops / 1000 + 4 * elements / 4
    for name, value in expected.items():
        found = linear.find_floor(by_name[name], (8192, 4096, 4096), rates)
        assert found == pytest.approx(value * 1e-9)


def test_profile_is_divided_into_products_and_the_rest():
    kernels = {"nvjet_qqtst_128x128": 40.0, "sm90_xmma_gemm_e4m3": 20.0, "_cast_kernel": 10.0}
    events = [{"cat": "kernel", "name": n, "dur": d} for n, d in kernels.items()]
    events += [{"cat": "gpu_memset", "name": "Memset"}, {"ph": "M", "name": "process_name"}]
    numbers = linear.summarize({"traceEvents": events * 2}, calls=2)
    assert (numbers["launches"], numbers["copies"]) == (3, 1)
    assert (numbers["gemm_ms"], numbers["rest_ms"]) == pytest.approx((0.06, 0.01))
    assert numbers["names"] == sorted(kernels)


@pytest.mark.parametrize("layers", [1, 3])
def test_every_step_of_a_linear_casts_inputs_gradients_and_weights(layers, monkeypatch):
    (variant,) = (v for v in linear.VARIANTS if v.name == linear.NATIVE)
    seen = count_casts(monkeypatch)
    with contextlib.ExitStack() as scopes:
        step = linear.make_step(variant, (32, 64, 64), "cpu", scopes, layers)
        for _ in range(2):
            seen.clear()
            step()
            assert seen.count((64, 64)) == layers
            assert len(seen) == 3 * layers


# --- bytes


def test_bytes_are_of_the_tensors_inside_and_shared_ones_count_once():
    parameters = [nn.Parameter(torch.zeros(128, dtype=torch.bfloat16)) for _ in range(2)]
    table = torch.zeros(256)
    wrapper = SimpleNamespace(codes=torch.zeros(128, dtype=torch.uint8), dtype=torch.uint8)
    state = {"exp_avg": wrapper, "qmap": table, "error_bits": torch.zeros(128, dtype=torch.int8)}
    optimizer = SimpleNamespace(state={parameters[0]: state, parameters[1]: {"qmap": table}})
    expected = {"weight": 512, "master": 128, "grad": 0, "state": 1152, "total": 1792, "host": 0}
    sizes = optimizer_step.count_bytes(parameters, optimizer)
    assert sizes == {part: size / 256 for part, size in expected.items()}


@pytest.mark.parametrize("variant", optimizer_step.VARIANTS, ids=lambda v: v.name)
def test_gradients_are_as_the_configuration_says(variant):
    shapes = optimizer_step.MODELS["tiny"]
    matrix, vector, *_, small = optimizer_step.make_parameters(shapes, variant, "cpu")
    kinds = {"fp8": "BlockScaledTensor", "bf16": "Tensor", "fp32": "Tensor"}
    assert type(matrix.grad).__name__ == kinds[variant.grad]
    assert type(vector.grad) is type(small.grad) is torch.Tensor
    assert str(matrix.dtype) == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[variant.weight]


def test_a_storage_counts_once_and_whole():
    bucket = torch.zeros(1000, dtype=torch.bfloat16)
    assert ddp_step.count_bytes([bucket[:10], None, bucket[500:].view(50, 10)]) == 2000
    blocks = fp8stack.BlockScaledTensor.quantize(torch.ones(4, 256))
    assert ddp_step.count_bytes([blocks, bucket]) == 4 * 256 + 4 * 4 * 2 + 2000


@pytest.mark.parametrize("base", [0.0, 30.0, 99.5])
@pytest.mark.parametrize("slope", [0.3, 1.7, 40.0, 200.0])
def test_the_search_finds_the_last_that_fits(base, slope):
    tried = []

    def fits(count):
        tried.append(count)
        peak = base + slope * count
        return {"peak_gib": peak} if peak <= 100 * (0.98 if count > 20 else 1) else None

    count, numbers, failed = memory.find_most(fits, 100, most=400)
    best = max((n for n in range(1, 401) if fits(n)), default=0)
    assert (count, failed) == (best, best + 1)
    assert numbers == (fits(best) if best else {})
    assert tried[0] == 1
    assert tried.index(failed) < 14
    assert memory.find_most(lambda n: {"peak_gib": None}, None, most=5)[::2] == (5, None)


@pytest.mark.gpu
def test_memory_that_stays_is_told():
    memory.free("cuda")
    kept = torch.empty(memory.LIBRARIES + 1, dtype=torch.uint8, device="cuda")
    with pytest.raises(memory.MemoryStayed, match="bytes stay allocated"):
        memory.free("cuda")
    del kept
    memory.free("cuda")


# --- gradients and losses


def test_numbers_of_known_gradients():
    exact = 2.0, {"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([[1.0, 0.0]])}
    same = gradients.compare(exact, exact)
    assert (same["off"], same["cosine"], same["along"], same["norm"]) == (0, 1, 1, 1)
    assert same["loss_gap"] == 0
    found = 2.1, {"a": 1.5 * exact[1]["a"], "b": torch.tensor([[1.0, 1.0]])}
    n = gradients.compare(found, exact)
    assert n["least_in"] == "b"
    assert (n["off"], n["least_cosine"]) == pytest.approx(((0.5 + 1) / 2, 0.5**0.5))
    assert (n["cosine"], n["along"]) == pytest.approx(((1 + 0.5**0.5) / 2, (1.5 + 1) / 2))
    assert n["norm"] == pytest.approx(((7.5**2 + 2) / (5**2 + 1)) ** 0.5)
    assert n["loss_gap"] == pytest.approx(0.05)


def test_sequences_one_at_a_time_have_the_gradient_of_the_batch():
    config = gradients.MODELS["tiny"].config
    model = GPT(config)
    tokens = torch.randint(config.vocab, (3, 17))
    batch = tokens[:, :-1], tokens[:, 1:]
    exact = gradients.differentiate(model, batch, exact=True)
    assert all(p.grad is None for p in model.parameters())
    loss = model(*batch)
    loss.backward()
    whole = {name: p.grad for name, p in model.named_parameters() if p.ndim > 1}
    n = gradients.compare((loss.item(), whole), exact)
    assert n["off"] < 1e-5
    assert abs(n["loss_gap"]) < 1e-6


def test_steps_that_differ_after_resuming_are_counted(monkeypatch):
    def train(case, options, out, *more):
        folder = out / "tiny"
        (folder / "checkpoints_fp8" / "step_00000002").mkdir(parents=True)
        late = 0.5 if "--resume" in more else 0
        losses = {s: 8 - s + late * (s == 4) for s in range(1, 5)}
        return folder, {s: {"loss": x, "tokens_per_second": 9.0} for s, x in losses.items()}

    monkeypatch.setattr(resume, "train", train)
    options = resume.parse(["--only", "tiny/O2", "--steps", "4"])
    record = resume.measure(options.cases[0], True, options)
    assert (record["value"], record["of"], record["first_other_step"]) == (1, 2, 4)
    assert record["last_loss_off"] == 1 / 8


def test_what_fails_a_short_run_and_the_median_of_its_layers():
    good = {"loss": 2.0, "finite": True, "skipped_steps": 0}
    assert stability.judge(good, good, 0.05) == ""
    assert "+10.00% off" in stability.judge({**good, "loss": 2.2}, good, 0.05)
    assert "not finite" in stability.judge({**good, "finite": False}, good, 0.05)
    assert "3 steps were skipped" in stability.judge({**good, "skipped_steps": 3}, good, 0.05)
    shares = {"a": 0.5, "b": 0.1, "c": 0.2}

    class Sample(contextlib.nullcontext):
        def read(self, wait):
            return {n: {"g": {"underflow": s}, "x": {"underflow": 0.9}} for n, s in shares.items()}

    assert stability.median_underflow(Sample()) == 0.2
    for name, sizes in stability.ODD.items():
        assert sizes.items() <= stability.ODD["all"].items(), name
    assert all(size % 16 for size in stability.ODD["all"].values())


# --- other libraries, and losses


@pytest.fixture
def short(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question.\n" * 600)
    return SimpleNamespace(model="tiny", steps=3, batch=2, lr=1e-3, skip=[], data=path)


@pytest.mark.parametrize(
    "variant", ["fallback/fp8stack", "fallback/bitsandbytes", "peer/torchao 8bit/bf16"]
)
def test_fallbacks_and_peers_train_as_the_baseline(variant, short):
    with torch.compiler.set_stance("force_eager"):  # torchao's step is compiled, a minute on a CPU
        baseline, other = (convergence.run(v, 0, short) for v in ("baseline", variant))
    assert other.final_loss == pytest.approx(baseline.final_loss, rel=0.005)
    sizes = other.bytes_per_parameter
    if "fallback" in variant:
        assert sizes["m"] < 1.1
        assert sizes["grad"] >= 2
    else:
        assert sizes["weight"] == sizes["grad"] == 2
        assert 2 < sizes["state"] < 2.2


def test_gradients_that_are_not_finite_are_counted(short, monkeypatch):
    plain = demo.compute_loss
    monkeypatch.setattr(demo, "compute_loss", lambda *batch: plain(*batch) * torch.inf)
    assert convergence.run("O2", 0, short).skipped_steps == 3


ON_CPU = ("bitsandbytes 8bit", "torchao 8bit", "torchao 4bit", "torchao fp8")


@pytest.mark.parametrize(
    "peer", [p if p in ON_CPU else pytest.param(p, marks=pytest.mark.gpu) for p in PEERS]
)
def test_a_peer_s_rate_follows_its_schedule(peer):
    library = PEERS[peer].module.partition(".")[0]
    if convergence.find_spec(library) is None:  # TransformerEngine is not imported by itself
        pytest.skip(f"{library} is not installed")
    model = nn.Linear(64, 64, device="cpu" if peer in ON_CPU else "cuda")
    optimizer = build_peer(peer, model, 6e-4)
    schedule = LambdaLR(optimizer, lambda step: (step + 1) / 4)
    for step in range(4):
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        assert rates == pytest.approx([6e-4 * (step + 1) / 4] * len(rates))
        schedule.step()


# --- ranks


@pytest.mark.usefixtures("mesh")
def test_weights_are_compared_by_their_bits(monkeypatch):
    weights = [torch.zeros(3, 5), torch.full((4,), torch.nan, dtype=torch.bfloat16)]
    assert ddp_step.same_everywhere(weights)

    def broadcast(tensor, source):
        if tensor.numel() == 60:
            tensor[3] = 128  # minus zero

    monkeypatch.setattr(ddp_step.dist, "broadcast", broadcast)
    assert not ddp_step.same_everywhere(weights)
    assert ddp_step.same_everywhere(weights[1:])


def test_parts_of_a_batch_are_the_batch(monkeypatch):
    batch = torch.randn(12, 5), torch.randn(12, 5)
    for world in (2, 3, 4):
        monkeypatch.setattr(wire_parity.dist, "get_world_size", lambda world=world: world)
        parts = []
        for rank in range(world):
            monkeypatch.setattr(wire_parity.dist, "get_rank", lambda rank=rank: rank)
            parts.append(wire_parity.own_part(batch))
        for half, given in zip(zip(*parts, strict=True), batch, strict=True):
            assert torch.equal(torch.cat(half), given)


@pytest.fixture
def parity(tmp_path):
    """Return arguments of wire_parity for a tiny model and text."""
    (tmp_path / "loop.py").write_text("for x in range(10):\n    print(x)\n" * 200)
    given = ["--device", "cpu", "--model", "tiny", "--batch", "4", "--seeds", "0"]
    return [*given, "--data", str(tmp_path / "loop.py"), "--out", str(tmp_path / "runs.jsonl")]


def test_runs_of_the_wire_that_fail_or_are_far_do_not_cost_the_others(parity, capsys, monkeypatch):
    base, losses, gpus = wire_parity.BASE, {}, set()

    def spawn(work, given, nprocs):
        variant, seed, _, first, folder = given
        gpus.add(first)
        if (variant.name, seed) not in losses:
            raise torch.multiprocessing.ProcessRaisedException("Traceback\nOops: no", 1, 1)
        numbers = {"value": losses[variant.name, seed], "unit": "nats/byte"}
        wire_parity.numbers_in(folder).write_text(json.dumps(numbers))

    def run(*given):
        status = wire_parity.main([*parity, *given])
        return status, json.loads(capsys.readouterr().out.splitlines()[-1])

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    losses |= {(base, 0): 1.0, ("hook", 0): 1.002, (base, 1): 2.0, ("DataParallel", 1): 2.002}
    status, found = run("--seeds", "0", "1", "--jobs", "2", "--only", base, "hook", "DataParallel")
    assert (status, gpus) == (1, {0, 2})  # jobs have GPUs of their own
    assert found["failed"] == dict.fromkeys(("hook, seed 1", "DataParallel, seed 0"), "Oops: no")
    losses["hook", 1] = 2.004
    status, found = run("--seeds", "1", "--only", "hook")  # with what was recorded
    assert status == 0
    assert found["variants"]["hook"]["differences"] == pytest.approx({"0": 0.002, "1": 0.002})
    losses |= {("hook", 0): 1.02, ("hook", 2): 9.0}  # far, and without a baseline
    status, found = run("--seeds", "0", "2", "--only", "hook")
    assert (status, found["ok"], found["failed"]) == (1, False, {})
    assert found["variants"]["hook"]["differences"].keys() == {"0", "1"}


@pytest.mark.usefixtures("mesh")
def test_runs_that_diverge_say_so(parity, monkeypatch):
    options = wire_parity.parse([*parity, "--steps", "6", "--lr", "1e30"])
    with pytest.raises(RuntimeError, match="1 of 2 steps were skipped"):
        wire_parity.train(wire_parity.VARIANTS[0], 0, options, torch.device("cpu"))
    monkeypatch.setattr(wire_parity, "evaluate", lambda *_: float("nan"))
    with pytest.raises(RuntimeError, match="the validation loss is nan after 1 steps"):
        wire_parity.train(wire_parity.VARIANTS[0], 0, options, torch.device("cpu"))


# --- optimizers that explode

CASE = {case.name: case for case in optimizer_stress.CASES}
STRESS = optimizer_stress.parse(["--device", "cpu", "--size", "64", "--steps", "40"])


class Flushing(torch.optim.AdamW):
    """v below 2^-16 of its row's largest is lost, as in 8 bits of sqrt(v) with a zero."""

    @torch.no_grad()
    def step(self):
        super().step()
        for state in self.state.values():
            v = state["exp_avg_sq"]
            v[v < v.amax(-1, keepdim=True) * 2**-16] = 0


class Dividing(torch.optim.AdamW):
    """The scale of m is its largest magnitude, by which it divides even where that is zero."""

    @torch.no_grad()
    def step(self):
        super().step()
        for state in self.state.values():
            scale = state["exp_avg"].abs().max()
            state["exp_avg"].div_(scale).mul_(scale)


def stress(variant, case):
    return optimizer_stress.measure(variant, CASE[case], STRESS, 0)


def test_a_v_that_flushes_to_zero_and_a_weight_that_is_not_finite_are_found(
    monkeypatch, tmp_path, capsys
):
    library = SimpleNamespace(Flushing=Flushing, Dividing=Dividing, __version__="1")
    monkeypatch.setitem(sys.modules, "broken", library)
    variants = flushing, dividing = [
        optimizer_stress.Variant(f"fp8stack {k}", "broken", k) for k in ("Flushing", "Dividing")
    ]
    wide, first = stress(flushing, "wide"), stress(dividing, "zero first")
    assert (wide["explodes"], wide["finite"]) == (True, True)
    assert wide["max_ratio"] > 100
    assert wide["share_doubled"] > 0
    assert (first["explodes"], first["finite"]) == (True, False)
    assert not stress(flushing, "narrow")["explodes"]
    assert not stress(dividing, "zero")["explodes"]
    monkeypatch.setattr(optimizer_stress, "VARIANTS", variants)
    out = ["--device", "cpu", "--size", "64", "--steps", "40", "--out", str(tmp_path / "x.jsonl")]
    assert optimizer_stress.main([*out, "--cases", "narrow", "wide", "zero first"]) == 1
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = {"fp8stack Flushing": ["wide"], "fp8stack Dividing": ["zero first"]}
    assert verdict == {"ok": False, "explode": found, "not_measured": {}}


def test_stress_of_the_reference_of_ours_and_of_bitsandbytes():
    variants = {variant.name: variant for variant in optimizer_stress.VARIANTS}
    numbers = stress(variants["torch fp32"], "sparse")  # against itself
    assert numbers["update_error"] < 1e-5
    assert numbers["share_doubled"] == 0
    assert numbers["max_ratio"] == pytest.approx(1, abs=1e-4)
    assert numbers["max_update"] == pytest.approx(numbers["max_reference"])
    ours = variants["fp8stack 8bit"]  # does not see the scale of gradients
    errors = [stress(ours, case)["update_error"] for case in ("1e-6", "1e-7", "1e-12")]
    assert max(errors) < 0.06
    assert max(errors) == pytest.approx(min(errors), rel=0.01)
    numbers = stress(variants["bitsandbytes 8bit"], "wide")
    assert 2 < numbers["state_bytes"] < 3  # its tables count, 2 KiB beside 4096 elements
    assert numbers["update_error"] > 0.01


def test_gradients_of_stress_repeat_and_are_what_their_case_says():
    first, second = (list(optimizer_stress.gradients(CASE["sparse"], STRESS, 3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    absent = torch.stack(first).abs().amax(-1) == 0  # [steps, rows]
    assert 0.5 < absent.float().mean() < 0.9
    of = {name: list(optimizer_stress.gradients(case, STRESS, 0)) for name, case in CASE.items()}
    assert [not g.any() for g in of["zero"]] == [20 <= step < 30 for step in range(40)]
    assert [not g.any() for g in of["zero first"]] == [True] + [False] * 39
    silent = of["silent"]
    assert silent[19][:, ::3].all()
    assert not silent[25][:, ::3].any()
    assert 0 < silent[35][:, ::3].abs().mean() < 1e-5 * silent[35][:, 1::3].abs().mean()
    torch.testing.assert_close(of["1e-12"][0] * 1e12, of["zero"][0])
