"""Pictures: classifiers, segmentation, and what stands between pictures and numbers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ordinary_steps.kit import Kit, Setup, mlp, row, trained


def _classifier(kit: Kit, model: nn.Module, **given: object) -> Setup:
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    return trained(model, loss_of, lambda: (kit.pictures(), kit.labels()), **given)


@row
def cnn_batch_norm(kit: Kit) -> Setup:
    w = kit.size(8, 64)
    return _classifier(kit, kit.put(nn.Sequential(
        nn.Conv2d(3, w, 3, padding=1), nn.BatchNorm2d(w), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(w, w, 3, padding=1), nn.BatchNorm2d(w), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(w, 10),
    )))  # fmt: skip


def _inverted(a: int, b: int, expand: int, stride: int) -> nn.Sequential:
    w = a * expand
    return nn.Sequential(
        nn.Conv2d(a, w, 1, bias=False), nn.BatchNorm2d(w), nn.SiLU(),
        nn.Conv2d(w, w, 3, stride, 1, groups=w, bias=False), nn.BatchNorm2d(w), nn.SiLU(),
        nn.Conv2d(w, b, 1, bias=False), nn.BatchNorm2d(b),
    )  # fmt: skip


@row
def mobilenet(kit: Kit) -> Setup:
    w = kit.size(8, 32)
    return _classifier(kit, kit.put(nn.Sequential(
        nn.Conv2d(3, w, 3, 2, 1), nn.SiLU(), _inverted(w, w, 2, 1), _inverted(w, 2 * w, 4, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * w, 10),
    )))  # fmt: skip


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.up(F.relu(self.down(x.mean((2, 3), keepdim=True))))
        return x * F.hardsigmoid(scale)


@row
def squeeze_excite(kit: Kit) -> Setup:
    w = kit.size(8, 64)
    return _classifier(kit, kit.put(nn.Sequential(
        nn.Conv2d(3, w, 3, padding=1), nn.Hardswish(), SqueezeExcite(w),
        nn.Conv2d(w, w, 3, 2, 1), nn.GroupNorm(4, w), nn.Hardswish(), SqueezeExcite(w),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * w, 10),
    )))  # fmt: skip


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(h)))


@row
def resnet(kit: Kit) -> Setup:
    w = kit.size(8, 64)
    model = kit.put(nn.Sequential(
        nn.Conv2d(3, w, 3, padding=1), *(Residual(w) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(w, 10),
    ))  # fmt: skip
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return _classifier(kit, model, optimizer=sgd)


class UNet(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.b, self.c = self._two(3, w), self._two(w, 2 * w), self._two(2 * w, 4 * w)
        self.up_b = nn.ConvTranspose2d(4 * w, 2 * w, 2, 2)
        self.up_a = nn.ConvTranspose2d(2 * w, w, 2, 2)
        self.d, self.e = self._two(4 * w, 2 * w), self._two(2 * w, w)
        self.out = nn.Conv2d(w, 2, 1)

    @staticmethod
    def _two(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU(),
            nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        h = self.d(torch.cat([self.up_b(c), b], 1))
        return self.out(self.e(torch.cat([self.up_a(h), a], 1)))


def dice_loss(logits: Tensor, target: Tensor) -> Tensor:
    p = logits.softmax(1)
    hot = F.one_hot(target, p.shape[1]).permute(0, 3, 1, 2).to(p.dtype)
    shared = (p * hot).sum((0, 2, 3))
    return 1 - (2 * shared / (p.sum((0, 2, 3)) + hot.sum((0, 2, 3)) + 1e-6)).mean()


@row
def unet_dice(kit: Kit) -> Setup:
    model = kit.put(UNet(kit.size(4, 32)))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return F.cross_entropy(out, y) + dice_loss(out, y)

    def batch() -> tuple[Tensor, Tensor]:
        x = kit.pictures((16, 64))
        return x, kit.randint(2, x.shape[0], x.shape[2], x.shape[3])

    return trained(model, loss_of, batch)


@row
def segmentation_upsampled(kit: Kit) -> Setup:
    w = kit.size(8, 32)
    body = nn.Sequential(nn.Conv2d(3, w, 3, 2, 1), nn.ReLU(), nn.Conv2d(w, w, 3, 2, 1), nn.ReLU())
    head = nn.Conv2d(w, 5, 1)
    model = kit.put(nn.ModuleDict({"body": body, "head": head}))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        small = model["head"](model["body"](x))
        out = F.interpolate(small, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(out, y, ignore_index=0)

    def batch() -> tuple[Tensor, Tensor]:
        x = kit.pictures()
        return x, kit.randint(5, x.shape[0], x.shape[2], x.shape[3])

    return trained(model, loss_of, batch)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff = mlp(width, 4 * width, width, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        n, t, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(out.transpose(1, 2).reshape(n, t, w))
        return x + self.ff(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, side: int, patch: int, width: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.place = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(2)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.place
        return self.head(self.blocks(x)[:, 0])


@row
def vit(kit: Kit) -> Setup:
    return _classifier(kit, kit.put(ViT(kit.size(16, 32), 4, kit.size(16, 192))))


class Mixer(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = mlp(tokens, 2 * tokens, tokens, act=nn.GELU)
        self.within = mlp(width, 4 * width, width, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).mT).mT
        return x + self.within(self.norm2(x))


@row
def mlp_mixer(kit: Kit) -> Setup:
    w, side = kit.size(16, 128), kit.size(16, 32)
    patch = nn.Conv2d(3, w, 4, 4)
    blocks = nn.Sequential(*(Mixer((side // 4) ** 2, w) for _ in range(2)))
    model = kit.put(nn.ModuleList([patch, blocks, nn.Linear(w, 10)]))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        h = model[1](model[0](x).flatten(2).transpose(1, 2))
        return F.cross_entropy(model[2](h.mean(1)), y)

    return trained(model, loss_of, lambda: (kit.pictures(), kit.labels()))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(torch.full((width,), 0.1))
        self.ff = mlp(width, 4 * width, width, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depth(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.ff(h)).permute(0, 3, 1, 2)


@row
def convnext(kit: Kit) -> Setup:
    w = kit.size(8, 96)
    return _classifier(kit, kit.put(nn.Sequential(
        nn.Conv2d(3, w, 2, 2), ConvNeXtBlock(w), ConvNeXtBlock(w),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(w, 10),
    )))  # fmt: skip


@row
def super_resolution(kit: Kit) -> Setup:
    w = kit.size(8, 64)
    model = kit.put(nn.Sequential(
        nn.Conv2d(3, w, 5, padding=2), nn.Tanh(), nn.Conv2d(w, w, 3, padding=1), nn.PReLU(w),
        nn.Conv2d(w, 12, 3, padding=1), nn.PixelShuffle(2),
    ))  # fmt: skip

    def loss_of(x: Tensor) -> Tensor:
        return F.l1_loss(model(F.avg_pool2d(x, 2)), x)

    return trained(model, loss_of, lambda: (kit.pictures((16, 64)),))


@row
def conv3d_video(kit: Kit) -> Setup:
    w = kit.size(4, 32)
    model = kit.put(nn.Sequential(
        nn.Conv3d(3, w, 3, padding=1), nn.BatchNorm3d(w), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(w, w, 3, padding=1), nn.InstanceNorm3d(w, affine=True), nn.LeakyReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(w, 5),
    ))  # fmt: skip

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    n, side = kit.size(2, 8), kit.size(8, 32)
    return trained(model, loss_of, lambda: (kit.randn(n, 3, 4, side, side), kit.randint(5, n)))


@row
def focal_detection(kit: Kit) -> Setup:
    """Dense boxes and scores: focal loss, and an L1 loss where there is something."""
    w = kit.size(8, 64)
    model = kit.put(nn.Sequential(nn.Conv2d(3, w, 3, 2, 1), nn.ReLU(), nn.Conv2d(w, 5, 3, 2, 1)))

    def loss_of(x: Tensor, boxes: Tensor, there: Tensor) -> Tensor:
        out = model(x)
        scores, found = out[:, 0], out[:, 1:]
        bce = F.binary_cross_entropy_with_logits(scores, there, reduction="none")
        right = scores.sigmoid() * there + (1 - scores.sigmoid()) * (1 - there)
        focal = ((1 - right) ** 2 * bce).sum()
        near = (F.smooth_l1_loss(found, boxes, reduction="none").sum(1) * there).sum()
        return (focal + near) / there.sum().clamp(min=1)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        x = kit.pictures()
        side = x.shape[-1] // 4
        there = (kit.rand(x.shape[0], side, side) < 0.2).float()
        return x, kit.randn(x.shape[0], 4, side, side), there

    return trained(model, loss_of, batch)


@row
def mixup(kit: Kit) -> Setup:
    w = kit.size(8, 64)
    model = kit.put(nn.Sequential(
        nn.Conv2d(3, w, 3, 2, 1), nn.ELU(), nn.AvgPool2d(2), nn.Flatten(), nn.LazyLinear(10),
    ))  # fmt: skip
    model(kit.pictures())

    def loss_of(x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        order = torch.randperm(x.shape[0], device=x.device)
        out = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    return trained(model, loss_of, lambda: (kit.pictures(), kit.labels(), kit.rand(())))


@row
def spatial_transformer(kit: Kit) -> Setup:
    side = kit.size(16, 32)
    where = nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 16), nn.ReLU(), nn.Linear(16, 6))
    head = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    model = kit.put(nn.ModuleList([where, head]))
    model[1](kit.pictures())

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        theta = model[0](x).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, device=x.device)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return F.cross_entropy(model[1](F.grid_sample(x, grid, align_corners=False)), y)

    return trained(model, loss_of, lambda: (kit.pictures(), kit.labels()))
