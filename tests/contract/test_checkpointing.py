"""``torch.utils.checkpoint`` in a step: what it asks for reaches the memory plan."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import treadle
import treadle.backend
from contract.contract_help import training
from treadle.runtime.store.artifact import CallStep

aten = torch.ops.aten
PRODUCTS = (aten.addmm.default, aten.mm.default)
ROWS, WIDTH, LAYERS = 256, 32, 4


def selective(of_products, of_others):
    def policy(ctx, op, *args, **kwargs):
        return of_products if op in PRODUCTS else of_others

    return functools.partial(create_selective_checkpoint_contexts, policy)


ASKED = {
    "nothing": None,
    "all": {},
    "reentrant": {"use_reentrant": True},
    "must save": {"context_fn": selective(Policy.MUST_SAVE, Policy.PREFER_RECOMPUTE)},
    "prefer save": {"context_fn": selective(Policy.PREFER_SAVE, Policy.PREFER_RECOMPUTE)},
    "must recompute": {"context_fn": selective(Policy.MUST_RECOMPUTE, Policy.MUST_RECOMPUTE)},
    "by name": {"context_fn": functools.partial(create_selective_checkpoint_contexts, [*PRODUCTS])},
}


def made(asked):
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        )
        for _ in range(LAYERS)
    ]
    model = nn.ModuleList(blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = ASKED[asked]

    def forward(x):
        x = x.clone().requires_grad_()
        for block in model:
            if options is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, **{"use_reentrant": False, **options})
        return x

    step = training(lambda x: forward(x).square().mean(), optimizer)
    return model, optimizer, step, forward


@functools.cache  # several tests compare with the same step
def compiled(asked, memory=None):
    """Of the step after two calls equal to eager's: its measured peak, and its products."""
    model, optimizer, function, _ = made(asked)
    step = treadle.compile(function, model=model, optimizer=optimizer, memory=memory)
    twin, _, eager, _ = made(asked)
    for seed in range(2):
        x = torch.randn(ROWS, WIDTH)
        torch.manual_seed(seed)
        ours = step(x)
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, eager(x), rtol=1e-5, atol=1e-6)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    peak = step.measure(torch.randn(ROWS, WIDTH)).peak_bytes
    assert peak <= step.compiled.artifact.peak_bytes
    calls = [each for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    return peak, sum(each.op.startswith(("aten.mm", "aten.addmm")) for each in calls)


AGAIN = LAYERS  # the first product of each block; the second one's result is not needed


def test_without_a_budget_what_is_asked_for_is_done():
    found = {asked: compiled(asked) for asked in ASKED}
    free_peak, free = found["nothing"]
    for asked in ("all", "reentrant", "must recompute"):
        assert found[asked][1] == free + AGAIN, asked
        assert found[asked][0] < 0.75 * free_peak, asked
    for asked in ("must save", "prefer save", "by name"):
        assert found[asked][1] == free, asked
        assert found["all"][0] < found[asked][0] <= free_peak, asked


@pytest.mark.parametrize("memory", [1.0, 0.0])
def test_wishes_give_way_to_a_budget(memory):
    free = compiled("nothing", memory)
    for asked in ("all", "reentrant", "prefer save"):
        assert compiled(asked, memory) == free, asked


def test_rules_do_not_give_way():
    loose, tight = compiled("nothing", 1.0), compiled("nothing", 0.0)
    assert compiled("must recompute", 1.0)[1] == loose[1] + AGAIN
    saved = compiled("must save", 0.0)
    assert saved[1] == loose[1] < tight[1]
    with pytest.raises(treadle.PlanError, match="TR-2"):
        compiled("must save", (saved[0] + tight[0]) // 2)


def test_regions_inside_regions():
    def make():
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def inner(a, b, x):
            return torch.tanh(b(torch.tanh(a(x))))

        def outer(x):
            for a, b in ((model[0], model[1]), (model[2], model[3])):
                x = checkpoint(inner, a, b, x, use_reentrant=False)
            return x

        def step(x):
            loss = checkpoint(outer, x, use_reentrant=False).square().mean()
            loss.backward()
            return loss.detach()

        return model, step

    (model, function), (twin, eager) = make(), make()
    step = treadle.compile(function, model=model)
    x = torch.randn(16, 8)
    torch.testing.assert_close(step(x), eager(x))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("asked", ["all", "must save", "prefer save", "must recompute"])
@pytest.mark.parametrize("memory", [None, 0.5])
def test_in_the_backend(asked, memory):
    torch.compiler.reset()
    model, _, _, forward = made(asked)
    twin, _, _, eager = made(asked)
    options = {} if memory is None else {"memory": memory}
    run = torch.compile(forward, backend=treadle.backend.treadle, options=options)
    x = torch.randn(ROWS, WIDTH)
    for function in (run, eager):
        torch.manual_seed(0)
        function(x).square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    """Its norm and its attention are operations with several results."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + torch.native_dropout(self.out(y.transpose(1, 2).reshape(b, n, w)), 0.2, True)[0]


def only_attention(ctx, op, *args, **kwargs):
    flash = op is aten._scaled_dot_product_flash_attention_for_cpu.default
    return Policy.MUST_RECOMPUTE if flash else Policy.PREFER_SAVE


SEVERAL = {
    **ASKED,
    "all must save": {"context_fn": selective(Policy.MUST_SAVE, Policy.MUST_SAVE)},
    "only attention": {
        "context_fn": functools.partial(create_selective_checkpoint_contexts, only_attention)
    },
}


def attending(asked):
    torch.manual_seed(0)
    model = nn.ModuleList([Block() for _ in range(2)])
    options = SEVERAL[asked]

    def forward(x):
        x = x.clone().requires_grad_()
        for block in model:
            if options is None:
                x = block(x)
            else:
                x = checkpoint(block, x, **{"use_reentrant": False, **options})
        return x

    def step(x):
        loss = forward(x).square().mean()
        loss.backward()
        return loss.detach()

    return model, step, forward


def same_as_eager(run, model, asked):
    twin, _, eager = attending(asked)
    x = torch.randn(8, 24, WIDTH)
    for seed in range(2):
        torch.manual_seed(seed)
        run(x)
        torch.manual_seed(seed)
        eager(x).square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    return x


@functools.cache  # several tests compare with the same step
def several(asked, memory=None):
    """Of the step after two calls equal to eager's: its measured peak, and the promised one."""
    model, function, _ = attending(asked)
    step = treadle.compile(function, model=model, memory=memory)
    x = same_as_eager(step, model, asked)
    return step.measure(x).peak_bytes, step.compiled.artifact.peak_bytes


@pytest.mark.parametrize(
    ("asked", "memory"),
    [
        *((asked, None) for asked in SEVERAL),
        *((asked, 0.5) for asked in ("all", "must save", "only attention")),
    ],
)
def test_operations_with_several_results(asked, memory):
    peak, promised = several(asked, memory)
    assert peak <= promised
    if memory is None and asked in ("all", "must recompute"):
        _, promised_plain = several("nothing")
        assert peak < promised_plain


@pytest.mark.parametrize("asked", ["all", "must recompute", "only attention"])
def test_operations_with_several_results_in_the_backend(asked):
    torch.compiler.reset()
    model, _, forward = attending(asked)
    run = torch.compile(forward, backend=treadle.backend.treadle)
    same_as_eager(lambda x: run(x).square().mean().backward(), model, asked)
