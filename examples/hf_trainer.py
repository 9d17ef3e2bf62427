"""Hugging Face's ``Trainer`` with treadle as the backend of ``torch.compile``.

::

    python examples/hf_trainer.py [--steps 6] [--eager]
    torchrun --nproc-per-node 2 examples/hf_trainer.py

A small random GPT-2 on bytes; prints the loss of every step. Needs transformers and accelerate.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset

from treadle.backend import compiled_graphs


class Bytes(Dataset):
    """Windows of this file's bytes."""

    def __init__(self, length: int = 32) -> None:
        text = Path(__file__).read_bytes()
        self.windows = [
            torch.tensor(list(text[at : at + length]))
            for at in range(0, len(text) - length, length)
        ]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[at], "labels": self.windows[at]}


def train(steps: int, *, eager: bool = False, batch: int = 4) -> list[float]:
    """The loss of every step."""
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
        )
        if not eager:  # in place: the Trainer's own option knows a fixed list of backends
            model.compile(backend="treadle")
        before = compiled_graphs()
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Bytes())
        trainer.train()
    assert eager or compiled_graphs() > before, "nothing was compiled"
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    print(train(options.steps, eager=options.eager))


if __name__ == "__main__":
    main()
