// y = x W^T on mma.sync and cp.async only: sm_80, sm_86, sm_89, and anything later. The design of the MARLIN paper
// (section 3.4) over the tiles of packed_layout.py, with weights as the A operand:
//
// - Striped partitioning: all (row tile, k block) pairs on one line, K innermost, cut into equal stripes, one
//   per CTA; a stripe may begin inside a row tile and span several. Partial sums of a row tile are reduced serially under a
//   lock, from the last columns to the first, since the CTA with the last columns finishes first; the fixed order makes
//   results deterministic. Locks are back at zero at the end.
// - A `stages` deep cp.async pipeline of weights and activations that runs across row tiles; activations stay in L2.
// - 16-bit activations: codes are dequantized in registers, scales and zeros applied (packed_dequantize.cuh). 8-bit ones:
//   codes stay unsigned integers; or, as the ADAngel paper's split strategy, int4 MMA: weights of up to 4 bits as they are,
//   activations as two nibbles, x = 16 high + low.
#ifndef ANYBIT_SM80_PACKED_GEMM_CUH
#define ANYBIT_SM80_PACKED_GEMM_CUH

#include "packed/packed_dequantize.cuh"


struct Params {
    const uint8_t* tiles;
    const float* row_scale;
    const uint8_t* row_zero;
    const uint8_t* x;        // [m, k], row stride x_stride in elements, 16-byte aligned
    const float* x_scale;    // [m] for s8
    const uint16_t* bias;
    uint16_t* y;             // [m, n]
    float* partial;          // sums of unfinished row tiles
    uint32_t* locks;         // one per row tile and token tile, zero before and after
    int32_t m, n, k, x_stride, k_blocks, row_tiles;
};

namespace sm80_packed {

using packed::unroll;

// a / b for a below 2^24, in a few instructions instead of a call.
DEVICE int quotient(int a, int b) {
    int q = static_cast<int>(static_cast<float>(a) * ptx::rcp_approx(static_cast<float>(b)));
    if (q * b > a) q--;
    if ((q + 1) * b <= a) q++;
    return q;
}

// A position on the line: token tiles outermost, then row tiles, then k blocks.
struct Place {
    int tile, row_tile, token_tile, k_block;

    DEVICE Place(int index, int row_tiles, int depth) {
        tile = quotient(index, depth), k_block = index - tile * depth;
        token_tile = quotient(tile, row_tiles), row_tile = tile - token_tile * row_tiles;
    }
    DEVICE void next(int row_tiles, int depth) {
        if (++k_block < depth) return;
        k_block = 0, tile++;
        if (++row_tile == row_tiles) row_tile = 0, token_tile++;
    }
};

template <class C> struct Traits {
    static constexpr bool integer = C::operand == Operand::s8;
    static constexpr int element = integer ? 1 : 2, pitch = 128 * element + 16;
    static constexpr bool sparse = packed::is_sparse<C>();
    using Codes = typename packed::CodesOf<sparse, C::bits>::type;
    static constexpr int unit_bytes = packed::unit_bytes_of<C>();
    static constexpr int rows = C::row_warps * C::units * 16, tiles = rows / 64;
    static constexpr int weight_bytes = tiles * 4 * unit_bytes, x_bytes = C::tile_m * pitch;
    static constexpr int stage_bytes = weight_bytes + x_bytes;
    static constexpr int token_tiles = C::tile_m / 8, sums = C::units * token_tiles * 4;
    // Split-K warps reduce in shared memory of their own, so that the pipeline runs on across the end of a row tile.
    static constexpr int exchange_bytes = (C::split_k_warps - 1) * C::row_warps * 32 * sums * 4;
    static constexpr int parts = packed::subgroups(C::group) > 1 ? packed::subgroups(C::group) : 1;
    static constexpr bool asym = C::code == Code::asym, bipolar = C::code == Code::bipolar;
    static constexpr int twice_zero = bipolar ? (1 << C::bits) - 1 : 1 << C::bits;
    static constexpr float of_integers = sparse ? 1.0f / (1 << (8 - C::bits)) : bipolar ? 0.5f : 1.0f;
    static constexpr float unscale = integer ? of_integers : packed::Dequantize16<C>::unscale();
};

template <class C> struct Block {
    using T = Traits<C>;
    float sums[C::units][T::token_tiles][4];
    int warp, lane, row_warp, k_warp;
    uint32_t shared;

    DEVICE void clear() {
        UNROLL for (int u = 0; u < C::units; u++)
            UNROLL for (int n = 0; n < T::token_tiles; n++)
                UNROLL for (int i = 0; i < 4; i++) sums[u][n][i] = 0.0f;
    }

    // Loads one place of the line: a row tile's weights and the activations at one k block.
    DEVICE void fetch(const Params& p, int stage, int row_tile, int k_block, int first_token) const {
        const uint32_t to = shared + stage * T::stage_bytes;
        const uint8_t* weights = p.tiles + (static_cast<size_t>(k_block) * p.row_tiles + row_tile * T::tiles) * (4 * T::unit_bytes);
        const int there = p.row_tiles - row_tile * T::tiles;  // the last row tile may have fewer
        const int bytes = (there < T::tiles ? there : T::tiles) * 4 * T::unit_bytes;
        for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes; i += C::threads * 16)
            ptx::cp_async<16>(to + i, weights + i);
        constexpr int chunks = 128 * T::element / 16;
        for (int i = static_cast<int>(threadIdx.x); i < C::tile_m * chunks; i += C::threads) {
            const int token = i / chunks, at = k_block * 128 * T::element + i % chunks * 16;
            const int left = p.k * T::element - at, valid = left < 0 ? 0 : left < 16 ? left : 16;
            const bool inside = first_token + token < p.m && valid > 0;
            const uint8_t* from = p.x + (inside ? static_cast<size_t>(first_token + token) * p.x_stride * T::element + at : 0);
            ptx::cp_async<16>(to + T::weight_bytes + token * T::pitch + i % chunks * 16, from, inside ? valid : 0);
        }
    }

    // B fragments: 32 columns of eight tokens; b[0], b[1] are the two k halves (16-bit: of each k16 step).
    template <int registers>
    DEVICE void columns(uint32_t (&b)[registers], uint32_t x, int token_tile, int byte) const {
        const uint32_t from = x + (token_tile * 8 + (lane & 7)) * T::pitch + byte;
        if constexpr (registers == 2) ptx::ldmatrix_x2(b, from + ((lane >> 3) & 1) * 16);
        else ptx::ldmatrix_x4(b, from + (lane >> 3) * 16);
    }

    DEVICE void multiply(const Params& p, int stage, int row_tile) {
        const uint32_t weights = shared + stage * T::stage_bytes, x = weights + T::weight_bytes;
        if constexpr (T::integer) multiply_integers(p, weights, x, row_tile);
        else multiply_floats(p, weights, x, row_tile);
    }

    DEVICE void multiply_floats(const Params& p, uint32_t weights, uint32_t x, int row_tile) {
        packed::Dequantize16<C> dequantize[C::units];
        packed::Metadata<C> metadata[C::units];
        UNROLL for (int u = 0; u < C::units; u++) {
            const int unit = row_warp * C::units + u;
            metadata[u].template load<0>(weights + unit * T::unit_bytes);
            metadata[u].template load<1>(weights + unit * T::unit_bytes);
            dequantize[u].begin(p.row_zero, row_tile * T::rows + unit * 16, p.row_tiles * 64);
            dequantize[u].load(weights + unit * T::unit_bytes);
        }
        // Split-K warps divide the k32 steps.
        unroll<0, 4>([&](auto index) {
            constexpr int wide = decltype(index)::value;
            uint32_t b[T::token_tiles][4];
            if (C::split_k_warps == 1 || wide / (4 / C::split_k_warps) == k_warp) {
                UNROLL for (int n = 0; n < T::token_tiles; n++) columns(b[n], x, n, wide * 64);
                UNROLL for (int u = 0; u < C::units; u++) {
                    if constexpr (T::sparse) {
                        uint32_t a[1][4];
                        dequantize[u].template dequantize<wide * 4, wide * 4 + 4>(a);
                        UNROLL for (int n = 0; n < T::token_tiles; n++) {
                            if constexpr (C::operand == Operand::f16) ptx::mma_sp_m16n8k32_f16<wide % 2>(sums[u][n], a[0], b[n], metadata[u].half[wide / 2]);
                            else ptx::mma_sp_m16n8k32_bf16<wide % 2>(sums[u][n], a[0], b[n], metadata[u].half[wide / 2]);
                        }
                    } else {
                        uint32_t a[2][4];
                        dequantize[u].template dequantize<wide * 8, wide * 8 + 8>(a);
                        UNROLL for (int n = 0; n < T::token_tiles; n++)
                            UNROLL for (int odd = 0; odd < 2; odd++) {
                                const uint32_t pair[2] = {b[n][2 * odd], b[n][2 * odd + 1]};
                                if constexpr (C::operand == Operand::f16) ptx::mma_m16n8k16_f16(sums[u][n], a[odd], pair);
                                else ptx::mma_m16n8k16_bf16(sums[u][n], a[odd], pair);
                            }
                    }
                }
            }
        });
    }

    // Accumulates 64 columns: two k32 steps.
    template <int pair>
    DEVICE void products(
        int32_t (&part)[T::token_tiles][4], int32_t (&total)[T::token_tiles][4], const uint32_t (&words)[2 * C::bits],
        uint32_t x) const {
        constexpr uint32_t one = C::nibbles ? 0x11111111u : 0x01010101u;
        const uint32_t ones[4] = {one, one, one, one};
        uint32_t low_codes[4], high_codes[4];
        unroll<0, 4>([&](auto index) {
            constexpr int r = decltype(index)::value;
            low_codes[r] = packed::codes<C::bits, 8, 8 * pair + r, 0>(words);
            high_codes[r] = packed::codes<C::bits, 8, 8 * pair + 4 + r, C::nibbles ? 4 : 0>(words);
            if constexpr (C::nibbles) low_codes[r] |= high_codes[r];  // low nibbles: 32 columns; high nibbles: the next 32
        });
        UNROLL for (int n = 0; n < T::token_tiles; n++) {
            uint32_t b[4];
            columns(b, x, n, pair * 64);
            const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
            if constexpr (C::nibbles) {
                uint32_t high[2], low[2];
                UNROLL for (int i = 0; i < 2; i++) {
                    high[i] = ((first[i] >> 4) & 0x0f0f0f0fu) | (second[i] & 0xf0f0f0f0u);
                    low[i] = (first[i] & 0x0f0f0f0fu) | ((second[i] << 4) & 0xf0f0f0f0u);
                }
                int32_t upper[4] = {}, upper_total[4] = {};
                ptx::mma_m16n8k64_u4s4(upper, low_codes, high);
                ptx::mma_m16n8k64_u4s4(upper_total, ones, high);
                ptx::mma_m16n8k64_u4(part[n], low_codes, low);
                ptx::mma_m16n8k64_u4(total[n], ones, low);
                UNROLL for (int i = 0; i < 4; i++) part[n][i] += upper[i] * 16, total[n][i] += upper_total[i] * 16;
            } else {
                ptx::mma_m16n8k32_u8s8(part[n], low_codes, first);
                ptx::mma_m16n8k32_u8s8(part[n], high_codes, second);
                ptx::mma_m16n8k32_u8s8(total[n], ones, first);
                ptx::mma_m16n8k32_u8s8(total[n], ones, second);
            }
        }
    }
    // Accumulates 64 columns of 2:4 sparse weights, or only the 32 of group `only` of four. Codes are two's complement in
    // the top bits of their bytes; a row's zeros multiply the sum of the activations that it keeps.
    template <int pair, int only>
    DEVICE void kept_products(
        int32_t (&part)[T::token_tiles][4], int32_t (&total)[T::token_tiles][4], const uint32_t (&words)[T::Codes::words],
        const packed::Metadata<C>& metadata, uint32_t x) const {
        uint32_t a[4], ones[4];
        unroll<0, 4>([&](auto index) {
            constexpr int r = decltype(index)::value;
            constexpr bool mine = only < 0 || only % 2 == r / 2;
            a[r] = mine ? packed::KeptCodes<C::bits>::template highest<4 * pair + r, 0x80808080u>(words) : 0;
            ones[r] = mine ? 0x01010101u : 0;
        });
        UNROLL for (int n = 0; n < T::token_tiles; n++) {
            uint32_t b[4];
            columns(b, x, n, pair * 64);
            ptx::mma_sp_m16n8k64_s8(part[n], a, b, metadata.half[pair]);
            if constexpr (T::asym) ptx::mma_sp_m16n8k64_s8(total[n], ones, b, metadata.half[pair]);
        }
    }
    // Accumulates 32 columns, for groups of 32.
    template <int wide>
    DEVICE void half_products(
        int32_t (&part)[T::token_tiles][4], int32_t (&total)[T::token_tiles][4], const uint32_t (&words)[2 * C::bits],
        uint32_t x) const {
        const uint32_t ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
        uint32_t a[4];
        unroll<0, 4>([&](auto index) {
            constexpr int r = decltype(index)::value;
            a[r] = packed::codes<C::bits, 8, 4 * wide + r, 0>(words);
        });
        UNROLL for (int n = 0; n < T::token_tiles; n++) {
            uint32_t b[2];
            columns(b, x, n, wide * 32);
            ptx::mma_m16n8k32_u8s8(part[n], a, b);
            ptx::mma_m16n8k32_u8s8(total[n], ones, b);
        }
    }

    DEVICE void multiply_integers(const Params& p, uint32_t weights, uint32_t x, int row_tile) {
        static_assert(!C::nibbles || (C::bits <= 4 && T::parts < 4), "int4 tensor cores take up to 4 bits, and 64 columns");
        UNROLL for (int u = 0; u < C::units; u++) {
            const int unit = row_warp * C::units + u;
            const uint32_t at = weights + unit * T::unit_bytes, scales = at + T::Codes::bytes, zeros = scales + 32 * T::parts;
            uint32_t words[T::Codes::words];
            T::Codes::load(words, at, lane);
            packed::Metadata<C> metadata;
            metadata.template load<0>(at);
            metadata.template load<1>(at);
            unroll<0, T::parts>([&](auto index) {
                constexpr int group = decltype(index)::value, steps = 4 / T::parts;  // k32-steps
                if (C::split_k_warps > 1 && C::split_k_warps <= T::parts && group / (T::parts / C::split_k_warps) != k_warp) return;
                if (C::split_k_warps > T::parts && k_warp != 0) return;
                int32_t part[T::token_tiles][4] = {}, total[T::token_tiles][4] = {};
                if constexpr (T::sparse && T::parts == 4) {
                    kept_products<group / 2, group>(part, total, words, metadata, x);
                } else if constexpr (T::sparse) {
                    unroll<group * 2 / T::parts, (group + 1) * 2 / T::parts>([&](auto which) {
                        kept_products<decltype(which)::value, -1>(part, total, words, metadata, x);
                    });
                } else if constexpr (steps == 1) {
                    half_products<group>(part, total, words, x);
                } else {
                    unroll<0, steps / 2>([&](auto which) {
                        products<group * steps / 2 + decltype(which)::value>(part, total, words, x);
                    });
                }
                float scale[2] = {1.0f, 1.0f};
                int zero[2] = {T::twice_zero / 2, T::twice_zero / 2};
                if constexpr (C::group != 0) {
                    const uint32_t pair = ptx::ld_shared_u32(scales + group * 32 + (lane >> 2) * 4);
                    scale[0] = ptx::cvt_f32_f16(static_cast<uint16_t>(pair)), scale[1] = ptx::cvt_f32_f16(static_cast<uint16_t>(pair >> 16));
                    if constexpr (T::asym) {
                        const uint32_t both = ptx::ld_shared_u32(zeros + group * 16 + (lane >> 3) * 4) >> ((lane >> 2) & 1) * 16;
                        zero[0] = both & 0xff, zero[1] = (both >> 8) & 0xff;
                    }
                } else if constexpr (T::asym) {
                    const int row = row_tile * T::rows + unit * 16 + (lane >> 2);
                    if (row < p.row_tiles * 64) zero[0] = p.row_zero[row], zero[1] = p.row_zero[row + 8];
                }
                UNROLL for (int n = 0; n < T::token_tiles; n++)
                    UNROLL for (int i = 0; i < 4; i++) {
                        const int from_middle = (zero[i >> 1] << (8 - C::bits)) - 128;  // sparse: offset of the zero; 0 for sym
                        const int v = T::sparse ? part[n][i] - from_middle * total[n][i] : T::bipolar ? 2 * part[n][i] - T::twice_zero * total[n][i] : part[n][i] - zero[i >> 1] * total[n][i];
                        sums[u][n][i] = fmaf(scale[i >> 1], static_cast<float>(v), sums[u][n][i]);
                    }
            });
        }
    }

    // Reduces split-K warps' sums into the first one's.
    DEVICE void meet() {
        if constexpr (C::split_k_warps > 1) {
            const uint32_t exchange = shared + C::stages * T::stage_bytes;
            const auto place = [&](int k, int i) { return exchange + ((((k - 1) * C::row_warps + row_warp) * T::sums + i) * 32 + lane) * 4; };
            __syncthreads();  // the previous exchange has been read
            if (k_warp > 0)
                UNROLL for (int i = 0; i < T::sums; i++)
                    ptx::st_shared_f32(place(k_warp, i), sums[i / 4 / T::token_tiles][i / 4 % T::token_tiles][i % 4]);
            __syncthreads();
            if (k_warp == 0)
                UNROLL for (int k = 1; k < C::split_k_warps; k++)
                    UNROLL for (int i = 0; i < T::sums; i++)
                        sums[i / 4 / T::token_tiles][i / 4 % T::token_tiles][i % 4] += ptx::ld_shared_f32(place(k, i));
        }
    }

    // Adds this CTA's sums of a row tile to those of the CTAs behind it (serial reduction). rank: counted from the end of K.
    DEVICE void finish(const Params& p, int slot, int row_tile, int first_token, int rank, int last) {
        meet();
        float* partial = p.partial + static_cast<size_t>(slot) * (T::rows * C::tile_m);
        const auto place = [&](int i) { return partial + (row_warp * T::sums + i) * 32 + lane; };
        if (last > 0) {
            if (threadIdx.x == 0)
                while (ptx::ld_acquire_gpu(p.locks + slot) != static_cast<uint32_t>(rank)) {}
            __syncthreads();
        }
        if (k_warp == 0) {
            if (rank > 0)
                UNROLL for (int i = 0; i < T::sums; i++)
                    sums[i / 4 / T::token_tiles][i / 4 % T::token_tiles][i % 4] += __uint_as_float(ptx::ld_global_cg_u32(place(i)));
            if (rank < last) {
                UNROLL for (int i = 0; i < T::sums; i++) *place(i) = sums[i / 4 / T::token_tiles][i / 4 % T::token_tiles][i % 4];
            } else {
                write(p, row_tile, first_token);
            }
        }
        if (last > 0) {
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) ptx::st_release_gpu(p.locks + slot, rank < last ? rank + 1 : 0);
        }
    }

    DEVICE void write(const Params& p, int row_tile, int first_token) const {
        UNROLL for (int u = 0; u < C::units; u++)
            UNROLL for (int i = 0; i < 4; i += 2) {
                const int row = row_tile * T::rows + (row_warp * C::units + u) * 16 + (lane >> 2) + i * 4;
                if (row >= p.n) continue;
                const float scale = p.row_scale[row] * T::unscale;
                float bias = 0.0f;
                if (p.bias != nullptr) bias = C::output == Output::f16 ? ptx::cvt_f32_f16(p.bias[row]) : ptx::cvt_f32_bf16(p.bias[row]);
                UNROLL for (int n = 0; n < T::token_tiles; n++)
                    UNROLL for (int e = 0; e < 2; e++) {
                        const int token = first_token + n * 8 + (lane & 3) * 2 + e;
                        if (token >= p.m) continue;
                        float v = sums[u][n][i + e] * scale;
                        if constexpr (T::integer) v *= p.x_scale[token];
                        v += bias;
                        p.y[static_cast<size_t>(token) * p.n + row] = C::output == Output::f16 ? ptx::cvt_f16_f32(v) : ptx::cvt_bf16_f32(v);
                    }
            }
    }
};

}  // namespace sm80_packed

template <class C> __global__ void __launch_bounds__(C::threads, 1) sm80_packed_gemm(const __grid_constant__ Params p) {
    using T = sm80_packed::Traits<C>;
    static_assert(C::threads == C::row_warps * C::split_k_warps * 32 && T::rows % 64 == 0, "warps cover whole tiles of 64 rows");
    static_assert(C::shared_bytes == C::stages * T::stage_bytes + T::exchange_bytes, "the twin counts shared memory differently");
    static_assert(C::stages >= 2, "copies run ahead of products");
    ptx::griddepcontrol_launch_dependents();

    sm80_packed::Block<C> block;
    block.warp = static_cast<int>(ptx::warp_id()), block.lane = static_cast<int>(ptx::lane_id());
    block.row_warp = block.warp % C::row_warps, block.k_warp = block.warp / C::row_warps;
    block.shared = ptx::shared_address(ptx::dynamic_shared());

    // This CTA's stripe of the line (token tiles, then row tiles, then k blocks).
    const int depth = p.k_blocks, row_tiles = (p.row_tiles + T::tiles - 1) / T::tiles;
    const int total = (p.m + C::tile_m - 1) / C::tile_m * row_tiles * depth;  // below 2^24: see why_not
    const int blocks = static_cast<int>(gridDim.x), stripe = sm80_packed::quotient(total + blocks - 1, blocks);
    const int begin = static_cast<int>(blockIdx.x) * stripe, end = begin + stripe < total ? begin + stripe : total;
    ptx::griddepcontrol_wait();

    sm80_packed::Place ahead(begin, row_tiles, depth), here = ahead;
    int fetched = begin, fetch_stage = 0, stage = 0;
    const auto fetch = [&]() {
        if (fetched < end) {
            block.fetch(p, fetch_stage, ahead.row_tile, ahead.k_block, ahead.token_tile * C::tile_m);
            ahead.next(row_tiles, depth);
        }
        fetched++;
        if (++fetch_stage == C::stages) fetch_stage = 0;
        ptx::cp_async_commit_group();
    };
    UNROLL for (int i = 0; i < C::stages - 1; i++) fetch();
    block.clear();
    for (int i = begin; i < end; i++) {
        ptx::cp_async_wait_group<C::stages - 2>();
        __syncthreads();
        fetch();  // into the stage that was read before the barrier
        block.multiply(p, stage, here.row_tile);
        if (++stage == C::stages) stage = 0;
        if (i + 1 == end || here.k_block == depth - 1) {
            const int top = sm80_packed::quotient(here.tile * depth, stripe);  // first and last CTA that share this row tile
            const int bottom = sm80_packed::quotient((here.tile + 1) * depth - 1, stripe);
            block.finish(p, here.tile, here.row_tile, here.token_tile * C::tile_m, bottom - static_cast<int>(blockIdx.x), bottom - top);
            block.clear();
        }
        here.next(row_tiles, depth);
    }
}

#endif  // ANYBIT_SM80_PACKED_GEMM_CUH
