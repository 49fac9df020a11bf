// wgmma: Hopper's asynchronous warpgroup MMA, d = a * b (+ d). See base.cuh for the conventions.
//
// All 128 threads of a warpgroup call wgmma_fence (after any register of d or a was written), some wgmmas,
// wgmma_commit_group and later wgmma_wait_group<n>; until then they touch neither d nor a, nor the shared operands.
// d is 64 x N: register 4j + 2h + e is row 16 * warp + lane / 4 + 8h, column 8j + 2 * (lane % 4) + e.
// a is 64 rows of shared memory (a descriptor) or four registers laid out as for mma.sync, warp w holding rows 16w to
// 16w + 15; b is N rows of shared memory, k contiguous. One instruction covers 32 bytes of k: 256 b1, 32 8-bit, 16 16-bit.
#ifndef ANYBIT_PTX_WGMMA_CUH
#define ANYBIT_PTX_WGMMA_CUH

#include "common/ptx/base.cuh"

namespace ptx {

// Shared-memory layout of an operand tile: where 16-byte chunk c of row r lies (from 0; tiles 1024-byte aligned).
// Swizzled: row * bytes + ((c ^ x) * 16), bytes = 128, 64, 32 and x = r & 7, (r >> 1) & 3, (r >> 2) & 1; a row is one
// chunk of k and instruction i of it adds 32 * i bytes to the address.
enum class Swizzle { none = 0, bytes_128 = 1, bytes_64 = 2, bytes_32 = 3 };

// Descriptor of a k-contiguous operand. stride: bytes between 8-row groups, 8 * row bytes if swizzled. Without swizzle an
// 8-row group of 16-byte chunks is 128 contiguous bytes, and leading: bytes between chunks c and c + 1.
DEVICE constexpr uint64_t wgmma_descriptor(uint32_t shared, Swizzle swizzle, uint32_t stride, uint32_t leading = 16) {
    return static_cast<uint64_t>((shared & 0x3ffffu) >> 4) | static_cast<uint64_t>((leading & 0x3ffffu) >> 4) << 16 |
           static_cast<uint64_t>((stride & 0x3ffffu) >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}
// Advances a descriptor by `bytes`, a multiple of 16.
DEVICE constexpr uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

template <int arch = ANYBIT_WGMMA_ARCH> DEVICE void wgmma_fence() {
    NEEDS(900, "wgmma needs sm_90a");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
template <int arch = ANYBIT_WGMMA_ARCH> DEVICE void wgmma_commit_group() {
    NEEDS(900, "wgmma needs sm_90a");
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int groups, int arch = ANYBIT_WGMMA_ARCH> DEVICE void wgmma_wait_group() {
    NEEDS(900, "wgmma needs sm_90a");
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(groups) : "memory");
}
// Keeps the compiler from moving reads of the accumulators above a wait, or writes below a fence. No instruction.
template <int count> DEVICE void wgmma_touch(float (&d)[count]) {
    UNROLL for (int i = 0; i < count; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}
template <int count, class Int> DEVICE void wgmma_touch(Int (&d)[count]) {
    UNROLL for (int i = 0; i < count; i++) asm volatile("" : "+r"(d[i]) :: "memory");
}

// ---- Instructions ---------------------------------------------------------------------------------------------------
// Accumulators are %0 to %(N / 2 - 1); the operands behind them are numbered from there, so each N states its own.

#define ANYBIT_4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define ANYBIT_8(c, i) ANYBIT_4(c, i), ANYBIT_4(c, i + 4)
#define ANYBIT_16(c, i) ANYBIT_8(c, i), ANYBIT_8(c, i + 8)
#define ANYBIT_REGS_8 "%0,%1,%2,%3"
#define ANYBIT_OUTS_8(c) ANYBIT_4(c, 0)
#define ANYBIT_REGS_16 ANYBIT_REGS_8 ",%4,%5,%6,%7"
#define ANYBIT_OUTS_16(c) ANYBIT_OUTS_8(c), ANYBIT_4(c, 4)
#define ANYBIT_REGS_24 ANYBIT_REGS_16 ",%8,%9,%10,%11"
#define ANYBIT_OUTS_24(c) ANYBIT_OUTS_16(c), ANYBIT_4(c, 8)
#define ANYBIT_REGS_32 ANYBIT_REGS_24 ",%12,%13,%14,%15"
#define ANYBIT_OUTS_32(c) ANYBIT_OUTS_24(c), ANYBIT_4(c, 12)
#define ANYBIT_REGS_48 ANYBIT_REGS_32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define ANYBIT_OUTS_48(c) ANYBIT_OUTS_32(c), ANYBIT_8(c, 16)
#define ANYBIT_REGS_64 ANYBIT_REGS_48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define ANYBIT_OUTS_64(c) ANYBIT_OUTS_48(c), ANYBIT_8(c, 24)
#define ANYBIT_REGS_80 ANYBIT_REGS_64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define ANYBIT_OUTS_80(c) ANYBIT_OUTS_64(c), ANYBIT_8(c, 32)
#define ANYBIT_REGS_96 ANYBIT_REGS_80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define ANYBIT_OUTS_96(c) ANYBIT_OUTS_80(c), ANYBIT_8(c, 40)
#define ANYBIT_REGS_112 ANYBIT_REGS_96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define ANYBIT_OUTS_112(c) ANYBIT_OUTS_96(c), ANYBIT_8(c, 48)
#define ANYBIT_REGS_128 ANYBIT_REGS_112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define ANYBIT_OUTS_128(c) ANYBIT_OUTS_112(c), ANYBIT_8(c, 56)
#define ANYBIT_REGS_144 ANYBIT_REGS_128 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define ANYBIT_OUTS_144(c) ANYBIT_OUTS_128(c), ANYBIT_8(c, 64)
#define ANYBIT_REGS_160 ANYBIT_REGS_144 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define ANYBIT_OUTS_160(c) ANYBIT_OUTS_144(c), ANYBIT_8(c, 72)
#define ANYBIT_REGS_192 ANYBIT_REGS_160 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define ANYBIT_OUTS_192(c) ANYBIT_OUTS_160(c), ANYBIT_16(c, 80)
#define ANYBIT_REGS_224 ANYBIT_REGS_192 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define ANYBIT_OUTS_224(c) ANYBIT_OUTS_192(c), ANYBIT_16(c, 96)
#define ANYBIT_REGS_256 ANYBIT_REGS_224 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define ANYBIT_OUTS_256(c) ANYBIT_OUTS_224(c), ANYBIT_16(c, 112)

// X(N, the numbers of the operands behind N / 2 registers of d, ...) for every N.
#define ANYBIT_WIDTHS(X, ...) \
    X(8, 4, 5, 6, 7, 8, 9, 10, 11, __VA_ARGS__) \
    X(16, 8, 9, 10, 11, 12, 13, 14, 15, __VA_ARGS__) \
    X(24, 12, 13, 14, 15, 16, 17, 18, 19, __VA_ARGS__) \
    X(32, 16, 17, 18, 19, 20, 21, 22, 23, __VA_ARGS__) \
    X(48, 24, 25, 26, 27, 28, 29, 30, 31, __VA_ARGS__) \
    X(64, 32, 33, 34, 35, 36, 37, 38, 39, __VA_ARGS__) \
    X(80, 40, 41, 42, 43, 44, 45, 46, 47, __VA_ARGS__) \
    X(96, 48, 49, 50, 51, 52, 53, 54, 55, __VA_ARGS__) \
    X(112, 56, 57, 58, 59, 60, 61, 62, 63, __VA_ARGS__) \
    X(128, 64, 65, 66, 67, 68, 69, 70, 71, __VA_ARGS__) \
    X(144, 72, 73, 74, 75, 76, 77, 78, 79, __VA_ARGS__) \
    X(160, 80, 81, 82, 83, 84, 85, 86, 87, __VA_ARGS__) \
    X(192, 96, 97, 98, 99, 100, 101, 102, 103, __VA_ARGS__) \
    X(224, 112, 113, 114, 115, 116, 117, 118, 119, __VA_ARGS__) \
    X(256, 128, 129, 130, 131, 132, 133, 134, 135, __VA_ARGS__)

// One struct per type, specialized by N. HEAD: the instruction up to ".n"; TYPES: after it. The flag `accumulate` is an
// operand (scale-d): 0 overwrites d. EXTRA is what follows the flag: signs, and for 16-bit b its major-ness.
#define ANYBIT_WGMMA(N, i0, i1, i2, i3, i4, i5, i6, i7, KIND, K, TYPES, REG, C, EXTRA_SS, EXTRA_RS)                  \
    template <> struct KIND<N> {                                                                                     \
        static DEVICE void ss(REG (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {                             \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k" #K    \
                         TYPES " {" ANYBIT_REGS_##N "}, %" #i0 ", %" #i1 ", p" EXTRA_SS ";}"                         \
                         : ANYBIT_OUTS_##N(C) : "l"(a), "l"(b), "r"(accumulate));                                    \
        }                                                                                                            \
        static DEVICE void rs(REG (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {                 \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #i5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k" #K    \
                         TYPES " {" ANYBIT_REGS_##N "}, {%" #i0 ",%" #i1 ",%" #i2 ",%" #i3 "}, %" #i4 ", p" EXTRA_RS ";}" \
                         : ANYBIT_OUTS_##N(C) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
        }                                                                                                            \
    };
#define ANYBIT_WGMMA_ALL(KIND, ...)                                                                                  \
    template <int N> struct KIND;                                                                                    \
    ANYBIT_WIDTHS(ANYBIT_WGMMA, KIND, __VA_ARGS__)

namespace detail {
ANYBIT_WGMMA_ALL(WgmmaB1, 256, ".s32.b1.b1.and.popc", int32_t, "+r", "", "")
ANYBIT_WGMMA_ALL(WgmmaS8, 32, ".s32.s8.s8", int32_t, "+r", "", "")
ANYBIT_WGMMA_ALL(WgmmaU8S8, 32, ".s32.u8.s8", int32_t, "+r", "", "")
ANYBIT_WGMMA_ALL(WgmmaE4m3, 32, ".f32.e4m3.e4m3", float, "+f", ", 1, 1", ", 1, 1")
ANYBIT_WGMMA_ALL(WgmmaF16, 16, ".f32.f16.f16", float, "+f", ", 1, 1, 0, 0", ", 1, 1, 0")
ANYBIT_WGMMA_ALL(WgmmaBf16, 16, ".f32.bf16.bf16", float, "+f", ", 1, 1, 0, 0", ", 1, 1, 0")
}  // namespace detail

// wgmma_TYPES<N>(d, a, b, accumulate): a is a descriptor or four registers, b a descriptor.
#define ANYBIT_WGMMA_NAME(name, KIND, REG)                                                                           \
    template <int N, int arch = ANYBIT_WGMMA_ARCH>                                                                   \
    DEVICE void name(REG (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {                                     \
        NEEDS(900, "wgmma needs sm_90a");                                                                      \
        detail::KIND<N>::ss(d, a, b, accumulate);                                                                    \
    }                                                                                                                \
    template <int N, int arch = ANYBIT_WGMMA_ARCH>                                                                   \
    DEVICE void name(REG (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {                         \
        NEEDS(900, "wgmma needs sm_90a");                                                                      \
        detail::KIND<N>::rs(d, a, b, accumulate);                                                                    \
    }
ANYBIT_WGMMA_NAME(wgmma_b1, WgmmaB1, int32_t)      // popc(a & b)
ANYBIT_WGMMA_NAME(wgmma_s8, WgmmaS8, int32_t)
ANYBIT_WGMMA_NAME(wgmma_u8s8, WgmmaU8S8, int32_t)
ANYBIT_WGMMA_NAME(wgmma_e4m3, WgmmaE4m3, float)    // accumulates with about 14 bits: promote often
ANYBIT_WGMMA_NAME(wgmma_f16, WgmmaF16, float)
ANYBIT_WGMMA_NAME(wgmma_bf16, WgmmaBf16, float)

#undef ANYBIT_WGMMA_NAME
#undef ANYBIT_WGMMA_ALL
#undef ANYBIT_WGMMA

}  // namespace ptx

#endif  // ANYBIT_PTX_WGMMA_CUH
