"""Contrastive learning of two views, with the boolean mask of the original's loss."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(13)
batch_size, n_views, temperature = 6, 2, 0.5
encoder = nn.Sequential(
    nn.Conv2d(3, 8, 3, stride=2),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
)
projector = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
model = nn.Sequential(encoder, projector)
optimizer = torch.optim.Adam(model.parameters(), 3e-4, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
criterion = nn.CrossEntropyLoss()


def info_nce_loss(features):
    labels = torch.cat([torch.arange(batch_size) for i in range(n_views)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    features = F.normalize(features, dim=1)
    similarity_matrix = torch.matmul(features, features.T)
    mask = torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[~mask].view(labels.shape[0], -1)
    similarity_matrix = similarity_matrix[~mask].view(similarity_matrix.shape[0], -1)
    positives = similarity_matrix[labels.bool()].view(labels.shape[0], -1)
    negatives = similarity_matrix[~labels.bool()].view(similarity_matrix.shape[0], -1)
    logits = torch.cat([positives, negatives], dim=1)
    labels = torch.zeros(logits.shape[0], dtype=torch.long)
    return logits / temperature, labels


def train_step(images):
    features = model(images)
    logits, labels = info_nce_loss(features)
    loss = criterion(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)
n_iter = 0
losses = []
for epoch_counter in range(2):
    for _ in range(3):
        x = torch.rand(batch_size, 3, 8, 8)
        loss, logits = train_step(torch.cat([x, x.flip(3) + 0.05 * torch.randn_like(x)]))
        losses.append(loss.item())
        n_iter += 1
    if epoch_counter >= 1:
        scheduler.step()
    print(
        f"Epoch: {epoch_counter}\tLoss: {loss:.4f}\tTop1: {(logits.argmax(1) == 0).float().mean():.2f}"
    )
