// Stores new tokens of K and V: the newest in the 16-bit residual, and every block that became full as codes in its page.
//
// One block of threads does the keys or the values of one block of tokens of one KV head. The arithmetic is that of
// kvpage.quantize, so that pages are the same bit for bit wherever they are made.
#ifndef ANYBIT_KVPACK_CUH
#define ANYBIT_KVPACK_CUH

#include "kvpage.cuh"

namespace kvpack {

struct Params {
    const uint16_t* k;         // [batch, tokens, kv_heads, head_dim] with the strides below, in elements
    const uint16_t* v;
    uint8_t* pages;            // of this layer: [pages, kv_heads, page_bytes]
    uint16_t* residual;        // of this layer: [sequences, kv_heads, 2, ring * head_dim]
    const int32_t* table;
    const int32_t* lengths;    // the new tokens included
    const int32_t* sequences;  // [batch], or null for 0, 1, 2 ...
    int64_t k_batch_stride;
    int64_t v_batch_stride;
    int32_t k_token_stride;
    int32_t k_head_stride;
    int32_t v_token_stride;
    int32_t v_head_stride;
    int32_t tokens;            // new tokens of each sequence
    int32_t kv_heads;
    int32_t table_width;
    int32_t ring;
    int32_t window;
    int32_t packs;             // whether to pack full windows
    int32_t keeps;             // whether to write the residual
    int32_t pages_count;
    int32_t sequences_count;
    uint32_t* errors;          // checked kernels: what was wrong, or 0
    int32_t stored;            // the new tokens are in the residual already, and k and v are not read
};

// One half (keys or values) of one sequence and head: where its tokens come from and go to.
template <class Config> struct Tokens {
    const uint16_t* fresh;
    uint16_t* ring;
    int token_stride, ring_tokens, old;
    int begin, slot;  // of the block to pack: its first token, and where that would be in the ring
    int page;         // looked at only when the tokens are on their way
    bool values;

    PTX const uint16_t* of_fresh(int token, int channel) const {
        return fresh + static_cast<int64_t>(token - old) * token_stride + channel;
    }
    // Where slot s, channel c of the ring lies; see kvpage.ring_places.
    PTX int place(int s, int c) const {
        const int tile = s / 16 * (Config::head_dim / 16) + c / 16;
        return values ? (tile * 32 + c % 8 * 4 + s % 8 / 2) * 8 + (s % 16 / 8 * 2 + c % 16 / 8) * 2 + s % 2
                      : (tile * 32 + s % 8 * 4 + c % 16 / 4) * 8 + (c % 4 / 2 * 2 + s % 16 / 8) * 2 + c % 2;
    }
};

// Sixteen tokens as they lie in the registers of a warp, lane = 4 * g + t: a word is two channels of one token.
//   keys    x[h][j][p]: token g + 8 * h, channels 16 * j + 4 * t + 2 * p and the next
//   values  x[p][m]:    token g + 8 * p, channels 8 * m + 2 * t and the next; movmatrix makes tokens of it
// A warp reads each element once, from memory or from the ring, finds the ranges in its registers, and writes words.
template <class Config> struct Packer {
    using S = kvpage::Format<Config>;
    using From = Tokens<Config>;
    static constexpr int warps = Config::threads / 32, depth = Config::head_dim / 16;
    static constexpr int span = Config::head_dim > 128 ? 128 : Config::head_dim;  // channels of values that go together
    static constexpr int pitch = span * 2 + 16;          // bytes of a token that passes through shared memory
    static constexpr int bytes = warps * (16 * pitch + 16);
    // Threads that a multiprocessor holds at once, as many as the registers allow.
    static constexpr int together = Config::by_channel && S::groups == 1 && !Config::bf16 ? 1024 : S::groups <= 2 && Config::head_dim <= 128 ? 768 : 512;
    static_assert(bytes <= Config::shared_bytes, "kvpack.py gives the kernel less shared memory than it lays out");

    // ---- where the tokens are; `token` counts from the block's first
    PTX static const uint16_t* row(const From& from, int token) {  // not in the ring any more
        return from.fresh + static_cast<int64_t>(from.begin - from.old + token) * from.token_stride;
    }
    PTX static void ring_tile(uint32_t (&w)[4], const From& from, int token, int j) {  // token: the tile's first
        int slot = from.slot + token;
        if (slot >= from.ring_tokens) slot -= from.ring_tokens;
        const uint4 v = *reinterpret_cast<const uint4*>(from.ring + slot * Config::head_dim + (j * 32 + threadIdx.x % 32) * 8);
        w[0] = v.x; w[1] = v.y; w[2] = v.z; w[3] = v.w;
    }
    // `tiles` times sixteen tokens from `token` on, sixteen channels.
    template <int tiles> PTX static void load_keys(uint32_t (&x)[tiles][2][2], const From& from, int token, int j) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        if (from.old <= from.begin + token) {  // all new: a prompt
            const uint16_t* at = row(from, token + g) + 16 * j + 4 * t;
            const int64_t step = static_cast<int64_t>(8) * from.token_stride;
#pragma unroll
            for (int i = 0; i < 2 * tiles; ++i) {
                const uint2 v = *reinterpret_cast<const uint2*>(at + i * step);
                x[i / 2][i % 2][0] = v.x; x[i / 2][i % 2][1] = v.y;
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < tiles; ++i) {
            const int held = from.old - from.begin - token - 16 * i;
            uint2 fresh[2] = {};  // asked for first: nothing waits for the ring before it is
            if (held < 16)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if (g + 8 * h >= held) fresh[h] = *reinterpret_cast<const uint2*>(row(from, token + 16 * i + g + 8 * h) + 16 * j + 4 * t);
            uint32_t w[4] = {};
            if (held > 0) ring_tile(w, from, token + 16 * i, j);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const bool is_fresh = g + 8 * h >= held;
                x[i][h][0] = is_fresh ? fresh[h].x : w[h];
                x[i][h][1] = is_fresh ? fresh[h].y : w[2 + h];
            }
        }
    }
    // Channels `first` to `first + span` - 1 of sixteen tokens, by way of shared memory.
    PTX static void load_values(uint32_t (&x)[2][span / 8], const From& from, int token, int first) {
        const int lane = threadIdx.x % 32, g = lane / 4, held = from.old - from.begin - token;
        const uint32_t stage = ptx::shared_address(ptx::dynamic_shared()) + threadIdx.x / 32 * (16 * pitch);
        if (held < 16) {
            constexpr int pieces = span / 8;  // of a token, sixteen bytes each
            __syncwarp();
            if (held <= 0 && 32 % pieces == 0) {  // all new: a prompt
                const uint16_t* at = row(from, token + lane / pieces) + first + lane % pieces * 8;
                const int64_t step = static_cast<int64_t>(32 / pieces) * from.token_stride;
#pragma unroll
                for (int i = 0; i < 16 * pieces / 32; ++i)
                    ptx::cp_async<16>(stage + (lane / pieces + i * (32 / pieces)) * pitch + lane % pieces * 16, at + i * step);
            } else {
                for (int i = lane; i < 16 * pieces; i += 32)
                    if (i / pieces >= held)
                        ptx::cp_async<16>(stage + i / pieces * pitch + i % pieces * 16, row(from, token + i / pieces) + first + i % pieces * 8);
            }
        }
        if (held > 0) {
            uint32_t w[span / 16][4];
#pragma unroll
            for (int j = 0; j < span / 16; ++j) ring_tile(w[j], from, token, first / 16 + j);
#pragma unroll
            for (int j = 0; j < span / 16; ++j)
#pragma unroll
                for (int k = 0; k < 4; ++k) x[k / 2][2 * j + k % 2] = ptx::movmatrix_trans(w[j][k]);
        }
        if (held < 16) {
            ptx::cp_async_wait_all();
            __syncwarp();
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                const bool take = g + 8 * p >= held;
                if (8 * p + 8 <= held) continue;
#pragma unroll
                for (int m = 0; m < span / 8; m += 4) {
                    // Rows that the ring holds were not copied: every lane reads a row that was.
                    const int r = max(8 * p + lane % 8, min(held, 15));
                    uint32_t w[4];
                    ptx::ldmatrix_x4(w, stage + r * pitch + 16 * (m + lane / 8));
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        if (take) x[p][m + k] = w[k];
                }
            }
        }
    }

    // ---- ranges, two channels at a time; a value that is not finite makes one end NaN or infinite
    PTX static uint32_t least(uint32_t a, uint32_t b) {
        if constexpr (Config::bf16) return ptx::min_nan_bf16x2(a, b);
        else return ptx::min_nan_f16x2(a, b);
    }
    PTX static uint32_t most(uint32_t a, uint32_t b) {
        if constexpr (Config::bf16) return ptx::max_nan_bf16x2(a, b);
        else return ptx::max_nan_f16x2(a, b);
    }
    PTX static float widen(uint32_t v) {
        if constexpr (Config::bf16) return ptx::cvt_f32_bf16(static_cast<uint16_t>(v));
        else return ptx::cvt_f32_f16(static_cast<uint16_t>(v));
    }
    struct Run {
        float zero, inverse;
        uint32_t stored;  // scale and zero, float16
        bool plain;       // whether no code of this run can leave its range
    };
    template <int bits> PTX static Run settle(float low, float high) {
        constexpr float top = static_cast<float>((1 << bits) - 1), infinite = 3.0e38f;
        const bool broken = !(fabsf(low) <= infinite) || !(fabsf(high) <= infinite);
        const bool inside = fabsf(low) <= 65504.0f && fabsf(high) <= 65504.0f;
        low = fminf(fmaxf(low, -65504.0f), 65504.0f);
        high = fminf(fmaxf(high, -65504.0f), 65504.0f);
        uint16_t scale = ptx::cvt_f16_f32((high - low) / top), zero = ptx::cvt_f16_f32(low);
        if (broken) scale = zero = 0x7e00;
        const float s = ptx::cvt_f32_f16(scale);
        // The scale of a normal float16 is true to 2^-11: rounding cannot pass the last code.
        return {ptx::cvt_f32_f16(zero), s > 0.0f ? 1.0f / s : 0.0f, scale | static_cast<uint32_t>(zero) << 16,
                inside && !broken && (s == 0.0f || s >= 6.2e-5f)};
    }

    PTX static Run of_lane(const Run& own, int lane) {
        return {__shfl_sync(0xffffffffu, own.zero, lane), __shfl_sync(0xffffffffu, own.inverse, lane),
                __shfl_sync(0xffffffffu, own.stored, lane), own.plain};
    }

    // ---- codes. Rounding by a number so large that only integers are left: the bits of x + 1.5 * 2^23 are those of the
    // constant plus the rounded x, so a word is a sum, and its constant part is taken off at the end.
    template <int bits, bool plain> PTX static uint32_t code(uint32_t v, float zero, float inverse) {
        constexpr float top = static_cast<float>((1 << bits) - 1);
        float x = ptx::mul_rn_f32(widen(v) - zero, inverse);  // rounded, before the sum rounds again
        if constexpr (!plain) x = fminf(fmaxf(x, 0.0f), top);
        return __float_as_uint(x + 12582912.0f);
    }
    template <int bits> PTX static constexpr uint32_t constant() {
        uint32_t sum = 0;
        for (int f = 0; f < 32 / bits; ++f) sum += 0x4b400000u << (f / (16 / bits) * 16 + f % (16 / bits) * bits);
        return sum;
    }
    // The place of an element in its word: row half h, row tile `sub` of the word's, depth pair p, half `odd`.
    template <int bits> PTX static constexpr int shift(int sub, int h, int p, int odd) {
        return 16 * odd + bits * (bits == 2 ? 4 * p + 2 * sub + h : bits == 4 ? 2 * p + h : h);
    }
    // `count` words from index `index` of a lane's words in kernel order; see kvpage.pack_tiles.
    template <int count> PTX static void store(uint8_t* to, int index, const uint32_t* w) {
        const int lane = threadIdx.x % 32;
        if constexpr (count % 4 == 0) {
#pragma unroll
            for (int i = 0; i < count; i += 4)
                *reinterpret_cast<uint4*>(to + ((index + i) / 4 * 32 + lane) * 16) = make_uint4(w[i], w[i + 1], w[i + 2], w[i + 3]);
        } else if constexpr (count % 2 == 0) {
#pragma unroll
            for (int i = 0; i < count; i += 2)
                *reinterpret_cast<uint2*>(to + ((index + i) / 4 * 32 + lane) * 16 + (index + i) % 4 * 4) = make_uint2(w[i], w[i + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < count; ++i)
                *reinterpret_cast<uint32_t*>(to + ((index + i) / 4 * 32 + lane) * 16 + (index + i) % 4 * 4) = w[i];
        }
    }

    // ---- keys by channel: a warp takes sixteen channels of a group of tokens
    template <int bits> PTX static void keys_by_channel(const From& from, uint8_t* to) {
        constexpr int tiles = Config::chunk / 16, chunks = Config::block / Config::chunk;
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        for (int task = threadIdx.x / 32; task < chunks * depth; task += warps) {
            const int c = task / depth, j = task % depth;
            uint32_t x[tiles][2][2];
            load_keys(x, from, c * Config::chunk, j);
            if (from.page < 0) return;
            Run runs[2][2];
            uint32_t ends[2][2];
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                uint32_t low = x[0][0][p], high = low;
#pragma unroll
                for (int i = 0; i < 2 * tiles; ++i) {
                    low = least(low, x[i / 2][i % 2][p]);
                    high = most(high, x[i / 2][i % 2][p]);
                }
#pragma unroll
                for (int i = 4; i < 32; i <<= 1) {
                    low = least(low, __shfl_xor_sync(0xffffffffu, low, i));
                    high = most(high, __shfl_xor_sync(0xffffffffu, high, i));
                }
                ends[p][0] = low;
                ends[p][1] = high;
            }
            // Four channels, known to the lanes of eight tokens: each lane settles one of them.
            const Run own = settle<bits>(widen((g & 2 ? ends[1][0] : ends[0][0]) >> 16 * (g & 1)), widen((g & 2 ? ends[1][1] : ends[0][1]) >> 16 * (g & 1)));
#pragma unroll
            for (int k = 0; k < 4; ++k) runs[k / 2][k % 2] = of_lane(own, 4 * k + t);
            if (g == 0) {
                const uint32_t a = runs[0][0].stored, b = runs[0][1].stored, d = runs[1][0].stored, e = runs[1][1].stored;
                *reinterpret_cast<uint4*>(to + S::key_codes + (task * 4 + t) * 16) =
                    make_uint4(ptx::prmt(a, b, 0x7632u), ptx::prmt(a, b, 0x5410u), ptx::prmt(d, e, 0x7632u), ptx::prmt(d, e, 0x5410u));
            }
            if (__all_sync(0xffffffffu, own.plain)) codes_by_channel<bits, true>(x, runs, task, to);
            else codes_by_channel<bits, false>(x, runs, task, to);
        }
    }
    template <int bits, bool plain, int tiles>
    PTX static void codes_by_channel(const uint32_t (&x)[tiles][2][2], const Run (&runs)[2][2], int task, uint8_t* to) {
        using U = kvpage::Unit<bits>;
        constexpr int count = tiles / U::tiles * U::words;
        uint32_t w[count];
#pragma unroll
        for (int k = 0; k < count; ++k) {
            const int i = k / U::words * U::tiles, part = k % U::words;
            uint32_t sum = 0;
#pragma unroll
            for (int f = 0; f < 32 / bits; ++f) {
                const int odd = f % 2, h = f / 2 % 2, sub = bits == 2 ? f / 4 % 2 : 0, p = bits == 2 ? f / 8 : bits == 4 ? f / 4 : part;
                sum += code<bits, plain>(x[i + sub][h][p] >> 16 * odd, runs[p][odd].zero, runs[p][odd].inverse) << shift<bits>(sub, h, p, odd);
            }
            w[k] = sum - constant<bits>();
        }
        store<count>(to, task * count, w);
    }

    // ---- keys by token: a warp takes a group of channels of sixteen tokens, or of twice sixteen that share words
    template <int bits> PTX static void keys_by_token(const From& from, uint8_t* to) {
        using U = kvpage::Unit<bits>;
        constexpr int deep = Config::channel_group / 16, units = Config::block / 16 / U::tiles;
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        for (int task = threadIdx.x / 32; task < units * S::groups; task += warps) {
            const int u = task % units, v = task / units;
            uint32_t w[deep][U::words] = {};
#pragma unroll
            for (int sub = 0; sub < U::tiles; ++sub) {
                uint32_t x[deep][2][2], ends[2][2];
#pragma unroll
                for (int j = 0; j < deep; ++j) {
                    uint32_t one[1][2][2];
                    load_keys(one, from, 16 * (u * U::tiles + sub), v * deep + j);
                    if (from.page < 0) return;
                    x[j][0][0] = one[0][0][0]; x[j][0][1] = one[0][0][1]; x[j][1][0] = one[0][1][0]; x[j][1][1] = one[0][1][1];
                }
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    uint32_t low = x[0][h][0], high = low;
#pragma unroll
                    for (int j = 0; j < 2 * deep; ++j) {
                        low = least(low, x[j / 2][h][j % 2]);
                        high = most(high, x[j / 2][h][j % 2]);
                    }
                    ends[h][0] = low;
                    ends[h][1] = high;
                }
                Run runs[2];
                const bool plain = of_tokens<bits>(ends, runs);
                const int row = 2 * (u * U::tiles + sub) + t;  // of eight tokens
                if (t < 2)
                    *reinterpret_cast<uint32_t*>(to + S::key_codes + (((v * (Config::block / 32) + row / 4) * 8 + g) * 4 + row % 4) * 4) =
                        t ? runs[1].stored : runs[0].stored;
                if (__all_sync(0xffffffffu, plain)) codes_by_token<bits, true>(w, x, runs, sub);
                else codes_by_token<bits, false>(w, x, runs, sub);
            }
#pragma unroll
            for (int j = 0; j < deep; ++j) {
#pragma unroll
                for (int part = 0; part < U::words; ++part) w[j][part] -= constant<bits>();
                store<U::words>(to, ((v * deep + j) * units + u) * U::words, w[j]);
            }
        }
    }
    template <int bits, bool plain, int deep, int words>
    PTX static void codes_by_token(uint32_t (&w)[deep][words], const uint32_t (&x)[deep][2][2], const Run (&runs)[2], int sub) {
#pragma unroll
        for (int j = 0; j < deep; ++j)
#pragma unroll
            for (int f = 0; f < 8; ++f) {
                const int odd = f % 2, h = f / 2 % 2, p = f / 4;
                w[j][bits == 8 ? p : 0] += code<bits, plain>(x[j][h][p] >> 16 * odd, runs[h].zero, runs[h].inverse) << shift<bits>(sub, h, p, odd);
            }
    }
    // The runs of two tokens, g and g + 8, from the least and most of two channels of each lane; whether all is plain.
    template <int bits> PTX static bool of_tokens(const uint32_t (&ends)[2][2], Run (&runs)[2]) {
        // Lanes with an even t go on with the first token, odd ones with the second.
        const bool second = threadIdx.x % 2;
        uint32_t low = least(second ? ends[1][0] : ends[0][0], __shfl_xor_sync(0xffffffffu, second ? ends[0][0] : ends[1][0], 1));
        uint32_t high = most(second ? ends[1][1] : ends[0][1], __shfl_xor_sync(0xffffffffu, second ? ends[0][1] : ends[1][1], 1));
        low = least(low, __shfl_xor_sync(0xffffffffu, low, 2));
        high = most(high, __shfl_xor_sync(0xffffffffu, high, 2));
        low = least(low, low >> 16 | low << 16);
        high = most(high, high >> 16 | high << 16);
        const Run own = settle<bits>(widen(low), widen(high));
        runs[0] = of_lane(own, threadIdx.x % 32 & 28);
        runs[1] = of_lane(own, threadIdx.x % 32 & 28 | 1);
        return own.plain;
    }

    // ---- values: a warp takes up to 128 channels of sixteen tokens
    template <int bits> PTX static void pack_values(const From& from, uint8_t* to) {
        constexpr int group = bits == 16 ? span : Config::channel_group, groups = span / group, spans = Config::head_dim / span;
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        float largest = 0.0f;
        for (int task = threadIdx.x / 32; task < Config::block / 16 * spans; task += warps) {
            const int d = task / spans, s = task % spans;
            uint32_t x[2][span / 8];
            load_values(x, from, 16 * d, s * span);
            if (from.page < 0) return;
            if constexpr (bits == 16) {
                uint32_t w[span / 4];
#pragma unroll
                for (int k = 0; k < span / 4; ++k) w[k] = ptx::movmatrix_trans(x[k % 4 / 2][k / 4 * 2 + k % 2]);
                store<span / 4>(to, task * (span / 4), w);
            } else {
                Run runs[2][groups];
                bool plain = true;
#pragma unroll
                for (int v = 0; v < groups; ++v) {
                    uint32_t ends[2][2];
#pragma unroll
                    for (int p = 0; p < 2; ++p) {
                        uint32_t low = x[p][v * group / 8], high = low;
#pragma unroll
                        for (int m = v * group / 8; m < (v + 1) * group / 8; ++m) {
                            low = least(low, x[p][m]);
                            high = most(high, x[p][m]);
                        }
                        ends[p][0] = low;
                        ends[p][1] = high;
                    }
                    Run pair[2];
                    plain = of_tokens<bits>(ends, pair) && plain;
                    largest = fmaxf(largest, fmaxf(kvpage::low_f16(pair[0].stored), kvpage::low_f16(pair[1].stored)));
                    runs[0][v] = pair[0];
                    runs[1][v] = pair[1];
                    const int row = 2 * d + t;  // of eight tokens
                    if (t < 2)
                        *reinterpret_cast<uint32_t*>(to + S::value_codes + ((((s * groups + v) * (Config::block / 32) + row / 4) * 8 + g) * 4 + row % 4) * 4) =
                            t ? pair[1].stored : pair[0].stored;
                }
                if (__all_sync(0xffffffffu, plain)) codes_of_values<bits, true>(x, runs, task, to);
                else codes_of_values<bits, false>(x, runs, task, to);
            }
        }
        if constexpr (bits != 16) limit(largest, to + S::value_codes + S::value_parameters);
    }
    template <int bits, bool plain, int groups>
    PTX static void codes_of_values(const uint32_t (&x)[2][span / 8], const Run (&runs)[2][groups], int task, uint8_t* to) {
        using U = kvpage::Unit<bits>;
        constexpr int count = span / 16 / U::tiles * U::words;
        uint32_t w[count];
#pragma unroll
        for (int k = 0; k < count; ++k) {
            const int i = k / U::words * U::tiles, part = k % U::words;
            uint32_t sum = 0;
#pragma unroll
            for (int f = 0; f < 32 / bits; ++f) {
                const int odd = f % 2, h = f / 2 % 2, sub = bits == 2 ? f / 4 % 2 : 0, p = bits == 2 ? f / 8 : bits == 4 ? f / 4 : part;
                const Run& run = runs[p][(i + sub) * groups / (span / 16)];
                sum += code<bits, plain>(x[p][2 * (i + sub) + h] >> 16 * odd, run.zero, run.inverse) << shift<bits>(sub, h, p, odd);
            }
            w[k] = ptx::movmatrix_trans(sum - constant<bits>());
        }
        store<count>(to, task * count, w);
    }
    PTX static void limit(float largest, uint8_t* to) {
        float* all = reinterpret_cast<float*>(ptx::dynamic_shared() + warps * 16 * pitch);
#pragma unroll
        for (int i = 4; i < 32; i <<= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
        if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = largest;
        __syncthreads();
        if (threadIdx.x >= 8) return;
        for (int i = 0; i < warps; ++i) largest = fmaxf(largest, all[i]);
        reinterpret_cast<float*>(to)[threadIdx.x] = threadIdx.x ? 0.0f : fminf(60000.0f / largest, 1024.0f);
    }

    template <int bits> PTX static void pack_keys(const From& from, uint8_t* to) {
        if constexpr (bits == 16) {
            for (int task = threadIdx.x / 32; task < Config::block / 16 * depth; task += warps) {
                const int j = task / (Config::block / 16), i = task % (Config::block / 16);
                uint32_t x[1][2][2];
                load_keys(x, from, 16 * i, j);
                if (from.page < 0) return;
                const uint32_t w[4] = {x[0][0][0], x[0][1][0], x[0][0][1], x[0][1][1]};
                store<4>(to, task * 4, w);
            }
        } else if constexpr (Config::by_channel) {
            keys_by_channel<bits>(from, to);
        } else {
            keys_by_token<bits>(from, to);
        }
    }
};

template <class Config> PTX void found(const Params& p, uint32_t what) {
    if (threadIdx.x == 0) atomicMax(p.errors, what);
}

// What the ring holds of a window that is full now comes into L2 while the previous kernel is still at work: lengths were
// written before that one began, as decode.cuh takes them to be, and where bytes are kept is not when they are read.
template <class Config> PTX void prefetch(const Params& p) {
    constexpr int token = Config::head_dim * 2, line = 128;  // bytes
    const int sequence = p.sequences ? p.sequences[blockIdx.z] : static_cast<int>(blockIdx.z);
    if (!p.packs || sequence < 0 || sequence >= p.sequences_count) return;
    const int length = p.lengths[sequence], old = length - p.tokens;
    const int begin = (old & ~(p.window - 1)) + blockIdx.y * Config::block, end = length & ~(p.window - 1);
    if (old < 0 || begin >= end || begin >= p.table_width * Config::page) return;
    const int held = min((p.stored ? length : old) - begin, Config::block) * token, size = p.ring * token;
    const uint8_t* ring = reinterpret_cast<const uint8_t*>(p.residual) + ((static_cast<int64_t>(sequence) * p.kv_heads + blockIdx.x / 2) * 2 + blockIdx.x % 2) * size;
    for (int at = line * threadIdx.x; at < held; at += line * Config::threads) ptx::prefetch_L2(ring + (begin % p.ring * token + at) % size);
}

// grid: (kv_heads * 2, blocks of tokens, batch): the heads of a token are read at the same time
template <class Config> __global__ void __launch_bounds__(Config::threads, Packer<Config>::together / Config::threads) kernel(const __grid_constant__ Params p) {
    using S = kvpage::Format<Config>;
    using P = Packer<Config>;
    prefetch<Config>(p);
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();  // only now: what follows may read pages that earlier kernels wrote
    const int sequence = p.sequences ? p.sequences[blockIdx.z] : static_cast<int>(blockIdx.z);
    if constexpr (Config::checked)
        if (sequence < 0 || sequence >= p.sequences_count) return found<Config>(p, kvpage::bad_sequence);
    const int head = blockIdx.x / 2, length = p.lengths[sequence], old = length - p.tokens;
    if constexpr (Config::checked)
        if (old < 0 || length > p.table_width * Config::page) return found<Config>(p, kvpage::bad_length);
    Tokens<Config> tokens;
    tokens.values = blockIdx.x % 2;
    tokens.fresh = tokens.values ? p.v + blockIdx.z * p.v_batch_stride + static_cast<int64_t>(head) * p.v_head_stride
                                 : p.k + blockIdx.z * p.k_batch_stride + static_cast<int64_t>(head) * p.k_head_stride;
    tokens.token_stride = tokens.values ? p.v_token_stride : p.k_token_stride;
    tokens.ring = p.residual + ((static_cast<int64_t>(sequence) * p.kv_heads + head) * 2 + tokens.values) * p.ring * Config::head_dim;
    tokens.ring_tokens = p.ring;
    tokens.old = p.stored ? length : old;
    // The newest tokens go to the ring: what this thread loads first is stored last, behind the packing.
    const int first = max(old, length - p.ring), count = p.keeps && old >= 0 ? (length - first) * Config::head_dim : 0;
    int i = blockIdx.y * Config::threads + threadIdx.x;
    uint16_t kept = 0;
    if (i < count) kept = *tokens.of_fresh(first + i / Config::head_dim, i % Config::head_dim);
    const int begin = (old & ~(p.window - 1)) + blockIdx.y * Config::block, end = length & ~(p.window - 1);
    if (p.packs && old >= 0 && begin < end) {
        tokens.begin = begin;
        tokens.slot = begin % p.ring;
        tokens.page = p.table[static_cast<int64_t>(sequence) * p.table_width + begin / Config::page];
        if constexpr (Config::checked)
            if (tokens.page < 0 || tokens.page >= p.pages_count) return found<Config>(p, kvpage::bad_page);
        uint8_t* to = p.pages + (static_cast<int64_t>(tokens.page) * p.kv_heads + head) * (Config::page / Config::block * S::block_bytes)
                    + begin % Config::page / Config::block * S::block_bytes;
        if (tokens.values) P::template pack_values<Config::value_bits>(tokens, to + S::key_bytes);
        else P::template pack_keys<Config::key_bits>(tokens, to);
    }
    for (; i < count; i += gridDim.y * Config::threads) {
        const int token = first + i / Config::head_dim, channel = i % Config::head_dim;
        tokens.ring[tokens.place(token % p.ring, channel)] = kept;
        const int next = i + gridDim.y * Config::threads;
        if (next < count) kept = *tokens.of_fresh(first + next / Config::head_dim, next % Config::head_dim);
    }
}

}  // namespace kvpack

using Params = kvpack::Params;

#endif  // ANYBIT_KVPACK_CUH
