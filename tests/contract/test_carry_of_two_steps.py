"""Updates that one step has pending while another step compiles, runs or shares its model."""

import pytest
import torch
from torch import nn

import treadle
from counted import batch, stack
from treadle.util.errors import RuntimeFailure

pytestmark = pytest.mark.filterwarnings("ignore:.*run as PyTorch kernels:RuntimeWarning")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


class Training:
    """A model, its optimizer, and the step on both: compiled with updates carried, or eager."""

    def __init__(self, model, *, compiled, carry=True, lr=0.01):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)

        def step(x, y):
            loss = (self.model(x) - y).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

        options = treadle.Options(
            carry=treadle.Carry() if carry else (), codegen=False, numerics="eager"
        )
        self.step = (
            treadle.compile(step, model=model, optimizer=self.optimizer, options=options)
            if compiled
            else step
        )


def two(*, compiled, shared=False, carry=(True, True)):
    first = stack()
    second = first if shared else stack(3)
    return [
        Training(model, compiled=compiled, carry=carries, lr=lr)
        for model, carries, lr in zip((first, second), carry, (0.01, 0.02), strict=True)
    ]


ORDERS = [(0, 1, 0, 1, 1, 0), (0, 0, 1, 1, 0), (1, 0, 1, 1, 0, 0), (1, 1, 0)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("carry", [(True, True), (True, False)])
def test_any_order_gives_what_eager_gives(shared, carry):
    for order in ORDERS:
        ours, eager = (
            two(compiled=True, shared=shared, carry=carry),
            two(compiled=False, shared=shared),
        )
        for which in order:
            given = batch()
            torch.testing.assert_close(ours[which].step(*given), eager[which].step(*given))
        for mine, other in zip(ours, eager, strict=True):
            for p, q in zip(mine.model.parameters(), other.model.parameters(), strict=True):
                torch.testing.assert_close(p, q)


def overtaken():
    """A step whose parameter was written to through memory from before, and its values now."""
    each = Training(stack(), compiled=True)
    held = each.model[0].weight.data
    for _ in range(2):
        each.step(*batch())
    held.mul_(0.9)
    return each


def check_overtaken(each):
    """The error is that of the step itself, and of who uses its model."""
    for using in (lambda: each.step(*batch()), lambda: each.model(batch()[0])):
        with pytest.raises(RuntimeFailure, match="TR-542"):
            using()
    each.step.flush()
    each.step(*batch())


def eagerly(training):
    """A call that runs eagerly, since the condition holds that its variant expects not to hold."""

    def step(x):
        if not torch.isfinite(x).all():
            raise ValueError("the batch is not finite")
        return training.model(x).detach()

    compiled = treadle.compile(step, model=training.model, options=treadle.Options(codegen=False))
    x = batch()[0]
    compiled(x)
    with pytest.raises(ValueError, match="not finite"):
        compiled(x / 0)


OTHERS = {
    "compile": lambda other: other.step(*batch()),
    "prepare": lambda other: other.step.prepare(*batch()),
    "verify": lambda other: other.step.verify([batch()]),
    "find_nan": lambda other: other.step.find_nan(*batch()),
    "eagerly": eagerly,
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("carry", [False, True])
def test_a_write_into_one_model_is_no_error_of_a_step_of_another(name, carry):
    one, other = overtaken(), Training(stack(3), compiled=True, carry=carry)
    OTHERS[name](other)
    other.step(*batch())
    other.step(*batch())
    other.step(batch()[0][:3], batch()[1][:3])  # another variant
    check_overtaken(one)


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_step_on_the_same_model_meets_the_error(compiled_before):
    """Its call would come between the write and the update."""
    one = overtaken()
    one.step.flush()
    other = treadle.compile(
        lambda x: one.model(x).detach(), model=one.model, options=treadle.Options(codegen=False)
    )
    x = batch()[0]
    if compiled_before:
        other(x)
    held = one.model[0].weight.data
    one.step(*batch())
    held.mul_(0.9)
    with pytest.raises(RuntimeFailure, match="TR-542"):
        other(x)
    one.step.flush()
    torch.testing.assert_close(other(x), one.model(x))


def test_a_step_that_reads_another_model_by_value_meets_the_error():
    one = overtaken()
    step = treadle.compile(lambda x: x * one.model[0].weight.sum().item(), model=nn.Linear(1, 1))
    with pytest.raises(RuntimeFailure, match="TR-542"):
        step(torch.ones(2))
    one.step.flush()
    torch.testing.assert_close(step(torch.ones(2)), one.model[0].weight.sum().detach().expand(2))


def test_prepare_while_another_step_pends_makes_the_variant_that_calls_run():
    """The hooks of what is pending are no part of the step."""
    one, other = (Training(model, compiled=True) for model in (stack(), stack(3)))
    one.step(*batch())
    prepared = other.step.prepare(*batch())
    one.step(*batch())
    other.step(*batch())
    assert other.step.compiled is prepared
    assert not other.step.recompiles
    assert not other.step.recaptures
    one.step(*batch())
    assert one.step.prepare(*batch()) is one.step.compiled
