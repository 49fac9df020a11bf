"""Launch kernels on the current stream.

Everything that does not change between launches is prepared once per kernel, device and grid, so that a launch only
packs the parameters and makes one driver call. Nothing here synchronizes, allocates device memory or uses another
stream, so launches, even a kernel's first, can be captured in a CUDA graph.
"""

import ctypes
import threading
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

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

Grid = tuple[int, int, int]
MOST_BLOCKS = 2**31 - 1, 65535, 65535
"""CUDA's largest grid: blocks along x, y and z."""

_launchers: dict[tuple[Kernel, int, bool], "Launcher"] = {}
_loading = threading.Lock()


@dataclass(frozen=True, eq=False)
class Launch:
    """One launch as data: ``launch``'s arguments. In a plan, pointers of ``params`` may be slots."""

    kernel: Kernel
    params: Any
    grid: Grid
    pdl: bool = False


def launch(kernel: Kernel, params: Any, grid: Grid, *, pdl: bool = False, device: int | None = None) -> None:
    """Launch `kernel` with `params` on the current stream of the current device (or of `device`).

    grid: blocks along x, y, z.
    pdl: programmatic dependent launch: the kernel may start before the previous one in the stream ends, and must call
    griddepcontrol_wait before it accesses anything that one reads or writes. Ignored before sm_90.
    The kernel is compiled (or read from the cache) at its first launch on a device. Raises KernelError if compilation
    or the launch fails, ValueError for a tensor on another device.
    """
    found = launcher(kernel, torch._C._cuda_getDevice() if device is None else device, pdl)
    found.start(found.values(params), grid)


def launcher(kernel: Kernel, device: int, pdl: bool) -> "Launcher":
    """The launcher of a kernel on a device, cached; compiles the kernel if necessary."""
    key = kernel, device, pdl
    return _launchers.get(key) or _launchers.setdefault(key, Launcher(kernel, device, pdl))


def load(kernel: Kernel, device: int) -> None:
    """Load a kernel on a device now, compiling it if necessary, rather than at its first launch."""
    _function(kernel, device)


class Launcher:
    """A kernel ready to launch on one device; cached by `launch`."""

    def __init__(self, kernel: Kernel, device: int, pdl: bool) -> None:
        self.kernel, self.device = kernel, device
        self.pdl = pdl and _device(device).capability >= 90
        self._layout = layout_of(kernel.params)
        names = [field.name for field in self._layout.fields]
        self._fields = attrgetter(*names) if len(names) > 1 else lambda params: (getattr(params, names[0]),)
        self._pointers = [i for i, field in enumerate(self._layout.fields) if field.type.code == "P"]
        self._function = _function(kernel, device)
        self._maps = [i for i, field in enumerate(self._layout.fields) if field.type.code == "128s"]
        self._launch = driver().cuLaunchKernelEx
        self._scratch = _Scratch(self._layout.size)

    def values(self, params: Any) -> list[Any]:
        """The fields of `params`: tensors as addresses, matrices as tensor maps, slots as they are.

        Raises ValueError for a tensor on another device.
        """
        values = [*self._fields(params)]
        for index in self._pointers:
            values[index] = self._address(values[index], index)
        for index in self._maps:
            if isinstance(values[index], Matrix) and not isinstance(values[index].at, Slot):
                values[index] = values[index].encoded(self._address(values[index].at, index))
        return values

    def _address(self, value: Any, index: int) -> Any:
        if value is None:
            return 0
        if not isinstance(value, Tensor):
            return value
        if value.get_device() != self.device:
            self._refuse_device(index, value)
        return value.data_ptr()

    def start(self, values: list[Any], grid: Grid) -> None:
        """Launch with the result of `values` on the device's current stream."""
        scratch = self._scratch
        self._layout.packer.pack_into(scratch.buffer, 0, *values)
        device = self.device
        stream = torch._C._cuda_getCurrentRawStream(device)
        known = scratch.configs.get(stream)
        if known is None or known.grid != grid:
            known = scratch.configs[stream] = self._on_grid(known, stream, grid)
        if torch._C._cuda_getDevice() == device:
            (status,) = self._launch(known.config, self._function, scratch.address, 0)
        else:
            with torch.cuda.device(device):
                (status,) = self._launch(known.config, self._function, scratch.address, 0)
        if status:
            self._retry(status, known)

    def _retry(self, status: Any, known: "_Gridded") -> None:
        if status == driver().CUresult.CUDA_ERROR_INVALID_CONTEXT:  # this thread has not used the device yet
            torch.cuda.set_device(torch.cuda.current_device())
            with torch.cuda.device(self.device):
                (status,) = self._launch(known.config, self._function, self._scratch.address, 0)
        if status:
            kernel = self.kernel
            raise KernelError(
                f"launching {kernel.entry} failed: {status.name}; grid {known.grid}, {kernel.threads} threads, "
                f"{kernel.shared_bytes} bytes of shared memory, cluster {kernel.cluster}, config {kernel.config}"
            )

    def _refuse_device(self, index: int, value: torch.Tensor) -> None:
        name = self._layout.fields[index].name
        raise ValueError(
            f"{self.kernel.params.__qualname__}.{name} is on {value.device}, but {self.kernel.entry} is launched on "
            f"cuda:{self.device}; move the tensor, or launch on its device"
        )

    def _on_grid(self, known: "_Gridded | None", stream: int, grid: Grid) -> "_Gridded":
        """The calling thread's driver config for a stream, with a new grid. Checks the grid."""
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
        config = self._config(stream) if known is None else known.config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        return _Gridded(config, grid)

    def _config(self, stream: int) -> Any:
        cuda, kernel = driver(), self.kernel
        config = cuda.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes = kernel.shared_bytes
        config.hStream = cuda.CUstream(stream)
        attributes = []
        if kernel.cluster > 1:
            cluster = cuda.CUlaunchAttribute()
            cluster.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = kernel.cluster, 1, 1
            attributes.append(cluster)
        if self.pdl:
            overlap = cuda.CUlaunchAttribute()
            overlap.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            attributes.append(overlap)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config


class _Gridded(NamedTuple):
    """A driver launch config, and its grid."""

    config: Any
    grid: Grid


class _Scratch(threading.local):
    """Per-thread buffers that the driver reads: packed parameters, the pointer to them, and a config per stream."""

    def __init__(self, size: int) -> None:
        self.configs: dict[int, _Gridded] = {}
        self.buffer = ctypes.create_string_buffer(max(size, 1))
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.address = ctypes.addressof(self.pointers)


def _function(kernel: Kernel, device: int) -> Any:
    """The driver's handle of a kernel, with its attributes set for `device`."""
    compiled = cached(kernel, _device(device).arch)
    torch.cuda.set_device(torch.cuda.current_device())  # ensures that this thread has a context
    cuda = driver()
    relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    # Loading code makes calls that a strict stream capture forbids; they use no stream, so relaxed mode is safe.
    before = checked(cuda.cuThreadExchangeStreamCaptureMode(relaxed), "entering relaxed capture")
    try:
        with _loading:
            handle = _load(compiled)
            number = checked(cuda.cuDeviceGet(device), f"finding device {device}")
            attributes = cuda.CUfunction_attribute
            settings = []
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


_libraries: dict[int, tuple[Any, Any, Compiled]] = {}


def _load(compiled: Compiled) -> Any:
    """The kernel of a cubin, loaded once per process; the driver loads it on each device at first use."""
    found = _libraries.get(id(compiled))
    if found is None:
        cuda, name = driver(), compiled.entry
        library = checked(cuda.cuLibraryLoadData(compiled.cubin, [], [], 0, [], [], 0), f"loading {name}")
        handle = checked(cuda.cuLibraryGetKernel(library, name.encode()), f"finding {name}")
        found = _libraries[id(compiled)] = library, handle, compiled
    return found[1]


@cache
def _device(device: int) -> Device:
    return Device.of(torch.empty(0, device=f"cuda:{device}"))
