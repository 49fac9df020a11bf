// The two products of a mixture of experts for a few tokens, on the parts of sm90_packed_gemv: digits of activations, int8 MMA.
//
// Weights of all experts are one tall weight, each expert on whole tiles. A slot is a token's j-th choice: token * top + j.
//
// - gate_up: y[slot] = gate(W x). blockIdx.y is a slot. Slots of one expert share weights, tile_m at a time: the first of each
//   tile_m does the work of all, the other blocks end at once.
// - down: y[token] = sum over choices of weight * (W h[slot]). blockIdx.y is tile_m tokens. K runs over the experts that any of
//   them chose, in the order of first choice, and is dealt to the warps of a cluster, whose sums meet by st.async in a fixed
//   order: no atomics. A token that did not choose an expert has digits of zero.
// - Ids out of range are skipped: they add nothing, and their rows of h are neither written nor read.
// - gate_up reads ids after griddepcontrol_wait and triggers down only then, at once or when few copies are left, so that down
//   finds them complete and fills its ring of weights before it waits for h.
#ifndef ANYBIT_SM90_EXPERTS_GEMV_CUH
#define ANYBIT_SM90_EXPERTS_GEMV_CUH

#include "common/gate.cuh"
#include "packed/packed_sums.cuh"
#include "packed/sm90_gemv/sm90_packed_gemv_parts.cuh"

struct ExpertsParams {
    const uint8_t* tiles;        // of all experts
    const float* row_scale;      // [experts * row_tiles * 64]
    const uint8_t* row_zero;     // the same, for asym with per-row scales, else null
    const uint16_t* x;           // gate_up: [tokens, k]; down: h [tokens * top, k]
    const uint16_t* bias;        // [experts, n] or null
    const int32_t* ids;          // [tokens, top], id_words words each, the low one first
    const float* routing;        // [tokens, top], for down
    uint16_t* y;                 // gate_up: h [tokens * top, n / 2]; down: [tokens, n]
    int32_t tokens, top, experts, n, k, x_stride, y_stride, k_blocks, row_tiles, id_words;
};

namespace experts {

// A block's list, in shared memory: how many experts there are; then of each its id, the rows of x of tile_m tokens (-1: none),
// and for each token its routing weight (down) or its slot (gate_up).
template <class C> struct Shape : packed::DigitShape<C> {
    using S = packed::DigitShape<C>;
    static constexpr int share = (C::tile_m * S::rows / 4 + C::cluster - 1) / C::cluster;  // quads of sums that a block finishes
    static constexpr int received = S::factors + C::places * S::rows * 8, barriers = received + (C::cluster - 1) * share * 16;
    static constexpr int sum_barrier = barriers + C::warps * C::stages * 8, list = sum_barrier + 8;
    static constexpr int entry = 4 + C::tile_m * 8, bytes = list + 4 + C::places * entry;
    static DEVICE uint32_t expert(uint32_t shared, int place) { return shared + list + 4 + place * entry; }
    static DEVICE uint32_t row(uint32_t shared, int place, int token) { return expert(shared, place) + 4 + token * 4; }
    static DEVICE uint32_t weight(uint32_t shared, int place, int token) { return expert(shared, place) + 4 + (C::tile_m + token) * 4; }
};

DEVICE int id_of(const ExpertsParams& p, int slot) { return static_cast<int>(ptx::ld_global_cg_u32(p.ids + slot * p.id_words)); }
DEVICE bool exists(const ExpertsParams& p, int id) { return static_cast<uint32_t>(id) < static_cast<uint32_t>(p.experts); }

// One warp: the slots from blockIdx.y on that chose its expert, up to tile_m; none if an earlier block takes this slot.
template <class C> DEVICE void list_slots(const ExpertsParams& p, uint32_t shared, int lane) {
    using S = Shape<C>;
    const int slot = static_cast<int>(blockIdx.y), slots = p.tokens * p.top, id = id_of(p, slot);
    int before = 0, found = 0;
    if (lane < C::tile_m) ptx::st_shared_u32(S::row(shared, 0, lane), ~0u);
    __syncwarp();
    const auto put = [&](int place, int one) {
        ptx::st_shared_u32(S::row(shared, 0, place), one / p.top);
        ptx::st_shared_u32(S::weight(shared, 0, place), one);
    };
    if constexpr (C::tile_m == 1) {
        if (lane == 0) put(0, slot);
    } else {
        for (int from = 0; from < slots && found < C::tile_m; from += 32) {
            const uint32_t same = __ballot_sync(~0u, from + lane < slots && id_of(p, from + lane < slots ? from + lane : slot) == id);
            const int here = slot - from;
            const uint32_t earlier = here >= 32 ? ~0u : here <= 0 ? 0 : (1u << here) - 1, rest = same & ~earlier;
            before += __popc(same & earlier);
            const int place = found + __popc(rest & ((1u << lane) - 1));
            if ((rest >> lane & 1) && place < C::tile_m) put(place, from + lane);
            found += __popc(rest);
        }
    }
    if (lane == 0) {
        ptx::st_shared_u32(S::expert(shared, 0), id);
        ptx::st_shared_u32(shared + S::list, exists(p, id) && before % C::tile_m == 0);
    }
}

// One warp: the experts that tile_m tokens chose, and who chose them with what weights, of which those of one token are summed.
template <class C> DEVICE void list_experts(const ExpertsParams& p, uint32_t shared, int lane) {
    using S = Shape<C>;
    const int token = lane / p.top, first = static_cast<int>(blockIdx.y) * C::tile_m * p.top, slot = first + lane;
    const bool any = token < C::tile_m && slot < p.tokens * p.top;
    const int id = any ? id_of(p, slot) : -1;
    const bool valid = any && exists(p, id);
    const float weight = valid ? __uint_as_float(ptx::ld_global_cg_u32(p.routing + slot)) : 0.0f;
    for (int i = lane; i < C::places * C::tile_m; i += 32) {
        ptx::st_shared_u32(S::row(shared, i / C::tile_m, i % C::tile_m), ~0u);
        ptx::st_shared_u32(S::weight(shared, i / C::tile_m, i % C::tile_m), 0);
    }
    __syncwarp();
    uint32_t same = 0, own = 0;
    float sum = 0;
    for (int i = 0; i < C::places; i++) {
        const bool equal = ptx::shfl(id, i) == id;
        const float other = ptx::shfl(weight, i);
        if (!equal) continue;
        same |= 1u << i;
        if (i / p.top == token) own |= 1u << i, sum += other;
    }
    const uint32_t leaders = __ballot_sync(~0u, valid && __ffs(same) - 1 == lane);
    const int place = __popc(leaders & ((1u << (__ffs(same) - 1 & 31)) - 1));
    if (valid && __ffs(same) - 1 == lane) ptx::st_shared_u32(S::expert(shared, place), id);
    if (valid && __ffs(own) - 1 == lane) {
        ptx::st_shared_u32(S::row(shared, place, token), slot);
        ptx::st_shared_f32(S::weight(shared, place, token), sum);
    }
    if (lane == 0) ptx::st_shared_u32(shared + S::list, __popc(leaders));
}

// A k block of an expert of the list; a warp's next one.
struct At {
    int place, k_block;
    DEVICE void move(int blocks, int k_blocks) {
        for (k_block += blocks; k_block >= k_blocks; k_block -= k_blocks) place++;
    }
};

template <class C> DEVICE void multiply(const ExpertsParams& p) {
    using S = Shape<C>;
    static_assert(C::threads == C::warps * 32 && C::shared_bytes >= S::bytes, "the twin counts otherwise");
    constexpr bool bf16 = C::operand == Operand::bf16;
    const uint32_t lane = ptx::lane_id();
    const int warp = static_cast<int>(ptx::warp_id());
    const uint32_t shared = ptx::shared_address(ptx::dynamic_shared()), ring = shared + warp * S::ring_bytes;
    const uint32_t slots = shared + S::slots + warp * (C::x_stages * S::slot_bytes), barriers = shared + S::barriers + warp * (C::stages * 8);

    // Units of 16 rows of each expert are split evenly over the clusters; k blocks go round-robin to the warps of a cluster.
    const uint32_t row_units = static_cast<uint32_t>(p.row_tiles) * 4, owner = blockIdx.x / C::cluster, owners = gridDim.x / C::cluster;
    const int rank = static_cast<int>(blockIdx.x % C::cluster), first = static_cast<int>(owner * row_units / owners);
    const int mine = static_cast<int>((owner + 1) * row_units / owners) - first, quads = C::tile_m * mine * 4;
    const int chunks = (mine + C::stage_units - 1) / C::stage_units;

    if (lane == 0) {
        UNROLL for (int i = 0; i < C::stages; i++) ptx::mbarrier_init(barriers + i * 8, 1);
        if (C::cluster > 1 && warp == 0) {
            ptx::mbarrier_init(shared + S::sum_barrier, 1);
            const int finishes = (quads - rank + C::cluster - 1) / C::cluster;
            ptx::mbarrier_arrive_expect_tx(shared + S::sum_barrier, static_cast<uint32_t>((C::cluster - 1) * finishes * 16));
        }
        ptx::fence_mbarrier_init();
    }
    if constexpr (C::cluster > 1) {
        __syncwarp();
        ptx::barrier_cluster_arrive();
    }
    if constexpr (!C::down) ptx::griddepcontrol_wait();
    if constexpr (C::trigger == 0) ptx::griddepcontrol_launch_dependents();
    if (warp == 0) {
        if constexpr (C::down) list_experts<C>(p, shared, static_cast<int>(lane));
        else list_slots<C>(p, shared, static_cast<int>(lane));
    }
    __syncthreads();
    const int count = static_cast<int>(ptx::ld_shared_u32(shared + S::list));
    if constexpr (!C::down)
        if (count == 0) return;

    constexpr int dealt = C::cluster * C::warps;
    const int all = count * p.k_blocks, begin = rank * C::warps + warp, rounds = all > begin ? (all - begin + dealt - 1) / dealt : 0;

    At ahead{0, 0}, x_ahead{0, 0}, now{0, 0};
    ahead.move(begin, p.k_blocks), x_ahead.move(begin, p.k_blocks), now.move(begin, p.k_blocks);
    uint32_t there[C::x_stages];
    const auto load = [&](packed::Incoming<C>& incoming, uint32_t& tokens) {
        tokens = 0;
        UNROLL for (int token = 0; token < C::tile_m; token++) {
            const int row = static_cast<int>(ptx::ld_shared_u32(S::row(shared, x_ahead.place, token)));
            incoming.pairs[token][0] = incoming.pairs[token][1] = 0;
            if (row < 0) continue;
            tokens |= 1u << token;
            incoming.load_row(token, p.x + static_cast<size_t>(row) * p.x_stride, p.k, nullptr, x_ahead.k_block, lane);
        }
        x_ahead.move(dealt, p.k_blocks);
    };
    packed::Incoming<C> incoming[C::x_stages];
    const auto load_first = [&]() {
        UNROLL for (int i = 0; i < C::x_stages; i++)
            if (i < rounds) load(incoming[i], there[i]);
    };
    if constexpr (!C::down) load_first();  // ahead of the weights

    const uint64_t policy = ptx::createpolicy_evict_first();
    int left = rounds * chunks, chunk_ahead = 0;
    uint32_t ahead_slot = 0;
    const auto fetch = [&]() {
        if (lane == 0) {
            const int from = chunk_ahead * C::stage_units;
            const uint32_t bytes = static_cast<uint32_t>(mine - from < C::stage_units ? mine - from : C::stage_units) * S::unit_size;
            const uint32_t expert = ptx::ld_shared_u32(S::expert(shared, ahead.place)), barrier = barriers + ahead_slot * 8;
            const size_t unit = (static_cast<size_t>(ahead.k_block) * p.experts + expert) * row_units + first + from;
            ptx::mbarrier_arrive_expect_tx(barrier, bytes);
            ptx::cp_async_bulk_load_hint(ring + ahead_slot * S::stage_bytes, p.tiles + unit * S::unit_size, bytes, barrier, policy);
        }
        if (++chunk_ahead == chunks) chunk_ahead = 0, ahead.move(dealt, p.k_blocks);
        ahead_slot = ahead_slot + 1 == C::stages ? 0 : ahead_slot + 1;
        left--;
    };
    for (int i = 0; i < C::stages && left > 0; i++) fetch();
    if (C::trigger > 0 && left < C::trigger) ptx::griddepcontrol_launch_dependents();
    // Scale and bias of each row of each expert: loaded before x is needed, stored after.
    constexpr int each = (C::places * S::rows + C::threads - 1) / C::threads;
    float2 factor[each];
    UNROLL for (int j = 0; j < each; j++) {
        const int i = j * C::threads + static_cast<int>(threadIdx.x), n = first * 16 + i % S::rows, rows = p.row_tiles * 64;
        factor[j] = make_float2(0.0f, 0.0f);
        if (i >= count * S::rows || n >= rows) continue;
        const size_t expert = ptx::ld_shared_u32(S::expert(shared, i / S::rows));
        factor[j].x = p.row_scale[expert * rows + n];
        if constexpr (S::floats) factor[j].x *= packed::scale_of_pair<C::code, false>;
        if (p.bias != nullptr && n < p.n) factor[j].y = values::low_float<bf16>(p.bias[expert * p.n + n]);
    }
    const auto store_factors = [&]() {
        UNROLL for (int j = 0; j < each; j++) {
            const int i = j * C::threads + static_cast<int>(threadIdx.x);
            if (i < count * S::rows) ptx::st_shared_v2(shared + S::factors + i * 8, {__float_as_uint(factor[j].x), __float_as_uint(factor[j].y)});
        }
    };
    if constexpr (C::down) {
        store_factors();
        __syncthreads();
        ptx::griddepcontrol_wait();
        load_first();
    }
    UNROLL for (int i = 0; i < C::x_stages; i++)
        if (i < rounds) incoming[i].store(slots + i * S::slot_bytes, lane, there[i]);
    if constexpr (!C::down) store_factors();
    packed::Incoming<C> next;  // loaded a round before it is stored
    uint32_t next_there = 0;
    if constexpr (!C::x_resident)
        if (C::x_stages < rounds) load(next, next_there);
    __syncwarp();

    packed::ByteTable<C::code> table;
    table.load();
    float sums[S::units][S::token_tiles][2];
    UNROLL for (int u = 0; u < S::units; u++)
        UNROLL for (int n = 0; n < S::token_tiles; n++) sums[u][n][0] = sums[u][n][1] = 0;

    uint32_t x_slot = 0, stage = 0, phase = 0;
    for (int i = 0; i < rounds; i++) {
        typename packed::Choose<S::floats, packed::FloatProduct<C>, packed::DigitProduct<C>>::type product;
        product.take(slots + x_slot * S::slot_bytes, lane);
        float weight[S::token_tiles];  // of this lane's tokens
        if constexpr (C::down)
            UNROLL for (int n = 0; n < S::token_tiles; n++) {
                const uint32_t column = S::floats ? (lane & 3) * 2 + n : n * 8 + (lane & 3) * 2;
                weight[n] = ptx::ld_shared_f32(S::weight(shared, now.place, S::floats ? column % S::wide % C::tile_m : column / S::columns % C::tile_m));
            }
        packed::unroll<0, C::chunks>([&](auto which) {
            constexpr int chunk = decltype(which)::value;
            if (C::chunks == 1 || chunk < chunks) {
                ptx::mbarrier_wait_parity(barriers + stage * 8, phase);
                const uint32_t from = ring + stage * S::stage_bytes;
                UNROLL for (int u = 0; u < C::stage_units; u++) {  // stale past the last row: never stored
                    constexpr int from_unit = chunk * C::stage_units;
                    uint32_t zeros = 0;
                    if constexpr (C::code == Code::asym && S::whole_rows) {
                        const uint32_t expert = ptx::ld_shared_u32(S::expert(shared, now.place));
                        const size_t row = (static_cast<size_t>(expert) * row_units + first + from_unit + u) * 16 + (lane >> 2);
                        zeros = from_unit + u < mine ? p.row_zero[row] | p.row_zero[row + 8] << 8 : 0;
                    }
                    if constexpr (C::down) {
                        float part[S::token_tiles][2] = {};
                        product.add(part, from + u * S::unit_size, lane, zeros, table);
                        const uint32_t factors = shared + S::factors + (now.place * S::rows + (from_unit + u) * 16 + (lane >> 2)) * 8;
                        UNROLL for (int r = 0; r < 2; r++) {
                            const float factor = ptx::ld_shared_f32(factors + r * 64);
                            UNROLL for (int n = 0; n < S::token_tiles; n++)
                                sums[from_unit + u][n][r] = fmaf(factor * weight[n], part[n][r], sums[from_unit + u][n][r]);
                        }
                    } else {
                        product.add(sums[from_unit + u], from + u * S::unit_size, lane, zeros, table);
                    }
                }
                __syncwarp();
                if (left > 0) fetch();
                if (C::trigger > 0 && left == C::trigger - 1) ptx::griddepcontrol_launch_dependents();
                if (++stage == C::stages) stage = 0, phase ^= 1;
            }
        });
        now.move(dealt, p.k_blocks);
        if constexpr (!C::x_resident) {
            if (i + C::x_stages < rounds) {
                __syncwarp();
                next.store(slots + x_slot * S::slot_bytes, lane, next_there);
                __syncwarp();
                if (i + C::x_stages + 1 < rounds) load(next, next_there);
            }
        }
        if (++x_slot == C::x_stages) x_slot = 0;
    }

    packed::store_sums<C>(sums, ring, lane);  // over each warp's drained ring
    __syncthreads();
    if constexpr (C::down) {
        // A quad is four rows of a token. Each block of a cluster finishes every cluster-th, and sends its sums of the others.
        const auto sum_of = [&](int quad, float (&sum)[4]) {
            const uint32_t at = shared + (quad / (mine * 4) * S::rows + quad % (mine * 4) * 4) * 4;
            UNROLL for (int w = 0; w < C::warps; w++) packed::add_quad(sum, at + w * S::ring_bytes);
        };
        if constexpr (C::cluster > 1) {
            ptx::barrier_cluster_wait();  // the other blocks run and their barriers are initialized
            for (int i = static_cast<int>(threadIdx.x); i < quads; i += C::threads) {
                const int other = i % C::cluster;
                if (other == rank) continue;
                float sum[4] = {};
                sum_of(i, sum);
                const uint32_t place = static_cast<uint32_t>((rank > other ? rank - 1 : rank) * S::share + i / C::cluster);
                ptx::st_async_v4(ptx::mapa(shared + S::received, other) + place * 16, packed::bits_of(sum), ptx::mapa(shared + S::sum_barrier, other));
            }
        }
        for (int i = rank + static_cast<int>(threadIdx.x) * C::cluster; i < quads; i += C::threads * C::cluster) {
            float sum[4] = {};
            sum_of(i, sum);
            if constexpr (C::cluster > 1) {
                ptx::mbarrier_wait_parity_acquire_cluster(shared + S::sum_barrier, 0);
                UNROLL for (int other = 0; other < C::cluster - 1; other++)
                    packed::add_quad(sum, shared + S::received + (other * S::share + i / C::cluster) * 16);
            }
            const int mine_token = i / (mine * 4), token = static_cast<int>(blockIdx.y) * C::tile_m + mine_token, row = i % (mine * 4) * 4;
            if (token >= p.tokens) continue;
            UNROLL for (int e = 0; e < 4; e++) {
                if (p.bias != nullptr)
                    for (int place = 0; place < count; place++) {
                        const float bias = ptx::ld_shared_f32(shared + S::factors + (place * S::rows + row + e) * 8 + 4);
                        sum[e] = fmaf(ptx::ld_shared_f32(S::weight(shared, place, mine_token)), bias, sum[e]);
                    }
                const int n = first * 16 + row + e;
                if (n < p.n) p.y[static_cast<size_t>(token) * p.y_stride + n] = bf16 ? ptx::cvt_bf16_f32(sum[e]) : ptx::cvt_f16_f32(sum[e]);
            }
        }
    } else {  // a unit's rows: eight of gate, eight of up
        const auto result = [&](int token, int row) {
            float v = 0;
            UNROLL for (int w = 0; w < C::warps; w++) v += ptx::ld_shared_f32(shared + w * S::ring_bytes + (token * S::rows + row) * 4);
            const uint2 factor = ptx::ld_shared_v2(shared + S::factors + row * 8);
            v = fmaf(v, __uint_as_float(factor.x), __uint_as_float(factor.y));
            return bf16 ? ptx::cvt_bf16_f32(v) : ptx::cvt_f16_f32(v);
        };
        constexpr int half = S::rows / 2;
        for (int i = static_cast<int>(threadIdx.x); i < half * C::tile_m; i += C::threads) {
            const int token = i / half, place = i % half, row = place / 8 * 16 + place % 8;
            if (static_cast<int>(ptx::ld_shared_u32(S::row(shared, 0, token))) < 0 || row >= mine * 16 || first * 16 + row + 8 >= p.n) continue;
            const size_t slot = ptx::ld_shared_u32(S::weight(shared, 0, token));
            p.y[slot * p.y_stride + first * 8 + place] = values::join<C::gate, bf16>(result(token, row), result(token, row + 8));
        }
    }
}

}  // namespace experts

template <class C> __global__ void __launch_bounds__(C::threads, C::min_blocks_per_sm) sm90_experts_gate_up(const __grid_constant__ ExpertsParams p) {
    experts::multiply<C>(p);
}
template <class C> __global__ void __launch_bounds__(C::threads, C::min_blocks_per_sm) sm90_experts_down(const __grid_constant__ ExpertsParams p) {
    experts::multiply<C>(p);
}

#endif  // ANYBIT_SM90_EXPERTS_GEMV_CUH
