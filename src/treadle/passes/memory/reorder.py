"""Run optimizer updates as soon as their gradients are final, so that the gradients can be
freed."""

import operator

from treadle.passes.memory.order import Order


def update_early(order: Order) -> Order:
    """Each update directly after the last thing it waits for.

    before:  g1 = mm(..); g2 = mm(..); n1 = sub(w1, g1); n2 = sub(w2, g2)
    after:   g1 = mm(..); n1 = sub(w1, g1); g2 = mm(..); n2 = sub(w2, g2)

    A new parameter waits for its gradient and for the last reader of the old parameter, whose
    bytes it takes. What an update prepares from its state alone is moved down to its reader, and
    what reads inputs alone comes after all of them.
    Under a global gradient clip every update waits for the last gradient, and nothing moves: then
    it is the order that was given.
    """
    facts, count = order.facts, len(order.origin)
    late = [facts.updates[i] for i in order.origin]
    if True not in late:
        return order
    first = late.index(True)
    last_input = sum([facts.placeholders[i] for i in order.origin]) - 1
    after = [k if not late[k] else last_input for k in range(count)]
    waits = _old_value_readers(order, late)
    for k in range(first, count):
        if late[k]:
            known = [after[operand] for operand in order.operands[k]]
            after[k] = max(last_input, waits.get(k, -1), *known)
    earliest = [count] * count
    for k in range(count - 1, first - 1, -1):  # before that, nothing reads what moves
        if late[k] and earliest[k] < count:
            after[k] = earliest[k]
        before = after[k] if late[k] else k - 1  # a later forward pass reads what it made
        for operand in order.operands[k]:
            if before < earliest[operand]:
                earliest[operand] = before
    keys = [2 * at + is_late for at, is_late in zip(after, late, strict=True)]
    if all(map(operator.le, keys, keys[1:])):
        return order
    return order.permuted(sorted(range(count), key=keys.__getitem__))


def _old_value_readers(order: Order, late: list[bool]) -> dict[int, int]:
    """For each operation whose result overwrites an input: the input's last other reader."""
    facts = order.facts
    last = [-1] * len(order.origin)
    for k in range(len(order.origin) - 1, -1, -1):
        if late[k]:
            continue
        reader = last[k] if facts.views[order.origin[k]] else k
        for operand in order.operands[k]:
            if reader > last[operand]:
                last[operand] = reader
    place = {i: k for k, i in enumerate(order.origin) if i in facts.overwritten}
    waits: dict[int, int] = {}
    for number, target in facts.writes.items():
        result = order.returned[number]
        if result is not None:
            waits[result] = last[place[target]]
    return waits
