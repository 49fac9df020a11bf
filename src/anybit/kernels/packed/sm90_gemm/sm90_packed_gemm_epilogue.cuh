// sm90_packed_gemm: the epilogue. Split-K partial sums of warpgroups and of the cluster's CTAs are reduced in a fixed order.
#ifndef ANYBIT_SM90_PACKED_GEMM_EPILOGUE_CUH
#define ANYBIT_SM90_PACKED_GEMM_EPILOGUE_CUH

#include "common/values.cuh"
#include "packed/sm90_gemm/sm90_packed_gemm_shape.cuh"

namespace packed {

// Y as the stores of an expert's tile see it: up to the end of its tokens, with an expert's rows.
struct ExpertOutput {
    uint16_t* y;
    int tokens, rows;
};

template <class Config>
DEVICE float bias_of(uint16_t bits) {
    return bf16_out<Config> ? ptx::cvt_f32_bf16(bits) : ptx::cvt_f32_f16(bits);
}

// Subtracts the zero-point term from a sum of unsigned codes: exact in int32, doubled for bipolar codes.
template <class Config, class Sum>
DEVICE float centered(Sum sum, int twice_zero, int token_sum) {
    if constexpr (!Sums<Config>::raw)
        return static_cast<float>(sum);
    else if constexpr (Config::code == Code::bipolar)
        return static_cast<float>(2 * sum - twice_zero * token_sum);
    else
        return static_cast<float>(sum - (twice_zero >> 1) * token_sum);
}
// Twice the zero of a row's codes; 0 where the weights were centered already.
template <class Config>
DEVICE int twice_zero_of(const Params& p, int row) {
    if (!Sums<Config>::raw) return 0;
    return Config::code == Code::asym ? 2 * p.row_zero[row] : twice_fixed_zero<Config>();
}

// Epilogue operands, loaded before the main loop: scale and bias of rows g and g + 8; token scales and sums of codes,
// spread over the lanes and read by shuffle.
template <class Config>
struct TileTerms {
    static constexpr bool scaled = PackedGemmShape<Config>::bytes_of_x || halved<Config>, raw = Sums<Config>::raw;
    static constexpr int dealt = (Config::tile_m + 31) / 32;
    float scale[2], bias[2], token_scale[scaled ? dealt : 1];
    int twice_zero[2], token_sum[raw ? dealt : 1];

    DEVICE void load(const Params& p, int first_row, int first_token) {
        const int lane = ptx::lane_id();
        UNROLL for (int h = 0; h < 2; h++) {
            const int row = first_row + lane / 4 + 8 * h;
            scale[h] = row < p.rows ? p.row_scale[row] * Dequantize<Config>::unscale() : 0.f;
            bias[h] = p.bias != nullptr && row < p.rows ? bias_of<Config>(p.bias[row]) : 0.f;
            twice_zero[h] = row < p.rows ? twice_zero_of<Config>(p, row) : 0;
        }
        if constexpr (scaled) {
            ptx::griddepcontrol_wait();  // may be the previous kernel's output
            UNROLL for (int i = 0; i < dealt; i++) {
                const int token = first_token + i * 32 + lane;
                token_scale[i] = token < p.tokens ? p.x_scale[token] : 0.f;
                if (raw) token_sum[i] = token < p.tokens ? p.x_sum[token] : 0;
            }
        }
    }
    DEVICE float of_token(int group_of_8, int within) {
        return scaled ? ptx::shfl(token_scale[group_of_8 / 4], group_of_8 % 4 * 8 + within) : 1.f;
    }
    DEVICE int sum_of_token(int group_of_8, int within) {
        return raw ? static_cast<int>(ptx::shfl(token_sum[raw ? group_of_8 / 4 : 0], group_of_8 % 4 * 8 + within)) : 0;
    }
};

// Stores eight rows of one token to Y.
template <class Output>
DEVICE void store_rows(const Output& p, int row, int token, const uint4& v) {
    if (token >= p.tokens || row >= p.rows) return;
    uint16_t* target = p.y + static_cast<size_t>(token) * p.rows + row;
    if (p.rows % 8 == 0) {
        *reinterpret_cast<uint4*>(target) = v;
        return;
    }
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    UNROLL for (int e = 0; e < 8; e++)
        if (row + e < p.rows) target[e] = static_cast<uint16_t>(words[e / 2] >> (e % 2 * 16));
}

// The same with silu: eight channels of one token, each from two rows.
template <class Output>
DEVICE void store_channels(const Output& p, int channel, int token, const uint4& v) {
    if (token < p.tokens && channel < p.rows / 2) *reinterpret_cast<uint4*>(p.y + static_cast<size_t>(token) * (p.rows / 2) + channel) = v;
}
// Swizzled staging offset, with silu: a warpgroup's 32 channels of a token are 64 bytes, in 16-byte chunks.
DEVICE uint32_t channels_at(int token, int chunk) { return token * 64 + ((chunk ^ (token / 2 & 3)) * 16); }

// Converts the sums of 16 tokens, from 8j on, to outputs: rows 0-7 and 8-15 of the first eight tokens, then of the next.
template <class Config>
DEVICE void outputs_of_16(uint32_t (&out)[4], const typename Sums<Config>::Total (&sum)[Config::tile_m / 2], TileTerms<Config>& terms, int j) {
    constexpr int groups = Config::tile_m / 8;
    const int lane = ptx::lane_id();
    UNROLL for (int group = j; group < j + 2 && group < groups; group++) {
        const float low_scale = terms.of_token(group, lane % 4 * 2);
        const float high_scale = terms.of_token(group, lane % 4 * 2 + 1);
        const int low_sum = terms.sum_of_token(group, lane % 4 * 2);
        const int high_sum = terms.sum_of_token(group, lane % 4 * 2 + 1);
        UNROLL for (int h = 0; h < 2; h++) {
            const float low = centered<Config>(sum[group * 4 + h * 2], terms.twice_zero[h], low_sum) * low_scale;
            const float high = centered<Config>(sum[group * 4 + h * 2 + 1], terms.twice_zero[h], high_sum) * high_scale;
            const float a = fmaf(low, terms.scale[h], terms.bias[h]), b = fmaf(high, terms.scale[h], terms.bias[h]);
            out[(group - j) * 2 + h] = bf16_out<Config> ? ptx::cvt_bf16x2_f32(a, b) : ptx::cvt_f16x2_f32(a, b);
        }
    }
}

// Stores a warpgroup's tile through shared memory, Config::epilogue_tile tokens at a time, double-buffered where it fits:
// a token's 64 rows are 128 bytes there (16-byte chunks swizzled by token % 8), so that global stores are whole 128-byte
// lines.
template <class Config, class Output>
DEVICE void store_tile(const Output& p, typename Sums<Config>::Total (&sum)[Config::tile_m / 2], TileTerms<Config>& terms,
                            uint32_t staging, int& turn, int warpgroup, int first_row, int first_token) {
    if (first_row >= p.rows) return;
    constexpr int groups = Config::tile_m / 8, staged = Config::epilogue_tile;
    const int lane = ptx::lane_id(), warp = threadIdx.x / 32 % 4, thread = threadIdx.x % 128;
    // stmatrix: lane i addresses row i % 8 of matrix i / 8, i.e. token (i / 16) * 8 + i % 8, row half i / 8 % 2.
    const int my_token = lane / 16 * 8 + lane % 8, my_chunk = 2 * warp + lane / 8 % 2;
    const uint32_t write = my_token * 128 + ((my_chunk ^ (my_token & 7)) * 16);
    const int token = thread / 8, chunk = thread % 8;
    const uint32_t read = token * 128 + ((chunk ^ (token & 7)) * 16);
    UNROLL for (int first = 0; first < Config::tile_m; first += staged) {
        const uint32_t place = staging + turn * (staged * 128);
        if (Config::epilogue_stages == 2)
            turn ^= 1;
        else
            ptx::bar_sync(2 + warpgroup, 128);  // the buffer has been read
        UNROLL for (int j = first / 8; j < (first + staged) / 8 && j < groups; j += 2) {
            uint32_t out[4] = {0, 0, 0, 0};
            outputs_of_16<Config>(out, sum, terms, j);
            ptx::stmatrix_x4_trans(place + (j * 8 - first) * 128 + write, out);
        }
        // This buffer is written, and thus the other one has been read.
        ptx::bar_sync(2 + warpgroup, 128);
        UNROLL for (int i = 0; i < staged && first + i < Config::tile_m; i += 16)
            if (first + i + token < Config::tile_m)
                store_rows(p, first_row + chunk * 8, first_token + first + i + token, ptx::ld_shared_v4(place + i * 128 + read));
    }
}

// The same with silu: twice as many tokens at a time, 64 bytes each.
template <class Config, class Output>
DEVICE void store_silu_tile(const Output& p, typename Sums<Config>::Total (&sum)[Config::tile_m / 2], TileTerms<Config>& terms,
                         uint32_t staging, int& turn, int warpgroup, int first_row, int first_token) {
    if (first_row >= p.rows) return;
    constexpr int groups = Config::tile_m / 8, staged = 2 * Config::epilogue_tile;
    const int warp = threadIdx.x / 32 % 4, token = threadIdx.x % 128 / 4, chunk = threadIdx.x % 4;
    const uint32_t write = channels_at(ptx::lane_id(), warp);  // stmatrix: lane i addresses token i of four 8 x 8 matrices
    UNROLL for (int first = 0; first < Config::tile_m; first += staged) {
        const uint32_t place = staging + turn * (staged * 64);
        if (Config::epilogue_stages == 2)
            turn ^= 1;
        else
            ptx::bar_sync(2 + warpgroup, 128);
        UNROLL for (int j = first / 8; j < (first + staged) / 8 && j < groups; j += 4) {
            uint32_t out[4] = {0, 0, 0, 0};
            UNROLL for (int i = 0; i < 4 && j + i < groups; i += 2) {
                uint32_t rows[4] = {0, 0, 0, 0};
                outputs_of_16<Config>(rows, sum, terms, j + i);
                out[i] = values::join_pair<gate_of<Config>, bf16_out<Config>>(rows[0], rows[1]);
                out[i + 1] = values::join_pair<gate_of<Config>, bf16_out<Config>>(rows[2], rows[3]);
            }
            ptx::stmatrix_x4_trans(place + (j * 8 - first) * 64 + write, out);
        }
        ptx::bar_sync(2 + warpgroup, 128);
        UNROLL for (int i = 0; i < staged && first + i < Config::tile_m; i += 32)
            if (first + i + token < Config::tile_m)
                store_channels(p, first_row / 2 + chunk * 8, first_token + first + i + token, ptx::ld_shared_v4(place + channels_at(i + token, chunk)));
    }
}

// The same for a whole tile by one TMA store, which overlaps the next tile's main loop and clips what is outside of Y.
template <class Config>
DEVICE void store_tile_by_map(const StoreParams& p, typename Sums<Config>::Total (&sum)[Config::tile_m / 2], TileTerms<Config>& terms,
                                uint32_t staging, int warpgroup, int first_row, int first_token) {
    static_assert(Config::tile_m % 16 == 0, "a store of 16 tokens at a time");
    if (first_row >= p.rows) return;
    const int lane = ptx::lane_id(), warp = threadIdx.x / 32 % 4, thread = threadIdx.x % 128;
    if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();
    ptx::bar_sync(2 + warpgroup, 128);  // the previous TMA store has read the buffer
    const int my_token = lane / 16 * 8 + lane % 8, my_chunk = 2 * warp + lane / 8 % 2;
    const uint32_t write = my_token * 128 + ((my_chunk ^ (my_token & 7)) * 16);
    UNROLL for (int j = 0; j < Config::tile_m / 8; j += 2) {
        uint32_t out[4];
        outputs_of_16<Config>(out, sum, terms, j);
        ptx::stmatrix_x4_trans(staging + j * 8 * 128 + write, out);
    }
    ptx::fence_proxy_async();
    ptx::bar_sync(2 + warpgroup, 128);
    if (thread == 0) {
        ptx::cp_async_bulk_tensor_store_2d(&p.y_map, first_row, first_token, staging);
        ptx::cp_async_bulk_commit_group();
    }
}

DEVICE uint32_t bits_of(float v) { return __float_as_uint(v); }
DEVICE uint32_t bits_of(int32_t v) { return static_cast<uint32_t>(v); }
DEVICE void add_bits(float& sum, uint32_t bits) { sum += __uint_as_float(bits); }
DEVICE void add_bits(int32_t& sum, uint32_t bits) { sum += static_cast<int32_t>(bits); }

// ---- Split-K reduction over warpgroups and CTAs -------------------------------------------------------------------------
// Partial sums move in register order, four per thread at a time, a warpgroup's 128 threads side by side.

template <class Sum, int count>
DEVICE uint4 four_of(const Sum (&sum)[count], int i) {
    uint4 v;
    v.x = bits_of(sum[4 * i]), v.y = bits_of(sum[4 * i + 1]), v.z = bits_of(sum[4 * i + 2]), v.w = bits_of(sum[4 * i + 3]);
    return v;
}
template <class Sum, int count>
DEVICE void add_four(Sum (&sum)[count], int i, uint4 v) {
    add_bits(sum[4 * i], v.x);
    add_bits(sum[4 * i + 1], v.y);
    add_bits(sum[4 * i + 2], v.z);
    add_bits(sum[4 * i + 3], v.w);
}

// Stages a warp's outputs of eight tokens by 16 rows: four sums per lane, rows g and g + 8, two tokens each. Lanes of
// adjacent rows swap a token, so that each word holds two rows of one token. Layout as in store_tile: 128 bytes per token,
// swizzled. i: the group of eight tokens, counted from the first that terms were loaded for.
template <class Config>
DEVICE void stage_four(uint32_t staging, const typename Sums<Config>::Total (&total)[4], TileTerms<Config>& terms, int i) {
    const int lane = ptx::lane_id();
    float value[4];
    UNROLL for (int e = 0; e < 2; e++) {
        const float token_scale = terms.of_token(i, lane % 4 * 2 + e);
        const int token_sum = terms.sum_of_token(i, lane % 4 * 2 + e);
        UNROLL for (int h = 0; h < 2; h++)
            value[2 * h + e] = fmaf(centered<Config>(total[2 * h + e], terms.twice_zero[h], token_sum) * token_scale,
                                    terms.scale[h], terms.bias[h]);
    }
    const auto pair = [](float a, float b) { return bf16_out<Config> ? ptx::cvt_bf16x2_f32(a, b) : ptx::cvt_f16x2_f32(a, b); };
    if constexpr (ends_with_silu<Config>) {  // one channel, two tokens; the neighbour lane has the next channel
        const int g = lane / 4, odd = g & 1, token = i * 8 + lane % 4 * 2 + odd;
        const uint32_t mine = values::silu_mul_pair<bf16_out<Config>>(pair(value[0], value[1]), pair(value[2], value[3]));
        const uint32_t theirs = ptx::shfl_xor(mine, 4), word = odd ? ptx::prmt(theirs, mine, 0x7632) : ptx::prmt(mine, theirs, 0x5410);
        ptx::st_shared_u32(staging + channels_at(token, threadIdx.x / 32 % 4) + (g & ~1) * 2, word);
        return;
    }
    const uint32_t first = pair(value[0], value[2]), second = pair(value[1], value[3]);  // one token each: rows g, g + 8
    const int g = lane / 4, odd = g & 1, token = i * 8 + lane % 4 * 2 + odd;
    const uint32_t theirs = ptx::shfl_xor(odd ? first : second, 4), mine = odd ? second : first;
    const uint32_t low = odd ? theirs : mine, high = odd ? mine : theirs;
    UNROLL for (int h = 0; h < 2; h++) {
        const int chunk = 2 * (threadIdx.x / 32 % 4) + h;
        ptx::st_shared_u32(staging + token * 128 + ((chunk ^ (token & 7)) * 16) + (g & ~1) * 2, ptx::prmt(low, high, h == 0 ? 0x5410 : 0x7632));
    }
}

// Stores the staged outputs to Y as whole lines: in 16-byte pieces qkv at 256 tokens took a microsecond longer.
template <class Config, int most, int threads>
DEVICE void store_lines(const Params& p, uint32_t staging, int thread, int first_row, int first_token, int tokens) {
    if constexpr (ends_with_silu<Config>) {
        UNROLL for (int first = 0; first < most; first += threads / 4)
            if (const int token = first + thread / 4; token < tokens)
                store_channels(p, first_row / 2 + thread % 4 * 8, first_token + token, ptx::ld_shared_v4(staging + channels_at(token, thread % 4)));
        return;
    }
    const int chunk = thread % 8;
    UNROLL for (int first = 0; first < most; first += threads / 8) {
        const int token = first + thread / 8;
        if (token < tokens)
            store_rows(p, first_row + chunk * 8, first_token + token, ptx::ld_shared_v4(staging + token * 128 + ((chunk ^ (token & 7)) * 16)));
    }
}

// Split-K reduction over a cluster's CTAs and their warpgroups, in a fixed order. Each CTA finishes a share of the tokens;
// the others st.async their partial sums of it straight from registers.
template <class Config>
DEVICE void reduce_and_store(const Params& p, typename Sums<Config>::Total (&sum)[Config::tile_m / 2],
                             TileTerms<Config>& terms, uint32_t ring, const RingBarriers& barriers, int warp, int rank,
                             int first_row, int first_token) {
    using Shape = PackedGemmShape<Config>;
    constexpr int k_blocks = Config::cluster_k, k_warpgroups = Config::split_k_warpgroups, fours = Shape::fours;
    const int k_rank = rank % k_blocks, row_rank = rank / k_blocks, thread = threadIdx.x % 128;
    const int warpgroup = warp / 4, row_part = warpgroup % Config::row_warpgroups, k_part = warpgroup / Config::row_warpgroups;
    const uint32_t received = ring + Shape::receive_offset + thread * 16;
    if (k_blocks > 1 && Config::cluster_n == 1) {  // the other CTAs' mbarriers are initialized
        __syncwarp();
        ptx::barrier_cluster_wait();
    }
    typename Sums<Config>::Total mine[4 * fours] = {};
    UNROLL for (int owner = 0; owner < k_blocks; owner++) {
        if (owner == k_rank) {
            UNROLL for (int i = 0; i < 4 * fours; i++)
                if (owner * fours * 4 + i < Config::tile_m / 2) mine[i] = sum[owner * 4 * fours + i];
            continue;
        }
        const int slot = k_rank - (k_rank > owner), to = row_rank * k_blocks + owner;
        const uint32_t there = ptx::mapa(received + (slot * Shape::warpgroups + warpgroup) * fours * 2048, to);
        const uint32_t barrier = ptx::mapa(barriers.received, to);
        UNROLL for (int i = 0; i < fours; i++)
            if (owner * fours + i < Shape::groups) ptx::st_async_v4(there + i * 2048, four_of(sum, owner * fours + i), barrier);
    }
    // Within the CTA each split-K warpgroup finishes some groups; the others put theirs in the drained ring.
    const uint32_t local = ring + row_part * fours * 2048 + thread * 16;
    constexpr uint32_t next = Config::row_warpgroups * fours * 2048;
    if constexpr (k_warpgroups > 1) {
        ptx::bar_sync(1, Shape::warpgroups * 128);
        UNROLL for (int i = 0; i < fours; i++)
            if (i % k_warpgroups != k_part) ptx::st_shared_v4(local + k_part * next + i * 2048, four_of(mine, i));
        ptx::bar_sync(1, Shape::warpgroups * 128);
    }
    if (k_blocks > 1) {
        ptx::mbarrier_wait_parity_acquire_cluster(barriers.received, 0);
        if (Config::cluster_n > 1) {
            __syncwarp();
            ptx::barrier_cluster_arrive();
        }
    }
    const int groups = Shape::groups_of(k_rank);
    // Staging: with split-K warpgroups, the drained ring; else the warpgroup's receive buffer, once it has been read.
    const uint32_t staging = k_warpgroups > 1 ? ring + Shape::share_bytes + row_part * Shape::share * 128
                                              : ring + Shape::receive_offset + warpgroup * fours * 2048;
    UNROLL for (int i = 0; i < fours; i++) {
        if (i % k_warpgroups != k_part || i >= groups) continue;
        typename Sums<Config>::Total total[4] = {0, 0, 0, 0};
        UNROLL for (int source = 0; source < k_blocks; source++)
            UNROLL for (int k = 0; k < k_warpgroups; k++) {
                const int slot = source - (source > k_rank), other = k * Config::row_warpgroups + row_part;
                const uint32_t from = source == k_rank ? local + k * next + i * 2048
                                                       : received + ((slot * Shape::warpgroups + other) * fours + i) * 2048;
                add_four(total, 0, source == k_rank && k == k_part ? four_of(mine, i) : ptx::ld_shared_v4(from));
            }
        if constexpr (k_warpgroups > 1)
            stage_four<Config>(staging, total, terms, i);
        else
            UNROLL for (int e = 0; e < 4; e++) mine[4 * i + e] = total[e];
    }
    if constexpr (k_warpgroups == 1) {
        ptx::bar_sync(2 + warpgroup, 128);
        UNROLL for (int i = 0; i < fours; i++) {
            const typename Sums<Config>::Total total[4] = {mine[4 * i], mine[4 * i + 1], mine[4 * i + 2], mine[4 * i + 3]};
            if (i < groups) stage_four<Config>(staging, total, terms, i);
        }
    }
    ptx::bar_sync(6 + row_part, k_warpgroups * 128);
    store_lines<Config, Shape::share, k_warpgroups * 128>(p, staging, k_part * 128 + thread, first_row, first_token, groups * 8);
}

// Reduces the row tile that two CTAs split along K: each finishes half of the tokens.
template <class Config>
DEVICE void finish_halved_tile(const Params& p, typename Sums<Config>::Total (&sum)[Config::tile_m / 2], TileTerms<Config>& terms,
                             uint32_t ring, const RingBarriers& barriers, int rank, int first_row, int first_token) {
    using Shape = PackedGemmShape<Config>;
    constexpr int fours = Config::tile_m / 16;
    const uint32_t received = ring + Shape::receive_offset + threadIdx.x % 128 * 16;
    __syncwarp();
    ptx::barrier_cluster_wait();  // the other CTA's mbarrier is initialized
    const uint32_t there = ptx::mapa(received, 1 - rank), barrier = ptx::mapa(barriers.received, 1 - rank);
    typename Sums<Config>::Total mine[4 * fours];
    UNROLL for (int i = 0; i < fours; i++) {
        ptx::st_async_v4(there + i * 2048, rank == 0 ? four_of(sum, fours + i) : four_of(sum, i), barrier);
        UNROLL for (int e = 0; e < 4; e++) mine[4 * i + e] = rank == 0 ? sum[4 * i + e] : sum[4 * (fours + i) + e];
    }
    ptx::mbarrier_wait_parity_acquire_cluster(barriers.received, 0);
    UNROLL for (int i = 0; i < fours; i++) add_four(mine, i, ptx::ld_shared_v4(received + i * 2048));  // two summands: any order
    ptx::bar_sync(2 + threadIdx.x / 128, 128);  // the receive buffer has been read
    const uint32_t staging = ring + Shape::receive_offset;
    UNROLL for (int i = 0; i < fours; i++) {
        const typename Sums<Config>::Total total[4] = {mine[4 * i], mine[4 * i + 1], mine[4 * i + 2], mine[4 * i + 3]};
        stage_four<Config>(staging, total, terms, i);
    }
    ptx::bar_sync(2 + threadIdx.x / 128, 128);
    store_lines<Config, fours * 8, 128>(p, staging, threadIdx.x % 128, first_row, first_token, fours * 8);
}

}  // namespace packed

#endif  // ANYBIT_SM90_PACKED_GEMM_EPILOGUE_CUH
