// Which experts each token takes: RMSNorm of x + residual (or x alone), the router's logits, the largest `top` and their
// softmax, in one launch.
//
// A cluster of CTAs takes up to eight tokens at a time. Each holds a share of the router's weights in registers, loaded
// before the rows are there: 16 experts are the rows of mma.m16n8k16, tokens the columns. Where there are more CTAs than 16
// experts each, they share K, too. Each then chooses for the token of its rank, by logits that all send it. Which k a lane's
// words stand for does not matter, as long as weights and rows agree: a lane takes eight in a row.
//
// With more tokens than clusters take at once a GEMM is faster, and `take_largest` chooses by its logits.
#ifndef ANYBIT_ROUTER_CUH
#define ANYBIT_ROUTER_CUH

#include "common/values.cuh"

struct Params {
    const uint16_t* x;         // [tokens, hidden], rows x_stride apart
    const uint16_t* residual;  // added to x first; or null
    const uint16_t* gamma;     // [hidden], where rows are normed
    const uint16_t* weight;    // [experts, hidden]
    uint16_t* total;           // x + residual; or null
    uint16_t* y;               // the normed rows
    int32_t* ids;              // [tokens, top], most probable first
    float* weights;            // their probabilities
    int64_t x_stride;
    int32_t tokens, hidden, experts, top;
    float epsilon;
};

namespace router {

// A logit's 16 bits to an integer of the same order, NaN above all; and back.
DEVICE uint32_t ordered(uint32_t bits) {
    if (bits == 0x8000u) bits = 0;
    return bits & 0x8000u ? 0xffffu & ~bits : bits | 0x8000u;
}
template <bool bf16> DEVICE float value_of(uint32_t order) {
    const uint32_t bits = order & 0x8000u ? order & 0x7fffu : 0xffffu & ~order;
    return values::low_float<bf16>(bits);
}

template <class C> struct Shape {
    static constexpr int warps = C::threads / 32, rows = C::tiles * 16, expert_parts = C::cluster / C::k_parts;
    static constexpr int chunk = 32 * warps * C::k_parts;  // values of K that all lanes of a cluster take at once
    static constexpr int stride = 2 * C::hidden + 64;      // bytes of a row in shared memory
    static constexpr int partial = C::tokens * stride;     // float [warps, tokens, rows]
    static constexpr int squares = partial + warps * C::tokens * rows * 4;  // float [tokens, 32]
    static constexpr int received = squares + C::tokens * 128;              // float [cluster, rows], of this CTA's token
    static constexpr int barrier = received + C::cluster * rows * 4, bytes = barrier + 8;
};

template <class C> DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    if constexpr (C::is_bf16) ptx::mma_m16n8k16_bf16(d, a, b);
    else ptx::mma_m16n8k16_f16(d, a, b);
}

// A logit of 16 bits as a key: larger ones first, then experts in order. 0 is no expert's.
DEVICE uint32_t key_of(uint32_t bits, int expert) { return ordered(bits) << 16 | (0xffffu - expert); }

// The `top` largest of a warp's keys, of which a lane has some, and their softmax: a token's experts and their weights.
template <bool bf16, bool renormalize, int each> DEVICE void choose(const Params& p, uint32_t (&key)[each], int token) {
    const int lane = static_cast<int>(ptx::lane_id());
    uint32_t most = 0;
    UNROLL for (int i = 0; i < each; i++) most = values::larger(most, key[i]);
    const float largest = value_of<bf16>(ptx::redux_max(most) >> 16);
    float sum = 0.f;  // of all, or of those chosen
    if (!renormalize) {
        UNROLL for (int i = 0; i < each; i++)
            if (key[i] != 0) sum += ptx::ex2_approx(1.4426950408889634f * (value_of<bf16>(key[i] >> 16) - largest));
        sum = values::Sum::over_warp(sum);
    }
    int id = 0;
    float weight = 0.f;
    for (int j = 0; j < p.top; j++) {
        most = 0;
        UNROLL for (int i = 0; i < each; i++) most = values::larger(most, key[i]);
        most = ptx::redux_max(most);
        UNROLL for (int i = 0; i < each; i++)
            if (key[i] == most) key[i] = 0;
        const float probability = ptx::ex2_approx(1.4426950408889634f * (value_of<bf16>(most >> 16) - largest));
        if (renormalize) sum += probability;
        if (lane == j) id = 0xffff - static_cast<int>(most & 0xffffu), weight = probability;
    }
    if (lane < p.top) {
        p.ids[static_cast<size_t>(token) * p.top + lane] = id;
        p.weights[static_cast<size_t>(token) * p.top + lane] = weight * ptx::rcp_approx(sum);
    }
}

// Of the logits that the cluster sent, by one warp.
template <class C> DEVICE void choose_of_cluster(const Params& p, uint32_t shared, int token) {
    using S = Shape<C>;
    constexpr int each = (S::rows * S::expert_parts + 31) / 32;
    uint32_t key[each];
    UNROLL for (int i = 0; i < each; i++) {
        const int expert = static_cast<int>(ptx::lane_id()) + 32 * i;
        key[i] = 0;
        if (expert >= p.experts) continue;
        float sum = 0.f;
        UNROLL for (int part = 0; part < C::k_parts; part++)
            sum += ptx::ld_shared_f32(shared + S::received + ((expert / S::rows * C::k_parts + part) * S::rows + expert % S::rows) * 4);
        key[i] = key_of(values::round_pair<C::is_bf16>(sum, 0.f) & 0xffffu, expert);
    }
    choose<C::is_bf16, C::renormalize>(p, key, token);
}

}  // namespace router

template <class C> __global__ void __launch_bounds__(C::threads, 1) route(const __grid_constant__ Params p) {
    using namespace values;
    using S = router::Shape<C>;
    static_assert(C::shared_bytes == S::bytes, "rows, partial sums, squares, logits, a barrier");
    constexpr int warps = S::warps, rows = S::rows, resident = C::chunks < C::resident ? C::chunks : C::resident;
    constexpr bool bf16 = C::is_bf16;
    const uint32_t shared = ptx::shared_address(ptx::dynamic_shared());
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, rank = blockIdx.x % C::cluster;
    const int first_expert = rank / C::k_parts * rows, first_k = (rank % C::k_parts * warps + warp) * 32 + lane % 4 * 8;

    const auto load = [&](int chunk, uint4 (&w)[C::tiles][2], auto&& get) {
        const int k = first_k + chunk * S::chunk;
        UNROLL for (int tile = 0; tile < C::tiles; tile++)
            UNROLL for (int half = 0; half < 2; half++) {
                const int expert = first_expert + tile * 16 + half * 8 + lane / 4;
                const bool there = expert < p.experts && k < C::hidden;
                w[tile][half] = there ? get(p.weight + static_cast<size_t>(expert) * C::hidden + k) : uint4{0, 0, 0, 0};
            }
    };
    ptx::griddepcontrol_launch_dependents();
    const auto expect = [&]() {
        if (thread == 0 && rank < C::tokens) ptx::mbarrier_arrive_expect_tx(shared + S::barrier, C::cluster * rows * 4);
    };
    if (thread == 0) {
        ptx::mbarrier_init(shared + S::barrier, 1);
        ptx::fence_mbarrier_init();
    }
    expect();
    __syncwarp();
    ptx::barrier_cluster_arrive();
    uint4 held[resident][C::tiles][2];
    // Not ld.global.nc, which may sink below the wait.
    UNROLL for (int c = 0; c < resident; c++) load(c, held[c], ptx::ld_global_cg_v4);
    uint4 gamma[C::vectors];
    UNROLL for (int v = 0; v < C::vectors; v++)
        if (C::norm) gamma[v] = load8<true>(p.gamma, 8 * (v * C::threads + thread), C::hidden);
    ptx::griddepcontrol_wait();

    const int step = static_cast<int>(gridDim.x) / C::cluster * C::tokens;
    uint32_t parity = 0;
    for (int first = blockIdx.x / C::cluster * C::tokens; first < p.tokens; first += step, parity ^= 1) {
        uint4 x[C::tokens][C::vectors], other[C::tokens][C::vectors];
        UNROLL for (int t = 0; t < C::tokens; t++)
            UNROLL for (int v = 0; v < C::vectors; v++) {
                const int k = 8 * (v * C::threads + thread), end = first + t < p.tokens ? C::hidden : 0;
                x[t][v] = load8<true>(p.x + (first + t) * p.x_stride, k, end);
                if (p.residual) other[t][v] = load8<true>(p.residual + static_cast<int64_t>(first + t) * C::hidden, k, end);
            }
        if (C::norm) {
            float* squares = reinterpret_cast<float*>(ptx::dynamic_shared() + S::squares);
            UNROLL for (int t = 0; t < C::tokens; t++) {
                float sum = 0.f;
                UNROLL for (int v = 0; v < C::vectors; v++) {
                    uint4& z = x[t][v];
                    const uint4 r = other[t][v];
                    if (p.residual) z = uint4{add_pair<bf16>(z.x, r.x), add_pair<bf16>(z.y, r.y), add_pair<bf16>(z.z, r.z), add_pair<bf16>(z.w, r.w)};
                    const uint32_t word[4] = {z.x, z.y, z.z, z.w};
                    UNROLL for (int i = 0; i < 4; i++) {
                        const float low = low_float<bf16>(word[i]), high = high_float<bf16>(word[i]);
                        sum += low * low + high * high;
                    }
                    const int k = 8 * (v * C::threads + thread);
                    if (p.residual && t % C::cluster == rank && first + t < p.tokens)
                        store8<true>(p.total + static_cast<int64_t>(first + t) * C::hidden, k, C::hidden, z);
                }
                sum = Sum::over_warp(sum);
                if (lane == 0) squares[t * 32 + warp] = sum;
            }
            __syncthreads();
            UNROLL for (int t = 0; t < C::tokens; t++) {
                const float sum = Sum::over_warp(lane < warps ? squares[t * 32 + lane] : 0.f);
                const float factor = rsqrtf(sum * (1.f / C::hidden) + p.epsilon);
                UNROLL for (int v = 0; v < C::vectors; v++) {
                    uint4& z = x[t][v];
                    const uint4 g = gamma[v];
                    z = uint4{normalize_pair<bf16>(z.x, g.x, factor), normalize_pair<bf16>(z.y, g.y, factor),
                              normalize_pair<bf16>(z.z, g.z, factor), normalize_pair<bf16>(z.w, g.w, factor)};
                    const int k = 8 * (v * C::threads + thread);
                    if (t % C::cluster == rank && first + t < p.tokens)
                        store8<true>(p.y + static_cast<int64_t>(first + t) * C::hidden, k, C::hidden, z);
                }
            }
        }
        UNROLL for (int t = 0; t < C::tokens; t++)
            UNROLL for (int v = 0; v < C::vectors; v++) {
                const int k = 8 * (v * C::threads + thread);
                if (k < C::hidden) ptx::st_shared_v4(shared + t * S::stride + 2 * k, x[t][v]);
            }
        __syncthreads();

        float sum[C::tiles][4] = {};
        const auto add = [&](int chunk, const uint4 (&w)[C::tiles][2]) {
            const int k = first_k + chunk * S::chunk;
            uint4 b = {0, 0, 0, 0};
            if (lane / 4 < C::tokens && k < C::hidden) b = ptx::ld_shared_v4(shared + lane / 4 * S::stride + 2 * k);
            UNROLL for (int tile = 0; tile < C::tiles; tile++) {
                const uint4 low = w[tile][0], high = w[tile][1];
                router::mma<C>(sum[tile], {low.x, high.x, low.y, high.y}, {b.x, b.y});
                router::mma<C>(sum[tile], {low.z, high.z, low.w, high.w}, {b.z, b.w});
            }
        };
        UNROLL for (int c = 0; c < resident; c++) add(c, held[c]);
        _Pragma("unroll 1") for (int c = resident; c < C::chunks; c++) {
            uint4 w[C::tiles][2];
            load(c, w, ptx::ld_global_nc_v4);
            add(c, w);
        }
        UNROLL for (int tile = 0; tile < C::tiles; tile++)
            UNROLL for (int i = 0; i < 4; i++) {
                const int t = lane % 4 * 2 + i % 2, row = tile * 16 + i / 2 * 8 + lane / 4;
                if (t < C::tokens) ptx::st_shared_f32(shared + S::partial + ((warp * C::tokens + t) * rows + row) * 4, sum[tile][i]);
            }
        __syncthreads();
        ptx::barrier_cluster_wait();  // the others run, and expect this round's logits
        for (int i = thread; i < C::tokens * rows; i += C::threads) {
            float total = 0.f;
            UNROLL for (int w = 0; w < warps; w++) total += ptx::ld_shared_f32(shared + S::partial + (w * C::tokens * rows + i) * 4);
            const uint32_t there = ptx::mapa(shared + S::received + (rank * rows + i % rows) * 4, i / rows);
            ptx::st_async_u32(there, __float_as_uint(total), ptx::mapa(shared + S::barrier, i / rows));
        }
        if (warp == 0 && rank < C::tokens) {
            ptx::mbarrier_wait_parity_acquire_cluster(shared + S::barrier, parity);
            if (first + rank < p.tokens) router::choose_of_cluster<C>(p, shared, first + rank);
        }
        if (first + step >= p.tokens) break;
        expect();
        __syncwarp();
        ptx::barrier_cluster_arrive();
    }
}

// Of many tokens, whose logits [tokens, experts] are x: a warp a token.
template <class C> __global__ void __launch_bounds__(C::threads) take_largest(const __grid_constant__ Params p) {
    static_assert(C::shared_bytes == 0, "no shared memory");
    const int token = blockIdx.x * (C::threads / 32) + threadIdx.x / 32;
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
    if (token >= p.tokens) return;
    uint32_t key[C::each];
    UNROLL for (int i = 0; i < C::each; i++) {
        const int expert = static_cast<int>(ptx::lane_id()) + 32 * i;
        key[i] = expert < p.experts ? router::key_of(p.x[token * p.x_stride + expert], expert) : 0;
    }
    router::choose<C::is_bf16, C::renormalize>(p, key, token);
}

#endif  // ANYBIT_ROUTER_CUH
