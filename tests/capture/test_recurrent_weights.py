"""Weights of recurrent layers while a step is traced."""

import torch
from torch import nn

import treadle


def test_weights_are_not_laid_out_while_a_step_is_traced(monkeypatch, tmp_path):
    model = nn.GRU(3, 4)
    seen = []

    def flatten(self):
        seen.append([type(each).__name__ for each in self._flat_weights])

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)

    def step(x):
        model.flatten_parameters()  # as many loops do
        model(x)[0].sum().backward()
        for each in model.parameters():
            each.data.add_(each.grad, alpha=-0.1)
            each.grad = None

    options = treadle.Options(cache_dir=tmp_path, codegen=False)
    treadle.compile(step, model=model, options=options)(torch.randn(5, 2, 3))
    assert not any("Fake" in name for names in seen for name in names)
    assert nn.RNNBase.flatten_parameters is flatten
