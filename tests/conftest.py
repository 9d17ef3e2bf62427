"""Makes ``testing`` importable however pytest was started, with readable failures."""

import sys
from pathlib import Path

import pytest

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

pytest.register_assert_rewrite("testing")  # a failing check_pass shows a diff of the text
