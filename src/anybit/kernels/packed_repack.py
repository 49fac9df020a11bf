"""Dense codes of a checkpoint -> the code words of packed tiles, on the GPU. Host side of packed_repack.cuh."""

import functools
from dataclasses import dataclass

from torch import Tensor

from anybit import jit
from anybit.jit import Int32, Pointer

_THREADS = 128


@dataclass(frozen=True)
class Config:
    """Width of the codes; bytes: for 8-bit activations (order "a8")."""

    bits: int
    bytes: bool


@dataclass(frozen=True)
class Params:
    """Arguments of one launch; see packed_repack.cuh."""

    words: Pointer
    permutation: Pointer
    tiles: Pointer
    n: Int32
    k: Int32
    row_words: Int32
    row_tiles: Int32
    unit_bytes: Int32


@functools.cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return jit.Kernel("packed_repack.cuh", "packed_repack", config, Params, _THREADS, 64 * (128 + 4))


def arguments(words: Tensor, permutation: Tensor | None, tiles: Tensor, n: int, k: int) -> Params:
    """The Params of a launch: words int32 [n, ...] -> tiles uint8 [column blocks, row tiles, bytes of a tile]."""
    return Params(words, permutation, tiles, n, k, words.shape[1], tiles.shape[1], tiles.shape[2] // 4)


def launch(words: Tensor, permutation: Tensor | None, tiles: Tensor, n: int, k: int, config: Config) -> None:
    """Write the codes into ``tiles``; scales and zeros, which lie between them, stay as they are."""
    grid = (tiles.shape[1], tiles.shape[0], 1)
    jit.launch(kernel(config), arguments(words, permutation, tiles, n, k), grid, device=words.get_device())
