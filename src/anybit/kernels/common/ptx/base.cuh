// Every PTX instruction that anybit's kernels use, one function each, named after it.
//
// The headers of this folder are the only ones with inline asm, and the only seam of the host emulator, which defines their
// include guards and implements the same functions on a CPU. Kernels are plain C++ over these names.
//
// Conventions
// - A `uint32_t` named `shared` is an address in the shared window (see shared_address); `cluster` one mapped by mapa.
// - f16, bf16 and fp8 values are raw bits in uint16_t / uint32_t words, first element in the low bits: no <cuda_fp16.h>,
//   which would take longer to compile than most kernels.
// - Fragments are arrays of registers in the order of the PTX manual; `mma_*` accumulates: d += a * b.
// - An instruction that the architecture lacks fails a static_assert (NEEDS) that says so, only where it is called.
#ifndef ANYBIT_PTX_BASE_CUH
#define ANYBIT_PTX_BASE_CUH

#ifdef __CUDACC_RTC__
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using size_t = decltype(sizeof(0));
#else
#include <cstdint>
#endif

#ifdef __CUDA_ARCH__
#define ANYBIT_ARCH __CUDA_ARCH__
#else
#define ANYBIT_ARCH 900  // host pass: generates no device code, so nothing needs to be refused
#endif
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define ANYBIT_WGMMA_ARCH 900
#else
#define ANYBIT_WGMMA_ARCH 0
#endif
#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL)
#define ANYBIT_FP4_ARCH 1200
#else
#define ANYBIT_FP4_ARCH 0
#endif

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")  // the loop that follows, whose trip count is a constant
// For instructions that not every architecture has: a template, so that NEEDS is checked only where a kernel calls it.
#define CHECKED template <int arch = ANYBIT_ARCH> DEVICE
#define NEEDS(minimum, what) static_assert(arch >= minimum, what)

namespace ptx {

// ---- Special registers ---------------------------------------------------------------------------------------------

DEVICE uint32_t lane_id() { uint32_t r; asm("mov.u32 %0, %%laneid;" : "=r"(r)); return r; }
// Warp index in the CTA; the shuffle makes it warp-uniform for the compiler.
DEVICE uint32_t warp_id() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
DEVICE uint32_t clock32() { uint32_t r; asm volatile("mov.u32 %0, %%clock;" : "=r"(r)); return r; }
CHECKED uint32_t cluster_ctarank() {
    NEEDS(900, "clusters need sm_90 or later");
    uint32_t r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r;
}

// ---- Shared memory -------------------------------------------------------------------------------------------------

// The CTA's dynamic shared memory, 1024-byte aligned; kernels use no static shared memory.
DEVICE uint8_t* dynamic_shared() { extern __shared__ __align__(1024) uint8_t anybit_shared[]; return anybit_shared; }
DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

DEVICE uint32_t ld_shared_u32(uint32_t shared) {
    uint32_t v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared) : "memory"); return v;
}
DEVICE float ld_shared_f32(uint32_t shared) {
    float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(shared) : "memory"); return v;
}
DEVICE uint2 ld_shared_v2(uint32_t shared) {
    uint2 v; asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory"); return v;
}
DEVICE uint4 ld_shared_v4(uint32_t shared) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared) : "memory");
    return v;
}
DEVICE void st_shared_u32(uint32_t shared, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(shared), "r"(v) : "memory");
}
DEVICE void st_shared_f32(uint32_t shared, float v) {
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(shared), "f"(v) : "memory");
}
DEVICE void st_shared_v2(uint32_t shared, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" :: "r"(shared), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE void st_shared_v4(uint32_t shared, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Each lane gives the address of one 16-byte row: lanes 0-7 of matrix 0, 8-15 of matrix 1, and so on.
DEVICE void ldmatrix_x2(uint32_t (&r)[2], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(shared) : "memory");
}
DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
}
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared) : "memory");
}
CHECKED void stmatrix_x4_trans(uint32_t shared, const uint32_t (&r)[4]) {
    NEEDS(900, "stmatrix needs sm_90 or later");
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(shared), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
// Transposes an 8 x 8 matrix of 16-bit elements held as an MMA fragment.
DEVICE uint32_t movmatrix_trans(uint32_t a) {
    uint32_t d; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a)); return d;
}

// ---- Global memory -------------------------------------------------------------------------------------------------
// Loads are volatile so that none moves above griddepcontrol_wait.

// For data that nothing writes while the kernel runs; no L1 allocation.
DEVICE uint32_t ld_global_nc_u32(const void* p) {
    uint32_t v; asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p)); return v;
}
DEVICE uint2 ld_global_nc_v2(const void* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
DEVICE uint4 ld_global_nc_v4(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
// Cached in L2 only: sees writes of other CTAs of this launch.
DEVICE uint32_t ld_global_cg_u32(const void* p) {
    uint32_t v; asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
DEVICE uint2 ld_global_cg_v2(const void* p) {
    uint2 v; asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory"); return v;
}
DEVICE uint4 ld_global_cg_v4(const void* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
// A streaming store, for results that this kernel does not read again.
DEVICE void st_global_cs_v4(void* p, uint4 v) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE uint64_t createpolicy_evict_first() {
    uint64_t r; asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(r)); return r;
}
DEVICE uint64_t createpolicy_evict_last() {
    uint64_t r; asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(r)); return r;
}
DEVICE void prefetch_L2(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }

DEVICE uint32_t ld_acquire_gpu(const uint32_t* p) {
    uint32_t v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
DEVICE void st_release_gpu(uint32_t* p, uint32_t v) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
DEVICE uint64_t ld_acquire_gpu(const uint64_t* p) {
    uint64_t v; asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); return v;
}
DEVICE void st_release_gpu(uint64_t* p, uint64_t v) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory");
}
DEVICE uint32_t atom_add_acq_rel_gpu(uint32_t* p, uint32_t v) {
    uint32_t r;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(r) : "l"(p), "r"(v) : "memory");
    return r;
}

// ---- cp.async: copies of 4, 8 or 16 bytes; each thread waits for its own --------------------------------------------

// Copies the first `valid` bytes and zero-fills the rest; `valid` 0 reads nothing.
template <int bytes> DEVICE void cp_async(uint32_t shared, const void* global, int valid = bytes) {
    static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
    if constexpr (bytes == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                     :: "r"(shared), "l"(global), "r"(valid) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :: "r"(shared), "l"(global), "n"(bytes), "r"(valid) : "memory");
}
DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups> DEVICE void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;"
                                                                    :: "n"(groups) : "memory"); }
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Arrives on the mbarrier when all earlier cp.async of this thread have landed; counts as one expected arrival.
DEVICE void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(barrier) : "memory");
}

// ---- Named barriers and mbarriers -----------------------------------------------------------------------------------

// Named barrier `id` (1 to 15; 0 is __syncthreads) for `threads` threads, whole warps.
DEVICE void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory"); }
DEVICE void bar_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory"); }

DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" :: "r"(barrier) : "memory");
}
CHECKED void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    NEEDS(900, "mbarrier transaction counts need sm_90 or later");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// Arrives on another CTA's mbarrier (address from mapa), with the default .cta release: the .cluster one costs about 20 us
// over a kernel's loop.
CHECKED void mbarrier_arrive_cluster(uint32_t cluster) {
    NEEDS(900, "clusters need sm_90 or later");
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(cluster) : "memory");
}
// Whether the phase of this parity has completed; may suspend the thread for a while first.
CHECKED bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
    NEEDS(900, "mbarrier.try_wait needs sm_90 or later");
    uint32_t r;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(r) : "r"(barrier), "r"(parity) : "memory");
    return r != 0;
}
// Waits until the phase of this parity has completed; a fresh mbarrier counts as having completed parity 1.
CHECKED void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) {
    while (!mbarrier_try_wait_parity<arch>(barrier, parity)) {}
}
// As above, with .cluster acquire: sees what other CTAs released before they arrived.
CHECKED void mbarrier_wait_parity_acquire_cluster(uint32_t barrier, uint32_t parity) {
    NEEDS(900, "clusters need sm_90 or later");
    uint32_t r;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(r) : "r"(barrier), "r"(parity) : "memory");
    } while (r == 0);
}

// Makes mbarrier_init visible to the cluster's other CTAs and to bulk copies.
CHECKED void fence_mbarrier_init() {
    NEEDS(900, "fence.mbarrier_init needs sm_90 or later");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Needed between this thread's generic writes to shared memory and their reads by wgmma or a bulk copy.
CHECKED void fence_proxy_async() {
    NEEDS(900, "the async proxy needs sm_90 or later");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Bulk copies: 16-byte aligned, a multiple of 16 bytes -----------------------------------------------------------

CHECKED void cp_async_bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
    NEEDS(900, "bulk copies need sm_90 or later");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared), "l"(global), "r"(bytes), "r"(barrier) : "memory");
}
CHECKED void cp_async_bulk_load_hint(
    uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier, uint64_t policy) {
    NEEDS(900, "bulk copies need sm_90 or later");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 :: "r"(shared), "l"(global), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
// Multicast: to the same offset, signalling the mbarrier at the same offset, in every CTA whose bit is set.
CHECKED void cp_async_bulk_load_multicast(
    uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier, uint16_t blocks) {
    NEEDS(900, "bulk copies need sm_90 or later");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 :: "r"(shared), "l"(global), "r"(bytes), "r"(barrier), "h"(blocks) : "memory");
}
CHECKED void cp_async_bulk_store(void* global, uint32_t shared, uint32_t bytes) {
    NEEDS(900, "bulk copies need sm_90 or later");
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(global), "r"(shared), "r"(bytes) : "memory");
}
CHECKED void cp_async_bulk_commit_group() {
    NEEDS(900, "bulk copies need sm_90 or later");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int groups, int arch = ANYBIT_ARCH> DEVICE void cp_async_bulk_wait_group() {
    NEEDS(900, "bulk copies need sm_90 or later");
    asm volatile("cp.async.bulk.wait_group %0;" :: "n"(groups) : "memory");
}
// Waits only until the shared-memory source has been read and may be overwritten.
template <int groups, int arch = ANYBIT_ARCH> DEVICE void cp_async_bulk_wait_group_read() {
    NEEDS(900, "bulk copies need sm_90 or later");
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(groups) : "memory");
}
CHECKED void cp_async_bulk_prefetch_L2(const void* global, uint32_t bytes) {
    NEEDS(900, "bulk copies need sm_90 or later");
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(global), "r"(bytes) : "memory");
}

// ---- Clusters -------------------------------------------------------------------------------------------------------

CHECKED void barrier_cluster_arrive() {
    NEEDS(900, "clusters need sm_90 or later");
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Without memory ordering: signals progress only.
CHECKED void barrier_cluster_arrive_relaxed() {
    NEEDS(900, "clusters need sm_90 or later");
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
CHECKED void barrier_cluster_wait() {
    NEEDS(900, "clusters need sm_90 or later");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Maps `shared` to CTA `rank` of the cluster.
CHECKED uint32_t mapa(uint32_t shared, uint32_t rank) {
    NEEDS(900, "clusters need sm_90 or later");
    uint32_t r; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared), "r"(rank)); return r;
}
CHECKED uint32_t ld_shared_cluster_u32(uint32_t cluster) {
    NEEDS(900, "clusters need sm_90 or later");
    uint32_t v; asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(cluster) : "memory"); return v;
}
// Asynchronous stores to another CTA that count their bytes on an mbarrier there.
CHECKED void st_async_u32(uint32_t cluster, uint32_t v, uint32_t cluster_barrier) {
    NEEDS(900, "clusters need sm_90 or later");
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 :: "r"(cluster), "r"(v), "r"(cluster_barrier) : "memory");
}
CHECKED void st_async_v4(uint32_t cluster, uint4 v, uint32_t cluster_barrier) {
    NEEDS(900, "clusters need sm_90 or later");
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];"
                 :: "r"(cluster), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(cluster_barrier) : "memory");
}

// ---- Programmatic dependent launch, registers -----------------------------------------------------------------------
// Both are no-ops before sm_90, where a kernel starts only after the previous one has ended.

DEVICE void griddepcontrol_launch_dependents() {
#if ANYBIT_ARCH >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Returns once the writes of all earlier kernels of the stream are visible.
DEVICE void griddepcontrol_wait() {
#if ANYBIT_ARCH >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
template <int registers, int arch = ANYBIT_WGMMA_ARCH> DEVICE void setmaxnreg_inc() {
    NEEDS(900, "setmaxnreg needs sm_90a");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(registers));
}
template <int registers, int arch = ANYBIT_WGMMA_ARCH> DEVICE void setmaxnreg_dec() {
    NEEDS(900, "setmaxnreg needs sm_90a");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(registers));
}

// ---- Warps ----------------------------------------------------------------------------------------------------------
// All 32 lanes take part; T is any type that the shuffle intrinsics take.

template <class T> DEVICE T shfl(T v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
template <class T> DEVICE T shfl_xor(T v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
template <class T> DEVICE T shfl_up(T v, int delta) { return __shfl_up_sync(0xffffffffu, v, delta); }
template <class T> DEVICE T shfl_down(T v, int delta) { return __shfl_down_sync(0xffffffffu, v, delta); }
DEVICE uint32_t redux_add(uint32_t v) { return __reduce_add_sync(0xffffffffu, v); }
DEVICE uint32_t redux_max(uint32_t v) { return __reduce_max_sync(0xffffffffu, v); }

}  // namespace ptx

#include "common/ptx/math.cuh"

#endif  // ANYBIT_PTX_BASE_CUH
