"""Updates that run in the next call: when, what readers see, and what is left by what fails."""

import copy
import copyreg
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import treadle
from counted import batch, calls, reduced, stack
from treadle.capture.refuse import KNOWN_UPDATE_RULES
from treadle.session import carried
from treadle.util.errors import RuntimeFailure, TreadleError

ops = torch.ops.test
pytestmark = pytest.mark.filterwarnings("ignore:.*run as PyTorch kernels:RuntimeWarning")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


class Training:
    """A model, its optimizer, and the compiled step; ``carry`` as the option."""

    def __init__(self, carry=(), model=None, kind=torch.optim.Adam, lr=0.01, before=None,
                 **options):  # fmt: skip
        self.model = model or stack()
        self.optimizer = kind(self.model.parameters(), lr=lr)
        chosen = {"codegen": False} | options

        def step(x, y):
            loss = (self.model(x) - y).square().mean()
            loss.backward()
            reduced(self.model)
            if before is not None:
                before(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

        self.function = step
        self.step = treadle.compile(
            step, model=self.model, optimizer=self.optimizer,
            options=treadle.Options(carry=carry, **chosen),
        )  # fmt: skip

    def raw(self):
        """Copies of all that is trained, which nobody is told of."""
        state = self.optimizer.state
        with torch._C.DisableTorchFunctionSubclass():
            return [each.detach().clone() for each in self.model.parameters()] + [
                value.clone()
                for each in self.model.parameters()
                for value in state[each].values()
                if isinstance(value, torch.Tensor)
            ]


ALL = treadle.Carry()


def pair(carry=ALL, layers=2, **options):
    """The same training twice, without and with movement."""
    return (
        Training(model=stack(layers), **options),
        Training(carry, model=stack(layers), **options),
    )


@pytest.fixture(scope="module")
def compiled_once():
    return pair()


@pytest.fixture
def both_trainings(compiled_once):
    """A pair that is compiled for the first test and as at its start for each: nothing is pending,
    and both have the parameters of ``stack`` and moments of zero."""
    plain, moved = compiled_once
    moved.step.flush()
    with torch.no_grad():
        for each in (plain, moved):
            for parameter, start in zip(each.model.parameters(), stack().parameters(), strict=True):
                parameter.copy_(start)
                for value in of_state(each.optimizer.state[parameter]):
                    value.zero_()
    yield plain, moved
    moved.step.flush()


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_the_counters_of_the_oracle():
    """Five calls of a model with one collective per parameter, here one parameter."""
    plain, moved = (Training(carry, model=nn.Linear(4, 3, bias=False))
                    for carry in ((), treadle.Carry()))  # fmt: skip
    moved.model.load_state_dict(plain.model.state_dict())
    batches = [batch() for _ in range(5)]
    results, counts = {}, {}
    for name, each in (("plain", plain), ("moved", moved)):
        calls[0] = 0
        results[name], counts[name] = [], []
        for given in batches:
            results[name].append(each.step(*given))
            counts[name].append(calls[0])
        each.step.flush()
        counts[name].append(calls[0])
    assert counts == {"plain": [1, 2, 3, 4, 5, 5], "moved": [0, 1, 2, 3, 4, 5]}
    assert same(results["plain"], results["moved"])
    assert same(plain.raw(), moved.raw())


SETS = {
    1: treadle.Carry(),
    2: (treadle.Carry("0.*"), treadle.Carry("4.*", before="4")),
    3: (treadle.Carry("0.*"), treadle.Carry(("2.weight", "2.bias")),
        treadle.Carry(lambda name: name.startswith("4."))),
}  # fmt: skip


def hundred_calls(each, batches):
    """The results of the calls; before each of them the optimizer is set to other numbers."""
    for number, given in enumerate(batches, 1):
        for group in each.optimizer.param_groups:
            group["lr"] = 0.02 / number
            group["betas"] = (0.9 - 0.001 * number, 0.99)
        yield number, each.step(*given)


NUMERICS = {
    "default": {"codegen": True, "numerics": "default"},
    "eager": {"codegen": True, "numerics": "eager"},
    "library": {"codegen": False},
}


@pytest.fixture(scope="module")
def without_movement():
    """By numerics: a hundred batches; the result of each call, and what is trained after it."""
    known = {}

    def found(numerics):
        if numerics not in known:
            plain = Training(model=stack(3), **NUMERICS[numerics])
            batches = [batch() for _ in range(100)]
            after = {number: (loss, plain.raw()) for number, loss in hundred_calls(plain, batches)}
            assert plain.step.recompiles == []
            known[numerics] = batches, after
        return known[numerics]

    return found


@pytest.mark.users_flags
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("sets", SETS)
def test_a_hundred_calls_with_restarts(sets, numerics, without_movement):
    batches, plain = without_movement(numerics)
    moved = Training(SETS[sets], model=stack(3), **NUMERICS[numerics])
    for number, loss in hundred_calls(moved, batches):
        expected, trained = plain[number]
        assert torch.equal(expected, loss), number
        if number in (1, 2, 50):
            moved.step.flush()
            assert same(trained, moved.raw()), number
    assert not same(trained, moved.raw()), "nothing was carried: the test is about nothing"
    moved.step.flush()
    assert same(trained, moved.raw())
    assert moved.step.recompiles == []


@pytest.mark.parametrize(
    ("layers", "kind"), [(1, torch.optim.Adam), (2, torch.optim.Adam), (7, torch.optim.SGD)]
)
def test_stacks_of_linear_and_relu(layers, kind):
    """Of seven layers the last is "12", whose text is before that of the second, "2"."""
    plain, moved = pair(layers=layers, kind=kind)
    for _ in range(5):
        given = batch()
        assert torch.equal(plain.step(*given), moved.step(*given))
    moved.step.flush()
    assert same(plain.raw(), moved.raw())


KINDS = [
    kind for known in KNOWN_UPDATE_RULES for kind in known if kind is not torch.optim.SparseAdam
]  # it takes sparse gradients alone: contract/test_sparse_gradients.py


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_optimizer(kind):
    def model():
        torch.manual_seed(1)
        bias = kind.__name__ != "Muon"
        return nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=bias))

    plain = Training(model=model(), kind=kind)
    moved = Training(treadle.Carry(), model=model(), kind=kind)
    for number in range(8):
        given = batch()
        assert torch.equal(plain.step(*given), moved.step(*given)), number
        if number == 3:
            moved.step.flush()
            assert same(plain.raw(), moved.raw())
    moved.step.flush()
    assert same(plain.raw(), moved.raw())


def by_lists(model):
    """Its own update, of all parameters at once."""
    parameters = list(model.parameters())
    with torch.no_grad():
        scaled = torch._foreach_mul([each.grad for each in parameters], 0.1)
        torch._foreach_sub_(parameters, scaled)


@pytest.mark.parametrize("carry", [treadle.Carry("0.*"), treadle.Carry(), SETS[2]])
def test_updates_by_lists(carry):
    found = []
    for chosen in ((), carry):
        model = stack(3)

        def step(x, y, model=model):
            loss = (model(x) - y).square().mean()
            loss.backward()
            by_lists(model)
            model.zero_grad()
            return loss.detach()

        options = treadle.Options(carry=chosen, codegen=False)
        found.append((model, treadle.compile(step, model=model, options=options)))
    (plain, one), (moved, two) = found
    for _ in range(5):
        given = batch()
        assert torch.equal(one(*given), two(*given))
    assert same([*plain.parameters()], [*moved.parameters()])


# Who reads, flushes.


def another_step(each):
    @torch.no_grad()
    def error(x, y):
        return (each.model(x) - y).abs().mean()

    return treadle.compile(error, model=each.model, options=treadle.Options(codegen=False))


def saved_to_a_file(each, path):
    torch.save(each.model, path / "model.pt")
    return torch.load(path / "model.pt", weights_only=False)


def of_state(state):
    return [each for each in state.values() if isinstance(each, torch.Tensor)]


def of_optimizer(state):
    return [each for entry in state["state"].values() for each in of_state(entry)]


READERS = {
    "state_dict": lambda each, path: of_state(each.model.state_dict()),
    "state_dict of a part": lambda each, path: of_state(each.model[2].state_dict()),
    "optimizer.state_dict": lambda each, path: of_optimizer(each.optimizer.state_dict()),
    "forward": lambda each, path: [each.model(FIXED[0])],
    "forward without gradients": lambda each, path: without_gradients(each),
    "forward of a part": lambda each, path: [each.model[0](FIXED[0])],
    "functional call": lambda each, path: [
        torch.func.functional_call(each.model, dict(each.model.named_parameters()), FIXED[:1])
    ],
    "deepcopy": lambda each, path: list(copy.deepcopy(each.model).parameters()),
    "deepcopy of a part": lambda each, path: list(copy.deepcopy(each.model[0]).parameters()),
    "deepcopy of the optimizer": lambda each, path: of_optimizer(
        copy.deepcopy(each.optimizer).state_dict()
    ),
    "pickle": lambda each, path: list(pickle.loads(pickle.dumps(each.model)).parameters()),
    "torch.save": lambda each, path: list(saved_to_a_file(each, path).parameters()),
    "another step": lambda each, path: [another_step(each)(*FIXED)],
    "update=False": lambda each, path: [each.step(*FIXED, update=False)],
    "another batch": lambda each, path: [each.step(FIXED[0][:3], FIXED[1][:3])],
    "flush": lambda each, path: each.step.flush() or each.raw(),
    "save": lambda each, path: each.step.save(path / "step") or each.raw(),
    "verify": lambda each, path: [each.step.verify([FIXED])] and each.raw(),
    "eager step": lambda each, path: stepped_eagerly(each),
}
FIXED = batch()


@torch.inference_mode()
def without_gradients(each):
    return [each.model(FIXED[0]).clone()]


def stepped_eagerly(each):
    (each.model(FIXED[0]) - FIXED[1]).square().mean().backward()
    each.optimizer.step()
    each.optimizer.zero_grad()
    return each.raw()


VARIANTS = {"update=False", "another batch"}
"""What compiles the step again, the first time that it reads: each time with other calls before."""
TURNS = [
    *((name, (1, 3)) for name in READERS if name not in VARIANTS),
    *((name, (calls_before,)) for name in READERS if name in VARIANTS for calls_before in (1, 3)),
]


@pytest.mark.parametrize(("name", "turns"), TURNS, ids=str)
def test_every_reader_sees_what_it_would_see(name, turns, tmp_path, both_trainings):
    """``turns``: how many calls are before each look, the last of them pending."""
    plain, moved = pair() if name in VARIANTS else both_trainings
    for calls_before in turns:
        for _ in range(calls_before):
            given = batch()
            assert torch.equal(plain.step(*given), moved.step(*given))
        assert not same(plain.raw(), moved.raw())
        seen = [READERS[name](each, tmp_path) for each in (plain, moved)]
        assert same(*seen)
        moved.step.flush()
        assert same(plain.raw(), moved.raw())
        for _ in range(3):
            given = batch()
            assert torch.equal(plain.step(*given), moved.step(*given))
        moved.step.flush()
        assert same(plain.raw(), moved.raw())


def test_loading_replaces_what_was_updated():
    plain, moved = pair()
    start = copy.deepcopy(plain.model.state_dict())
    for _ in range(3):
        given = batch()
        plain.step(*given), moved.step(*given)
    states = [copy.deepcopy(each.optimizer.state_dict()) for each in (plain, moved)]
    given = batch()
    plain.step(*given), moved.step(*given)
    for each, state in zip((plain, moved), states, strict=True):
        each.model.load_state_dict(start)
        each.optimizer.load_state_dict(state)
    assert same(plain.raw(), moved.raw())
    given = batch()
    assert torch.equal(plain.step(*given), moved.step(*given))
    moved.step.flush()
    assert same(plain.raw(), moved.raw())


def test_a_part_that_is_loaded_keeps_the_updates_of_the_rest():
    plain, moved = pair()
    given = batch()
    for each in (plain, moved):
        each.step(*given)
        each.model[0].load_state_dict(stack(seed=9)[0].state_dict())
        each.step.flush()
    assert same(plain.raw(), moved.raw())


def test_a_step_that_is_dropped_leaves_nothing_undone():
    plain, moved = pair()
    given = batch()
    plain.step(*given), moved.step(*given)
    del moved.step, moved.function
    gc.collect()
    moved.model.state_dict()
    assert same(plain.raw(), moved.raw())


def test_nothing_that_is_pending_keeps_a_model_alive():
    gc.collect()
    _, moved = pair()
    moved.step(*batch())
    known = [weakref.ref(each) for each in (moved.model, moved.step, moved.optimizer)]
    del moved
    gc.collect()
    assert [each() for each in known] == [None, None, None]
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not carried._pending.refs


def test_a_copy_has_no_hooks_of_ours():
    _, moved = pair()
    moved.step(*batch())
    stored = io.BytesIO()
    torch.save(moved.model, stored)
    assert b"treadle" not in stored.getvalue()
    moved.step(*batch())
    moved.model.state_dict()  # flushes within a walk over hooks
    twin = copy.deepcopy(moved.model)
    assert not any(each._state_dict_pre_hooks for each in twin.modules())
    assert not any(each._load_state_dict_pre_hooks for each in twin.modules())


def test_nothing_is_hooked_where_nothing_is_pending():
    gc.collect()
    before = dict(copyreg.dispatch_table)
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    count = len(hooks)
    _, moved = pair()
    moved.step(*batch())
    assert len(hooks) == count + 1
    moved.step.flush()
    assert len(hooks) == count
    assert copyreg.dispatch_table == before


def test_two_steps_that_share_nothing_do_not_flush_each_other():
    (_, one), (_, two) = pair(), pair()
    for _ in range(2):  # what is compiled flushes everything
        one.step(*batch()), two.step(*batch())
    calls[0] = 0
    for _ in range(3):
        one.step(*batch()), two.step(*batch())
    assert calls[0] == 3 * 2 * 4
    one.step.flush(), two.step.flush()
    assert calls[0] == 4 * 2 * 4


# What fails.


class Broken(Exception):
    """Raised in the middle of a step."""


FAILS = [False]


@torch.library.custom_op("test::may_fail", mutates_args=(), tags=(torch.Tag.pointwise,))
def may_fail(x: torch.Tensor) -> torch.Tensor:
    """Raises when it is told to."""
    if FAILS[0]:
        raise Broken("told to")
    return x.clone()


@may_fail.register_fake
def _(x):
    return torch.empty_like(x)


def failing(model):
    weight = list(model.parameters())[-1]
    weight.grad.copy_(torch.ops.test.may_fail(weight.grad))


def fails(each, given):
    FAILS[0] = True
    try:
        with pytest.raises(RuntimeFailure) as found:
            each.step(*given)
    finally:
        FAILS[0] = False
    return found.value.code


@pytest.mark.parametrize("carry", [treadle.Carry("0.*"), treadle.Carry()], ids=["part", "all"])
def test_a_first_steady_call_that_fails_has_not_happened(carry):
    """The first run of a program is undone; what was pending is pending still."""
    plain, moved = pair(carry, before=failing)
    given = batch()
    plain.step(*given), moved.step(*given)
    before = moved.raw()
    assert fails(moved, batch()) == "TR-403"
    assert same(before, moved.raw())
    for _ in range(3):
        given = batch()
        assert torch.equal(plain.step(*given), moved.step(*given))
    moved.step.flush()
    assert same(plain.raw(), moved.raw())


def test_a_first_call_that_fails_has_not_happened():
    plain, moved = pair(treadle.Carry("0.*"), before=failing)
    assert fails(moved, batch()) == "TR-403"
    for _ in range(3):
        given = batch()
        assert torch.equal(plain.step(*given), moved.step(*given))
    moved.step.flush()
    assert same(plain.raw(), moved.raw())


def test_a_later_call_that_fails_says_so_and_a_checkpoint_goes_on():
    """As without movement: it is partly done, and what was pending is gone with it."""
    plain, moved = pair(treadle.Carry("0.*"), before=failing)
    for _ in range(3):
        given = batch()
        plain.step(*given), moved.step(*given)
    kept = [
        copy.deepcopy((each.model.state_dict(), each.optimizer.state_dict()))
        for each in (plain, moved)
    ]
    given = batch()
    plain.step(*given), moved.step(*given)
    moved.step(*batch())
    assert fails(moved, batch()) == "TR-406"
    calls[0] = 0
    moved.step.flush()
    assert calls[0] == 0
    for each, (model, optimizer) in zip((plain, moved), kept, strict=True):
        each.model.load_state_dict(model)
        each.optimizer.load_state_dict(optimizer)
    for _ in range(3):
        given = batch()
        assert torch.equal(plain.step(*given), moved.step(*given))
    moved.step.flush()
    assert same(plain.raw(), moved.raw())


def test_a_flush_that_fails_is_undone_and_can_be_tried_again():
    plain, moved = pair(before=failing)
    given = batch()
    plain.step(*given), moved.step(*given)
    before = moved.raw()
    FAILS[0] = True
    try:
        with pytest.raises(RuntimeFailure):
            moved.step.flush()
    finally:
        FAILS[0] = False
    assert same(before, moved.raw())
    moved.step.flush()
    assert same(plain.raw(), moved.raw())


def test_a_call_whose_check_does_not_hold_runs_eagerly_on_what_is_up_to_date():
    trainings = []
    for carry in ((), treadle.Carry()):
        model = stack()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(x, y, model=model, optimizer=optimizer):
            loss = (model(x) - y).square().mean()
            if not torch.isfinite(loss):
                raise Broken("not finite")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        compiled = treadle.compile(
            step, model=model, optimizer=optimizer,
            options=treadle.Options(carry=carry, codegen=False),
        )  # fmt: skip
        trainings.append((model, compiled))
    (plain, one), (moved, two) = trainings
    for _ in range(2):
        given = batch()
        assert torch.equal(one(*given), two(*given))
    x, y = batch()
    for each in (one, two):
        with pytest.raises(Broken):
            each(x * torch.inf, y)
    assert same([*plain.parameters()], [*moved.parameters()])
    given = batch()
    assert torch.equal(one(*given), two(*given))
    two.flush()
    assert same([*plain.parameters()], [*moved.parameters()])


def test_parameters_that_were_converted_meanwhile():
    plain, moved = pair()
    both(plain, moved, 2)
    plain.model.double(), moved.model.double()
    assert same(plain.raw(), moved.raw())


def another_state(each, kept):
    state = each.optimizer.state[each.model[0].bias]
    kept.append(state["exp_avg"])
    state["exp_avg"] = torch.full((len(each.model[0].bias),), 0.2)


def test_state_that_is_replaced_gets_its_update_before_and_what_takes_its_place_none():
    plain, moved = pair()
    both(plain, moved, 2)
    kept = [], []
    another_state(plain, kept[0]), another_state(moved, kept[1])
    given = batch()
    assert torch.equal(plain.step(*given), moved.step(*given))
    moved.step.flush()
    assert same(plain.raw(), moved.raw())
    assert same(*kept)


def flat(each):
    return torch.nn.utils.parameters_to_vector(each.model.parameters())


def first(each):
    return each.model[0].weight


def moment(each):
    return each.optimizer.state[first(each)]["exp_avg"]


def replaced(each):
    first(each).data = first(each).data * 0.5


def loaded_in_part(each):
    each.model.load_state_dict({"0.weight": torch.full_like(first(each), 0.1)}, strict=False)


WRITES = {
    "mul_": lambda each: first(each).mul_(0.9),
    "an element": lambda each: first(each).__setitem__(0, 0.0),
    "copy_ of itself": lambda each: first(each).copy_(first(each) * 2),
    "init": lambda each: [nn.init.constant_(p, 0.1) for p in each.model.parameters()],
    "apply": lambda each: each.model.apply(
        lambda m: m.weight.fill_(0.1) if isinstance(m, nn.Linear) else None
    ),
    "data.mul_": lambda each: first(each).data.mul_(0.9),
    "another data": replaced,
    "lists": lambda each: torch._foreach_mul_(list(each.model.parameters()), 0.9),
    "out=": lambda each: torch.add(first(each).detach(), 1.0, out=first(each).data),
    "NumPy": lambda each: each.model[0].bias.detach().numpy().fill(0.3),
    "a view": lambda each: first(each)[0].add_(1.0),
    "vector_to_parameters": lambda each: torch.nn.utils.vector_to_parameters(
        flat(each) * 0.9, each.model.parameters()
    ),
    "load_state_dict": loaded_in_part,
    "state": lambda each: moment(each).zero_(),
    "an operator": lambda each: torch.ops.aten.mul_.Scalar(first(each), 0.9),
    "clipped": lambda each: first(each).clamp_(-0.05, 0.05),
    "transposed": lambda each: first(each).T.triu_(),
}
LOOKS = {
    "norm": lambda each: first(each).norm(),
    "data": lambda each: first(each).data.clone(),
    "sum of all": lambda each: sum(p.square().sum() for p in each.model.parameters()),
    "vector": flat,
    "NumPy": lambda each: torch.tensor(first(each).detach().numpy()),
    "state": lambda each: moment(each).clone(),
    "linear": lambda each: nn.functional.linear(FIXED[0], first(each)),
    "copied": lambda each: copy.deepcopy(first(each)).detach(),
    "pickled": lambda each: pickle.loads(pickle.dumps(first(each))).detach(),
    "list": lambda each: torch.tensor(first(each).tolist()),
    "beside": lambda each: 1 + first(each),
    "unscaled": lambda each: torch.stack(list(first(each))),
}


def both(plain, moved, times):
    for _ in range(times):
        given = batch()
        assert torch.equal(plain.step(*given), moved.step(*given))
    assert not same(plain.raw(), moved.raw()), "nothing is pending"


@pytest.mark.parametrize("name", WRITES)
@torch.no_grad()
def test_a_write_comes_after_the_update_as_in_eager(name, both_trainings):
    plain, moved = both_trainings
    for times in (1, 2):
        with torch.enable_grad():
            both(plain, moved, times)
        WRITES[name](plain), WRITES[name](moved)
        assert same(plain.raw(), moved.raw())
    with torch.enable_grad():
        both(plain, moved, 2)
    moved.step.flush()
    assert same(plain.raw(), moved.raw())
    assert {type(each) for each in moved.model.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("codegen", [False, True])
def test_parameters_that_are_parts_of_one_vector_are_carried(codegen):
    plain, moved = pair(codegen=codegen)
    for each in (plain, moved):
        parameters = list(each.model.parameters())
        with torch.no_grad():
            nn.utils.vector_to_parameters(flat(each), parameters)
        assert len({each.untyped_storage().data_ptr() for each in parameters}) == 1
    for _ in range(2):
        both(plain, moved, 2)
        moved.step.flush()
        assert same(plain.raw(), moved.raw())


def test_parameters_that_overlap_are_not_carried():
    _, moved = pair(layers=1)
    vector = torch.randn(30)
    weight, bias = moved.model.parameters()
    weight.data, bias.data = vector[: weight.numel()].view_as(weight), vector[3 : 3 + len(bias)]
    with pytest.raises(TreadleError, match=r"TR-112.*0\.weight and 0\.bias"):
        moved.step(*batch())


@pytest.mark.parametrize("name", LOOKS)
@torch.no_grad()
def test_whoever_looks_at_a_parameter_sees_what_it_would_see(name, both_trainings):
    plain, moved = both_trainings
    for times in (1, 2):
        with torch.enable_grad():
            both(plain, moved, times)
        seen = LOOKS[name](plain), LOOKS[name](moved)
        assert torch.equal(*seen)
        assert type(seen[0]) is type(seen[1])
        assert same(plain.raw(), moved.raw())


def test_what_reads_no_element_leaves_the_update_pending(both_trainings):
    plain, moved = both_trainings
    both(plain, moved, 2)
    for each in moved.model.parameters():
        assert isinstance(each, nn.Parameter)
        assert (each.shape, each.numel(), each.grad) == (each.size(), each.nelement(), None)
        assert each.requires_grad
        assert each.is_leaf
    moved.optimizer.zero_grad()
    moved.optimizer.param_groups[0]["lr"] = plain.optimizer.param_groups[0]["lr"] = 0.02
    both(plain, moved, 2)


ALIASES = {
    "a view": lambda tensor: tensor.detach()[0].mul_,
    "data": lambda tensor: tensor.data.mul_,
    "an array": lambda tensor: torch.from_numpy(tensor.detach().numpy()).mul_,
}


@pytest.mark.parametrize("name", ALIASES)
@pytest.mark.parametrize("remedy", ["before", "after"])
def test_a_write_through_memory_that_was_held_before_is_seen(name, remedy, both_trainings):
    """It has happened already: the update cannot come before it, and waits for a word."""
    plain, moved = both_trainings
    writes = [ALIASES[name](first(each)) for each in (plain, moved)]
    for _ in range(3):
        both(plain, moved, 2)
        if remedy == "before":
            moved.step.flush()
            [each(0.9) for each in writes]
            both(plain, moved, 1)
            continue
        writes[1](0.9)
        before = moved.raw()
        for doing in (lambda: moved.step(*batch()), moved.model.state_dict):
            with pytest.raises(RuntimeFailure) as found:
                doing()
            assert found.value.code == "TR-542"
            assert same(before, moved.raw())  # the write stands
        moved.step.flush()  # the update after the write
        assert not same(before, moved.raw())
        twin = copy.deepcopy(moved.model.state_dict()), copy.deepcopy(moved.optimizer.state_dict())
        plain.model.load_state_dict(twin[0])
        plain.optimizer.load_state_dict(twin[1])
    both(plain, moved, 2)


# The option.


@pytest.mark.parametrize("carry", ["0.*", 3, [treadle.Carry(), "0.*"], None])
def test_an_option_that_is_none(carry):
    with pytest.raises(TreadleError, match="TR-001"):
        treadle.Options(carry=carry)


def test_declared_shapes_are_refused():
    model = stack()
    optimizer = torch.optim.Adam(model.parameters())

    def step(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = treadle.compile(
        step, model=model, optimizer=optimizer,
        shapes=treadle.dynamic({"x": {0: "n"}, "y": {0: "n"}}, n=(2, 64)),
        options=treadle.Options(carry=treadle.Carry()),
    )  # fmt: skip
    with pytest.raises(TreadleError, match="TR-537"):
        compiled(*batch())


def test_a_refused_move_changes_nothing_and_says_why():
    training = Training(treadle.Carry("0.*", before="2"))
    before = [each.clone() for each in training.model.parameters()]
    with pytest.raises(TreadleError, match=r"TR-533.*0\.weight"):
        training.step(*batch())
    assert same(before, [*training.model.parameters()])


def test_a_saved_step_is_found_again(tmp_path):
    _, moved = pair(codegen=True)
    moved.step(*batch())
    moved.step.save(tmp_path / "step")
    twin = Training(model=stack())
    again = treadle.load(
        tmp_path / "step", twin.function, model=twin.model, optimizer=twin.optimizer,
        options=treadle.Options(carry=treadle.Carry(), cache_dir=tmp_path / "other"),
    )  # fmt: skip
    again(*batch())
    parts = again.compiled.programs
    assert len(parts) == 3
    assert all(each.from_cache for each in parts)
    assert again.recompiles == []


def test_reports_speak_of_the_program_that_runs_most():
    _, moved = pair(codegen=True)
    for _ in range(3):
        moved.step(*batch())
    assert moved.step.measure(*batch()).peak_bytes > 0
    moved.step.profile(*batch())
    text = moved.step.explain()
    assert "carried" in text
    assert "carried" in moved.step.graph("captured")
    inside = [node.name for region in moved.step.regions() for node in region.nodes]
    assert len(inside) == len(set(inside))
    taken = [node.name for region in moved.step.regions() for node in region.inputs]
    assert any("carried" in name for name in taken)


def test_only_what_somebody_else_holds_is_copied():
    """The views of the compiled programs are no reason to."""
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())

    def function(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    options = treadle.Options(carry=treadle.Carry("*"))
    step = treadle.compile(function, model=model, optimizer=optimizer, options=options)
    held = []
    for number in range(5):
        if number == 3:
            held.append(model[1].weight.data)
        step(torch.randn(4, 6))
        pending = step._dispatcher.carrier._now
        assert len(pending.left._copies) == len(held)
