// Shared by sm90_bitplane_skinny.cuh and sm90_bitplane_resident.cuh: a tile's operands, and the epilogue constants of a
// thread's results.
#ifndef ANYBIT_SM90_BITPLANE_SKINNY_TILE_CUH
#define ANYBIT_SM90_BITPLANE_SKINNY_TILE_CUH

#include "bitplane/bitplane_terms.cuh"

// Which operand is wgmma's A.
enum class AOperand { weights, activations };

// A: the operand whose planes are walked, 64 rows. B: all planes concatenated along N, `tile_b` rows each.
template <class Config> struct SkinnyTile {
    static constexpr bool a_is_weights = Config::a_operand == AOperand::weights;
    static constexpr int P = a_is_weights ? Config::weight_bits : Config::activation_bits;  // planes of A
    static constexpr int Q = a_is_weights ? Config::activation_bits : Config::weight_bits;  // planes of B
    static constexpr int rows = 64, columns = Config::tile_b, values = columns / 2;  // values: a thread's sums
    static_assert(Config::wgmma_n >= Q * columns, "refused by why_not()");

    static DEVICE int a_stored(const Params& p) { return a_is_weights ? p.rows_n : p.rows_m; }
    static DEVICE int b_stored(const Params& p) { return a_is_weights ? p.rows_m : p.rows_n; }

    // Issues the MMAs of one chunk of a plane of A with a chunk of B.
    static DEVICE void multiply_chunk(int32_t (&acc)[Config::wgmma_n / 2], uint64_t a, uint64_t b, bool add) {
        UNROLL for (int step = 0; step < planes::steps; step++)
            ptx::wgmma_b1<Config::wgmma_n>(acc, ptx::wgmma_advance(a, step * planes::step_bytes), ptx::wgmma_advance(b, step * planes::step_bytes), add || step > 0);
    }
    // The sums, planes of B combined: register 4 * octet + 2 * h + e, as in wgmma's layout. Set i weighs 2^i.
    template <int sets> static DEVICE void combine(int32_t (&sums)[values], const int32_t (&acc)[sets][Config::wgmma_n / 2]) {
        UNROLL for (int v = 0; v < values; v++) {
            uint32_t sum = 0;
            UNROLL for (int set = 0; set < sets; set++)
                UNROLL for (int j = 0; j < Q; j++) sum += static_cast<uint32_t>(acc[set][j * values + v]) << (j + set);
            sums[v] = static_cast<int32_t>(sum);
        }
    }
};

// A thread has rows `row` and row + 8 of A and, in each of `eights` octets of columns, the pair that starts at `pair`.
template <class Config, int eights> struct SkinnyTerms {
    using T = Terms<Config>;
    static constexpr bool a_is_weights = SkinnyTile<Config>::a_is_weights;
    static constexpr int weight_count = a_is_weights ? 2 : 2 * eights, token_count = a_is_weights ? 2 * eights : 2;

    typename T::RowLoad weight_loads[weight_count];
    typename T::ColumnLoad token_loads[token_count];
    typename T::Row weights[weight_count];
    typename T::Column tokens[token_count];

    DEVICE void load_weights(const Params& p, int row, int pair) {
        UNROLL for (int i = 0; i < weight_count; i++) weight_loads[i] = T::load_row(p, a_is_weights ? row + 8 * i : pair + 8 * (i / 2) + i % 2);
    }
    // After griddepcontrol_wait.
    DEVICE void load_tokens(const Params& p, int row, int pair) {
        UNROLL for (int i = 0; i < token_count; i++) token_loads[i] = T::load_column(p, a_is_weights ? pair + 8 * (i / 2) + i % 2 : row + 8 * i);
    }
    // After the main loop: the loads have landed by then.
    DEVICE void finish() {
        UNROLL for (int i = 0; i < weight_count; i++) weights[i] = T::row(weight_loads[i]);
        UNROLL for (int i = 0; i < token_count; i++) tokens[i] = T::column(token_loads[i]);
    }
};

#endif  // ANYBIT_SM90_BITPLANE_SKINNY_TILE_CUH
