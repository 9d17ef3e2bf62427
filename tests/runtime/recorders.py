"""What records launches where there is no GPU."""

from collections.abc import Callable, Sequence

from torch import Tensor

from treadle.runtime.replay.replay_policy import Launches


class Again:
    """Records by keeping the launches; they run when it is replayed. ``share``: of a call that
    launching takes, or of each of the calls that are timed."""

    def __init__(self, share: float | Sequence[float] = 1.0, failing: bool = False) -> None:
        self.shares = [share] if isinstance(share, float) else list(share)
        self.failing = failing
        self.replays = self.recordings = 0

    def start(self) -> None:
        return

    def timed(self, run: Callable[[], None]) -> tuple[float, float]:
        run()
        return self.shares.pop(0) if len(self.shares) > 1 else self.shares[0], 1.0

    def record(self, run: Launches) -> tuple[dict[str, Tensor], Callable[[], None]]:
        if self.failing:
            raise RuntimeError("operation not permitted\nand more")
        self.recordings += 1
        state = [each.clone() for each in self.state]
        held = run()
        for mine, old in zip(self.state, state, strict=True):
            mine.copy_(old)  # recording does not do the work

        def replay() -> None:
            self.replays += 1
            for name, value in run().items():
                held[name].copy_(value)

        return held, replay

    state: tuple[Tensor, ...] = ()
