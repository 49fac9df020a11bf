// Bit-plane GEMM on binary wgmma for few tokens, where shared memory holds all of K of a CTA's tile.
//
// Operands as in sm90_bitplane_skinny.cuh: planes of A (64 rows) are walked, planes of B are concatenated along N. But there
// is no ring and no producer warp: each chunk of k has one mbarrier for all its planes, and every warp issues some of the
// copies. The limit is an SM's inbound bandwidth, so chunks load in order of use and are multiplied one by one: the weights
// of `prologue_stages` chunks before griddepcontrol.wait, the rest interleaved with the activations, which the threads may
// copy themselves (`cp_async_activations`).
#ifndef ANYBIT_SM90_BITPLANE_RESIDENT_CUH
#define ANYBIT_SM90_BITPLANE_RESIDENT_CUH

#include "bitplane/sm90_skinny/sm90_bitplane_skinny_tile.cuh"

// Shared-memory layout: chunks of A, chunks of B, output staging, mbarriers, and padding that limits CTAs per SM.
template <class Config> struct ResidentShared : SkinnyTile<Config> {
    using Sides = SkinnyTile<Config>;
    using Sides::a_is_weights, Sides::P, Sides::Q, Sides::rows, Sides::columns, Sides::values;
    static constexpr int warps = 4, eights = columns / 8;
    static constexpr int a_chunk = P * rows * planes::row_bytes, b_chunk = Config::wgmma_n * planes::row_bytes;
    static constexpr int b = Config::k_chunks * a_chunk, staging = b + Config::k_chunks * b_chunk;
    static constexpr bool staged = a_is_weights && Terms<Config>::is_16bit;
    static constexpr int barriers = staging + (staged ? columns * 128 : 0);
    static_assert(barriers + 16 * Config::k_chunks + Config::reserved_bytes == Config::shared_bytes, "shared_bytes() of sm90_bitplane_resident.py disagrees");

    uint32_t shared;
    template <bool a> DEVICE uint32_t plane(int chunk, int bit) const {
        return a ? shared + chunk * a_chunk + bit * rows * planes::row_bytes : shared + b + chunk * b_chunk + bit * columns * planes::row_bytes;
    }
    DEVICE uint32_t full(int chunk) const { return shared + barriers + 16 * chunk; }
};

template <class Config> struct Resident {
    using S = ResidentShared<Config>;
    using T = Terms<Config>;
    static constexpr int P = S::P, Q = S::Q;

    const Params& p;
    S shared;
    int a_row, b_row;

    DEVICE Resident(const Params& p, uint32_t base) : p(p), shared{{}, base} {
        // Tokens fastest, so that concurrent CTAs share weights.
        const int token_tile = S::a_is_weights ? S::columns : S::rows, token_tiles = (p.m + token_tile - 1) / token_tile;
        const int weight_tile = static_cast<int>(blockIdx.x) / token_tiles, token = static_cast<int>(blockIdx.x) - weight_tile * token_tiles;
        a_row = (S::a_is_weights ? weight_tile : token) * S::rows;
        b_row = (S::a_is_weights ? token : weight_tile) * S::columns;
    }
    // Whether this CTA has weights.
    DEVICE bool any() const { return S::a_is_weights ? a_row < p.n : b_row < p.n; }

    // Initializes one mbarrier per chunk, which expects all its planes.
    DEVICE void prepare() const {
        if (threadIdx.x == 0) {
            for (int chunk = 0; chunk < p.chunks; chunk++) ptx::mbarrier_init(shared.full(chunk), Config::cp_async_activations ? 1 + Config::threads : 1);
            ptx::fence_mbarrier_init();
        }
        __syncthreads();
        const int a_rows = P * min(S::rows, S::a_stored(p) - a_row), b_rows = Q * min(S::columns, S::b_stored(p) - b_row);
        const int rows = !Config::cp_async_activations ? a_rows + b_rows : S::a_is_weights ? a_rows : b_rows;
        // Other warps' copies may land before this expect_tx: the phase can't complete without this pending arrival.
        if (threadIdx.x < p.chunks) ptx::mbarrier_arrive_expect_tx(shared.full(threadIdx.x), rows * planes::row_bytes);
    }

    // Loads a chunk of one operand, one copy per plane (copies in flight share the bandwidth: large ones would all land
    // late), by the warps in turn; `turn` is the next warp.
    template <bool a> DEVICE void load(int chunk, int& turn) const {
        constexpr int bits = a ? P : Q, tile = a ? S::rows : S::columns;
        const int stored = a ? S::a_stored(p) : S::b_stored(p), first = a ? a_row : b_row, warp = threadIdx.x / 32;
        const uint8_t* const from = (a == S::a_is_weights ? p.weights : p.activations) + (static_cast<int64_t>(chunk) * bits * stored + first) * planes::row_bytes;
        const int bytes = min(tile, stored - first) * planes::row_bytes;
        UNROLL for (int bit = 0; bit < bits; bit++) {
            if (turn == warp) ptx::cp_async_bulk_load(shared.template plane<a>(chunk, bit), from + static_cast<int64_t>(bit) * stored * planes::row_bytes, bytes, shared.full(chunk));
            turn = turn == S::warps - 1 ? 0 : turn + 1;
        }
    }
    // Loads a chunk's activations by cp.async from all threads: faster than bulk copies, but costs issue slots.
    // Each thread arrives on the chunk's mbarrier once its copies have landed.
    DEVICE void copy_tokens(int chunk) const {
        constexpr bool a = !S::a_is_weights;
        constexpr int bits = a ? P : Q, tile = a ? S::rows : S::columns;
        const int stored = a ? S::a_stored(p) : S::b_stored(p), first = a ? a_row : b_row;
        const uint8_t* const from = p.activations + (static_cast<int64_t>(chunk) * bits * stored + first) * planes::row_bytes;
        const int bytes = min(tile, stored - first) * planes::row_bytes;
        UNROLL for (int bit = 0; bit < bits; bit++)
            UNROLL for (int i = 0; i < tile * planes::row_bytes / (16 * Config::threads); i++) {
                const int at = (i * Config::threads + static_cast<int>(threadIdx.x)) * 16;
                if (at < bytes) ptx::cp_async<16>(shared.template plane<a>(chunk, bit) + at, from + static_cast<int64_t>(bit) * stored * planes::row_bytes + at);
            }
        ptx::cp_async_mbarrier_arrive_noinc(shared.full(chunk));
    }
    // Copies land in about issue order: the weights of `prologue_stages` chunks go before the activations.
    DEVICE void load_early() const {
        if (ptx::lane_id() != 0) return;
        int turn = 0;
        for (int chunk = 0; chunk < min(Config::prologue_stages, p.chunks); chunk++) load<S::a_is_weights>(chunk, turn);
    }
    DEVICE void load_rest() const {
        int turn = 0;
        if constexpr (Config::cp_async_activations) {
            UNROLL for (int chunk = 0; chunk < Config::k_chunks; chunk++) {
                copy_tokens(chunk);
                if (chunk + Config::prologue_stages < p.chunks && ptx::lane_id() == 0) load<S::a_is_weights>(chunk + Config::prologue_stages, turn);
            }
            return;
        }
        if (ptx::lane_id() != 0) return;
        for (int chunk = 0; chunk < p.chunks; chunk++) {
            load<!S::a_is_weights>(chunk, turn);
            if (chunk + Config::prologue_stages < p.chunks) load<S::a_is_weights>(chunk + Config::prologue_stages, turn);
        }
    }

    // Chunk by chunk, down and up alternately, the last one down. Planes take `accumulator_sets` sets of sums in turn: while
    // one set is rotated, another's wgmmas run.
    DEVICE void walk(int32_t (&acc)[Config::accumulator_sets][Config::wgmma_n / 2]) const {
        constexpr int sets = Config::accumulator_sets, chunks = Config::k_chunks;
        UNROLL for (int chunk = 0; chunk < chunks; chunk++) {
            const bool down = (chunks - chunk) & 1;
            ptx::mbarrier_wait_parity(shared.full(chunk), 0);
            if constexpr (Config::cp_async_activations) ptx::fence_proxy_async();  // cp.async writes are generic-proxy writes
            UNROLL for (int order = 0; order < P; order++) {
                const int plane = down ? P - 1 - order : order, set = plane % sets;
                if (order >= sets) {
                    ptx::wgmma_wait_group<sets - 1>();
                    ptx::wgmma_touch(acc[set]);
                    rotate(acc[set], down ? sets : 32 - sets);
                }
                const uint64_t a = planes::descriptor(shared.template plane<true>(chunk, plane)), b = planes::descriptor(shared.template plane<false>(chunk, 0));
                ptx::wgmma_fence();
                S::multiply_chunk(acc[set], a, b, chunk > 0 || order >= sets);
                ptx::wgmma_commit_group();
            }
        }
        ptx::wgmma_wait_group<0>();
        UNROLL for (int set = 0; set < sets; set++) ptx::wgmma_touch(acc[set]);
    }

    DEVICE void run() const {
        load_early();
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = a_row + 16 * warp + lane / 4, pair = b_row + 2 * (lane % 4);
        constexpr int eights = S::eights;
        SkinnyTerms<Config, eights> terms;
        terms.load_weights(p, row, pair);
        ptx::griddepcontrol_wait();
        load_rest();
        terms.load_tokens(p, row, pair);

        int32_t sums[S::values], acc[Config::accumulator_sets][Config::wgmma_n / 2];
        walk(acc);
        S::combine(sums, acc);
        terms.finish();
        if constexpr (T::is_16bit) {
            // 16-byte stores, if rows of Y are aligned and the tile has all of its weights.
            if (p.y_stride % 8 == 0 && reinterpret_cast<uint64_t>(p.y) % 16 == 0 && (S::a_is_weights ? a_row + S::rows : b_row + S::columns) <= p.n) {
                if constexpr (S::a_is_weights && eights % 2 == 0) {
                    write_lines(sums, terms.weights, terms.tokens);
                    return;
                } else if constexpr (!S::a_is_weights) {
                    write_rows(sums, terms.weights, terms.tokens, row);
                    return;
                }
            }
        }
        UNROLL for (int v = 0; v < S::values; v++) {
            const int h = v % 4 / 2, e = v % 2, i = 2 * (v / 4), at_row = row + 8 * h, at_column = pair + 8 * (v / 4) + e;
            if constexpr (S::a_is_weights)
                T::store(p, at_column, at_row, sums[v], terms.weights[h], terms.tokens[i + e]);
            else
                T::store(p, at_row, at_column, sums[v], terms.weights[i + e], terms.tokens[h]);
        }
    }

    // A is weights: a token's 64 weights are one 128-byte line, transposed through 128-byte-swizzled shared memory.
    DEVICE void write_lines(const int32_t (&sums)[S::values], const typename T::Row (&weights)[2], const typename T::Column (&tokens)[2 * S::eights]) const {
        const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
        const uint32_t staging = shared.shared + S::staging;
        const uint32_t stage = staging + (8 * (lane / 16) + lane % 8) * 128 + (((2 * warp + (lane / 8) % 2) ^ (lane % 8)) * 16);
        UNROLL for (int i = 0; i < S::eights; i += 2) {
            uint32_t packed[4];
            UNROLL for (int j = 0; j < 4; j++) {  // rows and rows + 8 of two octets
                const int eight = i + j / 2, h = j % 2;
                packed[j] = T::pack(T::result(sums[4 * eight + 2 * h], weights[h], tokens[2 * eight]),
                                    T::result(sums[4 * eight + 2 * h + 1], weights[h], tokens[2 * eight + 1]));
            }
            ptx::stmatrix_x4_trans(stage + i * 8 * 128, packed);
        }
        __syncthreads();
        uint16_t* const y = static_cast<uint16_t*>(p.y) + a_row + thread % 8 * 8;
        UNROLL for (int at = 0; at < S::columns; at += 16) {
            const int local = at + thread / 8, token = b_row + local;
            const uint4 piece = ptx::ld_shared_v4(staging + local * 128 + ((thread % 8 ^ local % 8) * 16));
            if (token < p.m) *reinterpret_cast<uint4*>(y + token * p.y_stride) = piece;
        }
    }

    // A is activations: a thread has weight pairs of two tokens; where possible a quad transposes them to eight per lane.
    DEVICE void write_rows(const int32_t (&sums)[S::values], const typename T::Row (&weights)[2 * S::eights], const typename T::Column (&tokens)[2], int row) const {
        constexpr int eights = S::eights;
        const int q = threadIdx.x % 4;
        UNROLL for (int h = 0; h < 2; h++) {
            uint32_t w[eights];
            UNROLL for (int i = 0; i < eights; i++)
                w[i] = T::pack(T::result(sums[4 * i + 2 * h], weights[2 * i], tokens[h]), T::result(sums[4 * i + 2 * h + 1], weights[2 * i + 1], tokens[h]));
            uint16_t* const y = static_cast<uint16_t*>(p.y) + (row + 8 * h) * p.y_stride + b_row;
            const bool there = row + 8 * h < p.m;
            if constexpr (eights % 4 == 0) {
                UNROLL for (int i = 0; i < eights; i += 4) {
                    // 4 x 4 transpose within the quad (lane q gets word q of all four), in two shuffle rounds.
                    const bool odd = q & 1, high = q & 2;
                    const uint32_t a = ptx::shfl_xor(odd ? w[i] : w[i + 1], 1), b = ptx::shfl_xor(odd ? w[i + 2] : w[i + 3], 1);
                    const uint32_t low0 = odd ? a : w[i], low1 = odd ? w[i + 1] : a, high0 = odd ? b : w[i + 2], high1 = odd ? w[i + 3] : b;
                    const uint32_t c = ptx::shfl_xor(high ? low0 : high0, 2), d = ptx::shfl_xor(high ? low1 : high1, 2);
                    if (there) *reinterpret_cast<uint4*>(y + 8 * (i + q)) = high ? make_uint4(c, d, high0, high1) : make_uint4(low0, low1, c, d);
                }
            } else {
                UNROLL for (int i = 0; i < eights; i++)
                    if (there) *reinterpret_cast<uint32_t*>(y + 8 * i + 2 * q) = w[i];
            }
        }
    }
};

template <class Config> __global__ void __launch_bounds__(Config::threads, 1) sm90_bitplane_resident(const __grid_constant__ Params p) {
    using S = ResidentShared<Config>;
    static_assert(Config::threads == 128, "every warp loads, multiplies and writes");
    ptx::griddepcontrol_launch_dependents();
    const Resident<Config> block(p, ptx::shared_address(ptx::dynamic_shared()));
    if (!block.any()) {  // padding CTAs, so that every SM has equally many
        ptx::griddepcontrol_wait();
        return;
    }
    block.prepare();
    block.run();
}

#endif  // ANYBIT_SM90_BITPLANE_RESIDENT_CUH
