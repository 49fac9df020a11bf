"""TMA tensor maps of row-major matrices (ptx_tensor.cuh)."""

import ctypes
from dataclasses import dataclass, field

from anybit.errors import KernelError
from anybit.jit.driver import driver
from anybit.jit.params import Pointer
from anybit.jit.params import TensorMap as TensorMap

_MOST = 1024
"""Most addresses whose tensor maps a matrix knows."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A row-major matrix [rows, columns] that a kernel accesses by TMA in 128-byte swizzled boxes.

    Elements have 1 or 2 bytes; those outside the matrix read as zeros. pitch: bytes between rows.  known: its tensor
    maps, by address: a plan's calls see few.
    """

    at: Pointer
    element_bytes: int
    rows: int
    columns: int
    pitch: int
    box_columns: int
    box_rows: int
    known: dict[int, bytes] = field(default_factory=dict, repr=False)

    def encoded(self, address: int) -> bytes:
        """The tensor map, for the matrix at an address. Raises KernelError unless both are multiples of 16."""
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= _MOST:
                self.known.clear()
            found = self.known[address] = self._encoded(address)
        return found

    def _encoded(self, address: int) -> bytes:
        cuda = driver()
        kinds, word = cuda.CUtensorMapDataType, cuda.cuuint32_t
        kind = {1: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT16}[self.element_bytes]
        status, encoded = cuda.cuTensorMapEncodeTiled(
            kind,
            2,
            address,
            [cuda.cuuint64_t(self.columns), cuda.cuuint64_t(self.rows)],
            [cuda.cuuint64_t(self.pitch)],
            [word(self.box_columns), word(self.box_rows)],
            [word(1), word(1)],
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if status:
            raise KernelError(
                f"a tensor map of {self.rows} x {self.columns} elements of {self.element_bytes} bytes at {address:#x}, "
                f"row pitch {self.pitch} bytes, is invalid ({status.name}): address and pitch must be multiples of 16 "
                "bytes"
            )
        return ctypes.string_at(encoded.getPtr(), 128)
