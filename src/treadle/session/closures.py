"""Optimizers outside the graph that call a closure any number of times, depending on values, such
as LBFGS.

Such a call cannot be one graph, but the closure can: forward, loss and backward, compiled as a
separate step that leaves its gradients in ``.grad``. The optimizer calls that step instead of the
closure, and the code around its ``step`` runs in Python.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import final

from torch.optim import Optimizer

from treadle.capture.eager import why_eager
from treadle.compiler.compiled import Compiled
from treadle.session.bind import put_back
from treadle.session.user_step import UserStep
from treadle.session.variants.dispatch import Dispatcher

Closure = Callable[[], object]


def called(closure: Closure) -> object:
    """The step of one closure, which is its argument: a new one at every call."""
    return closure()


@final
class ClosureStep:
    """The closures of ``step`` as a compiled step: ``closure``, whose variants ``dispatcher``
    has."""

    def __init__(self, step: UserStep, dispatcher: Dispatcher) -> None:
        self.closure = UserStep.of(called, step.models, {})
        self._step = step
        self._whole = dispatcher

    @cached_property
    def dispatcher(self) -> Dispatcher:
        """Of the closures: made when the first one is served."""
        return self._whole.beside(self.closure)

    def variants(self) -> Iterable[Compiled]:
        """Those of closures."""
        return self.dispatcher.variants if "dispatcher" in vars(self) else ()

    @property
    def served_last(self) -> bool:
        """Whether the variant that ran last is one of a closure."""
        is_dispatched = "dispatcher" in vars(self)
        return (
            is_dispatched
            and self._whole.last is not None
            and self._whole.last is self.dispatcher.last
        )

    def reasons(self) -> list[tuple[str, str]]:
        """Each optimizer that steps in Python, and why, as ``explain`` shows it."""
        tail = (
            "it calls the compiled closure any number of times, and its memory is not in the plan"
        )
        refusals = (
            (optimizer, why_eager(optimizer)) for optimizer in self._step.optimizers.values()
        )
        return [
            (f"{type(optimizer).__name__}.step(closure)", f"{why.code}: {why.words}; {tail}")
            for optimizer, why in refusals
            if why is not None
        ]

    def run(
        self,
        serve: Callable[[Closure], object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[object, int]:
        """The function as it is, with each closure of an optimizer served by ``serve``; and how
        many were."""
        served = 0

        def in_its_place(closure: Closure) -> object:
            nonlocal served
            served += 1
            return serve(closure)

        with _stepping(self._step.optimizers.values(), in_its_place):
            result = self._step.eagerly(*args, **kwargs)
        return result, served


@contextmanager
def _stepping(
    optimizers: Iterable[Optimizer], serve: Callable[[Closure], object]
) -> Iterator[None]:
    """``optimizer.step(closure)`` calls ``serve`` in the closure's place."""
    with ExitStack() as undo:
        for optimizer in optimizers:
            undo.callback(put_back, vars(optimizer), "step", vars(optimizer).get("step"))
            vars(optimizer)["step"] = _with_closure(optimizer.step, serve)
        yield


def _with_closure(
    step: Callable[..., object], serve: Callable[[Closure], object]
) -> Callable[..., object]:
    def stepped(closure: Closure | None = None) -> object:
        return step() if closure is None else step(lambda: serve(closure))

    return stepped
