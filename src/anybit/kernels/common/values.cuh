// Shared by kernels over 16-bit activations: packed-pair arithmetic, CTA-wide reductions, 16-byte loads and stores.
#ifndef ANYBIT_VALUES_CUH
#define ANYBIT_VALUES_CUH

#include "common/ptx/base.cuh"

namespace values {

// ---- 16-bit values ---------------------------------------------------------------------------------------------------

template <bool is_bf16> DEVICE float low_float(uint32_t pair) {
    if constexpr (is_bf16) return __uint_as_float(pair << 16);
    return ptx::cvt_f32_f16(static_cast<uint16_t>(pair & 0xffffu));
}
template <bool is_bf16> DEVICE float high_float(uint32_t pair) {
    if constexpr (is_bf16) return __uint_as_float(pair & 0xffff0000u);
    return ptx::cvt_f32_f16(static_cast<uint16_t>(pair >> 16));
}
template <bool is_bf16> DEVICE uint32_t round_pair(float low, float high) {
    if constexpr (is_bf16) return ptx::cvt_bf16x2_f32(low, high);
    return ptx::cvt_f16x2_f32(low, high);
}
template <bool is_bf16> DEVICE uint32_t add_pair(uint32_t a, uint32_t b) {
    if constexpr (is_bf16) return ptx::add_bf16x2(a, b);
    return ptx::add_f16x2(a, b);
}
// Elementwise over packed pairs; NaN if either input is.
template <bool is_bf16> DEVICE uint32_t max_pair(uint32_t a, uint32_t b) {
    if constexpr (is_bf16) return ptx::max_nan_bf16x2(a, b);
    return ptx::max_nan_f16x2(a, b);
}
template <bool is_bf16> DEVICE uint32_t min_pair(uint32_t a, uint32_t b) {
    if constexpr (is_bf16) return ptx::min_nan_bf16x2(a, b);
    return ptx::min_nan_f16x2(a, b);
}
template <bool is_bf16> DEVICE uint32_t abs_pair(uint32_t a) {
    if constexpr (is_bf16) return ptx::abs_bf16x2(a);
    return ptx::abs_f16x2(a);
}
// Magnitudes of 16-bit floats order like their bits, NaN above infinity: an integer maximum works.
template <bool is_bf16> constexpr uint32_t infinity_bits = is_bf16 ? 0x7f80u : 0x7c00u;
template <bool is_bf16> DEVICE float float_of_bits(uint32_t bits) { return low_float<is_bf16>(bits); }

// The power of two that brings 16-bit floats into the top of fp16's range, by the bits of their largest magnitude, and its
// inverse: 0 and NaN where one is not finite. Values below 2^-29 of the largest lose bits.
template <bool is_bf16> DEVICE float2 to_half(uint32_t largest) {
    constexpr int mantissa = is_bf16 ? 7 : 10, bias = is_bf16 ? 127 : 15;
    const int exponent = max(static_cast<int>(largest >> mantissa) - bias, -100);  // |x| < 2^(exponent + 1)
    if (exponent > bias) return make_float2(0.0f, __uint_as_float(0x7fc00000u));
    return make_float2(__uint_as_float(static_cast<uint32_t>(127 + 14 - exponent) << 23), __uint_as_float(static_cast<uint32_t>(127 - 14 + exponent) << 23));
}
template <bool is_bf16> DEVICE uint32_t half_pair(uint32_t pair, float factor) {
    return ptx::cvt_f16x2_f32(low_float<is_bf16>(pair) * factor, high_float<is_bf16>(pair) * factor);
}
// The larger magnitude of a pair.
DEVICE uint32_t magnitude_of_pair(uint32_t pair) { return max(pair & 0x7fffu, pair >> 16 & 0x7fffu); }
// Two pairs a lane of a warp to fp16. Returns what the results must be multiplied by.
template <bool is_bf16> DEVICE float halve_warp(uint32_t (&pairs)[2]) {
    const float2 factor = to_half<is_bf16>(ptx::redux_max(max(magnitude_of_pair(pairs[0]), magnitude_of_pair(pairs[1]))));
    UNROLL for (int i = 0; i < 2; i++) pairs[i] = half_pair<is_bf16>(pairs[i], factor.x);
    return factor.y;
}

// ---- CTA-wide reductions -----------------------------------------------------------------------------------------------

DEVICE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

struct Larger {
    static DEVICE uint32_t over_warp(uint32_t v) { return ptx::redux_max(v); }
};
struct Sum {
    static DEVICE uint32_t over_warp(uint32_t v) { return ptx::redux_add(v); }
    static DEVICE float over_warp(float v) {
        UNROLL for (int step = 16; step > 0; step /= 2) v += ptx::shfl_xor(v, step);
        return v;
    }
};

// All threads get the result. Reductions that follow one another need different `slot`s of shared memory.
template <class Operation, int warps, int slot, class T> DEVICE T over_block(T v) {
    v = Operation::over_warp(v);
    if constexpr (warps > 1) {
        T* partial = reinterpret_cast<T*>(ptx::dynamic_shared() + slot * 128);
        if (ptx::lane_id() == 0) partial[threadIdx.x / 32] = v;
        __syncthreads();
        v = Operation::over_warp(ptx::lane_id() < warps ? partial[ptx::lane_id()] : T(0));
    }
    return v;
}

// ---- Input ---------------------------------------------------------------------------------------------------------------

// Loads eight values from row + k, zeros past the end. aligned: rows are 16-byte aligned and whole vectors long. Not
// ld.global.nc: with PDL the previous kernel may still be writing them while this one runs.
template <bool aligned> DEVICE uint4 load8(const uint16_t* row, int k, int end) {
    if constexpr (aligned) {
        return k < end ? ptx::ld_global_cg_v4(row + k) : make_uint4(0, 0, 0, 0);
    } else {
        uint32_t word[4];
        UNROLL for (int i = 0; i < 4; ++i) {
            const uint32_t low = k + 2 * i < end ? row[k + 2 * i] : 0;
            const uint32_t high = k + 2 * i + 1 < end ? row[k + 2 * i + 1] : 0;
            word[i] = low | high << 16;
        }
        return make_uint4(word[0], word[1], word[2], word[3]);
    }
}
template <bool aligned> DEVICE void store8(uint16_t* row, int k, int end, uint4 v) {
    if constexpr (aligned) {
        if (k < end) *reinterpret_cast<uint4*>(row + k) = v;
    } else {
        const uint32_t word[4] = {v.x, v.y, v.z, v.w};
        UNROLL for (int i = 0; i < 8; ++i)
            if (k + i < end) row[k + i] = static_cast<uint16_t>(word[i / 2] >> (16 * (i % 2)));
    }
}

// x / (1 + e^-x), accurate to a few millionths, 0 below -88: exact division and exp would cost more than many rows' traffic.
DEVICE float silu(float x) { return x * ptx::rcp_approx(1.f + ptx::ex2_approx(-1.4426950408889634f * x)); }
// silu(gate) * up, rounded to 16 bits after each of the two steps as the model does.
template <bool is_bf16> DEVICE uint32_t silu_mul_pair(uint32_t gate, uint32_t up) {
    const uint32_t s = round_pair<is_bf16>(silu(low_float<is_bf16>(gate)), silu(high_float<is_bf16>(gate)));
    return round_pair<is_bf16>(low_float<is_bf16>(s) * low_float<is_bf16>(up),
                               high_float<is_bf16>(s) * high_float<is_bf16>(up));
}
template <bool is_bf16> DEVICE uint32_t normalize_pair(uint32_t x, uint32_t gamma, float factor) {
    const uint32_t h = round_pair<is_bf16>(low_float<is_bf16>(x) * factor, high_float<is_bf16>(x) * factor);
    return round_pair<is_bf16>(low_float<is_bf16>(h) * low_float<is_bf16>(gamma),
                               high_float<is_bf16>(h) * high_float<is_bf16>(gamma));
}

// A function of two pairs, over vectors of them.
template <class Of> DEVICE uint4 each_pair(uint4 a, uint4 b, Of&& of) { return make_uint4(of(a.x, b.x), of(a.y, b.y), of(a.z, b.z), of(a.w, b.w)); }
template <bool is_bf16> DEVICE void add_squares(float& sum, uint4 v) {
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
    UNROLL for (int i = 0; i < 4; ++i) {
        const float low = low_float<is_bf16>(word[i]), high = high_float<is_bf16>(word[i]);
        sum += low * low + high * high;
    }
}

}  // namespace values

#endif  // ANYBIT_VALUES_CUH
