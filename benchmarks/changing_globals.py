"""BERT from a script whose globals change at every turn: compiles, time, and the peak promised.

::

    python benchmarks/changing_globals.py [--batch 32] [--length 512] [--steps 20] [--layers 12]
        [--device cuda]

The loop stands at the level of the module, as in most scripts: the time of day, counters, a running
sum and lists are globals that change between calls and that the step does not read. Masked language
modelling with dropout 0.1, bf16 autocast, AdamW. Prints how often the step was compiled and why,
the median of the calls' milliseconds, and the peak beside the one promised before the first call.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForMaskedLM

import treadle

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--device", default="cuda")
args = parser.parse_args()
GIB = 2**30

device = torch.device(args.device)
torch.manual_seed(0)
config = BertConfig(num_hidden_layers=args.layers)
model = BertForMaskedLM(config).to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)


def train_step(ids, labels):
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(input_ids=ids).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(config.vocab_size, (args.batch, args.length), generator=generator)
    return ids.to(device), ids.roll(1, 1).to(device)


t = time.time()
promised = train_step.prepare(*batch(0)).artifact.peak_bytes
prepared = time.time() - t
if device.type == "cuda":
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
running, history, milliseconds = 0.0, [], []
for it in range(args.steps):
    t = time.time()
    ids, labels = batch(it)
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    loss = train_step(ids, labels)
    running += loss.item()
    milliseconds.append(1000 * (time.perf_counter() - began))
    history.append(loss.item())
    seconds_per_step = time.time() - t

print(f"{len(train_step.recompiles)} recompiles: {list(train_step.recompiles)}")
print(f"prepared in {prepared:.1f} s; loss {history[0]:.3f} to {history[-1]:.3f}")
least, median = min(milliseconds), statistics.median(milliseconds)
print(f"{median:.1f} ms a step (median of {args.steps}; {least:.1f} at least)")
if device.type == "cuda":
    measured = torch.cuda.max_memory_allocated() / GIB
    print(f"peak {measured:.3f} GiB allocated, {promised / GIB:.3f} promised")
else:
    print(f"peak {promised / GIB:.3f} GiB promised")
