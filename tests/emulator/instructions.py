"""Every function of ptx.cuh with its inputs: the cases of test_ptx_gpu.py and of the emulator's own tests."""

from dataclasses import dataclass
from pathlib import Path

import torch

from anybit.jit import Kernel, Pointer


@dataclass(frozen=True)
class Config:
    n: int = 8
    swizzle: int = 1
    type: int = 0  # 0 integers and bits, 1 f16, 2 bf16, 3 e4m3


@dataclass(frozen=True)
class Params:
    x: Pointer
    y: Pointer
    z: Pointer


@dataclass(frozen=True)
class Case:
    """One kernel of instructions.cuh; results may differ by `tolerance` of the largest (0: exact)."""

    entry: str
    threads: int
    results: int  # words per thread of a block
    tolerance: float = 0
    config: Config = Config()
    cluster: int = 1

    def __str__(self) -> str:
        return f"{self.entry}-{self.config.n}-{self.config.swizzle}-{self.config.type}"

    @property
    def kernel(self) -> Kernel:
        header = str(Path(__file__).with_suffix(".cuh"))
        return Kernel(header, self.entry, self.config, Params, self.threads, 64 << 10, self.cluster)

    def inputs(self) -> Params:
        """Input words, poisoned output words, and zeros to share."""
        g = torch.Generator().manual_seed(1)
        words = torch.randint(-(2**31), 2**31, (16384,), generator=g).to(torch.int32)
        if self.entry == "mma_floats":
            words = torch.cat([*(floats(type_, 256, g) for type_ in (1, 2)), words])
        if self.entry.startswith("wgmma") and self.config.type:
            words = floats(self.config.type, 16384, g)
        if self.entry.startswith("approximate"):
            words = (torch.rand(128, generator=g) * 8).view(torch.int32)
        y = torch.full((self.cluster, self.results * self.threads), -1, dtype=torch.int32)
        return Params(words, y, torch.zeros(1024, dtype=torch.int32))


def floats(type_: int, words: int, g: torch.Generator) -> torch.Tensor:
    """Random numbers of one type, packed into int32 words."""
    dtype = {1: torch.float16, 2: torch.bfloat16, 3: torch.float8_e4m3fn}[type_]
    return torch.randn(words * 4 // dtype.itemsize, generator=g).to(dtype).view(torch.int32)


def wgmma(n: int, swizzle: int, type_: int) -> Case:
    # Hopper accumulates e4m3 products in about 14 bits
    tolerance = (0, 1e-5, 1e-5, 1e-3)[type_]
    products = 6 if type_ == 0 and n <= 128 else 2
    return Case("wgmma", 128, products * (n // 2), tolerance, Config(n, swizzle, type_))


def wgmma_sparse(n: int, type_: int) -> Case:
    return Case("wgmma_sparse", 128, n // 2, (0, 1e-5, 1e-5)[type_], Config(n, 1, type_))


CASES = [
    Case("fragments", 32, 15),
    Case("mma_integers", 32, 32),
    Case("mma_floats", 32, 24, 1e-5),
    *(wgmma(n, swizzle, 0) for n, swizzle in ((8, 1), (16, 2), (24, 3), (32, 0), (64, 1), (96, 2), (256, 1))),
    *(wgmma(n, swizzle, type_) for type_ in (1, 2, 3) for n, swizzle in ((8, 0), (48, 2), (128, 1))),
    *(wgmma_sparse(n, type_) for type_ in (0, 1, 2) for n in (16, 128, 256)),
    Case("exact_arithmetic", 128, 47),
    Case("approximate_functions", 128, 4, 2e-6),
    Case("warps", 64, 12),
    Case("global_memory", 64, 16),
    Case("copies", 64, 20),
    Case("clusters", 64, 16, cluster=2),
    Case("registers", 256, 1),
]
