// Vectors times an orthogonal Hadamard matrix A (x) S, as anybit.hadamard.transform: S of order 2^k by additions alone, A
// by its signs. One block a vector, which lies in shared memory as float32 from the first step to the last.
#ifndef ANYBIT_HADAMARD_CUH
#define ANYBIT_HADAMARD_CUH

#include "ptx.cuh"

struct Params {
    const uint16_t* x;      // [rows, k], rows x_stride apart
    const uint32_t* signs;  // [order, words]: bit b of row a is set where A[a, b] is -1; null for order 1
    uint16_t* y;            // [rows, k], dense
    int64_t x_stride;
    float factor;           // 1 / sqrt(k)
};

// Config: threads, order (of A), power (of S), is_bf16; k = order * power.
template <class Config> __global__ void __launch_bounds__(Config::threads) transform(const __grid_constant__ Params p) {
    constexpr int threads = Config::threads, order = Config::order, power = Config::power, k = order * power;
    constexpr int words = (order + 31) / 32;
    static_assert(Config::shared_bytes == 4 * k, "the vector");
    float* value = reinterpret_cast<float*>(ptx::dynamic_shared());
    const uint16_t* x = p.x + blockIdx.x * p.x_stride;
    uint16_t* y = p.y + static_cast<int64_t>(blockIdx.x) * k;

    for (int i = threadIdx.x; i < k; i += threads) value[i] = Config::is_bf16 ? ptx::cvt_f32_bf16(x[i]) : ptx::cvt_f32_f16(x[i]);
    __syncthreads();
    for (int step = 1; step < power; step *= 2) {
        for (int pair = threadIdx.x; pair < k / 2; pair += threads) {
            const int i = pair / step * 2 * step + pair % step;
            const float low = value[i], high = value[i + step];
            value[i] = low + high;
            value[i + step] = low - high;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < k; i += threads) {
        float sum = value[i];
        if constexpr (order > 1) {
            const uint32_t* signs = p.signs + i / power * words;
            sum = 0.0f;
            for (int word = 0; word < words; ++word) {
                const uint32_t bits = signs[word];
                const int count = order - 32 * word < 32 ? order - 32 * word : 32;
                for (int b = 0; b < count; ++b) {
                    const float v = value[(32 * word + b) * power + i % power];
                    sum += bits >> b & 1 ? -v : v;
                }
            }
        }
        sum *= p.factor;
        y[i] = Config::is_bf16 ? ptx::cvt_bf16_f32(sum) : ptx::cvt_f16_f32(sum);
    }
}

#endif  // ANYBIT_HADAMARD_CUH
