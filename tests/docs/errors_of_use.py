"""TR-0xx and TR-2xx to TR-4xx as programs: use, plans, lowering and run time."""

import copy
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import treadle
from contract.contract_help import training
from docs.error_example import command, compiled, run, sgd, shows, train

X = torch.randn(6, 4)


@torch.library.custom_op("error_examples::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


class Twice(nn.Module):
    """A layer, and an operation that may have any side effect."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * twice(x)


def small() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer, and the step that trains it."""
    model = nn.Linear(4, 3)
    optimizer = sgd(model)
    return model, optimizer, training(lambda x: model(x).square().mean(), optimizer)


def called() -> Any:
    """A compiled step after a call."""
    model, optimizer, step = small()
    made = compiled(step, model=model, optimizer=optimizer)
    made(X)
    return made


@shows("TR-001", "treadle.Options(max_cached=0)", "choose a value from")
def an_option(mended: bool, folder: Path) -> None:
    treadle.Options(max_cached=1 if mended else 0)


@shows("TR-001", "TREADLE_DEBUG=yes", "choose a value from")
def a_variable(mended: bool, folder: Path) -> None:
    model, optimizer, step = small()
    with mock.patch.dict(os.environ, {"TREADLE_DEBUG": "0" if mended else "yes"}):
        treadle.compile(step, model=model, optimizer=optimizer)


@shows("TR-002", 'step.graph("optimized")', "`planned`")
def a_stage(mended: bool, folder: Path) -> None:
    called().graph("planned" if mended else "optimized")


@shows("TR-003", "treadle.compile(f, model=model).explain()", "call `step.prepare(*batch)`")
def explain_before_a_call(mended: bool, folder: Path) -> None:
    model, optimizer, step = small()
    made = compiled(step, model=model, optimizer=optimizer)
    if mended:
        made.prepare(X)
    made.explain()


@shows("TR-004", 'step.report("/tmp")', "the path of a writable file")
def a_report_as_a_directory(mended: bool, folder: Path) -> None:
    called().report(folder / "report.html" if mended else folder, frontier=False)


@shows("TR-005", "copy.deepcopy(step)", "compile a step for the copied model")
def a_copied_step(mended: bool, folder: Path) -> None:
    made = called()
    if not mended:
        copy.deepcopy(made)
    model = copy.deepcopy(nn.Linear(4, 3))
    optimizer = sgd(model)
    run(training(lambda x: model(x).sum(), optimizer), X, model=model, optimizer=optimizer)


@shows("TR-005", "pickle.dumps(step)", "`step.save` and `treadle.load`")
def a_pickled_step(mended: bool, folder: Path) -> None:
    made = called()
    if not mended:
        pickle.dumps(made)
    made.save(folder / "step")
    model, optimizer, step = small()
    treadle.load(folder / "step", step, model=model, optimizer=optimizer)(X)


@shows("TR-007", "edited by hand", '`step.graph("captured")`')
def a_graph_with_a_slip(mended: bool, folder: Path) -> None:
    file, text = folder / "graph.txt", called().graph("captured")
    file.write_text(text if mended else text.replace("return", "retrun"))
    command("reduce", file, "--output", folder / "small.txt")


@shows("TR-008", "treadle reduce missing.txt", "check the path")
def a_missing_graph(mended: bool, folder: Path) -> None:
    file = folder / "graph.txt"
    file.write_text(called().graph("captured"))
    command("reduce", file if mended else folder / "missing.txt")


@shows("TR-201", 'memory="60%"', '"12GiB"')
def a_percentage(mended: bool, folder: Path) -> None:
    model, optimizer, step = small()
    run(step, X, model=model, optimizer=optimizer, memory="12GiB" if mended else "60%")


@shows("TR-201", 'memory="0.5"', "a ratio is a float")
def a_ratio_as_text(mended: bool, folder: Path) -> None:
    model, optimizer, step = small()
    run(step, X, model=model, optimizer=optimizer, memory=0.6 if mended else "0.5")


@shows("TR-201", "memory=1`", "a ratio is a float from `0.0` to `1.0`")
def one_byte(mended: bool, folder: Path) -> None:
    model, optimizer, step = small()
    run(step, X, model=model, optimizer=optimizer, memory=1.0 if mended else 1)


@shows("TR-201", "memory=1.5", "a ratio is a float from `0.0` to `1.0`")
def a_ratio_above_one(mended: bool, folder: Path) -> None:
    model, optimizer, step = small()
    run(step, X, model=model, optimizer=optimizer, memory=1.0 if mended else 1.5)


@shows("TR-202", 'memory="1MiB"', "copy the size from the message")
def a_budget_that_is_too_small(mended: bool, folder: Path) -> None:
    model = nn.Linear(1024, 2560)
    optimizer = sgd(model)
    step = training(lambda x: model(x).square().mean(), optimizer)
    given = {"model": model, "optimizer": optimizer}
    x = torch.randn(2, 1024)
    try:
        run(step, x, memory="1MiB", **given)
    except treadle.PlanError as error:
        if not mended:
            raise
        size = error.remedy.split('"')[1]
        run(step, x, memory=size, **given)


MAKE = """
import torch
from torch import nn

def make():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    %s

    def step(x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, model, optimizer, torch.randn(5, 4)
"""


@shows("TR-203", "treadle plan train.py", "a function without arguments")
def a_command_without_a_function(mended: bool, folder: Path) -> None:
    file = folder / "train.py"
    file.write_text(MAKE % "")
    command("plan", f"{file}:make" if mended else file)


@shows("TR-204", 'treadle.plan(..., device="v100")', "choose a device from the message")
def an_unknown_device(mended: bool, folder: Path) -> None:
    model, optimizer, step = small()
    device = "h200" if mended else "v100"
    treadle.plan(step, X, model=model, optimizer=optimizer, device=device, points=2)


@shows("TR-205", "it keeps a view", "for which `problem.allows(kept)` is true")
def a_solver(mended: bool, folder: Path) -> None:
    def keep_all(problem: Any, capacity: int) -> Any:
        every = set(range(len(problem.sizes)))
        return problem.start if mended and not problem.allows(every) else every

    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)])
    options = treadle.Options(codegen=False, planner=treadle.Planner(solver=keep_all))
    train(lambda x: model(x).square().mean(), torch.randn(64, 16), model=model, memory=0.3,
          options=options)  # fmt: skip


@shows("TR-206", "`make` raises a `KeyError`", "run the function without treadle")
def a_function_that_fails(mended: bool, folder: Path) -> None:
    file = folder / "train.py"
    file.write_text(MAKE % ("" if mended else "{}['width']"))
    command("plan", f"{file}:make")


@shows("TR-207", "a custom operation without a lowering", "compile with `dynamic=False`")
def a_budget_of_many_sizes(mended: bool, folder: Path) -> None:
    torch.compiler.reset()
    model = Twice()
    made = torch.compile(model, backend="treadle", dynamic=not mended, options={"memory": "1GiB"})
    made(X).sum().backward()


@shows("TR-209", "treadle.Planner(estimator=lambda operation: None)", "a finite number")
def an_estimator(mended: bool, folder: Path) -> None:
    model, optimizer, step = small()
    planner = treadle.Planner(estimator=lambda operation: 1e-6 if mended else None)
    treadle.plan(step, X, model=model, optimizer=optimizer, points=2,
                 options=treadle.Options(planner=planner))  # fmt: skip


@shows("TR-211", 'treadle.Planner(estimator="measured")', 'the estimator `"roofline"`')
def measured_for_another_device(mended: bool, folder: Path) -> None:
    model, optimizer, step = small()
    planner = treadle.Planner(estimator="roofline" if mended else "measured")
    treadle.plan(step, X, model=model, optimizer=optimizer, device="h200", points=2,
                 options=treadle.Options(planner=planner))  # fmt: skip


@shows("TR-212", "for a model with `BatchNorm`", "use GroupNorm or LayerNorm")
def micro_batches_of_a_batch_norm(mended: bool, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3) if mended else nn.BatchNorm1d(3))
    train(lambda x: model(x).square().mean(), torch.randn(8, 4), model=model, micro_batch=4)


@shows("TR-213", 'numerics="fp8"', "leave `numerics` out there")
def float8_on_a_cpu(mended: bool, folder: Path) -> None:
    model, optimizer, step = small()
    given = {} if mended else {"numerics": "fp8"}
    run(step, X, model=model, optimizer=optimizer, **given)


@shows("TR-301", "a custom operation that returns an `int`", "run it outside the step")
def an_operation_without_a_tensor(mended: bool, folder: Path) -> None:
    @torch.library.custom_op(f"error_examples::size{mended}", mutates_args=())
    def size(x: torch.Tensor) -> int:
        return len(x)

    size.register_fake(lambda x: 1)
    model = nn.Linear(4, 3)
    if mended:
        run(lambda x, n: model(x).sum() * n, X, size(X), model=model)
    else:
        run(lambda x: model(x).sum() * size(x), X, model=model)


@shows("TR-302", "a custom operation without a lowering", "leave `strict` off")
def strict(mended: bool, folder: Path) -> None:
    model = nn.Linear(4, 3)
    run(lambda x: twice(model(x)).sum(), X, model=model, strict=not mended,
        options=treadle.Options())  # fmt: skip


@shows("TR-307", "the same operator twice", "follow the message")
def a_lowering_twice(mended: bool, folder: Path) -> None:
    @torch.library.custom_op(f"error_examples::thrice{mended}", mutates_args=())
    def thrice(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    thrice.register_fake(torch.empty_like)
    operator = thrice._opoverload
    for _ in range(1 if mended else 2):
        treadle.register_lowering(operator, lambda x: x * 3)
    model = nn.Linear(4, 3)
    run(lambda x: thrice(model(x)).sum(), X, model=model)


@shows("TR-318", 'RegionRule("tvm")', "register it first")
def a_region_compiler(mended: bool, folder: Path) -> None:
    model, optimizer, step = small()
    regions = treadle.Regions((treadle.RegionRule("eager" if mended else "tvm"),))
    run(step, X, model=model, optimizer=optimizer, options=treadle.Options(regions=regions))


def whitened() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A step that factorises a matrix after its update."""
    model, optimizer, step = small()

    def whole(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        step(x)
        return torch.linalg.cholesky(a).sum()

    return model, optimizer, whole


@shows("TR-403", "the first call computes `torch.linalg.cholesky`", "fix the values")
def cholesky_of_the_first_call(mended: bool, folder: Path) -> None:
    model, optimizer, step = whitened()
    run(step, X, torch.eye(3) if mended else -torch.eye(3), model=model, optimizer=optimizer)


@shows("TR-406", "`torch.linalg.cholesky` fails in a later call", "load the last checkpoint")
def cholesky_of_a_later_call(mended: bool, folder: Path) -> None:
    model, optimizer, step = whitened()
    made = compiled(step, model=model, optimizer=optimizer)
    made(X, torch.eye(3))
    checkpoint = copy.deepcopy(model.state_dict())
    try:
        made(X, -torch.eye(3))
    except treadle.RuntimeFailure:
        if not mended:
            raise
    model.load_state_dict(checkpoint)
    assert made.verify([(X, torch.eye(3))]) is None
    made(X, torch.eye(3))


@shows("TR-404", "a full disk", "set `TREADLE_CACHE_DIR`")
def a_cache_that_cannot_be_written(mended: bool, folder: Path) -> None:
    file = folder / "file"  # no directory can be made below it
    file.write_text("")
    model, optimizer, step = small()
    place = folder / "cache" if mended else file / "cache"
    with mock.patch("tempfile.tempdir", str(file)):
        compiled(step, model=model, optimizer=optimizer,
                 options=treadle.Options(codegen=False, cache_dir=place))(X)  # fmt: skip


@shows("TR-405", "`treadle.load` of a truncated file", "save the step again")
def a_truncated_file(mended: bool, folder: Path) -> None:
    made, file = called(), folder / "step"
    made.save(file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    if mended:
        made.save(file)
    model, optimizer, step = small()
    treadle.load(file, step, model=model, optimizer=optimizer)(X)


@shows("TR-407", "token 50257 for `nn.Embedding(50257, 768)`", "fix the batch")
def a_token_out_of_range(mended: bool, folder: Path) -> None:
    model = nn.Embedding(50257, 8)
    made = compiled(lambda tokens: model(tokens).sum(), model=model)
    made(torch.tensor([0, 50256 if mended else 50257]))


@shows("TR-407", "a label that is not a class", "fix the batch")
def a_label_out_of_range(mended: bool, folder: Path) -> None:
    model = nn.Linear(4, 3)
    made = compiled(lambda x, y: F.cross_entropy(model(x), y), model=model)
    made(X, torch.tensor([0, 1, 2, 0, 1, 2 if mended else 3]))


@shows("TR-409", "then `loss.backward()`", "inside the function")
def backward_outside(mended: bool, folder: Path) -> None:
    model, optimizer, step = small()
    if mended:
        run(step, X, model=model, optimizer=optimizer)
    else:
        compiled(lambda x: model(x).sum(), model=model)(X).backward()


@shows("TR-550", 'step.simulate(ranks={"dp": 0})', "the number of ranks of each group")
def no_ranks(mended: bool, folder: Path) -> None:
    called().simulate(ranks=2 if mended else {"dp": 0})


def carrying(*carries: treadle.Carry) -> dict[str, Any]:
    return {"options": treadle.Options(codegen=False, carry=carries)}


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


@shows("TR-530", '`Carry("encoder.*")`', "choose from the parameters")
def carry_nothing(mended: bool, folder: Path) -> None:
    model = chain()
    carry = carrying(treadle.Carry("0.*" if mended else "encoder.*"))
    train(lambda x: model(x).sum(), X, model=model, **carry)


@shows("TR-531", "a moving average of the parameter", "move that out of the step")
def carry_what_is_read(mended: bool, folder: Path) -> None:
    model = chain()
    optimizer, average = sgd(model), torch.zeros(4, 4)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not mended:
            with torch.no_grad():
                average.lerp_(model[0].weight, 0.1)

    run(step, X, model=model, optimizer=optimizer, **carrying(treadle.Carry("0.*")))


@shows("TR-532", "the step returns the parameter itself", "return something else")
def carry_and_return(mended: bool, folder: Path) -> None:
    model = chain()
    optimizer = sgd(model)

    def step(x: torch.Tensor) -> Any:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return None if mended else model[0].weight

    run(step, X, model=model, optimizer=optimizer, **carrying(treadle.Carry("0.*")))


@shows("TR-533", '`before="head"`', "leave `before` out")
def carry_before_a_later_module(mended: bool, folder: Path) -> None:
    model = chain()
    carry = treadle.Carry("0.*") if mended else treadle.Carry("0.*", before="2")
    train(lambda x: model(x).sum(), X, model=model, **carrying(carry))


@shows("TR-534", "`clip_grad_norm_` over several parameters", "clip each gradient separately")
def carry_what_is_clipped(mended: bool, folder: Path) -> None:
    model = chain()
    optimizer = sgd(model)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        for group in [[p] for p in model.parameters()] if mended else [[*model.parameters()]]:
            torch.nn.utils.clip_grad_norm_(group, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    run(step, X, model=model, optimizer=optimizer, **carrying(treadle.Carry("0.*")))


@shows("TR-535", '`Carry("*", before="hed")`', "fix the path")
def carry_before_no_module(mended: bool, folder: Path) -> None:
    model = chain()
    carry = treadle.Carry("0.*", before="0" if mended else "hed")
    train(lambda x: model(x).sum(), X, model=model, **carrying(carry))


@shows("TR-537", "`shapes=` with `Options(carry=...)`", "leave one of them out")
def carry_for_many_sizes(mended: bool, folder: Path) -> None:
    model = chain()
    shapes = {} if mended else {"shapes": treadle.dynamic({"x": ("rows",)}, rows=(2, 8))}
    optimizer = sgd(model)
    step = training(lambda x: model(x).sum(), optimizer)

    def named(x: torch.Tensor) -> torch.Tensor:
        return step(x)

    run(named, X, model=model, optimizer=optimizer, **carrying(treadle.Carry("0.*")), **shapes)


@shows("TR-542", "`p.data.mul_(0.5)` with a `p.data` from before", "call `step.flush()` before")
def carry_and_write_through_an_alias(mended: bool, folder: Path) -> None:
    model = chain()
    optimizer = sgd(model)
    held = model[0].weight.data
    step = training(lambda x: model(x).sum(), optimizer)
    made = compiled(step, model=model, optimizer=optimizer, **carrying(treadle.Carry("0.*")))
    made(X)
    if mended:
        made.flush()
    held.mul_(0.5)
    try:
        made(X)
    finally:
        made.flush()
    made(X)
