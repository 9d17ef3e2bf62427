import pytest
import torch

from testing import node_of, trace
from treadle.graph.analysis.alias import analyse
from treadle.graph.core.types import TensorType, show_type, type_of, type_of_tensor

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.empty(4, 8), "f32[4, 8]"),
        (torch.empty((), dtype=torch.bfloat16), "bf16[]"),
        (torch.empty(0, 3, dtype=torch.int64), "i64[0, 3]"),
        (torch.empty(2, dtype=torch.bool), "b1[2]"),
        ((torch.empty(2), torch.empty(3)), "(f32[2], f32[3])"),
        (None, "NoneType"),
    ],
)
def test_types_read_as_dtype_and_shape(value, text):
    assert show_type(value) == text


def test_strides_are_part_of_a_type():
    x = torch.empty(3, 3)
    assert type_of_tensor(x) != type_of_tensor(x.t())
    assert type_of_tensor(x) == TensorType(torch.float32, (3, 3), (3, 1), torch.device("cpu"))
    assert type_of_tensor(x).nbytes == 36


@pytest.mark.parametrize(
    ("value", "contiguous"),
    [
        (torch.empty(3, 5), True),
        (torch.empty(3, 5).t(), False),
        (torch.empty(3, 1).t(), True),
        (torch.empty(5).expand(3, 5), False),
        (torch.empty(0, 5).t(), True),
        (torch.empty(()), True),
    ],
)
def test_contiguity_agrees_with_pytorch(value, contiguous):
    assert value.is_contiguous() == contiguous
    assert type_of_tensor(value).is_contiguous == contiguous


def test_a_node_with_two_results_has_no_single_type():
    step = trace(lambda x: torch.var_mean(x, dim=0), torch.randn(3, 4))
    with pytest.raises(TypeError, match="is not one tensor"):
        type_of(node_of(step, aten.var_mean.correction))


def test_views_share_and_copies_do_not():
    def program(x):
        view = x.view(-1)
        parts = view.split(4)
        return parts[0] + 1, view.clone(), x.t()

    step = trace(program, torch.randn(2, 4))
    aliases = analyse(step)
    (x,) = step.placeholders
    view, clone = node_of(step, aten.view.default), node_of(step, aten.clone.default)
    split = node_of(step, aten.split.Tensor)
    assert aliases.share(x, view)
    assert aliases.share(x, split)
    assert not aliases.share(x, clone)
    assert aliases.base(view) is x
    assert aliases.base(x) is x
    assert aliases.base(clone) is None
    assert aliases.base(split) is x
    assert not aliases.of[view].isdisjoint(aliases.returned)  # through x.t()
    assert set(next(iter(aliases.groups()))) == {
        node for node in aliases.of if aliases.share(x, node)
    }
