"""Code that names ``eval``, ``vars``, ``dir`` or ``globals`` reads what it reads, and no more: each
step is told what changed and what did not, and compiles again for the one and not for the other."""

import builtins
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import treadle
from contract.test_reads_generator import Beside
from contract.worlds import Probe, Recompiles, no_compiling, same
from forks import Forks

STATE = """
import inspect
class Config:
    factor = 2.0
    other = 1
    def __init__(self):
        self.lr, self.dir, self.epoch, self.vars = 1.0, 3.0, 0, 4.0
    @functools.cached_property
    def lazy(self):
        return self.lr + 1
cfg, table = Config(), {"dir": 2.0, "eval": 3.0, "vars": 1.0}
teacher = nn.Linear(2, 2).double().requires_grad_(False)
rate, t, name, get_lr = 1.0, 0.0, "lr", operator.attrgetter("".join(["l", "r"]))
take, look = getattr, vars
def helper(value):
    return value + rate
def slope(f):
    return f.__globals__["rate"]
def whole(x):
    return sum(v for v in x.__dict__.values() if isinstance(v, float))
class Proxy:
    def __init__(self):
        self.inner, self.other = 2.0, 1
    def __getattr__(self, name):
        return object.__getattribute__(self, "inner")
proxy = Proxy()
"""
UNREAD = "t = 5.0", "cfg.epoch += 1", "Config.other += 1"
READ_RATE = "rate = 7.0"
READ_LR = "cfg.lr = 9.0"
READ_FACTOR = "Config.factor = 9.0"

CASES = {
    "float(teacher.eval().training)": (UNREAD, ("teacher.eval = lambda: nn.Identity()",)),
    "cfg.dir": (UNREAD, ("cfg.dir = 5.0",)),
    "cfg.vars": (UNREAD, ("cfg.vars = 5.0",)),
    "table['eval']": (UNREAD, ("table['eval'] = 5.0",)),
    "globals()['rate']": (UNREAD, (READ_RATE,)),
    "globals().get('rate', 2.0)": (UNREAD, (READ_RATE, "del rate")),
    "globals()[name[:0] + 'rate']": (UNREAD[1:], (READ_RATE,)),
    "slope(helper)": (UNREAD, (READ_RATE,)),
    "eval('rate')": (UNREAD, (READ_RATE,)),
    "eval('cfg.' + name)": (UNREAD, (READ_LR,)),
    "eval('a', {'a': rate})": (UNREAD, (READ_RATE,)),
    "vars(cfg)['lr']": (UNREAD, (READ_LR,)),
    "vars(cfg)[name]": (UNREAD[::2], (READ_LR, "name = 'dir'")),
    "cfg.__dict__['lr']": (UNREAD, (READ_LR,)),
    "cfg.__dict__.get('lr')": (UNREAD, (READ_LR,)),
    "float('lr' in cfg.__dict__)": (UNREAD, ("del cfg.lr",)),
    "cfg.lazy": (UNREAD[::2], ("cfg.__dict__['lazy'] = 9.0",)),
    "whole(cfg)": (UNREAD[::2], (READ_LR, "cfg.new = 2.0")),
    "look(cfg)['lr']": (UNREAD[:1], (READ_LR,)),
    "getattr(cfg, name)": (UNREAD, (READ_LR, "name = 'dir'")),
    "take(cfg, name)": (UNREAD[:2], (READ_LR,)),
    "getattr(Config, 'fac' + 'tor'[:3])": (UNREAD, (READ_FACTOR,)),
    "float(hasattr(Config, 'ne' + name[:0] + 'w'))": (UNREAD, ("Config.new = 3",)),
    "vars(Config)['factor']": (UNREAD, (READ_FACTOR,)),
    "vars(Config)['fact' + 'or'[name is None:]]": (UNREAD[:2], (READ_FACTOR,)),
    "type(cfg).__dict__['fac' + 'tor'[name is None:]]": (UNREAD[:2], (READ_FACTOR,)),
    "len(dir(cfg))": (UNREAD[:1], ("cfg.new = 2.0", "Config.new = 3")),
    "operator.attrgetter('lr')(cfg)": (UNREAD, (READ_LR,)),
    "operator.attrgetter(name)(cfg)": (UNREAD[:2], (READ_LR,)),
    "get_lr(cfg)": (UNREAD, (READ_LR,)),
    "operator.attrgetter('fac' + 'tor'[name is None:])(cfg)": (UNREAD[:2], (READ_FACTOR,)),
    "object.__getattribute__(cfg, 'lr')": (UNREAD[::2], (READ_LR,)),
    "object.__getattribute__([cfg][0], 'lr')": (UNREAD, (READ_LR,)),
    "object.__getattribute__(next(iter(map(take, [rate and cfg], ['dir'])), 0) and cfg, 'lr')": (
        UNREAD[:1],
        (READ_LR,),
    ),
    "object.__getattribute__(table.get('none', getattr(helper, 'no', cfg)), 'lr')": (
        UNREAD,
        (READ_LR,),
    ),
    "object.__getattribute__([cfg][0], name)": (UNREAD[:1], (READ_LR,)),
    "proxy.missing": ((*UNREAD, "proxy.other = 5"), ("proxy.inner = 5.0",)),
    "inspect.getattr_static(cfg, 'lr')": (UNREAD, (READ_LR,)),
    "len(inspect.signature(helper).parameters)": (UNREAD, ("helper = lambda: 0",)),
    "sum(1 for n, _ in inspect.getmembers(cfg) if n == 'new')": (UNREAD[:1], ("cfg.new = 2.0",)),
    "sys._getframe().f_globals['rate']": (UNREAD[1:], (READ_RATE,)),
}  # fmt: skip


@pytest.mark.parametrize("call", CASES)
def test_what_is_named_is_not_what_is_read(call: str):
    unread, read = CASES[call]
    beside = Beside([Probe("", STATE, f"({call})", ())])
    try:
        assert same(beside.call(), beside.eager())
        assert same(beside.call(), beside.eager())
        for change in unread:
            beside.ours.run(change), beside.theirs.run(change)
            with no_compiling():
                assert same(beside.call(), beside.eager()), change
        for change in read:
            beside.ours.run(change), beside.theirs.run(change)
            with no_compiling(), pytest.raises(Recompiles):
                beside.call()
            expect_alike(beside)
    finally:
        beside.close()


def test_a_script_whose_globals_change_is_compiled_once(forks: Forks):
    script = Path(__file__).with_name("sentence_classifier.py")
    done = forks.run(script, quiet=True, seconds=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "compiled once for 6 calls" in done.stdout


def expect_alike(beside: Beside) -> None:
    """Compiled and eager agree, or fail alike."""
    try:
        expected = beside.eager()
    except Exception as error:
        with pytest.raises(type(error)):
            beside.call()
    else:
        assert same(beside.call(), expected)


def test_an_attribute_of_a_builtin_that_is_read_past_what_hears_it(monkeypatch):
    holder = types.ModuleType("holder")
    holder.v = 3.0
    monkeypatch.setattr(builtins, "reflected_holder", holder, raising=False)
    model = nn.Linear(2, 2)

    def step(x):
        return model(x) * object.__getattribute__(reflected_holder, "v")  # noqa: F821

    compiled = treadle.compile(step, model=model)
    x = torch.ones(1, 2)
    for holder.v in (3.0, 5.0, 7.0):
        torch.testing.assert_close(compiled(x), step(x))
