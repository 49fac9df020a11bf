"""Quantize-and-pack: 16-bit activations to codes, in one pass. Host side of quantize_activations.cuh."""

import functools
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anybit import jit
from anybit.codes.hadamard import factor
from anybit.device import Device
from anybit.errors import KernelError, dtype_name
from anybit.jit import Launch, Pointer, Slot
from anybit.kernels.bitplane import bitplane_layout
from anybit.kernels.block import hadamard
from anybit.kernels.common.types import Code
from anybit.scheme import ActivationFormat

VECTOR = 8
LEAST_THREADS = 128
MOST_VECTORS = 16
MOST_THREADS = 1024
_REDUCTION_BYTES = 4 * 128
_SHARED = 128
"""Token count above which SMs run two blocks, which hide each other's latency."""


class Source(Enum):
    """The fused prologue: none, RMSNorm, or SiLU(gate) * up."""

    plain = "plain"
    rms_norm = "rms_norm"
    silu_mul = "silu_mul"


class Target(Enum):
    """The output layout: bit planes, or one byte per value."""

    planes = "planes"
    bytes = "bytes"


@dataclass(frozen=True)
class Problem:
    """Activations [m, k] in ``dtype`` -> codes in ``format``. aligned: rows are 16-byte aligned, and k % 8 == 0.

    rotated: apply the Hadamard transform (``kernels.block.hadamard``) before quantization, in the shared memory
    of ``device``; None: of one with enough.
    """

    m: int
    k: int
    format: ActivationFormat
    dtype: torch.dtype = torch.float16
    source: Source = Source.plain
    target: Target = Target.planes
    aligned: bool = True
    rotated: bool = False
    device: Device | None = None


@dataclass(frozen=True)
class Config:
    """A kernel config. threads: per token, each with ``vectors`` of 8 values; the rest follows from the problem.

    order, power: of the Hadamard transform (``anybit.codes.hadamard.factor``); 0 and 1 without one.
    """

    threads: int
    vectors: int
    source: Source
    target: Target
    code: Code
    bits: int
    is_bf16: bool
    aligned: bool
    order: int = 0
    power: int = 1


class Params(jit.Params, header="block/quantize_activations.cuh"):
    """The arguments of one launch."""

    factor = 0.0
    signs = None


class Packed:
    """Quantized activations, ``x = scale * (u - zero)``, in one allocation: codes, then per token scale, sum and zero.

    Kernels take the addresses; ``codes``, ``scale``, ``sum`` and ``zero`` are tensor views of the same memory.
    """

    __slots__ = ("_offsets", "buffer", "format", "k", "m", "target")

    def __init__(self, m: int, k: int, format: ActivationFormat, target: Target, device: torch.device) -> None:
        self.m, self.k, self.format, self.target = m, k, format, target
        self._offsets = offsets(m, k, format, target)
        self.buffer = torch.empty(self._offsets[-1], dtype=torch.uint8, device=device)

    @property
    def pointers(self) -> "Codes":
        """What kernels read and write."""
        return Codes(self.codes, self.scale, self.sum, self.zero)

    @property
    def codes(self) -> Tensor:
        """Bit planes (``bitplane_layout.pack``), or bytes [m, pitch]: int8 code - 2^(bits-1), or float8_e4m3fn."""
        part = self.buffer[: self._offsets[1]]
        if self.target is Target.planes:
            return part.view(bitplane_layout.chunks(self.k), self.format.bits, -1, bitplane_layout.ROW_BYTES)
        dtype = torch.int8 if self.format.integer else torch.float8_e4m3fn
        return part[: self.m * pitch(self.k)].view(dtype).view(self.m, -1)

    @property
    def scale(self) -> Tensor:
        """float32 [m]."""
        return self._words(1, torch.float32)

    @property
    def sum(self) -> Tensor | None:
        """int32 [m], the sum of each token's ``codes``; None for e4m3."""
        return self._words(2, torch.int32) if self.format.integer else None

    @property
    def zero(self) -> Tensor | None:
        """int32 [m] for asym (minus 2^(bits-1) for bytes), else None."""
        return self._words(3, torch.int32) if self.format.code == "asym" else None

    def _words(self, part: int, dtype: torch.dtype) -> Tensor:
        start = self._offsets[part]
        return self.buffer[start : start + 4 * self.m].view(dtype)


class Codes(NamedTuple):
    """Pointers to quantized activations (``Packed``)."""

    codes: Pointer
    scale: Pointer
    sum: Pointer
    zero: Pointer


def offsets(m: int, k: int, format: ActivationFormat, target: Target) -> tuple[int, int, int, int, int]:
    """Where codes, scales, sums and zeros begin in the allocation of ``Packed``, and its size, in bytes."""
    codes = bitplane_layout.size(m, k, format.bits) if target is Target.planes else m * pitch(k)
    codes, words = -(-codes // 128) * 128, -(-m // 32) * 128
    return 0, codes, codes + words, codes + 2 * words, codes + 3 * words


def codes_at(room: Slot, m: int, k: int, format: ActivationFormat, target: Target) -> Codes:
    """Slots of quantized activations in scratch memory of a plan."""
    at = [replace(room, offset=room.offset + offset) for offset in offsets(m, k, format, target)[:4]]
    return Codes(at[0], at[1], at[2] if format.integer else None, at[3] if format.code == "asym" else None)


def why_not(problem: Problem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot run ``problem``, in a sentence; None if it can."""
    form = problem.format
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"activations must be float16 or bfloat16, not {dtype_name(problem.dtype)}"
    if not form.quantized:
        return "16-bit activations need no quantization"
    if problem.target is Target.planes and not form.integer:
        return "bit planes hold integer codes, not e4m3"
    if problem.rotated and (reason := _unrotatable(problem)) is not None:
        return reason
    if problem.m < 1 or problem.k < 1:
        return f"activations of shape {problem.m} x {problem.k} are empty: there is nothing to quantize"
    if _width(problem) > MOST_THREADS * MOST_VECTORS * VECTOR:
        return f"K = {problem.k} is more than one block holds ({MOST_THREADS * MOST_VECTORS * VECTOR})"
    if config is None:
        return None
    if config.threads % LEAST_THREADS or not LEAST_THREADS <= config.threads <= MOST_THREADS:
        return f"threads must be a multiple of 128, from 128 to {MOST_THREADS}, not {config.threads}"
    if config.threads * config.vectors * VECTOR < _width(problem):
        return (
            f"{config.threads} threads of {config.vectors} vectors hold {config.threads * config.vectors * VECTOR} "
            f"values, and a row has {_width(problem)}"
        )
    if config.vectors > MOST_VECTORS:
        return f"{config.vectors} vectors per thread are more than registers hold ({MOST_VECTORS})"
    if config.aligned and not problem.aligned:
        return "this config loads 16 bytes at a time, and rows are not 16-byte aligned or K is not a multiple of 8"
    return None


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory: partial results of the block's reductions, and the rotated vector."""
    return _REDUCTION_BYTES + hadamard.shared_bytes(config.order, config.power)


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """A block per token."""
    return (problem.m, 1, 1)


def configs(problem: Problem) -> list[Config]:
    """Every config worth trying: for each number of vectors, the threads that the row needs.

    Threads are a power of two, so that many widths share a compiled kernel.
    """
    found = []
    for vectors in (1, 2, 4, 8, 16):
        threads = 1 << max(7, (-(-_width(problem) // (vectors * VECTOR)) - 1).bit_length())
        config = _config(problem, threads, vectors)
        if why_not(problem, config) is None:
            found.append(config)
    return found


@functools.cache
def default(problem: Problem) -> Config:
    """The config, as measured on an H200: 4 vectors per thread; in long rows more threads for few tokens, more vectors
    for many. Raises KernelError with the reason if no kernel quantizes such rows.
    """
    if (reason := why_not(problem)) is not None:
        raise KernelError(f"no quantize-and-pack kernel: {reason}")
    width, in_bytes = _width(problem), problem.target is Target.bytes
    normed, gated = problem.source is Source.rms_norm, problem.source is Source.silu_mul
    if problem.rotated:  # with few tokens, more threads hide the latency of shared memory
        few = 1 if problem.m <= 256 else 4 if width <= 8192 else 2
        return min(configs(problem), key=lambda config: (abs(config.vectors - few), config.vectors))
    if problem.m > 256:
        wanted = 4 if width <= 4096 or (gated and in_bytes) else 8
    elif in_bytes and normed and width <= 4096:
        wanted = 1 if problem.m > _SHARED else 2
    elif in_bytes and gated and problem.m > _SHARED:
        wanted = 4
    else:
        wanted = 4 if width <= 8192 else 2
    return min(configs(problem), key=lambda config: (abs(config.vectors - wanted), -config.vectors))


def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    header, size = "block/quantize_activations.cuh", shared_bytes(config)
    return jit.Kernel(header, "quantize", config, Params, config.threads, size)


def problem_of(
    x: Tensor, format: ActivationFormat, target: Target = Target.planes, source: Source = Source.plain,
    rotated: bool = False,
) -> Problem:  # fmt: skip
    """The problem for x, float16 or bfloat16 [m, k], or [m, 2k] (gate, up) for silu_mul."""
    m, k = x.shape
    k = k // 2 if source is Source.silu_mul else k
    aligned = k % VECTOR == 0 and rows_aligned(x)
    device = Device.of(x) if rotated and x.is_cuda else None
    return Problem(m, k, format, x.dtype, source, target, aligned, rotated, device)


def launch(problem: Problem, config: Config, packed: Packed, x: Tensor, *, pdl: bool = True, **more: Any) -> None:
    """Launch on the current stream of x's device; codes go to ``packed``. more: of ``made``. The caller
    (``anybit.ops``) checks shapes and dtypes.
    """
    one = made(problem, config, packed.pointers, x, x.stride(0), x.device, **more)
    jit.launch(one.kernel, one.params, one.grid, pdl=pdl, device=x.get_device())


def made(
    problem: Problem, config: Config, codes: Codes, x: Pointer, x_stride: int, device: torch.device, *,
    gamma: Pointer = None, epsilon: float = 0.0, residual: Pointer = None, residual_sum: Pointer = None,
) -> Launch:  # fmt: skip
    """A launch, unchecked. x_stride: values between rows of x.  device: where the constants of a rotation lie.  gamma:
    [k], residual and residual_sum: [m, k], dense, in x's dtype, of ``Source.rms_norm``.
    """
    p, in_planes = problem, problem.target is Target.planes
    params = Params(
        x, residual, residual_sum, gamma, *codes,
        x_stride, 0 if residual is None else p.k,
        p.k, _width(p), bitplane_layout.padded_rows(p.m) if in_planes else p.m,
        epsilon, float(p.k) ** -0.5, hadamard.signs(config.order, device) if config.order else None,
    )  # fmt: skip
    return Launch(kernel(config), params, grid(p, config), pdl=True)


def _config(problem: Problem, threads: int, vectors: int) -> Config:
    p = problem
    code, bf16 = Code(p.format.code), p.dtype == torch.bfloat16
    rotation = factor(p.k) if p.rotated else (0, 1)
    return Config(threads, vectors, p.source, p.target, code, p.format.bits, bf16, p.aligned, *rotation)


def _unrotatable(problem: Problem) -> str | None:
    """Why rows cannot be rotated in this kernel, in a sentence; None if they can."""
    reason = hadamard.why_not(hadamard.Problem(problem.m, problem.k, problem.dtype))
    if reason is None and factor(problem.k)[1] % VECTOR:
        return f"the power-of-two factor of K = {problem.k} is {factor(problem.k)[1]}, less than a vector of {VECTOR}"
    if reason is None and problem.device is not None:
        return problem.device.why_not_shared(_REDUCTION_BYTES + hadamard.shared_bytes(*factor(problem.k)))
    return reason


def _width(problem: Problem) -> int:
    """Values per row as written: planes are padded to whole chunks, bytes to the pitch."""
    if problem.target is Target.planes:
        return bitplane_layout.chunks(problem.k) * bitplane_layout.CHUNK
    return pitch(problem.k)


_ROW_START = 16
"""Row alignment in bytes for vector, bulk and TMA loads."""


def pitch(columns: int, element_bytes: int = 1) -> int:
    """Row stride in values for ``columns`` values, such that rows are 16-byte aligned."""
    return -(-columns * element_bytes // _ROW_START) * _ROW_START // element_bytes


def rows_aligned(x: Tensor) -> bool:
    """Whether every row of a matrix is 16-byte aligned."""
    return not (x.data_ptr() % _ROW_START or x.stride()[0] * x.itemsize % _ROW_START)  # hot: asked at every call
