"""Which variant serves a call: one that is known, one of many sizes, or one compiled for it."""

from typing import final

from treadle.capture.eager import CallsClosure
from treadle.capture.python_state.call_arguments import CallArguments, parameter_names
from treadle.capture.symbolic.branches.decisions import Answers
from treadle.compiler.compiled import Compiled
from treadle.session.agreement import tell_refusal
from treadle.session.carried import Carrier
from treadle.session.user_step import UserStep
from treadle.session.variants.compiling import VariantCompiler, strict_error
from treadle.session.variants.eager_calls import EagerCalls
from treadle.session.variants.guards import Called, GuardKey, Keys
from treadle.session.variants.many_sizes import ManySizes
from treadle.session.variants.new_call import NewCall
from treadle.session.variants.shapes import Dynamic
from treadle.session.variants.variants import Variants
from treadle.util.errors import GroupFailure
from treadle.util.expected import NotExpected


@final
class Dispatcher:
    """The variants of one step. ``history``: why there is more than one; ``last``: the one that
    served last; ``captured_again``: it was made for that call and runs the program of another one;
    ``call``: the arguments that are served; ``carrier``: what its calls leave for later ones."""

    def __init__(self, compiler: VariantCompiler, shapes: Dynamic | None) -> None:
        step = compiler.step
        self.history = compiler.history
        self.last: Compiled | None = None
        self.captured_again = False
        self.call = compiler.call
        self.carrier = Carrier(step.models, step.optimizers)
        self.eager_calls = EagerCalls()
        self.variants = Variants(compiler.options.max_cached)
        self._compiler = compiler
        self._step = step
        self._keys = Keys(step.models, step.optimizers, parameter_names(step.function))
        self._arguments = CallArguments(step.function)
        self._sizes = ManySizes(compiler, shapes)
        self._in_a_row = 0  # calls that the last variant has served
        self._closure: CallsClosure | None = None  # why calls are no single graph by now
        self._path: Answers = ()  # that a call is known to take, at its beginning
        self._parts = ""  # where it parts from the last call's

    def beside(self, step: UserStep) -> "Dispatcher":
        """The variants of ``step``, a part of this one: told about with it."""
        return Dispatcher(self._compiler.beside(step), None)

    def failed(self) -> None:
        """The call that was served last has raised an error."""
        self._sizes.failed()

    def note_served(self) -> None:
        """The variant of a call has served it: how the next ones are begun."""
        if self.captured_again and not self._compiler.options.strict:
            self.eager_calls.captured()
        else:
            self.eager_calls.end()

    def forget_closure(self) -> None:
        """A call that was to call a closure has called none: the next one is captured again."""
        self._closure = None

    def variant(
        self, args: tuple[object, ...], kwargs: dict[str, object], *, update: bool = True
    ) -> Compiled:
        """For this call; ``update``: whether optimizers step. Raises what compiling raises."""
        self._step.start()
        self._sizes.begin()
        self.captured_again = False
        args, kwargs = self._arguments.of(args, kwargs)
        called, inputs = self._keys.called(args, kwargs, update=update)
        self.call.serve(inputs)
        try:
            compiled = None if self._path else self.variants.again(called, self.call)
            if compiled is None:
                compiled = self._looked_up(
                    called, NewCall(args, kwargs, update, self._path, self._parts)
                )
        except (NotExpected, CallsClosure, GroupFailure):
            raise
        except Exception as error:
            tell_refusal(self._step.models, self._step.group, self.last, error)
            raise
        finally:
            self._path = ()
        self._in_a_row = self._in_a_row + 1 if compiled is self.last else 1
        self.last = compiled
        return compiled

    def takes_other_path(self, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """Whether a call, of which nothing has happened, decides otherwise than the variant that
        was to serve it: the next look for one knows."""
        if self.last is None or self.last.captured.dependencies.path.questions is None:
            return False
        named = dict(kwargs)
        self._step.take_update(named)
        _, inputs = self._keys.called(*self._arguments.of(args, named))
        self.call.serve(inputs)
        path = self._compiler.other_path(self.last.captured)
        self._path = path or ()
        self._parts = "" if path is None else self.last.captured.dependencies.path.words(path)
        return path is not None

    def again(
        self, compiled: Compiled, misfit: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Compiled:
        """A new variant in the place of one that does not fit what its key stands for; ``misfit``
        says why."""
        self.variants.drop(compiled)
        self._sizes.forget()
        known = len(self.history.recompiles)
        compiled = self.variant(args, kwargs, update=self._step.take_update(kwargs))
        self.history.instead(known, misfit)
        return compiled

    def _looked_up(self, called: Called, call: NewCall) -> Compiled:
        key = self._keys.key(called)
        known = self.variants.get(key, call.path)
        if known is not None:
            if known is self.last:  # where sizes change at every call, it would be for nothing
                self.variants.note(known, called, self._keys)
            return known
        if self._closure is not None:
            raise self._closure.with_traceback(None)
        try:
            compiled = self._made(key, call)
        except CallsClosure as error:
            self._refuse(error)
            self._closure = error
            raise
        self.variants.add(key, compiled)
        return compiled

    def _refuse(self, error: CallsClosure) -> None:
        """Where the closure alone must not, or cannot, be what is compiled."""
        if self._compiler.options.strict:
            raise strict_error(error.message, error.code, error.where)
        if self._step.group is not None:
            raise error.refused()

    def _made(self, key: GuardKey, call: NewCall) -> Compiled:
        before = len(self.history.recompiles)
        if self.variants.forget_replaced(key):
            self.history.recompiles.append("parameters were replaced by other objects")
            self._sizes.forget()
        special = self._sizes.variant(key, call, self.variants, self._in_a_row)
        if special is not None:
            return special
        reasons = self._why_not(key, call)
        alone = self._sizes.why_alone()
        reasons = [f"{reason}; {alone}" if alone else reason for reason in reasons]
        self._compiler.note_numbers(self.variants.changed_numbers(key))
        if self._sizes.are_declared:
            compiled = self._compiler.compile(call, self.variants)
        else:
            compiled = (
                self._compiler.stored(key, call, self.variants)
                or self._sizes.stored(key, call, self.variants)
                or self._compiler.compiled(key, call, self.variants)
            )
            self._sizes.note(key, compiled)
        if self.variants.runs(compiled):  # what changed made no difference to it
            self.history.recaptured(reasons)
            self.captured_again, reasons = bool(reasons), []
        self.history.recompiled(reasons, before)
        return compiled

    def _why_not(self, key: GuardKey, call: NewCall) -> list[str]:
        """Why no variant serves a call, in words; ``LeftToEager`` where another one has no
        room."""
        last = None if self.last is None else self.last.captured.dependencies
        drawn = last is not None and last.host_draws.decides()
        if call.path or drawn:
            self._compiler.require_room(len(self.variants))
        return self._sizes.why_not(key, call, self.variants)
