// sm90_packed_gemm: launch parameters, shared-memory layout and tile scheduler.
#ifndef ANYBIT_SM90_PACKED_GEMM_SHAPE_CUH
#define ANYBIT_SM90_PACKED_GEMM_SHAPE_CUH

#include "common/gate.cuh"
#include "packed/packed_dequantize.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

struct Params {
    ptx::TensorMap x;         // [tokens, inputs], box: tile_m / cluster_n rows x 128 bytes
    ptx::TensorMap x_tail;    // the same, boxes of Shape::tail_rows rows, for token tiles far from full
    const uint8_t* tiles;     // [k_blocks][weight_tiles][tile_bytes]
    const float* row_scale;   // [rows padded to 64]
    const uint8_t* row_zero;  // asym with per-row scales: [rows padded to 64], else null
    const float* x_scale;     // 8-bit activations: [tokens], else null
    const int32_t* x_sum;     // int8 with per-row scales: each token's sum of codes, [tokens], else null
    const uint16_t* bias;     // [rows] in y's type, or null
    uint16_t* y;              // [tokens, rows]
    int tokens, rows;         // the caller's M and N
    int k_blocks;             // ceil(inputs / 128)
    int weight_tiles;         // ceil(rows / 64)
    int row_tiles;            // clusters along the rows: ceil(weight_tiles / (row_warpgroups * cluster_n))
    int token_tiles;
    int raster;               // rasterization band: row tiles walked together
    // Of experts' products (sm90_grouped_gemm.cuh), else null: the weights are tall, expert by expert, and tokens are slots
    // sorted by expert; tokens and rows are of all experts together.
    int expert_tiles;                  // 64-row tiles of an expert
    const uint4* token_tile;           // of each: its expert, the expert's first token tile, first slot and slots
    const uint32_t* token_tile_count;  // as routing found it
    int expert_rows;                   // rows of Y that an expert writes: its own, without padding
};

struct StoreParams : Params {
    ptx::TensorMap y_map;     // [tokens, rows], box: tile_m tokens x 64 rows; the TMA store of Y (tensor_store)
};

namespace packed {

// Fused silu(gate) * up, or another gate. Weight rows alternate between eight of gate and eight of up, so that a thread, which holds rows g
// and g + 8, has both. Y has half as many columns as there are weight rows.
template <class Config, Gate gate> struct EndingWithSilu : Config {};
template <class Config, Gate... gate> struct EndingOf { using type = Config; };
template <class Config, Gate gate> struct EndingOf<Config, gate> { using type = EndingWithSilu<Config, gate>; };
template <class Config, Gate... gate> using EndOf = typename EndingOf<Config, gate...>::type;
template <class Config> constexpr bool ends_with_silu = false;
template <class Config, Gate gate> constexpr bool ends_with_silu<EndingWithSilu<Config, gate>> = true;
template <class Config> constexpr Gate gate_of = Gate::silu;
template <class Config, Gate gate> constexpr Gate gate_of<EndingWithSilu<Config, gate>> = gate;

template <class Config> constexpr int tile_bytes = 4 * unit_bytes_of<Config>();
template <class Config> constexpr bool bf16_out = Config::output == Output::bf16;

template <class Config>
struct PackedGemmShape {
    static constexpr int warpgroups = Config::row_warpgroups * Config::split_k_warpgroups;
    // Producer warps. One takes some 360 cycles a stage, longer than a small tile's MMAs.
    static constexpr int most_producers = Config::row_warpgroups * Config::tile_m < 256 ? 4 : 1;
    // Stages of two k blocks of four row tiles have MMAs enough for one producer: gate_up at 16 tokens 16.3 us for 16.7.
    static constexpr int at_once = Config::row_warpgroups == 4 && Config::span == 2 ? 1 : most_producers;
    static constexpr int producers = Config::stages < at_once ? Config::stages : at_once;
    static constexpr int producer_threads = Config::reallocates || most_producers > 1 ? 128 : 32;
    static constexpr bool bytes_of_x = Config::operand == Operand::s8 || Config::operand == Operand::e4m3;
    static constexpr int element_bytes = bytes_of_x ? 1 : 2;
    // wgmmas per half k block: k is 32 bytes, 64 if sparse.
    static constexpr int steps = is_sparse<Config>() ? element_bytes : 2 * element_bytes, step_bytes = 64 * element_bytes / steps;
    static constexpr int box_bytes = Config::tile_m * 128;
    static constexpr int x_bytes = box_bytes * element_bytes;  // 128 inputs: one box of 8-bit, two of 16-bit values
    // Out-of-bounds rows cost TMA twice the time of others: tiles far from full are loaded in smaller boxes.
    static constexpr int tail_rows = Config::cluster_n > 1 || Config::tile_m < 48 ? 0 : Config::tile_m <= 64 ? 16 : 32;
    static constexpr int w_bytes = Config::direct > 0 ? 0 : Config::row_warpgroups * tile_bytes<Config>;
    static constexpr int k_block_bytes = x_bytes + (w_bytes + 1023) / 1024 * 1024;
    static constexpr int stage_bytes = Config::span * k_block_bytes;
    static constexpr int ring_bytes = Config::stages * stage_bytes;
    static constexpr bool reduces = Config::split_k_warpgroups * Config::cluster_k > 1;
    // Split-K reduction: each CTA finishes a share of the tokens. Its own warpgroups' partial sums reuse the drained ring;
    // those from other CTAs have a receive buffer.
    static constexpr int groups = Config::tile_m / 8, fours = (groups + Config::cluster_k - 1) / Config::cluster_k;
    static constexpr int share = fours * 8;  // the last CTA's may be smaller
    static DEVICE int groups_of(int k_rank) { return max(min(groups - k_rank * fours, fours), 0); }
    static constexpr int share_bytes = reduces ? warpgroups * share * 256 : 0;
    // Output staging for split-K warpgroups, behind these sums.
    static constexpr int output_bytes = reduces && Config::split_k_warpgroups > 1 ? Config::row_warpgroups * share * 128 : 0;
    static constexpr int reduce_bytes = share_bytes + output_bytes;
    static constexpr int receive_offset = ring_bytes > reduce_bytes ? ring_bytes : reduce_bytes;
    // Halved row tiles: each CTA finishes half of the tokens and receives one warpgroup's sums of them.
    static constexpr int half_bytes = Config::halves ? Config::tile_m / 2 * 256 : 0;
    static constexpr int body_bytes = receive_offset + (Config::cluster_k - 1) * share_bytes + half_bytes;
    static constexpr int staging_rows = Config::tensor_store ? Config::tile_m : Config::epilogue_stages * Config::epilogue_tile;
    static constexpr int staging_bytes = reduces ? 0 : warpgroups * staging_rows * 128;
    static constexpr int barrier_offset = body_bytes + staging_bytes;
    // Pads the request so that no more than min_blocks_per_sm CTAs share an SM: other SMs would idle.
    static constexpr int needed = barrier_offset + Config::stages * 24 + 8;
    static constexpr int least = Config::min_blocks_per_sm == 1 ? 119808 : 81920;
    static constexpr int bytes = needed > least ? needed : least;
};

// Pipeline state: stage index and mbarrier phase parity.
template <int stages>
struct RingCursor {
    int stage = 0;
    uint32_t parity = 0;
    DEVICE void advance(int steps) {
        stage += steps;
        if (stage >= stages) {
            stage -= stages;
            parity ^= 1;
        }
    }
};

// Base addresses of the stages' mbarriers: weights landed, X landed, stage consumed.
struct RingBarriers {
    uint32_t full_w, full_x, empty, received;  // received: a single one, for other CTAs' partial sums
};

struct TilePlace {
    int row_tile, token_tile;
};

// A tile of an expert: its first 64-row tile, the end of the expert's, its tokens.
struct ExpertPlace {
    int tile, end, expert, first_token, end_token;
};
template <class Config> struct OfExperts : Config {};
template <class Config> constexpr bool of_experts = false;
template <class Config> constexpr bool of_experts<OfExperts<Config>> = true;
template <class Config> constexpr bool ends_with_silu<OfExperts<Config>> = ends_with_silu<Config>;
template <class Config> constexpr Gate gate_of<OfExperts<Config>> = gate_of<Config>;
// The same for n tokens of a tile. Without the tile's place in shared memory: for its sums alone.
template <class Config, int n> struct Narrow : Config {
    static constexpr int tile_m = n;
};
template <class Config, int n> constexpr bool of_experts<Narrow<Config, n>> = of_experts<Config>;
template <class Config, int n> constexpr Gate gate_of<Narrow<Config, n>> = gate_of<Config>;
// Whether x is bf16 as fp16, with a scale a row (halve.cuh).
template <class Config> constexpr bool halved = of_experts<Config> && Config::operand == Operand::f16 && bf16_out<Config>;
template <class Config> using PlaceOf = typename Choose<of_experts<Config>, ExpertPlace, TilePlace>::type;

// Rasterization: bands of `raster` row tiles, walked token tile by token tile, so that concurrent CTAs share X and W in L2.
DEVICE TilePlace tile_place(const Params& p, int tile) {
    const int band = tile / (p.raster * p.token_tiles), within = tile - band * p.raster * p.token_tiles;
    const int first = band * p.raster, height = min(p.raster, p.row_tiles - first);
    return {first + within % height, within / height};
}

// A tile of experts, of which routing wrote `found`: an expert's token tiles run fastest, so that its weights are read from
// memory once. They are as even as can be: else some CTAs would have whole tiles alone, and others rests.
template <class Config> DEVICE ExpertPlace expert_place(const Params& p, int tile, const uint4& found) {
    const int expert = found.x, first = found.z, tokens = found.w;
    const int within = tile - static_cast<int>(found.y) * p.row_tiles, token_tiles = (tokens + Config::tile_m - 1) / Config::tile_m;
    const int row_tile = within / token_tiles, begin = expert * p.expert_tiles;
    const int even = min((tokens + 16 * token_tiles - 1) / (16 * token_tiles) * 16, Config::tile_m), token = (within - row_tile * token_tiles) * even;
    return {begin + row_tile * Config::row_warpgroups, begin + p.expert_tiles, expert, first + token, first + min(token + even, tokens)};
}

// The same with Config::block_tiles: each CTA owns a contiguous range of 64-row tiles, row_warpgroups at a time.
template <class Config> DEVICE TilePlace place_of(const Params& p, int tile) {
    if constexpr (Config::block_tiles == 0) return tile_place(p, tile);
    const int block = tile % gridDim.x, position = tile / gridDim.x;
    return {block % p.row_tiles * Config::block_tiles + position * Config::row_warpgroups, block / p.row_tiles};
}
// End of the 64-row tiles that this place may cover.
template <class Config> DEVICE int end_of(const Params& p, const TilePlace& place) {
    if constexpr (Config::block_tiles == 0) return p.weight_tiles;
    return min((place.row_tile / Config::block_tiles + 1) * Config::block_tiles, p.weight_tiles);
}
template <class Config> DEVICE int end_of(const Params&, const ExpertPlace& place) { return place.end; }
// A place's tokens.
template <class Config> DEVICE int first_token_of(const TilePlace& place) { return place.token_tile * Config::tile_m; }
template <class Config> DEVICE int first_token_of(const ExpertPlace& place) { return place.first_token; }
DEVICE int end_token_of(const Params& p, const TilePlace&) { return p.tokens; }
DEVICE int end_token_of(const Params&, const ExpertPlace& place) { return place.end_token; }

// First 64-row tile of a CTA. Two CTAs that split a row tile cover 2 * row_warpgroups - 1 together.
template <class Config>
DEVICE int first_tile(const TilePlace& place, int row_rank, int half) {
    if (Config::block_tiles > 0) return place.row_tile;
    if (Config::halves) return place.row_tile * (2 * Config::row_warpgroups - 1) + half * (Config::row_warpgroups - 1);
    return (place.row_tile * Config::cluster_n + row_rank) * Config::row_warpgroups;
}
template <class Config>
DEVICE int first_tile(const ExpertPlace& place, int, int) { return place.tile; }

// K range of the halved row tile for one of its two CTAs.
template <class Config>
struct Half {
    int begin, end;
    DEVICE Half(const Params& p, int half) : begin(half * (p.k_blocks / Config::span) / 2), end((half + 1) * (p.k_blocks / Config::span) / 2) {}
    DEVICE bool has(int round) const { return begin <= round && round < end; }
};

// A CTA's work on one tile: `count` rounds from round `first` of K on; a round is the `span` k blocks of a stage.
struct Part {
    int tile, first, count;
};

// Persistent tile scheduler: cluster c takes tiles c, c + clusters, ..., over all of K or the CTA's split-K share. Only
// `position` is kept; the rest is recomputed, to save registers.
template <class Config>
struct Walk {
    static constexpr int cluster_size = Config::cluster_k * Config::cluster_n * (Config::halves ? 2 : 1);
    int position = 0;

    DEVICE static int clusters() { return gridDim.x / cluster_size; }
    DEVICE bool at(const Params& p, int k_rank, Part& part) const {
        part.tile = blockIdx.x / cluster_size + position * clusters();
        const int rounds = p.k_blocks / Config::span;
        part.first = k_rank * rounds / Config::cluster_k;
        part.count = (k_rank + 1) * rounds / Config::cluster_k - part.first;
        if constexpr (Config::block_tiles > 0) {
            const int first = position * Config::row_warpgroups;
            return first < Config::block_tiles && blockIdx.x % p.row_tiles * Config::block_tiles + first < p.weight_tiles;
        }
        return part.tile < p.row_tiles * p.token_tiles;
    }
    DEVICE void begin(const Params&) {}
    DEVICE TilePlace place(const Params& p, const Part& part) { return place_of<Config>(p, part.tile); }
    DEVICE void advance() { position++; }
};

// The same over experts' tiles, as routing wrote them: a tile's are loaded while the one ahead is worked on.
template <class Config>
struct Walk<OfExperts<Config>> {
    static constexpr int cluster_size = 1;
    int position = 0, tile, end;
    uint4 found;

    DEVICE uint4 found_at(const Params& p, int at) const { return ptx::ld_global_cg_v4(p.token_tile + at / p.row_tiles); }
    DEVICE void begin(const Params& p) {
        tile = blockIdx.x;
        found = found_at(p, tile);  // may be of no tile, but within the array
        end = p.row_tiles * static_cast<int>(ptx::ld_global_cg_u32(p.token_tile_count));
    }
    DEVICE bool at(const Params& p, int, Part& part) const {
        part = {tile, 0, p.k_blocks / Config::span};
        return tile < end;
    }
    DEVICE ExpertPlace place(const Params& p, const Part&) {
        const ExpertPlace place = expert_place<Config>(p, tile, found);
        tile += gridDim.x;
        if (tile < end) found = found_at(p, tile);
        return place;
    }
    DEVICE void advance() { position++; }
};

// Accumulator types. wgmma accumulates in int32 or float32. Where group scales apply, or to limit the error of e4m3's 14-bit
// accumulation, sums are promoted: added to float totals after every group or k block.
template <class Config>
struct Sums {
    static constexpr bool promotes =
        Config::operand == Operand::e4m3 || (Config::operand == Operand::s8 && Config::group != 0);
    // Codes are multiplied unsigned; the epilogue subtracts the zero-point term.
    static constexpr bool raw = Config::operand == Operand::s8 && Config::group == 0 && !is_sparse<Config>();
    using Product = typename Choose<Config::operand == Operand::s8, int32_t, float>::type;
    using Total = typename Choose<promotes, float, Product>::type;
};

template <class Config>
using Dequantize = typename Choose<Config::operand == Operand::s8 || Config::operand == Operand::e4m3, Dequantize8<Config>,
                              Dequantize16<Config>>::type;

}  // namespace packed

#endif  // ANYBIT_SM90_PACKED_GEMM_SHAPE_CUH
