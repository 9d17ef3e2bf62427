"""``Step.save`` and ``treadle.load``: compiled once, found again, never run for another step."""

import copy

import pytest
import torch
from torch import nn

import treadle
from treadle.options import Options
from treadle.runtime.store.bundle import Bundle, read_bundle, write_bundle


def make(hidden=17, scale=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, hidden), nn.GELU(), nn.Linear(hidden, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(x):
        loss = scale * model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train, model, optimizer


def saved(tmp_path, *batches, **options):
    train, model, optimizer = make()
    chosen = Options(cache_dir=tmp_path / "first", **options)
    step = treadle.compile(train, model=model, optimizer=optimizer, options=chosen)
    losses = [step(each) for each in batches]
    step.save(tmp_path / "step")
    return step, losses


def loaded(tmp_path, path="step", made=None):
    train, model, optimizer = made or make()
    options = Options(cache_dir=tmp_path / "second")  # another machine's, so to speak
    return treadle.load(tmp_path / path, train, model=model, optimizer=optimizer, options=options)


@pytest.mark.parametrize("options", [{}, {"codegen": False}, {"memory": 0.0}, {"memory": "1MiB"}])
def test_a_loaded_step_compiles_nothing_and_gives_the_same(tmp_path, options):
    batches = [torch.randn(n, 5) for n in (4, 1, 7)]
    first, losses = saved(tmp_path, *batches, **options)
    step = loaded(tmp_path)
    for each, loss in zip(batches, losses, strict=True):
        assert torch.equal(step(each), loss)
        assert step.compiled.from_cache
    assert step.options.memory == first.options.memory
    assert step.graph("kernels") == first.graph("kernels")
    assert not [why for why in step.recompiles if "saved" in why]
    libraries = {path.name for path in (tmp_path / "first").rglob("*.so")}
    assert {path.name for path in (tmp_path / "second").rglob("*.so")} == libraries


@pytest.mark.parametrize(
    "made", [make(hidden=19), make(scale=2.0)], ids=["another model", "another function"]
)
def test_another_step_is_compiled_and_says_why(tmp_path, made):
    saved(tmp_path, torch.randn(4, 5))
    step = loaded(tmp_path, made=made)
    twin, x = copy.deepcopy(made[1]), torch.randn(4, 5)
    loss = step(x)
    assert not step.compiled.from_cache
    assert "the saved step does not fit: the step itself" in step.recompiles[0]
    assert step.recompiles[0] in step.explain()
    assert loss == pytest.approx((2.0 if made[1][0].out_features == 17 else 1.0)
                                 * twin(x).square().mean().item())  # fmt: skip


def test_another_shape_is_compiled_and_the_file_stays_as_it_is(tmp_path):
    saved(tmp_path, torch.randn(4, 5))
    before = (tmp_path / "step").read_bytes()
    step = loaded(tmp_path)
    step(torch.randn(6, 5))
    assert "shapes" in step.recompiles[0]
    step(torch.randn(4, 5))
    assert step.compiled.from_cache
    assert (tmp_path / "step").read_bytes() == before
    step.save(tmp_path / "step")
    again = loaded(tmp_path)
    for n in (4, 6):  # what serves 6 serves many sizes
        again(torch.randn(n, 5))
        assert again.compiled.from_cache


def test_what_changed_is_named(tmp_path):
    saved(tmp_path, torch.randn(4, 5))
    found = read_bundle(tmp_path / "step")
    other = [{**found.manifest["variants"][0], "torch": "1.13.0", "threads": "96"}]
    write_bundle(tmp_path / "other", Bundle({**found.manifest, "variants": other}, found.entries))
    step = loaded(tmp_path, "other")
    step(torch.randn(4, 5))
    assert "PyTorch" in step.recompiles[0]
    assert "threads" in step.recompiles[0]
    assert "the step itself" not in step.recompiles[0]


def test_nothing_can_be_saved_before_the_first_call(tmp_path):
    train, model, optimizer = make()
    step = treadle.compile(train, model=model, optimizer=optimizer)
    with pytest.raises(treadle.TreadleError, match="TR-003"):
        step.save(tmp_path / "step")


@pytest.mark.parametrize(
    "bundle",
    [
        Bundle({}, {}),
        Bundle({"options": {"cats": 3}, "variants": []}, {}),
        Bundle({"options": {}, "variants": [3]}, {}),
        Bundle({"options": {}, "variants": []}, {"../../evil": b"x"}),
        Bundle({"options": {}, "variants": []}, {"a" * 63: b"x"}),
    ],
)
def test_a_file_that_holds_no_step_is_refused(tmp_path, bundle):
    write_bundle(tmp_path / "step", bundle)
    with pytest.raises(treadle.RuntimeFailure, match="TR-405") as caught:
        loaded(tmp_path)
    assert caught.value.remedy
    assert not (tmp_path / "second").exists()


def test_a_missing_file_is_an_error_with_a_code(tmp_path):
    with pytest.raises(treadle.RuntimeFailure, match="TR-405") as caught:
        loaded(tmp_path, "nothing")
    assert (
        caught.value.message == f"{tmp_path / 'nothing'} cannot be read: No such file or directory"
    )
    assert "Step.save" in caught.value.remedy


def test_a_saved_payload_of_another_version_is_compiled_again(tmp_path):
    """Whole as a file, but an artifact that this version cannot read."""
    first, (loss,) = saved(tmp_path, torch.ones(4, 5))
    found = read_bundle(tmp_path / "step")
    entries = {**found.entries, first.compiled.key: b'{"artifact": {"format": 0}}'}
    write_bundle(tmp_path / "step", Bundle(found.manifest, entries))
    step = loaded(tmp_path)
    assert torch.equal(step(torch.ones(4, 5)), loss)
    assert not step.compiled.from_cache
