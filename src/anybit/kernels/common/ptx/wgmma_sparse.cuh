// wgmma.sp: d = a * b (+ d) with 2:4 sparse a (two of every four values of a row kept). See wgmma.cuh for the rest.
//
// a is four registers, laid out as in wgmma.cuh but for kept values alone; `metadata` is one register per lane. Neither may
// be touched until the wgmma has been waited for. One instruction covers 64 bytes of k of b: 32 16-bit or 64 8-bit.
// 16-bit types: lanes 2s and 2s + 1 of each quad (s the selector) hold the two halves of k, row g in the low half of a word
// and row g + 8 in the high half. 8-bit types: lanes 0 and 2 hold the halves of k of row g, lanes 1 and 3 those of row g + 8.
// A nibble of metadata describes a group of four: index of its first kept value, then of its second, ascending.
#ifndef ANYBIT_PTX_WGMMA_SPARSE_CUH
#define ANYBIT_PTX_WGMMA_SPARSE_CUH

#include "common/ptx/wgmma.cuh"

namespace ptx {

#define ANYBIT_WGMMA_SP(N, i0, i1, i2, i3, i4, i5, i6, i7, KIND, K, TYPES, REG, C, EXTRA)                            \
    template <> struct KIND<N> {                                                                                     \
        template <int selector>                                                                                      \
        static DEVICE void rs(REG (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, uint32_t metadata, int accumulate) { \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i6 ", 0; wgmma.mma_async.sp.sync.aligned.m64n" #N "k" #K \
                         TYPES " {" ANYBIT_REGS_##N "}, {%" #i0 ",%" #i1 ",%" #i2 ",%" #i3 "}, %" #i4 ", %" #i5      \
                         ", %" #i7 ", p" EXTRA ";}"                                                                  \
                         : ANYBIT_OUTS_##N(C) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(metadata),   \
                           "r"(accumulate), "n"(selector));                                                          \
        }                                                                                                            \
    };
#define ANYBIT_WGMMA_SP_ALL(KIND, ...)                                                                               \
    template <int N> struct KIND;                                                                                    \
    ANYBIT_WIDTHS(ANYBIT_WGMMA_SP, KIND, __VA_ARGS__)

namespace detail {
ANYBIT_WGMMA_SP_ALL(WgmmaSpS8, 64, ".s32.s8.s8", int32_t, "+r", "")
ANYBIT_WGMMA_SP_ALL(WgmmaSpF16, 32, ".f32.f16.f16", float, "+f", ", 1, 1, 0")
ANYBIT_WGMMA_SP_ALL(WgmmaSpBf16, 32, ".f32.bf16.bf16", float, "+f", ", 1, 1, 0")
}  // namespace detail

#define ANYBIT_WGMMA_SP_NAME(name, KIND, REG)                                                                        \
    template <int N, int selector = 0, int arch = ANYBIT_WGMMA_ARCH>                                                 \
    DEVICE void name(REG (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, uint32_t metadata, bool accumulate = true) { \
        NEEDS(900, "wgmma needs sm_90a");                                                                            \
        detail::KIND<N>::template rs<selector>(d, a, b, metadata, accumulate);                                       \
    }
ANYBIT_WGMMA_SP_NAME(wgmma_sp_s8, WgmmaSpS8, int32_t)
ANYBIT_WGMMA_SP_NAME(wgmma_sp_f16, WgmmaSpF16, float)
ANYBIT_WGMMA_SP_NAME(wgmma_sp_bf16, WgmmaSpBf16, float)

#undef ANYBIT_WGMMA_SP_NAME
#undef ANYBIT_WGMMA_SP_ALL
#undef ANYBIT_WGMMA_SP

}  // namespace ptx

#endif  // ANYBIT_PTX_WGMMA_SPARSE_CUH
