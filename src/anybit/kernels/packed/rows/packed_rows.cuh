// Gathers and dequantizes rows of packed tiles to 16-bit floats: the embedding lookup of a (tied) packed head.
//
// Grid: (tokens, column blocks / warps). A warp takes 128 columns of a row, each quad of lanes a step of 16. A row's codes
// are held by four owner lanes' words, and half of the bytes read are the row's own.
#ifndef ANYBIT_PACKED_ROWS_CUH
#define ANYBIT_PACKED_ROWS_CUH

#include "common/types.cuh"
#include "packed/packed_tables.cuh"

struct Params {
    const int64_t* ids;          // [count], row indices; rows out of range give NaN
    const uint8_t* tiles;
    const float* row_scale;      // [64 * row_tiles]
    const uint8_t* row_zero;     // [64 * row_tiles], asym with per-row scales, else null
    const int32_t* permutation;  // [128 * k_blocks]: channel of each column, -1: padding; or null
    uint16_t* y;                 // [count, k]
    int32_t n, k, row_tiles, k_blocks;
};

namespace packed {

// Extracts register j's two codes (16 bits apart) from lane `owner`'s words.
template <class C> DEVICE uint32_t codes_of(const uint8_t* unit, int owner, int j) {
    constexpr int words = 2 * C::bits, quads = words / 4;
    uint32_t found = 0;
#pragma unroll 1
    for (int first = 0; first < C::bits;) {
        const Piece at = piece(C::bits, 16, j, first);
        const int place = at.word < 4 * quads ? at.word / 4 * 512 + owner * 16 : quads * 512 + owner * 8;
        const uint32_t word = *reinterpret_cast<const uint32_t*>(unit + place + at.word % 4 * 4);
        if constexpr (C::code == Code::e2m1) {
            const uint32_t v = at.bit == 0 ? floats_at<0>(word) : at.bit == 4 ? floats_at<1>(word) : at.bit == 8 ? floats_at<2>(word) : floats_at<3>(word);
            return (v >> 9 & 0x00070007u) | (v >> 12 & 0x00080008u);
        }
        found |= (word >> at.bit & ((1u << at.count) - 1u) * 0x00010001u) << first;
        first += at.count;
    }
    return found;
}

// Value of a code before its scale.
template <class C> DEVICE float worth(uint32_t u, float zero) {
    if constexpr (C::code == Code::e2m1) return ptx::cvt_f32_f16(static_cast<uint16_t>((u & 8) << 12 | (u & 7) << 9)) * 0x1p14f;
    if constexpr (C::code == Code::e4m3) return ptx::cvt_f32_f16(static_cast<uint16_t>((u & 0x80) << 8 | (u & 0x7f) << 7)) * 0x1p8f;
    if constexpr (C::code == Code::nf4 || C::code == Code::iq4) return entry<C::code>(static_cast<int>(u));
    return static_cast<float>(u) - zero;
}

}  // namespace packed

template <class C> __global__ void __launch_bounds__(C::threads) packed_rows(const __grid_constant__ Params p) {
    const int token = static_cast<int>(blockIdx.x), lane = static_cast<int>(ptx::lane_id()), t = lane & 3, step = lane >> 2;
    const int k_block = static_cast<int>(blockIdx.y) * (C::threads / 32) + static_cast<int>(ptx::warp_id());
    if (k_block >= p.k_blocks) return;
    const int64_t id = p.ids[token];
    const bool there = id >= 0 && id < p.n;
    const int row = there ? static_cast<int>(id) : 0, g = row % 8, half = row % 16 / 8;
    constexpr int codes = 256 * C::bits, parts = packed::subgroups(C::group), size = packed::unit_bytes(C::bits, C::group, C::code);
    const uint8_t* unit = p.tiles + ((static_cast<size_t>(k_block) * p.row_tiles + row / 64) * 4 + row % 64 / 16) * size;
    float scale = p.row_scale[row], minimum = 0.0f;
    float zero = C::code == Code::bipolar ? 0.5f * ((1 << C::bits) - 1) : C::code == Code::sym ? static_cast<float>(1 << (C::bits - 1)) : 0.0f;
    if constexpr (parts > 0) {
        const int part = step * parts / 8, at = part * 16 + g * 2 + half;
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(unit + codes);
        const float factor = scale;
        scale *= ptx::cvt_f32_f16(halves[at]);
        if constexpr (C::code == Code::asym) zero = static_cast<float>(unit[codes + 32 * parts + at]);
        if constexpr (C::code == Code::min) minimum = factor * ptx::cvt_f32_f16(halves[parts * 16 + at]);
    } else if constexpr (C::code == Code::asym) {
        zero = static_cast<float>(p.row_zero[row]);
    }
    UNROLL for (int high = 0; high < 2; high++) {
        const uint32_t pair = packed::codes_of<C>(unit, 4 * g + t, 4 * step + 2 * high + half);
        UNROLL for (int h = 0; h < 2; h++) {
            const int column = k_block * 128 + 16 * step + 8 * high + 2 * t + h;
            const int channel = p.permutation != nullptr ? p.permutation[column] : column;
            if (channel < 0 || channel >= p.k) continue;
            const float v = there ? fmaf(packed::worth<C>(pair >> (16 * h) & 0xffff, zero), scale, minimum) : __uint_as_float(0x7fc00000u);
            p.y[static_cast<size_t>(token) * p.k + channel] = C::output == Output::f16 ? ptx::cvt_f16_f32(v) : ptx::cvt_bf16_f32(v);
        }
    }
}

#endif  // ANYBIT_PACKED_ROWS_CUH
