"""What the kernels over packed weights share on the host: problems, what configs repeat of them, rings, arguments."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from anybit.device import Device
from anybit.errors import dtype_name
from anybit.jit import Int32, Pointer
from anybit.kernels.common.types import Code, Operand, Output
from anybit.kernels.elementwise.quantize_activations import rows_aligned
from anybit.kernels.gemm import packed_layout, sparse_layout
from anybit.kernels.gemm.packed_layout import TILE_COLUMNS, TILE_ROWS, UNIT_ROWS, PackedWeight, round_up
from anybit.scheme import WeightFormat

_MOST_UNITS = 16
"""Units of a block where a layer has more blocks than there are multiprocessors anyway."""
_MOST_IN_A_WAVE = 18
"""And where so many leave one block for each: with 16, 34816 x 5120 and 37888 x 3584 had 136 and 148 blocks for 132
multiprocessors (int8, two tokens: 34.1 and 26.3 us, for 25.6 and 19.6)."""
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_C = TypeVar("_C")


@dataclass(frozen=True)
class Problem:
    """y[m, n] = x[m, k] W[n, k]^T, W as ``packed_layout.PackedWeight`` (of order "a8" for int8 activations).

    activations: torch.float16, torch.bfloat16 or torch.int8.  output: float16 or bfloat16.
    columns: K' of the tiles.  act_order: the columns are permuted.  aligned: rows of x start on 16 bytes. Kernels that
    are given x in the order of the tiles' columns need none of these three.
    """

    m: int
    n: int
    k: int
    weights: WeightFormat
    activations: torch.dtype
    output: torch.dtype
    device: Device
    columns: int = 0
    act_order: bool = False
    aligned: bool = True

    @property
    def units(self) -> int:
        """Units of 16 rows, those that fill the last tile included."""
        return round_up(self.n, TILE_ROWS) // UNIT_ROWS

    @property
    def column_blocks(self) -> int:
        """Blocks of 128 columns."""
        return -(-self.columns // TILE_COLUMNS)

    @property
    def block_units(self) -> int:
        """How many of a layer's units a block takes."""
        mine = -(-self.units // self.device.sms)
        return mine if mine <= _MOST_IN_A_WAVE else _MOST_UNITS


@dataclass(frozen=True)
class Facts:
    """What every config repeats of its problem."""

    operand: Operand
    output: Output
    bits: int
    group: int
    code: Code

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of 16 rows and 128 columns, its scales included."""
        return packed_layout.unit_bytes_of(self.bits, self.group, self.code.name, getattr(self, "sparse", False))


@dataclass(frozen=True)
class FewFacts(Facts):
    """What configs for few tokens repeat: also whether x is gathered, and whether K is not made of 128s (ragged)."""

    gather: bool
    ragged: bool


def facts(p: Problem, config: type) -> dict[str, Any]:
    """What the problem decides of a kernel's configs, by field."""
    known = {
        "operand": Operand(dtype_name(p.activations)),
        "output": Output(dtype_name(p.output)),
        "bits": p.weights.bits,
        "group": packed_layout.tile_group(p.weights),
        "code": Code[p.weights.code],
        "gather": p.act_order or not p.aligned,
        "ragged": p.k % 128 != 0,
        "wide_store": p.n % 4 == 0,
        "sparse": p.weights.sparse,
    }
    return {field.name: known[field.name] for field in fields(config) if field.name in known}


def why_not(problem: Problem, int8: bool = True) -> str | None:
    """Why no kernel over tiles takes these operands, in a sentence; None if one may. int8: of activations, too."""
    p = problem
    if min(p.m, p.n, p.k) < 1:
        return f"a product of M = {p.m}, N = {p.n}, K = {p.k} is empty"
    if refusal := packed_layout.why_not(p.weights, p.activations == torch.int8):
        return refusal
    if p.activations not in (_SIXTEEN_BITS if not int8 else (*_SIXTEEN_BITS, torch.int8)):
        kinds = "float16, bfloat16 or int8" if int8 else "float16 or bfloat16"
        return f"activations must be {kinds}, not {dtype_name(p.activations)}"
    if p.output not in _SIXTEEN_BITS:
        return f"the output must be float16 or bfloat16, not {dtype_name(p.output)}"
    if p.activations.is_floating_point and p.activations != p.output:
        return f"16-bit activations and output must agree, not {dtype_name(p.activations)} and {dtype_name(p.output)}"
    return None


def why_not_few(
    problem: Problem, most_tokens: int, otherwise: str, int8: bool = False, sparse: bool = False
) -> str | None:
    """What a kernel for few tokens refuses, in a sentence; ``otherwise``: who takes more of them. sparse: and 2:4."""
    if problem.device.capability < 90:
        return f"{problem.device.arch} has no bulk copies (sm_90 and later do): see sm80_packed_gemm.py"
    if problem.m > most_tokens:
        return f"M = {problem.m} is more than {most_tokens} tokens: see {otherwise}"
    if problem.weights.sparse and not sparse:
        return sparse_layout.DENSE_ALONE
    return why_not(problem, int8)


def why_not_config(problem: Problem, config: Any, shared_bytes: int) -> str | None:
    """What no config for few tokens may be, in a sentence: another problem's, too small, or too large for a block."""
    c = config
    if any(getattr(c, name) != value for name, value in facts(problem, type(c)).items()):
        return "the config was made for another problem"
    if c.tile_m < problem.m:
        return f"the config holds {c.tile_m} tokens, and there are {problem.m}"
    if not 1 <= c.warps <= 32:
        return f"a block has 1 to 32 warps, not {c.warps}"
    if not 1 <= c.prologue_stages <= c.stages:
        return f"prologue_stages = {c.prologue_stages} must be 1 to stages = {c.stages}"
    return problem.device.why_not_shared(shared_bytes)


def ring(size: int, stage: int, most: int, ahead: int = 0) -> tuple[int, int]:
    """The stages of ``stage`` bytes that about ``size`` hold, at most ``most``, and how many of them start at once.

    ahead: so many; 0: enough in flight to keep memory busy, and little enough not to hold up the activations.
    """
    stages = max(1, min(most, size // stage))
    return stages, max(1, min(stages, ahead or ((20 << 10) if stages >= most else (36 << 10)) // stage))


def legal(first: _C, candidates: Iterable[_C], why_not: Callable[[_C], str | None]) -> Iterator[_C]:
    """The first config, then every other one that is legal, each once."""
    yield first
    seen = {first}
    for found in candidates:
        if found not in seen and why_not(found) is None:
            seen.add(found)
            yield found


@dataclass(frozen=True)
class Params:
    """Arguments of one launch for few tokens; see sm90_packed_skinny.cuh."""

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


def arguments(weight: PackedWeight, x: Tensor, y: Tensor, x_scale: Tensor | None, bias: Tensor | None) -> Params:
    """The Params of a launch, unchecked."""
    return Params(
        weight.tiles, weight.row_scale, weight.row_zero, weight.permutation, x, x_scale, bias, y,
        x.shape[0], weight.shape[0], weight.shape[1], x.stride(0), weight.tiles.shape[0], weight.tiles.shape[1],
    )  # fmt: skip


def problem_of(weight: PackedWeight, m: int, dtype: torch.dtype, output: torch.dtype, device: Device) -> Problem:
    """The problem that a launch for few tokens solves for m of them."""
    n, k = weight.shape
    return Problem(m, n, k, weight.format, dtype, output, device, weight.padded[1], weight.permutation is not None)


def checked_problem(
    weight: PackedWeight, x: Tensor, y: Tensor, x_scale: Tensor | None, bias: Tensor | None, outputs: int = 0
) -> Problem:
    """The problem that these operands pose, after `packed_layout.check_operands`."""
    packed_layout.check_operands(weight, x, y, x_scale, bias, outputs)
    problem = problem_of(weight, x.shape[0], x.dtype, y.dtype, Device.of(x))
    return problem if rows_aligned(x) else replace(problem, aligned=False)
