// Arithmetic PTX, included by base.cuh: bits, 16-bit and 8-bit floats, and mma.sync.
#ifndef ANYBIT_PTX_MATH_CUH
#define ANYBIT_PTX_MATH_CUH

namespace ptx {

// ---- Bits -----------------------------------------------------------------------------------------------------------

// Any bitwise function of three inputs: table = f(0xf0, 0xcc, 0xaa), e.g. (0xf0 & 0xcc) | 0xaa for (a & b) | c.
template <int table> DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d; asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(table)); return d;
}
// Picks four of the eight bytes of (b, a): nibble i of the selector is the source of byte i of the result.
DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t d; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector)); return d;
}

// ---- 32-bit floats, never contracted into an FMA: for bitwise agreement with torch ----------------------------------

DEVICE float mul_rn_f32(float a, float b) { float d; asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d; }
DEVICE float add_rn_f32(float a, float b) { float d; asm("add.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d; }
// Rounds down.
DEVICE float add_rm_f32(float a, float b) { float d; asm("add.rm.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d; }

// ---- 16-bit floats, two per word ------------------------------------------------------------------------------------

#define ANYBIT_PAIRS(name, instruction)                                                                              \
    DEVICE uint32_t name(uint32_t a, uint32_t b) {                                                                   \
        uint32_t d; asm(instruction " %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b)); return d;                            \
    }
ANYBIT_PAIRS(add_f16x2, "add.rn.f16x2")
ANYBIT_PAIRS(sub_f16x2, "sub.rn.f16x2")
ANYBIT_PAIRS(mul_f16x2, "mul.rn.f16x2")
ANYBIT_PAIRS(max_f16x2, "max.f16x2")
// NaN where either is.
ANYBIT_PAIRS(max_nan_f16x2, "max.NaN.f16x2")
ANYBIT_PAIRS(min_nan_f16x2, "min.NaN.f16x2")
ANYBIT_PAIRS(max_nan_bf16x2, "max.NaN.bf16x2")
ANYBIT_PAIRS(min_nan_bf16x2, "min.NaN.bf16x2")
#undef ANYBIT_PAIRS
DEVICE uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d;
}
DEVICE uint32_t abs_f16x2(uint32_t a) { uint32_t d; asm("abs.f16x2 %0, %1;" : "=r"(d) : "r"(a)); return d; }
DEVICE uint32_t abs_bf16x2(uint32_t a) { uint32_t d; asm("abs.bf16x2 %0, %1;" : "=r"(d) : "r"(a)); return d; }
DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c)); return d;
}
// sm_80 has bf16 FMA but no add or mul: x * 1 + y and x * y + (-0) round once, with the same result.
DEVICE uint32_t add_bf16x2(uint32_t a, uint32_t b) { return fma_bf16x2(a, 0x3f803f80u, b); }
DEVICE uint32_t sub_bf16x2(uint32_t a, uint32_t b) { return fma_bf16x2(b, 0xbf80bf80u, a); }
DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) { return fma_bf16x2(a, b, 0x80008000u); }

DEVICE uint32_t cvt_f16x2_f32(float low, float high) {
    uint32_t d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low)); return d;
}
DEVICE uint32_t cvt_bf16x2_f32(float low, float high) {
    uint32_t d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low)); return d;
}
DEVICE uint16_t cvt_f16_f32(float v) { uint16_t d; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(v)); return d; }
DEVICE uint16_t cvt_bf16_f32(float v) { uint16_t d; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(v)); return d; }
DEVICE float cvt_f32_f16(uint16_t v) { float d; asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(v)); return d; }
DEVICE float cvt_f32_bf16(uint16_t v) { return __uint_as_float(static_cast<uint32_t>(v) << 16); }

// ---- fp8 (e4m3, saturating), two per half word ----------------------------------------------------------------------

CHECKED uint16_t cvt_e4m3x2_f32(float low, float high) {
    NEEDS(890, "fp8 conversions need sm_89 or later");
    uint16_t d; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low)); return d;
}
CHECKED uint16_t cvt_e4m3x2_f16x2(uint32_t v) {
    NEEDS(890, "fp8 conversions need sm_89 or later");
    uint16_t d; asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(d) : "r"(v)); return d;
}
CHECKED uint32_t cvt_f16x2_e4m3x2(uint16_t v) {
    NEEDS(890, "fp8 conversions need sm_89 or later");
    uint32_t d; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(v)); return d;
}

// ---- Approximate functions, subnormals flushed ----------------------------------------------------------------------

DEVICE float ex2_approx(float v) { float d; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v)); return d; }
DEVICE float lg2_approx(float v) { float d; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v)); return d; }
DEVICE float rcp_approx(float v) { float d; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v)); return d; }

// ---- mma.sync: d += a * b, one warp ---------------------------------------------------------------------------------
// a has 16 rows, b 8 columns. With g = lane / 4 and t = lane % 4: d[0], d[1] are row g, columns 2t and 2t + 1; d[2],
// d[3] row g + 8. a[0] is row g, a[1] row g + 8, both the t-th word of the first half of k; a[2], a[3] the second half.
// b[0] is column g, the t-th word of the first half of k, b[1] of the second.

#define ANYBIT_MMA(name, types, reg, c)                                                                              \
    DEVICE void name(reg (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {                                  \
        asm volatile("mma.sync.aligned." types " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"              \
                     : c(d[0]), c(d[1]), c(d[2]), c(d[3])                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                            \
    }
ANYBIT_MMA(mma_m16n8k16_f16, "m16n8k16.row.col.f32.f16.f16.f32", float, "+f")
ANYBIT_MMA(mma_m16n8k16_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32", float, "+f")
ANYBIT_MMA(mma_m16n8k32_s8, "m16n8k32.row.col.s32.s8.s8.s32", int32_t, "+r")
ANYBIT_MMA(mma_m16n8k32_u8s8, "m16n8k32.row.col.s32.u8.s8.s32", int32_t, "+r")
// Half as many k: only the first word of each row of a, and of b.
DEVICE void mma_m16n8k16_u8s8(int32_t (&d)[4], const uint32_t (&a)[2], uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b));
}
// Native on sm_80 to sm_89 only: 40 times slower on sm_90.
ANYBIT_MMA(mma_m16n8k64_s4, "m16n8k64.row.col.s32.s4.s4.s32", int32_t, "+r")
ANYBIT_MMA(mma_m16n8k64_u4s4, "m16n8k64.row.col.s32.u4.s4.s32", int32_t, "+r")
ANYBIT_MMA(mma_m16n8k64_u4, "m16n8k64.row.col.s32.u4.u4.s32", int32_t, "+r")
#undef ANYBIT_MMA

// popc(a & b). Native on sm_80 to sm_90; emulated from sm_100 on, so refused there.
template <class Int, int arch = ANYBIT_ARCH>
DEVICE void mma_m16n8k256_b1(Int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    static_assert(arch < 1000, "1-bit tensor cores end with sm_90: sm_100 and later emulate them on integer units");
    asm volatile("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 2:4 sparse: of every four values of a row of a, two are kept; `metadata` holds their 2-bit positions in order.
// 16-bit types: lanes 2s and 2s + 1 of each quad (s the selector) give it for the two halves of k, row g in the low half of
// the word and row g + 8 in the high half. 8-bit types: lanes 0 and 2 give the two halves of k of row g, 1 and 3 of row g + 8.
#define ANYBIT_MMA_SP(name, types, reg, c)                                                                           \
    template <int selector = 0>                                                                                      \
    DEVICE void name(reg (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t metadata) {               \
        asm volatile("mma.sp::ordered_metadata.sync.aligned." types                                                  \
                     " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"                      \
                     : c(d[0]), c(d[1]), c(d[2]), c(d[3])                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),       \
                       "r"(metadata), "n"(selector));                                                                \
    }
ANYBIT_MMA_SP(mma_sp_m16n8k32_f16, "m16n8k32.row.col.f32.f16.f16.f32", float, "+f")
ANYBIT_MMA_SP(mma_sp_m16n8k32_bf16, "m16n8k32.row.col.f32.bf16.bf16.f32", float, "+f")
ANYBIT_MMA_SP(mma_sp_m16n8k64_s8, "m16n8k64.row.col.s32.s8.s8.s32", int32_t, "+r")
#undef ANYBIT_MMA_SP

// fp4 (e2m1) with an e4m3 scale for every 16 values: scale words hold four scales, taken from lane pairs 0 of each quad.
template <int arch = ANYBIT_FP4_ARCH>
DEVICE void mma_m16n8k64_nvf4(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scale, uint32_t b_scale) {
    NEEDS(1200, "block-scaled fp4 mma.sync needs sm_120a");
    asm volatile(
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%11,%12}, {%13}, {%14,%15};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(a_scale), "h"(static_cast<uint16_t>(0)),
          "h"(static_cast<uint16_t>(0)), "r"(b_scale), "h"(static_cast<uint16_t>(0)), "h"(static_cast<uint16_t>(0)));
}

// Two floats to e2m1, the first in the low four bits of a byte, and back to float16.
template <int arch = ANYBIT_FP4_ARCH> DEVICE uint32_t cvt_e2m1x2_f32(float low, float high) {
    NEEDS(1200, "fp4 conversions need sm_120a");
    uint32_t d;
    asm("{ .reg .b8 pair, none; mov.b16 {none, pair}, 0; cvt.rn.satfinite.e2m1x2.f32 pair, %2, %1; mov.b32 %0, {pair, none, none, none}; }"
        : "=r"(d) : "f"(low), "f"(high));
    return d;
}
template <int arch = ANYBIT_FP4_ARCH> DEVICE uint32_t cvt_f16x2_e2m1x2(uint32_t v) {
    NEEDS(1200, "fp4 conversions need sm_120a");
    uint32_t d;
    asm("{ .reg .b8 pair, b1, b2, b3; mov.b32 {pair, b1, b2, b3}, %1; cvt.rn.f16x2.e2m1x2 %0, pair; }" : "=r"(d) : "r"(v));
    return d;
}

}  // namespace ptx

#endif  // ANYBIT_PTX_MATH_CUH
