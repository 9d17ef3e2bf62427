"""What a failing call leaves: everything as it was, or the whole step done."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
import treadle.backend
from contract.contract_help import training
from treadle.util.errors import InternalError


class Words(nn.Module):
    """Tokens, positions and a gather: three ways in which a batch chooses places."""

    def __init__(self, words: int = 23, longest: int = 9) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, 6), nn.Embedding(longest, 6)
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, words)

    def forward(self, tokens, chosen):
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.places(at)
        x = self.norm(x.flatten(0, 1)).view(x.shape)
        x = F.dropout(x, 0.1, self.training)
        return self.out(x[torch.arange(len(tokens))[:, None], chosen])


def make_step(model, optimizer):
    def step(tokens, chosen, labels):
        logits = model(tokens, chosen)
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def made(**options):
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    function = make_step(model, optimizer)
    return model, optimizer, treadle.compile(
        function, model=model, optimizer=optimizer, **options
    )  # fmt: skip


def batch(rows: int = 4, length: int = 7):
    tokens = torch.randint(23, (rows, length))
    chosen = torch.randint(-length, length, (rows, 3))
    labels = torch.randint(23, (rows, 4))
    labels[0, 2] = -100
    return tokens, chosen, labels


def everything(model, optimizer):
    tensors = [*model.state_dict().values()]
    tensors += [v for state in optimizer.state.values() for v in state.values()]
    return [t.clone() for t in tensors] + [torch.get_rng_state()]


def assert_unchanged(before, model, optimizer):
    after = everything(model, optimizer)
    assert len(after) == len(before)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in model.parameters())


BAD = [
    (0, (1, 2), 23),
    (0, (3, 6), -1),
    (0, (0, 0), 2**40),
    (1, (0, 1), 7),
    (1, (2, 2), -8),
    (2, (1, 1), 23),
    (2, (3, 3), -1),
]


@pytest.mark.parametrize("calls", [0, 3])
def test_a_number_that_points_outside_changes_nothing(calls):
    model, optimizer, step = made()
    for _ in range(calls):
        step(*batch())
    before = everything(model, optimizer)
    for which, place, value in BAD:
        given = batch()
        given[which][place] = value
        before[-1] = torch.get_rng_state()
        with pytest.raises(IndexError, match="TR-407") as caught:
            step(*given)
        assert isinstance(caught.value, treadle.TreadleError)
        assert f"argument {('tokens', 'chosen', 'labels')[which]}" in str(caught.value)
        assert "test_failures.py" in caught.value.where
        assert str(value) in caught.value.message
        assert_unchanged(before, model, optimizer)
    assert step(*batch()).isfinite()


def test_what_eager_takes_is_taken():
    """Ignored labels, a label outside what the step reads, negative places, no rows at all."""
    model, _, step = made()
    twin = copy.deepcopy(model)
    eager = make_step(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2))
    for seed in range(3):
        given = batch()
        given[2][:, 0] = 10**6  # cut off by the step
        given[2][:2, 1:] = -100
        torch.manual_seed(seed)
        ours = step(*given)
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, eager(*given))


def test_positions_beyond_the_table_are_refused():
    """A range that only the shapes decide: eager refuses it at every call, and so does a step."""
    model, optimizer, step = made()
    step(*batch(length=9))
    before = everything(model, optimizer)
    for _ in range(2):
        given = batch(length=10)
        before[-1] = torch.get_rng_state()
        with pytest.raises(IndexError, match="accepts 0 to 8"):
            step(*given)
        assert_unchanged(before, model, optimizer)
    assert step(*batch(length=9)).isfinite()


def test_dynamic_sizes_are_checked_with_their_own():
    shapes = treadle.dynamic(
        {
            "tokens": ("rows", "length"),
            "chosen": ("rows", None),
            "labels": ("rows", None),
        },
        rows=(2, 8),
        length=(2, 9),
    )
    _, _, step = made(shapes=shapes)
    for rows, length in ((4, 7), (3, 5), (8, 9)):
        assert step(*batch(rows, length)).isfinite()
        given = batch(rows, length)
        given[1][1, 1] = length
        with pytest.raises(IndexError, match=f"accepts -{length} to {length - 1}"):
            step(*given)


def test_large_labels_are_looked_at_in_parts():
    """Most ignored, one wrong, in a place that any part may hold."""
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = treadle.compile(train, model=model, optimizer=optimizer)
    x = torch.randn(40_001, 3)
    for place in (0, 16_384, 40_000):
        y = torch.full((40_001,), -100)
        y[::7] = 3
        assert step(x, y).isfinite()
        y[place] = 5
        with pytest.raises(IndexError, match="TR-407"):
            step(x, y)


def test_the_backend_checks_as_well():
    model = nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 2))
    compiled = torch.compile(model, backend=treadle.backend.treadle)
    tokens = torch.randint(11, (3, 5))
    compiled(tokens).sum().backward()
    tokens[1, 1] = 11
    with pytest.raises(IndexError, match="TR-407"):
        compiled(tokens)


STAGES = {
    "capture": "treadle.capture.step",
    "cleaning_of": "treadle.compiler.memory",
    "fastest_plan": "treadle.compiler.memory",
    "lower": "treadle.compiler.memory",
    "schedule": "treadle.compiler.memory",
    "artifact_of": "treadle.compiler.pipeline",
    "Executable": "treadle.compiler.stored_build",
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_compile_that_is_broken_off_changes_nothing(stage, monkeypatch, tmp_path):
    """At any stage, with a state that eager made; the next call is eager's next step."""
    options = treadle.Options(cache_dir=tmp_path, codegen=False)  # nothing is found, all is quick
    model, optimizer, step = made(options=options)
    twin = copy.deepcopy(model)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for each, function in ((model, optimizer), (twin, other)):
        torch.manual_seed(3)
        make_step(each, function)(*batch())
    before = everything(model, optimizer)
    given = batch()
    before[-1] = torch.get_rng_state()
    for error in (RuntimeError, KeyboardInterrupt, MemoryError):
        with monkeypatch.context() as patch:
            patch.setattr(f"{STAGES[stage]}.{stage}", raises(error))
            # a bug within the stages has a code; capture as a whole and building are no such stage
            is_bug = stage not in ("capture", "Executable") and issubclass(error, Exception)
            with pytest.raises(InternalError if is_bug else error, match="broken off") as caught:
                step(*given)
        if is_bug:
            assert caught.value.code == "TR-900"
            assert type(caught.value.__cause__) is error
        assert_unchanged(before, model, optimizer)
    torch.manual_seed(4)
    ours = step(*given)
    torch.manual_seed(4)
    torch.testing.assert_close(ours, make_step(twin, other)(*given))


def raises(error):
    def broken(*_args, **_kwargs):
        raise error("broken off")

    return broken


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_code_of_the_user_s_that_raises_while_it_is_captured_changes_nothing(error):
    """In a hook of the forward or the backward pass, at one call after another."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fails = [-1]

    def hook_of(number):
        def hook(*_):
            if fails[0] == number:
                raise error("of the user's")

        return hook

    for at, block in enumerate(model):
        block[0].register_forward_hook(hook_of(at))
        block[1].register_full_backward_hook(hook_of(3 + at))

    train = training(lambda x: model(x).square().mean(), optimizer)
    step = treadle.compile(train, model=model, optimizer=optimizer)
    before, x = everything(model, optimizer), torch.randn(5, 4)
    before[-1] = torch.get_rng_state()
    parameters = [*model.parameters()]
    for call in range(6):
        fails[0] = call
        with pytest.raises(error, match="of the user's"):
            step(x)
        assert_unchanged(before, model, optimizer)
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert optimizer.param_groups[0]["params"][0] is parameters[0]
    fails[0] = -1
    assert step(x).isfinite()
    assert model(x).isfinite().all()
