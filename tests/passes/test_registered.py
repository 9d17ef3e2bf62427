"""Passes and lowerings that users register, in whole steps and in the backend."""

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import treadle
import treadle.backend
from contract.contract_help import beside_eager, training
from treadle.compiler import cleaning
from treadle.options import OPTIONAL_PASSES, from_environment
from treadle.passes import registered

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_registered(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TREADLE_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(registered, "_passes", [])
    monkeypatch.setattr(registered, "_meanings", {})


@torch.library.custom_op("treadle_tests::soft_clip", mutates_args=())
def soft_clip(x: torch.Tensor, limit: float = 1.0) -> torch.Tensor:
    return limit * torch.tanh(x / limit)


@soft_clip.register_fake
def _(x, limit=1.0):
    return torch.empty_like(x)


@torch.library.custom_op("treadle_tests::soft_clip_backward", mutates_args=())
def soft_clip_backward(grad: torch.Tensor, y: torch.Tensor, limit: float) -> list[torch.Tensor]:
    return [grad * (1 - (y / limit) ** 2), y.sum()]


@soft_clip_backward.register_fake
def _(grad, y, limit):
    return [torch.empty_like(grad), grad.new_empty(())]


def _keep(ctx, inputs, output):
    ctx.limit = inputs[1]
    ctx.save_for_backward(output)


def _back(ctx, grad):
    (y,) = ctx.saved_tensors
    return soft_clip_backward(grad, y, ctx.limit)[0], None


soft_clip.register_autograd(_back, setup_context=_keep)
FORWARD = torch.ops.treadle_tests.soft_clip.default
BACKWARD = torch.ops.treadle_tests.soft_clip_backward.default


def clip(x, limit=1.0):
    return limit * torch.tanh(x / limit)


def clip_back(grad, y, limit):
    return [grad * (1 - (y / limit) ** 2), y.sum()]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(7, 33), nn.Linear(33, 5)

    def forward(self, x):
        return self.second(soft_clip(F.relu(self.first(x)), 0.7))


def clipped():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return training(lambda x: model(x).square().mean(), optimizer), model, optimizer


def compare(steps=3, **options):
    batches = [(torch.randn(11, 7),) for _ in range(steps)]
    return beside_eager(clipped, batches.__getitem__, steps=steps, rtol=1e-5, atol=1e-6, **options)


def test_an_operation_of_ones_own_is_a_call_until_it_has_a_lowering():
    step = compare()
    assert "treadle_tests.soft_clip.default" in step.explain()
    assert "fallbacks: 2" in step.explain()
    treadle.register_lowering(FORWARD, clip)
    treadle.register_lowering(BACKWARD, clip_back)
    step = compare(strict=True)
    assert "fallbacks: none" in step.explain()
    assert "t_tanh" in step.graph("sources")
    assert "treadle_tests.soft_clip" not in step.graph("clean")


def test_with_dynamic_sizes_budgets_and_plans():
    treadle.register_lowering(FORWARD, clip)
    treadle.register_lowering(BACKWARD, clip_back)
    compare(memory=0.5, strict=True)
    train, model, optimizer = clipped()
    shapes = treadle.dynamic({"x": ("rows", None)}, rows=(2, 40))
    step = treadle.compile(
        lambda x: train(x), model=model, optimizer=optimizer, shapes=shapes, strict=True
    )
    eager, _, _ = clipped()
    for rows in (11, 2, 40):
        x = torch.randn(rows, 7)
        torch.testing.assert_close(step(x), eager(x), rtol=1e-5, atol=1e-6)
    assert treadle.plan(train, torch.randn(11, 7), model=model, optimizer=optimizer).fits


def test_in_the_backend():
    treadle.register_lowering(FORWARD, clip)
    treadle.register_lowering(BACKWARD, clip_back)
    model, twin = clipped()[1], clipped()[1]
    compiled = torch.compile(model, backend=treadle.backend.treadle, options={"strict": True})
    x = torch.randn(11, 7)
    compiled(x).sum().backward()
    twin(x).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("meaning", "words"),
    [
        (lambda x, limit: x.sum(), "gives f32"),
        (lambda x, limit: x.double(), "gives f64"),
        (lambda x, limit: x.add_(1), "writes or draws: aten.add_"),
        (lambda x, limit: x + torch.rand_like(x), "writes or draws: aten.rand"),
        (lambda x, limit: FORWARD(x, limit), "calls the operation itself"),
        (lambda x, limit: x * torch.tensor([2.0]), "makes a tensor from numbers"),
    ],
)
def test_a_lowering_that_is_something_else_is_refused(meaning, words):
    treadle.register_lowering(FORWARD, meaning)
    with pytest.raises(treadle.LoweringError, match="TR-307") as caught:
        compare(1)
    assert words in str(caught.value)
    assert "test_registered.py" in caught.value.where


@dataclass(frozen=True)
class SumsInsteadOfMeans(treadle.GraphPass):
    """A pass that changes numbers, so that a test can see it ran."""

    def run(self, step: treadle.StepGraph) -> int:
        found = [n for n in step.graph.nodes if n.target is aten.mean.default]
        for node in found:
            with step.graph.inserting_before(node):
                total = step.graph.call_function(aten.sum.default, node.args)
            total.meta = dict(node.meta)
            node.replace_all_uses_with(total)
            step.graph.erase_node(node)
        return len(found)


def test_a_pass_runs_in_every_compile_and_is_part_of_the_key():
    train, model, optimizer = clipped()
    x = torch.randn(11, 7)
    before = treadle.compile(train, model=model, optimizer=optimizer)(x)
    treadle.register_pass(SumsInsteadOfMeans())
    train, model, optimizer = clipped()
    step = treadle.compile(train, model=model, optimizer=optimizer)
    torch.testing.assert_close(step(x), before * 55)  # the mean of 11 x 5 became a sum
    assert "= mean(" not in step.graph("captured")


def test_a_rule_of_ones_own():
    def pattern(x):
        return aten.neg.default(aten.neg.default(x))

    rule = treadle.Rule("twice-negated", pattern, lambda x: aten.alias.default(x))
    treadle.register_pass(treadle.Rewrite((rule,)))
    model = nn.Linear(3, 3)
    step = treadle.compile(lambda x: torch.neg(-model(x)) * 2.0, model=model)
    x = torch.randn(2, 3)
    torch.testing.assert_close(step(x), model(x) * 2.0)
    assert "= neg(" not in step.graph("clean")


def test_a_pass_that_breaks_the_graph_is_named():
    @dataclass(frozen=True)
    class Breaks(treadle.GraphPass):
        def run(self, step):
            node = next(n for n in step.graph.nodes if n.op == "call_function")
            node.meta.pop("val")
            return 1

    treadle.register_pass(Breaks())
    with pytest.raises(treadle.VerifyError, match=r"after .*Breaks"):
        compare(1)


def test_what_cannot_be_registered():
    treadle.register_pass(SumsInsteadOfMeans())
    treadle.register_lowering(FORWARD, clip)
    packet = torch.ops.treadle_tests.soft_clip
    for wrong, words, remedy in (
        (lambda: treadle.register_pass(SumsInsteadOfMeans()), "is registered already", "once"),
        (lambda: treadle.register_pass(SumsInsteadOfMeans), "the class SumsInst", "an instance"),
        (lambda: treadle.register_pass(3), "an int is not a pass", "an instance"),
        (lambda: treadle.register_lowering(FORWARD, clip), "has a lowering already", "once"),
        (lambda: treadle.register_lowering(packet, clip), "has overloads", f"{packet}.default"),
        (lambda: treadle.register_lowering(clip, clip), "not an operation", "torch.ops."),
        (lambda: treadle.register_lowering(BACKWARD, "clip"), "a str is not a function", "comput"),
    ):
        with pytest.raises(treadle.LoweringError, match=rf"TR-307\] .*{words}") as caught:
            wrong()
        assert remedy in caught.value.remedy


@pytest.mark.parametrize("stage", ["extend", "clean", "plan memory"])
@pytest.mark.parametrize("options", [{}, {"memory": 0.3}])
def test_a_pass_runs_at_the_stage_it_is_registered_for(stage, options):
    train, model, optimizer = clipped()
    x = torch.randn(11, 7)
    before = treadle.compile(train, model=model, optimizer=optimizer, **options)(x)
    treadle.register_pass(SumsInsteadOfMeans(), stage=stage)
    train, model, optimizer = clipped()
    step = treadle.compile(train, model=model, optimizer=optimizer, **options)
    torch.testing.assert_close(step(x), before * 55)
    stages = ["captured", "clean", "planned"]
    shown = [name for name in stages if "= mean(" in step.graph(name)]
    assert shown == stages[: ["extend", "clean", "plan memory"].index(stage)]
    ran = [line for line in step.stages().splitlines() if "SumsInsteadOfMeans" in line]
    assert len(ran) == 1
    assert treadle.plan(train, x, model=model, optimizer=optimizer).fits


def test_what_late_passes_make_is_never_found_in_the_cache():
    @dataclass(frozen=True)
    class Scales(treadle.GraphPass):
        """Its code depends on what no name of it tells."""

        def run(self, step):
            if factor[0] == 1.0:
                return 0
            return SumsInsteadOfMeans().run(step)

    factor = [1.0]
    treadle.register_pass(Scales(), stage="clean")
    train, model, optimizer = clipped()
    x = torch.randn(11, 7)
    first = treadle.compile(train, model=model, optimizer=optimizer)(x)
    factor[0] = 2.0
    train, model, optimizer = clipped()
    step = treadle.compile(train, model=model, optimizer=optimizer)
    torch.testing.assert_close(step(x), first * 55)
    assert not step.compiled.from_cache
    registered._passes.clear()
    train, model, optimizer = clipped()
    torch.testing.assert_close(treadle.compile(train, model=model, optimizer=optimizer)(x), first)


@dataclass(frozen=True)
class FindsNothing(treadle.GraphPass):
    def run(self, step):
        return 0


class Bags(nn.Module):
    """Two checkpointed blocks with equal parts, on the largest of the words of each bag."""

    def __init__(self):
        super().__init__()
        self.bags, self.inner = nn.EmbeddingBag(50, 16, mode="max"), nn.Linear(16, 16)

    def forward(self, words):
        x = self.inner(self.bags(words))
        blocks = [
            checkpoint(lambda x, y: self.inner(y * x.exp()).exp(), x, y, use_reentrant=False)
            for y in (x, x.sin())
        ]
        return sum(blocks)


def bagged(memory):
    torch.manual_seed(0)
    model = Bags()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = treadle.compile(
        training(lambda words: model(words).square().mean(), optimizer),
        model=model,
        optimizer=optimizer,
        memory=memory,
        options=replace(from_environment(), codegen=False),
    )
    words = torch.randint(50, (64, 48))
    step(words)
    measured = step.measure(words).peak_bytes
    assert measured <= step.compiled.artifact.peak_bytes
    return step.compiled, measured


def _register_a_lowering():
    treadle.register_lowering(FORWARD, clip)


@pytest.mark.parametrize("memory", [None, 0.9])
@pytest.mark.parametrize(
    "register",
    [
        _register_a_lowering,
        *(
            partial(treadle.register_pass, FindsNothing(), stage=stage)
            for stage in registered.STAGES
        ),
    ],
)
def test_what_is_registered_and_finds_nothing_changes_no_plan(register, memory):
    before, measured = bagged(memory)
    register()
    after, measured_again = bagged(memory)
    assert (after.key == before.key) is (not registered.registered_late())
    assert after.artifact.steps == before.artifact.steps
    assert after.artifact.peak_bytes == before.artifact.peak_bytes
    assert after.draws is before.draws is False
    assert measured_again == measured


@dataclass(frozen=True)
class AddsNoise(treadle.GraphPass):
    """Random numbers that the user's step does not draw, once."""

    def run(self, step):
        found = [n for n in step.graph.nodes if n.target is aten.tanh.default]
        for node in found:
            with step.graph.inserting_after(node):
                drawn = step.graph.call_function(aten.rand_like.default, node.args)
            drawn.meta = dict(node.meta)
            node.replace_all_uses_with(drawn)
            step.graph.erase_node(node)
        return len(found)


@pytest.mark.parametrize("stage", registered.STAGES)
def test_passes_that_draw_are_undone_with_their_random_numbers(stage):
    model = nn.Linear(7, 33)
    treadle.register_pass(AddsNoise(), stage=stage)
    step = treadle.compile(lambda x: model(x).tanh().detach(), model=model)
    x = torch.randn(11, 7)
    step(x)
    assert step.compiled.draws
    assert step.measure(x).peak_bytes <= step.compiled.artifact.peak_bytes
    state = torch.get_rng_state()
    first = step(x)
    torch.set_rng_state(state)
    assert torch.equal(step(x), first)


def test_there_are_three_stages_for_passes():
    with pytest.raises(treadle.LoweringError, match="TR-307") as caught:
        treadle.register_pass(SumsInsteadOfMeans(), stage="lower and schedule")
    assert "one of extend, clean, plan memory" in str(caught.value)


def test_late_passes_in_the_backend():
    treadle.register_pass(treadle.Rewrite((TWICE,)), stage="clean")
    treadle.register_pass(treadle.Rewrite((TWICE,)), stage="plan memory")
    model, twin = clipped()[1], clipped()[1]
    compiled = torch.compile(model, backend=treadle.backend.treadle)
    x = torch.randn(11, 7)
    compiled(torch.neg(-x)).sum().backward()
    twin(x).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


TWICE = treadle.Rule("twice-negated", lambda x: aten.neg.default(aten.neg.default(x)), lambda x: x)


@pytest.mark.parametrize("skip", [*OPTIONAL_PASSES, OPTIONAL_PASSES])
@pytest.mark.parametrize("memory", [None, 0.3])
def test_what_is_optional_can_be_left_out(skip, memory):
    skip = (skip,) if isinstance(skip, str) else skip
    treadle.register_pass(treadle.Rewrite((TWICE,)))
    environment = treadle.Options(skip=skip, memory=memory)
    step = compare(options=environment)
    assert not [name for name in skip if f"{name}()" in step.stages()]
    assert "ExpandDropout" in step.stages()


def test_only_what_is_optional_can_be_left_out():
    for wrong in (("ExpandDropout",), "RemoveNoOps2", ("RemoveNoOps", 3)):
        with pytest.raises(treadle.TreadleError, match="TR-001") as caught:
            treadle.Options(skip=wrong)
        assert "RemoveCommonSubexpressions" in str(caught.value)


def test_what_is_left_out_is_part_of_the_key():
    keys = set()
    for skip in ((), ("RemoveNoOps",), ["RemoveNoOps"], ("RemoveDeadCode",)):
        train, model, optimizer = clipped()
        options = treadle.Options(skip=skip)
        step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
        keys.add(step.prepare(torch.randn(11, 7)).key)
    assert len(keys) == 3


def test_rules_are_left_out_by_their_names():
    other = treadle.Rule("other", lambda x: aten.neg.default(x), lambda x: x)
    passes = (treadle.Rewrite((TWICE, other)), treadle.Rewrite((TWICE,)), SumsInsteadOfMeans())
    kept = cleaning.without(passes, ("twice-negated",))
    assert kept == (treadle.Rewrite((other,)), SumsInsteadOfMeans())


def test_names_to_leave_out_from_the_environment(monkeypatch):
    monkeypatch.setenv("TREADLE_SKIP", "RemoveNoOps,RemoveDeadCode")
    assert from_environment().skip == ("RemoveNoOps", "RemoveDeadCode")
    monkeypatch.setenv("TREADLE_SKIP", "Nothing")
    with pytest.raises(treadle.TreadleError, match="TR-001"):
        from_environment()


def test_a_saved_step_remembers_what_was_left_out(tmp_path):
    train, model, optimizer = clipped()
    options = treadle.Options(skip=("RemoveNoOps",))
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    x = torch.randn(11, 7)
    step(x)
    step.save(tmp_path / "step")
    train, model, optimizer = clipped()
    loaded = treadle.load(tmp_path / "step", train, model=model, optimizer=optimizer)
    loaded(x)
    assert loaded.options.skip == ("RemoveNoOps",)
    assert loaded.compiled.from_cache
    assert not loaded.recompiles


def test_a_saved_step_of_a_late_pass_is_compiled_again(tmp_path):
    treadle.register_pass(SumsInsteadOfMeans(), stage="clean")
    train, model, optimizer = clipped()
    step = treadle.compile(train, model=model, optimizer=optimizer)
    x = torch.randn(11, 7)
    summed = step(x)
    step.save(tmp_path / "step")
    registered._passes.clear()
    train, model, optimizer = clipped()
    loaded = treadle.load(tmp_path / "step", train, model=model, optimizer=optimizer)
    torch.testing.assert_close(loaded(x) * 55, summed)
    assert "what users registered changed" in " ".join(loaded.recompiles)
