"""TR-1xx as programs: steps that cannot be captured, and the same after the remedy."""

import os
import random
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import treadle
from contract.contract_help import training
from docs.error_example import EagerSGD, compiled, run, sgd, shows, train

X = torch.randn(6, 4)
OTHER = "cuda" if torch.cuda.is_available() else "meta"


def net() -> nn.Module:
    return nn.Linear(4, 3)


@shows("TR-101", "model=nn.DataParallel(net)", "pass the wrapped module")
def data_parallel(mended: bool, folder: Path) -> None:
    inner = net()
    model = inner if mended else nn.DataParallel(inner)
    train(lambda x: model(x).sum(), X, model=model)


@shows("TR-102", "`range(int(tensor))` with `strict=True`", "leave `strict` off")
def a_range_of_a_tensor(mended: bool, folder: Path) -> None:
    model = net()

    def loss_of(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        h = model(x).sum()
        total = torch.zeros(())
        for _ in range(int(n)):
            total = total + h
        return total

    train(loss_of, X, torch.tensor(3), model=model, strict=not mended)


@shows("TR-102", '`f"{loss:.2f}" == old`', "return the tensor and read it outside")
def a_comparison_of_text(mended: bool, folder: Path) -> None:
    model, old = net(), "1.00"

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        if not mended and f"{loss:.2f}" == old:
            return loss * 2
        return loss

    loss = run(step, X, model=model)
    assert f"{loss:.2f}" != old


@shows("TR-102", "np.unique(y.numpy())", "return the tensor and read it outside")
def an_array(mended: bool, folder: Path) -> None:
    model = net()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = model(x).sum()
        return (loss, y * 1) if mended else loss * len(np.unique((y * 1).numpy()))

    run(step, X, torch.tensor([1, 2, 2]), model=model)


@shows("TR-103", "`optimizer.add_param_group(...)` after `compile`", "and compile after that")
def a_group_after_the_compile(mended: bool, folder: Path) -> None:
    model, scale = net(), nn.Parameter(torch.ones(3))
    optimizer = sgd(model)
    step = training(lambda x: (model(x) * scale).sum(), optimizer)
    given = {"model": model, "optimizer": optimizer}
    if mended:
        optimizer.add_param_group({"params": [scale]})
        run(step, X, **given)
        return
    made = compiled(step, **given)
    optimizer.add_param_group({"params": [scale]})
    made(X)


@shows("TR-103", "load_state_dict(..., assign=True)", "from `model.parameters()`")
def a_model_with_other_parameters(mended: bool, folder: Path) -> None:
    model = net()
    held: list[torch.optim.Optimizer] = [sgd(model)]

    def step(x: torch.Tensor) -> torch.Tensor:
        return training(lambda x: model(x).sum(), held[0])(x)

    made = compiled(step, model=model, optimizer=held[0])
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()},
                          assign=True)  # fmt: skip
    if mended:
        held[0] = sgd(model)
        made = compiled(step, model=model, optimizer=held[0])
    made(X)


@shows("TR-104", '`model.head.to("cuda")`', "move the model to one device")
def two_devices(mended: bool, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    if not mended:
        model[1].to(OTHER)
    train(lambda x: model(x).sum(), X, model=model)


@shows("TR-105", "`torch.optim.LBFGS` with `step.prepare(x)`", "call the step instead")
def lbfgs(mended: bool, folder: Path) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def step(x: torch.Tensor) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    made = compiled(step, model=model, optimizer=optimizer)
    (made if mended else made.prepare)(X)


@shows("TR-106", "`scaler.step(optimizer)` without `scaler.update()`", "`step` and `update`")
def a_scaler_without_an_update(mended: bool, folder: Path) -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu")
    optimizer = sgd(model)

    def step(x: torch.Tensor) -> None:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        if mended:
            scaler.update()
        optimizer.zero_grad()

    run(step, X, model=model, optimizer=optimizer)


@shows("TR-108", "treadle.compile(f, model=model.parameters())", "the objects themselves")
def parameters_as_the_model(mended: bool, folder: Path) -> None:
    model = net()
    run(lambda x: model(x).sum(), X, model=model if mended else model.parameters())


@shows("TR-109", "two calls of `step()`", "a function that calls it once")
def two_updates_in_eager(mended: bool, folder: Path) -> None:
    model = net()
    optimizer = EagerSGD(model.parameters())

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        if not mended:
            optimizer.step()

    compiled(step, model=model, optimizer=optimizer)(X)


@shows("TR-110", "`h = encoder(x)` outside", "pass `h.detach()`")
def backward_to_outside(mended: bool, folder: Path) -> None:
    encoder, head = nn.Linear(4, 4), net()
    h = encoder(X)
    outside = h.detach() if mended else h
    train(lambda x: (head(x) * head(outside)).sum(), X, model=head)


@shows("TR-110", "also with `h` as an argument", "pass `h.detach()`")
def backward_to_an_argument(mended: bool, folder: Path) -> None:
    encoder, head = nn.Linear(4, 4), net()
    h = encoder(X)
    train(lambda h: head(h).sum(), h.detach() if mended else h, model=head)


@shows("TR-111", 'under `torch.device("meta")`', '`model.to_empty(device="cpu")`')
def a_model_without_data(mended: bool, folder: Path) -> None:
    with torch.device("meta"):
        model = net()
    if mended:
        model.to_empty(device="cpu")
        model.load_state_dict(net().state_dict())
    train(lambda x: model(x).sum(), X, model=model)


@shows("TR-112", "`step(x[:4], x[2:])` where the step writes to both", "pass copies")
def overlapping_arguments(mended: bool, folder: Path) -> None:
    model, x = net(), X.clone()

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        b.add_(1)
        return model(a).sum() + model(b).sum()

    parts = x[:4], x[2:]
    run(step, *(map(torch.clone, parts) if mended else parts), model=model)


@shows("TR-113", "`time=(2, 64)` and a batch of 65 tokens", "widen the range")
def a_size_out_of_range(mended: bool, folder: Path) -> None:
    model = nn.Embedding(9, 4)
    shapes = treadle.dynamic({"tokens": (None, "time")}, time=(2, 128 if mended else 64))
    made = compiled(lambda tokens: model(tokens).sum(), model=model, shapes=shapes)
    made(torch.zeros(2, 65, dtype=torch.long))


@shows("TR-114", "SGD(..., differentiable=True)", "do not use them")
def a_differentiable_optimizer(mended: bool, folder: Path) -> None:
    model = net()
    train(lambda x: model(x).sum(), X, model=model, optimizer=sgd(model, differentiable=not mended))


@shows("TR-115", "then `model.weight.norm()`", "read it after the call")
def a_parameter_after_an_eager_update(mended: bool, folder: Path) -> None:
    model = net()
    optimizer = EagerSGD(model.parameters())

    def step(x: torch.Tensor) -> Any:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return None if mended else model.weight.norm()

    compiled(step, model=model, optimizer=optimizer)(X)
    assert model.weight.norm() > 0


@shows("TR-116", "a lock as an argument", "pass tensors, Python values")
def a_lock(mended: bool, folder: Path) -> None:
    model = net()
    run(lambda x, lock: model(x).sum(), X, "lock" if mended else threading.Lock(), model=model)


@shows("TR-117", "`model.extra = nn.Linear(4, 4)`", "return the value")
def a_new_module(mended: bool, folder: Path) -> None:
    model = net()

    def step(x: torch.Tensor) -> torch.Tensor:
        if not mended:
            model.extra = nn.Linear(4, 4)
        return model(x).sum()

    run(step, X, model=model)


@shows("TR-117", "`torch.set_default_dtype(...)`", "Change global settings outside the step")
def a_global_setting(mended: bool, folder: Path) -> None:
    model, before = net(), torch.get_default_dtype()

    def step(x: torch.Tensor) -> torch.Tensor:
        if not mended:
            torch.set_default_dtype(torch.float64)
        return model(x).sum()

    try:
        run(step, X, model=model)
    finally:
        torch.set_default_dtype(before)


@shows("TR-117", "`other.requires_grad_()`", "assign a new one")
def another_tensor_requires_gradients(mended: bool, folder: Path) -> None:
    model, other = net(), torch.ones(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        scale = other.clone().requires_grad_() if mended else other.requires_grad_()
        return (model(x) * scale).sum()

    run(step, X, model=model)


@shows("TR-117", "`p.data = q` with another shape", "assign a new one")
def other_data(mended: bool, folder: Path) -> None:
    model = net()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        if mended:
            model.bias.data = torch.zeros(3)
        else:
            model.bias.data = torch.zeros(1)
        return loss

    run(step, X, model=model)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.n = net(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return self.layer(x).sum() + torch.zeros(self.n).sum()


@shows("TR-118", "`self.n += 1`, then `torch.zeros(self.n)`", "count outside and pass the number")
def a_counter(mended: bool, folder: Path) -> None:
    model = Counting()
    if not mended:
        run(model, X, model=model)
    run(lambda x, n: model.layer(x).sum() + torch.zeros(n).sum(), X, 1, model=model)


@shows("TR-119", "`random.shuffle(items)`", "pass the numbers")
def shuffled(mended: bool, folder: Path) -> None:
    model = net()

    def step(x: torch.Tensor, order: list[int]) -> torch.Tensor:
        items = [*order]
        if not mended:
            random.shuffle(items)
        return model(x[items]).sum()

    run(step, X, random.sample(range(6), 6), model=model)


@shows("TR-119", "`self.rng.normal()` with a NumPy generator", "pass the numbers")
def drawn_from_a_generator(mended: bool, folder: Path) -> None:
    model, rng = net(), np.random.default_rng(0)
    if mended:
        run(lambda x, noise: model(x).sum() * noise, X, float(rng.normal()), model=model)
    else:
        run(lambda x: model(x).sum() * rng.normal(), X, model=model)


@shows("TR-120", "`torch.manual_seed(0)` in the step", "seed before the step")
def a_seed(mended: bool, folder: Path) -> None:
    model = net()

    def step(x: torch.Tensor) -> torch.Tensor:
        if not mended:
            torch.manual_seed(0)
        return (model(x) * torch.rand(3)).sum()

    torch.manual_seed(0)
    run(step, X, model=model)


@shows("TR-121", "torch.rand(3, generator=torch.Generator())", "create it outside, and pass it")
def a_generator(mended: bool, folder: Path) -> None:
    model = net()

    def step(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        chosen = generator if mended else torch.Generator()
        return (model(x) * torch.rand(3, generator=chosen)).sum()

    run(step, X, torch.Generator(), model=model)


@shows("TR-122", "`pool.submit(model, x)`", "compute in the calling thread")
def a_pool(mended: bool, folder: Path) -> None:
    model = net()
    with ThreadPoolExecutor(1) as pool:

        def step(x: torch.Tensor) -> torch.Tensor:
            return (model(x) if mended else pool.submit(model, x).result()).sum()

        run(step, X, model=model)


def before_the_step(call: Any) -> Any:
    """A program whose step makes this call; the remedy makes it before."""

    def program(mended: bool, folder: Path) -> None:
        model = net()

        def step(x: torch.Tensor, value: Any) -> torch.Tensor:
            return model(x).sum() * len(str(value if mended else call()))

        run(step, X, str(call()), model=model)

    return program


for _name, _call in {
    "time.time()": time.time,
    "open(path)": lambda: open(__file__).read(5),  # noqa: SIM115
    "os.urandom(8)": lambda: os.urandom(8),
    "subprocess.run(...)": lambda: subprocess.run(["true"], check=True),
}.items():
    shows("TR-123", f"`{_name}`", "make the call before the step and pass the result")(
        before_the_step(_call)
    )


@shows("TR-125", '`del optimizer.state[p]["exp_avg"]`', "write in place")
def a_removed_entry_of_state(mended: bool, folder: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    update = training(lambda x: model(x).sum(), optimizer)
    update(X)

    def step(x: torch.Tensor) -> torch.Tensor:
        state = optimizer.state[model.weight]
        loss = update(x)
        if mended:
            state["exp_avg"].zero_()
        else:
            del state["exp_avg"]
        return loss

    run(step, X, model=model, optimizer=optimizer)


@shows("TR-126", "`model.double()` after some steps of Adam", "`optimizer.load_state_dict(")
def state_of_another_dtype(mended: bool, folder: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    step = training(lambda x: model(x).sum(), optimizer)
    step(X)
    model.double()
    if mended:
        optimizer.load_state_dict(optimizer.state_dict())
    run(step, X.double(), model=model, optimizer=optimizer)


@shows("TR-127", "`x.to_sparse().sum()`", "use dense tensors")
def a_sparse_tensor(mended: bool, folder: Path) -> None:
    model = net()
    run(lambda x: (model(x) if mended else model(x).to_sparse()).sum(), X, model=model)


@shows("TR-127", "`torch.nested.nested_tensor([a, b])`", "pad_sequence")
def a_nested_tensor(mended: bool, folder: Path) -> None:
    model = net()

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if mended:
            return model(nn.utils.rnn.pad_sequence([a, b])).sum()
        return model(torch.nested.nested_tensor([a, b])).values().sum()

    run(step, X[:2], X[2:], model=model)


@shows("TR-127", "`grad.coalesce()`", "do that part outside")
def a_sparse_gradient(mended: bool, folder: Path) -> None:
    model = nn.Embedding(9, 4, sparse=True)
    optimizer = sgd(model)

    def step(tokens: torch.Tensor) -> None:
        model(tokens).sum().backward()
        if not mended:
            model.weight.grad = model.weight.grad.coalesce()
        optimizer.step()
        optimizer.zero_grad()

    compiled(step, model=model, optimizer=optimizer)(torch.tensor([1, 2, 2]))


@shows("TR-128", "`with torch.autograd.detect_anomaly(): step(x)`", "use `check_nan=False`")
def anomalies(mended: bool, folder: Path) -> None:
    model = net()
    optimizer = sgd(model)
    step = compiled(training(lambda x: model(x).sum(), optimizer), model=model, optimizer=optimizer)
    with torch.autograd.detect_anomaly(check_nan=not mended):
        step(X)


@shows(
    "TR-131", "grad_fn.next_functions[0][0].register_hook(f)", "register_post_accumulate_grad_hook"
)
def a_hook_of_the_accumulator(mended: bool, folder: Path) -> None:
    model = net()
    p = model.weight
    node = p.expand_as(p).grad_fn.next_functions[0][0]
    if mended:
        p.register_post_accumulate_grad_hook(lambda _: None)
    else:
        node.register_hook(lambda *_: None)
    train(lambda x: model(x).sum(), X, model=model)


@shows("TR-132", "torch.randn(2, 3) @ torch.randn(2, 3)", "fix the line")
def a_product_that_does_not_fit(mended: bool, folder: Path) -> None:
    model = net()
    other = torch.randn(3, 2) if mended else torch.randn(2, 3)
    run(lambda x: (model(x) @ other).sum(), X, model=model)


@shows("TR-133", "a custom operation without a fake implementation", "register_fake")
def an_operation_without_a_fake(mended: bool, folder: Path) -> None:
    @torch.library.custom_op(f"error_examples::typeless{mended}", mutates_args=())
    def typeless(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    if mended:
        typeless.register_fake(torch.empty_like)
    model = net()
    run(lambda x: typeless(model(x)).sum(), X, model=model)


@shows("TR-134", "a second optimizer in a global", "`optimizer=[first, second]`")
def a_second_optimizer(mended: bool, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    first, second = sgd(model[0]), sgd(model[1])

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()

    run(step, X, model=model, optimizer=[first, second] if mended else first)


@shows("TR-135", "`treadle.compile(model)`", "`treadle.compile(train_step, model=model,")
def a_module_as_the_step(mended: bool, folder: Path) -> None:
    model = net()
    if not mended:
        treadle.compile(model)
    train(lambda x: model(x).sum(), X, model=model)


@shows("TR-135", "`treadle.compile(treadle.compile(f, model=model))`", "train_step")
def a_step_as_the_step(mended: bool, folder: Path) -> None:
    model = net()
    step: Any = lambda x: model(x).sum()  # noqa: E731
    run(step if mended else compiled(step, model=model), X, model=model)


@shows("TR-135", "`treadle.compile(model=model)(x, y)`", "train_step")
def a_decorator_as_the_step(mended: bool, folder: Path) -> None:
    model = net()
    decorator = treadle.compile(model=model)
    if not mended:
        decorator(X, X)  # pyright: ignore[reportCallIssue, reportArgumentType]
    decorator(lambda x: model(x).sum())(X)


@shows("TR-136", "a generator, an iterator", "return a list")
def a_generator_as_result(mended: bool, folder: Path) -> None:
    model = net()

    def step(x: torch.Tensor) -> Any:
        parts = (each.sum() for each in model(x))
        return [*parts] if mended else parts

    run(step, X, model=model)


@torch.library.custom_op("error_examples::address", mutates_args=())
def address(x: torch.Tensor) -> torch.Tensor:
    return x * bool(x.data_ptr())


address.register_fake(torch.empty_like)


@shows("TR-137", "`x.data_ptr()` passed to an extension", "torch.library.custom_op")
def an_address(mended: bool, folder: Path) -> None:
    model = net()

    def step(x: torch.Tensor) -> torch.Tensor:
        h = model(x).detach()
        return address(h).sum() if mended else h.sum() * bool(h.data_ptr())

    run(step, X, model=model)


@shows("TR-139", '`group["momentum"] = 0.9` before', "before the call")
def momentum_at_once(mended: bool, folder: Path) -> None:
    model = net()
    optimizer = sgd(model)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        if not mended:
            optimizer.param_groups[0]["momentum"] = 0.9
        optimizer.step()
        optimizer.zero_grad()

    if mended:
        optimizer.param_groups[0]["momentum"] = 0.9
    run(step, X, model=model, optimizer=optimizer)


@shows("TR-140", "through `nn.LSTM`", "a loop of `nn.LSTMCell`")
def a_gradient_penalty(mended: bool, folder: Path) -> None:
    model = nn.LSTMCell(4, 3) if mended else nn.LSTM(4, 3)

    def out_of(x: torch.Tensor) -> torch.Tensor:
        if not mended:
            return model(x)[0]
        state = None
        for each in x:
            state = model(each, state)
        return state[0]

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(out_of(x).sum(), x, create_graph=True)
        return grad.square().sum()

    train(loss_of, torch.randn(5, 2, 4), model=model)


@shows("TR-141", "`packed.data.sum()`", "unpack first, and mask the padding")
def packed_rows(mended: bool, folder: Path) -> None:
    model = nn.LSTM(4, 3)
    rnn = nn.utils.rnn

    def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(x, lengths)
        out, _ = model(packed)
        if not mended:
            return out.data.sum()
        rows, _ = rnn.pad_packed_sequence(out)
        mask = torch.arange(rows.shape[0])[:, None] < lengths
        return (rows * mask[..., None]).sum()

    run(step, torch.randn(5, 2, 4), torch.tensor([5, 3]), model=model)


@shows("TR-150", "`h[mask]` with `shapes=`", "keep the shape (`torch.where`")
def a_mask_with_shapes(mended: bool, folder: Path) -> None:
    model = net()

    def step(x: torch.Tensor) -> torch.Tensor:
        h = model(x)
        return (torch.where(h > 0, h, 0) if mended else h[h > 0]).sum()

    run(step, X, model=model, shapes=treadle.dynamic({"x": ("rows",)}, rows=(2, 8)))


@shows("TR-151", "a branch of `torch.cond` with dropout", "keep branches free of side effects")
def a_branch_with_dropout(mended: bool, folder: Path) -> None:
    model = net()

    def step(x: torch.Tensor) -> torch.Tensor:
        h = model(x)
        first = torch.sin if mended else lambda h: F.dropout(h, 0.5)
        return torch.cond(h.sum() > 0, first, torch.cos, (h,)).sum()

    run(step, X, model=model)
