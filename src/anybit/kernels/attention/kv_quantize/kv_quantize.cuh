// Stores new K and V tokens: the newest go to the 16-bit residual ring, and each block of a full window is quantized into
// its page. One CTA takes the keys or the values of one block of tokens of one KV head. Arithmetic is that of
// kv_page.quantize, bit for bit, so that pages don't depend on where they are made.
#ifndef ANYBIT_KV_QUANTIZE_CUH
#define ANYBIT_KV_QUANTIZE_CUH

#include "attention/kv_quantize/kv_quantize_load.cuh"
#include "common/values.cuh"

namespace kv_quantize {

// Quantizes and packs the tokens that Loader reads. A "run" is the elements that share a scale and a zero.
template <class Config> struct Packer : Loader<Config> {
    using L = Loader<Config>;
    using S = typename L::S;
    using From = typename L::From;
    using L::warps, L::depth, L::span, L::pitch, L::bytes;
    using L::load_keys, L::load_tokens, L::load_values;

    // Threads per SM that the register file allows, for __launch_bounds__.
    static constexpr int together = S::groups == 1 && !Config::bf16 ? 1024 : S::groups <= 2 && Config::head_dim <= 128 ? 768 : 512;
    static_assert(bytes <= Config::shared_bytes, "kv_quantize.py gives the kernel less shared memory than it lays out");

    // ---- ranges, two channels at a time; a non-finite value makes one end NaN or infinite
    DEVICE static uint32_t least(uint32_t a, uint32_t b) { return values::min_pair<Config::bf16>(a, b); }
    DEVICE static uint32_t most(uint32_t a, uint32_t b) { return values::max_pair<Config::bf16>(a, b); }
    struct Range {
        uint32_t low, high;
        DEVICE void add(uint32_t v) { low = least(low, v), high = most(high, v); }
        DEVICE void add_lane(int across) {
            low = least(low, __shfl_xor_sync(0xffffffffu, low, across));
            high = most(high, __shfl_xor_sync(0xffffffffu, high, across));
        }
    };
    DEVICE static float widen(uint32_t v) { return values::low_float<Config::bf16>(v); }
    // Float16 elements are coded two at a time in float16: (x - zero) is rounded once, and one FMA multiplies by the
    // inverse scale and rounds to an integer. Runs that are not `plain` use float32.
    static constexpr bool halves = !Config::bf16;
    struct Run {
        float inverse;    // 1 / scale; negative: codes can leave their range and need clamping (not plain)
        uint32_t stored;  // scale and zero, float16
        DEVICE bool plain() const { return __float_as_int(inverse) >= 0; }
        DEVICE float zero() const { return kv_page::high_f16(stored); }
    };
    // Zeros and inverse scales for the two elements of a word.
    struct Pair {
        uint32_t zero, inverse;
    };
    DEVICE static Pair pair_of(const Run& even, const Run& odd) {
        return {ptx::prmt(even.stored, odd.stored, 0x7632u), ptx::cvt_f16x2_f32(even.inverse, odd.inverse)};
    }
    // x / top, correctly rounded (Markstein) as in the reference, minus the special cases that cannot occur here.
    template <int top> DEVICE static float over(float x) {
        constexpr float inverse = 1.0f / top;
        const float near = ptx::mul_rn_f32(x, inverse);
        return fmaf(fmaf(-near, static_cast<float>(top), x), inverse, near);
    }
    template <int bits> DEVICE static Run settle(float low, float high) {
        constexpr float top = static_cast<float>((1 << bits) - 1), infinite = 3.0e38f, largest = 65408.0f;  // kv_page.LARGEST
        const bool broken = !(fabsf(low) <= infinite) || !(fabsf(high) <= infinite);
        const bool inside = fabsf(low) <= largest && fabsf(high) <= largest;
        low = fminf(fmaxf(low, -largest), largest);
        high = fminf(fmaxf(high, -largest), largest);
        uint16_t scale = ptx::cvt_f16_f32(over<(1 << bits) - 1>(high - low)), zero = ptx::cvt_f16_f32(low);
        if (broken) scale = zero = 0x7e00;
        const float s = ptx::cvt_f32_f16(scale);
        // A normal float16 scale is accurate to 2^-11, so no code rounds past the last one.
        const bool plain = inside && !broken && (s == 0.0f || s >= 6.2e-5f) && (!halves || high - low <= 65504.0f);
        const float near = ptx::rcp_approx(s), inverse = s > 0.0f ? fmaf(near, fmaf(-s, near, 1.0f), near) : 0.0f;  // 1 / s, rounded correctly
        return {plain ? inverse : -inverse, scale | static_cast<uint32_t>(zero) << 16};
    }

    DEVICE static Run of_lane(const Run& own, int lane) {
        return {__shfl_sync(0xffffffffu, own.inverse, lane), __shfl_sync(0xffffffffu, own.stored, lane)};
    }

    // ---- codes. Rounding by magic number: the bits of x + 1.5 * 2^23 are the constant's plus round(x), so a word is a sum
    // of shifted encodings, and the constants' total is subtracted once at the end.
    template <int bits, bool plain> DEVICE static uint32_t code(uint32_t v, const Run& run) {
        constexpr float top = static_cast<float>((1 << bits) - 1);
        float x = widen(v) - run.zero(), inverse = fabsf(run.inverse);
        if constexpr (halves)
            if (run.plain()) {  // same rounding as the all-plain path: codes don't depend on the neighbours
                x = ptx::cvt_f32_f16(ptx::cvt_f16_f32(x));
                inverse = ptx::cvt_f32_f16(ptx::cvt_f16_f32(inverse));
            }
        x = ptx::mul_rn_f32(x, inverse);  // no FMA contraction: the product is rounded first
        if constexpr (!plain) x = fminf(fmaxf(x, 0.0f), top);
        return __float_as_uint(x + 12582912.0f);
    }
    // Total that the magic numbers add to a word: float16 pairs (1024, ulp 1) or floats.
    template <int bits, bool pairs> DEVICE static constexpr uint32_t constant() {
        uint32_t sum = 0;
        for (int f = 0; f < 32 / bits; ++f)
            if (!pairs) sum += 0x4b400000u << (f / (16 / bits) * 16 + f % (16 / bits) * bits);
            else if (f < 16 / bits) sum += 0x64006400u << f * bits;
        return sum;
    }
    // The codes of a word's two elements, shifted into place, magic numbers included.
    template <int bits, bool plain> DEVICE static uint32_t two_codes(uint32_t v, const Run& even, const Run& odd, const Pair& pair, int places) {
        if constexpr (plain && halves) return ptx::fma_f16x2(ptx::sub_f16x2(v, pair.zero), pair.inverse, 0x64006400u) << places;
        else return (code<bits, plain>(v, even) << places) + (code<bits, plain>(v >> 16, odd) << (16 + places));
    }
    // Bit position of an element pair in its word: row half h, the word's row tile `sub`, depth pair p.
    template <int bits> DEVICE static constexpr int shift(int sub, int h, int p) {
        return bits * (bits == 2 ? 4 * p + 2 * sub + h : bits == 4 ? 2 * p + h : h);
    }
    // A lane's word `index`: of(tile, row half, depth pair, bit position) is a pair of its codes.
    template <int bits, bool plain, class Of> DEVICE static uint32_t word(int index, Of&& of) {
        using U = kv_page::Bundle<bits>;
        uint32_t sum = 0;
        UNROLL for (int f = 0; f < 16 / bits; ++f) {
            const int h = f % 2, sub = bits == 2 ? f / 2 % 2 : 0, p = bits == 2 ? f / 4 : bits == 4 ? f / 2 : index % U::words;
            sum += of(index / U::words * U::tiles + sub, h, p, shift<bits>(sub, h, p));
        }
        return sum - constant<bits, plain && halves>();
    }
    // Stores `count` of a lane's words from `index` on, in kernel order (kv_page.pack_tiles).
    template <int count> DEVICE static void store(uint8_t* to, int index, const uint32_t* w) {
        const int lane = threadIdx.x % 32;
        if constexpr (count % 4 == 0) {
            UNROLL for (int i = 0; i < count; i += 4)
                *reinterpret_cast<uint4*>(to + ((index + i) / 4 * 32 + lane) * 16) = make_uint4(w[i], w[i + 1], w[i + 2], w[i + 3]);
        } else if constexpr (count % 2 == 0) {
            UNROLL for (int i = 0; i < count; i += 2)
                *reinterpret_cast<uint2*>(to + ((index + i) / 4 * 32 + lane) * 16 + (index + i) % 4 * 4) = make_uint2(w[i], w[i + 1]);
        } else {
            UNROLL for (int i = 0; i < count; ++i)
                *reinterpret_cast<uint32_t*>(to + ((index + i) / 4 * 32 + lane) * 16 + (index + i) % 4 * 4) = w[i];
        }
    }

    // ---- per-channel keys: a warp takes 16 channels of a chunk of tokens
    template <int bits> DEVICE static void keys_by_channel(const From& from, uint8_t* to) {
        constexpr int tiles = Config::chunk / 16, chunks = Config::block / Config::chunk;
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        for (int task = threadIdx.x / 32; task < chunks * depth; task += warps) {
            const int c = task / depth, j = task % depth;
            uint32_t x[tiles][2][2];
            load_keys(x, from, c * Config::chunk, j);
            if (from.page < 0 || from.stale()) return;
            Run runs[2][2];
            Range ranges[2];
            UNROLL for (int p = 0; p < 2; ++p) {
                ranges[p] = {x[0][0][p], x[0][0][p]};
                UNROLL for (int i = 0; i < 2 * tiles; ++i) ranges[p].add(x[i / 2][i % 2][p]);
                UNROLL for (int i = 4; i < 32; i <<= 1) ranges[p].add_lane(i);
            }
            // Four channels whose ranges all eight lanes of a column hold: each lane computes one channel's run.
            const Run own = settle<bits>(widen((g & 2 ? ranges[1].low : ranges[0].low) >> 16 * (g & 1)), widen((g & 2 ? ranges[1].high : ranges[0].high) >> 16 * (g & 1)));
            UNROLL for (int k = 0; k < 4; ++k) runs[k / 2][k % 2] = of_lane(own, 4 * k + t);
            if (g == 0) {
                const uint32_t a = runs[0][0].stored, b = runs[0][1].stored, d = runs[1][0].stored, e = runs[1][1].stored;
                *reinterpret_cast<uint4*>(to + S::key_codes + (task * 4 + t) * 16) =
                    make_uint4(ptx::prmt(a, b, 0x7632u), ptx::prmt(a, b, 0x5410u), ptx::prmt(d, e, 0x7632u), ptx::prmt(d, e, 0x5410u));
            }
            if (__all_sync(0xffffffffu, own.plain())) codes_by_channel<bits, true>(x, runs, task, to);
            else codes_by_channel<bits, false>(x, runs, task, to);
        }
    }
    template <int bits, bool plain, int tiles>
    DEVICE static void codes_by_channel(const uint32_t (&x)[tiles][2][2], const Run (&runs)[2][2], int task, uint8_t* to) {
        using U = kv_page::Bundle<bits>;
        constexpr int count = tiles / U::tiles * U::words;
        const Pair pairs[2] = {pair_of(runs[0][0], runs[0][1]), pair_of(runs[1][0], runs[1][1])};
        uint32_t w[count];
        UNROLL for (int k = 0; k < count; ++k)
            w[k] = word<bits, plain>(k, [&](int i, int h, int p, int places) {
                return two_codes<bits, plain>(x[i][h][p], runs[p][0], runs[p][1], pairs[p], places);
            });
        store<count>(to, task * count, w);
    }

    // ---- per-token keys: a warp takes a channel group of 16 tokens. Its words (2 bits: half of each) are combined with
    // other tokens' in shared memory, so that global stores are 16 bytes per lane.
    template <int bits> DEVICE static void keys_by_token(const From& from, uint8_t* to) {
        using U = kv_page::Bundle<bits>;
        constexpr int deep = Config::channel_group / 16, row_tiles = Config::block / 16, bundles = row_tiles / U::tiles, count = S::key_codes / 128;
        static_assert(U::tiles * S::key_codes <= Config::shared_bytes, "kv_quantize.py gives the kernel less shared memory than its words need");
        uint32_t* words = reinterpret_cast<uint32_t*>(ptx::dynamic_shared());
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        for (int task = threadIdx.x / 32; task < row_tiles * S::groups; task += warps) {
            const int d = task % row_tiles, v = task / row_tiles, sub = d % U::tiles;
            uint32_t x[deep][2][2];
            Range ranges[2];
            load_tokens(x, from, 16 * d, v * deep);
            if (from.page < 0 || from.stale()) return;
            UNROLL for (int h = 0; h < 2; ++h) {
                ranges[h] = {x[0][h][0], x[0][h][0]};
                UNROLL for (int j = 0; j < 2 * deep; ++j) ranges[h].add(x[j / 2][h][j % 2]);
            }
            Run runs[2];
            const bool plain = of_tokens<bits>(ranges, runs);
            const int row = 2 * d + t;  // row of eight tokens
            if (t < 2)
                *reinterpret_cast<uint32_t*>(to + S::key_codes + (((v * (Config::block / 32) + row / 4) * 8 + g) * 4 + row % 4) * 4) =
                    t ? runs[1].stored : runs[0].stored;
            uint32_t* at = words + (sub * count + (v * deep * bundles + d / U::tiles) * U::words) * 32 + lane;
            if (__all_sync(0xffffffffu, plain)) codes_by_token<bits, true>(x, runs, at, 4 * sub);
            else codes_by_token<bits, false>(x, runs, at, 4 * sub);
        }
        if (from.stale()) return;
        __syncthreads();
        for (int i = threadIdx.x; i < count / 4 * 32; i += Config::threads) {
            uint32_t w[4];
            UNROLL for (int k = 0; k < 4; ++k) {
                const int place = (i / 32 * 4 + k) * 32 + i % 32;
                w[k] = words[place];
                if constexpr (U::tiles == 2) w[k] |= words[count * 32 + place];
            }
            *reinterpret_cast<uint4*>(to + i * 16) = make_uint4(w[0], w[1], w[2], w[3]);
        }
    }
    // more: extra shift of this row tile's codes where two row tiles share a word.
    template <int bits, bool plain, int deep>
    DEVICE static void codes_by_token(const uint32_t (&x)[deep][2][2], const Run (&runs)[2], uint32_t* at, int more) {
        using U = kv_page::Bundle<bits>;
        constexpr int bundles = Config::block / 16 / U::tiles;
        const Pair pairs[2] = {pair_of(runs[0], runs[0]), pair_of(runs[1], runs[1])};
        UNROLL for (int j = 0; j < deep; ++j)
            UNROLL for (int part = 0; part < U::words; ++part) {
                constexpr int fields = 4 / U::words;  // pairs of elements
                uint32_t sum = 0, rounding = 0;
                UNROLL for (int f = 0; f < fields; ++f) {
                    const int h = f % 2, p = bits == 8 ? part : f / 2, places = shift<bits>(0, h, p);
                    sum += two_codes<bits, plain>(x[j][h][p], runs[h], runs[h], pairs[h], places);
                    rounding += plain && halves ? 0x64006400u << places : (0x4b400000u << places) + (0x4b400000u << (16 + places));
                }
                at[(j * bundles * U::words + part) * 32] = (sum - rounding) << more;
            }
    }
    // Runs of tokens g and g + 8 from each lane's ranges; returns whether its own run is plain.
    template <int bits> DEVICE static bool of_tokens(const Range (&ranges)[2], Run (&runs)[2]) {
        // Even lanes go on with token g, odd lanes with token g + 8.
        const bool second = threadIdx.x % 2;
        Range mine;
        mine.low = least(second ? ranges[1].low : ranges[0].low, __shfl_xor_sync(0xffffffffu, second ? ranges[0].low : ranges[1].low, 1));
        mine.high = most(second ? ranges[1].high : ranges[0].high, __shfl_xor_sync(0xffffffffu, second ? ranges[0].high : ranges[1].high, 1));
        mine.add_lane(2);
        mine.low = least(mine.low, mine.low >> 16 | mine.low << 16);
        mine.high = most(mine.high, mine.high >> 16 | mine.high << 16);
        const Run own = settle<bits>(widen(mine.low), widen(mine.high));
        runs[0] = of_lane(own, threadIdx.x % 32 & 28);
        runs[1] = of_lane(own, threadIdx.x % 32 & 28 | 1);
        return own.plain();
    }

    // ---- values: a warp takes up to 128 channels of 16 tokens
    template <int bits> DEVICE static void pack_values(const From& from, uint8_t* to) {
        constexpr int group = bits == 16 ? span : Config::channel_group, groups = span / group, spans = Config::head_dim / span;
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        float largest = 0.0f;
        for (int task = threadIdx.x / 32; task < Config::block / 16 * spans; task += warps) {
            const int d = task / spans, s = task % spans;
            uint32_t x[2][span / 8];
            load_values(x, from, 16 * d, s * span);
            if (from.page < 0 || from.stale()) return;
            if constexpr (bits == 16) {
                uint32_t w[span / 4];
                UNROLL for (int k = 0; k < span / 4; ++k) w[k] = ptx::movmatrix_trans(x[k % 4 / 2][k / 4 * 2 + k % 2]);
                store<span / 4>(to, task * (span / 4), w);
            } else {
                Run runs[2][groups];
                bool plain = true;
                UNROLL for (int v = 0; v < groups; ++v) {
                    Range ranges[2];
                    UNROLL for (int p = 0; p < 2; ++p) {
                        ranges[p] = {x[p][v * group / 8], x[p][v * group / 8]};
                        UNROLL for (int m = v * group / 8; m < (v + 1) * group / 8; ++m) ranges[p].add(x[p][m]);
                    }
                    Run pair[2];
                    plain = of_tokens<bits>(ranges, pair) && plain;
                    largest = fmaxf(largest, fmaxf(kv_page::low_f16(pair[0].stored), kv_page::low_f16(pair[1].stored)));
                    runs[0][v] = pair[0];
                    runs[1][v] = pair[1];
                    const int row = 2 * d + t;  // row of eight tokens
                    if (t < 2)
                        *reinterpret_cast<uint32_t*>(to + S::value_codes + ((((s * groups + v) * (Config::block / 32) + row / 4) * 8 + g) * 4 + row % 4) * 4) =
                            t ? pair[1].stored : pair[0].stored;
                }
                if (__all_sync(0xffffffffu, plain)) codes_of_values<bits, true>(x, runs, task, to);
                else codes_of_values<bits, false>(x, runs, task, to);
            }
        }
        if (from.stale()) return;
        if constexpr (bits != 16) limit(largest, to + S::value_codes + S::value_parameters);
    }
    template <int bits, bool plain, int groups>
    DEVICE static void codes_of_values(const uint32_t (&x)[2][span / 8], const Run (&runs)[2][groups], int task, uint8_t* to) {
        using U = kv_page::Bundle<bits>;
        constexpr int count = span / 16 / U::tiles * U::words;
        Pair pairs[2][groups];
        UNROLL for (int k = 0; k < 2 * groups; ++k) pairs[k / groups][k % groups] = pair_of(runs[k / groups][k % groups], runs[k / groups][k % groups]);
        uint32_t w[count];
        UNROLL for (int k = 0; k < count; ++k)
            w[k] = ptx::movmatrix_trans(word<bits, plain>(k, [&](int i, int h, int p, int places) {
                const int v = i * groups / (span / 16);
                return two_codes<bits, plain>(x[p][2 * i + h], runs[p][v], runs[p][v], pairs[p][v], places);
            }));
        store<count>(to, task * count, w);
    }
    DEVICE static void limit(float largest, uint8_t* to) {
        float* all = reinterpret_cast<float*>(ptx::dynamic_shared() + warps * 16 * pitch);
        UNROLL for (int i = 4; i < 32; i <<= 1) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, i));
        if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = largest;
        __syncthreads();
        if (threadIdx.x >= 8) return;
        for (int i = 0; i < warps; ++i) largest = fmaxf(largest, all[i]);
        reinterpret_cast<float*>(to)[threadIdx.x] = threadIdx.x ? 0.0f : fminf(60000.0f / largest, 1024.0f);
    }

    template <int bits> DEVICE static void pack_keys(const From& from, uint8_t* to) {
        if constexpr (bits == 16) {
            for (int task = threadIdx.x / 32; task < Config::block / 16 * depth; task += warps) {
                const int j = task / (Config::block / 16), i = task % (Config::block / 16);
                uint32_t x[1][2][2];
                load_keys(x, from, 16 * i, j);
                if (from.page < 0 || from.stale()) return;
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

template <class Config> DEVICE void found(const Params& p, uint32_t what) {
    if (threadIdx.x == 0) atomicMax(p.errors, what);
}

// Stores what `tokens` says; returns false, with nothing stored, if it was planned from a stale length.
template <class Config> DEVICE bool store_tokens(const Params& p, Tokens<Config>& tokens) {
    using S = kv_page::Format<Config>;
    using P = Packer<Config>;
    // The newest tokens go to the ring: a thread's first load issues here and is stored after packing, which hides it.
    int i = blockIdx.y * Config::threads + threadIdx.x;
    uint16_t kept = 0;
    if (i < tokens.count) kept = *tokens.of_fresh(tokens.first + i / Config::head_dim, i % Config::head_dim);
    if (tokens.packs) {
        tokens.page = -1;
        if (tokens.begin < (p.table_width - Config::front) * Config::page)
            tokens.page = static_cast<int>(ptx::ld_global_cg_u32(p.table + static_cast<int64_t>(tokens.sequence) * p.table_width + Config::front + tokens.begin / Config::page));
        if constexpr (Config::checked)
            if (tokens.page < 0 || tokens.page >= p.pages_count) {
                found<Config>(p, kv_page::bad_page);
                return true;
            }
        constexpr int page_bytes = Config::page / Config::block * S::block_bytes;
        uint8_t* to;
        if constexpr (Config::front > 0) to = p.pages + tokens.page * p.page_stride + blockIdx.x / 2 * page_bytes;
        else to = p.pages + (static_cast<int64_t>(tokens.page) * p.kv_heads + blockIdx.x / 2) * page_bytes;
        to += tokens.begin % Config::page / Config::block * S::block_bytes;
        if (tokens.values) P::template pack_values<Config::value_bits>(tokens, to + S::key_bytes);
        else P::template pack_keys<Config::key_bits>(tokens, to);
    }
    if (tokens.stale()) return false;
    for (; i < tokens.count; i += gridDim.y * Config::threads) {
        const int token = tokens.first + i / Config::head_dim, channel = i % Config::head_dim;
        const int slot = tokens.slot_of(token);
        if constexpr (Config::front > 0) tokens.tile(slot / 16 * 16)[tokens.place(slot % 16, channel)] = kept;
        else tokens.ring[tokens.place(slot, channel)] = kept;
        const int next = i + gridDim.y * Config::threads;
        if (next < tokens.count) kept = *tokens.of_fresh(tokens.first + next / Config::head_dim, next % Config::head_dim);
    }
    return true;
}
// The same from the up-to-date length. Rarely taken, so noinline: its registers stay out of the kernel's main path.
template <class Config> __device__ __noinline__ void store_again(const Params& p, int sequence, int length) {
    Tokens<Config> tokens;
    tokens.set(p, sequence, length);
    store_tokens<Config>(p, tokens);
}

// Grid: (kv_heads * 2, blocks of tokens, batch). Heads vary fastest, so that a token's heads are read together.
template <class Config> __global__ void __launch_bounds__(Config::threads, Packer<Config>::together / Config::threads) kernel(const __grid_constant__ Params p) {
    // PDL: the work is planned from the lengths as they are before griddepcontrol.wait. After it, tokens, lengths and page
    // entries are loaded side by side, since each dependent wait costs half a microsecond; a plan that proves stale is
    // redone by store_again.
    const int likely = p.sequences ? p.sequences[blockIdx.z] : static_cast<int>(blockIdx.z);
    Tokens<Config> tokens;
    tokens.set(p, likely, likely >= 0 && likely < p.sequences_count ? p.lengths[likely] : 0);
    if (likely >= 0 && likely < p.sequences_count) prefetch<Config>(p, tokens);
    ptx::griddepcontrol_wait();
    ptx::griddepcontrol_launch_dependents();  // not earlier: the next kernel may read pages that kernels before this one wrote
    const int sequence = p.sequences ? static_cast<int>(ptx::ld_global_cg_u32(p.sequences + blockIdx.z)) : static_cast<int>(blockIdx.z);
    if constexpr (Config::checked)
        if (sequence < 0 || sequence >= p.sequences_count) return found<Config>(p, kv_page::bad_sequence);
    const int length = static_cast<int>(ptx::ld_global_cg_u32(p.lengths + sequence));
    if constexpr (Config::checked)
        if ((!Config::ragged && length < p.tokens) || length > (p.table_width - Config::front) * Config::page) return found<Config>(p, kv_page::bad_length);
    if (sequence != tokens.sequence || (!Tokens<Config>::eager && length != tokens.length)) tokens.set(p, sequence, length);
    tokens.found = length;
    if (!store_tokens<Config>(p, tokens)) store_again<Config>(p, sequence, length);
}

}  // namespace kv_quantize

using Params = kv_quantize::Params;

#endif  // ANYBIT_KV_QUANTIZE_CUH
