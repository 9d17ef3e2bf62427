"""SwAV: Sinkhorn assignments, multi-crop lists, a queue that starts late, frozen prototypes, and a
learning rate looked up in an array.

again: lr']: a float became
again: a branch on argument epoch
again: argument queue: None became a tensor
"""

import numpy as np
import torch
import torch.nn as nn

import treadle

torch.manual_seed(4)


class Model(nn.Module):
    def __init__(self, k=10):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d((1, 1)),
        )
        self.projection_head = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 5)
        )
        self.prototypes = nn.Linear(5, k, bias=False)

    def forward(self, inputs):
        if not isinstance(inputs, list):
            inputs = [inputs]
        idx_crops = torch.cumsum(
            torch.unique_consecutive(
                torch.tensor([inp.shape[-1] for inp in inputs]), return_counts=True
            )[1],
            0,
        )
        start_idx, output = 0, None
        for end_idx in idx_crops:
            _out = self.backbone(torch.cat(inputs[start_idx:end_idx])).flatten(1)
            output = _out if start_idx == 0 else torch.cat((output, _out))
            start_idx = end_idx
        x = nn.functional.normalize(self.projection_head(output), dim=1, p=2)
        return x, self.prototypes(x)


@torch.no_grad()
def sinkhorn(out, eps=0.05, iters=3):
    Q = torch.exp(out / eps).t()
    B, K = Q.shape[1], Q.shape[0]
    Q /= torch.sum(Q)
    for _ in range(iters):
        Q /= torch.sum(Q, dim=1, keepdim=True)
        Q /= K
        Q /= torch.sum(Q, dim=0, keepdim=True)
        Q /= B
    Q *= B
    return Q.t()


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-6)
lr_schedule = np.concatenate(
    (np.linspace(0, 0.1, 4), np.array([0.05 * (1 + np.cos(np.pi * t / 8)) for t in range(8)]))
)
queue, queue_len, use_the_queue = None, 12, False
it_log = []


def train(inputs, iteration, epoch, queue):
    for g in optimizer.param_groups:
        g["lr"] = lr_schedule[iteration]
    with torch.no_grad():
        w = model.prototypes.weight.data.clone()
        w = nn.functional.normalize(w, dim=1, p=2)
        model.prototypes.weight.copy_(w)
    embedding, output = model(inputs)
    embedding = embedding.detach()
    bs = inputs[0].size(0)
    loss = 0
    for i, crop_id in enumerate([0, 1]):
        with torch.no_grad():
            out = output[bs * crop_id : bs * (crop_id + 1)].detach()
            if queue is not None:
                out = torch.cat((torch.mm(queue[i], model.prototypes.weight.t()), out))
                queue[i, bs:] = queue[i, :-bs].clone()
                queue[i, :bs] = embedding[crop_id * bs : (crop_id + 1) * bs]
            q = sinkhorn(out)[-bs:]
        subloss = 0
        for v in np.delete(np.arange(4), crop_id):
            x = output[bs * v : bs * (v + 1)] / 0.1
            subloss -= torch.mean(torch.sum(q * nn.functional.log_softmax(x, dim=1), dim=1))
        loss += subloss / 3
    loss /= 2
    optimizer.zero_grad()
    loss.backward()
    if epoch < 1:
        for name, p in model.named_parameters():
            if "prototypes" in name:
                p.grad = None
    optimizer.step()
    return loss.item()


train = treadle.compile(train, model=model, optimizer=optimizer)
it = 0
for epoch in range(4):
    if epoch == 2:
        queue = torch.zeros(2, queue_len, 5)
    for _ in range(3):
        crops = [torch.randn(4, 1, size, size) for size in (8, 8, 5, 5)]
        it_log.append(train(crops, it, epoch, queue))
        it += 1
