"""Write weights and gradients from outside, run forwards and steps in between, and compare with what is shown.

A case draws a level, a recipe, an optimizer and a sequence of events. After each forward the output is compared with
float32 products of the weights that the parameters show; before each step a float32 optimizer of torch's gets the
gradients that `p.grad` shows, and the weights must move as its do, within the error of the formats.
"""

import copy
import random

import torch
from fuzzing import Broken, main
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fp8stack
from fp8stack.errors import Fp8StackError, ModelError

# of FP8 products, relative to the norm; a weight that is not followed is off by 1
FORWARD, DX = 0.08, 0.1
MOVED = {"sgd": 0.01, "momentum": 0.1, "adamw": 0.12}  # of the optimizers' 8-bit states
IN, OUT, ROWS = 48, 32, 16
LR = 0.02  # of AdamW


class Model(nn.Module):
    """Two layers and a bare parameter multiply one input, which is bounded, as delayed scaling wants it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(IN, OUT), nn.Linear(IN, OUT, bias=False)
        self.w = nn.Parameter(torch.randn(IN, OUT) * 0.1)

    def forward(self, x):
        return self.a(x) + self.b(x) + x @ self.w


class Case:
    """A model at a level, its optimizer, and a float32 optimizer of torch's that is fed what is shown."""

    def __init__(self, rng):
        self.rng = rng
        torch.manual_seed(rng.randrange(2**31))
        self.level = rng.choice(["O0", "O1", "O2"])
        self.kind = rng.choice(list(MOVED))
        recipe = rng.choice(["current", "delayed", "blockwise"])
        model = Model()
        make = self.optimizer_of(model.parameters())
        options = {
            "fp8_recipe": recipe, "matmuls": rng.random() < 0.5, "min_numel": 256, "compute": "native",
        }  # fmt: skip
        if self.level == "O2":
            options["master"] = rng.choice(["split24", "split32", "fp32", "none"])
        self.model, self.optimizer = fp8stack.initialize(model, make, self.level, **options)
        self.owned = list(self.model.parameters())
        self.twins = [nn.Parameter(p.detach().float().clone()) for p in self.owned]
        self.twin_optimizer = self.optimizer_of(self.twins)
        self.drawn = [self.level, self.kind, *options.values()]

    def optimizer_of(self, parameters):
        if self.kind == "adamw":
            return torch.optim.AdamW(parameters, lr=LR, weight_decay=0)
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.9 * (self.kind == "momentum"))

    def parameter(self):
        return self.rng.choice(list(self.model.parameters()))

    def value(self, p):
        """Return new contents of a parameter: of the usual size, or zero."""
        return torch.randn(p.shape) * self.rng.choice([0.1, 0.1, 0.2, 0.0])

    def close(self, what, found, expected, limit):
        error = float((found - expected).norm() / expected.norm().clamp(min=1e-3))
        if not error < limit:
            raise Broken(f"{what} is off by {error:.3f} after {self.drawn}")

    # --- events

    def forward(self):
        mode = self.rng.choice(["train", "train", "no_grad", "eval", "inference", "functional"])
        self.drawn.append(mode)
        x = torch.randn(ROWS, IN).clamp(-2, 2)
        x[0, 0] = 2.0
        given = {n: p.detach() for n, p in self.model.named_parameters()}
        if mode == "functional":
            given = {n: (self.value(p) + 0.01).to(p.dtype) for n, p in given.items()}
        expected = sum(x @ given[n].float().t() for n in ("a.weight", "b.weight"))
        expected = expected + given["a.bias"].float() + x @ given["w"].float()
        self.model.train(mode != "eval")
        if mode == "train":
            weights = given["a.weight"].float() + given["b.weight"].float() + given["w"].float().t()
            c = torch.randn(ROWS, OUT).clamp(-2, 2) / 100
            leaf = x.clone().requires_grad_()
            y = self.model(leaf)
            (y * c).sum().backward()
            self.close("dx", leaf.grad, c @ weights, DX)
        elif mode == "functional":
            y = torch.func.functional_call(self.model, given, (x,))
        else:
            context = torch.inference_mode() if mode == "inference" else torch.no_grad()
            with context:
                y = self.model(x) + 0
        self.close(f"forward ({mode})", y.detach(), expected, FORWARD)

    def step(self):
        if self.rng.random() < 0.3:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        masters, shown = [], []
        for p, twin in zip(self.owned, self.twins, strict=True):
            weight = p.detach().float()
            master = self.master(p)
            if not ((master - weight).abs() <= 2**-8 * weight.abs() + 1e-38).all():
                raise Broken(f"a master is not its weight after {self.drawn}")
            with torch.no_grad():
                twin.copy_(master)
            twin.grad = None if p.grad is None else p.grad.float().clone()
            masters.append(master)
            shown.append(weight)
        self.optimizer.step()
        self.twin_optimizer.step()
        for p, twin, before, weight in zip(self.owned, self.twins, masters, shown, strict=True):
            if p.grad is None:
                if not torch.equal(p.detach().float(), weight):
                    raise Broken(f"a weight without a gradient moved after {self.drawn}")
                continue
            rounding = before.norm() * (2**-8 if p.dtype is torch.bfloat16 else 1e-6)
            error = (self.master(p) - twin.detach()).norm() - rounding
            moved = (twin.detach() - before).norm()
            if (
                self.kind == "adamw"
            ):  # m is rounded in its own size, also where a new gradient cancels it
                moved = moved.clamp(min=LR * p.numel() ** 0.5 / 4)
            if not error <= MOVED[self.kind] * moved + 1e-9:
                raise Broken(f"a step is off by {float(error / moved):.3f} after {self.drawn}")
        if self.rng.random() < 0.8:
            self.optimizer.zero_grad(set_to_none=self.rng.random() < 0.8)

    def master(self, p):
        ours = hasattr(self.optimizer, "master_weight")
        return self.optimizer.master_weight(p) if ours else p.detach().clone()

    def write_gradient(self):
        p = self.parameter()
        if p.grad is None:
            return
        name = self.rng.choice(list(GRADIENT_WRITES))
        self.drawn.append(name)
        plain, factor = p.grad.detach().float().clone(), self.rng.choice([0.5, -1.0, 0.0, 3.0])
        GRADIENT_WRITES[name](p, factor)
        twin = nn.Parameter(torch.zeros_like(plain))
        twin.grad = plain
        GRADIENT_WRITES[name](twin, factor)
        self.close(f"gradient ({name})", p.grad.float(), twin.grad, 0.05)

    def write_weight(self):
        name = self.rng.choice(list(WEIGHT_WRITES))
        self.drawn.append(name)
        WEIGHT_WRITES[name](self)


def flip(p, factor):
    new = p.grad * factor
    p.grad = new


def swap_gradient(p, factor):
    grad, p.grad = p.grad, None
    torch.utils.swap_tensors(grad, grad.detach() * factor)
    p.grad = grad


GRADIENT_WRITES = {
    "grad.data =": lambda p, f: setattr(p.grad, "data", p.grad.data * f), "grad =": flip,
    "grad.view": lambda p, f: p.grad.view(-1)[:7].mul_(f), "grad[0]": lambda p, f: p.grad[0].mul_(f),
    "grad[0] =": lambda p, f: p.grad.__setitem__(0, f), "grad.t()": lambda p, f: p.grad.t()[1].fill_(f / 100),
    "grad.detach()": lambda p, f: p.grad.detach().mul_(f), "grad /=": lambda p, f: p.grad.div_(f or 2.0),
    "foreach": lambda p, f: torch._foreach_mul_([p.grad], f),
    "foreach views": lambda p, f: torch._foreach_mul_(p.grad.split(9), f),
    "grad.copy_": lambda p, f: p.grad.copy_(p.grad.flip(0) * f),
    "view as grad": lambda p, f: setattr(p, "grad", p.grad.mul_(f).view_as(p.grad)), "swap grad": swap_gradient,
    "clip value": lambda p, f: nn.utils.clip_grad_value_([p], 0.02),
}  # fmt: skip


def in_place(case):
    p = case.parameter()
    with torch.no_grad():
        case.rng.choice([p.copy_, p.set_])(case.value(p).to(p.dtype))
        p.mul_(case.rng.choice([0.5, 2.0, -1.0]))


def foreach(case):
    parameters = list(case.model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(parameters, -1.0)
        torch._foreach_copy_(parameters, [case.value(p) for p in parameters])


def views(case):
    p = case.parameter()
    with torch.no_grad():
        p.view(-1)[3] = 0.3
        p[0].mul_(-2)
        p.data.t()[1] = 0.1


def average(case):
    """Weights of an average are swapped in for a forward, and back: no bit of the masters is lost."""
    parameters = list(case.model.parameters())
    masters = [case.master(p) for p in case.owned]
    stored = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.data.copy_(case.value(p))
    case.forward()
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    for p, kept, gradient in zip(parameters, stored, gradients, strict=True):
        p.data.copy_(kept)
        p.grad = gradient
    for p, master in zip(case.owned, masters, strict=True):
        if not torch.equal(case.master(p), master):
            raise Broken(f"bits of a master are lost after {case.drawn}")


def swap(case):
    """As `module.to()` does under set_swap_module_params_on_conversion."""
    p = case.parameter()
    grad, p.grad = p.grad, None
    torch.utils.swap_tensors(p, nn.Parameter(case.value(p).to(p.dtype), p.requires_grad))
    p.grad = grad


def convert(case):
    """Move the model with torch's future way to: nothing changes."""
    before = parameters_to_vector(case.model.parameters())
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        case.model.to("cpu").load_state_dict(copy.deepcopy(case.model.state_dict()))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    if not torch.equal(parameters_to_vector(case.model.parameters()), before):
        raise Broken("a conversion changed weights")


def load(case):
    state = case.model.state_dict()
    case.model.load_state_dict({n: case.value(v) for n, v in state.items()})


def replace(case):
    """Other parameters take the place of the model's: a step of those of before is refused."""
    if case.rng.random() < 0.5:
        state = {n: case.value(v) for n, v in case.model.state_dict().items()}
        case.model.load_state_dict(state, assign=True)
    else:
        case.model.a.weight = nn.Parameter(case.value(case.model.a.weight))


def foreign(case):
    """Another optimizer steps the parameters."""
    parameters = [p for p in case.model.parameters() if p.grad is not None]
    if parameters:
        stepper = torch.optim.SGD(parameters, lr=3.0, foreach=case.rng.random() < 0.5)
        before = [p.detach().clone() for p in parameters]
        try:
            stepper.step()
        except ModelError:  # at O2 it is refused, and has changed nothing
            if case.level != "O2" or not all(map(torch.equal, parameters, before)):
                raise


def whole_vector(case):
    """Of one dtype: torch gives parameters the vector's."""
    dtype = case.parameter().dtype
    parameters = [p for p in case.model.parameters() if p.dtype is dtype]
    vector = torch.cat([case.value(p).flatten() for p in parameters]).to(dtype)
    vector_to_parameters(vector, parameters)


def toggle(case):
    p = case.parameter().requires_grad_(False)
    case.forward()
    p.requires_grad_(True)


WEIGHT_WRITES = {
    "data =": lambda case: [setattr(p, "data", case.value(p).to(p.dtype)) for p in [case.parameter()]],
    "data.copy_": lambda case: [p.data.copy_(case.value(p)) for p in [case.parameter()]],
    "dlpack": lambda case: [
        torch.from_dlpack(p.detach()).copy_(case.value(p)) for p in [case.parameter()]
    ],
    "init": lambda case: nn.init.normal_(case.parameter(), std=0.1),
    "in place": in_place, "foreach": foreach, "views": views, "average": average, "swap": swap, "convert": convert,
    "load": load, "replace": replace, "foreign": foreign, "vector": whole_vector, "toggle": toggle,
}  # fmt: skip


def one(rng: random.Random) -> str:
    case = Case(rng)
    events = (
        [case.forward] * 5 + [case.step] * 2 + [case.write_weight] * 3 + [case.write_gradient] * 3
    )
    for _ in range(rng.randint(6, 24)):
        event = rng.choice(events)
        try:
            event()
        except Broken:
            raise
        except Exception as error:
            if isinstance(error, ModelError) and "replace" in case.drawn and event == case.step:
                return "refused"  # the optimizer would step what was replaced
            kind = "own" if isinstance(error, Fp8StackError) else "foreign"
            raise Broken(f"{kind} {type(error).__name__}: {error} after {case.drawn}") from error
    return case.level


if __name__ == "__main__":
    main(one)
