"""Records what happens while a step is traced, and at which node."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any, final

import torch
from torch import SymBool, SymInt, Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer

from treadle.capture.control_flow.control_flow import instead_of
from treadle.capture.distributed.collectives import all_reduce_in_place
from treadle.capture.distributed.gradient_sync import GradientSync
from treadle.capture.explain_errors import here
from treadle.capture.integrations.fully_sharded import (
    GatherSpan,
)
from treadle.capture.integrations.grad_scaler import LossScaling
from treadle.capture.integrations.registry import library_patches
from treadle.capture.python_state.code.frames import CodeOwner, code_owner
from treadle.capture.symbolic.arrays.array_functions import makers
from treadle.capture.symbolic.arrays.arrays import from_numpy
from treadle.capture.symbolic.branches.expected import Conditions, constraint_checks
from treadle.capture.symbolic.branches.known_constants import KnownConstants
from treadle.capture.symbolic.deferred import AsksNumber, DeferredNumbers, functions_of_numbers
from treadle.capture.symbolic.functions.reductions import functions_of_lists
from treadle.capture.symbolic.scalar_index import ScalarIndices
from treadle.capture.symbolic.scaled import functions_of_sizes
from treadle.capture.symbolic.size_numbers import alone, as_number, made_of_sizes
from treadle.capture.tensors.held_tensors import HeldTensors
from treadle.capture.tensors.rng_guard import RngGuard
from treadle.capture.tensors.tensor_effects import DataAssignments
from treadle.capture.tensors.tensor_uses import TensorUses
from treadle.capture.tracing.checkpointed_regions import CheckpointedRegions, Span
from treadle.capture.tracing.patches import Replacement, put_attribute, traced_only
from treadle.capture.tracing.provenance import Provenance
from treadle.capture.tracing.random_states import RandomStates
from treadle.compat.checkpointing import watched_checkpointing
from treadle.compat.control_flow import functions_replaced
from treadle.compat.hooks import backward_inside
from treadle.compat.switches import checks_for_nan
from treadle.compat.tracing import traced_nodes
from treadle.compat.transforms import with_forward_rules
from treadle.compat.unsized import size_arithmetic, size_decisions, tensor_of_number
from treadle.util.errors import CaptureError


@final
class TraceRecorder:
    """The records of one run; each kind of event has an object of its own.

    ``backward``: nodes of backward passes. ``gathers``: of what modules drop after a forward.
    ``inside``: the traced tensor for one of the user's. ``mode``: makes the mode that traces.
    ``pause``: from now on, until ``resume``, our code alone runs; whether that is to be called.
    """

    def __init__(self, models: Mapping[str, nn.Module], sync: GradientSync, updates: bool) -> None:
        self.sync = sync
        self.provenance = Provenance(models)
        self.tensors = TensorUses(sync, self.provenance.line)
        self.held = HeldTensors()
        self.assignments = DataAssignments()
        self.regions = CheckpointedRegions()
        self.random = RandomStates()
        self.rng = RngGuard()
        self.indices = ScalarIndices()
        self.constants = KnownConstants()
        self.conditions = Conditions()
        self.numbers = DeferredNumbers(self._decide, self._decide_numbers, self.require)
        self.scaling = LossScaling(lambda tensor: self.inside(tensor), updates)
        self.backward: list[Span] = []
        self.gathers: list[GatherSpan] = []
        self.inside: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self.after_backward: Callable[[], None] = lambda: None
        self.asks_size: Callable[[FrameType], AsksNumber | None] = lambda _: None
        self.memory: Callable[[], frozenset[int | None]] = frozenset  # that the user has
        self.argument_view: Callable[[Tensor], Callable[[], Any] | None] = lambda _: None
        self.mode: Callable[[], AbstractContextManager[object]] = nullcontext
        self.pause: Callable[[], bool] = _nothing_paused
        self.resume: Callable[[], None] = lambda: None

    def ends(self) -> None:
        """Let go of the run: hooks of traced nodes, which stay, know this object."""
        self.provenance.listen = self.after_backward = lambda: None
        self.asks_size = lambda _: None
        self.memory, self.constants = frozenset, KnownConstants()
        self.argument_view = lambda _: None
        self.mode, self.numbers.uses.mode = nullcontext, None
        self.pause, self.resume = _nothing_paused, lambda: None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, each event is noted with the node from which on it holds."""
        regions, provenance = self.regions, self.provenance
        with ExitStack() as undo:
            undo.enter_context(self.rng.watching())
            undo.enter_context(functions_replaced(_control_flow))
            undo.enter_context(backward_inside(lambda: self.mode()))
            for owner, name, ours in list(self._replacements()):
                put_attribute(undo, owner, name, traced_only(ours, getattr(owner, name, _lacking)))
            checkpointing = watched_checkpointing(
                regions.begin, regions.end, regions.mark, lambda: self.mode()
            )
            for owner, name, value in checkpointing:
                put_attribute(undo, owner, name, value)
            enter = traced_only(provenance.enter, _nothing)
            undo.callback(register_module_forward_pre_hook(enter).remove)
            leave = traced_only(provenance.leave, _nothing)
            undo.callback(register_module_forward_hook(leave, always_call=True).remove)
            yield

    def _replacements(self) -> Iterator[Replacement]:
        """Replacements of functions of PyTorch's, which note or refuse calls."""
        distributed = torch.distributed
        yield torch.autograd, "backward", self.record_backward(torch.autograd.backward)
        yield torch.autograd, "grad", self.record_backward(torch.autograd.grad)
        yield torch, "get_rng_state", self.random.record_save(torch.get_rng_state)
        yield torch, "set_rng_state", self.random.record_restore(torch.set_rng_state)
        yield torch, "from_numpy", from_numpy(torch.from_numpy)
        yield forward_ad, "make_dual", with_forward_rules(forward_ad.make_dual)
        yield Optimizer, "zero_grad", self.tensors.note_cleared(Optimizer.zero_grad)
        yield nn.Module, "zero_grad", self.tensors.note_cleared(nn.Module.zero_grad)
        yield from library_patches(self)
        yield distributed, "all_reduce", all_reduce_in_place(distributed.all_reduce)
        yield from constraint_checks()
        yield from size_decisions(self._decides_size, self._number_of_size, self._asks_size)
        yield from size_arithmetic(self._made_of_sizes, self._asks_for_size, alone, as_number)
        yield from functions_of_numbers()
        yield from makers()
        yield from functions_of_lists()
        yield from functions_of_sizes()

    def record_backward(self, original: Callable[..., object]) -> Callable[..., object]:
        """``backward`` or ``grad`` of ``torch.autograd``."""

        def call(*args: object, **kwargs: object) -> object:
            _refuse_anomaly_mode()
            self.regions.end()
            self.provenance.follow([*args, *kwargs.values()])
            start = traced_nodes()
            try:
                with self.provenance.in_backward():
                    result = original(*args, **kwargs)
            except CaptureError as error:
                raise _at_line(error) from error
            self.provenance.note_module()
            self.sync.after_backward()
            self.after_backward()
            self.backward.append((start, traced_nodes()))
            return result

        return call

    def _decide(self, value: Tensor, frame: FrameType) -> bool | None:
        """The answer to ``frame``, which asks whether a number is true."""
        return self.conditions.answer(value, frame, self.tensors.fresh)

    def _number_of_size(self, size: SymInt) -> int:
        """What Python is told, which needs the number of a size that values decide."""
        return int(self.numbers.of_size(size).plain())

    def _decide_numbers(self, values: Sequence[Tensor]) -> Sequence[int] | None:
        """What Python is told, which needs whole numbers."""
        self.provenance.note_line()
        return self.conditions.decide_numbers(values, self.tensors.fresh)

    def decides_short(self, value: Tensor) -> bool | None:
        """A decision that is likely to be true."""
        return self.conditions.decide_likely(value, self.tensors.fresh)

    def _decides_size(
        self, condition: SymBool, likely: bool, frame: FrameType | None
    ) -> bool | None:
        """A decision on a size that values decide."""
        self.provenance.note_line()
        value, fresh = tensor_of_number(condition), self.tensors.fresh
        return self.conditions.answer(value, frame, fresh, guess=likely, of_size=True)

    def _asks_size(self, frame: FrameType | None) -> None:
        """``frame`` needs the number of a size of the arguments: the run ends where its code may be
        rewritten to need none."""
        asks = None if frame is None else self.asks_size(frame)
        if asks is not None:
            self.numbers.refused = self.numbers.refused or asks
            raise asks

    def _asks_for_size(self, frame: FrameType) -> bool:
        """Whether ``frame``, which hashes a size or makes a text of it, is the user's."""
        if _is_users(frame):
            self._asks_size(frame)
        return _is_users(frame)

    def _made_of_sizes(
        self,
        frame: FrameType,
        function: Callable[..., object],
        operands: tuple[object, ...],
        otherwise: Callable[[], object],
    ) -> object:
        return made_of_sizes(function, operands, otherwise) if _is_users(frame) else otherwise()

    def require(self, holds: Tensor) -> None:
        """Assume that a 0-dim tensor is true; each call checks it."""
        self.conditions.require(holds, self.tensors.fresh)


def _nothing_paused() -> bool:
    return False


def _refuse_anomaly_mode() -> None:
    """TR-128: a NaN in a gradient would end the backward, and a trace has no values."""
    if checks_for_nan():
        raise CaptureError(
            "anomaly detection is on: it reads the values of each gradient, but tensors have no "
            "values during capture",
            code="TR-128",
            where=here(),
            remedy=(
                "leave detect_anomaly off around a compiled step, and call the function itself "
                "under it to find the operation; detect_anomaly(check_nan=False) is captured"
            ),
        )


def _is_users(frame: FrameType) -> bool:
    return code_owner(frame.f_code.co_filename) not in (CodeOwner.OURS, CodeOwner.TORCH)


def _lacking(*_: object) -> object:
    """A method that a class has only during a trace."""
    return NotImplemented


def _nothing(*_: object) -> None:
    """A hook that does nothing."""


def _control_flow(name: str, original: Callable[..., object]) -> Callable[..., object]:
    return traced_only(instead_of(name), original)


def _at_line(error: CaptureError) -> CaptureError:
    """Add the user's line that runs to an error without a line."""
    return CaptureError(
        error.message, code=error.code, where=error.where or here(), remedy=error.remedy
    )
