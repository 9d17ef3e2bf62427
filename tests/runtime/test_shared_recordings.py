"""Recordings of variants that take turns in one arena: what they share, which go and when."""

from dataclasses import dataclass
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from runtime.recorders import Again
from treadle.runtime.execute.arena import Arena
from treadle.runtime.execute.executable import Executable
from treadle.runtime.kernels.build import Build
from treadle.runtime.replay.replay_policy import ReplayPolicy
from treadle.runtime.store.artifact import Artifact, BufferSpec, CallStep, Storage, View

PLAIN = Build.without_compiler()
SIZES = (1, 2, 3, 64, 65, 100, 500, 1000)
ROOM = 1 << 20


def spec(name: str, place: Storage, size: int) -> BufferSpec:
    return BufferSpec(name, torch.float32, (size,), (1,), place, 0)


def whole(s: BufferSpec) -> View:
    return View(s.name, s.dtype, s.shape, s.strides)


def program(size: int, beside: int = 0) -> Artifact:
    """``y = (x + x) * w``, where the sum lies in the arena."""
    x, w = spec("x", Storage.INPUT, size), spec("w", Storage.INPUT, 1)
    z, y = spec("z", Storage.ARENA, size), spec("y", Storage.CALL, size)
    steps = (
        CallStep("aten.add.Tensor", (whole(x), whole(x)), {}, ("z",), out="aten.add.out"),
        CallStep("aten.mul.Tensor", (whole(z), whole(w)), {}, ("y",)),
    )
    buffers = {each.name: each for each in (x, w, z, y)}
    arena = 4 * size
    peak = 3 * arena + 4 + beside
    return Artifact("cpu", (), buffers, steps, (), ("x", "w"), (whole(y),), arena, peak)


class InPlace(Again):
    """A recording holds addresses: the block and the place of the input have to be where they were
    when it was made."""

    def record(self, run):
        made, replay = super().record(run)
        addresses = self.addresses()

        def checked() -> None:
            assert self.addresses() == addresses
            replay()

        return made, checked

    def addresses(self) -> list[int]:
        views = self.frame().views()
        return [view.data_ptr() for view in views if view.untyped_storage().nbytes() > 4]


@dataclass
class Variant:
    size: int
    recorder: InPlace
    executable: Executable
    w: Tensor

    @classmethod
    def of(cls, size: int, arena: Arena, w: Tensor, room: int = ROOM, beside: int = 0):
        recorder = InPlace()
        policy = ReplayPolicy(frozenset({0}), frozenset(), room, lambda: None)
        executable = Executable(
            program(size, beside), PLAIN, policy=policy, recorder=recorder, arena=arena
        )
        recorder.frame = ref(executable.frame)
        return cls(size, recorder, executable, w)

    def check(self) -> None:
        x = torch.randn(self.size)
        (y,) = self.executable.run([x, self.w])
        assert torch.equal(y, (x + x) * self.w)

    @property
    def is_recorded(self) -> bool:
        return self.executable.is_recorded


def held(arena: Arena, variants: list[Variant]) -> int:
    """Between calls, beside the inputs."""
    block = 0 if arena.bytes is None else arena.bytes.numel()
    return block + arena.recordings.block_bytes + sum(v.executable.own_bytes for v in variants)


@given(st.lists(st.sampled_from(SIZES), min_size=20, max_size=120))
@settings(max_examples=60, deadline=None)
def test_variants_of_eight_sizes_in_any_order(order):
    arena, w, variants = Arena(), torch.randn(1), {}
    for size in order:
        if size not in variants:
            variants[size] = Variant.of(size, arena, w)
        variants[size].check()
        promised = variants[size].executable.promised_bytes
        assert held(arena, list(variants.values())) <= promised
    largest = max(variants)
    for variant in variants.values():
        for _ in range(8):
            variant.check()
    assert all(variant.is_recorded for variant in variants.values())
    assert arena.bytes.numel() == 4 * largest
    assert arena.recordings.block_bytes == -(-4 * largest // 256) * 256, "one place for all inputs"


def warm(*variants: Variant) -> None:
    for _ in range(5):
        for variant in variants:
            variant.check()


def test_recordings_go_with_the_block_that_they_were_made_in_and_are_made_again():
    arena, w = Arena(), torch.randn(1)
    small = Variant.of(10, arena, w)
    warm(small)
    for number in range(12):  # however often that happens
        larger = Variant.of(100 + number, arena, w)
        larger.check()
        assert not small.is_recorded
        assert "to be recorded again" in small.executable.replay.note
        warm(small)
        assert small.is_recorded
        larger.executable.release()


def test_the_least_recently_used_recording_goes_first():
    arena, w = Arena(), torch.randn(1)
    one, two, three = (Variant.of(64, arena, w, room=256 + 2 * 256) for _ in range(3))
    warm(one, two)
    one.check()
    for _ in range(4):
        three.check()
    assert [v.is_recorded for v in (one, two, three)] == [True, False, True]
    assert arena.recordings.nbytes == 256 + 2 * 256
    assert three.executable.promised_bytes == three.executable.artifact.peak_bytes + 768
    assert one.executable.own_bytes == 256
    for _ in range(30):  # nobody records at every call
        for variant in (one, two, three):
            variant.check()
    assert sum(v.recorder.recordings for v in (one, two, three)) <= 3 * 4


def test_a_plan_that_comes_later_takes_the_room_of_recordings():
    """The budget is for all variants: what recordings may cost is what the largest plan leaves."""
    arena, w, budget = Arena(), torch.randn(1), 12 * 64 + 4 + 2048
    first, second = (Variant.of(64, arena, w, budget - (12 * 64 + 4)) for _ in range(2))
    warm(first, second)
    assert arena.recordings.nbytes == 768
    peak = 12 * 64 + 4 + 1400
    large = Variant.of(64, arena, w, budget - peak, beside=1400)
    large.check()
    assert [first.is_recorded, second.is_recorded] == [False, True]
    assert large.executable.promised_bytes <= budget


def test_what_one_variant_alone_needs_goes_with_it():
    arena, w = Arena(), torch.randn(1)
    small, large = Variant.of(10, arena, w), Variant.of(1000, arena, w)
    warm(small, large)
    large.executable.release()
    assert arena.bytes is None
    assert arena.recordings.nbytes == 0
    warm(small)
    assert arena.bytes.numel() == 40
    assert small.is_recorded
    small_again = Variant.of(9, arena, w)
    warm(small_again)
    small_again.executable.release()
    assert small.is_recorded, "nothing that it needs has gone"


def test_a_variant_that_is_gone_holds_nothing():
    arena, w = Arena(), torch.randn(1)
    one, two = Variant.of(64, arena, w), Variant.of(64, arena, w)
    warm(one, two)
    recording = ref(one.executable)
    del one
    assert recording() is None
    assert arena.recordings.nbytes == 256 + 256
    warm(two)
    assert two.is_recorded


@pytest.mark.parametrize("times", [1, 3])
def test_no_batch_outlives_its_call(times):
    variant = Variant.of(64, Arena(), torch.randn(1))
    variant.executable.replay = None
    x = torch.randn(64)
    for _ in range(times):
        variant.executable.run([x, variant.w])
    memory = ref(x.untyped_storage())
    del x
    assert memory() is None
