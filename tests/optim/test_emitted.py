"""FP8 weights that steps write for the next forward: always the cast of the weight, with a scale it fits."""

import pytest
import torch
from torch import nn

from fp8stack import BlockScaledTensor
from fp8stack.errors import ConfigError, ModelError
from fp8stack.formats import E4M3
from fp8stack.kernels.reference.emit import HEADROOM
from fp8stack.kernels.reference.quantize import scale_and_inverse
from fp8stack.optim import SGD, AdamW, Lion, Muon, base

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, from the interpreter

SHAPES = [(16, 256), (12, 208), (7, 50), (130,)]
OPTIMIZERS = {
    "adamw": lambda p, **o: AdamW(p, lr=1e-2, min_numel=256, **o),
    "sgd": lambda p, **o: SGD(p, lr=1e-2, momentum=0.9, min_numel=256, **o),
    "lion": lambda p, **o: Lion(p, lr=1e-3, min_numel=256, **o),
    "muon": lambda p, **o: Muon(p, lr=1e-2, min_numel=256, **o),
}


@pytest.fixture(params=["kernels", "reference"])
def device(request, kernel_device, monkeypatch):
    """Steps through the kernels, and in plain torch."""
    monkeypatch.setattr(base, "triton_runs_on", lambda device: request.param == "kernels")
    return kernel_device if request.param == "kernels" else "cpu"


def parameters_on(device, dtype=torch.bfloat16, shapes=SHAPES):
    return [nn.Parameter(torch.randn(s).to(device, dtype)) for s in shapes]


def set_gradients(parameters, scale=0.1):
    for p in parameters:
        g = torch.randn(p.shape).to(p.device, p.dtype) * scale
        p.grad = BlockScaledTensor.quantize(g) if p.ndim > 1 else g


def assert_cast(parameter, codes, scale):
    """The codes are those of weight / scale rounded to nearest, and nothing saturates."""
    x, scale = parameter.detach().float().cpu(), scale.cpu()
    assert x.abs().max() <= scale * E4M3.max * (1 + 2**-22)
    assert x.abs().max() > scale * E4M3.max / 2  # and no range is wasted
    expected = (x * (1 / scale)).to(E4M3.dtype)
    assert torch.equal(codes.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("master", ["split24", "split32", "fp32", "none", "fp16"])
def test_codes_are_the_cast_of_the_new_weight(name, master, device):
    parameters = parameters_on(device)
    optimizer = OPTIMIZERS[name](parameters, master=master)
    optimizer.emit(parameters[:3])
    for p in parameters[:3]:
        assert_cast(p, *optimizer.emitted(p))
    addresses = [optimizer.emitted(p)[0].data_ptr() for p in parameters[:3]]
    for _ in range(3):
        set_gradients(parameters)
        before = [p.detach().clone() for p in parameters]
        optimizer.step()
        for p, old in zip(parameters[:3], before, strict=False):
            assert not torch.equal(p, old)
            assert optimizer.emitting[p].is_of(p)  # written by the step, not cast afterwards
            assert_cast(p, *optimizer.emitted(p))
    assert addresses == [optimizer.emitted(p)[0].data_ptr() for p in parameters[:3]]


def test_float32_weights_and_vectors_are_emitted_too(device):
    parameters = parameters_on(device, torch.float32)
    optimizer = AdamW(parameters, lr=1e-2, min_numel=256, states="fp32")
    optimizer.emit(parameters)
    set_gradients(parameters)
    optimizer.step()
    for p in parameters:
        assert_cast(p, *optimizer.emitted(p))


def test_steps_are_the_same_with_and_without(device):
    runs = []
    for emits in (True, False):
        torch.manual_seed(4)
        parameters = parameters_on(device)
        optimizer = AdamW(parameters, lr=1e-2, min_numel=256)
        if emits:
            optimizer.emit(parameters)
        for _ in range(3):
            set_gradients(parameters)
            optimizer.step()
        runs.append((parameters, optimizer))
    for p, q in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.equal(p, q)
        for key, value in runs[1][1].state[q].items():
            assert torch.equal(runs[0][1].state[p][key], value), key


def test_a_weight_that_outgrows_its_scale_is_cast_again(device):
    (p,) = parameters_on(device, shapes=[(16, 256)])
    optimizer = AdamW([p], lr=3.0)
    optimizer.emit([p])
    amax = p.detach().abs().max().item()
    set_gradients([p])
    optimizer.step()
    assert p.detach().abs().max().item() > HEADROOM * amax
    assert_cast(p, *optimizer.emitted(p))
    exact, _ = scale_and_inverse(p.detach().float().abs().max().cpu(), E4M3)
    assert torch.equal(optimizer.emitted(p)[1].cpu(), exact)
    optimizer.param_groups[0]["lr"] = 1e-3
    set_gradients([p])
    optimizer.step()  # the scale chosen from the last weights fits
    assert torch.equal(optimizer.emitted(p)[1].cpu(), (exact * HEADROOM).cpu())
    assert_cast(p, *optimizer.emitted(p))


def test_a_skipped_step_leaves_codes_and_scales(device):
    parameters = parameters_on(device)
    optimizer = AdamW(parameters, lr=1e-2, min_numel=256)
    optimizer.emit(parameters)
    set_gradients(parameters)
    optimizer.step()
    p = parameters[0]
    before = [
        x.clone().view(torch.uint8)
        for x in (optimizer.emitting[p].codes, optimizer.emitting[p].scales)
    ]
    set_gradients(parameters)
    parameters[3].grad[0] = torch.inf
    optimizer.step()
    after = [
        x.view(torch.uint8) for x in (optimizer.emitting[p].codes, optimizer.emitting[p].scales)
    ]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_weight_that_somebody_else_changes_is_cast_when_asked_for(device):
    (p,) = parameters_on(device, shapes=[(16, 256)])
    optimizer = AdamW([p])
    optimizer.emit([p])
    with torch.no_grad():
        p.mul_(100.0)
    assert_cast(p, *optimizer.emitted(p))
    set_gradients([p])
    optimizer.step()
    assert_cast(p, *optimizer.emitted(p))


def test_a_nan_weight_shows_in_the_scale(device):
    (p,) = parameters_on(device, shapes=[(16, 256)])
    optimizer = AdamW([p])
    optimizer.emit([p])
    with torch.no_grad():
        p[3, 4] = torch.nan
    set_gradients([p])
    optimizer.step()
    assert optimizer.emitted(p)[1].isnan()


def test_a_transposed_weight_is_emitted_in_its_own_shape(device):
    p = nn.Parameter(torch.randn(256, 32).bfloat16().to(device).t())
    optimizer = AdamW([p], lr=1e-2)
    optimizer.emit([p])
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert_cast(p, *optimizer.emitted(p))


def test_a_sharded_weight_is_refused(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    p = nn.Parameter(distribute_tensor(torch.randn(64, 128), mesh, [Shard(0)]))
    with pytest.raises(ModelError, match=r"is sharded .*cannot emit it"):
        AdamW([p]).emit([p])


@pytest.mark.gpu
def test_a_captured_step_emits():
    (p,) = parameters_on("cuda", shapes=[(256, 512)])
    optimizer = AdamW([p], lr=1e-2)
    optimizer.emit([p])
    set_gradients([p])
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert_cast(p, optimizer.emitting[p].codes, optimizer.emitting[p].scales[0])


@pytest.mark.parametrize("factor", [100.0, 1e-4])
def test_a_weight_that_was_changed_before_a_step_is_cast_with_its_own_scale(factor, device):
    """Also if the step is skipped, which leaves the codes as they were."""
    for bad in (False, True):
        (p,) = parameters_on(device, shapes=[(16, 256)])
        optimizer = AdamW([p], lr=1e-6)
        optimizer.emit([p])
        with torch.no_grad():
            p.mul_(factor)
        set_gradients([p])
        if bad:
            p.grad = torch.full_like(p, torch.nan)
        optimizer.step()
        assert float(optimizer.skipped_steps) == bad
        assert_cast(p, *optimizer.emitted(p))


def test_a_master_that_is_set_is_emitted(device):
    (p,) = parameters_on(device, shapes=[(16, 256)])
    optimizer = AdamW([p])
    optimizer.emit([p])
    optimizer.set_master(p, torch.randn(16, 256, device=device))
    assert_cast(p, *optimizer.emitted(p))
    p.data = torch.randn_like(p)
    assert_cast(p, *optimizer.emitted(p))


def test_a_weight_that_is_not_emitted_is_named():
    p = nn.Parameter(torch.randn(16, 256))
    with pytest.raises(ConfigError, match=r"shape \(16, 256\) is not emitted.*optimizer.emit"):
        AdamW([p]).emitted(p)


@pytest.mark.gpu
def test_a_weight_may_move_to_the_gpu_after_it_was_asked_for():
    model = nn.Linear(256, 64, bias=False).bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    optimizer.emit([model.weight])
    model.cuda()
    model.weight.grad = torch.randn_like(model.weight)
    optimizer.step()
    assert_cast(model.weight, *optimizer.emitted(model.weight))
