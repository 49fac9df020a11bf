// Experts' products for many tokens: sm90_packed_gemm over one tall weight, whose persistent CTAs walk tiles (expert, row tile,
// token tile). X and Y have a row a slot (a token's choice of an expert), sorted by expert. Routing wrote the token tiles
// (route.cuh): gate_up fetches weights once it has ended, down before gate_up has.
#ifndef ANYBIT_SM90_GROUPED_GEMM_CUH
#define ANYBIT_SM90_GROUPED_GEMM_CUH

#include "packed/sm90_gemm/sm90_packed_gemm.cuh"

namespace packed {

template <class Config> DEVICE void grouped_gemm(const Params& p) {
    static_assert(!PackedGemmShape<Config>::reduces && Config::cluster_n == 1 && !Config::halves && Config::direct == 0 &&
                  Config::block_tiles == 0 && !Config::tensor_store, "a persistent walk over experts");
    packed_gemm<OfExperts<Config>>(p);
}

template <class Config>
__global__ void __launch_bounds__(Config::threads, Config::min_blocks_per_sm) sm90_grouped_gemm(const __grid_constant__ Params p) {
    grouped_gemm<Config>(p);
}
// Epilogues that join gate and up, as sm90_packed_gemm_silu's.
template <class Config>
__global__ void __launch_bounds__(Config::threads, Config::min_blocks_per_sm) sm90_grouped_gemm_silu(const __grid_constant__ Params p) {
    grouped_gemm<EndingWithSilu<Config>>(p);
}
template <class Config>
__global__ void __launch_bounds__(Config::threads, Config::min_blocks_per_sm) sm90_grouped_gemm_gelu_tanh(const __grid_constant__ Params p) {
    grouped_gemm<EndingWithSilu<Config, Gate::gelu_tanh>>(p);
}
template <class Config>
__global__ void __launch_bounds__(Config::threads, Config::min_blocks_per_sm) sm90_grouped_gemm_swigluoai(const __grid_constant__ Params p) {
    grouped_gemm<EndingWithSilu<Config, Gate::swigluoai>>(p);
}

}  // namespace packed

#endif  // ANYBIT_SM90_GROUPED_GEMM_CUH
