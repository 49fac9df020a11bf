// Y = X W^T with packed weights on wgmma, for more than a handful of tokens: the transposed product Y^T = W X^T, so that
// 64 rows of weights fill M and tokens are N. Weights become 16-bit or 8-bit values in registers, the A operand.
//
// A block has Config::row_warpgroups x Config::k_warpgroups consumer warpgroups and one producer warp. A stage of the ring
// holds 128 inputs (a unit): Config::tokens rows of X, swizzled by tensor-map copies, and the packed tiles of the block's
// rows, one bulk copy. Blocks of a cluster share K (k_blocks, sums sent through distributed shared memory) and, as
// neighbours along the rows (row_blocks), each other's loads of X (multicast). Blocks that are no cluster share K as well
// (k_splits): their sums travel through L2.
#ifndef ANYBIT_PACKED_LARGE_CUH
#define ANYBIT_PACKED_LARGE_CUH

#include "packed_widen.cuh"
#include "ptx_tensor.cuh"
#include "ptx_wgmma.cuh"


struct Params {
    ptx::TensorMap x;         // [tokens, inputs], box: 128 bytes of a row x tokens / row_blocks
    const uint8_t* tiles;     // [units][weight_tiles][tile_bytes]
    const float* row_scale;   // [rows padded to 64]
    const uint8_t* row_zero;  // whole rows with zero points: [rows padded to 64], else null
    const float* x_scale;     // 8-bit activations: [tokens], else null
    const uint16_t* bias;     // [rows] in y's type, or null
    uint16_t* y;              // [tokens, rows]
    float* partials;          // k_splits > 1: [tiles][owner][k_splits - 1][share of a tile], else null
    uint32_t* arrived;        // k_splits > 1: [tiles][owner], zero between launches, else null
    int tokens, rows;         // M and N as the caller sees them
    int units;                // inputs padded to 128, over 128
    int weight_tiles;         // rows padded to 64, over 64
    int row_tiles;            // row ranges of clusters: ceil(weight_tiles / (row_warpgroups * row_blocks))
    int token_tiles;
    int raster;               // row tiles that neighbouring clusters walk together
};

namespace packed {

template <class Config>
struct PackedLargeShape {
    static constexpr int warpgroups = Config::row_warpgroups * Config::k_warpgroups;
    static constexpr bool bytes_of_x = Config::operand == Operand::s8 || Config::operand == Operand::e4m3;
    static constexpr int element_bytes = bytes_of_x ? 1 : 2;
    static constexpr int steps = 2 * element_bytes;  // products of 32 bytes of inputs in half a unit
    static constexpr int box_bytes = Config::tokens * 128;
    static constexpr int x_bytes = box_bytes * element_bytes;  // 128 inputs are one box of bytes, two of 16 bits
    static constexpr int w_bytes = Config::row_warpgroups * Config::tile_bytes;
    static constexpr int stage_bytes = x_bytes + (w_bytes + 1023) / 1024 * 1024;
    static constexpr int ring_bytes = Config::stages * stage_bytes;
    static constexpr int k_shares = Config::k_blocks * Config::k_splits;  // blocks that share the inputs of a tile
    static constexpr bool reduces = Config::k_warpgroups * k_shares > 1;
    static constexpr int row_stride = 68;  // floats between tokens of a 64-row partial sum: no bank conflicts
    // Partial sums, by the block that adds them up; a block keeps those for others in its ring once that is empty, and has
    // a place of its own for what it receives.
    static constexpr int share = Config::tokens / k_shares;
    static constexpr int share_bytes = reduces ? warpgroups * share * row_stride * 4 : 0;
    static constexpr int partial_bytes = k_shares * share_bytes;
    static constexpr int receive_offset = ring_bytes > partial_bytes ? ring_bytes : partial_bytes;
    static constexpr int body_bytes = receive_offset + (Config::k_blocks - 1) * share_bytes;
    static constexpr int staging_bytes = reduces ? 0 : warpgroups * 4 * 512 * Config::places;
    static constexpr int barrier_offset = body_bytes + staging_bytes;
    static constexpr int bytes = barrier_offset + Config::stages * 24 + 8;
};

// A stage and the parity of the barriers of its current use.
template <int stages>
struct RingCursor {
    int stage = 0;
    uint32_t parity = 0;
    PTX void advance(int steps) {
        stage += steps;
        if (stage >= stages) {
            stage -= stages;
            parity ^= 1;
        }
    }
};

// The first barriers of the ring's stages: weights have landed, x has landed, all have been read.
struct RingBarriers {
    uint32_t full_w, full_x, empty, received;  // received: one, for the partial sums of other blocks
};

struct TilePlace {
    int row_tile, token_tile;
};

// Bands of `raster` row tiles, walked token tile by token tile, so that blocks at work together share X and W in L2.
PTX TilePlace tile_place(const Params& p, int tile) {
    const int band = tile / (p.raster * p.token_tiles), within = tile - band * p.raster * p.token_tiles;
    const int first = band * p.raster, height = min(p.raster, p.row_tiles - first);
    return {first + within % height, within / height};
}

template <bool condition, class Yes, class No> struct Choose { using type = Yes; };
template <class Yes, class No> struct Choose<false, Yes, No> { using type = No; };

// Products accumulate as the tensor cores do, in int32 or float32, and where a group's scale must be applied to them, or
// where e4m3's 14 bits must not add up for long, they are promoted: added to float totals after every group or unit.
template <class Config>
struct Sums {
    static constexpr bool promotes =
        Config::operand == Operand::e4m3 || (Config::operand == Operand::s8 && Config::group != 0);
    using Product = typename Choose<Config::operand == Operand::s8, int32_t, float>::type;
    using Total = typename Choose<promotes, float, Product>::type;
};

template <class Config>
using Widen = typename Choose<Config::operand == Operand::s8 || Config::operand == Operand::e4m3, Widen8<Config>,
                              Widen16<Config>>::type;

template <class Config>
PTX void multiply(typename Sums<Config>::Product (&sum)[Config::tokens / 2], const uint32_t (&a)[4], uint64_t b,
                  bool accumulate = true) {
    if constexpr (Config::operand == Operand::f16)
        ptx::wgmma_f16<Config::tokens>(sum, a, b, accumulate);
    else if constexpr (Config::operand == Operand::bf16)
        ptx::wgmma_bf16<Config::tokens>(sum, a, b, accumulate);
    else if constexpr (Config::operand == Operand::s8)
        ptx::wgmma_s8<Config::tokens>(sum, a, b, accumulate);
    else
        ptx::wgmma_e4m3<Config::tokens>(sum, a, b, accumulate);
}

// The thread that fills the ring. Weights do not depend on the kernel before this one, so the ring is filled with them
// first, before the block has even met.
template <class Config>
struct Producer {
    using Shape = PackedLargeShape<Config>;
    const Params& p;
    const uint32_t ring;
    const RingBarriers barriers;
    const int row_rank, cluster, clusters, first_unit, units;
    uint16_t sharers = 0;
    uint64_t policy;

    PTX Producer(const Params& p, uint32_t ring, const RingBarriers& barriers, int k_rank, int row_rank, int cluster,
                 int clusters)
        : p(p), ring(ring), barriers(barriers), row_rank(row_rank), cluster(cluster), clusters(clusters),
          first_unit(k_rank * p.units / Shape::k_shares),
          units((k_rank + 1) * p.units / Shape::k_shares - k_rank * p.units / Shape::k_shares) {
        for (int i = 0; i < Config::row_blocks; i++) sharers |= 1u << (i * Config::k_blocks + k_rank);
        policy = ptx::createpolicy_evict_first();
    }
    PTX int early() const { return min(Config::early, units); }

    PTX void load_w(const TilePlace& place, int unit, int stage) const {
        const int first = (place.row_tile * Config::row_blocks + row_rank) * Config::row_warpgroups;
        const int count = max(min(Config::row_warpgroups, p.weight_tiles - first), 0);
        const uint32_t bytes = count * Config::tile_bytes, barrier = barriers.full_w + 8 * stage;
        ptx::mbarrier_arrive_expect_tx(barrier, bytes);
        if (count == 0) return;
        const uint8_t* source =
            p.tiles + (static_cast<size_t>(first_unit + unit) * p.weight_tiles + first) * Config::tile_bytes;
        const uint32_t target = ring + stage * Shape::stage_bytes + Shape::x_bytes;
        if (p.token_tiles == 1)
            ptx::cp_async_bulk_load_hint(target, source, bytes, barrier, policy);
        else
            ptx::cp_async_bulk_load(target, source, bytes, barrier);
    }
    PTX void load_x(const TilePlace& place, int unit, int stage) const {
        constexpr int share = Config::tokens / Config::row_blocks;
        const uint32_t barrier = barriers.full_x + 8 * stage;
        ptx::mbarrier_arrive_expect_tx(barrier, Shape::x_bytes);
        for (int box = 0; box < Shape::element_bytes; box++) {
            const uint32_t target = ring + stage * Shape::stage_bytes + box * Shape::box_bytes + row_rank * share * 128;
            const int x = (first_unit + unit) * 128 + box * (128 / Shape::element_bytes);
            const int y = place.token_tile * Config::tokens + row_rank * share;
            if (Config::row_blocks > 1)
                ptx::cp_async_bulk_tensor_2d_multicast(target, &p.x, x, y, barrier, sharers);
            else
                ptx::cp_async_bulk_tensor_2d(target, &p.x, x, y, barrier);
        }
    }
    PTX void begin() const {
        const TilePlace place = tile_place(p, cluster);
        for (int i = 0; i < early(); i++) load_w(place, i, i);
    }
    PTX void run() const {
        TilePlace place = tile_place(p, cluster);
        ptx::griddepcontrol_wait();
        for (int i = 0; i < early(); i++) load_x(place, i, i);
        RingCursor<Config::stages> cursor;
        int skip = early();
        for (int tile = cluster; tile < p.row_tiles * p.token_tiles; tile += clusters) {
            place = tile_place(p, tile);
            for (int unit = 0; unit < units; unit++) {
                if (skip > 0) {
                    skip--;
                } else {
                    // A stage's first use waits for nothing: a fresh barrier counts as having completed parity 1.
                    ptx::mbarrier_wait_parity(barriers.empty + 8 * cursor.stage, cursor.parity ^ 1);
                    load_w(place, unit, cursor.stage);
                    load_x(place, unit, cursor.stage);
                }
                cursor.advance(1);
            }
        }
    }
};

// Issues the products of one half of a unit, and waits until the set of registers that is written next is free.
template <class Config, int steps>
PTX void multiply_half(typename Sums<Config>::Product (&sum)[Config::tokens / 2], const uint32_t (&a)[steps][4], uint64_t b) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < steps; i++) multiply<Config>(sum, a[i], ptx::wgmma_advance(b, 32 * i));
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<Config::register_sets - 1>();
}

// One tile's products over its units, a unit in two halves with a set of registers each: while the tensor cores work on
// one half the next is widened. Returns the stage that is still to be released.
template <class Config, class Release>
PTX int accumulate(typename Sums<Config>::Product (&sum)[Config::tokens / 2], Widen<Config>& widen, uint32_t ring,
                   uint32_t my_unit, const RingBarriers& barriers, int first, int units, RingCursor<Config::stages>& cursor,
                   const Release& release) {
    using Shape = PackedLargeShape<Config>;
    constexpr int steps = Shape::steps;
    uint32_t a0[steps][4], a1[steps][4];
    int previous = -1;
    ptx::wgmma_touch(sum);
    for (int unit = first; unit < units; unit += Config::k_warpgroups) {
        const uint32_t stage = ring + cursor.stage * Shape::stage_bytes;
        ptx::mbarrier_wait_parity(barriers.full_w + 8 * cursor.stage, cursor.parity);
        widen.load(stage + my_unit);
        widen.template widen<0, steps * 4>(a0);
        ptx::mbarrier_wait_parity(barriers.full_x + 8 * cursor.stage, cursor.parity);
        const uint64_t b0 = ptx::wgmma_descriptor(stage, ptx::Swizzle::bytes_128, 1024);
        const uint64_t b1 = ptx::wgmma_advance(b0, steps == 4 ? Shape::box_bytes : 64);
        multiply_half<Config>(sum, a0, b0);
        if (previous >= 0) release(previous);
        if constexpr (Config::register_sets == 2) {
            widen.template widen<steps * 4, steps * 8>(a1);
            multiply_half<Config>(sum, a1, b1);
        } else {
            widen.template widen<steps * 4, steps * 8>(a0);
            multiply_half<Config>(sum, a0, b1);
        }
        previous = cursor.stage;
        cursor.advance(Config::k_warpgroups);
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_touch(sum);
    return previous;
}

// The same with products promoted after every group; other warpgroups keep the tensor cores busy meanwhile.
template <class Config, class Release>
PTX int accumulate_promoting(float (&sum)[Config::tokens / 2], Widen<Config>& widen, uint32_t ring, uint32_t my_unit,
                             const RingBarriers& barriers, int first, int units, RingCursor<Config::stages>& cursor,
                             const Release& release) {
    using Shape = PackedLargeShape<Config>;
    constexpr int parts = Widen<Config>::parts, steps = 4 / parts;
    typename Sums<Config>::Product product[Config::tokens / 2];
    uint32_t a[4][4];
    for (int unit = first; unit < units; unit += Config::k_warpgroups) {
        const uint32_t stage = ring + cursor.stage * Shape::stage_bytes;
        ptx::mbarrier_wait_parity(barriers.full_w + 8 * cursor.stage, cursor.parity);
        widen.load(stage + my_unit);
        widen.template widen<0, 16>(a);
        ptx::mbarrier_wait_parity(barriers.full_x + 8 * cursor.stage, cursor.parity);
        const uint64_t b = ptx::wgmma_descriptor(stage, ptx::Swizzle::bytes_128, 1024);
#pragma unroll
        for (int part = 0; part < parts; part++) {
            ptx::wgmma_fence();
#pragma unroll
            for (int i = part * steps; i < (part + 1) * steps; i++)
                multiply<Config>(product, a[i], ptx::wgmma_advance(b, 32 * i), i > part * steps);
            ptx::wgmma_commit_group();
            ptx::wgmma_wait_group<0>();
            ptx::wgmma_touch(product);
            if (part == parts - 1) release(cursor.stage);
            const float low = Config::group == 0 ? 1.f : widen.scale(part, 0);
            const float high = Config::group == 0 ? 1.f : widen.scale(part, 1);
#pragma unroll
            for (int i = 0; i < Config::tokens / 2; i++)
                sum[i] = fmaf(static_cast<float>(product[i]), i & 2 ? high : low, sum[i]);
        }
        cursor.advance(Config::k_warpgroups);
    }
    return -1;
}

template <class Config>
PTX float bias_of(uint16_t bits) {
    return Config::bfloat_out ? ptx::cvt_f32_bf16(bits) : ptx::cvt_f32_f16(bits);
}

// What turns a tile's sums into outputs, fetched before they are there: scale and bias of rows g and g + 8, and the scales
// of tokens, dealt to the lanes.
template <class Config>
struct TileTerms {
    static constexpr bool scaled = PackedLargeShape<Config>::bytes_of_x;
    float scale[2], bias[2], token_scale[scaled ? (Config::tokens + 31) / 32 : 1];

    PTX void load(const Params& p, int first_row, int first_token) {
        const int lane = ptx::lane_id();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first_row + lane / 4 + 8 * h;
            scale[h] = row < p.rows ? p.row_scale[row] * Widen<Config>::unscale() : 0.f;
            bias[h] = p.bias != nullptr && row < p.rows ? bias_of<Config>(p.bias[row]) : 0.f;
        }
        if constexpr (scaled) {
            ptx::griddepcontrol_wait();  // the kernel before this one may have made them
#pragma unroll
            for (int i = 0; i < (Config::tokens + 31) / 32; i++) {
                const int token = first_token + i * 32 + lane;
                token_scale[i] = token < p.tokens ? p.x_scale[token] : 0.f;
            }
        }
    }
    PTX float of_token(int group_of_8, int within) {
        return scaled ? ptx::shfl(token_scale[group_of_8 / 4], group_of_8 % 4 * 8 + within) : 1.f;
    }
};

// Eight rows of one token to Y.
PTX void store_rows(const Params& p, int row, int token, const uint4& v) {
    if (token >= p.tokens || row >= p.rows) return;
    uint16_t* target = p.y + static_cast<size_t>(token) * p.rows + row;
    if (p.rows % 8 == 0) {
        *reinterpret_cast<uint4*>(target) = v;
        return;
    }
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 8; e++)
        if (row + e < p.rows) target[e] = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
}

// Straight from registers to Y, 16 rows x 16 tokens at a time, turned over in two places of shared memory by turns.
template <class Config>
PTX void packed_large_store(const Params& p, typename Sums<Config>::Total (&sum)[Config::tokens / 2], TileTerms<Config>& terms,
                            uint32_t staging, int first_row, int first_token) {
    if (first_row >= p.rows) return;
    constexpr int groups = Config::tokens / 8;
    const int lane = ptx::lane_id();
    // Lane i gives the address of row i % 8 of matrix i / 8: token (i / 16) * 8 + i % 8, half of 16 rows i / 8 % 2.
    const int my_token = lane / 16 * 8 + lane % 8, my_half = lane / 8 % 2, token = lane / 2, half = lane % 2;
    const uint32_t write = my_token * 32 + ((my_half ^ (my_token >> 2 & 1)) * 16);
    const uint32_t read = token * 32 + ((half ^ (token >> 2 & 1)) * 16);
    uint4 waiting;
#pragma unroll
    for (int j = 0; j < groups; j += 2) {
        uint32_t out[4] = {0, 0, 0, 0};  // rows 0-7 and 8-15 of tokens 8j.., then of tokens 8j + 8..
#pragma unroll
        for (int group = j; group < j + 2 && group < groups; group++) {
            const float low_scale = terms.of_token(group, lane % 4 * 2), high_scale = terms.of_token(group, lane % 4 * 2 + 1);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float low = static_cast<float>(sum[group * 4 + h * 2]) * low_scale;
                const float high = static_cast<float>(sum[group * 4 + h * 2 + 1]) * high_scale;
                const float a = fmaf(low, terms.scale[h], terms.bias[h]), b = fmaf(high, terms.scale[h], terms.bias[h]);
                out[(group - j) * 2 + h] = Config::bfloat_out ? ptx::cvt_bf16x2_f32(a, b) : ptx::cvt_f16x2_f32(a, b);
            }
        }
        if (Config::places == 1 && j > 0) __syncwarp();  // all have read what was there
        const uint32_t place = staging + j / 2 % Config::places * 512;
        ptx::stmatrix_x4_trans(place + write, out);
        __syncwarp();
        if (j > 0) store_rows(p, first_row + half * 8, first_token + (j - 2) * 8 + token, waiting);
        waiting = ptx::ld_shared_v4(place + read);
    }
    constexpr int last = (groups - 1) / 2 * 2;
    if (last * 8 + token < Config::tokens)
        store_rows(p, first_row + half * 8, first_token + last * 8 + token, waiting);
    __syncwarp();
}

PTX uint32_t bits_of(float v) { return __float_as_uint(v); }
PTX uint32_t bits_of(int32_t v) { return static_cast<uint32_t>(v); }
PTX void add_bits(float& sum, uint32_t bits) { sum += __uint_as_float(bits); }
PTX void add_bits(int32_t& sum, uint32_t bits) { sum += static_cast<int32_t>(bits); }

// The sum over the warpgroups (and blocks) that shared K, in a fixed order, then scale, bias and Y: four rows a thread.
template <class Config>
PTX void packed_large_reduce(const Params& p, typename Sums<Config>::Total (&sum)[Config::tokens / 2], uint32_t ring,
                             const RingBarriers& barriers, int warp, int rank, const TilePlace& place) {
    using Shape = PackedLargeShape<Config>;
    constexpr int share = Shape::share, stride = Shape::row_stride, k_shares = Shape::k_shares;
    const int lane = ptx::lane_id(), k_rank = rank % k_shares, row_rank = rank / k_shares;
    const int warpgroup = warp / 4, row = warp % 4 * 16 + lane / 4;
    ptx::bar_sync(1, Shape::warpgroups * 128);  // the ring is read to its end: it may be written
#pragma unroll
    for (int j = 0; j < Config::tokens / 8; j++) {
        const int owner = j * 8 / share;
        const uint32_t mine =
            ring + (((owner * Shape::warpgroups + warpgroup) * share + j * 8 % share + lane % 4 * 2) * stride + row) * 4;
#pragma unroll
        for (int i = 0; i < 4; i++)
            ptx::st_shared_u32(mine + ((i & 1) * stride + (i >> 1) * 8) * 4, bits_of(sum[4 * j + i]));
    }
    // Fetched while the partial sums travel.
    const int first_row = (place.row_tile * Config::row_blocks + row_rank) * Config::row_warpgroups * 64;
    float scale[Config::row_warpgroups][4], bias[Config::row_warpgroups][4];
#pragma unroll
    for (int part = 0; part < Config::row_warpgroups; part++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int y_row = first_row + part * 64 + threadIdx.x % 16 * 4 + e;
            scale[part][e] = y_row < p.rows ? p.row_scale[y_row] * Widen<Config>::unscale() : 0.f;
            bias[part][e] = p.bias != nullptr && y_row < p.rows ? bias_of<Config>(p.bias[y_row]) : 0.f;
        }
    if (k_shares > 1) {
        ptx::fence_proxy_async();
        if (Config::k_blocks > 1 && Config::row_blocks == 1) {  // the others have begun, so their barriers are there
            __syncwarp();
            ptx::barrier_cluster_wait();
        }
    }
    ptx::bar_sync(1, Shape::warpgroups * 128);
    if (Config::k_blocks > 1) {
        if (warp == 0 && lane > 0 && lane < Config::k_blocks) {
            const int owner = (k_rank + lane) % Config::k_blocks, slot = k_rank - (k_rank > owner);
            const uint32_t to = row_rank * Config::k_blocks + owner;
            ptx::cp_async_bulk_shared_to_cluster(ptx::mapa(ring + Shape::receive_offset + slot * Shape::share_bytes, to),
                                                 ring + owner * Shape::share_bytes, Shape::share_bytes,
                                                 ptx::mapa(barriers.received, to));
        }
        __syncwarp();
        ptx::mbarrier_wait_parity(barriers.received, 0);
        ptx::barrier_cluster_arrive_relaxed();  // what was sent here has come: its senders may leave
    }
    [[maybe_unused]] const float* sent = nullptr;
    if constexpr (Config::k_splits > 1) {
        constexpr int share_floats = Shape::share_bytes / 4;
        const int tile = place.token_tile * p.row_tiles + place.row_tile;
        sent = p.partials + static_cast<size_t>(tile * k_shares + k_rank) * (k_shares - 1) * share_floats;
        if (warp == 0 && lane > 0 && lane < k_shares) {
            const int owner = (k_rank + lane) % k_shares, slot = k_rank - (k_rank > owner);
            float* to = p.partials + (static_cast<size_t>(tile * k_shares + owner) * (k_shares - 1) + slot) * share_floats;
            ptx::cp_async_bulk_store(to, ring + owner * Shape::share_bytes, Shape::share_bytes);
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group<0>();
            ptx::fence_acq_rel_gpu();
            ptx::red_release_gpu_add(p.arrived + tile * k_shares + owner, 1);
        }
        __syncwarp();
        if (threadIdx.x == 0) {
            uint32_t* mine = p.arrived + tile * k_shares + k_rank;
            while (ptx::ld_acquire_gpu(mine) != k_shares - 1) {}
            *mine = 0;  // for the next launch, whose blocks come here only after this one has ended
        }
        ptx::bar_sync(1, Shape::warpgroups * 128);
    }
    constexpr int at_a_time = Shape::warpgroups * 8;  // tokens
    const int quad = threadIdx.x % 16 * 4, first_token = place.token_tile * Config::tokens + k_rank * share;
#pragma unroll
    for (int part = 0; part < Config::row_warpgroups; part++) {
        const int y_row = first_row + part * 64 + quad;
        if (y_row >= p.rows) break;
        for (int token = threadIdx.x / 16; token < share && first_token + token < p.tokens; token += at_a_time) {
            typename Sums<Config>::Total total[4] = {0, 0, 0, 0};
#pragma unroll
            for (int source = 0; source < k_shares; source++) {
                const int slot = source - (source > k_rank);
                const uint32_t base = ring + (source == k_rank ? k_rank * Shape::share_bytes
                                                               : Shape::receive_offset + slot * Shape::share_bytes);
#pragma unroll
                for (int k = 0; k < Config::k_warpgroups; k++) {
                    const int at = ((k * Config::row_warpgroups + part) * share + token) * stride + quad;
                    uint4 v;
                    if (Config::k_splits > 1 && source != k_rank)
                        v = ptx::ld_global_cg_v4(sent + slot * (Shape::share_bytes / 4) + at);
                    else
                        v = ptx::ld_shared_v4(base + at * 4);
                    add_bits(total[0], v.x);
                    add_bits(total[1], v.y);
                    add_bits(total[2], v.z);
                    add_bits(total[3], v.w);
                }
            }
            float out[4];
            const float x_scale = Shape::bytes_of_x ? p.x_scale[first_token + token] : 1.f;
#pragma unroll
            for (int e = 0; e < 4; e++)
                out[e] = fmaf(static_cast<float>(total[e]) * x_scale, scale[part][e], bias[part][e]);
            uint2 v;
            v.x = Config::bfloat_out ? ptx::cvt_bf16x2_f32(out[0], out[1]) : ptx::cvt_f16x2_f32(out[0], out[1]);
            v.y = Config::bfloat_out ? ptx::cvt_bf16x2_f32(out[2], out[3]) : ptx::cvt_f16x2_f32(out[2], out[3]);
            uint16_t* target = p.y + static_cast<size_t>(first_token + token) * p.rows + y_row;
            if (p.rows % 4 == 0) {
                *reinterpret_cast<uint2*>(target) = v;
            } else {
                const uint32_t words[2] = {v.x, v.y};
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (y_row + e < p.rows) target[e] = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
            }
        }
    }
}

template <class Config>
__global__ void __launch_bounds__(Config::threads, 1) packed_large(const __grid_constant__ Params p) {
    using Shape = PackedLargeShape<Config>;
    static_assert(Config::shared_bytes == Shape::bytes, "packed_large.py and packed_large.cuh disagree on shared memory");
    static_assert(Config::threads == Shape::warpgroups * 128 + (Config::reallocates ? 128 : 32), "and a producer");
    static_assert(Config::early <= Config::stages, "a stage is filled once before it is read");
    static_assert(Config::stages >= Config::k_warpgroups, "every warpgroup along K needs a stage of its own");
    constexpr int cluster_size = Config::k_blocks * Config::row_blocks;
    const int warp = ptx::warp_id(), lane = ptx::lane_id();
    constexpr int sharers = cluster_size * Config::k_splits;
    const int rank = sharers > 1 ? blockIdx.x % sharers : 0;
    const int k_rank = rank % Shape::k_shares, row_rank = rank / Shape::k_shares;
    const int cluster = blockIdx.x / sharers, clusters = gridDim.x / sharers;
    const uint32_t ring = ptx::shared_address(ptx::dynamic_shared());
    const RingBarriers barriers = {ring + Shape::barrier_offset, ring + Shape::barrier_offset + 8 * Config::stages,
                                   ring + Shape::barrier_offset + 16 * Config::stages,
                                   ring + Shape::barrier_offset + 24 * Config::stages};
    const int tiles = p.row_tiles * p.token_tiles;

    ptx::griddepcontrol_launch_dependents();
    const Producer<Config> producer(p, ring, barriers, k_rank, row_rank, cluster, clusters);
    if (threadIdx.x == Shape::warpgroups * 128) {
        for (int i = 0; i < Config::stages; i++) {
            ptx::mbarrier_init(barriers.full_w + 8 * i, 1);
            ptx::mbarrier_init(barriers.full_x + 8 * i, 1);
            ptx::mbarrier_init(barriers.empty + 8 * i, Config::row_warpgroups * 4 * Config::row_blocks);
        }
        ptx::mbarrier_init(barriers.received, 1);
        ptx::fence_mbarrier_init();
        if (Config::k_blocks > 1)
            ptx::mbarrier_arrive_expect_tx(barriers.received, (Config::k_blocks - 1) * Shape::share_bytes);
        producer.begin();
        ptx::prefetch_tensormap(&p.x);
    }
    __syncthreads();
    if (cluster_size > 1) {  // waited for before others' barriers are used: at once for loads, late for partial sums
        ptx::barrier_cluster_arrive_relaxed();
        if (Config::row_blocks > 1) ptx::barrier_cluster_wait();
    }

    const int warpgroup = warp / 4, row_part = warpgroup % Config::row_warpgroups, k_part = warpgroup / Config::row_warpgroups;
    const int units = (k_rank + 1) * p.units / Shape::k_shares - k_rank * p.units / Shape::k_shares;
    if (warp >= Shape::warpgroups * 4) {
        // Registers move between whole warpgroups only, so the producer is four warps where the others need its share.
        if constexpr (Config::reallocates) ptx::setmaxnreg_dec<32>();
        if (warp == Shape::warpgroups * 4 && lane == 0) producer.run();
        __syncwarp();
        if (Config::k_blocks > 1) {
            if (Config::row_blocks == 1) ptx::barrier_cluster_wait();
            ptx::barrier_cluster_arrive_relaxed();
        }
    } else {
        // What the launch gave the block's warpgroups is all there is: 512 a lane of a quarter, in eights a warp.
        constexpr int at_launch = 512 / (Shape::warpgroups + 1) / 8 * 8;
        if constexpr (Config::reallocates)
            ptx::setmaxnreg_inc<((Shape::warpgroups + 1) * at_launch - 32) / Shape::warpgroups / 8 * 8>();
        RingCursor<Config::stages> cursor;
        if (Config::k_warpgroups > 1) cursor.advance(k_part);
        const uint32_t my_unit = Shape::x_bytes + (row_part * 4 + warp % 4) * (Config::tile_bytes / 4);
        auto release = [&](int stage) {
            if (lane == 0) {
                ptx::mbarrier_arrive(barriers.empty + 8 * stage);
                if (Config::row_blocks > 1)
                    ptx::mbarrier_arrive_cluster(ptx::mapa(barriers.empty + 8 * stage, (1 - row_rank) * Config::k_blocks + k_rank));
            }
        };
        for (int tile = cluster; tile < tiles; tile += clusters) {
            const TilePlace place = tile_place(p, tile);
            const int first_row =
                (((place.row_tile * Config::row_blocks + row_rank) * Config::row_warpgroups + row_part) * 4 + warp % 4) * 16;
            typename Sums<Config>::Total sum[Config::tokens / 2];
            int previous = -1;
            TileTerms<Config> terms;
            if (!Shape::reduces) terms.load(p, first_row, place.token_tile * Config::tokens);
            Widen<Config> widen;
            widen.begin(p.row_zero, first_row, p.weight_tiles * 64);
#pragma unroll
            for (int i = 0; i < Config::tokens / 2; i++) sum[i] = 0;
            if constexpr (Sums<Config>::promotes)
                previous = accumulate_promoting<Config>(sum, widen, ring, my_unit, barriers, k_part, units, cursor, release);
            else
                previous = accumulate<Config>(sum, widen, ring, my_unit, barriers, k_part, units, cursor, release);
            if (previous >= 0) release(previous);
            if constexpr (Shape::reduces)
                packed_large_reduce<Config>(p, sum, ring, barriers, warp, rank, place);
            else
                packed_large_store<Config>(p, sum, terms, ring + Shape::body_bytes + warp * 512 * Config::places, first_row,
                                           place.token_tile * Config::tokens);
        }
    }
    if (cluster_size > 1) {  // no block may leave while others read from it, send to it or arrive on its barriers
        __syncwarp();
        if (Config::k_blocks == 1) ptx::barrier_cluster_arrive_relaxed();
        ptx::barrier_cluster_wait();
    }
}

}  // namespace packed

#endif  // ANYBIT_PACKED_LARGE_CUH
