// Bit-plane GEMM on binary wgmma (sm_90a), for many tokens: Y = X W^T with W and X of 1 to 8 bits, plane by plane.
//
// Both operands are pre-swizzled bit planes, [chunk of 1024 k][plane][row][128 bytes] (bitplane_layout.cuh), so that any run
// of rows is one bulk copy into a wgmma-ready tile. Weights are M (a thread owns two weight rows, whose epilogue constants
// stay in registers), tokens are N.
//
// Accumulators hold the sum over k of uw * ux of unsigned codes. One set serves all p * q plane pairs: those with i + j = d
// share a shift, and the sum is kept rotated so that bit 0 of the register weighs 2^d. Walking d up rotates right by one,
// walking it down rotates left by one; chunks of k alternate, and the last one walks down to d = 0. Rotations lose nothing
// while the sum fits 32 bits, which why_not() checks.
//
// Persistent CTAs take tiles of 128 weights x `tile_m` tokens. A producer warp streams planes into two rings (one slot per
// plane: 128 rows of weights, or `tile_m` rows of activations) in the order the diagonals need them; a slot is free after
// its last diagonal. Two consumer warpgroups take 64 weights each, and one warp per warpgroup stores its results. Between
// diagonals a warpgroup drains its wgmmas and rotates its sums; `schedule` says what the other one does meanwhile.
#ifndef ANYBIT_SM90_BITPLANE_GEMM_CUH
#define ANYBIT_SM90_BITPLANE_GEMM_CUH

#include "bitplane/bitplane_terms.cuh"
#include "bitplane/bitplane_epilogue.cuh"

// How the two consumer warpgroups share the tensor cores. cooperative: unordered. pingpong: one runs a tile's main loop
// while the other runs its epilogue.
enum class Schedule { cooperative, pingpong };

// A slot holds a plane.
template <class Config>
using GemmShared = LargeShared<Config, Config::weight_chunks * Config::weight_bits, Config::activation_chunks * Config::activation_bits, 1>;

// Persistent tile scheduler. CTAs take every gridDim.x-th tile, tokens fastest, so that concurrent CTAs share weights.
template <class Config> struct Tiles {
    int rows_m, token_tiles, weight_tiles, token_tile, weight_tile, left, token_step, weight_step;

    DEVICE explicit Tiles(const Params& p)
        : rows_m(p.rows_m), token_tiles((p.m + Config::tile_m - 1) / Config::tile_m), weight_tiles((p.n + 127) / 128) {
        const int tiles = token_tiles * weight_tiles, blocks = gridDim.x, block = blockIdx.x;
        token_tile = block % token_tiles, weight_tile = block / token_tiles;
        left = block < tiles ? (tiles - block + blocks - 1) / blocks : 0;
        token_step = blocks % token_tiles, weight_step = blocks / token_tiles;
    }
    DEVICE bool more() const { return left > 0; }
    DEVICE void next() {  // without divisions, which are slow
        left--;
        token_tile += token_step, weight_tile += weight_step;
        if (token_tile >= token_tiles) token_tile -= token_tiles, weight_tile++;
    }
    DEVICE int token() const { return token_tile * Config::tile_m; }
    DEVICE int row() const { return weight_tile * 128; }
};

template <class Config> DEVICE void gemm_load(const Params& p, uint32_t shared) {
    using S = GemmShared<Config>;
    constexpr int P = Config::weight_bits, Q = Config::activation_bits, diagonals = P + Q - 1;
    Ring<Config::weight_chunks> weight_ring;
    Ring<Config::activation_chunks> activation_ring;
    bool waited = false;  // griddepcontrol.wait is done
    for (Tiles<Config> tiles(p); tiles.more(); tiles.next()) {
        const int token = tiles.token(), row = tiles.row();
        const uint32_t weight_bytes = max(0, min(S::rows, p.rows_n - row)) * planes::row_bytes;
        const int rows = min(Config::tile_m, p.rows_m - token);
        for (int chunk = 0; chunk < p.chunks; chunk++) {
            const bool down = (p.chunks - chunk) & 1;
            auto load_weights = [&](int order) {
                const int slot = weight_ring.at * P + order, i = down ? P - 1 - order : order;
                ptx::mbarrier_wait_parity(S::weight_empty(shared, slot), weight_ring.parity ^ 1);
                ptx::mbarrier_arrive_expect_tx(S::weight_full(shared, slot), weight_bytes);
                ptx::cp_async_bulk_load(shared + slot * S::weight_slot,
                                        p.weights + (static_cast<size_t>(chunk * P + i) * p.rows_n + row) * planes::row_bytes,
                                        weight_bytes, S::weight_full(shared, slot));
            };
            auto load_activations = [&](int order) {
                const int slot = activation_ring.at * Q + order, j = down ? Q - 1 - order : order;
                ptx::mbarrier_wait_parity(S::activation_empty(shared, slot), activation_ring.parity ^ 1);
                const uint32_t to = shared + S::first_activations + slot * S::activation_slot;
                const uint8_t* const from = p.activations + (static_cast<size_t>(chunk * Q + j) * p.rows_m + token) * planes::row_bytes;
                ptx::mbarrier_arrive_expect_tx(S::activation_full(shared, slot), rows * planes::row_bytes);
                ptx::cp_async_bulk_load(to, from, rows * planes::row_bytes, S::activation_full(shared, slot));
            };
            const bool early = !waited;  // PDL: the first chunk of weights loads before griddepcontrol.wait
            if (early) {
                for (int order = 0; order < P; order++) load_weights(order);
                ptx::griddepcontrol_wait();
                waited = true;
            }
            for (int order = 0; order < diagonals; order++) {
                if (order < P && !early) load_weights(order);
                if (order < Q) load_activations(order);
            }
            weight_ring.advance();
            activation_ring.advance();
        }
    }
}

template <class Config>
struct GemmConsumer : LargeConsumer<Config, GemmShared<Config>, Config::weight_chunks, Config::activation_chunks> {
    using Base = LargeConsumer<Config, GemmShared<Config>, Config::weight_chunks, Config::activation_chunks>;
    using typename Base::S;
    using Base::Base, Base::p, Base::shared, Base::warpgroup, Base::epilogue, Base::weights, Base::activations;
    using Base::release_weights, Base::release_activations;
    static constexpr int P = Config::weight_bits, Q = Config::activation_bits, diagonals = P + Q - 1;
    static constexpr int turn_barrier = 1, both = 256;
    static constexpr bool pingpong = Config::schedule == Schedule::pingpong;
    static constexpr bool uniform = !pingpong;  // ptxas knows descriptors to be warp-uniform

    DEVICE void take_turn() const { ptx::bar_sync(turn_barrier + warpgroup, both); }
    DEVICE void pass_turn() const { ptx::bar_arrive(turn_barrier + (warpgroup ^ 1), both); }
    static DEVICE uint64_t at(uint64_t descriptor, uint32_t bytes) {
        return uniform ? Base::at(descriptor, bytes) : ptx::wgmma_advance(descriptor, bytes);
    }

    DEVICE void tile(int row, int token) {
        constexpr int tokens = Config::tile_m;
        int32_t acc[tokens / 2];
        epilogue.fetch(p, row, token);
        if (pingpong) take_turn();
#pragma unroll 1
        for (int chunk = 0; chunk < p.chunks; chunk++) {
            const int left = (p.chunks - chunk) & 1 ? 1 : 31;  // walking down: rotate left by 1; up: right by 1 = left by 31
            const uint64_t a = planes::descriptor(shared + (weights.at * P * S::rows + warpgroup * 64) * planes::row_bytes);
            const uint64_t b = planes::descriptor(shared + S::first_activations + activations.at * Q * S::activation_slot);
            UNROLL for (int diagonal = 0; diagonal < diagonals; diagonal++) {
                // Planes are numbered in walking order, so that in either direction those with i + j = diagonal meet.
                if (diagonal < P) ptx::mbarrier_wait_parity(S::weight_full(shared, weights.at * P + diagonal), weights.parity);
                if (diagonal < Q) ptx::mbarrier_wait_parity(S::activation_full(shared, activations.at * Q + diagonal), activations.parity);
                ptx::wgmma_fence();
                UNROLL for (int i = 0; i < P; i++) {
                    const int j = diagonal - i;
                    if (j < 0 || j >= Q) continue;
                    UNROLL for (int step = 0; step < planes::steps; step++)
                        ptx::wgmma_b1<tokens>(acc, at(a, i * S::weight_slot + step * planes::step_bytes),
                                              at(b, j * S::activation_slot + step * planes::step_bytes), diagonal > 0 || step > 0 || chunk > 0);
                }
                ptx::wgmma_commit_group();
                if (diagonal == 0 && chunk > 0) {
                    ptx::wgmma_wait_group<1>();
                    release_weights(weights.previous() * P + P - 1);
                    release_activations(activations.previous() * Q + Q - 1);
                }
                if (diagonal < diagonals - 1) {
                    ptx::wgmma_wait_group<0>();
                    ptx::wgmma_touch(acc);
                    // Release the planes whose last diagonal this was.
                    if (diagonal >= Q - 1 && diagonal - (Q - 1) < P - 1) release_weights(weights.at * P + diagonal - (Q - 1));
                    if (diagonal >= P - 1 && diagonal - (P - 1) < Q - 1) release_activations(activations.at * Q + diagonal - (P - 1));
                    rotate(acc, left);
                }
            }
            weights.advance();
            activations.advance();
        }
        if (pingpong) pass_turn();
        epilogue.stage_columns();  // overlaps the last wgmmas
        ptx::wgmma_wait_group<0>();
        ptx::wgmma_touch(acc);
        release_weights(weights.previous() * P + P - 1);
        release_activations(activations.previous() * Q + Q - 1);
        epilogue.template write<tokens>(p, acc, row, token);
    }
};

template <class Config> DEVICE void gemm_multiply(const Params& p, uint32_t shared) {
    using C = GemmConsumer<Config>;
    const int warpgroup = C::uniform ? ptx::warp_id() / 4 : threadIdx.x / 128;
    C consumer(p, shared, warpgroup);
    if (C::pingpong && warpgroup == 1) consumer.pass_turn();
    ptx::griddepcontrol_wait();
    for (Tiles<Config> tiles(p); tiles.more(); tiles.next()) consumer.tile(tiles.row() + 64 * warpgroup, tiles.token());
    if (C::pingpong && warpgroup == 0) consumer.take_turn();  // consumes the last pass_turn
}

template <class Config> __global__ void __launch_bounds__(Config::threads, 1) sm90_bitplane_gemm(const __grid_constant__ Params p) {
    run_large<Config, GemmShared<Config>, Tiles<Config>, Terms<Config>::is_16bit && Config::tma_store>(
        p, [&](uint32_t shared) { gemm_load<Config>(p, shared); }, [&](uint32_t shared) { gemm_multiply<Config>(p, shared); });
}

#endif  // ANYBIT_SM90_BITPLANE_GEMM_CUH
