"""Every kind of state that Python and PyTorch have, each looked at and changed: none is stale."""

from contract.test_reads_generator import generates


def test_no_kind_of_state_is_stale(forks):
    generates(forks, "--kinds")


def test_no_state_of_torch_is_stale(forks):
    generates(forks, "--torch", "--looks", "1")
