"""Text, sound and signals."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ordinary_steps.kit import Kit, Setup, mlp, row, trained

WORDS = 50


def _texts(kit: Kit, n: int = 4) -> Tensor:
    return kit.randint(WORDS, kit.size(n, 8 * n), kit.size(12, 128))


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], w: int, **given: object) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, w)
        self.layer = kind(w, w, batch_first=True, **given)  # type: ignore[arg-type]
        self.out = nn.Linear(w * (2 if given.get("bidirectional") else 1), 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.words(x))[0])


def _tagger(kit: Kit, kind: type[nn.RNNBase], **given: object) -> Setup:
    model = kit.put(Tagger(kind, kit.size(8, 128), **given))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return trained(model, loss_of, lambda: ((x := _texts(kit)), x % 7))


@row
def lstm_tagger(kit: Kit) -> Setup:
    return _tagger(kit, nn.LSTM, num_layers=2, dropout=0.1)


@row
def gru_tagger(kit: Kit) -> Setup:
    return _tagger(kit, nn.GRU, bidirectional=True)


@row
def rnn_tagger(kit: Kit) -> Setup:
    return _tagger(kit, nn.RNN, nonlinearity="relu")


class Attending(nn.Module):
    """A recurrent encoder, and a decoder of cells that attends to it."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.words, self.encoder = nn.Embedding(WORDS, w), nn.GRU(w, w, batch_first=True)
        self.cell, self.out = nn.GRUCell(2 * w, w), nn.Linear(w, WORDS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory, last = self.encoder(self.words(x))
        h, outs = last[0], []
        for word in self.words(y).unbind(1):
            weights = torch.einsum("nd,ntd->nt", h, memory).softmax(1)
            context = torch.einsum("nt,ntd->nd", weights, memory)
            h = self.cell(torch.cat([word, context], 1), h)
            outs.append(self.out(h))
        return torch.stack(outs, 1)


@row
def seq2seq_attention(kit: Kit) -> Setup:
    model = kit.put(Attending(kit.size(8, 64)))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x, y[:, :-1]).flatten(0, 1), y[:, 1:].flatten())

    def batch() -> tuple[Tensor, Tensor]:
        return _texts(kit), kit.randint(WORDS, kit.size(4, 32), 9)

    return trained(model, loss_of, batch)


class Places(nn.Module):
    def __init__(self, t: int, w: int) -> None:
        super().__init__()
        at, rate = torch.arange(t)[:, None], torch.exp(torch.arange(0, w, 2) * (-math.log(1e4) / w))
        places = torch.stack([(at * rate).sin(), (at * rate).cos()], 2).flatten(1)
        self.register_buffer("places", places)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.places[: x.shape[1]]


@row
def transformer_encoder(kit: Kit) -> Setup:
    w = kit.size(16, 128)
    layer = nn.TransformerEncoderLayer(w, 4, 4 * w, dropout=0.1, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = kit.put(nn.Sequential(nn.Embedding(WORDS, w), Places(128, w), body, nn.Linear(w, 3)))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).mean(1), y)

    return trained(model, loss_of, lambda: ((x := _texts(kit)), x[:, 0] % 3))


@row
def transformer_causal(kit: Kit) -> Setup:
    """``nn.TransformerEncoder`` with PyTorch's own causal mask."""
    w = kit.size(16, 128)
    layer = nn.TransformerEncoderLayer(w, 4, 2 * w, dropout=0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = kit.put(nn.ModuleList([nn.Embedding(WORDS, w), body, nn.Linear(w, WORDS)]))

    def loss_of(x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1] - 1, device=x.device)
        h = model[1](model[0](x[:, :-1]), mask=mask, is_causal=True)
        return F.cross_entropy(model[2](h).flatten(0, 1), x[:, 1:].flatten())

    return trained(model, loss_of, lambda: (_texts(kit),))


@row
def transformer_padded(kit: Kit) -> Setup:
    w = kit.size(16, 128)
    layer = nn.TransformerEncoderLayer(w, 2, 2 * w, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    model = kit.put(nn.ModuleList([nn.Embedding(WORDS, w, padding_idx=0), body, nn.Linear(w, 2)]))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        empty = x == 0
        h = model[1](model[0](x), src_key_padding_mask=empty)
        kept = (~empty).unsqueeze(-1)
        return F.cross_entropy(model[2]((h * kept).sum(1) / kept.sum(1)), y)

    def batch() -> tuple[Tensor, Tensor]:
        x = _texts(kit).clamp(min=1)
        x[:, -3:] = 0
        return x, kit.randint(2, x.shape[0])

    return trained(model, loss_of, batch)


@row
def transformer_seq2seq(kit: Kit) -> Setup:
    w = kit.size(16, 64)
    body = nn.Transformer(w, 2, 1, 1, 2 * w, dropout=0.0, batch_first=True)
    model = kit.put(nn.ModuleList([nn.Embedding(WORDS, w), body, nn.Linear(w, WORDS)]))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1] - 1, device=y.device)
        h = model[1](model[0](x), model[0](y[:, :-1]), tgt_mask=mask, tgt_is_causal=True)
        return F.cross_entropy(model[2](h).flatten(0, 1), y[:, 1:].flatten(), label_smoothing=0.1)

    return trained(model, loss_of, lambda: (_texts(kit), _texts(kit)))


class Rotary(nn.Module):
    """A layer as in today's language models: RMS norm, rotary places, shared keys, SwiGLU."""

    def __init__(self, w: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.d = heads, shared, w // heads
        self.norm1, self.norm2 = nn.RMSNorm(w), nn.RMSNorm(w)
        self.q, self.o = nn.Linear(w, w, bias=False), nn.Linear(w, w, bias=False)
        self.kv = nn.Linear(w, 2 * shared * self.d, bias=False)
        self.gate, self.up = (nn.Linear(w, 3 * w, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * w, w, bias=False)

    def _turned(self, x: Tensor) -> Tensor:
        t = torch.arange(x.shape[-2], device=x.device)[:, None]
        angle = t * 1e4 ** (-torch.arange(self.d // 2, device=x.device) / (self.d // 2))
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, x: Tensor) -> Tensor:
        n, t, w = x.shape
        h = self.norm1(x)
        q = self.q(h).view(n, t, self.heads, self.d).transpose(1, 2)
        k, v = self.kv(h).view(n, t, 2, self.shared, self.d).permute(2, 0, 3, 1, 4)
        k, v = (e.repeat_interleave(self.heads // self.shared, 1) for e in (self._turned(k), v))
        out = F.scaled_dot_product_attention(self._turned(q), k, v, is_causal=True)
        x = x + self.o(out.transpose(1, 2).reshape(n, t, w))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


@row
def language_model(kit: Kit) -> Setup:
    w = kit.size(16, 256)
    words, head = nn.Embedding(WORDS, w), nn.Linear(w, WORDS, bias=False)
    head.weight = words.weight
    body = nn.Sequential(*(Rotary(w, 4, 2) for _ in range(2)), nn.RMSNorm(w))
    model = kit.put(nn.ModuleList([words, body, head]))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def step(x: Tensor) -> Tensor:
        logits = model[2](model[1](model[0](x[:, :-1])))
        loss = F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Setup(step, model, optimizer, lambda: (_texts(kit),))


class Experts(nn.Module):
    """The two best of four experts for each token, all computed and weighted."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.router = nn.Linear(w, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, w, 2 * w) / w**0.5)
        self.down = nn.Parameter(torch.randn(4, 2 * w, w) / w**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        odds = self.router(x).softmax(-1)
        best, which = odds.topk(2, -1)
        share = torch.zeros_like(odds).scatter(-1, which, best / best.sum(-1, keepdim=True))
        h = torch.einsum("nw,ewf->enf", x, self.up).relu()
        out = torch.einsum("enf,efw,ne->nw", h, self.down, share)
        return out, 4 * (odds.mean(0) * (share > 0).float().mean(0)).sum()


@row
def mixture_of_experts(kit: Kit) -> Setup:
    w = kit.size(8, 128)
    model = kit.put(nn.ModuleList([nn.Linear(w, w), Experts(w), nn.Linear(w, 3)]))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        out, balance = model[1](model[0](x))
        return F.cross_entropy(model[2](out), y) + 0.01 * balance

    n = kit.size(16, 512)
    return trained(model, loss_of, lambda: (kit.randn(n, w), kit.randint(3, n)))


class Window(nn.Module):
    """Attention within windows, with a learned bias for each relative place."""

    def __init__(self, w: int, side: int) -> None:
        super().__init__()
        self.side, self.attention = side, nn.Linear(w, 3 * w)
        self.bias = nn.Parameter(torch.zeros((2 * side - 1) ** 2))
        grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"))
        gaps = grid.flatten(1)[:, :, None] - grid.flatten(1)[:, None, :] + side - 1
        self.register_buffer("index", gaps[0] * (2 * side - 1) + gaps[1])

    def forward(self, x: Tensor) -> Tensor:
        n, h, v, w = x.shape
        s = self.side
        x = x.roll((-s // 2, -s // 2), (1, 2)).view(n, h // s, s, v // s, s, w)
        q, k, v2 = self.attention(x.transpose(2, 3).reshape(-1, s * s, w)).chunk(3, -1)
        odds = q @ k.mT / w**0.5 + self.bias[self.index]
        out = (odds.softmax(-1) @ v2).view(n, h // s, v // s, s, s, w).transpose(2, 3)
        return out.reshape(n, h, v, w).roll((s // 2, s // 2), (1, 2))


@row
def window_attention(kit: Kit) -> Setup:
    w, side = kit.size(8, 64), kit.size(8, 32)
    model = kit.put(nn.Sequential(nn.Linear(3, w), Window(w, 4), nn.GELU(), nn.Linear(w, 4)))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).mean((1, 2)), y)

    return trained(model, loss_of, lambda: (kit.randn(4, side, side, 3), kit.randint(4, 4)))


class Causal(nn.Module):
    def __init__(self, w: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(w, w, 3, dilation=dilation))
        self.pad = 2 * dilation

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + F.dropout(self.conv(F.pad(x, (self.pad, 0))), 0.1, self.training))


@row
def temporal_convolution(kit: Kit) -> Setup:
    w, t = kit.size(8, 64), kit.size(16, 256)
    layers = [nn.Conv1d(2, w, 1), *(Causal(w, 2**at) for at in range(3)), nn.Conv1d(w, 1, 1)]
    model = kit.put(nn.Sequential(*layers))

    def loss_of(x: Tensor) -> Tensor:
        return F.huber_loss(model(x)[..., :-1], x[:, :1, 1:])

    return trained(model, loss_of, lambda: (kit.randn(4, 2, t),))


class Gated(nn.Module):
    def __init__(self, w: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(w, 2 * w, 2, dilation=dilation)
        self.skip, self.pad = nn.Conv1d(w, w, 1), dilation

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.conv(F.pad(x, (self.pad, 0))).chunk(2, 1)
        h = a.tanh() * b.sigmoid()
        return x + h, self.skip(h)


@row
def wavenet(kit: Kit) -> Setup:
    w, t = kit.size(8, 64), kit.size(32, 512)
    model = kit.put(nn.ModuleDict({
        "words": nn.Embedding(32, w), "out": nn.Conv1d(w, 32, 1),
        "layers": nn.ModuleList(Gated(w, 2**at) for at in range(4)),
    }))  # fmt: skip

    def loss_of(x: Tensor) -> Tensor:
        h, total = model["words"](x[:, :-1]).mT, 0
        for layer in model["layers"]:
            h, skip = layer(h)
            total = total + skip
        return F.cross_entropy(model["out"](F.relu(total)), x[:, 1:])

    return trained(model, loss_of, lambda: (kit.randint(32, 4, t),))


@row
def audio_convolution(kit: Kit) -> Setup:
    w, t = kit.size(8, 64), kit.size(256, 8000)
    model = kit.put(nn.Sequential(
        nn.Conv1d(1, w, 9, 4, 4), nn.BatchNorm1d(w), nn.ReLU(), nn.MaxPool1d(4),
        nn.Conv1d(w, 2 * w, 3, padding=1, groups=2), nn.BatchNorm1d(2 * w), nn.GLU(1),
        nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(w, 6),
    ))  # fmt: skip

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(model(x), 1), y)

    return trained(model, loss_of, lambda: (kit.randn(8, 1, t), kit.randint(6, 8)))


@row
def stft_loss(kit: Kit) -> Setup:
    t = kit.size(256, 8192)
    model = kit.put(nn.Sequential(nn.Conv1d(1, 8, 9, padding=4), nn.Tanh(), nn.Conv1d(8, 1, 1)))
    window = torch.hann_window(64).to(kit.device)

    def spectrum(x: Tensor) -> Tensor:
        found = torch.stft(x.squeeze(1), 64, 16, window=window, return_complex=True)
        return (found.abs().square() + 1e-7).sqrt()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        a, b = spectrum(model(x)), spectrum(y)
        return F.l1_loss(a.log(), b.log()) + (a - b).norm() / b.norm()

    return trained(model, loss_of, lambda: (kit.randn(2, 1, t), kit.randn(2, 1, t)))


class Spectral(nn.Module):
    def __init__(self, w: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(w, w, modes, dtype=torch.cfloat) / w)
        self.local = nn.Conv1d(w, w, 1)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x)
        kept = torch.einsum("nik,iok->nok", waves[..., : self.modes], self.weight)
        out = torch.zeros_like(waves)
        out[..., : self.modes] = kept
        return F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.local(x))


@row
def fourier_operator(kit: Kit) -> Setup:
    w, t = kit.size(4, 32), kit.size(32, 512)
    layers = [nn.Conv1d(1, w, 1), Spectral(w, 5), Spectral(w, 5), nn.Conv1d(w, 1, 1)]
    model = kit.put(nn.Sequential(*layers))
    return trained(model, lambda x, y: F.mse_loss(model(x), y), lambda: (kit.randn(4, 1, t),) * 2)


@row
def speech_ctc(kit: Kit) -> Setup:
    w, t = kit.size(8, 64), kit.size(24, 200)
    model = kit.put(nn.Sequential(nn.Conv1d(8, w, 5, padding=2), nn.ReLU(), nn.Conv1d(w, 12, 1)))

    def loss_of(x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        odds = model(x).permute(2, 0, 1).log_softmax(-1)
        full = torch.full((x.shape[0],), odds.shape[0], device=x.device)
        return F.ctc_loss(odds, y, full, lengths, zero_infinity=True)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        return kit.randn(4, 8, t), kit.randint(11, 4, 6) + 1, kit.randint(4, 4) + 2

    return trained(model, loss_of, batch)


@row
def cross_attention(kit: Kit) -> Setup:
    """A few learned queries look at a long input."""
    w, t = kit.size(8, 64), kit.size(20, 512)
    attention = nn.MultiheadAttention(w, 2, dropout=0.1, batch_first=True)
    queries = nn.ParameterList([nn.Parameter(torch.randn(4, w) * 0.1)])
    model = kit.put(nn.ModuleList([attention, queries, mlp(w, 2 * w, 3, act=nn.GELU)]))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        asked = model[1][0].expand(x.shape[0], -1, -1)
        h, _ = model[0](asked, x, x, need_weights=False)
        return F.cross_entropy(model[2](h.mean(1)), y)

    return trained(model, loss_of, lambda: (kit.randn(4, t, w), kit.randint(3, 4)))


@row
def bag_of_words(kit: Kit) -> Setup:
    w = kit.size(8, 128)
    bag, out = kit.put(nn.EmbeddingBag(WORDS, w, mode="mean")), kit.put(nn.Linear(w, 4))

    def loss_of(words: Tensor, starts: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out(bag(words, starts)), y)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        return kit.randint(WORDS, 24), torch.arange(0, 24, 4).to(kit.device), kit.randint(4, 6)

    return trained([bag, out], loss_of, batch)


@row
def skip_gram_sparse(kit: Kit) -> Setup:
    """Word vectors with sparse gradients."""
    w = kit.size(8, 128)
    inner = kit.put(nn.Embedding(WORDS, w, sparse=True))
    outer = kit.put(nn.Embedding(WORDS, w, sparse=True))
    optimizer = torch.optim.SparseAdam([*inner.parameters(), *outer.parameters()], lr=1e-2)

    def loss_of(word: Tensor, near: Tensor, far: Tensor) -> Tensor:
        h = inner(word)
        good = F.logsigmoid((h * outer(near)).sum(1))
        bad = F.logsigmoid(-(outer(far) @ h.unsqueeze(2)).squeeze(2)).sum(1)
        return -(good + bad).mean()

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        return kit.randint(WORDS, 8), kit.randint(WORDS, 8), kit.randint(WORDS, 8, 3)

    return trained([inner, outer], loss_of, batch, optimizer=optimizer)
