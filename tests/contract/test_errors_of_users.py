"""No error reaches a user without a code, their line and what to do; PyTorch's keep their text."""

import copy
import traceback

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import treadle
from contract.contract_help import said
from treadle.options import Options

LIBRARY = Options(codegen=False)
W = torch.randn(7, 4)

OPERATIONS = {
    "matmul": lambda h, b: h @ b,
    "add": lambda h, b: h + b,
    "power": lambda h, b: b**h,
    "linear": lambda h, b: F.linear(h, b),
    "cross_entropy": lambda h, b: F.cross_entropy(h, b),
    "nll_loss": lambda h, b: F.nll_loss(h, b),
    "binary_cross_entropy": lambda h, b: F.binary_cross_entropy_with_logits(h, b),
    "mse": lambda h, b: F.l1_loss(h, b),
    "cat": lambda h, b: torch.cat([h, b], 1),
    "stack": lambda h, b: torch.stack([h, b]),
    "view": lambda h, b: h.view(3, 7),
    "index": lambda h, b: h[b],
    "column": lambda h, b: h[:, 9],
    "gather": lambda h, b: h.gather(1, b),
    "index_add": lambda h, b: h.index_add(0, b, h),
    "embedding": lambda h, b: F.embedding(b, W) * h.sum(),
    "layer_norm": lambda h, b: F.layer_norm(h, (9,)),
    "conv": lambda h, b: F.conv1d(h[None], b),
    "einsum": lambda h, b: torch.einsum("ij,jk->ik", h, b),
    "where": lambda h, b: torch.where(b, h, 0.0),
    "dim": lambda h, b: h.sum(5),
    "softmax": lambda h, b: h.softmax(-7),
    "to": lambda h, b: h.to(b),
    "expand": lambda h, b: h.expand_as(b),
    "write": lambda h, b: h.clone().copy_(b),
    "attention": lambda h, b: F.scaled_dot_product_attention(h, b, b),
    "attribute": lambda h, b: h * b.weight,
    "call": lambda h, b: b(h),
    "key": lambda h, b: {"x": h}["y"],
    "divide": lambda h, b: h * (1 // 0),
    "dropout": lambda h, b: F.dropout(h, 3.0),
    "pool": lambda h, b: F.max_pool2d(h, 9),
    "cholesky": lambda h, b: torch.linalg.cholesky(b).sum() * h,
    "backward_of_many": lambda h, b: h.backward(),
    "backward_twice": lambda h, b: (h.sum().backward(), h.sum().backward())[0],
    "gradient": lambda h, b: torch.autograd.grad(h.sum(), b)[0],
}

TENSORS = st.builds(
    lambda shape, dtype: (torch.rand(shape) * 3).to(dtype),
    st.lists(st.sampled_from([0, 1, 3, 5, 6]), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.cfloat]),
)
WRONG = st.one_of(TENSORS, st.sampled_from([None, "text", 3, [1, 2], nn.Linear(2, 2)]))


def made(operation):
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, b):
        loss = operation(model(x), b).float().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def fails(function, *args):
    try:
        function(*args)
    except Exception as error:
        return error
    return None


@settings(
    max_examples=70, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(st.sampled_from(sorted(OPERATIONS)), WRONG)
def test_whatever_is_wrong_has_a_code_a_line_and_a_remedy(name, wrong):
    torch.manual_seed(0)
    model, optimizer, step = made(OPERATIONS[name])
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(3, 4)
    eager = fails(copy.deepcopy(made(OPERATIONS[name])[2]), x, copy.deepcopy(wrong))
    error = fails(
        treadle.compile(step, model=model, optimizer=optimizer, options=LIBRARY), x, wrong
    )
    if error is None:
        assert eager is None, f"eager refuses: {eager}"
        return
    code, where, remedy = said(error)
    assert code.startswith("TR-"), repr(error)
    assert code not in ("TR-000", "TR-199", "TR-900"), error
    assert "test_errors_of_users.py" in where, error
    assert remedy, error
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert all(p.grad is None for p in model.parameters())


def test_errors_of_pytorch_keep_their_kind_and_text_and_show_the_users_frames_alone():
    model, optimizer, step = made(OPERATIONS["column"])
    compiled = treadle.compile(step, model=model, optimizer=optimizer)
    with pytest.raises(IndexError, match=r"out of bounds|out of range") as caught:
        compiled(torch.randn(3, 4), None)
    assert isinstance(caught.value, treadle.CaptureError)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert set(files) == {__file__}


def test_an_error_of_the_users_own_is_itself():
    class Mine(ValueError):
        pass

    def refuse(h, b):
        raise Mine("no")

    model, optimizer, step = made(refuse)
    with pytest.raises(Mine, match=r"^no") as caught:
        treadle.compile(step, model=model, optimizer=optimizer)(torch.randn(3, 4), None)
    assert "TR-138" in caught.value.__notes__[0]


def test_an_optimizer_that_was_not_given_is_missed():
    model, _, step = made(lambda h, b: h)
    with pytest.raises(treadle.CaptureError, match=r"TR-134.*SGD") as caught:
        treadle.compile(step, model=model)(torch.randn(3, 4), None)
    assert "optimizer.step()" in caught.value.where
    assert "optimizer=" in caught.value.remedy
    torch.optim.SGD(model.parameters()).step()  # others step as ever


def batch():
    return torch.randn(3, 4), torch.randn(5)


@pytest.mark.parametrize(("args", "named"), [(1, {}), (2, {"z": 1}), (3, {})])
def test_arguments_that_the_step_does_not_take_are_pythons_own_error(args, named):
    model, optimizer, step = made(lambda h, b: h * b)
    given = [*batch(), None][:args]
    eager = fails(lambda: step(*given, **named))
    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=LIBRARY)
    for _ in range(2):
        error = fails(lambda: compiled(*given, **named))
        assert (type(error), str(error)) == (TypeError, str(eager))
        compiled(*batch())


@pytest.mark.parametrize("wrap", [
    lambda model: torch.compile(model), lambda model: (model.compile(), model)[1],
    lambda model: (model[0].compile(), model)[1],
], ids=["function", "method", "layer"])  # fmt: skip
def test_what_torch_compile_wraps_is_captured_as_it_was_written(wrap):
    models = [nn.Sequential(nn.Linear(4, 6), nn.Tanh()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def step_of(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @torch.compile
        def loss_of(x, y):
            return F.mse_loss(model(x), y)

        def step(x, y):
            loss = (loss_of if wrapped is model else F.mse_loss)(*parts(model, x, y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, optimizer

    def parts(model, x, y):
        return (x, y) if wrapped is model else (model(x), y)

    wrapped = wrap(models[0])
    step, optimizer = step_of(wrapped)
    compiled = treadle.compile(step, model=wrapped, optimizer=optimizer, options=LIBRARY)
    twin, _ = step_of(models[1])
    for _ in range(3):
        x, y = torch.randn(5, 4), torch.randn(5, 6)
        torch.testing.assert_close(compiled(x, y), twin(x, y))
    for mine, theirs in zip(wrapped.parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert compiled.recompiles == []


def test_a_step_is_compiled_once():
    model, optimizer, step = made(lambda h, b: h * b)
    given = {"model": model, "optimizer": optimizer, "options": LIBRARY}
    compiled = treadle.compile(step, **given)
    with pytest.raises(treadle.CaptureError, match=r"TR-135.*compiled already"):
        treadle.compile(compiled, **given)
    for _ in range(2):
        with pytest.raises(treadle.CaptureError, match=r"TR-135.*another one") as caught:
            treadle.compile(lambda x, b: compiled(x, b), **given)(*batch())
        assert "compiled(x, b)" in caught.value.where
        compiled(*batch())


def test_a_batch_without_values_is_said_to_be_one():
    model, optimizer, step = made(lambda h, b: h * b)
    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=LIBRARY)
    x, b = batch()
    with pytest.raises(RuntimeError, match=r"TR-111.* argument .*\[3, 4\] on meta") as caught:
        compiled(x.to("meta"), b)
    assert "test_errors_of_users.py" in caught.value.where


def test_a_kernel_that_refuses_after_a_write_raises_eagers_kind_of_error():
    """The norm's buffers were written before it; they are put back."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def step(x):
        (model(x) @ torch.zeros(3, 2).double()).sum().backward()

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="same dtype") as eagers:
        step(torch.randn(6, 4))
    model.load_state_dict(before)
    compiled = treadle.compile(step, model=model)
    with pytest.raises(RuntimeError, match="same dtype") as ours:
        compiled(torch.randn(6, 4))
    assert str(eagers.value).splitlines()[0] in str(ours.value)
    assert "double()).sum()" in str(ours.value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_dtypes_that_a_kernel_refuses_are_eagers_error():
    x = torch.randn(1, 3, 4)
    for operation in (
        lambda h, b: F.conv1d(h[None], b),
        lambda h, b: h @ b[:, :, 0],
        lambda h, b: torch.cdist(h, b[0]),
    ):
        model, optimizer, step = made(operation)
        wrong = torch.randn(5, 3, 5).double()
        eager = fails(lambda step=step, wrong=wrong: step(x[0], wrong))
        compiled = treadle.compile(step, model=model, optimizer=optimizer)
        error = fails(lambda compiled=compiled, wrong=wrong: compiled(x[0], wrong))
        assert isinstance(error, type(eager))
        assert str(eager) in str(error)


ANOMALY = torch.autograd.detect_anomaly


def test_anomaly_detection_is_refused_and_never_ignored():
    model, optimizer, step = made(lambda h, b: h * b)
    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=LIBRARY)
    for _ in range(2):
        with pytest.raises(treadle.CaptureError, match="TR-128") as caught, ANOMALY():
            compiled(*batch())
        assert "loss.backward()" in caught.value.where
        compiled(*batch())
    with ANOMALY(check_nan=False):
        compiled(*batch())


def test_anomaly_detection_that_a_refused_step_has_set_is_off_again():
    def wrong(h, b):
        torch.autograd.set_detect_anomaly(True)
        return h * b

    model, optimizer, step = made(wrong)
    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=LIBRARY)
    with pytest.raises(treadle.CaptureError, match="TR-128"):
        compiled(*batch())
    assert not torch.is_anomaly_enabled()


ROWS = [torch.randn(2, 4), torch.randn(3, 4)]


def test_nested_tensors_are_said_to_be_ones():
    make = torch.nested.nested_tensor
    model, optimizer, step = made(lambda h, b: h.values() if h.is_nested else make(list(h)))
    for x in (make(ROWS, layout=torch.jagged), make(ROWS), ROWS[0]):
        compiled = treadle.compile(step, model=model, optimizer=optimizer, options=LIBRARY)
        with pytest.raises(treadle.CaptureError, match=r"TR-127.*nested tensor") as caught:
            compiled(x, None)
        assert "test_errors_of_users.py" in caught.value.where
        assert "pad_sequence" in caught.value.remedy


class Later:
    async def step(self, x):
        return x

    def parts(self, x):
        yield x


MODULE = nn.Linear(2, 2)
GIVEN = {"model": MODULE}
WHOLE = "pass the function of the whole step"


@pytest.mark.parametrize(("function", "given", "message", "remedy"), [
    (MODULE, {}, "received a module", "treadle.compile(step, model=model, optimizer=optimizer)"),
    (5, GIVEN, "received an int, not", WHOLE),
    ("8GiB", GIVEN, "received a str, not", WHOLE),
    (torch.ones(3), GIVEN, "received a Tensor, not", WHOLE),
    (torch.optim.SGD(MODULE.parameters()), GIVEN, "received a SGD, not", "optimizer=optimizer"),
    (treadle.Options(), GIVEN, "received an Options, not", "by name"),
    (nn.Linear, GIVEN, "received the class Linear, not", WHOLE),
    (Later().step, GIVEN, "step is a coroutine function", "plain function"),
    (Later().parts, GIVEN, "parts is a generator function", "plain function"),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_is_no_step_is_refused(function, given, message, remedy):
    with pytest.raises(treadle.CaptureError, match=r"TR-135") as caught:
        treadle.compile(function, **given)
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    assert len(caught.value.message) < 100, "the object is named, not printed"


@pytest.mark.parametrize(("args", "kwargs", "got"), [
    ((torch.ones(2, 2),), {}, "a Tensor"),
    ((torch.ones(2, 2), torch.ones(2)), {}, "a Tensor, a Tensor"),
    ((), {"x": torch.ones(2, 2)}, "x=a Tensor"),
    ((), {}, "nothing"),
])  # fmt: skip
def test_a_decorator_that_is_called_as_a_step_is_said_to_be_one(args, kwargs, got):
    step = treadle.compile(model=MODULE)
    with pytest.raises(treadle.CaptureError, match=r"TR-135.*returned a decorator") as caught:
        step(*args, **kwargs)
    assert f"received {got}" in caught.value.message
    assert "treadle.compile(function, model=model" in caught.value.remedy


def test_a_decorator_refuses_its_options_where_it_is_made():
    with pytest.raises(treadle.TreadleError, match="TR-201"):
        treadle.compile(model=MODULE, memory="60%")
    with pytest.raises(treadle.CaptureError, match=r"TR-135.*received a module"):
        treadle.compile(memory="8GiB")(MODULE)


@pytest.mark.parametrize("given", [{}, {"model": []}], ids=["none", "empty"])
def test_a_step_that_trains_nothing_is_refused(given):
    with pytest.raises(
        treadle.CaptureError, match=r"TR-108.* no model= \(or it is empty\)"
    ) as caught:
        treadle.compile(lambda x: x.sum(), **given)
    assert "model=model" in caught.value.remedy


@torch.library.custom_op("errors_of_users::typeless", mutates_args=())
def typeless(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_an_operation_without_a_fake_is_refused_with_the_way_to_give_it_one():
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    typeless(model(x))  # eager needs none
    with pytest.raises(treadle.CaptureError, match="TR-133") as caught:
        treadle.compile(lambda x: typeless(model(x)).sum(), model=model)(x)
    assert "torch.library.register_fake" in caught.value.remedy
    assert "without treadle" not in caught.value.remedy
    assert "typeless" in caught.value.where


def test_a_step_without_a_model_is_refused():
    with pytest.raises(treadle.CaptureError, match=r"TR-108.*model="):
        treadle.compile(lambda x: x)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda model: {"model": list(model.parameters())}, "model=.* not a list of Parameter"),
        (lambda model: {"model": model.parameters()}, "model=.* not a generator"),
        (lambda model: {"model": model, "optimizer": {"a": 3}}, "optimizer=.* not a dict of int"),
    ],
)
def test_what_is_neither_a_model_nor_an_optimizer_is_named_by_its_kind(given, words):
    with pytest.raises(treadle.CaptureError, match=words) as caught:
        treadle.compile(lambda x: x, **given(nn.Linear(2, 2)))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("result", [
    lambda x: (each for each in [x]), lambda x: iter([x]), lambda x: {"a": map(abs, [x])},
], ids=["generator", "iterator", "map"])  # fmt: skip
def test_results_that_run_later_are_refused(result):
    model = nn.Linear(2, 2)
    with pytest.raises(treadle.CaptureError, match=r"TR-136"):
        treadle.compile(lambda x: result(model(x)), model=model)(torch.ones(1, 2))


@pytest.mark.parametrize("memory", [
    [], {}, True, -1, 0, "12 bananas", "", "GiB", float("nan"), 1.5, -0.1, b"1GiB", object(),
    torch.tensor(3),
], ids=lambda value: "object" if type(value) is object else repr(value))  # fmt: skip
def test_budgets_that_are_none(memory):
    with pytest.raises(treadle.PlanError, match=r"TR-201") as caught:
        treadle.compile(lambda x: x, model=nn.Linear(2, 2), memory=memory)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "options", [{"strict": "yes"}, {"numerics": 3}, {"rng": None, "strict": 1}]
)
def test_options_that_are_none(options):
    with pytest.raises(treadle.TreadleError, match=r"TR-001") as caught:
        treadle.compile(lambda x: x, model=nn.Linear(2, 2), **options)
    assert caught.value.remedy
