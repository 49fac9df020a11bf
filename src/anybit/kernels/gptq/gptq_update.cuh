// Rounds channels one after another and spreads each error over those that follow: the serial core of GPTQ and of
// coordinate descent on a layer's error. Output rows are independent: one thread per row, its channels in registers, the
// coupling matrix in shared memory.
#ifndef ANYBIT_GPTQ_UPDATE_CUH
#define ANYBIT_GPTQ_UPDATE_CUH

#include "common/ptx/base.cuh"

struct Params {
    const float* values;     // [channels, columns], row stride value_stride
    const float* reference;  // as values: what errors are measured against; null: the current (updated) values
    const float* coupling;   // [channels, channels], row stride coupling_stride; the strict upper triangle is read
    const float* scale;      // [columns]
    const float* zero;       // [columns]
    float* codes;            // [channels, columns], contiguous
    float* errors;           // [channels, columns], contiguous
    uint8_t* mask;           // [channels, columns], contiguous: 0 where pruned (code = zero); input, or output if choosing
    const float* diagonal;   // [channels], of the factor: pruning keeps the values with the largest (value / diagonal)^2
    int64_t value_stride, reference_stride, coupling_stride;
    int32_t channels, columns;
    float top;
};

// Config: threads, channels (upper bound), referenced, masked (reads a mask), choosing (finds a 2:4 mask).
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
    UNROLL for (int i = 0; i < most; ++i) value[i] = i < p.channels ? p.values[i * p.value_stride + column] : 0.0f;
    const float scale = p.scale[column], zero = p.zero[column];
    bool kept[4] = {true, true, true, true};
    UNROLL for (int j = 0; j < most; ++j) {
        if (j < p.channels) {
            const int64_t at = static_cast<int64_t>(j) * p.columns + column;
            if constexpr (Config::choosing) {
                if (j % 4 == 0) {
                    float cost[4];
                    int beaten[4] = {};
                    UNROLL for (int i = 0; i < 4; ++i) cost[i] = value[j + i] / p.diagonal[j + i], cost[i] *= cost[i];
                    UNROLL for (int i = 0; i < 4; ++i)
                        UNROLL for (int k = i + 1; k < 4; ++k) cost[i] >= cost[k] ? ++beaten[k] : ++beaten[i];
                    UNROLL for (int i = 0; i < 4; ++i) kept[i] = beaten[i] < 2;
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
            UNROLL for (int i = j + 1; i < most; ++i) value[i] -= coupling[j * most + i] * error;
        }
    }
}

#endif  // ANYBIT_GPTQ_UPDATE_CUH
