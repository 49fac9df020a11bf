"""Run-time compilation: Config -> source -> machine code, its cache, and its launch."""

from anybit.jit.compile import Compiled, CompileError, compile
from anybit.jit.params import Float32, Int32, Int64, Pointer, UInt32, UInt64
from anybit.jit.source import Kernel

__all__ = [
    "CompileError",
    "Compiled",
    "Float32",
    "Int32",
    "Int64",
    "Kernel",
    "Pointer",
    "UInt32",
    "UInt64",
    "compile",
]
