// Multiplies a vector in shared memory by a Hadamard matrix A (x) S: S (order 2^k) by butterflies, A by its signs.
// The order of additions is the same for any number of threads and passes, and so are the bits.
#ifndef ANYBIT_ROTATION_CUH
#define ANYBIT_ROTATION_CUH

#include "common/ptx/base.cuh"

namespace rotation {

// Padded offset of value i: a pass reads eight values at a stride of eight, so runs of 64 start in different banks.
DEVICE constexpr int place(int i) { return i + i / 64 * 8; }
// Floats of shared memory for k values.
constexpr int room(int k) { return k + k / 64 * 8; }

// radix-point butterfly on registers: log2(radix) steps of S on values that lie `step` apart.
template <int radix> DEVICE void butterflies(float (&v)[radix]) {
    UNROLL for (int half = 1; half < radix; half *= 2) {
        UNROLL for (int j = 0; j < radix; ++j) {
            if (j & half) continue;
            const float low = v[j], high = v[j + half];
            v[j] = low + high;
            v[j + half] = low - high;
        }
    }
}

template <int radix, int step, int threads, int k> DEVICE void pass(float* value) {
    for (int item = static_cast<int>(threadIdx.x); item < k / radix; item += threads) {
        const int first = item / step * (step * radix) + item % step;
        float v[radix];
        UNROLL for (int j = 0; j < radix; ++j) v[j] = value[place(first + j * step)];
        butterflies(v);
        UNROLL for (int j = 0; j < radix; ++j) value[place(first + j * step)] = v[j];
    }
    __syncthreads();
}

// The steps of S from `step` on, for every run of `power` values. The caller has synchronized; ends with __syncthreads.
template <int threads, int power, int k, int step> DEVICE void sylvester(float* value) {
    if constexpr (8 * step <= power) {
        pass<8, step, threads, k>(value);
        sylvester<threads, power, k, 8 * step>(value);
    } else if constexpr (4 * step <= power) {
        pass<4, step, threads, k>(value);
    } else if constexpr (2 * step <= power) {
        pass<2, step, threads, k>(value);
    }
}

// Parts that the rows of A are divided into, at most 16 rows each: a thread accumulates one part in registers.
constexpr int parts_of(int order) {
    int parts = 1;
    while (order % parts != 0 || order / parts > 16) ++parts;
    return parts;
}

// Floats of shared memory for the signs of A.
constexpr int signs_room(int order) {
    return order == 1 ? 0 : order * parts_of(order) * ((order / parts_of(order) + 3) / 4 * 4);
}

// Expands the signs of A to +-1.0f in shared memory, transposed: [order, parts, rows of a part, rounded up to four].
// bits: [order, parts], bit r of (b, part) is set where A[part * rows + r, b] is -1. The caller synchronizes.
template <int threads, int order> DEVICE void spread_signs(float* signs, const uint32_t* bits) {
    if constexpr (order > 1) {
        constexpr int parts = parts_of(order), rows = order / parts, padded = (rows + 3) / 4 * 4;
        for (int item = static_cast<int>(threadIdx.x); item < order * parts; item += threads) {
            const uint32_t word = bits[item];
            uint4* to = reinterpret_cast<uint4*>(signs + item * padded);
            UNROLL for (int r = 0; r < padded; r += 4)  // 1.0f with the sign bit
                to[r / 4] = make_uint4(0x3f800000u | word >> r << 31, 0x3f800000u | word >> (r + 1) << 31,
                                       0x3f800000u | word >> (r + 2) << 31, 0x3f800000u | word >> (r + 3) << 31);
        }
    }
}

// Multiplies by A in place; `signs` as expanded. The caller has synchronized; ends with __syncthreads.
template <int threads, int order, int power> DEVICE void paley(float* value, const float* signs) {
    if constexpr (order > 1) {
        constexpr int parts = parts_of(order), rows = order / parts, padded = (rows + 3) / 4 * 4;
        static_assert(parts <= threads, "every part of a column has a thread");
        constexpr int abreast = threads / parts < power ? threads / parts : power;
        const int part = static_cast<int>(threadIdx.x) / abreast;
        for (int first = 0; first < power; first += abreast) {
            const int column = first + static_cast<int>(threadIdx.x) % abreast;
            const bool works = part < parts && column < power;
            float sum[padded];
            UNROLL for (int r = 0; r < padded; ++r) sum[r] = 0.0f;
            if (works) {
                const float* sign = signs + part * padded;
#pragma unroll 4
                for (int b = 0; b < order; ++b) {
                    const float v = value[place(b * power + column)];
                    UNROLL for (int r = 0; r < padded; r += 4) {
                        const uint4 four = *reinterpret_cast<const uint4*>(sign + b * parts * padded + r);
                        // Exact products with +-1: each FMA is an addition or a subtraction.
                        sum[r] = __fmaf_rn(v, __uint_as_float(four.x), sum[r]);
                        sum[r + 1] = __fmaf_rn(v, __uint_as_float(four.y), sum[r + 1]);
                        sum[r + 2] = __fmaf_rn(v, __uint_as_float(four.z), sum[r + 2]);
                        sum[r + 3] = __fmaf_rn(v, __uint_as_float(four.w), sum[r + 3]);
                    }
                }
            }
            __syncthreads();
            if (works) {
                UNROLL for (int r = 0; r < rows; ++r) value[place((part * rows + r) * power + column)] = sum[r];
            }
        }
        __syncthreads();
    }
}

}  // namespace rotation

#endif  // ANYBIT_ROTATION_CUH
