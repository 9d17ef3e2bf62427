"""What is said where a library is missing."""

import importlib
import sys

import pytest

import treadle


@pytest.mark.parametrize(
    ("name", "library"),
    [("accelerate", "accelerate"), ("lightning", "lightning"), ("trainer", "transformers")],
)
def test_a_missing_library_is_named(name, library, monkeypatch):
    module = f"treadle.integrations.{name}"
    for each in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, each, None)  # as if nothing were found
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=rf"TR-010\] {library} is not") as caught:
        importlib.import_module(module)
    assert isinstance(caught.value, treadle.TreadleError)
    assert caught.value.remedy == f"pip install {library}"
