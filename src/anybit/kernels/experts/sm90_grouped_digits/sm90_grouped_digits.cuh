// Experts' products where few tokens chose an expert: digits of activations (sm80_packed_digits.cuh), which digitize_slots made.
// blockIdx.y is a token tile that routing wrote: an expert's weights are read once for up to tile_m tokens. Y has a row a
// slot, sorted by expert. Weights are on their way before digits are there.
#ifndef ANYBIT_SM90_GROUPED_DIGITS_CUH
#define ANYBIT_SM90_GROUPED_DIGITS_CUH

#include "common/gate.cuh"
#include "packed/sm80_digits/sm80_packed_digits.cuh"

struct GroupedParams {
    const uint8_t* tiles;        // of all experts
    const float* row_scale;      // [experts * row_tiles * 64]
    const uint8_t* row_zero;     // the same, for asym with per-row scales, else null
    const uint16_t* bias;        // the same, or null
    const uint8_t* digits;
    const uint4* token_tile;
    const uint32_t* token_tile_count;
    uint16_t* y;                 // [slots, n]
    int32_t experts, n, k_blocks, row_tiles;
};

// gate: of a weight whose rows alternate between eight of gate and eight of up; Y has what joins them. Or none.
template <class C, Gate... gate> __global__ void __launch_bounds__(C::threads, C::min_blocks_per_sm) sm90_grouped_digits(const __grid_constant__ GroupedParams p) {
    using namespace packed;
    using S = DigitsShape<C>;
    static_assert(C::threads == S::warps * 32 && C::shared_bytes >= S::bytes && C::cluster_k == 1, "the twin counts otherwise");
    constexpr bool bf16 = C::operand == Operand::bf16, gated = sizeof...(gate) > 0;
    ptx::griddepcontrol_launch_dependents();
    const uint32_t shared = ptx::shared_address(ptx::dynamic_shared());
    const int item = static_cast<int>(blockIdx.y);
    const uint4 found = ptx::ld_global_cg_v4(p.token_tile + item);
    if (item >= static_cast<int>(ptx::ld_global_cg_u32(p.token_tile_count))) {
        ptx::griddepcontrol_wait();
        return;
    }
    const uint32_t row_units = static_cast<uint32_t>(p.row_tiles) * 4;
    const int first = static_cast<int>(blockIdx.x * row_units / gridDim.x), units = static_cast<int>((blockIdx.x + 1) * row_units / gridDim.x) - first;
    const size_t unit = static_cast<size_t>(found.x) * row_units + first;
    const int begin = static_cast<int>(found.z + (item - found.y) * C::tile_m), end = static_cast<int>(found.z + found.w);
    const DigitTile tile = {p.tiles + unit * S::unit_size, p.digits + static_cast<size_t>(item) * p.k_blocks * S::block_bytes,
                            p.row_zero == nullptr ? nullptr : p.row_zero + unit * 16,
                            static_cast<size_t>(p.experts) * row_units * S::unit_size, units, p.k_blocks, min(end - begin, C::tile_m)};
    multiply_tile<C>(tile, 0, shared, [&]() {
        for (int i = static_cast<int>(threadIdx.x); i < units * 16; i += C::threads) {
            const float bias = p.bias == nullptr ? 0.0f : bf16 ? ptx::cvt_f32_bf16(p.bias[unit * 16 + i]) : ptx::cvt_f32_f16(p.bias[unit * 16 + i]);
            ptx::st_shared_v2(shared + S::factors + i * 8, {__float_as_uint(p.row_scale[unit * 16 + i]), __float_as_uint(bias)});
        }
        ptx::griddepcontrol_wait();
    });

    // Four rows of a token, as two pairs of 16-bit values.
    const auto four = [&](int token, int quad) {
        float sum[4] = {};
        add_k_warps<C, S>(sum, shared, token, quad);
        float v[4];
        scale_quad<S>(v, sum, shared, quad);
        return uint2{values::round_pair<bf16>(v[0], v[1]), values::round_pair<bf16>(v[2], v[3])};
    };
    const int quads = gated ? units * 2 : units * 4, tokens = tile.tokens;
    for (int i = static_cast<int>(threadIdx.x); i < tokens * quads; i += C::threads) {
        const int token = i / quads, quad = i - token * quads, n = first * (gated ? 8 : 16) + quad * 4;
        uint2 v;
        if constexpr (gated) {
            const int first_quad = quad / 2 * 4 + quad % 2;
            const uint2 a = four(token, first_quad), b = four(token, first_quad + 2);
            v = uint2{values::join_pair<gate..., bf16>(a.x, b.x), values::join_pair<gate..., bf16>(a.y, b.y)};
        } else {
            v = four(token, quad);
        }
        if (n < p.n) *reinterpret_cast<uint2*>(p.y + static_cast<size_t>(begin + token) * p.n + n) = v;
    }
}

#endif  // ANYBIT_SM90_GROUPED_DIGITS_CUH
