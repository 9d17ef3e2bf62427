"""Numbers that change from call to call (the factor of a moving average, a bound, a threshold)
become inputs at the second compile: no third one."""

import pytest
import torch
from torch import nn

import treadle
from contract.contract_help import training
from contract.linear_step import in_fours


class Settings:
    """What users keep such numbers in."""

    tau = 0.9


FORMS = {
    "lerp_": lambda q, p, t: q.lerp_(p, 1 - t),
    "lerp": lambda q, p, t: q.copy_(torch.lerp(q, p, t)),
    "add alpha": lambda q, p, t: q.mul_(t).add_(p, alpha=1 - t),
    "sub alpha": lambda q, p, t: q.copy_(torch.sub(q, p, alpha=t)),
    "add, both": lambda q, p, t: q.copy_(torch.add(q, t, alpha=t)),
    "addcmul": lambda q, p, t: q.addcmul_(p, p, value=t),
    "addcdiv": lambda q, p, t: q.copy_(torch.addcdiv(q, p, p.square() + 1, value=-t)),
    "clamp": lambda q, p, t: q.clamp_(-t / 4, t / 4),
    "clamp, one": lambda q, p, t: q.copy_(q.clamp(max=t / 9)),
    "clip": lambda q, p, t: q.copy_(torch.clip(q, -1, t / 3)),
    "clamp_min": lambda q, p, t: q.clamp_min_(t / 9),
    "clamp_max": lambda q, p, t: q.copy_(torch.clamp_max(q, max=t / 9)),
    "where": lambda q, p, t: q.copy_(torch.where(q > 0, q, t)),
    "where, first": lambda q, p, t: q.copy_(torch.where(q > 0, t, q)),
    "greater": lambda q, p, t: q.copy_(torch.where(q > t / 9, q, p)),
    "less": lambda q, p, t: q.copy_(torch.where(t / 9 < q, q, p)),
    "equal": lambda q, p, t: q.copy_((p * 0 + 0.91 == t) + q),
    "masked_fill": lambda q, p, t: q.masked_fill_(q > 0, t),
    "fill_": lambda q, p, t: q.fill_(t),
    "full_like": lambda q, p, t: q.copy_(torch.full_like(q, t)),
    "full": lambda q, p, t: q.copy_(torch.full(q.shape, fill_value=t, dtype=q.dtype)),
    "new_full": lambda q, p, t: q.copy_(q.new_full(q.shape, t)),
    "tensor": lambda q, p, t: q.mul_(torch.tensor(t, dtype=q.dtype)),
    "power": lambda q, p, t: q.copy_(q.abs() ** t),
    "of powers": lambda q, p, t: q.copy_(t**q),
    "remainder": lambda q, p, t: q.copy_(p % t),
    "floor": lambda q, p, t: q.copy_(p // t),
    "softmax": lambda q, p, t: q.copy_(torch.softmax(p.flatten() / t, 0).view_as(p)),
    "foreach lerp": lambda q, p, t: torch._foreach_lerp_([q], [p], 1 - t),
    "foreach mul": lambda q, p, t: torch._foreach_mul_([q], t),
    "foreach add": lambda q, p, t: torch._foreach_add_([q], [p], alpha=t),
    "foreach addcdiv": lambda q, p, t: torch._foreach_addcdiv_([q], [p], [p.square() + 1], -t),
    "foreach addcmul": lambda q, p, t: torch._foreach_addcmul_([q], [p], [p], [t]),
    "foreach": lambda q, p, t: q.copy_(torch._foreach_div([q, p], t)[0]),
}


def trained(functions, dtype, compiled):
    """``functions``: each has an average of its own."""
    torch.manual_seed(0)
    settings = Settings()
    model = nn.Linear(5, 7, bias=False).to(dtype)
    averages = nn.ModuleList(nn.Linear(5, 7, bias=False) for _ in functions).to(dtype)
    averages.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    train = training(lambda x: model(x).square().mean(), optimizer)

    def step(x):
        loss = train(x)
        with torch.no_grad():
            for function, average in zip(functions, averages, strict=True):
                function(average.weight, model.weight, settings.tau)
        return loss

    call = step
    if compiled:
        options = treadle.Options(codegen=compiled == "generated")
        call = treadle.compile(step, model=[model, averages], optimizer=optimizer, options=options)
    losses = []
    for at in range(4):
        vars(settings)["tau"] = 0.9 + at / 100  # so that no code sets the attribute
        losses.append(call(torch.randn(3, 5, dtype=dtype)))
    if compiled:
        assert len(call.recompiles) == 1, call.recompiles
    return [*losses, *model.parameters(), *averages.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", in_fours(FORMS), ids="; ".join)
def test_a_number_that_changes_is_an_input(names, dtype):
    forms = [FORMS[name] for name in names]
    expected = trained(forms, dtype, None)
    actual = trained(forms, dtype, "library")
    rounding = 2 * torch.finfo(dtype).eps  # of values around one, in four steps
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding)


def test_with_generated_code():
    forms = [FORMS[name] for name in ("lerp_", "add alpha", "clamp", "where", "full_like")]
    expected = trained(forms, torch.float32, None)
    torch.testing.assert_close(trained(forms, torch.float32, "generated"), expected)


def test_gradients_through_bounds_and_powers():
    """At ties as elsewhere."""
    weight = nn.Parameter(torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0]))
    model = nn.ParameterList([weight])

    def step(x, bound):
        weight.grad = None
        y = (weight * x).clamp(-bound, bound) + (weight + 2) ** bound
        y = y + torch.where(weight > bound, weight * 3, bound) + weight.lerp(weight * x, bound)
        y.sum().backward()
        return y.detach(), weight.grad.clone()

    compiled = treadle.compile(step, model=model, options=treadle.Options(codegen=False))
    x = torch.ones(5)
    for bound in (0.25, 0.5, 1.0, 0.75):
        torch.testing.assert_close(compiled(x, bound), step(x, bound))
    assert len(compiled.recompiles) == 1


def test_whole_numbers_stay_whole():
    model = nn.Linear(2, 2)

    def step(x, k):
        made = torch.full((3,), k), torch.tensor(k), x.clamp(max=k), torch.where(x > k, x, k)
        made += (torch.scalar_tensor(k), torch.scalar_tensor(k, dtype=torch.int32))
        return *made, x.add(x, alpha=k), x % k, torch.full_like(x, k, dtype=torch.float32), x == k

    compiled = treadle.compile(step, model=model, options=treadle.Options(codegen=False))
    x = torch.arange(10)
    for k in (2, 3, 5, 7):
        expected = step(x, k)
        actual = compiled(x, k)
        assert [each.dtype for each in actual] == [each.dtype for each in expected]
        torch.testing.assert_close(actual, expected)
    assert len(compiled.recompiles) <= 1


def test_functions_of_lists_without_a_form_leave_other_numbers_inputs():
    def step(x, at_least, factor):
        (larger,) = torch._foreach_maximum([x], at_least)
        (power,) = torch._foreach_pow(at_least, [x])
        return larger * factor + power

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=treadle.Options(codegen=False))
    x = torch.randn(4)
    for factor in (0.5, 0.6, 0.7, 0.8):
        torch.testing.assert_close(compiled(x, 0.1, factor), step(x, 0.1, factor))
    torch.testing.assert_close(compiled(x, 0.2, 0.9), step(x, 0.2, 0.9))
    torch.testing.assert_close(compiled(x, 0.2, 0.4), step(x, 0.2, 0.4))
    assert len(compiled.recompiles) <= 3


def test_large_whole_numbers_are_exact():
    """No float64 is equal to them."""

    def step(x, k):
        return x + k, torch.full((2,), k), x.clamp(max=k), x * 2 + (k - 1)

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=treadle.Options(codegen=False))
    x = torch.arange(4)
    for k in (2**60 + 1, 2**60 + 3, -(2**60) - 5, 2**53 + 1):
        assert all(map(torch.equal, compiled(x, k), step(x, k)))


def test_a_whole_number_that_becomes_a_large_one():
    """The graph has a place for it, in which it does not fit: the call is eager's."""

    def step(x, k):
        return x + k

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=treadle.Options(codegen=False))
    x = torch.arange(4)
    for k in (2, 3, 4):
        assert torch.equal(compiled(x, k), step(x, k))
    with pytest.warns(RuntimeWarning, match=r"ran eagerly: .* larger than 2\*\*53"):
        assert torch.equal(compiled(x, 2**60 + 1), step(x, 2**60 + 1))
    assert compiled._dispatcher.call.leaves == []
    assert compiled.verify([(x, 2**60 + 3), (x, 5)]) is None
    assert torch.equal(compiled(x, 6), step(x, 6))
    assert len(compiled.recompiles) == 2


def test_a_power_may_become_a_fraction():
    def step(x, k):
        return x * 2**k

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=treadle.Options(codegen=False))
    x = torch.arange(4)
    for k in (2, 3):
        assert torch.equal(compiled(x, k), step(x, k))
    with pytest.warns(RuntimeWarning, match="changed its type"):
        assert torch.equal(compiled(x, -1), step(x, -1))


def test_powers_of_whole_numbers_are_not_negative():
    def step(x, k):
        return x**k

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=treadle.Options(codegen=False))
    x = torch.arange(4) + 1
    for k in (2, 3):
        assert torch.equal(compiled(x, k), step(x, k))
    with pytest.raises(RuntimeError, match="negative integer powers"):
        compiled(x, -1)


def test_mixed_kinds_keep_their_dtype():
    """A float beside whole numbers decides the dtype: the number itself stays in the graph."""
    model = nn.Linear(2, 2)

    def step(x, t):
        return x.clamp(max=t), torch.where(x > t, x, t), x.lt(t), x + x.double().mul(t)

    compiled = treadle.compile(step, model=model, options=treadle.Options(codegen=False))
    x = torch.arange(6)
    for t in (1.5, 2.0, 2.5, 3.5):
        expected, actual = step(x, t), compiled(x, t)
        assert [each.dtype for each in actual] == [each.dtype for each in expected]
        torch.testing.assert_close(actual, expected)


def test_numbers_that_cannot_be_put_in_their_place_are_put_back():
    """Beside others that can: a view of a dict has no place of its own."""
    rates = {"first": 1.0, "second": 2.0}
    view, scale = rates.values(), {"of": 1.0}

    def step(x):
        return x * next(iter(view)) * scale["of"]

    compiled = treadle.compile(step, model=nn.Linear(2, 2), options=treadle.Options(codegen=False))
    for nth in range(1, 5):
        rates["first"], scale["of"] = nth + 0.5, nth * 2.0
        torch.testing.assert_close(compiled(torch.ones(2)), step(torch.ones(2)))
        assert {type(each) for each in (*view, *scale.values())} == {float}
