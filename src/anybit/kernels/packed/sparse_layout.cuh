// Layout of 2:4 sparse weights in a unit (kept codes, then metadata): the device side of sparse_layout.py.
#ifndef ANYBIT_SPARSE_LAYOUT_CUH
#define ANYBIT_SPARSE_LAYOUT_CUH

#include "packed/packed_layout.cuh"

namespace packed {

// Whether a config's weights are 2:4 sparse; configs of dense-only kernels have no such member.
template <class Config> constexpr auto says_sparse(int) -> decltype(Config::sparse) { return Config::sparse; }
template <class Config> constexpr bool says_sparse(long) { return false; }
template <class Config> constexpr bool is_sparse() { return says_sparse<Config>(0); }

constexpr int metadata_bytes = 256;

// The piece of byte j's codes that begins at bit `first`. Twin: sparse_layout.pieces.
constexpr Piece byte_piece(int bits, int j, int first) {
    const int whole = 8 / bits, rest = 8 - whole * bits;
    if (j < bits * whole) return {j % bits, bits * (j / bits), 0, bits};
    const int at = (j - bits * whole) * bits + first;
    return {at / rest, bits * whole + at % rest, first, least(bits - first, rest - at % rest)};
}
// The same for register j with 8-bit or 16-bit fields; in the latter the registers of the upper columns take the high byte.
constexpr Piece kept_piece(int bits, int field, int j, int first) {
    if (field == 8) return byte_piece(bits, j, first);
    const Piece p = byte_piece(bits, 2 * (j >> 2) + (j & 1), first);
    return {p.word, p.bit + 8 * (j >> 1 & 1), p.first, p.count};
}

// A lane's words of a unit and how to extract codes: dense weights, and 2:4 sparse ones.
template <int bits> struct DenseCodes {
    static constexpr int words = 2 * bits, bytes = 256 * bits;
    static constexpr int registers(int field) { return 2 * field; }
    static constexpr Piece place(int field, int j) { return piece(bits, field, j, 0); }
    template <int field, int j, int at> static DEVICE uint32_t take(const uint32_t (&w)[words]) {
        return codes<bits, field, j, at>(w);
    }
    static DEVICE void load(uint32_t (&w)[words], uint32_t unit, uint32_t lane) {
        load_words_shared<bits>(w, unit, lane);
    }
};
template <int bits> struct KeptCodes {
    static constexpr int words = bits, bytes = 128 * bits + metadata_bytes;
    static constexpr int registers(int field) { return field; }
    static constexpr Piece place(int field, int j) { return kept_piece(bits, field, j, 0); }
    template <int field, int j, int at> static DEVICE uint32_t take(const uint32_t (&w)[words]) {
        return codes_from<kept_piece, bits, field, j, at>(w);
    }
    // Codes in the top bits of bytes, XORed with `flip`: 0x80808080 makes them two's complement, u - 2^(bits - 1).
    template <int j, uint32_t flip> static DEVICE uint32_t highest(const uint32_t (&w)[words]) {
        constexpr Piece at = kept_piece(bits, 8, j, 0);
        if constexpr (at.count == bits) {  // one LOP3 after the shift; for `&` and `^` with constants the compiler emits two
            constexpr int shift = 8 - bits - at.bit;
            const uint32_t v = shift < 0 ? w[at.word] >> -shift : w[at.word] << shift;
            return ptx::lop3<(0xf0 & 0xcc) ^ 0xaa>(v, 0x01010101u * (0xffu << (8 - bits) & 0xffu), flip);
        } else
            return take<8, j, 8 - bits>(w) ^ flip;
    }
    static DEVICE void load(uint32_t (&w)[words], uint32_t unit, uint32_t lane) {
        constexpr int fours = words / 4, pair = words & 2, one = words & 1;
        UNROLL for (int i = 0; i < fours; i++) {
            const uint4 v = ptx::ld_shared_v4(unit + i * 512 + lane * 16);
            w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
        }
        if constexpr (pair > 0) {
            const uint2 v = ptx::ld_shared_v2(unit + fours * 512 + lane * 8);
            w[4 * fours] = v.x, w[4 * fours + 1] = v.y;
        }
        if constexpr (one > 0) w[words - 1] = ptx::ld_shared_u32(unit + fours * 512 + pair * 128 + lane * 4);
    }
};
template <bool sparse, int bits> struct CodesOf { using type = DenseCodes<bits>; };
template <int bits> struct CodesOf<true, bits> { using type = KeptCodes<bits>; };
// Size of a unit; sparse ones are padded to whole 32-byte sectors.
template <class C> constexpr int unit_bytes_of() {
    constexpr int size = CodesOf<is_sparse<C>(), C::bits>::type::bytes + scale_bytes(C::group, C::code);
    return is_sparse<C>() ? (size + 31) / 32 * 32 : size;
}

// Sparsity metadata: one word per lane and half unit; empty for dense weights.
template <class Config> struct Metadata {
    uint32_t half[2];
    template <int which> DEVICE void load(uint32_t unit) {
        if constexpr (is_sparse<Config>()) half[which] = ptx::ld_shared_u32(unit + 128 * Config::bits + which * 128 + ptx::lane_id() * 4);
    }
};

}  // namespace packed

#endif  // ANYBIT_SPARSE_LAYOUT_CUH
