// Dense codes of a checkpoint (32-bit words, low bits first, rows one after another) -> the code words of packed tiles.
//
// A block takes one tile of 64 rows by 128 columns: its codes go to shared memory as bytes, then each lane of each warp
// puts together the words of its unit. Columns may come in any order; padding has code 0.
#ifndef ANYBIT_PACKED_REPACK_CUH
#define ANYBIT_PACKED_REPACK_CUH

#include "packed_layout.cuh"

struct Params {
    const uint32_t* words;       // [n, row_words]
    const int32_t* permutation;  // [128 * column blocks]: the channel of each column, -1: padding; or null
    uint8_t* tiles;
    int32_t n, k, row_words, row_tiles, unit_bytes;
};

template <class C> __global__ void __launch_bounds__(C::threads) packed_repack(const __grid_constant__ Params p) {
    constexpr int bits = C::bits, field = C::bytes ? 8 : 16, registers = C::bytes ? 16 : 32, pitch = 128 + 4;
    constexpr uint32_t mask = (1u << bits) - 1u;
    static_assert(C::threads == 128 && C::shared_bytes == 64 * pitch, "four warps and the bytes of a tile");
    const int row_tile = static_cast<int>(blockIdx.x), block = static_cast<int>(blockIdx.y);
    const uint32_t shared = ptx::shared_address(ptx::dynamic_shared());

    // Codes as bytes, four to a word of shared memory.
    for (int i = static_cast<int>(threadIdx.x); i < 64 * 32; i += C::threads) {
        const int row = row_tile * 64 + i / 32, first = block * 128 + i % 32 * 4;
        uint32_t bytes = 0;
        if (row < p.n) {
            const uint32_t* words = p.words + static_cast<size_t>(row) * p.row_words;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int channel = p.permutation != nullptr ? p.permutation[first + e] : first + e;
                if (channel >= 0 && channel < p.k) {
                    const int at = channel * bits, word = at >> 5, shift = at & 31;
                    uint32_t code = words[word] >> shift;
                    if (shift + bits > 32) code |= words[word + 1] << (32 - shift);
                    bytes |= (code & mask) << (8 * e);
                }
            }
        }
        ptx::st_shared_u32(shared + (i / 32) * pitch + i % 32 * 4, bytes);
    }
    __syncthreads();

    const int warp = static_cast<int>(ptx::warp_id()), lane = static_cast<int>(ptx::lane_id()), g = lane >> 2, t = lane & 3;
    const uint32_t mine = shared + (warp * 16 + g) * pitch;
    uint32_t words[2 * bits] = {};
    packed::unroll<0, registers>([&](auto index) {
        constexpr int j = decltype(index)::value;
        uint32_t codes;  // of register j, a field each
        if constexpr (C::bytes) {
            constexpr int column = 32 * (j >> 2) + 16 * ((j >> 1) & 1);
            codes = ptx::ld_shared_u32(mine + (j & 1) * (8 * pitch) + column + 4 * t);
        } else {
            constexpr int column = 16 * (j >> 2) + 8 * ((j >> 1) & 1);
            const uint32_t pair = ptx::ld_shared_u32(mine + (j & 1) * (8 * pitch) + column + (t & ~1) * 2) >> (t & 1) * 16;
            codes = (pair & 0xff) | (pair & 0xff00) << 8;
        }
        constexpr uint32_t ones = field == 16 ? 0x00010001u : 0x01010101u;
        packed::unroll<0, bits>([&](auto bit) {  // pieces, each met at its first bit
            constexpr int first = decltype(bit)::value;
            constexpr packed::Piece piece = packed::piece(bits, field, j, first);
            if constexpr (packed::begins_piece(bits, field, j, first)) {
                const uint32_t part = (codes >> piece.first) & (((1u << piece.count) - 1u) * ones);
                words[piece.word] |= part << piece.bit;
            }
        });
    });
    uint8_t* unit = p.tiles + ((static_cast<size_t>(block) * p.row_tiles + row_tile) * 4 + warp) * p.unit_bytes;
#pragma unroll
    for (int i = 0; i < 2 * bits; i++) {
        const int quad = i / 4 * 512, within = 2 * bits - i / 4 * 4 >= 4 ? 16 : 8;
        *reinterpret_cast<uint32_t*>(unit + quad + lane * within + i % 4 * 4) = words[i];
    }
}

#endif  // ANYBIT_PACKED_REPACK_CUH
