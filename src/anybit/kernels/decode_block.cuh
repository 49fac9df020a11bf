// What one warp does with one block of keys and values: scores, probabilities, weighted values.
//
// A block of packed tokens and a chunk of the 16-bit residual go through the same code; `Part` says which it is.
// Scores come out with tokens as rows and queries as columns, and the output is accumulated transposed (channels as
// rows), so that keys and values are both the A operand, which is read from shared memory without any shuffle, and so
// that one movmatrix turns a score tile into the B operand of the second product.
#ifndef ANYBIT_DECODE_BLOCK_CUH
#define ANYBIT_DECODE_BLOCK_CUH

#include "kvpage.cuh"
#include "softmax.cuh"

namespace decode {

template <class Config> struct Shape {
    static constexpr int depth = Config::head_dim / 16;                              // channel tiles
    static constexpr int groups = Config::head_dim / Config::channel_group;          // of a token's channels
    static constexpr int value_groups = Config::value_bits == 16 ? 1 : groups;
    static constexpr int columns = Config::query_tiles;                              // tiles of 8 queries
    static constexpr bool raw_queries = Config::key_bits == 16;                      // not scaled in advance
    static constexpr int element_bytes = 2 * Config::head_dim;                       // of a token in 16 bits
    static constexpr int key_codes = Config::block * Config::head_dim * Config::key_bits / 8;
    static constexpr int key_parameters =
        Config::key_bits == 16 ? 0
        : 4 * (Config::by_channel ? Config::head_dim * (Config::block / Config::chunk) : Config::block * groups);
    static constexpr int key_bytes = key_codes + key_parameters;
    static constexpr int value_codes = Config::block * Config::head_dim * Config::value_bits / 8;
    static constexpr int value_parameters = Config::value_bits == 16 ? 0 : 4 * Config::block * groups;
    static constexpr int value_bytes = value_codes + value_parameters + (Config::value_bits == 16 ? 0 : 32);
    static constexpr int block_bytes = (key_bytes + value_bytes + 127) / 128 * 128;
    static constexpr int residual_bytes = Config::residual_tokens * element_bytes;   // of one half
    static constexpr int largest = key_bytes > value_bytes ? key_bytes : value_bytes;
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
    static constexpr int chunk = 16;  // sixteen tokens are one run of memory
    static constexpr bool by_channel = false, general = true;
};

// What the logits of a block go through, besides the scale.
struct Logits {
    float scale;       // of q.k, in units of log2
    float cap, uncap;  // softcap: cap * tanh(uncap * x), in units of log2
};

// One column (a query) as a lane sees it: keys from `first` to `last` are visible; `slope` in units of log2.
struct Column {
    int first, last, position;
    float slope;
};

template <class Config> struct State {
    static constexpr int columns = Config::query_tiles;
    float out[columns][Shape<Config>::depth][4];
    float reference[columns][2], sum[columns][2];      // sums of this lane's rows only
    float zero[columns][Shape<Config>::value_groups][2];  // what the values' zeros add to every channel of a group
    bool settled;

    PTX void clear() {
#pragma unroll
        for (int n = 0; n < columns; ++n) {
#pragma unroll
            for (int c = 0; c < Shape<Config>::depth; ++c)
                out[n][c][0] = out[n][c][1] = out[n][c][2] = out[n][c][3] = 0.0f;
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                reference[n][x] = softmax::lowest;
                sum[n][x] = 0.0f;
#pragma unroll
                for (int v = 0; v < Shape<Config>::value_groups; ++v) zero[n][v][x] = 0.0f;
            }
        }
        settled = false;
    }
    // Adds what the zeros contributed so far. Unsigned codes sum to far more than the values they stand for, and tensor
    // cores round every accumulation towards zero: without this, long sums lose the small difference that is left.
    PTX void fold() {
        if constexpr (Config::value_bits != 16) {
#pragma unroll
            for (int n = 0; n < columns; ++n) {
#pragma unroll
                for (int v = 0; v < Shape<Config>::value_groups; ++v)
#pragma unroll
                    for (int x = 0; x < 2; ++x) sum_rows(zero[n][v][x]);
#pragma unroll
                for (int c = 0; c < Shape<Config>::depth; ++c)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        out[n][c][i] = fmaf(zero[n][c * 16 / Config::channel_group % Shape<Config>::value_groups][i % 2],
                                            1.0f / kvpage::unscale<Config::value_bits>(c, i / 2), out[n][c][i]);
#pragma unroll
                for (int v = 0; v < Shape<Config>::value_groups; ++v) zero[n][v][0] = zero[n][v][1] = 0.0f;
            }
        }
    }
    // From code units to values: the powers of two of the rows, and the zeros.
    PTX void settle() {
        if (settled) return;
        settled = true;
        if constexpr (Config::value_bits != 16) {
#pragma unroll
            for (int n = 0; n < columns; ++n) {
#pragma unroll
                for (int v = 0; v < Shape<Config>::value_groups; ++v)
#pragma unroll
                    for (int x = 0; x < 2; ++x) sum_rows(zero[n][v][x]);
#pragma unroll
                for (int c = 0; c < Shape<Config>::depth; ++c)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        out[n][c][i] = fmaf(out[n][c][i], kvpage::unscale<Config::value_bits>(c, i / 2),
                                            zero[n][c * 16 / Config::channel_group % Shape<Config>::value_groups][i % 2]);
#pragma unroll
                for (int v = 0; v < Shape<Config>::value_groups; ++v) zero[n][v][0] = zero[n][v][1] = 0.0f;
            }
        }
    }
    PTX static void sum_rows(float& v) {
#pragma unroll
        for (int i = 4; i < 32; i <<= 1) v += __shfl_xor_sync(0xffffffffu, v, i);
    }
    PTX static void most_of_rows(float& v) {
#pragma unroll
        for (int i = 4; i < 32; i <<= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, i));
    }
};

template <bool bf16> PTX void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (bf16) ptx::mma_m16n8k16_bf16(d, a, b);
    else ptx::mma_m16n8k16_f16(d, a, b);
}

template <class Config, class Part> struct Block {
    using S = Shape<Config>;
    static constexpr int tiles = Part::tokens / 16, columns = Config::query_tiles, depth = S::depth;
    static constexpr int chunks = Part::tokens / Part::chunk, chunk_tiles = Part::chunk / 16;
    static constexpr int key_groups = Part::by_channel || Part::key_bits == 16 ? 1 : S::groups;
    static constexpr int value_groups = Part::value_bits == 16 ? 1 : S::groups;
    static constexpr bool key_bf16 = Config::bf16 && Part::key_bits == 16;
    static constexpr bool value_bf16 = Config::bf16 && Part::value_bits == 16;
    // Channel-wise keys without masks keep raw scores: their scale is a power of two and their zeros one number a chunk.
    static constexpr bool folded = Part::key_bits != 16 && Part::by_channel && !Part::general;

    float score[columns][tiles][4];
    float base[columns][chunks][2];         // folded: what the zeros of the keys add
    uint32_t probability[columns][tiles][2];
    float lane_sum[columns][2], lane_zero[columns][value_groups][2];

    // ---- scores: S = K Q^T
    PTX void scores(uint32_t keys, const uint32_t (&q)[columns][depth][2], const Logits& logits) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        using U = kvpage::Unit<Part::key_bits>;
        kvpage::Words words{keys + 16 * lane, {}};
        float zeros[columns][key_groups > chunks ? key_groups : chunks][4] = {};
        float partial[key_groups > 1 ? columns : 1][key_groups > 1 ? tiles : 1][4] = {};
#pragma unroll
        for (int n = 0; n < columns; ++n)
#pragma unroll
            for (int i = 0; i < tiles; ++i) score[n][i][0] = score[n][i][1] = score[n][i][2] = score[n][i][3] = 0.0f;
        int index = 0;
#pragma unroll
        for (int c = 0; c < chunks; ++c)
#pragma unroll
            for (int j = 0; j < depth; ++j) {
                uint32_t b[columns][2];
                if constexpr (Part::key_bits != 16 && Part::by_channel) {
                    const uint4 p = ptx::ld_shared_v4(keys + S::key_codes + ((c * depth + j) * 4 + t) * 16);
                    const uint32_t z[4] = {p.x, p.y, p.z, p.w};  // rows g: zeros; rows g + 8: scales, not needed
#pragma unroll
                    for (int n = 0; n < columns; ++n) {
                        b[n][0] = ptx::mul_f16x2(q[n][j][0], p.y);
                        b[n][1] = ptx::mul_f16x2(q[n][j][1], p.w);
                        mma<false>(zeros[n][c], z, q[n][j]);
                    }
                } else {
                    const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
                    for (int n = 0; n < columns; ++n) {
                        b[n][0] = q[n][j][0];
                        b[n][1] = q[n][j][1];
                        if constexpr (Part::key_bits != 16) mma<false>(zeros[n][j * key_groups / depth], ones, q[n][j]);
                    }
                }
#pragma unroll
                for (int u = 0; u < chunk_tiles / U::tiles; ++u, index += U::words) {
                    const uint32_t* w = words.at(index);
#pragma unroll
                    for (int x = 0; x < U::tiles; ++x) {
                        uint32_t a[4];
                        kvpage::fragment<Part::key_bits>(a, w, x);
                        const int i = c * chunk_tiles + u * U::tiles + x;
#pragma unroll
                        for (int n = 0; n < columns; ++n)
                            if constexpr (key_groups > 1) mma<key_bf16>(partial[n][i], a, b[n]);
                            else mma<key_bf16>(score[n][i], a, b[n]);
                    }
                }
                if constexpr (key_groups > 1)
                    if ((j + 1) * key_groups % depth == 0) {
                        const int group = j * key_groups / depth;
#pragma unroll
                        for (int n = 0; n < columns; ++n) {
                            by_token(keys, group, g, score[n], partial[n], zeros[n][group]);
#pragma unroll
                            for (int i = 0; i < tiles; ++i)
                                partial[n][i][0] = partial[n][i][1] = partial[n][i][2] = partial[n][i][3] = 0.0f;
                        }
                    }
            }
#pragma unroll
        for (int n = 0; n < columns; ++n) {
            if constexpr (key_groups == 1 && Part::key_bits != 16 && !Part::by_channel)
                by_token(keys, 0, g, score[n], score[n], zeros[n][0]);
            if constexpr (folded) {
#pragma unroll
                for (int c = 0; c < chunks; ++c) { base[n][c][0] = zeros[n][c][0]; base[n][c][1] = zeros[n][c][1]; }
            } else if constexpr (Part::key_bits == 16 || Part::by_channel) {
#pragma unroll
                for (int i = 0; i < tiles; ++i)
#pragma unroll
                    for (int x = 0; x < 4; ++x) {
                        if constexpr (Part::key_bits != 16) score[n][i][x] = fmaf(score[n][i][x], kvpage::unscale<Part::key_bits>(i, x / 2),
                                                   zeros[n][i / chunk_tiles][x % 2]);
                        else if constexpr (S::raw_queries || Config::bf16) score[n][i][x] *= logits.scale;
                    }
            }
        }
    }
    // Adds one group's scores, scaled by its tokens' scales, and its zeros times the sum of the queries' channels.
    PTX void by_token(uint32_t keys, int group, int g, float (&to)[tiles][4], float (&from)[tiles][4], float (&ones)[4]) {
        const bool first = key_groups == 1 || group == 0;
#pragma unroll
        for (int pair = 0; pair < tiles / 2; ++pair) {
            const uint4 p = ptx::ld_shared_v4(keys + S::key_codes + ((group * (tiles / 2) + pair) * 8 + g) * 16);
            const uint32_t rows[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int i = 2 * pair + r / 2;
                const float scale = kvpage::low_f16(rows[r]) * kvpage::unscale<Part::key_bits>(i, r % 2);
                const float zero = kvpage::high_f16(rows[r]);
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const float more = first ? zero * ones[x] : fmaf(zero, ones[x], to[i][r % 2 * 2 + x]);
                    to[i][r % 2 * 2 + x] = fmaf(from[i][r % 2 * 2 + x], scale, more);
                }
            }
        }
    }

    // ---- what a model does to its logits; `position` is that of the block's first token
    PTX void mask(int position, const Logits& logits, const Column (&column)[columns][2]) {
        if constexpr (Part::general) {
            const int g = threadIdx.x % 32 / 4;
#pragma unroll
            for (int n = 0; n < columns; ++n)
#pragma unroll
                for (int i = 0; i < tiles; ++i)
#pragma unroll
                    for (int x = 0; x < 4; ++x) {
                        const Column& c = column[n][x % 2];
                        const int key = position + 16 * i + g + x / 2 * 8;
                        float& s = score[n][i][x];
                        if constexpr (Config::softcap)  // tanh(y) = 1 - 2 / (e^2y + 1), to full precision
                            s = logits.cap * (1.0f - 2.0f * ptx::rcp_approx(ptx::ex2_approx(s * logits.uncap) + 1.0f));
                        if constexpr (Config::alibi) s = fmaf(c.slope, static_cast<float>(key - c.position), s);
                        if constexpr (Part::residual || Config::windowed)
                            if (key < c.first || key > c.last) s = -__int_as_float(0x7f800000);
                    }
        }
    }

    // ---- probabilities against the references at hand; sums are kept apart, in case these were too low
    PTX void exponentials(uint32_t values, const State<Config>& state) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int n = 0; n < columns; ++n) {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                lane_sum[n][x] = 0.0f;
#pragma unroll
                for (int v = 0; v < value_groups; ++v) lane_zero[n][v][x] = 0.0f;
            }
#pragma unroll
            for (int pair = 0; pair < (tiles + 1) / 2; ++pair) {
                uint32_t rows[4] = {};
                if constexpr (Part::value_bits != 16 && value_groups == 1) {
                    const uint4 p = ptx::ld_shared_v4(values + S::value_codes + (pair * 8 + g) * 16);
                    rows[0] = p.x; rows[1] = p.y; rows[2] = p.z; rows[3] = p.w;
                }
#pragma unroll
                for (int r = 0; r < 4 && 2 * pair + r / 2 < tiles; ++r) {
                    const int i = 2 * pair + r / 2, h = r % 2;
                    float e[2];
#pragma unroll
                    for (int x = 0; x < 2; ++x) {
                        if constexpr (folded)
                            e[x] = ptx::ex2_approx(fmaf(score[n][i][2 * h + x], kvpage::unscale<Part::key_bits>(i, h),
                                                        base[n][i / chunk_tiles][x] - state.reference[n][x]));
                        else
                            e[x] = ptx::ex2_approx(score[n][i][2 * h + x] - state.reference[n][x]);
                        lane_sum[n][x] += e[x];
                    }
                    if constexpr (value_bf16) probability[n][i][h] = ptx::cvt_bf16x2_f32(e[0], e[1]);
                    else probability[n][i][h] = ptx::cvt_f16x2_f32(e[0], e[1]);
                    if constexpr (Part::value_bits != 16 && value_groups == 1) {
                        const float zero = kvpage::high_f16(rows[r]);
#pragma unroll
                        for (int x = 0; x < 2; ++x) lane_zero[n][0][x] = fmaf(e[x], zero, lane_zero[n][0][x]);
                        probability[n][i][h] = ptx::mul_f16x2(probability[n][i][h], kvpage::twice_low(rows[r]));
                    }
                    if constexpr (value_groups > 1) {
#pragma unroll
                        for (int v = 0; v < value_groups; ++v) {
                            const float zero = kvpage::high_f16(token_word(values, v, i, h, g));
#pragma unroll
                            for (int x = 0; x < 2; ++x) lane_zero[n][v][x] = fmaf(e[x], zero, lane_zero[n][v][x]);
                        }
                    }
                }
            }
        }
    }
    // (scale, zero) of the values of the token in row g + 8 * h of tile i, group v.
    PTX uint32_t token_word(uint32_t values, int v, int i, int h, int g) {
        return ptx::ld_shared_u32(values + S::value_codes + ((v * (tiles / 2) + i / 2) * 8 + g) * 16 + (i % 2 * 2 + h) * 4);
    }

    // The references only move when a lane's sum says that they must: most blocks need no maximum and no rescaling.
    PTX void probabilities(uint32_t values, State<Config>& state) {
        float limit = 1024.0f;
        if constexpr (Part::value_bits != 16) limit = ptx::ld_shared_f32(values + S::value_codes + S::value_parameters);
        exponentials(values, state);
        bool high = false;
#pragma unroll
        for (int n = 0; n < columns; ++n) high = high || !(lane_sum[n][0] < limit) || !(lane_sum[n][1] < limit);
        if (__any_sync(0xffffffffu, high)) {
#pragma unroll
            for (int n = 0; n < columns; ++n)
#pragma unroll
                for (int x = 0; x < 2; ++x) raise(n, x, state);
            exponentials(values, state);
        }
#pragma unroll
        for (int n = 0; n < columns; ++n)
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                state.sum[n][x] += lane_sum[n][x];
                if constexpr (Part::value_bits != 16)
#pragma unroll
                    for (int v = 0; v < value_groups; ++v) state.zero[n][v][x] += lane_zero[n][v][x];
            }
    }
    PTX void raise(int n, int x, State<Config>& state) {
        float most = softmax::lowest;
#pragma unroll
        for (int i = 0; i < tiles; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float s = score[n][i][2 * h + x];
                if constexpr (folded) s = fmaf(s, kvpage::unscale<Part::key_bits>(i, h), base[n][i / chunk_tiles][x]);
                most = fmaxf(most, s);
            }
        State<Config>::most_of_rows(most);
        most = fmaxf(most, state.reference[n][x]);
        const float weight = softmax::State::weight(state.reference[n][x], most);
        state.reference[n][x] = most;
        state.sum[n][x] *= weight;
#pragma unroll
        for (int v = 0; v < S::value_groups; ++v) state.zero[n][v][x] *= weight;
#pragma unroll
        for (int c = 0; c < depth; ++c) {
            state.out[n][c][x] *= weight;
            state.out[n][c][2 + x] *= weight;
        }
    }

    // ---- weighted values: O^T += V^T P^T; of the residual, tokens at or after `end` (from its first) are not there
    PTX void weigh(uint32_t values, State<Config>& state, int end) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        using U = kvpage::Unit<Part::value_bits>;
        kvpage::Words words{values + 16 * lane, {}};
        int index = 0;
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
            uint32_t b[columns][value_groups][2];
#pragma unroll
            for (int n = 0; n < columns; ++n)
#pragma unroll
                for (int v = 0; v < value_groups; ++v)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        uint32_t p = probability[n][i][h];
                        if constexpr (value_groups > 1)
                            p = ptx::mul_f16x2(p, kvpage::twice_low(token_word(values, v, i, h, g)));
                        b[n][v][h] = ptx::movmatrix_trans(p);
                    }
#pragma unroll
            for (int u = 0; u < depth / U::tiles; ++u, index += U::words) {
                const uint32_t* w = words.at(index);
#pragma unroll
                for (int x = 0; x < U::tiles; ++x) {
                    uint32_t a[4];
                    kvpage::fragment<Part::value_bits>(a, w, x);
                    if constexpr (Part::residual) {  // a slot not written yet may hold anything, even a NaN
#pragma unroll
                        for (int k = 0; k < 2; ++k) {
                            const int left = end - (16 * i + 8 * k + 2 * t);
                            const uint32_t keep = left >= 2 ? 0xffffffffu : left == 1 ? 0x0000ffffu : 0u;
                            a[2 * k] &= keep;
                            a[2 * k + 1] &= keep;
                        }
                    }
                    const int c = u * U::tiles + x;
#pragma unroll
                    for (int n = 0; n < columns; ++n)
                        mma<value_bf16>(state.out[n][c], a, b[n][c * value_groups / depth]);
                }
            }
        }
    }
};

}  // namespace decode

#endif  // ANYBIT_DECODE_BLOCK_CUH
