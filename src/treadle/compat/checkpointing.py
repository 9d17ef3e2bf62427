"""``torch.utils.checkpoint`` while a step is traced."""

import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch._C import _autograd as autograd
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import CheckpointPolicy

from treadle.compat.tracing import traced_nodes, works_for


def in_checkpoint() -> bool:
    """Whether what autograd saves now is kept, or computed again, by a checkpointed region."""
    hooks = autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) and hooks[0].__module__ == checkpointing.__name__


def leave_regions(error: BaseException) -> None:
    """Leave the checkpointed regions in which ``error`` was raised, the innermost first. PyTorch
    2.11 leaves them when the frames in its traceback are deleted, which may be later."""
    entries = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame in reversed(entries):
        if frame.f_code.co_filename == checkpointing.__file__:
            frame.clear()


def watched_checkpointing(
    begins: Callable[[], None],
    ends: Callable[[], None],
    marked: Callable[[int, CheckpointPolicy], None],
    mode: Callable[[], AbstractContextManager[object]],
) -> tuple[tuple[object, str, object], ...]:
    """What to put where (owner, name, value) while a step is traced: ``begins`` and ``ends`` hear
    when a checkpointed region runs again, ``marked`` what a selective policy says of the nodes
    from one on. Nothing of other threads is heard. ``mode``: what a region ran in at first; while
    gradients are computed it is off, and on again for the region."""
    thread = threading.get_ident()
    reentrant = checkpointing.CheckpointFunction
    backward = _heard_backward(vars(reentrant)["backward"].__func__, thread, begins, mode)
    return (
        (checkpointing, "_recomputation_hook", _heard_recomputation(thread, begins, ends, mode)),
        (checkpointing, "_CachingTorchDispatchMode", _heard_policies(thread, marked)),
        (checkpointing, "_is_compiling", _never),  # it would keep all, for a compiler to choose
        (reentrant, "backward", staticmethod(backward)),
    )


def _heard_recomputation(
    thread: int,
    begins: Callable[[], None],
    ends: Callable[[], None],
    mode: Callable[[], AbstractContextManager[Any]],
) -> type:
    """What a region runs in when it runs again."""

    class Again(checkpointing._recomputation_hook):
        def __enter__(self) -> Any:
            self.modes = ExitStack()
            if works_for(thread):
                begins()
                self.modes.enter_context(mode())
            return super().__enter__()

        def __exit__(self, *error: object) -> Any:
            self.modes.close()
            if works_for(thread):
                ends()
            return super().__exit__(*error)

    return Again


def _heard_policies(thread: int, marked: Callable[[int, CheckpointPolicy], None]) -> type:
    """What asks a selective policy of each operation."""

    class Caching(checkpointing._CachingTorchDispatchMode):
        def __init__(
            self, policy_fn: Callable[..., object], *rest: object, **named: object
        ) -> None:
            def policy(*args: object, **kwargs: object) -> object:
                said = policy_fn(*args, **kwargs)
                self.said = _policy(said)
                return said

            super().__init__(policy, *rest, **named)
            self.said: CheckpointPolicy | None = None

        def __torch_dispatch__(
            self, func: object, types: object, args: object = (), kwargs: object = None
        ) -> object:
            start, self.said = traced_nodes(), None
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if self.said is not None and works_for(thread):
                marked(start, self.said)
            return result

    return Caching


def _heard_backward(
    original: Callable[..., object],
    thread: int,
    begins: Callable[[], None],
    mode: Callable[[], AbstractContextManager[Any]],
) -> Callable[..., object]:
    """The backward of a reentrant checkpoint."""

    def backward(ctx: Any, *grads: object) -> object:
        if works_for(thread):
            begins()  # the inner call of ``torch.autograd.backward`` ends it
            ctx.run_function = _within(mode, ctx.run_function)
        return original(ctx, *grads)

    return backward


def _within(
    mode: Callable[[], AbstractContextManager[object]], function: Callable[..., object]
) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        with mode():
            return function(*args, **kwargs)

    return call


def _never(*_: object) -> bool:
    return False


def _policy(said: object) -> CheckpointPolicy:
    """A policy, or what a boolean stands for."""
    if isinstance(said, CheckpointPolicy):
        return said
    return CheckpointPolicy.MUST_SAVE if said else CheckpointPolicy.PREFER_RECOMPUTE
