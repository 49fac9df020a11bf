// The end of kernels for few tokens whose warps, and the CTAs of a cluster, split K: sums meet four rows of a token at a time,
// in a fixed order. Each CTA finishes S::share tokens; the others send it theirs through DSMEM.
#ifndef ANYBIT_PACKED_SUMS_CUH
#define ANYBIT_PACKED_SUMS_CUH

#include "common/types.cuh"
#include "common/values.cuh"
#include "packed/packed_params.cuh"

namespace packed {

DEVICE void add_quad(float (&sum)[4], uint32_t shared) {
    const uint4 v = ptx::ld_shared_v4(shared);
    sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y), sum[2] += __uint_as_float(v.z), sum[3] += __uint_as_float(v.w);
}
DEVICE uint4 bits_of(const float (&sum)[4]) {
    return {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])};
}

// Adds four rows of a token over the K warps: [k_warp][token][row] in shared memory, S::sum_pitch floats a token.
template <class C, class S> DEVICE void add_k_warps(float (&sum)[4], uint32_t shared, int token, int quad) {
    UNROLL for (int k = 0; k < S::k_warps; k++) add_quad(sum, shared + ((k * C::tile_m + token) * S::sum_pitch + quad * 4) * 4);
}

// Multiplies by the factors of rows (row_factors) at S::factors.
template <class S> DEVICE void scale_quad(float (&v)[4], const float (&sum)[4], uint32_t shared, int quad) {
    const uint32_t factor = shared + S::factors + quad * 32;
    const uint4 f0 = ptx::ld_shared_v4(factor), f1 = ptx::ld_shared_v4(factor + 16);
    v[0] = fmaf(sum[0], __uint_as_float(f0.x), __uint_as_float(f0.y)), v[1] = fmaf(sum[1], __uint_as_float(f0.z), __uint_as_float(f0.w));
    v[2] = fmaf(sum[2], __uint_as_float(f1.x), __uint_as_float(f1.y)), v[3] = fmaf(sum[3], __uint_as_float(f1.z), __uint_as_float(f1.w));
}

// Reduces and stores `quads` fours of rows from unit `first` on, whose warps' sums are in shared memory. items: S::share * quads,
// which computed here costs registers.
template <class C, class S> DEVICE void finish_tokens(const Params& p, uint32_t shared, int first, int quads, int items) {
    const int rank = C::cluster_k > 1 ? static_cast<int>(blockIdx.x % C::cluster_k) : 0;
    constexpr bool bf16 = C::operand == Operand::bf16;
    const uint32_t sum_barrier = shared + S::sum_barrier;
    if constexpr (C::cluster_k > 1) {
        ptx::barrier_cluster_wait();  // the other CTAs run and their mbarriers are initialized
        UNROLL for (int step = 1; step < C::cluster_k; step++) {
            const int other = (rank + step) % C::cluster_k, place = (rank > other ? rank - 1 : rank) * items;  // in its receive buffer
            const uint32_t there = ptx::mapa(shared + S::received, other), barrier = ptx::mapa(sum_barrier, other);
            for (int i = static_cast<int>(threadIdx.x); i < items; i += C::threads) {
                float sum[4] = {};
                add_k_warps<C, S>(sum, shared, other * S::share + i / quads, i % quads);
                ptx::st_async_v4(there + (place + i) * 16, bits_of(sum), barrier);
            }
        }
    }
    for (int i = static_cast<int>(threadIdx.x); i < items; i += C::threads) {
        const int token = rank * S::share + i / quads, quad = i % quads, n = first * 16 + quad * 4;
        float sum[4] = {};
        add_k_warps<C, S>(sum, shared, token, quad);
        if constexpr (C::cluster_k > 1) {
            ptx::mbarrier_wait_parity_acquire_cluster(sum_barrier, 0);
            UNROLL for (int other = 0; other < C::cluster_k - 1; other++) add_quad(sum, shared + S::received + (other * items + i) * 16);
        }
        if (token >= p.m) continue;
        float v[4];
        scale_quad<S>(v, sum, shared, quad);
        uint16_t* y = p.y + static_cast<size_t>(token) * p.n + n;
        if constexpr (C::wide_store) {
            if (n < p.n) *reinterpret_cast<uint2*>(y) = {values::round_pair<bf16>(v[0], v[1]), values::round_pair<bf16>(v[2], v[3])};
        } else {
            UNROLL for (int e = 0; e < 4; e++)
                if (n + e < p.n) y[e] = bf16 ? ptx::cvt_bf16_f32(v[e]) : ptx::cvt_f16_f32(v[e]);
        }
    }
}

}  // namespace packed

#endif  // ANYBIT_PACKED_SUMS_CUH
