// sm90_packed_gemm: producer warps, which fill pipeline stages with the CTA's packed weights and X.
#ifndef ANYBIT_SM90_PACKED_GEMM_PRODUCER_CUH
#define ANYBIT_SM90_PACKED_GEMM_PRODUCER_CUH

#include "packed/sm90_gemm/sm90_packed_gemm_shape.cuh"

namespace packed {

// One producer thread; producers take stages in turn. Weights don't depend on the previous kernel, so the first stages'
// weights are loaded before griddepcontrol.wait, and even before the CTA's first __syncthreads.
template <class Config>
struct Producer {
    using Shape = PackedGemmShape<Config>;
    const Params& p;
    const uint32_t ring;
    const RingBarriers barriers;
    const int k_rank, row_rank, turn;
    const int half;  // Config::halves: which of the two CTAs that split a row tile
    uint16_t sharers = 0;
    uint64_t policy;

    DEVICE Producer(const Params& p, uint32_t ring, const RingBarriers& barriers, int k_rank, int row_rank, int half, int turn)
        : p(p), ring(ring), barriers(barriers), k_rank(k_rank), row_rank(row_rank), turn(turn), half(half) {
        for (int i = 0; i < Config::cluster_n; i++) sharers |= 1u << (i * Config::cluster_k + k_rank);
        policy = ptx::createpolicy_evict_first();
    }

    // A tile's packed weights: address of k block 0, bytes between k blocks, bytes of one.
    struct Weights {
        const uint8_t* first;
        size_t stride;
        uint32_t bytes;
    };
    DEVICE Weights weights_of(const PlaceOf<Config>& place) const {
        const int first = first_tile<Config>(place, row_rank, half);
        const int count = max(min(Config::row_warpgroups, end_of<Config>(p, place) - first), 0);
        return {p.tiles + static_cast<size_t>(first) * tile_bytes<Config>, static_cast<size_t>(p.weight_tiles) * tile_bytes<Config>,
                static_cast<uint32_t>(count * tile_bytes<Config>)};
    }
    DEVICE void load_w(const Weights& weights, int round, int stage) const {
        const uint32_t barrier = barriers.full_w + 8 * stage;
        uint32_t bytes = weights.bytes, skipped = 0;
        if constexpr (Config::halves) {  // the shared row tile is the last of the first CTA's, the first of the second's
            if (!Half<Config>(p, half).has(round)) {
                if (half == 0) bytes = min(bytes, static_cast<uint32_t>((Config::row_warpgroups - 1) * tile_bytes<Config>));
                else skipped = min(bytes, static_cast<uint32_t>(tile_bytes<Config>)), bytes -= skipped;
            }
        }
        ptx::mbarrier_arrive_expect_tx(barrier, Config::span * bytes);
        if (bytes == 0) return;
        UNROLL for (int i = 0; i < Config::span; i++) {
            const uint8_t* source = weights.first + (round * Config::span + i) * weights.stride + skipped;
            const uint32_t target = ring + stage * Shape::stage_bytes + i * Shape::k_block_bytes + Shape::x_bytes + skipped;
            if (p.token_tiles == 1)
                ptx::cp_async_bulk_load_hint(target, source, bytes, barrier, policy);
            else
                ptx::cp_async_bulk_load(target, source, bytes, barrier);
        }
    }
    DEVICE void load_x(const PlaceOf<Config>& place, int round, int stage) const {
        constexpr int share = Config::tile_m / Config::cluster_n;
        const uint32_t barrier = barriers.full_x + 8 * stage;
        if constexpr (Shape::tail_rows > 0) {
            // Tokens are columns of the product: stale columns past the last token are never stored.
            const int first = first_token_of<Config>(place);
            const int rows = (end_token_of(p, place) - first + Shape::tail_rows - 1) / Shape::tail_rows * Shape::tail_rows;
            if (rows <= Config::tile_m - Shape::tail_rows) {
                ptx::mbarrier_arrive_expect_tx(barrier, Config::span * rows * 128 * Shape::element_bytes);
                for (int all = 0; all < Config::span * Shape::element_bytes; all++) {
                    const int box = all % Shape::element_bytes, i = all / Shape::element_bytes;
                    const uint32_t target = ring + stage * Shape::stage_bytes + i * Shape::k_block_bytes + box * Shape::box_bytes;
                    for (int row = 0; row < rows; row += Shape::tail_rows)
                        ptx::cp_async_bulk_tensor_2d(target + row * 128, &p.x_tail, (round * Config::span + i) * 128 + box * (128 / Shape::element_bytes),
                                                     first + row, barrier);
                }
                return;
            }
        }
        ptx::mbarrier_arrive_expect_tx(barrier, Config::span * Shape::x_bytes);
        UNROLL for (int all = 0; all < Config::span * Shape::element_bytes; all++) {
            const int box = all % Shape::element_bytes, i = all / Shape::element_bytes;
            const uint32_t target = ring + stage * Shape::stage_bytes + i * Shape::k_block_bytes + box * Shape::box_bytes + row_rank * share * 128;
            const int x = (round * Config::span + i) * 128 + box * (128 / Shape::element_bytes);
            const int y = first_token_of<Config>(place) + row_rank * share;
            if (Config::cluster_n > 1)
                ptx::cp_async_bulk_tensor_2d_multicast(target, &p.x, x, y, barrier, sharers);
            else
                ptx::cp_async_bulk_tensor_2d(target, &p.x, x, y, barrier);
        }
    }
    // Loads the weights of the first prologue_stages rounds.
    DEVICE void begin() const {
        Part part;
        Walk<Config> walk;
        walk.begin(p);
        if (!walk.at(p, k_rank, part)) return;
        const Weights weights = weights_of(walk.place(p, part));
        for (int i = turn; i < min(Config::prologue_stages, part.count); i += Shape::producers) load_w(weights, part.first + i, i);
    }
    // X of the first two rounds of a full tile: four threads load a half each, so that these loads do not share the SM's
    // inbound bandwidth with later stages'.
    static constexpr bool halves_first = (Config::direct > 0 || (Config::unrolled && Config::prologue_stages > 1)) && Shape::producers == 4 &&
                                         Shape::reduces && Config::cluster_n == 1 && Config::span == 1 && Shape::element_bytes == 2;
    DEVICE void load_first(const PlaceOf<Config>& place, int round) const {
        const int stage = turn / 2, box = turn % 2;
        const uint32_t barrier = barriers.full_x + 8 * stage;
        if (box == 0) ptx::mbarrier_arrive_expect_tx(barrier, Shape::x_bytes);
        ptx::cp_async_bulk_tensor_2d(ring + stage * Shape::stage_bytes + box * Shape::box_bytes, &p.x, (round + stage) * 128 + box * 64,
                                     first_token_of<Config>(place), barrier);
    }
    DEVICE void run() const {
        ptx::griddepcontrol_wait();
        RingCursor<Config::stages> cursor;
        Walk<Config> walk;
        walk.begin(p);
        int early = Config::prologue_stages;
        for (Part part; walk.at(p, k_rank, part); walk.advance(), early = 0) {
            const PlaceOf<Config> place = walk.place(p, part);
            const Weights weights = weights_of(place);
            int round = 0;
            if constexpr (halves_first)
                if (part.count > 1 && (Shape::tail_rows == 0 || end_token_of(p, place) - first_token_of<Config>(place) > Config::tile_m - Shape::tail_rows)) {
                    load_first(place, part.first);
                    cursor.advance(round = 2);
                }
            for (; round < part.count; round++, cursor.advance(1)) {
                // A stage always has the same producer, which has thus seen every earlier phase complete.
                if (cursor.stage % Shape::producers != turn) continue;
                if (round >= early) {
                    // The first use doesn't block: a fresh mbarrier counts as having completed parity 1.
                    ptx::mbarrier_wait_parity(barriers.empty + 8 * cursor.stage, cursor.parity ^ 1);
                    if constexpr (Config::direct == 0) load_w(weights, part.first + round, cursor.stage);
                }
                load_x(place, part.first + round, cursor.stage);
            }
        }
        // An idle CTA holds its slot until the next launch's CTAs are placed: otherwise two of them would share this SM.
        if (Config::min_blocks_per_sm > 1 && walk.position == 0) __nanosleep(800);
    }
};

}  // namespace packed

#endif  // ANYBIT_SM90_PACKED_GEMM_PRODUCER_CUH
