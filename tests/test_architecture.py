"""The shape of the code, checked like any other promise."""

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

from treadle.report.stages import ORDER

PACKAGE = Path(__file__).parent.parent / "src" / "treadle"
# Lowest first. A module may import floors below its own and its own room, nothing else.
FLOORS = (
    {"util"},
    {"algebra"},
    {"compat", "options"},
    {"targets"},
    {"graph", "loop", "runtime"},
    {"guards"},
    {"capture", "passes", "lower", "schedule", "codegen"},
    {"report"},
    {"compiler"},
    {"session"},
    {"api", "backend"},
    {"tools", "exports", "integrations"},
    {"__main__", "__init__"},
)
OUTSIDE = {"__init__", "__main__", "api", "backend", "exports", "options"}
"""All that stands outside a room."""
FORBIDDEN = {
    "passes": {"loop", "runtime"},
    "schedule": {"graph"},
    "codegen": {"graph"},
    "runtime": {"graph", "loop", "options"},
    "guards": {"graph", "loop"},
}
STAGES = {"graph", "loop", "passes", "lower", "schedule", "codegen", "report", "compiler"}
MAY_ASK = {"report/step_report.py", "compiler/planning.py"}  # what a step ran on, and where to
MODULES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def level(name: str) -> int:
    return next(i for i, floor in enumerate(FLOORS) if name in floor)


def imported_modules(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found


def rooms_imported(tree: ast.Module) -> set[str]:
    modules = [each.split(".") for each in imported_modules(tree)]
    return {parts[1] for parts in modules if parts[0] == "treadle" and len(parts) > 1}


@functools.cache
def walk(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree: every fence goes through them."""
    return tuple(ast.walk(tree))


@functools.cache
def parse(path: Path) -> ast.Module:
    """Read by most tests here, and by nobody after them."""
    return ast.parse(path.read_text())


@pytest.fixture(autouse=True, scope="module")
def _forgotten():
    yield
    for each in (parse, walk, ours, classes):
        each.cache_clear()


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_modules_stand_on_a_floor():
    for path in MODULES:
        assert any(room(path) in floor for floor in FLOORS), f"{room(path)} has no floor"
        assert path.parent != PACKAGE or room(path) in OUTSIDE, f"{path.name} stands in no room"


def test_modules_keep_to_their_floors():
    for path in MODULES:
        own = room(path)
        for other in rooms_imported(parse(path)) - {own, "__version__"}:
            words = f"{name_of(path)}: {own} must not know {other}"
            assert level(other) < level(own), words
            assert other not in FORBIDDEN.get(own, set()), words


def test_folders_hold_twenty_files_at_most():
    counts = Counter(str(each.parent.relative_to(PACKAGE)) for each in MODULES)
    assert {name: count for name, count in counts.items() if count > 20} == {}


LONGER = {
    "algebra/index.py", "api.py", "capture/python_state/containers/container_recorders.py",
    "capture/symbolic/deferred.py", "capture/symbolic/numbers.py", "graph/analysis/dynamic.py",
    "lower/operators/pointwise.py", "options.py", "schedule/fuse.py", "session/variants/guards.py",
}  # fmt: skip
"""One subject each, and no seam to part it at."""


def test_files_have_450_lines_at_most():
    longer = {name_of(path) for path in MODULES if path.read_text().count("\n") > 450}
    assert longer == LONGER


def test_a_room_within_a_room_says_what_it_is_for():
    for path in MODULES:
        if path.name == "__init__.py" and len(path.relative_to(PACKAGE).parts) > 2:
            assert ast.get_docstring(parse(path)), name_of(path)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_modules(tree: ast.Module) -> set[str]:
    """Imports from torch with a private part."""
    return {
        each
        for each in imported_modules(tree)
        if each.split(".")[0] == "torch" and any(map(is_private, each.split(".")))
    }


def made_here(tree: ast.Module) -> set[str]:
    """Private names that the module makes: attributes of its own, functions, classes, values."""
    found: set[str] = set()
    for node in walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case _:
                pass
    return found


@functools.cache
def ours() -> set[str]:
    """What any of the modules makes."""
    return set().union(*(made_here(parse(path)) for path in MODULES))


OPERATORS = ("aten.", "torch.ops.aten.")
"""What they are called is a part of every saved graph, whatever the name begins with."""
OF_OTHERS = {
    "sys._getframe", "functools._lru_cache_wrapper", "np.random.mtrand._rand", "random._inst",
}  # fmt: skip


def private_attributes(tree: ast.Module) -> set[str]:
    """Private attributes that nothing of ours makes, operators of PyTorch's aside."""
    texts = {
        ast.unparse(node)
        for node in walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in ours()
    }
    return {text for text in texts if not text.startswith(OPERATORS)} - OF_OTHERS


def test_private_torch_is_named_in_one_room():
    """There ``tests/compat`` looks at it."""
    for path in MODULES:
        if room(path) != "compat":
            tree = parse(path)
            private = private_modules(tree) | private_attributes(tree)
            assert not private, f"{name_of(path)}: move it to compat"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """By module, those it imports: at its top, inside functions, and for the type checker only."""
    found: dict[str, set[str]] = {}
    for name, tree in trees.items():
        told = imported_modules(tree)
        told |= {each.rpartition(".")[0] for each in told if each not in trees}
        found[name] = (told & trees.keys()) - {name}
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach each other by imports."""
    reached: dict[str, set[str]] = {}
    for name in graph:
        seen, pending = set[str](), [name]
        while pending:
            new = graph[pending.pop()] - seen
            seen |= new
            pending += new
        reached[name] = seen
    groups = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph
    }
    return sorted(sorted(group) for group in groups if group)


def test_no_modules_import_each_other():
    """One can be read before the other. An import inside a function hides a circle, and one for
    the type checker alone says that there is one."""
    trees = {module_name(path): parse(path) for path in MODULES}
    assert circles(import_graph(trees)) == []


@pytest.mark.parametrize(
    "back",
    [
        "from treadle.a import f",
        "def g():\n    from treadle.a import f",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from treadle.a import A",
        "import treadle.a as a",
        "from treadle import a",
    ],
)
def test_circles_are_seen_however_they_are_written(back):
    sources = {
        "treadle.a": "from treadle.b import g",
        "treadle.b": "from treadle.c import h",
        "treadle.c": back,
        "treadle.d": "from treadle.a import f",
    }
    graph = import_graph({name: ast.parse(text) for name, text in sources.items()})
    assert circles(graph) == [["treadle.a", "treadle.b", "treadle.c"]]


def test_the_fence_sees_private_torch():
    assert private_modules(ast.parse("from torch._ops import OpOverload"))
    assert private_modules(ast.parse("from torch import _dynamo"))
    assert private_attributes(ast.parse("x.untyped_storage()._cdata"))
    assert not private_attributes(ast.parse("torch.ops.aten._to_copy.default"))


STAGE_MODULES = [p for p in MODULES if room(p) in STAGES and name_of(p) not in MAY_ASK]


def ambient_reads(tree: ast.Module) -> list[str]:
    """Where code asks the process and not its arguments: settings of PyTorch, the environment."""
    found: list[str] = []
    for node in walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            settings = text.startswith(("torch.get_", "torch.are_", "torch.backends", "torch.cuda"))
            asked = text.startswith("torch.is_") and text.endswith("enabled")
            if settings or asked or text.startswith(("os.environ", "os.getenv", "platform.")):
                found.append(text)
    return found


def test_stages_see_nothing_but_what_they_are_given():
    """Otherwise the key of the cache would not tell: see ``compiler/request.py``."""
    for path in STAGE_MODULES:
        assert not ambient_reads(parse(path)), name_of(path)


def test_the_fence_sees_ambient_reads():
    lines = ("torch.get_num_threads()", "torch.backends.mkldnn.enabled", "os.environ['X']")
    assert all(ambient_reads(ast.parse(line)) for line in lines)
    assert not ambient_reads(ast.parse("torch.is_tensor(x); torch.full((), 1)"))


def stages_of(tree: ast.Module) -> list[str]:
    """The names given to ``clock.stage``."""
    return [
        node.args[0].value
        for node in walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "clock.stage"
        and isinstance(node.args[0], ast.Constant)
    ]


def test_there_is_one_list_of_stages():
    """``tools`` shows what it does by itself on the same clock; nothing else has stages."""
    found = {name_of(path): stages_of(parse(path)) for path in MODULES if room(path) != "tools"}
    named = {name: stages for name, stages in found.items() if stages}
    assert set(named) == {
        "session/starts.py", "session/variants/compiling.py", "compiler/pipeline.py",
        "compiler/stored_build.py",
    }  # fmt: skip
    every = {stage for stages in named.values() for stage in stages}
    assert sorted(every) == sorted(stage.name for stage in ORDER)


TABLE = {"compat/operators/operator_facts.py", "compat/operators/schemas.py"}
"""Who asks PyTorch what an operator does. All others ask the table."""
MAKES = {
    "compat/operators/custom_op.py": {"tags"},
    "compat/operators/rng_operators.py": {"nondeterministic_seeded"},
    "runtime/execute/functional.py": {"alias_info"},
}
"""Who makes operators of ours, with tags of their own or of another, or after its schema."""


def asks_operators(tree: ast.Module) -> set[str]:
    """Questions to PyTorch about what an operator does: its tags, whether its schema writes."""
    attributes = {node.attr for node in walk(tree) if isinstance(node, ast.Attribute)}
    return attributes & {"tags", "is_mutable", "is_write", "alias_info", "nondeterministic_seeded"}


def test_facts_about_operators_stand_in_one_table():
    for path in MODULES:
        name = name_of(path)
        if name not in TABLE:
            assert not asks_operators(parse(path)) - MAKES.get(name, set()), f"{name}: ask facts_of"


def test_operators_of_ours_are_made_by_records():
    for path in MODULES:
        asked = {ast.unparse(n) for n in walk(parse(path)) if isinstance(n, ast.Attribute)}
        own = name_of(path) == "compat/operators/custom_op.py"
        assert own or "torch.library" not in asked, f"{name_of(path)}: make a CustomOp"


def test_the_fence_sees_questions_about_operators():
    assert asks_operators(ast.parse("torch.Tag.core in op.tags"))
    assert asks_operators(ast.parse("schema_of(op).is_mutable"))
    assert not asks_operators(ast.parse("facts_of(op).writes"))


NOTES = {
    "graph/core/node_info.py", "compat/dynamo.py", "compat/operators/traced_operations.py",
}  # fmt: skip
"""Who names what is noted of a node: one for treadle, one for what AOTAutograd notes, and what
notes values in the place of PyTorch's tracer."""


def asks_notes(tree: ast.Module) -> bool:
    """Whether ``node.meta`` is read or written."""
    return any(isinstance(node, ast.Attribute) and node.attr == "meta" for node in walk(tree))


def test_what_is_noted_of_a_node_is_one_record():
    for path in MODULES:
        name = name_of(path)
        assert name in NOTES or not asks_notes(parse(path)), f"{name}: ask graph/core/node_info.py"


WALKS = {"map_arg", "map_aggregate"}


def test_nested_arguments_have_one_map():
    for path in MODULES:
        names = {each.rpartition(".")[2] for each in imported_modules(parse(path))}
        own = name_of(path) == "graph/core/arguments.py"
        assert own or not names & WALKS, f"{name_of(path)}: ask graph/core/arguments.py"


def test_the_fence_sees_notes_of_nodes():
    lines = ("node.meta['val']", "node.meta.get('phase')", "new.meta = dict(old.meta)")
    assert all(asks_notes(ast.parse(line)) for line in lines)
    assert not asks_notes(ast.parse("value_of(node)"))


def test_imports_are_absolute():
    for path in MODULES:
        relative = [node for node in walk(parse(path)) if isinstance(node, ast.ImportFrom)]
        assert all(node.level == 0 for node in relative), name_of(path)


@pytest.mark.parametrize(
    ("line", "rooms"),
    [
        ("from treadle.graph.core.types import type_of", {"graph"}),
        ("import treadle.loop.expr as e", {"loop"}),
        ("from treadle import options", {"options"}),
        ("import torch", set()),
    ],
)
def test_the_fence_sees_every_spelling(line, rooms):
    assert rooms_imported(ast.parse(line)) == rooms


LIBRARIES = {
    "accelerate", "argparse", "datetime", "decimal", "lightning", "logging", "mpmath", "numpy",
    "random", "re", "sympy", "time", "torch.amp", "torch.distributed.fsdp", "torch.nn.parallel",
    "torch.optim.swa_utils", "torchmetrics", "tqdm", "tracemalloc", "transformers", "warnings",
}  # fmt: skip
"""Whose facts stand in ``capture/integrations``. What belongs to the interpreter is none of them:
``sys``, ``threading``, ``inspect``, ``dis``; ``linecache`` and ``traceback`` have users' lines."""
NUMBERS_OF_NUMPY = {
    "numbers", "number_forms", "number_lists", "entries", "arrays", "array_functions",
    "deferred_arrays", "plain_values", "reductions",
}  # fmt: skip
"""Modules in which numbers and arrays of NumPy's are plain values, or others stand in for them."""


def libraries_named(tree: ast.Module) -> set[str]:
    """Those that are imported, or whose name is written as a text."""
    constants = {node.value for node in walk(tree) if isinstance(node, ast.Constant)}
    named = imported_modules(tree) | {each for each in constants if type(each) is str}
    return {
        library
        for library in LIBRARIES
        if any(each == library or each.startswith(f"{library}.") for each in named)
    }


def test_libraries_are_named_by_integrations_alone():
    for path in MODULES:
        if room(path) == "capture" and "integrations" not in path.parts:
            allowed = {"numpy"} if path.stem in NUMBERS_OF_NUMPY else set[str]()
            named = libraries_named(parse(path)) - allowed
            assert not named, f"{name_of(path)} names {named}: ask capture/integrations/registry.py"


def test_the_fence_sees_names_of_libraries():
    for text in ("import numpy as np", "from torch.nn.parallel import X", "kind == 'tqdm.auto'"):
        assert libraries_named(ast.parse(text))
    assert not libraries_named(ast.parse("import torch.nn.functional; x = 'tqdms'"))


DEVICES = {"cpu", "cuda"}


def asks_for_a_device(node: ast.AST) -> bool:
    """Whether a name of a device is compared with something, or looked for at its beginning."""
    match node:
        case ast.Compare(left=left, comparators=others):
            parts = [left, *others]
            return any(isinstance(p, ast.Constant) and p.value in DEVICES for p in parts)
        case ast.Call(func=ast.Attribute(attr="startswith"), args=[ast.Constant(value=str(text))]):
            return text in DEVICES
        case ast.Attribute(attr="is_cuda"):
            return True
        case _:
            return False


def test_only_targets_asks_what_a_device_is_called():
    for path in MODULES:
        if room(path) != "targets":
            asked = [node for node in walk(parse(path)) if asks_for_a_device(node)]
            lines = [f"{name_of(path)}:{n.lineno}" for n in asked if isinstance(n, ast.expr)]
            assert not asked, f"{lines}: ask the target's record"


def test_the_fence_sees_names_of_devices():
    for text in ("x.type == 'cuda'", "'cuda' in kinds", "x.startswith('cuda')", "x.is_cuda"):
        assert any(map(asks_for_a_device, walk(ast.parse(text))))


def names_of_bases(node):
    for base in node.bases:
        each = base.value if isinstance(base, ast.Subscript) else base
        yield each.id if isinstance(each, ast.Name) else each.attr


@functools.cache
def classes() -> dict[str, ast.ClassDef]:
    """All of them by name: where they stand twice, the last."""
    return {
        node.name: node
        for path in MODULES
        for node in walk(parse(path))
        if isinstance(node, ast.ClassDef)
    }


def all_bases(node):
    """Its classes above; ``None`` for one of others', whose methods nobody here can see."""
    for name in names_of_bases(node):
        if name in ("Generic", "Protocol", "StrEnum", "Exception"):
            continue
        yield classes().get(name)
        if name in classes():
            yield from all_bases(classes()[name])


def says_elsewhere(owner, name):
    """Whether what a method is for stands where it was declared first."""
    above = [] if owner is None else [*all_bases(owner)]
    methods = (each for base in above if base for each in base.body)
    return None in above or any(getattr(each, "name", "") == name for each in methods)


def silent(body, owner=None):
    """Public classes, functions and methods that do not say what they are."""
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        marks = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
        says = ast.get_docstring(node) or says_elsewhere(owner, node.name)
        if not says and not marks & {"overload", "setter"}:
            yield f"{node.lineno}: {node.name}"
        if isinstance(node, ast.ClassDef):
            yield from silent(node.body, node)


def test_what_is_public_says_what_it_is():
    for path in MODULES:
        assert not [*silent(parse(path).body)], name_of(path)
