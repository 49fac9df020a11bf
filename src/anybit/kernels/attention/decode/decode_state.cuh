// Per-warp state of decode attention, carried from item to item: online softmax, output accumulators, and queries as
// int8 pairs. Also the shapes and the two kinds of block (packed, residual) that decode_block.cuh is instantiated with.
#ifndef ANYBIT_DECODE_STATE_CUH
#define ANYBIT_DECODE_STATE_CUH

#include "attention/kv_page.cuh"
#include "common/softmax.cuh"

namespace decode {

template <class Config> struct Shape : kv_page::Format<Config> {
    using F = kv_page::Format<Config>;
    static constexpr int columns = Config::query_tiles;                              // tiles of 8 queries, or 4 if paired
    static constexpr int width = Config::paired ? 1 : 2;                             // queries per lane per tile
    static constexpr bool raw_queries = Config::key_bits == 16;                      // scale the scores, not the queries
    static constexpr int element_bytes = 2 * Config::head_dim;                       // one 16-bit token, keys or values
    static constexpr int row_bytes = element_bytes + (Config::plain ? 16 : 0);       // padded against bank conflicts
    static constexpr int residual_bytes = Config::residual_tokens * row_bytes;       // one half of a chunk
    static constexpr int largest = Config::plain ? 0 : F::key_bytes > F::value_bytes ? F::key_bytes : F::value_bytes;
    static constexpr int slot_bytes = ((largest > residual_bytes ? largest : residual_bytes) + 127) / 128 * 128;
};

template <class Config> struct Packed {
    static constexpr bool residual = false;
    static constexpr int tokens = Config::block, key_bits = Config::key_bits, value_bits = Config::value_bits;
    static constexpr int chunk = Config::chunk;
    static constexpr bool by_channel = Config::by_channel;
    static constexpr bool general = Config::windowed || Config::softcap || Config::alibi;
};
template <class Config> struct Residual {
    static constexpr bool residual = true;
    static constexpr int tokens = Config::residual_tokens, key_bits = 16, value_bits = 16;
    static constexpr int chunk = 16;  // 16 tokens are contiguous
    static constexpr bool by_channel = false, general = true;
};

// Softmax scale and softcap. All logits are in units of log2.
struct Logits {
    float scale;       // of q.k
    float cap, uncap;  // softcap: cap * tanh(uncap * x)
};

// Mask terms of one column (a query): keys `first` to `last` are visible; `slope` is ALiBi's, in units of log2.
struct Column {
    int first, last, position;
    float slope;
};

// An accumulator tile has eight columns; a lane holds columns 2t and 2t + 1, normally one query each. `paired` (up to
// four queries) gives both to query t: in the scores they are the products with the query's high and low byte, in the
// outputs with tokens 0-7 and 8-15 of every 16, which are summed at the end.
template <class Config> struct State {
    static constexpr int columns = Config::query_tiles, width = Shape<Config>::width;
    float out[columns][Shape<Config>::depth][4];
    float reference[columns][width], sum[columns][width];      // softmax reference; sum over this lane's rows only
    float zero[columns][Shape<Config>::value_groups][width];  // zero-point term, common to all channels of a group
    bool settled;
    bool fresh;  // no block seen: no reference yet

    DEVICE void clear() {
        UNROLL for (int n = 0; n < columns; ++n) {
            UNROLL for (int c = 0; c < Shape<Config>::depth; ++c)
                out[n][c][0] = out[n][c][1] = out[n][c][2] = out[n][c][3] = 0.0f;
            UNROLL for (int x = 0; x < width; ++x) {
                reference[n][x] = softmax::lowest;
                sum[n][x] = 0.0f;
                UNROLL for (int v = 0; v < Shape<Config>::value_groups; ++v) zero[n][v][x] = 0.0f;
            }
        }
        settled = false;
        fresh = true;
    }
    // Output of channel tile c, row g + 8 * h, for this lane's query x.
    DEVICE float output(int n, int c, int h, int x) const {
        return Config::paired ? out[n][c][2 * h] + out[n][c][2 * h + 1] : out[n][c][2 * h + x];
    }
    // Folds the zero-point term into the accumulators. Sums of unsigned codes dwarf the values they encode and tensor cores
    // truncate every accumulation: left alone, long sums would lose the small difference.
    DEVICE void fold() {
        if constexpr (Config::value_bits != 16 && !Config::fp4) {
            UNROLL for (int n = 0; n < columns; ++n) {
                sum_zeros(n);
                UNROLL for (int c = 0; c < Shape<Config>::depth; ++c)
                    UNROLL for (int i = 0; i < 4; i += 3 - width)
                        out[n][c][i] = fmaf(zero[n][group_of(c)][i % width], 1.0f / kv_page::unscale<Config::value_bits>(c, i / 2), out[n][c][i]);
                clear_zeros(n);
            }
        }
    }
    // Converts the accumulators from codes to values: per-row powers of two, zero-point term.
    DEVICE void settle() {
        if (settled) return;
        settled = true;
        if constexpr (Config::value_bits != 16) {
            UNROLL for (int n = 0; n < columns; ++n) {
                sum_zeros(n);
                UNROLL for (int c = 0; c < Shape<Config>::depth; ++c)
                    UNROLL for (int i = 0; i < 4; i += 3 - width) {
                        if constexpr (Config::paired) {
                            out[n][c][i] += out[n][c][i + 1];
                            out[n][c][i + 1] = 0.0f;
                        }
                        const float scale = Config::fp4 ? 1.0f / 256.0f : kv_page::unscale<Config::value_bits>(c, i / 2);
                        out[n][c][i] = fmaf(out[n][c][i], scale, zero[n][group_of(c)][i % width]);
                    }
                clear_zeros(n);
            }
        }
    }
    DEVICE static constexpr int group_of(int c) { return c * 16 / Config::channel_group % Shape<Config>::value_groups; }
    DEVICE void sum_zeros(int n) {
        UNROLL for (int v = 0; v < Shape<Config>::value_groups; ++v)
            UNROLL for (int x = 0; x < width; ++x) sum_rows(zero[n][v][x]);
    }
    DEVICE void clear_zeros(int n) {
        UNROLL for (int v = 0; v < Shape<Config>::value_groups; ++v)
            UNROLL for (int x = 0; x < width; ++x) zero[n][v][x] = 0.0f;
    }
    DEVICE static void sum_rows(float& v) {
        UNROLL for (int i = 4; i < 32; i <<= 1) v += __shfl_xor_sync(0xffffffffu, v, i);
    }
    DEVICE static void most_of_rows(float& v) {
        UNROLL for (int i = 4; i < 32; i <<= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, i));
    }
};

// The float16 factor by which the largest value of column g's query becomes `most`.
template <int depth> DEVICE uint16_t factor_to(float most, const uint32_t (&v)[depth][2]) {
    uint32_t largest = ptx::abs_f16x2(v[0][0]);
    UNROLL for (int i = 1; i < 2 * depth; ++i) largest = ptx::max_f16x2(largest, ptx::abs_f16x2(v[i / 2][i % 2]));
    largest = ptx::max_f16x2(largest, largest >> 16 | largest << 16);
    largest = ptx::max_f16x2(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = ptx::max_f16x2(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    return ptx::cvt_f16_f32(fminf(most * ptx::rcp_approx(kv_page::low_f16(largest)), 32768.0f));
}
// In the accumulator a lane holds another query, that of columns 2t and 2t + 1: 1 / its factor.
DEVICE float inverse_of_column(uint16_t factor) {
    return ptx::rcp_approx(ptx::cvt_f32_f16(static_cast<uint16_t>(__shfl_sync(0xffffffffu, static_cast<uint32_t>(factor), threadIdx.x % 4 * 8))));
}

// Queries split into two int8 values, for 2- and 4-bit keys on integer MMA: one AND extracts four codes of a word, and
// int32 sums are exact. Even columns hold a query's high bytes, odd columns its low bytes:
// value = (high + low / 254) / factor, with `factor` such that the largest value of a query is 127.
template <class Config> struct Bytes {
    static constexpr int depth = Shape<Config>::depth;
    static constexpr float low_unit = 254.0f;
    uint32_t b[depth / 2][2];
    float inverse;  // query t's 1 / (factor * 254): sums are in units of the low byte

    // v: column g's query, float16 pairs of channels (4t, 4t + 1) and (4t + 2, 4t + 3) of every depth tile.
    DEVICE void make(const uint32_t (&v)[depth][2]) {
        const bool low = threadIdx.x / 4 % 2;
        const uint16_t factor = factor_to(127.0f, v);
        inverse = inverse_of_column(factor) * (1.0f / low_unit);
        const uint32_t times = factor | static_cast<uint32_t>(factor) << 16, times_low = low ? times : 0u;
        // 1536 + x rounds x to an integer in float16 (ulp 1), and the low byte of the encoding is that integer's.
        const uint32_t magic = 0x66006600u, sign = low ? 0xbc00bc00u : 0x3c003c00u, back = low ? 0x66006600u : 0xe600e600u;
        const uint32_t ulp = low ? 0x5bf05bf0u : 0x3c003c00u;
        UNROLL for (int j = 0; j < depth; ++j) {
            uint32_t f[2];
            UNROLL for (int p = 0; p < 2; ++p) {
                const uint32_t high = ptx::fma_f16x2(v[j][p], times, magic);
                const uint32_t whole = ptx::fma_f16x2(high, sign, back);        // low columns: minus the integer
                const uint32_t rest = ptx::fma_f16x2(v[j][p], times_low, whole);  // low columns: the remainder
                f[p] = ptx::fma_f16x2(rest, ulp, magic);
            }
            b[j / 2][j % 2] = ptx::prmt(f[0], f[1], 0x6240u);  // in the byte order of the packed codes
        }
    }
};

}  // namespace decode

#endif  // ANYBIT_DECODE_STATE_CUH
