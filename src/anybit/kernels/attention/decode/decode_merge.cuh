// The split-KV merge: warps' softmax states to the output, in shared memory, then across CTAs in the last to arrive.
#ifndef ANYBIT_DECODE_MERGE_CUH
#define ANYBIT_DECODE_MERGE_CUH

#include "attention/decode/decode_block.cuh"
#include "attention/decode/decode_schedule.cuh"

namespace decode {

// A CTA's merge plan, made while its first loads are in flight. Only the first and the last pair of its range can be
// shared with other CTAs; the pairs between lie in it whole.
struct Plan {
    int pair[2];     // the first and the last
    int shared[2];   // whether other CTAs hold parts of it; for the last, only if it isn't the first too
    int first[2];    // first CTA that holds a part
    int count[2];    // CTAs that hold one
    int second[2];   // whether it is the second pair of that first CTA's two
};

// Shared-memory layout: rings, the warps' first segments, states, owners, mbarriers, plan.
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

    DEVICE uint32_t stage(int warp) const { return ptx::shared_address(ptx::dynamic_shared()) + warp * ring_bytes; }
    DEVICE uint32_t barriers(int warp) const {
        return ptx::shared_address(ptx::dynamic_shared()) + barrier_area + warp * Config::stages * 8;
    }
    // A warp has at most two partial pairs ("segments"): the end of one (0) and the beginning of another (1).
    DEVICE float* segment(int index) const {
        return reinterpret_cast<float*>(ptx::dynamic_shared() + (index % 2 ? index / 2 * ring_bytes : segments + index / 2 * segment_bytes));
    }
    DEVICE float* state(int index) const {
        return reinterpret_cast<float*>(ptx::dynamic_shared() + states) + index * 2 * Config::rows;
    }
    DEVICE int* owner(int index) const { return reinterpret_cast<int*>(ptx::dynamic_shared() + owners) + index; }
    DEVICE Plan* plan() const { return reinterpret_cast<Plan*>(ptx::dynamic_shared() + plan_area); }
    DEVICE void clear_segments(int warp) const {
        if (threadIdx.x % 32 < 2) *owner(2 * warp + threadIdx.x % 32) = -1;
    }
};

template <bool bf16> DEVICE uint16_t narrow(float v) {
    return bf16 ? ptx::cvt_bf16_f32(v) : ptx::cvt_f16_f32(v);
}

// Finalizes one query row of a pair: output address, sink, normalizer, log-sum-exp.
template <class Config> struct Row {
    uint16_t* out;
    float normalizer;
    bool there;
    DEVICE Row(const Params& p, int pair, int row, softmax::State state, bool writes_lse) {
        const int heads = p.kv_heads * Config::query_chunks, batch = pair / heads, within = pair - batch * heads;
        const int kv_head = within / Config::query_chunks, r = within % Config::query_chunks * Config::rows + row;
        const int token = r / Config::group, head = kv_head * Config::group + r % Config::group;
        Extent e;
        if constexpr (parts<Config> > 1) e = extent_of<Config>(p, batch, p.lengths[sequence_of<Config>(p, batch)]);
        there = row < Config::rows && e.template has<Config>(token);
        const int64_t place = e.template place<Config>(batch, token) * p.kv_heads * Config::group + head;
        out = p.out + place * Config::head_dim;
        const float reference = state.reference;
        if (there && p.sinks) state.add_sink(p.sinks[head]);
        normalizer = state.normalizer() * softmax::State::weight(reference, state.reference);
        if (there && writes_lse && p.lse) p.lse[place] = state.log_sum_exp();
    }
};

// Writes a complete state to the output.
template <class Config> DEVICE void write_whole(const Params& p, int pair, const State<Config>& state) {
    constexpr int width = Shape<Config>::width;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    UNROLL for (int n = 0; n < Config::query_tiles; ++n)
        UNROLL for (int x = 0; x < width; ++x) {
            const Row<Config> row(p, pair, (4 * n + t) * width + x, {state.reference[n][x], state.sum[n][x]}, g == 0);
            if (row.there)
                UNROLL for (int c = 0; c < Shape<Config>::depth; ++c)
                    UNROLL for (int h = 0; h < 2; ++h)
                        row.out[16 * c + 8 * h + g] = narrow<Config::bf16>(state.output(n, c, h, x) * row.normalizer);
        }
}

// Writes a partial state: unnormalized rows [rows, head_dim], and references and sums [rows, 2].
template <class Config> DEVICE void write_part(float* part, float* part_state, const State<Config>& state) {
    constexpr int width = Shape<Config>::width;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    UNROLL for (int n = 0; n < Config::query_tiles; ++n)
        UNROLL for (int x = 0; x < width; ++x) {
            const int row = (4 * n + t) * width + x;
            if (row < Config::rows) {
                UNROLL for (int c = 0; c < Shape<Config>::depth; ++c)
                    UNROLL for (int h = 0; h < 2; ++h) part[row * Config::head_dim + 16 * c + 8 * h + g] = state.output(n, c, h, x);
                if (g == 0) {
                    part_state[2 * row] = state.reference[n][x];
                    part_state[2 * row + 1] = state.sum[n][x];
                }
            }
        }
}

DEVICE softmax::State state_of(uint2 stored) { return {__uint_as_float(stored.x), __uint_as_float(stored.y)}; }

template <class Config> DEVICE void sum_lanes(State<Config>& state) {
    UNROLL for (int n = 0; n < Config::query_tiles; ++n)
        UNROLL for (int x = 0; x < Shape<Config>::width; ++x) State<Config>::sum_rows(state.sum[n][x]);
}

// A pair or this warp's range ends here: writes the output, or keeps the segment for the merge.
template <class Config>
DEVICE void finish_segment(const Params& p, const Layout<Config>& shared, int warp, const Cursor<Config>& at,
                        State<Config>& state, bool whole, bool end) {
    sum_lanes(state);
    if (whole && at.last()) return write_whole(p, at.pair(p), state);
    const int index = 2 * warp + (end ? 1 : 0);
    __syncwarp();
    write_part(shared.segment(index), shared.state(index), state);
    if (threadIdx.x % 32 == 0) *shared.owner(index) = at.pair(p);
}

// A warp's weighted sum of one row, or of a piece of one (merge_warps): `width` contiguous channels per lane.
template <class Config> struct RowSum {
    static constexpr int width = Config::head_dim / 32 / Config::merge_warps;
    int first;  // channel
    float v[width];
    DEVICE explicit RowSum(int piece) : first(width * (32 * piece + static_cast<int>(threadIdx.x % 32))) {
        UNROLL for (int k = 0; k < width; ++k) v[k] = 0.0f;
    }
    DEVICE void add(float weight, const float (&row)[width]) {
        UNROLL for (int k = 0; k < width; ++k) v[k] = fmaf(weight, row[k], v[k]);
    }
    // This lane's channels of a row in shared memory, or in global memory (other CTAs': ld.cg).
    DEVICE static void from_shared(float (&row)[width], uint32_t shared) {
        UNROLL for (int k = 0; k < width; k += vector) {
            if constexpr (vector == 4) put(row + k, ptx::ld_shared_v4(shared + 4 * k));
            else if constexpr (vector == 2) put(row + k, ptx::ld_shared_v2(shared + 4 * k));
            else row[k] = ptx::ld_shared_f32(shared + 4 * k);
        }
    }
    DEVICE static void from_global(float (&row)[width], const float* at) {
        UNROLL for (int k = 0; k < width; k += vector) {
            if constexpr (vector == 4) put(row + k, ptx::ld_global_cg_v4(at + k));
            else if constexpr (vector == 2) put(row + k, ptx::ld_global_cg_v2(at + k));
            else row[k] = __uint_as_float(ptx::ld_global_cg_u32(at + k));
        }
    }
    DEVICE static void put(float* row, const uint4& w) {
        row[0] = __uint_as_float(w.x), row[1] = __uint_as_float(w.y), row[2] = __uint_as_float(w.z), row[3] = __uint_as_float(w.w);
    }
    DEVICE static void put(float* row, const uint2& w) { row[0] = __uint_as_float(w.x), row[1] = __uint_as_float(w.y); }
    DEVICE void leave(float* to) const {
        to += first;
        UNROLL for (int k = 0; k < width; k += vector) {
            if constexpr (vector == 4) *reinterpret_cast<uint4*>(to + k) = make_uint4(__float_as_uint(v[k]), __float_as_uint(v[k + 1]), __float_as_uint(v[k + 2]), __float_as_uint(v[k + 3]));
            else if constexpr (vector == 2) *reinterpret_cast<uint2*>(to + k) = make_uint2(__float_as_uint(v[k]), __float_as_uint(v[k + 1]));
            else to[k] = v[k];
        }
    }
    DEVICE void write(const Params& p, int pair, int row, const softmax::State& state) const {
        const Row<Config> place(p, pair, row, state, first == 0);
        if (!place.there) return;
        uint16_t* to = place.out + first;
        if constexpr (width % 2 == 0) {
            UNROLL for (int k = 0; k < width; k += 2)
                *reinterpret_cast<uint32_t*>(to + k) = narrow<Config::bf16>(v[k] * place.normalizer) | static_cast<uint32_t>(narrow<Config::bf16>(v[k + 1] * place.normalizer)) << 16;
        } else {
            UNROLL for (int k = 0; k < width; ++k) to[k] = narrow<Config::bf16>(v[k] * place.normalizer);
        }
    }
    static constexpr int vector = width % 4 == 0 ? 4 : width % 2 == 0 ? 2 : 1;
};

template <class Config>
DEVICE void plan_merge(const Params& p, const Layout<Config>& shared, int warp, Line<Config>& line, int begin, int end, int shares) {
    if (warp >= 2) return;
    const int at = warp ? end - 1 : begin;
    const Cursor<Config> cursor = line.locate(p, at);
    const int from = at - cursor.item, to = from + cursor.extent.items;
    if (threadIdx.x % 32) return;
    Plan& plan = *shared.plan();
    plan.pair[warp] = cursor.pair(p);
    plan.shared[warp] = warp ? from > begin && to > end : from < begin || to > end;
    plan.first[warp] = owner(line.total, shares, from);
    plan.count[warp] = owner(line.total, shares, to - 1) - plan.first[warp] + 1;
    plan.second[warp] = share_begin(line.total, shares, plan.first[warp]) < from;
}

// Issues the loads of parts `base + at` on, as many as exist.
template <class Config, int batches, int batch, int width>
DEVICE void load_parts(float (&rows)[batches][batch][width], const float* parts, int base, int at, int count, int offset) {
    constexpr int pitch = Config::split ? 1 : 2, stride = pitch * Config::rows * Config::head_dim;
    const float* from = parts + static_cast<int64_t>(base + at) * stride;
    const float* first = from + (base + at == 0 ? offset * (stride / pitch) : 0);
    UNROLL for (int b = 0; b < batches; ++b)
        if (base + at + b * batch < count)
            UNROLL for (int i = 0; i < batch; ++i)
                if (base + at + b * batch + i < count) RowSum<Config>::from_global(rows[b][i], b + i ? from + (b * batch + i) * stride : first);
}

// Merges all parts of a row (or piece of one) once they have arrived. Warp-collective. Parts lie at `begin`,
// `begin + pitch`, ..., the first one `offset` further. Loads are issued as far ahead as registers allow, since every
// dependent access costs more than half a microsecond here.
template <class Config> DEVICE void merge_parts(const Params& p, int pair, int row, int piece, int begin, int count, int offset) {
    using Sum = RowSum<Config>;
    constexpr int pitch = Config::split ? 1 : 2;
    // A fixed split merges inside the main loop, with the registers left over there.
    constexpr bool tight = Config::split > 0 && (!Config::paired || Config::threads * Config::min_blocks_per_sm > 256);
    constexpr int batch = tight && Config::threads * Config::min_blocks_per_sm > 384 ? 2 : 6, batches = tight || Sum::width > 4 ? 1 : Sum::width > 2 ? 3 : 6;
    constexpr int together = batch * batches, few = 4;  // this few parts beyond 32 join the round before
    constexpr int state_stride = pitch * Config::rows * Config::merge_warps * 2;
    const int lane = threadIdx.x % 32;
    softmax::State total;
    Sum sum(piece);
    const float* parts = p.partial + (static_cast<int64_t>(begin) * Config::rows + row) * Config::head_dim + sum.first;
    const float* states = p.partial_state + ((static_cast<int64_t>(begin) * Config::rows + row) * Config::merge_warps + piece) * 2;
    for (int base = 0; base < count; base += 32) {
        const int here = min(count - base, 32);
        float rows[batches][batch][Sum::width];
        load_parts<Config>(rows, parts, base, 0, count, offset);
        softmax::State state;
        if (lane < here) {
            const int part = base + lane;
            state = state_of(ptx::ld_global_cg_v2(states + static_cast<int64_t>(part) * state_stride + (part == 0 ? offset * (state_stride / pitch) : 0)));
        }
        softmax::State extra;  // of those few parts
        const int more = max(min(count - base - here, few), 0);
        if (lane < more) extra = state_of(ptx::ld_global_cg_v2(states + static_cast<int64_t>(base + 32 + lane) * state_stride));
        // The running total merges as one more part.
        float most = fmaxf(fmaxf(total.reference, state.reference), extra.reference);
        UNROLL for (int i = 16; i; i >>= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, i));
        const float old = softmax::State::weight(total.reference, most);
        const float weight = softmax::State::weight(state.reference, most), weight_extra = softmax::State::weight(extra.reference, most);
        float found = weight * state.sum + weight_extra * extra.sum;
        UNROLL for (int i = 16; i; i >>= 1) found += __shfl_xor_sync(0xffffffffu, found, i);
        UNROLL for (int k = 0; k < Sum::width; ++k) sum.v[k] *= old;
        total.sum = total.sum * old + found;
        total.reference = most;
#pragma unroll 1
        for (int at = 0; at < here + more; at += together) {
            if (at) load_parts<Config>(rows, parts, base, at, count, offset);
            UNROLL for (int b = 0; b < batches; ++b)
                if (at + b * batch < here + more)
                    UNROLL for (int i = 0; i < batch; ++i) {
                        const int part = at + b * batch + i;
                        const float w = __shfl_sync(0xffffffffu, part < 32 ? weight : weight_extra, part % 32);
                        if (part < here + more) sum.add(w, rows[b][i]);
                    }
        }
        base += more;
    }
    sum.write(p, pair, row, total);
}

// Piece `place` of the line ends: writes the output, or the partial state; the last of a pair to arrive merges it.
template <class Config> DEVICE void finish_piece(const Params& p, const Cursor<Config>& at, State<Config>& state, int place) {
    const int pieces = at.extent.template pieces<Config>(), pair = at.pair(p);
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
    const int first = place - at.item / max(Config::split, 1);
#pragma unroll 1
    for (int r = 0; r < Config::rows; ++r) merge_parts<Config>(p, pair, r, 0, first, pieces, 0);
}

// Merges this CTA's segments, one row (or piece of one) per warp at a time. Where other CTAs hold parts of the row, the
// last to arrive merges them. Rows are counted separately, so none waits for another, and a warp counts all its rows with
// one atomic instruction.
template <class Config> DEVICE void merge_block(const Params& p, const Layout<Config>& shared, int warp) {
    constexpr int tasks = Config::rows * Config::merge_warps;  // of a pair
    const int lane = threadIdx.x % 32;
    __syncthreads();
    const Plan& plan = *shared.plan();
    const int first = plan.pair[0], last = plan.pair[1];
    const int mine = lane < 2 * Config::warps ? *shared.owner(lane) : -1;
    int left = 0, counted = 0;  // tasks shared with other CTAs; the one this lane counts
    for (int task = warp; task < (last - first + 1) * tasks; task += Config::warps) {
        const int index = task / tasks, row = task / Config::merge_warps % Config::rows, piece = task % Config::merge_warps;
        const int pair = index == 0 ? first : index == 1 ? last : first + index - 1;
        uint32_t parts = __ballot_sync(0xffffffffu, mine == pair);
        if (parts == 0) continue;  // a pair that one warp finished alone
        softmax::State state;
        if (mine == pair) {
            state.reference = shared.state(lane)[2 * row];
            state.sum = shared.state(lane)[2 * row + 1];
        }
        const float weight = softmax::merge_lanes(state);
        RowSum<Config> sum(piece);
        while (parts) {  // two per iteration; an odd last one is loaded twice and added once
            const int one = __ffs(parts) - 1;
            parts &= parts - 1;
            const int two = parts ? __ffs(parts) - 1 : one;
            float rows[2][RowSum<Config>::width];
            RowSum<Config>::from_shared(rows[0], ptx::shared_address(shared.segment(one) + row * Config::head_dim + sum.first));
            RowSum<Config>::from_shared(rows[1], ptx::shared_address(shared.segment(two) + row * Config::head_dim + sum.first));
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
            p.partial_state[2 * (place * Config::merge_warps + piece)] = state.reference;
            p.partial_state[2 * (place * Config::merge_warps + piece) + 1] = state.sum;
        }
        if (lane == left) counted = task;
        ++left;
    }
    if (left == 0) return;
    __syncwarp();
    bool arrived = false;
    if (lane < left) {
        const int which = counted / tasks;
        uint32_t* arrivals = p.arrivals + static_cast<int64_t>(plan.pair[which]) * tasks + counted % tasks;
        arrived = ptx::atom_add_acq_rel_gpu(arrivals, 1u) + 1 == static_cast<uint32_t>(plan.count[which]);
        if (arrived) *arrivals = 0;  // for the next launch
    }
    uint32_t complete = __ballot_sync(0xffffffffu, arrived);
    __syncwarp();  // extends the counting lane's acquire to the warp, which reads the parts
    for (; complete; complete &= complete - 1) {
        const int task = __shfl_sync(0xffffffffu, counted, __ffs(complete) - 1), which = task / tasks;
        merge_parts<Config>(p, plan.pair[which], task / Config::merge_warps % Config::rows, task % Config::merge_warps, 2 * plan.first[which], plan.count[which], plan.second[which]);
    }
}

}  // namespace decode

#endif  // ANYBIT_DECODE_MERGE_CUH
