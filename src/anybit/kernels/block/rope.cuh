// Rotary position embedding of q and k from a fused QKV projection, with the per-head RMSNorm that some models put before
// it (Qwen3, Gemma3). One warp per head; a lane holds the rotated pairs, one of each half. With Config::stores, k and v are
// also written to the ring of 16-bit tokens of kvcache.py, in the same launch.
#ifndef ANYBIT_ROPE_CUH
#define ANYBIT_ROPE_CUH

#include "attention/kv_ring.cuh"

struct Params {
    const uint16_t* qkv;      // [tokens, (query heads + 2 key heads) * head_dim], row stride qkv_stride
    const uint16_t* cosine;   // [tokens, head_dim]
    const uint16_t* sine;     // [tokens, head_dim]
    const uint16_t* q_gamma;  // [head_dim], or null: no per-head norm
    const uint16_t* k_gamma;
    uint16_t* q;              // [tokens, query heads, head_dim]
    uint16_t* k;              // [tokens, key heads, head_dim]; null with stores
    uint16_t* residual;       // stores: [sequences, key heads, 2, ring * head_dim]
    const int32_t* lengths;   // stores: per sequence, new tokens included
    const int32_t* sequences; // stores: [batch], or null for 0, 1, 2 ...
    int64_t qkv_stride;
    int32_t query_heads, key_heads;
    int32_t tokens;           // stores: new tokens per sequence
    int32_t ring;
    float epsilon;
};

namespace rope {

template <bool is_bf16> DEVICE float to_float(uint16_t v) { return is_bf16 ? ptx::cvt_f32_bf16(v) : ptx::cvt_f32_f16(v); }
template <bool is_bf16> DEVICE uint16_t from_float(float v) { return is_bf16 ? ptx::cvt_bf16_f32(v) : ptx::cvt_f16_f32(v); }

}  // namespace rope

// Config: threads, head_dim, is_bf16, stores, paired (q and k alternate
// between eight channels of a head's first half and the eight of the second that they rotate with).
template <class Config> __global__ void __launch_bounds__(Config::threads) rotate(const __grid_constant__ Params p) {
    using namespace rope;
    constexpr int half = Config::head_dim / 2, pairs = (half + 31) / 32;
    constexpr bool bf16 = Config::is_bf16;
    static_assert(Config::head_dim % 2 == 0, "channels of a head turn in pairs");
    static_assert(!(Config::paired || Config::stores) || Config::head_dim % 16 == 0, "eights of channels, tiles of a ring");
    const int head = blockIdx.x * (Config::threads / 32) + threadIdx.x / 32, token = blockIdx.y;
    const int lane = ptx::lane_id();

    ptx::griddepcontrol_launch_dependents();
    const uint16_t* cosine = p.cosine + static_cast<int64_t>(token) * Config::head_dim;
    const uint16_t* sine = p.sine + static_cast<int64_t>(token) * Config::head_dim;
    ptx::griddepcontrol_wait();
    if (head >= p.query_heads + (Config::stores ? 2 : 1) * p.key_heads) return;

    const bool is_query = head < p.query_heads;
    const uint16_t* x = p.qkv + token * p.qkv_stride + head * Config::head_dim;
    const uint16_t* gamma = is_query ? p.q_gamma : p.k_gamma;
    const bool to_ring = Config::stores && !is_query, is_value = to_ring && head >= p.query_heads + p.key_heads;
    uint16_t* y;
    int slot = 0;
    if (to_ring) {
        const int row = token / p.tokens, sequence = p.sequences ? p.sequences[row] : row;
        const int kv_head = head - p.query_heads - (is_value ? p.key_heads : 0);
        const int position = p.lengths[sequence] - p.tokens + token % p.tokens;
        if (position < 0) return;
        slot = position % p.ring;
        y = p.residual + ((static_cast<int64_t>(sequence) * p.key_heads + kv_head) * 2 + is_value) * p.ring * Config::head_dim;
    } else {
        y = is_query ? p.q + (static_cast<int64_t>(token) * p.query_heads + head) * Config::head_dim
                     : p.k + (static_cast<int64_t>(token) * p.key_heads + head - p.query_heads) * Config::head_dim;
    }
    const auto place = [&](int c) { return to_ring ? kv_ring::place(is_value, slot, c, Config::head_dim) : c; };
    if (is_value) {
        UNROLL for (int i = 0; i < (Config::head_dim + 31) / 32; ++i) {
            const int at = lane + 32 * i;
            if (Config::head_dim % 32 && at >= Config::head_dim) break;
            y[place(at)] = x[at];
        }
        return;
    }

    float low[pairs], high[pairs], squares = 0.f;
    UNROLL for (int i = 0; i < pairs; ++i) {
        const int at = lane + 32 * i;
        if (half % 32 && at >= half) break;
        low[i] = to_float<bf16>(x[Config::paired ? at / 8 * 16 + at % 8 : at]);
        high[i] = to_float<bf16>(x[Config::paired ? at / 8 * 16 + at % 8 + 8 : at + half]);
        squares += low[i] * low[i] + high[i] * high[i];
    }
    if (gamma) {
        UNROLL for (int step = 16; step > 0; step /= 2) squares += ptx::shfl_xor(squares, step);
        const float factor = rsqrtf(squares / static_cast<float>(Config::head_dim) + p.epsilon);
        UNROLL for (int i = 0; i < pairs; ++i) {
            if (half % 32 && lane + 32 * i >= half) break;
            low[i] *= factor * to_float<bf16>(gamma[lane + 32 * i]);
            high[i] *= factor * to_float<bf16>(gamma[lane + 32 * i + half]);
        }
    }
    UNROLL for (int i = 0; i < pairs; ++i) {
        const int at = lane + 32 * i;
        if (half % 32 && at >= half) break;
        y[place(at)] = from_float<bf16>(low[i] * to_float<bf16>(cosine[at]) - high[i] * to_float<bf16>(sine[at]));
        y[place(at + half)] =
            from_float<bf16>(high[i] * to_float<bf16>(cosine[at + half]) + low[i] * to_float<bf16>(sine[at + half]));
    }
}

#endif  // ANYBIT_ROPE_CUH
