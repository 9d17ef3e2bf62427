"""What the state of ``python_state.py`` holds in the end, and from where a step gets at it."""

# ruff: noqa: E501 -- tables whose rows are programs

from contract.python_state import Edit, Leaf, Scope

PLAIN = (
    "tell(repr({o}))",
    "num({o})",
    "tell(repr(({o}, 1)))",
    "tell(f'{{{o}!r}}')",
    "float(bool({o}))",
    "float(isinstance({o}, bool))",
    "float(type({o}) is int)",
    "float({o} == 1)",
    "float({o} is None)",
    "float({o} in (1, 'a', None))",
    "(5 if {o} else 7)",
    "len(type({o}).__name__)",
)
NUMBER = (*PLAIN[:4], "{o} * 0.5", "({o} + 1)", "math.copysign(1, {o})", "(5 if {o} > 1 else 7)")

_SPECIAL = (
    "__len__", "__bool__", "__float__", "__int__", "__index__", "__contains__", "__getitem__",
    "__add__", "__radd__", "__mul__", "__eq__", "__lt__", "__iter__", "__call__", "__neg__",
    "__abs__", "__round__", "__hash__", "__str__", "__format__", "__enter__",
)  # fmt: skip
_USES = {
    "__len__": "len({o})",
    "__bool__": "float(not {o})",
    "__float__": "float({o})",
    "__int__": "int({o})",
    "__index__": "[3, 4, 5, 6, 7, 8][{o}]",
    "__contains__": "float(3 in {o})",
    "__getitem__": "{o}[0]",
    "__add__": "({o} + 1)",
    "__radd__": "(1 + {o})",
    "__mul__": "({o} * 2)",
    "__eq__": "float({o} == 1)",
    "__lt__": "float({o} < 1)",
    "__iter__": "sum({o})",
    "__call__": "{o}()",
    "__neg__": "-{o}",
    "__abs__": "abs({o})",
    "__round__": "round({o})",
    "__hash__": "hash({o})",
    "__str__": "tell(str({o}))",
    "__format__": "tell(f'{{{o}:x}}')",
    "__enter__": "entered({o})",
}
_GIVES = {
    "__iter__": ("iter((1, 2))", "iter((2, 5))"),
    "__str__": ("'one'", "'two'"),
    "__format__": ("'one'", "'two'"),
    "__contains__": ("True", "False"),
    "__eq__": ("True", "False"),
    "__lt__": ("True", "False"),
    "__bool__": ("True", "False"),
    "__float__": ("1.0", "2.0"),
}


def _special(name: str) -> Leaf:
    """An object whose class has a method that Python calls by itself, which is replaced."""
    one, two = _GIVES.get(name, ("1", "3"))
    others = "    def __exit__(self, *_):\n        pass\n"
    before = f"class Op{{n}}:\n    def {name}(self, *a):\n        return {one}\n{others}"
    put = f"_s = Op{{n}}.{name}; Op{{n}}.{name} = lambda self, *a: {two}"
    return Leaf(
        f"class with {name}",
        ("Op{n}()",),
        (_USES[name],),
        ((put, f"Op{{n}}.{name} = _s"),),
        before,
    )


def _in_place(
    name: str, values: tuple[str, ...], looks: tuple[str, ...], *edits: Edit, before: str = ""
) -> Leaf:
    return Leaf(name, values, looks, edits, before, hashable=False)


_BUMP: Edit = ("{o}[1] += 5", "{o}[1] -= 5")

LEAVES = (
    Leaf("number", ("1", "True", "1.0", "2", "-3", "0.5", "10**6", "0", "False", "7.25"), NUMBER),
    Leaf("number", ("0.0", "-0.0", "0", "False", "1e-300", "-1", "2.5"), NUMBER),
    Leaf("float", ("float('nan')", "float('inf')", "float('-inf')", "1.0", "0.0"), PLAIN),
    Leaf("complex", ("1j", "-1j", "complex(0.0, -0.0)", "0j", "1 + 0j"), PLAIN),
    Leaf("text", ("'a'", "'b'", "''", "'ab' * 50", "b'a'", "'1'", "1"), PLAIN),
    Leaf("anything", ("None", "0", "''", "False", "()", "...", "NotImplemented.__class__"), PLAIN),
    Leaf("tuple", ("(1, 2)", "(1.0, 2)", "(True, 2)", "(2, 1)", "()", "((1, 2), 3)"), PLAIN),
    Leaf("frozenset", ("frozenset((1,))", "frozenset((2,))", "frozenset()"), PLAIN),
    Leaf("range", ("range(3)", "range(1, 3)", "range(0, 3, 2)"), (*PLAIN, "len({o})", "{o}.start")),
    Leaf("slice", ("slice(1)", "slice(0, 1)", "slice(None)"), PLAIN, hashable=False),
    Leaf("dtype", ("torch.float32", "torch.float64", "torch.int8"), (*PLAIN, "{o}.itemsize")),
    Leaf("device", ("torch.device('cpu')", "torch.device('meta')"), PLAIN),
    Leaf("size", ("torch.Size((2, 3))", "torch.Size((3, 2))", "(2, 3)"), (*PLAIN, "{o}[0]")),
    Leaf("layout", ("torch.strided", "torch.channels_last", "torch.sparse_coo"), PLAIN),
    Leaf("type", ("int", "float", "bool", "dict", "torch.nn.ReLU"), PLAIN),
    Leaf("enum member", ("Mode.A", "Mode.B", "Level.LOW", "1", "Level.HIGH"), PLAIN),
    Leaf("flag", ("Flags.X", "Flags.Y", "Flags.X | Flags.Y"), (*PLAIN, "float(bool({o} & Flags.X))")),
    Leaf("subclass of int", ("Count(1)", "Count(2)", "1", "True"), (*PLAIN, "len(vars({o}))")),
    Leaf("subclass of float", ("Rate(1)", "Rate(2)", "1.0"), (*PLAIN, "{o} * 2")),
    Leaf("subclass of str", ("Word('a')", "Word('b')", "'a'"), PLAIN),
    Leaf("decimal", ("decimal.Decimal('1.0')", "decimal.Decimal('1.00')", "decimal.Decimal(2)"), PLAIN),
    Leaf("fraction", ("fractions.Fraction(1, 2)", "fractions.Fraction(1, 3)", "0.5"), PLAIN),
    Leaf("date", ("datetime.date(2020, 1, 1)", "datetime.date(2020, 1, 2)"), (*PLAIN, "{o}.day")),
    Leaf("duration", ("datetime.timedelta(1)", "datetime.timedelta(2)"), (*PLAIN, "{o}.days")),
    Leaf("path", ("pathlib.Path('a')", "pathlib.Path('b')", "'a'"), (*PLAIN, "len({o}.name)")),
    Leaf("pattern", ("re.compile('a')", "re.compile('b')"), (*PLAIN, "float(bool({o}.match('a')))")),
    Leaf("NumPy scalar", ("np.float32(1)", "np.float64(1)", "np.int64(1)", "1", "np.bool_(1)",
                          "np.float32(2)"), PLAIN),
    Leaf("NumPy dtype", ("np.dtype('f4')", "np.dtype('f8')", "np.float32"), (*PLAIN,)),
    Leaf("builtin function", ("abs", "float", "math.sin", "math.cos"), ("float({o}(-2))",)),
    Leaf("ufunc", ("np.sin", "np.cos", "np.abs"), ("float({o}(-2))",)),
    Leaf("operator", ("operator.add", "operator.sub", "operator.mul"), ("float({o}(5, 2))",)),
    Leaf("torch function", ("torch.sin", "torch.cos", "torch.relu"), ("{o}(x)",)),
    Leaf("nn.functional", ("F.relu", "F.gelu", "torch.tanh"), ("{o}(x)",)),
    Leaf("module", ("nn.ReLU()", "nn.Tanh()", "nn.LeakyReLU(0.5)"), ("{o}(-x)",)),
    Leaf(
        "function",
        ("f{n}", "g{n}", "(lambda: 3.0)"),
        ("{o}()",),
        (
            ("_s = f{n}.__code__; f{n}.__code__ = g{n}.__code__", "f{n}.__code__ = _s"),
            ("f{n}.__defaults__ = (9.0,)", "f{n}.__defaults__ = (1.0,)"),
        ),
        "def f{n}(v=1.0):\n    return v\ndef g{n}(v=1.0):\n    return v + 1",
    ),
    Leaf(
        "instance of one of two classes",
        ("One{n}()", "Two{n}()"),
        ("float(isinstance({o}, Two{n}))", "{o}.get()", "len(type({o}).__name__)", "{o}.size"),
        (
            ("{o}.__class__ = Two{n}", "{o}.__class__ = One{n}"),
            ("{o}.size = 9", "del {o}.size"),
            ("_s = One{n}.get; One{n}.get = Two{n}.get", "One{n}.get = _s"),
        ),
        "class One{n}:\n    size = 1\n    def get(self):\n        return 1\n"
        "class Two{n}(One{n}):\n    size = 2\n    def get(self):\n        return 2\n    pad = 0",
    ),
    Leaf(
        "virtual subclass",
        ("Virtual{n}()",),
        ("float(isinstance({o}, Abstract{n}))", "float(issubclass(type({o}), Abstract{n}))"),
        (("Abstract{n}.register(Virtual{n})", "Abstract{n}._abc_registry_clear(); "
          "Abstract{n}._abc_caches_clear()"),),
        "class Abstract{n}(abc.ABC):\n    pass\nclass Virtual{n}:\n    pass",
    ),
    Leaf(
        "object with __getattr__ on its class later",
        ("Bare{n}()",),
        ("getattr({o}, 'w', 1)", "float(hasattr({o}, 'w'))"),
        (("Bare{n}.__getattr__ = lambda self, name: 4", "del Bare{n}.__getattr__"),
         ("Bare{n}.w = 4", "del Bare{n}.w"), ("{o}.w = 4", "del {o}.w")),
        "class Bare{n}:\n    pass",
    ),
    *(_special(name) for name in _SPECIAL),
    _in_place("set", ("{{1, 2}}", "{{2, 1, 4}}", "set()"),
              ("len({o})", "float(3 in {o})", "sum({o})", "float({o} == {{1, 2}})", "max({o}, default=0)"),
              ("{o}.add(3)", "{o}.discard(3)"), ("_s = set({o}); {o}.clear()", "{o}.update(_s)")),
    _in_place("numbers in a list", ("[3, 1, 2]", "[3, 1]", "[1.0, 2]", "[]"),
              ("tell(repr({o}))", "sum({o})", "len({o})", "tell(repr(tuple({o})))", "max({o}, default=0)",
               "float({o} == [1, 2, 3])", "tell(repr(sorted({o})))", "tell(repr({o}[::-1]))"),
              ("_s = list({o}); {o}.sort()", "{o}[:] = _s"), ("{o}.append(9)", "{o}.pop()"),
              ("_s = list({o}); {o}[:] = [True, 1.0]", "{o}[:] = _s"),
              ("_s = list({o}); {o}.clear()", "{o}[:] = _s")),
    _in_place("numbers in a dict", ("dict(p=1, q=2)", "dict(q=2, p=1)", "dict(p=1.0, q=2)", "{{}}"),
              ("tell(repr({o}))", "sum({o}.values())", "tell(repr(list({o})))", "len({o})",
               "tell(repr(list({o}.items())))", "float('r' in {o})", "tell(repr({o}.get('p')))",
               "float({o} == dict(p=1, q=2))", "tell(repr(sorted({o}.items())))"),
              ("{o}['r'] = 5", "del {o}['r']"), ("_s = dict({o}); {o}['p'] = True",
                                                 "{o}.clear(); {o}.update(_s)"),
              ("_s = dict({o}); {o}.clear()", "{o}.update(_s)")),
    _in_place("Counter", ("collections.Counter('aab')", "collections.Counter('ab')"),
              ("{o}['a']", "{o}['zz']", "{o}.total()", "{o}.most_common(1)[0][1]"),
              ("{o}['a'] += 1", "{o}['a'] -= 1"), ("{o}['zz'] = 2", "del {o}['zz']")),
    _in_place("array", ("np.arange(4.0)", "np.arange(4)", "np.arange(5.0)", "np.ones((2, 2))[0]"),
              ("float({o}[1])", "float({o}.sum())", "{o}.shape[0]", "{o}.dtype.itemsize",
               "float({o}.tolist()[1])", "len({o})", "float(np.mean({o}))", "tell(repr({o}.tobytes()))"),
              _BUMP, ("{o}[:] = {o}[::-1].copy()", "{o}[:] = {o}[::-1].copy()"),
              ("{o}.flags.writeable = False", "{o}.flags.writeable = True")),
    _in_place("array as a tensor", ("np.arange(2.0)", "np.ones(2)"),
              ("(x * torch.from_numpy({o}))", "(x * torch.as_tensor({o}))",
               "(x * torch.tensor({o}))"), _BUMP),
    _in_place("view of an array", ("base{n}[1:]", "base{n}[::2]"),
              ("float({o}.sum())", "float({o}[0])"), ("base{n} += 1", "base{n} -= 1"),
              before="base{n} = np.arange(5.0)"),
    _in_place("array of no dims", ("np.array(1.0)", "np.array(2.0)"), ("float({o})", "{o}.item()"),
              ("{o}[()] += 1", "{o}[()] -= 1")),
    _in_place("structured array", ("np.zeros(2, [('p', 'f8'), ('q', 'i4')])",),
              ("float({o}['p'][1])", "float({o}[1]['p'])"),
              ("{o}['p'][1] += 1", "{o}['p'][1] -= 1")),
    _in_place("bytearray", ("bytearray(b'abc')", "bytearray(b'abd')"),
              ("{o}[1]", "len({o})", "tell(repr(bytes({o})))"), ("{o}[1] ^= 3", "{o}[1] ^= 3"),
              ("{o}.append(9)", "{o}.pop()")),
    _in_place("memoryview", ("memoryview(b{n})",), ("{o}[1]", "tell(repr(bytes({o})))"),
              ("b{n}[1] ^= 3", "b{n}[1] ^= 3"), before="b{n} = bytearray(b'abc')"),
    _in_place("array.array", ("array.array('d', [1, 2])", "array.array('i', [1, 2])"),
              ("{o}[1]", "sum({o})", "{o}.itemsize"), ("{o}[1] += 1", "{o}[1] -= 1"),
              ("{o}.append(3)", "{o}.pop()")),
    _in_place("ctypes", ("(ctypes.c_int * 3)(1, 2, 3)",), ("{o}[1]", "sum({o})"), _BUMP),
    _in_place("StringIO", ("text_buffer('ab')",), ("len({o}.getvalue())",),
              ("{o}.write('cd')", "{o}.seek(2); {o}.truncate()")),
    _in_place("torch.Generator", ("torch.Generator().manual_seed(3)",),
              ("{o}.initial_seed() % 97",), ("{o}.manual_seed(5)", "{o}.manual_seed(3)")),
    _in_place("tensor", ("torch.ones(2, dtype=torch.float64)", "torch.ones(1, dtype=torch.float64)",
                         "torch.ones(2)", "torch.ones(2, dtype=torch.int64)"),
              ("(x * {o})", "{o}.shape[0]", "{o}.dtype.itemsize", "{o}.ndim", "len({o})",
               "float({o}.requires_grad)", "{o}.numel()"),
              ("{o}.add_(3)", "{o}.sub_(3)"), ("{o}.resize_(3); {o}.fill_(1)", "{o}.resize_(2)")),
    _in_place("numbers in a deque", ("collections.deque([1, 2], maxlen=2)", "collections.deque([2, 1])"),
              ("{o}[0]", "sum({o})", "tell(repr({o}.maxlen))", "tell(repr(list({o})))"),
              ("_s = list({o}); {o}.append(7)", "{o}.clear(); {o}.extend(_s)"),
              ("{o}.rotate()", "{o}.rotate(-1)")),
)  # fmt: skip


def _module_text(inner: str) -> str:
    """A module of its own whose function reads its global."""
    return f'M{{n}} = module_of("@TAG@_{{n}}", """def probe(x):\n    return {inner}\n""")\n'


_OF_OBJECT = "class Trainer{n}:\n    def probe(self, x):\n        return {e}\n"
_TAIL = "probe{n} = trainer{n}.probe"

SCOPES = (
    Scope("global", "R{n} = {c}\ndef probe{n}(x):\n    return {e}", "R{n}", "R{n}", "R{n} = {v}"),
    Scope(
        "global of another module",
        _module_text("{e}") + "M{n}.R = {c}\nprobe{n} = M{n}.probe",
        "R", "M{n}.R", "M{n}.R = {v}",
    ),
    Scope(
        "attribute of another module",
        _module_text("0") + "M{n}.R = {c}\ndef probe{n}(x):\n    return {e}",
        "M{n}.R", "M{n}.R", "M{n}.R = {v}",
    ),
    Scope(
        "computed name of a module",
        _module_text("0") + "M{n}.RAB = {c}\ndef probe{n}(x):\n    return {e}",
        "getattr(M{n}, 'BAR'[::-1])", "M{n}.RAB", "M{n}.RAB = {v}",
    ),
    Scope(
        "vars of a module",
        _module_text("0") + "M{n}.RAB = {c}\ndef probe{n}(x):\n    return {e}",
        "vars(M{n})['RAB']", "M{n}.RAB", "M{n}.RAB = {v}",
    ),
    Scope(
        "module found in sys.modules",
        _module_text("0") + "M{n}.RAB = {c}\ndef probe{n}(x):\n    return {e}",
        "sys.modules['@TAG@_{n}'].RAB", "M{n}.RAB", "M{n}.RAB = {v}",
    ),
    Scope(
        "import inside",
        _module_text("0") + "M{n}.RAB = {c}\ndef probe{n}(x):\n"
        "    from @TAG@_{n} import RAB\n    return {e}",
        "RAB", "M{n}.RAB", "M{n}.RAB = {v}",
    ),
    Scope(
        "globals()", "R{n} = {c}\ndef probe{n}(x):\n    return {e}",
        "globals()['R{n}']", "R{n}", "R{n} = {v}",
    ),
    Scope(
        "eval", "R{n} = {c}\nNAME{n} = 'R{n}'\ndef probe{n}(x):\n    return {e}",
        "eval(NAME{n})", "R{n}", "R{n} = {v}",
    ),
    Scope(
        "builtins", "builtins.R_@TAG@_{n} = {c}\ndef probe{n}(x):\n    return {e}",
        "R_@TAG@_{n}", "R_@TAG@_{n}", "builtins.R_@TAG@_{n} = {v}",
    ),
    Scope(
        "variable of an outer function",
        "def outside{n}(R):\n    def probe(x):\n        return {e}\n"
        "    def put(v):\n        nonlocal R\n        R = v\n    return probe, put, lambda: R\n"
        "probe{n}, put{n}, get{n} = outside{n}({c})",
        "R", "get{n}()", "put{n}({v})",
    ),
    Scope(
        "default", "def probe{n}(x, R={c}):\n    return {e}",
        "R", "probe{n}.__defaults__[0]", "probe{n}.__defaults__ = ({v},)",
    ),
    Scope(
        "keyword default", "def probe{n}(x, *, R={c}):\n    return {e}",
        "R", "probe{n}.__kwdefaults__['R']", "probe{n}.__kwdefaults__['R'] = {v}",
    ),
    Scope(
        "keyword of a partial",
        "def full{n}(x, R):\n    return {e}\nprobe{n} = functools.partial(full{n}, R={c})",
        "R", "probe{n}.keywords['R']", "probe{n}.keywords['R'] = {v}",
    ),
    Scope(
        "attribute of self",
        _OF_OBJECT + "trainer{n} = Trainer{n}()\ntrainer{n}.R = {c}\n" + _TAIL,
        "self.R", "trainer{n}.R", "trainer{n}.R = {v}",
    ),
    Scope(
        "attribute of the class",
        _OF_OBJECT + "Trainer{n}.R = {c}\ntrainer{n} = Trainer{n}()\n" + _TAIL,
        "self.R", "Trainer{n}.R", "Trainer{n}.R = {v}",
        edits=(("trainer{n}.R = {c}", "del trainer{n}.R"),),
    ),
    Scope(
        "slot of self",
        _OF_OBJECT.replace("{n}:", "{n}:\n    __slots__ = ('R',)", 1)
        + "trainer{n} = Trainer{n}()\ntrainer{n}.R = {c}\n" + _TAIL,
        "self.R", "trainer{n}.R", "trainer{n}.R = {v}",
    ),
    Scope(
        "class attribute of a mixin",
        "class Mixin{n}:\n    R = {c}\n" + _OF_OBJECT.replace("{n}:", "{n}(Mixin{n}):", 1)
        + "trainer{n} = Trainer{n}()\n" + _TAIL,
        "self.R", "Mixin{n}.R", "Mixin{n}.R = {v}",
        edits=(("Trainer{n}.R = {c}", "del Trainer{n}.R"),),
    ),
    Scope(
        "attribute of the function", "def probe{n}(x):\n    return {e}\nprobe{n}.R = {c}",
        "probe{n}.R", "probe{n}.R", "probe{n}.R = {v}",
    ),
    Scope(
        "attribute of the model",
        "model.R{n} = {c}\ndef probe{n}(x):\n    return {e}",
        "model.R{n}", "model.R{n}", "model.R{n} = {v}",
    ),
    Scope(
        "attribute of a part of the model",
        "class Part{n}(nn.Module):\n    def forward(self, x):\n        return {e}\n"
        "model.part{n} = nn.Sequential(Part{n}())\nmodel.part{n}[0].R = {c}\n"
        "def probe{n}(x):\n    return model.part{n}(x)",
        "self.R", "model.part{n}[0].R", "model.part{n}[0].R = {v}",
        edits=(
            ("_s = model.part{n}[0]; model.part{n}[0] = nn.Tanh()", "model.part{n}[0] = _s"),
            ("model.part{n}[0].forward = lambda x: 5.0", "del model.part{n}[0].forward"),
            ("_s = Part{n}.forward; Part{n}.forward = lambda self, x: 5.0", "Part{n}.forward = _s"),
        ),
    ),
    Scope(
        "hook of a part of the model",
        "model.hooked{n} = nn.Identity()\nR{n} = {c}\n"
        "hook{n} = model.hooked{n}.register_forward_hook(lambda m, a, x: x + {e})\n"
        "def probe{n}(x):\n    return model.hooked{n}(x)",
        "R{n}", "R{n}", "R{n} = {v}",
    ),
    Scope(
        "argument", "ARGUMENTS['{n}'] = {c}\ndef probe{n}(x, given):\n    return {e}",
        "given", "ARGUMENTS['{n}']", "ARGUMENTS['{n}'] = {v}",
        call="probe{n}(x, given['{n}'])",
    ),
    Scope(
        "nested function of the step",
        "R{n} = {c}\ndef probe{n}(x):\n    def inner():\n        return {e}\n    return inner()",
        "R{n}", "R{n}", "R{n} = {v}",
    ),
    Scope(
        "custom autograd function",
        "R{n} = {c}\nclass Own{n}f(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, x):\n        return x * 1.0 + x * 0 * ctx.needs_input_grad[0] + {e}\n"
        "    @staticmethod\n    def backward(ctx, g):\n        return g\n"
        "def probe{n}(x):\n    return Own{n}f.apply(x)",
        "R{n}", "R{n}", "R{n} = {v}",
    ),
    Scope(
        "checkpoint", "R{n} = {c}\ndef body{n}(x):\n    return x + {e}\ndef probe{n}(x):\n"
        "    return torch.utils.checkpoint.checkpoint(body{n}, x, use_reentrant=False)",
        "R{n}", "R{n}", "R{n} = {v}",
    ),
    Scope(
        "generator", "R{n} = {c}\ndef each{n}(x):\n    yield {e}\ndef probe{n}(x):\n"
        "    return sum(each{n}(x))",
        "R{n}", "R{n}", "R{n} = {v}",
    ),
    Scope(
        "thread", "R{n} = {c}\ndef probe{n}(x):\n    found = []\n"
        "    t = threading.Thread(target=lambda: found.append(PLAINLY))\n"
        "    t.start(); t.join()\n    return found[0]".replace("PLAINLY", "{e}"),
        "R{n}", "R{n}", "R{n} = {v}",
    ),
)  # fmt: skip

WRAPS = (
    "{e}",
    "{e}",
    "{e}",
    "(lambda: {e})()",
    "[{e} for _ in (0,)][0]",
    "sum({e} for _ in (0,))",
    "next(iter(map(lambda _: {e}, (0,))))",
    "functools.reduce(lambda a, b: a + b, ({e}, 0))",
    "sorted((0,), key=lambda _: 0) and ({e})",
)
"""Ways to write the same expression."""

HEADER = """
import abc, argparse, array, builtins, collections, contextvars, ctypes, dataclasses, datetime
import decimal, enum, fractions, functools, io, itertools, math, operator, os, pathlib, re, sys
import threading, types, typing, weakref, zlib
import numpy as np, torch, torch.nn.functional as F, torch.utils.checkpoint
from torch import nn

ARGUMENTS = {}

def filled(owner, value):
    owner.v = value
    return owner

def filled_as(owner, name, value):
    setattr(owner, name, value)
    return owner

def objects(values):
    made = np.empty(len(values), dtype=object)
    made[:] = [None] * len(values)
    for at, each in enumerate(values):
        made[at] = each
    return made

def looped(value):
    made = [None, value]
    made[0] = made
    return made

def text_buffer(text):
    made = io.StringIO()
    made.write(text)
    return made

def entered(manager):
    with manager as value:
        return value

def module_of(name, text):
    made = sys.modules[name] = types.ModuleType(name)
    exec(HEADER + text, vars(made))
    return made

def tell(text):
    if " at 0x" in text:  # addresses differ between the two worlds
        text = re.sub(" at 0x[0-9a-f]+", "", text)
    return zlib.crc32(text.encode()) % 997 / 16

def num(value):
    if isinstance(value, (bool, int, float)) and -1e6 < value < 1e6:
        return value + len(type(value).__name__) / 7
    return tell(repr(value))

class Mode(enum.Enum):
    A, B = 1, 2

class Level(enum.IntEnum):
    LOW, HIGH = 1, 2

class Flags(enum.Flag):
    X, Y = 1, 2

class Count(int):
    pass

class Rate(float):
    pass

class Word(str):
    pass
"""
"""What every program begins with."""
