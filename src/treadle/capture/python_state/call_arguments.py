"""How a step's function names its arguments, and the canonical form of equivalent calls.

    step(x, y=y)                      ->  step(x, y, 1.0)      for  def step(x, y, scale=1.0)
    step(y=y, x=x, scale=1.0)         ->  step(x, y, 1.0)
    step(x, model)                    ->  step(x)              where ``model`` is the default

The function gets the same values either way. A default that is a number, a boolean, a text or
``None`` is filled in, so that it is an argument as others are; other defaults are left out, and are
read from the function, as what a step reads outside is.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter
from operator import is_
from types import FunctionType, MethodType
from typing import final

_FILLED = frozenset({int, float, bool, str, type(None)})
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)

Arguments = tuple[tuple[object, ...], dict[str, object]]


def parameter_names(function: Callable[..., object]) -> list[str]:
    """The parameters that a call fills by position or by name, in order."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    return [parameter.name for parameter in parameters if parameter.kind in _BY_POSITION]


@final
class CallArguments:
    """The form of calls of ``function``, as it is at each of them: its code and its defaults may be
    set to others."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self._seen: tuple[object, ...] = ()
        self._binding: _Binding | None = None

    def of(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Arguments:
        """The form of one call. What does not fit the function stays as it is, as does what its own
        parameters do not tell apart: ``*args`` and ``**kwargs``."""
        now = _facts(self._function)
        if len(now) != len(self._seen) or not all(map(is_, now, self._seen)):
            self._seen, self._binding = now, _binding(self._function) if now else None
        binding = self._binding
        if binding is None or (not kwargs and len(args) == binding.usual):
            return args, kwargs
        return binding.of(args, kwargs) or (args, kwargs)


def _facts(function: object) -> tuple[object, ...]:
    """The objects that decide how a call fills parameters, to be compared by identity; empty unless
    Python code decides it."""
    if isinstance(function, FunctionType):
        if function.__dict__ and "__signature__" in function.__dict__:
            return ()
        by_name = function.__kwdefaults__
        own = function.__code__, function.__defaults__
        return own if by_name is None else (*own, *by_name, *by_name.values())
    if isinstance(function, MethodType):
        return _facts(function.__func__)
    if type(function) is functools.partial:
        inner = _facts(function.func)
        return inner and (*inner, function.args, *function.keywords, *function.keywords.values())
    if "__signature__" in getattr(function, "__dict__", ()):
        return ()
    called = inspect.getattr_static(type(function), "__call__", None)
    return _facts(called) if isinstance(called, FunctionType) else ()


def _binding(function: Callable[..., object]) -> "_Binding | None":
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # it has no first parameter that is the object
        return None
    binding = _Binding(list(signature.parameters.values()))
    return binding if binding.names or binding.by_name else None


@final
class _Binding:
    """Parameters of one function. ``usual``: a call with this number of positional arguments and no
    others is in its form already; -1 if that depends on the values."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        kinds = {parameter.kind for parameter in parameters}
        self.names = tuple(
            parameter.name for parameter in parameters if parameter.kind in _BY_POSITION
        )
        self._by_position = [
            parameter for parameter in parameters if parameter.kind in _BY_POSITION
        ]
        self.by_name = [
            parameter for parameter in parameters if parameter.kind is Parameter.KEYWORD_ONLY
        ]
        self._takes_more = Parameter.VAR_POSITIONAL in kinds
        self._takes_others = Parameter.VAR_KEYWORD in kinds
        depends = any(not _fills(parameter) for parameter in self._by_position)
        self.usual = -1 if self.by_name or depends else len(self.names)

    def of(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Arguments | None:
        """The form of a call; ``None`` for one that does not fit the function, or whose arguments
        must all stay where they are."""
        left = dict(kwargs)
        named: dict[str, object] = {}
        placed: tuple[object, ...] | None
        if len(args) > len(self.names):
            placed = args if self._takes_more and not self._taken(left) else None
        else:
            placed = self._placed(args, left, named)
        if placed is None or not self._take_named(left, named):
            return None
        if left and not self._takes_others:
            return None
        return placed, {**named, **left}

    def _taken(self, left: dict[str, object]) -> bool:
        """Whether an argument is given both by name and by position."""
        normal = Parameter.POSITIONAL_OR_KEYWORD
        return any(
            parameter.name in left for parameter in self._by_position if parameter.kind is normal
        )

    def _placed(
        self, args: tuple[object, ...], left: dict[str, object], named: dict[str, object]
    ) -> tuple[object, ...] | None:
        """The positional arguments. ``named`` gets those after an omitted one; arguments that are
        used are removed from ``left``."""
        placed: list[object] = []
        has_gap = False
        for at, parameter in enumerate(self._by_position):
            only_placed = parameter.kind is Parameter.POSITIONAL_ONLY
            by_name = not only_placed and parameter.name in left
            if at < len(args):
                value = args[at]
                if by_name:
                    return None  # twice
            elif by_name:
                value = left.pop(parameter.name)
            elif parameter.default is Parameter.empty:
                return None  # missing
            else:
                value = parameter.default
            if value is parameter.default and not _fills(parameter):
                has_gap = True
            elif not has_gap:
                placed.append(value)
            elif not only_placed:
                named[parameter.name] = value
            elif at < len(args):
                return None  # there is no name to give it by
        return tuple(placed)

    def _take_named(self, left: dict[str, object], named: dict[str, object]) -> bool:
        """Add the named arguments to ``named``, in the order of the parameters; whether none is
        missing."""
        for parameter in self.by_name:
            value = left.pop(parameter.name, parameter.default)
            if value is Parameter.empty:
                return False
            if value is not parameter.default or _fills(parameter):
                named[parameter.name] = value
        return True


def _fills(parameter: Parameter) -> bool:
    """Whether the parameter has no default, or one that is filled in."""
    default = parameter.default
    return default is Parameter.empty or type(default) in _FILLED
