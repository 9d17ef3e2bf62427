"""Rewriting of code that builds strings and looks up entries, so that it calls treadle:
``texts.py``, ``capture/symbolic/entries``, ``functions/index_ranges``,
``capture/symbolic/arrays/legacy_tensors``.

::

    f"loss {x:.2f}"          ->    joined("loss ", piece(x, "", ".2f"))
    "%d of %d" % (n, m)      ->    modulo("%d of %d", (n, m))
    ", ".join(texts)         ->    method(", ", "join")(texts)
    table[n]                 ->    entry(table, n)              where a number was asked for
    self.better(losses)      ->    callee(self.better)(losses)  likewise
    x[range(n), y]           ->    x[span(range, n), y]
    torch.Tensor([n])        ->    maker(torch.Tensor)([n])

Python's bytecode builds f-strings only from real strings, and differs between versions. So this
module rewrites the source, and takes from it the code object at the position of the running code.
If the source is missing, or is not what the code was compiled from, the code stays as it is.
"""

import __future__

import ast
import functools
import linecache
import operator
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import final

from treadle.capture.symbolic import entries
from treadle.capture.symbolic.arrays import legacy_tensors
from treadle.capture.symbolic.functions import index_ranges
from treadle.capture.symbolic.numbers import SourcePosition
from treadle.capture.symbolic.texts import texts
from treadle.capture.symbolic.texts.text_code import TEXT_METHODS, codes_within, makes_texts

_CALLED: dict[str, Callable[..., object]] = {
    f"str (treadle {function.__name__})": function
    for function in (
        texts.joined,
        texts.piece,
        texts.modulo,
        texts.method,
        entries.entry,
        legacy_tensors.maker,
        index_ranges.span,
    )
}
"""By the names that rewritten code calls: no name of anybody's code has a space."""
_JOINED, _PIECE, _MODULO, _METHOD, _ENTRY, _MAKER, _SPAN = _CALLED
_CALLEE = "str (treadle callee)"
_FUTURE = functools.reduce(
    operator.or_,
    (getattr(__future__, feature).compiler_flag for feature in __future__.all_feature_names),
)


def rewritten_source(
    code: CodeType, variables: dict[str, object], places: frozenset[SourcePosition] = frozenset()
) -> CodeType:
    """``code`` with our calls, which stand among ``called_functions()``; itself where it has none.
    ``variables``: its globals; ``places``: where entries are looked for."""
    file = code.co_filename
    places = frozenset(place for place in places if place[0] == file)
    is_named = legacy_tensors.names(code) or index_ranges.names(code)
    if not makes_texts(code) and not places and not is_named:
        return code
    source = "".join(linecache.getlines(file, variables))
    return _codes(source, file, code.co_flags & _FUTURE, places).get(code, code)


def called_functions(instead: Mapping[int, object]) -> dict[str, Callable[..., object]]:
    """The functions that rewritten code calls, by name. ``instead``: replacements of functions, by
    their ids."""

    def callee(function: object) -> object:
        return instead.get(id(function), function)

    return _CALLED | {_CALLEE: callee}


@functools.lru_cache(maxsize=1 << 6)
def _codes(
    source: str, file: str, flags: int, places: frozenset[SourcePosition]
) -> dict[CodeType, CodeType]:
    """By the code of each function of a file what makes texts by our calls."""
    try:
        tree = ast.parse(source, file)
        before = compile(tree, file, "exec", flags, dont_inherit=True)
        rewritten = ast.fix_missing_locations(_Rewriter(places).visit(tree))
        after = compile(rewritten, file, "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return dict(_pairs(before, after))


def _pairs(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    yield before, after
    for pair in zip(codes_within(before), codes_within(after), strict=True):
        yield from _pairs(*pair)


@final
class _Rewriter(ast.NodeTransformer):
    def __init__(self, places: frozenset[SourcePosition]) -> None:
        self._places = {place[1:] for place in places}

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        self.generic_visit(node)
        return _call(_JOINED, node, *node.values)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.expr:
        self.generic_visit(node)
        conversion = ast.Constant("" if node.conversion < 0 else chr(node.conversion))
        spec = ast.Constant("") if node.format_spec is None else node.format_spec
        return _call(_PIECE, node, node.value, conversion, spec)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Mod):
            return node
        return _call(_MODULO, node, node.left, node.right)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in TEXT_METHODS:
            node.func = _call(_METHOD, called, called.value, ast.Constant(called.attr))
        elif isinstance(called, ast.Attribute) and called.attr in legacy_tensors.NAMES:
            node.func = _call(_MAKER, called, called)
        elif _place(node) in self._places:
            node.func = _call(_CALLEE, called, called)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        spans = [part for part in parts if index_ranges.is_span(part)]
        self.generic_visit(node)
        for part in spans:
            assert isinstance(part, ast.Call)
            part.args.insert(0, part.func)
            part.func = ast.copy_location(ast.Name(_SPAN, ast.Load()), part)
        if _place(node) not in self._places or not isinstance(node.ctx, ast.Load):
            return node
        return _call(_ENTRY, node, node.value, node.slice)


def _place(node: ast.expr) -> tuple[int | None, ...]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _call(name: str, place: ast.expr, *args: ast.expr) -> ast.expr:
    """A call of ours, at the place of what it stands for."""
    function = ast.copy_location(ast.Name(name, ast.Load()), place)
    return ast.copy_location(ast.Call(function, list(args), []), place)
