"""A PixelCNN of masked convolutions whose forward multiplies its own weight's data by the mask."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(61)


class MaskedConv2d(nn.Conv2d):
    def __init__(self, mask_type, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", self.weight.data.clone())
        _, _, kH, kW = self.weight.size()
        self.mask.fill_(1)
        self.mask[:, :, kH // 2, kW // 2 + (mask_type == "B") :] = 0
        self.mask[:, :, kH // 2 + 1 :] = 0

    def forward(self, x):
        self.weight.data *= self.mask
        return super().forward(x)


net = nn.Sequential(
    MaskedConv2d("A", 1, 6, 5, 1, 2, bias=False),
    nn.BatchNorm2d(6),
    nn.ReLU(True),
    MaskedConv2d("B", 6, 6, 3, 1, 1, bias=False),
    nn.BatchNorm2d(6),
    nn.ReLU(True),
    nn.Conv2d(6, 8, 1),
)
optimizer = torch.optim.Adam(net.parameters())


def step(images):
    target = (images[:, 0] * 7).long()
    loss = F.cross_entropy(net(images), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


step = treadle.compile(step, model=net, optimizer=optimizer)
err_tr = []
for epoch in range(4):
    err_tr.append(step(torch.rand(3, 1, 8, 8)).item())
print(f"epoch={epoch}; nll_tr={sum(err_tr) / 4:.7f}")
