"""Run-time compilation: Config -> source -> machine code, its cache, and its launch."""

from anybit.errors import KernelError
from anybit.jit.cache import cached
from anybit.jit.compile import Compiled, CompileError, compile
from anybit.jit.launch import MOST_BLOCKS, Launcher, Recorded, cached_launch, kernels_of, launch, load, record, watched
from anybit.jit.params import Float32, Int32, Int64, Pointer, UInt32, UInt64
from anybit.jit.source import Kernel

__all__ = [
    "MOST_BLOCKS",
    "CompileError",
    "Compiled",
    "Float32",
    "Int32",
    "Int64",
    "Kernel",
    "KernelError",
    "Launcher",
    "Pointer",
    "Recorded",
    "UInt32",
    "UInt64",
    "cached",
    "cached_launch",
    "compile",
    "kernels_of",
    "launch",
    "load",
    "record",
    "watched",
]
