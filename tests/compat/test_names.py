"""Which private names of torch are used: all stand in the table, and this version has those that
the table says."""

import ast
import functools
import importlib
import inspect
import operator
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor._random import OffsetBasedRNGTracker

from treadle.compat.names import ALL, ATTRIBUTES, EITHER, KEYWORDS, NAMES, SET

ROOM = Path(__file__).parents[2] / "src" / "treadle" / "compat"
SOURCES = sorted(path for path in ROOM.rglob("*.py") if path.name != "names.py")
VERSION = ".".join(torch.__version__.split(".")[:2])
WEIGHT = nn.Parameter(torch.zeros(2))


def wrapper():
    """A wrapper of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    finally:
        dist.destroy_process_group()


@functools.cache
def sharded():
    """A module of ``fully_shard`` in this process alone, whose weights were divided for tensor
    parallelism before and which has run once: what it has."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "parts"))
        module = parallelize_module(nn.Linear(2, 2), mesh["parts"], ColwiseParallel())
        module = fully_shard(module, mesh=mesh["copies"])
        module(torch.ones(1, 2))
    finally:
        dist.destroy_process_group()
    state = module._get_fsdp_state()
    group = state._fsdp_param_group
    parameter = group.fsdp_params[0]
    return {
        "DTensor": parameter.sharded_param,
        "FSDPState": state,
        "FSDPParamGroup": group,
        "FSDPParam": parameter,
        "TensorMeta": parameter.sharded_param._spec.tensor_meta,
        "gathered FSDPParam": parameter,
    }


SHARDED = ("DTensor", "FSDPState", "FSDPParamGroup", "FSDPParam", "TensorMeta")
EXAMPLES = {
    "DistributedDataParallel": wrapper,
    "Tensor": WEIGHT,
    "UntypedStorage": WEIGHT.untyped_storage(),
    "Module": nn.Linear(2, 2),
    "RNNBase": nn.LSTM(2, 2),
    "Optimizer": torch.optim.SGD([WEIGHT], lr=0.1),
    "OffsetBasedRNGTracker": OffsetBasedRNGTracker,
    "OpOverload": torch.ops.aten.add.Tensor,
    "Graph": fx.Graph(),
    "ProcessGroup": dist.ProcessGroup,
    "BackendOptions": dist.ProcessGroupGloo.Options,
    "BatchNorm": nn.BatchNorm1d(2),
    "GradScaler": torch.amp.GradScaler("cpu"),
}
KNOWN = {
    *(part for name in NAMES for part in name.split(".")),
    *(name for names in ATTRIBUTES.values() for name in names),
    *(name for names in EITHER.values() for name in names),
    *SET,
    *KEYWORDS,
}


def find(path: str):
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        rest = ".".join(parts[count:])
        return operator.attrgetter(rest)(module) if rest else module
    raise AttributeError(path)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(tree: ast.Module) -> set[str]:
    """Names from modules of torch, by their whole path, that have a private part."""
    found = {
        f"{node.module}.{each.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch"
        for each in node.names
    }
    return {path for path in found if any(map(is_private, path.split(".")))}


def own(tree: ast.Module) -> set[str]:
    """Private names that the module makes itself."""
    found = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def named(tree: ast.Module) -> set[str]:
    """Private names that are asked for as attributes, in texts or as keywords."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Constant(value=str(text)) if re.fullmatch(r"_[a-zA-Z]\w*[a-zA-Z0-9]", text):
                found.add(text)
            case _:
                pass
    return {name for name in found if is_private(name)} - own(tree)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_what_is_used_stands_in_the_table(path):
    tree = ast.parse(path.read_text())
    through = {path for path in imported(tree) if any(name.startswith(path) for name in NAMES)}
    assert imported(tree) - through == set()
    assert named(tree) - KNOWN == set()


def test_what_stands_in_the_table_is_used():
    text = "\n".join(path.read_text() for path in SOURCES)
    words = set(re.findall(r"\w+", text))
    assert {name.rpartition(".")[2] for name in NAMES} <= words
    assert {name for names in ATTRIBUTES.values() for name in names} <= words
    assert {name for names in EITHER.values() for name in names} <= words
    assert {*SET, *KEYWORDS} <= words


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("x._secret", {"_secret"}),
        ("getattr(x, '_secret')", {"_secret"}),
        ("f(_secret=1)", {"_secret"}),
        ("self._own = 1; y._own", set()),
        ("x.__dict__", set()),
    ],
)
def test_every_spelling_is_seen(line, found):
    assert named(ast.parse(line)) == found


@pytest.mark.parametrize("name", sorted(NAMES))
def test_this_version_has_what_the_table_says(name):
    versions = NAMES[name]
    assert set(versions) <= set(ALL)
    if "_cuda" in name and not torch.backends.cuda.is_built():
        return
    if VERSION in versions:
        assert find(name) is not None
    elif VERSION in ALL:
        with pytest.raises(AttributeError):
            find(name)


@pytest.mark.parametrize("kind", sorted(ATTRIBUTES))
def test_objects_have_what_the_table_says(kind):
    made = sharded()[kind] if kind in SHARDED else EXAMPLES[kind]
    example = made() if made is wrapper else made
    assert [name for name in ATTRIBUTES[kind] if not hasattr(example, name)] == []


@pytest.mark.parametrize("kind", sorted(EITHER))
def test_objects_have_one_of_the_names(kind):
    assert any(name in vars(sharded()[kind]) for name in EITHER[kind])


@pytest.mark.parametrize("name", sorted(SET))
def test_somebody_asks_for_what_is_set(name):
    assert name in inspect.getsource(importlib.import_module(SET[name]))


@pytest.mark.parametrize("name", sorted(KEYWORDS))
def test_private_parameters_are_there(name):
    assert name in inspect.signature(find(KEYWORDS[name])).parameters
