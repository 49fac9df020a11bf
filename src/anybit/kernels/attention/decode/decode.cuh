// Split-KV decode attention over packed KV pages and the 16-bit residual, split-KV merge included, in one launch.
//
// The grid is one wave. Warps are independent: each owns a contiguous range of items (decode_schedule.cuh), pipelines key
// and value halves through a private shared-memory ring, and carries one online-softmax state from item to item. Partial
// states merge per CTA in shared memory, then across CTAs in the one that arrives last.
#ifndef ANYBIT_DECODE_CUH
#define ANYBIT_DECODE_CUH

#include "attention/decode/decode_block.cuh"
#include "attention/fp4/decode_fp4.cuh"
#include "attention/decode/decode_merge.cuh"
#include "attention/decode/decode_pair.cuh"
#include "attention/decode/decode_schedule.cuh"

namespace decode {

// A warp's load pipeline. Each item takes two stages, keys then values ("halves").
template <class Config> struct Pipeline {
    using S = Shape<Config>;
    static constexpr int page_blocks = Config::page / Config::block;
    const Params& p;
    Cursor<Config> ahead;   // item of the next half to load
    int left;               // pieces of the line not yet issued in full
    bool values;            // the next half is the values
    int page, slot, filled;  // its page; stage to consume next, stage to fill next
    uint32_t parity, stage, barrier;
    uint64_t policy;
    const uint8_t* pages;    // page 0, offset to this KV head
    const int32_t* entries;  // this sequence's row of the page table

    DEVICE Pipeline(const Params& params, const Cursor<Config>& start, int pieces, uint32_t stages, uint32_t barriers)
        : p(params), ahead(start), left(pieces), values(false), page(0), slot(0), filled(0), parity(0),
          stage(stages), barrier(barriers), policy(0), pages(params.pages), entries(params.table) {
        if constexpr (Config::bulk) {
            policy = Config::keep_in_l2 ? ptx::createpolicy_evict_last() : ptx::createpolicy_evict_first();
            if (threadIdx.x % 32 == 0) {
                for (int i = 0; i < Config::stages; ++i) ptx::mbarrier_init(barrier + 8 * i, 1);
                ptx::fence_mbarrier_init();
            }
            __syncwarp();
        }
        if (pieces > 0) {
            enter_pair();
            find_page();
        }
    }
    // Whether the next half may be loaded before griddepcontrol.wait. In an external pool, the first step of a sequence may
    // hit pages that this very step packs; its own last page then holds this step's tokens only.
    DEVICE bool next_is_old() const {
        if constexpr (Config::plain)
            return ahead.position() + Config::residual_tokens <= ahead.extent.length - Config::queries && ahead.extent.length % Config::page != 1;
        if constexpr (parts<Config> > 1) return ahead.packed() && ahead.row % 2 == 0 && ahead.extent.before % Config::page != 0;
        return ahead.packed() && (Config::front == 0 || ahead.extent.length % Config::page != 1);
    }
    DEVICE void enter_pair() {
        if constexpr (!Config::plain)
            pages = p.pages + static_cast<int64_t>(ahead.head / Config::query_chunks) * (page_blocks * S::block_bytes);
        entries = p.table + static_cast<int64_t>(ahead.sequence) * p.table_width;
    }
    // Loads the table entry of the item ahead, one item early to hide its latency.
    DEVICE void find_page() {
        if constexpr (Config::plain) {  // per lane: the page of its token
            const int token = min(ahead.position() + static_cast<int>(threadIdx.x % 32), ahead.extent.length - 1);
            page = entry_of(max(token, 0) / Config::page);
        } else if constexpr (Config::front > 0) {
            page = entry_of(ahead.packed() ? Config::front + (ahead.extent.first_block + ahead.item) / page_blocks
                                           : ahead.position() % p.ring / Config::slots);
        } else if (ahead.packed()) {
            page = entries[(ahead.extent.first_block + ahead.item) / page_blocks];
            if constexpr (Config::checked)
                if (page < 0 || page >= p.pages_count) {
                    atomicMax(p.errors, kv_page::bad_page);
                    page = 0;
                }
        }
    }
    // Table entries of padding rows are arbitrary: clamp to a valid page.
    DEVICE int entry_of(int index) const { return min(max(entries[index], 0), p.pages_count - 1); }
    DEVICE int64_t page_stride() const {
        if constexpr (Config::front > 0) return p.page_stride;
        else return p.kv_heads * (page_blocks * S::block_bytes);
    }
    // Issues the load of the next half, if any.
    DEVICE void fill() {
        if (left > 0) {
            if constexpr (Config::plain) copy_tokens();
            else copy_half();
            if (values) {
                left -= ahead.ends();
                if (ahead.advance(p)) enter_pair();
                if (left > 0) find_page();
            }
            values = !values;
            if (++filled == Config::stages) filled = 0;
        } else if constexpr (!Config::bulk) {
            ptx::cp_async_commit_group();  // empty: keeps one commit group per half for wait_group
        }
    }
    // Loads half a packed block, or half a residual chunk: from the pool's blocks (Config::front) or its own buffer.
    DEVICE void copy_half() {
        const uint8_t* source;
        int bytes;
        if (ahead.packed()) {
            const int within = (ahead.extent.first_block + ahead.item) % page_blocks;
            source = pages + static_cast<int64_t>(page) * page_stride()
                   + within * S::block_bytes + (values ? S::key_bytes : 0);
            bytes = values ? S::value_bytes : S::key_bytes;
        } else if constexpr (Config::front > 0) {
            const int place = ahead.position() % p.ring % Config::slots + (values ? Config::slots : 0);
            source = pages + static_cast<int64_t>(page) * page_stride() + place * S::element_bytes;
            bytes = S::residual_bytes;
        } else {
            const int place = ahead.position() % p.ring;
            source = reinterpret_cast<const uint8_t*>(p.residual)
                   + ((static_cast<int64_t>(ahead.sequence) * p.kv_heads + ahead.head / Config::query_chunks) * 2 + values) * p.ring * S::element_bytes
                   + place * S::element_bytes;
            bytes = S::residual_bytes;
        }
        copy(stage + filled * S::slot_bytes, source, bytes);
    }
    DEVICE void copy(uint32_t shared, const uint8_t* source, int bytes) {
        if constexpr (Config::bulk) {
            if (threadIdx.x % 32 == 0) {
                ptx::mbarrier_arrive_expect_tx(barrier + 8 * filled, bytes);
                ptx::cp_async_bulk_load_hint(shared, source, bytes, barrier + 8 * filled, policy);
            }
        } else {
            for (int i = 16 * (threadIdx.x % 32); i < bytes; i += 512) ptx::cp_async<16>(shared + i, source + i);
            ptx::cp_async_commit_group();
        }
    }
    // Plain pages: with bulk copies a lane loads its token's row, else 16 bytes of several; rows past the end stay stale.
    DEVICE void copy_tokens() {
        constexpr int tokens = Config::residual_tokens, lanes = S::element_bytes / 16;
        const uint32_t shared = stage + filled * S::slot_bytes;
        static_assert(tokens <= 32, "a lane holds one token's page");
        const int lane = threadIdx.x % 32, position = ahead.position();
        const int there = min(max(ahead.extent.length - position, 0), tokens);
        const uint8_t* mine = (values ? p.values : p.pages) + page * p.page_stride
                            + (position + lane) % Config::page * p.token_stride + ahead.head / Config::query_chunks * p.head_stride;
        if constexpr (Config::bulk) {
            if (lane == 0) ptx::mbarrier_arrive_expect_tx(barrier + 8 * filled, there * S::element_bytes);
            if (lane < there) ptx::cp_async_bulk_load_hint(shared + lane * S::row_bytes, mine, S::element_bytes, barrier + 8 * filled, policy);
        } else {
            UNROLL for (int i = 0; i < tokens * lanes / 32; ++i) {
                const int token = (32 * i + lane) / lanes, part = (32 * i + lane) % lanes;
                const auto from = reinterpret_cast<const uint8_t*>(__shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(mine), token));
                if (token < there) ptx::cp_async<16>(shared + token * S::row_bytes + 16 * part, from + 16 * part);
            }
            ptx::cp_async_commit_group();
        }
    }
    // Waits for the next half; returns its shared address.
    DEVICE uint32_t take() {
        const uint32_t at = stage + slot * S::slot_bytes;
        if constexpr (Config::bulk) {
            ptx::mbarrier_wait_parity(barrier + 8 * slot, parity);
        } else {
            ptx::cp_async_wait_group<Config::stages - 1>();
            __syncwarp();
        }
        if (++slot == Config::stages) { slot = 0; parity ^= 1; }
        return at;
    }
    // Address of the packed block `further` items past `ahead`, or null if it isn't this row's or this warp's.
    DEVICE const uint8_t* beyond(int further) const {
        int item = ahead.item + further, head = ahead.head;
        if (item >= ahead.extent.items) { item -= ahead.extent.items; ++head; }
        if (further >= left || item >= ahead.extent.blocks || head >= p.kv_heads * Config::query_chunks) return nullptr;
        const int block = ahead.extent.first_block + item;
        if constexpr (Config::front > 0)
            return p.pages + entry_of(Config::front + block / page_blocks) * page_stride()
                 + (head / Config::query_chunks) * (page_blocks * S::block_bytes) + block % page_blocks * S::block_bytes;
        int at = entries[block / page_blocks];
        if constexpr (Config::checked) at = min(max(at, 0), p.pages_count - 1);
        return p.pages + (static_cast<int64_t>(at) * p.kv_heads + head / Config::query_chunks) * (page_blocks * S::block_bytes) + block % page_blocks * S::block_bytes;
    }
    // L2 prefetch of `items` packed blocks, one per lane, from `further` items past `ahead` on: this lane's address, or
    // null. The item ahead itself may have its keys loaded already; ask_ahead skips those.
    DEVICE const uint8_t* place_ahead(int further, int items) const {
        const int lane = threadIdx.x % 32;
        return lane < items ? beyond(further + lane) : nullptr;
    }
    DEVICE void ask_ahead(const uint8_t* at, int further) const {
        const int skip = further == 0 && threadIdx.x % 32 == 0 && values ? S::key_bytes : 0;
        if (at != nullptr) ptx::cp_async_bulk_prefetch_L2(at + skip, S::key_bytes + S::value_bytes - skip);
    }
    // The whole warp has consumed the oldest half: refills its stage.
    DEVICE void release() {
        __syncwarp();
        fill();
    }
};

template <class Config> struct Queries {
    static constexpr int depth = Shape<Config>::depth, columns = Config::query_tiles, width = Shape<Config>::width;
    static constexpr bool constant_bytes = Config::paired && !Config::by_channel && !Config::fp4;  // else made per block
    uint32_t q[columns][depth][2];
    Fp4Query<Config> fp4;
    Bytes<Config> bytes[constant_bytes ? columns : 1];

    // Row r of a query chunk is query token r / group, head r % group. raw: load as stored, unscaled.
    DEVICE void load(const Params& p, const Cursor<Config>& at, bool raw) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        UNROLL for (int n = 0; n < columns; ++n) {
            const int column = 4 * width * n + g * width / 2;  // paired: two columns hold the same query
            const int row = at.head % Config::query_chunks * Config::rows + column;
            const int token = row / Config::group, head = at.head / Config::query_chunks * Config::group + row % Config::group;
            const bool there = column < Config::rows && at.extent.template has<Config>(token);
            const int from = parts<Config> > 1 ? at.extent.start : at.row;
            const uint16_t* source = p.q + from * p.q_batch_stride + static_cast<int64_t>(token) * p.q_token_stride
                                   + static_cast<int64_t>(head) * p.q_head_stride + (Config::plain ? 2 : 4) * t;
            UNROLL for (int j = 0; j < depth; ++j) {
                uint2 v = make_uint2(0, 0);
                if (there) {
                    if constexpr (Config::plain) {
                        v.x = *reinterpret_cast<const uint32_t*>(source + 16 * j);
                        v.y = *reinterpret_cast<const uint32_t*>(source + 16 * j + 8);
                    } else {
                        v = *reinterpret_cast<const uint2*>(source + 16 * j);
                    }
                }
                q[n][j][0] = raw ? v.x : scaled(v.x, p.scale);
                q[n][j][1] = raw ? v.y : scaled(v.y, p.scale);
            }
            if constexpr (constant_bytes)
                if (!raw) bytes[n].make(q[n]);
            if constexpr (Config::fp4)
                if (!raw) fp4.make(q[n]);
        }
    }
    DEVICE static uint32_t scaled(uint32_t v, float scale) {
        const uint16_t low = static_cast<uint16_t>(v), high = static_cast<uint16_t>(v >> 16);
        if constexpr (Config::bf16) return ptx::cvt_f16x2_f32(ptx::cvt_f32_bf16(low) * scale, ptx::cvt_f32_bf16(high) * scale);
        else return ptx::cvt_f16x2_f32(ptx::cvt_f32_f16(low) * scale, ptx::cvt_f32_f16(high) * scale);
    }
};

template <class Config, class Block>
DEVICE void attend(Pipeline<Config>& pipeline, const Cursor<Config>& at, const Queries<Config>& queries,
                State<Config>& state, const Logits& logits, const Column (&column)[Config::query_tiles][Shape<Config>::width]) {
    Block block;
    const uint32_t keys = pipeline.take();
    block.scores(keys, queries, logits);
    pipeline.release();
    block.mask(at.position(), logits, column);
    const uint32_t values = pipeline.take();
    block.probabilities(values, state);
    block.weigh(values, state, at.extent.length - at.position());
    pipeline.release();
}

template <class Config>
DEVICE void load_columns(const Params& p, const Cursor<Config>& at, Column (&column)[Config::query_tiles][Shape<Config>::width]) {
    const int t = threadIdx.x % 4;
    UNROLL for (int n = 0; n < Config::query_tiles; ++n)
        UNROLL for (int x = 0; x < Shape<Config>::width; ++x) {
            const int row = at.head % Config::query_chunks * Config::rows + (4 * n + t) * Shape<Config>::width + x;
            const int head = at.head / Config::query_chunks * Config::group + row % Config::group;
            Column& c = column[n][x];
            const int before = parts<Config> > 1 ? at.extent.before : at.extent.length - Config::queries;
            c.position = before + min(row / Config::group, Config::queries - 1);
            c.last = min(c.position, at.extent.length - 1);
            c.first = Config::windowed ? c.position - p.sliding + 1 : 0;
            c.slope = Config::alibi ? p.slopes[head] : 0.0f;
        }
}

// A warp's items, `from` to `to`: `finish(at, state, whole, last)` where a pair, or this warp's part of one, ends.
template <class Config, class Finish>
DEVICE void attend_items(const Params& p, Pipeline<Config>& pipeline, Cursor<Config> at, int from, int to, Finish&& finish) {
    using S = Shape<Config>;
    constexpr bool raw_residual = Config::bf16 && !S::raw_queries;
    State<Config> state;
    Queries<Config> queries;
    Column column[Config::query_tiles][S::width] = {};
    const Logits logits{p.scale, p.cap, p.uncap};
    bool fresh = true, whole = at.item == 0, raw = false;
    for (int i = from; i < to;) {
        if (fresh) {
            fresh = false;
            raw = S::raw_queries;
            queries.load(p, at, raw);
            state.clear();
            if constexpr (Packed<Config>::general) load_columns<Config>(p, at, column);
        }
        if (at.packed()) {
            attend<Config, typename PackedBlock<Config, Config::fp4>::Type>(pipeline, at, queries, state, logits, column);
            if ((Config::split ? at.item : i) % 4 == 3) state.fold();
        } else {
            state.settle();
            if (raw_residual && !raw) {
                raw = true;
                queries.load(p, at, true);
            }
            if constexpr (!Packed<Config>::general) load_columns<Config>(p, at, column);
            attend<Config, Block<Config, Residual<Config>>>(pipeline, at, queries, state, logits, column);
        }
        const int done = i;
        i += at.ends();
        if constexpr (Config::split > 0) {
            if (i != done) {
                state.settle();
                finish_piece<Config>(p, at, state, done);
                fresh = true;
            }
        } else if (at.last() || i == to) {
            state.settle();
            finish(at, state, whole, i == to);
            fresh = whole = true;
        }
        at.advance(p);
    }
}

// A cluster a pair: its warps share the items evenly.
template <class Config> DEVICE void attend_pair(const Params& p) {
    using L = PairLayout<Config>;
    const int warp = ptx::warp_id(), rank = blockIdx.x % L::blocks, pair = blockIdx.x / L::blocks, mine = warp * L::blocks + rank;
    const PairLayout<Config> shared{};
    Cursor<Config> at{};
    at.row = pair / (p.kv_heads * Config::query_chunks);
    at.head = pair % (p.kv_heads * Config::query_chunks);
    at.load(p);
    const int total = at.extent.items, parts = min(total, L::parts);
    if (threadIdx.x == 0) {
        const int own = (L::tasks - rank + L::blocks - 1) / L::blocks;
        ptx::mbarrier_init(shared.arrived(), 1);
        ptx::mbarrier_arrive_expect_tx(shared.arrived(), own * parts * (L::channels * 4 + 8));
        ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::barrier_cluster_arrive_relaxed();
    const int each = total / L::parts, more = total % L::parts;
    const int from = mine * each + min(mine, more), to = from + each + (mine < more);
    at.item = min(from, max(total - 1, 0));
    Pipeline<Config> pipeline(p, at, to - from, shared.stage(warp), shared.barriers(warp));
    int asked = 0;
    for (; asked < Config::stages && pipeline.left > 0 && pipeline.next_is_old(); ++asked) pipeline.fill();
    ptx::griddepcontrol_wait();
    for (; asked < Config::stages; ++asked) pipeline.fill();
    ptx::barrier_cluster_wait();
    attend_items(p, pipeline, at, from, to, [&](const Cursor<Config>&, State<Config>& state, bool, bool) {
        send_part<Config>(shared, warp, mine, state);
    });
    if (parts) merge_sent<Config>(p, shared, warp, rank, pair, parts);
}

template <class Config> DEVICE void attend_line(const Params& p) {
    const int warp = ptx::warp_id();
    const Layout<Config> shared{};
    // PDL: pages, tables and lengths predate the previous kernel; queries and the residual are its output.
    Line<Config> line(p);
    const int total = line.total, shares = min(static_cast<int>(gridDim.x), total);
    const int share = blockIdx.x;
    if (share >= shares) return;
    const int begin = share_begin(total, shares, share), end = share_begin(total, shares, share + 1);
    const int from = begin + (end - begin) * warp / Config::warps, to = begin + (end - begin) * (warp + 1) / Config::warps;
    Cursor<Config> at = line.locate(p, min(from, total - 1));
    Pipeline<Config> pipeline(p, at, to - from, shared.stage(warp), shared.barriers(warp));
    const int early = Config::stages;
    int asked = 0;
    for (; asked < early && pipeline.left > 0 && pipeline.next_is_old(); ++asked) pipeline.fill();
    if constexpr (Config::split == 0) {
        shared.clear_segments(warp);
        plan_merge<Config>(p, shared, warp, line, begin, end, shares);  // overlaps the first loads
    }
    // L2 prefetch past the ring, in two parts: l2_early blocks once this warp's ring has landed, so as not to delay other
    // warps' ring loads, and l2_late blocks once the previous kernel has ended, when memory would idle until a stage
    // frees up. Short ranges gain nothing from it.
    constexpr int enough = 6;  // pieces left
    if constexpr (Config::bulk && Config::l2_early > 0)
        if (asked == early && pipeline.left >= enough) {
            ptx::mbarrier_wait_parity(pipeline.barrier + 8 * (early - 1), 0);
            pipeline.ask_ahead(pipeline.place_ahead(0, Config::l2_early), 0);
        }
    const uint8_t* next = nullptr;  // looked up before the wait, off the queries' critical path
    if constexpr (Config::bulk && Config::l2_late > 0)
        if (asked == early && pipeline.left >= enough) next = pipeline.place_ahead(Config::l2_early, Config::l2_late);
    ptx::griddepcontrol_wait();
    if constexpr (Config::bulk && Config::l2_late > 0) pipeline.ask_ahead(next, Config::l2_early);
    for (; asked < early; ++asked) pipeline.fill();
    attend_items(p, pipeline, at, from, to, [&](const Cursor<Config>& end, State<Config>& state, bool whole, bool last) {
        finish_segment<Config>(p, shared, warp, end, state, whole, last);
    });
    if constexpr (Config::split == 0) merge_block<Config>(p, shared, warp);
}

template <class Config> __global__ void __launch_bounds__(Config::threads, Config::min_blocks_per_sm) kernel(const __grid_constant__ Params p) {
    ptx::griddepcontrol_launch_dependents();
    if constexpr (Config::pair_blocks > 0) attend_pair<Config>(p);
    else attend_line<Config>(p);
}

}  // namespace decode

using Params = decode::Params;

#endif  // ANYBIT_DECODE_CUH
