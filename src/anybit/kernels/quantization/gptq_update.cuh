// Channels rounded one after the other, each error spread over those that follow: the serial core of GPTQ and of
// coordinate descent on a layer's error. Output rows do not depend on each other: a thread a row, its channels in
// registers.
#ifndef ANYBIT_GPTQ_UPDATE_CUH
#define ANYBIT_GPTQ_UPDATE_CUH

#include "common/ptx/base.cuh"

struct Params {
    const float* values;     // [channels, columns], rows value_stride apart
    const float* reference;  // as values: what errors are measured from; null: the values as they then are
    const float* coupling;   // [channels, channels], rows coupling_stride apart; what lies above the diagonal is read
    const float* scale;      // [columns]
    const float* zero;       // [columns]
    float* codes;            // [channels, columns], dense
    float* errors;           // [channels, columns], dense
    uint8_t* mask;           // [channels, columns], dense: 0 where the code is the zero; read, or chosen here and written
    const float* diagonal;   // [channels], of the factor: what is chosen costs most to lose
    int64_t value_stride, reference_stride, coupling_stride;
    int32_t channels, columns;
    float top;
};

// Config: threads, channels (the most), referenced, masked (a mask is read), choosing (it is found: two of every four).
template <class Config> __global__ void __launch_bounds__(Config::threads) sweep(const __grid_constant__ Params p) {
    constexpr int most = Config::channels;
    static_assert(Config::shared_bytes == most * most * 4, "the coupling of all channels");
    float* coupling = reinterpret_cast<float*>(ptx::dynamic_shared());
    for (int i = threadIdx.x; i < most * most; i += Config::threads) {
        const int row = i / most, column = i % most;
        const bool used = row < column && column < p.channels;
        coupling[i] = used ? p.coupling[row * p.coupling_stride + column] : 0.0f;
    }
    __syncthreads();
    const int column = blockIdx.x * Config::threads + threadIdx.x;
    if (column >= p.columns) return;

    float value[most];
#pragma unroll
    for (int i = 0; i < most; ++i) value[i] = i < p.channels ? p.values[i * p.value_stride + column] : 0.0f;
    const float scale = p.scale[column], zero = p.zero[column];
    bool kept[4] = {true, true, true, true};
#pragma unroll
    for (int j = 0; j < most; ++j) {
        if (j < p.channels) {
            const int64_t at = static_cast<int64_t>(j) * p.columns + column;
            if constexpr (Config::choosing) {
                if (j % 4 == 0) {
                    float cost[4];
                    int beaten[4] = {};
#pragma unroll
                    for (int i = 0; i < 4; ++i) cost[i] = value[j + i] / p.diagonal[j + i], cost[i] *= cost[i];
#pragma unroll
                    for (int i = 0; i < 4; ++i)
#pragma unroll
                        for (int k = i + 1; k < 4; ++k) cost[i] >= cost[k] ? ++beaten[k] : ++beaten[i];
#pragma unroll
                    for (int i = 0; i < 4; ++i) kept[i] = beaten[i] < 2;
                }
                p.mask[at] = kept[j % 4];
            } else if constexpr (Config::masked) {
                kept[j % 4] = p.mask[at];
            }
            const float nearest = fminf(fmaxf(rintf(value[j] / scale + zero), 0.0f), p.top), code = kept[j % 4] ? nearest : zero;
            const float from = Config::referenced ? p.reference[j * p.reference_stride + column] : value[j];
            const float error = from - (code - zero) * scale;
            p.codes[at] = code;
            p.errors[at] = error;
#pragma unroll
            for (int i = j + 1; i < most; ++i) value[i] -= coupling[j * most + i] * error;
        }
    }
}

#endif  // ANYBIT_GPTQ_UPDATE_CUH
