"""Memsets of a recorded graph as kernels: on a driver that keeps its graphs in Python."""

import subprocess
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import triton
from hypothesis import given

from treadle.runtime.replay import cuda_graph
from treadle.runtime.replay.cuda_graph import CudaRecorder, memsets_as_kernels


class Kind(Enum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMSET = 2


@dataclass(eq=False)
class Node:
    kind: Kind
    params: Any = None
    name: str = ""


@dataclass(eq=False)
class Driver:
    """What is asked of ``cuda.bindings.driver``, of one graph."""

    nodes: list[Node] = field(default_factory=list)
    edges: list[tuple[Node, Node, str]] = field(default_factory=list)
    version: int = 13000
    CUgraphNodeType = Kind
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace

    def CUgraph(self, address: int) -> int:
        return address

    def cuDriverGetVersion(self):
        return 0, self.version

    def cuGraphGetNodes(self, graph, count=0):
        return 0, self.nodes[:count], len(self.nodes)

    def cuGraphNodeGetType(self, node):
        return 0, node.kind

    def cuGraphMemsetNodeGetParams(self, node):
        return 0, node.params

    def cuGraphNodeGetDependencies(self, node, count=0):
        found = [(a, how) for a, b, how in self.edges if b is node]
        return 0, [a for a, _ in found][:count], [how for _, how in found][:count], len(found)

    def cuGraphNodeGetDependentNodes(self, node, count=0):
        found = [(b, how) for a, b, how in self.edges if a is node]
        return 0, [b for b, _ in found][:count], [how for _, how in found][:count], len(found)

    def cuGraphAddKernelNode(self, graph, before, count, params):
        assert (before, count) == (None, 0)
        self.nodes.append(Node(Kind.CU_GRAPH_NODE_TYPE_KERNEL, params))
        return 0, self.nodes[-1]

    def cuGraphAddDependencies(self, graph, before, after, how, count):
        assert len(before) == len(after) == len(how) == count
        self.edges += zip(before, after, how, strict=True)
        return (0,)

    def cuGraphDestroyNode(self, node):
        self.nodes.remove(node)
        self.edges = [each for each in self.edges if node not in each[:2]]
        return (0,)

    def cuModuleLoadData(self, image):
        return 0, "module"

    def cuModuleGetFunction(self, module, name):
        return 0, (module, name)


def memset(size: int, value: int = 0, element: int = 1, height: int = 1, first: int = 4096) -> Node:
    given = SimpleNamespace(
        dst=first, value=value, elementSize=element, width=size // element, height=height
    )
    return Node(Kind.CU_GRAPH_NODE_TYPE_MEMSET, given)


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def words(kernel: Node) -> tuple[int, int, int]:
    """Where, what and how many words."""
    assert kernel.kind is Kind.CU_GRAPH_NODE_TYPE_KERNEL
    return kernel.params.kernelParams[0]


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (memset(4), (4096, 0, 1)),
        (memset(8, value=0xAB), (4096, 0xABABABAB, 2)),
        (memset(12, value=0xABCD, element=2), (4096, 0xABCDABCD, 3)),
        (memset(16, value=0xDEADBEEF, element=4), (4096, 0xDEADBEEF, 4)),
        (memset(4096), (4096, 0, 1024)),
        (memset(4, value=0xFFFFFF80), (4096, 0x80808080, 1)),
    ],
)
def test_a_small_memset_becomes_a_kernel(node, expected):
    driver = Driver([node])
    assert memsets_as_kernels(1, driver) == 1
    (kernel,) = driver.nodes
    assert words(kernel) == expected


@pytest.mark.parametrize(
    "node",
    [memset(4100), memset(3), memset(4, first=4097), memset(8, height=2)],
    ids=["large", "no words", "not aligned", "of rows"],
)
def test_others_stay(node):
    driver = Driver([node])
    assert memsets_as_kernels(1, driver) == 0
    assert driver.nodes == [node]


@given(st.data())
def test_what_waits_for_what_stays(data):
    """Any graph: the same nodes by name, the same paths, and edges carry what they did."""
    small = data.draw(st.lists(st.sampled_from(["kernel", "small", "large"]), max_size=8))
    nodes = [Node(Kind.CU_GRAPH_NODE_TYPE_KERNEL, name=str(n)) for n in range(len(small))]
    for n, what in enumerate(small):
        if what != "kernel":
            first = 4096 + 8 * n
            nodes[n] = memset(4 if what == "small" else 8192, first=first)
            nodes[n].name = str(n)
    pairs = [(a, b) for b in range(len(nodes)) for a in range(b)]
    chosen = [pair for pair in pairs if data.draw(st.booleans())]
    driver = Driver(list(nodes), [(nodes[a], nodes[b], f"{a}>{b}") for a, b in chosen])

    assert memsets_as_kernels(1, driver) == small.count("small")

    def name(node: Node) -> str:
        return node.name or str((words(node)[0] - 4096) // 8)

    assert {name(node) for node in driver.nodes} == {str(n) for n in range(len(nodes))}
    assert len(driver.nodes) == len(nodes)
    found = {(name(a), name(b), how) for a, b, how in driver.edges}
    assert found == {(str(a), str(b), f"{a}>{b}") for a, b in chosen}
    assert len(driver.edges) == len(chosen)


def test_what_the_driver_refuses_is_said():
    def cuGraphAddKernelNode(*_):
        return (719,)

    driver = Driver([memset(4)])
    driver.cuGraphAddKernelNode = cuGraphAddKernelNode
    with pytest.raises(RuntimeError, match="cuGraphAddKernelNode: 719"):
        memsets_as_kernels(1, driver)


class Graph:
    """What ``torch.cuda.CUDAGraph`` is asked for. ``log``: what was."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.log = ["kept" if keep_graph else "not kept"]

    def raw_cuda_graph(self) -> int:
        return 1

    def instantiate(self) -> None:
        self.log.append("instantiated")

    def replay(self) -> None:
        self.log.append("replayed")


@pytest.mark.parametrize("known", [False, True])
def test_a_recording_is_changed_before_it_is_first_replayed(known, monkeypatch):
    driver = Driver([memset(4), memset(8192)])
    monkeypatch.setattr(cuda_graph, "_driver", lambda: driver if known else None)
    made: list[Graph] = []

    def recording(graph, **_):
        made.append(graph)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    result = {"y": torch.ones(1)}
    found, replay = CudaRecorder(torch.device("cpu"), lambda: None).record(lambda: result)
    replay()
    (graph,) = made
    assert found is result
    kinds = sorted(node.kind.value for node in driver.nodes)
    if known:
        assert graph.log == ["kept", "instantiated", "replayed"]
        assert kinds == [0, 2], "the large one stays"
    else:
        assert graph.log == ["not kept", "replayed"]
        assert kinds == [2, 2]


@pytest.mark.parametrize(
    ("module", "known"),
    [(Driver(), True), (Driver(version=12020), False), (None, False)],
    ids=["there", "of edges that carry nothing", "missing"],
)
def test_which_driver_is_asked(module, known, monkeypatch):
    def imported(name):
        if module is None:
            raise ModuleNotFoundError(f"No module named '{name}'; 'cuda' is not a package")
        return module

    monkeypatch.setattr(cuda_graph.importlib, "import_module", imported)
    assert cuda_graph._driver.__wrapped__() is (module if known else None)


def test_functions_of_cuda_12_that_know_edges_are_preferred():
    driver = Driver()
    driver.cuGraphAddDependencies_v2 = "the second"
    assert cuda_graph._with_edges(driver, "cuGraphAddDependencies") == "the second"


def test_the_kernel_is_assembled(tmp_path: Path):
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    source = tmp_path / "fill.ptx"
    source.write_bytes(cuda_graph._FILL.rstrip(b"\0"))
    command = [assembler, "-arch=sm_90", source, "-o", tmp_path / "fill.cubin"]
    subprocess.run(command, check=True)
