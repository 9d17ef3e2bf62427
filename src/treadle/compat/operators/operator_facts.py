"""The one table of facts about operators: what a call does besides its results, and what it costs.

::

    facts_of(aten.bernoulli.p)      draws; a call of the library; draws by no values
    facts_of(aten.relu_.default)    writes; pointwise
    facts_of(mine.scale.default)    unknown: a user's, it happens exactly once and in order

Facts come from what PyTorch says of the operator itself: tags, arguments, results, namespace. So an
unknown operator has its facts as well. Facts that PyTorch does not provide are in the lists of
``operator_lists.py``, each with its reason, and nowhere else. ``tests/compat`` compares derived and
listed facts for every operator of the installed PyTorch.
"""

import enum
import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import flop_registry

from treadle.compat.operators import operator_lists as listed
from treadle.compat.operators.schemas import OpOverload, schema_of, written_arguments
from treadle.util.generators import GeneratorRef

aten = torch.ops.aten


class Effect(enum.Flag):
    """What a call does besides its results."""

    NONE = 0
    DRAWS = enum.auto()  # advances a random generator
    WRITES = enum.auto()  # to an argument
    RAISES = enum.auto()  # gives nothing: called to check values, and may raise; or to print
    CONDITION = enum.auto()  # nothing may be written to an input before it is known to hold
    COMMUNICATES = enum.auto()  # meets other processes
    READS_OUTSIDE = enum.auto()  # the result depends on more than the arguments: switches, files
    UNKNOWN = enum.auto()  # a user's, with anything inside


IN_ORDER = Effect.DRAWS | Effect.UNKNOWN
"""Calls with one of these keep their order among each other."""
MATTERS = (
    Effect.WRITES | Effect.RAISES | Effect.CONDITION | Effect.COMMUNICATES | Effect.UNKNOWN
)  # fmt: skip
"""A call with one of these happens, whether anybody reads its results or not. A draw that nobody
reads may be left out where the numbers after it need not be eager's."""


class CostClass(enum.StrEnum):
    """What an operator costs in comparison with its bytes. Views are free: whether a result is one
    is a matter of its memory, and not of the operator (``reshape``)."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"  # with what surrounds it in a row: softmax, layer norm
    PRODUCT = "product"  # worth a kernel of its own: mm, bmm, convolution, attention
    LIBRARY = "library"  # a kernel of PyTorch's that is none of these

    @property
    def is_expensive(self) -> bool:
        """Whether a call is a kernel of PyTorch's by itself, instead of a part of a fused one."""
        return self in (CostClass.PRODUCT, CostClass.LIBRARY)


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """What is known about an operator.

    ``effects``: those that a call may have; ``call_effects`` says which this one has.
    ``refuses``: a CPU kernel raises for some values of the operands.
    ``draw_reads_values``: the elements of operands decide what it draws, besides the generator.
    ``allocates``: no result is memory of an operand's.
    ``native``: PyTorch's own. ``slow_elements``: a transcendental function of each element.
    ``elementwise``: an element of the result is made of those of the operands at its place.
    ``waits``: on a GPU it may wait for numbers of the device's, or work on the host.
    ``counts_masks``: it waits if one of its arguments is a mask.
    ``invented``: the numbers that its calls may run on to be measured: those of ``INVENTED``, or
    ``ZEROS`` if it checks no data and is PyTorch's own or ours; empty if there are none.
    """

    effects: Effect
    refuses: bool
    draw_reads_values: bool
    allocates: bool
    native: bool
    cost: CostClass
    slow_elements: bool
    elementwise: bool
    waits: bool
    counts_masks: bool
    invented: str

    @property
    def draws(self) -> bool:
        """Whether a call may advance a random generator."""
        return Effect.DRAWS in self.effects

    @property
    def writes(self) -> bool:
        """Whether a call may write to an argument."""
        return Effect.WRITES in self.effects

    @property
    def communicates(self) -> bool:
        """Whether it exchanges data with other processes."""
        return Effect.COMMUNICATES in self.effects

    @property
    def is_unknown(self) -> bool:
        """Whether it is a user's, with anything inside."""
        return Effect.UNKNOWN in self.effects

    @property
    def may_recompute(self) -> bool:
        """Whether a second call gives the same and does nothing else."""
        return not self.effects


_DATA_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@functools.cache
def facts_of(op: OpOverload) -> OperatorFacts:
    """The facts about one operator."""
    schema = schema_of(op)
    effects = _effects_of(op)
    return OperatorFacts(
        effects=effects,
        refuses=_may_refuse(op),
        draw_reads_values=Effect.DRAWS in effects and _draw_reads_values(op),
        allocates=_allocates(op),
        native=op.namespace in listed.NATIVE,
        cost=_cost_of(op),
        slow_elements=schema.name in listed.SLOW_ELEMENTS,
        elementwise=torch.Tag.pointwise in op.tags or schema.name in listed.CONVERSIONS,
        waits=not _never_waits(op),
        counts_masks=schema.name in listed.COUNTS_MASKS,
        invented=listed.INVENTED.get(schema.name) or (listed.ZEROS if _takes_zeros(op) else ""),
    )


_NOBODY_KNOWS = OperatorFacts(
    effects=Effect.WRITES | Effect.UNKNOWN,
    refuses=False,
    draw_reads_values=True,
    allocates=False,
    native=False,
    cost=CostClass.LIBRARY,
    slow_elements=False,
    elementwise=False,
    waits=True,
    counts_masks=True,
    invented="",
)


def facts_by_name(name: str) -> OperatorFacts:
    """The facts about ``"aten.mm.out"``, as artifacts name an operator. Of a name that is none of
    this PyTorch's, the safe ones."""
    try:
        found = operator.attrgetter(name)(torch.ops)
    except AttributeError:
        return _NOBODY_KNOWS
    return facts_of(found) if isinstance(found, OpOverload) else _NOBODY_KNOWS


def call_effects(op: OpOverload, arguments: Mapping[str, object]) -> Effect:
    """What a call with these ``arguments`` (by name, defaults included) does."""
    effects = facts_of(op).effects
    if Effect.DRAWS in effects and not _draws_with(arguments):
        effects &= ~Effect.DRAWS
    if Effect.WRITES in effects and not written_names(op, arguments):
        effects &= ~Effect.WRITES
    return effects


def _draws_with(arguments: Mapping[str, object]) -> bool:
    return not any(
        name in arguments and arguments[name] is not None and arguments[name] == value
        for name, value in listed.NO_DRAW_IF.items()
    )


def follows_seed(op: OpOverload, arguments: Mapping[str, object]) -> bool:
    """Whether a call makes random numbers, its own or once more those of a seed that it is given:
    dropout within attention, forward and backward."""
    return Effect.DRAWS in call_effects(op, arguments) or bool(arguments.get("dropout_p"))


_MASKS = (torch.bool, torch.uint8)


def may_invent(
    op: OpOverload, arguments: Mapping[str, object], dtypes: Iterable[torch.dtype]
) -> bool:
    """Whether a call may run on invented numbers; ``dtypes``: of its tensors. Integers cannot be
    divided by zero, and what a mask picks has to be as many as what is put there."""
    facts, dtypes = facts_of(op), tuple(dtypes)
    whole = any(not (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes)
    masks = any(dtype in _MASKS for dtype in dtypes)
    if (facts.cost is CostClass.POINTWISE and whole) or (facts.counts_masks and masks):
        return False
    if facts.invented == listed.ZEROS:
        return not follows_seed(op, arguments)
    drawn = any(isinstance(argument, GeneratorRef) for argument in arguments.values())
    return bool(facts.invented) and not drawn  # draws of the process' generators are put back


def is_profiler_mark(op: OpOverload) -> bool:
    """Whether it tells PyTorch's profiler where a range begins or ends, and does nothing else."""
    return op.namespace == "profiler"


def gives_undefined(op: OpOverload) -> bool:
    """Whether its result is whatever memory held: a shape is all that may be asked of it."""
    return schema_of(op).name in listed.UNDEFINED


def sizes_from_values(op: OpOverload) -> bool:
    """Whether values decide the sizes of what it gives, or a number of Python's."""
    return bool(_DATA_TAGS & set(op.tags))


def raises_for_zeros(op: OpOverload) -> bool:
    """Whether it raises for a divisor of zero if its operands are integers."""
    return schema_of(op).name.removesuffix("_") in listed.DIVIDES


def written_names(op: OpOverload, arguments: Mapping[str, object]) -> tuple[str, ...]:
    """The arguments that a call with these writes to.

    ``add_(self, other)``  ->  ``("self",)``
    """
    names = listed.WRITES_UNDECLARED.get(schema_of(op).name)
    if names is None:
        return tuple(name for _, name in written_arguments(op))
    return tuple(each for each in names if arguments["training"] and arguments[each] is not None)


def works_on_each(op: OpOverload) -> bool:
    """Whether result ``i`` of an operator of lists is made of the elements ``i`` of its lists, and
    of what else it is given."""
    name, namespace = schema_of(op).name, op.namespace.strip("_")
    if namespace.startswith(listed.FUNCTIONAL_COMMUNICATION):
        return name.endswith("coalesced")
    return name.startswith("aten::_foreach_")


def elementwise_on_each(op: OpOverload) -> bool:
    """Whether ``op`` does something to each tensor of a list that works on each of its elements:
    ``_foreach_mul``, which is ``mul`` of each, and not ``_foreach_norm`` or ``_foreach_mm``."""
    if not works_on_each(op) or op.namespace != "aten":
        return False
    single = schema_of(op).name.removeprefix("aten::_foreach_")
    packet = getattr(aten, single, None)  # the way to an operator whose name is data
    overloads = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    return single == "copy" or any(torch.Tag.pointwise in each.tags for each in overloads)


def may_accumulate(name: str) -> bool:
    """Whether a call of an operator, named as by artifacts, may write its result where its first
    argument is."""
    return name in listed.ACCUMULATE


def accumulates(op: OpOverload) -> bool:
    """Whether ``op`` goes on from its first operand, and may do so in its memory."""
    name, overload = str(op).rsplit(".", 1)
    out = "out" if overload == "default" else "_".join((overload, "out"))
    return may_accumulate(f"{name}.{out}")


def ends_a_start(name: str) -> bool:
    """Whether a call of an operator, named as by artifacts, waits for what another one started: a
    collective, or a copy to the host or back."""
    return name in listed.WAITS


def writes_strided(name: str) -> bool:
    """Whether a call of an operator, named as by artifacts, writes a matrix into a part of a larger
    one as fast as into one of its own: any distance between its rows, or its columns."""
    return name in listed.STRIDED


def may_wait(name: str, *, masks: bool) -> bool:
    """Whether a call of an operator, named as by artifacts, may wait for the host. ``masks``: some
    of its arguments are."""
    facts = facts_by_name(name)
    return facts.waits or (masks and facts.counts_masks)


def _effects_of(op: OpOverload) -> Effect:
    """All that a call may do."""
    schema, namespace = schema_of(op), op.namespace
    known = (
        namespace in listed.NATIVE | listed.OURS
        or namespace.strip("_").startswith(listed.FUNCTIONAL_COMMUNICATION)
        or torch.Tag.pointwise in op.tags
    )
    found = {
        Effect.DRAWS: _may_draw(op),
        Effect.WRITES: schema.is_mutable or schema.name in listed.WRITES_UNDECLARED,
        Effect.RAISES: not schema.returns,
        Effect.CONDITION: schema.name in listed.CONDITIONS,
        Effect.COMMUNICATES: _communicates(op),
        Effect.READS_OUTSIDE: schema.name in listed.READ_OUTSIDE or not schema.arguments,
        Effect.UNKNOWN: not known,
    }
    return functools.reduce(operator.or_, (each for each in found if found[each]), Effect.NONE)


def _may_draw(op: OpOverload) -> bool:
    if schema_of(op).name in listed.DRAW_NOTHING:
        return False
    return torch.Tag.nondeterministic_seeded in op.tags or _takes(op, "Generator")


def _may_refuse(op: OpOverload) -> bool:
    draws = _may_draw(op)
    return schema_of(op).name in listed.REFUSES and (not draws or _draw_reads_values(op))


def _takes(op: OpOverload, kind: str) -> bool:
    """Whether the type of an argument names ``kind``."""
    return any(kind in str(each.type) for each in schema_of(op).arguments)


def _draws_sometimes(op: OpOverload) -> bool:
    """Whether an argument decides if a call draws."""
    return any(each.name in listed.NO_DRAW_IF for each in schema_of(op).arguments)


def _draw_reads_values(op: OpOverload) -> bool:
    shape_alone = op in listed.OVERWRITES or schema_of(op).name in listed.SHAPE_ALONE
    return _takes(op, "Tensor") and not shape_alone


def _communicates(op: OpOverload) -> bool:
    """Operators of ``torch.distributed`` live in namespaces of their own, or take a process
    group."""
    return _takes(op, "c10d") or op.namespace.strip("_").startswith(listed.COMMUNICATION)


def _allocates(op: OpOverload) -> bool:
    schema = schema_of(op)
    if schema.name in listed.SHARES_UNDECLARED or torch.Tag.maybe_aliasing_or_mutating in op.tags:
        return False
    return bool(schema.returns) and all(each.alias_info is None for each in schema.returns)


def _cost_of(op: OpOverload) -> CostClass:
    name = schema_of(op).name
    if op.overloadpacket in flop_registry or name in listed.PRODUCTS | listed.PRODUCTS_OF_PARTS:
        return CostClass.PRODUCT
    if torch.Tag.reduction in op.tags or name in listed.REDUCTIONS:
        return CostClass.REDUCTION
    listwise = name.startswith("aten::_foreach_")
    if torch.Tag.pointwise in op.tags or name in listed.POINTWISE or listwise:
        return CostClass.POINTWISE
    return CostClass.LIBRARY


def _never_waits(op: OpOverload) -> bool:
    pointwise = op.namespace == "aten" and torch.Tag.pointwise in op.tags
    return schema_of(op).name in listed.NEVER_WAIT or (pointwise and _DATA_TAGS.isdisjoint(op.tags))


def _takes_zeros(op: OpOverload) -> bool:
    """Whether calls that draw nothing run on zeros without harm."""
    schema = schema_of(op)
    draws = _may_draw(op) and not _draws_sometimes(op)
    if not schema.returns or draws or schema.name in listed.UNMEASURABLE:
        return False
    return op.namespace == "treadle" or _is_arithmetic(op)


def _is_arithmetic(op: OpOverload) -> bool:
    """Whether any numbers are as good as any others for ``op``."""
    if op.namespace != "aten" or not _DATA_TAGS.isdisjoint(op.tags) or not schema_of(op).returns:
        return False
    name = schema_of(op).name
    known = _cost_of(op) is not CostClass.LIBRARY and name not in listed.PRODUCTS_OF_PARTS
    return torch.Tag.core in op.tags or known or name in listed.MEASURABLE
