// Replaces ptx.cuh, ptx_math.cuh, ptx_wgmma.cuh and CUDA's built-ins in kernels: included first,
// it defines those headers' include guards.
#pragma once
#define ANYBIT_PTX_BASE_CUH
#define ANYBIT_PTX_MATH_CUH
#define ANYBIT_PTX_WGMMA_CUH
#define ANYBIT_PTX_WGMMA_SPARSE_CUH
#define ANYBIT_PTX_TMA_CUH

#include "device_calls.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__ static_assert(false, "kernels keep everything in ptx::dynamic_shared()")
#define DEVICE inline
#define UNROLL
#define CHECKED inline
#define NEEDS(minimum, what)
#define ANYBIT_ARCH 900
#define ANYBIT_WGMMA_ARCH 900
#define ANYBIT_FP4_ARCH 1200

// ---- CUDA's types -----------------------------------------------------------------------------------------------------

#define VECTOR(type, name, bytes2, bytes4)                                                                            \
    struct alignas(bytes2) name##2 { type x, y; };                                                                    \
    struct name##3 { type x, y, z; };                                                                                 \
    struct alignas(bytes4) name##4 { type x, y, z, w; };                                                              \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                                  \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                                       \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
VECTOR(int, int, 8, 16)
VECTOR(unsigned, uint, 8, 16)
VECTOR(float, float, 8, 16)
VECTOR(short, short, 4, 8)
VECTOR(unsigned short, ushort, 4, 8)
VECTOR(signed char, char, 2, 4)
VECTOR(unsigned char, uchar, 2, 4)
#undef VECTOR
struct dim3 { unsigned x = 1, y = 1, z = 1; };

namespace emulate {
struct Index { uint32_t x, y, z; };
struct Here { Index thread, block, block_dim, grid; };
extern const Here* here;
template <class To, class From> To bits(From v) {
    static_assert(sizeof(To) == sizeof(From), "");
    To r;
    memcpy(&r, &v, sizeof r);
    return r;
}
template <class T> uint64_t widen(T v) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    uint64_t r = 0;
    memcpy(&r, &v, sizeof v);
    return r;
}
template <class T> T narrow(uint64_t v) {
    T r;
    memcpy(&r, &v, sizeof r);
    return r;
}
}  // namespace emulate
#define threadIdx (emulate::here->thread)
#define blockIdx (emulate::here->block)
#define blockDim (emulate::here->block_dim)
#define gridDim (emulate::here->grid)
constexpr int warpSize = 32;

// ---- CUDA's functions --------------------------------------------------------------------------------------------------

inline void __syncthreads(int line = __builtin_LINE()) { emulate::barrier(0, 0, true, line); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulate::syncwarp(mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { emulate::spin("__nanosleep"); }
[[noreturn]] inline void __trap() { emulate::trap(); }

#define SHUFFLE(name, how, type)                                                                                      \
    template <class T> T name(unsigned mask, T v, type operand, int width = 32) {                                     \
        return emulate::narrow<T>(emulate::shuffle(emulate::widen(v), operand, emulate::Shuffle::how, mask, width));  \
    }
SHUFFLE(__shfl_sync, index, int)
SHUFFLE(__shfl_xor_sync, exclusive_or, int)
SHUFFLE(__shfl_up_sync, up, unsigned)
SHUFFLE(__shfl_down_sync, down, unsigned)
#undef SHUFFLE
inline unsigned __ballot_sync(unsigned mask, int p) { return emulate::ballot(p, mask, "ballot"); }
inline int __any_sync(unsigned mask, int p) { return emulate::ballot(p, mask, "any") != 0; }
inline int __all_sync(unsigned mask, int p) { return emulate::ballot(!p, mask, "all") == 0; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) { return emulate::reduce_add(v, mask); }
inline int __reduce_add_sync(unsigned mask, int v) { return static_cast<int>(emulate::reduce_add(v, mask)); }

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __brev(unsigned v) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (v >> i & 1) << (31 - i);
    return r;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned nibble = selector >> 4 * i & 15;
        unsigned byte = bytes >> 8 * (nibble & 7) & 255;
        if (nibble & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << 8 * i;
    }
    return r;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
    return ((static_cast<uint64_t>(high) << 32 | low) << (n & 31)) >> 32;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (n & 31));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
template <class A, class B, class C> C emulated_dp4a(A a, B b, C c) {
    using EA = std::conditional_t<std::is_signed_v<A>, int8_t, uint8_t>;
    using EB = std::conditional_t<std::is_signed_v<B>, int8_t, uint8_t>;
    for (int i = 0; i < 32; i += 8) c += static_cast<EA>(a >> i) * static_cast<EB>(b >> i);
    return c;
}
inline int __dp4a(int a, int b, int c) { return emulated_dp4a(a, b, c); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) { return emulated_dp4a(a, b, c); }

inline int __float_as_int(float v) { return emulate::bits<int>(v); }
inline unsigned __float_as_uint(float v) { return emulate::bits<unsigned>(v); }
inline float __int_as_float(int v) { return emulate::bits<float>(v); }
inline float __uint_as_float(unsigned v) { return emulate::bits<float>(v); }
inline int __float2int_rn(float v) { return static_cast<int>(std::nearbyint(v)); }
inline int __float2int_rd(float v) { return static_cast<int>(std::floor(v)); }
inline int __float2int_rz(float v) { return static_cast<int>(v); }
inline unsigned __float2uint_rn(float v) { return v <= 0 ? 0 : static_cast<unsigned>(std::nearbyint(v)); }
inline float __int2float_rn(int v) { return static_cast<float>(v); }
inline float __uint2float_rn(unsigned v) { return static_cast<float>(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float v) { return 1 / v; }
inline float __fsqrt_rn(float v) { return std::sqrt(v); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline float __saturatef(float v) { return v > 1 ? 1 : v > 0 ? v : 0; }
inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
template <class A, class B>
constexpr auto min(A a, B b) {
    return b < a ? std::common_type_t<A, B>(b) : std::common_type_t<A, B>(a);
}
template <class A, class B>
constexpr auto max(A a, B b) {
    return a < b ? std::common_type_t<A, B>(b) : std::common_type_t<A, B>(a);
}
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> void __stcs(T* p, T v) { *p = v; }
template <class T> void __stcg(T* p, T v) { *p = v; }
// Fibers change only inside runtime calls, so a plain read and write between two of them is atomic.
#define ATOMIC(name, result)                                                                                          \
    template <class T> __attribute__((no_sanitize("thread"))) T name(T* p, T v) {                                     \
        emulate::check_atomic(p, sizeof(T), #name);                                                                   \
        T old = *p;                                                                                                   \
        *p = result;                                                                                                  \
        return old;                                                                                                   \
    }
ATOMIC(atomicAdd, old + v)
ATOMIC(atomicMax, old < v ? v : old)
ATOMIC(atomicMin, v < old ? v : old)
ATOMIC(atomicExch, v)
ATOMIC(atomicOr, old | v)
ATOMIC(atomicAnd, old & v)
inline int atomicAdd(int* p, unsigned v) { return atomicAdd<int>(p, static_cast<int>(v)); }
inline unsigned atomicAdd(unsigned* p, int v) { return atomicAdd<unsigned>(p, static_cast<unsigned>(v)); }
inline unsigned atomicInc(unsigned* p, unsigned limit) {
    emulate::check_atomic(p, 4, "atomicInc");
    unsigned old;
    memcpy(&old, p, 4);
    const unsigned next = old >= limit ? 0 : old + 1;
    memcpy(p, &next, 4);
    return old;
}

// ---- ptx.cuh -----------------------------------------------------------------------------------------------------------

namespace ptx {

using emulate::dynamic_shared;
using emulate::shared_address;
DEVICE uint32_t lane_id() { return threadIdx.x % 32; }
DEVICE uint32_t warp_id() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
inline uint32_t cycles = 0;
DEVICE uint32_t clock32() { return cycles += 64; }  // no real time, but spinning on it ends
DEVICE uint32_t cluster_ctarank() { return emulate::cluster_rank(); }

template <class T> DEVICE T read_shared(uint32_t address, const char* what) {
    T v;
    emulate::read_shared(&v, address, sizeof v, what);
    return v;
}
template <class T>
DEVICE void write_shared(uint32_t address, T v, const char* what) {
    emulate::write_shared(address, &v, sizeof v, what);
}
template <class T> DEVICE T read_global(const void* p, const char* what) {
    T v;
    emulate::read_global(&v, p, sizeof v, what);
    return v;
}
template <class T>
DEVICE void write_global(void* p, T v, const char* what) {
    emulate::write_global(p, &v, sizeof v, what);
}

DEVICE uint32_t ld_shared_u32(uint32_t shared) { return read_shared<uint32_t>(shared, "ld_shared_u32"); }
DEVICE float ld_shared_f32(uint32_t shared) { return read_shared<float>(shared, "ld_shared_f32"); }
DEVICE uint2 ld_shared_v2(uint32_t shared) { return read_shared<uint2>(shared, "ld_shared_v2"); }
DEVICE uint4 ld_shared_v4(uint32_t shared) { return read_shared<uint4>(shared, "ld_shared_v4"); }
DEVICE void st_shared_u32(uint32_t shared, uint32_t v) { write_shared(shared, v, "st_shared_u32"); }
DEVICE void st_shared_f32(uint32_t shared, float v) { write_shared(shared, v, "st_shared_f32"); }
DEVICE void st_shared_v2(uint32_t shared, uint2 v) { write_shared(shared, v, "st_shared_v2"); }
DEVICE void st_shared_v4(uint32_t shared, uint4 v) { write_shared(shared, v, "st_shared_v4"); }
DEVICE void ldmatrix_x2(uint32_t (&r)[2], uint32_t shared) { emulate::ldmatrix(r, shared, 2, false); }
DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) { emulate::ldmatrix(r, shared, 4, false); }
DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t shared) { emulate::ldmatrix(r, shared, 4, true); }
DEVICE void stmatrix_x4_trans(uint32_t shared, const uint32_t (&r)[4]) { emulate::stmatrix(shared, r, 4, true); }
using emulate::movmatrix_trans;

DEVICE uint32_t ld_global_nc_u32(const void* p) { return read_global<uint32_t>(p, "ld_global_nc_u32"); }
DEVICE uint2 ld_global_nc_v2(const void* p) { return read_global<uint2>(p, "ld_global_nc_v2"); }
DEVICE uint4 ld_global_nc_v4(const void* p) { return read_global<uint4>(p, "ld_global_nc_v4"); }
DEVICE uint32_t ld_global_cg_u32(const void* p) { return read_global<uint32_t>(p, "ld_global_cg_u32"); }
DEVICE uint2 ld_global_cg_v2(const void* p) { return read_global<uint2>(p, "ld_global_cg_v2"); }
DEVICE uint4 ld_global_cg_v4(const void* p) { return read_global<uint4>(p, "ld_global_cg_v4"); }
DEVICE void st_global_cs_v4(void* p, uint4 v) { write_global(p, v, "st_global_cs_v4"); }
DEVICE uint64_t createpolicy_evict_first() { return 0; }
DEVICE uint64_t createpolicy_evict_last() { return 0; }
DEVICE void prefetch_L2(const void*) {}
DEVICE uint32_t ld_acquire_gpu(const uint32_t* p) {
    emulate::spin("ld_acquire_gpu");
    return read_global<uint32_t>(p, "ld_acquire_gpu");
}
DEVICE void st_release_gpu(uint32_t* p, uint32_t v) { write_global(p, v, "st_release_gpu"); }
DEVICE uint64_t ld_acquire_gpu(const uint64_t* p) {
    emulate::spin("ld_acquire_gpu");
    return read_global<uint64_t>(p, "ld_acquire_gpu");
}
DEVICE void st_release_gpu(uint64_t* p, uint64_t v) { write_global(p, v, "st_release_gpu"); }
DEVICE uint32_t atom_add_acq_rel_gpu(uint32_t* p, uint32_t v) { return atomicAdd(p, v); }

template <int bytes>
DEVICE void cp_async(uint32_t shared, const void* global, int valid = bytes) {
    emulate::cp_async(shared, global, bytes, valid);
}
using emulate::cp_async_commit_group;
using emulate::cp_async_mbarrier_arrive_noinc;
using emulate::cp_async_wait_all;
template <int groups> DEVICE void cp_async_wait_group() { emulate::cp_async_wait_group(groups); }
DEVICE void bar_sync(int id, int threads) { emulate::barrier(id, threads, true, 0); }
DEVICE void bar_arrive(int id, int threads) { emulate::barrier(id, threads, false, 0); }
using emulate::mbarrier_init;
DEVICE void mbarrier_arrive(uint32_t barrier) { emulate::mbarrier_arrive(barrier, "mbarrier_arrive"); }
DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    emulate::mbarrier_expect_tx(barrier, bytes);
    emulate::mbarrier_arrive(barrier, "mbarrier_arrive_expect_tx");
}
DEVICE void mbarrier_arrive_cluster(uint32_t cluster) { emulate::mbarrier_arrive(cluster, "mbarrier_arrive_cluster"); }
DEVICE bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
    return emulate::mbarrier_wait(barrier, parity), true;
}
DEVICE void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) { emulate::mbarrier_wait(barrier, parity); }
DEVICE void mbarrier_wait_parity_acquire_cluster(uint32_t barrier, uint32_t parity) {
    emulate::mbarrier_wait(barrier, parity);
}
DEVICE void fence_mbarrier_init() {}
using emulate::fence_proxy_async;
using emulate::cp_async_bulk_load;
DEVICE void cp_async_bulk_load_hint(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier, uint64_t) {
    emulate::cp_async_bulk_load(shared, global, bytes, barrier);
}
using emulate::cp_async_bulk_commit_group;
using emulate::cp_async_bulk_load_multicast;
using emulate::cp_async_bulk_store;
template <int groups> DEVICE void cp_async_bulk_wait_group() { emulate::cp_async_bulk_wait_group(groups, false); }
template <int groups> DEVICE void cp_async_bulk_wait_group_read() { emulate::cp_async_bulk_wait_group(groups, true); }
DEVICE void cp_async_bulk_prefetch_L2(const void* global, uint32_t bytes) {  // reads nothing, but checks the range
    uint8_t end;
    emulate::read_global(&end, global, 1, "cp_async_bulk_prefetch_L2");
    emulate::read_global(&end, static_cast<const uint8_t*>(global) + bytes - 1, 1, "cp_async_bulk_prefetch_L2");
}
struct alignas(128) TensorMap {
    uint64_t words[16];
};
DEVICE void prefetch_tensormap(const TensorMap*) {}
DEVICE void cp_async_bulk_tensor_2d(uint32_t shared, const TensorMap* map, int x, int y, uint32_t barrier) {
    emulate::cp_async_bulk_tensor_2d(shared, map, x, y, barrier);
}
DEVICE void cp_async_bulk_tensor_2d_multicast(uint32_t shared, const TensorMap* map, int x, int y, uint32_t barrier,
                                           uint16_t blocks) {
    emulate::cp_async_bulk_tensor_2d_multicast(shared, map, x, y, barrier, blocks);
}
DEVICE void cp_async_bulk_tensor_store_2d(const TensorMap* map, int x, int y, uint32_t shared) {
    emulate::cp_async_bulk_tensor_store_2d(map, x, y, shared);
}
DEVICE void barrier_cluster_arrive() { emulate::barrier_cluster_arrive(true); }
DEVICE void barrier_cluster_arrive_relaxed() { emulate::barrier_cluster_arrive(false); }
using emulate::barrier_cluster_wait;
using emulate::mapa;
DEVICE uint32_t ld_shared_cluster_u32(uint32_t cluster) { return read_shared<uint32_t>(cluster, "ld_shared_cluster_u32"); }
DEVICE void st_async_u32(uint32_t cluster, uint32_t v, uint32_t barrier) { emulate::st_async(cluster, &v, 4, barrier); }
DEVICE void st_async_v4(uint32_t cluster, uint4 v, uint32_t barrier) { emulate::st_async(cluster, &v, 16, barrier); }
DEVICE void griddepcontrol_launch_dependents() {}
using emulate::griddepcontrol_wait;
template <int registers>
DEVICE void setmaxnreg_inc() {
    static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256, "");
}
template <int registers>
DEVICE void setmaxnreg_dec() {
    static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256, "");
}
template <class T> DEVICE T shfl(T v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
template <class T> DEVICE T shfl_xor(T v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
template <class T> DEVICE T shfl_up(T v, int delta) { return __shfl_up_sync(0xffffffffu, v, delta); }
template <class T> DEVICE T shfl_down(T v, int delta) { return __shfl_down_sync(0xffffffffu, v, delta); }
DEVICE uint32_t redux_add(uint32_t v) { return __reduce_add_sync(0xffffffffu, v); }
DEVICE uint32_t redux_max(uint32_t v) {
    for (int mask = 16; mask > 0; mask /= 2) {
        const uint32_t other = shfl_xor(v, mask);
        v = other > v ? other : v;
    }
    return v;
}

}  // namespace ptx

#include "device_math.h"
