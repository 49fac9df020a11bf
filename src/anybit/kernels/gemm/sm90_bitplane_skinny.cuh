// The bitwise GEMM for few tokens, where reading the weights once is what counts, and then latency.
//
// wgmma's A side (64 rows) is one operand, whose planes are walked; on its B side the planes of the other stand side by
// side (column plane * columns + row), and are added with their shifts at the end. Walk::weights has 64 weights and 8 to
// 32 tokens a tile, Walk::tokens up to 64 tokens and 32 weights. The B side stays in shared memory for `span` chunks
// of k, while planes of the A side stream past it: a plane of all chunks, a rotation of the sums, the next plane (and
// up again for the next `span` chunks, see sm90_bitplane.cuh). One warp loads: the weights as far as they fit before the
// kernel ahead has ended, so two blocks should fit a multiprocessor. `groups` warpgroups of a block share the chunks of
// a tile (or its columns), or `cluster` blocks of one warpgroup; each finishes its share of the results. Or (`multicast`) the blocks of a
// cluster have the same tokens and other weights: each loads its share of every plane of activations for all of them,
// since the tokens that every block wants at once are more than L2 gives.
#ifndef ANYBIT_BITWISE_SMALL_CUH
#define ANYBIT_BITWISE_SMALL_CUH

#include "gemm/sm90_bitplane_few.cuh"

// Shared memory: slots of an A plane, slots of a chunk of B, what other blocks send, barriers.
template <class Config> struct SmallShared : FewSides<Config> {
    using Sides = FewSides<Config>;
    using Sides::walk_weights, Sides::P, Sides::Q, Sides::rows, Sides::columns;
    // Warpgroups share the chunks of k, or the columns: then each has a part of B with all planes of its own columns.
    static constexpr int groups = Config::groups, k_groups = Config::by_columns ? 1 : groups, b_parts = Config::by_columns ? groups : 1;
    static constexpr int part_columns = columns / b_parts, part_bytes = Config::stacked * planes::row_bytes;
    static constexpr int a_bytes = rows * planes::row_bytes, b_bytes = b_parts * part_bytes;
    static constexpr int b = Config::slots * a_bytes;
    static constexpr int inbox = b + Config::stages * b_bytes;
    static constexpr int split = Config::multicast ? 1 : Config::cluster;  // blocks that share k
    static constexpr int parts = split * groups;
    static constexpr int senders = Config::multicast ? Config::cluster : 1;  // blocks that load one tile of activations
    static constexpr bool cast_a = Config::multicast && !walk_weights, cast_b = Config::multicast && walk_weights;
    static constexpr int values = part_columns / 2, share = columns / 2 / parts;  // a thread's sums, and its results
    // why_not() asks for twice as many slots where there is more than one span. Where nothing is loaded twice into a slot
    // nobody has to say that it is free.
    static constexpr bool single = Config::stages < 2 * Config::span, once = single && Config::slots >= P * Config::span;
    static constexpr int partial_bytes = share * 4 * 128;
    static constexpr int barriers = inbox + (split > 1 ? split * partial_bytes : 0);
    static constexpr int bytes = barriers + 16 * (Config::slots + Config::stages) + 16;
    static_assert(bytes == Config::shared_bytes, "shared_bytes() of sm90_bitplane.py disagrees");
    static_assert(Config::stacked >= Q * part_columns && columns / 2 % parts == 0, "refused by why_not()");
    static_assert(groups == 1 || split == 1, "refused by why_not()");
    static_assert(k_groups == 1 || groups * groups * partial_bytes <= inbox, "refused by why_not()");

    uint32_t shared;
    PTX uint32_t a_slot(int slot) const { return shared + slot * a_bytes; }
    PTX uint32_t b_slot(int slot) const { return shared + b + slot * b_bytes; }
    PTX uint32_t a_full(int slot) const { return shared + barriers + 16 * slot; }
    PTX uint32_t a_empty(int slot) const { return a_full(slot) + 8; }
    PTX uint32_t b_full(int slot) const { return a_full(Config::slots + slot); }
    PTX uint32_t b_empty(int slot) const { return b_full(slot) + 8; }
    PTX uint32_t gathered() const { return a_full(Config::slots + Config::stages); }
    PTX uint32_t partial(int from) const { return shared + inbox + from * partial_bytes; }
    PTX uint32_t partial(int from, int to) const { return shared + (from * groups + to) * partial_bytes; }  // over the slots
};

template <class Config> struct Small {
    using S = SmallShared<Config>;
    using T = Terms<Config>;
    static constexpr int P = S::P, Q = S::Q;

    const Params& p;
    S shared;
    int place;  // in the cluster
    int rank;   // among the blocks that share k
    int a_row, b_row;
    int count;  // chunks of this block: rank, rank + split, ...

    PTX Small(const Params& p, uint32_t base, int place)
        : p(p), shared{{}, base}, place(place), rank(S::split > 1 ? place : 0), count(rank < p.chunks ? (p.chunks - rank + S::split - 1) / S::split : 0) {
        const int weight_tile = static_cast<int>(blockIdx.x) / S::split, token_tile = static_cast<int>(blockIdx.y);
        a_row = (S::walk_weights ? weight_tile : token_tile) * S::rows;
        b_row = (S::walk_weights ? token_tile : weight_tile) * S::columns;
    }

    // The walk: spans of chunks; in each, every plane of A (the last span down, the one before up, ...) for every chunk.
    struct Step {
        int first, chunks, order, chunk;  // the span's first chunk and their number; plane and chunk in the walk
        PTX bool down(int count) const { return ((count - first + Config::span - 1) / Config::span) & 1; }
        PTX void next(int count) {
            if (++chunk < chunks) return;
            chunk = 0;
            if (++order < P) return;
            order = 0, first += Config::span, chunks = min(Config::span, count - first);
        }
    };
    PTX Step begin() const { return {0, min(Config::span, count), 0, 0}; }

    // `rows` rows of a plane into a tile, or this block's share of them into the same tile of every block of the cluster.
    template <bool cast, int tile_rows> PTX void load_rows(uint32_t to, const uint8_t* from, int rows, uint32_t barrier) const {
        if constexpr (cast) {
            constexpr int share = tile_rows / S::senders;
            const int first = place * share, mine = min(share, rows - first);
            if (mine > 0)
                ptx::cp_async_bulk_load_multicast(to + first * planes::row_bytes, from + first * planes::row_bytes, mine * planes::row_bytes,
                                                  barrier, static_cast<uint16_t>((1 << S::senders) - 1));
        } else {
            ptx::cp_async_bulk_load(to, from, rows * planes::row_bytes, barrier);
        }
    }
    PTX int a_rows() const { return min(S::rows, S::a_stored(p) - a_row); }
    PTX void expect_a(int slot) const { ptx::mbarrier_arrive_expect_tx(shared.a_full(slot), a_rows() * planes::row_bytes); }
    PTX const uint8_t* a_plane(const Step& step) const {
        const uint8_t* from = S::walk_weights ? p.weights : p.activations;
        const int chunk = rank + (step.first + step.chunk) * S::split, bit = step.down(count) ? P - 1 - step.order : step.order;
        return from + (static_cast<int64_t>(chunk * P + bit) * S::a_stored(p) + a_row) * planes::row_bytes;
    }
    PTX void load_a(const uint8_t* plane, int slot) const { load_rows<S::cast_a, S::rows>(shared.a_slot(slot), plane, a_rows(), shared.a_full(slot)); }
    PTX int b_rows() const { return min(S::columns, S::b_stored(p) - b_row); }
    PTX void expect_b(int slot) const { ptx::mbarrier_arrive_expect_tx(shared.b_full(slot), Q * b_rows() * planes::row_bytes); }
    // The rows of a plane of B that are part `part` of its columns.
    PTX void load_b(int i, int bit, int part) const {
        const uint8_t* from = S::walk_weights ? p.activations : p.weights;
        const int stored = S::b_stored(p), first = b_row + part * S::part_columns;
        const int slot = i % Config::stages, chunk = rank + i * S::split, rows = min(S::part_columns, stored - first);
        if (S::b_parts > 1 && rows <= 0) return;
        load_rows<S::cast_b, S::part_columns>(shared.b_slot(slot) + part * S::part_bytes + bit * S::part_columns * planes::row_bytes,
                                              from + (static_cast<int64_t>(chunk * Q + bit) * stored + first) * planes::row_bytes, rows,
                                              shared.b_full(slot));
    }

    PTX void produce() const {
        const int lane = ptx::lane_id(), steps = count * P;
        const int first_b = min(Config::stages, count);  // chunks of B and, below, planes of A that are asked for at once
        Step a = begin(), mine = a;
        int n = 0, mine_at = -1;
        for (; n < min(Config::slots, steps) && a.first + a.chunk < Config::stages; n++, a.next(count))
            if (n == lane) mine = a, mine_at = n;
        // All that does not touch the activations comes before the wait: what follows it is waited for.
        const uint8_t* const plane = a_plane(mine);
        if (mine_at >= 0) expect_a(mine_at);
        if (lane < first_b) expect_b(lane);
        __syncwarp();
        auto fill_a = [&] { if (mine_at >= 0) load_a(plane, mine_at); };
        auto fill_b = [&] {
            constexpr int pieces = Q * S::b_parts;
            for (int i = lane; i < first_b * pieces; i += 32) load_b(i / pieces, i % Q, i / Q % S::b_parts);
        };
        if (S::walk_weights) fill_a();
        else fill_b();
        if constexpr (Config::multicast) ptx::barrier_cluster_wait();  // the other blocks' barriers stand
        ptx::griddepcontrol_wait();
        if (S::walk_weights) fill_b();
        else fill_a();
        if (S::once || lane != 0) return;
        for (; n < steps; n++, a.next(count)) {
            const int i = a.first + a.chunk, slot = n % Config::slots;
            if (a.order == 0 && i >= Config::stages) {
                ptx::mbarrier_wait_parity(shared.b_empty(i % Config::stages), (i / Config::stages & 1) ^ 1);
                expect_b(i % Config::stages);
                for (int piece = 0; piece < Q * S::b_parts; piece++) load_b(i, piece % Q, piece / Q);
            }
            ptx::mbarrier_wait_parity(shared.a_empty(slot), (n / Config::slots & 1) ^ 1);
            expect_a(slot);
            load_a(a_plane(a), slot);
        }
    }

    // Step n has been read from its slot by this warp. Where other blocks fill the slot they all are told, unless nobody
    // will: then this block could have left.
    PTX void release_a(int slot, int n) const {
        const int lane = ptx::lane_id();
        if constexpr (S::cast_a) {
            if (lane < S::senders && n + Config::slots < count * P) ptx::mbarrier_arrive_cluster(ptx::mapa(shared.a_empty(slot), lane));
        } else {
            if (lane == 0) ptx::mbarrier_arrive(shared.a_empty(slot));
        }
    }

    // A chunk of a plane: what the barriers say is there times the chunk of B in `stage`.
    PTX void multiply_chunk(int32_t (&acc)[Config::stacked / 2], int slot, int stage, int group) const {
        const uint64_t a = planes::descriptor(shared.a_slot(slot));
        const uint64_t b = planes::descriptor(shared.b_slot(stage) + (S::b_parts > 1 ? group * S::part_bytes : 0));
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < planes::steps; step++)
            ptx::wgmma_b1<Config::stacked>(acc, ptx::wgmma_advance(a, step * planes::step_bytes), ptx::wgmma_advance(b, step * planes::step_bytes), true);
        ptx::wgmma_commit_group();
    }

    // One span, walked down, and a slot for every plane.
    PTX void walk_once(int32_t (&acc)[Config::stacked / 2], int group) const {
#pragma unroll
        for (int order = 0; order < P; order++) {
#pragma unroll 1
            for (int chunk = S::k_groups > 1 ? group : 0; chunk < count; chunk += S::k_groups) {
                const int slot = order * count + chunk;
                if (order == 0) ptx::mbarrier_wait_parity(shared.b_full(chunk), 0);
                ptx::mbarrier_wait_parity(shared.a_full(slot), 0);
                multiply_chunk(acc, slot, chunk, group);
            }
            ptx::wgmma_wait_group<0>();
            ptx::wgmma_touch(acc);
            if (order < P - 1) rotate(acc, 1);
        }
    }

    PTX void walk(int32_t (&acc)[Config::stacked / 2], int group) const {
        const bool leader = ptx::lane_id() == 0;
        int slot = 0, parity = 0, n = 0, n_previous = 0;
#pragma unroll 1
        for (int first = 0; first < count; first += Config::span) {
            const int chunks = min(Config::span, count - first);
            const int left = Step{first, chunks, 0, 0}.down(count) ? 1 : 31;  // 31 to the left is 1 to the right
#pragma unroll 1
            for (int order = 0; order < P; order++) {
                int previous = -1;
#pragma unroll 1
                for (int chunk = 0; chunk < chunks; chunk++) {
                    const int i = first + chunk;
                    if (S::k_groups == 1 || i % S::k_groups == group) {
                        if (order == 0) ptx::mbarrier_wait_parity(shared.b_full(i % Config::stages), i / Config::stages & 1);
                        ptx::mbarrier_wait_parity(shared.a_full(slot), parity);
                        multiply_chunk(acc, slot, i % Config::stages, group);
                        if (previous >= 0) {  // its products have ended
                            ptx::wgmma_wait_group<1>();
                            release_a(previous, n_previous);
                        }
                        previous = slot, n_previous = n;
                    }
                    n++;
                    if (++slot == Config::slots) slot = 0, parity ^= 1;
                }
                ptx::wgmma_wait_group<0>();
                ptx::wgmma_touch(acc);
                if (previous >= 0) release_a(previous, n_previous);
                if (order < P - 1) rotate(acc, left);
            }
            if (!S::single && leader)
                for (int chunk = 0; chunk < chunks; chunk++)
                    if (S::k_groups == 1 || (first + chunk) % S::k_groups == group) ptx::mbarrier_arrive(shared.b_empty((first + chunk) % Config::stages));
        }
    }

    // The sums of this warpgroup's chunks, planes of B added up: register 4 * eight + 2 * h + e as wgmma numbers them.
    PTX void multiply(int32_t (&sums)[S::values], int group) const {
        int32_t acc[Config::stacked / 2];
#pragma unroll
        for (int i = 0; i < Config::stacked / 2; i++) acc[i] = 0;
        if constexpr (S::once) walk_once(acc, group);
        else walk(acc, group);
#pragma unroll
        for (int v = 0; v < S::values; v++) {
            uint32_t sum = 0;
#pragma unroll
            for (int j = 0; j < Q; j++) sum += static_cast<uint32_t>(acc[j * S::values + v]) << j;
            sums[v] = static_cast<int32_t>(sum);
        }
    }

    // Sends the other blocks of the cluster their shares of this one's sums, and adds theirs to its own share.
    PTX void gather(const int32_t (&sums)[S::values], int32_t (&own)[S::share]) const {
        const int thread = threadIdx.x;
#pragma unroll
        for (int to = 0; to < S::split; to++) {
            if (to == rank) {
#pragma unroll
                for (int v = 0; v < S::share; v++) own[v] = sums[to * S::share + v];
                continue;
            }
            const uint32_t target = ptx::mapa(shared.partial(rank), to), barrier = ptx::mapa(shared.gathered(), to);
#pragma unroll
            for (int v = 0; v < S::share; v++)
                ptx::st_async_u32(target + (v * 128 + thread) * 4, static_cast<uint32_t>(sums[to * S::share + v]), barrier);
        }
        ptx::mbarrier_wait_parity_acquire_cluster(shared.gathered(), 0);
#pragma unroll
        for (int from = 0; from < S::split; from++) {
            if (from == rank) continue;
#pragma unroll
            for (int v = 0; v < S::share; v++) own[v] += ptx::ld_shared_u32(shared.partial(from) + (v * 128 + thread) * 4);
        }
    }

    // The same among the warpgroups of a block.
    PTX void exchange(const int32_t (&sums)[S::values], int32_t (&own)[S::share], int group) const {
        constexpr int barrier = 1, wide = S::share % 4 == 0 ? 4 : 1;
        const int thread = threadIdx.x % 128;
        ptx::bar_sync(barrier, 128 * S::groups);  // all products have ended: the slots are free
#pragma unroll
        for (int to = 0; to < S::groups; to++) {
            if (to == group) {
#pragma unroll
                for (int v = 0; v < S::share; v++) own[v] = sums[to * S::share + v];
                continue;
            }
#pragma unroll
            for (int v = 0; v < S::share; v += wide) {
                const int32_t* const from = &sums[to * S::share + v];
                const uint32_t at = shared.partial(group, to) + (v * 128 + thread * wide) * 4;
                if constexpr (wide == 4)
                    ptx::st_shared_v4(at, {static_cast<uint32_t>(from[0]), static_cast<uint32_t>(from[1]), static_cast<uint32_t>(from[2]), static_cast<uint32_t>(from[3])});
                else
                    ptx::st_shared_u32(at, static_cast<uint32_t>(from[0]));
            }
        }
        ptx::bar_sync(barrier, 128 * S::groups);
#pragma unroll
        for (int other = 1; other < S::groups; other++) {
            const int from = (group + other) % S::groups;
#pragma unroll
            for (int v = 0; v < S::share; v += wide) {
                const uint32_t at = shared.partial(from, group) + (v * 128 + thread * wide) * 4;
                if constexpr (wide == 4) {
                    const uint4 sum = ptx::ld_shared_v4(at);
                    own[v] += sum.x, own[v + 1] += sum.y, own[v + 2] += sum.z, own[v + 3] += sum.w;
                } else {
                    own[v] += ptx::ld_shared_u32(at);
                }
            }
        }
    }

    PTX void consume() const {
        const int group = threadIdx.x / 128, part = S::groups > 1 ? group : rank;
        const int thread = threadIdx.x % 128, row = a_row + 16 * (thread / 32) + thread % 32 / 4, pair = b_row + 2 * (thread % 4);
        constexpr int eights = (S::share + 3) / 4;
        const int first = part * S::share / 4;  // of the eights that this part finishes
        FewTerms<Config, eights> terms;
        terms.load_weights(p, row, pair + 8 * first);
        if constexpr (Config::multicast) ptx::barrier_cluster_wait();
        ptx::griddepcontrol_wait();
        terms.load_tokens(p, row, pair + 8 * first);

        int32_t sums[S::values], own[S::share];
        multiply(sums, group);
        terms.finish();
        const auto& weights = terms.weights;
        const auto& tokens = terms.tokens;
        if constexpr (S::k_groups > 1) {
            exchange(sums, own, group);
        } else if constexpr (S::split > 1) {
            ptx::barrier_cluster_wait();  // the other blocks' barriers stand
            gather(sums, own);
        } else {
#pragma unroll
            for (int v = 0; v < S::share; v++) own[v] = sums[v];
        }
        if constexpr (!S::walk_weights && T::narrow && S::share % 4 == 0) {
            if (p.y_stride % 2 == 0 && reinterpret_cast<uint64_t>(p.y) % 4 == 0) {  // two weights of a token in one word
                uint16_t* const y = static_cast<uint16_t*>(p.y) + row * p.y_stride + pair + 8 * first;
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                    for (int i = 0; i < eights; i++) {
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
#pragma unroll
        for (int v = 0; v < S::share; v++) {
            // Value 4 * eight + 2 * h + e; which one of a smaller share than four is known at run time only.
            const int within = S::share % 4 == 0 ? v % 4 : (part * S::share + v) % 4, h = within / 2, e = within % 2, i = 2 * (v / 4);
            const int at_row = row + 8 * h, at_column = pair + 8 * (first + v / 4) + e;
            if constexpr (S::walk_weights)
                T::store(p, at_column, at_row, own[v], T::pick(h, weights[0], weights[1]), T::pick(e, tokens[i], tokens[i + 1]));
            else
                T::store(p, at_row, at_column, own[v], T::pick(e, weights[i], weights[i + 1]), T::pick(h, tokens[0], tokens[1]));
        }
    }
};

template <class Config> PTX void sm90_bitplane_skinny(const Params& p) {
    using S = SmallShared<Config>;
    constexpr int loader = 128 * Config::groups;
    static_assert(Config::threads == loader + 32, "warpgroups that multiply, and a warp that loads");
    const int place = Config::cluster > 1 ? ptx::cluster_ctarank() : 0;
    const Small<Config> small(p, ptx::shared_address(ptx::dynamic_shared()), place);
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == loader) {
        for (int slot = 0; slot < Config::slots + Config::stages; slot++) {
            ptx::mbarrier_init(small.shared.a_full(slot), 1);
            // Every warp that multiplies with it, of every block that the slot's loader serves.
            ptx::mbarrier_init(small.shared.a_empty(slot), 4 * S::b_parts * (S::cast_a && slot < Config::slots ? S::senders : 1));
        }
        ptx::mbarrier_init(small.shared.gathered(), 1);
        if (S::split > 1) ptx::mbarrier_arrive_expect_tx(small.shared.gathered(), (S::split - 1) * S::partial_bytes);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (Config::cluster > 1) ptx::barrier_cluster_arrive();
    if (threadIdx.x < loader) {
        small.consume();
    } else {
        small.produce();
        if constexpr (S::split > 1) {
            __syncwarp();
            ptx::barrier_cluster_wait();
        }
    }
}

#endif  // ANYBIT_BITWISE_SMALL_CUH
