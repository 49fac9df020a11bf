// Y: each token's sum of its slots' rows times their routing weights, in float32 and in the order of the choices.
#ifndef ANYBIT_COMBINE_CUH
#define ANYBIT_COMBINE_CUH

#include "common/values.cuh"
#include "common/types.cuh"

struct Params {
    const uint4* rows;     // [slots], 16-bit values, `vectors` of eight a row
    const int32_t* place;  // [tokens, top_k]: the slot's row, -1 if skipped
    const void* weights;   // [tokens, top_k], of Config::weight
    uint4* y;              // [tokens], `vectors` a row
    int32_t tokens, vectors;
};

namespace combine {

template <class Config> DEVICE float weight_of(const Params& p, int slot) {
    if constexpr (Config::weight == Output::f32) return static_cast<const float*>(p.weights)[slot];
    const uint16_t bits = static_cast<const uint16_t*>(p.weights)[slot];
    return Config::weight == Output::bf16 ? ptx::cvt_f32_bf16(bits) : ptx::cvt_f32_f16(bits);
}

}  // namespace combine

template <class Config>
__global__ void __launch_bounds__(Config::threads) combine_slots(const __grid_constant__ Params p) {
    static_assert(Config::shared_bytes == 0, "no shared memory");
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    const int vector = blockIdx.y * Config::threads + threadIdx.x, token = blockIdx.x;
    if (vector >= p.vectors) return;
    float sum[8] = {};
    UNROLL for (int j = 0; j < Config::top_k; j++) {
        const int slot = token * Config::top_k + j, row = p.place[slot];
        if (row < 0) continue;
        const float weight = combine::weight_of<Config>(p, slot);
        const uint4 v = p.rows[static_cast<size_t>(row) * p.vectors + vector];
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        UNROLL for (int i = 0; i < 4; i++) {
            sum[2 * i] = fmaf(weight, values::low_float<Config::is_bf16>(words[i]), sum[2 * i]);
            sum[2 * i + 1] = fmaf(weight, values::high_float<Config::is_bf16>(words[i]), sum[2 * i + 1]);
        }
    }
    uint32_t out[4];
    UNROLL for (int i = 0; i < 4; i++)
        out[i] = Config::is_bf16 ? ptx::cvt_bf16x2_f32(sum[2 * i], sum[2 * i + 1]) : ptx::cvt_f16x2_f32(sum[2 * i], sum[2 * i + 1]);
    p.y[static_cast<size_t>(token) * p.vectors + vector] = uint4{out[0], out[1], out[2], out[3]};
}

#endif  // ANYBIT_COMBINE_CUH
