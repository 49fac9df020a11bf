// Elementwise kernels between a decoder layer's GEMMs, mainly for few tokens, where latency behind the previous GEMM is what
// counts. Weights (gamma) are loaded before griddepcontrol.wait, since loads are not reordered across it.
#ifndef ANYBIT_NORM_ACT_CUH
#define ANYBIT_NORM_ACT_CUH

#include "common/values.cuh"

struct Params {
    const uint16_t* x;         // [M, K], or [M, gate K | up K] for silu_mul, row stride x_stride
    const uint16_t* residual;  // add_rms_norm: added to x first; or null
    uint16_t* residual_sum;    // output x + residual, [M, K]
    const uint16_t* gamma;     // [K]
    uint16_t* y;               // [M, K]
    int64_t x_stride, residual_stride;
    int32_t k;
    float epsilon;
};

// y = RMSNorm(x + residual), one CTA per row. Config: threads, vectors (8 values each), is_bf16, aligned, shared_bytes.
template <class Config> __global__ void __launch_bounds__(Config::threads) add_rms_norm(const __grid_constant__ Params p) {
    using namespace values;
    constexpr int threads = Config::threads, vectors = Config::vectors;
    constexpr bool bf16 = Config::is_bf16, aligned = Config::aligned;
    static_assert(threads % 32 == 0 && threads <= 1024, "whole warps reduce");
    const int row = blockIdx.x;
    const uint32_t thread = threadIdx.x;

    ptx::griddepcontrol_launch_dependents();
    uint4 gamma[vectors];
    UNROLL for (int v = 0; v < vectors; ++v) gamma[v] = load8<aligned>(p.gamma, 8 * (v * threads + thread), p.k);
    ptx::griddepcontrol_wait();

    uint4 value[vectors], other[vectors];
    UNROLL for (int v = 0; v < vectors; ++v) {
        const int k = static_cast<int>(8 * (v * threads + thread));
        value[v] = load8<aligned>(p.x + row * p.x_stride, k, p.k);
        if (p.residual) other[v] = load8<aligned>(p.residual + row * p.residual_stride, k, p.k);
    }
    float squares = 0.f;
    UNROLL for (int v = 0; v < vectors; ++v) {
        if (p.residual) value[v] = each_pair(value[v], other[v], add_pair<bf16>);
        add_squares<bf16>(squares, value[v]);
    }
    const float factor = rsqrtf(over_block<Sum, threads / 32, 0>(squares) / static_cast<float>(p.k) + p.epsilon);
    UNROLL for (int v = 0; v < vectors; ++v) {
        const int k = static_cast<int>(8 * (v * threads + thread));
        const uint4 y = each_pair(value[v], gamma[v], [&](uint32_t x, uint32_t gain) { return normalize_pair<bf16>(x, gain, factor); });
        store8<aligned>(p.y + static_cast<int64_t>(row) * p.k, k, p.k, y);
        if (p.residual) store8<aligned>(p.residual_sum + static_cast<int64_t>(row) * p.k, k, p.k, value[v]);
    }
}

// y = silu(gate) * up (paired: x alternates eights of both). Grid: (rows, parts), so that a wide row uses several SMs.
template <class Config> __global__ void __launch_bounds__(Config::threads) silu_mul(const __grid_constant__ Params p) {
    using namespace values;
    constexpr bool bf16 = Config::is_bf16, aligned = Config::aligned;
    const int row = blockIdx.x, k = static_cast<int>(8 * (blockIdx.y * Config::threads + threadIdx.x));

    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    if (k >= p.k) return;

    const uint16_t* x = p.x + row * p.x_stride;
    const int at = Config::paired ? 2 * k : k;
    const uint4 gate = load8<aligned>(x, at, at + p.k - k), up = load8<aligned>(x + (Config::paired ? 8 : p.k), at, at + p.k - k);
    const uint4 y = make_uint4(silu_mul_pair<bf16>(gate.x, up.x), silu_mul_pair<bf16>(gate.y, up.y),
                               silu_mul_pair<bf16>(gate.z, up.z), silu_mul_pair<bf16>(gate.w, up.w));
    store8<aligned>(p.y + static_cast<int64_t>(row) * p.k, k, p.k, y);
}

#endif  // ANYBIT_NORM_ACT_CUH
