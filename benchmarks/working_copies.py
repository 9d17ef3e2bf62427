"""What copies of weights in bfloat16 gain if the update writes them, and what a second cast costs.

::

    python benchmarks/working_copies.py [--width 512] [--layers 4] [--rows 1,8,64] [--repeats 25]

A small transformer under ``torch.autocast(dtype=torch.bfloat16)`` with AdamW, three times from one
seed, in turns: each float32 weight is cast ``twice`` a step; ``once``, as it is compiled; or never,
because the user's own step updates float32 ``masters`` and copies them into bfloat16 weights
(``docs/howto/working-copies.md``). Afterwards the float32 weights of all three are equal, bit for
bit, or this fails.

``over once``: the median, over the turns, of a step's time over that of ``once``, with quartiles.
``floor``: the bytes of weights, moments and copies that ``masters`` saves, over those that a step
of ``once`` moves.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from treadle.capture.captured import Captured
from treadle.capture.refuse import named_models, named_optimizers
from treadle.capture.step import capture
from treadle.compiler.cleaning import clean
from treadle.compiler.pipeline import compile_step
from treadle.graph.core.node_info import info, set_value, value_of, with_info
from treadle.graph.core.signature import Role, StepGraph
from treadle.graph.core.values import like
from treadle.options import from_environment
from treadle.runtime.execute.executable import Executable
from treadle.runtime.store.cache import Cache
from treadle.session.bind import read_inputs

aten = torch.ops.aten
WORDS, LENGTH = 512, 16
WARMUP = 3
NAMES = ("twice", "once", "masters")


class Block(nn.Module):
    """Pre-norm attention and perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(rows, length, 3, 4, width // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


@dataclass(frozen=True)
class Contestant:
    """A compiled step on weights of its own."""

    name: str
    executable: Executable
    inputs: Sequence[Tensor]
    weights: Sequence[Tensor]
    peak_bytes: int

    def seconds(self) -> float:
        """Of one step."""
        start = time.perf_counter()
        self.executable.run(self.inputs)
        return time.perf_counter() - start


def captured_step(
    width: int, layers: int, rows: int, *, masters: bool
) -> tuple[Captured, list[Tensor], list[nn.Parameter]]:
    """The step as it is captured, its inputs, and the float32 weights, from one seed.

    ``masters``: the products' weights are bfloat16, and what the optimizer updates is a float32
    weight beside each, of which it is a copy (``docs/howto/working-copies.md``).
    """
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(WORDS, width), *blocks, nn.Linear(width, WORDS, bias=False))
    products = [each for each in model.modules() if masters and isinstance(each, nn.Linear)]
    beside = nn.ParameterList(each.weight.detach().clone() for each in products)
    for each in products:
        each.bfloat16()
    copies = [each.weight for each in products]
    weights = [p for p in model.parameters() if p.dtype is torch.float32] + list(beside)
    optimizer = torch.optim.AdamW(weights, lr=1e-3)

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(ids).float().flatten(0, 1), labels.flatten())
        loss.backward()
        for weight, copy in zip(beside, copies, strict=True):
            assert copy.grad is not None
            weight.grad, copy.grad = copy.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for weight, copy in zip(beside, copies, strict=True):
                copy.copy_(weight)
        return loss.detach()

    batch = [torch.randint(WORDS, (rows, LENGTH)) for _ in range(2)]
    step(*batch)  # so that there is state
    models = {"model": model, "masters": beside} if masters else model
    captured = capture(
        step,
        models=named_models(models),
        optimizers=named_optimizers(optimizer),
        args=tuple(batch),
        kwargs={},
    )
    return captured, read_inputs(captured, list(batch)), weights


def weight_casts(step: StepGraph) -> list[tuple[int, fx.Node]]:
    """Each cast of a parameter that the step updates, with its number among the inputs."""
    written = {each.writes for each in step.signature.outputs}
    places = {node: at for at, node in enumerate(step.placeholders) if at in written}
    nodes = step.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    found = [(places[node.args[0]], node) for node in nodes if node.args[0] in places]
    return [pair for pair in found if step.signature.inputs[pair[0]].role is Role.PARAMETER]


def cast_twice(step: StepGraph) -> None:
    """Backward casts each weight again.

    before:  c = bf16(w); y = mm(x, t(c)); ...; dx = mm(dy, c)
    after:   c = bf16(w); y = mm(x, t(c)); ...; c' = bf16(w); dx = mm(dy, c')
    """
    for _, cast in weight_casts(step):
        for user in [each for each in cast.users if info(each).phase == "backward"]:
            with step.graph.inserting_before(user):
                again = step.graph.node_copy(cast, lambda node: node)
            with_info(again, phase="backward", region="again")  # equal casts of one would be merged
            set_value(again, like(value_of(cast)))
            user.replace_input_with(cast, again)


def contestant(name: str, width: int, layers: int, rows: int, cache: Cache) -> Contestant:
    """A step in which weights are cast ``twice``, ``once``, or by the update (``masters``)."""
    captured, inputs, weights = captured_step(width, layers, rows, masters=name == "masters")
    options = from_environment()
    step = clean(captured.step)
    step.history.clear()  # the compile cleans it once more
    if name == "twice":
        cast_twice(step)
    built = compile_step(step, "cpu", options, cache=cache)
    return Contestant(name, built.executable, inputs, weights, built.artifact.peak_bytes)


def floor_share(weights: Sequence[Tensor]) -> float:
    """Bytes an element of a weight and its copy. Once: the cast reads 4 and writes 2, two products
    read 2 each, AdamW reads 16 and writes 12. By the update: no cast, and 2 more are written."""
    cast = sum(each.numel() for each in weights if each.ndim == 2)
    cast -= weights[0].numel()  # the embedding, which is looked up in float32
    every = sum(each.numel() for each in weights)
    return 4 * cast / (28 * every + 10 * cast)


def same_weights(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether these are equal, bit for bit, in whatever order they stand."""
    sums = [
        sorted(hash(each.detach().numpy().tobytes()) for each in all_) for all_ in (some, others)
    ]
    return sums[0] == sums[1]


def compare(width: int, layers: int, rows: int, repeats: int, folder: Path) -> None:
    """A line for a number of rows."""
    cache = Cache(folder)
    found = [contestant(name, width, layers, rows, cache) for name in NAMES]
    for each in found * WARMUP:
        each.seconds()
    times = [[each.seconds() for each in found] for _ in range(repeats)]
    for each in found[1:]:
        same = same_weights(found[0].weights, each.weights)
        assert same, f"{each.name}: other weights"
    cells: list[str] = []
    for at, each in enumerate(found):
        ratios = sorted(row[at] / row[1] for row in times)
        middle, quarter = statistics.median(ratios), len(ratios) // 4
        spread = f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}"
        least = 1e3 * min(row[at] for row in times)
        cells.append(f"{least:.1f} | {middle:.3f} ({spread}) | {each.peak_bytes / 2**20:.1f}")
    share = 100 * floor_share(found[0].weights)
    print(f"| {rows * LENGTH} | {' | '.join(cells)} | {share:.1f} % |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", default="1,8,64", help=f"of {LENGTH} words, with commas between")
    parser.add_argument("--repeats", type=int, default=25)
    given = parser.parse_args()
    heads = [f"{name} ms | over once | peak MiB" for name in NAMES]
    print(f"| words | {' | '.join(heads)} | floor |")
    print("|---" * 11 + "|")
    with tempfile.TemporaryDirectory() as folder:
        for rows in map(int, given.rows.split(",")):
            compare(given.width, given.layers, rows, given.repeats, Path(folder))


if __name__ == "__main__":
    main()
