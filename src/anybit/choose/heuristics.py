"""How blocks of consecutive kernels share an SM: what times of single products do not show."""

from dataclasses import replace
from typing import Any

from anybit.device import Device
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.kernels.packed.sm90_gemv.sm90_packed_gemv import NORM_TOKENS
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.kernels.packed.sm90_skinny_f16 import sm90_packed_skinny_f16

_LEAST_AMONG_SMALL = 9
_MANY_UNITS = 7
_TRIGGERS = {4: 1, 2: 0}
"""When gate_up of a fused layer triggers the next kernel (PDL; ``sm90_packed_gemv.Config``), by bits, if measured."""
_CHUNKS = {
    sm90_packed_gemv.Config: (sm90_packed_gemv, "chunks"),
    sm90_packed_skinny.Config: (sm90_packed_skinny, "row_chunks"),
    sm90_packed_skinny_f16.Config: (sm90_packed_skinny_f16, "chunks"),
}


def limit_occupancy(config: Any, device: Device) -> Any:
    """Pad a config's shared memory so that two of its blocks never share an SM; other kernels' configs are unchanged.

    With PDL blocks are placed while the previous kernel drains: the SMs that free up first would take two blocks of a
    small layer, others none, and later kernels fare no better. Products with several chunks are unchanged: their
    pipelines fit beside the previous layer's.

    With one or two tokens of 16-bit activations there are no small kernels between a fused layer's GEMVs, and blocks of
    two GEMVs share an SM: such configs are padded so that two blocks fit but not three, and so are skinny_f16's. A GEMV
    whose activations are not all resident (down) keeps one block per SM.
    """
    module, chunks = _CHUNKS.get(type(config), (None, ""))
    if module is None or getattr(config, chunks) > 1:
        return config
    fused = module is sm90_packed_gemv and config.tile_m <= NORM_TOKENS and config.x_resident
    least = _pair_bytes(device) if fused or module is sm90_packed_skinny_f16 else device.shared_bytes // 2
    return replace(config, min_shared_bytes=least) if module.shared_bytes(config) < least else config


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
    one = replace(config, min_blocks_per_sm=1)
    fits = sm90_packed_gemm.grid(problem, one)[0] <= problem.device.sms
    return one if fits and problem.m >= _LEAST_AMONG_SMALL else config


def _pair_bytes(device: Device) -> int:
    """Shared memory per block such that two fit an SM, but not three; each block costs 1 KB extra."""
    return (device.shared_bytes + 1024) // 2 - 1024
