"""What is compiled here is kept for the run of the tests, and not in the user's cache."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """One that no other test has written to: for tests of what is compiled, and when."""
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path / "cache"))
