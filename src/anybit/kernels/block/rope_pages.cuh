// Rotary position embedding of q and k from a fused QKV projection, and the store of k and v into an external 16-bit paged
// cache (vLLM's), in one launch. A thread rotates eight channels of a head's first half with the eight of the second half,
// so that all global accesses are 16 bytes.
#ifndef ANYBIT_ROPE_PAGES_CUH
#define ANYBIT_ROPE_PAGES_CUH

#include "common/values.cuh"

struct Params {
    const uint16_t* qkv;         // [tokens, (query heads + 2 key heads) * head_dim], row stride qkv_stride
    const uint16_t* table;       // [positions, head_dim]: cosines of half a head, then sines
    const int64_t* positions;    // [tokens]
    const int64_t* slots;        // [stored] slot mapping: page * page_tokens + token; negative, or past the end: not stored
    const uint16_t* q_gamma;     // [head_dim], or null: no per-head norm
    const uint16_t* k_gamma;
    uint16_t* q;                 // [tokens, query heads, head_dim]
    uint16_t* keys;              // [pages, page_tokens, key heads, head_dim], strided
    uint16_t* values;
    int64_t qkv_stride, page_stride, token_stride, head_stride;
    int32_t query_heads, key_heads, tokens, page_tokens, stored;
    float epsilon;
};

// Config: threads, head_dim, is_bf16, paired (q and k alternate between eight channels of a head's first half and the eight
// of the second that they rotate with).
template <class Config> __global__ void __launch_bounds__(Config::threads) rotate_pages(const __grid_constant__ Params p) {
    using namespace values;
    constexpr int dim = Config::head_dim, lanes = dim / 16;
    constexpr bool bf16 = Config::is_bf16;
    static_assert(lanes == 4 || lanes == 8 || lanes == 16, "the threads of a head are a part of a warp");
    const int thread = blockIdx.x * Config::threads + static_cast<int>(threadIdx.x), lane = thread % lanes;
    const int heads = p.query_heads + 2 * p.key_heads;
    const int token = thread / lanes / heads, head = thread / lanes % heads;
    const bool is_query = head < p.query_heads, is_value = head >= p.query_heads + p.key_heads, there = token < p.tokens;

    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    const int slot = there && !is_query && token < p.stored ? static_cast<int>(p.slots[token]) : -1;
    const bool wanted = there && (is_query || slot >= 0);
    const int kv_head = head - p.query_heads - (is_value ? p.key_heads : 0);
    const int64_t in_cache = slot / p.page_tokens * p.page_stride + slot % p.page_tokens * p.token_stride + kv_head * p.head_stride;
    uint16_t* y = is_query ? p.q + (static_cast<int64_t>(token) * p.query_heads + head) * dim : (is_value ? p.values : p.keys) + in_cache;

    uint32_t low[4] = {}, high[4] = {};
    const auto load = [](uint32_t (&to)[4], const uint16_t* from) {
        const uint4 v = ptx::ld_global_cg_v4(from);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    };
    const int second = Config::paired || is_value ? 16 * lane + 8 : dim / 2 + 8 * lane;
    if (wanted) {
        const uint16_t* x = p.qkv + token * p.qkv_stride + head * dim;
        load(low, x + (Config::paired || is_value ? 16 : 8) * lane);
        load(high, x + second);
    }
    const auto store = [&](int first, int next) {
        *reinterpret_cast<uint4*>(y + first) = make_uint4(low[0], low[1], low[2], low[3]);
        *reinterpret_cast<uint4*>(y + next) = make_uint4(high[0], high[1], high[2], high[3]);
    };
    uint32_t cosine[4] = {}, sine[4] = {};
    if (wanted && !is_value) {
        const uint16_t* row = p.table + p.positions[token] * dim + 8 * lane;
        load(cosine, row);
        load(sine, row + dim / 2);
    }
    const uint16_t* gamma = is_query ? p.q_gamma : p.k_gamma;
    if (gamma) {  // uniform over the grid (all heads or none): shuffles see full warps
        float squares = 0.f;
        UNROLL for (int i = 0; i < 4; ++i) {
            const float a = low_float<bf16>(low[i]), b = high_float<bf16>(low[i]), c = low_float<bf16>(high[i]), d = high_float<bf16>(high[i]);
            squares += a * a + b * b + c * c + d * d;
        }
        UNROLL for (int step = lanes / 2; step > 0; step /= 2) squares += ptx::shfl_xor(squares, step);
        const float factor = rsqrtf(squares / static_cast<float>(dim) + p.epsilon);
        if (wanted && !is_value) {
            uint32_t weight[4];
            load(weight, gamma + 8 * lane);
            UNROLL for (int i = 0; i < 4; ++i) low[i] = normalize_pair<bf16>(low[i], weight[i], factor);
            load(weight, gamma + dim / 2 + 8 * lane);
            UNROLL for (int i = 0; i < 4; ++i) high[i] = normalize_pair<bf16>(high[i], weight[i], factor);
        }
    }
    if (!wanted) return;
    if (is_value) {
        store(16 * lane, 16 * lane + 8);
        return;
    }
    UNROLL for (int i = 0; i < 4; ++i) {
        const float a = low_float<bf16>(low[i]), b = high_float<bf16>(low[i]), c = low_float<bf16>(high[i]), d = high_float<bf16>(high[i]);
        const float cos_a = low_float<bf16>(cosine[i]), cos_b = high_float<bf16>(cosine[i]);
        const float sin_a = low_float<bf16>(sine[i]), sin_b = high_float<bf16>(sine[i]);
        low[i] = round_pair<bf16>(a * cos_a - c * sin_a, b * cos_b - d * sin_b);
        high[i] = round_pair<bf16>(c * cos_a + a * sin_a, d * cos_b + b * sin_b);
    }
    store(8 * lane, dim / 2 + 8 * lane);
}

#endif  // ANYBIT_ROPE_PAGES_CUH
