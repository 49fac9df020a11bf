// Launch parameters of sm90_packed_gemv, sm90_packed_skinny and sm90_packed_skinny_f16. Twin: packed_problem.Params.
#ifndef ANYBIT_PACKED_PARAMS_CUH
#define ANYBIT_PACKED_PARAMS_CUH

#include "common/ptx/base.cuh"

struct Params {
    const uint8_t* tiles;
    const float* row_scale;
    const uint8_t* row_zero;     // asym with per-row scales, else null
    const int32_t* permutation;  // act-order: the input channel of each column, else null
    const uint8_t* x;            // [m, k], rows x_stride elements apart
    const float* x_scale;        // [m] for int8 activations, else null
    const uint16_t* bias;        // [n] or null
    uint16_t* y;                 // [m, n]
    int32_t m, n, k, x_stride, k_blocks, row_tiles;
};

namespace packed {

// Scale and bias of row n; 0 past the last. f16: type of the bias, else bfloat16.
template <bool f16, class P> DEVICE float2 row_factors(const P& p, int n) {
    float scale = 0.0f, bias = 0.0f;
    if (n < p.n) {
        scale = p.row_scale[n];
        if (p.bias != nullptr) bias = f16 ? ptx::cvt_f32_f16(p.bias[n]) : ptx::cvt_f32_bf16(p.bias[n]);
    }
    return make_float2(scale, bias);
}

}  // namespace packed

#endif  // ANYBIT_PACKED_PARAMS_CUH
