// sm90_packed_gemv: launch parameters, code positions in operand words, activations as base-256 digits, and the per-unit
// MMA.
#ifndef ANYBIT_SM90_PACKED_GEMV_PARTS_CUH
#define ANYBIT_SM90_PACKED_GEMV_PARTS_CUH

#include "attention/kv_ring.cuh"
#include "common/types.cuh"
#include "packed/packed_params.cuh"
#include "packed/packed_tables.cuh"
#include "packed/sparse_layout.cuh"
#include "common/values.cuh"

// Fused RMSNorm(x + residual) W^T: every CTA normalizes the activations it reads anyway; CTA 0 stores the sum.
struct NormParams : Params {
    const uint16_t* residual;    // [m, k], row stride residual_stride, or null
    uint16_t* residual_sum;      // [m, k]: x + residual, written if there is a residual
    const uint16_t* gamma;       // [k]
    int32_t residual_stride;
    float epsilon, part;         // part: 1 / k
};

// Fused QKV projection: applies rotary embedding to q and k, and stores k and v in the 16-bit ring of a KV cache. Units of
// q and k hold eight channels of a head's first half and the eight of the second half that they rotate with.
// y: the queries [m, query_heads, head_dim].
struct RotaryParams : NormParams {
    const uint16_t* cosine;      // [m, head_dim]
    const uint16_t* sine;
    uint16_t* ring;              // [sequences, key_heads, 2, ring_tokens * head_dim]
    const int32_t* lengths;      // per sequence, new tokens included
    const int32_t* sequences;    // [m / new_tokens], or null for 0, 1, 2 ...
    int32_t query_heads, key_heads, head_dim, new_tokens, ring_tokens;

    // Rotation of channel c in half h of a token's heads.
    DEVICE uint16_t cosine_of(int token, int c, int h) const { return cosine[token * head_dim + c + h * head_dim / 2]; }
    DEVICE uint16_t sine_of(int token, int c, int h) const { return sine[token * head_dim + c + h * head_dim / 2]; }
    // Destination of a token's k and v: slot of its sequence's ring, -1 for none.
    DEVICE void place(int token, int& sequence, int& slot) const {
        const int row = token / new_tokens;
        sequence = sequences != nullptr ? sequences[row] : row;
        const int position = lengths[sequence] - new_tokens + token % new_tokens;
        slot = position < 0 ? -1 : position % ring_tokens;
    }
    DEVICE void store(int head, bool value, int sequence, int slot, const int (&c)[2], const uint16_t (&y)[2]) const {
        uint16_t* at = ring + ((static_cast<int64_t>(sequence) * key_heads + head) * 2 + value) * ring_tokens * head_dim;
        at[kv_ring::place(value, slot, c[0], head_dim)] = y[0];
        at[kv_ring::place(value, slot, c[1], head_dim)] = y[1];
    }
};

// The same for an external 16-bit paged cache (slot mapping: page and token within it).
struct RotaryPagesParams : NormParams {
    const uint16_t* table;       // [positions, head_dim]: cosines of half a head, then sines
    const int64_t* positions;    // [m]
    const int64_t* slots;        // [stored] slot mapping; negative, or past the end: not stored
    uint16_t* keys;              // [pages, page_tokens, key_heads, head_dim], strided
    uint16_t* values;
    int64_t page_stride, token_stride, head_stride;
    int32_t query_heads, key_heads, head_dim, page_tokens, stored;

    DEVICE uint16_t cosine_of(int token, int c, int) const { return table[positions[token] * head_dim + c]; }
    DEVICE uint16_t sine_of(int token, int c, int) const { return table[positions[token] * head_dim + head_dim / 2 + c]; }
    DEVICE void place(int token, int& page, int& slot) const {
        const int found = token < stored ? static_cast<int>(slots[token]) : -1;
        page = found / page_tokens;
        slot = found < 0 ? -1 : found % page_tokens;
    }
    DEVICE void store(int head, bool value, int page, int slot, const int (&c)[2], const uint16_t (&y)[2]) const {
        uint16_t* at = (value ? values : keys) + page * page_stride + slot * token_stride + head * head_stride;
        at[c[0]] = y[0], at[c[1]] = y[1];
    }
};

namespace packed {

// Sources of an operand word's bytes: two registers of 16-bit fields (row g's; row g + 8 has the next), and the bit of the
// byte at which their codes stay. `low` gives bytes 0 and 2, `high` bytes 1 and 3.
struct BytePair {
    int low, low_at, high, high_at;
};
// Word i = 2 * (k32 step) + half. Any pairing works if activations are permuted alike and groups keep their steps.
// Table codes become whole bytes.
constexpr BytePair byte_pair(int bits, int group, bool table, int i) {
    if (power_of_two(bits) && !table) return {4 * i, piece(bits, 16, 4 * i, 0).bit % 8, 4 * i + 2, piece(bits, 16, 4 * i + 2, 0).bit % 8};
    const bool free = group == 0 || group >= tile_columns;
    if (bits == 3 && free) {  // a field holds codes at bits 0, 3, 6, 9 and 12, and one spare bit
        if (i < 3) return {2 * i, 0, 18 + 2 * i, 1};
        if (i < 6) return {2 * i, 3, 18 + 2 * i, 4};
        return i == 6 ? BytePair{12, 0, 14, 0} : BytePair{16, 0, 30, 0};
    }
    if (bits == 5 && free) {  // codes at bits 0, 5 and 10, and one spare bit
        if (i < 5) return {2 * i, 0, 20 + 2 * i, 2};
        return i == 5 ? BytePair{10, 0, 12, 0} : i == 6 ? BytePair{14, 0, 16, 0} : BytePair{18, 0, 30, 0};
    }
    return {4 * i, 0, 4 * i + 2, 0};
}
constexpr int column_of(int j) { return 16 * (j >> 2) + 8 * ((j >> 1) & 1); }

// Compile-time shape of a Config.
template <class C> struct DigitShape {
    static constexpr int groups = subgroups(C::group), flushes = groups == 0 ? 1 : groups;
    static constexpr bool whole_rows = C::group == 0, table = tabled(C::code), sparse = is_sparse<C>();
    // Tables of non-integers use fp16 MMA, see FloatProduct: each of `spread` groups has `wide` columns to itself.
    static constexpr bool floats = table && !tabled_integers(C::code);
    static constexpr int wide = C::tile_m < 2 ? 2 : C::tile_m, spread = least(flushes, 8 / wide);
    using Codes = typename CodesOf<sparse, C::bits>::type;
    static constexpr int unit_size = unit_bytes_of<C>();
    static constexpr int stage_bytes = C::stage_units * unit_size, units = C::stage_units * C::chunks, rows = units * 16;
    static constexpr int top() {
        if (sparse || floats) return 0;
        int most = C::code == Code::bipolar ? 1 : 0;  // makes the half-integer zero an integer
        for (int i = 0; i < 8; i++) {
            const BytePair pair = byte_pair(C::bits, C::group, table, i);
            most = pair.low_at > most ? pair.low_at : most, most = pair.high_at > most ? pair.high_at : most;
        }
        return most;
    }
    static constexpr int columns = floats ? 1 : top() == 0 ? 2 : 4;  // MMA columns (digits) per token
    static constexpr int log2_of_code = sparse ? 8 - C::bits : top();  // log2 of the codes' scale
    static constexpr int token_tiles = floats ? least(C::tile_m, 2) : (C::tile_m * columns + 7) / 8, pitch = (floats ? 256 : 128) + 16;
    static constexpr int facts = C::tile_m * columns * pitch;  // in a slot, behind the digits: scale, sum; floats: 16 zero bytes, scales
    static constexpr int slot_bytes = (facts + (floats ? 16 + C::tile_m * 4 : C::tile_m * flushes * 8) + 15) / 16 * 16;
    static constexpr int ring_bytes = (C::stages * stage_bytes > C::tile_m * rows * 4 ? C::stages * stage_bytes : C::tile_m * rows * 4) + 127 & ~127;
    static constexpr int slots = C::warps * ring_bytes, factors = slots + C::warps * C::x_stages * slot_bytes;
    static constexpr int barriers = factors + rows * 8, bytes = barriers + C::warps * C::stages * 8;
    // Packs eight numbers below 256 into one constant; the i-th is for lanes 4i to 4i + 3.
    template <class F> static constexpr uint64_t eight(F&& of) {
        uint64_t all = 0;
        for (int i = 0; i < 8; i++) all |= static_cast<uint64_t>(of(byte_pair(C::bits, C::group, table, i))) << (8 * i);
        return all;
    }
};
struct LowColumn { constexpr int operator()(BytePair p) const { return column_of(p.low); } };
struct HighColumn { constexpr int operator()(BytePair p) const { return column_of(p.high); } };
template <int top> struct LowShift { constexpr int operator()(BytePair p) const { return top - p.low_at; } };
template <int top> struct HighShift { constexpr int operator()(BytePair p) const { return top - p.high_at; } };

// Twice the implied zero point.
template <class C> constexpr int twice_zero() {
    if constexpr (tabled_integers(C::code)) return 2 * ByteTable<C::code>::zero;
    return C::code == Code::bipolar ? (1 << C::bits) - 1 : 1 << C::bits;
}

// A lane's part of a k block of activations (four values per token), from global memory to a shared-memory slot.
template <class C> struct Incoming {
    using S = DigitShape<C>;
    uint32_t pairs[C::tile_m][2];

    // The lane's two column pairs in a k block: those that meet the `low` and `high` fields.
    static DEVICE void columns(int (&found)[2], uint32_t lane) {
        if constexpr (S::sparse || S::floats) {
            found[0] = static_cast<int>(lane) * 4, found[1] = found[0] + 2;
            return;
        }
        constexpr uint64_t low = S::eight(LowColumn{}), high = S::eight(HighColumn{});
        const uint32_t i = lane >> 2;
        found[0] = static_cast<int>(low >> (8 * i) & 255) + static_cast<int>(lane & 3) * 2;
        found[1] = static_cast<int>(high >> (8 * i) & 255) + static_cast<int>(lane & 3) * 2;
    }

    // Loads four adjacent columns per lane (coalesced); `deal` then shuffles them to the lanes that need them.
    DEVICE void load(const Params& p, int k_block, uint32_t lane) {
        UNROLL for (int token = 0; token < C::tile_m; token++) {
            const uint16_t* x = reinterpret_cast<const uint16_t*>(p.x) + static_cast<size_t>(token) * p.x_stride;
            pairs[token][0] = pairs[token][1] = 0;
            if (token < p.m) load_row(token, x, p.k, p.permutation, k_block, lane);
        }
    }
    // The same of one token, whose row is x, over zeros.
    DEVICE void load_row(int token, const uint16_t* x, int k, const int32_t* permutation, int k_block, uint32_t lane) {
        if constexpr (C::gather) {  // any order of columns, any alignment
            int at[2];
            columns(at, lane);
            UNROLL for (int e = 0; e < 4; e++) {
                const int column = k_block * 128 + at[e >> 1] + (e & 1);
                const int channel = permutation != nullptr ? permutation[column] : column < k ? column : -1;
                if (channel >= 0) pairs[token][e >> 1] |= static_cast<uint32_t>(x[channel]) << (16 * (e & 1));
            }
        } else {
            const int column = k_block * 128 + static_cast<int>(lane) * 4;
            if (!C::ragged || column + 4 <= k) {
                const uint2 v = ptx::ld_global_cg_v2(x + column);
                pairs[token][0] = v.x, pairs[token][1] = v.y;
            } else {
                UNROLL for (int e = 0; e < 4; e++)
                    if (column + e < k) pairs[token][e >> 1] |= static_cast<uint32_t>(x[column + e]) << (16 * (e & 1));
            }
        }
    }

    DEVICE void deal(uint32_t lane) {
        if constexpr (!C::gather && !S::sparse) {
            int at[2];
            columns(at, lane);
            UNROLL for (int token = 0; token < C::tile_m; token++) {
                uint32_t mine[2];
                UNROLL for (int h = 0; h < 2; h++) {
                    const uint32_t even = ptx::shfl(pairs[token][0], at[h] / 4), odd = ptx::shfl(pairs[token][1], at[h] / 4);
                    mine[h] = at[h] & 2 ? odd : even;
                }
                pairs[token][0] = mine[0], pairs[token][1] = mine[1];
            }
        }
    }

    // Deals and converts.
    DEVICE void store(uint32_t slot, uint32_t lane, uint32_t there = ~0u) {
        if constexpr (!S::floats) deal(lane);
        convert(slot, lane, there);
    }
    // Converts to fixed point, x = scale * v (v: 14 bits and sign, scale: a power of two), and stores the digits of
    // v * 2^shift, the scale, and the zero-point term or the sum that minima multiply. there: tokens, a bit each; zeros for others.
    DEVICE void convert(uint32_t slot, uint32_t lane, uint32_t there = ~0u) {
        if constexpr (S::floats) {
            UNROLL for (int token = 0; token < C::tile_m; token++) {
                if constexpr (C::operand == Operand::bf16) {
                    const float scale = values::halve_warp<true>(pairs[token]);
                    if (lane == 0) ptx::st_shared_f32(slot + S::facts + 16 + token * 4, scale);
                }
                ptx::st_shared_v2(slot + token * S::pitch + lane * 8, {pairs[token][0], pairs[token][1]});
            }
            if (lane < 4) ptx::st_shared_u32(slot + S::facts + lane * 4, 0);
            return;
        }
        constexpr int top = S::top();
        constexpr uint64_t low = S::eight(LowShift<top>{}), high = S::eight(HighShift<top>{});
        constexpr int mantissa = C::operand == Operand::bf16 ? 7 : 10, bias = C::operand == Operand::bf16 ? 127 : 15;
        const uint32_t i = lane >> 2, shifts[2] = {S::sparse ? 0 : static_cast<uint32_t>(low >> (8 * i) & 255),
                                                   S::sparse ? 0 : static_cast<uint32_t>(high >> (8 * i) & 255)};
        uint32_t largest[C::tile_m];
        UNROLL for (int token = 0; token < C::tile_m; token++) {
            largest[token] = 0;
            if (!(there >> token & 1)) continue;
            UNROLL for (int e = 0; e < 4; e++) {
                const uint32_t magnitude = (pairs[token][e >> 1] >> (16 * (e & 1))) & 0x7fffu;
                largest[token] = magnitude > largest[token] ? magnitude : largest[token];
            }
            largest[token] = ptx::redux_max(largest[token]);
        }
        UNROLL for (int token = 0; token < C::tile_m; token++) {
            if (!(there >> token & 1)) {
                UNROLL for (int column = 0; column < S::columns; column++)
                    ptx::st_shared_u32(slot + (token * S::columns + column) * S::pitch + lane * 4, 0);
                if (lane < S::flushes) ptx::st_shared_v2(slot + S::facts + (token * S::flushes + lane) * 8, {0, 0});
                continue;
            }
            int exponent = static_cast<int>(largest[token] >> mantissa) - bias;  // |x| < 2^(exponent + 1)
            const bool finite = exponent <= bias;
            exponent = exponent < -100 ? -100 : exponent;
            const float up = __uint_as_float(static_cast<uint32_t>(127 + 13 - exponent) << 23);
            uint32_t digits[4];
            int sum = 0;
            UNROLL for (int e = 0; e < 4; e++) {
                const uint16_t bits = static_cast<uint16_t>(pairs[token][e >> 1] >> (16 * (e & 1)));
                // Adding 1.5 * 2^23 rounds to an integer in the low bits, without the slow F2I.
                const float rounded = fmaf(C::operand == Operand::bf16 ? ptx::cvt_f32_bf16(bits) : ptx::cvt_f32_f16(bits), up, 12582912.0f);
                const int v = static_cast<int>(__float_as_uint(rounded)) - 0x4b400000;
                sum += v;
                // Signed digits of v: + 0x80 carries into the next digit, and ^ 0x80 below makes the byte signed.
                digits[e] = (static_cast<uint32_t>(v) << shifts[e >> 1]) + (S::columns > 2 ? 0x8080u : 0x80u);
            }
            // Bytes 0 and 2 of a word meet the `low` fields, 1 and 3 the `high` ones; sparse weights: in order.
            const uint32_t first = ptx::prmt(digits[0], digits[2], 0x5410), second = ptx::prmt(digits[1], digits[3], 0x5410);
            const uint32_t at = slot + token * (S::columns * S::pitch) + lane * 4;
            ptx::st_shared_u32(at, ptx::prmt(first, second, S::sparse ? 0x6240 : 0x6420) ^ 0x80808080u);
            ptx::st_shared_u32(at + S::pitch, ptx::prmt(first, second, S::sparse ? 0x7351 : 0x7531) ^ (S::columns > 2 ? 0x80808080u : 0));
            if constexpr (S::columns > 2) {
                const uint32_t third = ptx::prmt(digits[0], digits[2], 0x0062), fourth = ptx::prmt(digits[1], digits[3], 0x0062);
                ptx::st_shared_u32(at + 2 * S::pitch, ptx::prmt(third, fourth, 0x5410));
                ptx::st_shared_u32(at + 3 * S::pitch, 0);
            }
            const float scale = finite ? __uint_as_float(static_cast<uint32_t>(127 - 13 + exponent - S::log2_of_code) << 23) : __uint_as_float(0x7fc00000u);
            // Sums per group, whose columns lie in adjacent lanes. None for sparse weights: each row keeps other columns.
            constexpr int lanes = 32 / S::flushes;
            if constexpr (S::sparse) sum = 0;
            else if constexpr (S::flushes == 1) sum = static_cast<int>(ptx::redux_add(static_cast<uint32_t>(sum)));
            else
                UNROLL for (int step = 1; step < lanes; step *= 2) sum += ptx::shfl_xor(sum, step);
            if (lane % lanes == 0) {
                constexpr int zero2 = twice_zero<C>();
                constexpr int one = 1 << top, subtract = C::code == Code::asym ? one : top > 0 ? one / 2 * zero2 : zero2 / 2;
                uint32_t fact = static_cast<uint32_t>(-subtract * sum);
                if constexpr (C::code == Code::min) fact = __float_as_uint(scale * one * static_cast<float>(sum));
                ptx::st_shared_v2(slot + S::facts + (token * S::flushes + lane / lanes) * 8, {__float_as_uint(scale), fact});
            }
        }
    }
};

// Operand word i of row g (0) or g + 8 (1), codes at their cheapest bits.
template <class C, int i, int row, int words>
DEVICE uint32_t byte_codes(const uint32_t (&w)[words], const ByteTable<C::code>& table) {
    constexpr BytePair pair = byte_pair(C::bits, C::group, tabled(C::code), i);
    if constexpr (tabled_integers(C::code)) {
        constexpr Piece at = piece(C::bits, 16, pair.low + row, 0);
        return table.halves(w[at.word], (at.bit & 4) != 0);
    }
    return codes<C::bits, 16, pair.low + row, pair.low_at>(w) | codes<C::bits, 16, pair.high + row, 8 + pair.high_at>(w);
}

// A k block of activations as B fragments, and the MMA of a unit with it.
template <class C> struct DigitProduct {
    using S = DigitShape<C>;
    uint32_t b[S::token_tiles][8];
    int32_t subtract[S::token_tiles][S::flushes];  // zero-point term: first column of each token, else 0; min: float bits
    float scale[S::token_tiles];

    DEVICE void take(uint32_t slot, uint32_t lane) {
        UNROLL for (int n = 0; n < S::token_tiles; n++) {
            const uint32_t row = (n * 8 + (lane & 7)) % (C::tile_m * S::columns);
            UNROLL for (int half = 0; half < 2; half++) {
                uint32_t r[4];
                ptx::ldmatrix_x4(r, slot + row * S::pitch + half * 64 + (lane >> 3) * 16);
                UNROLL for (int i = 0; i < 4; i++) b[n][half * 4 + i] = r[i];
            }
            const uint32_t column = n * 8 + (lane & 3) * 2, token = column / S::columns % C::tile_m;
            UNROLL for (int f = 0; f < S::flushes; f++) {
                const uint2 fact = ptx::ld_shared_v2(slot + S::facts + (token * S::flushes + f) * 8);
                scale[n] = __uint_as_float(fact.x);
                subtract[n][f] = column % S::columns == 0 ? static_cast<int32_t>(fact.y) : 0;
            }
        }
    }

    DEVICE void add(float (&sums)[S::token_tiles][2], uint32_t unit, uint32_t lane, uint32_t row_zeros,
                                        const ByteTable<C::code>& table) const {
        if constexpr (S::sparse) return add_kept(sums, unit, lane, row_zeros);
        else add_dense(sums, unit, lane, row_zeros, table);
    }

    DEVICE void add_dense(float (&sums)[S::token_tiles][2], uint32_t unit, uint32_t lane, uint32_t row_zeros,
                                              const ByteTable<C::code>& table) const {
        uint32_t words[2 * C::bits];
        load_words_shared<C::bits>(words, unit, lane);
        unroll<0, S::flushes>([&](auto which) {
            constexpr int f = decltype(which)::value;
            uint32_t pair = 0, zeros = row_zeros;  // or minima
            if constexpr (!S::whole_rows) {
                pair = scales_of<C>(unit, f, lane);
                if constexpr (C::code == Code::asym || C::code == Code::min) zeros = zeros_of<C>(unit, f, lane);
            }
            int32_t part[S::token_tiles][4];
            UNROLL for (int n = 0; n < S::token_tiles; n++) {
                const int32_t start = C::code == Code::asym || C::code == Code::min ? 0 : subtract[n][f];
                part[n][0] = part[n][2] = start, part[n][1] = part[n][3] = 0;
            }
            if constexpr (S::flushes == 8) {  // groups of 16: one word per row, k16
                const uint32_t a[2] = {byte_codes<C, f, 0>(words, table), byte_codes<C, f, 1>(words, table)};
                UNROLL for (int n = 0; n < S::token_tiles; n++) ptx::mma_m16n8k16_u8s8(part[n], a, b[n][f]);
            } else unroll<f * 4 / S::flushes, (f + 1) * 4 / S::flushes>([&](auto index) {
                constexpr int step = decltype(index)::value;
                const uint32_t a[4] = {byte_codes<C, 2 * step, 0>(words, table), byte_codes<C, 2 * step, 1>(words, table),
                                       byte_codes<C, 2 * step + 1, 0>(words, table), byte_codes<C, 2 * step + 1, 1>(words, table)};
                UNROLL for (int n = 0; n < S::token_tiles; n++) {
                    const uint32_t digits[2] = {b[n][2 * step], b[n][2 * step + 1]};
                    ptx::mma_m16n8k32_u8s8(part[n], a, digits);
                }
            });
            UNROLL for (int n = 0; n < S::token_tiles; n++)
                UNROLL for (int r = 0; r < 2; r++) {
                    int32_t v = part[n][2 * r] + part[n][2 * r + 1] * 256;
                    if constexpr (C::code == Code::asym) v += static_cast<int32_t>(zeros >> (8 * r) & 255) * subtract[n][f];
                    const float w = S::whole_rows ? 1.0f : ptx::cvt_f32_f16(static_cast<uint16_t>(pair >> (16 * r)));
                    sums[n][r] = fmaf(w * scale[n], static_cast<float>(v), sums[n][r]);
                    if constexpr (C::code == Code::min) {
                        const float minimum = ptx::cvt_f32_f16(static_cast<uint16_t>(zeros >> (16 * r)));
                        sums[n][r] = fmaf(minimum, __uint_as_float(subtract[n][f]), sums[n][r]);
                    }
                }
        });
    }

    // 2:4 sparse weights, in tiles made for 16-bit MMA: an operand word's four kept columns are in two lanes there. Codes
    // become two's complement u - 2^(b-1) in the top bits of their bytes. Zero points take a second mma.sp with the row's
    // metadata, of the complement of z - 2^(b-1), which is one too small: codes are one larger in turn.
    DEVICE void add_kept(float (&sums)[S::token_tiles][2], uint32_t unit, uint32_t lane, uint32_t row_zeros) const {
        static_assert(C::code != Code::bipolar && S::columns == 2, "codes of 2:4 sparse weights");
        constexpr bool asym = C::code == Code::asym;
        const uint32_t g = lane >> 2, t = lane & 3;
        uint32_t words[C::bits];
        {
            uint32_t low[C::bits], high[C::bits];
            S::Codes::load(low, unit, g * 4 + (t & 1) * 2);
            S::Codes::load(high, unit, g * 4 + (t & 1) * 2 + 1);
            UNROLL for (int i = 0; i < C::bits; i++) words[i] = ptx::prmt(low[i], high[i], t & 2 ? 0x7531 : 0x6420);
        }
        uint32_t metadata[2];
        UNROLL for (int half = 0; half < 2; half++) {
            const uint2 both = ptx::ld_shared_v2(unit + 128 * C::bits + half * 128 + g * 16 + (t >> 1) * 8);
            metadata[half] = ptx::prmt(both.x, both.y, t & 1 ? 0x7632 : 0x5410);
        }
        unroll<0, S::flushes>([&](auto which) {
            constexpr int f = decltype(which)::value;
            uint32_t pair = 0, zeros = row_zeros, mine = 0;  // mine: PRMT selector of row g's byte of zeros
            if constexpr (!S::whole_rows) {
                pair = ptx::ld_shared_u32(unit + S::Codes::bytes + f * 32 + g * 4);
                if constexpr (asym) zeros = ptx::ld_shared_u32(unit + S::Codes::bytes + S::groups * 32 + f * 16 + (g >> 1) * 4), mine = (g & 1) * 0x2222u;
            }
            zeros = zeros << S::log2_of_code ^ 0x7f7f7f7fu;
            const uint32_t less[2] = {ptx::prmt(zeros, 0, mine), ptx::prmt(zeros, 0, mine + 0x1111)};
            int32_t part[S::token_tiles][4] = {};
            // k is 64: with groups of 32, each group's MMA has the other group's values zeroed.
            unroll<f * 2 / S::flushes, S::flushes == 4 ? f / 2 + 1 : (f + 1) * 2 / S::flushes>([&](auto index) {
                constexpr int half = decltype(index)::value;
                constexpr bool low = S::flushes < 4 || f % 2 == 0, high = S::flushes < 4 || f % 2 == 1;
                const auto add = [&](uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
                    const uint32_t bytes[4] = {low ? a : 0, low ? b : 0, high ? c : 0, high ? d : 0};
                    UNROLL for (int n = 0; n < S::token_tiles; n++) {
                        const uint32_t digits[4] = {this->b[n][4 * half], this->b[n][4 * half + 1], this->b[n][4 * half + 2], this->b[n][4 * half + 3]};
                        ptx::mma_sp_m16n8k64_s8(part[n], bytes, digits, metadata[half]);
                    }
                };
                add(high_codes<4 * half>(words), high_codes<4 * half + 1>(words), high_codes<4 * half + 2>(words), high_codes<4 * half + 3>(words));
                if constexpr (asym) add(less[0], less[1], less[0], less[1]);
                if constexpr (asym && C::bits == 8) add(0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u);
            });
            UNROLL for (int n = 0; n < S::token_tiles; n++)
                UNROLL for (int r = 0; r < 2; r++) {
                    const int32_t v = part[n][2 * r] + part[n][2 * r + 1] * 256;
                    const float w = S::whole_rows ? 1.0f : ptx::cvt_f32_f16(static_cast<uint16_t>(pair >> (16 * r)));
                    sums[n][r] = fmaf(w * scale[n], static_cast<float>(v), sums[n][r]);
                }
        });
    }
    template <int j> static DEVICE uint32_t high_codes(const uint32_t (&words)[C::bits]) {
        return KeptCodes<C::bits>::template highest<j, C::code == Code::asym && C::bits < 8 ? 0x81818181u : 0x80808080u>(words);
    }
};

// The same for codes that become fp16, as bf16 activations do, times a scale. A token needs one of the MMA's eight columns, so up
// to four groups go side by side in columns of their own, whose activations are zero outside the group: each sum meets its
// scale once, and the groups add up in the final reduction. Two accumulator chains.
template <class C> struct FloatProduct {
    using S = DigitShape<C>;
    static constexpr bool bf16 = C::operand == Operand::bf16;
    uint32_t b[8][2];
    float scale[S::token_tiles];

    DEVICE void take(uint32_t slot, uint32_t lane) {
        const int token = static_cast<int>(lane & 7) % S::wide, part = static_cast<int>(lane & 7) / S::wide;
        UNROLL for (int i = 0; i < 4; i++) {
            const int step = 2 * i + static_cast<int>(lane >> 4), group = step * S::flushes / 8;
            const bool mine = token < C::tile_m && group % S::spread == part;
            uint32_t r[4];
            ptx::ldmatrix_x4(r, mine ? slot + token * S::pitch + step * 32 + (lane >> 3 & 1) * 16 : slot + S::facts);
            b[2 * i][0] = r[0], b[2 * i][1] = r[1], b[2 * i + 1][0] = r[2], b[2 * i + 1][1] = r[3];
        }
        if constexpr (bf16)
            UNROLL for (int e = 0; e < S::token_tiles; e++) scale[e] = ptx::ld_shared_f32(slot + S::facts + 16 + ((lane & 3) * 2 + e) % S::wide % C::tile_m * 4);
    }

    DEVICE void add(float (&sums)[S::token_tiles][2], uint32_t unit, uint32_t lane, uint32_t, const ByteTable<C::code>&) const {
        uint32_t words[2 * C::bits];
        load_words_shared<C::bits>(words, unit, lane);
        float block[S::token_tiles][2] = {}, (&total)[S::token_tiles][2] = bf16 ? block : sums;
        unroll<0, S::flushes / S::spread>([&](auto which) {
            constexpr int flush = decltype(which)::value, steps = 8 * S::spread / S::flushes;
            float sum[2][4] = {};
            unroll<flush * steps, (flush + 1) * steps>([&](auto index) {
                constexpr int step = decltype(index)::value;
                uint32_t a[4];
                table_step<C::code, step>(a, words);
                ptx::mma_m16n8k16_f16(sum[step & 1], a, b[step]);
            });
            uint32_t pair = 0x3c003c00u;
            if constexpr (!S::whole_rows)
                pair = ptx::ld_shared_u32(unit + S::Codes::bytes + (flush * S::spread + (lane & 3) * 2 / S::wide % S::spread) * 32 + (lane >> 2) * 4);
            UNROLL for (int r = 0; r < 2; r++) {
                const float of_group = ptx::cvt_f32_f16(static_cast<uint16_t>(pair >> (16 * r)));
                UNROLL for (int e = 0; e < S::token_tiles; e++) total[e][r] = fmaf(of_group, sum[0][2 * r + e] + sum[1][2 * r + e], total[e][r]);
            }
        });
        if constexpr (bf16)
            UNROLL for (int i = 0; i < 2 * S::token_tiles; i++) sums[i / 2][i % 2] = fmaf(scale[i / 2], block[i / 2][i % 2], sums[i / 2][i % 2]);
    }
};

// Combines a token's digits, or groups side by side, and stores a warp's sums: [token][row] in shared memory at `to`.
template <class C> DEVICE void store_sums(const float (&sums)[DigitShape<C>::units][DigitShape<C>::token_tiles][2], uint32_t to, uint32_t lane) {
    using S = DigitShape<C>;
    const float place = S::columns > 2 && (lane & 1) ? 65536.0f : 1.0f;
    UNROLL for (int u = 0; u < S::units; u++)
        UNROLL for (int n = 0; n < S::token_tiles; n++)
            UNROLL for (int r = 0; r < 2; r++) {
                float v = sums[u][n][r] * place;
                if constexpr (S::floats) {
                    UNROLL for (int step = S::wide / 2; step < S::wide / 2 * S::spread; step *= 2) v += ptx::shfl_xor(v, step);
                } else if constexpr (S::columns > 2) {
                    v += ptx::shfl_xor(v, 1);
                }
                const uint32_t column = S::floats ? (lane & 3) * 2 + n : n * 8 + (lane & 3) * 2, token = column / S::columns;
                if (column % S::columns == 0 && token < C::tile_m)
                    ptx::st_shared_f32(to + (token * S::rows + u * 16 + r * 8 + (lane >> 2)) * 4, v);
            }
}

}  // namespace packed

#endif  // ANYBIT_SM90_PACKED_GEMV_PARTS_CUH
