"""Conditions that only raise: the outcome that does not raise is assumed, and checked by every
call.

::

    before:  n = lt(v, 0);  a = any(n);  [if a: raise ...]
    after:   n = lt(v, 0);  a = any(n);  h = eq(a, 0);  expect(h)

A step has one ``expect`` for all its conditions, before the first operation after the last
condition that is not part of the forward: nothing large is written before that. A branch on a size
also has its own ``expect`` where the size is needed, because the code that follows may fail for
other sizes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch import Tensor, fx
from torch.distributions import constraints

from treadle.capture.explain_errors import here
from treadle.capture.python_state.code.frames import CodeOwner, code_owner
from treadle.capture.symbolic.branches.decisions import MOST_DECISIONS, Answers, ValueDecision
from treadle.compat.fake import FakeTensor
from treadle.graph.core.node_info import copy_notes, info, set_value, tensor_of, with_info
from treadle.graph.custom_ops.expect import expect
from treadle.util.frames.branch_analysis import answer_without_error

aten = torch.ops.aten
_OF_SIZE = "size"


@dataclass
class Conditions:
    """The conditions that a run has met, in order: what ``asked`` them, and the user's line;
    ``cleared``: leaves whose gradients the step had cleared when the first was met. ``path``: the
    answers to its first decisions, of which both ways go on; those after them are guessed; or
    ``None``: it may have none."""

    asked: list[tuple[object, ...]] = field(default_factory=list[tuple[object, ...]])
    where: list[str] = field(default_factory=list[str])
    cleared: frozenset[int] = frozenset()
    path: Answers | None = ()
    decisions: list[ValueDecision] = field(default_factory=list[ValueDecision])

    def answer(
        self,
        value: Tensor,
        frame: FrameType | None,
        cleared: set[int],
        *,
        guess: bool = False,
        of_size: bool = False,
    ) -> bool | None:
        """What ``frame``, which asks whether ``value`` is true, is to be told; ``None`` if that is
        not known. No frame: an operation of PyTorch's asks. ``cleared``: leaves whose gradients the
        step has cleared by now."""
        if not isinstance(value, FakeTensor) or value.shape != (1,) * value.dim():
            return None
        answer = None if frame is None else answer_without_error(frame, _is_ours)
        if frame is None or answer is None:
            is_branch = frame is not None
            return self.decide(value, cleared, guess=guess, is_branch=is_branch, of_size=of_size)
        self._take(value, answer, (frame.f_code, frame.f_lasti, answer, None), cleared)
        return answer

    def decide_likely(self, value: Tensor, cleared: set[int]) -> bool | None:
        """Likewise of what is rarely false: taken for granted where a run may have no path."""
        if self.path is None:
            self.require(value, cleared)
            return True
        return self.decide(value, cleared, guess=True, is_branch=False, is_likely=True)

    def decide(
        self,
        value: Tensor,
        cleared: set[int],
        *,
        guess: bool = False,
        is_branch: bool = True,
        is_likely: bool = False,
        of_size: bool = False,
    ) -> bool | None:
        """Whether ``value`` is true along the path of this run; ``None`` if it may have none.
        ``is_branch``: the user's code asks. ``of_size``: what follows may fail where another
        answer holds."""
        if self.path is None or len(self.decisions) == MOST_DECISIONS:
            return None
        number = len(self.decisions)
        answer = bool(self.path[number]) if number < len(self.path) else guess
        self.decisions.append(ValueDecision(answer, here(), is_branch, is_likely))
        self._take(value, answer, (_OF_SIZE, number) if of_size else (number,), cleared)
        return answer

    def decide_numbers(self, values: Sequence[Tensor], cleared: set[int]) -> Answers | None:
        """The whole numbers that ``values`` are along the path of this run; ``None`` if it may have
        none, or ends before (``lacks_numbers``): then all of them are asked for."""
        first = len(self.decisions)
        if self.path is None or first + len(values) > MOST_DECISIONS:
            return None
        for number, value in enumerate(values, first):
            answer = self.path[number] if number < len(self.path) else None
            self.decisions.append(ValueDecision(answer, here(), is_number=True))
            self._take(value, answer or 0, (_OF_SIZE, number), cleared)
        return None if self.lacks_numbers else self.path[first : len(self.decisions)]

    def _take(
        self, value: Tensor, answer: int, asked: tuple[object, ...], cleared: set[int]
    ) -> None:
        """For granted that ``value`` is true, that it is not, or that it is this number."""
        if not self.asked:
            self.cleared = frozenset(cleared)
        with torch.no_grad():
            plain = value.detach().reshape(())
            holds = plain.ne(0) if answer is True else plain.eq(answer)
            self.asked.append(asked)
            expect(holds)
        self.where.append(here())

    def require(self, holds: Tensor, cleared: set[int]) -> None:
        """Take for granted that a 0-dim tensor is true."""
        self._take(holds, True, (here(), None), cleared)

    @property
    def lacks_numbers(self) -> bool:
        """Whether Python needed a whole number that the path of this run does not have."""
        return any(decision.answer is None for decision in self.decisions)

    @property
    def has_guessed(self) -> bool:
        """Whether an answer was taken that nobody gave."""
        return self.path is not None and len(self.decisions) > len(self.path)

    def keeps(self, leaf: Tensor) -> bool:
        """Whether a gradient that the step clears was still there when it first asked."""
        return bool(self.asked) and id(leaf) not in self.cleared


def constraint_checks() -> list[tuple[type, str, Callable[..., Tensor]]]:
    """Checks of ``torch.distributions`` that look at a value only to be done sooner: without."""

    def symmetric(self: object, value: Tensor) -> Tensor:
        if value.shape[-2] != value.shape[-1]:
            return constraints.square.check(value)
        return torch.isclose(value, value.mT, atol=1e-6).all(-2).all(-1)

    def definite(self: object, value: Tensor) -> Tensor:
        return symmetric(self, value) & torch.linalg.cholesky_ex(value).info.eq(0)

    def semidefinite(self: object, value: Tensor) -> Tensor:
        return symmetric(self, value) & torch.linalg.eigvalsh(value).ge(0).all(-1)

    return [
        (type(constraints.symmetric), "check", symmetric),
        (type(constraints.positive_definite), "check", definite),
        (type(constraints.positive_semidefinite), "check", semidefinite),
    ]


def _is_ours(frame: FrameType) -> bool:
    return code_owner(frame.f_code.co_filename) is CodeOwner.OURS


def join_conditions(graph: fx.Graph) -> list[fx.Node]:
    """One ``expect`` for each device, of all conditions there; returned are those of decisions, in
    their order.

    before:  expect(a);  b = ...;  expect(b);  c = ...;   g = ...   | backward
    after:   b = ...;  h = logical_and(a, b);  c = ...;  expect(h);  g = ...

    A checkpointed region that runs again asks what it asked the first time.
    """
    nodes = graph.find_nodes(op="call_function", target=expect)
    first_runs = {info(node).asked_at for node in nodes if info(node).region is None}
    again = [n for n in nodes if info(n).region is not None and info(n).asked_at in first_runs]
    decided = [_condition(node) for node in nodes if _number(node) is not None]
    by_device: dict[torch.device, list[fx.Node]] = {}
    for node in nodes:
        if node not in again:
            by_device.setdefault(tensor_of(_condition(node)).device, []).append(node)
    for group in by_device.values():
        _join(graph, group)
    for node in again:
        graph.erase_node(node)
    return decided


def _number(node: fx.Node) -> object:
    """Which decision an ``expect`` is of."""
    asked = info(node).asked_at
    return asked[-1] if asked else None


def _join(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    last = nodes[-1]
    held, *others = dict.fromkeys(map(_condition, nodes))
    for other in others:
        with graph.inserting_before(last):
            joined = graph.call_function(aten.logical_and.default, (held, other))
        _stands_for(joined, last)
        set_value(joined, torch.logical_and(tensor_of(held), tensor_of(other)))
        held = joined
    after = last.next
    while after.op != "output" and info(after).phase == "forward":
        after = after.next
    with graph.inserting_before(after):
        _stands_for(graph.call_function(expect, (held,)), last)
    for node in nodes:
        if (info(node).asked_at or (None,))[0] == _OF_SIZE:
            with_info(node, asked_at=None)
        else:
            graph.erase_node(node)


def _stands_for(node: fx.Node, last: fx.Node) -> None:
    """``node`` is what several conditions are now, the last of which is ``last``."""
    copy_notes(node, last)
    with_info(node, region=None, asked_at=None)


def _condition(node: fx.Node) -> fx.Node:
    (condition,) = node.all_input_nodes
    return condition
