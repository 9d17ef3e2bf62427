"""Which private names of torch are used, and that this version has those it should."""

import importlib
import operator

import pytest
import torch

from treadle.capture.torch_private import NAMES

VERSION = ".".join(torch.__version__.split(".")[:2])


def find(path: str):
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        rest = ".".join(parts[count:])
        return operator.attrgetter(rest)(module) if rest else module
    raise AttributeError(path)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_this_version_has_what_the_table_says(name):
    versions = NAMES[name]
    assert set(versions) <= {"2.11", "2.13", "2.15"}
    if VERSION in versions:
        assert find(name) is not None
    elif VERSION in {"2.11", "2.13", "2.15"}:
        with pytest.raises(AttributeError):
            find(name)
