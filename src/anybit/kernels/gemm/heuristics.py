"""Which kernel multiplies packed weights with few tokens: the gemv, the skinny one or the skinny one for 16 bits."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from anybit.device import Device
from anybit.kernels.gemm import (
    sm90_packed_gemm,
    sm90_packed_gemv,
    sm90_packed_skinny,
    sm90_packed_skinny_f16,
)
from anybit.kernels.gemm.sm90_packed_skinny import Problem

_UNIT_ROWS = 16
_LEAST_AMONG_SMALL = 9
_MANY_UNITS = 7
_TRIGGERS = {4: 1, 2: 0}
"""When gate_up of a fused layer lets the next kernel begin (``sm90_packed_gemv.Config``), by bits, where measured."""


def kernel(problem: Problem) -> ModuleType | None:
    """What was fastest on an H200 (docs/packed.md); None where none of them runs, or sm90_packed_gemm is faster."""
    p = problem
    units = -(-p.n // (_UNIT_ROWS * p.device.sms))
    # From 9 tokens on gemm takes 5.7 us for qkv, 4.5 for o, 16.7 for gate_up and 9.7 for down, where skinny_f16
    # takes 6.5 to 7.3, 5.6, 20 to 21 and 14; from 5 on of gate_up (16.7; 18.7) and o (4.5; 4.3 to 5.6). Layers of many
    # columns take 11.2 at 5 tokens, 9.8 at 8 (rows of x that are not there cost time), in skinny_f16 10.2 to 10.5;
    # with 3 bits and less 9.9 at 3, and 11.0. At 3 and 4 tokens o takes 3.7 in sm90_packed_skinny_f16, 4.6 there.
    like_o, wide = units == 2 and 2048 <= p.columns <= 8192, p.columns > 8192
    if p.activations == torch.int8:
        # gate_up takes 17.3 us, and 24 to 26 in skinny, narrow codes in many rows from 3 on; qkv, o and down at 6
        # tokens 6.3, 5.0 and 12.2 and in sm90_packed_skinny 5.7, 4.6 and 11.6, at 8 tokens 7.0, 5.1 and 12.8;
        # 7168 x 5120, whose blocks have four units in two chunks, 7.4 (2 bits: 5.9) at 4 tokens and 8.0 (8.4).
        most = 2 if units == 4 or (units > 4 and p.weights.bits < 3) else 4 if units > 4 or p.weights.bits < 4 else 6
        # Small layers, w4a8 at 6 and 8 tokens: 2.7 for 3.8 us (576 x 576), 2.9 for 3.8 (960 x 576), 3.2 for 3.9 (3072 x
        # 576); other widths and up to 2047 columns as these.
        if units <= 2 and p.columns < 2048:
            most = 8
    else:
        most = (6 if p.weights.bits > 3 else 2) if wide else 4 if like_o or units > 4 else 8
    # Layers of many columns and rows, 4 bits, us at 3 and 4 tokens in skinny_f16, skinny and gemv:
    # 5120 x 25600 23.5, 23.6; 21.1, 21.8; 28.8, 28.9. 5120 x 17408 16.9, 16.9; 15.5, 15.8; 20.7, 20.7. 8192 x 28672
    # 33.6, 34.0; 33.2, 33.5; 31.8, 32.0, and from 5 to 8 tokens skinny_f16 34.1 to 34.9, gemm 34.9 to 37.2.
    tall = wide and units > 2 and p.weights.bits == 4 and p.activations != torch.int8
    if tall:
        most = 4 if units == 3 else 8
    four = p.weights.bits == 4 and p.activations != torch.int8
    if four and not tall:
        most = _most(p, units, most)
    if p.m > most:
        return None
    if four and (first := _first(p, units)) is not None:
        order = [first, *(module for module in (sm90_packed_skinny_f16, sm90_packed_skinny) if module is not first)]
    elif tall and 2 < p.m <= 4:
        order = (
            [sm90_packed_skinny, sm90_packed_skinny_f16] if units == 3 else [sm90_packed_gemv, sm90_packed_skinny_f16]
        )
    elif p.m > (4 if p.weights.bits <= 3 and units > 3 else 2):
        order = [sm90_packed_skinny_f16, sm90_packed_skinny]
    else:
        order = [sm90_packed_gemv, sm90_packed_skinny]
    return next((module for module in order if module.why_not(problem) is None), None)


def _most(p: Problem, units: int, most: int) -> int:
    """The most tokens of 4-bit weights and 16-bit activations that the kernels for few take, where it is not ``most``.

    us at 5 or 6 and at 8 tokens in skinny_f16, gemm: 4096 x 4096 4.3, 4.5 and 5.6, 4.5; 37888 x 3584 20.4, 21.2
    and 26.8, 26.3; 34816 x 5120 27.6, 27.8 and 34.3, 34.1; 51200 x 5120 39, 39 and 44, 44; 7168 x 5120 9.0, 9.1 and
    8.4, 7.6; 8192 x 8192 12.4, 12.6 and 12.4, 11.6; 4096 x 11008 at 6 9.5 and 8.8.
    """
    wide = p.columns > 8192
    if units >= 16 and not wide:
        return 8
    if (units == 2 and p.columns >= 2048 and not wide) or (units == 4 and not wide):
        return 6
    return 4 if wide and p.columns < 12288 and units == 2 else most


def _first(p: Problem, units: int) -> ModuleType | None:
    """The kernel of 4-bit weights and 16-bit activations that is tried first, where it is not the usual one.

    us in it and in the usual one: 960 x 576 at 3 to 8 tokens skinny 1.8 to 2.0, skinny_f16 2.3 to 2.6; 2048 x
    8192 at 1 and 2 skinny_f16 4.7, 4.7, gemv 5.1, 7.0; at 1 skinny 13.3 for 16.3 (5120 x 17408), 18.9
    for 22.7 (5120 x 25600) and 6.7 for 7.6 (7168 x 5120); at 2 8.2 for 10.0 (5120 x 8192); at 3 and 4 sm90_packed_gemv
    7.6 for 8.7 (7168 x 5120), 9.1 for 10.6 (10240 x 5120), 8.0 for 9.5 (12288 x 4096), 14.2 for 17.1 (22016 x 4096).
    """
    if p.columns < 2048 and units <= 2:
        return sm90_packed_skinny if p.m > 2 or (p.m == 2 and units == 1 and p.columns < 1024) else None
    if p.m > 2:
        return sm90_packed_gemv if p.m <= 4 and 4 <= units <= 12 and p.columns <= 8192 else None
    if units == 1:
        return sm90_packed_skinny_f16 if p.m == 2 or p.columns >= 8192 else None
    if p.m == 2:
        return sm90_packed_skinny if units == 3 and 5120 <= p.columns <= 8192 else None
    long = (units == 3 and p.columns > 8192) or (units == 4 and 4096 < p.columns < 8192)
    return sm90_packed_skinny if long else None


def apart(config: Any, device: Device) -> Any:
    """A config of which two blocks never share a multiprocessor, for layers of a model; others' configs as they are.

    Blocks are placed while those of the kernel ahead leave: the multiprocessors that are free first would take two
    blocks of a small layer, others none, and the layer would take as long as two blocks on one multiprocessor do; what
    follows is placed no better (32 layers of an 8B model on an H200: 2.06 ms a step, and 1.70 ms apart). Products that
    are cut into several chunks stay as they are: their rings fit beside those of the layer ahead.

    With 16-bit activations of a token or two no small kernels stand between a fused layer's products, and a block of
    the next one finds its place beside each that runs. The output projection, whose blocks have to share
    multiprocessors (those of attention take all of one), then asks for just so much that two of any kernel do fit
    (1.574 ms; 1.625 ms apart). A product of so many columns that a block has not all activations at hand (down) stays
    apart: 1.59 ms, and 1.68 with two (w2a16g128: 1.34, 1.57). Blocks of skinny_f16 (o at 3 and 4 tokens) leave the same
    room: 3.7 us, as without anything apart, and 5.6 with one on a multiprocessor. Products that norm their activations
    are kept apart by ``apart_and_normed``.
    """
    for module, chunks in (
        (sm90_packed_gemv, "chunks"),
        (sm90_packed_skinny, "row_chunks"),
        (sm90_packed_skinny_f16, "chunks"),
    ):
        if isinstance(config, module.Config):
            fused = module is sm90_packed_gemv and config.tokens <= sm90_packed_gemv.NORM_TOKENS and config.x_resident
            pairs = fused or module is sm90_packed_skinny_f16
            least = _pair_bytes(device) if pairs else device.shared_bytes // 2
            alone = getattr(config, chunks) == 1 and module.shared_bytes(config) < least
            return replace(config, least_shared=least) if alone else config
    return config


def apart_and_normed(config: sm90_packed_gemv.Config, device: Device) -> sm90_packed_gemv.Config:
    """``apart`` for a product that norms its activations: qkv, and gate_up.

    The output projection's blocks may have to share multiprocessors, for those of attention take all of one; gate_up's,
    which take longest, would be placed two on one where none of these is (w4a16g128 on an H200: 1.58 to 1.75-1.88 ms).

    gate_up of one token lets what follows begin with its last copies in 4 bits, and at once in 2: of 16 graphs in
    turns steps took 8 us less (1,601 for 1,609, twice, standard errors 2 and 3), and 5 (1,339 for 1,344, error 2).
    """
    least = device.shared_bytes // 2
    config = replace(config, least_shared=least) if sm90_packed_gemv.shared_bytes(config) < least else config
    if config.tokens == 1 and config.stage_units * config.chunks >= _MANY_UNITS:
        config = replace(config, trigger=_TRIGGERS.get(config.bits, config.trigger))
    return config


def among_small(problem: sm90_packed_gemm.Problem, config: sm90_packed_gemm.Config) -> sm90_packed_gemm.Config:
    """A config of ``sm90_packed_gemm`` for a fused layer, between whose products of many tokens small kernels stand.

    There blocks that leave room for another are placed two on the multiprocessors that are free first, and none on
    others, though one on each would do: 2.49 ms a step of an 8B model at 16 tokens, 2.24 with one block of o and of
    down on each (w4a16g128 on an H200). In a chain of a product alone it is the other way round (o 4.5 us, 5.2).
    """
    one = replace(config, resident=1)
    fits = sm90_packed_gemm.grid(problem, one)[0] <= problem.device.sms
    return one if fits and problem.m >= _LEAST_AMONG_SMALL else config


def _pair_bytes(device: Device) -> int:
    """Shared memory of which two blocks, and no three, fit a multiprocessor; it keeps 1 KB of each block's."""
    return (device.shared_bytes + 1024) // 2 - 1024
