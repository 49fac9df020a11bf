"""Compile a Kernel to machine code with NVRTC. Needs no GPU."""

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
from anybit.jit.params import KERNELS
from anybit.jit.source import Kernel

FLAGS: dict[str, Any] = {
    "std": "c++17",
    "device_as_default_execution_space": True,  # lambdas and constexpr functions are device functions
    "lineinfo": True,
    "ptxas_options": ["-v"],
    "disable_warnings": True,
}
"""Compiler options besides architecture and include folders; part of the cache key."""

_importing = threading.Lock()
"""Threads that import cuda.core concurrently for the first time can see it half initialized."""

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class Compiled:
    """The machine code of one kernel, and ptxas' resource figures.

    entry: the kernel's mangled name in the cubin.  registers: per thread.  spill_bytes: spill stores plus spill loads
    per thread.  stack_bytes: stack frame (local memory) per thread: spills, and arrays indexed at run time.
    static_shared_bytes: static shared memory per block.  seconds: compile time.
    """

    cubin: bytes
    arch: str
    entry: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    seconds: float


class CompileError(KernelError):
    """A kernel does not compile; the message has its config, the first errors and the path of its source."""


def compile(kernel: Kernel, arch: str) -> Compiled:
    """Compile `kernel` for `arch`, such as "sm_80" or "sm_90a".

    Raises CompileError, or KernelError if NVRTC (the extra anybit[cuda]) is not installed.
    """
    try:
        with _importing:
            from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise KernelError(f"compiling a kernel needs NVRTC: pip install 'anybit[cuda]' ({error})") from error
    log, start = io.StringIO(), time.perf_counter()
    folders = dict.fromkeys([kernel.path.parent, KERNELS, *cuda_headers()])
    options = ProgramOptions(arch=arch, name=f"{kernel.entry}.cu", include_path=[*map(str, folders)], **FLAGS)
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
        raise KernelError(f"the assembler's log does not mention {entry}; is -v still in FLAGS? {log[:400]!r}")
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


@cache
def cuda_headers() -> tuple[Path, ...]:
    """CUDA's header folder. anybit's kernels do not use it; a user's kernels may."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        found = find_nvidia_header_directory("cudart")
    except (ImportError, RuntimeError):
        found = None
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    return (Path(found),) if found else (home,) if home.is_dir() else ()


def reachable_headers(kernel: Kernel) -> dict[str, bytes]:
    """Contents of all headers that the kernel includes, directly or not, except CUDA's; sorted by name.

    Raises FileNotFoundError for a quoted header that neither the folders nor CUDA have.
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
    """The includes of a header, cached by content: thousands of kernels share the same few headers."""
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
