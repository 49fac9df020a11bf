// Small kernels, each right when Config::fault is false, and wrong in one way when it is true.
#include "common/ptx/wgmma.cuh"

struct Params {
    const uint32_t* x;
    uint32_t* y;
    int n;
};

#define KERNEL(name)                     \
    template <class Config>              \
    __global__ void __launch_bounds__(Config::threads) name(const __grid_constant__ Params p)

// Reverses x within a block, through shared memory.
KERNEL(missing_barrier) {
    uint32_t* staged = reinterpret_cast<uint32_t*>(ptx::dynamic_shared());
    staged[threadIdx.x] = p.x[threadIdx.x];
    if constexpr (!Config::fault) __syncthreads();
    p.y[threadIdx.x] = staged[Config::threads - 1 - threadIdx.x];
}

KERNEL(missing_wait) {
    uint32_t* staged = reinterpret_cast<uint32_t*>(ptx::dynamic_shared());
    ptx::cp_async<4>(ptx::shared_address(staged + threadIdx.x), p.x + threadIdx.x);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<Config::fault ? 1 : 0>();
    p.y[threadIdx.x] = staged[threadIdx.x];
}

KERNEL(divergent_barrier) {
    if (Config::fault && threadIdx.x >= 32) {
        p.y[threadIdx.x] = 1;
        __syncthreads();
    } else {
        p.y[threadIdx.x] = 1;
        __syncthreads();
    }
}

KERNEL(skipped_barrier) {
    p.y[threadIdx.x] = 1;
    if (Config::fault && threadIdx.x >= 32) return;
    __syncthreads();
}

KERNEL(divergent_shuffle) {
    uint32_t v = threadIdx.x;
    if (Config::fault && threadIdx.x == 7) v = ptx::shfl_up(v, 1);
    else v = ptx::shfl(v, 1);
    p.y[threadIdx.x] = v;
}

KERNEL(global_overrun) { p.y[threadIdx.x] = p.x[threadIdx.x + (Config::fault ? 1 : 0)]; }

KERNEL(misaligned_vector) {
    if (threadIdx.x < Config::threads / 4 - 1)
        reinterpret_cast<uint4*>(p.y)[threadIdx.x] = *reinterpret_cast<const uint4*>(p.x + 4 * threadIdx.x + (Config::fault ? 2 : 0));
}

KERNEL(null_pointer) { p.y[threadIdx.x] = (Config::fault ? static_cast<const uint32_t*>(nullptr) : p.x)[threadIdx.x]; }

KERNEL(shared_overrun) {
    uint32_t* staged = reinterpret_cast<uint32_t*>(ptx::dynamic_shared());
    staged[threadIdx.x + (Config::fault ? 1 : 0)] = 1;
    p.y[threadIdx.x] = 1;
}

KERNEL(copy_overrun) {
    const uint32_t at = ptx::shared_address(ptx::dynamic_shared()) + 16 * threadIdx.x;
    if (threadIdx.x < Config::threads / 4) ptx::cp_async<16>(at, p.x + 4 * threadIdx.x + (Config::fault ? 4 : 0));
    ptx::cp_async_wait_all();
    p.y[threadIdx.x] = 1;
}

// One bulk copy of the whole of x.
KERNEL(wrong_expect_tx) {
    uint8_t* shared = ptx::dynamic_shared();
    const uint32_t base = ptx::shared_address(shared), bar = base + 4 * Config::threads;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::mbarrier_arrive_expect_tx(bar, 4 * Config::threads + Config::fault);
        ptx::cp_async_bulk_load(base, p.x, 4 * Config::threads, bar);
    }
    ptx::mbarrier_wait_parity(bar, 0);
    p.y[threadIdx.x] = reinterpret_cast<uint32_t*>(shared)[threadIdx.x];
}

KERNEL(bulk_without_wait) {
    uint8_t* shared = ptx::dynamic_shared();
    const uint32_t base = ptx::shared_address(shared), bar = base + 4 * Config::threads;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::mbarrier_arrive_expect_tx(bar, 4 * Config::threads);
        ptx::cp_async_bulk_load(base, p.x, 4 * Config::threads, bar);
    }
    __syncthreads();
    if (!Config::fault) ptx::mbarrier_wait_parity(bar, 0);
    p.y[threadIdx.x] = reinterpret_cast<uint32_t*>(shared)[threadIdx.x];
}

// Copies x through a ring: warp 2 fills its stages, warps 0 and 1 read them by turns. With an odd number of stages each of
// them comes to stages of which it has not seen the use before.
KERNEL(ring) {
    constexpr int stages = Config::fault ? 3 : 4;
    uint8_t* shared = ptx::dynamic_shared();
    const uint32_t base = ptx::shared_address(shared), full = base + 128 * stages, empty = full + 8 * stages;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * stages; i++) ptx::mbarrier_init(full + 8 * i, 1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (warp == 2) {
        for (int i = 0; lane == 0 && i < p.n / 32; i++) {
            ptx::mbarrier_wait_parity(empty + 8 * (i % stages), (i / stages & 1) ^ 1);
            ptx::mbarrier_arrive_expect_tx(full + 8 * (i % stages), 128);
            ptx::cp_async_bulk_load(base + 128 * (i % stages), p.x + 32 * i, 128, full + 8 * (i % stages));
        }
        return;
    }
    for (int i = warp; i < p.n / 32; i += 2) {
        ptx::mbarrier_wait_parity(full + 8 * (i % stages), i / stages & 1);
        p.y[32 * i + lane] = reinterpret_cast<uint32_t*>(shared)[32 * (i % stages) + lane];
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(empty + 8 * (i % stages));
    }
}

KERNEL(uninitialized_mbarrier) {
    const uint32_t bar = ptx::shared_address(ptx::dynamic_shared());
    if (!Config::fault) {
        if (threadIdx.x == 0) ptx::mbarrier_init(bar, Config::threads);
        __syncthreads();
    }
    ptx::mbarrier_arrive(bar);
    ptx::mbarrier_wait_parity(bar, 0);
    p.y[threadIdx.x] = 1;
}

// A bulk store of what all threads wrote.
KERNEL(missing_proxy_fence) {
    uint8_t* shared = ptx::dynamic_shared();
    reinterpret_cast<uint32_t*>(shared)[threadIdx.x] = p.x[threadIdx.x];
    if constexpr (!Config::fault) ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::cp_async_bulk_store(p.y, ptx::shared_address(shared), 4 * Config::threads);
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group<0>();
    }
}

KERNEL(store_source_reused) {
    uint32_t* staged = reinterpret_cast<uint32_t*>(ptx::dynamic_shared());
    staged[threadIdx.x] = p.x[threadIdx.x];
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::cp_async_bulk_store(p.y, ptx::shared_address(staged), 4 * Config::threads);
        ptx::cp_async_bulk_commit_group();
        if (!Config::fault) ptx::cp_async_bulk_wait_group_read<0>();
        staged[0] = 77;
        ptx::cp_async_bulk_wait_group<0>();
    }
}

// y[row] = the number of ones that rows `row` and `row` of x, 64 x 256 bits, have in common: x times x.
KERNEL(product) {
    uint8_t* shared = ptx::dynamic_shared();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < 64 * 8; i += Config::threads) {
        const int row = i / 8, chunk = i % 8 / 4;
        reinterpret_cast<uint32_t*>(shared)[row * 8 + ((chunk ^ (row >> 2 & 1)) * 4) + i % 4] = p.x[i];
    }
    if (Config::fault != 3) ptx::fence_proxy_async();
    __syncthreads();
    const uint64_t rows = ptx::wgmma_descriptor(ptx::shared_address(shared), ptx::Swizzle::bytes_32, 256);
    int32_t d[32];
    if (Config::fault != 1) ptx::wgmma_fence();
    ptx::wgmma_b1<64>(d, rows, rows, false);
    ptx::wgmma_commit_group();
    if (Config::fault == 4 && threadIdx.x == 0) shared[3] ^= 1;
    if (Config::fault != 2) ptx::wgmma_wait_group<0>();
    for (int i = 0; i < 32; i++) {
        const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        if (row == column) p.y[row] = d[i];
    }
    if (Config::fault == 2) ptx::wgmma_wait_group<0>();
}

// Each block of the cluster reads what the other has written.
KERNEL(cluster_exchange) {
    uint8_t* shared = ptx::dynamic_shared();
    const uint32_t base = ptx::shared_address(shared), other = ptx::cluster_ctarank() ^ 1;
    reinterpret_cast<uint32_t*>(shared)[threadIdx.x] = p.x[blockIdx.x * Config::threads + threadIdx.x];
    if (Config::fault != 1) {
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    }
    p.y[blockIdx.x * Config::threads + threadIdx.x] =
        ptx::ld_shared_cluster_u32(ptx::mapa(base + 4 * threadIdx.x, other));
    if (Config::fault != 2) {  // a block must not end while the other reads from it
        ptx::barrier_cluster_arrive();
        ptx::barrier_cluster_wait();
    }
}

// The last block to arrive adds what the others left.
KERNEL(last_arriver) {
    const uint32_t arrived = ptx::atom_add_acq_rel_gpu(p.y + 1, 1);
    if (Config::fault) while (ptx::ld_acquire_gpu(p.y + 1) <= gridDim.x) {}
    if (arrived == gridDim.x - 1) p.y[0] = ptx::ld_acquire_gpu(p.y + 1);
}

KERNEL(early_read) {
    if (!Config::fault) ptx::griddepcontrol_wait();
    if (Config::fault != 2) p.y[threadIdx.x] = p.x[threadIdx.x];
}
