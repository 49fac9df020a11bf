// Which part of which sequence is whose: the split of decode attention, computed on the device from the lengths.
//
// The work is a line of units, a unit being a block of packed tokens or a chunk of a residual, sequence after sequence,
// KV head after KV head. Blocks of threads take equal stretches of the line, warps equal stretches of these. Lengths
// are read where they lie, so a CUDA graph stays right while they grow.
//
// Plain pages (Config::plain) are those of vLLM's FlashAttention: every token of a page has its keys and its values of 16
// bits, head after head. All units then are chunks, and what belongs to a residual below belongs to these pages.
#ifndef ANYBIT_DECODE_SCHEDULE_CUH
#define ANYBIT_DECODE_SCHEDULE_CUH

#include "attention/kv_page.cuh"

namespace decode {

struct Params {
    const uint8_t* pages;       // of this layer: [pages, kv_heads, page_bytes]
    const uint16_t* residual;   // of this layer: [sequences, kv_heads, 2, ring * head_dim]
    const int32_t* table;       // [sequences, table_width]: pages; in front of them `front` blocks that are the residual
    const int32_t* lengths;     // [sequences], the new tokens included
    const int32_t* sequences;   // [batch], or null for 0, 1, 2 ...
    const uint16_t* q;          // [batch, queries, heads, head_dim] with these strides, in elements; with starts: [tokens, ...]
    uint16_t* out;              // as q, dense
    float* lse;                 // [batch, queries, heads], or null
    const float* sinks;         // [heads], in units of log2, or null
    const float* slopes;        // [heads], in units of log2, or null
    float* partial;             // [2 * blocks, or pieces, rows, head_dim]
    float* partial_state;       // [2 * blocks, or pieces, rows, 2]
    uint32_t* arrivals;         // [batch * kv_heads * query chunks * rows], zero before and after
    uint32_t* errors;           // checked kernels: what was wrong, or 0
    int64_t q_batch_stride;
    int32_t q_token_stride;
    int32_t q_head_stride;
    int32_t batch;
    int32_t kv_heads;
    int32_t table_width;
    int32_t ring;
    int32_t window;             // tokens that are packed at a time: a power of two
    int32_t sliding;            // tokens a query sees, or 0 for all
    int32_t pages_count;
    int32_t sequences_count;
    float scale;                // of q.k, in units of log2
    float cap;
    float uncap;
    int64_t page_stride;        // rows (Config::front): bytes from one page of the pool to the next
    const int32_t* starts;      // rows of several queries: [batch + 1], where those of each sequence begin in q and out
    const uint8_t* values;      // plain pages: as `pages`, which then are the keys
    int64_t token_stride;       // plain pages: bytes from one token of a page to the next, and from one head to the next
    int64_t head_stride;
};

// Rows of several queries: each sequence brings up to `queries`, and these may lie in two pages. A query reads its own
// page in 16 bits and all before packed, so the queries of each page are a part of the batch; the second is mostly empty.
template <class Config> constexpr int parts = Config::front > 0 && Config::queries > 1 ? 2 : 1;
template <class Config> PTX int rows_of(const Params& p) { return p.batch * parts<Config>; }

// What of one sequence is to be read.
struct Extent {
    int length, packed;    // tokens, and those read from pages
    int first_block, blocks;  // visible blocks: first_block .. first_block + blocks - 1
    int first_chunk, units;   // visible chunks of the residual begin here; units in all, at least 1, or 0 of an empty part
    int before, start, first, count;  // parts: tokens before the step; where queries begin; the first here, how many

    // Whether query `token` of the sequence is computed here, and its place among the queries of a launch.
    template <class Config> PTX bool has(int token) const {
        return parts<Config> > 1 ? token >= first && token < first + count : token < Config::queries;
    }
    template <class Config> PTX int64_t place(int row, int token) const {
        return parts<Config> > 1 ? start + token : static_cast<int64_t>(row) * Config::queries + token;
    }

    // What a stretch of the line is measured in: units, or pieces of `split` units where these are asked for. A piece
    // begins with a fresh state and ends in one that is kept for itself, so that nothing depends on where the line is
    // cut, and so on the other sequences.
    template <class Config> PTX int steps() const { return Config::split ? (units + Config::split - 1) / Config::split : units; }
};


template <class Config> PTX Extent extent_of(const Params& p, int row, int length) {
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
        const int border = e.packed + p.window, near = min(queries, border - before);  // the first query's page ends there
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
    e.units = max(e.blocks + chunks - e.first_chunk, 1);
    if constexpr (parts<Config> > 1)
        if (e.count <= 0) e.units = 0;
    return e;
}

template <class Config> PTX int sequence_of(const Params& p, int row) {
    int sequence = p.sequences ? p.sequences[row / parts<Config>] : row / parts<Config>;
    if constexpr (Config::checked)
        if (sequence < 0 || sequence >= p.sequences_count) {
            atomicMax(p.errors, kv_page::bad_sequence);
            sequence = 0;
        }
    return sequence;
}

// A unit of the line: chunk `head` (KV head and query chunk) of batch row `row`, unit `unit` of it.
template <class Config> struct Cursor {
    int row, head, unit, sequence;
    Extent extent;

    PTX void load(const Params& p) {
        const int found = sequence_of<Config>(p, row);
        set(p, found, p.lengths[found]);
    }
    PTX void set(const Params& p, int of, int length) {
        sequence = of;
        extent = extent_of<Config>(p, row, length);
    }
    PTX bool last() const { return unit + 1 == extent.units; }
    // Whether a step ends with this unit.
    PTX bool ends() const { return Config::split == 0 || last() || (unit + 1) % max(Config::split, 1) == 0; }
    PTX bool packed() const { return !Config::plain && unit < extent.blocks; }
    // Returns whether the next unit belongs to another pair.
    PTX bool advance(const Params& p) {
        if (!last()) { ++unit; return false; }
        unit = 0;
        if (++head == p.kv_heads * Config::query_chunks) {
            head = 0;
            while (++row < rows_of<Config>(p)) {
                load(p);
                if (parts<Config> == 1 || extent.units) break;
            }
        }
        return true;
    }
    PTX int pair(const Params& p) const { return row * p.kv_heads * Config::query_chunks + head; }
    // Position of the unit's first token.
    PTX int position() const {
        return packed() ? (extent.first_block + unit) * Config::block
                        : extent.packed + (extent.first_chunk + unit - extent.blocks) * Config::residual_tokens;
    }
};

// The line: each lane knows the steps of some rows that follow one another, of one up to 32 sequences.
template <class Config> struct Line {
    static constexpr int pairs = Config::query_chunks;  // of a KV head
    int total, units, through;  // steps of all rows; of this lane's rows; of all rows up to these
    int rows, sequence, length;  // rows a lane; of its last row

    PTX explicit Line(const Params& p) : total(0), units(0), rows((rows_of<Config>(p) + 31) / 32), sequence(0), length(0) {
        const int first = threadIdx.x % 32 * rows, end = min(first + rows, rows_of<Config>(p));
#pragma unroll 4
        for (int row = first; row < end; ++row) units += of_row(p, row);
        through = sum_below(units);
        total = __shfl_sync(0xffffffffu, through, 31);
    }
    PTX int of_row(const Params& p, int row) {
        sequence = sequence_of<Config>(p, row);
        length = p.lengths[sequence];
        return extent_of<Config>(p, row, length).template steps<Config>() * p.kv_heads * pairs;
    }
    PTX static int sum_below(int v) {
#pragma unroll
        for (int i = 1; i < 32; i <<= 1) {
            const int other = __shfl_up_sync(0xffffffffu, v, i);
            if (static_cast<int>(threadIdx.x % 32) >= i) v += other;
        }
        return v;
    }
    // The cursor at place `at` (below the total); the whole warp calls this.
    PTX Cursor<Config> locate(const Params& p, int at) {
        int lane = __ffs(__ballot_sync(0xffffffffu, through > at)) - 1;
        int begin = __shfl_sync(0xffffffffu, through - units, lane), row = lane;
        if (rows > 1)  // which of that lane's rows
            for (int first = lane * rows;; first += 32) {
                const int mine = first + static_cast<int>(threadIdx.x % 32);
                const int steps = mine < rows_of<Config>(p) ? of_row(p, mine) : 0, end = sum_below(steps);
                const uint32_t beyond = __ballot_sync(0xffffffffu, begin + end > at);
                lane = beyond ? __ffs(beyond) - 1 : 31;
                const int through_lane = __shfl_sync(0xffffffffu, end, lane), steps_lane = __shfl_sync(0xffffffffu, steps, lane);
                row = first + lane;
                begin += beyond ? through_lane - steps_lane : through_lane;
                if (beyond) break;
            }
        Cursor<Config> cursor{};
        cursor.row = row;
        const int of = __shfl_sync(0xffffffffu, sequence, lane);
        cursor.set(p, of, __shfl_sync(0xffffffffu, length, lane));
        const int steps = cursor.extent.template steps<Config>();
        cursor.head = (at - begin) / steps;
        cursor.unit = ((at - begin) - cursor.head * steps) * max(Config::split, 1);
        return cursor;
    }
};

// Equal stretches: share `i` of `shares` of `total` begins here; `owner` is its inverse.
PTX int share_begin(int total, int shares, int i) {
    return static_cast<int>(static_cast<uint32_t>(i) * static_cast<uint32_t>(total) / static_cast<uint32_t>(shares));
}
PTX int owner(int total, int shares, int at) {
    return static_cast<int>((static_cast<uint32_t>(at + 1) * static_cast<uint32_t>(shares) - 1) / static_cast<uint32_t>(total));
}

}  // namespace decode

#endif  // ANYBIT_DECODE_SCHEDULE_CUH
