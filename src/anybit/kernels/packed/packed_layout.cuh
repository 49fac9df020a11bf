// Layout of packed weight tiles, and extraction of codes from a lane's words: the device side of packed_layout.py.
//
// A lane holds 2 * bits words of a unit (16 rows by 128 columns). A register of an MMA operand is split into fields, one
// code each: two of 16 bits for 16-bit activations, four of 8 bits for 8-bit ones. `field` is the width.
#ifndef ANYBIT_PACKED_LAYOUT_CUH
#define ANYBIT_PACKED_LAYOUT_CUH

#include "common/ptx/base.cuh"
#include "common/types.cuh"

namespace packed {

constexpr int unit_rows = 16, tile_rows = 64, tile_columns = 128;

// `count` bits of each code, from its bit `first` up, stored at bit `bit` of every field of word `word`.
struct Piece {
    int word, bit, first, count;
};

// Calls body(Index<begin>) ... body(Index<end - 1>): an unrolled loop with a constexpr counter.
template <int n> struct Index {
    static constexpr int value = n;
};
template <int begin, int end, class Body> DEVICE void unroll(Body&& body) {
    if constexpr (begin < end) {
        body(Index<begin>{});
        unroll<begin + 1, end>(body);
    }
}

template <bool condition, class Yes, class No> struct Choose { using type = Yes; };
template <class Yes, class No> struct Choose<false, Yes, No> { using type = No; };
template <class A, class B> constexpr bool same = false;
template <class A> constexpr bool same<A, A> = true;

constexpr bool power_of_two(int bits) { return bits == 1 || bits == 2 || bits == 4 || bits == 8; }
constexpr int least(int a, int b) { return a < b ? a : b; }

// The piece of register j's codes that begins at bit `first`. Twin: packed_layout.pieces.
constexpr Piece piece(int bits, int field, int j, int first) {
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
// Whether a piece of register j's codes begins at bit `first`.
constexpr bool begins_piece(int bits, int field, int j, int first) {
    int at = 0;
    while (at < first) at += piece(bits, field, j, at).count;
    return at == first;
}
constexpr bool left_over(int bits, int field, int j) { return piece(bits, field, j, 0).count < bits; }

// The bit of a field at which the codes of MMA step `step` (k16 for 16-bit fields, k32 for 8-bit ones) are cheapest to
// extract: in place (mask only), if a field of `limit` usable bits holds them there, else 0.
constexpr int cheapest_bit(int bits, int field, int limit, int step) {
    int at = field;
    for (int r = 0; r < 4; r++) {
        const int j = 4 * step + r;
        if (!power_of_two(bits) && left_over(bits, field, j)) return 0;
        // Codes in the high byte of a 16-bit field share one shift by 8.
        const int bit = power_of_two(bits) ? piece(bits, field, j, 0).bit % 8 : piece(bits, field, j, 0).bit;
        at = least(at, bit);
    }
    // 1-bit codes have eight places; the upper four share a shift by 4, so that four accumulator sets suffice.
    if (bits == 1) at %= 4;
    return at + bits <= limit ? at : 0;
}

// As `codes` below, from bit `first` of the codes on. place: the layout (piece, or sparse_layout.cuh's kept_piece).
template <Piece (*place)(int bits, int field, int j, int first), int bits, int field, int j, int at, int first = 0, int words>
DEVICE uint32_t codes_from(const uint32_t (&w)[words]) {
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

// Extracts the codes of register j, each at bit `at` of its field, all other bits zero.
template <int bits, int field, int j, int at, int words>
DEVICE uint32_t codes(const uint32_t (&w)[words]) {
    static_assert(words == 2 * bits, "a lane holds 2 * bits words of a unit");
    return codes_from<piece, bits, field, j, at>(w);
}

// Permutes the bits of a word of eight e2m1 codes to their order in tiles. Twin: packed_layout.float_order, which explains.
DEVICE uint32_t float_order(uint32_t codes) {
    constexpr int moves[8][3] = {{11, 14, 9}, {7, 12, 9}, {15, 11, 18}, {14, 10, 11}, {12, 8, 9}, {13, 15, 15}, {10, 9, 13}, {8, 13, 10}};
    uint32_t word = (codes & 0x00070007u) << 3 | (codes & 0x00080008u) << 6 | (codes >> 4 & 0x00070007u) | (codes >> 1 & 0x00400040u);
    UNROLL for (int i = 0; i < 8; i++) word |= ((codes >> moves[i][1] ^ word >> moves[i][2]) & 0x00010001u) << moves[i][0];
    return word;
}
// Extracts the two codes at `place` of such a word's halves: sign at bit 15, exponent and mantissa at bits 9-11, else zero.
template <int place> DEVICE uint32_t floats_at(uint32_t word) {
    constexpr uint32_t mask = 0x8e008e00u;
    if constexpr (place == 0) return word << 6 & mask;
    if constexpr (place == 1) return word << 9 & mask;
    if constexpr (place == 2) return (word ^ word >> 3) & mask;
    return (word ^ word << 2) & mask;
}

// Loads a lane's words of the unit at `unit` from global memory.
template <int bits, int words>
DEVICE void load_words(uint32_t (&w)[words], const uint8_t* unit, uint32_t lane) {
    static_assert(words == 2 * bits, "a lane holds 2 * bits words of a unit");
    UNROLL for (int i = 0; i < words / 4; i++) {
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
DEVICE void load_words_shared(uint32_t (&w)[words], uint32_t unit, uint32_t lane) {
    static_assert(words == 2 * bits, "a lane holds 2 * bits words of a unit");
    UNROLL for (int i = 0; i < words / 4; i++) {
        const uint4 v = ptx::ld_shared_v4(unit + i * 512 + lane * 16);
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
    }
    if constexpr (words % 4 == 2) {
        const uint2 v = ptx::ld_shared_v2(unit + words / 4 * 512 + lane * 8);
        w[words - 2] = v.x, w[words - 1] = v.y;
    }
}

// Size of a unit: codes, then fp16 scales, then (asym) uint8 zeros or (min) fp16 minima, rows g and g + 8 adjacent.
constexpr int subgroups(int group) { return group == 0 ? 0 : group < tile_columns ? tile_columns / group : 1; }
constexpr int scale_bytes(int group, Code code) {
    return subgroups(group) * (code == Code::asym ? 48 : code == Code::min ? 64 : 32);
}
constexpr int unit_bytes(int bits, int group, Code code) { return 256 * bits + scale_bytes(group, code); }

// Scales of a lane's rows g and g + 8 in group f of a dense unit in shared memory, as fp16.
template <class C> DEVICE uint32_t scales_of(uint32_t unit, int f, uint32_t lane) {
    return ptx::ld_shared_u32(unit + 256 * C::bits + f * 32 + (lane >> 2) * 4);
}
// Their minima, or (asym) their zeros in the low bytes: a word has four rows' zeros.
template <class C> DEVICE uint32_t zeros_of(uint32_t unit, int f, uint32_t lane) {
    const uint32_t zeros = unit + 256 * C::bits + subgroups(C::group) * 32;
    if constexpr (C::code == Code::min) return ptx::ld_shared_u32(zeros + f * 32 + (lane >> 2) * 4);
    return ptx::ld_shared_u32(zeros + f * 16 + (lane >> 3) * 4) >> ((lane >> 2) & 1) * 16;
}

}  // namespace packed

#endif  // ANYBIT_PACKED_LAYOUT_CUH
