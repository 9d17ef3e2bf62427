"""What a step does to tensors themselves: another memory by ``.data =``, flags, ``.grad``, names.
Random programs in which it happens to an argument, a global, a view, a parameter and others, before
or after they are used; after each call everything is what eager leaves, or the step was refused.

    python tests/contract/test_tensor_effects.py --programs 2000 --seed 1
"""

import argparse
import collections
import itertools
import random
import sys
import warnings
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import treadle
from contract.python_effects import Picture, difference
from contract.worlds import OPTIONS, World, limited

BEGIN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
        self.register_buffer("b", torch.tensor([0.5, 1.5, -1.0], dtype=torch.float64))
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
BASE = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 2.5]], dtype=torch.float64)
T = torch.tensor([0.25, -0.75, 1.25], dtype=torch.float64)
V = BASE[1]
L = [torch.tensor([0.3, 0.2, 0.1], dtype=torch.float64)]
"""
STEP = """
def step(x, given, o):
    {make}
    {before}
    {do}
    {after}
    loss = ((model.w * x.detach()) ** 2).sum() + (model.b * model.w).sum() + {loss}
    {late}
    loss.backward()
    {end}
    opt.step()
    opt.zero_grad()
    return [loss.detach(), {gives}]

def view():
    return [BASE, T, V, L]
"""
TARGETS = {
    "argument": ("pass", "x"),
    "list element of an argument": ("pass", "given[0]"),
    "argument that needs a gradient": ("pass", "given[1]"),
    "global": ("pass", "T"),
    "view that is global": ("pass", "V"),
    "element of a global list": ("pass", "L[0]"),
    "view of an argument": ("v = o[1:]", "v"),
    "view of a global": ("v = BASE[0]", "v"),
    "detached argument": ("v = x.detach()", "v"),
    "made": ("v = x * 2", "v"),
    "made leaf": ("v = torch.ones_like(x)", "v"),
    "made leaf that needs one": ("v = (x * 2).detach().requires_grad_()", "v"),
    "made in the graph": ("v = x * model.w", "v"),
    "view in the graph": ("u = (x * model.w); v = u[:]", "v"),
    "parameter": ("pass", "model.w"),
    "buffer": ("pass", "model.b"),
    "detached parameter": ("v = model.w.detach()", "v"),
    "element of param_groups": ("pass", "opt.param_groups[0]['params'][0]"),
}
BACK = "{t}.requires_grad_(); ({t} ** 3).sum().backward(); "
DO = {
    ".data = computed": "{t}.data = {t}.data * 0.5 + 1",
    ".data = another's": "{t}.data = o[1:]",
    ".data = made": "new = x.detach() * 3; {t}.data = new",
    ".data = made, written later": "new = x.detach() * 3; {t}.data = new; new.add_(1)",
    ".data = parameter's": "{t}.data = model.w.data",
    ".data = clone": "{t}.data = {t}.data.clone()",
    ".data = itself": "{t}.data = {t}.data",
    ".data *=": "{t}.data *= 0.5",
    ".data +=": "{t}.data += x.detach()",
    ".data.copy_": "{t}.data.copy_(x.detach() * 2)",
    ".data.add_": "{t}.data.add_(1)",
    ".data[0] =": "{t}.data[0] = 4.0",
    ".data.zero_": "{t}.data.zero_()",
    ".data clamp": "{t}.data = torch.max(torch.min({t}.data, o[1:] + 0.1), o[1:] - 0.1)",
    ".data twice": "{t}.data = {t}.data + 1; {t}.data = {t}.data * 2",
    ".data and in place": "{t}.data = {t}.data + 1; {t}.detach().mul_(2)",
    "in place and .data": "{t}.detach().mul_(2); {t}.data = {t}.data + 1",
    ".data of another shape": "{t}.data = torch.ones(2, 3, dtype=torch.float64)",
    ".data scalar": "{t}.data = torch.zeros((), dtype=torch.float64)",
    "set_": "{t}.detach().set_(x.detach() * 2)",
    "set_ itself": "with torch.no_grad():\n        {t}.set_(x.detach() * 2)",
    "swap_tensors": "new = (x.detach() * 2); torch.utils.swap_tensors({t}, new)",
    "no_grad copy_": "with torch.no_grad():\n        {t}.copy_(x.detach() * 2)",
    "detach().copy_": "{t}.detach().copy_(x.detach() * 2)",
    "data swap": "tmp = {t}.data; {t}.data = o[1:].clone(); tmp.add_(5)",
    "setattr data": "setattr({t}, 'data', {t}.data - 1)",
    "function data": "torch.Tensor.data.__set__({t}, {t}.data - 1)",
    "requires_grad_": "{t}.requires_grad_()",
    "requires_grad =": "{t}.requires_grad = True",
    "requires_grad_ False": "{t}.requires_grad_(False)",
    "grad None": "{t}.grad = None",
    "grad set": "{t}.grad = x.detach() * 2",
    "detach_": "{t}.detach_()",
    "attribute": "{t}.tag = 3",
    "attribute tensor": "{t}.tag = x.detach() * 2",
    "fgsm": BACK + "{t}.data = {t}.data + 0.1 * {t}.grad.sign()",
    "fgsm clean": BACK
    + "s = ({t} + {t}.grad.sign()).detach(); {t}.requires_grad_(False); {t}.grad = None",
    "fgsm grad read": BACK + "s = {t}.grad.sign()",
    "fgsm autograd": "{t}.requires_grad_(); (g,) = torch.autograd.grad(({t} ** 3).sum(), {t})",
    "grad accumulates": BACK + "({t} ** 2).sum().backward()",
    "grad zero_": BACK + "{t}.grad.zero_()",
    "grad data": BACK + "{t}.grad.data = x.detach() * 2",
    "retain_grad": "{t}.retain_grad()",
    "flag and off": "{t}.requires_grad_(); {t}.requires_grad_(False)",
    "hook": "{t}.requires_grad_(); {t}.register_hook(lambda g: g * 2)",
    "unsqueeze_": "{t}.detach().unsqueeze_(0)",
    "unsqueeze_ itself": "with torch.no_grad():\n        {t}.unsqueeze_(0)",
    "resize_": "{t}.detach().resize_(2)",
}
BEFORE = {
    "": ("pass", "", ""),
    "used": ("y = ({t} * model.w).sum()", "y", ""),
    "squared": ("y = ({t} ** 2 * model.w ** 2).sum()", "y", ""),
    "data kept": ("old = {t}.data", "(old * model.w).sum()", "old"),
    "detached kept": ("old = {t}.detach()", "(old * model.w).sum()", "old"),
    "view kept": ("old = {t}[:2]", "(old * model.w[:2]).sum()", "old.detach()"),
    "clone kept": ("old = {t}.detach().clone()", "(old * model.w).sum()", "old"),
}
AFTER = {
    "": ("pass", "", ""),
    "used": ("z = ({t} * model.w).sum()", "z", ""),
    "squared": ("z = ({t} ** 2 * model.w).sum()", "z", ""),
    "returned": ("pass", "", "{t}"),
    "data returned": ("pass", "", "{t}.data"),
    "view": ("z = ({t}.reshape(-1)[0] * model.w).sum()", "z", ""),
    "no_grad": ("with torch.no_grad():\n        z = {t}.sum() * 1", "z", ""),
    "written": ("with torch.no_grad():\n        {t}.add_(1)", "", ""),
}
WHEN = ("do", "late", "end")

Case = tuple[str, str, str, str, str]


def text_of(case: Case) -> str:
    """A program in which something happens to a target, with what is done before and after."""
    target, do, before, after, when = case
    make, t = TARGETS[target]
    b, a = BEFORE[before], AFTER[after]
    places = dict.fromkeys(WHEN, "pass")
    places[when] = DO[do].format(t=t)
    loss = " + ".join(each.format(t=t) for each in (b[1], a[1]) if each) or "0"
    gives = ", ".join(each.format(t=t) for each in (b[2], a[2]) if each)
    first, last = b[0].format(t=t), a[0].format(t=t)
    return BEGIN + STEP.format(
        make=make, before=first, after=last, loss=loss, gives=gives, **places
    )


class Looked:
    """A world that is called, and what can be seen of it afterwards."""

    def __init__(self, text: str, *, compiled: bool) -> None:
        self.world = World(text)
        self.step: Any = self.world.step
        space = self.world.space
        if compiled:
            model, opt = space["model"], space["opt"]
            self.step = treadle.compile(self.step, model=model, optimizer=opt, options=OPTIONS)

    def call(self, number: int) -> tuple[Any, ...]:
        random = torch.Generator().manual_seed(number)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        data = normal(2, 3)
        given, other = [normal(3), normal(3).requires_grad_()], normal(4)
        with limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of gradients of what is no leaf
            result = self.step(data[0], given, other)
        values = tuple(Picture().of(each.detach().clone()) for each in result)
        return values, *self.seen([data, data[0], given, other])

    def seen(self, arguments: Any = ()) -> tuple[Any, ...]:
        """Values and flags, which tensors share memory, and how they lie there."""
        space = self.world.space
        model, outside = space["model"], space["view"]()
        picture = Picture().of([model, space["opt"], arguments, outside])
        tensors = [each for each in (model.w, model.b) if each is not None]
        tensors += _tensors([arguments, outside])
        first: dict[int, int] = {}
        keys = [each.untyped_storage().data_ptr() for each in tensors]
        same = tuple(first.setdefault(key, at) for at, key in enumerate(keys))
        lies = tuple((t.is_leaf, t.storage_offset(), tuple(t.stride())) for t in tensors)
        return picture, (same, lies)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for each in value for t in _tensors(each)] if isinstance(value, list) else []


def outcome(case: Case, calls: int = 3) -> tuple[str, str]:
    """``equal``, ``refused``, ``invalid`` (eager raises) or what is wrong, with a detail."""
    text = text_of(case)
    theirs, ours = Looked(text, compiled=False), Looked(text, compiled=True)
    try:
        expected = [theirs.call(number) for number in range(calls)]
    except Exception as error:
        return "invalid", repr(error)
    start = ours.seen()
    for number, right in enumerate(expected):
        try:
            found = ours.call(number)
        except treadle.TreadleError as error:
            if error.code not in ("TR-107", "TR-117") or not error.remedy:
                return "raw", str(error)
            left = number == 0 and difference(ours.seen(), start)
            return ("changed", left) if left else ("refused", error.code)
        except Exception as error:
            return "raw", repr(error)
        if detail := difference(found, right):
            return "stale", f"call {number}: {detail}"
    return "equal", ""


def cases(seed: int) -> list[Case]:
    """All programs, in a random order."""
    found = list(itertools.product(TARGETS, DO, BEFORE, AFTER, WHEN))
    random.Random(seed).shuffle(found)
    return found


def run(programs: int, seed: int) -> collections.Counter[str]:
    tally: collections.Counter[str] = collections.Counter()
    for case in cases(seed)[:programs]:
        how, detail = outcome(case)
        tally[how] += 1
        if how not in ("equal", "refused", "invalid"):
            print(f"{how} {case}: {detail}\n{text_of(case)}", flush=True)
    return tally


def test_tensors_are_left_as_in_eager_or_it_is_refused() -> None:
    tally = run(30, seed=41)
    assert not tally.keys() - {"equal", "refused", "invalid"}
    assert tally["equal"] > tally["refused"]


@pytest.mark.parametrize(
    ("target", "do"),
    [
        ("argument", ".data = computed"),
        ("view that is global", ".data twice"),
        ("parameter", ".data +="),
        ("parameter", ".data clamp"),
        ("made in the graph", "data swap"),
        ("list element of an argument", "fgsm"),
        ("argument", "fgsm clean"),
        ("argument that needs a gradient", "grad accumulates"),
        ("argument", "attribute tensor"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("before", ["data kept", "squared"])
def test_what_works_is_not_refused(target: str, do: str, before: str) -> None:
    assert outcome((target, do, before, "used", "do")) == ("equal", "")


def test_a_gradient_stays_with_a_tensor_that_gets_other_sizes() -> None:
    case = ("made leaf that needs one", ".data scalar", "view kept", "returned", "end")
    assert outcome(case) == ("equal", "")


def test_adversarial_training_by_projected_steps() -> None:
    """The perturbation is moved by ``.data``, as tutorials do."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        delta = torch.zeros_like(x).uniform_(-0.1, 0.1).requires_grad_()
        for _ in range(3):
            F.cross_entropy(net(x + delta), y).backward()
            delta.data = (delta + 0.05 * delta.grad.detach().sign()).clamp(-0.1, 0.1)
            delta.grad.zero_()
        opt.zero_grad()
        loss = F.cross_entropy(net(x + delta.detach()), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        opt = torch.optim.SGD(net.parameters(), lr=0.5)
        call = treadle.compile(step, model=net, optimizer=opt) if compiled else step
        torch.manual_seed(1)
        losses = [call(torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(4)]
        results.append([*losses, *(p.detach().clone() for p in net.parameters())])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_gradient_of_the_batch_by_its_own_flag() -> None:
    """The batch itself is asked for its gradient, and keeps flag and gradient."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.requires_grad_()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach(), (x + 0.1 * x.grad.sign()).detach()

    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        opt = torch.optim.SGD(net.parameters(), lr=0.5)
        call = treadle.compile(step, model=net, optimizer=opt) if compiled else step
        torch.manual_seed(1)
        found: list[Any] = []
        for _ in range(3):
            x, y = torch.randn(5, 6), torch.randint(3, (5,))
            for _ in range(2):  # the second time it has both
                found += [*call(x, y), x.requires_grad, x.grad.clone()]
        results.append([*found, *(p.detach().clone() for p in net.parameters())])
        if compiled:
            assert len(call.recompiles) == 1
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_parameters_of_one_vector() -> None:
    """Each of them becomes a part of it, and in the end has memory of its own."""

    def step(x: Tensor) -> Tensor:
        vector = nn.utils.parameters_to_vector(net.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 0.5, net.parameters())
        loss = (net(x) ** 2).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        call = treadle.compile(step, model=net, optimizer=opt) if compiled else step
        torch.manual_seed(1)
        losses = [call(torch.randn(5, 6)) for _ in range(3)]
        results.append([*losses, *(p.detach().clone() for p in net.parameters())])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_verify_puts_what_is_left_on_tensors_back() -> None:
    def step(x: Tensor) -> Tensor:
        x.requires_grad_()
        x.data = x.data * 2
        loss = (net(x) ** 2).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    net = nn.Linear(6, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(5, 6)
    memory, value = x.data_ptr(), x.clone()
    assert treadle.compile(step, model=net, optimizer=opt).verify([(x,)]) is None
    assert (x.data_ptr(), x.requires_grad, x.grad) == (memory, False, None)
    assert torch.equal(x, value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    found = run(chosen.programs, chosen.seed)
    print(dict(found))
    sys.exit(bool(found.keys() - {"equal", "refused", "invalid"}))
