"""A classifier of sentences, trained as a script: what changes is in globals.

python tests/contract/sentence_classifier.py
"""

import time

import torch
from transformers import BertConfig, BertForSequenceClassification

import treadle

torch.manual_seed(0)
config = BertConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
    num_labels=3,
    problem_type="single_label_classification",
)
model = BertForSequenceClassification(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(ids, mask, labels):
    optimizer.zero_grad()
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    optimizer.step()
    return loss


options = treadle.Options(codegen=False, progress=False)
compiled = treadle.compile(train_step, model=model, optimizer=optimizer, options=options)
losses, best, t = [], float("inf"), time.time()
for step in range(6):
    progress = step / 6
    ids = torch.randint(0, 50, (4, 16))
    mask = torch.ones(4, 16, dtype=torch.long)
    labels = torch.randint(0, 3, (4,))
    loss = compiled(ids, mask, labels)
    losses.append(loss.item())
    best = min(best, losses[-1])
    elapsed, t = time.time() - t, time.time()
assert compiled.recompiles == [], compiled.recompiles
assert all(value == value for value in losses)
print("compiled once for", len(losses), "calls")
