// Bit-plane layout: [chunk of 1024 k][bit][row][128 bytes], pre-swizzled in global memory: a row's eight 16-byte pieces are
// XORed with row % 8, wgmma's 128-byte swizzle, so that a tile of any rows is one plain bulk copy and fragment loads are
// free of bank conflicts. Rows are padded to a multiple of 8. Host side: kernels/bitplane/bitplane_layout.py.
#ifndef ANYBIT_BITPLANE_LAYOUT_CUH
#define ANYBIT_BITPLANE_LAYOUT_CUH

#include "common/ptx/base.cuh"
#include "common/types.cuh"

namespace planes {

constexpr int chunk_k = 1024;
constexpr int row_bytes = chunk_k / 8;

// Byte offset of the 16-byte piece that holds k = chunk * 1024 + piece * 128 and the 127 after it.
DEVICE int64_t piece_offset(int chunk, int plane, int bits, int64_t rows, int row, int piece) {
    return ((static_cast<int64_t>(chunk) * bits + plane) * rows + row) * row_bytes + ((piece ^ (row & 7)) << 4);
}

// Mask of the first `count` bytes of a word; count may be below 0 or above 4.
DEVICE uint32_t byte_mask(int count) { return count >= 4 ? 0xffffffffu : count <= 0 ? 0u : (1u << (8 * count)) - 1u; }

}  // namespace planes

#endif  // ANYBIT_BITPLANE_LAYOUT_CUH
