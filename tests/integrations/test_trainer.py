"""Hugging Face's ``Trainer`` with its step compiled, beside its own run."""

import pytest
import torch
from torch.utils.data import Dataset

import treadle

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from treadle.integrations.trainer import CompiledTraining, Trainer  # noqa: E402


class Tokens(Dataset):
    def __init__(self, rows=48, length=16):
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.randint(64, (rows, length), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return {"input_ids": self.rows[at], "labels": self.rows[at]}


# SGD: of a gradient that is zero but for rounding (of keys' biases) Adam makes steps of full size.
def trainer(kind, folder, *, callbacks=(), dropout=0.0, memory=None, **arguments):
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    chosen = {
        "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 0.1,
        "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "warmup_steps": 2, "optim": "sgd",
    }  # fmt: skip
    own = {"memory": memory} if issubclass(kind, CompiledTraining) else {}
    return kind(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(output_dir=str(folder), **(chosen | arguments)),
        train_dataset=Tokens(),
        eval_dataset=Tokens(8),
        callbacks=list(callbacks),
        **own,
    )


def history(trained, key):
    return [entry[key] for entry in trained.state.log_history if key in entry]


def assert_alike(ours, theirs):
    for key in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        assert history(ours, key) == pytest.approx(history(theirs, key), rel=1e-3), key
    assert_same_model(ours, theirs)


def assert_same_model(ours, theirs):
    for a, b in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"max_grad_norm": 0.0},
        {"eval_strategy": "steps", "eval_steps": 2},
        {"dropout": 0.1},
        {"bf16": True},
        {"optim": "adamw_torch", "learning_rate": 1e-2},
        {"memory": 0.2},
        {"gradient_checkpointing": True, "torch_empty_cache_steps": 2},
        {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 5},
    ],
    ids=[
        "clipping", "accumulation", "no clipping", "evaluation", "dropout", "bf16", "adam",
        "budget", "checkpointing", "epochs that end within an accumulation",
    ],
)  # fmt: skip
def test_a_run_is_trainers_own(arguments, tmp_path):
    ours = trainer(Trainer, tmp_path, **arguments)
    ours.train()
    theirs = trainer(transformers.Trainer, tmp_path, **arguments)
    theirs.train()
    assert len(history(ours, "loss")) == len(history(theirs, "loss")) >= 4
    if "bf16" in arguments or "optim" in arguments:
        within = 1e-2 if "bf16" in arguments else 1e-4
        assert history(ours, "loss") == pytest.approx(history(theirs, "loss"), rel=within)
    else:
        assert_alike(ours, theirs)
    assert ours.step.compiled.captured.optimizers.eager == ()
    assert len(ours.step.recompiles) <= 2, ours.step.recompiles


def test_the_cache_is_emptied_at_every_few_steps(tmp_path, monkeypatch):
    """Outside the step, which the number of the step would be read in."""
    ours, steps = trainer(Trainer, tmp_path, torch_empty_cache_steps=2), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: steps.append(ours.state.global_step))
    ours.train()
    assert steps == [0, 2, 4]
    assert ours.args.torch_empty_cache_steps == 2
    assert not [each for each in ours.step.recaptures if "global_step" in str(each)]


def test_checkpoints_go_both_ways(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = trainer(transformers.Trainer, tmp_path / "theirs", **saving)
    whole.train()
    first = trainer(Trainer, tmp_path / "ours", **saving)
    first.train()
    resumed = trainer(Trainer, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "theirs" / "checkpoint-3"))
    eager = trainer(transformers.Trainer, tmp_path / "eager")
    eager.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    for each in (first, resumed, eager):
        assert_same_model(each, whole)


def test_a_loss_of_the_users_is_part_of_the_step(tmp_path):
    class Smoothed(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = outputs.loss + 0.1 * outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

    class Eager(transformers.Trainer):
        compute_loss = Smoothed.compute_loss

    ours, theirs = trainer(Smoothed, tmp_path), trainer(Eager, tmp_path)
    ours.train()
    theirs.train()
    assert_alike(ours, theirs)


def test_what_is_left_behind_is_trainers(tmp_path):
    ours = trainer(Trainer, tmp_path)
    ours.train()
    assert "step" not in vars(ours.optimizer)
    assert "clip_grad_norm_" not in vars(ours.accelerator)


class Padded(Tokens):
    """Rows of several lengths."""

    def __getitem__(self, at):
        row = self.rows[at][: 6 + at % 9]
        return {"input_ids": row, "labels": row}


def padded(rows):
    """A batch of them, as a tokenizer's collator makes it."""
    tokens = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    labels = tokens.masked_fill(mask == 0, -100)
    return transformers.BatchEncoding(
        {"input_ids": tokens, "labels": labels, "attention_mask": mask}
    )


def test_batches_of_several_lengths_share_compiles(tmp_path):
    found = []
    for kind in (Trainer, transformers.Trainer):
        found.append(trainer(kind, tmp_path, max_steps=12))
        found[-1].data_collator, found[-1].train_dataset = padded, Padded()
        found[-1].train()
    assert_alike(*found)
    most = 2 if int(transformers.__version__.partition(".")[0]) >= 5 else 6  # 4 asks for lengths
    assert len(found[0].step.recompiles) <= most, found[0].step.recompiles


class NoRoom:
    """For more than two rows."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        if len(inputs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_a_loop_that_begins_again_with_smaller_batches(tmp_path):
    found = []
    for kind in (Trainer, transformers.Trainer):
        narrow = type("Narrow", (NoRoom, kind), {})
        found.append(trainer(narrow, tmp_path, auto_find_batch_size=True))
        found[-1].train()
        assert found[-1]._train_batch_size == 2
    assert_alike(*found)


class Peeks(transformers.TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        pass


class Looks(transformers.TrainerCallback):
    def on_optimizer_step(self, args, state, control, **kwargs):
        pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"callbacks": [Peeks()]}, "Peeks.on_pre_optimizer_step"),
        ({"callbacks": [Looks()]}, "Looks.on_optimizer_step"),
        ({"torch_compile": True}, "torch_compile"),
    ],
)
def test_what_cannot_be_one_step_is_refused(arguments, words, tmp_path):
    with pytest.raises(treadle.CaptureError, match=r"TR-142") as caught:
        trainer(Trainer, tmp_path, **arguments).train()
    assert words in str(caught.value)
    assert caught.value.remedy
