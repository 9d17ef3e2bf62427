"""What a compiled step is to Python: its name, signature, docstring, and the frames it shows."""

import functools
import inspect
import traceback

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

HERE = __file__


class Trained:
    """A step whose function takes two tensors and a number."""

    def __init__(self, **options):
        self.model = model = nn.Linear(4, 3)
        self.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train_step(x, y, scale=1.0):
            """Train on one batch."""
            loss = F.cross_entropy(model(x), y) * scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        self.function = train_step
        self.step = treadle.compile(train_step, model=model, optimizer=optimizer, **options)


def batch(n=5):
    return torch.randn(n, 4), torch.randint(3, (n,))


def test_a_step_looks_like_its_function():
    trained = Trained()
    step, function = trained.step, trained.function
    assert step.__name__ == "train_step"
    assert step.__qualname__ == function.__qualname__
    assert step.__doc__ == "Train on one batch."
    assert step.__module__ == __name__
    assert step.__wrapped__ is function
    assert inspect.signature(step) == inspect.signature(function)


def test_a_step_of_an_object_has_the_name_of_its_class():
    class Trainer:
        def __call__(self, x):
            return x + 1

    assert treadle.compile(Trainer(), model=nn.Linear(1, 1)).__name__ == "Trainer"
    part = functools.partial(Trained().function, scale=2.0)
    assert treadle.compile(part, model=nn.Linear(1, 1)).__name__ == "partial"


def test_attributes_of_the_function_are_not_those_of_the_step():
    def step(x):
        return x + 1

    step.options = "mine"
    assert isinstance(treadle.compile(step, model=nn.Linear(1, 1)).options, treadle.Options)


def test_a_step_tells_what_it_is():
    trained = Trained()
    assert repr(trained.step) == "<treadle step train_step, not compiled yet>"
    trained.step(*batch())
    peak = trained.step.summary().peak_of_any_call_bytes
    assert repr(trained.step) == f"<treadle step train_step, 1 variant, peak {size(peak)}>"
    variant = trained.step.prepare(*batch())
    assert repr(variant) == f"<treadle variant {variant.key[:8]}, peak {size(peak)}>"


def size(nbytes):
    from treadle.util.sizes import format_bytes

    return format_bytes(nbytes)


def test_calls_by_position_and_by_name_are_one_variant():
    step = Trained().step
    x, y = batch()
    step(x, y)
    step(x=x, y=y)
    step(x, y=y)
    step(y=y, x=x, scale=1.0)
    assert step.recompiles == []
    assert repr(step).startswith("<treadle step train_step, 1 variant,")


def test_the_graph_names_arguments_by_their_parameters():
    step = Trained().step
    step(*batch())
    text = step.graph("captured")
    assert "# batch argument x" in text
    assert "# batch argument y" in text


def files_of(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_a_traceback_has_the_users_lines_alone():
    step = Trained().step
    x, y = batch()
    for wrong in ((x.double(), y), (x[:, :2], y)):
        with pytest.raises(treadle.TreadleError) as caught:
            step(*wrong)
        files = files_of(caught.value)
        assert set(files) == {HERE}
        assert len(files) == 2  # the call, and the line of the step


def test_wrong_arguments_are_eagers_error_at_the_call():
    trained = Trained()
    with pytest.raises(TypeError) as eager:
        trained.function(batch()[0])
    with pytest.raises(TypeError) as caught:
        trained.step(batch()[0])
    assert str(caught.value) == str(eager.value)
    assert files_of(caught.value) == [HERE]


def test_debug_shows_all_frames(capsys):
    step = Trained(options=treadle.Options(debug=1)).step
    x, y = batch()
    with pytest.raises(treadle.TreadleError) as caught:
        step(x.double(), y)
    capsys.readouterr()
    assert any("serve.py" in file for file in files_of(caught.value))


@pytest.mark.parametrize("raised", [treadle.VerifyError("broken"), ValueError("no code")])
def test_bugs_keep_their_frames(monkeypatch, raised):
    def fails(*_args):
        raise raised

    step = Trained().step
    step(*batch())
    monkeypatch.setattr(type(step._dispatcher), "variant", fails_in_treadle(fails))
    with pytest.raises(type(raised)) as caught:
        step(*batch())
    assert any("serve.py" in file for file in files_of(caught.value))


def fails_in_treadle(fails):
    """A function whose frame is one of treadle's."""
    from treadle.util.package import PACKAGE

    names = {"fails": fails}
    text = (
        "def variant(*args, **kwargs):\n    try:\n        fails()\n    except Exception as error:\n"
    )
    text += "        raise error.with_traceback(None)\n"
    exec(compile(text, str(PACKAGE / "session" / "made.py"), "exec"), names)
    return names["variant"]


def returning(loss_of, **options):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x, y):
        return loss_of(F.cross_entropy(model(x), y))

    return treadle.compile(train_step, model=model, optimizer=optimizer, **options)


def both(loss):
    loss.backward()
    return loss


@pytest.mark.parametrize("loss_of", [both, lambda loss: loss], ids=["after its own", "alone"])
def test_a_returned_loss_says_why_backward_outside_cannot_work(loss_of):
    step = returning(loss_of)
    for _ in range(2):
        loss = step(*batch())
        assert loss.requires_grad
        with pytest.raises(RuntimeError, match=r"TR-409.*outside the compiled step") as caught:
            (2 * loss).backward()
        assert isinstance(caught.value, treadle.TreadleError)
        assert "inside the function" in caught.value.remedy
    assert isinstance(loss.item(), float)
    assert not loss.detach().requires_grad


def test_a_detached_loss_and_values_without_gradients_are_as_they_are():
    assert not returning(lambda loss: loss.detach())(*batch()).requires_grad
    with torch.no_grad():
        assert not returning(lambda loss: loss)(*batch()).requires_grad


def test_a_returned_loss_may_be_an_argument_of_the_next_call():
    step = returning(both)
    model = nn.Linear(1, 1)
    add = treadle.compile(lambda total, loss: total + loss.detach(), model=model)
    total = torch.zeros(())
    for _ in range(3):
        total = add(total, step(*batch()))
    assert add.recompiles == []
    assert not total.requires_grad


def test_the_next_process_knows_it_too(tmp_path):
    options = treadle.Options(cache_dir=tmp_path)
    returning(both, options=options)(*batch())
    step = returning(both, options=options)
    loss = step(*batch())
    assert step.compiled.untraced
    with pytest.raises(RuntimeError, match="TR-409"):
        loss.backward()
