"""A model of characters by an LSTM whose hidden state is carried from batch to batch."""

from dataclasses import dataclass

import torch
import torch.nn as nn

import treadle

text = "the quick brown fox jumps over the lazy dog. " * 8
vocabulary = sorted(set(text))
index = {c: i for i, c in enumerate(vocabulary)}
data = torch.tensor([index[c] for c in text])


@dataclass
class Config:
    hidden: int = 24
    layers: int = 2
    seq_len: int = 16
    batch: int = 4
    lr: float = 5e-3
    clip: float = 0.5
    epochs: int = 2


cfg = Config()


class CharRNN(nn.Module):
    def __init__(self, size, hidden, layers):
        super().__init__()
        self.embed = nn.Embedding(size, hidden)
        self.rnn = nn.LSTM(hidden, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, size)

    def forward(self, x, state):
        h, state = self.rnn(self.embed(x), state)
        return self.head(h), state

    def init_hidden(self, batch):
        weight = next(self.parameters())
        shape = (cfg.layers, batch, cfg.hidden)
        return weight.new_zeros(shape), weight.new_zeros(shape)


model = CharRNN(len(vocabulary), cfg.hidden, cfg.layers)
optimizer = torch.optim.RMSprop(model.parameters(), lr=cfg.lr)
loss_fn = nn.CrossEntropyLoss()


def train_batch(x, y, state):
    model.train()
    model.zero_grad()
    state = tuple(s.detach() for s in state)
    logits, state = model(x, state)
    loss = loss_fn(logits.reshape(-1, logits.size(-1)), y.reshape(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
    optimizer.step()
    return loss.detach(), tuple(s.detach() for s in state)


train_batch = treadle.compile(train_batch, model=model, optimizer=optimizer)

columns = data[: len(data) // cfg.batch * cfg.batch].view(cfg.batch, -1)
total, count = 0.0, 0
for epoch in range(cfg.epochs):
    state = model.init_hidden(cfg.batch)
    for i in range(0, columns.size(1) - cfg.seq_len - 1, cfg.seq_len):
        x = columns[:, i : i + cfg.seq_len]
        y = columns[:, i + 1 : i + 1 + cfg.seq_len]
        loss, state = train_batch(x, y, state)
        total += loss.item()
        count += 1
    print("epoch", epoch, "perplexity", round(float(torch.tensor(total / count).exp()), 3))
