"""Several steps, several threads, and the end of a step."""

import copy
import gc
import pickle
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.fx.experimental import proxy_tensor

import treadle
from contract.contract_help import training
from treadle.compat import tracing
from treadle.graph.rewrite import inline, pattern_programs, torch_programs


def stepping(model, optimizer, scale=1.0):
    return training(lambda x: (model(x) * scale).square().mean(), optimizer)


def pair():
    model = nn.Linear(5, 5)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, twin)]
    return (model, optimizers[0]), (twin, optimizers[1])


def test_two_steps_share_a_model():
    ours, theirs = pair()
    scales = (1.0, 2.0)
    steps = [
        treadle.compile(stepping(*ours, scale), model=ours[0], optimizer=ours[1])
        for scale in scales
    ]
    for _ in range(4):
        x = torch.randn(4, 5)
        for step, scale in zip(steps, scales, strict=True):
            torch.testing.assert_close(step(x), stepping(*theirs, scale)(x))
    torch.testing.assert_close(ours[0].weight, theirs[0].weight)


def test_calls_from_several_threads_are_one_after_another():
    ours, theirs = pair()
    step = treadle.compile(stepping(*ours), model=ours[0], optimizer=ours[1])
    x = torch.randn(4, 5)
    threads = [threading.Thread(target=lambda: [step(x) for _ in range(10)]) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for _ in range(30):
        stepping(*theirs)(x)
    torch.testing.assert_close(ours[0].weight, theirs[0].weight)


def test_two_steps_in_two_threads():
    """Each with a model of its own, compiled and run at the same time."""
    work = [pair() for _ in range(2)]
    x = torch.randn(4, 5)

    def run(model, optimizer):
        step = treadle.compile(stepping(model, optimizer), model=model, optimizer=optimizer)
        for _ in range(10):
            step(x)

    threads = [threading.Thread(target=run, args=ours) for ours, _ in work]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for ours, theirs in work:
        for _ in range(10):
            stepping(*theirs)(x)
        torch.testing.assert_close(ours[0].weight, theirs[0].weight)


def test_a_deleted_step_gives_its_memory_back_at_once():
    model = nn.Sequential(nn.Linear(50, 500), nn.Dropout(0.1), nn.Linear(500, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    function = stepping(model, optimizer)
    step = treadle.compile(function, model=model, optimizer=optimizer)
    step(torch.randn(64, 50))
    arena = step.compiled.executable.held()[0]
    gone = [weakref.ref(each) for each in (step, step.compiled.executable, arena)]
    gc.collect()
    gc.disable()
    try:
        del step, arena
        assert [each() for each in gone] == [None] * 3
    finally:
        gc.enable()
    held = weakref.ref(model)
    del model, optimizer, function
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_step_is_not_copied(copied):
    model = nn.Linear(2, 2)
    step = treadle.compile(lambda x: model(x).sum(), model=model)
    with pytest.raises(treadle.TreadleError, match="TR-005"):
        copied(step)


def test_one_thread_traces_at_a_time(monkeypatch):
    """Programs that are put into a graph while it is compiled are traced as well."""
    real, inside, met = proxy_tensor.make_fx, set(), []

    def watched(*args, **kwargs):
        made = real(*args, **kwargs)

        def run(*inputs):
            met.append(inside - {threading.get_ident()})
            inside.add(threading.get_ident())
            time.sleep(0.02)
            try:
                return made(*inputs)
            finally:
                inside.discard(threading.get_ident())

        return run

    for module in (tracing, inline, torch_programs):
        if hasattr(module, "make_fx"):
            monkeypatch.setattr(module, "make_fx", watched)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 2)) for _ in range(3)]
    programs = pattern_programs
    for function in (programs.traced, programs.returned_by, programs.roots_of, programs.pattern_of):
        function.cache_clear()  # as in a process that has compiled nothing yet
    served = []

    def train(model):
        step = treadle.compile(lambda x: model(x).square().sum().backward(), model=model)
        step(torch.randn(3, 4))
        served.append(step)

    threads = [threading.Thread(target=train, args=(each,)) for each in models]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(served) == len(models)
    assert len(met) >= len(models)
    assert not any(met)
