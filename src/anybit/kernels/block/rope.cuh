// Rotary position embedding of q and k from a fused QKV projection, with the per-head RMSNorm that some models put before
// it (Qwen3, Gemma3). A warp turns one head of a token, or several; a lane holds pairs, one channel of each half. With
// Config::stores, k and v are also written to the ring of 16-bit tokens of kvcache.py, in the same launch.
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

// What a lane holds of a head, or of a token's angles: channels at and at + half.
template <class Config> struct Halves {
    static constexpr int half = Config::head_dim / 2, pairs = (half + 31) / 32;
    float low[pairs], high[pairs];

    // This lane's channel i, or none.
    static DEVICE int channel(int i) { return static_cast<int>(ptx::lane_id()) + 32 * i; }
    static DEVICE bool none(int i) { return half % 32 && channel(i) >= half; }
    DEVICE void load(const uint16_t* x, bool paired) {
        UNROLL for (int i = 0; i < pairs; ++i) {
            if (none(i)) break;
            const int at = channel(i), place = paired ? at / 8 * 16 + at % 8 : at;
            low[i] = to_float<Config::is_bf16>(x[place]);
            high[i] = to_float<Config::is_bf16>(x[place + (paired ? 8 : half)]);
        }
    }
    DEVICE void normalize(const uint16_t* gamma, float epsilon) {
        float squares = 0.f;
        UNROLL for (int i = 0; i < pairs; ++i)
            if (!none(i)) squares += low[i] * low[i] + high[i] * high[i];
        UNROLL for (int step = 16; step > 0; step /= 2) squares += ptx::shfl_xor(squares, step);
        const float factor = rsqrtf(squares / static_cast<float>(Config::head_dim) + epsilon);
        Halves gain;
        gain.load(gamma, false);
        UNROLL for (int i = 0; i < pairs; ++i) {
            if (none(i)) break;
            low[i] *= factor * gain.low[i];
            high[i] *= factor * gain.high[i];
        }
    }
};

}  // namespace rope

// Config: threads, heads (of a warp), head_dim, is_bf16, stores, paired (q and k alternate
// between eight channels of a head's first half and the eight of the second that they rotate with).
template <class Config> __global__ void __launch_bounds__(Config::threads) rotate(const __grid_constant__ Params p) {
    using namespace rope;
    using H = Halves<Config>;
    constexpr bool bf16 = Config::is_bf16;
    static_assert(Config::head_dim % 2 == 0, "channels of a head turn in pairs");
    static_assert(!(Config::paired || Config::stores) || Config::head_dim % 16 == 0, "eights of channels, tiles of a ring");
    const int first = (blockIdx.x * (Config::threads / 32) + threadIdx.x / 32) * Config::heads, token = blockIdx.y;
    const int turning = p.query_heads + p.key_heads, all = turning + (Config::stores ? p.key_heads : 0);
    const uint16_t* const row = p.qkv + token * p.qkv_stride;

    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    if (first >= all) return;

    H mine[Config::heads], cosine, sine;  // all loads before the first store
    UNROLL for (int h = 0; h < Config::heads; ++h)
        if (first + h < turning) mine[h].load(row + (first + h) * Config::head_dim, Config::paired);
    cosine.load(p.cosine + static_cast<int64_t>(token) * Config::head_dim, false);
    sine.load(p.sine + static_cast<int64_t>(token) * Config::head_dim, false);

    UNROLL for (int h = 0; h < Config::heads; ++h) {
        const int head = first + h;
        if (head >= all) return;
        const bool is_query = head < p.query_heads, is_value = head >= turning;
        const bool to_ring = Config::stores && !is_query;
        uint16_t* y;
        int slot = 0;
        if (to_ring) {
            const int row = token / p.tokens, sequence = p.sequences ? p.sequences[row] : row;
            const int kv_head = head - p.query_heads - (is_value ? p.key_heads : 0);
            const int position = p.lengths[sequence] - p.tokens + token % p.tokens;
            if (position < 0) continue;
            slot = position % p.ring;
            y = p.residual + ((static_cast<int64_t>(sequence) * p.key_heads + kv_head) * 2 + is_value) * p.ring * Config::head_dim;
        } else {
            y = is_query ? p.q + (static_cast<int64_t>(token) * p.query_heads + head) * Config::head_dim
                         : p.k + (static_cast<int64_t>(token) * p.key_heads + head - p.query_heads) * Config::head_dim;
        }
        const auto place = [&](int c) { return to_ring ? kv_ring::place(is_value, slot, c, Config::head_dim) : c; };
        if (is_value) {
            UNROLL for (int i = 0; i < (Config::head_dim + 31) / 32; ++i) {
                const int at = H::channel(i);
                if (Config::head_dim % 32 && at >= Config::head_dim) break;
                y[place(at)] = row[head * Config::head_dim + at];
            }
            continue;
        }
        if (const uint16_t* gamma = is_query ? p.q_gamma : p.k_gamma) mine[h].normalize(gamma, p.epsilon);
        UNROLL for (int i = 0; i < H::pairs; ++i) {
            if (H::none(i)) break;
            const int at = H::channel(i);
            const float low = mine[h].low[i], high = mine[h].high[i];
            y[place(at)] = from_float<bf16>(low * cosine.low[i] - high * sine.low[i]);
            y[place(at + H::half)] = from_float<bf16>(high * cosine.high[i] + low * sine.high[i]);
        }
    }
}

#endif  // ANYBIT_ROPE_CUH
