// Every function of ptx.cuh and ptx_wgmma.cuh, for the tests that compare hardware with the emulation.
// Kernels read words from x and write what they get to y: result i of thread t is y[i * threads + t].
#include "common/ptx/wgmma.cuh"
#include "common/ptx/wgmma_sparse.cuh"

struct Params {
    const uint32_t* x;
    uint32_t* y;
    uint32_t* z;  // words that blocks share; zero at the start
};

#define KERNEL(name)        \
    template <class Config> \
    __global__ void __launch_bounds__(Config::threads) name(const __grid_constant__ Params p)

template <int threads> struct Results {
    uint32_t* y;
    int next;
    DEVICE void put(uint32_t v) { y[next++ * threads + threadIdx.x] = v; }
    DEVICE void put(int32_t v) { put(static_cast<uint32_t>(v)); }
    DEVICE void put(float v) { put(__float_as_uint(v)); }
    template <class T, int count> DEVICE void put(const T (&v)[count]) { for (int i = 0; i < count; i++) put(v[i]); }
    DEVICE void put(uint4 v) { put(v.x), put(v.y), put(v.z), put(v.w); }
    DEVICE void put(uint2 v) { put(v.x), put(v.y); }
};

// x: 32 rows of 16 bytes.
KERNEL(fragments) {
    Results<32> out{p.y, 0};
    uint8_t* shared = ptx::dynamic_shared();
    const uint32_t base = ptx::shared_address(shared);
    for (int i = threadIdx.x; i < 128; i += 32) reinterpret_cast<uint32_t*>(shared)[i] = p.x[i];
    __syncwarp();
    const uint32_t row = base + (threadIdx.x ^ 5) * 16;
    uint32_t r2[2], r4[4];
    ptx::ldmatrix_x2(r2, row), out.put(r2);
    ptx::ldmatrix_x4(r4, row), out.put(r4);
    ptx::ldmatrix_x4_trans(r4, row), out.put(r4);
    out.put(ptx::movmatrix_trans(r4[1]));
    __syncwarp();
    ptx::stmatrix_x4_trans(row, r4);
    __syncwarp();
    for (int i = 0; i < 4; i++) out.put(reinterpret_cast<uint32_t*>(shared)[32 * i + threadIdx.x]);
}

KERNEL(mma_integers) {
    Results<32> out{p.y, 0};
    uint32_t a[4], b[4];
    for (int i = 0; i < 4; i++) a[i] = p.x[32 * i + threadIdx.x], b[i] = p.x[128 + 32 * i + threadIdx.x];
    const uint32_t b2[2] = {b[0], b[1]};
    // Any metadata word is legal if the two positions of each group of four ascend: pairs (0, 1) to (2, 3).
    uint32_t metadata = 0;
    for (int i = 0; i < 8; i++) {
        const uint32_t choice = b[3] >> 4 * i & 15, first = choice % 3, second = first + 1 + (choice / 3) % (3 - first);
        metadata |= (first | second << 2) << 4 * i;
    }
#define PRODUCT(name)                       \
    {                                       \
        int32_t d[4] = {1, -2, 3, -4};      \
        ptx::name(d, a, b2), out.put(d);    \
    }
    PRODUCT(mma_m16n8k256_b1)
    PRODUCT(mma_m16n8k32_s8)
    PRODUCT(mma_m16n8k32_u8s8)
    {
        int32_t d[4] = {1, -2, 3, -4};
        const uint32_t half[2] = {a[0], a[1]};
        ptx::mma_m16n8k16_u8s8(d, half, b[0]), out.put(d);
    }
    PRODUCT(mma_m16n8k64_s4)
    PRODUCT(mma_m16n8k64_u4s4)
    PRODUCT(mma_m16n8k64_u4)
    int32_t d[4] = {1, -2, 3, -4};
    ptx::mma_sp_m16n8k64_s8(d, a, b, metadata), out.put(d);
}

// x: a and b as f16, then as bf16, then metadata.
KERNEL(mma_floats) {
    Results<32> out{p.y, 0};
    uint32_t a[2][4], b[2][4], metadata = 0;
    for (int type = 0; type < 2; type++)
        for (int i = 0; i < 4; i++) {
            a[type][i] = p.x[256 * type + 32 * i + threadIdx.x];
            b[type][i] = p.x[256 * type + 128 + 32 * i + threadIdx.x];
        }
    for (int i = 0; i < 8; i++) {
        const uint32_t choice = p.x[512 + threadIdx.x] >> 4 * i & 15, first = choice % 3,
                       second = first + 1 + (choice / 3) % (3 - first);
        metadata |= (first | second << 2) << 4 * i;
    }
    const uint32_t f16[2] = {b[0][0], b[0][1]}, bf16[2] = {b[1][0], b[1][1]};
    float d[4] = {1, -2, 3, -4};
    ptx::mma_m16n8k16_f16(d, a[0], f16), out.put(d);
    ptx::mma_m16n8k16_bf16(d, a[1], bf16), out.put(d);
    ptx::mma_sp_m16n8k32_f16(d, a[0], b[0], metadata), out.put(d);
    ptx::mma_sp_m16n8k32_f16<1>(d, a[0], b[0], metadata), out.put(d);
    ptx::mma_sp_m16n8k32_bf16<0>(d, a[1], b[1], metadata), out.put(d);
    ptx::mma_sp_m16n8k32_bf16<1>(d, a[1], b[1], metadata), out.put(d);
}

// x: 64 rows of a and N rows of b, of 128 bytes each, in the type that Config::type says.
KERNEL(wgmma) {
    constexpr int N = Config::n, mode = Config::swizzle, chunks = mode == 3 ? 2 : mode == 2 ? 4 : 8;
    constexpr ptx::Swizzle swizzle = static_cast<ptx::Swizzle>(mode);
    Results<128> out{p.y, 0};
    uint8_t* shared = ptx::dynamic_shared();
    const uint32_t base = ptx::shared_address(shared), base_b = base + 64 * 128;
    for (int i = threadIdx.x; i < (64 + N) * 8; i += 128) {
        const bool is_b = i >= 512;
        const int row = is_b ? i / 8 - 64 : i / 8, c = i % 8, rows = is_b ? N : 64;
        const uint4 v = ptx::ld_global_nc_v4(p.x + 4 * i);
        // Tiles of `chunks` chunks a row, one after the other, each of them swizzled; unswizzled, 8 x 16-byte matrices.
        const int x = mode == 1 ? row & 7 : mode == 2 ? row >> 1 & 3 : row >> 2 & 1;
        const uint32_t at = mode == 0 ? c * rows * 16 + row * 16
                                      : c / chunks * rows * chunks * 16 + row * chunks * 16 + ((c % chunks ^ x) << 4);
        ptx::st_shared_v4((is_b ? base_b : base) + at, v);
    }
    ptx::fence_proxy_async();
    __syncthreads();
    const uint32_t stride = mode == 0 ? 128 : 8 * chunks * 16;
    const uint64_t a0 = ptx::wgmma_descriptor(base, swizzle, stride, 64 * 16);
    const uint64_t b0 = ptx::wgmma_descriptor(base_b, swizzle, stride, N * 16);
    // Where 32 bytes of k begin, counted in instructions.
    auto step = [](int i, int rows) -> uint32_t {
        return mode == 0 ? i * 2 * rows * 16 : i / (chunks / 2) * rows * chunks * 16 + i % (chunks / 2) * 32;
    };
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#define WGMMA(name, reg, from_registers)                                                                              \
    {                                                                                                                 \
        reg d[N / 2];                                                                                                 \
        for (int i = 0; i < N / 2; i++) d[i] = static_cast<reg>(i);                                                   \
        uint32_t a[4][4];                                                                                             \
        for (int k = 0; k < 4; k++)                                                                                   \
            for (int i = 0; i < 4; i++) a[k][i] = p.x[(16 * warp + g + i % 2 * 8) * 32 + 8 * k + t + i / 2 * 4];      \
        ptx::wgmma_touch(d);                                                                                          \
        ptx::wgmma_fence();                                                                                           \
        for (int k = 0; k < 4; k++) {                                                                                 \
            if constexpr (from_registers) ptx::name<N>(d, a[k], ptx::wgmma_advance(b0, step(k, N)), true);            \
            else ptx::name<N>(d, ptx::wgmma_advance(a0, step(k, 64)), ptx::wgmma_advance(b0, step(k, N)), k != 0);    \
            ptx::wgmma_commit_group();                                                                                \
        }                                                                                                             \
        ptx::wgmma_wait_group<1>();                                                                                   \
        ptx::wgmma_wait_group<0>();                                                                                   \
        ptx::wgmma_touch(d);                                                                                          \
        out.put(d);                                                                                                   \
    }
    if constexpr (Config::type == 0) {
        WGMMA(wgmma_b1, int32_t, false) WGMMA(wgmma_b1, int32_t, true)
    }
    if constexpr (Config::type == 0 && N <= 128) {  // more would only take the compiler's time
        WGMMA(wgmma_s8, int32_t, false) WGMMA(wgmma_s8, int32_t, true)
        WGMMA(wgmma_u8s8, int32_t, false) WGMMA(wgmma_u8s8, int32_t, true)
    }
    if constexpr (Config::type == 1) { WGMMA(wgmma_f16, float, false) WGMMA(wgmma_f16, float, true) }
    if constexpr (Config::type == 2) { WGMMA(wgmma_bf16, float, false) WGMMA(wgmma_bf16, float, true) }
    if constexpr (Config::type == 3) { WGMMA(wgmma_e4m3, float, false) WGMMA(wgmma_e4m3, float, true) }
}

// x: 64 rows of 64 bytes of kept values and N rows of b of 128 bytes, in the type that Config::type says; then metadata.
KERNEL(wgmma_sparse) {
    constexpr int N = Config::n;
    Results<128> out{p.y, 0};
    const uint32_t base = ptx::shared_address(ptx::dynamic_shared());
    for (int i = threadIdx.x; i < N * 8; i += 128)
        ptx::st_shared_v4(base + i / 8 * 128 + ((i % 8 ^ (i / 8 & 7)) << 4), ptx::ld_global_nc_v4(p.x + 1024 + 4 * i));
    ptx::fence_proxy_async();
    __syncthreads();
    const uint64_t b = ptx::wgmma_descriptor(base, ptx::Swizzle::bytes_128, 1024);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    uint32_t a[2][4], metadata[2] = {0, 0};
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < 4; i++) a[k][i] = p.x[(16 * warp + g + i % 2 * 8) * 16 + 8 * k + t + i / 2 * 4];
        for (int i = 0; i < 8; i++) {  // any two places that ascend
            const uint32_t choice = p.x[1024 + 32 * N + 128 * k + threadIdx.x] >> 4 * i & 15, first = choice % 3,
                           second = first + 1 + (choice / 3) % (3 - first);
            metadata[k] |= (first | second << 2) << 4 * i;
        }
    }
#define WGMMA_SP(name, selectors, reg)                                                                                \
    {                                                                                                                 \
        reg d[N / 2];                                                                                                 \
        for (int i = 0; i < N / 2; i++) d[i] = static_cast<reg>(i);                                                   \
        ptx::wgmma_touch(d);                                                                                          \
        ptx::wgmma_fence();                                                                                           \
        ptx::name<N, 0>(d, a[0], b, metadata[0]);                                                                     \
        ptx::name<N, selectors - 1>(d, a[1], ptx::wgmma_advance(b, 64), metadata[1]);                                 \
        ptx::wgmma_commit_group();                                                                                    \
        ptx::wgmma_wait_group<0>();                                                                                   \
        ptx::wgmma_touch(d);                                                                                          \
        out.put(d);                                                                                                   \
    }
    if constexpr (Config::type == 0) WGMMA_SP(wgmma_sp_s8, 1, int32_t)
    if constexpr (Config::type == 1) WGMMA_SP(wgmma_sp_f16, 2, float)
    if constexpr (Config::type == 2) WGMMA_SP(wgmma_sp_bf16, 2, float)
}

// Bits, and arithmetic that rounds exactly once: any words.
KERNEL(exact_arithmetic) {
    Results<128> out{p.y, 0};
    const uint32_t a = p.x[threadIdx.x], b = p.x[128 + threadIdx.x], c = p.x[256 + threadIdx.x];
    const float fa = __uint_as_float(a), fb = __uint_as_float(b);
    out.put(ptx::lop3<0xea>(a, b, c)), out.put(ptx::lop3<0x6a>(a, b, c)), out.put(ptx::lop3<0x2d>(a, b, c));
    out.put(ptx::prmt(a, b, c & 0x7777)), out.put(ptx::prmt(a, b, c));
    out.put(ptx::add_f16x2(a, b)), out.put(ptx::sub_f16x2(a, b)), out.put(ptx::mul_f16x2(a, b));
    out.put(ptx::fma_f16x2(a, b, c)), out.put(ptx::max_f16x2(a, b));
    out.put(ptx::add_bf16x2(a, b)), out.put(ptx::sub_bf16x2(a, b)), out.put(ptx::mul_bf16x2(a, b));
    out.put(ptx::fma_bf16x2(a, b, c));
    out.put(ptx::cvt_f16x2_f32(fa, fb)), out.put(ptx::cvt_bf16x2_f32(fa, fb));
    out.put(uint32_t{ptx::cvt_f16_f32(fa)}), out.put(uint32_t{ptx::cvt_bf16_f32(fa)});
    out.put(uint32_t{ptx::cvt_e4m3x2_f32(fa, fb)}), out.put(ptx::cvt_f16x2_e4m3x2(static_cast<uint16_t>(a)));
    out.put(ptx::max_nan_f16x2(a, b)), out.put(ptx::min_nan_f16x2(a, b)),
        out.put(ptx::abs_f16x2(a & 0xbfffbfffu));  // no NaN: its payload is not promised
    out.put(ptx::max_nan_bf16x2(a, b)), out.put(ptx::min_nan_bf16x2(a, b)), out.put(ptx::abs_bf16x2(a & 0xbfffbfffu));
    // Sums of small floats, where conversions meet subnormals and ties.
    const float small = ptx::cvt_f32_f16(static_cast<uint16_t>(a & 0x83ff)),
                large = ptx::cvt_f32_bf16(static_cast<uint16_t>(b & 0xc3ff));
    out.put(ptx::cvt_f16x2_f32(small * 0.5f, large)), out.put(ptx::cvt_bf16x2_f32(small, large));
    out.put(uint32_t{ptx::cvt_e4m3x2_f32(small * 8.0f, large)});
    out.put(small), out.put(large), out.put(uint32_t{ptx::cvt_e4m3x2_f16x2(ptx::cvt_f16x2_f32(small, large))});
    out.put(ptx::mul_rn_f32(small, large)), out.put(ptx::add_rn_f32(small, large)),
        out.put(ptx::add_rm_f32(small, large));
    out.put(ptx::add_rm_f32(small, -small)), out.put(ptx::add_rm_f32(-large, small));
    out.put(__funnelshift_l(a, b, c)), out.put(__funnelshift_r(a, b, c)), out.put(__byte_perm(a, b, c & 0x7777));
    out.put(__dp4a(static_cast<int>(a), static_cast<int>(b), static_cast<int>(c))), out.put(__dp4a(a, b, c));
    out.put(__popc(a)), out.put(__clz(static_cast<int>(b))), out.put(__ffs(static_cast<int>(c))), out.put(__brev(a)),
        out.put(__umulhi(a, b));
}

// x: positive floats.
KERNEL(approximate_functions) {
    Results<128> out{p.y, 0};
    const float v = __uint_as_float(p.x[threadIdx.x]);
    out.put(ptx::ex2_approx(v)), out.put(ptx::ex2_approx(-v)), out.put(ptx::lg2_approx(v)), out.put(ptx::rcp_approx(v));
}

KERNEL(warps) {
    Results<64> out{p.y, 0};
    const uint32_t v = p.x[threadIdx.x];
    out.put(ptx::lane_id()), out.put(ptx::warp_id());
    out.put(ptx::shfl(v, 13)), out.put(ptx::shfl_xor(v, 9)), out.put(ptx::shfl_up(v, 3)), out.put(ptx::shfl_down(v, 7));
    out.put(ptx::shfl(__uint_as_float(v), 40)), out.put(__shfl_xor_sync(0xffffffffu, v, 3, 8)),
        out.put(__shfl_up_sync(0xffffffffu, v, 3, 8));
    out.put(ptx::redux_add(v)), out.put(ptx::redux_max(v));
    out.put(uint32_t{(ptx::clock32() | 1) != 0});
}

KERNEL(global_memory) {
    Results<64> out{p.y, 0};
    const uint32_t* at = p.x + 4 * threadIdx.x;
    ptx::prefetch_L2(at);
    ptx::cp_async_bulk_prefetch_L2(p.x, 64);
    out.put(ptx::ld_global_nc_u32(at)), out.put(ptx::ld_global_nc_v2(at)), out.put(ptx::ld_global_nc_v4(at));
    out.put(ptx::ld_global_cg_u32(at)), out.put(ptx::ld_global_cg_v2(at)), out.put(ptx::ld_global_cg_v4(at));
    const uint32_t before = ptx::atom_add_acq_rel_gpu(p.z + 3, 1);
    out.put(uint32_t{before < 64});
    ptx::st_global_cs_v4(p.z + 128 + 4 * threadIdx.x, make_uint4(1, 2, 3, threadIdx.x));
    __threadfence();
    if (threadIdx.x == 5) ptx::st_release_gpu(p.z + 4, 99);
    while (ptx::ld_acquire_gpu(p.z + 4) != 99) {}
    out.put(ptx::ld_acquire_gpu(p.z + 4));
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
}

// 64 threads: shared accesses, cp.async, mbarriers, bulk copies in and out, named barriers. x: 1024 words.
KERNEL(copies) {
    Results<64> out{p.y, 0};
    uint8_t* shared = ptx::dynamic_shared();
    const uint32_t base = ptx::shared_address(shared), t = threadIdx.x, bar = base + 8192, mine = base + 16 * t;
    if (t == 0) {
        ptx::mbarrier_init(bar, 1), ptx::mbarrier_init(bar + 8, 64), ptx::mbarrier_init(bar + 16, 64);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::cp_async<16>(mine, p.x + 4 * t), ptx::cp_async<8>(mine + 1024, p.x + 2 * t),
        ptx::cp_async<4>(mine + 2048, p.x + t);
    ptx::cp_async_commit_group();
    ptx::cp_async<16>(mine + 3072, p.x + 4 * t, t % 17), ptx::cp_async<8>(mine + 1032, p.x, t % 9),
        ptx::cp_async<4>(mine + 2052, p.x, 0);
    ptx::cp_async_mbarrier_arrive_noinc(bar + 16);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<1>();
    out.put(ptx::ld_shared_v4(mine)), out.put(ptx::ld_shared_v2(mine + 1024)), out.put(ptx::ld_shared_u32(mine + 2048));
    ptx::mbarrier_wait_parity(bar + 16, 0);
    const uint32_t neighbour = base + 16 * (t ^ 1);
    out.put(ptx::ld_shared_v4(neighbour + 3072)), out.put(ptx::ld_shared_v2(neighbour + 1032)),
        out.put(ptx::ld_shared_f32(neighbour + 2052));
    ptx::cp_async_wait_all();
    ptx::bar_sync(1, 64);
    if (t == 0) {
        ptx::mbarrier_arrive_expect_tx(bar, 1536);
        ptx::cp_async_bulk_load(base + 4096, p.x + 256, 1024, bar);
        ptx::cp_async_bulk_load_hint(base + 5120, p.x + 512, 256, bar, ptx::createpolicy_evict_first());
        ptx::cp_async_bulk_load_hint(base + 5376, p.x + 576, 256, bar, ptx::createpolicy_evict_last());
    }
    while (!ptx::mbarrier_try_wait_parity(bar, 0)) {}
    out.put(ptx::ld_shared_v4(mine + 4096)), out.put(ptx::ld_shared_v2(base + 5120 + 8 * t));
    ptx::st_shared_v4(mine, make_uint4(t, 2 * t, 3 * t, 4 * t)),
        ptx::st_shared_v2(mine + 1024, make_uint2(5 * t, 6 * t));
    ptx::st_shared_u32(mine + 1032, 7 * t), ptx::st_shared_f32(mine + 1036, 0.5f * t);
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(bar + 8);
    ptx::mbarrier_wait_parity(bar + 8, 0);
    if (t < 32) ptx::bar_arrive(2, 64); else ptx::bar_sync(2, 64);
    if (t == 32) {
        ptx::cp_async_bulk_store(p.z, base, 1024), ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_store(p.z + 256, base + 1024, 1024), ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group_read<1>(), ptx::cp_async_bulk_wait_group<0>();
    }
}

// Two blocks of 64: multicast, remote loads and stores, remote arrivals, asynchronous stores. x: 1024 words.
KERNEL(clusters) {
    Results<64> out{p.y + blockIdx.x * 64 * 16, 0};
    uint8_t* shared = ptx::dynamic_shared();
    const uint32_t base = ptx::shared_address(shared), t = threadIdx.x, bar = base + 8192, mine = base + 16 * t;
    const uint32_t rank = ptx::cluster_ctarank(), other = rank ^ 1;
    out.put(rank);
    if (t == 0) {
        ptx::mbarrier_init(bar, 1), ptx::mbarrier_init(bar + 8, 128), ptx::mbarrier_init(bar + 16, 1);
        ptx::fence_mbarrier_init();
    }
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    if (t == 0) {
        ptx::mbarrier_arrive_expect_tx(bar, 2048);  // half from each block, to both
        ptx::cp_async_bulk_load_multicast(base + 1024 * rank, p.x + 256 * rank, 1024, bar, 3);
        ptx::mbarrier_arrive_expect_tx(bar + 16, 64 * 20);
    }
    ptx::mbarrier_wait_parity(bar, 0);
    out.put(ptx::ld_shared_v4(mine)), out.put(ptx::ld_shared_u32(mine + 1024));
    ptx::mbarrier_arrive_cluster(ptx::mapa(bar + 8, other));
    ptx::mbarrier_arrive_cluster(ptx::mapa(bar + 8, rank));
    ptx::mbarrier_wait_parity_acquire_cluster(bar + 8, 0);
    out.put(ptx::ld_shared_cluster_u32(ptx::mapa(base + 4 * (63 - t), other)));
    ptx::st_async_v4(ptx::mapa(mine + 4096, other), make_uint4(t, rank, 1, 2), ptx::mapa(bar + 16, other));
    ptx::st_async_u32(ptx::mapa(base + 5120 + 4 * t, other), 3 * t + rank, ptx::mapa(bar + 16, other));
    ptx::mbarrier_wait_parity(bar + 16, 0);
    out.put(ptx::ld_shared_u32(mine + 4096 + 4)), out.put(ptx::ld_shared_u32(base + 5120 + 4 * t));
    ptx::barrier_cluster_arrive_relaxed();  // no block may end while another reads from it
    ptx::barrier_cluster_wait();
}

// setmaxnreg moves registers between warpgroups; 256 threads at 128 registers each.
KERNEL(registers) {
    if (threadIdx.x < 128) ptx::setmaxnreg_dec<40>(); else ptx::setmaxnreg_inc<200>();
    p.y[threadIdx.x] = p.x[threadIdx.x] + 1;
}
