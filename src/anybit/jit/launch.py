"""Launch a kernel on the current stream.

Everything that does not change from launch to launch is prepared once per kernel, device and grid: what is left is to
fill the parameters and one driver call. Nothing here synchronizes, allocates device memory or touches another stream,
so launches can be captured in a CUDA graph, the first one of a kernel included.
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
"""Of a grid, along x, y and z."""

_launchers: dict[tuple[Kernel, int, bool], "Launcher"] = {}
_loading = threading.Lock()


def launch(kernel: Kernel, params: Any, grid: Grid, *, pdl: bool = False, device: int | None = None) -> None:
    """Launch `kernel` with `params` on the current stream of the current device (or of `device`).

    grid: blocks along x, y, z. pdl: programmatic dependent launch; the kernel may start before the one ahead of it in
    the stream has ended, and must call griddepcontrol_wait before it touches anything that one reads or writes. Devices
    before sm_90 have no such launches, and wait.
    The kernel is compiled (or read from the cache) at its first launch on a device. Raises KernelError where
    compilation or the launch is refused, ValueError where a tensor lives on another device.
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
    """A launch as ``launch`` makes it, to be made often: a function of the fields of `params` that change, by order.

    It takes addresses for pointers, and whoever calls it vouches for them. Neither ``record`` nor ``kernels_of`` sees
    it: ask ``watched`` first.
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
    """Who listens to a thread's launches; see ``record`` and ``kernels_of``."""

    tape: "list[Recorded] | None" = None
    wanted: dict[Kernel, None] | None = None


_listening = _Listening()


def watched() -> bool:
    """Whether somebody listens to this thread's launches (``record``, ``kernels_of``)."""
    return _listening.tape is not None or _listening.wanted is not None


def kernels_of(call: Callable[[], object]) -> list[Kernel]:
    """The kernels that `call` would launch on this thread; none is compiled or launched, so its results are garbage."""
    before, _listening.wanted = _listening.wanted, {}
    try:
        call()
        return list(_listening.wanted)
    finally:
        _listening.wanted = before


def load(kernel: Kernel, device: int) -> None:
    """Bring a kernel onto a device now, compiled if it has to be, so that its first launch does not."""
    _function(kernel, device)


class Recorded:
    """A launch that was made, to be made again without what Python needs to find its parameters.

    It keeps the tensors that it was made with: scratch memory has no other owner.
    """

    __slots__ = ("_grid", "_launcher", "_values", "params")

    def __init__(self, launcher: "Launcher", grid: Grid, values: bytes, params: Any) -> None:
        self._launcher, self._grid, self._values, self.params = launcher, grid, values, params

    def __call__(self) -> None:
        """Launch again on the current stream; the tensors must be where they were."""
        self._launcher.again(self._values, self._grid)

    def moved(self, old: int, new: int) -> "Recorded":
        """The same launch with one address in place of another."""
        values = self._values.replace(old.to_bytes(8, "little"), new.to_bytes(8, "little"))
        return Recorded(self._launcher, self._grid, values, self.params)

    def changing(self, *names: str) -> Callable[..., None]:
        """What makes the launch with other values of these fields, as ``cached_launch`` says; lives no longer."""
        return _changing(self._launcher, self.params, self._grid, names)


def record(call: Callable[[], object]) -> list[Recorded]:
    """Run `call`, and return the launches that it made on this thread, in their order."""
    before, _listening.tape = _listening.tape, []
    try:
        call()
        return _listening.tape
    finally:
        _listening.tape = before


class Launcher:
    """A kernel, ready to be launched on one device; `launch` keeps one for each."""

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
        """The fields of `params`, tensors as addresses. Raises ValueError where one lives on another device."""
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
        """Launch with what `values` gave on the device's current stream."""
        scratch = self._scratch
        self._layout.packer.pack_into(scratch.buffer, 0, *values)
        self._start(scratch, grid)

    def last(self) -> bytes:
        """The parameters of this thread's last launch."""
        return bytes(self._scratch.buffer.raw)

    def again(self, values: bytes, grid: Grid) -> None:
        """Launch with parameters as `last` gave them."""
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
        """The driver's config of launches on a stream, this thread's own, with another grid."""
        kernel = self.kernel
        if min(grid) < 1 or grid[0] % kernel.cluster:
            raise ValueError(
                f"grid {grid} of {kernel.entry}: sides must be positive, x a multiple of cluster {kernel.cluster}"
            )
        if any(side > most for side, most in zip(grid, MOST_BLOCKS, strict=True)):
            raise KernelError(
                f"grid {grid} of {kernel.entry} is beyond what CUDA launches, {MOST_BLOCKS} blocks along x, y and z: "
                "pass fewer tokens or sequences at a time"
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
    """A launch config of the driver's, and the grid in it."""

    config: Any
    grid: Grid


class _Scratch(threading.local):
    """What the driver reads, one a thread: packed parameters, the pointer to them, and a config for each stream."""

    def __init__(self, size: int) -> None:
        self.configs: dict[int, _Gridded] = {}
        self.buffer = ctypes.create_string_buffer(max(size, 1))
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.address = ctypes.addressof(self.pointers)


def _function(kernel: Kernel, device: int) -> Any:
    """The driver's handle of a kernel, its attributes set for `device`."""
    compiled = cached(kernel, _device(device).arch)
    torch.cuda.set_device(torch.cuda.current_device())  # makes sure that this thread has a context
    cuda = driver()
    relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    # Loading code may do what a strict stream capture forbids; it belongs to no stream, so the capture can allow it.
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
    return cuda.CUfunction(int(handle))  # launches take either kind of handle, but the binding this one


_libraries: dict[int, tuple[Any, Any, Compiled]] = {}


def _load(compiled: Compiled) -> Any:
    """The kernel of a cubin. A library is loaded once a process; the driver brings it to each device at first use."""
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
