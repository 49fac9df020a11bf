// sm90_packed_gemm: weights that bypass shared memory, loaded to the registers of the lanes that dequantize them.
//
// A lane's words of a unit are contiguous (packed_layout.py): a few 16-byte loads per lane. The shared-memory ring then
// holds X only. ptxas tracks all loads in flight in a loop with one scoreboard, so that waiting for one waits for all: loads
// go out in batches of Config::direct units, each issued once the batch before it has arrived.
#ifndef ANYBIT_SM90_PACKED_GEMM_DIRECT_CUH
#define ANYBIT_SM90_PACKED_GEMM_DIRECT_CUH

#include "packed/sm90_gemm/sm90_packed_gemm_shape.cuh"

namespace packed {

template <class Config, int count, int steps>
DEVICE void multiply_half(typename Sums<Config>::Product (&sum)[count], const uint32_t (&a)[steps][4], uint64_t b,
                       uint32_t metadata);

// A unit in flight: a lane's words, and the scales and zeros (or minima) of its rows.
template <class Config>
struct Coming {
    static constexpr int bits = Config::bits, parts = Dequantize<Config>::parts;
    uint32_t words[2 * bits], scales[parts], zeros[parts];

    DEVICE void load(const uint8_t* unit, const uint8_t* of_scales) {
        const uint32_t lane = ptx::lane_id(), g = lane / 4;
        load_words<bits>(words, unit, lane);
        if (Config::group == 0) return;
        UNROLL for (int i = 0; i < parts; i++) {
            scales[i] = ptx::ld_global_nc_u32(of_scales + i * 32);
            if (Config::code == Code::asym) zeros[i] = ptx::ld_global_nc_u32(unit + 256 * bits + 32 * parts + i * 16 + (g & ~1u) * 2);
            if (Config::code == Code::min) zeros[i] = ptx::ld_global_nc_u32(of_scales + (parts + i) * 32);
        }
    }
};

// The weights of a warp's 16 rows, double-buffered in registers: one batch is dequantized while the other loads.
template <class Config>
struct Batches {
    static constexpr int kw = Config::split_k_warpgroups, count = Config::direct;
    Coming<Config> units[2][count];
    const uint8_t *next, *next_scales;
    size_t pitch;  // bytes between this warpgroup's rounds

    // Issues the first batch of a part, from round `first` on.
    DEVICE void begin(const Params& p, const Part& part, int tile, int first) {
        const size_t stride = static_cast<size_t>(p.weight_tiles) * tile_bytes<Config>;
        pitch = kw * stride;
        // Rows past the end read the last tile: their sums are never stored.
        next = p.tiles + (part.first + first) * stride + static_cast<size_t>(min(tile, p.weight_tiles - 1)) * tile_bytes<Config> +
               threadIdx.x / 32 % 4 * (tile_bytes<Config> / 4);
        next_scales = next + 256 * Config::bits + ptx::lane_id() / 4 * 4;
        ask(units[0], first, part.count, true);
    }
    DEVICE void ask(Coming<Config> (&batch)[count], int round, int end, bool come) {
        UNROLL for (int j = 0; j < count; j++) {
            if (come && round + j * kw < end) batch[j].load(next, next_scales);
            next += pitch;
            next_scales += pitch;
        }
    }
};

// Main loop over one tile's rounds, as `accumulate`; the first batch of weights is in flight already.
template <class Config, class Release>
DEVICE int accumulate_direct(typename Sums<Config>::Product (&sum)[Config::tile_m / 2], Dequantize<Config>& dequantize, Batches<Config>& batches,
                          uint32_t ring, const RingBarriers& barriers, int first, int rounds, RingCursor<Config::stages>& cursor,
                          const Release& release) {
    using Shape = PackedGemmShape<Config>;
    constexpr int steps = Shape::steps, kw = Config::split_k_warpgroups, count = Config::direct;
    // Single-tile CTAs whose ring is a whole number of batch rounds: unrolled over the stages.
    constexpr bool fixed = Shape::reduces && Config::stages % (2 * count * kw) == 0;
    constexpr int slots = fixed ? Config::stages / kw : 2 * count;
    uint32_t a0[steps][4], a1[steps][4];
    int previous = -1;
    const uint64_t first_b = ptx::wgmma_descriptor(ring + fixed * first * Shape::stage_bytes, ptx::Swizzle::bytes_128, 1024);
    const uint32_t full_x = barriers.full_x + fixed * 8 * first;
    uint32_t parity = 0;
    ptx::wgmma_touch(sum);
    for (int round = first; round < rounds; parity ^= 1) {
        UNROLL for (int slot = 0; slot < slots; slot++) {
            if (slot > 0 && round >= rounds) break;
            const int set = slot / count % 2, j = slot % count, stage = fixed ? slot * kw : cursor.stage;
            dequantize.take(batches.units[set][j].words, batches.units[set][j].scales, batches.units[set][j].zeros);
            dequantize.template dequantize<0, steps * 4>(a0);
            // Dequantized weights are never this NaN: a fake dependence, so that ptxas cannot hoist the next loads.
            if (j == 0) batches.ask(batches.units[1 - set], round + count * kw, rounds, a0[steps - 1][3] != 0xffffffffu);
            ptx::mbarrier_wait_parity(full_x + 8 * stage, fixed ? parity : cursor.parity);
            const uint64_t b0 = ptx::wgmma_advance(first_b, stage * Shape::stage_bytes);
            multiply_half<Config>(sum, a0, b0, 0);
            if constexpr (fixed) {
                if (slot > 0 || round > first) release(first + (slot > 0 ? slot - 1 : slots - 1) * kw);
            } else if (previous >= 0)
                release(previous);
            dequantize.template dequantize<steps * 4, steps * 8>(a1);
            multiply_half<Config>(sum, a1, ptx::wgmma_advance(b0, Shape::box_bytes), 0);
            if constexpr (!fixed) {
                previous = stage;
                cursor.advance(kw);
            }
            round += kw;
        }
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_touch(sum);
    return previous;
}

}  // namespace packed

#endif  // ANYBIT_SM90_PACKED_GEMM_DIRECT_CUH
