"""Traced tensors in the place of the user's, and eyes on what runs: all undone afterwards."""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, NoneType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Generator, SymBool, Tensor, nn
from torch.autograd.graph import Node as GradientNode
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy

from treadle.capture.control_flow.control_flow import instead_of
from treadle.capture.distributed.collectives import all_reduce_in_place
from treadle.capture.distributed.communication import refuse_wrapper
from treadle.capture.distributed.gradient_sync import GradientSync
from treadle.capture.explain_errors import Line, here, running_line, show_line
from treadle.capture.integrations import averaging
from treadle.capture.integrations.averaging import cumulative_batch_norm, update_parameters
from treadle.capture.integrations.counts import counts_instead_of
from treadle.capture.integrations.fully_sharded import (
    GatherSpan,
    fully_sharded,
    nothing,
    refuse_draws,
    refuse_unshard,
)
from treadle.capture.integrations.grad_scaler import LossScaling
from treadle.capture.integrations.recurrent import RecurrentLayers
from treadle.capture.integrations.wrappers import forward_of
from treadle.capture.optimizers.hyper_parameters import standing_in
from treadle.capture.optimizers.registry import has_update_rule
from treadle.capture.python_state.code.frames import CodeOwner, code_owner
from treadle.capture.python_state.containers.container_recorders import as_plain, is_recorded
from treadle.capture.python_state.containers.copies import deep_copied, shallow_copied
from treadle.capture.python_state.flatten import flatten_containers, unflatten
from treadle.capture.symbolic import deferred, entries, number_calls, scaled_forms
from treadle.capture.symbolic.arrays import legacy_tensors
from treadle.capture.symbolic.arrays.array_functions import makers
from treadle.capture.symbolic.arrays.arrays import CONVERSIONS, converted, from_numpy, is_array
from treadle.capture.symbolic.arrays.deferred_arrays import array_of
from treadle.capture.symbolic.arrays.listed_tensors import of_listed
from treadle.capture.symbolic.branches.expected import Conditions, constraint_checks
from treadle.capture.symbolic.branches.known_masks import KnownMasks
from treadle.capture.symbolic.branches.value_checks import one_hot
from treadle.capture.symbolic.deferred import DeferredNumbers, functions_of_numbers, whole_tensor
from treadle.capture.symbolic.numbers import Uses, is_stand_in
from treadle.capture.symbolic.scalar_index import ScalarIndices
from treadle.capture.symbolic.scaled import scaled
from treadle.capture.symbolic.texts import texts
from treadle.capture.tensors.rng_guard import RngGuard
from treadle.capture.tensors.sparse_gradients import embedding
from treadle.capture.tensors.tensor_effects import (
    SET_DATA,
    DataAssignments,
    GivenTensor,
    HeldTensor,
)
from treadle.compat.checkpointing import watched_checkpointing
from treadle.compat.control_flow import functions_replaced
from treadle.compat.distributed.fully_sharded import resharding_methods, unsharding_methods
from treadle.compat.distributed.sharded_tensors import draw_methods, sharded_entries
from treadle.compat.fake import is_traced, stand_in_for
from treadle.compat.hooks import OURS, backward_inside, global_step_hooks, reducer_methods
from treadle.compat.tracing import (
    METHOD_FILES,
    flat_weights,
    held_input,
    masks_as_given,
    traced_nodes,
    works_for,
)
from treadle.compat.transforms import tensor_entries, unwrapped
from treadle.compat.unsized import is_unsized, size_decisions, squeezed, tensor_of_number
from treadle.util.errors import CaptureError

Stepper = Callable[[Optimizer], Callable[..., None]]
Span = tuple[int, int]


_VALUES = frozenset(
    {
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__bool__,
        Tensor.__float__,
        Tensor.__int__,
        Tensor.__index__,
        Tensor.__complex__,
        Tensor.__format__,
        Tensor.__repr__,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.__reduce_ex__,
        whole_tensor,
    }
)
"""What gives numbers, a text or the memory of them where there are none yet."""


_SCALARS = frozenset(
    {Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__}
)
"""What of these takes one element alone."""


_SQUEEZES = frozenset({torch.squeeze, Tensor.squeeze})
_OF_NUMBERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
"""What makes tensors of numbers that it looks at."""


_GRAD = cast(Any, Tensor.grad)
_READ_GRAD, _SET_GRAD = _GRAD.__get__, _GRAD.__set__
_SETTERS = frozenset(
    {
        SET_DATA,
        _SET_GRAD,
        cast(Any, Tensor.requires_grad).__set__,
        Tensor.requires_grad_,
        Tensor.detach_,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
    }
)
"""What changes a tensor itself, and not its values."""


_FOR_USERS = frozenset(
    str(each.__file__)
    for each in (averaging, deferred, entries, legacy_tensors, number_calls, scaled_forms, texts)
)
"""Modules whose functions stand in for Python's and PyTorch's: they ask for the user's code."""


def _users_ask() -> bool:
    """Whether a function of torch's is called for code that is not ours; methods written in Python
    call for their caller."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename in METHOD_FILES and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return file in _FOR_USERS or code_owner(file) is not CodeOwner.OURS


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_LEAVES = frozenset({int, float, bool, str, NoneType, torch.dtype, torch.device, Generator})


def _arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], Callable[[list[Any]], Arguments]]:
    """The leaves of the arguments of a call, and what puts others in their places."""
    leaves = [*args, *kwargs.values()]
    if all(type(each) in _LEAVES or isinstance(each, Tensor) for each in leaves):
        count = len(args)
        return leaves, lambda new: (
            tuple(new[:count]), dict(zip(kwargs, new[count:], strict=True))
        )  # fmt: skip
    leaves, spec = flatten_containers((args, dict(kwargs)))
    return leaves, lambda new: unflatten(new, spec)


class TensorPatcher(TorchFunctionMode):
    """Every use of one of the user's own tensors becomes a use of the traced one.

    Modules hold the traced tensors already; this finds those that the user's code holds itself:
    a list of parameters for clipping, a weight in a penalty, a second reference to a buffer.
    """

    def __init__(
        self, table: Mapping[int, Tensor], watch: "TraceRecorder", layers: RecurrentLayers
    ) -> None:
        super().__init__()
        self._table = table
        self._layers = layers
        self._watch = watch

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._watch.note_line()
        self._watch.rng.check()
        leaves, rebuilt = _arguments(args, kwargs or {})
        if any(map(is_recorded, leaves)):
            args, kwargs = rebuilt([as_plain(x) if is_recorded(x) else x for x in leaves])
            leaves, rebuilt = _arguments(args, kwargs)
        if func in CONVERSIONS and any(map(is_array, leaves)):
            result = converted(func, args, kwargs or {})
            if result is not None:
                return result
        if func in _OF_NUMBERS and any(map(is_unsized, leaves)):
            of_size = self._watch.numbers.of_size
            args, kwargs = rebuilt([of_size(x) if is_unsized(x) else x for x in leaves])
            leaves, rebuilt = _arguments(args, kwargs)
        if any(map(is_stand_in, leaves)):
            func, args, kwargs = scaled(func, args, kwargs or {})
            leaves, rebuilt = _arguments(args, kwargs or {})
        if any(self._is_outside(leaf) for leaf in leaves):
            users = _users_ask()
            leaves = [self.inside(leaf, held=users) for leaf in leaves]
            args, kwargs = rebuilt(leaves)
        if func in _OF_NUMBERS and any(map(is_traced, leaves)):
            listed = of_listed(args, kwargs or {})
            if listed is not None:
                return listed
        if func in _VALUES and any(map(is_traced, leaves)):
            return self._value(func, *args)
        if func == Tensor.__deepcopy__ and args[0].is_leaf:
            with self._watch.mode():
                return deep_copied(args[0], args[1])
        if func in _SETTERS:
            self._watch.note_set(args[0])
        if func in (_READ_GRAD, _SET_GRAD):
            is_set = func == _SET_GRAD
            self._watch.note_gradient(args[0], replaced=is_set, is_set=is_set)
        if func == SET_DATA:
            return self._watch.assignments.assign(*args)
        if any(isinstance(leaf, Generator) for leaf in leaves):
            result = self._drawn(func, args, kwargs or {})
        elif (instead := counts_instead_of(func, self._watch.decides_short)) or (
            instead := self._watch.masks.instead_of(func, args, kwargs or {})
        ):
            result = instead(*args, **(kwargs or {}))
        elif instead := self._watch.indices.instead_of(func, args):
            result = instead(*args)
        elif func is F.one_hot:
            result = one_hot(self._watch.require, *args, **(kwargs or {}))
        elif func is F.embedding:
            result = embedding(*args, **(kwargs or {}))
        elif func in _SQUEEZES and any(map(is_unsized, args[0].shape)):
            result = squeezed(*args, **(kwargs or {}))
        else:
            result = self._layers.instead_of(func, leaves, kwargs)(*args, **(kwargs or {}))
        self._watch.note_made(result)
        return result

    def _value(self, func: Callable[..., Any], *args: Any) -> Any:
        """Numbers that are known after the launch; TR-102 for what needs them now."""
        if func in _SCALARS and args[0].numel() != 1:
            return func(*args)  # an error of PyTorch's
        if func == Tensor.item:
            return self._watch.numbers.item(args[0])
        if func == Tensor.tolist:
            return self._watch.numbers.tolist(args[0])
        if func == whole_tensor:
            return self._watch.numbers.tensor(args[0])
        if func == Tensor.numpy and len(args) == 1 and args[0].is_cpu:
            return array_of(self._watch.numbers, args[0], self._watch.memory())
        raise self._watch.numbers.refuse()

    def answering(self, original: Callable[[Tensor], bool]) -> Callable[[Tensor], bool]:
        """``Tensor.__bool__``, of a condition that only raises: the answer that does not. Functions
        of PyTorch's that a mode has heard of ask no mode within."""
        thread = threading.get_ident()

        def call(tensor: Tensor) -> bool:
            frame = sys._getframe(1)
            if not works_for(thread) or code_owner(frame.f_code.co_filename) is CodeOwner.OURS:
                return original(tensor)
            self._watch.note_line()
            value = self.inside(tensor, held=True)
            answer = self._watch.conditions.answer(value, frame, self._watch.fresh)
            return original(tensor) if answer is None else answer

        return call

    def copying(self) -> Callable[[Tensor], Tensor]:
        """``Tensor.__copy__``, which ``copy.copy`` asks before it takes a tensor apart."""
        thread = threading.get_ident()

        def call(tensor: Tensor) -> Tensor:
            if not works_for(thread):
                make, parts = tensor.__reduce_ex__(4)
                return make(*parts)
            self._watch.note_line()
            return shallow_copied(self.inside(tensor, held=True))

        return call

    def in_class(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``Tensor.as_subclass``, which asks no mode."""
        thread = threading.get_ident()

        def call(tensor: Tensor, kind: type[Tensor]) -> Tensor:
            value = self.inside(tensor) if works_for(thread) else tensor
            if not is_traced(value):
                return original(tensor, kind)
            self._watch.note_line()
            return stand_in_for(value.view_as(value), kind)

        return call

    def _drawn(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """A draw from a generator that is given is traced without it, and noted."""
        leaves, rebuilt = _arguments(args, kwargs)
        given = [leaf for leaf in leaves if isinstance(leaf, Generator)]
        number = self._watch.rng.number(given[0])
        plain = [None if isinstance(leaf, Generator) else leaf for leaf in leaves]
        args, kwargs = rebuilt(plain)
        start = traced_nodes()
        result = func(*args, **kwargs)
        if number is not None:
            self._watch.generators.append(((start, traced_nodes()), number))
        return result

    def _is_outside(self, leaf: Any) -> bool:
        if not isinstance(leaf, Tensor):
            return False
        # the user's own may be fake, when a step is only planned
        return id(leaf) in self._table or not is_traced(unwrapped(leaf))

    def entering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original``, which asks no mode, of the traced tensor instead of the user's own."""

        def call(tensor: Any, *rest: Any, **named: Any) -> Any:
            return original(self.inside(tensor, held=True), *rest, **named)

        return call

    def inside(self, leaf: Any, *, held: bool = True) -> Any:
        """The traced tensor for one of the user's own; ``held``: also for one that is no parameter
        or buffer."""
        if not self._is_outside(leaf):
            return leaf
        found = self._table.get(id(leaf))
        if found is None:
            found = self._watch.held_as(leaf)
        if found is None and leaf.requires_grad and not leaf.is_leaf:
            raise CaptureError(
                f"a tensor {list(leaf.shape)} was computed outside of the step, where its gradient "
                "would have to go on",
                code="TR-110",
                where=here(),
                remedy="compute it in the step, or detach it",
            )
        if found is None and held and not is_traced(leaf):
            found = self._watch.hold(leaf)
        return leaf if found is None else found


@contextlib.contextmanager
def patched(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    table: Mapping[int, Tensor],
    stepper: Stepper,
    state: Callable[[Optimizer], object],
    watch: "TraceRecorder",
    layers: RecurrentLayers,
    uses: Uses | None,
) -> Iterator[None]:
    """Modules and ``param_groups`` hold the tensors of ``table`` (by the id of the user's), and
    ``optimizer.step`` and, of those in the graph, ``state`` are what
    ``stepper`` and ``state`` give; recurrent layers are traced as ``layers`` say.
    Hyper-parameters are numbers that stand in, unless ``uses`` is ``None``."""
    with contextlib.ExitStack() as undo:
        for module in {id(m): m for model in models.values() for m in model.modules()}.values():
            for held in (module._parameters, module._buffers):
                for key, tensor in list(held.items()):
                    if tensor is not None and id(tensor) in table:
                        _put(undo, held, key, table[id(tensor)])
            if isinstance(module, nn.RNNBase):
                for key, held in flat_weights(module, table).items():
                    _put(undo, vars(module), key, held)
        owners = {
            id(group): (each, at)
            for each in reversed([*optimizers.values()])  # optimizers may share them: the first one
            for at, group in enumerate(each.param_groups)
        }
        for owner, at in owners.values():
            group = owner.param_groups[at]
            for key, value in list(group.items()):
                if key != "params" and uses is not None:
                    _put(undo, group, key, standing_in(value, owner, at, key, uses))
            _put(undo, group, "params", [table[id(p)] for p in group["params"]])
        for optimizer in optimizers.values():
            _put(undo, vars(optimizer), "step", stepper(optimizer))
        _swap_states(undo, optimizers.values(), state)
        stranger = _traced_only(_refusing_strangers(optimizers.values()), _nothing)
        _put(undo, global_step_hooks(), OURS, stranger)
        watch.runs_again = undo.enter_context(fully_sharded(models, watch.gathers))
        watch.mode = functools.partial(TensorPatcher, table, watch, layers)
        mode = TensorPatcher(table, watch, layers)
        watch.inside = mode.inside
        for owner, name in tensor_entries():
            original = vars(owner)[name]
            _put(undo, vars(owner), name, _traced_only(mode.entering(original), original))
        for kind, name in sharded_entries():
            original = vars(kind)[name]
            ours = _traced_only(mode.entering(original), original)
            _put_attribute(undo, kind, name, ours)
        _put_method(undo, "__bool__", mode.answering(Tensor.__bool__))
        _put_method(undo, "__copy__", mode.copying())
        _put_method(undo, "as_subclass", mode.in_class(Tensor.as_subclass))
        with mode:
            yield


def _swap_states(
    undo: contextlib.ExitStack,
    optimizers: Iterable[Optimizer],
    state: Callable[[Optimizer], object],
) -> None:
    """Optimizers that share their state share what stands there, that of one with a form."""
    made: dict[int, object] = {}
    for each in sorted(optimizers, key=lambda each: not has_update_rule(each)):
        real = id(each.state)
        if real not in made:
            made[real] = state(each)
        if made[real] is not None:
            _put(undo, vars(each), "state", made[real])


class _GradientsInHooks(TorchFunctionMode):
    """Takes note of gradients that hooks look at while a backward runs, where no other mode is."""

    def __init__(self, watch: "TraceRecorder") -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (_READ_GRAD, _SET_GRAD):
            is_set = func == _SET_GRAD
            self._watch.note_gradient(args[0], replaced=is_set, is_set=is_set)
        return func(*args, **(kwargs or {}))


def _put(undo: contextlib.ExitStack, target: Any, key: Any, value: Any) -> None:
    """``target[key] = value`` until the stack unwinds."""
    if key in target:
        undo.callback(target.__setitem__, key, target[key])
    else:
        undo.callback(target.pop, key, None)
    target[key] = value


class TraceRecorder:
    """What happens from which traced node on: a backward, a module, a line of the user's, and
    random numbers that are drawn a second time from a state that was kept."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        sync: GradientSync | None = None,
        *,
        updates: bool = True,
    ) -> None:
        self.sync = sync or GradientSync()
        self.inside: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self.scaling = LossScaling(lambda tensor: self.inside(tensor), updates)
        self.rng = RngGuard()
        self.generators: list[tuple[Span, int]] = []  # nodes that draw from one of the user's
        self.indices = ScalarIndices()
        self.masks = KnownMasks()
        self.conditions = Conditions()
        self.numbers = DeferredNumbers(self._decide, self.require)
        self.backward: list[Span] = []
        self.lines: list[tuple[int, Line]] = [(0, ("", 0))]
        self.draws: list[tuple[int, bool, int]] = []  # node, whether the state is put back, which
        self.again: list[Span] = []  # a checkpointed region runs again
        self.marks: list[tuple[Span, CheckpointPolicy]] = []  # what a policy says of nodes
        self.gathers: list[GatherSpan] = []  # of what modules drop after a forward
        self._began: int | None = None
        self._made: dict[GradientNode, tuple[Line, str]] = {}
        self.listen: Callable[[], None] = lambda: None  # in a thread of the engine's
        self.held: dict[int, tuple[Tensor, GivenTensor]] = {}  # the user's, by their ids
        self.assignments = DataAssignments()
        self._set_at: dict[int, str] = {}  # by the ids of tensors
        self._followed: set[GradientNode] = set()
        self.after_backward: Callable[[], None] = lambda: None
        self.memory: Callable[[], frozenset[int | None]] = frozenset  # that the user has
        self.runs_again: Callable[[bool], None] = lambda _: None
        self.mode: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self._states: dict[int, Tensor] = {}
        self.fresh: set[int] = set()  # ids of leaves whose first gradients are dropped unread
        self._used: set[int] = set()  # and of those whose gradients were looked at
        self._clearing = False
        self.modules: list[tuple[int, str]] = [(0, "")]
        self._names = {
            id(module): f"{prefix}.{name}".strip(".")
            for prefix, model in models.items()
            for name, module in model.named_modules()
        }
        self._stack = [""]

    def ends(self) -> None:
        """Let go of the run: hooks of traced nodes, which stay, know this object."""
        self.listen = self.after_backward = lambda: None
        self.memory, self.masks = frozenset, KnownMasks()
        self.mode, self.numbers.uses.mode = contextlib.nullcontext, None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While inside, what happens is noted at the node from which on it holds."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(self.rng.watching())
            undo.enter_context(functions_replaced(_control_flow))
            undo.enter_context(backward_inside(lambda: _GradientsInHooks(self)))
            for owner, name, ours in (
                (torch.autograd, "backward", self._record_backward(torch.autograd.backward)),
                (torch.autograd, "grad", self._record_backward(torch.autograd.grad)),
                (torch, "get_rng_state", self._record_rng_save(torch.get_rng_state)),
                (torch, "set_rng_state", self._putting_back(torch.set_rng_state)),
                (torch, "from_numpy", from_numpy(torch.from_numpy)),
                *self.scaling.methods(),
                (Optimizer, "zero_grad", self._cleared(Optimizer.zero_grad)),
                (nn.Module, "zero_grad", self._cleared(nn.Module.zero_grad)),
                (AveragedModel, "update_parameters", update_parameters),
                masks_as_given(),
                cumulative_batch_norm(),
                (DistributedDataParallel, "forward", forward_of(self.sync)),
                (
                    torch.distributed,
                    "all_reduce",
                    all_reduce_in_place(torch.distributed.all_reduce),
                ),
                *((*method, refuse_wrapper) for method in reducer_methods()),
                *((*method, refuse_unshard) for method in unsharding_methods()),
                *((*method, nothing) for method in resharding_methods()),
                *((*method, refuse_draws) for method in draw_methods()),
                *constraint_checks(),
                *size_decisions(self._decides_size, self.numbers.refuse),
                *functions_of_numbers(),
                *makers(),
            ):
                _put_attribute(undo, owner, name, _traced_only(ours, vars(owner)[name]))
            for owner, name, value in watched_checkpointing(
                self._begin_again, self._end_again, self._mark, lambda: self.mode()
            ):
                _put_attribute(undo, owner, name, value)
            enter, leave = (_traced_only(each, _nothing) for each in (self._enter, self._leave))
            undo.callback(register_module_forward_pre_hook(enter).remove)
            undo.callback(register_module_forward_hook(leave, always_call=True).remove)
            yield

    def _record_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._end_again()
            self._follow([*args, *kwargs.values()])
            start = traced_nodes()
            try:
                result = original(*args, **kwargs)
            except CaptureError as error:
                raise _at_line(error) from error
            self.modules.append((traced_nodes(), self._stack[-1]))
            self.sync.after_backward()
            self.after_backward()
            self.backward.append((start, traced_nodes()))
            return result

        return call

    def _begin_again(self) -> None:
        self._end_again()  # a region within a region
        self._began = traced_nodes()
        self.runs_again(True)

    def _end_again(self) -> None:
        if self._began is not None:
            self.runs_again(False)
            self.again.append((self._began, traced_nodes()))
        self._began = None

    def _mark(self, start: int, policy: CheckpointPolicy) -> None:
        self.marks.append(((start, traced_nodes()), policy))

    def _record_rng_save(self, original: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def call() -> Tensor:
            state = original()
            self._states[id(state)] = state
            self.draws.append((traced_nodes(), False, id(state)))
            return state

        return call

    def _putting_back(self, original: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def call(state: Tensor) -> None:
            self.draws.append((traced_nodes(), True, id(state)))
            original(state)

        return call

    def _decide(self, value: Tensor, frame: FrameType) -> bool | None:
        """What ``frame`` is told, which asks whether a number is true."""
        return self.conditions.answer(value, frame, self.fresh)

    def decides_short(self, value: Tensor) -> bool | None:
        """A decision that is likely to be true."""
        return self.conditions.decide(value, self.fresh, guess=True, is_branch=False)

    def _decides_size(
        self, condition: SymBool, likely: bool, frame: FrameType | None
    ) -> bool | None:
        """A decision on a size that values decide."""
        self.note_line()
        value = tensor_of_number(condition)
        return self.conditions.answer(value, frame, self.fresh, guess=likely, of_size=True)

    def require(self, holds: Tensor) -> None:
        """Take for granted that a 0-dim tensor is true."""
        self.conditions.require(holds, self.fresh)

    def note_line(self) -> None:
        """The line of the user's that runs now makes the nodes from here on."""
        line = running_line()
        if line != self.lines[-1][1]:
            self.lines.append((traced_nodes(), line))

    def note_gradient(self, leaf: Any, *, replaced: bool, is_set: bool = False) -> None:
        """``leaf.grad`` is read or set. One that is ``replaced``, by nothing or by another tensor,
        before anybody looks at it may as well not have been there, whatever was added to it."""
        if self._clearing:
            return
        if is_set:
            self.sync.was_set(leaf)
        else:
            self.sync.looked_at(leaf)
        if id(leaf) in self.fresh:
            return
        if replaced and id(leaf) not in self._used:
            self.fresh.add(id(leaf))
        else:
            self._used.add(id(leaf))

    def uses_gradient(self, leaf: Any) -> bool:
        """Whether the step looked at ``leaf.grad``, set it, or added to it."""
        known = id(leaf) in self._used or id(leaf) in self.fresh
        return known or self.sync.has_accumulated(leaf)

    def note_set(self, tensor: Any) -> None:
        """The line that runs now changes a tensor itself."""
        self._set_at[id(tensor)] = here()

    def line_of(self, tensor: Tensor) -> str:
        """The last line that changed a tensor itself; that which runs where there was none."""
        return self._set_at.get(id(tensor), show_line(self.lines[-1][1]))

    def is_looked_at(self, leaf: Tensor) -> bool:
        """Whether the step looked at ``leaf.grad``."""
        return id(leaf) in self._used

    def is_replaced_first(self, leaf: Tensor) -> bool:
        """Whether the first that the step did with ``leaf.grad`` was to replace it."""
        return id(leaf) in self.fresh

    def hold(self, tensor: Tensor) -> Tensor:
        """A tensor from outside of the step is an input from now on; what is traced for it."""
        traced, find = held_input(tensor).requires_grad_(tensor.requires_grad), HeldTensor(tensor)
        given = GivenTensor.of("a tensor", find, tensor, traced, is_argument=False)
        self.held[id(tensor)] = tensor, given
        return traced

    def held_as(self, tensor: Tensor) -> Tensor | None:
        """What is traced for it, if it was met before."""
        _, given = self.held.get(id(tensor), (None, None))
        return None if given is None else given.traced

    def _cleared(self, original: Callable[..., None]) -> Callable[..., None]:
        """``zero_grad``, which looks at gradients only to clear them."""

        def call(owner: Any, set_to_none: bool = True) -> None:
            if isinstance(owner, nn.Module):
                leaves = list(owner.parameters())
            else:
                leaves = [leaf for group in owner.param_groups for leaf in group["params"]]
            for leaf in leaves:
                self.note_gradient(leaf, replaced=set_to_none, is_set=True)
            self._clearing = True
            try:
                original(owner, set_to_none)
            finally:
                self._clearing = False

        return call

    def note_made(self, result: Any) -> None:
        """The line and the module that run now made these tensors: their gradients are their
        doing as well. Without gradients nothing has one, and a view of a view that was written to
        may not even be asked."""
        if not torch.is_grad_enabled():
            return
        made = [result] if isinstance(result, Tensor) else flatten_containers(result)[0]
        for each in made:
            if isinstance(each, Tensor) and each.grad_fn is not None:
                self._made.setdefault(each.grad_fn, (self.lines[-1][1], self._stack[-1]))

    def _follow(self, roots: Sequence[Any]) -> None:
        """When a gradient is computed, the line of its forward operation is the one that runs,
        and so is its module. What a composite operation did inside has those of what reads it."""
        tensors = [each for each in flatten_containers(list(roots))[0] if isinstance(each, Tensor)]
        left = [(each.grad_fn, (self.lines[-1][1], self._stack[-1])) for each in tensors]
        while left:
            node, maker = left.pop()
            if node is None or node in self._followed:
                continue
            self._followed.add(node)
            maker = self._made.get(node, maker)
            node.register_prehook(functools.partial(self._at_gradient, *maker))
            left += [(each, maker) for each, _ in node.next_functions]

    def _at_gradient(self, line: Line, module: str, _: Any) -> None:
        self.listen()
        if line != self.lines[-1][1]:
            self.lines.append((traced_nodes(), line))
        if module != self.modules[-1][1]:
            self.modules.append((traced_nodes(), module))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names.get(id(module), self._stack[-1]))
        self.modules.append((traced_nodes(), self._stack[-1]))

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._stack.pop()
        self.modules.append((traced_nodes(), self._stack[-1]))


def _traced_only(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """``ours`` where a trace runs; other threads, which train other models meanwhile, see nothing
    of it."""
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (ours if works_for(thread) else original)(*args, **kwargs)

    return call


def _control_flow(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    return _traced_only(instead_of(name), original)


def _at_line(error: CaptureError) -> CaptureError:
    """An error that does not know where it is gets the line of the user's that runs."""
    return CaptureError(
        error.message, code=error.code, where=error.where or here(), remedy=error.remedy
    )


def _nothing(*_: Any) -> None:
    """A hook that does nothing."""


def _put_method(undo: contextlib.ExitStack, name: str, method: Callable[..., Any]) -> None:
    """One of ``Tensor``, which may inherit it or not have it."""
    if name in vars(Tensor):
        undo.callback(setattr, Tensor, name, vars(Tensor)[name])
    else:
        undo.callback(delattr, Tensor, name)
    setattr(Tensor, name, method)


def _put_attribute(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def _refusing_strangers(known: Iterable[Optimizer]) -> Callable[..., None]:
    """Before any step of an optimizer that was not given."""
    given = frozenset(map(id, known))

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in given:
            return  # its own code calls that of its base
        kind = type(optimizer).__name__
        raise CaptureError(
            f"the step calls step() of an optimizer that it was not given ({kind})",
            code="TR-134",
            where=here(),
            remedy="pass it: treadle.compile(step, model=..., optimizer=...), all of them as a "
            "list or a dict",
        )

    return refuse
