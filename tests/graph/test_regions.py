"""Regions: as large as they can be, and no path leaves one and comes back."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from testing import trace
from treadle.graph.analysis.execute import run_step
from treadle.graph.core.node_info import info, value_of, with_info
from treadle.graph.core.verify import verify
from treadle.graph.regions.regions import EAGER, NATIVE, Region, computes, grow, refused, regions_of
from treadle.util.errors import VerifyError


@st.composite
def dags(draw):
    count = draw(st.integers(0, 24))
    kinds = draw(st.lists(st.sampled_from([NATIVE, EAGER]), min_size=count, max_size=count))
    operands = [
        sorted(draw(st.sets(st.integers(0, at - 1), max_size=3))) if at else []
        for at in range(count)
    ]
    return kinds, operands


def reachable(operands):
    """Of each number all that it depends on."""
    found = []
    for each in operands:
        found.append(set(each).union(*(found[before] for before in each)))
    return found


def has_circle(groups, operands):
    owner = {each: at for at, group in enumerate(groups) for each in group}
    needs = {
        at: {owner[before] for each in group for before in operands[each]} - {at}
        for at, group in enumerate(groups)
    }
    while needs:
        ready = [at for at, missing in needs.items() if not missing & needs.keys()]
        if not ready:
            return True
        for at in ready:
            del needs[at]
    return False


@settings(deadline=None, max_examples=300)
@given(dags())
def test_regions_are_convex_acyclic_and_maximal(dag):
    kinds, operands = dag
    groups = grow(kinds, operands)
    assert sorted(itertools.chain(*groups)) == list(range(len(kinds)))
    assert not has_circle(groups, operands)
    before = reachable(operands)
    for group in groups:
        assert len({kinds[each] for each in group}) == 1
        for outside in set(range(len(kinds))) - set(group):
            comes_from = before[outside] & set(group)
            leads_to = any(outside in before[each] for each in group)
            assert not (comes_from and leads_to)
    owner = {each: at for at, group in enumerate(groups) for each in group}
    for at, needs in enumerate(operands):  # they run in this order
        assert all(owner[each] <= owner[at] for each in needs)
    for first, second in itertools.combinations(groups, 2):
        if kinds[first[0]] == kinds[second[0]]:
            rest = [each for each in groups if each not in (first, second)]
            assert has_circle([*rest, [*first, *second]], operands)


def test_neighbours_in_the_text_are_not_the_measure():
    # a linear scan would cut at 1 and make two native regions of 0, 2 and 3
    assert grow([NATIVE, EAGER, NATIVE, NATIVE], [[], [0], [0], [2]]) == [[0, 2, 3], [1]]
    assert grow([NATIVE, EAGER, NATIVE], [[], [0], [0, 1]]) == [[0], [1], [2]]


def step_of():
    def program(x, w):
        a, b = x.exp().split(2)
        return torch.erfinv(a.log()).neg() + b @ w

    return trace(program, torch.rand(4, 3), torch.rand(3, 3))


def regions(step, *names):
    reasons = {node: "TR-312: none" for node in step.graph.nodes if node.name in names}
    return regions_of(step.graph, reasons)


def test_containers_do_not_cross_a_border():
    for names in (["split"], ["erfinv"], ["exp", "neg"], ["split", "mm"]):
        found = regions(step_of(), *names)
        crossing = [value_of(each) for region in found for each in region.outputs]
        assert crossing
        assert all(isinstance(each, torch.Tensor) for each in crossing)
        for region in found:  # whoever unpacks is where the container is made
            assert all(not isinstance(value_of(each), tuple | list) for each in region.inputs)


def test_a_container_that_is_used_as_a_whole_is_an_error_that_shows_its_users():
    step = step_of()
    (split,) = (node for node in step.graph.nodes if node.name == "split")
    (output,) = step.graph.find_nodes(op="output")
    with step.graph.inserting_before(output):
        joined = step.graph.call_function(torch.ops.aten.cat.default, (split,))
        with_info(joined, phase="forward")
        joined.meta["val"] = value_of(step.placeholders[0])
    for check in (verify, lambda step: regions_of(step.graph, {})):
        with pytest.raises(VerifyError) as error:
            check(step)
        assert "split gives several values, and cat_default uses them" in str(error.value)
        assert "getitem" in str(error.value)


def test_constants_are_passed_in():
    step = trace(lambda x: x.exp() + torch.arange(3.0), torch.rand(3))
    owner, output = nn.Module(), next(iter(step.graph.find_nodes(op="output")))
    owner.table = torch.rand(3)
    step.graph.owning_module = owner
    (total,) = output.args[0]
    with step.graph.inserting_before(output):
        table = step.graph.get_attr("table")
        table.meta["val"] = value_of(total)
        new = step.graph.call_function(torch.ops.aten.mul.Tensor, (total, table))
        new.meta["val"] = value_of(total)
        with_info(new, phase="forward")
    output.args = ((new,),)
    (region,) = regions_of(step.graph, {})
    assert table in region.inputs
    alone = region.step()
    assert not alone.graph.find_nodes(op="get_attr")
    verify(alone)
    x = torch.rand(3)
    given = {"table": owner.table}
    values = [given.get(node.name, x) for node in alone.placeholders]
    expected = (x.exp() + torch.arange(3.0)) * owner.table
    torch.testing.assert_close(run_step(alone, values)[0], expected)


def test_what_is_known_of_a_value_is_known_at_the_border():
    step = step_of()
    for node in step.graph.nodes:
        if node.op == "call_function":
            with_info(node, where=f"net.py:{node.name}", module=f"net.{node.name}")
    for region in regions(step, "erfinv"):
        alone = region.step()
        verify(alone)
        originals = {each.name: each for each in step.graph.nodes}
        for copy in alone.graph.nodes:
            if copy.op != "output":
                assert info(copy) == info(originals[copy.name])
                assert value_of(copy) is value_of(originals[copy.name])


def test_regions_one_after_another_are_the_graph():
    step = step_of()
    inputs = [torch.rand(4, 3), torch.rand(3, 3)]
    for names in ([], ["erfinv"], ["exp", "mm"], ["split", "neg"]):
        values = dict(zip([each.name for each in step.placeholders], inputs, strict=True))
        for region in regions(step, *names):
            alone = region.step()
            made = run_step(alone, [values[each.name] for each in region.inputs])
            values |= {each.name: value for each, value in zip(region.outputs, made, strict=True)}
        (returned,) = step.returned
        torch.testing.assert_close(values[returned.name], run_step(step, inputs)[0], rtol=0, atol=0)


def test_what_is_in_order_stays_in_order():
    step = trace(
        lambda x: torch.bernoulli(x) + torch.erfinv(x) + torch.bernoulli(x.exp()), torch.rand(3)
    )
    first, second = (node for node in step.graph.nodes if node.name.startswith("bernoulli"))
    for names in (["bernoulli"], ["bernoulli_1"], ["erfinv"]):
        found = regions(step, *names)
        owner = {node: region.number for region in found for node in region.nodes}
        assert owner[first] <= owner[second]


def test_small_regions_are_refused():
    found = regions(step_of(), "erfinv")
    sizes = [each.operations for each in found if each.compiler == NATIVE]
    assert refused(found, 0, None) == []
    assert sorted(sizes) == [2, 3]
    assert [each.operations for each in refused(found, 3, None)] == [2]
    asked: list[Region] = []
    assert refused(found, 0, lambda region: not asked.append(region)) == []
    assert len(asked) == len(sizes)
    assert refused(found, 0, lambda region: region.number > 0) == [found[0]]
    step = step_of()
    names = {node.name for node in step.graph.nodes if computes(node)}
    assert names == {"exp", "log", "erfinv", "neg", "mm", "add"}


def test_the_text_of_a_region():
    first, *_ = regions(step_of(), "exp")
    assert first.text.startswith("# region 0: eager, 1 operation\n# exp: TR-312: none\n")
    assert "exp" in first.text.splitlines()[3]
