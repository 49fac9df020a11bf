// Warp-specialized wgmma GEMM with packed weights: Y = X W^T, computed as Y^T = W X^T, so that weights (64 rows) are M and
// tokens are N. Weights are dequantized in registers to 16-bit or 8-bit values, wgmma's register A operand.
//
// A CTA has row_warpgroups x split_k_warpgroups consumer warpgroups and one to four producer warps. A pipeline stage holds
// `span` k blocks of 128: a tile_m x 128 tile of X, swizzled by TMA, and the packed tiles of the CTA's rows, one
// bulk copy. A cluster splits K (cluster_k, partial sums through DSMEM) and multicasts X along the rows (cluster_n). Weights
// may bypass shared memory (direct). Dequantization hides behind wgmma from 128 tokens on; below, it and latency limit.
#ifndef ANYBIT_SM90_PACKED_GEMM_CUH
#define ANYBIT_SM90_PACKED_GEMM_CUH

#include "packed/sm90_gemm/sm90_packed_gemm_direct.cuh"
#include "packed/sm90_gemm/sm90_packed_gemm_epilogue.cuh"
#include "packed/sm90_gemm/sm90_packed_gemm_producer.cuh"
#include "packed/sm90_gemm/sm90_packed_gemm_sparse.cuh"

namespace packed {

template <class Config, int count>
DEVICE void multiply(typename Sums<Config>::Product (&sum)[count], const uint32_t (&a)[4], uint64_t b, bool accumulate = true) {
    if constexpr (Config::operand == Operand::f16)
        ptx::wgmma_f16<2 * count>(sum, a, b, accumulate);
    else if constexpr (Config::operand == Operand::bf16)
        ptx::wgmma_bf16<2 * count>(sum, a, b, accumulate);
    else if constexpr (Config::operand == Operand::s8 && Config::group == 0)
        ptx::wgmma_u8s8<2 * count>(sum, a, b, accumulate);
    else if constexpr (Config::operand == Operand::s8)
        ptx::wgmma_s8<2 * count>(sum, a, b, accumulate);
    else
        ptx::wgmma_e4m3<2 * count>(sum, a, b, accumulate);
}

// Issues the wgmmas of half a k block, then waits until the A registers to be written next are free.
template <class Config, int count, int steps>
DEVICE void multiply_half(typename Sums<Config>::Product (&sum)[count], const uint32_t (&a)[steps][4], uint64_t b,
                       [[maybe_unused]] uint32_t metadata) {
    ptx::wgmma_fence();
    if constexpr (is_sparse<Config>())
        multiply_kept<Config>(sum, a, b, metadata);
    else
        UNROLL for (int i = 0; i < steps; i++) multiply<Config>(sum, a[i], ptx::wgmma_advance(b, 32 * i));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<Config::register_sets - 1>();
}

// Main loop over one tile's rounds. A k block's two halves use alternate A register sets, so that dequantizing one overlaps the
// wgmmas of the other. sum: of as many of the tile's tokens as are to be multiplied. Returns the stage still to be released,
// or -1.
template <class Config, int count, class Release>
DEVICE int accumulate(typename Sums<Config>::Product (&sum)[count], Dequantize<Config>& dequantize, uint32_t ring,
                   uint32_t my_unit, const RingBarriers& barriers, int first, int rounds, RingCursor<Config::stages>& cursor,
                   const Release& release) {
    using Shape = PackedGemmShape<Config>;
    constexpr int steps = Shape::steps;
    uint32_t a0[steps][4], a1[steps][4];
    Metadata<Config> metadata;
    int previous = -1;
    const uint64_t first_b = ptx::wgmma_descriptor(ring, ptx::Swizzle::bytes_128, 1024);
    ptx::wgmma_touch(sum);
    for (int round = first; round < rounds; round += Config::split_k_warpgroups) {
        ptx::mbarrier_wait_parity(barriers.full_w + 8 * cursor.stage, cursor.parity);
        UNROLL for (int i = 0; i < Config::span; i++) {
            // Redundant wait: without a branch here ptxas serializes all wgmmas.
            if (i > 0) ptx::mbarrier_wait_parity(barriers.full_w + 8 * cursor.stage, cursor.parity);
            const uint32_t unit_at = ring + cursor.stage * Shape::stage_bytes + i * Shape::k_block_bytes + my_unit;
            dequantize.load(unit_at);
            metadata.template load<0>(unit_at);
            dequantize.template dequantize<0, steps * 4>(a0);
            if (i == 0) ptx::mbarrier_wait_parity(barriers.full_x + 8 * cursor.stage, cursor.parity);
            // Offset from the ring's first descriptor: building one anew costs half a dozen instructions more.
            const uint64_t b0 = ptx::wgmma_advance(first_b, cursor.stage * Shape::stage_bytes + i * Shape::k_block_bytes);
            const uint64_t b1 = ptx::wgmma_advance(b0, Shape::element_bytes == 2 ? Shape::box_bytes : 64);
            multiply_half<Config>(sum, a0, b0, metadata.half[0]);
            if (i == 0 && previous >= 0) release(previous);
            metadata.template load<1>(unit_at);
            if constexpr (Config::register_sets == 2) {
                dequantize.template dequantize<steps * 4, steps * 8>(a1);
                multiply_half<Config>(sum, a1, b1, metadata.half[1]);
            } else {
                dequantize.template dequantize<steps * 4, steps * 8>(a0);
                multiply_half<Config>(sum, a0, b1, metadata.half[1]);
            }
        }
        if constexpr (Config::split_k_warpgroups == 4) {
            // Release at once: three other warpgroups keep the tensor cores busy, and holding two stages for each of four
            // would take most of the ring. down at 32 tokens: 11.8 us for 12.6 to 12.8.
            ptx::wgmma_wait_group<0>();
            release(cursor.stage);
        } else
            previous = cursor.stage;
        cursor.advance(Config::split_k_warpgroups);
    }
    if constexpr (Config::split_k_warpgroups < 4) ptx::wgmma_wait_group<0>();
    ptx::wgmma_touch(sum);
    return previous;
}

// The same for a CTA with a single tile, unrolled over the stages: stage addresses become constants, which saves an eighth
// of a k block's instructions.
template <class Config, class Release>
DEVICE int accumulate_unrolled(typename Sums<Config>::Product (&sum)[Config::tile_m / 2], Dequantize<Config>& dequantize, uint32_t ring,
                            uint32_t my_unit, const RingBarriers& barriers, int first, int rounds, const Release& release) {
    using Shape = PackedGemmShape<Config>;
    static_assert(Shape::reduces && Config::split_k_warpgroups < 4 && Config::register_sets == 2, "stages with code of their own");
    constexpr int steps = Shape::steps, kw = Config::split_k_warpgroups, slots = Config::stages / kw;
    uint32_t a0[steps][4], a1[steps][4];
    Metadata<Config> metadata;
    const uint32_t mine = ring + first * Shape::stage_bytes, full_w = barriers.full_w + 8 * first, full_x = barriers.full_x + 8 * first;
    const uint64_t first_b = ptx::wgmma_descriptor(mine, ptx::Swizzle::bytes_128, 1024);
    uint32_t parity = 0;
    ptx::wgmma_touch(sum);
    for (int round = first; round < rounds; parity ^= 1) {
        UNROLL for (int slot = 0; slot < slots; slot++) {
            if (slot > 0 && round >= rounds) break;
            ptx::mbarrier_wait_parity(full_w + 8 * slot * kw, parity);
            UNROLL for (int i = 0; i < Config::span; i++) {
                const int at = slot * kw * Shape::stage_bytes + i * Shape::k_block_bytes;
                if (i > 0) ptx::mbarrier_wait_parity(full_w + 8 * slot * kw, parity);  // see accumulate
                dequantize.load(mine + at + my_unit);
                metadata.template load<0>(mine + at + my_unit);
                dequantize.template dequantize<0, steps * 4>(a0);
                if (i == 0) ptx::mbarrier_wait_parity(full_x + 8 * slot * kw, parity);
                const uint64_t b0 = ptx::wgmma_advance(first_b, at);
                multiply_half<Config>(sum, a0, b0, metadata.half[0]);
                if (i == 0 && (slot > 0 || round > first)) release(first + (slot > 0 ? slot - 1 : slots - 1) * kw);
                metadata.template load<1>(mine + at + my_unit);
                dequantize.template dequantize<steps * 4, steps * 8>(a1);
                multiply_half<Config>(sum, a1, ptx::wgmma_advance(b0, Shape::element_bytes == 2 ? Shape::box_bytes : 64), metadata.half[1]);
            }
            round += kw;
        }
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_touch(sum);
    return -1;
}

// Passes over stages that a warpgroup has no use for, and releases them.
template <class Config, class Release>
DEVICE void pass(const RingBarriers& barriers, int rounds, RingCursor<Config::stages>& cursor, const Release& release) {
    for (; rounds > 0; rounds--, cursor.advance(1)) {
        // full_w too: otherwise this warpgroup could lap the ring while an earlier phase's weights are in flight.
        ptx::mbarrier_wait_parity(barriers.full_w + 8 * cursor.stage, cursor.parity);
        ptx::mbarrier_wait_parity(barriers.full_x + 8 * cursor.stage, cursor.parity);
        release(cursor.stage);
    }
}

// Main loop that promotes sums to float32 after every group: no overlap within a warpgroup, others keep the MMAs coming.
template <class Config, int count, class Release>
DEVICE int accumulate_promoting(float (&sum)[count], Dequantize<Config>& dequantize, uint32_t ring, uint32_t my_unit,
                             const RingBarriers& barriers, int first, int rounds, RingCursor<Config::stages>& cursor,
                             const Release& release) {
    using Shape = PackedGemmShape<Config>;
    constexpr int parts = Dequantize<Config>::parts, steps = 4 / parts;
    typename Sums<Config>::Product product[count];
    uint32_t a[is_sparse<Config>() ? 2 : 4][4];
    Metadata<Config> metadata;
    for (int round = first; round < rounds; round += Config::split_k_warpgroups) {
        const uint32_t stage = ring + cursor.stage * Shape::stage_bytes;
        ptx::mbarrier_wait_parity(barriers.full_w + 8 * cursor.stage, cursor.parity);
        dequantize.load(stage + my_unit);
        metadata.template load<0>(stage + my_unit);
        metadata.template load<1>(stage + my_unit);
        dequantize.template dequantize<0, is_sparse<Config>() ? 8 : 16>(a);
        ptx::mbarrier_wait_parity(barriers.full_x + 8 * cursor.stage, cursor.parity);
        const uint64_t b = ptx::wgmma_descriptor(stage, ptx::Swizzle::bytes_128, 1024);
        UNROLL for (int part = 0; part < parts; part++) {
            ptx::wgmma_fence();
            if constexpr (is_sparse<Config>())
                multiply_kept_part<Config, parts>(product, a, b, metadata, part);
            else
                UNROLL for (int i = part * steps; i < (part + 1) * steps; i++)
                    multiply<Config>(product, a[i], ptx::wgmma_advance(b, 32 * i), i > part * steps);
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group<0>();
            ptx::wgmma_touch(product);
            if (part == parts - 1) release(cursor.stage);
            const float low = Config::group == 0 ? 1.f : dequantize.scale(part, 0);
            const float high = Config::group == 0 ? 1.f : dequantize.scale(part, 1);
            UNROLL for (int i = 0; i < count; i++)
                sum[i] = fmaf(static_cast<float>(product[i]), i & 2 ? high : low, sum[i]);
        }
        cursor.advance(Config::split_k_warpgroups);
    }
    return -1;
}

// A warpgroup's part of an expert's tile, for n of its tokens.
template <class Config, int n, class Release>
DEVICE void multiply_expert(const Params& p, const ExpertPlace& place, int row, int rounds, uint32_t ring, uint32_t my_unit,
                            const RingBarriers& barriers, RingCursor<Config::stages>& cursor, int& turn, int warp, const Release& release) {
    using Tile = Narrow<Config, n>;
    TileTerms<Tile> terms;
    terms.load(p, row + warp % 4 * 16, place.first_token);
    Dequantize<Config> dequantize;
    dequantize.begin(p.row_zero, row + warp % 4 * 16, p.weight_tiles * 64);
    typename Sums<Config>::Total sum[n / 2];
    UNROLL for (int i = 0; i < n / 2; i++) sum[i] = 0;
    int previous = -1;
    if (is_sparse<Config>() && row >= p.weight_tiles * 64)  // stale metadata would be invalid
        pass_own<Config>(barriers, 0, rounds, cursor, release);
    else if constexpr (Sums<Config>::promotes)
        previous = accumulate_promoting<Config>(sum, dequantize, ring, my_unit, barriers, 0, rounds, cursor, release);
    else
        previous = accumulate<Config>(sum, dequantize, ring, my_unit, barriers, 0, rounds, cursor, release);
    if (previous >= 0) release(previous);
    const ExpertOutput out = {p.y, place.end_token, p.expert_rows};
    const int own_row = row - place.expert * p.expert_tiles * 64;
    const uint32_t staging = ring + PackedGemmShape<Config>::body_bytes + warp / 4 * Config::epilogue_stages * Config::epilogue_tile * 128;
    if constexpr (ends_with_silu<Config>)
        store_silu_tile<Tile>(out, sum, terms, staging, turn, warp / 4, own_row, place.first_token);
    else
        store_tile<Tile>(out, sum, terms, staging, turn, warp / 4, own_row, place.first_token);
}
// Calls `body` with the tokens that an expert's tile multiplies: one of wgmma's widths, up to tile_m.
template <int n> struct Width {
    static constexpr int value = n;
};
template <class Config, int n = 32, class Body> DEVICE void at_width(int tokens, const Body& body) {
    constexpr int next = n < 64 ? 64 : n < 160 ? n + 16 : n + 32;
    if constexpr (next > Config::tile_m || is_sparse<Config>()) body(Width<Config::tile_m>{});
    else if (tokens <= n) body(Width<n>{});
    else at_width<Config, next>(tokens, body);
}

template <class Config, class P>
DEVICE void packed_gemm(const P& p) {
    using Shape = PackedGemmShape<Config>;
    static_assert(Config::shared_bytes == Shape::bytes, "sm90_packed_gemm.py and sm90_packed_gemm.cuh disagree on shared memory");
    static_assert(Config::threads == Shape::warpgroups * 128 + Shape::producer_threads, "and the producers");
    static_assert(Config::stages % Config::split_k_warpgroups == 0, "a warpgroup has seen every use of its stages");
    static_assert(Config::prologue_stages <= Config::stages, "a stage is filled once before it is read");
    static_assert(Config::stages > Config::split_k_warpgroups, "a warpgroup gives a stage back once it is at work on its next");
    constexpr int cluster_size = Walk<Config>::cluster_size;
    static_assert(!Config::halves || (Config::cluster_k * Config::cluster_n * Config::split_k_warpgroups == 1 && Config::row_warpgroups > 1));
    static_assert(Config::span == 1 || !Sums<Config>::promotes, "stages of two k blocks");
    static_assert(Config::direct == 0 || !(Config::halves || Shape::bytes_of_x || Config::span > 1), "weights past shared memory");
    static_assert(Config::direct == 0 || (Config::prologue_stages == 0 && Config::register_sets == 2 && Config::split_k_warpgroups < 4), "weights past shared memory");
    const int warp = ptx::warp_id(), lane = ptx::lane_id();
    const int rank = cluster_size > 1 ? blockIdx.x % cluster_size : 0;
    const int k_rank = rank % Config::cluster_k, row_rank = Config::halves ? 0 : rank / Config::cluster_k;
    const int half = Config::halves ? rank : 0;
    const uint32_t ring = ptx::shared_address(ptx::dynamic_shared());
    const RingBarriers barriers = {ring + Shape::barrier_offset, ring + Shape::barrier_offset + 8 * Config::stages,
                                   ring + Shape::barrier_offset + 16 * Config::stages,
                                   ring + Shape::barrier_offset + 24 * Config::stages};

    // Experts' tiles are what routing wrote: gate_up waits for it, and down starts only then.
    if constexpr (of_experts<Config> && ends_with_silu<Config>) ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    const Producer<Config> producer(p, ring, barriers, k_rank, row_rank, half, warp - Shape::warpgroups * 4);
    const bool produces = lane == 0 && warp >= Shape::warpgroups * 4 && warp < Shape::warpgroups * 4 + Shape::producers;
    if (warp >= Shape::warpgroups * 4) {
        if (threadIdx.x == Shape::warpgroups * 128) {
            for (int i = 0; i < Config::stages; i++) {
                ptx::mbarrier_init(barriers.full_w + 8 * i, 1);
                ptx::mbarrier_init(barriers.full_x + 8 * i, 1);
                ptx::mbarrier_init(barriers.empty + 8 * i, Config::row_warpgroups * 4 * Config::cluster_n);
            }
            ptx::mbarrier_init(barriers.received, 1);
            ptx::fence_mbarrier_init();
            if (Config::cluster_k > 1 || Config::halves)
                ptx::mbarrier_arrive_expect_tx(barriers.received, (Config::cluster_k - 1) * Shape::warpgroups * Shape::groups_of(k_rank) * 2048 + Shape::half_bytes);
            ptx::prefetch_tensormap(&p.x);
            if (Shape::tail_rows > 0) ptx::prefetch_tensormap(&p.x_tail);
        }
        if constexpr (Shape::producers > 1) ptx::bar_sync(10, 128);
        if (produces) producer.begin();
    }
    [[maybe_unused]] typename Choose<(Config::direct > 0), Batches<Config>, int>::type batches;
    if constexpr (Config::direct > 0) {  // first weights: issued before __syncthreads
        const Walk<Config> walk;
        Part part;
        if (warp < Shape::warpgroups * 4 && walk.at(p, k_rank, part)) {
            const int tile = first_tile<Config>(place_of<Config>(p, part.tile), row_rank, half) + warp / 4 % Config::row_warpgroups;
            batches.begin(p, part, tile, warp / 4 / Config::row_warpgroups);
        }
    }
    __syncthreads();
    if (cluster_size > 1) {  // waited for before remote mbarriers are used: here for multicast, later for partial sums
        ptx::barrier_cluster_arrive_relaxed();
        if (Config::cluster_n > 1) ptx::barrier_cluster_wait();
    }

    const int warpgroup = warp / 4, row_part = warpgroup % Config::row_warpgroups, k_part = warpgroup / Config::row_warpgroups;
    if (warp >= Shape::warpgroups * 4) {
        // setmaxnreg moves registers between whole warpgroups, so the producer is four warps where consumers need its share.
        if constexpr (Config::reallocates) ptx::setmaxnreg_dec<32>();
        if (produces) producer.run();
        __syncwarp();
        if (Config::cluster_k > 1) {
            if (Config::cluster_n == 1) ptx::barrier_cluster_wait();
            else ptx::barrier_cluster_arrive();
        }
    } else {
        // Register budget at launch: 512 per lane of an SM quarter, shared by its warps, in multiples of 8.
        // With two blocks per SM it is half of that, and waiting for more would never end.
        static_assert(!Config::reallocates || Config::min_blocks_per_sm == 1);
        constexpr int at_launch = 512 / (Shape::warpgroups + 1) / 8 * 8;
        if constexpr (Config::reallocates)
            ptx::setmaxnreg_inc<((Shape::warpgroups + 1) * at_launch - 32) / Shape::warpgroups / 8 * 8>();
        RingCursor<Config::stages> cursor;
        if (Config::split_k_warpgroups > 1) cursor.advance(k_part);
        const uint32_t my_unit = Shape::x_bytes + (row_part * 4 + warp % 4) * (tile_bytes<Config> / 4);
        auto release = [&](int stage) {
            __syncwarp();
            if (lane == 0) {
                ptx::mbarrier_arrive(barriers.empty + 8 * stage);
                if (Config::cluster_n > 1)
                    ptx::mbarrier_arrive_cluster(ptx::mapa(barriers.empty + 8 * stage, (1 - row_rank) * Config::cluster_k + k_rank));
            }
        };
        if constexpr (Config::tensor_store) {  // desynchronizes the warpgroups' loads of codes and their epilogues: 1 to 2 %
            const uint32_t start = ptx::clock32();
            while (ptx::clock32() - start < static_cast<uint32_t>(row_part * 250)) {}
        }
        [[maybe_unused]] int turn = 0, ahead = k_part;  // epilogue buffer; this warpgroup's first round of a part
        Walk<Config> walk;
        walk.begin(p);
        for (Part part; walk.at(p, k_rank, part); walk.advance()) {
            const PlaceOf<Config> place = walk.place(p, part);
            const int own_tile = first_tile<Config>(place, row_rank, half) + row_part;
            // Row tiles of another CTA or past the end: an out-of-range row suppresses their stores.
            const int row = ((Config::block_tiles > 0 || of_experts<Config>) && own_tile >= end_of<Config>(p, place) ? p.weight_tiles : own_tile) * 64;
            if constexpr (of_experts<Config>) {
                at_width<Config>(place.end_token - place.first_token, [&](auto width) {
                    multiply_expert<Config, decltype(width)::value>(p, place, row, part.count, ring, my_unit, barriers, cursor, turn, warp, release);
                });
                continue;
            }
            const bool halved = Config::halves && row_part == (half == 0 ? Config::row_warpgroups - 1 : 0);
            typename Sums<Config>::Total sum[Config::tile_m / 2];
            int previous = -1;
            TileTerms<Config> terms;
            // With split-K over the cluster a CTA finishes only its share of the tokens.
            const int first_token = first_token_of<Config>(place) + k_rank * Shape::share + halved * half * (Config::tile_m / 2);
            terms.load(p, row + warp % 4 * 16, first_token);
            Dequantize<Config> dequantize;
            dequantize.begin(p.row_zero, row + warp % 4 * 16, p.weight_tiles * 64);
            UNROLL for (int i = 0; i < Config::tile_m / 2; i++) sum[i] = 0;
            if (is_sparse<Config>() && row >= p.weight_tiles * 64)  // stale metadata would be invalid
                pass_own<Config>(barriers, ahead, part.count, cursor, release);
            else if constexpr (Sums<Config>::promotes)
                previous = accumulate_promoting<Config>(sum, dequantize, ring, my_unit, barriers, ahead, part.count, cursor, release);
            else if constexpr (Config::halves) {
                const Half<Config> share(p, half);
                const int begin = halved ? share.begin : 0, end = halved ? share.end : part.count;
                pass<Config>(barriers, begin, cursor, release);
                previous = accumulate<Config>(sum, dequantize, ring, my_unit, barriers, begin, end, cursor, release);
                if (previous >= 0) release(previous);
                pass<Config>(barriers, part.count - end, cursor, release);
                if (halved) {
                    finish_halved_tile<Config>(p, sum, terms, ring, barriers, rank, row, first_token);
                    continue;
                }
                previous = -1;
            } else if constexpr (Config::direct > 0) {
                previous = accumulate_direct<Config>(sum, dequantize, batches, ring, barriers, ahead, part.count, cursor, release);
                if constexpr (!Shape::reduces) {  // the next tile's weights load during this one's epilogue
                    Walk<Config> later = walk;
                    Part next;
                    later.advance();
                    if (later.at(p, k_rank, next)) batches.begin(p, next, first_tile<Config>(place_of<Config>(p, next.tile), row_rank, half) + row_part, 0);
                }
            } else if constexpr (Config::unrolled)
                previous = accumulate_unrolled<Config>(sum, dequantize, ring, my_unit, barriers, ahead, part.count, release);
            else
                previous = accumulate<Config>(sum, dequantize, ring, my_unit, barriers, ahead, part.count, cursor, release);
            if (previous >= 0) release(previous);
            if constexpr (Shape::reduces) {
                reduce_and_store<Config>(p, sum, terms, ring, barriers, warp, rank, row, first_token);
                continue;
            }
            if constexpr (Config::tensor_store) {
                store_tile_by_map<Config>(p, sum, terms, ring + Shape::body_bytes + warpgroup * Shape::staging_rows * 128, warpgroup, row,
                                               first_token_of<Config>(place));
                continue;
            }
            const uint32_t staging = ring + Shape::body_bytes + warpgroup * Config::epilogue_stages * Config::epilogue_tile * 128;
            const int begin = first_token_of<Config>(place);
            if constexpr (ends_with_silu<Config>)
                store_silu_tile<Config>(p, sum, terms, staging, turn, warpgroup, row, begin);
            else
                store_tile<Config>(p, sum, terms, staging, turn, warpgroup, row, begin);
        }
    }
    if (Config::tensor_store && warp < Shape::warpgroups * 4 && threadIdx.x % 128 == 0) ptx::cp_async_bulk_wait_group<0>();
    // Warpgroups of the halved tile have waited already.
    if (Config::halves && (warp >= Shape::warpgroups * 4 || row_part != (half == 0 ? Config::row_warpgroups - 1 : 0))) {
        __syncwarp();
        ptx::barrier_cluster_wait();
    }
    // No CTA may exit while others write to its shared memory or arrive on its mbarriers; this arrive follows its own sends.
    if (Config::cluster_n > 1) {
        __syncwarp();
        if (Config::cluster_k == 1) ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    }
}

// gate: of an epilogue gate(a) * up, whose Y is [tokens, rows / 2]; or none.
template <class Config, Gate... gate>
__global__ void __launch_bounds__(Config::threads, Config::min_blocks_per_sm) sm90_packed_gemm(const __grid_constant__ Params p) {
    static_assert(!Config::tensor_store, "Y has a tensor map");
    packed_gemm<EndOf<Config, gate...>>(p);
}
// Epilogue stores Y by TMA.
template <class Config>
__global__ void __launch_bounds__(Config::threads, Config::min_blocks_per_sm) sm90_packed_gemm_store(const __grid_constant__ StoreParams p) {
    packed_gemm<Config>(p);
}

}  // namespace packed

#endif  // ANYBIT_SM90_PACKED_GEMM_CUH
