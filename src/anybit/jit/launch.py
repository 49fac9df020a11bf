"""Launch kernels on the current stream.

Everything that does not change between launches is prepared once per kernel, device and grid, so that a launch only
packs the parameters and makes one driver call. Nothing here synchronizes, allocates device memory or uses another
stream, so launches, even a kernel's first, can be captured in a CUDA graph.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from anybit.device import Device
from anybit.errors import KernelError
from anybit.jit.cache import cached
from anybit.jit.compile import Compiled
from anybit.jit.driver import checked, driver
from anybit.jit.params import layout_of
from anybit.jit.source import Kernel

Grid = tuple[int, int, int]
MOST_BLOCKS = 2**31 - 1, 65535, 65535
"""CUDA's largest grid: blocks along x, y and z."""

_launchers: dict[tuple[Kernel, int, bool], "Launcher"] = {}
_loading = threading.Lock()


def launch(kernel: Kernel, params: Any, grid: Grid, *, pdl: bool = False, device: int | None = None) -> None:
    """Launch `kernel` with `params` on the current stream of the current device (or of `device`).

    grid: blocks along x, y, z.
    pdl: programmatic dependent launch: the kernel may start before the previous one in the stream ends, and must call
    griddepcontrol_wait before it accesses anything that one reads or writes. Ignored before sm_90.
    The kernel is compiled (or read from the cache) at its first launch on a device. Raises KernelError if compilation
    or the launch fails, ValueError for a tensor on another device.
    """
    if _listening.wanted is not None:
        _listening.wanted[kernel] = None
        return
    if device is None:
        device = torch._C._cuda_getDevice()
    launcher = _launchers.get((kernel, device, pdl)) or _launcher(kernel, device, pdl)
    launcher(params, grid)
    if _listening.tape is not None:
        _listening.tape.append(Recorded(launcher, grid, launcher.last(), params))


def _launcher(kernel: Kernel, device: int, pdl: bool) -> "Launcher":
    found = _launchers.get((kernel, device, pdl))
    return found or _launchers.setdefault((kernel, device, pdl), Launcher(kernel, device, pdl))


def cached_launch(
    kernel: Kernel, params: Any, grid: Grid, changing: tuple[str, ...], *, pdl: bool = False, device: int
) -> Callable[..., None]:
    """A function that repeats a launch with new values of the fields ``changing`` of `params`, in that order.

    Pointers are passed as addresses, unchecked. ``record`` and ``kernels_of`` do not see its launches: check
    ``watched`` first.
    """
    return _changing(_launcher(kernel, device, pdl), params, grid, changing)


def _changing(launcher: "Launcher", params: Any, grid: Grid, changing: tuple[str, ...]) -> Callable[..., None]:
    known, start = launcher.values(params), launcher.start
    names = [field.name for field in layout_of(launcher.kernel.params).fields]
    places = [names.index(name) for name in changing]

    def launch_again(*new: Any) -> None:
        values = known.copy()
        for place, value in zip(places, new, strict=True):
            values[place] = value
        start(values, grid)

    return launch_again


class _Listening(threading.local):
    """A thread's active recorders of launches; see ``record`` and ``kernels_of``."""

    tape: "list[Recorded] | None" = None
    wanted: dict[Kernel, None] | None = None


_listening = _Listening()


def watched() -> bool:
    """Whether this thread's launches are being recorded (``record``, ``kernels_of``)."""
    return _listening.tape is not None or _listening.wanted is not None


def kernels_of(call: Callable[[], object]) -> list[Kernel]:
    """Dry run: the kernels that `call` would launch on this thread. Nothing runs, so its results are undefined."""
    before, _listening.wanted = _listening.wanted, {}
    try:
        call()
        return list(_listening.wanted)
    finally:
        _listening.wanted = before


def load(kernel: Kernel, device: int) -> None:
    """Load a kernel on a device now, compiling it if necessary, rather than at its first launch."""
    _function(kernel, device)


class Recorded:
    """A recorded launch that can be repeated with its packed parameters, at minimal host cost.

    Holds references to its tensors: scratch memory has no other owner.
    """

    __slots__ = ("_grid", "_launcher", "_values", "params")

    def __init__(self, launcher: "Launcher", grid: Grid, values: bytes, params: Any) -> None:
        self._launcher, self._grid, self._values, self.params = launcher, grid, values, params

    def __call__(self) -> None:
        """Launch again on the current stream; the tensors must still be at the same addresses."""
        self._launcher.again(self._values, self._grid)

    def moved(self, old: int, new: int) -> "Recorded":
        """The same launch with address ``old`` replaced by ``new``."""
        values = self._values.replace(old.to_bytes(8, "little"), new.to_bytes(8, "little"))
        return Recorded(self._launcher, self._grid, values, self.params)

    def changing(self, *names: str) -> Callable[..., None]:
        """A ``cached_launch`` of these fields; this object must outlive it."""
        return _changing(self._launcher, self.params, self._grid, names)


def record(call: Callable[[], object]) -> list[Recorded]:
    """Run `call`, and return the launches that it made on this thread, in order."""
    before, _listening.tape = _listening.tape, []
    try:
        call()
        return _listening.tape
    finally:
        _listening.tape = before


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
        self._launch = driver().cuLaunchKernelEx
        self._scratch = _Scratch(self._layout.size)

    def __call__(self, params: Any, grid: Grid) -> None:
        """Launch with `params` on the device's current stream."""
        self.start(self.values(params), grid)

    def values(self, params: Any) -> list[Any]:
        """The fields of `params`, tensors as addresses. Raises ValueError for a tensor on another device."""
        device = self.device
        values = [*self._fields(params)]
        for index in self._pointers:
            value = values[index]
            if value is None:
                values[index] = 0
            elif not isinstance(value, int):
                if value.get_device() != device:
                    self._refuse_device(index, value)
                values[index] = value.data_ptr()
        return values

    def start(self, values: list[Any], grid: Grid) -> None:
        """Launch with the result of `values` on the device's current stream."""
        scratch = self._scratch
        self._layout.packer.pack_into(scratch.buffer, 0, *values)
        self._start(scratch, grid)

    def last(self) -> bytes:
        """The packed parameters of this thread's last launch."""
        return bytes(self._scratch.buffer.raw)

    def again(self, values: bytes, grid: Grid) -> None:
        """Launch with packed parameters from `last`."""
        scratch = self._scratch
        scratch.buffer.raw = values
        self._start(scratch, grid)

    def _start(self, scratch: "_Scratch", grid: Grid) -> None:
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
