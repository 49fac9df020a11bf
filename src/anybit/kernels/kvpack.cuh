// Stores new tokens of K and V: the newest in the 16-bit residual, and every block that became full as codes in its page.
//
// One block of threads does the keys or the values of one block of tokens of one KV head. The arithmetic is that of
// kvpage.quantize, so that pages are the same bit for bit wherever they are made.
#ifndef ANYBIT_KVPACK_CUH
#define ANYBIT_KVPACK_CUH

#include "decode_block.cuh"

namespace kvpack {

struct Params {
    const uint16_t* k;         // [batch, tokens, kv_heads, head_dim] with the strides below, in elements
    const uint16_t* v;
    uint8_t* pages;            // of this layer: [pages, kv_heads, page_bytes]
    uint16_t* residual;        // of this layer: [sequences, kv_heads, 2, ring * head_dim]
    const int32_t* table;
    const int32_t* lengths;    // the new tokens included
    const int32_t* sequences;  // [batch], or null for 0, 1, 2 ...
    int64_t k_batch_stride;
    int64_t v_batch_stride;
    int32_t k_token_stride;
    int32_t k_head_stride;
    int32_t v_token_stride;
    int32_t v_head_stride;
    int32_t tokens;            // new tokens of each sequence
    int32_t kv_heads;
    int32_t table_width;
    int32_t ring;
    int32_t window;
    int32_t packs;             // whether to pack full windows
    int32_t keeps;             // whether to write the residual
};

// One half (keys or values) of one sequence and head: where its tokens come from and go to.
template <class Config> struct Tokens {
    const uint16_t* fresh;
    uint16_t* ring;
    int token_stride, ring_tokens, old;
    bool values;

    // Where slot s, channel c of the ring lies; see kvcache.ring_places.
    PTX int place(int s, int c) const {
        const int tile = s / 16 * (Config::head_dim / 16) + c / 16;
        return values ? (tile * 32 + c % 8 * 4 + s % 8 / 2) * 8 + (s % 16 / 8 * 2 + c % 16 / 8) * 2 + s % 2
                      : (tile * 32 + s % 8 * 4 + c % 16 / 4) * 8 + (c % 4 / 2 * 2 + s % 16 / 8) * 2 + c % 2;
    }
    // Four channels of a token, old (in the ring) or new.
    PTX uint2 four(int token, int channel) const {
        if (token >= old) {
            const uint16_t* from = fresh + static_cast<int64_t>(token - old) * token_stride + channel;
            return *reinterpret_cast<const uint2*>(from);
        }
        uint32_t e[4];
        for (int i = 0; i < 4; ++i) e[i] = ring[place(token % ring_tokens, channel + i)];
        return make_uint2(e[0] | e[1] << 16, e[2] | e[3] << 16);
    }
};

template <class Config> struct Packer {
    using S = decode::Shape<Config>;
    static constexpr int pitch = Config::head_dim + 16;  // elements; keeps columns out of one another's banks
    static constexpr int rows_bytes = Config::block * pitch * 2;
    static constexpr int key_runs = Config::by_channel ? Config::block / Config::chunk * Config::head_dim : Config::block * S::groups;
    static constexpr int value_runs = Config::block * S::groups;
    static constexpr int runs = key_runs > value_runs ? key_runs : value_runs;
    static constexpr int coders = rows_bytes;             // (zero, 1 / scale) of every run, float
    static constexpr int stored = coders + runs * 8;      // (scale, zero) as they are stored, float16
    static constexpr int bytes = stored + runs * 4;
    static_assert(bytes <= Config::shared_bytes, "kvpack.py gives the kernel less shared memory than it lays out");

    PTX static uint16_t* row(int token) { return reinterpret_cast<uint16_t*>(ptx::dynamic_shared()) + token * pitch; }
    PTX static float* coder(int run) { return reinterpret_cast<float*>(ptx::dynamic_shared() + coders) + 2 * run; }
    PTX static uint32_t* parameter(int run) { return reinterpret_cast<uint32_t*>(ptx::dynamic_shared() + stored) + run; }

    PTX static float widen(uint16_t v) {
        if constexpr (Config::bf16) return ptx::cvt_f32_bf16(v);
        else return ptx::cvt_f32_f16(v);
    }
    PTX static float bounded(float x) { return x != x ? x : fminf(fmaxf(x, -65504.0f), 65504.0f); }

    // Least and most of a run of values, and whether one is a NaN.
    struct Range {
        float low = 1e30f, high = -1e30f;
        bool poisoned = false;
        PTX void add(float x) {
            poisoned = poisoned || x != x;
            low = fminf(low, x);
            high = fmaxf(high, x);
        }
    };
    template <int bits> PTX static void settle(int run, const Range& r) {
        constexpr float top = static_cast<float>((1 << bits) - 1);
        uint16_t scale = ptx::cvt_f16_f32((r.high - r.low) / top), zero = ptx::cvt_f16_f32(r.low);
        if (r.poisoned) scale = zero = 0x7fff;
        const float s = ptx::cvt_f32_f16(scale);
        coder(run)[0] = ptx::cvt_f32_f16(zero);
        coder(run)[1] = s > 0.0f ? 1.0f / s : 0.0f;
        *parameter(run) = scale | static_cast<uint32_t>(zero) << 16;
    }
    template <int bits> PTX static uint32_t code(int token, int channel, int run) {
        constexpr float top = static_cast<float>((1 << bits) - 1);
        const float x = bounded(widen(row(token)[channel]));
        return static_cast<uint32_t>(static_cast<int>(fminf(fmaxf(rintf((x - coder(run)[0]) * coder(run)[1]), 0.0f), top)));
    }

    PTX static void load(const Tokens<Config>& from, int begin) {
        constexpr int quads = Config::head_dim / 4;
        for (int i = threadIdx.x; i < Config::block * quads; i += Config::threads) {
            const uint2 v = from.four(begin + i / quads, i % quads * 4);
            *reinterpret_cast<uint2*>(row(i / quads) + i % quads * 4) = v;
        }
    }
    // Run of (chunk of tokens, channel), for keys by channel.
    template <int bits> PTX static void ranges_by_channel() {
        for (int run = threadIdx.x; run < Config::block / Config::chunk * Config::head_dim; run += Config::threads) {
            Range r;
            for (int i = 0; i < Config::chunk; ++i)
                r.add(bounded(widen(row(run / Config::head_dim * Config::chunk + i)[run % Config::head_dim])));
            settle<bits>(run, r);
        }
    }
    // Run of (token, group of channels): four channels a lane, reduced over the lanes of a group.
    template <int bits> PTX static void ranges_by_token() {
        constexpr int passes = (Config::head_dim + 127) / 128, quads = Config::channel_group / 4;
        constexpr int lanes = quads == 8 || quads == 16 ? quads : 32;
        const int lane = threadIdx.x % 32;
        for (int i = threadIdx.x / 32; i < Config::block * passes; i += Config::threads / 32) {
            const int token = i / passes, channel = i % passes * 128 + lane * 4;
            Range r;
            if (channel < Config::head_dim)
                for (int x = 0; x < 4; ++x) r.add(bounded(widen(row(token)[channel + x])));
            for (int x = lanes / 2; x; x >>= 1) {
                r.low = fminf(r.low, __shfl_xor_sync(0xffffffffu, r.low, x));
                r.high = fmaxf(r.high, __shfl_xor_sync(0xffffffffu, r.high, x));
                r.poisoned = __shfl_xor_sync(0xffffffffu, static_cast<int>(r.poisoned), x) || r.poisoned;
            }
            if (channel < Config::head_dim && lane % lanes == 0) settle<bits>(token * S::groups + channel / Config::channel_group, r);
        }
    }

    // Words in kernel order; see kvpage.pack_tiles.
    template <int bits, bool values> PTX static void codes(uint8_t* to) {
        constexpr int row_tiles = values ? Config::head_dim / 16 : (bits == 16 || !Config::by_channel ? Config::block : Config::chunk) / 16;
        constexpr int depth = values ? Config::block / 16 : Config::head_dim / 16;
        constexpr int unit_words = kvpage::Unit<bits>::words, per_depth = row_tiles * bits / 4 / unit_words;  // 4-bit units
        constexpr int units = bits == 2 ? row_tiles / 2 : row_tiles;
        constexpr int vectors = Config::block * Config::head_dim * bits / 128;
        static_assert(per_depth >= 0, "");
        for (int i = threadIdx.x; i < vectors; i += Config::threads) {
            const int lane = i % 32, g = lane / 4, t = lane % 4;
            uint32_t word[4];
#pragma unroll
            for (int slot = 0; slot < 4; ++slot) {
                const int stream = i / 32 * 4 + slot, unit = stream / unit_words, part = stream % unit_words;
                const int tile = unit % units, deep = unit / units % depth, chunk = unit / units / depth;
                uint32_t w = 0;
#pragma unroll
                for (int f = 0; f < 32 / bits; ++f) {
                    const int odd = f / (16 / bits), field = f % (16 / bits);
                    int h, p, sub = 0;
                    if (bits == 2) { h = field & 1; sub = field >> 1 & 1; p = field >> 2; }
                    else if (bits == 4) { h = field & 1; p = field >> 1; }
                    else if (bits == 8) { h = field; p = part; }
                    else { h = part & 1; p = part >> 1; }
                    const int row_in = (bits == 2 ? tile * 2 + sub : tile) * 16 + 8 * h + g;
                    const int token = values ? 16 * deep + 8 * p + 2 * t + odd : chunk * row_tiles * 16 + row_in;
                    const int channel = values ? row_in : 16 * deep + 4 * t + 2 * p + odd;
                    uint32_t u;
                    if constexpr (bits == 16) u = row(token)[channel];
                    else u = code<bits>(token, channel, !values && Config::by_channel
                                            ? token / Config::chunk * Config::head_dim + channel
                                            : token * S::groups + channel / Config::channel_group);
                    w |= u << (16 * odd + bits * field);
                }
                word[slot] = w;
            }
            *reinterpret_cast<uint4*>(to + 16 * static_cast<int64_t>(i)) = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
    PTX static void parameters_by_channel(uint8_t* to) {
        for (int i = threadIdx.x; i < Config::block / Config::chunk * Config::head_dim / 4; i += Config::threads) {
            const uint32_t a = *parameter(4 * i), b = *parameter(4 * i + 1), c = *parameter(4 * i + 2), d = *parameter(4 * i + 3);
            *reinterpret_cast<uint4*>(to + 16 * i) = make_uint4(ptx::prmt(a, b, 0x7632u), ptx::prmt(a, b, 0x5410u),
                                                                ptx::prmt(c, d, 0x7632u), ptx::prmt(c, d, 0x5410u));
        }
    }
    PTX static void parameters_by_token(uint8_t* to) {
        for (int i = threadIdx.x; i < Config::block * S::groups; i += Config::threads) {
            // i = ((group * block / 32 + pair) * 8 + g) * 4 + row
            const int token = i / 32 % (Config::block / 32) * 32 + i % 4 * 8 + i / 4 % 8, group = i / Config::block;
            *reinterpret_cast<uint32_t*>(to + 4 * i) = *parameter(token * S::groups + group);
        }
    }
    PTX static void limit(uint8_t* to) {
        if (threadIdx.x >= 32) return;
        float most = 0.0f;
        for (int i = threadIdx.x; i < Config::block * S::groups; i += 32) most = fmaxf(most, kvpage::low_f16(*parameter(i)));
        for (int x = 16; x; x >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, x));
        if (threadIdx.x < 8) reinterpret_cast<float*>(to)[threadIdx.x] = threadIdx.x ? 0.0f : fminf(60000.0f / most, 1024.0f);
    }

    template <int bits, bool values> PTX static void pack(uint8_t* to) {
        constexpr bool by_channel = !values && Config::by_channel;
        if constexpr (bits != 16) {
            if constexpr (by_channel) ranges_by_channel<bits>();
            else ranges_by_token<bits>();
            __syncthreads();
            uint8_t* parameters = to + (values ? S::value_codes : S::key_codes);
            if constexpr (by_channel) parameters_by_channel(parameters);
            else parameters_by_token(parameters);
            if constexpr (values) limit(parameters + S::value_parameters);
        }
        codes<bits, values>(to);
    }
};

// grid: (blocks of tokens, kv_heads * 2, batch)
template <class Config> __global__ void __launch_bounds__(Config::threads) kernel(const __grid_constant__ Params p) {
    using S = decode::Shape<Config>;
    using P = Packer<Config>;
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();  // only now: what follows may read pages that earlier kernels wrote
    const int sequence = p.sequences ? p.sequences[blockIdx.z] : static_cast<int>(blockIdx.z);
    const int head = blockIdx.y / 2, length = p.lengths[sequence], old = length - p.tokens;
    Tokens<Config> tokens;
    tokens.values = blockIdx.y % 2;
    tokens.fresh = tokens.values ? p.v + blockIdx.z * p.v_batch_stride + static_cast<int64_t>(head) * p.v_head_stride
                                 : p.k + blockIdx.z * p.k_batch_stride + static_cast<int64_t>(head) * p.k_head_stride;
    tokens.token_stride = tokens.values ? p.v_token_stride : p.k_token_stride;
    tokens.ring = p.residual + ((static_cast<int64_t>(sequence) * p.kv_heads + head) * 2 + tokens.values) * p.ring * Config::head_dim;
    tokens.ring_tokens = p.ring;
    tokens.old = old;
    if (p.keeps && old >= 0) {
        const int first = max(old, length - p.ring), count = (length - first) * Config::head_dim;
        for (int i = blockIdx.x * Config::threads + threadIdx.x; i < count; i += gridDim.x * Config::threads) {
            const int token = first + i / Config::head_dim, channel = i % Config::head_dim;
            tokens.ring[tokens.place(token % p.ring, channel)] = tokens.fresh[static_cast<int64_t>(token - old) * tokens.token_stride + channel];
        }
    }
    const int begin = (old & ~(p.window - 1)) + blockIdx.x * Config::block, end = length & ~(p.window - 1);
    if (!p.packs || old < 0 || begin >= end) return;
    const int page = p.table[static_cast<int64_t>(sequence) * p.table_width + begin / Config::page];
    if (page < 0) return;
    uint8_t* to = p.pages + (static_cast<int64_t>(page) * p.kv_heads + head) * (Config::page / Config::block * S::block_bytes)
                + begin % Config::page / Config::block * S::block_bytes;
    P::load(tokens, begin);
    __syncthreads();
    if (tokens.values) P::template pack<Config::value_bits, true>(to + S::key_bytes);
    else P::template pack<Config::key_bits, false>(to);
}

}  // namespace kvpack

using Params = kvpack::Params;

#endif  // ANYBIT_KVPACK_CUH
