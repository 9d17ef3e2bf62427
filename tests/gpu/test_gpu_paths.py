"""Paths of steps that decide by values of tensors, or need whole numbers of them, on a GPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle


def pooled(model, x, at):
    count = int(at.max()) + 1
    return torch.zeros(count, 4, device=x.device).index_add(0, at, model(x)).pow(2).sum()


def by_branch(model, x, at):
    loss = model(x).pow(2).mean()
    return loss * 0.5 if x.sum() > 0 else loss


def labels(model, x, at):
    h = model(x)
    return sum(h[at == label].mean() ** 2 for label in at.unique())


def parts(model, x, at):
    return sum(part.sum() ** 2 for part in model(x).split(torch.bincount(at).tolist()))


def classes(model, x, at):
    return (F.one_hot(at).float().t() @ model(x)).pow(2).mean()


@pytest.mark.filterwarnings("ignore:the step is compiled again")
@pytest.mark.filterwarnings("ignore:a call ran eagerly")
@pytest.mark.filterwarnings("ignore:.*run as PyTorch kernels")
@pytest.mark.parametrize("sizes", [(40,) * 6, (40, 43, 57, 63, 44, 47, 61, 40)])
@pytest.mark.parametrize("loss_of", [pooled, by_branch, labels, parts, classes])
def test_numbers_and_branches_are_paths(loss_of, sizes):
    trained = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(8, 4).cuda()
        optimizer = torch.optim.Adam(model.parameters())

        def step(x, at, model=model, optimizer=optimizer):
            loss = loss_of(model, x, at)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = treadle.compile(step, model=model, optimizer=optimizer) if compiled else step
        losses = []
        for number, size in enumerate(sizes):
            torch.manual_seed(number)
            at = torch.randint(0, 5, (size,)).sort().values.clamp(max=4 if number % 3 else 3)
            losses.append(call(torch.randn(size, 8).cuda(), at.cuda()))
        trained.append((torch.stack(losses), model.state_dict()))
    torch.testing.assert_close(*trained, rtol=1e-4, atol=1e-5)
