"""How blocks of consecutive kernels share an SM: what times of single products do not show."""

from dataclasses import replace
from typing import Any, TypeVar

from anybit.device import Device
from anybit.jit import Config
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm80_digits import sm80_packed_digits
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.kernels.packed.sm90_skinny_f16 import sm90_packed_skinny_f16

_C = TypeVar("_C", bound=Config)
_MANY_UNITS, _TRIGGERS = 7, {4: 1, 2: 0}
"""When gate_up of a fused layer triggers the next kernel (PDL; ``sm90_packed_gemv.Config``), by bits, if measured."""
_FEW: dict[type, Any] = {one.Config: one for one in (sm90_packed_gemv, sm90_packed_skinny, sm90_packed_skinny_f16)}
_FEW[sm80_packed_digits.Config] = sm80_packed_digits


def limit_occupancy(config: Config, device: Device) -> Config:
    """Pad a config's shared memory so that two of its blocks never share an SM; other kernels' configs are unchanged.

    With PDL the SMs that free up first would take two blocks of a small layer, others none. Several chunks' pipelines
    fit beside the previous layer's. Two blocks, but not three, may be of skinny_f16, of digits, and of a GEMV of one
    or two tokens, which may be fused, that holds all its activations.
    """
    if type(config) not in _FEW or getattr(config, "chunks", getattr(config, "row_chunks", 1)) != 1:
        return config
    pairs = isinstance(config, sm90_packed_skinny_f16.Config | sm80_packed_digits.Config)
    if isinstance(config, sm90_packed_gemv.Config):
        pairs = config.tile_m <= sm90_packed_gemv.NORM_TOKENS and config.x_resident
    return _padded(config, device.shared_bytes // 2 - 512 * pairs)  # each block costs 1 KB besides


def _padded(config: _C, least: int) -> _C:
    return replace(config, min_shared_bytes=least) if _FEW[type(config)].shared_bytes(config) < least else config


def limit_occupancy_normed(config: sm90_packed_gemv.Config, device: Device) -> sm90_packed_gemv.Config:
    """One block per SM for a GEMV that normalizes its activations; gate_up of one token also gets its PDL trigger."""
    config = _padded(config, device.shared_bytes // 2)
    gate_up = config.tile_m == 1 and config.stage_units * config.chunks >= _MANY_UNITS
    return replace(config, trigger=_TRIGGERS.get(config.bits, config.trigger)) if gate_up else config


def among_small(problem: LinearProblem, config: Config) -> Config:
    """A config of ``sm90_packed_gemm`` for more than 8 tokens of a fused layer; others are unchanged.

    Among its small kernels, pairs of blocks share the SMs that free up first; in a chain of GEMMs alone they should.
    """
    if not isinstance(config, sm90_packed_gemm.Config) or problem.m <= 8:
        return config
    one = replace(config, min_blocks_per_sm=1)
    return one if sm90_packed_gemm.grid(problem, one)[0] <= problem.device.sms else config
