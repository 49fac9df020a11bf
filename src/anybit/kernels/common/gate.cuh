// What joins the two halves of gate_up.
#ifndef ANYBIT_GATE_CUH
#define ANYBIT_GATE_CUH

#include "common/types.cuh"
#include "common/values.cuh"

namespace values {

// gate(a) * b of 16-bit values.
template <Gate gate, bool bf16> DEVICE uint16_t join(uint16_t a, uint16_t b) {
    if constexpr (gate == Gate::silu) return static_cast<uint16_t>(silu_mul_pair<bf16>(a, b));
    float g = low_float<bf16>(a), up = low_float<bf16>(b);
    if constexpr (gate == Gate::swigluoai) {  // comparisons that leave NaN
        g = g > 7.0f ? 7.0f : g, up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
        g = (up + 1.0f) * (g * ptx::rcp_approx(1.0f + ptx::ex2_approx(-1.702f * 1.4426950408889634f * g)));
    } else {  // g / (1 + e^-2t): t of gelu's tanh
        const float t = 0.7978845608028654f * fmaf(0.044715f * g * g, g, g);
        g = g * ptx::rcp_approx(1.0f + ptx::ex2_approx(-2.0f * 1.4426950408889634f * t));
        g = low_float<bf16>(round_pair<bf16>(g, g)) * up;
    }
    return static_cast<uint16_t>(round_pair<bf16>(g, g));
}
// The same of pairs.
template <Gate gate, bool bf16> DEVICE uint32_t join_pair(uint32_t a, uint32_t b) {
    if constexpr (gate == Gate::silu) return silu_mul_pair<bf16>(a, b);
    const uint32_t low = join<gate, bf16>(static_cast<uint16_t>(a), static_cast<uint16_t>(b));
    return low | static_cast<uint32_t>(join<gate, bf16>(static_cast<uint16_t>(a >> 16), static_cast<uint16_t>(b >> 16))) << 16;
}

}  // namespace values

#endif  // ANYBIT_GATE_CUH
