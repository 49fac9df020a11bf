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
    int32_t stored;            // the new tokens are in the residual already, and k and v are not read
};

// One half (keys or values) of one sequence and head: where its tokens come from and go to.
template <class Config> struct Tokens {
    const uint16_t* fresh;
    uint16_t* ring;
    int token_stride, ring_tokens, old;
    bool values;

    // Where slot s, channel c of the ring lies; see kvpage.ring_places.
    PTX int place(int s, int c) const {
        const int tile = s / 16 * (Config::head_dim / 16) + c / 16;
        return values ? (tile * 32 + c % 8 * 4 + s % 8 / 2) * 8 + (s % 16 / 8 * 2 + c % 16 / 8) * 2 + s % 2
                      : (tile * 32 + s % 8 * 4 + c % 16 / 4) * 8 + (c % 4 / 2 * 2 + s % 16 / 8) * 2 + c % 2;
    }
};

template <class Config> struct Packer {
    using S = decode::Shape<Config>;
    static constexpr int pitch = Config::head_dim + 8;  // elements: lanes of a word lie in different banks
    static constexpr int rows_bytes = Config::block * pitch * 2;
    static constexpr int key_runs = Config::by_channel ? Config::block / Config::chunk * Config::head_dim : Config::block * S::groups;
    static constexpr int value_runs = Config::block * S::groups;
    static constexpr int runs = key_runs > value_runs ? key_runs : value_runs;
    static constexpr int coders = rows_bytes;             // (zero, 1 / scale) of every run, float
    static constexpr int stored = coders + runs * 8;      // (scale, zero) as they are stored, float16
    static constexpr int slices_fit = Config::threads / (Config::head_dim / 2);
    static constexpr int even = slices_fit >= 8 ? 8 : slices_fit >= 4 ? 4 : slices_fit >= 2 ? 2 : 1;
    static constexpr int chunks = Config::by_channel ? Config::block / Config::chunk : 1;
    static constexpr int slices = even > chunks ? even : chunks;  // of the block's tokens, for ranges by channel
    static constexpr int scratch = stored + runs * 4;
    static constexpr int bytes = scratch + slices * Config::head_dim * 8;
    static_assert(bytes <= Config::shared_bytes, "kvpack.py gives the kernel less shared memory than it lays out");

    PTX static uint16_t* row(int token) { return reinterpret_cast<uint16_t*>(ptx::dynamic_shared()) + token * pitch; }
    PTX static float* coder(int run) { return reinterpret_cast<float*>(ptx::dynamic_shared() + coders) + 2 * run; }
    PTX static uint32_t* parameter(int run) { return reinterpret_cast<uint32_t*>(ptx::dynamic_shared() + stored) + run; }

    PTX static float widen(uint16_t v) {
        if constexpr (Config::bf16) return ptx::cvt_f32_bf16(v);
        else return ptx::cvt_f32_f16(v);
    }
    // Least and most of a run; `broken` becomes a NaN where a value is not finite.
    struct Range {
        float low = 1e30f, high = -1e30f, broken = 0.0f;
        PTX void add(float x) {
            low = fminf(low, x);
            high = fmaxf(high, x);
            broken = fmaf(x, 0.0f, broken);
        }
    };
    template <int bits> PTX static void settle(int run, float low, float high, bool broken) {
        constexpr float top = static_cast<float>((1 << bits) - 1);
        low = fminf(fmaxf(low, -65504.0f), 65504.0f);
        high = fminf(fmaxf(high, -65504.0f), 65504.0f);
        uint16_t scale = ptx::cvt_f16_f32((high - low) / top), zero = ptx::cvt_f16_f32(low);
        if (broken) scale = zero = 0x7e00;
        const float s = ptx::cvt_f32_f16(scale);
        coder(run)[0] = ptx::cvt_f32_f16(zero);
        coder(run)[1] = s > 0.0f ? 1.0f / s : 0.0f;
        *parameter(run) = scale | static_cast<uint32_t>(zero) << 16;
    }

    PTX static void load(const Tokens<Config>& from, int begin) {
        constexpr int quads = Config::head_dim / 4;
        const int held = min(max(from.old - begin, 0), Config::block);  // tokens that are in the ring
        // The ring is read as it lies, sixteen tokens at a time, and taken apart here.
        constexpr int vectors = Config::head_dim / 16 * 32;  // of sixteen tokens
        for (int i = threadIdx.x; i < (held + 15) / 16 * vectors; i += Config::threads) {
            const int tile = i / vectors, depth = i % vectors / 32, g = i % 32 / 4, t = i % 4;
            const uint16_t* at = from.ring + static_cast<int64_t>((begin + 16 * tile) % from.ring_tokens) * Config::head_dim + i % vectors * 8;
            const uint4 v = *reinterpret_cast<const uint4*>(at);
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int w = 0; w < 4; ++w)
#pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const int token = from.values ? 16 * tile + 8 * (w / 2) + 2 * t + odd : 16 * tile + 8 * (w % 2) + g;
                    const int channel = from.values ? 16 * depth + 8 * (w % 2) + g : 16 * depth + 4 * t + 2 * (w / 2) + odd;
                    if (token < held) row(token)[channel] = static_cast<uint16_t>(words[w] >> 16 * odd);
                }
        }
        const uint16_t* fresh = from.fresh + static_cast<int64_t>(begin + held - from.old) * from.token_stride;
#pragma unroll 4
        for (int i = threadIdx.x; i < (Config::block - held) * quads; i += Config::threads) {
            const uint2 v = *reinterpret_cast<const uint2*>(fresh + static_cast<int64_t>(i / quads) * from.token_stride + i % quads * 4);
            *reinterpret_cast<uint2*>(row(held + i / quads) + i % quads * 4) = v;
        }
    }
    // Run of (chunk of tokens, channel), for keys by channel: two channels and a slice of the tokens a thread, then all.
    template <int bits> PTX static void ranges_by_channel() {
        constexpr int pairs = Config::head_dim / 2, tokens = Config::block / slices;
        float* part = reinterpret_cast<float*>(ptx::dynamic_shared() + scratch);
        for (int i = threadIdx.x; i < slices * pairs; i += Config::threads) {
            const int slice = i / pairs, channel = i % pairs * 2;
            Range a, b;
#pragma unroll 8
            for (int x = 0; x < tokens; ++x) {
                const uint32_t v = *reinterpret_cast<const uint32_t*>(row(slice * tokens + x) + channel);
                a.add(widen(static_cast<uint16_t>(v)));
                b.add(widen(static_cast<uint16_t>(v >> 16)));
            }
            float* to = part + (slice * Config::head_dim + channel) * 2;
            to[0] = a.low + a.broken; to[1] = a.high; to[2] = b.low + b.broken; to[3] = b.high;
        }
        __syncthreads();
        for (int run = threadIdx.x; run < chunks * Config::head_dim; run += Config::threads) {
            float low = 1e30f, high = -1e30f;
            bool broken = false;
            for (int x = 0; x < slices / chunks; ++x) {
                const float* from = part + ((run / Config::head_dim * (slices / chunks) + x) * Config::head_dim + run % Config::head_dim) * 2;
                broken = broken || from[0] != from[0];
                low = fminf(low, from[0]);
                high = fmaxf(high, from[1]);
            }
            settle<bits>(run, low, high, broken);
        }
    }
    // Run of (token, group of channels): four channels a lane, reduced over the lanes of a group.
    template <int bits> PTX static void ranges_by_token() {
        constexpr int passes = (Config::head_dim + 127) / 128, quads = Config::channel_group / 4;
        constexpr int lanes = quads == 8 || quads == 16 ? quads : 32;
        const int lane = threadIdx.x % 32;
#pragma unroll 2
        for (int i = threadIdx.x / 32; i < Config::block * passes; i += Config::threads / 32) {
            const int token = i / passes, channel = i % passes * 128 + lane * 4;
            Range r;
            if (channel < Config::head_dim) {
                const uint2 v = *reinterpret_cast<const uint2*>(row(token) + channel);
                r.add(widen(static_cast<uint16_t>(v.x)));
                r.add(widen(static_cast<uint16_t>(v.x >> 16)));
                r.add(widen(static_cast<uint16_t>(v.y)));
                r.add(widen(static_cast<uint16_t>(v.y >> 16)));
            }
            const uint32_t broken = __ballot_sync(0xffffffffu, r.broken != r.broken);
            for (int x = lanes / 2; x; x >>= 1) {
                r.low = fminf(r.low, __shfl_xor_sync(0xffffffffu, r.low, x));
                r.high = fmaxf(r.high, __shfl_xor_sync(0xffffffffu, r.high, x));
            }
            const uint32_t group = lanes == 32 ? 0xffffffffu : ((1u << lanes % 32) - 1u) << lane / lanes * lanes;
            if (channel < Config::head_dim && lane % lanes == 0)
                settle<bits>(token * S::groups + channel / Config::channel_group, r.low, r.high, (broken & group) != 0);
        }
    }

    // Words in kernel order; see kvpage.pack_tiles. Rounding by a number so large that only integers are left: the bits
    // of x + 1.5 * 2^23 are those of the constant plus the rounded x, so a word is a sum and its constant part is taken off.
    template <int bits, bool values> PTX static void codes(uint8_t* to) {
        constexpr int row_tiles = values ? Config::head_dim / 16 : (bits == 16 || !Config::by_channel ? Config::block : Config::chunk) / 16;
        constexpr int depth = values ? Config::block / 16 : Config::head_dim / 16;
        constexpr int unit_words = kvpage::Unit<bits>::words, units = bits == 2 ? row_tiles / 2 : row_tiles;
        constexpr int vectors = Config::block * Config::head_dim * bits / 128;
        constexpr bool by_channel = !values && Config::by_channel;
        constexpr float top = static_cast<float>((1 << (bits == 16 ? 8 : bits)) - 1);
        uint32_t constant = 0;
#pragma unroll
        for (int f = 0; f < 32 / bits; ++f) constant += 0x4b400000u << (f / (16 / bits) * 16 + f % (16 / bits) * bits);
        for (int i = threadIdx.x; i < vectors; i += Config::threads) {
            const int lane = i % 32, g = lane / 4, t = lane % 4;
            uint32_t word[4];
#pragma unroll
            for (int slot = 0; slot < 4; ++slot) {
                // A vector that stays within one depth tile needs the divisions once.
                constexpr bool within = units * unit_words % 4 == 0;
                const int first = i / 32 * 4 + (within ? 0 : slot), from = first / unit_words;
                const int part = slot % unit_words, unit = within ? slot / unit_words : 0;
                const int tile = from % units + unit, deep = from / units % depth, chunk = from / units / depth;
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
                    if constexpr (bits == 16) {
                        w |= static_cast<uint32_t>(row(token)[channel]) << 16 * odd;
                    } else {
                        const float2 c = *reinterpret_cast<const float2*>(
                            coder(by_channel ? chunk * Config::head_dim + channel : token * S::groups + channel / Config::channel_group));
                        uint16_t v;
                        if constexpr (values) {
                            v = row(token)[channel];
                        } else {  // four channels in one load
                            const uint2 four = *reinterpret_cast<const uint2*>(row(token) + 16 * deep + 4 * t);
                            v = static_cast<uint16_t>((p ? four.y : four.x) >> 16 * odd);
                        }
                        const float x = fminf(fmaxf((widen(v) - c.x) * c.y, 0.0f), top);
                        w += __float_as_uint(x + 12582912.0f) << (16 * odd + bits * field);
                    }
                }
                word[slot] = bits == 16 ? w : w - constant;
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
    tokens.old = p.stored ? length : old;
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
    P::load(tokens, begin);  // rows that are not in the ring are new
    __syncthreads();
    if (tokens.values) P::template pack<Config::value_bits, true>(to + S::key_bytes);
    else P::template pack<Config::key_bits, false>(to);
}

}  // namespace kvpack

using Params = kvpack::Params;

#endif  // ANYBIT_KVPACK_CUH
