// Repacks a checkpoint's dense codes (32-bit words, low bits first, row-major) to packed tiles, with their scales and zeros
// or minima, in one pass without temporaries.
//
// Grid: (row tiles, column blocks). A CTA takes one tile of 64 rows by 128 columns: codes go to shared memory as bytes, then
// each lane assembles the words of its unit. Columns may be permuted; padding has code 0. The power of two factored out
// of a row's scales and minima into row_scale is recomputed by each of the row's CTAs: inputs are few and hit L2.
#ifndef ANYBIT_REPACK_CUH
#define ANYBIT_REPACK_CUH

#include "packed/packed_layout.cuh"

enum ScaleType { scale_f32, scale_f16, scale_bf16 };

struct Params {
    const uint32_t* words;       // [n, row_words]
    const int32_t* permutation;  // [128 * column blocks]: channel of each column, -1: padding; or null
    uint8_t* tiles;
    const uint8_t* scale;         // [n, groups], or null: per-row scales, which are not in the tiles
    const uint8_t* zero;          // [n, groups], or null
    const uint8_t* minimum;       // [n, groups] in the type of the scales, or null
    const int32_t* column_group;  // permuted columns: the group of each span of `group` columns, else null
    float* row_scale;             // [64 * row_tiles], not written for per-row scales
    int32_t n, k, row_words, row_tiles, unit_bytes, group, groups, spans;  // spans of `group` columns with scales
    int32_t scale_type;  // a ScaleType
};

namespace packed {

// Bits of the 2^e that, divided out, leaves `largest` (float bits) in [2^most, 2^(most + 1)); 0 for zero and non-finite.
DEVICE uint32_t factor_of(uint32_t largest, int most) {
    const int biased = static_cast<int>(largest >> 23);
    if (largest == 0 || biased == 255) return 0;
    return static_cast<uint32_t>(biased > most + 1 ? biased - most : 1) << 23;
}

// Scale or minimum of one row and group.
DEVICE float value_of(const Params& p, const uint8_t* values, int row, int group) {
    const size_t at = static_cast<size_t>(row) * p.groups + group;
    if (p.scale_type == scale_f32) return reinterpret_cast<const float*>(values)[at];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(values)[at];
    return p.scale_type == scale_f16 ? ptx::cvt_f32_f16(bits) : ptx::cvt_f32_bf16(bits);
}

// A row's factor, computed by two lanes together: see packed_tiles._normalized.
DEVICE uint32_t factor_of_row(const Params& p, const uint8_t* values, int row, int half, int most) {
    uint32_t largest = 0;
    for (int group = half; values != nullptr && row < p.n && group < p.groups; group += 2) {
        const uint32_t magnitude = __float_as_uint(value_of(p, values, row, group)) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const uint32_t other = ptx::shfl_xor(largest, 1);
    return factor_of(other > largest ? other : largest, most);
}

// Writes a tile's scales and zeros or minima behind its codes; 0 for rows and groups out of range.
template <class C> DEVICE void place_scales(const Params& p, uint32_t factors, int row_tile, int k_block, uint8_t* tile) {
    {
        const int i = static_cast<int>(threadIdx.x), row = row_tile * 64 + i / 2;
        const uint32_t of_scale = factor_of_row(p, p.scale, row, i % 2, 7), of_minimum = factor_of_row(p, p.minimum, row, i % 2, 14);
        const uint32_t larger = of_scale > of_minimum ? of_scale : of_minimum, factor = larger == 0 ? (127u - 7) << 23 : larger;
        if (i % 2 == 0) {
            ptx::st_shared_u32(factors + i / 2 * 4, factor);
            if (k_block == 0) p.row_scale[row] = row < p.n ? __uint_as_float(factor) : 0.0f;
        }
    }
    __syncthreads();
    const int parts = p.group < packed::tile_columns ? packed::tile_columns / p.group : 1;
    for (int i = static_cast<int>(threadIdx.x); i < parts * 64; i += C::threads) {
        const int unit = i / (parts * 16), part = i / 16 % parts, at = i % 16, within = unit * 16 + at / 2 + 8 * (at & 1);
        const int row = row_tile * 64 + within, span = (k_block * parts + part) * (packed::tile_columns / parts) / p.group;
        uint16_t scale = 0, minimum = 0;
        uint8_t zero = 0;
        if (row < p.n && span < p.spans) {
            const int group = p.column_group != nullptr ? p.column_group[span] : span;
            // 2^-e: the biased exponents of 2^e and 2^-e sum to twice the bias.
            const float inverse = __uint_as_float((254u << 23) - ptx::ld_shared_u32(factors + within * 4));
            scale = ptx::cvt_f16_f32(value_of(p, p.scale, row, group) * inverse);
            if (p.minimum != nullptr) minimum = ptx::cvt_f16_f32(value_of(p, p.minimum, row, group) * inverse);
            if (p.zero != nullptr) zero = p.zero[static_cast<size_t>(row) * p.groups + group];
        }
        uint8_t* to = tile + unit * p.unit_bytes + 256 * C::bits;
        reinterpret_cast<uint16_t*>(to)[part * 16 + at] = scale;
        if (p.zero != nullptr) to[32 * parts + part * 16 + at] = zero;
        if (p.minimum != nullptr) reinterpret_cast<uint16_t*>(to)[(parts + part) * 16 + at] = minimum;
    }
}

}  // namespace packed

template <class C> __global__ void __launch_bounds__(C::threads) repack(const __grid_constant__ Params p) {
    constexpr int bits = C::bits, field = C::bytes ? 8 : 16, registers = C::bytes ? 16 : 32, pitch = 128 + 4;
    constexpr uint32_t mask = (1u << bits) - 1u;
    static_assert(C::threads == 128 && C::shared_bytes == 64 * pitch + 256, "four warps, the bytes of a tile, factors of rows");
    const int row_tile = static_cast<int>(blockIdx.x), k_block = static_cast<int>(blockIdx.y);
    const uint32_t shared = ptx::shared_address(ptx::dynamic_shared());

    // Codes as bytes, four to a word of shared memory.
    for (int i = static_cast<int>(threadIdx.x); i < 64 * 32; i += C::threads) {
        const int row = row_tile * 64 + i / 32, first = k_block * 128 + i % 32 * 4;
        uint32_t bytes = 0;
        if (row < p.n) {
            const uint32_t* words = p.words + static_cast<size_t>(row) * p.row_words;
            UNROLL for (int e = 0; e < 4; e++) {
                const int channel = p.permutation != nullptr ? p.permutation[first + e] : first + e;
                if (channel >= 0 && channel < p.k) {
                    const int at = channel * bits, word = at >> 5, shift = at & 31;
                    uint32_t code = words[word] >> shift;
                    if (shift + bits > 32) code |= words[word + 1] << (32 - shift);
                    bytes |= (code & mask) << (8 * e);
                }
            }
        }
        ptx::st_shared_u32(shared + (i / 32) * pitch + i % 32 * 4, bytes);
    }
    __syncthreads();

    const int warp = static_cast<int>(ptx::warp_id()), lane = static_cast<int>(ptx::lane_id()), g = lane >> 2, t = lane & 3;
    const uint32_t mine = shared + (warp * 16 + g) * pitch;
    uint32_t words[2 * bits] = {};
    packed::unroll<0, registers>([&](auto index) {
        constexpr int j = decltype(index)::value;
        uint32_t codes;  // register j's, one per field
        if constexpr (C::bytes) {
            constexpr int column = 32 * (j >> 2) + 16 * ((j >> 1) & 1);
            codes = ptx::ld_shared_u32(mine + (j & 1) * (8 * pitch) + column + 4 * t);
        } else {
            constexpr int column = 16 * (j >> 2) + 8 * ((j >> 1) & 1);
            const uint32_t pair = ptx::ld_shared_u32(mine + (j & 1) * (8 * pitch) + column + (t & ~1) * 2) >> (t & 1) * 16;
            codes = (pair & 0xff) | (pair & 0xff00) << 8;
        }
        constexpr uint32_t ones = field == 16 ? 0x00010001u : 0x01010101u;
        packed::unroll<0, bits>([&](auto bit) {  // one iteration per piece, at its first bit
            constexpr int first = decltype(bit)::value;
            constexpr packed::Piece piece = packed::piece(bits, field, j, first);
            if constexpr (packed::begins_piece(bits, field, j, first)) {
                const uint32_t part = (codes >> piece.first) & (((1u << piece.count) - 1u) * ones);
                words[piece.word] |= part << piece.bit;
            }
        });
    });
    if constexpr (C::float_order) {
        UNROLL for (int i = 0; i < 2 * bits; i++) words[i] = packed::float_order(words[i]);
    }
    uint8_t* tile = p.tiles + (static_cast<size_t>(k_block) * p.row_tiles + row_tile) * 4 * p.unit_bytes;
    uint8_t* unit = tile + warp * p.unit_bytes;
    UNROLL for (int i = 0; i < 2 * bits; i++) {
        const int quad = i / 4 * 512, within = 2 * bits - i / 4 * 4 >= 4 ? 16 : 8;
        *reinterpret_cast<uint32_t*>(unit + quad + lane * within + i % 4 * 4) = words[i];
    }
    if (p.scale != nullptr) packed::place_scales<C>(p, shared + 64 * pitch, row_tile, k_block, tile);
}

#endif  // ANYBIT_REPACK_CUH
