// An fp4 (e2m1) KV block on sm_120's block-scaled MMA: codes and scales are operands as stored, with no dequantization.
//
// Queries and probabilities are each split into a sum of two e2m1 values with their own scales: even columns hold the
// high part, odd columns the remainder (low); the two products are added at the end.
// Emulated, and compiled for sm_120a; not run on hardware. kv_fp4.py gives the order of codes and scales.
#ifndef ANYBIT_DECODE_FP4_CUH
#define ANYBIT_DECODE_FP4_CUH

#include "attention/decode/decode_block.cuh"

namespace decode {

// Makes the B operand of one k = 64 step from eight values per half, given as float16 pairs.
template <class Config> DEVICE void fp4_operand(uint32_t (&b)[2], uint32_t& scales, const uint32_t (&x)[2][4]) {
    const bool low = threadIdx.x / 4 % 2;
    uint32_t own = 0;
    UNROLL for (int half = 0; half < 2; ++half) {
        float v[8];
        UNROLL for (int i = 0; i < 8; ++i) v[i] = i % 2 ? kv_page::high_f16(x[half][i / 2]) : kv_page::low_f16(x[half][i / 2]);
        UNROLL for (int pass = 0; pass < 2; ++pass) {
            float most = 0.0f;
            UNROLL for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(v[i]));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));  // two lanes share a scale
            const uint16_t code = ptx::cvt_e4m3x2_f32(most * (1.0f / 6.0f), 0.0f) & 0xff;
            const float scale = kv_page::low_f16(ptx::cvt_f16x2_e4m3x2(code)), inverse = scale > 0.0f ? ptx::rcp_approx(scale) : 0.0f;
            uint32_t word = 0;
            UNROLL for (int i = 0; i < 4; ++i) {
                const uint32_t pair = ptx::cvt_e2m1x2_f32(v[2 * i] * inverse, v[2 * i + 1] * inverse);
                const uint32_t back = ptx::cvt_f16x2_e2m1x2(pair);
                v[2 * i] = fmaf(-scale, kv_page::low_f16(back), v[2 * i]);
                v[2 * i + 1] = fmaf(-scale, kv_page::high_f16(back), v[2 * i + 1]);
                word |= pair << 8 * i;
            }
            if (pass == 0 || low) {
                b[half] = word;
                own = (own & ~(0xffu << 16 * half)) | static_cast<uint32_t>(code) << 16 * half;
            }
        }
    }
    // The first lane of each quad supplies the scales: its own of both halves and those of the lane two on.
    scales = own | __shfl_xor_sync(0xffffffffu, own, 2) << 8;
}

template <class Config> struct Fp4Query {
    static constexpr int steps = Config::head_dim / 64;
    uint32_t b[steps][2], scales[steps];
    float inverse;  // 1 / the factor query t was multiplied by

    DEVICE void make(const uint32_t (&q)[Config::head_dim / 16][2]) {
        const uint16_t factor = factor_to(1024.0f, q);
        inverse = inverse_of_column(factor);
        const uint32_t times = factor | static_cast<uint32_t>(factor) << 16;
        UNROLL for (int s = 0; s < steps; ++s) {
            uint32_t x[2][4];
            UNROLL for (int k = 0; k < 8; ++k) x[k / 4][k % 4] = ptx::mul_f16x2(q[4 * s + k / 2][k % 2], times);
            fp4_operand<Config>(b[s], scales[s], x);
        }
    }
};

template <class Config> struct Fp4Block : Block<Config, Packed<Config>> {
    using Base = Block<Config, Packed<Config>>;
    using S = Shape<Config>;
    static constexpr int tiles = Base::tiles, depth = S::depth;
    static constexpr float factor_of_p = 256.0f;  // scales probabilities up so that small ones keep precision
    static_assert(!Config::fp4 || (Config::paired && Config::query_tiles == 1), "4-bit floats come in pairs of columns");

    DEVICE static void tile(uint32_t (&a)[4], uint32_t& scales, uint32_t codes, uint32_t parameters, int index) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const uint4 v = ptx::ld_shared_v4(codes + (index * 32 + lane) * 16);
        a[0] = v.x; a[1] = v.y; a[2] = v.z; a[3] = v.w;
        scales = ptx::ld_shared_u32(parameters + (index * 16 + t % 2 * 8 + g) * 4);
    }
    DEVICE void scores(uint32_t keys, const Queries<Config>& queries, const Logits&) {
        UNROLL for (int i = 0; i < tiles; ++i) {
            float sums[4] = {};
            UNROLL for (int s = 0; s < Config::head_dim / 64; ++s) {
                uint32_t a[4], scales;
                tile(a, scales, keys, keys + S::key_codes, s * tiles + i);
                ptx::mma_m16n8k64_nvf4(sums, a, queries.fp4.b[s], scales, queries.fp4.scales[s]);
            }
            this->score[0][i][0] = (sums[0] + sums[1]) * queries.fp4.inverse;
            this->score[0][i][1] = (sums[2] + sums[3]) * queries.fp4.inverse;
        }
    }
    DEVICE void exponentials(const State<Config>& state) {
        this->lane_sum[0][0] = 0.0f;
        UNROLL for (int i = 0; i < tiles; ++i) {
            float e[2];
            UNROLL for (int h = 0; h < 2; ++h) {
                e[h] = ptx::ex2_approx(this->score[0][i][h] - state.reference[0][0]);
                this->lane_sum[0][0] += e[h];
            }
            this->probability[0][i][0] = ptx::cvt_f16x2_f32(e[0] * factor_of_p, e[1] * factor_of_p);
        }
    }
    DEVICE void probabilities(uint32_t, State<Config>& state) {
        exponentials(state);
        if (__any_sync(0xffffffffu, !(this->lane_sum[0][0] < 8.0f))) {
            this->raise(0, 0, state, 0.0f);
            exponentials(state);
        }
        state.sum[0][0] += this->lane_sum[0][0];
    }
    DEVICE void weigh(uint32_t values, State<Config>& state, int) {
        UNROLL for (int s = 0; s < tiles / 4; ++s) {
            uint32_t x[2][4], b[2], scales;
            UNROLL for (int k = 0; k < 8; ++k) {  // tile k / 2 of the step, tokens 0-7 or 8-15, to both columns of their query
                const uint32_t p = this->probability[0][4 * s + k / 2][0];
                x[k / 4][k % 4] = ptx::movmatrix_trans(ptx::prmt(p, p, k % 2 ? 0x3232u : 0x1010u));
            }
            fp4_operand<Config>(b, scales, x);
            UNROLL for (int c = 0; c < depth; ++c) {
                uint32_t a[4], of_values;
                tile(a, of_values, values, values + S::value_codes, s * depth + c);
                ptx::mma_m16n8k64_nvf4(state.out[0][c], a, b, of_values, scales);
            }
        }
    }
};

template <class Config, bool fp4> struct PackedBlock { using Type = Block<Config, Packed<Config>>; };
template <class Config> struct PackedBlock<Config, true> { using Type = Fp4Block<Config>; };

}  // namespace decode

#endif  // ANYBIT_DECODE_FP4_CUH
