"""Grid detector with anchors: targets picked by masks in the loss and indexed by a range of their
number, complete IoU. The rows that masks pick leave each number of boxes to a compile of its own.

again: each size is compiled separately: the step has a size that depends on values
again: argument i: 0 became 1
again: (dim 0: 4 -> 7)
"""

import math

import torch
import torch.nn as nn

import treadle

torch.manual_seed(53)
ANCHORS = [(0.2, 0.2), (0.45, 0.5)]


def bbox_iou(b1, b2, eps=1e-7):
    (x1, y1, w1, h1), (x2, y2, w2, h2) = b1.chunk(4, -1), b2.chunk(4, -1)
    l1, r1, t1, d1 = x1 - w1 / 2, x1 + w1 / 2, y1 - h1 / 2, y1 + h1 / 2
    l2, r2, t2, d2 = x2 - w2 / 2, x2 + w2 / 2, y2 - h2 / 2, y2 + h2 / 2
    inter = (r1.minimum(r2) - l1.maximum(l2)).clamp(0) * (d1.minimum(d2) - t1.maximum(t2)).clamp(0)
    union = w1 * h1 + w2 * h2 - inter + eps
    iou = inter / union
    cw, ch = r1.maximum(r2) - l1.minimum(l2), d1.maximum(d2) - t1.minimum(t2)
    c2 = cw.pow(2) + ch.pow(2) + eps
    rho2 = ((l2 + r2 - l1 - r1) ** 2 + (t2 + d2 - t1 - d1) ** 2) / 4
    v = (4 / math.pi**2) * (torch.atan(w2 / h2) - torch.atan(w1 / h1)).pow(2)
    with torch.no_grad():
        alpha = v / (v - iou + (1 + eps))
    return iou - (rho2 / c2 + v * alpha)


class Detector(nn.Module):
    def __init__(self, nc=3, S=5):
        super().__init__()
        self.nc, self.no, self.S, self.na = nc, nc + 5, S, len(ANCHORS)
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.SiLU(),
            nn.Conv2d(8, 12, 3, 2, 1),
            nn.SiLU(),
        )
        self.head = nn.Conv2d(12, self.na * self.no, 1)
        self.register_buffer("anchors", torch.tensor(ANCHORS))

    def forward(self, x):
        x = self.head(self.backbone(x))
        bs, _, ny, nx = x.shape
        return x.view(bs, self.na, self.no, ny, nx).permute(0, 1, 3, 4, 2).contiguous()


class ComputeLoss:
    sort_obj_iou = False

    def __init__(self, model):
        self.BCEcls, self.BCEobj = (
            nn.BCEWithLogitsLoss(),
            nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.2])),
        )
        self.anchors, self.nc, self.gr = model.anchors, model.nc, 1.0

    def __call__(self, p, targets):
        lcls, lbox, lobj = torch.zeros(1), torch.zeros(1), torch.zeros(1)
        b, a, gj, gi, tbox, anch, tcls = self.build_targets(p, targets)
        tobj = torch.zeros(p.shape[:4], dtype=p.dtype, device=p.device)
        if n := b.shape[0]:
            pxy, pwh, _, pcls = p[b, a, gj, gi].split((2, 2, 1, self.nc), 1)
            pxy = pxy.sigmoid() * 2 - 0.5
            pwh = (pwh.sigmoid() * 2) ** 2 * anch
            pbox = torch.cat((pxy, pwh), 1)
            iou = bbox_iou(pbox, tbox).squeeze()
            lbox += (1.0 - iou).mean()
            iou = iou.detach().clamp(0).type(tobj.dtype)
            tobj[b, a, gj, gi] = iou
            t = torch.full_like(pcls, 0.05)
            t[range(n), tcls] = 0.95
            lcls += self.BCEcls(pcls, t)
        lobj += self.BCEobj(p[..., 4], tobj)
        bs = tobj.shape[0]
        return (0.05 * lbox + lobj + 0.5 * lcls) * bs, torch.cat((lbox, lobj, lcls)).detach()

    def build_targets(self, p, targets):
        na, nt = len(self.anchors), targets.shape[0]
        gain = torch.ones(7)
        ai = torch.arange(na).float().view(na, 1).repeat(1, nt)
        targets = torch.cat((targets.repeat(na, 1, 1), ai[..., None]), 2)
        gain[2:6] = torch.tensor(p.shape)[[3, 2, 3, 2]]
        anchors = self.anchors * gain[2:4]
        t = targets * gain
        if nt:
            r = t[..., 4:6] / anchors[:, None]
            j = torch.max(r, 1 / r).max(2)[0] < 4.0
            t = t[j]
        else:
            t = targets[0]
        bc, gxy, gwh, a = t.chunk(4, 1)
        a, (b, c) = a.long().view(-1), bc.long().T
        gij = gxy.long()
        gi, gj = gij.T
        return (
            b,
            a,
            gj.clamp_(0, int(p.shape[2]) - 1),
            gi.clamp_(0, int(p.shape[3]) - 1),
            torch.cat((gxy - gij, gwh), 1),
            anchors[a],
            c,
        )


model = Detector()
compute_loss = ComputeLoss(model)
g = [], [], []
for v in model.modules():
    if hasattr(v, "bias") and isinstance(v.bias, nn.Parameter):
        g[2].append(v.bias)
    if isinstance(v, nn.BatchNorm2d):
        g[1].append(v.weight)
    elif hasattr(v, "weight") and isinstance(v.weight, nn.Parameter):
        g[0].append(v.weight)
optimizer = torch.optim.SGD(g[2], lr=0.01, momentum=0.937, nesterov=True)
optimizer.add_param_group({"params": g[0], "weight_decay": 5e-4})
optimizer.add_param_group({"params": g[1], "weight_decay": 0.0})
mloss = torch.zeros(3)


def train(i, imgs, targets):
    global mloss
    imgs = imgs.float() / 255
    loss, items = compute_loss(model(imgs), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
    optimizer.step()
    optimizer.zero_grad()
    mloss = (mloss * i + items) / (i + 1)


train = treadle.compile(train, model=model, optimizer=optimizer)
for i, nt in enumerate((4, 4, 7, 4, 7)):
    boxes = torch.cat(
        [
            torch.randint(0, 2, (nt, 1)).float(),
            torch.randint(0, 3, (nt, 1)).float(),
            torch.rand(nt, 2),
            0.1 + 0.4 * torch.rand(nt, 2),
        ],
        1,
    )
    train(i, torch.randint(0, 256, (2, 3, 20, 20), dtype=torch.uint8), boxes)
