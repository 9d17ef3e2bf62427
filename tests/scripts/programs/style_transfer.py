"""Style transfer: the picture itself is the parameter; Gram matrices of frozen features."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(38)
features = nn.Sequential(
    nn.Conv2d(3, 6, 3, padding=1),
    nn.ReLU(),
    nn.AvgPool2d(2),
    nn.Conv2d(6, 8, 3, padding=1),
    nn.ReLU(),
).eval()
features.requires_grad_(False)
content_img, style_img = torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16)


def gram_matrix(input):
    a, b, c, d = input.size()
    feats = input.view(a * b, c * d)
    return torch.mm(feats, feats.t()).div(a * b * c * d)


class Canvas(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.image = nn.Parameter(start.clone())


canvas = Canvas(content_img)
optimizer = torch.optim.Adam(canvas.parameters(), lr=0.02)
with torch.no_grad():
    content_target = features(content_img)
    style_targets, h = [], style_img
    for layer in features:
        h = layer(h)
        if isinstance(layer, nn.ReLU):
            style_targets.append(gram_matrix(h))


def run(style_weight, content_weight):
    with torch.no_grad():
        canvas.image.clamp_(0, 1)
    optimizer.zero_grad()
    h, grams = canvas.image, []
    for layer in features:
        h = layer(h)
        if isinstance(layer, nn.ReLU):
            grams.append(gram_matrix(h))
    style_score = sum(F.mse_loss(g, t) for g, t in zip(grams, style_targets)) * style_weight
    content_score = F.mse_loss(h, content_target) * content_weight
    (style_score + content_score).backward()
    optimizer.step()
    return style_score.detach(), content_score.detach()


run = treadle.compile(run, model=[canvas, features], optimizer=optimizer)
scores = []
for i in range(5):
    style, content = run(1000.0, 1.0)
    scores.append((style.item(), content.item()))
with torch.no_grad():
    canvas.image.clamp_(0, 1)
