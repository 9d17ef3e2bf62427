"""A detector with anchors: matching by overlap, hard negatives, smooth L1, in the step."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(23)
CLASSES = 3


def make_anchors(size=4):
    c = (torch.arange(size) + 0.5) / size
    cy, cx = torch.meshgrid(c, c, indexing="ij")
    boxes = [
        torch.stack([cx, cy, torch.full_like(cx, w), torch.full_like(cx, h)], -1)
        for w, h in ((0.3, 0.3), (0.5, 0.25))
    ]
    return torch.stack(boxes, 2).view(-1, 4)


anchors = make_anchors()


def corners(b):
    return torch.cat([b[..., :2] - b[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2], -1)


def iou(a, b):
    lt = torch.max(a[..., :, None, :2], b[..., None, :, :2])
    rb = torch.min(a[..., :, None, 2:], b[..., None, :, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    area = lambda t: (t[..., 2] - t[..., 0]) * (t[..., 3] - t[..., 1])
    return inter / (area(a)[..., :, None] + area(b)[..., None, :] - inter)


class TinySSD(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
        )
        self.cls = nn.Conv2d(8, 2 * (CLASSES + 1), 3, padding=1)
        self.reg = nn.Conv2d(8, 2 * 4, 3, padding=1)

    def forward(self, x):
        h = self.backbone(x)
        n = x.size(0)
        cls = self.cls(h).permute(0, 2, 3, 1).reshape(n, -1, CLASSES + 1)
        return cls, self.reg(h).permute(0, 2, 3, 1).reshape(n, -1, 4)


def multibox_loss(cls, reg, boxes, labels):
    overlaps = iou(corners(anchors)[None], corners(boxes))
    best, which = overlaps.max(2)
    matched = torch.gather(boxes, 1, which[..., None].expand(-1, -1, 4))
    target = torch.gather(labels, 1, which) + 1
    target = torch.where(best > 0.3, target, torch.zeros_like(target))
    pos = target > 0
    offsets = torch.cat(
        [
            (matched[..., :2] - anchors[:, :2]) / anchors[:, 2:],
            torch.log(matched[..., 2:] / anchors[:, 2:]),
        ],
        -1,
    )
    loss_l = (F.smooth_l1_loss(reg, offsets, reduction="none").sum(-1) * pos).sum()
    loss_c = F.cross_entropy(cls.transpose(1, 2), target, reduction="none")
    mined = loss_c.detach().clone()
    mined[pos] = 0
    _, idx = mined.sort(1, descending=True)
    _, rank = idx.sort(1)
    num_pos = pos.long().sum(1, keepdim=True)
    neg = rank < torch.clamp(3 * num_pos, max=pos.size(1) - 1)
    n = num_pos.sum().clamp(min=1).float()
    return loss_l / n, (loss_c * (pos | neg)).sum() / n


net = TinySSD()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, weight_decay=5e-4)


def train_step(images, boxes, labels):
    cls, reg = net(images)
    optimizer.zero_grad()
    loss_l, loss_c = multibox_loss(cls, reg, boxes, labels)
    loss = loss_l + loss_c
    loss.backward()
    optimizer.step()
    return loss_l.detach(), loss_c.detach()


train_step = treadle.compile(train_step, model=net, optimizer=optimizer)
loc_loss = conf_loss = 0
for iteration in range(5):
    images = torch.rand(4, 3, 16, 16)
    boxes = torch.cat([torch.rand(4, 2, 2) * 0.6 + 0.2, torch.rand(4, 2, 2) * 0.3 + 0.2], -1)
    l, c = train_step(images, boxes, torch.randint(CLASSES, (4, 2)))
    loc_loss += l.item()
    conf_loss += c.item()
print(f"loc {loc_loss:.3f} conf {conf_loss:.3f}")
