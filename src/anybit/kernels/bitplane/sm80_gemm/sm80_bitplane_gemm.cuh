// Bit-plane GEMM on binary tensor cores by mma.sync (sm_80 to sm_90): p-bit weights times q-bit activations.
// Y[m, n] = sum over k of products of codes, then scales; a tile's partial products never leave registers (APT-LLM's
// recovery-oriented scheduling). The product of planes i and j weighs 2^(i+j), so that one accumulator set suffices: it
// walks the diagonals d = i + j, down in one stage, rotating left by one bit between diagonals, up in the next, rotating
// right. A rotated accumulator is the sum in units of 2^d with its low bits wrapped to the top; nothing is lost while the
// sum stays below 2^32.
//
// Weights are the A operand (16 rows), tokens B (8 columns). The cp.async pipeline runs `stages` - 1 ahead.
#ifndef ANYBIT_SM80_BITPLANE_GEMM_CUH
#define ANYBIT_SM80_BITPLANE_GEMM_CUH

#include "bitplane/bitplane_terms.cuh"

namespace mma_tiles {

// Swizzled shared-memory offset of a row's 16-byte piece: ldmatrix of eight rows has no bank conflicts.
template <int row_bytes> DEVICE uint32_t place(int row, int piece) {
    const int turn = row_bytes == 128 ? row & 7 : row_bytes == 64 ? (row >> 1) & 3 : (row >> 2) & 1;
    return row * row_bytes + ((piece ^ turn) << 4);
}

// Issues the cp.async of one stage: `bits` planes of `tile` rows from row `first`, zero-filled past the planes' end.
// A thread copies one piece of every `lap`-th row, so that its addresses differ by constants.
template <class Config, int bits, int tile>
DEVICE void copy_stage(uint32_t shared, const uint8_t* planes, int rows, int first, int stage) {
    constexpr int pieces = Config::stage_k / 128, row_bytes = Config::stage_k / 8, lap = Config::threads / pieces;
    static_assert(lap % 8 == 0, "the swizzle of a thread's pieces must not change from lap to lap");
    const int chunk = stage / (planes::chunk_k / Config::stage_k), offset = stage * pieces % 8;
    const int piece = threadIdx.x % pieces, row = threadIdx.x / pieces;
    const int64_t plane_bytes = static_cast<int64_t>(rows) * planes::row_bytes;
    const uint8_t* from = planes + planes::piece_offset(chunk, 0, bits, rows, first + row, offset + piece);
    const uint32_t to = shared + place<row_bytes>(row, piece);
    UNROLL for (int plane = 0; plane < bits; ++plane) {
        UNROLL for (int j = 0; j < tile; j += lap) {
            if (tile % lap != 0 && row + j >= tile) continue;
            ptx::cp_async<16>(to + (plane * tile + j) * row_bytes, from + j * planes::row_bytes, first + row + j < rows ? 16 : 0);
        }
        from += plane_bytes;
    }
}

template <class Config> struct Tile {
    static constexpr int row_bytes = Config::stage_k / 8;
    static constexpr int weight_bytes = Config::weight_bits * Config::tile_n * row_bytes;
    static constexpr int activation_bytes = Config::activation_bits * Config::tile_m * row_bytes;
    static constexpr int stage_bytes = weight_bytes + activation_bytes;
    static constexpr int rows = Config::tile_n / Config::warps_n / 16;    // MMA tiles of weights per warp
    static constexpr int columns = Config::tile_m / Config::warps_m / 8;  // MMA tiles of tokens per warp
    static constexpr int steps = Config::stage_k / 256 / Config::warps_k;
    static constexpr int pitch = Config::tile_n + 4;                      // row pitch of the staged sums, in words
};

// This warp's MMAs of one stage. down: from the highest diagonal to the lowest.
template <class Config>
DEVICE void multiply(int32_t (&sum)[Tile<Config>::rows][Tile<Config>::columns][4], uint32_t weights, uint32_t tokens, bool down) {
    using T = Tile<Config>;
    constexpr int last = Config::weight_bits + Config::activation_bits - 2;
    const int lane = ptx::lane_id(), warp = static_cast<int>(threadIdx.x / 32);
    const int warp_n = warp % Config::warps_n, warp_m = warp / Config::warps_n % Config::warps_m;
    const int step0 = warp / (Config::warps_n * Config::warps_m) * T::steps;
    const int weight_row = warp_n * T::rows * 16 + (lane & 15), token_row = warp_m * T::columns * 8 + (lane & 7);
    const uint32_t turn = down ? 1 : 31;
#pragma unroll 1
    for (int walked = 0; walked <= last; ++walked) {
        const int diagonal = down ? last - walked : walked;
        const int low = diagonal < Config::activation_bits ? 0 : diagonal - Config::activation_bits + 1;
        const int high = diagonal < Config::weight_bits ? diagonal : Config::weight_bits - 1;
#pragma unroll 1
        for (int plane = low; plane <= high; ++plane) {
            const uint32_t w = weights + plane * Config::tile_n * T::row_bytes;
            const uint32_t x = tokens + (diagonal - plane) * Config::tile_m * T::row_bytes;
            UNROLL for (int step = 0; step < T::steps; ++step) {
                uint32_t a[T::rows][4], b[T::columns][2];
                UNROLL for (int r = 0; r < T::rows; ++r)
                    ptx::ldmatrix_x4(a[r], w + place<T::row_bytes>(weight_row + 16 * r, 2 * (step0 + step) + (lane >> 4)));
                UNROLL for (int c = 0; c + 1 < T::columns; c += 2) {
                    uint32_t pair[4];
                    const int row = token_row + 8 * c + (lane >> 4) * 8;
                    ptx::ldmatrix_x4(pair, x + place<T::row_bytes>(row, 2 * (step0 + step) + (lane >> 3 & 1)));
                    b[c][0] = pair[0];
                    b[c][1] = pair[1];
                    b[c + 1][0] = pair[2];
                    b[c + 1][1] = pair[3];
                }
                if constexpr (T::columns % 2 == 1)
                    ptx::ldmatrix_x2(b[T::columns - 1], x + place<T::row_bytes>(token_row + 8 * (T::columns - 1),
                                                                                2 * (step0 + step) + (lane >> 3 & 1)));
                UNROLL for (int r = 0; r < T::rows; ++r)
                    UNROLL for (int c = 0; c < T::columns; ++c) ptx::mma_m16n8k256_b1(sum[r][c], a[r], b[c]);
            }
        }
        if (walked < last) {
            UNROLL for (int r = 0; r < T::rows; ++r)
                UNROLL for (int c = 0; c < T::columns; ++c)
                    UNROLL for (int e = 0; e < 4; ++e) {
                        const uint32_t v = sum[r][c][e];
                        sum[r][c][e] = __funnelshift_l(v, v, turn);
                    }
        }
    }
}

// Stages the sums in shared memory, [tile_m][pitch], for coalesced stores of Y; split-K warps add up in turn.
template <class Config>
DEVICE void stage_sums(const int32_t (&sum)[Tile<Config>::rows][Tile<Config>::columns][4], uint32_t turn) {
    using T = Tile<Config>;
    uint32_t* staged = reinterpret_cast<uint32_t*>(ptx::dynamic_shared());
    const int lane = ptx::lane_id(), warp = static_cast<int>(threadIdx.x / 32);
    const int n = warp % Config::warps_n * T::rows * 16 + lane / 4;
    const int m = warp / Config::warps_n % Config::warps_m * T::columns * 8 + lane % 4 * 2;
    const int part = warp / (Config::warps_n * Config::warps_m);
#pragma unroll 1
    for (int k = 0; k < Config::warps_k; ++k) {
        __syncthreads();
        if (part != k) continue;
        UNROLL for (int r = 0; r < T::rows; ++r)
            UNROLL for (int c = 0; c < T::columns; ++c)
                UNROLL for (int e = 0; e < 4; ++e) {
                    uint32_t* to = staged + (m + 8 * c + (e & 1)) * T::pitch + n + 16 * r + 8 * (e >> 1);
                    const uint32_t v = __funnelshift_l(static_cast<uint32_t>(sum[r][c][e]), static_cast<uint32_t>(sum[r][c][e]), turn);
                    *to = k == 0 ? v : *to + v;
                }
    }
    __syncthreads();
}

template <bool is_16bit> struct Unsigned { using Type = uint16_t; };
template <> struct Unsigned<false> { using Type = uint32_t; };

template <Output output> DEVICE uint32_t rounded(float v) {
    if constexpr (output == Output::f16) return ptx::cvt_f16_f32(v);
    if constexpr (output == Output::bf16) return ptx::cvt_bf16_f32(v);
    return __float_as_uint(v);
}

}  // namespace mma_tiles

// Config: weight_bits, activation_bits, weight_code, activation_code, output, short_sums (false here: there are few results
// per MMA, so I2F, which takes any size, is cheap enough), tile_n, tile_m, warps_n, warps_m, warps_k, stage_k, stages,
// aligned (rows of Y are 16-byte aligned and a multiple of eight long), threads, shared_bytes.
template <class Config> __global__ void __launch_bounds__(Config::threads) sm80_bitplane_gemm(const __grid_constant__ Params p) {
    using namespace mma_tiles;
    using T = Tile<Config>;
    static_assert(Config::threads == 32 * Config::warps_n * Config::warps_m * Config::warps_k, "a thread for every lane");
    static_assert(Config::shared_bytes >= Config::stages * T::stage_bytes, "shared memory holds every stage");
    static_assert(Config::shared_bytes >= 4 * Config::tile_m * T::pitch, "shared memory holds the staged sums");
    static_assert(T::steps >= 1 && planes::chunk_k % Config::stage_k == 0, "stages divide chunks");
    const uint32_t shared = ptx::shared_address(ptx::dynamic_shared());

    // Rasterization in bands of eight weight tiles, so that concurrent CTAs share both operands in L2.
    constexpr int band = 8;
    const int tiles_m = (p.m + Config::tile_m - 1) / Config::tile_m, tiles_n = (p.n + Config::tile_n - 1) / Config::tile_n;
    const int first = static_cast<int>(blockIdx.x) / (band * tiles_m) * band, inside = blockIdx.x - first * tiles_m;
    const int width = tiles_n - first < band ? tiles_n - first : band;
    const int n0 = (first + inside % width) * Config::tile_n, m0 = inside / width * Config::tile_m;
    const int stages = p.chunks * (planes::chunk_k / Config::stage_k);

    const auto slot = [shared](int stage) { return shared + static_cast<uint32_t>(stage % Config::stages) * T::stage_bytes; };
    ptx::griddepcontrol_launch_dependents();
    // PDL: weights don't depend on the previous kernel; their first stages load before griddepcontrol.wait.
    for (int s = 0; s < Config::stages - 1 && s < stages; ++s)
        copy_stage<Config, Config::weight_bits, Config::tile_n>(slot(s), p.weights, p.rows_n, n0, s);
    ptx::griddepcontrol_wait();
    for (int s = 0; s < Config::stages - 1; ++s) {
        if (s < stages)
            copy_stage<Config, Config::activation_bits, Config::tile_m>(slot(s) + T::weight_bytes, p.activations, p.rows_m, m0, s);
        ptx::cp_async_commit_group();
    }

    int32_t sum[T::rows][T::columns][4] = {};
    for (int s = 0; s < stages; ++s) {
        ptx::cp_async_wait_group<Config::stages - 2>();
        __syncthreads();  // stage s is visible to all, and the slot of stage s - 1 is free
        const int next = s + Config::stages - 1;
        if (next < stages) {
            copy_stage<Config, Config::weight_bits, Config::tile_n>(slot(next), p.weights, p.rows_n, n0, next);
            copy_stage<Config, Config::activation_bits, Config::tile_m>(slot(next) + T::weight_bytes, p.activations, p.rows_m, m0, next);
        }
        ptx::cp_async_commit_group();
        multiply<Config>(sum, slot(s), slot(s) + T::weight_bytes, s % 2 == 0);
    }
    ptx::cp_async_wait_all();
    // An odd number of stages ended on the lowest diagonal, an even number on the highest.
    stage_sums<Config>(sum, stages % 2 == 0 ? Config::weight_bits + Config::activation_bits - 2 : 0);

    using Element = typename Unsigned<Terms<Config>::is_16bit>::Type;
    constexpr int vector = 16 / sizeof(Element);
    constexpr int across = Config::tile_n / vector, down = Config::threads / across;
    const int n = n0 + threadIdx.x % across * vector;
    const uint32_t* staged = reinterpret_cast<const uint32_t*>(ptx::dynamic_shared()) + threadIdx.x % across * vector;
    using Term = Terms<Config>;
    typename Term::Row row[vector];
    UNROLL for (int i = 0; i < vector; ++i) row[i] = Term::row(p, n + i);
    for (int token = threadIdx.x / across; token < Config::tile_m && m0 + token < p.m; token += down) {
        const int m = m0 + token;
        const typename Term::Column column = Term::column(p, m);
        uint32_t word[vector];
        UNROLL for (int i = 0; i < vector; ++i) {
            const int32_t sum_of_codes = staged[token * T::pitch + i];
            if constexpr (Config::output == Output::s32) word[i] = static_cast<uint32_t>(Term::value(sum_of_codes, row[i], column));
            else word[i] = rounded<Config::output>(Term::result(sum_of_codes, row[i], column));
        }
        Element* y = static_cast<Element*>(p.y) + m * p.y_stride + n;
        if (Config::aligned && n < p.n) {
            const auto part = [&](int i) { return vector == 8 ? word[2 * i] | word[2 * i + 1] << 16 : word[i]; };
            ptx::st_global_cs_v4(y, make_uint4(part(0), part(1), part(2), part(3)));
        } else {
            UNROLL for (int i = 0; i < vector; ++i)
                if (n + i < p.n) y[i] = static_cast<Element>(word[i]);
        }
    }
}

#endif  // ANYBIT_SM80_BITPLANE_GEMM_CUH
