// Codes of value tables (e2m1, nf4, iq4: 4 bits; e4m3: 8) as MMA operands.
//
// As two 16-bit floats: small-float codes only have their bits moved, giving a 16-bit float with too small an exponent
// (scale_of_pair); other tables are looked up a byte at a time with PRMT. As four int8: tables of integers. No NaN in e4m3.
#ifndef ANYBIT_PACKED_TABLES_CUH
#define ANYBIT_PACKED_TABLES_CUH

#include "common/types.cuh"
#include "packed/packed_layout.cuh"

namespace packed {

constexpr bool tabled(Code code) { return code == Code::e2m1 || code == Code::nf4 || code == Code::iq4 || code == Code::e4m3; }

// Value of entry u of a looked-up table. Twin: anybit.codes.packing's tables.
template <Code code> constexpr float entry(int u) {
    constexpr float nf4[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
                               -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
                               0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
    constexpr int iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    if (code == Code::nf4) return nf4[u];
    return static_cast<float>(iq4[u]);
}

// Encodes v (0, or a magnitude of at least 2^-14) as fp16 (mantissa: 10 bits) or bf16 (7), rounded to nearest.
constexpr uint32_t bits_of(float v, int mantissa) {
    const uint32_t sign = v < 0 ? 0x8000u : 0;
    float size = v < 0 ? -v : v;
    if (size == 0) return sign;
    int exponent = mantissa == 10 ? 15 : 127;
    while (size >= 2) size *= 0.5f, exponent++;
    while (size < 1) size *= 2, exponent--;
    const float scaled = (size - 1) * static_cast<float>(1 << mantissa);
    uint32_t whole = static_cast<uint32_t>(scaled);
    const float left = scaled - static_cast<float>(whole);
    whole += left > 0.5f || (left == 0.5f && (whole & 1)) ? 1 : 0;
    return sign | ((static_cast<uint32_t>(exponent) << mantissa) + whole);
}

// Byte `byte` (0 or 1) of four entries from `first` on, as fp16 or bf16, in one word.
template <Code code, bool bfloat> constexpr uint32_t bytes_of(int first, int byte) {
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) word |= (bits_of(entry<code>(first + i), bfloat ? 7 : 10) >> 8 * byte & 255) << 8 * i;
    return word;
}

// Four byte lookups in a 16-entry table: `low` selects within each eight (3 bits of each nibble), `half` which eight.
template <uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3> DEVICE uint32_t look_up(uint32_t low, uint32_t half) {
    return ptx::prmt(ptx::prmt(t0, t1, low), ptx::prmt(t2, t3, low), half);
}

// table_pair gives the codes of register j as two 16-bit floats, each its value divided by scale_of_pair.
template <Code code, bool bfloat> constexpr float scale_of_pair =
    code == Code::e2m1 ? (bfloat ? 0x1p26f : 0x1p14f) : code == Code::e4m3 ? (bfloat ? 0x1p20f : 0x1p8f) : 1.0f;

// bf16: these codes come out 2^100 too small and need a multiply, which `scaled` leaves to a caller that scales anyway.
template <Code code> constexpr bool tiny_as_bf16 = code == Code::e2m1 || code == Code::e4m3;
constexpr uint32_t two_to_100 = 0x71807180u;

template <Code code, bool bfloat, int j, bool scaled = false, int words>
DEVICE uint32_t table_pair(const uint32_t (&w)[words]) {
    constexpr Piece at = piece(words / 2, 16, j, 0);
    const uint32_t word = w[at.word];
    if constexpr (code == Code::e4m3) {
        static_assert(words == 16 && (at.bit == 0 || at.bit == 8), "a code is a byte");
        if constexpr (bfloat) {
            const uint32_t size = at.bit == 0 ? word << 4 : word >> 4, sign = at.bit == 0 ? word << 8 : word;
            const uint32_t small = (sign & 0x80008000u) | (size & 0x07f007f0u);
            return scaled ? small : ptx::mul_bf16x2(small, two_to_100);  // to normal numbers
        }
        const uint32_t size = at.bit == 0 ? word << 7 : word >> 1, sign = at.bit == 0 ? word << 8 : word;
        return (sign & 0x80008000u) | (size & 0x3f803f80u);
    } else if constexpr (code == Code::e2m1) {
        const uint32_t v = floats_at<at.bit / 4>(word);
        if constexpr (!bfloat) return v;
        const uint32_t small = (v & 0xf000f000u) | (v >> 3 & 0x0fff0fffu);
        return scaled ? small : ptx::mul_bf16x2(small, two_to_100);
    } else {
        const uint32_t low = word & 0x77777777u, half = ((word >> 1) & 0x44444444u) | 0x32103210u;
        uint32_t found[2][2];  // [field: column 2t, 2t + 1][lower, upper byte] of four entries
        unroll<0, 2>([&](auto which) {
            constexpr int byte = decltype(which)::value;
            UNROLL for (int h = 0; h < 2; h++)
                found[h][byte] = look_up<bytes_of<code, bfloat>(0, byte), bytes_of<code, bfloat>(4, byte), bytes_of<code, bfloat>(8, byte),
                                         bytes_of<code, bfloat>(12, byte)>(low >> 16 * h, half >> 16 * h);
        });
        // Selects entries at bits 0 and 8, or 4 and 12, of both fields: registers of one step share the lookups.
        constexpr uint32_t two = at.bit & 4 ? 0x7351u : 0x6240u;
        const uint32_t pair[2] = {ptx::prmt(found[0][0], found[0][1], two), ptx::prmt(found[1][0], found[1][1], two)};
        return ptx::prmt(pair[0], pair[1], at.bit < 8 ? 0x5410 : 0x7632);
    }
}

// Operand words of a unit's k16 step, as fp16 divided by scale_of_pair.
template <Code code, int step, int words> DEVICE void table_step(uint32_t (&a)[4], const uint32_t (&w)[words]) {
    a[0] = table_pair<code, false, 4 * step>(w), a[1] = table_pair<code, false, 4 * step + 1>(w);
    a[2] = table_pair<code, false, 4 * step + 2>(w), a[3] = table_pair<code, false, 4 * step + 3>(w);
}

// Tables of integers as unsigned bytes, value + `zero`.
constexpr bool tabled_integers(Code code) { return code == Code::iq4; }
template <Code code, bool = tabled_integers(code)> struct ByteTable {
    DEVICE void load() {}
};
template <Code code> struct ByteTable<code, true> {
    static constexpr int zero = 128;
    uint32_t entries[4];

    static constexpr uint32_t bytes(int first) {
        uint32_t word = 0;
        for (int i = 0; i < 4; i++) word |= static_cast<uint32_t>(static_cast<int>(entry<code>(first + i)) + zero) << 8 * i;
        return word;
    }
    // Keeps the table in registers: known constants would be rematerialized at every lookup, so they come by shuffle.
    DEVICE void load() {
        UNROLL for (int i = 0; i < 4; i++) entries[i] = ptx::shfl(bytes(4 * i) + ptx::lane_id(), 0);
    }
    // Looks up four codes, the nibbles of the low half word.
    DEVICE uint32_t four(uint32_t nibbles) const {
        const uint32_t low = nibbles & 0x77777777u, half = ((nibbles >> 1) & 0x44444444u) | 0x32103210u;
        return ptx::prmt(ptx::prmt(entries[0], entries[1], low), ptx::prmt(entries[2], entries[3], low), half);
    }
    // Looks up the codes in the lower (or upper) nibble of each byte of a word.
    DEVICE uint32_t halves(uint32_t word, bool upper) const { return ptx::prmt(four(word), four(word >> 16), upper ? 0x7531 : 0x6420); }
};

}  // namespace packed

#endif  // ANYBIT_PACKED_TABLES_CUH
