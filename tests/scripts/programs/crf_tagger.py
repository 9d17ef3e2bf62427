"""A tagger by an LSTM and a linear-chain CRF: forward algorithm in log space, batches of one length."""

import torch
import torch.nn as nn

import treadle

torch.manual_seed(35)
TAGS, VOCAB, T, B = 4, 20, 4, 5


class CRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.transitions = nn.Parameter(torch.randn(TAGS, TAGS) * 0.1)
        self.start, self.end = nn.Parameter(torch.zeros(TAGS)), nn.Parameter(torch.zeros(TAGS))

    def forward(self, emissions, tags, mask):
        return (self._normalizer(emissions, mask) - self._score(emissions, tags, mask)).mean()

    def _score(self, emissions, tags, mask):
        score = self.start[tags[:, 0]] + emissions[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for i in range(1, T):
            step = self.transitions[tags[:, i - 1], tags[:, i]]
            step = step + emissions[:, i].gather(1, tags[:, i : i + 1]).squeeze(1)
            score = score + step * mask[:, i]
        last = tags.gather(1, mask.long().sum(1, keepdim=True) - 1).squeeze(1)
        return score + self.end[last]

    def _normalizer(self, emissions, mask):
        score = self.start + emissions[:, 0]
        for i in range(1, T):
            nxt = torch.logsumexp(
                score.unsqueeze(2) + self.transitions + emissions[:, i].unsqueeze(1), 1
            )
            score = torch.where(mask[:, i].unsqueeze(1).bool(), nxt, score)
        return torch.logsumexp(score + self.end, dim=1)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 6, bidirectional=True, batch_first=True)
        self.hidden2tag, self.crf = nn.Linear(12, TAGS), CRF()

    def forward(self, words, tags):
        mask = (words != 0).float()
        return self.crf(self.hidden2tag(self.lstm(self.emb(words))[0]), tags, mask)


model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-4)


def step(words, tags):
    model.zero_grad()
    loss = model(words, tags)
    loss.backward()
    optimizer.step()
    return loss.detach()


step = treadle.compile(step, model=model, optimizer=optimizer)
losses = []
for epoch in range(4):
    words = torch.randint(1, VOCAB, (B, T))
    lengths = torch.randint(2, T + 1, (B, 1))
    words = words * (torch.arange(T)[None] < lengths)
    losses.append(step(words, torch.randint(TAGS, (B, T))).item())
