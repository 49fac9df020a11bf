// Activations as signed base-256 digits, in the order of mma's or wgmma's B operand. Written by digitize, read by
// sm80_packed_digits.
//
// A block of 128 columns of a token is fixed point, x = scale * v (v: 14 bits and sign; scale: a power of two), and
// v = 256 * high + low. Four tokens fill the eight columns of a B operand: low and high digits in turns. A block is
//   digits  [tile_m / 4][2][32 lanes][16 bytes]: operand words 0 to 3, then 4 to 7, of a lane; or for wgmma, without a
//           swizzle, [8 words][2 * tile_m digit columns][4 lanes][4 bytes]
//   facts   float2 [flushes][tile_m]: scale / 2^high_bit, as codes are multiplied at that bit; and the sum of a group's columns,
//           negative and times scale and the implied zero point (asym: 1)
// Codes of tables become fp16, and so does x, times a power of two. Eight tokens fill a B operand, token i column 2 * (i % 4) +
// i / 4, so that lanes have the same tokens' sums. A block is
//   halves  [tile_m / 8][4 pairs of k16 steps][32 lanes][16 bytes]
//   facts   float [tile_m]: scale, times the table's
#ifndef ANYBIT_DIGIT_LAYOUT_CUH
#define ANYBIT_DIGIT_LAYOUT_CUH

#include "packed/packed_tables.cuh"

namespace packed {

// Sources of an operand word's four codes: registers of two 16-bit fields (row g's; row g + 8 has the next). The codes of
// `low` become bytes 0 and 2, those of `high` bytes 1 and 3.
struct Fields {
    int low, high;
};
__device__ constexpr bool straddles(int bits, int group) { return bits == 3 && (group == 0 || group >= tile_columns); }
// Of operand word i = 2 * (k32 step) + half. Groups keep their steps; where one spans the block, three-bit codes pair up so
// that one mask serves both fields.
__device__ constexpr Fields fields_of(int bits, int group, int i) {
    if (!straddles(bits, group)) return {4 * i, 4 * i + 2};
    if (i < 6) return {2 * i, 18 + 2 * i};
    return i == 6 ? Fields{12, 14} : Fields{16, 30};
}
// The bits of a byte at which codes are multiplied: the top, reached by left shifts, which integer units share with others.
// Three-bit codes in odd bytes stay one bit higher, so the activations that meet even bytes are doubled.
__device__ constexpr int low_bit(int bits, int group) { return bits == 3 ? (straddles(3, group) ? 3 : 0) : 8 - bits; }
__device__ constexpr int high_bit(int bits, int group) { return low_bit(bits, group) + straddles(bits, group); }
__device__ constexpr int column_of_register(int j) { return 16 * (j >> 2) + 8 * ((j >> 1) & 1); }

template <class C> struct DigitLayout {
    static_assert(C::tile_m % 4 == 0, "four tokens fill a B operand");
    static constexpr int groups = subgroups(C::group), flushes = groups == 0 ? 1 : groups;
    static constexpr bool floats = tabled(C::code);
    // The token of 16 bytes at `at` for mma.sync; 0 for facts, which are of all.
    static __device__ constexpr int token_of(int at) {
        if (at >= facts) return 0;
        if (floats) return at / 2048 * 8 + at / 64 % 2 * 4 + at / 128 % 4;
        return at / 1024 * 4 + at / 128 % 4;
    }
    static constexpr int token_tiles = C::tile_m / 4, facts = token_tiles * 1024, block_bytes = facts + C::tile_m * (floats ? 4 : flushes * 8);
};

}  // namespace packed

#endif  // ANYBIT_DIGIT_LAYOUT_CUH
