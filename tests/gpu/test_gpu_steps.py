"""On a real GPU, whose backward passes run in threads of their own: whole steps beside eager."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import treadle
from treadle.graph.core.node_info import info
from treadle.runtime.store.artifact import CallStep
from treadle.session.undo import copies_on_host

FORMS = {
    "plain": lambda block, x: block(x),
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "nested": lambda block, x: checkpoint(
        lambda y: checkpoint(block, y, use_reentrant=False), x, use_reentrant=False
    ),
}


class Model(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form, self.hidden, self.scale = form, None, 1.0
        self.register_buffer("average", torch.zeros(64))
        blocks = [
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.2))
            for _ in range(3)
        ]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = FORMS[self.form](block, x) * self.scale
        self.hidden = x.detach().mean(0) + (0 if self.hidden is None else 0.5 * self.hidden)
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x + self.hidden


def made(form):
    torch.manual_seed(0)
    model = Model(form).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x.clone().requires_grad_()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("memory", [None, 0.5, 0.0])
def test_dropped_elements_stay_dropped_and_modules_keep_their_values(form, memory):
    (model, optimizer, function), (twin, _, eager) = made(form), made(form)
    step = treadle.compile(function, model=model, optimizer=optimizer, memory=memory)
    for call in range(4):
        model.scale = twin.scale = 2.0 if call == 3 else 1.0
        x = torch.randn(256, 64, device="cuda")
        torch.manual_seed(call)
        ours = step(x)
        torch.manual_seed(call)
        torch.testing.assert_close(ours, eager(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.hidden, twin.hidden, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_have_the_lines_of_what_they_are_gradients_of():
    model, optimizer, function = made("plain")
    step = treadle.compile(function, model=model, optimizer=optimizer)
    step.prepare(torch.randn(8, 64, device="cuda"))
    nodes = step.compiled.captured.step.graph.nodes
    gradient = next(node for node in nodes if "tanh_backward" in str(node.target))
    assert "FORMS[self.form](block, x)" not in info(gradient).where  # the block's own
    assert info(gradient).module.startswith("blocks.")


@pytest.mark.parametrize("memory", [None, 0.5])
def test_a_loss_in_chunks_adds_its_gradient_up_in_the_product(memory, tmp_path):
    """Of 16-bit factors, into 32 bits: a product that begins with what is there already."""

    def both():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 5003, bias=False)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return model, optimizer, step

    (model, optimizer, function), (twin, _, eager) = both(), both()
    options = treadle.Options(memory=memory, chunk_logits=1024 * 2 * 5003, cache_dir=tmp_path)
    step = treadle.compile(function, model=model, optimizer=optimizer, options=options)
    for _ in range(6):
        x, y = torch.randn(4096, 96, device="cuda"), torch.randint(5003, (4096,), device="cuda")
        torch.testing.assert_close(step(x, y), eager(x, y), rtol=1e-4, atol=1e-4)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    calls = [each for each in step.compiled.artifact.steps if isinstance(each, CallStep)]
    assert sum(each.op == "aten.addmm.dtype" for each in calls) == 3


def test_what_a_first_call_overwrites_is_kept_on_the_host():
    """Tensors of every width and layout, and none at all."""
    made = [
        torch.randn(3, 5, device="cuda"),
        torch.randn(4, 6, device="cuda").t(),
        torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last),
        torch.randint(100, (7,), device="cuda", dtype=torch.uint8)[1:],
        torch.tensor(3.0, device="cuda", dtype=torch.float64),
        torch.randn(5, device="cuda", dtype=torch.complex128),
        torch.empty(0, 4, device="cuda", dtype=torch.bfloat16),
        torch.randn(9, device="cuda", dtype=torch.bfloat16).expand(2, 9),
        torch.tensor(7),
    ]
    before = [tensor.cpu().clone() for tensor in made]
    copies = copies_on_host(made)
    for tensor in made:
        if tensor.numel() and tensor.dim() != 2:
            tensor.zero_()
    for copy, value in zip(copies, before, strict=True):
        assert copy.is_cpu
        torch.testing.assert_close(copy, value, rtol=0, atol=0)
    assert copies_on_host([]) == []
