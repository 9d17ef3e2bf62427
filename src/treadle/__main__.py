"""``python -m treadle``."""

import sys

from treadle.tools.cli import main

sys.exit(main())
