"""Every kind of state that Python and PyTorch have, each looked at and changed: none is stale."""

from contract.test_reads_generator import every_kind, every_torch, summary, wrong


def test_no_kind_of_state_is_stale():
    tally = every_kind()
    assert not wrong(tally), summary(tally)


def test_no_state_of_torch_is_stale():
    tally = every_torch(looks=1)
    assert not wrong(tally), summary(tally)
