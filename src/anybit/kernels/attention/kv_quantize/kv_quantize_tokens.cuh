// kv_quantize: launch parameters, and one CTA's work (source and destination of its tokens).
#ifndef ANYBIT_KV_QUANTIZE_TOKENS_CUH
#define ANYBIT_KV_QUANTIZE_TOKENS_CUH

#include "attention/kv_page.cuh"

namespace kv_quantize {

struct Params {
    const uint16_t* k;         // [batch, tokens, kv_heads, head_dim] with the strides below, in elements
    const uint16_t* v;
    uint8_t* pages;            // of this layer: [pages, kv_heads, page_bytes]
    uint16_t* residual;        // of this layer: [sequences, kv_heads, 2, ring * head_dim]
    const int32_t* table;
    const int32_t* lengths;    // new tokens included
    const int32_t* sequences;  // [batch], or null for 0, 1, 2 ...
    int64_t k_batch_stride;
    int64_t v_batch_stride;
    int32_t k_token_stride;
    int32_t k_head_stride;
    int32_t v_token_stride;
    int32_t v_head_stride;
    int32_t tokens;            // new tokens per sequence
    int32_t kv_heads;
    int32_t table_width;
    int32_t ring;
    int32_t window;
    int32_t packs;             // whether to pack full windows
    int32_t keeps;             // whether to write the residual
    int32_t pages_count;
    int32_t sequences_count;
    uint32_t* errors;          // checked kernels: error code, or 0
    int32_t stored;            // the residual already holds the new tokens; k and v are not read
    int64_t page_stride;       // rows (Config::front): bytes from one page of the pool to the next
    const int32_t* starts;     // ragged: [batch + 1], first new token of each sequence in k and v
};

// One CTA's half (keys or values) of one sequence and KV head.
template <class Config> struct Tokens {
    const uint16_t* fresh;
    uint16_t* ring;
    int token_stride, ring_tokens, old;
    int begin, slot;  // block to pack: its first token, and that token's ring slot
    int page;         // its page; not waited for before the token loads are issued
    const uint8_t* blocks;  // rows: this half of this head in block 0 of the pool
    const int32_t* row;     // rows: the sequence's table row, ring blocks first
    int64_t page_stride;
    int pages_count;
    int sequence, length, found;  // length this plan assumes; length read after griddepcontrol.wait
    int first, count;  // to the ring: first token, elements
    bool values, packs;

    DEVICE void set(const Params& p, int of, int tokens) {
        const int head = blockIdx.x / 2;
        sequence = of;
        length = found = tokens;
        int start = 0, news = p.tokens;
        if constexpr (Config::ragged) {
            start = p.starts[blockIdx.z];
            news = p.starts[blockIdx.z + 1] - start;
        }
        const int before = length - news;
        values = blockIdx.x % 2;
        if constexpr (Config::front > 0) {
            using S = kv_page::Format<Config>;
            blocks = p.pages + head * (Config::page / Config::block * S::block_bytes) + (values ? Config::slots * Config::head_dim * 2 : 0);
            row = p.table + static_cast<int64_t>(sequence) * p.table_width;
            page_stride = p.page_stride;
            pages_count = p.pages_count;
        } else {
            ring = p.residual + ((static_cast<int64_t>(sequence) * p.kv_heads + head) * 2 + values) * p.ring * Config::head_dim;
        }
        ring_tokens = p.ring;
        old = p.stored ? length : before;
        first = max(before, length - p.ring);
        count = p.keeps && before >= 0 ? (length - first) * Config::head_dim : 0;
        begin = (before & ~(p.window - 1)) + blockIdx.y * Config::block;
        packs = p.packs && before >= 0 && begin < (length & ~(p.window - 1));
        slot = packs || Config::single ? static_cast<int>(static_cast<uint32_t>(max(begin, 0)) % static_cast<uint32_t>(p.ring)) : 0;
        fresh = values ? p.v + blockIdx.z * p.v_batch_stride + static_cast<int64_t>(head) * p.v_head_stride
                       : p.k + blockIdx.z * p.k_batch_stride + static_cast<int64_t>(head) * p.k_head_stride;
        token_stride = values ? p.v_token_stride : p.k_token_stride;
        if constexpr (Config::ragged) fresh += static_cast<int64_t>(start) * token_stride;
    }
    // Address of the 16-slot ring tile whose first slot is s.
    DEVICE uint16_t* tile(int s) const {
        if constexpr (Config::front == 0) return ring + s * Config::head_dim;
        const int block = min(max(row[s / max(Config::slots, 1)], 0), pages_count - 1);
        return reinterpret_cast<uint16_t*>(const_cast<uint8_t*>(blocks) + block * page_stride) + s % max(Config::slots, 1) * Config::head_dim;
    }

    static constexpr bool eager = Config::single && !Config::checked;
    DEVICE bool stale() const { return eager && found != length; }
    DEVICE const uint16_t* of_fresh(int token, int channel) const {
        return fresh + static_cast<int64_t>(token - old) * token_stride + channel;
    }
    // Ring slot of a token.
    DEVICE int slot_of(int token) const {
        if constexpr (!Config::single) return token % ring_tokens;
        const int at = slot + token - begin;  // near the block's first slot: at most one wrap either way
        return at >= ring_tokens ? at - ring_tokens : at < 0 ? at + ring_tokens : at;
    }
    // Element offset of slot s, channel c of the ring; see kv_page.ring_places.
    DEVICE int place(int s, int c) const {
        const int tile = s / 16 * (Config::head_dim / 16) + c / 16;
        return values ? (tile * 32 + c % 8 * 4 + s % 8 / 2) * 8 + (s % 16 / 8 * 2 + c % 16 / 8) * 2 + s % 2
                      : (tile * 32 + s % 8 * 4 + c % 16 / 4) * 8 + (c % 4 / 2 * 2 + s % 16 / 8) * 2 + c % 2;
    }
};

// Prefetches into L2 the ring's part of a window that is now full, before griddepcontrol.wait. Lengths predate the previous
// kernel, as in decode.cuh, and a prefetch reads no values, so the ring may still be written meanwhile.
template <class Config> DEVICE void prefetch(const Params& p, const Tokens<Config>& tokens) {
    constexpr int token = Config::head_dim * 2, line = 128;  // bytes
    if (!tokens.packs || tokens.begin >= (p.table_width - Config::front) * Config::page) return;
    const int held = min(tokens.old - tokens.begin, Config::block) * token, size = p.ring * token;
    UNROLL for (int i = 0; i < Config::block * token; i += line * Config::threads) {
        const int at = i + line * threadIdx.x, place = tokens.slot * token + at;
        if constexpr (Config::front > 0) {
            constexpr int tile = 16 * token;
            const int wrapped = place < size ? place : place - size;
            if (at < held) ptx::prefetch_L2(reinterpret_cast<const uint8_t*>(tokens.tile(wrapped / tile * 16)) + wrapped % tile);
        } else if (at < held) {
            ptx::prefetch_L2(reinterpret_cast<const uint8_t*>(tokens.ring) + (place < size ? place : place - size));
        }
    }
}

}  // namespace kv_quantize

#endif  // ANYBIT_KV_QUANTIZE_TOKENS_CUH
