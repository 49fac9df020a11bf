"""Run-time compilation: Config -> source -> machine code, its cache, and its launch."""

from anybit.errors import KernelError as KernelError
from anybit.jit.cache import cached as cached
from anybit.jit.compile import Compiled as Compiled
from anybit.jit.compile import CompileError as CompileError
from anybit.jit.compile import compile as compile
from anybit.jit.launch import MOST_BLOCKS as MOST_BLOCKS
from anybit.jit.launch import Grid as Grid
from anybit.jit.launch import Launch as Launch
from anybit.jit.launch import launch as launch
from anybit.jit.launch import launcher as launcher
from anybit.jit.params import Float32 as Float32
from anybit.jit.params import Int32 as Int32
from anybit.jit.params import Int64 as Int64
from anybit.jit.params import Params as Params
from anybit.jit.params import Pointer as Pointer
from anybit.jit.params import Slot as Slot
from anybit.jit.plan import Plan as Plan
from anybit.jit.source import Config as Config
from anybit.jit.source import Kernel as Kernel
