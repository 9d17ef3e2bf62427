"""Speech recognition in small: convolution, bidirectional GRU, CTC, OneCycle schedule."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(36)
hparams = {"n_feats": 8, "n_class": 6, "rnn_dim": 12, "lr": 5e-3, "epochs": 5, "dropout": 0.1}


class SpeechModel(nn.Module):
    def __init__(self, n_feats, rnn_dim, n_class, dropout):
        super().__init__()
        self.cnn = nn.Conv1d(n_feats, rnn_dim, 3, stride=2, padding=1)
        self.norm = nn.LayerNorm(rnn_dim)
        self.rnn = nn.GRU(rnn_dim, rnn_dim, batch_first=True, bidirectional=True)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(2 * rnn_dim, n_class)

    def forward(self, x):
        x = F.gelu(self.norm(self.cnn(x).transpose(1, 2)))
        return self.fc(self.drop(self.rnn(x)[0]))


model = SpeechModel(hparams["n_feats"], hparams["rnn_dim"], hparams["n_class"], hparams["dropout"])
optimizer = torch.optim.AdamW(model.parameters(), hparams["lr"])
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer,
    max_lr=hparams["lr"],
    steps_per_epoch=1,
    epochs=hparams["epochs"],
    anneal_strategy="linear",
)
criterion = nn.CTCLoss(blank=5, zero_infinity=True)


def train_batch(spectrograms, labels, input_lengths, label_lengths):
    optimizer.zero_grad()
    output = F.log_softmax(model(spectrograms), dim=2).transpose(0, 1)
    loss = criterion(output, labels, input_lengths, label_lengths)
    loss.backward()
    optimizer.step()
    return loss.detach()


train_batch = treadle.compile(train_batch, model=model, optimizer=optimizer)
data_len = hparams["epochs"] * 3
for epoch in range(1, hparams["epochs"] + 1):
    loss = train_batch(
        torch.randn(3, 8, 20),
        torch.randint(5, (3, 4)),
        torch.full((3,), 10),
        torch.tensor([4, 3, 2]),
    )
    scheduler.step()
    print(f"Train Epoch: {epoch} [{epoch * 3}/{data_len}]\tLoss: {loss.item():.4f}")
