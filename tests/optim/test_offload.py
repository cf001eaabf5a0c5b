"""States in pinned host memory: the same bits as on the GPU, less of it, and checkpoints that do not care."""

import copy

import pytest
import torch
from helpers import assert_same_bits, build, train

import fp8stack
from fp8stack import memory
from fp8stack.errors import Fp8StackWarning


def test_on_a_cpu_it_says_that_it_changes_nothing():
    with pytest.warns(Fp8StackWarning, match="no effect with a model on the CPU"):
        train(*build("O2", offload="cpu"), 1)


def make(offload, **recipe):
    return build("O2", "cuda", offload=offload, **recipe)


def states_of(model, optimizer):
    return {
        f"{name}.{key}": value.cpu()
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }


def assert_same_states(a, b):
    mine, other = states_of(*a), states_of(*b)
    assert mine.keys() == other.keys()
    for key, value in mine.items():
        assert_same_bits(value, other[key], key)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "recipe",
    [
        {}, {"states": "4bit", "master": "none"}, {"states": "fp8-lm", "master": "fp16"},
        {"states": "fp32", "master": "fp32"}, {"step_in_backward": True},
    ],
)  # fmt: skip
def test_offloaded_training_has_the_bits_of_training_on_the_gpu(recipe):
    torch.use_deterministic_algorithms(True, warn_only=True)
    offloaded, resident = make("cpu", **recipe), make("none", **recipe)
    assert train(*offloaded, 5, device="cuda") == train(*resident, 5, device="cuda")
    torch.use_deterministic_algorithms(False)
    assert_same_states(offloaded, resident)
    for state in offloaded[1].state.values():
        assert all(v.is_pinned() for v in state.values() if v.ndim)
    exported = [fp8stack.checkpoint.master_state_dict(*run) for run in (offloaded, resident)]
    assert_same_bits(exported[0].values(), exported[1].values())
    model, optimizer = fp8stack.restore(*offloaded)
    state = optimizer.state[model.up.weight]
    assert state["exp_avg"].device == model.up.weight.device
    train(model, optimizer, 1, start=5, device="cuda")


@pytest.mark.gpu
def test_nothing_but_weights_and_gradients_stays_on_the_gpu():
    model, optimizer = make("cpu")
    train(model, optimizer, 2, device="cuda")
    used = memory.measure(model, optimizer).per_parameter()
    assert used["master"] == used["m"] == used["v"] == 0
    assert used["host"] == pytest.approx(3.06, abs=0.05)
    assert fp8stack.get_report(model).bytes_per_parameter == pytest.approx(3.03, abs=0.02)
    assert "in pinned host memory" in fp8stack.get_report(model).states


@pytest.mark.gpu
def test_checkpoints_move_between_offloaded_and_resident_optimizers(tmp_path):
    first = make("cpu")
    train(*first, 3, device="cuda")
    fp8stack.checkpoint.save(tmp_path / "run.pt", *first)
    for offload in ("cpu", "none"):
        second = make(offload)
        fp8stack.checkpoint.load(tmp_path / "run.pt", *second)
        assert_same_states(first, second)
        pinned = {v.is_pinned() for s in second[1].state.values() for v in s.values() if v.ndim}
        assert pinned == {offload == "cpu"}
        train(*second, 1, start=3, device="cuda")


@pytest.mark.gpu
def test_a_captured_step_reads_the_host():
    p = torch.nn.Parameter(torch.randn(256, 512, device="cuda").bfloat16())
    p.grad = torch.randn_like(p)
    optimizer = fp8stack.optim.AdamW([p], offload="cpu")
    optimizer.step()
    twin, other = copy.deepcopy((p.detach(), p.grad)), torch.nn.Parameter(p.detach().clone())
    other.grad = twin[1]
    resident = fp8stack.optim.AdamW([other])
    resident.load_state_dict(optimizer.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
        resident.step()
    torch.cuda.synchronize()
    assert_same_bits(p.detach(), other.detach())
    assert_same_bits(optimizer.state[p]["exp_avg_code"], resident.state[other]["exp_avg_code"])


@pytest.mark.gpu
def test_the_reference_kernels_offload_too(choose_kernels):
    choose_kernels("reference")
    with pytest.warns(Fp8StackWarning, match="reference kernels"):
        offloaded, resident = make("cpu"), make("none")
    assert train(*offloaded, 2, device="cuda") == train(*resident, 2, device="cuda")
    assert_same_states(offloaded, resident)


@pytest.mark.gpu
def test_what_reads_the_state_waits_for_the_step():
    """The step is as long as the bus; the host must not read what it has not written yet."""
    for read in (
        lambda o: copy.deepcopy(o.state_dict())["state"][0]["exp_avg_code"],
        lambda o: copy.deepcopy(o).state_dict()["state"][0]["exp_avg_code"],
        lambda o: fp8stack.checkpoint.torch_state_dict(o)["state"][0]["exp_avg"].cpu(),
    ):
        results = []
        for offload in ("cpu", "none"):
            torch.manual_seed(0)
            p = torch.nn.Parameter(torch.randn(8192, 8192, device="cuda").bfloat16())
            optimizer = fp8stack.optim.AdamW([p], offload=offload)
            for _ in range(3):
                p.grad = torch.randn_like(p)
                optimizer.step()
            results.append(read(optimizer).cpu())
        assert torch.equal(*results)
