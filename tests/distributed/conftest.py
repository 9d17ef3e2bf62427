"""Tests on several ranks, forked from one process that has imported PyTorch."""

import pytest
import torch.distributed as dist

from distributed.ranks import Launcher


def pytest_ignore_collect(collection_path):
    return None if dist.is_available() and dist.is_gloo_available() else True


@pytest.fixture(scope="session")
def compiled_before(tmp_path_factory):
    """The cache of all launches."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def launch(forks, tmp_path, compiled_before):
    """Runs a function on several ranks."""
    return Launcher(forks, tmp_path, compiled_before)
