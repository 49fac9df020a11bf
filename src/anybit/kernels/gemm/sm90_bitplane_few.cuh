// What the two kernels for few tokens (sm90_bitplane_skinny.cuh, sm90_bitplane_resident.cuh) share: the sides of a tile, and the constants
// of a thread's results.
#ifndef ANYBIT_BITWISE_FEW_CUH
#define ANYBIT_BITWISE_FEW_CUH

#include "gemm/bitplane_terms.cuh"

// A is the operand whose planes are walked, 64 rows; planes of B stand side by side, `columns` rows each.
template <class Config> struct FewSides {
    static constexpr bool walk_weights = Config::walk == Walk::weights;
    static constexpr int P = walk_weights ? Config::weight_bits : Config::activation_bits;  // planes of A
    static constexpr int Q = walk_weights ? Config::activation_bits : Config::weight_bits;  // planes of B
    static constexpr int rows = 64, columns = Config::tokens;

    static PTX int a_stored(const Params& p) { return walk_weights ? p.rows_n : p.rows_m; }
    static PTX int b_stored(const Params& p) { return walk_weights ? p.rows_m : p.rows_n; }
};

// A thread has rows `row` and row + 8 of A and, of each of `eights` eights of columns, the pair that starts at `pair`.
template <class Config, int eights> struct FewTerms {
    using T = Terms<Config>;
    static constexpr bool walk_weights = FewSides<Config>::walk_weights;
    static constexpr int weight_count = walk_weights ? 2 : 2 * eights, token_count = walk_weights ? 2 * eights : 2;

    typename T::RowLoad weight_loads[weight_count];
    typename T::ColumnLoad token_loads[token_count];
    typename T::Row weights[weight_count];
    typename T::Column tokens[token_count];

    PTX void load_weights(const Params& p, int row, int pair) {
#pragma unroll
        for (int i = 0; i < weight_count; i++) weight_loads[i] = T::load_row(p, walk_weights ? row + 8 * i : pair + 8 * (i / 2) + i % 2);
    }
    // After griddepcontrol_wait.
    PTX void load_tokens(const Params& p, int row, int pair) {
#pragma unroll
        for (int i = 0; i < token_count; i++) token_loads[i] = T::load_column(p, walk_weights ? pair + 8 * (i / 2) + i % 2 : row + 8 * i);
    }
    // Once the products run: what was loaded is there.
    PTX void finish() {
#pragma unroll
        for (int i = 0; i < weight_count; i++) weights[i] = T::row(weight_loads[i]);
#pragma unroll
        for (int i = 0; i < token_count; i++) tokens[i] = T::column(token_loads[i]);
    }
};

#endif  // ANYBIT_BITWISE_FEW_CUH
