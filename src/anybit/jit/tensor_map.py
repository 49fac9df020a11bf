"""TMA tensor maps of row-major matrices (ptx_tensor.cuh)."""

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from anybit.errors import KernelError
from anybit.jit.driver import driver
from anybit.jit.params import CType, Pointer


@dataclass(frozen=True, eq=False)
class Matrix:
    """A row-major matrix [rows, columns] that a kernel accesses by TMA in 128-byte swizzled boxes.

    Elements have 1 or 2 bytes; those outside the matrix read as zeros. pitch: bytes between rows.
    """

    at: Pointer
    element_bytes: int
    rows: int
    columns: int
    pitch: int
    box_columns: int
    box_rows: int

    def encoded(self, address: int) -> bytes:
        """The tensor map, for the matrix at an address. Raises KernelError unless both are multiples of 16."""
        sizes = self.element_bytes, self.rows, self.columns, self.pitch
        return encode_at(address, *sizes, self.box_columns, self.box_rows)


TensorMap = Annotated[bytes | Matrix, CType("128s", 128)]
"""A Params field for a `ptx::TensorMap`."""


@lru_cache(maxsize=1024)
def encode_at(
    address: int, element_bytes: int, rows: int, columns: int, pitch: int, box_columns: int, box_rows: int
) -> bytes:
    """The tensor map of a ``Matrix``."""
    cuda = driver()
    kinds = cuda.CUtensorMapDataType
    kind = {1: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT16}[element_bytes]
    status, encoded = cuda.cuTensorMapEncodeTiled(
        kind,
        2,
        address,
        [cuda.cuuint64_t(columns), cuda.cuuint64_t(rows)],
        [cuda.cuuint64_t(pitch)],
        [cuda.cuuint32_t(box_columns), cuda.cuuint32_t(box_rows)],
        [cuda.cuuint32_t(1), cuda.cuuint32_t(1)],
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status:
        raise KernelError(
            f"a tensor map of {rows} x {columns} elements of {element_bytes} bytes at {address:#x}, row pitch {pitch} "
            f"bytes, is invalid ({status.name}): address and pitch must be multiples of 16 bytes"
        )
    return ctypes.string_at(encoded.getPtr(), 128)
