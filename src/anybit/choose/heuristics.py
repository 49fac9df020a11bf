"""Built-in choices across kernels: which kernel takes few tokens, and how blocks share an SM."""

from dataclasses import replace
from typing import Any

from anybit.device import Device
from anybit.kernels.gemm_kernel import GemmKernel
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.kernels.packed.sm90_skinny_f16 import sm90_packed_skinny_f16

_UNIT_ROWS = 16
_LEAST_AMONG_SMALL = 9
_MANY_UNITS = 7
_TRIGGERS = {4: 1, 2: 0}
"""When gate_up of a fused layer triggers the next kernel (PDL; ``sm90_packed_gemv.Config``), by bits, if measured."""

_SPARSE_TOKENS = 4
"""Most tokens with 2:4 sparse weights for ``sm90_packed_gemv``; ``sm90_packed_gemm`` takes more."""
_MODULES: dict[str, GemmKernel[Any]] = {
    "gemv": sm90_packed_gemv,
    "skinny": sm90_packed_skinny,
    "skinny_f16": sm90_packed_skinny_f16,
}
_ANY = 1 << 30
_Rows = tuple[tuple[int, int, str], ...]
_INT8: dict[int, _Rows] = {
    2: ((2, 2047, "skinny 8"), (3, _ANY, "skinny 4"), (_ANY, _ANY, "skinny 2")),
    3: ((2, 2047, "skinny 8"), (3, _ANY, "skinny 4"), (4, _ANY, "skinny 2"), (_ANY, _ANY, "skinny 4")),
    8: ((2, 2047, "skinny 8"), (3, _ANY, "skinny 6"), (4, _ANY, "skinny 2"), (_ANY, _ANY, "skinny 4")),
}
"""By weight bits (upper bounds), rows of (most units of 16 rows per SM, most columns, kernels with the most tokens that
each takes). The first matching row decides; sm90_packed_gemm takes more tokens.
Measured on an H200: docs/notes/2026-11-24-packed.md."""
_SIXTEEN_BITS: dict[int, _Rows] = {
    3: (
        (1, 8192, "gemv 2, skinny_f16 8"),
        (2, 2047, "gemv 2, skinny_f16 8"),
        (2, 8192, "gemv 2, skinny_f16 4"),
        (3, 8192, "gemv 2, skinny_f16 8"),
        (4, 8192, "gemv 4, skinny_f16 8"),
        (_ANY, 8192, "gemv 4"),
        (_ANY, _ANY, "gemv 2"),
    ),
    4: (
        (1, 1023, "gemv 1, skinny 8"),
        (2, 2047, "gemv 2, skinny 8"),
        (1, 8191, "gemv 1, skinny_f16 8"),
        (1, 8192, "skinny_f16 8"),
        (1, _ANY, "skinny_f16 6"),
        (2, 8192, "gemv 2, skinny_f16 6"),
        (2, 12287, "gemv 2, skinny_f16 4"),
        (2, _ANY, "gemv 2, skinny_f16 6"),
        (3, 5119, "gemv 2, skinny_f16 8"),
        (3, 8192, "gemv 1, skinny 2, skinny_f16 8"),
        (3, _ANY, "skinny 1, gemv 2, skinny 4"),
        (4, 4096, "gemv 4, skinny_f16 6"),
        (4, 8191, "skinny 1, gemv 4, skinny_f16 6"),
        (4, 8192, "gemv 4, skinny_f16 6"),
        (12, 8192, "gemv 4"),
        (15, 8192, "gemv 2, skinny_f16 4"),
        (_ANY, 8192, "gemv 2, skinny_f16 8"),
        (_ANY, _ANY, "gemv 4, skinny_f16 8"),
    ),
    8: (
        (1, 8192, "gemv 2, skinny_f16 8"),
        (2, 2047, "gemv 2, skinny_f16 8"),
        (2, 8192, "gemv 2, skinny_f16 4"),
        (4, 8192, "gemv 2, skinny_f16 8"),
        (_ANY, 8192, "gemv 2, skinny_f16 4"),
        (_ANY, _ANY, "gemv 2, skinny_f16 6"),
    ),
}
_TABLES: _Rows = (
    (3, 8192, "skinny_f16 8"),
    (2, _ANY, "skinny 2, skinny_f16 4"),
    (_ANY, _ANY, "gemv 2, skinny 2, skinny_f16 8"),
)
"""For 4-bit codes with table lookup: docs/notes/2026-11-24-formats.md."""


def kernel(problem: LinearProblem) -> GemmKernel[Any] | None:
    """The kernel for few tokens; None if none of them runs, or sm90_packed_gemm is faster."""
    p = problem
    if p.weights.sparse:  # from five tokens on sm90_packed_gemm
        few = p.m <= _SPARSE_TOKENS and sm90_packed_gemv.why_not(problem) is None
        return sm90_packed_gemv if few else None
    units = -(-p.n // (_UNIT_ROWS * p.device.sms))
    table = _INT8 if p.activations.quantized else _SIXTEEN_BITS
    rows = next(rows for bits, rows in table.items() if p.weights.bits <= bits)
    if p.weights.code in ("nf4", "iq4"):
        rows = _TABLES
    kernels = next(kernels for most, columns, kernels in rows if units <= most and p.tile_columns <= columns)
    choices = [(_MODULES[name], int(tokens)) for name, tokens in (words.split() for words in kernels.split(", "))]
    # Table codes that gemv does not take run on the next choice, or on skinny_f16.
    choices.append((sm90_packed_skinny_f16, choices[-1][1]))
    # gemv runs e4m3, but was not timed with it.
    untimed = sm90_packed_gemv if p.weights.code == "e4m3" else None
    fitting = (
        module
        for module, tokens in choices
        if p.m <= tokens and module is not untimed and module.why_not(problem) is None
    )
    return next(fitting, None)


def limit_occupancy(config: Any, device: Device) -> Any:
    """Pad a config's shared memory so that two of its blocks never share an SM; other kernels' configs are unchanged.

    With PDL blocks are placed while the previous kernel drains: the SMs that free up first would take two blocks of a
    small layer, others none, and later kernels fare no better. Products with several chunks are unchanged: their
    pipelines fit beside the previous layer's.

    With one or two tokens of 16-bit activations there are no small kernels between a fused layer's GEMVs, and blocks of
    two GEMVs share an SM: such configs are padded so that two blocks fit but not three, and so are skinny_f16's. A GEMV
    whose activations are not all resident (down) keeps one block per SM. Measurements:
    docs/notes/2026-11-23-generation.md.
    """
    for module, chunks in (
        (sm90_packed_gemv, "chunks"),
        (sm90_packed_skinny, "row_chunks"),
        (sm90_packed_skinny_f16, "chunks"),
    ):
        if isinstance(config, module.Config):
            fused = module is sm90_packed_gemv and config.tile_m <= sm90_packed_gemv.NORM_TOKENS and config.x_resident
            pairs = fused or module is sm90_packed_skinny_f16
            least = _pair_bytes(device) if pairs else device.shared_bytes // 2
            alone = getattr(config, chunks) == 1 and module.shared_bytes(config) < least
            return replace(config, min_shared_bytes=least) if alone else config
    return config


def limit_occupancy_normed(config: sm90_packed_gemv.Config, device: Device) -> sm90_packed_gemv.Config:
    """``limit_occupancy`` for a GEMV that normalizes its activations (qkv and gate_up): one block per SM.

    gate_up of one token also gets its PDL trigger (``_TRIGGERS``).
    """
    least = device.shared_bytes // 2
    config = replace(config, min_shared_bytes=least) if sm90_packed_gemv.shared_bytes(config) < least else config
    if config.tile_m == 1 and config.stage_units * config.chunks >= _MANY_UNITS:
        config = replace(config, trigger=_TRIGGERS.get(config.bits, config.trigger))
    return config


def among_small(problem: LinearProblem, config: Any) -> Any:
    """A config of ``sm90_packed_gemm`` for a fused layer, where small kernels run between the GEMMs; others unchanged.

    There, blocks that leave room for another are placed in pairs on the SMs that free up first, and none on others,
    though all would fit one per SM. In a chain of GEMMs alone pairs are better.
    """
    if not isinstance(config, sm90_packed_gemm.Config):
        return config
    if config.min_blocks_per_sm > 1 and config.sparse and config.x_bytes == 1:
        return sm90_packed_gemm.default(problem, 1)  # other tiles
    one = replace(config, min_blocks_per_sm=1)
    fits = sm90_packed_gemm.grid(problem, one)[0] <= problem.device.sms
    return one if fits and problem.m >= _LEAST_AMONG_SMALL else config


def _pair_bytes(device: Device) -> int:
    """Shared memory per block such that two fit an SM, but not three; each block costs 1 KB extra."""
    return (device.shared_bytes + 1024) // 2 - 1024
