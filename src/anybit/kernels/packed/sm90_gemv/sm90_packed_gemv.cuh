// GEMV-like y = x W^T, M up to 4, 16-bit activations, packed weights of 1 to 8 bits, on int8 MMA where possible.
//
// Once weights stream in, unpacking codes is the limit. An int8 MMA takes four codes per register where a
// 16-bit one takes two, and codes need no shift: a byte with code u at bit a is the number u * 2^a, so the activation that
// meets it is multiplied by 2^(top - a) instead, once.
//
// - Each k block of a token becomes fixed point (14 bits and sign), pre-shifted for its code's bit position, and is
//   split into signed base-256 digits: two or four columns (N) of the MMA. Implied zero points enter as the initial
//   accumulator of a token's first column.
// - Tables of non-integer values are multiplied as fp16 instead.
// - A CTA owns whole units of 16 rows; its warps split K and reduce once, in shared memory, in a fixed order. The CTAs of a
//   cluster may split K over the same rows: long rows are converted once less often, and units spread more evenly. The
//   first then finishes the sums; the others send it theirs by st.async.
// - Each warp has its own ring of bulk copies of weights, filled before griddepcontrol.wait.
#ifndef ANYBIT_SM90_PACKED_GEMV_CUH
#define ANYBIT_SM90_PACKED_GEMV_CUH

#include "packed/sm90_gemv/sm90_packed_gemv_parts.cuh"

namespace packed {

// Shared memory. Of the x_stages blocks of activations that a warp has at hand, a few are all digits; of many one is, and the
// others are as they were until their turn, which other warps' products hide. Sums of the cluster's other CTAs come last.
template <class C> struct GemvShape : DigitShape<C> {
    using S = DigitShape<C>;
    static constexpr bool at_once = C::x_resident && C::x_stages <= 4;
    static constexpr int kept = at_once ? 0 : C::x_stages - 1, kept_bytes = C::tile_m * 256;
    static constexpr int x_bytes = (at_once ? C::x_stages : 1) * S::slot_bytes + kept * kept_bytes;
    static constexpr int factors = S::slots + C::warps * x_bytes, barriers = factors + S::rows * 8, ends = barriers + C::warps * C::stages * 8;
    static constexpr int sum_bytes = C::tile_m * S::rows * 4, sum_barrier = ends, received = sum_barrier + 8;
    static constexpr int bytes = C::cluster_k > 1 ? received + (C::cluster_k - 1) * sum_bytes : ends;
};

// Keeps activations as they were loaded in shared memory, and recalls them dealt.
template <class C> DEVICE void keep(const Incoming<C>& x, uint32_t at, uint32_t lane) {
    UNROLL for (int token = 0; token < C::tile_m; token++)
        ptx::st_shared_v2(at + token * 256 + lane * 8, {x.pairs[token][0], x.pairs[token][1]});
}
template <class C> DEVICE void recall(Incoming<C>& x, uint32_t at, uint32_t lane) {
    int column[2] = {static_cast<int>(lane) * 4, static_cast<int>(lane) * 4 + 2};
    if constexpr (!C::gather) Incoming<C>::columns(column, lane);
    UNROLL for (int token = 0; token < C::tile_m; token++)
        UNROLL for (int h = 0; h < 2; h++) x.pairs[token][h] = ptx::ld_shared_u32(at + token * 256 + column[h] * 2);
}

// RMSNorm of x + residual on activations in registers, rounded where the model rounds. Uses all warps' `slots` as scratch:
// they are free before and after.
template <class C>
DEVICE void normalize(const NormParams& p, Incoming<C> (&incoming)[C::x_stages], const uint2 (&gamma)[C::x_stages],
                                          int rounds, int warp, uint32_t slots, uint32_t lane) {
    using S = GemvShape<C>;
    static_assert(C::x_resident && !C::gather && C::cluster_k == 1, "a norm needs whole rows at hand");
    constexpr bool bf16 = C::operand == Operand::bf16;
    const auto column = [&](int i) { return (warp + i * C::warps) * 128 + static_cast<int>(lane) * 4; };
    const auto there = [&](int i) { return i < rounds && (!C::ragged || column(i) < p.k); };
    if (p.residual != nullptr) {
        uint2 other[C::x_stages][C::tile_m];
        UNROLL for (int i = 0; i < C::x_stages; i++)
            UNROLL for (int token = 0; token < C::tile_m; token++)
                other[i][token] = there(i) && token < p.m
                    ? ptx::ld_global_cg_v2(p.residual + static_cast<size_t>(token) * p.residual_stride + column(i)) : make_uint2(0, 0);
        UNROLL for (int i = 0; i < C::x_stages; i++)
            UNROLL for (int token = 0; token < C::tile_m; token++) {
                if (!there(i) || token >= p.m) continue;
                uint32_t (&pair)[2] = incoming[i].pairs[token];
                pair[0] = values::add_pair<bf16>(pair[0], other[i][token].x), pair[1] = values::add_pair<bf16>(pair[1], other[i][token].y);
                if (blockIdx.x == 0)
                    *reinterpret_cast<uint2*>(p.residual_sum + static_cast<size_t>(token) * p.k + column(i)) = make_uint2(pair[0], pair[1]);
            }
    }
    UNROLL for (int token = 0; token < C::tile_m; token++) {
        float squares = 0.0f;
        UNROLL for (int i = 0; i < C::x_stages; i++)
            UNROLL for (int h = 0; h < 2; h++) {
                if (i >= rounds) continue;
                const float low = values::low_float<bf16>(incoming[i].pairs[token][h]), high = values::high_float<bf16>(incoming[i].pairs[token][h]);
                squares = fmaf(low, low, fmaf(high, high, squares));
            }
        squares = values::Sum::over_warp(squares);
        if (lane == 0) ptx::st_shared_f32(slots + warp * S::x_bytes + token * 4, squares);
    }
    __syncthreads();
    float factor[C::tile_m];
    UNROLL for (int token = 0; token < C::tile_m; token++) {
        const float mine = lane < C::warps ? ptx::ld_shared_f32(slots + lane * S::x_bytes + token * 4) : 0.0f;
        factor[token] = rsqrtf(fmaf(values::Sum::over_warp(mine), p.part, p.epsilon));
    }
    __syncthreads();
    UNROLL for (int i = 0; i < C::x_stages; i++)
        UNROLL for (int token = 0; token < C::tile_m; token++) {
            uint32_t (&pair)[2] = incoming[i].pairs[token];
            pair[0] = values::normalize_pair<bf16>(pair[0], gamma[i].x, factor[token]);
            pair[1] = values::normalize_pair<bf16>(pair[1], gamma[i].y, factor[token]);
        }
}

// Rotary epilogue: each thread rotates `turns` pairs of outputs, rows r and r + 8 of a unit, and stores them.
template <class C, class P> struct Rotary {
    using S = DigitShape<C>;
    static constexpr int half = S::rows / 2, turns = (half * C::tile_m + C::threads - 1) / C::threads;
    static constexpr bool bf16 = C::operand == Operand::bf16;
    float cosine[turns][2], sine[turns][2];
    int sequence[turns], slot[turns];  // slot -1: nothing to do

    // Output row of pair i's first element.
    static DEVICE int output(int i, int first) { return (first + i % half / 8) * 16 + i % 8; }

    DEVICE void load(const P& p, int first, int mine) {
        UNROLL for (int turn = 0; turn < turns; turn++) {
            const int i = turn * C::threads + static_cast<int>(threadIdx.x), token = i / half, n = output(i, first);
            const int head = n / p.head_dim, c = n % p.head_dim / 16 * 8 + n % 8;
            sequence[turn] = slot[turn] = -1;
            if (token >= C::tile_m || token >= p.m || i % half / 8 >= mine || n + 8 >= p.n) continue;
            if (head < p.query_heads + p.key_heads) {
                UNROLL for (int h = 0; h < 2; h++) {
                    cosine[turn][h] = values::low_float<bf16>(p.cosine_of(token, c, h));
                    sine[turn][h] = values::low_float<bf16>(p.sine_of(token, c, h));
                }
            }
            slot[turn] = 0;
            if (head >= p.query_heads) p.place(token, sequence[turn], slot[turn]);
        }
    }

    template <class Result> DEVICE void store(const P& p, int first, Result&& result) const {
        UNROLL for (int turn = 0; turn < turns; turn++) {
            if (slot[turn] < 0) continue;
            const int i = turn * C::threads + static_cast<int>(threadIdx.x), token = i / half, n = output(i, first);
            const int row = i % half / 8 * 16 + i % 8, head = n / p.head_dim;
            const bool query = head < p.query_heads, value = head >= p.query_heads + p.key_heads;
            uint16_t y[2] = {result(token, row), result(token, row + 8)};
            int c[2] = {n % p.head_dim, n % p.head_dim + 8};
            if (!value) {
                const float low = values::low_float<bf16>(y[0]), high = values::low_float<bf16>(y[1]);
                const float turned[2] = {low * cosine[turn][0] - high * sine[turn][0], high * cosine[turn][1] + low * sine[turn][1]};
                c[0] = c[0] / 16 * 8 + n % 8, c[1] = c[0] + p.head_dim / 2;
                UNROLL for (int h = 0; h < 2; h++) y[h] = bf16 ? ptx::cvt_bf16_f32(turned[h]) : ptx::cvt_f16_f32(turned[h]);
            }
            if (query) {
                uint16_t* at = p.y + (static_cast<size_t>(token) * p.query_heads + head) * p.head_dim;
                at[c[0]] = y[0], at[c[1]] = y[1];
            } else {
                p.store(head - p.query_heads - (value ? p.key_heads : 0), value, sequence[turn], slot[turn], c, y);
            }
        }
    }
};

template <class C, class P, bool silu> DEVICE void multiply_digits(const P& p) {
    using S = GemvShape<C>;
    constexpr bool norm = !same<P, Params>, rotates = norm && !same<P, NormParams>;
    static_assert(C::threads == C::warps * 32 && C::shared_bytes >= S::bytes, "the twin counts otherwise");

    if constexpr (C::trigger == 0) ptx::griddepcontrol_launch_dependents();
    const uint32_t lane = ptx::lane_id();
    const int warp = static_cast<int>(ptx::warp_id());
    const uint32_t shared = ptx::shared_address(ptx::dynamic_shared()), ring = shared + warp * S::ring_bytes;
    const uint32_t slot = shared + S::slots + warp * S::x_bytes, kept = slot + S::slot_bytes, barriers = shared + S::barriers + warp * (C::stages * 8);

    // Units of 16 rows are split evenly over the clusters; k blocks go to all of a cluster's warps round-robin.
    const int rank = C::cluster_k > 1 ? static_cast<int>(blockIdx.x % C::cluster_k) : 0;
    const uint32_t row_units = static_cast<uint32_t>(p.row_tiles) * 4, owner = blockIdx.x / C::cluster_k, owners = gridDim.x / C::cluster_k;
    const int first = static_cast<int>(owner * row_units / owners);
    const int mine = static_cast<int>((owner + 1) * row_units / owners) - first;
    const int chunks = (mine + C::stage_units - 1) / C::stage_units;
    constexpr int dealt = C::cluster_k * C::warps;
    const int first_block = rank * C::warps + warp;
    const int rounds = p.k_blocks > first_block ? (p.k_blocks - first_block + dealt - 1) / dealt : 0;

    if (lane == 0) {
        UNROLL for (int i = 0; i < C::stages; i++) ptx::mbarrier_init(barriers + i * 8, 1);
        if (C::cluster_k > 1 && warp == 0) {
            ptx::mbarrier_init(shared + S::sum_barrier, 1);
            ptx::mbarrier_arrive_expect_tx(shared + S::sum_barrier, static_cast<uint32_t>((C::cluster_k - 1) * C::tile_m * mine * 64));
        }
        ptx::fence_mbarrier_init();
    }
    __syncwarp();
    if constexpr (C::cluster_k > 1) ptx::barrier_cluster_arrive_relaxed();

    const uint64_t policy = ptx::createpolicy_evict_first();
    // Step i of a warp is chunk i % chunks of its k block first_block + dealt * (i / chunks).
    const uint32_t last_bytes = static_cast<uint32_t>(mine - (chunks - 1) * C::stage_units) * S::unit_size;
    const size_t wrap = static_cast<size_t>(dealt) * row_units * S::unit_size - static_cast<size_t>(chunks - 1) * S::stage_bytes;
    const uint8_t* ahead = p.tiles + (static_cast<size_t>(first_block) * row_units + first) * S::unit_size;
    int left = rounds * chunks, chunks_ahead = chunks;
    uint32_t ahead_slot = 0;
    const auto fetch = [&]() {
        const bool last = chunks_ahead == 1;
        if (lane == 0) {
            const uint32_t bytes = last ? last_bytes : static_cast<uint32_t>(S::stage_bytes), barrier = barriers + ahead_slot * 8;
            ptx::mbarrier_arrive_expect_tx(barrier, bytes);
            ptx::cp_async_bulk_load_hint(ring + ahead_slot * S::stage_bytes, ahead, bytes, barrier, policy);
        }
        ahead += last ? wrap : S::stage_bytes;
        chunks_ahead = last ? chunks : chunks_ahead - 1;
        ahead_slot = ahead_slot + 1 == C::stages ? 0 : ahead_slot + 1;
        left--;
    };
    for (int i = 0; i < C::prologue_stages && left > 0; i++) fetch();
    // Further copies are issued as earlier ones land, so that activations don't queue behind weights.
    for (int i = 0; i < C::stages - C::prologue_stages && left > 0; i++) {
        ptx::mbarrier_wait_parity(barriers + i * 8, 0);
        fetch();
    }
    for (int i = static_cast<int>(threadIdx.x); i < S::rows; i += C::threads) {
        float2 row = row_factors<C::operand == Operand::f16>(p, first * 16 + i);
        if constexpr (S::floats) row.x *= scale_of_pair<C::code, false>;
        ptx::st_shared_v2(shared + S::factors + i * 8, {__float_as_uint(row.x), __float_as_uint(row.y)});
    }
    uint2 gamma[C::x_stages];
    if constexpr (norm) {
        UNROLL for (int i = 0; i < C::x_stages; i++) {
            const int column = (warp + i * C::warps) * 128 + static_cast<int>(lane) * 4;
            gamma[i] = i < rounds && (!C::ragged || column < p.k) ? ptx::ld_global_cg_v2(p.gamma + column) : make_uint2(0, 0);
        }
    }
    ptx::griddepcontrol_wait();
    Rotary<C, P> rotary;
    if constexpr (rotates) rotary.load(p, first, mine);

    {
        Incoming<C> incoming[C::x_stages];  // issue all loads before the first conversion
        UNROLL for (int i = 0; i < C::x_stages; i++)
            if (i < rounds) incoming[i].load(p, first_block + i * dealt, lane);
        if constexpr (norm) normalize<C>(p, incoming, gamma, rounds, warp, shared + S::slots, lane);
        UNROLL for (int i = 0; i < C::x_stages; i++) {
            if (i >= rounds) continue;
            if (S::at_once || i == 0) incoming[i].store(slot + i * S::slot_bytes, lane);
            else keep<C>(incoming[i], kept + (i - 1) * S::kept_bytes, lane);
        }
    }
    __syncwarp();

    ByteTable<C::code> table;
    table.load();
    float sums[S::units][S::token_tiles][2];
    UNROLL for (int u = 0; u < S::units; u++)
        UNROLL for (int n = 0; n < S::token_tiles; n++) sums[u][n][0] = sums[u][n][1] = 0;

    uint32_t next = kept, stage = 0, phase = 0;  // next: the block after this round's
    for (int i = 0; i < rounds; i++) {
        typename Choose<S::floats, FloatProduct<C>, DigitProduct<C>>::type product;
        product.take(slot + (S::at_once ? i * S::slot_bytes : 0), lane);
        if constexpr (!S::at_once) __syncwarp();
        if constexpr (S::kept > 0) {  // other warps multiply meanwhile
            if (i + 1 < rounds) {
                Incoming<C> coming;
                recall<C>(coming, next, lane);
                coming.convert(slot, lane);
            }
        }
        Incoming<C> incoming;
        if constexpr (!C::x_resident)
            if (i + C::x_stages < rounds) incoming.load(p, first_block + (i + C::x_stages) * dealt, lane);
        unroll<0, C::chunks>([&](auto which) {
            constexpr int chunk = decltype(which)::value;
            if (C::chunks == 1 || chunk < chunks) {
                ptx::mbarrier_wait_parity(barriers + stage * 8, phase);
                const uint32_t from = ring + stage * S::stage_bytes;
                UNROLL for (int u = 0; u < C::stage_units; u++) {  // stale past the last row: never stored
                    uint32_t zeros = 0;
                    if constexpr (C::code == Code::asym && S::whole_rows) {
                        const int row = (first + chunk * C::stage_units + u) * 16 + static_cast<int>(lane >> 2);
                        zeros = chunk * C::stage_units + u < mine ? p.row_zero[row] | p.row_zero[row + 8] << 8 : 0;
                    }
                    product.add(sums[chunk * C::stage_units + u], from + u * S::unit_size, lane, zeros, table);
                }
                __syncwarp();
                if (left > 0) fetch();
                if (C::trigger > 0 && left == C::trigger - 1) ptx::griddepcontrol_launch_dependents();
                if (++stage == C::stages) stage = 0, phase ^= 1;
            }
        });
        if constexpr (!C::x_resident) {
            if (i + C::x_stages < rounds) {
                if constexpr (S::kept > 0) keep<C>(incoming, next, lane);
                else incoming.store(slot, lane);
            }
        }
        if constexpr (!S::at_once) __syncwarp();
        next = next + S::kept_bytes == kept + S::kept * S::kept_bytes ? kept : next + S::kept_bytes;
    }

    store_sums<C>(sums, ring, lane);  // over each warp's drained ring
    __syncthreads();
    const auto add_warps = [&](int token, int row) {
        float sum = 0;
        UNROLL for (int w = 0; w < C::warps; w++) sum += ptx::ld_shared_f32(shared + w * S::ring_bytes + (token * S::rows + row) * 4);
        return sum;
    };
    if constexpr (C::cluster_k > 1) {
        ptx::barrier_cluster_wait();  // the first CTA runs and its mbarrier is initialized
        if (rank > 0) {
            const uint32_t there = ptx::mapa(shared + S::received + (rank - 1) * S::sum_bytes, 0), barrier = ptx::mapa(shared + S::sum_barrier, 0);
            UNROLL for (int from = 0; from < S::rows * C::tile_m; from += C::threads) {
                const int i = from + static_cast<int>(threadIdx.x), token = i / S::rows, row = i % S::rows;
                if (token < C::tile_m && row < mine * 16) ptx::st_async_u32(there + i * 4, __float_as_uint(add_warps(token, row)), barrier);
            }
            return;
        }
        ptx::mbarrier_wait_parity_acquire_cluster(shared + S::sum_barrier, 0);
    }
    const auto result = [&](int token, int row) {
        float sum = add_warps(token, row);
        UNROLL for (int other = 0; other < C::cluster_k - 1; other++)
            sum += ptx::ld_shared_f32(shared + S::received + other * S::sum_bytes + (token * S::rows + row) * 4);
        const uint2 factor = ptx::ld_shared_v2(shared + S::factors + row * 8);
        const float v = fmaf(sum, __uint_as_float(factor.x), __uint_as_float(factor.y));
        return C::operand == Operand::f16 ? ptx::cvt_f16_f32(v) : ptx::cvt_bf16_f32(v);
    };
    if constexpr (rotates) {
        rotary.store(p, first, result);
    } else if constexpr (silu) {  // a unit's rows: eight of gate, eight of up
        constexpr int half = S::rows / 2;
        UNROLL for (int from = 0; from < half * C::tile_m; from += C::threads) {
            const int i = from + static_cast<int>(threadIdx.x), token = i / half, place = i % half, row = place / 8 * 16 + place % 8;
            if (token < p.m && token < C::tile_m && row < mine * 16 && first * 16 + row + 8 < p.n) {
                const uint32_t y = values::silu_mul_pair<C::operand == Operand::bf16>(result(token, row), result(token, row + 8));
                p.y[static_cast<size_t>(token) * (p.n / 2) + first * 8 + place] = static_cast<uint16_t>(y);
            }
        }
    } else {
        UNROLL for (int from = 0; from < S::rows * C::tile_m; from += C::threads) {
            const int i = from + static_cast<int>(threadIdx.x), token = i / S::rows, row = i % S::rows, n = first * 16 + row;
            if (token < p.m && token < C::tile_m && row < mine * 16 && n < p.n) p.y[static_cast<size_t>(token) * p.n + n] = result(token, row);
        }
    }
}

}  // namespace packed

// P: NormParams to normalize x first, RotaryParams or RotaryPagesParams to rotate and store the outputs, too. gate: silu(gate) * up;
// rows alternate between eight of gate and eight of up, y has half as many columns.
template <class C, class P = Params, Gate... gate> __global__ void __launch_bounds__(C::threads, 1) sm90_packed_gemv(const __grid_constant__ P p) {
    packed::multiply_digits<C, P, (sizeof...(gate) > 0)>(p);
}

#endif  // ANYBIT_SM90_PACKED_GEMV_CUH
