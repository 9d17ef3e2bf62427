"""A variational autoencoder in the manner of the old example: train() and test() functions.

again: dim 0: 8 -> 6
"""

import torch
from torch import nn, optim
from torch.nn import functional as F

import treadle

torch.manual_seed(5)
pictures = torch.rand(30, 1, 6, 6)
train_batches = [pictures[i : i + 8] for i in range(0, 30, 8)]


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(36, 20)
        self.fc21 = nn.Linear(20, 4)
        self.fc22 = nn.Linear(20, 4)
        self.fc3 = nn.Linear(4, 20)
        self.fc4 = nn.Linear(20, 36)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 36))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 36), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


@torch.no_grad()
def test(epoch):
    model.eval()
    total = sum(loss_function(model(b)[0], b, *model(b)[1:]).item() for b in train_batches)
    print(f"====> Test set loss: {total / 30:.4f}")
    return total


def train_step(data):
    optimizer.zero_grad()
    recon_batch, mu, logvar = model(data)
    loss = loss_function(recon_batch, data, mu, logvar)
    loss.backward()
    optimizer.step()
    return loss.detach()


step = treadle.compile(train_step, model=model, optimizer=optimizer)


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, data in enumerate(train_batches):
        loss = step(data)
        train_loss += loss.item()
        if batch_idx % 2 == 0:
            print(
                f"Train Epoch: {epoch} [{batch_idx * len(data)}/30] {loss.item() / len(data):.5f}"
            )
    return train_loss


results = []
if __name__ == "__main__":
    for epoch in range(1, 4):
        results.append((train(epoch), test(epoch)))
