"""``Step.report``: one file that stands alone, with the figures of the compiled step."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import accumulate

import pytest
import torch
from torch import nn

import treadle
from treadle import Options
from treadle.compiler.observed import observed_of
from treadle.compiler.saved_log import read_log, saved_bytes
from treadle.compiler.stored_build import read_artifact
from treadle.report import step_report
from treadle.report.chart import HEIGHT, WIDTH, chart, frontier_chart, series
from treadle.report.stages import ORDER
from treadle.runtime.store.artifact import CallStep, Launch
from treadle.targets.cpu import CPU_MODEL
from treadle.util.sizes import format_bytes

VOID = {"meta", "br"}
NASTY = "a<script>alert('&\")"


class Page(HTMLParser):
    """Text, attributes and the balance of a page."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.bytes, self.attributes = [], [], [], []
        self.words = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.bytes += [int(value) for name, value in attrs if name == "data-bytes"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words))


def report_of(compiled):
    return step_report.report_of(observed_of(compiled, "train"))


def heights(path):
    """The y of a layer's edge at each x where it changes."""
    y, found = 0, []
    for kind, number in re.findall(r"([vM])(?:0,)?(-?\d+)", path):
        y = int(number) if kind == "M" else y + int(number)
        found.append(y)
    return found


def made(tmp_path, *, shapes=None, **options):
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 65), nn.GELU())
    model.add_module(NASTY, nn.Linear(65, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(x):
        loss = model(x).square().sum()  # <b>x</b> & "y"
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    chosen = Options(cache_dir=tmp_path / "cache", **options)
    return treadle.compile(train, model=model, optimizer=optimizer, options=chosen, shapes=shapes)


def read(step, tmp_path, frontier=False):
    path = step.report(tmp_path / "new" / "report.html", frontier=frontier)
    assert path == tmp_path / "new" / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def test_the_file_stands_alone(tmp_path):
    step = made(tmp_path)
    step(torch.randn(129, 33))
    page = read(step, tmp_path)
    assert not {"script", "link", "img", "iframe", "b"} & set(page.tags)
    assert not {"src", "onclick"} & {name for name, _ in page.attributes}
    sections = {f"#{value}" for name, value in page.attributes if name == "id"}
    links = [value for name, value in page.attributes if name == "href"]
    assert len(links) > 8
    assert set(links) <= sections
    style = "".join(page.words)
    assert "url(" not in style
    assert "@import" not in style
    assert {"prefers-color-scheme: dark", "@media print"} <= set(
        re.findall(r"prefers-color-scheme: dark|@media print", style)
    )
    assert {"svg", "details", "table"} <= set(page.tags)
    assert NASTY in page.text
    assert '# <b>x</b> & "y"' in page.text


def test_figures_are_those_of_the_compiled_step(tmp_path):
    step, batch = made(tmp_path, memory="800KiB"), torch.randn(129, 33)
    step(batch)
    step.profile(batch)
    step.measure(batch)
    page, compiled = read(step, tmp_path), step.compiled
    predicted, measured, *others = page.bytes
    sizes = [int(value) for name, value in page.attributes if name == "data-input"]
    assert predicted == compiled.artifact.peak_bytes
    assert measured == compiled.measured_peak
    inputs = list(step.compiled.captured.step.inputs())
    assert len(sizes) == len({entry.role for _, entry in inputs})
    assert sum(sizes) == sum(node.meta["val"].nbytes for node, _ in inputs)
    launches = [each for each in compiled.artifact.steps if isinstance(each, Launch)]
    names = {each.function for each in launches}
    assert sum(others[: len(names)]) == sum(each.bytes_moved for each in launches)
    assert f"{1e3 * sum(compiled.kernel_seconds):.3f} ms in {len(compiled.kernel_seconds)}" in (
        page.text
    )
    assert format_bytes(800 * 1024) in page.text
    assert "not known" not in page.text
    for name in names:
        assert f"void {name}(" in page.text
    for seconds in compiled.seconds.values():
        assert f"{seconds:.3f}" in page.text


def test_an_account_adds_up(tmp_path):
    step, batch = made(tmp_path), torch.randn(77, 33)
    step(batch)
    step.profile(batch)
    told = report_of(step.compiled)
    uses = [*told.kernels, *told.calls, *told.fallbacks]
    assert sum(use.seconds for use in uses) == pytest.approx(told.profiled_seconds)
    steps = step.compiled.artifact.steps
    assert sum(use.launches for use in told.calls) == sum(isinstance(s, CallStep) for s in steps)
    assert told.launches == step.compiled.artifact.kernel_count
    for use in told.kernels:
        assert use.floor_seconds == use.bytes_moved / CPU_MODEL.bandwidth
        assert use.operations
        assert use.source.count('extern "C"') == 1
    operations = {name for use in told.kernels for name in use.operations}
    assert "gelu" in operations
    assert not {name for name in operations if "default" in name}


@pytest.mark.parametrize("options", [{}, {"memory": 0.0}, {"memory": "700KiB"}, {"codegen": False}])
def test_the_timeline_sums_to_the_peak(tmp_path, options):
    step = made(tmp_path, **options)
    compiled = step.prepare(torch.randn(129, 33))
    line = compiled.log.notes.timeline
    called = max(a + b for a, b in zip(line.calls, line.workspace, strict=True))
    fixed = sum(line.inputs) + line.constants + line.arena + line.reserve
    assert fixed + called == compiled.artifact.peak_bytes
    assert line.reserve == CPU_MODEL.reserve
    alive = [sum(each) for each in zip(*line.temporaries.values(), strict=True)]
    assert max(alive, default=0) <= line.arena
    assert {len(each) for each in line.temporaries.values()} <= {len(line.names)}
    told = report_of(compiled)
    parts = series(line, told.roles)
    totals = [sum(each) for each in zip(*(sizes for _, _, sizes in parts), strict=True)]
    drawn = chart(told)
    assert drawn.alive_bytes == max(totals) == totals[drawn.at]
    assert drawn.alive_bytes <= compiled.artifact.peak_bytes
    assert drawn.alive_bytes == sum(layer.at_peak for layer in drawn.layers)
    tops = accumulate(sizes[0] for _, _, sizes in parts)
    for layer, top in zip(drawn.layers, tops, strict=True):
        levels = heights(layer.path)
        assert all(0 <= y <= HEIGHT for y in levels)
        scale = drawn.lines[0].size_bytes / (HEIGHT - drawn.lines[0].y)
        assert (HEIGHT - levels[1]) * scale == pytest.approx(top, abs=0.02 * totals[0])


def test_what_is_not_known_is_said(tmp_path):
    step = made(tmp_path, memory=0.5)
    with pytest.raises(treadle.TreadleError, match="TR-003"):
        step.report(tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
    step.prepare(torch.randn(9, 33))
    page = read(step, tmp_path)
    assert "Step.measure has not run" in page.text
    assert "Step.profile has not run" in page.text
    assert "has not run." in page.text
    assert "ratio 0.5" in page.text


def test_a_step_from_the_cache_tells_as_much(tmp_path):
    batch = torch.randn(129, 33)
    torch.manual_seed(0)
    first, second = made(tmp_path), made(tmp_path)
    first(batch)
    second(batch)
    assert second.compiled.from_cache
    one, two = report_of(first.compiled), report_of(second.compiled)
    assert (one.memory, one.kernels, one.calls) == (two.memory, two.kernels, two.calls)
    assert one.notes.passes == two.notes.passes
    assert [line.split("  ")[0] for line in first.stages().splitlines() if line[0] != " "] == [
        stage.name for stage in ORDER
    ]
    assert re.search(r"plan memory +not run", second.stages())
    assert "the passes are those of the first compile" in second.stages()
    page = read(second, tmp_path)
    assert "found in the cache" in page.text
    assert "circle" in page.tags
    first.save(tmp_path / "saved")
    made_again = made(tmp_path / "elsewhere")
    loaded = treadle.load(
        tmp_path / "saved",
        made_again._step.function,
        model=made_again._step.models,
        optimizer=made_again._step.optimizers,
        options=Options(cache_dir=tmp_path / "third"),
    )
    loaded(batch)
    assert "found in the cache, or in a saved step" in read(loaded, tmp_path).text


def test_notes_survive_their_way_through_a_file(tmp_path):
    compiled = made(tmp_path, memory="700KiB").prepare(torch.randn(129, 33))
    entry = saved_bytes(compiled.artifact, compiled.log)
    artifact, log = read_artifact(entry), read_log(entry)
    assert log.notes == compiled.log.notes
    assert artifact.sources == compiled.artifact.sources
    (source, *_) = artifact.sources
    begin, end = source.spans[0]
    assert source.function(source.functions[0]) == source.text[begin:end]


def test_pytorchs_kernels_only(tmp_path):
    step = made(tmp_path, codegen=False)
    step(torch.randn(129, 33))
    page = read(step, tmp_path)
    assert "the step runs on PyTorch's kernels only" in page.text
    assert step.compiled.artifact.fallbacks[0].reason in page.text
    assert "circle" in page.tags


def test_dynamic_shapes_recompiles_and_largest_sizes(tmp_path):
    shapes = treadle.dynamic({"x": ("rows", None)}, rows=(2, 300))
    step = made(tmp_path, shapes=shapes)
    for rows in (19, 53):
        step(torch.randn(rows, 33))
    compiled, page = step.compiled, read(step, tmp_path)
    assert compiled.pattern is not None
    assert "at the largest sizes" in page.text
    assert "rows" in page.text
    for why in step.recompiles:
        assert why in page.text
    batch = next(e for e in report_of(compiled).inputs if e.role == "batch")
    assert batch.size_bytes == 53 * 33 * 4
    line = compiled.log.notes.timeline
    assert 300 * 33 * 4 in line.inputs


def test_fallbacks_and_their_reasons(tmp_path):
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        loss = (model(x) * torch.special.bessel_j0(x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    options = Options(cache_dir=tmp_path / "cache")
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    step(torch.randn(6, 6))
    fallbacks = step.compiled.artifact.fallbacks
    page = read(step, tmp_path)
    assert fallbacks
    for each in fallbacks:
        assert each.op in page.text
        assert re.sub(r"\s+", " ", each.reason) in page.text


def test_paths_that_cannot_be_written(tmp_path):
    step = made(tmp_path)
    step.prepare(torch.randn(3, 33))
    (tmp_path / "file").write_text("here")
    long, null = tmp_path / ("x" * 300), tmp_path / "a\0b"
    for path in (tmp_path, tmp_path / "file" / "report.html", long, null):
        with pytest.raises(treadle.TreadleError, match="TR-004"):
            step.report(path)
    assert (tmp_path / "file").read_text() == "here"
    assert step.report(str(tmp_path / "file")).read_text().startswith("<!DOCTYPE html>")
    assert {each.name for each in tmp_path.iterdir()} == {"cache", "file"}


def test_an_optimizer_that_steps_after_the_graph_is_a_fallback(tmp_path):
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            if self.param_groups[0]["params"][0].grad.norm().item() < 1e9:
                super().step(closure)

    model = nn.Linear(6, 6)
    optimizer = Own(model.parameters(), lr=0.1)

    def train(x):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    options = Options(cache_dir=tmp_path / "cache")
    step = treadle.compile(train, model=model, optimizer=optimizer, options=options)
    step(torch.randn(3, 6))
    step.profile(torch.randn(3, 6))
    text = read(step, tmp_path).text
    assert "Own.step" in text
    assert "TR-105" in text
    assert "Own.step x1: TR-105" in step.explain()


def test_many_steps_share_columns_and_the_peak_keeps_its_own(tmp_path):
    compiled = made(tmp_path).prepare(torch.randn(9, 33))
    told = report_of(compiled)
    line = told.memory.timeline
    count, at = 5003, 3777
    long = replace(
        line,
        names=tuple(f"k{i}" for i in range(count)),
        phases=("forward",) * count,
        temporaries={"forward": tuple(7 * line.arena if i == at else 3 for i in range(count))},
        calls=(0,) * count,
        workspace=(0,) * count,
        peak_at=at,
    )
    drawn = chart(replace(told, memory=replace(told.memory, timeline=long)))
    assert (drawn.steps, drawn.at_name) == (count, f"k{at}")
    assert drawn.x == pytest.approx(WIDTH * at / count, abs=WIDTH / 400)
    assert min(heights(drawn.layers[-1].path)) == round(drawn.y)
    nothing = replace(line, names=(), phases=())
    assert chart(replace(told, memory=replace(told.memory, timeline=nothing))) is None


def test_other_budgets_are_drawn(tmp_path):
    step = made(tmp_path)
    step(torch.randn(513, 33))
    page = read(step, tmp_path, frontier=True)
    assert "slower" in page.text
    assert "memory=0.0" in page.text
    assert "a plan" in page.text
    assert "at least" in page.text
    points = [(100, 1.0, 50), (60, 2.0, 45), (40, 5.0, 30)]
    drawn = frontier_chart(points, 60)
    xs, ys = [dot.x for dot in drawn.dots], [dot.y for dot in drawn.dots]
    assert xs == sorted(xs, reverse=True)
    assert ys == sorted(ys, reverse=True)
    assert drawn.chosen_x == xs[1]
    assert frontier_chart(points[:1], 60) is None


def test_phases_add_up_and_the_optimizer_has_its_line(tmp_path):
    step, batch = made(tmp_path), torch.randn(77, 33)
    step(batch)
    step.profile(batch)
    told = report_of(step.compiled)
    assert [phase.name for phase in told.phases] == ["forward", "backward", "optimizer"]
    assert sum(p.seconds for p in told.phases) == pytest.approx(told.profiled_seconds)
    assert sum(p.floor_seconds for p in told.phases) == pytest.approx(told.floor_seconds)
    counted = sum(p.launches + p.library_calls + p.fallbacks for p in told.phases)
    assert counted == len(told.host_steps)
    optimizer = [each for each in told.kernels if each.phase == "optimizer"]
    assert optimizer
    assert all("optimizer.step()" in each.where for each in optimizer)
    products = [each for each in told.calls if each.flops]
    assert {each.name for each in products} >= {"aten.addmm.default"}
    assert all(each.floor_seconds > 0 for each in products)
    inner = products[0]
    assert inner.where.endswith('loss = model(x).square().sum()  # <b>x</b> & "y"')


def test_one_of_a_kind_is_singular():
    model = nn.Linear(8, 3)
    step = treadle.compile(lambda x: model(x).relu().sum(), model=model)
    step(torch.randn(4, 8))
    text = step.explain()
    assert "kernels: 1 launch of 1 generated function (1 loop); 1 library call\n" in text
    assert "forward    1 launch, 1 library call\n" in text
