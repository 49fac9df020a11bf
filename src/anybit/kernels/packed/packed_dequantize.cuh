// Dequantizes packed codes to MMA A fragments in registers: a warp's 16 rows x 128 inputs of a tile (packed_layout.py).
//
// fp16: codes are masked in place in the low ten bits of a 16-bit field, an fp16 subnormal u * 2^(at - 24); one HFMA2 then
// applies scale and zero with a single rounding: w = u * scale - zero * scale, all times 2^-17 to stay in fp16's range.
// bf16: OR makes 128 + u; subtract 128 + zero (exact), multiply by the scale. 8-bit codes go through float32.
// A minimum replaces the addend -zero * scale; in bf16 the multiply becomes an FMA. Tables: packed_tables.cuh.
#ifndef ANYBIT_PACKED_DEQUANTIZE_CUH
#define ANYBIT_PACKED_DEQUANTIZE_CUH

#include "common/types.cuh"
#include "packed/packed_tables.cuh"
#include "packed/sparse_layout.cuh"

namespace packed {

// Implied zero of sym and bipolar codes, doubled, so that bipolar's half-integer is an integer.
template <class Config>
DEVICE constexpr int twice_fixed_zero() {
    return Config::code == Code::bipolar ? (1 << Config::bits) - 1 : 1 << Config::bits;
}

// Codes of a 16-bit field that one shift of the word makes usable in place.
template <int bits> DEVICE constexpr int codes_in_place() { return bits >= 6 ? 1 : bits == 1 ? 4 : 2; }

// Weights of 16 rows x 128 inputs for 16-bit activations.
template <class Config>
struct Dequantize16 {
    static constexpr int bits = Config::bits;
    static constexpr int parts = Config::group == 0 ? 1 : Config::group >= 128 ? 1 : 128 / Config::group;
    static constexpr bool bfloat = Config::operand == Operand::bf16;
    static constexpr bool table = tabled(Config::code);
    static constexpr int places = bfloat || table ? 1 : codes_in_place<bits>();
    static constexpr uint32_t both = 0x00010001u;
    using Codes = typename CodesOf<is_sparse<Config>(), bits>::type;
    uint32_t words[Codes::words];
    uint32_t scales[parts];  // rows g and g + 8
    uint32_t zeros[parts];   // asym: the same rows, two bytes; min: their minima
    uint32_t multiplier[2][places], addend[2];

    // Per-row-tile constants, for per-row scales (which the epilogue applies).
    DEVICE void begin(const uint8_t* row_zero, int first_row, int rows) {
        if (Config::group != 0 || table) return;
        scales[0] = bfloat ? 0x3f803f80u : 0x58005800u;  // 1 as bf16; 128 as fp16
        zeros[0] = 0;
        if (Config::code == Code::asym && first_row < rows) {
            const int row = first_row + ptx::lane_id() / 4;
            zeros[0] = row_zero[row] | row_zero[row + 8] << 8;
        }
        prepare(0);
    }

    // unit: shared address of 16 rows of a tile.
    DEVICE void load(uint32_t unit) {
        Codes::load(words, unit, ptx::lane_id());
        if (Config::group == 0) return;
        const uint32_t g = ptx::lane_id() / 4;
        UNROLL for (int i = 0; i < parts; i++) {
            scales[i] = ptx::ld_shared_u32(unit + Codes::bytes + i * 32 + g * 4);
            if (Config::code == Code::asym) {
                const uint32_t at = unit + Codes::bytes + 32 * parts + i * 16 + g * 2;
                zeros[i] = ptx::ld_shared_u32(at & ~3u) >> (at & 2) * 8 & 0xffff;
            }
            if (Config::code == Code::min) zeros[i] = ptx::ld_shared_u32(unit + Codes::bytes + 32 * parts + i * 32 + g * 4);
        }
        if (parts == 1) prepare(0);
    }
    // The same from registers (loaded from global memory); the zeros' words also hold two other rows'.
    DEVICE void take(const uint32_t (&from_words)[Codes::words], const uint32_t (&from_scales)[parts], const uint32_t (&from_zeros)[parts]) {
        UNROLL for (int i = 0; i < Codes::words; i++) words[i] = from_words[i];
        if (Config::group == 0) return;
        UNROLL for (int i = 0; i < parts; i++) {
            scales[i] = from_scales[i];
            if (Config::code == Code::asym) zeros[i] = from_zeros[i] >> (ptx::lane_id() & 4) * 4 & 0xffff;
            if (Config::code == Code::min) zeros[i] = from_zeros[i];
        }
        if (parts == 1) prepare(0);
    }

    DEVICE void prepare(int part) {
        const uint32_t pair[2] = {ptx::prmt(scales[part], 0, 0x1010), ptx::prmt(scales[part], 0, 0x3232)};
        UNROLL for (int h = 0; h < 2; h++) {
            if constexpr (table) {
                multiplier[h][0] = pair[h];
                if constexpr (bfloat) {
                    const float scale = ptx::cvt_f32_f16(static_cast<uint16_t>(pair[h])) * (tiny_as_bf16<Config::code> ? 0x1p100f : 1.0f);
                    multiplier[h][0] = ptx::cvt_bf16x2_f32(scale, scale);
                }
                continue;
            }
            const uint32_t zero = Config::code == Code::asym ? (zeros[part] >> 8 * h & 0xff) * both : 0;
            const uint32_t minimum = Config::code == Code::min ? ptx::prmt(zeros[part], 0, h == 0 ? 0x1010 : 0x3232) : 0;
            if (bfloat) {
                // A group's fp16 scale has 11 significant bits; bf16 keeps 8, like the weights themselves.
                const float scale = ptx::cvt_f32_f16(static_cast<uint16_t>(pair[h]));
                multiplier[h][0] = Config::group == 0 ? pair[h] : ptx::cvt_bf16x2_f32(scale, scale);
                if (Config::code == Code::asym) addend[h] = bits == 8 ? zero : 0xc300c300u | zero;
                if (Config::code == Code::min) {
                    const float least = ptx::cvt_f32_f16(static_cast<uint16_t>(minimum));
                    addend[h] = bits == 8 ? __float_as_uint(least) : ptx::cvt_bf16x2_f32(least, least);
                }
            } else {
                UNROLL for (int i = 0; i < places; i++)  // 2^(7 - place), as fp16
                    multiplier[h][i] = ptx::mul_f16x2(pair[h], (0x5800u - (i * bits << 10)) * both);
                if (Config::code == Code::asym)
                    addend[h] = ptx::mul_f16x2(multiplier[h][0] ^ 0x80008000u, zero);
                else if (Config::code == Code::min)
                    addend[h] = ptx::mul_f16x2(minimum, 0x0080u * both);  // times 2^-17
                else  // -zero * 2^-17 in units of 2^-24: zero * 2^-17 = (2 zero) * 2^-18 = (2 zero << 6) * 2^-24
                    addend[h] = ptx::mul_f16x2(pair[h], 0x80008000u | (fixed_zero_fp16() * both));
            }
        }
    }
    // zero * 2^-17 as fp16 bits, exact: a subnormal (units of 2^-24) below 2^-14, normal from there on.
    static DEVICE constexpr uint32_t fixed_zero_fp16() {
        uint32_t steps = static_cast<uint32_t>(twice_fixed_zero<Config>()) << 6;  // of 2^-24
        uint32_t exponent = 1;
        if (steps < 1024) return steps;
        while (steps >= 2048) {
            steps >>= 1;
            exponent++;
        }
        return exponent << 10 | (steps & 1023);
    }

    // Steps of 16 inputs from register j on: a[step][r].
    template <int j, int stop, int steps>
    DEVICE void dequantize(uint32_t (&a)[steps][4]) {
        if constexpr (j < stop) {
            constexpr int per_part = Codes::registers(16) / parts;
            if constexpr (parts > 1 && j % per_part == 0) prepare(j / per_part);
            a[j / 4 % steps][j % 4] = one<j>();
            dequantize<j + 1, stop>(a);
        }
    }
    template <int j>
    DEVICE uint32_t one() {
        constexpr int h = j & 1;
        if constexpr (table) {
            const uint32_t v = table_pair<Config::code, bfloat, j, Config::group != 0>(words);
            if constexpr (Config::group == 0) return v;
            return bfloat ? ptx::mul_bf16x2(v, multiplier[h][0]) : ptx::mul_f16x2(v, multiplier[h][0]);
        } else if constexpr (bfloat && bits == 8) {
            const uint32_t raw = Codes::template take<16, j, 0>(words);
            const float base = 8388608.f;
            const float zero = Config::code == Code::asym
                                   ? base + static_cast<float>(addend[h] & 0xff)
                                   : base + 0.5f * static_cast<float>(twice_fixed_zero<Config>() & ~1);
            const float scale = ptx::cvt_f32_bf16(static_cast<uint16_t>(multiplier[h][0]));
            if constexpr (Config::code == Code::min) {
                const float least = __uint_as_float(addend[h]);
                const float low = __uint_as_float(ptx::prmt(raw, 0x4b000000u, 0x7440)) - base;
                const float high = __uint_as_float(ptx::prmt(raw, 0x4b000000u, 0x7442)) - base;
                return ptx::cvt_bf16x2_f32(fmaf(low, scale, least), fmaf(high, scale, least));
            }
            const float half = Config::code == Code::bipolar ? 0.5f : 0.f;
            float low = __uint_as_float(ptx::prmt(raw, 0x4b000000u, 0x7440)) - zero + 0.f;
            float high = __uint_as_float(ptx::prmt(raw, 0x4b000000u, 0x7442)) - zero + 0.f;
            low -= half;
            high -= half;
            return ptx::cvt_bf16x2_f32(low * scale, high * scale);
        } else if constexpr (bfloat) {
            const uint32_t raw = Codes::template take<16, j, 0>(words) | 0x43004300u;
            uint32_t centered;
            if constexpr (Config::code == Code::min) {
                return ptx::fma_bf16x2(ptx::add_bf16x2(raw, 0xc300c300u), multiplier[h][0], addend[h]);
            } else if constexpr (Config::code == Code::asym) {
                centered = ptx::add_bf16x2(raw, addend[h]);
            } else if constexpr (Config::code == Code::sym) {
                centered = ptx::add_bf16x2(raw, (0xc300u | (1u << (bits - 1))) * both);
            } else {  // 128 + u - (128 + (2^b - 1) / 2): the half takes a second subtraction, also exact
                centered = ptx::add_bf16x2(raw, (0xc300u | ((1u << (bits - 1)) - 1)) * both);
                centered = ptx::add_bf16x2(centered, 0xbf00bf00u);
            }
            return ptx::mul_bf16x2(centered, multiplier[h][0]);
        } else {
            constexpr Piece where = Codes::place(16, j);
            constexpr int place = where.count == bits ? where.bit / bits % places : 0;
            return ptx::fma_f16x2(Codes::template take<16, j, place * bits>(words), multiplier[h][place], addend[h]);
        }
    }
    // Factor that the accumulators must be multiplied by, besides the row's scale.
    static DEVICE constexpr float unscale() {
        if (table) return scale_of_pair<Config::code, bfloat>;
        return bfloat ? 1.f : Config::group == 0 ? 1024.f : 131072.f;
    }
};

// Weights of 16 rows x 128 inputs for 8-bit activations: code - zero, doubled for bipolar codes, as int8, or as e4m3 times
// 2^-9, which is exact up to 16.
template <class Config>
struct Dequantize8 {
    static constexpr int bits = Config::bits;
    static constexpr int parts = Config::group == 0 ? 1 : Config::group >= 128 ? 1 : 128 / Config::group;
    static constexpr bool asym = Config::code == Code::asym, bipolar = Config::code == Code::bipolar;
    static constexpr bool integer = Config::operand == Operand::s8;
    static constexpr bool sparse = is_sparse<Config>();
    // int8 with per-row scales multiplies the unsigned codes as they are; the epilogue subtracts zero * (a token's sum of
    // codes) exactly (TileTerms). Not for 2:4 sparse weights, since each row keeps other inputs.
    static constexpr bool raw = integer && Config::group == 0 && !sparse;
    using Codes = typename CodesOf<sparse, bits>::type;
    uint32_t words[Codes::words];
    uint32_t scales[parts], zeros[parts];  // rows g and g + 8
    uint32_t zero[2];                      // in the form that one() needs

    DEVICE void begin(const uint8_t* row_zero, int first_row, int rows) {
        if (asym && Config::group == 0 && !raw && first_row < rows) {
            const int row = first_row + ptx::lane_id() / 4;
            prepare(row_zero[row] | row_zero[row + 8] << 8);
        }
    }
    DEVICE void load(uint32_t unit) {
        Codes::load(words, unit, ptx::lane_id());
        if (Config::group == 0) return;
        const uint32_t g = ptx::lane_id() / 4;
        UNROLL for (int i = 0; i < parts; i++) {
            scales[i] = ptx::ld_shared_u32(unit + Codes::bytes + i * 32 + g * 4);
            if (asym) {
                const uint32_t at = unit + Codes::bytes + 32 * parts + i * 16 + g * 2;
                zeros[i] = ptx::ld_shared_u32(at & ~3u) >> (at & 2) * 8;
            }
        }
    }
    DEVICE void prepare(uint32_t pair) {
        UNROLL for (int h = 0; h < 2; h++) {
            const uint32_t one = pair >> 8 * h & 0xff;
            zero[h] = integer ? one * 0x01010101u : ptx::mul_f16x2(one * 0x00010001u, 0xf800f800u);  // zero * -2^-9
        }
    }
    // The scale of rows g (h = 0) and g + 8 in a part of the unit.
    DEVICE float scale(int part, int h) { return ptx::cvt_f32_f16(static_cast<uint16_t>(scales[part] >> 16 * h)); }

    // Steps of 32 inputs from register j on: a[step][r].
    template <int j, int stop, int steps>
    DEVICE void dequantize(uint32_t (&a)[steps][4]) {
        if constexpr (j < stop) {
            constexpr int per_part = Codes::registers(8) / parts;
            if constexpr (asym && Config::group != 0 && j % per_part == 0) prepare(zeros[j / per_part]);
            a[j / 4 % steps][j % 4] = one<j>();
            dequantize<j + 1, stop>(a);
        }
    }
    template <int j>
    DEVICE uint32_t one() {
        constexpr uint32_t top = 0x80808080u;
        if constexpr (raw) {
            return Codes::template take<8, j, 0>(words);
        } else if constexpr (sparse && !asym) {  // two's complement in the top bits, scaled by 2^(8 - bits)
            return Codes::template highest<j, top>(words);
        } else if constexpr (integer && bits == 8) {
            return Codes::template take<8, j, 0>(words) ^ top;  // sym alone: see why_not
        } else if constexpr (integer) {
            const uint32_t subtract = asym ? zero[j & 1] : (1u << (bits - 1)) * 0x01010101u;
            // Byte-wise subtract without borrows: with its top bit set, each byte is at least its zero.
            const uint32_t centered = ((Codes::template take<8, j, 0>(words) | top) - subtract) ^ top;
            return bipolar ? (centered << 1 & 0xfefefefeu) | 0x01010101u : centered;
        } else {
            const uint32_t raw = Codes::template take<8, j, bipolar ? 1 : 0>(words);
            const uint32_t subtract = asym ? zero[j & 1] : fixed_zero_fp16() * 0x00010001u;
            const uint32_t low = ptx::fma_f16x2(ptx::prmt(raw, 0, 0x4140), 0x78007800u, subtract);
            const uint32_t high = ptx::fma_f16x2(ptx::prmt(raw, 0, 0x4342), 0x78007800u, subtract);
            return ptx::cvt_e4m3x2_f16x2(low) | static_cast<uint32_t>(ptx::cvt_e4m3x2_f16x2(high)) << 16;
        }
    }
    // -zero * 2^-9 (doubled for bipolar) as fp16 bits.
    static DEVICE constexpr uint32_t fixed_zero_fp16() {
        uint32_t mantissa = bipolar ? (1u << bits) - 1 : 1u << (bits - 1), exponent = 15 - 9 + 10;
        while (mantissa < 1024) {
            mantissa <<= 1;
            exponent--;
        }
        return 0x8000u | exponent << 10 | (mantissa & 1023);
    }
    static DEVICE constexpr float unscale() { return sparse && !asym ? 1.f / (1 << (8 - bits)) : (integer ? 1.f : 512.f) * (bipolar ? 0.5f : 1.f); }
};

}  // namespace packed

#endif  // ANYBIT_PACKED_DEQUANTIZE_CUH
