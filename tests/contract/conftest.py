"""What is compiled here is kept for the run of the tests, and not in the user's cache."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
