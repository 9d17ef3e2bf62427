"""Launches recorded as a CUDA graph.

Libraries zero a few bytes before many products and attentions: counters of their own. In a
recording that is a memset between two kernels, which takes 4.6 us of an H200 (0.8, and waits of 1.4
before and 2.3 after it) where one more kernel takes 1.6; a step of Llama 271M has 268. So small
memsets are replaced by kernels before a recording is first replayed.
"""

import ctypes
import functools
import importlib
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol, SupportsInt
from weakref import WeakSet

import torch
from torch import Tensor

from treadle.runtime.replay.replay_policy import Launches

_MOST = 4096
"""Bytes of a memset up to which a kernel of one block does it. The driver itself uses kernels for
larger ones."""
_EDGES = 12030
"""The first driver version (CUDA 12.3) in which edges of graphs carry data."""
_WORD = 4
_THREADS = 256
_FILL = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 to, .param .u32 with, .param .u32 words)
{
    .reg .pred done;
    .reg .b32 i, value, count, threads;
    .reg .b64 first, place;
    ld.param.u64 first, [to];
    ld.param.u32 value, [with];
    ld.param.u32 count, [words];
    cvta.to.global.u64 first, first;
    mov.u32 i, %tid.x;
    mov.u32 threads, %ntid.x;
next:
    setp.ge.u32 done, i, count;
    @done ret;
    mul.wide.u32 place, i, 4;
    add.u64 place, first, place;
    st.global.u32 [place], value;
    add.u32 i, i, threads;
    bra next;
}
\0"""


class CudaRecorder:
    """Records with CUDA graphs. ``clear``: frees the workspaces of libraries, before a recording,
    which allocates its own in addition, and after it, so that later recordings use the same ones.

    All live recordings share one memory pool. A later one may get memory that an earlier one has
    freed by its end. So recordings are replayed one at a time, and results are copied out before
    the next replay."""

    def __init__(self, device: torch.device, clear: Callable[[], None]) -> None:
        self._device = device
        self._clear = clear
        self._pool = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def timed(self, run: Callable[[], None]) -> tuple[float, float]:
        """Seconds until everything was launched, and until everything was done."""
        torch.cuda.synchronize(self._device)
        start = time.perf_counter()
        run()
        launched = time.perf_counter()
        torch.cuda.synchronize(self._device)
        return launched - start, time.perf_counter() - start

    def start(self) -> None:
        """Prepare a memory pool for a recording, unless the caller is recording. A pool is freed
        with its last recording and may not be used afterwards."""
        if torch.cuda.is_current_stream_capturing():
            return
        self._clear()
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Launches) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Record ``run``: its results, and the function that replays it."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the caller records launches itself")
        driver = _driver()
        graph = torch.cuda.CUDAGraph(keep_graph=driver is not None)
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = run()
        except BaseException:
            self._recover()
            raise
        self._clear()
        if driver is not None:
            with torch.cuda.device(self._device):
                memsets_as_kernels(graph.raw_cuda_graph(), driver)
            graph.instantiate()
        self._graphs.add(graph)
        return results, graph.replay

    def _recover(self) -> None:
        """After a failed recording, make one that succeeds, so that generators and the allocator
        leave the recording state."""
        torch.cuda.synchronize(self._device)
        empty = torch.zeros((), device=self._device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            empty.add_(0)


class _Memset(Protocol):
    """The parameters of a memset, as the driver names them."""

    dst: SupportsInt
    elementSize: SupportsInt
    height: SupportsInt
    value: SupportsInt
    width: SupportsInt


def memsets_as_kernels(graph: int, driver: ModuleType) -> int:
    """Replace small memsets by kernels in a graph that is not yet instantiated; the number of
    replacements.

    ``graph``: its address. ``driver``: ``cuda.bindings.driver``. The kernels take over the edges of
    the memsets. ``RuntimeError`` with the driver's message if it refuses.
    """
    handle = driver.CUgraph(graph)
    _, count = _ask(driver.cuGraphGetNodes, handle)
    nodes, _ = _ask(driver.cuGraphGetNodes, handle, count)
    memset = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
    replaced = 0
    for node in nodes:
        (kind,) = _ask(driver.cuGraphNodeGetType, node)
        if kind != memset:
            continue
        (params,) = _ask(driver.cuGraphMemsetNodeGetParams, node)
        kernel = _kernel_for(params, driver)
        if kernel is not None:
            _replace(handle, node, kernel, driver)
            replaced += 1
    return replaced


def _kernel_for(params: _Memset, driver: ModuleType) -> object:
    """The parameters of a kernel that does the same as this memset, if the memset is small and
    consists of whole words."""
    size, first = int(params.elementSize) * int(params.width), int(params.dst)
    if int(params.height) != 1 or size > _MOST or size % _WORD or first % _WORD:
        return None
    element = int(params.elementSize)
    repeats = {1: 0x01010101, 2: 0x00010001, 4: 1}[element]
    value = (int(params.value) & ((1 << 8 * element) - 1)) * repeats
    kernel = driver.CUDA_KERNEL_NODE_PARAMS()
    kernel.func = _fill_function(driver, torch.cuda.current_device())
    kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = 1
    kernel.blockDimX, kernel.blockDimY, kernel.blockDimZ = _THREADS, 1, 1
    values = (first, value, size // _WORD)
    kernel.kernelParams = (values, (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32))
    return kernel


def _replace(graph: object, node: object, kernel: object, driver: ModuleType) -> None:
    """Put ``kernel`` in the place of ``node``, with its edges and their data."""
    before, how_before = _neighbours(driver, "cuGraphNodeGetDependencies", node)
    after, how_after = _neighbours(driver, "cuGraphNodeGetDependentNodes", node)
    (replacement,) = _ask(driver.cuGraphAddKernelNode, graph, None, 0, kernel)
    connect = _with_edges(driver, "cuGraphAddDependencies")
    if before:
        _ask(connect, graph, before, [replacement] * len(before), how_before, len(before))
    if after:
        _ask(connect, graph, [replacement] * len(after), after, how_after, len(after))
    _ask(driver.cuGraphDestroyNode, node)


def _neighbours(driver: ModuleType, name: str, node: object) -> tuple[list[object], list[object]]:
    function = _with_edges(driver, name)
    *_, count = _ask(function, node)
    if not count:
        return [], []
    nodes, edges, _ = _ask(function, node, count)
    return list(nodes), list(edges)


def _with_edges(driver: ModuleType, name: str) -> Callable[..., Sequence[Any]]:
    """The function that takes the data of edges. Bindings of CUDA 13 have only this one; those of
    CUDA 12 have it beside a function without edge data."""
    return getattr(driver, f"{name}_v2", None) or getattr(driver, name)


def _ask(function: Callable[..., Sequence[Any]], *args: object) -> Sequence[Any]:
    """Call the driver and return its answer."""
    status, *values = function(*args)
    if int(status):
        raise RuntimeError(f"{function.__name__}: {status}")
    return values


@functools.cache
def _fill_function(driver: ModuleType, device: int) -> object:
    """The kernel ``to[:words] = with``, loaded once for each ``device`` (which is current)."""
    (module,) = _ask(driver.cuModuleLoadData, _FILL)
    (function,) = _ask(driver.cuModuleGetFunction, module, b"fill")
    return function


@functools.cache
def _driver() -> ModuleType | None:
    """``cuda.bindings.driver``, which PyTorch requires where it is built for CUDA on Linux. Without
    it, or with a driver that does not report the data of edges, memsets stay as they are."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None
    (version,) = _ask(driver.cuDriverGetVersion)
    return driver if version >= _EDGES else None
