"""The contents of maps: layers of eleven models, schemes and token counts."""

import itertools

from anybit.choose.space import GRID
from anybit.kernels.linear_problem import LinearProblem
from anybit.scheme import Scheme

# Linear layers as served, projections with the same input fused: (N, K). Most used first.
MODELS: dict[str, tuple[tuple[int, int], ...]] = {
    "Llama-3-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "Qwen3-8B": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
    "Llama-2-7B": ((12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)),
    "Qwen2.5-7B": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
    "Qwen3-14B": ((7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408)),
    "Qwen3-32B": ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)),
    "Llama-3-70B": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "OPT-6.7B": ((4096, 4096), (16384, 4096), (4096, 16384)),
    "BLOOM-7B": ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384)),
    "SmolLM2-135M": ((960, 576), (576, 576), (3072, 576), (576, 1536)),
    "SmolLM2-1.7B": ((6144, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
}

SCHEMES = ("w4a16g128", "w4a8", "w2a4", "w4a4", "w2a2", "w8a8", "w2a8", "w2a16g128", "w3a16g128")
"""Schemes that a map may have, in measuring order; the shipped one lacks the last two."""
CHECKED = SCHEMES[:5]
"""Measured at all of ``MAPPED``, others at powers of two and halfway between."""
MAPPED = tuple(m for m in GRID if m <= 1024 or m % 3 == 0 or m.bit_count() == 1)
"""Token counts of a map: above 1024 without quarters, which take long and where tiles fill most waves anyway."""


def rank_of(tokens: int) -> int:
    """0 for a power of two, 1 for a count halfway between two, 2 for a quarter of the way."""
    return 0 if tokens.bit_count() == 1 else 1 if tokens % 3 == 0 and tokens.bit_count() == 2 else 2


def parts(
    models: list[str], schemes: list[str], tokens: tuple[int, ...], each: int
) -> list[tuple[list[LinearProblem], int]]:
    """Problems in measuring order, in case time runs out, each part with its number of candidates per family.

    First powers of two, then halfway counts, then quarters, of all layers for the schemes of ``CHECKED``; then the
    first two for other schemes. Powers of two of ``CHECKED`` get all candidates: they are the hints of what follows.
    """
    shapes = dict.fromkeys(shape for model in models for shape in MODELS[model])
    found = []
    for ranks, several in ((range(3), CHECKED), (range(2), SCHEMES[len(CHECKED) :])):
        for rank, scheme in itertools.product(ranks, (scheme for scheme in several if scheme in schemes)):
            s, counts = Scheme.parse(scheme), [m for m in tokens if rank_of(m) == rank]
            products = [LinearProblem(m, n, k, s.weights, s.activations) for n, k in shapes for m in counts]
            found.append((products, each if scheme in CHECKED and rank == 0 else max(each - 2, 0)))
    return [(products, count) for products, count in found if products]
