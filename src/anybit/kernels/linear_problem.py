"""``LinearProblem``: the problem that every kernel family of ``anybit.kernels.gemm`` takes."""

from dataclasses import dataclass, field

import torch

from anybit.device import Device
from anybit.kernels.bitplane import bitplane_layout
from anybit.kernels.common.types import Operand, Output
from anybit.kernels.packed.packed_layout import TILE_COLUMNS, TILE_ROWS, UNIT_ROWS, round_up
from anybit.scheme import ActivationFormat, Scheme, WeightFormat

_MOST_UNITS = 16
"""Units per block if a layer has more than one wave of blocks anyway."""
_MOST_IN_A_WAVE = 18
"""The same if it makes a single wave: with 16, 34816 x 5120 and 37888 x 3584 had 136 and 148 blocks on 132 SMs (int8,
two tokens: 34.1 and 26.3 us, instead of 25.6 and 19.6)."""
_OUTPUTS = {output.dtype: output for output in Output}


@dataclass(frozen=True)
class LinearProblem:
    """One linear call, including quantization of its activations: y[m, n] = x[m, k] W[n, k]^T.

    dtype: of y, and of 16-bit x; float16 or bfloat16, for bit planes also float32 or int32 (integer sums before
    scales). act_order: the tiles' columns are permuted. columns: of the tiles, if an activation order needs more than k
    rounded up to 128; 0: just that. aligned: rows of x (or of its codes, if quantized) are 16-byte aligned.
    y_aligned: rows of y are.
    """

    m: int
    n: int
    k: int
    weights: WeightFormat
    activations: ActivationFormat = field(default_factory=ActivationFormat)
    dtype: torch.dtype = torch.float16
    device: Device = field(default_factory=lambda: Device.named("sm_90a"))
    act_order: bool = False
    columns: int = 0
    aligned: bool = True
    y_aligned: bool = True

    def __str__(self) -> str:
        return f"{self.scheme} {self.m} x {self.n} x {self.k}"

    @property
    def scheme(self) -> Scheme:
        """Weights and activations as a scheme."""
        return Scheme(self.weights, self.activations)

    @property
    def operand(self) -> Operand:
        """The type of tensor-core operands in kernels that dequantize weights."""
        if self.activations.quantized:
            return Operand.s8 if self.activations.integer else Operand.e4m3
        return Operand.bf16 if self.dtype == torch.bfloat16 else Operand.f16

    @property
    def output(self) -> Output:
        """The type of y. Raises KeyError for a dtype that kernels do not write."""
        return _OUTPUTS[self.dtype]

    # -------- weights in tiles (packed_layout.py)

    @property
    def tile_columns(self) -> int:
        """Columns of the tiles, K'."""
        return self.columns or round_up(self.k, TILE_COLUMNS)

    @property
    def k_blocks(self) -> int:
        """K blocks: blocks of 128 columns."""
        return -(-self.tile_columns // TILE_COLUMNS)

    @property
    def weight_tiles(self) -> int:
        """Tiles of 64 rows."""
        return -(-self.n // TILE_ROWS)

    @property
    def units(self) -> int:
        """Units of 16 rows, including padding of the last tile."""
        return self.weight_tiles * (TILE_ROWS // UNIT_ROWS)

    @property
    def block_units(self) -> int:
        """Units per block in kernels for few tokens."""
        return self.units_of(self.device.sms)

    def units_of(self, owners: int) -> int:
        """Units of each of so many blocks or clusters in kernels for few tokens."""
        mine = -(-self.units // owners)
        return mine if mine <= _MOST_IN_A_WAVE else _MOST_UNITS

    # -------- weights in bit planes (bitplane_layout.py)

    @property
    def chunks(self) -> int:
        """Chunks of 1024 columns."""
        return bitplane_layout.chunks(self.k)

    @property
    def short_sums(self) -> bool:
        """Whether all integer results are below 2^22, so that one addition converts them to float."""
        return bitplane_layout.largest_sum(self.k, self.weights, self.activations) < 2**22
