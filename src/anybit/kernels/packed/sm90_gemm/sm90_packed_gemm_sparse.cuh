// sm90_packed_gemm: 2:4 sparse weights on wgmma.sp. A unit stores half as many codes, dequantized like dense ones, and the
// metadata that selects their inputs, one register per lane and half k block, stored in the order that wgmma.sp takes.
#ifndef ANYBIT_SM90_PACKED_GEMM_SPARSE_CUH
#define ANYBIT_SM90_PACKED_GEMM_SPARSE_CUH

#include "common/ptx/wgmma_sparse.cuh"
#include "packed/sm90_gemm/sm90_packed_gemm_shape.cuh"

namespace packed {

template <class Config, int selector>
DEVICE void multiply_kept_step(typename Sums<Config>::Product (&sum)[Config::tile_m / 2], const uint32_t (&a)[4], uint64_t b, uint32_t metadata,
                            bool accumulate = true) {
    if constexpr (Config::operand == Operand::f16)
        ptx::wgmma_sp_f16<Config::tile_m, selector>(sum, a, b, metadata, accumulate);
    else if constexpr (Config::operand == Operand::bf16)
        ptx::wgmma_sp_bf16<Config::tile_m, selector>(sum, a, b, metadata, accumulate);
    else
        ptx::wgmma_sp_s8<Config::tile_m, selector>(sum, a, b, metadata, accumulate);
}

// Half a unit: two wgmmas of 16-bit values sharing one metadata register, or one of 8-bit values.
template <class Config, int steps>
DEVICE void multiply_kept(typename Sums<Config>::Product (&sum)[Config::tile_m / 2], const uint32_t (&a)[steps][4], uint64_t b, uint32_t metadata) {
    multiply_kept_step<Config, 0>(sum, a[0], b, metadata);
    if constexpr (steps == 2) multiply_kept_step<Config, 1>(sum, a[1], ptx::wgmma_advance(b, PackedGemmShape<Config>::step_bytes), metadata);
}

// One of the unit's `parts` groups of 8-bit values, accumulated from zero. k is 64: with groups of 32, each group's wgmma
// has the other group's values zeroed.
template <class Config, int parts>
DEVICE void multiply_kept_part(int32_t (&product)[Config::tile_m / 2], const uint32_t (&a)[2][4], uint64_t b, const Metadata<Config>& metadata, int part) {
    const int first = parts == 1 ? 0 : parts == 2 ? part : part / 2;
    if constexpr (parts == 4) {
        const bool high = part % 2;
        const uint32_t own[4] = {high ? 0 : a[first][0], high ? 0 : a[first][1], high ? a[first][2] : 0, high ? a[first][3] : 0};
        multiply_kept_step<Config, 0>(product, own, ptx::wgmma_advance(b, 64 * first), metadata.half[first], false);
    } else {
        multiply_kept_step<Config, 0>(product, a[first], ptx::wgmma_advance(b, 64 * first), metadata.half[first], false);
        if constexpr (parts == 1) multiply_kept_step<Config, 0>(product, a[1], ptx::wgmma_advance(b, 64), metadata.half[1]);
    }
}

// Passes over a warpgroup's own stages, for a row tile past the end.
template <class Config, class Release>
DEVICE void pass_own(const RingBarriers& barriers, int first, int rounds, RingCursor<Config::stages>& cursor, const Release& release) {
    for (int round = first; round < rounds; round += Config::split_k_warpgroups, cursor.advance(Config::split_k_warpgroups)) {
        ptx::mbarrier_wait_parity(barriers.full_w + 8 * cursor.stage, cursor.parity);
        ptx::mbarrier_wait_parity(barriers.full_x + 8 * cursor.stage, cursor.parity);
        release(cursor.stage);
    }
}

}  // namespace packed

#endif  // ANYBIT_SM90_PACKED_GEMM_SPARSE_CUH
