// Experts' products for many tokens: sm90_packed_gemm over one tall weight, whose persistent CTAs walk tiles (expert, row tile,
// token tile). X and Y have a row a slot (a token's choice of an expert), sorted by expert. Routing wrote the token tiles
// (route.cuh): gate_up fetches weights once it has ended, down before gate_up has.
#ifndef ANYBIT_SM90_GROUPED_GEMM_CUH
#define ANYBIT_SM90_GROUPED_GEMM_CUH

#include "packed/sm90_gemm/sm90_packed_gemm.cuh"

namespace packed {

// gate: what the epilogue joins gate and up by, as sm90_packed_gemm's; of down none.
template <class Config, Gate... gate>
__global__ void __launch_bounds__(Config::threads, Config::min_blocks_per_sm) sm90_grouped_gemm(const __grid_constant__ Params p) {
    static_assert(!PackedGemmShape<Config>::reduces && Config::cluster_n == 1 && !Config::halves && Config::direct == 0 &&
                  Config::block_tiles == 0 && !Config::tensor_store, "a persistent walk over experts");
    packed_gemm<OfExperts<EndOf<Config, gate...>>>(p);
}

}  // namespace packed

#endif  // ANYBIT_SM90_GROUPED_GEMM_CUH
