// One warp, one block of keys and values: S = K Q^T, online softmax, O^T += V^T P^T.
//
// Packed blocks and chunks of the 16-bit residual share this code; `Part` selects. Both products are transposed (tokens,
// then channels are M; queries are N), so that keys and values are both the A operand, whose fragments come from shared
// memory without shuffles, and one movmatrix turns a score tile into the B operand of the second product.
#ifndef ANYBIT_DECODE_BLOCK_CUH
#define ANYBIT_DECODE_BLOCK_CUH

#include "attention/decode/decode_state.cuh"

namespace decode {

template <bool bf16> DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (bf16) ptx::mma_m16n8k16_bf16(d, a, b);
    else ptx::mma_m16n8k16_f16(d, a, b);
}

template <class Config> struct Queries;

template <class Config, class Part> struct Block {
    using S = Shape<Config>;
    static constexpr int tiles = Part::tokens / 16, columns = Config::query_tiles, depth = S::depth;
    static constexpr int chunks = Part::tokens / Part::chunk, chunk_tiles = Part::chunk / 16;
    static constexpr int key_groups = Part::by_channel || Part::key_bits == 16 ? 1 : S::groups;
    static constexpr int value_groups = Part::value_bits == 16 ? 1 : S::groups;
    static constexpr bool key_bf16 = Config::bf16 && Part::key_bits == 16;
    static constexpr bool value_bf16 = Config::bf16 && Part::value_bits == 16;
    static constexpr int width = S::width;
    static constexpr bool integer = Config::paired && Part::key_bits <= 4;
    // 8-bit codes resolve the float16 rounding error of query * scale: a second MMA adds that error back.
    static constexpr bool split = Part::key_bits == 8 && Part::by_channel;
    // Unmasked per-channel keys keep raw scores: score_scale() and the zero-point term `base` go into the FMA before ex2.
    static constexpr bool folded = Part::key_bits != 16 && Part::by_channel && !Part::general;

    float score[columns][tiles][2 * width];
    float base[columns][chunks][width];     // folded: the keys' zero-point term
    float factor[integer ? columns : 1][chunks];  // integer: scale of the int32 scores
    uint32_t probability[columns][tiles][width];  // paired: rows g and g + 8 of one query; else two queries of one row
    float lane_sum[columns][width], lane_zero[columns][value_groups][width];

    // Scale of the scores of tile i, rows g + 8 * h.
    DEVICE float score_scale(int n, int i, int h) const {
        if constexpr (integer) return factor[n][i / chunk_tiles] * (1.0f / (Part::key_bits == 4 ? (h ? 16.0f : 1.0f) : (i & 1 ? (h ? 64.0f : 16.0f) : (h ? 4.0f : 1.0f))));
        else return kv_page::unscale<Part::key_bits>(i, h);
    }

    DEVICE void scores(uint32_t keys, const Queries<Config>& queries, const Logits& logits) {
        if constexpr (integer) integer_scores(keys, queries);
        else float_scores(keys, queries.q, logits);
    }

    // ---- scores: S = K Q^T
    DEVICE void float_scores(uint32_t keys, const uint32_t (&q)[columns][depth][2], const Logits& logits) {
        float sums[columns][tiles][4];
        float_products(keys, q, logits, sums);
        UNROLL for (int n = 0; n < columns; ++n)
            UNROLL for (int i = 0; i < tiles; ++i)
                UNROLL for (int h = 0; h < 2; ++h)
                    UNROLL for (int x = 0; x < width; ++x) score[n][i][h * width + x] = sums[n][i][2 * h + x];
    }
    DEVICE void float_products(uint32_t keys, const uint32_t (&q)[columns][depth][2], const Logits& logits, float (&score)[columns][tiles][4]) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        using U = kv_page::Bundle<Part::key_bits>;
        kv_page::Words words{keys + 16 * lane, {}};
        float zeros[columns][key_groups > chunks ? key_groups : chunks][4] = {};
        float partial[key_groups > 1 ? columns : 1][key_groups > 1 ? tiles : 1][4] = {};
        UNROLL for (int n = 0; n < columns; ++n)
            UNROLL for (int i = 0; i < tiles; ++i) score[n][i][0] = score[n][i][1] = score[n][i][2] = score[n][i][3] = 0.0f;
        int index = 0;
        UNROLL for (int c = 0; c < chunks; ++c)
            UNROLL for (int j = 0; j < depth; ++j) {
                uint32_t b[columns][2], rest[split ? columns : 1][2];
                if constexpr (Part::key_bits != 16 && Part::by_channel) {
                    const uint4 p = ptx::ld_shared_v4(keys + S::key_codes + ((c * depth + j) * 4 + t) * 16);
                    const uint32_t z[4] = {p.x, p.y, p.z, p.w};  // rows g: zeros; rows g + 8: scales, result unused
                    UNROLL for (int n = 0; n < columns; ++n) {
                        b[n][0] = ptx::mul_f16x2(q[n][j][0], p.y);
                        b[n][1] = ptx::mul_f16x2(q[n][j][1], p.w);
                        if constexpr (split) {
                            rest[n][0] = ptx::fma_f16x2(q[n][j][0], p.y, b[n][0] ^ 0x80008000u);
                            rest[n][1] = ptx::fma_f16x2(q[n][j][1], p.w, b[n][1] ^ 0x80008000u);
                        }
                        mma<false>(zeros[n][c], z, q[n][j]);
                    }
                } else {
                    const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
                    UNROLL for (int n = 0; n < columns; ++n) {
                        b[n][0] = q[n][j][0];
                        b[n][1] = q[n][j][1];
                        if constexpr (Part::key_bits != 16) mma<false>(zeros[n][j * key_groups / depth], ones, q[n][j]);
                    }
                }
                UNROLL for (int u = 0; u < chunk_tiles / U::tiles; ++u, index += U::words) {
                    const uint32_t* w = Config::plain ? nullptr : words.at(index);
                    UNROLL for (int x = 0; x < U::tiles; ++x) {
                        uint32_t a[4];
                        const int i = c * chunk_tiles + u * U::tiles + x;
                        if constexpr (Config::plain)
                            ptx::ldmatrix_x4(a, keys + (16 * i + lane % 16) * S::row_bytes + (2 * j + lane / 16) * 16);
                        else kv_page::fragment<Part::key_bits>(a, w, x);
                        UNROLL for (int n = 0; n < columns; ++n)
                            if constexpr (key_groups > 1) mma<key_bf16>(partial[n][i], a, b[n]);
                            else mma<key_bf16>(score[n][i], a, b[n]);
                        if constexpr (split)
                            UNROLL for (int n = 0; n < columns; ++n) mma<false>(score[n][i], a, rest[n]);
                    }
                }
                if constexpr (key_groups > 1)
                    if ((j + 1) * key_groups % depth == 0) {
                        const int group = j * key_groups / depth;
                        UNROLL for (int n = 0; n < columns; ++n) {
                            by_token(keys, group, g, score[n], partial[n], zeros[n][group]);
                            UNROLL for (int i = 0; i < tiles; ++i)
                                partial[n][i][0] = partial[n][i][1] = partial[n][i][2] = partial[n][i][3] = 0.0f;
                        }
                    }
            }
        UNROLL for (int n = 0; n < columns; ++n) {
            if constexpr (key_groups == 1 && Part::key_bits != 16 && !Part::by_channel)
                by_token(keys, 0, g, score[n], score[n], zeros[n][0]);
            if constexpr (folded) {
                UNROLL for (int c = 0; c < chunks; ++c)
                    UNROLL for (int x = 0; x < width; ++x) base[n][c][x] = zeros[n][c][x];
            } else if constexpr (Part::key_bits == 16 || Part::by_channel) {
                UNROLL for (int i = 0; i < tiles; ++i)
                    UNROLL for (int x = 0; x < 4; ++x) {
                        if constexpr (Part::key_bits != 16) score[n][i][x] = fmaf(score[n][i][x], kv_page::unscale<Part::key_bits>(i, x / 2),
                                                   zeros[n][i / chunk_tiles][x % 2]);
                        else if constexpr (S::raw_queries || Config::bf16) score[n][i][x] *= logits.scale;
                    }
            }
        }
    }
    // The same on integer MMA. Per-channel key scales are multiplied into the queries before they are split into bytes.
    DEVICE void integer_scores(uint32_t keys, const Queries<Config>& queries) {
        constexpr int bundles = chunk_tiles / kv_page::Bundle<Part::key_bits>::tiles, steps = depth / 2 / key_groups;
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        kv_page::Words words{keys + 16 * lane, {}};
        int index = 0;
        UNROLL for (int c = 0; c < chunks; ++c) {
            float zeros[columns][key_groups][4] = {};
            Bytes<Config> bytes[columns];
            if constexpr (Part::by_channel) {
                uint32_t scaled[columns][depth][2];
                UNROLL for (int j = 0; j < depth; ++j) {
                    const uint4 p = ptx::ld_shared_v4(keys + S::key_codes + ((c * depth + j) * 4 + t) * 16);
                    const uint32_t z[4] = {p.x, p.y, p.z, p.w};  // rows g: zeros; rows g + 8: scales, result unused
                    UNROLL for (int n = 0; n < columns; ++n) {
                        scaled[n][j][0] = ptx::mul_f16x2(queries.q[n][j][0], p.y);
                        scaled[n][j][1] = ptx::mul_f16x2(queries.q[n][j][1], p.w);
                        mma<false>(zeros[n][0], z, queries.q[n][j]);
                    }
                }
                UNROLL for (int n = 0; n < columns; ++n) {
                    bytes[n].make(scaled[n]);
                    factor[n][c] = bytes[n].inverse;
                    base[n][c][0] = zeros[n][0][0];
                }
            } else {
                const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
                UNROLL for (int n = 0; n < columns; ++n) {
                    bytes[n] = queries.bytes[n];
                    factor[n][c] = bytes[n].inverse;
                    UNROLL for (int j = 0; j < depth; ++j) mma<false>(zeros[n][j * key_groups / depth], ones, queries.q[n][j]);
                }
            }
            UNROLL for (int v = 0; v < key_groups; ++v) {
                int32_t sums[columns][chunk_tiles][4];
                UNROLL for (int n = 0; n < columns; ++n)
                    UNROLL for (int i = 0; i < chunk_tiles; ++i) sums[n][i][0] = sums[n][i][1] = sums[n][i][2] = sums[n][i][3] = magic_bits;
                UNROLL for (int j = v * steps; j < (v + 1) * steps; ++j) {
                    uint32_t w[2][bundles];
                    UNROLL for (int k = 0; k < 2 * bundles; ++k, ++index) w[k / bundles][k % bundles] = *words.at(index);
                    UNROLL for (int i = 0; i < chunk_tiles; ++i) {
                        uint32_t a[4];
                        kv_page::byte_fragment<Part::key_bits>(a, w[0], w[1], i);
                        UNROLL for (int n = 0; n < columns; ++n) ptx::mma_m16n8k32_u8s8(sums[n][i], a, bytes[n].b[j]);
                    }
                }
                UNROLL for (int n = 0; n < columns; ++n) {
                    UNROLL for (int i = 0; i < chunk_tiles; ++i)
                        UNROLL for (int h = 0; h < 2; ++h) {
                            const float high = __int_as_float(sums[n][i][2 * h]), low = __int_as_float(sums[n][i][2 * h + 1]);
                            const float both = fmaf(high, Bytes<Config>::low_unit, -(Bytes<Config>::low_unit + 1.0f) * magic) + low;
                            if constexpr (Part::by_channel) {
                                if constexpr (folded) score[n][c * chunk_tiles + i][h] = both;
                                else score[n][c * chunk_tiles + i][h] = fmaf(both, score_scale(n, c * chunk_tiles + i, h), base[n][c][0]);
                            } else {
                                const float zero = zeros[n][v][0];
                                const uint32_t w = token_word(keys + S::key_codes, v, i, h, g);
                                const float more = v ? fmaf(kv_page::high_f16(w), zero, score[n][i][h]) : kv_page::high_f16(w) * zero;
                                score[n][i][h] = fmaf(both, kv_page::low_f16(w) * score_scale(n, i, h), more);
                            }
                        }
                }
            }
        }
    }
    static constexpr int32_t magic_bits = 0x4b400000;  // 1.5 * 2^23 as a float: int sums below 2^22 on top need no I2F
    static constexpr float magic = 12582912.0f;

    // Adds one channel group: scores times the tokens' scales, plus their zeros times the query's sum over the group.
    DEVICE void by_token(uint32_t keys, int group, int g, float (&to)[tiles][4], float (&from)[tiles][4], float (&ones)[4]) {
        const bool first = key_groups == 1 || group == 0;
        UNROLL for (int pair = 0; pair < tiles / 2; ++pair) {
            const uint4 p = ptx::ld_shared_v4(keys + S::key_codes + ((group * (tiles / 2) + pair) * 8 + g) * 16);
            const uint32_t rows[4] = {p.x, p.y, p.z, p.w};
            UNROLL for (int r = 0; r < 4; ++r) {
                const int i = 2 * pair + r / 2;
                const float scale = kv_page::low_f16(rows[r]) * kv_page::unscale<Part::key_bits>(i, r % 2);
                const float zero = kv_page::high_f16(rows[r]);
                UNROLL for (int x = 0; x < 2; ++x) {
                    const float more = first ? zero * ones[x] : fmaf(zero, ones[x], to[i][r % 2 * 2 + x]);
                    to[i][r % 2 * 2 + x] = fmaf(from[i][r % 2 * 2 + x], scale, more);
                }
            }
        }
    }

    // ---- softcap, ALiBi and mask; `position` is that of the block's first token
    DEVICE void mask(int position, const Logits& logits, const Column (&column)[columns][width]) {
        if constexpr (Part::general) {
            const int g = threadIdx.x % 32 / 4;
            UNROLL for (int n = 0; n < columns; ++n)
                UNROLL for (int i = 0; i < tiles; ++i)
                    UNROLL for (int x = 0; x < 2 * width; ++x) {
                        const Column& c = column[n][x % width];
                        const int key = position + 16 * i + g + x / width * 8;
                        float& s = score[n][i][x];
                        if constexpr (Config::softcap)  // tanh(y) = 1 - 2 / (e^2y + 1), to full precision
                            s = logits.cap * (1.0f - 2.0f * ptx::rcp_approx(ptx::ex2_approx(s * logits.uncap) + 1.0f));
                        if constexpr (Config::alibi) s = fmaf(c.slope, static_cast<float>(key - c.position), s);
                        if constexpr (Part::residual || Config::windowed)
                            if (key < c.first || key > c.last) s = -__int_as_float(0x7f800000);
                    }
        }
    }

    // ---- P = exp2(S - reference); sums stay in lane_sum and lane_zero, since a raised reference redoes them
    DEVICE void exponentials(uint32_t values, const State<Config>& state) {
        const int g = threadIdx.x % 32 / 4;
        UNROLL for (int n = 0; n < columns; ++n) {
            UNROLL for (int x = 0; x < width; ++x) {
                lane_sum[n][x] = 0.0f;
                UNROLL for (int v = 0; v < value_groups; ++v) lane_zero[n][v][x] = 0.0f;
            }
            UNROLL for (int pair = 0; pair < (tiles + 1) / 2; ++pair) {
                uint32_t rows[4] = {};
                if constexpr (Part::value_bits != 16 && value_groups == 1) {
                    const uint4 p = ptx::ld_shared_v4(values + S::value_codes + (pair * 8 + g) * 16);
                    rows[0] = p.x; rows[1] = p.y; rows[2] = p.z; rows[3] = p.w;
                }
                UNROLL for (int i = 2 * pair; i < 2 * pair + 2 && i < tiles; ++i) {
                    float e[2][width];
                    UNROLL for (int h = 0; h < 2; ++h)
                        UNROLL for (int x = 0; x < width; ++x) {
                            const float s = score[n][i][h * width + x];
                            if constexpr (folded)
                                e[h][x] = ptx::ex2_approx(fmaf(s, score_scale(n, i, h), base[n][i / chunk_tiles][x] - state.reference[n][x]));
                            else
                                e[h][x] = ptx::ex2_approx(s - state.reference[n][x]);
                            lane_sum[n][x] += e[h][x];
                            if constexpr (Part::value_bits != 16)
                                UNROLL for (int v = 0; v < value_groups; ++v) {
                                    const uint32_t w = value_groups == 1 ? rows[i % 2 * 2 + h] : token_word(values + S::value_codes, v, i, h, g);
                                    lane_zero[n][v][x] = fmaf(e[h][x], kv_page::high_f16(w), lane_zero[n][v][x]);
                                }
                        }
                    UNROLL for (int k = 0; k < width; ++k) {
                        const float first = e[k][0], second = Config::paired ? e[1][0] : e[k][width - 1];
                        uint32_t& p = probability[n][i][k];
                        p = value_bf16 ? ptx::cvt_bf16x2_f32(first, second) : ptx::cvt_f16x2_f32(first, second);
                        if constexpr (Part::value_bits != 16 && value_groups == 1) {
                            const uint32_t a = rows[i % 2 * 2 + k], b = rows[i % 2 * 2 + 1];
                            p = ptx::mul_f16x2(p, Config::paired ? kv_page::both_low(a, b) : kv_page::twice_low(a));
                        }
                    }
                }
            }
        }
    }
    // (scale, zero) of the token in row g + 8 * h of tile i, group v.
    DEVICE uint32_t token_word(uint32_t parameters, int v, int i, int h, int g) {
        return ptx::ld_shared_u32(parameters + ((v * (tiles / 2) + i / 2) * 8 + g) * 16 + (i % 2 * 2 + h) * 4);
    }

    // Lazy rescaling: references rise only when a lane's sum exceeds the limit, so most blocks skip the max and rescale.
    DEVICE void probabilities(uint32_t values, State<Config>& state) {
        float limit = 1024.0f;
        if constexpr (Part::value_bits != 16) limit = ptx::ld_shared_f32(values + S::value_codes + S::value_parameters);
        // The reference sits below the maximum by half of the headroom (log2): otherwise small probabilities times the scale
        // of 8-bit values would be float16 subnormals (2.1e-3 instead of 1e-3 on a real model's layers).
        const float room = 0.5f * ptx::lg2_approx(fmaxf(limit, 1.0f));
        if (state.fresh) {  // nothing to rescale
            UNROLL for (int n = 0; n < columns; ++n)
                UNROLL for (int x = 0; x < width; ++x) state.reference[n][x] = highest(n, x) - room;
        }
        exponentials(values, state);
        bool high = false;
        UNROLL for (int n = 0; n < columns; ++n) high = high || !(lane_sum[n][0] < limit) || !(lane_sum[n][width - 1] < limit);
        state.fresh = false;
        if (__any_sync(0xffffffffu, high)) {
            UNROLL for (int n = 0; n < columns; ++n)
                UNROLL for (int x = 0; x < width; ++x) raise(n, x, state, room);
            exponentials(values, state);
        }
        UNROLL for (int n = 0; n < columns; ++n)
            UNROLL for (int x = 0; x < width; ++x) {
                state.sum[n][x] += lane_sum[n][x];
                if constexpr (Part::value_bits != 16)
                    UNROLL for (int v = 0; v < value_groups; ++v) state.zero[n][v][x] += lane_zero[n][v][x];
            }
    }
    DEVICE float highest(int n, int x) const {
        float most = softmax::lowest;
        UNROLL for (int i = 0; i < tiles; ++i)
            UNROLL for (int h = 0; h < 2; ++h) {
                float s = score[n][i][h * width + x];
                if constexpr (folded) s = fmaf(s, score_scale(n, i, h), base[n][i / chunk_tiles][x]);
                most = fmaxf(most, s);
            }
        State<Config>::most_of_rows(most);
        return most;
    }
    DEVICE void raise(int n, int x, State<Config>& state, float room) {
        const float most = fmaxf(highest(n, x) - room, state.reference[n][x]);
        const float weight = softmax::State::weight(state.reference[n][x], most);
        state.reference[n][x] = most;
        state.sum[n][x] *= weight;
        UNROLL for (int v = 0; v < S::value_groups; ++v) state.zero[n][v][x] *= weight;
        UNROLL for (int c = 0; c < depth; ++c) {
            UNROLL for (int i = x; i < 4; i += width) state.out[n][c][i] *= weight;
        }
    }

    // ---- O^T += V^T P^T; residual tokens from `end` on (counted from the chunk's first) are masked
    DEVICE void weigh(uint32_t values, State<Config>& state, int end) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        using U = kv_page::Bundle<Part::value_bits>;
        kv_page::Words words{values + 16 * lane, {}};
        int index = 0;
        UNROLL for (int i = 0; i < tiles; ++i) {
            uint32_t b[columns][value_groups][2];
            UNROLL for (int n = 0; n < columns; ++n)
                UNROLL for (int v = 0; v < value_groups; ++v)
                    UNROLL for (int h = 0; h < width; ++h) {
                        uint32_t p = probability[n][i][h];
                        if constexpr (value_groups > 1) {
                            const uint32_t first = token_word(values + S::value_codes, v, i, h, g);
                            if constexpr (Config::paired) p = ptx::mul_f16x2(p, kv_page::both_low(first, token_word(values + S::value_codes, v, i, 1, g)));
                            else p = ptx::mul_f16x2(p, kv_page::twice_low(first));
                        }
                        p = ptx::movmatrix_trans(p);
                        if constexpr (Config::paired) {  // tokens 0-7 in the even columns, 8-15 in the odd ones
                            b[n][v][0] = g % 2 ? 0u : p;
                            b[n][v][1] = g % 2 ? p : 0u;
                        } else {
                            b[n][v][h] = p;
                        }
                    }
            UNROLL for (int u = 0; u < depth / U::tiles; ++u, index += U::words) {
                const uint32_t* w = Config::plain ? nullptr : words.at(index);
                UNROLL for (int x = 0; x < U::tiles; ++x) {
                    uint32_t a[4];
                    if constexpr (Config::plain)
                        ptx::ldmatrix_x4_trans(a, values + (16 * i + lane % 8 + lane / 16 * 8) * S::row_bytes + (2 * (u * U::tiles + x) + lane / 8 % 2) * 16);
                    else kv_page::fragment<Part::value_bits>(a, w, x);
                    if constexpr (Part::residual) {  // an unwritten slot may hold NaN, and 0 * NaN is NaN
                        UNROLL for (int k = 0; k < 2; ++k) {
                            const int left = end - (16 * i + 8 * k + 2 * t);
                            const uint32_t keep = left >= 2 ? 0xffffffffu : left == 1 ? 0x0000ffffu : 0u;
                            a[2 * k] &= keep;
                            a[2 * k + 1] &= keep;
                        }
                    }
                    const int c = u * U::tiles + x;
                    UNROLL for (int n = 0; n < columns; ++n)
                        mma<value_bf16>(state.out[n][c], a, b[n][c * value_groups / depth]);
                }
            }
        }
    }
};

}  // namespace decode

#endif  // ANYBIT_DECODE_BLOCK_CUH
