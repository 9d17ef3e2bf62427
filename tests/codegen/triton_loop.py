"""A ``while_loop`` and its gradient as Triton modules under the interpreter, compared with eager.

``test_triton_step.py`` runs this file in a process of its own, where ``TRITON_INTERPRET`` was set
before triton was imported. Argument: a folder for modules.
"""

import copy
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from treadle.capture.step import capture
from treadle.codegen.host import artifact_of
from treadle.compiler.cleaning import clean
from treadle.compiler.loops import bodies_in, with_bodies
from treadle.graph.core.signature import StepGraph
from treadle.lower.graph import lower
from treadle.runtime.execute.executable import Executable
from treadle.runtime.kernels.build import Build
from treadle.runtime.kernels.triton_launch import TritonLauncher
from treadle.runtime.store.artifact import Artifact
from treadle.schedule.launches import launches_of
from treadle.schedule.plan import schedule
from treadle.schedule.workers import PROGRAMS
from treadle.session.bind import apply_outputs, read_inputs


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, loop):
    def step(x: Tensor, rounds: Tensor) -> Tensor:
        def body(i, h):
            return i + 1, torch.tanh(model(h)) / (1 + h.square().mean(-1, keepdim=True)) + x

        start = torch.zeros((), dtype=torch.int64), x
        loss = loop(lambda i, h: i < rounds, body, start)[1].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain_while(condition, body, carried):
    while bool(condition(*carried)):
        carried = body(*carried)
    return carried


def artifact_for(step: StepGraph) -> Artifact:
    """Its own and those of its loops, as kernels of a GPU."""
    program = lower(step, device="cpu")
    wanted = dict.fromkeys(body for each in program.steps for body in bodies_in(each))
    plan = schedule(program, workers=PROGRAMS)
    artifact = artifact_of(plan, launches_of(plan), device="cpu", language="triton")
    return with_bodies(artifact, {body: artifact_for(clean(body.step())) for body in wanted})


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    eager = make_step(twin, torch.optim.SGD(twin.parameters(), lr=0.1), plain_while)
    captured = capture(
        make_step(model, optimizer, torch.while_loop),
        models={"": model},
        optimizers={"": optimizer},
        args=(torch.randn(3, 6), torch.tensor(2)),
        kwargs={},
    )
    artifact = artifact_for(clean(captured.step))
    assert len(artifact.bodies) == 3
    assert all(each.kernel_count for each in artifact.bodies.values())
    build = Build("triton", {"triton": TritonLauncher(folder)})
    executable = Executable(artifact, build)
    for rounds in (2, 1, 4):
        given = [torch.randn(3, 6), torch.tensor(rounds)]
        loss = apply_outputs(captured, executable.run(read_inputs(captured, given)))
        torch.testing.assert_close(loss, eager(*given), rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
