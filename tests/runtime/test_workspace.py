"""What library calls are measured to allocate: an upper bound of what they do with real numbers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import treadle

BAG = nn.EmbeddingBag(50, 16, mode="max")


def _symmetric(x):
    return x @ x.mT + torch.eye(x.shape[-2])


CALLS = {
    "matrix_exp": lambda x: torch.matrix_exp(x[:48, :48]),
    "svdvals": torch.linalg.svdvals,
    "svd": lambda x: torch.linalg.svd(x, full_matrices=False)[0].abs(),
    "eigh": lambda x: torch.linalg.eigh(_symmetric(x))[0],
    "pinv": torch.linalg.pinv,
    "inverse": lambda x: torch.linalg.inv(_symmetric(x)),
    "solve": lambda x: torch.linalg.solve(_symmetric(x), x),
    "cholesky": lambda x: torch.linalg.cholesky(_symmetric(x)),
    "determinant": lambda x: torch.linalg.slogdet(_symmetric(x))[1],
    "qr": lambda x: torch.linalg.qr(x)[1].abs(),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 20, replacement=False).float(),
    "poisson": lambda x: torch.poisson(x.abs()),
    "bags": lambda x: BAG((x.abs() * 10).long().clamp(max=49)),
    "halves": lambda x: (x.bfloat16() @ x.bfloat16().mT).float(),
}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 20.0])
@pytest.mark.parametrize("name", CALLS)
def test_no_call_takes_more_than_was_promised(name, scale, tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(56, 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x):
        found = CALLS[name](model(x))
        loss = F.softplus(found).mean() + model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    options = treadle.Options(codegen=False, cache_dir=tmp_path)
    compiled = treadle.compile(step, model=model, optimizer=optimizer, options=options)
    batch = scale * torch.randn(64, 56)
    compiled(batch)
    measured = compiled.measure(batch)
    assert measured.peak_bytes <= compiled.compiled.artifact.peak_bytes


def test_a_result_in_a_larger_storage_counts_as_long_as_it_lives(tmp_path):
    """``embedding_bag`` makes the list of bags by one number longer, and keeps its storage. The
    step draws, so nothing is left of what is promised for the generator's state."""
    bags = nn.EmbeddingBag(50, 16, mode="max")
    optimizer = torch.optim.SGD(bags.parameters(), lr=1e-3)

    def step(words):
        loss = (F.dropout(bags(words), 0.1).sin() * 1.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    options = treadle.Options(codegen=False, cache_dir=tmp_path)
    compiled = treadle.compile(step, model=bags, optimizer=optimizer, options=options)
    words = torch.randint(50, (64, 48))
    compiled(words)
    measured = compiled.measure(words)
    assert measured.peak_bytes <= compiled.compiled.artifact.peak_bytes
    again = treadle.compile(step, model=bags, optimizer=optimizer, options=options)
    assert again.prepare(words).artifact.peak_bytes == compiled.compiled.artifact.peak_bytes
