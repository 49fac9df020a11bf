// Where the bits of an operand lie: planes [chunk of 1024 k][bit][row][128 bytes], with the eight 16-byte pieces of a
// row exchanged by the row's number, the 128-byte swizzle of wgmma: tiles of any rows copy as they are, and eight rows
// of one piece lie in different banks. Rows are padded to a multiple of 8. The host side is kernels/gemm/bitplane_layout.py.
#ifndef ANYBIT_BITPLANE_LAYOUT_CUH
#define ANYBIT_BITPLANE_LAYOUT_CUH

#include "common/ptx/base.cuh"
#include "common/types.cuh"

namespace planes {

constexpr int chunk_k = 1024;
constexpr int row_bytes = chunk_k / 8;

// Byte offset of the 16-byte piece that holds k = chunk * 1024 + piece * 128 and the 127 after it.
PTX int64_t piece_offset(int chunk, int plane, int bits, int64_t rows, int row, int piece) {
    return ((static_cast<int64_t>(chunk) * bits + plane) * rows + row) * row_bytes + ((piece ^ (row & 7)) << 4);
}

// Keeps the first `count` bytes of a word; any count, also below 0 and above 4.
PTX uint32_t byte_mask(int count) { return count >= 4 ? 0xffffffffu : count <= 0 ? 0u : (1u << (8 * count)) - 1u; }

}  // namespace planes

#endif  // ANYBIT_BITPLANE_LAYOUT_CUH
