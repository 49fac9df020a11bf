// y = x W^T for some 2 to 64 tokens, 16-bit activations as int8 digits (digit_layout.cuh), packed weights of 1 to 4 bits.
//
// At few tokens narrow weights cost what it takes to widen them. An int8 operand register holds four codes: one shift and
// one mask, where 16-bit operands take two of each. Digits' products are exact in int32, and join there: one conversion and
// two multiply-adds a block of 128 columns, with scales and zero points.
//
// - Weights are the A operand of mma.sync (16 rows), which leaves little of the registers' bandwidth to other instructions, or
//   of wgmma, which does not. A CTA owns whole units of 16 rows. Its warps form a row_warps x k_warps
//   grid: those of a K slice share digits in shared memory.
// - Rings of cp.async, a block of columns a stage; weights are on their way before griddepcontrol.wait. For wgmma bulk
//   copies, a K slice's at a time: after cp.async it needs a fence, a MEMBAR in SASS, which took 3 to 6 % longer.
// - Sums stay in registers, meet once in shared memory, then over the CTAs of a cluster, all in a fixed order.
#ifndef ANYBIT_SM80_PACKED_DIGITS_CUH
#define ANYBIT_SM80_PACKED_DIGITS_CUH

#include "packed/sm80_digits/sm80_packed_digits_parts.cuh"
#include "packed/sm80_digits/sm80_packed_digits_wgmma.cuh"

namespace packed {

// A thread's part of a copy: 16 of every `step` bytes while some of `left` are left.
template <int bytes, int step, class Wanted> DEVICE void copy(uint32_t to, const uint8_t* from, int left, Wanted&& wanted) {
    UNROLL for (int i = 0; i < bytes; i += step)
        if (i < left && wanted(i)) ptx::cp_async<16>(to + i, from + i);
}

// Multiplies a tile over all of its K that falls to this CTA, `rank` of cluster_k, and leaves sums in shared memory:
// [k_warp][token][row], sum_pitch floats a token. ready: what to do before digits are read.
template <class C, class Ready> DEVICE void multiply_tile(const DigitTile& tile, int rank, uint32_t shared, Ready&& ready) {
    using S = DigitsShape<C>;
    using Product = typename Choose<C::wgmma, WgmmaProduct<C>, MmaProduct<C>>::type;
    constexpr int ahead = C::stages - 1;  // stages on their way while another is multiplied
    static_assert(ahead >= 1, "a stage is multiplied while another is on its way");
    const uint32_t lane = ptx::lane_id();
    const int warp = static_cast<int>(ptx::warp_id()), k_warp = warp / C::row_warps;
    // Rotated by k_warp, so that an uneven split of the rows loads the SM's schedulers evenly.
    const int row_warp = (warp + k_warp) % C::row_warps, thread = row_warp * 32 + static_cast<int>(lane);
    const int first = row_warp * tile.units / C::row_warps, mine = (row_warp + 1) * tile.units / C::row_warps - first;
    // Blocks of 128 columns go round-robin to the K warps of all CTAs of the cluster.
    constexpr int dealt = C::cluster_k * C::k_warps;
    const int first_block = rank * C::k_warps + k_warp;
    const int rounds = tile.k_blocks > first_block ? (tile.k_blocks - first_block + dealt - 1) / dealt : 0;
    constexpr int slot_bytes = C::wgmma ? C::row_warps * S::slot_bytes : S::slot_bytes;  // of a K slice, or of a warp
    const uint32_t weights = shared + (C::wgmma ? k_warp : warp) * (C::stages * slot_bytes), slots = shared + S::digits + k_warp * (C::stages * S::block_bytes);
    const uint32_t mine_at = C::wgmma ? first * S::unit_size : 0, arrived = shared + S::barriers + k_warp * (C::stages * 8);
    const int weights_at = static_cast<int>(lane) * 16, digits_at = thread * 16;
    const uint8_t* weights_ahead = tile.tiles + first_block * tile.stride + (C::wgmma ? 0 : static_cast<size_t>(first) * S::unit_size + weights_at);
    const uint8_t* digits_ahead = tile.digits + static_cast<size_t>(first_block) * S::block_bytes + (C::wgmma ? 0 : digits_at);
    const auto bring_weights = [&](int slot) {
        if constexpr (C::wgmma) {
            if (thread == 0) {
                const uint32_t bytes = static_cast<uint32_t>(tile.units) * S::unit_size;
                ptx::mbarrier_arrive_expect_tx(arrived + slot * 8, bytes + S::block_bytes);
                ptx::cp_async_bulk_load_hint(weights + slot * slot_bytes, weights_ahead, bytes, arrived + slot * 8, ptx::createpolicy_evict_first());
            }
        } else {
            copy<S::slot_bytes, 512>(weights + slot * slot_bytes + weights_at, weights_ahead, mine * S::unit_size - weights_at, [](int) { return true; });
        }
        weights_ahead += dealt * tile.stride;
    };
    const auto bring_digits = [&](int slot) {
        if constexpr (C::wgmma) {
            if (thread == 0) ptx::cp_async_bulk_load(slots + slot * S::block_bytes, digits_ahead, S::block_bytes, arrived + slot * 8);
        } else {
            copy<S::block_bytes, S::group_threads * 16>(slots + slot * S::block_bytes + digits_at, digits_ahead, S::block_bytes - digits_at,
                                                        [&](int i) { return tile.tokens < 0 || S::token_of(digits_at + i) < tile.tokens; });
        }
        digits_ahead += dealt * S::block_bytes;
    };
    if constexpr (C::wgmma) {
        if (thread == 0) {
            UNROLL for (int i = 0; i < C::stages; i++) ptx::mbarrier_init(arrived + i * 8, 1);
            ptx::fence_mbarrier_init();
        }
    }
    UNROLL for (int i = 0; i < ahead; i++)
        if (i < rounds) bring_weights(i);
    ptx::cp_async_commit_group();
    ready();
    UNROLL for (int i = 0; i < ahead; i++) {
        if (i < rounds) bring_digits(i);
        ptx::cp_async_commit_group();
    }

    float sums[C::units][S::token_tiles][2];
    UNROLL for (int u = 0; u < C::units; u++)
        UNROLL for (int n = 0; n < S::token_tiles; n++) sums[u][n][0] = sums[u][n][1] = 0;
    uint32_t row_zeros[S::zeros] = {};
    if constexpr (S::asym && S::whole_rows) {
        UNROLL for (int u = 0; u < C::units; u++)
            if (u < mine) {
                const uint8_t* row = tile.row_zero + (first + u) * 16 + (lane >> 2);
                row_zeros[u] = row[0] | row[8] << 8;
            }
    }

    Product product;
    int slot = 0, next = ahead;
    uint32_t phase = 0;
    for (int i = 0; i < rounds; i++) {
        if constexpr (!C::wgmma) ptx::cp_async_wait_group<ahead - 1>();
        if constexpr (C::row_warps > 1) ptx::bar_sync(k_warp + 1, S::group_threads);
        else __syncwarp();
        if (i + ahead < rounds) bring_weights(next), bring_digits(next);
        if constexpr (C::wgmma) ptx::mbarrier_wait_parity(arrived + slot * 8, phase);
        else ptx::cp_async_commit_group();
        product.round(sums, slots + slot * S::block_bytes, weights + slot * slot_bytes + mine_at, mine, row_zeros, lane);
        if (++slot == C::stages) slot = 0, phase ^= 1;
        if (++next == C::stages) next = 0;
    }

    ptx::cp_async_wait_all();
    __syncthreads();  // sums lie over the rings
    const uint32_t to = shared + ((k_warp * C::tile_m + (lane & 3)) * S::sum_pitch + first * 16 + (lane >> 2)) * 4;
    UNROLL for (int u = 0; u < C::units; u++)
        if (u < mine)
            UNROLL for (int n = 0; n < S::token_tiles; n++)
                UNROLL for (int r = 0; r < 2; r++) ptx::st_shared_f32(to + (n * 4 * S::sum_pitch + u * 16 + r * 8) * 4, sums[u][n][r]);
    __syncthreads();
}

}  // namespace packed

template <class C> __global__ void __launch_bounds__(C::threads, C::min_blocks_per_sm) sm80_packed_digits(const __grid_constant__ Params p) {
    using S = packed::DigitsShape<C>;
    static_assert(C::threads == S::warps * 32 && C::shared_bytes >= S::bytes, "the twin counts otherwise");
    constexpr bool f16 = C::operand == Operand::f16;
    ptx::griddepcontrol_launch_dependents();
    const uint32_t shared = ptx::shared_address(ptx::dynamic_shared()), sum_barrier = shared + S::sum_barrier;

    // Units of 16 rows are split evenly over the clusters.
    const int rank = C::cluster_k > 1 ? static_cast<int>(blockIdx.x % C::cluster_k) : 0;
    const uint32_t row_units = static_cast<uint32_t>(p.row_tiles) * 4, owner = blockIdx.x / C::cluster_k, owners = gridDim.x / C::cluster_k;
    const int first = static_cast<int>(owner * row_units / owners), units = static_cast<int>((owner + 1) * row_units / owners) - first;
    const int quads = units * 4, items = S::share * quads;
    if constexpr (C::cluster_k > 1) {
        if (threadIdx.x == 0) {
            ptx::mbarrier_init(sum_barrier, 1);
            ptx::mbarrier_arrive_expect_tx(sum_barrier, static_cast<uint32_t>((C::cluster_k - 1) * items * 16));
            ptx::fence_mbarrier_init();
        }
    }
    const packed::DigitTile tile = {p.tiles + static_cast<size_t>(first) * S::unit_size, p.x, p.row_zero == nullptr ? nullptr : p.row_zero + first * 16,
                                    static_cast<size_t>(row_units) * S::unit_size, units, p.k_blocks, -1};
    packed::multiply_tile<C>(tile, rank, shared, [&]() {
        for (int i = static_cast<int>(threadIdx.x); i < units * 16; i += C::threads) {
            const float2 row = packed::row_factors<f16>(p, first * 16 + i);
            ptx::st_shared_v2(shared + S::factors + i * 8, {__float_as_uint(row.x), __float_as_uint(row.y)});
        }
        if constexpr (C::cluster_k > 1) ptx::barrier_cluster_arrive_relaxed();
        ptx::griddepcontrol_wait();
    });

    packed::finish_tokens<C, S>(p, shared, first, quads, items);
}

#endif  // ANYBIT_SM80_PACKED_DIGITS_CUH
