// Where the codes of packed weights lie in a tile, and how a lane takes them out: the device side of packed_layout.py.
//
// A lane holds 2 * bits words of a unit (16 rows by 128 columns). A register of an mma operand is `field` bits wide
// fields, one code each: fields of 16 bits (two of them) for 16-bit activations, of 8 bits (four) for 8-bit ones.
#ifndef ANYBIT_PACKED_LAYOUT_CUH
#define ANYBIT_PACKED_LAYOUT_CUH

#include "common/ptx/base.cuh"
#include "common/types.cuh"

namespace packed {

constexpr int unit_rows = 16, tile_rows = 64, tile_columns = 128;

// `count` bits of a code, from bit `first` up, at `bit` of every field of a word.
struct Piece {
    int word, bit, first, count;
};

// Calls f(Index<begin>) ... f(Index<end - 1>): a loop whose counter is a constant, in its body too.
template <int n> struct Index {
    static constexpr int value = n;
};
template <int begin, int end, class Body> __device__ __forceinline__ void unroll(Body&& body) {
    if constexpr (begin < end) {
        body(Index<begin>{});
        unroll<begin + 1, end>(body);
    }
}

template <bool condition, class Yes, class No> struct Choose { using type = Yes; };
template <class Yes, class No> struct Choose<false, Yes, No> { using type = No; };

__device__ constexpr bool power_of_two(int bits) { return bits == 1 || bits == 2 || bits == 4 || bits == 8; }
__device__ constexpr int least(int a, int b) { return a < b ? a : b; }

// The piece of a register's code that begins at bit `first`: the twin of packed_layout.pieces.
__device__ constexpr Piece piece(int bits, int field, int j, int first) {
    if (power_of_two(bits)) {
        const int r = j & 3, wide = field == 16 ? j >> 3 : j >> 2, odd = field == 16 ? (j >> 2) & 1 : r >> 1;
        const int row = r & 1, high = field == 16 ? r >> 1 : 0;
        if (bits == 8) return {4 * wide + 2 * odd + row, 8 * high, 0, 8};
        if (bits == 4) return {4 * (wide >> 1) + 2 * odd + row, 8 * high + 4 * (wide & 1), 0, 4};
        if (bits == 2) return {2 * odd + row, 8 * high + 2 * wide, 0, 2};
        return {row, 8 * high + wide + 4 * odd, 0, 1};
    }
    const int words = 2 * bits, whole = field / bits, rest = field - whole * bits;
    if (j < words * whole) return {j % words, bits * (j / words), 0, bits};
    const int at = (j - words * whole) * bits + first;
    return {at / rest, bits * whole + at % rest, first, least(bits - first, rest - at % rest)};
}
// Does a piece of a register's code begin at bit `first`?
__device__ constexpr bool begins_piece(int bits, int field, int j, int first) {
    int at = 0;
    while (at < first) at += piece(bits, field, j, at).count;
    return at == first;
}
__device__ constexpr bool left_over(int bits, int field, int j) { return piece(bits, field, j, 0).count < bits; }

// The bit of a field at which the codes of a k32-step's half (`step` counts k16-steps for 16-bit fields, k32-steps for
// 8-bit ones) are cheapest to take out: where they lie, if a field of `limit` usable bits holds them there.
__device__ constexpr int cheapest_bit(int bits, int field, int limit, int step) {
    int at = field;
    for (int r = 0; r < 4; r++) {
        const int j = 4 * step + r;
        if (!power_of_two(bits) && left_over(bits, field, j)) return 0;
        // Codes in the high byte of a 16-bit field need one shift by 8, which all of them share.
        const int bit = power_of_two(bits) ? piece(bits, field, j, 0).bit % 8 : piece(bits, field, j, 0).bit;
        at = least(at, bit);
    }
    // One bit has eight places; the upper four share a shift by 4, which keeps the sets of accumulators to four.
    if (bits == 1) at %= 4;
    return at + bits <= limit ? at : 0;
}

// The same from bit `first` of the codes on; `place` says where their pieces lie (piece, or sparse_layout.cuh's kept_piece).
template <Piece (*place)(int bits, int field, int j, int first), int bits, int field, int j, int at, int first = 0, int words>
__device__ __forceinline__ uint32_t codes_from(const uint32_t (&w)[words]) {
    constexpr Piece p = place(bits, field, j, first);
    constexpr uint32_t ones = field == 16 ? 0x00010001u : 0x01010101u;
    constexpr int to = at + p.first, shift = p.bit - to;
    constexpr uint32_t mask = (((1u << p.count) - 1u) << to) * ones;
    uint32_t v = w[p.word];
    if constexpr (shift > 0) v >>= shift;
    if constexpr (shift < 0) v <<= -shift;
    v &= mask;
    if constexpr (first + p.count < bits) v |= codes_from<place, bits, field, j, at, first + p.count>(w);
    return v;
}

// The codes of register j, each at bit `at` of its field; the rest of the register is zero.
template <int bits, int field, int j, int at, int words>
__device__ __forceinline__ uint32_t codes(const uint32_t (&w)[words]) {
    static_assert(words == 2 * bits, "a lane holds 2 * bits words of a unit");
    return codes_from<piece, bits, field, j, at>(w);
}

// The order of a word of eight e2m1 codes in tiles: the twin of packed_layout.float_order, where it is explained.
__device__ __forceinline__ uint32_t float_order(uint32_t codes) {
    constexpr int moves[8][3] = {{11, 14, 9}, {7, 12, 9}, {15, 11, 18}, {14, 10, 11}, {12, 8, 9}, {13, 15, 15}, {10, 9, 13}, {8, 13, 10}};
    uint32_t word = (codes & 0x00070007u) << 3 | (codes & 0x00080008u) << 6 | (codes >> 4 & 0x00070007u) | (codes >> 1 & 0x00400040u);
#pragma unroll
    for (int i = 0; i < 8; i++) word |= ((codes >> moves[i][1] ^ word >> moves[i][2]) & 0x00010001u) << moves[i][0];
    return word;
}
// Of such a word the codes at `place` of its two halves: sign at bit 15, exponent and mantissa at bits 9 to 11, else zero.
template <int place> __device__ __forceinline__ uint32_t floats_at(uint32_t word) {
    constexpr uint32_t mask = 0x8e008e00u;
    if constexpr (place == 0) return word << 6 & mask;
    if constexpr (place == 1) return word << 9 & mask;
    if constexpr (place == 2) return (word ^ word >> 3) & mask;
    return (word ^ word << 2) & mask;
}

// A lane's words of a unit, straight from global memory; `unit` is the unit's first byte.
template <int bits, int words>
__device__ __forceinline__ void load_words(uint32_t (&w)[words], const uint8_t* unit, uint32_t lane) {
    static_assert(words == 2 * bits, "a lane holds 2 * bits words of a unit");
#pragma unroll
    for (int i = 0; i < words / 4; i++) {
        const uint4 v = ptx::ld_global_nc_v4(unit + i * 512 + lane * 16);
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
    }
    if constexpr (words % 4 == 2) {
        const uint2 v = ptx::ld_global_nc_v2(unit + words / 4 * 512 + lane * 8);
        w[words - 2] = v.x, w[words - 1] = v.y;
    }
}
// The same from shared memory.
template <int bits, int words>
__device__ __forceinline__ void load_words_shared(uint32_t (&w)[words], uint32_t unit, uint32_t lane) {
    static_assert(words == 2 * bits, "a lane holds 2 * bits words of a unit");
#pragma unroll
    for (int i = 0; i < words / 4; i++) {
        const uint4 v = ptx::ld_shared_v4(unit + i * 512 + lane * 16);
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
    }
    if constexpr (words % 4 == 2) {
        const uint2 v = ptx::ld_shared_v2(unit + words / 4 * 512 + lane * 8);
        w[words - 2] = v.x, w[words - 1] = v.y;
    }
}

// Bytes of a unit: codes, then fp16 scales, then (asym) uint8 zeros or (min) fp16 minima, rows g and g + 8 side by side.
__device__ constexpr int subgroups(int group) { return group == 0 ? 0 : group < tile_columns ? tile_columns / group : 1; }
__device__ constexpr int scale_bytes(int group, Code code) {
    return subgroups(group) * (code == Code::asym ? 48 : code == Code::min ? 64 : 32);
}
__device__ constexpr int unit_bytes(int bits, int group, Code code) { return 256 * bits + scale_bytes(group, code); }

}  // namespace packed

#endif  // ANYBIT_PACKED_LAYOUT_CUH
