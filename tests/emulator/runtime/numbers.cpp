// The small float formats. Every function rounds once, to nearest even.
#include "device_calls.h"

#include <cmath>
#include <cstring>

namespace emulate {
namespace {

// Encode in any binary format of at most 16 bits; `overflow`: the code for larger values, without sign.
uint32_t encode(double v, int mantissa, int exponent_bits, uint32_t overflow) {
    const int bias = (1 << (exponent_bits - 1)) - 1, smallest = 1 - bias;
    const uint32_t sign = static_cast<uint32_t>(std::signbit(v)) << (mantissa + exponent_bits);
    if (std::isnan(v)) return (1u << (mantissa + exponent_bits)) - 1;  // the canonical NaN of the hardware
    v = std::fabs(v);
    if (std::isinf(v)) return sign | overflow;
    int exponent = v == 0 ? smallest : std::ilogb(v);
    if (exponent < smallest) exponent = smallest;
    // A carry out of the mantissa correctly increments the exponent; `exponent - smallest` is 0 for subnormals too.
    const auto units = static_cast<uint64_t>(std::nearbyint(std::ldexp(v, mantissa - exponent)));
    const uint64_t bits = units + (static_cast<uint64_t>(exponent - smallest) << mantissa);
    return sign | (bits > overflow ? overflow : static_cast<uint32_t>(bits));
}

double decode(uint32_t v, int mantissa, int exponent_bits, bool has_infinity) {
    const int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
    const int exponent = v >> mantissa & top, fraction = v & ((1 << mantissa) - 1);
    const double sign = v >> (mantissa + exponent_bits) & 1 ? -1 : 1;
    if (has_infinity && exponent == top) return fraction ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - mantissa);
    return sign * std::ldexp(fraction + (1 << mantissa), exponent - bias - mantissa);
}

struct Table {
    float f16[65536], e4m3[256];
    Table() {
        for (uint32_t i = 0; i < 65536; i++) f16[i] = static_cast<float>(decode(i, 10, 5, true));
        for (uint32_t i = 0; i < 256; i++)
            e4m3[i] = (i & 0x7f) == 0x7f ? NAN : static_cast<float>(decode(i, 3, 4, false));
    }
} const table;

}  // namespace

float from_f16(uint16_t v) { return table.f16[v]; }
float from_e4m3(uint8_t v) { return table.e4m3[v]; }
float from_bf16(uint16_t v) {
    const uint32_t bits = static_cast<uint32_t>(v) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
uint16_t to_f16(double v) { return static_cast<uint16_t>(encode(v, 10, 5, 0x7c00)); }
uint16_t to_bf16(double v) { return static_cast<uint16_t>(encode(v, 7, 8, 0x7f80)); }
uint8_t to_e4m3(float v) { return static_cast<uint8_t>(encode(v, 3, 4, 0x7e)); }  // saturates at 448
// The larger or the smaller of two; +0 is more than -0. A NaN loses, or (`nan_wins`) makes the result NaN.
uint16_t extreme(uint16_t a, uint16_t b, uint16_t infinity, bool largest, bool nan_wins) {
    const bool a_nan = (a & 0x7fff) > infinity, b_nan = (b & 0x7fff) > infinity;
    if ((a_nan && b_nan) || (nan_wins && (a_nan || b_nan))) return 0x7fff;
    if (a_nan || b_nan) return a_nan ? b : a;
    auto order = [](uint16_t v) { return v & 0x8000 ? -1 - (v & 0x7fff) : static_cast<int>(v); };
    return (order(a) < order(b)) == largest ? b : a;
}
float add_down(float a, float b) {
    const float sum = a + b, part = sum - a, error = (a - (sum - part)) + (b - part);  // exact: Knuth's two-sum
    if (sum == 0) return a == 0 && b == 0 && !std::signbit(a) && !std::signbit(b) ? 0.0f : -0.0f;
    const bool overflows = std::isinf(sum) && std::isfinite(a) && std::isfinite(b) && sum > 0;
    return error < 0 || overflows ? std::nextafter(sum, -INFINITY) : sum;
}
// The product of two is exact in double, and the sum rounds there to 53 bits: a second rounding to 11 or 8 bits differs
// from a single one only where the sum ends in exactly one half followed by 40 zeros that rounding made.
uint16_t fma_f16(uint16_t a, uint16_t b, uint16_t c) {
    return to_f16(static_cast<double>(from_f16(a)) * from_f16(b) + from_f16(c));
}
uint16_t fma_bf16(uint16_t a, uint16_t b, uint16_t c) {
    return to_bf16(static_cast<double>(from_bf16(a)) * from_bf16(b) + from_bf16(c));
}

}  // namespace emulate
