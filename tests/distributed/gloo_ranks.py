"""Several ranks as processes of their own, meeting through a file."""

import json
from pathlib import Path

MEET = """
import datetime, json, sys
import torch
from torch import distributed as dist

rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo",
    init_method=f"file://{folder}/meet",
    rank=rank,
    world_size=ranks,
    timeout=datetime.timedelta(seconds=60),
)
GROUP = dist.group.WORLD
CPU = torch.device("cpu")

def say(**found):
    print(json.dumps(found))
"""
"""What programs begin with: a group, and ``say`` for what the test is to hear."""


def run_ranks(forks, folder: Path, program: str, ranks: int = 2, **given: object) -> list[dict]:
    """What each rank says; the program of a rank that fails is shown with its errors."""
    folder.mkdir(exist_ok=True)
    path = folder / "program.py"
    path.write_text(MEET + program)
    processes = [
        forks.start(path, str(rank), str(ranks), str(folder), **given) for rank in range(ranks)
    ]
    done = [forks.finish(each, 60) for each in processes]
    assert [each.returncode for each in done] == [0] * ranks, [each.stderr for each in done]
    return [json.loads(each.stdout) for each in done]
