"""Kinds of Python state as pieces of source text: what holds values, what is held, and from where
a function reaches it. ``worlds.py`` puts pieces together to programs.

In a piece ``{n}`` is a number of its own, ``{c}`` the value that it holds, ``{o}`` the object,
``{v}`` a new value, and ``@TAG@`` the name of the world that it runs in.
"""

# ruff: noqa: E501 -- tables whose rows are programs

from dataclasses import dataclass

Edit = tuple[str, str]
"""A change in place, and what takes it back. ``_s`` is a variable for what they must remember."""


@dataclass(frozen=True)
class Layer:
    """Something that holds one value of interest.

    ``reads``: ways to it, the first one good for every purpose. ``puts``: statements that replace
    it; none where the whole must be replaced. ``looks``: numbers that the whole has. ``edits``:
    other changes. ``hashable``: what is held must be.
    """

    name: str
    build: str
    reads: tuple[str, ...]
    puts: tuple[str, ...] = ()
    looks: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    before: str = ""
    hashable: bool = False


@dataclass(frozen=True)
class Leaf:
    """A value at the end of a path. ``looks``: numbers that it is turned into by a step.

    ``values``: what it may be; of one of them another one may take the place.
    """

    name: str
    values: tuple[str, ...]
    looks: tuple[str, ...]
    edits: tuple[Edit, ...] = ()
    before: str = ""
    hashable: bool = True


@dataclass(frozen=True)
class Scope:
    """From where a step reaches a value. ``text`` defines ``probe{n}(x)``, which returns ``{e}``.

    ``inner``: the value's name within; ``root`` from outside; ``put``: a statement that replaces
    it. ``call``: how the step calls it.
    """

    name: str
    text: str
    inner: str
    root: str
    put: str
    edits: tuple[Edit, ...] = ()
    call: str = "probe{n}(x)"


def _mapping(name: str, make: str, **more: object) -> Layer:
    return Layer(
        name,
        make,
        (
            "{o}['k']",
            "{o}.get('k')",
            "operator.itemgetter('k')({o})",
            "[v for k, v in {o}.items() if k == 'k'][0]",
            "(lambda **kw: kw['k'])(**{o})",
            "list({o}.values())[1]",
            "{{**{o}}}['k']",
            "dict({o})['k']",
            "{o}.copy()['k']",
            "{o}[''.join(['k'])]",
        ),
        ("{o}['k'] = {v}", "{o}.update(k={v})"),
        ("len({o})", "list({o}).index('k')", "float('q' in {o})", "float(bool({o}))"),
        (
            ("{o}['q'] = 5", "del {o}['q']"),
            ("_s = {o}.pop('z')", "{o}['z'] = _s"),
            ("_s = dict({o}); {o}['a'] = {o}.pop('a')", "{o}.clear(); {o}.update(_s)"),
            ("_s = dict({o}); {o}.clear(); {o}['k'] = _s['k']", "{o}.clear(); {o}.update(_s)"),
        ),
        **more,
    )


def _sequence(name: str, make: str, **more: object) -> Layer:
    return Layer(
        name,
        make,
        (
            "{o}[1]",
            "operator.itemgetter(1)({o})",
            "[*{o}][1]",
            "(lambda a, b, *c: b)(*{o})",
            "[v for i, v in enumerate({o}) if i == 1][0]",
            "{o}[-2]",
            "list(zip({o}, 'abc'))[1][0]",
            "next(itertools.islice({o}, 1, 2))",
        ),
        **more,
    )


_LIST = {
    "puts": ("{o}[1] = {v}", "{o}.pop(1); {o}.insert(1, {v})"),
    "looks": ("len({o})", "float(5 in {o})", "float(bool({o}))", "{o}.count(0)"),
    "edits": (
        ("{o}.append(5)", "{o}.pop()"),
        ("_s = {o}.pop()", "{o}.append(_s)"),
        ("{o}.insert(0, 5)", "del {o}[0]"),
        ("{o}.reverse()", "{o}.reverse()"),
        ("_s = list({o}); {o}.extend(_s)", "del {o}[3]; del {o}[3]; del {o}[3]"),
    ),
}


def _attribute(name: str, build: str, before: str = "", **more: object) -> Layer:
    """An object whose attribute ``v`` holds the value."""
    given = {
        "puts": ("{o}.v = {v}", "setattr({o}, 'v', {v})", "object.__setattr__({o}, 'v', {v})"),
        "looks": ("float(hasattr({o}, 'extra'))", "getattr({o}, 'extra', 3)"),
        "edits": (("{o}.extra = 5", "del {o}.extra"),),
    } | more
    return Layer(
        name,
        build,
        (
            "{o}.v",
            "getattr({o}, 'v')",
            "getattr({o}, ''.join(['v']))",
            "operator.attrgetter('v')({o})",
            "getattr({o}, 'v', None)",
            "object.__getattribute__({o}, 'v')",
        ),
        before=before,
        **given,
    )


_IN_VARS = ("vars({o})['v']", "{o}.__dict__['v']", "dict(vars({o}))['v']")


def _open(layer: Layer) -> Layer:
    """Of an object with a ``__dict__``: the ways through it."""
    more: tuple[Edit, ...] = (
        ("_s = {o}.__dict__; {o}.__dict__ = {{**_s, 'extra': 7}}", "{o}.__dict__ = _s"),
        ("vars({o})['extra'] = 6", "del vars({o})['extra']"),
    )
    return Layer(
        layer.name,
        layer.build,
        (*layer.reads, *_IN_VARS),
        (*layer.puts, "vars({o})['v'] = {v}"),
        (*layer.looks, "len(vars({o}))"),
        (*layer.edits, *more),
        layer.before,
        layer.hashable,
    )


_SHADOW: tuple[Edit, ...] = (("{o}.v = 41", "del {o}.v"),)

LAYERS = (
    _mapping("dict", "{{'a': 0, 'k': {c}, 'z': 2}}"),
    _mapping(
        "subclass of dict",
        "Dict{n}(a=0, k={c}, z=2)",
        before="class Dict{n}(dict):\n    def __getitem__(self, key):\n"
        "        return dict.__getitem__(self, key)",
    ),
    _mapping("OrderedDict", "collections.OrderedDict(a=0, k={c}, z=2)"),
    _mapping("defaultdict", "collections.defaultdict(list, a=0, k={c}, z=2)"),
    _mapping("UserDict", "collections.UserDict(a=0, k={c}, z=2)"),
    Layer(
        "ChainMap",
        "collections.ChainMap({{'a': 0}}, {{'k': {c}}})",
        ("{o}['k']", "dict({o})['k']", "{o}.maps[1]['k']"),
        ("{o}.maps[1]['k'] = {v}",),
        ("len({o})", "float('q' in {o})"),
        (("{o}['q'] = 5", "del {o}['q']"), ("{o}['k'] = 5", "del {o}['k']")),
    ),
    Layer(
        "mappingproxy",
        "types.MappingProxyType(D{n})",
        ("{o}['k']", "dict({o})['k']", "list({o}.values())[1]"),
        ("D{n}['k'] = {v}",),
        ("len({o})", "float('q' in {o})"),
        (("D{n}['q'] = 5", "del D{n}['q']"),),
        before="D{n} = {{'a': 0, 'k': {c}, 'z': 2}}",
    ),
    Layer(
        "values of a dict",
        "D{n}.values()",
        ("list({o})[1]",),
        ("D{n}['k'] = {v}",),
        ("len({o})",),
        (("D{n}['q'] = 5", "del D{n}['q']"),),
        before="D{n} = {{'a': 0, 'k': {c}, 'z': 2}}",
    ),
    Layer(
        "key of a dict",
        "{{{c}: 1}}",
        ("next(iter({o}))", "list({o})[0]", "[k for k in {o}][0]"),
        ("{o}.clear(); {o}[{v}] = 1",),
        ("len({o})",),
        hashable=True,
    ),
    Layer(
        "element of a set",
        "{{{c}}}",
        ("next(iter({o}))", "[e for e in {o}][0]", "list({o})[0]"),
        ("{o}.clear(); {o}.add({v})",),
        ("len({o})", "float(77 in {o})"),
        hashable=True,
    ),
    Layer("element of a frozenset", "frozenset([{c}])", ("next(iter({o}))",), hashable=True),
    _sequence("list", "[0, {c}, 2]", **_LIST),
    _sequence(
        "subclass of list",
        "List{n}([0, {c}, 2])",
        before="class List{n}(list):\n    tag = 1",
        **_LIST,
    ),
    _sequence("UserList", "collections.UserList([0, {c}, 2])", **_LIST),
    _sequence(
        "deque",
        "collections.deque([0, {c}, 2])",
        puts=("{o}[1] = {v}",),
        looks=("len({o})", "float(5 in {o})"),
        edits=(
            ("{o}.append(5)", "{o}.pop()"),
            ("{o}.appendleft(5)", "{o}.popleft()"),
            ("{o}.rotate(1)", "{o}.rotate(-1)"),
        ),
    ),
    _sequence("tuple", "(0, {c}, 2)", looks=("len({o})",)),
    Layer(
        "namedtuple",
        "Pair{n}(0, {c})",
        ("{o}.second", "{o}[1]", "{o}._asdict()['second']", "getattr({o}, 'second')"),
        before="Pair{n} = collections.namedtuple('Pair{n}', 'first second')",
    ),
    Layer(
        "NamedTuple",
        "Typed{n}({c})",
        ("{o}.second", "{o}[0]"),
        before="class Typed{n}(typing.NamedTuple):\n    second: object\n    third: int = 3",
    ),
    Layer(
        "array of objects",
        "objects([0, {c}])",
        ("{o}[1]", "{o}.tolist()[1]", "list({o})[1]"),
        ("{o}[1] = {v}",),
        ("len({o})", "{o}.size"),
    ),
    _open(_attribute("SimpleNamespace", "types.SimpleNamespace(v={c})")),
    _open(_attribute("argparse.Namespace", "argparse.Namespace(v={c})")),
    _open(_attribute("object", "filled(Plain{n}(), {c})", "class Plain{n}:\n    pass")),
    _open(
        _attribute(
            "dataclass",
            "Data{n}({c})",
            "@dataclasses.dataclass\nclass Data{n}:\n    v: object\n    w: int = 3",
        )
    ),
    _attribute(
        "frozen dataclass",
        "Frozen{n}({c})",
        "@dataclasses.dataclass(frozen=True)\nclass Frozen{n}:\n    v: object\n    w: int = 3",
        puts=("object.__setattr__({o}, 'v', {v})",),
        edits=(),
    ),
    _attribute(
        "slots of a dataclass",
        "Slotted{n}({c})",
        "@dataclasses.dataclass(slots=True)\nclass Slotted{n}:\n    v: object\n    w: int = 3",
        edits=(),
    ),
    _attribute(
        "slots",
        "filled(Slots{n}(), {c})",
        "class Slots{n}:\n    __slots__ = ('v', 'extra')",
    ),
    _attribute(
        "slots of a base",
        "filled(Sub{n}(), {c})",
        "class Base{n}:\n    __slots__ = ('v',)\nclass Sub{n}(Base{n}):\n    pass",
    ),
    _attribute(
        "attribute of the class",
        "Kind{n}()",
        "class Kind{n}:\n    v = {c}",
        puts=("type({o}).v = {v}",),
        edits=(*_SHADOW, ("{o}.extra = 5", "del {o}.extra")),
    ),
    _attribute(
        "inherited attribute of the class",
        "Derived{n}()",
        "class Root{n}:\n    v = {c}\nclass Middle{n}(Root{n}):\n    pass\n"
        "class Derived{n}(Middle{n}):\n    pass",
        puts=("Root{n}.v = {v}",),
        edits=(
            *_SHADOW,
            ("Middle{n}.v = 42", "del Middle{n}.v"),
            ("Derived{n}.v = 3", "del Derived{n}.v"),
        ),
    ),
    _attribute(
        "instance attribute over the class's",
        "filled(Over{n}(), {c})",
        "class Over{n}:\n    v = 5",
        puts=("{o}.v = {v}",),
        edits=(("_s = {o}.v; del {o}.v", "{o}.v = _s"),),
    ),
    _attribute(
        "class",
        "Spaces{n}",
        "class Spaces{n}:\n    v = {c}",
        puts=("{o}.v = {v}", "setattr({o}, 'v', {v})"),
    ),
    _attribute(
        "attribute of the metaclass",
        "Made{n}",
        "class Meta{n}(type):\n    v = {c}\nclass Made{n}(metaclass=Meta{n}):\n    pass",
        puts=("Meta{n}.v = {v}",),
        edits=(("Made{n}.v = 9", "del Made{n}.v"),),
    ),
    _attribute(
        "property",
        "filled_as(Prop{n}(), '_v', {c})",
        "class Prop{n}:\n    @property\n    def v(self):\n        return self._v",
        puts=("{o}._v = {v}",),
        edits=(("_s = Prop{n}.v; Prop{n}.v = property(lambda self: 8)", "Prop{n}.v = _s"),),
    ),
    _attribute(
        "cached_property",
        "filled_as(Cached{n}(), '_v', {c})",
        "class Cached{n}:\n    @functools.cached_property\n    def v(self):\n        return self._v",
        puts=("{o}._v = {v}; vars({o}).pop('v', None)", "vars({o})['v'] = {v}"),
        edits=(("_s = dict(vars({o})); vars({o}).pop('v', None)", "vars({o}).update(_s)"),),
    ),
    _attribute(
        "descriptor",
        "filled_as(Has{n}(), '_v', {c})",
        "class Desc{n}:\n    bonus = 0\n    def __get__(self, owner, kind=None):\n"
        "        return owner._v\nclass Has{n}:\n    v = Desc{n}()",
        puts=("{o}._v = {v}",),
        edits=(("_s = vars(Has{n})['v']; Has{n}.v = 4", "Has{n}.v = _s"),),
    ),
    _attribute(
        "__getattr__",
        "Late{n}({c})",
        "class Late{n}:\n    def __init__(self, v):\n        self.held = {{'v': v}}\n"
        "    def __getattr__(self, name):\n        if name not in self.__dict__.get('held', ()):\n"
        "            raise AttributeError(name)\n        return self.held[name]",
        puts=("{o}.held['v'] = {v}",),
        edits=_SHADOW,
        looks=(),
    ),
    _attribute(
        "__getattribute__",
        "Every{n}({c})",
        "class Every{n}:\n    def __init__(self, v):\n        self.held = v\n"
        "    def __getattribute__(self, name):\n        held = object.__getattribute__(self, 'held')\n"
        "        return held if name == 'v' else object.__getattribute__(self, name)",
        puts=("{o}.held = {v}",),
        edits=(),
        looks=(),
    ),
    _attribute(
        "enum member",
        "filled(Color{n}.RED, {c})",
        "class Color{n}(enum.Enum):\n    RED = 1\n    BLUE = 2",
        puts=("{o}.v = {v}",),
    ),
    _attribute(
        "function attribute",
        "filled(function{n}, {c})",
        "def function{n}():\n    return 1",
        puts=("{o}.v = {v}",),
    ),
    _attribute("module", "filled(types.ModuleType('made{n}'), {c})", puts=("{o}.v = {v}",)),
    _open(_attribute("nn.Module", "filled(nn.Module(), {c})", puts=("{o}.v = {v}",))),
    _attribute("thread's own", "filled(threading.local(), {c})", puts=("{o}.v = {v}",)),
    Layer(
        "module in a Sequential",
        "nn.Sequential(nn.Identity(), filled(nn.Identity(), {c}))",
        ("{o}[1].v", "list({o})[-1].v", "list({o}.children())[1].v", "{o}._modules['1'].v"),
        ("{o}[1].v = {v}", "{o}[1] = filled(nn.Identity(), {v})"),
        ("len({o})", "float(isinstance({o}[0], nn.ReLU))"),
        (("_s = {o}[0]; {o}[0] = nn.ReLU()", "{o}[0] = _s"),),
    ),
    Layer(
        "module in a ModuleDict",
        "nn.ModuleDict({{'a': nn.Identity(), 'k': filled(nn.Identity(), {c})}})",
        ("{o}['k'].v", "dict({o}.named_modules())['k'].v", "{o}.get_submodule('k').v"),
        ("{o}['k'].v = {v}", "{o}['k'] = filled(nn.Identity(), {v})"),
        ("len({o})", "float(isinstance({o}['a'], nn.ReLU))"),
        (("_s = {o}['a']; {o}['a'] = nn.ReLU()", "{o}['a'] = _s"),),
    ),
    Layer(
        "module in a ModuleList",
        "nn.ModuleList([filled(nn.Identity(), {c})])",
        ("{o}[0].v", "[m for m in {o}][0].v"),
        ("{o}[0].v = {v}", "{o}[0] = filled(nn.Identity(), {v})"),
        ("len({o})",),
    ),
    Layer(
        "weak reference",
        "weakref.ref(target{n})",
        ("{o}().v",),
        ("target{n}.v = {v}",),
        ("float({o}() is None)",),
        before="class Target{n}:\n    pass\ntarget{n} = filled(Target{n}(), {c})",
    ),
    Layer(
        "weak value",
        "weakref.WeakValueDictionary(k=target{n})",
        ("{o}['k'].v",),
        ("target{n}.v = {v}",),
        ("len({o})",),
        before="class Target{n}:\n    pass\ntarget{n} = filled(Target{n}(), {c})",
    ),
    Layer(
        "keyword of a partial",
        "functools.partial(take{n}, v={c})",
        ("{o}()", "{o}.keywords['v']"),
        ("{o}.keywords['v'] = {v}",),
        edits=(
            (
                "_s = take{n}.__kwdefaults__; take{n}.__kwdefaults__ = dict(w=2)",
                "take{n}.__kwdefaults__ = _s",
            ),
        ),
        before="def take{n}(*, v=None, w=1):\n    return v if w == 1 else 6",
    ),
    Layer(
        "argument of a partial",
        "functools.partial(take{n}, {c})",
        ("{o}()", "{o}.args[0]"),
        before="def take{n}(v):\n    return v",
    ),
    Layer(
        "bound method",
        "filled(Bound{n}(), {c}).get",
        ("{o}()", "{o}.__self__.v", "{o}.__func__({o}.__self__)"),
        ("{o}.__self__.v = {v}",),
        edits=(("_s = Bound{n}.get; Bound{n}.get = lambda self: 6", "Bound{n}.get = _s"),),
        before="class Bound{n}:\n    def get(self):\n        return self.v",
    ),
    Layer(
        "class method",
        "Own{n}",
        ("{o}.get()", "{o}().get()"),
        ("{o}.v = {v}",),
        edits=(
            (
                "_s = vars(Own{n})['get']; Own{n}.get = classmethod(lambda kind: 6)",
                "Own{n}.get = _s",
            ),
        ),
        before="class Own{n}:\n    v = {c}\n    @classmethod\n    def get(cls):\n"
        "        return cls.v",
    ),
    Layer(
        "static method",
        "Static{n}()",
        ("{o}.get()", "Static{n}.get()"),
        ("G{n} = {v}",),
        edits=(
            (
                "_s = vars(Static{n})['get']; Static{n}.get = staticmethod(lambda: 6)",
                "Static{n}.get = _s",
            ),
        ),
        before="G{n} = {c}\nclass Static{n}:\n    @staticmethod\n    def get():\n        return G{n}",
    ),
    Layer(
        "callable object",
        "filled(Call{n}(), {c})",
        ("{o}()",),
        ("{o}.v = {v}",),
        edits=(
            ("_s = Call{n}.__call__; Call{n}.__call__ = lambda self: 6", "Call{n}.__call__ = _s"),
        ),
        before="class Call{n}:\n    def __call__(self):\n        return self.v",
    ),
    Layer(
        "closure",
        "outer{n}({c})[0]",
        ("{o}()", "{o}.__closure__[0].cell_contents"),
        ("{o}.__closure__[0].cell_contents = {v}",),
        before="def outer{n}(v):\n    def get():\n        return v\n    return (get,)",
    ),
    Layer(
        "default of a lambda",
        "(lambda v={c}: v)",
        ("{o}()", "{o}.__defaults__[0]"),
        ("{o}.__defaults__ = ({v},)",),
    ),
    Layer(
        "keyword default",
        "(lambda *, v={c}: v)",
        ("{o}()", "{o}.__kwdefaults__['v']"),
        ("{o}.__kwdefaults__ = {{'v': {v}}}", "{o}.__kwdefaults__['v'] = {v}"),
    ),
    Layer(
        "context variable",
        "contextvars.ContextVar('cv{n}', default={c})",
        ("{o}.get()",),
        ("{o}.set({v})",),
    ),
    Layer(
        "__getitem__",
        "filled(Item{n}(), {c})",
        ("{o}[0]", "{o}['any']"),
        ("{o}.v = {v}",),
        edits=(
            (
                "_s = Item{n}.__getitem__; Item{n}.__getitem__ = lambda self, key: 6",
                "Item{n}.__getitem__ = _s",
            ),
        ),
        before="class Item{n}:\n    def __getitem__(self, key):\n        return self.v",
    ),
    Layer(
        "__iter__",
        "filled(Iter{n}(), {c})",
        ("[*{o}][0]", "next(iter({o}))"),
        ("{o}.v = {v}",),
        edits=(
            (
                "_s = Iter{n}.__iter__; Iter{n}.__iter__ = lambda self: iter([6])",
                "Iter{n}.__iter__ = _s",
            ),
        ),
        before="class Iter{n}:\n    def __iter__(self):\n        yield self.v",
    ),
    Layer(
        "context manager",
        "filled(Enter{n}(), {c})",
        ("entered({o})",),
        ("{o}.v = {v}",),
        edits=(
            (
                "_s = Enter{n}.__enter__; Enter{n}.__enter__ = lambda self: 6",
                "Enter{n}.__enter__ = _s",
            ),
        ),
        before="class Enter{n}:\n    def __enter__(self):\n        return self.v\n"
        "    def __exit__(self, *_):\n        pass",
    ),
    Layer(
        "lru_cache",
        "outer{n}({c})",
        ("{o}()",),
        ("{o}.__wrapped__.__closure__[0].cell_contents = {v}; {o}.cache_clear()",),
        before="def outer{n}(v):\n    @functools.lru_cache\n    def get():\n        return v\n"
        "    return get",
    ),
    Layer(
        "decorated function",
        "wrapped{n}(lambda: A{n}[0])",
        ("{o}()",),
        ("A{n}[0] = {v}",),
        before="A{n} = [{c}]\ndef wrapped{n}(f):\n    @functools.wraps(f)\n    def call(*a):\n"
        "        return f(*a)\n    return call",
    ),
    Layer(
        "singledispatch",
        "dispatch{n}",
        ("{o}(1)",),
        ("A{n}[0] = {v}",),
        edits=(
            ("_s = {o}.dispatch(int); {o}.register(int, lambda a: 6)", "{o}.register(int, _s)"),
        ),
        before="A{n} = [{c}]\n@functools.singledispatch\ndef dispatch{n}(a):\n    return 0\n"
        "@dispatch{n}.register\ndef _(a: int):\n    return A{n}[0]",
    ),
    Layer(
        "list in itself",
        "looped({c})",
        ("{o}[1]", "{o}[0][0][1]"),
        ("{o}[1] = {v}",),
        ("len({o})",),
    ),
)
