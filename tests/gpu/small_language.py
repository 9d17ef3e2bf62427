"""A small step under autocast, for tests of what a cache has of it."""

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 101


def small_language(device="cuda"):
    """The step, its model and optimizer, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Embedding(WORDS, 48), nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU()),
        nn.Linear(96, WORDS),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train(tokens):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return train, model, optimizer, torch.randint(WORDS, (7, 33), device=device)
