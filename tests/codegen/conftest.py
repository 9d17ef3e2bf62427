"""Triton's interpreter in processes of their own: other tests compile for real."""

import pytest

from forks import Forks


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory):
    """Runs programs in which Triton, which looks when it is imported, interprets its kernels."""
    always = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    forks = Forks(tmp_path_factory.mktemp("interpreted"), always)
    yield forks
    forks.close()
