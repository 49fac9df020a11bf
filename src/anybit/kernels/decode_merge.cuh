// From the warps' softmax states to the output: in shared memory, then between blocks by the one that arrives last.
#ifndef ANYBIT_DECODE_MERGE_CUH
#define ANYBIT_DECODE_MERGE_CUH

#include "decode_block.cuh"
#include "decode_schedule.cuh"

namespace decode {

// What a block has to merge, planned while its first copies are on their way. The pairs between the first and the last
// of its stretch are whole and lie in it alone; these two may be shared with other blocks.
struct Plan {
    int pair[2];     // the first and the last
    int shared[2];   // whether other blocks have parts of it too; of the last only if it is not the first
    int first[2];    // the first block that has a part
    int count[2];    // how many have
    int second[2];   // whether the pair is the second that this first block touches
};

// Shared memory: rings, first segments of the warps, states, owners, barriers, the plan.
template <class Config> struct Layout {
    using S = Shape<Config>;
    static constexpr int ring_bytes = Config::stages * S::slot_bytes;
    static constexpr int segment_bytes = Config::rows * Config::head_dim * 4;
    static constexpr int segments = Config::warps * ring_bytes;
    static constexpr int states = segments + Config::warps * segment_bytes;
    static constexpr int owners = states + Config::warps * 2 * Config::rows * 8;
    static constexpr int barrier_area = (owners + Config::warps * 2 * 4 + 7) / 8 * 8;
    static constexpr int plan_area = barrier_area + Config::warps * Config::stages * 8;
    static constexpr int bytes = plan_area + 48;
    static_assert(bytes <= Config::shared_bytes, "decode.py gives the kernel less shared memory than it lays out");
    static_assert(segment_bytes <= ring_bytes, "a warp's last segment takes the place of its ring");

    PTX uint32_t stage(int warp) const { return ptx::shared_address(ptx::dynamic_shared()) + warp * ring_bytes; }
    PTX uint32_t barriers(int warp) const {
        return ptx::shared_address(ptx::dynamic_shared()) + barrier_area + warp * Config::stages * 8;
    }
    // A warp has at most two segments that are not a whole pair: the end of one pair (0), the beginning of another (1).
    PTX float* segment(int index) const {
        return reinterpret_cast<float*>(ptx::dynamic_shared() + (index % 2 ? index / 2 * ring_bytes : segments + index / 2 * segment_bytes));
    }
    PTX float* state(int index) const {
        return reinterpret_cast<float*>(ptx::dynamic_shared() + states) + index * 2 * Config::rows;
    }
    PTX int* owner(int index) const { return reinterpret_cast<int*>(ptx::dynamic_shared() + owners) + index; }
    PTX Plan* plan() const { return reinterpret_cast<Plan*>(ptx::dynamic_shared() + plan_area); }
    PTX void clear_segments(int warp) const {
        if (threadIdx.x % 32 < 2) *owner(2 * warp + threadIdx.x % 32) = -1;
    }
};

template <bool bf16> PTX uint16_t narrow(float v) {
    return bf16 ? ptx::cvt_bf16_f32(v) : ptx::cvt_f16_f32(v);
}

// One row of a pair: where it goes, and its last step (sink, division, log-sum-exp).
template <class Config> struct Row {
    uint16_t* out;
    float normalizer;
    bool there;
    PTX Row(const Params& p, int pair, int row, softmax::State state, bool writes_lse) {
        const int heads = p.kv_heads * Config::query_chunks, batch = pair / heads, within = pair - batch * heads;
        const int kv_head = within / Config::query_chunks, r = within % Config::query_chunks * Config::rows + row;
        const int token = r / Config::group, head = kv_head * Config::group + r % Config::group;
        there = row < Config::rows && token < Config::queries;
        const int64_t place = (static_cast<int64_t>(batch) * Config::queries + token) * p.kv_heads * Config::group + head;
        out = p.out + place * Config::head_dim;
        const float reference = state.reference;
        if (there && p.sinks) state.add_sink(p.sinks[head]);
        normalizer = state.normalizer() * softmax::State::weight(reference, state.reference);
        if (there && writes_lse && p.lse) p.lse[place] = state.log_sum_exp();
    }
};

// The rows of a state go to their places in the output.
template <class Config> PTX void write_whole(const Params& p, int pair, const State<Config>& state) {
    constexpr int width = Shape<Config>::width;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < Config::query_tiles; ++n)
#pragma unroll
        for (int x = 0; x < width; ++x) {
            const Row<Config> row(p, pair, (4 * n + t) * width + x, {state.reference[n][x], state.sum[n][x]}, g == 0);
            if (row.there)
#pragma unroll
                for (int c = 0; c < Shape<Config>::depth; ++c)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        row.out[16 * c + 8 * h + g] = narrow<Config::bf16>(state.output(n, c, h, x) * row.normalizer);
        }
}

// The rows of a state, [rows, head_dim], and their references and sums, [rows, 2].
template <class Config> PTX void write_part(float* part, float* part_state, const State<Config>& state) {
    constexpr int width = Shape<Config>::width;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < Config::query_tiles; ++n)
#pragma unroll
        for (int x = 0; x < width; ++x) {
            const int row = (4 * n + t) * width + x;
            if (row < Config::rows) {
#pragma unroll
                for (int c = 0; c < Shape<Config>::depth; ++c)
#pragma unroll
                    for (int h = 0; h < 2; ++h) part[row * Config::head_dim + 16 * c + 8 * h + g] = state.output(n, c, h, x);
                if (g == 0) {
                    part_state[2 * row] = state.reference[n][x];
                    part_state[2 * row + 1] = state.sum[n][x];
                }
            }
        }
}

template <class Config> PTX void sum_lanes(State<Config>& state) {
#pragma unroll
    for (int n = 0; n < Config::query_tiles; ++n)
#pragma unroll
        for (int x = 0; x < Shape<Config>::width; ++x) State<Config>::sum_rows(state.sum[n][x]);
}

// A pair ends here, or this warp's stretch does: write the result, or keep the segment for the merge.
template <class Config>
PTX void finish_segment(const Params& p, const Layout<Config>& shared, int warp, const Cursor<Config>& at,
                        State<Config>& state, bool whole, bool end) {
    sum_lanes(state);
    if (whole && at.last()) return write_whole(p, at.pair(p), state);
    const int index = 2 * warp + (end ? 1 : 0);
    __syncwarp();
    write_part(shared.segment(index), shared.state(index), state);
    if (threadIdx.x % 32 == 0) *shared.owner(index) = at.pair(p);
}

template <class Config> struct RowSum {
    static constexpr int width = Config::head_dim / 32;
    float v[width];
    PTX RowSum() {
#pragma unroll
        for (int k = 0; k < width; ++k) v[k] = 0.0f;
    }
    PTX void add(float weight, const float* row) {
#pragma unroll
        for (int k = 0; k < width; ++k) v[k] = fmaf(weight, row[32 * k + threadIdx.x % 32], v[k]);
    }
    PTX void write(const Params& p, int pair, int row, const softmax::State& state) const {
        const Row<Config> place(p, pair, row, state, threadIdx.x % 32 == 0);
        if (place.there)
#pragma unroll
            for (int k = 0; k < width; ++k) place.out[32 * k + threadIdx.x % 32] = narrow<Config::bf16>(v[k] * place.normalizer);
    }
};

template <class Config>
PTX void plan_merge(const Params& p, const Layout<Config>& shared, int warp, Line<Config>& line, int begin, int end, int shares) {
    if (warp >= 2) return;
    const int at = warp ? end - 1 : begin;
    const Cursor<Config> cursor = line.locate(p, at);
    const int from = at - cursor.unit, to = from + cursor.extent.units;
    if (threadIdx.x % 32) return;
    Plan& plan = *shared.plan();
    plan.pair[warp] = cursor.pair(p);
    plan.shared[warp] = warp ? from > begin && to > end : from < begin || to > end;
    plan.first[warp] = owner(line.total, shares, from);
    plan.count[warp] = owner(line.total, shares, to - 1) - plan.first[warp] + 1;
    plan.second[warp] = share_begin(line.total, shares, plan.first[warp]) < from;
}

// All parts of one row of a pair, once they are there; the whole warp calls this. They lie at `begin`, `begin + step` ...,
// the first one `offset` further.
template <class Config> PTX void merge_parts(const Params& p, int pair, int row, int begin, int count, int step, int offset) {
    constexpr int width = RowSum<Config>::width, batch = width > 4 ? 8 : 16;  // parts that are on their way together
    const int lane = threadIdx.x % 32;
    softmax::State total;
    RowSum<Config> sum;
    for (int base = 0; base < count; base += batch) {
        float rows[batch][width];
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const int64_t from = static_cast<int64_t>(begin + step * (base + i) + (base + i == 0 ? offset : 0)) * Config::rows + row;
#pragma unroll
            for (int k = 0; k < width; ++k)
                rows[i][k] = base + i < count ? __uint_as_float(ptx::ld_global_cg_u32(p.partial + from * Config::head_dim + 32 * k + lane)) : 0.0f;
        }
        const int part = base + lane;
        softmax::State state;
        if (lane < batch && part < count) {
            const int64_t place = static_cast<int64_t>(begin + step * part + (part == 0 ? offset : 0)) * Config::rows + row;
            const uint2 found = ptx::ld_global_cg_v2(p.partial_state + 2 * place);
            state.reference = __uint_as_float(found.x);
            state.sum = __uint_as_float(found.y);
        }
        // What was summed so far takes part in the merge as one more.
        float most = fmaxf(total.reference, state.reference);
#pragma unroll
        for (int i = 16; i; i >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
        const float old = softmax::State::weight(total.reference, most);
        const float weight = softmax::merge_lanes(state) * softmax::State::weight(state.reference, most);
#pragma unroll
        for (int k = 0; k < width; ++k) sum.v[k] *= old;
        total.sum = total.sum * old + state.sum * softmax::State::weight(state.reference, most);
        total.reference = most;
#pragma unroll
        for (int i = 0; i < batch; ++i) {
            const float w = __shfl_sync(0xffffffffu, weight, i);
#pragma unroll
            for (int k = 0; k < width; ++k) sum.v[k] = fmaf(w, rows[i][k], sum.v[k]);
        }
    }
    sum.write(p, pair, row, total);
}
template <class Config> PTX void merge_shared(const Params& p, const Plan& plan, int which, int row) {
    merge_parts<Config>(p, plan.pair[which], row, 2 * plan.first[which], plan.count[which], 2, plan.second[which]);
}

// A piece ends here, the `place`-th of the line: write the result, or keep it; who brings the last of a pair merges them.
template <class Config> PTX void finish_piece(const Params& p, const Cursor<Config>& at, State<Config>& state, int place) {
    const int pieces = at.extent.template steps<Config>(), pair = at.pair(p);
    sum_lanes(state);
    if (pieces == 1) return write_whole(p, pair, state);
    const int64_t row = static_cast<int64_t>(place) * Config::rows;
    write_part(p.partial + row * Config::head_dim, p.partial_state + 2 * row, state);
    __syncwarp();
    uint32_t arrived = 0;
    if (threadIdx.x % 32 == 0) {
        arrived = ptx::atom_add_acq_rel_gpu(p.arrivals + pair, 1u) + 1;
        if (arrived == static_cast<uint32_t>(pieces)) p.arrivals[pair] = 0;  // for the next launch
    }
    arrived = __shfl_sync(0xffffffffu, arrived, 0);
    __syncwarp();
    if (arrived != static_cast<uint32_t>(pieces)) return;
    const int first = place - at.unit / max(Config::split, 1);
    for (int r = 0; r < Config::rows; ++r) merge_parts<Config>(p, pair, r, first, pieces, 1, 0);
}

// A warp a row: the segments of this block's warps become one; if other blocks have parts of the row too, the one that
// arrives last merges these. Rows do not wait for one another.
template <class Config> PTX void merge_block(const Params& p, const Layout<Config>& shared, int warp) {
    const int lane = threadIdx.x % 32;
    __syncthreads();
    const Plan& plan = *shared.plan();
    const int first = plan.pair[0], last = plan.pair[1];
    const int mine = lane < 2 * Config::warps ? *shared.owner(lane) : -1;
    for (int task = warp; task < (last - first + 1) * Config::rows; task += Config::warps) {
        const int pair = first + task / Config::rows, row = task % Config::rows;
        uint32_t parts = __ballot_sync(0xffffffffu, mine == pair);
        if (parts == 0) continue;  // a pair that one warp finished alone
        softmax::State state;
        if (mine == pair) {
            state.reference = shared.state(lane)[2 * row];
            state.sum = shared.state(lane)[2 * row + 1];
        }
        const float weight = softmax::merge_lanes(state);
        RowSum<Config> sum;
        while (parts) {
            const int part = __ffs(parts) - 1;
            parts &= parts - 1;
            sum.add(__shfl_sync(0xffffffffu, weight, part), shared.segment(part) + row * Config::head_dim);
        }
        const int which = pair == first ? 0 : 1;
        if ((pair != first && pair != last) || !plan.shared[which]) {
            sum.write(p, pair, row, state);
            continue;
        }
        const int64_t place = static_cast<int64_t>(2 * blockIdx.x + which) * Config::rows + row;
#pragma unroll
        for (int k = 0; k < RowSum<Config>::width; ++k) p.partial[place * Config::head_dim + 32 * k + lane] = sum.v[k];
        if (lane == 0) {
            p.partial_state[2 * place] = state.reference;
            p.partial_state[2 * place + 1] = state.sum;
        }
        __syncwarp();
        uint32_t arrived = 0;
        if (lane == 0) {
            uint32_t* arrivals = p.arrivals + static_cast<int64_t>(pair) * Config::rows + row;
            arrived = ptx::atom_add_acq_rel_gpu(arrivals, 1u) + 1;
            if (arrived == static_cast<uint32_t>(plan.count[which])) *arrivals = 0;  // for the next launch
        }
        arrived = __shfl_sync(0xffffffffu, arrived, 0);
        __syncwarp();
        if (arrived == static_cast<uint32_t>(plan.count[which])) merge_shared<Config>(p, plan, which, row);
    }
}

}  // namespace decode

#endif  // ANYBIT_DECODE_MERGE_CUH
