"""Views, joins and gathers against eager."""

import pytest
import torch
import torch.nn.functional as F

from lower.lowering_help import check
from treadle.loop.program import Call, Compute

VIEWS = [
    lambda x: x.view(6, 20), lambda x: x.reshape(-1), lambda x: x.permute(2, 0, 3, 1),
    lambda x: x.transpose(1, 2).reshape(2, 4, 15), lambda x: x[:, 1], lambda x: x[1:, ::2, 1:-1],
    lambda x: x.unsqueeze(0).squeeze(0), lambda x: x[:, :1].expand(2, 7, 4, 5),
    lambda x: x.flatten(1), lambda x: x.diagonal(0, 1, 2), lambda x: x.unfold(3, 2, 3),
    lambda x: x.as_strided((2, 3), (1, 7), 4), lambda x: x.narrow(1, 1, 2), lambda x: x.mT,
    lambda x: x[:, 1].as_strided((2, 3), (1, 7), 4), lambda x: x.detach(), lambda x: x.squeeze(),
]  # fmt: skip


def test_views_cost_nothing() -> None:
    x = torch.randn(2, 3, 4, 5)
    for view in VIEWS:
        program = check(lambda x: view(x) * 2, x)  # noqa: B023
        copies = 1 if view is VIEWS[3] else 0
        assert len(program.steps) <= copies + 1


def test_pieces() -> None:
    x = torch.randn(6, 5)
    check(
        lambda x: [
            piece + 1
            for pieces in (x.split(2), x.split([1, 3, 2]), x.chunk(4, 1), x.unbind(1))
            for piece in pieces
        ],
        x,
    )


def test_views_of_formulas_stay_formulas() -> None:
    x = torch.randn(3, 4)

    def fn(x: torch.Tensor) -> torch.Tensor:
        a = torch.arange(24).view(2, 3, 4).permute(2, 1, 0)[:, :, 1].t()
        return x + a + torch.tril(torch.ones(3, 3))[:, :1].expand(3, 4)

    program = check(fn, x)
    assert all(isinstance(step, Compute) for step in program.steps)
    assert len(program.steps) == 2


@pytest.mark.parametrize("extents", [(1, 2), (3, 0), (5, 7)])
def test_joins(extents: tuple[int, int]) -> None:
    x, y = torch.randn(3, extents[0]), torch.randn(3, extents[1])
    check(
        lambda x, y: [
            torch.cat([x, y], 1), torch.cat([x, y, x], -1), torch.stack([x, x + 1], 1),
            F.pad(x, (1, 2)), F.pad(x, (2, 0, 1, 1), value=3.0), F.pad(x, (-1, 1)),
            torch.cat([x.double(), y], 1), x.repeat(2, 3), x.flip(0, 1), x.roll(1, 0),
            x.tril(), x.triu(1), x.triu(-1),
        ],
        x, y,
    )  # fmt: skip


def test_joins_of_many_pieces() -> None:
    """As of the norms of all gradients: they are PyTorch's, and no fallbacks."""
    values = torch.randn(700)
    many = [
        check(lambda x: torch.stack(x.unbind()).square(), values),
        check(lambda x: torch.cat(x.split([1, 2, 4] * 100)).square(), values),
        check(lambda x: torch.cat([*x.split(10), x.double()[:0], x[:3].double()]), values),
    ]
    for program in many:
        (join,) = [step for step in program.steps if isinstance(step, Call)]
        assert not join.reason
        assert join.out in ("aten.cat.out", "aten.stack.out")
    few = check(lambda x: torch.cat(x.split(700 // 64 + 1)), values)
    assert all(isinstance(step, Compute) for step in few.steps)


def test_gathers() -> None:
    table = torch.randn(11, 5)
    ids = torch.randint(0, 11, (2, 3))
    signed = torch.randint(-11, 11, (3,))
    column = torch.randint(0, 5, (11, 1))

    def fn(table, ids, signed, column):
        cube = table.view(11, 1, 5).expand(11, 4, 5)
        return [
            F.embedding(ids, table), table[ids], table[signed], table[:, column[:3, 0]],
            table[signed, column[:3, 0]], cube[ids, :, column[:3, 0]],
            cube[:, column[:3, 0] % 4, signed % 5],
            table.gather(1, column), table.gather(-1, column.expand(11, 3)),
            table.index_select(0, signed % 11),
            table.scatter(1, column, 7.0), table.scatter(1, column, table[:, :1] * 2),
            table.scatter_add(1, column, table[:, :1]),
            torch.slice_scatter(table, table[:4] * 2, 0, 2, 10, 2),
            torch.select_scatter(table, table[0] * 2, 0, -1),
            torch.slice_scatter(table, table[:, :2] + 1, 1, 3),
        ]  # fmt: skip

    check(fn, table, ids, signed, column)


def test_creation() -> None:
    x = torch.randn(3)
    check(
        lambda x: [
            torch.arange(5), torch.arange(1.0, 4.0, 0.5), torch.arange(7, 1, -2), torch.eye(3),
            torch.ones(2, 0), torch.zeros(3, dtype=torch.int32), torch.linspace(0, 1, 5),
            torch.full((2,), True), x.new_zeros(2, 2), torch.scalar_tensor(3.5),
            torch.eye(2, 3) + x,
        ],
        x,
    )  # fmt: skip


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 1)])
def test_max_pool(kernel: int, stride: int, padding: int) -> None:
    x = torch.randn(2, 3, 9, 7)

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        y, places = F.max_pool2d(x, kernel, stride, padding, return_indices=True)
        (grad,) = torch.autograd.grad((y * y).sum(), x)
        return [y, places, grad]

    check(fn, x)
    check(lambda x: F.adaptive_avg_pool2d(x, (1, 1)), x)


def test_gradients_of_views_and_of_positions() -> None:
    table, x = torch.randn(9, 4), torch.randn(6, 5)

    def fn(table: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        table, x = table.detach().requires_grad_(), x.detach().requires_grad_()
        looked = F.embedding(torch.arange(7)[None], table)
        total = (looked**2).sum() + (x[1::2, 2:] ** 2).sum() + (x[:, 3] ** 3).sum()
        return list(torch.autograd.grad(total, (table, x)))

    program = check(fn, table, x)
    assert all(isinstance(step, Compute) for step in program.steps)
