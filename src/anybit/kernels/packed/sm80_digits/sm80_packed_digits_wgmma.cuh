// sm80_packed_digits: the products of a block of columns by wgmma.
#ifndef ANYBIT_SM80_PACKED_DIGITS_WGMMA_CUH
#define ANYBIT_SM80_PACKED_DIGITS_WGMMA_CUH

#include "common/ptx/wgmma.cuh"
#include "packed/sm80_digits/sm80_packed_digits_parts.cuh"

namespace packed {

// Each warp of a warpgroup has a unit as register operand; digits stay in shared memory. While a product is on its way, the
// one before is converted: otherwise warpgroups fall into step, and tensor cores and conversions wait for each other.
// A job is a group of a unit with up to 32 tokens.
template <class C> struct WgmmaProduct {
    using S = DigitsShape<C>;
    static constexpr int halves = C::tile_m > 32 ? 2 : 1, tokens = C::tile_m / halves, steps = 4 / S::flushes;
    static constexpr int sets = C::units * S::flushes, jobs = sets * halves;  // of register operands
    static constexpr bool kept = S::flushes * S::token_tiles <= 8;  // facts in registers
    int32_t part[2][tokens];
    RowFacts<C> rows[2];
    float2 facts[kept ? S::flushes * S::token_tiles : 1];

    // As of MmaProduct; all units, stale ones past the last row, too, as the warps of a warpgroup multiply together.
    DEVICE void round(float (&sums)[C::units][S::token_tiles][2], uint32_t slot, uint32_t units, int,
                                          const uint32_t (&row_zeros)[S::zeros], uint32_t lane) {
        const uint64_t digits = ptx::wgmma_descriptor(slot, ptx::Swizzle::none, 128, 32 * C::tile_m);
        if constexpr (kept)
            UNROLL for (int i = 0; i < S::flushes * S::token_tiles; i++) facts[i] = token_fact(slot + S::facts, i * 4 + static_cast<int>(lane & 3));
        uint32_t a[2][steps][4], words[2 * C::bits];
        unroll<0, jobs>([&](auto index) {
            constexpr int j = decltype(index)::value, set = j / halves, u = set / S::flushes, f = set % S::flushes, h = j % halves;
            uint32_t (&codes)[steps][4] = a[set & 1];
            if constexpr (h == 0) {
                if constexpr (f == 0) load_words_shared<C::bits>(words, units + u * S::unit_size, lane);
                rows[set & 1].load(units + u * S::unit_size, f, row_zeros[S::zeros > 1 ? u : 0], lane);
                unroll<0, steps>([&](auto which) {
                    constexpr int i = decltype(which)::value;
                    widen<C, f * steps + i>(codes[i], words);
                });
            }
            ptx::wgmma_fence();
            UNROLL for (int i = 0; i < steps; i++)
                ptx::wgmma_u8s8<2 * tokens>(part[j & 1], codes[i],
                                            ptx::wgmma_advance(digits, (f * steps + i) * 64 * C::tile_m + h * 32 * tokens), i > 0);
            ptx::wgmma_commit_group();
            if constexpr (j > 0) {
                ptx::wgmma_wait_group<1>();
                finish<j - 1>(sums, slot, lane);
            }
        });
        // Not carried into the next round: ptxas then serializes all wgmmas.
        ptx::wgmma_wait_group<0>();
        finish<jobs - 1>(sums, slot, lane);
    }

private:
    template <int j> DEVICE void finish(float (&sums)[C::units][S::token_tiles][2], uint32_t slot, uint32_t lane) {
        constexpr int set = j / halves, u = set / S::flushes, f = set % S::flushes, first = j % halves * tokens;
        int32_t (&product)[tokens] = part[j & 1];
        ptx::wgmma_touch(product);
        UNROLL for (int n = 0; n < tokens / 4; n++) {
            const int at = f * C::tile_m + first + n * 4;
            const float2 fact = kept ? facts[at / 4] : token_fact(slot + S::facts, at + static_cast<int>(lane & 3));
            UNROLL for (int r = 0; r < 2; r++)
                rows[set & 1].add(sums[u][first / 4 + n][r], r, product[4 * n + 2 * r], product[4 * n + 2 * r + 1], fact);
        }
    }
};

}  // namespace packed

#endif  // ANYBIT_SM80_PACKED_DIGITS_WGMMA_CUH
