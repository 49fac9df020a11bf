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

// What a warp sums of a row: `width` channels a lane, one after another.
template <class Config> struct RowSum {
    static constexpr int width = Config::head_dim / 32;
    float v[width];
    PTX RowSum() {
#pragma unroll
        for (int k = 0; k < width; ++k) v[k] = 0.0f;
    }
    PTX static int first() { return width * (threadIdx.x % 32); }
    PTX void add(float weight, const float (&row)[width]) {
#pragma unroll
        for (int k = 0; k < width; ++k) v[k] = fmaf(weight, row[k], v[k]);
    }
    // This lane's channels of a row in shared memory, or of one that other blocks wrote.
    PTX static void from_shared(float (&row)[width], const float* at) {
        const uint32_t shared = ptx::shared_address(at + first());
        if constexpr (width % 4 == 0) {
#pragma unroll
            for (int k = 0; k < width; k += 4) {
                const uint4 w = ptx::ld_shared_v4(shared + 4 * k);
                row[k] = __uint_as_float(w.x); row[k + 1] = __uint_as_float(w.y); row[k + 2] = __uint_as_float(w.z); row[k + 3] = __uint_as_float(w.w);
            }
        } else {
#pragma unroll
            for (int k = 0; k < width; ++k) row[k] = ptx::ld_shared_f32(shared + 4 * k);
        }
    }
    PTX static void from_global(float (&row)[width], const float* at) {
        at += first();
        if constexpr (width % 4 == 0) {
#pragma unroll
            for (int k = 0; k < width; k += 4) {
                const uint4 w = ptx::ld_global_cg_v4(at + k);
                row[k] = __uint_as_float(w.x); row[k + 1] = __uint_as_float(w.y); row[k + 2] = __uint_as_float(w.z); row[k + 3] = __uint_as_float(w.w);
            }
        } else {
#pragma unroll
            for (int k = 0; k < width; ++k) row[k] = __uint_as_float(ptx::ld_global_cg_u32(at + k));
        }
    }
    PTX void leave(float* to) const {
        to += first();
        if constexpr (width % 4 == 0) {
#pragma unroll
            for (int k = 0; k < width; k += 4) *reinterpret_cast<uint4*>(to + k) = make_uint4(__float_as_uint(v[k]), __float_as_uint(v[k + 1]), __float_as_uint(v[k + 2]), __float_as_uint(v[k + 3]));
        } else {
#pragma unroll
            for (int k = 0; k < width; ++k) to[k] = v[k];
        }
    }
    PTX void write(const Params& p, int pair, int row, const softmax::State& state) const {
        const Row<Config> place(p, pair, row, state, threadIdx.x % 32 == 0);
        if (!place.there) return;
        uint16_t* to = place.out + first();
        if constexpr (width % 2 == 0) {
#pragma unroll
            for (int k = 0; k < width; k += 2)
                *reinterpret_cast<uint32_t*>(to + k) = narrow<Config::bf16>(v[k] * place.normalizer) | static_cast<uint32_t>(narrow<Config::bf16>(v[k + 1] * place.normalizer)) << 16;
        } else {
#pragma unroll
            for (int k = 0; k < width; ++k) to[k] = narrow<Config::bf16>(v[k] * place.normalizer);
        }
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

// Where part `part` of a row lies, in rows.
template <class Config> PTX int64_t part_of(int row, int begin, int part, int step, int offset) {
    return static_cast<int64_t>(begin + step * part + (part == 0 ? offset : 0)) * Config::rows + row;
}
// Parts beyond the last are the last once more.
template <class Config, int batch>
PTX void load_parts(float (&rows)[batch][RowSum<Config>::width], const Params& p, int row, int begin, int at, int count, int step, int offset) {
#pragma unroll
    for (int i = 0; i < batch; ++i)
        RowSum<Config>::from_global(rows[i], p.partial + part_of<Config>(row, begin, min(at + i, count - 1), step, offset) * Config::head_dim);
}
template <class Config, int batch>
PTX void add_parts(RowSum<Config>& sum, const float (&rows)[batch][RowSum<Config>::width], float weight, int at, int count) {
#pragma unroll
    for (int i = 0; i < batch; ++i) {
        const float w = __shfl_sync(0xffffffffu, weight, (at + i) % 32);
        if (at + i < count) sum.add(w, rows[i]);
    }
}

// All parts of one row of a pair, once they are there; the whole warp calls this. They lie at `begin`, `begin + step` ...,
// the first one `offset` further. Few instructions, for they are fetched anew each time: eight parts go together, and
// the next eight are on their way meanwhile.
template <class Config> PTX void merge_parts(const Params& p, int pair, int row, int begin, int count, int step, int offset) {
    using Sum = RowSum<Config>;
    constexpr int batch = Sum::width > 4 ? 4 : 8;  // as registers allow
    const int lane = threadIdx.x % 32;
    softmax::State total;
    Sum sum;
    for (int base = 0; base < count; base += 32) {
        const int here = min(count - base, 32);  // one a lane
        float rows[2][batch][Sum::width];
        load_parts<Config>(rows[0], p, row, begin, base, count, step, offset);
        softmax::State state;
        if (lane < here) {
            const uint2 found = ptx::ld_global_cg_v2(p.partial_state + 2 * part_of<Config>(row, begin, base + lane, step, offset));
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
        for (int k = 0; k < Sum::width; ++k) sum.v[k] *= old;
        total.sum = total.sum * old + state.sum * softmax::State::weight(state.reference, most);
        total.reference = most;
#pragma unroll 1
        for (int at = 0; at < here; at += 2 * batch) {
            if (at + batch < here) load_parts<Config>(rows[1], p, row, begin, base + at + batch, count, step, offset);
            add_parts<Config>(sum, rows[0], weight, at, here);
            if (at + batch >= here) break;
            if (at + 2 * batch < here) load_parts<Config>(rows[0], p, row, begin, base + at + 2 * batch, count, step, offset);
            add_parts<Config>(sum, rows[1], weight, at + batch, here);
        }
    }
    sum.write(p, pair, row, total);
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
// arrives last merges these. Rows do not wait for one another. Pairs that are shared come first: they take longest.
template <class Config> PTX void merge_block(const Params& p, const Layout<Config>& shared, int warp) {
    const int lane = threadIdx.x % 32;
    __syncthreads();
    stamp<Config>(p, 6);
    const Plan& plan = *shared.plan();
    const int first = plan.pair[0], last = plan.pair[1];
    const int mine = lane < 2 * Config::warps ? *shared.owner(lane) : -1;
    for (int task = warp; task < (last - first + 1) * Config::rows; task += Config::warps) {
        const int index = task / Config::rows, row = task % Config::rows;
        const int pair = index == 0 ? first : index == 1 ? last : first + index - 1;
        uint32_t parts = __ballot_sync(0xffffffffu, mine == pair);
        if (parts == 0) continue;  // a pair that one warp finished alone
        softmax::State state;
        if (mine == pair) {
            state.reference = shared.state(lane)[2 * row];
            state.sum = shared.state(lane)[2 * row + 1];
        }
        const float weight = softmax::merge_lanes(state);
        RowSum<Config> sum;
        while (parts) {  // two at a time; an odd one goes with itself, once without weight
            const int one = __ffs(parts) - 1;
            parts &= parts - 1;
            const int two = parts ? __ffs(parts) - 1 : one;
            float rows[2][RowSum<Config>::width];
            RowSum<Config>::from_shared(rows[0], shared.segment(one) + row * Config::head_dim);
            RowSum<Config>::from_shared(rows[1], shared.segment(two) + row * Config::head_dim);
            const float weights[2] = {__shfl_sync(0xffffffffu, weight, one), __shfl_sync(0xffffffffu, weight, two)};
            sum.add(weights[0], rows[0]);
            if (parts) sum.add(weights[1], rows[1]);
            parts &= parts - 1;
        }
        const int which = pair == first ? 0 : 1;
        if ((pair != first && pair != last) || !plan.shared[which]) {
            sum.write(p, pair, row, state);
            continue;
        }
        const int64_t place = static_cast<int64_t>(2 * blockIdx.x + which) * Config::rows + row;
        sum.leave(p.partial + place * Config::head_dim);
        if (lane == 0) {
            p.partial_state[2 * place] = state.reference;
            p.partial_state[2 * place + 1] = state.sum;
        }
        __syncwarp();
        stamp<Config>(p, 11);
        uint32_t arrived = 0;
        if (lane == 0) {
            uint32_t* arrivals = p.arrivals + static_cast<int64_t>(pair) * Config::rows + row;
            arrived = ptx::atom_add_acq_rel_gpu(arrivals, 1u) + 1;
            if (arrived == static_cast<uint32_t>(plan.count[which])) *arrivals = 0;  // for the next launch
        }
        arrived = __shfl_sync(0xffffffffu, arrived, 0);
        __syncwarp();
        stamp<Config>(p, 12);
        if (arrived == static_cast<uint32_t>(plan.count[which]))
            merge_parts<Config>(p, pair, row, 2 * plan.first[which], plan.count[which], 2, plan.second[which]);
    }
}

}  // namespace decode

#endif  // ANYBIT_DECODE_MERGE_CUH
