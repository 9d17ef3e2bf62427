"""The reasons why a step has more than one variant, in order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from treadle.compiler.compiled import Compiled
from treadle.options import Callback
from treadle.session.logs import log_compiled, log_recompiles
from treadle.util.warn import warn_user

MANY_RECOMPILES = 4


@final
@dataclass(slots=True)
class History:
    """Of the step ``name``. ``recompiles``: why the step was compiled again, or ran eagerly;
    ``recaptures``: why it was captured again, to run the program of another variant. ``untold``:
    of both, and whether something was compiled, what callbacks have not heard of."""

    name: str
    recompiles: list[str] = field(default_factory=list[str])
    recaptures: list[str] = field(default_factory=list[str])
    untold: list[str] = field(default_factory=list[str])
    untold_compile: bool = False

    def compiled(self, compiled: Compiled) -> None:
        """A variant was made."""
        log_compiled(self.name, compiled)
        self.untold_compile = True

    def tell(self, step: object, callbacks: Sequence[Callback], *, called: bool) -> None:
        """Callbacks hear what has happened to ``step``, and whether it was ``called``."""
        reasons, self.untold = self.untold, []
        was_compiled, self.untold_compile = self.untold_compile, False
        for callback in callbacks:
            for reason in reasons:
                callback.on_recompile(step, reason)
            if was_compiled:
                callback.on_compile(step)
            if called:
                callback.on_call(step)

    def _log(self, reasons: Sequence[str]) -> None:
        log_recompiles(self.name, reasons)
        self.untold += reasons

    def ran_eagerly(self, why: str) -> None:
        """A warning at the user's call, once for each reason."""
        note = f"a call ran eagerly: {why}"
        if note not in self.recompiles:
            self.recompiles.append(note)
            self._log((note,))
            warn_user(note)

    def recompiled(self, reasons: Sequence[str], before: int) -> None:
        """A warning at the user's call, the fourth time; ``before``: how many reasons there were
        before this call."""
        self.recompiles += reasons
        self._log(self.recompiles[before:])
        if before < MANY_RECOMPILES <= len(self.recompiles):
            warn_user(
                f"the step is compiled again for the {MANY_RECOMPILES}th time: "
                f"{self.recompiles[-1]}. step.recompiles lists all reasons. Declare varying "
                "sizes with treadle.dynamic. Tensors, numbers that only scale them and anything "
                "that the step does not read may change freely; move other values that change at "
                "every call out of the step"
            )

    def forget(self, reason: str) -> None:
        """Of a call that has failed."""
        if reason in self.recompiles:
            self.recompiles.remove(reason)

    def instead(self, before: int, why: str) -> None:
        """``why`` is the reason in the place of all from number ``before`` on."""
        self.recompiles[before:] = [why]
        self._log((why,))

    def recaptured(self, reasons: Sequence[str]) -> None:
        """Likewise; what changed made no difference to what runs."""
        before = len(self.recaptures)
        self.recaptures += reasons
        self._log(reasons)
        if before < MANY_RECOMPILES <= len(self.recaptures):
            warn_user(
                f"the step is captured again for the {MANY_RECOMPILES}th time: "
                f"{self.recaptures[-1]}. Nothing was compiled, because the change makes no "
                "difference, but each such change costs a capture. step.recaptures lists all "
                "reasons"
            )
