// Multiplies vectors by an orthogonal Hadamard matrix A (x) S, as anybit.codes.hadamard.transform: S (order 2^k) by butterflies,
// A by its signs. One CTA per vector, which stays in shared memory as float32 throughout.
#ifndef ANYBIT_HADAMARD_CUH
#define ANYBIT_HADAMARD_CUH

#include "common/ptx/base.cuh"
#include "block/rotation.cuh"

struct Params {
    const uint16_t* x;      // [rows, k], row stride x_stride
    const uint32_t* signs;  // of A, in rotation.cuh's format; null for order 1
    uint16_t* y;            // [rows, k], contiguous
    int64_t x_stride;
    float factor;           // 1 / sqrt(k)
};

// Config: threads, order (of A), power (of S), is_bf16; k = order * power.
template <class Config> __global__ void __launch_bounds__(Config::threads) transform(const __grid_constant__ Params p) {
    constexpr int threads = Config::threads, order = Config::order, power = Config::power, k = order * power;
    static_assert(Config::shared_bytes == 4 * (rotation::room(k) + rotation::signs_room(order)), "the vector and the signs");
    float* value = reinterpret_cast<float*>(ptx::dynamic_shared());
    float* signs = value + rotation::room(k);
    rotation::spread_signs<threads, order>(signs, p.signs);
    const uint16_t* x = p.x + blockIdx.x * p.x_stride;
    uint16_t* y = p.y + static_cast<int64_t>(blockIdx.x) * k;

    for (int i = threadIdx.x; i < k; i += threads)
        value[rotation::place(i)] = Config::is_bf16 ? ptx::cvt_f32_bf16(x[i]) : ptx::cvt_f32_f16(x[i]);
    __syncthreads();
    rotation::sylvester<threads, power, k, 1>(value);
    rotation::paley<threads, order, power>(value, signs);
    for (int i = threadIdx.x; i < k; i += threads) {
        const float turned = value[rotation::place(i)] * p.factor;
        y[i] = Config::is_bf16 ? ptx::cvt_bf16_f32(turned) : ptx::cvt_f16_f32(turned);
    }
}

#endif  // ANYBIT_HADAMARD_CUH
