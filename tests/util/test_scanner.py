import re

import pytest

from treadle.util.errors import ParseError
from treadle.util.scanner import Scanner


def test_pieces_from_left_to_right():
    scanner = Scanner("return [1, -2.5,inf, 'a b']  tail \nnext", "")
    assert not scanner.take("ret")  # a word is not seen in a longer one
    scanner.need("return")
    scanner.need("[")
    numbers = [scanner.number()]
    scanner.need(",")
    numbers.append(scanner.number())
    scanner.need(",")
    numbers.append(scanner.number())
    assert numbers == [1, -2.5, float("inf")]
    assert type(numbers[0]) is int
    scanner.need(",")
    assert scanner.quoted() == "a b"
    scanner.need("]")
    assert scanner.rest() == "tail"
    assert scanner.at_end_of_line()
    scanner.next_line()
    assert scanner.word() == "next"
    assert scanner.at_end()


def test_several():
    scanner = Scanner("1, 2, ) )", "")
    assert scanner.several(")", scanner.integer) == [1, 2]
    assert scanner.several(")", scanner.integer) == []


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda s: s.need("("), "'(' is expected here"),
        (lambda s: s.word(re.compile("x"), "an x"), "an x is expected here"),
        (lambda s: s.integer(), "a whole number is expected here"),
        (lambda s: s.next_line(), "the line should end here"),
    ],
)
def test_what_does_not_fit_has_a_place(read, message):
    scanner = Scanner("one\n  2.5", "write it otherwise")
    scanner.word()
    scanner.next_line()
    with pytest.raises(ParseError) as caught:
        read(scanner)
    error = caught.value
    assert (error.message, error.line, error.column) == (message, 2, 3)
    assert str(error).endswith(
        "line 2, column 3:\n      2.5\n      ^\n  remedy: write it otherwise"
    )
