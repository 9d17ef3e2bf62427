"""``treadle::expect``: a condition that capture assumed, checked when the step runs.

::

    expect(holds) -> ()        ``NotExpected`` unless the 0-dim ``holds`` is true

Everything that a step writes is written after it, so a call that meets ``NotExpected`` has changed
nothing but the state of random generators.
"""

from treadle.compat.operators.custom_op import CustomOp
from treadle.util.expected import require_expected

EXPECT = CustomOp("expect(Tensor holds) -> ()", fake=lambda: None, kernel=require_expected)
expect = EXPECT.op
