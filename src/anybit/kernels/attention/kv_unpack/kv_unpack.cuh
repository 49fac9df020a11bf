// Dequantizes KV pages to plain 16-bit keys and values, for prefill attention over a packed cache.
//
// One CTA produces the keys or the values of one page of one KV head. Packed pages are read in storage order, 16 bytes per
// lane. A page that isn't full yet, or is wanted in 16 bits, is gathered from the ring and the new tokens, zero-padded.
#ifndef ANYBIT_KV_UNPACK_CUH
#define ANYBIT_KV_UNPACK_CUH

#include "attention/kv_page.cuh"
#include "common/values.cuh"

namespace kv_unpack {

struct Params {
    const uint8_t* pages;     // the pool: [pages, kv_heads, page_bytes], pages page_stride bytes apart
    const int32_t* table;     // [sequences, table_width], `front` residual blocks, then pages; see kv_rows.py
    const int32_t* lengths;   // [sequences], new tokens included
    const int32_t* starts;    // [sequences + 1], first new token of each sequence in k and v
    const int32_t* jobs;      // [jobs, 2]: sequence, 2 * page + (1 to gather from the ring and new tokens)
    const uint16_t* k;        // [tokens, kv_heads, head_dim] with the strides below, in elements
    const uint16_t* v;
    uint16_t* out;            // [jobs, 2, kv_heads, page, head_dim]
    int64_t page_stride;
    int32_t k_token_stride;
    int32_t k_head_stride;
    int32_t v_token_stride;
    int32_t v_head_stride;
    int32_t kv_heads;
    int32_t table_width;
    int32_t ring;
    int32_t pages_count;
};

template <class Config> struct Half {
    using S = kv_page::Format<Config>;
    static constexpr int depth = Config::head_dim / 16, blocks = Config::page / Config::block;
    static constexpr int row_tiles = Config::block / 16, warps = Config::threads / 32;

    // Unpacks a tile's words to pairs of 16-bit elements x[h][p], lane = 4 * g + t; see kv_page.py.
    template <int bits> DEVICE static void pairs(uint32_t (&x)[2][2], const uint32_t (&w)[4], int tile) {
        UNROLL for (int h = 0; h < 2; ++h)
            UNROLL for (int p = 0; p < 2; ++p) {
                if constexpr (bits == 16) x[h][p] = w[2 * p + h];
                else if constexpr (bits == 8) x[h][p] = w[2 * tile + p] >> 8 * h & 0x00ff00ffu;
                else if constexpr (bits == 4) x[h][p] = w[tile] >> 4 * (2 * p + h) & 0x000f000fu;
                else x[h][p] = w[tile / 2] >> 2 * (4 * p + 2 * (tile % 2) + h) & 0x00030003u;
            }
    }
    // Dequantizes the two codes of a word.
    DEVICE static uint32_t values_of(uint32_t codes, float scale_low, float zero_low, float scale_high, float zero_high) {
        return ::values::round_pair<Config::bf16>(fmaf(scale_low, static_cast<float>(codes & 0xffffu), zero_low), fmaf(scale_high, static_cast<float>(codes >> 16), zero_high));
    }

    // ---- keys: a lane's words are four channels of tokens g and g + 8
    template <int bits> DEVICE static void keys(const uint8_t* from, uint16_t* to) {
        constexpr int tiles = 16 / bits, chunk_tiles = Config::chunk / 16;
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        for (int vector = threadIdx.x / 32; vector < S::key_codes / 512; vector += warps) {
            const uint4 v = *reinterpret_cast<const uint4*>(from + (vector * 32 + lane) * 16);
            const uint32_t w[4] = {v.x, v.y, v.z, v.w};
            UNROLL for (int n = 0; n < tiles; ++n) {
                const int at = vector * tiles + n, i = at / (chunk_tiles * depth) * chunk_tiles + at % chunk_tiles, j = at / chunk_tiles % depth;
                uint32_t x[2][2];
                pairs<bits>(x, w, n);
                if constexpr (bits != 16 && Config::by_channel) {
                    const uint4 p = *reinterpret_cast<const uint4*>(from + S::key_codes + ((i / chunk_tiles * depth + j) * 4 + t) * 16);
                    const uint32_t zero[2] = {p.x, p.z}, scale[2] = {p.y, p.w};
                    UNROLL for (int k = 0; k < 4; ++k)
                        x[k / 2][k % 2] = values_of(x[k / 2][k % 2], kv_page::low_f16(scale[k % 2]), kv_page::low_f16(zero[k % 2]),
                                                    kv_page::high_f16(scale[k % 2]), kv_page::high_f16(zero[k % 2]));
                } else if constexpr (bits != 16) {
                    const int group = 16 * j / Config::channel_group;
                    UNROLL for (int h = 0; h < 2; ++h) {
                        const uint32_t p = *reinterpret_cast<const uint32_t*>(from + S::key_codes + ((group * (row_tiles / 2) + i / 2) * 8 + g) * 16 + (i % 2 * 2 + h) * 4);
                        const float scale = kv_page::low_f16(p), zero = kv_page::high_f16(p);
                        x[h][0] = values_of(x[h][0], scale, zero, scale, zero);
                        x[h][1] = values_of(x[h][1], scale, zero, scale, zero);
                    }
                }
                put_keys(x, to, i, j, 16);
            }
        }
    }
    // Stores the first `held` tokens of row tile i, channel tile j.
    DEVICE static void put_keys(const uint32_t (&x)[2][2], uint16_t* to, int i, int j, int held) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        UNROLL for (int h = 0; h < 2; ++h)
            if (g + 8 * h < held)
                *reinterpret_cast<uint2*>(to + (16 * i + 8 * h + g) * Config::head_dim + 16 * j + 4 * t) = make_uint2(x[h][0], x[h][1]);
    }

    // ---- values: a lane's words are two tokens of channels g and g + 8; movmatrix transposes to two channels of a token
    template <int bits> DEVICE static void values(const uint8_t* from, uint16_t* to) {
        constexpr int tiles = 16 / bits;
        const int lane = threadIdx.x % 32, g = lane / 4;
        for (int vector = threadIdx.x / 32; vector < S::value_codes / 512; vector += warps) {
            const uint4 v = *reinterpret_cast<const uint4*>(from + (vector * 32 + lane) * 16);
            const uint32_t w[4] = {v.x, v.y, v.z, v.w};
            UNROLL for (int n = 0; n < tiles; ++n) {
                const int at = vector * tiles + n, i = at / depth, c = at % depth;
                uint32_t x[2][2];
                pairs<bits>(x, w, n);
                float scale[2] = {1.0f, 1.0f}, zero[2] = {};
                if constexpr (bits != 16) {
                    const int group = 16 * c / Config::channel_group;
                    UNROLL for (int p = 0; p < 2; ++p) {
                        const uint32_t found = *reinterpret_cast<const uint32_t*>(from + S::value_codes + ((group * (row_tiles / 2) + i / 2) * 8 + g) * 16 + (i % 2 * 2 + p) * 4);
                        scale[p] = kv_page::low_f16(found);
                        zero[p] = kv_page::high_f16(found);
                    }
                }
                UNROLL for (int k = 0; k < 4; ++k) {
                    uint32_t& e = x[k / 2][k % 2];
                    e = ptx::movmatrix_trans(e);
                    if constexpr (bits != 16) e = values_of(e, scale[k % 2], zero[k % 2], scale[k % 2], zero[k % 2]);
                }
                put_values(x, to, i, c, 16);
            }
        }
    }
    DEVICE static void put_values(const uint32_t (&x)[2][2], uint16_t* to, int i, int c, int held) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        UNROLL for (int p = 0; p < 2; ++p)
            if (g + 8 * p < held)
                UNROLL for (int h = 0; h < 2; ++h)
                    *reinterpret_cast<uint32_t*>(to + (16 * i + 8 * p + g) * Config::head_dim + 16 * c + 8 * h + 2 * t) = x[h][p];
    }
};

// Gathers a page in 16 bits: `old` tokens from the ring, new ones up to `count`, then zeros.
template <class Config> DEVICE void exact(const Params& p, const int32_t* row, int page, int head, bool values, int before, int length, int start, uint16_t* to) {
    using H = Half<Config>;
    using S = kv_page::Format<Config>;
    const int first = page * Config::page, lane = threadIdx.x % 32;
    const int old = min(max(before - first, 0), Config::page), count = min(max(length - first, old), Config::page);
    const uint8_t* blocks = p.pages + head * (H::blocks * S::block_bytes) + (values ? Config::slots * Config::head_dim * 2 : 0);
    for (int task = threadIdx.x / 32; task < (old + 15) / 16 * H::depth; task += H::warps) {
        const int i = task / H::depth, j = task % H::depth, slot = (first + 16 * i) % p.ring;
        const int block = min(max(row[slot / Config::slots], 0), p.pages_count - 1);
        const uint16_t* tile = reinterpret_cast<const uint16_t*>(blocks + block * p.page_stride) + slot % Config::slots * Config::head_dim;
        const uint4 v = *reinterpret_cast<const uint4*>(tile + (j * 32 + lane) * 8);
        uint32_t x[2][2] = {{v.x, v.z}, {v.y, v.w}};
        if (values) {
            UNROLL for (int k = 0; k < 4; ++k) x[k / 2][k % 2] = ptx::movmatrix_trans(x[k / 2][k % 2]);
            H::put_values(x, to, i, j, old - 16 * i);
        } else {
            H::put_keys(x, to, i, j, old - 16 * i);
        }
    }
    constexpr int pieces = Config::head_dim / 8;  // 16-byte pieces per token
    const int stride = values ? p.v_token_stride : p.k_token_stride;
    const uint16_t* from = values ? p.v + static_cast<int64_t>(head) * p.v_head_stride : p.k + static_cast<int64_t>(head) * p.k_head_stride;
    for (int i = old * pieces + threadIdx.x; i < Config::page * pieces; i += Config::threads) {
        const int token = i / pieces;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (token < count) v = *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(start + first + token - before) * stride + i % pieces * 8);
        *reinterpret_cast<uint4*>(to + i * 8) = v;
    }
}

// Grid: (kv_heads * 2, jobs).
template <class Config> __global__ void __launch_bounds__(Config::threads) kernel(const __grid_constant__ Params p) {
    using H = Half<Config>;
    using S = kv_page::Format<Config>;
    const int head = blockIdx.x / 2, sequence = p.jobs[2 * blockIdx.y], asked = p.jobs[2 * blockIdx.y + 1], page = asked / 2;
    const bool values = blockIdx.x % 2;
    const int32_t* row = p.table + static_cast<int64_t>(sequence) * p.table_width;
    uint16_t* to = p.out + ((static_cast<int64_t>(blockIdx.y) * 2 + values) * p.kv_heads + head) * (Config::page * Config::head_dim);
    if (asked % 2) {
        const int start = p.starts[sequence], length = p.lengths[sequence], before = length - (p.starts[sequence + 1] - start);
        return exact<Config>(p, row, page, head, values, before, length, start, to);
    }
    const int block = min(max(row[Config::front + page], 0), p.pages_count - 1);
    const uint8_t* from = p.pages + block * p.page_stride + head * (H::blocks * S::block_bytes);
    for (int i = 0; i < H::blocks; ++i, from += S::block_bytes, to += Config::block * Config::head_dim) {
        if (values) H::template values<Config::value_bits>(from + S::key_bytes, to);
        else H::template keys<Config::key_bits>(from, to);
    }
}

}  // namespace kv_unpack

using Params = kv_unpack::Params;

#endif  // ANYBIT_KV_UNPACK_CUH
