"""nn.Transformer with masks made in the step, Noam's schedule as a class that wraps the optimizer."""

import math

import torch
import torch.nn as nn

import treadle

torch.manual_seed(50)
PAD, VOCAB, D = 1, 14, 16


class PositionalEncoding(nn.Module):
    def __init__(self, d, maxlen=20):
        super().__init__()
        den = torch.exp(-torch.arange(0, d, 2) * math.log(10000) / d)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        table = torch.zeros((maxlen, d))
        table[:, 0::2], table[:, 1::2] = torch.sin(pos * den), torch.cos(pos * den)
        self.register_buffer("pos_embedding", table.unsqueeze(-2))

    def forward(self, x):
        return x + self.pos_embedding[: x.size(0), :]


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(D, 2, 1, 1, 32, dropout=0.0)
        self.generator = nn.Linear(D, VOCAB)
        self.src_emb, self.tgt_emb, self.pe = (
            nn.Embedding(VOCAB, D),
            nn.Embedding(VOCAB, D),
            PositionalEncoding(D),
        )

    def forward(self, src, tgt, src_mask, tgt_mask, src_pad, tgt_pad):
        a, b = self.pe(self.src_emb(src) * math.sqrt(D)), self.pe(self.tgt_emb(tgt) * math.sqrt(D))
        return self.generator(
            self.transformer(a, b, src_mask, tgt_mask, None, src_pad, tgt_pad, src_pad)
        )


def create_mask(src, tgt):
    s, t = src.shape[0], tgt.shape[0]
    tgt_mask = torch.triu(torch.full((t, t), float("-inf")), diagonal=1)
    src_mask = torch.zeros((s, s))
    pad = lambda x: torch.zeros(x.shape).masked_fill(x == PAD, float("-inf")).transpose(0, 1)
    return src_mask, tgt_mask, pad(src), pad(tgt)


class NoamOpt:
    def __init__(self, model_size, factor, warmup, optimizer):
        self.optimizer, self._step, self.warmup = optimizer, 0, warmup
        self.factor, self.model_size = factor, model_size

    def set_rate(self):
        self._step += 1
        rate = (
            self.factor
            * self.model_size**-0.5
            * min(self._step**-0.5, self._step * self.warmup**-1.5)
        )
        for p in self.optimizer.param_groups:
            p["lr"] = rate


model = Seq2Seq()
loss_fn = nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9)
noam = NoamOpt(D, 0.1, 4, optimizer)


def train_step(src, tgt):
    tgt_input = tgt[:-1, :]
    logits = model(src, tgt_input, *create_mask(src, tgt_input))
    optimizer.zero_grad()
    loss = loss_fn(logits.reshape(-1, VOCAB), tgt[1:, :].reshape(-1))
    loss.backward()
    optimizer.step()
    return loss.detach()


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)
losses = 0
for i in range(5):
    src, tgt = torch.randint(2, VOCAB, (6, 3)), torch.randint(2, VOCAB, (7, 3))
    src[4:, 0], tgt[5:, 0] = PAD, PAD
    noam.set_rate()
    losses += train_step(src, tgt).item()
print(losses / 5)
