"""Checks of indices: what is waited for before a step runs, and what is launched with it."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from treadle.compat.operators.operator_facts import may_wait
from treadle.graph.analysis.index_check import IndexCheck
from treadle.graph.core.node_info import with_info
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.util.errors import BadIndex

aten = torch.ops.aten


class Heard(TorchDispatchMode):
    """The operators that run, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def step_of(program, *inputs: torch.Tensor) -> StepGraph:
    graph: fx.Graph = make_fx(program)(*inputs).graph
    for node in graph.nodes:
        with_info(node, phase="forward")
    (output,) = graph.find_nodes(op="output")
    output.args = ((output.args[0],),)
    named = tuple(Input(Role.BATCH, f"in{at}") for at in range(len(inputs)))
    return StepGraph(graph, Signature(named, (Output("out"),)))


def heard(program, *devices: str) -> tuple[list[str], list[str]]:
    """Operators of the checks that come before, and of those that are launched. The table is on the
    first device, indices are on the others."""
    mode = FakeTensorMode()
    with mode:
        table, *others = devices
        inputs = [torch.empty(7, 3, device=table)]
        inputs += [torch.zeros(5, device=each, dtype=torch.int64) for each in others]
        check = IndexCheck.of(step_of(program, *inputs))
    found = []
    for run in (check.require, check.launch):
        with mode, Heard() as names:
            run(inputs)
        found.append(names.names)
    return found[0], found[1]


def shifted(table, index):
    return aten.embedding(table, aten.add.Tensor(aten.slice.Tensor(index, 0, 1), 1))


def test_on_a_device_everything_is_launched():
    before, launched = heard(shifted, "cuda", "cuda")
    assert before == []
    assert launched == ["slice", "add", "ge", "le", "bitwise_and", "all", "_assert_async"]


def test_what_comes_from_the_host_is_launched_apart():
    def program(table, index):
        return aten.embedding(table, aten.add.Tensor(aten._to_copy(index, device="cuda"), 1))

    before, launched = heard(program, "cuda", "cpu")
    assert before[0] == "_to_copy"
    assert before[-1] == "_assert_async"
    assert launched == [], "a recording would copy the first call's index for ever"


def test_what_may_wait_is_launched_apart():
    def program(table, index):
        return aten.embedding(table, aten.put.default(index, index, index))

    assert may_wait("aten.put.default", masks=False)
    before, launched = heard(program, "cuda", "cuda")
    assert (before[0], before[-1]) == ("put", "_assert_async")
    assert launched == []


def test_what_is_drawn_is_not_checked():
    def program(table, index):
        return aten.embedding(table, aten.randint(5, [5], device=table.device) + index)

    assert heard(program, "cuda", "cuda") == ([], [])


def test_each_is_checked_where_it_can_be():
    def program(table, near, far):
        return aten.embedding(table, near) + aten.embedding(table, far + 1)

    before, launched = heard(program, "cuda", "cuda", "cuda")
    assert before == []
    assert launched.count("_assert_async") == 2


def test_on_the_host_all_are_waited_for():
    index = torch.tensor([0, 1, 4, 2])
    table = torch.randn(6, 3)
    check = IndexCheck.of(step_of(shifted, table, index))
    check.require([table, index])
    bad = [table, index + 1]
    with pytest.raises(BadIndex, match="accepts 0 to 5, but received 3 to 6"):
        check.require(bad)
    check.launch(bad)


def test_bits_as_an_index_are_checked_as_what_they_are_read_as():
    def program(table, bits):
        return aten.embedding(table, aten.view.dtype(bits, torch.int64))

    table, bits = torch.zeros(7, 3), torch.tensor([2, 5]).view(torch.int32)
    check = IndexCheck.of(step_of(program, table, bits))
    check.require([table, bits])
    with pytest.raises(BadIndex, match="accepts 0 to 6, but received 2 to 4294967296"):
        check.require([table, torch.tensor([2, 1 << 32]).view(torch.int32)])


@pytest.mark.parametrize(
    ("rows", "pad", "asked"),
    [
        (6, -100, 1),  # what is looked up holds for the targets too
        (6, 3, 1),
        (5, -100, 1),
        (7, -100, 2),  # a row that is no class
        (6, -1, 2),  # nor is the pad
        (6, 6, 2),
    ],
)
def test_what_another_check_implies_is_not_asked(rows, pad, asked):
    def program(table, tokens):
        targets = aten.constant_pad_nd(tokens, [0, 1], pad)[1:].view(-1)
        scores = aten.embedding(table, tokens)
        return aten.nll_loss_forward(scores, targets, None, 1, -100)[0]

    table, tokens = torch.randn(rows, 6), torch.tensor([0, 1, 4, 2])
    with FakeTensorMode() as mode:  # eager refuses some of these pads
        fakes = [mode.from_tensor(each) for each in (table, tokens)]
        check = IndexCheck.of(step_of(program, *fakes))
    assert len(check.before.checks) == asked
    if asked == 1:
        check.require([table, tokens])
    with pytest.raises(BadIndex, match="embedding"):
        check.require([table, tokens + rows])


def test_a_check_of_some_elements_implies_nothing_of_all():
    def program(table, other, index):
        return aten.embedding(table, index[1:]).sum() + aten.embedding(other, index).sum()

    table, other, index = torch.randn(5, 3), torch.randn(7, 3), torch.tensor([6, 1, 4])
    check = IndexCheck.of(step_of(program, table, other, index))
    assert len(check.before.checks) == 2
    check.require([table, other, index])
