"""Shapes and schemes of every table. A product is Y[M, N] = X[M, K] W[N, K]^T."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the tables need no torch
    import torch

TOKENS = (1, 16, 64, 256, 1024, 4096)

LLAMA3_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
"""Linear layers of Llama-3-8B, fused as served: name -> (N, K)."""

LLAMA2_7B = {"qkv": (12288, 4096), "o": (4096, 4096), "gate_up": (22016, 4096), "down": (4096, 11008)}
"""The same for Llama-2-7B."""

QWEN3_14B = {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (34816, 5120), "down": (5120, 17408)}
"""The same for Qwen3-14B."""

MISTRAL_LARGE = {"qkv": (14336, 12288), "o": (12288, 12288), "gate_up": (57344, 12288), "down": (12288, 28672)}
"""The same for Mistral-Large."""

HELD_OUT = {
    "gemma-2-9b": {"qkv": (8192, 3584), "o": (3584, 4096), "gate_up": (28672, 3584), "down": (3584, 14336)},
    "gemma-2-27b": {"qkv": (8192, 4608), "o": (4608, 4096), "gate_up": (73728, 4608), "down": (4608, 36864)},
    "phi-4": {"qkv": (7680, 5120), "o": (5120, 5120), "gate_up": (35840, 5120), "down": (5120, 17920)},
    "qwen3-32b": {"qkv": (10240, 5120), "o": (5120, 8192), "gate_up": (51200, 5120), "down": (5120, 25600)},
    "llama-3-70b": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
    "llama-3-70b/8": {"qkv": (1280, 8192), "o": (8192, 1024), "gate_up": (7168, 8192), "down": (8192, 3584)},
}
"""Layers that no table shows; the last are the shards of one of eight GPUs."""

MODELS = {
    "llama-3-8b": LLAMA3_8B, "llama-2-7b": LLAMA2_7B, "qwen3-14b": QWEN3_14B, "mistral-large": MISTRAL_LARGE,
    **HELD_OUT,
}  # fmt: skip

BITWISE_SCHEMES = ("w1a1", "w1a2", "w2a2", "w3a2", "w3a4", "w4a4", "w2a8")


@dataclass(frozen=True)
class Case:
    """One product: ``name`` is its table or layer."""

    name: str
    m: int
    n: int
    k: int

    @property
    def operations(self) -> int:
        """Multiplications and additions of the product, for any operand widths."""
        return 2 * self.m * self.n * self.k


def _cases(name: str, shapes: list[tuple[int, int, int]]) -> list[Case]:
    return [Case(name, m, n, k) for m, n, k in shapes]


SQUARE = _cases("square", [(s, s, s) for s in (1024, 2048, 4096)])

# APT-LLM's Tables II to IV and the square and Llama-2 tables of its earlier version ("14k" is Llama-3-8B's 14336,
# "10.5k" Llama-2-7B's 11008 rounded by the authors to 10.5 * 1024).
PAPERS = [
    *_cases("apt-llm general, M=64", [(64, s, s) for s in (1024, 2048, 4096)]),
    *_cases("apt-llm prefill", [(64, 1024, 4096), (64, 14336, 4096), (64, 4096, 14336)]),
    *_cases("apt-llm decode", [(1, 1024, 4096), (1, 14336, 4096), (1, 4096, 14336)]),
    *_cases("apt llama-2-7b", [(1024, 4096, 4096), (1024, 10752, 4096), (1024, 4096, 10752)]),
]

LLAMA = [Case(f"llama-3-8b {layer}", m, n, k) for layer, (n, k) in LLAMA3_8B.items() for m in TOKENS]

GEMM = [*SQUARE, *PAPERS, *LLAMA]
"""Every case of the GEMM tables."""


def select(cases: list[Case], only: str | None = None, tokens: tuple[int, ...] | None = None) -> list[Case]:
    """The cases whose name contains ``only`` and whose M is among ``tokens``."""
    return [case for case in cases if (only is None or only in case.name) and (tokens is None or case.m in tokens)]


def random_places(n: int, k: int, device: str = "cuda") -> "torch.Tensor":
    """Random 2 of every 4 inputs that a 2:4 sparse layer [n, k] keeps, as QuantizedWeight stores them."""
    import torch

    from anybit.codes.packing import pack_words

    pairs = torch.tensor([[i, j] for i in range(4) for j in range(i + 1, 4)], dtype=torch.uint8, device=device)
    return pack_words(pairs[torch.randint(0, len(pairs), (n, k // 4), device=device)].view(n, k // 2), 2)
