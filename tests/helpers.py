"""What several test files need: bitwise comparison, exact oracles, steps of optimizers, and small models with data."""

import fcntl
import gc
import io
import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8stack
from fp8stack import BlockScaledTensor
from fp8stack.formats import E4M3, E5M2, FORMATS, MiniFloat
from fp8stack.kernels.reference import step as reference
from fp8stack.kernels.reference.fp8 import encode
from fp8stack.kernels.reference.master import split
from fp8stack.kernels.reference.power_of_two import decode_tensor, encode_tensor
from fp8stack.kernels.reference.quantize import (
    dequantize_blocks,
    quantize_blocks,
    scale_and_inverse,
)
from fp8stack.kernels.reference.step import HYPER, StepKind, StepTensors, load_master
from fp8stack.kernels.reference.step_scalars import phase_of
from fp8stack.nn import convert

# Layers of tests are so small that a GPU is faster in bfloat16; tests/nn/test_select.py puts the rule back.
convert.least_rows_of = lambda model: {}
# looking for cycles takes a fifteenth of the time otherwise; forks have this, too
gc.set_threshold(50_000)
if not torch.cuda.is_available():
    # each torch.manual_seed would write down the stack twice, for a GPU that does not come: a millisecond and more
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None

NAN, INF = math.nan, math.inf
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INPUTS = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
OCP = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def every_two(modulus: int, **values: Any) -> pytest.MarkDecorator:
    """Parametrize a test by one in `modulus` of all combinations, in which every two values still come together,
    provided that each argument has `modulus` values or more."""
    cells = product(*map(enumerate, values.values()))
    chosen = [[v for _, v in cell] for cell in cells if sum(i for i, _ in cell) % modulus == 0]
    return pytest.mark.parametrize(tuple(values), chosen, ids=str)


def need_gpus(count: int) -> None:
    """Skip a test where there are fewer GPUs."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell",
)  # fmt: skip


def find_browser() -> str:
    """Return the path of a browser; skip the test where none is installed."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no page was shown to a browser: none of {', '.join(BROWSERS)} is installed")
    return browser


def run_python(
    *arguments: Any, cwd: Any = None, python: Any = sys.executable, **environment: str
) -> Any:
    """Run Python as a process of its own; return it when it has ended, with what it printed on each stream as text."""
    command, told = [python, *map(str, arguments)], {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=told, capture_output=True, text=True, timeout=300)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make(folder)` fills once a session: in one worker of pytest-xdist, for which others wait.

    A fixture of a module or session alone would make it in each worker that has one of its tests.
    """
    base = factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder, whole = base / name, base / f"{name}.made"
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder


def refused_in_a_line(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """Return the one line with which the program `fp8stack` refuses its arguments; it prints nothing else."""
    from fp8stack.__main__ import main

    with pytest.raises(SystemExit) as raised:
        main(list(map(str, arguments)))
    assert raised.value.code == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    return error


def bits(x: Tensor) -> Tensor:
    """Return the bytes of `x` on the CPU, as a flat uint8 tensor. NaNs are made one: their payload is the device's."""
    x = x.detach().cpu().contiguous().reshape(-1)
    if x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.where(x.isnan(), torch.nan, x)
    return x.view(torch.uint8)


def assert_same_bits(actual: Any, expected: Any, what: str = "") -> None:
    """Fail unless both have the same dtype, shape and bytes, or all pairs of both do; say where they first differ."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), what
        for key, value in expected.items():
            assert_same_bits(actual[key], value, f"{what} {key}")
        return
    if not isinstance(expected, Tensor):
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(one, other, f"{what} [{i}]")
        return
    assert actual.dtype is expected.dtype, f"{what}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    a, e = bits(actual), bits(expected)
    if not torch.equal(a, e):
        first = int((a != e).nonzero()[0]) // actual.element_size()
        index = [int(i) for i in torch.unravel_index(torch.tensor(first), actual.shape)]
        values = (
            actual.detach().flatten()[first].float(),
            expected.detach().flatten()[first].float(),
        )
        share = (a != e).float().mean()
        raise AssertionError(
            f"{what}: first difference at {index}: {values}; {share:.2%} of bytes differ"
        )


def order(codes: Tensor, fmt: MiniFloat) -> Tensor:
    """Return the place of each code among the values of its format, an integer; NaN's is beyond them."""
    raw = codes.view(torch.uint8).int()
    return torch.where(raw >= 128, -(raw & 127), raw)


def assert_nearly_the_same(results, expected, fmt: MiniFloat) -> None:
    """Compare codes, transposed codes and scale of each operand: no code differs by more than one, and few do."""
    assert len(results) == len(expected)
    for given, same in zip(results, expected, strict=True):
        given = given.to(same.device)
        assert (given.shape, given.dtype) == (same.shape, same.dtype)
        if not given.ndim:
            assert torch.allclose(given, same, rtol=2**-17, atol=0, equal_nan=True)
            continue
        own = fmt if given.dtype is fmt.dtype else E4M3
        difference = (order(given, own) - order(same, own)).abs()
        distance = (given.float() - same.float()).abs()
        seen = distance > 2**-18 * own.max
        assert (difference[seen] <= 1).all()
        assert (difference[seen] > 0).sum() <= max(2, difference.numel() // 500)
    for i in range(0, len(results) - 2, 3):  # of backward
        codes, codes_t = (t.cpu().view(torch.uint8) for t in results[i : i + 2])
        assert_same_bits(codes_t, codes.t().contiguous())


def quantize_tensor(x: Tensor, fmt: MiniFloat) -> tuple[Tensor, Tensor]:
    """Return codes (fmt.dtype, x's shape) and scale (float32, 0-d) of a tensor with one scale, as they are defined."""
    x = x.float()
    amax = x.abs().amax() if x.numel() else x.new_zeros(())
    scale, inverse = scale_and_inverse(amax, fmt)
    return encode(torch.where(inverse > 0, x * inverse, 0.0), fmt).view(fmt.dtype), scale


def grid(fmt: MiniFloat) -> Tensor:
    """Return every finite non-negative value of `fmt`, ascending, float64, from the definition of the format."""
    mantissas = torch.arange(2**fmt.mantissa_bits, dtype=torch.float64)
    step = fmt.min_positive
    rows, exponent = [mantissas * step], 0
    while rows[-1][-1] < fmt.max:
        rows.append((2**fmt.mantissa_bits + mantissas) * step * 2**exponent)
        exponent += 1
    values = torch.cat(rows)
    return values[values <= fmt.max]


def nearest(x: Tensor, fmt: MiniFloat) -> Tensor:
    """Round |x| to `grid(fmt)` by search, saturating; float64. The oracle for `encode`.

    Ties go to the even index in the formats that hardware casts to, away from zero in the optimizer's own.
    """
    values = grid(fmt)
    magnitude = x.double().abs().clamp(max=fmt.max)
    upper = torch.searchsorted(values, magnitude).clamp(max=len(values) - 1)
    lower = (upper - 1).clamp(min=0)
    below, above = magnitude - values[lower], values[upper] - magnitude
    tie_goes_down = (lower % 2 == 0) & (fmt.dtype is not torch.uint8)
    take_lower = (below < above) | ((below == above) & tie_goes_down)
    chosen = torch.where(magnitude == values[upper], upper, torch.where(take_lower, lower, upper))
    return values[chosen] * torch.where(torch.signbit(x), -1.0, 1.0)


MOMENTS = {  # the kinds of m and v that the states of an optimizer are made of
    "8bit": ("s1e3m4", "ue3m5"), "fp8": ("e4m3", "e4m3_root"), "4bit": ("s1e3m4", "ue3m1"),
    "fp8-lm": ("tensor", "tensor"), "bf16": ("dense", "dithered"), "fp32": ("dense", "dense"),
    "keep": ("dense", "dense"), "none": ("", ""),
}  # fmt: skip
MASTERS = {
    "split24": "split", "split32": "split", "fp32": "dense", "fp16": "tensor", "none": "dithered", "keep": "",
}  # fmt: skip


@dataclass(frozen=True)
class StepCase:
    """The formats of one optimizer step."""

    algorithm: str = "adam"
    states: str = "fp32"
    master: str = "keep"
    gradient: torch.dtype | str = torch.float32  # or "blocks"
    weight: torch.dtype | None = None  # None: bfloat16, or float32 without a master
    coupled: bool = False

    def __str__(self) -> str:
        dtype = f"-{self.dtype}" if self.weight else ""
        parts = [self.algorithm, self.states, self.master + dtype, self.gradient]
        name = "-".join(str(part).removeprefix("torch.") for part in parts)
        return (name + "-coupled" * self.coupled).replace("torch.", "")

    @property
    def dtype(self) -> torch.dtype:
        return self.weight or (torch.float32 if self.master == "keep" else torch.bfloat16)

    @property
    def kind(self) -> StepKind:
        m, v = MOMENTS[self.states]
        v = v if self.algorithm == "adam" else ""
        return StepKind(self.algorithm, self.coupled, m, v, MASTERS[self.master])


BLOCKS, BF16, FP16 = "blocks", torch.bfloat16, torch.float16
STEP_CASES = [  # every algorithm, format of state, master and gradient; the first is the default optimizer's
    StepCase("adam", "8bit", "split24", BLOCKS), StepCase("adam", "8bit", "split32", BF16, coupled=True),
    StepCase("adam", "8bit", "none", BLOCKS), StepCase("adam", "8bit", "fp32", FP16, weight=FP16),
    StepCase("adam", "fp8", "split24", BLOCKS, coupled=True), StepCase("adam", "fp8", "keep"),
    StepCase("adam", "4bit", "split24", BLOCKS), StepCase("adam", "4bit", "none", BF16, coupled=True),
    StepCase("adam", "4bit", "none", BLOCKS), StepCase("adam", "4bit", "split32"),
    StepCase("adam", "bf16", "split24", BF16), StepCase("adam", "bf16", "none", BLOCKS, coupled=True),
    StepCase("adam", "fp32", "keep"), StepCase("adam", "fp32", "fp32", BLOCKS, coupled=True),
    StepCase("adam", "keep", "keep", BF16, weight=BF16),
    StepCase("adam", "keep", "keep", FP16, weight=FP16, coupled=True), StepCase("adam", "fp8-lm", "fp16", BLOCKS),
    StepCase("adam", "fp8-lm", "split24", coupled=True), StepCase("adam", "fp8-lm", "keep", BF16),
    StepCase("sgd", "none", "split24", BF16, coupled=True), StepCase("sgd", "8bit", "split24", BLOCKS, coupled=True),
    StepCase("sgd", "fp32", "keep"), StepCase("sgd", "fp8-lm", "fp16", BLOCKS),
    StepCase("nesterov", "8bit", "split32", BF16), StepCase("nesterov", "fp32", "keep", FP16, coupled=True),
    StepCase("lion", "8bit", "split24", BLOCKS), StepCase("lion", "8bit", "none", BF16),
    StepCase("lion", "fp8", "fp32", coupled=True), StepCase("muon", "8bit", "keep", BLOCKS, weight=BF16),
    StepCase("muon", "fp32", "keep", BF16, weight=BF16),
]  # fmt: skip


def make_hyper(
    algorithm: str = "adam", step: int = 1, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8, decay: float = 0.0, coupled: float = 0.0, grad_mul: float = 1.0, apply: float = 1.0,
    gain: float | None = None, seed: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the scalars of a step, as the optimizer fills them: float32 [16], columns as `HYPER`."""
    adam, averages = algorithm == "adam", algorithm in ("adam", "lion", "muon")
    if gain is None:
        gain = 1 - betas[0] if averages else 1.0
    row = {
        "grad_mul": grad_mul, "decay": 1 - lr * decay, "step_size": lr / (1 - betas[0] ** step) if adam else lr,
        "inv_sqrt_bc2": (1 - betas[1] ** step) ** -0.5 if adam else 1.0, "apply": apply,
        "beta1": betas[0], "gain": gain, "beta2": betas[1], "one_minus_beta2": 1 - betas[1],
        "eps": max(eps, 2.0**-126), "weight_decay": coupled,
    }  # fmt: skip
    hyper = torch.zeros(16)
    hyper[:11] = torch.tensor([row[name] for name in HYPER[:11]])
    words = torch.tensor([12345 if seed is None else seed, int(phase_of(torch.tensor(step)))])
    hyper[11:13] = (words << 32 >> 32).to(torch.int32).view(torch.float32)
    return hyper


class Step:
    """The tensors of one parameter and of its optimizer's state, drawn at random; its fields are `StepTensors`'."""

    def __init__(
        self, case: StepCase, shape: tuple[int, ...], device: str = "cpu", draw: Any = torch.randn
    ) -> None:
        self.case, self.kind, self.device = case, case.kind, device
        self.tensors = StepTensors(*[None] * 9)  # type: ignore[arg-type]
        self.set(grad=draw(shape) * 0.1, m=draw(shape) * 0.1, v=(draw(shape) * 0.1).square())
        self.set(weight=draw(shape))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensors, name)

    def set(self, **values: Tensor) -> "Step":
        """Encode float32 values of weight, gradient or moments in their formats; each becomes a new tensor."""
        new: dict[str, Tensor | None] = {}
        for name, x in values.items():
            x = x.clone()
            kind, scale = {"m": self.kind.m, "v": self.kind.v}.get(name, "dense"), None
            if name == "weight":
                x, new["master"], new["master_scale"] = self._encode_weight(x)
            elif name == "grad" and self.case.gradient == "blocks":
                x, scale = quantize_blocks(x, E4M3)
            elif name == "grad":
                x = x.to(self.case.gradient)
            elif kind in FORMATS:
                x, scale = quantize_blocks(x, FORMATS[kind])
            elif kind == "tensor":
                x, scale = encode_tensor(
                    x, E4M3.dtype if name == "m" else torch.float16, name == "v"
                )
            elif kind == "":
                x = None
            else:
                narrow = {"bf16": BF16, "keep": self.case.dtype}
                x = x.to(narrow.get(self.case.states, torch.float32))
            new[name] = x
            if name != "weight":
                new["grad_block_scale" if name == "grad" else f"{name}_scale"] = scale
        moved = {k: None if x is None else x.contiguous().to(self.device) for k, x in new.items()}
        self.tensors = self.tensors._replace(**moved)
        return self

    def _encode_weight(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self.kind.master == "split":
            return *split(x, torch.int8 if self.case.master == "split24" else torch.int16), None
        if self.kind.master == "tensor":
            codes, scale = encode_tensor(x, torch.float16)
            return decode_tensor(codes, scale).to(self.case.dtype), codes, scale
        return x.to(self.case.dtype), x if self.kind.master == "dense" else None, None

    def zero_states(self) -> "Step":
        zeros = torch.zeros(self.tensors.weight.shape)
        return self.set(m=zeros, v=zeros)

    def copy(self, device: str) -> "Step":
        """Return the same tensors, copied to `device`."""
        other = object.__new__(Step)
        other.case, other.kind, other.device = self.case, self.kind, device
        moved = [None if x is None else x.clone().to(device) for x in self.tensors]
        other.tensors = StepTensors(*moved)  # type: ignore[arg-type]
        return other

    def step(self, hyper: Tensor, fast: bool = True) -> "Step":
        """Take the step: with the reference on a CPU, with the Triton kernel on a GPU."""
        if self.device == "cpu":
            reference.step(self.kind, self.tensors, hyper)
        else:
            launch_steps([self], [hyper], fast)
        return self

    def assert_same(self, expected: dict[str, Tensor], what: str = "") -> None:
        """Fail unless what a step writes has the bits of `expected`, which another's `written` returned."""
        assert_same_bits({name: getattr(self, name) for name in expected}, expected, what)

    def written(self) -> dict[str, Tensor]:
        """Return copies of everything that a step writes."""
        named = self.tensors._asdict().items()
        return {n: x.clone() for n, x in named if x is not None and not n.startswith("grad")}

    @property
    def value(self) -> Tensor:
        """The weight that the optimizer accumulates in, float32."""
        return load_master(self.weight, self.master, self.master_scale)

    @property
    def moments(self) -> tuple[Tensor | None, Tensor | None]:
        """m and v in float32."""
        m, v = (self.kind.m, self.m, self.m_scale), (self.kind.v, self.v, self.v_scale)
        return self._decode(*m), self._decode(*v)

    @property
    def gradient(self) -> Tensor:
        if self.grad_block_scale is None:
            return self.grad.float()
        return dequantize_blocks(self.grad, self.grad_block_scale, E4M3)

    def _decode(self, kind: str, codes: Tensor | None, scale: Tensor | None) -> Tensor | None:
        if codes is None or scale is None:
            return None if codes is None else codes.float()
        if kind == "tensor":
            return decode_tensor(codes, scale)
        return dequantize_blocks(codes, scale, FORMATS[kind], shape=self.weight.shape)


def launch_steps(
    steps: list[Step], hypers: list[Tensor], fast: bool = True, without: int | None = None
) -> None:
    """Take the steps of tensors of the same kind in one launch; row `without` of the table has no gradient."""
    from fp8stack.kernels import step as triton
    from fp8stack.kernels.pointer_table import COLUMN, deal, upload_rows

    (launch,) = {triton.launch_of(x.kind, x.tensors) for x in steps}
    device = steps[0].weight.device
    rows = [triton.table_row(x.weight.shape, **x.tensors._asdict()) for x in steps]
    owner, table = deal(rows, triton.BLOCKS, "first", device), upload_rows(rows, device)
    if without is not None:
        for name in ("grad", "grad_block_scale", "blocks"):
            table[without, COLUMN[name]] = 0
    amax = torch.zeros(len(rows), 4, dtype=torch.int32, device=device)
    triton.step_table(launch, table, owner, torch.stack(hypers).to(device), amax, fast)
    assert not amax.any()


class TinyLM(nn.Module):
    """Embedding, MLP block with norm and biases, head: every kind of parameter that a level treats differently."""

    def __init__(self, vocab: int = 320, dim: int = 128, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm = nn.RMSNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


class TinyLMWithUnused(TinyLM):
    """Has a layer that every second call leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, *args: Tensor) -> Tensor:
        self.calls += 1
        loss = super().forward(*args)
        if self.calls % 2:
            return loss
        return loss + self.extra(torch.ones_like(self.extra.bias)).sum() * 1e-3


def build(
    level=None, device="cpu", tied=False, dtype=torch.float32, optimizer=torch.optim.AdamW, **options
) -> tuple[nn.Module, torch.optim.Optimizer]:  # fmt: skip
    """Return a TinyLM and its optimizer, always the same, initialized at a level if one is given."""
    torch.manual_seed(0)
    model = TinyLM(tied=tied).to(device, dtype)
    made = optimizer(model.parameters(), lr=3e-3)
    return fp8stack.initialize(model, made, level, **options) if level else (model, made)


def batch(step: int, device: str = "cpu", size: int = 4, length: int = 33) -> tuple[Tensor, Tensor]:
    """Return a learnable next-token task: targets are an affine map of the tokens."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 64, (size, length), generator=generator)
    return tokens.to(device), ((tokens * 7 + 3) % 64).to(device)


def train(
    model: nn.Module, optimizer, steps: int, start: int = 0, device: str = "cpu"
) -> list[float]:
    """Take `steps` optimizer steps on `batch(start)`, `batch(start + 1)`, ...; return the losses."""
    losses = []
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = model(*batch(step, device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_clipped(model: nn.Module, optimizer, loss_of, steps) -> Tensor:
    """Take a step on `loss_of(step)` for each of `steps`, its gradients clipped; return the losses."""
    losses = []
    for step in steps:
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def through_file(contents: Any) -> Any:
    """Return what torch.save wrote of `contents`, read with weights_only=True."""
    file = io.BytesIO()
    torch.save(contents, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def random_parameters(
    shapes: list[tuple[int, ...]], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Return parameters of these shapes, the same ones at every call."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    return [nn.Parameter(value.to(device, dtype)) for value in values]


def set_gradients(
    parameters: list[nn.Parameter], step: int, fp8: bool = False, scale: float = 0.1
) -> None:
    """Give parameters the gradients of a step: in FP8 those of at least two dimensions, or ordinary ones."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in parameters:
        g = (torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype)
        p.grad = BlockScaledTensor.quantize(g) if fp8 and p.ndim > 1 else g


def snapshot(
    parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[tuple[int, str], Tensor]:
    """Return copies of all that a step may change."""
    entries = [{"weight": p.detach(), **optimizer.state[p]} for p in parameters]
    return {(i, key): x.clone() for i, entry in enumerate(entries) for key, x in entry.items()}
