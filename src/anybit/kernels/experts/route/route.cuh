// Sorts slots (a token's choice of an expert) by expert and gathers their rows of X (or names them), in one launch.
//
// Every CTA counts all ids, and those ahead of its own tokens: it knows where each of its slots goes without hearing from other
// CTAs. Within an expert slots keep their order, so that the result does not depend on the order of threads. An id outside of
// 0 .. experts - 1, such as -1, is skipped.
#ifndef ANYBIT_ROUTE_CUH
#define ANYBIT_ROUTE_CUH

#include "common/ptx/base.cuh"

struct Params {
    const uint32_t* ids;  // [tokens, top_k], of Config::id_words words each
    const uint4* x;       // [tokens], rows of `vectors` 16-byte vectors, x_stride vectors apart
    const float* x_scale;   // of 8-bit activations: [tokens], else null
    const int32_t* x_sum;   // of int8 ones: [tokens], else null
    uint4* sorted;          // [slots], rows of `vectors`: 0 to gather none
    float* sorted_scale;
    int32_t* sorted_sum;
    int32_t* place;         // [tokens, top_k]: the slot's row, -1 if skipped
    int32_t* token;         // of each row, or null
    uint4* token_tile;      // of each: its expert, the expert's first token tile, first row and rows
    uint32_t* token_tile_count;
    int32_t tokens, top_k, experts, vectors, x_stride, tile_m;
};

namespace route {

// Words that all 32 lanes see as the sum of those before, and the sum of all.
DEVICE int scanned(int v, int& sum) {
    int total = v;
    UNROLL for (int delta = 1; delta < 32; delta *= 2) {
        const int other = ptx::shfl_up(total, delta);
        if (ptx::lane_id() >= static_cast<uint32_t>(delta)) total += other;
    }
    sum = ptx::shfl(total, 31);
    return total - v;
}

template <class Config> DEVICE int id_of(const Params& p, int slot) {
    const int id = static_cast<int>(p.ids[static_cast<size_t>(slot) * Config::id_words]);
    return static_cast<uint32_t>(id) < static_cast<uint32_t>(p.experts) ? id : -1;
}

// The lanes that have this id, none for -1.
template <class Config> DEVICE uint32_t alike(int id) {
    uint32_t same = __ballot_sync(~0u, id >= 0);
    UNROLL for (int bit = 1; bit < Config::most_experts; bit *= 2) {
        const uint32_t set = __ballot_sync(~0u, (id & bit) != 0);
        same &= id & bit ? set : ~set;
    }
    return id < 0 ? 0 : same;
}

}  // namespace route

template <class Config>
__global__ void __launch_bounds__(Config::threads) route_tokens(const __grid_constant__ Params p) {
    static_assert(Config::shared_bytes == (2 * Config::most_experts + Config::threads) * 4, "two counts an expert, a chunk of slots");
    int* count = reinterpret_cast<int*>(ptx::dynamic_shared());  // of this CTA's ids and those behind them
    int* next = count + Config::most_experts;  // ids ahead of this CTA's, then the row of its next slot
    int* rows = next + Config::most_experts;
    const int thread = threadIdx.x, each = (p.tokens + gridDim.x - 1) / gridDim.x;
    const int begin = min(static_cast<int>(blockIdx.x) * each, p.tokens), end = min(begin + each, p.tokens);

    for (int e = thread; e < p.experts; e += Config::threads) count[e] = next[e] = 0;
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    __syncthreads();
    constexpr int at_once = 8;  // loads
    for (int first = thread; first < p.tokens * p.top_k; first += at_once * Config::threads) {
        int id[at_once];
        UNROLL for (int i = 0; i < at_once; i++) {
            const int slot = first + i * Config::threads;
            id[i] = slot < p.tokens * p.top_k ? route::id_of<Config>(p, slot) : -1;
        }
        UNROLL for (int i = 0; i < at_once; i++)
            if (id[i] >= 0) atomicAdd((first + i * Config::threads < begin * p.top_k ? next : count) + id[i], 1);
    }
    __syncthreads();
    int first_row = 0, first_tile = 0;
    for (int from = 0; from < p.experts; from += Config::threads) {
        const int e = from + thread, mine = e < p.experts ? count[e] + next[e] : 0, tiles = (mine + p.tile_m - 1) / p.tile_m;
        int warp_rows, warp_tiles;
        int row = first_row + route::scanned(mine, warp_rows), tile = first_tile + route::scanned(tiles, warp_tiles);
        if (thread % 32 == 0) rows[thread / 32 * 2] = warp_rows, rows[thread / 32 * 2 + 1] = warp_tiles;
        __syncthreads();
        UNROLL for (int warp = 0; warp < Config::threads / 32; warp++) {
            if (warp < thread / 32) row += rows[warp * 2], tile += rows[warp * 2 + 1];
            first_row += rows[warp * 2], first_tile += rows[warp * 2 + 1];
        }
        if (e < p.experts) next[e] += row;
        if (blockIdx.x == 0)
            for (int i = 0; i < tiles; i++) p.token_tile[tile + i] = uint4{static_cast<uint32_t>(e), static_cast<uint32_t>(tile), static_cast<uint32_t>(row), static_cast<uint32_t>(mine)};
        __syncthreads();
    }
    if (blockIdx.x == 0 && thread == 0) *p.token_tile_count = first_tile;
    const int step = Config::threads / p.top_k;  // tokens at a time: a thread a slot
    for (int first = begin; first < end; first += step) {
        const int count_here = min(step, end - first), slots = count_here * p.top_k;
        const int id = thread < slots ? route::id_of<Config>(p, first * p.top_k + thread) : -1;
        const uint32_t same = route::alike<Config>(id), before = same & ((1u << thread % 32) - 1);
        int row = -1;
        for (int warp = 0; warp * 32 < slots; warp++) {
            const bool mine = thread / 32 == warp && id >= 0;
            if (mine) row = next[id] + __popc(before);
            __syncwarp();
            if (mine && before == 0) next[id] += __popc(same);
            __syncthreads();
        }
        rows[thread] = row;
        if (thread < slots) p.place[first * p.top_k + thread] = row;
        if (row >= 0 && p.token != nullptr) p.token[row] = first + thread / p.top_k;
        if (row >= 0 && p.x_scale != nullptr) {
            p.sorted_scale[row] = p.x_scale[first + thread / p.top_k];
            if (p.x_sum != nullptr) p.sorted_sum[row] = p.x_sum[first + thread / p.top_k];
        }
        __syncthreads();
        constexpr int vectors = 4;  // at once
        for (int from = thread; from < count_here * p.vectors; from += vectors * Config::threads) {
            uint4 v[vectors];
            UNROLL for (int i = 0; i < vectors; i++) {
                const int at = min(from + i * Config::threads, count_here * p.vectors - 1), token = at / p.vectors;
                v[i] = p.x[static_cast<size_t>(first + token) * p.x_stride + (at - token * p.vectors)];
            }
            UNROLL for (int i = 0; i < vectors; i++) {
                const int at = from + i * Config::threads, token = at / p.vectors;
                if (at >= count_here * p.vectors) break;
                for (int j = 0; j < p.top_k; j++)
                    if (const int to = rows[token * p.top_k + j]; to >= 0) p.sorted[static_cast<size_t>(to) * p.vectors + (at - token * p.vectors)] = v[i];
            }
        }
        __syncthreads();
    }
}

#endif  // ANYBIT_ROUTE_CUH
