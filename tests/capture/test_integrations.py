"""The registry of libraries: each fact once, and what is asked of all of them."""

import random
from types import MappingProxyType

import numpy as np
import pytest

from treadle.capture.distributed.gradient_sync import GradientSync
from treadle.capture.integrations.grad_scaler import LossScaling
from treadle.capture.integrations.integration import Integration
from treadle.capture.integrations.registry import (
    INTEGRATIONS,
    SHARED_GENERATORS,
    all_of,
    by_name,
    library_patches,
    table_of,
)
from treadle.capture.python_state.code.frames import CodeOwner, code_owner


def test_a_library_is_registered_once():
    with pytest.raises(ValueError, match="decimal is registered twice"):
        by_name([Integration(name="decimal"), Integration(name="decimal")])


def test_the_registry_is_read_only():
    assert isinstance(INTEGRATIONS, MappingProxyType)
    with pytest.raises(TypeError):
        INTEGRATIONS["mine"] = Integration(name="mine")


def test_two_libraries_have_no_fact_of_one_name():
    with pytest.raises(ValueError, match="is registered twice"):
        table_of(lambda each: {"the same": each.name})


def test_files_that_run_beside_a_step_are_whole_paths():
    """A file of the user's that only ends like one of them is the step's."""
    files = all_of(lambda each: each.background_files | each.reporting_files)
    assert files
    assert all(each.startswith("/") for each in files)
    assert code_owner("/home/me/my_inspect.py") is CodeOwner.USER


def test_shared_generators_are_what_their_modules_draw_from():
    assert {each.module: each.generator for each in SHARED_GENERATORS} == {
        random: random.seed.__self__,
        np.random: np.random.beta.__self__,
    }


class Run:
    sync = GradientSync()
    scaling = LossScaling(lambda tensor: tensor, updates=True)


def test_no_function_is_patched_by_two_libraries():
    places = [(owner, name) for owner, name, _ in library_patches(Run())]
    assert places
    assert len(set(places)) == len(places)
    assert all(callable(vars(owner)[name]) for owner, name in places)
