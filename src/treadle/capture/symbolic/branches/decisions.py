"""Decisions by values of tensors: one variant for each path that calls take.

::

    if loss.item() < self.best: ...       expect(lt(loss, best))      of the path (True,)
    torch.zeros(int(batch.max()) + 1)     expect(eq(max(batch), 6))   of the path (6,)

A variant assumes its outcomes and checks them before anything is written, like checks that only
raise (``capture/symbolic/branches/expected``). A call that takes another path has changed nothing:
only the variant's conditions are computed, on the tensors of this call, up to the first outcome
that differs, and a variant of the path that starts this way serves the call. A branch is guessed
when it is first met. A whole number is not: the capture ends where Python needs it, the number is
computed on the tensors of the call, and the step is captured again along the path that has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, fx

from treadle.capture.explain_errors import looks_at_value
from treadle.graph.analysis.execute import values_of
from treadle.graph.core.collectives import collectives_in
from treadle.graph.core.copying import copy_nodes
from treadle.graph.core.operators import is_random
from treadle.graph.core.signature import Output, Signature, StepGraph
from treadle.targets.registry import target_for

Answers = tuple[int, ...]
"""Of branches ``True`` or ``False``, of whole numbers the numbers."""
MOST_DECISIONS = 64
"""Of one path: a loop that asks for longer has no end that could be compiled."""


@final
@dataclass(frozen=True, slots=True)
class ValueDecision:
    """The answer that was taken, and the user's line that asks. ``is_branch``: their code goes on
    by it; else it is about a length that depends on values. ``is_likely``: where a step may have no
    path, true is taken for granted. ``is_number``: the answer is a whole number that Python needs,
    ``None`` where the capture ended because it was not known."""

    answer: int | None
    where: str
    is_branch: bool = True
    is_likely: bool = False
    is_number: bool = False

    @property
    def is_expected(self) -> bool:
        """Whether a step without a path answers alike."""
        return self.is_likely and bool(self.answer)

    def given(self, value: Tensor) -> int:
        """The answer of a call for which the question's node has this value."""
        if self.is_number:
            return int(value)
        return bool(self.answer) if value else not self.answer

    def words(self, answer: int) -> str:
        """That a call gives another answer, this one."""
        asked = "a number of a tensor" if self.is_number else "a branch on a tensor"
        return f"{asked} was {self.answer} and is {answer}: {self.where}"


@final
@dataclass(frozen=True, slots=True)
class Path:
    """The decisions of a variant, in the order in which the step asks. ``questions``: a graph that
    gives of each branch whether its answer is the one that was taken, and each number; ``None``
    where it cannot be asked alone."""

    decisions: tuple[ValueDecision, ...] = ()
    questions: StepGraph | None = None

    @property
    def answers(self) -> Answers:
        """What was taken."""
        return tuple(each.answer for each in self.decisions if each.answer is not None)

    @property
    def taken(self) -> tuple[tuple[int, str], ...]:
        """The answers, each with the user's line that asks."""
        return tuple(zip(self.answers, (each.where for each in self.decisions), strict=False))

    def words(self, path: Answers) -> str:
        """That a call takes ``path``, which differs from this one."""
        pairs = zip(self.decisions, path, strict=False)
        return next(known.words(answer) for known, answer in pairs if known.answer != answer)

    def other(self, inputs: Sequence[Tensor]) -> Answers | None:
        """Of a call with these inputs the answers up to the first that differs from the variant's,
        or with all the numbers for want of which the capture ended; ``None`` if none differs, or if
        that cannot be told. Nothing is written, and random states are as before."""
        if self.questions is None:
            return None
        places: dict[fx.Node | None, list[int]] = {}
        for at, node in enumerate(self.questions.returned):
            places.setdefault(node, []).append(at)
        answers: dict[int, int] = {}
        taken = self.answers
        generators = [
            number
            for device in dict.fromkeys(input_.device for input_ in inputs)
            for number in target_for(device).driver.generators(device)
        ]
        with torch.random.fork_rng(devices=generators):
            for node, value in values_of(self.questions, inputs):
                answers |= {at: self.decisions[at].given(value) for at in places.get(node, ())}
                if any(answers.get(at, answer) != answer for at, answer in enumerate(taken)):
                    break
        for at, answer in enumerate(taken):
            if answers.get(at, answer) != answer:
                return (*taken[:at], answers[at])
        unknown = range(len(taken), len(self.decisions))  # the last, and asked together
        return (*taken, *map(answers.__getitem__, unknown)) if unknown else None


def path_of(
    step: StepGraph, decisions: Sequence[ValueDecision], asked: Sequence[fx.Node], *, alone: bool
) -> Path:
    """``asked``: of each decision the node that holds if its answer is the one taken. ``alone``:
    whether questions may be asked without the rest of the step. TR-102 of a step that communicates:
    ranks that decide otherwise would part."""
    if not decisions:
        return Path()
    if any(collectives_in(step.graph)):
        raise looks_at_value(decisions[0].where)
    nodes = [
        node.all_input_nodes[0] if decision.is_number else node  # the number that is compared
        for decision, node in zip(decisions, asked, strict=True)
    ]
    return Path(tuple(decisions), _questions(step, nodes) if alone else None)


def _questions(step: StepGraph, asked: Sequence[fx.Node]) -> StepGraph:
    """``step`` as far as it answers, with all that draws before: the numbers are the step's."""
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph(owning_module=step.graph.owning_module)
    copy_nodes(step.graph, graph, copies)
    graph.output(tuple(copies[condition] for condition in asked))
    left = {copies[condition] for condition in asked}
    for node in reversed(list(graph.nodes)):
        left.discard(node)
        drawn = is_random(node) and left  # before an answer
        if node.op == "call_function" and not node.users and not drawn:
            graph.erase_node(node)
    outputs = tuple(Output(f"answer {at}") for at in range(len(asked)))
    return StepGraph(graph, Signature(step.signature.inputs, outputs))
