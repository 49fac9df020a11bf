// The split-KV schedule of decode attention, computed on the device from the sequence lengths.
//
// All work is laid out on one line of items (a block of packed tokens or a chunk of the residual), ordered by sequence,
// then KV head. CTAs take equal ranges of the line, warps equal subranges. Lengths are read on the device, so that a
// captured CUDA graph stays valid as they grow.
//
// Plain pages (Config::plain) are vLLM's FlashAttention cache: 16-bit keys and values, token by token, head by head. All
// items are then chunks, and "residual" below means these pages.
#ifndef ANYBIT_DECODE_SCHEDULE_CUH
#define ANYBIT_DECODE_SCHEDULE_CUH

#include "attention/kv_page.cuh"

namespace decode {

struct Params {
    const uint8_t* pages;       // of this layer: [pages, kv_heads, page_bytes]
    const uint16_t* residual;   // of this layer: [sequences, kv_heads, 2, ring * head_dim]
    const int32_t* table;       // [sequences, table_width]: `front` residual blocks, then pages
    const int32_t* lengths;     // [sequences], new tokens included
    const int32_t* sequences;   // [batch], or null for 0, 1, 2 ...
    const uint16_t* q;          // [batch, queries, heads, head_dim], strides below in elements; with starts: [tokens, ...]
    uint16_t* out;              // as q, contiguous
    float* lse;                 // [batch, queries, heads], or null
    const float* sinks;         // [heads], in units of log2, or null
    const float* slopes;        // [heads], in units of log2, or null
    float* partial;             // [2 * CTAs, or pieces, rows, head_dim]
    float* partial_state;       // [2 * CTAs, or pieces, rows, merge_warps, 2]
    uint32_t* arrivals;         // [pairs * rows * merge_warps] counters, zero before and after
    uint32_t* errors;           // checked kernels: error code, or 0
    int64_t q_batch_stride;
    int32_t q_token_stride;
    int32_t q_head_stride;
    int32_t batch;
    int32_t kv_heads;
    int32_t table_width;
    int32_t ring;
    int32_t window;             // tokens packed at a time: a power of two
    int32_t sliding;            // sliding-window size in tokens, or 0
    int32_t pages_count;
    int32_t sequences_count;
    float scale;                // of q.k, in units of log2
    float cap;
    float uncap;
    int64_t page_stride;        // rows (Config::front): bytes from one page of the pool to the next
    const int32_t* starts;      // rows of several queries: [batch + 1], first query of each sequence in q and out
    const uint8_t* values;      // plain pages: the values (`pages` holds the keys)
    int64_t token_stride;       // plain pages: bytes between tokens of a page
    int64_t head_stride;        // plain pages: bytes between heads
};

// Rows of several queries: a sequence has up to `queries` of them, which may straddle two pages. A query reads its own page
// in 16 bits and earlier ones packed, so a sequence is two batch rows ("parts"), one a page; the second is mostly empty.
template <class Config> constexpr int parts = Config::front > 0 && Config::queries > 1 ? 2 : 1;
template <class Config> DEVICE int rows_of(const Params& p) { return p.batch * parts<Config>; }

// The range of one batch row's tokens to read.
struct Extent {
    int length, packed;    // tokens; those read from packed pages
    int first_block, blocks;  // visible blocks: first_block .. first_block + blocks - 1
    int first_chunk, items;   // first visible residual chunk; items in total, at least 1, or 0 for an empty part
    int before, start, first, count;  // parts: tokens before this step; first query in q; this part's first query, count

    // Whether this row computes query `token` of the sequence, and that query's index in the launch.
    template <class Config> DEVICE bool has(int token) const {
        return parts<Config> > 1 ? token >= first && token < first + count : token < Config::queries;
    }
    template <class Config> DEVICE int64_t place(int row, int token) const {
        return parts<Config> > 1 ? start + token : static_cast<int64_t>(row) * Config::queries + token;
    }

    // The line is cut between pieces: items, or with a fixed split (Config::split) runs of `split` items. Each run starts a
    // fresh state and keeps its own partial result, so that outputs don't depend on where the line is cut, and thus not
    // on the other sequences.
    template <class Config> DEVICE int pieces() const { return Config::split ? (items + Config::split - 1) / Config::split : items; }
};


template <class Config> DEVICE Extent extent_of(const Params& p, int row, int length) {
    Extent e;
    int queries = Config::queries;
    if constexpr (parts<Config> > 1) {
        e.start = p.starts[row / 2];
        queries = p.starts[row / 2 + 1] - e.start;
    }
    if constexpr (Config::checked) {
        if (length < 0 || length > (p.table_width - Config::front) * Config::page || queries > Config::queries) {
            atomicMax(p.errors, kv_page::bad_length);
            length = 0;
        }
    }
    int before = max(length - queries, 0);  // older tokens of this step's window are still in the residual
    e.length = length;
    e.packed = Config::plain ? 0 : before & ~(p.window - 1);
    if constexpr (parts<Config> > 1) {
        const int border = e.packed + p.window, near = min(queries, border - before);  // end of the first query's page
        const bool second = row % 2;
        e.before = before;
        e.first = second ? near : 0;
        e.count = second ? queries - near : near;
        e.length = second ? length : min(length, border);
        e.packed = second ? border : e.packed;
        before += e.first;
    }
    int low = 0;
    if constexpr (Config::windowed) low = max(before + 1 - p.sliding, 0);
    e.first_block = min(low, e.packed) / Config::block;
    e.blocks = e.packed / Config::block - e.first_block;
    e.first_chunk = max(low - e.packed, 0) / Config::residual_tokens;
    const int chunks = (e.length - e.packed + Config::residual_tokens - 1) / Config::residual_tokens;
    e.items = max(e.blocks + chunks - e.first_chunk, 1);
    if constexpr (parts<Config> > 1)
        if (e.count <= 0) e.items = 0;
    return e;
}

template <class Config> DEVICE int sequence_of(const Params& p, int row) {
    int sequence = p.sequences ? p.sequences[row / parts<Config>] : row / parts<Config>;
    if constexpr (Config::checked)
        if (sequence < 0 || sequence >= p.sequences_count) {
            atomicMax(p.errors, kv_page::bad_sequence);
            sequence = 0;
        }
    return sequence;
}

// A position on the line: batch row `row`, KV head and query chunk `head` (together: a pair), its item `item`.
template <class Config> struct Cursor {
    int row, head, item, sequence;
    Extent extent;

    DEVICE void load(const Params& p) {
        const int found = sequence_of<Config>(p, row);
        set(p, found, p.lengths[found]);
    }
    DEVICE void set(const Params& p, int of, int length) {
        sequence = of;
        extent = extent_of<Config>(p, row, length);
    }
    DEVICE bool last() const { return item + 1 == extent.items; }
    // Whether a piece ends with this item.
    DEVICE bool ends() const { return Config::split == 0 || last() || (item + 1) % max(Config::split, 1) == 0; }
    DEVICE bool packed() const { return !Config::plain && item < extent.blocks; }
    // Moves to the next item; returns whether it belongs to another pair.
    DEVICE bool advance(const Params& p) {
        if (!last()) { ++item; return false; }
        item = 0;
        if (++head == p.kv_heads * Config::query_chunks) {
            head = 0;
            while (++row < rows_of<Config>(p)) {
                load(p);
                if (parts<Config> == 1 || extent.items) break;
            }
        }
        return true;
    }
    DEVICE int pair(const Params& p) const { return row * p.kv_heads * Config::query_chunks + head; }
    // Position of the item's first token.
    DEVICE int position() const {
        return packed() ? (extent.first_block + item) * Config::block
                        : extent.packed + (extent.first_chunk + item - extent.blocks) * Config::residual_tokens;
    }
};

// The line: each lane counts the pieces of a contiguous range of batch rows, and a warp scan adds them up.
template <class Config> struct Line {
    static constexpr int pairs = Config::query_chunks;  // of a KV head
    int total, own, through;  // pieces of all rows; of this lane's rows; inclusive prefix sum over lanes
    int rows, sequence, length;  // rows per lane; sequence and length of its last row

    DEVICE explicit Line(const Params& p) : total(0), own(0), rows((rows_of<Config>(p) + 31) / 32), sequence(0), length(0) {
        const int first = threadIdx.x % 32 * rows, end = min(first + rows, rows_of<Config>(p));
#pragma unroll 4
        for (int row = first; row < end; ++row) own += of_row(p, row);
        through = sum_below(own);
        total = __shfl_sync(0xffffffffu, through, 31);
    }
    DEVICE int of_row(const Params& p, int row) {
        sequence = sequence_of<Config>(p, row);
        length = p.lengths[sequence];
        return extent_of<Config>(p, row, length).template pieces<Config>() * p.kv_heads * pairs;
    }
    DEVICE static int sum_below(int v) {
        UNROLL for (int i = 1; i < 32; i <<= 1) {
            const int other = __shfl_up_sync(0xffffffffu, v, i);
            if (static_cast<int>(threadIdx.x % 32) >= i) v += other;
        }
        return v;
    }
    // Cursor at piece `at` (below the total). Warp-collective.
    DEVICE Cursor<Config> locate(const Params& p, int at) {
        int lane = __ffs(__ballot_sync(0xffffffffu, through > at)) - 1;
        int begin = __shfl_sync(0xffffffffu, through - own, lane), row = lane;
        if (rows > 1)  // find the row among that lane's
            for (int first = lane * rows;; first += 32) {
                const int mine = first + static_cast<int>(threadIdx.x % 32);
                const int pieces = mine < rows_of<Config>(p) ? of_row(p, mine) : 0, end = sum_below(pieces);
                const uint32_t beyond = __ballot_sync(0xffffffffu, begin + end > at);
                lane = beyond ? __ffs(beyond) - 1 : 31;
                const int through_lane = __shfl_sync(0xffffffffu, end, lane), pieces_lane = __shfl_sync(0xffffffffu, pieces, lane);
                row = first + lane;
                begin += beyond ? through_lane - pieces_lane : through_lane;
                if (beyond) break;
            }
        Cursor<Config> cursor{};
        cursor.row = row;
        const int of = __shfl_sync(0xffffffffu, sequence, lane);
        cursor.set(p, of, __shfl_sync(0xffffffffu, length, lane));
        const int pieces = cursor.extent.template pieces<Config>();
        cursor.head = (at - begin) / pieces;
        cursor.item = ((at - begin) - cursor.head * pieces) * max(Config::split, 1);
        return cursor;
    }
};

// Equal ranges: where share i of `shares` of `total` begins. `owner` is the inverse.
DEVICE int share_begin(int total, int shares, int i) {
    return static_cast<int>(static_cast<uint32_t>(i) * static_cast<uint32_t>(total) / static_cast<uint32_t>(shares));
}
DEVICE int owner(int total, int shares, int at) {
    return static_cast<int>((static_cast<uint32_t>(at + 1) * static_cast<uint32_t>(shares) - 1) / static_cast<uint32_t>(total));
}

}  // namespace decode

#endif  // ANYBIT_DECODE_SCHEDULE_CUH
