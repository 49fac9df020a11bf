// The bitwise GEMM for few tokens, where reading the weights once is what counts, and then latency.
//
// wgmma's A side (64 rows) is one operand, whose planes are walked; on its B side the planes of the other stand side by
// side (column plane * columns + row), and are added with their shifts at the end. Walk::weights has 64 weights and 8 to
// 32 tokens a tile, Walk::tokens up to 64 tokens and 32 weights. The B side stays in shared memory for `span` chunks
// of k, while planes of the A side stream past it: a plane of all chunks, a rotation of the sums, the next plane (and
// up again for the next `span` chunks, see bitwise.cuh). One warp loads: the weights as far as they fit before the
// kernel ahead has ended, so two blocks should fit a multiprocessor. `groups` warpgroups of a block share the chunks of
// a tile, or `cluster` blocks of one warpgroup; each finishes its share of the results.
#ifndef ANYBIT_BITWISE_SMALL_CUH
#define ANYBIT_BITWISE_SMALL_CUH

#include "bitwise_terms.cuh"

// Shared memory: slots of an A plane, slots of a chunk of B, what other blocks send, barriers.
template <class Config> struct SmallShared {
    static constexpr bool walk_weights = Config::walk == Walk::weights;
    static constexpr int P = walk_weights ? Config::weight_bits : Config::activation_bits;  // planes that are walked
    static constexpr int Q = walk_weights ? Config::activation_bits : Config::weight_bits;  // planes side by side
    static constexpr int rows = 64, columns = Config::tokens;
    static constexpr int a_bytes = rows * planes::row_bytes, b_bytes = Config::stacked * planes::row_bytes;
    static constexpr int b = Config::slots * a_bytes;
    static constexpr int inbox = b + Config::stages * b_bytes;
    static constexpr int groups = Config::groups, parts = Config::cluster * groups;
    static constexpr int values = columns / 2, share = values / parts;  // a thread's results
    static constexpr int partial_bytes = share * 4 * 128;
    static constexpr int barriers = inbox + (Config::cluster > 1 ? Config::cluster * partial_bytes : 0);
    static constexpr int bytes = barriers + 16 * (Config::slots + Config::stages) + 16;
    static_assert(bytes == Config::shared_bytes, "shared_bytes() of bitwise.py disagrees");
    static_assert(Config::stacked >= Q * columns && values % parts == 0, "refused by why_not()");
    static_assert(groups == 1 || (Config::cluster == 1 && groups * groups * partial_bytes <= inbox), "refused by why_not()");

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
    int rank;
    int a_row, b_row;
    int count;  // chunks of this block: rank, rank + cluster, ...

    PTX Small(const Params& p, uint32_t base, int rank)
        : p(p), shared{base}, rank(rank), count(rank < p.chunks ? (p.chunks - rank + Config::cluster - 1) / Config::cluster : 0) {
        const int weight_tile = static_cast<int>(blockIdx.x) / Config::cluster, token_tile = static_cast<int>(blockIdx.y);
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

    PTX void load_a(const Step& step, int slot) const {
        const uint8_t* from = S::walk_weights ? p.weights : p.activations;
        const int stored = S::walk_weights ? p.rows_n : p.rows_m;
        const int chunk = rank + (step.first + step.chunk) * Config::cluster, bit = step.down(count) ? P - 1 - step.order : step.order;
        const uint32_t bytes = min(S::rows, stored - a_row) * planes::row_bytes;
        ptx::mbarrier_arrive_expect_tx(shared.a_full(slot), bytes);
        ptx::cp_async_bulk_load(shared.a_slot(slot), from + (static_cast<int64_t>(chunk * P + bit) * stored + a_row) * planes::row_bytes,
                                bytes, shared.a_full(slot));
    }
    PTX uint32_t b_rows() const { return min(S::columns, (S::walk_weights ? p.rows_m : p.rows_n) - b_row) * planes::row_bytes; }
    PTX void load_b(int i, int bit) const {
        const uint8_t* from = S::walk_weights ? p.activations : p.weights;
        const int stored = S::walk_weights ? p.rows_m : p.rows_n;
        const int slot = i % Config::stages, chunk = rank + i * Config::cluster;
        ptx::cp_async_bulk_load(shared.b_slot(slot) + bit * S::columns * planes::row_bytes,
                                from + (static_cast<int64_t>(chunk * Q + bit) * stored + b_row) * planes::row_bytes, b_rows(),
                                shared.b_full(slot));
    }

    PTX void produce() const {
        const int lane = ptx::lane_id(), steps = count * P;
        const int first_b = min(Config::stages, count);  // chunks of B and, below, planes of A that are asked for at once
        Step a = begin(), mine = a;
        int n = 0, mine_at = -1;
        for (; n < min(Config::slots, steps) && a.first + a.chunk < Config::stages; n++, a.next(count))
            if (n == lane) mine = a, mine_at = n;
        auto fill_a = [&] { if (mine_at >= 0) load_a(mine, mine_at); };
        auto fill_b = [&] {
            if (lane < first_b) ptx::mbarrier_arrive_expect_tx(shared.b_full(lane), Q * b_rows());
            __syncwarp();
            for (int i = lane; i < first_b * Q; i += 32) load_b(i / Q, i % Q);
        };
        if (S::walk_weights) fill_a();
        else fill_b();
        ptx::griddepcontrol_wait();
        if (S::walk_weights) fill_b();
        else fill_a();
        if (lane != 0) return;
        for (; n < steps; n++, a.next(count)) {
            const int i = a.first + a.chunk, slot = n % Config::slots;
            if (a.order == 0 && i >= Config::stages) {
                ptx::mbarrier_wait_parity(shared.b_empty(i % Config::stages), (i / Config::stages & 1) ^ 1);
                ptx::mbarrier_arrive_expect_tx(shared.b_full(i % Config::stages), Q * b_rows());
                for (int bit = 0; bit < Q; bit++) load_b(i, bit);
            }
            ptx::mbarrier_wait_parity(shared.a_empty(slot), (n / Config::slots & 1) ^ 1);
            load_a(a, slot);
        }
    }

    // The sums of this warpgroup's chunks, planes of B added up: register 4 * eight + 2 * h + e as wgmma numbers them.
    PTX void multiply(int32_t (&sums)[S::values], int group) const {
        const bool leader = ptx::lane_id() == 0;
        int32_t acc[Config::stacked / 2];
#pragma unroll
        for (int i = 0; i < Config::stacked / 2; i++) acc[i] = 0;
        int slot = 0, parity = 0;
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
                    if (S::groups == 1 || i % S::groups == group) {
                        if (order == 0) ptx::mbarrier_wait_parity(shared.b_full(i % Config::stages), i / Config::stages & 1);
                        ptx::mbarrier_wait_parity(shared.a_full(slot), parity);
                        const uint64_t a = planes::descriptor(shared.a_slot(slot)), b = planes::descriptor(shared.b_slot(i % Config::stages));
                        ptx::wgmma_fence();
#pragma unroll
                        for (int step = 0; step < planes::steps; step++)
                            ptx::wgmma_b1<Config::stacked>(acc, ptx::wgmma_advance(a, step * planes::step_bytes),
                                                           ptx::wgmma_advance(b, step * planes::step_bytes), true);
                        ptx::wgmma_commit_group();
                        if (previous >= 0) {  // its products have ended
                            ptx::wgmma_wait_group<1>();
                            if (leader) ptx::mbarrier_arrive(shared.a_empty(previous));
                        }
                        previous = slot;
                    }
                    if (++slot == Config::slots) slot = 0, parity ^= 1;
                }
                ptx::wgmma_wait_group<0>();
                ptx::wgmma_touch(acc);
                if (leader && previous >= 0) ptx::mbarrier_arrive(shared.a_empty(previous));
                if (order < P - 1) rotate(acc, left);
            }
            if (leader)
                for (int chunk = 0; chunk < chunks; chunk++)
                    if (S::groups == 1 || (first + chunk) % S::groups == group) ptx::mbarrier_arrive(shared.b_empty((first + chunk) % Config::stages));
        }
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
        for (int to = 0; to < Config::cluster; to++) {
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
        for (int from = 0; from < Config::cluster; from++) {
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
        constexpr int row_count = S::walk_weights ? 2 : 2 * eights, column_count = S::walk_weights ? 2 * eights : 2;
        typename T::RowLoad row_loads[row_count];
        typename T::ColumnLoad column_loads[column_count];
#pragma unroll
        for (int i = 0; i < row_count; i++)
            row_loads[i] = T::load_row(p, S::walk_weights ? row + 8 * i : pair + 8 * (first + i / 2) + i % 2);
        ptx::griddepcontrol_wait();
#pragma unroll
        for (int i = 0; i < column_count; i++)
            column_loads[i] = T::load_column(p, S::walk_weights ? pair + 8 * (first + i / 2) + i % 2 : row + 8 * i);

        int32_t sums[S::values], own[S::share];
        multiply(sums, group);
        typename T::Row weights[row_count];
        typename T::Column tokens[column_count];
#pragma unroll
        for (int i = 0; i < row_count; i++) weights[i] = T::row(row_loads[i]);
#pragma unroll
        for (int i = 0; i < column_count; i++) tokens[i] = T::column(column_loads[i]);
        if constexpr (S::groups > 1) {
            exchange(sums, own, group);
        } else if constexpr (Config::cluster > 1) {
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

template <class Config> PTX void bitwise_small(const Params& p) {
    using S = SmallShared<Config>;
    constexpr int loader = 128 * Config::groups;
    static_assert(Config::threads == loader + 32, "warpgroups that multiply, and a warp that loads");
    const int rank = Config::cluster > 1 ? ptx::cluster_ctarank() : 0;
    const Small<Config> small(p, ptx::shared_address(ptx::dynamic_shared()), rank);
    ptx::griddepcontrol_launch_dependents();
    if (threadIdx.x == loader) {
        for (int slot = 0; slot < Config::slots + Config::stages; slot++) {
            ptx::mbarrier_init(small.shared.a_full(slot), 1);
            ptx::mbarrier_init(small.shared.a_empty(slot), 4);  // every warp that multiplies
        }
        ptx::mbarrier_init(small.shared.gathered(), 1);
        if (Config::cluster > 1) ptx::mbarrier_arrive_expect_tx(small.shared.gathered(), (Config::cluster - 1) * S::partial_bytes);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (Config::cluster > 1) ptx::barrier_cluster_arrive();
    if (threadIdx.x < loader) {
        small.consume();
    } else {
        small.produce();
        if constexpr (Config::cluster > 1) {
            __syncwarp();
            ptx::barrier_cluster_wait();
        }
    }
}

#endif  // ANYBIT_BITWISE_SMALL_CUH
