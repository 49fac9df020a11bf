// Skinny bit-plane GEMM on binary wgmma, for few tokens: bound by reading the weights once, then by latency.
//
// Operands are bit planes as in sm90_bitplane_gemm.cuh. One is wgmma's A (`a_operand`, 64 rows), whose planes are walked one
// by one; all planes of the other, B, are concatenated along N (column plane * `tile_b` + row) and added with their shifts
// at the end. B stays in shared memory for a pass of `pass_chunks` chunks of k while planes of A stream: one plane of all
// these chunks, a rotation of the sums, the next plane. Passes walk the planes down and up alternately, the last one down.
//
// A producer warp loads as many weights as fit before griddepcontrol.wait, so two CTAs per SM should fit. A tile's chunks
// are split over `cluster_k` CTAs; each finishes its share of the results.
#ifndef ANYBIT_SM90_BITPLANE_SKINNY_CUH
#define ANYBIT_SM90_BITPLANE_SKINNY_CUH

#include "bitplane/sm90_skinny/sm90_bitplane_skinny_tile.cuh"

// Shared-memory layout: A stages (one plane each), B stages (one chunk each), inbox for other CTAs' sums, mbarriers.
template <class Config> struct SkinnyShared : SkinnyTile<Config> {
    using Sides = SkinnyTile<Config>;
    using Sides::a_is_weights, Sides::P, Sides::Q, Sides::rows, Sides::columns, Sides::values;
    static constexpr int a_bytes = rows * planes::row_bytes, b_bytes = Config::wgmma_n * planes::row_bytes;
    static constexpr int b = Config::a_stages * a_bytes;
    static constexpr int inbox = b + Config::b_stages * b_bytes;
    static constexpr int split = Config::cluster_k;  // CTAs that split K
    static constexpr int share = values / split;  // sums that a thread finishes
    // With more than one pass, why_not() requires 2 * pass_chunks B stages. no_reuse: no slot is filled twice, so that no
    // empty mbarriers are needed.
    static constexpr bool single = Config::b_stages < 2 * Config::pass_chunks, no_reuse = single && Config::a_stages >= P * Config::pass_chunks;
    static constexpr int partial_bytes = share * 4 * 128;
    static constexpr int barriers = inbox + (split > 1 ? split * partial_bytes : 0);
    static constexpr int bytes = barriers + 16 * (Config::a_stages + Config::b_stages) + 16;
    static_assert(bytes == Config::shared_bytes, "shared_bytes() of sm90_bitplane_skinny.py disagrees");
    static_assert(values % split == 0, "refused by why_not()");

    uint32_t shared;
    DEVICE uint32_t a_slot(int slot) const { return shared + slot * a_bytes; }
    DEVICE uint32_t b_slot(int slot) const { return shared + b + slot * b_bytes; }
    DEVICE uint32_t a_full(int slot) const { return shared + barriers + 16 * slot; }
    DEVICE uint32_t a_empty(int slot) const { return a_full(slot) + 8; }
    DEVICE uint32_t b_full(int slot) const { return a_full(Config::a_stages + slot); }
    DEVICE uint32_t b_empty(int slot) const { return b_full(slot) + 8; }
    DEVICE uint32_t gathered() const { return a_full(Config::a_stages + Config::b_stages); }
    DEVICE uint32_t partial(int from) const { return shared + inbox + from * partial_bytes; }
};

template <class Config> struct Skinny {
    using S = SkinnyShared<Config>;
    using T = Terms<Config>;
    static constexpr int P = S::P, Q = S::Q;

    const Params& p;
    S shared;
    int rank;  // among the CTAs that split K
    int a_row, b_row;
    int count;  // this CTA's chunks: rank, rank + split, ...

    DEVICE Skinny(const Params& p, uint32_t base, int rank)
        : p(p), shared{{}, base}, rank(rank), count(rank < p.chunks ? (p.chunks - rank + S::split - 1) / S::split : 0) {
        const int weight_tile = static_cast<int>(blockIdx.x) / S::split, token_tile = static_cast<int>(blockIdx.y);
        a_row = (S::a_is_weights ? weight_tile : token_tile) * S::rows;
        b_row = (S::a_is_weights ? token_tile : weight_tile) * S::columns;
    }

    // Loop nest: passes of some chunks; in each, every plane of A (last pass down, the one before up, ...); every chunk.
    struct Step {
        int first, chunks, order, chunk;  // the pass's first chunk, its chunks; current plane, current chunk
        DEVICE bool down(int count) const { return ((count - first + Config::pass_chunks - 1) / Config::pass_chunks) & 1; }
        DEVICE void next(int count) {
            if (++chunk < chunks) return;
            chunk = 0;
            if (++order < P) return;
            order = 0, first += Config::pass_chunks, chunks = min(Config::pass_chunks, count - first);
        }
    };
    DEVICE Step begin() const { return {0, min(Config::pass_chunks, count), 0, 0}; }

    DEVICE int a_rows() const { return min(S::rows, S::a_stored(p) - a_row); }
    DEVICE void expect_a(int slot) const { ptx::mbarrier_arrive_expect_tx(shared.a_full(slot), a_rows() * planes::row_bytes); }
    DEVICE const uint8_t* a_plane(const Step& step) const {
        const uint8_t* from = S::a_is_weights ? p.weights : p.activations;
        const int chunk = rank + (step.first + step.chunk) * S::split, bit = step.down(count) ? P - 1 - step.order : step.order;
        return from + (static_cast<int64_t>(chunk * P + bit) * S::a_stored(p) + a_row) * planes::row_bytes;
    }
    DEVICE void load_a(const uint8_t* plane, int slot) const { ptx::cp_async_bulk_load(shared.a_slot(slot), plane, a_rows() * planes::row_bytes, shared.a_full(slot)); }
    DEVICE int b_rows() const { return min(S::columns, S::b_stored(p) - b_row); }
    DEVICE void expect_b(int slot) const { ptx::mbarrier_arrive_expect_tx(shared.b_full(slot), Q * b_rows() * planes::row_bytes); }
    // Loads the rows of one plane of B.
    DEVICE void load_b(int i, int bit) const {
        const uint8_t* from = S::a_is_weights ? p.activations : p.weights;
        const int slot = i % Config::b_stages, chunk = rank + i * S::split;
        ptx::cp_async_bulk_load(shared.b_slot(slot) + bit * S::columns * planes::row_bytes,
                                from + (static_cast<int64_t>(chunk * Q + bit) * S::b_stored(p) + b_row) * planes::row_bytes,
                                b_rows() * planes::row_bytes, shared.b_full(slot));
    }

    DEVICE void produce() const {
        const int lane = ptx::lane_id(), steps = count * P;
        const int first_b = min(Config::b_stages, count);  // chunks of B loaded up front; planes of A: below
        Step a = begin(), mine = a;
        int n = 0, mine_at = -1;
        for (; n < min(Config::a_stages, steps) && a.first + a.chunk < Config::b_stages; n++, a.next(count))
            if (n == lane) mine = a, mine_at = n;
        // Everything that doesn't touch the activations precedes griddepcontrol.wait: later work is on the critical path.
        const uint8_t* const plane = a_plane(mine);
        if (mine_at >= 0) expect_a(mine_at);
        if (lane < first_b) expect_b(lane);
        __syncwarp();
        auto fill_a = [&] { if (mine_at >= 0) load_a(plane, mine_at); };
        auto fill_b = [&] {
            for (int i = lane; i < first_b * Q; i += 32) load_b(i / Q, i % Q);
        };
        if (S::a_is_weights) fill_a();
        else fill_b();
        ptx::griddepcontrol_wait();
        if (S::a_is_weights) fill_b();
        else fill_a();
        if (S::no_reuse || lane != 0) return;
        for (; n < steps; n++, a.next(count)) {
            const int i = a.first + a.chunk, slot = n % Config::a_stages;
            if (a.order == 0 && i >= Config::b_stages) {
                ptx::mbarrier_wait_parity(shared.b_empty(i % Config::b_stages), (i / Config::b_stages & 1) ^ 1);
                expect_b(i % Config::b_stages);
                for (int bit = 0; bit < Q; bit++) load_b(i, bit);
            }
            ptx::mbarrier_wait_parity(shared.a_empty(slot), (n / Config::a_stages & 1) ^ 1);
            expect_a(slot);
            load_a(a_plane(a), slot);
        }
    }

    DEVICE void release_a(int slot) const {
        if (ptx::lane_id() == 0) ptx::mbarrier_arrive(shared.a_empty(slot));
    }

    // MMAs of one chunk of an A plane with the chunk of B in `stage`; both have landed.
    DEVICE void multiply_chunk(int32_t (&acc)[Config::wgmma_n / 2], int slot, int stage) const {
        const uint64_t a = planes::descriptor(shared.a_slot(slot)), b = planes::descriptor(shared.b_slot(stage));
        ptx::wgmma_fence();
        S::multiply_chunk(acc, a, b, true);
        ptx::wgmma_commit_group();
    }

    // A single pass, walked down, with a stage per plane.
    DEVICE void walk_without_reuse(int32_t (&acc)[Config::wgmma_n / 2]) const {
        UNROLL for (int order = 0; order < P; order++) {
#pragma unroll 1
            for (int chunk = 0; chunk < count; chunk++) {
                const int slot = order * count + chunk;
                if (order == 0) ptx::mbarrier_wait_parity(shared.b_full(chunk), 0);
                ptx::mbarrier_wait_parity(shared.a_full(slot), 0);
                multiply_chunk(acc, slot, chunk);
            }
            ptx::wgmma_wait_group<0>();
            ptx::wgmma_touch(acc);
            if (order < P - 1) rotate(acc, 1);
        }
    }

    DEVICE void walk(int32_t (&acc)[Config::wgmma_n / 2]) const {
        const bool leader = ptx::lane_id() == 0;
        int slot = 0, parity = 0;
#pragma unroll 1
        for (int first = 0; first < count; first += Config::pass_chunks) {
            const int chunks = min(Config::pass_chunks, count - first);
            const int left = Step{first, chunks, 0, 0}.down(count) ? 1 : 31;  // left by 31 is right by 1
#pragma unroll 1
            for (int order = 0; order < P; order++) {
                int previous = -1;
#pragma unroll 1
                for (int chunk = 0; chunk < chunks; chunk++) {
                    const int i = first + chunk;
                    if (order == 0) ptx::mbarrier_wait_parity(shared.b_full(i % Config::b_stages), i / Config::b_stages & 1);
                    ptx::mbarrier_wait_parity(shared.a_full(slot), parity);
                    multiply_chunk(acc, slot, i % Config::b_stages);
                    if (previous >= 0) {  // its wgmmas complete
                        ptx::wgmma_wait_group<1>();
                        release_a(previous);
                    }
                    previous = slot;
                    if (++slot == Config::a_stages) slot = 0, parity ^= 1;
                }
                ptx::wgmma_wait_group<0>();
                ptx::wgmma_touch(acc);
                if (previous >= 0) release_a(previous);
                if (order < P - 1) rotate(acc, left);
            }
            if (!S::single && leader)
                for (int chunk = 0; chunk < chunks; chunk++) ptx::mbarrier_arrive(shared.b_empty((first + chunk) % Config::b_stages));
        }
    }

    // Sums over this CTA's chunks.
    DEVICE void multiply(int32_t (&sums)[S::values]) const {
        int32_t acc[1][Config::wgmma_n / 2];
        UNROLL for (int i = 0; i < Config::wgmma_n / 2; i++) acc[0][i] = 0;
        if constexpr (S::no_reuse) walk_without_reuse(acc[0]);
        else walk(acc[0]);
        S::combine(sums, acc);
    }

    // Cluster split-K reduction: sends the other CTAs their shares of the sums, and adds theirs to this CTA's share.
    DEVICE void gather(const int32_t (&sums)[S::values], int32_t (&own)[S::share]) const {
        const int thread = threadIdx.x;
        UNROLL for (int to = 0; to < S::split; to++) {
            if (to == rank) {
                UNROLL for (int v = 0; v < S::share; v++) own[v] = sums[to * S::share + v];
                continue;
            }
            const uint32_t target = ptx::mapa(shared.partial(rank), to), barrier = ptx::mapa(shared.gathered(), to);
            UNROLL for (int v = 0; v < S::share; v++)
                ptx::st_async_u32(target + (v * 128 + thread) * 4, static_cast<uint32_t>(sums[to * S::share + v]), barrier);
        }
        ptx::mbarrier_wait_parity_acquire_cluster(shared.gathered(), 0);
        UNROLL for (int from = 0; from < S::split; from++) {
            if (from == rank) continue;
            UNROLL for (int v = 0; v < S::share; v++) own[v] += ptx::ld_shared_u32(shared.partial(from) + (v * 128 + thread) * 4);
        }
    }

    DEVICE void consume() const {
        const int thread = threadIdx.x % 128, row = a_row + 16 * (thread / 32) + thread % 32 / 4, pair = b_row + 2 * (thread % 4);
        constexpr int eights = (S::share + 3) / 4;
        const int first = rank * S::share / 4;  // first octet of columns that this CTA finishes
        SkinnyTerms<Config, eights> terms;
        terms.load_weights(p, row, pair + 8 * first);
        ptx::griddepcontrol_wait();
        terms.load_tokens(p, row, pair + 8 * first);

        int32_t sums[S::values], own[S::share];
        multiply(sums);
        terms.finish();
        const auto& weights = terms.weights;
        const auto& tokens = terms.tokens;
        if constexpr (S::split > 1) {
            ptx::barrier_cluster_wait();  // the other CTAs' mbarriers are initialized
            gather(sums, own);
        } else {
            UNROLL for (int v = 0; v < S::share; v++) own[v] = sums[v];
        }
        if constexpr (!S::a_is_weights && T::is_16bit && S::share % 4 == 0) {
            if (p.y_stride % 2 == 0 && reinterpret_cast<uint64_t>(p.y) % 4 == 0) {  // one word: two weights of a token
                uint16_t* const y = static_cast<uint16_t*>(p.y) + row * p.y_stride + pair + 8 * first;
                UNROLL for (int h = 0; h < 2; h++)
                    UNROLL for (int i = 0; i < eights; i++) {
                        const uint32_t both = T::pack(T::result(own[4 * i + 2 * h], weights[2 * i], tokens[h]),
                                                      T::result(own[4 * i + 2 * h + 1], weights[2 * i + 1], tokens[h]));
                        uint16_t* const at = y + 8 * h * p.y_stride + 8 * i;
                        const int column = pair + 8 * (first + i);
                        if (row + 8 * h < p.m && column + 1 < p.n) *reinterpret_cast<uint32_t*>(at) = both;
                        else if (row + 8 * h < p.m && column < p.n) *at = static_cast<uint16_t>(both);
                    }
                return;
            }
        }
        UNROLL for (int v = 0; v < S::share; v++) {
            // Value 4 * octet + 2 * h + e; with a share below four, which one is known at run time only.
            const int within = S::share % 4 == 0 ? v % 4 : (rank * S::share + v) % 4, h = within / 2, e = within % 2, i = 2 * (v / 4);
            const int at_row = row + 8 * h, at_column = pair + 8 * (first + v / 4) + e;
            if constexpr (S::a_is_weights)
                T::store(p, at_column, at_row, own[v], T::pick(h, weights[0], weights[1]), T::pick(e, tokens[i], tokens[i + 1]));
            else
                T::store(p, at_row, at_column, own[v], T::pick(e, weights[i], weights[i + 1]), T::pick(h, tokens[0], tokens[1]));
        }
    }
};

template <class Config>
__global__ void __launch_bounds__(Config::threads, 1) sm90_bitplane_skinny(const __grid_constant__ Params p) {
    using S = SkinnyShared<Config>;
    constexpr int loader = 128;
    static_assert(Config::threads == loader + 32, "a warpgroup that multiplies, and a warp that loads");
    const int rank = S::split > 1 ? ptx::cluster_ctarank() : 0;
    const Skinny<Config> block(p, ptx::shared_address(ptx::dynamic_shared()), rank);
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == loader) {
        for (int slot = 0; slot < Config::a_stages + Config::b_stages; slot++) {
            ptx::mbarrier_init(block.shared.a_full(slot), 1);
            ptx::mbarrier_init(block.shared.a_empty(slot), 4);  // every warp that consumes it
        }
        ptx::mbarrier_init(block.shared.gathered(), 1);
        if (S::split > 1) ptx::mbarrier_arrive_expect_tx(block.shared.gathered(), (S::split - 1) * S::partial_bytes);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (S::split > 1) ptx::barrier_cluster_arrive();
    if (threadIdx.x < loader) {
        block.consume();
    } else {
        block.produce();
        if constexpr (S::split > 1) {
            __syncwarp();
            ptx::barrier_cluster_wait();
        }
    }
}

#endif  // ANYBIT_SM90_BITPLANE_SKINNY_CUH
