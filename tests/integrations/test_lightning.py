"""A ``LightningModule`` with its step compiled, beside Lightning's own run."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import treadle

lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")
from treadle.integrations.lightning import TreadleStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4)
        )
        self.losses, self.checked = [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.layers(x)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"accuracy": (logits.argmax(1) == y).float().mean()})
        return {"loss": loss, "logits": logits}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.log("val_loss", loss)
        self.checked.append(loss.item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Watches(Classifier):
    """Hooks of the module between the backward and the update."""

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]))

    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, 0.25, "norm")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9


class Measures(Classifier):
    """With metrics, what the trainer knows, options without names, and a branch on a number."""

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.right = torchmetrics.Accuracy("multiclass", num_classes=4)
        self.seen = torchmetrics.MeanMetric()

    def log(self, name, *args, **kwargs):
        super().log(f"own/{name}", *args, **kwargs)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.layers(x)
        loss = F.cross_entropy(logits, y)
        self.right(logits, y)
        self.seen.update(loss.detach())
        self.log("right", self.right, on_step=True, on_epoch=True)
        self.log("step", float(self.global_step), True, batch_size=len(y))
        if batch_idx % 3 == 0:
            self.log("third", loss)
        return {"loss": loss, "rows": len(y)}

    def on_train_epoch_end(self):
        self.log("seen", self.seen.compute())
        self.seen.reset()


def data(rows=64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 8, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)


def fit(compiled, folder, *, kind=Classifier, dropout=0.0, memory=None, resume=None, **arguments):
    lightning.seed_everything(0, verbose=False)
    module = kind(dropout)
    strategy = TreadleStrategy(memory=memory) if compiled else "auto"
    chosen = {
        "max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_checkpointing": False, "enable_model_summary": False, "gradient_clip_val": 0.5,
    }  # fmt: skip
    trainer = lightning.Trainer(strategy=strategy, default_root_dir=folder, **(chosen | arguments))
    trainer.fit(module, data(), data(16), ckpt_path=resume)
    return module, trainer


def assert_alike(ours, theirs, rtol=1e-4, atol=1e-5):
    (module, trainer), (expected, eager) = ours, theirs
    assert module.losses == pytest.approx(expected.losses, rel=rtol)
    assert module.checked == pytest.approx(expected.checked, rel=rtol)
    assert trainer.global_step == eager.global_step
    for a, b in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
    wanted = {name: value.item() for name, value in eager.callback_metrics.items()}
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert found == pytest.approx(wanted, rel=rtol)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"gradient_clip_val": None},
        {"dropout": 0.2},
        {"memory": 0.0},
        {"kind": Watches, "gradient_clip_val": None},
        {"kind": Measures},
        {"precision": "64-true"},
    ],
    ids=[
        "plain", "accumulation", "by value", "no clipping", "dropout", "budget", "hooks", "metrics",
        "float64",
    ],
)  # fmt: skip
def test_a_run_is_lightnings_own(arguments, tmp_path):
    assert_alike(fit(True, tmp_path, **arguments), fit(False, tmp_path, **arguments))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_sixteen_bits(precision, tmp_path):
    ours, theirs = (fit(each, tmp_path, precision=precision) for each in (True, False))
    assert ours[0].losses == pytest.approx(theirs[0].losses, rel=5e-2)
    assert ours[1].global_step == theirs[1].global_step


def test_callbacks_that_change_the_loop(tmp_path):
    def run(compiled):
        callbacks = [
            lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 1: 2}),
            lightning.pytorch.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1),
        ]
        return fit(compiled, tmp_path, callbacks=callbacks, max_epochs=3)

    assert_alike(run(True), run(False))


@pytest.mark.parametrize("first", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("then", [True, False], ids=["compiled", "eager"])
def test_checkpoints_go_both_ways(first, then, tmp_path):
    whole, _ = fit(False, tmp_path)
    _, trainer = fit(first, tmp_path, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    rest, _ = fit(then, tmp_path, resume=tmp_path / "saved.ckpt")
    for a, b in zip(rest.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert rest.losses == pytest.approx(whole.losses[-len(rest.losses) :], rel=1e-4)


def test_few_variants(tmp_path):
    _, trainer = fit(True, tmp_path, accumulate_grad_batches=2)
    step = trainer.strategy.step
    assert len(step.recompiles) <= 3, step.recompiles
    assert "peak" in step.explain()


class Peeks(lightning.Callback):
    def on_after_backward(self, trainer, pl_module):
        pass


class Zeroes(Classifier):
    def on_before_zero_grad(self, optimizer):
        pass


class LooksLate(lightning.Callback):
    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        pass


class Skips(Classifier):
    def training_step(self, batch, batch_idx):
        return None


class ByHand(Classifier):
    def __init__(self, dropout):
        super().__init__(dropout)
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"callbacks": [Peeks()]}, "Peeks.on_after_backward"),
        ({"callbacks": [LooksLate()]}, "LooksLate.on_before_zero_grad"),
        ({"kind": Zeroes}, "Zeroes.on_before_zero_grad"),
        ({"kind": Skips}, "no loss"),
        ({"kind": ByHand, "gradient_clip_val": None}, "automatic_optimization"),
    ],
)
def test_what_cannot_be_one_step_is_refused(arguments, words, tmp_path):
    with pytest.raises(treadle.CaptureError, match=r"TR-142") as caught:
        fit(True, tmp_path, **arguments)
    assert words in str(caught.value)
    assert caught.value.remedy
