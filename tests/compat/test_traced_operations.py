"""A trace that makes nodes itself is the one that PyTorch's tracer makes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from treadle.compat import tracing
from treadle.compat.fake import DEVICE_OF
from treadle.compat.operators.kernel_checks import KERNEL_CHECKS
from treadle.compat.tensors import storage_of
from treadle.compat.tracing import load_tracer, trace

Function = Callable[[list[Tensor]], object]


def described(module: fx.GraphModule) -> list[str]:
    """Every node with the type of its value, and which values share memory."""
    memory: dict[int, int] = {}

    def of(value: object) -> str:
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(of, value))}]"
        if not isinstance(value, Tensor):
            return repr(value)
        place = memory.setdefault(storage_of(value), len(memory))
        size = value.untyped_storage().nbytes()
        return (
            f"{type(value).__name__} {value.dtype} {value.device} {tuple(value.shape)} "
            f"{value.stride()} {value.storage_offset()} {value.requires_grad} {value.is_conj()} "
            f"memory {place}: {size}"
        )

    return [f"{node.format_node()} | {of(node.meta.get('val'))}" for node in module.graph.nodes]


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    load_tracer()


def traced(function: Function, inputs: list[Tensor]) -> list[str]:
    return described(trace(function, inputs, KERNEL_CHECKS))


def by_pytorch(function: Function, inputs: list[Tensor]) -> list[str]:
    """As PyTorch's memo has it: before it knows them, views of tensors without elements are given
    memory of their own."""
    with patch.object(tracing, "_own_operations", lambda _: nullcontext()):
        traced(function, inputs)
        return traced(function, inputs)


@contextmanager
def counted() -> Iterator[list[object]]:
    """The operators that fake tensors are asked for."""
    asked: list[object] = []
    original = FakeTensorMode.dispatch

    def dispatch(mode: FakeTensorMode, op: object, *rest: object, **named: object) -> object:
        if op is not DEVICE_OF:
            asked.append(op)
        return original(mode, op, *rest, **named)  # pyright: ignore[reportArgumentType]

    with patch.object(FakeTensorMode, "dispatch", dispatch):
        yield asked


def blocks(model: nn.Module) -> Function:
    """Forward, backward and a step by hand, of a model with its own parameters as inputs."""
    names = [name for name, _ in model.named_parameters()]

    def step(inputs: list[Tensor]) -> list[Tensor]:
        x, *given = inputs
        weights = [each.detach().requires_grad_() for each in given]
        out = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (x,))
        grads = torch.autograd.grad((out.float() ** 2).sum(), weights)
        with torch.no_grad():
            for weight, grad in zip(given, grads, strict=True):
                weight.mul_(0.9).sub_(grad, alpha=0.1)
        return [out, *grads]

    return step


MODELS = {
    "layers": lambda: nn.Sequential(
        *[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(4)]
    ),
    "attention": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        3,
        enable_nested_tensor=False,
    ),
    "images": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        *[nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.ReLU(), nn.MaxPool1d(1)) for _ in "abc"],
    ),
    "doubles": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double(),
}


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_models(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    weights = [parameter.detach() for parameter in model.parameters()]
    shape = (3, 5, 8) if name == "attention" else (3, 8)
    inputs = [torch.randn(shape, dtype=weights[0].dtype), *weights]
    assert traced(blocks(model), inputs) == by_pytorch(blocks(model), inputs)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda x, y: x + y,
    "add a number": lambda x, y: x + 1,
    "add another number": lambda x, y: x + 1.0,
    "add in place": lambda x, y: x.add_(1),
    "multiply in place": lambda x, y: y.mul_(x.mean()),
    "view": lambda x, y: x.reshape(-1),
    "transpose": lambda x, y: x.t() if x.dim() == 2 else x.unsqueeze(0),
    "slice": lambda x, y: x[1:],
    "select": lambda x, y: x.select(0, 0) if x.dim() > 1 else x,
    "expand": lambda x, y: x.unsqueeze(0).expand(3, *x.shape).sum(0),
    "detach": lambda x, y: x.detach(),
    "cast": lambda x, y: x.to(torch.bfloat16),
    "softmax": lambda x, y: x.float().softmax(-1),
    "largest": lambda x, y: x.float().max(-1).values if x.dim() else x,
    "sort": lambda x, y: x.float().sort(-1)[0] if x.dim() else x,
    "halves": lambda x, y: x.chunk(2)[-1] if x.dim() else x,
    "joined": lambda x, y: torch.cat([x.flatten(), y.flatten().to(x.dtype)]),
    "compared": lambda x, y: torch.where(x > 0, x, 0),
    "contiguous": lambda x, y: x.contiguous(),
    "square": lambda x, y: x.flatten()[:4].outer(x.flatten()[:4]),
    "transposed in place": lambda x, y: (x + 0).t_() if x.dim() == 2 else x,
    "resized": lambda x, y: (x + 0).resize_(2, 2),
    "norm": lambda x, y: nn.functional.layer_norm(x.float(), x.shape[-1:]) if x.dim() else x,
    "made": lambda x, y: x + torch.ones(x.shape, dtype=torch.float32),
    "number made": lambda x, y: x * torch.tensor(2.0),
    "drawn": lambda x, y: x.float().bernoulli(),
}


@given(
    program=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=12),
    shape=st.sampled_from([(2, 3), (3, 2), (1, 1), (0, 3), (5,), (7, 1), (2, 3, 2)]),
    repeats=st.integers(1, 4),
    grad=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_programs(program: list[str], shape: tuple[int, ...], repeats: int, grad: bool) -> None:
    def function(inputs: list[Tensor]) -> object:
        made: list[Tensor] = []
        for _ in range(repeats):
            x = inputs[0] * 1
            y = inputs[1].clone()
            for name in program:
                found = OPERATIONS[name](x, y)
                assert isinstance(found, Tensor)
                x, y = found, x.float().reshape(-1).sum().expand(3).clone()
            made.append(x)
        if grad and made[0].requires_grad:
            made += torch.autograd.grad(made[0].float().sum(), inputs[:1], allow_unused=True)
        return [each for each in made if isinstance(each, Tensor)]

    inputs = [torch.randn(shape).requires_grad_(grad), torch.randn(3)]
    try:
        expected = by_pytorch(function, inputs)
    except Exception as error:  # no program of eager's
        with pytest.raises(type(error)):
            traced(function, inputs)
        return
    assert traced(function, inputs) == expected


def test_known_types_are_not_asked_again() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12)])
    inputs = [torch.randn(3, 8), *[parameter.detach() for parameter in model.parameters()]]
    with counted() as few:
        traced(blocks(model), inputs)
    with counted() as all_of_them:
        by_pytorch(blocks(model), inputs)
    assert len(few) * 2 < len(all_of_them)


def test_switches_between_equal_operations() -> None:
    def function(inputs: list[Tensor]) -> list[Tensor]:
        (x,) = inputs
        made: list[Tensor] = []
        for dtype in (torch.float32, torch.float64, torch.float32) * 2:
            torch.set_default_dtype(dtype)
            made.append(x / 2)
        return made

    try:
        assert traced(function, [torch.arange(3)]) == by_pytorch(function, [torch.arange(3)])
    finally:
        torch.set_default_dtype(torch.float32)


def test_written_operands_and_views_of_them() -> None:
    def function(inputs: list[Tensor]) -> list[Tensor]:
        made: list[Tensor] = []
        for x in inputs:
            y = x * 2
            row = y[0]
            row.add_(1)
            y.t_().mul_(3)
            made += [y, row, y.detach()]
        return made

    inputs = [torch.randn(3, 4) for _ in range(4)]
    assert traced(function, inputs) == by_pytorch(function, inputs)


def test_errors_are_pytorchs() -> None:
    def function(inputs: list[Tensor]) -> Tensor:
        x, y = inputs
        for _ in range(3):
            x = x + 1
        return x @ y

    with pytest.raises(RuntimeError, match=r"reduction dim|mat1 and mat2"):
        traced(function, [torch.randn(2, 3), torch.randn(2, 3)])
    with pytest.raises(RuntimeError, match="dtype"):
        traced(function, [torch.randn(2, 3), torch.randn(3, 2).double()])
