// The small float formats. Every function rounds once, to nearest even.
#include "device_calls.h"

#include <cmath>
#include <cstring>

namespace emulate {
namespace {

// Any binary format of at most 16 bits: `mantissa` stored bits, exponents from `smallest` (of the least normal number).
uint32_t encode(double v, int mantissa, int exponent_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1, smallest = 1 - bias;
    const uint32_t sign = static_cast<uint32_t>(std::signbit(v)) << (mantissa + exponent_bits);
    const uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa;
    if (std::isnan(v)) return infinity | ((1u << mantissa) - 1);  // the canonical NaN of the hardware
    v = std::fabs(v);
    if (std::isinf(v)) return sign | infinity;
    int exponent = v == 0 ? smallest : std::ilogb(v);
    if (exponent < smallest) exponent = smallest;
    // A carry out of the mantissa runs into the exponent, as it should; `exponent - smallest` is 0 for subnormals too.
    const auto units = static_cast<uint64_t>(std::nearbyint(std::ldexp(v, mantissa - exponent)));
    const uint64_t bits = units + (static_cast<uint64_t>(exponent - smallest) << mantissa);
    return sign | (bits >= infinity ? infinity : static_cast<uint32_t>(bits));
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
        for (uint32_t i = 0; i < 256; i++) e4m3[i] = (i & 0x7f) == 0x7f ? NAN : static_cast<float>(decode(i, 3, 4, false));
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
uint16_t to_f16(double v) { return static_cast<uint16_t>(encode(v, 10, 5)); }
uint16_t to_bf16(double v) { return static_cast<uint16_t>(encode(v, 7, 8)); }
uint8_t to_e4m3(float v) {  // saturates at 448; there is no infinity
    if (std::isnan(v)) return 0x7f;
    const uint8_t sign = std::signbit(v) ? 0x80 : 0;
    const float a = std::fabs(v);
    if (a >= 448) return sign | 0x7e;
    // encode() keeps the largest exponent for infinity, which e4m3 uses for 256 to 448, 32 apart.
    return sign | static_cast<uint8_t>(a >= 256 ? 0x78 + std::nearbyint((a - 256) / 32) : encode(a, 3, 4) & 0x7f);
}
// The product of two is exact in double, and the sum rounds there to 53 bits: a second rounding to 11 or 8 bits differs
// from a single one only where the sum ends in exactly one half followed by 40 zeros that rounding made.
uint16_t fma_f16(uint16_t a, uint16_t b, uint16_t c) { return to_f16(static_cast<double>(from_f16(a)) * from_f16(b) + from_f16(c)); }
uint16_t fma_bf16(uint16_t a, uint16_t b, uint16_t c) { return to_bf16(static_cast<double>(from_bf16(a)) * from_bf16(b) + from_bf16(c)); }

}  // namespace emulate
