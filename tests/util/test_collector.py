"""The collector is as it was, however the block ends."""

import gc

import pytest

from treadle.util.collector import without_collector


@pytest.fixture(params=[True, False])
def enabled(request):
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_no_collections_inside_and_as_before_outside(enabled):
    with without_collector(), without_collector():
        assert not gc.isenabled()
    assert gc.isenabled() is enabled


def test_after_an_error_too(enabled):
    with pytest.raises(KeyError), without_collector():
        raise KeyError
    assert gc.isenabled() is enabled
