"""Encoder and decoder share an embedding, which both optimizers update; predictions are fed back."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(72)
VOCAB, HIDDEN, BATCH, LENGTH, SOS, PAD = 12, 16, 4, 4, 1, 0


class Encoder(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.gru = embedding, nn.GRU(HIDDEN, HIDDEN, bidirectional=True)

    def forward(self, words):
        outputs, hidden = self.gru(self.embedding(words))
        return outputs[:, :, :HIDDEN] + outputs[:, :, HIDDEN:], hidden[:1]


class Decoder(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding, self.gru = embedding, nn.GRU(HIDDEN, HIDDEN)
        self.concat, self.out = nn.Linear(2 * HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, word, hidden, outputs):
        output, hidden = self.gru(self.embedding(word), hidden)
        weights = torch.sum(output * outputs, dim=2).t().softmax(1).unsqueeze(1)
        context = weights.bmm(outputs.transpose(0, 1)).squeeze(1)
        both = torch.tanh(self.concat(torch.cat((output.squeeze(0), context), 1)))
        return F.softmax(self.out(both), dim=1), hidden


def mask_nll_loss(inp, target, mask):
    total = mask.sum()
    cross_entropy = -torch.log(torch.gather(inp, 1, target.view(-1, 1)).squeeze(1))
    return (cross_entropy * mask).sum() / total.clamp(min=1), total.item()


embedding = nn.Embedding(VOCAB, HIDDEN)
encoder, decoder = Encoder(embedding), Decoder(embedding)
encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=5e-3)


def train(words, target, mask, forced):
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    loss, print_losses, n_totals = 0, [], 0
    outputs, hidden = encoder(words)
    word = torch.LongTensor([[SOS for _ in range(BATCH)]])
    for t in range(LENGTH):
        output, hidden = decoder(word, hidden, outputs)
        _, topi = output.topk(1)
        predicted = torch.LongTensor([[topi[i][0] for i in range(BATCH)]])
        word = target[t].view(1, -1) if forced else predicted
        mask_loss, total = mask_nll_loss(output, target[t], mask[t])
        loss += mask_loss
        print_losses.append(mask_loss.item() * total)
        n_totals += total
    loss.backward()
    nn.utils.clip_grad_norm_(encoder.parameters(), 50.0)
    nn.utils.clip_grad_norm_(decoder.parameters(), 50.0)
    encoder_optimizer.step()
    decoder_optimizer.step()
    return sum(print_losses) / n_totals


train = treadle.compile(
    train, model=[encoder, decoder], optimizer=[encoder_optimizer, decoder_optimizer]
)
losses = []
for _ in range(6):
    words = torch.randint(2, VOCAB, (LENGTH, BATCH))
    words[2:, 2:] = PAD
    losses.append(train(words, words, words != PAD, forced=False))
