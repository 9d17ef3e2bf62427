"""Every use of one of the user's own tensors becomes a use of the traced one."""

import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeGuard, TypeVar, cast, final

import torch
import torch.nn.functional as F
from torch import Generator, SymFloat, Tensor
from torch.overrides import TorchFunctionMode

from treadle.capture.explain_errors import computed_outside, here
from treadle.capture.integrations import averaging
from treadle.capture.integrations.counts import counts_instead_of
from treadle.capture.integrations.recurrent import RecurrentLayers
from treadle.capture.integrations.spectra import inverse_instead_of
from treadle.capture.python_state.code.frames import CodeOwner, code_owner
from treadle.capture.python_state.containers.container_recorders import as_plain, is_for_container
from treadle.capture.python_state.containers.copies import deep_copied, shallow_copied
from treadle.capture.python_state.flatten import flatten_containers, unflatten
from treadle.capture.symbolic import (
    deferred,
    entries,
    number_calls,
    scaled_forms,
)
from treadle.capture.symbolic import scaled as scaled_functions
from treadle.capture.symbolic.arrays import legacy_tensors
from treadle.capture.symbolic.arrays.arrays import CONVERSIONS, converted, is_array
from treadle.capture.symbolic.arrays.deferred_arrays import array_of
from treadle.capture.symbolic.arrays.listed_tensors import of_listed
from treadle.capture.symbolic.branches.value_checks import one_hot
from treadle.capture.symbolic.deferred import whole_tensor
from treadle.capture.symbolic.functions import index_ranges
from treadle.capture.symbolic.functions.sized_functions import sized_instead_of
from treadle.capture.symbolic.numbers import is_stand_in
from treadle.capture.symbolic.scaled import scaled
from treadle.capture.symbolic.size_numbers import as_number, is_size
from treadle.capture.symbolic.texts import texts
from treadle.capture.tensors.sparse_gradients import embedding
from treadle.capture.tensors.tensor_effects import SET_DATA
from treadle.capture.tensors.tensor_uses import TensorUses
from treadle.capture.tracing import patches
from treadle.capture.tracing.trace_recorder import TraceRecorder
from treadle.compat.dynamo import has_saved_tensor_hooks
from treadle.compat.fake import is_traced, stand_in_for
from treadle.compat.plain_calls import are_plain, dispatch_depth, hears_functions, is_in_c
from treadle.compat.tracing import METHOD_FILES, Args, Kwargs, works_for
from treadle.compat.transforms import unwrapped
from treadle.compat.unsized import ask_length, is_unsized, squeezed

Function = Callable[..., object]

_SCALARS = frozenset(
    {Tensor.item, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__}
)
"""Functions that return one element as a number, which does not exist yet."""

_VALUES = _SCALARS | {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__format__,
    Tensor.__repr__,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.__reduce_ex__,
    whole_tensor,
}
"""Functions that return numbers, a string of them or their memory."""

_READ = _SCALARS | {Tensor.tolist, Tensor.__bool__, Tensor.__format__, Tensor.__repr__}
"""Those of them that read values and keep no memory."""

_SQUEEZES = frozenset({torch.squeeze, Tensor.squeeze})
_OF_NUMBERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
"""Functions that read numbers to make tensors of them."""

T = TypeVar("T")
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
"""Functions that change a tensor object, and not its values."""

_FOR_USERS = frozenset(
    str(module.__file__)
    for module in (
        *(averaging, deferred, entries, index_ranges, legacy_tensors, number_calls, scaled_forms),
        texts,
    )
)
"""Modules whose functions stand in for Python's and PyTorch's: they ask for the user's code."""

_BETWEEN = METHOD_FILES | {str(module.__file__) for module in (patches, scaled_functions)}
"""Likewise, of functions that call others for their caller."""

_LEAVES = frozenset({int, float, bool, str, NoneType, torch.dtype, torch.device, Generator})


@final
@dataclass(slots=True)
class _Call:
    """A call of a function of tensors, with the leaves of its arguments."""

    function: Function
    args: Args
    kwargs: dict[str, object]
    leaves: list[object]
    put_together: Callable[[list[object]], tuple[Args, Kwargs]]

    @staticmethod
    def of(function: Function, args: Args, kwargs: Kwargs) -> "_Call":
        """Lists and dicts among the arguments are taken apart, tensors and numbers stay whole."""
        named = dict(kwargs)
        leaves = [*args, *named.values()]
        if all(type(leaf) in _LEAVES or isinstance(leaf, Tensor) for leaf in leaves):
            count = len(args)
            return _Call(function, args, named, leaves, lambda new: (
                tuple(new[:count]), dict(zip(named, new[count:], strict=True))
            ))  # fmt: skip
        leaves, spec = flatten_containers((args, named))
        return _Call(function, args, named, leaves, lambda new: unflatten(new, spec))

    def has(self, is_one: Callable[[object], bool]) -> bool:
        """Whether any leaf is such a one."""
        return any(map(is_one, self.leaves))

    def replaced(
        self, is_one: Callable[[object], TypeGuard[T]], instead: Callable[[T], object]
    ) -> "_Call":
        """The call with other values in the places of such leaves."""
        if not self.has(is_one):
            return self
        new = [instead(leaf) if is_one(leaf) else leaf for leaf in self.leaves]
        return _Call.of(self.function, *self.put_together(new))

    def run(self) -> object:
        """The result of the function."""
        return self.function(*self.args, **self.kwargs)


@final
class TensorPatcher(TorchFunctionMode):
    """Modules hold the traced tensors already; this finds those that the user's code holds itself:
    a list of parameters for clipping, a weight in a penalty, a second reference to a buffer."""

    def __init__(
        self, table: Mapping[int, Tensor], recorder: TraceRecorder, layers: RecurrentLayers
    ) -> None:
        """``table``: the traced tensors, by the ids of the user's. ``layers``: traces recurrent
        layers."""
        super().__init__()
        self._table = table
        self._layers = layers
        self._recorder = recorder
        self._alone, self._depth = False, 0

    def __enter__(self) -> "TensorPatcher":
        self._alone, self._depth = not hears_functions(), dispatch_depth()
        super().__enter__()
        return self

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        named = kwargs or {}
        alone = self._alone and is_in_c(func) and are_plain(args) and are_plain(named.values())
        if not alone or dispatch_depth() > self._depth or has_saved_tensor_hooks():
            return self._heard(func, args, named)
        if not self._recorder.pause():  # on each call of Python's there is a look otherwise
            return self._heard(func, args, named)
        try:
            return self._heard(func, args, named)
        finally:
            self._recorder.resume()

    def _heard(self, func: Function, args: Args, kwargs: Kwargs) -> object:
        self._recorder.provenance.note_line()
        self._recorder.rng.check()
        call = _Call.of(func, args, kwargs).replaced(is_for_container, as_plain)
        if func in CONVERSIONS and call.has(is_array):
            converted_result = converted(func, call.args, call.kwargs)
            if converted_result is not None:
                return converted_result
        call = self._of_trace(call)
        if call.function in _OF_NUMBERS and call.has(is_traced):
            listed = of_listed(call.args, call.kwargs)
            if listed is not None:
                return listed
        if call.function in _VALUES and call.has(is_traced):
            return self._value(call)
        if call.function == Tensor.__deepcopy__ and call.args[0].is_leaf:
            with self._recorder.mode():
                return deep_copied(*call.args)
        if call.function in _SETTERS:
            self._recorder.tensors.note_changed(call.args[0])
        _note_gradient(self._recorder.tensors, call.function, call.args)
        if call.function == SET_DATA:
            return self._recorder.assignments.assign(*call.args)
        result = self._drawn(call) if call.has(_is_generator) else self._instead_of(call)
        self._recorder.provenance.note_made(result)
        return result

    def _of_trace(self, call: _Call) -> _Call:
        """The call with traced tensors in the places of the user's own and of stand-ins for
        numbers."""
        if call.function in _OF_NUMBERS:
            call = call.replaced(is_unsized, self._recorder.numbers.of_size)
        are_numbers = is_size if call.function in _OF_NUMBERS else _is_float
        if call.has(are_numbers):
            call = call.replaced(are_numbers, as_number)
        if call.has(is_stand_in):
            call = _Call.of(*scaled(call.function, call.args, call.kwargs))
        if call.has(self._is_outside):
            inside = functools.partial(self.inside, held=_users_ask())
            call = call.replaced(self._is_outside, inside)
        return call

    def _value(self, call: _Call) -> object:
        """Numbers that are known after the launch; TR-102 for what needs them now."""
        function, (tensor, *rest) = call.function, call.args
        numbers = self._recorder.numbers
        is_whole = not (tensor.is_floating_point() or tensor.is_complex())
        no_index = function == Tensor.__index__ and not is_whole
        if function in _SCALARS and (tensor.numel() != 1 or no_index):
            return function(*call.args)  # an error of PyTorch's
        if function in _READ and (known := self._recorder.constants.read(function, tensor, *rest)):
            return known[0]
        if function == Tensor.item:
            return numbers.item(tensor)
        if function == Tensor.tolist:
            return numbers.tolist(tensor)
        if function == whole_tensor:
            return numbers.tensor(tensor)
        if function == Tensor.numpy and not rest and tensor.is_cpu:
            return array_of(numbers, tensor, self._recorder.memory(), self._recorder.argument_view)
        if function in (Tensor.__int__, Tensor.__index__):
            return int(numbers.item(tensor).derived(int).plain())
        raise numbers.refuse()

    def _drawn(self, call: _Call) -> object:
        """A draw from a generator that is given is traced without it, and noted."""
        generator = next(filter(_is_generator, call.leaves))
        with self._recorder.random.drawing_from(self._recorder.rng.number(generator)):
            return call.replaced(_is_generator, lambda _: None).run()

    def _instead_of(self, call: _Call) -> object:
        """The result of the function, or of what is traced in its place."""
        function, args, kwargs = call.function, call.args, call.kwargs
        recorder = self._recorder
        if instead := recorder.constants.instead_of(function, args, kwargs):
            return instead(*args, **kwargs)
        if instead := counts_instead_of(function, recorder.decides_short):
            return instead(*args, **kwargs)
        if instead := sized_instead_of(function, args, kwargs):
            return instead(*args, **kwargs)
        if instead := inverse_instead_of(function, recorder.require):
            return instead(*args, **kwargs)
        if instead := recorder.indices.instead_of(function, args):
            return instead(*args)
        if function is F.one_hot:
            return one_hot(recorder.require, recorder.numbers.item, *args, **kwargs)
        if function is F.embedding:
            return embedding(*args, **kwargs)
        ask_length(function, args, kwargs)
        if function in _SQUEEZES and any(map(is_unsized, args[0].shape)):
            return squeezed(*args, **kwargs)
        return self._layers.instead_of(function, call.leaves, kwargs)(*args, **kwargs)

    def answering(self, original: Callable[[Tensor], bool]) -> Callable[[Tensor], bool]:
        """``Tensor.__bool__``, of a condition that only raises: the answer that does not. Functions
        of PyTorch's that a mode has heard of ask no mode within."""
        thread = threading.get_ident()

        def call(tensor: Tensor) -> bool:
            frame = sys._getframe(1)
            if not works_for(thread) or code_owner(frame.f_code.co_filename) is CodeOwner.OURS:
                return original(tensor)
            recorder = self._recorder
            recorder.provenance.note_line()
            value = self.inside(tensor)
            if known := recorder.constants.read(original, value):
                return known[0]
            answer = recorder.conditions.answer(value, frame, recorder.tensors.fresh)
            return original(tensor) if answer is None else answer

        return call

    def copying(self) -> Callable[[Tensor], Tensor]:
        """The replacement of ``Tensor.__copy__``, which ``copy.copy`` calls before it copies a
        tensor's parts."""
        thread = threading.get_ident()

        def call(tensor: Tensor) -> Tensor:
            if not works_for(thread):
                make, parts = tensor.__reduce_ex__(4)
                return make(*parts)
            self._recorder.provenance.note_line()
            return shallow_copied(self.inside(tensor))

        return call

    def in_class(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The replacement of ``Tensor.as_subclass``, which bypasses modes."""
        thread = threading.get_ident()

        def call(tensor: Tensor, kind: type[Tensor]) -> Tensor:
            value = self.inside(tensor) if works_for(thread) else tensor
            if not is_traced(value):
                return original(tensor, kind)
            self._recorder.provenance.note_line()
            return stand_in_for(value.view_as(value), kind)

        return call

    def entering(self, original: Callable[..., object]) -> Callable[..., object]:
        """``original``, which bypasses modes, on the traced tensor instead of the user's own."""

        def call(tensor: Tensor, *rest: object, **named: object) -> object:
            return original(self.inside(tensor), *rest, **named)

        return call

    def _is_outside(self, leaf: object) -> TypeGuard[Tensor]:
        # the user's own may be fake, when a step is only planned
        return isinstance(leaf, Tensor) and (
            id(leaf) in self._table or not is_traced(unwrapped(leaf))
        )

    def inside(self, leaf: Tensor, *, held: bool = True) -> Tensor:
        """The traced tensor for one of the user's own; ``held``: also for one that is not a
        parameter or buffer."""
        if not self._is_outside(leaf):
            return leaf
        entry = self._table.get(id(leaf))
        if entry is None:
            entry = self._recorder.held.traced_for(leaf)
        if entry is None and leaf.requires_grad and not leaf.is_leaf:
            raise computed_outside(f"a tensor {list(leaf.shape)}", here())
        if entry is None and held and not is_traced(leaf):
            entry = self._recorder.held.hold(leaf)
        return leaf if entry is None else entry


def _note_gradient(uses: TensorUses, function: Function, args: Args) -> None:
    """``.grad`` of the first argument is read or set, if that is what the function does."""
    if function in (_READ_GRAD, _SET_GRAD):
        is_set = function == _SET_GRAD
        uses.note_gradient(args[0], replaced=is_set, is_set=is_set)


def _users_ask() -> bool:
    """Whether a function of torch's is called for code that is not ours; methods written in Python,
    and what stands in their places, call for their caller."""
    frame = sys._getframe(4)  # of who called what our mode hears of
    while frame.f_code.co_filename in _BETWEEN and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    return file in _FOR_USERS or code_owner(file) is not CodeOwner.OURS


def _is_float(leaf: object) -> TypeGuard[SymFloat]:
    return isinstance(leaf, SymFloat)


def _is_generator(leaf: object) -> TypeGuard[Generator]:
    return isinstance(leaf, Generator)
