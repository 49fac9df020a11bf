// sm90_packed_skinny: compile-time traits, operand extraction, weight stages and activation loads.
#ifndef ANYBIT_SM90_PACKED_SKINNY_PARTS_CUH
#define ANYBIT_SM90_PACKED_SKINNY_PARTS_CUH

#include "common/types.cuh"
#include "packed/packed_layout.cuh"
#include "packed/packed_params.cuh"
#include "packed/packed_tables.cuh"

// split: 16-bit activations become two int8 planes (fixed point per k block), since an int8 MMA takes four codes
// per register where a 16-bit one takes two, and unpacking limits narrow weights.
using packed::Index;
using packed::unroll;

// Compile-time traits of a Config.
template <class C> struct Traits {
    static constexpr bool split = C::split;
    static constexpr bool integer = split || C::operand == Operand::s8;
    static constexpr bool source_bf16 = C::operand == Operand::bf16;
    static constexpr bool as_f16 = C::operand == Operand::f16 && !split, as_bf16 = source_bf16 && !split;
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
    static constexpr int planes = split ? 2 : 1, source_element = C::operand == Operand::s8 ? 1 : 2;
    static constexpr int element = integer ? 1 : 2, block_bytes = 128 * element;
    static constexpr int pitch = block_bytes + (C::tile_m * planes > 1 ? 16 : 0);  // padded: conflict-free ldmatrix
    static constexpr int tokens = C::tile_m, token_tiles = (C::tile_m * planes + 7) / 8;
    static constexpr int row_warps = C::warps / C::split_k_warps, units = C::row_units * C::row_chunks;  // per warp
    static constexpr int slot_bytes = tokens * planes * pitch + (split ? (tokens * 4 + 15) / 16 * 16 : 0);  // + token scales
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

template <bool integer> struct Number {
    using type = float;
};
template <> struct Number<true> {
    using type = int32_t;
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
        const uint32_t unit = from + r * T::unit_bytes, scales = unit + 256 * C::bits, zeros = scales + T::subgroups * 32;
        packed::load_words_shared<C::bits>(stage.words[r], unit, lane);
        UNROLL for (int i = 0; i < T::subgroups; i++) {
            stage.scales[r][i] = ptx::ld_shared_u32(scales + i * 32 + (lane >> 2) * 4);
            if constexpr (C::code == Code::asym)  // a word has four zeros, two of them this lane's: rows g and g + 8
                stage.zeros[r][i] = ptx::ld_shared_u32(zeros + i * 16 + (lane >> 3) * 4) >> ((lane >> 2) & 1) * 16;
            if constexpr (C::code == Code::min) stage.zeros[r][i] = ptx::ld_shared_u32(zeros + i * 32 + (lane >> 2) * 4);
        }
    }
}

// Splits a k block into two planes: x = scale * (256 high + low), scale a power of two per token. Within each 16
// columns byte 4t + e is column 2t + (e >> 1) + 8 (e & 1): the order in which 8-bit fields see the codes of 16-bit tiles.
template <class C>
DEVICE void split_activations(const Params& p, uint32_t slot, int k_block, uint32_t lane) {
    using T = Traits<C>;
    const uint16_t* x = reinterpret_cast<const uint16_t*>(p.x);
    uint32_t pairs[T::tokens][2];
    const int column = k_block * 128 + static_cast<int>(lane >> 2) * 16 + static_cast<int>(lane & 3) * 2;
    UNROLL for (int token = 0; token < T::tokens; token++)
        UNROLL for (int i = 0; i < 2; i++) {
            const bool inside = token < p.m && column + 8 * i < p.k;  // k is even
            pairs[token][i] = inside ? ptx::ld_global_cg_u32(x + static_cast<size_t>(token) * p.x_stride + column + 8 * i) : 0;
        }
    UNROLL for (int token = 0; token < T::tokens; token++) {
        uint32_t largest = 0;
        UNROLL for (int i = 0; i < 4; i++) {
            const uint32_t magnitude = (pairs[token][i / 2] >> (16 * (i % 2))) & 0x7fffu;
            largest = magnitude > largest ? magnitude : largest;
        }
        largest = ptx::redux_max(largest);
        constexpr int mantissa = T::source_bf16 ? 7 : 10, bias = T::source_bf16 ? 127 : 15;
        int exponent = static_cast<int>(largest >> mantissa) - bias;  // |x| < 2^(exponent + 1)
        const bool finite = exponent <= bias;
        exponent = exponent < -100 ? -100 : exponent;
        const float up = __uint_as_float(static_cast<uint32_t>(127 + 13 - exponent) << 23);
        int v[4], high[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const uint16_t bits = static_cast<uint16_t>(pairs[token][i / 2] >> (16 * (i % 2)));
            v[i] = static_cast<int>(rintf((T::source_bf16 ? ptx::cvt_f32_bf16(bits) : ptx::cvt_f32_f16(bits)) * up));
            high[i] = (v[i] + 128) >> 8;
        }
        // v[0], v[1]: columns 2t, 2t + 1; v[2], v[3]: the same plus 8.
        const uint32_t at = slot + token * (2 * T::pitch) + lane * 4;
        ptx::st_shared_u32(at, (high[0] & 255) | (high[2] & 255) << 8 | (high[1] & 255) << 16 | static_cast<uint32_t>(high[3]) << 24);
        ptx::st_shared_u32(at + T::pitch, (v[0] & 255) | (v[2] & 255) << 8 | (v[1] & 255) << 16 | static_cast<uint32_t>(v[3]) << 24);
        if (lane == 0)
            ptx::st_shared_f32(
                slot + T::tokens * 2 * T::pitch + token * 4,
                finite ? __uint_as_float(static_cast<uint32_t>(127 - 13 + exponent) << 23) : __uint_as_float(0x7fc00000u));
    }
}

// Loads a k block of the activations into a shared-memory slot: [token][128 columns], padded.
template <class C>
DEVICE void fetch_activations(const Params& p, uint32_t slot, int k_block, uint32_t lane) {
    using T = Traits<C>;
    static_assert(!T::split || !C::gather, "activations in another order are not split into planes");
    if constexpr (T::split) {
        split_activations<C>(p, slot, k_block, lane);
    } else if constexpr (C::gather) {  // any order of columns, any alignment
        for (int i = lane; i < T::tokens * (T::block_bytes / 4); i += 32) {
            const int token = i / (T::block_bytes / 4), word = i % (T::block_bytes / 4);
            uint32_t v = 0;
            if (token < p.m) {
                UNROLL for (int e = 0; e < 4 / T::element; e++) {
                    const int column = k_block * 128 + word * (4 / T::element) + e;
                    const int channel = p.permutation != nullptr ? p.permutation[column] : column < p.k ? column : -1;
                    if (channel >= 0) {
                        const size_t at = static_cast<size_t>(token) * p.x_stride + channel;
                        const uint32_t code =
                            T::integer ? p.x[at] : reinterpret_cast<const uint16_t*>(p.x)[at];
                        v |= code << (8 * T::element * e);
                    }
                }
            }
            ptx::st_shared_u32(slot + token * T::pitch + word * 4, v);
        }
    } else {
        // Rows past the last token stay stale: each only affects its own column of the MMA.
        constexpr int chunks = T::block_bytes / 16, step = 32 / chunks;
        const int first = static_cast<int>(lane) / chunks, at = k_block * T::block_bytes + static_cast<int>(lane) % chunks * 16;
        const int row_bytes = p.x_stride * T::element;
        const uint8_t* from = p.x + static_cast<size_t>(first) * row_bytes + at;
        const uint32_t to = slot + first * T::pitch + static_cast<int>(lane) % chunks * 16;
        const int left = p.k * T::element - at, valid = left < 0 ? 0 : left < 16 ? left : 16;
        UNROLL for (int i = 0; i < (T::tokens + step - 1) / step; i++)
            if (first + i * step < T::tokens && first + i * step < p.m) {
                if constexpr (C::ragged)
                    ptx::cp_async<16>(to + i * step * T::pitch, valid > 0 ? from + static_cast<size_t>(i * step) * row_bytes : p.x, valid);
                else
                    ptx::cp_async<16>(to + i * step * T::pitch, from + static_cast<size_t>(i * step) * row_bytes);
            }
    }
    if constexpr (!C::x_resident) ptx::cp_async_commit_group();
}

#endif
