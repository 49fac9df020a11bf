// Rows of bf16 as fp16 times a power of two a row, which loses nothing that matters: values below 2^-29 of a row's largest lose
// bits. fp16 operands take a third fewer instructions than bf16 ones. A CTA a row.
#ifndef ANYBIT_HALVE_CUH
#define ANYBIT_HALVE_CUH

#include "common/values.cuh"

struct HalveParams {
    const uint4* x;  // [rows], `vectors` of eight values, x_stride vectors apart
    uint4* y;        // [rows], dense
    float* scale;    // [rows]
    int32_t vectors, x_stride;
};

template <class Config> __global__ void __launch_bounds__(Config::threads) halve(const __grid_constant__ HalveParams p) {
    constexpr int warps = Config::threads / 32;
    static_assert(Config::shared_bytes == warps * 4, "a word a warp");
    uint32_t* found = reinterpret_cast<uint32_t*>(ptx::dynamic_shared());
    const uint4* x = p.x + static_cast<size_t>(blockIdx.x) * p.x_stride;
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();
    uint32_t largest = 0;
    for (int i = threadIdx.x; i < p.vectors; i += Config::threads) {
        const uint4 v = x[i];
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        UNROLL for (int e = 0; e < 4; e++) largest = max(largest, values::magnitude_of_pair(words[e]));
    }
    largest = ptx::redux_max(largest);
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = largest;
    __syncthreads();
    UNROLL for (int warp = 0; warp < warps; warp++) largest = max(largest, found[warp]);

    const float2 factor = values::to_half<true>(largest);
    if (threadIdx.x == 0) p.scale[blockIdx.x] = factor.y;
    for (int i = threadIdx.x; i < p.vectors; i += Config::threads) {
        const uint4 v = x[i];
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        uint32_t out[4];
        UNROLL for (int e = 0; e < 4; e++) out[e] = values::half_pair<true>(words[e], factor.x);
        p.y[static_cast<size_t>(blockIdx.x) * p.vectors + i] = uint4{out[0], out[1], out[2], out[3]};
    }
}

#endif  // ANYBIT_HALVE_CUH
