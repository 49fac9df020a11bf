// 16-bit activations to the digits of digit_layout.cuh: a warp converts a token's block of 128 columns.
#ifndef ANYBIT_DIGITIZE_CUH
#define ANYBIT_DIGITIZE_CUH

#include "common/values.cuh"
#include "packed/sm80_digits/digit_layout.cuh"

struct Params {
    const uint16_t* x;           // [m, k], rows x_stride elements apart
    const int32_t* permutation;  // act-order: the input channel of each column, else null
    uint8_t* digits;             // [column blocks][block_bytes]
    int32_t m, k, x_stride;
};

namespace packed {

// Packs a number below 256 for each operand word into one constant; the i-th is for lanes 4i to 4i + 3.
template <class C, class F> __device__ constexpr uint64_t of_words(F&& of) {
    uint64_t all = 0;
    for (int i = 0; i < 8; i++) all |= static_cast<uint64_t>(of(fields_of(C::bits, C::group, i))) << (8 * i);
    return all;
}
struct LowField { __device__ constexpr int operator()(Fields f) const { return column_of_register(f.low); } };
struct HighField { __device__ constexpr int operator()(Fields f) const { return column_of_register(f.high); } };

// A lane's two pairs of columns of a token's block of 128 columns of x; zeros for null.
template <class C> struct BlockOfX {
    uint32_t pairs[2];

    DEVICE void load(const uint16_t* x, const int32_t* permutation, int k, int block) {
        const uint32_t lane = ptx::lane_id(), word = lane >> 2;
        constexpr uint64_t low = of_words<C>(LowField{}), high = of_words<C>(HighField{});
        const int first = block * 128 + static_cast<int>(lane & 3) * 2;
        const int columns[2] = {first + static_cast<int>(low >> (8 * word) & 255), first + static_cast<int>(high >> (8 * word) & 255)};
        pairs[0] = pairs[1] = 0;
        if (x == nullptr) return;
        UNROLL for (int h = 0; h < 2; h++) {
            if (!C::gather && (!C::ragged || columns[h] + 1 < k)) {
                pairs[h] = ptx::ld_global_cg_u32(x + columns[h]);
            } else {  // any order of columns, any alignment
                UNROLL for (int e = 0; e < 2; e++) {
                    const int column = columns[h] + e;
                    const int channel = C::gather && permutation != nullptr ? permutation[column] : column < k ? column : -1;
                    if (channel >= 0) pairs[h] |= static_cast<uint32_t>(x[channel]) << (16 * e);
                }
            }
        }
    }
    // Stores a token's digits and facts into the block of all tokens at `out`.
    DEVICE void store(uint32_t token, uint8_t* out) const;
};

template <class C> DEVICE void BlockOfX<C>::store(uint32_t token, uint8_t* out) const {
    using L = DigitLayout<C>;
    constexpr bool bf16 = C::operand == Operand::bf16;
    const uint32_t lane = ptx::lane_id(), word = lane >> 2, tile = token / 4, place = token % 4;
    if constexpr (L::floats) {
        uint32_t halves[2] = {pairs[0], pairs[1]};
        const float scale = values::halve_warp<bf16>(halves);
        const uint32_t at = tile / 2 * 2048 + (word >> 1) * 512 + (place * 2 + (tile & 1)) * 64 + (lane & 3) * 16 + (word & 1) * 8;
        *reinterpret_cast<uint2*>(out + at) = {halves[0], halves[1]};
        if (lane == 0) reinterpret_cast<float*>(out + L::facts)[token] = scale * scale_of_pair<C::code, false>;
        return;
    }
    const uint32_t largest = ptx::redux_max(max(values::magnitude_of_pair(pairs[0]), values::magnitude_of_pair(pairs[1])));
    constexpr int mantissa = bf16 ? 7 : 10, bias = bf16 ? 127 : 15;
    const bool finite = largest >> mantissa < 2 * bias + 1;
    // |v| < 2^14, and at most 16319 where it is doubled, whose high digit would be 128 else: eight units more round up.
    constexpr int doubled = high_bit(C::bits, C::group) - low_bit(C::bits, C::group);
    const int exponent = max(static_cast<int>(largest + (doubled ? bf16 ? 1 : 8 : 0) >> mantissa) - bias, -100);
    const float up = __uint_as_float(static_cast<uint32_t>(127 + 13 - exponent) << 23);
    const float scale = finite ? __uint_as_float(static_cast<uint32_t>(127 - 13 + exponent) << 23) : __uint_as_float(0x7fc00000u);
    uint32_t digits[4];
    int sum = 0;
    UNROLL for (int e = 0; e < 4; e++) {
        const uint16_t bits = static_cast<uint16_t>(pairs[e >> 1] >> (16 * (e & 1)));
        // Adding 1.5 * 2^23 rounds to an integer in the low bits, without the slow F2I.
        const float rounded = fmaf(bf16 ? ptx::cvt_f32_bf16(bits) : ptx::cvt_f32_f16(bits), up, 12582912.0f);
        const int v = static_cast<int>(__float_as_uint(rounded)) - 0x4b400000;
        sum += v;
        digits[e] = (static_cast<uint32_t>(v) << (e < 2 ? doubled : 0)) + 0x80u;  // carries; ^ 0x80 below makes the byte signed
    }
    const uint32_t even = ptx::prmt(digits[0], digits[2], 0x5410), odd = ptx::prmt(digits[1], digits[3], 0x5410);
    const uint32_t at = C::wgmma ? (word * (2 * C::tile_m) + tile * 8 + place * 2) * 4 + (lane & 3)
                                 : tile * 256 + ((word >> 2) * 32 + place * 8 + (lane & 3)) * 4 + (word & 3);
    uint32_t* to = reinterpret_cast<uint32_t*>(out) + at;
    to[0] = ptx::prmt(even, odd, 0x6420) ^ 0x80808080u;
    to[C::wgmma ? 4 : 16] = ptx::prmt(even, odd, 0x7531);

    constexpr int lanes = 32 / L::flushes;  // a group's columns lie in adjacent lanes
    if constexpr (L::flushes == 1) sum = static_cast<int>(ptx::redux_add(static_cast<uint32_t>(sum)));
    else
        UNROLL for (int step = 1; step < lanes; step *= 2) sum += ptx::shfl_xor(sum, step);
    constexpr float zero = C::code == Code::asym ? 1.0f : C::code == Code::bipolar ? ((1 << C::bits) - 1) * 0.5f : static_cast<float>(1 << (C::bits - 1));
    float2* facts = reinterpret_cast<float2*>(out + L::facts);
    if (lane % lanes == 0)
        facts[lane / lanes * C::tile_m + token] = make_float2(scale * (1.0f / (1 << high_bit(C::bits, C::group))),
                                                              static_cast<float>(sum) * scale * -zero);
}

}  // namespace packed

template <class C> __global__ void __launch_bounds__(C::threads) digitize(const __grid_constant__ Params p) {
    static_assert(C::tile_m % (C::threads / 32) == 0, "a warp a token");
    ptx::griddepcontrol_launch_dependents();
    const int token = static_cast<int>(blockIdx.y * (C::threads / 32) + ptx::warp_id()), block = static_cast<int>(blockIdx.x);
    ptx::griddepcontrol_wait();
    packed::BlockOfX<C> x;
    x.load(token < p.m ? p.x + static_cast<size_t>(token) * p.x_stride : nullptr, p.permutation, p.k, block);
    x.store(token, p.digits + static_cast<size_t>(block) * packed::DigitLayout<C>::block_bytes);
}

#endif  // ANYBIT_DIGITIZE_CUH
