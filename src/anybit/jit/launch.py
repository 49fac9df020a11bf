"""Launch kernels on the current stream.

Everything that does not change between launches is prepared once per kernel and device, so that a launch only packs the
parameters and makes one driver call. Nothing here synchronizes, allocates device memory or uses another stream, so
launches, even a kernel's first, can be captured in a CUDA graph.
"""

import ctypes
import threading
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit.cache import cached
from anybit.jit.compile import Compiled
from anybit.jit.driver import checked, driver
from anybit.jit.params import Slot, layout_of
from anybit.jit.source import Kernel
from anybit.jit.tensor_map import Matrix

if TYPE_CHECKING:
    from cuda.bindings.driver import CUfunction, CUlaunchConfig, CUresult

Grid = tuple[int, int, int]
MOST_BLOCKS = 2**31 - 1, 65535, 65535
"""CUDA's largest grid: blocks along x, y and z."""
Value = Tensor | Matrix | Slot | bytes | int | float | None
"""A field of kernel parameters."""

_launchers: dict[tuple[Kernel, int], "Launcher"] = {}
_loading = threading.Lock()


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch as data: ``launch``'s arguments. In a plan, pointers of ``params`` may be slots."""

    kernel: Kernel
    params: object
    grid: Grid
    pdl: bool = False


def launch(kernel: Kernel, params: object, grid: Grid, *, pdl: bool = False, device: int | None = None) -> None:
    """Launch `kernel` with `params` on the current stream of the current device (or of `device`).

    grid: blocks along x, y, z.
    pdl: programmatic dependent launch: the kernel may start before the previous one in the stream ends, and must call
    griddepcontrol_wait before it accesses anything that one reads or writes. Ignored before sm_90.
    The kernel is compiled (or read from the cache) at its first launch on a device. Raises KernelError if compilation
    or the launch fails, ValueError for a tensor on another device.
    """
    found = launcher(kernel, torch._C._cuda_getDevice() if device is None else device)
    found.start(found.values(params), grid, pdl)


def launcher(kernel: Kernel, device: int, code: Compiled | None = None) -> "Launcher":
    """A kernel on a device, loaded once per process. code: its machine code; None: from the cache, or compiled."""
    key = kernel, device
    return _launchers.get(key) or _launchers.setdefault(key, Launcher(kernel, device, code))


class Launcher:
    """A kernel loaded on one device."""

    def __init__(self, kernel: Kernel, device: int, code: Compiled | None = None) -> None:
        gpu, cuda = Device.at(device), driver()
        self.kernel, self.device, self._cuda = kernel, device, cuda
        self._layout = layout_of(kernel.params)
        self._pointers = [i for i, field in enumerate(self._layout.fields) if field.type.code in ("P", "128s")]
        self._function = _function(cuda, kernel, device, code or cached(kernel, gpu.arch))
        self._launch = cuda.cuLaunchKernelEx
        self._attributes = []
        if kernel.cluster > 1:
            cluster = cuda.CUlaunchAttribute()
            cluster.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = kernel.cluster, 1, 1
            self._attributes.append(cluster)
        self._without_pdl = len(self._attributes)
        if gpu.capability >= 90:  # last, so that a launch can leave it out
            overlap = cuda.CUlaunchAttribute()
            overlap.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            self._attributes.append(overlap)
        self._ready = Ready()

    def values(self, params: object) -> list[Value]:
        """The fields of `params`: tensors as addresses, matrices as tensor maps, slots as they are.

        Raises ValueError for a tensor on another device.
        """
        values: list[Value] = [*vars(params).values()]
        for index in self._pointers:
            value = values[index]
            at = value.at if isinstance(value, Matrix) else value
            if isinstance(at, Tensor):
                if at.get_device() != self.device:
                    name = f"{self.kernel.params.__qualname__}.{self._layout.fields[index].name}"
                    raise ValueError(
                        f"{name} is on {at.device}, but {self.kernel.entry} is launched on cuda:{self.device}; "
                        "move the tensor, or launch on its device"
                    )
                at = at.data_ptr()
            if not isinstance(value, Matrix):
                values[index] = 0 if at is None else at
            elif isinstance(at, int):
                values[index] = value.encoded(at)
        return values

    def start(self, values: list[Value], grid: Grid, pdl: bool, ready: "Ready | None" = None) -> None:
        """Launch with the result of `values` on the device's current stream. ready: a caller's own, for one grid."""
        ready, device = ready or self._ready, self.device
        where = torch._C._cuda_getCurrentRawStream(device), grid, pdl
        if ready.where != where:
            self._place(ready, *where)
        self._layout.packer.pack_into(ready.buffer, 0, *values)
        if torch._C._cuda_getDevice() == device:
            (status,) = self._launch(ready.config, self._function, ready.address, 0)
        else:
            with torch.cuda.device(device):
                (status,) = self._launch(ready.config, self._function, ready.address, 0)
        if status:
            self._retry(status, ready, grid)

    def _place(self, ready: "Ready", stream: int, grid: Grid, pdl: bool) -> None:
        """Check a grid, and put it, the stream and PDL into the launch config of a thread."""
        kernel = self.kernel
        if min(grid) < 1 or grid[0] % kernel.cluster:
            raise ValueError(
                f"grid {grid} of {kernel.entry}: sides must be positive, x a multiple of cluster {kernel.cluster}"
            )
        if any(side > most for side, most in zip(grid, MOST_BLOCKS, strict=True)):
            raise KernelError(
                f"grid {grid} of {kernel.entry} is beyond CUDA's limit, {MOST_BLOCKS} blocks along x, y and z: pass "
                "fewer tokens or sequences at a time"
            )
        if ready.where is None:  # the thread's first launch
            ready.buffer = ctypes.create_string_buffer(max(self._layout.size, 1))
            ready.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(ready.buffer))
            ready.address = ctypes.addressof(ready.pointers)
            ready.config = self._cuda.CUlaunchConfig()
            ready.config.blockDimX, ready.config.blockDimY, ready.config.blockDimZ = kernel.threads, 1, 1
            ready.config.sharedMemBytes, ready.config.attrs = kernel.shared_bytes, self._attributes
        if ready.where is None or ready.where[0] != stream:
            ready.config.hStream = self._cuda.CUstream(stream)
        ready.config.gridDimX, ready.config.gridDimY, ready.config.gridDimZ = grid
        ready.config.numAttrs = len(self._attributes) if pdl else self._without_pdl
        ready.where = stream, grid, pdl

    def _retry(self, status: "CUresult", ready: "Ready", grid: Grid) -> None:
        if status == self._cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # this thread has not used the device yet
            torch.cuda.set_device(torch.cuda.current_device())
            with torch.cuda.device(self.device):
                (status,) = self._launch(ready.config, self._function, ready.address, 0)
        if status:
            kernel = self.kernel
            raise KernelError(
                f"launching {kernel.entry} failed: {status.name}; grid {grid}, {kernel.threads} threads, "
                f"{kernel.shared_bytes} bytes of shared memory, cluster {kernel.cluster}, config {kernel.config}"
            )


class Ready(threading.local):
    """What the driver reads at a thread's launches: packed parameters, the pointer to them, and a launch config.

    where: the stream, grid and PDL that the config has; None before the thread's first launch.
    """

    where: tuple[int, Grid, bool] | None = None
    buffer: "ctypes.Array[ctypes.c_char]"
    pointers: "ctypes.Array[ctypes.c_void_p]"
    address: int
    config: "CUlaunchConfig"


def _function(cuda: ModuleType, kernel: Kernel, device: int, code: Compiled) -> "CUfunction":
    """The driver's handle of a kernel, with its attributes set for ``device``."""
    torch.cuda.set_device(torch.cuda.current_device())  # ensures that this thread has a context
    relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    # Loading code makes calls that a strict stream capture forbids; they use no stream, so relaxed mode is safe.
    before = checked(cuda.cuThreadExchangeStreamCaptureMode(relaxed), "entering relaxed capture")
    try:
        with _loading:
            # Never unloaded: a launcher lives as long as the process.
            library = checked(cuda.cuLibraryLoadData(code.cubin, [], [], 0, [], [], 0), f"loading {code.entry}")
            handle = checked(cuda.cuLibraryGetKernel(library, code.entry.encode()), f"finding {code.entry}")
            number = checked(cuda.cuDeviceGet(device), f"finding device {device}")
            attributes = cuda.CUfunction_attribute
            # Shared memory takes all it can of what it shares with L1: an SM changes that only when it is idle, and the
            # kernel behind, which starts early, would put two blocks on other SMs.
            settings = [(attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)]
            if kernel.shared_bytes > 48 << 10:
                settings.append((attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared_bytes))
            if kernel.cluster > 8:
                settings.append((attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
            for attribute, value in settings:
                what = f"setting {attribute.name} = {value} of {kernel.entry}"
                checked(cuda.cuKernelSetAttribute(attribute, value, handle, number), what)
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(before)
    return cuda.CUfunction(int(handle))  # the driver takes a CUkernel, too, but the binding only this type
