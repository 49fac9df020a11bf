"""Kernel -> machine code. Takes no tensor and needs no GPU."""

import io
import os
import re
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from anybit.errors import KernelError
from anybit.jit.source import KERNELS, Kernel

FLAGS: dict[str, Any] = {
    "std": "c++17",
    "device_as_default_execution_space": True,  # lambdas and constexpr functions are device functions
    "lineinfo": True,
    "ptxas_options": ["-v"],
    "disable_warnings": True,
}
"""The compiler's options besides architecture and folders; part of the cache key."""

_importing = threading.Lock()
"""Threads that import cuda.core together for the first time find it half made."""

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class Compiled:
    """The machine code of one kernel, and what the assembler said about it."""

    cubin: bytes
    arch: str
    entry: str
    """The mangled name of the kernel in the cubin."""
    registers: int
    """A thread's registers."""
    spill_bytes: int
    """Stores plus loads of spilled registers, in the code of one thread."""
    stack_bytes: int
    """A thread's local memory: spills, and arrays that are indexed at run time."""
    static_shared_bytes: int
    """Shared memory besides the launch's dynamic bytes."""
    seconds: float
    """The time that the compiler took."""


class CompileError(KernelError):
    """The compiler refused a kernel; the message holds the config, the first errors and where the source is kept."""


def compile(kernel: Kernel, arch: str) -> Compiled:
    """Compile `kernel` for `arch`, such as "sm_80" or "sm_90a".

    Raises CompileError, and KernelError where no compiler (the extra anybit[cuda]) is installed.
    """
    try:
        with _importing:
            from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise KernelError(f"compiling a kernel needs NVRTC: pip install 'anybit[cuda]' ({error})") from error
    log, start = io.StringIO(), time.perf_counter()
    options = ProgramOptions(
        arch=arch, name=f"{kernel.entry}.cu", include_path=[str(p) for p in include_folders(kernel)], **FLAGS
    )
    try:
        program = Program(kernel.source, "c++", options)
        code = program.compile("cubin", name_expressions=[kernel.expression], logs=log)
    except Exception as error:
        raise CompileError(_refusal(kernel, arch, str(error))) from None
    entry = code.symbol_mapping[kernel.expression]
    entry = entry.decode() if isinstance(entry, bytes) else entry
    return Compiled(
        cubin=bytes(code.code),
        arch=arch,
        entry=entry,
        seconds=time.perf_counter() - start,
        **assembler_figures(log.getvalue(), entry),
    )


def assembler_figures(log: str, entry: str) -> dict[str, int]:
    """Registers, spills, stack and static shared memory of one entry, from the log of `ptxas -v`."""
    _, _, about = log.partition(f"Compiling entry function '{entry}'")
    if not about:
        raise KernelError(f"the assembler's log does not speak of {entry}; is -v still among the flags? {log[:400]!r}")
    about = about.partition("Compiling entry function")[0]

    def figure(pattern: str) -> int:
        match = re.search(pattern, about)
        return int(match.group(1)) if match else 0

    return {
        "registers": figure(r"Used (\d+) registers"),
        "spill_bytes": figure(r"(\d+) bytes spill stores") + figure(r"(\d+) bytes spill loads"),
        "stack_bytes": figure(r"(\d+) bytes stack frame"),
        "static_shared_bytes": figure(r"(\d+) bytes smem"),
    }


def include_folders(kernel: Kernel) -> list[Path]:
    """Where headers are looked for: beside the kernel's own, the package's, CUDA's (where it is installed)."""
    return list(dict.fromkeys([kernel.path.parent, KERNELS, *cuda_headers()]))


@cache
def cuda_headers() -> tuple[Path, ...]:
    """CUDA's own headers. anybit's kernels include none of them; a kernel of one's own may."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        found = find_nvidia_header_directory("cudart")
    except (ImportError, RuntimeError):
        found = None
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    return (Path(found),) if found else (home,) if home.is_dir() else ()


def reachable_headers(kernel: Kernel) -> dict[str, bytes]:
    """The content of every header that the kernel may include, directly or not, CUDA's excepted; sorted by name.

    Raises FileNotFoundError for a quoted header that is in no folder and not CUDA's either.
    """
    folders = [kernel.path.parent, KERNELS]
    found: dict[str, bytes] = {}
    todo = [('"', kernel.include)]
    while todo:
        quote, name = todo.pop()
        if name in found:
            continue
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None:
            if quote == "<" or any((folder / name).is_file() for folder in cuda_headers()):
                continue  # the compiler's, or CUDA's
            raise FileNotFoundError(f"the kernel header {name} does not exist in {', '.join(map(str, folders))}")
        found[name] = path.read_bytes()
        todo += _included(found[name])
    return dict(sorted(found.items()))


@lru_cache(maxsize=256)
def _included(content: bytes) -> tuple[tuple[str, str], ...]:
    """What a header includes; kept by its content, since thousands of kernels are named after the same few."""
    return tuple(_INCLUDE.findall(content.decode()))


def _refusal(kernel: Kernel, arch: str, log: str) -> str:
    lines = log.splitlines()
    first = next((i for i, line in enumerate(lines) if "error" in line and "NVRTC_ERROR" not in line), 0)
    shown = "\n".join(lines[first : first + 20])
    try:
        with tempfile.NamedTemporaryFile("w", prefix=f"anybit-{kernel.entry}-", suffix=".cu", delete=False) as file:
            file.write(kernel.source)
        kept = f"its source is kept in {file.name}"
    except OSError as error:
        kept = f"its source could not be kept ({error})"
    return f"{kernel.header} does not compile for {arch} with {kernel.config}; {kept}; the compiler said\n{shown}"
