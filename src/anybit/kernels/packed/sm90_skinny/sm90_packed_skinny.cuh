// Skinny GEMM y = x W^T, M up to about 16, packed weights of 1 to 8 bits: memory-bound, weights are read once.
//
// - Weights are the A operand of mma.sync (16 rows), tokens its 8 columns (B). A CTA owns whole units of 16 rows; its warps
//   split K and reduce once, in shared memory, in a fixed order: no atomics, no second pass over memory.
// - Each warp has its own ring of `stages` bulk copies, filled before griddepcontrol.wait, since weights don't depend on the
//   previous kernel. No __syncthreads until the reduction.
// - Columns are the outer loop and rows the inner one, so a warp holds one k block of activations at a time.
// - Table codes become their values (packed_tables.cuh). Others stay integers: f16 subnormals (code * 2^-24), bf16 offset by
//   128, or unsigned bytes; zero * (sum of activations), from an MMA with an A operand of ones, is subtracted.
#ifndef ANYBIT_SM90_PACKED_SKINNY_CUH
#define ANYBIT_SM90_PACKED_SKINNY_CUH

#include "common/values.cuh"
#include "packed/sm90_skinny/sm90_packed_skinny_parts.cuh"

// One warp's accumulators: units x token tiles, over its k blocks.
template <class C> struct Warp {
    using T = Traits<C>;
    static constexpr bool exact = T::integer && T::whole_rows;  // int32 sums up to the epilogue
    using Part = typename packed::Choose<T::integer, int32_t, float>::type;
    using Sum = typename packed::Choose<exact, int32_t, float>::type;

    uint32_t lane;
    Sum sums[T::units][T::token_tiles][4];
    // Per group, for columns 2t and 2t + 1: zero * (sum of activations), the term to subtract; for asym and min the sum
    // alone. offset: what the bf16 offset of 128 adds, for asym and min.
    Part correction[T::token_tiles][T::flushes][2];
    Part offset[T::token_tiles][T::flushes][2];

    static constexpr int zero2 = (C::code == Code::bipolar) ? (1 << C::bits) - 1 : 1 << C::bits;  // twice the fixed zero

    // Sums the accumulator sets, each scaled back by 2^-bit. Integers are multiples of 2^bit, so the shifts are exact.
    static DEVICE Part gather_sets(const Part (&part)[T::slots()][4], int i) {
        Part v = 0;
        unroll<0, T::sets()>([&](auto index) {
            constexpr int set = decltype(index)::value, bit = T::bit_of_set(set), first = T::first_slot(set);
            Part whole = part[first][i];
            UNROLL for (int s = 1; s < T::slots_of_set(set); s++) whole += part[first + s][i];
            if constexpr (T::integer)
                v += static_cast<int32_t>(whole) >> bit;
            else if constexpr (set == 0)
                v = whole * (1.0f / (1 << bit));
            else
                v = fmaf(whole, 1.0f / (1 << bit), v);
        });
        return v;
    }

    static constexpr bool by_set = Traits<C>::as_bf16;
    static constexpr int sum_sets = by_set ? T::sets() : T::integer ? 2 : 4;

    // Turns a group's sum of activations into its correction: the term to subtract, or what minima multiply.
    template <int flush> DEVICE void keep_sums(Part (&part)[sum_sets][4], int n) {
        UNROLL for (int i = 0; i < 2; i++) {
            Part total = part[0][i], extra = 0;
            UNROLL for (int s = 1; s < sum_sets; s++) total += part[s][i];
            if constexpr (by_set && !T::exact_bf16)
                unroll<0, sum_sets>([&](auto at) {
                    extra += part[decltype(at)::value][i] * (128.0f / (1 << T::bit_of_set(decltype(at)::value)));
                });
            if constexpr (T::exact_bf16) extra = total * -128.0f;
            if constexpr (Traits<C>::as_f16) total *= 0x1p-24f;
            if constexpr (C::code == Code::asym || C::code == Code::min) {
                correction[n][flush][i] = total, offset[n][flush][i] = extra;
            } else if constexpr (T::integer) {
                correction[n][flush][i] = (C::code == Code::bipolar) ? total * zero2 : total * (zero2 / 2);
            } else {
                correction[n][flush][i] = fmaf(total, 0.5f * zero2, extra);
            }
            UNROLL for (int s = 0; s < sum_sets; s++) part[s][i] = part[s][i + 2] = 0;
        }
    }

    // Sums a k block's activations per group by MMA with ones, and keeps them as corrections.
    DEVICE void sum_activations(uint32_t slot, int tokens) {
        if constexpr (T::table) return;  // table values need no zero
        constexpr uint32_t one = T::integer ? 0x01010101u : Traits<C>::as_f16 ? 0x3c003c00u : 0x3f803f80u;
        const uint32_t ones[4] = {one, one, one, one};
        UNROLL for (int n = 0; n < T::token_tiles; n++) {
            Part part[sum_sets][4] = {};
            unroll<0, 4>([&](auto index) {
                constexpr int wide = decltype(index)::value;
                uint32_t b[T::steps_a_wide][2];
                columns(b, slot, n, wide, tokens);
                unroll<0, T::steps_a_wide>([&](auto which) {
                    constexpr int odd = decltype(which)::value, step = wide * T::steps_a_wide + odd;
                    constexpr int chain = by_set ? T::set(step) : step % sum_sets;
                    multiply<C>(part[chain], ones, b[odd]);
                    if constexpr (T::flushes == 8) keep_sums<step>(part, n);
                });
                if constexpr (T::ends_group(wide)) keep_sums<T::group_of(wide)>(part, n);
            });
        }
    }

    // B fragments of one token tile for 32 columns: b[odd] are k16 steps (16-bit), b[0] the k32 step (8-bit).
    DEVICE void columns(
        uint32_t (&b)[T::steps_a_wide][2], uint32_t slot, int token_tile, int wide, int tokens) const {
        const int token = static_cast<int>(lane & 7) + token_tile * 8;
        const uint32_t from = slot + (token < tokens ? token : 0) * T::pitch + wide * (32 * T::element);
        if constexpr (T::integer) {
            uint32_t r[2];
            ptx::ldmatrix_x2(r, from + ((lane >> 3) & 1) * 16);
            b[0][0] = r[0], b[0][1] = r[1];
        } else {
            uint32_t r[4];
            ptx::ldmatrix_x4(r, from + (lane >> 3) * 16);
            b[0][0] = r[0], b[0][1] = r[1], b[T::steps_a_wide - 1][0] = r[2], b[T::steps_a_wide - 1][1] = r[3];
        }
    }

    // Multiplies one stage of weights by one k block of activations and accumulates.
    template <int chunk> DEVICE void add(const Stage<C>& stage, uint32_t slot, int tokens) {
        Part part[C::row_units][T::token_tiles][T::slots()][4] = {};
        unroll<0, 4>([&](auto index) {
            constexpr int wide = decltype(index)::value;
            uint32_t b[T::token_tiles][T::steps_a_wide][2];
            UNROLL for (int n = 0; n < T::token_tiles; n++) columns(b[n], slot, n, wide, tokens);
            unroll<0, T::steps_a_wide>([&](auto which) {
                constexpr int odd = decltype(which)::value, step = wide * T::steps_a_wide + odd;
                UNROLL for (int r = 0; r < C::row_units; r++) {
                    const uint32_t a[4] = {
                        operand<C, 4 * step>(stage.words[r]), operand<C, 4 * step + 1>(stage.words[r]),
                        operand<C, 4 * step + 2>(stage.words[r]), operand<C, 4 * step + 3>(stage.words[r])};
                    UNROLL for (int n = 0; n < T::token_tiles; n++) multiply<C>(part[r][n][T::slot(step)], a, b[n][odd]);
                }
                if constexpr (T::flushes == 8) flush<chunk, step>(part, stage);
            });
            if constexpr (T::ends_group(wide)) flush<chunk, T::group_of(wide)>(part, stage);
        });
    }

    template <int chunk, int group>
    DEVICE void flush(
        Part (&part)[C::row_units][T::token_tiles][T::slots()][4], const Stage<C>& stage) {
        UNROLL for (int r = 0; r < C::row_units; r++) {
            float scale[2] = {1.0f, 1.0f}, minimum[2];
            if constexpr (!T::whole_rows) {
                const uint32_t pair = stage.scales[r][group];
                scale[0] = ptx::cvt_f32_f16(static_cast<uint16_t>(pair)), scale[1] = ptx::cvt_f32_f16(static_cast<uint16_t>(pair >> 16));
            }
            if constexpr (C::code == Code::min) {
                const uint32_t pair = stage.zeros[r][group];
                minimum[0] = ptx::cvt_f32_f16(static_cast<uint16_t>(pair)), minimum[1] = ptx::cvt_f32_f16(static_cast<uint16_t>(pair >> 16));
            }
            UNROLL for (int n = 0; n < T::token_tiles; n++) {
                Part centered[4];
                UNROLL for (int i = 0; i < 4; i++) {
                    Part v = gather_sets(part[r][n], i);
                    if constexpr (T::integer && (C::code == Code::bipolar)) v *= 2;
                    if constexpr (C::code == Code::asym) {
                        const uint32_t zeros = stage.zeros[r][group];
                        const int zero = static_cast<int>(i < 2 ? zeros & 0xff : (zeros >> 8) & 0xff);
                        v -= offset[n][group][i & 1] + static_cast<Part>(zero) * correction[n][group][i & 1];
                    } else if constexpr (C::code == Code::min) {
                        v -= offset[n][group][i & 1];
                    } else if constexpr (!T::table) {
                        v -= correction[n][group][i & 1];
                    }
                    centered[i] = v;
                }
                Sum(&sum)[4] = sums[chunk * C::row_units + r][n];
                UNROLL for (int i = 0; i < 4; i++) {
                    if constexpr (T::whole_rows) sum[i] += static_cast<Sum>(centered[i]);
                    else sum[i] = fmaf(scale[i >> 1], static_cast<float>(centered[i]), sum[i]);
                    if constexpr (C::code == Code::min) sum[i] = fmaf(minimum[i >> 1], correction[n][group][i & 1], sum[i]);
                }
                UNROLL for (int i = 0; i < 4; i++)
                    UNROLL for (int s = 0; s < T::slots(); s++) part[r][n][s][i] = 0;
            }
        }
    }
};

// gate: fused silu(gate) * up; rows alternate between eight of gate and eight of up, y has half as many columns.
template <class C, Gate... gate> __global__ void __launch_bounds__(C::threads, 1) sm90_packed_skinny(const __grid_constant__ Params p) {
    using T = Traits<C>;
    using W = Warp<C>;
    constexpr bool silu = sizeof...(gate) > 0;
    static_assert(C::threads == C::warps * 32 && C::warps % C::split_k_warps == 0, "warps are k_warps times row warps");
    static_assert(C::shared_bytes >= C::warps * T::ring_bytes + T::x_bytes + T::factor_bytes + T::barrier_bytes, "the twin counts shared memory differently");

    if constexpr (C::trigger == 0) ptx::griddepcontrol_launch_dependents();
    const uint32_t lane = ptx::lane_id();
    const int warp = static_cast<int>(ptx::warp_id()), k_warp = warp % C::split_k_warps, row_warp = warp / C::split_k_warps;
    const uint32_t shared = ptx::shared_address(ptx::dynamic_shared()), ring = shared + warp * T::ring_bytes;
    const uint32_t slots = shared + C::warps * T::ring_bytes + warp * (C::x_stages * T::slot_bytes);
    const uint32_t factors = shared + C::warps * T::ring_bytes + T::x_bytes, token_scales = factors + T::block_rows * 8;
    const uint32_t barriers = factors + T::factor_bytes + warp * (C::stages * 8);

    // Units of 16 rows are split evenly over the CTAs, then over row warps.
    const uint32_t row_units = static_cast<uint32_t>(p.row_tiles) * 4, block = blockIdx.x, blocks = gridDim.x;
    const int block_first = static_cast<int>(block * row_units / blocks);
    const int block_end = static_cast<int>((block + 1) * row_units / blocks);
    const int first = block_first + row_warp * T::units;
    const int mine = block_end - first < T::units ? block_end - first : T::units;  // units of this warp; may be negative
    const int chunks = mine > 0 ? (mine + C::row_units - 1) / C::row_units : 0;
    const int count = p.k_blocks > k_warp && mine > 0 ? (p.k_blocks - k_warp + C::split_k_warps - 1) / C::split_k_warps : 0;

    if (lane == 0) {
        UNROLL for (int i = 0; i < C::stages; i++) ptx::mbarrier_init(barriers + i * 8, 1);
        ptx::fence_mbarrier_init();
    }
    __syncwarp();

    const uint64_t policy = ptx::createpolicy_evict_first();
    // Step i of a warp is chunk i % chunks of its k block k_warp + k_warps * (i / chunks).
    const size_t stride = static_cast<size_t>(C::split_k_warps) * row_units * T::unit_bytes;
    const uint8_t* ahead = p.tiles + (static_cast<size_t>(k_warp) * row_units + first) * T::unit_bytes;
    int left = count * chunks, ahead_chunk = 0, ahead_slot = 0;
    const auto fetch = [&]() {
        if (lane == 0) {
            const int units = mine - ahead_chunk * C::row_units < C::row_units ? mine - ahead_chunk * C::row_units : C::row_units;
            const uint32_t bytes = static_cast<uint32_t>(units) * T::unit_bytes, barrier = barriers + ahead_slot * 8;
            ptx::mbarrier_arrive_expect_tx(barrier, bytes);
            ptx::cp_async_bulk_load_hint(ring + ahead_slot * T::stage_bytes, ahead + ahead_chunk * T::stage_bytes, bytes, barrier, policy);
        }
        left--;
        if (++ahead_slot == C::stages) ahead_slot = 0;
        if (++ahead_chunk == chunks) ahead_chunk = 0, ahead += stride;
    };
    for (int i = 0; i < C::prologue_stages && left > 0; i++) fetch();
    // Further copies are issued as earlier ones land, so that activations don't queue behind weights.
    for (int i = 0; i < C::stages - C::prologue_stages && left > 0; i++) {
        ptx::mbarrier_wait_parity(barriers + i * 8, 0);
        fetch();
    }
    for (int i = static_cast<int>(threadIdx.x); i < T::block_rows; i += C::threads) {
        const float2 row = packed::row_factors<C::output == Output::f16>(p, block_first * 16 + i);
        ptx::st_shared_v2(factors + i * 8, {__float_as_uint(row.x), __float_as_uint(row.y)});
    }
    ptx::griddepcontrol_wait();
    if constexpr (C::operand == Operand::s8) {
        if (static_cast<int>(threadIdx.x) < T::tokens && static_cast<int>(threadIdx.x) < p.m)
            ptx::st_shared_f32(token_scales + threadIdx.x * 4, p.x_scale[threadIdx.x]);
    }

    UNROLL for (int i = 0; i < C::x_stages; i++) {
        if (i < count) fetch_activations<C>(p, slots + i * T::slot_bytes, k_warp + i * C::split_k_warps, lane);
        else if constexpr (!C::x_resident) ptx::cp_async_commit_group();
    }

    W work;
    work.lane = lane;
    UNROLL for (int r = 0; r < T::units; r++)
        UNROLL for (int n = 0; n < T::token_tiles; n++)
            UNROLL for (int i = 0; i < 4; i++) work.sums[r][n][i] = 0;

    if constexpr (C::x_resident) {
        ptx::cp_async_wait_all();
        __syncwarp();
    }
    int slot = 0, stage_slot = 0;
    uint32_t phase = 0;
    for (int i = 0; i < count; i++) {
        if constexpr (!C::x_resident) {
            ptx::cp_async_wait_group<C::x_stages - 1>();
            __syncwarp();
        }
        const uint32_t x = slots + slot * T::slot_bytes;
        work.sum_activations(x, p.m);
        unroll<0, C::row_chunks>([&](auto which) {
            constexpr int chunk = decltype(which)::value;
            if (C::row_chunks == 1 || chunk < chunks) {
                ptx::mbarrier_wait_parity(barriers + stage_slot * 8, phase);
                Stage<C> stage;
                read_stage<C>(stage, ring + stage_slot * T::stage_bytes, lane);  // stale past the last row: never stored
                if constexpr ((C::code == Code::asym) && T::whole_rows) {
                    UNROLL for (int r = 0; r < C::row_units; r++) {
                        const int row = (first + chunk * C::row_units + r) * 16 + static_cast<int>(lane >> 2);
                        stage.zeros[r][0] = chunk * C::row_units + r < mine ? p.row_zero[row] | p.row_zero[row + 8] << 8 : 0;
                    }
                }
                work.template add<chunk>(stage, x, p.m);
                __syncwarp();
                if (left > 0) fetch();
                if (C::trigger > 0 && left == C::trigger - 1) ptx::griddepcontrol_launch_dependents();
                if (++stage_slot == C::stages) stage_slot = 0, phase ^= 1;
            }
        });
        if constexpr (!C::x_resident) {
            if (i + C::x_stages < count) fetch_activations<C>(p, x, k_warp + (i + C::x_stages) * C::split_k_warps, lane);
            else ptx::cp_async_commit_group();
        }
        if (++slot == C::x_stages) slot = 0;
    }

    // Reduction over the K warps.
    constexpr int rows = T::rows;
    // [token][row], over the warp's ring: all its copies have landed and been consumed.
    UNROLL for (int r = 0; r < T::units; r++)
        UNROLL for (int n = 0; n < T::token_tiles; n++)
            UNROLL for (int i = 0; i < 4; i++) {
                const int token = n * 8 + static_cast<int>(lane & 3) * 2 + (i & 1), row = r * 16 + static_cast<int>(lane >> 2) + (i >> 1) * 8;
                if (token < T::tokens) {
                    if constexpr (W::exact) ptx::st_shared_u32(ring + (token * rows + row) * 4, static_cast<uint32_t>(work.sums[r][n][i]));
                    else ptx::st_shared_f32(ring + (token * rows + row) * 4, work.sums[r][n][i]);
                }
            }
    __syncthreads();
    const int block_rows = (block_end - block_first) * 16;
    constexpr int outputs = T::block_rows / (1 + silu);
    UNROLL for (int from_row = 0; from_row < outputs * T::tokens; from_row += C::threads) {
        const int i = from_row + static_cast<int>(threadIdx.x), token = i / outputs, place = i % outputs;
        const auto result = [&](int row) {
            const int owner = row / rows;
            const uint32_t from = shared + owner * C::split_k_warps * T::ring_bytes + (token * rows + row % rows) * 4;
            typename W::Sum sum = 0;
            UNROLL for (int k = 0; k < C::split_k_warps; k++) {
                if constexpr (W::exact) sum += static_cast<int32_t>(ptx::ld_shared_u32(from + k * T::ring_bytes));
                else sum += ptx::ld_shared_f32(from + k * T::ring_bytes);
            }
            constexpr float of_codes = T::table ? packed::scale_of_pair<C::code, T::as_bf16> : Traits<C>::as_f16 ? 0x1p24f : 1.0f;
            constexpr float of_sum = of_codes * (T::integer && (C::code == Code::bipolar) ? 0.5f : 1.0f);
            const uint2 factor = ptx::ld_shared_v2(factors + row * 8);
            float v = static_cast<float>(sum) * of_sum;
            if constexpr (C::operand == Operand::s8) v *= ptx::ld_shared_f32(token_scales + token * 4);
            return fmaf(v, __uint_as_float(factor.x), __uint_as_float(factor.y));  // rounded as the reference rounds
        };
        const auto rounded = [](float v) { return C::output == Output::f16 ? ptx::cvt_f16_f32(v) : ptx::cvt_bf16_f32(v); };
        const int row = silu ? place / 8 * 16 + place % 8 : place;
        if (token < p.m && token < T::tokens && row < block_rows) {
            const float v = result(row);
            const int n = block_first * 16 + row;
            if constexpr (silu) {
                const uint32_t y = values::silu_mul_pair<C::output == Output::bf16>(rounded(v), rounded(result(row + 8)));
                if (n < p.n) p.y[static_cast<size_t>(token) * (p.n / 2) + block_first * 8 + place] = static_cast<uint16_t>(y);
            } else if (n < p.n)
                p.y[static_cast<size_t>(token) * p.n + n] = rounded(v);
        }
    }
}

#endif  // ANYBIT_SM90_PACKED_SKINNY_CUH
