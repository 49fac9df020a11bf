// sm90_packed_gemm: the warps that fill the ring's stages, with the weights of a block's rows and the tokens' inputs.
#ifndef ANYBIT_SM90_PACKED_GEMM_PRODUCER_CUH
#define ANYBIT_SM90_PACKED_GEMM_PRODUCER_CUH

#include "gemm/sm90_packed_gemm_shape.cuh"

namespace packed {

// A thread of a producer warp. They fill the ring's stages by turns. Weights do not depend on the kernel before this one, so
// the ring is filled with them first, before the block has even met.
template <class Config>
struct Producer {
    using Shape = PackedGemmShape<Config>;
    const Params& p;
    const uint32_t ring;
    const RingBarriers barriers;
    const int k_rank, row_rank, turn;
    const int half;  // of two blocks that halve a row tile
    uint16_t sharers = 0;
    uint64_t policy;

    PTX Producer(const Params& p, uint32_t ring, const RingBarriers& barriers, int k_rank, int row_rank, int half, int turn)
        : p(p), ring(ring), barriers(barriers), k_rank(k_rank), row_rank(row_rank), turn(turn), half(half) {
        for (int i = 0; i < Config::cluster_n; i++) sharers |= 1u << (i * Config::cluster_k + k_rank);
        policy = ptx::createpolicy_evict_first();
    }

    // The weights of a tile's rows, of its first unit.
    struct Weights {
        const uint8_t* first;
        size_t stride;
        uint32_t bytes;
    };
    PTX Weights weights_of(const TilePlace& place) const {
        const int first = first_tile<Config>(place, row_rank, half);
        const int count = max(min(Config::row_warpgroups, end_of<Config>(p, place) - first), 0);
        return {p.tiles + static_cast<size_t>(first) * Config::tile_bytes, static_cast<size_t>(p.weight_tiles) * Config::tile_bytes,
                static_cast<uint32_t>(count * Config::tile_bytes)};
    }
    PTX void load_w(const Weights& weights, int unit, int stage) const {
        const uint32_t barrier = barriers.full_w + 8 * stage;
        uint32_t bytes = weights.bytes, skipped = 0;
        if constexpr (Config::halves) {  // the tile that two blocks halve is the last of the first one's, the first of the other's
            if (!Half<Config>(p, half).has(unit)) {
                if (half == 0) bytes = min(bytes, static_cast<uint32_t>((Config::row_warpgroups - 1) * Config::tile_bytes));
                else skipped = min(bytes, static_cast<uint32_t>(Config::tile_bytes)), bytes -= skipped;
            }
        }
        ptx::mbarrier_arrive_expect_tx(barrier, Config::span * bytes);
        if (bytes == 0) return;
#pragma unroll
        for (int i = 0; i < Config::span; i++) {
            const uint8_t* source = weights.first + (unit * Config::span + i) * weights.stride + skipped;
            const uint32_t target = ring + stage * Shape::stage_bytes + i * Shape::unit_bytes + Shape::x_bytes + skipped;
            if (p.token_tiles == 1)
                ptx::cp_async_bulk_load_hint(target, source, bytes, barrier, policy);
            else
                ptx::cp_async_bulk_load(target, source, bytes, barrier);
        }
    }
    PTX void load_x(const TilePlace& place, int unit, int stage) const {
        constexpr int share = Config::tile_m / Config::cluster_n;
        const uint32_t barrier = barriers.full_x + 8 * stage;
        if constexpr (Shape::tail_rows > 0) {
            // Tokens are columns of the product: what stays in place of those that there are not is never stored.
            const int first = place.token_tile * Config::tile_m;
            const int rows = (p.tokens - first + Shape::tail_rows - 1) / Shape::tail_rows * Shape::tail_rows;
            if (rows <= Config::tile_m - Shape::tail_rows) {
                ptx::mbarrier_arrive_expect_tx(barrier, Config::span * rows * 128 * Shape::element_bytes);
                for (int all = 0; all < Config::span * Shape::element_bytes; all++) {
                    const int box = all % Shape::element_bytes, i = all / Shape::element_bytes;
                    const uint32_t target = ring + stage * Shape::stage_bytes + i * Shape::unit_bytes + box * Shape::box_bytes;
                    for (int row = 0; row < rows; row += Shape::tail_rows)
                        ptx::cp_async_bulk_tensor_2d(target + row * 128, &p.x_tail, (unit * Config::span + i) * 128 + box * (128 / Shape::element_bytes),
                                                     first + row, barrier);
                }
                return;
            }
        }
        ptx::mbarrier_arrive_expect_tx(barrier, Config::span * Shape::x_bytes);
#pragma unroll
        for (int all = 0; all < Config::span * Shape::element_bytes; all++) {
            const int box = all % Shape::element_bytes, i = all / Shape::element_bytes;
            const uint32_t target = ring + stage * Shape::stage_bytes + i * Shape::unit_bytes + box * Shape::box_bytes + row_rank * share * 128;
            const int x = (unit * Config::span + i) * 128 + box * (128 / Shape::element_bytes);
            const int y = place.token_tile * Config::tile_m + row_rank * share;
            if (Config::cluster_n > 1)
                ptx::cp_async_bulk_tensor_2d_multicast(target, &p.x, x, y, barrier, sharers);
            else
                ptx::cp_async_bulk_tensor_2d(target, &p.x, x, y, barrier);
        }
    }
    // The weights of the first units, of the first part of the walk.
    PTX void begin() const {
        Part part;
        if (!Walk<Config>().at(p, k_rank, part)) return;
        const Weights weights = weights_of(place_of<Config>(p, part.tile));
        for (int i = turn; i < min(Config::prologue_stages, part.count); i += Shape::producers) load_w(weights, part.first + i, i);
    }
    // The first two steps of a tile that has all of its tokens: their halves by four threads side by side, so that they do not
    // share what a multiprocessor takes in with later ones.
    static constexpr bool halves_first = (Config::direct > 0 || (Config::unrolled && Config::prologue_stages > 1)) && Shape::producers == 4 &&
                                         Shape::reduces && Config::cluster_n == 1 && Config::span == 1 && Shape::element_bytes == 2;
    PTX void load_first(const TilePlace& place, int unit) const {
        const int stage = turn / 2, box = turn % 2;
        const uint32_t barrier = barriers.full_x + 8 * stage;
        if (box == 0) ptx::mbarrier_arrive_expect_tx(barrier, Shape::x_bytes);
        ptx::cp_async_bulk_tensor_2d(ring + stage * Shape::stage_bytes + box * Shape::box_bytes, &p.x, (unit + stage) * 128 + box * 64,
                                     place.token_tile * Config::tile_m, barrier);
    }
    PTX void run() const {
        ptx::griddepcontrol_wait();
        RingCursor<Config::stages> cursor;
        Walk<Config> walk;
        int early = Config::prologue_stages;
        for (Part part; walk.at(p, k_rank, part); walk.advance(), early = 0) {
            const TilePlace place = place_of<Config>(p, part.tile);
            const Weights weights = weights_of(place);
            int unit = 0;
            if constexpr (halves_first)
                if (part.count > 1 && (Shape::tail_rows == 0 || p.tokens - place.token_tile * Config::tile_m > Config::tile_m - Shape::tail_rows)) {
                    load_first(place, part.first);
                    cursor.advance(unit = 2);
                }
            for (; unit < part.count; unit++, cursor.advance(1)) {
                // A stage is always filled by the same thread, which so has seen all of its uses end.
                if (cursor.stage % Shape::producers != turn) continue;
                if (unit >= early) {
                    // A stage's first use waits for nothing: a fresh barrier counts as having completed parity 1.
                    ptx::mbarrier_wait_parity(barriers.empty + 8 * cursor.stage, cursor.parity ^ 1);
                    if constexpr (Config::direct == 0) load_w(weights, part.first + unit, cursor.stage);
                }
                load_x(place, part.first + unit, cursor.stage);
            }
        }
        // A block without work keeps its place until those of the next launch have theirs: two of them would share one.
        if (Config::min_blocks_per_sm > 1 && walk.position == 0) __nanosleep(800);
    }
};

}  // namespace packed

#endif  // ANYBIT_SM90_PACKED_GEMM_PRODUCER_CUH
