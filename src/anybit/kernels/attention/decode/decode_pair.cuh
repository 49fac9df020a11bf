// Decode attention of few, short sequences: a cluster of CTAs for each pair, merged through their shared memory.
//
// A step of one short sequence is latency: parts in global memory, counted by atomics, take three accesses that wait for
// one another. Here each warp sends its part to the CTAs that add them, by stores that an mbarrier there counts. CTAs are
// small, so that they start beside the previous kernel's, and the next kernel's beside them.
#ifndef ANYBIT_DECODE_PAIR_CUH
#define ANYBIT_DECODE_PAIR_CUH

#include "attention/decode/decode_merge.cuh"

namespace decode {

// A row, or a piece of one, is a task; task i belongs to warp i / blocks of the cluster's CTA i % blocks. Shared memory: the
// warps' rings, which then hold their parts; what other warps send, task by task; mbarriers.
template <class Config> struct PairLayout {
    using S = Shape<Config>;
    static constexpr int blocks = Config::pair_blocks, parts = blocks * Config::warps;
    static constexpr int tasks = Config::rows * Config::merge_warps, own = (tasks + blocks - 1) / blocks;
    static constexpr int channels = Config::head_dim / Config::merge_warps;  // of a task
    static constexpr int ring_bytes = Config::stages * S::slot_bytes, segment_bytes = Config::rows * Config::head_dim * 4;
    static constexpr int received = Config::warps * ring_bytes, states = parts * channels * 4, task_bytes = states + parts * 8;
    static constexpr int barrier_area = received + own * task_bytes;
    static constexpr int bytes = barrier_area + (Config::warps * Config::stages + 1) * 8;
    static_assert(parts <= 32, "a lane for each part");
    static_assert(bytes <= Config::shared_bytes, "decode.py gives the kernel less shared memory than it lays out");
    static_assert(segment_bytes + Config::rows * 8 <= ring_bytes, "a warp's part takes the place of its ring");

    DEVICE uint32_t stage(int warp) const { return ptx::shared_address(ptx::dynamic_shared()) + warp * ring_bytes; }
    DEVICE uint32_t task(int own) const { return stage(0) + received + own * task_bytes; }
    DEVICE uint32_t barriers(int warp) const { return stage(0) + barrier_area + warp * Config::stages * 8; }
    DEVICE uint32_t arrived() const { return barriers(Config::warps); }
    DEVICE float* segment(int warp) const { return reinterpret_cast<float*>(ptx::dynamic_shared() + warp * ring_bytes); }
};

// Sends part `part`, this warp's, to the CTAs that add it to others.
template <class Config> DEVICE void send_part(const PairLayout<Config>& shared, int warp, int part, State<Config>& state) {
    using L = PairLayout<Config>;
    sum_lanes(state);
    float* const mine = shared.segment(warp);
    __syncwarp();
    write_part(mine, mine + L::segment_bytes / 4, state);
    __syncwarp();
    const int lane = threadIdx.x % 32;
    UNROLL for (int i = lane * 4; i < Config::rows * Config::head_dim; i += 128) {
        const int task = i / L::channels, rank = task % L::blocks;
        const uint32_t to = shared.task(task / L::blocks) + (part * L::channels + i % L::channels) * 4;
        ptx::st_async_v4(ptx::mapa(to, rank), ptx::ld_shared_v4(ptx::shared_address(mine + i)), ptx::mapa(shared.arrived(), rank));
    }
    UNROLL for (int i = lane; i < 2 * L::tasks; i += 32) {
        const int task = i / 2, rank = task % L::blocks;
        const uint32_t to = shared.task(task / L::blocks) + L::states + part * 8 + i % 2 * 4;
        const uint32_t from = ptx::shared_address(mine + L::segment_bytes / 4 + task / Config::merge_warps * 2 + i % 2);
        ptx::st_async_u32(ptx::mapa(to, rank), ptx::ld_shared_u32(from), ptx::mapa(shared.arrived(), rank));
    }
}

// Adds the parts of this warp's tasks, and writes the output.
template <class Config> DEVICE void merge_sent(const Params& p, const PairLayout<Config>& shared, int warp, int rank, int pair, int parts) {
    using L = PairLayout<Config>;
    const int lane = threadIdx.x % 32;
    for (int own = warp; own * L::blocks + rank < L::tasks; own += Config::warps) {
        const int task = own * L::blocks + rank, piece = task % Config::merge_warps;
        ptx::mbarrier_wait_parity(shared.arrived(), 0);
        softmax::State state;
        if (lane < parts) state = state_of(ptx::ld_shared_v2(shared.task(own) + L::states + lane * 8));
        const float weight = softmax::merge_lanes(state);
        RowSum<Config> sum(piece);
        const uint32_t from = shared.task(own) + (sum.first - piece * L::channels) * 4;
#pragma unroll 4
        for (int i = 0; i < parts; ++i) {
            float row[RowSum<Config>::width];
            RowSum<Config>::from_shared(row, from + i * L::channels * 4);
            sum.add(__shfl_sync(0xffffffffu, weight, i), row);
        }
        sum.write(p, pair, task / Config::merge_warps, state);
    }
}

}  // namespace decode

#endif  // ANYBIT_DECODE_PAIR_CUH
