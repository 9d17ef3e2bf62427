"""Whatever is written to is noticed, and nothing else: by compiled code, by NumPy, by asking."""

import gc
import random
import shutil
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from types import CellType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from treadle.capture.python_state.container_parts import Sequenced
from treadle.capture.python_state.introspect import parts_of, slots_of
from treadle.capture.python_state.parts import OfFunction, Slots, Variable
from treadle.capture.python_state.reads.identity_guards import IdentityGuards
from treadle.guards import dict_fingerprint, watching
from treadle.guards import memory_fingerprint as words
from treadle.guards.dict_fingerprint import DictLayout, dict_layout
from treadle.guards.first_difference import first_difference
from treadle.guards.tensor_fingerprint import grad_word, no_grad, of_tensor
from treadle.guards.watching import FingerprintWatch, Watches, watch_dicts, watch_tensors
from treadle.runtime.kernels.c_library import COMPILERS

WAYS = ("compiled", "contents", "gathered", "asked")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    choose(request.param, monkeypatch)
    return request.param


def choose(name, patch):
    if name in ("compiled", "contents") and not any(map(shutil.which, COMPILERS)):
        pytest.skip("there is no C compiler")
    if name == "compiled":
        assert watching.comparison() is not None
    if name not in ("compiled", "contents"):
        patch.setattr(watching, "comparison", lambda: None)
    if name == "contents":
        contents = replace(dict_layout(), own=False)
        if not contents.contents:
            pytest.skip("writes to dicts are counted")
        patch.setattr(dict_fingerprint, "dict_layout", lambda: contents)
    if name == "asked":
        patch.setattr(words, "layout", lambda: None)
        nothing = DictLayout(own=False, every=False, contents=False)
        patch.setattr(dict_fingerprint, "layout", lambda: None)
        patch.setattr(dict_fingerprint, "dict_layout", lambda: nothing)
        patch.setattr(watching, "of_tensor", lambda tensor: None)


class Plain:
    pass


class Other:
    pass


class Slotted:
    __slots__ = ("a", "b")


def a_function(value):
    def made(x=value, *, y=value):
        return x, y, value

    return made


def a_property(value):
    return property(lambda self: value)


def an_object(value):
    made = Plain()
    made.a = value
    return made


def a_slotted(value):
    made = Slotted()
    made.a = value
    return made


MAKERS = {
    "dict": lambda v: {"a": v, 1: None},
    "list": lambda v: [v, None, v],
    "empty list": lambda v: [],
    "set": lambda v: {v, 1, "x"},
    "empty set": lambda v: set(),
    "cell": CellType,
    "function": a_function,
    "ordered dict": lambda v: OrderedDict(a=v),
    "property": a_property,
    "object": an_object,
    "slots": a_slotted,
}
CHANGES = {
    "dict": (
        lambda d, v: d.__setitem__("a", v),
        lambda d, v: d.pop("a"),
        lambda d, v: d.update(b=v),
        lambda d, v: d.clear(),
        lambda d, v: d.setdefault("c", v),
    ),
    "list": (
        lambda x, v: x.append(v),
        lambda x, v: x.__setitem__(0, v),
        lambda x, v: x.pop(),
        lambda x, v: x.reverse() or x.insert(0, v),
        lambda x, v: x.clear(),
        lambda x, v: x.extend([v] * 100),
    ),
    "empty list": (lambda x, v: x.append(v), lambda x, v: x.extend([v] * 1000)),
    "set": (
        lambda s, v: s.add(v),
        lambda s, v: s.discard("x"),
        lambda s, v: s.clear(),
        lambda s, v: s.update(map(object.__new__, [object] * 100)),
    ),
    "empty set": (lambda s, v: s.add(v),),
    "cell": (lambda c, v: setattr(c, "cell_contents", v), lambda c, v: c.__delattr__(CONTENTS)),
    "function": (
        lambda f, v: setattr(f, "__defaults__", (v,)),
        lambda f, v: setattr(f, "__defaults__", None),
        lambda f, v: setattr(f, "__kwdefaults__", None),
        lambda f, v: setattr(f, "__code__", f.__code__.replace(co_name="other")),
        lambda f, v: setattr(f.__closure__[0], "cell_contents", v),
        lambda f, v: setattr(f, "attribute", v),
        lambda f, v: setattr(f, "__dict__", {"attribute": v}),
        lambda f, v: vars(f).update(attribute=v),
    ),
    "ordered dict": (
        lambda d, v: setattr(d, "attribute", v),
        lambda d, v: vars(d).update(attribute=v),
        lambda d, v: setattr(d, "__dict__", {"attribute": v}),
        lambda d, v: d.__setitem__("a", v),
    ),
    "property": (lambda p, v: p.__init__(a_function(v)), lambda p, v: p.__init__()),
    "object": (
        lambda o, v: setattr(o, "a", v),
        lambda o, v: delattr(o, "a"),
        lambda o, v: setattr(o, "b", v),
        lambda o, v: setattr(o, "__dict__", {"a": v}),
        lambda o, v: setattr(o, "__class__", Other),
    ),
    "slots": (
        lambda o, v: setattr(o, "a", v),
        lambda o, v: delattr(o, "a"),
        lambda o, v: setattr(o, "b", v),
    ),
}
CONTENTS = "cell_contents"


def swept(values):
    """Every part of these objects; those that cannot be swept are given back."""
    sweep, parts, others = IdentityGuards(), [], []
    for value in values:
        sweep.add_type(value)
        held = [value, *(value.__closure__ or ())] if callable(value) else [value]
        for owner in held:
            for part in parts_of(owner, "").parts:
                if sweep.add(part, owner, len(parts)):
                    parts.append(part)
                else:
                    others.append((part, part.now()))
    sweep.settle()
    return sweep, others


def is_same(sweep, others):
    return sweep.is_same() and all(part.is_same(part.now(), held) for part, held in others)


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_change_anywhere_is_noticed(name, data):
    kinds = data.draw(st.lists(st.sampled_from(sorted(MAKERS)), min_size=1, max_size=12))
    at = data.draw(st.integers(0, len(kinds) - 1))
    changes = CHANGES[kinds[at]]
    change = changes[data.draw(st.integers(0, len(changes) - 1))]
    with pytest.MonkeyPatch.context() as patch:
        choose(name, patch)
        values = [MAKERS[kind](object()) for kind in kinds]
        sweep, others = swept(values)
        assert is_same(sweep, others)
        gc.collect()
        assert is_same(sweep, others)
        change(values[at], object())
        assert not is_same(sweep, others)
        sweep.differing()


@pytest.mark.parametrize("seed", range(20))
def test_what_was_accepted_is_what_counts(seed, way):
    """Many changes, accepted or not, of many objects: those that are found are those there are."""
    chance = random.Random(seed)
    pool = [object() for _ in range(3)]
    kinds = ("dict", "list", "set", "cell", "slots")
    values = [MAKERS[chance.choice(kinds)](chance.choice(pool)) for _ in range(30)]
    sweep = IdentityGuards()
    parts = []
    for value in values:
        (part,) = parts_of(value, "").parts
        if sweep.add(part, value, len(parts)):
            parts.append(part)
    sweep.settle()
    known = [part.now() for part in parts]
    for _ in range(60):
        for value in chance.sample(values, chance.randrange(3)):
            kind = next(k for k in kinds if isinstance(value, type(MAKERS[k](0))))
            try:
                chance.choice(CHANGES[kind])(value, chance.choice(pool))
            except (AttributeError, LookupError, ValueError):
                continue
        really = {at for at, part in enumerate(parts) if not part.is_same(part.now(), known[at])}
        found = set(sweep.differing())
        assert really <= found
        assert sweep.is_same() is (not found)
        if chance.random() < 0.5:
            sweep.accept()
            known = [part.now() for part in parts]
            assert sweep.is_same() or way == "asked" or not all(map(has_words, parts))


def has_words(part):
    """Whether it still has words: an empty cell has none."""
    return bool(part.now()) if isinstance(part, Variable) else True


def test_an_object_at_the_place_of_another_is_another(way):
    """What was there is kept, so that nothing else can have its address."""
    values = [[object()] for _ in range(200)]
    sweep, others = swept(values)
    for each in values:
        each.clear()
    gc.collect()
    for each in values:
        each.append(object())
    assert len(sweep.differing()) + len(others) == 200


def test_dicts_are_told_apart(way):
    thing = an_object(1)
    dicts = [{}, {"x": 1}, {i: i for i in range(100)}, vars(thing), vars(Other()), {}]
    found = watch_dicts(dicts)
    assert found.changed() == []
    dicts[1]["x"] = 2
    dicts[5]["y"] = 1
    assert found.changed() == [1, 5]
    assert not found.is_same()
    found.accept()
    assert found.is_same()
    for _ in range(50):  # until the interpreter has its fast ways
        thing.a += 1
        assert found.changed() == [3]
        found.accept()
    list(dicts[2].items()), dicts[2].get(1), dict(dicts[2])
    gc.collect()
    assert found.changed() == []


def test_what_was_found_and_taken_back_is_not_accepted(way):
    """Another variant looks at the change; then it is undone, and this one is called again."""
    dicts, cell = [{"x": 1}], CellType(one := object())
    found = watch_dicts(dicts)
    watch = FingerprintWatch()
    is_watched = watch.add(partial(words.of_cell, cell))
    watch.settle()
    for _ in range(2):
        cell.cell_contents = two = object()
        assert watch.changed() == [0] * is_watched
        cell.cell_contents = one
        assert watch.is_same()
        watch.accept()
        cell.cell_contents = two
        assert watch.is_same() is not is_watched
        cell.cell_contents = one
    dicts[0]["x"] = 2
    assert found.changed() == [0]
    found.accept()
    assert found.is_same()


def test_several_watches_are_one(way):
    dicts, cell, asked = [{"x": 1}, {}], CellType(one := object()), [True]
    first, second = watch_dicts(dicts), FingerprintWatch()
    is_watched = second.add(partial(words.of_cell, cell))
    second.settle()
    several = Watches()
    several.add(first)
    several.add(second)
    several.polled.append(lambda: asked[0])
    several.settle()
    assert several.is_same()
    asked[0] = False
    assert not several.is_same()
    asked[0] = True
    cell.cell_contents = object()
    assert several.is_same() is not is_watched
    cell.cell_contents = one
    assert several.is_same()
    dicts[1]["y"] = 2
    assert not several.is_same()


def test_what_two_watches_have_is_compared_once_and_not_lost(way):
    dicts = [{"x": 1}, {}]
    first, second, third = watch_dicts(dicts[:1]), watch_dicts(dicts), watch_dicts(dicts)
    several = Watches()
    for watch in (first, second, third):
        several.add(watch)
    several.settle()
    assert several.is_same()
    dicts[1]["y"] = 2
    assert not several.is_same()
    assert first.is_same()
    assert second.changed() == [1]


def test_a_watch_of_nothing_is_one_of_several(way):
    dicts = [{"x": 1}]
    several = Watches()
    for watch in (watch_dicts([]), watch_dicts(dicts), watch_dicts([]), watch_dicts(dicts)):
        several.add(watch)
    several.settle()
    assert several.is_same()
    dicts[0]["x"] = 2
    assert not several.is_same()


def test_what_one_watch_has_accepted_another_one_has_not(way):
    dicts = [{"x": 1}]
    first, second = watch_dicts(dicts), watch_dicts(dicts)
    dicts[0]["x"] = 2
    assert first.changed() == [0]
    first.accept()
    several = Watches()
    several.add(first)
    several.add(second)
    several.settle()
    assert not several.is_same()


@pytest.mark.skipif(words.layout() is None, reason="this Python is not known (see test_words)")
def test_what_a_watch_was_told_since_counts():
    """Words that it had before may be of objects that are gone."""
    held = [[1], [2]]
    watch = FingerprintWatch()
    if not all(watch.add(partial(words.of_list, each)) for each in held):
        pytest.skip("lists are asked")
    several = Watches()
    several.add(watch.settle())
    several.settle()
    held[0].append(3)
    assert watch.changed() == [0]
    watch.accept()
    assert watch.is_same()
    assert not several.is_same()


@pytest.mark.skipif(of_tensor(torch.ones(1)) is None, reason="tensors are asked")
def test_flags_are_looked_at_after_all_words():
    tensors = [a_tensor() for _ in range(3)]
    words_of_grads = [grad_word(each) for each in tensors]
    flags, others = FingerprintWatch(), FingerprintWatch()
    assert all(flags.add(partial(of_tensor, each)) for each in tensors)
    flags.settle([each for each in words_of_grads if each], no_grad())
    assert others.add(partial(words.of_class, a_slotted(1)))
    several = Watches()
    several.add(flags)
    several.add(others.settle())
    several.settle()
    assert several.is_same()
    tensors[1].grad = torch.ones(2, 3)
    assert not several.is_same()
    tensors[1].grad = None
    assert several.is_same()
    flags.set_flags([False, True, False])
    assert not several.is_same()
    several = Watches()
    several.add(flags)
    several.settle()
    assert not several.is_same()
    tensors[1].grad = torch.ones(2, 3)
    assert several.is_same()


def a_tensor():
    return nn.Parameter(torch.ones(2, 3))


@torch.no_grad()
def in_place(tensor):
    tensor.t_()


TENSOR_CHANGES = {
    "dtype": lambda t: setattr(t, "data", t.data.double()),
    "sizes": lambda t: setattr(t, "data", torch.ones(3, 2)),
    "dims": lambda t: setattr(t, "data", torch.ones(2, 3, 1)),
    "no dims": lambda t: setattr(t, "data", torch.ones(())),
    "strides": lambda t: setattr(t, "data", torch.ones(3, 2).t()),
    "numbers elsewhere": lambda t: setattr(t, "data", t.data.clone()),
    "offset": lambda t: setattr(t, "data", torch.ones(9)[3:].view(2, 3)),
    "resized": lambda t: t.data.resize_(4, 5),
    "storage": lambda t: t.untyped_storage().resize_(0),
    "in place": in_place,
    "frozen": lambda t: t.requires_grad_(False),
    "class": lambda t: setattr(t, "__class__", torch.Tensor),
    "swapped": lambda t: torch.utils.swap_tensors(t, nn.Parameter(torch.zeros(2, 3))),
}
TENSOR_USES = {
    "numbers": lambda t: t.data.mul_(2),
    "backward": lambda t: (t * 2).sum().backward(),
    "gradient": lambda t: setattr(t, "grad", torch.ones(2, 3)),
    "no gradient": lambda t: setattr(t, "grad", None),
    "views": lambda t: t.detach().t(),
}


@pytest.mark.parametrize("change", TENSOR_CHANGES)
def test_a_change_of_a_tensor_is_noticed(change, way):
    tensors = [a_tensor() for _ in range(5)]
    found = watch_tensors(tensors)
    assert found is not None
    assert found.is_same()
    TENSOR_CHANGES[change](tensors[3])
    assert not found.is_same()


@pytest.mark.parametrize("use", TENSOR_USES)
def test_using_a_tensor_is_no_change(use, way):
    tensors = [a_tensor() for _ in range(5)]
    found = watch_tensors(tensors)
    assert found is not None
    for _ in range(3):
        TENSOR_USES[use](tensors[3])
        assert found.is_same()


@pytest.mark.parametrize("ndim", range(8))
def test_tensors_of_any_number_of_dims(ndim, way):
    shape = tuple(range(2, 2 + ndim))
    tensor = torch.zeros(shape[::-1]).permute(*range(ndim - 1, -1, -1)) if ndim else torch.zeros(())
    found = watch_tensors([tensor])
    assert found is not None
    assert found.is_same()
    tensor.data = torch.zeros((*shape[1:], 9)) if ndim else torch.zeros(1)
    assert not found.is_same()


@pytest.mark.skipif(words.layout() is None, reason="this Python is not known (see test_words)")
def test_the_tensors_of_this_pytorch_are_known():
    """Otherwise they are asked, which is right and slow."""
    assert of_tensor(a_tensor()) is not None
    assert of_tensor(torch.ones(())) is not None


def test_what_is_not_dense_is_not_watched(way):
    assert watch_tensors([torch.ones(2, 2).to_sparse()]) is None
    assert watch_tensors([type("Own", (torch.Tensor,), {})()]) is None


def test_without_a_compiler_only_words_in_objects_are_read(monkeypatch):
    monkeypatch.setattr(watching, "comparison", lambda: None)
    found = FingerprintWatch()
    assert not found.add(partial(words.of_list, [1]))
    assert not found.add(partial(words.of_set, {1}))
    assert found.add(partial(words.of_cell, CellType(1))) is (words.layout() is not None)


def test_no_compiler_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert first_difference(str(tmp_path / "cache")) is None


def test_parts_that_are_swept_are_these(way):
    known = [OfFunction("", a_function(1)), Slots("", a_slotted(1), slots_of(Slotted))]
    owners = [known[0].function, known[1].owner]
    added = [
        IdentityGuards().add(part, owner, 0) for part, owner in zip(known, owners, strict=True)
    ]
    assert added == [way != "asked"] * 2
    assert IdentityGuards().add(Sequenced("", [1]), [1], 0) is (way in ("compiled", "contents"))
