import gc
import types

import numpy as np
import pytest
from torch import nn

from treadle.capture.torch_private import DictVersions
from treadle.util import words


class Thing:
    def __init__(self) -> None:
        self.a = 1
        self.b = 2


def make() -> list[dict]:
    thing = Thing()
    return [{}, {"x": 1}, {i: i for i in range(100)}, vars(thing), vars(types), vars(Thing()), {}]


@pytest.fixture(params=["gathered", "asked"])
def versions(request, monkeypatch):
    if request.param == "asked":
        monkeypatch.setattr("treadle.capture.torch_private.write_counts", lambda dicts: None)
    return DictVersions


def test_says_which_dicts_were_written_to(versions):
    dicts = make()
    watched = versions(dicts)
    assert watched.changed() == []
    assert watched.are_same()
    dicts[1]["x"] = 2
    dicts[6]["y"] = 1
    assert watched.changed() == [1, 6]
    assert not watched.are_same()
    watched.accept()
    assert watched.changed() == []
    dicts[1].clear()
    assert watched.changed() == [1]


def test_attributes_of_an_object_are_written_to_its_dict(versions):
    things = [Thing() for _ in range(20)]
    watched = versions([vars(each) for each in things])
    for _ in range(50):  # until the interpreter has its fast ways
        things[7].a += 1
        things[9].__dict__["b"] += 1
        assert watched.changed() == [7, 9]
        watched.accept()
    del things[11].a
    things[12].new = 1
    assert watched.changed() == [11, 12]


def test_reads_and_collections_are_no_writes(versions):
    dicts = make()
    watched = versions(dicts)
    for each in dicts:
        list(each.items()), each.get("x"), dict(each)
    gc.collect()
    assert watched.changed() == []


def test_what_cells_and_functions_hold_is_seen():
    def make(value):
        def function(a=value):
            return a, value

        return function

    functions = [make([each]) for each in range(5)]
    cells = [each.__closure__[0] for each in functions]
    of_functions, of_cells = words.contents(functions), words.contents(cells)
    if of_functions is None or of_cells is None:
        pytest.skip("this Python is not known")
    before = of_functions(), of_cells()
    assert len(before[0]) == 15
    functions[3].__defaults__ = (7,)
    cells[2].cell_contents = 8
    assert np.flatnonzero(of_functions() != before[0]).tolist() == [10]
    assert np.flatnonzero(of_cells() != before[1]).tolist() == [2]
    functions[3].__kwdefaults__ = {"a": 1}
    functions[4].__code__ = functions[1].__code__.replace(co_name="other")
    assert np.flatnonzero(of_functions() != before[0]).tolist() == [10, 11, 12]


def test_classes_and_dicts_of_objects_are_seen():
    class Slotted(list):
        pass

    class Other:
        pass

    values = [Thing(), Slotted(), Thing(), nn.Linear(1, 1)]
    kinds, held = words.types(values), words.spaces(values, list(map(vars, values)))
    if kinds is None:
        pytest.skip("this Python is not known")
    assert held is not None
    before = kinds(), held()
    values[0].a = 5  # in the same dict
    values[0].__class__ = Other
    values[2].__dict__ = {}
    values[1].__dict__ = {}
    assert np.flatnonzero(kinds() != before[0]).tolist() == [0]
    assert np.flatnonzero(held() != before[1]).tolist() == [1, 2]


def test_nothing_is_gathered_where_it_is_not_known(monkeypatch):
    monkeypatch.setattr(words, "_layout", lambda: None)
    assert words.write_counts([{}]) is None
    assert words.types([Thing()]) is None
    assert words.contents([make]) is None
    assert words.spaces([], []) is None
