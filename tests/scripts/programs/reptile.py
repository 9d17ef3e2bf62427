"""Reptile on sines: batches are NumPy arrays, updates are written by hand, weights are saved before
the inner loop and moved a part of the way after it.
"""

from copy import deepcopy

import numpy as np
import torch
from torch import nn

import treadle

seed, innerstepsize, innerepochs, outerstepsize0, niterations = 0, 0.02, 1, 0.1, 6
rng = np.random.RandomState(seed)
torch.manual_seed(seed)
x_all = np.linspace(-5, 5, 50)[:, None]
ntrain = 10


def gen_task():
    phase, ampl = rng.uniform(low=0, high=2 * np.pi), rng.uniform(0.1, 5)
    return lambda x: np.sin(x + phase) * ampl


model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def totorch(x):
    return torch.Tensor(x)


def train_on_batch(x, y):
    x, y = totorch(x), totorch(y)
    model.zero_grad()
    ypred = model(x)
    loss = (ypred - y).pow(2).mean()
    loss.backward()
    for param in model.parameters():
        param.data -= innerstepsize * param.grad.data
    return loss.item()


def predict(x):
    return model(totorch(x)).data.numpy()


train_on_batch = treadle.compile(train_on_batch, model=model)
losses = []
for iteration in range(niterations):
    weights_before = deepcopy(model.state_dict())
    f = gen_task()
    y_all = f(x_all)
    inds = rng.permutation(len(x_all))
    for _ in range(innerepochs):
        for start in range(0, len(x_all), ntrain):
            mbinds = inds[start : start + ntrain]
            losses.append(train_on_batch(x_all[mbinds], y_all[mbinds]))
    weights_after = model.state_dict()
    outerstepsize = outerstepsize0 * (1 - iteration / niterations)
    model.load_state_dict(
        {
            name: weights_before[name]
            + (weights_after[name] - weights_before[name]) * outerstepsize
            for name in weights_before
        }
    )
    final = predict(x_all)
