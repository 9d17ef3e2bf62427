"""Sparse training: masks drop and grow weights every few steps, by gradients that hooks keep, and the
momentum of what is masked is cleared in the optimizer's state.

again: a branch on pruner.step_
again: a branch on pruner.step_
again: a branch on pruner.step_
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(3)


class MaskHook:
    def __init__(self, layer, pruner):
        self.layer, self.pruner, self.dense_grad = layer, pruner, None

    def __call__(self, grad):
        if self.pruner.is_about_to_grow():
            if self.dense_grad is None:
                self.dense_grad = torch.zeros_like(grad)
            self.dense_grad += grad
        else:
            self.dense_grad = None
        return grad * self.pruner.masks[self.layer]


class RigL:
    def __init__(self, model, optimizer, density=0.4, every=4, until=40, alpha=0.3):
        self.optimizer, self.every, self.until, self.alpha = optimizer, every, until, alpha
        self.W = [p for p in model.parameters() if p.dim() > 1]
        self.masks = [torch.rand_like(w) < density for w in self.W]
        self.hooks = [MaskHook(i, self) for i in range(len(self.W))]
        for w, hook in zip(self.W, self.hooks):
            w.register_hook(hook)
        self.step_ = 0
        self.apply_masks()

    def is_about_to_grow(self):
        return self.every - (self.step_ % self.every) <= 1

    @torch.no_grad()
    def apply_masks(self):
        for w, mask in zip(self.W, self.masks):
            w *= mask

    @torch.no_grad()
    def reset_momentum(self):
        for w, mask in zip(self.W, self.masks):
            state = self.optimizer.state[w]
            if "momentum_buffer" in state:
                state["momentum_buffer"] *= mask

    def __call__(self):
        self.step_ += 1
        if self.step_ % self.every == 0:
            self.grow()
            return False
        return True

    @torch.no_grad()
    def grow(self):
        fraction = self.alpha / 2 * (1 + math.cos(self.step_ * math.pi / self.until))
        for w, mask, hook in zip(self.W, self.masks, self.hooks):
            alive = mask.sum()
            dropped = (alive * fraction).floor()
            rank = w.abs().flatten().argsort(descending=True).argsort()
            kept = rank < alive - dropped
            score = torch.where(kept, -1.0, hook.dense_grad.abs().flatten())
            grown = score.argsort(descending=True, stable=True).argsort() < dropped
            fresh = grown.view_as(mask) & ~mask
            w.data = torch.where(fresh, torch.zeros_like(w), w)
            mask.copy_((kept | grown).view_as(mask))
        self.reset_momentum()
        self.apply_masks()


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
pruner = RigL(model, optimizer)


def train_step(data, target):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    if pruner():
        optimizer.step()
    pruner.apply_masks()
    return loss.item()


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)
losses = []
for i in range(13):
    x = torch.randn(10, 8)
    losses.append(train_step(x, x[:, :4].argmax(1)))
masks, buffers = pruner.masks, [s["momentum_buffer"] for s in optimizer.state.values()]
