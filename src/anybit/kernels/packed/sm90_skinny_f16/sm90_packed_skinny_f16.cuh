// y = x W^T for about 3 to 32 tokens, 16-bit activations, packed weights of 1 to 8 bits: fills the gap between
// sm90_packed_skinny, whose warps each hold all of a CTA's rows, and sm90_packed_gemm, whose wgmma wants more tokens.
//
// - Weights are the A operand of mma.sync (16 rows), dequantized to 16-bit values with scale and zero applied, so that all
//   groups accumulate in one set of registers.
// - A CTA owns whole units of 16 rows. Its warps form a row_warps x k_warps grid: those of a row split K, those of a K slice
//   load and share activations in shared memory. Each warp has its own ring of bulk copies of weights.
// - The CTAs of a cluster may split K over the same rows. Each then finishes the sums of some of the tokens; the others
//   send it theirs through DSMEM.
// - Reductions are in a fixed order: results are deterministic.
#ifndef ANYBIT_SM90_PACKED_SKINNY_F16_CUH
#define ANYBIT_SM90_PACKED_SKINNY_F16_CUH

#include "packed/packed_activations.cuh"
#include "packed/packed_dequantize.cuh"
#include "packed/packed_sums.cuh"

namespace packed {

// Compile-time shape of a Config.
template <class C> struct MidShape {
    static constexpr int k_warps = C::split_k_warps, warps = C::row_warps * k_warps, group_threads = C::row_warps * 32;
    static constexpr int unit_size = unit_bytes(C::bits, C::group, C::code);
    static constexpr int stage_bytes = C::stage_units * unit_size;
    static constexpr int units = C::stage_units * C::chunks;                    // per warp, at most
    static constexpr int block_rows = C::block_units * 16;                      // at most
    static constexpr int token_tiles = C::tile_m / 8, pitch = 256 + 16;         // padded: conflict-free ldmatrix
    static constexpr int slot_bytes = C::tile_m * pitch;
    static constexpr int ring_bytes = (C::stages * stage_bytes + 127) / 128 * 128;
    static constexpr int sum_pitch = block_rows + 4;                            // floats per token, padded against conflicts
    static constexpr int sums_bytes = C::split_k_warps * C::tile_m * sum_pitch * 4;
    static constexpr int body_bytes = warps * ring_bytes + C::split_k_warps * C::x_stages * slot_bytes;
    static constexpr int factors = ((body_bytes > sums_bytes ? body_bytes : sums_bytes) + 127) / 128 * 128;
    static constexpr int received = factors + block_rows * 8;
    static constexpr int share = C::tile_m / C::cluster_k;                        // tokens that a CTA finishes
    static constexpr int barriers = received + (C::cluster_k - 1) * share * block_rows * 4;
    static constexpr int x_barriers = barriers + warps * C::stages * 8;
    static constexpr int sum_barrier = x_barriers + C::split_k_warps * C::x_stages * 8;
    static constexpr int bytes = sum_barrier + 8;
};

template <class C> DEVICE void multiply16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (C::operand == Operand::f16) ptx::mma_m16n8k16_f16(d, a, b);
    else ptx::mma_m16n8k16_bf16(d, a, b);
}

// One thread's part of loading a k block of the activations into `slot`; arrives on the mbarrier once landed.
template <class C> DEVICE void bring_activations(const Params& p, uint32_t slot, uint32_t barrier, int k_block, int thread) {
    using S = MidShape<C>;
    load_activations<C, 2, S::pitch, S::group_threads>(p, slot, k_block, thread);
    if constexpr (C::gather) ptx::mbarrier_arrive(barrier);
    else ptx::cp_async_mbarrier_arrive_noinc(barrier);
}

// Multiplies a stage of weights by a k block of activations and accumulates.
template <class C, int chunk>
DEVICE void add_stage(float (&sums)[MidShape<C>::units][MidShape<C>::token_tiles][4], Dequantize16<C> (&weights)[C::stage_units],
                   uint32_t slot, uint32_t lane) {
    using S = MidShape<C>;
    unroll<0, 4>([&](auto index) {
        constexpr int wide = decltype(index)::value;
        uint32_t b[S::token_tiles][4];
        UNROLL for (int n = 0; n < S::token_tiles; n++)
            ptx::ldmatrix_x4(b[n], slot + (n * 8 + (lane & 7)) * S::pitch + wide * 64 + (lane >> 3) * 16);
        UNROLL for (int r = 0; r < C::stage_units; r++) {
            uint32_t a[2][4];
            weights[r].template dequantize<8 * wide, 8 * wide + 8>(a);
            UNROLL for (int n = 0; n < S::token_tiles; n++) {
                const uint32_t low[2] = {b[n][0], b[n][1]}, high[2] = {b[n][2], b[n][3]};
                multiply16<C>(sums[chunk * C::stage_units + r][n], a[0], low);
                multiply16<C>(sums[chunk * C::stage_units + r][n], a[1], high);
            }
        }
    });
}

}  // namespace packed

template <class C> __global__ void __launch_bounds__(C::threads, C::min_blocks_per_sm) sm90_packed_skinny_f16(const __grid_constant__ Params p) {
    using packed::Dequantize16;
    using S = packed::MidShape<C>;
    static_assert(C::threads == S::warps * 32 && C::shared_bytes >= S::bytes, "the twin counts otherwise");

    ptx::griddepcontrol_launch_dependents();
    const uint32_t lane = ptx::lane_id();
    const int warp = static_cast<int>(ptx::warp_id()), k_warp = warp / C::row_warps;
    // Rotated by k_warp, so that an uneven split of the rows loads the SM's schedulers evenly.
    const int row_warp = (warp + k_warp) % C::row_warps;
    const uint32_t shared = ptx::shared_address(ptx::dynamic_shared()), ring = shared + warp * S::ring_bytes;
    const uint32_t slots = shared + S::warps * S::ring_bytes + k_warp * (C::x_stages * S::slot_bytes);
    const uint32_t barriers = shared + S::barriers + warp * (C::stages * 8);
    const uint32_t x_barriers = shared + S::x_barriers + k_warp * (C::x_stages * 8), sum_barrier = shared + S::sum_barrier;

    // Units of 16 rows are split evenly over the clusters, then over the row warps.
    const int rank = C::cluster_k > 1 ? static_cast<int>(blockIdx.x % C::cluster_k) : 0;
    const uint32_t row_units = static_cast<uint32_t>(p.row_tiles) * 4, owner = blockIdx.x / C::cluster_k, owners = gridDim.x / C::cluster_k;
    const int block_first = static_cast<int>(owner * row_units / owners);
    const int block_units = static_cast<int>((owner + 1) * row_units / owners) - block_first;
    const int first = row_warp * block_units / C::row_warps, mine = (row_warp + 1) * block_units / C::row_warps - first;
    const int chunks = (mine + C::stage_units - 1) / C::stage_units;
    // K blocks go round-robin to the K warps of all CTAs of the cluster.
    constexpr int dealt = C::cluster_k * C::split_k_warps;
    const int first_column = rank * C::split_k_warps + k_warp;
    const int rounds = p.k_blocks > first_column ? (p.k_blocks - first_column + dealt - 1) / dealt : 0;

    if (lane == 0) {
        UNROLL for (int i = 0; i < C::stages; i++) ptx::mbarrier_init(barriers + i * 8, 1);
        if (row_warp == 0) {
            UNROLL for (int i = 0; i < C::x_stages; i++) ptx::mbarrier_init(x_barriers + i * 8, S::group_threads);
        }
        if (C::cluster_k > 1 && warp == 0) {
            ptx::mbarrier_init(sum_barrier, 1);
            ptx::mbarrier_arrive_expect_tx(sum_barrier, static_cast<uint32_t>((C::cluster_k - 1) * S::share * block_units * 64));
        }
        ptx::fence_mbarrier_init();
    }
    __syncwarp();

    const uint64_t policy = ptx::createpolicy_evict_first();
    // Step i of a warp is chunk i % chunks of its round i / chunks.
    const size_t stride = static_cast<size_t>(dealt) * row_units * S::unit_size;
    const uint8_t* ahead = p.tiles + (static_cast<size_t>(first_column) * row_units + block_first + first) * S::unit_size;
    int left = rounds * chunks, ahead_chunk = 0, ahead_slot = 0;
    const auto fetch = [&]() {
        if (lane == 0) {
            const int units = min(mine - ahead_chunk * C::stage_units, C::stage_units);
            const uint32_t bytes = static_cast<uint32_t>(units) * S::unit_size, barrier = barriers + ahead_slot * 8;
            ptx::mbarrier_arrive_expect_tx(barrier, bytes);
            ptx::cp_async_bulk_load_hint(ring + ahead_slot * S::stage_bytes, ahead + ahead_chunk * S::stage_bytes, bytes, barrier, policy);
        }
        left--;
        if (++ahead_slot == C::stages) ahead_slot = 0;
        if (++ahead_chunk == chunks) ahead_chunk = 0, ahead += stride;
    };
    for (int i = 0; i < C::prologue_stages && left > 0; i++) fetch();
    // Further copies are issued as earlier ones land, so that activations don't queue behind weights.
    for (int i = 0; i < C::stages - C::prologue_stages && left > 0; i++) {
        ptx::mbarrier_wait_parity(barriers + i * 8, 0);
        fetch();
    }
    for (int i = static_cast<int>(threadIdx.x); i < S::block_rows; i += C::threads) {
        const float2 row = packed::row_factors<C::operand == Operand::f16>(p, block_first * 16 + i);
        ptx::st_shared_v2(shared + S::factors + i * 8, {__float_as_uint(row.x * Dequantize16<C>::unscale()), __float_as_uint(row.y)});
    }
    if constexpr (C::cluster_k > 1) ptx::barrier_cluster_arrive_relaxed();
    __syncthreads();
    ptx::griddepcontrol_wait();

    const int thread = row_warp * 32 + static_cast<int>(lane);
    UNROLL for (int i = 0; i < C::x_stages; i++)
        if (i < rounds)
            packed::bring_activations<C>(p, slots + i * S::slot_bytes, x_barriers + i * 8, first_column + i * dealt, thread);

    float sums[S::units][S::token_tiles][4];
    UNROLL for (int r = 0; r < S::units; r++)
        UNROLL for (int n = 0; n < S::token_tiles; n++)
            UNROLL for (int i = 0; i < 4; i++) sums[r][n][i] = 0;

    int x_slot = 0, stage = 0;
    uint32_t x_phase = 0, phase = 0;
    for (int i = 0; i < rounds; i++) {
        const uint32_t x = slots + x_slot * S::slot_bytes;
        ptx::mbarrier_wait_parity(x_barriers + x_slot * 8, x_phase);
        packed::unroll<0, C::chunks>([&](auto which) {
            constexpr int chunk = decltype(which)::value;
            if (chunk < chunks) {
                ptx::mbarrier_wait_parity(barriers + stage * 8, phase);
                Dequantize16<C> weights[C::stage_units];
                UNROLL for (int r = 0; r < C::stage_units; r++) {  // stale past the last row: never stored
                    weights[r].begin(p.row_zero, (block_first + first + chunk * C::stage_units + r) * 16, p.row_tiles * 64);
                    weights[r].load(ring + stage * S::stage_bytes + r * S::unit_size);
                }
                packed::add_stage<C, chunk>(sums, weights, x, lane);
                __syncwarp();
                if (left > 0) fetch();
                if (++stage == C::stages) stage = 0, phase ^= 1;
            }
        });
        if (i + C::x_stages < rounds) {
            if constexpr (C::row_warps > 1) ptx::bar_sync(k_warp + 1, S::group_threads);
            else __syncwarp();
            packed::bring_activations<C>(p, x, x_barriers + x_slot * 8, first_column + (i + C::x_stages) * dealt, thread);
        }
        if (++x_slot == C::x_stages) x_slot = 0, x_phase ^= 1;
    }

    // Reduction over the K warps: [k_warp][token][row], over the rings and activation slots.
    __syncthreads();
    const uint32_t lane_at = ((lane & 3) * 2 * S::sum_pitch + (lane >> 2)) * 4;
    UNROLL for (int r = 0; r < S::units; r++)
        if (r < mine)
            UNROLL for (int n = 0; n < S::token_tiles; n++)
                UNROLL for (int i = 0; i < 4; i++) {
                    const int at = (k_warp * C::tile_m + n * 8 + (i & 1)) * S::sum_pitch + (first + r) * 16 + (i >> 1) * 8;
                    ptx::st_shared_f32(shared + lane_at + at * 4, sums[r][n][i]);
                }
    __syncthreads();
    const int quads = block_units * 4;
    packed::finish_tokens<C, S>(p, shared, block_first, quads, S::share * quads);
}

#endif  // ANYBIT_SM90_PACKED_SKINNY_F16_CUH
