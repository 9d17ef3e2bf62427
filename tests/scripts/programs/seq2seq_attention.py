"""Translation by an encoder and a decoder with additive attention, one token after the other."""

import random
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

random.seed(18)
torch.manual_seed(18)
SOS, EOS, VOCAB, LENGTH, HIDDEN = 0, 1, 12, 3, 16


class EncoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.gru(self.dropout(self.embedding(x)))


class BahdanauAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.Wa, self.Ua, self.Va = (
            nn.Linear(HIDDEN, HIDDEN),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class AttnDecoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.attention = BahdanauAttention()
        self.gru = nn.GRU(2 * HIDDEN, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, VOCAB)

    def forward(self, encoder_outputs, encoder_hidden, target):
        token = torch.empty(encoder_outputs.size(0), 1, dtype=torch.long).fill_(SOS)
        hidden, outputs = encoder_hidden, []
        for i in range(LENGTH):
            embedded = self.embedding(token)
            context, _ = self.attention(hidden.permute(1, 0, 2), encoder_outputs)
            output, hidden = self.gru(torch.cat((embedded, context), dim=2), hidden)
            outputs.append(self.out(output))
            token = target[:, i].unsqueeze(1)
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1)


encoder, decoder = EncoderRNN(), AttnDecoderRNN()
encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-3)
criterion = nn.NLLLoss()


def train_batch(source, target):
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    encoder_outputs, encoder_hidden = encoder(source)
    decoder_outputs = decoder(encoder_outputs, encoder_hidden, target)
    loss = criterion(decoder_outputs.view(-1, VOCAB), target.view(-1))
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
    return loss.detach()


train_batch = treadle.compile(
    train_batch, model=[encoder, decoder], optimizer=[encoder_optimizer, decoder_optimizer]
)
start = time.time()
plot_losses, plot_loss_total, print_loss_total = [], 0, 0
for epoch in range(1, 7):
    source = torch.randint(2, VOCAB, (6, LENGTH))
    loss = train_batch(source, source.flip(1)).item()
    print_loss_total += loss
    plot_loss_total += loss
    if epoch % 2 == 0:
        print(f"({epoch}) {print_loss_total / 2:.4f}")
        print_loss_total = 0
    if epoch % 3 == 0:
        plot_losses.append(plot_loss_total / 3)
        plot_loss_total = 0
