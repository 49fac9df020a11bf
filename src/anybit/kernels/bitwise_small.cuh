// The bitwise GEMM for few tokens, where reading the weights once is what counts: one block a tile of 64 weights and
// `tokens` tokens, the planes of the activations side by side on wgmma's N side (column plane * tokens + token).
//
// So only weight planes are walked (up in one chunk, down in the next, see bitwise.cuh), and shifts between activation
// planes wait until the end. `groups` warpgroups of `cluster` blocks share the chunks of k; each adds the partial sums
// of its share of the results, which the others leave in shared memory. A warpgroup's first thread loads its operands,
// the weights as far as they fit before the kernel ahead has ended: two blocks should fit a multiprocessor.
#ifndef ANYBIT_BITWISE_SMALL_CUH
#define ANYBIT_BITWISE_SMALL_CUH

#include "bitwise_terms.cuh"

// Shared memory, for each warpgroup: slots of a weight plane, slots of a chunk of activations, then barriers.
template <class Config> struct SmallShared {
    static constexpr int P = Config::weight_bits, Q = Config::activation_bits;
    static constexpr int rows = 64, plane_bytes = rows * planes::row_bytes;
    static constexpr int activation_slot = Config::stacked * planes::row_bytes;
    static constexpr int activations = Config::weight_slots * plane_bytes;
    static constexpr int group_bytes = activations + Config::stages * activation_slot;
    static constexpr int parts = Config::groups * Config::cluster;                  // of k
    static constexpr int values = Config::tokens / 2, share = values / parts;       // a thread's results
    static constexpr int partial_bytes = share * 4 * 128;                           // of one part, for one other
    static constexpr int received = Config::cluster > 1 ? parts * partial_bytes : 0;  // from other blocks: not over operands
    static constexpr int inbox = Config::groups * group_bytes;
    static constexpr int barriers = inbox + Config::groups * received;
    static constexpr int group_barriers = Config::weight_slots + Config::stages + 1;
    static constexpr int bytes = barriers + 8 * Config::groups * group_barriers;
    static_assert(bytes == Config::shared_bytes, "shared_bytes() of bitwise.py disagrees");
    static_assert(Config::stacked >= Q * Config::tokens && values % parts == 0, "refused by why_not()");
    static_assert(Config::cluster > 1 || parts * partial_bytes <= group_bytes, "partial sums replace the operands");

    uint32_t shared;
    int group;

    PTX uint32_t weights(int slot) const { return shared + group * group_bytes + slot * plane_bytes; }
    PTX uint32_t tokens(int slot) const { return shared + group * group_bytes + activations + slot * activation_slot; }
    PTX uint32_t weights_full(int slot) const { return shared + barriers + 8 * (group * group_barriers + slot); }
    PTX uint32_t tokens_full(int slot) const { return weights_full(Config::weight_slots + slot); }
    PTX uint32_t gathered(int of_group) const { return shared + barriers + 8 * (of_group * group_barriers + group_barriers - 1); }
    // Where part `from` leaves its sums for part `to`: within a block in its own spent slots, else in the other's inbox.
    PTX uint32_t partial(int to, int from) const {
        if (Config::cluster > 1) return shared + inbox + to % Config::groups * received + from * partial_bytes;
        return shared + from % Config::groups * group_bytes + to * partial_bytes;
    }
};

template <class Config> struct Small {
    using S = SmallShared<Config>;
    using T = Terms<Config>;
    static constexpr int P = S::P, Q = S::Q;

    const Params& p;
    S shared;
    int thread, part, row, token;
    int count;  // chunks of this part: part, part + parts, ...

    PTX Small(const Params& p, uint32_t base, int rank)
        : p(p), shared{base, static_cast<int>(threadIdx.x) / 128}, thread(threadIdx.x % 128),
          part(rank * Config::groups + static_cast<int>(threadIdx.x) / 128),
          row(static_cast<int>(blockIdx.x) / Config::cluster * S::rows), token(static_cast<int>(blockIdx.y) * Config::tokens),
          count(part < p.chunks ? (p.chunks - part + S::parts - 1) / S::parts : 0) {}

    // Planes are numbered as they are multiplied: the last chunk walks down, the one before it up, and so on.
    PTX const uint8_t* weights_of(int plane) const {
        const int i = plane / P, order = plane % P, chunk = part + i * S::parts;
        const int bit = (count - i) & 1 ? P - 1 - order : order;
        return p.weights + (static_cast<int64_t>(chunk * P + bit) * p.rows_n + row) * planes::row_bytes;
    }
    PTX uint32_t weight_bytes() const { return min(S::rows, p.rows_n - row) * planes::row_bytes; }
    PTX void load_weights(int plane) const {
        const uint32_t full = shared.weights_full(plane % Config::weight_slots);
        ptx::mbarrier_arrive_expect_tx(full, weight_bytes());
        ptx::cp_async_bulk_load(shared.weights(plane % Config::weight_slots), weights_of(plane), weight_bytes(), full);
    }
    PTX void load_tokens(int i) const {
        const uint32_t bytes = min(Config::tokens, p.rows_m - token) * planes::row_bytes, full = shared.tokens_full(i % Config::stages);
        ptx::mbarrier_arrive_expect_tx(full, Q * bytes);
        for (int bit = 0; bit < Q; bit++) {
            const int64_t plane = static_cast<int64_t>(part + i * S::parts) * Q + bit;
            ptx::cp_async_bulk_load(shared.tokens(i % Config::stages) + bit * Config::tokens * planes::row_bytes,
                                    p.activations + (plane * p.rows_m + token) * planes::row_bytes, bytes, full);
        }
    }
    // Weights do not depend on the kernel ahead: fill their slots, bring the rest as near as L2, and only then wait.
    PTX void load_first() const {
        for (int plane = 0; plane < min(Config::weight_slots, count * P); plane++) load_weights(plane);
        for (int plane = Config::weight_slots; plane < count * P; plane++)
            ptx::cp_async_bulk_prefetch_L2(weights_of(plane), weight_bytes());
        ptx::griddepcontrol_wait();
        for (int i = 0; i < min(Config::stages, count); i++) load_tokens(i);
    }

    // This part's sums of the tile, activation planes added up: register 4 * eight + 2 * h + e as wgmma numbers them.
    PTX void multiply(int32_t (&sums)[S::values]) const {
        int32_t acc[Config::stacked / 2];
#pragma unroll
        for (int i = 0; i < Config::stacked / 2; i++) acc[i] = 0;
        int weight_slot = 0, weight_parity = 0;
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const int slot = i % Config::stages, left = (count - i) & 1 ? 1 : 31;  // 31 to the left is 1 to the right
            const uint64_t b = planes::descriptor(shared.tokens(slot));
            ptx::mbarrier_wait_parity(shared.tokens_full(slot), i / Config::stages & 1);
#pragma unroll
            for (int order = 0; order < P; order++) {
                const uint64_t a = planes::descriptor(shared.weights(weight_slot));
                ptx::mbarrier_wait_parity(shared.weights_full(weight_slot), weight_parity);
                ptx::wgmma_fence();
#pragma unroll
                for (int step = 0; step < planes::steps; step++)
                    ptx::wgmma_b1<Config::stacked>(acc, ptx::wgmma_advance(a, step * planes::step_bytes),
                                                   ptx::wgmma_advance(b, step * planes::step_bytes), true);
                ptx::wgmma_commit_group();
                ptx::wgmma_wait_group<0>();
                ptx::wgmma_touch(acc);
                const int next = i * P + order + Config::weight_slots;
                if (next < count * P || (order == P - 1 && i + Config::stages < count)) {
                    ptx::bar_sync(1 + shared.group, 128);  // all four warps have read the slot
                    if (thread == 0 && next < count * P) load_weights(next);
                    if (thread == 0 && order == P - 1 && i + Config::stages < count) load_tokens(i + Config::stages);
                    __syncwarp();
                }
                if (++weight_slot == Config::weight_slots) weight_slot = 0, weight_parity ^= 1;
                if (order < P - 1) rotate(acc, left);
            }
        }
#pragma unroll
        for (int v = 0; v < S::values; v++) {
            uint32_t sum = 0;
#pragma unroll
            for (int j = 0; j < Q; j++) sum += static_cast<uint32_t>(acc[j * S::values + v]) << j;
            sums[v] = static_cast<int32_t>(sum);
        }
    }

    // Gives the other parts their shares of this part's sums, and adds theirs to its own share.
    PTX void gather(const int32_t (&sums)[S::values], int32_t (&own)[S::share]) const {
        constexpr int words = S::share % 4 == 0 ? 4 : 1;
#pragma unroll
        for (int to = 0; to < S::parts; to++) {
            if (to == part) {
#pragma unroll
                for (int v = 0; v < S::share; v++) own[v] = sums[to * S::share + v];
                continue;
            }
#pragma unroll
            for (int v = 0; v < S::share; v += words) {
                const int at = to * S::share + v;
                const uint32_t target = shared.partial(to, part) + (v / words * 128 + thread) * 4 * words;
                if constexpr (words == 4)
                    send(to, target, {static_cast<uint32_t>(sums[at]), static_cast<uint32_t>(sums[at + 1]),
                                      static_cast<uint32_t>(sums[at + 2]), static_cast<uint32_t>(sums[at + 3])});
                else
                    send(to, target, static_cast<uint32_t>(sums[at]));
            }
        }
        if constexpr (Config::cluster > 1) ptx::mbarrier_wait_parity_acquire_cluster(shared.gathered(shared.group), 0);
        else __syncthreads();
#pragma unroll
        for (int from = 0; from < S::parts; from++) {
            if (from == part) continue;
#pragma unroll
            for (int v = 0; v < S::share; v += words) {
                const uint32_t at = shared.partial(part, from) + (v / words * 128 + thread) * 4 * words;
                if constexpr (words == 4) {
                    const uint4 four = ptx::ld_shared_v4(at);
                    own[v] += four.x, own[v + 1] += four.y, own[v + 2] += four.z, own[v + 3] += four.w;
                } else {
                    own[v] += ptx::ld_shared_u32(at);
                }
            }
        }
    }
    PTX void send(int to, uint32_t target, uint4 v) const {
        if constexpr (Config::cluster > 1) {
            const int rank = to / Config::groups;
            ptx::st_async_v4(ptx::mapa(target, rank), v, ptx::mapa(shared.gathered(to % Config::groups), rank));
        } else {
            ptx::st_shared_v4(target, v);
        }
    }
    PTX void send(int to, uint32_t target, uint32_t v) const {
        if constexpr (Config::cluster > 1) {
            const int rank = to / Config::groups;
            ptx::st_async_u32(ptx::mapa(target, rank), v, ptx::mapa(shared.gathered(to % Config::groups), rank));
        } else {
            ptx::st_shared_u32(target, v);
        }
    }

    // Of this thread's values, those numbered part * share + v are its own: value 4 * eight + 2 * h + e.
    PTX int first_token(int v) const { return token + 8 * ((part * S::share + v) / 4) + 2 * (thread % 4); }

    PTX void run() const {
        if (thread == 0) load_first();
        const int n = row + 16 * (thread / 32) + thread % 32 / 4;
        const typename T::Row rows[2] = {T::row(p, n), T::row(p, n + 8)};
        ptx::griddepcontrol_wait();
        constexpr int eights = (S::share + 3) / 4;
        typename T::Column columns[2 * eights];
#pragma unroll
        for (int i = 0; i < 2 * eights; i++) columns[i] = T::column(p, first_token(4 * (i / 2)) + i % 2);
        __syncwarp();

        int32_t sums[S::values], own[S::share];
        multiply(sums);
        if constexpr (Config::cluster > 1) ptx::barrier_cluster_wait();  // the other blocks' barriers stand
        gather(sums, own);
#pragma unroll
        for (int v = 0; v < S::share; v++) {
            const int within = S::share % 4 == 0 ? v % 4 : (part * S::share + v) % 4;  // 2 * h + e
            // A choice by value: indexed at run time, the arrays would leave the registers.
            const typename T::Column &even = columns[2 * (v / 4)], &odd = columns[2 * (v / 4) + 1];
            const typename T::Column column = {within % 2 ? odd.scale : even.scale, within % 2 ? odd.term : even.term,
                                               within % 2 ? odd.zero : even.zero};
            const typename T::Row mine = {within / 2 ? rows[1].scale : rows[0].scale, within / 2 ? rows[1].bias : rows[0].bias,
                                          within / 2 ? rows[1].term : rows[0].term, within / 2 ? rows[1].zero : rows[0].zero};
            T::store(p, first_token(v) + within % 2, n + 8 * (within / 2), own[v], mine, column);
        }
    }
};

template <class Config> PTX void bitwise_small(const Params& p) {
    using S = SmallShared<Config>;
    static_assert(Config::threads == Config::groups * 128, "warpgroups that multiply");
    const int rank = Config::cluster > 1 ? ptx::cluster_ctarank() : 0;
    const Small<Config> small(p, ptx::shared_address(ptx::dynamic_shared()), rank);
    ptx::griddepcontrol_launch_dependents();
    if (small.thread == 0) {
        for (int i = 0; i < S::group_barriers; i++) ptx::mbarrier_init(small.shared.weights_full(i), 1);
        if (Config::cluster > 1)
            ptx::mbarrier_arrive_expect_tx(small.shared.gathered(small.shared.group), (S::parts - 1) * S::partial_bytes);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (Config::cluster > 1) ptx::barrier_cluster_arrive();
    small.run();
}

#endif  // ANYBIT_BITWISE_SMALL_CUH
