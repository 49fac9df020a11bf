// sm80_packed_digits: shape, operands, and the products of a block of columns by mma.sync.
#ifndef ANYBIT_SM80_PACKED_DIGITS_PARTS_CUH
#define ANYBIT_SM80_PACKED_DIGITS_PARTS_CUH

#include "packed/packed_sums.cuh"
#include "packed/sm80_digits/digit_layout.cuh"

namespace packed {

// Compile-time shape of a Config.
template <class C> struct DigitsShape : DigitLayout<C> {
    using L = DigitLayout<C>;
    static constexpr bool whole_rows = C::group == 0, asym = C::code == Code::asym;
    static constexpr int zeros = asym && whole_rows ? C::units : 1;      // words of zeros by row in registers
    static constexpr int k_warps = C::k_warps, warps = C::row_warps * k_warps, group_threads = C::row_warps * 32;
    static constexpr int unit_size = unit_bytes(C::bits, C::group, C::code);
    static constexpr int slot_bytes = C::units * unit_size;              // of a warp's weights
    static constexpr int block_rows = C::row_warps * C::units * 16;      // at most
    static constexpr int digits = warps * C::stages * slot_bytes;        // offsets in shared memory
    static constexpr int body_bytes = digits + C::k_warps * C::stages * L::block_bytes;
    // Floats a token, so that the four tokens of a quad's lanes meet in different banks.
    static constexpr int sum_pitch = block_rows + 8;
    static constexpr int sums_bytes = C::k_warps * C::tile_m * sum_pitch * 4;
    static constexpr int factors = body_bytes > sums_bytes ? body_bytes : sums_bytes;
    static constexpr int received = factors + block_rows * 8;
    static constexpr int share = C::tile_m / C::cluster_k;               // tokens that a CTA finishes
    static constexpr int sum_barrier = received + (C::cluster_k - 1) * share * block_rows * 4;
    static constexpr int barriers = sum_barrier + 8, bytes = barriers + (C::wgmma ? k_warps * C::stages * 8 : 0);
};

// What a CTA multiplies: `units` units of 16 rows from `tiles` on, those of the next block of columns `stride` bytes behind.
// digits: of the same rows of x, of the first `tokens` of them, -1: all.  row_zero: of the first row, asym whole rows only.
struct DigitTile {
    const uint8_t* tiles;
    const uint8_t* digits;
    const uint8_t* row_zero;
    size_t stride;
    int units, k_blocks, tokens;
};

// Operand word i of row g (0) or g + 8 (1): four codes at low_bit or high_bit of their bytes.
template <class C, int i, int row, int words> DEVICE uint32_t digit_codes(const uint32_t (&w)[words]) {
    constexpr Fields fields = fields_of(C::bits, C::group, i);
    return codes<C::bits, 16, fields.low + row, low_bit(C::bits, C::group)>(w)
        | codes<C::bits, 16, fields.high + row, 8 + high_bit(C::bits, C::group)>(w);
}

// Step `step` of a unit's A operand.
template <class C, int step, int words> DEVICE void widen(uint32_t (&a)[4], const uint32_t (&w)[words]) {
    a[0] = digit_codes<C, 2 * step, 0>(w), a[1] = digit_codes<C, 2 * step, 1>(w);
    a[2] = digit_codes<C, 2 * step + 1, 0>(w), a[3] = digit_codes<C, 2 * step + 1, 1>(w);
}

// Scales of rows g and g + 8 in a unit's group f, and their zeros in the low bytes, asym only.
template <class C> struct RowFacts {
    using S = DigitsShape<C>;
    uint32_t scales, zeros;

    DEVICE void load(uint32_t unit, int f, uint32_t row_zeros, uint32_t lane) {
        scales = 0x3c003c00u, zeros = row_zeros;
        if constexpr (!S::whole_rows) {
            scales = scales_of<C>(unit, f, lane);
            if constexpr (S::asym) zeros = zeros_of<C>(unit, f, lane);
        }
    }
    // Of row g (r = 0) or g + 8.
    DEVICE float scale(int r) const { return ptx::cvt_f32_f16(static_cast<uint16_t>(scales >> (16 * r))); }
    // Adds the digits' products of a row and a token. fact: of the token.
    DEVICE void add(float& sum, int r, int32_t low, int32_t high, float2 fact) const {
        const float offset = S::asym ? static_cast<float>(zeros >> (8 * r) & 255) * fact.y : fact.y;
        const float v = fmaf(static_cast<float>(low + high * 256), fact.x, offset);
        sum = fmaf(scale(r), v, sum);
    }
};
DEVICE float2 token_fact(uint32_t facts, int token) {
    const uint2 v = ptx::ld_shared_v2(facts + token * 8);
    return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

// Products by mma.sync: a block of digits (or halves) stays in registers, lane 4g + t holding column g, and facts of tokens 4n + t.
template <class C> struct MmaProduct {
    using S = DigitsShape<C>;
    uint32_t b[S::token_tiles][8];
    float2 facts[S::token_tiles][S::flushes];

    // Multiplies the units at `units` with the block at `slot`. sums: [unit][token tile][row g or g + 8].
    DEVICE void round(float (&sums)[C::units][S::token_tiles][2], uint32_t slot, uint32_t units, int mine,
                                          const uint32_t (&row_zeros)[S::zeros], uint32_t lane) {
        load(slot, lane);
        UNROLL for (int u = 0; u < C::units; u += C::together)
            if (u < mine) {
                UNROLL for (int e = u; e < u + C::together && e < C::units; e++)  // stale past the last row: never stored
                    multiply(sums[e], units + e * S::unit_size, row_zeros[S::zeros > 1 ? e : 0], lane);
            }
    }

private:
    DEVICE void load(uint32_t slot, uint32_t lane) {
        UNROLL for (int n = 0; n < S::token_tiles; n++) {
            UNROLL for (int half = 0; half < 2; half++) {
                const uint4 v = ptx::ld_shared_v4(slot + n * 1024 + half * 512 + lane * 16);
                b[n][half * 4] = v.x, b[n][half * 4 + 1] = v.y, b[n][half * 4 + 2] = v.z, b[n][half * 4 + 3] = v.w;
            }
            if constexpr (S::floats) facts[n][0].x = ptx::ld_shared_f32(slot + S::facts + (n * 4 + (lane & 3)) * 4);
            else
                UNROLL for (int f = 0; f < S::flushes; f++)
                    facts[n][f] = token_fact(slot + S::facts, f * C::tile_m + n * 4 + static_cast<int>(lane & 3));
        }
    }
    DEVICE void multiply(float (&sums)[S::token_tiles][2], uint32_t unit, uint32_t row_zeros, uint32_t lane) const {
        uint32_t words[2 * C::bits];
        load_words_shared<C::bits>(words, unit, lane);
        if constexpr (S::floats) return multiply_halves(sums, words, unit, lane);
        unroll<0, S::flushes>([&](auto which) {
            constexpr int f = decltype(which)::value;
            RowFacts<C> rows;
            rows.load(unit, f, row_zeros, lane);
            int32_t part[S::token_tiles][4] = {};
            unroll<f * 4 / S::flushes, (f + 1) * 4 / S::flushes>([&](auto index) {
                constexpr int step = decltype(index)::value;
                uint32_t a[4];
                widen<C, step>(a, words);
                UNROLL for (int n = 0; n < S::token_tiles; n++) {
                    const uint32_t digits[2] = {b[n][2 * step], b[n][2 * step + 1]};
                    ptx::mma_m16n8k32_u8s8(part[n], a, digits);
                }
            });
            UNROLL for (int r = 0; r < 2; r++)
                UNROLL for (int n = 0; n < S::token_tiles; n++) rows.add(sums[n][r], r, part[n][2 * r], part[n][2 * r + 1], facts[n][f]);
        });
    }
    // Codes of tables: a group's products meet its scale, a block's the tokens'.
    DEVICE void multiply_halves(float (&sums)[S::token_tiles][2], const uint32_t (&words)[2 * C::bits], uint32_t unit, uint32_t lane) const {
        float block[S::token_tiles][2] = {};
        unroll<0, S::flushes>([&](auto which) {
            constexpr int f = decltype(which)::value;
            RowFacts<C> rows;
            rows.load(unit, f, 0, lane);
            float part[S::token_tiles / 2][4] = {};
            unroll<f * 8 / S::flushes, (f + 1) * 8 / S::flushes>([&](auto index) {
                constexpr int step = decltype(index)::value;
                uint32_t a[4];
                table_step<C::code, step>(a, words);
                UNROLL for (int n = 0; n < S::token_tiles; n += 2) {
                    const uint32_t halves[2] = {b[n + step / 4][step % 4 * 2], b[n + step / 4][step % 4 * 2 + 1]};
                    ptx::mma_m16n8k16_f16(part[n / 2], a, halves);
                }
            });
            UNROLL for (int r = 0; r < 2; r++)
                UNROLL for (int n = 0; n < S::token_tiles; n++) block[n][r] = fmaf(rows.scale(r), part[n / 2][2 * r + n % 2], block[n][r]);
        });
        UNROLL for (int n = 0; n < S::token_tiles; n++)
            UNROLL for (int r = 0; r < 2; r++) sums[n][r] = fmaf(facts[n][0].x, block[n][r], sums[n][r]);
    }
};

}  // namespace packed

#endif  // ANYBIT_SM80_PACKED_DIGITS_PARTS_CUH
