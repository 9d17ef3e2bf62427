"""treadle compiles whole PyTorch training steps."""

from treadle.api import Difference, Step, compile, load
from treadle.capture.optimizers.registry import ZEROS, Form, Start, register_optimizer
from treadle.options import Options
from treadle.planning import Plan, Point, plan
from treadle.shapes import Dynamic, dynamic
from treadle.util.errors import (
    CaptureError,
    LoweringError,
    PlanError,
    RuntimeFailure,
    TreadleError,
    VerifyError,
)
from treadle.util.software import VERSION

__version__ = VERSION

__all__ = [
    "ZEROS",
    "CaptureError",
    "Difference",
    "Dynamic",
    "Form",
    "LoweringError",
    "Options",
    "Plan",
    "PlanError",
    "Point",
    "RuntimeFailure",
    "Start",
    "Step",
    "TreadleError",
    "VerifyError",
    "compile",
    "dynamic",
    "load",
    "plan",
    "register_optimizer",
]
