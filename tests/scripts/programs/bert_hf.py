"""A masked language model of a library, trained by a plain loop with its scheduler."""

import time

import torch
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup

import treadle

torch.manual_seed(11)
config = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=24,
)
model = BertForMaskedLM(config)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
num_training_steps = 5
scheduler = get_linear_schedule_with_warmup(optimizer, 1, num_training_steps)


def training_step(batch):
    outputs = model(**batch)
    loss = outputs.loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


training_step = treadle.compile(training_step, model=model, optimizer=optimizer)
total_loss = 0.0
for global_step in range(num_training_steps):
    t = time.time()
    ids = torch.randint(5, 50, (4, 12))
    labels = ids.clone()
    chosen = torch.rand(ids.shape) < 0.3
    labels[~chosen] = -100
    batch = {
        "input_ids": ids.masked_fill(chosen, 4),
        "attention_mask": torch.ones_like(ids),
        "labels": labels,
    }
    total_loss += training_step(batch).item()
    scheduler.step()
    print(f"step {global_step} loss {total_loss / (global_step + 1):.4f} {time.time() - t:.2f}s")
