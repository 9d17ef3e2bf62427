"""Where treadle's own code is."""

from pathlib import Path

PACKAGE = Path(__file__).parent.parent
