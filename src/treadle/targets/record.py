"""One kind of device as data."""

from dataclasses import dataclass

from treadle.targets.driver import Driver
from treadle.targets.model import DeviceModel


@dataclass(frozen=True, slots=True)
class DeviceTarget:
    """Everything that the rooms of the compiler and the runtime have to know of a kind of device.

    ``name``: what ``Options.target`` calls it. ``device``: PyTorch's word for where its tensors
    lie. ``language``: what its kernels are printed in and loaded from. ``workers``: who runs a
    kernel, ``"threads"`` or ``"programs"``. ``model``: its ceilings, where none were measured.
    ``driver``: what is asked of the device itself. ``libraries``: whose kernels PyTorch calls.
    ``on_host``: its memory is the host's, and a call has happened when it returns.
    ``sequential_rng``: PyTorch draws its random numbers one after another from one state, the same
    ones for each operator that draws. ``draws``: its language has such a generator, too.
    ``aligned_bytes``: rows of products are fastest at multiples of it; 0: it does not matter.
    ``any_size``: its kernels run for sizes that are known at the call.
    ``wide_products``: its library adds products of 16-bit factors up into 32 bits (``mm.dtype``).
    """

    name: str
    device: str
    language: str
    workers: str
    model: DeviceModel
    driver: Driver
    libraries: frozenset[str] = frozenset()
    on_host: bool = False
    sequential_rng: bool = False
    draws: bool = False
    aligned_bytes: int = 0
    any_size: bool = False
    wide_products: bool = False
