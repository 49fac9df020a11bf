"""How blocks of consecutive kernels share an SM: what times of single products do not show."""

from dataclasses import replace

from anybit.device import Device
from anybit.jit import Config
from anybit.kernels.linear_problem import LinearProblem
from anybit.kernels.packed.sm90_gemm import sm90_packed_gemm
from anybit.kernels.packed.sm90_gemv import sm90_packed_gemv
from anybit.kernels.packed.sm90_skinny import sm90_packed_skinny
from anybit.kernels.packed.sm90_skinny_f16 import sm90_packed_skinny_f16

_LEAST_AMONG_SMALL = 9
_MANY_UNITS = 7
_TRIGGERS = {4: 1, 2: 0}
"""When gate_up of a fused layer triggers the next kernel (PDL; ``sm90_packed_gemv.Config``), by bits, if measured."""
_FEW = {
    sm90_packed_gemv.Config: (sm90_packed_gemv, "chunks"),
    sm90_packed_skinny.Config: (sm90_packed_skinny, "row_chunks"),
    sm90_packed_skinny_f16.Config: (sm90_packed_skinny_f16, "chunks"),
}


def limit_occupancy(config: Config, device: Device) -> Config:
    """Pad a config's shared memory so that two of its blocks never share an SM; other kernels' configs are unchanged.

    With PDL blocks are placed while the previous kernel drains: the SMs that free up first would take two blocks of a
    small layer, others none. Products with several chunks are unchanged: their pipelines fit beside the previous
    layer's. Two blocks, but not three, may be of skinny_f16, and of a GEMV that has a fused layer's small kernels
    inside (one or two tokens) and holds all its activations.
    """
    module, chunks = _FEW.get(type(config), (None, ""))
    if module is None or getattr(config, chunks) > 1:
        return config
    alone = device.shared_bytes // 2
    if isinstance(config, sm90_packed_gemv.Config):
        pairs = config.tile_m <= sm90_packed_gemv.NORM_TOKENS and config.x_resident
    else:
        pairs = module is sm90_packed_skinny_f16
    least = alone - 512 if pairs else alone  # each block costs 1 KB besides
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


def among_small(problem: LinearProblem, config: Config) -> Config:
    """A config of ``sm90_packed_gemm`` for a fused layer, where small kernels run between the GEMMs; others unchanged.

    There, blocks that leave room for another are placed in pairs on the SMs that free up first, and none on others,
    though all would fit one per SM. In a chain of GEMMs alone pairs are better.
    """
    if not isinstance(config, sm90_packed_gemm.Config) or problem.m < _LEAST_AMONG_SMALL:
        return config
    one = replace(config, min_blocks_per_sm=1)
    return one if sm90_packed_gemm.grid(problem, one)[0] <= problem.device.sms else config
