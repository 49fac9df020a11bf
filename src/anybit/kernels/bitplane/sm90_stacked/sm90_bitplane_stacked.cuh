// Bit-plane GEMM on binary wgmma for many tokens and few activation planes, which are concatenated along wgmma's N.
// Operands, shifts and rotations are those of sm90_bitplane_gemm.cuh.
//
// A tile is 128 weights x `tile_m` tokens. Each wgmma covers 64 weights x (`tile_m` x planes) columns, with one accumulator
// set per activation plane: no rotations between these planes, and a plane of weights is read once for all of them. At the
// end of a tile the sets are combined, 2^j times set j, into a fraction of the registers, which leaves room for the next
// tile's accumulators: a warpgroup's epilogue is interleaved with the next tile's MMAs.
//
// Persistent CTAs take contiguous ranges of tiles. One producer thread loads planes of weights and stages of activations
// (all planes of a tile's tokens), which may stay in shared memory for all tiles that share them (`stationary`).
#ifndef ANYBIT_SM90_BITPLANE_STACKED_CUH
#define ANYBIT_SM90_BITPLANE_STACKED_CUH

#include "bitplane/bitplane_terms.cuh"
#include "bitplane/bitplane_epilogue.cuh"

// What stays in shared memory from one tile of a CTA to the next.
enum class Stationary { none, activations };

// A slot of weights holds a plane, one of activations all planes of a chunk.
template <class Config> using StackedShared = LargeShared<Config, Config::weight_stages, Config::activation_stages, Config::activation_bits>;

// A CTA's contiguous range of tiles, tokens fastest; weights fastest if activations are stationary.
template <class Config> struct StackedTiles {
    int inner_tiles, inner, outer, left;

    DEVICE explicit StackedTiles(const Params& p) {
        const int token_tiles = (p.m + Config::tile_m - 1) / Config::tile_m, weight_tiles = (p.n + 127) / 128;
        const int tiles = token_tiles * weight_tiles, blocks = gridDim.x, block = blockIdx.x;
        const int each = tiles / blocks, more = tiles % blocks, first = block * each + min(block, more);
        left = each + (block < more);
        inner_tiles = Config::stationary == Stationary::activations ? weight_tiles : token_tiles;
        inner = first % inner_tiles, outer = first / inner_tiles;
    }
    DEVICE bool more() const { return left > 0; }
    DEVICE void next() {
        left--;
        if (++inner == inner_tiles) inner = 0, outer++;
    }
    DEVICE int token() const { return (Config::stationary == Stationary::activations ? outer : inner) * Config::tile_m; }
    DEVICE int row() const { return (Config::stationary == Stationary::activations ? inner : outer) * 128; }
    // Whether stationary activations are not those of this CTA's previous (fresh) or next (final) tile.
    DEVICE bool fresh(bool first) const { return first || inner == 0; }
    DEVICE bool final() const { return left == 1 || inner + 1 == inner_tiles; }
};

template <class Config> DEVICE void stacked_load(const Params& p, uint32_t shared) {
    using S = StackedShared<Config>;
    constexpr int P = Config::weight_bits, Q = Config::activation_bits;
    Ring<Config::weight_stages> weights;
    Ring<Config::activation_stages> stages;
    constexpr int prologue_stages = 1;  // planes of weights loaded before griddepcontrol.wait
    const int steps = p.chunks * P;
    auto load_weights = [&](int row, int step) {
        const int chunk = step / P, order = step % P, i = (p.chunks - chunk) & 1 ? P - 1 - order : order;
        const uint32_t bytes = min(S::rows, p.rows_n - row) * planes::row_bytes;
        ptx::mbarrier_wait_parity(S::weight_empty(shared, weights.at), weights.parity ^ 1);
        ptx::mbarrier_arrive_expect_tx(S::weight_full(shared, weights.at), bytes);
        ptx::cp_async_bulk_load(shared + weights.at * S::weight_slot, p.weights + (static_cast<size_t>(chunk * P + i) * p.rows_n + row) * planes::row_bytes,
                                bytes, S::weight_full(shared, weights.at));
        weights.advance();
    };
    bool waited = false;  // griddepcontrol.wait is done
    for (StackedTiles<Config> tiles(p); tiles.more(); tiles.next()) {
        const int token = tiles.token(), row = tiles.row();
        const bool fresh = Config::stationary != Stationary::activations || tiles.fresh(!waited);
        const uint32_t bytes = min(Config::tile_m, p.rows_m - token) * planes::row_bytes;
        int asked = 0;  // steps whose weights have been issued
        if (!waited) {
            for (; asked < min(prologue_stages, steps); asked++) load_weights(row, asked);
            ptx::griddepcontrol_wait();
            waited = true;
        }
        for (int chunk = 0; chunk < p.chunks; chunk++) {
            if (asked <= chunk * P) load_weights(row, chunk * P), asked = chunk * P + 1;
            if (fresh) {
                const uint32_t full = S::activation_full(shared, stages.at);
                ptx::mbarrier_wait_parity(S::activation_empty(shared, stages.at), stages.parity ^ 1);
                ptx::mbarrier_arrive_expect_tx(full, Q * bytes);
                UNROLL for (int j = 0; j < Q; j++)
                    ptx::cp_async_bulk_load(shared + S::first_activations + stages.at * S::activation_slot + j * S::plane,
                                            p.activations + (static_cast<size_t>(chunk * Q + j) * p.rows_m + token) * planes::row_bytes, bytes, full);
                stages.advance();
            }
            for (; asked < (chunk + 1) * P; asked++) load_weights(row, asked);
        }
    }
}

template <class Config>
struct StackedConsumer : LargeConsumer<Config, StackedShared<Config>, Config::weight_stages, Config::activation_stages> {
    using Base = LargeConsumer<Config, StackedShared<Config>, Config::weight_stages, Config::activation_stages>;
    using typename Base::S;
    using Base::Base, Base::at, Base::p, Base::shared, Base::warpgroup, Base::epilogue, Base::weights, Base::activations;
    using Base::release_weights, Base::release_activations;
    using T = Terms<Config>;
    static constexpr int P = Config::weight_bits, Q = Config::activation_bits, columns = Q * Config::tile_m, sums = Config::tile_m / 2;
    static constexpr int eights = Config::epilogue_tile / 8, parts = Config::tile_m / Config::epilogue_tile;

    // Writes `epilogue_tile` of a tile's tokens to a staging buffer.
    template <int part> DEVICE void write(const int32_t (&value)[sums], const typename T::Row (&row)[2]) {
        const uint32_t stage = epilogue.stage(threadIdx.x % 32, threadIdx.x % 128 / 32);
        uint32_t packed[eights / 2][4];
        UNROLL for (int i = 0; i < eights; i++) epilogue.pack(packed, i, value, part * eights + i, row, epilogue.pair(part * eights + i));
        epilogue.template leave<true>(stage, packed, this->leader);
    }
    // Writes the parts that are due in this chunk.
    template <int part = 0> DEVICE void write_some(int chunk, const int32_t (&value)[sums], const typename T::Row (&row)[2]) {
        if constexpr (part < parts) {
            if (chunk == part * p.chunks / parts) write<part>(value, row);
            write_some<part + 1>(chunk, value, row);
        }
    }
    template <int part = 0> DEVICE void write_all(const int32_t (&value)[sums], const typename T::Row (&row)[2]) {
        if constexpr (part < parts) {
            write<part>(value, row);
            write_all<part + 1>(value, row);
        }
    }

    DEVICE void run() {
        int32_t value[sums];
        typename T::Row row[2];
        bool pending = false;
        UNROLL for (int i = 0; i < sums; i++) value[i] = 0;
        row[0] = row[1] = {};
#pragma unroll 1
        for (StackedTiles<Config> tiles(p); tiles.more(); tiles.next()) {
            int32_t acc[columns / 2];
            const bool final = Config::stationary != Stationary::activations || tiles.final();
            epilogue.fetch(p, tiles.row() + 64 * warpgroup, tiles.token());
#pragma unroll 1
            for (int chunk = 0; chunk < p.chunks; chunk++) {
                const int left = (p.chunks - chunk) & 1 ? 1 : 31;
                const uint64_t b = planes::descriptor(shared + S::first_activations + activations.at * S::activation_slot);
                UNROLL for (int order = 0; order < P; order++) {
                    const uint64_t a = planes::descriptor(shared + weights.at * S::weight_slot + warpgroup * 64 * planes::row_bytes);
                    ptx::mbarrier_wait_parity(S::weight_full(shared, weights.at), weights.parity);
                    if (order == 0) ptx::mbarrier_wait_parity(S::activation_full(shared, activations.at), activations.parity);
                    ptx::wgmma_fence();
                    UNROLL for (int step = 0; step < planes::steps; step++)
                        ptx::wgmma_b1<columns>(acc, at(a, step * planes::step_bytes), at(b, step * planes::step_bytes), order > 0 || step > 0 || chunk > 0);
                    ptx::wgmma_commit_group();
                    if (order == 0) {
                        if (chunk > 0) {
                            ptx::wgmma_wait_group<1>();
                            release_weights(weights.previous());
                            release_activations(activations.previous(), final);
                        }
                        if (pending) write_some(chunk, value, row);
                    }
                    if (order < P - 1) {
                        ptx::wgmma_wait_group<0>();
                        ptx::wgmma_touch(acc);
                        release_weights(weights.at);
                        rotate(acc, left);
                    }
                    weights.advance();
                }
                activations.advance();
            }
            epilogue.stage_columns();  // overlaps the last wgmmas
            row[0] = T::row(epilogue.row_load[0]), row[1] = T::row(epilogue.row_load[1]);
            ptx::wgmma_wait_group<0>();
            ptx::wgmma_touch(acc);
            release_weights(weights.previous());
            release_activations(activations.previous(), final);
            if (!final) activations.parity ^= 1;  // stationary: same phase again
            UNROLL for (int i = 0; i < sums; i++) {
                uint32_t v = static_cast<uint32_t>(acc[i]);
                UNROLL for (int j = 1; j < Q; j++) v += static_cast<uint32_t>(acc[j * sums + i]) << j;
                value[i] = static_cast<int32_t>(v);
            }
            pending = true;
        }
        if (pending) write_all(value, row);
    }
};

template <class Config> __global__ void __launch_bounds__(Config::threads, 1) sm90_bitplane_stacked(const __grid_constant__ Params p) {
    const auto multiply = [&](uint32_t shared) {
        const int warpgroup = ptx::warp_id() / 4;
        StackedConsumer<Config> consumer(p, shared, warpgroup);
        ptx::griddepcontrol_wait();
        consumer.run();
    };
    run_large<Config, StackedShared<Config>, StackedTiles<Config>, true>(p, [&](uint32_t shared) { stacked_load<Config>(p, shared); }, multiply);
}

#endif  // ANYBIT_SM90_BITPLANE_STACKED_CUH
