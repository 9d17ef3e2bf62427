"""How long rules take to find their places: 1,000 rules on a graph of 10,000 nodes.

::

    python benchmarks/matcher.py [--rules 1000] [--nodes 10000] [--seed 0]

Graph and rules are random expressions of pointwise operations; the rules are three operations
deep and rewrite nothing (their check counts and refuses), so that all places are looked at. The
first run also traces the rules. Wanted: at most 2 s.
"""

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from treadle.graph.core.node_info import with_info
from treadle.graph.core.signature import Input, Output, Role, Signature, StepGraph
from treadle.graph.rewrite.rules import NoMatch, Rewrite, Rule

aten = torch.ops.aten
WANTED_S = 2.0
UNARY: tuple[Any, ...] = (
    aten.neg.default, aten.abs.default, aten.exp.default, aten.sin.default, aten.cos.default,
    aten.tanh.default, aten.sigmoid.default, aten.relu.default, aten.erf.default,
    aten.floor.default, aten.ceil.default, aten.sgn.default, aten.atan.default, aten.expm1.default,
)  # fmt: skip
BINARY: tuple[Any, ...] = (
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default,
    aten.atan2.default,
)  # fmt: skip
Expression = Callable[[Any, Any], Any]


def expression(choose: random.Random, depth: int) -> Expression:
    """A random expression of two variables."""
    if depth == 0:
        first = choose.random() < 0.5
        return lambda x, y: x if first else y
    if choose.random() < 0.4:
        op, inner = choose.choice(UNARY), expression(choose, depth - 1)
        return lambda x, y: op(inner(x, y))
    op = choose.choice(BINARY)
    left, right = expression(choose, depth - 1), expression(choose, choose.randrange(depth))
    return lambda x, y: op(left(x, y), right(x, y))


def refused(counts: list[int]) -> Callable[..., None]:
    """A check that counts and refuses."""

    def check(**types: object) -> None:
        counts[0] += 1
        raise NoMatch("only counted")

    return check


def rules_of(count: int, choose: random.Random, matched: list[int]) -> tuple[Rule, ...]:
    """Random rules; the check of each counts."""
    made: list[Rule] = []
    for at in range(count):
        inner = expression(choose, 2)
        op = choose.choice(BINARY)
        pattern = _over(op, inner)
        made.append(
            Rule(f"rule-{at}", pattern, lambda x, y: aten.relu.default(x), refused(matched))
        )
    return tuple(made)


def _over(op: Any, inner: Expression) -> Callable[[Any, Any], Any]:
    return lambda x, y: op(inner(x, y), y)


def graph_of(nodes: int, choose: random.Random) -> StepGraph:
    """Random operations on one another, from two inputs."""

    def program(x: Tensor, y: Tensor) -> Tensor:
        values = [x, y]
        for _ in range(nodes - 3):
            near = values[-6:]
            if choose.random() < 0.4:
                values.append(choose.choice(UNARY)(choose.choice(near)))
            else:
                values.append(choose.choice(BINARY)(choose.choice(near), choose.choice(near)))
        return values[-1]

    module = make_fx(program, tracing_mode="fake")(torch.randn(4), torch.randn(4))
    for node in module.graph.nodes:
        if node.op == "call_function":
            with_info(node, phase="forward")
        if node.op == "output":
            node.args = ((node.args[0],),)
    signature = Signature((Input(Role.BATCH, "x"), Input(Role.BATCH, "y")), (Output("out"),))
    return StepGraph(module.graph, signature)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rules", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    choose = random.Random(given.seed)
    step, matched = graph_of(given.nodes, choose), [0]
    rules = rules_of(given.rules, choose, matched)
    start = time.process_time()
    each = Rewrite(rules)
    changes = each.run(step)
    first = time.process_time() - start
    start, seen = time.process_time(), matched[0]
    changes += each.run(step)
    second = time.process_time() - start
    print(f"{len(rules)} rules, {len(step.graph.nodes)} nodes, {seen} matches, {changes} changes")
    print(f"first run {first:.2f} s with indexing, second {second:.2f} s; wanted {WANTED_S:.0f} s")


if __name__ == "__main__":
    main()
