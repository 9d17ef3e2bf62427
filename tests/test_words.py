"""One word for each thing: names that were given up stay away, and a class name stands once."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "treadle"
MODULES = sorted(PACKAGE.rglob("*.py"))

GIVEN_UP_MODULES = {
    "answers": "branch_analysis",
    "at_run_time": "data_dependent",
    "bands": "sparse_maps",
    "dice": "rng_guard",
    "dict_words": "dict_fingerprint",
    "draws": "rng",
    "duplicate": "producer_duplication",
    "given": "argument_containers",
    "joining": "split_cat",
    "lookups": "index_bounds",
    "memory_words": "memory_fingerprint",
    "mentions": "code_references",
    "opened": "object_pytrees",
    "own_gradients": "unsynced_gradients",
    "place": "device_override",
    "planned_reductions": "reduction_contracts",
    "steady": "cached_facts",
    "sweep": "identity_guards",
    "tensor_words": "tensor_fingerprint",
}
GIVEN_UP_CLASSES = {
    "Account": "StepReport",
    "Asked": "Polled",
    "AtRunTime": "DataDependentOp",
    "Claims": "SaveCandidates",
    "Cluster": "ParamGroup",
    "Decline": "Unsupported",
    "Demand": "ReductionContract",
    "Domain": "GuardSet",
    "Entered": "ExecutionRecord",
    "Fixed": "FixedAttributes",
    "Fold": "Accumulator",
    "Form": "OptimizerUpdate",
    "Frame": "LoopNest",
    "Got": "Referent",
    "Handed": "EagerGradient",
    "InContext": "ContextVariable",
    "Judge": "PeakEvaluator",
    "JoinPieces": "SimplifySplitCat",
    "Known": "LoweringCache",
    "Later": "DeferredValue",
    "Left": "SideEffect",
    "Listed": "Items",
    "Made": "ObjectLayout",
    "Mentions": "CodeReferences",
    "OfClass": "ClassAttributes",
    "Outside": "ExternalState",
    "Patterns": "Specializations",
    "Place": "Location",
    "Placed": "ScheduledOp",
    "Question": "Guard",
    "Rank": "SizeKey",
    "Shell": "ObjectSpec",
    "Site": "LoweringContext",
    "StandIns": "TraceRecorder",
    "Steady": "CachedFact",
    "Story": "CompileLog",
    "Term": "ScalarExpr",
    "Terms": "ReplayPolicy",
    "Touched": "AccessSet",
    "Traffic": "RecomputeCost",
    "Unifier": "HashConsing",
    "Watch": "TraceRecorder",
    "Whole": "ArgumentAlias",
    "Whose": "CodeOwner",
    "Words": "MemoryFingerprint",
}
GIVEN_UP_NAMES = {
    "at_hand": "kernel_recompute",
    "at_run_time": "data_dependent_op",
    "cluster": "param_group",
    "clusters": "param_groups",
    "form_of": "update_rule",
    "is_aside": "is_introspection_frame",
    "judge": "evaluator",
    "judged": "evaluated",
    "keeping": "record_rng_save",
    "lookups": "index_bounds",
    "name_of_question": "os_call_name",
    "noting": "record_backward",
    "own_gradients": "unsynced_gradients",
    "settled": "cleaned",
    "whose": "code_owner",
}
"""Of functions, parameters, attributes and variables: those that are no plain English there."""


def defined_classes(tree: ast.Module) -> Iterator[str]:
    """Classes, and names of types: ``Place = tuple[str, int]``."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case _:
                pass


def defined_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case _:
                pass


def given_up(path: str, tree: ast.Module) -> list[str]:
    """What a module says otherwise than the rest of the package, each with the word for it."""
    stem = path.rpartition("/")[2].removesuffix(".py")
    modules = [f"{path}: {new}" for old, new in GIVEN_UP_MODULES.items() if stem == old]
    classes = {name.lstrip("_") for name in defined_classes(tree)} & GIVEN_UP_CLASSES.keys()
    names = {name.lstrip("_") for name in defined_names(tree)} & GIVEN_UP_NAMES.keys()
    return [
        *modules,
        *(f"{path}: {name}, say {GIVEN_UP_CLASSES[name]}" for name in sorted(classes)),
        *(f"{path}: {name}, say {GIVEN_UP_NAMES[name]}" for name in sorted(names)),
    ]


def test_words_that_were_given_up_stay_away():
    for path in MODULES:
        name = str(path.relative_to(PACKAGE))
        assert not given_up(name, ast.parse(path.read_text()))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("util/answers.py", ""),
        ("capture/x.py", "class Whose: ..."),
        ("capture/x.py", "class _Made: ..."),
        ("capture/x.py", "Place = tuple[str, int]"),
        ("capture/x.py", "def form_of(optimizer): ..."),
        ("capture/x.py", "def f(clusters): ..."),
        ("capture/x.py", "self.clusters = groups"),
        ("capture/x.py", "for _lookups in found: ..."),
    ],
)
def test_the_fence_sees_words_that_were_given_up(path, text):
    assert len(given_up(path, ast.parse(text))) == 1


def test_the_fence_lets_other_words_pass():
    assert not given_up("lower/registry.py", ast.parse("class Writes:\n    place: int = 0"))


def test_a_class_has_its_name_alone():
    """Whoever searches for a public class finds one."""
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
