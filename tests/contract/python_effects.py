"""What a step may change, as statements, and a picture of everything that can be seen of a world."""

# ruff: noqa: E501 -- a table whose rows are programs

import collections
import dataclasses
import types
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Effect:
    """``at``: where in the step (start, forward, backward, end). ``view``: what else is looked at.
    ``gives``: what the step also returns. ``refusable``: that a refusal is as good."""

    name: str
    text: str
    before: str = ""
    at: str = "end"
    view: str = "None"
    gives: str = ""
    refusable: bool = False


VALUES = (
    "3", "2.5", "'text'", "None", "True", "(1, 2)", "x.sum().detach()", "x.detach() * 2", "x",
    "x[0]", "[x.sum(), 3]", "dict(a=x * 2, b=1)", "(x + 1, 'tag')", "torch.ones(2)", "model.w",
    "model.w.detach().clone()", "model.b", "model.b * 2", "types.SimpleNamespace(v=x * 2)",
    "model.w.detach().sum()", "len(x)", "x.shape", "x.dtype",
)  # fmt: skip
"""What is put somewhere by a step."""

_CLASSES = """
class Meter{n}:
    def __init__(self):
        self.total, self.count, self.history = 0.0, 0, []
    def update(self, value, n=1):
        self.total = self.total + value * n
        self.count += n
        self.history.append(value)
meter{n} = Meter{n}()

class Ema{n}:
    def __init__(self, net):
        self.shadow = {{k: p.detach().clone() for k, p in net.named_parameters()}}
        self.steps = 0
    @torch.no_grad()
    def update(self, net):
        self.steps = self.steps + 1
        for k, p in net.named_parameters():
            self.shadow[k].mul_(0.9).add_(p, alpha=0.1)
    @torch.no_grad()
    def rebind(self, net):
        for k, p in net.named_parameters():
            self.shadow[k] = 0.9 * self.shadow[k] + 0.1 * p
ema{n} = Ema{n}(model)
"""

EFFECTS = (
    # counters and logs of ordinary loops
    Effect("counter of the model", "model.n{n} += 1", "model.n{n} = 0"),
    Effect("counter that is used", "model.n{n} += 1; loss = loss * (2 if model.n{n} > 1 else 1)",
           "model.n{n} = 0", "forward"),
    Effect("global counter", "globals()['n{n}'] += 1", "n{n} = 0", view="n{n}"),
    Effect("list of losses", "losses{n}.append(loss.detach())", "losses{n} = []", view="losses{n}"),
    Effect("list of numbers", "sizes{n}.append(len(x))", "sizes{n} = []", view="sizes{n}"),
    Effect("deque of losses", "d{n}.append(loss.detach())", "d{n} = collections.deque(maxlen=2)",
           view="d{n}"),
    Effect("dict of lists", "logs{n}['loss'].append(loss.detach())",
           "logs{n} = collections.defaultdict(list)", view="logs{n}"),
    Effect("last loss", "logs{n}['loss'] = loss.detach()", "logs{n} = {{}}", view="logs{n}"),
    Effect("running sum", "logs{n}['sum'] = logs{n}['sum'] + loss.detach()",
           "logs{n} = {{'sum': 0.0}}", view="logs{n}"),
    Effect("running sum in place", "total{n}.add_(loss.detach())",
           "total{n} = torch.zeros((), dtype=torch.float64)", view="total{n}"),
    Effect("meter", "meter{n}.update(loss.detach(), len(x))", _CLASSES, view="meter{n}"),
    Effect("average of parameters", "ema{n}.update(model)", _CLASSES, view="ema{n}"),
    Effect("average of parameters, bound again", "ema{n}.rebind(model)", _CLASSES, view="ema{n}"),
    Effect("set of sizes", "seen{n}.add(len(x))", "seen{n} = set()", view="seen{n}"),
    Effect("Counter", "c{n}[len(x)] += 1", "c{n} = collections.Counter()", view="c{n}"),
    Effect("list cleared and filled", "l{n}.clear(); l{n}.extend([1, x * 2])", "l{n} = [5]",
           view="l{n}"),
    Effect("list sorted", "l{n}.sort()", "l{n} = [3, 1, 2]", view="l{n}"),
    Effect("list turned", "l{n}.reverse()", "l{n} = [3, 1, 2]", view="l{n}"),
    Effect("queue", "q{n}.pop(0); q{n}.append(x.detach() * 1)",
           "q{n} = [torch.zeros(2, dtype=torch.float64)] * 2", view="q{n}"),
    Effect("queue that is read", "loss = loss + q{n}[0].sum(); q{n}.pop(0); q{n}.append(x.detach() * 1)",
           "q{n} = [torch.zeros(2, dtype=torch.float64)] * 2", "forward", view="q{n}"),
    Effect("hidden state", "model.h{n} = (model.h{n} * 0.5 + x).detach(); loss = loss + model.h{n}.sum()",
           "model.h{n} = torch.zeros(2, dtype=torch.float64)", "forward"),
    Effect("hidden state, None at first",
           "model.h{n} = x.detach() * 2 if model.h{n} is None else model.h{n} + x.detach()",
           "model.h{n} = None", "forward"),
    Effect("cache in a dict", "k{n} = len(x)\n    if k{n} not in cache{n}: cache{n}[k{n}] = torch.ones(k{n}) * 3\n"
           "    loss = loss + cache{n}[k{n}].sum()", "cache{n} = {{}}", "forward", view="cache{n}"),
    Effect("lru_cache", "loss = loss * made{n}(len(x))[0]",
           "@functools.lru_cache\ndef made{n}(n):\n    return torch.full((n,), 3.0)", "forward",
           view="made{n}.cache_info()"),
    Effect("cached_property", "loss = loss * lazy{n}.v",
           "class Lazy{n}:\n    @functools.cached_property\n    def v(self):\n        return 3.0\n"
           "lazy{n} = Lazy{n}()", "forward", view="lazy{n}"),
    Effect("cached_property with a tensor", "loss = loss * lazy{n}.v.sum()",
           "class Lazy{n}:\n    @functools.cached_property\n    def v(self):\n        return torch.ones(3)\n"
           "lazy{n} = Lazy{n}()", "forward", view="lazy{n}"),
    Effect("numbers of a NumPy array", "a{n}[0] += 1", "a{n} = np.zeros(2)", view="a{n}"),
    Effect("tensor into a NumPy array", "a{n}[:] = x.detach().numpy()", "a{n} = np.zeros(2)", view="a{n}",
           refusable=True),
    Effect("item into a list", "l{n}.append(loss.item())", "l{n} = []", view="l{n}", refusable=True),
    Effect("bytearray", "b{n}.extend(b'xy')", "b{n} = bytearray()", view="b{n}"),
    Effect("iterator", "loss = loss * next(it{n})", "it{n} = itertools.count(1)", "forward",
           view="it{n}.__reduce__()", refusable=True),
    Effect("generator object", "loss = loss * next(g{n})",
           "def numbers{n}():\n    k = 0\n    while True:\n        k += 1\n        yield k\ng{n} = numbers{n}()",
           "forward", view="g{n}.gi_frame.f_locals['k'] if g{n}.gi_frame else None", refusable=True),
    Effect("iterator over a list", "loss = loss * next(it{n})", "it{n} = iter([1.0, 2.0, 3.0, 4.0, 5.0])",
           "forward", view="it{n}.__length_hint__()", refusable=True),
    # tensors
    Effect(".data assigned", "model.w.data = model.w.data * 0.5"),
    Effect(".data assigned before the forward", "model.w.data = model.w.data * 0.5", at="start"),
    Effect(".data assigned to a target", "target{n}.w.data = 0.9 * target{n}.w.data + 0.1 * model.w.data",
           "target{n} = Net()", view="target{n}"),
    Effect("MoCo's update", "for p, q in zip(model.parameters(), target{n}.parameters()):\n"
           "        q.data = q.data * 0.9 + p.data * 0.1", "target{n} = Net()", view="target{n}"),
    Effect("target under no_grad", "with torch.no_grad():\n"
           "        for p, q in zip(model.parameters(), target{n}.parameters()): q.lerp_(p, 0.1)",
           "target{n} = Net()", view="target{n}"),
    Effect("load_state_dict of a target", "target{n}.load_state_dict(model.state_dict())",
           "target{n} = Net()", view="target{n}"),
    Effect("vector_to_parameters",
           "torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(target{n}.parameters()).detach() * 0.5, target{n}.parameters())",
           "target{n} = Net()", view="target{n}"),
    Effect(".data copied", "model.w.data.copy_(model.w.data.clamp(-0.5, 0.5))"),
    Effect(".data scaled", "model.w.data.mul_(0.5)"),
    Effect("clipping of weights", "with torch.no_grad():\n        model.w.clamp_(-0.7, 0.7)"),
    Effect("set_ of storage", "model.w.data.set_(model.w.data.clone())", refusable=True),
    Effect("swap of tensors", "model.b, model.c = model.c, model.b"),
    Effect("buffer replaced", "model.b = model.b * 2"),
    Effect("buffer replaced by another shape", "model.b = torch.cat([model.b, model.b])"),
    Effect("buffer registered", "model.register_buffer('late{n}', x.detach() * 2)"),
    Effect("buffer deleted", "del model.c", refusable=True),
    Effect("buffer in place", "model.b.add_(1)"),
    Effect("buffer of another module", "own{n}.b.add_(x.detach())",
           "own{n} = Net()", view="own{n}"),
    Effect("tensor in a list", "l{n}[0].add_(1)", "l{n} = [torch.zeros(2)]", view="l{n}"),
    Effect("row of a tensor", "t{n}[1] = x.detach().sum()", "t{n} = torch.zeros(3, dtype=torch.float64)",
           view="t{n}"),
    Effect("view of a tensor", "v{n}.add_(1)", "t{n} = torch.zeros(3)\nv{n} = t{n}[1:]", view="[t{n}, v{n}]"),
    Effect("argument in place", "x.detach().mul_(2)"),
    Effect("grad of an argument", "z = x.detach().requires_grad_(); (z * z).sum().backward(); keep{n}.append(z.grad)",
           "keep{n} = []", view="keep{n}"),
    Effect("grad of a given tensor", "(given.v * given.v).sum().backward()",
           "ARGUMENTS = types.SimpleNamespace(v=torch.ones(2, requires_grad=True))"),
    Effect("grad of a tensor outside", "(z{n} * z{n}).sum().backward()",
           "z{n} = torch.ones(2, requires_grad=True)", view="[z{n}, z{n}.grad]"),
    Effect("grad of another module", "(own{n}.w * x).sum().backward()", "own{n} = Net()",
           view="[own{n}, own{n}.w.grad]"),
    Effect("grad assigned", "model.w.grad = torch.ones_like(model.w)", at="end"),
    Effect("grad assigned before the update", "model.w.grad = model.w.grad * 2", at="backward"),
    Effect("grad cleared", "model.w.grad = None", at="end"),
    Effect("grad zeroed", "opt.zero_grad(set_to_none=False)", at="end"),
    Effect("grad kept", "model.kept = model.w.grad.clone()", at="backward"),
    Effect("grad itself kept", "model.kept = model.w.grad", at="backward"),
    Effect("requires_grad off", "model.u.requires_grad_(False)"),
    Effect("requires_grad on", "model.f.requires_grad_(True)"),
    Effect("attribute of a parameter", "model.w.tag = 3"),
    Effect("tensor attribute of a parameter", "model.w.seen = x.detach() * 2", view="model.w.seen if hasattr(model.w, 'seen') else 0"),
    # optimizers and schedulers
    Effect("lr lowered", "for g in opt.param_groups: g['lr'] *= 0.5"),
    Effect("lr lowered before the update", "for g in opt.param_groups: g['lr'] *= 0.5", at="start"),
    Effect("lr set", "opt.param_groups[0]['lr'] = 0.01", at="start"),
    Effect("lr read", "loss = loss * opt.param_groups[0]['lr']", at="forward"),
    Effect("own option", "opt.param_groups[0]['count'] = opt.param_groups[0].get('count', 0) + 1"),
    Effect("scheduler", "sched{n}.step()", "sched{n} = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)",
           view="sched{n}.state_dict()"),
    Effect("warm-up", "sched{n}.step()",
           "sched{n} = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: (k + 1) / 10)",
           view="[sched{n}.last_epoch, sched{n}.get_last_lr()]"),
    Effect("state read", "keep{n}['m'] = [v.clone() for v in opt.state[model.w].values() if torch.is_tensor(v)]",
           "keep{n} = {{}}", view="keep{n}"),
    Effect("state read before the update", "keep{n}['m'] = len(opt.state[model.w])", "keep{n} = {{}}",
           at="start", view="keep{n}"),
    Effect("state written", "opt.state[model.w]['own'] = x.detach() * 2"),
    Effect("state written in place", "opt.state[model.w]['momentum_buffer'].mul_(0.5)"),
    Effect("state cleared", "opt.state.clear()", refusable=True),
    Effect("state_dict kept", "keep{n}['s'] = opt.state_dict()['param_groups'][0]['lr']", "keep{n} = {{}}",
           view="keep{n}"),
    Effect("group added", "opt.add_param_group(dict(params=[model.f]))", refusable=True),
    # modes, hooks, structure
    Effect("eval", "model.eval()"),
    Effect("eval for a while", "model.eval(); loss = loss + drop{n}(x).sum(); model.train()",
           "drop{n} = nn.Dropout(0.5)\ndrop{n}.eval()", "forward"),
    Effect("mode of another module", "drop{n}.eval()", "drop{n} = nn.Dropout(0.5)", view="drop{n}.training"),
    Effect("mode of a part, back", "d{n} = model.part.training; model.part.eval(); model.part.train(d{n})"),
    Effect("module added", "model.late{n} = nn.Identity()", refusable=True),
    Effect("module replaced", "model.part[0] = nn.Tanh()", refusable=True),
    Effect("forward patched", "model.part.forward = lambda x: x", refusable=True),
    Effect("hook registered", "model.part.register_forward_hook(lambda m, a, o: None)", refusable=True),
    Effect("hook for a while", "h = model.part.register_forward_hook(lambda m, a, o: o * 2)\n"
           "    loss = loss + model.part(x).sum(); h.remove()", at="forward", refusable=True),
    Effect("hook that keeps", "loss = loss + model.part(x).sum()",
           "kept{n} = []\nmodel.part.register_forward_hook(lambda m, a, o: kept{n}.append(o.detach()))",
           "forward", view="kept{n}"),
    Effect("hook that keeps the last", "loss = loss + model.part(x).sum()",
           "kept{n} = {{}}\nmodel.part.register_forward_hook(lambda m, a, o: kept{n}.update(o=o.detach()))",
           "forward", view="kept{n}"),
    Effect("hook of a gradient", "loss = loss + (model.u * x).sum()",
           "kept{n} = []\nmodel.u.register_hook(lambda g: kept{n}.append(g * 2))", "forward", view="kept{n}"),
    Effect("batch norm", "loss = loss + model.norm(x.reshape(2, 1)).sum()", at="forward"),
    # the process
    Effect("manual_seed", "torch.manual_seed(5); loss = loss * torch.rand(())",
           at="forward", view="torch.get_rng_state().sum()"),
    Effect("manual_seed at the end", "torch.manual_seed(7)", view="torch.rand(1)"),
    Effect("draw", "loss = loss * torch.rand(())", at="forward", view="torch.get_rng_state().sum()"),
    Effect("own generator", "loss = loss * torch.rand((), generator=gen{n})",
           "gen{n} = torch.Generator().manual_seed(3)", "forward", view="gen{n}.get_state()"),
    Effect("state of the generator put back",
           "s{n} = torch.get_rng_state(); torch.rand(2); torch.set_rng_state(s{n})",
           at="forward", view="torch.get_rng_state().sum()", refusable=True),
    Effect("NumPy's draws", "loss = loss * np.random.rand()", "np.random.seed(0)", "forward", refusable=True),
    Effect("Python's draws", "loss = loss * random.random()", "import random\nrandom.seed(0)", "forward", refusable=True),
    Effect("default dtype", "torch.set_default_dtype(torch.float64)", view="torch.get_default_dtype()"),
    Effect("grad mode", "torch.set_grad_enabled(False)", view="torch.is_grad_enabled()"),
    Effect("deterministic", "torch.use_deterministic_algorithms(True)", view="torch.are_deterministic_algorithms_enabled()"),
    Effect("print", "print('step', len(x))", "import io\nOUT{n} = io.StringIO()",
           refusable=True),
    Effect("print into a buffer", "print('step', len(x), file=OUT{n})", "import io\nOUT{n} = io.StringIO()",
           view="OUT{n}.getvalue()", refusable=True),
    Effect("file", "open(F{n}, 'a').write('x')", "import tempfile\nF{n} = tempfile.mktemp()\nopen(F{n}, 'w').close()",
           view="open(F{n}).read()", refusable=True),
    Effect("logging", "log{n}.warning('step %d', len(x))",
           "import logging, io\nOUT{n} = io.StringIO()\nlog{n} = logging.getLogger('@TAG@{n}')\n"
           "log{n}.addHandler(logging.StreamHandler(OUT{n}))\nlog{n}.propagate = False",
           view="OUT{n}.getvalue()", refusable=True),
    Effect("environment", "os.environ['TREADLE_WORLD'] = str(len(x))", view="os.environ.pop('TREADLE_WORLD', None)"),
    Effect("clock", "model.at{n} = time.time() > 0", "import time", refusable=True),
    Effect("context variable", "cv{n}.set(cv{n}.get() + 1)", "cv{n} = contextvars.ContextVar('c', default=0)",
           view="cv{n}.get()", refusable=True),
    Effect("warning counted", "calls{n}.append(1); warnings.warn('x')", "import warnings\nwarnings.simplefilter('ignore')\ncalls{n} = []",
           view="calls{n}"),
    # Python
    Effect("attribute deleted", "vars(o{n}).pop('v', None)", "o{n} = types.SimpleNamespace(v=1)", view="o{n}"),
    Effect("attribute made", "o{n}.w = x.detach() * 2", "o{n} = types.SimpleNamespace(v=1)", view="o{n}"),
    Effect("object made", "o{n}.inner = types.SimpleNamespace(t=x.detach() * 2, o=o{n})",
           "o{n} = types.SimpleNamespace()", view="o{n}"),
    Effect("chain of objects", "o{n}.last = types.SimpleNamespace(before=o{n}.last, t=x.detach())",
           "o{n} = types.SimpleNamespace(last=None)", view="o{n}"),
    Effect("class attribute", "C{n}.count += 1; C{n}.last = x.detach() * 2", "class C{n}:\n    count = 0", view="vars(C{n})['count'], C{n}"),
    Effect("instance attribute over the class's", "c{n}.count += 1", "class C{n}:\n    count = 0\nc{n} = C{n}()", view="c{n}"),
    Effect("module attribute", "M{n}.v = x.detach() * 2; M{n}.n += 1", "M{n} = types.ModuleType('m')\nM{n}.n = 0", view="M{n}"),
    Effect("function attribute", "f{n}.calls += 1", "def f{n}():\n    pass\nf{n}.calls = 0", view="f{n}.calls"),
    Effect("nonlocal", "count{n}(x)", "def counting{n}():\n    n, last = 0, None\n    def count(x):\n"
           "        nonlocal n, last\n        n, last = n + 1, x.detach() * 2\n    return count, lambda: (n, last)\n"
           "count{n}, seen{n} = counting{n}()", view="seen{n}()"),
    Effect("mutable default", "keep{n}(x.detach() * 2)", "def keep{n}(v, into=[]):\n    into.append(v)", view="keep{n}.__defaults__"),
    Effect("swap of two attributes", "o{n}.a, o{n}.b = o{n}.b, o{n}.a", "o{n} = types.SimpleNamespace(a=[1], b=[2])", view="o{n}"),
    Effect("nested dict", "d{n}.setdefault('a', {{}}).setdefault('b', []).append(len(x))", "d{n} = {{}}", view="d{n}"),
    Effect("setattr with a computed name", "setattr(o{n}, 'v' * 2, x.detach() * 2)", "o{n} = types.SimpleNamespace()", view="o{n}"),
    Effect("slots", "o{n}.v = o{n}.v + 1; o{n}.t = x.detach() * 2", "class S{n}:\n    __slots__ = ('v', 't')\no{n} = S{n}()\no{n}.v = 0\no{n}.t = 0", view="o{n}.v, o{n}.t"),
    Effect("dataclass", "o{n}.epoch += 1; o{n}.best = torch.minimum(o{n}.best, loss.detach())",
           "@dataclasses.dataclass\nclass D{n}:\n    epoch: int = 0\n    best: object = torch.tensor(1e9, dtype=torch.float64)\no{n} = D{n}()", view="o{n}"),
    Effect("dict given", "given['out'] = x.detach() * 2", "ARGUMENTS = {{'in': 1}}"),
    Effect("list given", "given.append(x.detach() * 2)", "ARGUMENTS = [1]"),
    Effect("object given", "given.out = x.detach() * 2", "ARGUMENTS = types.SimpleNamespace()"),
    Effect("tensor given in place", "given.add_(1)", "ARGUMENTS = torch.zeros(2)"),
    Effect("argument kept", "model.seen = given", "ARGUMENTS = torch.zeros(2)"),
    Effect("exception caught", "try:\n        raise ValueError\n    except ValueError:\n        model.caught = 1"),
    Effect("__class__ changed", "o{n}.__class__ = B{n}", "class A{n}: pass\nclass B{n}: pass\no{n} = A{n}()", view="type(o{n}).__name__", refusable=True),
    # what is returned
    Effect("parameter returned", "pass", gives="model.w"),
    Effect("buffer returned", "pass", gives="model.b"),
    Effect("argument returned", "pass", gives="x"),
    Effect("given returned", "pass", "ARGUMENTS = dict(a=torch.ones(2))", gives="given"),
    Effect("same tensor twice", "y{n} = x.detach() * 2", gives="[y{n}, y{n}]"),
    Effect("module and optimizer returned", "pass", gives="(model, opt)"),
    Effect("state returned", "pass", "o{n} = types.SimpleNamespace(v=[1])", gives="o{n}"),
    Effect("gradient returned", "g{n} = model.w.grad", at="backward", gives="g{n}"),
    Effect("object with tensors returned", "pass", gives="types.SimpleNamespace(loss=loss.detach(), n=len(x))"),
    Effect("view of a parameter returned", "pass", gives="model.w.detach()[:1]"),
    Effect("tensor outside returned", "pass", "t{n} = torch.ones(2)", gives="t{n}"),
)  # fmt: skip

BEGIN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.u = nn.Parameter(torch.full((2,), 0.5, dtype=torch.float64))
        self.f = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.part = nn.Sequential(nn.Identity())
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)
        self.register_buffer("b", torch.ones(2, dtype=torch.float64))
        self.register_buffer("c", torch.zeros(2, dtype=torch.float64))
model = Net()
opt = torch.optim.SGD([model.w, model.u], lr=0.1, momentum=0.9)
ARGUMENTS = None
"""

STEP = """
def step(x, given=None):
    {start}
    loss = (model.w * x).sum() ** 2 + (model.u * x).sum() ** 2
    {forward}
    loss.backward()
    {backward}
    opt.step()
    opt.zero_grad()
    {end}
    return [loss.detach(), {gives}]

def view():
    return [{view}]
"""


class Picture:
    """Everything that can be seen from some values: types, values, and which are one object."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []

    def of(self, value: Any) -> Any:
        """Nested tuples, in which tensors and arrays stand as they are."""
        if isinstance(value, bool | int | float | complex | str | bytes | None | torch.dtype):
            plain = type(value).__module__ in ("builtins", "torch")  # other classes are a world's
            return type(value).__name__, value if plain else repr(value)
        if isinstance(value, torch.device | torch.Size | range | slice):
            return type(value).__name__, repr(value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return type(value).__name__, *self._inside(value)

    def _inside(self, value: Any) -> tuple[Any, ...]:
        match value:
            case Tensor():
                held = value.detach().clone()
                more = (self.of(value.grad),) if value.is_leaf else ()
                return (value.requires_grad, held, *more, self.of(dict(vars(value))))
            case np.ndarray():
                if value.dtype.kind not in "biufc":  # records, dates, texts: PyTorch has none
                    return str(value.dtype), value.shape, self.of(value.tolist())
                return (torch.from_numpy(value.copy()),)
            case torch.Generator():
                return (value.get_state(),)
            case dict():
                return tuple((self._key(k), self.of(v)) for k, v in list(value.items()))
            case list() | tuple() | collections.deque():
                return tuple(self.of(each) for each in value)
            case set() | frozenset():
                return tuple(sorted(repr(self.of(each)) for each in value))
            case bytearray():
                return (bytes(value),)
            case nn.Module():
                held = {k: v for k, v in vars(value).items() if "hook" not in k}
                return tuple((k, self.of(v)) for k, v in held.items())
            case torch.optim.Optimizer():
                return (self.of(value.param_groups), self.of(list(value.state.values())))
            case type() | types.ModuleType():
                return tuple((k, self.of(v)) for k, v in vars(value).items() if k[0] != "_")
            case types.FunctionType() | types.BuiltinFunctionType() | types.MethodType():
                return (value.__qualname__,)
            case weakref.ref():
                return (self.of(value()),)
            case _ if dataclasses.is_dataclass(value):
                return tuple(
                    (f.name, self.of(getattr(value, f.name))) for f in dataclasses.fields(value)
                )
            case _:
                return tuple(
                    (k, self.of(v)) for k, v in list(getattr(value, "__dict__", {}).items())
                )

    def _key(self, key: Any) -> Any:
        return self.of(key) if not isinstance(key, str | int) else key


def difference(ours: Any, theirs: Any, path: str = "") -> str:
    """Where two pictures differ first; nothing if nowhere."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        alike = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if alike and torch.allclose(
            ours.double(), theirs.double(), rtol=1e-9, atol=1e-12, equal_nan=True
        ):
            return ""
        return f"{path}: {ours} and eager's {theirs}"
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        if len(ours) != len(theirs):
            return f"{path}: {_short(ours)} and eager's {_short(theirs)}"
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            name = a[0] if isinstance(a, tuple) and a and isinstance(a[0], str) else at
            if found := difference(a, b, f"{path}.{name}"):
                return found
        return ""
    if isinstance(ours, float) and isinstance(theirs, float):
        close = ours == theirs or abs(ours - theirs) <= 1e-9 * abs(theirs) or ours != ours != theirs
        return "" if close else f"{path}: {ours} and eager's {theirs}"
    return (
        ""
        if type(ours) is type(theirs) and ours == theirs
        else f"{path}: {_short(ours)} and eager's {_short(theirs)}"
    )


def _short(value: Any) -> str:
    return repr(value).replace("\n", " ")[:160]
