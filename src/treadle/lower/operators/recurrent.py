"""cuDNN's recurrent backward, which overwrites the data that its forward saved.

::

    dx, ... = cudnn_rnn_backward(..., reserve, ..., last=False)    a copy of reserve is used up
    dx, ... = cudnn_rnn_backward(..., reserve, ..., last=True)     reserve itself, if nobody else
                                                                   reads it
"""

from torch import fx

from treadle.compat.operators.schemas import argument_types
from treadle.graph.custom_ops.recurrent import cudnn_rnn_backward
from treadle.lower import calls
from treadle.lower.context import LoweringContext
from treadle.lower.registry import Lowered, LoweredArgument, lowers

_RESERVE = [name for name, _ in argument_types(cudnn_rnn_backward)].index("reserve")


@lowers(cudnn_rnn_backward)
def backward(context: LoweringContext, *args: LoweredArgument) -> Lowered:
    """The call, told whether it is the last reader of what the forward kept."""
    reserve = context.node.args[_RESERVE]
    last = isinstance(reserve, fx.Node) and _readers(reserve) == 1
    return calls.call(context, cudnn_rnn_backward, (*args[:-1], last), {}, "")


def _readers(item: fx.Node) -> int:
    """How many nodes read this result of an operation with several."""
    source, position = item.args
    assert isinstance(source, fx.Node)
    same = (user for user in source.users if user.args[1] == position)
    return sum(len(getitem.users) for getitem in same)
