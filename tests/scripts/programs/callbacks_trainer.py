"""A framework in small: callbacks, a state object, hooks around the batch, metrics as dicts.

again: dim 0: 8 -> 4
"""

from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(60)


@dataclass
class State:
    epoch: int = 0
    global_step: int = 0
    best_metric: float = float("inf")
    log_history: list = field(default_factory=list)


class Callback:
    def on_step_end(self, trainer):
        pass

    def on_epoch_end(self, trainer):
        pass


class Logger(Callback):
    def __init__(self, every):
        self.every = every

    def on_step_end(self, trainer):
        if trainer.state.global_step % self.every == 0:
            trainer.state.log_history.append(
                {"step": trainer.state.global_step, "loss": float(trainer.last)}
            )


class Best(Callback):
    def on_epoch_end(self, trainer):
        if float(trainer.last) < trainer.state.best_metric:
            trainer.state.best_metric = float(trainer.last)
            trainer.snapshot = {k: v.clone() for k, v in trainer.model.state_dict().items()}


class Trainer:
    def __init__(self, model, callbacks, max_epochs, lr):
        self.model, self.callbacks, self.max_epochs = model, callbacks, max_epochs
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.state, self.last, self.snapshot = State(), None, None
        self.compiled = treadle.compile(self.training_step, model=model, optimizer=self.optimizer)

    def compute_loss(self, batch):
        return F.cross_entropy(self.model(batch["x"]), batch["y"])

    def training_step(self, batch):
        self.model.train()
        loss = self.compute_loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def call(self, name):
        for callback in self.callbacks:
            getattr(callback, name)(self)

    def fit(self, batches):
        for self.state.epoch in range(self.max_epochs):
            for batch in batches:
                self.last = self.compiled(batch)
                self.state.global_step += 1
                self.call("on_step_end")
            self.call("on_epoch_end")


data_x, data_y = torch.randn(20, 6), torch.randint(3, (20,))
batches = [{"x": data_x[i : i + 8], "y": data_y[i : i + 8]} for i in range(0, 20, 8)]
trainer = Trainer(
    nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)), [Logger(2), Best()], 3, 1e-2
)
trainer.fit(batches)
state = trainer.state
