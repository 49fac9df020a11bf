"""Runs a jit.Kernel on the CPU: the same .cuh file, compiled by g++, with threads as fibers.

    emulate.run(kernel, Params(x, y, 8, 100, 2.0), grid=(2, 1, 1))

writes the tensors that the parameters name, as a launch would, or raises EmulationError naming the
fault: an overrun, a misaligned vector, a race, a missing wait, a divergent barrier, a deadlock. See
docs/writing-kernels.md.
"""

import ctypes
import shutil
import struct
import subprocess
import threading
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import kept
from anybit import jit
from anybit.jit.compile import reachable_headers
from anybit.jit.params import KERNELS, layout_of

_building = threading.Lock()
RUNTIME = Path(__file__).parent / "runtime"
RUNTIME_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-U_FORTIFY_SOURCE"]
KERNEL_FLAGS = [
    "-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0",
    "-Wno-unknown-pragmas", "-Wno-attributes", "-U_FORTIFY_SOURCE",
]  # fmt: skip


class EmulationError(AssertionError):
    """A kernel did something illegal; the message names the instruction, the thread and the address."""


@dataclass(frozen=True)
class Box:
    """A tensor map among the parameters: a matrix [rows, columns] read in boxes of 128-byte rows."""

    matrix: torch.Tensor
    columns: int
    rows: int

    def packed(self, address: int) -> bytes:
        """The map as emulated copies read it, with its matrix at `address`."""
        matrix, size = self.matrix, self.matrix.element_size()
        assert self.columns * size == 128, "a row of a swizzled box has 128 bytes"
        rows, columns = matrix.shape
        assert matrix.stride(0) * size % 16 == 0, "rows of a tensor map's matrix begin at multiples of 16 bytes"
        return struct.pack("<Q5I", address, rows, columns * size, matrix.stride(0) * size, self.rows, size)


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("races", ctypes.c_bool),
        ("dependent", ctypes.c_bool),
    ]


def run(
    kernel: jit.Kernel,
    params: Any,
    grid: tuple[int, int, int],
    *,
    seed: int = 0,
    races: bool = True,
    resident: int = 4,
    dependent: Collection[str] = (),
) -> None:
    """Run one launch of `kernel`; tensors among `params` are CPU tensors, changed in place.

    seed: determines the order of threads and asynchronous copies; try a few.
    races: also detect shared memory accesses without a barrier between them (slower).
    resident: clusters that run concurrently; raise it for kernels whose blocks wait for each other.
    dependent: names of parameters that an earlier kernel may still write: touching them before griddepcontrol_wait is
    an error, as is a launch in which no thread calls it.
    """
    if grid[0] >= 1 << 31 or max(grid[1:]) > 65535:
        raise EmulationError(f"{kernel.entry}: a grid of {grid} has more blocks than CUDA launches")
    layout = layout_of(kernel.params)
    runtime, function = prepare(kernel)
    values, copies = [], []
    extents = _extents({f.name: _tensor(getattr(params, f.name)) for f in layout.fields})
    runtime.emulate_free()
    try:
        for name, (start, size) in extents.items():
            address = runtime.emulate_allocate(name.encode(), size, any(n in dependent for n in name.split(" = ")))
            ctypes.memmove(address, start, size)
            copies.append((start, address, size))
        for field in layout.fields:
            value = getattr(params, field.name)
            tensor = _tensor(value)
            if isinstance(tensor, torch.Tensor):
                pointer = tensor.data_ptr()
                homes = (a + pointer - s for s, a, size in copies if s <= pointer < s + max(size, 1))
                home = next(homes, 0)
                value = value.packed(home) if isinstance(value, Box) else home
            values.append(0 if value is None else value)
        packed = ctypes.create_string_buffer(layout.packer.pack(*values), max(layout.size, 1))
        launch = _Launch(
            ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(packed), (ctypes.c_uint32 * 3)(*grid),
            kernel.threads, kernel.shared_bytes, kernel.cluster, resident, seed, races, bool(dependent),
        )  # fmt: skip
        message = runtime.emulate_run(ctypes.byref(launch))
        if message:
            raise EmulationError(f"{kernel.entry}: {message.decode()}")
        for start, address, size in copies:
            ctypes.memmove(start, address, size)
    finally:
        runtime.emulate_free()


def launched(one: jit.Launch, **how: Any) -> None:
    """`run` a launch as host code makes it."""
    run(one.kernel, one.params, one.grid, **how)


def _tensor(value: Any) -> Any:
    return value.matrix if isinstance(value, Box) else value


def prepare(kernel: jit.Kernel) -> tuple[Any, Any]:
    """Compile the runtime and the kernel for `run`; thread-safe."""
    with _building:
        runtime = _runtime()
    return runtime, _entry(kernel)


def _extents(values: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Start and size of the memory that each tensor spans; overlapping tensors share one, named "a = b"."""
    spans: list[tuple[int, int, str]] = []
    for name, tensor in values.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        assert tensor.device.type == "cpu", f"{name} is on {tensor.device}; the emulator takes CPU tensors"
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        size = (last + 1) * tensor.element_size() if tensor.numel() else 0
        spans.append((tensor.data_ptr(), tensor.data_ptr() + size, name))
    merged: list[tuple[int, int, str]] = []
    for start, end, name in sorted(spans):
        if merged and start < merged[-1][1]:
            first, until, names = merged.pop()
            merged.append((first, max(until, end), f"{names} = {name}"))
        else:
            merged.append((start, end, name))
    return {name: (start, end - start) for start, end, name in merged}


@cache
def _entry(kernel: jit.Kernel) -> Any:
    source = (
        f'{kernel.source}extern "C" void emulated_kernel(const void* p) '
        f"{{ {kernel.expression}(*static_cast<const {kernel.params.__name__}*>(p)); }}\n"
    )
    headers = b"".join(reachable_headers(kernel).values())
    device = _device_header().parent
    folders = [f"-I{folder}" for folder in (device, RUNTIME, kernel.path.parent, KERNELS)]
    name = f"{kept.digest(source.encode(), headers, device.name.encode())}.so"
    library = _build(name, source, [*KERNEL_FLAGS, *folders, "-include", "device.h"])
    return ctypes.CDLL(str(library)).emulated_kernel


@cache
def _device_header() -> Path:
    """device.h as a precompiled header, since parsing it takes half of a kernel's compile time."""
    own = (RUNTIME / "device.h", RUNTIME / "device_math.h", RUNTIME / "device_calls.h")
    digest = kept.digest(*(path.read_bytes() for path in own), " ".join(KERNEL_FLAGS).encode(), _compiler_version())
    return _build(f"{digest}/device.h.gch", f'#include "{own[0]}"\n', [*KERNEL_FLAGS, "-x", "c++-header"])


@cache
def _runtime() -> ctypes.CDLL:
    sources = sorted(RUNTIME.glob("*.cpp"))
    content = [path.read_bytes() for path in (*sources, RUNTIME / "runtime.h", RUNTIME / "device_calls.h")]
    text = "".join(f'#include "{path}"\n' for path in sources)
    name = f"{kept.digest(*content, ' '.join(RUNTIME_FLAGS).encode(), _compiler_version())}.so"
    library = _build(name, text, [*RUNTIME_FLAGS, f"-I{RUNTIME}"])
    runtime = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    runtime.emulate_run.restype = ctypes.c_char_p
    runtime.emulate_allocate.restype = ctypes.c_void_p
    runtime.emulate_allocate.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
    return runtime


@cache
def _compiler() -> str:
    compiler = shutil.which("g++")
    assert compiler, "the emulation needs g++"
    return compiler


@cache
def _compiler_version() -> bytes:
    return subprocess.run([_compiler(), "--version"], check=True, capture_output=True).stdout


def _build(name: str, source: str, flags: list[str]) -> Path:
    """Compile `source` to a shared object or, by the flags, to a header, unless an earlier run has."""
    return kept.built(name, lambda target: _compile(source, flags, target))


def _compile(source: str, flags: list[str], target: Path) -> None:
    text, compiled = target.with_name("kernel.cpp"), target.with_name("kernel.o")
    text.write_text(source)
    header = "c++-header" in flags
    commands = [[_compiler(), *flags, "-c", str(text), "-o", str(target if header else compiled)]]
    if not header:  # linked without -fsanitize: the runtime defines its hooks
        commands.append([_compiler(), "-shared", str(compiled), "-o", str(target)])
    for command in commands:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"g++ refused the kernel:\n{done.stderr[:6000]}")
