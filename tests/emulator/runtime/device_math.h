// The host's ptx_math.cuh and ptx_wgmma.cuh; device.h includes it.
#pragma once

namespace ptx {

template <int table> DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d = 0;
    for (int i = 0; i < 8; i++)
        if (table >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return d;
}
DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

template <class Function> DEVICE uint32_t in_halves(Function f, uint32_t a, uint32_t b, uint32_t c = 0) {
    return f(a & 0xffff, b & 0xffff, c & 0xffff) | static_cast<uint32_t>(f(a >> 16, b >> 16, c >> 16)) << 16;
}
DEVICE uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) { return in_halves(emulate::fma_f16, a, b, c); }
DEVICE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) { return in_halves(emulate::fma_bf16, a, b, c); }
DEVICE uint32_t add_f16x2(uint32_t a, uint32_t b) { return fma_f16x2(a, 0x3c003c00u, b); }
DEVICE uint32_t sub_f16x2(uint32_t a, uint32_t b) { return fma_f16x2(b, 0xbc00bc00u, a); }
DEVICE uint32_t mul_f16x2(uint32_t a, uint32_t b) { return fma_f16x2(a, b, 0x80008000u); }
DEVICE uint32_t add_bf16x2(uint32_t a, uint32_t b) { return fma_bf16x2(a, 0x3f803f80u, b); }
DEVICE uint32_t sub_bf16x2(uint32_t a, uint32_t b) { return fma_bf16x2(b, 0xbf80bf80u, a); }
DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) { return fma_bf16x2(a, b, 0x80008000u); }
template <bool largest, bool nan_wins> uint32_t extremes(uint32_t a, uint32_t b, uint16_t infinity) {
    return emulate::extreme(a & 0xffff, b & 0xffff, infinity, largest, nan_wins) |
           static_cast<uint32_t>(emulate::extreme(a >> 16, b >> 16, infinity, largest, nan_wins)) << 16;
}
DEVICE uint32_t max_f16x2(uint32_t a, uint32_t b) { return extremes<true, false>(a, b, 0x7c00); }
DEVICE uint32_t max_nan_f16x2(uint32_t a, uint32_t b) { return extremes<true, true>(a, b, 0x7c00); }
DEVICE uint32_t min_nan_f16x2(uint32_t a, uint32_t b) { return extremes<false, true>(a, b, 0x7c00); }
DEVICE uint32_t max_nan_bf16x2(uint32_t a, uint32_t b) { return extremes<true, true>(a, b, 0x7f80); }
DEVICE uint32_t min_nan_bf16x2(uint32_t a, uint32_t b) { return extremes<false, true>(a, b, 0x7f80); }
DEVICE uint32_t abs_f16x2(uint32_t a) { return a & 0x7fff7fffu; }
DEVICE uint32_t abs_bf16x2(uint32_t a) { return a & 0x7fff7fffu; }
// The host compiler contracts nothing (-ffp-contract=off) and rounds to nearest.
DEVICE float mul_rn_f32(float a, float b) { return a * b; }
DEVICE float add_rn_f32(float a, float b) { return a + b; }
DEVICE float add_rm_f32(float a, float b) { return emulate::add_down(a, b); }
DEVICE uint16_t cvt_f16_f32(float v) { return emulate::to_f16(v); }
DEVICE uint16_t cvt_bf16_f32(float v) { return emulate::to_bf16(v); }
DEVICE uint32_t cvt_f16x2_f32(float low, float high) {
    return cvt_f16_f32(low) | static_cast<uint32_t>(cvt_f16_f32(high)) << 16;
}
DEVICE uint32_t cvt_bf16x2_f32(float low, float high) {
    return cvt_bf16_f32(low) | static_cast<uint32_t>(cvt_bf16_f32(high)) << 16;
}
DEVICE float cvt_f32_f16(uint16_t v) { return emulate::from_f16(v); }
DEVICE float cvt_f32_bf16(uint16_t v) { return emulate::from_bf16(v); }
DEVICE uint16_t cvt_e4m3x2_f32(float low, float high) { return emulate::to_e4m3(low) | emulate::to_e4m3(high) << 8; }
DEVICE uint16_t cvt_e4m3x2_f16x2(uint32_t v) {
    return emulate::to_e4m3(emulate::from_f16(v & 0xffff)) | emulate::to_e4m3(emulate::from_f16(v >> 16)) << 8;
}
DEVICE uint32_t cvt_f16x2_e4m3x2(uint16_t v) {
    return cvt_f16x2_f32(emulate::from_e4m3(v & 0xff), emulate::from_e4m3(v >> 8));
}
DEVICE float flushed(float v) { return std::fabs(v) < 1.17549435e-38f ? std::copysign(0.0f, v) : v; }
DEVICE float ex2_approx(float v) { return flushed(std::exp2(flushed(v))); }
DEVICE float lg2_approx(float v) { return flushed(std::log2(flushed(v))); }
DEVICE float rcp_approx(float v) { return flushed(1 / flushed(v)); }

#define ANYBIT_MMA(name, a_kind, b_kind, reg)                                                                        \
    DEVICE void name(reg (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {                                  \
        emulate::mma(#name, emulate::Kind::a_kind, emulate::Kind::b_kind, d, a, b);                                  \
    }
ANYBIT_MMA(mma_m16n8k16_f16, f16, f16, float)
ANYBIT_MMA(mma_m16n8k16_bf16, bf16, bf16, float)
ANYBIT_MMA(mma_m16n8k32_s8, s8, s8, int32_t)
ANYBIT_MMA(mma_m16n8k32_u8s8, u8, s8, int32_t)
DEVICE void mma_m16n8k16_u8s8(int32_t (&d)[4], const uint32_t (&a)[2], uint32_t b) {
    const uint32_t whole_a[4] = {a[0], a[1], 0, 0}, whole_b[2] = {b, 0};
    emulate::mma("mma_m16n8k16_u8s8", emulate::Kind::u8, emulate::Kind::s8, d, whole_a, whole_b);
}
ANYBIT_MMA(mma_m16n8k64_s4, s4, s4, int32_t)
ANYBIT_MMA(mma_m16n8k64_u4s4, u4, s4, int32_t)
ANYBIT_MMA(mma_m16n8k64_u4, u4, u4, int32_t)
ANYBIT_MMA(mma_m16n8k32_e4m3, e4m3, e4m3, float)
#undef ANYBIT_MMA
template <class Int> DEVICE void mma_m16n8k256_b1(Int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    emulate::mma("mma_m16n8k256_b1", emulate::Kind::b1, emulate::Kind::b1, d, a, b);
}
#define ANYBIT_MMA_SP(name, a_kind, b_kind, reg)                                                                     \
    template <int selector = 0>                                                                                      \
    DEVICE void name(reg (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t metadata) {               \
        emulate::mma_sp(#name, emulate::Kind::a_kind, emulate::Kind::b_kind, d, a, b, metadata, selector);           \
    }
ANYBIT_MMA_SP(mma_sp_m16n8k32_f16, f16, f16, float)
ANYBIT_MMA_SP(mma_sp_m16n8k32_bf16, bf16, bf16, float)
ANYBIT_MMA_SP(mma_sp_m16n8k64_s8, s8, s8, int32_t)
#undef ANYBIT_MMA_SP
DEVICE void mma_m16n8k64_nvf4(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t a_scale,
                           uint32_t b_scale) {
    emulate::mma_nvf4(d, a, b, a_scale, b_scale);
}

constexpr float e2m1_values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
DEVICE uint32_t to_e2m1(float v) {  // ties to the even code; a NaN becomes the largest
    constexpr float middles[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5};
    uint32_t code = 0;
    for (int i = 0; i < 7; i++) code += i % 2 ? !(std::fabs(v) < middles[i]) : !(std::fabs(v) <= middles[i]);
    return code | (std::signbit(v) ? 8u : 0u);
}
DEVICE uint32_t cvt_e2m1x2_f32(float low, float high) { return to_e2m1(low) | to_e2m1(high) << 4; }
DEVICE uint32_t cvt_f16x2_e2m1x2(uint32_t v) {
    const float low = e2m1_values[v & 7], high = e2m1_values[v >> 4 & 7];
    return cvt_f16x2_f32(v & 8 ? -low : low, v & 128 ? -high : high);
}

enum class Swizzle { none = 0, bytes_128 = 1, bytes_64 = 2, bytes_32 = 3 };
DEVICE constexpr uint64_t wgmma_descriptor(uint32_t shared, Swizzle swizzle, uint32_t stride, uint32_t leading = 16) {
    return static_cast<uint64_t>((shared & 0x3ffffu) >> 4) | static_cast<uint64_t>((leading & 0x3ffffu) >> 4) << 16 |
           static_cast<uint64_t>((stride & 0x3ffffu) >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}
DEVICE constexpr uint64_t wgmma_advance(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }
using emulate::wgmma_commit_group;
using emulate::wgmma_fence;
template <int groups> DEVICE void wgmma_wait_group() { emulate::wgmma_wait_group(groups); }
template <class T, size_t count> DEVICE void wgmma_touch(T (&)[count]) {}
#define ANYBIT_WGMMA_NAME(name, a_kind, b_kind, reg)                                                                 \
    template <int N> DEVICE void name(reg (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {                    \
        emulate::wgmma(#name, emulate::Kind::a_kind, emulate::Kind::b_kind, N, d, nullptr, a, b, accumulate);        \
    }                                                                                                                \
    template <int N> DEVICE void name(reg (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {        \
        emulate::wgmma(#name, emulate::Kind::a_kind, emulate::Kind::b_kind, N, d, a, 0, b, accumulate);              \
    }
ANYBIT_WGMMA_NAME(wgmma_b1, b1, b1, int32_t)
ANYBIT_WGMMA_NAME(wgmma_s8, s8, s8, int32_t)
ANYBIT_WGMMA_NAME(wgmma_u8s8, u8, s8, int32_t)
ANYBIT_WGMMA_NAME(wgmma_e4m3, e4m3, e4m3, float)
ANYBIT_WGMMA_NAME(wgmma_f16, f16, f16, float)
ANYBIT_WGMMA_NAME(wgmma_bf16, bf16, bf16, float)
#undef ANYBIT_WGMMA_NAME
#define ANYBIT_WGMMA_SP_NAME(name, kind, reg)                                                                        \
    template <int N, int selector = 0>                                                                               \
    DEVICE void name(reg (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, uint32_t metadata, bool accumulate = true) { \
        emulate::wgmma_sp(#name, emulate::Kind::kind, emulate::Kind::kind, N, d, a, metadata, selector, b,           \
                          accumulate);                                                                               \
    }
ANYBIT_WGMMA_SP_NAME(wgmma_sp_s8, s8, int32_t)
ANYBIT_WGMMA_SP_NAME(wgmma_sp_f16, f16, float)
ANYBIT_WGMMA_SP_NAME(wgmma_sp_bf16, bf16, float)
#undef ANYBIT_WGMMA_SP_NAME

}  // namespace ptx
