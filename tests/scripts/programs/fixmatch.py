"""FixMatch: weak and strong views, a mask by threshold, an averaged model, meters.

again: losses.sum: an int became
again: a branch on scheduler.last_epoch
"""

import argparse
import math
from copy import deepcopy

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

args = argparse.Namespace(
    mu=3, T=1.0, threshold=0.3, lambda_u=1.0, ema_decay=0.9, total_steps=20, warmup=2, batch_size=4
)


class ModelEMA:
    def __init__(self, args, model, decay):
        self.ema = deepcopy(model)
        self.ema.eval()
        self.decay = decay
        self.param_keys = [k for k, _ in self.ema.named_parameters()]
        self.buffer_keys = [k for k, _ in self.ema.named_buffers()]
        for p in self.ema.parameters():
            p.requires_grad_(False)

    def update(self, model):
        with torch.no_grad():
            msd, esd = model.state_dict(), self.ema.state_dict()
            for k in self.param_keys:
                ema_v = esd[k].detach()
                esd[k].copy_(ema_v * self.decay + (1.0 - self.decay) * msd[k].detach())
            for k in self.buffer_keys:
                esd[k].copy_(msd[k])


def interleave(x, size):
    s = list(x.shape)
    return x.reshape([-1, size] + s[1:]).transpose(0, 1).reshape([-1] + s[1:])


def de_interleave(x, size):
    s = list(x.shape)
    return x.reshape([size, -1] + s[1:]).transpose(0, 1).reshape([-1] + s[1:])


def get_cosine(optimizer, warm, total, num_cycles=7.0 / 16.0, last_epoch=-1):
    def _lr_lambda(current_step):
        if current_step < warm:
            return float(current_step) / float(max(1, warm))
        no_progress = float(current_step - warm) / float(max(1, total - warm))
        return max(0.0, math.cos(math.pi * num_cycles * no_progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, _lr_lambda, last_epoch)


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.val = 0
        self.avg = 0
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.BatchNorm2d(8, momentum=0.001),
    nn.LeakyReLU(0.1),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(8, 5),
)
no_decay = ["bias", "bn"]
grouped = [
    {
        "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
        "weight_decay": 5e-4,
    },
    {
        "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
        "weight_decay": 0.0,
    },
]
optimizer = torch.optim.SGD(grouped, lr=0.03, momentum=0.9, nesterov=True)
scheduler = get_cosine(optimizer, args.warmup, args.total_steps)
ema = ModelEMA(args, model, args.ema_decay)
losses, losses_x, losses_u, mask_probs = (AverageMeter() for _ in range(4))


def train_iteration(inputs_x, inputs_u_w, inputs_u_s, targets_x):
    batch_size = inputs_x.shape[0]
    inputs = interleave(torch.cat((inputs_x, inputs_u_w, inputs_u_s)), 2 * args.mu + 1)
    logits = de_interleave(model(inputs), 2 * args.mu + 1)
    logits_x = logits[:batch_size]
    logits_u_w, logits_u_s = logits[batch_size:].chunk(2)
    del logits
    Lx = F.cross_entropy(logits_x, targets_x, reduction="mean")
    pseudo_label = torch.softmax(logits_u_w.detach() / args.T, dim=-1)
    max_probs, targets_u = torch.max(pseudo_label, dim=-1)
    mask = max_probs.ge(args.threshold).float()
    Lu = (F.cross_entropy(logits_u_s, targets_u, reduction="none") * mask).mean()
    loss = Lx + args.lambda_u * Lu
    loss.backward()
    losses.update(loss.item())
    losses_x.update(Lx.item())
    losses_u.update(Lu.item())
    optimizer.step()
    scheduler.step()
    ema.update(model)
    model.zero_grad()
    mask_probs.update(mask.mean().item())


train_iteration = treadle.compile(train_iteration, model=[model, ema.ema], optimizer=optimizer)
for epoch in range(2):
    for _ in range(5):
        train_iteration(
            torch.randn(4, 3, 6, 6),
            torch.randn(12, 3, 6, 6),
            torch.randn(12, 3, 6, 6),
            torch.randint(0, 5, (4,)),
        )
    print(
        f"epoch {epoch} loss {losses.avg:.4f} mask {mask_probs.avg:.2f} lr {scheduler.get_last_lr()[0]:.4f}"
    )
    for m in (losses, losses_x, losses_u, mask_probs):
        m.reset()
