"""A parameter, or another tensor that an optimizer steps, which is also passed to the step."""

import pytest
import torch
from torch import nn

import treadle


def of_pictures(seed):
    """Several pictures of one optimizer; each call improves the one that it is given."""
    torch.manual_seed(seed)
    features = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).requires_grad_(False)
    images = [torch.rand(6, 4, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.Adam(images, lr=0.1)

    def step(image, y):
        optimizer.zero_grad()
        loss = (features(image) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, features, optimizer, images


def of_weights(seed):
    """A weight that the model uses as well is penalised where it is passed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(weight, y):
        loss = (model(y) - 1.0).pow(2).mean() + 0.1 * weight.pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), weight

    given = [model[0].weight, model[1].weight, model[2].weight, torch.randn(4, 4)]
    return step, model, optimizer, given


@pytest.mark.parametrize(
    ("made", "order", "variants"),
    [(of_pictures, (0, 0, 1, 1, 0), 2), (of_weights, (0, 1, 0, 2, 3, 0, 3), 4)],
)
def test_a_parameter_that_is_passed_is_that_parameter(made, order, variants):
    torch.manual_seed(0)
    ys = [torch.rand(6, 3 if made is of_pictures else 4) for _ in order]
    theirs, _, _, their_tensors = made(1)
    function, model, optimizer, tensors = made(1)
    step = treadle.compile(function, model=model, optimizer=optimizer)
    for at, y in zip(order, ys, strict=True):
        torch.testing.assert_close(step(tensors[at], y), theirs(their_tensors[at], y))
        torch.testing.assert_close(tensors, their_tensors)
    assert len(step.recompiles) == variants - 1
    assert all("became a parameter" in each or "requires_grad" in each for each in step.recompiles)
