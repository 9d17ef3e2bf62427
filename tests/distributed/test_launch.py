"""The harness itself: results, failures and what is left behind."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist


def averaged(x):
    mine = x * (dist.get_rank() + 1)
    dist.all_reduce(mine)
    return dist.get_rank(), mine / dist.get_world_size(), torch.get_num_threads()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("store", ["file", "tcp"])
def test_results_of_all_ranks(launch, world, store):
    x = torch.randn(5)
    for rank, each in enumerate(launch(world, averaged, x, store=store)):
        number, found, threads = each.value
        assert (number, each.rank, each.code, threads) == (rank, rank, 0, 1)
        torch.testing.assert_close(found, x * (world + 1) / 2)


def one_fails():
    print("before")
    if dist.get_rank() == 1:
        raise ValueError("of rank 1")
    time.sleep(60)


def test_one_that_fails_ends_all_and_shows_each_output(launch):
    began = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        launch(2, one_fails)
    assert time.monotonic() - began < 20
    text = str(caught.value)
    assert "ValueError: of rank 1" in text
    assert text.count("before") == 2
    assert "rank 0: did not end" in text


def leaves_a_child():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, os.getpid(), flush=True)
    time.sleep(600)


def runs(number: int) -> bool:
    """Whether a process is there and not only waits to be looked at."""
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_time_is_limited_and_nothing_is_left(launch):
    ranks = launch(2, leaves_a_child, timeout=2, check=False)
    assert [each.code for each in ranks] == [None, None]
    numbers = [int(word) for each in ranks for word in each.output.split()]
    assert len(numbers) == 4
    end = time.monotonic() + 5
    while any(map(runs, numbers)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(runs, numbers))
