"""CenterNet: heat maps drawn in NumPy, a focal loss that branches on whether there are objects, meters in
a dict, a rate that falls at certain steps.

again: an int became
again: a branch on a tensor was False and is True
"""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle


class opts:
    def __init__(self):
        self.heads = {"hm": 3, "wh": 2, "reg": 2}
        self.hm_weight, self.wh_weight, self.off_weight = 1, 0.1, 1
        self.lr, self.lr_step = 1.25e-3, "3,6"
        self.num_stacks = 1
        self.mse_loss = False
        self.eval_oracle_hm = False
        self.print_iter = 3
        self.lr_step = [int(i) for i in self.lr_step.split(",")]


def gaussian2D(shape, sigma=1):
    m, n = [(ss - 1.0) / 2.0 for ss in shape]
    y, x = np.ogrid[-m : m + 1, -n : n + 1]
    h = np.exp(-(x * x + y * y) / (2 * sigma * sigma))
    h[h < np.finfo(h.dtype).eps * h.max()] = 0
    return h


def draw_umich_gaussian(heatmap, center, radius, k=1):
    diameter = 2 * radius + 1
    gaussian = gaussian2D((diameter, diameter), sigma=diameter / 6)
    x, y = int(center[0]), int(center[1])
    height, width = heatmap.shape[0:2]
    left, right = min(x, radius), min(width - x, radius + 1)
    top, bottom = min(y, radius), min(height - y, radius + 1)
    masked_heatmap = heatmap[y - top : y + bottom, x - left : x + right]
    masked_gaussian = gaussian[radius - top : radius + bottom, radius - left : radius + right]
    if min(masked_gaussian.shape) > 0 and min(masked_heatmap.shape) > 0:
        np.maximum(masked_heatmap, masked_gaussian * k, out=masked_heatmap)
    return heatmap


class CTDetDataset(torch.utils.data.Dataset):
    max_objs = 5

    def __len__(self):
        return 4 * 9

    def __getitem__(self, index):
        num_objs = np.random.randint(0, self.max_objs + 1) if index % 8 else 0
        if index // 4 in (4,):
            num_objs = 0
        hm = np.zeros((3, 8, 8), dtype=np.float32)
        wh = np.zeros((self.max_objs, 2), dtype=np.float32)
        reg = np.zeros((self.max_objs, 2), dtype=np.float32)
        ind = np.zeros((self.max_objs), dtype=np.int64)
        reg_mask = np.zeros((self.max_objs), dtype=np.uint8)
        for k in range(num_objs):
            cls_id = np.random.randint(3)
            ct = np.random.rand(2).astype(np.float32) * 7.9
            ct_int = ct.astype(np.int32)
            draw_umich_gaussian(hm[cls_id], ct_int, 1)
            wh[k] = 1.0 * np.random.rand() * 4, 1.0 * np.random.rand() * 4
            ind[k] = ct_int[1] * 8 + ct_int[0]
            reg[k] = ct - ct_int
            reg_mask[k] = 1
        inp = np.random.randn(3, 16, 16).astype(np.float32)
        return {"input": inp, "hm": hm, "reg_mask": reg_mask, "ind": ind, "wh": wh, "reg": reg}


def _sigmoid(x):
    return torch.clamp(x.sigmoid_(), min=1e-4, max=1 - 1e-4)


def _gather_feat(feat, ind, mask=None):
    dim = feat.size(2)
    ind = ind.unsqueeze(2).expand(ind.size(0), ind.size(1), dim)
    feat = feat.gather(1, ind)
    if mask is not None:
        mask = mask.unsqueeze(2).expand_as(feat)
        feat = feat[mask]
        feat = feat.view(-1, dim)
    return feat


def _transpose_and_gather_feat(feat, ind):
    feat = feat.permute(0, 2, 3, 1).contiguous()
    feat = feat.view(feat.size(0), -1, feat.size(3))
    return _gather_feat(feat, ind)


def _neg_loss(pred, gt):
    pos_inds = gt.eq(1).float()
    neg_inds = gt.lt(1).float()
    neg_weights = torch.pow(1 - gt, 4)
    loss = 0
    pos_loss = torch.log(pred) * torch.pow(1 - pred, 2) * pos_inds
    neg_loss = torch.log(1 - pred) * torch.pow(pred, 2) * neg_weights * neg_inds
    num_pos = pos_inds.float().sum()
    pos_loss = pos_loss.sum()
    neg_loss = neg_loss.sum()
    if num_pos == 0:
        loss = loss - neg_loss
    else:
        loss = loss - (pos_loss + neg_loss) / num_pos
    return loss


class RegL1Loss(nn.Module):
    def forward(self, output, mask, ind, target):
        pred = _transpose_and_gather_feat(output, ind)
        mask = mask.unsqueeze(2).expand_as(pred).float()
        loss = F.l1_loss(pred * mask, target * mask, reduction="sum")
        return loss / (mask.sum() + 1e-4)


class CtdetLoss(torch.nn.Module):
    def __init__(self, opt):
        super().__init__()
        self.crit = torch.nn.MSELoss() if opt.mse_loss else _neg_loss
        self.crit_reg = RegL1Loss()
        self.opt = opt

    def forward(self, outputs, batch):
        opt = self.opt
        hm_loss, wh_loss, off_loss = 0, 0, 0
        for s in range(opt.num_stacks):
            output = outputs[s]
            if not opt.mse_loss:
                output["hm"] = _sigmoid(output["hm"])
            hm_loss += self.crit(output["hm"], batch["hm"]) / opt.num_stacks
            if opt.wh_weight > 0:
                wh_loss += (
                    self.crit_reg(output["wh"], batch["reg_mask"], batch["ind"], batch["wh"])
                    / opt.num_stacks
                )
            if opt.off_weight > 0:
                off_loss += (
                    self.crit_reg(output["reg"], batch["reg_mask"], batch["ind"], batch["reg"])
                    / opt.num_stacks
                )
        loss = opt.hm_weight * hm_loss + opt.wh_weight * wh_loss + opt.off_weight * off_loss
        loss_stats = {"loss": loss, "hm_loss": hm_loss, "wh_loss": wh_loss, "off_loss": off_loss}
        return loss, loss_stats


class HourglassNet(nn.Module):
    def __init__(self, heads, nstack):
        super().__init__()
        self.nstack, self.heads = nstack, heads
        self.pre = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.kps = nn.ModuleList([self.hg() for _ in range(nstack)])
        self.inters = nn.ModuleList([nn.Conv2d(8, 8, 1) for _ in range(nstack - 1)])
        for head in heads.keys():
            module = nn.ModuleList(
                [
                    nn.Sequential(
                        nn.Conv2d(8, 8, 3, padding=1),
                        nn.ReLU(inplace=True),
                        nn.Conv2d(8, heads[head], 1),
                    )
                    for _ in range(nstack)
                ]
            )
            self.__setattr__(head, module)
            if "hm" in head:
                for heat in self.__getattr__(head):
                    heat[-1].bias.data.fill_(-2.19)
        self.relu = nn.ReLU(inplace=True)

    def hg(self):
        return nn.Sequential(
            nn.Conv2d(8, 8, 3, 2, 1),
            nn.ReLU(inplace=True),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(8, 8, 3, 1, 1),
        )

    def forward(self, image):
        inter = self.pre(image)
        outs = []
        for ind in range(self.nstack):
            kp = self.kps[ind](inter)
            out = {}
            for head in self.heads:
                layer = self.__getattr__(head)[ind]
                out[head] = layer(kp)
            outs.append(out)
            if ind < self.nstack - 1:
                inter = self.inters[ind](inter) + kp
                inter = self.relu(inter)
        return outs


class ModelWithLoss(torch.nn.Module):
    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch):
        outputs = self.model(batch["input"])
        loss, loss_stats = self.loss(outputs, batch)
        return outputs[-1], loss, loss_stats


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        if self.count > 0:
            self.avg = self.sum / self.count


class BaseTrainer:
    def __init__(self, opt, model, optimizer=None):
        self.opt, self.optimizer = opt, optimizer
        self.loss_stats = ["loss", "hm_loss", "wh_loss", "off_loss"]
        self.loss = CtdetLoss(opt)
        self.model_with_loss = ModelWithLoss(model, self.loss)
        self.avg_loss_stats = {l: AverageMeter() for l in self.loss_stats}

    def run_batch(self, batch):
        output, loss, loss_stats = self.model_with_loss(batch)
        loss = loss.mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for l in self.avg_loss_stats:
            self.avg_loss_stats[l].update(loss_stats[l].mean().item(), batch["input"].size(0))
        return loss_stats


opt = opts()
torch.manual_seed(317)
model = HourglassNet(opt.heads, opt.num_stacks)
optimizer = torch.optim.Adam(model.parameters(), opt.lr)
trainer = BaseTrainer(opt, model, optimizer)
run = treadle.compile(trainer.run_batch, model=trainer.model_with_loss, optimizer=optimizer)
loader = torch.utils.data.DataLoader(CTDetDataset(), batch_size=4, num_workers=0)
model.train()
for iter_id, batch in enumerate(loader):
    if iter_id in opt.lr_step:
        lr = opt.lr * (0.1 ** (opt.lr_step.index(iter_id) + 1))
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
    stats = run(batch)
    if iter_id % opt.print_iter == 0:
        Bar = f"train: [{iter_id}]|"
        for l in trainer.avg_loss_stats:
            Bar = Bar + f"|{l} {trainer.avg_loss_stats[l].avg:.1f} "
        print(Bar)
