"""Saved files are whole or refused."""

import os

import pytest

from treadle.runtime.store.bundle import Bundle, read_bundle, write_bundle
from treadle.util.errors import RuntimeFailure


def bundle():
    return Bundle({"name": "ü", "n": [1, None, 2.5]}, {"a": b"", "b": os.urandom(1031), "c": b"\n"})


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "step"
    written = bundle()
    write_bundle(path, written)
    found = read_bundle(path)
    assert found == written
    assert list(found.entries) == list(written.entries)
    assert [each.name for each in tmp_path.iterdir()] == ["step"]


def test_an_empty_bundle_is_one(tmp_path):
    write_bundle(tmp_path / "step", Bundle({}, {}))
    assert read_bundle(tmp_path / "step") == Bundle({}, {})


def test_every_damage_is_seen(tmp_path):
    path = tmp_path / "step"
    write_bundle(path, bundle())
    data = path.read_bytes()
    damaged = [data[:n] for n in range(0, len(data), 97)] + [data[:-1], data + b"x"]
    for place in [*range(0, len(data), 61), 14, 15, 16, 80, 81, 82, len(data) - 1]:
        damaged.append(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    for each in damaged:
        path.write_bytes(each)
        with pytest.raises(RuntimeFailure, match="TR-405"):
            read_bundle(path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "step"
    write_bundle(path, Bundle({"old": True}, {}))
    with pytest.raises(TypeError):
        write_bundle(path, Bundle({"new": object()}, {}))
    with pytest.raises(TypeError):
        write_bundle(path, Bundle({}, {"a": memoryview(b"x").cast("B"), "b": None}))
    assert read_bundle(path).manifest == {"old": True}
    assert [each.name for each in tmp_path.iterdir()] == ["step"]


@pytest.mark.parametrize("place", ["nowhere/step", "."])
def test_a_place_that_cannot_be_written_or_read(tmp_path, place):
    with pytest.raises(RuntimeFailure, match="TR-405"):
        write_bundle(tmp_path / place, bundle())
    with pytest.raises(RuntimeFailure, match="TR-405"):
        read_bundle(tmp_path / place)
