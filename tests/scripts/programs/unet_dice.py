"""Segmentation by a small U-Net: dice and cross-entropy, plateau scheduler, a checkpoint kept.

again: dim 0: 4 -> 2
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(12)


class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        dy, dx = x2.size(2) - x1.size(2), x2.size(3) - x1.size(3)
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, n_channels, n_classes, w=4):
        super().__init__()
        self.inc = DoubleConv(n_channels, w)
        self.down = nn.Sequential(nn.MaxPool2d(2), DoubleConv(w, 2 * w))
        self.up = Up(3 * w, w)
        self.outc = nn.Conv2d(w, n_classes, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down(x1)
        return self.outc(self.up(x2, x1))


def dice_loss(pred, target, eps=1e-6):
    inter = 2 * (pred * target).sum((-1, -2))
    sets = pred.sum((-1, -2)) + target.sum((-1, -2))
    return 1 - ((inter + eps) / (sets + eps)).mean()


model = UNet(1, 2)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-8)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
criterion = nn.CrossEntropyLoss()
images = torch.rand(10, 1, 9, 9)
masks = (images[:, 0] > 0.5).long()


def train_step(images, true_masks):
    masks_pred = model(images)
    loss = criterion(masks_pred, true_masks)
    one_hot = F.one_hot(true_masks, 2).permute(0, 3, 1, 2).float()
    loss += dice_loss(F.softmax(masks_pred, dim=1).float(), one_hot)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)
global_step = 0
best_state, best_score = None, -1.0
for epoch in range(2):
    model.train()
    epoch_loss = 0
    for i in range(0, 10, 4):
        loss = train_step(images[i : i + 4], masks[i : i + 4])
        global_step += 1
        epoch_loss += loss.item()
    model.eval()
    with torch.no_grad():
        val_score = (model(images).argmax(1) == masks).float().mean().item()
    scheduler.step(val_score)
    if val_score > best_score:
        best_score, best_state = val_score, copy.deepcopy(model.state_dict())
    print(f"epoch {epoch}: {epoch_loss:.4f}, {val_score:.3f}")
