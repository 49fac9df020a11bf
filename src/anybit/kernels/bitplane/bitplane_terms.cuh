// Shared by the bit-plane kernels: launch parameters, and the conversion of an accumulator to a result.
#ifndef ANYBIT_BITPLANE_TERMS_CUH
#define ANYBIT_BITPLANE_TERMS_CUH

#include "bitplane/bitplane_layout.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

struct Params {
    ptx::TensorMap y_map;           // of y, boxes of 64 weights, for TMA stores
    const uint8_t* weights;         // planes, rows_n rows
    const uint8_t* activations;     // planes, rows_m rows
    const float* weight_scale;      // [n]
    const int32_t* correction;      // [n]: k * Zw - 2^ew * (sum of the row's codes)
    const int32_t* weight_zero;     // [n], asym weights only
    const float* bias;              // [n] or null
    const float* activation_scale;  // [m]
    const int32_t* activation_sum;  // [m]: sum of the row's codes
    const int32_t* activation_zero; // [m], asym activations only
    void* y;                        // [m, n], row stride y_stride in elements
    int64_t y_stride;
    int32_t m, n;
    int32_t rows_m, rows_n;         // padded rows of the planes, multiples of 8
    int32_t chunks;                 // chunks of 1024 k
};

// Pipeline state: next slot (or group of slots) of a ring, and its phase parity.
template <int slots> struct Ring {
    int at = 0, parity = 0;
    DEVICE void advance() {
        if (++at == slots) at = 0, parity ^= 1;
    }
    DEVICE int previous() const { return at == 0 ? slots - 1 : at - 1; }
};

namespace planes {
constexpr int steps = 4;           // k256 MMA steps per chunk
constexpr int step_bytes = 32;
constexpr int swizzle_bytes = 1024;  // eight rows: the period of the swizzle
DEVICE uint64_t descriptor(uint32_t shared) { return ptx::wgmma_descriptor(shared, ptx::Swizzle::bytes_128, swizzle_bytes); }
}  // namespace planes

// Bipolar codes are odd multiples of half a step: that side is doubled (e = 1), so that everything is an integer.
//   V = (acc << (ew + ex)) - 2^ex * Zw * sum_x + Zx * (k * Zw - 2^ew * sum_w),  y = V * scale_x * scale_w / 2^(ew + ex) + bias
// A zero Z is a constant of the format, except for asym weights (one per row) and asym activations (one per token).
template <class Config> struct Terms {
    static constexpr bool asym_w = Config::weight_code == Code::asym, asym_x = Config::activation_code == Code::asym;
    static constexpr int ew = Config::weight_code == Code::bipolar, ex = Config::activation_code == Code::bipolar;
    static constexpr uint32_t zero_w = ew ? (1u << Config::weight_bits) - 1 : 1u << (Config::weight_bits - 1);
    static constexpr uint32_t zero_x = ex ? (1u << Config::activation_bits) - 1 : 1u << (Config::activation_bits - 1);

    // Integers below 2^22 become floats by adding the bits of 1.5 * 2^23 (folded into one of the terms) and one FADD: I2F
    // runs at a fraction of their rate.
    static constexpr bool shifted = Config::short_sums && Config::output != Output::s32;
    static constexpr uint32_t float_bits = 0x4b400000u;
    static constexpr bool in_column = shifted && !asym_w, in_row = shifted && asym_w && !asym_x;

    static constexpr bool is_16bit = Config::output == Output::f16 || Config::output == Output::bf16;

    struct Row {  // of weights
        float scale, bias;
        uint32_t term, zero;
    };
    struct Column {  // of tokens
        float scale;
        uint32_t term, zero;
    };

    // Loads ahead of use: without branches, so that all are in flight together, and without arithmetic, which would stall
    // on them. Rows and tokens past the end are clamped: their results are never stored.
    struct RowLoad {
        float scale, bias;
        int32_t correction, zero;
    };
    struct ColumnLoad {
        float scale;
        int32_t sum, zero;
    };
    static DEVICE RowLoad load_row(const Params& p, int n) {
        const int at = min(n, p.n - 1);
        RowLoad r = {p.weight_scale[at], 0.0f, p.correction[at], 0};
        if (p.bias != nullptr) r.bias = p.bias[at];
        if constexpr (asym_w) r.zero = p.weight_zero[at];
        return r;
    }
    // After griddepcontrol_wait only: it may read the previous kernel's output.
    static DEVICE ColumnLoad load_column(const Params& p, int m) {
        const int at = min(m, p.m - 1);
        ColumnLoad c = {p.activation_scale[at], p.activation_sum[at], 0};
        if constexpr (asym_x) c.zero = p.activation_zero[at];
        return c;
    }
    static DEVICE Row row(const RowLoad& r) {
        return {r.scale * (1.0f / static_cast<float>(1 << (ew + ex))), r.bias,
                static_cast<uint32_t>(r.correction) * (asym_x ? 1u : zero_x) + (in_row ? float_bits : 0u), static_cast<uint32_t>(r.zero)};
    }
    static DEVICE Column column(const ColumnLoad& c) {
        return {c.scale, (0u - static_cast<uint32_t>(c.sum)) * ((asym_w ? 1u : zero_w) << ex) + (in_column ? float_bits : 0u),
                static_cast<uint32_t>(c.zero)};
    }
    static DEVICE Row row(const Params& p, int n) { return row(load_row(p, n)); }
    static DEVICE Column column(const Params& p, int m) { return column(load_column(p, m)); }
    // Selects by value: a dynamically indexed array would spill to local memory.
    static DEVICE Row pick(bool second, const Row& a, const Row& b) {
        return {second ? b.scale : a.scale, second ? b.bias : a.bias, second ? b.term : a.term, second ? b.zero : a.zero};
    }
    static DEVICE Column pick(bool second, const Column& a, const Column& b) {
        return {second ? b.scale : a.scale, second ? b.term : a.term, second ? b.zero : a.zero};
    }
    static DEVICE uint32_t bits(int32_t acc, const Row& r, const Column& c) {
        const uint32_t w = asym_w ? r.zero * c.term : c.term, x = asym_x ? c.zero * r.term : r.term;
        return (static_cast<uint32_t>(acc) << (ew + ex)) + w + x + (shifted && !in_column && !in_row ? float_bits : 0u);
    }
    static DEVICE int32_t value(int32_t acc, const Row& r, const Column& c) { return static_cast<int32_t>(bits(acc, r, c)); }
    static DEVICE float result(int32_t acc, const Row& r, const Column& c) {
        const uint32_t v = bits(acc, r, c);
        const float exact = shifted ? __uint_as_float(v) - __uint_as_float(float_bits) : static_cast<float>(static_cast<int32_t>(v));
        return fmaf(exact * c.scale, r.scale, r.bias);
    }
    // Packs two 16-bit results into one word, `low` in the low half.
    static DEVICE uint32_t pack(float low, float high) {
        if constexpr (Config::output == Output::bf16) return ptx::cvt_bf16x2_f32(low, high);
        return ptx::cvt_f16x2_f32(low, high);
    }
    static DEVICE void store(const Params& p, int m, int n, int32_t acc, const Row& r, const Column& c) {
        if (m >= p.m || n >= p.n) return;
        const int64_t at = m * p.y_stride + n;
        if constexpr (Config::output == Output::s32)
            static_cast<int32_t*>(p.y)[at] = value(acc, r, c);
        else if constexpr (Config::output == Output::f32)
            static_cast<float*>(p.y)[at] = result(acc, r, c);
        else
            static_cast<uint16_t*>(p.y)[at] = static_cast<uint16_t>(pack(result(acc, r, c), 0.0f));
    }
};

template <int count> DEVICE void rotate(int32_t (&acc)[count], int left) {
    UNROLL for (int i = 0; i < count; i++)
        acc[i] = static_cast<int32_t>(__funnelshift_l(static_cast<uint32_t>(acc[i]), static_cast<uint32_t>(acc[i]), left));
}

#endif  // ANYBIT_BITPLANE_TERMS_CUH
