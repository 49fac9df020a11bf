"""Run-time compilation: Config -> source -> machine code, its cache, and its launch."""

from anybit.errors import KernelError
from anybit.jit.cache import cached
from anybit.jit.compile import Compiled, CompileError, compile
from anybit.jit.launch import MOST_BLOCKS, Grid, Launch, Launcher, launch, launcher
from anybit.jit.params import Float32, Int32, Int64, Pointer, Slot, UInt32, UInt64
from anybit.jit.plan import Plan
from anybit.jit.source import Config, Kernel

__all__ = [
    "MOST_BLOCKS",
    "CompileError",
    "Compiled",
    "Config",
    "Float32",
    "Grid",
    "Int32",
    "Int64",
    "Kernel",
    "KernelError",
    "Launch",
    "Launcher",
    "Plan",
    "Pointer",
    "Slot",
    "UInt32",
    "UInt64",
    "cached",
    "compile",
    "launch",
    "launcher",
]
