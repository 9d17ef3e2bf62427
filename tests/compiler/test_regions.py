"""What cannot be lowered runs as PyTorch's kernels inside the one plan, with a reason for each."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from treadle.compat.fake import is_fake
from treadle.options import Options, RegionRule, Regions
from treadle.passes import registered
from treadle.session.breaks import breaks_of
from treadle.util.reasons import ReasonCode, code_of


@torch.library.custom_op("treadle_regions_tests::soft", mutates_args=())
def soft(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


@soft.register_fake
def _(x):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(output)


def _gradient(ctx, grad):
    return grad * (1 - ctx.saved_tensors[0].square())


soft.register_autograd(_gradient, setup_context=_keep)


@torch.library.custom_op("treadle_regions_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[:1] * 2, x[1:] * 3]


@halves.register_fake
def _(x):
    return [torch.empty_like(x[:1]), torch.empty_like(x[1:])]


@torch.library.custom_op("treadle_regions_tests::note", mutates_args=("total",))
def note(total: torch.Tensor, x: torch.Tensor) -> None:
    total.add_(x.mean())


@note.register_fake
def _(total, x):
    return None


class Mixed(nn.Module):
    """Custom operations, containers, a constant and a parameter as attributes, mutation."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.full((6,), 1.5))
        self.register_buffer("total", torch.zeros(()))
        self.table = torch.arange(6.0)

    def forward(self, x):
        h = soft(F.gelu(self.first(x)) * self.scale)
        with torch.no_grad():
            note(self.total, h)
            one, rest = halves(h.detach())
        values, _ = h.topk(3, dim=1)
        angles = torch.fft.rfft(h + self.table).abs().sum()
        return (
            self.last(soft(h)).square().mean()
            + values.sum()
            + angles * 1e-3
            + (one.sum() + rest.mean() * self.total) * self.scale.sum() * 1e-3
        )


def step_of(model, tmp_path, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def train(x):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return treadle.compile(
        train, model=model, optimizer=optimizer, options=Options(cache_dir=tmp_path, **options)
    )


def batches(count=2):
    torch.manual_seed(3)
    return [(torch.randn(4, 6),) for _ in range(count)]


RULES = {
    "none": Regions(),
    "an operation": Regions((RegionRule("eager", operations="gelu*"),)),
    "a module": Regions((RegionRule("eager", module="last*"),)),
    "first rule": Regions(
        (RegionRule("native", operations="mul*"), RegionRule("eager", operations="*"))
    ),
    "all": Regions((RegionRule("eager"),)),
    "small": Regions(smallest=2),  # in its place: see ``above_the_smallest``
    "refused": Regions(accepts=lambda region: region.number > 0),
}


def above_the_smallest(tmp_path):
    """Rules that refuse the smallest region with generated code: how many operations it has differs
    from one PyTorch to another. One of them alone is a call of the library, a Fourier transform."""
    step = step_of(Mixed(), tmp_path)
    step.prepare(*batches()[0])
    sizes = [each.operations for each in step.regions() if each.compiler == "native"]
    return Regions(smallest=min(each for each in sizes if each > 1) + 1)


@pytest.mark.parametrize("name", RULES)
def test_as_eager_whatever_runs_what(name, tmp_path):
    torch.manual_seed(0)
    model = Mixed()
    rules = above_the_smallest(tmp_path) if name == "small" else RULES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        step = step_of(model, tmp_path, regions=rules)
        for batch in batches():
            assert step.verify([batch]) is None
            step(*batch)
    for region in step.regions():
        assert region.compiler in ("native", "eager")
        assert (region.compiler == "eager") == bool(region.reasons)
        for reason in region.reasons.values():
            assert code_of(reason) in ReasonCode
    codes = {each.code for each in breaks_of(step.compiled.artifact)}
    if name not in ("first rule", "all"):  # these speak of every operation
        assert {ReasonCode.CUSTOM_OPERATION, ReasonCode.DTYPE} <= codes
    wanted = {"small": ReasonCode.SMALL_REGION, "refused": ReasonCode.SMALL_REGION}
    if name != "none":
        assert wanted.get(name, ReasonCode.CHOSEN) in codes


def test_a_reason_begins_with_its_code():
    for each in ReasonCode:
        assert code_of(each.because("a word")) is each


WHY = {
    ReasonCode.SIZES_FROM_VALUES: lambda x: x[x > 0].sum(),
    ReasonCode.DTYPE: lambda x: torch.view_as_real(torch.view_as_complex(x) * 2j).sum(),
    ReasonCode.NO_RULE: lambda x: torch.special.bessel_j0(x).sum(),
    ReasonCode.CUSTOM_OPERATION: lambda x: soft(x).sum(),
}


@pytest.mark.parametrize("code", WHY)
def test_each_reason_has_its_code(code, tmp_path):
    model = nn.Linear(2, 2)
    step = treadle.compile(
        lambda x: WHY[code](model(x)).detach(), model=model, options=Options(cache_dir=tmp_path)
    )
    x = torch.randn(3, 2)
    with pytest.warns(RuntimeWarning, match=code):
        torch.testing.assert_close(step(x), WHY[code](model(x)).detach())
    assert code in {each.code for each in breaks_of(step.compiled.artifact)}
    assert code in step.explain()
    assert Path(__file__).name in step.explain().split("fallbacks:")[1]


def test_no_code_generation_is_a_reason_of_its_own(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = step_of(nn.Sequential(nn.Linear(6, 6), nn.GELU(), Sum()), tmp_path, codegen=False)
        step(*batches()[0])
    codes = {each.code for each in breaks_of(step.compiled.artifact)}
    assert codes == {ReasonCode.NO_CODEGEN}
    assert {each.compiler for each in step.regions()} <= {"eager", "native"}


class Sum(nn.Module):
    def forward(self, x):
        return x.sum()


def test_a_rule_that_declines_says_why(tmp_path):
    model = nn.Linear(6, 6)

    def apply(x):
        flat, row = model(x).flatten(), x[0, :4].as_strided((3, 2), (1, 1)).clone()
        return torch.as_strided_scatter(flat, row, (3, 2), (1, 1)).sum()

    step = treadle.compile(apply, model=model, options=Options(cache_dir=tmp_path))
    with pytest.warns(RuntimeWarning):
        step(torch.randn(4, 6))
    reasons = {each.code: each for each in breaks_of(step.compiled.artifact)}
    assert "places that overlap" in reasons[ReasonCode.REFUSED].reason


def test_each_break_is_reported_once(tmp_path):
    model = nn.Linear(6, 6)

    def apply(x):
        for _ in range(3):
            x = soft(x)
        return model(x).sum()

    step = treadle.compile(apply, model=model, options=Options(cache_dir=tmp_path))
    with pytest.warns(RuntimeWarning) as heard:
        step(torch.randn(4, 6))
    (warning,) = [each for each in heard if "PyTorch kernel" in str(each.message)]
    text = str(warning.message)
    assert "treadle_regions_tests.soft.default x3: TR-313" in text
    assert "x = soft(x)" in text
    assert warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.randn(5, 6))  # another variant, the same break


def test_strict_makes_it_an_error(tmp_path):
    torch.manual_seed(0)
    model = Mixed()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    step = step_of(model, tmp_path, strict=True)
    with pytest.raises(treadle.LoweringError, match=r"TR-302(.|\n)*TR-313"):
        step(*batches()[0])
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])


def test_what_was_asked_for_is_no_warning(tmp_path):
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), Sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = step_of(model, tmp_path, regions=Regions((RegionRule("eager", "gelu*"),)))
        step(*batches()[0])
    assert {each.code for each in breaks_of(step.compiled.artifact)} == {ReasonCode.CHOSEN}


def test_a_registered_lowering_gives_way_to_a_rule(tmp_path, monkeypatch):
    op = torch.ops.treadle_regions_tests.soft.default
    monkeypatch.setitem(registered._meanings, op, torch.tanh)
    for rules, kernels in ((Regions(), 0), (Regions((RegionRule("eager", "*soft*"),)), 1)):
        step = step_of(nn.Sequential(nn.Linear(6, 6), Soft(), Sum()), tmp_path, regions=rules)
        assert step.verify(batches()) is None
        assert len(breaks_of(step.compiled.artifact)) == kernels


def test_a_choice_is_a_fact_of_what_is_cached(tmp_path):
    keys = set()
    for rules in (Regions(), RULES["an operation"], RULES["all"], RULES["an operation"]):
        torch.manual_seed(0)
        step = step_of(nn.Sequential(nn.Linear(6, 6), nn.GELU(), Sum()), tmp_path, regions=rules)
        compiled = step.prepare(*batches()[0])
        keys.add(compiled.key)
    assert len(keys) == 3
    assert compiled.from_cache


def test_the_plan_is_exact_with_a_budget(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), Sum())
    step = step_of(
        model, tmp_path, memory=0.5, regions=Regions((RegionRule("eager", operations="tanh*"),))
    )
    assert step.verify(batches()) is None


def test_handles_name_ranges_of_profiles(tmp_path):
    shown: list[str] = []

    def show(text):
        shown.append(text)
        return f"https://regions/{len(shown) - 1}" if "eager" in text.splitlines()[0] else ""

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), Soft(), nn.Linear(6, 1), Sum())
    regions = Regions(show=show)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        step = step_of(model, tmp_path, regions=regions)
        step(*batches()[0])
    found = step.regions()
    assert shown == [each.text for each in found]
    handles = [each.handle for each in found if each.handle]
    assert handles == [f"https://regions/{each.number}" for each in found if each.reasons]
    with torch.profiler.profile() as profile:
        step(*batches()[0])
    assert set(handles) <= {event.key for event in profile.key_averages()}


class Soft(nn.Module):
    def forward(self, x):
        return soft(x)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_region_by_another_compiler(ahead, tmp_path):
    """One interface: a graph and inputs like those it gets; lazily or ahead, the same function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Tanh(), nn.Linear(6, 1), Sum())
    name = f"here{int(ahead)}"
    taken = []

    def compiler(module, inputs):
        taken.append((module, {is_fake(each) for each in inputs}))
        return module

    treadle.register_region_compiler(name, compiler)
    rules = (RegionRule(name, module="1", ahead=ahead), RegionRule(name, module="2", ahead=ahead))
    step = step_of(model, tmp_path, regions=Regions(rules))
    step.prepare(*batches()[0])
    assert len(taken) == (2 if ahead else 0)
    assert step.verify(batches()) is None
    assert len(taken) == 2  # of the forward pass, and of the backward pass
    assert all(fake == {ahead} for _, fake in taken)
    codes = [str(module.code) for module, _ in taken]
    assert "gelu" in codes[0]
    assert "tanh" in codes[0]
    others = [each for each in step.regions() if each.compiler == name]
    assert len(others) == 2
    _GENERATED.setdefault("codes", []).append(codes)
    assert all(each == codes for each in _GENERATED["codes"])


_GENERATED: dict[str, list[list[str]]] = {}


def test_inductor_takes_a_region(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), Sum())
    rule = RegionRule("inductor", operations="gelu", ahead=True)
    step = step_of(model, tmp_path, regions=Regions((rule,)))
    assert step.verify(batches()) is None
    assert [each.compiler for each in step.regions()].count("inductor") == 1


def test_what_no_compiler_of_regions_may_take(tmp_path):
    def both(module, inputs):
        return module

    treadle.register_region_compiler("anywhere", both)
    with pytest.raises(treadle.LoweringError, match="TR-318"):
        treadle.register_region_compiler("anywhere", both)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), Soft(), Sum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        step = step_of(model, tmp_path, regions=Regions((RegionRule("anywhere"),)))
        assert step.verify(batches()) is None
    taken = [each for each in step.regions() if each.compiler == "anywhere"]
    assert taken
    left = {node.target for each in step.regions() if each not in taken for node in each.nodes}
    assert torch.ops.treadle_regions_tests.soft.default in left
    unknown = step_of(model, tmp_path, regions=Regions((RegionRule("nobody"),)))
    with pytest.raises(treadle.LoweringError, match=r"TR-318(.|\n)*inductor"):
        unknown(*batches()[0])


class Block(nn.Module):
    """A transformer block with one foreign operation."""

    def __init__(self, width=8):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return x + self.down(soft(F.gelu(self.up(x))))


def blocks(count, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(count)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = treadle.compile(
        train, model=model, optimizer=optimizer, options=Options(cache_dir=tmp_path)
    )
    x = torch.randn(2, 3, 8)
    with pytest.warns(RuntimeWarning, match=f"x{count}: TR-313"):
        assert step.verify([(x,)]) is None
    return step


def test_blocks_between_foreign_operations_share_their_kernels(tmp_path):
    functions = []
    for count in (3, 7):
        step = blocks(count, tmp_path)
        regions = step.regions()
        assert sum(each.compiler == "eager" for each in regions) == count
        assert sum(each.compiler == "native" for each in regions) == count + 1
        artifact = step.compiled.artifact
        assert len(artifact.fallbacks) == count
        functions.append(sum(len(each.functions) for each in artifact.sources))
    assert functions[0] == functions[1]


@pytest.mark.parametrize(("name", "compiler", "words"), [
    ("native", len, "'native' is taken"),
    ("inductor", len, "'inductor' is taken"),
    ("my-own", len, "'my-own' has other characters than letters and digits"),
    ("my_own", len, "'my_own' has other characters than letters and digits"),
    (3, len, "3 has other characters than letters and digits"),
    ("mine", "compile", "a str is not a function"),
])  # fmt: skip
def test_compilers_that_cannot_be_registered(name, compiler, words):
    with pytest.raises(treadle.LoweringError, match="TR-318") as caught:
        treadle.register_region_compiler(name, compiler)
    assert words in caught.value.message
    assert caught.value.remedy
