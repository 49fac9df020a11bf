// sm90_packed_skinny: compile-time traits, operand extraction, weight stages and activation loads.
#ifndef ANYBIT_SM90_PACKED_SKINNY_PARTS_CUH
#define ANYBIT_SM90_PACKED_SKINNY_PARTS_CUH

#include "common/types.cuh"
#include "packed/packed_activations.cuh"
#include "packed/packed_layout.cuh"
#include "packed/packed_params.cuh"
#include "packed/packed_tables.cuh"

using packed::unroll;

// Compile-time traits of a Config.
template <class C> struct Traits {
    static constexpr bool integer = C::operand == Operand::s8, as_f16 = C::operand == Operand::f16, as_bf16 = C::operand == Operand::bf16;
    static constexpr int field = integer ? 8 : 16;
    // Bits of a field in which codes are exact: f16 subnormal 10, bf16 with offset 7, unsigned byte 8.
    static constexpr int limit = integer ? 8 : as_f16 ? 10 : 7;
    static constexpr bool table = packed::tabled(C::code);
    static constexpr bool exact_bf16 = as_bf16 && C::bits == 8 && !table;  // u - 128, computed
    static constexpr int steps = integer ? 4 : 8, steps_a_wide = steps / 4;
    static constexpr int subgroups = packed::subgroups(C::group), flushes = subgroups == 0 ? 1 : subgroups;
    static constexpr bool whole_rows = C::group == 0;
    static constexpr int unit_bytes = packed::unit_bytes(C::bits, C::group, C::code);
    static constexpr int stage_bytes = C::row_units * unit_bytes;
    static constexpr int words = 2 * C::bits;
    static constexpr int element = integer ? 1 : 2, block_bytes = 128 * element;
    static constexpr int pitch = block_bytes + (C::tile_m > 1 ? 16 : 0);  // padded: conflict-free ldmatrix
    static constexpr int tokens = C::tile_m, token_tiles = (C::tile_m + 7) / 8;
    static constexpr int row_warps = C::warps / C::split_k_warps, units = C::row_units * C::row_chunks;  // per warp
    static constexpr int slot_bytes = tokens * pitch;
    static constexpr int x_bytes = C::warps * C::x_stages * slot_bytes;
    // A warp's final sums reuse its ring.
    static constexpr int sums_bytes = units * 16 * tokens * 4;
    static constexpr int ring_bytes = ((C::stages * stage_bytes > sums_bytes ? C::stages * stage_bytes : sums_bytes) + 127) / 128 * 128;
    // The CTA's row scales and biases, and token scales: staged early for the epilogue.
    static constexpr int rows = units * 16, block_rows = row_warps * rows, factor_bytes = (block_rows * 8 + tokens * 4 + 127) / 128 * 128;
    static constexpr int barrier_bytes = (C::warps * C::stages * 8 + 127) / 128 * 128;

    // k32 steps per group. Groups of 16 (flushes == 8) end with a k16 step instead.
    static constexpr int wides_a_group = flushes == 8 ? 1 : 4 / flushes;
    static constexpr int group_of(int wide) { return wide / wides_a_group; }
    static constexpr bool ends_group(int wide) { return flushes < 8 && (wide + 1) % wides_a_group == 0; }

    static constexpr int bit(int step) { return table ? 0 : packed::cheapest_bit(C::bits, field, limit, step); }
    // Codes extracted at different bits are scaled by different powers of two: each bit has its own accumulators, a set.
    static constexpr int set(int step) {
        int found = 0;
        for (int s = 0; s < steps; s++) {
            bool before = false;
            for (int q = 0; q < s; q++) before = before || bit(q) == bit(s);
            if (bit(s) == bit(step)) return found;
            if (!before) found++;
        }
        return found;
    }
    static constexpr int sets() {
        int most = 0;
        for (int s = 0; s < steps; s++) most = set(s) > most ? set(s) : most;
        return most + 1;
    }
    // A set's steps rotate over accumulators (slots), so that at most `chain` MMAs depend on one another.
    static constexpr int slots_of_set(int index) {
        int found = 0;
        for (int s = 0; s < steps; s++) found += set(s) == index;
        return (found / flushes + C::chain - 1) / C::chain > 1 ? (found / flushes + C::chain - 1) / C::chain : 1;
    }
    static constexpr int first_slot(int index) {
        int before = 0;
        for (int i = 0; i < index; i++) before += slots_of_set(i);
        return before;
    }
    static constexpr int slot(int step) {
        int before = 0;
        for (int s = 0; s < step; s++) before += set(s) == set(step);
        return first_slot(set(step)) + before % slots_of_set(set(step));
    }
    static constexpr int slots() { return first_slot(sets()); }
    static constexpr int bit_of_set(int index) {
        for (int s = 0; s < steps; s++)
            if (set(s) == index) return bit(s);
        return 0;
    }
};

template <class C, class Num>
DEVICE void multiply(Num (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (Traits<C>::as_f16) ptx::mma_m16n8k16_f16(d, a, b);
    if constexpr (Traits<C>::as_bf16) ptx::mma_m16n8k16_bf16(d, a, b);
    if constexpr (Traits<C>::integer) ptx::mma_m16n8k32_u8s8(d, a, b);
}

// Register j of a unit as an MMA operand: its codes as numbers.
template <class C, int j, int words> DEVICE uint32_t operand(const uint32_t (&w)[words]) {
    using T = Traits<C>;
    if constexpr (T::table) return packed::table_pair<C::code, T::as_bf16, j>(w);
    constexpr int at = T::bit(j / 4);
    const uint32_t u = packed::codes<C::bits, T::field, j, at>(w);
    if constexpr (T::exact_bf16) {  // (128 + low seven bits) - (256 or 128) = u - 128
        return ptx::sub_bf16x2((u & 0x007f007fu) | 0x43004300u, (u & 0x00800080u) ^ 0x43804380u);
    } else if constexpr (Traits<C>::as_bf16) {
        return u | 0x43004300u;  // 128 + u * 2^at
    } else {
        return u;
    }
}

// One pipeline stage of a warp's weights in registers: `row_units` units of one k block.
template <class C> struct Stage {
    using T = Traits<C>;
    uint32_t words[C::row_units][T::words];
    uint32_t scales[C::row_units][T::flushes];
    uint32_t zeros[C::row_units][T::flushes];  // or minima
};

template <class C> DEVICE void read_stage(Stage<C>& stage, uint32_t from, uint32_t lane) {
    using T = Traits<C>;
    UNROLL for (int r = 0; r < C::row_units; r++) {
        const uint32_t unit = from + r * T::unit_bytes;
        packed::load_words_shared<C::bits>(stage.words[r], unit, lane);
        UNROLL for (int i = 0; i < T::subgroups; i++) {
            stage.scales[r][i] = packed::scales_of<C>(unit, i, lane);
            if constexpr (C::code == Code::asym || C::code == Code::min) stage.zeros[r][i] = packed::zeros_of<C>(unit, i, lane);
        }
    }
}

template <class C>
DEVICE void fetch_activations(const Params& p, uint32_t slot, int k_block, uint32_t lane) {
    packed::load_activations<C, Traits<C>::element, Traits<C>::pitch, 32>(p, slot, k_block, static_cast<int>(lane));
    if constexpr (!C::x_resident) ptx::cp_async_commit_group();
}

#endif
