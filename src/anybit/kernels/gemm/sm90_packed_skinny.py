"""y = x W^T for few tokens and packed weights of 1 to 8 bits, each read once. Host side of sm90_packed_skinny.cuh."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anybit import jit
from anybit.device import Device
from anybit.errors import dtype_name
from anybit.jit import Int32, Pointer
from anybit.kernels.common.types import Code, Operand, Output
from anybit.kernels.elementwise.quantize_activations import rows_aligned
from anybit.kernels.gemm import packed_layout
from anybit.kernels.gemm.packed_layout import PackedWeight, round_up
from anybit.scheme import WeightFormat

MOST_TOKENS = 16
"""Above this many tokens other kernels are faster, and this one's shared memory and registers run out."""
_MOST_UNITS = 16
"""Units of a block where a layer has more blocks than there are multiprocessors anyway."""
_MOST_IN_A_WAVE = 18
"""And where so many leave one block for each: with 16, 34816 x 5120 and 37888 x 3584 had 136 and 148 blocks for 132
multiprocessors (int8, two tokens: 34.1 and 26.3 us, for 25.6 and 19.6)."""
_RESIDENT_BYTES = 56 << 10
"""Activations of a block are all at hand if they are no larger than this."""
_UNIT_ROWS = packed_layout.UNIT_ROWS


@dataclass(frozen=True)
class Problem:
    """y[m, n] = x[m, k] W[n, k]^T, W as ``packed_layout.PackedWeight`` (of order "a8" for int8 activations).

    activations: torch.float16, torch.bfloat16 or torch.int8.  output: float16 or bfloat16.
    columns: K' of the tiles.  act_order: the columns are permuted.  aligned: rows of x start on 16 bytes.
    """

    m: int
    n: int
    k: int
    weights: WeightFormat
    activations: torch.dtype
    output: torch.dtype
    device: Device
    columns: int
    act_order: bool = False
    aligned: bool = True


@dataclass(frozen=True)
class Config:
    """How. The first fields repeat the problem; then

    split: 16-bit activations become two planes of int8. tile_m: columns of the product, at least m. warps of a block,
    split_k_warps of which share the columns of W among them. row_units: units of 16 rows that a warp takes at a time,
    row_chunks times one after another. stages: copies of weights in a warp's ring; prologue_stages: how many of them
    start at once, the others as these land if paced, else after the activations. x_stages: blocks of activations at
    hand for a warp; x_resident: all of them. trigger: the next kernel may start at once (0), or when trigger - 1 copies
    of weights are still to be started. chain: products that may wait for each other. min_blocks_per_sm: bound on
    registers. min_shared_bytes: shared memory to ask for at least; see ``heuristics.limit_occupancy``.
    """

    operand: Operand
    output: Output
    bits: int
    group: int
    code: Code
    gather: bool
    split: bool
    tile_m: int
    warps: int
    split_k_warps: int
    row_units: int
    row_chunks: int
    stages: int
    x_stages: int
    trigger: int
    min_blocks_per_sm: int
    prologue_stages: int
    chain: int = 2
    paced: bool = True
    ragged: bool = False
    x_resident: bool = True
    min_shared_bytes: int = 0


@dataclass(frozen=True)
class Params:
    """Arguments of one launch; see sm90_packed_skinny.cuh."""

    tiles: Pointer
    row_scale: Pointer
    row_zero: Pointer
    permutation: Pointer
    x: Pointer
    x_scale: Pointer
    bias: Pointer
    y: Pointer
    m: Int32
    n: Int32
    k: Int32
    x_stride: Int32
    column_blocks: Int32
    row_tiles: Int32


def problem_why_not(problem: Problem, most_tokens: int, otherwise: str) -> str | None:
    """What the kernels for few tokens all refuse, in a sentence; ``otherwise``: who takes more tokens."""
    p = problem
    if p.device.capability < 90:
        return f"{p.device.arch} has no bulk copies (sm_90 and later do): see sm80_packed_gemm.py"
    if min(p.m, p.n, p.k) < 1:
        return f"a product of M = {p.m}, N = {p.n}, K = {p.k} is empty"
    if p.m > most_tokens:
        return f"M = {p.m} is more than {most_tokens} tokens: see {otherwise}"
    if refusal := packed_layout.why_not(p.weights):
        return refusal
    return None


def sixteen_bits_why_not(problem: Problem) -> str | None:
    """Why these are not 16-bit activations with a result of their type, in a sentence; None if they are."""
    p = problem
    if p.activations not in (torch.float16, torch.bfloat16):
        return f"activations must be float16 or bfloat16, not {p.activations}: see sm90_packed_skinny.py"
    if p.activations != p.output:
        return f"activations and output must agree, not {p.activations} and {p.output}"
    return None


def why_not(problem: Problem, config: Config | None = None) -> str | None:
    """Why ``config`` (or any) cannot do ``problem``, in a sentence; None if it can."""
    p = problem
    reason = problem_why_not(p, MOST_TOKENS, "sm90_packed_gemm.py")
    if reason is not None:
        return reason
    if p.activations not in (torch.float16, torch.bfloat16, torch.int8):
        return f"activations must be float16, bfloat16 or int8, not {dtype_name(p.activations)}"
    if p.output not in (torch.float16, torch.bfloat16):
        return f"the output must be float16 or bfloat16, not {dtype_name(p.output)}"
    if p.activations.is_floating_point and p.activations != p.output:
        return f"16-bit activations and output must agree, not {dtype_name(p.activations)} and {dtype_name(p.output)}"
    if p.activations == torch.int8 and p.columns * (2**p.weights.bits) * 128 * 2 >= 2**32:
        return f"sums over K = {p.k} of {p.weights.bits}-bit weights and int8 activations may not fit int32"
    return None if config is None else _config_why_not(p, config)


def _config_why_not(p: Problem, c: Config) -> str | None:
    if c != _facts(p, c):
        return "the config was made for another problem"
    if c.tile_m < p.m:
        return f"the config holds {c.tile_m} tokens, and there are {p.m}"
    if c.warps % c.split_k_warps or not 1 <= c.warps <= 32:
        return f"{c.warps} warps are not a multiple of split_k_warps = {c.split_k_warps}, or more than 32"
    if c.x_resident != (c.x_stages * c.split_k_warps >= p.columns // 128):
        return "x_resident must say whether x_stages hold all of a warp's activations"
    if not 1 <= c.prologue_stages <= c.stages:
        return f"prologue_stages = {c.prologue_stages} must be 1 to stages = {c.stages}"
    if c.split:
        if c.gather:
            return "activations in another order are not split into planes"
        if c.bits not in (1, 2, 4, 8):
            return f"split activations meet widths of 1, 2, 4 or 8 bits, not {c.bits}"
        if not c.x_resident:
            return "split activations must all be at hand (x_stages)"
        if p.k % 2:
            return f"split activations need an even K, not {p.k}"
    size = shared_bytes(c)
    if size > p.device.shared_bytes:
        return f"it needs {size} bytes of shared memory, and {p.device.name} gives a block {p.device.shared_bytes}"
    return None


def _facts(p: Problem, c: Config) -> Config:
    """``c`` with what the problem decides."""
    return replace(
        c,
        operand={torch.float16: Operand.f16, torch.bfloat16: Operand.bf16, torch.int8: Operand.s8}[p.activations],
        output=Output.f16 if p.output == torch.float16 else Output.bf16,
        bits=p.weights.bits,
        group=min(p.weights.group or 0, 128),
        code=Code(p.weights.code),
        gather=p.act_order or not p.aligned,
        ragged=p.k % 128 != 0,
    )


def shared_bytes(config: Config) -> int:
    """Dynamic shared memory: a ring of weights (in the end its sums) and activations a warp; factors; barriers."""
    c = config
    pitch = 128 if c.split or c.operand is Operand.s8 else 256
    pitch += 16 if c.tile_m > 1 or c.split else 0
    slot = c.tile_m * (2 * pitch if c.split else pitch) + (round_up(c.tile_m * 4, 16) if c.split else 0)
    units = c.row_units * c.row_chunks
    ring = round_up(max(c.stages * c.row_units * _unit_bytes(c), units * 16 * c.tile_m * 4), 128)
    rows = c.warps // c.split_k_warps * units * 16
    size = (
        c.warps * (ring + c.x_stages * slot)
        + round_up(rows * 8 + c.tile_m * 4, 128)
        + round_up(c.warps * c.stages * 8, 128)
    )
    return max(size, c.min_shared_bytes)


def _unit_bytes(c: Config) -> int:
    return packed_layout.unit_bytes_of(c.bits, c.group or None, c.code is Code.asym)


@functools.cache
def kernel(config: Config) -> jit.Kernel:
    """The kernel of a config."""
    return jit.Kernel(
        "gemm/sm90_packed_skinny.cuh", "sm90_packed_skinny", config, Params, config.warps * 32, shared_bytes(config)
    )


def grid(problem: Problem, config: Config) -> tuple[int, int, int]:
    """A block an SM if its rows suffice, so that the next kernel's blocks find room beside them."""
    units = round_up(problem.n, packed_layout.TILE_ROWS) // _UNIT_ROWS
    most = config.warps // config.split_k_warps * config.row_units * config.row_chunks
    return max(min(problem.device.sms, units), -(-units // most)), 1, 1


def block_units(units: int, device: Device) -> int:
    """How many of a layer's units a block takes."""
    mine = -(-units // device.sms)
    return mine if mine <= _MOST_IN_A_WAVE else _MOST_UNITS


def configs(problem: Problem) -> Iterator[Config]:
    """Every config worth trying, legal ones alone; the default first."""
    first = default(problem)
    yield first
    seen = {first}
    splits = (False, True) if problem.activations.is_floating_point else (False,)
    for warps in (8, 16):
        for row_warps in (1, 2):
            for row_units in (1, 2, 3, 4):
                for kibibytes in (48, 72, 96, 160):
                    for prefetch in (1, 2, 4):
                        for split in splits:
                            found = _fitted(problem, warps, row_warps, row_units, kibibytes << 10, prefetch, split)
                            if found not in seen and why_not(problem, found) is None:
                                seen.add(found)
                                yield found


def default(problem: Problem) -> Config:
    """The config to use where nothing was measured. Raises KernelError where there is none."""
    return packed_layout.checked_default(problem, _default, why_not)


@functools.cache
def _default(p: Problem) -> Config:
    """What won on an H200 (docs/packed.md): a layer whose weights fit the SMs' shared memory is fetched whole, before
    the kernel ahead has ended; others in rings that leave room for the next kernel's, or have more warps instead.
    """
    units = -(-round_up(p.n, packed_layout.TILE_ROWS) // _UNIT_ROWS // p.device.sms)
    whole = units <= 3 and units * (p.columns // 128) * (256 * p.weights.bits + 48) <= 108 << 10
    # Taking out 1-bit and 2-bit codes for fp16 takes longer than reading them: see docs/packed.md.
    split = p.m <= 2 and p.weights.bits <= 2 and units > 3 and p.activations.is_floating_point
    split = split and p.k % 2 == 0 and p.aligned and not p.act_order
    # Sixteen warps hide latency better, where their rings still have two stages.
    more_warps = p.m <= 2 and not whole and (p.weights.bits <= 4 if units <= 3 else p.weights.bits <= 3)
    if p.activations == torch.int8 and p.m == 1 and units > 6 and p.weights.bits == 4:
        # Copies of seven units, in all of a multiprocessor's shared memory (gate_up 14.1 us; 16.3 in copies of two).
        alone = _fitted(p, 8, 1, 7, 180 << 10, 2, False)
        if shared_bytes(alone) <= p.device.shared_bytes:
            return alone
    found = None
    # With more tokens their sums and activations want the room, and the next kernel's blocks fit no more anyway: down
    # at 3 and 4 tokens of int8 takes 10.4 us with 68 KB, 11.8 with 112; qkv at 6 tokens 5.7 with 80 KB, 7.4 with 68.
    few = p.m <= 2 or (p.m <= 4 and (whole or units > 3 or p.activations != torch.int8))
    for kibibytes in (112, 64, 32, 16) if few else (80 if units == 3 else 68, 32, 16):
        found = _fitted(p, 16 if more_warps else 8, 1, units if units <= 3 else 2, kibibytes << 10, 0, split)
        if shared_bytes(found) <= p.device.shared_bytes:
            break
    assert found is not None
    return found


def _fitted(
    p: Problem, warps: int, row_warps: int, row_units: int, ring_bytes: int, prefetch: int, split: bool
) -> Config:
    """A config for these warps, whose rings have about ``ring_bytes`` together; prefetch 0 chooses one."""
    units = block_units(round_up(p.n, packed_layout.TILE_ROWS) // _UNIT_ROWS, p.device)
    mine = -(-units // row_warps)
    row_units = min(row_units, mine)
    k_warps = warps // row_warps
    blocks = -(-p.columns // 128 // k_warps)
    base = Config(
        Operand.f16, Output.f16, 1, 0, Code.sym, False, split,
        tile_m=next(t for t in (1, 2, 4, 8, 16) if t >= p.m), warps=warps, split_k_warps=k_warps, row_units=row_units,
        row_chunks=-(-mine // row_units), stages=1, x_stages=blocks, trigger=0, min_blocks_per_sm=1, prologue_stages=1,
        chain=2 if p.m <= 8 else 4,
    )  # fmt: skip
    base = _facts(p, base)
    if not split and (base.tile_m > 8 or warps * blocks * base.tile_m * 256 > _RESIDENT_BYTES):
        base = replace(base, x_stages=min(blocks, 2))
    base = replace(base, x_resident=base.x_stages >= blocks)
    steps, stage = blocks * base.row_chunks, warps * base.row_units * _unit_bytes(base)
    stages = max(1, min(steps, ring_bytes // stage))
    whole = stages >= steps
    # Enough in flight to keep memory busy, and little enough not to hold up the activations.
    prefetch = prefetch or ((20 << 10) if whole else (36 << 10)) // stage
    prefetch = max(1, min(stages, prefetch))
    late = not whole and warps == 8 and base.tile_m <= 2
    return replace(base, stages=stages, prologue_stages=prefetch, trigger=int(late))


def problem_of(weight: PackedWeight, m: int, dtype: torch.dtype, output: torch.dtype, device: Device) -> Problem:
    """The problem that ``launch`` solves for m tokens."""
    n, k = weight.shape
    return Problem(m, n, k, weight.format, dtype, output, device, weight.padded[1], weight.permutation is not None)


def checked_problem(
    weight: PackedWeight, x: Tensor, y: Tensor, x_scale: Tensor | None, bias: Tensor | None, outputs: int = 0
) -> Problem:
    """The problem that these operands pose, after `packed_layout.check_operands`."""
    packed_layout.check_operands(weight, x, y, x_scale, bias, outputs)
    problem = problem_of(weight, x.shape[0], x.dtype, y.dtype, Device.of(x))
    return problem if rows_aligned(x) else replace(problem, aligned=False)


def launch(
    weight: PackedWeight, x: Tensor, y: Tensor, x_scale: Tensor | None = None, bias: Tensor | None = None,
    config: Config | None = None, pdl: bool = True,
) -> None:  # fmt: skip
    """y[:] = x W^T + bias. x [m, k] float16, bfloat16, or int8 with x_scale float32 [m]; y [m, n], bias [n].

    Rows of x may be further apart than k. pdl: start before the kernel ahead has ended; safe in any stream, since
    nothing that another kernel writes is touched before that kernel's end. KernelError where it cannot be done.
    """
    problem = checked_problem(weight, x, y, x_scale, bias)
    config = packed_layout.checked_config(problem, config, default, why_not)
    jit.launch(
        kernel(config), arguments(weight, x, y, x_scale, bias), grid(problem, config), pdl=pdl, device=y.get_device()
    )


def arguments(weight: PackedWeight, x: Tensor, y: Tensor, x_scale: Tensor | None, bias: Tensor | None) -> Params:
    """The Params of a launch, unchecked."""
    return Params(
        weight.tiles, weight.row_scale, weight.row_zero, weight.permutation, x, x_scale, bias, y,
        x.shape[0], weight.shape[0], weight.shape[1], x.stride(0), weight.tiles.shape[0], weight.tiles.shape[1],
    )  # fmt: skip
