// packed_large: from sums to Y. Sums of blocks and warpgroups that shared the inputs meet here, in a fixed order.
#ifndef ANYBIT_PACKED_LARGE_WRITE_CUH
#define ANYBIT_PACKED_LARGE_WRITE_CUH

#include "packed_large_shape.cuh"

namespace packed {

template <class Config>
PTX float bias_of(uint16_t bits) {
    return Config::bfloat_out ? ptx::cvt_f32_bf16(bits) : ptx::cvt_f32_f16(bits);
}

// The sum of products of unsigned codes, less what their zero adds to it: exact in int32, doubled for bipolar codes.
template <class Config, class Sum>
PTX float centered(Sum sum, int twice_zero, int token_sum) {
    if constexpr (!Sums<Config>::raw)
        return static_cast<float>(sum);
    else if constexpr (Config::code == Code::bipolar)
        return static_cast<float>(2 * sum - twice_zero * token_sum);
    else
        return static_cast<float>(sum - (twice_zero >> 1) * token_sum);
}
// Twice the zero of a row's codes, where it is still to be taken away from the sums.
template <class Config>
PTX int twice_zero_of(const Params& p, int row) {
    if (!Sums<Config>::raw) return 0;
    return Config::code == Code::asym ? 2 * p.row_zero[row] : twice_fixed_zero<Config>();
}

// What turns a tile's sums into outputs, fetched before they are there: scale and bias of rows g and g + 8, and the scales
// of tokens and the sums of their codes, dealt to the lanes.
template <class Config>
struct TileTerms {
    static constexpr bool scaled = PackedLargeShape<Config>::bytes_of_x, raw = Sums<Config>::raw;
    static constexpr int dealt = (Config::tokens + 31) / 32;
    float scale[2], bias[2], token_scale[scaled ? dealt : 1];
    int twice_zero[2], token_sum[raw ? dealt : 1];

    PTX void load(const Params& p, int first_row, int first_token) {
        const int lane = ptx::lane_id();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first_row + lane / 4 + 8 * h;
            scale[h] = row < p.rows ? p.row_scale[row] * Widen<Config>::unscale() : 0.f;
            bias[h] = p.bias != nullptr && row < p.rows ? bias_of<Config>(p.bias[row]) : 0.f;
            twice_zero[h] = row < p.rows ? twice_zero_of<Config>(p, row) : 0;
        }
        if constexpr (scaled) {
            ptx::griddepcontrol_wait();  // the kernel before this one may have made them
#pragma unroll
            for (int i = 0; i < dealt; i++) {
                const int token = first_token + i * 32 + lane;
                token_scale[i] = token < p.tokens ? p.x_scale[token] : 0.f;
                if (raw) token_sum[i] = token < p.tokens ? p.x_sum[token] : 0;
            }
        }
    }
    PTX float of_token(int group_of_8, int within) {
        return scaled ? ptx::shfl(token_scale[group_of_8 / 4], group_of_8 % 4 * 8 + within) : 1.f;
    }
    PTX int sum_of_token(int group_of_8, int within) {
        return raw ? static_cast<int>(ptx::shfl(token_sum[raw ? group_of_8 / 4 : 0], group_of_8 % 4 * 8 + within)) : 0;
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

// From registers to Y through shared memory, Config::staged tokens of the warpgroup's 64 rows at a time, in two places by
// turns where there is room: 128 bytes of a token lie together there (16-byte chunks swizzled by token % 8), and leave as
// whole lines.
template <class Config>
PTX void packed_large_store(const Params& p, typename Sums<Config>::Total (&sum)[Config::tokens / 2], TileTerms<Config>& terms,
                            uint32_t staging, int& turn, int warpgroup, int first_row, int first_token) {
    if (first_row >= p.rows) return;
    constexpr int groups = Config::tokens / 8, staged = Config::staged;
    const int lane = ptx::lane_id(), warp = threadIdx.x / 32 % 4, thread = threadIdx.x % 128;
    // Lane i gives the address of row i % 8 of matrix i / 8: token (i / 16) * 8 + i % 8, half of 16 rows i / 8 % 2.
    const int my_token = lane / 16 * 8 + lane % 8, my_chunk = 2 * warp + lane / 8 % 2;
    const uint32_t write = my_token * 128 + ((my_chunk ^ (my_token & 7)) * 16);
    const int token = thread / 8, chunk = thread % 8;
    const uint32_t read = token * 128 + ((chunk ^ (token & 7)) * 16);
#pragma unroll
    for (int first = 0; first < Config::tokens; first += staged) {
        const uint32_t place = staging + turn * (staged * 128);
        if (Config::places == 2)
            turn ^= 1;
        else
            ptx::bar_sync(2 + warpgroup, 128);  // all have read what was there
#pragma unroll
        for (int j = first / 8; j < (first + staged) / 8 && j < groups; j += 2) {
            uint32_t out[4] = {0, 0, 0, 0};  // rows 0-7 and 8-15 of tokens 8j.., then of tokens 8j + 8..
#pragma unroll
            for (int group = j; group < j + 2 && group < groups; group++) {
                const float low_scale = terms.of_token(group, lane % 4 * 2);
                const float high_scale = terms.of_token(group, lane % 4 * 2 + 1);
                const int low_sum = terms.sum_of_token(group, lane % 4 * 2);
                const int high_sum = terms.sum_of_token(group, lane % 4 * 2 + 1);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float low = centered<Config>(sum[group * 4 + h * 2], terms.twice_zero[h], low_sum) * low_scale;
                    const float high =
                        centered<Config>(sum[group * 4 + h * 2 + 1], terms.twice_zero[h], high_sum) * high_scale;
                    const float a = fmaf(low, terms.scale[h], terms.bias[h]), b = fmaf(high, terms.scale[h], terms.bias[h]);
                    out[(group - j) * 2 + h] = Config::bfloat_out ? ptx::cvt_bf16x2_f32(a, b) : ptx::cvt_f16x2_f32(a, b);
                }
            }
            ptx::stmatrix_x4_trans(place + (j * 8 - first) * 128 + write, out);
        }
        // All have written this place, and so have read what was in the other one.
        ptx::bar_sync(2 + warpgroup, 128);
#pragma unroll
        for (int i = 0; i < staged && first + i < Config::tokens; i += 16)
            if (first + i + token < Config::tokens)
                store_rows(p, first_row + chunk * 8, first_token + first + i + token, ptx::ld_shared_v4(place + i * 128 + read));
    }
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
    constexpr int share = Shape::share, stride = Shape::row_stride, k_blocks = Config::k_blocks;
    const int lane = ptx::lane_id(), k_rank = rank % k_blocks, row_rank = rank / k_blocks;
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
    [[maybe_unused]] int twice_zero[Config::row_warpgroups][4];
#pragma unroll
    for (int part = 0; part < Config::row_warpgroups; part++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int y_row = first_row + part * 64 + threadIdx.x % 16 * 4 + e;
            scale[part][e] = y_row < p.rows ? p.row_scale[y_row] * Widen<Config>::unscale() : 0.f;
            bias[part][e] = p.bias != nullptr && y_row < p.rows ? bias_of<Config>(p.bias[y_row]) : 0.f;
            twice_zero[part][e] = y_row < p.rows ? twice_zero_of<Config>(p, y_row) : 0;
        }
    if (k_blocks > 1) {
        ptx::fence_proxy_async();
        if (Config::row_blocks == 1) {  // the others have begun, so their barriers are there
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
    constexpr int at_a_time = Shape::warpgroups * 8;  // tokens
    const int quad = threadIdx.x % 16 * 4, first_token = place.token_tile * Config::tokens + k_rank * share;
#pragma unroll
    for (int part = 0; part < Config::row_warpgroups; part++) {
        const int y_row = first_row + part * 64 + quad;
        if (y_row >= p.rows) break;
        for (int token = threadIdx.x / 16; token < share && first_token + token < p.tokens; token += at_a_time) {
            typename Sums<Config>::Total total[4] = {0, 0, 0, 0};
#pragma unroll
            for (int source = 0; source < k_blocks; source++) {
                const int slot = source - (source > k_rank);
                const uint32_t base = ring + (source == k_rank ? k_rank * Shape::share_bytes
                                                               : Shape::receive_offset + slot * Shape::share_bytes);
#pragma unroll
                for (int k = 0; k < Config::k_warpgroups; k++) {
                    const int at = ((k * Config::row_warpgroups + part) * share + token) * stride + quad;
                    const uint4 v = ptx::ld_shared_v4(base + at * 4);
                    add_bits(total[0], v.x);
                    add_bits(total[1], v.y);
                    add_bits(total[2], v.z);
                    add_bits(total[3], v.w);
                }
            }
            float out[4];
            const float x_scale = Shape::bytes_of_x ? p.x_scale[first_token + token] : 1.f;
            const int x_sum = Sums<Config>::raw ? p.x_sum[first_token + token] : 0;
#pragma unroll
            for (int e = 0; e < 4; e++)
                out[e] = fmaf(centered<Config>(total[e], twice_zero[part][e], x_sum) * x_scale, scale[part][e], bias[part][e]);
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

// ---- Stripes ----------------------------------------------------------------------------------------------------------
// A thread's sums travel as they lie in its registers, four at a time, 128 threads side by side.

template <class Sum, int count>
PTX uint4 four_of(const Sum (&sum)[count], int i) {
    uint4 v;
    v.x = bits_of(sum[4 * i]), v.y = bits_of(sum[4 * i + 1]), v.z = bits_of(sum[4 * i + 2]), v.w = bits_of(sum[4 * i + 3]);
    return v;
}
template <class Sum, int count>
PTX void add_four(Sum (&sum)[count], int i, uint4 v) {
    add_bits(sum[4 * i], v.x);
    add_bits(sum[4 * i + 1], v.y);
    add_bits(sum[4 * i + 2], v.z);
    add_bits(sum[4 * i + 3], v.w);
}

// The sums of the warpgroups that share a row tile's inputs, added up by the first of them through `meeting`.
template <class Config>
PTX void packed_large_meet(typename Sums<Config>::Total (&sum)[Config::tokens / 2], uint32_t meeting, int row_part, int k_part) {
    constexpr int fours = Config::tokens / 8;
    const uint32_t mine = meeting + (row_part * fours * 128 + threadIdx.x % 128) * 16;
    constexpr uint32_t next = Config::row_warpgroups * fours * 2048;
    ptx::bar_sync(6 + row_part, Config::k_warpgroups * 128);  // what was there has been read
    if (k_part > 0) {
#pragma unroll
        for (int i = 0; i < fours; i++) ptx::st_shared_v4(mine + (k_part - 1) * next + i * 2048, four_of(sum, i));
    }
    ptx::bar_sync(6 + row_part, Config::k_warpgroups * 128);
    if (k_part == 0) {
#pragma unroll
        for (int other = 0; other < Config::k_warpgroups - 1; other++)
#pragma unroll
            for (int i = 0; i < fours; i++) add_four(sum, i, ptx::ld_shared_v4(mine + other * next + i * 2048));
    }
}

// Says that sums are there. 64 bits that nothing else has left in memory: so it need not be cleared before a launch, and
// whoever reads the sums clears it for the next one.
constexpr uint64_t sums_are_there = 0x7c5a91e3d2b6480full;

// Leaves the sums of a tile's later units for its owner.
template <class Config>
PTX void packed_large_leave(const Params& p, const typename Sums<Config>::Total (&sum)[Config::tokens / 2], int warpgroup) {
    constexpr int fours = Config::tokens / 8;
    const int slot = Walk<Config>::stripe() * Config::row_warpgroups + warpgroup, thread = threadIdx.x % 128;
    uint4* to = reinterpret_cast<uint4*>(p.partials) + static_cast<size_t>(slot) * fours * 128 + thread;
#pragma unroll
    for (int i = 0; i < fours; i++) to[i * 128] = four_of(sum, i);
    ptx::bar_sync(2 + warpgroup, 128);
    if (thread == 0) ptx::st_release_gpu(p.arrived + slot, sums_are_there);
    __syncwarp();
}

// Adds what the other stripes of the owner's tile left, in the order of the inputs.
template <class Config>
PTX void packed_large_gather(const Params& p, typename Sums<Config>::Total (&sum)[Config::tokens / 2], int tile,
                             int warpgroup) {
    constexpr int fours = Config::tokens / 8;
    const int thread = threadIdx.x % 128;
    for (int other = Walk<Config>::stripe() + 1; Walk<Config>::begin_of(p, other) < Walk<Config>::end_of(p, tile); other++) {
        const int slot = other * Config::row_warpgroups + warpgroup;
        if (thread == 0) {
            while (ptx::ld_acquire_gpu(p.arrived + slot) != sums_are_there) {}
            p.arrived[slot] = 0;
        }
        ptx::bar_sync(2 + warpgroup, 128);
        const uint4* from = reinterpret_cast<const uint4*>(p.partials) + static_cast<size_t>(slot) * fours * 128 + thread;
#pragma unroll
        for (int i = 0; i < fours; i++) add_four(sum, i, ptx::ld_global_cg_v4(from + i * 128));
    }
}

}  // namespace packed

#endif  // ANYBIT_PACKED_LARGE_WRITE_CUH
