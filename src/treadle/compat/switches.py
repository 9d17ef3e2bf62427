"""How PyTorch is set to compute."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

profiler_listens: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler of this thread hears of ranges."""
_OF_THE_PROCESS = ("thread_name", "caught_jit", "cache_stats", "worker")
"""Parts of names of getters that tell of the process and not of how PyTorch computes."""


def switches() -> dict[str, str]:
    """How PyTorch is set to compute, by name: every getter of its core that takes nothing and
    gives a plain value, the default dtype and device, and what autocast does."""
    return {name: _in_words(name, value) for name, value in zip(_names(), _values(), strict=True)}


def _in_words(name: str, value: Any) -> str:
    match name:
        case "default_dtype":
            return str(value)
        case "default_device":
            return str(torch.get_default_device())
        case "detect_anomaly":
            return repr(checks_for_nan())
        case "autocast_cpu" | "autocast_cuda":
            return "{} {}".format(*value)
        case _:
            return repr(value)


class Switches:
    """What ``switches`` says, put into words only where it changed."""

    def __init__(self) -> None:
        self._raw: object = None
        self._words: tuple[str, ...] = ()

    def now(self) -> tuple[str, ...]:
        """The values of ``switches()``; the very same object while nothing changed."""
        raw = _values()
        if raw != self._raw:
            words = tuple(switches().values())
            self._raw, self._words = raw, self._words if words == self._words else words
        return self._words


@functools.cache
def _getter_functions() -> tuple[Callable[[], object], ...]:
    return tuple(vars(torch._C)[name] for name in _getters())


def _values() -> list[object]:
    """What each of ``_names`` is. Only a mode can set a default device: where there is none, it is
    not asked for."""
    try:
        core = [each() for each in _getter_functions()]
    except RuntimeError:  # new and old interfaces have set one
        core = [_switch(name) for name in _getters()]
    return [
        *core,
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack() and torch.get_default_device(),
        (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
    ]


@functools.cache
def _names() -> tuple[str, ...]:
    core = [name.removeprefix("_get_") for name in _getters()]
    others = "default_dtype", "default_device", "detect_anomaly", "autocast_cpu", "autocast_cuda"
    return (*core, *others)


def checks_for_nan() -> bool:
    """Whether anomaly detection looks for a NaN in each gradient."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def _switch(name: str) -> object:
    """What a getter says, which is nothing for what new and old interfaces have set."""
    try:
        return vars(torch._C)[name]()
    except RuntimeError:
        return "mixed"


@contextmanager
def switches_kept(refuse: Callable[[str], Exception]) -> Iterator[None]:
    """What ``refuse(name)`` gives is raised if one of the switches is another one afterwards; they
    are put back, as far as PyTorch has a way, also after an error."""
    kept = _KeptSwitches()
    changed = ""
    try:
        yield
    finally:
        try:  # modes hear what is asked here, and may refuse it
            changed = kept.first_changed()
        except BaseException:
            kept.put_back()
            raise
        if changed:
            kept.put_back()
    if changed:
        raise refuse(changed.replace("_", " "))


class _KeptSwitches:
    """The switches as they are. They are put into words, and set, only where one changed: while a
    step is traced, every call is heard."""

    def __init__(self) -> None:
        self._kept = self._now()

    def first_changed(self) -> str:
        """The name of the first that is another one now; empty if none is."""
        now = self._now()
        return next((name for name, was in self._kept.items() if now[name] != was), "")

    def put_back(self) -> None:
        """All that PyTorch has a way to set."""
        kept: dict[str, Any] = self._kept
        torch.set_default_dtype(kept["default_dtype"])
        torch.set_grad_enabled(kept["grad_mode"])
        torch.use_deterministic_algorithms(
            kept["deterministic_algorithms"],
            warn_only=kept["deterministic_algorithms_warn_only"],
        )
        torch.set_anomaly_enabled(*kept["detect_anomaly"])
        # others follow from the precision of products
        for name in sorted(_getters(), key="_get_float32_matmul_precision".__ne__):
            put = vars(torch._C).get(name.replace("_get_", "_set_", 1))
            was = kept[name.removeprefix("_get_")]
            if put is not None and _switch(name) != was:
                put(was)

    @staticmethod
    def _now() -> dict[str, object]:
        now = dict(zip(_names(), _values(), strict=True))
        return {**now, "grad_mode": torch.is_grad_enabled()}


_ASKS = ("get_", "is_", "are_", "initial_seed")


def getters_named(names: Iterable[str]) -> list[tuple[str, Callable[[], object]]]:
    """Those of PyTorch's functions with such a name that take nothing and give a plain value."""
    found: list[tuple[str, Callable[[], object]]] = []
    for name in sorted(names):
        getter = vars(torch).get(name) if name.startswith(_ASKS) else None
        if getter is not None and callable(getter) and _answers(getter):
            found.append((name, getter))
    return found


def _answers(getter: Callable[[], object]) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            return isinstance(getter(), bool | int | float | str | torch.dtype | torch.device)
    except (TypeError, RuntimeError):
        return False


@functools.cache
def _getters() -> tuple[str, ...]:
    """The names of the getters of switches that this version has."""
    return tuple(
        name
        for name, getter in sorted(vars(torch._C).items())
        if name.startswith("_get_")
        and not any(part in name for part in _OF_THE_PROCESS)
        and _is_plain(getter)
    )


def _is_plain(getter: Any) -> bool:
    try:
        value = getter()
    except (TypeError, RuntimeError, AttributeError):
        return False
    parts = value if isinstance(value, tuple) else (value,)
    return all(isinstance(each, bool | int | str) for each in parts)


@contextmanager
def without_onednn() -> Iterator[None]:
    """oneDNN off and then as it was. The public switch warns about TF32 on Intel GPUs."""
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was)


_MULTIPLYING = ("cuda", "mkldnn")
"""Libraries whose products of float32 may be computed from rounded factors."""
_ROUNDED = ("tf32", "bf16")


def rounds_products() -> bool:
    """Whether products of float32 may be computed from factors of fewer bits (TF32, bfloat16)."""
    return any(_precision(library) in _ROUNDED for library in _MULTIPLYING)


@contextmanager
def full_products() -> Iterator[None]:
    """No factor of a product is rounded inside; afterwards all is as it was."""
    rounding = {name: _precision(name) for name in _MULTIPLYING if _precision(name) in _ROUNDED}
    try:
        for library in rounding:
            torch._C._set_fp32_precision_setter(library, "matmul", "ieee")
        yield
    finally:
        for library, was in rounding.items():
            torch._C._set_fp32_precision_setter(library, "matmul", was)


def _precision(library: str) -> str:
    return torch._C._get_fp32_precision_getter(library, "matmul")


def uses_onednn() -> bool:
    """Whether PyTorch may use oneDNN now."""
    return torch._C._get_mkldnn_enabled()


def uses_cudnn_attention() -> bool:
    """Whether cuDNN's attention, which is not deterministic, may be called now."""
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    return allowed and not torch.are_deterministic_algorithms_enabled()


def onednn_takes(dtype: torch.dtype) -> bool:
    """Whether oneDNN's layers run in ``dtype`` on this machine."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def clear_workspaces() -> None:
    """Give cuBLAS's workspaces back to the allocator; the next product takes one again."""
    torch._C._cuda_clearCublasWorkspaces()
